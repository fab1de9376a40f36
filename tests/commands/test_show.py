"""Runs as text: one run, several as a table, and what is said first."""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support import byte_tokenizer
from support.conversations import Says, a_row, call, hold, hold_all
from support.runs import a_run
from turnwise import current_episode
from turnwise.cli import main
from turnwise.commands.show import Selection, show, show_metrics
from turnwise.environments.environment import SingleTurn, environment
from turnwise.environments.tools.toolbox import Tools
from turnwise.environments.users import ScriptedUser
from turnwise.errors import RunError
from turnwise.record.metrics import conversation_metrics, reward_parts
from turnwise.record.reader import RecordedTrajectories, read, read_lines, trajectories_frame
from turnwise.record.run_directory import RunDirectory
from turnwise.record.trajectory_json import decode_trajectory, trajectory_record
from turnwise.record.writer import write_trajectories
from turnwise.rewards.functions import TrajectoryReward, plan_call
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.terminal.conversation import conversation
from turnwise.terminal.report import places
from turnwise.terminal.tables import evaluations_table, number, sparkline
from turnwise.types import Group, LogprobKind, MismatchKind, Opening, Reply, TemplateMismatch, Trajectory


def text(what: Any) -> str:
    """What is printed, on a wide screen without colours."""
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def shown(run: Path, **options: Any) -> str:
    console = Console(width=160, no_color=True)
    printed = {name: options.pop(name) for name in ("tokens", "evaluation") if name in options}
    with console.capture() as captured:
        show(console, run, Selection(**options), **printed)
    return captured.get()


