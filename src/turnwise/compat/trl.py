"""TRL's environments (`environment_factory`) and reward functions (`reward_funcs` of its GRPOTrainer), unchanged.

    environment:
      use: turnwise.compat.trl:TrlEnvironments
      arguments: {environment: game.py:GuessEnv}
    reward:
      batch:
        - {use: turnwise.compat.trl:TrlReward, arguments: {function: my_rewards.py:reward_from_env}}

An environment is a class with `reset(**row)`. Its public methods are tools, and it may have `get_reward()`. A turn without a
tool call ends the conversation. As in TRL, conversations use instances of the class one after the other, and the number of
instances may be limited: `self.client = Client(next(urls))` raises StopIteration after the last address. Then conversations wait,
in order of arrival. An instance is released after its conversation is scored, because reward functions may use it.

A reward function takes `prompts`, `completions`, `completion_ids`, the columns of the data and `environments`, each a list with
an item per conversation, and returns a list of numbers. It may be sync or async. In `reward.batch`, it is called once for all
conversations of a step, as in TRL; in `reward.group`, once for all conversations of a row. For a function that returns a reward
function, give its arguments:

        - use: turnwise.compat.trl:TrlReward
          arguments:
            function: trl.rewards:get_soft_overlong_punishment
            arguments: {max_completion_len: 1024, soft_punish_cache: 256}

The behaviour is that of TRL 1.16."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final

from turnwise.compat.object_factory import ObjectFactory, end, number, opened
from turnwise.compat.providers.provider import About
from turnwise.data.rows import ProvidedRows
from turnwise.environments.environment import Environment, PutInFront
from turnwise.environments.tools.result import ToolResponse
from turnwise.environments.tools.tool import Tool, Toolbox
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, DataError, Failed, boundary, nearest
from turnwise.types import EnvironmentHandle, Failure, Message, Opening, Reply, Row, Trajectory, Turn
from turnwise.user_code.calls import (
    conversation_name,
    conversations_of_step,
    in_lockstep,
    scored_together,
    waiting_for_others,
)
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import resolve
from turnwise.user_code.reward_number import number_or_none, reward_number
from turnwise.user_code.thread_loops import OwnLoop, call_async, ending, own_loop, refuse_unused_thread
from turnwise.user_code.threads import ThreadedObject, columns_for, run_in_thread

_BATCH = "all conversations"
_TOGETHER = (
    "conversations that are scored together need an instance each: provide as many instances as {} has conversations"
)
EXHAUSTED: Final = object()
"""What the function that creates an instance returns if no more can be created."""


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    """A conversation that waits for an instance, or for its turn to create one."""

    arrival: int
    group: str
    lease: asyncio.Future[Lease]


class InstancePool:
    """The instances of one class. All methods are called in the event loop's thread."""

    def __init__(self, name: str, instances: Iterable[Any]) -> None:
        self._name = name
        self._free = list(instances)
        self._retired: list[Any] = []
        """Instances with a timed-out tool call that still runs. They are not reused; `drain` returns them."""
        self._leases: list[Lease] = []
        self._arrivals = itertools.count()
        self._waiting: list[_Waiting] = []
        """In the order of arrival."""
        self._exhausted = False
        self._step = 0
        """`conversations_of_step`."""

    async def lease(self, make: Callable[[], Awaitable[Any]]) -> Lease:
        """A lease of one instance for the calling conversation. `make` creates an instance, or returns EXHAUSTED.

        Waits if no more instances can be created. Raises Failed if no instance can become free before this conversation ends,
        and what `make` raises.
        """
        arrival = next(self._arrivals)
        while True:
            lease = await self._turn(arrival)
            if lease.ready:
                return lease
            with contextlib.ExitStack() as if_it_fails:
                if_it_fails.callback(lease.give_back, usable=False, closed=True)
                instance = await make()
                if_it_fails.pop_all()
            if instance is not EXHAUSTED:
                lease.made(instance)
                return lease
            self._exhausted = True
            self._leases.remove(lease)  # it waits at its place in the order of arrival, before later ones are served

    async def _turn(self, arrival: int) -> Lease:
        """A lease with an instance, or without one if the caller must create one now."""
        # conversations of one group are scored together, and all conversations if there is a function of the batch
        in_batch = scored_together.get() == "batch"
        self._step = 0 if in_lockstep() else conversations_of_step.get()
        group = _BATCH if in_batch else conversation_name().rpartition("/")[0]
        if not self._waiting and self._may_lend(group):
            return self._lend(group)
        if in_lockstep() and in_batch:
            raise self._too_few(_TOGETHER.format("the step"))
        if in_lockstep():
            raise self._too_few(
                "with deterministic: true no conversation waits for another: set `max_concurrent` to at most that number"
            )
        waiting = _Waiting(arrival, group, asyncio.get_running_loop().create_future())
        insort(self._waiting, waiting, key=attrgetter("arrival"))
        self._serve()
        try:
            with waiting_for_others():
                return await waiting.lease
        except asyncio.CancelledError:
            if waiting.lease.done() and not waiting.lease.cancelled() and waiting.lease.exception() is None:
                waiting.lease.result().give_back(usable=True)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._serve()

    def drain(self) -> list[Any]:
        """Remove and return all instances that no conversation uses. The caller must close them."""
        drained = [*self._free, *self._retired]
        self._free, self._retired = [], []
        return drained

    def _lend(self, group: str) -> Lease:
        lease = Lease(self, group, self._free.pop() if self._free else None)
        self._leases.append(lease)
        return lease

    def _may_lend(self, group: str) -> bool:
        """Whether a conversation of the group, the next one in order of arrival, may get an instance or create one now.

        If the batch is scored together, a step needs all its instances at the same time. So no conversation of a later step
        may get the last instance before one of an earlier step, whose constructor runs longer and then fails. Therefore, after
        the conversations of the first step, no conversation gets an instance while a constructor runs.
        """
        steps_overlap = group == _BATCH and self._step > 0
        if steps_overlap and len(self._leases) >= self._step and not all(lease.ready for lease in self._leases):
            return False
        return bool(self._free) or not self._exhausted

    def _serve(self) -> None:
        """Give free instances to waiting conversations. Raise an error in conversations that would wait forever."""
        while self._waiting and self._may_lend(self._waiting[0].group):
            waiting = self._waiting.pop(0)
            if not waiting.lease.done():
                waiting.lease.set_result(self._lend(waiting.group))
        groups = {waiting.group for waiting in self._waiting}
        if _BATCH in groups and 0 < self._step <= len(self._leases):
            return  # the waiting conversations belong to later steps: the present step can be scored without them
        # a group, or the batch, is scored after all its conversations have ended; so waiting and ended conversations can block
        # each other
        if all(lease.ended and lease.group in groups for lease in self._leases):
            for waiting in self._waiting:
                if not waiting.lease.done():
                    waiting.lease.set_exception(self._too_few(_TOGETHER.format(self._scored(groups))))
            self._waiting.clear()

    def _scored(self, groups: set[str]) -> str:
        if _BATCH not in groups:
            return "the group"
        return f"the step ({self._step})" if self._step else "the step"

    def _too_few(self, reason: str) -> Failed:
        count = sum(lease.ready for lease in self._leases) + len(self._free)
        message = f"no more than {count} instances of {self._name} can be created (StopIteration), and {reason}"
        return Failed(Failure("environment", message))


