"""What a model, a tool or an environment wrote has no effect on a terminal."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.cli import main
from turnwise.terminal.report import Terminal, printable

OWNED = "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x85\r\x08\u202eabc"


def test_control_characters_are_shown_as_text() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b]0;owned\x07") == "\\x1b]0;owned\\x07"
    assert printable("\x9b31m\x85\x7f\u202e") == "\\x9b31m\\x85\\x7f\\u202e"
    assert printable("é 中 🙂") == "é 中 🙂"


def test_nothing_that_is_printed_reaches_the_terminal_as_a_command() -> None:
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=True, width=300)
    table = Table()
    table.add_column(Text(OWNED))
    table.add_row(OWNED)
    for shown in (OWNED, Text(OWNED, style="bold red"), Panel(Text(OWNED)), table):
        console.print(shown, markup=False)
    console.print(OWNED, markup=False, soft_wrap=True)
    console.out(OWNED)
    handler = RichHandler(console=console, show_time=False, show_path=False)
    handler.handle(logging.makeLogRecord({"msg": OWNED, "levelno": logging.WARNING, "levelname": "WARNING"}))
    written = file.getvalue()
    assert written.count("abc") == 8
    assert not any(sequence in written for sequence in ("\x1b]", "\x1b[2J", "\x9b", "\x07", "\x08", "\r", "\u202e"))
    assert "\x1b[1;31m" in written  # its own colours work


def test_show_and_errors_tell_control_characters_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "step": 1, "id": "1/0", "group": "1", "row": {"id": "1"}, "stop": "error", "reward": None, "rewards": {},
        "error": {"kind": "environment", "message": f"ValueError: {OWNED}", "traceback": ""}, "tools": [],
        "messages": [{"role": "user", "content": OWNED}], "turns": [], "segments": [], "logprob_kind": "none",
        "template_mismatch": None, "seconds": 0.0,
    }  # fmt: skip
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    main(["show", str(tmp_path), "--failed"])
    assert main(["show", str(tmp_path / OWNED)]) == 1
    captured = capsys.readouterr()
    assert "\\x1b]0;owned" in captured.out
    assert "\\x1b]0;owned" in captured.err
    assert "\x1b]" not in captured.out + captured.err
