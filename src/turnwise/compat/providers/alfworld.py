"""`environment: alfworld:train`: household tasks of ALFWorld as text games.

A name is a part of ALFWorld's data (`alfworld-download` gets it), or a folder in the same layout; each game that the package's
`AlfredTWEnv` takes from it is a row (column `game`). A game is loaded with TextWorld and ALFWorld's wrappers, and played as those
of `textworld`. The reward is 1 for the turn that finishes the task."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.providers.provider import About, LibraryEnvironments
from turnwise.compat.providers.textworld import INSTRUCTION, LOADING, PlayedGame, game_of, request_infos
from turnwise.data.rows import ProvidedRows
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError, nearest
from turnwise.types import Row

_PARTS = ("train", "valid_seen", "valid_unseen")
_FOLDER = "json_2.1.1"


class Alfworld(LibraryEnvironments):
    """Makes household games (an EnvironmentSource with rows).

    Args:
        name: `train`, `valid_seen` or `valid_unseen`, below `$ALFWORLD_DATA/json_2.1.1`; or a folder with such games.
        eval_games: The same, for held-out rows.
        task_types: Kinds of tasks, such as `[pick_and_place_simple]`; null: all six.
        admissible_commands: Whether each observation lists the commands that do something.
        instruction: The end of the first message.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        eval_games: str | None = None,
        task_types: Sequence[str] | None = None,
        admissible_commands: bool = False,
        instruction: str = INSTRUCTION,
    ) -> None:
        self.name = f"alfworld:{name}"
        self.admissible_commands, self.instruction = admissible_commands, instruction
        self._library = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
        kinds = self._library.TASK_TYPES
        if isinstance(task_types, str) or task_types == []:
            raise ConfigError(
                f"environment.arguments.task_types is {task_types!r}; it must be a list of kinds of tasks"
            )
        for kind in task_types or ():
            if kind not in kinds.values():
                raise ConfigError(
                    f"environment.arguments.task_types has {kind!r:.80}{nearest(str(kind), list(kinds.values()))}; the kinds are "
                    f"{', '.join(kinds.values())}"
                )
        self._kinds = [number for number, kind in kinds.items() if task_types is None or kind in task_types]
        self._games = self._games_of(name)
        self._held_out = [] if eval_games is None else self._games_of(eval_games)

    @classmethod
    def names(cls) -> Sequence[str]:
        """The parts of the data."""
        return _PARTS

    def about(self) -> About:
        """What the games bring."""
        return About(rows=f"{len(self._games)} games")

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """A row for each game."""
        if held_out and not self._held_out:
            raise ConfigError(
                f"{self.name} has no held-out games: set environment.arguments.eval_games, such as valid_unseen, or name a "
                f"file in data.eval"
            )
        return ProvidedRows(records=({"game": game} for game in (self._held_out if held_out else self._games)[:count]))

    def start(self, row: Row) -> Any:
        """The game of a row."""
        library = importlib.import_module("textworld")
        wrappers = [self._library.AlfredDemangler(shuffle=False), self._library.AlfredInfos]
        with LOADING:
            return library.start(game_of(row), request_infos=request_infos(self.admissible_commands), wrappers=wrappers)

    def call(self, method: Callable[[], Any]) -> Any:
        """The result of a method of a game. The parser of what games say, and the translator of the planner, which replaces
        `sys.stdout` while it works, have one state in a process, so all games wait for each other."""
        with LOADING:
            return method()

    def __call__(self) -> Environment:
        return PlayedGame(self)

    def _games_of(self, name: str) -> list[str]:
        """The games of a part of the data, or of a folder, that the package finds solvable. Raises ConfigError."""
        data = Path(os.path.expandvars(importlib.import_module("alfworld.info").ALFWORLD_DATA)) / _FOLDER
        folder = data / name if name in _PARTS else Path(name)
        if not folder.is_dir():
            raise ConfigError(
                f"environment: alfworld: {folder} is not a folder{'' if name in _PARTS else nearest(name, _PARTS)}; "
                f"`alfworld-download` gets the games of {', '.join(_PARTS)} into {data} ($ALFWORLD_DATA)"
            )
        settings = {
            "env": {"goal_desc_human_anns_prob": 0, "task_types": self._kinds},
            "dataset": {"data_path": str(folder), "num_train_games": -1},
        }
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = sorted(self._library.AlfredTWEnv(settings, train_eval="train").game_files)
        if not found:
            raise ConfigError(
                f"environment: alfworld: {folder} has no solvable games of these kinds (folders with traj_data.json and "
                f"game.tw-pddl, which `alfworld-generate` writes)"
            )
        return found
