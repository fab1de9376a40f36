"""The update from micro-batches: terms, sums, optimizer, critic; and smaller micro-batches when memory runs out."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import io
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import XGLMConfig, XGLMForCausalLM

from support.tiny import tiny_model
from support.training import save_short_recipe, train_silently
from training.test_batch import group
from turnwise.config.recipe import checked, load
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError, RunError
from turnwise.models.loading import ModelSource, load_model
from turnwise.models.transfer import Measured, copied
from turnwise.options.algorithm import CorrectionSection, OptimizationSection, OptimizerSection, PpoClip, Spo
from turnwise.rewards.credit.tracker import ValueTracker
from turnwise.runs.training_run import TrainingRun
from turnwise.train import _update, assemble
from turnwise.training.batch import Batch, MicroBatch, pack, pack_again
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.optimizer import Optimizer, _rounded_at_random, _Undivided
from turnwise.training.tree import _TreeMask
from turnwise.training.update import StopFlag, prepare, run_cancellable, run_to_completion
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets
from turnwise.types import Sampling, Trajectory

# An optimizer step does what it says, in a thread beside the event loop.


# An optimizer step does what it says, whatever the precision and the number of micro-batches.


def policy(**options: float) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip(**options)))


def learn(one: LocalLearner, **options: object) -> None:
    asyncio.run(one.update([pack(group(), **options)], lr=1e-2))  # type: ignore[arg-type]


def flat(one: LocalLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in one.model.parameters()])


def test_micro_batches_and_shared_prompts_give_the_same_step() -> None:
    whole, parts = policy(), policy()
    learn(whole)
    learn(parts, micro_batch_tokens=1, share_prompts=False)
    assert (flat(whole) - flat(policy())).abs().max() > 1e-3
    # Adam divides by the gradient's size, so rounding shows most where the gradient is almost nothing
    torch.testing.assert_close(flat(parts), flat(whole), atol=2e-3, rtol=0)


def test_the_step_raises_what_was_good_and_lowers_what_was_bad() -> None:
    one = policy()
    (micro,) = pack(group()[:3]).micro_batches
    before = one._forward.logprobs(micro)[0].detach()
    learn(one)
    change = one._forward.logprobs(micro)[0].detach() - before
    assert float((change * micro.targets.advantage_N).sum()) > 0.5


def test_update_reports_loss_norm_and_deviation() -> None:
    one = policy()
    update = asyncio.run(one.update([pack(group())], lr=0.0, epochs=2))
    (micro,) = pack(group()[:3]).micro_batches
    ratio = (one._forward.logprobs(micro)[0].detach() - micro.targets.behaviour_logprob_N).exp()
    assert update.steps == 2
    assert update.tokens == 26
    assert update.grad_norm > 0
    assert update.max_deviation == pytest.approx(float((ratio - 1).abs().max()), rel=1e-4)


def test_bfloat16_keeps_masters_that_small_steps_are_not_lost_in() -> None:
    model = tiny_model().to(torch.bfloat16)
    one = LocalLearner(model, sampling=Sampling())
    start = torch.cat([master.flatten().clone() for master in one._optimizer.masters])
    for _ in range(3):
        asyncio.run(one.update([pack(group())], lr=1e-5))
    moved = torch.cat([master.flatten() for master in one._optimizer.masters]) - start
    assert moved.abs().max() == pytest.approx(3e-5, rel=0.2)
    for parameter, master in zip(one._optimizer.parameters, one._optimizer.masters, strict=True):
        assert torch.equal(parameter, master.to(torch.bfloat16))


def test_a_reference_holds_the_policy_back() -> None:
    free, held = policy(), policy(kl_coef=5.0)
    for _ in range(5):
        learn(free, keep_zero=True)
        learn(held, keep_zero=True)
    start = flat(policy())
    assert (flat(held) - start).norm() < 0.9 * (flat(free) - start).norm()
    update = asyncio.run(held.update([pack(group(), keep_zero=True)], lr=0.0))
    assert update.kl > 1e-5


def test_a_gradient_that_is_no_number_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    one = policy()
    before = flat(one)
    trajectories = group()
    trajectories[0].advantages = [float("inf"), 1.0]
    with caplog.at_level(logging.WARNING):
        asyncio.run(one.update([pack(trajectories)], lr=1e-2))
    assert torch.equal(flat(one), before)
    assert "this optimizer step is skipped" in caplog.text


def test_state_goes_on_exactly() -> None:
    straight, interrupted = policy(), policy()
    learn(straight)
    learn(interrupted)
    state, weights = interrupted.state(), {name: w.clone() for name, w in interrupted.model.state_dict().items()}
    resumed = policy()
    resumed.model.load_state_dict(weights)
    resumed.load_state(state)
    learn(straight)
    learn(resumed)
    assert torch.equal(flat(straight), flat(resumed))


def test_rates() -> None:
    constant = OptimizationSection(lr=1.0, warmup_steps=2)
    assert [constant.lr_at(step, steps=12) for step in (0, 1, 2, 11)] == [0.5, 1.0, 1.0, 1.0]
    linear = OptimizationSection(lr=1.0, warmup_steps=2, lr_schedule="linear")
    assert [linear.lr_at(step, steps=12) for step in (2, 7)] == [1.0, 0.5]
    cosine = OptimizationSection(lr=1.0, warmup_steps=2, lr_schedule="cosine")
    assert cosine.lr_at(7, steps=12) == pytest.approx(0.5)
    share = OptimizationSection(lr=1.0, warmup_steps=0.1)
    assert [share.warmup(steps) for steps in (1, 20, 30, 31)] == [1, 2, 3, 4]  # rounded up, as in transformers
    assert [share.lr_at(step, steps=20) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]


def test_a_model_that_is_not_there_is_told(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"there is no model directory .*nothing; a model is a hub id"):
        load_model(ModelSource(path=f"{tmp_path}/nothing", device="cpu"))
    config = XGLMConfig(vocab_size=260, d_model=32, ffn_dim=64, num_layers=1, attention_heads=4)
    with pytest.raises(ConfigError, match=r"train\.share_prompts=always: XGLMForCausalLM does not"):
        LocalLearner(XGLMForCausalLM(config), sampling=Sampling(), share_prompts="always")


def test_loss_divergence_and_norm_are_averaged_over_the_optimizer_steps() -> None:
    batches = [pack(group()[:2]), pack(group()[2:])]
    each = [asyncio.run(policy().update([batch], lr=0.0)) for batch in batches]
    both = asyncio.run(policy().update(batches, lr=0.0, epochs=2))
    assert (both.steps, both.tokens) == (4, 2 * (each[0].tokens + each[1].tokens))
    for name in ("loss", "kl", "grad_norm"):
        values = [getattr(one, name) for one in each]
        assert getattr(both, name) == pytest.approx(sum(values) / 2, rel=1e-5)
    clipped = sum(one.clip_fraction * one.tokens for one in each) / (each[0].tokens + each[1].tokens)
    assert both.clip_fraction == pytest.approx(clipped)
    assert both.max_deviation == pytest.approx(each[0].max_deviation)  # before the first step only


def test_micro_batches_side_by_side_give_the_gradient_of_one_after_the_other() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        beside = policy()
    finally:
        torch.set_num_threads(threads)
    one_by_one = LocalLearner(tiny_model(), sampling=Sampling(), threads=1)
    assert beside._gradients._workers is not None
    assert beside._gradients._workers._max_workers == 3
    assert one_by_one._gradients._workers is None
    batch = pack(group(), micro_batch_tokens=1)
    assert len(batch.micro_batches) == 4
    found = beside.accumulate(batch.micro_batches, lambda: None, StopFlag())
    expected = one_by_one.accumulate(batch.micro_batches, lambda: None, StopFlag())
    assert (found.loss, found.kl) == pytest.approx((expected.loss, expected.kl))
    for own, theirs in zip(beside._optimizer.parameters, one_by_one._optimizer.parameters, strict=True):
        assert own.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(own.grad, theirs.grad, atol=1e-6, rtol=1e-4)
    assert found.max_deviation == pytest.approx(expected.max_deviation)
    assert (found.clipped, found.tokens) == (expected.clipped, expected.tokens)
    assert list(beside._gradients._workers.map(lambda _: torch.get_num_threads(), range(6))) == [1] * 6


# a run that is stopped


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cancellation_before_the_first_optimizer_step_ends_after_a_micro_batch_and_changes_nothing(
    workers: int,
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        one = policy()
    finally:
        torch.set_num_threads(threads)
    before = flat(one)
    batch = pack(group(), micro_batch_tokens=1)
    assert len(batch.micro_batches) == 4
    counted, changed, cancelled = [], [], threading.Event()

    async def stopped() -> None:
        loop, first = asyncio.get_running_loop(), asyncio.Event()

        def done() -> None:
            counted.append(1)
            loop.call_soon_threadsafe(first.set)
            cancelled.wait(60)

        task = asyncio.create_task(
            one.update([batch], lr=1e-2, on_micro_batch=done, on_first_step=lambda: changed.append(1))
        )
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()

    asyncio.run(stopped())  # it waits for the thread
    assert (counted, changed) == ([1], [])
    assert torch.equal(flat(one), before)


def test_a_cancellation_after_the_first_optimizer_step_takes_effect_when_all_are_done() -> None:
    counted, changed = [], []
    one, other = policy(), policy()
    batches = [pack(group())] * 2

    async def stopped() -> None:
        def done() -> None:
            counted.append(1)
            if len(counted) == 2:  # of four, the first of them applied
                loop.call_soon_threadsafe(task.cancel)
                time.sleep(0.2)

        async def work() -> None:
            ended.append(
                await one.update(
                    batches, lr=1e-2, epochs=2, on_micro_batch=done, on_first_step=lambda: changed.append(1)
                )
            )
            await asyncio.sleep(0)

        loop, ended = asyncio.get_running_loop(), []
        task = asyncio.create_task(work())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [update.steps for update in ended] == [4]

    asyncio.run(stopped())
    asyncio.run(other.update(batches, lr=1e-2, epochs=2))
    assert (len(counted), changed) == (4, [1])
    assert torch.equal(flat(one), flat(other))


@pytest.mark.parametrize("selection", [{}, {"top_entropy_quantile": 0.5}])
def test_a_cancellation_while_the_first_policy_steps_does_not_stop_the_second(selection: dict[str, float]) -> None:
    """Otherwise the weights of the first have changed, and no checkpoint can hold the step."""
    learners = {"": policy(**selection), "second": policy(**selection)}
    trackers = [ValueTracker(Spo()) for _ in learners]
    other = policy(**selection)
    updating: list[bool] = []

    async def stopped() -> None:
        def begin() -> None:
            updating.append(True)
            if len(updating) == 1:
                task.cancel()

        run: Any = SimpleNamespace(
            config=SimpleNamespace(train=SimpleNamespace(ppo_epochs=1, micro_batch_tokens=None)),
            step=0,
            activity=SimpleNamespace(part=lambda *_: lambda: None),
            policies=[
                SimpleNamespace(
                    name=name, learner=one, credit=SimpleNamespace(tracker=tracker), own=lambda groups: groups
                )
                for (name, one), tracker in zip(learners.items(), trackers, strict=True)
            ],
            learning_rate_of=lambda _: 1e-2,
            begin_update=begin,
        )

        async def work() -> None:
            groups: Any = [SimpleNamespace(trajectories=group())]
            updates.update(await _update(run, {name: [pack(group())] for name in learners}, groups))
            await asyncio.sleep(0)

        updates: dict[str, Any] = {}
        task = asyncio.create_task(work())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [update.steps for update in updates.values()] == [1, 1]

    asyncio.run(stopped())
    asyncio.run(other.update([pack(group())], lr=1e-2))
    assert len(updating) == 2
    assert all(torch.equal(flat(one), flat(other)) for one in learners.values())
    assert trackers[0].step_moved == trackers[1].step_moved > 0, "how far they have moved was measured all the same"


# memory: what is measured lives until the end of a batch


def graphs_and_masks() -> set[int]:
    gc.collect()
    return {
        id(one)
        for one in gc.get_objects()
        if type(one) is _TreeMask or (type(one) is torch.Tensor and one.grad_fn is not None)
    }


@pytest.mark.parametrize("critic", [False, True])
def test_no_graph_of_a_micro_batch_lives_until_the_end_of_the_batch(critic: bool) -> None:
    before, alive = graphs_and_masks(), list[set[int]]()

    def count() -> None:
        alive.append(graphs_and_masks() - before)

    options = {"lr": 1e-3, "on_micro_batch": count}
    if critic:
        trajectories = group()
        for one in trajectories:
            one.values = one.returns = [1.0] * len(one.turns)
        packed = pack_value_targets(trajectories, ValuePacking(level="turn", micro_batch_tokens=8))
        learner = LocalCritic(tiny_model(), threads=1)
        asyncio.run(learner.update([packed], **options))
    else:
        learner = LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip()), threads=1)
        asyncio.run(learner.update([pack(group(), micro_batch_tokens=8)], **options))
    assert len(alive) > 1
    assert alive == [set()] * len(alive)


def test_what_is_measured_keeps_no_buffer_of_its_micro_batch() -> None:
    _, small = copied([torch.zeros(1000), torch.arange(5)], torch.device("cpu"))
    assert small.untyped_storage().nbytes() > 4000
    (kept,) = Measured([small], lambda host: host).tensors
    assert (kept.tolist(), kept.untyped_storage().nbytes()) == ([0, 1, 2, 3, 4], 40)


# the ratios of the first optimizer step


def rounded_differently(one: LocalLearner, *, version: int) -> list[Trajectory]:
    """Conversations whose log-probabilities by the engine are up to 0.5 away from the learner's own."""
    made = group()
    generator = torch.Generator().manual_seed(7)
    for conversation in made:
        (segment,) = conversation.segments
        own_LV = one.model(torch.tensor([list(segment.token_ids)])).logits[0].detach().log_softmax(-1)
        for place, turn in enumerate(segment.turn):
            if turn >= 0:
                noise = float(torch.rand((), generator=generator)) - 0.5
                segment.logprobs[place] = float(own_LV[place - 1, segment.token_ids[place]]) + noise
                segment.version[place] = version
    return made


