"""Builds what the conversations of a recipe need: environment, tools, renderer, sampling, limits and context.

An environment is checked once, then built for each conversation and wrapped in the recipe's tools (`Tools`): functions,
classes and MCP servers, with the options that hold for all of them. The renderer and the context are built once and shared by
all conversations. With an OpenAI-compatible endpoint there are no tokens, and options that need tokens are refused. This
module runs no conversation.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from turnwise import types
from turnwise.assembly.references import close_tried, close_tried_environment, environment_constructor, named_callable
from turnwise.chat.constraints import Constrained
from turnwise.chat.renderer import Renderer
from turnwise.chat.tool_calls import DESCRIBED, ToolFormat, described_format
from turnwise.compat.providers.provider import provider_of
from turnwise.config.engine_checks import no_grammar, refuse_grammar
from turnwise.engines.engine import Engine
from turnwise.environments.environment import (
    Environment,
    EnvironmentFactory,
    EnvironmentSource,
    ModelPrompts,
    SharesObject,
    ThreadedEnvironment,
)
from turnwise.environments.mcp import McpServers
from turnwise.environments.tools.toolbox import Tool, Toolbox, Tools, Truncation
from turnwise.errors import ConfigError, Failed, TemplateError, boundary
from turnwise.local_paths import refuse_other_than_model, same_directory
from turnwise.options.engines import OpenAIEngineSection
from turnwise.options.schema import Config, ToolUse
from turnwise.options.section import Use, changed_options
from turnwise.rewards.judge import UsesEngine
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import (
    AgentPolicy,
    ConversationContext,
    ConversationRunner,
    EngineRunner,
    Limits,
    RolloutContext,
    TextContext,
)
from turnwise.rollout.prompts import EndpointPrompts, RenderedPrompts
from turnwise.services.chat import ChatEndpoint
from turnwise.types import AnswerFormat, Sampling, ToolSchema
from turnwise.user_code.calls import NO_ASYNC, advise_threads
from turnwise.user_code.references import resolve

# tools


def tool(use: ToolUse, *, key: str) -> Tool | Toolbox:
    """The tool that a recipe names. A class is a toolbox: one instance is built to check that construction works.

    Raises ConfigError.
    """
    named = _named_tool(use, key=key)
    if isinstance(named, Tool):
        return dataclasses.replace(named, option=key)
    return dataclasses.replace(named, tools=tuple(dataclasses.replace(method, option=key) for method in named.tools))


def _named_tool(use: ToolUse, *, key: str) -> Tool | Toolbox:
    target = resolve(use.use, key=key)
    options = {name: value for name, value in use.model_dump(exclude={"use", "arguments"}).items() if value is not None}
    if isinstance(target, type):
        return _toolbox(target, use.arguments, options, key=key)
    if use.arguments:
        raise ConfigError(
            f"{key}: {use.use} is a {type(target).__name__}, and only classes take arguments in a recipe (the model gives those "
            f"of a function): remove `arguments`"
        )
    if isinstance(target, Tool):
        return dataclasses.replace(target, **options)
    if isinstance(target, Toolbox):
        return dataclasses.replace(
            target, tools=tuple(dataclasses.replace(method, **options) for method in target.tools)
        )
    if not callable(target):
        raise ConfigError(
            f"{key}: {use.use} is a {type(target).__name__} and cannot be called; give a function or a class"
        )
    return dataclasses.replace(Tool.of(target), **options)


def tool_schemas(config: Config) -> list[ToolSchema]:
    """The schemas of the tools that the recipe names, without those of MCP servers. Nothing is built. Raises ConfigError."""
    schemas: list[ToolSchema] = []
    for number, use in enumerate(config.tools):
        target = resolve(use.use, key=f"tools.{number}")
        if isinstance(target, Toolbox):
            schemas += [method.schema for method in target.tools]
        elif isinstance(target, type):
            schemas += [method.schema for method in Toolbox.of(target, arguments=use.arguments).tools]
        elif isinstance(target, Tool) or callable(target):
            schemas.append((target if isinstance(target, Tool) else Tool.of(target)).schema)
    return schemas


def _toolbox(target: type, arguments: dict[str, Any], options: dict[str, Any], *, key: str) -> Toolbox:
    thread = bool(options.pop("thread", False))
    box = Toolbox.of(target, arguments=arguments, **options)
    if thread:
        box = _threaded(box)
    _check_construction(box, key=key)
    return box


def _threaded(box: Toolbox) -> Toolbox:
    """The toolbox with its async methods in threads. Raises ConfigError if it has no async method."""
    tools = [
        dataclasses.replace(method, thread=True) if inspect.iscoroutinefunction(method.function) else method
        for method in box.tools
    ]
    if not any(method.thread for method in tools):
        raise ConfigError(
            f"thread=True of {box.name} has no effect: all its methods are sync, and sync methods always run in threads; remove "
            f"it"
        )
    return dataclasses.replace(box, tools=tuple(tools))


def _check_construction(box: Toolbox, *, key: str) -> None:
    """Build one instance and close it, so that an error is raised before the first conversation. Raises ConfigError."""
    try:
        with boundary("tool"):
            instance = box.make()
            if box.closes:
                close_tried(instance.close)
    except Failed as failed:
        raise ConfigError(f"{key}: {box.name} cannot be created: {failed.failure.message}") from failed


def mcp_servers(config: Config) -> McpServers | None:
    """The MCP servers of the recipe, not started yet; None if it names no servers. Raises ConfigError."""
    options = config.mcp
    if options.servers is None:
        return None
    kind = resolve(options.use, key="mcp.use")
    if not (isinstance(kind, type) and issubclass(kind, McpServers)):
        raise ConfigError(f"mcp.use: {options.use} must be a subclass of turnwise.environments.mcp:McpServers")
    return kind.from_file(options.servers, start_timeout=options.start_timeout)


def truncation(config: Config, encode: Callable[[str], Sequence[int]] | None) -> Truncation | None:
    """The truncation of long tool responses; None keeps the default. `encode` gives a text's token ids."""
    options = config.tool_calls
    if options.max_tool_response_length is None:
        return None
    return Truncation(
        options.max_tool_response_length,
        side=options.tool_response_truncate_side,
        unit=options.tool_response_unit,
        encode=encode,
    )


