"""For test_sharded.py, by programs.py: loads a model, and writes the peak of its memory and what it has read; on
several ranks also the memory that rank 0 needs to give weights to servers.

Arguments: a small model, which is loaded first, so that modules imported on first use and the buffers of the connections
between the ranks are not counted; the model; `complete` (one process) or `sharded` (this rank's part); the file of the result.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import transformers.modeling_utils

from turnwise.engines.remote.weights import WeightCopies, WeightFiles
from turnwise.models.loading import ModelSource, load_model
from turnwise.options.algorithm import OptimizationSection, PpoClip
from turnwise.options.engines import ClusterSection, FsdpSection, MeshSection
from turnwise.training.options import ShardOptions
from turnwise.training.sharded.commands import Finish, follow
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_learner import ShardedLearner
from turnwise.training.sharded.sharded_model import load_sharded
from turnwise.types import Sampling


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Counted:
    """A tensor of a file; counts what is read of it."""

    kilobytes = 0.0

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._part[index]
        Counted.kilobytes += found.nbytes / 2**10
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def counted(open_file: Any) -> Any:
    """`safetensors.safe_open` that counts."""

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._file = open_file(*args, **options)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *args: Any) -> None:
            pass

        def get_slice(self, name: str) -> Counted:
            return Counted(self._file.get_slice(name))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    return File


def load(path: str, ranks: Ranks | None) -> Any:
    options = ModelSource(path=str(path), device="cpu")
    return load_model(options) if ranks is None else load_sharded(options, ranks.mesh, FsdpSection())


def published(path: str, ranks: Ranks) -> int:
    """The most memory in kilobytes that rank 0 needs to give weights to servers, as files and as copies; 0 on the others."""
    if not ranks.leads:
        follow(ranks)
        return 0
    options = ShardOptions(
        model=ModelSource(path=path, device="cpu"),
        sampling=Sampling(),
        loss=PpoClip(),
        optimizer=OptimizationSection(),
        sharding=FsdpSection(),
        share_prompts="never",
    )
    learner = ShardedLearner(ranks, options)
    before = kilobytes("RssAnon")
    found: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            found.append(kilobytes("RssAnon") - before)

    thread = threading.Thread(target=watch)
    thread.start()
    files = WeightFiles(Path(path).parent)
    in_file = files.write(1, learner.weights())
    copies = WeightCopies().write(1, learner.weights())
    ended.set()
    thread.join()
    assert in_file.path is not None
    assert copies.tensors is not None
    written = safetensors.torch.load_file(in_file.path)
    expected = {
        name: tensor
        for file in Path(path).glob("*.safetensors")
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    for given in (written, copies.tensors):
        assert given.keys() == expected.keys()
        assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())
    files.close()
    learner.leader.run(Finish())
    return max(found)


def main() -> None:
    torch.set_num_threads(1)
    small, path, kind, out = sys.argv[1:]
    mesh = MeshSection.model_validate(json.loads(os.environ["MESH"]))
    ranks = Ranks(ClusterSection(mesh=mesh), device="cpu") if kind == "sharded" else None
    safetensors.safe_open = counted(safetensors.safe_open)
    transformers.modeling_utils.safe_open = safetensors.safe_open
    assert load(small, ranks)
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    Counted.kilobytes = 0
    model = load(path, ranks)
    assert model
    peak, read = kilobytes("VmHWM") - before, round(Counted.kilobytes)
    del model
    streamed = 0 if ranks is None else published(path, ranks)
    Path(f"{out}{os.environ.get('RANK', '0')}").write_text(json.dumps([peak, read, streamed]))
    if ranks is not None:
        ranks.close()
