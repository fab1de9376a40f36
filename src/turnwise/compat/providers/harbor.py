"""`environment: harbor:tasks`: a folder of tasks in Harbor's format, with a sandbox for each conversation and rewards from tests.

The model has a shell and an editor in the sandbox of its conversation. When a turn has no call, or a limit ends the conversation,
the task's tests are copied into the sandbox and run, and the file that they write is the reward. `harbor_tasks.py` reads the
tasks; `environments/sandbox/machine.py` has the sandboxes. Only Harbor's own backends need the package `harbor`."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from turnwise.compat.object_factory import opened
from turnwise.compat.providers.harbor_containers import find_tool
from turnwise.compat.providers.harbor_package import HarborSandboxes, PackageBackend, is_of_package, refuse_bounds
from turnwise.compat.providers.harbor_registry import dataset_folder, is_dataset
from turnwise.compat.providers.harbor_sandboxes import ContainerSandboxes, HarborError, JailSandboxes, Sandboxes
from turnwise.compat.providers.harbor_tasks import (
    HarborTask,
    ImagePlan,
    Unfit,
    find_tasks,
    plan_of,
    read_task,
)
from turnwise.compat.providers.provider import About, LibraryEnvironments
from turnwise.data.rows import ProvidedRows
from turnwise.environments.environment import Environment, PutInFront
from turnwise.environments.sandbox.machine import Machine, tar_of
from turnwise.environments.sandbox.process import Bounds, Ran
from turnwise.environments.tools.tool import Tool
from turnwise.errors import ConfigError, nearest
from turnwise.types import Opening, Reply, Row, Turn

_DEFAULTS = {"seconds": 60.0, "memory_mb": 2048, "processes": 128, "disk_mb": 256, "files": 10_000, "open_files": 256}
"""Bounds of the sandbox that differ from those of a program alone."""
_CLEAN = (
    'for place in /tests /logs/verifier; do rm -rf "$place" 2>/dev/null; mkdir -p "$place" || exit 1; '
    '[ -z "$(ls -A "$place")" ] || exit 1; done; chmod 777 /logs/verifier'
)
"""Run as root, for tests of any user."""
_BASH = 'command -v bash > /dev/null && exec bash -c "$1"; exec sh -c "$1"'
"""Some images have no bash."""
_LONG_BASH = """\
set -- 'script=$(cat); exec < /dev/null; eval "$script"'
command -v bash > /dev/null && exec bash -c "$1"; exec sh -c "$1"
"""
"""The command is the standard input."""
_LONGEST_WORD = 100_000  # bytes; Linux has a bound of 131,071
_TEST = "chmod +x /tests/test.sh; exec /tests/test.sh"
_NO_REWARD = 44  # an exit status
_REWARD = (
    f"cd /logs/verifier || exit {_NO_REWARD}; for name in reward.json reward.txt; do "
    f'if [ -f "$name" ]; then echo "$name"; head -c 65536 "$name"; exit 0; fi; done; exit {_NO_REWARD}'
)
_LONGEST_FILE = 1_000_000  # bytes of a file in the editor
_MOST_REWARDS, _LONGEST_NAME = 100, 100  # of the rewards in reward.json
_LARGEST = sys.float_info.max
_SHOWN = 2000  # characters of the tests' output that are recorded


def _refuse_wrong(max_concurrent: int, registry: str | None, names: Sequence[str]) -> None:
    """Raise ConfigError for arguments that are wrong, or have no effect, with every backend."""
    if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 1:
        raise ConfigError(
            f"environment.arguments.max_concurrent is {max_concurrent!r:.80}; it must be an integer of at least 1"
        )
    if registry is not None and not any(is_dataset(one) for one in names):
        raise ConfigError(
            f"environment.arguments.registry has no effect: {names[0]} is no data set (NAME@VERSION); remove it"
        )


def _refuse_of_backend(network: bool | None, keep_processes: bool, *, in_jails: bool, of_package: bool) -> None:
    """Raise ConfigError for arguments that have no effect with the chosen backend."""
    if network not in (None, False) or (network is False and in_jails):
        raise ConfigError(
            f"environment.arguments.network is {network!r:.80}; with containers it may be false; a jail has none, so leave it out"
        )
    if keep_processes and (in_jails or of_package):
        why = (
            "in a jail no process outlives its command" if in_jails else "backends of Harbor's package keep them always"
        )
        raise ConfigError(f"environment.arguments.keep_processes has no effect: {why}; remove it")


class Harbor(LibraryEnvironments):
    """Makes conversations about the tasks of a folder (an EnvironmentSource with rows).

    Args:
        name: A folder of tasks, or of one task; or a data set of Harbor's registry, such as `terminal-bench@2.0`.
        eval_tasks: The same, with other tasks, for held-out rows.
        backend: `docker` or `podman`: a container for each conversation. `jail`: the sandbox of this machine, for tasks whose
            Dockerfile it can follow. Null: `docker` if its service answers, else `jail`. One of Harbor's own (`daytona`, ...,
            `harbor:docker`, or `module:Class`): an environment of its package for each conversation.
        python: The Python that has the package `harbor`, for its backends; null: the one that runs turnwise.
        backend_options: Further options of a backend of the package.
        bounds: Limits of each command: those of the sandbox (docs/sandbox.md). A task that asks for less memory gets less.
        max_concurrent: Commands that run in jails at the same time, or containers that are there at the same time; others wait.
        network: False: containers have no network. Null: as each task says.
        keep_processes: What the model leaves running in a container is there during the tests, such as a server that they need.
            It may change the file of the reward.
        skip_unfit: Leave out the tasks that cannot be run here, instead of refusing the folder.
        weights: The factors of the rewards in `reward.json` by their names; those without one have the factor 0. Null: `reward`
            if it is there, else all of them with the factor 1.
        registry: The path or URL of another registry.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        eval_tasks: str | None = None,
        backend: str | None = None,
        python: str | None = None,
        backend_options: Mapping[str, Any] | None = None,
        bounds: Mapping[str, float] | None = None,
        max_concurrent: int = 8,
        skip_unfit: bool = False,
        weights: Mapping[str, float] | None = None,
        network: bool | None = None,
        keep_processes: bool = False,
        registry: str | None = None,
    ) -> None:
        of_package = is_of_package(backend)
        if of_package:
            refuse_bounds(bounds or {})
        elif python is not None or backend_options is not None:
            raise ConfigError(
                f"environment.arguments.{'backend_options' if python is None else 'python'} has no effect without a backend of "
                f"Harbor's package, such as backend=daytona: remove it"
            )
        self.name = name
        _refuse_wrong(max_concurrent, registry, (name, eval_tasks or ""))
        given = {**_DEFAULTS, **(bounds or {})}
        self.bounds = Bounds.of(given)
        if "cpu_seconds" not in given:  # builds and tests compute for as long as they may take
            self.bounds = replace(self.bounds, cpu_seconds=math.ceil(self.bounds.seconds))
        self.weights = None if weights is None else _weights(weights)
        tool, why = (None, "") if of_package or backend == "jail" else find_tool(backend or "docker")
        if backend in ("docker", "podman") and tool is None:
            raise ConfigError(f"environment.arguments.backend={backend}: {why}")
        in_jails = tool is None and not of_package
        _refuse_of_backend(network, keep_processes, in_jails=in_jails, of_package=of_package)
        self.keep_processes = keep_processes
        plans: dict[str, ImagePlan] | None = {} if in_jails else None
        self._tasks: dict[bool, dict[str, HarborTask]] = {False: {}, True: {}}
        self._unfit: dict[str, str] = {}
        for held_out, folder in ((False, name), (True, eval_tasks)):
            if folder is not None:
                found = str(dataset_folder(folder, registry)) if is_dataset(folder) else folder
                self._read(found, held_out, plans)
        if (self._unfit and not skip_unfit) or not self._tasks[False]:
            raise ConfigError(_unfit_message(name, self._unfit, len(self._tasks[False]), asked=backend))
        self.sandboxes: Sandboxes
        if plans is not None:
            self.sandboxes = JailSandboxes(plans, self.bounds, max_concurrent)
        elif tool is not None:
            self.sandboxes = ContainerSandboxes(tool, self.bounds, max_concurrent, network=network is not False)
        else:
            own = PackageBackend(
                str(backend), os.path.expanduser(python or sys.executable), dict(backend_options or {})
            )
            self.sandboxes = HarborSandboxes(own, self.bounds, max_concurrent, network=network is not False)

    def _read(self, folder: str, held_out: bool, plans: dict[str, ImagePlan] | None) -> None:
        root = Path(folder).expanduser()
        for found in find_tasks(folder):
            name = str(found.relative_to(root)) if found != root else found.resolve().name
            try:
                task = read_task(found, name)
                if plans is not None:
                    plans[str(found)] = plan_of(task)
                self._tasks[held_out][name] = task
            except Unfit as problem:
                self._unfit[name] = str(problem)

    def about(self) -> About:
        """What the tasks bring."""
        left = f" ({len(self._unfit)} cannot be run here)" if self._unfit else ""
        names = [name for name, weight in self.weights.items() if weight] if self.weights else ["environment"]
        return About(rows=f"{len(self._tasks[False])} tasks{left}", rewards=names)

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """A row for each task."""
        if held_out and not self._tasks[True]:
            raise ConfigError(
                f"harbor:{self.name} has no held-out tasks: set environment.arguments.eval_tasks to another folder, or name a "
                f"file in data.eval"
            )
        held = {"held_out": True} if held_out else {}
        return ProvidedRows(records=({"task": name, **held} for name in list(self._tasks[held_out])[:count]))

    def task(self, row: Row) -> HarborTask:
        """The task of a row. Raises ValueError."""
        tasks, name = self._tasks[bool(row.fields.get("held_out"))], row["task"]
        if name not in tasks:
            raise ValueError(f"row {row.id!r} has task={name!r:.200}; there is no such task{nearest(str(name), tasks)}")
        return tasks[name]

    def tools(self) -> Sequence[Tool]:
        """A shell and an editor."""
        return _Conversation(self).tools()

    def make(self, in_front: PutInFront) -> Environment:
        """A conversation about a task, behind the recipe's tools."""
        conversation = _Conversation(self)
        return in_front(conversation.tools(), conversation)

    async def aclose(self) -> None:
        """Remove what is left."""
        await self.sandboxes.aclose()


