"""Converts between the messages of ms-swift and turnwise, and finds the `Reply` that leads from one list of messages to another.

A scheduler changes a list of messages to say how the conversation continues. Three kinds of change are recognised: messages
added after the model's answer are appended; an edited answer is cut where the edit begins, and the model continues it; any
other change replaces the history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.compat.swift.masks import common_prefix
from turnwise.compat.swift.protocol import RolloutInferRequest
from turnwise.data.images import is_image, media_kind, media_value
from turnwise.types import Message, Reply, Resume, Row, ToolSchema
from turnwise.user_code.copies import copy_containers

__all__ = [
    "FULL_ANSWER",
    "MEDIA",
    "OUTPUT_ENDS",
    "append_answer",
    "final_reply",
    "flatten_media",
    "messages_of",
    "remove_response",
    "reply_between",
    "request_arguments",
    "request_of",
    "request_tools",
    "tools_of",
    "without_answers",
]

MEDIA = ("images", "videos", "audios")
FULL_ANSWER = "completion"
"""Key in `Turn.info` of a turn that continued an answer: the full answer, with reasoning and tool calls."""
OUTPUT_ENDS = "records"
"""Key in `Turn.info` of the last turn if `run` returned several outputs: the last turn of each output."""

_TAG = re.compile(r"(<image>|<video>)")


def request_of(row: Row, uuid: str) -> RolloutInferRequest:
    """A row as ms-swift passes it to a scheduler: without reference answers at its end, with images separate from messages."""
    messages, media = flatten_media(row.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"row {row.id!r} has no message for the model to answer")
    return RolloutInferRequest(
        messages=messages,
        images=media["image"],
        videos=media["video"],
        tools=tools_of(row.fields.get("tools"), f"row {row.id!r}"),
        objects=copy_containers(row.fields.get("objects") or {}),
        chat_template_kwargs=copy_containers(dict(row.chat_template_kwargs)),
        data_dict={
            name: copy_containers(value)
            for name, value in row.fields.items()
            if name not in (*MEDIA, "tools", "objects", "chat_template_kwargs")
        },
        uuid=uuid,
    )


def flatten_media(messages: Sequence[Message]) -> tuple[list[Message], dict[str, list[Any]]]:
    """Messages whose contents are texts with `<image>` and `<video>` tags, and the lists of images and videos."""
    media: dict[str, list[Any]] = {"image": [], "video": []}
    flattened: list[Message] = []
    for message in messages:
        content = message.get("content")
        text = "".join(_tagged(content, media)) if isinstance(content, list) else content
        flattened.append({**message, "content": text})
    return flattened, media


def tools_of(value: Any, where: str) -> list[ToolSchema] | None:
    """The schemas in a column of tools, which holds a list of schemas or JSON of such a list."""
    try:
        schemas = json.loads(value) if isinstance(value, str) else value
        schemas = [json.loads(schema) if isinstance(schema, str) else schema for schema in schemas or []]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"the tools of {where} are not a list of schemas: {error}") from error
    if wrong := [schema for schema in schemas if not isinstance(schema, Mapping)]:
        raise ValueError(f"the tools of {where} must be schemas; one of them is {wrong[0]!r:.80}")
    return [schema if "function" in schema else {"type": "function", "function": schema} for schema in schemas] or None


def request_tools(request: RolloutInferRequest) -> list[ToolSchema]:
    """Copies of the request's tool schemas, because a scheduler may change its own in place; empty if there are none."""
    return [copy_containers(schema) for schema in tools_of(request.tools, "the scheduler's request") or []]


def request_arguments(request: RolloutInferRequest) -> dict[str, Any]:
    """A copy of the request's arguments of the chat template, which a scheduler may change between turns."""
    return dict(copy_containers(request.chat_template_kwargs or {}))


def append_answer(messages: list[Message], text: str) -> None:
    """Append the text of a turn: to the last message if the model continued it, otherwise as a new message.

    An empty assistant message after another assistant message only asks the model to continue the latter; it is removed.
    """
    if _ends_with_empty_answer(messages):
        messages.pop()
    if messages and messages[-1]["role"] == "assistant":
        messages[-1]["content"] = (messages[-1]["content"] or "") + text
    else:
        messages.append({"role": "assistant", "content": text})


