"""The calculator of task.py, with a latency: log-normal times, whose 99th percentile is 20 times the median.

Plain Python without imports of either system, like task.py.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import task

__all__ = ["slow_calculator"]

SIGMA = math.log(20) / 2.326  # the 99th percentile of a normal distribution is 2.326


def slow_calculator(median: float, call_name: Callable[[], str]) -> Callable[..., Any]:
    """The tool `calculator`, which answers after a random time with this median in seconds.

    The time depends on `call_name()` only, which should be different in each call.
    """

    async def calculator(expression: str):  # no return type, as in task.py
        """Evaluates an arithmetic expression.

        Args:
            expression: The expression.
        """
        if median:
            await asyncio.sleep(median * random.Random(call_name()).lognormvariate(0.0, SIGMA))
        return task.calculator(expression)

    return calculator
