"""Refuses options of the section `health` that have no effect in a training run."""

from __future__ import annotations

from turnwise.config.credit_checks import WITHOUT_REWARD
from turnwise.config.schema import Config
from turnwise.config.section import changed_options

__all__ = ["health_problems"]


def health_problems(config: Config) -> list[tuple[bool, str]]:
    """Each possible problem: whether the recipe has it, and the error message."""
    health, train, reward = config.health, config.train, config.reward
    steps = train.known_steps
    used = {*changed_options(health), *health.stop}
    functions = len([*reward.trajectory, *reward.turns, *reward.group, *reward.batch])
    others = config.environment.use not in WITHOUT_REWARD or bool(config.tools) or config.mcp.servers is not None
    with_window = used - {"constant_reward", "stop", "window"}
    compared = used & {"tool_use", "entropy", "length"}
    alone = next((name for name in ("zero_std", "duplicates") if name in used), None)
    return [
        (
            "mismatch" in used and config.correction.action is None,
            "health.mismatch has no effect without correction.action, which computes the metric correction/k3: set "
            "correction.action, or remove health.mismatch",
        ),
        (
            alone is not None and train.group_size == 1,
            f"health.{alone} has no effect with train.group_size=1, because it compares the conversations of a group: remove it",
        ),
        (
            "reward_correlation" in used and functions + others < 2,
            "health.reward_correlation has no effect, because the reward has only one part: remove it",
        ),
        (
            bool(with_window | used & {"window"}) and steps is not None and health.window > steps,
            f"health.window={health.window} is larger than train.steps={steps}, so no monitor would have an effect: set "
            f"health.window to a smaller number",
        ),
        (
            bool(compared) and steps is not None and 2 * health.window > steps,
            f"health.{next(iter(sorted(compared)), '')} compares the last {health.window} steps (health.window) with the first, "
            f"and train.steps={steps} is less than both together: set health.window to a smaller number",
        ),
    ]
