"""A sweep trains each combination once, ends no run because of another, and compares them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.recipes import save_recipe
from support.runs import a_run
from turnwise.cli import main
from turnwise.commands.command import Context, Stops
from turnwise.commands.sweep import (
    Sweep,
    _without_directory,
    chosen_metric,
    combinations,
    divided,
    named_sets,
    run_name,
    split_values,
)
from turnwise.config.recipe import load
from turnwise.errors import ConfigError, RunError
from turnwise.record.summary import summarize_run
from turnwise.record.writer import write_config
from turnwise.terminal.runs import print_over_seeds, seed_records


def test_values_are_divided_at_commas_outside_of_brackets_and_quotes() -> None:
    assert split_values("1e-6, 3e-6,x") == ["1e-6", "3e-6", "x"]
    assert split_values('[a, b],{x: 1, y: 2},"c,d"') == ["[a, b]", "{x: 1, y: 2}", '"c,d"']
    assert divided(["train.lr=1,2", "tools=[a, b]", "seed=3", "~credit"]) == (
        {"train.lr": ["1", "2"]},
        ["tools=[a, b]", "seed=3", "~credit"],
    )
    with pytest.raises(ConfigError, match=r"output=x,y: the sweep sets output of each run"):
        divided(["output=x,y"])
    assert _without_directory(["seed=0,1", "output=my/runs"], None) == (["seed=0,1"], Path("my/runs"))
    for words, out in ((["output=x,y"], None), (["output=x"], Path("y"))):  # which `divided` refuses
        assert _without_directory(words, out) == (words, out)


def test_runs_are_all_combinations_and_their_names_say_which() -> None:
    runs = combinations({"train.lr": ["1e-6", "1e-5"], "seed": ["0", "1"]})
    assert list(runs) == ["lr=1e-6,seed=0", "lr=1e-6,seed=1", "lr=1e-5,seed=0", "lr=1e-5,seed=1"]
    assert runs["lr=1e-5,seed=0"] == ["train.lr=1e-5", "seed=0"]
    one, other = run_name(["model.path=a/b"]), run_name(["model.path=a-b"])
    assert (other, one.startswith("path=a-b-")) == ("path=a-b", True)  # two values have two directories
    assert run_name(["credit.name=rloo", "loss.name=gspo", "seed=1"]) == "credit.name=rloo,loss.name=gspo,seed=1"
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
    with pytest.raises(RunError, match=r"a sweep of turnwise train: choose another directory with --out DIR"):
        Sweep(tmp_path / "runs", str(recipe), ["seed=2"], command="sft").open()
    assert again.state("a") is None
    a_run(tmp_path / "runs" / "a")
    assert again.state("a") == "killed"


def test_a_sweep_goes_on_with_options_with_which_its_runs_can_be_resumed(model: Path, tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, model, train={"steps": 5, "lr": 1e-4})
    config, _ = load(recipe, ["seed=1", f"output={tmp_path / 's' / 'seed=1'}"])
    a_run(tmp_path / "s" / "seed=1", ended={"how": "finished", "time": 1.0})  # after four steps
    write_config(tmp_path / "s" / "seed=1" / "config.yaml", config)

    def sweep(*fixed: str) -> Sweep:
        one = Sweep(tmp_path / "s", str(recipe), fixed, command="train")
        one.open()
        return one

    (tmp_path / "s" / "sweep.json").write_text(
        json.dumps({"command": "train", "recipe": "", "options": [], "runs": {"seed=1": ["seed=1"]}})
    )
    recipe.write_text(f"# a comment\n{recipe.read_text()}")
    assert not sweep("train.steps=4")._has_more_steps("seed=1", ["seed=1"])
    assert sweep("train.steps=6")._has_more_steps("seed=1", ["seed=1"])
    assert sweep("train.epochs=3")._has_more_steps("seed=1", ["seed=1"])
    sweep("train.lr=1e-3", "resume_changes=[train.lr]")
    with pytest.raises(
        RunError, match=r"choose another directory with --out DIR, or: the run in .*\n  train.lr=0.001 "
    ):
        sweep("train.lr=1e-3")


@pytest.fixture
def context() -> Iterator[Context]:
    with Stops() as stops:
        yield Context(Console(file=io.StringIO(), width=400), stops)


def a_sweep(tmp_path: Path, runs: dict[str, list[str]]) -> Sweep:
    """A sweep with runs of four steps that are finished."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("seed: 1")
    sweep = Sweep(tmp_path / "runs", str(recipe), [], command="train")
    sweep.open()
    for name in runs:
        a_run(tmp_path / "runs" / name, ended={"how": "finished", "time": 1.0})
    sweep.runs = dict(runs)
    return sweep


