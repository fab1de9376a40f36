"""Reward functions of ms-swift: what they are handed, and what becomes of what they give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, a_row, hold
from support.swift import play, whole
from turnwise.compat.swift import reward, scheduler
from turnwise.compat.swift.rewards import arguments_of, call_reward_once, orms
from turnwise.compat.swift.schedulers import MultiTurnScheduler
from turnwise.errors import ConfigError
from turnwise.rewards.functions import TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.types import Group, Trajectory

PLUGIN = """
from swift.rewards import ORM, AsyncORM, orms


class Length(ORM):
    def __init__(self, per=1.0):
        self.per = per

    def __call__(self, completions, solution, **kwargs):
        return [self.per * len(one) + len(two) for one, two in zip(completions, solution)]


class Later(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return [None for _ in completions]


def infos(completions, rollout_infos, trajectory_inputs, request_id, **kwargs):
    assert [len(trajectory_inputs[one]) for one in request_id] == [2]
    return [info["n"] + info["num_turns"] for info in rollout_infos]


orms["length"] = Length
orms["later"] = Later
orms["infos"] = infos
"""


class Rewrites(MultiTurnScheduler):
    """A new history after the first turn."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages = [{"role": "user", "content": "Again."}]
        return {"infer_request": infer_request, "rollout_infos": {"n": 10}}


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    file = tmp_path / "rewards.py"
    file.write_text(PLUGIN)
    yield str(file)
    for name in ("length", "later", "infos"):
        orms.pop(name, None)


def spoken(*said: str, **fields: Any) -> Trajectory:
    return whole(hold(Says(*said), scheduler, row=a_row("Hi", **fields)))


def given(trajectory: Trajectory, use: str, **options: Any) -> float:
    return asyncio.run(reward(trajectory, use=use, **options))


def test_a_class_is_made_once_with_its_arguments_and_asked_with_the_rows_columns(plugin: str) -> None:
    trajectory = spoken("four", solution="4!")
    assert given(trajectory, "length", external_plugins=[plugin]) == 6.0
    assert given(trajectory, f"{plugin}:Length", arguments={"per": 0.5}) == 4.0
    with pytest.raises(
        ConfigError, match=r"infos is a function, not a class, so arguments have no effect: remove them"
    ):
        given(trajectory, "infos", arguments={"per": 1})


def test_none_counts_nothing_and_async_functions_are_awaited(plugin: str) -> None:
    assert given(spoken("x"), "later", external_plugins=[plugin]) == 0.0


def test_rollout_infos_and_all_records_of_a_trajectory_are_handed_over(plugin: str) -> None:
    trajectory = whole(play(Rewrites, "one", "two", max_turns=2))
    assert given(trajectory, "infos", external_plugins=[plugin]) == 12.0
    completions, columns = arguments_of(trajectory)
    assert completions == ["two"]
    (records,) = columns["trajectory_inputs"].values()  # type: ignore[attr-defined]
    told = [[message["content"] for message in record["messages"]] for record in records]
    assert told == [["Hi", "one"], ["Again.", "two"]]
    assert {record["request_id"] for record in records} == {trajectory.id}
    assert columns["finish_reason"] == ["stop"]
    assert columns["response_token_ids"] == [
        [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion]
    ]


def test_a_reward_sees_the_images_of_a_conversation_and_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from support.conversations import scripted
    from support.vision import picture, save_vision_model
    from turnwise.chat.renderer import Renderer
    from turnwise.types import Row

    class Crops(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.images.append(infer_request.images[0].crop((0, 0, 16, 16)))
            infer_request.messages.append({"role": "user", "content": "<tool><image></tool>"})
            return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images}}

    renderer = Renderer.from_pretrained(save_vision_model(tmp_path / "sees"))
    asked = [{"type": "image", "image": picture(32, 16, seed=1)}, {"type": "text", "text": "?"}]
    row = Row(id="1", messages=[{"role": "user", "content": asked}], fields={"images": ["a.png"]})
    engine = scripted(["Let me look.", "A dog."], renderer=renderer)
    trajectory = whole(play(Crops, engine, row=row, max_turns=2, table={"renderer": renderer}))
    completions, columns = arguments_of(trajectory)
    assert completions == ["A dog."]
    assert [message["content"] for message in columns["messages"][0]] == [
        "<image>?",
        "Let me look.",
        "<tool><image></tool>",
        "A dog.",
    ]
    assert [image.size for image in columns["images"][0]] == [(32, 16), (16, 16)]
    assert columns["videos"] == [None]


def test_an_answer_that_was_cut_while_it_went_on_is_read_whole() -> None:
    class GoesOn(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages[-1]["content"] += ", so"
            return {"infer_request": infer_request}

    trajectory = play(GoesOn, "ab", "cdefgh", max_turns=3, table={"limits": Limits(tokens_per_turn=4)})
    assert trajectory.stop == "length"
    completions, columns = arguments_of(trajectory)
    assert completions == ["ab, socdef"]
    assert columns["is_truncated"] == [True]
    assert columns["rollout_infos"] == [{"num_turns": 2}]


@pytest.mark.parametrize("values", [[1.0, 2.0], [], 1.0, "1"])
def test_anything_but_one_number_for_one_completion_breaks_the_trajectory(values: Any) -> None:
    def odd(completions: Sequence[str], **kwargs: Any) -> Any:
        return values

    with pytest.raises(
        ValueError, match=r"the reward function odd returned .* for 1 completion; it must return a list"
    ):
        asyncio.run(call_reward_once(odd, spoken("x"), "odd"))


def test_a_text_among_the_numbers_is_refused() -> None:
    def odd(completions: Sequence[str], **kwargs: Any) -> Any:
        return ["1.0"]

    with pytest.raises(TypeError, match=r"the reward function odd gave the text '1\.0'; a reward must be a number"):
        asyncio.run(call_reward_once(odd, spoken("x"), "odd"))


def test_a_reward_that_raises_breaks_its_own_trajectory_and_no_zero_stands_in() -> None:
    def breaks(completions: Sequence[str], **kwargs: Any) -> Any:
        raise RuntimeError("no judge")

    trajectory = spoken("x")
    score = Scorer(trajectory=[TrajectoryReward("breaks", lambda one: call_reward_once(breaks, one, "breaks"))])
    asyncio.run(score.score([Group(id="g", row=trajectory.row, trajectories=[trajectory])]))
    assert trajectory.error is not None
    assert (trajectory.error.kind, trajectory.error.message.partition("RuntimeError")[2]) == ("reward", ": no judge")
    assert trajectory.reward is None


def test_an_unknown_reward_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"there is no reward function 'acuracy'; did you mean 'accuracy'\?"):
        given(spoken("x"), "acuracy")
