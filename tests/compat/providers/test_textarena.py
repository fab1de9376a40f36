"""TextArena through the loop: games of one and of two players, with the rewards of the library's own loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.conversations import Says, hold, scripted
from support.own_environment import needs
from turnwise import assembly
from turnwise.cli import main
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

pytestmark = [
    needs("textarena"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning"),
]

LIMITS = Limits(turns=40, tokens_per_turn=400)
ALONE = {
    "GuessTheNumber-v0": ["[10]", "[5]", "12", "[15]", "[16]", "[17]", "[18]", "[19]", "[20]", "[1]"],
    "TowerOfHanoi-v0": ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"],
    "Mastermind-v0": ["[1 2 3 4]", "nonsense", "more nonsense"],
    "FrozenLake-v0": ["[down]", "[right]"] * 20,
    "LightsOut-v0": ["[0, 0]", "[x]", "[y]"],
    "Bandit-v0": ["[red]"] * 40,
}
TOGETHER = {
    "TicTacToe-v0": ["[4]", "[0]", "[8]", "[2]", "[6]", "[1]", "[3]", "[5]", "[7]"],
    "ConnectFour-v0": [f"[col {n % 7}]" for n in range(30)],
    "Nim-v0": ["[0 1]", "[1 1]", "[2 1]", "[2 1]", "[1 1]", "[2 1]", "[2 1]"],
    "KuhnPoker-v0-short": ["[check]", "[bet]", "[call]", "[fold]"] * 10,
}
OPPONENT = """
def first_free(observation):
    import re
    return (re.findall(r"\\[[^\\[\\]]+\\]", observation) or ["[0]"])[-1]

def none(observation):
    return None
"""


def recipe(name: str, **arguments: Any) -> Config:
    use = {"use": f"textarena:{name}", "arguments": arguments}
    return checked({"model": "m", "environment": use}, source="recipe")


def played(config: Config, moves: list[str], *, row: int = 0) -> Trajectory:
    rows = assembly.rows(config, limit=row + 1)
    padded = [*moves, *["?"] * 40]
    return hold(Says(*padded), assembly.environment_factory(config), row=rows[row], limits=LIMITS)


def own_reward(name: str, seed: int, players: int, moves: list[str], opponent: Any = None) -> float:
    """The reward of player 0 in the library's own loop."""
    import textarena

    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    game = textarena.make(name)
    game.reset(num_players=players, seed=seed)
    waiting, done = [*moves, *["?"] * 40], False
    while not done:
        player, observation = game.get_observation()
        done, _ = game.step(action=waiting.pop(0) if player == 0 else opponent(observation))
    rewards, _ = game.close()
    random.setstate(python)
    np.random.set_state(numpy)
    return rewards[0]


@pytest.mark.parametrize("name", ALONE)
def test_a_game_for_one_has_the_reward_of_the_librarys_own_loop(name: str) -> None:
    trajectory = played(recipe(name), ALONE[name])
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    assert sum(turn.reward for turn in trajectory.turns) == own_reward(name, 0, 1, ALONE[name])
    assert "turn_count" in trajectory.turns[-1].info


@pytest.mark.parametrize("name", TOGETHER)
def test_a_game_for_two_has_the_reward_of_the_librarys_own_loop(name: str, tmp_path: Path) -> None:
    path = tmp_path / "opponent.py"
    path.write_text(OPPONENT, encoding="utf-8")
    space: dict[str, Any] = {}
    exec(OPPONENT, space)
    trajectory = played(recipe(name, opponent=f"{path}:first_free", seat=0), TOGETHER[name])
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    expected = own_reward(name, 0, 2, TOGETHER[name], space["first_free"])
    assert sum(turn.reward for turn in trajectory.turns) == expected


