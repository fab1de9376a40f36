"""Builds the policies of a recipe, which take the turns of agents: local models with an engine each, and endpoints.

A frozen local policy is loaded as every model, or shares the weights of the trained model where an adapter is trained on them.
A trained policy is an adapter that its learner holds; without training, it is the adapter in the checkpoint. Policies on the
base weights of the trained model are in the batches of its embedded engine, and in training at its servers; all others have an
embedded engine of their own.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turnwise.assembly.conversations import constrained, stand_ins, tool_format
from turnwise.assembly.learners import frozen_copy, frozen_source, model_source
from turnwise.chat.constraints import Constrained
from turnwise.chat.renderer import Renderer
from turnwise.chat.template_arguments import reads_argument
from turnwise.chat.template_profile import TemplateProblem
from turnwise.config.policy_checks import refuse_unknown_reference, refuse_unusable_policies
from turnwise.engines.engine import Engine, TokenSampler
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.errors import ConfigError
from turnwise.local_paths import saved_policy
from turnwise.models.model_config import context_length
from turnwise.options.policies import PolicySection
from turnwise.options.schema import Config
from turnwise.rollout.context import AgentPolicy
from turnwise.services.chat import ChatEndpoint
from turnwise.training import fingerprint
from turnwise.types import Sampling

if TYPE_CHECKING:
    from turnwise.models.loading import ModelSource

__all__ = ["agent_policies", "policy_renderers", "policy_sources"]

_log = logging.getLogger(__name__)


def agent_policies(
    config: Config,
    renderer: Renderer | None,
    model: Any | None,
    *,
    reference: Any | None = None,
    trained: Mapping[str, Any] | None = None,
    version: int = 0,
    engine: TokenSampler | None = None,
) -> dict[str, AgentPolicy]:
    """The policies of a recipe by their names, with their models loaded.

    `renderer` is that of the trained model, and `model` the model that the embedded engine samples from, if there is one.
    `reference` is the reference model of a training run; without training, it is the model of `reference.path`. `trained` are
    the models of the trained policies in a training run, whose weights have the number `version`; without training, they are
    those of the checkpoint `model.path`, or its model if it has none. `engine` samples from `model`, and from policies with the
    same base weights. Raises ConfigError if a policy cannot be used, or its model not be loaded.
    """
    refuse_unusable_policies(config)
    if reference is None:
        refuse_unknown_reference(config)
    sources = policy_sources(config)
    sampled = stand_ins(config)
    made: dict[str, AgentPolicy] = {}
    for policy in config.policies:
        own = sampled[policy.name].sampling
        if policy.endpoint is not None:
            made[policy.name] = AgentPolicy(sampling=own, chat=_endpoint(policy, config))
            continue
        loaded = reference
        if policy.train:
            loaded = _checkpoint(policy, config, model) if trained is None else trained[policy.name]
        elif not policy.reference:
            loaded = _loaded(sources[policy.name], config, model)
        elif reference is None:
            assert config.reference.path is not None
            loaded = _loaded(model_source(config).of_base(config.reference.path), config, model)
        # frozen weights have no number
        number = version if policy.train else 0
        if trained is not None and policy in config.served_policies and isinstance(engine, RemoteEngine):
            made[policy.name] = _served(policy, own, config, renderer, engine.with_policy(policy.name, number))
            continue
        made[policy.name] = _local(policy, loaded, own, config, renderer, version=number, engine=engine)
    return made


def _checkpoint(policy: PolicySection, config: Config, model: Any | None) -> Any:
    """The model of a trained policy without training: with its adapter in the checkpoint `model.path`; the model itself, where
    that has none, as at the start of training. `model` is that of the embedded engine."""
    from turnwise.models.loading import load_model  # torch

    saved = saved_policy(config.model.path, policy.name)
    if not saved.is_dir():
        return _loaded(None, config, model)
    source = frozen_copy(config, str(saved), dtype=None, bits=config.model.quantization.bits)
    return load_model(source).requires_grad_(False)


def policy_sources(config: Config) -> dict[str, ModelSource | None]:
    """The local policies of the recipe by their names, to be loaded. None: the model of `model.path`, without an adapter, the
    reference model of a training run, or a trained policy, whose base weights are in memory already."""
    sources: dict[str, ModelSource | None] = {}
    for policy in config.policies:
        if policy.endpoint is not None:
            continue
        if policy.path is None:
            sources[policy.name] = None
            continue
        source = frozen_source(config, policy.path, dtype=policy.dtype, bits=policy.bits)
        if source is None and config.engine.embedded is None:  # the weights are not in this process
            source = frozen_copy(config, policy.path, dtype=policy.dtype, bits=policy.bits)
        sources[policy.name] = source
    return sources


def _loaded(source: ModelSource | None, config: Config, model: Any | None) -> Any:
    """The model of a local policy. `model` is that of the embedded engine."""
    from turnwise.models.loading import load_model  # torch
    from turnwise.models.lora import has_adapter, without_adapter

    if source is None and model is not None:
        return without_adapter(model) if has_adapter(model) else model
    return load_model(source or model_source(config).of_base(config.model.path)).requires_grad_(False)


def _local(
    policy: PolicySection,
    model: Any,
    sampled: Sampling,
    config: Config,
    renderer: Renderer | None,
    *,
    version: int,
    engine: TokenSampler | None,
) -> AgentPolicy:
    """A policy in this process: in the batches of `engine`, or with an embedded engine of its own."""
    own = _renderer(policy, config, renderer)
    shared = _in_batches_of(engine, model, version) if own is renderer and policy.memory_gb is None else None
    return AgentPolicy(
        sampling=sampled,
        engine=shared or _own_engine(policy, model, config, own, version),
        renderer=own,
        thinking=config.thinking,
        trained=policy.train,
        is_reference=policy.reference,
    )


def _served(
    policy: PolicySection, sampled: Sampling, config: Config, renderer: Renderer | None, engine: Engine
) -> AgentPolicy:
    """A trained policy whose adapter is at the servers of the engine."""
    own = _renderer(policy, config, renderer)
    return AgentPolicy(sampling=sampled, engine=engine, renderer=own, thinking=config.thinking, trained=True)


def _in_batches_of(engine: TokenSampler | None, model: Any, version: int) -> Engine | None:
    """An engine whose requests are in the batches of `engine`; None if that is not the embedded one, or computes with other base
    weights."""
    from turnwise.engines.local import LocalEngine  # torch

    return engine.with_model(model, version) if isinstance(engine, LocalEngine) else None


def _own_engine(policy: PolicySection, model: Any, config: Config, own: Renderer, version: int) -> Engine:
    """An embedded engine for a policy with the renderer `own`."""
    from turnwise.engines.local import LocalEngine  # torch

    known = context_length(model.config.to_dict()) is not None
    return LocalEngine(
        model,
        context=None if known else config.limits.context,
        memory_gb=policy.memory_gb,
        threads=1 if config.deterministic else 0,
        decode=own.decode,
        masks=own.masks,
        version=version,
        autocast=config.model.autocast and policy.dtype is None,
        record_routes=config.model.router_replay and policy.train,
    )


def policy_renderers(config: Config, renderer: Renderer) -> dict[str, Renderer]:
    """How messages become the tokens of the recipe's policies in this process, by their names; no model is loaded. `renderer` is
    that of the trained model, and of each policy with the same tokenizer and template."""
    return {policy.name: _renderer(policy, config, renderer) for policy in config.policies if policy.endpoint is None}


def _renderer(policy: PolicySection, config: Config, renderer: Renderer | None) -> Renderer:
    """How messages become the tokens of a policy: as of the trained model, if both have the same tokenizer and template."""
    if policy.train and renderer is not None:
        return renderer
    from turnwise.models.lora import adapter_base  # torch

    path = policy.path or (config.reference.path if policy.reference else None) or config.model.path
    if renderer is not None:
        of_model = path if (base := adapter_base(path)) is None else base
        if of_model == config.model.path:
            return renderer
    made = _of_path(policy.name, path, config, constrained(config) if renderer is None else renderer.constrained)
    equal = renderer is not None and fingerprint.of_tokenizer(made.tokenizer) == fingerprint.of_tokenizer(
        renderer.tokenizer
    )
    return renderer if equal and renderer is not None else made


def _of_path(name: str, path: str, config: Config, form: Constrained) -> Renderer:
    """The renderer of another model with the recipe's options of prompts, as far as its template takes them: arguments that it
    never reads are left out, and options of tools that it does not need. Raises TemplateError."""

    load = functools.partial(
        Renderer.from_pretrained,
        path,
        sanity=config.tokenization_sanity_check,
        unchecked=config.override_checks,
        escape_control_tokens=config.data.escape_control_tokens,
        constrained=form,
    )
    plain = load()
    given = config.model.chat_template_kwargs
    arguments = {key: value for key, value in given.items() if reads_argument(key, plain.template.source)}
    if unread := [key for key in given if key not in arguments]:
        _log.warning(
            "the policy %r is prompted without model.chat_template_kwargs %s: its chat template never reads them",
            name,
            unread,
        )
    options: dict[str, Any] = {"chat_template_kwargs": arguments} if arguments else {}
    if isinstance(plain.profile.tool_format, TemplateProblem):  # the template does not show how its model writes calls
        options["tool_format"] = tool_format(config)
    if not plain.profile.messages.describes_tools and config.tool_calls.describe != "template":
        options["describe_tools"] = config.tool_calls.describe
    return load(**options) if options else plain


def _endpoint(policy: PolicySection, config: Config) -> ChatEndpoint:
    """The server of a policy. Raises ConfigError if `endpoint` has other arguments than `ChatEndpoint`."""
    assert policy.endpoint is not None
    arguments = {"max_concurrent": config.max_concurrent, **policy.endpoint}
    try:
        inspect.signature(ChatEndpoint).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"the policy {policy.name!r}: endpoint {policy.endpoint} cannot be created: {error}"
        ) from None
    return ChatEndpoint(**arguments)
