"""Checkpoints of a sharded learner: each rank writes its own part, with torch.distributed.checkpoint.

The files hold the weights that are trained, the state of the optimizer and a changed reference model. Any number of ranks can
load them. `load_complete` and `complete_state` convert from and to the state of a learner in one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from turnwise.training.optimizer import Optimizer
from turnwise.training.sharded.critic_shard import CriticShard
from turnwise.training.sharded.model_shard import ModelShard
from turnwise.training.sharded.sharded_model import like

__all__ = ["complete_state", "load", "load_complete", "save"]

Shard = ModelShard | CriticShard

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(shard: Shard, folder: Path) -> None:
    """Write the state of all ranks into `folder`. Raises OSError or RuntimeError if it cannot be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        dcp_save.save(_tensors(shard), storage_writer=FileSystemWriter(folder, thread_count=1))


def load(shard: Shard, folder: Path) -> None:
    """Load the state of all ranks from `folder`, in place."""
    reader = FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    if shard.reference is not None and shard.reference.model is not None:
        shard.reference.mixed = any(name.startswith("reference/") for name in saved)
    tensors = _tensors(shard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        dcp_load.load(tensors, storage_reader=reader)
    _load_optimizer(shard.optimizer, list(shard.parameters), tensors)


def load_complete(shard: Shard, state: Mapping[str, Any]) -> None:
    """Load the state of a learner in one process (`Learner.state`)."""
    names = list(shard.parameters)
    tensors: dict[str, Any] = {"steps": torch.tensor(state["steps"])}
    for index, name in enumerate(names):
        parameter, of_parameter = shard.parameters[name], state["optimizer"]["state"].get(index, {})
        for moment in _MOMENTS:
            if moment in of_parameter:
                tensors[f"optimizer/{name}/{moment}"] = like(of_parameter[moment], parameter)
        tensors[f"optimizer/{name}/step"] = of_parameter.get("step", torch.zeros(()))
        if state["masters"]:
            tensors[f"master/{name}"] = like(state["masters"][index], parameter)
    _load_optimizer(shard.optimizer, names, tensors)
    if state.get("reference") and shard.reference is not None and shard.reference.model is not None:
        shard.reference.mixed = True
        with torch.no_grad():
            for name, parameter in shard.reference.model.model.named_parameters():
                parameter.copy_(like(state["reference"][name], parameter))


def complete_state(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The state of a learner in one process (`Learner.state`) from the files of any number of ranks.

    `names` are those of the trained parameters, in their order.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        for name, entry in metadata.items()
        if not name.startswith("model/")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp_load.load(tensors, storage_reader=reader, no_dist=True)
    state = {
        index: {key: tensors[f"optimizer/{name}/{key}"] for key in ("step", *_MOMENTS)}
        for index, name in enumerate(names)
    }
    masters = [tensors[f"master/{name}"] for name in names if f"master/{name}" in tensors]
    prefix = "reference/"
    return {
        "optimizer": {"state": state, "param_groups": [{"params": list(range(len(names)))}]},
        "masters": masters,
        "errors": [],
        "steps": int(tensors["steps"]),
        "reference": {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
    }


def _tensors(shard: Shard) -> dict[str, torch.Tensor]:
    """The state of this rank by names. Where the optimizer has none yet, zeros, which is its state before the first step."""
    optimizer = shard.optimizer
    tensors: dict[str, torch.Tensor] = {"steps": torch.tensor(optimizer.steps)}
    present = optimizer.state()["optimizer"]["state"]
    for index, (name, master) in enumerate(zip(shard.parameters, optimizer.masters, strict=True)):
        of_parameter = present.get(index, {})
        tensors[f"model/{name}"] = shard.parameters[name].detach()
        tensors[f"optimizer/{name}/step"] = of_parameter.get("step", torch.zeros(()))
        for moment in _MOMENTS:
            tensors[f"optimizer/{name}/{moment}"] = of_parameter.get(moment, torch.zeros_like(master.detach()))
        if master is not shard.parameters[name]:
            tensors[f"master/{name}"] = master.detach()
    reference = shard.reference
    if reference is not None and reference.model is not None and reference.mixed:
        for name, parameter in reference.model.model.named_parameters():
            tensors[f"reference/{name}"] = parameter.detach()
    return tensors


def _load_optimizer(optimizer: Optimizer, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the optimizer its state. Weights and master weights in `tensors` may be its own tensors."""
    state = {
        index: {
            key: tensors[f"optimizer/{name}/{key}"]
            for key in ("step", *_MOMENTS)
            if f"optimizer/{name}/{key}" in tensors
        }
        for index, name in enumerate(names)
    }
    optimizer.load_state(
        {
            "optimizer": {
                "state": {index: of_parameter for index, of_parameter in state.items() if _MOMENTS[0] in of_parameter},
                "param_groups": [{"params": list(range(len(names)))}],
            },
            "masters": [tensors[f"master/{name}"] for name in names if f"master/{name}" in tensors],
            "steps": int(tensors["steps"]),
        }
    )
