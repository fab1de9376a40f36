"""SGLang without a server: the requests, the answers of a real server as they were recorded, the checks of weights."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import HttpServer, ServerFailed, ServerLost, ServerRefused
from turnwise.engines.remote.launch import ServedModel
from turnwise.engines.remote.servers import Owner, Part
from turnwise.engines.remote.weights import read_shapes
from turnwise.engines.sglang.api import SglangApi, image_data, sampling_params
from turnwise.engines.sglang.images import decode_images
from turnwise.engines.sglang.launch import server_command
from turnwise.engines.sglang.weights import check_checksums, file_contents
from turnwise.errors import ConfigError, EngineError
from turnwise.options.engines import SglangEngineSection
from turnwise.options.schema import Config
from turnwise.types import Media, Request, Sampling

SERVER = HttpServer("http://127.0.0.1:1")
META: dict[str, Any] = {
    "id": "abc",
    "finish_reason": {"type": "stop", "matched": 2},
    "prompt_tokens": 6,
    "output_token_logprobs": [[-3.73, 22, None], [-2.27, 20, None], [-0.71, 2, None]],
    "completion_tokens": 3,
    "cached_tokens": 5,
}
"""Recorded from SGLang 0.5.23, shortened."""


def part(api: SglangApi, known: int = 0, stop: tuple[int, ...] = (2,), sent: int = 0, **meta: Any) -> Part:
    """The part of an event of a request that was sent with the version `sent` of the weights."""
    request = Request(conversation="a", token_ids=[5], sampling=Sampling(stop_token_ids=stop))
    event = {"output_ids": [22, 20, 2], "meta_info": {**META, **meta}}
    return api._part(SERVER, event, request, known, sent)


def make_api(labels: bool = False, adapter: bool = False) -> SglangApi:
    return SglangApi(vocab_size=760, context=2048, labels=labels, adapter=adapter, owner=Owner())


def test_an_event_becomes_a_part() -> None:
    assert part(make_api()) == Part(
        token_ids=[22, 20, 2], logprobs=[-3.73, -2.27, -0.71], finish="stop", cached_tokens=5
    )
    # servers that send all tokens with each event
    assert part(make_api(), known=2).token_ids == [2]
    assert part(make_api(), known=2).logprobs == [-0.71]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        (None, None),
        ({"type": "length", "length": 3}, "length"),
        ({"type": "stop", "matched": "12"}, "stop"),
        ({"type": "stop", "matched": 7}, "aborted"),  # a stop token of the server's own: the engine asks for the rest
        ({"type": "abort", "message": "Aborted"}, "aborted"),
    ],
)
def test_finish_reasons(reason: dict[str, Any] | None, finish: str | None) -> None:
    assert part(make_api(), finish_reason=reason).finish == finish


def test_a_request_that_the_server_could_not_serve_fails() -> None:
    reason = {"type": "abort", "message": "Input length exceeds the maximum", "status_code": 400}
    with pytest.raises(ServerRefused, match="Input length exceeds the maximum"):
        part(make_api(), finish_reason=reason)
    with pytest.raises(ServerFailed, match="queue"):  # which may pass
        part(make_api(), finish_reason={"type": "abort", "message": "The queue is full", "status_code": 503})


def test_versions_come_from_the_labels_of_this_run() -> None:
    api = make_api(labels=True)
    mine = f"{api._owner.name}#{api._owner.process}:1795349217"
    spans = [{"version": f"{mine}:4", "start": 0, "end": 1}, {"version": f"{mine}:5", "start": 1, "end": 3}]
    assert part(api, weight_versions=spans).all_versions == [4, 5, 5]
    assert part(api, weight_versions=spans, finish_reason=None).all_versions is None
    with pytest.raises(ServerLost, match="'default', which is not of this run"):
        part(api, weight_versions=[{"version": "default", "start": 0, "end": 3}])
    with pytest.raises(ServerLost, match="not of this run"):
        part(api, weight_versions=[{"version": "another:1795349217:5", "start": 0, "end": 3}])
    killed = f"{api._owner.name}#ab12"  # its version 5 may be other weights
    with pytest.raises(ServerLost, match="not of this run"):
        part(api, weight_versions=[{"version": f"{killed}:1795349217:5", "start": 0, "end": 3}])
    with pytest.raises(EngineError, match="weight version of 1 of 3 tokens"):
        part(api, weight_versions=spans[:1])


@pytest.mark.parametrize(("ahead", "expected"), [(True, [3, 4, 4]), (False, [4, 4, 5])])
def test_a_pause_in_place_leaves_one_token_of_the_weights_before(ahead: bool, expected: list[int]) -> None:
    """SGLang's scheduler launches a pass before it has read the tokens of the one before. A pause in place leaves that pass
    alone, and its tokens are read after the label has changed (managers/scheduler.py, pause_generation)."""
    api = SglangApi(vocab_size=9, context=9, labels=True, pause="in_place", owner=Owner())
    api._facts[SERVER.url] = {"disable_overlap_schedule": not ahead}
    mine = f"{api._owner.name}#{api._owner.process}:1795349217"
    spans = [{"version": f"{mine}:4", "start": 0, "end": 2}, {"version": f"{mine}:5", "start": 2, "end": 3}]
    # nothing of this request had been read when the weights became version 4: its first token is of version 3
    assert part(api, sent=3, weight_versions=spans).all_versions == expected


def test_a_server_falls_asleep_when_all_its_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's scheduler dies if it shall free memory while a request runs (managers/scheduler_components/weight_updater.py)."""
    posted: list[tuple[str, Any]] = []

    async def post(path: str, body: Any) -> Any:
        posted.append((path, body.get("mode") or body.get("tags")))

    monkeypatch.setattr(SERVER, "post", post)
    api = make_api()
    asyncio.run(api.sleep(SERVER))
    assert posted == [("/pause_generation", "abort"), ("/release_memory_occupation", None)]
    posted.clear()
    for part in ("weights", "cache"):
        asyncio.run(api.wake(SERVER, part))
    assert posted == [("/resume_memory_occupation", tags) for tags in (["weights"], ["cuda_graph", "kv_cache"])]


