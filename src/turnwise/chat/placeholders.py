"""Placeholders of images that the model said: words, and no images, whatever becomes of them in a template.

A template may leave out what the model said, in its thoughts say, and with it a placeholder that is counted elsewhere. So a
word stands in its place while the template writes, and is put back where it was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from turnwise.types import Message

__all__ = ["LiteralPlaceholders"]


class LiteralPlaceholders:
    """`placeholders` maps `image` and `video` to the text that stands for one."""

    def __init__(self, placeholders: Mapping[str, str]) -> None:
        self._word_of = {token: f"{kind}-said-2d7b60" for kind, token in placeholders.items()}
        self._kind_of = {token: kind for kind, token in placeholders.items()}
        self._token_of = {word: token for token, word in self._word_of.items()}
        self._token = re.compile("|".join(map(re.escape, self._word_of)) or "(?!)")
        self._either = re.compile("|".join(map(re.escape, (*self._token_of, *self._word_of))) or "(?!)")

    def hide(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with a word for each placeholder that the model said."""
        return [self._hidden(message) if message.get("role") == "assistant" else message for message in messages]

    def show(self, text: str) -> str:
        """A text of the template with the placeholders again."""
        for word, token in self._token_of.items():
            text = text.replace(word, token)
        return text

    def count(self, text: str) -> dict[str, set[int]]:
        """Which of the placeholders that `show` will leave in a text are the model's: by kind, counted from 0."""
        found: dict[str, set[int]] = {kind: set() for kind in self._kind_of.values()}
        count = dict.fromkeys(found, 0)
        for match in self._either.finditer(text):
            token = self._token_of.get(match[0])
            kind = self._kind_of[token or match[0]]
            if token is not None:
                found[kind].add(count[kind])
            count[kind] += 1
        return found

    def _hidden(self, message: Message) -> Message:
        def hidden(value: object) -> object:
            return self._token.sub(lambda token: self._word_of[token[0]], value) if isinstance(value, str) else value

        return {name: hidden(value) for name, value in message.items()}