def float64_first_gradient(one: LocalLearner, trajectories: list[Trajectory], *, ratios: bool) -> torch.Tensor:
    """Of the clipped surrogate with ratios to the engine's log-probabilities, or of the policy gradient without ratios."""
    model = copy.deepcopy(one.model).double()
    model.set_attn_implementation("eager")
    terms = []
    for conversation in trajectories:
        (segment,) = conversation.segments
        own_LV = model(torch.tensor([list(segment.token_ids)])).logits[0].log_softmax(-1)
        for place, turn in enumerate(segment.turn):
            if turn >= 0:
                own, gain = own_LV[place - 1, segment.token_ids[place]], conversation.advantages[turn]
                ratio = (own - segment.logprobs[place]).exp()
                terms.append(-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) if ratios else -own * gain)
    (sum(terms) / len(terms)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("version", [3, 2])
def test_ratios_of_the_first_step_are_to_the_learners_own_log_probabilities_where_its_weights_sampled(
    version: int,
) -> None:
    one = LocalLearner(tiny_model(), sampling=Sampling(), optimizer=OptimizationSection(max_grad_norm=1e9), threads=1)
    trajectories = rounded_differently(one, version=version)
    expected = float64_first_gradient(one, trajectories, ratios=version != 3)
    update = asyncio.run(one.update([pack(trajectories, version=3)], lr=0.0))
    found = torch.cat([p.grad.flatten() for p in one._optimizer.parameters if p.grad is not None]).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert (update.clip_fraction == 0.0) is (version == 3)
    assert update.max_deviation > 0.3  # engine and trainer are still compared
    assert (update.fresh_deviation > 0.3) is (version == 3)


def test_ratios_of_further_epochs_are_to_the_log_probabilities_of_the_first_pass() -> None:
    one = LocalLearner(tiny_model(), sampling=Sampling(), optimizer=OptimizationSection(max_grad_norm=1e9), threads=1)
    trajectories = rounded_differently(one, version=3)
    update = asyncio.run(one.update([pack(trajectories, version=3)], lr=0.0, epochs=3))
    assert (update.steps, update.clip_fraction) == (3, 0.0)
    expected = float64_first_gradient(one, trajectories, ratios=False)  # no weight has changed: all ratios are 1
    found = torch.cat([p.grad.flatten() for p in one._optimizer.parameters if p.grad is not None]).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_later_minibatches_have_ratios_to_the_engines_log_probabilities() -> None:
    one = LocalLearner(tiny_model(), sampling=Sampling(), optimizer=OptimizationSection(max_grad_norm=1e9), threads=1)
    trajectories = rounded_differently(one, version=3)
    batches = [pack(trajectories[:1], version=3), pack(trajectories[1:], version=3)]
    asyncio.run(one.update(batches, lr=0.0))
    expected = float64_first_gradient(one, trajectories[1:], ratios=True)
    found = torch.cat([p.grad.flatten() for p in one._optimizer.parameters if p.grad is not None]).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


# Threads of long computations.


NAME = contextvars.ContextVar("NAME", default="none")


@pytest.mark.parametrize("run", [run_cancellable, run_to_completion])
def test_a_computation_has_a_thread_that_ends_with_it(run: Callable[..., Any]) -> None:
    threads: list[threading.Thread] = []

    def work(stop: StopFlag) -> str:
        threads.append(threading.current_thread())
        return NAME.get()

    async def twice() -> list[str]:
        NAME.set("mine")
        return [await run(work), await run(work)]

    assert asyncio.run(twice()) == ["mine", "mine"]
    assert len({id(thread) for thread in threads}) == 2
    assert threading.main_thread() not in threads
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in threads):  # else OpenMP keeps threads for each of them
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Optimizers by name, and what they keep of bfloat16 weights, against plain formulas in float64.


