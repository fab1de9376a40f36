"""The sections of a recipe that say how the model generates: engine, sampling, limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turnwise.config.section import NonEmpty, NotNegative, Positive, Seconds, Section

__all__ = [
    "EvaluationSamplingSection",
    "LimitsSection",
    "LocalEngineSection",
    "SamplingSection",
    "ScriptedEngineSection",
]


class LocalEngineSection(Section):
    """The embedded engine: it samples in the trainer's process, on the trainer's own weights."""

    name: Literal["local"] = "local"
    slots: Positive = 256
    """The most conversations whose KV cache is kept. If there are more, the least recently used cache is dropped."""
    memory_gb: Annotated[float, Field(gt=0)] = 2.0
    """The most memory that the KV cache may use, in GB."""
    threads: Annotated[int, Field(ge=0)] = 0
    """The number of torch threads while sampling. 0: the run measures which number is fastest."""


class ScriptedEngineSection(Section):
    """The scripted engine: it answers with given texts, and needs no model weights. Use it to replay conversations."""

    name: Literal["scripted"]
    script: NonEmpty
    """A jsonl file with the texts. Each line is for one conversation, in the order of the rows: a list of assistant texts."""


class SamplingSection(Section):
    """How tokens are sampled."""

    temperature: NotNegative = 1.0
    """The sampling temperature. 1 samples from the model's own distribution; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: only the most likely tokens, up to this total probability, can be sampled. 1: no such filter."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Only this number of the most likely tokens can be sampled. 0: no such filter."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Only tokens with at least this share of the most likely token's probability can be sampled. 0: no such filter."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a turn, in addition to the stop tokens of the chat template."""


class EvaluationSamplingSection(Section):
    """How tokens are sampled in evaluations. Null: the value of the same option in `sampling`."""

    temperature: NotNegative | None = None
    """The sampling temperature in evaluations; 0 takes the most likely token. Null: `sampling.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling in evaluations: only the most likely tokens, up to this total probability, can be sampled. Null:
    `sampling.top_p`."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """In evaluations, only this number of the most likely tokens can be sampled; 0: all tokens. Null: `sampling.top_k`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """In evaluations, only tokens with at least this share of the most likely token's probability can be sampled. Null:
    `sampling.min_p`."""


class LimitsSection(Section):
    """How long a conversation may be."""

    turns: Positive = 8
    """The most turns of the model in a conversation."""
    tokens_per_turn: Positive = 256
    """The most tokens that the model samples in one turn; a longer answer is cut and ends the conversation."""
    tokens: Positive | None = None
    """The most tokens that the model samples in a conversation, all turns together. Null: no limit."""
    response_tokens: Positive | None = None
    """The most tokens after the first prompt: the tokens that the model samples, and the tokens of tools and users between the
    turns. Null: no limit."""
    context: Positive | None = None
    """The most tokens of a conversation, its prompt included. Null: the longest context of the model."""
    seconds_per_turn: Seconds | None = 120.0
    """The time limit of one turn, in seconds, for sampling the turn and for the environment's reply together. Null: no limit."""
    seconds: Seconds | None = 600.0
    """The time limit of a conversation, in seconds. Null: no limit."""
