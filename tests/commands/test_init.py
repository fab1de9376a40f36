"""`turnwise init`, `turnwise demo` and shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.record import read
from turnwise.record.reader import read_lines

ROOT = Path(__file__).resolve().parents[2]


def test_a_starter_project_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "quiz"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(path.name for path in (tmp_path / "quiz").iterdir()) == [
        "environment.py", "heldout.jsonl", "model", "recipe.yaml", "train.jsonl",
    ]  # fmt: skip
    assert lines[-5:-3] == [
        "  cd quiz",
        "  turnwise doctor model --recipe recipe.yaml    check the model and the recipe",
    ]
    monkeypatch.chdir(tmp_path / "quiz")
    words = ["train.steps=1", "train.batch_size=4", "train.group_size=4", "eval.max_rows=2"]
    # the reward function that is a comment in the recipe
    words.append("reward.trajectory=[{use: environment.py:brevity, weight: 0.1}]")
    assert main(["train", "recipe.yaml", *words]) == 0
    conversations = list(read(Path("runs/first")))
    assert len(conversations) == 16
    assert all(not t.failed for t in conversations)
    assert any(t.rewards["turns"] > 0 for t in conversations)
    assert any(outcome.error is None for t in conversations for turn in t.turns for outcome in turn.outcomes)
    assert conversations[0].rewards["brevity"] == pytest.approx(0.1 / len(conversations[0].turns))
    capsys.readouterr()
    assert main(["init"]) == 1
    text = capsys.readouterr().err
    assert "nothing was written: recipe.yaml, environment.py, train.jsonl, heldout.jsonl, model" in text
    assert "turnwise init DIR" in text


def test_a_starter_project_with_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path), "--model", "Qwen/Qwen3-0.6B"]) == 0
    assert "turnwise doctor Qwen/Qwen3-0.6B --recipe recipe.yaml" in capsys.readouterr().out
    config, _ = load(tmp_path / "recipe.yaml")
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert not (tmp_path / "model").exists()


def test_the_comments_of_the_starter_recipe_are_options(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    text = (tmp_path / "recipe.yaml").read_text()
    for line in ("# reward:", "#   trajectory:", "#     - {use", "# loggers:"):
        assert text.count(line) == 1
        text = text.replace(line, line[2:])
    text = text.replace("  # lora: {rank: 16}", "  lora: {rank: 16}")
    (tmp_path / "all.yaml").write_text(text)
    config, _ = load(tmp_path / "all.yaml")
    assert config.model.lora is not None
    assert config.reward.trajectory[0].use == "environment.py:brevity"
    config, _ = load(tmp_path / "recipe.yaml", ["engine={name: vllm}"])
    assert config.engine.name == "vllm"


def test_the_demo_runs_in_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train.steps=1", "train.batch_size=2", "train.group_size=4", "eval.max_rows=2"]
    assert main(["demo", *words]) == 0
    capsys.readouterr()
    assert [line["step"] for line in read_lines(tmp_path / "runs" / "demo" / "metrics.jsonl")] == [1]
    assert main(["demo", *words]) == 1
    assert "replace=true" in capsys.readouterr().err


def test_the_demo_is_that_of_the_repository() -> None:
    """The package has the same files, whether it was installed from a wheel or is used in a clone."""
    files = ROOT / "src" / "turnwise" / "starter" / "demo"
    assert (files / "calculator.yaml").read_bytes() == (ROOT / "recipes" / "calculator.yaml").read_bytes()
    for name in ("train.jsonl", "heldout.jsonl", "model/model.safetensors", "model/tokenizer.json"):
        assert (files / name).read_bytes() == (ROOT / "demo" / name).read_bytes()


def complete(line: str, folder: Path) -> list[str]:
    """The answers to a shell that completes `line`, as argcomplete's shell code asks for them."""
    answers = folder / "answers"
    environment = {
        **os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answers), "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
        "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", "turnwise"], env=environment, cwd=folder, check=True)
    return [answer.strip() for answer in answers.read_text().splitlines()]


def test_a_shell_completes_commands_options_and_paths(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    (tmp_path / "guess.yaml").write_text("")
    assert complete("turnwise tr", tmp_path) == ["train"]
    assert complete("turnwise eval guess.yaml --sin", tmp_path) == ["--single-turn"]
    assert complete("turnwise train gu", tmp_path) == ["guess.yaml"]
    assert set(complete("turnwise train guess.yaml train.l", tmp_path)) >= {"train.lr=", "train.lr_schedule="}


def test_the_shell_code_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", "bash"]) == 0
    code = capsys.readouterr().out
    script = f"{code}\ncomplete -p turnwise"
    shown = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True).stdout
    assert "_python_argcomplete" in shown
    assert main(["completion", "zsh"]) == 0
    assert "compdef _python_argcomplete turnwise" in capsys.readouterr().out
