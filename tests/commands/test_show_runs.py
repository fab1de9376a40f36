"""Several runs as a table, and what is said first of one run."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.conversations import Says, a_row, hold
from support.runs import a_run
from turnwise.cli import main
from turnwise.environments.environment import SingleTurn
from turnwise.record.run_directory import RunDirectory
from turnwise.record.writer import write_trajectories


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with two runs of other learning rates and seeds, and a directory that is no run."""
    for name, lr, reward in (("slow", 1e-6, 0.3), ("fast", 1e-4, 0.9)):
        run = a_run(tmp_path / name, options={"train": {"steps": 5, "lr": lr}, "seed": int(name == "fast")})
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "reward/mean": reward}) + "\n")
    (tmp_path / "notes").mkdir()
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["show", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_runs_are_a_table_with_the_options_that_differ(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, runs / "slow", runs / "fast", runs / "notes", "--sort", "reward/mean")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["run", "state", "step", "reward/mean", "eval/reward/mean", "lr", "seed"]
    assert rows[1] == [
        str(runs / "fast"),
        "finished",
        "5",
        "0.900",
        "0.750",
        "0.0001",
        "1",
    ]  # the last value is the best
    assert rows[2] == [str(runs / "slow"), "finished", "5", "0.300", "(0.800", "@2)", "0.750", "1e-06", "0"]
    assert f"left out: {runs / 'notes'} is not a run" in out
    assert printed(capsys, runs, "--sort", "train.lr").splitlines()[1].startswith(str(runs / "slow"))
    assert "loss" in printed(capsys, runs, "--metric", "loss").splitlines()[0]


def test_many_options_that_differ_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = {"sampling": {f"option_{n}": "x" * 20 for n in range(10)}, "seed": 1}
    for name, options in (("one", {"seed": 0}), ("two", others)):
        a_run(tmp_path / name, options=options)
    lines = printed(capsys, tmp_path).splitlines()
    head, _, table = (part.splitlines() for part in "\n".join(lines).partition("\noptions that differ:\n"))
    assert head[0].split() == ["run", "state", "step", "reward/mean", "eval/reward/mean"]
    assert table[0].split() == ["option", str(tmp_path / "one"), str(tmp_path / "two")]
    rows = [line.split() for line in table[1:]]
    assert ["seed", "0", "1"] in rows
    assert ["sampling.option_9", "-", "x" * 20] in rows
    longest = max(len(line) for line in lines if not line.startswith("metrics:"))
    assert longest <= 120 + len(str(tmp_path / "two")) + 2


def test_of_unlike_runs_only_what_differs_among_runs_of_a_kind_is_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(10):
        kind = f"with_a_long_name_{number % 8}"
        task = {"environment": {"use": f"games.py:game_{kind}"}, "data": {"train": f"rows_{kind}.jsonl"}}
        others = {"limits": {"turns": number % 8 + 2}, "sampling": {"temperature": 1 + number % 8 / 8}}
        a_run(tmp_path / f"run-{number}", options={**task, **others, "seed": number})
    lines = printed(capsys, tmp_path).splitlines()
    head, _, table = (part.splitlines() for part in "\n".join(lines).partition("\noptions that differ:\n"))
    assert head[0].split() == ["run", "state", "step", "reward/mean", "eval/reward/mean"]
    assert sorted(table[0].split()) == ["run", "seed", "train", "use"]  # runs 0 and 8 have one task, as have 1 and 9
    assert len([line for line in table if "run-" in line]) == 10
    assert max(map(len, lines)) <= 120 + len(str(tmp_path / "run-0")) + 2


def test_the_table_is_also_json_and_csv(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = json.loads(printed(capsys, runs, "--json", "--metric", "reward/mean"))
    assert [record["run"] for record in records] == [str(runs / "fast"), str(runs / "slow")]
    assert (records[1]["reward/mean"], records[1]["reward/mean.best"], records[1]["reward/mean.best_step"]) == (
        0.3,
        0.8,
        2,
    )
    assert records[0]["train.lr"] == 1e-4
    rows = list(csv.DictReader(io.StringIO(printed(capsys, runs, "--csv"))))
    assert [row["train.lr"] for row in rows] == ["0.0001", "1e-06"]
    assert list(rows[0])[:7] == ["run", "kind", "state", "reason", "step", "steps", "warnings"]


def test_a_run_that_failed_in_its_first_step_says_why(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "short"
    run.mkdir()
    ended = {"how": "failed", "time": 1.0, "reason": "no space left"}
    (run / "run.json").write_text(json.dumps({"kind": "train", "checkpoint": None, "ended": ended}))
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "m"}, "train": {"steps": 5, "lr": 0.5}}))
    RunDirectory(run).write_warning(step=1, name="kl", text="too far. Lower train.lr")
    one = printed(capsys, run)
    assert one.startswith(f"{run}: failed after step 0 of 5, ")
    assert "\n  no space left\n  warning in step 1: kl: too far. Lower train.lr\n" in one
    assert "  train.steps  5  (default null)\nno conversations are recorded\n" in one
    assert f"{run}: failed: no space left\n" in printed(capsys, runs)
    assert main(["show", str(run), "--last", "1"]) == 1
    assert "has no conversations: it ended before its first step" in capsys.readouterr().err


