"""Loads a model part by part, for a process that keeps only a share of each weight (training on several ranks).

The model is first built without memory for its weights, and the caller divides its parameters among processes. `StagedModel.fill`
then reads the weights of a module from the checkpoint's safetensors files, converted as `from_pretrained` converts them: of a
divided parameter only what this process keeps. So a process never reads or has more than its share and that of one conversion.

This is the only module that uses the parts of transformers' loader that `from_pretrained` is made of. Where they are missing, or
where a model needs more than they do, there is no staged loading, and `load_model` loads the complete model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from turnwise.errors import Failed, boundary
from turnwise.models.cpu import with_fast_layers
from turnwise.models.loading import ModelSource, adapt, model_without_weights
from turnwise.models.lora import adapter_base


class IncompleteWeights(Exception):
    """The weights cannot be read part by part. `load_model` must load the model, or says what is wrong with the checkpoint."""


class Reader(Protocol):
    """Where the weights of a model are."""

    @property
    def conversions(self) -> Any:
        """The conversions between them and the files of the model, which `save_pretrained` reverts."""
        ...

    def read(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values of the tensors of these names, of divided ones this process's part. Tied tensors are one object. Raises
        IncompleteWeights if one is missing."""
        ...

    def unused(self) -> list[str]:
        """Names of weights for which the model has no place."""
        ...


def open_staged(source: ModelSource, reader: Callable[[Any], Reader] | None = None) -> StagedModel | None:
    """The model of `source` without its weights, on the CPU; `source.device` is not used. `reader` makes what reads them,
    from the model on the meta device; None: they are in safetensors files.

    None if the model cannot be loaded part by part: the directory holds an adapter whose weights must be merged, there are no
    safetensors files, or the model has buffers whose values are computed from other weights. Raises ConfigError if the model
    does not support its source.
    """
    if adapter_base(source.path) is not None:
        return None
    try:
        with boundary("model"):  # damaged files raise exceptions of many kinds
            base = _without_weights(source.path, getattr(torch, source.dtype))
            if base is None:
                return None
            if reader is not None:
                return StagedModel(base, reader(base), source)
            files = _weight_files(source.path)
            found = _WeightReader(base, files) if files else None
    except Failed:
        return None
    return None if found is None else StagedModel(base, found, source)


