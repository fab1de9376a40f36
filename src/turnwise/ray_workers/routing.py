"""Which worker runs a conversation: a pure function of the numbers of conversations."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["choose_worker"]

_SLACK, _FACTOR = 4, 1.5
"""A worker is overloaded if it runs more conversations than `_FACTOR` times those of the least busy worker, and `_SLACK` more."""


def choose_worker(running: Sequence[int | None], *, most: int, own: int | None) -> int | None:
    """The index of the worker that runs the next conversation of a group; None if there is no place.

    `running` are the conversations that each worker runs; None for a worker that is not ready. A worker runs at most `most`.
    `own` is the worker that has run the last conversation of the group: its engine has the prefix that the conversations of a
    group share. It is chosen again, unless it is overloaded, full or not ready. Else the least busy worker is chosen.

    Example: `choose_worker([3, 1, None], most=10, own=0)` is 0, and `choose_worker([9, 1, None], most=10, own=0)` is 1.
    """
    places = {index: count for index, count in enumerate(running) if count is not None and count < most}
    if not places:
        return None
    least = min(places, key=lambda index: (places[index], index))
    if own is not None and own in places and places[own] <= _FACTOR * places[least] + _SLACK:
        return own
    return least