def refuse_unused_tool_options(config: Config, *, environment_has_tools: bool) -> None:
    """Refuse options of tools that have no effect, such as a truncation without any tool. Raises ConfigError."""
    mcp, calls = changed_options(config.mcp), changed_options(config.tool_calls)
    if config.environment.use != Config.model_fields["environment"].default.use:
        calls = [
            name for name in calls if name not in ("describe", "constrain", "choice")
        ]  # other environments may offer tools in their openings
    if mcp and config.mcp.servers is None:
        raise ConfigError(f"mcp.{mcp[0]} has no effect without mcp.servers: set mcp.servers, or remove it")
    if calls and not config.tools and config.mcp.servers is None and not environment_has_tools:
        raise ConfigError(f"tool_calls.{calls[0]} has no effect without tools: set tools or mcp.servers, or remove it")
    of_truncation = [name for name in calls if name.startswith("tool_response_")]
    if of_truncation and config.tool_calls.max_tool_response_length is None:
        raise ConfigError(
            f"tool_calls.{of_truncation[0]} has no effect without tool_calls.max_tool_response_length: set that option, or "
            f"remove this one"
        )


# environments


@runtime_checkable
class UsesContext(Protocol):
    """An `EnvironmentSource` whose environments need what the run's conversations share, such as the renderer and the limits."""

    def use_context(self, context: RolloutContext) -> RolloutContext:
        """Called before the first conversation with a context. Returns the context that the conversations get, usually the
        same."""
        ...


@runtime_checkable
class AsksAboutPrompts(Protocol):
    """An `EnvironmentSource` whose environments refuse messages of others, such as the requests of agents, before the session
    fails at them."""

    def use_prompts(self, prompts: ModelPrompts) -> None:
        """Ask these in all environments that are made later."""
        ...


