"""When memory runs out in a pass, the same update is computed in smaller micro-batches, and the run goes on with them.

The error is torch's own, raised in a pass over more tokens than the test allows, as CUDA does.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from support.training import save_short_recipe, train_silently
from training.test_batch import group
from turnwise.config.recipe import load
from turnwise.errors import RunError
from turnwise.options.algorithm import CorrectionSection, PpoClip
from turnwise.runs.training_run import TrainingRun
from turnwise.train import assemble
from turnwise.training.batch import Batch, MicroBatch, pack, pack_again
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.update import StopFlag, prepare
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets
from turnwise.types import Sampling

ROW = 19
"""The tokens of `group()` in one flat row with shared prompts."""


def learner(**options: Any) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip(**options)), threads=1)


def allow(model: Any, most: int, *, where: str = "forward", gradients: bool = True) -> list[int]:
    """Raise torch's error in passes of the model over more than `most` tokens, in the forward pass or when the gradient of its
    head is known. Returns the list of the sizes of all passes."""
    sizes: list[int] = []

    def refuse() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def before(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if torch.is_grad_enabled() != gradients:
            return
        sizes.append(options["input_ids"].numel())
        if sizes[-1] > most and where == "forward":
            refuse()

    def after(module: Any, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled() and sizes[-1] > most and where == "backward":
            output.last_hidden_state.register_hook(lambda gradient: refuse())

    model.model.register_forward_pre_hook(before, with_kwargs=True)
    model.model.register_forward_hook(after)
    return sizes


def flat(one: LocalLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()])


def update(one: LocalLearner, *batches: Batch, **options: Any) -> Any:
    return asyncio.run(one.update(batches, lr=1e-2, **options))


def sizes_of(micro_batches: list[MicroBatch[Any]]) -> list[int]:
    return [micro.token_ids_BL.numel() for micro in micro_batches]


def test_the_row_of_the_tests_has_the_tokens_that_they_say() -> None:
    assert sizes_of(pack(group()).micro_batches) == [ROW]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_update_is_that_of_micro_batches_that_were_smaller_from_the_start(
    where: str, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole = pack(group(), share_prompts=shared)
    (size,) = sizes_of(whole.micro_batches)
    interrupted, small = learner(), learner()
    sizes = allow(interrupted.model, size - 1, where=where)
    with caplog.at_level(logging.WARNING):
        stats = update(interrupted, whole)
    packed = pack(group(), micro_batch_tokens=size // 2, share_prompts=shared)
    expected = update(small, packed)
    assert torch.equal(flat(interrupted), flat(small))
    assert sizes == [size, *sizes_of(packed.micro_batches)]
    assert len(packed.micro_batches) > 1
    assert (stats.out_of_memory, expected.out_of_memory) == (1, 0)
    assert (stats.loss, stats.grad_norm, stats.tokens) == (expected.loss, expected.grad_norm, expected.tokens)
    assert stats.memory_metrics == {"micro_batches/out_of_memory": 1}
    assert f"in a micro-batch of {size} tokens" in caplog.text
    assert f"at most {size // 2} tokens" in caplog.text
    assert "Tried to allocate 2.00 GiB" in caplog.text


def test_the_bound_is_halved_until_it_fits_and_holds_for_later_updates() -> None:
    one = learner()
    assert one.requirements.tokens(None) == one.requirements.micro_batch_tokens
    sizes = allow(one.model, 10)
    assert update(one, pack(group(), share_prompts=False)).out_of_memory == 2  # 40 tokens: 20: 10
    assert one.requirements.most_tokens == 10
    assert (one.requirements.tokens(None), one.requirements.tokens(4096), one.requirements.tokens(8)) == (10, 10, 8)
    sizes.clear()
    assert update(one, pack(group(), share_prompts=False)).out_of_memory == 0
    assert max(sizes) == 10


def test_later_steps_and_epochs_of_an_update_are_packed_again_with_what_was_computed_before() -> None:
    first, second = group()[1:2], group()[2:]
    interrupted, small = learner(), learner()
    whole = pack(second, share_prompts=False)
    (size,) = sizes_of(whole.micro_batches)
    assert max(sizes_of(pack(first).micro_batches)) < size
    allow(interrupted.model, size - 1)
    stats = update(interrupted, pack(first), whole, epochs=2)
    update(small, pack(first), pack(second, share_prompts=False, micro_batch_tokens=size // 2), epochs=2)
    assert stats.out_of_memory == 1
    assert torch.equal(flat(interrupted), flat(small))


def test_targets_that_rollout_correction_left_out_stay_out() -> None:
    options = CorrectionSection(action="reject", low=0.006, high=None)
    one = LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip(), options), threads=1)
    whole = prepare(one, pack(group()), StopFlag()).batch.micro_batches
    small = prepare(one, pack(group(), micro_batch_tokens=ROW // 2), StopFlag()).batch.micro_batches
    again = pack_again(whole, ROW // 2)
    kept = sum(len(micro.targets.token_N) for micro in whole)
    assert 0 < kept < sum(len(micro.targets.token_N) for micro in pack(group()).micro_batches)
    assert len(again) == len(small) > 1
    for mine, other in zip(again, small, strict=True):
        assert torch.equal(mine.token_ids_BL, other.token_ids_BL)
        assert torch.equal(mine.prediction_N, other.prediction_N)
        assert torch.equal(mine.targets.token_N, other.targets.token_N)
        torch.testing.assert_close(mine.targets.behaviour_logprob_N, other.targets.behaviour_logprob_N)
        torch.testing.assert_close(mine.targets.weight_N, other.targets.weight_N)


def test_one_sequence_that_does_not_fit_is_an_error_with_what_to_do() -> None:
    one = learner()
    before = flat(one)
    allow(one.model, 5)
    with pytest.raises(
        RunError, match=r"one sequence of 10 tokens.*\n.*model\.gradient_checkpointing=true.*resume=auto"
    ):
        update(one, pack(group()))
    assert torch.equal(flat(one), before)


def test_a_checkpoint_has_the_bound_unless_the_card_is_another() -> None:
    one, same, other = learner(), learner(), learner()
    assert "micro_batch_bound" not in one.state()
    allow(one.model, ROW - 1)
    update(one, pack(group()))
    state = one.state()
    same.load_state(state)
    assert same.requirements.most_tokens == one.requirements.most_tokens == 9
    other.load_state({**state, "micro_batch_bound": {"tokens": 9, "card": "NVIDIA T4 (14.6 GiB)"}})
    assert other.requirements.most_tokens is None


def test_passes_without_gradients_are_divided_too() -> None:
    limited, free = learner(), learner()
    batch = pack_states(group(), ValuePacking(level="token", micro_batch_tokens=1000))
    sizes = allow(limited.model, 10, gradients=False)
    numbers = asyncio.run(limited.logprobs(batch))
    assert len(sizes) > 2
    assert numbers == pytest.approx(asyncio.run(free.logprobs(batch)), abs=1e-5)
    failed, bound = limited.bound.exceeded, limited.requirements.most_tokens
    sizes.clear()
    assert asyncio.run(limited.logprobs(batch)) == numbers
    assert (limited.bound.exceeded, limited.requirements.most_tokens) == (failed, bound)  # no size fails twice
    assert max(sizes) <= 10


def test_a_critic_goes_on_with_smaller_micro_batches() -> None:
    trajectories = group()
    for trajectory in trajectories:
        trajectory.returns = [1.0] * len(trajectory.turns)
        trajectory.values = [0.0] * len(trajectory.turns)

    def packed(tokens: int) -> Any:
        return pack_value_targets(trajectories, ValuePacking(level="turn", micro_batch_tokens=tokens))

    def trained(tokens: int, prepare: Callable[[Any], object]) -> LocalCritic:
        model = tiny_model()
        prepare(model)
        critic = LocalCritic(model, threads=1)
        asyncio.run(critic.update([packed(tokens)], lr=1e-2))
        return critic

    (size,) = sizes_of(packed(1000).micro_batches)
    interrupted = trained(1000, lambda model: allow(model, size - 1))
    small = trained(size // 2, lambda model: None)
    assert interrupted.requirements.most_tokens == size // 2
    for mine, other in zip(interrupted._optimizer.parameters, small._optimizer.parameters, strict=True):
        assert torch.equal(mine, other)


def test_a_run_goes_on_says_so_in_its_metrics_and_resumes_with_the_bound(model: Path, tmp_path: Path) -> None:
    recipe = save_short_recipe(tmp_path, model)

    def trained(*options: str) -> tuple[TrainingRun, list[int]]:
        run = assemble(load(recipe, [f"output={tmp_path / 'run'}", *options])[0])
        sizes = allow(run.learner.model, 60)  # type: ignore[attr-defined]
        train_silently(run)
        return run, sizes

    run, _ = trained("train.steps=2", "checkpoint.every=1")
    most = run.learner.requirements.most_tokens
    assert most is not None
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["micro_batches/out_of_memory"] >= 1
    assert "micro_batches/out_of_memory" not in lines[1]
    resumed, sizes = trained("train.steps=3", "checkpoint.every=1", "resume=auto")
    assert resumed.learner.requirements.most_tokens == most
    assert max(sizes) <= 60
