"""Runs ms-swift's schedulers, gym environments, plugins and reward functions unchanged, and reads its arguments.

Example of a recipe (more in docs/swift.md):

environment:
  use: turnwise.compat.swift:scheduler
  arguments: {name: thinking_tips_scheduler, external_plugins: [plugin.py], max_turns: 3}
reward:
  group:
    - {use: turnwise.compat.swift:Reward, arguments: {use: plugin.py:MultiTurnThinkingTips}}
"""

from __future__ import annotations

from turnwise.compat.swift.convert import from_swift_arguments
from turnwise.compat.swift.convert_teacher import teacher_prompt
from turnwise.compat.swift.plugins import Reward, reward, scheduler

__all__ = ["Reward", "from_swift_arguments", "reward", "scheduler", "teacher_prompt"]
