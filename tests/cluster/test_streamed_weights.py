"""Weights of several ranks on their way to servers and rollout workers: memory, and ends in the middle."""

from __future__ import annotations

import asyncio
import ctypes
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.ray_clusters import cluster
from turnwise.engines.remote.weights import WeightCopies
from turnwise.errors import EngineError, RunError
from turnwise.models.streamed import StreamedWeights
from turnwise.options.engines import ClusterSection, WorkersSection
from turnwise.ray_workers import ray_api, rollouts
from turnwise.ray_workers.rollout_worker import SentWeights, parts_of, unpack_tensors
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


# Rollout workers


def test_parts_have_a_size_and_read_the_layers_in_their_order() -> None:
    read: list[int] = []
    weights = [{f"{layer}.{name}": torch.full((4,), 10.0 * layer + name) for name in range(3)} for layer in range(3)]

    def gather(number: int) -> Mapping[str, torch.Tensor]:
        read.append(number)
        return weights[number]

    empty = [{name: tensor.to("meta") for name, tensor in layer.items()} for layer in weights]
    parts = list(parts_of(StreamedWeights(empty, gather), size=2 * 16))
    assert [list(part) for part in parts] == [["0.0", "0.1"], ["0.2", "1.0"], ["1.1", "1.2"], ["2.0", "2.1"], ["2.2"]]
    assert read == [0, 1, 2]
    assert {name: tensor.tolist() for name, tensor in unpack_tensors(parts).items()} == {
        name: tensor.tolist() for layer in weights for name, tensor in layer.items()
    }
    assert [list(part) for part in parts_of({"large": torch.zeros(100), "small": torch.zeros(1)}, size=8)] == [
        ["large"],
        ["small"],
    ]


_M_MMAP_THRESHOLD = -3


def _private_kilobytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _until_lost(reference: Any) -> None:
    """Wait until Ray knows that the owner of an object is dead. Until then the object is still found on this machine."""
    import ray

    for _ in range(600):
        try:
            ray.get(reference, timeout=10)
        except ray.exceptions.ObjectLostError:
            return
        time.sleep(0.1)
    pytest.fail("the object of an actor that was killed is not lost after a minute")


@pytest.mark.cluster
@pytest.mark.ray
def test_the_trainer_has_a_part_of_the_weights_in_memory_and_a_worker_changes_nothing_without_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, values = 16, 1_000_000  # 4 MB each
    monkeypatch.setattr(rollouts, "parts_of", lambda weights: parts_of(weights, 8_000_000))
    empty = [{f"layer.{number}": torch.empty(values, device="meta")} for number in range(layers)]
    section = ClusterSection.model_validate({"launcher": "ray"})
    pool: list[SentWeights] = []
    peak: list[int] = []
    ended = threading.Event()
    with cluster({"worker": 1}, cpus=1) as started:
        assert ray_api.connect(started.address, WorkersSection())
        options: Any = SimpleNamespace(address=None, cluster=section, probe=None, gpu=None, info=None)
        sender = rollouts.RayRollouts(options, lambda number: pytest.fail("no worker is started"))

        async def publish(weights: SentWeights, *_: object) -> None:
            pool.append(weights)

        monkeypatch.setattr(sender.pool, "publish", publish)
        asyncio.run(sender.update(0, {"first": torch.zeros(1000)}))  # what Ray allocates once
        ctypes.CDLL(None).mallopt(
            _M_MMAP_THRESHOLD, 1 << 20
        )  # freed layers are returned, as those of a large model are
        before = _private_kilobytes()

        def watch() -> None:
            while not ended.wait(0.001):
                peak.append(_private_kilobytes() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        weights = StreamedWeights(empty, lambda number: {f"layer.{number}": torch.full((values,), float(number))})
        asyncio.run(sender.update(1, weights))
        ended.set()
        thread.join()
        assert max(peak) < 20_000  # a part and a layer; all of them are 64,000
        assert len(pool[-1].parts) == 8

        given: list[tuple[int, list[float]]] = []

        async def load_weights(version: int, parts: Sequence[Any], probe: None) -> list[Any]:
            tensors = unpack_tensors(parts)
            given.append((version, [tensor.mean().item() for tensor in tensors.values()]))
            return []

        actor = ray_api.WorkerActor("rollout worker 0", lambda: pytest.fail("not started"), None)
        actor._worker = SimpleNamespace(load_weights=load_weights)  # type: ignore[assignment]
        asyncio.run(actor.load_weights(pool[-1]))
        assert given == [(1, [float(number) for number in range(layers)])]

        import ray

        class Owner:
            """An actor whose objects are lost with it."""

            def put(self) -> list[Any]:
                return [ray.put(bytes(1_000_000))]

        owner_class: Any = ray.remote(Owner)
        owner: Any = owner_class.options(num_cpus=0).remote()
        lost = ray.get(owner.put.remote())
        ray.kill(owner)
        _until_lost(lost[0])
        broken = SentWeights(version=2, parts=[*pool[-1].parts, lost[0]])
        with pytest.raises(EngineError, match="weights of version 2 did not arrive: "):
            asyncio.run(actor.load_weights(broken))
        assert len(given) == 1