def test_a_run_of_the_same_name_with_other_options_is_not_taken_as_a_run_of_this_sweep(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, {"lr=1e-6": ["train.lr=1e-6"]})
    sweep.refuse_others({"lr=1e-6": ["train.lr=1e-6"], "lr=1e-5": ["train.lr=1e-5"]})
    with pytest.raises(RunError, match=r"is a run with train.lr=1e-6, and not with critic.lr=1e-6: .* --out DIR"):
        sweep.refuse_others(combinations({"critic.lr": ["1e-5", "1e-6"]}))


@pytest.mark.parametrize(
    ("given", "command", "evaluates", "expected"),
    [
        (None, "train", True, "eval/reward/mean"),
        (None, "train", False, "reward/mean"),
        (None, "sft", True, "eval/loss"),
        (None, "sft", False, "loss"),
        ("entropy", "train", False, "entropy"),
        ("rewards/mine/mean", "train", False, "rewards/mine/mean"),
        ("of_my_own_code", "train", False, "of_my_own_code"),
    ],
)
def test_the_metric_is_one_that_the_runs_will_have(
    given: str | None, command: str, evaluates: bool, expected: str
) -> None:
    assert chosen_metric(given, command=command, evaluates=evaluates) == expected


@pytest.mark.parametrize(
    ("given", "command", "evaluates", "message"),
    [
        ("eval/reward/mean", "train", False, "is of held-out rows, and the recipe has none: set data.eval"),
        ("reward/mean", "sft", True, "is not a metric of turnwise sft"),
        ("entropi", "train", True, "is not a metric; did you mean entropy"),
    ],
)
def test_a_metric_that_no_run_will_have_is_refused_before_the_first(
    given: str, command: str, evaluates: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_metric(given, command=command, evaluates=evaluates)


@pytest.mark.parametrize("metric", ["loss", "reward/mean", "never_written"])
def test_runs_are_compared_by_any_metric(tmp_path: Path, metric: str, context: Context) -> None:
    sweep = a_sweep(tmp_path, {"a": ["seed=1"], "b": ["seed=2"]})
    assert sweep.compare(context, metric) == 0
    out = context.console.file.getvalue()  # type: ignore[attr-defined]
    assert out.count("finished") == 2
    assert ("not sorted: no run has the metric never_written" in out) == (metric == "never_written")


def test_a_finished_run_without_the_metric_names_those_that_it_has(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, {"a": ["seed=1"]})
    assert sweep.result("a", "reward/mean") == 0.6
    assert sweep.result("absent", "reward/mean") is None
    with pytest.raises(RunError, match=r"no metric entropy.*The metrics are: reward/mean, loss, eval/reward/mean"):
        sweep.result("a", "entropy")


def test_trials_go_on_with_new_values_and_are_refused_with_other_options(tmp_path: Path, context: Context) -> None:
    pytest.importorskip("optuna")
    from turnwise.commands.sweep import _optimize

    class Noted(Sweep):
        """Training is left out: a run is finished at once."""

        def check(self, words: Sequence[str]) -> None: ...

        def run(self, name: str, words: Sequence[str], context: Context, *, title: str, metric: str) -> None:
            if name not in self.runs:
                self.runs[name] = list(words)
                a_run(self.directory / name, ended={"how": "finished", "time": 1.0})

    (tmp_path / "r.yaml").write_text("seed: 1")
    sweep = Noted(tmp_path / "runs", str(tmp_path / "r.yaml"), [], command="train")
    for trials in (2, 4, 6):
        _optimize(sweep, {"train.lr": ["1e-6..1e-4"]}, trials, "loss", context)
    assert len({words[0] for words in sweep.runs.values()}) == 6
    for other in (
        {"critic.lr": ["1e-6..1e-4"]},
        {"train.lr": ["1..2"]},
        {"train.lr": ["1e-6..1e-4"], "seed": ["1", "2"]},
    ):
        with pytest.raises(
            RunError, match="not among the values of this sweep: choose another directory with --out DIR"
        ):
            _optimize(sweep, other, 8, "loss", context)


def test_a_sweep_without_several_values_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = save_recipe(tmp_path, model)
    assert main(["sweep", str(recipe), "seed=1"]) == 1
    assert "no option has several values" in capsys.readouterr().err
    assert main(["sweep", str(recipe), "train.lr=1e-3,high"]) == 1  # before any run begins
    assert "train.lr" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_sweep_goes_on_to_more_steps(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"turns": 2, "tokens_per_turn": 6}
    recipe = save_recipe(tmp_path, model, limits=limits, train={"steps": 1, "batch_size": 2, "group_size": 2})
    for steps, expected in ((1, "finished after"), (2, "(resumed)"), (2, "is finished already")):
        assert main(["sweep", str(recipe), "seed=0,1", f"train.steps={steps}", "--out", str(tmp_path / "s")]) == 0
        assert capsys.readouterr().out.count(expected) == 2
        assert [summarize_run(tmp_path / "s" / name).step for name in ("seed=0", "seed=1")] == [steps, steps]


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
        "--metric",
        "entropy",
        "--out",
        str(tmp_path / "s"),
    ]
    out = ""
    for _ in range(2):
        assert main(words) == 1  # one of the two fails
        out = capsys.readouterr().out
        assert "run 1 of 2: ended with status 1; the sweep goes on" in out
        assert "entropy" in out
        assert len(out.splitlines()) < 40  # the output of the runs is in files
        assert "not sorted" not in out
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


