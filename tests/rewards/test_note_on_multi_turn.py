"""The reward functions of the note on multi-turn RL (document 3): functions of a dictionary, and rewards assigned to turns."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, a_row, hold
from turnwise import assembly
from turnwise.compat.gym import ToolEnvironments
from turnwise.environments.environment import environment, user_message
from turnwise.options.schema import Config
from turnwise.record.trajectory_json import decode_trajectory, encode_line, trajectory_record
from turnwise.rewards.functions import BatchReward, GroupReward, TrajectoryReward, TurnReward
from turnwise.rewards.scorer import Scorer
from turnwise.types import Group, Opening, Reply, Trajectory, Turn


class ToolEnvironment:
    """The note's, with one tool."""

    def reset(self) -> None:
        pass

    def step(self, action: str) -> tuple[str, bool]:
        return ("", True) if "<tool_call>" not in action else ("3628800", False)


@environment
async def pays(row: Any):  # type: ignore[no-untyped-def]
    yield Opening(messages=row.messages)
    yield user_message("And?", reward=0.5)
    yield Reply(done=True)


def played() -> Trajectory:
    said = "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"code": "1"}}) + "\n</tool_call>"
    make = ToolEnvironments(ToolEnvironment)
    return hold(Says(said, "The factorial of 10 is 3,628,800."), make, row=a_row("10!?", answer="3,628,800"))


def score(scorer: Scorer, *trajectories: Trajectory) -> None:
    group = Group(id="1", row=trajectories[0].row, trajectories=list(trajectories))
    asyncio.run(scorer.score([group]))


def of(form: str, function: Any) -> Scorer:
    kinds: dict[str, Any] = {
        "trajectory": TrajectoryReward,
        "turns": TurnReward,
        "groups": GroupReward,
        "batch": BatchReward,
    }
    return Scorer(**{form: [kinds[form]("given", function)]})


def test_the_reward_function_of_the_note_runs_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "note.py").write_text(
        "def verify_answer(text):\n"
        "    return float('3,628,800' in text)\n"
        "def evaluate_tool_usage(turns):\n"
        "    return float(any(t['role'] == 'tool' and t['content'] == '3628800' for t in turns))\n"
        "def multiturn_reward(trajectory):\n"
        '    turns = trajectory["turns"]\n'
        '    n_turns = len([t for t in turns if t["role"] == "assistant"])\n'
        '    final_response = turns[-1]["content"]\n'
        "    correctness = verify_answer(final_response)\n"
        "    efficiency = max(0, 1.0 - 0.1 * n_turns)\n"
        "    tool_quality = evaluate_tool_usage(turns)\n"
        "    reward = 0.6 * correctness + 0.2 * efficiency + 0.2 * tool_quality\n"
        "    return reward\n"
    )
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"trajectory": ["note.py:multiturn_reward"]}}
    )
    one = played()
    score(assembly.scorer(config), one)
    assert one.error is None
    assert one.reward == pytest.approx(0.6 + 0.2 * 0.8 + 0.2)


def test_observations_are_tool_messages_in_the_dictionary_also_after_the_record() -> None:
    one = played()
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user", "assistant"]
    read = decode_trajectory(json.loads(encode_line(trajectory_record(one))), where="the record")
    for trajectory in (one, read):
        assert [entry["role"] for entry in trajectory["turns"]] == ["user", "assistant", "tool", "assistant"]
    simulated_user = hold(Says("a", "b"), pays)
    assert [entry["role"] for entry in simulated_user["turns"]] == ["user", "assistant", "user", "assistant"]


def test_a_trajectory_is_a_dictionary_with_these_keys_and_no_others() -> None:
    one = played()
    assert list(dict(one)) == ["turns", "reward", "per_turn_rewards", "prompt", "response", "row"]
    assert (one["row"], one["prompt"], one.get("prompt"), one.get("step", 7)) == (
        {"answer": "3,628,800"},
        "10!?",
        "10!?",
        7,
    )
    assert "turns" in one
    assert "stop" not in one
    with pytest.raises(KeyError, match=r"trajectory\['stop'\].*keys turns, reward.*such as trajectory.stop"):
        one["stop"]


