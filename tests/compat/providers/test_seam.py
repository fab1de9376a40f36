"""`environment: provider:name`: how a name becomes an environment, with rows of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold
from support.own_environment import interpreter, run_tests
from turnwise import assembly
from turnwise.cli import main
from turnwise.compat.providers.provider import PROVIDERS, Provider, environment_target
from turnwise.config.recipe import checked
from turnwise.data.order import DataState, Order, RowSource
from turnwise.errors import ConfigError, DataError
from turnwise.options.schema import Config

LAKE = "gymnasium:FrozenLake-v1"
CLASS = """
from turnwise import SingleTurn
from turnwise.data.rows import ProvidedRows

class Brings(SingleTurn):
    def tools(self): return ()
    def make(self, in_front): return in_front((), SingleTurn())
    async def aclose(self): pass
    def rows(self, count, *, held_out):
        words = ["a", "b", "c"] if not held_out else ["z"]
        return ProvidedRows(records=[{"prompt": word, "word": word} for word in words])

class Wrong(Brings):
    def rows(self, count, *, held_out): return ProvidedRows(records=["no dict"])

class Empty(SingleTurn): pass
"""


def recipe(environment: Any, **data: Any) -> Config:
    return checked({"model": "m", "environment": environment, "data": data}, source="recipe")


def test_the_rows_of_an_environment_are_those_of_a_recipe_without_data() -> None:
    rows = assembly.rows(recipe(LAKE), limit=3)
    assert [(row.id, row["seed"], row.seed_step) for row in rows] == [("1", 0, 3), ("2", 1, 3), ("3", 2, 3)]
    held_out = assembly.rows(recipe(LAKE, eval="environment:2"), held_out=True)
    assert [(row["seed"], row.seed_step) for row in held_out] == [(10**9, 0), (10**9 + 1, 0)]
    assert len(assembly.rows(recipe(LAKE, train="environment:40"))) == 40


def test_a_later_pass_over_rows_of_seeds_has_other_seeds_and_none_is_repeated() -> None:
    rows = assembly.rows(recipe(LAKE, train="environment:4"))
    source = RowSource(rows, Order(4, seed=0), None, DataState())
    taken = [row for _, row in source.next_rows(12, [0] * 12)]
    assert sorted(row["seed"] for row in taken) == list(range(12))
    assert len({row.id for row in taken}) == 12


def test_the_rows_of_an_environment_and_of_a_file_can_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "", "seed": 77}\n', encoding="utf-8")
    rows = assembly.rows(recipe(LAKE, train=["environment:2", str(tmp_path / "more.jsonl")]))
    assert [(row["seed"], row.seed_step) for row in rows] == [(0, 2), (1, 2), (77, 0)]


def test_a_class_of_the_user_may_bring_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CLASS, encoding="utf-8")
    assert [row["word"] for row in assembly.rows(recipe(f"{path}:Brings"))] == ["a", "b", "c"]
    held_out = assembly.rows(recipe(f"{path}:Brings", eval="environment"), held_out=True)
    assert [row.messages[0]["content"] for row in held_out] == ["z"]
    with pytest.raises(DataError, match="row 1: the environment gives a str; a row must be a dict"):
        assembly.rows(recipe(f"{path}:Wrong"))
    with pytest.raises(ConfigError, match=r"data.train is missing: the environment .*:Empty brings no rows"):
        assembly.rows(recipe(f"{path}:Empty"))


def test_a_recipe_without_rows_is_refused_where_the_environment_has_none() -> None:
    with pytest.raises(ConfigError, match=r"data\.train is missing: add it to the recipe"):
        checked({"model": "m"}, source="recipe")
    with pytest.raises(DataError, match="environment:none: write environment:N"):
        assembly.rows(recipe(LAKE, train="environment:none"))
    with pytest.raises(DataError, match="these rows have no answers to train on"):
        assembly.conversations(recipe(LAKE))


def test_a_gymnasium_environment_is_played_by_its_id() -> None:
    config = recipe({"use": LAKE, "arguments": {"arguments": {"is_slippery": False}}})
    (row,) = assembly.rows(config, limit=1)
    trajectory = hold(Says("2", "2", "1", "1", "1", "2"), assembly.environment_factory(config), row=row)
    assert trajectory.error is None
    assert [turn.reward for turn in trajectory.turns] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("gymnasium:", r"'gymnasium:' has no name; write gymnasium:NAME"),
        ("gymnasium:FrozenLak-v1", "FrozenLak"),
        ("trl:nowhere.py:Class", "nowhere.py"),
        (
            "textarna:Nim-v0",
            r"no provider and no module 'textarna'; did you mean 'textarena'\?; the providers are: reasoning_gym",
        ),
        ("nemo_gym:x", "nemo_gym:x is no URL. Name a running resources server"),
    ],
)
def test_a_name_that_is_not_there_is_told(use: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(use))


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Provider(
        name="mars", source="x:Y", brings="a crater", module="no_such_library", package="mars", extra="red"
    )
    monkeypatch.setitem(PROVIDERS, "mars", missing)
    with pytest.raises(
        ConfigError, match=r"mars needs the package mars, which is not installed: pip install 'turnwise\[red\]'"
    ):
        environment_target("mars:crater")


def test_envs_lists_libraries_names_and_what_an_environment_brings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(PROVIDERS)
    assert main(["envs", "gymnasium"]) == 0
    known = capsys.readouterr().out.splitlines()
    assert "FrozenLake-v1" in known
    assert "Ant-v2" not in known  # gymnasium says only that mujoco_py is missing
    assert main(["envs", LAKE, "arguments={is_slippery: false}"]) == 0
    shown = capsys.readouterr().out
    assert "players  one" in shown
    assert "answers  an integer from 0 to 3" in shown
    assert shown.endswith("[user] 0\n")
    pytest.importorskip("textarena")
    assert main(["envs", "textarena:Nim-v0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("needs    textarena:Nim-v0 is a game of 2 players")
    assert "shown with opponent=random" in shown
    assert "Current Pile" in shown
    assert main(["envs", "gymnasum:x"]) == 1
    assert "did you mean 'gymnasium'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "requirement", "module", "tests", "faults"),
    [
        # its classic environments need other versions of packages that the tests of turnwise use
        ("verifiers_classic", "verifiers==0.3.1", "verifiers.legacy", "test_verifiers.py", "verifiers"),
        ("verifiers", "verifiers==0.4.0", "verifiers.v1", "test_verifiers_v1.py", "verifiers_v1"),
        ("inspect", "inspect_ai==0.3.285", "inspect_ai", "test_inspect.py", "inspect"),
        ("openenv", "openenv-core==0.3.0", "openenv.core", "test_openenv.py", "openenv"),
        ("textworld", "textworld==1.7.0", "textworld", "test_textworld.py", "textworld"),
        ("alfworld", "alfworld==0.4.2", "alfworld.agents.environment.alfred_tw_env", "test_alfworld.py", "alfworld"),
    ],
)
def test_a_library_is_tested_in_an_environment_of_its_own(
    environment: str, requirement: str, module: str, tests: str, faults: str
) -> None:
    """Its tests, and its rows of the table of faults; the rows of other libraries are those of the quick tests."""
    here = Path(__file__).parent
    run_tests(
        interpreter(environment, requirement, module),
        [here / tests, here / "test_bad_input.py"],
        f"{tests} or {faults}-",
    )
