"""The environments of the real engines: when they count as complete, and the stub modules of SGLang's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine_env
import pytest


def make_marker(root: Path, engine: str, text: str) -> None:
    """An environment directory with an interpreter and a marker file."""
    interpreter = root / engine / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    (root / engine / engine_env.MARKER).write_text(text)


def test_an_environment_is_complete_if_it_was_made_from_the_present_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    assert not engine_env.is_complete("vllm")
    make_marker(tmp_path, "vllm", json.dumps({"fingerprint": engine_env.ENGINES["vllm"].fingerprint}))
    assert engine_env.is_complete("vllm")
    assert engine_env.python("vllm") == tmp_path / "vllm" / "bin" / "python"
    # `make` leaves it as it is
    assert engine_env.make("vllm") == tmp_path / "vllm" / "bin" / "python"
    assert sorted(path.name for path in (tmp_path / "vllm").iterdir()) == ["bin", "turnwise.json"]


@pytest.mark.parametrize("marker", ['{"fingerprint": "of an earlier recipe"}', "{", "[]", "{}"])
def test_another_or_a_damaged_marker_is_not_complete(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    make_marker(tmp_path, "sglang", marker)
    assert not engine_env.is_complete("sglang")
    monkeypatch.setattr(sys, "argv", ["engine_env.py", "sglang", "--check"])
    assert engine_env.main() == 1
    assert "sglang is missing or not complete; run `python scripts/engine_env.py sglang`" in capsys.readouterr().out


def test_an_environment_without_interpreter_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    make_marker(tmp_path, "vllm", json.dumps({"fingerprint": engine_env.ENGINES["vllm"].fingerprint}))
    (tmp_path / "vllm" / "bin" / "python").unlink()
    assert not engine_env.is_complete("vllm")


def test_missing_packages_are_listed_by_their_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-made environment is completed: packages with another version, or none, are installed."""
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    make_marker(tmp_path, "vllm", "{}")
    answer = json.dumps({"torch": "2.13.0+cpu", "Wrong_Version": "1.0", "torchvision": "0.28"})
    interpreter = tmp_path / "vllm" / "bin" / "python"
    interpreter.unlink()
    interpreter.write_text(f"#!/bin/sh\necho '{answer}'\n")
    interpreter.chmod(0o755)
    lock = tmp_path / "engines" / "vllm.txt"
    lock.parent.mkdir()
    lock.write_text("# comment\ntorch==2.13.0\nwrong-version==2.0\n\nnot.there==1\n")
    monkeypatch.setattr(engine_env, "RECIPES", lock.parent)
    recipe = engine_env.ENGINES["vllm"]
    assert engine_env._differences(recipe) == (["wrong-version==2.0", "not.there==1"], ["torchvision"])


@pytest.mark.parametrize("engine", list(engine_env.ENGINES))
def test_the_recipes_pin_every_package_once_and_nothing_unwanted(engine: str) -> None:
    recipe = engine_env.ENGINES[engine]
    pins = engine_env.pins(recipe.lock)
    names = [pin.split("==")[0].lower() for pin in pins]
    assert all(pin.count("==") == 1 for pin in pins)
    assert len(names) == len(set(names))
    assert not {*recipe.unwanted, "flashinfer_python", "sglang-kernel"} & set(names)
    assert engine_env.TORCH in pins


def test_stub_modules_answer_imports_and_not_questions() -> None:
    code = """
import importlib.util, stub_modules
import torchvision.transforms
from torchvision.transforms import InterpolationMode
from vllm._custom_ops import rotary_embedding
assert InterpolationMode.NEAREST_EXACT.__name__ == "torchvision.transforms.InterpolationMode.NEAREST_EXACT"
try:
    rotary_embedding()
except RuntimeError as error:
    print(error)
try:
    import vllm.logger
except ImportError:
    print("no vllm.logger")
assert importlib.util.find_spec("timm") is None
"""
    environment = {"PYTHONPATH": str(engine_env.RECIPES)}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "this environment has no such package: only a stub, made by turnwise's scripts/engine_env.py",
        "no vllm.logger",
    ]


@pytest.mark.engines
@pytest.mark.parametrize("engine", list(engine_env.ENGINES))
def test_make_test_engines_has_made_the_environments(engine: str) -> None:
    recipe = engine_env.ENGINES[engine]
    assert engine_env.is_complete(engine)
    assert engine_env._differences(recipe) == ([], [])
