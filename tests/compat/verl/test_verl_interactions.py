"""verl's interactions and agent loops in the loop."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compat.verl.verl_files import an_interaction, names, no_verl_left, set_up, user_module
from support.conversations import CUE, RENDERER, STOP, Says, a_row, a_table, call, hold, hold_all, spoken
from turnwise.compat.verl import Conversations, verl_names
from turnwise.errors import ConfigError
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout, rollout_groups
from turnwise.types import Row, Stop, Trajectory

# verl's interactions in the loop: what they are handed, what becomes of what they give, and when they are finalized.


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
    seconds = 0.1 if hangs_at == "start" else 1.0  # on a busy machine the start itself takes 0.1 s
    one = hold(["a"], made, row=row(), limits=Limits(turns=3, tokens_per_turn=99, seconds_per_turn=seconds))
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


# verl's agent loops: programs that lead a conversation with token ids, unchanged, token for token in the record.


PLUGINS = Path(__file__).parent / "plugins"

OPENING = f"<|im_start|>user\nHi<|im_end|>\n{CUE}"

MORE = f"\n<|im_start|>user\nmore<|im_end|>\n{CUE}"

LOOPS = [
    "Messages",
    "Short",
    "Untrained",
    "Lies",
    "LiesOfLogprobs",
    "Raw",
    "Compressed",
    "Together",
    "Calls",
    "Fails",
    "Greedy",
]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGINS))
    with verl_names():
        module = importlib.import_module("verl_loops")
    module.SEEN.clear()
    return module


def agents_file(tmp_path: Path, more: str = "") -> str:
    path = tmp_path / "agents.yaml"
    path.write_text("".join(f"- name: {name}\n  _target_: verl_loops.{name}\n" for name in LOOPS) + more)
    return str(path)


def lead(
    setup: Conversations, agent: str | None, *turns: Any, limits: Limits | None = None, **fields: Any
) -> Trajectory:
    """One conversation that an agent loop leads, through the rollout loop."""
    import asyncio

    row = a_row(**fields) if agent is None else a_row(agent_name=agent, **fields)
    return asyncio.run(_lead(setup, row, Says(*turns), limits))


async def _lead(setup: Conversations, row: Row, engine: Says, limits: Limits | None) -> Trajectory:
    context = setup.use_context(a_table(engine, setup.make, limits=limits))
    group = new_group(row, size=1, seed=0)
    await rollout_groups([group], context)
    return group.trajectories[0]


def test_a_registered_loop_of_one_turn(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=str(PLUGINS / "verl_loops.py"))
    assert "once" in setup.agents
    trajectory = lead(setup, "once", "Yo.", extra_info={"index": 7, "tools_kwargs": {"t": {}}}, answer="42")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    assert spoken(trajectory.segments[0]) == [(-1, OPENING), (0, "Yo.<|im_end|>")]
    assert trajectory.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo."}]
    assert trajectory.turns[0].reward == 1.5
    info = trajectory.turns[0].info["agent"]
    assert (info["num_turns"], info["reward_score"], info["extra_fields"]["note"]) == (2, 1.5, "kept")
    assert trajectory.metrics["agent/unreturned_tokens"] == 0.0


def test_what_run_receives(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path, "- {name: mine, _target_: verl_loops.Once, bonus: 0.25}\n"))
    trajectory = lead(setup, "mine", "Yo.", extra_info={"index": 7, "tools_kwargs": {"t": {}}}, answer="42")
    assert trajectory.turns[0].reward == 1.75  # the entry's other keys are arguments of the class
    ((params, fields),) = loops.SEEN
    assert params == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert fields["raw_prompt"] == [{"role": "user", "content": "Hi"}]
    assert (fields["answer"], fields["index"], fields["tools_kwargs"]) == ("42", 7, {"t": {}})
    assert "agent_name" not in fields


def test_several_turns_with_the_helpers_of_the_base_class(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Messages", "a", "stop")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    (segment,) = trajectory.segments
    assert spoken(segment) == [(-1, OPENING), (0, "a<|im_end|>"), (-1, MORE), (1, "stop<|im_end|>")]
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "more", "stop"]
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert list(segment.logprobs)[-5:] == [-0.125, -0.25, -0.375, -0.5, -0.625]
    assert trajectory.metrics["agent/extended"] == 1.0


def test_tokens_that_the_loop_does_not_return_are_not_trained_on(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    short = lead(setup, "Short", "abcdefg", "stop")
    assert spoken(short.segments[0])[1] == (0, "abcdef")  # the rest of this turn and the second turn are context
    assert short.metrics["agent/unreturned_tokens"] == 2.0 + 5.0
    assert all(turn < 1 for turn in short.segments[0].turn)
    assert short.assistant_texts == ["abcdefg", "stop"]  # they are recorded as they were sampled

    untrained = lead(setup, "Untrained", "ab", "stop")
    assert spoken(untrained.segments[0])[-1] == (1, "stop<|im_end|>")
    assert 0 not in untrained.segments[0].turn


def test_tokens_that_the_model_did_not_sample_are_refused(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    lies = lead(setup, "Lies", "stop")
    assert lies.error is not None
    assert "with the mask 1, and the model did not sample it there" in lies.error.message
    of_logprobs = lead(setup, "LiesOfLogprobs", "stop")
    assert of_logprobs.error is not None
    assert "returned the log-probability 0 of token 0" in of_logprobs.error.message


def test_prompts_that_the_loop_writes_itself(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Raw", "first", "secondX", "thirds")
    assert trajectory.error is None
    one, two = trajectory.segments
    assert spoken(one) == [(-1, f"{OPENING}first<|im_end|>")]  # recorded, and not trained on: it was not returned
    assert spoken(two) == [(-1, OPENING), (1, "second"), (-1, f"?<|im_end|>\n{CUE}"), (2, "thi")]
    assert trajectory.turns[1].kept_tokens == 6
    assert (
        trajectory.turns[2].finish_reason == "length"
    )  # of the loop's own max_tokens, which does not end the conversation
    assert trajectory.stop is Stop.DONE
    assert (
        trajectory.metrics["agent/unreturned_tokens"] == 6.0
    )  # those that were left out of the prompt are in no segment
    assert [name for name in ("forked", "realigned") if trajectory.metrics[f"agent/{name}"] == 1.0] == [
        "forked",
        "realigned",
    ]


def test_several_outputs_of_one_conversation(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Compressed", "a", "b")
    assert trajectory.error is None
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, OPENING), (0, "a<|im_end|>")],
        [(-1, f"<|im_start|>user\nSummary<|im_end|>\n{CUE}"), (1, "b<|im_end|>")],
    ]
    assert [message["content"] for message in trajectory.previous_histories[0]] == ["Hi", "a"]
    assert [message["content"] for message in trajectory.messages] == ["Summary", "b"]


def test_calls_at_the_same_time_and_a_temperature_of_the_loop(
    loops: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Together", "a", "b")
    assert trajectory.error is None
    assert [spoken(segment)[-1][1] for segment in trajectory.segments] == [f"{OPENING}a<|im_end|>", "b<|im_end|>"]
    assert trajectory.metrics["agent/forced"] == 2.0  # the recipe's temperature was used, and it is counted


def test_a_loop_with_tools_and_a_parser(loops: ModuleType, tmp_path: Path) -> None:
    functions = tmp_path / "functions_of_the_loop.py"
    functions.write_text(
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@function_tool('multiply_them')\n"
        "def multiply(a: int, b: int) -> int:\n"
        '    """Multiply.\n\n    Args:\n        a: One.\n        b: Two.\n    """\n    return a * b\n'
    )
    setup = Conversations(agent_loops=agents_file(tmp_path), function_tools=str(functions))
    trajectory = lead(setup, "Calls", call("multiply_them", '{"a": 6, "b": 7}'), "42")
    assert trajectory.error is None
    assert trajectory.messages[-2:] == [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "42"}]
    answer = "user<tool_response>\n42\n</tool_response>"  # as this template writes tool messages
    assert spoken(trajectory.segments[0])[2] == (-1, f"\n<|im_start|>{answer}<|im_end|>\n{CUE}")
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["multiply_them"]
    assert trajectory.turns[0].calls[0].arguments == {"a": 6, "b": 7}


def test_a_turn_that_a_limit_cuts_reaches_the_loop(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=str(PLUGINS / "verl_loops.py"))
    trajectory = lead(setup, "once", "abcdefgh", limits=Limits(tokens_per_turn=4))
    assert (trajectory.stop, trajectory.error) == (Stop.LENGTH, None)
    assert trajectory.turns[0].reward == 1.5  # the loop computed its reward of the cut turn
    assert spoken(trajectory.segments[0])[-1] == (0, "abcd")

    several = Conversations(agent_loops=agents_file(tmp_path))
    over = lead(several, "Messages", "a", "b", "c", limits=Limits(turns=2))
    assert (over.stop, over.error, over.assistant_texts) == (Stop.MAX_TURNS, None, ["a", "b"])
    assert "reached a limit of the recipe" in over.turns[-1].info["agent"]["ended"]
    assert (
        sum(turn >= 0 for turn in over.segments[0].turn) == 4
    )  # nothing was returned, so all sampled tokens are trained on


def test_a_loop_that_fails_fails_its_conversation_only(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    failed = lead(setup, "Fails", "a")
    assert failed.error is not None
    assert "the game server is gone" in failed.error.message
    greedy = lead(setup, "Greedy", "a")
    assert greedy.error is not None
    assert "'best_of'" in greedy.error.message
    assert lead(setup, "Messages", "stop").error is None


def test_the_column_agent_name(loops: ModuleType, tmp_path: Path) -> None:
    functions = tmp_path / "functions_of_rows.py"
    functions.write_text(
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@function_tool\ndef shout(text: str) -> str:\n"
        '    """Shout.\n\n    Args:\n        text: What.\n    """\n    return text.upper()\n'
    )
    setup = Conversations(agent_loops=agents_file(tmp_path), function_tools=str(functions))
    tools = lead(setup, "tool_agent", call("shout", '{"text": "a"}'), "done")
    assert [message["role"] for message in tools.messages] == ["user", "assistant", "tool", "assistant"]
    assert tools.messages[2]["content"] == "A"
    without = lead(setup, None, call("shout", '{"text": "a"}'), "done")
    assert len(without.turns) == 2  # the tools, as before
    single = lead(setup, "single_turn_agent", call("shout", '{"text": "a"}'))
    assert (len(single.turns), list(single.tools), single.stop) == (1, [], Stop.DONE)
    unknown = lead(setup, "Message", "a")
    assert unknown.error is not None
    assert unknown.error.kind == "row"
    assert "agent_name='Message'; did you mean 'Messages'?" in unknown.error.message

    default = Conversations(agent_loops=agents_file(tmp_path), default_agent="Messages")
    assert lead(default, None, "stop").metrics["agent/unreturned_tokens"] == 0.0


def test_what_is_wrong_with_the_files_is_said_at_the_start(loops: ModuleType, tmp_path: Path) -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            Conversations(**options)
        return str(caught.value)

    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("- {name: a, _target_: verl_loops.Nothing}\n")
    assert "Nothing" in refused(agent_loops=str(wrong))
    wrong.write_text("name: a\n")
    assert "must contain a list" in refused(agent_loops=str(wrong))
    wrong.write_text("- {_target_: verl_loops.Once}\n")
    assert "must be a mapping with name and _target_" in refused(agent_loops=str(wrong))
    assert "default_agent='Once'" in refused(agent_loops=agents_file(tmp_path), default_agent="Once")
    assert "config has no effect without agent_loops" in refused(function_tools="x.py", config={})
    unused = tmp_path / "no_functions.py"
    unused.write_text("def f(a: int) -> int:\n    return a\n")
    assert "registers no function" in refused(function_tools=str(unused))


def test_recipes_tools_and_agent_loops_exclude_each_other(loops: ModuleType, tmp_path: Path) -> None:
    from turnwise.environments.tools.toolbox import Tools

    def add(a: int) -> int:
        """Add one.

        Args:
            a: A number.
        """
        return a + 1

    from turnwise.environments.tools.tool import Tool

    setup = Conversations(agent_loops=agents_file(tmp_path))
    setup.use_context(a_table(Says("stop")))
    import asyncio

    async def run() -> Trajectory:
        context = a_table(
            Says("stop"), lambda: setup.make(lambda tools, then: Tools([Tool.of(add), *tools], then=then))
        )
        group = new_group(a_row(agent_name="Messages"), size=1, seed=0)
        await rollout_groups([group], context)
        return group.trajectories[0]

    error = asyncio.run(run()).error
    assert error is not None
    assert "cannot be offered by the agent loop 'Messages'" in error.message
    assert STOP in RENDERER.stop_token_ids
    assert "verl_loops" in sys.modules


def test_a_parser_of_the_user_reads_the_calls_of_all_turns(loops: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "parser_of_the_user.py").write_text(
        "import json\n"
        "from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser\n"
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@ToolParser.register('words')\n"
        "class Words(ToolParser):\n"
        "    async def extract_tool_calls(self, responses_ids, tools=None):\n"
        "        text = self.tokenizer.decode(responses_ids)\n"
        "        head, found, name = text.partition('CALL ')\n"
        "        if not found:\n            return text, []\n"
        "        arguments = 'broken' if 'bad' in name else json.dumps({'text': 'x'})\n"
        "        return head, [FunctionCall(name=name.split()[0], arguments=arguments)]\n\n\n"
        "@function_tool('repeat_it')\ndef repeat(text: str) -> str:\n"
        '    """Repeat.\n\n    Args:\n        text: What.\n    """\n    return text * 2\n'
    )
    place = str(tmp_path / "parser_of_the_user.py")
    setup = Conversations(function_tools=place, tool_parser=f"{place}:Words")
    trajectory = lead(setup, None, "Well. CALL repeat_it", "CALL repeat_it bad", "done")
    assert trajectory.error is None
    assert [turn.message["content"] for turn in trajectory.turns] == ["Well. ", "", "done"]
    answers = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert answers[0] == "xx"
    assert "invalid JSON in the arguments" in str(trajectory.messages)  # the model is told
    with pytest.raises(ConfigError, match="has no method extract_tool_calls"):
        Conversations(function_tools=place, tool_parser="verl_loops.Once")
