"""What a person sees during a long step and in `turnwise show`: at 80 columns on a terminal, and as plain text elsewhere."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from turnwise.cli import main
from turnwise.options.schema import Config
from turnwise.record.evaluation import (
    Comparison,
    Cost,
    EvaluationResult,
    ModelResult,
    ResultPart,
    estimate,
    paired_test,
)
from turnwise.terminal.report import Activity, Terminal, activity_line, progress
from turnwise.terminal.tables import print_results
from turnwise.terminal.train_report import TrainReport


def terminal(width: int = 80) -> Terminal:
    """A terminal with colours that keeps what is printed."""
    return Terminal(file=io.StringIO(), width=width, force_terminal=True, color_system="standard", legacy_windows=False)


def plain(console: Console, renderable: object) -> list[str]:
    """The lines of a renderable without colours."""
    with console.capture() as captured:
        console.print(renderable)
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()


def a_step() -> dict[str, float]:
    return {
        "step": 12, "reward/mean": 0.8123, "turns/mean": 3.5, "tool_calls/mean": 1.25, "tool_errors/mean": 0.0625,
        "failed": 0.0, "tokens/sampled": 123456, "seconds/rollout": 10.0, "seconds/step": 12.34,
    }  # fmt: skip


def test_the_bar_of_a_part_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity()
    advance = activity.part(12, "conversations", 128)
    activity.part_began = activity.began = time.monotonic() - 10
    for _ in range(32):
        advance(100)
    (line,) = plain(terminal(), activity_line(activity))
    assert line.startswith("step 12: conversations 32 of 128, 320 tokens/s, 10 s ━")
    assert len(line.rstrip()) == 80
    bar = line[line.index("━") :]
    assert set(bar) <= {"━", "╸", "╺"}
    # a quarter of the bar has the colour of finished items
    console = terminal()
    with console.capture() as captured:
        console.print(activity_line(activity))
    finished = captured.get().split("s \x1b[")[1].split("\x1b[0m")[0]
    assert finished.count("━") == pytest.approx(len(bar) / 4, abs=1)


def test_a_part_without_a_count_has_no_bar() -> None:
    activity = Activity()
    activity.part(3, "writing a checkpoint")
    assert plain(terminal(), activity_line(activity)) == ["step 3: writing a checkpoint, 0 s"]
    assert plain(terminal(), activity_line(Activity())) == [""]


def test_a_long_name_is_cut_at_a_narrow_terminal() -> None:
    activity = Activity()
    activity.part(3, "evaluation, conversations", 1024)
    assert all(len(line) <= 30 for line in plain(terminal(30), activity_line(activity)))


def test_the_live_display_fits_80_columns(tmp_path: Path) -> None:
    console = terminal()
    activity = Activity()
    report = TrainReport(console, activity)
    config = Config.model_validate(
        {"model": {"path": "demo/model"}, "data": {"train": "rows.jsonl"}, "environment": "a:b"}
    )
    report.begin(config, done=11, notes=[])
    report.step(a_step(), [])
    advance = activity.part(13, "conversations", 128)
    advance(50)
    lines = plain(console, report._picture())
    report.close()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["step", "reward", "turns", "calls", "errors", "failed", "tokens/s", "s/step"]
    assert lines[1].split() == ["12", "0.812", "3.500", "1.250", "0.062", "0.000", "12,346", "12.34"]
    assert "training ━" in lines[3]
    assert "12/" in lines[3]
    assert "time left" in lines[3]
    assert lines[4].startswith("step 13: conversations 1 of 128, ")


def test_a_bar_counts_conversations_and_tokens() -> None:
    console = terminal()
    with console.capture() as captured, progress(console, 4, done=1, label="my [model]") as advance:
        advance(1000)
        time.sleep(0.3)  # the bar is drawn ten times a second
        advance(1000)
    text = captured.get()
    assert "my [model]" in text
    assert "3/4" in text
    assert "tokens/s" in text


def test_without_a_terminal_there_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    written = io.StringIO()
    console = Terminal(file=written, width=80)
    with progress(console, 2) as advance:
        advance(10)
        advance(10)
    report = TrainReport(console)
    config = Config.model_validate(
        {"model": {"path": "demo/model"}, "data": {"train": "rows.jsonl"}, "environment": "a:b"}
    )
    report.begin(config, done=11, notes=[])
    report.step(a_step(), [])
    report.close()
    assert "\x1b" not in written.getvalue()
    assert "━" not in written.getvalue()
    assert "step 12  reward 0.812  turns 3.500" in written.getvalue()
    assert main(["show", "nowhere"]) == 1
    assert "\x1b" not in capsys.readouterr().err


def an_evaluation() -> EvaluationResult:
    some = estimate([0.2, 0.5, 0.9, 1.0])
    part = ResultPart(conversations=12, reward=some, pass_rate=some)
    cost = Cost(
        prompt_tokens=1, sampled_tokens=1, tokens_per_conversation=471.0, seconds_per_conversation=2.67,
        engine_seconds_per_conversation=1.0,
    )  # fmt: skip
    models = [
        ModelResult(
            name=name, model=name, engine="local", single_turn=False, conversations=1024, failed=3, reward=some, pass_rate=some,
            pass_at={1: some, 2: some, 4: some}, pass_all={1: some, 2: some, 4: some}, turns={1: part, 2: part},
            sources={"heldout.jsonl": part, "other": part}, turns_mean=2.96, cost=cost,
        )
        for name in ("base", "calculator-single-turn")
    ]  # fmt: skip
    test = paired_test([0.2, 0.5, 0.9, 1.0], [0.1, 0.5, 0.7, 0.2])
    comparison = Comparison(first="base", second="calculator-single-turn", test=test)
    return EvaluationResult(
        data="heldout.jsonl", rows=4, samples_per_row=4, seed=0, pass_reward=1, models=models, comparisons=[comparison]
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_tables_of_an_evaluation_are_complete_at_all_widths(width: int) -> None:
    """A table that is too wide is divided; no number and no name is cut."""
    console = terminal(width)
    with console.capture() as captured:
        print_results(console, an_evaluation())
    text = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    rows = [line for line in text.splitlines() if line.startswith(("┃", "│"))]
    assert max(map(len, rows)) <= width
    assert "…" not in text
    for header in (
        "reward",
        "pass rate",
        "pass@2",
        "pass^4",
        "turns",
        "tokens",
        "seconds",
        "failed",
        "p (t-test)",
        "source",
    ):
        assert any(header in row for row in rows if row.startswith("┃")), header
    assert any("calculator-single-turn" in row and "0.650 [0.062, 1.238]" in row for row in rows)
    assert any("calculator-single-turn" in row and "+0.275 [-0.297, 0.847]" in row for row in rows)
    assert any("3 of 1024" in row for row in rows)
