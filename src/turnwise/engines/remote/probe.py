"""A test whether servers have the trainer's weights: each samples some tokens, of which both compute log-probabilities.

If the servers belong to another process than the trainer, the question and the answers are sent between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.errors import EngineError

__all__ = ["Probe", "ProbeAnswer", "ProbePrompt", "check_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePrompt:
    """What a server is asked."""

    prompt: Sequence[int]
    """Token ids that the server continues."""
    tokens: int
    """How many tokens it samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(ProbePrompt):
    """The same with what the trainer needs to check the answers."""

    logprobs: Callable[[Sequence[int]], Sequence[float]]
    """The trainer's own `log_softmax(logits)` of each token after the first."""
    tolerance: float
    """The largest difference that is rounding."""

    @property
    def question(self) -> ProbePrompt:
        """Only what a server is asked, which can be sent to other processes."""
        return ProbePrompt(prompt=self.prompt, tokens=self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """What a server has sampled. The lists have equal lengths."""

    server: str
    """The name of the server, for messages."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]


def check_answer(answer: ProbeAnswer, probe: Probe, version: int) -> float:
    """The largest difference of log-probabilities between a server and the trainer. Raises EngineError if it is not rounding,
    or if the server has sampled with another version of the weights."""
    own = probe.logprobs([*probe.prompt, *answer.token_ids])[len(probe.prompt) - 1 :]
    if not answer.token_ids or set(answer.versions) != {version}:
        raise EngineError(f"{answer.server} sampled with the weights {set(answer.versions)}, and not {version}")
    deviation = max(abs(mine - other) for mine, other in zip(own, answer.logprobs, strict=True))
    if not deviation <= probe.tolerance:
        raise EngineError(
            f"{answer.server} has other weights than the trainer: the log-probabilities of the same tokens differ by "
            f"{deviation:.3g}, and at most {probe.tolerance:g} is rounding. The server must serve the model of model.path, in "
            f"the same precision (docs/engines.md)"
        )
    return deviation
