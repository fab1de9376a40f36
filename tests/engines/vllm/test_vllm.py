"""vLLM: the options that its server is started with, and vLLM in the process of the trainer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import zlib
from pathlib import Path
from typing import Any

import engine_env
import pytest
import torch
from aiohttp import web

from support.vision import save_vision_model
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.config.train_checks import refuse_without_effect
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.servers import Owner, Replica
from turnwise.engines.remote.weights import Sending, WeightUpdate
from turnwise.engines.vllm.api import VllmApi, sampling_params
from turnwise.engines.vllm.in_process import started_processes_have
from turnwise.errors import ConfigError
from turnwise.types import Sampling

# The options of engine.name=vllm: what the servers are started with, and what is refused.


MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"


def recipe(engine: dict[str, Any] | None = None, **sections: Any) -> Any:
    tree = {
        "model": {"path": str(MODEL), "device": "cpu", **sections.pop("model", {})},
        "data": {"train": "rows.jsonl"},
        "engine": {"name": "vllm", **(engine or {})},
        **sections,
    }
    return checked(tree, source="test")


def replicas_of(engine: dict[str, Any] | None = None, *, trained: bool = True, **sections: Any) -> list[Replica]:
    config = recipe(engine, **sections)
    built = assembly.engine(config, assembly.renderer(config), object() if trained else None)
    assert isinstance(built, RemoteEngine)
    return built._replicas.all


def command_of(replica: Replica) -> tuple[list[str], dict[str, str]]:
    assert replica.process is not None
    return list(replica.process.command.arguments), dict(replica.process.command.environment)


def value(arguments: list[str], option: str) -> str:
    return arguments[len(arguments) - 1 - arguments[::-1].index(option) + 1]


def test_a_started_server_gets_the_options_of_the_recipe(tmp_path: Path) -> None:
    first, second = replicas_of(
        {"python": "/env/bin/python", "replicas": 2, "arguments": ["--enforce-eager"], "memory_gb": 0.5, "sleep": True,
         "start_timeout": 77.0, "timeout": 33.0},
        model={"device": "cuda"},
        limits={"context": 300},
        max_concurrent=10,
        output=str(tmp_path),
    )  # fmt: skip
    arguments, environment = command_of(first)
    assert arguments[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert arguments[-1] == "--enforce-eager"
    assert value(arguments, "--host") == "127.0.0.1"
    assert value(arguments, "--model") == str(MODEL)
    assert value(arguments, "--dtype") == "bfloat16"  # of a model on a GPU
    assert value(arguments, "--max-model-len") == "300"
    assert value(arguments, "--kv-cache-memory-bytes") == str(2**29)
    assert value(arguments, "--max-num-seqs") == "5"
    assert value(arguments, "--logprobs-mode") == "processed_logprobs"
    assert "--enable-sleep-mode" in arguments
    assert "--enable-lora" not in arguments
    assert first.server.url.endswith(value(arguments, "--port"))
    assert second.server.url != first.server.url
    assert first.process is not None
    assert first.process.command.start_timeout == 77.0
    assert first.process.command.log == tmp_path / "engine" / "vllm-0.log"
    assert first.server.limits.idle == first.server.limits.answer == 33.0
    # the token is in the environment, where other users of the machine cannot read it
    token = environment["VLLM_API_KEY"]
    assert len(token) > 30
    assert token not in " ".join(arguments)
    assert first.server._headers == {"Authorization": f"Bearer {token}"}
    assert str(Path(assembly.__file__).parents[2]) in environment["PYTHONPATH"]


def test_a_server_on_the_cpu_leaves_memory_to_the_trainer_and_holds_one_sequence(tmp_path: Path) -> None:
    """vLLM itself takes nine tenths of the memory of the machine, and does not start if they are not free."""
    python = {"python": "/env/bin/python"}
    (small,) = replicas_of(python)
    assert value(command_of(small)[0], "--kv-cache-memory-bytes") == str(2**30)
    facts = json.loads((MODEL / "config.json").read_text())
    facts |= {"max_position_embeddings": 2**20}
    (tmp_path / "model").mkdir()
    for file in MODEL.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps(facts))
    (long,) = replicas_of(python, model={"path": str(tmp_path / "model")})
    token_bytes = 2 * 3 * 2 * 32 * 4  # keys and values, 3 layers, 2 heads of 32 numbers
    assert value(command_of(long)[0], "--kv-cache-memory-bytes") == str((2**20 + 512) * token_bytes)
    (gpu,) = replicas_of(python, model={"device": "cuda"})
    assert "--kv-cache-memory-bytes" not in command_of(gpu)[0]
    assert "--gpu-memory-utilization" not in command_of(gpu)[0]
    # vLLM compares this share with the free memory also where the size of the cache is given (v1/worker/utils.py)
    (given,) = replicas_of({**python, "memory_gb": 4.0}, model={"device": "cuda"})
    assert value(command_of(given)[0], "--gpu-memory-utilization") == "0.01"


def test_an_adapter_is_served_with_a_rank_that_vllm_supports() -> None:
    (replica,) = replicas_of(model={"lora": {"rank": 12}})
    assert value(command_of(replica)[0], "--max-lora-rank") == "16"
    (replica,) = replicas_of(
        model={"lora": {"rank": 12}}, trained=False
    )  # a new adapter changes nothing before training
    assert "--enable-lora" not in command_of(replica)[0]


def test_a_server_has_room_for_the_adapters_of_the_trained_policies_without_an_engine_of_their_own() -> None:
    policies = {"second": {"train": True, "lora": 30}, "third": {"train": True, "memory_gb": 1}}
    (replica,) = replicas_of(model={"lora": {"rank": 12}}, policies=policies)
    command = command_of(replica)[0]
    assert [value(command, f"--max-{name}") for name in ("lora-rank", "loras", "cpu-loras")] == ["32", "2", "3"]


def test_given_servers_are_used_with_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "abc")
    replicas = replicas_of({"url": ["http://a:1/", "http://b:2"], "api_key_env": "SERVER_KEY"})
    assert [replica.server.url for replica in replicas] == ["http://a:1", "http://b:2"]
    assert all(replica.process is None for replica in replicas)
    assert replicas[0].server._headers == {"Authorization": "Bearer abc"}
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match="there is no such environment variable"):
        replicas_of({"url": "http://a:1", "api_key_env": "SERVER_KEY"})


def test_weights_are_written_to_the_folder_of_the_recipe_and_checked_as_often_as_it_says(tmp_path: Path) -> None:
    options = {"weight_folder": str(tmp_path / "w"), "check_weights_every": 4, "sleep": True}
    config = recipe(options, model={"device": "cuda"})
    engine = assembly.engine(config, assembly.renderer(config), object())
    assert isinstance(engine, RemoteEngine)
    assert engine._files is not None
    assert engine._files._folder == tmp_path / "w"
    publisher: Any = engine.publisher(object())  # pyright: ignore[reportArgumentType]
    assert [update for update in range(10) if publisher._probe.due(update)] == [0, 1, 2, 4, 8]
    assert publisher._probe.tolerance == 1e-4
    assert publisher._sleeper is engine


def test_weights_of_a_quantized_server_may_differ_by_its_rounding(tmp_path: Path) -> None:
    config = recipe({"weight_folder": str(tmp_path), "arguments": ["--kv-cache-dtype", "fp8"]})
    engine = assembly.engine(config, assembly.renderer(config), object())
    publisher: Any = engine.publisher(object())  # pyright: ignore[reportArgumentType]
    assert publisher._probe.averaged
    assert publisher._probe.tolerance == 1.0
    assert publisher._probe.bfloat16


def test_weights_are_broadcast_where_the_recipe_says_so() -> None:
    config = recipe({"weight_transfer": "collective"})
    engine = assembly.engine(config, assembly.renderer(config), object())
    assert isinstance(engine, RemoteEngine)
    weights = {"weight": torch.ones(3), "other": torch.zeros(2, 2)}
    assert engine._files is not None
    update = engine._files.write(4, weights)
    weights["weight"].add_(1.0)  # the trainer changes its weights in place
    assert update.tensors is not None
    assert update.path is None
    assert update.tensors["weight"].tolist() == [1.0, 1.0, 1.0]
    assert (
        update.checksum == f"{zlib.crc32(b''.join(tensor.numpy().tobytes() for tensor in update.tensors.values())):08x}"
    )
    sender = engine._api._sender  # type: ignore[attr-defined]
    assert sender._groups.sending == Sending("gloo", "cpu")


def test_weights_are_sent_from_the_gpu_of_the_model() -> None:
    config = recipe({"weight_transfer": "collective"}, model={"device": "cuda:1"})
    engine = assembly.engine(config, assembly.renderer(config), object())
    assert engine._api._sender._groups.sending == Sending("nccl", "cuda:1")  # type: ignore[attr-defined]


# Adapters: vLLM keeps the request that has loaded a name, and reads the files of a request that loads in place in every step.


def test_each_update_of_an_adapter_has_a_name_of_its_own(tmp_path: Path) -> None:
    async def main() -> list[tuple[str, Any]]:
        calls: list[tuple[str, Any]] = []

        async def note(request: web.Request) -> web.Response:
            calls.append((request.path, await request.json() if request.can_read_body else dict(request.query)))
            return web.Response(text='"Success"')

        app = web.Application()
        app.router.add_post("/{path:.*}", note)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server = HttpServer(f"http://127.0.0.1:{runner.addresses[0][1]}")
        api = VllmApi(vocab_size=9, labels=True, adapter=True, owner=Owner())
        api._models[server.url] = "base"
        for number, policy in ((1, ""), (1, "second"), (2, "")):
            path = tmp_path / f"{number}{policy}"
            update = WeightUpdate(version=number, path=path, adapter=True, checksum="", size=1, policy=policy)
            await api.pause(server)
            await api.load(server, update)
            calls.append(("serves", api._served_model(server, policy)))
        await server.close()
        await runner.cleanup()
        return calls

    calls = asyncio.run(main())
    assert sum(path == "/update_weight_version" for path, _ in calls) == 2  # not for the further policy
    calls = [call for call in calls if call[0] != "/update_weight_version"]
    first, other, second = (name for path, name in calls if path == "serves")
    assert len({first, other, second}) == 3
    assert calls == [
        ("/pause", {"mode": "abort"}),  # a request that runs keeps its adapter
        ("/v1/load_lora_adapter", {"lora_name": first, "lora_path": str(tmp_path / "1")}),
        ("serves", first),
        ("/pause", {"mode": "abort"}),
        ("/v1/load_lora_adapter", {"lora_name": other, "lora_path": str(tmp_path / "1second")}),
        ("serves", other),
        ("/pause", {"mode": "abort"}),
        ("/v1/load_lora_adapter", {"lora_name": second, "lora_path": str(tmp_path / "2")}),
        ("/v1/unload_lora_adapter", {"lora_name": first}),
        ("serves", second),
    ]


LOADS = """
import sys, types
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as Manager

