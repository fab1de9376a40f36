"""The libraries of environments that a recipe can name: `environment: <provider>:<name>`.

A provider is a line of `PROVIDERS` and a class in a file of its own, which is imported only when a recipe names it. The class
takes the name and the recipe's arguments, and is an `EnvironmentSource`. What else it brings is said by protocols: rows
(`BringsRows`), a description (`Describes`), and the names that it knows (`names`). This module imports no library."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Protocol, runtime_checkable

from turnwise.environments.environment import Environment, PutInFront
from turnwise.environments.tools.tool import Tool
from turnwise.errors import ConfigError, nearest
from turnwise.user_code.references import resolve

RESTARTS = 3
"""How many lost processes or servers of a library are replaced in a run. If the cause stays, conversations then fail at once."""
_log = logging.getLogger(__name__)


class LibraryEnvironments:
    """An `EnvironmentSource` whose environments offer their tools themselves, if they have any, and share nothing."""

    def __call__(self) -> Environment:
        """The environment of one conversation."""
        raise NotImplementedError

    def tools(self) -> Sequence[Tool]:
        """None that is known before a conversation begins."""
        return ()

    def make(self, in_front: PutInFront) -> Environment:
        """The environment of one conversation, behind the recipe's tools."""
        return in_front((), self())

    async def aclose(self) -> None:
        """Nothing is shared."""


class Restarts:
    """Counts the processes or servers of a library that were lost in a run and replaced. Its callers hold a lock."""

    def __init__(self, lost: str) -> None:
        """`lost` is what happened to them, for messages: `have died`."""
        self._lost, self._replaced = lost, 0

    def refused(self, why: str) -> str | None:
        """Count one more, with a warning that says why it is lost. Returns why no other may be started; None: one may."""
        if self._replaced >= RESTARTS:
            return f"{why} (the last of {RESTARTS + 1} that {self._lost}: no other is started)"
        self._replaced += 1
        _log.warning("%s. Another one is started, number %d of at most %d.", why, self._replaced, RESTARTS)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A library of environments."""

    name: str
    """What stands before the colon."""
    source: str
    """The class that makes its environments: `module:name`."""
    brings: str
    """What a name of it is, in a few words."""
    module: str | None = None
    """The module that must be importable; None if a name is a class of the user."""
    package: str | None = None
    """The package's name on PyPI."""
    extra: str | None = None
    """The extra of turnwise that installs the package."""

    @property
    def installed(self) -> str | None:
        """The version of the installed package; None if it is not installed. Imports nothing."""
        if self.module is None or self.package is None:
            return "yes"
        if importlib.util.find_spec(self.module) is None:
            return None
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown version"

    def make_class(self) -> type[Any]:
        """The class that makes its environments. Raises ConfigError if the package is missing or cannot be imported."""
        if self.installed is None:
            raise ConfigError(
                f"environment: {self.name} needs the package {self.package}, which is not installed: "
                f"pip install 'turnwise[{self.extra}]'"
            )
        return resolve(self.source, key="environment")


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(
            name="reasoning_gym",
            source="turnwise.compat.providers.reasoning_gym:ReasoningGym",
            brings="a task with endless rows, such as countdown",
            module="reasoning_gym",
            package="reasoning-gym",
            extra="reasoning_gym",
        ),
        Provider(
            name="textarena",
            source="turnwise.compat.providers.textarena:TextArena",
            brings="a game, such as Wordle-v0",
            module="textarena",
            package="textarena",
            extra="textarena",
        ),
        Provider(
            name="gymnasium",
            source="turnwise.compat.gym:GymEnvironments",
            brings="a registered id, such as Blackjack-v1, or file.py:Class",
            module="gymnasium",
            package="gymnasium",
            extra="gym",
        ),
        Provider(
            name="verifiers",
            source="turnwise.compat.providers.verifiers:Verifiers",
            brings="an installed environment, or file.py:load_environment",
            module="verifiers",
            package="verifiers",
            extra="verifiers",
        ),
        Provider(
            name="verifiers_v1",
            source="turnwise.compat.providers.verifiers_v1:VerifiersTaskset",
            brings="an installed taskset of verifiers 0.4, or its file, file.py",
            module="verifiers",
            package="verifiers",
            extra="verifiers_v1",
        ),
        Provider(
            name="skyrl_gym",
            source="turnwise.compat.providers.skyrl_gym:SkyrlGym",
            brings="a registered environment, such as gsm8k, or file.py:Class",
            module="skyrl_gym",
            package="skyrl-gym",
            extra="skyrl_gym",
        ),
        Provider(
            name="aviary",
            source="turnwise.compat.providers.aviary:Aviary",
            brings="a task data set or an environment, such as dummy, or file.py:name",
            module="aviary",
            package="fhaviary",
            extra="aviary",
        ),
        Provider(
            name="openenv",
            source="turnwise.compat.providers.openenv:OpenEnv",
            brings="a class of an environment, file.py:Class, or the URL of its server",
            module="openenv",
            package="openenv",
            extra="openenv",
        ),
        Provider(
            name="textworld",
            source="turnwise.compat.providers.textworld:TextWorld",
            brings="a challenge, such as tw-coin_collector, or game files",
            module="textworld",
            package="textworld",
            extra="textworld",
        ),
        Provider(
            name="alfworld",
            source="turnwise.compat.providers.alfworld:Alfworld",
            brings="a part of its data, such as train, or a folder of games",
            module="alfworld",
            package="alfworld",
            extra="alfworld",
        ),
        Provider(
            name="inspect",
            source="turnwise.compat.providers.inspect_ai:InspectTask",
            brings="a task of Inspect: file.py@task, or a registered name",
            module="inspect_ai",
            package="inspect_ai",
            extra="inspect",
        ),
        Provider(
            name="nemo_gym",
            source="turnwise.compat.providers.nemo_gym:NemoGym",
            brings="the URL of a resources server, or its name and the Python that has nemo-gym",
        ),
        Provider(
            name="harbor",
            source="turnwise.compat.providers.harbor:Harbor",
            brings="a folder of tasks in Harbor's format (Terminal-Bench 2)",
        ),
        Provider(name="trl", source="turnwise.compat.trl:TrlEnvironments", brings="a class for TRL: file.py:Class"),
    )
}
"""The providers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What an environment of a provider brings, for people."""

    rows: str
    players: str = "one"
    rewards: Sequence[str] = ("environment",)
    """The names of the parts of its rewards, as they are recorded."""
    answers: str = ""
    """What the model may answer; empty if the opening says it."""


