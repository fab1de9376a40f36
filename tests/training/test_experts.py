"""Mixtures of experts in training: recorded experts are used again, and the auxiliary loss balances what it says.

The trajectories are sampled by the embedded engine, which records experts; then the routers are disturbed, or rounding is.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from support.forked import Forked
from support.mixtures import CONFIGS, VOCABULARY, disturb_routers, mixture
from support.recipes import save_recipe
from support.tiny import save_model, save_rows, tiny_model
from support.training import train_run
from training.test_batch import group
from turnwise.engines.local import LocalEngine
from turnwise.errors import ConfigError, RunError
from turnwise.models.experts import Choice, RouterPass, Routers
from turnwise.models.loading import recompute_layers
from turnwise.models.lora import add_adapter
from turnwise.options.algorithm import LoraSection, OptimizationSection, PpoClip
from turnwise.record.metric_names import METRICS
from turnwise.record.trajectory_json import MediaStore, decode_trajectory, trajectory_line
from turnwise.training.batch import Batch, MicroBatch, pack
from turnwise.training.expert_load import ExpertLoad
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.value_batch import ValuePacking, pack_states
from turnwise.types import LogprobKind, Request, Routes, Row, Sampling, Segment, Trajectory, Turn

QUICK = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe", "glm4_moe", "llama4"]
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


def sampled(model: PreTrainedModel, *, turns: int = 2, record: bool = True) -> list[Trajectory]:
    """A group of four conversations with a common prompt, with recorded experts."""

    async def converse(engine: LocalEngine, number: int, prompt: list[int]) -> Trajectory:
        random, segment = np.random.default_rng(number), Segment()
        one = Trajectory(
            id=f"t{number}", group="g", row=Row(id="1", messages=[{"role": "user", "content": "?"}]), seed=0
        )
        segment.append_context(prompt)
        for index in range(turns):
            request = Request(
                conversation=one.id,
                token_ids=list(segment.token_ids),
                sampling=Sampling(max_tokens=int(random.integers(3, 9))),
                seed=10 * number + index,
                routes=segment.routes,
            )
            completion = await engine.generate(request)
            segment.append_completion(index, completion)
            message = {"role": "assistant", "content": ""}
            one.turns.append(Turn(index=index, message=message, text="", completion=replace(completion, routes=None)))
            if index < turns - 1:
                segment.append_context(random.integers(3, VOCABULARY, 4).tolist())
        one.segments, one.logprob_kind = [segment], LogprobKind.SAMPLED
        one.advantages = [1.0 if number % 2 else -0.5] * turns
        one.reward = float(number)
        return one

    async def run() -> list[Trajectory]:
        engine = LocalEngine(model, threads=1, context=256, record_routes=record)
        prompt = np.random.default_rng(1).integers(3, VOCABULARY, 24).tolist()
        held = await asyncio.gather(*(converse(engine, number, prompt) for number in range(4)))
        await engine.close()
        return held

    return asyncio.run(run())


def learner(model: PreTrainedModel, *, replay: bool = False, share: str = "auto", **options: float) -> LocalLearner:
    loss = make_loss(PpoClip(**options))  # type: ignore[arg-type]
    return LocalLearner(
        model,
        sampling=Sampling(),
        loss=loss,
        optimizer=OptimizationSection(max_grad_norm=1e6),  # gradients are compared, and must not be scaled
        threads=1,
        router_replay=replay,
        share_prompts=share,
    )


def packed(trajectories: list[Trajectory], one: LocalLearner, **options: int) -> Batch:
    required = one.requirements
    return pack(trajectories, share_prompts=required.share_prompts, keep_zero=required.keep_zero, **options)


def used_in(one: LocalLearner, micro: MicroBatch) -> torch.Tensor:
    """The experts that a pass of the policy uses, [T, L, K]."""
    used: list[torch.Tensor] = []
    with torch.no_grad():
        one._forward.logprobs(micro, on_choice=lambda choice: used.append(choice.index_TK))
    return torch.stack(used, dim=1)


# Replay


@pytest.mark.parametrize("family", FAMILIES)
def test_training_uses_the_recorded_experts_whatever_the_router_would_choose(family: str) -> None:
    model = mixture(family)
    trajectories = sampled(model)
    one = learner(model, replay=True)
    batch = packed(trajectories, one)
    update = asyncio.run(one.update([batch], lr=0.0))
    assert update.max_deviation < (1e-4 if family == "gemma4" else 2e-6)  # Gemma's caps and norms of logits round more
    assert update.experts["experts/rerouted"] == 0.0
    disturb_routers(model)
    changed = asyncio.run(one.update([batch], lr=0.0))
    assert changed.experts["experts/rerouted"] > 0.1
    (micro,) = batch.micro_batches
    assert micro.routes_TLK is not None
    known_T = micro.routes_TLK[:, 0, 0] >= 0
    assert torch.equal(used_in(one, micro)[known_T], micro.routes_TLK[known_T].long())
    assert not torch.equal(used_in(learner(model), micro)[known_T], micro.routes_TLK[known_T].long())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama4"])
def test_weights_of_replayed_experts_come_from_the_present_router(family: str) -> None:
    model = mixture(family)
    trajectories = sampled(model)
    one = learner(model, replay=True)
    disturb_routers(model)
    (micro,) = packed(trajectories, one).micro_batches
    one._forward.logprobs(micro)[0].sum().backward()
    gates = [
        parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and len(parameter) <= 8 and any(part in name for part in ("gate.", "router."))
    ]
    assert gates
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in gates)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_an_adapter_is_trained_with_recorded_experts_and_its_base_model_chooses_its_own(family: str) -> None:
    model = mixture(family)
    add_adapter(model, LoraSection(rank=2, alpha=4.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.05)
    trajectories = sampled(model)
    one = learner(model, replay=True, kl_coef=0.1)
    batch = packed(trajectories, one)
    update = asyncio.run(one.update([batch], lr=0.0))
    assert update.max_deviation < 2e-6
    assert update.experts["experts/rerouted"] == 0.0
    assert update.kl is not None
    assert update.kl > 1e-4
    assert all((parameter.grad is not None) == (".lora_" in name) for name, parameter in model.named_parameters())
    disturb_routers(model)
    assert asyncio.run(one.update([batch], lr=0.0)).experts["experts/rerouted"] > 0.1
    (micro,) = batch.micro_batches
    assert micro.routes_TLK is not None
    known_T = micro.routes_TLK[:, 0, 0] >= 0
    assert torch.equal(used_in(one, micro)[known_T], micro.routes_TLK[known_T].long())


def test_bfloat16_passes_keep_the_experts_of_float32() -> None:
    model = mixture("qwen3_moe")
    trajectories = sampled(model)
    one = LocalLearner(model, sampling=Sampling(), threads=1, autocast=True, router_replay=True)
    free = LocalLearner(copy.deepcopy(model), sampling=Sampling(), threads=1, autocast=True)
    (micro,) = packed(trajectories, one).micro_batches
    assert micro.routes_TLK is not None
    known_T = micro.routes_TLK[:, 0, 0] >= 0
    assert torch.equal(used_in(one, micro)[known_T], micro.routes_TLK[known_T].long())
    assert not torch.equal(used_in(free, micro)[known_T], micro.routes_TLK[known_T].long())


def test_an_engine_in_bfloat16_is_replayed_in_float32() -> None:
    model = mixture("qwen3_moe")

    async def run() -> Segment:
        engine = LocalEngine(model, threads=1, autocast=True, record_routes=True)
        segment = Segment()
        segment.append_context(list(range(3, 40)))
        request = Request(conversation="c", token_ids=list(segment.token_ids), sampling=Sampling(max_tokens=40))
        segment.append_completion(0, await engine.generate(request))
        await engine.close()
        return segment

    segment = asyncio.run(run())
    one = Trajectory(id="t", group="g", row=Row(id="1", messages=[{"role": "user", "content": "?"}]), seed=0)
    one.turns = [Turn(index=0, message={"role": "assistant", "content": ""}, text="")]
    one.segments, one.logprob_kind, one.advantages = [segment], LogprobKind.SAMPLED, [1.0]
    replayed, free = learner(model, replay=True), learner(model)
    with_replay = asyncio.run(replayed.update([packed([one], replayed)], lr=0.0))
    without = asyncio.run(free.update([packed([one], free)], lr=0.0))
    assert with_replay.experts["experts/rerouted"] > 0
    assert with_replay.max_deviation < without.max_deviation


def test_gradient_checkpointing_computes_a_layer_again_with_the_same_experts() -> None:
    gradients: list[torch.Tensor] = []
    for recomputes in (False, True):
        model = mixture("qwen3_moe")
        trajectories = sampled(model)
        disturb_routers(model)
        if recomputes:
            recompute_layers(model)
        one = learner(model, replay=True, router_aux_loss_coef=0.1)
        asyncio.run(one.update([packed(trajectories, one)], lr=0.0))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in one._optimizer.parameters]))  # type: ignore[union-attr]
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)


def test_tokens_with_other_experts_are_computed_separately() -> None:
    model = mixture("qwen3_moe")
    trajectories = sampled(model)
    one = learner(model, replay=True)
    same = packed(trajectories, one)
    assert same.computed_tokens < same.sequence_tokens - 3 * 20  # the prompt is shared
    routes = trajectories[1].segments[0].routes
    assert routes is not None
    data = bytearray(routes.data)
    data[10 * routes.token_bytes] = (data[10 * routes.token_bytes] + 1) % 8
    trajectories[1].segments[0].routes = replace(routes, data=bytes(data))
    batch = packed(trajectories, one)
    assert (
        batch.computed_tokens == same.computed_tokens + 24 - 10
    )  # from the first token that differs to the prompt's end
    rows = pack(trajectories, share_prompts=False)
    logprobs = [
        {
            sequence: values
            for micro in part.micro_batches
            for sequence, values in zip(
                micro.targets.sequence_N.tolist(), one._forward.logprobs(micro)[0].tolist(), strict=True
            )
        }
        for part in (batch, rows)
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=2e-5)


def test_log_probabilities_for_a_reward_use_recorded_experts_and_the_reference_does_not() -> None:
    model = mixture("qwen3_moe")
    trajectories = sampled(model)
    one = learner(model, replay=True, kl_coef=0.1)
    packing = ValuePacking(level="token", micro_batch_tokens=4096)
    states = pack_states(trajectories, packing, with_routes=True)
    assert all(micro.routes_TLK is None for micro in pack_states(trajectories, packing).micro_batches)
    before = asyncio.run(one.logprobs(states))
    reported = [
        value
        for t in trajectories
        for value, turn in zip(t.segments[0].logprobs, t.segments[0].turn, strict=True)
        if turn >= 0
    ]
    assert before == pytest.approx(reported, abs=2e-5)
    # with other experts than recorded, the policy's numbers differ, and those of the reference model do not
    for trajectory in trajectories:
        routes = trajectory.segments[0].routes
        assert routes is not None
        data = bytes((number + 1) % 8 for number in routes.data)
        trajectory.segments[0].routes = replace(routes, data=data)
    states = pack_states(trajectories, packing, with_routes=True)
    assert max(abs(a - b) for a, b in zip(asyncio.run(one.logprobs(states)), before, strict=True)) > 1e-2
    reference = asyncio.run(one.logprobs(states, reference=True))
    plain = asyncio.run(one.logprobs(pack_states(trajectories, packing), reference=True))
    assert reference == pytest.approx(plain, abs=1e-5)


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.router_replay=true: Qwen3ForCausalLM is no mixture of experts"):
        learner(tiny_model(), replay=True)
    with pytest.raises(
        ConfigError, match=r"loss\.router_aux_loss_coef=0\.01: Qwen3ForCausalLM is no mixture of experts"
    ):
        learner(tiny_model(), router_aux_loss_coef=0.01)
    assert asyncio.run(learner(tiny_model()).update([pack(group())], lr=0.0)).experts == {}


def test_a_router_that_does_not_call_topk_is_refused_with_its_name() -> None:
    import transformers as hf

    config = hf.PhimoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config)
    reason = (
        r"PhimoeForCausalLM does not choose its experts .* model\.layers\.0\.mlp\.experts gets its experts from another"
    )
    with pytest.raises(ConfigError, match=reason):
        Routers.of(model)
    assert Routers.watchable(model) is None  # metrics are left out, and the model is trained as before


# The auxiliary loss


def gate_logits(model: PreTrainedModel, tokens: list[list[int]]) -> list[torch.Tensor]:
    """The logits of the routers of a Qwen3-MoE, [tokens, E] for each layer, as transformers returns them."""
    longest = max(map(len, tokens))
    ids = torch.tensor([one + [0] * (longest - len(one)) for one in tokens])
    with torch.no_grad():
        return list(model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits)


def expected_aux_loss(model: PreTrainedModel, trajectories: list[Trajectory]) -> float:
    """The mean over layers of transformers' loss, over the tokens that precede the last target of each sequence."""
    tokens = [list(one.segments[0].token_ids) for one in trajectories]
    longest = max(map(len, tokens))
    mask = torch.tensor([[1] * (len(one) - 1) + [0] * (longest - len(one) + 1) for one in tokens])
    losses = [
        load_balancing_loss_func((layer,), num_experts=8, top_k=2, attention_mask=mask)
        for layer in gate_logits(model, tokens)
    ]
    return float(sum(losses) / len(losses))


