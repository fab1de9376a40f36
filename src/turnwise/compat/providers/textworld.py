"""`environment: textworld:tw-coin_collector`: text games of TextWorld, made by seed or from files.

A name is a challenge of the library, whose games are made when they are first played, one for each number in the column `seed`;
or game files (`games/*.z8`), one for each path in the column `game`. The model's text is the command. The reward of a turn is
what the command has added to the score, as a share of the highest score, so a game that is won gives 1 in all."""

from __future__ import annotations

import argparse
import glob
import importlib
import re
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from turnwise.compat.object_factory import number, opened
from turnwise.compat.providers.provider import About, LibraryEnvironments, refuse_unknown_name
from turnwise.data.rows import ProvidedRows, seed_rows
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError
from turnwise.types import Opening, Reply, Row, Turn
from turnwise.user_code.threads import ThreadedObject

_ENDINGS = (".z1", ".z2", ".z3", ".z4", ".z5", ".z6", ".z7", ".z8", ".ulx")
"""How the names of game files end."""
INSTRUCTION = "Answer with your next command only, such as: go east"
_PROMPT = re.compile(r"\n>[^\n]*\s*$")
"""The game's prompt, and its status line."""
LOADING = threading.Lock()
"""Held while a game is loaded: the library has one parser in a process."""
_FILE_COMMANDS = frozenset({"save", "restore", "script", "transcrip", "noscript", "unscript"})
"""Commands that read or write files, whose names are the model's text. A game compares the first nine letters of a word."""
_NO_COMMAND = "That's not a verb I recognise."
_LOGO = re.compile(r"^[\s$\\_/|]+$")


