"""Broadcasts of weights: the order of the calls of trainer and workers, NCCL's versions, and what a worker keeps on its GPU."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise.engines.remote.http import ServerLost
from turnwise.engines.remote.weights import GroupAddress, Sending, TrainerGroup, TrainerGroups
from turnwise.engines.vllm import worker
from turnwise.engines.vllm.worker import WeightReceiver
from turnwise.errors import EngineError

WHERE = GroupAddress(address="127.0.0.1", port=1, name="g", size=2, backend="gloo")
TENSORS = [torch.ones(3), torch.zeros(2, 2)]


class Done:
    def wait(self) -> None:
        pass


class Blocking:
    """A group as NCCL makes it: the first broadcast returns when the other member has begun to receive, and not before."""

    def __init__(self) -> None:
        self.receiving = threading.Event()
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
        if not self.receiving.wait(10):
            raise RuntimeError("the workers were not asked to receive")
        self.sent.append(tensor)
        return Done()


def test_workers_are_asked_to_receive_while_the_first_broadcast_waits_for_them() -> None:
    group = Blocking()

    async def receive() -> str:
        await asyncio.sleep(0)  # as a request does
        group.receiving.set()
        return "received"

    assert asyncio.run(TrainerGroup(group, WHERE).send(TENSORS, receive())) == "received"
    assert [tensor.tolist() for tensor in group.sent] == [tensor.tolist() for tensor in TENSORS]


def test_the_error_of_a_worker_is_reported_while_a_broadcast_waits() -> None:
    async def receive() -> str:
        raise EngineError("the worker is in no group")

    with pytest.raises(EngineError, match="in no group"):
        asyncio.run(TrainerGroup(Blocking(), WHERE).send(TENSORS, receive()))


def test_a_broadcast_that_fails_loses_the_server_although_its_answer_is_missing() -> None:
    class Broken:
        def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
            raise RuntimeError("NCCL error: remote process exited")

    async def main() -> None:
        groups = TrainerGroups(Sending())
        groups._groups["S"] = TrainerGroup(Broken(), WHERE)
        groups.drop = lambda server: None  # there is no group of torch
        await groups.send("S", TENSORS, asyncio.sleep(3600))

    with pytest.raises(ServerLost, match="S was lost during the broadcast of weights: NCCL error"):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_another_version_of_nccl_is_refused_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL answers with `invalid usage` otherwise, after the workers have joined."""
    monkeypatch.setattr("turnwise.engines.remote.weights.nccl_version", lambda: "2.29.7")
    where = GroupAddress(address="127.0.0.1", port=1, name="g", size=2, backend="nccl", nccl="2.30.7")
    error = WeightReceiver().turnwise_join("me", 9.0, asdict(where))["error"]
    assert "the server has NCCL 2.29.7, and the trainer 2.30.7" in error
    assert "engine.weight_transfer=files" in error


def test_a_worker_has_one_received_tensor_on_its_gpu_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and its KV cache fill the GPU; with tensor parallelism each worker would make room for the complete model."""
    made: list[tuple[str, Any]] = []
    empty = torch.empty

    def note(shape: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        made.append(("made", str(device)))
        return empty(shape, dtype=dtype)

    class Group:
        def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
            made.append(("received", tuple(tensor.shape)))
            tensor.fill_(len(made))
            return Done()

    monkeypatch.setattr(torch, "empty", note)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    received = worker._receive(Group(), [["a", "float32", [2]], ["b", "bfloat16", [3]]], "nccl")
    assert made == [("made", "cuda:1"), ("received", (2,)), ("made", "cuda:1"), ("received", (3,))]
    assert {name: tensor.tolist() for name, tensor in received.items()} == {"a": [2.0] * 2, "b": [4.0] * 3}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_found(value: float) -> None:
    good = {"empty": torch.ones(0), "ids": torch.ones(3, dtype=torch.int64), "a": torch.ones(100, dtype=torch.bfloat16)}
    worker._check_finite(good)
    good["a"][77] = value
    with pytest.raises(ValueError, match="the weight a has values that are not finite"):
        worker._check_finite(good)


def test_weights_are_replaced_inside_vllms_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """`reload_weights` of vLLM's worker sets it (v1/worker/gpu_worker.py); that of its model runner does not, and layers with
    kernels of their own ask for it."""
    inside: list[bool] = []

    @contextmanager
    def configuration() -> Any:
        inside.append(True)
        yield
        inside.pop()

    class Worker(WeightReceiver):
        model_runner = SimpleNamespace(
            reload_weights=lambda weights_iterator: list(weights_iterator) if inside else pytest.fail("outside"),
            get_model=lambda: torch.nn.Linear(1, 1),
        )

        def reload_weights(self, **options: Any) -> None:
            with configuration():
                self.model_runner.reload_weights(**options)

    for of_cpus in ("_pack_experts_again", "_pack_tied_output_layers"):
        monkeypatch.setattr(worker, of_cpus, lambda model: None)
    Worker()._turnwise_replace({"a": torch.ones(1)})
