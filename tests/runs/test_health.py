"""A run that cannot learn is refused or told, and the monitors of `health` warn of it or stop it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.tiny import save_model, save_rows
from support.training import train_silently
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.record.metrics import conversation_metrics, duplicate_share, lowest_correlation
from turnwise.record.summary import summarize_run
from turnwise.runs.health import HealthMonitors, LearningWatch, RunProblem
from turnwise.train import assemble
from turnwise.types import Failure, Group, Row, Stop, ToolOutcome, ToolSchema, Trajectory, Turn

# The monitors of `health`: what each warns of, in which step, and what stops a run.


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
        ("slow_rank", "ranks/slowest", 1.25, 10.0, 2.5),
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


def test_failures_are_told_at_the_end_of_a_run_that_is_shorter_than_the_window() -> None:
    bad = {"failed": 0.375, "kl": 9.0}
    assert names(HealthMonitors(made(train={"steps": 3})), bad, bad, bad) == [[], [], ["failed"]]
    assert names(HealthMonitors(made(train={"steps": 4})), bad, bad, bad) == [[], [], []]


@pytest.mark.parametrize(
    ("stop", "limit"),
    [("length", "tokens_per_turn=24"), ("max_tokens", "tokens=70"), ("max_response", "response_tokens=80")],
)
def test_many_answers_that_are_cut_are_told_with_the_limit_that_cuts_most(stop: str, limit: str) -> None:
    config = made(
        limits={"tokens_per_turn": 24, "tokens": 70, "response_tokens": 80}, train={"steps": 3}, output="runs/x"
    )
    few, many = {"stop/done": 0.75, f"stop/{stop}": 0.25}, {"stop/length": 0.125, f"stop/{stop}": 0.5}
    assert names(HealthMonitors(config), few, few, few) == [[], [], []]
    monitors = HealthMonitors(config)
    assert names(monitors, few, many) == [[], []]
    (finding,) = monitors.findings({"step": 3, **many}, [])
    value = {"length": "0.417"}.get(stop, "0.5")
    assert f"middle of an answer is {value}, most of them cut by limits.{limit} (mean of steps 1 to 3" in finding.text
    assert f"Either limits.{limit.partition('=')[0]} is too low for this model: raise it; or the model" in finding.text
    assert f"`turnwise show runs/x --metric stop/{stop}`" in finding.text
    assert "In step 1" not in finding.text
    assert names(HealthMonitors(made(train={"steps": 1}, health={"cut": None})), many) == [[]]
    monitors = HealthMonitors(made(train={"steps": 2, "lr": 0.3}, output="runs/x"))
    assert names(monitors, {"stop/done": 1.0}) == [[]]
    (finding,) = monitors.findings({"step": 2, f"stop/{stop}": 1.0}, [])
    assert "In step 1, only 0 of the conversations were cut" in finding.text
    assert "from the start with a lower train.lr; it is 0.3)" in finding.text


def test_a_slow_rank_is_named_with_its_machine() -> None:
    monitors = HealthMonitors(made(health={"window": 1}))
    (finding,) = monitors.findings({"step": 1, "ranks/slowest": 9.5, "ranks/slowest_rank": 3}, [], "gpu-node-4")
    assert "is 9.5 (mean of steps 1 to 1; the limit is health.slow_rank=3). " in finding.text
    assert "it is trainer rank 3 on gpu-node-4. All ranks wait for it" in finding.text


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


def fallen(means: Sequence[float | None], std: float = 0.5, **health: Any) -> dict[int, RunProblem]:
    """The steps in which the fall of the reward is told."""
    monitors = HealthMonitors(made(health={"window": 2, **health}, output="runs/x", train={"lr": 0.3}))
    lines = [{"step": n, "reward/mean": mean, "reward/std": std} for n, mean in enumerate(means, 1)]
    return {line["step"]: found[0] for line in lines if (found := monitors.findings(line, []))}


def test_a_reward_that_falls_below_its_best_window_is_noticed() -> None:
    rises_and_falls = [0.2, 0.3, 0.6, 0.62, 0.5, 0.4, 0.01, 0.0]  # windows: .25 .45 .61 .56 .45 .205 .005
    found = fallen(rises_and_falls)
    assert list(found) == [8]  # in step 7 the two steps of the window differ too much to be sure
    assert found[8].name == "reward_drop"
    assert "the mean reward is 0.005, and was 0.61 in steps 3 to 4: a fall by 1.21 standard deviations" in found[8].text
    assert "(mean of steps 7 to 8; the limit is health.reward_drop=0.5)" in found[8].text
    assert "with a lower train.lr (it is 0.3)" in found[8].text
    assert "`turnwise show runs/x --metric reward/mean`" in found[8].text
    assert fallen(rises_and_falls, reward_drop=1.25) == {}
    assert fallen(rises_and_falls, reward_drop=None) == {}
    assert fallen([0.9, 0.1, 0.9, 0.1, 0.4, 0.1, 0.1, 0.1]) == {}  # small batches: the steps differ as much
    assert fallen([0.9, 0.9, 0.9, 0.7, 0.7, 0.7]) == {}  # by 0.2, which is 0.4 standard deviations
    assert list(fallen([0.9, 0.9, 0.9, 0.7, 0.7, 0.7], std=0.2)) == [5, 6]  # by 1
    assert fallen([None, 0.9, 0.9, None, 0.0, 0.0], std=0.2).keys() == {6}


def test_a_model_that_an_update_has_broken_is_noticed_before_a_window_is_full() -> None:
    def told(*rewards: tuple[float | None, float | None], **health: Any) -> list[list[str]]:
        monitors = HealthMonitors(made(health=health, output="runs/x"))
        return names(monitors, *({"reward/mean": mean, "reward/std": std} for mean, std in rewards))

    lost = ((0.43, 0.5), (0.02, 0.1), (0.0, 0.0), (None, None), (0.0, 0.0), (0.0, 0.0))
    assert told(*lost) == [[], [], [], [], [], ["reward_drop"]]
    assert told(*lost, reward_drop=0.9) == [[], [], [], [], [], []]
    solved = ((0.43, 0.5), (0.9, 0.1), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0))
    assert told(*solved) == [[]] * 6
    assert told(*((0.0, 0.0),) * 5) == [[]] * 5  # it never could: `constant_reward` tells that
    monitors = HealthMonitors(made(output="runs/x", train={"lr": 0.3}))
    *_, found = [
        monitors.findings({"step": n, "reward/mean": mean, "reward/std": std}, [])
        for n, (mean, std) in enumerate(lost, 1)
    ]
    assert (
        "every reward of steps 3 to 6 is 0, and their mean was 0.43 in step 1 (health.reward_drop=0.5). "
        in found[0].text
    )
    assert "with a lower train.lr (it is 0.3)" in found[0].text
    assert "Look at `turnwise show runs/x --step 6`" in found[0].text


def test_a_reward_of_rows_that_become_harder_may_fall() -> None:
    config = made(health={"window": 1}, data={"train": "rows.jsonl", "curriculum": {"high": 0.9}})
    rewards = [{"reward/mean": 0.9, "reward/std": 0.1}, {"reward/mean": 0.1, "reward/std": 0.1}]
    assert names(HealthMonitors(config), *rewards) == [[], []]
    assert names(HealthMonitors(made(health={"window": 1})), *rewards) == [[], ["reward_drop"]]
    past = [{"step": 1, **rewards[0]}]  # of a resumed run
    (finding,) = HealthMonitors(made(health={"window": 1}), past).findings({"step": 2, **rewards[1]}, [])
    assert "was 0.9 in steps 1 to 1" in finding.text


def test_a_teacher_that_teaches_nothing_and_one_that_is_not_followed_are_noticed() -> None:
    def found(values: list[float], **health: Any) -> dict[int, list[RunProblem]]:
        monitors = HealthMonitors(made(teacher="t", health={"window": 2, **health}, output="runs/x"))
        steps = {n: monitors.findings({"step": n, "teacher/divergence": v}, []) for n, v in enumerate(values, 1)}
        return {step: findings for step, findings in steps.items() if findings}

    ((gap,),) = found([0.0004, -0.0008, 0.0, 0.0]).values()
    assert gap.name == "teacher_gap"
    assert "differs from the teacher's by -0.0002 nats (mean of steps 1 to 2" in gap.text
    assert found([0.2, 0.1, 0.0, 0.0]) == {}  # they agree at the end, as they should
    assert found([0.2, 0.1, 0.0, 0.0], teacher_gap=0.3)[2][0].name == "teacher_gap"
    growing = [0.1, 0.2, 0.25, 0.3, 0.5]  # means: 0.15, then 0.225, 0.275, 0.4
    ((growth,),) = found(growing).values()
    assert growth.name == "teacher_growth"
    assert "is 0.4 nats per token, and was 0.15 in the first 2 steps" in growth.text
    assert list(found(growing, teacher_growth=1.6)) == [4, 5]
    assert found(growing, teacher_growth=None) == {}


def test_equal_rewards_are_no_problem_where_only_a_teacher_is_learnt_from() -> None:
    line = {"groups/zero_std": 1.0, "reward/std": 0.0, "grad_norm": 1.0}
    for credit, expected in (("grpo", ["constant_reward", "zero_std"]), ("none", [])):
        watch = LearningWatch(made(teacher="t", credit=credit, health={"window": 1, "constant_reward": 1}))
        assert [finding.name for finding in watch.problems({"step": 1, **line}, grouped("ab"))] == expected


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
        ({"health": {"slow_rank": 2.0}}, "health.slow_rank has no effect in one process"),
        ({"health": {"stop": ["mismatch"]}}, "health.mismatch has no effect without correction.action"),
        (
            {"health": {"duplicates": 0.5}, "train": {"group_size": 1}, "credit": {"name": "reinforce_pp"}},
            "health.duplicates has no effect with train.group_size=1",
        ),
        (
            {"health": {"reward_correlation": 0.0}, "reward": {"trajectory": ["r.py:f"]}},
            "health.reward_correlation has no effect, because the reward has only one part",
        ),
        (
            {"health": {"reward_drop": 1.0}, "data": {"train": "rows.jsonl", "curriculum": {"high": 0.9}}},
            "health.reward_drop has no effect with data.curriculum",
        ),
        (
            {
                "health": {"stop": ["reward_correlation"]},
                "reward": {"trajectory": ["r.py:f"]},
                "mcp": {"servers": "s.json"},
            },
            "health.reward_correlation has no effect, because the reward has only one part",
        ),
        ({"health": {"teacher_gap": 0.1}}, "health.teacher_gap has no effect without a teacher"),
        ({"health": {"stop": ["teacher_growth"]}}, "health.teacher_growth has no effect without a teacher"),
        (
            {"health": {"constant_reward": 9}, "teacher": "t", "credit": "none"},
            "health.constant_reward has no effect with credit=none",
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


@pytest.mark.slow
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
    summary = summarize_run(tmp_path / "run")
    assert (summary.state, summary.step) == ("stopped", 2)
    assert summary.reason is not None
    assert summary.reason.startswith("health.stop=zero_std stopped the run after step 2")
    assert [(warning.step, warning.name) for warning in summary.warnings] == [(2, "zero_std")]
    # the resumed run has its first steps in the record: it stops again after one step, unless zero_std only warns
    assert main(["train", str(recipe), "resume=auto"]) == 1
    assert main(["train", str(recipe), "resume=auto", "health.stop=[]"]) == 0
    assert summarize_run(tmp_path / "run").state == "finished"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


# A run that cannot learn is refused before it begins, or told once, with the likely cause and the fix.


def watch_made(**options: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **options})


def warned(model: Path, path: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """What training says, step by step."""
    config = watch_made(
        **{
            "model": {"path": str(model)},
            "data": {"train": str(save_rows(path / "train.jsonl"))},
            "environment": f"{PLACES}:low_bytes",
            "limits": {"turns": 2, "tokens_per_turn": 64},
            "train": {"steps": 5, "batch_size": 2, "group_size": 4, "lr": 0.01},
            "output": str(path / "run"),
            **options,
        }
    )
    train_silently(assemble(config))
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("step ")]


# before it begins


@pytest.mark.parametrize(
    "environment",
    [
        "turnwise.environments.environment:SingleTurn",
        "turnwise.environments.users:ScriptedUser",
        "turnwise.environments.users:ModelledUser",
    ],
)
def test_a_recipe_in_which_nothing_gives_a_reward_is_refused(environment: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"nothing gives a reward: environment={environment} .*Set reward\.trajectory"
    ):
        refuse_without_reward(watch_made(environment=environment))


def test_reward_functions_of_weight_zero_are_no_source_of_rewards() -> None:
    functions = {"batch": [{"use": "my.py:f", "weight": 0}], "trajectory": [{"use": "my.py:g", "weight": 0}]}
    with pytest.raises(
        ConfigError, match=r"all reward functions \(my\.py:g, my\.py:f\) have weight=0, and environment="
    ):
        refuse_without_reward(watch_made(reward=functions))
    functions["batch"][0]["weight"] = 1
    refuse_without_reward(watch_made(reward=functions))


@pytest.mark.parametrize(
    "source",
    [
        {"environment": "turnwise.environments.users:checked_answer"},
        {"environment": "my.py:environment"},
        {"reward": {"trajectory": ["my.py:f"]}},
        {"reward": {"turns": ["my.py:f"]}},
        {"reward": {"group": ["my.py:f"]}},
        {"tools": ["my.py:tool"]},
        {"mcp": {"servers": "servers.json", "use": "my.py:Servers"}},
    ],
    ids=str,
)
def test_whatever_may_give_a_reward_is_taken(source: dict[str, Any]) -> None:
    refuse_without_reward(watch_made(**source))


def test_tools_of_mcp_servers_give_no_reward() -> None:
    with pytest.raises(ConfigError, match=re.escape("no tool that could score a call (results of MCP servers have no")):
        refuse_without_reward(watch_made(mcp={"servers": "servers.json"}))


def test_training_asks_before_the_model_is_loaded(tmp_path: Path) -> None:
    rows = {"train": str(save_rows(tmp_path / "train.jsonl"))}
    with pytest.raises(ConfigError, match="nothing gives a reward"):
        assemble(watch_made(data=rows, output=str(tmp_path / "run")))


# while it runs


@pytest.mark.slow
def test_a_run_that_learns_is_told_nothing(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warned(model, tmp_path, caplog) == []


def test_answers_that_are_all_cut_are_told_once_with_the_limit(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((model / "generation_config.json").read_text())
    ends_never = save_model(tmp_path / "model")
    (ends_never / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    (told,) = warned(
        ends_never,
        tmp_path,
        caplog,
        limits={"turns": 2, "tokens_per_turn": 3},
        reward={"trajectory": [f"{PLACES}:first_byte"]},
    )
    assert told.startswith("step 1: all 8 conversations ended in the middle of an answer (stop/length 1), cut by ")
    assert "Either limits.tokens_per_turn is too low for this model: raise it; or the model" in told
    assert "limits.tokens_per_turn=3" in told


def test_rewards_that_never_differ_are_told_once_after_three_steps(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"use": f"{PLACES}:indifferent", "arguments": {"reward": 0.25}}
    (told,) = warned(model, tmp_path, caplog, environment=environment)
    assert told.startswith("step 3: in each of the first 3 steps, all conversations of a row had the same reward")
    assert "Every reward of the last step was 0.25. Either the task is too hard or too easy" in told
    assert f"try {PLACES}:indifferent on an answer" in told
    assert re.search(r"Look at `turnwise show (\S+) --worst 3`; .* `turnwise replay \1 --all` compares them", told)


@pytest.mark.slow
def test_an_environment_that_gives_0_is_told_from_one_that_gives_nothing(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"use": f"{PLACES}:indifferent", "arguments": {"reward": 0.0}}
    (told,) = warned(model, tmp_path, caplog, environment=environment)
    assert f"All rewards are 0: environment={PLACES}:indifferent gave no other number to the" in told
    assert "If it gives a reward for right answers, all answers were wrong" in told
    assert "add a reward function" not in told
    caplog.clear()
    (tmp_path / "none").mkdir()
    (told,) = warned(model, tmp_path / "none", caplog, environment={**environment, "arguments": {"reward": None}})
    assert f"the recipe has no reward function, and environment={PLACES}:indifferent gave none of the" in told
    assert "add a reward function (reward.trajectory)" in told


@pytest.mark.slow
def test_answers_that_are_the_same_are_told_as_the_cause(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *_, told = warned(model, tmp_path, caplog, sampling={"top_k": 1})  # greedy, this model never ends a turn either
    assert "All answers to a row are identical: raise sampling.temperature (1)" in told


def test_a_rule_that_weighs_nothing_is_told_once(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warned(model, tmp_path, caplog, loss_mask=f"{PLACES}:weighs_nothing")
    assert told.startswith(f"step 1: loss_mask={PLACES}:weighs_nothing gives all turns the weight 0")


# what is told of which step


def step(*rewards: tuple[float, ...], texts: str = "different", stop: Stop = Stop.DONE) -> list[Group]:
    """Groups of conversations with these rewards, of one turn each."""
    groups = []
    for number, group in enumerate(rewards):
        row = Row(id=str(number), messages=[])
        trajectories = []
        for place, reward in enumerate(group):
            one = Trajectory(id=f"{number}/{place}", group=str(number), row=row, reward=reward, stop=stop)
            one.turns.append(Turn(index=0, message={}, text=str(place) if texts == "different" else "same"))
            one.advantages = [reward - sum(group) / len(group)]
            trajectories.append(one)
        groups.append(Group(id=str(number), row=row, trajectories=trajectories))
    return groups


def problems(watch: LearningWatch, number: int, groups: list[Group], grad_norm: float = 1.0) -> list[str]:
    line = {"step": number, "grad_norm": grad_norm, **conversation_metrics(groups)}
    return [finding.text for finding in watch.problems(line, groups)]


def test_one_group_with_a_difference_is_enough() -> None:
    watch = LearningWatch(watch_made())
    for number in (1, 2):
        assert problems(watch, number, step((1.0, 1.0), (0.0, 0.0))) == []
    assert problems(watch, 3, step((1.0, 1.0), (0.0, 1.0))) == []
    assert problems(watch, 4, step((1.0, 1.0), (0.0, 0.0))) == []  # it has learnt before


def test_a_run_that_is_gone_on_with_late_is_not_at_its_first_steps() -> None:
    watch = LearningWatch(watch_made())
    assert [problems(watch, number, step((1.0, 1.0))) for number in (7, 8, 9, 10)] == [[]] * 4


def test_the_number_of_first_steps_is_that_of_the_recipe() -> None:
    for first_steps, expected in ((2, [0, 1, 0, 0, 0]), (5, [0, 0, 0, 0, 1]), (None, [0, 0, 0, 0, 0])):
        watch = LearningWatch(watch_made(health={"constant_reward": first_steps}))
        assert [len(problems(watch, number, step((1.0, 1.0)))) for number in range(1, 6)] == expected


def test_a_tool_whose_calls_nearly_all_fail_is_told_once_although_rewards_differ() -> None:
    def told(*errors: Sequence[str | None], name: str = "calc") -> list[list[str]]:
        """What is told after each step, whose calls have these errors."""
        watch = LearningWatch(watch_made(output="runs/x"))
        found: list[list[str]] = []
        for number, of_step in enumerate(errors, 1):
            groups = step((0.0, 1.0))
            groups[0].trajectories[0].turns[0].outcomes = tuple(
                ToolOutcome(id=str(n), name=name, arguments={}, content=f"Error: after {n} s", error=error)
                for n, error in enumerate(of_step)
            )
            found.append(problems(watch, number, groups))
        return found

    fails, works = ["timeout"] * 4, [None] * 4
    # steps without calls say nothing; it is told in the third step with calls, once
    (*before, text), after = told(fails, [], fails, fails), told(fails, fails, fails, fails)
    assert before == [[], [], []]
    assert text == [
        "in the last 3 steps with calls (up to step 4), 12 of 12 calls of the tool 'calc' failed (most in the last: timeout, "
        "'calc', 4 times: after 3 s). The conversations go on, and are rewarded, without what the tool should give: try such a "
        "call on its own. `turnwise show runs/x` counts the errors of tools by message"
    ]
    assert [len(one) for one in after] == [0, 0, 1, 0]
    assert told(fails, works, fails, fails) == [[]] * 4
    assert [len(one) for one in told(["raised"] * 9 + [None], fails, fails)] == [0, 0, 1]
    assert told(["raised"] * 8 + [None], fails, fails) == [[]] * 3  # 89 %
    assert told(*[["raised"] * 3] * 3) == [[]] * 3  # nine calls are few
    # there is no tool of this name: told if nearly all calls are such
    (invented,) = told(*[["unknown_tool"] * 4] * 4)[2]
    assert "12 of 12 calls of tools failed (most in the last: unknown_tool, 'calc', 4 times: after 3 s)" in invented


def test_a_part_of_the_reward_that_stays_0_beside_others_is_told_once(tmp_path: Path) -> None:
    def told(length: int, *parts: dict[str, float], window: int = 4, **options: Any) -> list[list[str]]:
        config = watch_made(health={"window": window}, **options)
        watch = LearningWatch(config, measured=assembly.scorer(config).measured)
        found: list[list[str]] = []
        for number in range(1, length + 1):
            groups = step((0.0, 1.0))
            for one, own in zip(groups[0].trajectories, parts, strict=True):
                one.rewards = dict(own)
            found.append(problems(watch, number, groups))
        return found

    named = told(6, {"format": 0.0, "right": 0.0}, {"format": 1.0, "right": 0.0})
    assert [len(one) for one in named] == [0, 0, 0, 1, 0, 0]
    assert "the part 'right' of the reward was 0 in all conversations of 4 steps (up to step 4)" in named[3][0]
    assert told(6, {"format": 0.0, "right": 0.0}, {"format": 0.0, "right": 1.0})[3][0].startswith("the part 'format' ")
    # one that was earned once; the only part; what has no name; a function that is only measured
    assert told(6, {"format": 1.0, "right": 0.0}, {"format": 1.0, "right": 0.5}) == [[]] * 6
    assert told(6, {"right": 0.0}, {"right": 0.0}) == [[]] * 6
    assert told(6, {"format": 1.0, "turns": 0.0}, {"format": 1.0, "turns": 0.0}) == [[]] * 6
    (tmp_path / "own.py").write_text("def right(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n")
    use = {"use": "turnwise.compat.trl:TrlReward", "arguments": {"function": f"{tmp_path / 'own.py'}:right"}}
    # a converted function has no name in the recipe: the instance that calls it knows it
    for weight, expected in ((0.0, [0] * 6), (1.0, [0, 0, 0, 1, 0, 0])):
        options: dict[str, Any] = {"reward": {"batch": [{**use, "weight": weight}]}}
        found = told(6, {"format": 1.0, "right": 0.0}, {"format": 1.0, "right": 0.0}, **options)
        assert [len(one) for one in found] == expected


def test_groups_of_one_are_compared_with_each_other() -> None:
    options: dict[str, Any] = {"train": {"group_size": 1}}
    watch = LearningWatch(watch_made(**options))
    assert [problems(watch, number, step((1.0,), (0.0,))) for number in range(1, 15)] == [[]] * 14
    watch = LearningWatch(watch_made(**options))
    assert [len(problems(watch, number, step((1.0,), (1.0,)))) for number in range(1, 5)] == [0, 0, 1, 0]


def test_rows_that_are_too_easy_or_too_hard_are_told_as_such() -> None:
    watch = LearningWatch(watch_made())
    told = [problems(watch, number, step((1.0, 1.0), (0.0, 0.0))) for number in (1, 2, 3, 4)]
    assert [len(one) for one in told] == [0, 0, 1, 0]
    assert "the rows are too easy or too hard for this model" in told[2][0]


def test_calls_that_fail_and_answers_that_are_cut_are_told_beside_equal_rewards() -> None:
    def told(errors: Sequence[str | None], stop: Stop = Stop.DONE) -> str:
        groups = step((0.0, 0.0))
        for one in groups[0].trajectories:
            one.stop = stop
            one.turns[0].outcomes = tuple(
                ToolOutcome(id="1", name="calc", arguments={}, content="?", error=error) for error in errors
            )
        found = problems(LearningWatch(watch_made(train={"steps": 1}, output="runs/x")), 1, groups)
        (text,) = [one for one in found if "had the same reward" in one]
        return text

    failed = "4 of 4 calls of tools failed in the last step (most frequent: unknown_tool, 'calc', 4 times: ?), which may be why."
    assert failed in told(["unknown_tool", "unknown_tool"])
    assert "calls of tools failed" not in told(["unknown_tool", None])
    assert "calls of tools failed" not in told([])
    cut = "2 of 2 conversations of the last step ended in the middle of an answer (limits.tokens_per_turn="
    assert cut in told([], Stop.LENGTH)
    assert cut not in told([])


def test_tool_calls_that_nobody_offered_are_told_once() -> None:
    def calling(*texts: str, tools: Sequence[ToolSchema] = ()) -> list[Group]:
        groups = step(tuple(float(place) for place in range(len(texts))))
        for one, text in zip(groups[0].trajectories, texts, strict=True):
            one.turns[0] = Turn(index=0, message={}, text=text, tools=tools)
        return groups

    written = ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_call>", *["words"] * 8]
    parser = Renderer.from_pretrained("demo/model").turn_parser
    watch = LearningWatch(watch_made(), writes_call=parser.writes_call)
    assert problems(watch, 1, calling(*written[1:])) == []  # none that could be read
    offered: list[ToolSchema] = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    assert problems(watch, 2, calling(*written, tools=offered)) == []
    (told,) = problems(watch, 3, calling(*written))
    assert told == (
        "1 of 10 turns without tools contain a tool call, which stays text: name the tool in `tools`, "
        "unless the environment reads calls itself"
    )
    assert problems(watch, 4, calling(*written)) == []


def test_a_run_of_fewer_steps_is_told_at_its_end() -> None:
    watch = LearningWatch(watch_made(train={"steps": 1}, reward={"trajectory": ["my.py:f"]}))
    (told,) = problems(watch, 1, step((1.0, 1.0)))
    assert "Every reward of the last step was 1. Either the task is too hard or too easy" in told
    assert "try the reward functions (my.py:f) on an answer" in told
    converted = {"batch": [{"use": "turnwise.compat.trl:TrlReward", "arguments": {"function": "train.py:correct"}}]}
    (told,) = problems(LearningWatch(watch_made(train={"steps": 1}, reward=converted)), 1, step((1.0, 1.0)))
    assert "try the reward functions (train.py:correct) on an answer" in told


@pytest.mark.parametrize(
    ("stop", "limit"),
    [(Stop.LENGTH, "tokens_per_turn=256"), (Stop.MAX_TOKENS, "tokens=70"), (Stop.MAX_RESPONSE, "response_tokens=80")],
)
def test_the_limit_that_cut_is_named(stop: Stop, limit: str) -> None:
    watch = LearningWatch(watch_made(limits={"tokens": 70, "response_tokens": 80}))
    (told,) = problems(watch, 1, step((0.0, 1.0), stop=stop))
    assert f"(stop/{stop} 1), cut by limits.{limit}. Reward functions see incomplete" in told
    assert problems(watch, 2, step((0.0, 1.0), stop=stop)) == []


def test_one_answer_that_was_not_cut_is_enough() -> None:
    groups = step((0.0, 1.0), stop=Stop.LENGTH)
    groups[0].trajectories[0].stop = Stop.DONE
    assert problems(LearningWatch(watch_made()), 1, groups) == []


def test_a_gradient_of_zero_beside_advantages_is_told_with_its_cause() -> None:
    watch = LearningWatch(watch_made(loss_mask="last_turn"))
    assert problems(watch, 1, step((0.0, 1.0)), grad_norm=1e-9) == []
    (told,) = problems(watch, 2, step((0.0, 1.0)), grad_norm=0.0)
    assert "the gradient is 0 although advantages are not" in told
    masked = step((0.0, 1.0))
    for one in masked[0].trajectories:
        one.turns.append(Turn(index=1, message={}, text=""))
        one.turns[0].weight, one.advantages = 0.0, [one.advantages[0], 0.0]
    (told,) = problems(LearningWatch(watch_made(loss_mask="last_turn")), 1, masked, grad_norm=0.0)
    assert "loss_mask=last_turn gives the weight 0 to all turns with an advantage" in told


def test_a_further_policy_without_a_gradient_is_told_once_with_its_name() -> None:
    recipe = watch_made(
        model={"path": "m", "lora": 4},
        policies={"second": {"train": True}, "third": {"train": True, "temperature": 0.1}},
    )
    watch = LearningWatch(recipe)

    def played(policy: str, texts: str = "different") -> list[Group]:
        """Rows' conversations, each with one agent, of which only that of the second row has another reward."""
        groups, agents = step((0.0, 1.0)), step((0.0, 1.0), texts=texts)
        for one, agent in zip(groups[0].trajectories, agents[0].trajectories, strict=True):
            agent.policy, agent.agent, agent.group = policy, "helper", f"0/helper@{policy}"
            one.agents.append(agent)
        return groups

    def told(number: int, groups: list[Group], **norms: float) -> list[RunProblem]:
        line = {
            "step": number,
            "grad_norm": 1.0,
            **{f"policies/{name}/grad_norm": norm for name, norm in norms.items()},
        }
        return watch.problems({**line, **conversation_metrics(groups)}, groups)

    assert told(1, played("second"), second=0.5) == []
    (found,) = told(2, played("second"), second=0.0)
    assert (found.name, found.policy) == ("gradient", "second")
    assert found.text.startswith("the trained policy 'second': the gradient is 0 although advantages are not")
    (found,) = told(3, played("third", texts="same"), third=0.5)
    assert (found.name, found.policy) == ("noisy_reward", "third")
    assert found.text.startswith("the trained policy 'third': in all 1 groups with reward differences")
    assert "sampling.temperature (0.1)" in found.text
    # a policy of no turn of the step has no gradient, and each problem is told once
    assert told(4, played("second"), second=0.0) == told(5, step((0.0, 1.0))) == []