def test_another_trainer_is_refused_until_its_lease_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    api, now = make_api(), 1_795_349_217
    monkeypatch.setattr(SERVER, "now", lambda: float(now))  # the server's clock, which all trainers read

    def claim(label: str) -> None:
        async def answer(path: str, *, timeout: float | None = None) -> Any:
            assert path == "/model_info"
            return {"weight_version": label}

        monkeypatch.setattr(SERVER, "get", answer)
        asyncio.run(api.claim(SERVER))

    for label in (
        "default",
        "released",
        "3",
        f"{api._owner.name}#{api._owner.process}:{now}:7",
        f"other:{now - 901}:7",
    ):
        claim(label)
    claim(f"{api._owner.name}#ab12:{now}:7")  # a killed process, of which this is the replacement
    with pytest.raises(EngineError, match=r"another trainer \(host:/runs/a\) owns .* wait 800 s"):
        claim(f"host:/runs/a#ab12:{now - 100}:7")


@pytest.mark.parametrize(("mine", "released"), [(True, True), (False, False)])
def test_only_the_owner_releases_a_server(monkeypatch: pytest.MonkeyPatch, mine: bool, released: bool) -> None:
    """A trainer that failed before it was ready may find that another one has the server meanwhile."""
    api, posted = make_api(), list[str]()
    label = f"{api._owner.name}#{api._owner.process}:1795349217:7" if mine else "host:/runs/a#ab12:1795349217:7"

    async def answer(path: str, *, timeout: float | None = None) -> Any:
        return {"weight_version": label}

    async def post(path: str, body: Any) -> Any:
        posted.append(body["new_version"])

    monkeypatch.setattr(SERVER, "get", answer)
    monkeypatch.setattr(SERVER, "post", post)
    asyncio.run(api.release(SERVER))
    assert posted == (["released"] if released else [])


def test_sampling_parameters() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, min_p=0.1, max_tokens=9, stop=("a",), stop_token_ids=(5, 2, 5))
    assert sampling_params(sampling, None) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "max_new_tokens": 9,
        "stop": ["a"],
        "stop_token_ids": [2, 5],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    params = sampling_params(Sampling(top_k=4), 11)
    assert (params["top_k"], params["sampling_seed"], params["ignore_eos"]) == (4, 11, True)
    assert "stop" not in params


def image(start: int, **inputs: torch.Tensor) -> Media:
    return Media(kind="image", start=start, length=2, source=None, inputs=inputs)


