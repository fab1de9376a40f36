"""Whether rewards arrive: from what was given for a conversation to the weight of each of its tokens in the loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Literal

import torch

from turnwise.chat.probes import assistant_message
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.doctor.check import Check
from turnwise.doctor.conversation import said
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import environment, user_message
from turnwise.record.metrics import failures
from turnwise.rewards.credit import grpo
from turnwise.rewards.reward import Scorer, TrajectoryReward, TurnReward
from turnwise.rewards.turn_weights import custom
from turnwise.rollout.limits import Limits
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_groups
from turnwise.training.batch import Batch, pack
from turnwise.types import Group, Opening, Reply, Resume, Row, Sampling, Trajectory, Turn

__all__ = ["conserved", "lost"]

_LINES = {
    "plain": ["It is 12 years old.", "Yes.", "I am sure."],
    "cut": ["It is 12 years old, or not.", " years old.", "I am sure."],
    "anew": ["It is 12 years old.", "It is 13 years old.", "I am sure."],
}
"""What the model says in each conversation: one as any other, one that is cut and continued, one whose history is replaced."""

_GIVEN = {"plain": 2.0, "cut": 1.25, "anew": 0.5}
"""What each conversation is worth when everything that is given for it is added up."""


def conserved(renderer: Renderer, thinking: Thinking) -> Check:
    """Whether what is given arrives, in conversations that make it hard: cut answers, new segments, turns without weight."""
    name = "credit"
    group = asyncio.run(_held(renderer, thinking))
    if any(one.failed for one in group.trajectories):
        return Check(name, "fail", f"a conversation broke: {'; '.join(failures([group])[:2])}")
    found = {kind: one.reward for kind, one in zip(_LINES, group.trajectories, strict=True)}
    if found != _GIVEN:
        return Check(name, "fail", f"the rewards are {found}, and what was given is {_GIVEN}; please report it")
    for average in ("token", "sequence"):
        if (problem := lost([group], average)) is not None:
            return Check(name, "fail", f"{problem}; please report it")
    segments = sum(len(one.segments) for one in group.trajectories)
    return Check(
        name,
        "ok",
        f"{sum(_GIVEN.values()):g} was given to {len(_GIVEN)} conversations of {segments} segments, one of them cut and "
        f"continued: it is their reward, their advantages share it, the loss weighs each once",
    )


def lost(groups: Sequence[Group], average: Literal["token", "sequence"]) -> str | None:
    """Where a reward is lost or counted twice on its way from the trajectory to the loss, or None."""
    whole = [one for group in groups for one in group.trajectories if one.advantages]
    for group in groups:
        if (problem := _shared_out([one for one in group.trajectories if one.advantages])) is not None:
            return problem
    weighed = [one for one in whole if any(turn.weight > 0 for turn in one.turns)]
    for one in weighed:
        if (problem := _each_once(one)) is not None:
            return problem
    return _weights(weighed, average) if weighed else None


def _shared_out(group: Sequence[Trajectory]) -> str | None:
    """Where the advantages of a group are not its centred rewards, up to one positive factor."""
    for one in group:
        if len({gain for entry in one.advantages for gain in _numbers(entry)}) > 1:
            return f"the turns of {one.id} have the advantages {one.advantages}, and they share one reward"
    pairs = [(one.reward or 0.0, _numbers(one.advantages[0])[0]) for one in group if one.advantages]
    mean = sum(reward for reward, _ in pairs) / max(1, len(pairs))
    width = max((abs(reward - mean) for reward, _ in pairs), default=0.0)
    most = max((abs(gain) for _, gain in pairs), default=0.0)
    expected = [most * (reward - mean) / width if width else 0.0 for reward, _ in pairs]
    if not all(_close(gain, other) for (_, gain), other in zip(pairs, expected, strict=True)):
        return f"the rewards {[reward for reward, _ in pairs]} became the advantages {[gain for _, gain in pairs]}"
    return None


def _each_once(one: Trajectory) -> str | None:
    """Where the batch does not hold each sampled token of a turn that counts once, at its turn's advantage."""
    found = _targets(pack([one], keep_zero=True, share_prompts=False))
    gains = [cycle([entry]) if isinstance(entry, float | int) else iter(entry) for entry in one.advantages]
    sampled = sorted(
        (token, _single(next(gains[turn])))
        for segment in one.segments
        for token, turn in zip(segment.token_ids, segment.turn, strict=True)
        if turn >= 0 and one.turns[turn].weight > 0
    )
    if found == sampled:
        return None
    return f"the batch of {one.id} has {len(found)} targets, and {len(sampled)} tokens were sampled in turns that count"


