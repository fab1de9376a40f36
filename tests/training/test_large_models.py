"""What training does for large models: memory that is kept during passes, and torch threads from the first step."""

from __future__ import annotations

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.models import allocator
from turnwise.models.torch_threads import TorchThreads
from turnwise.training.background import StopFlag
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.types import Sampling


def learner_with_unused_parameter() -> LocalLearner:
    model = tiny_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return LocalLearner(model, sampling=Sampling(), threads=1)


def gradients(learner: LocalLearner) -> dict[str, torch.Tensor | None]:
    learner.accumulate(pack(group(), micro_batch_tokens=1).micro_batches, lambda: None, StopFlag())
    return {name: parameter.grad for name, parameter in learner.model.named_parameters()}


def test_gradients_are_the_same_while_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients(learner_with_unused_parameter())
    learner = learner_with_unused_parameter()
    monkeypatch.setattr(allocator, "_returns", True)
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
