"""From a recipe to living objects: what its references name is imported here, and nowhere else."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise import types
from turnwise.config import Config, LocalEngine, ToolUse, Use
from turnwise.data.rows import read_rows
from turnwise.engines.engine import Engine
from turnwise.environments.environment import Environment, EnvironmentFactory
from turnwise.environments.tools import Tool, Tools
from turnwise.errors import ConfigError, DataError, Failed, boundary, nearest
from turnwise.rollout.limits import Limits
from turnwise.rollout.renderer import Renderer
from turnwise.scoring.credit import Credit, grpo
from turnwise.scoring.mask import RULES, Rule, custom, takes_trajectory
from turnwise.scoring.reward import Scorer, TrajectoryReward, TurnReward
from turnwise.types import Row

__all__ = [
    "credit",
    "environment_factory",
    "limits",
    "local_engine",
    "loss_mask",
    "resolve",
    "rows",
    "sampling",
    "scorer",
    "scripts",
]


def resolve(reference: str, *, key: str) -> Any:
    """The object that `package.module:name` or `path/to/file.py:name` names; `key` says where the recipe does so.

    Raises ConfigError.
    """
    place, colon, name = reference.partition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{key}: {reference!r} names nothing; write package.module:name or path/to/file.py:name")
    try:
        with boundary("import"):
            module = _from_file(Path(place), key) if place.endswith(".py") else importlib.import_module(place)
    except Failed as failed:
        if isinstance(failed.__cause__, ConfigError):
            raise failed.__cause__ from None
        raise ConfigError(f"{key}: {place} could not be imported: {failed.failure.message}") from failed
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}: {place} has no {name!r}{nearest(name, vars(module))}")
        found = getattr(found, part)
    return found


def _from_file(path: Path, key: str) -> Any:
    path = path.expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}; paths are relative to the directory you run from")
    name = f"turnwise_user.{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _callable(use: Use, *, key: str, given: Sequence[Any] = ()) -> Callable[..., Any]:
    """What `use` names, with its arguments; refuses arguments that it does not take. `given` stand for those to come."""
    found = resolve(use.use, key=key)
    if not callable(found):
        raise ConfigError(f"{key}: {use.use} is a {type(found).__name__} and cannot be called")
    try:
        inspect.signature(found).bind(*given, **use.arguments)
    except (TypeError, ValueError) as error:  # the latter from a builtin without a signature
        raise ConfigError(f"{key}: {use.use} cannot be called with the arguments {use.arguments}: {error}") from None
    return functools.partial(found, **use.arguments)


def _tool(use: ToolUse, *, key: str) -> Tool:
    function = resolve(use.use, key=key)
    if not callable(function):
        raise ConfigError(f"{key}: {use.use} is a {type(function).__name__} and cannot be called")
    return Tool.of(function, timeout=use.timeout)


def environment_factory(config: Config) -> EnvironmentFactory:
    """Makes the environment of the recipe, its tools in front, for each conversation.

    Raises ConfigError, also if what is made is no environment.
    """
    make = _callable(config.environment, key="environment")
    tools = [_tool(use, key=f"tools.{n}") for n, use in enumerate(config.tools)]
    try:
        with boundary("environment"):
            one = make()  # one is made to see whether it can be; it is not begun, so there is nothing to close
            Tools(tools)
    except Failed as failed:
        raise ConfigError(f"environment: {config.environment.use} cannot be made: {failed.failure.message}") from failed
    if not isinstance(one, Environment):
        missing = [name for name in ("begin", "step", "close") if not hasattr(one, name)]
        raise ConfigError(
            f"environment: {config.environment.use} makes a {type(one).__name__} without {', '.join(missing)}; an "
            f"environment has async begin(row), step(turn) and close(), or is an async generator under @environment"
        )
    return (lambda: Tools(tools, then=make())) if tools else make


def scorer(config: Config) -> Scorer:
    """The recipe's reward functions."""
    return Scorer(
        trajectory=[
            TrajectoryReward(_name(use), _callable(use, key=f"reward.trajectory.{n}", given=(None,)), use.weight)
            for n, use in enumerate(config.reward.trajectory)
        ],
        turns=[
            TurnReward(_name(use), _callable(use, key=f"reward.turns.{n}", given=(None, None)), use.weight)
            for n, use in enumerate(config.reward.turns)
        ],
        seconds=config.reward.seconds,
    )


def credit(config: Config) -> Credit:
    """The recipe's credit assignment."""
    return functools.partial(grpo, scale=config.credit.scale)


def loss_mask(config: Config) -> Rule:
    """The recipe's rule for the weights of turns.

    Raises ConfigError if it is a reference to what cannot be called for a turn.
    """
    use = config.loss_mask
    if use.use in RULES:
        return RULES[use.use]
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


def rows(config: Config, *, held_out: bool = False, limit: int | None = None) -> list[Row]:
    """The recipe's rows; `limit` is a further bound beside data.limit."""
    data = config.data
    bounds = [bound for bound in (limit, data.limit) if bound is not None]
    source = data.eval if held_out and data.eval is not None else data.train
    return read_rows(
        source,
        columns=data.columns,
        split=data.eval_split if held_out else data.split,
        subset=data.subset,
        system=data.system,
        limit=min(bounds, default=None),
    )


def scripts(path: str) -> list[list[str]]:
    """The scripts of a scripted engine: one list of texts a line.

    Raises DataError, with the line's number.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"engine.script: there is no file {file.absolute()}")
    found: list[list[str]] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # no splitlines: a text may hold U+2028
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            texts = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: this line is not JSON ({error.msg} at column {error.colno})") from error
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
