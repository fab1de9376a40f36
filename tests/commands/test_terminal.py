"""What a person sees: during a long step, in `turnwise show`, of one conversation; what a model wrote has no effect."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import logging
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from support.conversations import a_row
from support.recipes import save_recipe
from support.tiny import save_model
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.options.schema import Config
from turnwise.record import read
from turnwise.record.evaluation import (
    Comparison,
    Cost,
    EvaluationResult,
    ModelResult,
    ResultPart,
    estimate,
    paired_test,
)
from turnwise.record.metrics import conversation_metrics
from turnwise.record.run_directory import RunDirectory
from turnwise.record.summary import HeldOutChange
from turnwise.terminal import report
from turnwise.terminal.conversation import CHOICE, log_conversation, story
from turnwise.terminal.report import Activity, Heartbeat, Terminal, activity_line, printable, progress, stages
from turnwise.terminal.runs import change_line
from turnwise.terminal.tables import number, p_value, print_results
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train
from turnwise.types import Failure, Group, LogprobKind, Segment, Stop, ToolCall, ToolOutcome, Trajectory, Turn

# What a person sees during a long step and in `turnwise show`: at 80 columns on a terminal, and as plain text
# elsewhere.


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


@pytest.mark.parametrize(
    ("done", "evaluates", "line"),
    [
        (11, False, "training demo/model: 12 steps of 8 rows x 8 conversations, into runs/x"),
        (12, False, "nothing to do: runs/x has done 12 steps, and the recipe has 12. To go on, raise train.steps"),
        (13, True, "nothing to train, only to evaluate: runs/x has done 13 steps, and the recipe has 12."),
    ],
)
def test_a_run_whose_steps_are_done_says_so_and_how_to_go_on(done: int, evaluates: bool, line: str) -> None:
    written = io.StringIO()
    report = TrainReport(Terminal(file=written, width=80))
    config = Config.model_validate(
        {
            "model": {"path": "demo/model"},
            "data": {"train": "rows.jsonl"},
            "train": {"steps": 12, "batch_size": 8, "group_size": 8},
            "output": "runs/x",
        }
    )
    report.begin(config, done=done, notes=[], evaluates=evaluates)
    report.close()
    assert written.getvalue().startswith(line)


@pytest.mark.parametrize(
    ("rewards", "best", "said"),
    [
        ([0.1, 0.5, 0.7, 0.6], None, "highest after step 2 (0.700): checkpoint.best=reward/mean keeps"),
        ([0.1, 0.5, 0.7, 0.6], "reward/mean", None),  # it was kept
        ([0.1, 0.5, 0.7, 0.7], None, None),  # the last is one of the best
        ([0.9, 0.5, 0.7, 0.6], None, "highest before training (0.900)"),  # no checkpoint is better
    ],
)
def test_the_end_of_a_run_names_an_evaluation_that_was_better_than_the_last(
    tmp_path: Path, rewards: list[float], best: str | None, said: str | None
) -> None:
    written = io.StringIO()
    report = TrainReport(Terminal(file=written, width=200))
    tree = {"model": "m", "data": "r.jsonl", "environment": "a:b", "checkpoint": {"best": best}, "eval": {"every": 1}}
    report.begin(Config.model_validate(tree), done=0, notes=[])
    directory = RunDirectory(tmp_path)
    directory.evaluations.write_text(
        "".join(json.dumps({"step": step, "reward/mean": reward}) + "\n" for step, reward in enumerate(rewards))
    )
    directory.metrics.write_text("")
    report.end(directory, tmp_path / "checkpoint")
    assert ("the held-out reward was highest" in written.getvalue()) == (said is not None)
    assert said is None or said in written.getvalue()


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


def test_an_evaluation_in_which_no_reward_can_pass_says_so() -> None:
    whole = an_evaluation()
    model = replace(whole.models[0], largest_reward=0.988)
    for passing, told in ((1.0, True), (0.988, False)):
        console = terminal(200)
        with console.capture() as captured:
            print_results(console, replace(whole, models=[model], comparisons=[], pass_reward=passing))
        assert ("no conversation passed, because the largest reward is 0.988" in captured.get()) is told


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


# A long step shows that it is alive: a line now and then in a log, the live display on a terminal.


SLOW = """
import asyncio
import time
from pathlib import Path
from turnwise.environments.environment import environment
from turnwise.types import Opening, Reply

HERE = Path(__file__).parent