def test_rows_whose_conversations_failed_but_one_are_not_told_that_their_answers_are_identical() -> None:
    watch = LearningWatch(watch_made(train={"steps": 1}, output="runs/x"))
    groups = step((1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 1.0))
    for group in groups:
        for one in group.trajectories[1:]:
            one.fail(Failure("environment", "KeyError: 'answer'"))
    (told,) = problems(watch, 1, groups)
    assert told.startswith(
        "6 of 8 conversations of the last step failed (KeyError), so no row had two rewards to compare. In the first step, the"
    )
    assert "`turnwise show runs/x --failed` prints their errors" in told
    assert "temperature" not in told


def test_many_failed_conversations_are_told_first_with_the_line_of_the_users_code() -> None:
    frames = '  File "/home/me/chain.py", line 16, in reply\n    x()\n  File "/usr/lib/python3.12/re.py", line 2, in y\n    z\n'
    rewards = (1.0, 1.0, 1.0, 1.0)

    def told(failed: int) -> str:
        groups = step(rewards, rewards)
        for one in groups[0].trajectories[:failed]:
            one.fail(Failure("environment", "row 3: TypeError: no number", frames))
        (text,) = problems(LearningWatch(watch_made(train={"steps": 1}, output="runs/x")), 1, groups)
        return text

    assert told(3).startswith(
        "3 of 8 conversations of the last step failed (TypeError in chain.py:16). In the first step, the"
    )
    assert "turnwise show runs/x --failed" in told(3)
    assert told(1).startswith("in the first step")


