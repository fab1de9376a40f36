"""A request on its way through the engine: what was asked for, what has been sampled so far, and whether it can be served.

Knows requests and limits. Does not know the queue, the cache or the model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from turnwise.engines.local.vision import VisionPrompt
from turnwise.errors import EngineError
from turnwise.types import Completion, LogprobKind, Request, Sampling

__all__ = ["PartialCompletion", "PendingRequest", "RequestLimits"]


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The tokens that a request has sampled so far, as columns [N]."""

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    raw_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def completion(self, finish_reason: str, *, prompt_tokens: int, cached_tokens: int) -> Completion:
        """The finished completion of a prompt with `prompt_tokens` tokens, of which `cached_tokens` were in the cache."""
        return Completion(
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            versions=self.versions.tolist(),
            finish_reason="stop" if finish_reason == "stop" else "length",
            logprob_kind=LogprobKind.SAMPLED,
            raw_logprobs=self.raw_logprobs.tolist(),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRequest:
    """A request from the call of `generate` until its future is resolved: waiting or running."""

    request: Request
    prompt_N: np.ndarray
    """Token ids; placeholders of images are replaced by the negative keys of `VisionPrompt`."""
    vision_prompt: VisionPrompt | None
    """The images in the prompt."""
    max_tokens: int
    """Tokens that may be sampled: `Sampling.max_tokens`, or the rest of the context if that is less."""
    future: asyncio.Future[Completion]
    partial: PartialCompletion = field(default_factory=PartialCompletion)
    """Tokens sampled before the request was preempted."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the cache when the request started; None before the start."""
    arrival: int = field(default_factory=count().__next__)
    """Order of arrival."""

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt, and the tokens sampled before the request was preempted."""
        if not len(self.partial.token_ids):
            return self.prompt_N
        return np.concatenate([self.prompt_N, self.partial.token_ids.astype(np.int32)])


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The requests that an engine can serve."""

    context: int
    """The largest number of tokens in a conversation."""
    vocab_size: int
    cache_tokens: int
    """Tokens that fit into the memory budget of the KV cache."""
    token_bytes: int
    """Bytes that a token takes in the KV cache."""
    can_decode: bool
    """Whether the engine can turn token ids into text, which stop texts need."""

    def max_tokens(self, prompt_N: np.ndarray, sampling: Sampling) -> int:
        """The number of tokens that may be sampled after the prompt. Raises EngineError if this request can never be served."""
        self._check_prompt(prompt_N)
        length = len(prompt_N)
        if sampling.max_tokens < 1 or sampling.temperature < 0:
            raise EngineError(
                f"max_tokens is {sampling.max_tokens} and temperature {sampling.temperature}: max_tokens must be at least 1, "
                "and temperature must not be negative (0 is greedy)"
            )
        if length >= self.context:
            raise EngineError(
                f"the prompt has {length} tokens and the context {self.context}: no token can be sampled after it. "
                "Shorten the conversation (limits.context), or raise the engine's context"
            )
        if sampling.stop and not self.can_decode:
            raise EngineError(
                f"the request stops at the texts {list(sampling.stop)}, and this engine cannot turn tokens into text: create "
                "it with LocalEngine(..., decode=tokenizer.decode), or use stop_token_ids"
            )
        max_tokens = min(sampling.max_tokens, self.context - length)
        needed = length + max_tokens
        if needed > self.cache_tokens:
            gigabytes = needed * self.token_bytes / 2**30
            raise EngineError(
                f"the prompt has {length} tokens and may be continued by {max_tokens}, but the cache has room for "
                f"{self.cache_tokens} at most. Give it more memory (memory_gb={gigabytes:.3g} or more), or ask for fewer tokens"
            )
        return max_tokens

    def _check_prompt(self, prompt_N: np.ndarray) -> None:
        if len(prompt_N) == 0:
            raise EngineError(
                "the prompt is empty: it must have at least one token, such as the token that begins a text"
            )
        if prompt_N.min() < 0 or prompt_N.max() >= self.vocab_size:
            raise EngineError(
                f"the prompt contains token ids from {prompt_N.min()} to {prompt_N.max()}; the model has 0 to "
                f"{self.vocab_size - 1}. The tokenizer must be the model's own"
            )
