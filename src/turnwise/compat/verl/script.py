"""Reads the arguments of `python -m verl.trainer.main_ppo` from verl's shell scripts. Scripts are never run.

Supported: variables and their defaults (`${NAME:-512}`, `${1:-vllm}`), integer arithmetic, arrays, `$(pwd)` and the environment.
A variable that neither the script nor the environment sets, such as `$SLURM_JOB_NUM_NODES`, stays as a reference: `${NAME}`.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.errors import ConfigError

__all__ = ["Script", "read_script"]

_ENTRY = re.compile(r"(^|[./])main_ppo(\.py)?$")
_ASSIGNED = re.compile(r"(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[@\])?(?::?[-=]((?:[^{}]|\$\{\w+\})*))?\})")
_ARITHMETIC = re.compile(r"\$\(\(([^$`]*?)\)\)(?!\))")
_POSITIONAL_DEFAULT = re.compile(r"\$\{[0-9]+:?-([^{}]*)\}")
_IF_SET = re.compile(r"\$\{([A-Za-z_]\w*):?\+([^{}]*)\}")
_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_POSITIONAL = re.compile(r"\$(?:[@*#0-9]|\{[@*0-9][^{}]*\})")
_ENDS = re.compile(r"[|;&<>]|\d+>")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(slots=True)
class Script:
    """The arguments that a script passes to verl."""

    folder: str | None = None
    """`--config-path`."""
    name: str | None = None
    """`--config-name`."""
    overrides: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Words that only a shell could expand: a command's output, or a variable that the script does not set."""
    references: list[str] = field(default_factory=list)
    """Those of `unknown` that contain only variables, as `key=${NAME}`."""


def read_script(path: Path) -> Script:
    """The arguments of the command in a script that starts verl's trainer.

    Raises ConfigError if there is no such command, if there are several, or if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    variables: dict[str, list[str]] = {}
    commands: list[list[str]] = []
    for command in _commands(text):
        words = _words(command, variables)
        at = next((n for n, word in enumerate(words) if _ENTRY.search(word)), None)
        if at is not None:
            given = words[at + 1 :]
            commands.append(given[: next((n for n, word in enumerate(given) if _ENDS.match(word)), None)])
        elif (assigned := _ASSIGNED.fullmatch(command.strip())) is not None:
            name, more, value = assigned.groups()
            new = _words(value.strip()[1:-1] if value.startswith("(") else value, variables)
            new = new if value.startswith("(") else [" ".join(new)]
            variables[name] = [*variables.get(name, []), *new] if more else new
    if len(commands) != 1:
        raise ConfigError(f"{path} has {len(commands)} commands with verl.trainer.main_ppo; it must have one")
    return _script(commands[0])


def _script(words: list[str]) -> Script:
    script = Script()
    waiting = iter(words)
    for word in waiting:
        flag, equals, value = word.partition("=")
        if flag in ("--config-path", "-cp", "--config-dir", "-cd", "--config-name", "-cn"):
            value = value if equals else next(waiting, "")
            if "name" in flag or flag == "-cn":
                script.name = value
            else:
                script.folder = value
        elif not word.startswith("-") and word.strip():
            word = _REFERENCE.sub(lambda match: f"${{{match.group(1) or match.group(2)}}}", word)
            script.overrides.append(word)
            if re.search(r"\$[\w{(]|`", word):
                script.unknown.append(word)
                if not re.search(r"\$|`", _REFERENCE.sub("", word)):
                    script.references.append(word)
    return script


def _commands(text: str) -> Iterator[str]:
    """The commands of a script. A command continues after a backslash, and while a quotation or an array is open."""
    waiting = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\"):
            waiting += line.rstrip()[:-1] + " "
            continue
        waiting += line
        array = re.match(r"\s*(export\s+)?\w+\+?=\(", waiting)
        if _open(waiting) or (array is not None and _unclosed(waiting)):
            waiting += "\n"
            continue
        yield waiting
        waiting = ""
    if waiting and not _open(waiting):
        yield waiting


def _unclosed(text: str) -> bool:
    """Whether a bracket outside of quotations and comments is open: a line of an array may end with `$((a + b))`."""
    bare = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "", text)
    bare = re.sub(r"(^|\s)#.*", "", bare)
    return bare.count("(") > bare.count(")")


def _open(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _words(text: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words of a command, with known variables expanded."""
    text = text.replace("$(pwd)", os.getcwd()).replace("`pwd`", os.getcwd())
    text = _POSITIONAL_DEFAULT.sub(lambda match: match.group(1), text)
    text = _IF_SET.sub(lambda match: match.group(2) if any(_set(match.group(1), variables)) else "", text)
    while (match := _ARITHMETIC.search(text)) is not None:  # before splitting: the expression may contain blanks
        value = _number(match.group(1), variables)
        if value is None:
            break
        text = text[: match.start()] + str(value) + text[match.end() :]
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return []
    expanded: list[str] = []
    for word in words:
        reference = re.fullmatch(r"\$\{(\w+)\[@\]\}|\$(\w+)", word)
        several = variables.get(reference.group(1) or reference.group(2)) if reference is not None else None
        if several is not None:  # an array, or a text of several words
            array = reference is not None and reference.group(1) is not None
            expanded += several if array or len(several) != 1 else several[0].split()
        elif put := _POSITIONAL.sub("", _put(word, variables)):
            expanded.append(put)
    return expanded


def _set(name: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words of a variable of the script or of the environment; none if it is not set."""
    return variables.get(name) or list(filter(None, [os.environ.get(name)]))


def _put(word: str, variables: Mapping[str, list[str]]) -> str:
    """A word with its variables expanded; variables that are not set stay."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        known = " ".join(variables[name]) if name in variables else os.environ.get(name)
        return known if known else match.group(0) if match.group(3) is None else match.group(3)

    for _ in range(10):  # a default may contain another variable
        before, word = word, _VARIABLE.sub(value, word)
        if word == before:
            break
    return word


def _number(expression: str, variables: Mapping[str, list[str]]) -> int | None:
    """The result of integer arithmetic, or None for any other expression."""
    named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda match: _put(f"${match.group(1)}", variables), expression)

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        raise ValueError

    try:
        return of(ast.parse(named.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None