def _weights(given: Mapping[str, float]) -> dict[str, float]:
    wrong = [
        name
        for name, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    ]
    if wrong or not given:
        raise ConfigError(
            f"environment.arguments.weights is {dict(given)!r:.80}; it must have numbers by the names of rewards"
        )
    return {str(name): float(value) for name, value in given.items()}


def _unfit_message(name: str, unfit: Mapping[str, str], fit: int, *, asked: str | None) -> str:
    shown = [f"{task}: {why}" for task, why in list(unfit.items())[:5]]
    more = [f"and {len(unfit) - 5} more"] if len(unfit) > 5 else []
    leave = f"leave these out with environment.arguments.skip_unfit ({fit} remain)" if fit else "none remains"
    if asked is None and find_tool("podman")[0] is not None:
        leave += ", or set environment.arguments.backend=podman"
    where = "in the sandbox of this machine" if asked in (None, "jail") else f"with {asked}"
    return (
        f"environment: harbor:{name}: {len(unfit)} task{'s' * (len(unfit) != 1)} cannot be run {where}; {leave}:\n  "
        + ("\n  ".join([*shown, *more]))
    )


# one conversation


class _Conversation:
    """One task, in a sandbox of its own."""

    def __init__(self, source: Harbor) -> None:
        self._source = source
        self._task: HarborTask | None = None
        self._open: Machine | None = None

    def tools(self) -> list[Tool]:
        """What the model can call."""
        # the editor runs two commands
        seconds = 2 * self._source.bounds.seconds + 60
        return [Tool.of(self.bash, timeout=seconds), Tool.of(self.str_replace_editor, timeout=seconds)]

    @property
    def _machine(self) -> Machine:
        assert self._open is not None, "a call before begin"
        return self._open

    async def begin(self, row: Row) -> Opening:
        self._task = task = self._source.task(row)
        self._open = await self._source.sandboxes.machine(task)
        return Opening(messages=opened(row.messages, task.instruction))

    async def step(self, turn: Turn) -> Reply:
        return await self._tested()

    async def final_reply(self, turn: Turn) -> Reply:
        """The tests also decide about a conversation that a limit has ended."""
        return await self._tested()

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()

    # tools

    async def bash(self, command: str) -> str:
        """Run a command in bash, in a new shell in the working directory. Files are kept for later calls, variables and running
        processes are not.

        Args:
            command: The command. It has no terminal and no standard input.
        """
        if len(script := command.encode("utf-8", errors="replace")) > _LONGEST_WORD:
            ran = await self._machine.run(["/bin/sh", "-c", _LONG_BASH], given=script)
        else:
            ran = await self._machine.run(["/bin/sh", "-c", _BASH, "sh", command])
        return ran.text_for_model()

    async def str_replace_editor(
        self,
        command: Literal["view", "create", "str_replace", "insert"],
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        insert_text: str | None = None,
        view_range: list[int] | None = None,
    ) -> str:
        """View, create and edit text files.

        Args:
            command: view shows a file with line numbers, or the names in a directory. create writes a file, also over an old one.
                str_replace replaces a text that occurs once. insert adds a text after a line.
            path: The path of the file or directory.
            file_text: For create: the content of the file.
            old_str: For str_replace: the text to replace, exactly as it stands in the file.
            new_str: For str_replace: the new text. Left out: the old text is removed.
            insert_line: For insert: the number of the line after which the text is added; 0 adds at the beginning.
            insert_text: For insert: the text.
            view_range: For view: the first and the last line; -1 is the end of the file.
        """
        if command == "view":
            return await self._view(path, view_range)
        if command == "create":
            if file_text is None:
                raise ValueError("create needs file_text")
            return await self._write(path, file_text, "The file was written")
        text = await self._read(path)
        if command == "str_replace":
            if not old_str:
                raise ValueError("str_replace needs old_str")
            if (count := text.count(old_str)) != 1:
                raise ValueError(f"old_str occurs {count} times in {path}; it must occur once: nothing was changed")
            return await self._write(path, text.replace(old_str, new_str or ""), "The file was edited")
        lines = text.splitlines(keepends=True)
        if insert_text is None or insert_line is None or not 0 <= insert_line <= len(lines):
            raise ValueError(f"insert needs insert_text, and insert_line from 0 to {len(lines)}")
        if insert_line and not lines[insert_line - 1].endswith("\n"):
            lines[insert_line - 1] += "\n"
        added = insert_text if insert_text.endswith("\n") else f"{insert_text}\n"
        return await self._write(
            path, "".join([*lines[:insert_line], added, *lines[insert_line:]]), "The file was edited"
        )

    async def _view(self, path: str, view_range: Sequence[int] | None) -> str:
        listed = await self._machine.run(["/bin/sh", "-c", '[ -d "$1" ] && ls -A -p -- "$1"', "sh", path])
        if not listed.status and not listed.stopped:
            return listed.output or "[the directory is empty]"
        lines = (await self._read(path)).splitlines()
        first, last = 1, len(lines)
        if view_range is not None:
            if len(view_range) != 2:
                raise ValueError("view_range must have two numbers: the first and the last line")
            first, last = view_range[0], len(lines) if view_range[1] == -1 else view_range[1]
            if not 1 <= first <= last <= max(1, len(lines)):
                raise ValueError(f"view_range is {list(view_range)}; {path} has the lines 1 to {len(lines)}")
        shown = [f"{number:>6}\t{line}" for number, line in enumerate(lines, 1)][first - 1 : last]
        return "\n".join(shown) or "[the file is empty]"

    async def _read(self, path: str) -> str:
        """The text of a file. Raises ValueError, which the model receives."""
        script = (
            f'if [ ! -f "$1" ]; then exit 44; fi; [ -r "$1" ] || exit 45; head -c {_LONGEST_FILE + 1} -- "$1" | base64'
        )
        ran = await self._machine.run(["/bin/sh", "-c", script, "sh", path], output_bytes=2 * _LONGEST_FILE)
        if ran.status == 44:
            raise ValueError(f"there is no file {path}")
        if ran.status == 45:
            raise ValueError(f"{path} cannot be read: permission denied")
        _refuse(ran, f"{path} cannot be read")
        content = base64.b64decode(ran.output)
        if len(content) > _LONGEST_FILE:
            raise ValueError(f"{path} has more than {_LONGEST_FILE:,} bytes: use bash")
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text in UTF-8: use bash") from None

    async def _write(self, path: str, text: str, done: str) -> str:
        content = text.encode("utf-8", errors="replace")
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        # an empty standard input would be none
        words = ["/bin/sh", "-c", script if content else f"{script} < /dev/null", "sh", path]
        _refuse(await self._machine.run(words, given=content), f"{path} cannot be written")
        return f"{done}: {path}"

    # rewards

    async def _tested(self) -> Reply:
        """Run the tests, and read their rewards: 0 if they give none, for a reason that is recorded. It may be the model's work.
        Raises HarborError if they cannot be run, or their file cannot be read.

        Harbor counts such trials as 0 during a job, and up to its version 0.20 also at the end; 0.26 leaves them out there.
        """
        task, machine = self._task, self._machine
        assert task is not None
        if not self._source.keep_processes:
            await machine.end_processes()
        cleaned = await machine.run(["/bin/sh", "-c", _CLEAN], cwd="/", user="0")
        if cleaned.status or cleaned.stopped or cleaned.notes:
            raise HarborError(
                f"task {task.name}: /tests and /logs/verifier cannot be emptied: {cleaned.text_for_model()[-500:]}"
            )
        await machine.put(await asyncio.to_thread(tar_of, {"/tests": task.folder / "tests"}))
        ran = await machine.run(
            ["/bin/sh", "-c", _TEST],
            seconds=task.test_seconds,
            environment=task.test_environment,
            user=task.test_user or "",  # not that of the model's commands
        )
        found = await machine.run(["/bin/sh", "-c", _REWARD], cwd="/", output_bytes=1 << 17, user="0")
        shown = ran.text_for_model()
        killed = found.status == _NO_REWARD and ran.status == 128 + signal.SIGKILL  # a container above its memory
        limited = ran.stopped or ran.notes or killed
        why = "a limit stopped the tests" if limited else "the tests wrote neither reward.json nor reward.txt"
        rewards = dict.fromkeys(self._source.weights or ["reward"], 0.0)
        if found.stopped or found.status not in (0, _NO_REWARD):
            raise HarborError(f"task {task.name}: the reward of its tests cannot be read: {shown[-1000:]}")
        if found.status == 0 and not limited:
            try:
                rewards, why = read_rewards(found.output, task.name), ""
            except HarborError as error:
                why = str(error)
        parts = self._parts(rewards, task.name)
        single = parts.pop("reward", None) if set(parts) == {"reward"} else None
        return Reply(
            done=True,
            reward=single,
            rewards=parts,
            info={
                "task": task.name,
                "rewards": rewards,
                "tests": shown[-_SHOWN:],
                **({"no_reward": why} if why else {}),
            },
            metrics={"harbor/no_reward": float(bool(why))},
        )

    def _parts(self, rewards: Mapping[str, float], task: str) -> dict[str, float]:
        """The parts of the reward."""
        weights = self._source.weights
        if weights is None:
            return {"reward": rewards["reward"]} if "reward" in rewards else dict(rewards)
        if missing := [name for name in weights if name not in rewards]:
            raise HarborError(
                f"task {task}: its tests gave no {missing[0]!r}, which has a weight; they gave {list(rewards)}"
            )
        return {name: weight * rewards[name] for name, weight in weights.items() if weight}