class StagedModel:
    """A model whose weights are read module by module. `model` has the adapter and the gradient checkpointing of the source."""

    def __init__(self, base: Any, reader: Reader, source: ModelSource) -> None:
        self._reader = reader
        self.new_magnitudes = source.lora.rank is not None and source.lora.dora and source.adapter is None
        """Whether the adapter has magnitudes that must be computed from the weights (`initialize_magnitudes`)."""
        self._places = _places(base)
        self._left = set(self._places)
        _without_storage(base)
        adapt(base, source)
        self.model: Any = with_fast_layers(base)

    def to_meta(self) -> None:
        """Move the parameters without the adapter to the meta device, where they can be divided without memory. Tied weights stay
        tied."""
        moved: dict[int, Any] = {}
        for place in self._places.values():
            tensor = place.get()
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                place.put(moved.setdefault(id(tensor), torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)))

    def fill(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Read the weights of a part of the model that were not read before, divided as its parameters are. Adapters are no part
        of the checkpoint.

        Returns the tensors by their names in the model without its adapter. Raises IncompleteWeights if a weight is not finite,
        or is not in the checkpoint in the expected shape.
        """
        inside = set(module.modules())
        names = sorted(name for name in self._left if self._places[name].module in inside)
        tensors = self._reader.read({name: self._places[name].get() for name in names})
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            own = _own_copy(tensor)
            if own.is_floating_point() and not bool(torch.isfinite(own).all()):
                raise IncompleteWeights
        for name, tensor in tensors.items():
            self._places[name].put(tensor)
        self._left -= tensors.keys()
        return tensors

    def base_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the model without its adapter by their names there, in the order of the names."""
        for name in sorted(self._places):
            yield name, self._places[name].get()

    def check(self) -> None:
        """Check that the checkpoint has all weights of the model, and no others. Raises IncompleteWeights."""
        if self._left or self._reader.unused():
            raise IncompleteWeights
        self.model._weight_conversions = self._reader.conversions


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of the state dict is."""

    module: Any
    attribute: str

    def get(self) -> torch.Tensor:
        return getattr(self.module, self.attribute)

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the tensor. A parameter keeps `requires_grad`."""
        if self.attribute in self.module._buffers:
            self.module._buffers[self.attribute] = tensor
            return
        parameter: Any = tensor
        parameter.requires_grad_(self.get().requires_grad)
        self.module._parameters[self.attribute] = parameter


def _places(model: Any) -> dict[str, _Place]:
    names = model.state_dict().keys()
    return {
        name: _Place(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in sorted(names)
    }


class _WeightReader:
    """Reads tensors of a model from safetensors files, by their names in the model."""

    def __init__(self, model: Any, files: Mapping[str, str]) -> None:
        """`model` is on the meta device; the reader takes a copy. `files` has the file of each key."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self._model = copy.deepcopy(model)
        self._places = _places(self._model)
        self._empty = {name: place.get() for name, place in self._places.items()}
        self._missing = set(self._empty)
        self._files = files
        self._mapping: Any = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        self._keys: dict[str, list[str]] = {}
        for key in files:
            name, _ = rename_source_key(key, renamings, converters, self._model.base_model_prefix, self._empty)
            self._keys.setdefault(key if name not in self._empty and key in self._empty else name, []).append(key)

    @property
    def conversions(self) -> Any:
        """The conversions that were used: `save_pretrained` reverts them."""
        return [entry for entry in self._mapping if entry.was_used()]

    def read(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Reader.read`."""
        from safetensors import safe_open
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.distributed.utils import is_dtensor
        from transformers.modeling_utils import LoadStateDictConfig

        names = wanted.keys()
        for name, tensor in wanted.items():
            if is_dtensor(tensor):  # the loader then reads what is in this process's part
                self._places[name].put(torch.nn.Parameter(tensor.detach(), requires_grad=False))
        keys = [key for name in names for key in self._keys.get(name, ())]
        opened: Any = {file: safe_open(file, framework="pt") for file in {self._files[key] for key in keys}}
        info, _ = convert_and_load_state_dict_in_model(
            model=self._model,
            state_dict={key: opened[self._files[key]].get_slice(key) for key in keys},
            load_config=LoadStateDictConfig(
                dtype=self._model.dtype,
                dtype_plan=self._model._get_dtype_plan(self._model.dtype),
                weight_mapping=self._mapping,
            ),
        )
        if info.mismatched_keys or info.conversion_errors:
            raise IncompleteWeights
        self._missing &= info.missing_keys
        self._tie(names)
        tensors = {name: self._places[name].get() for name in names}
        if any(tensor.is_meta for tensor in tensors.values()):
            raise IncompleteWeights
        self._missing -= tensors.keys()
        for name in tensors:  # their memory belongs to the caller now
            self._places[name].put(self._empty[name])
        return tensors

    def _tie(self, names: Collection[str]) -> None:
        """Tie those weights of `names` that the model ties. Raises IncompleteWeights if the checkpoint has different values."""
        pairs = self._model.get_expanded_tied_weights_keys(all_submodels=True).items()
        pairs = [pair for pair in pairs if not names.isdisjoint(pair)]  # pyright: ignore[reportAttributeAccessIssue]
        if not pairs:
            return
        self._model.tie_weights(missing_keys=set(self._missing), recompute_mapping=False)
        if any(self._places[target].get() is not self._places[source].get() for target, source in pairs):
            raise IncompleteWeights

    def unused(self) -> list[str]:
        """Names in the files for which the model has no place, and that transformers does not ignore."""
        from transformers.utils.loading_report import LoadStateDictInfo

        unknown = {name for name in self._keys if name not in self._empty}
        info = LoadStateDictInfo(set(), unknown, set(), [], {}, set())
        self._model._adjust_missing_and_unexpected_keys(info)
        return sorted(info.unexpected_keys)


def _own_copy(tensor: Any) -> torch.Tensor:
    """Give a tensor, or this process's part of it, memory of its own in place of the file's, which may change. Returns it."""
    from transformers.distributed.utils import is_dtensor

    if is_dtensor(tensor):
        tensor._local_tensor = tensor._local_tensor.clone()
        return tensor._local_tensor
    tensor.data = tensor.data.clone()
    return tensor


def _without_weights(path: str, dtype: torch.dtype) -> Any | None:
    """The model on the meta device, with the values of buffers that are not in checkpoints; None if they are not known."""
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    model: Any = model_without_weights(path, dtype)
    saved = model.state_dict().keys()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = [key for key, buffer in module._buffers.items() if buffer is not None and prefix + key not in saved]
        for key in own:
            module._buffers[key] = _unset_like(module._buffers[key])
        if own:
            model._init_weights(module)
        if any(bool(_unset(module._buffers[key]).any()) for key in own):
            return None
    model.eval()
    if model.can_generate() and cached_file(
        path, "generation_config.json", _raise_exceptions_for_missing_entries=False
    ):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _unset_like(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer on the CPU with a value that no buffer has."""
    value = math.nan if buffer.is_floating_point() else torch.iinfo(torch.int8).min
    return torch.full_like(buffer, value, device="cpu")


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    """Which values of a buffer are still those of `_unset_like`."""
    return buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(torch.int8).min


def _weight_files(path: str) -> dict[str, str]:
    """The safetensors file of each key of the checkpoint; empty if the checkpoint has none."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    file = cached_file(path, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if file is not None:
        files = [file]
    else:
        index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
        if index is None:
            return {}
        files, _ = get_checkpoint_shard_files(path, index)
    keys: dict[str, str] = {}
    for name in files or ():
        with safe_open(name, framework="pt") as opened:
            keys.update(dict.fromkeys(opened.keys(), name))
    return keys


def _without_storage(model: Any) -> None:
    """Move the model from the meta device to the CPU, with one value of memory for each tensor. Tied weights stay tied."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = moved.setdefault(
                    id(parameter), torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
                )
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
