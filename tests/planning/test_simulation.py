"""The simulation on workloads whose times can be computed by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from turnwise.commands.doctor import print_scaling
from turnwise.errors import ConfigError
from turnwise.planning.simulation import (
    EngineSpeed,
    MeasuredWorkload,
    ScalingOptions,
    Setup,
    TrainingSpeed,
    TurnCost,
    predict_scaling,
    simulate,
)

TWO_TURNS = (TurnCost(0, 10, 1.0), TurnCost(0, 10, 1.0))
"""1 s in the engine and 1 s in the environment, twice."""
SLOW = MeasuredWorkload(
    groups=[[TWO_TURNS]],
    engine=EngineSpeed(request=0.0, prefill=0.0, token=0.1, sharing=0.0),
    training=TrainingSpeed(per_token=0.01, other=0.3),
    steps=1,
    steps_per_hour=800.0,
)
ONE = Setup(batch_size=1, group_size=1, max_staleness=0, max_concurrent=8, steps=3)


def test_a_synchronous_step_is_the_conversation_and_then_the_training() -> None:
    found = simulate(SLOW, ONE)
    assert found.seconds == pytest.approx(3 * (4.0 + 0.2 + 0.3))
    assert found.engine_idle == pytest.approx(1 - 2.0 / 4.5)
    assert found.trainer_idle == pytest.approx(4.0 / 4.5)
    assert (found.staleness_mean, found.staleness_max) == (0, 0)


def test_one_step_off_samples_the_next_group_during_the_training() -> None:
    found = simulate(SLOW, replace(ONE, max_staleness=1))
    # groups 1 and 2 start at 0 and end at 4; group 3 starts when the first weights are published, at 4.2
    assert found.seconds == pytest.approx(4.2 + 4.0 + 0.2 + 0.3)
    assert found.staleness_max == 1
    # group 2: 1. Group 3: the second weights are published during its first turn, so 0.5, then 0
    assert found.staleness_mean == pytest.approx((0 + 1 + 0.25) / 3)


def test_turns_share_the_speed_of_a_replica() -> None:
    sharing = replace(SLOW, engine=EngineSpeed(request=0.0, prefill=0.0, token=0.0, sharing=0.1))
    # two turns at the same time: each token takes 0.2 s
    together = simulate(sharing, replace(ONE, group_size=2, steps=1))
    assert together.seconds == pytest.approx(2 * (10 * 0.2 + 1.0) + 0.4 + 0.3)
    apart = simulate(sharing, replace(ONE, group_size=2, steps=1, replicas=2))
    assert apart.seconds == pytest.approx(2 * (10 * 0.1 + 1.0) + 0.4 + 0.3)


def test_prompts_and_requests_delay_a_turn() -> None:
    turn = (TurnCost(prompt_tokens=100, sampled_tokens=10, environment=0.0),)
    engine = EngineSpeed(request=0.5, prefill=0.01, token=0.1, sharing=0.0)
    found = simulate(replace(SLOW, groups=[[turn]], engine=engine), replace(ONE, steps=1))
    assert found.seconds == pytest.approx(0.5 + 1.0 + 1.0 + 0.01 * 110 + 0.3)


def test_max_concurrent_makes_conversations_wait() -> None:
    found = simulate(SLOW, replace(ONE, batch_size=3, steps=1, max_concurrent=1))
    assert found.seconds == pytest.approx(3 * 4.0 + 3 * 0.2 + 0.3)


def test_engine_and_trainer_on_the_same_device_have_half_of_the_speed_while_both_work() -> None:
    # a turn of 4 s, and an update of 1 s. Group 2 samples from 0 on, group 3 from the first update on
    turn = (TurnCost(0, 40, 0.0),)
    workload = replace(SLOW, groups=[[turn]], training=TrainingSpeed(per_token=1 / 40, other=0.0))
    setup = replace(ONE, max_staleness=1, steps=2)
    # groups 1 and 2 end at 4, the updates follow alone: nothing is shared
    assert simulate(workload, replace(setup, shared=True)).seconds == pytest.approx(6.0)
    # three steps: group 3 samples from 5 on; the second update needs 2 s of 5..7, in which group 3 does 1 s of its 4 s
    three = simulate(workload, replace(setup, shared=True, steps=3))
    assert three.seconds == pytest.approx(7.0 + 3.0 + 1.0)
    assert simulate(workload, replace(setup, steps=3)).seconds == pytest.approx(5.0 + 4.0 + 1.0)


def test_engines_stand_still_while_weights_are_loaded() -> None:
    found = simulate(SLOW, replace(ONE, update_seconds=0.25))
    assert found.seconds == pytest.approx(3 * (4.5 + 0.25))


def test_the_asynchronous_mode_does_not_wait_for_the_slowest_conversation() -> None:
    tail = [[(TurnCost(0, 10, seconds),)] for seconds in [0.5] * 19 + [20.0]]
    workload = replace(SLOW, groups=tail)
    setup = replace(ONE, batch_size=4, max_concurrent=64, steps=30)
    rates = [simulate(workload, replace(setup, max_staleness=n)).steps_per_hour for n in (0, 1, 8)]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] > 3 * rates[0]


def test_equal_seeds_give_equal_predictions() -> None:
    workload = replace(SLOW, groups=[[(TurnCost(0, n, 0.1),)] for n in range(1, 9)])
    setup = replace(ONE, batch_size=4, group_size=2, max_staleness=2, steps=10)
    assert simulate(workload, setup) == simulate(workload, setup)
    assert simulate(workload, setup) != simulate(workload, replace(setup, seed=1))


OPTIONS = ScalingOptions(batch_size=4, group_size=2, max_concurrent=64, staleness=2, devices=[1, 4])


def test_scaling_divides_the_devices() -> None:
    rows = list(predict_scaling(SLOW, OPTIONS))
    assert [(row.devices, row.mode) for row in rows] == [
        (1, "synchronous"),
        (1, "one step off"),
        (1, "asynchronous"),
        (4, "synchronous"),
        (4, "one step off"),
        (4, "asynchronous"),
    ]
    synchronous, *divided = rows[3:]
    assert (synchronous.engines, synchronous.trainers) == (4, 4)
    assert all(row.engines + row.trainers == 4 for row in divided)
    # 4 x 2 conversations of 20 tokens: 1.6 s of training on one device, 0.4 s on four
    assert rows[0].prediction.seconds / rows[3].prediction.seconds == pytest.approx((4 + 1.6 + 0.3) / (4 + 0.4 + 0.3))


def test_a_scaled_batch_needs_the_same_time_on_more_devices() -> None:
    options = replace(OPTIONS, devices=[64], scale_batch=True, trainer_share=0.5)
    synchronous, *_ = predict_scaling(SLOW, options)
    assert synchronous.batch_size == 256
    assert synchronous.prediction.steps_per_hour == pytest.approx(3600 / (4 + 1.6 + 0.3))
    # a part of the run is simulated; the tokens are those of the complete run
    assert synchronous.prediction.tokens_per_second == pytest.approx(256 * 2 * 20 / (4 + 1.6 + 0.3), rel=1e-6)


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 devices: a run needs an engine replica"):
        list(predict_scaling(SLOW, replace(OPTIONS, devices=[2], replica_devices=2)))


def test_a_measured_run_that_sampled_while_it_trained_is_noted() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    print_scaling(console, replace(SLOW, staleness=2), [], source="runs/a")
    text = console.export_text()
    assert "measured in runs/a: 1 steps at 800 steps per hour, 2.0 turns per conversation" in text
    assert "note: the measured run sampled while it trained (staleness up to 2)" in text