@pytest.mark.parametrize(
    ("share", "tokens", "replay"),
    [("auto", 4096, False), ("never", 4096, False), ("auto", 1, False), ("never", 1, False), ("auto", 1, True)],
)
def test_the_loss_is_that_of_transformers_however_a_batch_is_packed(share: str, tokens: int, replay: bool) -> None:
    model = mixture("qwen3_moe")
    trajectories = sampled(model)
    one = learner(model, share=share, replay=replay, router_aux_loss_coef=0.5)
    batch = packed(trajectories, one, micro_batch_tokens=tokens)
    assert (len(batch.micro_batches) > 1) == (tokens == 1)
    update = asyncio.run(one.update([batch], lr=0.0))
    expected = expected_aux_loss(model, trajectories)
    assert update.experts["experts/aux_loss"] == pytest.approx(expected, rel=1e-5)
    plain = asyncio.run(learner(model, share=share).update([batch], lr=0.0))
    assert update.loss == pytest.approx(plain.loss + 0.5 * expected, rel=1e-4)


def test_gradients_do_not_depend_on_packing_and_copies_count() -> None:
    model = mixture("qwen3_moe")
    trajectories = sampled(model)
    twin = copy.deepcopy(trajectories[0])
    twin.id = "twin"  # an equal sequence of the group: one sequence of two copies
    gradients: list[torch.Tensor] = []
    for share, tokens in (("auto", 4096), ("never", 4096), ("auto", 1)):
        one = learner(copy.deepcopy(model), share=share, router_aux_loss_coef=1.0)
        batch = packed([*trajectories, twin], one, micro_batch_tokens=tokens)
        update = asyncio.run(one.update([batch], lr=0.0))
        assert update.experts["experts/aux_loss"] == pytest.approx(
            expected_aux_loss(model, [*trajectories, twin]), rel=1e-5
        )
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in one._optimizer.parameters]))  # type: ignore[union-attr]
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(gradients[2], gradients[0], atol=1e-6, rtol=1e-4)


