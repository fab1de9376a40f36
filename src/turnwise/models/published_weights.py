"""A model's weights in the form in which other programs load them, and the log-probabilities with which they are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from turnwise.models.lora import adapter_weights, has_adapter

__all__ = ["largest_logit", "published_weights", "token_logprobs"]


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
    """The largest absolute logit behind each of the tokens. `device` as in `token_logprobs`."""
    ids_1L = torch.tensor([list(token_ids)], device=device or model.device)
    return float(model(input_ids=ids_1L, use_cache=False).logits.abs().amax())


def token_logprobs(model: Any, token_ids: Sequence[int], *, device: torch.device | None = None) -> list[float]:
    """`log_softmax(logits)` of each of the tokens after the first, in float32. `device` is that of the pass, if it is not that
    of the model's parameters."""
    ids_1L = torch.tensor([list(token_ids)], device=device or model.device)
    logits_LV = model(input_ids=ids_1L, use_cache=False).logits[0, :-1].float()
    return logits_LV.log_softmax(-1).gather(-1, ids_1L[0, 1:, None])[:, 0].tolist()
