"""Weights of several ranks on their way to servers, when the run ends or the process is killed in the middle."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise.engines.remote.weights import WeightCopies
from turnwise.errors import EngineError, RunError
from turnwise.models.streamed import StreamedWeights
from turnwise.training.sharded.sharded_learner import Leader

LAYERS: list[dict[str, torch.Tensor]] = [{"a": torch.ones(3, dtype=torch.bfloat16)}, {"b": torch.arange(4.0)}]


def streamed(gather: Any) -> StreamedWeights:
    return StreamedWeights([{name: tensor.to("meta") for name, tensor in layer.items()} for layer in LAYERS], gather)


class _Gather:
    """A command."""

    def run(self, rank: Any) -> None:
        pass


class _Alone:
    """Ranks of which there is one."""

    size = 1

    def __init__(self) -> None:
        self.liveness = SimpleNamespace(lost=lambda: None)
        self.sent: list[Any] = []

    def scatter(self, commands: Sequence[Any]) -> Any:
        self.sent.append(commands[0])
        return commands[0]

    def close(self) -> None:
        pass


def test_a_thread_that_still_reads_weights_sends_nothing_to_ranks_that_have_ended() -> None:
    """A run that is stopped while servers get weights closes its learner beside the thread that reads them."""
    ranks: Any = _Alone()
    leader = Leader(ranks)

    def gather(number: int) -> Mapping[str, torch.Tensor]:
        leader.run(_Gather())
        leader.close()  # by the main thread, between two layers
        return LAYERS[number]

    with pytest.raises(RunError, match="the ranks have ended"):
        WeightCopies().write(1, streamed(gather))
    assert [type(command).__name__ for command in ranks.sent] == ["_Gather", "Finish"]
    leader.close()
    assert len(ranks.sent) == 2


def test_copies_are_in_a_file_without_a_name_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def gather(number: int) -> Mapping[str, torch.Tensor]:
        assert not list(tmp_path.iterdir())  # what a process leaves that is killed here
        return LAYERS[number]

    tensors = WeightCopies().write(1, streamed(gather)).tensors
    assert tensors is not None
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"a": [1, 1, 1], "b": [0, 1, 2, 3]}

    def full(number: int) -> Mapping[str, torch.Tensor]:
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError, match="Set the environment variable TMPDIR to a directory with more free space"):
        WeightCopies().write(1, streamed(full))
