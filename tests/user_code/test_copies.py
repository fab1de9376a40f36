"""What user code is given, it may change: neither the trainer, the record nor other calls see the change."""

from __future__ import annotations

import array
import asyncio
import copy
import dataclasses
import json
import os
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from support.conversations import Says, a_row, call, hold_all, scripted
from turnwise import assembly
from turnwise.api import Step, evaluate, rollout, train
from turnwise.compat.gym import ToolEnvironments
from turnwise.compat.trajectory_dict import DictReward, DictTurnReward
from turnwise.compat.trl import TrlEnvironments, TrlReward
from turnwise.compat.verl.reward import CustomScore
from turnwise.data.rows import read_rows
from turnwise.environments.agents.agents import AgentFunction
from turnwise.environments.environment import ThreadedEnvironment, environment, user_message
from turnwise.environments.tools.tool import Tool
from turnwise.environments.tools.toolbox import Tools
from turnwise.options.schema import Config
from turnwise.record.trajectory_json import trajectory_record
from turnwise.rewards.functions import BatchReward, GroupReward, TrajectoryReward, TurnReward, plan_call
from turnwise.rewards.scorer import Scorer
from turnwise.rewards.turn_weights import custom
from turnwise.services.chat import ask_chat_model
from turnwise.types import Completion, Group, Opening, Reply, Row, Segment, ToolCall, Trajectory, Turn
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import reference_to

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look things up.",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "string"}}},
            "required": ["words"],
        },
    },
}
FIELDS = {"answer": "4", "tests": [1, [2, 3]], "extra": {"deep": [{"a": 1}]}, "data_source": "x", "seen": {5}}
CALL = call("look", '{"words": ["a", "b"]}')


def spoil(value: Any) -> None:
    """Change everything that can be changed in a value, all the way down."""
    match value:
        case dict():
            for item in value.values():
                spoil(item)
            value.clear()
            value["spoilt"] = True
        case list():
            for item in value:
                spoil(item)
            value[:] = ["spoilt"]
        case tuple():
            for item in value:
                spoil(item)
        case set():
            value.clear()
        case array.array():
            value[:] = value[:0]
        case np.ndarray():
            value[:] = -1
        case Completion():
            for column in (value.token_ids, value.logprobs, value.versions):
                spoil(column)
        case Segment() | Row() | Turn() | Trajectory() | Group() | ToolCall():
            for field in dataclasses.fields(value):
                if field.name not in (
                    "info",
                    "metrics",
                    "advantages",
                ):  # where functions may write, and what is refused
                    spoil(getattr(value, field.name))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                spoil(getattr(value, field.name))
        case _:
            pass


def a_tool(words: list[str]) -> str:
    """Look things up.

    Args:
        words: What to look for.
    """
    return " ".join(words)


class Careful:
    """Changes nothing."""

    change: Callable[[Any], None] = staticmethod(lambda value: None)

    def __init__(self) -> None:
        self.given: list[Any] = []

    def keep(self, value: Any) -> Any:
        """What is handed over, kept so that it can be changed later."""
        self.given.append(value)
        return copy.deepcopy(value)

    async def begin(self, row: Row) -> Opening:
        messages, tools = copy.deepcopy(list(row.messages)), [copy.deepcopy(SCHEMA)]
        self.change(row)
        opening = Opening(messages=messages, tools=tools)
        self.given += [messages, tools]
        return opening

    async def step(self, turn: Turn) -> Reply:
        for value in self.given:  # what was handed over in the call before
            self.change(value)
        index = turn.index
        self.change(turn)
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "And?"}]}]
        info, tools = {"board": [[index]]}, [copy.deepcopy(SCHEMA)]
        self.given = [messages, tools, info]
        if index == 1:
            rewrite: list[Any] = [{"role": "user", "content": "Anew."}]
            self.given.append(rewrite)
            return Reply(messages=messages, info=info, rewrite=rewrite, tools=tools)
        return Reply(messages=messages, info=info, done=index == 2)

    async def final_reward(self) -> float:
        return 0.0

    async def close(self) -> None:
        for value in self.given:
            self.change(value)


