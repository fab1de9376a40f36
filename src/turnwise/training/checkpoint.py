"""Checkpoints: a model directory that other programs can load, and the state that is needed to resume exactly.

    runs/x/checkpoint -> checkpoints/step-000004/model     link to the newest one
    runs/x/best -> checkpoints/step-000002/model           link to the one with the best evaluation, if the recipe asks for it
    runs/x/checkpoints/step-000004/
        model/             weights, tokenizer and processor, as `save_pretrained` writes them; of several ranks, the weights
                           are in shards/ until `complete_weights` writes them here
            policies/<name>/   the adapter of a further trained policy
        critic/            weights of the critic, if there is one: a model directory, and value_head.safetensors
        trainer.pt         the state of the optimizers
        shards/            of a learner on several ranks: its weights and the state of its optimizer, a part from each rank
            critic/        the same of a critic on several ranks
        checkpoint.json    position of the run, its options, and fingerprints of its data
        SHA256SUMS         of every file above; `sha256sum -c SHA256SUMS` checks them

A checkpoint is written under a temporary name and then renamed; the link is replaced after that. Invariant: the
link always names a complete checkpoint, even if the process is killed at any time. Directories that turnwise has not written
are ignored and never deleted.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch.utils._pytree import tree_map

from turnwise.errors import RunError
from turnwise.json_yaml import parse_json, read_text
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.training.fingerprint import flush, of_file, sync_file
from turnwise.training.learner import no_shards

MODEL, CRITIC, SHARDS = "model", "critic", "shards"
_STATE, _ABOUT, _SUMS = "trainer.pt", "checkpoint.json", "SHA256SUMS"
UNWRITABLE = (OSError, RuntimeError, SafetensorError)
"""What is raised if the disk is full: torch raises a RuntimeError."""
_NAME = re.compile(r"step-(\d{6,})")
_TEMPORARY = re.compile(r"writing-\d{6,}")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int
    about: Mapping[str, Any]
    """The contents of checkpoint.json: the mapping that `finish` received, and `step`."""
    note: str | None = None
    """Why this is not the checkpoint that the link names; None if it is."""

    @property
    def model(self) -> Path:
        """The model directory."""
        return self.folder / MODEL

    @property
    def critic(self) -> Path | None:
        """The directory of the critic's weights; None if the checkpoint has no critic."""
        folder = self.folder / CRITIC
        return folder if folder.is_dir() else None

    @property
    def shards(self) -> Path | None:
        """The directory with the parts of a learner on several ranks; None if one process has written the checkpoint."""
        folder = self.folder / SHARDS
        return folder if folder.is_dir() else None

    @property
    def critic_shards(self) -> Path | None:
        """The same of a critic."""
        folder = self.folder / SHARDS / CRITIC
        return folder if folder.is_dir() else None

    def state(self) -> dict[str, Any]:
        """The optimizer's state.

        Raises RunError if it cannot be read.
        """
        try:
            return torch.load(self.folder / _STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise RunError(f"{self.folder / _STATE} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint whose large files are written. The link does not name it yet."""

    step: int
    folder: Path
    sums: Mapping[str, str]


class Checkpoints:
    """The checkpoints of one run directory: `checkpoints/step-<n>/`, and the link `checkpoint` to the newest model."""

    def __init__(self, run: Path, *, keep: int = 2) -> None:
        self._folder = run / "checkpoints"
        self.newest = run / "checkpoint"
        self.best = run / "best"
        self._keep = keep

    def save(
        self,
        step: int,
        *,
        save_model: Callable[[Path], None],
        tokenizer: Any,
        state: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        processor: Any = None,
    ) -> None:
        """Call `write`, then `finish`. Raises RunError if the checkpoint cannot be written."""
        pending = self.write(step, save_model=save_model, tokenizer=tokenizer, state=state, processor=processor)
        self.finish(pending, about or {})

    def model_of(self, step: int) -> Path:
        """The model directory of the checkpoint of a step."""
        return self._folder.absolute() / f"step-{step:06d}" / MODEL

    def write(
        self,
        step: int,
        *,
        save_model: Callable[[Path], None],
        tokenizer: Any,
        state: Mapping[str, Any],
        processor: Any = None,
        save_critic: Callable[[Path], None] | None = None,
        save_shards: Callable[[Path], Mapping[str, str]] = no_shards,
        save_critic_shards: Callable[[Path], Mapping[str, str]] = no_shards,
    ) -> PendingCheckpoint:
        """Write the large files of a step's checkpoint. `processor` is that of a vision model (`chat.media.Vision`).

        `save_critic` writes the critic's weights into a directory; None: there is no critic. `save_shards` and
        `save_critic_shards` write the parts of a learner and of a critic on several ranks, and return the SHA-256 of each file.

        Raises RunError if they cannot be written; the previous checkpoint is unchanged.
        """
        temporary = self._folder / f"writing-{step:06d}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            folder = temporary / MODEL
            folder.mkdir(parents=True)
            # the state is larger than the model: it is written at the same time (files, hashes and the disk need no GIL)
            with ThreadPoolExecutor(4) as workers:
                state_sum = workers.submit(_write_state, dict(state), temporary / _STATE)
                save_model(folder)
                tokenizer.save_pretrained(folder)
                if processor is not None:
                    processor.save_pretrained(folder)
                if save_critic is not None:
                    (temporary / CRITIC).mkdir()
                    save_critic(temporary / CRITIC)
                sums: dict[str, str] = {}
                for part, write in ((SHARDS, save_shards), (f"{SHARDS}/{CRITIC}", save_critic_shards)):
                    (temporary / part).mkdir(parents=True)
                    sums |= {f"{part}/{name}": digest for name, digest in write(temporary / part).items()}
                for part in (f"{SHARDS}/{CRITIC}", SHARDS):
                    if not any((temporary / part).iterdir()):
                        (temporary / part).rmdir()
                names = [path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file()]
                names = [name for name in names if name not in sums and name != _STATE]
                own = workers.map(sync_file, (temporary / name for name in names))
                sums |= dict(zip(names, own, strict=True)) | {_STATE: state_sum.result()}
        except UNWRITABLE as error:
            raise self._failed(step, temporary, error) from error
        return PendingCheckpoint(step, temporary, {name: sums[name] for name in sorted(sums)})

    def finish(self, unfinished: PendingCheckpoint, about: Mapping[str, Any]) -> None:
        """Write `about` into the checkpoint, make it the newest checkpoint, and remove the oldest checkpoints beyond `keep`.

        Raises RunError if the checkpoint cannot be written.
        """
        step, temporary = unfinished.step, unfinished.folder
        target = self._folder / f"step-{step:06d}"
        if target.exists() and _about(target) is None:
            shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(
                f"the checkpoint of step {step} cannot be written, because {target} exists and is not a checkpoint: move it to "
                f"another place"
            )
        try:
            text = json.dumps({"step": step, **about}, indent=1)
            (temporary / _ABOUT).write_text(text, encoding="utf-8")
            sums = {**unfinished.sums, _ABOUT: sync_file(temporary / _ABOUT)}
            (temporary / _SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sums), encoding="utf-8")
            folders = [path for path in temporary.rglob("*") if path.is_dir()]
            for path in (temporary / _SUMS, *folders, temporary):
                flush(path)
            shutil.rmtree(target, ignore_errors=True)  # left by a run that was killed before the link was replaced
            os.replace(temporary, target)
            flush(self._folder)
            _replace_link(self.newest, target / MODEL)
        except UNWRITABLE as error:
            raise self._failed(step, temporary, error) from error
        self._prune(step)

    def keep_best(self) -> None:
        """Make the newest checkpoint the best one: `best` names its model, and it is not removed while `best` names it.

        Raises RunError if the link cannot be written.
        """
        former = _target(self.best).parent if self.best.is_symlink() else None
        newest = _target(self.newest)
        try:
            _replace_link(self.best, self._folder / newest.parent.name / MODEL)
        except OSError as error:
            raise RunError(f"the link {self.best} to the best checkpoint cannot be written: {error}") from error
        if former is not None and former != newest.parent:
            self._prune(int(newest.parent.name.removeprefix("step-")))

    def in_parts(self) -> list[Path]:
        """Those of the newest and the best checkpoint whose weights are in the parts of several ranks only."""
        folders = {_target(link).parent for link in (self.newest, self.best) if link.exists()}
        return sorted(folder for folder in folders if in_parts(folder))

    def refuse_other_files(self, *, best: bool = False) -> None:
        """Refuse a run directory in which checkpoints could not be written. Called before training. `best`: the run will keep
        its best checkpoint.

        Raises RunError.
        """
        for link, which in ((self.newest, "newest"), *(((self.best, "best"),) if best else ())):
            if not link.is_symlink() and link.exists():
                kind = "directory" if link.is_dir() else "file"
                raise RunError(
                    f"{link} is a {kind}, and the run would write a link to its {which} checkpoint there: move it to another "
                    f"place, or choose another directory: output=runs/<name>"
                )
        if self._folder.exists() and not self._folder.is_dir():
            raise RunError(f"{self._folder} is a file, and the run would write its checkpoints there: move it away")

    def find(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint, or None if there is no link and no directory that is named like a checkpoint.

        This is the checkpoint that the link names. If the link is missing or broken, it is the newest complete checkpoint.
        Raises RunError if the checkpoint that the link names is damaged, if no complete checkpoint is found and a damaged one is,
        or if a link exists and no checkpoint is left.
        """
        if self.newest.is_symlink() or self.newest.exists():
            folder = _target(self.newest).parent
            if folder.parent == self._folder.resolve() and folder.is_dir():
                return self._complete(folder)
        reason = (
            f"the link {self.newest} points to no checkpoint"
            if self.newest.is_symlink()
            else f"{self.newest} was removed"
        )
        problem: RunError | None = None
        for folder in reversed(self._numbered()):
            try:
                saved = self._complete(folder)
            except RunError as error:
                problem = problem or error
                continue
            return SavedCheckpoint(
                saved.folder,
                saved.step,
                saved.about,
                f"{reason}: resuming from {folder}, the newest complete checkpoint",
            )
        if problem is not None:
            raise problem
        if self.newest.is_symlink():
            raise RunError(
                f"{reason}, and there is no other checkpoint: restore {self._folder} from a copy, or start a new run with "
                f"replace=true"
            )
        return None

    def _complete(self, folder: Path) -> SavedCheckpoint:
        """The checkpoint in `folder`, after comparing each file with its checksum.

        Raises RunError.
        """
        if (folder / "config.json").is_file() and (folder / _STATE).is_file():
            raise RunError(
                f"{folder} was written by an earlier version of turnwise, whose checkpoints cannot be resumed. Start a new run "
                f"from its model: model.path={folder} and another output"
            )
        problem = _damage(folder)
        about = _about(folder) if problem is None else None
        if about is None:
            others = [path.name for path in reversed(self._numbered()) if path != folder and _damage(path) is None]
            alternative = f"; {others[0]} is complete: to resume from it, remove {folder.name}" if others else ""
            raise RunError(
                f"the checkpoint {folder} is damaged: {problem or f'{_ABOUT} contains another step'}. Restore it from a "
                f"copy{alternative}; or start a new run with replace=true"
            )
        return SavedCheckpoint(folder, about["step"], about)

    def _numbered(self) -> list[Path]:
        """Directories that are named like checkpoints, in the order of their steps."""
        if not self._folder.is_dir():
            return []
        paths = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink()]
        return sorted((path for path in paths if path.is_dir()), key=lambda path: int(path.name.removeprefix("step-")))

    def _prune(self, newest: int) -> None:
        """Remove the oldest checkpoints beyond `keep`, and later checkpoints that remain after a resume at an earlier step. The
        best one is kept beside those."""
        own = [(about["step"], path) for path in self._numbered() if (about := _about(path)) is not None]
        best = _target(self.best).parent if self.best.is_symlink() else None
        earlier = [path for step, path in own if step < newest and path.resolve() != best]
        later = [path for step, path in own if step > newest]
        for path in [*earlier[: max(len(earlier) - self._keep + 1, 0)], *later]:
            shutil.rmtree(path, ignore_errors=True)
        if best is not None and not best.exists():
            self.best.unlink(missing_ok=True)  # it was one of the later ones
        for path in self._folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _failed(self, step: int, temporary: Path, error: Exception) -> RunError:
        shutil.rmtree(temporary, ignore_errors=True)
        previous = self.newest.exists()
        kept = (
            f"the previous checkpoint is complete: {_target(self.newest)}"
            if previous
            else "there is no earlier checkpoint"
        )
        return RunError(f"the checkpoint of step {step} could not be written ({error}); {kept}")


def in_parts(folder: Path) -> bool:
    """Whether weights of a checkpoint are in the parts of several ranks only."""
    return any((folder / part / WEIGHTS_IN_PARTS).is_file() for part in (MODEL, CRITIC))


def replace_sums(folder: Path, changes: Mapping[str, str | None]) -> None:
    """Change the list of a checkpoint's files: the SHA-256 by the name of a file; None removes it from the list."""
    lines = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
    sums: dict[str, str | None] = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    sums |= changes
    new = folder / f"{_SUMS}.writing"
    new.write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums) if sums[name]), encoding="utf-8")
    flush(new)
    os.replace(new, folder / _SUMS)
    flush(folder)


