"""`environment: verifiers_v1:NAME`: a taskset of verifiers 0.4 with its harness, tools and rewards.

Each conversation is one episode of the library's `SingleAgentEnv`. The harness, also one that is a program, sends its requests to
the library's interception server, which runs in this process and asks a client for the model's turn. The client here hands the
request to the conversation, as that of an agent in this process: no server of turnwise, and the tokens of the session are those
that were sampled. Servers and episodes run in one event loop of a thread of their own.

The server has a client for each configuration of a client (`InterceptionServer.clients`), so each conversation has its own: one
of the type `train`, which the server asks for complete turns and whose streams it writes itself."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.compat.object_factory import number, plain
from turnwise.compat.providers.library_thread import LibraryRollouts
from turnwise.compat.providers.provider import About
from turnwise.compat.providers.verifiers import dependent_distributions
from turnwise.data.rows import ProvidedRows
from turnwise.environments.agents.anthropic_messages import AnthropicMessages
from turnwise.environments.agents.chat_completions import ChatCompletions
from turnwise.environments.agents.environment import AgentConnection, AgentError, AgentResult
from turnwise.environments.agents.proxy import Dialect, or_refused
from turnwise.environments.agents.requests import AgentConversation, Refused
from turnwise.environments.agents.responses import Responses
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Row
from turnwise.user_code.calls import forget

_ENDED = 410
"""The status of a request after the end of the conversation."""
_DIALECTS: Mapping[str, Dialect] = {
    "ChatDialect": ChatCompletions(),
    "ResponsesDialect": Responses(),
    "AnthropicDialect": AnthropicMessages(),
}
"""Our reading of the requests of the library's dialects."""
_ENDLESS = 10_000
"""The rows of a taskset without an end, if the recipe gives no number."""
_OF_THE_RECIPE = ("model", "client", "sampling")
"""Options of an agent that the recipe decides."""


class VerifiersTaskset(LibraryRollouts):
    """Makes conversations about the tasks of a taskset (an EnvironmentSource with rows).

    Args:
        name: An installed taskset, or a file: `sums.py`, or `sums/__init__.py` for a package.
        arguments: Options of the taskset.
        eval_arguments: Those that differ for held-out rows, such as `{split: test}`. Null: the held-out rows are the same tasks.
        agent: Options of the library's agent: `{harness: {id: "null"}, runtime: {type: docker}, max_turns: 10, timeout: ...}`.
            Null: the taskset's harness, or `bash` if it has none, in processes of this machine.
        unsandboxed: Allow a harness that runs what the model writes in processes of this machine.
        seconds_to_finish: How long the task may score and clean up after a limit of the recipe has ended the conversation.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        eval_arguments: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        unsandboxed: bool = False,
        seconds_to_finish: float = 60.0,
    ) -> None:
        super().__init__(f"verifiers_v1:{name}", seconds_to_finish)
        self.name = name
        self._env, taskset = _load(name, dict(arguments or {}), dict(agent or {}))
        _refuse_harness(name, self._env, unsandboxed=unsandboxed)
        self._tasks = {False: _Tasks(self._env.taskset)}
        self._tasks[True] = _Tasks(taskset(eval_arguments)) if eval_arguments is not None else self._tasks[False]
        self._serving = _Serving(self._env)
        self._numbers = itertools.count()

    @classmethod
    def names(cls) -> Sequence[str]:
        """The installed distributions that require verifiers."""
        return dependent_distributions()

    def about(self) -> About:
        """What the taskset brings."""
        return About(
            rows="those of its taskset" if self._tasks[False].taskset.bounded else "endless",
            rewards=_reward_names(self._env) or ["environment"],
        )

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """A row for each task."""
        tasks, held = self._tasks[held_out], {"held_out": True} if held_out else {}
        if count is None and not tasks.taskset.bounded:
            count = _ENDLESS
        with boundary("environment"):
            found = tasks.first(count)
        return ProvidedRows(records=({"task": n, **_named(task), **held} for n, task in enumerate(found)))

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """One episode and its rewards. Raises AgentError with the library's error."""
        index = row["task"]
        task = self._tasks[bool(row.fields.get("held_out"))].at(index)
        if task is None:
            raise AgentError(f"row {row.id!r} has task={index!r:.80}, and verifiers_v1:{self.name} has no such task")
        return self._result(await self.in_library(partial(self._episode, task, connection.conversation)))

    async def aclose(self) -> None:
        """Wait for episodes that clean up, and end the library's servers."""
        await self._thread.close(self._serving.end)

    async def _episode(self, task: Any, conversation: AgentConversation) -> Any:
        """One episode, in the library's thread."""
        server = await self._serving.server()
        library = _library("clients"), _library("configs.client")
        # the base URL is asked for nothing but the list of models, whose failure the harnesses expect
        config = library[1].TrainClientConfig(
            base_url="http://127.0.0.1:9", headers={"X-Turnwise-Conversation": str(next(self._numbers))}
        )
        key = config.model_dump_json()
        server.clients[key] = _client_class()(conversation, server)
        try:
            return await self._env.run_episode(task, library[0].ModelContext(model="model", client=config))
        finally:
            del server.clients[key]

    def _result(self, episode: Any) -> AgentResult:
        """The rewards of an episode. Raises AgentError if it failed, or if one of its rewards was not given."""
        errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
        if not episode.ok or len(episode.traces) != 1:
            told = f"{errors[-1].type}: {errors[-1].message}" if errors else f"{len(episode.traces)} traces"
            raise AgentError(f"verifiers_v1:{self.name} failed: {told}")
        (trace,) = episode.traces
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise AgentError(f"verifiers_v1:{self.name}: the reward {missing[0]!r} was not given")
        parts = {
            name: number(reward.value, f"the reward {name!r} of verifiers_v1:{self.name}")
            for name, reward in trace.rewards.items()
        }
        return AgentResult(
            rewards=parts, info={"stop_condition": trace.stop_condition, "metrics": plain(dict(trace.metrics))}
        )