def test_images_become_one_text_that_the_server_reads() -> None:
    grids = [torch.tensor([[1, 4, 2]]), torch.tensor([[1, 2, 4]])]
    pixels = [torch.rand(8, 6), torch.rand(8, 6)]
    media = [image(1 + 3 * n, pixel_values=pixels[n], image_grid_thw=grids[n]) for n in range(2)]
    request = Request(conversation="a", token_ids=[5, 9, 9, 5, 9, 9, 5], media=media, sampling=Sampling())
    (text,) = image_data(request) or ()
    decoded = decode_images(text)
    assert decoded["format"] == "processor_output"
    assert decoded["offsets"] == [[1, 2], [4, 5]]
    assert torch.equal(decoded["pixel_values"], torch.cat(pixels))
    assert torch.equal(decoded["image_grid_thw"], torch.cat(grids))
    assert decode_images("https://example.org/a.png") == "https://example.org/a.png"
    assert image_data(Request(conversation="a", token_ids=[5], sampling=Sampling())) is None


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (
            image(0, pixel_values=torch.zeros(1, 3, 4, 4)),
            r"returns pixel_values for an image, and engine\.name=sglang takes",
        ),
        (
            image(2, pixel_values=torch.zeros(8, 6), image_grid_thw=torch.ones(1, 3)),
            "other tokens between its placeholders",
        ),
        (Media(kind="video", start=0, length=2, source=None, inputs={}), "contains a video"),
        (
            image(0, pixel_values=torch.zeros(8, 6), image_grid_thw=torch.ones(1, 3)),
            "has 1 tokens 9 that belong to no image",
        ),
    ],
)
def test_images_that_servers_do_not_take_are_refused(media: Media, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        image_data(Request(conversation="a", token_ids=[9, 9, 9, 5], media=[media], sampling=Sampling()))


# weights

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(30.0).reshape(10, 3),
    **{f"model.layers.0.self_attn.{name}_proj.weight": torch.full((2, 3), n) for n, name in enumerate("qkv")},
    "model.layers.0.mlp.gate_proj.weight": torch.full((4, 3), 7.0),
    "model.layers.0.mlp.up_proj.weight": torch.full((4, 3), 8.0),
    "model.norm.weight": torch.ones(3),
}


