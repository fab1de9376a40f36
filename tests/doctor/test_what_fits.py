"""Options with which a recipe fits: what is printed is applied to the recipe, and the doctor must then say that it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.qwen3 import QWEN3, save_config
from turnwise.config.recipe import load, with_overrides
from turnwise.doctor import what_fits as module
from turnwise.doctor.check import Check
from turnwise.doctor.examine import examine
from turnwise.doctor.fit import starter, starter_lines
from turnwise.doctor.memory import SERVER_BYTES, changed, read_model_config
from turnwise.doctor.what_fits import fit_check
from turnwise.engines.remote.server_process import ServerCommand, ServerProcess, installed_version
from turnwise.errors import EngineError
from turnwise.options.schema import Config
from turnwise.starter import write_project


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a model of 4 layers, whose training of all weights needs 2 GiB."""
    folder = save_config(tmp_path_factory.mktemp("small") / "model", "0.6B")
    (folder / "config.json").write_text(json.dumps({**QWEN3["0.6B"], "num_hidden_layers": 4, "vocab_size": 4000}))
    return str(folder)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 2 layers, whose passes take a third of the time to predict."""
    folder = save_config(tmp_path_factory.mktemp("smaller") / "model", "0.6B")
    (folder / "config.json").write_text(json.dumps({**QWEN3["0.6B"], "num_hidden_layers": 2, "vocab_size": 4000}))
    return str(folder)


def recipe(path: str, **sections: Any) -> Config:
    model = {"path": path, "device": "cuda", **sections.pop("model", {})}
    tree = {"data": {"train": "rows.jsonl"}, "limits": {"context": 1024}, "train": {"batch_size": 8}, **sections}
    tree["reward"] = {"trajectory": ["length.py:length"]}
    return Config.model_validate({**tree, "model": model})


def printed(check: Check) -> list[tuple[str, Any]]:
    """The options after the last `set` of a check's text."""
    words = check.text.rpartition(": set ")[2].partition(" (")[0].split()
    assert words, check
    return [(name, yaml.safe_load(value)) for name, _, value in (word.partition("=") for word in words)]


def applied(config: Config, check: Check) -> Config:
    for name, value in printed(check):
        config = changed(config, name.split("."), value)
    return config


