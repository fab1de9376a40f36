"""The embedded engine's forward pass: attention, bfloat16, packed weights, and images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engines.test_local_sampling import (
    FUSED,
    ask,
    greedy,
    is_greedy,
    make,
    one_thread,  # noqa: F401
    tokens,
)
from support.tiny import tiny_model
from support.vision import image_part, picture, save_vision_model, text_part, vision_model, vision_tokenizer
from turnwise.chat.media import MediaProcessor
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.cache import NOTHING_SHARED, SharedPrefix, shared_prefix
from turnwise.engines.local.forward import GenericForward
from turnwise.engines.local.fused import FAMILIES, AttentionDims, DecodeAttention, FusedForward
from turnwise.errors import EngineError
from turnwise.models import cpu
from turnwise.models.cpu import PackedLayers, onednn_linear, packed, packed_bytes
from turnwise.models.lora import add_adapter
from turnwise.models.precision import autocast
from turnwise.options.algorithm import LoraSection
from turnwise.types import Completion, Media, Request, Sampling, Segment


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_are_those_of_transformers(family: str) -> None:
    kind = getattr(transformers, family)
    assert issubclass(kind, transformers.PreTrainedModel)
    assert kind.__module__.startswith("transformers.models.")


# Attention of a decode step against float64 formulas: rows with gaps, shared prefixes, rows much longer than the
# others.


DIMS = AttentionDims(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5, dtype=torch.float32, device=torch.device("cpu"))


def reference(kv: torch.Tensor, q_BHD: torch.Tensor, rows_B: np.ndarray, positions_B: np.ndarray) -> torch.Tensor:
    """Softmax attention of each row over its own keys and values only, in float64."""
    group = DIMS.heads // DIMS.kv_heads
    outputs = []
    for q_HD, row, position in zip(q_BHD.double(), rows_B, positions_B, strict=True):
        keys, values = kv[:, row, :, : position + 1].double()
        heads = [
            torch.softmax(keys[head // group] @ q_HD[head] * DIMS.scale, 0) @ values[head // group]
            for head in range(DIMS.heads)
        ]
        outputs.append(torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 2, 4, 5, 7])
@pytest.mark.parametrize("long_rows", [0, 1, 5, 40])
def test_each_row_attends_to_its_own_tokens(gaps: bool, groups: int, long_rows: int) -> None:
    draw = np.random.default_rng(long_rows)
    torch.manual_seed(0)
    rows_B = np.sort(draw.choice(50, 40, replace=False)) if gaps else np.arange(40)
    prefix = 90 if groups else 0
    positions_B = prefix + draw.integers(1, 30, 40)
    positions_B[draw.choice(40, long_rows, replace=False)] += draw.integers(150, 280, long_rows)
    kv = torch.randn(2, 50, DIMS.kv_heads, 512, DIMS.head_dim)
    group_B = {
        4: np.arange(40) // 10,  # neighbors of equal groups
        5: np.searchsorted([16, 26, 30, 39], np.arange(40), side="right"),  # 16, 10, 4, 9 and 1 rows
        7: np.maximum(0, np.arange(40) - 33),
    }.get(groups, np.arange(40) % max(1, groups))
    members = [np.flatnonzero(group_B == group) for group in range(groups)]
    for group in members:
        kv[:, rows_B[group], :, :prefix] = kv[:, rows_B[group[:1]], :, :prefix]
    q_BHD = torch.randn(40, DIMS.heads, DIMS.head_dim)
    attention = DecodeAttention(DIMS, rows_B, positions_B, SharedPrefix(prefix, members))
    output_BD = attention(kv, q_BHD)
    assert torch.allclose(output_BD.double(), reference(kv, q_BHD, rows_B, positions_B), atol=1e-5)


def test_other_rows_are_not_padded_to_a_long_row() -> None:
    positions_B = np.full(40, 120)
    positions_B[7] = 400
    kv = torch.randn(2, 40, DIMS.kv_heads, 512, DIMS.head_dim)
    # NaN where only a padded computation would read
    kv[:, np.arange(40) != 7, :, 121:] = torch.nan
    output_BD = DecodeAttention(DIMS, np.arange(40), positions_B, NOTHING_SHARED)(
        kv, torch.randn(40, DIMS.heads, DIMS.head_dim)
    )
    assert bool(output_BD.isfinite().all())


def batch(*sizes: tuple[int, int]) -> np.ndarray:
    """Tokens [B, L] of groups of (requests, shared tokens); the other tokens are drawn."""
    draw = np.random.default_rng(0)
    rows = []
    for requests, shared in sizes:
        start = draw.integers(0, 1000, 400)
        rows += [np.concatenate((start[:shared], draw.integers(0, 1000, 400 - shared))) for _ in range(requests)]
    return np.stack(rows).astype(np.int32)


def test_the_samples_of_each_prompt_share_its_prefix() -> None:
    tokens_BL = batch((8, 371), (8, 380), (8, 371), (8, 390))
    tokens_BL[:, :164] = tokens_BL[0, :164]
    tokens_BL = tokens_BL[(order := np.random.default_rng(1).permutation(32))]
    shared = shared_prefix(tokens_BL)
    assert shared.tokens == 371
    assert sorted(tuple(order[group] // 8) for group in shared.groups) == [(index,) * 8 for index in range(4)]
    assert all((np.diff(group) > 0).all() for group in shared.groups)


def test_one_prefix_for_all_is_preferred_where_groups_share_little_more() -> None:
    tokens_BL = batch((8, 130), (8, 130), (8, 130), (8, 130))
    tokens_BL[:, :120] = tokens_BL[0, :120]
    shared = shared_prefix(tokens_BL)
    assert shared.tokens == 120
    assert [group.tolist() for group in shared.groups] == [list(range(32))]


def test_a_request_that_shares_nothing_is_a_group_of_its_own() -> None:
    shared = shared_prefix(batch((20, 300), (1, 0)))
    assert shared.tokens == 300
    assert sorted(map(len, shared.groups)) == [1, 20]


@pytest.mark.parametrize("tokens_BL", [batch((1, 400)), batch((20, 0)), batch((4, 300)), np.zeros((5, 0), np.int32)])
def test_a_prefix_that_saves_little_is_not_shared(tokens_BL: np.ndarray) -> None:
    assert shared_prefix(tokens_BL) == NOTHING_SHARED


# The embedded engine with autocast: bfloat16 copies of the weights, which follow the trainer; and with LoRA adapters.


def sampled(engine: LocalEngine, conversation: str, prompt: list[int], seed: int = 0) -> Completion:
    request = Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=16), seed=seed)
    return ask(engine, request)[0]


def own_logprobs(model: Any, prompt: list[int], said: Completion, *, mixed: bool) -> torch.Tensor:
    """The log-probabilities of the sampled tokens under the model's own forward."""
    ids = torch.tensor([[*prompt, *said.token_ids]])
    with torch.no_grad(), autocast(torch.device("cpu"), mixed):
        rows = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
    return rows.gather(1, torch.tensor(said.token_ids).unsqueeze(1)).squeeze(1)