def scored(trajectory: Trajectory, reward: float) -> Trajectory:
    trajectory.reward = reward
    return trajectory


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four conversations, one of which broke."""
    good = hold(Says(call("add", '{"a": 1, "b": 2}'), "It is 3."), lambda: Tools([add]), row=a_row("1+2?", id="sum"))
    good.turns[1].add_reward(1.0, "environment")
    good.advantages = [0.5, 0.5]
    middle, low = (hold(Says("Hm."), row=a_row(id=name)) for name in ("middle", "low"))
    broken = hold(Says("a", RuntimeError("dead")), lambda: ScriptedUser(["And?"]), row=a_row(id="broken"))
    path = tmp_path / "trajectories.jsonl"
    write_trajectories(path, [scored(good, 1.0), scored(low, -2.0)], step=1)
    write_trajectories(path, [broken, scored(middle, 0.25)], step=2)
    metrics = [
        {"step": n, "reward/mean": n / 4, "reward/std": 0.1, "turns/mean": 2.0, "entropy": None, "seconds/step": 0.5}
        for n in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)) + "\n")
    return tmp_path


def test_the_summary_counts_and_names_one(run: Path) -> None:
    lines = shown(run).splitlines()
    assert lines[0] == "2 steps, reward ▁█ 0.25 → 0.50"
    assert lines[1].split()[:3] == ["step", "reward", "±"]
    assert [line.split()[:3] for line in lines[2:4]] == [["1", "0.250", "0.100"], ["2", "0.500", "0.100"]]
    assert "4 conversations; done 3, error 1" in lines
    assert "  1 x engine: RuntimeError: dead (latest in step 2)" in lines
    evaluations = [{"step": n, "reward/mean": n / 4} for n in (0, 2)]
    (run / "evaluations.jsonl").write_text("\n".join(map(json.dumps, evaluations)) + "\n")
    assert "held-out questions" in shown(run)
    assert lines[-1] == f"show one: turnwise show {run} --id middle/0"


def test_the_table_of_steps_has_failures_and_groups_without_a_spread_where_there_are_some(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def header(**values: float) -> list[str]:
        (run / "metrics.jsonl").write_text("\n".join(json.dumps(line | values) for line in lines) + "\n")
        return shown(run).splitlines()[1].split()

    assert header(failed=0.0, **{"groups/zero_std": 0.0}) == [
        "step",
        "reward",
        "±",
        "turns",
        "calls",
        "entropy",
        "s/step",
    ]
    both = header(failed=0.25, **{"groups/zero_std": 0.5})
    assert both == ["step", "reward", "±", "turns", "calls", "failed", "zero", "std", "entropy", "s/step"]
    assert "0.500" in shown(run).splitlines()[2].split()
    assert len(shown(run).splitlines()[1]) <= 80


def test_one_conversation_with_who_said_what_and_what_it_earned(run: Path) -> None:
    out = shown(run, id="sum/0")
    lines = [line.strip("│ ") for line in out.splitlines()]
    assert "sum/0  (step 1, reward 1, stop: done, " in lines[0]
    assert lines[1:-1] == [
        "tools  add",
        "user",
        "1+2?",
        "assistant  reward 0, advantage +0.50",
        "<tool_call>",
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        "</tool_call>",
        "tool add (call_0)",
        "3",
        "assistant  reward 1, advantage +0.50",
        "It is 3.",
    ]


def test_the_tokens_of_a_conversation(run: Path) -> None:
    out = shown(run, id="low/0", tokens=True)
    rows = [line.strip("│ ").split() for line in out.splitlines()]
    assert ["segment", "0:", "25", "tokens"] in rows
    assert ["token_ids", "turn", "weight", "logprobs", "version"] in rows
    at = rows.index(["token_ids", "turn", "weight", "logprobs", "version"]) + 1
    assert rows[at] == ["1", "0"]  # a token of the context: id and weight
    assert "0.0000" not in out
    assert rows[at + 21 : at + 25] == [
        ["42", "0", "1", "-0.1250", "0"],
        ["79", "0", "1", "-0.2500", "0"],
        ["16", "0", "1", "-0.3750", "0"],
        ["2", "0", "1", "-0.5000", "0"],
    ]


def test_given_answers_have_no_log_probabilities_and_no_version(tmp_path: Path) -> None:
    given = scored(hold(Says("Hm."), row=a_row(id="given")), 1.0)
    given.logprob_kind = LogprobKind.NONE
    write_trajectories(tmp_path / "trajectories.jsonl", [given])
    rows = [line.strip("│ ").split() for line in shown(tmp_path, id="given/0", tokens=True).splitlines()]
    at = rows.index(["token_ids", "turn", "weight"]) + 1
    assert rows[at] == ["1", "0"]
    assert rows[at + 21 : at + 25] == [["42", "0", "1"], ["79", "0", "1"], ["16", "0", "1"], ["2", "0", "1"]]


def test_the_weights_of_turns_are_shown_where_they_are_not_1(tmp_path: Path) -> None:
    one = scored(hold(Says("a", "b"), lambda: ScriptedUser(["And?"]), row=a_row(id="one")), 1.0)
    one.turns[0].weight, one.turns[1].weight = 0.0, 0.5
    write_trajectories(tmp_path / "trajectories.jsonl", [one])
    out = shown(tmp_path, id="one/0", tokens=True)
    assert (
        out.count("assistant  weight 0 ") == out.count("assistant  weight 0.5 ") == 1
    )  # no turn has a reward of its own
    rows = [line.strip("│ ").split() for line in out.splitlines()]
    assert [row[2] for row in rows if len(row) == 5 and row[1] in ("0", "1")] == ["0", "0", "0.5", "0.5"]
    record = json.loads(json.dumps(trajectory_record(one)))
    del record["schema"]
    for turn in record["turns"]:
        del turn["weight"]  # of a run from before there were weights
    assert "weight 0" not in text(conversation(decode_trajectory(record, where="it"), tokens=True))


def test_the_broken_ones(run: Path) -> None:
    out = shown(run, failed=True)
    assert out.count("╭─") == 1
    assert "broken/0  (step 2, reward none, stop: error, " in out
    assert "error (engine): RuntimeError: dead" in out


def test_the_worst_ones_come_first_and_the_broken_ones_are_none(run: Path) -> None:
    titles = [line for line in shown(run, worst=2).splitlines() if line.startswith("╭─")]
    assert [title.split()[1] for title in titles] == ["low/0", "middle/0"]
    assert shown(run, worst=99).count("╭─") == 3


def test_the_best_ones_come_first_and_the_last_ones_in_their_order(run: Path) -> None:
    def titles(**options: Any) -> list[str]:
        return [line.split()[1] for line in shown(run, **options).splitlines() if line.startswith("╭─")]

    assert titles(best=2) == ["sum/0", "middle/0"]
    assert titles(best=2, worst=1)[:2] == ["sum/0", "middle/0"]
    assert titles(best=2, worst=1)[2:] == titles(worst=1)
    assert titles(last=3) == ["low/0", "broken/0", "middle/0"]
    assert titles(last=1, step=1) == ["low/0"]
    with pytest.raises(RunError, match="--worst and --last select different conversations"):
        shown(run, worst=1, last=1)
    with pytest.raises(RunError, match="--best compares rewards, and conversations that failed"):
        shown(run, failed=True, best=1)
    with pytest.raises(RunError, match="--tokens needs conversations to show"):
        shown(run, tokens=True)


def test_the_held_out_conversations_are_a_record_of_their_own(run: Path) -> None:
    with pytest.raises(RunError, match="has no evaluations"):
        shown(run, evaluation=True)
    held_out = scored(hold(Says("Held out."), row=a_row(id="far")), 0.5)
    write_trajectories(run / "eval_trajectories.jsonl", [held_out], step=0)
    assert "1 conversation; done 1" in shown(run, evaluation=True)
    assert f"turnwise show {run} --eval --id far/0" in shown(run, evaluation=True)
    assert "Held out." in shown(run, evaluation=True, last=1)


def test_the_row_the_tools_and_the_parts_of_the_reward_are_shown(tmp_path: Path) -> None:
    one = scored(hold(Says("5"), lambda: Tools([add]), row=a_row(id="one", answer=5, note="x" * 500)), 1.5)
    one.rewards = {"turns": 1.0, "short": 0.5}
    write_trajectories(tmp_path / "trajectories.jsonl", [one])
    lines = [" ".join(line.strip("│ ").split()) for line in shown(tmp_path, last=1).splitlines()]
    text = " ".join(lines)
    assert text.index("row answer=5, note=") < text.index("… (500 characters)")
    assert text.index("(500 characters)") < text.index("tools add rewards turns 1.000, short 0.500")


def test_the_text_of_every_token_stands_beside_its_id(run: Path) -> None:
    byte_tokenizer().save_pretrained(run / "checkpoint")
    rows = [line.strip("│ ").split() for line in shown(run, id="low/0", tokens=True).splitlines()]
    at = rows.index(["token_ids", "turn", "weight", "logprobs", "version", "text"]) + 1
    assert rows[at] == ["1", "0", '"<|im_start|>"']
    assert [row[-1] for row in rows[at + 21 : at + 25]] == ['"H"', '"m"', '"."', '"<|im_end|>"']


def test_a_tokenizer_is_found_where_the_recipe_says_the_model_is(run: Path, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (run / "config.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}")
    assert '"<|im_start|>"' in shown(run, id="low/0", tokens=True)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        shown(run, id="low/0", tokens=True)


def test_a_path_is_in_one_piece_on_a_narrow_terminal(run: Path) -> None:
    console = Console(width=30, no_color=True)
    with console.capture() as captured:
        show(console, run)
    assert f"turnwise show {run} --id middle/0" in captured.get()
    with console.capture() as captured:
        console.print(places(RunDirectory(run), run / "checkpoint", conversations="all"), soft_wrap=True)
    assert captured.get().splitlines()[-1].split()[0] == str(run / "checkpoint")


def test_one_evaluation_stands_alone(run: Path) -> None:
    (run / "evaluations.jsonl").write_text('{"step": 0, "reward/mean": 0.25}\n')
    out = shown(run)
    assert "so far (step 0)" in out
    assert "before" not in out


def test_the_conversations_of_a_step(run: Path) -> None:
    titles = [line for line in shown(run, step=2).splitlines() if line.startswith("╭─")]
    assert [title.split()[1] for title in titles] == ["broken/0", "middle/0"]
    assert shown(run, step=2, failed=True).count("╭─") == 1


def test_a_row_over_the_steps_is_a_line_for_each_conversation(run: Path) -> None:
    path = run / "trajectories.jsonl"
    long = hold(Says("no " * 90 + "\nor so"), row=a_row("1+2?", id="sum"))
    write_trajectories(path, [replace(scored(long, 0.0), id="3.0:sum/1")], step=3)
    write_trajectories(path, [hold(Says(RuntimeError("dead")), row=a_row("1+2?", id="sum"))], step=2)
    lines = shown(run, row="sum").splitlines()
    assert lines[0] == "row sum: 3 conversations in 3 steps"
    assert lines[1:4] == [
        "step  sample  reward  last answer",
        "   1       0   1.000  It is 3.",
        "   2       0       -  failed: engine",
    ]
    assert lines[4].startswith("   3       1   0.000  no no no ")
    assert (len(lines[4]), lines[4][-1]) == (160, "…")
    assert lines[5] == f"in full: turnwise show {run} --row sum --step N, or --id 3.0:sum/1"
    # with another choice, the conversations in full
    assert [line.split()[1] for line in shown(run, row="sum", best=1).splitlines() if line.startswith("╭─")] == [
        "sum/0"
    ]
    assert shown(run, row="sum", tokens=True).count("╭─") == 3
    with pytest.raises(RunError, match=r"no conversation in .* matches \(ids of rows are [^;]*sum[^;]*\); `turnwise"):
        shown(run, row="su")


def test_ids_and_steps_that_a_record_has_are_named(run: Path) -> None:
    rows = [replace(a_row(id=str(number)), fields={"id": f"q{number}"}) for number in range(7)]
    path = run / "eval_trajectories.jsonl"
    write_trajectories(path, [hold(Says("x"), row=row) for row in rows], step=0)
    write_trajectories(path, [hold(Says("x"), row=row) for row in rows], step=80)
    ids = r"\(ids of rows are 0, 1, 2, 3, 4, \.\.\.; their column id is none, unless the recipe has data\.columns\.id=id\)"
    with pytest.raises(RunError, match=rf"matches {ids};"):
        shown(run, row="q1", evaluation=True)
    with pytest.raises(RunError, match=r"matches \(its steps are 0, 80\);"):
        shown(run, step=40, evaluation=True)
    for step in range(1, 8):
        write_trajectories(path, [hold(Says("x"), row=rows[0])], step=step)
    with pytest.raises(RunError, match=r"matches \(its steps are 0, 1, 2, 3, 4, \.\.\. 80\);"):
        shown(run, step=40, evaluation=True)


def test_errors_of_tools_are_counted_by_tool_and_message(run: Path) -> None:
    wrong = [call("add", '{"a": 1}'), call("add", '{"a": 2}'), call("sub", "{}"), call("add", '{"a": 1, "b": 1}'), "2"]
    path = run / "trajectories.jsonl"
    write_trajectories(path, [scored(hold(Says(*wrong), lambda: Tools([add]), row=a_row(id="wrong")), 0.0)], step=3)
    lines = shown(run).splitlines()
    start = lines.index("3 of 5 calls of tools failed: 2 of 4 of add, 1 of 1 of sub")
    assert lines[start + 1 : start + 4] == [
        "  2 x add, arguments: the argument 'b' is missing (latest in step 3)",
        "  1 x sub, unknown_tool: there is no tool 'sub' (the tools are: add) (latest in step 3)",
        f"  the latest of the first: turnwise show {run} --id wrong/0",
    ]


def test_messages_that_are_not_printed_are_counted(run: Path) -> None:
    calls = [call(f"tool_{letter}", "{}") for letter in "abcdefgg"]
    one = hold(Says(*calls, "2"), lambda: Tools([add]), row=a_row(id="wrong"), limits=Limits(turns=20))
    write_trajectories(run / "trajectories.jsonl", [scored(one, 0.0)], step=3)
    lines = shown(run).splitlines()
    start = lines.index("8 of 9 calls of tools failed: 2 of 2 of tool_g, 1 of 1 of tool_a, 1 of 1 of tool_b, 1 of 1 of "
        "tool_c, 1 of 1 of tool_d, and of 2 others")  # fmt: skip
    assert lines[start + 1].startswith("  2 x tool_g, unknown_tool: there is no tool")
    assert lines[start + 6] == "  2 x 2 other messages"


def test_messages_of_a_group_that_differ_are_not_given_as_one(run: Path) -> None:
    async def temperature(station: int) -> int:
        """Read."""
        raise ValueError(f"no station in {station}")

    for step in (3, 4):
        one = hold(Says(call("temperature", f'{{"station": {step}}}'), "?"), lambda: Tools([temperature]))
        failed = hold(Says(RuntimeError(f"dead after {step} s")))
        write_trajectories(run / "trajectories.jsonl", [scored(one, 0.0), failed], step=step)
    lines = shown(run).splitlines()
    others = "(latest in step 4; others differ in numbers or quoted texts)"
    assert f"  2 x temperature, raised: no station in 4 {others}" in lines
    assert f"  2 x engine: RuntimeError: dead after 4 s {others}" in lines
    assert "  1 x engine: RuntimeError: dead (latest in step 2)" in lines


def test_chosen_conversations_are_lines_of_json_as_the_record_has_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    rewarded = sorted((line for line in recorded if line["reward"] is not None), key=lambda line: line["reward"])
    assert main(["show", str(run), "--worst", "2", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rewarded[:2]
    assert main(["show", str(run), "--step", "1", "--json"]) == 0
    printed = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
    assert printed == [line["id"] for line in recorded if line["step"] == 1]
    assert main(["show", str(run), "--row", "low", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["row"]["id"] == "low"
    assert main(["show", str(run), "--step", "1", "--failed", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_the_last_step_is_that_of_the_record_or_of_its_evaluations(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trajectories(run / "eval_trajectories.jsonl", [scored(hold(Says("x"), row=a_row(id="first")), 0.0)], step=0)
    write_trajectories(run / "eval_trajectories.jsonl", [scored(hold(Says("x"), row=a_row(id="held")), 0.0)], step=10)

    def ids(*words: str) -> list[str]:
        assert main(["show", str(run), "--step", "last", "--json", *words]) == 0
        return [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]

    assert ids() == ["broken/0", "middle/0"]
    assert ids("--worst", "1") == ["middle/0"]
    assert ids("--eval") == ["held/0"]
    with pytest.raises(RunError, match=r"matches \(its steps are 1 to 2\)"):
        shown(run, step="last", row="low")
    assert "no conversation of step 10 failed" in shown(run, step="last", failed=True, evaluation=True)


def test_a_record_without_steps_has_no_last_one(run: Path) -> None:
    write_trajectories(run / "eval_trajectories.jsonl", [hold(Says("x"))])
    with pytest.raises(
        RunError, match=r"^no conversation in .*eval_trajectories\.jsonl has a step, so there is no last"
    ):
        shown(run, step="last", evaluation=True)


@pytest.mark.parametrize("text", ["-1", "lst", "1.5"])
def test_what_is_no_step_is_refused_with_the_word_for_the_last_one(
    run: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        main(["show", str(run), "--step", text])
    message = f"{text!r} is no step: give a number of at least 0, or last for the last step"
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--csv"], "--csv prints tables and --worst prints conversations: --json prints them as JSON lines"),
        (["--json", "--tokens"], "--tokens is for text"),
        (
            ["--row", "sum", "--metric", "loss"],
            "--metric prints metrics and --row prints conversations: give one of them",
        ),
        (["--sort", "reward/mean"], "--worst prints conversations of one run: --sort sorts runs"),
    ],
)
def test_a_form_that_conversations_do_not_have_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["show", str(run), "--worst", "2", *words]) == 1
    assert message in capsys.readouterr().err


def test_that_no_conversation_failed_is_no_error(run: Path) -> None:
    assert shown(run, step=1, failed=True).startswith("no conversation of step 1 failed (errors of tools are")


@pytest.mark.parametrize("options", [{"id": "nope"}, {"step": 9}, {"step": 9, "failed": True}])
def test_nothing_that_fits_is_told(run: Path, options: dict[str, Any]) -> None:
    with pytest.raises(
        RunError,
        match=r"no conversation in .* matches( \(its steps are 1 to 2\))?; `turnwise show .*` prints a summary of the run",
    ):
        shown(run, **options)


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"^{tmp_path} is not a run: it contains no trajectories\.jsonl\."):
        shown(tmp_path)


def test_a_line_that_a_killed_run_left_half_written_is_passed_over_and_any_other_is_not(run: Path) -> None:
    path = run / "trajectories.jsonl"
    with path.open("a") as file:
        file.write('{"id": "ha')
    assert len(list(read_lines(path))) == 4
    assert "4 conversations" in shown(run)
    with path.open("a") as file:
        file.write("\n")
    assert f"left out: {path}:5 is not JSON (Invalid control character" in shown(run)
    with pytest.raises(RunError, match=rf"{path}:5 is not JSON \(Invalid control character"):
        list(read_lines(path))
    assert list(read_lines(run / "nothing.jsonl")) == []


def test_after_a_rewritten_history_every_turn_shows_its_own_words_and_reward() -> None:
    @environment
    async def forgets(row: Any):  # type: ignore[no-untyped-def]
        yield Opening(messages=row.messages)
        yield Reply(rewrite=[{"role": "user", "content": "Anew."}], reward=1.0)
        yield Reply(done=True, reward=2.0)

    out = text(conversation(hold(Says("first words", "second words"), forgets)))
    lines = [line.strip("│ ") for line in out.splitlines()][1:-1]
    assert lines == ["user", "Anew.", "assistant  reward 2", "second words"]
    alike = text(conversation(hold(Says("same", "same"), forgets)))
    assert "assistant  reward 2" in alike


def test_assistant_messages_of_the_opening_are_no_turns() -> None:
    row = a_row()
    row.messages.append({"role": "assistant", "content": "Yo."})  # type: ignore[attr-defined]
    row.messages.append({"role": "user", "content": "And?"})  # type: ignore[attr-defined]
    lines = [line.strip("│ ") for line in text(conversation(hold(Says("So."), row=row))).splitlines()]
    assert lines[1:-1] == ["user", "Hi", "assistant", "Yo.", "user", "And?", "assistant", "So."]


def test_brackets_are_text_wherever_they_stand() -> None:
    one = hold(Says("[bold]x[/bold] [/nothing]"), row=a_row("[red]?", id="math[algebra][/x]"))
    out = text(conversation(one))
    assert "math[algebra][/x]/0  (reward none" in out
    assert "[bold]x[/bold] [/nothing]" in out
    assert "[red]?" in out


def test_drift_is_shown() -> None:
    one = hold(Says("a"))
    one.template_mismatch = TemplateMismatch(MismatchKind.CONTEXT, "from character 3 on")
    assert "template mismatch: from character 3 on" in text(conversation(one))


def test_evaluations_before_and_after() -> None:
    before = {"step": 0, "reward/mean": 0.1, "turns/mean": 2.0, "stop/done": 1.0, "stop/length": 0.0, "stop/error": 0.0}
    after = {
        "step": 9,
        "reward/mean": 0.7,
        "turns/mean": 1.5,
        "stop/done": 0.75,
        "stop/length": 0.25,
        "stop/error": 0.0,
    }
    rows = [line.split() for line in text(evaluations_table([before, {"step": 5}, after])).splitlines()]
    assert ["before", "(step", "0)", "after", "(step", "9)"] in [
        [word for word in row if word not in "┃"] for row in rows
    ]
    cells = [[word for word in row if word != "│"] for row in rows]
    assert ["reward/mean", "0.100", "0.700"] in cells
    assert ["reward/std", "-", "-"] in cells
    assert ["stop/length", "0.000", "0.250"] in cells
    assert not any("stop/error" in row for row in cells)


def test_evaluations_of_other_numbers_of_conversations_are_not_compared() -> None:
    lines = [(0, 0.1, 256), (4, 0.5, 8), (8, 0.7, 8)]
    whole, few, more = ({"step": step, "reward/mean": mean, "conversations": count} for step, mean, count in lines)
    out = text(evaluations_table([whole, few, more]))
    assert "before (step 4)" in out
    assert "0.100" not in out
    assert "1 evaluations of another number of conversations than 8" in " ".join(out.split())
    only = text(evaluations_table([whole, few]))
    assert "so far (step 4)" in only


def test_a_curve_in_one_line() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█ 0.00 → 1.00"
    assert sparkline([1.0, 1.0]) == "▁▁ 1.00 → 1.00"
    assert sparkline([]) == ""
    long = sparkline([n / 999 for n in range(1000)])
    assert (len(long.split()[0]), long[0], long.split()[0][-1]) == (40, "▁", "█")
    assert [number(None), number(0.12345), number(2)] == ["-", "0.123", "2.000"]
    assert [number(0.00012), number(-0.0004), number(0.0006), number(0.0), number(1e-17)] == [
        "1.2e-04", "-4.0e-04", "0.001", "0.000", "0.000",
    ]  # fmt: skip
    assert sparkline([0.5, 0.0012]) == "█▁ 0.50 → 1.2e-03"


def test_a_run_of_rollouts_has_a_summary_too(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "trajectories.jsonl", hold_all(Says("a"), size=3))
    assert shown(tmp_path).splitlines()[0] == "3 conversations; done 3"


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b'{"id": "\xff"}', b'{"schema": 3}', b""])
def test_one_damaged_line_is_left_out_and_named(run: Path, line: bytes) -> None:
    path = run / "trajectories.jsonl"
    lines = path.read_bytes().splitlines()
    whole = len(lines)
    path.write_bytes(b"\n".join([lines[0], line, *lines[2:]]) + b"\n")
    summary = shown(run)
    assert f"{whole - 1} conversations;" in summary
    assert f"left out: {path}:2" in summary
    for options in ({"last": whole}, {"best": 1}, {"worst": 1}, {"failed": True}):
        assert f"left out: {path}:2" in shown(run, **options)


@pytest.mark.parametrize(("place", "byte"), [(0, 0), (12, 255), (-5, 7)])
def test_a_damaged_part_of_a_compressed_record_is_left_out_and_named(run: Path, place: int, byte: int) -> None:
    plain = run / "trajectories.jsonl"
    lines = plain.read_bytes().splitlines(keepends=True)
    plain.unlink()
    path, first = run / "trajectories.jsonl.gz", gzip.compress(lines[0], 3, mtime=0)
    second = bytearray(gzip.compress(lines[1], 3, mtime=0))
    assert second[place] != byte
    second[place] = byte
    path.write_bytes(first + bytes(second) + gzip.compress(b"".join(lines[2:]), 3, mtime=0))
    named = f"left out: {path} is damaged: the part at byte {len(first)} is not gzip data"
    summary = shown(run)
    assert f"{len(lines) - 1} conversations;" in summary
    assert named in summary
    ids = [json.loads(line)["id"] for line in lines]
    for _ in range(2):  # without and with the index of the lines
        everything = shown(run, last=len(lines))
        assert named in everything
        assert [id in everything for id in ids] == [True, False, *[True] * (len(ids) - 2)]
    with pytest.raises(RunError, match=f"the part at byte {len(first)}"):
        RecordedTrajectories(run)
    with pytest.raises(RunError, match=f"the part at byte {len(first)}"):
        list(read(run))


def test_a_damaged_line_of_metrics_is_left_out_and_named(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo\n{"step": 3, "loss": 0.25}\n')
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        show_metrics(console, run, ["loss"])
    assert f"left out: {path}:2" in captured.get()
    assert [line.split() for line in captured.get().splitlines()[-2:]] == [["1", "0.5"], ["3", "0.25"]]


@environment
async def asks_a_critic(row: Any) -> Any:
    """Names two parts of its reward, and opens an agent twice."""
    turn = yield Opening(messages=row.messages)
    for _ in range(2):
        async with current_episode().agent("critic", messages=row.messages) as critic:
            await critic.turn()
    yield Reply(rewards={"right": 1.0, "short": 0.125}, info={"said": turn.text}, done=True)


def test_a_conversation_names_its_agents_and_the_parts_of_its_reward(run: Path) -> None:
    one = hold(Says("a", "b", "c"), asks_a_critic, row=a_row(id="talk"))
    asyncio.run(Scorer().score([Group(id="talk", row=one.row, trajectories=[one])]))
    write_trajectories(run / "trajectories.jsonl", [one], step=1)
    told = shown(run, id=one.id)
    assert f"agents  critic ({one.id}/critic), critic ({one.id}/critic/2)" in told
    assert "rewards  right 1.000, short 0.125" in told
    assert "reward 1.12 (right 1, short 0.125)" in told
    summary = shown(run)
    assert "\n5 conversations; " in summary  # without those of agents
    assert "and of agents: critic 2" in summary
    metrics = conversation_metrics([Group(id="talk", row=one.row, trajectories=[one])])
    assert (metrics["rewards/right/mean"], metrics["rewards/short/mean"]) == (1.0, 0.125)
    assert not {"rewards/environment/mean", "rewards/turns/mean"} & metrics.keys()  # all of it has a name


@environment
async def with_and_without_a_name(row: Any) -> Any:
    turn = yield Opening(messages=row.messages)
    yield Reply(reward=0.5, rewards={"deal": 1.0} if turn.text == "deal" else {}, done=True)


def test_the_parts_that_are_shown_add_up_to_the_reward_and_each_has_a_metric(run: Path) -> None:
    ones = [hold(Says(text), with_and_without_a_name, row=a_row(id=text)) for text in ("deal", "no", "none")]
    groups = [Group(id=one.id, row=one.row, trajectories=[one]) for one in ones]

    def length(trajectory: Any) -> float | None:
        return 2.0 if trajectory.answer != "none" else None

    asyncio.run(
        Scorer(
            trajectory=[
                TrajectoryReward("length", length, weight=-0.1, plan=plan_call(length, "trajectory", name="length"))
            ]
        ).score(groups)
    )
    assert [one.reward for one in ones] == pytest.approx([1.3, 0.3, 0.5])
    assert reward_parts(ones[0]) == pytest.approx({"turns": 0.5, "length": -0.2, "deal": 1.0})
    assert [sum(reward_parts(one).values()) for one in ones] == pytest.approx([one.reward for one in ones])
    metrics = conversation_metrics(groups)
    assert metrics["rewards/turns/mean"] == 0.5
    assert metrics["rewards/deal/mean"] == pytest.approx(1 / 3)  # 0 in the conversations without
    assert metrics["rewards/length/mean"] == pytest.approx(-0.2)  # None is not 0
    write_trajectories(run / "trajectories.jsonl", ones, step=1)
    assert "rewards  turns 0.500, length -0.200, deal 1.000" in shown(run, id=ones[0].id)
    assert list(trajectories_frame(run)["rewards/turns"].dropna())[-3:] == [0.5, 0.5, 0.5]
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **metrics}) + "\n")
    assert "rewards of step 1: deal 0.333, length -0.200, turns 0.500" in shown(run)


def test_a_part_of_one_environment_is_averaged_over_the_rows_of_its_data_set() -> None:
    @environment
    async def sums(row: Any) -> Any:
        turn = yield Opening(messages=row.messages)
        yield Reply(
            rewards={"right": float(turn.text == "4"), **({"short": 1.0} if turn.text == "4" else {})}, done=True
        )

    @environment
    async def talks(row: Any) -> Any:
        yield Opening(messages=row.messages)
        yield Reply(rewards={"polite": 0.5}, done=True)

    def held(made: Any, source: str, *texts: str) -> Group:
        row = replace(a_row(id=source), source=source)
        return Group(id=source, row=row, trajectories=[hold(Says(text), made, row=row) for text in texts])

    groups = [held(sums, "sums", "4", "4", "4", "5"), held(talks, "talks", *"aaaa")]
    asyncio.run(Scorer().score(groups))
    metrics = conversation_metrics(groups)
    assert metrics["reward/mean"] == pytest.approx(1.0)
    assert (metrics["rewards/right/mean"], metrics["rewards/polite/mean"]) == (0.75, 0.5)
    assert metrics["rewards/short/mean"] == 0.75  # 0 where its environment did not give it
    assert (metrics["rewards/polite/std"], metrics["rewards/right/std"]) == (0.0, pytest.approx(0.1875**0.5))
    one_file = [Group(id=g.id, row=replace(g.row, source=""), trajectories=g.trajectories) for g in groups]
    for group in one_file:
        for one in group.trajectories:
            one.row = group.row
    assert conversation_metrics(one_file)["rewards/right/mean"] == 0.375  # nothing says that there are two environments


def test_several_metrics_of_a_run_are_columns_of_one_table(run: Path) -> None:
    console = Console(width=160, no_color=True)
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.25, "mine": null}\n{"step": 10, "reward/mean": 0.5}\n'
    )
    with console.capture() as captured:
        show_metrics(console, run, ["reward/mean", "mine"])
    meaning, curve, *table = captured.get().splitlines()
    assert meaning.startswith("reward/mean: ")
    assert curve.endswith("0.25 → 0.50")
    assert table == ["  step  reward/mean    mine", "     1         0.25    null", "    10          0.5    null"]


def test_a_metric_has_the_name_that_it_has_in_another_library(run: Path) -> None:
    console = Console(width=160, no_color=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "groups/zero_std": 0.25, "tokens/mean": 9.0}\n')
    with console.capture() as captured:
        show_metrics(console, run, ["frac_reward_zero_std"])
    assert captured.get().startswith("groups/zero_std: ")
    assert captured.get().splitlines()[-1].split() == ["1", "0.25"]
    with pytest.raises(RunError, match=r"completions/mean_length is .*; the nearest metric here is tokens/mean"):
        show_metrics(console, run, ["completions/mean_length"])  # not quite the same


def test_metrics_that_are_not_there_are_named_after_those_that_are(run: Path) -> None:
    console = Console(width=160, no_color=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25, "rewards/long/mean": 1.0}\n')
    with console.capture() as captured, pytest.raises(RunError) as raised:
        show_metrics(console, run, ["rewards/deal/mean", "rewards/lang/mean", "reward/mean"])
    assert captured.get().splitlines()[-1].split() == ["1", "0.25"]
    assert "; no conversation had a part deal of the reward. rewards/lang/mean is not" in str(raised.value)
    assert "; did you mean rewards/long/mean. The metrics are: " in str(raised.value)


def test_of_equal_rewards_the_latest_conversation_is_shown(run: Path) -> None:
    for step in range(3, 6):
        write_trajectories(
            run / "trajectories.jsonl", [scored(hold(Says("x"), row=a_row(id=str(step))), -5.0)], step=step
        )
    assert [one.step for one in Selection(worst=2).of(run / "trajectories.jsonl", [])] == [5, 4]


# Several runs as a table, and what is said first of one run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with two runs of other learning rates and seeds, and a directory that is no run."""
    for name, lr, reward in (("slow", 1e-6, 0.3), ("fast", 1e-4, 0.9)):
        run = a_run(tmp_path / name, options={"train": {"steps": 5, "lr": lr}, "seed": int(name == "fast")})
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "reward/mean": reward}) + "\n")
    (tmp_path / "notes").mkdir()
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["show", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_runs_are_a_table_with_the_options_that_differ(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, runs / "slow", runs / "fast", runs / "notes", "--sort", "reward/mean")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["run", "state", "step", "reward/mean", "eval/reward/mean", "lr", "seed"]
    assert rows[1] == [
        str(runs / "fast"),
        "finished",
        "5",
        "0.900",
        "0.750",
        "0.0001",
        "1",
    ]  # the last value is the best
    assert rows[2] == [str(runs / "slow"), "finished", "5", "0.300", "(0.800", "@2)", "0.750", "1e-06", "0"]
    assert f"left out: {runs / 'notes'} is not a run" in out
    for heading in ("train.lr", "lr"):
        assert printed(capsys, runs, "--sort", heading).splitlines()[1].startswith(str(runs / "slow"))
    assert "loss" in printed(capsys, runs, "--metric", "loss").splitlines()[0]


def test_many_options_that_differ_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = {"sampling": {f"option_{n}": "x" * 20 for n in range(10)}, "seed": 1}
    for name, options in (("one", {"seed": 0}), ("two", others)):
        a_run(tmp_path / name, options=options)
    lines = printed(capsys, tmp_path).splitlines()
    head, _, table = (part.splitlines() for part in "\n".join(lines).partition("\noptions that differ:\n"))
    assert head[0].split() == ["run", "state", "step", "reward/mean", "eval/reward/mean"]
    assert table[0].split() == ["option", str(tmp_path / "one"), str(tmp_path / "two")]
    rows = [line.split() for line in table[1:]]
    assert ["seed", "0", "1"] in rows
    assert ["sampling.option_9", "-", "x" * 20] in rows
    longest = max(len(line) for line in lines if not line.startswith("metrics:"))
    assert longest <= 120 + len(str(tmp_path / "two")) + 2


def test_of_unlike_runs_only_what_differs_among_runs_of_a_kind_is_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(10):
        kind = f"with_a_long_name_{index % 8}"
        task = {"environment": {"use": f"games.py:game_{kind}"}, "data": {"train": f"rows_{kind}.jsonl"}}
        others = {"limits": {"turns": index % 8 + 2}, "sampling": {"temperature": 1 + index % 8 / 8}}
        a_run(tmp_path / f"run-{index}", options={**task, **others, "seed": index})
    lines = printed(capsys, tmp_path).splitlines()
    head, _, table = (part.splitlines() for part in "\n".join(lines).partition("\noptions that differ:\n"))
    assert head[0].split() == ["run", "state", "step", "reward/mean", "eval/reward/mean"]
    assert sorted(table[0].split()) == ["run", "seed", "train", "use"]  # runs 0 and 8 have one task, as have 1 and 9
    assert len([line for line in table if "run-" in line]) == 10
    assert max(map(len, lines)) <= 120 + len(str(tmp_path / "run-0")) + 2


def test_the_table_is_also_json_and_csv(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = json.loads(printed(capsys, runs, "--json", "--metric", "reward/mean"))
    assert [record["run"] for record in records] == [str(runs / "fast"), str(runs / "slow")]
    assert (records[1]["reward/mean"], records[1]["reward/mean.best"], records[1]["reward/mean.best_step"]) == (
        0.3,
        0.8,
        2,
    )
    assert records[0]["train.lr"] == 1e-4
    rows = list(csv.DictReader(io.StringIO(printed(capsys, runs, "--csv"))))
    assert [row["train.lr"] for row in rows] == ["0.0001", "1e-06"]
    assert list(rows[0])[:7] == ["run", "kind", "state", "reason", "step", "steps", "warnings"]


def test_a_run_that_failed_in_its_first_step_says_why(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "short"
    run.mkdir()
    ended = {"how": "failed", "time": 1.0, "reason": "no space left"}
    (run / "run.json").write_text(json.dumps({"kind": "train", "checkpoint": None, "ended": ended}))
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "m"}, "train": {"steps": 5, "lr": 0.5}}))
    RunDirectory(run).write_warning(step=1, name="kl", text="too far. Lower train.lr")
    one = printed(capsys, run)
    assert one.startswith(f"{run}: failed after step 0 of 5, ")
    assert "\n  no space left\n  warning in step 1: kl: too far. Lower train.lr\n" in one
    assert "  train.steps  5  (default: null)\nno conversations are recorded\n" in one
    assert f"{run}: failed: no space left\n" in printed(capsys, runs)
    assert main(["show", str(run), "--last", "1"]) == 1
    assert "has no conversations: it ended before its first step" in capsys.readouterr().err