GIVEN = {"micro_batch_tokens": 8192}
CACHE = {"name": "local", "memory_gb": 3.0}
SERVER = {"name": "vllm", "devices": [0]}
SETTINGS: dict[str, dict[str, Any]] = {
    "open": {},
    "numbers": {"train": GIVEN, "engine": CACHE},
    "own adapter": {"model": {"lora": {"rank": 8}}, "train": GIVEN, "engine": CACHE},
    "float32": {"model": {"dtype": "float32"}, "train": GIVEN},
    "server": {"engine": SERVER, "train": GIVEN},
    "server's cache": {"engine": SERVER | {"memory_gb": 2.5}},
    "sleeping server": {"engine": {"name": "vllm", "sleep": True, "memory_gb": 9.0}, "train": GIVEN},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("gib", [1.3, 2.2, 4.4])
def test_what_is_said_to_fit_fits(name: str, gib: float, small: str) -> None:
    assert_what_is_said_to_fit_fits(name, gib, small)


@pytest.mark.parametrize(("name", "gib"), [("numbers", 1.3), ("server", 4.4)])
def test_what_is_said_to_fit_a_smaller_model_fits(name: str, gib: float, smaller: str) -> None:
    assert_what_is_said_to_fit_fits(name, gib, smaller)


def assert_what_is_said_to_fit_fits(name: str, gib: float, path: str) -> None:
    config = recipe(path, **SETTINGS[name])
    check = fit_check(config, path, section="train", memory_gb=gib)
    if check.status == "ok":
        return
    assert check.status == "fail"
    if "use a smaller model" in check.text:
        assert "server" in name, check  # its process alone takes 2 GiB
        assert gib < 4
        return
    other = applied(config, check)
    again = fit_check(other, path, section="train", memory_gb=gib)
    assert again.status == "ok", (check, again)
    assert (
        f"step: {check.text.rpartition(' (')[2].partition(' GiB')[0]} GiB" in again.text
    )  # the number that was printed
    assert other.model.lora.rank in (config.model.lora.rank or 32, config.model.lora.rank)


@pytest.mark.slow
def test_the_settings_meet_what_they_are_to_test(small: str) -> None:
    """Numbers of the recipe are given up before anything is learned with less."""
    found = {}
    for name, gib in (("numbers", 2.9), ("numbers", 1.3), ("own adapter", 1.3), ("sleeping server", 4.4)):
        check = fit_check(recipe(small, **SETTINGS[name]), small, section="train", memory_gb=gib)
        found[name, gib] = dict(printed(check))
    assert found["numbers", 2.9].keys() <= {"engine.memory_gb", "train.micro_batch_tokens"}
    assert found["numbers", 1.3].keys() >= {"engine.memory_gb", "model.lora.rank"}
    assert "model.lora.rank" not in found["own adapter", 1.3]
    assert "engine.memory_gb" in found["sleeping server", 4.4]
    nothing = fit_check(recipe(small), small, section="train", memory_gb=0.5)
    assert "use a smaller model, shorter conversations (limits.context), or more memory" in nothing.text


@pytest.mark.slow
def test_fine_tuning_and_cpus_are_told_what_fits_too(small: str) -> None:
    for section, device, gib in (("sft", "cuda", 1.3), ("sft", "cpu", 2.5), ("train", "cpu", 2.5)):
        config = recipe(small, model={"device": device})
        check = fit_check(config, small, section=section, memory_gb=gib)
        assert check.status == "fail"
        assert fit_check(applied(config, check), small, section=section, memory_gb=gib).status == "ok", check


def test_a_server_is_counted_on_the_gpu_that_it_uses(smaller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    apart = recipe(smaller, engine={"name": "vllm", "memory_gb": 1.5})
    trainer, needs = "predicted peak of a training step", 1.5 + SERVER_BYTES / 2**30
    unknown = fit_check(apart, smaller, section="train", memory_gb=4.0)
    assert unknown.status == "note"  # this machine has no GPU that says whether there are two
    assert "GiB on a second GPU for the server. On one GPU (engine.devices=[0]):" in unknown.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert fit_check(apart, smaller, section="train", memory_gb=4.0).status == "ok"
    too_small = fit_check(apart, smaller, section="train", memory_gb=3.0)
    assert too_small.status == "fail"
    assert f"a GPU of a server needs {needs + 0.1:.1f} GiB" in too_small.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    shared = fit_check(apart, smaller, section="train", memory_gb=4.0)
    assert shared.status == "fail"
    assert shared.text.startswith(trainer)
    assert "the server's KV cache 1.5" in dict(shared.details)["in GiB"]
    again = fit_check(applied(apart, shared), smaller, section="train", memory_gb=4.0)
    assert again.status == "ok"


def test_the_doctor_says_what_starting_the_servers_would(small: str, model: Path, tmp_path: Path) -> None:
    python = tmp_path / "no" / "python"
    tree = {"engine": {"name": "vllm", "python": str(python)}, "model": {"device": "cpu"}}
    config = recipe(str(model), **tree)
    found = {check.name: check for check in examine(str(model), config, weights="never")}
    assert found["engine"].status == "fail"
    command = ServerCommand(name="vLLM server 0", arguments=[str(python)], log=tmp_path / "log")
    with pytest.raises(EngineError) as raised:
        ServerProcess(command).start()
    assert found["engine"].text == str(raised.value)


def test_an_interpreter_without_the_engine_is_named(tmp_path: Path) -> None:
    import sys

    with pytest.raises(EngineError, match=r"python.*: No module named 'not_an_engine'\. Set engine\.python to"):
        installed_version("A server", sys.executable, "not_an_engine")
    assert installed_version("A server", sys.executable, "pytest") == pytest.__version__


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0.6B", "1.7B"])
def test_a_recipe_of_init_moves_to_smaller_cards(size: str, tmp_path: Path) -> None:
    """Also with the line of its comment on vLLM, and with the numbers that init and the doctor print."""
    path = str(save_config(tmp_path / "model", size))
    found = starter(path, read_model_config(path), 24.0)
    assert found.plan is not None
    write_project(tmp_path / "new", model=path, changes=starter_lines(found.plan, found.context, 24.0))
    file = tmp_path / "new" / "recipe.yaml"
    config, _ = load(file, ["model.device=cuda"])
    for gib in (24.0, 16.0, 12.0, 8.0):
        check = fit_check(config, path, section="train", memory_gb=gib)
        assert check.status == ("ok" if gib == 24 else "fail")
        if gib < 24:
            assert fit_check(applied(config, check), path, section="train", memory_gb=gib).status == "ok", check
    (comment,) = [line for line in file.read_text().splitlines() if line.startswith("# engine: {name: vllm")]
    engine = yaml.safe_load(comment.removeprefix("# ").partition(" #")[0])["engine"]
    tree = yaml.safe_load(file.read_text()) | {"engine": engine}
    beside, _ = with_overrides(tree, ["model.device=cuda"], source=str(file))
    check = fit_check(beside, path, section="train", memory_gb=24.0)
    assert check.status == "ok", check
    assert (
        module.assembly.place_of_servers(beside) == "on GPU 0, which the trainer uses in turns with it (engine.sleep)"
    )