@pytest.mark.parametrize("seat", [0, 1])
def test_both_players_are_conversations_of_the_model_with_the_rewards_of_the_librarys_own_loop(seat: int) -> None:
    first, second = (
        ["[4]", "[0]", "[0]", "[8]"],
        ["[1]", "[2]", "[3]"],
    )  # player 0 wins with 0, 4, 8 after an illegal move
    waiting = list(second)
    expected = own_reward("TicTacToe-v0", 0, 2, first, lambda _: waiting.pop(0))
    config = recipe("TicTacToe-v0", opponent="self", seat=seat, reward_scale=2.0)
    environments = assembly.environment_factory(config)
    row = assembly.rows(config, limit=1)[0]
    one = hold(scripted(first, second), environments, row=row, limits=LIMITS)
    assert one.error is None, one.error
    assert one.stop == "done"
    (other,) = one.agents
    assert (other.agent, other.error, other.trained) == (f"player_{1 - seat}", None, True)
    assert [turn.reward for turn in one.turns][-1] == 2 * (expected if seat == 0 else -expected) != 0
    assert [turn.reward for turn in other.turns][-1] == -one.turns[-1].reward
    texts = [[m["content"] for m in both.messages if m["role"] == "user"] for both in (one, other)]
    assert texts[0][0].startswith(f"[GAME] You are Player {seat}")
    assert texts[1][0].startswith(f"[GAME] You are Player {1 - seat}")
    assert not any("You are Player" in text for text in [*texts[0][1:], *texts[1][1:]])
    mover = one if seat == 0 else other
    assert any("attempted an invalid move" in m["content"] for m in mover.messages if m["role"] == "user")


def test_a_game_cannot_go_on_when_a_limit_ends_the_other_player() -> None:
    config = recipe("TicTacToe-v0", opponent="self", seat=0)
    environments, row = assembly.environment_factory(config), assembly.rows(config, limit=1)[0]
    cut = hold(
        scripted(["[4]"], ["[0] " + "x" * 50]), environments, row=row, limits=Limits(turns=9, tokens_per_turn=20)
    )
    assert cut.error is None, cut.error
    assert (cut.stop, cut.turns[-1].reward) == ("done", 0.0)
    assert cut.turns[-1].info["unfinished"] == "a limit ended the conversation of player 1"
    assert cut.agents[0].stop == "length"
    config = recipe("TicTacToe-v0", opponent="self", seat=1)
    environments = assembly.environment_factory(config)
    over = hold(
        scripted(["[4]", "[0]"], ["[1]", "[2]"]), environments, row=row, limits=Limits(turns=2, tokens_per_turn=20)
    )
    assert over.error is None, over.error
    assert [both.reward for both in (over, *over.agents)] == [None, None]
    before = hold(scripted(["x" * 50], ["[4]"]), environments, row=row, limits=Limits(turns=9, tokens_per_turn=20))
    assert (before.error, before.stop, before.turns, before.reward) == (None, "done", [], None)
    assert before.messages[-1]["content"] == "[a limit ended the conversation of player 0]"
    assert before.agents[0].stop == "length"
    config = recipe("TicTacToe-v0", opponent={"policy": "strong"}, seat=0)
    none = hold(scripted(["[4]"]), assembly.environment_factory(config), row=row, limits=LIMITS)
    assert none.error is not None
    assert "names the policy 'strong', and the recipe has none" in none.error.message


def test_a_player_who_ends_the_game_before_the_models_first_turn_has_its_reward() -> None:
    config = recipe("TicTacToe-v0", opponent="self", seat=1)
    environments, row = assembly.environment_factory(config), assembly.rows(config, limit=1)[0]
    one = hold(scripted(["?", "?"], ["[4]"]), environments, row=row, limits=LIMITS)
    assert (one.error, one.stop, one.turns) == (None, "done", [])
    assert one.messages[-1]["content"] == "[another player has ended the game]"
    assert [turn.reward for turn in one.agents[0].turns] == [0.0, -1.0]


