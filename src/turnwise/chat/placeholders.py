"""The texts that stand for an image or a video in a prompt, such as `<|image_pad|>`.

The model itself may sample such a text as ordinary text: it is then *literal*, and stands for no image. Everybody else's text
must not hold one. Knows texts only; does not know processors or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from turnwise.types import Message

__all__ = ["MediaKind", "Placeholders"]

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