def finished(path: Path, reward: float | None, *, seed: int, **train: Any) -> Path:
    """A finished run of five steps with this reward in the last."""
    options = {"seed": seed, "train": {"steps": 5, "lr": 1e-4, **train}}
    run = a_run(path, options=options, ended={"how": "finished", "time": 1.0})
    line = {"step": 5, "loss": 0.5} | ({} if reward is None else {"reward/mean": reward})
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return run


def test_runs_that_differ_in_the_seed_have_a_mean_and_a_deviation(
    context: Context, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr, rewards in ((1e-5, (0.4,)), (1e-4, (0.2, 0.7)), (1e-3, (0.5, None))):
        for seed, reward in enumerate(rewards):
            finished(tmp_path / f"{lr:.0e}-{seed}", reward, seed=seed, lr=lr)
    a_run(tmp_path / "killed", options={"seed": 5})
    summaries = [summarize_run(path) for path in sorted(tmp_path.iterdir())]
    records = seed_records(summaries, metrics=["reward/mean"], by="reward/mean")
    deviation = pytest.approx(0.5 / 2**0.5)
    assert [list(record.values()) for record in records] == [
        [2, [0, 1], 1e-4, pytest.approx(0.45), deviation],
        [1, [0], 1e-5, 0.4, None],
        [2, [0, 1], 1e-3, None, None],  # one lacks the metric
    ]
    print_over_seeds(context.console, records)
    rows = [line.split() for line in context.console.file.getvalue().splitlines() if line]  # type: ignore[attr-defined]
    assert rows[1:] == [
        ["seeds", "lr", "reward/mean"],
        ["2", "0.0001", "0.450", "±", "0.354"],
        ["1", "1e-05", "0.400"],
        ["2", "0.001", "-"],
    ]
    assert main(["show", str(tmp_path), "--over-seeds", "--metric", "loss", "--csv"]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        "1,[0],1e-05,0.5,",
        '2,"[0, 1]",0.0001,0.5,0.0',
        '2,"[0, 1]",0.001,0.5,0.0',
        "runs,seeds,train.lr,loss,loss.std",
    ]
    assert main(["show", str(tmp_path)]) == 0
    assert "over the seeds: mean ± standard deviation" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "killed"), "--over-seeds"]) == 1
    assert "of finished runs, and none of these has finished" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "1e-04-0"), "--over-seeds"]) == 1
    assert "no two finished runs differ in the seed only" in capsys.readouterr().err


