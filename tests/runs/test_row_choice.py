"""Which rows a step uses, and which of its trajectories: dynamic sampling, overlong filter, weights of data sets, curriculum."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import train_silently
from turnwise.config.recipe import load
from turnwise.data.order import Curriculum, Order, WeightedOrder, initial_pass_rates, pass_rates_of, weighted_order
from turnwise.errors import ConfigError, DataError
from turnwise.train import assemble
from turnwise.types import Group, Row, Trajectory

PLACES = Path(__file__).parents[1] / "support" / "places.py"


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        data={"train": str(save_rows(tmp_path / "train.jsonl")), "shuffle": False},
        environment=f"{PLACES}:equal_in_even_rows",
        limits={"turns": 1, "tokens_per_turn": 96},
        train={"steps": 2, "batch_size": 4, "group_size": 3, "lr": 0.01},
    )


def run(recipe: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and the trajectories of a training run."""
    config, _ = load(recipe, overrides)
    train_silently(assemble(config))
    files = (Path(config.output) / name for name in ("metrics.jsonl", "trajectories.jsonl"))
    metrics, trajectories = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    return metrics, trajectories


def rows_of(trajectories: list[dict[str, Any]], step: int) -> list[int]:
    """The rows of the groups of a step, in the order in which they were sampled."""
    return list(dict.fromkeys(int(one["row"]["id"]) for one in trajectories if one["step"] == step))


def test_groups_without_differences_are_replaced(recipe: Path) -> None:
    # rows 2, 4, 6, 8 give equal rewards: of rows 1 to 4 two groups are replaced by rows 5, 6 and then one by row 7
    metrics, trajectories = run(recipe, "train.dynamic_sampling=3")
    assert rows_of(trajectories, 1) == [1, 2, 3, 4, 5, 6, 7]
    assert metrics[0]["groups/replaced"] == 3
    assert metrics[0]["groups/zero_std"] == pytest.approx(3 / 7)
    trained = {
        int(one["row"]["id"])
        for one in trajectories
        if one["step"] == 1 and any(turn["advantage"] for turn in one["turns"])
    }
    assert trained == {1, 3, 5, 7}
    assert rows_of(trajectories, 2)[0] == 8, "the next step goes on behind the rows that were used"


def test_sums_of_weighted_rewards_that_differ_by_rounding_are_equal(recipe: Path, tmp_path: Path) -> None:
    # 0.1 + 0.2 for the conversations with an odd number, 0.3 for the others
    (tmp_path / "sums.py").write_text(
        "def odd(trajectory): return float(int(trajectory.id[-1]) % 2)\n"
        "def also_odd(trajectory): return float(int(trajectory.id[-1]) % 2)\n"
        "def even(trajectory): return float(int(trajectory.id[-1]) % 2 == 0)\n"
    )
    uses = [("odd", 0.1), ("also_odd", 0.2), ("even", 0.3)]
    parts = ", ".join(f"{{use: {tmp_path}/sums.py:{name}, weight: {weight}}}" for name, weight in uses)
    metrics, trajectories = run(
        recipe,
        "train.dynamic_sampling=1",
        "train.steps=1",
        f"environment={PLACES}:indifferent",
        "environment.arguments.reward=0.0",
        f"reward.trajectory=[{parts}]",
    )
    assert len({one["reward"] for one in trajectories}) == 2
    assert metrics[0]["groups/zero_std"] == 1
    assert metrics[0]["groups/replaced"] == 4
    assert metrics[0]["reward/std"] == 0.0
    assert {turn["advantage"] for one in trajectories for turn in one["turns"]} == {0.0}


def test_no_more_groups_are_replaced_than_the_recipe_says(recipe: Path) -> None:
    metrics, trajectories = run(recipe, "train.dynamic_sampling=1", "train.steps=1")
    assert rows_of(trajectories, 1) == [1, 2, 3, 4, 5, 6]
    assert metrics[0]["groups/replaced"] == 2


