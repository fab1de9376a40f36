"""The pages about rewards and about engines say what is true: their examples run."""

from __future__ import annotations

import asyncio
import importlib
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import turnwise
from support.conversations import Says, a_row, hold, hold_all
from turnwise import assembly
from turnwise.cli import main
from turnwise.config.recipe import RENAMED
from turnwise.doctor.examine import examine
from turnwise.environments.tools.tool import Tool
from turnwise.options.schema import Config
from turnwise.types import Group
from turnwise.user_code.references import MOVED

ROOT = Path(__file__).parent.parent
REWARDS, TRAINED, LIMITS, README = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("docs/rewards.md", "docs/engines.md", "docs/limits.md", "README.md")
)


def blocks(page: str, language: str) -> list[str]:
    """A page's examples."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_reward_functions_of_the_page_give_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (_, python, *_), (_, recipe, *_) = blocks(REWARDS, "python"), blocks(REWARDS, "yaml")
    (tmp_path / "my_rewards.py").write_text(python)
    options = {"model": {"path": "m"}, "data": {"train": "x"}, **yaml.safe_load(recipe)}
    scorer = assembly.scorer(Config.model_validate(options))
    row = a_row(answer="4")
    said = ["#### 4", "It is 2 + 2, so #### 4.0", "#### 5", "sorry #### 4"]
    group = Group(id="g", row=row, trajectories=[hold_all(Says(text), row=row)[0] for text in said])
    asyncio.run(scorer.score([group]))
    parts = [one.rewards for one in group.trajectories]
    assert [one["right"] for one in parts] == [1.0, 1.0, 0.0, 1.0]
    assert [one["polite"] for one in parts] == [0.2, 0.2, 0.2, 0.0]
    assert [one["no_failed_calls"] for one in parts] == [0.0] * 4
    assert [one.get("shortest") for one in parts] == [0.1, 0.0, None, 0.0]
    assert [one["normalised_length"] for one in parts] == pytest.approx([0.025, -0.05, 0.025, 0.0])
    in_all = [(one.reward or 0.0) - one.rewards["normalised_length"] for one in group.trajectories]
    assert in_all == pytest.approx([1.3, 1.2, 0.2, 1.0])


def test_what_the_page_names_of_a_trajectory_is_there() -> None:
    (one,) = hold_all(Says("a"))
    names = re.findall(r"^\| `trajectory\.(\w+)", REWARDS, re.MULTILINE)
    assert len(names) == 7
    for name in names:
        getattr(one, name)
    for name in ("text", "reasoning", "calls", "outcomes", "reward", "info", "finish_reason"):
        getattr(one.turns[0], name)


def test_the_examples_with_a_trained_model_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    shutil.copytree(ROOT / "demo" / "model", tmp_path / "runs" / "demo" / "checkpoint")
    for block in blocks(TRAINED, "python"):
        names: dict[str, Any] = {}
        exec(compile(block, "docs/engines.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    for made in ("bfloat16", "mean"):
        assert (tmp_path / "runs" / "demo" / made / "model.safetensors").is_file()


def test_a_checkpoint_of_the_demo_is_right_for_a_server() -> None:
    found = {one.name: one.status for one in examine(str(ROOT / "demo" / "model"), weights="never")}
    assert (found["stop tokens"], found["tool calls"], found["headers"]) == ("ok", "ok", "ok")


def test_the_environment_of_the_readme_answers_as_the_readme_says(tmp_path: Path) -> None:
    code, tool, _ = blocks(README, "python")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith(("#", "from"))]) <= 10
    row = a_row("Guess.", secret="42")
    one = hold(["50", "no idea", "41", " 42\n"], names["guess"], row=row)
    said = [message["content"] for message in one.messages if message["role"] == "user"]
    assert said == ["Guess.", "Lower!", "Lower!", "Higher!"]
    assert (one.stop, [turn.reward for turn in one.turns]) == ("done", [0.0, 0.0, 0.0, pytest.approx(0.4)])
    one = hold(["1"] * 5, lambda: names["guess"](tries=2), row=row)
    assert (one.stop, one.reward, len(one.turns)) == ("done", None, 3)
    exec(compile(tool, "README.md", "exec"), names)
    assert Tool.of(names["search"]).schema["function"]["parameters"]["required"] == ["query"]


def test_the_script_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, script = blocks(README, "python")
    small = {
        "Qwen/Qwen2.5-0.5B-Instruct": str(ROOT / "demo" / "model"),
        '"steps": 200': '"steps": 1',
        "16, ": "2, ",
        "8, ": "2, ",
    }
    for old, new in small.items():
        assert old in script
        script = script.replace(old, new)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    exec(compile(script, "README.md", "exec"), names)
    assert len(names["result"].trajectories) == 4


@pytest.mark.slow
def test_the_scripts_of_the_python_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("demo", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    names: dict[str, Any] = {}
    for block in blocks((ROOT / "docs" / "python.md").read_text(encoding="utf-8"), "python"):
        exec(compile(block.replace("train.steps=20", "train.steps=2"), "docs/python.md", "exec"), names)
    assert len(names["result"].metrics) == 2


def test_the_recipe_of_the_readme_is_valid_and_its_commands_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = blocks(README, "yaml")
    config = Config.model_validate(yaml.safe_load(recipe))
    assert (config.train.steps, config.train.batch_size, config.train.group_size) == (200, 16, 8)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^turnwise \w+ .*guess.*$", README, re.MULTILINE)
    assert len(commands) == 2
    for line in commands:  # known commands and options, which miss nothing but their files
        assert main(line.partition("#")[0].split()[1:]) == 1
        assert "guess" in capsys.readouterr().err


def test_the_changelog_lists_every_renamed_option_and_names_references_that_exist() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for old, new in RENAMED.items():
        assert f"| `{old}` | `{new}` |" in changelog
    references = re.findall(r"`(turnwise(?:\.\w+)+):(\w+)` \|$", changelog, re.MULTILINE)
    assert len(references) == 5
    for module, name in references:
        assert name == "NAME" or hasattr(importlib.import_module(module), name), (module, name)
    for old, new in MOVED.items():
        assert re.search(rf"^\| `{old}:(\w+)` \| `{new}:\1` \|$", changelog, re.MULTILINE), old


def test_the_pictures_of_the_readme_are_drawn_from_a_run(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "scripts" / "readme_images.py"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/mean": 0.75}\n')
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 1.0}\n')
    picture = draw["curve"](tmp_path)
    assert 'points="400.0,197.5 740.0,92.5"' in picture  # half of the way at a reward of 0.25, all of it at 0.75
    assert ">0.50</text>" in picture
    assert ">1.00</text>" in picture


def test_every_link_of_the_pages_leads_to_a_file() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_messages_and_recipes_name_pages_that_exist() -> None:
    files = [
        path
        for folder in ("src", "recipes", "deploy", ".github")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".yml")
    ]
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in files
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {(path, page) for path, page in named if not (ROOT / page).is_file()} == set()


def test_the_pages_name_files_that_are_there_and_the_readme_names_them() -> None:
    for page in (REWARDS, TRAINED, LIMITS):
        for target in re.findall(r"\]\(([\w./]+\.md)\)", page):
            assert (ROOT / "docs" / target).resolve().is_file(), target
    for name in ("rewards", "limits", "start"):
        assert f"(docs/{name}.md)" in README
    assert turnwise.__version__ != "unknown"