def test_a_filter_that_removes_everything_is_named_and_not_the_loss_mask() -> None:
    def cut(*numbers: int) -> list[Group]:
        groups = step((0.0, 1.0), (1.0, 0.0))
        for number, one in enumerate(one for group in groups for one in group.trajectories):
            one.turns[0].weight = 0.0
            if number in numbers:
                one.turns[0].finish_reason, one.stop = "length", Stop.LENGTH
        return groups

    recipe = watch_made(train={"overlong_filter": True}, limits={"tokens_per_turn": 9})
    (told,) = [
        text for text in problems(LearningWatch(recipe), 1, cut(0, 1, 2, 3), grad_norm=0.0) if "overlong" in text
    ]
    assert told.startswith(
        "train.overlong_filter excludes the 4 conversations whose last answer was cut by a limit, so no turn"
    )
    assert "raise the limit that cuts (limits.tokens_per_turn=9), set train.overlong_filter=false" in told
    (told,) = problems(LearningWatch(recipe), 1, cut(0), grad_norm=0.0)
    assert (
        "cut by a limit, and of the others loss_mask=all gives all turns the weight 0, so no turn is trained on" in told
    )


def test_a_correction_that_rejects_all_tokens_is_the_cause_of_a_gradient_of_zero() -> None:
    groups = step((0.0, 1.0))
    line = {"step": 1, "grad_norm": 0.0, "correction/rejected": 1.0, **conversation_metrics(groups)}
    (told,) = [finding.text for finding in LearningWatch(watch_made()).problems(line, groups)]
    assert told.startswith("the gradient is 0: correction.rejection removed all tokens from the loss")


