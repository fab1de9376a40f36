"""A prefix tree of any depth gives the log-probabilities and the gradient of one plain forward pass for each sequence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import turnwise.training.tree
from support.fake_cuda import fake_cuda
from support.tiny import tiny_model
from training.test_batch import group, targets, trajectory
from training.test_precision import EXPERTS, SIZES, made
from turnwise.models.loading import use_complete_attention
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, _small_in_float32, _with_tree, try_tree_attention
from turnwise.training.tree import FlatRow, Tree, _TreeMask, shared_prefix, tree_attention, use_tree_attention
from turnwise.types import Sampling, Trajectory

WINDOW = 4

MIXED = ["sliding_attention", "full_attention"]

NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
"""Keys have 12 numbers. A layer without and a layer with experts."""

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "qwen2": lambda: hf.Qwen2Config(**NO_HEAD_DIM),
    "qwen2 with windows in some layers": lambda: hf.Qwen2Config(
        **NO_HEAD_DIM, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED
    ),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "mistral with windows": lambda: hf.MistralConfig(**SIZES, sliding_window=WINDOW),
    "phi3 with windows": lambda: hf.Phi3Config(**NO_HEAD_DIM, sliding_window=WINDOW),
    "gemma": lambda: hf.GemmaConfig(**SIZES),
    "gemma2 without soft caps, with windows": lambda: hf.Gemma2Config(
        **SIZES, attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=WINDOW
    ),
    "soft caps and windows": lambda: hf.Gemma2Config(
        **SIZES,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=1,
        sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    "gemma3 with windows": lambda: hf.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=MIXED),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, **EXPERTS),
    "latent attention, with smaller values": lambda: hf.DeepseekV3Config(**{**NO_HEAD_DIM, **LATENT}, v_head_dim=4),
    "latent attention, with larger values": lambda: hf.DeepseekV3Config(**{**NO_HEAD_DIM, **LATENT}, v_head_dim=24),
    "sinks and windows": lambda: hf.GptOssConfig(**SIZES, **EXPERTS, layer_types=MIXED, sliding_window=WINDOW),
    "qwen3 moe": lambda: hf.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
}


def random_trajectories(seed: int, count: int = 9) -> list[Trajectory]:
    """Conversations of several groups and segments whose histories have common prefixes of random lengths, also sampled ones."""
    rng = random.Random(seed)
    system = [5, 6, 7, 8]
    known: list[list[tuple[str, list[int]]]] = [[("context", system)]]
    trajectories: list[Trajectory] = []
    for number in range(count):
        pieces: list[tuple[str, list[int]]] = []
        turns = 0
        for segment in range(rng.choice((1, 1, 2))):
            if segment:
                pieces.append(("new segment", []))
            # continue a history of any conversation, or begin with the common system prompt
            history = list(rng.choice(known))
            while len(history) < 2 or rng.random() < 0.5:
                kind = "turn" if history[-1][0] == "context" else "context"
                # a small vocabulary: continuations often begin with the same tokens
                history.append((kind, [rng.choice((11, 12, 13)) for _ in range(rng.randint(1, 5))]))
                known.append(list(history))
            if history[-1][0] == "context":
                history.append(("turn", [rng.choice((11, 12, 13)), 2]))
            pieces += history
            turns += sum(kind == "turn" for kind, _ in history)
        advantages = [rng.choice((-1.0, 0.5, 2.0)) for _ in range(turns)]
        trajectories.append(trajectory(f"t{number}", pieces, advantages, group=f"g{number % 3}"))
    return trajectories


def plain_gradient(model: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """The gradient of the mean of `advantage * logprob` over all sampled tokens, one plain forward pass for each segment."""
    count = sum(turn >= 0 for one in trajectories for segment in one.segments for turn in segment.turn)
    for one in trajectories:
        for segment in one.segments:
            ids = torch.tensor([list(segment.token_ids)])
            logprob_TV = model(ids, use_cache=False).logits[0].log_softmax(-1)
            terms: list[torch.Tensor] = []
            for place, turn in enumerate(segment.turn):
                if turn >= 0:
                    advantage = one.advantages[turn]
                    assert isinstance(advantage, float)
                    terms.append(logprob_TV[place - 1, ids[0, place]] * advantage / count)
            torch.stack(terms).sum().backward()
    return flat_gradient(model)


def packed_gradient(model: Any, trajectories: Sequence[Trajectory], **options: Any) -> torch.Tensor:
    assert try_tree_attention(model)
    forward = Forward(model, Sampling())
    for micro in pack(trajectories, **options).micro_batches:
        logprob_N, _ = forward.logprobs(micro)
        (logprob_N * micro.targets.advantage_N * micro.targets.weight_N).sum().backward()
    return flat_gradient(model)


def flat_gradient(model: Any) -> torch.Tensor:
    """All gradients in one vector; they are cleared."""
    parameters = list(model.parameters())
    gradient = torch.cat(
        [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in parameters]
    )
    model.zero_grad(set_to_none=True)
    return gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_tree_is_that_of_separate_sequences(family: str) -> None:
    model = made(FAMILIES[family]()).double()
    use_complete_attention(model)  # as a loaded model has it
    model.set_experts_implementation("eager")  # the others do not compute in float64
    trajectories = random_trajectories(1)
    expected = plain_gradient(model, trajectories)
    assert expected.abs().max() > 1e-3
    for limit in (10_000, 30):
        actual = packed_gradient(model, trajectories, micro_batch_tokens=limit)
        # transformers' norms and rotary embeddings compute in float32
        torch.testing.assert_close(actual, expected, atol=1e-7 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("seed", range(2, 8))
def test_random_trees_give_the_gradient_of_separate_sequences(seed: int) -> None:
    model = tiny_model().double()
    trajectories = random_trajectories(seed, count=14)
    expected = plain_gradient(model, trajectories)
    for limit in (10_000, 40, 1):
        actual = packed_gradient(model, trajectories, micro_batch_tokens=limit)
        torch.testing.assert_close(actual, expected, atol=1e-6 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3 with windows"])
def test_a_tree_is_exact_when_gradient_checkpointing_computes_its_layers_again(family: str) -> None:
    model = made(FAMILIES[family]()).double()
    trajectories = random_trajectories(1)
    expected = plain_gradient(model, trajectories)
    for layer in model.model.layers:
        plain = layer.forward
        layer.forward = lambda *arguments, plain=plain, **options: checkpoint(
            plain, *arguments, use_reentrant=False, **options
        )
    actual = packed_gradient(model, trajectories)
    torch.testing.assert_close(actual, expected, atol=1e-7 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_of_a_tree_keeps_no_keys_of_each_run(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 50)
    sequences = sorted((np.concatenate([prompt, rng.integers(0, 9, 10)]) for _ in range(8)), key=lambda ids: list(ids))
    row = FlatRow.of(sequences)
    tree, tokens = Tree.of(row.runs), len(row.token_ids)
    query, key, value = (torch.randn(heads, tokens, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = _TreeMask(tree, None, False).attend(query, key, value, None)
    # queries, keys, values, the output, and a number for each query; the keys of the runs would be 8 x 60 x 2 x 2 x 16 more
    rows = sum(bucket.query_NR.numel() for bucket in tree.buckets)
    assert sum(kept.values()) == tokens * 16 * (4 + 2 + 2 + 4) + rows * 4
    of_output = torch.randn_like(output)
    gradients = torch.autograd.grad(output, (query, key, value), of_output)
    exact = [part.detach().double().requires_grad_() for part in (query, key, value)]
    seen = np.zeros((tokens, tokens), dtype=bool)
    for places in row.places:
        seen[places[:, None], places] |= np.tri(len(places), dtype=bool)
    keys, values = (part.repeat_interleave(2, dim=0) for part in exact[1:])
    scores = (exact[0] @ keys.mT / 4).masked_fill(torch.from_numpy(~seen), -torch.inf)
    expected = (scores.softmax(dim=-1) @ values).transpose(0, 1)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    for actual, gradient in zip(gradients, torch.autograd.grad(expected, exact, of_output.double()), strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), gradient, atol=tolerance, rtol=tolerance)


def test_a_sampled_token_that_two_sequences_share_is_one_prediction_and_two_targets() -> None:
    first = trajectory("a", [("context", [5, 6]), ("turn", [7, 8, 2])], [1.0])
    second = trajectory("b", [("context", [5, 6]), ("turn", [7, 9, 2])], [-3.0])
    batch = pack([first, second])
    (micro,) = batch.micro_batches
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 8, 2, 9, 2]]
    assert micro.position_BL.tolist() == [[0, 1, 2, 3, 4, 3, 4]]
    assert list(zip(micro.column_U.tolist(), micro.token_U.tolist(), strict=True)) == [
        (1, 7),
        (2, 8),
        (2, 9),
        (3, 2),
        (5, 2),
    ]
    assert micro.targets.token_N.tolist() == [7, 8, 2, 7, 9, 2]
    assert micro.targets.advantage_N.tolist() == [1.0, 1.0, 1.0, -3.0, -3.0, -3.0]
    assert micro.token_U[micro.prediction_N].tolist() == micro.targets.token_N.tolist()
    assert (batch.sequence_tokens, batch.computed_tokens) == (10, 7)


def test_groups_share_a_system_prompt_and_segments_a_history() -> None:
    system = [5, 6, 7, 8, 9, 10]
    other_group = trajectory("a", [("context", [*system, 20]), ("turn", [21, 2])], [1.0], group="h")
    rewritten = trajectory(
        "b",
        [
            *[("context", [*system, 30]), ("turn", [31, 2]), ("context", [32]), ("turn", [33, 2])],
            *[("new segment", []), ("context", [*system, 30]), ("turn", [31, 2]), ("context", [40]), ("turn", [41, 2])],
        ],
        [1.0, 1.0, 1.0, 1.0],
    )
    batch = pack([other_group, rewritten])
    (micro,) = batch.micro_batches
    assert micro.token_ids_BL.tolist() == [[*system, 20, 21, 2, *[30, 31, 2, 32, 33, 2], *[40, 41, 2]]]
    assert targets(batch) == targets(pack([other_group, rewritten], share_prompts=False))
    assert batch.computed_tokens == 18
    assert batch.sequence_tokens == 9 + 12 + 12


def test_models_with_attention_in_chunks_share_prefixes() -> None:
    chunks = {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0]}
    model = made(hf.Llama4TextConfig(**SIZES, **chunks))
    assert try_tree_attention(model)


def test_soft_caps_change_what_a_tree_computes() -> None:
    """Otherwise the test of all families would not notice that they are missing."""
    capped, free = made(FAMILIES["soft caps and windows"]()), made(FAMILIES["soft caps and windows"]())
    for layer in free.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    ids = torch.arange(3, 20)[None]
    for model in (capped, free):
        use_complete_attention(model)
        assert try_tree_attention(model)
    with torch.no_grad():
        assert (capped(ids, use_cache=False).logits - free(ids, use_cache=False).logits).abs().max() > 1e-3


def enlarging(factor: float = 1000.0) -> Any:
    """A bfloat16 model whose logits are large, so that rounding moves them far."""
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    placed: Any = model.to("cuda")
    return placed.to(torch.bfloat16)


def test_rounding_in_bfloat16_does_not_keep_prompts_from_being_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels compute calls with a mask on a GPU. A trained model enlarges their rounding: of SmolLM2-135M, logits move by
    51 times the tolerance. Its architecture is tested in float32 instead."""
    plain, mask_of = F.scaled_dot_product_attention, turnwise.training.tree.additive_mask

    def other_kernel(query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        if options["attn_mask"] is None:
            return plain(query, *others, **options)
        options["attn_mask"] = options["attn_mask"].float()
        return plain(query.float(), *(other.float() for other in others), **options).to(query.dtype)

    monkeypatch.setattr(F, "scaled_dot_product_attention", other_kernel)
    with fake_cuda():
        model = enlarging()
        before = model.config._attn_implementation
        assert not _with_tree(model, gradients=False)
        assert model.config._attn_implementation == before
        assert try_tree_attention(model)
        assert model.config._attn_implementation != before
        # what is wrong in the architecture is found all the same
        monkeypatch.setattr(
            "turnwise.training.tree.additive_mask", lambda hidden, dtype: mask_of(hidden & False, dtype)
        )
        assert not try_tree_attention(enlarging())


@pytest.mark.parametrize("family", ["qwen3", "gemma3", pytest.param("qwen3_next", marks=pytest.mark.slow), "gpt_oss"])
def test_the_small_model_has_the_layers_of_the_large_one(family: str) -> None:
    layers = {
        "qwen3": hf.Qwen3Config(**{**SIZES, "num_hidden_layers": 9}),
        "gemma3": hf.Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 13}),
        "qwen3_next": hf.Qwen3NextConfig(**{**SIZES, "num_hidden_layers": 8}),
        "gpt_oss": hf.GptOssConfig(**{**SIZES, "num_hidden_layers": 6}),
    }[family]
    model = hf.AutoModelForCausalLM.from_config(layers, dtype=torch.bfloat16)
    small = _small_in_float32(model)
    assert small is not None
    assert type(small) is type(model)
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
    assert small.get_input_embeddings().num_embeddings == 64
    types, few = getattr(layers, "layer_types", None), getattr(small.config, "layer_types", None)
    if types is not None:
        assert set(few) == set(types)
        assert len(few) == small.config.num_hidden_layers <= 6