def test_a_step_without_any_differences_is_finished(recipe: Path) -> None:
    metrics, trajectories = run(
        recipe, "train.dynamic_sampling=2", "train.steps=1", f"environment={PLACES}:indifferent"
    )
    assert metrics[0]["grad_norm"] == 0
    assert len(trajectories) == 3 * 4 * 3


def test_a_resumed_run_uses_the_same_rows(recipe: Path, tmp_path: Path) -> None:
    options = ["train.dynamic_sampling=2", "data.curriculum.low=0.2", "deterministic=true", "checkpoint.every=1"]
    _, expected = run(recipe, *options, "train.steps=4", f"output={tmp_path / 'straight'}")
    run(recipe, *options, "train.steps=2")
    _, resumed = run(recipe, *options, "train.steps=4", "resume=auto")
    for step in (1, 2, 3, 4):
        assert rows_of(resumed, step) == rows_of(expected, step), step


def test_cut_trajectories_are_not_trained_on(recipe: Path) -> None:
    def weights(*options: str) -> dict[str, set[float]]:
        _, trajectories = run(recipe, "train.steps=1", "limits.tokens_per_turn=4", *options)
        return {
            reason: {turn["weight"] for one in trajectories for turn in one["turns"] if turn["finish_reason"] == reason}
            for reason in ("stop", "length")
        }

    assert weights() == {"stop": {1.0}, "length": {1.0}}
    assert weights("train.overlong_filter=true", "replace=true") == {"stop": {1.0}, "length": {0.0}}


def test_data_sets_are_mixed_by_their_weights(recipe: Path, tmp_path: Path) -> None:
    other = save_rows(tmp_path / "other.jsonl", count=3)
    sources = f"data.train=[{tmp_path / 'train.jsonl'}, {other}]"
    metrics, trajectories = run(recipe, sources, "data.weights=[3, 1]", "train.steps=3")
    rows = [row for step in (1, 2, 3) for row in rows_of(trajectories, step)]
    # rows 9, 10 and 11 are those of the second data set: one of four
    assert rows == [1, 2, 9, 3, 4, 5, 10, 6, 7, 8, 11, 1]
    of_other = [one["reward"] for one in trajectories if one["step"] == 1 and one["row"]["id"] == "9"]
    assert metrics[0][f"reward/source/{other}"] == pytest.approx(sum(of_other) / 3)


def test_the_order_follows_the_weights() -> None:
    order = WeightedOrder([5, 3], [2, 1], seed=0, shuffle=False)
    sources = [index >= 5 for _, index in order.take(0, 9000)]
    assert sum(sources) == 3000
    for count in range(1, 200):
        assert abs(sum(sources[:count]) - count / 3) < 1, "never further than a row from the share"
    assert [pair for pair in order.take(0, 12) if pair[1] >= 5] == [(0, 5), (0, 6), (0, 7), (1, 5)]


def test_an_order_with_weights_depends_on_the_position_only() -> None:
    expected = WeightedOrder([5, 3, 4], [2, 1, 0.5], seed=7).take(0, 60)
    order = WeightedOrder([5, 3, 4], [2, 1, 0.5], seed=7)
    for position in (40, 3, 0, 41):
        assert order.take(position, 19) == expected[position : position + 19]
    assert Counter(index for _, index in expected if index < 5) == Counter(
        {n: Counter(i for _, i in expected)[n] for n in range(5)}
    )


def test_a_data_set_without_rows_is_refused() -> None:
    rows = [Row(id="1", messages=[], source="a")]
    with pytest.raises(ConfigError, match=r"data.weights: no row is left of b \(data.max_rows"):
        weighted_order(rows, {"a": 1.0, "b": 2.0}, seed=0, shuffle=False)


def test_the_curriculum_skips_rows(recipe: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "?", "rate": [0.0, 0.5, 1.0, None][n % 4]} for n in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rated = ["data.curriculum.column=rate", "data.curriculum.keep=0.000001", "train.steps=1"]
    metrics, trajectories = run(recipe, *rated, "data.curriculum.low=0", "data.curriculum.high=1")
    assert rows_of(trajectories, 1) == [2, 4, 6, 8]
    assert metrics[0]["rows/skipped"] == 4
    _, trajectories = run(recipe, *rated, "data.curriculum.low=0", "replace=true")
    assert rows_of(trajectories, 1) == [2, 3, 4, 6]
    _, trajectories = run(recipe, *rated, "data.curriculum.high=0.5", "replace=true")
    assert rows_of(trajectories, 1) == [1, 4, 5, 8]
    _, trajectories = run(recipe, *rated, "data.curriculum.low=0", "data.curriculum.keep=0.999999", "replace=true")
    assert rows_of(trajectories, 1) == [1, 2, 3, 4]


