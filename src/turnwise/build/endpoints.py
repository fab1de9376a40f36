"""Builds the context of conversations with an OpenAI-compatible endpoint, and refuses options that need tokens."""

from __future__ import annotations

from turnwise.build.environments import Environments
from turnwise.build.values import limits
from turnwise.config.schema import Config, OpenAIEngineSection
from turnwise.errors import ConfigError
from turnwise.rewards.judge import UsesEngine
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import TextContext
from turnwise.services.chat_endpoint import ChatEndpoint, EndpointOptions
from turnwise.types import Sampling

__all__ = ["endpoint_notes", "refuse_for_endpoint", "text_context"]

_OF_TEMPLATES = ("thinking", "tool_format", "tokenization_sanity_check")


def text_context(
    config: Config, options: OpenAIEngineSection, environments: Environments, sampling: Sampling
) -> TextContext:
    """The shared context of the recipe's conversations with the endpoint `options`.

    Raises ConfigError if an option is invalid, or the environment variable of the key is not set.
    """
    endpoint = EndpointOptions(
        url=options.url,
        model=options.model or config.model.path,
        api_key_env=options.api_key_env,
        request=options.request,
        timeout=options.timeout,
        retries=options.retries,
        max_concurrent=config.max_concurrent,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
    )
    return TextContext(
        chat=ChatEndpoint(endpoint),
        max_tokens_field=options.max_tokens_field,
        chat_template_kwargs=config.model.chat_template_kwargs,
        make_environment=environments,
        sampling=sampling,
        limits=limits(config, longest=None),
        max_concurrent=config.max_concurrent,
    )


def refuse_for_endpoint(config: Config, scorer: Scorer, sampling: Sampling) -> None:
    """Refuse options that an endpoint cannot follow, because they need tokens or are not in the OpenAI protocol.

    Raises ConfigError.
    """
    uses_engine = [
        reward.name
        for reward in scorer.functions
        if isinstance(reward.function, UsesEngine) and reward.function.wants_engine
    ]
    calls = config.tool_calls
    problems = [
        (
            sampling.top_k > 0,
            f"top_k={sampling.top_k} is not in the OpenAI protocol: set eval.sampling.top_k=0 or sampling.top_k=0; if the server "
            f"knows the field, set engine.request={{top_k: {sampling.top_k}}}",
        ),
        (
            sampling.min_p > 0,
            f"min_p={sampling.min_p:g} is not in the OpenAI protocol: set eval.sampling.min_p=0 or sampling.min_p=0; if the "
            f"server knows the field, set engine.request={{min_p: {sampling.min_p:g}}}",
        ),
        (
            config.deterministic,
            "deterministic=true cannot be combined with engine.name=openai, because an endpoint gives no such guarantee: remove "
            "one of them",
        ),
        (
            config.data.max_prompt_tokens is not None,
            "data.max_prompt_tokens needs the model's tokenizer, which engine.name=openai does not have: remove it",
        ),
        (
            config.data.return_multi_modal_inputs is not None,
            "data.return_multi_modal_inputs has no effect with engine.name=openai, which gets text only: remove it",
        ),
        (
            calls.max_tool_response_length is not None and calls.tool_response_unit == "tokens",
            "tool_calls.tool_response_unit=tokens needs the model's tokenizer, which engine.name=openai does not have: use "
            "characters",
        ),
        (
            calls.describe != "template",
            f"tool_calls.describe={calls.describe} has no effect with engine.name=openai, whose server renders the prompt: "
            f"remove it",
        ),
        (
            bool(uses_engine),
            f"the reward function {', '.join(uses_engine)} asks the engine of the run, and engine.name=openai is an endpoint: "
            f"give the judge this endpoint with its argument `endpoint`",
        ),
    ]
    for holds, message in problems:
        if holds:
            raise ConfigError(f"engine.name=openai: {message}")


def endpoint_notes(config: Config) -> list[str]:
    """A note on the options of the recipe that the endpoint's own chat template decides."""
    changed = [name for name in _OF_TEMPLATES if getattr(config, name) != Config.model_fields[name].default]
    if not changed:
        return []
    names = ", ".join(f"{name}={getattr(config, name)}" for name in changed)
    return [f"{names}: not used with an endpoint, whose server renders the messages and parses the answers"]
