"""The base classes for users of verl: `BaseInteraction` and `BaseTool`, with verl's signatures and defaults.

One object serves all conversations and distinguishes them by `instance_id`. In turnwise, a conversation has one id for its
interaction and its tools.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from turnwise.compat.verl.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseInteraction", "BaseTool"]


class BaseInteraction:
    """Answers the model: verl's `verl.interactions.base.BaseInteraction`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation; `kwargs` are the row's `interaction_kwargs`. Returns the conversation's id."""
        return instance_id if instance_id is not None else str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the model. Returns (is the conversation over, the answer, the turn's score, data to record)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """The score of the conversation; subclasses may take `instance_id` and keywords."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """End a conversation; subclasses may take `instance_id` and keywords."""


class BaseTool:
    """A tool: verl's `verl.tools.base_tool.BaseTool`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        if self.tool_schema is None:
            self.tool_schema = self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema: write tool_schema in the tool file, or override "
                f"get_openai_tool_schema"
            )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The tool's schema. The constructor calls this if the tool file has no `tool_schema`."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a conversation; `kwargs` are the row's `create_kwargs`. Returns the conversation's id and a response."""
        return (instance_id if instance_id is not None else str(uuid4())), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Run a call. Returns (the response for the model, the call's reward, metrics to record)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the conversation's calls, computed after the conversation."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""
