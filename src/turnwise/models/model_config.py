"""Facts of a model's config.json that need no model: context length, vocabulary, bytes of the KV cache.

Also the types of layers that keep a state, the size of the KV cache of a server on the CPU, which follows from the bytes of a
token, which models tensor parallelism divides, and how far bfloat16 rounds log-probabilities. Knows the names of the entries of
config.json, and imports no torch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError

RECURRENT_TYPES = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")
"""Types of layers (`layer_types`) that keep a state from token to token, the last two beside keys and values."""
TYPES_BY_TOKEN = ("mlp", "moe")
"""Types of layers that compute each token by itself."""


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest context in a model's config.json, under the name that the architecture uses; None if there is none."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(config.get(name), int):
            return config[name]
    text = config.get("text_config")
    return context_length(text) if isinstance(text, Mapping) else None


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """The number of token ids in a model's config.json; None if there is none."""
    if isinstance(config.get("vocab_size"), int):
        return config["vocab_size"]
    text = config.get("text_config")
    return vocabulary_size(text) if isinstance(text, Mapping) else None


# Tensor parallelism: which models are divided so

DIVISIBLE_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
)
"""Types of models (`model_type` of the text's configuration) whose training with `cluster.mesh.tensor` was compared with one
process."""


DIVIDED_STYLES = ("colwise", "rowwise", "moe_tp_experts")
"""The styles of transformers' plans (`tp_plan`) whose weights are divided; modules of other styles are whole on each rank."""


_SAME_LAYERS = {"qwen3_vl_text": "qwen3"}
"""Types for which transformers has no plan, and the type with the same layers whose plan is used."""


def tensor_plan(model: Any) -> Mapping[str, str]:
    """The plan (`tp_plan`) by which the layers of `model` are divided: the style of each module, by its name with `*` for the
    number of a layer."""
    same = _SAME_LAYERS.get(model.config.get_text_config().model_type)
    if same is None:
        return model.tp_plan or {}
    from transformers import CONFIG_MAPPING

    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return {f"{prefix}.{name}": style for name, style in (CONFIG_MAPPING[same].base_model_tp_plan or {}).items()}


def planned_styles(model: Any, plan: Mapping[str, str]) -> dict[Any, str]:
    """The style of each module of `model` for which one of transformers' plans has one. Plans name layers by `*`."""
    names = {module: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, module in model.named_modules()}
    return {module: plan[name] for module, name in names.items() if name in plan}


def refuse_indivisible(config: Any, ranks: int) -> None:
    """Raise ConfigError if a model with this configuration (of transformers) cannot be divided among so many ranks."""
    text = config.get_text_config()
    option = f"cluster.mesh.tensor={ranks}"
    model = f"the model {getattr(config, 'name_or_path', '')}".strip()
    if text.model_type not in DIVISIBLE_TYPES:
        kind = config.model_type if text is config else f"{config.model_type} ({text.model_type})"
        planned = text.base_model_tp_plan is not None
        reason = "which is not compared with one process" if planned else "for which transformers has no plan"
        raise ConfigError(
            f"{option}: {model} has the type {kind}, {reason}. Use cluster.mesh.shard instead; types that are divided so: "
            f"{', '.join(DIVISIBLE_TYPES)}"
        )
    sizes = {
        "attention heads": text.num_attention_heads,
        "key and value heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "features of the feed-forward layers": getattr(text, "intermediate_size", None) or ranks,
        "experts": _number_of_experts(text) or ranks,
    }
    for kind, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"{option}: {model} has {size} {kind}, which {ranks} ranks cannot divide; use a divisor of {size}"
            )


DISPATCH_STYLE = "ep_dispatch_experts"
"""The style of experts in transformers' plans (`ep_plan`) whose tokens are sent to the ranks that have them."""
EXPERT_TYPES = (
    *("qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2"),
)
"""Types whose training with `cluster.mesh.expert` was compared with one process."""


def refuse_undivided_experts(config: Any, ranks: int) -> None:
    """Raise ConfigError if the experts of a model with this configuration cannot be divided among so many ranks."""
    text = config.get_text_config()
    model = f"the model {getattr(config, 'name_or_path', '')}".strip()
    if text.model_type not in EXPERT_TYPES:
        raise ConfigError(
            f"cluster.mesh.expert={ranks}: {model} has the type {text.model_type}, whose experts are not divided so; types that "
            f"are: {', '.join(EXPERT_TYPES)}"
        )
    experts = _number_of_experts(text)
    assert experts is not None
    if experts % ranks:
        raise ConfigError(
            f"cluster.mesh.expert={ranks}: {model} has {experts} experts, which {ranks} ranks cannot divide; use a divisor of "
            f"{experts}"
        )


