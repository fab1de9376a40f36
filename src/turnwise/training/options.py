"""What a rank needs to build its part of the learner and of the critic.

Knows sections of a recipe and numbers. Does not know complete recipes or models, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.options.algorithm import CorrectionSection, LossSection, OptimizationSection, ReferenceSection
from turnwise.options.engines import FsdpSection
from turnwise.options.teacher import TeacherSection
from turnwise.types import Sampling

if TYPE_CHECKING:
    from turnwise.models.loading import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """Everything that a rank needs to build its part of the learner. Rank 0 sends it to the other ranks."""

    model: ModelSource
    sampling: Sampling
    loss: LossSection
    correction: CorrectionSection = CorrectionSection()
    optimizer: OptimizationSection
    sharding: FsdpSection
    reference: ReferenceSection | None = None
    teacher: TeacherSection = TeacherSection()
    teachers: Mapping[str, ModelSource | None] = field(default_factory=dict)
    """The local teachers by their names; None: the trained model without its adapter."""
    share_prompts: str = "auto"
    autocast: bool = False
    deterministic: bool = False
    router_replay: bool = False
    folder: Path | None = None
    """A directory that all ranks share, because each writes its part of a checkpoint below it. None: no checkpoint is written."""
    run: Path | None = None
    """The directory of the run, in which the ranks remember that their memory ran out. None: they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions:
    """Everything that a rank needs to build its part of the critic."""

    model: ModelSource
    optimizer: OptimizationSection
    sharding: FsdpSection
    clip: float | None = None
    """The bound of value clipping."""
    head: Path | None = None
    """The directory of a saved value head. None: the head starts with zeros."""
    share_prompts: str = "auto"
    autocast: bool = False
    run: Path | None = None
    """See `ShardOptions`."""
