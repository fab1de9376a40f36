"""Probe messages and base conversations with which a template is examined, and the caches of the answers.

A probe word is rendered inside a message, and its place in the rendered text shows what the template writes around it. A base
conversation is short and ends with a turn of the model; what the template writes after that turn is the bridge to the next
turn. It has the same features as the real conversation, as far as a template may look at them: a system message, tools, an
earlier round of tools. For templates that count rounds or answers, the real messages are used instead
(`PriorConversation.messages`).

What depends on the template alone is asked once and kept in `TemplateProfile`. All other caches of this folder are here, with
their bounds: answers that depend on a sequence of message roles (a conversation repeats few of them), the token ids of
texts, the renderings of short conversations (the samples of a group have the same opening, and often the same calls and
results), and the renderers of rows with template arguments of their own (a data set has few sets of them). This module renders
nothing.
"""

from __future__ import annotations

import functools
import itertools
import marshal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from turnwise.types import Message, ToolSchema

# Probes: short messages and marker words

PLACEHOLDER = "placeholder-7f3a91"  # letters and digits: no template trims, escapes or splits it
"""Stands for the last words of the model's turn."""

QUESTION: Message = {"role": "user", "content": "A question."}

SYSTEM_WORD = "system-5c81d4"
"""The content of the system message of a base conversation."""

TOOL_WORD = "tool-5c81d4"
"""The description of the probe tool."""

TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": TOOL_WORD,
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}},
    },
}

DESCRIBED_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "tool_5c81d4",
        "description": TOOL_WORD,
        "parameters": {
            "type": "object",
            "properties": {"parameter_5c81d4": {"type": "string", "description": "A text."}},
        },
    },
}
"""A tool whose name and parameter no template contains, to see whether a template shows tools."""


def assistant_message(text: str) -> Message:
    """An assistant message with this content."""
    return {"role": "assistant", "content": text}