class Lease:
    """The right of one conversation to use an instance, until it is released."""

    def __init__(self, pool: InstancePool, group: str, instance: Any) -> None:
        self._pool = pool
        self.group = group
        self.instance = instance
        self.new = False
        """Whether the instance was created for this conversation."""
        self.ended = False

    def played(self) -> None:
        """The conversation has ended, and its group is not scored yet."""
        self.ended = True
        self._pool._serve()

    @property
    def ready(self) -> bool:
        """Whether it has an instance. Otherwise the instance is being created."""
        return self.instance is not None

    def made(self, instance: Any) -> None:
        """The instance was created for this conversation."""
        self.instance = instance
        self.new = True
        self._pool._serve()

    def give_back(self, *, usable: bool, closed: bool = False) -> None:
        """Return the instance. It is reused if `usable`; otherwise `drain` returns it, unless it is `closed` already."""
        pool = self._pool
        pool._leases.remove(self)
        if self.instance is not None and (usable or not closed):
            (pool._free if usable else pool._retired).append(self.instance)
        pool._serve()


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
    methods: Sequence[Callable[..., Any]]
    """What conversations call."""


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
        thread: bool = False,
    ) -> None:
        """Create the factory.

        `environment` is a class, a function that returns an environment, or a reference to a class or function. It may also be
        a mapping from names to these; the column `environment` then selects a name for each row. `arguments` are the keyword
        arguments with which an environment is created. `timeout` is the time limit of a tool call in seconds. `thread` runs
        `async` methods in an event loop of the conversation's own, in a thread, so that they may block. An instance that is
        used again then gets another loop.

        Raises ConfigError.
        """
        self._named = isinstance(environment, Mapping)
        several = environment if isinstance(environment, Mapping) else {"": environment}
        if not several:
            raise ConfigError("environment.arguments.environment is empty; name at least one environment")
        self._kinds = {name: _kind(value, arguments, timeout) for name, value in several.items()}
        self._thread = thread
        if thread:
            names = " and ".join(kind.maker.name for kind in self._kinds.values())
            refuse_unused_thread(names, [method for kind in self._kinds.values() for method in kind.methods])

    def __call__(self) -> Environment:
        return self.make(lambda tools, then: Tools(tools, then=then) if tools else then)

    def about(self) -> About:
        """What the classes bring."""
        return About(rows="as many as data.train names (empty:64); reset returns the prompt")

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """Rows without columns: `reset` returns the prompt. Raises DataError if the column `environment` must select a class."""
        if self._named:
            raise DataError(
                "the column `environment` selects a class, so the rows come from a data set: set data.train"
            )
        return ProvidedRows(records=({} for _ in range(count or (100 if held_out else 10_000))))

    def tools(self) -> Sequence[Tool]:
        """The tools of all classes, one for each name."""
        by_name = {tool.name: tool for kind in self._kinds.values() if kind.box is not None for tool in kind.box.tools}
        return tuple(by_name.values())

    def make(self, in_front: PutInFront) -> Environment:
        """An environment behind its own tools and the recipe's tools. The row determines its own tools."""
        return _Chosen(self._kind_of, in_front, thread=self._thread)

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

    def __init__(self, kind_of: Callable[[Row], tuple[_Kind, Row]], in_front: PutInFront, *, thread: bool) -> None:
        self._kind_of = kind_of
        self._in_front = in_front
        self._inner: _Played | None = None
        self._outer: Environment | None = None
        self._loop = OwnLoop("trl") if thread else None

    async def begin(self, row: Row) -> Opening:
        own_loop.set(self._loop)
        kind, row = self._kind_of(row)
        self._inner = _Played(kind)
        boxes = [] if kind.box is None else [replace(kind.box, make=self._inner.tools)]
        self._outer = self._in_front(boxes, self._inner)
        return await self._outer.begin(row)

    async def step(self, turn: Turn) -> Reply:
        assert self._outer is not None, "step before begin"
        return await self._outer.step(turn)

    async def final_reward(self) -> float | None:
        return None if self._inner is None else await self._inner.final_reward()

    def environment_handle(self) -> EnvironmentHandle | None:
        return None if self._inner is None else self._inner.environment_handle()

    async def close(self) -> None:
        with ending(self._loop):
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

    async def final_reward(self) -> float | None:
        if not self._kind.scores:
            return None
        reward = await self._foreign.ask(self._instance.get_reward)
        return None if reward is None else number(reward, f"{self._name}.get_reward")

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
    boxes: list[tuple[Toolbox | None, bool, list[Callable[..., Any]]]] = []

    def look(instance: Any) -> None:
        public = [
            name for name, _ in inspect.getmembers(type(instance), inspect.isfunction) if not name.startswith("_")
        ]
        methods = [getattr(instance, name) for name in public if name not in _NO_TOOLS]
        # these tools are read for their schemas only: each conversation calls the methods of its own instance
        tools = tuple(Tool.of(method, timeout=timeout) for method in methods)
        box = Toolbox(make=object, name=type(instance).__name__, tools=tools) if tools else None
        boxes.append((box, "get_reward" in public, [getattr(instance, name) for name in public]))

    first: list[Any] = []
    maker = ObjectFactory.of(reference, arguments, wants=("reset",), check=look, keep=first.append)
    ((box, scores, called),) = boxes
    return _Kind(maker, box, scores, InstancePool(maker.name, first), called)


