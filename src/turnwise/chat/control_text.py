"""Control tokens that stand as text in what others write: a tool, a user, an environment.

A web page with the text `<|im_end|>` in it must not end a message. A tokenizer encodes such a text to the control token, wherever
it stands. So a space is put into the text before the message is taken into the conversation: `<|im_end |>` is encoded to ordinary
tokens. The message itself is changed, so prompts, the tokens between turns, new segments and the sanity check see one text, and
an inference server that gets the message sees it, too. Messages of the model are never changed.

The error of a malformed call ends with an example of a call, which is turnwise's own text: the model reads there what it must
write.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from turnwise.types import Message

EscapedRoles = Literal["none", "tools", "all"]
_ROLES: Mapping[EscapedRoles, frozenset[str]] = {
    "none": frozenset(),
    "tools": frozenset({"tool"}),
    "all": frozenset({"tool", "user"}),
}
_MOST_PASSES = 8


class ControlText:
    """Escapes control tokens in the texts of messages. `roles` says in whose messages.

    `find_control` gives the ids of the control tokens, when they are first needed. `normalize` is what the tokenizer does with a
    text before it looks for control tokens; None if it looks for them in the text itself.
    """

    def __init__(
        self,
        roles: EscapedRoles,
        *,
        find_control: Callable[[], Collection[int]],
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        self._roles = _ROLES[roles]
        self._find_control = find_control
        self._encode = encode
        self._decode = decode
        self._normalize = normalize

    def escape(self, message: Message, found: Counter[str], *, own_end: str = "") -> Message:
        """The message without control tokens in its text: the same object if there are none. `found` counts what was escaped.

        Example: a tool message `"a<|im_end|>"` becomes `"a<|im_end |>"`, and `found["<|im_end|>"]` is 1 more.

        A text that ends with `own_end` has that end from turnwise itself: it stays.
        """
        if message.get("role") not in self._roles:
            return message
        content = message.get("content")
        if isinstance(content, str):
            escaped: Any = self._text(content.removesuffix(own_end), found)
            escaped += own_end if content.endswith(own_end) else ""
        else:
            escaped = self._parts(content, found)
        return message if escaped == content else {**message, "content": escaped}

    def _parts(self, content: Any, found: Counter[str]) -> Any:
        """Content as a list of parts. Templates write texts that follow each other without anything between them."""
        if not isinstance(content, list | tuple):
            return content
        parts: list[Any] = []
        before = ""
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                parts.append(part)
                before = ""
                continue
            text = self._text(text, found)
            if self._text(before + text, Counter()) != before + text:
                text = f" {text}"  # the two halves of a control token
                found.update({"two parts": 1})
            parts.append({**part, "text": text} if isinstance(part, Mapping) else text)
            before += text
        return parts

    def _text(self, text: str, found: Counter[str]) -> str:
        pattern = self._pattern
        if self._normalize is not None and not pattern.search(text) and pattern.search(self._normalize(text)):
            text = self._normalize(text)
        for _ in range(_MOST_PASSES):  # what was escaped may be in the middle of another
            found.update(pattern.findall(text))
            new = pattern.sub(lambda match: self._stand_ins[match[0]], text)
            if new == text:
                break
            text = new
        return text

    @functools.cached_property
    def _stand_ins(self) -> Mapping[str, str]:
        """For each control token's text, the text that is written instead."""
        control = frozenset(self._find_control())
        texts = {text for token in control if (text := self._decode([token])).strip()}
        return {text: self._stand_in(text, control, texts) for text in texts}

    def _stand_in(self, text: str, control: frozenset[int], texts: Collection[str]) -> str:
        for place in (len(text) - 2, 1, len(text) - 1):
            candidate = f"{text[:place]} {text[place:]}"
            if not any(one in candidate for one in texts) and control.isdisjoint(self._encode(candidate)):
                return candidate
        return " "

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Longer texts first: one control token may be the beginning of another."""
        return re.compile("|".join(map(re.escape, sorted(self._stand_ins, key=len, reverse=True))) or "(?!)")
