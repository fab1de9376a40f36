"""Weights on their way to servers: in memory that trainer and server share (`engine.weight_transfer: ipc`; on the CPU shared
memory, by the same calls as on a GPU, where CUDA's handles take the place of names), and broadcasts."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_env
import pytest
import torch
from torch.multiprocessing import reductions

from engines.conformance.subjects import MODEL, change, load_model, state_of
from engines.shared_reader import read
from support.fake_cuda import fake_cuda, on_device
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.config.engine_checks import refuse_engine
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import ServerLost
from turnwise.engines.remote.servers import Owner, Probe
from turnwise.engines.remote.shared_buffer import (
    Place,
    SharedBuffer,
    buffer_size,
    check_part,
    checked_values,
    checksum_of_values,
    open_buffer,
    parts_of,
)
from turnwise.engines.remote.weights import (
    CannotShare,
    GroupAddress,
    Sending,
    SharedCopies,
    TrainerGroup,
    TrainerGroups,
    WeightFiles,
    WeightUpdate,
)
from turnwise.engines.sglang import loader
from turnwise.engines.sglang.weights import share
from turnwise.engines.vllm import worker
from turnwise.engines.vllm.api import WeightSender
from turnwise.engines.vllm.worker import WeightReceiver
from turnwise.errors import ConfigError, EngineError
from turnwise.models.loading import token_logprobs
from turnwise.options.schema import Config
from turnwise.types import Request, Sampling

# Parts and checksums


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 3, generator=generator)
    return {
        "a": torch.randn(40, 3, generator=generator),
        "b": torch.randn(5, generator=generator).to(torch.bfloat16),
        "ids": torch.arange(3),
        "empty": torch.zeros(0, 4),
        "slice": whole[1:],  # begins in the middle of its memory
        "turned": whole.T,
    }


def test_weights_are_divided_into_parts_of_a_bounded_size() -> None:
    given = weights()
    parts = parts_of(given, dict.fromkeys(given, 0), most=100)
    assert [[place.name for place in part] for part in parts] == [["a"], ["b", "ids", "empty"], ["slice"], ["turned"]]
    assert buffer_size(parts) == 480  # `a` is larger than a part
    assert [(place.start, place.size) for place in parts[1]] == [(0, 10), (16, 24), (48, 0)]


def test_any_change_of_a_value_changes_the_checksum() -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    seen = {int(checksum_of_values(tensor))}
    for index in (0, 1, 500, 999):
        for bit in (0, 15, 31):
            changed = tensor.clone()
            changed[index] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            seen.add(int(checksum_of_values(changed)))
    seen.add(int(checksum_of_values(tensor.flip(0))))
    seen.add(int(checksum_of_values(~tensor)))
    seen.add(int(checksum_of_values(tensor[:-1])))
    assert len(seen) == 1 + 12 + 3


def test_the_checksum_is_that_of_the_formula() -> None:
    """Written out with Python's numbers, for a tensor whose bytes are no multiple of 8."""
    tensor = torch.randn(11, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    data = tensor.view(torch.uint8).numpy().tobytes()
    golden, total = 0x9E3779B97F4A7C15, 0
    for place, start in enumerate(range(0, len(data), 8)):
        group = int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little")
        mixed = group ^ (group >> 29) if start + 8 <= len(data) else group
        total += mixed * (2 * place + 1) * golden
    assert int(checksum_of_values(tensor)) % 2**64 == total % 2**64


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    given = weights()
    checked_values(given)
    given["a"][7, 1] = value
    with pytest.raises(ValueError, match="the weight a has values that are not finite"):
        checked_values(given)
    with pytest.raises(EngineError, match="the weight a"):
        SharedCopies().write(1, given)


# The buffer between two processes


@pytest.mark.slow
def test_another_process_reads_a_part_and_finds_a_wrong_value() -> None:
    given = weights()
    (part,) = parts_of(given, checked_values(given))
    buffer = SharedBuffer(buffer_size([part]), "cpu")
    context = multiprocessing.get_context("spawn")
    filled, answer = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=read, args=(buffer.handle(), [asdict(place) for place in part], filled, answer))
    process.start()
    buffer.fill(part, given)
    filled.put(True)
    assert answer.get() == {name: tensor.tolist() for name, tensor in given.items()}
    part[0].of(buffer._bytes)[3, 1] += 1
    filled.put(True)
    assert answer.get().startswith("the checksum of the weight a is ")
    filled.put(False)
    process.join()
    assert process.exitcode == 0


