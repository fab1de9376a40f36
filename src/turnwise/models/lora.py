"""LoRA adapters (Hu et al., 2021, arXiv 2106.09685) in a transformers model, through peft.

The adapter's layers replace layers of the model in place, so the model keeps its type. Knows how adapters are added, saved,
loaded, merged and left out. Knows nothing of training. peft is imported only if there is an adapter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.library_messages import silence_libraries
from turnwise.local_paths import POLICIES, has_all_weights, share_weights
from turnwise.options.algorithm import LoraSection

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
"""peft's name for the only adapter of a model."""
_PREFIX = "base_model.model."
"""What peft puts before the names of parameters in an adapter's file."""
_SHOWN = 12


def has_adapter(model: Any) -> bool:
    """Whether the model has an adapter that is not merged."""
    return getattr(model, "peft_config", None) is not None


def adapter_base(path: str | Path) -> str | None:
    """The path of the base model of the adapter in a directory; None if there is no adapter in it.

    The adapter of a trained policy in a checkpoint that has all weights of the main model is on these weights, wherever the
    checkpoint is now. Raises ConfigError if the adapter's configuration cannot be read or names no base model.
    """
    file = Path(path).expanduser() / CONFIG_FILE
    if not file.is_file():
        return None
    if file.parent.parent.name == POLICIES and has_all_weights(around := file.parent.parent.parent):
        return str(around)
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Restore the adapter's original file") from error
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{file} names no base model: set base_model_name_or_path in it to the model that the adapter was trained on"
        )
    return base


def add_adapter(model: Any, lora: LoraSection, *, seed: int = 0) -> None:
    """Add a new adapter to the model in place, and freeze all other weights. The model computes the same as before.

    The adapter's weights are float32. `seed` is that of the random values of the first of its two matrices. Raises ConfigError
    if peft is not installed, or if the model lacks a target module.
    """
    peft = _peft()
    targets = _targets(model, lora.target_modules)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with boundary("model"):
                peft.inject_adapter_in_model(config, model)
        except Failed as failed:
            raise ConfigError(
                f"model.lora cannot be used with {type(model).__name__}: {failed.failure.message}"
            ) from failed
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()  # the new layers are in training mode


def initialize_magnitudes(modules: Iterable[Any]) -> list[Any]:
    """Give the DoRA adapters among `modules` their first magnitudes: the norms of the base weights that the layers have now.
    Returns the modules that have them, as `weight`."""
    from peft.tuners.lora.layer import LoraLayer

    changed: list[Any] = []
    for layer in modules:
        if isinstance(layer, LoraLayer) and _NAME in layer.lora_magnitude_vector:
            base: Any = layer.get_base_layer()
            magnitude: Any = layer.lora_magnitude_vector[_NAME]
            # in the type of the base weights, as peft computes them for a new adapter
            factors: list[Any] = [layer.lora_A[_NAME], layer.lora_B[_NAME]]
            down, up = (factor.weight.to(base.weight.dtype) for factor in factors)
            magnitude.update_layer(base_layer=base, lora_A=down, lora_B=up, scaling=layer.scaling[_NAME])
            magnitude.weight.data = magnitude.weight.data.float()
            changed.append(magnitude)
    return changed