def test_on_an_accelerator_all_layers_add_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mask of booleans torch makes such a summand in each layer, and keeps it for the backward pass. Its rows begin at
    multiples of eight numbers, or each layer would copy it."""
    seen: list[torch.Tensor] = []
    plain = F.scaled_dot_product_attention

    def note(*arguments: Any, **options: Any) -> torch.Tensor:
        if options["attn_mask"] is not None:
            seen.append(options["attn_mask"])
            assert not options["enable_gqa"]
        return plain(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    with fake_cuda() as traffic:
        model: Any = tiny_model(num_hidden_layers=3).to("cuda").to(torch.bfloat16)
        use_tree_attention(model)
        row = FlatRow.of([np.array(one) for one in ([1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8, 9, 10])])
        ids, position = (torch.from_numpy(values[None]).to("cuda") for values in (row.token_ids, row.position))
        with tree_attention(Tree.of(row.runs).to(torch.device("cuda"))):
            model(ids, position_ids=position, use_cache=False)
    assert not traffic.mixed
    buckets = len(seen) // 3
    assert buckets > 0
    assert len({id(mask) for mask in seen}) == buckets
    for mask in seen:
        assert mask.dtype == torch.bfloat16
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


sequences = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=9).map(lambda ids: np.array(ids, dtype=np.int64)),
    min_size=1,
    max_size=12,
).map(lambda rows: sorted(rows, key=lambda row: row.tolist()))


@given(sequences)
@settings(deadline=None)
def test_a_flat_row_contains_each_prefix_once(rows: list[np.ndarray]) -> None:
    row = FlatRow.of(rows)
    prefixes = {tuple(one[: end + 1].tolist()) for one in rows for end in range(len(one))}
    assert len(row.token_ids) == len(prefixes)
    place_of: dict[tuple[int, ...], int] = {}
    for one, places in zip(rows, row.places, strict=True):
        assert row.token_ids[places].tolist() == one.tolist()
        assert row.position[places].tolist() == list(range(len(one)))
        for end, place in enumerate(places.tolist()):
            assert place_of.setdefault(tuple(one[: end + 1].tolist()), place) == place


@given(sequences)
@settings(deadline=None)
def test_a_token_of_a_tree_sees_the_prefix_that_ends_with_it(rows: list[np.ndarray]) -> None:
    """With equal scores, attention is the mean of the values, so that the result is the mean of the tokens that are seen."""
    row = FlatRow.of(rows)
    tree = Tree.of(row.runs)
    zeros = torch.zeros(len(row.token_ids), 2, 4, dtype=torch.float64)
    values = torch.from_numpy(row.token_ids).double()[:, None, None].expand(-1, 2, 4)
    for window in (None, 2):
        results = torch.cat([bucket.attend(zeros, zeros, values, bucket.mask(window), None) for bucket in tree.buckets])
        mean_T = results[tree.place_T][:, 0, 0]
        for one, places in zip(rows, row.places, strict=True):
            for end, place in enumerate(places.tolist()):
                seen = one[: end + 1] if window is None else one[max(0, end + 1 - window) : end + 1]
                assert float(mean_T[place]) == pytest.approx(float(seen.mean()))


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_have_the_same_results_and_gradients_on_an_accelerator_and_a_cpu(window: int | None) -> None:
    """A sink is one more key with a score of its own and the value 0: four heads, two heads of keys."""
    row = FlatRow.of([np.array(one) for one in ([1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8, 9, 10])])
    tree, count = Tree.of(row.runs), len(row.token_ids)
    mask = _TreeMask(tree, window, False)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value, sink = drawn(4, count, 8), drawn(2, count, 8), drawn(2, count, 8), drawn(4)
    weight = torch.randn(count, 4, 8, generator=generator, dtype=torch.float64)

    def accelerator() -> torch.Tensor:
        heads = (part.transpose(0, 1) for part in (query, key, value))
        query_THD, key_THD, value_THD = heads
        results = [
            bucket.attend(query_THD, key_THD, value_THD, seen, None, sink)
            for bucket, seen in zip(tree.buckets, [one.mask(window) for one in tree.buckets], strict=True)
        ]
        return torch.cat(results)[tree.place_T]

    found = []
    for compute in (accelerator, lambda: mask.attend(query, key, value, None, sink)):
        result = compute()
        found.append([result, *torch.autograd.grad((result * weight).sum(), (query, key, value, sink))])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-8)
    # the first token of a sequence sees itself and the sink
    score = (query[0, 0] @ key[0, 0]) * 8**-0.5
    share = torch.sigmoid(score - sink[0])
    torch.testing.assert_close(found[0][0][0, 0], share * value[0, 0])


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (6, False), (6, True)])
@pytest.mark.parametrize("kind", ["plain", "sinks", "soft cap"])
def test_large_masks_are_made_in_pieces_with_the_keys_that_are_seen(
    kind: str, window: int | None, chunked: bool, accelerated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 40, 23 and 9 tokens, two of which continue a part of the first."""
    first = np.arange(40)
    row = FlatRow.of([first, np.concatenate([first[:17], 100 + np.arange(23)]), np.concatenate([first[:30], [7] * 9])])
    whole = Tree.of(row.runs)
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(heads, len(row.token_ids), 8, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value = drawn(4), drawn(2), drawn(2)
    sink = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_() if kind == "sinks" else None
    inputs = [one for one in (query, key, value, sink) if one is not None]
    weight = torch.randn(len(row.token_ids), 4, 8, generator=generator, dtype=torch.float64)
    masked: list[int] = []
    made = _TreeMask._made

    def noted(self: _TreeMask, bucket: Any, dtype: torch.dtype) -> torch.Tensor | None:
        mask = made(self, bucket, dtype)
        masked.append(0 if mask is None else mask.numel())
        return mask

    monkeypatch.setattr(_TreeMask, "_made", noted)

    def computed(on_accelerator: bool) -> list[torch.Tensor]:
        masked.clear()
        mask = _TreeMask(replace(whole, accelerated=on_accelerator), window, chunked)
        result = mask.attend(query, key, value, None, sink, 5.0 if kind == "soft cap" else None)
        return [result, *torch.autograd.grad((result * weight).sum(), inputs)]

    expected = computed(True)
    assert max(masked) > 256
    monkeypatch.setattr(turnwise.training.tree, "_MOST_MASKED_PAIRS", 256)
    actual = computed(accelerated)
    assert max(masked) <= 256
    near = 1e-6 if kind == "soft cap" else 1e-10  # which is computed in float32
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=near, rtol=near)


