"""From a recipe to living objects: what its references name is imported and made."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from turnwise import types
from turnwise.build.trial import close_tried, close_tried_environment
from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config, LocalEngine, Mcp, Part, RewardUse, ToolCalls, ToolUse, Use
from turnwise.data.rows import read_rows
from turnwise.engines.engine import Engine
from turnwise.environments.environment import Environment, EnvironmentFactory
from turnwise.environments.in_thread import InThread
from turnwise.environments.mcp.servers import McpServers
from turnwise.environments.tools.tool import copy_containers
from turnwise.environments.tools.toolbox import Tool, Toolbox, Tools, Truncation
from turnwise.errors import ConfigError, DataError, Failed, boundary
from turnwise.json_yaml import parse_json, read_text
from turnwise.rewards.credit import Credit, grpo
from turnwise.rewards.reward import GroupReward, Scorer, TrajectoryReward, TurnReward
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, TurnWeighting, custom, takes_trajectory
from turnwise.rollout.limits import Limits
from turnwise.types import Row
from turnwise.user_code.object_references import resolve

if TYPE_CHECKING:
    from turnwise.training.policy import OptimizerConfig

__all__ = [
    "EnvironmentSource",
    "Environments",
    "credit",
    "environment_factory",
    "evaluation_sampling",
    "learning_rate",
    "limits",
    "local_engine",
    "loss_mask",
    "optimization",
    "resolve",
    "rows",
    "sampling",
    "scorer",
    "scripts",
    "short_enough",
]


def _callable(use: Use, *, key: str, given: Sequence[Any] = ()) -> functools.partial[Any]:
    """What `use` names, with its arguments; refuses arguments that it does not take. `given` stand for those to come."""
    found = resolve(use.use, key=key)
    if not callable(found):
        raise ConfigError(f"{key}: {use.use} is a {type(found).__name__} and cannot be called")
    try:
        inspect.signature(found).bind(*given, **use.arguments)
    except (TypeError, ValueError) as error:  # the latter from a builtin without a signature
        raise ConfigError(f"{key}: {use.use} cannot be called with the arguments {use.arguments}: {error}") from None
    return functools.partial(found, **use.arguments)


def _tool(use: ToolUse, *, key: str) -> Tool | Toolbox:
    found = resolve(use.use, key=key)
    options = {name: value for name, value in use.model_dump(exclude={"use", "arguments"}).items() if value is not None}
    if isinstance(found, type):
        thread = bool(options.pop("thread", False))
        box = Toolbox.of(found, arguments=use.arguments, **options)
        if thread:
            box = _threaded(box)
        _try_out(box, key=key)
        return box
    if use.arguments:
        raise ConfigError(
            f"{key}: arguments are for classes, which are made for each conversation; {use.use} is a "
            f"{type(found).__name__}, whose arguments the model gives: remove them"
        )
    if isinstance(found, Tool):
        return dataclasses.replace(found, **options)
    if isinstance(found, Toolbox):
        return dataclasses.replace(found, tools=tuple(dataclasses.replace(tool, **options) for tool in found.tools))
    if not callable(found):
        raise ConfigError(f"{key}: {use.use} is a {type(found).__name__} and cannot be called")
    return Tool.of(found, **options)


def _threaded(box: Toolbox) -> Toolbox:
    """With its async methods in threads. Raises ConfigError if it has none."""
    tools = [
        dataclasses.replace(one, thread=True) if inspect.iscoroutinefunction(one.function) else one for one in box.tools
    ]
    if not any(one.thread for one in tools):
        raise ConfigError(
            f"thread=True of {box.name} has no effect: it has no async method, and sync ones run in threads anyway; "
            f"leave it out"
        )
    return dataclasses.replace(box, tools=tuple(tools))


def _try_out(box: Toolbox, *, key: str) -> None:
    """Make one to see whether it can be, and forget it.

    Raises ConfigError: now, and not in the first conversation.
    """
    try:
        with boundary("tool"):
            one = box.make()
            if box.closes:
                close_tried(one.close)
    except Failed as failed:
        raise ConfigError(f"{key}: {box.name} cannot be made: {failed.failure.message}") from failed


def _mcp_servers(config: Config) -> McpServers | None:
    options = config.mcp
    if options.servers is None:
        return None
    kind = resolve(options.use, key="mcp.use")
    if not (isinstance(kind, type) and issubclass(kind, McpServers)):
        raise ConfigError(f"mcp.use: {options.use} must be a subclass of turnwise.environments.mcp:McpServers")
    return kind.from_file(options.servers, start_timeout=options.start_timeout)


def _truncation(config: Config, encode: Callable[[str], Sequence[int]] | None) -> Truncation | None:
    options = config.tool_calls
    if options.max_tool_response_length is None:
        return None
    return Truncation(
        options.max_tool_response_length,
        side=options.tool_response_truncate_side,
        unit=options.tool_response_unit,
        encode=encode,
    )


def _refuse_idle_tools(config: Config, *, others: bool) -> None:
    """Refuse options of tools that would do nothing, in training and without; `others` are the environment's own tools."""

    def changed(part: Part, default: Part) -> list[str]:
        return [name for name in type(part).model_fields if getattr(part, name) != getattr(default, name)]

    mcp, calls = changed(config.mcp, Mcp()), changed(config.tool_calls, ToolCalls())
    if mcp and config.mcp.servers is None:
        raise ConfigError(f"mcp.{mcp[0]} has no effect without servers: set mcp.servers to a file that names them")
    if calls and not config.tools and config.mcp.servers is None and not others:
        raise ConfigError(f"tool_calls.{calls[0]} has no effect without tools: set tools or mcp.servers")
    cut = [name for name in calls if name.startswith("tool_response_")]
    if cut and config.tool_calls.max_tool_response_length is None:
        raise ConfigError(
            f"tool_calls.{cut[0]} has no effect without a length: set tool_calls.max_tool_response_length"
        )


