"""Images and videos as parts of messages: finding them, and refusing or replacing them for a text model.

Knows messages only. Does not know processors, tokens or how an image is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.placeholders import MediaKind, Placeholders
from turnwise.data.images import media_kind, media_value
from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["MediaPart", "has_media", "media_parts", "refuse_media", "without_media"]


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or a video of a message, or a literal placeholder in a message of the model."""

    kind: MediaKind
    value: Any
    """The image or video as given: a path, bytes, a PIL image, frames, ...; None for a literal placeholder."""
    where: str
    """For error messages: `image (part 2) of a 'user' message`."""
    literal: bool = False
    """The model sampled the text of the placeholder: it stands for no image and is not expanded."""


def has_media(messages: Iterable[Message]) -> bool:
    """Whether any of the messages contains an image or a video."""
    return any(
        isinstance(part, Mapping) and media_kind(part) is not None
        for message in messages
        if isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )


def refuse_media(messages: Iterable[Message], model: str) -> None:
    """For a text model: raises TemplateError if there is an image or a video in the messages."""
    if has_media(messages):
        raise TemplateError(
            f"a message contains an image or a video, and {model or 'the model'} does not accept images: its directory has no "
            f"image processor. Use a vision model (such as Qwen2.5-VL), or messages of text"
        )


def without_media(message: Message) -> Message:
    """A tool's message for a text model: its texts, and an error text in place of images and videos."""
    if not has_media([message]):
        return message
    parts = [part for part in message["content"] if isinstance(part, Mapping)]
    errors = [
        f"Error: the answer contains {kind}s, and this model does not accept {kind}s"
        for kind in map(media_kind, parts)
        if kind
    ]
    texts = [str(part.get("text", "")) for part in parts if media_kind(part) is None]
    return {**message, "content": "\n".join([*texts, *dict.fromkeys(errors)])}


def media_parts(messages: Sequence[Message], placeholders: Placeholders) -> list[MediaPart]:
    """The images and videos of these messages, and the literal placeholders of the model, in order.

    Raises TemplateError if a part is neither text, image nor video, if an image has no value, or if a message that is
    not the model's contains the text of a placeholder, which would be read as an image.
    """
    parts: list[MediaPart] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        for number, part in enumerate([content] if isinstance(content, str) else content or (), 1):
            if isinstance(part, str):
                parts += _literal_placeholders(part, role, placeholders)
            elif part.get("type") == "text" or (part.get("type") is None and "text" in part):
                parts += _literal_placeholders(str(part.get("text", "")), role, placeholders)
            else:
                parts.append(_media_part(part, number, role))
    return parts


def _media_part(part: Mapping[str, Any], number: int, role: Any) -> MediaPart:
    kind = media_kind(part)
    if kind is None:
        raise TemplateError(
            f"part {number} of a {role!r} message is of the type {part.get('type')!r}; it must be text, image or video"
        )
    where = f"{kind} (part {number}) of a {role!r} message"
    if (value := media_value(part)) is None:
        raise TemplateError(
            f"the {where} has no value; its keys are {sorted(part)}. Write it as {{'type': {kind!r}, {kind!r}: ...}}"
        )
    return MediaPart("video" if kind == "video" else "image", value, where)


def _literal_placeholders(text: str, role: Any, placeholders: Placeholders) -> Iterator[MediaPart]:
    for kind, at in placeholders.find(text):
        if role != "assistant":
            token = placeholders.tokens[kind]
            raise TemplateError(
                f"a text of a {role!r} message contains {token!r}, the placeholder of an image or a video: "
                f"{text[max(0, at - 20) : at + len(token) + 20]!r}. Remove it from the text; images are parts of their "
                f"own, {{'type': 'image', 'image': ...}}"
            )
        yield MediaPart(kind, None, "a text of the model", literal=True)
