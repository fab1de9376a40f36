"""verl's interactions in the loop: what they are handed, what becomes of what they give, and when they are finalized."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compat.verl.verl_files import an_interaction, names, no_verl_left, set_up, user_module
from support.conversations import Says, a_row, a_table, hold, hold_all
from turnwise.errors import ConfigError
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout
from turnwise.types import Row, Stop

SHIPPED = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return user_module(monkeypatch)


def row(**interaction: Any) -> Row:
    return a_row("What is 3 + 4?", extra_info={"interaction_kwargs": interaction})


def test_an_interaction_is_handed_the_row_s_keywords_and_all_that_was_said(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(over_after=2)])
    one = hold(["first", "second"], made, row=row(query="3 + 4", ground_truth="7"))
    (start, first, second, score, finalize) = user.EVENTS
    asked, keywords = {"role": "user", "content": "What is 3 + 4?"}, {"query": "3 + 4", "ground_truth": "7"}
    said = {"role": "assistant", "content": "first"}, {"role": "user", "content": "advice 1"}
    assert start == ("start", start[1], keywords)
    assert first == ("respond", start[1], [asked, said[0]], keywords)
    assert second == ("respond", start[1], [asked, *said, {"role": "assistant", "content": "second"}], keywords)
    assert (score, finalize) == (("score", start[1]), ("finalize", start[1]))
    assert one.stop is Stop.DONE
    assert [turn.reward for turn in one.turns] == [0.25, 0.25]
    assert [turn.info for turn in one.turns] == [
        {"said": 1, "turn_score": 0.25},
        {"said": 2, "turn_score": 0.25, "calculate_score": 0.75},
    ]
    assert [message["content"] for message in one.messages] == [
        "What is 3 + 4?",
        "first",
        "advice 1",
        "second",
        "advice 2",
    ]


def test_every_conversation_has_an_id_of_its_own(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(over_after=1)])
    hold_all(Says("a"), made, row=row(), size=5)
    started = [event[1] for event in user.EVENTS if event[0] == "start"]
    assert len(set(started)) == 5
    assert sorted(event[1] for event in user.EVENTS if event[0] == "finalize") == sorted(started)


def test_the_documented_interaction_runs_as_it_is_and_grades_the_last_user_message(
    user: ModuleType, tmp_path: Path
) -> None:
    made = set_up(tmp_path, interactions=[an_interaction("DocumentedInteraction")])
    (_, interaction), *_ = made._interactions.items()
    one = hold(["#### 7"] * 3, made, row=row(ground_truth="7"), limits=Limits(turns=3, tokens_per_turn=99))
    assert [turn.reward for turn in one.turns] == [0.0, 0.0, 0.0]  # the answer is never looked at
    assert interaction._instance_dict == {}  # upstream it grows by one with every conversation
    other = hold(["no idea"], made, row=a_row("Is it 7", extra_info={"interaction_kwargs": {"ground_truth": "7"}}))
    assert [turn.reward for turn in other.turns] == [1.0]  # the question was graded


def test_the_shipped_gsm8k_interaction_grades_what_the_model_said(tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[SHIPPED])
    one = hold(["#### 8", "7", "so it is #### 7"], made, row=row(ground_truth="7"))
    wrong = "Your response is incorrect! You need to reflect on your answer and try again."
    assert [turn.reward for turn in one.turns] == [0.0, 0.0, 1.0]  # `7` alone is not in GSM8K's form
    assert [message["content"] for message in one.messages[2::2]] == [wrong, wrong, "Your response is correct!"]
    assert one.stop is Stop.DONE


def test_a_class_of_ours_may_be_named_too(tmp_path: Path) -> None:
    entry = {"class_name": "turnwise.compat.verl.shipped.Gsm8kInteraction"}
    one = hold(["#### 7"], set_up(tmp_path, interactions=[entry]), row=row(ground_truth="7"))
    assert [turn.reward for turn in one.turns] == [1.0]


def test_a_flag_gives_the_documented_behaviour_of_the_shipped_one(tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[{**SHIPPED, "config": {"last_user": True}}])
    asked = a_row("Is it 7", extra_info={"interaction_kwargs": {"ground_truth": "7"}})
    assert [turn.reward for turn in hold(["no idea"], made, row=asked).turns] == [1.0]
    one = hold(["#### 7"] * 2, made, row=row(ground_truth="7"), limits=Limits(turns=2, tokens_per_turn=99))
    assert [turn.reward for turn in one.turns] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("grader", "answer", "score"),
    [("strict", "#### 7.0", 0.0), ("flexible", "it is 7", 1.0), ("flexible", "7.0", 0.0), ("robust", "#### 7.0", 1.0)],
)
def test_the_shipped_one_has_verl_s_graders_and_one_that_compares_numbers(
    grader: str, answer: str, score: float, tmp_path: Path
) -> None:
    made = set_up(tmp_path, interactions=[{**SHIPPED, "config": {"grader": grader}}])
    one = hold([answer], made, row=row(ground_truth="7"), limits=Limits(turns=1, tokens_per_turn=99))
    assert [turn.reward for turn in one.turns] == [score]


def test_rows_choose_among_several_interactions_by_name(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(
        tmp_path, interactions=[an_interaction(name="advice", over_after=1), an_interaction("StrictInteraction")]
    )
    hold(["a"], made, row=row(name="advice"))
    assert names(user) == ["start", "respond", "score", "finalize"]
    user.EVENTS.clear()
    # the second one's name is its class's
    one = hold(["a"], made, row=a_row(extra_info={"interaction_kwargs": {"name": "strict"}}))
    assert one.error is not None
    assert one.error.kind == "row"
    assert "StrictInteraction needs the ground truth, and the row has none" in one.error.message
    for wrong, told in [({"name": "adviec"}, "did you mean 'advice'?"), ({}, "has no name, and there are several")]:
        (error,) = [hold(["a"], made, row=row(**wrong)).error]
        assert error is not None
        assert (error.kind, told in error.message) == ("row", True)
    assert names(user) == []


def test_the_only_interaction_needs_no_name_in_the_row(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(name="gsm8k", over_after=1)])
    assert hold(["a"], made, row=a_row()).stop is Stop.DONE
    assert user.EVENTS[0][2] == {}


def test_the_ground_truth_of_the_reward_model_is_taken_where_the_keywords_have_none(tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[SHIPPED])
    graded = a_row(reward_model={"style": "rule", "ground_truth": "7"}, extra_info={"interaction_kwargs": None})
    assert [turn.reward for turn in hold(["#### 7"], made, row=graded).turns] == [1.0]


def test_a_row_without_the_ground_truth_that_its_interaction_needs_breaks_alone(tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[SHIPPED])
    engine = Says("#### 7")
    groups = [new_group(one, size=1, seed=0) for one in (a_row(id="bad"), row(ground_truth="7"))]

    async def both() -> None:
        table = a_table(engine, made)
        await asyncio.gather(*(rollout(group.trajectories[0], table) for group in groups))

    asyncio.run(both())
    bad, good = (group.trajectories[0] for group in groups)
    assert bad.error is not None
    assert bad.error.message == (
        "row 'bad': Gsm8kInteraction needs the ground truth, and the row has none: put it into "
        "extra_info.interaction_kwargs.ground_truth, or reward_model.ground_truth"
    )
    assert [turn.reward for turn in good.turns] == [1.0]


def test_max_user_turns_ends_the_conversation_after_so_many_answers(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction()], max_user_turns=2)
    one = hold(["a", "b", "c"], made, row=row())
    assert names(user) == ["start", "respond", "respond", "finalize"]
    assert one.stop is Stop.DONE
    assert [turn.reward for turn in one.turns] == [0.25, 0.25]


def test_the_last_answer_is_graded_when_the_model_has_no_more_turns(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction()])
    one = hold(["a", "b"], made, row=row(), limits=Limits(turns=2, tokens_per_turn=99))
    assert one.stop is Stop.MAX_TURNS
    assert names(user) == ["start", "respond", "respond", "finalize"]


@pytest.mark.parametrize(
    ("breaks_at", "happened"),
    [
        ("start", ["start"]),  # what was never started is not finalized
        ("respond", ["start", "respond", "finalize"]),
        ("score", ["start", "respond", "score", "finalize"]),
    ],
)
@pytest.mark.parametrize("how", ["breaks_at", "exits_at"])
def test_an_interaction_that_raises_or_exits_breaks_its_conversation_and_is_finalized_once(
    how: str, breaks_at: str, happened: list[str], user: ModuleType, tmp_path: Path
) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(over_after=1, **{how: breaks_at})])
    one = hold(["a"], made, row=row())
    assert one.error is not None
    told = (
        f"RuntimeError: broken at {breaks_at}"
        if how == "breaks_at"
        else "the code tried to exit the process (status 3)"
    )
    assert (one.error.kind, one.error.message) == ("environment", told)
    assert names(user) == happened


@pytest.mark.parametrize("how", ["breaks_at", "exits_at"])
def test_a_broken_finalize_is_reported_and_the_conversation_is_whole(
    how: str, user: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(over_after=1, **{how: "finalize"})])
    with caplog.at_level(logging.WARNING):
        one = hold(["a"], made, row=row())
    assert (one.error, one.stop) == (None, Stop.DONE)
    assert "could not be closed" in caplog.text
    assert names(user).count("finalize") == 1


@pytest.mark.parametrize("hangs_at", ["start", "respond"])
def test_a_deadline_finalizes_once(hangs_at: str, user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(hangs_at=hangs_at)])
    one = hold(["a"], made, row=row(), limits=Limits(turns=3, tokens_per_turn=99, seconds_per_turn=0.1))
    assert one.stop is Stop.DEADLINE
    # what is still being started is finalized when it is there, if the process lives so long
    assert names(user) == (["start"] if hangs_at == "start" else ["start", "respond", "finalize"])


def test_what_is_started_too_late_is_finalized_as_soon_as_it_is_there(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(hangs_at="start", seconds=0.2)])

    async def run() -> None:
        table = a_table(Says("a"), made, limits=Limits(turns=3, tokens_per_turn=99, seconds_per_turn=0.05))
        await rollout(new_group(row(), size=1, seed=0).trajectories[0], table)
        assert names(user) == ["start"]
        while "finalize" not in names(user):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert names(user) == ["start", "finalize"]


def test_a_cancelled_run_finalizes_once(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction(hangs_at="respond")])

    async def run() -> None:
        table = a_table(Says("a"), made)
        task = asyncio.create_task(rollout(new_group(row(), size=1, seed=0).trajectories[0], table))
        while "respond" not in names(user):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert names(user) == ["start", "respond", "finalize"]


def test_a_model_that_breaks_finalizes_once(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction()])
    one = hold(Says("a", RuntimeError("no memory")), made, row=row())
    assert one.error is not None
    assert names(user) == ["start", "respond", "finalize"]
    user.EVENTS.clear()
    cut = hold(["a very long answer"], made, row=row(), limits=Limits(turns=3, tokens_per_turn=3))
    assert cut.stop is Stop.LENGTH
    assert names(user) == ["start", "finalize"]


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        (None, "returned None; it must return (should_terminate_sequence"),
        ((True, "a", 1.0), "returned (True, 'a', 1.0); it must return"),
        ((True, 7, 1.0, {}), "returned 7 for a text"),
        ((True, "a", 1.0, [1]), "returned the data [1]; it must be a mapping"),
        ((True, "a", "high", {}), "generate_response gave the text 'high'; a reward must be a number"),
    ],
)
def test_an_answer_of_another_form_says_what_it_should_have_been(
    gives: Any, told: str, user: ModuleType, tmp_path: Path
) -> None:
    entry = an_interaction("ScorelessInteraction")
    made = set_up(tmp_path, interactions=[entry])
    made._interactions["scoreless"].config["gives"] = gives
    one = hold(["a"], made, row=row())
    assert one.error is not None
    assert told in one.error.message


def test_without_a_score_calculate_score_is_asked(user: ModuleType, tmp_path: Path) -> None:
    class Own(user.ScorelessInteraction):  # type: ignore[name-defined]
        async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
            return 0.5

    made = set_up(tmp_path, interactions=[an_interaction("ScorelessInteraction")])
    made._interactions["scoreless"] = Own({"gives": (True, "", None, None)})
    assert [turn.reward for turn in hold(["a"], made, row=row()).turns] == [0.5]


def test_sync_methods_and_methods_with_few_arguments_will_do(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction("StrictInteraction")])
    one = hold(["a"], made, row=row(ground_truth="7"))
    assert one.error is None
    assert user.EVENTS == [("strict start", "7"), ("strict finalize",)]


def test_a_method_may_import_from_verl_when_it_is_called(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction("LazyInteraction")])
    one = hold(["#### 7"], made, row=row())
    assert [turn.reward for turn in one.turns] == [1.0]
    assert [message["role"] for message in one.messages] == ["user", "assistant"]  # nothing was said at the end
    assert no_verl_left()


def test_context_variables_last_from_one_method_to_the_next(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, interactions=[an_interaction("RememberingInteraction")])
    limits = Limits(turns=3, tokens_per_turn=99)

    def one(who: str) -> list[str]:
        row = a_row(extra_info={"interaction_kwargs": {"who": who}})
        held = hold(["a", "b", "c"], made, row=row, limits=limits)
        return [str(message["content"]) for message in held.messages[2::2]]

    assert (one("Ada"), one("Bob")) == (["Ada"] * 3, ["Bob"] * 3)
    assert user.EVENTS == [("remembered", "Ada"), ("remembered", "Bob")]


def test_an_optional_ground_truth_keeps_its_default_where_the_row_has_none(
    user: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = set_up(tmp_path, interactions=[an_interaction("OptionalInteraction")])
    bare, null, given = a_row(), row(ground_truth=None), row(ground_truth="7")
    for one in (bare, null, given):
        assert [turn.reward for turn in hold(["a"], made, row=one).turns] == [0.5]
    started = [event[1] for event in user.EVENTS if event[0] == "start"]
    assert started == ["none given", "none given", "7"]
    told = [record.getMessage() for record in caplog.records if "ground_truth" in record.getMessage()]
    assert len(told) == 1
    assert "OptionalInteraction.start_interaction has the parameter ground_truth, and rows have none" in told[0]
    assert "'none given'" in told[0]


WEATHER = """
import logging
import os
from uuid import uuid4

