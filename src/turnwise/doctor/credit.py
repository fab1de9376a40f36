"""The check `credit`: whether each reward reaches the advantages and the loss exactly once."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import cycle

import torch

from turnwise.chat.probes import assistant_message
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.doctor.check import Check
from turnwise.doctor.conversation import completion_of
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import environment, user_message
from turnwise.options.algorithm import LossSection
from turnwise.record.metrics import failures
from turnwise.rewards.credit import Credit, grpo
from turnwise.rewards.functions import TrajectoryReward, TurnReward
from turnwise.rewards.scorer import Scorer
from turnwise.rewards.turn_weights import custom
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.training.batch import Batch, pack
from turnwise.types import Group, Opening, Reply, Resume, Row, Sampling, Segment, Trajectory, Turn

_LINES = {
    "plain": ["It is 12 years old.", "Yes.", "I am sure."],
    "cut": ["It is 12 years old, or not.", " years old.", "I am sure."],
    "anew": ["It is 12 years old.", "It is 13 years old.", "I am sure."],
}
"""The completions of each conversation: an ordinary conversation, one with a cut and continued turn, one with a new history."""

_GIVEN = {"plain": 2.0, "cut": 1.25, "anew": 0.5}
"""The sum of all rewards that each conversation receives."""


def conserved(renderer: Renderer, thinking: Thinking) -> Check:
    """Whether rewards reach the loss, in conversations with a cut turn, a new segment and turns without weight."""
    name = "credit"
    group = asyncio.run(_credited_group(renderer, thinking))
    if any(trajectory.failed for trajectory in group.trajectories):
        return Check(name, "fail", f"a conversation failed: {'; '.join(failures([group])[:2])}")
    rewards = {kind: trajectory.reward for kind, trajectory in zip(_LINES, group.trajectories, strict=True)}
    if rewards != _GIVEN:
        return Check(name, "fail", f"the rewards are {rewards} and must be {_GIVEN}. Please report it")
    for loss in (
        LossSection(normalizer="token"),
        LossSection(normalizer="sequence"),
        LossSection(normalizer="trajectory"),
    ):
        if (problem := lost([group], loss)) is not None:
            return Check(name, "fail", f"{problem}. Please report it")
    segments = sum(len(trajectory.segments) for trajectory in group.trajectories)
    return Check(
        name,
        "ok",
        f"a total reward of {sum(_GIVEN.values()):g} in {len(_GIVEN)} conversations with {segments} segments (one turn was cut "
        f"and continued) reached the recorded rewards and the advantages, and the loss counts each conversation once",
    )


def lost(groups: Sequence[Group], loss: LossSection, *, proportional: bool = True) -> str | None:
    """Which reward is lost or counted twice between the trajectory and the loss. None if there is no such reward.

    `proportional`: advantages must be proportional to the rewards minus their mean, the same for all turns (GRPO).
    """
    credited = [trajectory for group in groups for trajectory in group.trajectories if trajectory.advantages]
    for group in groups if proportional else ():
        if (problem := _wrong_advantages([each for each in group.trajectories if each.advantages])) is not None:
            return problem
    trained = [trajectory for trajectory in credited if any(turn.weight > 0 for turn in trajectory.turns)]
    for trajectory in trained:
        if (problem := _wrong_targets(trajectory)) is not None:
            return problem
    return _wrong_weights(trained, loss) if trained else None


def _wrong_advantages(group: Sequence[Trajectory]) -> str | None:
    """The problem if the advantages of a group are not `(reward - mean) * factor` with one positive factor; else None."""
    for trajectory in group:
        if len({gain for entry in trajectory.advantages for gain in _numbers(entry)}) > 1:
            return f"the turns of trajectory {trajectory.id} must have the same advantage, but have {trajectory.advantages}"
    pairs = [
        (trajectory.reward or 0.0, _numbers(trajectory.advantages[0])[0])
        for trajectory in group
        if trajectory.advantages
    ]
    mean = sum(reward for reward, _ in pairs) / max(1, len(pairs))
    width = max((abs(reward - mean) for reward, _ in pairs), default=0.0)
    most = max((abs(gain) for _, gain in pairs), default=0.0)
    expected = [most * (reward - mean) / width if width else 0.0 for reward, _ in pairs]
    if not all(_equal(gain, other) for (_, gain), other in zip(pairs, expected, strict=True)):
        return (
            f"the rewards {[reward for reward, _ in pairs]} have the advantages {[gain for _, gain in pairs]}, which must be "
            f"proportional to the rewards minus their mean"
        )
    return None


def _wrong_targets(trajectory: Trajectory) -> str | None:
    """The problem if the batch does not contain each sampled token with weight exactly once, with its advantage; else None."""
    packed = _targets(pack([_without_forms(trajectory)], keep_zero=True, share_prompts=False))
    gains = [cycle([entry]) if isinstance(entry, float | int) else iter(entry) for entry in trajectory.advantages]
    sampled = sorted(
        (token, _single(next(gains[turn])))
        for segment in trajectory.segments
        for token, turn in zip(segment.token_ids, segment.turn, strict=True)
        if turn >= 0 and trajectory.turns[turn].weight > 0
    )
    if packed == sampled:
        return None
    return (
        f"trajectory {trajectory.id} has {len(packed)} targets in the batch, which do not match (token and advantage) its "
        f"{len(sampled)} sampled tokens in turns with a weight above 0"
    )


def _without_forms(trajectory: Trajectory) -> Trajectory:
    """The trajectory without the grammars of its turns, which change log-probabilities, not what is trained on."""
    turns = [copy.copy(turn) for turn in trajectory.turns]
    for turn in turns:
        turn.constraint = None
    return replace(trajectory, turns=turns)


def _wrong_weights(trained: Sequence[Trajectory], loss: LossSection) -> str | None:
    """The problem if a trajectory has another weight in the loss than the normalizer says; else None."""
    # each trajectory gets its own advantage, which identifies its tokens in the batch
    marked = [
        replace(_without_forms(trajectory), advantages=[number + 1.0] * len(trajectory.turns))
        for number, trajectory in enumerate(trained)
    ]
    batch = pack(marked, loss=loss, keep_zero=True)
    shares = [0.0] * len(marked)
    for micro in batch.micro_batches:
        for gain, weight in zip(micro.targets.advantage_N.tolist(), micro.targets.weight_N.tolist(), strict=True):
            shares[round(gain) - 1] += weight
    expected = _expected_weights(trained, loss)
    if all(abs(share - other) < 1e-4 for share, other in zip(shares, expected, strict=True)):
        return None
    return (
        f"the trajectories have the weights {shares} in the loss (loss.normalizer={loss.normalizer}) and must have "
        f"{expected}"
    )


def _expected_weights(trained: Sequence[Trajectory], loss: LossSection) -> list[float]:
    """The sum of the weights of a trajectory's tokens in the loss, for each trajectory."""
    if loss.normalizer == "constant":
        return [_mass(trajectory) / (len(trained) * (loss.constant_length or math.nan)) for trajectory in trained]
    if loss.normalizer == "sequence":
        masses = [
            float(sum(_segment_mass(trajectory, segment) > 0 for segment in trajectory.segments))
            for trajectory in trained
        ]
    else:
        masses = [1.0 if loss.normalizer == "trajectory" else _mass(trajectory) for trajectory in trained]
    return [mass / sum(masses) for mass in masses]