class Slots(LRUCacheLoRAModelManager):
    lora_slots = capacity = 1
    def __init__(self): self.known = {}
    def __len__(self): return len(self.known)
    def remove_adapter(self, number): self.known.pop(number, None)
    def remove_oldest_adapter(self): self.known.pop(next(iter(self.known)))
    def add_adapter(self, lora): self.known[lora.id] = lora; return True
    def get_adapter(self, number): return self.known.get(number)
    def activate_adapter(self, number): pass
    def set_adapter_mapping(self, mapping): pass

manager, loads = Manager.__new__(Manager), []
manager._adapter_manager = Slots()
manager.list_adapters = lambda: set(manager._adapter_manager.known)
manager._load_adapter = lambda given: loads.append(given.lora_path) or types.SimpleNamespace(id=given.lora_int_id)
for number in (1, 2):
    given = LoRARequest(lora_name=f"policy-adapter-{number}", lora_int_id=number, lora_path=f"/update-{number}")
    manager.add_adapter(given)
    for _ in range(100):
        manager.set_active_adapters({given}, None)
print(" ".join(loads))
"""


@pytest.mark.engines
def test_vllms_worker_reads_an_adapter_once_for_an_update() -> None:
    """The worker's own class (lora/worker_manager.py), with requests as turnwise makes them, over 200 steps."""
    python = str(engine_env.python("vllm"))
    result = subprocess.run([python, "-c", LOADS], capture_output=True, text=True, check=False, timeout=300)
    assert result.stdout.splitlines()[-1:] == ["/update-1 /update-2"], result.stderr[-2000:]


