"""What a tool may return, and the message for the model that is made of it.

A text is used unchanged, bytes are decoded as UTF-8, and any other value becomes JSON. A `ToolResponse` may contain images and
videos in addition to a text. A tuple `(answer, reward, info)`, where `reward` and `info` are optional, scores the call.

`Truncation` shortens a long text. The names and their meaning are those of verl (since its #6313): `side` names the side that
is *cut*. `left` keeps the end, `right` keeps the beginning, `middle` keeps half the length of each. This module has no
tokenizer; the caller may pass `encode`.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from turnwise.errors import ConfigError
from turnwise.types import Message, ToolCall, ToolOutcome

# long texts

Side = Literal["left", "right", "middle"]
Unit = Literal["characters", "tokens"]

LONGEST = 1_000_000
"""Maximum characters of any tool's text, independent of the recipe."""
_FURTHEST = 64  # maximum characters that a cut moves to leave a cluster; natural text has no longer clusters


@dataclass(frozen=True, slots=True)
class Truncation:
    """Shortens texts to `length` units. The mark of the cut is added and does not count.

    Example::

        Truncation(4, side="left")("abcdefgh")     # "(truncated)...efgh"
        Truncation(4, side="right")("abcdefgh")    # "abcd...(truncated)"
        Truncation(4, side="middle")("abcdefgh")   # "ab...(truncated)...gh"
    """

    length: int
    side: Side = "middle"
    """The side to cut."""
    unit: Unit = "characters"
    encode: Callable[[str], Sequence[int]] | None = None
    """Returns the token ids of a text. Required if `unit` is `tokens`."""

    def __post_init__(self) -> None:
        if self.length <= 0:
            raise ConfigError(f"Truncation.length is {self.length} {self.unit}; it must be above 0")
        if self.unit == "tokens" and self.encode is None:
            raise ConfigError(
                "Truncation with unit='tokens' needs a tokenizer: write Truncation(..., encode=renderer.encode)"
            )

    def __call__(self, text: str) -> str:
        """The text, shortened if it is longer than `length`."""
        if self._head(text, self.length) == text:
            return text
        match self.side:
            case "left":
                return "(truncated)..." + self._tail(text, self.length)
            case "right":
                return self._head(text, self.length) + "...(truncated)"
            case "middle":
                half = self.length // 2
                return self._head(text, half) + "...(truncated)..." + self._tail(text, half)

    def _head(self, text: str, length: int) -> str:
        at = self._fitting(text, length, lambda size: text[:size])
        for _ in range(_FURTHEST):
            if not _inside_cluster(text, at):
                break
            at -= 1
        return text[:at]

    def _tail(self, text: str, length: int) -> str:
        at = len(text) - self._fitting(text, length, lambda size: text[len(text) - size :])
        for _ in range(_FURTHEST):
            if not _inside_cluster(text, at):
                break
            at += 1
        return text[at:]

    def _fitting(self, text: str, length: int, piece: Callable[[int], str]) -> int:
        """The number of characters of `piece` that fit in `length` units. The cost depends on `length`, not on the text."""
        if self.encode is None or self.unit == "characters":
            return min(length, len(text))
        fits, too_many = 0, min(len(text), 4 * length + 16)
        while len(self.encode(piece(too_many))) <= length:
            if too_many == len(text):
                return too_many
            fits, too_many = too_many, min(len(text), 2 * too_many)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if len(self.encode(piece(middle))) <= length:
                fits = middle
            else:
                too_many = middle
        return fits


def bounded(text: str) -> str:
    """The text, cut after `LONGEST` characters if it is longer."""
    if len(text) <= LONGEST:
        return text
    note = f"...(truncated: this is the first {LONGEST:,} of {len(text):,} characters)"
    return Truncation(LONGEST, side="right")(text).removesuffix("...(truncated)") + note


