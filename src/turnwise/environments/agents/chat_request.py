"""A request for a turn of the model and its answer, in a form that does not depend on the API of the client.

Messages are in the OpenAI format, with the arguments of tool calls as JSON text, as clients send them. `template_messages` gives
the form that chat templates take. This module knows no HTTP and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.types import Message, SamplingChange, ToolSchema, Turn

__all__ = [
    "AgentAnswer",
    "ChatRequest",
    "Refused",
    "answer_message",
    "content_text",
    "function_tool",
    "image_part",
    "json_object",
    "offered_tools",
    "template_arguments",
    "template_messages",
    "tool_call",
]


class Refused(Exception):
    """A request that is answered with an HTTP error. `parameter` names the part of the request that is wrong, if it is known."""

    def __init__(self, status: int, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asks for."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    """The tools that the model may call; empty with `tool_choice: none`."""
    sampling: SamplingChange = field(default_factory=SamplingChange)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `{"enable_thinking": False}`: a field of vLLM's and SGLang's servers."""
    forced: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the client has set and that have no effect, because the recipe decides them: name -> value."""
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of chat completions ends with the counts of tokens."""
    model: str = "model"
    """The name of the model that the client asked for. The answer repeats it."""
    instructions: Message | None = None
    """Responses API: the system message, which is not part of the stored conversation."""
    previous_response: str | None = None
    """Responses API: the id of the answer that `messages` continue."""

    @property
    def conversation(self) -> list[Message]:
        """All messages, the instructions first."""
        return [*([self.instructions] if self.instructions is not None else []), *self.messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """A turn of the model for a client."""

    id: str
    """Letters and digits, without the prefix that each API has."""
    created: int
    """Unix seconds."""
    model: str
    message: Message
    """The assistant message as the client receives it: `content`, and `tool_calls` and `reasoning_content` if there are any."""
    prompt_tokens: int
    completion_tokens: int
    cut: bool = False
    """Whether the client's own limit on tokens has cut the turn."""

    @property
    def text(self) -> str:
        """The content, which may be empty."""
        return str(self.message["content"])

    @property
    def reasoning(self) -> str:
        """The reasoning, or an empty text."""
        return str(self.message.get("reasoning_content") or "")

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls in the OpenAI format."""
        return self.message.get("tool_calls") or ()


def answer_message(turn: Turn, stop: Sequence[str] | None = None) -> Message:
    """The assistant message of a turn. The content ends in front of the first of the texts `stop`.

    If no tool call of the turn can be parsed, the calls are part of the content, so that the client sees them.
    """
    calls = [call for call in turn.calls if call.error is None]
    content = str(turn.message.get("content") or "")
    if turn.calls and not calls:
        content = turn.text[turn.text.find(turn.reasoning) + len(turn.reasoning) :] if turn.reasoning else turn.text
    ends = [at for text in stop or () if (at := content.find(text)) >= 0]
    content = content[: min(ends)] if ends else content
    message: Message = {"role": "assistant", "content": content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in calls]
    return message


def tool_call(id: str, name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """A tool call in the OpenAI format."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def template_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages as chat templates take them: arguments as objects, and the names of tools in the messages of tools.

    Raises Refused if the arguments of a call are not a JSON object.
    """
    names: dict[str, str] = {}
    converted: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                {**call, "function": {**call["function"], "arguments": json_object(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            names.update({call["id"]: call["function"]["name"] for call in calls})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and (name := names.get(message["tool_call_id"])) is not None:
            message = {**message, "name": name}
        converted.append(message)
    return converted


def json_object(text: str) -> dict[str, Any]:
    """The arguments of a tool call. Raises Refused if the text is not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused(400, f"the arguments of a tool call must be a JSON object in a text; they are {text!r:.80}")
    return value


def content_text(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or a list of texts and images if there is an image. Text parts are joined with newlines.

    Raises Refused for parts of other kinds.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(400, f"the content of {where} must be a text or a list of parts; it is {content!r:.80}")
    parts = [_part(part, where) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part["text"], str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal" and isinstance(part["refusal"], str):
        return {"type": "text", "text": part["refusal"]}
    if kind in ("image_url", "input_image"):
        url = part["image_url"]
        return image_part(url["url"] if isinstance(url, Mapping) else url, where)
    raise Refused(400, f"{where} has a part of the type {kind!r:.40}; parts are texts and images")


def image_part(url: Any, where: str) -> dict[str, Any]:
    """An image of a message. Raises Refused unless it is a data URI: nothing is downloaded during a run."""
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise Refused(400, f"an image of {where} must be a data URI (data:image/png;base64,...); it is {url!r:.60}")
    return {"type": "image", "image": url}


def function_tool(name: Any, description: Any, parameters: Any) -> ToolSchema:
    """The schema of a tool in the OpenAI format. Raises Refused if a part has the wrong type."""
    if not isinstance(name, str) or not name:
        raise Refused(
            400, f"the name of a tool must be a text that is not empty; it is {name!r:.80}", parameter="tools"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise Refused(400, f"the parameters of the tool {name!r:.80} must be a JSON schema", parameter="tools")
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = str(description)
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def template_arguments(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The field `chat_template_kwargs` of a request. Raises Refused unless it is an object."""
    name = "chat_template_kwargs"
    arguments = body.get(name)
    if arguments is not None and not isinstance(arguments, dict):
        raise Refused(400, f"`{name}` must be an object; it is {arguments!r:.80}", parameter=name)
    return arguments or {}


def offered_tools(tools: Sequence[ToolSchema], choice: Any, forced: dict[str, Any]) -> Sequence[ToolSchema]:
    """The tools that the model is offered under a `tool_choice`.

    A choice that the model cannot be forced to is added to `forced`. Raises Refused if two tools have the same name.
    """
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise Refused(400, f"two tools have the same name; the names are {names!r:.200}", parameter="tools")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind == "none":
        return ()
    if kind not in (None, "auto"):
        forced["tool_choice"] = choice
    return tools
