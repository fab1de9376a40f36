"""The section of a recipe about policies: models that take the turns of agents in the place of the trained model.

A frozen policy is a local model or a model on an OpenAI-compatible server. A trained policy is an adapter of its own on the
trained model's base weights. A section checks only its own values; combinations with other sections are the subject of
`config/policy_checks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.options.algorithm import ESTIMATORS, LOSSES, CreditSection, LoraSection, LossSection
from turnwise.options.section import NonEmpty, NotNegative, OneOf, PathText, Section, named

__all__ = ["PolicySection", "expand_policies"]


class PolicySection(Section):
    """A policy: `current_episode().agent(..., policy=NAME)` opens an agent that it plays (docs/agents_in_episodes.md)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
    """Its name, which environments give to `agent`."""
    train: bool = False
    """Train an adapter of its own on its agents' conversations. False: frozen, with `path`, `endpoint` or `reference`."""
    lora: LoraSection | None = None
    """Adapter of a trained policy. Null: the options of `model.lora`."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of a trained policy. Null: `train.lr`."""
    loss: Annotated[LossSection, OneOf(LOSSES, default="ppo_clip")] | None = None
    """Loss of a trained policy. Null: `loss`."""
    credit: Annotated[CreditSection, OneOf(ESTIMATORS, default="auto")] | None = None
    """Its credit. Null: `credit`."""
    path: PathText | None = None
    """Model directory, checkpoint, adapter or hub name. Null: a server, or the reference model."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of its parameters. Null: `model.dtype`."""
    bits: Literal[4] | None = None
    """4: quantize it when it is loaded."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """An embedded engine of its own, with a KV cache of so many GiB. Null: the model's engine, if both have the same base
    weights (on servers: if it is trained); else 2."""
    endpoint: dict[NonEmpty, Any] | None = None
    """An OpenAI-compatible server: `{url: "http://host:8000/v1", model: NAME}`, or more arguments of `ChatEndpoint`."""
    reference: bool = False
    """It is the reference model (section `reference`)."""
    temperature: NotNegative | None = None
    """Of its turns. Null: as `sampling`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of its turns. Null: as `sampling`."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Of its turns. Null: as `sampling`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of its turns. Null: as `sampling`."""

    @property
    def sampling(self) -> dict[str, float]:
        """The options of sampling that are the policy's own."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return {name: value for name, value in own.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _expand_names(cls, value: Any) -> Any:
        """`loss: gspo` is short for `loss: {name: gspo}`, as in a recipe."""
        if not isinstance(value, Mapping):
            return value
        return {**value, **{key: named(value[key]) for key in ("loss", "credit") if value.get(key) is not None}}

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        problem = self._problem_of_trained() if self.train else self._problem_of_frozen()
        if problem is not None:
            raise PydanticCustomError("policy", "{message}", {"message": problem})
        return self

    def _problem_of_trained(self) -> str | None:
        """What a trained policy cannot have."""
        frozen = [name for name in ("path", "dtype", "bits", "endpoint") if getattr(self, name) is not None]
        frozen += ["reference"] * self.reference
        if frozen:
            return (
                f"{frozen[0]} is an option of frozen policies, and train=true makes this policy an adapter on the model of "
                f"model.path: remove one of them"
            )
        if self.lora is not None and self.lora.rank is None:
            return (
                "lora needs rank: a trained policy is an adapter. Set lora.rank, or remove lora for that of model.lora"
            )
        if self.temperature == 0:
            return "temperature=0 makes all conversations of a row identical: set a temperature above 0"
        return None

    def _problem_of_frozen(self) -> str | None:
        """What a frozen policy lacks, or cannot have."""
        of_trained = next((name for name in ("lora", "lr", "loss", "credit") if getattr(self, name) is not None), None)
        places = [name for name, given in (("path", self.path), ("endpoint", self.endpoint)) if given is not None] + [
            "reference"
        ] * self.reference
        of_path = next((name for name in ("dtype", "bits") if getattr(self, name) is not None), None)
        if of_trained is not None:
            return f"{of_trained} has no effect on a frozen policy: set train=true, or remove {of_trained}"
        if len(places) > 1:
            return f"{places[0]} and {places[1]} are two policies: remove one, or write two policies"
        if not places:
            return (
                "a policy needs path (a local model), endpoint (a server) or reference=true (the reference model); with "
                "train=true, it is a trained adapter"
            )
        if self.path is None and of_path is not None:
            return f"{of_path} has no effect without path: set path, or remove {of_path}"
        if self.endpoint is not None and self.memory_gb is not None:
            return "memory_gb has no effect on a policy on a server: remove it"
        if self.endpoint is not None and (self.top_k or self.min_p):
            return (
                f"{'top_k' if self.top_k else 'min_p'} is not in the OpenAI protocol: write it into endpoint.request, if the "
                f"server knows it"
            )
        return None


def expand_policies(value: Any) -> Any:
    """The list that a mapping is short for: `{opponent: runs/first/checkpoint}` becomes
    `[{name: opponent, path: runs/first/checkpoint}]`."""
    if not isinstance(value, Mapping):
        return value
    entries = {name: {"path": entry} if isinstance(entry, str) else entry for name, entry in value.items()}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping):
            message = (
                f"the policy {name!r} is {entry!r:.80}: write {{path: DIR}}, {{endpoint: {{url: ..., model: ...}}}} or "
                f"{{train: true}}"
            )
            raise PydanticCustomError("policies", "{message}", {"message": message})
    return [{"name": name, **entry} for name, entry in entries.items()]
