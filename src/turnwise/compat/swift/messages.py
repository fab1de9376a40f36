"""Between ms-swift's messages and ours, and from two states of a conversation to the reply that leads from one to the other.

A scheduler says what comes next by changing a list of messages. What it changed is read off here: messages behind the
answer are appended; an answer that was edited is cut where the edit begins and goes on; anything else replaces the history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.compat.swift.masks import common
from turnwise.compat.swift.protocol import RolloutInferRequest
from turnwise.data.images import is_image, media_kind, media_value
from turnwise.types import Message, Reply, Resume, Row, ToolSchema

__all__ = [
    "MEDIA",
    "RECORDS",
    "WHOLE",
    "final_reply",
    "flattened",
    "remove_response",
    "reply_to",
    "request_of",
    "said",
    "told",
    "tools_of",
    "without_answer",
]

MEDIA = ("images", "videos", "audios")
WHOLE = "completion"
"""In `Turn.info` of a turn that went on with an answer: the whole answer, thoughts and calls in it."""
RECORDS = "records"
"""In `Turn.info` of the last turn, where `run` returned several outputs: the last turn of each."""

_TAG = re.compile(r"(<image>|<video>)")


def request_of(row: Row, uuid: str) -> RolloutInferRequest:
    """A row as ms-swift hands it to a scheduler: a reference answer at its end left out, images apart from the messages."""
    messages, media = flattened(row.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"row {row.id!r} has no message that the model could answer")
    return RolloutInferRequest(
        messages=messages,
        images=media["image"],
        videos=media["video"],
        tools=tools_of(row.fields.get("tools"), f"row {row.id!r}"),
        objects=_copied(row.fields.get("objects") or {}),
        data_dict={
            name: _copied(value) for name, value in row.fields.items() if name not in (*MEDIA, "tools", "objects")
        },
        uuid=uuid,
    )


def flattened(messages: Sequence[Message]) -> tuple[list[Message], dict[str, list[Any]]]:
    """Messages whose contents are texts with `<image>` and `<video>` in them, and the images and videos by these names."""
    media: dict[str, list[Any]] = {"image": [], "video": []}
    found: list[Message] = []
    for message in messages:
        content = message.get("content")
        text = "".join(_tagged(content, media)) if isinstance(content, list) else content
        found.append({**message, "content": text})
    return found, media


def tools_of(value: Any, where: str) -> list[ToolSchema] | None:
    """A column of tools: a list of schemas, or JSON that holds one."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        found = [json.loads(one) if isinstance(one, str) else one for one in found or []]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"the tools of {where} are no list of schemas: {error}") from error
    if wrong := [one for one in found if not isinstance(one, Mapping)]:
        raise ValueError(f"the tools of {where} must be schemas; one is {wrong[0]!r:.80}")
    return [one if "function" in one else {"type": "function", "function": one} for one in found] or None


def said(messages: list[Message], text: str) -> None:
    """The model has spoken: behind the last message if that is an answer which it went on with, else with a new one.

    An empty answer behind an answer only says that the model is to go on with the latter, and is taken away.
    """
    if _is_dummy(messages):
        messages.pop()
    if messages and messages[-1]["role"] == "assistant":
        messages[-1]["content"] = (messages[-1]["content"] or "") + text
    else:
        messages.append({"role": "assistant", "content": text})


def remove_response(messages: list[Message]) -> Any:
    """Take the answer at the end of a conversation away; returns its content, or None if there is none at the end."""
    return messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None


def without_answer(messages: Sequence[Message]) -> list[Message]:
    """The messages without the answers at their end: before the first turn these are the data set's, not the model's."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("on_trajectory_start left no message that the model could answer")
    return list(messages[:end])


def told(request: RolloutInferRequest, *, since: int = 0) -> list[Message]:
    """The request's messages in our form, copied: images where the texts say `<image>`, roles as templates know them.

    `since` is the first message that is new. Images that have no place are put at the start of the first new message that is
    not the model's; the request is changed accordingly.

    Raises ValueError if there are more places than images, or for what cannot be told to a model here.
    """
    _refuse_unknown(request)
    _place_media(request, since)
    left = {"image": iter(request.images), "video": iter(request.videos)}
    places = {"image": 0, "video": 0}
    given = {"image": len(request.images), "video": len(request.videos)}
    found: list[Message] = []
    for message in request.messages[:-1] if _is_dummy(request.messages) else request.messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(
                f"messages must be a list of {{'role': ..., 'content': ...}}; one of them is {message!r:.80}"
            )
        content = message.get("content")
        if isinstance(content, list) or (_has_tags(message) and any(given.values())):
            content = list(_parts(content, left, places))
        role = {"tool_response": "tool"}.get(message["role"], message["role"])
        if role == "tool_call":
            raise ValueError("a message has the role 'tool_call'; write an assistant message with `tool_calls` instead")
        found.append({**message, "role": role, "content": "" if content is None else content})
    for kind, count in places.items():
        if count != given[kind]:
            raise ValueError(
                f"the request has {given[kind]} {kind}s and its messages have places for {count}; write <{kind}> where "
                f"each belongs"
            )
    return found


def _has_tags(message: Message) -> bool:
    """Whether a text says where images are; the model's own words do not."""
    content = message.get("content")
    return isinstance(content, str) and message.get("role") != "assistant" and _TAG.search(content) is not None


