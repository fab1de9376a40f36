"""OpenAI's chat completions: reads requests, and writes answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    sampling_change,
    template_arguments,
    tool_call,
)
from turnwise.types import Message, ToolSchema

_READ = (
    "model", "messages", "tools", "tool_choice", "stream", "max_tokens", "max_completion_tokens", "stop", "chat_template_kwargs",
    "response_format", "parallel_tool_calls",
)  # fmt: skip
_KNOWN = {
    "messages": ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal", "annotations"),
    "messages.content": ("type", "text", "refusal", "image_url", "cache_control", "prompt_cache_breakpoint"),
    "messages.content.image_url": ("url",),
    "messages.tool_calls": ("id", "type", "function", "index"),
    "messages.tool_calls.function": ("name", "arguments"),
    "tools": ("type", "function", "cache_control"),
    "tools.function": ("name", "description", "parameters"),
    "stream_options": ("include_usage", "include_obfuscation"),
}  # fmt: skip
"""The fields of parts of a request that are read, or change nothing."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PIECE = 40  # characters of one chunk of a stream


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Raises Refused."""
        forced = {**forced_parameters(body, read=_READ), **fields_without_effect(body, _KNOWN)}
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(400, "`messages` must be a list of at least one message", parameter="messages")
        tools = [_tool(tool) for tool in body.get("tools") or ()]
        options = body.get("stream_options")
        choice = ToolChoice.of(tools, body.get("tool_choice")).with_parallel(body.get("parallel_tool_calls"))
        sampling = sampling_change(
            body,
            max_tokens=("max_tokens", "max_completion_tokens"),
            stop="stop",
            choice=choice,
            answer=answer_form(body.get("response_format"), "response_format"),
        )
        return ChatRequest(
            messages=[_message(message, number) for number, message in enumerate(messages)],
            tools=choice.tools,
            sampling=sampling,
            form="response_format" if sampling.answer_format else choice.parameter,
            chat_template_kwargs=template_arguments(body),
            forced=forced,
            stream=bool(body.get("stream")),
            stream_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            model=str(body.get("model") or "model"),
        )

    def answer(self, request: ChatRequest, answer: AgentAnswer) -> dict[str, Any]:
        """The body of an answer."""
        message: Message = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if not answer.calls:
            message["content"] = answer.text
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = answer.calls
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": usage(answer)}

    def events(self, request: ChatRequest, answer: AgentAnswer) -> Iterator[tuple[str | None, Any]]:
        """The events of a stream: name (here None) and data."""
        head = {**_head(answer, "chat.completion.chunk"), **({"usage": None} if request.stream_usage else {})}

        def chunk(delta: Mapping[str, Any], finish: str | None = None) -> tuple[str | None, Any]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return None, {**head, "choices": [choice]}

        yield chunk({"role": "assistant", "content": ""})
        for piece in pieces(answer.reasoning):
            yield chunk({"reasoning_content": piece})
        for piece in pieces(answer.text):
            yield chunk({"content": piece})
        for index, call in enumerate(answer.calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            opened = {"id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
            yield chunk({"tool_calls": [{"index": index, **opened}]})
            for piece in pieces(arguments):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, _finish(answer))
        if request.stream_usage:
            yield None, {**head, "choices": [], "usage": usage(answer)}
        yield None, "[DONE]"

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an error."""
        return openai_error(refused)


def pieces(text: str) -> Iterator[str]:
    """A text in the parts in which it is streamed."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def openai_error(refused: Refused) -> dict[str, Any]:
    """The body of an error of OpenAI's APIs."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(refused.status, "invalid_request_error")
    code = {401: "invalid_api_key", 404: "not_found", 410: "conversation_ended", 413: "request_too_large"}
    return {
        "error": {
            "message": refused.message,
            "type": kind,
            "param": refused.parameter,
            "code": code.get(refused.status),
        }
    }


def _head(answer: AgentAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _finish(answer: AgentAnswer) -> str:
    if answer.cut:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def usage(answer: AgentAnswer) -> dict[str, Any]:
    """The counts of tokens."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _tool(tool: Any) -> ToolSchema:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise Refused(400, f"tools must be functions; one of them is {tool!r:.80}", parameter="tools")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _message(message: Any, number: int) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    where = f"message {number} ({role})"
    if role not in _ROLES:
        raise Refused(400, f"message {number} has the role {role!r:.40}; the roles are {', '.join(_ROLES)}")
    read: Message = {
        "role": "system" if role == "developer" else role,
        "content": content_text(message.get("content"), where),
    }
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise Refused(400, f"{where} has {name}, which no prompt of the model has here", parameter="messages")
    if role == "assistant":
        read["content"] = read["content"] or str(message.get("refusal") or "")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            read["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            read["tool_calls"] = _calls(calls, where)
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise Refused(400, f"{where} has no tool_call_id")
        read["tool_call_id"] = message["tool_call_id"]
    return read


def _calls(calls: Any, where: str) -> Sequence[Mapping[str, Any]]:
    read: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise Refused(
                400, f"{where} has a tool call that is not a function with a name and arguments: {call!r:.80}"
            )
        read.append(tool_call(str(call.get("id") or ""), name, arguments or "{}"))
    return read