@runtime_checkable
class HasPreview(Protocol):
    """A class that makes environments, of which some need arguments that only a user can choose."""

    preview: ClassVar[Mapping[str, Any]]
    """Arguments with which such an environment can be shown."""


@runtime_checkable
class Describes(Protocol):
    """A source that says what it brings."""

    def about(self) -> About:
        """What its environments bring."""
        ...


@runtime_checkable
class HasNames(Protocol):
    """A provider whose names are known."""

    @classmethod
    def names(cls) -> Sequence[str]:
        """The names, in the order of the library."""
        ...


def provider_of(reference: str) -> tuple[Provider, str] | None:
    """The provider that a reference names, and the name behind the colon; None for other references."""
    place, colon, name = reference.partition(":")
    provider = PROVIDERS.get(place) if colon else None
    return None if provider is None else (provider, name)


def _own(reference: str) -> Any:
    """What a reference names that is of no provider. Raises ConfigError, with the most similar provider if there is no such
    module."""
    place = reference.partition(":")[0]
    if place.isidentifier() and (similar := nearest(place, PROVIDERS)) and importlib.util.find_spec(place) is None:
        raise ConfigError(
            f"environment: {reference!r}: there is no provider and no module {place!r}{similar}; the providers are: "
            f"{', '.join(PROVIDERS)}"
        )
    return resolve(reference, key="environment")


def environment_class(reference: str) -> Any:
    """The class or function that a recipe's environment names, without its arguments. Raises ConfigError."""
    found = provider_of(reference)
    return _own(reference) if found is None else found[0].make_class()


def environment_target(reference: str) -> Callable[..., Any]:
    """The callable that makes the environment with the recipe's arguments. Raises ConfigError."""
    found = provider_of(reference)
    if found is None:
        return _own(reference)
    provider, name = found
    if not name:
        raise ConfigError(f"environment: {reference!r} has no name; write {provider.name}:NAME ({provider.brings})")
    return functools.partial(provider.make_class(), name)


def refuse_unknown_name(name: str, names: Sequence[str], *, provider: str) -> None:
    """Raises ConfigError with the most similar name."""
    if name not in names:
        raise ConfigError(
            f"environment: {provider} has no environment {name!r}{nearest(name, names)}; `turnwise envs {provider}` lists its "
            f"{len(names)} names"
        )