@environment
async def slow(row):
    turn = yield Opening(messages=row.messages)
    while (HERE / "wait").exists():
        await asyncio.sleep(0.05)
    yield Reply(reward=float(len(turn.text)), done=True)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(SLOW)
    (tmp_path / "wait").touch()
    return save_recipe(
        tmp_path,
        save_model(tmp_path / "model"),
        environment=f"{tmp_path / 'user.py'}:slow",
        limits={"turns": 1, "tokens_per_turn": 6},
        train={"steps": 1, "batch_size": 2, "group_size": 3, "lr": 0.01},
    )


def test_a_part_counts_its_own_pieces_only() -> None:
    activity = Activity()
    conversation = activity.part(2, "conversations", 8)
    conversation()
    assert activity.text().startswith("step 2: conversations 1 of 8, 0 s")
    micro_batch = activity.part(1, "training, micro-batches", 3)
    conversation()  # with train.max_staleness they go on
    micro_batch()
    assert activity.text().startswith("step 1: training, micro-batches 1 of 3, 0 s")


def test_a_short_step_prints_no_sign_of_life() -> None:
    written = io.StringIO()
    activity = Activity()
    activity.step(1)
    with Heartbeat(activity, Console(file=written), seconds=0.5):
        for step in range(2, 10):
            time.sleep(0.1)
            activity.step(step)
    assert written.getvalue() == ""


def test_a_command_shows_its_present_stage_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    with stages(Console(file=written, force_terminal=True, width=80)) as begin:
        begin("checking: [log-probs]")
        while "checking: [log-probs]" not in written.getvalue():
            time.sleep(0.02)
    assert written.getvalue().endswith("\x1b[2K")  # the line is removed
    elsewhere = io.StringIO()
    with stages(Console(file=elsewhere)) as begin:
        begin("checking: log-probs")
    assert elsewhere.getvalue() == ""
    monkeypatch.setattr(report, "_FIRST_LINE", 0.05)
    with stages(Console(file=elsewhere)) as begin:
        begin("checking: log-probs")
        while not elsewhere.getvalue():
            time.sleep(0.02)
    assert re.fullmatch(r"checking: log-probs, \d+ s\n", elsewhere.getvalue())
    monkeypatch.setattr(report, "_FIRST_LINE", 60.0)
    monkeypatch.setattr(report, "_SILENT", 0.0)
    elsewhere = io.StringIO()
    with stages(Console(file=elsewhere)) as begin:
        begin("checking: [log-probs]")
        begin("checking: credit")
    assert elsewhere.getvalue() == "checking: [log-probs]\nchecking: credit\n"


def test_a_long_step_prints_a_line_in_each_interval_where_there_is_no_terminal(recipe: Path) -> None:
    written = io.StringIO()
    console = Console(file=written, width=200)

    async def go() -> None:
        going = asyncio.create_task(train(run, TrainReport(console, run.activity)))
        while written.getvalue().count("step 1: conversations ") < 3 and not going.done():
            await asyncio.sleep(0.05)
        recipe.with_name("wait").unlink()
        await going

    config, _ = load(str(recipe), [])
    run = assemble(config)
    with Heartbeat(run.activity, console, seconds=0.2):
        asyncio.run(go())
    lines = [line for line in written.getvalue().splitlines() if line.startswith("step 1: conversations ")]
    assert len(lines) >= 3
    assert all(re.fullmatch(r"step 1: conversations \d of 6,( [\d,]+ tokens/s,)? \d+ s", line) for line in lines)