@pytest.mark.parametrize("limit", [1, 7, 20, 35, 1000])
def test_cuts_keep_to_the_limit_and_compute_the_fewest_tokens(limit: int) -> None:
    """Compared with all ways to cut twelve sequences into micro-batches."""
    trajectories = [one for one in random_trajectories(3, count=12) if len(one.segments) == 1][:8]
    batch = pack(trajectories, micro_batch_tokens=limit)
    rows = sorted((np.array(one.segments[0].token_ids) for one in trajectories), key=lambda row: row.tolist())
    rows = [
        row
        for row, after in zip(rows, [*rows[1:], None], strict=True)
        if after is None or len(row) != len(after) or (row != after).any()
    ]
    best = None
    for choice in range(1 << (len(rows) - 1)):
        starts = [0, *(place + 1 for place in range(len(rows) - 1) if choice >> place & 1), len(rows)]
        parts = [rows[start:end] for start, end in itertools.pairwise(starts)]
        sizes = [
            sum(len(row) for row in part) - sum(shared_prefix(*pair) for pair in itertools.pairwise(part))
            for part in parts
        ]
        if all(size <= limit or len(part) == 1 for size, part in zip(sizes, parts, strict=True)):
            cost = sum(sizes) + 64 * len(sizes)
            best = cost if best is None else min(best, cost)
    sizes = [micro.token_ids_BL.numel() for micro in batch.micro_batches]
    assert sum(sizes) + 64 * len(sizes) == best
    assert batch.computed_tokens == sum(sizes)