def test_the_gradient_of_the_loss_is_that_of_the_probabilities_only() -> None:
    model = mixture("qwen3_moe")
    trajectories = sampled(model)
    for one in trajectories:
        one.advantages = [0.0] * len(one.advantages)  # only the auxiliary loss has a gradient
    one = learner(model, router_aux_loss_coef=1.0)
    assert one.requirements.keep_zero
    asyncio.run(one.update([packed(trajectories, one)], lr=0.0))
    tokens = [list(t.segments[0].token_ids) for t in trajectories]
    mask_T = torch.zeros(len(tokens), max(map(len, tokens)))
    for row, ids in enumerate(tokens):
        mask_T[row, : len(ids) - 1] = 1
    gate = model.model.layers[2].mlp.gate.weight
    choices: list[Choice] = []
    with RouterPass(choices.append).active():
        longest = mask_T.shape[1]
        model(input_ids=torch.tensor([ids + [0] * (longest - len(ids)) for ids in tokens]), use_cache=False)
    weight_T = mask_T.flatten() / mask_T.sum()
    fraction_E = torch.zeros(8).index_add_(0, choices[2].index_TK.flatten(), weight_T.repeat_interleave(2))
    loss = 8 * (fraction_E * (choices[2].probabilities() * weight_T[:, None]).sum(0)).sum() / 3
    (expected,) = torch.autograd.grad(loss, gate)
    torch.testing.assert_close(gate.grad, expected, atol=1e-7, rtol=1e-4)