class Spoiling(Careful):
    change = staticmethod(spoil)


@environment
async def careful(row: Row, spoils: bool = False) -> AsyncGenerator[Opening | Reply, Turn]:
    change = spoil if spoils else lambda value: None
    messages = copy.deepcopy(list(row.messages))
    turn = yield Opening(messages=messages)
    change(row), change(messages), change(turn)
    info = {"board": [1]}
    turn = yield Reply(messages=[{"role": "user", "content": "And?"}], info=info)
    change(info), change(turn)


@environment
def careful_sync(row: Row, spoils: bool = False) -> Generator[Opening | Reply, Turn, None]:
    change = spoil if spoils else lambda value: None
    messages = copy.deepcopy(list(row.messages))
    turn = yield Opening(messages=messages)
    change(row), change(messages), change(turn)
    turn = yield Reply(messages=[{"role": "user", "content": "And?"}])
    change(turn)


class Boxed:
    def __init__(self, spoils: bool) -> None:
        self._spoils = spoils

    def look(self, words: list[str]) -> str:
        """Look things up.

        Args:
            words: What to look for.
        """
        text = " ".join(words)
        if self._spoils:
            spoil(words)
        return text


def tool_that(spoils: bool, *, by_name: bool, fails: bool = False) -> Tool:
    calls: list[int] = []

    def look(words: Any) -> str:
        words_of = words if by_name else words["words"]
        text = " ".join(words_of)
        calls.append(1)
        if spoils:
            spoil(words)
        if fails and len(calls) % 2:
            raise OSError("once more")
        return text

    return Tool.from_schema(SCHEMA, look, by_name=by_name, retries=int(fails))


class Played:
    """An environment of TRL and of `ToolEnvironments`."""

    def __init__(self, spoils: list[bool]) -> None:
        self._spoils = bool(spoils) and spoils.pop()  # each instance has its own arguments

    def reset(self, **columns: Any) -> str:
        if self._spoils:
            spoil(columns)
        return "Begin."

    def step(self, text: str) -> tuple[str, float, bool]:
        """Play.

        Args:
            text: What to play.
        """
        return "And?", 0.0, text == "b"


def made_of(*arguments: Any, kind: Callable[..., Any]) -> Callable[[bool], Callable[[], Any]]:
    return lambda spoils: lambda: kind(*arguments, spoils)


ENVIRONMENTS: Mapping[str, Callable[[bool], Callable[[], Any]]] = {
    "class": lambda spoils: Spoiling if spoils else Careful,
    "generator": lambda spoils: lambda: careful(spoils=spoils),
    "generator in threads": lambda spoils: lambda: careful_sync(spoils=spoils),
    "thread": lambda spoils: lambda: ThreadedEnvironment(Spoiling if spoils else Careful),
    "behind tools": lambda spoils: lambda: Tools([a_tool], then=careful(spoils=spoils)),
    "tool": lambda spoils: lambda: Tools([tool_that(spoils, by_name=True)]),
    "tool with a dictionary": lambda spoils: lambda: Tools([tool_that(spoils, by_name=False)]),
    "tool that is tried again": lambda spoils: lambda: Tools([tool_that(spoils, by_name=True, fails=True)]),
    "steps": lambda spoils: ToolEnvironments(Played, arguments={"spoils": [spoils]}),
    "trl": lambda spoils: TrlEnvironments(Played, arguments={"spoils": [spoils]}),
}


def recorded(make: Callable[[], Any], row: Row) -> list[dict[str, Any]]:
    trajectories = hold_all(scripted([CALL, "b", "c"], [CALL, "b", "c"]), make, row=row, size=2)
    assert [trajectory.error for trajectory in trajectories] == [None, None]
    return [without_times(trajectory) for trajectory in trajectories]


def without_times(trajectory: Trajectory) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name not in ("seconds", "started")}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return plain(json.loads(json.dumps(trajectory_record(trajectory), default=str)))


