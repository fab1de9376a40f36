"""How a request of an agent continues what is held of the conversation: by its messages, or by the tokens of its prompt.

A request extends what is held, changes the last answer a little, returns to an earlier history, or begins a new segment. Its
messages are compared with those of the request before, and with the answer to that request. Clients write an answer in their own
form when they send it back, so two messages also count as equal if only their form differs: white space at the ends of the
content, the formatting of JSON, missing reasoning, ids of calls. Tokens are compared as they are.

Knows no HTTP and no agents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from turnwise.types import EarlierHistory, Edit, Message, Reply, Resume, ToolSchema, Turn, common_length

# by messages

_MOST_LIVE = 64
"""Histories that are compared with a request."""


class Relation(StrEnum):
    """How the messages of a request relate to the conversation that is held. The values are names in metrics."""

    EXTENDED = "extended"
    """They repeat the conversation exactly, and new messages follow."""
    REALIGNED = "realigned"
    """They repeat the conversation but for the last answer, which the client wrote a little differently."""
    RETURNED = "returned"
    """They continue an earlier history of the conversation, such as that of another agent."""
    FORKED = "forked"
    """They are another history. A new segment begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The relation of a request to the conversation, and what follows from it."""

    relation: Relation
    new: int = 0
    """Index of the first new message; 0 with a fork."""
    edit: Edit | None = None
    """With REALIGNED, the change of the last turn. None if only the form of the answer differs: the sampled tokens stay."""
    resume: Resume | None = None
    """If the model continues its last answer, how. Then there are no new messages."""
    reason: str = ""
    """What differs, for the record; empty with EXTENDED."""


def continuation(
    held: Sequence[Message], messages: Sequence[Message], text: str, *, begun: str = "", prefill: str = ""
) -> Continuation:
    """Compare the messages of a request with the conversation `held`, whose last message is the answer of the last turn.

    `text` is the sampled text of that turn, and `begun` the beginning of the answer that the client gave. `prefill` is the
    beginning of the next answer.
    """
    last = len(held) - 1
    for index, (before, now) in enumerate(zip(held[:last], messages, strict=False)):
        if not _same_form(before, now):
            return _fork(f"message {index} ({now['role']}) differs")
    if len(messages) == last and (resume := _resume(held[last], prefill, text, begun)) is not None:
        whole = resume.keep == len(text) and not resume.add
        return Continuation(
            relation=Relation.EXTENDED if whole else Relation.REALIGNED,
            new=last,
            resume=resume,
            reason="" if whole else "the text of the last answer, which is continued, differs",
        )
    if len(messages) <= len(held):
        return _fork(f"the request has {len(messages)} messages, and the conversation had {len(held)}")
    answer, repeated = held[last], messages[last]
    if repeated["role"] != "assistant":
        return _fork(f"message {last} is not the last answer: its role is {repeated['role']}")
    if _same(answer, repeated):
        return Continuation(relation=Relation.EXTENDED, new=len(held))
    if _same_form(answer, repeated):
        return Continuation(relation=Relation.REALIGNED, new=len(held), reason="the form of the last answer differs")
    edit = _edit(answer, repeated, text, begun)
    if edit is None:
        return _fork("the last answer differs")
    return Continuation(
        relation=Relation.REALIGNED, new=len(held), edit=edit, reason="the text of the last answer differs"
    )


@dataclass(frozen=True, slots=True)
class LiveHistory:
    """A history of a conversation, its last answer included."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    arguments: Mapping[str, Any]
    """The arguments of the chat template (`chat_template_kwargs`)."""
    text: str
    """The sampled text of the last turn."""
    begun: str = ""
    """The beginning of the last answer that the client gave."""


