"""The reference model, and local teachers: policies that are not trained, and that score the tokens of the trained model.

Such a model is the model before training, another model with the same vocabulary, or, with an adapter, the trained model without
its adapter. The weights of a reference model may be mixed with those of the policy. Knows models and their forward pass. Does not
know the estimators of the divergence, or which loss uses them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from turnwise.errors import ConfigError
from turnwise.models.loading import of_model
from turnwise.models.lora import has_adapter, without_adapter
from turnwise.training.batch import MicroBatch
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.types import Sampling

__all__ = ["Reference", "reference_model"]


class Reference:
    """A reference model, or a teacher, for the trained model `policy`, and its forward pass.

    `model` is the reference model; None: the model before training. With an adapter, that is the model without the adapter, on
    the same weights, or with `separate` a copy of these weights. `shares` is whether batches are packed as prefix trees.
    `autocast` is that of the learner. `option` is the place in the recipe that named the model. With `padded`, the model may have
    another number of embeddings than the policy: where tokenizers are equal, they differ in rows that no token has.

    Raises ConfigError if `model` has another vocabulary, or cannot compute prefix trees where batches are packed for them.
    """

    def __init__(
        self,
        policy: Any,
        sampling: Sampling,
        *,
        shares: bool,
        model: Any | None = None,
        separate: bool = False,
        autocast: bool = False,
        option: str = "reference.path",
        padded: bool = False,
    ) -> None:
        self._model = reference_model(policy, model, shares=shares, separate=separate, option=option, padded=padded)
        self._forward = Forward(self._model, sampling, autocast=autocast)
        self._vocabulary = vocabulary_of(policy)
        self._mixed = False

    @property
    def model(self) -> Any:
        """The frozen model."""
        return self._model

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch[Any]) -> torch.Tensor:
        """Log-probabilities [N] of the targets of a micro-batch."""
        return self._forward.logprobs(micro)[0]

    def scores(self, micro: MicroBatch[Any], top_k: int) -> torch.Tensor:
        """See `Forward.scores`."""
        return self._forward.scores(micro, top_k, vocabulary=self._vocabulary)

    def distributions(self, micro: MicroBatch[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Forward.distributions`."""
        return self._forward.distributions(micro)

    def fingerprint(self) -> str:
        """SHA-256 of the weights."""
        return of_model(self._model)

    @torch.no_grad()
    def mix(self, policy: Any, share: float) -> None:
        """Replace the weights by `share` times those of the policy plus `1 - share` times the present ones."""
        trained = dict(policy.named_parameters())
        for name, parameter in self._model.named_parameters():
            parameter.lerp_(trained[name].detach().to(parameter.device, parameter.dtype), share)
        self._mixed = True

    def state(self) -> dict[str, torch.Tensor]:
        """The weights, if they are no longer those that the reference model began with; else nothing."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()} if self._mixed else {}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Resume from what `state` returned."""
        for name, parameter in self._model.named_parameters():
            if name in state:
                parameter.copy_(state[name])
        self._mixed = bool(state)


def vocabulary_of(model: Any) -> int:
    """The number of embeddings of a model."""
    return model.get_input_embeddings().num_embeddings


def reference_model(
    policy: Any,
    model: Any | None,
    *,
    shares: bool,
    separate: bool,
    option: str = "reference.path",
    padded: bool = False,
) -> Any:
    """The frozen model of a reference. The arguments, and what is raised, are those of `Reference`."""
    if model is not None and not padded:
        _refuse_other_vocabulary(policy, model)
    frozen: Any = _before_training(policy, separate=separate) if model is None else model
    frozen.requires_grad_(False)
    # batches are packed for the attention that the trained model has now; a copy has the same attention
    if model is not None and shares and not try_tree_attention(frozen):
        raise ConfigError(
            f"the model of {option} ({type(frozen).__name__}) cannot compute shared prefixes, and the trained model can: "
            f"set train.share_prompts=never, or use another {option}"
        )
    return frozen


def _before_training(policy: Any, *, separate: bool) -> Any:
    """The trained model before its first optimizer step."""
    if not has_adapter(policy):
        return copy.deepcopy(policy)
    base = without_adapter(policy)
    return copy.deepcopy(base) if separate else base


def _refuse_other_vocabulary(policy: Any, reference: Any) -> None:
    sizes = [vocabulary_of(model) for model in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the reference model has an embedding of {sizes[1]} tokens and the trained model of {sizes[0]}: reference.path must "
            f"be a model with the same vocabulary as model.path"
        )