@pytest.mark.slow
def test_steps_on_the_loss_balance_the_experts() -> None:
    model = mixture("qwen3_moe")
    trajectories = sampled(model)
    for trajectory in trajectories:
        trajectory.advantages = [0.0] * len(trajectory.advantages)
    one = learner(model, router_aux_loss_coef=1.0)
    batch = packed(trajectories, one)
    first = asyncio.run(one.update([batch], lr=3e-3)).experts
    for _ in range(10):
        last = asyncio.run(one.update([batch], lr=3e-3)).experts
    assert last["experts/aux_loss"] < 0.9 * first["experts/aux_loss"]
    assert last["experts/max_share"] < first["experts/max_share"]
    assert last["experts/entropy"] > first["experts/entropy"]


def test_metrics_of_the_load() -> None:
    load = ExpertLoad(np.array([[6.0, 2.0], [4.0, 4.0]]), 4.0, rerouted=1.0, replayed=4.0)
    metrics = (load + load).metrics(balances=False)
    assert metrics["experts/max_share"] == pytest.approx((0.75 + 0.5) / 2)
    assert metrics["experts/min_share"] == pytest.approx((0.25 + 0.5) / 2)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(2)
    assert metrics["experts/entropy"] == pytest.approx((entropy + 1) / 2)
    assert metrics["experts/rerouted"] == 0.25


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "llama4"])
def test_probabilities_are_those_of_the_routers_own_scores(family: str) -> None:
    model = mixture(family)
    Routers.of(model)
    choices: list[Choice] = []
    with torch.no_grad(), RouterPass(choices.append).active():
        model(input_ids=torch.arange(3, 12)[None], use_cache=False)
    for choice in choices:
        probability_TE = choice.probabilities()
        torch.testing.assert_close(probability_TE.sum(-1), torch.ones(9))
        if family == "deepseek_v3":
            assert choice.function == "sigmoid"
            torch.testing.assert_close(
                probability_TE, choice.scores_TE / choice.scores_TE.sum(-1, keepdim=True), atol=1e-6, rtol=1e-5
            )
        else:
            torch.testing.assert_close(probability_TE, choice.scores_TE.softmax(-1))