class LiveHistories:
    """The histories of a conversation that a later request may continue, besides the present one."""

    def __init__(self) -> None:
        self._replaced = 0
        """How often the history was replaced: the index of the next history in `Trajectory.previous_histories`."""
        self._live: dict[int, LiveHistory] = {}
        """By their index; the latest last."""

    def replace(self, present: LiveHistory, returned: int | None) -> None:
        """The present history is replaced: by the history `returned`, or by a new history."""
        self._live[self._replaced] = present
        self._replaced += 1
        if returned is not None:
            del self._live[returned]
        while len(self._live) > _MOST_LIVE:
            del self._live[next(iter(self._live))]

    def find(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], arguments: Mapping[str, Any]
    ) -> EarlierHistory | None:
        """The latest history that these messages continue with no other text in its answers, and whose prompts were written with
        the same tools and template arguments; None if there is none."""
        for index, live in reversed(self._live.items()):
            if list(live.tools) == list(tools) and live.arguments == arguments:
                found = continuation(live.messages, messages, live.text, begun=live.begun)
                if found.new and found.edit is None:
                    return EarlierHistory(index=index, first_new=found.new)
        return None


def _fork(reason: str) -> Continuation:
    return Continuation(relation=Relation.FORKED, reason=reason)


def _edit(answer: Message, repeated: Message, text: str, begun: str) -> Edit | None:
    """The change of the turn's text that makes the answer the client's. None if at least half of the client's text is new, if
    there are tool calls, or if the content is not in the sampled text."""
    if repeated.get("tool_calls") or answer["content"] == repeated["content"]:
        return None
    found = _kept(answer, repeated["content"], text, begun)
    return None if found is None else Edit(keep=found[0], add=found[1])


def _resume(answer: Message, prefill: str, text: str, begun: str) -> Resume | None:
    """How the model continues its last answer, of which the client sends `prefill`; None if that is another text."""
    found = _kept(answer, prefill, text, begun) if prefill else None
    return None if found is None else Resume(keep=found[0], add=found[1])


def _kept(answer: Message, new: Any, text: str, begun: str) -> tuple[int, str] | None:
    """How many characters of the sampled text stay in the client's text of an answer, and what follows them there."""
    old = str(answer["content"])[len(begun) :]
    if answer.get("tool_calls") or not isinstance(new, str) or not new.startswith(begun) or not old:
        return None
    # behind the reasoning, the first place: the sampled text may have the answer again, behind a stop text
    reasoning = _reasoning(answer)
    behind = text.find(reasoning) + len(reasoning) if reasoning and reasoning in text else 0
    new, start = new[len(begun) :], text.find(old, behind)
    common = common_length(old, new)
    if start < 0 or 2 * common <= len(new):
        return None
    return start + common, new[common:]


def _same(first: Message, second: Message) -> bool:
    names = ("role", "content", "tool_calls", "tool_call_id")
    return _reasoning(first) == _reasoning(second) and all(
        (first.get(name) or "") == (second.get(name) or "") for name in names
    )


def _same_form(first: Message, second: Message) -> bool:
    """Whether two messages differ in their form only."""
    reasoning = _reasoning(second)
    return (
        first["role"] == second["role"]
        and _bare(first["content"]) == _bare(second["content"])
        and _calls(first) == _calls(second)
        and first.get("tool_call_id") == second.get("tool_call_id")
        and (not reasoning or not _reasoning(first) or reasoning.strip() == _reasoning(first).strip())
    )


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or "")


def _bare(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _calls(message: Message) -> list[tuple[str, Any]]:
    """The names and arguments of a message's calls; arguments that are not JSON as text."""
    return [
        (call["function"]["name"], _json(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    ]


def _json(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


# by tokens

_TOLERANCE = 1e-3
"""The difference of two log-probabilities that rounding explains: agents keep them in float32 or as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextText:
    """What tokens that the model did not sample say, for the record."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] | None = None
    """The tools that the prompt offers; None if the tokens say nothing of tools."""


Describe = Callable[[Sequence[int], Message | None], ContextText]
"""Describes the tokens of a prompt after a message of the model (None: from the beginning)."""


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