class Environments:
    """Makes the environment of each conversation. Holds shared resources, such as MCP servers, until `aclose`."""

    def __init__(
        self,
        make: EnvironmentFactory,
        *shared: McpServers | EnvironmentSource | None,
        tools: Mapping[str, Sequence[str]] = {},
    ) -> None:
        self._make = make
        self._shared = shared
        self.tools = tools
        """The names of the tools of all conversations, by what gives them, such as `MCP server files`."""
        self.policies: Mapping[str, AgentPolicy] = {}
        """The policies of the conversations' agents, which are closed at the end, too."""

    def __call__(self) -> Environment:
        return self._make()

    def use_context(self, context: RolloutContext) -> RolloutContext:
        """The context of the conversations, after the environment source has seen it."""
        for resource in self._shared:
            if isinstance(resource, UsesContext):
                context = resource.use_context(context)
        self.use_prompts(RenderedPrompts(context))
        return context

    def use_prompts(self, prompts: ModelPrompts) -> None:
        """Let the environment source ask about the prompts of the run's model."""
        for resource in self._shared:
            if isinstance(resource, AsksAboutPrompts):
                resource.use_prompts(prompts)

    async def aclose(self) -> None:
        """Close the shared resources. Must be called after the last conversation, also if the run fails."""
        for policy in self.policies.values():
            await policy.close()
        for resource in self._shared:
            if resource is not None:
                await resource.aclose()


@same_directory()
def environment_factory(config: Config, *, encode: Callable[[str], Sequence[int]] | None = None) -> Environments:
    """The factory of the recipe's environments, each wrapped in the recipe's tools.

    `encode` gives the token ids of a text; it is needed to truncate texts of tools by tokens. Raises ConfigError if a
    reference is wrong, the object is not an environment, an option has no effect, or an MCP server cannot be reached.

    If conversations run in other processes (`Config.runs_conversations_elsewhere`), nothing is built.
    """
    if (option := config.runs_conversations_elsewhere) is not None:
        return Environments(lambda: _elsewhere(option))
    constructor = environment_constructor(config.environment)

    tools = [tool(use, key=f"tools.{n}") for n, use in enumerate(config.tools)]
    source, environment_tools = _check_environment(config, constructor, tools)
    refuse_unused_tool_options(config, environment_has_tools=bool(environment_tools))
    bounds = {name: getattr(config.tool_calls, name) for name in ("max_parallel_calls", "max_calls")}
    cut = truncation(config, encode)
    servers = mcp_servers(config)
    sources = _tool_names(config, tools, environment_tools)
    if servers is not None:
        tools += _mcp_tools(config, servers, [*tools, *environment_tools])
        sources |= {f"MCP server {name}": names for name, names in servers.offered.items()}

    def in_front(more: Sequence[Tool | Toolbox], then: Environment) -> Environment:
        all_tools = [*tools, *more]
        return Tools(all_tools, then=then, truncation=cut, **bounds) if all_tools else then

    if source is not None:
        ways = _ways(source, config)
        return Environments(lambda: _with_ways(ways, lambda: source.make(in_front)), servers, source, tools=sources)
    if config.environment.thread:
        return Environments(lambda: in_front((), ThreadedEnvironment(constructor)), servers, tools=sources)
    return Environments(lambda: in_front((), constructor()), servers, tools=sources)


def _tool_names(
    config: Config, tools: Sequence[Tool | Toolbox], of_environment: Sequence[Tool]
) -> dict[str, Sequence[str]]:
    """The names of the tools that the recipe and the environment's source name, by their references."""
    named: dict[str, Sequence[str]] = {}
    for use, given in zip(config.tools, tools, strict=True):
        names = [one.name for one in given.tools] if isinstance(given, Toolbox) else [given.name]
        named[use.use] = [*named.get(use.use, ()), *names]
    return named | ({config.environment.use: [one.name for one in of_environment]} if of_environment else {})


def _ways(source: EnvironmentSource, config: Config) -> str:
    """How `async` methods of the source's classes are run in a thread, for the warning of code that blocks."""
    accepted = "thread" in inspect.signature(type(source)).parameters and not config.environment.arguments.get("thread")
    return f"{NO_ASYNC}, set environment.arguments.thread: true" if accepted else NO_ASYNC