@runtime_checkable
class EnvironmentSource(Protocol):
    """What may stand in a recipe in an environment's place: made once for a run, it makes the environments."""

    def tools(self) -> Sequence[Tool]:
        """Those that its environments will have, to be checked."""
        ...

    def make(self, in_front: Callable[[Sequence[Tool | Toolbox], Environment], Environment]) -> Environment:
        """One of them. `in_front` puts tools in front of an environment: those given, and those of the recipe."""
        ...

    async def aclose(self) -> None:
        """Give back what its environments share."""
        ...


class Environments:
    """Makes the environment of each conversation, and holds what all of them share until `aclose`."""

    def __init__(self, make: EnvironmentFactory, *shared: McpServers | EnvironmentSource | None) -> None:
        self._make = make
        self._shared = shared

    def __call__(self) -> Environment:
        return self._make()

    async def aclose(self) -> None:
        """Give back what is shared: after the last conversation, on every path out."""
        for one in self._shared:
            if one is not None:
                await one.aclose()


def environment_factory(config: Config, *, encode: Callable[[str], Sequence[int]] | None = None) -> Environments:
    """Makes the environment of the recipe, its tools in front, for each conversation.

    `encode` gives the tokens of a text, for answers of tools that are measured in tokens. Raises ConfigError, also if what is
    made is no environment, or an MCP server cannot be reached.
    """
    named = _callable(config.environment, key="environment")

    def make() -> Any:
        # lists and dicts of its own for each conversation: what one does to them is not heard of in another
        return named(**copy_containers(config.environment.arguments))

    tools = [_tool(use, key=f"tools.{n}") for n, use in enumerate(config.tools)]
    try:
        with boundary("environment"):
            one = make()  # one is made to see whether it can be
            source = one if isinstance(one, EnvironmentSource) else None
            behind = source.tools() if source is not None else ()
            Tools([*tools, *behind])
    except Failed as failed:
        raise ConfigError(f"environment: {config.environment.use} cannot be made: {failed.failure.message}") from failed
    if source is None and not isinstance(one, Environment):
        missing = [name for name in ("begin", "step", "close") if not hasattr(one, name)]
        raise ConfigError(
            f"environment: {config.environment.use} makes a {type(one).__name__} without {', '.join(missing)}; an "
            f"environment has async begin(row), step(turn) and close(), or is an async generator under @environment"
        )
    if source is None and isinstance(one, Environment):
        close_tried_environment(one.close, config.environment.use)
    if source is not None and config.environment.thread:
        raise ConfigError(
            f"environment.thread has no effect with {config.environment.use}, which runs the methods of other classes: make "
            f"those of them that block sync (`def` instead of `async def`); sync methods run in threads"
        )
    _refuse_idle_tools(config, others=bool(behind))
    most, truncation = config.tool_calls.max_parallel_calls, _truncation(config, encode)
    if (servers := _mcp_servers(config)) is not None:
        options = config.mcp
        try:
            listed = servers.tools(
                options.select, timeout=options.timeout, retries=options.retries, retry_timeouts=options.retry_timeouts
            )
            tools = [*tools, *listed]
            Tools([*tools, *behind])  # refuses two of one name
        except ConfigError:
            servers.close()
            raise

    def in_front(more: Sequence[Tool | Toolbox], then: Environment) -> Environment:
        every = [*tools, *more]
        return Tools(every, then=then, max_parallel_calls=most, truncation=truncation) if every else then

    if source is not None:
        return Environments(lambda: source.make(in_front), servers, source)
    if config.environment.thread:
        return Environments(lambda: in_front((), InThread(make)), servers)
    return Environments(lambda: in_front((), make()), servers)