def _refuse(ran: Ran, what: str) -> None:
    if ran.status or ran.stopped or ran.notes:
        raise ValueError(f"{what}: {ran.text_for_model()[-500:]}")


def read_rewards(output: str, task: str) -> dict[str, float]:
    """The rewards in what the tests wrote: the name of the file, a line break, and its content. Raises HarborError.

    Example: `reward.json\\n{"a": 1, "b": 0.5}` gives `{"a": 1.0, "b": 0.5}`; `reward.txt\\n1\\n` gives `{"reward": 1.0}`.
    """
    name, _, text = output.partition("\n")
    try:
        value: Any = json.loads(text) if name == "reward.json" else float(text)
    except (ValueError, RecursionError):
        raise HarborError(f"task {task}: its tests wrote {text.strip()!r:.200} to {name}, which is no reward") from None
    rewards = value if isinstance(value, dict) else {"reward": value}
    if len(rewards) > _MOST_REWARDS:  # each is a metric
        raise HarborError(f"task {task}: its tests gave {len(rewards)} rewards; they may give {_MOST_REWARDS}")
    for key, number in rewards.items():
        if not 0 < len(key) <= _LONGEST_NAME or not key.isprintable():
            raise HarborError(
                f"task {task}: its tests gave a reward the name {key!r:.80}; it must have 1 to {_LONGEST_NAME} characters that "
                f"can be printed"
            )
        if not isinstance(number, int | float) or not -_LARGEST <= number <= _LARGEST:
            raise HarborError(
                f"task {task}: its tests gave the reward {key}={number!s:.80}; it must be a finite number"
            )
    if not rewards:
        raise HarborError(f"task {task}: its tests wrote no reward to {name}")
    return {key: float(number) for key, number in rewards.items()}
