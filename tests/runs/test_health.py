"""The monitors of `health`: what each warns of, in which step, and what stops a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.tiny import save_model, save_rows
from turnwise.cli import main
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.record.metrics import conversation_metrics, duplicate_share, lowest_correlation
from turnwise.runs.health import HealthMonitors, LearningWatch
from turnwise.types import Failure, Group, Row, Trajectory, Turn

PLACES = Path(__file__).parents[1] / "support" / "places.py"


def made(**options: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **options})


def names(monitors: HealthMonitors, *lines: dict[str, Any]) -> list[list[str]]:
    """The names of what is wrong after each step."""
    return [
        [finding.name for finding in monitors.findings({"step": number, **line}, [])]
        for number, line in enumerate(lines, 1)
    ]


@pytest.mark.parametrize(
    ("name", "metric", "good", "bad", "limit"),
    [
        ("zero_std", "groups/zero_std", 0.5, 0.75, 0.6),
        ("duplicates", "groups/duplicates", 0.5, 0.75, 0.6),
        ("ratio", "ratio/max_deviation", 1.5, 3.0, 2.0),
        ("mismatch", "correction/k3", 0.01, 0.03, 0.02),
        ("kl", "kl", 0.01, 0.03, 0.02),
        ("reward_correlation", "reward/correlation", 0.0, -0.5, -0.25),
        ("failed", "failed", 0.0, 0.75, 0.5),
    ],
)
def test_a_monitor_warns_with_value_limit_and_command(
    name: str, metric: str, good: float, bad: float, limit: float
) -> None:
    config = made(health={"window": 2, name: limit}, output="runs/x")
    monitors = HealthMonitors(config)
    assert monitors.findings({"step": 1, metric: good}, []) == []
    assert monitors.findings({"step": 2, metric: good}, []) == []
    monitors.findings({"step": 3, metric: bad}, [])
    (finding,) = monitors.findings({"step": 4, metric: bad}, [])
    assert finding.name == name
    assert f"is {bad:g} (mean of steps 3 to 4; the limit is health.{name}={limit:g}). " in finding.text
    assert f"`turnwise show runs/x --metric {metric}` and `turnwise show runs/x --step 4`" in finding.text
    off = HealthMonitors(made(health={"window": 1, name: None}))
    assert names(off, {metric: bad}, {metric: bad}) == [[], []]


def test_the_mean_of_the_window_is_compared_and_unknown_values_are_left_out() -> None:
    monitors = HealthMonitors(made(health={"window": 3, "kl": 1.0}))
    lines = [{"kl": value} for value in (None, None, None, 1.5, 0.7, 0.6, 2.0, None)]
    #                                     mean: none, none, none, 1.5, 1.1, 0.93, 1.1, 1.3
    assert names(monitors, *lines) == [[], [], [], ["kl"], ["kl"], [], ["kl"], ["kl"]]


@pytest.mark.parametrize("past", [0, 1, 3])
def test_the_last_steps_are_compared_with_the_first(past: int) -> None:
    train = {"batch_size": 2, "group_size": 4}
    config = made(train=train, health={"window": 2, "tool_use": 0.5, "length": 2.0}, output="runs/x")
    lines = [
        {"step": number, "tool_calls/mean": calls, "tokens/sampled": tokens, "groups/replaced": replaced}
        for number, (calls, tokens, replaced) in enumerate(
            [(2.0, 80, 0), (2.0, 80, 0), (1.0, 160, 0), (1.0, 160, 0), (0.5, 200, 0), (1.4, 360, 2)], 1
        )
    ]
    monitors = HealthMonitors(config, lines[:past])  # a resumed run knows its first steps
    found = {line["step"]: monitors.findings(line, []) for line in lines[past:]}
    assert {step: [finding.name for finding in findings] for step, findings in found.items() if findings} == {
        5: ["tool_use", "length"],  # 0.75 calls of 2 are less than half; 22.5 tokens of 10 are more than twice
        6: ["tool_use", "length"],  # 0.95 calls; the replaced groups were sampled too: 25 and 22.5 tokens
    }
    tool_use, length = found[5]
    assert "a conversation has 0.75 tool calls, and had 2 in the first 2 steps" in tool_use.text
    assert "a conversation has 22.5 sampled tokens, and had 10 in the first 2 steps" in length.text


def test_an_entropy_that_collapses_is_noticed() -> None:
    monitors = HealthMonitors(made(health={"window": 2, "entropy": 0.1}, output="runs/x"))
    entropies = [1.6, 1.4, 0.9, None, 0.2, 0.1]  # the first steps have 1.5; the last two have 0.15, which is the limit
    found = [monitors.findings({"step": n, "entropy": value}, []) for n, value in enumerate(entropies, 1)]
    assert found == [[]] * 6
    (finding,) = monitors.findings({"step": 7, "entropy": 0.05}, [])
    assert finding.name == "entropy"
    assert "the entropy of the policy is 0.075 nats, and was 1.5 in the first 2 steps" in finding.text
    assert "the limit is health.entropy=0.1" in finding.text
    never_known = HealthMonitors(made(health={"window": 1}))
    assert names(never_known, {"entropy": None}, {"entropy": None}, {}) == [[], [], []]


def test_tools_that_were_hardly_used_cannot_collapse() -> None:
    monitors = HealthMonitors(made(health={"window": 1}))
    assert names(monitors, {"tool_calls/mean": 0.05}, {"tool_calls/mean": 0.0}) == [[], []]


def conversation(group: str, number: int, text: str, **rewards: float) -> Trajectory:
    row = Row(id=group, messages=[])
    trajectory = Trajectory(id=f"{group}/{number}", group=group, row=row, reward=sum(rewards.values()))
    trajectory.turns.append(Turn(index=0, message={}, text=text))
    trajectory.rewards = rewards
    return trajectory


def grouped(*texts: str) -> list[Group]:
    return [
        Group(
            id=str(n),
            row=Row(id=str(n), messages=[]),
            trajectories=[conversation(str(n), i, t) for i, t in enumerate(g)],
        )
        for n, g in enumerate(texts)
    ]


def test_duplicates_are_counted_within_groups() -> None:
    assert duplicate_share(grouped("aab", "cd", "a")) == 2 / 5  # the group of one is left out
    assert duplicate_share(grouped("aaa", "bb")) == 1.0
    assert duplicate_share(grouped("a", "a")) is None
    groups = grouped("aab")
    groups[0].trajectories[0].error = Failure("environment", "broken")
    assert duplicate_share(groups) == 0.0
    assert conversation_metrics(grouped("aab", "cd"))["groups/duplicates"] == 2 / 5


def test_the_lowest_correlation_is_that_of_two_parts() -> None:
    parts = [(0.0, 1.0, 2.0), (1.0, 0.0, 2.0), (1.0, 0.5, 2.0), (0.0, 0.5, 2.0)]
    trajectories = [conversation("g", n, "", right=a, short=b, same=c) for n, (a, b, c) in enumerate(parts)]
    value, *pair = lowest_correlation(trajectories) or (0.0,)
    # covariance -0.125, deviations 0.5 and sqrt(0.125)
    assert (value, pair) == (pytest.approx(-0.125 / (0.5 * 0.125**0.5)), ["right", "short"])
    assert lowest_correlation(trajectories[:2]) is None
    group = Group(id="g", row=Row(id="g", messages=[]), trajectories=trajectories)
    assert conversation_metrics([group])["reward/correlation"] == pytest.approx(-(0.5**0.5))
    monitors = HealthMonitors(made(health={"window": 1}))
    (finding,) = monitors.findings({"step": 1, "reward/correlation": -0.7}, [group])
    assert "In this step, these are right and short. " in finding.text


def test_a_warning_comes_once() -> None:
    watch = LearningWatch(made(health={"window": 1}))
    line = {"groups/zero_std": 0.0, "grad_norm": 1.0, "failed": 0.5}
    found = [watch.problems({"step": number, **line}, grouped("ab")) for number in (1, 2, 3)]
    assert [[finding.name for finding in findings] for findings in found] == [["failed"], [], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"health": {"mismatch": 0.2}}, "health.mismatch has no effect without correction.action"),
        ({"health": {"stop": ["mismatch"]}}, "health.mismatch has no effect without correction.action"),
        (
            {"health": {"duplicates": 0.5}, "train": {"group_size": 1}, "credit": {"name": "reinforce_pp"}},
            "health.duplicates has no effect with train.group_size=1",
        ),
        (
            {"health": {"reward_correlation": 0.0}, "reward": {"trajectory": ["r.py:f"]}},
            "health.reward_correlation has no effect, because the reward has only one part",
        ),
        ({"health": {"kl": 0.2}, "train": {"steps": 9}}, "health.window=10 is larger than train.steps=9"),
        (
            {"health": {"stop": ["length"]}, "train": {"steps": 19}},
            "health.length compares the last 10 steps (health.window) with the first, and train.steps=19 is less",
        ),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        refuse_without_effect(made(**options))


def test_a_monitor_that_is_off_cannot_stop_a_run() -> None:
    with pytest.raises(ValueError, match="stop contains kl, and kl is null, which turns this monitor off"):
        made(health={"kl": None, "stop": ["kl"]})
    refuse_without_effect(made(health={"stop": ["kl", "failed"]}))


def test_a_monitor_stops_the_run_with_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model")
    rows = save_rows(tmp_path / "train.jsonl")
    recipe = tmp_path / "recipe.yaml"
    config = {
        "model": {"path": str(model)},
        "data": {"train": str(rows)},
        "environment": {"use": f"{PLACES}:indifferent", "arguments": {"reward": 0.25}},
        "limits": {"turns": 2, "tokens_per_turn": 64},
        "train": {"steps": 4, "batch_size": 2, "group_size": 2},
        "checkpoint": {"every": 4},
        "health": {"window": 2, "stop": ["zero_std"]},
        "output": str(tmp_path / "run"),
    }
    recipe.write_text(json.dumps(config))
    assert main(["train", str(recipe)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "health.stop=zero_std stopped the run after step 2: the share of groups without reward differences is 1 "
        in error
    )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "model").is_dir()
    # the resumed run has its first steps in the record: it stops again after one step, unless zero_std only warns
    assert main(["train", str(recipe), "resume=auto"]) == 1
    assert main(["train", str(recipe), "resume=auto", "health.stop=[]"]) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