def test_sets_of_options_are_the_values_of_one_option() -> None:
    given = ["lora=model.lora.rank=8 train.lr=1e-4", "some=tools='[a, b]' ~credit", "plain="]
    assert named_sets(given, beside=["seed=0,1"]) == {
        "lora": ["model.lora.rank=8", "train.lr=1e-4"],
        "some": ["tools=[a, b]", "~credit"],
        "plain": [],
    }
    assert combinations({"set": ["lora"], "seed": ["0", "1"]}) == {
        "set=lora,seed=0": ["set=lora", "seed=0"],
        "set=lora,seed=1": ["set=lora", "seed=1"],
    }


@pytest.mark.parametrize(
    ("given", "beside", "message"),
    [
        (["train.lr"], [], "--set train.lr: write NAME='OPTION=VALUE ...'"),
        (["a b=train.lr=1"], [], "write NAME='OPTION=VALUE ...'"),
        (["a=seed=1", "a=seed=2"], [], "--set a is given twice"),
        (["a=seed=1,2"], [], "--set a: seed=1,2: in a set, an option has one value"),
        (["a=output=x,y"], [], "the sweep sets output of each run"),
        (["a=seed='1"], [], "No closing quotation"),
        (["a=train.lr=1"], ["train.lr=2"], "--set a: train.lr is given beside the sets, too"),
        (["a=train.lr=1"], ["set=a,b"], "set=... is given beside --set"),
    ],
)
def test_a_set_that_cannot_be_is_refused(given: list[str], beside: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        named_sets(given, beside=beside)
    assert message in str(refused.value)


def test_the_runs_of_a_set_get_its_options_and_are_shown_by_its_name(
    model: Path, tmp_path: Path, context: Context
) -> None:
    recipe = save_recipe(tmp_path, model, train={"steps": 5, "lr": 1e-5})
    sets = {"fast": ["train.lr=1e-3", "train.weight_decay=0.1"], "slow": ["train.lr=1e-4"]}
    sweep = Sweep(tmp_path / "s", str(recipe), ["train.steps=4"], command="train", sets=sets)
    sweep.open()
    config = sweep._config("set=fast,seed=1", ["set=fast", "seed=1"])
    assert (config.train.lr, config.train.weight_decay, config.train.steps, config.seed) == (1e-3, 0.1, 4, 1)
    sweep.check(["set=slow", "seed=1"])
    runs = combinations({"set": list(sets), "seed": ["0", "1"]})
    for number, (name, words) in enumerate(runs.items()):
        chosen = {"lr": 1e-3, "weight_decay": 0.1} if number < 2 else {"lr": 1e-4, "weight_decay": 0.0}
        run = finished(tmp_path / "s" / name, number / 4, seed=number % 2, **chosen)
        config = sweep._config(name, words)
        write_config(run / "config.yaml", config)
        sweep.run(name, words, context, title="run", metric="loss")  # is finished already
    again = Sweep(tmp_path / "s", str(recipe), ["train.steps=4"], command="train", sets={"slow": sets["slow"]})
    again.open()  # a set that is not given again is known
    assert again.compare(context, "reward/mean") == 0
    rows = [line.split() for line in context.console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["2", "slow", "0.625", "±", "0.177", "0.750", "±", "0.000"] in rows
    # the name of the set says lr and weight_decay
    assert ["run", "state", "step", "reward/mean", "eval/reward/mean", "set", "seed"] in rows
    other = Sweep(tmp_path / "s", str(recipe), ["train.steps=4"], command="train", sets={"slow": ["train.lr=1e-2"]})
    with pytest.raises(RunError, match=r"a sweep with other options: .*\n  train.lr=0.01 "):
        other.open()