def test_json_and_csv_name_what_is_left_out_on_stderr(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("--json", "--csv"):
        assert main(["show", str(runs / "slow"), str(runs / "notes"), form]) == 0
        out, err = capsys.readouterr()
        assert "left out" not in out
        assert f"left out: {runs / 'notes'} is not a run" in err


def test_json_and_csv_of_a_metric_of_one_run_have_a_row_for_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"step": 1, "loss": 0.5}', "{", '{"step": 2, "loss": 0.25, "reward/mean": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    words = ["show", str(tmp_path), "--metric", "loss", "--metric", "reward/mean"]
    assert main([*words, "--csv"]) == 0
    out, err = capsys.readouterr()
    assert out == "step,loss,reward/mean\n1,0.5,\n2,0.25,1.0\n"
    assert "left out" in err
    assert main([*words, "--json"]) == 0
    rows = [{"step": 1, "loss": 0.5, "reward/mean": None}, {"step": 2, "loss": 0.25, "reward/mean": 1.0}]
    assert json.loads(capsys.readouterr().out) == rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "reward"], "reward is not a metric of these runs"),
        (["--sort", "nothing"], "--sort=nothing is not a column of the table; the columns are: run, kind"),
        (["--json", "--csv"], "--json and --csv are both given"),
        (["--last", "3"], "--last prints conversations of one run"),
        (["--step", "0"], "--step prints conversations of one run"),
    ],
)
def test_what_the_table_cannot_show_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["show", str(runs), *words]) == 1
    assert message in capsys.readouterr().err


def test_a_run_says_first_how_it_ended_what_it_warned_of_and_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(a_run(tmp_path / "demo"))
    run.write_warning(step=3, name="kl", text="the KL divergence of the policy is 4. Lower train.lr")
    run.note_end("failed", step=4, reason="no space left")
    for step, reward in ((0, 0.0), (4, 1.0)):
        held_out = [hold(Says("x"), SingleTurn, row=a_row(id=str(n))) for n in range(3)]
        for trajectory in held_out:
            trajectory.reward = reward
        write_trajectories(run.eval_trajectories, held_out, step=step)
    broken = hold(Says("a", RuntimeError("dead")), SingleTurn, row=a_row(id="broken"))
    broken.fail(broken.error) if broken.error else None
    write_trajectories(run.trajectories, [held_out[0], broken], step=4)
    model = tmp_path / "demo-eval" / "m"
    model.mkdir(parents=True)
    (model.parent / "run.json").write_text('{"kind": "eval", "checkpoint": null}')
    (model / "evaluation.json").write_text("{}")
    (model / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(run.path / "checkpoint")}}))
    (model / "trajectories.jsonl").write_text("")
    lines = printed(capsys, run.path).splitlines()
    assert lines[0].startswith(f"{run.path}: failed after step 4 of 5, ")
    assert lines[1:3] == [
        "  no space left",
        "  warning in step 3: kl: the KL divergence of the policy is 4. Lower train.lr",
    ]
    assert lines[3].split()[0] == "model.path"
    assert [line.split() for line in lines[5:7]] == [
        ["train.steps", "5", "(default", "null)"],
        ["train.lr", "0.0001", "(default", "1e-06)"],
    ]
    assert any(
        line.startswith("held-out reward 0.000 [0.000, 0.000]* → 1.000 [1.000, 1.000]* (steps 0 and 4)")
        for line in lines
    )
    assert f"evaluated by turnwise eval: turnwise show {tmp_path / 'demo-eval'}" in lines


def test_reading_runs_loads_neither_the_schema_nor_torch() -> None:
    """Fifty runs in less than a second: half of it would be these imports."""
    code = (
        "import sys, turnwise.commands.show; print({'pydantic', 'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (shown.stdout, shown.stderr) == ("set()\n", "")
