"""The interactions and the tools that verl ships, with its names, replies and rewards; those of services are in `tools`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import turnwise.compat.verl.helpers as reward_score
from turnwise.compat.verl.base import BaseInteraction, BaseTool, OpenAIFunctionToolSchema, ToolResponse
from turnwise.data.images import load_image
from turnwise.data.numeric_answers import final_answer, same_number, truth
from turnwise.errors import ConfigError, nearest

_RIGHT = "Your response is correct!"
_WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """A user who knows the answer, and asks the model to try again until the answer is right.

    Options (`config`): `grader` is `strict` (the number after `####`, as text; the default), `flexible` (the last number) or
    `robust` (numbers are compared as numbers: `#### 1,234.0` is 1234). The last assistant message is graded. With
    `last_user: true`, the last *user* message is graded, with the flexible grader and with `#### ` put before it, as in verl's
    documentation; verl itself has corrected this.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._last_user: bool = config.get("last_user", False)
        self._grader: str = config.get("grader", "flexible" if self._last_user else "strict")
        _refuse_unknown("Gsm8kInteraction", config, ("name", "last_user", "grader"))
        if self._grader not in ("strict", "flexible", "robust"):
            raise ConfigError(f"Gsm8kInteraction: grader is {self._grader!r}; it must be strict, flexible or robust")
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        role = "user" if self._last_user else "assistant"
        response: str | None = next(
            (_text(message) for message in reversed(messages) if message.get("role") == role), ""
        )
        if self._last_user and not str(response).startswith("#### "):
            response = f"#### {response}"
        self._instance_dict[instance_id]["response"] = response
        score = await self.calculate_score(instance_id)
        return (True, _RIGHT, 1.0, {}) if score == 1.0 else (False, _WRONG, 0.0, {})

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:  # type: ignore[override]
        conversation = self._instance_dict[instance_id]
        response, ground_truth = conversation["response"] or "", str(conversation["ground_truth"])
        if self._grader == "robust":
            return float(same_number(final_answer(response, "flexible"), truth(ground_truth)))
        method = "strict" if self._grader == "strict" else "flexible"
        return reward_score.compute_score(response, ground_truth, method=method, format_score=0.0, score=1.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        del self._instance_dict[instance_id]


class WeatherInteraction(BaseInteraction):
    """A user who rewards the model if it has called a tool."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        if any(message.get("role") == "tool" for message in messages):
            return True, "Thank you for your weather query!", 1.0, {}
        return True, "Please use the weather tool to get the weather information.", 0.0, {}


class Gsm8kTool(BaseTool):
    """Grades an answer and returns the grade to the model. A call that does not improve the score has the reward -0.05."""

    _prefix = "#### "
    """What an answer must begin with; it is added."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        _refuse_unknown(type(self).__name__, config, ("type",))
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:  # agent loops pass one keyword `create_kwargs`
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        answer = str(parameters.get("answer", ""))
        conversation = self._instance_dict[instance_id]
        conversation["called"] = True
        conversation["response"] = answer if answer.startswith(self._prefix) else f"{self._prefix}{answer}"
        reward = await self.calc_reward(instance_id)
        better = reward > conversation["reward"]
        conversation["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), 0.0 if better else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        conversation = self._instance_dict[instance_id]
        if conversation["ground_truth"] is None:
            if "called" not in conversation:  # nothing to grade
                return 0.0
            raise ValueError(f"{type(self).__name__} needs the answer: tools_kwargs.<tool>.create_kwargs.ground_truth")
        return self._graded(conversation["response"], str(conversation["ground_truth"]))

    def _graded(self, response: str, ground_truth: str) -> float:
        return reward_score.compute_score(response, ground_truth, method="flexible", format_score=0.0, score=1.0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


class Geo3kTool(Gsm8kTool):
    """Grades an answer about geometry: a formula or a number. A call that does not improve the score has the reward -0.05.

    The answer is compared by `mathruler`, as in verl, or by `math_verify` where only that is installed. Raises ConfigError if
    neither is.
    """

    _prefix = ""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._same = _math_grader()

    def _graded(self, response: str, ground_truth: str) -> float:
        return float(self._same(response, ground_truth))


def _math_grader() -> Callable[[str, str], bool]:
    """Whether an answer is the truth, as formulas. Raises ConfigError."""
    if find_spec("mathruler") is not None:
        from mathruler.grader import grade_answer  # pyright: ignore[reportMissingImports]

        return lambda answer, truth: bool(grade_answer(answer, truth))
    if find_spec("math_verify") is None:
        raise ConfigError("Geo3kTool compares formulas with mathruler or math_verify: pip install math-verify")
    from math_verify import parse, verify

    def same(answer: str, truth: str) -> bool:
        if answer.strip() == truth.strip():
            return bool(truth.strip())
        # without its own time limits, which need signals; a call of a tool has a time limit
        without_limit: Any = None
        right, given = (parse(f"${text}$", parsing_timeout=without_limit) for text in (truth, answer))
        return bool(verify(right, given, timeout_seconds=without_limit))

    return same


class ImageZoomInTool(BaseTool):
    """Returns a part of the conversation's image to the model.

    A box `bbox_2d` is cut off at the edges of the image, and a small box is enlarged to 28 pixels, the smallest that vision
    models take. A box that is not possible gives the model an error, and the reward -0.05.
    """

    MIN_DIMENSION = 28
    _MOST_OBLONG = 100  # ratio of the sides

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        # verl's limits of its worker pool have no meaning here: cutting an image takes no time
        known = ("type", "num_workers", "rate_limit", "timeout", "enable_global_rate_limit")
        _refuse_unknown("ImageZoomInTool", config, known)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, image: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if image is None:
            image = (kwargs.get("create_kwargs") or {}).get("image")
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"image": image}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        held, box = self._instance_dict[instance_id], parameters.get("bbox_2d")
        if held["image"] is None:
            raise ValueError("ImageZoomInTool needs the image: tools_kwargs.<tool>.create_kwargs.image")
        if not isinstance(box, list | tuple) or len(box) != 4:
            text = "Error: bbox_2d parameter is missing or not a list of 4 numbers."
            return ToolResponse(text=text), -0.05, {"success": False}
        image = load_image(held["image"], where="ImageZoomInTool")
        cut = self._possible(box, *image.size)
        if cut is None:
            least = self.MIN_DIMENSION
            text = (
                f"Error: The specified bounding box {box} is invalid or results in a crop smaller than the minimum size of "
                f"{least}x{least}."
            )
            return ToolResponse(text=text), -0.05, {"success": False}
        label = f" with label {parameters['label']}" if parameters.get("label") else ""
        text = f"Zoomed in on the image to the region {box}{label}."
        return ToolResponse(image=[image.crop(cut)], text=text), 0.0, {"success": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)

    def _possible(self, box: Sequence[float], width: int, height: int) -> tuple[float, float, float, float] | None:
        """The box inside the image, at least `MIN_DIMENSION` wide and high; None if that is not possible."""
        left, right = max(0.0, float(box[0])), min(float(width), float(box[2]))
        top, bottom = max(0.0, float(box[1])), min(float(height), float(box[3]))
        wide, high = right - left, bottom - top
        if not (wide > 0 and high > 0) or max(wide, high) > self._MOST_OBLONG * min(wide, high):
            return None
        if min(wide, high) < self.MIN_DIMENSION:
            scale = self.MIN_DIMENSION / min(wide, high)
            middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
            wide, high = wide * scale, high * scale
            if wide > width:  # the side itself, because a product may round
                wide, high = width, high * (width / wide)
            if high > height:
                wide, high = wide * (height / high), height
            left = min(max(0.0, middle_x - wide / 2), width - wide)
            top = min(max(0.0, middle_y - high / 2), height - high)
            right, bottom = math.ceil(left + wide), math.ceil(top + high)
            left, top = math.floor(left), math.floor(top)
        inside = min(math.floor(right) - math.floor(left), math.floor(bottom) - math.floor(top)) >= self.MIN_DIMENSION
        return (left, top, right, bottom) if inside else None


def _text(message: Mapping[str, Any]) -> str | None:
    """The text of a message; None if it has no content."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return None if content is None else str(content)


def _refuse_unknown(kind: str, config: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in config:
        if name not in known:
            raise ConfigError(
                f"{kind} has no option {name!r}{nearest(name, known)}; its options are: {', '.join(known)}"
            )
