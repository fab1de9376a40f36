"""A rollout worker: runs conversations for a trainer in another process, with its own engine and environments.

Weights travel in parts, as bytes in numpy arrays, which Ray's object store keeps and which workers on a machine read without a
copy: neither the trainer nor a worker has a whole model in memory of its own on the way. The worker gets the files of a row's
images with the row. It sends back the images that the conversation has shown, without tensors: the trainer computes these again
with its own image processor, which is the same, and equal images share them. This module knows the rollout loop and not Ray.
"""

from __future__ import annotations

import io
import itertools
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.chat.media import MediaProcessor
from turnwise.data.images import image_file
from turnwise.data.rows import COLUMNS
from turnwise.engines.engine import Engine
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.servers import ProbeAnswer, ProbePrompt
from turnwise.errors import DataError, EngineError, Failed, boundary
from turnwise.rollout.context import RolloutContext
from turnwise.rollout.rollout import rollout
from turnwise.rollout_server.wire import LoadAdapter, change_each, processed_again, with_changed_media
from turnwise.types import Completion, Request, Row, Sampling, Trajectory

# weights


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as bytes: numpy has no bfloat16."""

    data: np.ndarray
    """uint8, one dimension."""
    dtype: str
    """The name of torch's type, such as `bfloat16`."""
    shape: tuple[int, ...]


Part = Mapping[str, PackedTensor]
"""Some of all weights, by the names of the state dict."""

PART_BYTES = 256 << 20
"""The size of a part, unless one tensor is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """All weights in parts, or an adapter. A worker changes nothing before it has them all."""

    version: int
    parts: Sequence[Any] = ()
    """What leads a worker to each `Part` of all weights; empty for an adapter. Tied copies are in none."""
    adapter: Any = None
    """What leads it to the files of an adapter in peft's format, by their names; None for all weights."""


def parts_of(weights: Mapping[str, Any], size: int = PART_BYTES) -> Iterator[Part]:
    """A state dict in parts of at most `size` bytes, unless one tensor is larger. Only the present part is in memory if the
    tensors are computed when they are read (`StreamedWeights`), or are on a GPU; tensors on the CPU are not copied."""
    part: dict[str, PackedTensor] = {}
    used = 0
    for name in weights:
        tensor = _packed(weights[name])
        if part and used + tensor.data.nbytes > size:
            yield part
            part, used = {}, 0
        part[name] = tensor
        used += tensor.data.nbytes
    if part:
        yield part