def shares_the_reward(trajectory: Trajectory) -> float:
    for turn in trajectory.turns:
        turn.reward = 1.0
    return 0.0


def discounts_the_reward(trajectory: Trajectory, turn: Turn) -> float:
    for i, each in enumerate(reversed(trajectory.turns)):
        each.reward += 0.95**i
    return 0.0


def replaces_the_parts(trajectories: list[Trajectory]) -> list[float]:
    trajectories[0].turns[0].rewards = {"mine": 1.0}
    return [0.0 for _ in trajectories]


@pytest.mark.parametrize(
    ("form", "function", "name"),
    [
        ("trajectory", shares_the_reward, "turn.reward"),
        ("turns", discounts_the_reward, "turn.reward"),
        ("groups", replaces_the_parts, "turn.rewards"),
        ("batch", replaces_the_parts, "turn.rewards"),
    ],
)
def test_a_function_that_assigns_the_reward_of_a_turn_fails_with_the_ways_that_exist(
    form: str, function: Any, name: str
) -> None:
    one = hold(Says("a", "b"), pays)
    score(of(form, function), one)
    assert one.error is not None
    assert f"{name} cannot be set" in one.error.message
    for way in ("reward.turns", "add_reward", "credit.name", "shared", "discounted", "Reply(reward=...)"):
        assert way in one.error.message
    assert one.reward is None
    assert [turn.reward for turn in one.turns] == [0.5, 0.0]


def test_turns_can_be_copied_with_their_rewards() -> None:
    turn = hold(Says("a", "b"), pays).turns[0]
    for copied in (copy.copy(turn), copy.deepcopy(turn), dataclasses.replace(turn, weight=0.0)):
        assert (copied.reward, copied.rewards) == (0.5, {"environment": 0.5})
        with pytest.raises(AttributeError, match=r"turn\.reward cannot be set"):
            copied.reward = 1.0


def adds_to_the_first_turn(trajectory: Trajectory) -> float:
    trajectory.turns[0].add_reward(0.25, "given")
    return 1.0


def test_add_reward_in_a_reward_function_is_part_of_the_reward_of_the_conversation() -> None:
    one = hold(Says("a", "b"), pays)
    score(of("trajectory", adds_to_the_first_turn), one)
    assert (one.rewards, one.reward) == ({"turns": 0.75, "given": 1.0}, 1.75)
    assert one.turns[0].rewards == {"environment": 0.5, "given": 0.25}


def sets_the_reward(trajectory: Trajectory) -> float:
    trajectory.reward = 1.0
    return 0.0


def sets_the_rewards(trajectories: list[Trajectory]) -> list[float]:
    for trajectory in trajectories:
        trajectory.reward = 1.0
    return [0.0 for _ in trajectories]


@pytest.mark.parametrize(
    ("form", "function"), [("trajectory", sets_the_reward), ("groups", sets_the_rewards), ("batch", sets_the_rewards)]
)
def test_a_function_that_assigns_the_reward_of_the_conversation_fails(form: str, function: Any) -> None:
    one = hold(Says("a", "b"), pays)
    score(of(form, function), one)
    assert one.error is not None
    assert "set trajectory.reward to 1.0; a reward function returns its number" in one.error.message
    assert one.reward is None


def rewards_of_all_turns(trajectory: Trajectory, turn: Turn) -> list[float]:
    return [0.0, 1.0]


def test_a_list_for_one_turn_is_refused_with_the_class_that_accepts_it() -> None:
    one = hold(Says("a", "b"), pays)
    score(of("turns", rewards_of_all_turns), one)
    assert one.error is not None
    assert "gave 2 numbers for one turn" in one.error.message
    assert "turnwise.compat.trajectory_dict:DictTurnReward" in one.error.message
