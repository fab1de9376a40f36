"""`turnwise show RUN --check` names each step, group or conversation that a record lacks or has twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.runs import a_run
from turnwise.cli import main
from turnwise.record.completeness import check_record
from turnwise.record.writer import write_trajectories
from turnwise.types import Row, Trajectory

FINISHED = {"how": "finished", "step": 4, "time": 1.0}


def conversation(step: int, group: str, number: int | str, **more: Any) -> Trajectory:
    return Trajectory(
        id=f"{group}/{number}", group=group, row=Row(id=group, messages=[]), step=step, reward=0.0, **more
    )


def recorded(path: Path, *, ended: dict[str, Any] | None = FINISHED, **options: Any) -> Path:
    """A run of four steps, each with two groups of two, and with two evaluations of three conversations."""
    train = {"steps": 4, "lr": 1e-4, "group_size": 2}
    run = a_run(path, options={"train": train, "eval": {"samples_per_row": 1}, **options}, ended=ended)
    timeline = []
    for step in (1, 2, 3, 4):
        groups = [f"{step}.{place}:{place}" for place in (0, 1)]
        write_trajectories(
            run / "trajectories.jsonl", [conversation(step, group, n) for group in groups for n in (0, 1)], step=step
        )
        timeline.append({"step": step, "groups": [{"id": group} for group in groups]})
    save(run / "timeline.jsonl", timeline)
    save(run / "evaluations.jsonl", [{"step": step, "conversations": 3} for step in (0, 4)])
    for step in (0, 4):
        write_trajectories(
            run / "eval_trajectories.jsonl", [conversation(step, str(row), 0) for row in (1, 2, 3)], step=step
        )
    return run


def save(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edited(file: Path, change: Callable[[list[str]], list[str]]) -> None:
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def found(run: Path) -> list[str]:
    """The findings, without the directory."""
    return [finding.replace(f"{run}/", "") for finding in check_record(run).findings]


def test_a_complete_record_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run")
    checked = check_record(run)
    assert (checked.run.step, checked.conversations, checked.findings) == (4, 16, [])
    assert main(["show", str(run), "--check"]) == 0
    assert capsys.readouterr().out == f"{run}: 4 steps, 16 conversations; complete\n"


@pytest.mark.parametrize(
    ("name", "change", "findings"),
    [
        ("trajectories", lambda lines: [*lines, lines[0]], ["trajectories.jsonl: the id 1.0:0/0 of step 1 stands 2 times"]),
        ("trajectories", lambda lines: lines[1:], ["trajectories.jsonl: 1.0:0/0 of step 1 is missing"]),
        ("trajectories", lambda lines: lines[:-1], ["trajectories.jsonl: 4.1:1/1 of step 4 is missing"]),
        ("trajectories", lambda lines: lines[2:], ["trajectories.jsonl: the group 1.0:0 of step 1 is missing"]),
        ("trajectories", lambda lines: lines[:4] + lines[12:], ["trajectories.jsonl: steps 2 to 3 have no conversations"]),
        ("trajectories", lambda lines: lines[:8] + lines[12:], ["trajectories.jsonl: step 3 has no conversations"]),
        (
            "metrics",
            lambda lines: [lines[0], lines[2], lines[2]],
            [
                "metrics.jsonl: step 2 is missing",
                "metrics.jsonl: step 4 is missing",
                "metrics.jsonl: step 3 stands 2 times",
                "trajectories.jsonl: step 2 has conversations, and no line in metrics.jsonl",
                "trajectories.jsonl: step 4 has conversations, and no line in metrics.jsonl",
            ],
        ),
        ("evaluations", lambda lines: [*lines, lines[1]], ["evaluations.jsonl: the evaluation of step 4 stands 2 times"]),
        (
            "eval_trajectories",
            lambda lines: [lines[1], *lines[1:]],
            ["eval_trajectories.jsonl: the id 2/0 of step 0 stands 2 times"],
        ),
        (
            "eval_trajectories",
            lambda lines: lines[1:],
            ["eval_trajectories.jsonl: 2 conversations of the evaluation of step 0; evaluations.jsonl says 3"],
        ),
    ],
)  # fmt: skip
def test_each_gap_and_each_double_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[list[str]], list[str]],
    findings: list[str],
) -> None:
    run = recorded(tmp_path / "run")
    edited(run / f"{name}.jsonl", change)
    assert found(run) == findings
    assert main(["show", str(run), "--check"]) == 1
    out = capsys.readouterr().out
    assert f"; {len(findings)} finding" in out
    assert all(finding in out for finding in findings)


def test_a_damaged_line_is_a_finding_and_what_it_held_is_missing(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    edited(run / "trajectories.jsonl", lambda lines: [lines[0][:30] + "\n", *lines[1:]])
    damaged, missing = found(run)
    assert damaged.startswith("trajectories.jsonl:1 ")
    assert missing == "trajectories.jsonl: 1.0:0/0 of step 1 is missing"


def test_many_findings_of_a_kind_are_counted(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    edited(run / "trajectories.jsonl", lambda lines: [*lines, *lines])
    findings = found(run)
    assert len(findings) == 11
    assert findings[-1] == "trajectories.jsonl: 6 more of this kind"


def test_what_the_recipe_leaves_out_is_not_missing(tmp_path: Path) -> None:
    thinned = recorded(tmp_path / "a", record={"every": 3})
    edited(thinned / "trajectories.jsonl", lambda lines: lines[:4] + lines[8:])  # the steps 1, 3 and 4
    assert found(thinned) == []
    best = recorded(tmp_path / "b", record={"best_and_worst": 1})
    edited(best / "trajectories.jsonl", lambda lines: lines[1:])
    assert found(best) == []


def test_a_killed_run_may_have_the_conversations_of_a_step_that_is_repeated(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", ended=None)
    edited(run / "metrics.jsonl", lambda lines: lines[:3])
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "checkpoint": 3}))
    assert found(run) == []
    (run / "run.json").write_text(json.dumps({**about, "checkpoint": 4}))  # the step was finished
    assert found(run) == ["metrics.jsonl: step 4 is missing"]


def test_agents_have_the_conversation_that_opened_them(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    agent = conversation(1, "helper", 0, episode="1.0:0/7", agent="helper")
    write_trajectories(run / "trajectories.jsonl", [agent, conversation(1, "1.0:0", "greedy")], step=1)
    assert found(run) == [
        "trajectories.jsonl: 1.0:0/7 of step 1 is missing, whose environment opened the agent helper/0"
    ]


def test_a_check_reads_complete_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        recorded(tmp_path / name)
    assert main(["show", str(tmp_path), "--check"]) == 0
    assert capsys.readouterr().out.count("16 conversations; complete\n") == 2
    assert main(["show", str(tmp_path / "a"), "--check", "--worst", "2"]) == 1
    assert "--check reads whole runs, and --worst chooses of them" in capsys.readouterr().err
