"""The experts that servers report for each token (model.router_replay), in the encodings of vLLM 0.32 and SGLang 0.5.23."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.mixtures import CONFIGS, mixture
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.engines.remote.experts import ExpertLayers, first_unknown, joined
from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.servers import JoinedCompletion, Owner, Part
from turnwise.engines.sglang.api import SglangApi
from turnwise.engines.vllm.api import _part as vllm_part
from turnwise.engines.vllm.api import routed_experts_params
from turnwise.errors import ConfigError, EngineError
from turnwise.models.experts import layers_with_experts
from turnwise.options.schema import Config
from turnwise.types import LogprobKind, Request, Routes, Sampling

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


DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"


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