def _inside_cluster(text: str, at: int) -> bool:
    """Whether a cut at `at` would split one displayed character, such as a letter with accents or a composed emoji."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if unicodedata.category(after).startswith("M") or "\u200d" in (before, after):
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff" or before + after == "\r\n":  # an emoji skin tone, or a CRLF
        return True
    flags = 0  # a flag is a pair of regional indicator letters
    while flags < at and _is_flag_letter(text[at - 1 - flags]):
        flags += 1
    return _is_flag_letter(after) and flags % 2 == 1


def _is_flag_letter(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


# return values

_LONGEST_ERROR = 1000  # maximum characters of an error that the model receives


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """A return value of a tool with images or videos.

    Example::

        return ToolResponse(image=[picture], text="The part that you asked for.")

    Raises ValueError if `text` is not a str, or if `image` or `video` is not a list.
    """

    text: str | None = None
    image: list[Any] | None = None
    """PIL images."""
    video: list[Any] | None = None
    """Videos, each as a list of frames."""

    def __post_init__(self) -> None:
        if self.text is not None and not isinstance(self.text, str):
            raise ValueError(f"ToolResponse.text must be a text, got a {type(self.text).__name__}")
        for name, value in (("image", self.image), ("video", self.video)):
            if value is not None and not isinstance(value, list):
                raise ValueError(
                    f"ToolResponse.{name} must be a list, got a {type(value).__name__}: put it in brackets"
                )


@dataclass(frozen=True, slots=True)
class Result:
    """The return value of a tool after read_result()."""

    response: ToolResponse
    reward: float | None = None
    """None: the tool gave no reward, which is not the reward 0."""
    info: Mapping[str, Any] = field(default_factory=dict)

    def shortened(self, truncation: Truncation | None) -> Result:
        """The result with its text made encodable and shortened to the limits. Images and videos stay."""
        text = self.response.text
        if text is None:
            return self
        text = bounded(_encodable(text) if truncation is None else truncation(_encodable(text)))
        return Result(ToolResponse(text, self.response.image, self.response.video), self.reward, self.info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a call: the outcome for the record, and the content for the model."""

    outcome: ToolOutcome
    content: str | list[dict[str, Any]]
    """A text, or a list of parts in this order: images, videos, text."""
    info: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    """None: the tool gave no reward."""

    @classmethod
    def of(cls, call: ToolCall, result: Result, *, seconds: float, attempts: int) -> Answer:
        """The answer to a successful call. `seconds` is the time of the call."""
        response = result.response
        images, videos = response.image or [], response.video or []
        content: str | list[dict[str, Any]] = response.text or ""
        if images or videos:
            content = [
                *({"type": "image", "image": image} for image in images),
                *({"type": "video", "video": video} for video in videos),
                *([] if response.text is None else [{"type": "text", "text": response.text}]),
            ]
        outcome = ToolOutcome(
            id=call.id,
            name=call.name,
            arguments=call.arguments,
            content="\n".join(part for part in (response.text, _counted(len(images), len(videos))) if part),
            reward=result.reward or 0.0,
            seconds=seconds,
            attempts=attempts,
        )
        return cls(outcome=outcome, content=content, info=result.info, reward=result.reward)

    @property
    def message(self) -> Message:
        """The tool's message."""
        return {
            "role": "tool",
            "tool_call_id": self.outcome.id,
            "name": self.outcome.name,
            "content": self.content,
        }


def failed(
    call: ToolCall, kind: str, text: str, *, seconds: float = 0.0, attempts: int = 1, traceback: str = ""
) -> Answer:
    """The answer to a failed call. `kind` is a value of `ToolOutcome.error`. A text that begins with `Error: ` is not given that
    beginning twice."""
    text = text.removeprefix("Error: ")
    text = _encodable(f"Error: {text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + ' ...'}")
    outcome = ToolOutcome(
        id=call.id,
        name=call.name,
        arguments=call.arguments,
        content=text,
        error=kind,
        seconds=seconds,
        attempts=attempts,
        traceback=traceback,
    )
    return Answer(outcome=outcome, content=text)


def read_result(result: Any) -> Result:
    """Convert the return value of a tool to a Result.

    A tuple is a scored answer only if its items are, in this order: a str, a dict or a ToolResponse; a number or None; a dict
    or None. Any other tuple becomes JSON.

    Raises ValueError or TypeError if the value cannot be converted to JSON, TypeError if the reward is not finite.
    """
    if type(result) is not tuple or not 1 <= len(result) <= 3:  # a named tuple is data, not a scored answer
        return Result(_response(result))
    answer, reward, info = (*result, None, None)[:3]
    scored = isinstance(reward, Real | None) and not isinstance(reward, bool)  # Real includes numpy's numbers
    if not (isinstance(answer, str | dict | ToolResponse) and scored and isinstance(info, dict | None)):
        return Result(_response(result))
    return Result(_response(answer), _finite(reward), info or {})


def _response(answer: Any) -> ToolResponse:
    if isinstance(answer, ToolResponse):
        return answer
    if isinstance(answer, str):
        return ToolResponse(answer)
    if isinstance(answer, bytes | bytearray | memoryview):
        return ToolResponse(bytes(answer).decode("utf-8", errors="replace"))
    return ToolResponse(json.dumps(answer, ensure_ascii=False, default=str))


def _finite(reward: Real | None) -> float | None:
    if reward is not None and not math.isfinite(reward):
        raise TypeError(f"the reward of the call is {reward}, which is not a finite number")
    return None if reward is None else float(reward)


def _encodable(text: str) -> str:
    # A model can write half of a surrogate pair in JSON. Such a text cannot be encoded as UTF-8.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _counted(images: int, videos: int) -> str:
    counts = [f"{count} {name}{'s' * (count > 1)}" for name, count in (("image", images), ("video", videos)) if count]
    return f"[{', '.join(counts)}]" if counts else ""