# The engine in the process of the trainer: its devices


def test_the_processes_of_the_engine_in_this_process_get_their_devices_and_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("RANK", "0")
    (named,) = replicas_of({"mode": "in_process", "devices": [2]}, model={"device": "cuda"})
    (free,) = replicas_of({"mode": "in_process"}, model={"device": "cuda"})
    assert [one.server._environment for one in (named, free)] == [  # type: ignore[attr-defined]
        {"CUDA_VISIBLE_DEVICES": "2"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    before = dict(os.environ)
    with started_processes_have({"CUDA_VISIBLE_DEVICES": "2", "NEW_ONE": "a"}):
        seen = dict(os.environ)
    assert {name: seen.get(name) for name in ("CUDA_VISIBLE_DEVICES", "NEW_ONE", "RANK")} == {
        "CUDA_VISIBLE_DEVICES": "2",
        "NEW_ONE": "a",
        "RANK": None,
    }
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_sleep_is_refused_on_the_cpu(name: str) -> None:
    config = recipe({"sleep": True, "name": name})
    with pytest.raises(ConfigError, match=r"engine\.sleep=true needs a GPU.*model\.device=cpu"):
        assembly.engine(config, assembly.renderer(config), object())


def test_a_server_for_a_vision_model_takes_normalized_pixels(tmp_path: Path) -> None:
    arguments, _ = command_of(replicas_of(model={"path": str(save_vision_model(tmp_path))})[0])
    assert "--no-mm-device-do-normalize" in arguments
    assert value(arguments, "--limit-mm-per-prompt") == '{"video": 0}'
    assert "--no-mm-device-do-normalize" not in command_of(replicas_of()[0])[0]


def test_the_engine_in_this_process_needs_vllm_here() -> None:
    config = recipe({"mode": "in_process"})
    engine = assembly.engine(config, assembly.renderer(config), None)
    with pytest.raises(ConfigError, match=r"engine\.mode=in_process needs vLLM in the environment"):
        asyncio.run(engine.start())


@pytest.mark.parametrize(
    ("engine", "sections", "message"),
    [
        ({"url": "http://a:1", "replicas": 2}, {}, "engine.replicas has no effect with engine.url"),
        ({"url": "http://a:1", "memory_gb": 1.0}, {}, "engine.memory_gb has no effect with engine.url"),
        ({"url": []}, {}, "engine.url is an empty list"),
        ({"api_key_env": "KEY"}, {}, "engine.api_key_env has no effect without engine.url"),
        ({"mode": "in_process", "python": "/p"}, {}, "engine.python has no effect with engine.mode=in_process"),
        ({}, {"sampling": {"top_p": 0.9, "min_p": 0.1}}, "applies min_p before top_p"),
        ({}, {"sampling": {"temperature": 2.5}}, "a sampling temperature of 2.5 is above 2"),
        ({}, {"model": {"lora": {"rank": 4, "dora": True}}}, "model.lora.dora=true cannot be combined"),
        (
            {"weight_transfer": "collective", "weight_folder": "w"},
            {},
            "engine.weight_folder has no effect with engine.weight_transfer=collective",
        ),
        (
            {"weight_transfer": "collective"},
            {"model": {"lora": {"rank": 4}}},
            "engine.weight_transfer=collective cannot be combined with model.lora.rank",
        ),
        ({}, {"deterministic": True}, "deterministic=true cannot be combined with engine.name=vllm"),
    ],
)
def test_what_has_no_effect_or_cannot_be_served_is_refused(
    engine: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    config = recipe(engine, **sections)
    for refuse in (refuse_without_effect, lambda config: assembly.engine(config, assembly.renderer(config), None)):
        with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
            refuse(config)


def test_a_model_without_a_directory_is_refused(tmp_path: Path) -> None:
    config = recipe(model={"path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"needs model\.path to be a hub id, or a directory with a config\.json"):
        assembly.longest_context(config)


def test_only_the_given_tokens_and_texts_end_a_turn() -> None:
    params = sampling_params(Sampling(stop=("</a>",), stop_token_ids=(7, 3), max_tokens=9, top_k=4), seed=11)
    assert params["ignore_eos"] is True
    assert params["stop_token_ids"] == [3, 7]
    assert (params["stop"], params["detokenize"]) == (["</a>"], True)
    assert (params["max_tokens"], params["top_k"], params["seed"], params["logprobs"]) == (9, 4, 11, 0)
    assert "stop" not in sampling_params(Sampling(), seed=0)


# vLLM's engine in the process of turnwise: in vLLM's environment, with weights by broadcasts.


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.engines
def test_the_cases_of_the_engine_in_process(tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "scripts"))
    result = subprocess.run(
        [
            str(engine_env.python("vllm")),
            str(Path(__file__).with_name("in_process_cases.py")),
            str(tmp_path),
            "collective",
        ],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "6 cases passed" in result.stdout