UUID = "GPU-1234"


@pytest.fixture
def cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """CUDA's calls on the fake device: memory that one process exports and another one opens is kept by its handle."""
    exported: dict[bytes, torch.Tensor] = {}
    opened: dict[str, Any] = {}

    def export(tensor: Any) -> Any:
        handle = f"handle {len(exported)}".encode()
        exported[handle] = tensor
        arguments = (torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset(), torch.storage.TypedStorage)
        more = (tensor.dtype, 1, handle, tensor.nbytes, 0, False, b"counter", 5, b"event", True)
        return reductions.rebuild_cuda_tensor, (*arguments, *more)

    def rebuild(*arguments: Any) -> Any:
        opened["device"], opened["rest"] = arguments[6], arguments[8:]
        return exported[arguments[7]]

    rebuild.__module__, rebuild.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"
    monkeypatch.setattr(reductions, "reduce_tensor", export)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    names = {0: "GPU-0", 1: UUID, 2: "GPU-2"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=names[index]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with fake_cuda() as traffic:
        yield opened
    assert not traffic.mixed


def test_a_buffer_on_a_gpu_is_opened_by_the_name_of_the_gpu(
    cuda_ipc: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has another number in the server, which sees fewer."""
    given = {name: on_device(tensor) for name, tensor in weights().items()}
    (part,) = parts_of(given, checked_values(given))
    buffer = SharedBuffer(buffer_size([part]), "cuda")
    buffer.fill(part, given)
    handle = buffer.handle()
    assert handle["gpu"] == UUID
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUID))
    tensor = open_buffer(handle)
    assert cuda_ipc["device"] == 0
    assert cuda_ipc["rest"] == (buffer_size([part]), 0, False, b"counter", 5, b"event", True)
    check_part(part, {place.name: place.of(tensor) for place in part})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-2"))
    with pytest.raises(ValueError, match=f"the weights are on the GPU {UUID}, and this process sees GPU-2"):
        open_buffer(handle)
    freed: list[str] = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: freed.append(name))
    buffer.close()
    assert freed == ["ipc_collect", "empty_cache"]


@pytest.mark.parametrize("lost", [False, True])
def test_the_memory_of_a_reader_that_was_killed_is_given_back(
    cuda_ipc: dict[str, Any], monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """torch frees shared memory when each handle's counter is 0, which its reader decreases: once for each handle and pickle."""
    given = {"a": on_device(torch.ones(4)), "b": on_device(torch.ones(2))}
    (part,) = parts_of(given, checked_values(given))
    buffer = SharedBuffer(buffer_size([part]), "cuda")
    buffer.fill(part, given)
    buffer.handle()
    buffer.pickled(part, {})
    events: list[Any] = []

    def released(name: bytes, place: int, *, device: int | None) -> None:
        assert buffer._bytes is not None
        events.append((name, place))

    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", released)
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: events.append(name))
    buffer.close(lost=lost)
    assert events == [*[(b"counter", 5)] * (3 * lost), "ipc_collect", "empty_cache"]


def test_a_reader_that_had_counted_itself_out_before_it_was_lost_keeps_no_memory(
    cuda_ipc: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"a": on_device(torch.ones(4))}
    (part,) = parts_of(given, checked_values(given))
    buffer = SharedBuffer(buffer_size([part]), "cuda")
    buffer.fill(part, given)
    buffer._counters = [(b"counters", place) for place in (4, 5, 6)]
    counters = dict.fromkeys((3, 4, 5, 6), 1)  # as torch makes them, one for each handle
    counters[5] -= 1  # by its reader

    def released(name: bytes, place: int, *, device: int | None) -> None:
        counters[place] -= 1

    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", released)
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for _ in range(2):
        buffer.close(lost=True)
        assert counters == {3: 1, 4: 0, 5: -1, 6: 0}  # torch keeps what is above 0


def test_a_pickle_for_sglang_names_the_gpu(cuda_ipc: dict[str, Any]) -> None:
    """SGLang's scheduler finds its own number of the GPU by the name. Nothing in the pickle is a value of a weight."""
    given = {"a": on_device(torch.full((300,), 7.0))}
    (part,) = parts_of(given, checked_values(given))
    buffer = SharedBuffer(buffer_size([part]), "cuda")
    buffer.fill(part, given)
    pickled = buffer.pickled(part, {})
    assert UUID.encode() in pickled
    assert len(pickled) < 700


@pytest.mark.parametrize("do_load", [0, 1])
def test_sglang_loads_what_was_checked(do_load: int) -> None:
    given = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    checksums = checked_values(given)
    loaded: list[Any] = []
    model = SimpleNamespace(load_weights=loaded.extend)
    expected = torch.tensor([do_load, *checksums.values()])
    loader.load(model, [*given.items(), (loader.EXPECTED, expected)])
    assert [name for name, _ in loaded] == (["a", "b"] if do_load else [])
    expected[2] += 1
    with pytest.raises(ValueError, match="the checksum of the weight b is "):
        loader.load(model, [*given.items(), (loader.EXPECTED, expected)])
    assert len(loaded) == 2 * do_load


# vLLM's workers


class Worker(WeightReceiver):
    """A worker whose model is a dictionary."""

    def __init__(self) -> None:
        self.rank = 0
        self.model: dict[str, torch.Tensor] = {}
        self.turnwise_names = {name: list(tensor.shape) for name, tensor in weights().items()}
        self.loads = 0

    def _turnwise_load_part(self, tensors: dict[str, Any], *, last: bool) -> None:
        self.turnwise_loaded = self.turnwise_loaded or []
        self.loads += 1
        self.model |= tensors


def send(worker: Worker, update: WeightUpdate, damage: str | None = None, *, claim: bool = True) -> None:
    """Send an update to a worker. `damage`: a value of this weight is wrong in the buffer."""

    async def call(method: str, arguments: Any) -> list[dict[str, Any]]:
        if method == "turnwise_part" and damage in [place["name"] for place in arguments["places"]]:
            place = next(Place(**place) for place in arguments["places"] if place["name"] == damage)
            place.of(worker.turnwise_buffer).flatten()[0] += 1
        return [getattr(worker, method)(**arguments)]

    sender = WeightSender("me", 9.0, Sending(shared=True))

    async def main() -> None:
        if claim:
            await sender.claim("server", call)
        await sender.send("server", update, call)

    asyncio.run(main())


def test_a_worker_loads_all_parts_after_it_has_checked_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_of, "__defaults__", (100,))
    given, worker = weights(), Worker()
    update = SharedCopies().write(1, given)
    send(worker, update)
    assert worker.loads == 4
    assert worker.model.keys() == given.keys()
    assert all(torch.equal(worker.model[name], tensor) for name, tensor in given.items())
    assert worker.turnwise_buffer is None
    # the last part is damaged, and the first was not loaded
    given["a"] = given["a"] + 1
    with pytest.raises(EngineError, match="the checksum of the weight turned"):
        send(worker, SharedCopies().write(2, given), damage="turned")
    assert worker.loads == 4
    assert worker.turnwise_buffer is None
    # from the copy, as after a restart: the trainer has changed its own weights
    update.live.clear()
    send(worker, update)
    assert torch.equal(worker.model["a"], weights()["a"])
    with pytest.raises(EngineError, match="1 of the weights have another shape: b"):
        send(worker, SharedCopies().write(3, {**given, "b": torch.zeros(6)}))