def scorer(config: Config) -> Scorer:
    """The recipe's reward functions.

    Raises ConfigError if one of them cannot be imported, made or called with what it will be given.
    """

    def named(use: RewardUse, place: str, given: Sequence[Any]) -> tuple[str, Callable[..., Any], float]:
        function, name = _reward(use, key=f"reward.{place}", given=given)
        return use.name or name, function, use.weight

    options = config.reward
    return Scorer(
        trajectory=[
            TrajectoryReward(*named(use, f"trajectory.{n}", (None,))) for n, use in enumerate(options.trajectory)
        ],
        turns=[TurnReward(*named(use, f"turns.{n}", (None, None))) for n, use in enumerate(options.turns)],
        groups=[GroupReward(*named(use, f"group.{n}", ((),))) for n, use in enumerate(options.group)],
        seconds=options.timeout,
    )


def _reward(use: RewardUse, *, key: str, given: Sequence[Any]) -> tuple[Callable[..., Any], str]:
    """A reward function and its name. A class is made here, once, and its instance is the function; an instance may say by
    `__name__` which function it stands for."""
    function = _callable(use, key=key, given=() if isinstance(resolve(use.use, key=key), type) else given)
    if not isinstance(function.func, type):
        return function, _name(use)
    try:
        with boundary("reward"):
            made = function()
    except Failed as failed:
        raise ConfigError(f"{key}: {use.use} cannot be made: {failed.failure.message}") from failed
    try:
        inspect.signature(made).bind(*given)
    except (TypeError, ValueError) as error:  # an instance that cannot be called has no signature
        raise ConfigError(f"{key}: an instance of {use.use} cannot be called as a reward function: {error}") from None
    return made, getattr(made, "__name__", _name(use))


def credit(config: Config) -> Credit:
    """The recipe's credit assignment."""
    return functools.partial(grpo, scale=config.credit.scale)


def loss_mask(config: Config) -> TurnWeighting:
    """The recipe's rule for the weights of turns.

    Raises ConfigError if it is a reference to what cannot be called for a turn.
    """
    use = config.loss_mask
    if use.use in TURN_WEIGHTINGS:
        return TURN_WEIGHTINGS[use.use]
    found = resolve(use.use, key="loss_mask")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"loss_mask: {use.use} is async; a loss mask waits for nothing: write def instead of async def"
        )
    both = callable(found) and takes_trajectory(found)
    return custom(_callable(use, key="loss_mask", given=(None, None) if both else (None,)), name=_name(use))


def sampling(config: Config) -> types.Sampling:
    """The recipe's sampling."""
    options = config.sampling
    return types.Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=tuple(options.stop),
    )


