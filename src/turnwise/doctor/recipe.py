"""The checks `rows`, `tools` and `rewards`: whether the recipe's rows, tools and rewards work with the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.config.train_checks import chosen_estimator
from turnwise.doctor.check import Check
from turnwise.doctor.credit import lost
from turnwise.doctor.template import argument_sets, preflight_rows
from turnwise.errors import TurnwiseError, counted
from turnwise.options.algorithm import Grpo, OwnCredit, OwnLoss, Rloo
from turnwise.options.schema import Config
from turnwise.record.metrics import failures
from turnwise.rewards.credit import own
from turnwise.rewards.credit.credit import episode_of
from turnwise.rollout.context import ConversationRunner
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Group, Row, Trajectory
from turnwise.user_code.reward_number import equal_rewards

_ROWS, _EACH, _TURNS, _TOKENS = 2, 2, 4, 32
"""The conversations are few and short: the check is about sums of rewards, and needs no good completions."""


def row_arguments(config: Config, rows: Sequence[Row], renderer: Renderer) -> Check:
    """Whether the template can be used under the arguments of rows that have their own (`chat_template_kwargs`).

    Raises DataError that names a row whose arguments the template never reads.
    """
    sets = argument_sets(rows)
    notes = preflight_rows(config, renderer, rows, tools=any(row.fields.get("tools") for row in rows))
    shown = ", ".join(f"{text} ({count:,} rows)" for text, (_, count) in list(sets.items())[:4])
    more = f" and {len(sets) - 4} more" if len(sets) > 4 else ""
    if notes:
        return Check("arguments", "note", "; ".join(notes))
    return Check("arguments", "ok", f"the template reads the arguments of the rows: {shown}{more}")


def conversations(config: Config) -> Check:
    """Whether the conversations of a recipe for `turnwise sft` can be read.

    Raises TurnwiseError that names the row and the problem.
    """
    counts = [
        len(assembly.conversations(config, held_out=held))
        for held in (False, True)[: 1 + (config.data.eval is not None)]
    ]
    text = f"{counts[0]:,} conversations for training" + "".join(
        f" and {count:,} for evaluation" for count in counts[1:]
    )
    return Check(
        "rows", "ok", f"{text} can be read; `turnwise sft` reports the conversations that do not fit the template"
    )


def tools_and_rewards(config: Config, rows: Sequence[Row], renderer: Renderer, model: Any | None) -> list[Check]:
    """Which tools the model may call, if any, and whether each reward reaches the loss exactly once, in a few conversations.

    If `model` is None, the completions are scripted, and the values of the rewards mean nothing. Raises TurnwiseError if
    conversations cannot begin, such as for an MCP server that does not answer.
    """
    groups, sources = asyncio.run(_scored(config, rows, renderer, model))
    offered = tools(config, groups, sources)
    return [*([] if offered is None else [offered]), rewards(config, groups, scripted=model is None)]


def tools(config: Config, groups: Sequence[Group], sources: Mapping[str, Sequence[str]]) -> Check | None:
    """The names of the tools, by what gives them: `sources`, or else the environment in its openings and replies. None if there
    are none."""
    known = {name for names in sources.values() for name in names}
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    others = dict.fromkeys(
        name for turn in turns for tool in turn.tools if (name := tool["function"]["name"]) not in known
    )
    giver = "the recipe" if config.runs_conversations_elsewhere else f"environment={config.environment.use}"
    given = {**sources, **({giver: list(others)} if others else {})}
    if not given:
        return None
    said = "; ".join(f"{source} gives {', '.join(names) or 'none'}" for source, names in given.items())
    status = "ok" if all(given.values()) else "note"
    return Check("tools", status, f"{counted(len(known) + len(others), 'tool')}: {said}")


def rewards(config: Config, groups: Sequence[Group], *, scripted: bool) -> Check:
    """Whether each reward reached the loss exactly once. `scripted`: the completions are, so that the values of the rewards mean
    nothing."""
    name = "rewards"
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scored = [trajectory for trajectory in trajectories if not trajectory.failed and trajectory.reward is not None]
    failed = sum(trajectory.failed for trajectory in trajectories)
    if failed == len(trajectories):
        return Check(name, "fail", f"all {failed} conversations failed: {'; '.join(failures(groups)[:2])}")
    if not scored:
        return Check(
            name,
            "fail",
            f"none of the {len(trajectories) - failed} conversations that did not fail has a reward: all reward functions "
            f"returned None, which means that they do not apply, and environment={config.environment.use} gave none",
        )
    for problem in (_wrong_sum(scored, config), _lost(groups, config)):
        if problem is not None:
            return Check(name, "fail", f"{problem}. Please report it")
    reward = config.reward
    functions = reward.functions
    examples = ", ".join(f"{trajectory.reward:g}" for trajectory in scored[:4])
    text = (
        f"{len(scored)} conversations with the rewards {examples}: each is the sum of its parts and reached the advantages, and "
        f"the loss contains each sampled token once"
    )
    if scripted:
        text += " (scripted completions, because the model is not loaded)"
    if not functions and not any(turn.rewards for trajectory in scored for turn in trajectory.turns):
        text += (
            f". The recipe has no reward function, and environment={config.environment.use} gave none of them a reward, not even "
            f"0: return one (Reply.reward), unless it gives one for success only"
        )
        return Check(name, "note", text)
    if failed:
        return Check(name, "note", f"{text}; other conversations failed ({failed}): {'; '.join(failures(groups)[:2])}")
    if not scripted and config.credit.name != "none" and len(scored) > 1 and _all_equal(scored):
        text += (
            f". The rewards are all equal, and nothing can be learned from equal rewards of a row. The parts are "
            f"{_values(scored, config)}: call what should tell these conversations apart on an answer that is right, and on "
            f"one that is wrong"
        )
        return Check(name, "note", text)
    return Check(name, "ok", text)


def reward_functions(config: Config, failed: str) -> Check | None:
    """The check `rewards` where the check of the name `failed` fails, so that there are no conversations: whether each function
    can be called with the columns of the data. None if the recipe has no function.

    Raises ConfigError that names the function which cannot be called, and why.
    """
    scorer, columns = assembly.scorer(config), None
    if not scorer.functions:
        return None
    with contextlib.suppress(TurnwiseError):  # the check `rows` reports it
        columns = assembly.column_names(config)
    if columns is not None:
        scorer.refuse_other_columns(columns)
    of_columns = "" if columns is not None else ", if the data has the columns that they need"
    names = ", ".join(use.use for use in config.reward.functions)
    return Check(
        "rewards", "note", f"can be called{of_columns}: {names}; not tried in conversations, because {failed} fails"
    )


def own_estimator(config: Config) -> Check:
    """Whether the recipe's own function keeps what the estimators of turnwise keep, on a small batch. Raises ConfigError if it
    cannot be called, or returns something else than advantages."""
    section = chosen_estimator(config)
    assert isinstance(section, OwnCredit)
    name, broken = "estimator", own.broken_invariants(section)
    if broken:
        return Check(name, "fail", f"credit: {section.use}: {'; '.join(broken)}")
    return Check(
        name,
        "ok",
        f"{section.use} returns an advantage for each turn, which does not depend on the order of conversations and groups, nor "
        f"on earlier calls",
    )


def own_loss(config: Config) -> Check:
    """The same of the recipe's own loss. Raises ConfigError if it cannot be called, or returns something else than a loss."""
    from turnwise.training.own_loss import broken_invariants, try_own_loss  # torch

    section = config.loss
    assert isinstance(section, OwnLoss)
    try_own_loss(section)
    broken = broken_invariants(section)
    if broken:
        return Check("loss", "fail", f"loss: {section.use}: {'; '.join(broken)}")
    return Check(
        "loss",
        "ok",
        f"{section.use} returns a number with a gradient for each token, which does not depend on the order of sequences, on "
        f"micro-batches or segments, nor on earlier calls",
    )


