"""The value head of a critic: its file, and the parameters that the critic's optimizer changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.training.value_forward import body_of

__all__ = ["HEAD_FILE", "load_head", "save_head", "trained_parameters"]

HEAD_FILE = "value_head.safetensors"
"""The file with the value head, in the directory of a saved critic."""


def trained_parameters(model: Any, head: torch.nn.Linear) -> dict[str, torch.nn.Parameter]:
    """The parameters of a critic that its optimizer changes, by their names: those of the model's body, and the value head's."""
    body = {
        f"body.{name}": parameter for name, parameter in body_of(model).named_parameters() if parameter.requires_grad
    }
    return {**body, **{f"head.{name}": parameter for name, parameter in head.named_parameters()}}


def save_head(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the weights of a value head into the directory of a critic."""
    save_file({name: tensor.detach().cpu() for name, tensor in weights.items()}, folder / HEAD_FILE)


def load_head(head: torch.nn.Linear, folder: Path) -> None:
    """Load a saved value head. Raises ConfigError if the file cannot be read, or has weights of another shape."""
    file = folder / HEAD_FILE
    try:
        with boundary("model"):
            saved = load_file(file)
    except Failed as failed:
        raise ConfigError(f"the value head {file} cannot be read: {failed.failure.message}") from failed
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    own = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if shapes != own:
        raise ConfigError(f"the value head {file} has weights of the shapes {shapes}; the model needs {own}")
    head.load_state_dict(saved)
