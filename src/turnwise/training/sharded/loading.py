"""Loads a model that is divided among ranks: each rank keeps only its part of each layer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from turnwise.models.allocator import LARGE_MODEL, return_freed_blocks
from turnwise.models.loading import ModelOptions, load_model, use_complete_attention
from turnwise.models.lora import without_adapter
from turnwise.models.staged_loading import IncompleteWeights, StagedModel, open_staged
from turnwise.training.model_fingerprint import of_model, of_tensors
from turnwise.training.sharded.options import ShardingOptions
from turnwise.training.sharded.sharded_model import ShardedModel

__all__ = ["LoadedModel", "load_sharded"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is divided among the ranks."""

    sharded: ShardedModel
    base_fingerprint: str | None
    """SHA-256 of its weights without the adapter; None if it has no adapter, or if the fingerprint was not asked for."""


def load_sharded(
    options: ModelOptions,
    mesh: DeviceMesh,
    sharding: ShardingOptions,
    *,
    prepare: Callable[[Any], torch.nn.Module | None] = lambda model: None,
    fingerprint: bool = False,
) -> LoadedModel:
    """Load a model and divide it. Each rank reads the layers one after the other, and keeps its part of each.

    `prepare` receives the model before it is divided, perhaps without weights yet; it may freeze weights, and may return a layer
    beside the model (`head` of `ShardedModel`). `fingerprint` asks for the fingerprint of the weights without the adapter. The
    device of the options is not used: it is that of `mesh`.

    A model that cannot be read layer by layer is first loaded completely, into the CPU's memory of each rank. Raises ConfigError
    as `load_model`.
    """
    options = replace(options, device="cpu")
    fingerprint = fingerprint and options.lora is not None
    staged = open_staged(options)
    if staged is None or staged.model.num_parameters() > LARGE_MODEL:
        return_freed_blocks()  # buffers of gathered weights; gloo has them in the CPU's memory
    if staged is not None:
        try:
            return _layer_by_layer(staged, mesh, sharding, prepare, fingerprint=fingerprint)
        except IncompleteWeights:
            pass  # what is wrong with the weights is found and reported by `load_model`
    model = load_model(options)
    _log.warning("%s cannot be loaded layer by layer: each rank has loaded the complete model", options.path)
    base = of_model(without_adapter(model)) if fingerprint else None
    return LoadedModel(ShardedModel(model, mesh, sharding, head=prepare(model)), base)


def _layer_by_layer(
    staged: StagedModel,
    mesh: DeviceMesh,
    sharding: ShardingOptions,
    prepare: Callable[[Any], torch.nn.Module | None],
    *,
    fingerprint: bool,
) -> LoadedModel:
    lines: dict[str, str] = {}
    head = prepare(staged.model)

    def fill(part: Any) -> None:
        tensors = staged.fill(part)
        if fingerprint:
            lines.update(zip(tensors, of_tensors(tensors.items()), strict=True))

    sharded = ShardedModel(staged.model, mesh, sharding, fill=fill, head=head)
    staged.check()
    sharded.probe(lambda: use_complete_attention(staged.model))
    text = "\n".join(lines[name] for name in sorted(lines))
    return LoadedModel(sharded, hashlib.sha256(text.encode()).hexdigest() if fingerprint else None)
