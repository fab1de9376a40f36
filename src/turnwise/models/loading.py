"""Loads models completely or refuses them; recomputation of layers; weights as other programs load them.

This is the only place where a model is loaded; `ModelSource` says which, and how. transformers fills missing weights with random
numbers and drops weights that the model does not have. Both would train a different model, so both are refused here, and so are
weights that are NaN or infinite, and an attention implementation that does not support the model.

Gradient checkpointing: the backward pass computes the activations inside a layer again, instead of keeping them in memory.
transformers applies its own only to layers in training mode, in which layers also use dropout and drop the key-value cache. The
engine samples from the same model, possibly at the same time, so the mode of a layer cannot be changed here. The layers'
forward is wrapped instead: it recomputes while gradients are recorded, and changes nothing otherwise. Dropout stays off.

Published weights have the names of checkpoint files, and the fingerprint of a model is equal for two models whose parameters
and buffers are the same, bit by bit. Does not know training steps or engines.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.local_paths import refuse_other_than_model, share_weights, unreadable
from turnwise.models.cpu import with_fast_layers
from turnwise.models.device import device_name, gpu_memory, why_no_gpu, without_cudnn_attention
from turnwise.models.kernels import use_kernels
from turnwise.models.lora import (
    adapter_base,
    adapter_weights,
    add_adapter,
    has_adapter,
    load_adapter,
    merged,
    save_adapter,
)
from turnwise.models.precision import ignored_by_sdpa, set_text_attention
from turnwise.models.quantization import dequantized, keep_differentiable, saved_quantization, transformers_config
from turnwise.options.algorithm import LoraSection
from turnwise.options.schema import ModelSection

# Recomputation of layers in the backward pass


def recompute_layers(model: Any) -> None:
    """Keep only the inputs of the model's layers for the backward pass.

    Raises ConfigError if the model does not name its layers (as transformers' `GradientCheckpointingLayer`).
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.gradient_checkpointing: {type(model).__name__} does not support it. Remove it, and set a smaller "
            f"micro_batch_tokens to save memory"
        )
    for layer in layers:
        layer.forward = functools.partial(_forward, layer.forward)


