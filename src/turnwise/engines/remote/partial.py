"""Completions in parts: what a server has sampled of a request before it died, was restarted, or aborted the request.

The next part is sampled after the prompt and all tokens that are known. The session sees the joined completion only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from turnwise.errors import EngineError
from turnwise.types import Completion, LogprobKind, Request, Sampling

__all__ = ["JoinedCompletion", "Part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens that a server has sampled for a request, one after the other, and possibly why it has stopped."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Literal["stop", "length", "aborted"] | None = None
    """None: more parts follow. `aborted`: the server has stopped before the completion was complete."""
    versions: Sequence[int] | None = None
    """The version of the weights of each token; None if the server did not report it."""
    all_versions: Sequence[int] | None = None
    """The same of all tokens of the request so far, for servers that report it at the end of a request."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the server's prefix cache; None if the server did not report it."""


@dataclass(slots=True)
class JoinedCompletion:
    """The completion of a request, from parts.

    Example: a server dies after the tokens 5 and 6; the next one receives the prompt, 5 and 6, and samples 7 and the stop
    token 2. The completion is 5, 6, 7, 2.
    """

    request: Request
    max_tokens: int
    """The most tokens of the completion."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    """Of the prompt of the first part. Later parts find the prompt in the cache because of the first part."""
    finish: Literal["stop", "length"] | None = None
    requests: int = 0
    """How many requests were sent for it."""
    start: int = 0
    """The number of tokens that were known when the last request was sent."""

    @property
    def room(self) -> int:
        """How many tokens may still be sampled."""
        return self.max_tokens - len(self.token_ids)

    def next_request(self) -> Request:
        """The request for the next part: the prompt, and all tokens that are known.

        The seed of a later part differs: with the same seed, its tokens would be drawn with the random numbers of the first.
        """
        known = self.start = len(self.token_ids)
        self.requests += 1
        return replace(
            self.request,
            token_ids=[*self.request.token_ids, *self.token_ids],
            sampling=replace(self.request.sampling, max_tokens=self.room),
            seed=(self.request.seed + known * 0x9E3779B1) & 0x7FFFFFFF,
        )

    def add(self, part: Part, version: int) -> None:
        """Append a part. `version` is that of its tokens if the server has not reported it.

        Raises EngineError if the number of reported versions is not that of the tokens.
        """
        self.token_ids.extend(part.token_ids)
        self.logprobs.extend(part.logprobs)
        self.versions.extend([version] * len(part.token_ids) if part.versions is None else part.versions)
        if part.all_versions is not None:
            if len(part.all_versions) != len(self.token_ids) - self.start:
                raise EngineError(
                    f"a server reported the weight versions of {len(part.all_versions)} tokens, and has sent "
                    f"{len(self.token_ids) - self.start}"
                )
            self.versions[self.start :] = part.all_versions
        if self.cached_tokens is None:
            self.cached_tokens = part.cached_tokens
        if part.finish in ("stop", "length"):
            self.finish = part.finish

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        del self.token_ids[length:], self.logprobs[length:], self.versions[length:]
        self.finish = None

    def drop_versions_above(self, version: int) -> None:
        """Forget the tokens that were sampled with weights that were rejected, and all tokens after them."""
        first = next((index for index, own in enumerate(self.versions) if own > version), None)
        if first is not None:
            self.truncate(first)

    def close_if_complete(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Set `finish` if the known tokens are complete: the limit is reached, or the tokens contain a stop.

        A stop text can begin in one part and end in the next, where the server does not find it. The tokens after the token
        that completes the stop text are removed.
        """
        end = _stop_position(self.token_ids, self.request.sampling, decode) if self.requests > 1 else None
        if end is not None:
            self.truncate(end)
            self.finish = "stop"
        elif self.finish is None and self.room <= 0:
            self.finish = "length"

    def completion(self, kind: LogprobKind) -> Completion:
        """The finished completion."""
        assert self.finish is not None
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=self.finish,
            logprob_kind=kind,
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=self.cached_tokens,
        )


def _stop_position(token_ids: Sequence[int], sampling: Sampling, decode: Callable[[Sequence[int]], str]) -> int | None:
    """The number of tokens up to and with the first stop; None if there is no stop in the tokens."""
    ends = [index + 1 for index, token in enumerate(token_ids) if token in sampling.stop_token_ids]
    end = ends[0] if ends else None
    if sampling.stop:
        text = decode(token_ids)
        if any(stop in text for stop in sampling.stop):
            low, high = 1, len(token_ids)  # the smallest prefix whose text contains a stop text
            while low < high:
                middle = (low + high) // 2
                if any(stop in decode(token_ids[:middle]) for stop in sampling.stop):
                    high = middle
                else:
                    low = middle + 1
            end = low if end is None else min(end, low)
    return end