def _mass(trajectory: Trajectory) -> float:
    return sum(_segment_mass(trajectory, segment) for segment in trajectory.segments)


def _segment_mass(trajectory: Trajectory, segment: Segment) -> float:
    return sum(trajectory.turns[turn].weight for turn in segment.turn if turn >= 0)


def _targets(batch: Batch) -> list[tuple[int, float]]:
    return sorted(
        (int(token), float(advantage))
        for micro in batch.micro_batches
        for token, advantage in zip(micro.targets.token_N, micro.targets.advantage_N, strict=True)
    )


def _numbers(entry: float | Sequence[float]) -> Sequence[float]:
    """The advantages of a turn as a sequence: a single number, or a number for each sampled token."""
    return [entry] if isinstance(entry, float | int) else entry


def _single(value: float) -> float:
    """The value rounded to float32."""
    return float(torch.tensor(value, dtype=torch.float32))


def _equal(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-6 * max(1.0, abs(other))


async def _credited_group(renderer: Renderer, thinking: Thinking) -> Group:
    """The conversations of `_LINES`, with rewards, loss mask and credit assignment computed as in `turnwise train`."""
    row = Row(id="doctor", messages=[{"role": "user", "content": "How old is the tree?"}])
    group = new_group(row, size=len(_LINES), seed=0)
    for kind, trajectory in zip(_LINES, group.trajectories, strict=True):
        trajectory.row = replace(row, fields={"kind": kind})
    lines = {
        trajectory.id: [completion_of(renderer, assistant_message(text)) for text in texts]
        for trajectory, texts in zip(group.trajectories, _LINES.values(), strict=True)
    }
    context = RolloutContext(
        engine=ScriptedEngine(lines, encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0]),
        renderer=renderer,
        make_environment=_pays,
        sampling=Sampling(),
        limits=Limits(turns=3, tokens_per_turn=512, seconds=None, seconds_per_turn=None),
        thinking=thinking,
    )
    await rollout_groups([group], context)
    scorer = Scorer(
        trajectory=[
            TrajectoryReward("done", lambda trajectory: 1.0 if trajectory.row["kind"] == "plain" else 0.0, weight=0.5)
        ],
        turns=[TurnReward("first", lambda trajectory, turn: 1.0 if turn.index == 0 else 0.0, weight=0.5)],
    )
    await scorer.score([group])
    mask = custom(lambda turn: (1.0, 0.5, 0.0)[turn.index], name="doctor")
    for trajectory in group.trajectories:
        mask(trajectory)
    Credit("grpo", grpo)([group])
    return group


@environment
async def _pays(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Give rewards turn by turn: none in the conversation with a new history (`anew`), multiples of 0.25 in the others."""
    kind = row["kind"]
    paid = 0.0 if kind == "anew" else 0.25
    turn = yield Opening(messages=row.messages)
    if kind == "cut":
        yield Reply(reward=paid, resume=Resume(keep=len(turn.text) // 2, add=" no, 13"))
    elif kind == "anew":
        yield Reply(rewrite=[{"role": "user", "content": "Guess how old the tree is."}])
    else:
        yield user_message("Are you sure?", reward=paid + 0.25)
    yield user_message("And now?", reward=paid)
    yield Reply(reward=paid, done=True)