def _with_trl_results(method: Callable[..., Any], running: list[str]) -> Callable[..., Any]:
    """The method with its result in TRL's form: content blocks are unchanged, any other value becomes `str(value)`."""
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def waiting(**arguments: Any) -> Any:
            with _listed(method.__name__, running):
                return _content(await call_async(lambda: method(**arguments), kind="tool"))

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


_Rewards = list[float | TypeError | None]
"""One item for each trajectory. None: the function does not apply. An error fails its trajectory."""
_KEY = "reward.batch.arguments.function"
_GIVEN = {"prompts", "completions", "completion_ids", "environments"}
_LOGS = {"log_extra", "log_metric"}
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class TrlReward:
    """Converts a TRL reward function to a reward function of the batch or of a group.

    None and NaN mean that the function does not apply to a conversation. Values that it logs with `log_extra` are recorded in
    the `info` of the last turn of each trajectory; those that it logs with `log_metric` are metrics of the trajectories.
    """

    def __init__(
        self, function: str | Callable[..., Any], *, arguments: Mapping[str, Any] | None = None, texts: bool = False
    ) -> None:
        """`function` is a function or a reference to a function. If `arguments` are given, it is called with them and must
        return the reward function. With `texts`, prompts and completions are texts, as TRL gives them for data whose prompts are
        texts: of the last message of the prompt, and of all that the model said.

        Raises ConfigError if the reward function cannot be called as TRL calls it, or needs the state of TRL's trainer.
        """
        reward = resolve(function, key=_KEY) if isinstance(function, str) else function
        if arguments is not None:
            reward = _constructed(reward, arguments)
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        if not callable(reward):
            raise ConfigError(
                f"{_KEY}: {function} is a {type(reward).__name__}; it must be a function of prompts, completions and columns"
            )
        parameters = inspect.signature(reward).parameters.values()
        self._all_columns = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}
        if not self._all_columns and not self._names & _GIVEN:
            raise ConfigError(
                f"{_KEY}: {self.__name__}({', '.join(parameter.name for parameter in parameters)}) has none of the parameters "
                f"{', '.join(sorted(_GIVEN))}, so it is not a reward function of TRL. If it returns a reward function, give its "
                f"arguments: arguments: {{function: ..., arguments: {{...}}}}"
            )
        needed = (
            one
            for one in parameters
            if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        )
        self.needed_columns = tuple(one.name for one in needed if one.name not in _GIVEN | _LOGS)
        self._needs_environments = any(
            parameter.name == "environments" and parameter.default is parameter.empty for parameter in parameters
        )
        if "trainer_state" in self._names:
            raise ConfigError(
                f"{_KEY}: {self.__name__} has the parameter trainer_state, the state of TRL's trainer, which "
                f"turnwise does not have: remove the parameter"
            )
        self._function = reward
        self._texts = texts

    def __call__(self, trajectories: Sequence[Trajectory]) -> _Rewards | Awaitable[_Rewards]:
        arguments = self._arguments(trajectories)
        with self._hint_at_texts():
            values = self._function(
                **{name: value for name, value in arguments.items() if self._all_columns or name in self._names}
            )
        return self._awaited(values) if inspect.isawaitable(values) else self._numbers(values)

    async def _awaited(self, values: Awaitable[Any]) -> _Rewards:
        with self._hint_at_texts():
            values = await values
        return self._numbers(values)

    @contextlib.contextmanager
    def _hint_at_texts(self) -> Iterator[None]:
        """Errors of a type may come from a function that is written for texts."""
        try:
            yield
        except (AttributeError, TypeError) as error:
            if self._texts:
                raise
            hint = "prompts and completions are lists of messages. For a function of texts, set texts: true in its arguments"
            error.args = (f"{error} ({hint})",)
            raise

    def _numbers(self, values: Any) -> _Rewards:
        who = f"the reward function {self.__name__}"
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise TypeError(
                f"{who} gave {values!r:.80}; it must return a list with a number, or None, for each conversation"
            )
        return [number_or_none(value, who) for value in values]

    def _arguments(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        def log_extra(column: str, values: Iterable[Any]) -> None:
            for trajectory, value in zip(trajectories, values, strict=True):
                _last_info(trajectory)[column] = value

        def log_metric(name: str, value: float) -> None:
            for trajectory in trajectories:
                trajectory.metrics[name] = reward_number(value, f"log_metric({name!r})")

        parted = _texts_of if self._texts else _parted
        prompts, completions = zip(*(parted(trajectory) for trajectory in trajectories), strict=True)
        names = dict.fromkeys(
            name for trajectory in trajectories for name in trajectory.row.fields if name not in _NOT_COLUMNS
        )
        arguments: dict[str, Any] = {
            name: [trajectory.row.fields.get(name) for trajectory in trajectories] for name in names
        }
        returned = [_returned_fields(trajectory) for trajectory in trajectories]
        for name in dict.fromkeys(name for fields in returned for name in fields):
            arguments[name] = [fields.get(name) for fields in returned]
        arguments |= {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [_completion_ids(trajectory) for trajectory in trajectories],
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        handles = [trajectory.environment for trajectory in trajectories]
        if all(handle is not None for handle in handles):
            arguments["environments"] = [handle.instance for handle in handles if handle is not None]
        elif self._needs_environments:
            raise TypeError(
                f"{self.__name__} needs `environments`, and the recipe's environment provides none; use "
                f"turnwise.compat.trl:TrlEnvironments"
            )
        return arguments


def _returned_fields(trajectory: Trajectory) -> Mapping[str, Any]:
    """The further fields that a `rollout_func` returned (`turnwise.compat.trl_rollout`)."""
    info = trajectory.turns[-1].info if trajectory.turns else {}
    return info.get("agent", {}).get("fields", {})


def _constructed(factory: Any, arguments: Mapping[str, Any]) -> Any:
    """The reward function that `factory` returns for the arguments. Raises ConfigError if it raises an exception."""
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        with boundary("reward"):
            return factory(**arguments)
    except Failed as failed:
        raise ConfigError(f"{_KEY}: {name} with the arguments {dict(arguments)}: {failed.failure.message}") from failed


def _parted(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """The prompt and the completion: the messages before the model's first turn, and the messages from that turn on.

    As in TRL, the model's texts are complete (reasoning included) without tools, and parsed with tools.
    """
    turns = {id(turn.message): turn for turn in trajectory.turns}
    messages = trajectory.messages
    first = next((n for n, message in enumerate(messages) if id(message) in turns), len(messages))
    completion = [dict(message) for message in messages[first:]]
    if not trajectory.tools:
        for message, copy in zip(messages[first:], completion, strict=True):
            if (turn := turns.get(id(message))) is not None:
                copy["content"] = turn.text
    return [dict(message) for message in messages[:first]], completion


def _texts_of(trajectory: Trajectory) -> tuple[str, str]:
    """The text of the prompt's last message, and what the model said in all turns."""
    prompt, _ = _parted(trajectory)
    content = prompt[-1].get("content") if prompt else None
    return content if isinstance(content, str) else "", "".join(turn.text for turn in trajectory.turns)


def _completion_ids(trajectory: Trajectory) -> list[int]:
    """The tokens of the last segment, from the first sampled token on."""
    if not trajectory.segments:
        return []
    segment = trajectory.segments[-1]
    first = next((n for n, turn in enumerate(segment.turn) if turn >= 0), len(segment))
    return list(segment.token_ids[first:])


def _last_info(trajectory: Trajectory) -> dict[str, Any]:
    return trajectory.turns[-1].info if trajectory.turns else {}
