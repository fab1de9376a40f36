"""Weights on their way to servers: files that a server reads, in shared memory or on a disk, or copies that are broadcast.

The weights of an update stay until the next weights have arrived, so that a server can get them again after a failed update or
a restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import EngineError

__all__ = [
    "WeightCopies",
    "WeightFiles",
    "WeightStore",
    "WeightUpdate",
    "checksum_of",
    "checksum_of_tensors",
]

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "turnwise-weights-"
_SPARE = 1.1
"""Free space that must be there, as a multiple of the size of the weights."""
_BLOCK = 16 << 20  # bytes read at once for a checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights that servers load."""

    version: int
    path: Path | None = None
    """A safetensors file with Hugging Face's names of the state dict; for an adapter, a directory in peft's format. None if
    `tensors` are broadcast."""
    tensors: Mapping[str, Any] | None = None
    """The weights on the CPU, by the same names; None if they are in a file."""
    adapter: bool
    checksum: str
    """CRC-32 of the file, or of the bytes of all tensors. A worker computes it again from what it has received."""
    size: int
    """Bytes of the weights."""


class WeightStore(Protocol):
    """Keeps the weights of updates until no server needs them any more. All methods raise EngineError."""

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        """Keep a copy of tensors: names of the state dict to tensors, without tied copies."""
        ...

    def write_adapter(self, version: int, write: Callable[[Path], None]) -> WeightUpdate:
        """Keep an adapter: `write(folder)` writes its files into a new directory."""
        ...

    def discard(self, update: WeightUpdate) -> None:
        """Free an update that no server needs any more."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class WeightCopies:
    """Keeps weights in the memory of this process, for broadcasts (`engine.weight_transfer: collective`)."""

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        """A copy of the tensors on the CPU: the trainer's own change in place."""
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        checksum = checksum_of_tensors(tensors.values())
        return WeightUpdate(version=version, tensors=tensors, adapter=False, checksum=checksum, size=size)

    def write_adapter(self, version: int, write: Callable[[Path], None]) -> WeightUpdate:
        raise EngineError("an adapter is sent as files: set engine.weight_transfer=files")

    def discard(self, update: WeightUpdate) -> None:
        """Nothing to do: the copy is freed with the update."""

    def close(self) -> None:
        """Nothing to do."""


class WeightFiles:
    """Writes weights into files below `folder`; None: in shared memory, or in the system's temporary directory if that is full.

    Every object has a directory of its own, which `close` removes. The directory of a process that was killed is removed by the
    next object that writes to the same place. Below a `folder`, nothing is removed, because other machines may use it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._own: Path | None = None
        self._lock: int | None = None
        """The file descriptor whose lock says that this process uses the directory."""

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        """Write tensors into a safetensors file. `weights` maps the names of the state dict to tensors, without tied copies.

        Raises EngineError if they cannot be written.
        """
        from safetensors.torch import save_file

        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        path = self._directory(size) / f"{version}-{os.urandom(4).hex()}.safetensors"
        with _writing(path):
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
        return WeightUpdate(version=version, path=path, adapter=False, checksum=checksum_of(path), size=size)

    def write_adapter(self, version: int, write: Callable[[Path], None]) -> WeightUpdate:
        """The same with an adapter: `write(folder)` writes its files into a new directory."""
        path = self._directory(0) / f"{version}-{os.urandom(4).hex()}"
        with _writing(path):
            path.mkdir()
            write(path)
        weights = path / "adapter_model.safetensors"
        return WeightUpdate(
            version=version, path=path, adapter=True, checksum=checksum_of(weights), size=weights.stat().st_size
        )

    def discard(self, update: WeightUpdate) -> None:
        """Remove the files of an update that no server needs any more."""
        assert update.path is not None
        if update.adapter:
            shutil.rmtree(update.path, ignore_errors=True)
        else:
            update.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _directory(self, size: int) -> Path:
        if self._own is None:
            parent = self._folder or _parent_for(size)
            try:
                parent.mkdir(parents=True, exist_ok=True)
                if self._folder is None:
                    _remove_abandoned(parent)
                self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                self._lock = _locked(self._own)
            except OSError as error:
                raise EngineError(
                    f"weights for the engine's servers cannot be written to {parent}: {error}. Set engine.weight_folder to a "
                    f"directory that the server can read, too"
                ) from error
        return self._own


def _locked(directory: Path) -> int:
    """The descriptor of a new file `.lock` in a directory. The file has its name only after it is locked."""
    new = directory / ".lock.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(directory / ".lock")
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that have ended without removing them. Their locks are free."""
    for lock in parent.glob(f"{_PREFIX}*/.lock"):
        with (
            contextlib.suppress(OSError),
            lock.open("rb") as file,
        ):  # in use, of another user, or removed by another process
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def checksum_of(path: Path) -> str:
    """CRC-32 of a file, as 8 hexadecimal digits."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def checksum_of_tensors(tensors: Iterable[Any]) -> str:
    """CRC-32 of the bytes of tensors on the CPU, one after the other, as 8 hexadecimal digits."""
    import torch

    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), value)
    return f"{value:08x}"


def _parent_for(size: int) -> Path:
    """Shared memory, if two copies of the weights fit into it (the present and the next ones); else the temporary directory."""
    with contextlib.suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > 2 * _SPARE * size:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise EngineError(
            f"weights for the engine's servers cannot be written to {path}: {error}. Set engine.weight_folder to a directory "
            f"with more free space"
        ) from error
