"""Weights in 4 bits under an adapter (QLoRA: Dettmers et al., 2023, arXiv 2305.14314), through bitsandbytes.

The linear layers of a model are quantized while it is loaded, in blocks of 64 numbers with a scale each, except those whose rows
are no whole blocks. They are frozen, and only an adapter on them is trained. Each product dequantizes its weight. Knows how a
model is quantized and dequantized, and how many bytes that takes. Knows nothing of training. bitsandbytes is imported only for a
quantized model.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from turnwise.errors import ConfigError
from turnwise.library_messages import silence_libraries
from turnwise.models.lora import weight_is_read_around
from turnwise.options.schema import QuantizationSection

_log = logging.getLogger(__name__)

silence_libraries()

_BLOCK = 64
"""Numbers with a common scale."""
_SCALES = 256
"""Scales with a common scale of their own, if the scales are quantized too."""


def transformers_config(section: QuantizationSection, dtype: str, blank: Any) -> Any:
    """The configuration of transformers. `dtype` is the type in which products are computed, `blank` the model on torch's meta
    device. Raises ConfigError if bitsandbytes is not installed, or if no layer can be quantized."""
    try:
        import bitsandbytes  # pyright: ignore[reportMissingTypeStubs] # noqa: F401
    except ImportError:
        raise ConfigError("model.quantization.bits=4 needs bitsandbytes: pip install 'turnwise[4bit]'") from None
    from transformers import BitsAndBytesConfig

    quantized = linear_layers(blank)
    if not quantized:
        raise ConfigError(
            f"model.quantization.bits=4: {type(blank).__name__} has no linear layer that can be quantized (torch.nn.Linear, with "
            f"a number of inputs that is a multiple of {_BLOCK}): remove model.quantization"
        )
    head = blank.get_output_embeddings()
    kept = {
        name: module
        for name, module in blank.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and name not in quantized
    }
    ends = Counter(name.rpartition(".")[2] for name, module in kept.items() if module is not head)
    if ends:
        _log.info(
            "model.quantization: %d linear layers stay in %s, because their inputs are no multiple of %d, or because the model "
            "reads their weights itself: %s",
            ends.total(),
            dtype,
            _BLOCK,
            ", ".join(f"{count} {end}" for end, count in sorted(ends.items())),
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        # regular expressions for the beginning of a name: with their end, those of other layers do not match
        llm_int8_skip_modules=[f"{re.escape(name)}$" for name in kept],
        bnb_4bit_quant_type=section.type,
        bnb_4bit_use_double_quant=section.double,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def keep_differentiable(model: Any) -> None:
    """Let quantized layers compute the same product in each pass, one through which gradients flow.

    On a CPU with `avx512_bf16`, bitsandbytes packs a weight anew in the first product without gradients. From then on, it
    computes in bfloat16, and no gradient reaches what is before the layer. The packed form also takes some shapes only.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def stored_bytes(section: QuantizationSection, numbers: int) -> float:
    """The bytes of a weight with so many numbers, with its scales.

    >>> stored_bytes(QuantizationSection(bits=4, double=False), 64)
    36.0
    """
    scales = numbers / _BLOCK
    return numbers / 2 + (scales * (1 + 4 / _SCALES) if section.double else scales * 4)


def linear_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """The layers of a model that are quantized, or would be: all linear layers but

    - the output layer and those of an adapter;
    - those whose rows are no whole blocks, which bitsandbytes dequantizes with wrong scales on a CPU (0.50.2);
    - those whose weight the module around them reads itself, at least in one of its kernels.
    """
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and ".lora_" not in name
        if module.in_features % _BLOCK == 0 and not weight_is_read_around(model, name.removesuffix(".base_layer"))
    }


def saved_quantization(folder: str | Path) -> tuple[QuantizationSection, str] | None:
    """How the weights under the adapter in a directory were quantized, and the type of their products, from its config.json;
    None if they were not."""
    try:
        facts = json.loads((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = facts.get("quantization_config") if isinstance(facts, dict) else None
    if not isinstance(found, dict) or not found.get("load_in_4bit"):
        return None
    section = QuantizationSection(
        bits=4,
        type="fp4" if found.get("bnb_4bit_quant_type") == "fp4" else "nf4",
        double=bool(found.get("bnb_4bit_use_double_quant")),
    )
    return section, str(found.get("bnb_4bit_compute_dtype", "float32"))


@torch.no_grad()
def dequantized(model: Any, dtype: str) -> Any:
    """The model with its quantized layers as ordinary layers of this type, changed in place: the same values, without 4 bits."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn.modules import Linear4bit

    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            weight: Any = module.weight
            values = dequantize_4bit(weight.data, weight.quant_state).to(getattr(torch, dtype))
            layer = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            layer.weight = torch.nn.Parameter(values)
            layer.bias = module.bias
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
    for name in ("is_loaded_in_4bit", "is_quantized", "hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    del model.config.quantization_config
    return model.to(getattr(torch, dtype))