SHAPES = ((64, 96), (130,), (70, 80))


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def stepped(optimizer: Optimizer, steps: range, lr: float = 1e-3) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        own = [gradient.to(optimizer.parameters[0].dtype) for gradient in gradients(step)]
        optimizer.add_gradients([gradient.clone() for gradient in own])
        optimizer.step(lr)
    return [parameter.detach().clone() for parameter in optimizer.parameters]


def adamw(steps: int, lr: float, config: OptimizationSection) -> list[torch.Tensor]:
    """AdamW with clipping of the gradient's norm, in float64, from the formula."""
    weights = [parameter.detach().double() for parameter in parameters(torch.bfloat16)]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    (beta1, beta2) = config.betas
    for step in range(steps):
        own = [gradient.double() for gradient in gradients(step)]
        norm = sum(float((gradient**2).sum()) for gradient in own) ** 0.5
        own = [gradient * min(1.0, config.max_grad_norm / norm) for gradient in own]
        for place, gradient in enumerate(own):
            first[place] = beta1 * first[place] + (1 - beta1) * gradient
            second[place] = beta2 * second[place] + (1 - beta2) * gradient**2
            of_first, of_second = first[place] / (1 - beta1 ** (step + 1)), second[place] / (1 - beta2 ** (step + 1))
            weights[place] *= 1 - lr * config.weight_decay
            weights[place] -= lr * of_first / (of_second.sqrt() + 1e-8)
    return weights