@pytest.mark.parametrize("grad_norm", [0.0, 1e-7])
def test_identical_answers_with_different_rewards_are_told_as_such(grad_norm: float) -> None:
    watch = LearningWatch(watch_made(reward={"trajectory": ["judge.py:judge"]}))
    told = problems(watch, 1, step((0.0, 1.0), (1.0, 1.0), texts="same"), grad_norm=grad_norm)
    assert told[0].startswith(
        "in all 1 groups with reward differences, the answers are identical and only their rewards differ (row 0: 0, 1)"
    )
    assert "learnt. The reward functions (judge.py:judge) must give identical conversations the same reward" in told[0]
    assert not any("top_k" in text for text in told)
    assert problems(LearningWatch(watch_made()), 1, step((0.0, 1.0)), grad_norm=1.0) == []


def test_rewards_that_no_function_gave_are_told_as_such() -> None:
    watch = LearningWatch(watch_made(reward={"trajectory": ["my.py:f"]}))
    groups = step((1.0, 1.0))
    for trajectory in groups[0].trajectories:
        trajectory.reward, trajectory.advantages = None, []
    told = [problems(watch, number, groups) for number in (1, 2, 3)]
    assert (
        "None of the 2 conversations of the last step has a reward: the reward functions (my.py:f) returned None"
        in (told[2][0])
    )


def test_equal_answers_to_different_questions_are_no_noise() -> None:
    watch, asked = LearningWatch(watch_made()), step((0.0, 1.0), texts="same")
    for number, one in enumerate(asked[0].trajectories):
        one.messages = [{"role": "user", "content": f"Is {number} right?"}, {"role": "assistant", "content": "same"}]
    assert problems(watch, 1, asked) == []
    for one in asked[0].trajectories:
        one.messages[0] = {"role": "user", "content": "Is it right?"}
    (found,) = problems(watch, 2, asked)
    assert "the answers are identical and only their rewards differ" in found
