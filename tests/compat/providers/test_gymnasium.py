"""gymnasium through the loop: registered environments, with the rewards of the library's own loop."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from support.conversations import Says, hold
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.rollout.context import Limits

STEPS = 30
TEN: list[tuple[str, dict[str, Any], list[int]]] = [
    ("Blackjack-v1", {}, [1, 0]),
    ("Blackjack-v1", {"sab": True}, [1, 1, 0]),
    ("FrozenLake-v1", {}, [2, 1, 1, 2, 0]),
    ("FrozenLake-v1", {"is_slippery": False}, [2, 2, 1, 1, 1, 2]),
    ("FrozenLake8x8-v1", {}, [2, 1, 2, 3]),
    ("Taxi-v4", {}, [0, 2, 4, 5, 1, 3]),
    ("CliffWalking-v1", {}, [0, 1, 1, 1, 2]),
    ("CliffWalkingSlippery-v1", {}, [0, 1, 1, 1, 2]),
    ("CartPole-v1", {}, [0, 1, 1]),
    ("MountainCar-v0", {}, [0, 2]),
    ("Acrobot-v1", {}, [0, 2, 1]),
]
"""Names, arguments, and the actions, which are repeated."""


def own_rewards(name: str, arguments: dict[str, Any], seed: int, actions: list[int]) -> list[float]:
    """The rewards of the library's own loop."""
    environment = gymnasium.make(name, **arguments)
    environment.reset(seed=seed)
    rewards = []
    for action in actions:
        _, reward, terminated, truncated, _ = environment.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    environment.close()
    return rewards


@pytest.mark.parametrize(("name", "arguments", "repeated"), TEN)
def test_an_environment_has_the_rewards_of_the_librarys_own_loop(
    name: str, arguments: dict[str, Any], repeated: list[int]
) -> None:
    use = {"use": f"gymnasium:{name}", "arguments": {"arguments": arguments}}
    config = checked({"model": "m", "environment": use}, source="recipe")
    actions = (repeated * STEPS)[:STEPS]
    (row,) = assembly.rows(config, limit=1)
    trajectory = hold(
        Says(*map(str, actions)),
        assembly.environment_factory(config),
        row=row,
        limits=Limits(turns=STEPS, tokens_per_turn=20),
    )
    assert trajectory.error is None, trajectory.error
    assert [turn.reward for turn in trajectory.turns] == own_rewards(name, arguments, row["seed"], actions)
