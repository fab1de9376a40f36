"""TRL's reward functions as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from support.conversations import Says, a_row, call, hold_all
from turnwise import assembly
from turnwise.compat.trl import TrlEnvironments, TrlReward
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rewards.functions import BatchReward, GroupReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.types import Group, Trajectory

ROOM = Limits(turns=8, tokens_per_turn=400)
MADE: list[Any] = []


class Counter:
    """Counts what it is told; made once, reset often."""

    def __init__(self) -> None:
        MADE.append(self)
        self.resets, self.closed = 0, False

    def reset(self, **row: Any) -> None:
        self.resets += 1
        self.total = 0

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: The number.
        """
        self.total += number
        return self.total

    def close(self) -> None:
        self.closed = True


def score(function: Any, trajectories: list[Trajectory]) -> list[dict[str, float]]:
    group = Group(id="1", row=trajectories[0].row, trajectories=trajectories)
    asyncio.run(Scorer(groups=[GroupReward("f", TrlReward(function))]).score([group]))
    for one in trajectories:
        assert one.error is None, one.error
        assert one.environment is None
    return [one.rewards for one in trajectories]


def test_a_function_sees_the_instances_as_their_conversations_left_them() -> None:
    def reward_from_env(environments: list[Any], completions: Any, **kwargs: Any) -> list[float]:
        assert kwargs["answer"] == [7, 7, 7]
        assert len(completions) == len(kwargs["prompts"]) == len(kwargs["completion_ids"]) == 3
        assert completions[0][-1] == {"role": "assistant", "content": "Done."}
        assert kwargs["prompts"][0][-1]["role"] == "user"
        kwargs["log_extra"]("total", [one.total for one in environments])
        return [float(one.total) for one in environments]

    MADE.clear()
    source = TrlEnvironments(Counter)
    first = hold_all(Says(call("add", '{"number": 3}'), "Done."), source, size=3, row=a_row(answer=7), limits=ROOM)
    assert score(reward_from_env, first) == [{"turns": 0.0, "f": 3.0}] * 3
    assert [one.turns[-1].info["total"] for one in first] == [3, 3, 3]
    again = hold_all(Says(call("add", '{"number": 3}'), "Done."), source, size=3, row=a_row(answer=7), limits=ROOM)
    score(reward_from_env, again)
    # made once and reset often, the one that was made to be tried out included
    assert [one.resets for one in MADE] == [2, 2, 2]
    assert not any(one.closed for one in MADE)
    asyncio.run(source.aclose())
    assert all(one.closed for one in MADE)


def test_an_instance_is_lent_to_one_conversation_until_it_is_scored() -> None:
    MADE.clear()
    source = TrlEnvironments(Counter)
    first = hold_all(Says(call("add", '{"number": 3}'), "Done."), source, size=2, row=a_row(), limits=ROOM)
    hold_all(Says(call("add", '{"number": 1}'), "Done."), source, size=2, row=a_row(), limits=ROOM)
    assert len(MADE) == 4
    assert score(lambda environments, **kwargs: [one.total for one in environments], first)[0]["f"] == 3.0


def test_none_and_nan_do_not_apply_and_async_functions_are_awaited() -> None:
    async def judge(prompts: Any, completions: Any, answer: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [None, float("nan"), 0.5]

    from turnwise.environments.environment import SingleTurn

    trajectories = hold_all(Says("<think>Hm.</think>Yes."), SingleTurn, size=3, row=a_row(answer=1), limits=ROOM)
    assert score(judge, trajectories) == [{}, {}, {"turns": 0.0, "f": 0.5}]


def test_a_function_of_trl_itself_is_named_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def tagged(completions, **kwargs):\n    return [float('<a>' in one[0]['content']) for one in completions]\n"
        "def maker(most):\n    return lambda completions, **kwargs: [most] * len(completions)\n"
        "def by_state(completions, trainer_state):\n    return [0.0] * len(completions)\n"
    )
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}

    def recipe(name: str) -> Config:
        use = {"use": "turnwise.compat.trl:TrlReward", "arguments": {"function": f"{tmp_path / 'r.py'}:{name}"}}
        return Config.model_validate({**tree, "reward": {"group": [use]}})

    (reward,) = assembly.scorer(recipe("tagged")).groups
    assert reward.name == "tagged"
    with pytest.raises(ConfigError, match="by_state has the parameter trainer_state"):
        assembly.scorer(recipe("by_state"))
    with pytest.raises(ConfigError, match=r"maker\(most\) has none of the parameters .* give its arguments"):
        assembly.scorer(recipe("maker"))
    with pytest.raises(ConfigError, match="has no 'missing'"):
        assembly.scorer(recipe("missing"))


def test_in_the_batch_a_function_is_called_once_with_all_rows_of_a_step_and_log_metric_is_a_metric() -> None:
    calls: list[Any] = []

    def centred(prompts: Any, completions: Any, answer: list[int], log_metric: Any, **kwargs: Any) -> list[float]:
        calls.append((len(prompts), answer))
        log_metric("mean_answer", sum(answer) / len(answer))
        return [one - sum(answer) / len(answer) for one in answer]

    groups = [
        Group(id=str(answer), row=row, trajectories=hold_all(Says("Yes."), size=size, row=row))
        for answer, size in ((1, 2), (7, 1))
        for row in [a_row(id=str(answer), answer=answer)]
    ]
    asyncio.run(Scorer(batch=[BatchReward("f", TrlReward(centred))]).score(groups))
    assert calls == [(3, [1, 1, 7])]
    assert [[one.reward for one in group.trajectories] for group in groups] == [[-2.0, -2.0], [4.0]]
    assert groups[1].trajectories[0].metrics == {"mean_answer": 3.0}


@pytest.mark.parametrize("value", [None, 1.0, "abc"])
def test_a_result_that_is_no_list_fails_with_the_rule(value: Any) -> None:
    trajectories = hold_all(Says("Yes."), row=a_row())
    group = Group(id="1", row=trajectories[0].row, trajectories=trajectories)
    asyncio.run(Scorer(batch=[BatchReward("f", TrlReward(lambda completions: value))]).score([group]))
    assert trajectories[0].error is not None
    assert f"gave {value!r}; it must return a list with a number, or None, for each" in trajectories[0].error.message


def test_an_item_that_is_no_number_fails_its_conversation_only_and_the_function_is_called_once() -> None:
    calls: list[int] = []

    def odd(completions: Any) -> list[Any]:
        calls.append(len(completions))
        return [1.0, "0.5", torch.tensor([2.0])]

    row = a_row()
    group = Group(id="1", row=row, trajectories=hold_all(Says("Yes."), size=3, row=row))
    asyncio.run(Scorer(batch=[BatchReward("f", TrlReward(odd))]).score([group]))
    assert [one.reward for one in group.trajectories] == [1.0, None, 2.0]
    assert calls == [3]
    error = group.trajectories[1].error
    assert error is not None
    assert "the reward function odd gave the text '0.5'; a reward must be a number" in error.message
