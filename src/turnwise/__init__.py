"""Reinforcement learning of language models over multi-turn conversations.

This module exports what most users need to write an environment, a tool or a reward function. It imports neither torch nor
transformers.
"""

from turnwise.environments.environment import Environment, SingleTurn, environment, user_message
from turnwise.environments.tools.toolbox import Tool, Toolbox, ToolResponse, Tools
from turnwise.environments.users import ScriptedUser, checked_answer
from turnwise.types import (
    Completion,
    Edit,
    Group,
    Message,
    Opening,
    Reply,
    Request,
    Resume,
    Row,
    Sampling,
    SamplingChange,
    Segment,
    Stop,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)
from turnwise.version import __version__

__all__ = [
    "Completion",
    "Edit",
    "Environment",
    "Group",
    "Message",
    "Opening",
    "Reply",
    "Request",
    "Resume",
    "Row",
    "Sampling",
    "SamplingChange",
    "ScriptedUser",
    "Segment",
    "SingleTurn",
    "Stop",
    "Tool",
    "ToolCall",
    "ToolOutcome",
    "ToolResponse",
    "Toolbox",
    "Tools",
    "Trajectory",
    "Turn",
    "__version__",
    "checked_answer",
    "environment",
    "user_message",
]
