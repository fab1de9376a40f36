"""Recurrent layers in training: hybrids in all its parts, and prompts that they share."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file

from support.hybrids import CONFIGS, forget_states, hybrid, save_hybrid
from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import train_run
from training.test_batch import group
from training.test_critic import estimated, packing
from training.test_tree import packed_gradient, plain_gradient, random_trajectories, sequences
from turnwise.errors import ConfigError
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
from turnwise.types import Sampling

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
