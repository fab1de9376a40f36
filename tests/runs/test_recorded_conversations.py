"""What a run records: thinned, compressed, resumed, and read by everything that reads runs."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.recipes import PLACES, save_recipe
from support.tiny import save_rows
from turnwise import api, record
from turnwise.cli import main
from turnwise.commands.show import Selection, show
from turnwise.config.recipe import load
from turnwise.data.rows import read_rows
from turnwise.errors import ConfigError, RunError
from turnwise.record.writer import Retention
from turnwise.runs.replay import replay
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train
from turnwise.types import Failure, Row, Trajectory
from turnwise.view.runs import ViewedRun, find_runs


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 4},
        train={"steps": 5, "batch_size": 2, "group_size": 4, "lr": 0.01},
        data={
            "train": str(save_rows(tmp_path / "train.jsonl")),
            "eval": str(save_rows(tmp_path / "eval.jsonl", 2)),
        },
    )


def run(recipe: Path, *overrides: str) -> Path:
    """The directory of a finished run."""
    config, _ = load(recipe, overrides)
    with open(os.devnull, "w") as nowhere:
        asyncio.run(train(assemble(config), TrainReport(Console(file=nowhere))))
    return Path(config.output)


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


THINNED = ("record.every=2", "record.best_and_worst=1", "record.compression=gzip")


def test_a_run_records_what_the_recipe_says(recipe: Path) -> None:
    complete = run(recipe, "deterministic=true")
    thinned = run(recipe, "deterministic=true", *THINNED, "record.trainer_logprobs=false", f"output={complete}-thinned")
    everything = list(record.read(complete))
    assert len(everything) == 5 * 2 * 4
    assert any(segment.trainer_logprobs for one in everything for segment in one.segments)
    assert not (thinned / "trajectories.jsonl").exists()
    kept = record.RecordedTrajectories(thinned)
    assert {one.step for one in kept} == {1, 2, 4, 5}  # the first, each second, the last
    assert not any(segment.trainer_logprobs for one in kept for segment in one.segments)
    for one in {one.group for one in kept}:
        group = [other for other in everything if other.group == one]
        rewards = sorted(other.reward for other in group if other.reward is not None)
        assert sorted(other.reward for other in kept if other.group == one) == [rewards[0], rewards[-1]]  # type: ignore[type-var]
    # metrics are of all conversations
    names = ("reward/mean", "tokens/sampled", "tokens/trained", "groups/zero_std")
    of_all, of_thinned = metrics(complete), metrics(thinned)
    assert [[line[name] for name in names] for line in of_thinned] == [
        [line[name] for name in names] for line in of_all
    ]
    assert [line["record/dropped"] for line in of_thinned] == [4, 4, 8, 4, 4]
    assert "record/dropped" not in of_all[0]
    assert len(list(record.read(thinned / "eval_trajectories.jsonl"))) == 4  # evaluations are complete


def test_a_resumed_run_records_what_an_uninterrupted_run_records(recipe: Path) -> None:
    straight = run(recipe, "deterministic=true", *THINNED)
    resumed = f"output={straight}-resumed"
    run(recipe, "deterministic=true", *THINNED, resumed, "train.steps=3", "checkpoint.every=3")
    directory = run(recipe, "deterministic=true", *THINNED, resumed, "resume=auto")
    expected = [one.id for one in record.read(straight)]
    # step 3 was the last step of the first part
    assert [one.id for one in record.read(directory) if one.step != 3] == expected
    with pytest.raises(RunError, match=r"record\.compression cannot change"):
        run(recipe, "deterministic=true", resumed, "resume=auto", "train.steps=6", "record.compression=none")


def test_everything_that_reads_runs_reads_compressed_and_thinned_runs(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run(recipe, *THINNED)
    file = directory / "trajectories.jsonl.gz"
    with gzip.open(file) as lines:
        ids = [json.loads(line)["id"] for line in lines]
    assert [one.id for one in record.read(directory)] == ids
    assert (directory / "trajectories.jsonl.gz.index").is_file()  # written when the run ended
    (one,) = record.RecordedTrajectories(directory).with_id(ids[2])
    assert one.id == ids[2]
    # show
    with (tmp_path / "shown").open("w") as shown:
        console = Console(file=shown, width=200)
        show(console, directory)
        show(console, directory, Selection(id=ids[2]))
        show(console, directory, Selection(step=4, worst=1))
        show(console, directory, Selection(last=1), evaluation=True)
    text = (tmp_path / "shown").read_text()
    assert "16 conversations; " in text
    assert "24 conversations are not recorded (record.every, record.best_and_worst)" in text
    assert ids[2] in text
    # view
    assert find_runs([directory]) == [directory]
    viewed = ViewedRun(directory)
    for index in viewed.indexes.values():
        index.update()
    assert viewed.indexes["train"].columns()["id"] == ids
    assert viewed.conversation("train", 2)["id"] == ids[2]
    assert viewed.summary()["conversations"] == {"train": 16, "eval": 4}
    viewed.close()
    # replay
    (replayed,) = asyncio.run(replay(directory, id=ids[2]))
    assert (replayed.id, list(replayed.differences)) == (ids[2], [])
    # as data of fine-tuning, and from Python
    assert len(read_rows(str(file), columns={"prompt": "messages"})) == 16
    assert [one.id for one in api.RunResult(directory).trajectories] == ids
    assert main(["show", str(directory), "--id", "nobody"]) == 1
    assert "no conversation in" in capsys.readouterr().err


def test_rewards_that_compare_a_group_are_not_replayed_on_a_part_of_it(recipe: Path) -> None:
    directory = run(recipe, *THINNED, f"reward.group=['{PLACES}:ranked']")
    with pytest.raises(RunError, match=r"record.best_and_worst=1.*compares the conversations of a group"):
        asyncio.run(replay(directory))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["record.best_and_worst=2"], "record.best_and_worst=2 has no effect.* and a group has 4"),
        (["record.every=2", "train.steps=2"], "record.every=2 has no effect with train.steps=2"),
    ],
)
def test_what_keeps_everything_is_refused(recipe: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(recipe, *overrides)


def conversation(id: str, group: str, reward: float | None) -> Trajectory:
    one = Trajectory(id=id, group=group, row=Row(id=group, messages=[]), reward=reward)
    if reward is None:
        one.fail(Failure("environment", "no luck"))
    return one


def test_which_conversations_of_a_group_are_kept() -> None:
    rewards = [0.5, None, 1.0, 0.5, None, 0.0, 1.0]
    group = [conversation(f"a/{n}", "a", reward) for n, reward in enumerate(rewards)]
    other = [conversation("b/0", "b", None)]
    kept = Retention(every=3, best_and_worst=1).kept([*group, *other], step=1, steps=9)
    assert [one.id for one in kept] == ["a/1", "a/2", "a/5", "b/0"]
    kept = Retention(best_and_worst=2).kept(group, step=2, steps=9)
    assert [one.id for one in kept] == ["a/1", "a/2", "a/3", "a/4", "a/5", "a/6"]
    steps = [step for step in range(1, 12) if Retention(every=5).kept(group, step=step, steps=11)]
    assert steps == [1, 5, 10, 11]