T = TypeVar("T")


class WritingThread:
    """Runs functions one after the other: in a thread beside the caller, or each at once."""

    def __init__(self, beside: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint") if beside else None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function after the former ones. One that is run at once raises its errors here."""
        if self._pool is not None:
            return self._pool.submit(function)
        done: Future[T] = Future()
        done.set_result(function())
        return done

    def close(self) -> None:
        """Let the thread end after the last function. Does not wait."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def copied_to_cpu(values: Any) -> Any:
    """The same with copies of all tensors in the CPU's memory. Tensors that share memory (tied weights) have one copy."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies or not value.numel():
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map(copied, values)


def _replace_link(link: Path, target: Path) -> None:
    new = link.with_name(f"{link.name}.writing")
    new.unlink(missing_ok=True)
    new.symlink_to(target.relative_to(link.parent))
    os.replace(new, link)
    flush(link.parent)


def _target(link: Path) -> Path:
    """The path that a link names; that of the link itself if it names itself, directly or through others."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # Python 3.13 raises the first, earlier versions the second
        return link.absolute()


def _about(folder: Path) -> dict[str, Any] | None:
    """The contents of checkpoint.json; None if turnwise has not written it, or its step is not that of the folder's name."""
    try:
        about = parse_json(read_text(folder / _ABOUT, error=RunError), where=str(folder / _ABOUT), error=RunError)
    except RunError:
        return None
    named = _NAME.fullmatch(folder.name)
    known = isinstance(about, dict) and isinstance(about.get("step"), int)
    return about if known and (named is None or about["step"] == int(named.group(1))) else None


def _damage(folder: Path) -> str | None:
    """A description of the first file whose checksum differs, or None."""
    try:
        lines = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        return f"{_SUMS} cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})"
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if not {_ABOUT, _STATE} <= sums.keys():
        return f"{_SUMS} does not list all files"
    with ThreadPoolExecutor(4) as workers:
        problems = workers.map(lambda name: _differs(folder / name, sums[name], name), sums)
        return next((problem for problem in problems if problem is not None), None)


def _differs(path: Path, digest: str, name: str) -> str | None:
    try:
        return None if of_file(path) == digest else f"{name} was changed after it was written (its checksum differs)"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"


def _write_state(state: Mapping[str, Any], path: Path) -> str:
    """Write the state of the optimizers, and flush it to disk. Returns the file's SHA-256."""
    torch.save(state, path)
    return sync_file(path)
