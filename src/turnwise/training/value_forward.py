"""Values of states under a value model: the body of a transformers model, and a linear layer from hidden states to a number.

The value before a token is read where the policy's model predicts the token: at the token before it.
"""

from __future__ import annotations

from typing import Any

import torch

from turnwise.errors import ConfigError
from turnwise.models.autocast import autocast
from turnwise.training.model_inputs import ModelInputs
from turnwise.training.packing import MicroBatch

__all__ = ["ValueForward", "body_of", "new_value_head"]


class ValueForward:
    """Computes the values of the states of a micro-batch. `head` is a linear layer from hidden states [N, D] to [N, 1].

    With `autocast`, the matrix products of the body are computed in bfloat16. Those of the head are always float32.
    """

    def __init__(self, model: Any, head: torch.nn.Linear, *, autocast: bool = False) -> None:
        self._autocast = autocast
        self._body = body_of(model)
        self._head = head
        self._inputs = ModelInputs(model)

    def values(self, micro: MicroBatch[Any]) -> torch.Tensor:
        """The value [N] of each state, in float32."""
        with self._inputs.of(micro) as inputs:
            with autocast(micro.token_ids_BL.device, self._autocast):
                hidden_UD = self._body(**inputs)[0][micro.row_U, micro.column_U]
            value_U = self._head(hidden_UD.float()).squeeze(-1)
        return value_U[micro.prediction_N]


def body_of(model: Any) -> Any:
    """The part of a model that computes hidden states: the model without its output layer.

    Raises ConfigError if there is no such part.
    """
    body = getattr(model, "model", None) or model.base_model
    if body is model or not isinstance(body, torch.nn.Module):
        raise ConfigError(
            f"{type(model).__name__} cannot be a critic: its body has no name of its own (`model.model`). Set critic.path to a "
            f"model of another family"
        )
    return body


def new_value_head(model: Any) -> torch.nn.Linear:
    """A linear layer in float32 with all weights 0, so that a new critic estimates 0 for all states."""
    head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device, dtype=torch.float32)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head