@pytest.mark.parametrize("place", ENVIRONMENTS)
def test_an_environment_or_a_tool_changes_neither_the_row_nor_the_conversation(place: str) -> None:
    row = a_row("Hi", **copy.deepcopy(FIELDS))
    make = ENVIRONMENTS[place]
    expected = recorded(make(False), row)
    assert recorded(make(True), row) == expected
    assert (row.messages, row.fields) == ([{"role": "user", "content": "Hi"}], FIELDS)
    assert recorded(make(True), row) == expected  # nor what the next conversation of the row sees


def test_a_prompt_that_an_environment_extends_is_extended_once_in_each_conversation() -> None:
    @environment
    async def with_hint(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        row.messages.append({"role": "user", "content": "HINT"})  # type: ignore[attr-defined]
        yield Opening(messages=row.messages)

    for trajectory in hold_all(scripted(["a"], ["a"], ["a"]), with_hint, row=a_row("Hi"), size=3):
        assert [message["content"] for message in trajectory.messages] == ["Hi", "HINT", "a"]


def test_a_generator_that_is_started_again_gets_what_it_got_before() -> None:
    import signal

    @environment
    def needs_main_thread(row: Row) -> Generator[Opening | Reply, Turn, None]:
        row.messages.append({"role": "user", "content": "HINT"})  # type: ignore[attr-defined]
        turn = yield Opening(messages=row.messages)
        text = turn.message.pop("content")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the generator is run again in the main thread
        yield Reply(info={"text": text}, done=True)

    (trajectory,) = hold_all(Says("a"), needs_main_thread, row=a_row("Hi"))
    assert trajectory.error is None
    assert [message["content"] for message in trajectory.messages] == ["Hi", "HINT", "a"]
    assert trajectory.turns[0].info == {"text": "a"}


def test_what_an_environment_writes_into_the_info_of_a_turn_is_recorded_as_it_was_then() -> None:
    class Board(Careful):
        board: list[int]

        async def begin(self, row: Row) -> Opening:
            self.board = []
            return Opening(messages=row.messages)

        async def step(self, turn: Turn) -> Reply:
            self.board.append(turn.index)
            turn.info["board"] = self.board
            return Reply(messages=user_message("And?").messages, info={"same": self.board}, done=turn.index == 2)

    (trajectory,) = hold_all(Says("a", "b", "c"), Board)
    infos = [turn.info for turn in trajectory.turns]
    assert infos == [{"board": seen, "same": seen} for seen in ([0], [0, 1], [0, 1, 2])]


def test_a_reward_that_an_environment_adds_to_its_turn_counts_and_a_weight_is_refused() -> None:
    class Adds(Careful):
        async def step(self, turn: Turn) -> Reply:
            turn.add_reward(0.5, "me")
            return Reply(reward=1.0, done=True)

    class Weighs(Careful):
        async def step(self, turn: Turn) -> Reply:
            turn.weight = 0.0
            return Reply(done=True)

    (trajectory,) = hold_all(Says("a"), Adds)
    assert (trajectory.turns[0].reward, trajectory.turns[0].rewards) == (1.5, {"me": 0.5, "environment": 1.0})
    (trajectory,) = hold_all(Says("a"), Weighs)
    assert trajectory.error is not None
    assert "the weight of turn 0 was set to 0.0, which has no effect" in trajectory.error.message


# reward functions and loss masks


def scored_group(row: Row | None = None, size: int = 2) -> Group:
    """Conversations of three turns, with tools, infos, a rewritten history."""
    row = row or a_row("Hi", **copy.deepcopy(FIELDS))
    trajectories = hold_all(scripted(*[[CALL, "b", "c"]] * size), Careful, row=row, size=size)
    return Group(id="1", row=row, trajectories=trajectories)


def spoils_all(**given: Any) -> None:
    for value in given.values():
        spoil(value)


def of_trajectory(
    trajectory: Any, messages: Any, turns: Any, row: Any, info: Any, group: Any, answer: Any, **more: Any
):  # type: ignore[no-untyped-def]
    seen = (
        len(messages),
        len(turns),
        len(row["tests"]),
        info["board"][0][0],
        len(group.trajectories),
        len(more["tests"]),
    )
    spoils_all(**locals())
    return float(sum(seen))


def of_columns(completion: Any, tests: Any, extra: Any) -> float:
    left = len(tests)
    tests.pop()
    spoil(extra)
    return float(left)


def of_turn(trajectory: Any, turn: Any, tests: Any, row: Any) -> float:
    left = len(tests) + len(row["tests"]) + len(trajectory.row["tests"])
    assert turn is trajectory.turns[turn.index]
    spoils_all(turn=turn, tests=tests, row=row, row_of_trajectory=trajectory.row)
    return float(left)


def of_group(
    trajectories: Any, messages: Any, turns: Any, rows: Any, infos: Any, row: Any, group: Any, tests: Any
) -> Any:
    seen = [float(len(one.turns) + len(column)) for one, column in zip(trajectories, tests, strict=True)]
    spoils_all(**{name: value for name, value in locals().items() if name != "seen"})
    return seen


def of_batch(trajectories: Any, messages: Any, turns: Any, rows: Any, infos: Any, groups: Any, tests: Any) -> Any:
    seen = [float(len(one.turns) + len(column)) for one, column in zip(trajectories, tests, strict=True)]
    spoils_all(**{name: value for name, value in locals().items() if name != "seen"})
    return seen


def dictionary(trajectory: dict[str, Any]) -> float:
    seen = len(trajectory["turns"]) + len(trajectory["row"]["tests"])
    spoil(trajectory)
    return float(seen)


def dictionary_of_turns(trajectory: dict[str, Any]) -> list[float]:
    turns = [float(turn["role"] == "assistant") for turn in trajectory["turns"]]
    spoil(trajectory)
    return turns


def trl(prompts: Any, completions: Any, completion_ids: Any, tests: Any, **columns: Any) -> list[float]:
    seen = [float(len(prompt) + len(column)) for prompt, column in zip(prompts, tests, strict=True)]
    columns.pop("log_extra"), columns.pop("log_metric")
    spoils_all(prompts=prompts, completions=completions, completion_ids=completion_ids, tests=tests, **columns)
    return seen


SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info, scale):
    left = len(extra_info["raw_prompt"]) + len(ground_truth) + scale.pop()
    ground_truth.clear(), extra_info["raw_prompt"][0].clear(), extra_info["tool_rewards"].append(1)
    return left
