"""Runs Gymnasium environments, and classes with `reset` and `step(action) -> (observation, done)`, unchanged.

    environment: gymnasium:Blackjack-v1
    environment: {use: "gymnasium:recipes/quiz.py:Quiz", arguments: {arguments: {questions: 3}}}

The model's answer becomes an action, or an error message for the model. The observation becomes a message. Each conversation has
its own environment object, which runs in a thread and is closed once."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from turnwise.compat.object_factory import ObjectFactory, end, messages_of, number, opened, plain, referred
from turnwise.compat.providers.provider import About
from turnwise.data.rows import ProvidedRows, seed_rows
from turnwise.environments.environment import Environment, PutInFront
from turnwise.environments.tools.tool import Tool
from turnwise.errors import ConfigError, DataError, Failed, boundary
from turnwise.types import Opening, Reply, Row, Turn
from turnwise.user_code.thread_loops import OwnLoop, ending, own_loop, refuse_unused_thread
from turnwise.user_code.threads import ThreadedObject, columns_for

_INTEGER = re.compile(r"[+-]?\d+")


class InvalidAction(Exception):
    """An answer is not a valid action. The text is sent to the model, and names the allowed actions."""


class ActionParser:
    """Parses actions of one action space. `space=None`: every text is an action.

    Raises ConfigError if actions of the space cannot be written as text and no `function` is given.
    """

    def __init__(self, space: Any, function: Callable[[str], Any] | None = None) -> None:
        if function is not None and inspect.iscoroutinefunction(function):
            raise ConfigError(f"the action {function.__name__} is async; parsing an answer must be sync: write def")
        self._space = space
        self._read = function if function is not None else _reader(space)
        self.allowed = _allowed(space)
        """What an answer must have, in words."""

    def read(self, text: str) -> Any:
        """Parse the action in an answer.

        Raises InvalidAction.
        """
        try:
            action = self._read(text)
        except ValueError as error:
            raise InvalidAction(
                str(error) or f"There is no action in your answer. Allowed is {self.allowed}."
            ) from None
        if self._space is not None and not self._space.contains(action):
            raise InvalidAction(f"{str(action)[:80]!r} is not allowed. Allowed is {self.allowed}.")
        return action


def _reader(space: Any) -> Callable[[str], Any]:
    kind = type(space).__name__
    if space is None or kind == "Text":
        return str.strip
    if kind == "Discrete":
        return _last_integer
    raise ConfigError(
        f"the actions of {space} have no form in words: set environment.arguments.action to a function of the answer that gives "
        f"an action"
    )


def _last_integer(text: str) -> int:
    integers = _INTEGER.findall(text)
    if not integers:
        raise ValueError
    return int(integers[-1][:18])


def _allowed(space: Any) -> str:
    kind = type(space).__name__
    if kind == "Discrete":
        return f"an integer from {space.start} to {space.start + space.n - 1}"
    if kind == "Text":
        characters = "".join(sorted(space.character_set))
        shown = characters if len(characters) <= 40 else f"{characters[:40]}..."
        return f"a text of {space.min_length} to {space.max_length} of the characters {shown!r}"
    return "any text" if space is None else str(space)


_REGISTERED = re.compile(r"-v\d+$")


class GymEnvironments:
    """Makes the environment of each conversation from a gymnasium environment.

    Example::

        make_environment = GymEnvironments("FrozenLake-v1", arguments={"is_slippery": False})

    Rows may have no prompt, and a recipe may have no data at all: then a row is a seed, and the first observation is the prompt.
    """

    writes_prompt = True

    def __init__(
        self,
        environment: str | Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        action: str | Callable[[str], Any] | None = None,
        observation: str | Callable[[Any], Any] | None = None,
        seed: str | None = None,
        options: str | None = None,
        invalid_reward: float = 0.0,
        render: bool = False,
        info: bool = False,
        thread: bool = False,
    ) -> None:
        """Create the factory.

        Args:
            environment: A class, a function that returns an environment, a reference to a class or function, or a registered
                id such as `FrozenLake-v1`.
            arguments: Keyword arguments with which the environment is created.
            action: A function from the model's answer to an action. If it raises ValueError, the model receives the error's
                text. The default is the answer itself for a `Text` space, and the last integer in it for a `Discrete` space.
            observation: A function from an observation to a text or messages. By default a text is shown unchanged, and any
                other observation as JSON.
            seed: The column with the seed for `reset`. The default is the column `seed`; a row without it has a seed that is
                computed from the row's id.
            options: The column with the options for `reset`. The default is the column `options`, if the row has it.
            invalid_reward: The reward of an answer that is not a valid action.
            render: Append the text of `render()` to the observation. Create the environment with `render_mode: ansi`.
            info: Append the information that `reset` and `step` return, as JSON.
            thread: Run `async` methods in an event loop of the conversation's own, in a thread, so that they may block.

        Raises ConfigError.
        """
        if isinstance(environment, str) and _REGISTERED.search(environment):
            environment = _registered(environment)
        self._read = None if action is None else referred(action, "action")
        self.show = None if observation is None else referred(observation, "observation")
        self.render, self.info, self.thread = render, info, thread
        self._seed, self._options = seed, options
        if isinstance(invalid_reward, bool) or not isinstance(invalid_reward, int | float):
            raise ConfigError(f"environment.arguments.invalid_reward is {invalid_reward!r}; it must be a number")
        self.invalid_reward = invalid_reward
        self._allowed = "any text"
        self.maker = ObjectFactory.of(environment, arguments, wants=("reset", "step"), check=self._check)

    def __call__(self) -> Environment:
        return _Game(self)

    def tools(self) -> Sequence[Tool]:
        """No tools: a gymnasium environment has none."""
        return ()

    def make(self, in_front: PutInFront) -> Environment:
        """An environment with the recipe's tools in front."""
        return in_front((), self())

    async def aclose(self) -> None:
        """Has no effect: conversations share no resources."""

    @classmethod
    def names(cls) -> Sequence[str]:
        """The registered ids whose modules can be imported here."""
        import gymnasium

        return sorted(name for name, spec in gymnasium.registry.items() if _can_begin(spec.entry_point))

    def about(self) -> About:
        """What the environment brings."""
        of_function = "" if self._read is None else "what environment.arguments.action reads in them, as an action: "
        rows = "endless, by seed; or rows of a data set with the columns seed and options"
        return About(rows=rows, answers=f"{of_function}{self._allowed}")

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """Rows of seeds."""
        return seed_rows(count, held_out=held_out)

    def _check(self, environment: Any) -> None:
        try:
            inspect.signature(environment.reset).bind(seed=0, options=None)
        except TypeError as error:
            raise ConfigError(
                f"its reset cannot be called with seed and options ({error}), as gymnasium does. For a class with reset() and "
                f"step(action) -> (observation, done), use turnwise.compat.gym:ToolEnvironments"
            ) from None
        if self.render and (mode := getattr(environment, "render_mode", None)) != "ansi":
            raise ConfigError(
                f"environment.arguments.render needs a text, and the environment has the render_mode {mode!r}; set "
                f"environment.arguments.arguments.render_mode to ansi"
            )
        self._allowed = self.actions(environment).allowed
        if self.thread:
            refuse_unused_thread(type(environment).__name__, _methods(environment))

    def actions(self, environment: Any) -> ActionParser:
        """The parser of the actions of an environment."""
        return ActionParser(getattr(environment, "action_space", None), self._read)

    def seed(self, row: Row) -> int:
        """The seed for `reset`, the same for all conversations of a row, so that they can be compared. Raises DataError."""
        if self._seed is None and row.fields.get("seed") is None:
            return int.from_bytes(blake2b(row.id.encode(), digest_size=4).digest(), "big") >> 1
        name = self._seed or "seed"
        seed = row[name]
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise DataError(f"row {row.id!r} has {name}={seed!r:.80}; a seed must be an integer of at least 0")
        return seed

    def options(self, row: Row) -> dict[str, Any] | None:
        """The options for `reset`; None if the row has none. Raises DataError."""
        if self._options is None and row.fields.get("options") is None:
            return None
        name = self._options or "options"
        options = row[name]
        if not isinstance(options, Mapping):
            raise DataError(f"row {row.id!r} has {name}={options!r:.80}; options must be a dictionary")
        return dict(options)


