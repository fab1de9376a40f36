"""`environment: skyrl_gym:gsm8k`: a registered environment of SkyRL-Gym, or a class of that kind.

The environment is made for each conversation from the row: its columns are SkyRL's `extras`, such as `reward_spec`. The model's
complete text is the action. What `step` returns becomes messages, reward and `turn.info`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from turnwise.compat.object_factory import messages_of, number, plain, referred
from turnwise.compat.providers.provider import About, LibraryEnvironments, refuse_unknown_name
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Edit, Opening, Reply, Row, Turn, common_length
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.threads import ThreadedObject

_RUNS_CODE = {
    "skyrl_gym.envs.searchcode.env": "the text of a <python> tag as a Python program in a process of this machine",
    "skyrl_gym.envs.lcb.env": "the program of the answer in processes of this machine",
    "skyrl_gym.envs.rlm.env": "each code block with exec in this process",
}
"""Modules of environments that run what the model writes, and how. The library puts no sandbox around it."""


class SkyrlGym(LibraryEnvironments):
    """Makes the environments of a registered name (an EnvironmentSource).

    Args:
        name: A registered name, such as `gsm8k`; or a reference to a class: `file.py:Class`.
        config: Options of the environment (SkyRL's `environment.skyrl_gym.<name>`), such as `{search_url: ..., topk: 3}`.
        max_turns: The column `max_turns`, for rows that have none; null adds none.
        unsandboxed: Allow an environment that runs code of the model on this machine without a sandbox.

    Raises ConfigError.
    """

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        unsandboxed: bool = False,
    ) -> None:
        if max_turns is not None and (isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1):
            raise ConfigError(f"environment.arguments.max_turns is {max_turns!r}; it must be an integer of at least 1")
        self.name, self.max_turns = name, max_turns
        self._class = self._creator(name)
        self._allowed = unsandboxed is True
        self._check_code()
        self.config = _config(self._class, dict(config or {}), name)

    @classmethod
    def names(cls) -> Sequence[str]:
        """The registered names."""
        return sorted(_library("envs.registration").registry)

    def about(self) -> About:
        """What the environment brings."""
        return About(rows="those of data.train; their columns, such as reward_spec, are the extras of the environment")

    def make_for(self, row: Row) -> Any:
        """The library's environment of a row."""
        extras = copy_containers(dict(row.fields))
        if self.max_turns is not None:
            extras.setdefault("max_turns", self.max_turns)
        made = self._class(env_config=self.config, extras=extras)
        runner = _library("tools").PythonCodeExecutorToolGroup
        if not self._allowed and any(isinstance(group, runner) for group in getattr(made, "tool_groups", None) or ()):
            raise self._unsandboxed("what the model gives its Python tool in a process of this machine")
        return made

    def __call__(self) -> Environment:
        return _SkyrlTask(self)

    def _check_code(self) -> None:
        """Raises ConfigError if the environment runs code of the model and the recipe does not allow it."""
        made = self._class.func if isinstance(self._class, partial) else self._class
        modules = [base.__module__ for base in getattr(made, "__mro__", ())]
        runs = next((_RUNS_CODE[module] for module in modules if module in _RUNS_CODE), None)
        if runs is not None and not self._allowed:
            raise self._unsandboxed(runs)
        if runs is None and self._allowed and ":" not in self.name:
            raise ConfigError(
                f"environment.arguments.unsandboxed has no effect: skyrl_gym:{self.name} runs no code of the model; remove it"
            )

    def _unsandboxed(self, runs: str) -> ConfigError:
        return ConfigError(
            f"environment: skyrl_gym:{self.name} runs {runs}, with the rights of this user and without a sandbox. The model may "
            f"write anything: run turnwise in a container or on a machine that may be lost, and set "
            f"environment.arguments.unsandboxed: true; or write an environment with turnwise's sandbox (docs/sandbox.md)"
        )

    def _creator(self, name: str) -> Any:
        if ":" in name:
            return referred(name, "name")
        refuse_unknown_name(name, self.names(), provider="skyrl_gym")
        registration = _library("envs.registration")
        specification = registration.registry[name]
        try:
            with boundary("environment"):
                entry = specification.entry_point
                creator = entry if callable(entry) else registration.load_env_creator(entry)
        except Failed as failed:
            raise ConfigError(f"environment: skyrl_gym:{name} cannot be imported: {failed.failure.message}") from failed
        return partial(creator, **specification.kwargs) if specification.kwargs else creator


def _library(module: str) -> Any:
    """A module of the library, which need not be installed where types are checked."""
    importlib.import_module("skyrl_gym")  # registers the environments
    return importlib.import_module(f"skyrl_gym.{module}")


def _config(creator: Any, config: dict[str, Any], name: str) -> Any:
    """The options as the environment takes them: its own dataclass, where its constructor names one. Raises ConfigError."""
    try:
        parameters = inspect.signature(creator).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment: skyrl_gym:{name} is not a class: {error}") from None
    taken = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not taken and not {"env_config", "extras"} <= parameters.keys():
        raise ConfigError(
            f"environment: skyrl_gym:{name} cannot be made with env_config and extras, as SkyRL-Gym does; its parameters are "
            f"{', '.join(parameters) or 'none'}"
        )
    section = _dataclass_of(parameters["env_config"].annotation) if "env_config" in parameters else None
    if section is None:
        return importlib.import_module("omegaconf").OmegaConf.create(config)
    options = [field.name for field in dataclasses.fields(section)]
    if (unknown := next((option for option in config if option not in options), None)) is not None:
        raise ConfigError(
            f"environment.arguments.config: skyrl_gym:{name} has no option {unknown!r}{nearest(unknown, options)}; it has "
            f"{', '.join(options)}"
        )
    return section(**config)


def _dataclass_of(annotation: Any) -> Any:
    """The dataclass in an annotation such as `SearchEnvConfig | DictConfig`; None if there is none."""
    choices = (annotation, *typing.get_args(annotation))
    found = (choice for choice in choices if isinstance(choice, type) and dataclasses.is_dataclass(choice))
    # OmegaConf's DictConfig is no dataclass
    return next(found, None)


class _SkyrlTask:
    """One conversation."""

    def __init__(self, source: SkyrlGym) -> None:
        self._source = source
        self._name = f"skyrl_gym:{source.name}"
        self._row: Row | None = None
        self._foreign: ThreadedObject[Any] = ThreadedObject(self._make, lambda made: made.close(), name=self._name)

    async def begin(self, row: Row) -> Opening:
        self._row = row
        self._environment = await self._foreign.make()
        answered = await self._foreign.ask(partial(self._environment.init, copy_containers(list(row.messages))))
        if not isinstance(answered, tuple) or len(answered) != 2:
            raise TypeError(f"{self._name}.init returned {answered!r:.200}; it must return (messages, metadata)")
        return Opening(messages=messages_of(answered[0], "user"))

    async def step(self, turn: Turn) -> Reply:
        text = turn.text
        answered = await self._foreign.ask(partial(self._environment.step, text))
        if not isinstance(answered, Mapping) or not {"observations", "reward", "done"} <= answered.keys():
            raise TypeError(
                f"{self._name}.step returned {answered!r:.200}; it must return a mapping with observations, reward and done"
            )
        done = bool(answered["done"])
        reward = number(answered["reward"], f"{self._name}.step")
        info = plain(answered.get("metadata") or {})
        messages = [] if done else messages_of(answered["observations"], "user")
        metrics = await self._metrics() if done else {}
        return Reply(
            messages=messages, reward=reward, done=done, info=info, edit=_edit(answered, text), metrics=metrics
        )

    async def close(self) -> None:
        await self._foreign.close()

    def _make(self) -> Any:
        assert self._row is not None
        return self._source.make_for(self._row)

    async def _metrics(self) -> dict[str, float]:
        """The numbers that the environment counts."""
        counted = await self._foreign.ask(self._environment.get_metrics)
        return {
            f"skyrl_gym/{name}": float(value)
            for name, value in (counted or {}).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }


def _edit(answered: Mapping[str, Any], text: str) -> Edit | None:
    """The change of the turn that `postprocessed_action` makes; None without a change, or if the conversation is over."""
    new = answered.get("postprocessed_action")
    if new is None or new == text or answered["done"]:
        return None
    common = common_length([*map(ord, text)], [*map(ord, new)])
    return Edit(keep=common, add=new[common:])
