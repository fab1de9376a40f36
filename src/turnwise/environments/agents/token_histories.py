"""What the requests of an agent that calls the model with token ids mean for the conversation, and what of it is trained on.

`TokenHistories` holds the conversation as the agent sees it: the tokens of each prompt and of each answer. A request extends it,
leaves out the end of the last answer, returns to an earlier history, or begins another one. `unreturned_tokens` compares what the
agent returned as its trajectory with what was sampled. This module knows token ids and no chat template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.environments.agents.continuation import Relation
from turnwise.types import EarlierHistory, Message, Reply, ToolSchema, Turn, common_length

__all__ = ["ContextText", "Describe", "ReturnedSequence", "TokenHistories", "unreturned_tokens"]

_TOLERANCE = 1e-3
"""The difference of two log-probabilities that rounding explains: agents keep them in float32 or as text."""
_MOST_LIVE = 64
"""Histories that are compared with a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextText:
    """What tokens that the model did not sample say, for the record."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] | None = None
    """The tools that the prompt offers; None if the tokens say nothing of tools."""


Describe = Callable[[Sequence[int], Message | None], ContextText]
"""Describes the tokens of a prompt behind a message of the model (None: from the beginning)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedSequence:
    """A trajectory as an agent returned it.

    Example: `prompt_ids=P0 P0, response_ids=A0 A0 E0 A1, mask=1 1 0 1`.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]
    """1 for each token of the response that is trained on."""
    logprobs: Sequence[float] | None = None
    """Of the tokens of the response; 0 where the model did not sample. None if the agent returned none."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.response_ids),
            len(self.mask),
            len(self.response_ids if self.logprobs is None else self.logprobs),
        }
        if len(lengths) > 1:
            raise ValueError(
                f"the agent returned {len(self.response_ids)} response ids, a mask of {len(self.mask)} and "
                f"{'no' if self.logprobs is None else len(self.logprobs)} log-probabilities: they must have the same length"
            )


@dataclass(slots=True)
class _History:
    """One unbroken sequence of tokens. The columns have equal length."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[tuple[int, int] | None] = field(default_factory=list)
    """The turn and the position in it of each token that the model sampled; None for context."""
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last_turn: int = 0
    """Where the tokens of the last turn begin."""

    def append_context(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.sampled.extend([None] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))

    def cut(self, length: int) -> None:
        for column in (self.tokens, self.sampled, self.logprobs):
            del column[length:]


class TokenHistories:
    """The histories of one conversation: the present one, and those that a request may return to."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self._current = _History()
        self._live: dict[int, _History] = {}
        """Earlier histories by their index in `Trajectory.previous_histories`; the latest last."""
        self._ended: list[_History] = []
        """Histories that cannot be continued any more."""
        self._replaced = 0
        self._tools: Sequence[ToolSchema] = ()

    @property
    def all(self) -> list[_History]:
        """All histories of the conversation."""
        return [*self._ended, *self._live.values(), self._current]

    def begin(self, prompt: Sequence[int]) -> ContextText:
        """Take the first prompt."""
        text = self._describe(prompt, None)
        self._current.append_context(prompt)
        self._current.messages = list(text.messages)
        self._tools = text.tools or ()
        return ContextText(messages=text.messages, tools=self._tools)

    def add_turn(self, turn: Turn) -> None:
        """Take a turn of the model."""
        assert turn.completion is not None
        ids, history = turn.completion.token_ids, self._current
        history.last_turn = len(history.tokens)
        history.tokens.extend(ids)
        history.sampled.extend((turn.index, position) for position in range(len(ids)))
        history.logprobs.extend(turn.completion.logprobs)
        history.messages.append(dict(turn.message))

    def reply(self, prompt: Sequence[int]) -> tuple[Reply, Relation]:
        """The reply to the last turn that leads to the request with this prompt, and the relation of the two."""
        current = self._current
        common = common_length(current.tokens, prompt)
        last = len(current.tokens) - current.last_turn
        if common == len(current.tokens):
            return self._extended(prompt, Relation.EXTENDED)
        if common < len(prompt) and 2 * (common - current.last_turn) >= last and common > current.last_turn:
            current.cut(common)
            return self._extended(prompt, Relation.REALIGNED)
        earlier = next(
            (n for n, live in reversed(self._live.items()) if common_length(live.tokens, prompt) == len(live.tokens)),
            None,
        )
        self._live[self._replaced] = current
        self._replaced += 1
        if earlier is not None:
            self._current = self._live.pop(earlier)
            first_new = len(self._current.messages)
            reply, _ = self._extended(prompt, Relation.RETURNED)
            return (
                Reply(
                    rewrite=list(self._current.messages),
                    returns_to=EarlierHistory(index=earlier, first_new=first_new),
                    tools=reply.tools,
                    prompt_ids=reply.prompt_ids,
                ),
                Relation.RETURNED,
            )
        while len(self._live) > _MOST_LIVE:
            self._ended.append(self._live.pop(next(iter(self._live))))
        self._current, before = _History(), self._tools
        text = self.begin(prompt)
        tools = None if list(before) == list(self._tools) else self._tools
        return Reply(rewrite=list(text.messages), tools=tools, prompt_ids=list(prompt)), Relation.FORKED

    def _extended(self, prompt: Sequence[int], relation: Relation) -> tuple[Reply, Relation]:
        current = self._current
        new = prompt[len(current.tokens) :]
        text = self._describe(new, current.messages[-1]) if new else ContextText(messages=())
        current.append_context(new)
        current.messages.extend(text.messages)
        changed = text.tools is not None and list(text.tools) != list(self._tools)
        if changed:
            self._tools = text.tools or ()
        reply = Reply(messages=list(text.messages), tools=self._tools if changed else None, prompt_ids=list(prompt))
        return reply, relation