def _lost(groups: Sequence[Group], config: Config) -> str | None:
    estimator = chosen_estimator(config)
    proportional = isinstance(estimator, Grpo | Rloo) and estimator.model_dump().get("scale") != "batch"
    return lost(groups, config.loss, proportional=proportional)


async def _scored(
    config: Config, rows: Sequence[Row], renderer: Renderer, model: Any | None
) -> tuple[list[Group], Mapping[str, Sequence[str]]]:
    """A few short conversations of the recipe, with rewards, loss mask and credit assignment as in `turnwise train`, and
    `Environments.tools`."""
    scorer, mask = assembly.scorer(config), assembly.turn_weighting(config)
    credit = assembly.credit(config, scorer)
    scorer.refuse_unknown_columns(rows)
    groups = [new_group(row, size=_EACH, seed=config.seed) for row in rows[:_ROWS]]
    async with contextlib.aclosing(assembly.environment_factory(config, encode=renderer.encode)) as environments:
        runner = _runner(config, renderer, model)
        assembly.connect_engine(scorer, runner.sampler, renderer)
        context = assembly.conversation_context(config, renderer, runner, environments, longest=None)
        turns, tokens = min(context.limits.turns, _TURNS), min(context.limits.tokens_per_turn, _TOKENS)
        context = replace(
            context,
            limits=context.limits.model_copy(update={"turns": turns, "tokens_per_turn": tokens}),
            lockstep=False,
        )
        score = scorer.scoring_callback(groups)

        async def done(trajectory: Trajectory) -> None:
            await score(trajectory)

        await rollout_groups(groups, context, on_finished=done)
        await runner.close()
    for group in groups:
        for trajectory in group.trajectories:
            mask(trajectory)
    if credit.needs_baseline:
        for group in groups:  # in place of a greedy conversation
            group.baseline = group.trajectories.pop()
    if credit.needs_values is not None:
        for group in groups:
            for trajectory in group.trajectories:  # a new critic estimates 0
                trajectory.values = [[0.0] * count for count in episode_of(trajectory).tokens_T]
    credit(groups)
    return groups, environments.tools


