"""The base class of the parts of a recipe, and the parts that depend on no other part.

`Part` is the base class. `config` holds the other parts, the whole recipe and the checks of combinations.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

__all__ = [
    "Beta",
    "Evaluation",
    "EvaluationSampling",
    "Limits",
    "NonEmpty",
    "NotNegative",
    "Part",
    "Positive",
    "Sampling",
    "Sft",
    "changed",
]


def _not_empty(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty", "it must not be empty")
    return text


Positive = Annotated[int, Field(gt=0)]
NonEmpty = Annotated[str, AfterValidator(_not_empty)]
Beta = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of Adam's averages."""
NotNegative = Annotated[float, Field(ge=0)]


class Part(BaseModel):
    """A part of the recipe: frozen, and strict about its keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def changed(part: Part) -> set[str]:
    """Options that differ from their defaults: a resolved recipe, which names them all, must stay valid."""
    return {name for name, field in type(part).model_fields.items() if getattr(part, name) != field.default}


class Sampling(Part):
    """How tokens are drawn."""

    temperature: NotNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a turn."""


class Limits(Part):
    """How long a conversation may be; null is no bound."""

    turns: Positive = 8
    tokens_per_turn: Positive = 256
    tokens: Positive | None = None
    """Sampled in the whole conversation."""
    response_tokens: Positive | None = None
    """All tokens after the first prompt: answers, and what tools and users say between them."""
    context: Positive | None = None
    """All tokens; the model's own bound if null."""
    seconds_per_turn: Annotated[float, Field(gt=0)] | None = 120.0
    seconds: Annotated[float, Field(gt=0)] | None = 600.0


class EvaluationSampling(Part):
    """How tokens are drawn in evaluations; null is the value of `sampling`."""

    temperature: NotNegative | None = None
    """0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None


class Evaluation(Part):
    """Conversations on held-out rows."""

    max_rows: Positive | None = None
    """Only the first ones."""
    samples_per_row: Positive = 1
    """Conversations for each row."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates before and after training."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How tokens are drawn; what is null is as in training: `eval.sampling.temperature=0` is greedy."""


class Sft(Part):
    """What `turnwise sft` does: fine-tuning on the conversations of `data.train` (docs/sft.md)."""

    steps: Positive | None = None
    """Optimizer steps; null takes as many as `sft.epochs` need."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the rows, where `sft.steps` is null."""
    batch_size: Positive = 16
    """Conversations of each step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: NotNegative = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    loss_average: Literal["token", "sequence"] = "token"
    """Whether all tokens of a batch weigh the same, or all conversations do."""
    micro_batch_tokens: Positive | None = None
    """Tokens of one forward pass: memory against speed, never the result. Null takes 2048 on a CPU and 16384 elsewhere."""
    too_long: Literal["leave_out", "cut"] = "leave_out"
    """What becomes of a conversation with more tokens than `limits.context`: it is left out and counted, or learnt from up to
    there."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between held-out losses; 0 takes them before and after training."""
    max_eval_rows: Positive | None = None
    """Only the first held-out rows."""
    max_recorded_rows: Annotated[int, Field(ge=0)] = 32
    """Conversations in trajectories.jsonl, token by token: the first ones that are learnt from."""