class _Game:
    """One conversation with a gymnasium environment."""

    def __init__(self, rules: GymEnvironments) -> None:
        self._rules = rules
        self._name = rules.maker.name
        self._foreign = ThreadedObject(rules.maker.make, end, name=self._name)
        self._refused = 0
        self._loop = OwnLoop(self._name) if rules.thread else None

    async def begin(self, row: Row) -> Opening:
        own_loop.set(self._loop)
        seed, options = self._rules.seed(row), self._rules.options(row)
        self._environment = await self._foreign.make()
        self._actions = self._rules.actions(self._environment)
        answered = await self._foreign.ask(partial(self._environment.reset, seed=seed, options=options))
        if not isinstance(answered, tuple) or len(answered) != 2:
            raise TypeError(
                f"{self._name}.reset returned {_form(answered)}; it must return (observation, info), as in gymnasium"
            )
        return Opening(messages=opened(row.messages, await self._shown(*answered)))

    async def step(self, turn: Turn) -> Reply:
        text = str(turn.message.get("content") or "")
        try:
            answered = await self._foreign.ask(lambda: self._environment.step(self._actions.read(text)))
        except Failed as failed:
            if not isinstance(failed.__cause__, InvalidAction):
                raise
            self._refused += 1
            return Reply(
                messages=messages_of(str(failed.__cause__), "user"),
                reward=self._rules.invalid_reward,
                info={"invalid_actions": self._refused},
            )
        if not isinstance(answered, tuple) or len(answered) != 5:
            raise TypeError(
                f"{self._name}.step returned {_form(answered)}; it must return "
                f"(observation, reward, terminated, truncated, info), as in gymnasium"
            )
        observation, reward, terminated, truncated, info = answered
        if not isinstance(info, Mapping):
            raise TypeError(f"{self._name}.step returned the info {info!r:.80}; it must be a dictionary")
        ends = {name: True for name, over in (("terminated", terminated), ("truncated", truncated)) if over}
        return Reply(
            messages=messages_of(await self._shown(observation, info), "user"),
            reward=number(reward, f"{self._name}.step"),
            done=bool(ends),
            info={**plain(info), **ends},
        )

    async def close(self) -> None:
        with ending(self._loop):
            await self._foreign.close()

    async def _shown(self, observation: Any, info: Any) -> Any:
        rules = self._rules
        shown = observation if rules.show is None else await self._foreign.ask(partial(rules.show, observation))
        if not rules.render and not rules.info:
            return shown
        texts = [message["content"] for message in messages_of(shown, "user")]
        if rules.render:
            frame = await self._foreign.ask(self._environment.render)
            if not isinstance(frame, str):
                raise TypeError(
                    f"{self._name}.render returned {frame!r:.80}; environment.arguments.render needs a text: create the "
                    f"environment with arguments: {{render_mode: ansi}}"
                )
            texts.append(frame.strip("\n"))
        if rules.info:
            texts.append(json.dumps(plain(info), ensure_ascii=False))
        if any(not isinstance(text, str) for text in texts):
            raise TypeError(
                "environment.arguments.render and info can be appended to a text only; the observation is not a text"
            )
        return "\n".join(texts)