def _place_media(request: RolloutInferRequest, since: int) -> None:
    for kind, count in (("image", len(request.images)), ("video", len(request.videos))):
        tags = 0
        for message in request.messages if count else ():
            parts = message.get("content") if isinstance(message, dict) else None
            if isinstance(parts, list):
                empty = [one for one in parts if isinstance(one, Mapping) and media_kind(one) == kind]
                tags += sum(media_value(one) is None for one in empty)
                tags += sum(str(one.get("text", "")).count(f"<{kind}>") for one in parts if isinstance(one, Mapping))
            elif isinstance(parts, str) and message.get("role") != "assistant":
                tags += parts.count(f"<{kind}>")
        if tags < count and (place := _first_told(request.messages, since)) is not None:
            place["content"] = f"<{kind}>" * (count - tags) + place["content"]


def _first_told(messages: Sequence[Any], since: int) -> Message | None:
    """The first message from `since` on that is a text and neither the model's nor the system's, else the last such one."""
    texts = [
        (number, one)
        for number, one in enumerate(messages)
        if isinstance(one, dict)
        and isinstance(one.get("content"), str)
        and one.get("role") not in ("assistant", "system")
    ]
    new = [one for number, one in texts if number >= since]
    return new[0] if new else texts[-1][1] if texts else None


def reply_to(before: Sequence[Message], after: Sequence[Message], text: str) -> Reply:
    """The reply that leads from one state of a conversation to the next, for a model that goes on.

    The last message of `before` is the model's answer, and `text` its end: what it said in this turn.
    """
    if _same(after[: len(before)], before):
        if len(after) == len(before):
            return Reply(resume=Resume())
        return Reply(messages=_spoken(after[len(before) :]), prefill=_prefill(after))
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
            keep = common(text, now)
            return Reply(resume=Resume(keep=keep, add=now[keep:]))
    if not _spoken(after):
        raise ValueError("the scheduler left no message that the model could answer")
    return Reply(rewrite=_spoken(after), prefill=_prefill(after))


def final_reply(before: Sequence[Message], after: Sequence[Message]) -> Reply:
    """The same, for a conversation that is over."""
    if _same(after[: len(before)], before):
        return Reply(messages=list(after[len(before) :]), done=True)
    return Reply(rewrite=list(after), done=True)


def _is_dummy(messages: Sequence[Any]) -> bool:
    """Whether the last message is an empty answer behind an answer: in ms-swift, that the model goes on with its own."""
    last = messages[-2:]
    answers = len(last) == 2 and all(isinstance(one, dict) and one.get("role") == "assistant" for one in last)
    return answers and not last[-1].get("content")


def _spoken(messages: Sequence[Message]) -> list[Message]:
    """The messages without an answer at their end, which the model is to go on with."""
    return list(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages)


def _prefill(messages: Sequence[Message]) -> str:
    if messages[-1]["role"] != "assistant":
        return ""
    if not isinstance(messages[-1]["content"], str):
        raise ValueError("an answer that the model is to go on with must be a text")
    return messages[-1]["content"]


def _refuse_unknown(request: RolloutInferRequest) -> None:
    for name in ("audios", "chat_template_kwargs"):
        if getattr(request, name):
            raise ValueError(
                f"the request has {name}, which cannot be told to a model here: {getattr(request, name)!r:.80}"
            )
    if request.add_eos not in (None, "auto"):
        raise ValueError(f"add_eos={request.add_eos!r} is not known here: an answer that goes on has no end of turn")


def _tagged(content: Sequence[Any], media: Mapping[str, list[Any]]) -> Iterator[str]:
    for part in content:
        kind = media_kind(part) if isinstance(part, Mapping) else None
        if kind is not None:
            media[kind].append(media_value(part))
            yield f"<{kind}>"
        else:
            yield str(part.get("text", "")) if isinstance(part, Mapping) else str(part)


def _parts(content: Any, left: Mapping[str, Iterator[Any]], places: dict[str, int]) -> Iterator[dict[str, Any]]:
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
                yield {"type": kind, kind: next(left[kind], None)}
            elif piece:
                yield {"type": "text", "text": piece}


def _same(one: Any, other: Any) -> bool:
    """Equality that looks at images by their pixels and takes what it does not know for different."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    known = (str, bytes, int, float, type(None))
    return (isinstance(one, known) or is_image(one)) and isinstance(other, type(one)) and bool(one == other)


def _copied(value: Any) -> Any:
    """A copy of lists and dictionaries, so that a scheduler that changes them changes its own."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