def _with_ways(ways: str, make: EnvironmentFactory) -> Environment:
    advise_threads(ways)
    return make()


def _elsewhere(option: str) -> Environment:
    raise ConfigError(f"with {option}, the environments are in other processes: remove it to make environments here")


def _check_environment(
    config: Config, make: Callable[[], Any], tools: Sequence[Tool | Toolbox]
) -> tuple[EnvironmentSource | None, Sequence[Tool]]:
    """Build one environment and close it. Returns the object if it is an EnvironmentSource, and that source's tools.

    Raises ConfigError.
    """
    name = config.environment.use
    try:
        with boundary("environment"):
            built = make()
            source = built if isinstance(built, EnvironmentSource) else None
            environment_tools = source.tools() if source is not None else ()
            Tools([*tools, *environment_tools])  # refuses two tools of one name
    except Failed as failed:
        if isinstance(failed.__cause__, ConfigError) and provider_of(name) is not None:
            raise failed.__cause__ from None
        raise ConfigError(f"environment: {name} cannot be created: {failed.failure.message}") from failed
    if source is not None:
        if config.environment.thread:
            raise ConfigError(
                f"environment.thread has no effect with {name}, which runs the methods of other classes: remove it. To run a "
                f"blocking method in a thread, {' or '.join(_ways(source, config).split(', '))}"
            )
        return source, environment_tools
    if not isinstance(built, Environment):
        missing = [method for method in ("begin", "step", "close") if not hasattr(built, method)]
        if inspect.isasyncgen(built) or inspect.isgenerator(built):
            raise ConfigError(
                f"environment: {name} is a generator function without decorator: write @environment above it (from turnwise "
                f"import environment)"
            )
        raise ConfigError(
            f"environment: {name} creates a {type(built).__name__} without {', '.join(missing)}; an environment has async "
            f"methods begin(row), step(turn) and close(), or is an async generator function with @environment"
        )
    if config.environment.thread and isinstance(built, SharesObject) and built.shares:
        raise ConfigError(
            f"environment.thread gives each conversation an event loop of its own, and the conversations of {name} share one "
            f"object (environment.arguments.shared), which belongs to one loop: remove one of the two options"
        )
    close_tried_environment(built.close, name)
    return None, ()


def _mcp_tools(config: Config, servers: McpServers, others: Sequence[Tool | Toolbox]) -> list[Tool | Toolbox]:
    """The tools that the MCP servers offer. Raises ConfigError, with the servers stopped."""
    options = config.mcp
    try:
        calls: dict[str, Any] = {
            "timeout": options.timeout,
            "retries": options.retries,
            "retry_timeouts": options.retry_timeouts,
            "titles": options.titles,
            "also": options.also,
        }
        offered: Sequence[Tool | Toolbox]
        if options.scope == "conversation" and (options.max_sessions or 0) >= config.max_concurrent:
            raise ConfigError(
                f"mcp.max_sessions={options.max_sessions} has no effect with max_concurrent={config.max_concurrent}, the most "
                f"conversations that run at once: remove it, or lower it"
            )
        if options.scope == "conversation":
            _refuse_waiting_in_lockstep(config)
            offered = [servers.toolbox(options.select, most=options.max_sessions, **calls)]
        elif options.max_sessions is not None:
            raise ConfigError(
                f"mcp.max_sessions={options.max_sessions} has no effect with mcp.scope=run, which has one session: remove it, or "
                f"set mcp.scope to conversation"
            )
        else:
            offered = servers.tools(options.select, **calls)
        Tools([*others, *offered])  # refuses two tools of one name
    except ConfigError:
        servers.close()
        raise
    return list(offered)


def _refuse_waiting_in_lockstep(config: Config) -> None:
    """Raises ConfigError if a conversation would wait for a session of one that waits for its next turn."""
    most = config.mcp.max_sessions
    if config.deterministic and most is not None and most < config.max_concurrent:
        raise ConfigError(
            f"deterministic=true cannot be combined with mcp.max_sessions={most} below max_concurrent={config.max_concurrent}: a "
            f"conversation has its sessions until its end, and its next turn is sampled together with those of all conversations "
            f"of its batch, of which the others would wait for a session until their calls time out. Remove mcp.max_sessions, "
            f"and set max_concurrent={most}"
        )


