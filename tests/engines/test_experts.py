"""Which experts computed a sampled token: recorded by the embedded engine, and by vLLM and SGLang."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import engine_env
import engine_families
import numpy as np
import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel

from engines.conformance.subjects import MODEL
from support.mixtures import CONFIGS, VOCABULARY, disturb_routers, mixture
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.engines.local import LocalEngine
from turnwise.engines.remote.experts import ExpertLayers, first_unknown, joined
from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.servers import JoinedCompletion, Owner, Part
from turnwise.engines.sglang.api import SglangApi
from turnwise.engines.vllm.api import _part as vllm_part
from turnwise.engines.vllm.api import routed_experts_params
from turnwise.errors import ConfigError, EngineError
from turnwise.models.experts import Choice, RouterPass, Routers, layers_with_experts
from turnwise.options.schema import Config
from turnwise.training.batch import routes_of
from turnwise.types import LogprobKind, Request, Routes, Sampling, Segment

# The embedded engine records the experts of each token: those that computed the keys and values that it reads.


QUICK = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe", "glm4_moe", "llama4"]

FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


def recorded(segment: Segment) -> torch.Tensor:
    """The experts of the tokens of a segment, [T, L, K]; all but the last are known."""
    assert segment.routes is not None
    assert len(segment.routes) == len(segment) - 1
    routes = routes_of(segment, len(segment))
    assert routes is not None
    return torch.from_numpy(routes)


def one_pass(
    model: PreTrainedModel, tokens: list[int], replay_TLK: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities [T, V] and the experts [T, L, K] of a pass without a cache."""
    used: list[torch.Tensor] = []
    assert Routers.of(model) is not None
    with torch.no_grad(), RouterPass(lambda choice: used.append(choice.index_TK), replay_TLK).active():
        logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits_TV.float().log_softmax(-1), torch.stack(used, dim=1)


async def converse(engine: LocalEngine, number: int, prompt: list[int], turns: int) -> Segment:
    random, segment = np.random.default_rng(number), Segment()
    segment.append_context(prompt)
    for turn in range(turns):
        request = Request(
            conversation=f"c{number}",
            token_ids=list(segment.token_ids),
            sampling=Sampling(max_tokens=int(random.integers(3, 9))),
            seed=100 * number + turn,
            routes=segment.routes,
        )
        segment.append_completion(turn, await engine.generate(request))
        if turn == 1 and number % 3 == 0:
            segment.truncate(len(segment) - 2)
            continue  # goes on directly after a token that was computed before
        if turn < turns - 1:
            segment.append_context(random.integers(3, VOCABULARY, int(random.integers(1, 9))).tolist())
    engine.release(f"c{number}")
    return segment


