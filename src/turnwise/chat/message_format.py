"""In which shape a template takes messages: content, tool calls, ids of calls, tools.

Found by rendering probes, not by the name of a model family. Templates insist on different shapes: arguments as JSON text or as
an object, short ids, content as a text or in parts. Knows messages and rendered texts. Does not know tokens, nor which roles a
template accepts one after another (`template.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.chat.probes import (
    DESCRIBED_TOOL,
    PLACEHOLDER,
    QUESTION,
    TOOL,
    RenderMessages,
    assistant_message,
    probe_call,
)
from turnwise.chat.tool_calls.describe import undescribed
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

# Shapes: messages written as a template insists on

PARTS = ("text", "image", "image_url", "video")


def with_calls(message: Message, *, as_text: bool, empty: str | None) -> Message:
    """An assistant message with its calls in the shape that a template takes."""
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls, "content": message.get("content") or empty}


def with_short_ids(message: Message) -> Message:
    """A message whose ids of calls are nine letters and digits, the same for the same id: `call_0` is `call00000`."""
    calls = [{**call, "id": _short(str(call.get("id") or ""))} for call in message.get("tool_calls") or ()]
    shortened = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool":
        shortened["tool_call_id"] = _short(str(message.get("tool_call_id") or ""))
    return shortened


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    number = id.removeprefix("call_")
    if number.isascii() and number.isdigit() and len(number) <= 5:
        return f"call{number:0>5}"
    return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]


def with_named_ids(message: Message) -> Message:
    """A message whose ids of calls hold the tool's name as Kimi has it: `call_3` of `lookup` is `functions.lookup:3`."""
    calls = [
        {**call, "id": _named(str(call.get("id") or ""), str(call["function"]["name"]))}
        for call in message.get("tool_calls") or ()
    ]
    named = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool" and message.get("name"):
        named["tool_call_id"] = _named(str(message.get("tool_call_id") or ""), str(message["name"]))
    return named


def _named(id: str, name: str) -> str:
    if name in id:
        return id
    digits = id[len(id.rstrip("0123456789")) :]
    return f"functions.{name}:{int(digits[-9:] or 0)}"


def with_description(messages: Sequence[Message], text: str, *, accepts_system: bool) -> list[Message]:
    """The messages with a description of the tools at the end of the system message.

    Without one, it is a system message of its own, or the beginning of the first message if the template accepts none.
    """
    first = messages[0] if messages else None
    if first is not None and first.get("role") in ("system", "developer"):
        return [{**first, "content": joined(first.get("content"), text)}, *messages[1:]]
    if accepts_system or first is None:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": joined(text, first.get("content"))}, *messages[1:]]


def joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts with an empty line between them, or the parts of both."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[Any] = []
    for content in (first, second):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    return parts


def check_content(message: Message) -> None:
    """Raise TemplateError if the content of a message is neither a text nor a list of parts that templates know."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, message)
    elif content is not None and not isinstance(content, str):
        raise TemplateError(
            f"the content of a {message.get('role')!r} message is a {type(content).__name__}; it must be a text, or a "
            f'list of parts such as {{"type": "text", "text": ...}} and {{"type": "image", "image": ...}}'
        )


def _check_part(part: Any, message: Message) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in PARTS or (kind == "text" and not isinstance(part.get("text"), str)):
        raise TemplateError(
            f"a {message.get('role')!r} message has a content part {part!r:.80}; parts are "
            f'{{"type": "text", "text": ...}}, {{"type": "image", "image": ...}} and {{"type": "video", "video": ...}}'
        )


# Format: which of the shapes a template takes

CallIds = Literal["any", "nine characters", "tool name"]
"""Which ids of tool calls a template takes: any; nine letters and digits (Mistral); `functions.<tool name>:<n>` (Kimi)."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How tool calls are given to a template in an assistant message."""

    json_arguments: bool
    """Whether arguments are given as JSON text, and not as an object."""
    empty_content: str | None
    """The content of a message that has calls and no text."""
    ids: CallIds
    requires_tools: bool
    """Whether the template writes calls only in conversations that offer tools."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The shape in which a template takes messages."""

    content_as_parts: bool = False
    """Whether the content must be a list of parts, for texts too."""
    requires_tools: bool = False
    """Whether the template refuses conversations without tools."""
    describes_tools: bool = False
    """Whether the template writes the names and the parameters of the tools on offer into the prompt."""
    calls: CallFormat | None = None
    """None if the template writes no tool calls."""

    def shaped(self, message: Message) -> Message:
        """A message in this shape. Raises TemplateError if its content is neither a text nor known parts."""
        check_content(message)
        content = message.get("content")
        if self.content_as_parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if self.calls is None:
            return message
        if message.get("tool_calls"):
            message = with_calls(message, as_text=self.calls.json_arguments, empty=self.calls.empty_content)
        if message.get("tool_calls") or message.get("role") == "tool":
            if self.calls.ids == "tool name":
                return with_named_ids(message)
            if self.calls.ids == "nine characters":
                return with_short_ids(message)
        return message

    def probe_tools(self, messages: Sequence[Message] = ()) -> Sequence[ToolSchema]:
        """The tools that probe messages are rendered with: none, or the probe tool where the template needs one."""
        has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        required = self.calls.requires_tools if has_calls and self.calls is not None else self.requires_tools
        return (TOOL,) if required else ()


