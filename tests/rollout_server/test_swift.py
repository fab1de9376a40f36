"""ms-swift with a rollout server: requests as its VLLMClient sends them, then its own client and its trainer's own code, which
read conversations and send weights in flight."""

from __future__ import annotations

import atexit
import base64
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from support.recipes import save_recipe
from support.rollout_servers import TOKEN, Running, running
from support.swift_client import ReceivingGroup, Swift, swift
from support.tiny import save_model
from turnwise import assembly
from turnwise.commands import serve

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
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swift")
    return save_recipe(folder, save_model(folder / "model"), limits={"turns": 2, "tokens_per_turn": 50})


@pytest.fixture(scope="module")
def server(recipe: Path) -> Iterator[Running]:
    with running(recipe) as server:
        yield server


# requests as they are sent


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


# its own client


@pytest.fixture(scope="module")
def theirs() -> Iterator[Swift]:
    pytest.importorskip("requests")
    with swift() as names:
        before = names.client.init_communicator

        def init_communicator(client: Any, device: Any) -> None:
            before(client, device)
            atexit.unregister(client.close_communicator)  # at exit, the servers of these tests have ended

        names.client.init_communicator = init_communicator
        yield names


@pytest.fixture(scope="module")
def receiving(recipe: Path) -> Iterator[Running]:
    """A server that receives weights: a group without NCCL stands in for the group on GPUs. Servers that are started after it
    have their own again."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "join_by_nccl", lambda: ReceivingGroup)
            server = stack.enter_context(running(recipe))
        yield server


def client_of(theirs: Swift, server: Running, **options: Any) -> Any:
    """Their client, as their trainer makes it with `--vllm_server_base_url`."""
    return theirs.client(base_urls=[f"http://any:{TOKEN}@{server.host}:{server.port}"], connection_timeout=5, **options)


def model_of(server: Running) -> Any:
    """The model of the recipe with its first weights."""
    return assembly.engine_model(server.config)


def samples_of(theirs: Swift, number: int) -> list[Any]:
    rows = [{"messages": [{"role": "user", "content": f"{n}+1?"}], "solution": str(n)} for n in range(number)]
    samples = [theirs.data.GRPOSample.from_row(row) for row in rows]
    for n, sample in enumerate(samples):
        sample.request_id = f"chatcmpl-{n}"
    return samples


def test_their_trainer_reads_the_conversations(theirs: Swift, server: Running) -> None:
    client = client_of(theirs, server)
    assert client.get_engine_type()["engine_type"] == "AsyncLLMEngine"
    assert (client.use_async_engine, client.enable_multi_turn, client.enable_lora) == (True, True, False)
    client.reset_mm_cache()
    samples = samples_of(theirs, 3)
    requests = [sample.to_infer_request(include_extra=True) for sample in samples]
    config = theirs.protocol.RequestConfig(
        n=1, max_tokens=12, temperature=0.9, top_p=1.0, top_k=-1, repetition_penalty=1.0, stop=[], return_details=True,
        logprobs=True, seed=7,
    )  # fmt: skip
    outputs = client.infer(requests, request_config=config)
    assert [type(output).__name__ for output in outputs] == ["RolloutOutput"] * 3
    assert [output.response.id for output in outputs] == ["chatcmpl-0", "chatcmpl-1", "chatcmpl-2"]
    for sample, output in zip(samples, outputs, strict=True):
        sample.apply_rollout_output(rollout_output=output)
        answers = [message for message in sample.messages if message["role"] == "assistant"]
        turns = sample.response_token_ids
        assert len(answers) == len(turns) == sample.rollout_infos["num_turns"]
        assert all(turns)
        assert [len(mask) for mask in sample.response_loss_mask] == [len(ids) for ids in turns]
        assert {weight for mask in sample.response_loss_mask for weight in mask} == {1}
        assert [len(logprobs) for logprobs in sample.rollout_logprobs] == [len(ids) for ids in turns]
        assert all(logprob <= 0 for logprobs in sample.rollout_logprobs for logprob in logprobs)
        assert (sample.finish_reason == "length") == output.response.choices[0].finish_reason.startswith("l")
        sent = theirs.utils.replace_assistant_response_with_ids(
            sample.messages, sample.response_token_ids, sample.response_loss_mask
        )
        assert [m["content"]["token_ids"] for m in sent if m["role"] == "assistant"] == turns
    again = client.infer(requests, request_config=config)
    assert [output.response_token_ids for output in again] == [output.response_token_ids for output in outputs]
    client.close_communicator()


def test_the_logprobs_are_those_of_the_tokens(theirs: Swift, server: Running) -> None:
    """The model's own forward pass on the token ids of their output."""
    client = client_of(theirs, server)
    (request,) = [sample.to_infer_request() for sample in samples_of(theirs, 1)]
    (output,) = client.infer(
        [request], request_config=theirs.protocol.RequestConfig(max_tokens=8, temperature=0.7, seed=1)
    )
    model = model_of(server)
    prompt, answer = output.response.prompt_token_ids, output.response_token_ids[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double() / 0.7, -1)[range(len(answer)), answer]
    assert output.rollout_logprobs[0] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_wrong_token_is_refused(theirs: Swift, server: Running) -> None:
    client = theirs.client(base_urls=[f"http://any:wrong@{server.host}:{server.port}"], connection_timeout=5)
    with pytest.raises(Exception, match="Authorization: Bearer <token>"):
        client.get_engine_type()


