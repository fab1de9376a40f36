"""What reading a text costs, beside its length."""

from __future__ import annotations

import time
from collections.abc import Callable

SMALL, LARGE = 10_000, 80_000
_ATTEMPTS = 3


def costs_its_length(read: Callable[[str], object], unit: str, *, before: str = "") -> bool:
    """Whether reading `before` and many times `unit` takes time in proportion to the length.

    Eight times the text takes eight times the time where it is linear, and 64 times where it is quadratic. A busy machine
    makes a single measurement longer, so the best of several attempts counts.
    """

    def seconds(length: int) -> float:
        text = before + unit * (length // len(unit))
        begin = time.process_time()
        read(text)
        return time.process_time() - begin

    for _ in range(_ATTEMPTS):
        large = seconds(LARGE)
        if large < 0.2 or large < 0.2 + 24 * seconds(SMALL):
            return True
    return False
