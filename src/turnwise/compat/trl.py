"""TRL's environments (`environment_factory` of its GRPOTrainer), unchanged.

    environment:
      use: turnwise.compat.trl:TrlEnvironments
      arguments: {environment: game.py:GuessEnv}

An environment is a class with `reset(**row)`. Its public methods are tools, and it may have `get_reward()`. A turn without a
tool call ends the conversation. The behaviour is that of TRL 1.16.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from turnwise.compat.instance_pool import EXHAUSTED, InstancePool, Lease
from turnwise.compat.object_factory import InFront, ObjectFactory, end, number, opened
from turnwise.environments.environment import Environment
from turnwise.environments.tools.result import ToolResponse
from turnwise.environments.tools.tool import Tool, Toolbox
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, boundary, nearest
from turnwise.types import EnvironmentHandle, Opening, Reply, Row, Turn
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.run_in_thread import run_in_thread
from turnwise.user_code.threaded_object import ThreadedObject, columns_for

__all__ = ["TrlEnvironments"]

_COLUMN = "environment"
_NO_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True, slots=True)
class _Kind:
    """One class of environments."""

    maker: ObjectFactory
    box: Toolbox | None
    """Its tools; None if it has none."""
    scores: bool
    """Whether it has `get_reward`."""
    pool: InstancePool


class TrlEnvironments:
    """Makes the environment of each conversation, with its tools in front.

    Example::

        make_environment = TrlEnvironments(GuessEnv)

    Rows may have no prompt, and `data.train: empty:64` has no data at all: then `reset` returns the prompt.
    """

    writes_prompt = True

    def __init__(
        self,
        environment: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]],
        *,
        arguments: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Create the factory.

        `environment` is a class, a function that returns an environment, or a reference to a class or function. It may also be
        a mapping from names to these; the column `environment` then selects a name for each row. `arguments` are the keyword
        arguments with which an environment is created. `timeout` is the time limit of a tool call in seconds.

        Raises ConfigError.
        """
        self._named = isinstance(environment, Mapping)
        several = environment if isinstance(environment, Mapping) else {"": environment}
        if not several:
            raise ConfigError("environment.arguments.environment is empty; name at least one environment")
        self._kinds = {name: _kind(value, arguments, timeout) for name, value in several.items()}

    def __call__(self) -> Environment:
        return self.make(lambda tools, then: Tools(tools, then=then) if tools else then)

    def tools(self) -> Sequence[Tool]:
        """The tools of all classes, one for each name."""
        by_name = {tool.name: tool for kind in self._kinds.values() if kind.box is not None for tool in kind.box.tools}
        return tuple(by_name.values())

    def make(self, in_front: InFront) -> Environment:
        """An environment behind its own tools and the recipe's tools. The row determines its own tools."""
        return _Chosen(self._kind_of, in_front)

    async def aclose(self) -> None:
        """Close the remaining instances, which conversations have used one after the other."""
        for kind in self._kinds.values():
            for instance in kind.pool.drain():
                with boundary("environment"):
                    result = await run_in_thread(
                        lambda instance=instance: end(instance), name=kind.maker.name, kind="environment"
                    )
                    if inspect.isawaitable(result):
                        await result

    def _kind_of(self, row: Row) -> tuple[_Kind, Row]:
        if not self._named:
            return self._kinds[""], row
        name = row[_COLUMN]
        if name not in self._kinds:
            have = ", ".join(self._kinds)
            raise KeyError(
                f"row {row.id!r} has {_COLUMN}={name!r}, which is not a name in environment.arguments.environment: "
                f"{have}{nearest(str(name), self._kinds)}"
            )
        # as in TRL, `reset` does not receive the column that selects the environment
        return self._kinds[name], replace(
            row, fields={key: value for key, value in row.fields.items() if key != _COLUMN}
        )


class _Chosen:
    """One conversation. Its tools are known when it begins, because the row selects the class."""

    def __init__(self, kind_of: Callable[[Row], tuple[_Kind, Row]], in_front: InFront) -> None:
        self._kind_of = kind_of
        self._in_front = in_front
        self._inner: _Played | None = None
        self._outer: Environment | None = None

    async def begin(self, row: Row) -> Opening:
        kind, row = self._kind_of(row)
        self._inner = _Played(kind)
        boxes = [] if kind.box is None else [replace(kind.box, make=self._inner.tools)]
        self._outer = self._in_front(boxes, self._inner)
        return await self._outer.begin(row)

    async def step(self, turn: Turn) -> Reply:
        assert self._outer is not None, "step before begin"
        return await self._outer.step(turn)

    async def final_reward(self) -> float:
        return 0.0 if self._inner is None else await self._inner.final_reward()

    def environment_handle(self) -> EnvironmentHandle | None:
        return None if self._inner is None else self._inner.environment_handle()

    async def close(self) -> None:
        if self._outer is not None:
            await self._outer.close()


