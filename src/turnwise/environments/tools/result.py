"""The return values that a tool may have, and their conversion to a message for the model.

A text is used unchanged, bytes are decoded as UTF-8, and any other value becomes JSON. A `ToolResponse` may contain images and
videos in addition to a text. A tuple `(answer, reward, info)`, where `reward` and `info` are optional, scores the call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from turnwise.environments.tools.truncation import Truncation, bounded
from turnwise.types import Message, ToolCall, ToolOutcome

__all__ = ["Answer", "Result", "ToolResponse", "failed", "read_result"]

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
    reward: float = 0.0
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
            reward=result.reward,
            seconds=seconds,
            attempts=attempts,
        )
        return cls(outcome=outcome, content=content, info=result.info)

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
    """The answer to a failed call. `kind` is a value of `ToolOutcome.error`."""
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


def _finite(reward: Real | None) -> float:
    if reward is not None and not math.isfinite(reward):
        raise TypeError(f"the reward of the call is {reward}, which is not a finite number")
    return float(reward or 0.0)


def _encodable(text: str) -> str:
    # A model can write half of a surrogate pair in JSON. Such a text cannot be encoded as UTF-8.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _counted(images: int, videos: int) -> str:
    counts = [f"{count} {name}{'s' * (count > 1)}" for name, count in (("image", images), ("video", videos)) if count]
    return f"[{', '.join(counts)}]" if counts else ""
