"""What a tool of verl v0.7 is handed with each call: `execute(..., agent_data=AgentData)`, the state of its conversation.

An environment sees messages and not the conversation's tokens, so those of the last turn are there, and those of the whole
prompt are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.types import Message, Turn

__all__ = ["AgentData", "FunctionCall"]

_TOKENS = ("prompt_ids", "response_mask", "response_logprobs", "routed_experts")


@dataclass(slots=True)
class FunctionCall:
    """A call of the turn that is answered: `verl.experimental.agent_loop.tool_parser.FunctionCall`."""

    name: str
    arguments: str
    """JSON."""


@dataclass
class AgentData:
    """One conversation as its tools see it. The same object in every call: `extra_fields` is for what tools keep there."""

    messages: list[Message] = field(default_factory=list)
    """The conversation so far, the turn that made the call included. Copies: changing them changes nothing else."""
    image_data: list[Any] | None = None
    """The images in it, in order; None where there is none."""
    video_data: list[Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    """The conversation's id, which is also that of its interaction and its tools."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's."""
    interaction: Any = None
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_ids: list[int] = field(default_factory=list)
    """The token ids of the turn that made the call."""
    turn_scores: list[float] = field(default_factory=list)
    """What the interaction has given so far."""
    tool_rewards: list[float] = field(default_factory=list)
    """What earlier calls have given."""
    user_turns: int = 0
    """How often the model was answered, by tools or by the interaction."""
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in _TOKENS:
            raise AttributeError(
                f"agent_data.{name}: tools see the messages of a conversation and not its tokens; those of the last turn are "
                f"agent_data.response_ids"
            )
        raise AttributeError(f"agent_data has no {name!r}")

    def hear(self, messages: Sequence[Message]) -> None:
        """Append messages of the conversation."""
        for message in messages:
            content = message.get("content")
            parts = list(content) if isinstance(content, list | tuple) else []
            self.messages.append({**message, "content": [dict(part) for part in parts]} if parts else dict(message))
            for part in parts:
                if part.get("type") == "image":
                    self.image_data = [*(self.image_data or ()), part.get("image")]
                elif part.get("type") == "video":
                    self.video_data = [*(self.video_data or ()), part.get("video")]

    def said(self, turn: Turn, message: Message) -> None:
        """Take in a turn of the model, which `message` is."""
        self.hear([message])
        self.assistant_turns += 1
        self.response_ids = list(turn.completion.token_ids) if turn.completion is not None else []
        self.tool_calls = [FunctionCall(call.name, json.dumps(dict(call.arguments))) for call in turn.calls]

    def rewritten(self, messages: Sequence[Message]) -> None:
        """The history was replaced."""
        self.messages.clear()
        self.image_data = self.video_data = None
        self.hear(messages)
