"""Weights in 4 bits under an adapter (QLoRA: Dettmers et al., 2023, arXiv 2305.14314), through bitsandbytes.

The linear layers of a model are quantized while it is loaded, in blocks of 64 numbers with a scale each. They are frozen, and
only an adapter on them is trained. Each product dequantizes its weight. Knows how a model is quantized and dequantized, and how
many bytes that takes. Knows nothing of training. bitsandbytes is imported only for a quantized model.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from turnwise.errors import ConfigError
from turnwise.options.schema import QuantizationSection

_BLOCK = 64
"""Numbers with a common scale."""
_SCALES = 256
"""Scales with a common scale of their own, if the scales are quantized too."""


def transformers_config(section: QuantizationSection, dtype: str) -> Any:
    """The configuration of transformers. `dtype` is the type in which products are computed. Raises ConfigError if bitsandbytes
    is not installed."""
    # in 4 bits, products on a CPU have no fast kernel for some types: bitsandbytes says so at each start
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "4bit" not in str(record.msg))
    try:
        import bitsandbytes  # pyright: ignore[reportMissingTypeStubs] # noqa: F401
    except ImportError:
        raise ConfigError("model.quantization.bits=4 needs bitsandbytes: pip install 'turnwise[4bit]'") from None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.type,
        bnb_4bit_use_double_quant=section.double,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def stored_bytes(section: QuantizationSection, numbers: int) -> float:
    """The bytes of a weight with so many numbers, with its scales.

    >>> stored_bytes(QuantizationSection(bits=4, double=False), 64)
    36.0
    """
    scales = numbers / _BLOCK
    return numbers / 2 + (scales * (1 + 4 / _SCALES) if section.double else scales * 4)


def linear_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """The layers that are quantized: all linear layers but the output layer and those of an adapter."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and ".lora_" not in name
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
