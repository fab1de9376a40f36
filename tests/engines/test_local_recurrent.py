"""Models with recurrent layers in the embedded engine: what is sampled is what one pass over the whole sequence says.

The conversations of `hold` share prompts in groups, have turns and bridges of different lengths, are cut back inside a turn, and
go back to their first prompt: every way in which a cache that cannot be shortened may be wrong.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.hybrids import CONFIGS, VOCABULARY, forget_states, hybrid
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.cache import BLOCK, NOTHING_SHARED, SNAPSHOTS, KVCache, KVShape, PrefixCache, StateShape
from turnwise.engines.local.forward import choose_forward
from turnwise.engines.local.fused import FusedForward
from turnwise.engines.local.row_cache import bytes_kept
from turnwise.errors import EngineError
from turnwise.models.lora import add_adapter
from turnwise.options.algorithm import LoraSection
from turnwise.types import Completion, Request, Sampling

QUICK = ["qwen3_5", "lfm2", "granite_hybrid", "falcon_h1", "jamba", "llama4"]
"""One of each kind of layers: linear attention, convolutions, Mamba-2, both in one layer, Mamba-1, chunks."""
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


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


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_of_many_turns_are_sampled_from_what_one_pass_says(family: str) -> None:
    model = hybrid(family)
    sampled = hold(model)
    assert largest_difference(model, sampled) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
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