def test_a_worker_with_some_weights_of_an_update_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would mix them with the weights of the way back, and sample with that."""
    monkeypatch.setattr(parts_of, "__defaults__", (100,))
    worker, fill, fills = Worker(), SharedBuffer.fill, list[Any]()

    def failing(self: SharedBuffer, part: Sequence[Place], tensors: Any) -> None:
        fills.append(part)
        if len(fills) == 6:  # four parts are checked, and one is loaded
            raise RuntimeError("CUDA error: unspecified launch failure")
        fill(self, part, tensors)

    update = SharedCopies().write(1, weights())
    monkeypatch.setattr(SharedBuffer, "fill", failing)
    with pytest.raises(
        EngineError, match=r"could not be shared with server: CUDA error.*weight_transfer=files"
    ) as raised:
        send(worker, update)
    assert not isinstance(raised.value, ServerLost)
    assert worker.loads == 1
    with pytest.raises(ServerLost, match="the model has only some weights of an update"):
        send(worker, update)
    assert worker.loads == 1


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_without_memory_for_the_buffer_the_error_says_what_to_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update = SharedCopies().write(1, weights())

    def allocate(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB")

    posted: list[str] = []

    async def post(path: str, body: Any) -> Any:
        posted.append(path)
        return {"success": True}

    server: Any = SimpleNamespace(url="server", post=post)
    monkeypatch.setattr(torch, "empty", allocate)

    def publish() -> None:
        if name == "vllm":
            send(Worker(), update, claim=False)
        else:
            asyncio.run(share(server, update, device="cpu", workers=1, flush_cache=True))

    with pytest.raises(
        EngineError, match=r"could not be shared with server: CUDA out of.*engine.weight_transfer=files"
    ):
        publish()
    assert posted == []
    with pytest.raises(EngineError, match=r"weights of version 2 could not be copied.*engine.weight_transfer=files"):
        SharedCopies().write(2, weights())


def test_the_copy_is_complete_on_the_gpu_of_the_weights(
    cuda_ipc: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes it has another current GPU with `model.device: cuda:1`."""
    waited, pinned, empty = list[Any](), list[bool](), torch.empty

    def allocate(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    given = {"a": on_device(torch.arange(3.0)), "b": on_device(torch.arange(4.0))}
    SharedCopies().write(1, given)
    assert waited == [given["a"].device]
    assert pinned == [True, True]


@pytest.mark.parametrize("expandable", [True, False])
def test_the_buffer_is_no_expandable_segment(expandable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which another process can only open if it may take over files of this one. Other settings stay."""
    settings = ["max_split_size_mb:64,expandable_segments:True" if expandable else "max_split_size_mb:64"]
    first, during, empty = settings[0], list[str](), torch.empty
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: during.append(settings[-1]) or empty(*size, **how))
    SharedBuffer(8, "cpu")
    assert during == ["max_split_size_mb:64,expandable_segments:False" if expandable else first]
    assert settings[-1] == first


def test_a_worker_that_cannot_open_the_memory_gets_files() -> None:
    worker = Worker()
    worker.turnwise_open = lambda owner, lease, handles: {"error": "invalid device context"}  # type: ignore[method-assign]
    with pytest.raises(CannotShare, match=r"cannot read weights from the trainer's memory.*invalid device context"):
        send(worker, SharedCopies().write(1, weights()))


# Which way is chosen


def transfer_of(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], *, visible: str = "0,1", **sections: Any
) -> RemoteEngine:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    recipe = {
        "model": {"path": str(MODEL), "device": "cuda"},
        "data": {"train": str(MODEL.parent / "train.jsonl")},
        "engine": {"name": "vllm", **engine},
        **sections,
    }
    config = Config.model_validate(recipe)
    refuse_engine(config)
    made = assembly.engine(config, Renderer.from_pretrained(MODEL), object(), owner=Owner())
    assert isinstance(made, RemoteEngine)
    return made


@pytest.mark.parametrize(
    ("engine", "visible", "sections", "shared"),
    [
        ({}, "0", {}, True),
        ({"sleep": True}, "0,1", {}, True),
        ({"name": "sglang", "sleep": True}, "0,1", {}, True),
        ({}, "0,1", {}, False),  # another GPU
        ({"sleep": True, "tensor_parallel": 2}, "0,1", {}, False),
        ({"weight_folder": "w"}, "0", {}, False),
        ({"weight_transfer": "files"}, "0", {}, False),
        ({}, "0", {"model": {"path": str(MODEL), "device": "cuda", "lora": {"rank": 4}}}, False),
        ({}, "", {}, False),
        ({"url": "http://127.0.0.1:1"}, "0", {}, False),
        ({"weight_transfer": "ipc", "tensor_parallel": 2}, "0,1", {}, True),
    ],
)
def test_memory_is_shared_with_a_server_on_the_trainers_gpu(
    engine: dict[str, Any], visible: str, sections: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = transfer_of(monkeypatch, engine, visible=visible, **sections)
    assert isinstance(made._files, SharedCopies if shared else WeightFiles)
    if shared:
        groups = (made._api._sender if engine.get("name") != "sglang" else made._api)._groups  # type: ignore[attr-defined]
        assert groups.sending == Sending("nccl", "cuda:0", shared=True)
        assert isinstance(made._files, SharedCopies)
        assert (made._files.instead is None) == ("weight_transfer" in engine)


@pytest.mark.parametrize(
    ("engine", "sections", "message"),
    [
        ({"devices": [1]}, {}, "server 0 uses the GPUs 1 and does not see GPU 0, on which the model is trained"),
        ({"url": "http://127.0.0.1:1"}, {}, "needs servers that the trainer's process starts"),
        ({"weight_folder": "w"}, {}, "engine.weight_folder has no effect with engine.weight_transfer=ipc"),
    ],
)
def test_memory_that_no_server_sees_is_refused(
    engine: dict[str, Any], sections: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        transfer_of(monkeypatch, {"weight_transfer": "ipc", **engine}, **sections)


# Real servers on the CPU


@pytest.mark.engines
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_real_server_reads_weights_in_shared_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several parts; one with a wrong value changes nothing, although it comes last."""
    monkeypatch.setattr(parts_of, "__defaults__", (300_000,))
    model = load_model()
    recipe = {
        "model": {"path": str(MODEL), "device": "cpu"},
        "data": {"train": str(MODEL.parent / "train.jsonl")},
        "engine": {
            "name": name,
            "python": str(engine_env.python(name)),
            "memory_gb": 0.1,
            "weight_transfer": "ipc",
            "arguments": ["--enforce-eager"] if name == "vllm" else [],
        },
        "max_concurrent": 8,
        "output": str(tmp_path / "run"),
    }
    engine = assembly.engine(Config.model_validate(recipe), Renderer.from_pretrained(MODEL), model)
    assert isinstance(engine, RemoteEngine)
    fill = SharedBuffer.fill

    def publish(version: int) -> Any:
        probe = Probe(prompt=[5, 17, 300], tokens=24, logprobs=partial(token_logprobs, model), tolerance=1e-4)
        return engine.update(version, state_of(model), probe)

    def damaged(self: SharedBuffer, part: Sequence[Place], tensors: Any) -> None:
        fill(self, part, tensors)
        if part[-1].name == list(tensors)[-1]:
            part[-1].of(self._bytes).flatten()[0] += 1
            monkeypatch.setattr(SharedBuffer, "fill", fill)  # for the way back

    async def main() -> None:
        try:
            await publish(1)
            for version in (2, 3):
                change(model, version)
                await publish(version)
            monkeypatch.setattr(SharedBuffer, "fill", damaged)
            change(model, 4)
            if name == "vllm":
                with pytest.raises(EngineError, match="the engine goes on with version 3"):
                    await publish(4)
            else:  # its scheduler has no answer but its end: it is started again, gets version 3, and then version 4
                await publish(4)
                assert engine._replicas.all[0].process is not None
                assert "where it was sent" in (tmp_path / "run" / "engine" / "sglang-0.log").read_text()
            change(model, 5)
            await publish(5)
            request = Request(conversation="c", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=9), seed=1)
            completion = await engine.generate(request)
            assert set(completion.versions) == {5}
        finally:
            await engine.close()

    asyncio.run(main())


# Broadcasts of weights: the order of the calls of trainer and workers, NCCL's versions, and what a worker keeps on
# its GPU


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