# sampling and limits


def sampling(config: Config) -> types.Sampling:
    """The distribution that training and rollouts sample from."""
    options = config.sampling
    return types.Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=tuple(options.stop),
    )


def evaluation_sampling(config: Config) -> types.Sampling:
    """The distribution that evaluations sample from: `eval.sampling`, with null values taken from `sampling`."""
    changed = {name: value for name, value in config.eval.sampling.model_dump().items() if value is not None}
    return dataclasses.replace(sampling(config), **changed)


def limits(config: Config, *, longest: int | None) -> Limits:
    """The recipe's limits. `longest` is the longest context that the model allows, in tokens; None if it is unknown.

    Raises ConfigError if the recipe asks for a longer context.
    """
    limits = Limits.model_validate(config.limits.model_dump())
    if longest is not None and limits.context is not None and limits.context > longest:
        raise ConfigError(
            f"limits.context={limits.context} is more than the model's longest context, {longest} tokens: lower it"
        )
    return limits.within(longest)


# the context of conversations with an engine


def stand_ins(config: Config) -> dict[str, AgentPolicy]:
    """The policies of a recipe without their models: the engine of the conversations takes their turns."""
    sampled = sampling(config)
    return {
        policy.name: AgentPolicy(sampling=dataclasses.replace(sampled, **policy.sampling), trained=policy.train)
        for policy in config.policies
    }


def sampled_as(config: Config, policies: Mapping[str, AgentPolicy], sampled: Sampling) -> Mapping[str, AgentPolicy]:
    """The policies where the conversations sample from `sampled` (evaluations): trained ones do so, too, but for options of their
    own. Frozen ones are opponents that do not change."""
    return {
        policy.name: dataclasses.replace(
            policies[policy.name], sampling=dataclasses.replace(sampled, **policy.sampling)
        )
        if policy.train
        else policies[policy.name]
        for policy in config.policies
    }


def renderer(config: Config, source: str | Path | None = None) -> Renderer:
    """The renderer of the model in `source`, which is model.path unless given (a resumed run has its own copy).

    Raises TemplateError.
    """
    if source is None:
        given = f"model.path={config.model.path}"
        refuse_other_than_model(config.model.path, error=TemplateError, weights=False, given=given)
    return Renderer.from_pretrained(
        source or config.model.path,
        sanity=config.tokenization_sanity_check,
        tool_format=tool_format(config),
        chat_template_kwargs=config.model.chat_template_kwargs,
        describe_tools=config.tool_calls.describe,
        unchecked=config.override_checks,
        escape_control_tokens=config.data.escape_control_tokens,
        constrained=constrained(config),
    )


def constrained(config: Config) -> Constrained:
    """What the recipe says of the form of turns. Raises ConfigError."""
    given = config.sampling.response_format
    try:
        answer = None if given is None else AnswerFormat.of(given)
    except ValueError as error:
        raise ConfigError(f"sampling.response_format: {error}") from None
    wanted = Constrained(calls=config.tool_calls.constrain, choice=config.tool_calls.choice, answer=answer)
    if wanted != Constrained():
        refuse_grammar(config)
    return wanted


def tool_format(config: Config) -> str | ToolFormat:
    """The format of tool calls: a name, a format that the recipe describes, or one of the user. Raises ConfigError."""
    use = config.tool_format
    described = use.use == DESCRIBED
    if not described and ":" not in use.use:
        if use.arguments:
            raise ConfigError(
                f"tool_format.arguments has no effect with the format {use.use!r}: remove one of the two. A description of a "
                f"format has no `use`: {{opening: ..., closing: ...}}"
            )
        return use.use
    make = named_callable(use, key="tool_format", find=(lambda _: described_format) if described else None)
    try:
        with boundary("tokens"):
            made = make()
    except Failed as failed:
        raise ConfigError(
            failed.failure.message if described else f"tool_format: {use.use}: {failed.failure.message}"
        ) from failed
    if not isinstance(made, ToolFormat) or not all(
        isinstance(getattr(made, of, None), str) for of in ("name", "example")
    ):
        raise ConfigError(
            f"tool_format: {use.use} makes a {type(made).__name__}; it must be a turnwise.chat.tool_calls.ToolFormat with the "
            f"texts `name` and `example` (a call as the model should write it)"
        )
    return made