def _forward(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    # the tree that attention computes is in a context variable, which has another value during the backward pass
    context = contextvars.copy_context()

    def run(*arguments: Any, **options: Any) -> Any:
        return context.copy().run(forward, *arguments, **options)

    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


# Loading

_log = logging.getLogger(__name__)


class _KernelNotices(logging.Filter):
    """One line of ours in place of the library's lines about each kernel of a recurrent layer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if "reference PyTorch implementation" not in record.getMessage():
            return True
        if not self._said and torch.cuda.is_available():
            _log.warning(
                "recurrent layers are computed in plain PyTorch, which is right, and slow on a GPU: "
                "pip install 'turnwise[hybrid]' (flash-linear-attention, causal-conv1d)"
            )
        self._said = True
        return False


logging.getLogger("transformers.integrations.hub_kernels").addFilter(_KernelNotices())

_SHOWN = 3
"""Maximum number of weight names in an error message."""


class ModelSource(ModelSection):
    """The section `model` of a recipe, and what only a run knows of the model that it loads."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """As in the recipe, without `auto`; no section changes after it was made."""
    adapter: str | None = None
    """A directory with saved weights of the adapter `lora`. None: the adapter starts with random values."""
    seed: int = 0
    """The seed of the random values of a new adapter."""

    def of_base(self, path: str | Path) -> ModelSource:
        """All weights of the model at `path`, frozen or to be changed elsewhere: without a new adapter or recomputed layers."""
        changes = {"path": str(path), "lora": LoraSection(), "adapter": None, "gradient_checkpointing": False}
        return self.model_copy(update=changes)


def load_model(source: ModelSource) -> Any:
    """Load a causal language model, to train or to sample from; a vision model with its vision part.

    A directory with an adapter is loaded as its base model with the adapter merged into the weights. `source.lora` then adds a
    new adapter. If the adapter was trained on quantized weights, it is merged into these weights, dequantized.

    Raises ConfigError if there is no model at `source.path`, if weights are missing, unexpected or not finite, if tied
    weights are not equal, if the adapter does not fit the model, if the device does not exist, or if the kernels cannot be used.
    """
    base = adapter_base(source.path)
    if base is None:
        model = _load_base(source)
    elif source.quantization.bits is not None:
        raise ConfigError(
            f"model.quantization.bits=4 needs a model directory, and {source.path} is an adapter: write the merged model first "
            f"(turnwise merge {source.path} --out DIR), and set model.path=DIR"
        )
    else:
        model = merged(_merge_base(source.of_base(base), source.path), source.path)
        model.name_or_path = source.path
    adapt(model, source)
    use_kernels(model, source.kernels, model.device)
    return with_fast_layers(model)


def _merge_base(source: ModelSource, adapter: str | Path) -> Any:
    """The model to which an adapter belongs, with the values of the weights on which it was trained."""
    source = source.model_copy(update={"kernels": "none"})  # the merged model gets them
    if (saved := saved_quantization(adapter)) is None:
        return load_model(source)
    quantization, dtype = saved
    trained = source.model_copy(update={"quantization": quantization, "dtype": dtype})
    return dequantized(load_model(trained), source.dtype)


def adapt(model: Any, source: ModelSource) -> None:
    """Add the adapter and the gradient checkpointing of the source to a loaded model, in place.

    Raises ConfigError if the model does not support them.
    """
    if source.lora.rank is not None:
        add_adapter(model, source.lora, seed=source.seed)
        if source.adapter is not None:
            load_adapter(model, source.adapter)
    if source.gradient_checkpointing:
        recompute_layers(model)


def _load_base(source: ModelSource) -> Any:
    """Load a model directory without adapters."""
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    path, device = source.path, source.device
    refuse_other_than_model(path, error=ConfigError)
    name = device_name(device)
    if name == "cpu" and device == "auto" and (reason := why_no_gpu()) is not None:
        _log.warning("model.device=auto: the model is on the CPU, although this machine has a GPU's driver: %s", reason)
    try:
        torch.empty(0, device=name)  # before the weights are read, which takes long, and which are quantized there
    except (RuntimeError, AssertionError) as error:
        reason = why_no_gpu() if name.startswith("cuda") else None
        advice = "Use model.device=auto, or a device that torch sees"
        text = reason or f"{' '.join(str(error).split()).rstrip('.')}. {advice}"
        raise ConfigError(f"model.device={device} cannot be used: {text}") from error
    if name.startswith("cuda"):
        without_cudnn_attention()
    quantized: dict[str, Any] = {}
    with _loading(source, name):
        config = AutoConfig.from_pretrained(path)
    if source.quantization.bits is not None:
        quantization = transformers_config(source.quantization, source.dtype, model_without_weights(path))
        quantized = {"quantization_config": quantization, "device_map": {"": name}}
    with _loading(source, name):
        model, found = model_family(config).from_pretrained(
            path, config=config, dtype=getattr(torch, source.dtype), output_loading_info=True, **quantized
        )
    _refuse_other_weights(path, model, missing=found["missing_keys"], unexpected=found["unexpected_keys"])
    try:
        with boundary("model"):
            keep_differentiable(model) if quantized else model.to(name)
    except Failed as failed:
        problem = f"model.device={device} cannot be used: {failed.failure.message}"
        raise ConfigError(_does_not_fit(source, name, failed) or problem) from failed
    model.eval()  # with dropout, the learner would compute another distribution than the engine samples from
    use_complete_attention(model)
    return model


@contextlib.contextmanager
def _loading(source: ModelSource, device: str) -> Iterator[None]:
    """What is raised inside becomes a ConfigError that says what to do: damaged weight files raise exceptions of many kinds."""
    try:
        with boundary("model"):
            yield
    except Failed as failed:
        problem = _does_not_fit(source, device, failed) or unreadable("model", source.path, failed)
        raise ConfigError(problem) from failed


_WHILE_QUANTIZING = "during automatic conversion of the weights"
"""From the error of transformers that stands for all that were raised while weights were quantized."""


def _does_not_fit(source: ModelSource, device: str, failed: Failed) -> str | None:
    """What to do if a model was not loaded because the memory of its GPU does not suffice; None if that was not the reason."""
    out, quantized = isinstance(failed.__cause__, torch.OutOfMemoryError), source.quantization.bits is not None
    if not device.startswith("cuda") or not (out or (quantized and _WHILE_QUANTIZING in failed.failure.message)):
        return None
    smaller = ["model.dtype=bfloat16"] if source.dtype == "float32" else []
    smaller += [] if quantized else ["model.quantization.bits=4 with model.lora.rank"]
    return (
        f"{source.path} could not be loaded: its weights {'do' if out else 'probably do'} not fit into the memory of "
        f"model.device={source.device} ({gpu_memory(device)}). Use {', '.join([*smaller, 'a smaller model or another GPU'])} "
        f"(`turnwise doctor` says what fits), or end what else uses this GPU (nvidia-smi lists it)"
    )


def model_family(config: Any) -> Any:
    """The auto class that loads the complete model of a transformers configuration, with its vision part if it has one."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def model_without_weights(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model at `path` on torch's meta device: its modules and the shapes of its weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    config.name_or_path = path
    with torch.device("meta"):
        return model_family(config).from_config(config, dtype=dtype)


def _refuse_other_weights(path: str, model: Any, *, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raise ConfigError unless the weights in memory are those of the checkpoint, and finite."""
    if missing and unexpected and getattr(model.config.get_text_config(), "layer_types", None):
        raise ConfigError(
            f"{path}: the checkpoint lacks {_named(missing)}, and holds {_named(unexpected)}, for which {type(model).__name__} "
            f"has no place. If these are layers of another type, the pattern of layers in config.json (layer_types) is not that "
            f"of the weights: restore the config.json that belongs to them"
        )
    if missing:
        raise ConfigError(
            f"{path}: the checkpoint lacks {_named(missing)}, which {type(model).__name__} has; "
            f"{_pronoun(missing)} would be random numbers. {_fix_of_missing(model, missing)}"
        )
    if unexpected:
        raise ConfigError(
            f"{path}: the checkpoint holds {_named(unexpected)}, for which {type(model).__name__} has no place; "
            f"{_pronoun(unexpected)} would be dropped. Correct config.json (architectures, model_type, number of layers), or "
            f"remove them from the checkpoint if they belong to no language model"
        )
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(target) is not model.get_parameter(source):
            raise ConfigError(
                f"{path}: config.json ties {target} to {source} (tie_word_embeddings=true), and the checkpoint holds "
                f"different values for them: programs that serve it would drop one. Set tie_word_embeddings to false in "
                f"config.json if both were trained, or remove {target} from the checkpoint"
            )
    numbers = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    strange = [name for name, tensor in numbers.items() if not bool(torch.isfinite(tensor).all())]
    if strange:
        raise ConfigError(
            f"{path}: {_named(strange)} {'holds' if len(strange) == 1 else 'hold'} values that are NaN or infinite. The "
            f"checkpoint is damaged, or was saved after training had diverged: use an earlier one, or download it again"
        )


def _fix_of_missing(model: Any, missing: Collection[str]) -> str:
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    if head is not None and set(missing) == {f"{name}.weight" for name in heads}:
        return (
            "If the model's output layer is its input embedding, set tie_word_embeddings to true in config.json; otherwise "
            "use a complete checkpoint"
        )
    return "Use a complete checkpoint (all files that its index names), or correct config.json"


def _named(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:_SHOWN])
    if len(names) == 1:
        return f"the weight {first}"
    return f"{len(names)} weights ({first}{', ...' if len(names) > _SHOWN else ''})"


def _pronoun(names: Collection[str]) -> str:
    return "it" if len(names) == 1 else "they"


def use_complete_attention(model: Any) -> None:
    """Use transformers' eager attention if sdpa ignores something that the model's attention needs."""
    if model.config.get_text_config()._attn_implementation != "sdpa" or not (ignored := ignored_by_sdpa(model)):
        return
    set_text_attention(model, "eager")
    _log.warning(
        "%s uses %s in its attention, which sdpa ignores: attn_implementation=eager is used instead, which needs memory for "
        "all pairs of tokens",
        type(model).__name__,
        ", ".join(ignored),
    )


# Saving


def saved_weights(model: Any) -> Mapping[str, torch.Tensor]:
    """The weights that `save_model` writes: all by the names of the state dict, or those of the adapter by peft's names."""
    return adapter_weights(model) if has_adapter(model) else model.state_dict()


def save_model(model: Any, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a model into a directory as transformers loads it; of a model with an adapter, the adapter. `weights` are those to
    write, if the model's own tensors are not complete."""
    if has_adapter(model):
        save_adapter(model, folder, weights)
    else:
        model.save_pretrained(folder, state_dict=weights)
        share_weights(folder)
    _keep_dropped_keys(model, folder)


_OF_WEIGHTS = frozenset(
    {"torch_dtype", "dtype", "quantization_config", "transformers_version", "auto_map", "architectures"}
)
"""Keys of config.json that describe the files that a model was loaded from, and not the model."""


def _keep_dropped_keys(model: Any, folder: Path) -> None:
    """Write into the config.json of a saved model what transformers has read from the original one and does not write.

    transformers turns some keys into others: `full_attention_interval` of Qwen3-Next and Qwen3.5 into `layer_types`. Servers
    such as SGLang read the original ones, and could not serve the checkpoint without them. A key is kept if transformers reads
    the same configuration with it, apart from the key itself.
    """
    from transformers.utils.hub import cached_file

    found = None
    with contextlib.suppress(OSError, ValueError):  # the directory is gone, or the model was made here and has no name
        found = cached_file(
            model.name_or_path, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
    file = folder / "config.json"
    if found is None or not file.is_file():
        return
    given, saved = (json.loads(Path(path).read_text(encoding="utf-8")) for path in (found, file))
    kept = copy.deepcopy(saved)

    def read(config: Mapping[str, Any], place: Sequence[str], name: str) -> Any:
        # from a file, since only there some numbers are read: infinity is an object in JSON
        with tempfile.TemporaryDirectory() as trials:
            (trial := Path(trials) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            known = type(model.config).from_json_file(trial).to_dict()
        _section(known, place).pop(name, None)
        return known

    for place, name in _dropped(given, saved):
        trial = copy.deepcopy(kept)
        _section(trial, place)[name] = _section(given, place)[name]
        with contextlib.suppress(Failed), boundary("model"):  # each class checks and converts its keys as it likes
            if read(trial, place, name) == read(kept, place, name):
                kept = trial
    if kept != saved:
        file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _dropped(given: Mapping[str, Any], saved: Mapping[str, Any], *place: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The places and names of what is in the first configuration and not in the second."""
    for name, value in given.items():
        if name in _OF_WEIGHTS or name.startswith("_"):
            continue
        if name not in saved:
            yield place, name
        elif isinstance(value, dict) and isinstance(saved[name], dict) and name.endswith("_config"):
            yield from _dropped(value, saved[name], *place, name)


def _section(config: dict[str, Any], place: Sequence[str]) -> dict[str, Any]:
    return functools.reduce(lambda part, name: part[name], place, config)


# Weights as other programs load them, and the log-probabilities with which they are compared


def conversion_names(model: Any) -> list[str] | None:
    """Names of the conversions with which the weights of a model were read from its files; None if it was not loaded."""
    used = getattr(model, "_weight_conversions", None)
    return None if used is None else [_conversion_name(conversion) for conversion in used]


def with_conversions(model: Any, names: Sequence[str] | None, path: str) -> Any:
    """The model, as if its weights had been read from its files with the conversions of these names. Raises ConfigError if
    transformers has no such conversion for it; `path` is where the model is from."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if names is not None:
        known = {_conversion_name(conversion): conversion for conversion in get_model_conversion_mapping(model)}
        if unknown := sorted(set(names) - known.keys()):
            raise ConfigError(
                f"{path}: this version of transformers does not convert weights by {unknown[0]}: use the version that the run "
                f"used"
            )
        model._weight_conversions = [known[name] for name in known if name in names]
    return model


def _conversion_name(conversion: Any) -> str:
    patterns = (conversion._original_source_patterns, conversion._original_target_patterns)
    return f"{type(conversion).__name__} {patterns} {conversion.scope_prefix} {conversion.base_model_prefix}"


def file_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some weights, by their names in the model, as its files have them. All weights of a layer must be given together."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(weights))


def published_weights(model: Any, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The weights by the names of the checkpoint files of Hugging Face, without copies; of a model with an adapter, the weights
    of the adapter by peft's names.

    `state` is the model's state dict, if its own tensors are not complete. Of tied weights, the first name stands for all:
    `model.embed_tokens.weight`, and not `lm_head.weight`.
    """
    if has_adapter(model):
        return adapter_weights(model)
    from transformers.core_model_loading import revert_weight_conversion

    distinct: dict[str, torch.Tensor] = {}
    known: set[tuple[Any, ...]] = set()
    for name, tensor in (model.state_dict() if state is None else state).items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in known or not tensor.numel():
            known.add(place)
            distinct[name] = tensor
    return revert_weight_conversion(model, distinct)


@torch.no_grad()
def largest_logit(model: Any, token_ids: Sequence[int], *, device: torch.device | None = None) -> float:
    """The largest absolute logit after each of the tokens. `device` as in `token_logprobs`."""
    ids_1L = torch.tensor([list(token_ids)], device=device or model.device)
    return float(model(input_ids=ids_1L, use_cache=False).logits.abs().amax())


def token_logprobs(model: Any, token_ids: Sequence[int], *, device: torch.device | None = None) -> list[float]:
    """`log_softmax(logits)` of each of the tokens after the first, in float32. `device` is that of the pass, if it is not that
    of the model's parameters."""
    ids_1L = torch.tensor([list(token_ids)], device=device or model.device)
    logits_LV = model(input_ids=ids_1L, use_cache=False).logits[0, :-1].float()
    return logits_LV.log_softmax(-1).gather(-1, ids_1L[0, 1:, None])[:, 0].tolist()


# Fingerprint of a model's weights


def of_model(model: Any) -> str:
    """SHA-256 over the names, shapes, types and values of the model's parameters and buffers, on any device."""
    state = model.state_dict()
    with ThreadPoolExecutor(4) as workers:
        parts = workers.map(lambda name: _of_tensor(name, state[name]), sorted(state))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def of_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each tensor, as in `of_model`, for tensors that cannot be in memory together."""
    return [_of_tensor(name, tensor) for name, tensor in tensors]


def _of_tensor(name: str, tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(values.numpy().data).hexdigest()}"
