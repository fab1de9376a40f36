"""The two kinds of agents: `Program`, a command that is started for each conversation, and `AgentFunction`, a Python function.

Both get a share of the server and make an environment for each conversation. Neither knows the loop: a request to the server
is a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from turnwise.environments.agents.containers import ContainerError, ContainerImage
from turnwise.environments.agents.environment import AgentConnection, AgentEnvironment, AgentError, AgentResult
from turnwise.environments.agents.proxy import Listening, ProxyLease
from turnwise.environments.environment import Environment, ModelPrompts
from turnwise.errors import ConfigError
from turnwise.types import Row
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import resolve
from turnwise.user_code.reward_number import reward_number
from turnwise.user_code.threads import run_in_thread

# what both kinds have in common


class AgentSource:
    """Makes the environments of an agent (an EnvironmentSource). Subclasses run the agent.

    Raises ConfigError if a time is negative, or the address of the server cannot be used.
    """

    def __init__(
        self, *, seconds_to_finish: float, seconds_for_rewards: float, server: Mapping[str, Any] | None = None
    ) -> None:
        for name, value in {
            "seconds_to_finish": seconds_to_finish,
            "seconds_for_rewards": seconds_for_rewards,
        }.items():
            if not value >= 0:
                raise ConfigError(f"{name}={value!r} must be at least 0")
        self._seconds_to_finish = seconds_to_finish
        self.seconds_for_rewards = seconds_for_rewards
        """How long a conversation may wait for rewards at its end."""
        self._lease = ProxyLease(Listening.of(server or {}))
        self._prompts: ModelPrompts | None = None

    def __call__(self) -> AgentEnvironment:
        """The environment of one conversation."""
        return AgentEnvironment(
            self,
            self._lease.proxy,
            seconds_to_finish=self._seconds_to_finish,
            seconds_for_rewards=self.seconds_for_rewards,
            prompts=self._prompts,
        )

    def use_prompts(self, prompts: ModelPrompts) -> None:
        """Refuse requests that the model cannot receive or follow, with the status 400."""
        self._prompts = prompts

    def tools(self) -> Sequence[Any]:
        """None: an agent offers its tools in its requests."""
        return ()

    def make(self, in_front: Callable[[Sequence[Any], Environment], Environment]) -> Environment:
        """The environment of one conversation, behind the recipe's tools."""
        return in_front((), self())

    async def aclose(self) -> None:
        """Stop the server, unless another environment source uses it."""
        await asyncio.to_thread(self._lease.release)

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """Run the agent of one conversation until it ends."""
        raise NotImplementedError


# programs

ProgramReward = Literal["reported", "exit_status", "json"]
_CHUNK = 1 << 16
_LAST_WORDS = 0.5  # seconds to read remaining output if a process that left the process group keeps the pipe open
_LONGEST_VARIABLE = 100_000  # bytes; Linux allows 128 KiB for one variable


