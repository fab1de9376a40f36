"""Metrics of conversations, the list of their names, the statistics of evaluations, and what is said of a run at a glance."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support.conversations import Says, a_row, a_table, call, hold, hold_all, scripted
from support.runs import a_run
from support.tiny import save_model, save_rows
from turnwise.cli import main
from turnwise.commands.show import show_metrics
from turnwise.config.recipe import checked, with_known_model
from turnwise.environments.environment import SingleTurn
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, RunError
from turnwise.json_yaml import PlainLoader, RecordedLoader, parse_yaml, yaml_text
from turnwise.record.evaluation import (
    estimate,
    paired_test,
    pass_all_k,
    pass_at_k,
    rate_estimate,
    reward_estimate,
    sign_flip_p,
    t_cdf,
    t_quantile,
    t_tail,
)
from turnwise.record.failures import ToolCallCounts, group_failures
from turnwise.record.metric_names import METRICS, metric_hint, metric_of
from turnwise.record.metrics import conversation_metrics, failures
from turnwise.record.run_directory import RunDirectory, RunLock, is_being_written
from turnwise.record.summary import (
    MetricValues,
    changed_from_defaults,
    differing_options,
    evaluations_of,
    find_summaries,
    held_out_change,
    lower_is_better,
    recorded_warnings,
    summarize_run,
)
from turnwise.record.writer import write_config, write_trajectories
from turnwise.rewards.functions import TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.terminal.run_card import model_card
from turnwise.types import Failure, Group, Row, Stop, ToolCall, ToolOutcome, Trajectory, Turn

# Metrics of conversations, and the list of their names.


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
    lengths = (len(good + bad) + 1 + 4, 4, 2 * (len(good) + 1))  # of the finished ones, in bytes
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
        "tokens/mean": pytest.approx(sum(lengths) / 3),
        "tokens/max": max(lengths),
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


def test_calls_in_a_turn_that_a_limit_cut_are_counted_and_never_made() -> None:
    limits = Limits(turns=2, tokens_per_turn=len(call("f", '{"x": 1}')) + 5)
    (cut,) = hold_all(scripted([call("f", '{"x": 1}') + " And then"]), lambda: Tools([f]), limits=limits)
    assert (cut.stop, [turn.outcomes for turn in cut.turns]) == (Stop.LENGTH, [()])
    metrics = conversation_metrics([Group(id="1", row=cut.row, trajectories=[cut])])
    assert (metrics["tool_calls/mean"], metrics["tool_errors/mean"]) == (1.0, 0.0)


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
    of_rows = broken("row '7' has no column 'a'", "row '12' has no column 'a'")
    assert failures([of_rows]) == [
        "environment (2 times, some with other numbers or quoted texts): row '7' has no column 'a'"
    ]
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
        "loss": {"top_entropy_quantile": 0.5, "clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1},
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
        assert f"- `{metric.name}`" in PAGE
    listed = {metric.name for metric in METRICS if kind in metric.lines.split(", ")} - {"metrics/<name>"}
    listed -= {"workers/lost", "workers/restarted_conversations"}  # of cluster=ray: tests/cluster/test_ray.py
    listed -= {"policy_shift"}  # of credit.name=spo: tests/rewards/credit/test_credit_training.py
    listed -= {"micro_batches/out_of_memory"}  # where memory runs out: tests/training/test_update.py
    # of mixtures: tests/training/test_experts.py; of teachers: tests/training/test_teacher.py; of agents and trained policies:
    # test_episodes.py and test_trained_policies.py there
    listed = {
        name for name in listed if not name.startswith(("experts/", "teacher/", "agents/", "policies/", "ranks/"))
    }
    assert {name for name in listed if not any(metric_of(one) == metric_of(name) for one in written[kind])} == set()


def test_a_name_of_trl_verl_or_an_earlier_version_leads_to_the_name_here() -> None:
    assert metric_hint("reward") == metric_hint("critic/rewards/mean") == "; its name here is reward/mean"
    assert metric_hint("frac_reward_zero_std") == "; its name here is groups/zero_std"
    assert metric_hint("reward/judge") == "; its name here is rewards/judge/mean"
    assert metric_hint("completions/mean_length") == "; the nearest metric here is tokens/mean"
    assert metric_hint("grad_nrm") == "; did you mean grad_norm"
    assert metric_hint("qqq") == ""
    lower = (
        "loss",
        "kl",
        "failed",
        "reward/none",
        "stop/length",
        "groups/too_small",
        "ratio/clip_fraction",
        "seconds/step",
    )
    assert all(lower_is_better(name) for name in (*lower, "eval/loss"))
    assert not any(lower_is_better(name) for name in ("reward/mean", "stop/done", "pass_rate", "entropy"))
    assert (
        metric_hint("reward/meen", ["step", "reward/mean"]) == "; did you mean reward/mean"
    )  # no reward function `meen`


def test_a_name_elsewhere_leads_to_one_metric_only_and_no_name_is_listed_twice() -> None:
    names = [metric.name for metric in METRICS]
    others = [other for metric in METRICS for other in (*metric.same, *metric.near)]
    assert len({*names}) == len(names)
    assert len({*others}) == len(others)
    assert not {*names} & {*others}


def test_show_prints_a_metric_by_its_name_elsewhere_too_and_refuses_an_unknown_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": null}\n')
    show_metrics(Console(), tmp_path, ["reward/mean"])
    assert capsys.readouterr().out.splitlines()[-2:] == ["     1  0.5", "     2  null"]
    values = ("0.00023999999999999998", "-0.0", "12345678", "1.0", "1e-07")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": 1, "lr": {value}}}\n' for value in values))
    show_metrics(Console(), tmp_path, ["lr"])
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines()[-5:]]
    assert printed == ["0.00024", "0", "12345678", "1", "1e-07"]
    for form in ("json", "csv"):  # these have all digits
        show_metrics(Console(), tmp_path, ["lr"], form=form)
        assert "0.00023999999999999998" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    show_metrics(Console(), tmp_path, ["reward"])  # its name elsewhere
    assert capsys.readouterr().out.splitlines()[-1] == "     1  0.5"
    with pytest.raises(
        RunError, match=r"^rewards is not a metric in .*; did you mean reward/mean\. .*: step, reward/mean"
    ):
        show_metrics(Console(), tmp_path, ["rewards"])
    with pytest.raises(RunError, match=r"evaluations.jsonl has no metrics: it is missing or empty"):
        show_metrics(Console(), tmp_path, ["reward/mean"], evaluation=True)
    assert main(["show", str(tmp_path), "--metric", "reward/mean", "--worst", "3"]) == 1
    assert "--metric prints metrics and --worst prints conversations: give one of them" in capsys.readouterr().err


# Statistics against scipy, and against the enumeration of all samples.


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 29, 255, 4999])
def test_students_t_is_that_of_scipy(degrees: int) -> None:
    from scipy import stats

    for t in (-30.0, -2.5, -0.1, 0.0, 0.01, 0.7, 1.96, 5.0, 40.0):
        assert t_cdf(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), rel=1e-10, abs=1e-13)
    for p in (0.001, 0.025, 0.4, 0.5, 0.9, 0.975, 0.9995):
        assert t_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rows", [2, 3, 10, 100])
def test_the_interval_is_that_of_scipy(rows: int) -> None:
    from scipy import stats

    generator = random.Random(rows)
    values = [generator.gauss(0.3, 2.0) for _ in range(rows)]
    low, high = stats.t.interval(0.95, rows - 1, loc=sum(values) / rows, scale=stats.sem(values))
    result = estimate(values)
    assert (result.mean, result.low, result.high) == pytest.approx((sum(values) / rows, low, high))
    assert result.rows == rows


def test_intervals_of_few_rows() -> None:
    assert (estimate([]).mean, estimate([]).rows) == (None, 0)
    assert (estimate([2.0]).mean, estimate([2.0]).low, estimate([2.0]).high) == (2.0, None, None)
    assert (estimate([1.0, 1.0]).low, estimate([1.0, 1.0]).high) == (1.0, 1.0)


def test_intervals_of_rates_stay_between_0_and_1() -> None:
    for shares in ([0.0, 1.0, 1.0], [1.0, 1.0], [0.0] * 5, [0.5] * 4, [0.25, 0.75, 1.0], [0.0] * 99 + [1.0]):
        result = rate_estimate(shares, samples=4)
        assert result.low is not None
        assert result.high is not None
        assert 0.0 <= result.low <= (result.mean or 0.0) <= result.high <= 1.0
        assert result.low < result.high  # also where all rows are equal: few rows say little
    assert rate_estimate([1.0], samples=1).low is None
    many = [1.0, 0.0] * 400
    assert (rate_estimate(many, samples=1).low, estimate(many).low) == pytest.approx((0.4655, 0.4653), abs=4e-4)


def test_rewards_of_0_and_1_have_the_interval_of_a_rate() -> None:
    assert reward_estimate([[0.0, 1.0], [1.0, 1.0]]) == rate_estimate([0.5, 1.0], samples=2)
    assert reward_estimate([[0.0, 0.5], [1.0, 1.0]]) == estimate([0.25, 1.0])
    assert reward_estimate([]).mean is None


@pytest.mark.parametrize("p", [0.02, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("rows", [5, 20])
def test_intervals_of_rates_contain_the_rate_often_enough(p: float, rows: int) -> None:
    covered = 0.0
    for passed in range(rows + 1):
        result = rate_estimate([1.0] * passed + [0.0] * (rows - passed), samples=1)
        assert result.low is not None
        assert result.high is not None
        if result.low <= p <= result.high:
            covered += math.comb(rows, passed) * p**passed * (1 - p) ** (rows - passed)
    assert covered >= 0.94


@pytest.mark.parametrize(("n", "passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (6, 1)])
def test_pass_at_k_and_pass_all_k_are_the_means_over_all_subsets(n: int, passed: int) -> None:
    samples = [True] * passed + [False] * (n - passed)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
        assert pass_all_k(n, passed, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_both_are_unbiased() -> None:
    """The expectation over all outcomes of n samples with pass probability p is the probability itself."""
    n, p = 5, 0.3
    for k in (1, 2, 3, 5):
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        at = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
        every = sum(weight * pass_all_k(n, c, k) for c, weight in enumerate(weights))
        assert (at, every) == pytest.approx((1 - (1 - p) ** k, p**k))


@pytest.mark.parametrize(("n", "passed", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1)])
def test_k_is_at_most_the_number_of_samples(n: int, passed: int, k: int) -> None:
    for function in (pass_at_k, pass_all_k):
        with pytest.raises(ValueError, match=f"k={k} and passed={passed} of n={n}"):
            function(n, passed, k)


@pytest.mark.parametrize("rows", [2, 5, 12, 60])
def test_the_paired_test_is_that_of_scipy(rows: int) -> None:
    from scipy import stats

    generator = random.Random(rows)
    first = [generator.random() for _ in range(rows)]
    second = [value + generator.gauss(-0.1, 0.3) for value in first]
    result = paired_test(first, second)
    assert result.p_t == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-8)
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (result.difference.low, result.difference.high) == pytest.approx((interval.low, interval.high))
    assert result.better + result.worse + result.equal == rows
    assert result.better == sum(a > b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("rows", [2, 4, 10])
def test_the_sign_flip_test_is_the_exact_permutation_test_of_scipy(rows: int) -> None:
    from scipy import stats

    generator = random.Random(rows)
    differences = [generator.choice([-1.0, -0.5, 0.0, 0.5, 1.0, 1.5]) for _ in range(rows)]
    expected = stats.permutation_test(
        (differences,), lambda x: abs(sum(x)), permutation_type="samples", alternative="greater", n_resamples=10**6
    )
    assert sign_flip_p(differences) == pytest.approx(expected.pvalue)


def test_the_sign_flip_test_of_many_rows_is_sampled() -> None:
    from scipy import stats

    generator = random.Random(7)
    differences = [generator.gauss(0.3, 1.0) for _ in range(40)]
    exact = stats.ttest_1samp(differences, 0.0).pvalue  # close to the permutation test for normal differences
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.02)
    assert sign_flip_p(differences) == sign_flip_p(differences)
    assert sign_flip_p([1.0] * 40) == pytest.approx(1 / 20_001)


def test_a_small_p_value_is_not_rounded_to_0() -> None:
    from scipy import stats

    assert t_tail(50.0, 30) == pytest.approx(stats.t.sf(50.0, 30), rel=1e-9)
    assert t_tail(10.6, 255) == pytest.approx(stats.t.sf(10.6, 255), rel=1e-9)  # many rows, and t below their root
    assert t_tail(0.25, 255) == pytest.approx(stats.t.sf(0.25, 255), rel=1e-9)
    first = [1.0 + n / 1000 for n in range(40)]
    second = [n % 2 / 1000 for n in range(40)]
    p = paired_test(first, second).p_t
    assert p == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-6)
    assert p is not None
    assert 0.0 < p < 1e-40


def test_equal_models_and_models_that_always_differ() -> None:
    same = paired_test([1.0, 0.0, 0.5], [1.0, 0.0, 0.5])
    assert (same.p_t, same.p_sign_flip, same.better, same.worse, same.equal) == (1.0, 1.0, 0, 0, 3)
    shifted = paired_test([1.0, 1.0], [0.0, 0.0])
    assert (shifted.p_t, shifted.p_sign_flip, shifted.better) == (0.0, 0.5, 2)
    assert paired_test([], []).p_sign_flip is None
    with pytest.raises(ValueError, match="zip"):
        paired_test([1.0], [])


# What is said of a run at a glance is what its files say.


def test_best_and_final_values_have_their_steps(tmp_path: Path) -> None:
    run = summarize_run(a_run(tmp_path / "a"))
    assert (run.kind, run.step, run.steps) == ("train", 4, 5)
    assert run.metrics["reward/mean"] == MetricValues(0.6, 0.2, 1, 0.8, 2)
    assert run.metrics["reward/mean"].best("reward/mean") == (0.8, 2)
    assert run.metrics["loss"].best("loss") == (-0.8, 2)  # of a loss, the lowest
    assert run.metrics["eval/reward/mean"].last == 0.75
    values = MetricValues(0.6, 0.2, 1, 0.8, 2)
    neither = (
        "entropy",
        "eval/entropy",
        "turns/mean",
        "agents/a/turns/mean",
        "tokens/sampled",
        "reward/std",
        "version/oldest",
    )
    assert {values.best(name) for name in neither} == {(None, None)}
    higher = (
        "reward/median",
        "pass_rate",
        "rewards/turns/mean",
        "metrics/tokens",
        "eval/reward/source/lr",
        "stop/done",
    )
    assert {values.best(name) for name in higher} == {(0.8, 2)}
    assert values.best("tool_errors/mean") == (0.2, 1)


def test_a_model_card_names_no_best_entropy(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "reward/mean": 0.5, "entropy": 0.25}) + "\n")
    lines = model_card(run, name="me/model", curve=False).splitlines()
    assert "| `reward/mean` | 0.5 | 0.8 | 2 |" in lines
    assert "| `entropy` | 0.25 |  |  |" in lines


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
    assert [(g.kind, g.count, g.step, g.id, g.message, g.differ) for g in groups] == [
        ("environment", 2, 3, "c", "timeout after 31 s", True),
        ("reward", 1, 2, "b", "KeyError: 'x'", False),
    ]
    same = group_failures([(step, "a", "reward", "KeyError: 'x'") for step in (1, 2)])
    assert [(g.count, g.differ) for g in same] == [(2, False)]
    back = group_failures([(1, "a", "reward", f"KeyError: {name!r}") for name in "xyy"])
    assert [(g.count, g.message, g.differ) for g in back] == [(3, "KeyError: 'y'", True)]


def test_calls_of_tools_are_counted_with_their_errors_by_message() -> None:
    def outcome(name: str, error: str | None, content: str = "Error: ?") -> ToolOutcome:
        return ToolOutcome(id=f"{name}{content}", name=name, arguments={}, content=content, error=error)

    unread = ToolCall(id="c", name="", arguments={}, text="{", error="no JSON at '{'")
    first = Trajectory(id="1.0/0", group="1.0", row=Row(id="1", messages=[]), step=1)
    first.turns = [
        Turn(index=0, message={}, text="", outcomes=(outcome("add", "timeout", "Error: add took longer than 30 s"),)),
        Turn(
            index=1,
            message={},
            text="",
            outcomes=(outcome("add", None), outcome("sub", "unknown_tool")),
            calls=(unread,),
        ),
    ]
    second = Trajectory(id="2.0/0", group="2.0", row=Row(id="1", messages=[]), step=2)
    second.turns = [
        Turn(index=0, message={}, text="", outcomes=(outcome("add", "timeout", "Error: add took longer than 2 s"),)),
        Turn(index=1, message={}, text="", calls=(unread,), finish_reason="length"),  # a call that is never made
    ]
    use = ToolCallCounts()
    for one in (first, second):
        use.add(one)
    assert {name: (tool.calls, tool.failed) for name, tool in use.tools.items()} == {
        "add": (3, 2), "sub": (1, 1), "": (1, 1),
    }  # fmt: skip
    assert (use.calls, use.failed) == (5, 4)
    assert [(name, g.kind, g.count, g.message, g.step, g.id) for name, g in use.ranked()] == [
        ("add", "timeout", 2, "add took longer than 2 s", 2, "2.0/0"),
        ("sub", "unknown_tool", 1, "?", 1, "1.0/0"),
        ("", "malformed", 1, "no JSON at '{'", 1, "1.0/0"),
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
