"""What looks like a path is a path: no name of the hub is looked up for it, and the message says what is there instead."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from turnwise.assembly.engines import model_facts
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.data.rows import read_rows
from turnwise.errors import ConfigError, DataError, TemplateError
from turnwise.local_paths import hub_directory, looks_like_path, offline_without_network, share_weights
from turnwise.models.loading import ModelSource, load_model
from turnwise.options.schema import Config, QuantizationSection
from turnwise.user_code.references import resolve


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one path of each kind, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "model").mkdir(parents=True)
    (tmp_path / "rows.csv").write_text("prompt\nx\n")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.jsonl")
    run = tmp_path / "done"
    (run / "checkpoints" / "step-000001" / "model").mkdir(parents=True)
    (run / "checkpoint").symlink_to("checkpoints/step-000001/model")
    (run / "run.json").write_text('{"kind": "train", "checkpoint": 1}')
    return tmp_path


def test_paths_and_names() -> None:
    paths = [
        "./x",
        "/x",
        "~/x",
        "a/b/c",
        "runs/nothing",
        "demo/modle",
        "rows.csv",
        "x.jsonl",
        "dangling",
        "demo",
        "a b",
        "x/",
    ]
    names = ["gpt2", "Qwen/Qwen3-0.6B", "openai-community/gpt2", "meta-llama/Llama-3.1-8B-Instruct"]
    assert [text for text in paths if not looks_like_path(text)] == []
    assert [text for text in names if looks_like_path(text)] == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/nothing", "there is no model directory {here}/runs/nothing; a model is a hub id"),
        ("demo/modle", "there is no model directory {here}/demo/modle; did you mean 'model'?; a model is a hub id"),
        ("rows.csv", "{here}/rows.csv is a file; a model is a hub id, or a directory"),
        ("pipe.jsonl", "{here}/pipe.jsonl is not a directory; a model is"),
        ("dangling", "{here}/dangling is not a directory; a model is"),
        ("loop", "{here}/loop is not a directory; a model is"),
        (
            "done",
            "{here}/done is the directory of a run, not a model; its newest model is {here}/done/checkpoint: write that",
        ),
        ("x" * 5000, "no model directory"),
    ],
)
def test_a_model_path_is_not_looked_up_on_the_hub(
    path: str, message: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a look-up would give another message
    with pytest.raises(TemplateError) as caught:
        Renderer.from_pretrained(path)
    assert message.format(here=places) in str(caught.value) or len(path) > 4000


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rows.csv", "{here}/rows.csv is not a file of one of these kinds: .jsonl"),
        ("rowz.csv", "there is no file {here}/rowz.csv; did you mean 'rows.csv'?; data.train takes"),
        ("demo/modle", "there is no directory {here}/demo/modle; did you mean 'model'?; data.train takes"),
        ("pipe.jsonl", "{here}/pipe.jsonl is not a regular file (a device, pipe or socket)"),
        ("rows.jsonl", "there is no file {here}/rows.jsonl"),
        ("demo.jsonl/", "there is no file {here}/demo.jsonl"),
        ("loop", "loop"),
        ("dangling", "{here}/dangling is a link to nowhere, which does not exist"),
    ],
)
def test_rows_that_look_like_a_path_are_not_looked_up_on_the_hub(path: str, message: str, places: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert message.format(here=places) in str(caught.value)


@pytest.mark.parametrize("path", ["demo", "pipe.jsonl", "dangling", "loop", "no.yaml", "x" * 5000, "a\0b"])
def test_a_recipe_or_a_reference_that_is_no_file_is_refused_with_what_is_there(path: str) -> None:
    with pytest.raises(ConfigError, match=r"recipe"):
        load(path)
    if "\0" not in path:
        (Path.cwd() / "demo.py").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=r"environment: .*(no file|is a directory)"):
            resolve("demo.py:x" if path == "demo" else f"{path[:5000]}.py:x", key="environment")


def test_a_change_where_the_recipe_belongs_is_told_as_such() -> None:
    with pytest.raises(
        ConfigError, match=r"'algorithm\.adv_estimator=grpo' is given where the recipe belongs: .*verl's"
    ):
        load("algorithm.adv_estimator=grpo")


def test_the_command_line_prints_no_traceback_for_a_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "done"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "is the directory of a run, not a model" in printed
    assert "Traceback" not in printed


HUB = {
    "gated": (403, "GatedRepo", "ask for access at https://huggingface.co/org/model, and log in with `hf auth login`"),
    "gated, no login": (
        401,
        "GatedRepo",
        "ask for access at https://huggingface.co/org/model, and log in with `hf auth",
    ),
    "absent or private": (
        401,
        "RepoNotFound",
        "Correct the name (a model is a hub id, or a directory that save_pretrained has written), or log in with `hf",
    ),
    "disabled": (403, "Other", "The hub answers with status 403: try again later"),
    "no network": (0, "", "or run `hf download org/model --local-dir DIR` where there is a network"),
}
"""What the hub answers, and what turnwise says then."""


@pytest.mark.parametrize(("status", "code", "message"), HUB.values(), ids=HUB)
def test_what_the_hub_answers_is_told_with_what_to_do(
    status: int,
    code: str,
    message: str,
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The libraries are real, and read the answers of a hub that is not there."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    http: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])  # httpx or its successor

    def answer(request: Any) -> Any:
        if not status:
            raise http.ConnectError("Temporary failure in name resolution", request=request)
        return http.Response(status, headers={"X-Error-Code": code}, request=request)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(places / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "turnwise.local_paths.offline_without_network", lambda: None
    )  # the hub's name is not asked for here
    no_wait = SimpleNamespace(sleep=lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time", no_wait)  # not of every thread of this process
    huggingface_hub.set_client_factory(lambda: http.Client(transport=http.MockTransport(answer)))
    try:
        loaded = ModelSource(path="org/model", device="cpu")
        for source in (loaded, loaded.model_copy(update={"quantization": QuantizationSection(bits=4)})):
            with pytest.raises(ConfigError, match=re.escape(message)):
                load_model(source)
        for command in (["doctor", "org/model"], ["init", "new", "--model", "org/model", "--gpu", "24"]):
            assert main(command) == 1
            assert message in " ".join("".join(capsys.readouterr()).split())
    finally:
        huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


@pytest.mark.parametrize("proxy", [False, True])
def test_a_hub_whose_name_has_no_address_is_not_asked_again_and_again(
    proxy: bool, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    if proxy:
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(places / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")  # this domain never has an address (RFC 2606)
    offline_without_network.cache_clear()
    if proxy:
        offline_without_network()
        assert constants.HF_HUB_OFFLINE is False
    else:
        where = re.escape(f"there is no directory {places}/org/model: correct the path, or run `hf download org/model")
        with pytest.raises(ConfigError, match=where):
            load_model(ModelSource(path="org/model", device="cpu"))
        assert constants.HF_HUB_OFFLINE is True
    offline_without_network.cache_clear()


def test_a_model_that_is_not_in_the_cache_of_a_hub_that_must_not_be_asked(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(places / "cache"))
    with pytest.raises(ConfigError, match=r"run `hf download org/model --local-dir DIR` where there is a network"):
        load_model(ModelSource(path="org/model", device="cpu"))


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_servers_get_the_directory_of_a_model_of_the_hub(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library reads its cache here: the names of the files are those that it would download."""
    from huggingface_hub import constants

    hub_directory.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    tree = {"model": {"path": "someone/some-model", "device": "cpu"}, "data": {"train": "rows.csv"}, "engine": "vllm"}
    config = Config.model_validate(tree)
    with pytest.raises(ConfigError, match="run `hf download someone/some-model --local-dir DIR`"):
        model_facts(config)
    place = tmp_path / "hub" / "models--someone--some-model"
    snapshot = place / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text('{"vocab_size": 77}')
    (snapshot / weights).touch()
    assert model_facts(config) == {"vocab_size": 77}
    assert hub_directory("someone/some-model", weights=True) == snapshot


def test_weights_can_be_read_by_whoever_reads_the_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    for name in ("model.safetensors", "other.safetensors"):
        save_file({"w": torch.zeros(1)}, tmp_path / name)
    share_weights(tmp_path / "model.safetensors")
    share_weights(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.glob("*.*") if file.suffix in (".json", ".safetensors")}) == 1
