"""Divergences between student and teacher over the next token, and what of them reaches a forward pass.

With p the teacher's distribution and q the student's:

- `reverse_kl`: KL(q || p), `forward_kl`: KL(p || q).
- `jsd`: `beta KL(p || m) + (1 - beta) KL(q || m)` with `m = beta p + (1 - beta) q` (generalized knowledge distillation, arXiv
  2306.13649). It is between 0 and log 2.

They are computed for a chunk of targets at a time, in float32 or better, with the distributions that are sampled from. Knows
log-probabilities. Does not know models, batches or losses.

Axis suffixes: C targets of a chunk, V classes (tokens of the vocabulary), K most likely tokens of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

__all__ = [
    "REST_FLOOR",
    "Compared",
    "Distributions",
    "Divergence",
    "ScoredTokens",
    "TeacherComparison",
    "divergence_of",
    "top_k_classes",
]

REST_FLOOR = 1e-6
"""The least probability of all tokens outside the teacher's top k: log-probabilities of float32 do not tell it from 0."""

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


def divergence_of(student_CV: torch.Tensor, teacher_CV: torch.Tensor, kind: Divergence, beta: float) -> torch.Tensor:
    """The divergence [C] of distributions given as log-probabilities [C, V]. Gradients pass to both arguments.

    A class of probability 0 (log-probability -inf) under the first distribution of a KL divergence counts as 0.

    Example: `q = (1/2, 1/2)` and `p = (1/4, 3/4)` have the reverse KL divergence `log(2 / sqrt 3) = 0.144`.
    """
    if kind == "reverse_kl":
        return _kl(student_CV, teacher_CV)
    if kind == "forward_kl":
        return _kl(teacher_CV, student_CV)
    mixture_CV = torch.logaddexp(teacher_CV + math.log(beta), student_CV + math.log1p(-beta))
    return beta * _kl(teacher_CV, mixture_CV) + (1.0 - beta) * _kl(student_CV, mixture_CV)


def _kl(first_CV: torch.Tensor, second_CV: torch.Tensor) -> torch.Tensor:
    """KL(first || second), [C]."""
    absent_CV = first_CV == -torch.inf
    difference_CV = first_CV.masked_fill(absent_CV, 0.0) - second_CV.masked_fill(absent_CV, 0.0)
    return (first_CV.exp() * difference_CV).sum(dim=-1)


