"""The interactions and the tool that verl ships for GSM8K and for the weather, with its names, replies and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import turnwise.compat.verl.reward_score as reward_score
from turnwise.compat.verl.base import BaseInteraction, BaseTool
from turnwise.compat.verl.schemas import OpenAIFunctionToolSchema, ToolResponse
from turnwise.data.numeric_answers import final_answer, same_number, truth
from turnwise.errors import ConfigError, nearest

__all__ = ["Gsm8kInteraction", "Gsm8kTool", "WeatherInteraction"]

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

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        _refuse_unknown("Gsm8kTool", config, ("type",))
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        answer = str(parameters.get("answer", ""))
        conversation = self._instance_dict[instance_id]
        conversation["called"] = True
        conversation["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        better = reward > conversation["reward"]
        conversation["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), 0.0 if better else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        conversation = self._instance_dict[instance_id]
        if conversation["ground_truth"] is None:
            if "called" not in conversation:  # nothing to grade
                return 0.0
            raise ValueError("Gsm8kTool needs the answer: tools_kwargs.<tool>.create_kwargs.ground_truth")
        ground_truth = str(conversation["ground_truth"])
        return reward_score.compute_score(
            conversation["response"], ground_truth, method="flexible", format_score=0.0, score=1.0
        )

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


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
