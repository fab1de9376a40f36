"""Grammars of constrained turns, compiled for a tokenizer: which tokens are allowed after which.

The engine asks for the mask before it samples a token, and the trainer computes the same masks again from the token ids, so the
log-probabilities of both are those of the same distribution. Invariant: a mask depends on the constraint and the tokens of the
turn before it, and on nothing else.

Knows llguidance and a tokenizer. Does not know what a grammar describes (`chat/constraints.py`), nor logits
(`models/distribution.py` applies the masks).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.errors import ConfigError, GrammarError
from turnwise.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_TOKENIZERS = 16
"""Sets of stop tokens for which the tokenizer is kept in compiled form."""
_GRAMMARS = 32
"""Compiled grammars that are kept: all turns of a conversation, and of a group, have the same, as does the trainer."""


@dataclass(frozen=True, slots=True)
class AllowedColumn:
    """What grammars allowed at each of T tokens of a sequence."""

    words_MW: np.ndarray
    """The different masks as bits, int32 [M, W]."""
    index_T: np.ndarray
    """The mask of each token; -1: every token was allowed, or the token was not sampled."""

    def identity(self) -> bytes:
        """Equal for two columns that allow the same."""
        return self.words_MW.tobytes() + self.index_T.tobytes()


def with_stops(constraint: Constraint) -> str:
    """The grammar of a turn with the tokens that end it, for a server whose own stop tokens may be others.

    The masks are the same: where the grammar may end, one of its stop tokens may follow, and nothing else ends it.
    """
    rules, _, start = constraint.grammar.rpartition("start: ")
    stops = " | ".join(f"<[{token}]>" for token in constraint.stops)
    return f"{rules}turn: {start}start: turn{f' ({stops})' if stops else ''}\n"


PROBE = (5, 6)
"""Two tokens, and nothing else, that a server samples under `PROBE_GRAMMAR`, each with the log-probability 0."""
PROBE_GRAMMAR = "%llguidance {}\nstart: <[5]> <[6]>\n"


class TokenMasks:
    """Computes the masks of one tokenizer, a fast transformers tokenizer. Nothing is compiled before the first constraint."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._compiled = functools.lru_cache(maxsize=_TOKENIZERS)(self._compile)
        self._begun = functools.lru_cache(maxsize=_GRAMMARS)(self._begin)

    def matcher(self, constraint: Constraint) -> Matcher:
        """The state of a constraint before the first sampled token. Raises GrammarError, and ConfigError without llguidance."""
        matcher = self._begun(constraint.grammar, constraint.stops).deep_copy()
        before = constraint.before
        if before and not matcher.consume_tokens(self._compiled(constraint.stops).tokenize_str(before)):
            raise GrammarError(
                f"the turn begins with {before!r:.200}, which was not sampled, and the format of the turn does not allow it: "
                f"begin it otherwise, or leave the format out"
            )
        return Matcher(matcher)

    def _begin(self, grammar: str, stops: tuple[int, ...]) -> LLMatcher:
        """A compiled grammar, before its first token."""
        compiled = self._compiled(stops)
        from llguidance import LLMatcher, LLParserLimits

        # without the grammar and the state of the parser in error messages
        matcher = LLMatcher(compiled, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error()}")
        return matcher

    def problem(self, grammar: str) -> str | None:
        """Why llguidance does not compile a grammar, in its own words; None if it does. Raises ConfigError without llguidance."""
        _required()
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._compiled(()))
        return messages[0].partition("\n   1 |")[0] if failed else None

    def column(
        self, token_ids: Sequence[int], length: int, constrained: Sequence[tuple[Constraint, int]]
    ) -> AllowedColumn:
        """What the constraints of turns, each with the place after its last token, allowed at the first `length` tokens.

        Raises GrammarError if a grammar does not allow a token of its turn.
        """
        numbers: dict[bytes, int] = {}
        index_T = np.full(length, -1, dtype=np.int64)
        for constraint, end in constrained:
            matcher = self.matcher(constraint)
            for place in range(constraint.start, end):
                mask, token = matcher.allowed(), token_ids[place]
                if not mask[token >> 5] >> (token & 31) & 1:
                    raise _forbidden(place, token)
                index_T[place] = numbers.setdefault(mask.tobytes(), len(numbers))
                matcher.advance(token)
        words = np.frombuffer(b"".join(numbers), dtype=np.int32).reshape(len(numbers), -1)
        return AllowedColumn(words, index_T)

    def check(self, token_ids: Sequence[int], constrained: Sequence[tuple[Constraint, int]]) -> None:
        """Raises GrammarError as `column` does, without the masks: a grammar reads a token much faster than it lists all that it
        allows."""
        for constraint, end in constrained:
            matcher = self.matcher(constraint)
            for place in range(constraint.start, end):
                try:
                    matcher.advance(token_ids[place])
                except GrammarError:
                    raise _forbidden(place, token_ids[place]) from None

    def _compile(self, stops: tuple[int, ...]) -> LLTokenizer:
        _required()
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, eos_token=list(stops) or None)
        except ValueError as error:
            raise ConfigError(
                f"a grammar needs a fast tokenizer that llguidance can read, and {type(self._tokenizer).__name__} is none "
                f"({error}): remove tool_calls.constrain, tool_calls.choice and sampling.response_format"
            ) from None


def _forbidden(place: int, token: int) -> GrammarError:
    return GrammarError(
        f"token {place} of a segment ({token}) was sampled under a grammar that does not allow it there: the engine had another "
        f"mask than the trainer (another tokenizer, or another version of llguidance)"
    )


class Matcher:
    """Where a turn is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, as bits: uint32 [W], bit `t % 32` of word `t // 32` for token `t`.

        Raises GrammarError if the grammar cannot go on, such as after its limits are reached.
        """
        bits = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        mask = np.frombuffer(bits + bytes(-len(bits) % 4), dtype=np.uint32)
        if self._matcher.is_error() or not mask.any():
            raise GrammarError(
                f"the grammar of a turn allows no further token: {self._matcher.get_error() or 'it has ended'}"
            )
        return mask

    def advance(self, token: int) -> None:
        """A token was sampled. Raises GrammarError if the grammar does not allow it."""
        if not self._matcher.consume_token(token):
            raise GrammarError(f"the grammar of a turn does not allow token {token}: {self._matcher.get_error()}")


def _required() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError(
            "tool_calls.constrain, tool_calls.choice and sampling.response_format need the package `llguidance`: "
            "pip install 'turnwise[constrain]'"
        ) from None
