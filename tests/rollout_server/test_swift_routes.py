"""ms-swift's routes, with requests as its VLLMClient sends them."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from support.recipes import save_recipe
from support.rollout_servers import TOKEN, Running, running
from support.tiny import save_model

REQUEST = {
    "messages": [{"role": "user", "content": "1+1?"}],
    "images": [], "audios": [], "videos": [], "tools": None, "objects": {}, "chat_template_kwargs": {},
    "data_dict": {"solution": "2"},
    "uuid": "abc",
}  # fmt: skip
CONFIG = {
    "max_tokens": 6, "temperature": 0.9, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "num_beams": 1,
    "stop": [], "seed": 7, "stream": False, "logprobs": True, "top_logprobs": None, "prompt_logprobs": None, "n": 1,
    "best_of": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "length_penalty": 1.0, "return_details": True,
    "structured_outputs_regex": None,
}  # fmt: skip
"""`asdict(RequestConfig(...))` of ms-swift."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("swift")
    recipe = save_recipe(folder, save_model(folder / "model"), limits={"turns": 2, "tokens_per_turn": 50})
    with running(recipe) as server:
        yield server


def test_infer_returns_rollout_outputs(server: Running) -> None:
    body = {"infer_requests": [REQUEST, {**REQUEST, "uuid": "def"}], "request_config": CONFIG, "use_tqdm": None}
    status, outputs = server.ask("POST", "/infer/", {**body, "metrics": None, "adapter_request": None})
    assert status == 200, outputs
    assert [output["response"]["id"] for output in outputs] == ["abc", "def"]
    for output in outputs:
        assert output["messages"][0] == REQUEST["messages"][0]  # type: ignore[index]
        answers = [message for message in output["messages"] if message["role"] == "assistant"]
        assert len(output["response_token_ids"]) == len(answers) == output["rollout_infos"]["num_turns"]
        for ids, mask, logprobs in zip(
            output["response_token_ids"], output["response_loss_mask"], output["rollout_logprobs"], strict=True
        ):
            assert len(ids) == len(mask)
            assert len(ids) <= CONFIG["max_tokens"]  # type: ignore[operator]
            assert sum(mask) == len(logprobs)  # ms-swift's rule
        (choice,) = output["response"]["choices"]
        assert choice["token_ids"] == output["response_token_ids"][-1]
        assert choice["finish_reason"] in ("stop", "length")
    assert server.ask("POST", "/infer/", body)[1][0]["response_token_ids"] == outputs[0]["response_token_ids"]


def test_the_other_routes(server: Running) -> None:
    assert server.ask("GET", "/health/", Authorization="") == (200, {"status": "ok"})
    assert server.ask("GET", "/get_world_size/") == (200, {"world_size": 1})
    status, kind = server.ask("POST", "/get_engine_type/")
    assert (status, kind["engine_type"], kind["enable_multi_turn"]) == (200, "AsyncLLMEngine", True)
    assert server.ask("POST", "/reset_prefix_cache/")[0] == 200
    for name in ("reset_encoder_cache", "reset_mm_cache", "close_communicator"):
        assert server.ask("POST", f"/{name}/")[0] == 200
    for name in (
        "init_communicator",
        "update_named_param",
        "update_flattened_params",
        "process_weights_after_loading",
    ):
        status, answer = server.ask("POST", f"/{name}/", {})
        assert status == 501
        assert "ms-swift's trainer sends weights by NCCL" in answer["error"]


def test_arguments_of_the_template_reach_the_conversation(server: Running) -> None:
    request = {**REQUEST, "chat_template_kwargs": {"enable_thinking": False}}  # the model's template reads no argument
    status, answer = server.ask("POST", "/infer/", {"infer_requests": [request], "request_config": CONFIG})
    assert status == 500
    assert "'enable_thinking', which the chat template of" in answer["error"]


def test_the_token_may_be_in_the_address(server: Running) -> None:
    for password, expected in ((TOKEN, 200), ("swordfisch", 401)):
        header = "Basic " + base64.b64encode(f"any:{password}".encode()).decode()
        assert server.ask("GET", "/get_world_size/", Authorization=header)[0] == expected


@pytest.mark.parametrize(
    ("request_", "config", "reason"),
    [
        ({**REQUEST, "images": ["x.png"]}, CONFIG, "images.0 is 'x.png': it must be base64, or the path of a file"),
        ({**REQUEST, "audios": ["x.wav"]}, CONFIG, "contains audio"),
        ({**REQUEST, "chat_template_kwargs": "x"}, CONFIG, "chat_template_kwargs must be an object"),
        ({**REQUEST, "messages": []}, CONFIG, "messages must be a list of messages"),
        (REQUEST, {**CONFIG, "n": 2}, "request_config.n=2 is not supported"),
        (REQUEST, {**CONFIG, "repetition_penalty": 1.1}, "request_config.repetition_penalty=1.1 is not supported"),
        (REQUEST, {**CONFIG, "max_tokens": 0}, "max_tokens=0 must be a positive number"),
    ],
)
def test_what_is_not_supported_is_refused(server: Running, request_: object, config: object, reason: str) -> None:
    status, answer = server.ask("POST", "/infer/", {"infer_requests": [request_], "request_config": config})
    assert status == 400
    assert reason in answer["error"]
