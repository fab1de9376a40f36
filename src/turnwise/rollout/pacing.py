"""How far the conversations of a run may be ahead of the trainer: pure functions of counts and versions.

The staleness of a group is the number of training steps from the weights that sampled its first token to the step that trains
on it. It is bounded by pacing: a group is started only if it can be trained on in time, and a step waits for the groups that no
later step may train on. No conversation is discarded for its age.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["capacity", "choose"]


def capacity(*, max_staleness: int, batch_size: int, version: int, steps: int, kept: int, active: int) -> int:
    """How many groups may be started now.

    This is `(max_staleness + version + 1) * batch_size - (accepted + running)`, from AReaL (arXiv 2505.24298), where
    `version` is the number of finished training steps, and each of them has used `batch_size` groups. `kept` groups are taken for
    the step in progress; `active` groups are started and not taken. A run of `steps` steps starts no group that no step can use.

    Example: with batch_size=4 and max_staleness=1, 8 groups are started at the beginning, and 4 more after each step.
    """
    groups = min(max_staleness + version + 1, steps) * batch_size
    return max(0, groups - version * batch_size - kept - active)


def choose(
    latest: Sequence[int], ready: Sequence[bool], *, count: int, version: int, batch_size: int, in_order: bool
) -> list[int] | None:
    """Which `count` of the active groups the step takes that trains version `version`; None if it must wait.

    The groups are in the order in which they were started. `latest` is the last version that each may train, and `ready` whether
    its conversations have ended. The groups with the earliest `latest` are taken first. The step waits if the groups that are
    left could then not all be trained on in time, at `batch_size` groups a step. With `in_order`, only the first `count` groups
    are taken.

    Example: `choose([2, 2, 3], [False, True, True], count=1, version=1, batch_size=1, in_order=False)` is `[1]`: the first group
    can still be taken in the next step.
    """
    order = sorted(range(len(latest)), key=lambda index: (latest[index], index))
    chosen = list(range(count)) if in_order else [index for index in order if ready[index]][:count]
    if len(chosen) < count or len(latest) < count or not all(ready[index] for index in chosen):
        return None
    left = [latest[index] for index in order if index not in set(chosen)]
    if any(last < version + 1 + number // batch_size for number, last in enumerate(left)):
        return None
    return sorted(chosen)
