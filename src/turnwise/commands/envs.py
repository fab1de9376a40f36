"""`turnwise envs`: the libraries of environments that a recipe can name, their names, and what one environment brings."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.assembly.references import environment_constructor
from turnwise.commands.command import Context, print_lines
from turnwise.compat.providers.provider import PROVIDERS, Describes, HasNames, HasPreview, provider_of
from turnwise.data.rows import BringsRows, read_rows
from turnwise.environments.environment import Environment, EnvironmentSource, EpisodeAgent, in_episode
from turnwise.environments.tools.toolbox import Tool, Toolbox, Tools
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.json_yaml import parse_yaml
from turnwise.options.section import Use
from turnwise.types import Message, Opening, SamplingChange, ToolSchema

_BEGIN_SECONDS = 60.0


def register_envs(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "List the libraries whose environments a recipe can name (environment: <library>:<name>), whether they are installed, "
        "the names of one library, or what one environment brings: rows, tools, players, rewards and an opening "
        "(docs/environment_libraries.md)."
    )
    parser.add_argument("name", nargs="?", metavar="LIBRARY[:NAME]", help="a library, or one of its environments")
    parser.add_argument(
        "arguments", nargs="*", metavar="key=value", help="arguments of the environment, as in environment.arguments"
    )
    parser.set_defaults(command=_run_envs)


def _run_envs(options: argparse.Namespace, context: Context) -> int:
    if options.name is None:
        print_lines(context.console, _libraries())
    elif ":" in options.name:
        print_lines(context.console, _environment(options.name, _arguments(options.arguments)))
    elif options.name in PROVIDERS:
        print_lines(context.console, _names(options.name))
    else:
        raise ConfigError(
            f"there is no library {options.name!r}{nearest(options.name, PROVIDERS)}; there are: {', '.join(PROVIDERS)}"
        )
    return 0


def _libraries() -> list[str]:
    """A line for each library."""
    width = max(map(len, PROVIDERS))
    lines = []
    for provider in PROVIDERS.values():
        version = provider.installed
        state = f"not installed: pip install 'turnwise[{provider.extra}]'" if version is None else version
        state = "part of turnwise" if provider.package is None else state
        lines.append(f"{provider.name:<{width}}  {state:<12}  {provider.brings}")
    return lines


def _names(library: str) -> list[str]:
    provider = PROVIDERS[library]
    made = provider.make_class()
    if not isinstance(made, HasNames):
        return [f"{library}: a name is {provider.brings}"]
    with boundary("environment"):
        return list(made.names())


def _environment(reference: str, arguments: dict[str, Any]) -> list[str]:
    """What an environment brings. Raises ConfigError."""
    if provider_of(reference) is None:
        library = reference.partition(":")[0]
        raise ConfigError(
            f"there is no library {library!r}{nearest(library, PROVIDERS)}; there are: {', '.join(PROVIDERS)}"
        )
    use = Use(use=reference, arguments=arguments)
    source, lines = _made(use)
    if isinstance(source, Describes):
        about = source.about()
        lines += [f"rows     {about.rows}", f"players  {about.players}", f"rewards  {', '.join(about.rewards)}"]
        lines += [f"answers  {about.answers}"] if about.answers else []
    if not isinstance(source, BringsRows) or not isinstance(source, EnvironmentSource):
        return lines
    try:
        with boundary("environment"):
            (row,) = read_rows(
                "environment:1", writes_prompt=lambda: True, provides=lambda n: source.rows(n, held_out=False)
            )
            with in_episode(_NoModel()):
                opening = asyncio.run(_opening(source, row))
    except Failed as failed:
        if isinstance(failed.__cause__, _AgentOpened):
            return [*lines, f"opening  follows turns of the agent {failed.__cause__}: see `turnwise play RECIPE`"]
        raise ConfigError(f"{reference}: the first row cannot be opened: {failed.failure.message}") from failed
    tools = ", ".join(tool["function"]["name"] for tool in opening.tools) or "none"
    shown = [f"[{message['role']}] {message['content']}" for message in opening.messages]
    return [*lines, f"tools    {tools}", "", *shown]


def _made(use: Use) -> tuple[Any, list[str]]:
    """The source of an environment, and what its user must choose where it is shown with a choice that is made here. Raises
    ConfigError."""
    try:
        return environment_constructor(use)(), []
    except ConfigError as error:
        known = provider_of(use.use)
        made = None if known is None else known[0].make_class()
        if not isinstance(made, HasPreview) or made.preview.keys() & use.arguments.keys():
            raise
        more = Use(use=use.use, arguments={**use.arguments, **made.preview})
        try:
            source = environment_constructor(more)()
        except ConfigError:
            raise error from None
        given = ", ".join(f"{name}={value}" for name, value in made.preview.items())
        return source, [f"needs    {error}", f"         shown with {given}"]


async def _opening(source: EnvironmentSource, row: Any) -> Opening:
    def in_front(more: Sequence[Tool | Toolbox], then: Environment) -> Environment:
        return Tools(more, then=then) if more else then

    environment = source.make(in_front)
    try:
        async with asyncio.timeout(_BEGIN_SECONDS):
            return await environment.begin(row)
    finally:
        await environment.close()
        await source.aclose()


class _AgentOpened(Exception):
    """An environment asks a model, and there is none."""


class _NoModel:
    """The episode of an opening that is only shown."""

    def agent(
        self,
        name: str,
        *,
        messages: Sequence[Message] = (),
        tools: Sequence[Tool | Toolbox | Callable[..., Any] | ToolSchema] = (),
        train: bool | None = None,
        shares_reward: bool = False,
        sampling: SamplingChange | None = None,
        policy: str | None = None,
    ) -> EpisodeAgent:
        """Nobody takes its turns."""
        raise _AgentOpened(name)


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """`tries=2` as `{"tries": 2}`; the values are YAML. Raises ConfigError."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{word!r} is not an argument of the environment; write key=value, such as tries=2")
        found[name] = parse_yaml(value, where=word, error=ConfigError)
    return found