class Program(AgentSource):
    """Starts a command for each conversation. The command is the environment: it leads the conversation with its requests.

    The program receives the variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`,
    `TURNWISE_URL` and `TURNWISE_ROW`, the row as JSON (empty if it has more than 100,000 bytes: `GET $TURNWISE_URL/row`).

    Args:
        command: The command line, or a list of the program and its arguments. It is not run in a shell.
        cwd: The working directory; None is that of turnwise, or with `image` that of the image.
        image: The container image that the command runs in, with docker or podman. None: it runs on this machine.
        image_options: Further options of `docker run`, such as `--memory=2g`. Containers share the network of this machine unless
            there is `--network`; with another network, set `server`.
        env: Further environment variables.
        reward: Where the reward comes from. `reported`: the program sends it (`POST $TURNWISE_URL/reward`), or a reward function
            computes it; an exit status other than 0 fails the conversation. `exit_status`: 1 for the exit status 0, 0 for the
            exit status 1; others fail the conversation. `json`: the last line that the program prints is a number, or a JSON
            object with the key `reward`. In all three cases reported rewards are added.
        output_chars: How many characters of the ends of stdout and stderr are recorded.
        seconds_to_finish: How long the program may run on after a limit of the recipe has ended the conversation.
        seconds_for_rewards: How long rewards may still be reported after the end of the agent.
        server: Where the server for agents listens: the arguments of `Listening.of`. None: a free port of 127.0.0.1.

    Raises ConfigError.
    """

    def __init__(
        self,
        *,
        command: str | Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        image: str | None = None,
        image_options: Sequence[str] = (),
        reward: ProgramReward = "reported",
        output_chars: int = 4000,
        seconds_to_finish: float = 10.0,
        seconds_for_rewards: float = 0.0,
        server: Mapping[str, Any] | None = None,
    ) -> None:
        self._command = _words(command)
        _check_options(reward, output_chars)
        self._image: ContainerImage | None = None
        if image is not None:
            self._image = ContainerImage.of(image, image_options, variables=env or {})
        elif image_options:
            raise ConfigError("image_options has no effect without image: name an image, or remove it")
        else:
            _check_command(self._command, cwd)
        self._cwd, self._env = cwd, {name: str(value) for name, value in (env or {}).items()}
        self._reward: ProgramReward = reward
        self._output_chars = output_chars
        super().__init__(seconds_to_finish=seconds_to_finish, seconds_for_rewards=seconds_for_rewards, server=server)

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """Run the program until it ends. Raises RuntimeError if it fails."""
        variables = {**self._env, **_variables(row_json, connection)}
        if self._image is None:
            status, out, errors = await self._output_of(self._command, cwd=self._cwd, variables=variables)
        else:
            async with self._image.container(self._command, cwd=self._cwd, variables=variables) as container:
                status, out, errors = await self._output_of(container.start_command)
                if status != 0 and not await asyncio.to_thread(container.was_started):
                    raise ContainerError(f"the program {self._command[0]!r} was not started in its container: {errors}")
        info = {"exit_status": status, "stdout": out, "stderr": errors}
        info = {name: value for name, value in info.items() if value != ""}
        reward, more = self._result(status, out, errors)
        return AgentResult(reward=reward, info={**info, **more})

    async def _output_of(
        self, command: Sequence[str], *, cwd: str | None = None, variables: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a command until it ends: its status, and the ends of stdout and stderr."""
        async with _output(self._output_chars) as out, _output(self._output_chars) as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out.writer,
                stderr=errors.writer,
                cwd=cwd,
                env={**os.environ, **(variables or {})},
                start_new_session=True,
            )
            out.close_writer()
            errors.close_writer()
            try:
                status = await process.wait()
            finally:
                await asyncio.shield(_end(process))
            await out.finish()
            await errors.finish()
        return status, out.text(), errors.text()

    async def aclose(self) -> None:
        await super().aclose()
        if self._image is not None:
            await asyncio.to_thread(self._image.close)

    def _result(self, status: int, out: str, errors: str) -> tuple[float | None, Mapping[str, Any]]:
        """The reward of a program that has ended, and further values of its result."""
        if self._reward == "exit_status" and status in (0, 1):
            return 1.0 - status, {}
        if status != 0:
            last = (errors or out).strip()[-1500:]
            how = f"was killed by signal {-status}" if status < 0 else f"ended with the exit status {status}"
            raise AgentError(f"the program {self._command[0]!r} {how}. Its last output: {last}")
        if self._reward != "json":
            return None, {}
        line = out.strip().rpartition("\n")[2]
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        result = value if isinstance(value, dict) else {"reward": value}
        reward = result.get("reward")
        if not isinstance(reward, int | float):
            raise AgentError(
                f"with reward=json the last line that the program prints must be a number, or a JSON object with the key "
                f"`reward`; it is {line!r:.200}"
            )
        return float(reward), {"result": result} if result is value else {}


def _words(command: str | Sequence[str]) -> list[str]:
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except ValueError as error:
        raise ConfigError(f"command={command!r:.200} cannot be split into words: {error}") from None
    if not words:
        raise ConfigError("command is empty; give the program and its arguments, for example: python agent.py")
    return words


def _check_options(reward: str, output_chars: int) -> None:
    if reward not in get_args(ProgramReward):
        raise ConfigError(f"reward={reward!r} is not known; choose {', '.join(get_args(ProgramReward))}")
    if not isinstance(output_chars, int) or output_chars < 0:
        raise ConfigError(f"output_chars={output_chars!r} must be an integer of at least 0")


def _check_command(command: Sequence[str], cwd: str | None) -> None:
    if cwd is not None and not os.path.isdir(cwd):
        raise ConfigError(f"cwd={cwd!r}: there is no such directory")
    place = os.path.join(cwd, command[0]) if cwd is not None and os.sep in command[0] else command[0]
    if shutil.which(place) is None:
        raise ConfigError(f"the program {command[0]!r} does not exist or cannot be executed; give its path")


def _variables(row_json: str, connection: AgentConnection) -> dict[str, str]:
    fits = len(row_json.encode()) <= _LONGEST_VARIABLE
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]))
    return {
        "OPENAI_BASE_URL": connection.openai_url,
        "OPENAI_API_KEY": connection.key,
        "ANTHROPIC_BASE_URL": connection.url,
        "ANTHROPIC_API_KEY": connection.key,
        "TURNWISE_URL": connection.openai_url,
        "TURNWISE_ROW": row_json if fits else "",
        "NO_PROXY": no_proxy,  # requests to this machine must not go through a proxy
        "no_proxy": no_proxy,
    }


class _Output:
    """The end of what a program prints."""

    def __init__(self, reader: asyncio.StreamReader, writer: int, most: int) -> None:
        self.writer = writer
        self._open = True
        self._last = bytearray()
        self._most = 4 * most  # bytes of that many characters
        self._chars = most
        self._reading = asyncio.ensure_future(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(_CHUNK):
            self._last += chunk
            del self._last[: max(0, len(self._last) - self._most)]

    def close_writer(self) -> None:
        """Close our copy of the end that the program writes to."""
        if self._open:
            self._open = False
            os.close(self.writer)

    async def finish(self) -> None:
        """Read what is left."""
        await asyncio.wait({self._reading}, timeout=_LAST_WORDS)

    def stop(self) -> None:
        self.close_writer()
        self._reading.cancel()

    def text(self) -> str:
        """The last characters."""
        text = self._last.decode("utf-8", errors="replace")
        return text[len(text) - self._chars :] if len(text) > self._chars else text


@contextlib.asynccontextmanager
async def _output(most: int) -> AsyncIterator[_Output]:
    """A pipe for the output of a program.

    The pipes of asyncio's processes are not used: their `wait` also waits until all descendants have closed the pipes.
    """
    end, writer = os.pipe()
    reader = asyncio.StreamReader(limit=_CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", buffering=0)
    )
    output = _Output(reader, writer, most)
    try:
        yield output
    finally:
        output.stop()
        transport.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the program's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


# functions


class AgentFunction(AgentSource):
    """Calls a function for each conversation. The function leads the conversation with requests to `base_url`.

    Example::

        async def solve(row, base_url, api_key):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            answer = await client.chat.completions.create(model="model", messages=row.messages)
            return float("42" in answer.choices[0].message.content)

    Args:
        function: A function `(row, base_url, api_key)`, or a reference to one such as `agent.py:solve`. A function without
            `async` runs in a thread. It returns the reward, a dictionary with the key `reward`, or None.
        arguments: Further keyword arguments of the function.
        seconds_to_finish: How long the function may run on after a limit of the recipe has ended the conversation.
        seconds_for_rewards: How long rewards may still be reported after the end of the agent.
        server: Where the server for agents listens: the arguments of `Listening.of`. None: a free port of 127.0.0.1.

    Raises ConfigError.
    """

    def __init__(
        self,
        *,
        function: str | Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        seconds_to_finish: float = 10.0,
        seconds_for_rewards: float = 0.0,
        server: Mapping[str, Any] | None = None,
    ) -> None:
        key = "environment.arguments.function"
        target = resolve(function, key=key) if isinstance(function, str) else function
        self.name = function if isinstance(function, str) else getattr(function, "__qualname__", "the function")
        arguments = dict(arguments or {})
        try:
            inspect.signature(target).bind("row", base_url="", api_key="", **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{key}: {self.name} cannot be called with (row, base_url=..., api_key=..., **{arguments}): {error}"
            ) from None
        self._function: Callable[..., Any] = target
        self._arguments = arguments
        self._async = inspect.iscoroutinefunction(target)
        super().__init__(seconds_to_finish=seconds_to_finish, seconds_for_rewards=seconds_for_rewards, server=server)

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """Call the function. Raises what it raises."""
        arguments = copy_containers(self._arguments)  # each conversation has its own
        call = functools.partial(
            self._function, row, base_url=connection.openai_url, api_key=connection.key, **arguments
        )
        result = await call() if self._async else await run_in_thread(call, name=self.name, kind="environment")
        if isinstance(result, Awaitable):
            result = await result
        if result is None:
            return AgentResult()
        values = result if isinstance(result, Mapping) else {"reward": result}
        if "reward" not in values:
            raise ValueError(
                f"{self.name} returned {result!r:.200}; it must return a number, None, or a dictionary with the key `reward`"
            )
        reward = reward_number(values["reward"], f"the result of {self.name}")
        return AgentResult(reward=reward, info={"result": dict(values)} if isinstance(result, Mapping) else {})