# loading


def _library(module: str) -> Any:
    """A module of the library, which need not be installed where types are checked."""
    return importlib.import_module(f"verifiers.v1.{module}")


def _load(name: str, arguments: dict[str, Any], agent: dict[str, Any]) -> tuple[Any, Any]:
    """The library's environment, and a function from other options to another taskset. Raises ConfigError."""
    installed = importlib.metadata.version("verifiers")
    if tuple(map(int, installed.split(".")[:2])) != (0, 4):
        raise ConfigError(
            f"environment: verifiers_v1:{name} needs verifiers 0.4, and {installed} is installed: "
            f"pip install 'turnwise[verifiers_v1]'"
        )
    if given := [key for key in _OF_THE_RECIPE if key in agent]:
        raise ConfigError(f"environment.arguments.agent.{given[0]} has no effect: the recipe decides; remove it")
    if name.endswith(".py"):
        name = _importable(name)
    # its warnings are of requests that failed, also at a limit of the recipe; a failure is that of the conversation
    logging.getLogger("verifiers.v1.interception.server").setLevel(logging.ERROR)
    agent = {"runtime": {"type": "subprocess"}, **agent}

    def other(changed: Mapping[str, Any]) -> Any:
        loaders = _library("utils.loaders")
        with _told(name):
            config = loaders.taskset_config_type(name).model_validate({"id": name, **arguments, **changed})
            return loaders.load_taskset(config)

    with _told(name):
        loaders = _library("utils.loaders")
        if loaders.environment_class(name) is not _library("envs.single_agent").SingleAgentEnv:
            raise ConfigError(
                f"environment: verifiers_v1:{name} has an environment of its own, with several agents: run it as an agent on the "
                f"recipe's server (docs/agents.md)"
            )
        given = {"taskset": {"id": name, **arguments}, "agent": agent, "interception": {"type": "server"}}
        return loaders.load_environment(loaders.resolve_env_config(given)), other


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Errors inside become ConfigError, with the most similar name for a taskset that is not there."""
    try:
        with boundary("environment"):
            yield
    except Failed as failed:
        if isinstance(failed.__cause__, ConfigError):
            raise failed.__cause__ from None
        absent = isinstance(failed.__cause__, ModuleNotFoundError)
        known = nearest(name, dependent_distributions()) if absent else ""
        hint = f"{known}; `turnwise envs verifiers_v1` lists the installed ones" if absent else ""
        raise ConfigError(
            f"environment: verifiers_v1:{name} cannot be loaded: {failed.failure.message}{hint}"
        ) from failed


def _importable(file: str) -> str:
    """The module of a file, whose folder is put on the path. Raises ConfigError."""
    path = Path(file).absolute()
    if not path.is_file():
        raise ConfigError(f"environment: verifiers_v1:{file}: there is no such file")
    path = path.parent if path.name == "__init__.py" else path
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return path.stem


def _refuse_harness(name: str, env: Any, *, unsandboxed: bool) -> None:
    """Raises ConfigError for a harness that runs what the model writes on this machine, unless that is allowed."""
    runtimes = _library("runtimes")
    (role,) = env._agent_specs
    harness, runtime = env._harnesses[role], env._agent_specs[role].runtime
    runs_here = harness.EXECUTES_CODE and isinstance(runtime, runtimes.SubprocessConfig)
    if runs_here and not unsandboxed:
        raise ConfigError(
            f"environment: verifiers_v1:{name}: the harness {harness.config.id!r} runs what the model writes in processes "
            f"of this machine, without a sandbox: set environment.arguments.agent.runtime to {{type: docker}}, another harness "
            f'(agent: {{harness: {{id: "null"}}}} only talks), or unsandboxed: true'
        )
    if unsandboxed and not runs_here:
        raise ConfigError(
            f"environment.arguments.unsandboxed has no effect: verifiers_v1:{name} runs no code on this machine; remove it"
        )


def _reward_names(env: Any) -> list[str]:
    """The names of the rewards of the taskset's tasks."""
    kind = type(env.taskset).task_type()
    return [name for name in dir(kind) if getattr(getattr(kind, name, None), "reward", False)]