class TextWorld(LibraryEnvironments):
    """Makes text games (an EnvironmentSource with rows).

    Args:
        name: A challenge, such as `tw-coin_collector`, or game files: a path, a directory, or a pattern such as `games/*.z8`.
        arguments: The options of the challenge, such as `{level: 5}`.
        eval_games: Other game files for held-out rows; with a challenge, these have other seeds.
        admissible_commands: Whether each observation lists the commands that do something.
        instruction: The end of the first message.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        eval_games: str | None = None,
        admissible_commands: bool = False,
        instruction: str = INSTRUCTION,
    ) -> None:
        # jericho says so of each game that is not one of its own; textworld reads the score itself
        warnings.filterwarnings("ignore", message="Game .* is not fully supported")
        self.name = f"textworld:{name}"
        self.admissible_commands, self.instruction = admissible_commands, instruction
        self._challenge: _Challenge | None = None
        self._files: dict[bool, list[str]] = {}
        if "/" not in name and not name.endswith(_ENDINGS):
            refuse_unknown_name(name, self.names(), provider="textworld")
            self._challenge = _Challenge(name, dict(arguments or {}))
            if eval_games is not None:
                raise ConfigError(
                    f"environment.arguments.eval_games has no effect with the challenge {name}, whose held-out games have "
                    f"seeds of their own: remove it"
                )
        else:
            if arguments:
                raise ConfigError("environment.arguments.arguments has no effect with game files: remove it")
            self._files[False] = _game_files(name)
            self._files[True] = _game_files(eval_games) if eval_games is not None else []

    @classmethod
    def names(cls) -> Sequence[str]:
        """The challenges."""
        return sorted(importlib.import_module("textworld.challenges").CHALLENGES)

    def about(self) -> About:
        """What the games bring."""
        return About(rows="endless, by seed" if self._challenge is not None else f"{len(self._files[False])} games")

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """A row for each seed, or for each game file."""
        if self._challenge is not None:
            return seed_rows(count, held_out=held_out)
        if held_out and not self._files[True]:
            raise ConfigError(
                f"{self.name} has no held-out games: set environment.arguments.eval_games, or name a file in data.eval"
            )
        return ProvidedRows(records=({"game": game} for game in self._files[held_out][:count]))

    def game_file(self, row: Row) -> str:
        """The file of a row's game. Raises ValueError for a row that names none."""
        if self._challenge is None:
            return game_of(row)
        seed = row["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
            raise ValueError(f"row {row.id!r} has seed={seed!r:.80}; it must be an integer from 0 to {(1 << 32) - 1}")
        return self._challenge.file(seed)

    def start(self, row: Row) -> Any:
        """The game of a row."""
        file, library = self.game_file(row), importlib.import_module("textworld")
        with LOADING:
            return library.start(file, request_infos=request_infos(self.admissible_commands))

    def call(self, method: Callable[[], Any]) -> Any:
        """The result of a method of a game, which runs in an interpreter of its own."""
        return method()

    def __call__(self) -> Environment:
        return PlayedGame(self)

    async def aclose(self) -> None:
        """Remove the games that were made."""
        if self._challenge is not None:
            self._challenge.remove()


class _Challenge:
    """Makes the games of a challenge, each once."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        _, self._make, parser = importlib.import_module("textworld.challenges").CHALLENGES[name]
        self._settings = _settings(parser(), given, f"textworld:{name}")
        self._lock = threading.Lock()
        self.folder = Path(tempfile.mkdtemp(prefix="turnwise-textworld-"))
        # a source may be made only to read its rows, and never closed
        self.remove = weakref.finalize(self, partial(shutil.rmtree, self.folder, ignore_errors=True))

    def file(self, seed: int) -> str:
        """The file of the game of a seed."""
        path = self.folder / f"{seed}.z8"
        with self._lock:  # the library's compiler is one process for each game
            if not path.exists():
                library = importlib.import_module("textworld")
                options = library.GameOptions()
                options.seeds, options.path = seed, str(path)
                library.generator.compile_game(self._make(dict(self._settings), options), options)
        return str(path)


def _settings(parser: argparse.ArgumentParser, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a challenge. Raises ConfigError with the parser's own message."""

    def refuse(message: str) -> None:
        raise ConfigError(f"environment.arguments.arguments of {name}: {message}")

    parser.error = refuse  # type: ignore[assignment,method-assign]
    words: list[str] = []
    for key, value in given.items():
        option = f"--{key}" if f"--{key}" in parser._option_string_actions else f"--{key.replace('_', '-')}"
        words += [option] if value is True else [] if value is False else [option, str(value)]
    return vars(parser.parse_args(words))


def _game_files(name: str) -> list[str]:
    """The game files of a path, a directory or a pattern. Raises ConfigError if there is none."""
    found = sorted(map(str, Path(name).iterdir())) if Path(name).is_dir() else sorted(glob.glob(name))
    games = [path for path in found if path.endswith(_ENDINGS)]
    if not games:
        raise ConfigError(f"environment: textworld: {name!r} has no game files (they end with .z8 or .ulx)")
    return games


def game_of(row: Row) -> str:
    """The file of a row's game. Raises ValueError for a row that names none."""
    game = row["game"]
    if not isinstance(game, str) or not Path(game).is_file():
        raise ValueError(f"row {row.id!r} has game={game!r:.200}; it must be the path of a game file")
    return game


def request_infos(admissible_commands: bool) -> Any:
    """What a game is asked for."""
    wanted = ("feedback", "objective", "description", "score", "max_score", "won", "lost", "moves")
    library = importlib.import_module("textworld")
    return library.EnvInfos(**dict.fromkeys(wanted, True), admissible_commands=admissible_commands)


class Games(Protocol):
    """What starts the games of TextWorld that conversations play."""

    name: str
    admissible_commands: bool
    instruction: str

    def start(self, row: Row) -> Any:
        """The game of a row."""
        ...

    def call(self, method: Callable[[], Any]) -> Any:
        """The result of a method of a game."""
        ...


class PlayedGame:
    """One conversation: one game."""

    def __init__(self, source: Games) -> None:
        self._source = source
        self._row: Row | None = None
        self._score = 0.0
        self._foreign: ThreadedObject[Any] = ThreadedObject(self._start, lambda game: game.close(), name=source.name)

    async def begin(self, row: Row) -> Opening:
        self._row = row
        game = await self._foreign.make()
        state = self._checked(await self._foreign.ask(partial(self._source.call, game.reset)), "reset")
        self._game, self._state, self._highest = game, state, float(state.get("max_score") or 1)
        text = "\n\n".join(
            part.strip()
            for part in (state.get("objective"), state.get("description"))
            if isinstance(part, str) and part.strip()
        )
        shown = self._shown(state, text or _cleaned(state["feedback"]))
        return Opening(messages=opened(row.messages, f"{shown}\n\n{self._source.instruction}".strip()))

    async def step(self, turn: Turn) -> Reply:
        command = " ".join(str(turn.message.get("content") or "").split())
        if reason := _refused(command):
            return Reply(
                messages=[{"role": "user", "content": self._shown(self._state, _NO_COMMAND)}],
                info={"score": self._score, "refused": reason},
            )
        answered = await self._foreign.ask(partial(self._source.call, partial(self._game.step, command)))
        if not isinstance(answered, tuple) or len(answered) != 3:
            raise TypeError(f"{self._source.name}.step returned {answered!r:.200}; it must return (state, score, done)")
        state, score, done = self._checked(answered[0], "step"), number(answered[1], self._source.name), answered[2]
        added, self._score, self._state = score - self._score, score, state
        info = {name: state[name] for name in ("won", "lost", "moves") if state.get(name) is not None}
        shown = self._shown(state, _cleaned(state["feedback"]))
        return Reply(
            messages=[{"role": "user", "content": shown}],
            reward=added / self._highest,
            done=bool(done),
            info={**info, "score": self._score},
        )

    async def close(self) -> None:
        await self._foreign.close()

    def _start(self) -> Any:
        assert self._row is not None
        return self._source.start(self._row)

    def _checked(self, state: Any, method: str) -> Mapping[str, Any]:
        """Raises TypeError unless it is a state of a game."""
        if not isinstance(state, Mapping) or not isinstance(state.get("feedback"), str):
            raise TypeError(
                f"{self._source.name}.{method} returned {state!r:.200}; it must be a GameState with a feedback"
            )
        return state

    def _shown(self, state: Any, text: str) -> str:
        """A text of the game, with the commands if they are listed."""
        commands = state.get("admissible_commands") if self._source.admissible_commands else None
        return f"{text}\n\nCommands: {', '.join(sorted(commands))}" if commands else text


def _refused(command: str) -> str | None:
    """Why a command is not given to the game's interpreter, which runs in this process; None if it may be.

    Example: `look`: None; `look. save`: "save" reads or writes files.
    """
    if "\\" in command or not command.isprintable():
        return (
            "a backslash or a control character, which the interpreter takes as its own command, and can wait forever"
        )
    words = re.findall(r"[a-z]+", command.lower())
    word = next((word for word in words if word[:9] in _FILE_COMMANDS), None)
    return None if word is None else f'"{word}" reads or writes files'


def _cleaned(feedback: Any) -> str:
    """What a game says, without its prompt, its status line and its logo."""
    text = _PROMPT.sub("", str(feedback or ""))
    lines = [line for line in text.splitlines() if not (line.strip() and _LOGO.match(line))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
