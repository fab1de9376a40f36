"""Images and videos as parts of messages: finding them, and refusing or replacing them for a text model.

A placeholder is the text that stands for an image or a video in a prompt, such as `<|image_pad|>`. The model itself may sample
such a text as ordinary text: it is then *literal*, and stands for no image. Invariant: no other text holds one. Knows
messages and texts. Does not know processors, tokens or how an image is loaded, and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.data.images import media_kind, media_value
from turnwise.errors import TemplateError
from turnwise.types import Message

# Placeholders: the texts that stand for an image or a video

MediaKind = Literal["image", "video"]

_NEVER = "(?!)"
"""A pattern that matches nothing."""


class Placeholders:
    """`tokens` maps `image` and `video` to the text of one placeholder; a kind that the model does not take is missing.

    A template may leave out text of the model, for example its reasoning, and with it a literal placeholder. So while the
    template renders, a stand-in replaces each literal placeholder (`hide`); afterwards they are counted where they are
    (`literal_indices`) and put back (`restore`).
    """

    def __init__(self, tokens: Mapping[MediaKind, str]) -> None:
        self.tokens = dict(tokens)
        self._kind_of: dict[str, MediaKind] = {token: kind for kind, token in tokens.items()}
        self._stand_in = {token: f"{kind}-said-2d7b60" for kind, token in tokens.items()}
        self._token_of = {stand_in: token for token, stand_in in self._stand_in.items()}
        self._token = re.compile("|".join(map(re.escape, self._stand_in)) or _NEVER)
        self._either = re.compile("|".join(map(re.escape, (*self._token_of, *self._stand_in))) or _NEVER)

    def find(self, text: str) -> list[tuple[MediaKind, int]]:
        """The placeholders in a text: kind, and index of the first character."""
        return [(self._kind_of[match[0]], match.start()) for match in self._token.finditer(text)]

    def replace(self, text: str, replacement: Callable[[MediaKind], str]) -> str:
        """The text with `replacement(kind)` in place of each placeholder, called in order."""
        return self._token.sub(lambda match: replacement(self._kind_of[match[0]]), text)

    def escape(self, content: Any) -> Any:
        """Message content whose texts hold no placeholder: `<|image_pad|>` becomes `<|image_pad |>`."""
        if isinstance(content, str):
            return self._token.sub(lambda match: f"{match[0][:-2]} {match[0][-2:]}", content)
        if isinstance(content, Mapping):
            return {name: self.escape(value) if name == "text" else value for name, value in content.items()}
        return [self.escape(part) for part in content] if isinstance(content, list | tuple) else content

    def hide(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with a stand-in for each literal placeholder in the model's messages."""
        return [self._hide_in(message) if message.get("role") == "assistant" else message for message in messages]

    def restore(self, text: str) -> str:
        """The text that the template rendered, with the literal placeholders in place of their stand-ins."""
        for stand_in, token in self._token_of.items():
            text = text.replace(stand_in, token)
        return text

    def literal_indices(self, text: str) -> dict[str, set[int]]:
        """Which placeholders of `restore(text)` are literal: their index, from 0, among the placeholders of their kind.

        With stand-in `IMG` and placeholder `<img>`, the text `<img> IMG <img>` gives `{"image": {1}}`.
        """
        literal: dict[str, set[int]] = {kind: set() for kind in self.tokens}
        count = dict.fromkeys(literal, 0)
        for match in self._either.finditer(text):
            token = self._token_of.get(match[0])
            kind = self._kind_of[token or match[0]]
            if token is not None:
                literal[kind].add(count[kind])
            count[kind] += 1
        return literal

    def _hide_in(self, message: Message) -> Message:
        def hidden(value: object) -> object:
            return self._token.sub(lambda match: self._stand_in[match[0]], value) if isinstance(value, str) else value

        return {name: hidden(value) for name, value in message.items()}


# Parts of messages


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
