"""A sweep trains each combination once, ends no run because of another, and compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes import save_recipe
from support.runs import a_run
from turnwise.cli import main
from turnwise.commands.sweep import Sweep, combinations, divided, run_name, split_values
from turnwise.errors import ConfigError, RunError
from turnwise.record.summary import summarize_run


def test_values_are_divided_at_commas_outside_of_brackets_and_quotes() -> None:
    assert split_values("1e-6, 3e-6,x") == ["1e-6", "3e-6", "x"]
    assert split_values('[a, b],{x: 1, y: 2},"c,d"') == ["[a, b]", "{x: 1, y: 2}", '"c,d"']
    assert divided(["train.lr=1,2", "tools=[a, b]", "seed=3", "~credit"]) == (
        {"train.lr": ["1", "2"]},
        ["tools=[a, b]", "seed=3", "~credit"],
    )
    with pytest.raises(ConfigError, match=r"output=x,y: the sweep sets output of each run"):
        divided(["output=x,y"])


def test_runs_are_all_combinations_and_their_names_say_which() -> None:
    runs = combinations({"train.lr": ["1e-6", "1e-5"], "seed": ["0", "1"]})
    assert list(runs) == ["lr=1e-6,seed=0", "lr=1e-6,seed=1", "lr=1e-5,seed=0", "lr=1e-5,seed=1"]
    assert runs["lr=1e-5,seed=0"] == ["train.lr=1e-5", "seed=0"]
    one, other = run_name(["model.path=a/b"]), run_name(["model.path=a-b"])
    assert (other, one.startswith("path=a-b-")) == ("path=a-b", True)  # two values have two directories
    with pytest.raises(ConfigError, match=r"train.lr=1e-6..1e-4 is a range: give values with commas, or let optuna"):
        combinations({"train.lr": ["1e-6..1e-4"]})


def test_a_directory_of_another_sweep_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("seed: 1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("")
    with pytest.raises(RunError, match="contains other files"):
        Sweep(tmp_path / "out", str(recipe), [], command="train").open()
    sweep = Sweep(tmp_path / "runs", str(recipe), ["seed=2"], command="train")
    sweep.open()
    (tmp_path / "runs" / "sweep.json").write_text(
        json.dumps(
            {"command": "train", "recipe": sweep._about["recipe"], "options": ["seed=2"], "runs": {"a": ["x=1"]}}
        )
    )
    again = Sweep(tmp_path / "runs", str(recipe), ["seed=2"], command="train")
    again.open()
    assert again.runs == {"a": ["x=1"]}
    with pytest.raises(RunError, match="a sweep of another recipe or with other fixed options"):
        Sweep(tmp_path / "runs", str(recipe), ["seed=3"], command="train").open()
    assert again.state("a") is None
    a_run(tmp_path / "runs" / "a")
    assert again.state("a") == "killed"


def test_a_sweep_without_several_values_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = save_recipe(tmp_path, model)
    assert main(["sweep", str(recipe), "seed=1"]) == 1
    assert "no option has several values" in capsys.readouterr().err
    assert main(["sweep", str(recipe), "train.lr=1e-3,high"]) == 1  # before any run begins
    assert "train.lr" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_ends_no_other_and_finished_runs_are_skipped(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 1, "batch_size": 2, "group_size": 2},
    )
    words = [
        "sweep",
        str(recipe),
        f"reference.path={tmp_path / 'absent'},null",
        "loss.kl_coef=0.1",
        "--out",
        str(tmp_path / "s"),
    ]
    for _ in range(2):
        assert main(words) == 1  # one of the two fails
        out = capsys.readouterr().out
        assert "run 1 of 2: ended with status 1; the sweep goes on" in out
    assert "run 2 of 2: reference.path=null is finished already" in out
    assert summarize_run(tmp_path / "s" / "path=null").state == "finished"


def test_ranges_are_sampled_on_the_scale_of_their_ends() -> None:
    optuna = pytest.importorskip("optuna")
    from turnwise.commands.sweep import _distribution, _parameter

    lr = _distribution(optuna, ["1e-6..1e-4"])
    assert (lr.low, lr.high, lr.log) == (1e-6, 1e-4, True)
    size = _distribution(optuna, ["2..8"])
    assert (type(size).__name__, size.log) == ("IntDistribution", False)
    assert _distribution(optuna, ["a", "b"]).choices == ("a", "b")
    assert (_parameter("3e-5", lr), _parameter("4", size)) == (3e-5, 4)
    with pytest.raises(ConfigError, match=r"x\.\.y is not a range of numbers"):
        _distribution(optuna, ["x..y"])