def conversation_context(
    config: Config,
    renderer: Renderer,
    runner: ConversationRunner,
    environments: Environments,
    *,
    longest: int | None,
    sampled: Sampling | None = None,
    policies: Mapping[str, AgentPolicy] | None = None,
) -> ConversationContext:
    """The shared context of the recipe's conversations, wherever `runner` runs them. `longest` is the model's longest context in
    tokens, if known; `sampled` is the distribution that the conversations sample from, if it is not that of training.
    `policies` are those of the recipe; None: the engine of the conversations stands in for them.

    Raises ConfigError if the recipe's limits exceed it.
    """
    shared = _shared_context(config, environments, longest, sampled or sampling(config), policies)
    context = runner.context(shared, renderer, config.thinking)
    return _used(context, config, environments) if isinstance(context, RolloutContext) else context


def rollout_context(
    config: Config,
    renderer: Renderer,
    engine: Engine,
    environments: Environments,
    *,
    longest: int | None,
    policies: Mapping[str, AgentPolicy] | None = None,
) -> RolloutContext:
    """The `conversation_context` of conversations in this process, whose tokens `engine` samples."""
    shared = _shared_context(config, environments, longest, sampling(config), policies)
    return _used(EngineRunner(engine).context(shared, renderer, config.thinking), config, environments)


def _used(context: RolloutContext, config: Config, environments: Environments) -> RolloutContext:
    """The context, after the environments have seen it."""
    skip = not config.engine.trains_constrained
    return environments.use_context(dataclasses.replace(context, forms_refused=no_grammar(config), skip_forms=skip))


def _shared_context(
    config: Config,
    environments: Environments,
    longest: int | None,
    sampled: Sampling,
    policies: Mapping[str, AgentPolicy] | None,
) -> ConversationContext:
    """What conversations share wherever they run."""
    environments.policies = policies or {}
    policies = stand_ins(config) if policies is None else policies
    return ConversationContext(
        policies=sampled_as(config, policies, sampled) if policies else policies,
        make_environment=environments,
        sampling=sampled,
        limits=limits(config, longest=longest),
        max_concurrent=config.max_concurrent,
        lockstep=config.deterministic,
    )


# the context of conversations with an endpoint

_OF_TEMPLATES = ("thinking", "tool_format", "tokenization_sanity_check")


def text_context(
    config: Config,
    options: OpenAIEngineSection,
    environments: Environments,
    sampled: Sampling,
    policies: Mapping[str, AgentPolicy],
) -> TextContext:
    """The shared context of the recipe's conversations with the endpoint `options`.

    Raises ConfigError if an option is invalid, or the environment variable of the key is not set.
    """
    endpoint = ChatEndpoint(
        options.url,
        options.model or config.model.path,
        api_key_env=options.api_key_env,
        request=options.request,
        max_tokens_field=options.max_tokens_field,
        timeout=options.timeout,
        retries=options.retries,
        max_concurrent=config.max_concurrent,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
    )
    environments.policies = policies
    environments.use_prompts(EndpointPrompts())
    return TextContext(
        policies=policies,
        chat=endpoint,
        chat_template_kwargs=config.model.chat_template_kwargs,
        make_environment=environments,
        sampling=sampled,
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
    constrained(config)  # refuses grammars
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
            config.data.escape_control_tokens == "all",
            "data.escape_control_tokens=all needs the model's tokenizer, which engine.name=openai does not have: remove it",
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
    values = {name: getattr(config, name) for name in changed}
    names = ", ".join(f"{name}={value.use if isinstance(value, Use) else value}" for name, value in values.items())
    return [f"{names}: not used with an endpoint, whose server renders the messages and parses the answers"]