class ToolEnvironments:
    """Makes the environment of each conversation from a class with `reset()` and `step(action) -> (observation, done)`.

    Both may be async, and `step` may also return `(observation, reward, done)` or `(observation, reward, done, info)`.
    """

    def __init__(
        self,
        environment: str | Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        tools: Mapping[str, str | Callable[..., Any]] | None = None,
        role: Literal["user", "tool"] = "user",
        thread: bool = False,
    ) -> None:
        """Create the factory.

        `tools` is passed to the class as its argument `tools`: functions, or references to functions, by name. `step` receives
        the complete text of the model's turn, tool calls included. `reset` receives the row's columns for which it has
        parameters. `role` is the role of the messages with the observations: some chat templates refuse `tool` after a turn
        without a tool call (Gemma 4, gpt-oss). Reward functions that read `trajectory["turns"]` always see the role `tool`.
        `thread` runs `async` methods in an event loop of the conversation's own, in a thread, so that they may block.

        Raises ConfigError.
        """
        if role not in ("tool", "user"):
            raise ConfigError(f"environment.arguments.role is {role!r}; it must be user or tool")
        given = dict(arguments or {})
        if tools is not None:
            if "tools" in given:
                raise ConfigError(
                    "environment.arguments.tools and environment.arguments.arguments.tools are both set: remove one"
                )
            given["tools"] = {name: referred(tool, f"tools.{name}") for name, tool in tools.items()}
        self._thread = thread
        self._maker = ObjectFactory.of(environment, given, wants=("reset", "step"), check=self._check)
        self._role = role

    def __call__(self) -> Environment:
        return _Steps(self._maker, self._role, thread=self._thread)

    def _check(self, environment: Any) -> None:
        if self._thread:
            refuse_unused_thread(type(environment).__name__, _methods(environment))

    def tools(self) -> Sequence[Tool]:
        """No tools: the environment runs its own tools."""
        return ()

    def make(self, in_front: PutInFront) -> Environment:
        """An environment with the recipe's tools in front."""
        return in_front((), self())

    async def aclose(self) -> None:
        """Has no effect: conversations share no resources."""