def top_k_classes(
    logprob_CV: torch.Tensor, ids_CK: torch.Tensor, teacher_CK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [C, K + 1] of student and teacher: the K tokens that the teacher finds most likely, and all others.

    `logprob_CV` are the student's log-probabilities of all tokens, `ids_CK` the teacher's tokens and `teacher_CK` their
    log-probabilities. K must be less than V. Ids of V or more, which a teacher with more padding may give, are classes of
    probability 0: what the teacher gives them counts for all others.
    """
    inside_CK = ids_CK < logprob_CV.shape[-1]
    teacher_CK = teacher_CK.masked_fill(~inside_CK, -torch.inf)
    # in the place of an id that is outside stands one of the same row that is not; -1: there is none
    known_C1 = ids_CK.masked_fill(~inside_CK, -1).amax(dim=-1, keepdim=True)
    ids_CK = torch.where(inside_CK, ids_CK, known_C1.clamp_min(0))
    of_tokens_CK = logprob_CV.gather(-1, ids_CK).masked_fill(~inside_CK, -torch.inf)
    taken_CV = torch.zeros_like(logprob_CV, dtype=torch.bool).scatter(-1, ids_CK, (known_C1 >= 0).expand_as(ids_CK))
    # not log(1 - sum), which has no digits left where the sum is almost 1
    rest_C1 = logprob_CV.masked_fill(taken_CV, -torch.inf).logsumexp(dim=-1, keepdim=True)
    left_C1 = 1.0 - teacher_CK.double().exp().sum(dim=-1, keepdim=True)
    teacher_rest_C1 = left_C1.clamp_min(REST_FLOOR).log().to(teacher_CK.dtype)
    return torch.cat([of_tokens_CK, rest_C1], dim=-1), torch.cat([teacher_CK, teacher_rest_C1], dim=-1)


def _on_common_tokens(first_CV: torch.Tensor, second_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions over the tokens of both vocabularies, where one has further rows that are no tokens."""
    size = min(first_CV.shape[1], second_CV.shape[1])
    first_CV, second_CV = (
        one_CV if one_CV.shape[1] == size else one_CV[:, :size].log_softmax(dim=-1) for one_CV in (first_CV, second_CV)
    )
    return first_CV, second_CV


# Comparison: the teacher in a forward pass of the student


@dataclass(frozen=True, slots=True)
class Compared:
    """What is found at each target; None where nothing was compared. Only the divergence has a gradient."""

    divergence_N: torch.Tensor | None = None
    """The divergence from the teacher, where distributions are compared."""
    agrees_N: torch.Tensor | None = None
    """Whether student and teacher find the same token most likely."""
    teacher_logprob_N: torch.Tensor | None = None
    """The teacher's log-probability of the sampled token."""

    @classmethod
    def joined(cls, parts: Sequence[Compared], divergence_N: torch.Tensor | None) -> Compared:
        """Of all targets, from those of chunks in their order, with this divergence."""

        def column(name: str) -> torch.Tensor | None:
            values = [getattr(part, name) for part in parts]
            return None if not values or values[0] is None else torch.cat(values)

        return cls(divergence_N, column("agrees_N"), column("teacher_logprob_N"))


class TeacherComparison(Protocol):
    """What is known of the teacher at each of the N targets of a micro-batch."""

    @property
    def of_distribution(self) -> bool:
        """Whether there is a divergence, which needs the student's log-probabilities of all tokens."""
        ...

    def at(self, logits_CV: torch.Tensor, token_C: torch.Tensor, place_C: torch.Tensor) -> Compared:
        """What is found at the targets in these places. `logits_CV` are the student's; if distributions are compared, its
        log-probabilities."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """A `TeacherComparison` with a teacher that has scored the tokens before the pass."""

    logprob_N: torch.Tensor
    """The teacher's log-probability of the sampled token."""
    ids_NK: torch.Tensor
    """The teacher's most likely tokens, the most likely first."""
    top_logprob_NK: torch.Tensor
    kind: Divergence | None
    """None: there is no divergence, only measurement."""
    beta: float = 0.5

    @property
    def of_distribution(self) -> bool:
        """See `TeacherComparison`."""
        return self.kind is not None

    def at(self, logits_CV: torch.Tensor, token_C: torch.Tensor, place_C: torch.Tensor) -> Compared:
        """See `TeacherComparison`."""
        divergence_C = None
        if self.kind is not None:
            classes = top_k_classes(logits_CV, self.ids_NK[place_C], self.top_logprob_NK[place_C])
            divergence_C = divergence_of(*classes, self.kind, self.beta)
        ids_CK = self.ids_NK[place_C]
        first_C1 = (ids_CK < logits_CV.shape[-1]).byte().argmax(dim=-1, keepdim=True)  # that is a token of the student
        agrees_C = logits_CV.detach().argmax(dim=-1) == ids_CK.gather(-1, first_C1).squeeze(-1)
        return Compared(divergence_C, agrees_C, self.logprob_N[place_C])


Rows = Callable[[torch.Tensor], torch.Tensor]
"""From places [C] of targets to a teacher's log-probabilities [C, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """A `TeacherComparison` with the complete distributions of local teachers."""

    teachers: Sequence[tuple[torch.Tensor, Rows]]
    """For each teacher, the share [N] that it has in what is learnt at each target, and its distributions. The shares of a target
    add up to 1."""
    kind: Divergence
    beta: float = 0.5

    @property
    def of_distribution(self) -> bool:
        """See `TeacherComparison`."""
        return True

    def at(self, logits_CV: torch.Tensor, token_C: torch.Tensor, place_C: torch.Tensor) -> Compared:
        """See `TeacherComparison`. What is measured with several teachers is that of the mean of their log-probabilities."""
        total_C = torch.zeros_like(logits_CV[:, 0])
        mean_CV: torch.Tensor | None = None
        for share_N, rows in self.teachers:
            share_C, teacher_CV = share_N[place_C], rows(place_C)
            student_CV, teacher_CV = _on_common_tokens(logits_CV, teacher_CV)
            total_C = total_C + share_C * divergence_of(student_CV, teacher_CV, self.kind, self.beta)
            if len(self.teachers) == 1:
                mean_CV = teacher_CV
            else:
                weighted_CV = teacher_CV * share_C.unsqueeze(-1)
                mean_CV = weighted_CV if mean_CV is None else mean_CV + weighted_CV
        assert mean_CV is not None
        agrees_C = logits_CV.detach().argmax(dim=-1) == mean_CV.argmax(dim=-1)
        return Compared(total_C, agrees_C, mean_CV.gather(-1, token_C.unsqueeze(-1)).squeeze(-1))