def test_a_refused_move_is_told_where_the_wrappers_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "opponent.py"
    path.write_text("def move(observation):\n    return '[0 1]'\n", encoding="utf-8")
    trajectory = played(recipe("Nim-v0-train", opponent=f"{path}:move", seat=0), ["[9 9]", "[1 1]", "[9 9]"])
    first, second, third = [m["content"] for m in trajectory.messages if m["role"] == "user"][1:4]
    refused = "Player 0 attempted an invalid move. Reason: Pile index 9 is out of range."
    assert first.startswith(refused)
    assert "Welcome" not in first
    assert second.startswith("Welcome to Nim")
    assert "invalid move" not in second
    assert third.startswith(refused)


def test_envs_shows_a_game_whose_opening_follows_a_turn_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "textarena:TicTacToe-v0", "opponent=self", "seat=1"]) == 0
    shown = capsys.readouterr().out
    assert "players  2" in shown
    assert "opening  follows turns of the agent player_0" in shown


def test_only_what_is_new_is_shown_and_an_illegal_move_is_answered_by_the_game() -> None:
    trajectory = played(recipe("TicTacToe-v0", opponent="random", seat=0), ["[4]", "[4]"])
    first, second = [m["content"] for m in trajectory.messages if m["role"] == "user"][1:3]
    assert first.startswith("[GAME] Player 0 placed their symbol (O) in cell 4.")
    assert "You are Player 0" not in first
    assert second.startswith("[GAME] Player 0 attempted an invalid move. Reason: cell 4 is already occupied.")


def test_games_at_the_same_time_depend_on_their_seeds_only() -> None:
    config = recipe("TicTacToe-v0", opponent="random")
    state = random.getstate()
    texts = [[m["content"] for m in played(config, ["[8]", "[7]", "[6]"], row=1).messages] for _ in range(2)]
    assert texts[0] == texts[1]
    assert "You are Player 1" in texts[0][0]  # the seats alternate
    assert random.getstate() == state


def test_a_game_that_draws_when_it_is_made_depends_on_its_seed_only() -> None:
    config = recipe("Countdown-v0", arguments={"numbers": None, "target": None})
    state = random.getstate()
    first, again, other = (played(config, [], row=row).messages[0]["content"] for row in (0, 0, 1))
    assert first == again != other
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("TicTacToe-v9", {}, "did you mean 'TicTacToe-v0'"),
        ("TicTacToe-v0", {}, "a game of 2 players, and the model is one of them: set environment.arguments.opponent"),
        ("TicTacToe-v0", {"players": 1, "opponent": "random"}, "does not begin with 1 players: .*has to be 2"),
        ("TicTacToe-v0", {"opponent": "random", "seat": 2}, "seat is 2; with 2 players it must be 0 to 1"),
        (
            "TicTacToe-v0",
            {"opponent": {"policy": "a", "system_prompt": "b"}},
            "`policy` names a policy .* and stands alone",
        ),
        ("TicTacToe-v0", {"opponent": {"endpont": {}}}, "no option 'endpont'; did you mean 'endpoint'"),
        ("Nim-v0", {"opponent": "random", "arguments": {"pile": 3}}, "pile"),
        ("GuessTheNumber-v0", {"opponent": "random"}, "opponent has no effect"),
    ],
)
def test_wrong_arguments_are_refused_before_the_run(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(name, **arguments))


def test_a_move_that_is_no_text_and_a_reward_that_is_none_fail_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import textarena

    path = tmp_path / "opponent.py"
    path.write_text(OPPONENT, encoding="utf-8")
    trajectory = played(recipe("TicTacToe-v0", opponent=f"{path}:none", seat=0), ["[4]"])
    assert trajectory.error is not None
    assert "made the move None; it must be a text" in trajectory.error.message
    monkeypatch.setattr(textarena.SinglePlayerState, "close", lambda self: ({0: None}, {}))
    trajectory = played(recipe("TowerOfHanoi-v0"), ["?", "?", "?"])
    assert trajectory.error is not None
    assert "gave the reward None; it must be a finite number" in trajectory.error.message