@pytest.mark.slow
def test_a_long_step_shows_its_parts_on_a_terminal(recipe: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "turnwise", "train", str(recipe)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 240
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the process has ended
                break
        seconds = set(re.findall(r"step 1: conversations \d of 6,(?: [\d,]+ tokens/s,)? (\d+) s", shown))
        if len(seconds) >= 2 and recipe.with_name("wait").exists():  # it counts
            recipe.with_name("wait").unlink()
    os.close(ours)
    assert process.wait(timeout=240) == 0, shown
    assert not recipe.with_name("wait").exists()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_a_run_goes_on_when_its_output_is_closed(recipe: Path, closed: str) -> None:
    recipe.with_name("wait").unlink()
    command = f"{sys.executable} -m turnwise train {recipe} train.steps=3"
    command = {
        "stdout": f"set -o pipefail; {command} | head -1",
        "both": f"{command} >&- 2>&-",
    }[closed]
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (recipe.with_name("run") / "metrics.jsonl").read_text().count("\n") == 3
    assert "Error" not in ended.stderr
    assert "Traceback" not in ended.stderr
    if closed == "stdout":
        assert ended.stdout.startswith("training ")


# `TURNWISE_LOG=debug` tells the story of one conversation: its tokens, texts, calls, results, rewards, masks and its
# end.


ROOT = Path(__file__).resolve().parents[2]


def a_trajectory(id: str = "2.0:17/0") -> Trajectory:
    """Two turns: a call with its result, and an answer that a loss mask has left out."""
    call = ToolCall(id="call_0", name="add", arguments={"a": 1}, text="<call>")
    broken = ToolCall(id="call_1", name="", arguments={}, text="<ca", error="the call is not JSON")
    outcomes = (
        ToolOutcome(id="call_0", name="add", arguments={"a": 1}, content="2\x1b]0;owned\x07", seconds=0.25, reward=0.5),
        ToolOutcome(id="call_1", name="", arguments={}, content="Error: not JSON", error="malformed"),
    )
    turns = [
        Turn(
            index=0, message={"role": "assistant", "content": ""}, text="<call>\nand more", calls=(call, broken),
            outcomes=outcomes, reward=0.5, reasoning="hm", seconds_engine=0.5, seconds_environment=0.125,
        ),
        Turn(index=1, message={"role": "assistant", "content": "2"}, text="2", reward=1.0, weight=0.0, finish_reason="length"),
    ]  # fmt: skip
    segment = Segment(
        token_ids=array("l", [1, 2, 3, 10, 11, 4, 12]),
        turn=array("l", [-1, -1, -1, 0, 0, -1, 1]),
        logprobs=array("d", [0, 0, 0, -0.5, -1.5, 0, -0.25]),
        version=array("l", [-1, -1, -1, 2, 2, -1, 3]),
    )
    return Trajectory(
        id=id, group="2.0:17", row=a_row(answer="2"), turns=turns, segments=[segment], stop=Stop.MAX_TURNS,
        reward=1.5, rewards={"turns": 1.5}, advantages=[0.25, -0.5], seconds=1.25, logprob_kind=LogprobKind.SAMPLED,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ((0.0, 1.0), "one of the best conversations"),
        ((0.0, 0.0), "a conversation"),
        ((0.1 + 0.2, 0.3), "a conversation"),
    ],
)
def test_a_conversation_is_the_best_only_where_rewards_differ(
    tmp_path: Path, rewards: Sequence[float], told: str
) -> None:
    written = io.StringIO()
    report = TrainReport(Terminal(file=written, width=80))
    trajectories = [replace(a_trajectory(), reward=reward) for reward in rewards]
    group = Group(id="2.0:17", row=trajectories[0].row, trajectories=trajectories)
    report.evaluated({"step": 2, **conversation_metrics([group])}, [group])
    report.end(RunDirectory(tmp_path), tmp_path / "checkpoint")
    (line,) = [line for line in written.getvalue().splitlines() if "of the last evaluation" in line]
    assert line == f"{told} of the last evaluation:"
    assert f"reward {max(rewards):.3g}, stop" in written.getvalue()


def test_a_zero_has_no_sign() -> None:
    assert [number(value) for value in (-0.0, -1e-17, 0.0, -0.25, -0.00012)] == [
        "0.000",
        "0.000",
        "0.000",
        "-0.250",
        "-1.2e-04",
    ]


def test_a_small_p_value_is_not_printed_as_0() -> None:
    small = paired_test([1.0 + n / 1000 for n in range(40)], [n % 2 / 1000 for n in range(40)])
    assert [p_value(p) for p in (small.p_t, small.p_sign_flip)] == ["<1e-15", "5.0e-05"]
    assert [p_value(p) for p in (None, 0.0412, 1.0, 3.2e-9, 0.0)] == ["-", "0.0412", "1.0000", "3.2e-09", "<1e-15"]


@pytest.mark.parametrize(("p", "said"), [(1e-20, "p < 1e-15"), (0.0412, "p = 0.0412"), (None, "p = -")])
def test_the_change_on_held_out_rows_has_one_sign_before_p(p: float | None, said: str) -> None:
    test = replace(paired_test([1.0, 0.5], [0.0, 0.0]), p_t=p)
    before, after = estimate([0.0, 0.0]), estimate([1.0, 0.5])
    line = change_line(HeldOutChange(first_step=0, last_step=4, before=before, after=after, test=test))
    assert line.plain.endswith(f", {said} (paired t-test)")


def test_the_story_of_given_answers_has_no_log_probabilities() -> None:
    given = a_trajectory()
    given.logprob_kind = LogprobKind.NONE
    lines = story(given, decode=None)
    assert "turn 0: tokens 3 to 4, 2 tokens without log-probabilities, weight 1: trained on; ids 10 11" in lines
    assert "mean log-probability" not in "\n".join(lines)


