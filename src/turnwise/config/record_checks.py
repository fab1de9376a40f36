"""Refuses options of the section `record` that have no effect in a training run."""

from __future__ import annotations

from turnwise.config.schema import Config

__all__ = ["record_problems"]


def record_problems(config: Config) -> list[tuple[bool, str]]:
    """Each possible problem: whether the recipe has it, and the error message."""
    kept, size, every = config.record.best_and_worst, config.train.group_size, config.record.every
    steps = config.train.known_steps
    return [
        (
            kept is not None and 2 * kept >= size,
            f"record.best_and_worst={kept} has no effect: it records the {kept} best and the {kept} worst conversations of a "
            f"group, and a group has {size} (train.group_size). Set a smaller number, or remove it",
        ),
        (
            every > 1 and steps is not None and steps <= 2,
            f"record.every={every} has no effect with train.steps={steps}: the first step and the last step are "
            f"always recorded. Remove it",
        ),
    ]