def _runner(config: Config, renderer: Renderer, model: Any | None) -> ConversationRunner:
    """The recipe's runner. Without a model, or with another engine than the embedded one: given completions."""
    if model is not None and config.engine.embedded is not None:
        return assembly.runner(config, renderer, model)
    answers = [[f"It is {n}.", "Yes.", "I am sure.", "It is."] for n in range(_ROWS * _EACH)]
    return assembly.runner(config, renderer, scripts=answers)


def _wrong_sum(scored: Sequence[Trajectory], config: Config) -> str | None:
    """The problem if a reward is not the sum of the turns' rewards and of the functions of trajectories; else None."""
    scorer = assembly.scorer(config)
    of_turns = {function.name for function in scorer.turns}
    of_trajectory = {function.name for function in (*scorer.trajectory, *scorer.groups, *scorer.batch)}
    for trajectory in scored:
        if not _close(trajectory.reward, sum(trajectory.rewards.values())):
            return (
                f"the reward of trajectory {trajectory.id} is {trajectory.reward}, which is not the sum of its parts "
                f"{trajectory.rewards}"
            )
        summed = sum(turn.reward for turn in trajectory.turns) + sum(
            trajectory.rewards.get(name, 0.0) for name in of_trajectory
        )
        if not of_turns & of_trajectory and not _close(trajectory.reward, summed):  # a shared name hides the source
            return (
                f"the reward of trajectory {trajectory.id} is {trajectory.reward}, but the rewards of its turns and of the "
                f"functions of trajectories, groups and the batch add up to {summed}"
            )
    return None


def _all_equal(scored: Sequence[Trajectory]) -> bool:
    return equal_rewards(trajectory.reward for trajectory in scored if trajectory.reward is not None)


def _values(scored: Sequence[Trajectory], config: Config) -> str:
    """The parts of the rewards with their values in each conversation: `right: 0, 0, 0, 0; short: 1, 1, 1, 1`."""
    names = list(dict.fromkeys(name for trajectory in scored for name in trajectory.rewards))
    if not any(turn.rewards for trajectory in scored for turn in trajectory.turns):
        names.remove("turns")  # the environment gave none
    shown = {name: f"environment={config.environment.use}" if name == "turns" else name for name in names}
    return "; ".join(
        f"{shown[name]}: {', '.join(f'{one.rewards[name]:g}' for one in scored if name in one.rewards)}"
        for name in names
    )


def _close(value: float | None, other: float) -> bool:
    return value is not None and abs(value - other) <= 1e-6 * max(1.0, abs(other))
