"""Teachers in a training step: who scores which tokens, and the advantages of sampled tokens.

Scores are set before credit assignment, and the advantages of the signal `sampled` are added after it; the signal `divergence` is
a term of the loss (`losses.py`), which reads the scores from the batch. With one sample of each token, the expected gradient of
the signal `sampled` with `gamma` 0 is that of the reverse KL divergence at each token (Thinking Machines 2025, "On-policy
distillation"; also MiniLLM, arXiv 2306.08543).

Knows trajectories and what scores token sequences. Does not know chat templates, servers or the models of teachers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np

from turnwise.errors import Failed
from turnwise.options.teacher import TeacherSection
from turnwise.training.kl_reward import sampled_logprobs
from turnwise.training.learner import Learner
from turnwise.training.value_batch import (
    StateSequence,
    ValuePacking,
    by_turn,
    pack_state_sequences,
    token_sequences,
)
from turnwise.types import Failure, Group, Media, Trajectory

__all__ = ["LearnerTeacher", "Scores", "ScoresTokens", "Teacher", "TeacherPrompt", "TeacherStep"]


class ScoresTokens(Protocol):
    """What computes the scores of a teacher: a local model, or a server."""

    async def scores(self, sequences: Sequence[StateSequence], states: int, top_k: int) -> Scores:
        """The scores of `states` states, of which some are in the sequences."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """What a teacher says of states."""

    rows: np.ndarray
    """The log-probability of the token after each state, the ids of the K most likely tokens, and their log-probabilities:
    float64, [states, 1 + 2K]. 0 where the state is in no sequence."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why a sequence could not be scored, by the number of its first state."""


@dataclass(frozen=True, slots=True)
class LearnerTeacher:
    """A teacher in the learner's memory: the local teacher with this name, or the present weights of the trained model (None)."""

    learner: Learner
    name: str | None
    micro_batch_tokens: int | None
    """Tokens of a forward pass; None: the learner's default."""

    async def scores(self, sequences: Sequence[StateSequence], states: int, top_k: int) -> Scores:
        """See `ScoresTokens.scores`."""
        required = self.learner.requirements
        packing = ValuePacking(
            level="token",
            micro_batch_tokens=required.tokens(self.micro_batch_tokens),
            parallel=1,
            share_prompts=required.share_prompts,
        )
        batch = pack_state_sequences(sequences, states, packing)
        return Scores((await self.learner.scores(batch, teacher=self.name, top_k=top_k)).numpy())


TeacherPrompt = Callable[[Trajectory, int], tuple[Sequence[int], Sequence[Media]]]
"""From a trajectory and the index of a turn to the token ids before the turn, and the images and videos in them.
Raises Failed."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher of a run."""

    name: str
    weight: float
    scoring: ScoresTokens | None
    """None: its distributions are computed in the update."""
    prompt: TeacherPrompt | None = None
    """What the teacher reads before a turn; None: what the student read."""