def save_adapter(model: Any, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter into a directory, in the files that `peft.PeftModel.from_pretrained` reads. `weights` are its weights, if
    the model's own tensors are not complete.

    Beside them are the model's config.json and generation_config.json, which name its context length and its stop tokens.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (weights or adapter_weights(model)).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    share_weights(folder / WEIGHTS_FILE)
    config = copy.deepcopy(model.peft_config[_NAME])
    config.base_model_name_or_path = _absolute(model.name_or_path)
    config.inference_mode = True
    config.save_pretrained(folder)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the model's adapter, by the names in the adapter's file."""
    state = _peft().get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    return {f"{_PREFIX}{name}": tensor for name, tensor in state.items()}


def load_adapter(model: Any, folder: str | Path) -> None:
    """Load the weights of a saved adapter into the model's adapter, which has the same options.

    Raises ConfigError if the file cannot be read, or if it has other weights than the model's adapter.
    """
    peft, state = _peft(), _saved(folder)
    own = peft.get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    differing = sorted(
        name for name in {*state, *own} if name not in state or name not in own or state[name].shape != own[name].shape
    )
    if differing:
        raise ConfigError(
            f"the adapter in {folder} has other weights than model.lora gives ({len(differing)} differ, such as "
            f"{differing[0]}): use the options rank, target_modules and dora that it was trained with"
        )
    _fill(model, state)


def _saved(folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights in an adapter's file, by the names of layers."""
    from safetensors.torch import load_file

    file = Path(folder) / WEIGHTS_FILE
    try:
        with boundary("model"):
            saved = load_file(file)
    except Failed as failed:
        raise ConfigError(f"the adapter {file} cannot be read: {failed.failure.message}") from failed
    return {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items()}


@torch.no_grad()
def _fill(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Copy saved weights into the adapter's weights of the same names.

    Not by peft, which renames layers as if the file were an old checkpoint of the base model, and then drops those that it does
    not find (the shared experts of Laguna).
    """
    own = _peft().get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    for name, tensor in state.items():
        if name in own and own[name].shape == tensor.shape:
            own[name].copy_(tensor)


def merged(model: Any, folder: str | Path) -> Any:
    """The model with the adapter in `folder` added to its weights. `model` is the adapter's base model, and is changed.

    Raises ConfigError if peft cannot load the adapter.
    """
    peft = _peft()
    tied = model.config.get_text_config().tie_word_embeddings
    try:
        with boundary("model"), warnings.catch_warnings():
            # peft asks by a name that transformers 5.23 replaced
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
            )
            wrapped = peft.PeftModel.from_pretrained(model, str(folder))
            if (Path(folder) / WEIGHTS_FILE).is_file():
                _fill(wrapped.get_base_model(), _saved(folder))
            result = wrapped.merge_and_unload(safe_merge=True)
    except Failed as failed:
        raise ConfigError(f"the adapter in {folder} cannot be used: {failed.failure.message}") from failed
    if tied and result.get_input_embeddings().weight is not result.get_output_embeddings().weight:
        raise ConfigError(
            f"the adapter in {folder} changes the embedding or the output layer, and the model ties them "
            f"(tie_word_embeddings=true): a merged model cannot have both. Untie them in the base model first"
        )
    return result.eval().requires_grad_(True)


@dataclass(frozen=True, slots=True)
class LinearAdapter:
    """The adapter of a linear layer: `scale * up @ down` is added to the weight."""

    down: torch.Tensor
    """peft's matrix A, [rank, inputs]."""
    up: torch.Tensor
    """peft's matrix B, [outputs, rank]."""
    scale: float


def linear_adapter(module: Any) -> LinearAdapter | None:
    """The adapter of a layer that `add_adapter` has put in the place of a linear layer.

    None for any other layer, and for an adapter that does more than add a product (DoRA).
    """
    if not _is_peft_module(module):
        return None
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or type(module.get_base_layer()) is not torch.nn.Linear:
        return None
    if module.active_adapters != [_NAME] or module.merged or module.disable_adapters or module.lora_variant:
        return None
    down: Any = module.lora_A[_NAME]
    up: Any = module.lora_B[_NAME]
    if down.bias is not None or up.bias is not None or type(module.lora_dropout[_NAME]) is not torch.nn.Identity:
        return None
    return LinearAdapter(down.weight, up.weight, module.scaling[_NAME])


def _is_peft_module(module: Any) -> bool:
    """Whether the module is one of peft's. peft is not imported for that."""
    return type(module).__module__.partition(".")[0] == "peft"


def without_adapter(model: Any) -> Any:
    """A second model on the same base weights, without the adapter. It takes no memory for weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    base = copy.deepcopy(model, shared)
    for name, module in list(base.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(base.get_submodule(parent), child, module.get_base_layer())
    del base.peft_config
    return base


def with_second_adapter(model: Any, lora: LoraSection, folder: str | Path | None = None, *, seed: int = 0) -> Any:
    """A second model on the same base weights, with an adapter of its own: new, or with the weights saved in `folder`.

    Without an adapter in `model`, its own weights are the base: when they change in place, the base of the second changes too.
    """
    second = without_adapter(model) if has_adapter(model) else _frozen_view(model)
    add_adapter(second, lora, seed=seed)
    if folder is not None:
        load_adapter(second, folder)
    return second


def _frozen_view(model: Any) -> Any:
    """A second model on the same weights, which has no gradients of them."""
    frozen = {id(one): torch.nn.Parameter(one.detach(), requires_grad=False) for one in model.parameters()}
    return copy.deepcopy(model, {**frozen, **{id(one): one for one in model.buffers()}})


def shares_base(model: Any, other: Any) -> bool:
    """Whether two models have the same base weights in memory, and differ in their adapters only."""
    return type(model) is type(other) and _base_tensors(model) == _base_tensors(other)


def _base_tensors(model: Any) -> dict[str, tuple[Any, ...]]:
    """Where a model has its tensors beside those of an adapter, by the names that they have without one."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    own = {name.replace(".base_layer.", "."): _place(tensor) for name, tensor in tensors}
    return {name: place for name, place in own.items() if ".lora_" not in name}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one in memory, also where each has an object of its own."""
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def default_targets(model: Any) -> list[str]:
    """The names of the linear layers that a new adapter changes, or ends of names where all layers with that end are meant.

    These are all linear layers except the output layer, routers and gates of experts (an adapter would change which experts run),
    layers that nothing calls (a Mamba layer reads the weight of some of its projections itself, and passes by an adapter), and
    layers that share their weight with another one (Zamba), which could not be merged with two adapters.
    """
    linear = {name for name, module in model.named_modules() if isinstance(module, _LINEAR)}
    head = model.get_output_embeddings()
    linear -= {name for name, module in model.named_modules() if module is head}
    linear -= {name for name in linear if weight_is_read_around(model, name) or _chooses_experts(model, name)}
    linear -= _with_shared_weight(model, linear)
    linear -= _of_stacked_experts(model, linear)
    if not linear:
        raise ConfigError(
            f"model.lora: {type(model).__name__} has no linear layer for an adapter: train all weights (remove model.lora)"
        )
    others: dict[str, set[str]] = {}
    for name, _ in model.named_modules():
        others.setdefault(name.rpartition(".")[2], set()).add(name)
    ends = {name.rpartition(".")[2] for name in linear}
    complete = {end for end in ends if others[end] <= linear}
    return sorted(complete | {name for name in linear if name.rpartition(".")[2] not in complete})


_LINEAR = (torch.nn.Linear, Conv1D)


def _with_shared_weight(model: Any, names: Iterable[str]) -> set[str]:
    """Those of the layers whose weight another layer has too."""
    layers_of: dict[int, list[str]] = {}
    for name in names:
        layers_of.setdefault(id(model.get_submodule(name).weight), []).append(name)
    return {name for layers in layers_of.values() if len(layers) > 1 for name in layers}


def weight_is_read_around(model: Any, name: str) -> bool:
    """Whether the module around a layer computes with the layer's weight or bias itself, at least in one of its kernels."""
    parent, _, child = name.rpartition(".")
    reads = re.compile(rf"self\.{re.escape(child)}\.(weight|bias)\b(?!\.(device|dtype|shape))")
    return any(reads.search(text) for text in _methods(type(model.get_submodule(parent))))


@functools.cache
def _methods(kind: type) -> tuple[str, ...]:
    """The sources of the methods of a class of modules, its constructor aside."""
    found: list[str] = []
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, method in vars(base).items():
            if name != "__init__" and inspect.isfunction(method):
                with contextlib.suppress(OSError, TypeError):  # made without a file
                    found.append(inspect.getsource(inspect.unwrap(method)))
    return tuple(found)


def _chooses_experts(model: Any, name: str) -> bool:
    """Whether a layer has an output for each expert of the block around it, or one output, the gate of a shared expert."""
    layer = model.get_submodule(name)
    outputs = (
        layer.out_features if isinstance(layer, torch.nn.Linear) else layer.nf
    )  # a weight in 4 bits has another shape
    if outputs == 1:
        return True
    around = name.split(".")[:-1]
    for depth in range(len(around), max(0, len(around) - _LEVELS), -1):
        block = model.get_submodule(".".join(around[:depth]))
        if any(outputs == count for child in block.children() if (count := _experts_of(child))):
            return True
    return False


_LEVELS = 2
"""Modules around a router in which the experts are: the block, or a router module in the block."""


def _experts_of(module: Any) -> int:
    """The number of experts in a module: the length of a list of blocks, or of the stacks of their weights; 0 without experts."""
    if isinstance(module, torch.nn.ModuleList):
        return len(module)
    if type(module).__module__.startswith("torch.nn."):  # a convolution
        return 0
    return next((len(parameter) for parameter in module.parameters(recurse=False) if parameter.ndim == 3), 0)


def _of_stacked_experts(model: Any, names: Iterable[str]) -> set[str]:
    """Those of the names by which peft means the stacked weights of experts, whatever layer has the name.

    peft so loads adapters that were trained when each expert had layers of its own. It has adapters for stacks, which compute the
    changed weights of all experts in each pass; they cannot be taken out of a model again, which the reference model needs.
    """
    peft = _peft()
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    found: set[str] = set()
    for name in names:
        config = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one of two names that are one stack
            found.add(name)
            continue
        if set(config.target_modules) != {name}:
            found.add(name)
    return found


def _targets(model: Any, names: Sequence[str] | None) -> list[str]:
    """The target modules as peft expects them. Raises ConfigError if the model has no layer of a name."""
    if names is None:
        return default_targets(model)
    layers = {name for name, module in model.named_modules() if isinstance(module, (*_LINEAR, torch.nn.Embedding))}
    ends = sorted({name.rpartition(".")[2] for name in layers})
    for target in names:
        matching = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matching:
            raise ConfigError(
                f"model.lora.target_modules: {type(model).__name__} has no linear layer {target!r}"
                f"{nearest(target, ends)}; it has {_listed(ends)}"
            )
        _refuse_tied(model, target, matching)
        if shared := sorted(_with_shared_weight(model, matching)):
            raise ConfigError(
                f"model.lora.target_modules: {shared[0]} and {shared[1]} of {type(model).__name__} have the same weight, so two "
                f"adapters on it could not be merged: remove {target!r} from the list"
            )
        if passed := sorted(name for name in matching if weight_is_read_around(model, name)):
            raise ConfigError(
                f"model.lora.target_modules: {type(model).__name__} computes with the weight of {passed[0]} itself, so an "
                f"adapter on {target!r} would have no effect: remove it from the list"
            )
    if stacked := sorted(_of_stacked_experts(model, names)):
        raise ConfigError(
            f"model.lora.target_modules: in {type(model).__name__}, peft takes {stacked[0]!r} for the stacked weights of "
            f"its experts, which turnwise does not adapt: remove it from the list. Without a list, these get adapters: "
            f"{', '.join(default_targets(model))}"
        )
    return list(names)


def _refuse_tied(model: Any, target: str, matching: list[str]) -> None:
    """Raise ConfigError if the target is an embedding that is also the output layer."""
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    if tied and any(model.get_submodule(name) in (head, model.get_input_embeddings()) for name in matching):
        raise ConfigError(
            f"model.lora.target_modules: {target!r} is both the embedding and the output layer of {type(model).__name__} "
            f"(tie_word_embeddings=true), so an adapter on one of them could not be merged: remove it from the list"
        )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _absolute(path: str) -> str:
    """A local directory as an absolute path; a hub id unchanged."""
    expanded = os.path.expanduser(path)
    return os.path.abspath(expanded) if os.path.isdir(expanded) else path


def _peft() -> Any:
    silence_libraries()
    try:
        import peft
    except ImportError:
        raise ConfigError("LoRA adapters need peft: pip install 'turnwise[lora]'") from None
    return peft