# A run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of two steps with a tiny Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("recipe")
    model = save_model(folder / "model")
    tiny = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=512,
        )
    )
    with torch.no_grad():
        for parameter in tiny.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    tiny.save_pretrained(model)
    return save_recipe(
        folder,
        model,
        data={"train": str(save_rows(folder / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
        checkpoint={"every": 1},
        deterministic=True,
    )


@pytest.mark.slow
def test_a_run_records_experts_and_uses_them_again(recipe: Path, tmp_path: Path) -> None:
    trajectories, metrics, _ = train_run(
        recipe, tmp_path / "run", "model.router_replay=true", "loss.router_aux_loss_coef=0.01"
    )
    for line in metrics[-2:]:
        assert line["ratio/max_deviation"] < 1e-5
        assert line["experts/rerouted"] == 0.0
        assert 0.25 <= line["experts/max_share"] < 1
        assert line["experts/aux_loss"] > 1.9
        assert {metric.name for metric in METRICS if metric.name.startswith("experts/")} <= line.keys()
    for trajectory in trajectories:
        for segment in trajectory["segments"]:
            routes = segment["routes"]
            assert (routes["layers"], routes["top_k"], routes["number_bytes"]) == (2, 2, 1)
            numbers = zlib.decompress(base64.b64decode(routes["data"]))
            assert len(numbers) == 4 * (len(segment["token_ids"]) - 1)
            assert max(numbers) <= 3
    read = [decode_trajectory(trajectory, where="here") for trajectory in trajectories]
    assert [json.loads(trajectory_line(one, MediaStore(None)))["segments"] for one in read] == [
        trajectory["segments"] for trajectory in trajectories
    ]
    # a run without replay records nothing, and the step is the same: engine and trainer round alike here
    plain, others, _ = train_run(recipe, tmp_path / "plain", "loss.router_aux_loss_coef=0.01")
    assert all("routes" not in segment for trajectory in plain for segment in trajectory["segments"])
    assert others[-1]["loss"] == pytest.approx(metrics[-1]["loss"], abs=1e-5)
    assert "experts/rerouted" not in others[-1]


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["true", "false"])
def test_two_ranks_compute_what_one_process_computes(replay: str, recipe: Path, tmp_path: Path) -> None:
    options = (f"model.router_replay={replay}", "loss.router_aux_loss_coef=0.05", "model.device=cpu")
    # several micro-batches for each rank: the load of the experts is measured before, unless it is recorded
    options = (*options, "train.micro_batch_tokens=40")
    _, one_process, _ = train_run(recipe, tmp_path / "one", *options)
    words = [*options, "cluster=local", "cluster.trainers=2", f"output={tmp_path / 'two'}"]
    with Forked(["train", str(recipe), *words]) as ranks:
        printed, _ = ranks.communicate(timeout=600)
    assert ranks.returncode == 0, printed
    text = (tmp_path / "two" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = (one_process, [json.loads(line) for line in text.splitlines()])
    names = ("loss", "grad_norm", "experts/max_share", "experts/min_share", "experts/entropy", "experts/aux_loss")
    for one, two in zip(*lines, strict=True):
        assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(recipe: Path, tmp_path: Path) -> None:
    replay = "model.router_replay=true"
    _, straight, run = train_run(recipe, tmp_path / "straight", replay)
    train_run(recipe, tmp_path / "resumed", replay, "train.steps=1")
    _, resumed, again = train_run(recipe, tmp_path / "resumed", replay, "resume=auto")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in straight]
    for name, tensor in run.learner.weights().items():
        assert torch.equal(again.learner.weights()[name], tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"number_bytes": 3}, "number_bytes must be 1 or 2"),
        ({"data": "?"}, "data must be base64"),
        ({"data": base64.b64encode(zlib.compress(bytes(5))).decode()}, "data must have 4 bytes for each of at most"),
    ],
)
def test_a_damaged_record_of_experts_is_refused(change: dict[str, object], message: str) -> None:
    segment = Segment()
    segment.append_context([3, 4, 5])
    segment.routes = Routes(2, 2, 1, bytes(8))
    one = Trajectory(id="t", group="g", row=Row(id="1", messages=[{"role": "user", "content": "?"}]), seed=0)
    one.segments = [segment]
    record = json.loads(trajectory_line(one, MediaStore(None)))
    assert decode_trajectory(record, where="file:1").segments[0].routes == segment.routes
    record["segments"][0]["routes"] |= change
    with pytest.raises(RunError, match=message):
        decode_trajectory(record, where="file:1")