def evaluation_sampling(config: Config) -> types.Sampling:
    """The recipe's sampling in evaluations: `eval.sampling` over `sampling`."""
    own = {name: value for name, value in config.eval.sampling.model_dump().items() if value is not None}
    return dataclasses.replace(sampling(config), **own)


def limits(config: Config, *, longest: int | None) -> Limits:
    """The recipe's limits. `longest` is the context that the model itself allows.

    Raises ConfigError if the recipe asks for more.
    """
    options = config.limits.model_dump()
    if longest is not None:
        if options["context"] is not None and options["context"] > longest:
            raise ConfigError(f"limits.context={options['context']} is more than the {longest} that the model allows")
        options["context"] = options["context"] or longest
    return Limits(**options)


def local_engine(config: Config, model: Any, renderer: Renderer, *, version: int = 0) -> Engine:
    """The embedded engine on a model that is loaded already."""
    from turnwise.engines.local import LocalEngine as Local  # torch; a scripted engine does without

    options = config.engine
    assert isinstance(options, LocalEngine)
    return Local(
        model,
        slots=options.slots,
        memory_gb=options.memory_gb,
        threads=1 if config.deterministic else options.threads,
        decode=renderer.decode,
        version=version,
    )


def optimization(config: Config) -> OptimizerConfig:
    """The recipe's way of changing the weights."""
    from turnwise.training.policy import OptimizerConfig  # torch

    options = config.train
    return OptimizerConfig(
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        kl_coef=options.kl_coef,
        entropy_coef=options.entropy_coef,
    )


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    from turnwise.training.policy import lr_at  # torch

    options = config.train
    return lr_at(
        step, lr=options.lr, schedule=options.lr_schedule, warmup_steps=options.warmup_steps, steps=options.steps
    )


def rows(config: Config, *, held_out: bool = False, limit: int | None = None) -> list[Row]:
    """The recipe's rows; `limit` is a further bound beside data.max_rows."""
    data = config.data
    bounds = [bound for bound in (limit, data.max_rows) if bound is not None]
    source = data.eval if held_out and data.eval is not None else data.train
    return read_rows(
        source,
        columns=data.columns,
        split=data.eval_split if held_out else data.split,
        subset=data.subset,
        system=data.system_prompt,
        limit=min(bounds, default=None),
    )


def short_enough(config: Config, rows: Sequence[Row], renderer: Renderer) -> tuple[list[Row], list[str]]:
    """The rows that data.max_prompt_tokens leaves, and a note that says how many it leaves out.

    Raises DataError if none is left.
    """
    most = config.data.max_prompt_tokens
    if most is None:
        return list(rows), []
    left = [row for row in rows if len(renderer.encode_opening(row.messages, ()).token_ids) <= most]
    if rows and not left:
        raise DataError(f"all {len(rows)} prompts have more than data.max_prompt_tokens={most} tokens: raise it")
    out = len(rows) - len(left)
    return left, [f"{out} of {len(rows)} rows are left out: data.max_prompt_tokens={most}"] if out else []


def scripts(path: str) -> list[list[str]]:
    """The scripts of a scripted engine: one list of texts a line.

    Raises DataError, with the line's number.
    """
    file = Path(path)
    if not os.path.isfile(file):
        raise DataError(f"engine.script: there is no file {file.absolute()}")
    found: list[list[str]] = []
    # split, not splitlines: a text may hold U+2028
    for number, line in enumerate(read_text(file, error=DataError).split("\n"), 1):
        if not line.strip():
            continue
        texts = parse_json(line, where=f"{path}:{number}: this line", error=DataError)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise DataError(f'{path}:{number}: a script is a list of texts, for example ["Hello.", "Bye."]')
        found.append(texts)
    if not found:
        raise DataError(f"{path} has no scripts; each line is a list of texts")
    return found


def _name(use: Use) -> str:
    return use.use.rpartition(":")[2]


def model_context(config: Mapping[str, Any]) -> int | None:
    """The longest context in a model's config.json, by whichever name the architecture has for it."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(config.get(name), int):
            return config[name]
    text = config.get("text_config")
    return model_context(text) if isinstance(text, Mapping) else None
