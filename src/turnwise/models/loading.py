"""Loads models with all weights of the checkpoint, and an attention implementation that supports the model; else raises.

This is the only place where a model is loaded; `ModelOptions` has its options. transformers fills missing weights with random
numbers and drops weights that the model does not have. Both would train a different model, so both are refused here, and so are
weights that are NaN or infinite.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.local_paths import refuse_other_than_model
from turnwise.models.attention import ignored_by_sdpa, set_text_attention
from turnwise.models.fast_layers import with_fast_layers
from turnwise.models.lora import LoraOptions, adapter_base, add_adapter, load_adapter, merged
from turnwise.models.recompute import recompute_layers

__all__ = ["ModelOptions", "adapt", "load_model", "model_family", "use_complete_attention"]

_log = logging.getLogger(__name__)

_SHOWN = 3
"""Maximum number of weight names in an error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model is loaded, and how."""

    path: str | Path
    """A model directory or a hub id."""
    dtype: str
    """The name of a torch dtype: `float32`, `bfloat16`."""
    device: str
    """A torch device, or `auto`: `cuda` if available, else `cpu`."""
    lora: LoraOptions | None = None
    """A new adapter on the model, whose other weights are frozen. None: no adapter."""
    adapter: str | Path | None = None
    """A directory with saved weights of the adapter `lora`. None: the adapter starts with random values."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes the activations inside a layer again."""


def load_model(options: ModelOptions) -> Any:
    """Load a causal language model, to train or to sample from; a vision model with its vision part.

    A directory with an adapter is loaded as its base model with the adapter merged into the weights. `options.lora` then adds a
    new adapter.

    Raises ConfigError if there is no model at `options.path`, if weights are missing, unexpected or not finite, if tied
    weights are not equal, if the adapter does not fit the model, or if the device does not exist.
    """
    base = adapter_base(options.path)
    if base is None:
        model = _load_base(options)
    else:
        model = merged(
            load_model(replace(options, path=base, lora=None, adapter=None, gradient_checkpointing=False)), options.path
        )
        model.name_or_path = str(options.path)
    adapt(model, options)
    return with_fast_layers(model)


def adapt(model: Any, options: ModelOptions) -> None:
    """Add the adapter and the gradient checkpointing of the options to a loaded model, in place.

    Raises ConfigError if the model does not support them.
    """
    if options.lora is not None:
        add_adapter(model, options.lora)
        if options.adapter is not None:
            load_adapter(model, options.adapter)
    if options.gradient_checkpointing:
        recompute_layers(model)


def _load_base(options: ModelOptions) -> Any:
    """Load a model directory without adapters."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    path, device = str(options.path), options.device
    refuse_other_than_model(path, error=ConfigError)
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        with boundary("model"):  # truncated weight files raise exceptions of many kinds
            model, found = model_family(path).from_pretrained(
                path, dtype=getattr(torch, options.dtype), output_loading_info=True
            )
    except Failed as failed:
        raise ConfigError(
            f"no model could be loaded from {path!r}: {failed.failure.message.rstrip('.')}. model.path must be a model "
            f"directory or a hub id"
        ) from failed
    _refuse_other_weights(path, model, missing=found["missing_keys"], unexpected=found["unexpected_keys"])
    try:
        model.to(name)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.device={device} cannot be used: {error}") from error
    model.eval()  # with dropout, the learner would compute another distribution than the engine samples from
    use_complete_attention(model)
    return model


def model_family(path: str) -> Any:
    """The auto class that loads the complete model at `path`, with its vision part if it has one."""
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    config = AutoConfig.from_pretrained(path)
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _refuse_other_weights(path: str, model: Any, *, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raise ConfigError unless the weights in memory are those of the checkpoint, and finite."""
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