"""


def test_a_reward_function_changes_neither_the_row_nor_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    score = CustomScore(str(tmp_path / "score.py"), arguments={"scale": [1, 2]})
    functions = {
        "trajectory": [of_trajectory, of_columns, DictReward(dictionary), score],
        "turns": [of_turn, DictTurnReward(dictionary_of_turns)],
        "group": [of_group, TrlReward(trl)],
        "batch": [of_batch],
    }
    kinds: dict[str, Any] = {
        "trajectory": TrajectoryReward, "turns": TurnReward, "group": GroupReward, "batch": BatchReward,
    }  # fmt: skip
    plans = {
        form: [
            kinds[form](f"{form}{n}", one, plan=plan_call(one, form, name="f"))  # type: ignore[arg-type]
            for n, one in enumerate(of_form)
        ]
        for form, of_form in functions.items()
    }
    fields = {**copy.deepcopy(FIELDS), "reward_model": {"ground_truth": ["4", "four"]}}
    row, others = a_row("Hi", **copy.deepcopy(fields)), a_row("Hi", **copy.deepcopy(fields))
    scorer = Scorer(plans["trajectory"], plans["turns"], plans["group"], plans["batch"])
    group, untouched = scored_group(row), scored_group(others)
    for trajectory, other in zip(group.trajectories, untouched.trajectories, strict=True):
        other.seed = trajectory.seed
    asyncio.run(scorer.score([group]))
    rewards = {
        "turns": 0.0, "turns0": 18.0, "turns1": 1.0, "trajectory0": 15.0, "trajectory1": 2.0, "trajectory2": 5.0,
        "trajectory3": 5.0, "group0": 5.0, "group1": 4.0, "batch0": 5.0,
    }  # fmt: skip
    for trajectory, other in zip(group.trajectories, untouched.trajectories, strict=True):
        assert trajectory.error is None, trajectory.error
        assert trajectory.rewards == rewards
        now, before = without_times(trajectory), without_times(other)
        for turn in (*now["turns"], *before["turns"]):
            turn.pop("reward"), turn.pop("rewards", None)
        assert {**now, "reward": None, "rewards": {}} == before
        assert trajectory.turns[0].completion == other.turns[0].completion
    assert (row.messages, row.fields) == ([{"role": "user", "content": "Hi"}], fields)


def test_functions_may_write_infos_and_metrics_and_the_next_one_sees_them() -> None:
    def writes(trajectory: Trajectory) -> float:
        trajectory.metrics["length"] = 3.0
        trajectory.turns[-1].info["reason"] = ["good"]
        trajectory.turns[0].info["board"].append("changed in place")
        return 1.0

    def reads(trajectory: Trajectory, info: dict[str, Any]) -> float:
        assert info["reason"] == ["good"]
        info["reason"].append("not recorded")
        trajectory.turns[-1].info["reason"].append("not recorded either")
        return trajectory.metrics["length"]

    def potential(turn: Turn) -> float:
        turn.info["potential"] = turn.index / 2
        turn.add_reward(0.25, "mine")
        return 0.0

    group = scored_group(size=1)
    (trajectory,) = group.trajectories
    functions = [
        TrajectoryReward(one.__name__, one, plan=plan_call(one, "trajectory", name="f")) for one in (writes, reads)
    ]
    of_turns = [TurnReward("potential", potential, plan=plan_call(potential, "turns", name="f"))]
    asyncio.run(Scorer(functions, of_turns).score([group]))
    assert trajectory.error is None
    assert trajectory.rewards == {"turns": 0.75, "potential": 0.0, "writes": 1.0, "reads": 3.0}
    assert [turn.rewards for turn in trajectory.turns] == [{"mine": 0.25}] * 3
    assert trajectory.metrics == {"length": 3.0}
    assert [turn.info for turn in trajectory.turns] == [
        {"board": [[0]], "potential": 0.0},
        {"board": [[1]], "potential": 0.5},
        {"board": [[2]], "potential": 1.0, "reason": ["good"]},
    ]


def assigns(trajectory: Trajectory) -> float:
    trajectory.advantages = [1.0, 1.0, 1.0]
    return 1.0


def weighs(trajectory: Trajectory) -> float:
    trajectory.turns[0].weight = 0.0
    return 1.0


def totals(trajectory: Trajectory) -> float:
    trajectory.reward = 3.0
    return 1.0


@pytest.mark.parametrize(
    ("function", "messages"),
    [
        (assigns, ("it has set trajectory.advantages", "credit.name")),
        (weighs, ("the weight of turn 0 was set to 0.0", "loss_mask")),
        (totals, ("it has set trajectory.reward to 3.0", "returns its number")),
    ],
)
def test_a_function_that_assigns_what_it_must_return_is_refused(function: Any, messages: tuple[str, ...]) -> None:
    group = scored_group()
    asyncio.run(
        Scorer([TrajectoryReward("f", function, plan=plan_call(function, "trajectory", name="f"))]).score([group])
    )
    for trajectory in group.trajectories:
        assert trajectory.error is not None
        assert trajectory.error.kind == "reward"
        for message in messages:
            assert message in trajectory.error.message


def test_in_a_list_only_the_conversation_that_was_changed_fails() -> None:
    def first(trajectories: list[Trajectory]) -> list[float]:
        trajectories[0].turns[0].weight = 0.5
        return [1.0] * len(trajectories)

    group = scored_group()
    asyncio.run(Scorer(groups=[GroupReward("f", first, plan=plan_call(first, "group", name="f"))]).score([group]))
    assert [trajectory.failed for trajectory in group.trajectories] == [True, False]


def test_a_loss_mask_changes_nothing_but_weights() -> None:
    def mask(turn: Turn, trajectory: Trajectory) -> float:
        weight = float(turn.index + len(trajectory.turns))
        spoil(turn), spoil(trajectory)
        trajectory.turns += [turn, turn, turn]
        return weight

    (trajectory,) = scored_group(size=1).trajectories
    before = without_times(trajectory)
    custom(lambda turn: spoil(turn) or 1.0, name="mask")(trajectory)
    assert without_times(trajectory) == before
    custom(mask, name="mask")(trajectory)
    assert trajectory.turns[0].weight == 3.0
    for turn in before["turns"]:
        turn["weight"] = trajectory.turns[before["turns"].index(turn)].weight
    assert without_times(trajectory) == before


# arguments of recipes, chat models, agents, callbacks, live rows


def consumes(completion: str, words: list[str]) -> float:
    return float(len(words.pop()))


class Consuming:
    def __init__(self, words: list[str]) -> None:
        self.first = words.pop()

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=[{"role": "user", "content": self.first}])

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True)

    async def close(self) -> None: ...


def masks(turn: Turn, scale: list[float]) -> float:
    return scale.pop()


def test_arguments_in_a_recipe_are_new_for_each_call_and_the_recipe_keeps_them(tmp_path: Path) -> None:
    words = {"words": ["a", "bc"]}
    config = Config.model_validate(
        {
            "model": {"path": "x"},
            "data": {"train": "x"},
            "environment": {"use": reference_to(Consuming, name="consuming"), "arguments": copy.deepcopy(words)},
            "reward": {
                "trajectory": [{"use": reference_to(consumes, name="consumes"), "arguments": copy.deepcopy(words)}]
            },
            "loss_mask": {"use": reference_to(masks, name="masks"), "arguments": {"scale": [0.25, 0.5]}},
        }
    )
    make, scorer, weigh = assembly.environment_factory(config), assembly.scorer(config), assembly.turn_weighting(config)
    trajectories = hold_all(scripted(["a"], ["a"], ["a"]), make, size=3)
    asyncio.run(scorer.score([Group(id="1", row=a_row(), trajectories=trajectories)]))
    for trajectory in trajectories:
        weigh(trajectory)
        assert trajectory.error is None
        assert trajectory.messages[0]["content"] == "bc"
        assert trajectory.reward == 2.0
        assert trajectory.turns[0].weight == 0.5
    assert config.environment.arguments == config.reward.trajectory[0].arguments == words
    assert config.loss_mask.arguments == {"scale": [0.25, 0.5]}


@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_chat_model_may_change_its_messages(form: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    def sync(given: Any) -> str:
        spoil(given)
        return "a"

    async def waits(given: Any) -> str:
        return sync(given)

    chat_model = sync if form == "sync" else waits
    assert asyncio.run(ask_chat_model(chat_model, messages, name="the judge", kind="reward")) == "a"
    assert messages == [{"role": "user", "content": "Hi"}]


def test_an_agent_may_change_its_row_and_its_arguments() -> None:
    async def agent(row: Row, base_url: str, api_key: str, words: list[str]) -> dict[str, Any]:
        import httpx

        messages = copy.deepcopy(row.messages)
        spoil(row)
        async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as client:
            await client.post("/chat/completions", json={"model": "m", "messages": messages}, timeout=30)
        return {"reward": 1.0, "word": words.pop()}

    source = AgentFunction(function=agent, arguments={"words": ["a", "b"]})
    fields = {name: value for name, value in copy.deepcopy(FIELDS).items() if name != "seen"}  # a set is no JSON
    row = a_row("Hi", **copy.deepcopy(fields))
    try:
        group = [hold_all(Says("a"), lambda: source.make(lambda tools, then: then), row=row)[0] for _ in range(2)]
    finally:
        asyncio.run(source.aclose())
    assert [trajectory.error for trajectory in group] == [None, None]
    assert [trajectory.turns[0].info["agent"]["result"]["word"] for trajectory in group] == ["b", "b"]
    assert (row.messages, row.fields) == ([{"role": "user", "content": "Hi"}], fields)


def test_rows_of_a_program_are_those_that_it_gave() -> None:
    given = [{"prompt": [{"role": "user", "content": "Hi"}], "tests": [1, [2]]}]
    (row,) = read_rows(reference_to(given, name="rows"))
    spoil(given)
    assert (row.messages, row["tests"]) == ([{"role": "user", "content": "Hi"}], [1, [2]])


def hint_and_pop(row: Row) -> float:
    left = len(row["tests"])
    if left:
        row["tests"].pop()
    return float(left)


@environment
async def hinted(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    row.messages.append({"role": "user", "content": "HINT"})  # type: ignore[attr-defined]
    yield Opening(messages=row.messages)


@pytest.mark.slow
def test_steps_callbacks_and_a_resumed_run_see_the_rows_of_the_data(tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?", "tests": [1, 2, 3, 4]}\n')
    metrics: list[Any] = []

    def spoiling(step: Step) -> None:
        step.trajectories.clear()
        step.metrics.clear()  # type: ignore[attr-defined]

    options: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(rows)},
        "environment": hinted,
        "reward": {"trajectory": [hint_and_pop]},
        "limits": {"turns": 1, "tokens_per_turn": 4},
        "credit": {"name": "grpo"},
        "deterministic": True,
        "checkpoint": {"every": 1},
    }

    def run(name: str, steps: int, **more: Any) -> Any:
        return train(
            **{**options, "train": {"steps": steps, "batch_size": 1, "group_size": 2}, "output": str(tmp_path / name)},
            **more,
            callbacks=[
                spoiling,
                lambda step: metrics.append((step.number, len(step.trajectories), len(step.metrics) > 9)),
            ],
            progress=False,
        )

    straight = run("straight", 3)
    assert metrics == [(1, 2, True), (2, 2, True), (3, 2, True)]
    run("resumed", 2)
    resumed = run("resumed", 3, resume="auto")
    for one, other in zip(straight.trajectories, resumed.trajectories, strict=True):
        assert [message["content"] for message in one.messages[:-1]] == ["2+2?", "HINT"]
        assert one.reward == 4.0
        assert one.row["tests"] == [1, 2, 3, 4]
        assert [list(segment.token_ids) for segment in one.segments] == [list(s.token_ids) for s in other.segments]


# values


class Pair(NamedTuple):
    words: list[str]
    number: int


@dataclasses.dataclass(frozen=True)
class State:
    board: list[int]
    client: Any


class Client:
    """Cannot be copied by anybody who does not know it."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def test_all_containers_are_copied_and_other_objects_are_handed_on() -> None:
    client, several = Client(), defaultdict(list, a=[1])
    value = {
        "pair": Pair(["a"], 1), "state": State([1], client), "deque": deque([[1]], maxlen=3), "set": {1},
        "default": several, "array": np.array([1, 2]), "tensor": torch.tensor([1.0]), "bytes": bytearray(b"a"),
        "tuple": ([1],), "client": client, "kind": Client,
    }  # fmt: skip
    copied = copy_containers(value)
    copied["pair"].words.append("b"), copied["state"].board.append(2), copied["deque"][0].append(2)
    copied["set"].add(2), copied["default"]["a"].append(2), copied["default"]["new"].append(1)
    copied["array"][0], copied["tensor"][0] = 9, 9
    copied["bytes"].extend(b"b"), copied["tuple"][0].append(2)
    assert value["pair"] == Pair(["a"], 1)
    assert value["state"] == State([1], client)
    assert value["deque"] == deque([[1]], maxlen=3)
    assert copied["deque"].maxlen == 3
    assert (value["set"], several) == ({1}, {"a": [1]})
    assert (value["array"].tolist(), value["tensor"].tolist()) == ([1, 2], [1.0])  # type: ignore[attr-defined]
    assert (value["bytes"], value["tuple"]) == (b"a", ([1],))
    assert copied["client"] is client
    assert copied["state"].client is client
    assert copied["kind"] is Client


