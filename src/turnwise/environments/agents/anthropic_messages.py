"""Anthropic's Messages API: reads requests, and writes answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.environments.agents.chat_completions import pieces
from turnwise.environments.agents.requests import (
    AgentAnswer,
    ChatRequest,
    Refused,
    ToolChoice,
    answer_form,
    content_text,
    fields_without_effect,
    forced_parameters,
    function_tool,
    image_part,
    json_object,
    sampling_change,
    tool_call,
)
from turnwise.types import Message, ToolSchema

_READ = (
    "model", "messages", "system", "tools", "tool_choice", "stream", "max_tokens", "stop_sequences", "output_config",
    "output_format",
)  # fmt: skip
_BLOCK = (
    "type", "text", "citations", "cache_control", "id", "name", "input", "tool_use_id", "content", "source", "thinking",
    "signature", "data",
)  # fmt: skip
_KNOWN = {
    "system": _BLOCK,
    "messages": ("role", "content"),
    "messages.content": _BLOCK,
    "messages.content.content": _BLOCK,
    "tools": ("type", "name", "description", "input_schema", "cache_control"),
    "tool_choice": ("type", "name", "disable_parallel_tool_use"),
}
"""The fields of parts of a request that are read, or change nothing."""
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class AnthropicMessages:
    """`POST /v1/messages`."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Raises Refused."""
        forced = {**forced_parameters(body, read=_READ), **fields_without_effect(body, _KNOWN)}
        given, system, choice = body.get("messages"), body.get("system"), body.get("tool_choice")
        if not isinstance(given, list) or not given:
            raise Refused(400, "`messages` must be a list of at least one message", parameter="messages")
        messages: list[Message] = [{"role": "system", "content": content_text(system, "`system`")}] if system else []
        for number, message in enumerate(given):
            messages += _messages(message, number)
        output = dict(body.get("output_config") or {})
        given = output.pop("format", None) or body.get("output_format")
        if (effort := output.pop("effort", None)) is not None:
            forced["effort"] = effort
        if output:
            raise Refused(
                400, f"output_config has {min(output)!r:.40}, which is unknown here", parameter="output_config"
            )
        single = isinstance(choice, Mapping) and bool(choice.get("disable_parallel_tool_use"))
        chosen = ToolChoice.of([_tool(tool) for tool in body.get("tools") or ()], choice).with_parallel(not single)
        sampling = sampling_change(
            body,
            max_tokens=("max_tokens",),
            stop="stop_sequences",
            choice=chosen,
            answer=answer_form(given, "output_config"),
        )
        return ChatRequest(
            messages=messages,
            tools=chosen.tools,
            sampling=sampling,
            form="output_config" if sampling.answer_format else "tool_choice",
            forced=forced,
            stream=bool(body.get("stream")),
            model=str(body.get("model") or "model"),
        )

    def answer(self, request: ChatRequest, answer: AgentAnswer) -> dict[str, Any]:
        """The body of an answer."""
        return {
            **_head(answer),
            "content": _blocks(answer),
            "stop_reason": _stop_reason(answer),
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def events(self, request: ChatRequest, answer: AgentAnswer) -> Iterator[tuple[str | None, Any]]:
        """The events of a stream: name and data."""
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        begun = {**_head(answer), "content": [], "stop_reason": None, "usage": usage}
        yield _event("message_start", {"message": begun})
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _block_deltas(block, answer)
            yield _event("content_block_start", {"index": index, "content_block": {**block, **empty}})
            for delta in deltas:
                yield _event("content_block_delta", {"index": index, "delta": delta})
            yield _event("content_block_stop", {"index": index})
        end = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        yield _event("message_delta", {"delta": end, "usage": {"output_tokens": answer.completion_tokens}})
        yield _event("message_stop", {})

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an error."""
        kind = _ERRORS.get(refused.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refused.message}}


def _event(name: str, data: Mapping[str, Any]) -> tuple[str | None, Any]:
    return name, {"type": name, **data}


def _head(answer: AgentAnswer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "stop_sequence": None,
    }


def _stop_reason(answer: AgentAnswer) -> str:
    if answer.cut:
        return "max_tokens"
    return "tool_use" if answer.calls else "end_turn"


def _blocks(answer: AgentAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        function = call["function"]
        arguments = json_object(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def _block_deltas(block: Mapping[str, Any], answer: AgentAnswer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields of a block that are empty when it starts, and the parts in which they are streamed."""
    if block["type"] == "tool_use":
        (arguments,) = [call["function"]["arguments"] for call in answer.calls if call["id"] == block["id"]]
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(arguments)]
    kind = block["type"]
    return {kind: ""}, [{"type": f"{kind}_delta", kind: piece} for piece in pieces(block[kind])]


def _tool(tool: Any) -> ToolSchema:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        raise Refused(400, f"tools must be functions; one of them is {tool!r:.80}", parameter="tools")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _messages(message: Any, number: int) -> list[Message]:
    """One message of the API as one or more messages: the results of tools are messages of their own. Raises Refused."""
    role = message.get("role") if isinstance(message, Mapping) else None
    where = f"message {number} ({role})"
    if role not in ("user", "assistant", "system"):
        raise Refused(400, f"message {number} has the role {role!r:.40}; the roles are user and assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise Refused(400, f"the content of {where} must be a text or a list of blocks")
    if role == "assistant":
        return [_assistant_message(blocks, where)]
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": str(block["tool_use_id"]), "content": _content(block.get("content"), where)}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    return [*messages, {"role": role, "content": _content(rest, where)}] if rest or not messages else messages


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if not isinstance(content, list) or not any(_is_image(block) for block in content):
        return content_text(content, where)
    return [_image(block, where) if _is_image(block) else _text(block, where) for block in content]


def _text(block: Any, where: str) -> dict[str, Any]:
    return {"type": "text", "text": content_text([block], where)}


def _is_image(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "image"


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return image_part(f"data:{source.get('media_type')};base64,{source.get('data')}", where)
    return image_part(source.get("url") if isinstance(source, Mapping) else None, where)


def _assistant_message(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    kinds = {str(block.get("type")) for block in blocks} - {"text", "tool_use", "thinking", "redacted_thinking"}
    if kinds:
        raise Refused(400, f"{where} has a block of the type {min(kinds):.40}; blocks are text, thinking and tool_use")
    message: Message = {
        "role": "assistant",
        "content": "".join(str(block["text"]) for block in blocks if block["type"] == "text"),
    }
    if reasoning := "".join(str(block["thinking"]) for block in blocks if block["type"] == "thinking"):
        message["reasoning_content"] = reasoning
    calls = [
        tool_call(str(block["id"]), str(block["name"]), dict(block.get("input") or {}))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return message
