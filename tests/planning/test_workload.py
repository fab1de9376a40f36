"""Measured workloads: what is read from trajectories and from the record of a run."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from support.recipes import save_recipe
from turnwise.cli import main
from turnwise.errors import RunError
from turnwise.planning.simulation import Setup, TurnCost, conversation_cost, fit_engine_speed, measure, simulate
from turnwise.record.reader import read_lines
from turnwise.types import Row, Segment, Trajectory, Turn


def trajectory(turns: list[tuple[int, int, float, float, float]]) -> Trajectory:
    """A conversation of turns `(context tokens, sampled tokens, start, seconds in the engine, seconds in the environment)`."""
    columns: list[int] = []
    made = Trajectory(id="0", group="0", row=Row(id="0", messages=[]))
    for index, (context, sampled, started, engine, environment) in enumerate(turns):
        columns += [-1] * context + [index] * sampled
        made.turns.append(
            Turn(
                index=index,
                message={"role": "assistant", "content": ""},
                text="",
                started=started,
                seconds_engine=engine,
                seconds_environment=environment,
            )
        )
    count = len(columns)
    made.segments.append(Segment(token_ids=[0] * count, logprobs=[0.0] * count, turn=columns, version=[0] * count))
    return made


def test_a_turn_costs_the_tokens_that_are_new_to_the_engine() -> None:
    made = trajectory([(30, 5, 0.0, 1.0, 0.5), (7, 4, 2.0, 1.0, 0.25)])
    assert conversation_cost(made) == (TurnCost(30, 5, 0.5), TurnCost(7, 4, 0.25))


def test_the_speed_of_the_engine_is_found_in_times_that_it_has_made() -> None:
    rng, made = random.Random(0), []
    for block in range(40):
        # `count` equal turns at the same time, with nothing else running
        count, prompt, sampled = rng.randint(1, 16), rng.randint(0, 500), rng.randint(5, 60)
        seconds = 0.02 + 0.0001 * prompt + sampled * (0.005 + 0.0007 * count)
        made += [trajectory([(prompt, sampled, 1000.0 * block, seconds, 0.0)]) for _ in range(count)]
    speed = fit_engine_speed(made)
    assert speed.request == pytest.approx(0.02, rel=1e-3)
    assert speed.prefill == pytest.approx(0.0001, rel=1e-3)
    assert speed.token == pytest.approx(0.005, rel=1e-3)
    assert speed.sharing == pytest.approx(0.0007, rel=1e-3)


def test_no_coefficient_is_negative() -> None:
    # long prompts happen to be in fast turns
    made = [trajectory([(prompt, 10, 100.0 * n, 1.0 - prompt / 1000, 0.0)]) for n, prompt in enumerate((0, 100, 300))]
    speed = fit_engine_speed(made)
    assert min(speed.request, speed.prefill, speed.token, speed.sharing) >= 0
    assert speed.prefill == 0


def test_a_directory_without_training_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "trajectories.jsonl").write_text("")
    with pytest.raises(RunError, match="no finished training step to measure; train some steps first"):
        measure(tmp_path)


def test_the_command_prints_the_plan_and_the_predictions(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"steps": 3, "batch_size": 2, "group_size": 4, "minibatches": 2}
    recipe = save_recipe(tmp_path, model, train=train, limits={"tokens": 24, "turns": 1})
    assert main(["train", str(recipe)]) == 0
    capsys.readouterr()
    assert main(["plan", str(recipe), "--simulate", str(tmp_path / "run"), "--devices", "1,2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "conversations of a step 2 rows x 4 = 8" in text
    assert "2 minibatches x 1 epochs = 2, each on 4 conversations" in text
    assert "at most 192" in text
    assert "memory predicted peak of a training step" in text
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line.get("step", 0) > 1]
    speed = 3600 * len(lines) / sum(line["seconds/step"] for line in lines)
    assert f"2 steps at {speed:.0f} steps per hour, 1.0 turns per conversation" in text
    assert "note: the measured run" not in text
    assert text.count("synchronous") >= 2
    assert text.count("one step off") == 2
    assert "ready for training" not in text


def test_the_command_refuses_a_plan_that_does_not_fit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = save_recipe(tmp_path, model)
    assert main(["plan", str(recipe), "--memory-gb", "0.1"]) == 1
    assert "and there are 0.1 GiB" in capsys.readouterr().out
    assert main(["plan", str(recipe), "--simulate", str(tmp_path), "--devices", "eight"]) == 1
    assert "--devices eight: give numbers of at least 1, separated by commas" in capsys.readouterr().err


ENVIRONMENT = """
import asyncio, random
from turnwise import Opening, Reply, environment, user_message
from turnwise.user_code.calls import conversation_name

@environment
async def slow(row, turns=3):
    latency = random.Random(conversation_name())
    turn = yield Opening(messages=row.messages)
    for index in range(turns):
        await asyncio.sleep(0.4 * latency.lognormvariate(0, 1.0))
        if index == turns - 1:
            yield Reply(reward=-len(turn.text) / 100, done=True)
            return
        turn = yield user_message("And the next?")
"""


@pytest.mark.slow
def test_predictions_agree_with_real_runs(model: Path, tmp_path: Path) -> None:
    """A synchronous run is measured. Its own time, and those of a one-step-off and an asynchronous run, are predicted."""
    (tmp_path / "slow.py").write_text(ENVIRONMENT)
    train = {"steps": 10, "batch_size": 4, "group_size": 4, "lr": 1e-5}
    seconds = {}
    for staleness in (0, 1, 4):
        folder = tmp_path / str(staleness)
        folder.mkdir()
        recipe = save_recipe(
            folder,
            model,
            train={**train, "max_staleness": staleness},
            environment=f"{tmp_path / 'slow.py'}:slow",
            limits={"turns": 3, "tokens_per_turn": 12},
            engine={"name": "local", "threads": 1},
            checkpoint={"every": 10},
        )
        assert main(["train", str(recipe)]) == 0
        lines = list(read_lines(folder / "run" / "metrics.jsonl"))
        seconds[staleness] = sum(line["seconds/step"] - line["seconds/checkpoint"] for line in lines)
    workload = measure(tmp_path / "0" / "run")
    setup = Setup(batch_size=4, group_size=4, max_staleness=0, max_concurrent=256, steps=10)
    for staleness, real in seconds.items():
        predicted = [
            simulate(workload, replace(setup, max_staleness=staleness, seed=seed)).seconds for seed in range(8)
        ]
        assert sum(predicted) / 8 == pytest.approx(real, rel=0.15), json.dumps(seconds)