@dataclass(frozen=True, slots=True)
class TeacherStep:
    """The part of the teachers in a training step."""

    learner: Learner
    _: KW_ONLY
    teachers: Sequence[Teacher]
    section: TeacherSection
    micro_batch_tokens: int | None

    async def set_scores(self, groups: Sequence[Group]) -> None:
        """Set `Trajectory.teacher_scores`, or `teacher_shares`, of all trajectories that have a reward. Before credit, after the
        weights of turns. A trajectory that its teacher cannot score fails."""
        trajectories = _scored(groups)
        if not self.section.scores:
            for trajectory in trajectories:
                trajectory.teacher_shares = tuple(self._shares(trajectory))
            return
        # one after the other: the learner computes one thing at a time
        results = [await self._of_teacher(number, trajectories) for number in range(len(self.teachers))]
        for place, trajectory in enumerate(trajectories):
            if not trajectory.failed:
                self._set(trajectory, [of_teacher.get(place) for of_teacher in results])

    def _set(self, trajectory: Trajectory, scores: Sequence[np.ndarray | None]) -> None:
        """Set the scores of a trajectory: [S, 1 + 2K] of each teacher that has a share in it."""
        shares = self._shares(trajectory)
        first = scores[int(np.argmax(shares))]
        assert first is not None
        rows = first.copy()
        if sum(share > 0 for share in shares) > 1:  # only with the signal `sampled`, which needs no likely tokens
            rows[:, 0] = sum(
                share * one[:, 0] for share, one in zip(shares, scores, strict=True) if share and one is not None
            )
        if not np.isfinite(rows).all():
            trajectory.fail(_not_finite(trajectory, self.teachers[int(np.argmax(shares))].name))
            return
        (of_turns,) = by_turn([trajectory], rows.tolist())
        trajectory.teacher_scores = list(of_turns)

    def _shares(self, trajectory: Trajectory) -> list[float]:
        """The share of each teacher in a trajectory. They add up to 1."""
        column = self.section.column
        if column is not None:
            return [float(teacher.name == trajectory.row[column]) for teacher in self.teachers]
        total = sum(teacher.weight for teacher in self.teachers)
        return [teacher.weight / total for teacher in self.teachers]

    async def _of_teacher(self, number: int, trajectories: Sequence[Trajectory]) -> dict[int, np.ndarray]:
        """The scores of one teacher, for the trajectories in which it has a share, by their places."""
        teacher = self.teachers[number]
        assert teacher.scoring is not None
        chosen = [place for place, one in enumerate(trajectories) if self._shares(one)[number] > 0]
        sequences: list[StateSequence] = []
        ranges: dict[int, slice] = {}
        states = 0
        for place, (offset, of_segments, count) in zip(
            chosen, token_sequences([trajectories[place] for place in chosen]), strict=True
        ):
            trajectory = trajectories[place]
            ranges[place], states = slice(offset, offset + count), states + count
            if teacher.prompt is None:
                sequences += of_segments
                continue
            try:
                sequences += _in_context(trajectory, offset, count, of_segments, teacher.prompt)
            except Failed as failed:
                trajectory.fail(failed.failure)
        top_k = self.section.top_k or 1
        if not sequences:  # nothing of them is trained on
            return {place: np.zeros((part.stop - part.start, 1 + 2 * top_k)) for place, part in ranges.items()}
        scores = await teacher.scoring.scores(sequences, states, top_k)
        for place, part in ranges.items():
            problem = next((text for first, text in scores.problems.items() if part.start <= first < part.stop), None)
            if problem is not None and not trajectories[place].failed:
                trajectories[place].fail(Failure("teacher", f"the teacher {teacher.name!r}: {problem}"))
        return {place: scores.rows[part] for place, part in ranges.items()}

    async def add_advantages(self, groups: Sequence[Group]) -> None:
        """Add the advantages of the signal `sampled` to `Trajectory.advantages`. After credit."""
        if self.section.signal != "sampled":
            return
        trajectories = [trajectory for trajectory in _scored(groups) if trajectory.advantages]
        student = await sampled_logprobs(self.learner, trajectories, self.micro_batch_tokens)
        for trajectory, own in zip(trajectories, by_turn(trajectories, student), strict=True):
            added = self._advantages(trajectory, own)
            trajectory.advantages = [
                [value + more for value, more in zip(_of_tokens(advantage, len(mores)), mores, strict=True)]
                for advantage, mores in zip(trajectory.advantages, added, strict=True)
            ]

    def _advantages(self, trajectory: Trajectory, student: Sequence[Sequence[float]]) -> list[list[float]]:
        """`coef` times the sum of `teacher - student`, within `clip`, from a token on, discounted; 0 in turns that are not
        trained on."""
        following, bound = 0.0, self.section.clip or float("inf")
        turns: list[list[float]] = []
        for turn, own, rows in reversed(list(zip(trajectory.turns, student, trajectory.teacher_scores, strict=True))):
            values = [0.0] * len(own)
            for place in range(len(own) - 1, -1, -1) if turn.weight > 0 else ():
                difference = max(-bound, min(bound, rows[place][0] - own[place]))
                following = difference + self.section.gamma * following
                values[place] = self.section.coef * following
            turns.append(values)
        return turns[::-1]


def _scored(groups: Sequence[Group]) -> list[Trajectory]:
    return [one for group in groups for one in group.trajectories if one.reward is not None and not one.failed]


def _of_tokens(advantage: float | Sequence[float], count: int) -> Sequence[float]:
    return [float(advantage)] * count if isinstance(advantage, float | int) else advantage


def _in_context(
    trajectory: Trajectory,
    offset: int,
    count: int,
    of_segments: Sequence[StateSequence],
    prompt: TeacherPrompt,
) -> list[StateSequence]:
    """A sequence for each trained turn: the teacher's prompt, and the tokens that the student sampled. Raises Failed."""
    tokens: dict[int, int] = {}
    for sequence in of_segments:
        tokens.update(zip(sequence.places.tolist(), sequence.token_ids[sequence.is_target].tolist(), strict=True))
    found: list[StateSequence] = []
    (numbers,) = by_turn([trajectory], range(offset, offset + count))
    for turn, of_turn in zip(trajectory.turns, numbers, strict=True):
        places = [place for place in of_turn if place in tokens]
        if not places:
            continue
        before, media = prompt(trajectory, turn.index)
        ids = np.array([*before, *(tokens[place] for place in places)], dtype=np.int64)
        is_target = np.arange(len(ids)) >= len(before)
        found.append(StateSequence(token_ids=ids, is_target=is_target, media=media, places=np.array(places)))
    return found


def _not_finite(trajectory: Trajectory, name: str) -> Failure:
    return Failure(
        "teacher",
        f"the teacher {name!r} gives a token of the conversation no finite log-probability: the conversation may be longer than "
        f"the teacher's context, or the teacher finds the token impossible. Use a shorter limits.context, or another teacher",
    )