def probe_call(*arguments: Mapping[str, Any], name: str = "probe_tool") -> Message:
    """An assistant message that calls a tool once for each of `arguments`."""
    calls = [
        # nine letters and digits: some templates accept no other ids
        {"type": "function", "id": f"callprob{number}", "function": {"name": name, "arguments": dict(values)}}
        for number, values in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def roles_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """The roles of messages; an assistant message with tool calls has the role `calls`."""
    return tuple("calls" if message.get("tool_calls") else str(message["role"]) for message in messages)


def probe_messages(roles: Sequence[str]) -> list[Message]:
    """Messages of these roles (`roles_of`) with probe words as content.

    A turn of the role `calls` has a call for each tool message that follows it.
    """
    messages: list[Message] = []
    for number, role in enumerate(roles):
        if role != "calls":
            messages.append(probe_message(role, number))
            continue
        following = enumerate(roles[number + 1 :])
        answers = next((count for count, after in following if after != "tool"), len(roles) - number - 1)
        turn = probe_call(*[{"text": "x"}] * max(1, answers))
        for offset, call in enumerate(turn["tool_calls"], 1):
            call["id"] = f"callprob{number + offset}"
        messages.append(turn)
    return messages


def probe_message(role: str, number: int) -> Message:
    """A message of a role with a probe word as content."""
    extra = {"tool_call_id": f"callprob{number}", "name": "probe_tool"} if role == "tool" else {}
    return {"role": role, "content": probe_word(number), **extra}


def probe_word(number: int) -> str:
    """A word that no template contains."""
    return f"probe-{number}-5c81d4"


def probe_words_in(messages: Sequence[Message]) -> Iterator[str]:
    """The probe words in messages, in order. A merged message may hold several."""
    for message in messages:
        for word in str(message["content"]).split():
            if word.startswith("probe-"):
                yield word


# Base conversations: they end with a turn of the model, after which new messages are rendered

BaseTurn = Literal["calls", "call", "text"]
"""What the model's turn at the end of a base conversation contains: a call for each tool message, a single call, or text."""

_ROUNDS = 7
"""Rounds by which a conversation is made longer, to see whether a template counts them. No small number divides it."""


@dataclass(frozen=True, slots=True)
class PriorConversation:
    """The features of a conversation that may change what a template writes after the model's turn."""

    has_tool_messages: bool = False
    """Whether tools have answered before: some templates write the first answer differently."""
    system_role: str = ""
    """The role of the system message at the beginning (`system` or `developer`); empty if there is none."""
    has_tools: bool = False
    """Whether the conversation offers tools."""
    messages: Sequence[Message] = field(default=(), compare=False, repr=False)
    """All messages as the template receives them, the model's last turn included. Used only for templates that count."""

    @classmethod
    def from_messages(cls, messages: Sequence[Message], *, has_tools: bool = False) -> PriorConversation:
        """The features of `messages`, which are as the template receives them. The last message is the model's turn."""
        has_tool_messages = any(message["role"] == "tool" for message in messages)
        return cls(has_tool_messages, system_role(messages), has_tools, messages)

    @property
    def without_messages(self) -> PriorConversation:
        """The same features, to be rendered after a base conversation of fixed length."""
        return replace(self, messages=())

    @property
    def probe_tools(self) -> Sequence[ToolSchema] | None:
        """The tools that the base conversation is rendered with; None means the default tools of a probe."""
        return (TOOL,) if self.has_tools else None


NO_CONVERSATION = PriorConversation()


def system_role(messages: Sequence[Message]) -> str:
    """The role of the system message at the beginning; empty if there is none."""
    return str(messages[0]["role"]) if messages and messages[0]["role"] in ("system", "developer") else ""


def simpler_conversations(prior: PriorConversation) -> Iterator[PriorConversation]:
    """`prior`, then the same with features left out: a template may refuse a feature, or write it into the bridge."""
    for has_tool_messages, role, has_tools in itertools.product(
        dict.fromkeys((prior.has_tool_messages, False)),
        dict.fromkeys((prior.system_role, "")),
        dict.fromkeys((prior.has_tools, False)),
    ):
        yield PriorConversation(has_tool_messages, role, has_tools)


def base_conversation(
    base: BaseTurn, messages: Sequence[Message], prior: PriorConversation, *, writes_calls: bool
) -> list[Message] | None:
    """The conversation to render in front of `messages`. Its last turn ends with the placeholder.

    None if there is no such conversation: calls, where the template writes none or `messages` hold no answers to them.
    """
    answers = [message for message in messages if message["role"] == "tool"]
    if base == "text":
        turn = assistant_message(PLACEHOLDER)
    elif not writes_calls or not answers:
        return None
    else:
        turn = probe_call(*[{"text": PLACEHOLDER}] * (len(answers) if base == "calls" else 1))
        for call, answer in zip(turn["tool_calls"], answers, strict=False):
            call["id"] = str(answer.get("tool_call_id") or call["id"])
            call["function"]["name"] = str(answer.get("name") or call["function"]["name"])
    if prior.messages:
        real = list(prior.messages[:-1])
        return [*(real[1:] if system_role(real) and not prior.system_role else real), turn]
    start: list[Message] = [{"role": prior.system_role, "content": SYSTEM_WORD}] if prior.system_role else []
    calls = writes_calls and (base != "text" or not answers)
    return [*start, QUESTION, *(_tool_round(0, calls=calls) if prior.has_tool_messages else []), turn]


def longer_conversations(conversation: Sequence[Message], prior: PriorConversation) -> Iterator[list[Message]]:
    """A base conversation with more rounds: rounds of questions, and rounds of tools if it has tool messages."""
    start = 1 if prior.system_role else 0
    yield [*conversation[:start], *[QUESTION, assistant_message("Words.")] * _ROUNDS, *conversation[start:]]
    if prior.has_tool_messages:
        calls = bool(conversation[start + 1].get("tool_calls"))
        rounds = [message for number in range(1, _ROUNDS + 1) for message in _tool_round(number, calls=calls)]
        yield [*conversation[: start + 1], *rounds, *conversation[start + 1 :]]


def _tool_round(number: int, *, calls: bool) -> list[Message]:
    """A turn, and the answer of a tool to it."""
    id = f"earlier{number:02}"  # nine letters and digits: some templates accept no other ids
    turn = probe_call({"text": "earlier"}) if calls else assistant_message("Words.")
    for call in turn.get("tool_calls") or ():
        call["id"] = id
    return [turn, {"role": "tool", "tool_call_id": id, "name": "probe_tool", "content": "An answer."}]


# Caches and their bounds

ROLE_SEQUENCES = 1024
"""Answers kept for each question about a sequence of roles; the least recently used one is dropped first."""

ARGUMENT_SETS = 64
"""Sets of template arguments whose renderer is kept."""

TEXTS = 512
"""Texts of which the token ids are kept."""

LONGEST_TEXT = 8192
"""Characters of a text, and bytes of a conversation, that are kept in a cache at most."""


TOKEN_BYTES = 1 << 26
"""Bytes of the texts whose token ids are kept, and of these."""
_BYTES_OF_A_TOKEN = 40


class TokenCache:
    """The token ids of texts, with a bound on their number and on their bytes. May be called from any thread.

    `encode` returns the ids of a text behind a token; None: at the beginning.
    """

    def __init__(self, encode: Callable[[str, int | None], tuple[int, ...]], *, most_bytes: int = TOKEN_BYTES) -> None:
        self._encode = encode
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, int | None], tuple[int, ...]] = OrderedDict()
        """The latest last."""
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, text: str, behind: int | None = None) -> tuple[int, ...]:
        key = (text, behind)
        with self._lock:
            if (ids := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return ids
        ids = self._encode(text, behind)  # without the lock: a text may be long
        size = _size(text, ids)
        with self._lock:
            if size <= self._most_bytes // 8 and key not in self._kept:
                self._kept[key] = ids
                self._bytes += size
                while self._bytes > self._most_bytes or len(self._kept) > TEXTS:
                    (oldest, _), of_oldest = self._kept.popitem(last=False)
                    self._bytes -= _size(oldest, of_oldest)
        return ids


def _size(text: str, ids: Sequence[int]) -> int:
    return sys.getsizeof(text) + _BYTES_OF_A_TOKEN * len(ids)


class RenderMessages(Protocol):
    """Renders messages as one text, which depends on the arguments only. Raises TemplateError if the template refuses them.

    `tools` are those of the conversation; None for a probe.
    """

    def __call__(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema] | None = None
    ) -> str: ...


def cached_by_content(render: RenderMessages) -> RenderMessages:
    """The rendering function with a cache. Conversations that are long, or that hold more than plain data, are not cached."""

    @dataclass(frozen=True, slots=True)
    class RenderArguments:
        content: bytes
        messages: Sequence[Message] = field(compare=False)
        add_generation_prompt: bool = field(compare=False)
        tools: Sequence[ToolSchema] | None = field(compare=False)

    @functools.lru_cache(maxsize=TEXTS)
    def rendered(arguments: RenderArguments) -> str:
        prompts = arguments.add_generation_prompt
        return render(arguments.messages, add_generation_prompt=prompts, tools=arguments.tools)

    def cached(
        messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema] | None = None
    ) -> str:
        try:
            # version 2 of the format: equal values give equal bytes. Images and other objects raise ValueError
            content = marshal.dumps((list(messages), add_generation_prompt, list(tools or ())), 2)
        except ValueError:
            content = b""
        if not 0 < len(content) <= LONGEST_TEXT:
            return render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return rendered(RenderArguments(content, messages, add_generation_prompt, tools))

    return cached
