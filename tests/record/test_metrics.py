"""Metrics of conversations, and the list of their names."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support.conversations import Says, a_row, a_table, call, scripted
from support.tiny import save_model, save_rows
from turnwise.cli import main
from turnwise.commands.show import show_metric
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import RunError
from turnwise.record.metric_names import METRICS, metric_hint, metric_of
from turnwise.record.metrics import conversation_metrics, failures
from turnwise.rewards.functions import TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Failure, Group, Trajectory

# Numbers about conversations.


def f(x: int = 0) -> int:
    """Do it."""
    return x


def held(engine: object, *, size: int, rows: int = 1) -> list[Group]:
    groups = [new_group(a_row(id=str(n)), size=size, seed=0) for n in range(rows)]
    asyncio.run(
        rollout_groups(groups, a_table(engine, lambda: Tools([f]), limits=Limits(turns=2, tokens_per_turn=200)))
    )  # type: ignore[arg-type]
    return groups


def test_the_metrics_of_a_few_conversations() -> None:
    bad, good = call("g"), call("f", '{"x": 1}')
    engine = scripted([good + bad, "So."], ["No."], [good, good], [good])
    groups = held(engine, size=2, rows=2)
    rewards = {"0/0": 1.0, "0/1": 0.0, "1/0": 2.0}
    scorer = Scorer(trajectory=[TrajectoryReward("judge", lambda one: rewards[one.id])])
    asyncio.run(scorer.score(groups))
    metrics = conversation_metrics(groups)
    assert metrics == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx(math.sqrt(2 / 3)),
        "reward/q10": 0.0,
        "reward/median": 1.0,
        "reward/q90": 2.0,
        "segments/mean": 1.0,
        "turns/mean": pytest.approx(5 / 3),
        "tool_calls/mean": pytest.approx(4 / 3),
        "tool_errors/mean": pytest.approx(1 / 3),
        "tokens/sampled": sum(one.sampled_tokens for group in groups for one in group.trajectories),
        "tokens/all": sum(len(segment) for group in groups for one in group.trajectories for segment in one.segments),
        "entropy": None,  # nothing was sampled
        "reward/correlation": None,  # there is one reward function
        "groups/duplicates": 0.0,
        "groups/zero_std": 0.5,  # in the second group only one is whole
        "template_mismatch": 0.0,
        "failed": 0.25,
        "reward/none": 0.0,
        "engine/prefix_hit_rate": None,  # no engine reported it
        "version/oldest": 0,
        "version/newest": 0,
        "rewards/judge/mean": 1.0,
        "rewards/judge/std": pytest.approx(math.sqrt(2 / 3)),
        "stop/done": 0.5,
        "stop/max_turns": 0.25,
        "stop/length": 0.0,
        "stop/max_tokens": 0.0,
        "stop/max_response": 0.0,
        "stop/context": 0.0,
        "stop/deadline": 0.0,
        "stop/error": 0.25,
    }
    assert metrics["tokens/sampled"] == len(good + bad) + 1 + 4 + 4 + 3 * (len(good) + 1)


def test_entropy_is_the_mean_of_what_was_sampled() -> None:
    groups = held(Says("abc"), size=1)
    asyncio.run(Scorer().score(groups))
    assert conversation_metrics(groups)["entropy"] == (1 + 2 + 3 + 4) / 8 / 4


def test_where_nothing_is_whole_there_are_no_means() -> None:
    groups = held(Says(RuntimeError("dead")), size=3)
    metrics = conversation_metrics(groups)
    assert [metrics[name] for name in ("reward/mean", "reward/std", "turns/mean", "entropy")] == [None] * 4
    assert (metrics["failed"], metrics["stop/error"], metrics["groups/zero_std"]) == (1.0, 1.0, 1.0)
    assert conversation_metrics([])["reward/mean"] is None


def test_failures_are_counted_and_the_frequent_ones_come_first() -> None:
    def broken(*messages: str) -> Group:
        row = a_row()
        trajectories = [Trajectory(id=f"1/{n}", group="1", row=row) for n in range(len(messages))]
        for one, message in zip(trajectories, messages, strict=True):
            if message:
                one.fail(Failure("environment", message))
        return Group(id="1", row=row, trajectories=trajectories)

    assert failures([broken("a", "", "b"), broken("b", "b")]) == ["environment (3 times): b", "environment: a"]
    assert failures([broken("", "")]) == []


# Every metric of real runs is in the list of metrics and on the page, and every listed metric is in real runs.


ROOT = Path(__file__).parent.parent.parent

PLACES = ROOT / "tests" / "support" / "places.py"

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The first line of each kind, from a training run, a rollout and a fine-tuning run of a tiny model."""
    place = tmp_path_factory.mktemp("runs")
    rows = [str(save_rows(place / name)) for name in ("rows.jsonl", "more_rows.jsonl")]
    talk = [{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}] * 2
    (place / "talk.jsonl").write_text("\n".join(map(json.dumps, talk)), encoding="utf-8")
    common = {"model": {"path": str(save_model(place / "model"))}}
    recipe = {
        **common,
        "data": {"train": rows, "eval": rows, "curriculum": {"low": -100}},
        "environment": f"{PLACES}:low_bytes",
        "limits": {"turns": 2, "tokens_per_turn": 8},
        "reward": {"trajectory": [{"use": f"{PLACES}:length", "name": "constant"}], "kl": {"coef": 0.1}},
        "credit": {"name": "turn_gae"},
        "correction": {"action": "measure"},
        "train": {
            "steps": 1,
            "batch_size": 2,
            "group_size": 3,
            "lr": 0.01,
            "dynamic_sampling": 1,
            "max_staleness": 1,
            "group_timeout": 600,
        },
        "eval": {"max_rows": 2},
        "record": {"best_and_worst": 1},
        "output": str(place / "train"),
    }
    sft = {
        **common,
        "data": {"train": str(place / "talk.jsonl"), "eval": str(place / "talk.jsonl")},
        "sft": {"steps": 1, "batch_size": 2},
        "output": str(place / "sft"),
    }
    for name, options in (("train", recipe), ("sft", sft)):
        (place / f"{name}.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
        assert main([name, str(place / f"{name}.yaml")]) == 0
    assert main(["rollout", str(place / "train.yaml"), "rollout.max_rows=2", "--out", str(place / "rollout")]) == 0
    return {
        "train": lines(place / "train" / "metrics.jsonl")[0],
        "eval": lines(place / "train" / "evaluations.jsonl")[0],
        "rollout": lines(place / "rollout" / "metrics.jsonl")[0],
        "sft": lines(place / "sft" / "metrics.jsonl")[0],
        "sft eval": lines(place / "sft" / "evaluations.jsonl")[0],
    }


@pytest.mark.parametrize("kind", ["train", "eval", "rollout", "sft", "sft eval"])
def test_every_metric_of_a_run_is_listed_and_every_listed_metric_is_in_a_run(
    written: dict[str, dict[str, Any]], kind: str
) -> None:
    for name in written[kind]:
        metric = metric_of(name)
        assert metric is not None, f"{name} is missing in turnwise.record.metric_names"
        assert kind in metric.lines.split(", "), f"{name} is written by {kind}, and metric_names does not say so"
        assert f"| `{metric.name}` |" in PAGE
    listed = {metric.name for metric in METRICS if kind in metric.lines.split(", ")} - {"metrics/<name>"}
    listed -= {"workers/lost", "workers/restarted_conversations"}  # of cluster=ray: tests/cluster/test_ray.py
    listed = {name for name in listed if not name.startswith("experts/")}  # of mixtures: tests/training/test_experts.py
    assert {name for name in listed if not any(metric_of(one) == metric_of(name) for one in written[kind])} == set()


def test_a_name_of_trl_verl_or_an_earlier_version_leads_to_the_name_here() -> None:
    assert metric_hint("reward") == metric_hint("critic/rewards/mean") == "; its name here is reward/mean"
    assert metric_hint("frac_reward_zero_std") == "; its name here is groups/zero_std"
    assert metric_hint("reward/judge") == "; its name here is rewards/judge/mean"
    assert metric_hint("completions/mean_length") == "; the nearest metric here is tokens/sampled"
    assert metric_hint("grad_nrm") == "; did you mean grad_norm?"
    assert metric_hint("qqq") == ""


def test_a_name_elsewhere_leads_to_one_metric_only_and_no_name_is_listed_twice() -> None:
    names = [metric.name for metric in METRICS]
    others = [other for metric in METRICS for other in (*metric.same, *metric.near)]
    assert len({*names}) == len(names)
    assert len({*others}) == len(others)
    assert not {*names} & {*others}


def test_show_prints_one_metric_and_refuses_an_unknown_one_with_the_name_it_has_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": null}\n')
    show_metric(Console(), tmp_path, "reward/mean")
    assert capsys.readouterr().out.splitlines()[-2:] == ["     1  0.5", "     2  null"]
    with pytest.raises(
        RunError, match=r"^reward is not a metric in .*; its name here is reward/mean\. .*: step, reward/mean"
    ):
        show_metric(Console(), tmp_path, "reward")
    with pytest.raises(RunError, match=r"evaluations.jsonl has no metrics: it is missing or empty"):
        show_metric(Console(), tmp_path, "reward/mean", evaluation=True)
    assert main(["show", str(tmp_path), "--metric", "reward/mean", "--worst", "3"]) == 1
    assert "--metric prints metrics and --worst prints conversations: give one of them" in capsys.readouterr().err
