"""Which conversations are scored together, for resources that conversations keep until they are scored.

Set by the scorer before the conversations start; their tasks inherit it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

__all__ = ["conversations_of_step", "scored_together"]

scored_together: ContextVar[Literal["group", "batch"]] = ContextVar("scored_together", default="group")
"""`group`: the conversations of a row. `batch`: all conversations of the step, because of a function in `reward.batch`."""
conversations_of_step: ContextVar[int] = ContextVar("conversations_of_step", default=0)
"""The number of conversations of a step, where conversations of later steps run at the same time (`train.max_staleness`). 0: all
running conversations belong to the same step."""