class _Tasks:
    """The tasks of a taskset, which are made when they are asked for."""

    def __init__(self, taskset: Any) -> None:
        self.taskset = taskset
        self._made: list[Any] = []
        self._rest: Iterator[Any] | None = None

    def first(self, count: int | None) -> Sequence[Any]:
        """The first tasks, or all."""
        if self._rest is None:
            self._rest = iter(self.taskset)
        wanted = None if count is None else max(0, count - len(self._made))
        self._made.extend(itertools.islice(self._rest, wanted))
        return self._made[:count]

    def at(self, index: object) -> Any:
        """The task with this number; None if there is none."""
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            return None
        return self.first(index + 1)[index] if len(self.first(index + 1)) > index else None


def _named(task: Any) -> dict[str, Any]:
    """What a task is called."""
    found = {"task_id": task.data.id, "task_name": task.data.name}
    return {key: value for key, value in found.items() if value is not None}


# servers


class _Serving:
    """The servers of the library's environment, which begin with the first conversation. All methods run in the library's
    thread."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._keeper: asyncio.Task[None] | None = None

    async def server(self) -> Any:
        """The interception server, when it runs."""
        if self._keeper is None:
            self._up: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._over = asyncio.Event()
            self._keeper = asyncio.create_task(self._keep())
        return await asyncio.shield(self._up)

    async def end(self) -> None:
        """End them."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._over.set()
            await keeper

    async def _keep(self) -> None:
        # entered and left in one task, as cancel scopes of the library need
        try:
            with boundary("environment"):
                async with self._env.serving():
                    self._up.set_result(self._env._interception)
                    await self._over.wait()
        except Failed as failed:
            if self._up.done():
                raise
            self._up.set_exception(failed)
            forget(self._up)  # whoever waits for it may be gone
            self._keeper = None  # the next conversation tries again


# the model's turns


def _client_class() -> type[Any]:
    """The client class, made when the library is there."""
    clients, errors = _library("clients"), _library("errors")

    class TasksetClient(clients.Client):  # type: ignore[misc, name-defined]
        """Hands the requests of one episode to its conversation, whose event loop is another one."""

        def __init__(self, conversation: AgentConversation, server: Any) -> None:
            self._conversation, self._server = conversation, server

        async def get_response(
            self,
            dialect: Any,
            body: dict[str, Any],
            sampling: Any,
            session_id: str | None = None,
            turn: Any = None,
            headers: Any = None,
        ) -> Any:
            own = _DIALECTS[type(dialect).__name__]
            try:
                request = or_refused(lambda: own.read(body))
                asked = asyncio.run_coroutine_threadsafe(self._conversation.ask(request), self._conversation.loop)
                answer = await asyncio.wrap_future(asked)
            except Refused as refused:
                status = refused.status
                if status == _ENDED:  # the library scores an episode that was stopped
                    status, session = 400, self._server.state_routes.get(session_id)
                    if session is not None:
                        session.trace.stop("limit_of_the_recipe")
                raise errors.ProviderError(refused.message, status_code=status) from refused
            raw = own.answer(request, answer)
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    return TasksetClient