CONFIG = OptimizationSection(weight_decay=0.1, max_grad_norm=5.0)


def test_float32_weights_get_the_steps_of_torchs_adamw_bit_by_bit() -> None:
    own = stepped(Optimizer(parameters(torch.float32), CONFIG), range(3))
    plain = parameters(torch.float32)
    reference = torch.optim.AdamW(plain, lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(3):
        for parameter, gradient in zip(plain, gradients(step), strict=True):
            parameter.grad = gradient.float()
        torch.nn.utils.clip_grad_norm_(plain, 5.0)
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(own, plain, strict=True))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("float32", 0.5), ("kahan", 0.6), ("stochastic_rounding", 1.1)],
    ids=lambda value: str(value),
)
def test_bfloat16_weights_follow_the_formula_in_spite_of_small_steps(kind: Any, tolerance: float) -> None:
    """To half a unit in the last place of bfloat16 with a copy; by random rounding, to about one on average."""
    config = OptimizationSection(weight_decay=0.1, max_grad_norm=5.0, optimizer=OptimizerSection(master_weights=kind))
    optimizer = Optimizer(parameters(torch.bfloat16), config)
    lr = (
        1e-3 if kind == "stochastic_rounding" else 1e-4
    )  # rounding at random is noise, which must be small beside the steps
    own, exact = stepped(optimizer, range(20), lr), adamw(20, lr, config)
    start = [parameter.detach() for parameter in parameters(torch.bfloat16)]
    for weight, reference, before in zip(own, exact, start, strict=True):
        unit = torch.exp2(torch.floor(torch.log2(reference.abs().clamp_min(1e-3))) - 7)
        off = ((weight.double() - reference) / unit).abs()
        if kind == "stochastic_rounding":
            moved = (reference - before.double()).flatten()
            own_moved = (weight.double() - before.double()).flatten()
            assert float(own_moved @ moved / (moved @ moved)) == pytest.approx(1.0, abs=4 * 2.6 / len(moved) ** 0.5)
        else:
            assert float(off.quantile(0.99)) < tolerance
    sizes = {"float32": sum(p.numel() for p in start), "kahan": 0, "stochastic_rounding": 0}
    assert sum(master.numel() for master in optimizer.masters) == sizes[kind]


