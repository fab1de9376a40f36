"""Predictions for several numbers of devices, and for synchronous, one-step-off and asynchronous training.

A synchronous run uses all devices for sampling, and then all for training. The other modes divide the devices: some sample while
the others train. The simulated run has the batch of the recipe, or, with `scale_batch`, as many times the batch as there are
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from turnwise.errors import ConfigError
from turnwise.planning.simulation import Setup, SimulationResult, simulate
from turnwise.planning.workload import MeasuredWorkload

__all__ = ["SHARES", "ScalingOptions", "ScalingRow", "predict_scaling"]

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""The shares of training devices that are compared if no share is given."""
_MOST_TURNS = 60_000
"""Turns of a simulated run: larger runs are simulated with fewer devices and a smaller batch, in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """What is predicted."""

    batch_size: int
    group_size: int
    max_concurrent: int
    staleness: int
    """`train.max_staleness` of the asynchronous mode."""
    devices: Sequence[int]
    measured_devices: int = 1
    """Devices of the measured run: all of them sampled, and all of them trained."""
    replica_devices: int = 1
    """Devices of an engine replica (tensor parallel)."""
    trainer_share: float | None = None
    """The share of the devices that trains; None: the share with the most steps per hour."""
    efficiency: float = 1.0
    """How fast `n` training devices are, compared with `n` times one device."""
    update_seconds: float = 0.0
    scale_batch: bool = False
    steps: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """A prediction for one mode and one number of devices."""

    devices: int
    mode: str
    engines: int
    """Devices that sample."""
    trainers: int
    """Devices that train."""
    batch_size: int
    prediction: SimulationResult


def predict_scaling(workload: MeasuredWorkload, options: ScalingOptions) -> Iterator[ScalingRow]:
    """Predict each mode for each number of devices.

    Raises ConfigError if a number of devices is too small for an engine replica, and one trainer beside it.
    """
    for devices in options.devices:
        if devices < options.replica_devices or (devices < options.replica_devices + 1 and devices > 1):
            raise ConfigError(
                f"{devices} devices: a run needs an engine replica ({options.replica_devices} devices) and at least one "
                f"device that trains; give more devices"
            )
        yield _row(workload, options, devices, mode="synchronous", staleness=0, trainers=devices)
        for mode, staleness in (("one step off", 1), ("asynchronous", options.staleness)):
            if devices == 1:
                yield _row(workload, options, 1, mode=mode, staleness=staleness, trainers=1)
                continue
            candidates = sorted({_trainers(devices, share, options) for share in _shares(options)})
            rows = [
                _row(workload, options, devices, mode=mode, staleness=staleness, trainers=trainers)
                for trainers in candidates
            ]
            yield max(rows, key=lambda row: row.prediction.steps_per_hour)


def _shares(options: ScalingOptions) -> Sequence[float]:
    return SHARES if options.trainer_share is None else (options.trainer_share,)


def _trainers(devices: int, share: float, options: ScalingOptions) -> int:
    """Training devices for a share: the others are complete replicas."""
    replicas = max(1, round(devices * (1 - share)) // options.replica_devices)
    return max(1, devices - replicas * options.replica_devices)


def _row(
    workload: MeasuredWorkload, options: ScalingOptions, devices: int, *, mode: str, staleness: int, trainers: int
) -> ScalingRow:
    batch_size = options.batch_size * (devices if options.scale_batch else 1)
    shared = devices == 1
    engines = devices if mode == "synchronous" or shared else devices - trainers
    replicas = max(1, engines // options.replica_devices)
    replicas_measured = max(1, options.measured_devices // options.replica_devices)
    turns = batch_size * options.group_size * workload.turns
    # a part of the run: the same number of conversations on a replica
    steps = max(staleness + 4, min(options.steps, int(_MOST_TURNS / turns)))
    part = max(1, min(int(steps * turns / _MOST_TURNS), batch_size, replicas))
    setup = Setup(
        batch_size=max(1, batch_size // part),
        group_size=options.group_size,
        max_staleness=staleness,
        max_concurrent=max(1, options.max_concurrent * (devices if options.scale_batch else 1) // part),
        steps=steps,
        replicas=max(1, replicas // replicas_measured // part),
        training_speedup=max(trainers / options.measured_devices, 1e-9)
        * (options.efficiency if trainers > options.measured_devices else 1.0)
        / part,
        shared=shared and staleness > 0,
        update_seconds=options.update_seconds,
    )
    found = simulate(workload, setup)
    return ScalingRow(
        devices=devices,
        mode=mode,
        engines=engines,
        trainers=trainers,
        batch_size=batch_size,
        prediction=replace(found, tokens_per_second=found.tokens_per_second * part),
    )
