"""Schedulers, gym environments, plugins, reward functions and flags of ms-swift, as they are (docs/swift.md).

environment:
  use: turnwise.compat.swift:scheduler
  arguments: {name: thinking_tips_scheduler, external_plugins: [plugin.py], max_turns: 3}
reward:
  group:
    - {use: turnwise.compat.swift:Reward, arguments: {use: plugin.py:MultiTurnThinkingTips}}
"""

from __future__ import annotations

from turnwise.compat.swift.arguments import from_swift_arguments
from turnwise.compat.swift.named import Reward, reward, scheduler

__all__ = ["Reward", "from_swift_arguments", "reward", "scheduler"]
