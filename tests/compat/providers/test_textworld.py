"""TextWorld through the loop: games by seed and from files, with the scores of the library's own loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold, hold_all
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

textworld = pytest.importorskip("textworld", reason="needs pip install 'turnwise[textworld]'")

# said of each game that is not one of jericho's own; textworld reads the score itself
pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")
LIMITS = Limits(turns=40, tokens_per_turn=400)
GAMES: list[tuple[str, dict[str, Any], int]] = [
    ("tw-coin_collector", {"level": 2}, 0),
    ("tw-coin_collector", {"level": 2}, 1),
    ("tw-coin_collector", {"level": 102}, 2),
    ("tw-coin_collector", {"level": 202}, 3),
    ("tw-treasure_hunter", {"level": 1}, 0),
    ("tw-treasure_hunter", {"level": 11}, 1),
    ("tw-simple", {"rewards": "dense", "goal": "detailed"}, 0),
    ("tw-simple", {"rewards": "balanced", "goal": "brief"}, 1),
    ("tw-simple", {"rewards": "sparse", "goal": "none"}, 2),
    ("tw-cooking", {"recipe": 1, "take": 1}, 0),
]


def recipe(name: str, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": f"textworld:{name}", "arguments": arguments}}, source="recipe")


def own_game(file: str, commands: list[str] | None) -> tuple[list[str], float]:
    """The commands, those that win unless they are given, and the final share of the score in the library's own loop."""
    infos = textworld.EnvInfos(policy_commands=True, max_score=True)
    game = textworld.start(file, request_infos=infos)
    state = game.reset()
    commands = list(state["policy_commands"]) if commands is None else commands
    score, done, waiting = 0, False, list(commands)
    while waiting and not done:
        state, score, done = game.step(waiting.pop(0))
    highest = state["max_score"]
    game.close()
    return commands, score / highest


def played(config: Config, commands: list[str], row: int) -> Trajectory:
    chosen = assembly.rows(config, limit=row + 1)[row]
    return hold(Says(*commands, *["look"] * 40), assembly.environment_factory(config), row=chosen, limits=LIMITS)


@pytest.mark.parametrize(("name", "arguments", "seed"), GAMES)
def test_a_game_that_is_won_has_the_score_of_the_librarys_own_loop(
    name: str, arguments: dict[str, Any], seed: int
) -> None:
    config = recipe(name, arguments=arguments)
    environments, row = assembly.environment_factory(config), assembly.rows(config, limit=seed + 1)[seed]
    # the game is made once: this is the most of what takes time here
    commands, expected = own_game(environments._shared[-1].game_file(row), None)  # type: ignore[union-attr]
    trajectory = hold(Says(*commands, *["look"] * 40), environments, row=row, limits=LIMITS)
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    assert sum(turn.reward for turn in trajectory.turns) == pytest.approx(expected) == pytest.approx(1.0)
    assert trajectory.turns[-1].info["won"] is True
    assert "$$$" not in trajectory.messages[0]["content"]


def test_the_text_is_that_of_the_game_and_commands_are_listed_if_asked_for() -> None:
    config = recipe("tw-coin_collector", arguments={"level": 2}, admissible_commands=True)
    trajectory = played(config, ["dance", "look"], 0)
    first, _, second = (message["content"] for message in trajectory.messages[:3])
    assert "Commands: go " in first
    assert first.endswith("such as: go east")
    assert ">" not in second
    assert trajectory.turns[0].reward == 0.0
    assert [turn.info["moves"] for turn in trajectory.turns[:2]] == [
        0,
        1,
    ]  # a command that is not understood is no move


def test_the_interpreter_gets_no_command_that_hangs_it_or_touches_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe("tw-coin_collector", arguments={"level": 1}, admissible_commands=True)
    monkeypatch.chdir(tmp_path)  # the interpreter's files would be here
    hostile = ["save", "\\\\c", "\0abc", "look. Script x", "transcripts", "restore"]
    trajectory = played(config, [*hostile, "take coin"], 0)
    assert trajectory.error is None, trajectory.error
    assert ["refused" in turn.info for turn in trajectory.turns] == [True] * 6 + [False]
    assert trajectory.messages[2]["content"].startswith("That's not a verb I recognise.\n\nCommands: ")
    assert [turn.reward for turn in trajectory.turns] == [0.0] * 6 + [1.0]
    assert list(tmp_path.iterdir()) == []


def test_games_from_files_run_at_the_same_time_without_influence(tmp_path: Path) -> None:
    files = []
    for seed in (1, 2):
        options = textworld.GameOptions()
        options.seeds, options.path = seed, str(tmp_path / f"{seed}.z8")
        options.nb_rooms, options.nb_objects, options.quest_length = 3, 4, 3
        files.append(textworld.make(options)[0])
    config = recipe(f"{tmp_path}/*.z8", eval_games=files[1])
    rows = assembly.rows(config, limit=2)
    assert [row["game"] for row in rows] == files
    assert [row["game"] for row in assembly.rows(config, held_out=True)] == files[1:]
    for row, file in zip(rows, files, strict=True):
        commands, expected = own_game(file, None)
        together = hold_all(Says(*commands), assembly.environment_factory(config), row=row, size=4, limits=LIMITS)
        assert [sum(turn.reward for turn in one.turns) for one in together] == [pytest.approx(expected)] * 4
        assert len({one.messages[0]["content"] for one in together}) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("tw-coin", {}, "textworld has no environment 'tw-coin'; did you mean 'tw-cooking'"),
        ("tw-coin_collector", {}, "of textworld:tw-coin_collector: .*--level"),
        ("tw-coin_collector", {"arguments": {"level": "x"}}, "invalid int value: 'x'"),
        ("nowhere/*.z8", {}, "'nowhere/\\*.z8' has no game files"),
        (
            "tw-coin_collector",
            {"arguments": {"level": 1}, "eval_games": "a.z8"},
            "eval_games has no effect with the challenge tw-coin_collector",
        ),
    ],
)
def test_what_is_wrong_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(name, **arguments))


def test_the_games_that_were_made_are_removed() -> None:
    environments = assembly.environment_factory(recipe("tw-coin_collector", arguments={"level": 1}))
    folder = environments._shared[-1]._challenge.folder  # type: ignore[union-attr]
    assert folder.is_dir()
    asyncio.run(environments.aclose())
    assert not folder.exists()
