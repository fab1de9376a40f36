"""ALFWorld through the loop: games of its own domain, made here, with the scores of the library's own environment."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold, hold_all
from support.peers.alfworld_games import TASKS, make_games, plan
from turnwise import assembly
from turnwise.cli import main
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

alfred_tw_env = pytest.importorskip(
    "alfworld.agents.environment.alfred_tw_env", reason="needs an environment of its own with 'turnwise[alfworld]'"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # the library leaves files open
LIMITS = Limits(turns=20, tokens_per_turn=400)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    made = [*make_games(folder), *make_games(folder, list(TASKS)[:4], seed=7)]
    assert len(made) == 10
    return folder


def recipe(name: str | Path, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": f"alfworld:{name}", "arguments": arguments}}, source="recipe")


def own_score(folder: Path, commands: list[str]) -> tuple[str, float, bool]:
    """The first observation, the final score and whether it was won, in the library's own environment."""
    settings = {
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
        "env": {
            "goal_desc_human_anns_prob": 0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "planner",
        },
        "dataset": {"data_path": str(folder), "num_train_games": -1},
    }
    environment = alfred_tw_env.AlfredTWEnv(settings).init_env(batch_size=1)
    try:
        (shown,), _ = environment.reset()
        scores, infos = (0,), {"won": (False,)}
        for command in commands:
            _, scores, _, infos = environment.step([command])
        return shown, float(scores[0]), bool(infos["won"][0])
    finally:
        environment.close()


def played(config: Config, commands: list[str], row: int = 0, size: int = 1) -> list[Trajectory]:
    rows = assembly.rows(config, limit=row + 1)
    environments = assembly.environment_factory(config)
    return hold_all(Says(*commands, *["look"] * 20), environments, row=rows[row], limits=LIMITS, size=size)


def test_games_that_are_won_have_the_score_of_the_librarys_own_environment(games: Path) -> None:
    config = recipe(games)
    rows = assembly.rows(config)
    assert len(rows) == 10
    for number, row in enumerate(rows):
        file = Path(row["game"])
        commands = plan(file)
        (one,) = played(config, commands, number)
        assert one.error is None, one.error
        assert one.stop == "done"
        assert [turn.reward for turn in one.turns] == [0.0] * (len(commands) - 1) + [1.0]
        assert one.turns[-1].info["won"] is True
        if number < 3:  # each starts a process of the library
            shown, score, won = own_score(file.parents[1], commands)
            assert (score, won) == (1.0, True)
            assert one.messages[0]["content"].startswith(shown.strip())
            assert own_score(file.parents[1], commands[:-1])[1:] == (0.0, False)


def test_conversations_at_the_same_time_do_not_influence_each_other(games: Path) -> None:
    config = recipe(games, admissible_commands=True)
    commands = plan(Path(assembly.rows(config)[1]["game"]))
    alone = played(config, commands, 1)[0]
    for one in played(config, commands, 1, size=6):
        assert one.error is None, one.error
        assert one.messages == alone.messages
    assert "Commands: close " in alone.messages[4]["content"] or "Commands: examine " in alone.messages[4]["content"]
    (one,) = played(config, ["dance", "go to the moon"], 1)
    assert one.messages[2]["content"].startswith("Nothing happens.")


def test_kinds_of_tasks_and_held_out_games_are_chosen(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe(games, task_types=["look_at_obj_in_light"], eval_games=str(games))
    assert ["look_at_obj_in_light" in row["game"] for row in assembly.rows(config)] == [True, True]
    assert len(assembly.rows(config, held_out=True)) == 2
    monkeypatch.setattr(importlib.import_module("alfworld.info"), "ALFWORLD_DATA", str(tmp_path))
    make_games(tmp_path / "json_2.1.1" / "train", ["pick_two_obj_and_place"])
    assert main(["envs", "alfworld:train"]) == 0
    shown = capsys.readouterr().out
    assert "rows     1 games" in shown
    assert "Your task is to: " in shown
    with pytest.raises(
        ConfigError, match=r"json_2\.1\.1/valid_seen is not a folder; `alfworld-download` gets the games"
    ):
        assembly.environment_factory(recipe("valid_seen"))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("valid_sen", {}, "valid_sen is not a folder; did you mean 'valid_seen'"),
        (".", {"task_types": ["pick_two_obj"]}, "task_types has 'pick_two_obj'; did you mean 'pick_two_obj_and_place'"),
        (".", {"task_types": "pick_two_obj_and_place"}, "it must be a list of kinds"),
        ("docs", {}, "docs has no solvable games of these kinds"),
    ],
)
def test_what_is_wrong_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(name, **arguments))


def test_a_row_without_a_game_fails_its_conversation(games: Path) -> None:
    config = recipe(games)
    row = replace(assembly.rows(config, limit=1)[0], fields={"game": "nowhere"})
    one = hold(Says("look"), assembly.environment_factory(config), row=row, limits=LIMITS)
    assert one.error is not None
    assert "has game='nowhere'; it must be the path of a game file" in one.error.message