def remove_response(messages: list[Message]) -> Any:
    """Remove the assistant message at the end. Returns its content, or None if the last message is not the model's."""
    return messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None


def without_answers(messages: Sequence[Message]) -> list[Message]:
    """The messages without assistant messages at their end: before the first turn, these are from the data set."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("on_trajectory_start left no message for the model to answer")
    return list(messages[:end])


def messages_of(request: RolloutInferRequest, *, since: int = 0) -> list[Message]:
    """A copy of the request's messages in our form: an image in place of each `<image>` tag, roles as chat templates use them.

    `since` is the index of the first new message. Images without a tag are put at the start of the first new message that
    is not the model's; the request is changed accordingly.

    Raises ValueError if there are more tags than images, or if the request contains something that is not supported here.
    """
    _refuse_unknown(request)
    _place_media(request, since)
    remaining = {"image": iter(request.images), "video": iter(request.videos)}
    places = {"image": 0, "video": 0}
    given = {"image": len(request.images), "video": len(request.videos)}
    messages: list[Message] = []
    for message in request.messages[:-1] if _ends_with_empty_answer(request.messages) else request.messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(
                f"messages must be a list of {{'role': ..., 'content': ...}}; one of them is {message!r:.80}"
            )
        content = message.get("content")
        if isinstance(content, list) or (_has_tags(message) and any(given.values())):
            content = list(_parts(content, remaining, places))
        role = {"tool_response": "tool"}.get(message["role"], message["role"])
        if role == "tool_call":
            raise ValueError("a message has the role 'tool_call'; write an assistant message with `tool_calls` instead")
        messages.append({**message, "role": role, "content": "" if content is None else content})
    for kind, count in places.items():
        if count != given[kind]:
            raise ValueError(
                f"the request has {given[kind]} {kind}s and its messages have tags for {count}; write <{kind}> where "
                f"each belongs"
            )
    return messages


def _has_tags(message: Message) -> bool:
    """Whether a text contains tags for images. Always false for the model's text, in which a tag is plain text."""
    content = message.get("content")
    return isinstance(content, str) and message.get("role") != "assistant" and _TAG.search(content) is not None


def _place_media(request: RolloutInferRequest, since: int) -> None:
    for kind, count in (("image", len(request.images)), ("video", len(request.videos))):
        tags = 0
        for message in request.messages if count else ():
            parts = message.get("content") if isinstance(message, dict) else None
            if isinstance(parts, list):
                media = [part for part in parts if isinstance(part, Mapping) and media_kind(part) == kind]
                tags += sum(media_value(part) is None for part in media)
                tags += sum(str(part.get("text", "")).count(f"<{kind}>") for part in parts if isinstance(part, Mapping))
            elif isinstance(parts, str) and message.get("role") != "assistant":
                tags += parts.count(f"<{kind}>")
        if tags < count and (place := _first_input(request.messages, since)) is not None:
            place["content"] = f"<{kind}>" * (count - tags) + place["content"]


def _first_input(messages: Sequence[Any], since: int) -> Message | None:
    """The first text message from `since` on that is not the model's or the system's; else the last such message before."""
    texts = [
        (number, message)
        for number, message in enumerate(messages)
        if isinstance(message, dict)
        and isinstance(message.get("content"), str)
        and message.get("role") not in ("assistant", "system")
    ]
    new = [message for number, message in texts if number >= since]
    return new[0] if new else texts[-1][1] if texts else None


def reply_between(
    before: Sequence[Message], after: Sequence[Message], text: str, *, tools: Sequence[ToolSchema] | None = None
) -> Reply:
    """The reply that leads from the messages `before` to the messages `after`, in a conversation that continues.

    The last message of `before` is the model's answer; `text` is the part of it that was sampled in this turn. `tools` are the
    tools of the next turn, if the scheduler changed them. If the model then continues its answer, the history is replaced,
    because the tools are in the prompt before the answer.
    """
    reply = _reply_between(before, after, text)
    if tools is None:
        return reply
    if reply.resume is not None:
        reply = _rewritten(after)
    return replace(reply, tools=tools)