def scaled(name: str) -> Any:
    """A model whose logits are not so large that the rounding of bfloat16 shows most."""
    model = make(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.3)
    return model


@pytest.mark.parametrize("name", [*FUSED, "gemma3", "gpt2", "qwen3-window"])
def test_log_probabilities_are_those_of_the_models_own_forward_under_autocast(name: str) -> None:
    model = scaled(name)
    engine = LocalEngine(model, threads=1, autocast=True)
    assert type(engine._core.forward) is (FusedForward if name in FUSED else GenericForward)
    assert {tensor.dtype for tensor in engine._core.cache.kv.tensors} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    prompt = tokens(30)
    for turn in range(2):
        said = sampled(engine, "a", prompt, seed=turn)
        difference = torch.tensor(said.logprobs) - own_logprobs(model, prompt, said, mixed=True)
        assert float(difference.abs().max()) < 0.06
        prompt = [*prompt, *said.token_ids, *tokens(5, turn)]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_new_weights_reach_the_copies(name: str) -> None:
    model = scaled(name)
    engine = LocalEngine(model, threads=1, autocast=True)
    prompt = tokens(30)
    sampled(engine, "a", prompt)
    for parameter in model.parameters():
        # by another name of the same memory: torch does not count this change
        parameter.detach().numpy()[...] *= 0.8
    asyncio.run(engine.load_weights(1))
    said = sampled(engine, "b", prompt)
    assert set(said.versions) == {1}
    difference = torch.tensor(said.logprobs) - own_logprobs(model, prompt, said, mixed=True)
    assert float(difference.abs().max()) < 0.06


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_copies_are_freed_before_an_update_and_made_again_for_the_next_request(name: str) -> None:
    engine = LocalEngine(scaled(name), threads=1, autocast=True)
    forward, prompt = engine._core.forward, tokens(30)
    assert isinstance(forward, FusedForward | GenericForward)
    first = sampled(engine, "a", prompt)
    engine.free_cache()
    assert forward.copy is not None
    assert forward.copy.freed
    assert {parameter.dtype for parameter in forward.copy.model.parameters()} == {torch.float32}
    second = sampled(engine, "b", prompt)
    assert not forward.copy.freed
    assert second.token_ids == first.token_ids
    torch.testing.assert_close(torch.tensor(second.logprobs), torch.tensor(first.logprobs))


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"]], ids=["all layers", "two layers"])
def test_an_adapter_is_computed_in_the_fused_pass(targets: list[str] | None, mixed: bool) -> None:
    model = scaled("qwen3")
    prompt = tokens(30)
    plain = own_logprobs(model, prompt, sampled(LocalEngine(model, threads=1), "a", prompt), mixed=False)
    add_adapter(model, LoraSection(rank=4, alpha=8.0, target_modules=targets))
    engine = LocalEngine(model, threads=1, autocast=mixed)
    assert isinstance(engine._core.forward, FusedForward)
    said = sampled(engine, "a", prompt)
    if not mixed:  # a new adapter changes nothing
        torch.testing.assert_close(torch.tensor(said.logprobs), plain)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    asyncio.run(engine.load_weights(1))
    said = sampled(engine, "b", prompt)
    actual, expected = torch.tensor(said.logprobs), own_logprobs(model, prompt, said, mixed=mixed)
    assert float((actual - expected).abs().max()) < (0.08 if mixed else 1e-4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert float((own_logprobs(model, prompt, said, mixed=mixed) - expected).abs().max()) > 0.1


def test_an_adapter_that_is_more_than_a_product_takes_the_generic_pass() -> None:
    model = make("qwen3")
    add_adapter(model, LoraSection(rank=4, alpha=8.0, dora=True))
    assert isinstance(LocalEngine(model)._core.forward, GenericForward)


def test_an_adapter_beside_bfloat16_weights_is_not_rounded_away() -> None:
    """Merged into bfloat16 weights, an adapter of a thousandth of the weights would hardly change them."""
    model = scaled("llama").to(torch.bfloat16)
    add_adapter(model, LoraSection(rank=4, alpha=8.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1.0)
    engine, prompt = LocalEngine(model, threads=1), tokens(30)
    assert isinstance(engine._core.forward, FusedForward)
    said = sampled(engine, "a", prompt)
    difference = torch.tensor(said.logprobs) - own_logprobs(model, prompt, said, mixed=False)
    assert float(difference.abs().max()) < 0.15


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2"])
def test_the_output_layer_is_in_float32_so_that_large_logits_are_not_rounded_to_steps(name: str) -> None:
    model = scaled(name)
    engine = LocalEngine(model, threads=1, autocast=True)
    forward = engine._core.forward
    sampled(engine, "a", tokens(30))
    if isinstance(forward, FusedForward):
        assert forward._parameters.head.weight_IO.dtype == torch.float32
        assert forward._parameters.blocks[0].parts[0].module.o.weight_IO.dtype == torch.bfloat16
    else:
        assert isinstance(forward, GenericForward)
        assert forward._model.get_output_embeddings().weight.dtype == torch.float32
    values = torch.full((1, model.get_output_embeddings().in_features), 1.0, requires_grad=True)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(40.1 / values.shape[1])
    for one in (model, *([forward._model] if isinstance(forward, GenericForward) else [])):
        with autocast(torch.device("cpu"), True):
            logits = one.get_output_embeddings()(values.to(torch.bfloat16))
        assert logits.dtype == torch.float32
        assert float(logits.detach()[0, 0]) == pytest.approx(40.1, abs=1e-3)  # bfloat16 has 40.0 and 40.25


# The copies of weights in oneDNN's layout: used where oneDNN is faster, and never older than the weights.


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine on which oneDNN is faster, for weights of any size."""
    monkeypatch.setattr(cpu, "uses_onednn", lambda: True)
    monkeypatch.setattr(cpu, "_LARGE_WEIGHT", 1)
    monkeypatch.setattr(cpu, "_SMALL_WEIGHT", 1)
    monkeypatch.setattr(cpu, "_SMALLEST_SIDE", 1)


@needs_onednn
@pytest.mark.usefixtures("_onednn")
@pytest.mark.parametrize("rows", [1, 5, 16, 37, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_gives_the_product(rows: int, bias: bool) -> None:
    values, weight, added = torch.randn(rows, 96), torch.randn(72, 96), torch.randn(72) if bias else None
    expected = torch.nn.functional.linear(values.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(onednn_linear(values, packed(weight), added).double(), expected, atol=1e-4, rtol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("_onednn")
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])  # without biases, with all of them, in the attention only
@pytest.mark.parametrize("known", [True, False])  # whether torch counts the change
@pytest.mark.parametrize("few", [False, True])  # whether products of few rows are left to torch
def test_the_engine_samples_from_the_present_weights(
    monkeypatch: pytest.MonkeyPatch, name: str, known: bool, few: bool
) -> None:
    model, prompt = make(name), tokens(30)
    if few:
        monkeypatch.setattr(cpu, "_LARGE_WEIGHT", cpu.NEVER)
        monkeypatch.setattr(cpu, "_FEWEST_PRODUCTS", 8 * max(map(len, model.parameters())) ** 2)
    assert packed_bytes(model) > 0
    engine = LocalEngine(model, threads=1)
    first = ask(engine, greedy("a", prompt))[0]
    is_greedy(model, prompt, first)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter if known else parameter.data).add_(torch.randn_like(parameter), alpha=0.3)
    asyncio.run(engine.load_weights(1))
    second = ask(engine, greedy("b", prompt))[0]
    is_greedy(model, prompt, second)
    assert first.token_ids != second.token_ids


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_a_weight_is_packed_again_only_after_a_change() -> None:
    model = make("qwen3")
    copies, weight = PackedLayers(), model.model.layers[0].mlp.up_proj.weight
    first = copies.of(weight)
    assert first is not weight
    assert copies.of(weight) is first
    with torch.no_grad():
        weight.mul_(2)
    second = copies.of(weight)
    assert second is not first
    torch.testing.assert_close(second.to_dense(), weight.detach())
    copies.clear()
    assert copies.of(weight) is not second


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_copies_are_freed_before_an_update_and_made_again_after_it() -> None:
    model, prompt = make("qwen2"), tokens(30)
    engine = LocalEngine(model, threads=1)
    forward = engine._core.forward
    assert isinstance(forward, FusedForward)
    assert forward._packed is not None
    first = ask(engine, greedy("a", prompt))[0]
    joined = forward._parameters.blocks[0].parts[0].module.qkv.parts
    assert len(joined) == 1  # queries, keys and values are one product
    engine.free_cache()
    assert not forward._packed._copies
    parts = forward._parameters.blocks[0].parts[0].module.qkv.parts
    assert all(part.onednn_weight.data_ptr() == part.weight_IO.data_ptr() for part in parts)
    # a request in the middle of an update is sampled without copies
    assert ask(engine, greedy("b", prompt))[0].token_ids == first.token_ids
    asyncio.run(engine.load_weights(1))
    assert len(forward._parameters.blocks[0].parts[0].module.qkv.parts) == 1
    assert ask(engine, greedy("c", prompt))[0].token_ids == first.token_ids


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_several_weights_are_packed_as_one_again_after_a_change_of_one() -> None:
    layer = make("qwen3").model.layers[0].self_attn
    copies, weights = PackedLayers(), [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    first = copies.of(*weights)
    assert copies.of(*weights) is first
    with torch.no_grad():
        weights[1].mul_(2)
    torch.testing.assert_close(copies.of(*weights).to_dense(), torch.cat(weights).detach())


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_weights_that_take_too_much_memory_or_are_not_for_onednn_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("qwen3")
    total = packed_bytes(model)
    weights = {id(module.weight): module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)}
    assert total == 4 * sum(weight.numel() for weight in weights.values())
    monkeypatch.setattr(cpu, "MOST_BYTES", total - 1)
    assert packed_bytes(model) == 0
    assert FusedForward(model)._packed is None
    monkeypatch.setattr(cpu, "MOST_BYTES", total)
    monkeypatch.setattr(cpu, "uses_onednn", lambda: False)
    assert packed_bytes(model) == 0


# Images in the embedded engine: its log-probabilities are those of the model's own pass over the whole conversation


TOKENIZER = vision_tokenizer()
PAD = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    found = MediaProcessor.from_pretrained(save_vision_model(tmp_path_factory.mktemp("model")), TOKENIZER)
    assert found is not None
    return found


def heard(vision: MediaProcessor, *parts: Any) -> tuple[list[int], list[Media]]:
    """The tokens and images of a user's message and the cue."""
    messages = [
        {"role": "user", "content": [text_part(part) if isinstance(part, str) else image_part(part) for part in parts]}
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text, found = vision.expand(text, vision.parts(messages))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return ids, vision.locate(ids, found)


async def converse(
    engine: LocalEngine, name: str, turns: Sequence[tuple[list[int], list[Media]]], *, seed: int = 0, tokens: int = 12
) -> Segment:
    """A conversation in which the model is heard after each of `turns`."""
    segment = Segment()
    for index, (ids, media) in enumerate(turns):
        segment.append_context(ids, media)
        segment.append_completion(index, await ask_seen(engine, name, segment, seed=seed + index, tokens=tokens))
        await asyncio.sleep(0)
    return segment


async def ask_seen(engine: LocalEngine, name: str, segment: Segment, *, seed: int = 0, tokens: int = 12) -> Completion:
    return await engine.generate(
        Request(
            conversation=name,
            token_ids=tuple(segment.token_ids),
            media=tuple(segment.media),
            sampling=Sampling(max_tokens=tokens),
            seed=seed,
        )
    )


def own_logprobs_seen(model: Any, segment: Segment) -> list[float]:
    """Of the sampled tokens, from one pass of transformers' own over the whole sequence and all images."""
    ids = torch.tensor([list(segment.token_ids)])
    kinds = torch.zeros_like(ids)
    for one in segment.media:
        kinds[0, one.start : one.start + one.length] = 1
    # a placeholder that was sampled has no image: transformers would refuse it, so it gets its embedding by hand
    given: dict[str, Any] = {"input_ids": ids.masked_fill((ids == PAD) & (kinds == 0), 0)}
    given["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    if segment.media:
        given["mm_token_type_ids"] = kinds
        for name in ("pixel_values", "image_grid_thw"):
            given[name] = torch.cat([one.inputs[name] for one in segment.media])
    with torch.no_grad():
        all_TV = model(**given).logits[0].log_softmax(-1)
    return [float(all_TV[at - 1, segment.token_ids[at]]) for at, turn in enumerate(segment.turn) if turn >= 0]


def said_logprobs(segment: Segment) -> list[float]:
    return [logprob for logprob, turn in zip(segment.logprobs, segment.turn, strict=True) if turn >= 0]


def assert_exact(model: Any, *segments: Segment) -> None:
    for segment in segments:
        assert said_logprobs(segment) == pytest.approx(own_logprobs_seen(model, segment), abs=1e-4)


def test_a_second_image_in_the_second_turn(vision: MediaProcessor) -> None:
    model = vision_model()
    engine = LocalEngine(model, threads=1)
    turns = [
        heard(vision, "a", picture(16, 24)),
        heard(vision, picture(32, 16, seed=1), "b", picture(8, 8, seed=2)),
        heard(vision, "no image now"),
    ]
    segment = asyncio.run(converse(engine, "c", turns))
    assert len(segment.media) == 3
    assert_exact(model, segment)
    # what was there is not computed again: only what was heard, and the last word before it
    assert engine.stats.prefilled_tokens == sum(len(ids) for ids, _ in turns) + 2


def test_in_company_of_other_images_and_of_text(vision: MediaProcessor) -> None:
    model = vision_model(seed=1)
    engine = LocalEngine(model, threads=1)
    openings = [
        [heard(vision, "same words", picture(16, 16, seed=1), "?"), heard(vision, picture(24, 24, seed=9))],
        [heard(vision, "same words", picture(16, 16, seed=2), "?"), heard(vision, "and?")],
        [heard(vision, "only words, and rather many of them"), heard(vision, picture(16, 16, seed=1))],
        [heard(vision, "only words"), heard(vision, "and words")],
    ]

    async def hold() -> list[Segment]:
        return await asyncio.gather(*(converse(engine, str(n), turns, seed=n) for n, turns in enumerate(openings)))

    segments = asyncio.run(hold())
    assert_exact(model, *segments)
    assert said_logprobs(segments[0])[:3] != pytest.approx(said_logprobs(segments[1])[:3], abs=1e-3)  # another image


def test_a_group_computes_its_image_once(vision: MediaProcessor) -> None:
    model = vision_model(seed=2)
    engine = LocalEngine(model, threads=1)
    opening = heard(vision, "What is this?", picture(32, 32, seed=3))

    async def hold() -> list[Segment]:
        return await asyncio.gather(*(converse(engine, str(n), [opening], seed=100 * n) for n in range(8)))

    segments = asyncio.run(hold())
    assert_exact(model, *segments)
    assert engine.stats.prefilled_tokens == len(opening[0]) + 7  # the last token is everybody's own
    assert engine.stats.copied_tokens == 7 * (len(opening[0]) - 1)


def test_another_image_of_the_same_size_shares_nothing_after_it(vision: MediaProcessor) -> None:
    model = vision_model(seed=2)
    engine = LocalEngine(model, threads=1)
    first, second = (heard(vision, "Quite a long text that both have", picture(seed=n), "and more") for n in (1, 2))
    assert first[0] == second[0]

    async def hold() -> list[Segment]:
        return [await converse(engine, "a", [first]), await converse(engine, "b", [second], seed=7)]

    segments = asyncio.run(hold())
    assert_exact(model, *segments)
    assert engine.stats.copied_tokens == first[1][0].start


def test_a_conversation_that_lost_its_slot_sees_its_images_again(vision: MediaProcessor) -> None:
    model = vision_model(seed=3)
    engine = LocalEngine(model, threads=1, slots=1)
    mine = [heard(vision, "a", picture(16, 24)), heard(vision, picture(seed=1), "b")]
    yours = [heard(vision, "c", picture(24, 24, seed=4)), heard(vision, "d")]

    async def hold() -> list[Segment]:
        return await asyncio.gather(converse(engine, "a", mine), converse(engine, "b", yours, seed=50))

    segments = asyncio.run(hold())
    assert engine.stats.evictions > 0
    assert_exact(model, *segments)


def test_a_request_that_loses_its_row_while_it_runs_goes_on_with_its_images(vision: MediaProcessor) -> None:
    model = vision_model(seed=3)
    token_bytes = LocalEngine(model, threads=1)._core.cache.kv.token_bytes
    engine = LocalEngine(model, threads=1, memory_gb=3 * 192 * token_bytes / 2**30)
    turns = [[heard(vision, "x" * 90, picture(32, 32, seed=n))] for n in range(4)]

    async def hold() -> list[Segment]:
        return await asyncio.gather(*(converse(engine, str(n), one, seed=n, tokens=90) for n, one in enumerate(turns)))

    segments = asyncio.run(hold())
    assert engine.stats.preemptions > 0
    assert_exact(model, *segments)


def test_a_long_prompt_is_cut_between_images_not_in_them(
    vision: MediaProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.engines.local.scheduler.PREFILL_CHUNK_TOKENS", 20)
    model = vision_model(seed=4)
    engine = LocalEngine(model, threads=1)
    turns = [heard(vision, "some", picture(32, 32), "text", picture(32, 32, seed=1), picture(24, 32, seed=2), "?")]
    segment = asyncio.run(converse(engine, "c", turns))
    assert_exact(model, segment)


def test_a_placeholder_that_the_model_says_is_a_word(vision: MediaProcessor) -> None:
    model = vision_model(seed=5)
    with torch.no_grad():
        model.lm_head.weight[PAD] *= 40  # says it all the time
    engine = LocalEngine(model, threads=1, slots=1)
    turns = [heard(vision, "a", picture()), heard(vision, picture(seed=1))]
    other = [heard(vision, "b"), heard(vision, "c")]

    async def hold() -> list[Segment]:
        return await asyncio.gather(converse(engine, "a", turns), converse(engine, "b", other, seed=9))

    segment, words = asyncio.run(hold())
    assert sum(token == PAD and turn == 0 for token, turn in zip(segment.token_ids, segment.turn, strict=True)) > 2
    assert_exact(model, segment, words)


def test_new_weights_see_with_new_eyes(vision: MediaProcessor) -> None:
    model = vision_model(seed=6)
    engine = LocalEngine(model, threads=1)
    opening = heard(vision, "a", picture(24, 24))

    async def hold() -> Segment:
        await converse(engine, "a", [opening])
        with torch.no_grad():
            for parameter in model.model.visual.parameters():
                parameter.mul_(1.5)
        await engine.load_weights(1)
        return await converse(engine, "b", [opening])

    assert_exact(model, asyncio.run(hold()))


def test_what_cannot_be_seen_is_refused(vision: MediaProcessor) -> None:
    ids, media = heard(vision, "a", picture())
    segment = Segment()
    segment.append_context(ids, media)
    with pytest.raises(
        EngineError, match="the request contains 1 images or videos, and Qwen3ForCausalLM does not accept them"
    ):
        asyncio.run(ask_seen(LocalEngine(tiny_model(vocabulary=263), threads=1), "c", segment))
    engine = LocalEngine(vision_model(), threads=1)
    cut = Segment()
    cut.append_context(ids[: media[0].start + 4], media)
    with pytest.raises(EngineError, match="its placeholders must be there, followed by at least one more token"):
        asyncio.run(ask_seen(engine, "c", cut))
    assert len(asyncio.run(ask_seen(engine, "c", segment)).token_ids) == 12  # and the engine goes on


def test_the_model_directory_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(save_vision_model(tmp_path))
    assert torch.equal(model.lm_head.weight, vision_model().lm_head.weight)
