"""The section `record` of a recipe: which conversations a run writes down, and how."""

from __future__ import annotations

from typing import Literal

from turnwise.config.section import Positive, Section

__all__ = ["RecordSection"]


class RecordSection(Section):
    """Which conversations are written to the files of a run (docs/record.md). Metrics are always complete."""

    every: Positive = 1
    """The number of training steps between two steps whose conversations are recorded: with 10, those of the steps 1, 10, 20 and
    so on, and of the last step. 1: the conversations of all steps are recorded."""
    best_and_worst: Positive | None = None
    """How many conversations of each group of a training step are recorded: this number with the highest rewards, this number
    with the lowest rewards, and at most this number of conversations that failed. Null: all conversations of a group are
    recorded."""
    compression: Literal["none", "gzip"] = "none"
    """How `trajectories.jsonl` and `eval_trajectories.jsonl` are compressed. `gzip`: the files are about 15 times smaller, and
    their names end in `.jsonl.gz`. All commands of turnwise read them, and decompress only a part of the file for one
    conversation."""
    trainer_logprobs: bool = True
    """Whether the trainer's log-probability of each trained token is recorded beside the engine's, so that `turnwise view` can
    show their ratio."""
