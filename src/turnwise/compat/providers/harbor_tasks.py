"""Reads tasks in Harbor's format, and says which of them the local sandbox can run. Runs nothing.

A task is a folder with `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh` and, for a reference,
`solution/solve.sh`. The format is that of Harbor 0.26 (schema 1.4); what this provider does not have, such as tasks of several
steps, is refused with its name and not left out.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.environments.sandbox.jail import interpreter
from turnwise.errors import ConfigError

_DEEPEST = 6
"""Levels of folders between the folder of a recipe and its tasks."""
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class Unfit(Exception):
    """A task cannot be run. The message says why."""


# tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task as its files describe it."""

    name: str
    """The path of its folder below that of the recipe."""
    folder: Path
    instruction: str
    image: str | None
    """A ready image; None: that of the Dockerfile."""
    workdir: str | None
    """None: that of the Dockerfile or of the image."""
    environment: Mapping[str, str]
    """Variables of all commands."""
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    network: bool
    """Whether its commands have a network."""
    user: str | None
    """Who runs the model's commands; None: the user of the image."""
    build_seconds: float
    test_seconds: float
    test_environment: Mapping[str, str]
    test_user: str | None


def find_tasks(folder: str) -> list[Path]:
    """The folders of tasks in a folder, which may be a task itself, in the order of their names. Raises ConfigError."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"environment: harbor:{folder} is not a folder; give a folder of tasks, one task, or a data set of Harbor's registry "
            f"(NAME@VERSION)"
        )
    found = list(_tasks_in(root, 0))
    if not found:
        old = next(root.glob("*/task.yaml"), None) or next(root.glob("task.yaml"), None)
        more = (
            f". {old} is a task in the format of Terminal-Bench 1: convert it with `harbor task migrate` of the package harbor"
            if old is not None
            else ""
        )
        raise ConfigError(f"environment: harbor:{folder} has no tasks: none of its folders has a task.toml{more}")
    return found


def _tasks_in(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "task.toml").is_file():
        yield folder
    elif depth < _DEEPEST:
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _tasks_in(inner, depth + 1)


def read_task(folder: Path, name: str) -> HarborTask:
    """Read a task. Raises Unfit."""
    try:
        given = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unfit(f"task.toml cannot be read: {error}") from None
    for missing in ("instruction.md", "tests/test.sh"):
        if not (folder / missing).is_file() and not given.get("steps"):
            raise Unfit(f"it has no {missing}")
    tables = {key: _table(given, key) for key in ("environment", "verifier", "agent")}
    _refuse_more(folder, given, tables)
    place, tests, agent = tables["environment"], tables["verifier"], tables["agent"]
    image = place.get("docker_image")
    if image is None and not (folder / "environment" / "Dockerfile").is_file():
        raise Unfit("it has neither environment/Dockerfile nor environment.docker_image")
    return HarborTask(
        name=name,
        folder=folder,
        instruction=_instruction(folder),
        image=None if image is None else str(image),
        workdir=None if place.get("workdir") is None else str(place["workdir"]),
        environment=_variables(place.get("env", {}), "environment.env"),
        cpus=_number(place, "cpus", None),
        memory_mb=_megabytes(place, "memory"),
        storage_mb=_megabytes(place, "storage"),
        network=place.get("network_mode", "public") == "public" and place.get("allow_internet") is not False,
        user=None if agent.get("user") is None else str(agent["user"]),
        build_seconds=_number(place, "build_timeout_sec", 600.0) or 600.0,
        test_seconds=_number(tests, "timeout_sec", 600.0) or 600.0,
        test_environment=_variables(tests.get("env", {}), "verifier.env"),
        test_user=None if tests.get("user") is None else str(tests["user"]),
    )


def _instruction(folder: Path) -> str:
    """The instruction, without the leading lines that mark it as data not to be trained on."""
    lines = (folder / "instruction.md").read_text(encoding="utf-8").splitlines()
    while lines and (_CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
        del lines[0]
    text = "\n".join(lines).strip()
    if not text:
        raise Unfit("instruction.md is empty")
    return text


def _refuse_more(folder: Path, given: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse what Harbor's format has and this provider does not. Raises Unfit."""
    place, tests = tables["environment"], tables["verifier"]
    has = {
        "several steps (steps)": bool(given.get("steps")),
        "several containers (docker-compose.yaml)": any(
            (folder / "environment" / f"docker-compose.{ending}").is_file() for ending in ("yaml", "yml")
        ),
        "another container for its tests (verifier.environment_mode: separate)": tests.get("environment_mode")
        == "separate"
        or tests.get("environment") is not None,
        "commands before its tests (verifier.collect)": bool(tests.get("collect")),
        "a system other than Linux (environment.os)": str(place.get("os", "linux")).lower() != "linux",
        "GPUs or TPUs": bool(place.get("gpus")) or place.get("tpu") is not None,
        "MCP servers (environment.mcp_servers)": bool(place.get("mcp_servers")),
        "skills (environment.skills_dir)": place.get("skills_dir") is not None,
        "a health check (environment.healthcheck)": place.get("healthcheck") is not None,
        "a network with allowed hosts (network_mode: allowlist)": any(
            table.get("network_mode") == "allowlist" for table in tables.values()
        ),
        "another network for agent or tests (network_mode)": any(
            tables[name].get("network_mode") not in (None, place.get("network_mode", "public"))
            for name in ("agent", "verifier")
        ),
        "an earlier conversation (trajectory.json)": (folder / "trajectory.json").exists(),
    }
    if found := [what for what, there in has.items() if there]:
        raise Unfit(f"it has {found[0]}, which this provider does not support")


