"""`turnwise replay`: what is the same, and each kind of difference."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.recipes import save_recipe
from support.servers import Answer, serving
from support.tiny import save_rows
from turnwise.cli import main

PLACE = """
from turnwise.environments.environment import environment, user_message
from turnwise.types import Opening, Reply, Resume

ANSWER, REWARD, TURNS = "No. Again?", 0.5, 2


@environment
async def told(row):
    turn = yield Opening(messages=row.messages)
    for number in range(TURNS - 1):
        turn = yield user_message(ANSWER, reward=0.25)
    yield Reply(reward=REWARD, done=True)


@environment
async def cutting(row):
    yield Opening(messages=row.messages)
    yield Reply(resume=Resume(keep=1, add="!"))
    yield Reply(done=True)


def share(group):
    return [len(t.answer) / sum(len(other.answer) for other in group.trajectories) for t in group.trajectories]


def length(completion):
    return len(completion) * REWARD
"""


def collected(folder: Path, model: Path, *overrides: str, environment: str = "told", **options: Any) -> Path:
    """The directory of a rollout with scripted turns."""
    (folder / "place.py").write_text(PLACE, encoding="utf-8")
    (folder / "lines.jsonl").write_text('["a", "bc"]\n["def", "g"]\n["h", "ij"]\n["k", "l"]\n', encoding="utf-8")
    path = save_recipe(
        folder,
        model,
        environment=f"{folder}/place.py:{environment}",
        data={"train": str(save_rows(folder / "rows.jsonl", 2))},
        engine={"name": "scripted", "script": str(folder / "lines.jsonl")},
        rollout={"samples_per_row": 2},
        reward={"trajectory": [f"{folder}/place.py:length"]},
        **options,
    )
    assert main(["rollout", str(path), "--out", str(folder / "out"), *overrides]) == 0
    return folder / "out"


def replayed(out: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["replay", str(out), *(words or ("--all",))])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def changed(folder: Path, old: str, new: str, *, environment: str = "told") -> list[str]:
    """Overrides that use a changed copy of the environment and of the reward function."""
    text = (folder / "place.py").read_text(encoding="utf-8")
    assert old in text
    (folder / "changed.py").write_text(text.replace(old, new), encoding="utf-8")
    place = f"{folder}/changed.py"
    return [f"environment.use={place}:{environment}", f"reward.trajectory=[{place}:length]"]


def test_an_unchanged_environment_gives_the_same(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    assert replayed(out, capsys) == (0, "4 of 4 conversations are the same, 0 differ\n")
    assert replayed(out, capsys, "--id", "2/1") == (0, "1 of 1 conversations are the same, 0 differ\n")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            '"No. Again?"',
            '"No. Once more?"',
            [
                "messages[2].content: 'No. Again?' recorded, 'No. Once more?' now",
                "segments[0].token_ids[",
            ],
        ),
        (
            "reward=0.25",
            "reward=0.75",
            ["turns[0].reward: 0.25 recorded, 0.75 now", "rewards.turns: 0.75 recorded, 1.25 now"],
        ),
        ("* REWARD", "* 2", ["rewards.length: ", "reward: "]),
        ("0.5, 2", "0.5, 1", ["turns: 2 recorded, 1 now", "messages: 4 recorded, 2 now"]),
        ("0.5, 2", "0.5, 3", ["stop: 'done' recorded, 'error' now", "asks for turn 2, and the record has 2 turns"]),
        (
            "REWARD, done=True",
            "1 / 0, done=True",
            ["error: null recorded", "ZeroDivisionError"],
        ),
    ],
)
def test_what_differs_is_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, expected: list[str]
) -> None:
    out = collected(tmp_path, model)
    status, printed = replayed(out, capsys, "--id", "1/0", *changed(tmp_path, old, new))
    assert status == 1
    assert "1/0 differs:" in printed
    assert [text for text in expected if text not in printed] == []
    assert "0 of 1 conversations are the same, 1 differ" in printed


def test_a_changed_limit_changes_the_stop_reason(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = replayed(collected(tmp_path, model), capsys, "--id", "1/0", "limits.turns=1")
    assert status == 1
    assert "stop: 'done' recorded, 'max_turns' now" in printed


def test_a_changed_tokenizer_changes_the_tokens(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "model"
    own.mkdir()
    for file in model.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    out = collected(tmp_path, own)
    template = own / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    assert "<|im_start|>" in text
    template.write_text(text.replace("<|im_end|>\n", "<|im_end|>\n\n"), encoding="utf-8")
    assert template.read_text(encoding="utf-8") != text
    status, printed = replayed(out, capsys, "--id", "1/0")
    assert status == 1
    assert "segments[0].token_ids" in printed
    assert "messages" not in printed


def test_a_cut_turn_is_encoded_from_its_text(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = collected(tmp_path, model, environment="cutting")
    status, printed = replayed(out, capsys, "--id", "1/1")
    assert (status, "1/1: turn 0: not all of its tokens are in the record" in printed) == (0, True)


def test_functions_of_a_group_get_the_group(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "place.py").write_text(PLACE, encoding="utf-8")
    out = collected(tmp_path, model, f"reward.group=[{tmp_path}/place.py:share]")
    assert replayed(out, capsys, "--id", "1/0")[0] == 0
    words = changed(tmp_path, "len(t.answer) /", "2 * len(t.answer) /")
    status, printed = replayed(out, capsys, "--id", "1/0", *words, f"reward.group=[{tmp_path}/changed.py:share]")
    assert status == 1
    assert "rewards.share: 0.6666666666666666 recorded, 1.3333333333333333 now" in printed


def test_conversations_with_an_endpoint_are_replayed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place.py").write_text(PLACE, encoding="utf-8")
    rows = save_rows(tmp_path / "rows.jsonl", 2)
    call = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}

    def answer(question: dict[str, Any], number: int) -> Answer:
        message = {"content": None, "tool_calls": [call]} if len(question["messages"]) == 1 else {"content": "2"}
        return Answer({"choices": [{"message": message, "finish_reason": "stop"}]})

    with serving(answer) as server:
        path = save_recipe(
            tmp_path,
            Path("some/model"),
            engine={"name": "openai", "url": server.url},
            tools=["turnwise.environments.calculator:calculator"],
            environment=f"{tmp_path}/place.py:told",
            data={"train": str(rows), "eval": str(rows)},
        )
        assert main(["eval", str(path), "--out", str(tmp_path / "eval")]) == 0
    assert replayed(tmp_path / "eval", capsys)[0] == 0
    words = changed(tmp_path, '"No. Again?"', '"Sure?"')[:1]
    status, printed = replayed(tmp_path / "eval" / "model", capsys, "--all", *words)
    assert status == 1
    assert "messages[4].content: 'No. Again?' recorded, 'Sure?' now" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either --id ID or --all"),
        (("--id", "x", "--all"), "give either --id ID or --all"),
        (("--id", "x"), "has the id 'x'"),
        (("--all", "data.train=other.jsonl"), "there is no file"),
        (("--all", "--eval"), "there is no file"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    out = collected(tmp_path, model)
    capsys.readouterr()
    assert main(["replay", str(out), *words]) == 1
    assert message in capsys.readouterr().err


def test_rows_that_are_gone_are_named(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = collected(tmp_path, model)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x", "answer": "y", "id": "z"}) + "\n", encoding="utf-8")
    status, printed = replayed(out, capsys)
    assert status == 1
    assert "row '2' of the record is not among the 1 rows of the data" in printed


@pytest.mark.parametrize("number", [1, 3], ids=["in the middle", "at the end"])
def test_a_damaged_line_is_left_out_and_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    out = collected(tmp_path, model)
    path = out / "trajectories.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number][:100] + b"\n"
    path.write_bytes(b"".join(lines))
    status, text = replayed(out, capsys)
    assert status == 1
    assert f"{path}:{number + 1}" in "".join(text.split("\n"))
    assert "3 of 3 conversations are the same, 0 differ" in text


def test_a_last_line_that_a_killed_run_has_not_finished_is_no_damage(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    path = out / "trajectories.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    assert replayed(out, capsys) == (0, "3 of 3 conversations are the same, 0 differ\n")


def test_a_damaged_part_of_a_compressed_record_is_left_out_and_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    path = out / "trajectories.jsonl"
    first, second, third, last = [gzip.compress(line, 3, mtime=0) for line in path.read_bytes().splitlines(True)]
    path.unlink()
    (out / "trajectories.jsonl.gz").write_bytes(first + second[:30] + b"??" + second[32:] + third + last)
    status, text = replayed(out, capsys)
    assert status == 1
    assert f"the part at byte {len(first)} is not gzip data" in " ".join(text.split())
    assert "3 of 3 conversations are the same, 0 differ" in text