def hold(model: PreTrainedModel, *, rows: int | None = None, turns: int = 4) -> list[Segment]:
    """Eight conversations in two groups, all at the same time. `rows`: the memory that so many long conversations need."""

    async def run() -> list[Segment]:
        engine = LocalEngine(model, threads=1, context=512, record_routes=True)
        if rows is not None:
            kv = engine._core.cache.kv
            memory = rows * (kv.row_bytes + 100 * kv.token_bytes) / 2**30
            engine = LocalEngine(model, threads=1, context=512, record_routes=True, memory_gb=memory)
        random = np.random.default_rng(0)
        prompts = [random.integers(3, VOCABULARY, 20 + 7 * n).tolist() for n in range(2)]
        held = await asyncio.gather(*(converse(engine, n, prompts[n // 4], turns) for n in range(8)))
        if rows is not None:
            assert engine.stats.evictions + engine.stats.preemptions > 0
        await engine.close()
        return held

    return asyncio.run(run())


@pytest.mark.parametrize("rows", [None, 3], ids=["all resident", "evicted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_experts_are_those_of_one_pass(family: str, rows: int | None) -> None:
    model = mixture(family)
    for segment in hold(model, rows=rows):
        _, own_TLK = one_pass(model, list(segment.token_ids))
        assert torch.equal(recorded(segment)[:-1].long(), own_TLK[:-1])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_known_experts_are_used_again_where_tokens_are_computed_again(family: str) -> None:
    model = mixture(family)
    tokens = np.random.default_rng(5).integers(3, VOCABULARY, 30).tolist()
    _, own_TLK = one_pass(model, tokens)
    # as if other weights had chosen: a recorded conversation whose rows are lost
    others_TLK = (own_TLK + 3) % int(own_TLK.max() + 1)
    routes = Routes(*others_TLK.shape[1:], 1, others_TLK.numpy().astype(np.uint8).tobytes())

    async def run() -> list[Segment]:
        engine = LocalEngine(model, threads=1, context=128, record_routes=True)
        segments: list[Segment] = []
        for number, known in enumerate((None, routes, routes.first(20), None)):
            segment = Segment()
            segment.append_context(tokens)
            request = Request(
                conversation=f"{number}", token_ids=tokens, sampling=Sampling(max_tokens=6), seed=1, routes=known
            )
            segment.append_completion(0, await engine.generate(request))
            segments.append(segment)
        await engine.close()
        return segments

    plain, other, half, again = asyncio.run(run())
    assert torch.equal(recorded(plain)[: len(tokens)].long(), own_TLK)
    assert torch.equal(recorded(other)[: len(tokens)].long(), others_TLK)  # the equal prompt before was not copied
    assert torch.equal(recorded(half)[:20].long(), others_TLK[:20])
    assert torch.equal(recorded(again)[:20], recorded(other)[:20]) or torch.equal(recorded(again), recorded(plain))
    for segment in (plain, other, half, again):
        ids = list(segment.token_ids)
        logprob_TV, used_TLK = one_pass(model, ids, recorded(segment).long())
        assert torch.equal(used_TLK[:-1], recorded(segment)[:-1].long())
        own = logprob_TV[len(tokens) - 1 : -1].gather(1, torch.tensor(ids)[len(tokens) :, None]).squeeze(1)
        assert (own - torch.tensor(list(segment.logprobs))[len(tokens) :]).abs().max() < 2e-5


def test_new_weights_do_not_change_the_experts_of_a_conversation_that_goes_on() -> None:
    model = mixture("qwen3_moe")

    async def run() -> tuple[Segment, Routes]:
        engine = LocalEngine(model, threads=1, context=128, record_routes=True)
        segment = Segment()
        segment.append_context([5, 6, 7, 8, 9, 10, 11, 12, 13])
        for turn in range(2):
            request = Request(
                conversation="c",
                token_ids=list(segment.token_ids),
                sampling=Sampling(max_tokens=8),
                seed=turn,
                routes=segment.routes,
            )
            segment.append_completion(turn, await engine.generate(request))
            if turn == 0:
                assert segment.routes is not None
                first = segment.routes
                disturb_routers(model)
                await engine.load_weights(1)
        await engine.close()
        return segment, first

    segment, first = asyncio.run(run())
    assert segment.routes is not None
    assert segment.routes.first(len(first)) == first
    _, new_TLK = one_pass(model, list(segment.token_ids))
    assert not torch.equal(new_TLK[: len(first)], recorded(segment)[: len(first)].long())
    # the tokens of the second turn were computed after these keys and values
    _, used_TLK = one_pass(model, list(segment.token_ids), recorded(segment).long())
    assert torch.equal(used_TLK[:-1], recorded(segment)[:-1].long())


def test_routes_are_in_the_memory_bound_and_only_recorded_when_asked_for() -> None:
    model = mixture("qwen3_moe")
    plain, recording = LocalEngine(model, threads=1), LocalEngine(model, threads=1, record_routes=True)
    assert (
        recording._core.cache.kv.token_bytes == plain._core.cache.kv.token_bytes + 3 * 2
    )  # layers, experts of a token

    async def sample() -> Routes | None:
        request = Request(conversation="c", token_ids=[5, 6], sampling=Sampling(max_tokens=2))
        return (await plain.generate(request)).routes

    assert asyncio.run(sample()) is None


def test_a_model_without_experts_is_refused() -> None:
    from support.tiny import tiny_model

    with pytest.raises(ConfigError, match=r"model\.router_replay=true: Qwen3ForCausalLM is no mixture of experts"):
        LocalEngine(tiny_model(), record_routes=True)


# The experts that servers report for each token (model.router_replay), in the encodings of vLLM 0.32 and SGLang
# 0.5.23.


SERVER = HttpServer("http://127.0.0.1:1")

LAYERS = ExpertLayers(layers=(1, 2), total=3, experts=8)
"""The first layer of three is dense."""

NUMBERS = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 8
"""Of four tokens."""

EXPECTED = Routes(2, 2, 1, NUMBERS[:, 1:].astype(np.uint8).tobytes())


def npy(array: np.ndarray) -> str:
    """As vLLM's `numpy2base64` encodes it."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


def request(tokens: int, known: Routes | None = None) -> Request:
    return Request(conversation="a", token_ids=[5] * tokens, sampling=Sampling(max_tokens=8), routes=known)


def test_dense_layers_are_left_out_in_both_encodings() -> None:
    assert LAYERS.of_npy("s", npy(NUMBERS.astype(np.uint8))) == EXPECTED
    raw = base64.b64encode(NUMBERS.astype(np.int32).tobytes()).decode()
    assert LAYERS.of_int32("s", raw, tokens=4) == EXPECTED
    assert LAYERS.of_npy("s", None) is None
    assert LAYERS.of_int32("s", None, tokens=4) is None


def test_more_than_256_experts_take_two_bytes() -> None:
    many = ExpertLayers(layers=(0,), total=1, experts=512)
    routes = many.of_npy("s", npy(np.array([[[300, 2]]], dtype=np.uint16)))
    assert routes == Routes(1, 2, 2, bytes([44, 1, 2, 0]))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (NUMBERS[:, :2], r"reported experts of the shape \[4, 2, 2\]; it must be \[tokens, 3 layers"),
        (NUMBERS + 2, "reported the experts 2 to 9; the model has 0 to 7"),
        (NUMBERS - 1, "reported the experts -1 to 6"),
    ],
)
def test_experts_of_another_model_are_refused(numbers: np.ndarray, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LAYERS.routes("http://server", numbers)


def test_numbers_that_do_not_belong_to_all_tokens_are_refused() -> None:
    raw = base64.b64encode(NUMBERS[:3].astype(np.int32).tobytes()).decode()
    with pytest.raises(EngineError, match="reported 18 numbers of experts for 4 tokens of 3 layers"):
        LAYERS.of_int32("s", raw, tokens=4)


def test_vllm_is_asked_from_the_first_unknown_token_on() -> None:
    known = EXPECTED.first(3)
    assert routed_experts_params(LAYERS, request(6, known)) == {"routed_experts_prompt_start": 3}
    assert routed_experts_params(LAYERS, request(6)) == {"routed_experts_prompt_start": 0}
    assert routed_experts_params(None, request(6)) == {}
    choice = {"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "length"}
    reported = {**choice, "routed_experts": npy(NUMBERS.astype(np.uint8))}
    assert vllm_part(SERVER, reported, LAYERS).routes == EXPECTED
    assert vllm_part(SERVER, reported, None).routes is None


def test_sglang_reports_all_tokens_but_the_last() -> None:
    """Prompt of four tokens, two of them known, and three sampled: four unknown tokens have been computed."""
    api = SglangApi(vocab_size=760, context=2048, labels=False, owner=Owner(), experts=LAYERS)
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-1.0, 5, None]] * 3,
        "completion_tokens": 3,
        "routed_experts": base64.b64encode(NUMBERS.astype(np.int32).tobytes()).decode(),
    }
    event = {"output_ids": [5, 5, 5], "meta_info": meta}
    assert api._part(SERVER, event, request(4, EXPECTED.first(2)), 0, 0).routes == EXPECTED
    going_on = {**event, "meta_info": {**meta, "finish_reason": None, "routed_experts": None}}
    assert api._part(SERVER, going_on, request(4, EXPECTED.first(2)), 0, 0).routes is None


def test_a_completion_of_two_servers_has_the_experts_of_both() -> None:
    """The first server is lost after two tokens and has reported no experts; the second computes these tokens as a prompt."""
    completion = JoinedCompletion(request(2, EXPECTED.first(1)), max_tokens=4)
    first = completion.next_request()
    assert first_unknown(first) == 1
    completion.add(Part(token_ids=[3, 3], logprobs=[-1.0, -1.0]), version=0)
    second = completion.next_request()
    assert (len(second.token_ids), first_unknown(second)) == (4, 1)
    rest = LAYERS.routes("s", np.concatenate([NUMBERS, NUMBERS])[1:5])
    completion.add(Part(token_ids=[2], logprobs=[-1.0], finish="stop", routes=rest.first(3)), version=0)
    done = completion.completion(LogprobKind.SAMPLED)
    assert done.routes == EXPECTED  # of four tokens: the last of five has not been computed
    completion.truncate(1)
    assert completion.routes == EXPECTED.first(2)


def test_a_server_that_was_aborted_may_report_more_tokens_than_are_kept() -> None:
    completion = JoinedCompletion(request(2), max_tokens=4)
    completion.next_request()
    completion.add(Part(token_ids=[3], logprobs=[-1.0], finish="aborted", routes=EXPECTED), version=0)
    assert completion.routes == EXPECTED.first(2)


def test_experts_of_another_size_do_not_continue_a_conversation() -> None:
    with pytest.raises(
        EngineError, match="the experts of a conversation are 2 in 2 layers, and its server reports 2 in 1"
    ):
        joined(EXPECTED, Routes(1, 2, 1, bytes(4)), 9)


@pytest.mark.parametrize(
    ("name", "layers"), [("qwen3_moe", (0, 1, 2)), ("deepseek_v3", (1, 2)), ("nemotron_h", (3,)), ("qwen3_5_moe", None)]
)
def test_layers_have_the_numbers_of_the_model(name: str, layers: tuple[int, ...] | None) -> None:
    with torch.device("meta"):
        model = type(mixture(name))(CONFIGS[name]())
    found, experts = layers_with_experts(model)
    total = model.config.num_hidden_layers
    assert found == (tuple(range(total)) if layers is None else layers)
    assert experts in (4, 8)


def config(path: Path, **engine: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path), "device": "cpu", "router_replay": True},
            "data": {"train": "rows.jsonl"},
            "engine": engine,
            "output": str(path / "run"),
        }
    )


def saved(name: str, path: Path, model_dir: Path) -> Renderer:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / file).write_bytes((model_dir / file).read_bytes())
    CONFIGS[name]().save_pretrained(path)
    return Renderer.from_pretrained(path)


DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"


def test_servers_that_cannot_report_experts_are_refused_at_the_start(tmp_path: Path) -> None:
    renderer = saved("qwen3_moe", tmp_path, DEMO)
    for name, reason in (("vllm", "second model runner only, which needs Triton"), ("sglang", "registers with CUDA")):
        with pytest.raises(ConfigError, match=f"needs a GPU with engine.name={name}: .*{reason}"):
            assembly.engine(config(tmp_path, name=name), renderer, updated=True)
        assembly.engine(config(tmp_path, name=name, url="http://127.0.0.1:1"), renderer, updated=True)
    renderer = saved("ernie4_5_moe", tmp_path, DEMO)
    with pytest.raises(ConfigError, match=r"from num_experts_per_tok, which the config\.json of .* does not have"):
        assembly.engine(config(tmp_path, name="sglang", url="http://127.0.0.1:1"), renderer, updated=True)


def test_a_dense_model_is_refused_at_the_start() -> None:
    for name in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match="ForCausalLM is no mixture of experts"):
            assembly.engine(config(DEMO, name=name), Renderer.from_pretrained(DEMO), updated=True)


# The experts of each token, as vLLM and SGLang themselves record and encode them.


ROOT = Path(__file__).resolve().parents[2]

PROGRAM = Path(__file__).with_name("experts_in_engine.py")


def servers_mixture(folder: Path) -> Path:
    """A model with experts in the second and the third of three layers, and the tokenizer of the demo."""
    shutil.copytree(MODEL, folder)
    (folder / "generation_config.json").unlink()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    experts: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    model = Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=760, eos_token_id=2, **sizes, **heads, **experts)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(0.08 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def chosen(model: Glm4MoeForCausalLM, token_ids: list[int]) -> np.ndarray:
    """The experts that the model itself chooses for the tokens, [T, L, K], sorted."""
    Routers.of(model)
    found: list[torch.Tensor] = []

    def note(choice: Choice) -> None:
        found.append(choice.index_TK)

    with torch.no_grad(), RouterPass(note).active():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return torch.stack(found, dim=1).sort(dim=-1).values.numpy()


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_recorded_experts_are_those_that_the_trainer_would_choose(engine: str, tmp_path: Path) -> None:
    """Recorded and encoded by the engine's own code, without a server (experts_in_engine.py)."""
    path, prompt = servers_mixture(tmp_path / "model"), list(range(5, 75))
    command = [str(engine_env.python(engine)), str(PROGRAM), engine, str(path), json.dumps(prompt)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env=environment, cwd=tmp_path
    )
    answer = next((line for line in result.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert answer is not None, result.stderr[-3000:]
    model = Glm4MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    layers, experts = layers_with_experts(model)
    assert layers == (1, 2)
    served = ExpertLayers(layers, model.config.num_hidden_layers, experts)
    text = answer.removeprefix("RESULT ")
    routes = served.of_npy("s", text) if engine == "vllm" else served.of_int32("s", text, len(prompt))
    assert routes is not None
    assert (routes.layers, routes.top_k, len(routes)) == (2, 2, len(prompt))
    recorded_TLK = np.frombuffer(routes.data, dtype=np.uint8).reshape(-1, 2, 2)
    own_TLK = chosen(model, prompt)
    assert len(np.unique(own_TLK)) == 8
    assert np.array_equal(np.sort(recorded_TLK, axis=-1), own_TLK)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_update_reaches_all_experts(engine: str, tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU would copy new weights of experts, without packing them, into the place of the packed ones."""
    engine_families.make("Qwen3-MoE", tmp_path / "model")
    (result,) = engine_families.inside(engine, [tmp_path / "model"])
    assert "error" not in result
    assert [deviation < 1e-4 for deviation in result["deviations"]] == [True, True]