def _table(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = given.get(key, {})
    if not isinstance(value, Mapping):
        raise Unfit(f"task.toml: {key} must be a table")
    return value


def _number(table: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = table.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise Unfit(f"task.toml: {key} is {value!r:.80}; it must be a number above 0")
    return None if value is None else float(value)


def _megabytes(table: Mapping[str, Any], key: str) -> int | None:
    """`memory_mb = 2048`, or in older tasks `memory = "2G"`."""
    old = table.get(key)
    if isinstance(old, str):
        found = re.fullmatch(r"([\d.]+)\s*([GMK])B?", old.strip(), re.IGNORECASE)
        if found is None:
            raise Unfit(f'task.toml: {key} is {old!r:.80}; it must be a size such as "2G"')
        factor = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[found[2].upper()]
        return max(1, int(float(found[1]) * factor))
    value = _number(table, f"{key}_mb", None)
    return None if value is None else int(value)


def _variables(given: Any, key: str) -> dict[str, str]:
    """Variables; `${NAME}` and `${NAME:-default}` stand for those of this process. Raises Unfit if one is missing."""
    if not isinstance(given, Mapping):
        raise Unfit(f"task.toml: {key} must be a table")

    def value(found: re.Match[str]) -> str:
        known = os.environ.get(found[1], found[2])
        if known is None:
            raise Unfit(f"{key} needs the variable {found[1]}, which is not set: export it before the run")
        return known

    return {str(name): _VARIABLE.sub(value, str(text)) for name, text in given.items()}


# Dockerfiles that the local sandbox can follow

_BASES = re.compile(
    r"(?:docker\.io/)?(?:library/)?(ubuntu|debian|alpine|busybox|bash|buildpack-deps|python)(?:[:@].*)?"
)
_IGNORED = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"})
"""Instructions without a meaning where commands are run one by one."""
_NETWORK = re.compile(
    r"\b(?:apt|apt-get|apk|yum|dnf|microdnf|zypper)\b[^\n;&|]*\b(?:update|upgrade|install|add)\b"
    r"|\b(?:pip3?|pipx|conda|mamba|gem|cargo|npm|pnpm|yarn|bun|poetry)\b[^\n;&|]*\b(?:install|download|add|ci|create|fetch|sync)\b"
    r"|\b(?:uv|uvx|npx|bunx)\s+\S|\bgo\s+(?:get|install)\b|\bgit\s+clone\b[^\n;&|]*(?:://|@)"
    r"|\b(?:curl|wget)\b[^\n;&|]*\bhttps?://(?!localhost|127\.0\.0\.1)"
)
_FIXED = frozenset(
    {"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "dev", "proc", "sys", "code", "packages", "boot"}
)
"""Directories that are this machine's, or the sandbox's."""
USUAL = (
    "/app",
    "/workspace",
    "/root",
    "/home",
    "/tmp",
    "/tests",
    "/logs",
    "/solution",
    "/data",
    "/srv",
    "/opt",
    "/var",
)
"""Directories that can be written in any task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """Files of the folder `environment/`, by their places in the sandbox."""

    line: int
    files: Mapping[str, Path]
    mode: int | None = None
    """The permissions of all files; None: their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A command while the image is made."""

    line: int
    words: Sequence[str]
    cwd: str
    environment: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class ImagePlan:
    """What the sandbox does in place of building an image."""

    steps: list[CopyStep | RunStep] = field(default_factory=list)
    workdir: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    writable: list[str] = field(default_factory=list)
    """Directories directly below /."""


def plan_of(task: HarborTask) -> ImagePlan:
    """How the local sandbox makes the image of a task. Raises Unfit with the line and the reason if it cannot."""
    if task.image is not None and not (task.folder / "environment" / "Dockerfile").is_file():
        raise Unfit(f"it has the image {task.image} and no Dockerfile")
    for user, key in ((task.user, "agent.user"), (task.test_user, "verifier.user")):
        if user not in (None, "root", "0"):
            raise Unfit(f"{key} is {user}, and the sandbox has one user")
    if (found := _needs_network((task.folder / "tests" / "test.sh").read_text(encoding="utf-8"))) is not None:
        raise Unfit(f"tests/test.sh has {found!r}, and the sandbox has no network")
    reading = _Reading(task.folder / "environment")
    plan = reading.plan()
    if task.workdir is not None:
        plan.workdir = posixpath.join("/", task.workdir)
    plan.writable = [*USUAL, *(place for place in dict.fromkeys(reading.places) if place not in USUAL)]
    top = _top(plan.workdir)
    if top not in plan.writable:
        if top[1:] in _FIXED:
            raise Unfit(f"its working directory {plan.workdir} cannot be written in the sandbox")
        plan.writable += [] if top == "/" else [top]
    plan.environment |= task.environment
    return plan


def _needs_network(script: str) -> str | None:
    """The part of a script that gets something from a network; None if there is none."""
    code = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    found = _NETWORK.search(code.replace("\\\n", " "))
    return None if found is None else found[0][:80]


def _top(path: str) -> str:
    """The directory directly below / in which a path lies."""
    return "/" + posixpath.normpath(path).lstrip("/").partition("/")[0]


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def usual_environment() -> dict[str, str]:
    """The variables of all commands in jails."""
    own = str(Path(interpreter()).parent)
    return {
        "HOME": "/root",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "USER": "root",
        "PATH": f"{_PATH}:{own}",
        # files of a working directory belong to another user id in each command
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }


class _Reading:
    """Follows the instructions of a Dockerfile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._plan = ImagePlan()
        self._usual = usual_environment()
        self._arguments: dict[str, str] = {}
        self._directories = {"/", *USUAL}
        """Those that are known to be there."""
        self._begun = False
        self.places: list[str] = []
        """Directories directly below / that are written."""

    def plan(self) -> ImagePlan:
        """Raises Unfit."""
        text = (self._folder / "Dockerfile").read_text(encoding="utf-8")
        for line, word, rest in _instructions(text):
            try:
                self._follow(line, word, rest)
            except (Unfit, ValueError) as problem:
                raise Unfit(f"line {line} of its Dockerfile, {word} {rest[:60]!r}: {problem}") from None
        if not self._begun:
            raise Unfit("its Dockerfile has no FROM")
        return self._plan

    def _follow(self, line: int, word: str, rest: str) -> None:
        if word in _IGNORED:
            return
        match word:
            case "FROM":
                self._from(rest)
            case "WORKDIR":
                self._plan.workdir = posixpath.join(self._plan.workdir, self._filled(rest))
                self._writes(self._plan.workdir)
                self._has_directory(self._plan.workdir)
            case "ENV":
                self._plan.environment |= self._assigned(rest)
            case "ARG":
                self._arguments |= self._assigned(rest) if "=" in rest else {rest.strip(): ""}
            case "COPY" | "ADD":
                self._plan.steps.append(self._copy(line, rest))
            case "RUN":
                self._plan.steps.append(self._run(line, rest))
            case "USER" if self._filled(rest).strip().split(":")[0] in ("root", "0"):
                pass
            case "SHELL" if "bash" in rest:
                pass
            case _:
                raise Unfit("the sandbox does not have this instruction")

    def _from(self, rest: str) -> None:
        words = self._filled(rest).split()
        if self._begun:
            raise Unfit("the sandbox has one stage only")
        image = next((one for one in words if not one.startswith("--")), "")
        if _BASES.fullmatch(image) is None:
            raise Unfit(
                "the sandbox has the programs of this machine in place of an image, and follows only ubuntu, debian, alpine, "
                "busybox, bash, buildpack-deps and python"
            )
        self._begun = True

    def _copy(self, line: int, rest: str) -> CopyStep:
        words = list(map(self._filled, _words(rest)))
        options = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        if not sources:
            raise Unfit("it names no target")
        for option in options:
            if not re.fullmatch(r"--(chown=(root|0)(:\S*)?|chmod=[0-7]+|link(=\w+)?)", option):
                raise Unfit(f"the sandbox does not have {option}")
        place = posixpath.join(self._plan.workdir, target)
        files: dict[str, Path] = {}
        found = [path for source in sources for path in self._sources(source)]
        into = len(found) > 1 or target.endswith("/") or posixpath.normpath(place) in self._directories
        for path in found:
            inside = not path.is_dir() and into
            files[posixpath.normpath(posixpath.join(place, path.name) if inside else place)] = path
        for where, path in files.items():
            self._writes(where)
            self._has_directory(where if path.is_dir() else posixpath.dirname(where))
        modes = [int(option.partition("=")[2], 8) for option in options if option.startswith("--chmod=")]
        return CopyStep(line=line, files=files, mode=modes[-1] if modes else None)

    def _sources(self, source: str) -> list[Path]:
        if "://" in source or source.startswith("git@"):
            raise Unfit("the sandbox has no network")
        if re.search(r"\.(tar|tgz|tar\.\w+|zip)$", source):
            raise Unfit("the sandbox unpacks no archives")
        relative = source.lstrip("/") or "."
        found = sorted(self._folder.glob(relative)) if re.search(r"[*?\[]", relative) else [self._folder / relative]
        for path in found:
            if not path.exists() or not path.resolve().is_relative_to(self._folder):
                raise Unfit(f"environment/{relative} is not there")
        if not found:
            raise Unfit(f"nothing matches environment/{relative}")
        return found

    def _run(self, line: int, rest: str) -> RunStep:
        while (option := re.match(r"--\w+=?\S*\s+", rest)) is not None:
            raise Unfit(f"the sandbox does not have {option[0].strip()}")
        if (found := _needs_network(rest)) is not None:
            raise Unfit(f"{found!r} needs a network, and the sandbox has none")
        if "<<" in rest.split("\n", 1)[0]:
            raise Unfit("the sandbox reads no text blocks (<<) in Dockerfiles")
        words = _words(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
        for path in re.findall(r"(?<![\w.$}])/[\w.-]+(?=[/\s'\";]|$)", rest):
            if path[1:] not in _FIXED:
                self.places.append(path)
        environment = {**self._arguments, **self._plan.environment}
        return RunStep(line=line, words=words, cwd=self._plan.workdir, environment=environment)

    def _writes(self, place: str) -> None:
        top = _top(place)
        if top[1:] in _FIXED and not place.startswith("/usr/local/"):
            raise Unfit(f"{top} is this machine's, and cannot be written in the sandbox")
        if place.startswith("/usr/local/"):
            raise Unfit("/usr/local is this machine's, and cannot be written in the sandbox")
        if top != "/":
            self.places.append(top)

    def _has_directory(self, place: str) -> None:
        while place not in self._directories:
            place = posixpath.normpath(place)
            self._directories.add(place)
            place = posixpath.dirname(place)

    def _filled(self, text: str) -> str:
        """A text with the values of its variables."""
        known = {**self._usual, **self._arguments, **self._plan.environment}

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            return known.get(name) or found[3] or ""

        return re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", value, text.strip())

    def _assigned(self, rest: str) -> dict[str, str]:
        """`NAME=value NAME=value`, or the old `NAME value`."""
        if "=" not in rest.split()[0]:
            name, _, text = rest.partition(" ")
            return {name: self._filled(text)}
        pairs = [word.partition("=") for word in shlex.split(rest)]
        return {name: self._filled(text) for name, _, text in pairs}


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """The instructions with their lines: number, name, and the rest."""
    waiting, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        if line.rstrip().endswith("\\"):
            waiting += line.rstrip()[:-1] + " "
            continue
        word, _, rest = (waiting + line).strip().partition(" ")
        yield begun, word.upper(), rest.strip()
        waiting, begun = "", 0
    if waiting.strip():
        word, _, rest = waiting.strip().partition(" ")
        yield begun, word.upper(), rest.strip()


def _words(rest: str) -> list[str]:
    """The words of an instruction, which may be a list in JSON. Raises Unfit."""
    if not rest.lstrip().startswith("["):
        return shlex.split(rest)
    try:
        words = json.loads(rest)
    except ValueError as error:
        raise Unfit(f"not a list in JSON: {error}") from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise Unfit("not a list of texts")
    return words