def unreturned_tokens(histories: TokenHistories, returned: Sequence[ReturnedSequence]) -> Mapping[int, list[int]]:
    """The sampled tokens that the agent did not return with the mask 1, as positions by turn: they are not trained on.

    Raises ValueError if a token with the mask 1 was not sampled at that place, or if its log-probability is another one.
    """
    trained: set[tuple[int, int]] = set()
    for one in returned:
        trained |= _trained(histories.all, one)
    left_out: dict[int, list[int]] = {}
    for place in sorted(
        {place for history in histories.all for place in history.sampled if place is not None} - trained
    ):
        left_out.setdefault(place[0], []).append(place[1])
    return left_out


def _trained(histories: Sequence[_History], returned: ReturnedSequence) -> set[tuple[int, int]]:
    tokens, prompt = [*returned.prompt_ids, *returned.response_ids], len(returned.prompt_ids)
    history = max(histories, key=lambda one: common_length(one.tokens, tokens))
    common = common_length(history.tokens, tokens)
    trained: set[tuple[int, int]] = set()
    for index, weight in enumerate(returned.mask):
        if weight not in (0, 1):
            raise ValueError(f"the mask of response token {index} is {weight!r:.40}: it must be 0 or 1")
        if not weight:
            continue
        place = history.sampled[prompt + index] if prompt + index < common else None
        if place is None:
            raise ValueError(
                f"the agent returned the token {tokens[prompt + index]} at position {index} of the response with the mask 1, "
                f"and the "
                f"model did not sample it there: return sampled tokens as they are, and give all other tokens the mask 0"
            )
        if returned.logprobs is not None:
            had, got = history.logprobs[prompt + index], float(returned.logprobs[index])
            if not math.isclose(had, got, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                raise ValueError(
                    f"the agent returned the log-probability {got:.6g} of token {index} of the response, and the engine gave "
                    f"{had:.6g}: return the log-probabilities as they are, or return none"
                )
        trained.add(place)
    return trained
