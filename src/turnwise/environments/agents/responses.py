"""OpenAI's Responses API: reads requests, and writes answers and streams.

A conversation is a list of items. Neighbouring items of the model (reasoning, a message, calls) are one assistant message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.environments.agents.chat_completions import openai_error, pieces
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
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "stream",
    "max_output_tokens",
    "previous_response_id",
    "chat_template_kwargs",
    "text",
    "parallel_tool_calls",
    "metadata",
)
_TEXT_FORMAT = {"format": {"type": "text"}}
_KNOWN = {
    "input": (
        "type", "role", "content", "id", "status", "phase", "call_id", "name", "arguments", "output", "summary",
        "encrypted_content",
    ),
    "input.content": ("type", "text", "refusal", "image_url", "annotations", "logprobs", "prompt_cache_breakpoint"),
    "tools": ("type", "name", "description", "parameters"),
    "stream_options": ("include_obfuscation",),
}  # fmt: skip
"""The fields of parts of a request that are read, or change nothing."""


class Responses:
    """`POST /v1/responses`."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Raises Refused."""
        settings = body.get("text")
        text = dict(settings) if isinstance(settings, Mapping) else {}
        forced = {**forced_parameters(body, read=_READ), **fields_without_effect(body, _KNOWN)}
        if (verbosity := text.pop("verbosity", None)) is not None:
            forced["verbosity"] = verbosity
        answer = answer_form(text.pop("format", None), "text")
        if text:
            raise Refused(400, f"`text` has {min(text)!r:.40}, which is unknown here", parameter="text")
        tools = [_tool(tool) for tool in body.get("tools") or ()]
        items, instructions = body.get("input"), body.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise Refused(400, f"`instructions` must be a text; it is {instructions!r:.80}", parameter="instructions")
        previous = body.get("previous_response_id")
        asked, parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
        choice = ToolChoice.of(tools, asked).with_parallel(parallel)
        sampling = sampling_change(body, max_tokens=("max_output_tokens",), stop="stop", choice=choice, answer=answer)
        return ChatRequest(
            messages=_messages([{"role": "user", "content": items}] if isinstance(items, str) else items),
            tools=choice.tools,
            sampling=sampling,
            form="text" if answer else choice.parameter,
            echo={
                "metadata": body.get("metadata") or {},
                "parallel_tool_calls": parallel is not False,
                "text": {**_TEXT_FORMAT, **(settings if isinstance(settings, Mapping) else {})},
                "tool_choice": "auto" if asked is None else asked,
                "tools": body.get("tools") or [],
            },
            chat_template_kwargs=template_arguments(body),
            forced=forced,
            stream=bool(body.get("stream")),
            model=str(body.get("model") or "model"),
            instructions={"role": "system", "content": instructions} if instructions else None,
            previous_response=None if previous is None else str(previous).removeprefix("resp_"),
        )

    def answer(self, request: ChatRequest, answer: AgentAnswer) -> dict[str, Any]:
        """The body of an answer."""
        return _response(request, answer, _status(answer), _output(answer))

    def events(self, request: ChatRequest, answer: AgentAnswer) -> Iterator[tuple[str | None, Any]]:
        """The events of a stream: name and data."""
        for number, (name, data) in enumerate(self._events(request, answer)):
            yield name, {"type": name, "sequence_number": number, **data}

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an error."""
        return openai_error(refused)

    def _events(self, request: ChatRequest, answer: AgentAnswer) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = _response(request, answer, "in_progress", [])
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(_output(answer)):
            at = {"output_index": index, "item_id": item["id"]}
            empty = {"reasoning": {"content": []}, "message": {"content": []}, "function_call": {"arguments": ""}}
            begun_item = {**item, **empty[item["type"]], "status": "in_progress"}
            yield "response.output_item.added", {"output_index": index, "item": begun_item}
            if item["type"] == "function_call":
                for piece in pieces(item["arguments"]):
                    yield "response.function_call_arguments.delta", {**at, "delta": piece}
                done = {**at, "arguments": item["arguments"], "name": item["name"]}
                yield "response.function_call_arguments.done", done
            else:
                yield from _text_events(item, {**at, "content_index": 0})
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield f"response.{_status(answer)}", {"response": self.answer(request, answer)}


def _status(answer: AgentAnswer) -> str:
    return "incomplete" if answer.cut else "completed"


def _text_events(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of the text of a message or of reasoning."""
    part = item["content"][0]
    kind = "output_text" if item["type"] == "message" else "reasoning_text"
    more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield f"response.{kind}.delta", {**at, "delta": piece, **more}
    yield f"response.{kind}.done", {**at, "text": part["text"], **more}
    yield "response.content_part.done", {**at, "part": part}


def _output(answer: AgentAnswer) -> list[dict[str, Any]]:
    """The items of an answer."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.id}",
                "role": "assistant",
                "status": _status(answer),
                "content": [part],
            }
        )
    for number, call in enumerate(answer.calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{answer.id}_{number}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": _status(answer),
            }
        )
    return items


def _response(
    request: ChatRequest, answer: AgentAnswer, status: str, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    done = status != "in_progress"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions["content"] if request.instructions else None,
        "model": answer.model,
        "output": output,
        "previous_response_id": f"resp_{request.previous_response}" if request.previous_response else None,
        "temperature": None,
        "top_p": None,
        **request.echo,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        if done
        else None,
    }


def _tool(tool: Any) -> ToolSchema:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise Refused(400, f"tools must be functions; one of them is {tool!r:.80}", parameter="tools")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: Any) -> list[Message]:
    if not isinstance(items, list) or not items:
        raise Refused(400, "`input` must be a text or a list of at least one item", parameter="input")
    messages: list[Message] = []
    for number, item in enumerate(items):
        message = _message(item, number)
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _joined(first: Message, second: Message) -> Message:
    """Two items of the model as one message."""
    joined = {**first, "content": f"{first['content']}{second['content']}"}
    if reasoning := f"{first.get('reasoning_content', '')}{second.get('reasoning_content', '')}":
        joined["reasoning_content"] = reasoning
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _message(item: Any, number: int) -> Message:
    """One item as a message. Raises Refused."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    where = f"item {number} ({kind})"
    if kind == "message" and item.get("role") in ("system", "developer", "user", "assistant"):
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": content_text(item.get("content"), where)}
    if kind == "function_call":
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [tool_call(str(item["call_id"]), str(item["name"]), str(item.get("arguments") or "{}"))],
        }
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": str(item["call_id"]), "content": content_text(item["output"], where)}
    if kind == "reasoning":
        parts = item.get("content") or ()
        return {"role": "assistant", "content": "", "reasoning_content": "".join(str(part["text"]) for part in parts)}
    raise Refused(
        400,
        f"item {number} of `input` has the type {kind!r:.40}; the types are message, function_call, function_call_output and "
        f"reasoning",
        parameter="input",
    )
