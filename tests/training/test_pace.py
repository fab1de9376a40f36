"""Which rank is slower than the others, from the time that the layers of each compute."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from turnwise.training.pace import LayerClock, Pace, SlowestRank


def paces(*numbers: tuple[int, float]) -> list[Pace]:
    return [Pace(f"host{rank}", tokens, seconds) for rank, (tokens, seconds) in enumerate(numbers)]


@pytest.mark.parametrize(
    ("updates", "rank", "times"),
    [
        ([paces((100, 1.0), (100, 10.0))], 1, 10.0),
        ([paces((100, 1.0), (100, 1.0), (100, 4.0), (100, 1.0))], 2, 4.0),
        ([paces((100, 1.0), (400, 4.0), (100, 1.0))], 0, 1.0),  # more tokens
        ([paces((1000, 10.0), (1000, 10.0), (1, 0.5))], 0, 1.0),  # a small micro-batch, whose tokens take longer
        ([paces((100, 1.0), (100, 4.0), (0, 0.0))], 1, 4.0),  # a rank without micro-batches is no measure
        ([paces((100, 1.0), (0, 0.0)), paces((0, 0.0), (100, 6.0))], 1, 6.0),  # one step each
    ],
)
def test_the_slowest_rank_is_slow_in_all_and_for_each_token(updates: list[list[Pace]], rank: int, times: float) -> None:
    found = SlowestRank.of(updates)
    assert found is not None
    assert (found.rank, found.place) == (rank, f"host{rank}")
    assert found.times == pytest.approx(times)


def test_one_rank_that_computes_is_not_compared() -> None:
    assert SlowestRank.of([]) is None
    assert SlowestRank.of([[]]) is None
    assert SlowestRank.of([paces((100, 1.0), (0, 0.0))]) is None


class Sleeping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return (x * 2).exp().exp()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_time_inside_of_layers_is_counted_while_a_pass_runs(checkpointing: bool) -> None:
    layer = Sleeping()
    layer.register_forward_hook(lambda *_: time.sleep(0.2))  # as what `fully_shard` has registered before
    clock = LayerClock([layer], "here")
    layer(torch.ones(1))  # not counted

    def run(x: Any) -> None:
        y = checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
        assert isinstance(y, torch.Tensor)
        y.backward()

    began = time.perf_counter()
    for _ in range(3):
        with clock.running(7):
            run(torch.ones(1, requires_grad=True))
    clocked = time.perf_counter() - began
    pace = clock.take()
    assert (pace.place, pace.tokens) == ("here", 21)
    assert 3 * 0.05 <= pace.seconds < clocked - 3 * 0.2
    assert clock.take() == Pace("here")