def _number_of_experts(text: Any) -> int | None:
    """The experts of a layer, under the name that the architecture uses; None if there are none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((size for name in names if (size := getattr(text, name, None))), None)


def refuse_uncut(config: Any, ranks: int) -> None:
    """Raise ConfigError if ranks with parts of the tokens cannot compute a model with this configuration (of transformers)."""
    reason = None
    if moving := _rotary_types(config.get_text_config()) - set(STATIC_ROPE):
        # each rank would see another length, and choose other frequencies
        reason = (
            f"rotary embeddings of the type {', '.join(sorted(moving))}, which depend on the length of the whole row"
        )
    if images_see_themselves(config):
        reason = "images, whose tokens attend to later tokens of the same image"
    if reason is not None:
        model = f"the model {getattr(config, 'name_or_path', '')}".strip()
        raise ConfigError(
            f"cluster.mesh.context={ranks}: {model} ({config.model_type}) has {reason}: it cannot be computed in parts. Use "
            f"cluster.mesh.shard instead, and model.gradient_checkpointing for long conversations"
        )


def images_see_themselves(config: Any) -> bool:
    """Whether the tokens of an image attend to each other in both directions, as in Gemma: such a model asks for the types of
    tokens to make its masks, and not only to compute positions."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    if getattr(config, "vision_config", None) is None or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    of_config: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    arguments = inspect.signature(of_config.forward).parameters
    for_positions = hasattr(MODEL_MAPPING.get(type(config), None), "get_rope_index")
    return "token_type_ids" in arguments or ("mm_token_type_ids" in arguments and not for_positions)


STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Types of rotary embeddings that do not depend on the length of the sequence."""


def _rotary_types(text: Any) -> set[str]:
    """The types of the rotary embeddings of all layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(one for one in parameters.values() if isinstance(one, Mapping))]
    return {kind["rope_type"] for kind in kinds if "rope_type" in kind}


# Rounding


def rounding_of_logprobs(largest_logit: float) -> float:
    """The largest difference of two log-probabilities of a token that rounding in bfloat16 explains, for logits of this size.

    bfloat16 rounds a number to 2^-8 of it at most. A log-probability is the difference of two such numbers, the logit of the
    token and (nearly) the largest logit, and two log-probabilities are compared, such as those of an engine and of the trainer.
    Example: 0.56 for logits up to 36.
    """
    return 4 * 2**-8 * largest_logit


def rounding_of_ratios(largest_logit: float) -> float:
    """The same for a probability ratio: the largest `|ratio - 1|`. Example: 0.75 for logits up to 36."""
    return math.expm1(min(rounding_of_logprobs(largest_logit), 20.0))


# KV cache: bytes of a token, and its size on a CPU

_CPU_MEMORY_GB = 1.0
_SPARE_TOKENS = 512
"""Tokens besides one sequence that the smallest KV cache holds: vLLM divides it into blocks, and uses some of them itself."""


def kv_token_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """The bytes of a token in the KV cache of the model with this config.json. `dtype` is a name of torch's."""
    text = config.get("text_config") or config
    heads = text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // heads
    return (
        2
        * text["num_hidden_layers"]
        * (text.get("num_key_value_heads") or heads)
        * width
        * (4 if dtype == "float32" else 2)
    )


def key_widths(text_config: Any) -> list[int]:
    """The numbers of a token's keys in each layer of a loaded model's text part; it has as many values. Layers may have different
    sizes, as in Gemma 4, whose own configuration refuses to be asked for one."""
    if getattr(text_config, "is_heterogeneous", False):
        return [_key_width(layer) for layer in text_config.per_layer_config]
    return [_key_width(text_config)] * text_config.num_hidden_layers


def _key_width(layer: Any) -> int:
    heads = layer.num_attention_heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return (getattr(layer, "num_key_value_heads", None) or heads) * size


def kv_heads(config: Mapping[str, Any]) -> int:
    """The heads of keys and values of a layer of the model with this config.json."""
    text = config.get("text_config") or config
    return text.get("num_key_value_heads") or text["num_attention_heads"]


def cpu_memory_gb(config: Mapping[str, Any], dtype: str, context: int) -> float:
    """The KV cache in GB of a server on the CPU, unless the recipe gives its size: at least one sequence of `context` tokens must
    fit into it. vLLM itself would take nine tenths of the machine's memory, and SGLang a fifth."""
    return max(_CPU_MEMORY_GB, (context + _SPARE_TOKENS) * kv_token_bytes(config, dtype) / 2**30)
