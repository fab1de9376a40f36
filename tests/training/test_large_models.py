"""What training does for large models: memory that is kept during passes, and torch threads from the first step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.models.allocator import gradients_first
from turnwise.models.cpu import TorchThreads
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.update import StopFlag
from turnwise.types import Sampling


def learner_with_unused_parameter(threads: int) -> LocalLearner:
    model = tiny_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return LocalLearner(model, sampling=Sampling(), threads=threads)


def gradients(learner: LocalLearner) -> dict[str, torch.Tensor | None]:
    learner.accumulate(pack(group(), micro_batch_tokens=1).micro_batches, lambda: None, StopFlag())
    return {name: parameter.grad for name, parameter in learner.model.named_parameters()}


# threads=0: several micro-batches in parallel, whose gradients are not accumulated by the backward pass
@pytest.mark.parametrize("threads", [1, 0])
def test_gradients_are_the_same_if_they_are_allocated_first(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = gradients(learner_with_unused_parameter(threads))
    learner = learner_with_unused_parameter(threads)
    assert learner._gradients.parallel == (1 if threads else 2)
    learner._gradients._around = gradients_first
    for _ in range(2):  # the second time, the gradients of the first exist
        actual = gradients(learner)
        assert actual["unused"] is None  # a zero gradient would let AdamW decay it
        assert expected["unused"] is None
        for name, gradient in actual.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("large", "first"), [(True, 3), (False, 1)])
def test_the_first_steps_of_a_large_model_use_all_threads(large: bool, first: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads = TorchThreads(0, large=large)
        with threads.during("learn", 100):
            assert torch.get_num_threads() == first
        with TorchThreads(2, large=large).during("learn", 100):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("large", "other_at"), [(True, 32), (False, 2)])
def test_a_large_model_tries_the_other_number_of_threads_later(large: bool, other_at: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads, used = TorchThreads(0, large=large), []
        for _ in range(other_at + 1):
            with threads.during("learn", 100):
                used.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    first, other = (3, 1) if large else (1, 3)
    assert used == [first] * other_at + [other]


FAULTS = """
import resource, torch
from turnwise.models import allocator
torch.set_num_threads(1)
allocator.{how}()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**21)  # 8 MB, or 2,048 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
@pytest.mark.parametrize(
    ("how", "least", "most"), [("keep_freed_blocks", 0, 2000), ("return_freed_blocks", 20_000, 60_000)]
)
def test_freed_memory_is_used_again_or_returned(how: str, least: int, most: int) -> None:
    program = [sys.executable, "-c", FAULTS.format(how=how)]
    faults = int(subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert least <= faults <= most


PLACES = """
import ctypes, torch
from turnwise.models import allocator

class Figures(ctypes.Structure):
    _fields_ = [(f"figure_{n}", ctypes.c_size_t) for n in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Figures

def mapped():  # MB that are not part of the memory that is kept
    return libc.mallinfo2().figure_4 >> 20

def resident():  # bytes: the difference of two rounded numbers can be one too large
    return int(open("/proc/self/statm").read().split()[1]) * 4096

allocator.keep_freed_blocks()
kept, before = torch.ones(2**21), mapped()
with allocator.long_lived():
    apart = torch.ones(2**21)
print(mapped() - before)
again = torch.ones(2**21)
print(mapped() - before)
blocks = [torch.ones(2**21) for _ in range(40)]
last = torch.ones(2**16)  # behind the blocks: without it, they would be at the end of the memory
before = resident()
del blocks
print(before - resident() >> 20)
allocator.trim_kept()
print(before - resident() >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
def test_long_lived_blocks_are_apart_from_those_that_are_kept() -> None:
    program = [sys.executable, "-c", PLACES]
    printed = subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout
    apart, again, freed, trimmed = map(int, printed.split())
    assert (apart, again) == (8, 8)
    assert freed < 40 < 300 < trimmed <= 320
