"""The sections of a recipe that say how the model generates: engine, sampling, limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from turnwise.config.section import NonEmpty, NotNegative, Positive, Seconds, Section

__all__ = [
    "EvaluationSamplingSection",
    "LimitsSection",
    "LocalEngineSection",
    "OpenAIEngineSection",
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


class OpenAIEngineSection(Section):
    """An OpenAI-compatible endpoint, for `turnwise eval` and `turnwise rollout`: messages are sent and a message comes back. It
    reports no token ids and no log-probabilities, so nothing can be trained with it."""

    name: Literal["openai"]
    url: NonEmpty
    """The base URL of the OpenAI-compatible endpoint, such as `http://127.0.0.1:8000/v1`."""
    model: NonEmpty | None = None
    """The name of the model at the endpoint. Null: the value of `model.path`."""
    api_key_env: NonEmpty | None = None
    """The name of the environment variable that contains the API key of the endpoint. Null: no key is sent."""
    request: dict[str, Any] = {}
    """Further fields of each request to the endpoint, such as `{top_k: 20}`. A field that turnwise sends too is replaced; the
    value null removes the field (`{seed: null}`)."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name of the request field that limits the tokens of a turn. OpenAI's reasoning models need `max_completion_tokens`."""
    timeout: Seconds = 120.0
    """The time limit of each request to the endpoint, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 8
    """The number of further attempts of a request to the endpoint if there is no connection, no answer in time, or an answer with
    status 429 or 5xx. The first pause is one second and doubles with each attempt, up to a minute. If the endpoint sends
    `Retry-After`, all requests wait for that time instead."""
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    """The largest number of requests to the endpoint in a minute. Null: no limit."""
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None
    """The largest number of tokens in a minute, in prompts and answers together. Null: no limit."""


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
    """The time limit of one turn, in seconds, for sampling the turn and for the environment's reply together. Weight updates and
    restarts of an engine's server do not count. Null: no limit."""
    seconds: Seconds | None = 600.0
    """The time limit of a conversation, in seconds. Null: no limit."""