@pytest.mark.parametrize("grad_accum_dtype", [None, "float32"])
def test_gradients_of_many_micro_batches_are_added_up_in_the_type_of_the_option(grad_accum_dtype: Any) -> None:
    """In bfloat16, 1 is lost beside 256; the float32 sum is exact, and so is AdamW's first average of it."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    section = OptimizerSection(grad_accum_dtype=grad_accum_dtype)
    optimizer = Optimizer([parameter], OptimizationSection(optimizer=section, max_grad_norm=1e9))
    for gradient in (256.0, *[1.0] * 300):
        (parameter * gradient).sum().backward()
    assert parameter.grad is not None
    exact = grad_accum_dtype == "float32"
    assert parameter.grad.dtype == (torch.float32 if exact else torch.bfloat16)
    assert parameter.grad.tolist() == [556.0 if exact else 256.0] * 3
    norm = optimizer.step(1e-3)
    assert norm == pytest.approx(3**0.5 * (556.0 if exact else 256.0))
    assert optimizer.moments()[0]["exp_avg"].tolist() == pytest.approx([55.6 if exact else 25.6] * 3)


def test_many_micro_batches_in_bfloat16_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def told(dtype: torch.dtype, *counts: int, **options: Any) -> list[str]:
        section = OptimizationSection(optimizer=OptimizerSection(**options))
        optimizer = Optimizer(parameters(dtype), section)
        caplog.clear()
        for count in counts:
            optimizer.tell_rounded_sums(count)
        return [record.message for record in caplog.records]

    (message,) = told(torch.bfloat16, 256, 257, 300)
    assert message.startswith("the gradients of 257 micro-batches are added up in bfloat16, which loses small ones")
    assert told(torch.bfloat16, 300, grad_accum_dtype="float32") == told(torch.float32, 300) == []


def test_a_parameter_without_gradient_moves_on_with_float32_sums_too() -> None:
    section = OptimizerSection(grad_accum_dtype="float32")
    optimizer = Optimizer(parameters(torch.bfloat16), OptimizationSection(optimizer=section))
    assert optimizer.step(1e-3) == 0.0
    optimizer.zero_grad()
    first, *others = optimizer.parameters
    for _ in range(2):  # as from micro-batches that are computed in parallel
        found = torch.autograd.grad((first * 3.0).sum(), optimizer.parameters, allow_unused=True)
        optimizer.add_gradients(found)
    assert first.grad is not None
    assert (first.grad.dtype, float(first.grad.max())) == (torch.float32, 6.0)
    assert all(other.grad is None for other in others)


def test_without_master_weights_small_steps_are_lost() -> None:
    optimizer = Optimizer(
        parameters(torch.bfloat16), OptimizationSection(optimizer=OptimizerSection(master_weights="none"))
    )
    own, start = stepped(optimizer, range(3), lr=1e-6), parameters(torch.bfloat16)
    large = [
        (weight[before.abs() > 0.1], before[before.abs() > 0.1]) for weight, before in zip(own, start, strict=True)
    ]
    assert all(torch.equal(weight, before) for weight, before in large)


def test_random_rounding_gives_the_value_on_average() -> None:
    value = torch.full((20000,), 1.0 + 0.3 * 2**-7)
    rounded = _rounded_at_random(value, seed=1).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1.0 + 0.3 * 2**-7, abs=2e-4)
    exact = torch.tensor([1.5, -2.25, 0.0])
    assert torch.equal(_rounded_at_random(exact, seed=2).float(), exact)


def test_other_parts_of_a_parameter_are_rounded_by_other_random_numbers() -> None:
    class Part(_Undivided):
        def __init__(self, number: int) -> None:
            self._number = number

        def number(self, parameter: torch.Tensor) -> int:
            return self._number

    config = OptimizationSection(optimizer=OptimizerSection(master_weights="stochastic_rounding"))
    first, same, other = (
        torch.cat([weight.flatten() for weight in stepped(optimizer, range(1), lr=1e-4)])
        for optimizer in (Optimizer(parameters(torch.bfloat16), config, parts=Part(number)) for number in (1, 1, 2))
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor"])
@pytest.mark.parametrize("kind", ["float32", "kahan", "stochastic_rounding", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_saved_state_continues_exactly(name: Any, kind: Any, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and kind != "float32":
        pytest.skip("refused: no effect")
    config = OptimizationSection(optimizer=OptimizerSection(name=name, master_weights=kind))
    straight = stepped(Optimizer(parameters(dtype), config), range(4), lr=1e-2)
    first = Optimizer(parameters(dtype), config)
    halfway = stepped(first, range(2), lr=1e-2)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    second = Optimizer([torch.nn.Parameter(weight) for weight in halfway], config)
    second.load_state(torch.load(file, weights_only=True))
    resumed = stepped(second, range(2, 4), lr=1e-2)
    assert all(torch.equal(one, other) for one, other in zip(resumed, straight, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(straight, parameters(dtype), strict=True))


def test_eight_bits_and_adafactor_keep_less_state() -> None:
    def state_bytes(name: Any) -> int:
        optimizer = Optimizer(parameters(torch.float32), OptimizationSection(optimizer=OptimizerSection(name=name)))
        stepped(optimizer, range(1))
        values = [value for state in optimizer.state()["optimizer"]["state"].values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))

    full = state_bytes("adamw")
    assert state_bytes("adamw_8bit") < 0.6 * full  # small tensors keep 32 bits, and each tensor has two tables of 1 KB
    assert state_bytes("adafactor") < 0.1 * full


def test_eight_bits_stay_close_to_the_formula() -> None:
    config = OptimizationSection(weight_decay=0.1, max_grad_norm=5.0, optimizer=OptimizerSection(name="adamw_8bit"))
    own, exact = stepped(Optimizer(parameters(torch.bfloat16), config), range(5)), adamw(5, 1e-3, config)
    for weight, reference, before in zip(own, exact, parameters(torch.bfloat16), strict=True):
        moved, own_moved = reference - before.detach().double(), weight.double() - before.detach().double()
        assert float((own_moved * moved).sum() / (moved**2).sum()) == pytest.approx(1.0, abs=0.2)


def tree(section: str, **changes: Any) -> dict[str, Any]:
    model = {"path": "m", **changes.pop("model", {})}
    cluster = changes.pop("cluster", {})
    return {"model": model, "data": {"train": "rows.jsonl"}, "cluster": cluster, section: changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": {"name": "adafactor"}, "betas": [0.5, 0.9]},
            "betas has no effect with optimizer.name=adafactor",
        ),
        ({"optimizer": {"master_weights": "kahan"}}, "master_weights=kahan has no effect, because all trained weights"),
        (
            {"optimizer": {"master_weights": "none"}, "model": {"dtype": "bfloat16", "lora": {"rank": 4}}},
            "master_weights=none has no effect, because all trained weights",
        ),
        ({"optimizer": {"grad_accum_dtype": "float32"}}, "grad_accum_dtype=float32 has no effect, because all trained"),
        (
            {
                "optimizer": {"grad_accum_dtype": "float32"},
                "model": {"dtype": "bfloat16"},
                "cluster": {"launcher": "torchrun", "fsdp": {"reduce_dtype": "bfloat16"}},
            },
            "grad_accum_dtype=float32 has no effect with cluster.fsdp.reduce_dtype=bfloat16",
        ),
        ({"optimizer": {"offload": "cpu"}, "model": {"device": "cpu"}}, "offload=cpu has no effect"),
        (
            {"optimizer": {"offload": "sampling"}, "model": {"device": "cpu"}},
            "offload=sampling has no effect, because (the model is on the CPU|fine-tuning samples nothing)",
        ),
    ],
)
@pytest.mark.parametrize("section", ["train", "sft"])
def test_options_without_effect_are_refused(section: str, changes: dict[str, Any], message: str) -> None:
    config = checked(tree(section, **dict(changes)), source="recipe")
    with pytest.raises(ConfigError, match=message):
        (refuse_without_effect if section == "train" else refuse_sft_without_effect)(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"max_staleness": 1}},
            "train.max_staleness=1, conversations run while .*Use train.optimizer.offload=cpu",
        ),
        ({"cluster": {"launcher": "local", "trainers": 2}}, "several ranks .*cluster.launcher=local"),
        ({"rollout_server": {"url": "http://127.0.0.1:1"}}, "conversations run in other processes .rollout_server.url"),
        ({"engine": {"name": "vllm"}}, "without engine.sleep, a server keeps .* Set engine.sleep=true"),
        ({"engine": {"name": "vllm", "sleep": True, "devices": [1]}}, "engine.devices=.1. are others than GPU 0"),
        ({"engine": {"name": "sglang", "sleep": True, "devices": [0]}, "model": {"device": "cuda:1"}}, "than GPU 1"),
        ({"engine": {"name": "vllm", "sleep": True, "devices": [0]}}, None),
        ({"engine": {"name": "sglang", "sleep": True}}, None),
        ({}, None),
    ],
)
def test_an_optimizer_leaves_the_gpu_only_for_an_engine_that_takes_turns_with_the_trainer(
    changes: dict[str, Any], message: str | None
) -> None:
    recipe = tree("train")
    for section, options in changes.items():
        recipe[section] = {**(recipe.get(section) or {}), **options}
    recipe["train"] = {**recipe["train"], "optimizer": {"offload": "sampling"}}
    config = checked(recipe, source="recipe")
    if message is None:
        refuse_without_effect(config)
        return
    with pytest.raises(ConfigError, match=message):
        refuse_without_effect(config)


@pytest.mark.parametrize("offload", ["cpu", "sampling"])
def test_offload_of_a_model_on_the_cpu_is_refused(offload: str) -> None:
    options = OptimizationSection.model_validate({"optimizer": {"offload": offload}})
    with pytest.raises(ConfigError, match="the model is on the CPU"):
        Optimizer(parameters(torch.float32), options)


def test_the_optimizer_of_fine_tuning_is_that_of_the_recipe(tmp_path: Path) -> None:
    options = {"name": "adafactor", "master_weights": "kahan", "offload": "cpu", "grad_accum_dtype": "float32"}
    own = checked(tree("sft", optimizer=options), source="recipe").sft.optimizer
    assert own == OptimizerSection.model_validate(options)


# When memory runs out in a pass, the same update is computed in smaller micro-batches, and the run goes on with them


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


def flat_bound(one: LocalLearner) -> torch.Tensor:
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
    assert torch.equal(flat_bound(interrupted), flat_bound(small))
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
    assert torch.equal(flat_bound(interrupted), flat_bound(small))


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
    before = flat_bound(one)
    allow(one.model, 5)
    with pytest.raises(
        RunError, match=r"one sequence of 10 tokens.*\n.*model\.gradient_checkpointing=true.*resume=auto"
    ):
        update(one, pack(group()))
    assert torch.equal(flat_bound(one), before)


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


@pytest.mark.slow
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