from verl.interactions.base import BaseInteraction

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class WeatherInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        content = "no tool call"
        for item in reversed(messages):
            if item.get("role") == "tool":
                content = item.get("content")
                break
        self._instance_dict[instance_id]["response"] = content
        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "Thank you for your weather query!", reward, {}
        return True, "Please use the weather tool to get the weather information.", reward, {}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.0 if self._instance_dict[instance_id]["response"] == "no tool call" else 1.0

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]
"""


def test_verl_s_weather_interaction_says_the_same_here_and_in_the_user_s_file(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(WEATHER)
    theirs = {"class_name": f"{tmp_path}/weather.py:WeatherInteraction", "config": {}}
    ours = {"class_name": "verl.interactions.weather_interaction.WeatherInteraction", "config": {}}
    for entry in (theirs, ours):
        one = hold(["It is warm."], set_up(tmp_path, interactions=[entry]), row=a_row())
        assert one.error is None
        assert one.messages[-1]["content"] == "Please use the weather tool to get the weather information."
        assert [turn.reward for turn in one.turns] == [0.0]


def test_verl_s_variable_prints_the_calls_of_an_interaction(
    user: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def calls() -> list[str]:
        caplog.clear()
        hold(["a"], set_up(tmp_path, interactions=[an_interaction("OptionalInteraction")]), row=row(ground_truth="7"))
        return [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]

    monkeypatch.setenv("VERL_LOGGING_LEVEL", "debug")
    start, respond, finalize = calls()
    assert "OptionalInteraction.start_interaction(" in start
    assert "ground_truth='7') -> '" in start
    assert "OptionalInteraction.generate_response(" in respond
    assert "{'role': 'assistant', 'content': 'a'}" in respond
    assert respond.endswith("-> (True, 'Thanks.', 0.5, {})")
    assert "OptionalInteraction.finalize_interaction(" in finalize
    monkeypatch.delenv("VERL_LOGGING_LEVEL")
    assert calls() == []
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "loud")
    with pytest.raises(ConfigError, match="VERL_LOGGING_LEVEL=LOUD is not a log level; the levels are: CRITICAL"):
        calls()