def test_an_image_shares_its_pixels_until_one_of_the_two_is_changed() -> None:
    image = Image.new("RGB", (4, 4), "white")
    copied = copy_containers([image])[0]
    assert copied.size == (4, 4)
    copied.putpixel((0, 0), (0, 0, 0))
    copied.thumbnail((2, 2))
    assert (image.size, image.getpixel((0, 0))) == ((4, 4), (255, 255, 255))
    assert copied.size == (2, 2)


def test_a_value_that_contains_itself_is_copied_too() -> None:
    circle: list[Any] = [[1]]
    circle.append(circle)
    (trajectory,) = hold_all(Says("a"), row=a_row("Hi", circle=circle))
    assert trajectory.error is None
    copied = copy_containers(circle)
    assert copied[1] is copied
    copied[0].append(2)
    assert circle[0] == [1]


# the working directory


def test_a_run_goes_on_where_it_began_when_user_code_changes_the_working_directory(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("rows.jsonl").write_text('{"prompt": "2+2?"}\n')

    def leaves(trajectory: Trajectory) -> float:
        os.chdir(tmp_path / "other")
        return 1.0

    result = train(
        model={"path": str(model)},
        data={"train": "rows.jsonl", "eval": "rows.jsonl"},
        reward={"trajectory": [leaves]},
        limits={"turns": 1, "tokens_per_turn": 4},
        credit={"name": "grpo"},
        eval={"every": 1},
        checkpoint={"every": 1},
        train={"steps": 2, "batch_size": 1, "group_size": 2},
        output="runs/here",
        progress=False,
    )
    assert result.directory == tmp_path / "work" / "runs" / "here"
    assert len(result.trajectories) == 4
    assert (result.model / "model.safetensors").is_file() or any(result.model.rglob("*.safetensors"))
    assert list((tmp_path / "other").iterdir()) == []


WANDERS = """
import os
from turnwise import SingleTurn
from turnwise.types import Reply

class Wanders(SingleTurn):
    def __init__(self):
        os.chdir("/")

    async def step(self, turn):
        os.chdir("/")
        return Reply(done=True, reward=1.0)
"""


def of_places(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe with relative paths only, whose environment changes the working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("rows.jsonl").write_text('{"prompt": "2+2?"}\n{"prompt": "3+3?"}\n')
    Path("wanders.py").write_text(WANDERS)
    Path("model").symlink_to(model)
    Path("second").symlink_to(model)
    return {
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl"},
        "environment": "wanders.py:Wanders",
        "limits": {"turns": 1, "tokens_per_turn": 4},
        "output": "runs/here",
        "progress": False,
    }


def test_an_evaluation_goes_on_where_it_began_when_an_environment_changes_the_working_directory(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = of_places(tmp_path, model, monkeypatch)
    evaluate(models=["model", "second"], **options)  # the second model is loaded after the conversations of the first
    out = tmp_path / "work" / "runs" / "here-eval"
    assert {one.name for one in out.iterdir()} >= {"eval.json", "config.yaml", "model", "second"}
    config = yaml.safe_load((out / "second" / "config.yaml").read_text())
    assert config["model"]["path"] == "second"  # what the user wrote
    assert json.loads((out / "eval.json").read_text())["models"][1]["model"] == "second"


def test_a_rollout_goes_on_where_it_began_when_an_environment_changes_the_working_directory(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout(**of_places(tmp_path, model, monkeypatch))
    out = tmp_path / "work" / "runs" / "here"
    assert {one.name for one in out.iterdir()} >= {"config.yaml", "metrics.jsonl", "trajectories.jsonl"}
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["model"]["path"], config["data"]["train"]) == ("model", "rows.jsonl")


@pytest.mark.slow
def test_a_run_whose_environment_changes_the_working_directory_resumes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = of_places(tmp_path, model, monkeypatch)
    run = {**options, "credit": {"name": "grpo"}, "checkpoint": {"every": 1}, "eval": {"every": 1}}
    sizes = {"batch_size": 1, "group_size": 2}
    train(**run, train={"steps": 1, **sizes})
    os.chdir(tmp_path / "work")
    result = train(**run, train={"steps": 2, **sizes}, resume="auto")
    assert result.directory == tmp_path / "work" / "runs" / "here"
    assert len(result.trajectories) == 4
    config = yaml.safe_load((result.directory / "config.yaml").read_text())
    assert config["model"]["path"] == "model"
