"""Checks what a server has sampled. A server's answer is not trusted: a bad one fails its conversation, and not the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from turnwise.engines.remote.partial import Part
from turnwise.errors import EngineError

__all__ = ["check_part", "expected_form"]

_ROUNDING = 1e-3
"""How far above 0 rounding may lift a log-probability."""
_IMPOSSIBLE = -9000.0
"""Servers report -9999 instead of NaN and minus infinity, which JSON cannot express."""


def check_part(server: str, part: Part, *, vocab_size: int, room: int) -> None:
    """Raise EngineError if a part of a completion cannot be what a model has sampled.

    `room` is the number of tokens that may still be sampled. The message has the server, the value and the rule.
    """
    ids, logprobs = part.token_ids, part.logprobs
    if len(logprobs) != len(ids):
        raise EngineError(
            f"{server} returned {len(ids)} token ids and {len(logprobs)} log-probabilities; there must be one for each token"
        )
    if len(ids) > room:
        raise EngineError(f"{server} returned {len(ids)} tokens where {room} were allowed")
    bad_ids = [value for value in ids if not _is_int(value) or not 0 <= value < vocab_size]
    if bad_ids:
        raise EngineError(
            f"{server} returned the token id {bad_ids[0]!r}; the model has the ids 0 to {vocab_size - 1}. The server must serve "
            f"the model of model.path"
        )
    bad_logprobs = [value for value in logprobs if not _is_logprob(value)]
    if bad_logprobs:
        raise EngineError(
            f"{server} returned {bad_logprobs[0]!r} as the log-probability of a sampled token; it must be a finite number of at "
            f"most 0 (-9999 stands for NaN or minus infinity). The weights of the model may not be finite"
        )
    if part.versions is not None and len(part.versions) != len(ids):
        raise EngineError(f"{server} returned {len(ids)} tokens and the weight versions of {len(part.versions)} tokens")


@contextmanager
def expected_form(server: str, kind: str) -> Iterator[None]:
    """Raise EngineError if the code inside cannot read an answer of `server`, because a field is missing or has another type.

    `kind` is the expected kind of server, such as `vLLM`.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise EngineError(
            f"an answer of {server} does not have the form of {kind}'s answers ({type(error).__name__}: {error}). The server "
            f"must be {kind}, in a version that turnwise was tested with (docs/engines.md): check engine.name and engine.url"
        ) from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_logprob(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and _IMPOSSIBLE < value <= _ROUNDING