def test_the_story_has_all_parts_in_the_order_of_the_tokens() -> None:
    texts = {1: "<system>", 2: "Add ", 3: "1 and 1.", 4: "\nresult"}
    lines = story(a_trajectory(), decode=lambda ids: "".join(texts[token] for token in ids), step=3)
    assert lines == [
        "conversation 2.0:17/0 of step 3",
        'row: answer="2"',
        "opening: tokens 0 to 2, 3 tokens, not trained on; ids 1 2 3",
        "  | <system>Add 1 and 1.",
        "turn 0: tokens 3 to 4, 2 tokens sampled in 0.50 s with weights of version 2, mean log-probability -1.000, weight 1: "
        "trained on; ids 10 11",
        "  | <call>",
        "  | and more",
        "  ended with finish reason stop",
        "  parsed reasoning:",
        "  | hm",
        '  parsed call call_0: add({"a": 1})',
        "  parsed call call_1: not a valid call: the call is not JSON",
        "  tool add (call_0), 0.25 s, reward 0.5, result:",
        "  | 2\\x1b]0;owned\\x07",
        "  tool  (call_1), 0.00 s, reward 0, error (malformed):",
        "  | Error: not JSON",
        "  reward 0.5; advantage +0.25; the environment took 0.12 s",
        "context: tokens 5 to 5, 1 token, not trained on; ids 4",
        "  | ",
        "  | result",
        "turn 1: tokens 6 to 6, 1 token sampled in 0.00 s with weights of version 3, mean log-probability -0.250, weight 0: "
        "not trained on; ids 12",
        "  | 2",
        "  ended with finish reason length",
        "  reward 1; advantage -0.5; the environment took 0.00 s",
        "mask: 2 of 7 tokens in 1 segment are trained on",
        "reward: 1.5",
        "end: stop reason max_turns, 2 turns, 1.25 s",
    ]


def test_a_failed_conversation_tells_the_failure_with_its_frames() -> None:
    trajectory = a_trajectory()
    trajectory.fail(Failure("environment", "KeyError: 'x'", "place.py:3 in step"))
    lines = story(trajectory, decode=None)
    assert "error (environment): KeyError: 'x'" in lines
    assert lines[lines.index("error (environment): KeyError: 'x'") + 1] == "  | place.py:3 in step"


def test_one_conversation_is_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    step = [a_trajectory("2.0:17/0"), a_trajectory("2.0:17/1"), a_trajectory("2.1:5/0")]
    log_conversation(step, decode=None, step=3)
    assert caplog.messages == []  # the level is not debug
    with caplog.at_level(logging.DEBUG, "turnwise"):
        for choice in (None, "2.0:17/1", "5/0", "7/0"):
            monkeypatch.delenv(CHOICE, raising=False)
            if choice is not None:
                monkeypatch.setenv(CHOICE, choice)
            log_conversation(step, decode=None, step=3)
    first = [message.splitlines()[0] for message in caplog.messages]
    assert first == [
        "conversation 2.0:17/0 of step 3",
        "conversation 2.0:17/1 of step 3",
        "conversation 2.1:5/0 of step 3",
        f"{CHOICE}=7/0: no conversation of this step has the id; the ids are: 2.0:17/0, 2.0:17/1, 2.1:5/0",
    ]


def turnwise(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **variables}
    result = subprocess.run(
        [sys.executable, "-m", "turnwise", *words], env=environment, cwd=folder, capture_output=True, text=True
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_a_training_step_is_followed(tmp_path: Path) -> None:
    words = ["demo", "train.steps=1", "train.batch_size=2", "train.group_size=4", "data.eval=null"]
    code, output = turnwise(tmp_path, *words, TURNWISE_LOG="debug")
    assert code == 0
    first = next(iter(read(tmp_path / "runs" / "demo")))
    assert output.count(f"conversation {first.id} of step 1") == 1
    assert "opening: tokens 0 to " in output
    assert "trained on; ids" in output
    assert f"end: stop reason {first.stop}, {len(first.turns)} turns" in output
    assert "| <|im_start|>" in output  # the prompt as the model sees it
    assert "asyncio" not in output  # libraries stay quiet


def test_a_choice_without_debug_is_refused(tmp_path: Path) -> None:
    code, output = turnwise(tmp_path, "show", "runs", TURNWISE_LOG_CONVERSATION="17/0")
    assert code == 1
    assert "TURNWISE_LOG_CONVERSATION has an effect with TURNWISE_LOG=debug only: set both" in output


# What a model, a tool or an environment wrote has no effect on a terminal.


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
