"""Reads arguments of ms-swift from a command line, a script, or a YAML or JSON file."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise.compat.swift.argument_types import parse_argument, positive_integer
from turnwise.compat.swift.flags import ALIASES
from turnwise.errors import ConfigError
from turnwise.json_yaml import parse_json, parse_yaml, read_text

__all__ = ["SwiftArguments", "read_arguments"]

_ROLLOUT = re.compile(r"(\w+=\S+\s+)*(\S*/)?swift\s+rollout\b")
_MOST_CHARACTERS = 10_000_000


class SwiftArguments:
    """The given arguments; those of several commands are merged."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.overridden: dict[str, Any] = {}
        """Values for which a later command gave a different value."""
        self.environment: dict[str, str] = {}
        """Shell variables that are set before a command."""
        self.processes = 1
        """The number of processes of the trainer: `NPROC_PER_NODE` times `NNODES`."""
        self.nodes = 1
        """The number of machines of the trainer: `NNODES`."""
        self.nodes_variable: str | None = None
        """`${NAME}` if the number of machines is a variable that is not set here. `nodes` and `processes` are then for one."""
        self.rollout: Literal["given", "comment", "unknown"] = "unknown"
        """Whether the arguments of `swift rollout` were given, and whether they were found in a comment."""
        self.folders: list[Path] = [Path()]
        """Folders in which named files are searched: the working directory, and the folders around the files that were read."""
        self.files: list[Path] = []
        """The files that were read."""

    def find(self, name: str) -> Path | None:
        """The file of that name, relative to one of the folders, or None."""
        places = (folder / os.path.expanduser(name) for folder in self.folders)
        return next((place for place in places if os.path.isfile(place)), None)  # False for an invalid name

    def add(self, key: str, values: list[Any]) -> None:
        """Add one argument: its words, or its values in a file. Raises ConfigError if they are not of the argument's type."""
        if re.fullmatch(r"[A-Za-z_][\w.-]*", key) is None:
            raise ConfigError(f"{key!r:.80} is no name of an argument of ms-swift")
        key = ALIASES.get(key.replace("-", "_"), key.replace("-", "_"))
        value = parse_argument(key, values)
        if key in self.values and self.values[key] != value:
            self.overridden[key] = self.values[key]
        self.values[key] = value


def read_arguments(source: str | Path | Sequence[str] | Mapping[str, Any]) -> SwiftArguments:
    """Arguments from a mapping, from words of a command line, or from a `.yaml`, `.json` or `.sh` file.

    A command line may name a file first, as in `swift rlhf args.yaml --beta 0`; a script may hold several commands.

    Raises ConfigError.
    """
    given = SwiftArguments()
    if isinstance(source, Mapping):
        for key, value in source.items():
            given.add(str(key), [value])
    else:
        _words(given, [str(source)] if isinstance(source, str | Path) else list(source))
    if not given.values:
        raise ConfigError(f"there are no arguments of ms-swift in {source!r:.200}; they are written --name value")
    return given


def _words(given: SwiftArguments, words: Sequence[str]) -> None:
    key: str | None = None
    values: list[Any] = []

    def end() -> None:
        if key is not None:
            given.add(key, values)

    processes: dict[str, int] = {}
    for word in words:
        if word.startswith("--") and len(word) > 2:
            end()
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif key is not None:
            values.append(word)
        elif word.endswith((".yaml", ".yml", ".json", ".sh")):
            _file(given, Path(os.path.expanduser(word)))
        elif match := re.fullmatch(r"(NPROC_PER_NODE|NNODES)=(\d+)", word):
            processes[match.group(1)] = positive_integer(match.group(1), match.group(2))
        elif match := re.fullmatch(r"NNODES=(\$\{\w+\})", word):
            given.nodes_variable = match.group(1)
        elif match := re.fullmatch(r"([A-Z_]+)=(.*)", word):
            given.environment[match.group(1)] = match.group(2)
        elif word == "rollout":
            given.rollout = "given"
        elif word not in ("swift", "megatron", "rlhf", "grpo", "run"):
            raise ConfigError(
                f"{word!r} is no argument of ms-swift; they are written --name value, or in a file: args.yaml"
            )
    end()
    given.processes = max(given.processes, math.prod(processes.values()))
    given.nodes = max(given.nodes, processes.get("NNODES", 1))