def saved(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    save_file(weights, folder / "update.safetensors")
    return folder / "update.safetensors"


def checksum(*tensors: torch.Tensor) -> str:
    """What SGLang reports for a weight on the CPU."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def as_served(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """The checksums of a server with these weights: fused projections, embeddings filled up to 64 rows."""
    parts, layer = list(weights.values()), "model.layers.0"
    return {
        "model.embed_tokens.weight": checksum(parts[0], torch.zeros(54, 3)),
        f"{layer}.self_attn.qkv_proj.weight": checksum(*parts[1:4]),
        f"{layer}.mlp.gate_up_proj.weight": checksum(*parts[4:6]),
        "model.norm.weight": checksum(parts[6]),
        "model.rotary_emb.cos_sin_cache": "0123",
    }


def test_checksums_of_a_server_are_compared_with_the_file(tmp_path: Path) -> None:
    file = saved(tmp_path, WEIGHTS)
    check_checksums("S", as_served(WEIGHTS), file_contents(file))
    unpadded = {**as_served(WEIGHTS), "model.embed_tokens.weight": checksum(WEIGHTS["model.embed_tokens.weight"])}
    check_checksums("S", unpadded, file_contents(file))  # Gemma 3
    for name in WEIGHTS:
        changed = {**WEIGHTS, name: WEIGHTS[name].clone()}
        changed[name].view(-1)[-1] += 1
        with pytest.raises(EngineError, match="S has other values of model"):
            check_checksums("S", as_served(changed), file_contents(file))


def test_weights_that_do_not_fit_are_refused_before_they_are_sent(tmp_path: Path) -> None:
    tied = {**WEIGHTS, "lm_head.weight": torch.zeros(10, 3)}
    shapes = read_shapes([saved(tmp_path, tied)])
    shapes.check(file_contents(saved(tmp_path, WEIGHTS)).shapes)
    norm = "model.norm.weight"
    without = {name: tensor for name, tensor in WEIGHTS.items() if name != norm}
    for weights, message in (
        (without, r"1 of the weights are missing: model\.norm\.weight"),
        ({**WEIGHTS, norm: torch.ones(4)}, r"have another shape: model\.norm\.weight"),
        ({**WEIGHTS, "model.more": torch.ones(4)}, r"are not the model's: model\.more"),
    ):
        with pytest.raises(EngineError, match=message):
            shapes.check(file_contents(saved(tmp_path, weights)).shapes)


# the command


def command(tmp_path: Path, **given: Any) -> list[str]:
    options = SglangEngineSection.model_validate(
        {"name": "sglang", "python": "p"}
        | {name: given.pop(name) for name in ("keep_seeds", "arguments", "sleep") if name in given}
    )
    # a token of the KV cache takes 1024 bytes
    facts = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 128}
    served: dict[str, Any] = {
        "path": "/m", "facts": facts, "dtype": "float32", "cpu": True, "vocab_size": 9, "context": 2048, "memory_gb": None,
        "max_requests": 1, "trained": True, "lora_rank": None, "devices": list, "logs": tmp_path, "owner": Owner(),
    }  # fmt: skip
    made = server_command(options, ServedModel(**{**served, **given}), 2048, number=1, port=7, token="t")
    assert made.log == tmp_path / "sglang-1.log"
    return list(made.arguments)


def test_the_command_of_a_server(tmp_path: Path) -> None:
    on_cpu = command(tmp_path)
    assert on_cpu[:3] == ["p", "-m", "sglang.launch_server"]
    assert {"--host=127.0.0.1", "--port=7", "--api-key=t", "--context-length=2054", "--device=cpu"} <= set(on_cpu)
    assert not [argument for argument in on_cpu if argument.startswith("--max-total-tokens")]
    on_gpu = command(tmp_path, cpu=False, keep_seeds=True, lora_rank=8, arguments=["--tp-size=2"])
    assert "--device=cpu" not in on_gpu
    assert not [argument for argument in on_gpu if argument.startswith("--max-total-tokens")]
    assert {"--enable-deterministic-inference", "--max-lora-rank=8"} <= set(on_gpu)
    assert on_gpu[-1] == "--tp-size=2"
    assert "--max-total-tokens=512" in command(tmp_path, memory_gb=0.5 / 1024)
    # without a copy on the CPU a server has no weights after it has slept (load_model_utils.py: enable_cpu_backup)
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set(command(tmp_path, cpu=False, sleep=True))


# the recipe


def built(tmp_path: Path, **engine: Any) -> RemoteEngine:
    """The engine of a recipe with the demo's model."""
    demo = Path(__file__).resolve().parents[2] / "demo"
    recipe = {
        "model": {"path": str(demo / "model"), "device": "cpu", **engine.pop("model", {})},
        "data": {"train": str(demo / "train.jsonl")},
        "sampling": engine.pop("sampling", {}),
        "deterministic": engine.pop("deterministic", False),
        "policies": engine.pop("policies", {}),
        "engine": {"name": "sglang", **engine},
        "output": str(tmp_path),
    }
    made = assembly.engine(Config.model_validate(recipe), Renderer.from_pretrained(demo / "model"), object())
    assert isinstance(made, RemoteEngine)
    return made


def arguments(engine: RemoteEngine) -> list[list[str]]:
    """The commands of the servers that the engine will start."""
    return [list(replica.process.command.arguments) for replica in engine._replicas.all if replica.process is not None]


def test_options_of_the_recipe(tmp_path: Path) -> None:
    one, two = arguments(built(tmp_path, replicas=2, memory_gb=0.25, python="/py", arguments=["--log-level=error"]))
    assert one[0] == two[0] == "/py"
    assert one[-1] == "--log-level=error"
    # a token has keys and values of 3 layers, with 2 heads of 32 numbers
    assert f"--max-total-tokens={2**28 // (2 * 3 * 2 * 32 * 4)}" in one
    assert not arguments(built(tmp_path, url="http://127.0.0.1:30000"))
    assert built(tmp_path)._api._pause_mode == "retract"  # type: ignore[attr-defined]
    assert built(tmp_path, update_mode="in_place")._api._pause_mode == "in_place"  # type: ignore[attr-defined]
    assert built(tmp_path, model={"lora": {"rank": 4}})._api._pause_mode == "abort"  # type: ignore[attr-defined]
    assert "--max-lora-rank=4" in arguments(built(tmp_path, model={"lora": {"rank": 4}}))[0]
    second = {"second": {"train": True, "lora": 8}}
    command = arguments(built(tmp_path, model={"lora": {"rank": 4}}, policies=second))[0]
    assert {"--max-lora-rank=8", "--max-loras-per-batch=3"} <= set(command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_seeds": True}, r"engine\.keep_seeds=true needs a GPU"),
        ({"url": "http://127.0.0.1:1", "memory_gb": 1.0}, r"engine\.memory_gb has no effect with engine\.url"),
        ({"sampling": {"top_k": 5, "top_p": 0.9}}, r"sampling\.top_k and sampling\.top_p cannot be combined"),
        ({"model": {"lora": {"rank": 4, "dora": True}}}, r"model\.lora\.dora=true cannot be combined"),
        ({"model": {"lora": {"rank": 4}}, "update_mode": "in_place"}, r"engine\.update_mode=in_place has no effect"),
        (
            {
                "model": {"lora": {"rank": 4}},
                "policies": {"second": {"train": True, "lora": {"rank": 4, "dora": True}}},
            },
            r"the policy 'second': model\.lora\.dora=true cannot be combined",
        ),
        ({"deterministic": True}, r"deterministic=true cannot be combined with engine\.name=sglang"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(tmp_path, **options)
