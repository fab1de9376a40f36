"""What is said of a run at a glance is what its files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.conversations import Says, a_row, hold
from support.runs import a_run
from turnwise.config.recipe import checked, with_known_model
from turnwise.environments.environment import SingleTurn
from turnwise.errors import ConfigError, RunError
from turnwise.json_yaml import PlainLoader, RecordedLoader, parse_yaml, yaml_text
from turnwise.record.run_directory import RunDirectory, RunLock, is_being_written
from turnwise.record.summary import (
    MetricValues,
    changed_from_defaults,
    differing_options,
    evaluations_of,
    find_summaries,
    group_failures,
    held_out_change,
    recorded_warnings,
    summarize_run,
)
from turnwise.record.writer import write_config, write_trajectories


def test_best_and_final_values_have_their_steps(tmp_path: Path) -> None:
    run = summarize_run(a_run(tmp_path / "a"))
    assert (run.kind, run.step, run.steps) == ("train", 4, 5)
    assert run.metrics["reward/mean"] == MetricValues(0.6, 0.2, 1, 0.8, 2)
    assert run.metrics["reward/mean"].best("reward/mean") == (0.8, 2)
    assert run.metrics["loss"].best("loss") == (-0.8, 2)  # of a loss, the lowest
    assert run.metrics["eval/reward/mean"].last == 0.75


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        ({"how": "finished", "step": 4, "time": 5.0, "reason": None}, "finished"),
        ({"how": "failed", "step": 4, "time": 5.0, "reason": "no memory"}, "failed"),
        (None, "killed"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, ended: dict[str, Any] | None, state: str) -> None:
    path = a_run(tmp_path / "a", ended=ended)
    run = summarize_run(path)
    assert (run.state, run.reason) == (state, None if ended is None else ended["reason"])
    lock = RunLock(path)
    assert summarize_run(path).state == "running"
    lock.release()
    assert summarize_run(path).state == state


def test_a_lock_is_seen_from_outside_and_is_not_lost_by_looking(tmp_path: Path) -> None:
    assert not is_being_written(tmp_path)
    lock = RunLock(tmp_path)
    look = (
        "import sys; from pathlib import Path\n"
        "from turnwise.record.run_directory import is_being_written; print(is_being_written(Path(sys.argv[1])))"
    )
    for _ in range(2):  # looking from the process that holds it must not release it
        assert is_being_written(tmp_path)
        seen = subprocess.run([sys.executable, "-c", look, tmp_path], capture_output=True, text=True)
        assert (seen.stdout, seen.stderr) == ("True\n", "")
    lock.release()
    assert not is_being_written(tmp_path)


def test_the_end_is_noted_and_a_run_that_goes_on_removes_the_note(tmp_path: Path) -> None:
    directory = RunDirectory(a_run(tmp_path / "a"))
    directory.note_end("failed", step=4, reason="out of disk")
    assert (summarize_run(directory.path).state, summarize_run(directory.path).reason) == ("failed", "out of disk")
    directory.note_checkpoint(4)
    assert summarize_run(directory.path).state == "killed"


def test_warnings_are_data_and_those_of_steps_that_are_computed_again_are_removed(tmp_path: Path) -> None:
    directory = RunDirectory(a_run(tmp_path / "a"))
    for step in (2, 3, 4):
        directory.write_warning(step=step, name="kl", text=f"of {step}")
    directory.cut_warnings(3)
    assert [(w.step, w.name, w.text) for w in recorded_warnings(directory.path)] == [
        (2, "kl", "of 2"),
        (3, "kl", "of 3"),
    ]
    assert [w.step for w in summarize_run(directory.path).warnings] == [2, 3]


def test_options_that_differ_from_the_defaults(tmp_path: Path) -> None:
    options = {
        "loss": {"name": "gspo", "kl_coef": 0.0},
        "health": {"window": 10, "kl": 0.5},
        "train": {"steps": 5, "lr": 1e-06},
        "tools": ["t.py:add"],
    }
    changed = changed_from_defaults(summarize_run(a_run(tmp_path / "a", options=options)).options)
    assert changed == {
        "train.steps": (5, None),
        "loss.name": ("gspo", "ppo_clip"),
        "health.kl": (0.5, changed["health.kl"][1]),
        "tools": (["t.py:add"], []),
    }


@pytest.mark.parametrize(("given", "changed"), [("auto", {}), ("float32", {"model.dtype": ("float32", "auto")})])
def test_a_type_that_was_chosen_for_the_machine_is_no_changed_option(
    tmp_path: Path, given: str, changed: dict[str, Any]
) -> None:
    model = {"path": "m", "dtype": given, "device": "cpu"}
    config = with_known_model(checked({"model": model, "data": {"train": "x.jsonl"}}, source="the test"))
    assert config.model.dtype == "float32"
    path = a_run(tmp_path / "a")
    write_config(path / "config.yaml", config)
    assert yaml.safe_load((path / "config.yaml").read_text())["model"]["dtype"] == "float32"
    found = changed_from_defaults(summarize_run(path).options)
    assert {name: value for name, value in found.items() if name == "model.dtype"} == changed


def test_options_that_differ_between_runs(tmp_path: Path) -> None:
    runs = [
        summarize_run(a_run(tmp_path / name, options={"seed": seed, "train": {"steps": 5, "lr": lr}}))
        for name, seed, lr in (("a", 0, 1e-4), ("b", 1, 1e-5))
    ]
    assert differing_options(runs) == ["train.lr", "seed"]  # and not the output


def test_a_type_that_one_run_has_chosen_and_another_recipe_gives_is_no_difference(tmp_path: Path) -> None:
    runs: list[Path] = []
    for given in ("auto", "float32", "bfloat16"):
        model = {"path": "m", "dtype": given, "device": "cpu"}
        config = with_known_model(checked({"model": model, "data": {"train": "x.jsonl"}}, source="the test"))
        runs.append(a_run(tmp_path / given))
        write_config(runs[-1] / "config.yaml", config)
    auto, same, other = (summarize_run(path) for path in runs)
    assert differing_options([auto, same]) == []
    assert differing_options([auto, same, other]) == differing_options([auto, other]) == ["model.dtype"]


def test_the_held_out_change_is_paired_by_row(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a")
    for step, rewards in ((0, {"a": 0.0, "b": 0.5, "only": 1.0}), (4, {"b": 1.0, "a": 0.5})):
        trajectories = [hold(Says("x"), SingleTurn, row=a_row(id=id)) for id in rewards]
        for trajectory, reward in zip(trajectories, rewards.values(), strict=True):
            trajectory.reward = reward
        write_trajectories(path / "eval_trajectories.jsonl", trajectories, step=step)
    change = held_out_change(path)
    assert change is not None
    assert (change.before.mean, change.after.mean, change.test.difference.mean) == (0.25, 0.75, 0.5)
    assert (change.first_step, change.last_step, change.test.better, change.before.rows) == (0, 4, 2, 2)
    assert held_out_change(a_run(tmp_path / "b")) is None  # its conversations are not recorded


def test_evaluations_of_a_run_are_found_by_the_model_that_they_evaluated(tmp_path: Path) -> None:
    run = a_run(tmp_path / "demo")
    for name, model in (("demo-eval", run / "checkpoints" / "step-4"), ("other-eval", tmp_path / "other")):
        folder = tmp_path / name / "m"
        folder.mkdir(parents=True)
        (folder.parent / "run.json").write_text('{"kind": "eval", "checkpoint": null}')
        (folder / "evaluation.json").write_text("{}")
        (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(model)}}))
        (folder / "trajectories.jsonl").write_text("")
        (folder / "metrics.jsonl").write_text('{"reward/mean": 0.5}\n')
    assert evaluations_of(run) == [tmp_path / "demo-eval"]
    (summary,) = find_summaries([tmp_path / "demo-eval"])[0]
    assert (summary.kind, summary.state, summary.metrics["eval/reward/mean"].last) == ("eval", "finished", 0.5)


def test_failures_with_other_numbers_and_names_are_one_group() -> None:
    groups = group_failures(
        [
            (1, "a", "environment", "timeout after 30.1 s"),
            (2, "b", "reward", "KeyError: 'x'"),
            (3, "c", "environment", "timeout after 31 s"),
        ]
    )
    assert [(g.kind, g.count, g.step, g.id, g.message) for g in groups] == [
        ("environment", 2, 3, "c", "timeout after 31 s"),
        ("reward", 1, 2, "b", "KeyError: 'x'"),
    ]


def test_a_directory_of_runs_and_what_is_no_run(tmp_path: Path) -> None:
    a_run(tmp_path / "sweep" / "a")
    a_run(tmp_path / "sweep" / "b")
    (tmp_path / "sweep" / "notes").mkdir()
    found, problems = find_summaries([tmp_path / "sweep", tmp_path / "absent"])
    assert [run.path.name for run in found] == ["a", "b"]
    assert [problem.partition(" is not a run")[0] for problem in problems] == [str(tmp_path / "absent")]
    with pytest.raises(RunError, match="is not a run"):
        summarize_run(tmp_path / "sweep" / "notes")


# the YAML of recipes


WRITTEN = {
    "system": "Answer with 😀 or with 第.",
    "long": "Two lines.\n\n  Indented: # no comment\n" + "long " * 60,
    "texts": ["1e3", "null", "2024-01-01", "yes", " lead", "a: b", "", "\u0085\x07\t", "{x}", "- x"],
    "values": [None, True, 3, 0.1, 1e-7, float("inf"), -0.0, [], {}, [[1], {"a": {"b": []}}]],
}


@pytest.mark.parametrize("value", [WRITTEN, {name: part for name, part in WRITTEN.items() if name != "system"}])
def test_a_written_recipe_is_read_as_it_was_in_the_same_order(value: dict[str, Any]) -> None:
    """By PyYAML's classes in C, by its own, and with emoji by a person."""
    text = yaml_text(value)
    for loader in (RecordedLoader, PlainLoader):
        read = parse_yaml(text, where="recipe", error=ConfigError, loader=loader)
        assert repr(read) == repr(value)
    assert ("😀" in text) == ("system" in value)