def _file(given: SwiftArguments, path: Path) -> None:
    if path.absolute() in given.files:
        raise ConfigError(f"{path} is named twice, or names itself; name it once")
    given.files.append(path.absolute())
    text = read_text(path, error=ConfigError)
    given.folders += path.absolute().parents
    if path.suffix == ".sh":
        commands = _commands(text, path)
        if not any(kind == "rollout" for kind, _ in commands) and (commented := _commented(text)):
            given.rollout = "comment"
            commands += _commands(commented, path)
        elif any(kind == "rollout" for kind, _ in commands):
            given.rollout = "given"
        for _, words in commands:
            _words(given, words)
        return
    parse = parse_json if path.suffix == ".json" else parse_yaml
    tree = parse(text, where=str(path), error=ConfigError)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must contain a mapping of arguments; it contains a {type(tree).__name__}")
    for part in ("rollout", "train"):  # files for Ray have these two sections
        if isinstance(tree.get(part), dict):
            given.rollout = "given" if part == "rollout" else given.rollout
            tree = {**tree.pop(part), **tree}
    for key, value in tree.items():
        given.add(str(key), [value])


def _commented(text: str) -> str:
    """The `swift rollout` command in the script's comments, which the user runs in another terminal; empty if there is none."""
    lines: list[str] = []
    for line in text.splitlines():
        words = line.lstrip().removeprefix("#").strip()
        if not line.lstrip().startswith("#") or (not lines and _ROLLOUT.match(words) is None):
            if lines:
                break
            continue
        lines.append(words)
        if not words.endswith("\\"):
            break
    return "\n".join(lines).rstrip("\\")


def _commands(text: str, path: Path) -> list[tuple[str, list[str]]]:
    """The name and the words of each `swift rlhf` and `swift rollout` command in a script, with the variables set before it.

    Variables that the script or the environment sets to plain texts are expanded. Others stay as `${NAME}`.
    """
    commands: list[tuple[str, list[str]]] = []
    variables: dict[str, str] = {}
    for line in _lines(text, path):
        words = [re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda match: _variable(match, variables), word) for word in line]
        words = [part for word in words for part in _launched(word)]
        at = next((n for n, word in enumerate(words) if word.rpartition("/")[2] in ("swift", "megatron")), len(words))
        if words[at + 1 : at + 2] not in (["rlhf"], ["rollout"]):
            pairs = (word.partition("=") for word in words if re.match(r"\w+=", word))
            variables.update({name: value for name, _, value in pairs})
            if sum(map(len, variables.values())) > _MOST_CHARACTERS:
                raise ConfigError(f"{path}: its variables grow beyond {_MOST_CHARACTERS:,} characters, such as A=$A$A")
            continue
        kind = words[at + 1]
        words = [*(word for word in words[:at] if re.match(r"\w+=", word)), *words[at + 2 :]]
        words = words[: next((n for n, word in enumerate(words) if re.match(r"[&|;<>#]|\d>", word)), None)]
        words = [re.sub(r"\$(\w+)", r"${\1}", word) for word in words]  # unset variables stay as references
        if unset := [word for word in words if re.search(r"\$", re.sub(r"\$\{[A-Za-z_]\w*\}", "", word))]:
            raise ConfigError(f"{path}: {unset[0]!r} needs a shell; write its value")
        commands.append((kind, words))
    if not commands:
        raise ConfigError(f"{path} has neither `swift rlhf` nor `swift rollout` in it")
    return commands


def _launched(word: str) -> list[str]:
    """A word, or the command that it means: launchers receive `swift/cli/rlhf.py` and the number of processes."""
    if match := re.fullmatch(r"(?:.*/)?swift/cli/(rlhf|rollout)\.py", word):
        return ["swift", match.group(1)]
    if match := re.fullmatch(r"--nproc_per_node=(\d+)", word):
        return [f"NPROC_PER_NODE={match.group(1)}"]
    return [word]


def _lines(text: str, path: Path) -> Iterator[list[str]]:
    """The words of each command. A command continues after a backslash, and while a quotation is open."""
    waiting, quoted = "", False
    for line in text.splitlines():
        if not quoted and line.lstrip().startswith("#"):
            continue  # a comment does not continue after a backslash
        if not quoted and line.endswith("\\"):
            waiting += line[:-1] + " "
            continue
        waiting += line
        try:
            words = shlex.split(re.sub(r"\\\n", " ", waiting))  # no comments of `shlex`: `dataset#500` has none
        except ValueError:
            waiting, quoted = waiting + "\n", True
            continue
        waiting, quoted = "", False
        yield words
    try:
        yield shlex.split(waiting)  # the last line ended with a backslash
    except ValueError:
        raise ConfigError(
            f"{path}: {waiting.strip()[:80]!r} cannot be read as a shell does: its quotation is never closed"
        ) from None


def _variable(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match.group(1) or match.group(2)
    return variables.get(name, os.environ.get(name, match.group(0)))