def _weights(weighed: Sequence[Trajectory], average: Literal["token", "sequence"]) -> str | None:
    """Where the loss does not weigh each trajectory once, however many segments it has."""
    # each its own advantage, by which its tokens are known again in the batch
    marked = [replace(one, advantages=[number + 1.0] * len(one.turns)) for number, one in enumerate(weighed)]
    batch = pack(marked, average=average, keep_zero=True)
    shares = [0.0] * len(marked)
    for micro in batch.micro_batches:
        for gain, weight in zip(micro.targets.advantage_N.tolist(), micro.targets.weight_N.tolist(), strict=True):
            shares[round(gain) - 1] += weight
    masses = [1.0 if average == "sequence" else _mass(one) for one in weighed]
    expected = [mass / sum(masses) for mass in masses]
    if all(abs(share - other) < 1e-4 for share, other in zip(shares, expected, strict=True)):
        return None
    return f"the trajectories weigh {shares} in the loss ({average} average), and should weigh {expected}"


def _mass(one: Trajectory) -> float:
    return sum(one.turns[turn].weight for segment in one.segments for turn in segment.turn if turn >= 0)


def _targets(batch: Batch) -> list[tuple[int, float]]:
    return sorted(
        (int(token), float(advantage))
        for micro in batch.micro_batches
        for token, advantage in zip(micro.targets.token_N, micro.targets.advantage_N, strict=True)
    )


def _numbers(entry: float | Sequence[float]) -> Sequence[float]:
    """The advantages of a turn: one number, or one for each sampled token."""
    return [entry] if isinstance(entry, float | int) else entry


def _single(value: float) -> float:
    """As a float32 has it."""
    return float(torch.tensor(value, dtype=torch.float32))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(1.0, abs(other))


async def _held(renderer: Renderer, thinking: Thinking) -> Group:
    """The conversations of `_LINES`, scored, weighed and given credit as `train` does it."""
    row = Row(id="doctor", messages=[{"role": "user", "content": "How old is the tree?"}])
    group = new_group(row, size=len(_LINES), seed=0)
    for kind, one in zip(_LINES, group.trajectories, strict=True):
        one.row = replace(row, fields={"kind": kind})
    lines = {
        one.id: [said(renderer, assistant_message(text)) for text in texts]
        for one, texts in zip(group.trajectories, _LINES.values(), strict=True)
    }
    table = RolloutContext(
        engine=ScriptedEngine(lines, encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0]),
        renderer=renderer,
        make_environment=_pays,
        sampling=Sampling(),
        limits=Limits(turns=3, tokens_per_turn=512, seconds=None, seconds_per_turn=None),
        thinking=thinking,
    )
    await rollout_groups([group], table)
    scorer = Scorer(
        trajectory=[TrajectoryReward("done", lambda one: 1.0 if one.row["kind"] == "plain" else 0.0, weight=0.5)],
        turns=[TurnReward("first", lambda one, turn: 1.0 if turn.index == 0 else 0.0, weight=0.5)],
    )
    await scorer.score([group])
    mask = custom(lambda turn: (1.0, 0.5, 0.0)[turn.index], name="doctor")
    for one in group.trajectories:
        mask(one)
    grpo([group])
    return group


@environment
async def _pays(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Gives 0.25 for every turn of a plain conversation and of one that is cut, and nothing for a new history."""
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