@pytest.mark.parametrize("limit", [60, 10_000])
def test_micro_batches_that_are_computed_in_parallel_have_similar_sizes(limit: int) -> None:
    trajectories = random_trajectories(5, count=60)
    usual = pack(trajectories, micro_batch_tokens=limit)
    batch = pack(trajectories, micro_batch_tokens=limit, parallel=3)
    sizes = [micro.token_ids_BL.numel() for micro in batch.micro_batches]
    assert len(usual.micro_batches) <= len(sizes) <= -(-len(usual.micro_batches) // 3) * 3
    assert max(sizes) <= max(limit, *(len(each.segments[0]) for each in trajectories))
    assert sizes[0] == max(sizes)
    if limit == 10_000:
        assert len(usual.micro_batches) == 1
        assert len(sizes) == 3
        assert max(sizes) <= 1.3 * sum(sizes) / len(sizes)
    assert targets(batch) == targets(usual)


def test_a_prefix_is_computed_once_only_where_its_mask_is_smaller_than_the_saving() -> None:
    long = np.arange(1, 9000)
    other = long.copy()
    other[100] = 0
    assert shared_prefix(other, long) == 0
    other = long.copy()
    other[-100] = 0
    assert shared_prefix(other, long) == len(long) - 100


def test_the_group_of_the_other_tests_computes_its_prompts_once() -> None:
    batch = pack(group())
    assert (batch.sequence_tokens, batch.computed_tokens) == (10 + 5 + 7 + 4, 10 + 2 + 3 + 4)