def find_message_format(render: RenderMessages, where: str) -> MessageFormat:
    """Find out in which shape a template takes messages. `where` names it in error messages.

    Raises TemplateError if there is no shape in which it writes an assistant message's content unchanged.
    """
    base = _content_format(render, where)
    try:
        described = render([base.shaped(QUESTION)], add_generation_prompt=True, tools=[DESCRIBED_TOOL])
    except TemplateError:
        described = ""
    describes = not undescribed([DESCRIBED_TOOL], described)
    return MessageFormat(base.content_as_parts, base.requires_tools, describes, _call_format(render, base))


def _content_format(render: RenderMessages, where: str) -> MessageFormat:
    """Content as text or as parts, without tools or, where the template refuses that, with a tool."""
    first: TemplateError | None = None
    for requires_tools, as_parts in itertools.product((False, True), (False, True)):
        format = MessageFormat(as_parts, requires_tools)
        messages = [format.shaped(QUESTION), format.shaped(assistant_message(PLACEHOLDER))]
        try:
            if PLACEHOLDER in render(messages, add_generation_prompt=False, tools=format.probe_tools()):
                return format
        except TemplateError as error:
            if "no valid Jinja" in str(error):
                raise
            if as_parts:  # as text it was refused too, or written without its content
                first = first or error
    if first is not None:
        raise first
    written = render([QUESTION, assistant_message(PLACEHOLDER)], add_generation_prompt=False, tools=())
    raise TemplateError(
        f"the chat template of {where} does not write an assistant message's content as it is, so a conversation "
        f"cannot be continued without rendering it again. It wrote: {written[-200:]!r}"
    )


def _call_format(render: RenderMessages, base: MessageFormat) -> CallFormat | None:
    """How calls are given. Conversations without tools are tried first; some templates write calls only with tools."""
    turn = probe_call({"text": PLACEHOLDER})
    question = base.shaped(QUESTION)
    tool_choices = dict.fromkeys((base.requires_tools, True))
    for requires_tools, named_ids, as_text, empty in itertools.product(
        tool_choices, (False, True), (False, True), ("", None)
    ):
        ids: CallIds = "tool name" if named_ids else "any"
        calls = CallFormat(as_text, empty, ids, requires_tools)
        shaped = MessageFormat(base.content_as_parts, calls=calls).shaped(turn)
        try:
            text = render([question, shaped], add_generation_prompt=False, tools=(TOOL,) if requires_tools else ())
        except TemplateError:
            continue
        behind = text.partition(QUESTION["content"])[2]  # the tools are described in front of the question
        if PLACEHOLDER in text and turn["tool_calls"][0]["function"]["name"] in behind:
            if ids == "any" and _needs_short_ids(render, base, calls):
                return CallFormat(as_text, empty, "nine characters", requires_tools)
            return calls
    return None


def _needs_short_ids(render: RenderMessages, base: MessageFormat, calls: CallFormat) -> bool:
    """Whether the template refuses the id `call_0` and takes one of nine letters and digits."""
    turn = probe_call({"text": "x"})
    turn["tool_calls"][0]["id"] = "call_0"
    answer: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "An answer."}

    def accepts(ids: CallIds) -> bool:
        trial = CallFormat(calls.json_arguments, calls.empty_content, ids, calls.requires_tools)
        format = MessageFormat(base.content_as_parts, base.requires_tools, calls=trial)
        messages = [format.shaped(message) for message in (QUESTION, turn, answer)]
        try:
            render(messages, add_generation_prompt=True, tools=format.probe_tools(messages))
        except TemplateError:
            return False
        return True

    return not accepts("any") and accepts("nine characters")
