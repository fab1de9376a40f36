"""Reading of what ranks have written with torch.distributed.checkpoint (`shards.py`): names, shapes, and the parts that are asked
for. Any number of processes reads what any number has written, each no more than its share. Knows models, not ranks.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor

from turnwise.errors import RunError
from turnwise.json_yaml import parse_json, read_text
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.models.device import device_name
from turnwise.models.kernels import use_kernels
from turnwise.models.loading import ModelSource, use_complete_attention, with_conversions
from turnwise.models.staged_loading import IncompleteWeights, open_staged

KINDS_OF_WEIGHTS = ("model", UNCHANGED := "unchanged")
"""What the names of weights begin with: those that are trained, and the others of a model that is saved completely."""


def saved_parts(folder: Path) -> Mapping[str, Any]:
    """What `folder` has: the shape and type of each tensor by its name. Raises RunError if it cannot be read."""
    try:
        return FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise RunError(_unreadable(folder, error)) from error


def read_parts(tensors: dict[str, torch.Tensor], folder: Path, *, alone: bool = False) -> None:
    """Give `tensors` the values that `folder` has of them; without `alone`, with all ranks. Raises RunError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", FutureWarning)
            dcp_load.load(tensors, storage_reader=FileSystemReader(folder), no_dist=alone)
    except CheckpointException as failed:  # not an Exception; all ranks have it
        error, _ = next(iter(failed.failures.values()))
        raise RunError(_unreadable(folder, error)) from failed


def _unreadable(folder: Path, error: BaseException) -> str:
    return (
        f"the parts of weights and optimizer in {folder} cannot be read ({type(error).__name__}: {error}): restore the "
        f"directory, or start another run from another checkpoint (model.path)"
    )


# the weights of a model directory that names where its parts are


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of a model among the parts."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelParts:
    """The weights of the model directory `source`, which ranks have written in parts. Raises RunError if they cannot be read."""

    def __init__(self, source: Path) -> None:
        file = source / WEIGHTS_IN_PARTS
        about: Any = parse_json(read_text(file, error=RunError), where=str(file), error=RunError)
        self.folder: Path = source / about["parts"]
        self._source = source
        self._conversions: list[str] | None = about["conversions"]
        self.stored: dict[str, StoredWeight] = {}
        """The weights by their names in the model. Of tied weights, there is one."""
        prefixes: Mapping[str, str] = about["prefixes"]
        for key, entry in saved_parts(self.folder).items():
            kind, _, name = key.partition("/")
            if kind not in KINDS_OF_WEIGHTS:
                continue
            for prefix, own in prefixes.items() if kind == KINDS_OF_WEIGHTS[0] else ():
                if not name.startswith(prefix):
                    break  # beside the model: the value head
                name = own + name.removeprefix(prefix)
            else:
                self.stored[name] = StoredWeight(key, tuple(entry.size), entry.properties.dtype)

    def converted(self, model: Any) -> Any:
        """The model, as if it had been loaded from files of which these weights are. Raises ConfigError."""
        return with_conversions(model, self._conversions, str(self._source))

    def refuse_missing(self, model: Any) -> None:
        """Raise RunError if a weight of the model is not there."""
        kept = model.state_dict().keys()
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        missing = sorted({name for name, _ in tensors if name in kept} - self.stored.keys())
        if missing:
            raise RunError(
                f"{self.folder} has no {missing[0]}"
                + (f", and lacks {len(missing) - 1} other weights" if missing[1:] else "")
            )


class PartsReader:
    """Reads weights into a model that is divided among other ranks than those that wrote them: the `Reader` of a `StagedModel`,
    whose modules are those of `model`."""

    def __init__(self, parts: ModelParts, model: Any) -> None:
        parts.refuse_missing(model)
        self._parts = parts
        self._unused = parts.stored.keys() - model.state_dict().keys()
        self.conversions = getattr(parts.converted(model), "_weight_conversions", None)

    def read(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Reader.read`."""
        new: dict[int, torch.Tensor] = {}
        asked: dict[str, torch.Tensor] = {}
        for name, tensor in wanted.items():  # tied ones are one object
            if (found := self._parts.stored.get(name)) is not None:
                if found.shape != tuple(tensor.shape):
                    raise IncompleteWeights
                asked[found.key] = new[id(tensor)] = _empty(tensor)
        if any(id(tensor) not in new for tensor in wanted.values()):
            raise IncompleteWeights
        read_parts(asked, self._parts.folder, alone=True)
        return {name: new[id(tensor)] for name, tensor in wanted.items()}

    def unused(self) -> list[str]:
        """See `Reader.unused`."""
        return sorted(self._unused)


def load_in_parts(source: ModelSource) -> Any:
    """`load_model` of a complete model whose weights ranks have written in parts. Raises RunError if they cannot be read."""
    staged = open_staged(source, functools.partial(PartsReader, ModelParts(Path(source.path))))
    try:
        if staged is None:
            raise IncompleteWeights
        staged.fill(staged.model)
        staged.check()
    except IncompleteWeights:
        raise unusable_parts(source.path) from None
    use_complete_attention(staged.model)
    model = staged.model.to(device_name(source.device))
    use_kernels(model, source.kernels, model.device)
    return model


def unusable_parts(path: str) -> RunError:
    """Of weights that do not fit the model, or that it cannot read in parts."""
    return RunError(
        f"the weights of {path}, which ranks have written in parts, cannot be read by other processes: `turnwise merge {path}` "
        f"writes them as files, or says what is wrong; then start the same command again"
    )


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter for the values of a tensor without memory, divided like it."""
    if not isinstance(tensor, DTensor):
        device = "cpu" if tensor.is_meta else tensor.device
        return torch.nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device=device), requires_grad=False)
    mesh, own = tensor.device_mesh, tensor.to_local()
    local = torch.empty(own.shape, dtype=own.dtype, device=mesh.device_type)
    whole = DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return torch.nn.Parameter(whole, requires_grad=False)
