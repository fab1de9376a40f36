"""The page about fine-tuning says what is true: its data is read, its recipe runs, its Python prints what is learnt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.data.conversations import read_conversations

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sft.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The page's example."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    (tmp_path / "conversations.jsonl").write_text(block("json"))
    (tmp_path / "recipe.yaml").write_text(block("yaml"))
    assert [len(row.messages) for row in read_conversations("conversations.jsonl")] == [4, 4, 2]
    assert main(["sft", "recipe.yaml", "sft.epochs=1"]) == 0
    assert (tmp_path / "runs/tuned/checkpoint/model.safetensors").is_file()
    capsys.readouterr()
    exec(compile(block("python"), "docs/sft.md", "exec"), {})
    call = '<tool_call>\\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\\n</tool_call><|im_end|>'
    assert capsys.readouterr().out.splitlines() == [
        f"'{call}It is 42.<|im_end|>'",
        "'No: it is 13.<|im_end|>'",
        "'4.<|im_end|>'",
    ]