def adapter_files(write: Callable[[Path], None]) -> dict[str, bytes]:
    """The files that `write` writes into a directory, by their names."""
    with tempfile.TemporaryDirectory(prefix="turnwise-adapter-") as name:
        folder = Path(name)
        write(folder)
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def _packed(tensor: Any) -> PackedTensor:
    import torch

    data = tensor.detach().cpu().contiguous()
    flat = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.zeros(0, np.uint8)
    return PackedTensor(flat, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def unpack_tensors(parts: Sequence[Part]) -> dict[str, Any]:
    """The tensors of a state dict from all its parts. They share the memory of the packed tensors, and must not be changed."""
    import torch

    tensors: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, tensor in itertools.chain.from_iterable(part.items() for part in parts):
            flat = torch.from_numpy(tensor.data).view(getattr(torch, tensor.dtype))
            tensors[name] = flat.reshape(tensor.shape)
    return tensors


# images


class ImageFile(bytes):
    """The contents of an image file of the trainer's machine, in place of its path. In the trainer, it is the path again."""

    path: Any
    """The image as the trainer's row has it."""

    @classmethod
    def of(cls, value: Any, *, where: str) -> Any:
        """The file of an image; an image that is not given as a path stays as it is. Raises DataError."""
        path = image_file(value, where=where)
        if path is None:
            return value
        try:
            file = cls(path.read_bytes())
        except OSError as error:
            raise DataError(f"{where}: {path} cannot be read ({error.strerror})") from error
        file.path = value
        return file


def with_files(row: Row) -> Row:
    """The row with the contents of image files in place of their paths, in messages and columns. Raises DataError."""
    files: dict[str, Any] = {}

    def opened(value: Any) -> Any:
        where = f"an image of row {row.id}"
        if not isinstance(value, str):
            return ImageFile.of(value, where=where)
        if value not in files:  # the messages and the columns have the same images
            files[value] = ImageFile.of(value, where=where)
        return files[value]

    columns = {
        column: [change_each(value, opened) for value in values]
        for column in COLUMNS.values()
        if isinstance(values := row.fields.get(column), list | tuple)
    }
    return replace(row, messages=with_changed_media(row.messages, opened), fields={**row.fields, **columns})


def without_tensors(trajectory: Trajectory) -> None:
    """Remove the tensors of images, in the worker."""
    for segment in trajectory.segments:
        segment.media = [replace(item, inputs={}) for item in segment.media]


def add_tensors(trajectory: Trajectory, vision: MediaProcessor | None) -> None:
    """Compute the tensors of images again, in the trainer. Raises EngineError."""
    for segment in trajectory.segments:
        where = f"the conversation {trajectory.id}"
        segment.media = [processed_again(item, segment, vision, where=where) for item in segment.media]


class _Pickler(pickle.Pickler):
    """Writes paths in place of the trainer's image files."""

    def persistent_id(self, obj: Any) -> Any:
        return (obj.path,) if isinstance(obj, ImageFile) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid[0]


def pickled(trajectory: Trajectory) -> bytes:
    """The trajectory of an ended conversation as bytes, without the image files of its row."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(trajectory)
    return buffer.getvalue()


def unpickled(data: bytes) -> Trajectory:
    """The trajectory that `pickled` has written."""
    return _Unpickler(io.BytesIO(data)).load()


# the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker has loaded. It must be the same as in the trainer's process."""

    turnwise: str
    """The version of turnwise, with the checksum of its source."""
    tokenizer: str
    """The fingerprint of the tokenizer and its chat template."""
    processor: str | None
    """The fingerprint of the image processor; None for a text model."""
    base: str | None
    """The fingerprint of the weights below an adapter; None if the recipe has no adapter."""


class RolloutWorker:
    """Runs conversations in the present event loop. `load_adapter` is given if the recipe has an adapter (model.lora)."""

    def __init__(self, context: RolloutContext, *, load_adapter: LoadAdapter | None, info: WorkerInfo) -> None:
        self.info = info
        self._context = context
        self._load_adapter = load_adapter

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        return self._context.engine

    async def run(self, empty: bytes, sampling: Sampling) -> bytes:
        """Run the conversation of an empty trajectory, which is pickled. Returns the pickled trajectory of the ended
        conversation.

        A failure is recorded in the trajectory; only cancellation is raised.
        """
        trajectory: Trajectory = pickle.loads(empty)
        await rollout(trajectory, replace(self._context, sampling=sampling))
        handle, trajectory.environment = trajectory.environment, None
        if handle is not None:  # reward functions of the trainer cannot read the object
            handle.release()
        for each in (trajectory, *trajectory.agents):
            without_tensors(each)
        return _pickled(trajectory)

    async def generate(self, request: Request) -> Completion:
        """Answer a single request of the trainer, such as that of a judge. Raises EngineError."""
        try:
            return await self.engine.generate(request)
        finally:
            self.engine.release(request.conversation)

    async def load_weights(
        self, version: int, parts: Sequence[Part], probe: ProbePrompt | None = None
    ) -> list[ProbeAnswer]:
        """Sample with these weights from now on. Conversations that run go on with them. With `probe`, returns the answers of the
        engine's servers. Raises EngineError."""
        await self.engine.load_weights(version, unpack_tensors(parts))
        return await self._answers(probe)

    async def load_adapter(
        self, version: int, files: Mapping[str, bytes], probe: ProbePrompt | None = None
    ) -> list[ProbeAnswer]:
        """The same with the files of an adapter. Raises EngineError or ConfigError."""
        if self._load_adapter is None:
            raise EngineError("the trainer has sent an adapter, and the worker's recipe has none (model.lora)")
        with tempfile.TemporaryDirectory(prefix="turnwise-adapter-") as name:
            for file, content in files.items():
                (Path(name) / file).write_bytes(content)
            await self._load_adapter(version, Path(name))
        return await self._answers(probe)

    async def _answers(self, probe: ProbePrompt | None) -> list[ProbeAnswer]:
        if probe is None:
            return []
        assert isinstance(self.engine, RemoteEngine)  # an embedded engine is not probed
        return await self.engine.answer_probe(probe)


def _pickled(trajectory: Trajectory) -> bytes:
    """The trajectory as bytes. If an environment has put an object into it that cannot be pickled, the trajectory fails."""
    where = (
        "the conversation cannot be sent to the trainer: a message or `info` contains an object that cannot be pickled"
    )
    try:
        with boundary("environment", where=where):
            return pickled(trajectory)
    except Failed as failed:
        empty = Trajectory(id=trajectory.id, group=trajectory.group, row=trajectory.row, seed=trajectory.seed)
        empty.started, empty.seconds = trajectory.started, trajectory.seconds
        empty.fail(failed.failure)
        return pickled(empty)