def test_json_and_csv_name_what_is_left_out_on_stderr(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("--json", "--csv"):
        assert main(["show", str(runs / "slow"), str(runs / "notes"), form]) == 0
        out, err = capsys.readouterr()
        assert "left out" not in out
        assert f"left out: {runs / 'notes'} is not a run" in err


def test_json_and_csv_of_a_metric_of_one_run_have_a_row_for_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"step": 1, "loss": 0.5}', "{", '{"step": 2, "loss": 0.25, "reward/mean": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    words = ["show", str(tmp_path), "--metric", "loss", "--metric", "reward/mean"]
    assert main([*words, "--csv"]) == 0
    out, err = capsys.readouterr()
    assert out == "step,loss,reward/mean\n1,0.5,\n2,0.25,1.0\n"
    assert "left out" in err
    assert main([*words, "--json"]) == 0
    rows = [{"step": 1, "loss": 0.5, "reward/mean": None}, {"step": 2, "loss": 0.25, "reward/mean": 1.0}]
    assert json.loads(capsys.readouterr().out) == rows


def test_metrics_of_evaluations_of_one_run_are_named_as_in_the_table_of_runs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "slow"
    of_table = printed(capsys, run, "--metric", "eval/reward/mean")
    assert of_table == printed(capsys, run, "--eval", "--metric", "reward/mean")
    assert "0.75" in of_table
    both = printed(capsys, run, "--metric", "eval/reward/mean", "--metric", "reward/mean")
    assert both == printed(capsys, run, "--metric", "reward/mean") + of_table
    assert main(["show", str(run), "--json", "--metric", "eval/reward/mean", "--metric", "reward/mean"]) == 1
    assert "which are two tables: print one after the other" in capsys.readouterr().err


def test_the_table_is_sorted_by_any_metric_and_so_are_the_means_over_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n, (rate, errors) in enumerate([(1e-4, 3.0), (1e-4, 2.0), (1e-6, 1.0), (1e-6, 0.0)]):
        run = a_run(tmp_path / f"run-{n}", options={"train": {"steps": 5, "lr": rate}, "seed": n % 2})
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "reward/mean": 0.5, "tool_errors/mean": errors}) + "\n")
    out = printed(capsys, tmp_path, "--sort", "tool_errors/mean")
    runs, _, seeds = out.partition("over the seeds")
    assert "tool_errors/mean" in runs.splitlines()[0]
    assert [line.split("run-")[1][0] for line in runs.splitlines() if "run-" in line] == ["3", "2", "1", "0"]
    assert seeds.index("1e-06") < seeds.index("0.0001")  # the lower the better
    assert printed(capsys, tmp_path, "--sort", "run")  # what the table of the means has not


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "reward"], "reward is not a metric of these runs"),
        (
            ["--sort", "nothing"],
            "--sort=nothing is neither a metric of these runs nor a column of the table; the columns are: run, kind",
        ),
        (["--json", "--csv"], "--json and --csv are both given"),
        (["--last", "3"], "--last prints conversations of one run"),
        (["--step", "0"], "--step prints conversations of one run"),
    ],
)
def test_what_the_table_cannot_show_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["show", str(runs), *words]) == 1
    assert message in capsys.readouterr().err