def test_without_a_gpu_the_refusal_says_what_to_do(theirs: Swift, server: Running) -> None:
    client = client_of(theirs, server)
    with pytest.raises(Exception, match=r"needs a GPU .*turnwise train RECIPE rollout_server\.url"):
        client.init_communicator(device="cpu")
    client.close_communicator()  # what they call at exit


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("way", ["buckets", "tensors"])
def test_their_trainer_sends_weights(theirs: Swift, receiving: Running, way: str) -> None:
    """The calls of `_move_full_model_to_vllm`. The conversations after that are those of the new weights."""
    client = client_of(theirs, receiving, group_ports=port())
    version = receiving.ask("GET", "/health")[1]["version"]
    client.init_communicator(device="cpu")
    model = model_of(receiving)
    torch.manual_seed(len(way))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    weights = [(name, parameter.data) for name, parameter in model.named_parameters()]
    if way == "buckets":
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in weights)
        for bucket in theirs.utils._create_parameter_buckets(weights, bucket_size_mb=size / 3 / (1 << 20)):
            flat = theirs.utils.FlattenedTensorBucket(named_tensors=bucket)
            client.update_flattened_params(flat.get_metadata(), flat.get_flattened_tensor())
    else:
        for name, tensor in weights:
            client.update_named_param(name, tensor)
    assert receiving.ask("GET", "/health")[1]["version"] == version  # nothing is loaded before all has arrived
    client.process_weights_after_loading()
    client.reset_prefix_cache()
    client.reset_encoder_cache()
    assert receiving.ask("GET", "/health")[1]["version"] == version + 1
    (request,) = [sample.to_infer_request() for sample in samples_of(theirs, 1)]
    (output,) = client.infer(
        [request], request_config=theirs.protocol.RequestConfig(max_tokens=6, temperature=1.0, seed=3)
    )
    prompt, answer = output.response.prompt_token_ids, output.response_token_ids[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)[range(len(answer)), answer]
    assert output.rollout_logprobs[0] == pytest.approx(expected.tolist(), abs=1e-4)
    status, answer = receiving.ask("POST", "/lease", {"owner": "another trainer"})
    assert status == 409
    assert "ms-swift's trainer at 127.0.0.1" in answer["error"]
    client.close_communicator()
    status, lease = receiving.ask("POST", "/lease", {"owner": "another trainer"})
    assert status == 200
    assert receiving.ask("POST", "/lease/release", {"lease": lease["lease"]})[0] == 200


def test_half_of_the_weights_is_refused(theirs: Swift, receiving: Running) -> None:
    client = client_of(theirs, receiving, group_ports=port())
    version = receiving.ask("GET", "/health")[1]["version"]
    client.init_communicator(device="cpu")
    name, parameter = next(iter(model_of(receiving).named_parameters()))
    client.update_named_param(name, parameter.data)
    with pytest.raises(RuntimeError, match=f"of the weights are missing.*goes on with version {version}"):
        client.process_weights_after_loading()
    assert receiving.ask("GET", "/health")[1]["version"] == version
    client.close_communicator()


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        (
            "/update_named_param/",
            {"name": "w", "dtype": "torch.float32", "shape": [2]},
            409,
            "send /init_communicator/ first",
        ),
        ("/update_named_param/", {"name": "w", "dtype": "torch.strange", "shape": [2]}, 400, "dtype must be one of"),
        (
            "/update_named_param/",
            {"name": "w", "dtype": "torch.int8", "shape": [-2]},
            400,
            "shape must not have negative",
        ),
        ("/update_flattened_params/", {"metadatas": []}, 400, "metadatas: List should have at least 1 item"),
        ("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 3}, 400, "world_size=3 must be 2"),
        ("/update_adapter_param/", {}, 501, "merges its adapter and sends all weights"),
    ],
)
def test_requests_out_of_order_or_malformed(
    receiving: Running, path: str, body: object, status: int, reason: str
) -> None:
    answered, answer = receiving.ask("POST", path, body)
    assert (answered, reason in answer["error"]) == (status, True), answer


def test_weights_that_do_not_fit_are_refused_before_they_are_sent(theirs: Swift, receiving: Running) -> None:
    receiving.ask("POST", "/init_communicator/", {"host": "0.0.0.0", "port": port(), "world_size": 2})
    huge = {"name": "w", "dtype": "torch.float32", "shape": [1 << 40]}
    status, answer = receiving.ask("POST", "/update_named_param/", huge)
    assert status == 413
    assert f"{4 << 40} were announced" in answer["error"]
    assert receiving.ask("POST", "/close_communicator/")[0] == 200


def test_two_members_join_and_split_a_broadcast() -> None:
    """`split_tensors` against tensors of several types in one buffer."""
    from turnwise.engines.vllm.worker import TensorPlace, join_by_nccl, split_tensors

    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    }
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
    places = [
        TensorPlace(name="a", dtype="float32", shape=[2, 3], start=0, end=24),
        TensorPlace(name="b", dtype="bfloat16", shape=[2], start=24, end=28),
    ]
    split = split_tensors(flat, places)
    assert all(torch.equal(split[name], tensor) for name, tensor in tensors.items())
    assert torch.cuda.is_available() or join_by_nccl() is None