class _Steps:
    """One conversation with an object that has `reset` and `step`."""

    def __init__(self, maker: ObjectFactory, role: str, *, thread: bool) -> None:
        self._foreign = ThreadedObject(maker.make, end, name=maker.name)
        self._name = maker.name
        self._role = role
        self._loop = OwnLoop(self._name) if thread else None

    async def begin(self, row: Row) -> Opening:
        own_loop.set(self._loop)
        self._environment = await self._foreign.make()
        columns = columns_for(self._environment.reset, row, name=f"{self._name}.reset")
        return Opening(
            messages=opened(row.messages, await self._foreign.ask(partial(self._environment.reset, **columns)))
        )

    async def step(self, turn: Turn) -> Reply:
        answered = await self._foreign.ask(partial(self._environment.step, turn.text))
        match answered:
            case (observation, done):
                reward, info = 0.0, {}
            case (observation, reward, done):
                info = {}
            case (observation, reward, done, Mapping() as info):
                pass
            case _:
                observation, reward, done, info = None, 0.0, None, {}
        if not isinstance(answered, tuple) or not isinstance(done, bool | np.bool_):
            raise TypeError(
                f"{self._name}.step returned {_form(answered)}; it must return (observation, done), "
                f"(observation, reward, done) or (observation, reward, done, info), where done is True or False. "
                f"For a gymnasium environment, use turnwise.compat.gym:GymEnvironments"
            )
        return Reply(
            messages=messages_of(observation, self._role),
            observation=True,
            reward=number(reward, f"{self._name}.step"),
            done=bool(done),
            info=plain(info),
        )

    async def close(self) -> None:
        with ending(self._loop):
            await self._foreign.close()


def _methods(environment: Any) -> list[Callable[..., Any]]:
    """The methods that conversations call."""
    found = (getattr(environment, name, None) for name in ("reset", "step", "render", "close"))
    return [method for method in found if callable(method)]


def _can_begin(entry: Any) -> bool:
    """Whether a registered environment can be imported: those of games need packages of their own. gymnasium registers functions
    of its own only to say that a package is missing."""
    if isinstance(entry, str):
        return _imports(entry.partition(":")[0])
    return getattr(entry, "__module__", "") != "gymnasium.envs"


@functools.cache
def _imports(module: str) -> bool:
    try:
        with boundary("environment"):
            importlib.import_module(module)
    except Failed:
        return False
    return True


def _registered(name: str) -> Callable[..., Any]:
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(
            f"{name!r} is an id of the gymnasium package, which is not installed: pip install 'turnwise[gym]'"
        ) from None

    def make(**arguments: Any) -> Any:
        return gymnasium.make(name, **arguments)

    make.__name__ = name
    return make


def _form(answered: Any) -> str:
    if isinstance(answered, tuple):
        return f"{len(answered)} values ({', '.join(type(value).__name__ for value in answered)})"
    return f"{answered!r:.80}"
