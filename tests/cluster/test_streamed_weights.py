"""Weights of several ranks on their way: to servers and rollout workers, and from parts on disk into the files of a model."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers import AutoModelForCausalLM

from cluster.ray_clusters import cluster
from support.mixtures import mixture
from turnwise.cli import main
from turnwise.engines.remote.weights import WeightCopies
from turnwise.errors import EngineError, RunError
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.models.loading import ModelSource, conversion_names, load_model
from turnwise.models.streamed import StreamedWeights
from turnwise.options.engines import ClusterSection, WorkersSection
from turnwise.ray_workers import ray_api, rollouts
from turnwise.ray_workers.rollout_worker import SentWeights, parts_of, unpack_tensors
from turnwise.record.run_directory import is_being_written
from turnwise.training.checkpoint import Checkpoints
from turnwise.training.sharded import consolidation
from turnwise.training.sharded.consolidation import complete_weights
from turnwise.training.sharded.parts import load_in_parts
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


# The weights that ranks have written in parts become the files that `save_pretrained` writes, a layer at a time


def checkpoint_in_parts(run: Path, model: Any, *, without: str | None = None) -> Path:
    """A checkpoint of `model` as several ranks write it; `without` a weight."""
    parts = {f"model/{name}": tensor for name, tensor in model.named_parameters() if name != without}
    about = {"parts": "../shards", "conversions": conversion_names(model), "prefixes": {}}

    def save_model(folder: Path) -> None:
        model.save_pretrained(folder, state_dict={})
        (folder / WEIGHTS_IN_PARTS).write_text(json.dumps(about))

    def save_shards(folder: Path) -> dict[str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp_save.save(parts, storage_writer=FileSystemWriter(folder), no_dist=True)
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}

    class NoTokenizer:
        def save_pretrained(self, folder: Path) -> None:
            pass

    checkpoints = Checkpoints(run)
    pending = checkpoints.write(3, save_model=save_model, tokenizer=NoTokenizer(), state={}, save_shards=save_shards)
    checkpoints.finish(pending, {})
    return checkpoints.model_of(3).parent


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
def test_weights_in_parts_become_the_files_that_one_process_writes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(kind).save_pretrained(tmp_path / "model")  # a matrix for each expert; in memory they are stacked
    model = load_model(ModelSource(path=str(tmp_path / "model"), device="cpu"))
    folder = checkpoint_in_parts(tmp_path / "run", model)
    seen: list[int] = []
    read = consolidation.read_parts

    def noted(tensors: dict[str, torch.Tensor], parts: Path, *, alone: bool) -> None:
        seen.append(sum(tensor.numel() for tensor in tensors.values()))
        read(tensors, parts, alone=alone)

    monkeypatch.setattr(consolidation, "read_parts", noted)
    monkeypatch.setattr(consolidation, "FILE_BYTES", 200_000)
    complete_weights(folder)
    layer = sum(parameter.numel() for parameter in model.model.layers[1].parameters())
    assert max(seen) <= max(layer, sum(p.numel() for p in model.model.layers[0].parameters()))
    assert sum(seen) == sum(parameter.numel() for parameter in model.parameters())
    files = sorted(file.name for file in (folder / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    written = {name: tensor for file in files for name, tensor in load_file(folder / "model" / file).items()}
    expected = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    index = json.loads((folder / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    again = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    saved = Checkpoints(tmp_path / "run").find()  # compares the checksums
    assert saved is not None
    assert saved.folder == folder.resolve()
    names = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert {f"model/{file}" for file in files} <= names
    assert f"model/{WEIGHTS_IN_PARTS}" not in names


def test_an_engine_gets_its_model_from_parts(tmp_path: Path) -> None:
    mixture("qwen3_moe").save_pretrained(tmp_path / "model")
    source = ModelSource(path=str(tmp_path / "model"), device="cpu")
    model = load_model(source)
    folder = checkpoint_in_parts(tmp_path / "run", model)
    copied = load_in_parts(source.model_copy(update={"path": str(folder / "model")}))
    assert not list((folder / "model").glob("*.safetensors"))
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(copied(prompt).logits, model(prompt).logits)


def test_a_process_that_is_killed_leaves_a_checkpoint_that_becomes_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixture("qwen3_moe")
    folder = checkpoint_in_parts(tmp_path / "run", model)
    with monkeypatch.context() as patched:
        patched.setattr("turnwise.training.sharded.consolidation.replace_sums", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            complete_weights(folder)
    assert Checkpoints(tmp_path / "run").find() is not None
    assert (folder / "model" / WEIGHTS_IN_PARTS).is_file()
    complete_weights(folder)
    assert not (folder / "model" / WEIGHTS_IN_PARTS).is_file()
    again = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_parts_that_lack_a_weight_are_refused(tmp_path: Path) -> None:
    folder = checkpoint_in_parts(tmp_path, mixture("qwen3_moe"), without="model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(RunError, match=r"shards has no model\.layers\.1\.self_attn\.q_proj\.weight"):
        complete_weights(folder)
    with pytest.raises(RunError, match=r"cannot be read by other processes: `turnwise merge .*/model` writes them"):
        load_in_parts(ModelSource(path=str(folder / "model"), device="cpu"))
    assert Checkpoints(tmp_path).find() is not None


def test_merge_writes_the_model_there_or_into_another_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    model = mixture("qwen3_moe")
    folder = checkpoint_in_parts(run, model)
    assert main(["push", str(run), "--to", "a/b", "--dry-run"]) == 1
    assert f"`turnwise merge {run / 'checkpoint'}`" in capsys.readouterr().err
    assert main(["merge", str(run), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 1
    assert "--dtype is for an adapter" in capsys.readouterr().err
    assert main(["merge", str(run), "--out", str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert (folder / "model" / WEIGHTS_IN_PARTS).is_file()
    assert main(["merge", str(run)]) == 0
    for place in (tmp_path / "out", run / "checkpoint"):
        again = AutoModelForCausalLM.from_pretrained(place).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    assert main(["merge", str(run)]) == 1
    assert "there is no adapter" in capsys.readouterr().err


def test_merge_into_a_full_disk_says_so_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_in_parts(tmp_path / "run", mixture("qwen3_moe"))

    def full(tensors: dict[str, torch.Tensor], path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    words = ["merge", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(consolidation, "save_file", full)
        assert main(words) == 1
        assert f"could not be written to {tmp_path / 'out'}: Error while serializing" in capsys.readouterr().err
        assert main(["merge", str(tmp_path / "run")]) == 1
        assert "the checkpoint is what it was" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(words) == 0


def test_merge_in_place_and_a_run_that_is_resumed_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    checkpoint_in_parts(run, mixture("qwen3_moe"))
    (run / "run.json").write_text("{}")
    script = "import sys, pathlib; from turnwise.record.run_directory import RunLock; "
    script += f"lock = RunLock(pathlib.Path({str(run)!r})); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert main(["merge", str(run)]) == 1
        assert f"a process is writing the run {run}: name another directory with --out" in capsys.readouterr().err
        assert main(["merge", str(run), "--out", str(tmp_path / "out")]) == 0  # changes nothing of the run
        other.communicate()
    seen: list[bool] = []
    complete = consolidation.complete_weights

    def noted(folder: Path) -> None:
        seen.append(is_being_written(run))
        complete(folder)

    monkeypatch.setattr(consolidation, "complete_weights", noted)
    assert main(["merge", str(run)]) == 0
    assert seen == [True]
    assert not is_being_written(run)