def test_the_curriculum_learns_pass_rates_from_the_run(recipe: Path, tmp_path: Path) -> None:
    # even rows always have the reward 0.5, and the others are not that close to it
    options = ["data.curriculum.low=0.499", "data.curriculum.high=0.501", "data.curriculum.keep=0.000001"]
    _, trajectories = run(recipe, *options, "train.steps=4", "train.batch_size=4")
    assert [rows_of(trajectories, step) for step in (1, 2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [rows_of(trajectories, step) for step in (3, 4)] == [[2, 4, 6, 8]] * 2
    place = json.loads(next((tmp_path / "run" / "checkpoints").glob("*04/checkpoint.json")).read_text())["place"]
    assert {row: rate for row, rate in place["pass_rates"].items() if int(row) % 2 == 0} == dict.fromkeys("2468", 0.5)


def test_a_curriculum_that_skips_all_rows_uses_them_all_the_same(recipe: Path) -> None:
    options = ["data.curriculum.high=-1", "data.curriculum.keep=0.000001", "train.steps=3"]
    metrics, _ = run(recipe, *options)
    assert [one["rows/skipped"] for one in metrics] == [0, 0, 8]


def test_pass_rates_are_the_means_of_groups_without_failed_trajectories() -> None:
    row = Row(id="r", messages=[])
    trajectories = [
        Trajectory(id=str(n), group="g", row=row, reward=reward) for n, reward in enumerate((1.0, 0.0, None))
    ]
    assert pass_rates_of([Group(id="g", row=row, trajectories=trajectories)]) == {"r": 0.5}
    assert pass_rates_of([Group(id="g", row=row, trajectories=trajectories[2:])]) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rat": 1}, "data.curriculum.column=rate: row '1' has no such column; its columns are: rat"),
        ({"rate": "high"}, "row '1' has 'high'; a pass rate must be a number"),
        ({"rate": True}, "row '1' has True; a pass rate must be a number"),
    ],
)
def test_a_column_without_pass_rates_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        initial_pass_rates([Row(id="1", messages=[], fields=fields)], "rate")
    assert message in str(caught.value)


def test_a_skipped_row_is_kept_with_the_given_probability() -> None:
    curriculum = Curriculum(low=0.0, high=1.0, keep=0.25, seed=3)
    row = Row(id="r", messages=[])
    kept = sum(not curriculum.skips(row, place, {"r": 0.0}) for place in range(4000))
    assert kept == pytest.approx(1000, abs=100)
    assert not any(curriculum.skips(row, place, {"r": 0.5}) for place in range(100))
    assert not any(curriculum.skips(row, place, {}) for place in range(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.dynamic_sampling=1", "train.group_size=1"], "train.dynamic_sampling replaces groups whose"),
        (["data.curriculum.keep=0.5"], "data.curriculum.keep has no effect without data.curriculum.low"),
        (["data.curriculum.low=1", "data.curriculum.high=0.5"], "must be less than data.curriculum.high=0.5"),
        (["data.weights=[1, 2]"], "data.weights has 2 numbers, and data.train has 1 data set"),
        (["data.train=[a.jsonl, a.jsonl]", "data.weights=[1, 2]"], "named twice in data.train"),
        (["data.weights=[1, 0]"], "data.weights"),
    ],
)
def test_options_without_effect_are_refused(recipe: Path, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble(load(recipe, options)[0])
    assert message in str(caught.value)


def test_an_order_without_weights_is_that_of_one_data_set() -> None:
    assert Order(3, seed=0, shuffle=False).take(1, 3) == [(0, 1), (0, 2), (1, 0)]
