"""The argument `agent_data` of `execute` in verl v0.7: the state of the tool's conversation.

An environment receives messages, not tokens. `AgentData` has the tokens of the last turn, but not the tokens of the prompt.
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
    """A tool call of the current turn: `verl.experimental.agent_loop.tool_parser.FunctionCall`."""

    name: str
    arguments: str
    """The arguments as JSON text."""
    tool_call_id: str | None = None
    """The id that the model wrote, if the format has ids."""


@dataclass
class AgentData:
    """A conversation's state for its tools. All calls receive the same object; `extra_fields` is for data of the tools."""

    messages: list[Message] = field(default_factory=list)
    """Copies of all messages so far, the turn with the call included."""
    image_data: list[Any] | None = None
    """The images of the conversation in order; None if there are none."""
    video_data: list[Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    """The id of the conversation, its interaction and its tools."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`tools_kwargs` of the row."""
    interaction: Any = None
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_ids: list[int] = field(default_factory=list)
    """The token ids of the turn with the call."""
    turn_scores: list[float] = field(default_factory=list)
    """The interaction's scores so far."""
    tool_rewards: list[float] = field(default_factory=list)
    """The rewards of earlier calls."""
    user_turns: int = 0
    """The number of answers to the model, by tools or by the interaction."""
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in _TOKENS:
            raise AttributeError(
                f"agent_data.{name}: tools see the messages of a conversation, not its tokens; the tokens of the last turn are "
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

    def add_turn(self, turn: Turn, message: Message) -> None:
        """Append a turn of the model; `message` is its message."""
        self.hear([message])
        self.assistant_turns += 1
        self.response_ids = list(turn.completion.token_ids) if turn.completion is not None else []
        self.tool_calls = [FunctionCall(call.name, json.dumps(dict(call.arguments))) for call in turn.calls]

    def rewritten(self, messages: Sequence[Message]) -> None:
        """Replace all messages."""
        self.messages.clear()
        self.image_data = self.video_data = None
        self.hear(messages)
