"""Gradient checkpointing: the backward pass computes the activations inside a layer again, instead of keeping them in memory.

transformers applies its own gradient checkpointing only to layers in training mode, in which layers also use dropout and drop
the key-value cache. The engine samples from the same model, possibly at the same time, so the mode of a layer cannot be changed
here. This module therefore wraps the layers' forward: it recomputes while gradients are recorded, and changes nothing
otherwise. Dropout stays off.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise.errors import ConfigError

__all__ = ["recompute_layers"]


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
