"""Recurrent layers: hybrids in all parts of training, prompts that they share, and in the embedded engine."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.hybrids import CONFIGS, VOCABULARY, forget_states, hybrid, save_hybrid
from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import train_run
from training.test_batch import group
from training.test_critic import estimated, packing
from training.test_tree import packed_gradient, plain_gradient, random_trajectories, sequences
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.cache import BLOCK, NOTHING_SHARED, SNAPSHOTS, KVCache, KVShape, PrefixCache, StateShape
from turnwise.engines.local.forward import choose_forward
from turnwise.engines.local.fused import FusedForward
from turnwise.engines.local.row_cache import bytes_kept
from turnwise.errors import ConfigError, EngineError
from turnwise.models.loading import ModelSource, load_model, recompute_layers
from turnwise.models.lora import add_adapter, default_targets, merged, save_adapter
from turnwise.options.algorithm import LoraSection, PpoClip
from turnwise.training.batch import MicroBatch, pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.recurrent_tree import Piece, pieces_of
from turnwise.training.tree import FlatRow
from turnwise.training.value_batch import pack_value_targets
from turnwise.types import Completion, Request, Sampling

# Training of models with recurrent layers: what other options do with them, and what is said when their values
# overflow.


KINDS = ["qwen3_5", "lfm2", "falcon_h1"]
"""Linear attention, convolutions, Mamba-2 beside attention."""

TARGETS = {
    # the gate of the shared expert, the router and the experts' stacks are not adapted; peft takes the names of the shared
    # expert's layers for the stacks of qwen3_next, not for those of qwen3_5_moe
    "qwen3_5_moe": "down_proj gate_proj in_proj_a in_proj_b in_proj_qkv in_proj_z k_proj o_proj out_proj q_proj up_proj v_proj",
    "qwen3_next": "in_proj_ba in_proj_qkvz k_proj o_proj out_proj q_proj v_proj",
    "lfm2": "in_proj k_proj out_proj q_proj v_proj w1 w2 w3",
    # a kernel of Mamba reads the weight of out_proj itself
    "falcon_h1": "down_proj gate_proj in_proj k_proj o_proj q_proj up_proj v_proj",
    "mamba": "in_proj",
    "granite_hybrid": "in_proj input_linear k_proj o_proj output_linear q_proj v_proj",
    # the weights of the attention that two layers share could not be merged with two adapters
    "zamba2": "in_proj linear",
    "llama4": "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj",
}


def row_by_row(micro: MicroBatch[Any], model: Any) -> torch.Tensor:
    """Log-probabilities of the targets from a pass over each row alone, without padding."""
    found = []
    for row, column in zip(micro.row_U.tolist(), micro.column_U.tolist(), strict=True):
        ids_1T = micro.token_ids_BL[row : row + 1, : column + 1]
        found.append(model(ids_1T, use_cache=False).logits[0, -1].float().log_softmax(-1))
    own_UV = torch.stack(found)
    return own_UV.gather(1, micro.token_U[:, None])[:, 0][micro.prediction_N]


def packed() -> list[MicroBatch[Any]]:
    return pack(group(), share_prompts=False).micro_batches


@pytest.mark.parametrize("name", KINDS)
def test_padded_rows_and_chunks_of_targets_give_the_gradient_of_each_row_alone(name: str) -> None:
    gradients = []
    for in_chunks in (False, True):
        model = hybrid(name)
        if in_chunks:
            recompute_layers(model)
        forward = Forward(model, Sampling(), chunk_bytes=3 * 4 * 128)
        for micro in packed():
            logprob_N = forward.logprobs(micro)[0] if in_chunks else row_by_row(micro, model)
            (logprob_N * micro.targets.advantage_N).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    expected, actual = gradients
    largest = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    for key, gradient in expected.items():
        assert (gradient is None) == (actual[key] is None), key
        if gradient is not None:
            torch.testing.assert_close(actual[key], gradient, atol=1e-5 * largest, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_autocast_keeps_the_log_probabilities_about_the_same(name: str) -> None:
    (micro, *_) = packed()
    with torch.no_grad():
        exact_N = Forward(hybrid(name), Sampling()).logprobs(micro)[0]
        narrow_N = Forward(hybrid(name), Sampling(), autocast=True).logprobs(micro)[0]
    assert 0.0 < (narrow_N - exact_N).abs().max() < 0.2


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_is_on_linear_layers_that_are_called_and_choose_no_experts(name: str, tmp_path: Path) -> None:
    model = hybrid(name)
    assert {target.rpartition(".")[2] for target in default_targets(model)} == set(TARGETS[name].split())
    add_adapter(model, LoraSection(rank=2, alpha=4.0))
    adapted = {key.split(".lora_A")[0] for key, _ in model.named_parameters() if ".lora_A" in key}
    assert not any("router" in key or "experts." in key or key.endswith("shared_expert_gate") for key in adapted)
    one = LocalLearner(model, sampling=Sampling(), loss=make_loss(PpoClip(kl_coef=0.5)), threads=1)
    first, second = (asyncio.run(one.update([pack(group(), share_prompts=False)], lr=1e-2)) for _ in range(2))
    assert first.grad_norm > 0
    assert (first.kl, second.kl > 1e-4) == (pytest.approx(0.0, abs=1e-6), True)  # the reference is the base model
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(bool(tensor.any()) for key, tensor in saved.items() if ".lora_B" in key)  # each one has an effect
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        whole = merged(hybrid(name), tmp_path)(ids, use_cache=False).logits
        torch.testing.assert_close(whole, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


def test_targets_that_have_no_effect_or_mean_something_else_are_refused() -> None:
    def add(name: str, *targets: str) -> None:
        add_adapter(hybrid(name), LoraSection(rank=2, alpha=4.0, target_modules=list(targets)))

    with pytest.raises(ConfigError, match=r"computes with the weight of backbone.layers.0.mixer.out_proj itself"):
        add("mamba2", "in_proj", "out_proj")
    with pytest.raises(ConfigError, match=r"peft takes 'gate_proj' for the stacked weights of its experts.*q_proj"):
        add("qwen3_next", "q_proj", "gate_proj")


def test_a_critic_of_a_hybrid_learns_returns() -> None:
    one, trajectories, losses = LocalCritic(hybrid("qwen3_5"), threads=1), group(), []
    for _ in range(4):
        estimated(one, trajectories, "turn")
        for conversation, goal in zip(trajectories, (1.0, 0.0, 1.0, -1.0), strict=True):
            conversation.returns = [goal for _ in conversation.values]
        batch = pack_value_targets(trajectories, packing("turn", share_prompts=False))
        losses.append(asyncio.run(one.update([batch], lr=3e-3)).loss)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_critic_of_a_hybrid_gives_the_same_values_and_gradients_over_a_tree(name: str) -> None:
    values, gradients = [], []
    for share_prompts in (True, False):
        model, trajectories = hybrid(name), group()
        one = LocalCritic(model, threads=1)
        with torch.no_grad():
            one._head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
        assert one.requirements.share_prompts
        values.append(estimated(one, trajectories, "token", share_prompts=share_prompts))
        for conversation in trajectories:
            conversation.returns = [[0.5] * len(entry) for entry in conversation.values]
        batch = pack_value_targets(trajectories, packing("token", share_prompts=share_prompts))
        asyncio.run(one.update([batch], lr=0.0))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    flat = [[number for one in kind for entry in one for number in entry] for kind in values]
    assert flat[0] == pytest.approx(flat[1], abs=1e-5)
    assert max(map(abs, flat[0])) > 0.1
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5 * float(gradients[1].abs().max()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "granite_hybrid"])
def test_a_run_with_a_critic_a_copied_reference_and_chunks_of_targets(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = save_recipe(
        tmp_path,
        save_hybrid(tmp_path / "model", name),
        data={"train": str(save_rows(tmp_path / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 6},
        credit={"name": "turn_gae"},
        loss={"kl_coef": 0.1},
        reference={"source": "copy", "sync_every": 1, "sync_weight": 0.5},
        train={"steps": 3, "batch_size": 2, "group_size": 2, "lr": 0.01, "micro_batch_tokens": 100},
        deterministic=True,
    )
    runs = []
    for tokens in (None, 3):
        if tokens is not None:
            forward = Forward.__init__.__kwdefaults__  # the memory for logits, of which a small model needs little
            monkeypatch.setitem(forward, "chunk_bytes", tokens * 4 * 260)
        runs.append(train_run(recipe, tmp_path / f"run-{tokens}", "model.gradient_checkpointing=true")[1])
    whole, in_chunks = runs
    assert [line["step"] for line in whole] == [1, 2, 3]
    assert all(line["ratio/max_deviation"] < 1e-4 for line in whole)
    assert whole[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert whole[1]["kl"] > 1e-7  # half of the first step is in the reference, the other half is not
    assert all(line["tokens/prefix_saved"] > 0 for line in whole)
    for names in ("loss", "grad_norm", "kl", "critic/loss"):
        assert [line[names] for line in in_chunks] == pytest.approx([line[names] for line in whole], rel=1e-3, abs=1e-6)


def test_a_gradient_that_overflows_is_named_with_its_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = hybrid("falcon_h1")
    one = LocalLearner(model, sampling=Sampling(), loss=make_loss(PpoClip()), threads=1)
    before = model.model.layers[1].mamba.in_proj.weight.clone()
    with torch.no_grad():
        model.model.layers[2].mamba.in_proj.weight.mul_(1e30)
    with caplog.at_level(logging.WARNING):
        stats = asyncio.run(one.update([pack(group(), share_prompts=False)], lr=1e-2))
    assert stats.grad_norm != stats.grad_norm
    assert torch.equal(model.model.layers[1].mamba.in_proj.weight, before)
    assert "the first values that are NaN or infinite are those of model.layers.2.mamba" in caplog.text


def test_a_layer_pattern_that_does_not_match_the_weights_is_refused_with_names(tmp_path: Path) -> None:
    hybrid("qwen3_5").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks .*model\.layers\.1\.linear_attn.*layer_types"):
        load_model(ModelSource(path=str(tmp_path), device="cpu"))


# A prefix tree through recurrent layers gives the log-probabilities and the gradient of one pass for each sequence.


QUICK = ("qwen3_5", "lfm2", "llama4", "jamba")

FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(CONFIGS)]


def test_a_row_is_cut_where_sequences_part() -> None:
    row = FlatRow.of([np.array(one) for one in ([1, 2, 3], [1, 2, 4, 5], [1, 6], [7, 8])])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pieces_of(row.runs) == [
        Piece(0, 1, None, 0),
        Piece(1, 1, 0, 1),
        Piece(2, 1, 1, 2),
        Piece(3, 2, 1, 2),
        Piece(5, 1, 0, 1),
        Piece(6, 2, None, 0),
    ]


@given(sequences)
@settings(deadline=None, max_examples=50)
def test_the_pieces_of_a_sequence_are_the_sequence(rows: list[np.ndarray]) -> None:
    row = FlatRow.of(rows)
    pieces = pieces_of(row.runs)
    assert [piece.start for piece in pieces] == np.cumsum([0, *(piece.length for piece in pieces)])[:-1].tolist()
    of_place = [index for index, piece in enumerate(pieces) for _ in range(piece.length)]
    for places in row.places:
        index: int | None = of_place[places[-1]]
        found: list[int] = []
        while index is not None:
            piece = pieces[index]
            found = [*range(piece.start, piece.start + piece.length), *found]
            index = piece.parent
        assert found[: len(places)] == places.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_tree_is_that_of_separate_sequences(family: str) -> None:
    model = hybrid(family)
    trajectories = random_trajectories(1, count=4 if family == "kimi_linear" else 9)  # slow without its kernels
    expected = plain_gradient(model, trajectories)
    assert expected.abs().max() > 1e-3
    for limit in (10_000, 30):
        actual = packed_gradient(model, trajectories, micro_batch_tokens=limit)
        torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)


def test_attention_in_chunks_whose_queries_are_scaled_by_position_computes_trees() -> None:
    model = hybrid("llama4")
    assert try_tree_attention(model)
    (micro,) = pack(random_trajectories(3)).micro_batches
    with torch.no_grad():
        scaled, _ = Forward(model, Sampling()).logprobs(micro)
        for module in model.modules():
            if hasattr(module, "floor_scale"):
                module.floor_scale = 8192
        plain, _ = Forward(model, Sampling()).logprobs(micro)
    assert float((scaled - plain).abs().max()) > 1e-3


@pytest.mark.slow
def test_layers_are_computed_again_from_the_states_of_the_tree() -> None:
    model = hybrid("qwen3_5")
    trajectories = random_trajectories(2)
    expected = plain_gradient(model, trajectories)
    recompute_layers(model)
    actual = packed_gradient(model, trajectories)
    torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)


def test_a_copy_of_a_model_computes_trees_with_its_own_weights() -> None:
    model = hybrid("qwen3_5")
    assert try_tree_attention(model)
    copied = copy.deepcopy(model)
    (micro,) = pack(random_trajectories(3)).micro_batches
    with torch.no_grad():
        before, _ = Forward(model, Sampling()).logprobs(micro)
        for parameter in model.parameters():
            parameter.zero_()
        after, _ = Forward(copied, Sampling()).logprobs(micro)
    assert torch.equal(before, after)


def test_layers_that_do_not_continue_from_a_state_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid(forget_states(monkeypatch))
    forwards = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert not try_tree_attention(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == forwards


# Models with recurrent layers in the embedded engine: what is sampled is what one pass over the whole sequence says


QUICK_SAMPLED = ["qwen3_5", "lfm2", "granite_hybrid", "falcon_h1", "jamba", "llama4"]
"""One of each kind of layers: linear attention, convolutions, Mamba-2, both in one layer, Mamba-1, chunks."""
FAMILIES_SAMPLED = [name if name in QUICK_SAMPLED else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@dataclass
class Sampled:
    """A completion, and the conversation up to its end."""

    tokens: list[int]
    start: int
    logprobs: list[float]
    cached: int
    prompt: int


def random_tokens(random: np.random.Generator, low: int, high: int) -> list[int]:
    return random.integers(3, VOCABULARY, int(random.integers(low, high))).tolist()


async def converse(engine: LocalEngine, number: int, prompt: list[int], turns: int) -> list[Sampled]:
    random, tokens, sampled = np.random.default_rng(number), list(prompt), []
    for turn in range(turns):
        sampling = Sampling(max_tokens=int(random.integers(3, 9)), temperature=1.0)
        completion = await engine.generate(
            Request(conversation=f"c{number}", token_ids=list(tokens), sampling=sampling, seed=100 * number + turn)
        )
        start = len(tokens)
        tokens += completion.token_ids
        sampled.append(
            Sampled(list(tokens), start, list(completion.logprobs), completion.cached_tokens, completion.prompt_tokens)
        )
        if turn == 1 and number % 3 == 0:
            tokens = tokens[: start + 1]  # cut inside the turn
        if turn == 2 and number % 4 == 1:
            tokens = list(prompt)  # what came after the prompt is rewritten
        tokens += random_tokens(random, 1, 9)
    engine.release(f"c{number}")
    return sampled


def hold(model: PreTrainedModel, *, conversations: int = 5, turns: int = 3, rows: int | None = None) -> list[Sampled]:
    """Conversations in groups of four, all at the same time. `rows`: the memory that so many long conversations need."""

    async def run() -> list[Sampled]:
        engine = LocalEngine(model, threads=1, context=512)
        if rows is not None:
            kv = engine._core.cache.kv
            engine = LocalEngine(
                model, threads=1, context=512, memory_gb=rows * (kv.row_bytes + 100 * kv.token_bytes) / 2**30
            )
        random = np.random.default_rng(0)
        prompts = [random_tokens(random, 9, 40) for _ in range(-(-conversations // 4))]
        held = await asyncio.gather(*(converse(engine, n, prompts[n // 4], turns) for n in range(conversations)))
        if rows is not None:
            assert engine.stats.evictions + engine.stats.preemptions > 0
            assert engine.cache_bytes <= rows * (kv.row_bytes + 100 * kv.token_bytes)
        await engine.close()
        return [one for conversation in held for one in conversation]

    return asyncio.run(run())


def largest_difference(model: PreTrainedModel, sampled: list[Sampled]) -> float:
    """Between the log-probabilities of sampled tokens and those of a pass over the whole sequence without a cache."""
    differences = []
    for one in sampled:
        ids = torch.tensor([one.tokens])
        with torch.no_grad():
            all_TV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        own_N = all_TV[one.start - 1 : -1].gather(1, ids[0, one.start :, None]).squeeze(1)
        differences.append((own_N - torch.tensor(one.logprobs)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("family", FAMILIES_SAMPLED)
def test_conversations_of_many_turns_are_sampled_from_what_one_pass_says(family: str) -> None:
    model = hybrid(family)
    sampled = hold(model)
    assert largest_difference(model, sampled) < 2e-5


@pytest.mark.parametrize("family", FAMILIES_SAMPLED)
def test_greedy_equals_generate(family: str) -> None:
    model, prompt = hybrid(family), [5, 9, 17, 33, 60, 4, 21]
    ids = torch.tensor([prompt])
    own = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )

    async def ask() -> list[int]:
        engine = LocalEngine(model, threads=1, context=128)
        completion = await engine.generate(
            Request(conversation="a", token_ids=prompt, sampling=Sampling(max_tokens=12, temperature=0.0), seed=0)
        )
        await engine.close()
        return completion.token_ids

    assert asyncio.run(ask()) == own[0, len(prompt) :].tolist()


FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    # all factors of Granite, several groups of states, and no experts
    "granite": (
        "granite_hybrid",
        {
            "num_local_experts": 0,
            "mamba_n_groups": 2,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    # all factors of Falcon-H1, and a norm of groups before the gate
    "falcon": (
        "falcon_h1",
        {
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.5,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [0.9, 0.6],
        },
    ),
    "nemotron": ("nemotron_h", {"n_groups": 2}),
}
"""Models with options that tests/support/hybrids.py leaves out."""


def fused_hybrid(name: str) -> PreTrainedModel:
    """A model that the fused pass runs."""
    if name not in FUSED:
        return hybrid(name)
    torch.manual_seed(0)
    family, options = FUSED[name]
    config = CONFIGS[family]()
    for option, value in options.items():
        assert hasattr(config, option)
        setattr(config, option, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        *((name, adapted) for name in ("qwen3_5", "lfm2", "granite") for adapted in (False, True)),
        ("qwen3_next", True),  # projections of several things in another order, and experts
        ("granite_hybrid", False),  # experts beside a feed-forward layer
        ("bamba", False),
        ("falcon_h1", False),  # no norm after Mamba 2
        ("falcon", True),
        ("nemotron", True),
    ],
)
def test_sequences_of_different_lengths_are_computed_together_and_padding_changes_no_state(
    name: str, adapted: bool
) -> None:
    model = fused_hybrid(name)
    if adapted:
        add_adapter(model, LoraSection(rank=4, alpha=8.0))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.1)
    forward = choose_forward(model)
    assert isinstance(forward, FusedForward)
    kv = KVCache(
        forward.kv_shapes, forward.state_shapes, dtype=torch.float32, device=torch.device("cpu"), budget_bytes=1 << 30
    )
    kv.resize(6, 256)
    random, rows = np.random.default_rng(0), np.array([4, 0, 2])
    # shorter than a window, and longer than a chunk; the second part continues from a state; row 3 lies between and is not run
    parts = [
        [random.integers(3, VOCABULARY, length) for length in lengths]
        for lengths in ((2, 90, 17), (33, 1, 70), (1, 1, 1))
    ]
    for states in kv.states:
        states[:, 3] = 7.0
    starts = np.zeros(3, dtype=np.int64)
    with forward.inference():
        for part in parts[:-1]:
            forward.prefill(kv, rows, starts, part)
            starts = starts + np.array([len(tokens) for tokens in part])
        order = rows.argsort()
        last = np.array([tokens[0] for tokens in parts[-1]])
        logits_BV = forward.decode(kv, rows[order], starts[order], last[order], NOTHING_SHARED)
    assert all(bool((states[:, 3] == 7.0).all()) for states in kv.states)
    for place, number in enumerate(order):
        ids = torch.from_numpy(np.concatenate([part[number] for part in parts]))[None]
        with torch.no_grad():
            own_V = model(input_ids=ids, use_cache=False).logits[0, -1]
        assert float((logits_BV[place] - own_V).abs().max()) < 1e-5 * max(1.0, float(own_V.abs().max()))


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_evicted_and_preempted_conversations_are_computed_again(family: str) -> None:
    model = hybrid(family)
    assert largest_difference(model, hold(model, rows=3)) < 2e-5


def test_a_turn_computes_the_bridge_only_and_samples_of_a_prompt_nothing() -> None:
    model, prompt = hybrid("qwen3_5"), list(range(3, 43))

    async def run() -> list[tuple[int, int]]:
        engine = LocalEngine(model, threads=1, context=512)

        def ask(conversation: str, token_ids: list[int], seed: int) -> Request:
            sampling = Sampling(max_tokens=5, temperature=1.0)
            return Request(conversation=conversation, token_ids=token_ids, sampling=sampling, seed=seed)

        first = await asyncio.gather(*(engine.generate(ask(f"{n}", prompt, n)) for n in range(3)))
        tokens = [*prompt, *first[0].token_ids, 50, 51, 52]
        second = await engine.generate(ask("0", tokens, 0))
        # a fourth sample, when the state after the prompt is no longer the current one of any slot
        late = await engine.generate(ask("3", prompt, 9))
        # the second turn is cut after two tokens and goes on otherwise: from the second prompt, whose last token is not computed
        cut = [*tokens, *second.token_ids[:2], 60, 61]
        edited = await engine.generate(ask("0", cut, 0))
        await engine.close()
        return [(one.cached_tokens, one.prompt_tokens) for one in (*first, second, late, edited)]

    cached = asyncio.run(run())
    # what the first slot has after its turn: the prompt, and the sampled tokens but the last
    assert cached == [(0, 40), (39, 40), (39, 40), (44, 48), (39, 40), (47, 52)]


@pytest.mark.slow
def test_a_model_that_does_not_continue_from_a_state_is_run_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("olmo_hybrid", "jamba", "mamba"):
        assert not LocalEngine(hybrid(family), threads=1, context=512)._core.forward.token_by_token  # type: ignore[attr-defined]
    model = hybrid(forget_states(monkeypatch))
    assert LocalEngine(model, threads=1, context=512)._core.forward.token_by_token  # type: ignore[attr-defined]
    assert largest_difference(model, hold(model)) < 2e-5


@pytest.mark.parametrize("family", ["falcon_h1", "jamba"])  # the fused pass, and the model's
def test_a_state_that_overflows_ends_its_conversation_and_is_named_with_its_layer(family: str) -> None:
    model, good, bad = hybrid(family), list(range(3, 20)), [*range(3, 20), 77]

    async def run() -> tuple[list[int], list[int], str]:
        engine = LocalEngine(model, threads=1, context=128)

        async def ask(conversation: str, prompt: list[int]) -> list[int]:
            request = Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=6), seed=1)
            return (await engine.generate(request)).token_ids

        alone = await ask("alone", good)
        with torch.no_grad():  # after the checks of the start, as when a run diverges
            model.get_input_embeddings().weight[77] = torch.inf
        beside, failed = await asyncio.gather(ask("good", good), ask("bad", bad), return_exceptions=True)
        assert isinstance(failed, EngineError)
        # the row is used again
        rows = [await ask(f"{number}", [number, *good]) for number in range(90, 100)]
        assert len(rows) == 10
        await engine.close()
        return alone, beside, str(failed)  # type: ignore[return-value]

    alone, beside, failed = asyncio.run(run())
    assert beside == alone
    assert "gives NaN or infinite logits after 18 tokens, first in model.embed_tokens (Embedding)" in failed


def test_weights_that_overflow_at_the_start_are_named_with_their_layer() -> None:
    model = hybrid("falcon_h1")
    with torch.no_grad():
        model.model.layers[2].mamba.in_proj.weight.mul_(1e30)
    with pytest.raises(EngineError, match=r"logits that are NaN or infinite, first in model\.layers\.2\.mamba"):
        LocalEngine(model, threads=1)


@pytest.mark.slow
def test_after_new_weights_an_engine_samples_bit_by_bit_as_one_that_is_new() -> None:
    """So does that of a run that is resumed: nothing of earlier steps decides how products are summed up."""
    model = hybrid("llama4")

    async def sample(engine: LocalEngine, step: int) -> list[list[float]]:
        random, found = np.random.default_rng(step), list[list[float]]()
        prompts = [random_tokens(random, 20, 40) for _ in range(3)]
        histories = [list(prompts[index // 4]) for index in range(12)]
        for turn in range(3):
            asked = [
                Request(
                    conversation=f"{step}/{index}",
                    token_ids=list(history),
                    sampling=Sampling(max_tokens=int(random.integers(4, 30)), stop_token_ids=(5, 6, 7)),
                    seed=1000 * step + 10 * index + turn,
                )
                for index, history in enumerate(histories)
            ]
            said = await asyncio.gather(*map(engine.generate, asked))
            for history, one in zip(histories, said, strict=True):
                history += [*one.token_ids, *random_tokens(random, 2, 9)]
            found += [list(one.logprobs) for one in said]
        for index in range(12):
            engine.release(f"{step}/{index}")
        return found

    async def run() -> None:
        used = LocalEngine(model, threads=1, context=256)
        for step in range(3):
            new = LocalEngine(model, threads=1, context=256)
            assert await sample(used, step) == await sample(new, step), step
            await new.close()
            await used.load_weights(step + 1)
        await used.close()

    asyncio.run(run())


def test_a_snapshot_of_tokens_that_a_conversation_no_longer_has_is_not_used() -> None:
    """A conversation goes on from a prefix of another one, which is longer than that to which its own snapshot belongs."""
    model, random = hybrid("qwen3_5"), np.random.default_rng(0)
    engine = LocalEngine(model, threads=1, context=512)
    shared, own = random_tokens(random, 80, 81), random_tokens(random, 40, 41)
    prompts = [("b", shared), ("a", own), ("a", [*shared, *random_tokens(random, 5, 6)])]
    prompts += [(name, [*shared[:39], *random_tokens(random, 9, 10)]) for name in ("c", "a")]

    async def run() -> list[Completion]:
        asked = [Request(conversation=name, token_ids=ids, sampling=Sampling(max_tokens=3)) for name, ids in prompts]
        return [await engine.generate(request) for request in asked]

    for (_, before), said in zip(prompts, asyncio.run(run()), strict=True):
        ids = torch.tensor([[*before, *said.token_ids]])
        with torch.no_grad():
            logprobs_TV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = [float(logprobs_TV[len(before) - 1 + n, token]) for n, token in enumerate(said.token_ids)]
        assert said.logprobs == pytest.approx(expected, abs=1e-5)


def test_memory_smaller_than_one_state_is_refused() -> None:
    with pytest.raises(EngineError, match=r"memory_gb is .*recurrent states of one conversation of Qwen3_5ForCausalLM"):
        LocalEngine(hybrid("qwen3_5"), threads=1, memory_gb=1e-6)


def cache_of_states() -> PrefixCache:
    shapes, states = [KVShape(1, 1, 1)], [StateShape((1,), torch.float32)]
    kv = KVCache(shapes, states, dtype=torch.float32, device=torch.device("cpu"), budget_bytes=1 << 20)
    return PrefixCache(kv, num_slots=4, context=512)


def prefill(cache: PrefixCache, conversation: str, tokens_N: np.ndarray, state: float) -> int:
    slot = cache.allocate(len(tokens_N), ())
    assert slot is not None
    cache.start_request(slot, conversation, tokens_N, 0)
    cache.kv.states[0][0, cache.row_S[slot]] = state
    cache.finish_prefill(slot, len(tokens_N))
    cache.save_states([slot])
    return slot


def test_a_prefix_is_reused_only_where_a_state_is() -> None:
    cache, tokens_N = cache_of_states(), np.arange(100, dtype=np.int32)
    slot = prefill(cache, "a", tokens_N[:50], 50.0)
    cache.length_S[slot] = 60  # sampled
    cache.tokens_SC[slot, :60] = tokens_N[:60]
    cache.finish_request(slot)
    found = [cache.longest_prefix(tokens_N[:length])[0] for length in (49, 50, 59, 60, 100)]
    assert [(match.tokens, match.state) for match in found] == [(0, 0), (50, 1), (50, 1), (60, 0), (60, 0)]
    assert cache.longest_prefix(np.append(tokens_N[:55], 7))[0].tokens == 50
    own = [cache.own_prefix(slot, tokens_N[:length]) for length in (BLOCK, 50, 59, 60, 61)]
    assert [(match.tokens, match.state) for match in own] == [(0, 0), (50, 1), (50, 1), (60, 0), (60, 0)]


def test_states_move_with_their_rows() -> None:
    cache = cache_of_states()
    slots = [prefill(cache, name, np.arange(20, dtype=np.int32) + 40 * n, float(n)) for n, name in enumerate("abc")]
    cache.compact([slots[2]])
    assert cache.row_S[slots[2]] == 0
    states = [cache.kv.states[0][kept, cache.row_S[slot], 0].item() for slot in slots for kept in (0, 1)]
    assert states == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    cache.ensure_capacity(300)
    states = [cache.kv.states[0][kept, cache.row_S[slot], 0].item() for slot in slots for kept in (0, 1)]
    assert states == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite_hybrid", "falcon_h1"])
def test_the_memory_is_known_without_weights(family: str) -> None:
    kv = LocalEngine(hybrid(family), threads=1, context=512)._core.cache.kv
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval()
    assert bytes_kept(empty, torch.float32) == (kv.token_bytes, kv.row_bytes)


def test_memory_counts_states_and_their_snapshots() -> None:
    kv = KVCache(
        [KVShape(2, 1, 4)],
        [StateShape((3, 5), torch.float32), StateShape((2,), torch.bfloat16)],
        dtype=torch.float32,
        device=torch.device("cpu"),
        budget_bytes=10_000,
    )
    assert kv.row_bytes == (1 + SNAPSHOTS) * (60 + 4)
    kv.resize(4, 10)
    assert kv.bytes == 4 * (10 * 32 + kv.row_bytes)
    assert kv.max_rows(100) == 10_000 // (100 * 32 + kv.row_bytes)
    assert kv.max_capacity() == (10_000 - kv.row_bytes) // 32
