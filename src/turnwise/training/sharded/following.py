"""The process of a rank that follows rank 0, from its start to its end."""

from __future__ import annotations

import os
import sys

from turnwise.errors import ConfigError
from turnwise.training.sharded.commands import follow
from turnwise.training.sharded.liveness import LostRank
from turnwise.training.sharded.options import RankOptions
from turnwise.training.sharded.ranks import Ranks

__all__ = ["follow_rank_0"]


def follow_rank_0(options: RankOptions) -> int:
    """Connect to rank 0 and run its commands until it ends the training. Returns the exit status."""
    ranks = Ranks(options)

    def lost(rank: LostRank) -> None:
        _say(f"rank {ranks.rank} ends: {rank}")
        os._exit(1)  # the main thread may wait in a collective operation

    ranks.liveness.on_lost = lost
    try:
        follow(ranks)
    except ConfigError:
        return 1  # rank 0 has the same error, and reports it
    except RuntimeError as error:
        ranks.liveness.report(error)
        _say(f"rank {ranks.rank} ends: {error}")
        return 1
    ranks.close()
    return 0


def _say(text: str) -> None:
    print(f"turnwise: {text}", file=sys.stderr, flush=True)