def test_a_run_says_first_how_it_ended_what_it_warned_of_and_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(a_run(tmp_path / "demo"))
    run.write_warning(step=3, name="kl", text="the KL divergence of the policy is 4. Lower train.lr")
    run.note_end("failed", step=4, reason="no space left")
    for step, reward in ((0, 0.0), (4, 1.0)):
        held_out = [hold(Says("x"), SingleTurn, row=a_row(id=str(n))) for n in range(3)]
        for trajectory in held_out:
            trajectory.reward = reward
        write_trajectories(run.eval_trajectories, held_out, step=step)
    broken = hold(Says("a", RuntimeError("dead")), SingleTurn, row=a_row(id="broken"))
    broken.fail(broken.error) if broken.error else None
    write_trajectories(run.trajectories, [held_out[0], broken], step=4)
    model = tmp_path / "demo-eval" / "m"
    model.mkdir(parents=True)
    (model.parent / "run.json").write_text('{"kind": "eval", "checkpoint": null}')
    (model / "evaluation.json").write_text("{}")
    (model / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(run.path / "checkpoint")}}))
    (model / "trajectories.jsonl").write_text("")
    lines = printed(capsys, run.path).splitlines()
    assert lines[0].startswith(f"{run.path}: failed after step 4 of 5, ")
    assert lines[1:3] == [
        "  no space left",
        "  warning in step 3: kl: the KL divergence of the policy is 4. Lower train.lr",
    ]
    assert lines[3].split()[0] == "model.path"
    assert [line.split() for line in lines[5:7]] == [
        ["train.steps", "5", "(default:", "null)"],
        ["train.lr", "0.0001", "(default:", "1e-06)"],
    ]
    assert any(
        line.startswith("held-out reward 0.000 [0.000, 0.861]* → 1.000 [0.139, 1.000]* (steps 0 and 4)")
        for line in lines
    )
    assert f"evaluated by turnwise eval: turnwise show {tmp_path / 'demo-eval'}" in lines


def test_reading_runs_loads_neither_the_schema_nor_torch() -> None:
    """Fifty runs in less than a second: half of it would be these imports."""
    code = (
        "import sys, turnwise.commands.show; print({'pydantic', 'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (shown.stdout, shown.stderr) == ("set()\n", "")
