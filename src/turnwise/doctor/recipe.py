"""A recipe, held against its model: a few of its conversations, and what becomes of their rewards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from turnwise import build
from turnwise.chat.media_parts import has_media
from turnwise.chat.renderer import Renderer
from turnwise.chat.row_media import process_row_media
from turnwise.config.schema import Config, ScriptedEngine
from turnwise.data.conversations import read_conversations
from turnwise.doctor.check import Check, wrong
from turnwise.doctor.credit import lost
from turnwise.engines.engine import Engine
from turnwise.errors import DataError, TurnwiseError
from turnwise.record.metrics import failures
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_groups
from turnwise.types import Group, Row, Trajectory

__all__ = ["conversations", "openings", "rewards"]

_OPENED, _READY = 256, 4
_ROWS, _EACH, _TURNS, _TOKENS = 2, 2, 4, 32
"""Few and short, for this is about sums and not about answers."""


def openings(config: Config, rows: Sequence[Row], renderer: Renderer) -> Check:
    """Whether the template takes the rows' messages, their images included.

    Raises ConfigError where data.return_multi_modal_inputs has no effect.
    """
    seeing = [row for row in rows if has_media(row.messages)]
    process_row_media(seeing[:_READY] or rows[:1], renderer.vision, wanted=config.data.return_multi_modal_inputs)
    for row in rows[:_OPENED]:
        try:
            renderer.encode_opening(row.messages)
        except TurnwiseError as error:
            return wrong("rows", DataError(f"row {row.id!r}: {error}"))
    return Check("rows", "ok", f"the template takes the messages of {min(len(rows), _OPENED)} of {len(rows)} rows")


def conversations(config: Config) -> Check:
    """Whether the conversations of a recipe for `turnwise sft` can be read.

    Raises TurnwiseError with the row and what is wrong with it.
    """
    data = config.data
    sources = [(data.train, data.split)] + ([(data.eval, data.eval_split)] if data.eval is not None else [])
    counts = [
        len(read_conversations(source, columns=data.columns, split=split, subset=data.subset, limit=data.max_rows))
        for source, split in sources
    ]
    told = " and ".join(f"{count:,}" for count in counts)
    return Check("rows", "ok", f"{told} conversations to learn from; `turnwise sft` says which do not fit the template")


def rewards(config: Config, rows: Sequence[Row], renderer: Renderer, model: Any | None) -> Check:
    """Whether no reward is lost or counted twice on its way from the environment to the loss.

    With `model` None the conversations are scripted, and their answers mean nothing.
    """
    name = "rewards"
    groups = asyncio.run(_scored(config, rows, renderer, model))
    every = [one for group in groups for one in group.trajectories]
    whole = [one for one in every if not one.failed and one.reward is not None]
    if not whole:
        return Check(name, "fail", f"all {len(every)} conversations broke: {'; '.join(failures(groups)[:2])}")
    for problem in (_sums(whole, config), lost(groups, config.train.loss_average)):
        if problem is not None:
            return Check(name, "fail", f"{problem}; please report it")
    text = (
        f"{len(whole)} conversations, rewards {', '.join(f'{one.reward:g}' for one in whole[:4])}: the sums of what was "
        f"given, shared out by their advantages, each sampled token once in the loss"
    )
    if model is None:
        text += " (the conversations were scripted)"
    if len(whole) < len(every):
        return Check(name, "note", f"{text}; {len(every) - len(whole)} more broke: {'; '.join(failures(groups)[:2])}")
    return Check(name, "ok", text)


async def _scored(config: Config, rows: Sequence[Row], renderer: Renderer, model: Any | None) -> list[Group]:
    """A few conversations of the recipe, as `train` holds and scores them, short ones."""
    scorer, mask, credit = build.scorer(config), build.turn_weighting(config), build.credit(config)
    groups = [new_group(row, size=_EACH, seed=config.seed) for row in rows[:_ROWS]]
    limits = build.limits(config, longest=None)
    async with contextlib.aclosing(build.environment_factory(config, encode=renderer.encode)) as environments:
        table = RolloutContext(
            engine=_engine(config, renderer, model),
            renderer=renderer,
            make_environment=environments,
            sampling=build.sampling(config),
            limits=replace(
                limits, turns=min(limits.turns, _TURNS), tokens_per_turn=min(limits.tokens_per_turn, _TOKENS)
            ),
            thinking=config.thinking,
            max_concurrent=config.max_concurrent,
        )
        score = scorer.scoring_callback(groups)

        async def done(trajectory: Trajectory) -> None:
            await score(trajectory)

        await rollout_groups(groups, table, on_finished=done)
        await table.engine.close()
    for group in groups:
        for one in group.trajectories:
            mask(one)
    credit(groups)
    return groups


def _engine(config: Config, renderer: Renderer, model: Any | None) -> Engine:
    """The recipe's engine; answers of its own where there is no model, or the recipe's script is for other conversations."""
    if model is not None and not isinstance(config.engine, ScriptedEngine):
        return build.engine(config, renderer, model)
    answers = [[f"It is {n}.", "Yes.", "I am sure.", "It is."] for n in range(_ROWS * _EACH)]
    return build.engine(config, renderer, scripts=answers)


def _sums(whole: Sequence[Trajectory], config: Config) -> str | None:
    """Where a trajectory's reward is not that of its turns and of the functions of the whole."""
    scorer = build.scorer(config)
    of_turns = {one.name for one in scorer.turns}
    of_whole = {one.name for one in (*scorer.trajectory, *scorer.groups)}
    for one in whole:
        if not _close(one.reward, sum(one.rewards.values())):
            return f"the reward of {one.id} is {one.reward}, and its parts are {one.rewards}"
        summed = sum(turn.reward for turn in one.turns) + sum(one.rewards.get(name, 0.0) for name in of_whole)
        if not of_turns & of_whole and not _close(one.reward, summed):  # one name for both hides which part is whose
            return f"the reward of {one.id} is {one.reward}; its turns and the functions of the whole gave {summed}"
    return None


def _close(one: float | None, other: float) -> bool:
    return one is not None and abs(one - other) <= 1e-6 * max(1.0, abs(other))
