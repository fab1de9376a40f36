"""Replays given conversations: rows that contain assistant messages become trajectories to train on.

A scripted engine returns the assistant messages, and the environment `Replay` returns all other messages. The rollout loop
produces the tokens, so the tokens and loss masks are the same as in reinforcement learning for the same text. This module
imports no torch and does not read recipes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from turnwise import build
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.errors import Failed, boundary
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.rollout.limits import Limits
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_groups
from turnwise.sft.replay_environment import Replay, rounds
from turnwise.sft.targets import lines
from turnwise.types import Failure, Row, Sampling, Stop, ToolSchema, Trajectory

__all__ = ["problems", "replay", "weigh"]


async def replay(
    rows: Sequence[Row],
    renderer: Renderer,
    *,
    thinking: Thinking = "keep",
    context: int | None = None,
    tools: Sequence[ToolSchema] = (),
    prefix: str = "",
    concurrent: int = 256,
) -> list[Trajectory]:
    """Replay the conversations of the rows. Returns one trajectory per row, in the order of the rows.

    The id of a trajectory is `<prefix><place>:<row id>/0`, with places counted from 0. `context` is the maximum number of
    tokens of a conversation: a longer conversation stops there, with a stop reason other than `done`. `tools` are used for
    rows without a column `tools`. At most `concurrent` conversations run at the same time.

    A conversation that the chat template cannot write is returned as a failed trajectory.
    """
    groups = [new_group(row, size=1, seed=0, prefix=f"{prefix}{place}:") for place, row in enumerate(rows)]
    scripts: dict[str, list[str]] = {}
    for group in groups:
        (trajectory,) = group.trajectories
        opening, assistant_rounds = rounds(trajectory.row.messages)
        try:
            with boundary("row"):
                of_row = renderer.for_arguments(trajectory.row.chat_template_kwargs)
                scripts[trajectory.id] = lines(
                    of_row, opening, assistant_rounds, trajectory.row.fields.get("tools", tools)
                )
        except Failed as failed:
            trajectory.fail(failed.failure)
    table = RolloutContext(
        engine=build.scripted_engine(renderer, scripts, continue_prompt=True),
        renderer=renderer,
        make_environment=functools.partial(Replay, tools),
        sampling=Sampling(),
        # the data determines the length of a conversation
        limits=Limits(
            turns=sys.maxsize, tokens_per_turn=sys.maxsize, context=context, seconds_per_turn=None, seconds=None
        ),
        thinking=thinking,
        max_concurrent=concurrent,
    )
    await rollout_groups([group for group in groups if group.trajectories[0].id in scripts], table)
    return [group.trajectories[0] for group in groups]


def weigh(trajectory: Trajectory, mask: TurnWeighting | None = None, *, cut: bool = False) -> bool:
    """Set the turn weights and advantages of a replayed trajectory. Returns whether it is trained on.

    The weight of a turn is the weight from `mask` times the entry of the row's `weights`; each advantage is 1. A failed
    trajectory is not trained on. A trajectory that exceeded the context is trained on only if `cut` is set. If `weights`
    has fewer numbers than the trajectory has turns, the trajectory fails.
    """
    if trajectory.failed or (trajectory.stop is not Stop.DONE and not cut):
        return False
    if mask is not None:
        mask(trajectory)
        if trajectory.failed:
            return False
    weights = trajectory.row.fields.get("weights")
    if weights is not None and len(weights) < len(trajectory.turns):
        message = f"`weights` has {len(weights)} numbers for {len(trajectory.turns)} turns; there must be one for each"
        trajectory.fail(Failure("row", message))
        return False
    for turn in trajectory.turns:
        turn.weight *= 1.0 if weights is None else weights[turn.index]
    trajectory.advantages = [1.0] * len(trajectory.turns)
    return True


def problems(trajectories: Sequence[Trajectory], *, context: int | None) -> list[str]:
    """The reasons why trajectories are not trained on, each with the ids of its rows.

    Example: `rows 3, 17: row: ...`.
    """
    rows_of_problem: dict[str, list[str]] = {}
    for trajectory in trajectories:
        if trajectory.error is not None:
            rows_of_problem.setdefault(f"{trajectory.error.kind}: {trajectory.error.message}", []).append(
                trajectory.row.id
            )
        elif not trajectory.advantages:
            text = (
                f"longer than limits.context={context}, and left out; raise limits.context if the model allows more, or train "
                f"on the first tokens: sft.too_long=cut"
            )
            rows_of_problem.setdefault(text, []).append(trajectory.row.id)
    return [f"{_rows(ids)}: {text}" for text, ids in rows_of_problem.items()]


def _rows(ids: Sequence[str]) -> str:
    if len(ids) == 1:
        return f"row {ids[0]}"
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return f"rows {', '.join(ids[:5])}{more}"
