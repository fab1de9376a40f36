"""The section of a recipe about frozen policies: models that take the turns of agents, and that are never trained.

A policy is a local model or a model on an OpenAI-compatible server. A section checks only its own values; combinations with
other sections are the subject of `config/policy_checks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.options.section import NonEmpty, NotNegative, PathText, Section

__all__ = ["FrozenPolicySection", "expand_policies"]


class FrozenPolicySection(Section):
    """A frozen policy: `current_episode().agent(..., policy=NAME)` opens an agent that it plays (docs/agents_in_episodes.md)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
    """Its name, which environments give to `agent`."""
    path: PathText | None = None
    """Model directory, checkpoint, adapter or hub name. With `model.lora` and the embedded engine, `model.path` itself takes
    no further memory. Null: on a server, or the reference model."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of its parameters. Null: `model.dtype`."""
    bits: Literal[4] | None = None
    """4: quantize it when it is loaded. Null: do not, unless it shares the trained model's weights (`model.quantization`)."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Most memory of its KV cache, in GiB. Null: 2."""
    endpoint: dict[NonEmpty, Any] | None = None
    """An OpenAI-compatible server: arguments of `turnwise.services.chat:ChatEndpoint`, such as `{url: "http://host:8000/v1",
    model: NAME}`. Null: in this process."""
    reference: bool = False
    """It is the reference model (section `reference`): the model before training, or with `reference.sync_every` and
    `reference.sync_weight: 1` an earlier state."""
    temperature: NotNegative | None = None
    """Of its turns. Null: `sampling.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of its turns. Null: `sampling.top_p`."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Of its turns. Null: `sampling.top_k`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of its turns. Null: `sampling.min_p`."""

    @property
    def sampling(self) -> dict[str, float]:
        """The options of sampling that are the policy's own."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return {name: value for name, value in own.items() if value is not None}

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        places = [name for name, given in (("path", self.path), ("endpoint", self.endpoint)) if given is not None] + [
            "reference"
        ] * self.reference
        of_path = next((name for name in ("dtype", "bits") if getattr(self, name) is not None), None)
        problem = None
        if len(places) > 1:
            problem = f"{places[0]} and {places[1]} are two policies: remove one, or write two policies"
        elif not places:
            problem = "a policy needs path (a local model), endpoint (a server) or reference=true (the reference model)"
        elif self.path is None and of_path is not None:
            problem = f"{of_path} has no effect without path: set path, or remove {of_path}"
        elif self.endpoint is not None and self.memory_gb is not None:
            problem = "memory_gb has no effect on a policy on a server: remove it"
        elif self.endpoint is not None and (self.top_k or self.min_p):
            problem = (
                f"{'top_k' if self.top_k else 'min_p'} is not in the OpenAI protocol: write it into endpoint.request, if the "
                f"server knows it"
            )
        if problem is not None:
            raise PydanticCustomError("policy", "{message}", {"message": problem})
        return self


def expand_policies(value: Any) -> Any:
    """The list that a mapping is short for: `{opponent: runs/first/checkpoint}` becomes
    `[{name: opponent, path: runs/first/checkpoint}]`."""
    if not isinstance(value, Mapping):
        return value
    entries = {name: {"path": entry} if isinstance(entry, str) else entry for name, entry in value.items()}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping):
            message = (
                f"the policy {name!r} is {entry!r:.80}: write {{path: DIR}} or {{endpoint: {{url: ..., model: ...}}}}"
            )
            raise PydanticCustomError("policies", "{message}", {"message": message})
    return [{"name": name, **entry} for name, entry in entries.items()]