def _reply_between(before: Sequence[Message], after: Sequence[Message], text: str) -> Reply:
    if _same(after[: len(before)], before):
        if len(after) == len(before):
            return Reply(resume=Resume())
        return Reply(messages=_without_last_answer(after[len(before) :]), prefill=_prefill(after))
    answer, last = before[-1], after[-1] if after else None
    if (
        last is not None
        and len(after) == len(before)
        and last["role"] == "assistant"
        and _same(after[:-1], before[:-1])
    ):
        earlier = answer["content"][: len(answer["content"]) - len(text)]
        if isinstance(last["content"], str) and last["content"].startswith(earlier):
            now = last["content"][len(earlier) :]
            keep = common_prefix(text, now)
            return Reply(resume=Resume(keep=keep, add=now[keep:]))
    return _rewritten(after)


def _rewritten(after: Sequence[Message]) -> Reply:
    if not _without_last_answer(after):
        raise ValueError("the scheduler left no message for the model to answer")
    return Reply(rewrite=_without_last_answer(after), prefill=_prefill(after))


def final_reply(before: Sequence[Message], after: Sequence[Message]) -> Reply:
    """The reply that leads from the messages `before` to the messages `after`, and ends the conversation."""
    if _same(after[: len(before)], before):
        return Reply(messages=list(after[len(before) :]), done=True)
    return Reply(rewrite=list(after), done=True)


def _ends_with_empty_answer(messages: Sequence[Any]) -> bool:
    """Whether an empty assistant message follows another one: in ms-swift, the model then continues the first of them."""
    last = messages[-2:]
    answers = len(last) == 2 and all(isinstance(item, dict) and item.get("role") == "assistant" for item in last)
    return answers and not last[-1].get("content")


def _without_last_answer(messages: Sequence[Message]) -> list[Message]:
    """The messages without an assistant message at the end, which the model will continue."""
    return list(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages)


def _prefill(messages: Sequence[Message]) -> str:
    if messages[-1]["role"] != "assistant":
        return ""
    if not isinstance(messages[-1]["content"], str):
        raise ValueError("the content of an assistant message that the model continues must be a text")
    return messages[-1]["content"]


def _refuse_unknown(request: RolloutInferRequest) -> None:
    if request.audios:
        raise ValueError(f"the request has audios, which is not supported here: {request.audios!r:.80}")
    if request.add_eos not in (None, "auto"):
        raise ValueError(
            f"add_eos={request.add_eos!r} is not supported here: no end-of-turn token is added to an answer that is continued"
        )


def _tagged(content: Sequence[Any], media: Mapping[str, list[Any]]) -> Iterator[str]:
    for part in content:
        kind = media_kind(part) if isinstance(part, Mapping) else None
        if kind is not None:
            media[kind].append(media_value(part))
            yield f"<{kind}>"
        else:
            yield str(part.get("text", "")) if isinstance(part, Mapping) else str(part)


def _parts(content: Any, remaining: Mapping[str, Iterator[Any]], places: dict[str, int]) -> Iterator[dict[str, Any]]:
    for part in [content] if isinstance(content, str) else content:
        kind = media_kind(part) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind is not None and (value := media_value(part)) is not None:
            yield {"type": kind, kind: value}
            continue
        text = f"<{kind}>" if kind is not None else part.get("text", "") if isinstance(part, Mapping) else part
        for piece in _TAG.split(text):
            if piece in ("<image>", "<video>"):
                kind = piece[1:-1]
                places[kind] += 1
                yield {"type": kind, kind: next(remaining[kind], None)}
            elif piece:
                yield {"type": "text", "text": piece}


def _same(first: Any, second: Any) -> bool:
    """Equality that compares images by their pixels. Objects of unknown types are different."""
    if first is second:
        return True
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    known = (str, bytes, int, float, type(None))
    return (isinstance(first, known) or is_image(first)) and isinstance(second, type(first)) and bool(first == second)
