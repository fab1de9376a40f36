"""Checkpoints: a model directory that anybody can load, and beside it what is needed to go on exactly.

A checkpoint is written under a temporary name and then renamed, and `checkpoint` is a link that is swung over to it: at any
moment, whatever is killed, the link names a whole checkpoint.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch

from turnwise.errors import RunError

__all__ = ["Checkpoints"]

_STATE = "trainer.pt"


class Processor(Protocol):
    """What prepares a model's input beside its tokenizer: `rollout.media.Vision`."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write its files into a model directory."""
        ...


class Checkpoints:
    """The checkpoints of one run directory: `checkpoints/step-<n>/`, and the link `checkpoint` to the newest."""

    def __init__(self, run: Path, *, keep: int = 2) -> None:
        self._folder = run / "checkpoints"
        self.newest = run / "checkpoint"
        self._keep = keep

    def save(
        self, step: int, *, model: Any, tokenizer: Any, state: dict[str, Any], processor: Processor | None = None
    ) -> None:
        """Write the checkpoint of a finished step; `processor` is that of images, where the model sees.

        Raises RunError if it cannot be written; the one before stays what it is.
        """
        target = self._folder / f"step-{step:06d}"
        temporary = self._folder / f"writing-{step:06d}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            if processor is not None:
                processor.save_pretrained(temporary)
            torch.save(state, temporary / _STATE)
            for file in temporary.iterdir():
                _sync(file)
            shutil.rmtree(target, ignore_errors=True)  # of a run that was killed between here and the link
            os.replace(temporary, target)
            self._point_at(target)
        except (OSError, RuntimeError) as error:  # torch and safetensors tell of a full disk as a RuntimeError
            shutil.rmtree(temporary, ignore_errors=True)
            kept = (
                f"the one before is whole: {self.newest.resolve()}"
                if self.newest.exists()
                else "there is none before it"
            )
            raise RunError(f"the checkpoint of step {step} could not be written ({error}); {kept}") from error
        self._prune(target)

    def load(self) -> dict[str, Any] | None:
        """The state beside the newest checkpoint, or None if there is no checkpoint.

        Raises RunError if there is one that cannot be read.
        """
        if not self.newest.exists():
            return None
        try:
            return torch.load(self.newest / _STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise RunError(f"{self.newest / _STATE} cannot be read: {error}") from error

    def _point_at(self, target: Path) -> None:
        link = self.newest.with_name("checkpoint.writing")
        link.unlink(missing_ok=True)
        link.symlink_to(target.relative_to(self.newest.parent))
        os.replace(link, self.newest)

    def _prune(self, newest: Path) -> None:
        whole = sorted(path for path in self._folder.glob("step-*") if path != newest)
        for path in whole[: max(len(whole) - self._keep + 1, 0)]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob("writing-*"):
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the file on the disk before anything points at it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