class _Played:
    """The environment behind the tools: calls `reset` and `get_reward`."""

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        self._name = kind.maker.name
        self._pool = kind.pool
        self._foreign: ThreadedObject[Any] = ThreadedObject(self._make, self._end, name=self._name)
        self._lease: Lease | None = None
        self._exposed = False
        self._running: list[str] = []  # names of the tools whose calls have not returned

    async def begin(self, row: Row) -> Opening:
        self._instance = await self._lease_instance()
        prompt = copy_containers(list(row.messages))
        columns = columns_for(self._instance.reset, row, name=f"{self._name}.reset", extra={"prompt": prompt})
        shown = await self._foreign.ask(partial(self._instance.reset, **columns))
        if not isinstance(shown, str | list | None):
            raise TypeError(
                f"{self._name}.reset returned {shown!r:.80}; it must return None, a text, a list of content blocks or a list of "
                f"messages"
            )
        messages = opened(row.messages, shown, between="")
        if messages[-1]["content"] in ("", []):
            raise ValueError(
                f"the row has no prompt, and {self._name}.reset returned {shown!r}: return the prompt from reset, or give the "
                f"rows a column `prompt`"
            )
        return Opening(messages=messages)

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True, reward=await self.final_reward())

    async def final_reward(self) -> float:
        if not self._kind.scores:
            return 0.0
        reward = await self._foreign.ask(self._instance.get_reward)
        return 0.0 if reward is None else number(reward, f"{self._name}.get_reward")

    def environment_handle(self) -> EnvironmentHandle:
        """A handle of the instance. After the handle is released, another conversation may use the instance."""
        assert self._lease is not None
        self._exposed = True
        self._lease.played()
        return EnvironmentHandle(self._instance, self._give_back)

    async def _lease_instance(self) -> Any:
        """A free or a new instance. If no new instance can be created, wait until another conversation releases an instance."""
        self._lease = await self._pool.lease(self._foreign.make)
        return self._lease.instance if self._lease.new else self._foreign.adopt(self._lease.instance)

    def _make(self) -> Any:
        try:
            return self._kind.maker.make()
        except StopIteration:  # `next(urls)`, as in TRL's examples
            return EXHAUSTED

    def _give_back(self) -> None:
        assert self._lease is not None
        self._lease.give_back(usable=not self._running)

    def _end(self, instance: Any) -> Any:
        return None if self._exposed or instance is EXHAUSTED else end(instance)

    async def close(self) -> None:
        try:
            await self._foreign.close()
        finally:
            # an instance with `close` is closed here and not used again; without `close`, it is reset and used again
            if self._lease is not None and not self._exposed:
                closes = callable(getattr(self._lease.instance, "close", None))
                self._lease.give_back(usable=not (closes or self._running or self._foreign.busy), closed=True)

    def tools(self) -> Any:
        """The methods of this conversation's instance, with results in TRL's form."""
        assert self._kind.box is not None
        methods = {tool.name: getattr(self._instance, tool.name) for tool in self._kind.box.tools}
        return SimpleNamespace(**{name: _with_trl_results(method, self._running) for name, method in methods.items()})


def _kind(reference: str | Callable[..., Any], arguments: Mapping[str, Any] | None, timeout: float) -> _Kind:
    boxes: list[tuple[Toolbox | None, bool]] = []

    def look(instance: Any) -> None:
        public = [
            name for name, _ in inspect.getmembers(type(instance), inspect.isfunction) if not name.startswith("_")
        ]
        methods = [getattr(instance, name) for name in public if name not in _NO_TOOLS]
        # these tools are read for their schemas only: each conversation calls the methods of its own instance
        tools = tuple(Tool.of(method, timeout=timeout) for method in methods)
        box = Toolbox(make=object, name=type(instance).__name__, tools=tools) if tools else None
        boxes.append((box, "get_reward" in public))

    first: list[Any] = []
    maker = ObjectFactory.of(reference, arguments, wants=("reset",), check=look, keep=first.append)
    ((box, scores),) = boxes
    return _Kind(maker, box, scores, InstancePool(maker.name, first))


def _with_trl_results(method: Callable[..., Any], running: list[str]) -> Callable[..., Any]:
    """The method with its result in TRL's form: content blocks are unchanged, any other value becomes `str(value)`."""
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def waiting(**arguments: Any) -> Any:
            with _listed(method.__name__, running):
                return _content(await method(**arguments))

        return waiting

    @wraps(method)
    def at_once(**arguments: Any) -> Any:
        with _listed(method.__name__, running):
            return _content(method(**arguments))

    return at_once


@contextlib.contextmanager
def _listed(name: str, running: list[str]) -> Iterator[None]:
    running.append(name)
    try:
        yield
    finally:
        running.remove(name)


def _content(result: Any) -> Any:
    if isinstance(result, list) and result and all(isinstance(part, Mapping) and "type" in part for part in result):
        texts = [str(part["text"]) for part in result if part["type"] == "text"]
        images = [part["image"] for part in result if part["type"] == "image"]
        if len(texts) + len(images) == len(result):
            return ToolResponse(text="\n".join(texts) if texts else None, image=images or None)
    return str(result)
