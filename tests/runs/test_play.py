"""A person takes the turns of the model: what is seen, what is typed, what is taken back, what is saved."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from support import byte_tokenizer
from support.tiny import save_model
from turnwise import Row
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.data.conversations import read_conversations
from turnwise.errors import ConfigError
from turnwise.record.reader import RecordedTrajectories
from turnwise.runs.play import completions, typed_arguments
from turnwise.sft.replay import replay
from turnwise.terminal.typed_lines import TypedLines

ENVIRONMENT = """
from turnwise import Opening, Reply, environment, user_message

visits = []

@environment
async def guessing(row, forgetful=False):
    visits.append(row.id)
    try:
        turn = yield Opening(messages=row.messages)
        for number in range(3):
            if str(row["answer"]) in turn.text:
                yield Reply(reward=1.0, done=True, info={"tries": number + 1})
            place = f" (visit {len(visits)})" if forgetful else ""
            turn = yield user_message(f"no\\x1b]0;owned\\x07{place}", reward=-0.25)
    finally:
        visits.append("closed")
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def place(tmp_path: Path, tokenizer: Path) -> Path:
    rows = [{"prompt": f"What is {n}*7?", "answer": n * 7} for n in (6, 7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "user.py").write_text(ENVIRONMENT)
    recipe = {
        "model": {"path": str(tokenizer)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "environment": f"{tmp_path / 'user.py'}:guessing",
        "tools": ["turnwise.environments.calculator:calculator"],
        "limits": {"tokens_per_turn": 400, "context": 4096},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def play(place: Path, monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> int:
    """Play with these lines as standard input."""
    (place / "typed.txt").write_text(typed)
    with (place / "typed.txt").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        return main(["play", str(place / "recipe.yaml"), *words])


def test_a_person_sees_what_the_model_would_see_and_rewards_with_their_parts(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = '/call calculator expression="7*7"\nlet me guess 5\n"""\nIt is\n49\n"""\n'
    assert play(place, monkeypatch, typed, "--row", "1") == 0
    shown = capsys.readouterr().out
    assert "row 1 of data.train (counted from 0; its id is 2); /help lists the commands" in shown
    assert "  | What is 7*7?<|im_end|>" in shown
    assert 'parsed call call_0: calculator({"expression": "7*7"})' in shown
    assert "<tool_response>\n  | 49\n  | </tool_response><|im_end|>" in shown
    assert "reward -0.25" in shown
    assert "  | no\\x1b]0;owned\\x07<|im_end|>" in shown
    assert "\x1b" not in shown  # what an environment says does not reach the terminal
    assert "  | It is\n  | 49\n" in shown
    assert "reward: 0.75" in shown
    assert "end: stop reason done, 3 turns" in shown


def test_undo_gives_the_turns_before_it_again_and_says_if_the_environment_differs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(place, monkeypatch, "1\n2\n/undo\n42\n/undo\n/undo\n42\n/quit\n") == 0
    shown = capsys.readouterr().out
    assert shown.count("end: stop reason done, 2 turns") == 1
    assert "reward: 0.75" in shown  # the turn that was taken back has no reward
    assert shown.count("end: stop reason done, 1 turn") == 1
    assert "differently" not in shown
    changed = ["environment={use: " + str(place / "user.py") + ":guessing, arguments: {forgetful: true}}"]
    assert play(place, monkeypatch, "1\n2\n/undo\n", *changed) == 0
    assert "this time, the environment has answered differently before turn 1" not in capsys.readouterr().out
    assert play(place, monkeypatch, "1\n2\n3\n/undo\n", *changed) == 0
    assert "this time, the environment has answered differently before turn 1" in capsys.readouterr().out


def test_a_saved_conversation_is_fine_tuned_on_and_a_saved_script_is_played_again(
    place: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row, script, out = place / "row.jsonl", place / "script.jsonl", place / "out"
    typed = f"/call calculator expression=6*7\nIt is 42\n/save {row}\n/script {script}\n"
    assert play(place, monkeypatch, typed) == 0
    words = [f"engine={{name: scripted, script: {script}}}", "--out", str(out)]
    assert main(["rollout", str(place / "recipe.yaml"), *words]) == 0
    (played,) = RecordedTrajectories(out / "trajectories.jsonl")[:]
    assert [turn.text for turn in played.turns] == json.loads(script.read_text())
    assert played.reward == 1.0
    rows: list[Row] = read_conversations(str(row))
    (tuned,) = asyncio.run(replay(rows, Renderer.from_pretrained(tokenizer)))
    assert tuned.segments[0].token_ids == played.segments[0].token_ids
    assert tuned.segments[0].turn == played.segments[0].turn


def test_the_model_takes_a_turn_when_it_is_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(place / "model")
    words = [f"model.path={place / 'model'}", "limits={tokens_per_turn: 8, context: 1000}", "--tokens"]
    assert play(place, monkeypatch, "/model\n/undo\n/model\n/quit\n", *words) == 0
    shown = capsys.readouterr().out
    assert shown.count("starting the engine local") == 1
    assert '"<|im_start|>"  (control token)' in shown
    sampled = [part.split("ended with")[0] for part in shown.split("turn 0:")[1:]]
    assert len(set(sampled)) == len(sampled)  # after /undo, another turn


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("/cal\n", "/cal is no command"),
        ("/call adder a=1\n", "there is no tool 'adder'"),
        ("/call calculator 6*7\n", "'6*7' is no argument: write name=value for each"),
        ("/call calculator {a}\n", "the arguments of the call"),
        ("/undo\n", "there is no turn to take back"),
        ("42\n/model\n", "end> /model the conversation has ended: /undo, /again"),
        ("/save\n", "name the file: /save FILE"),
        ("/save x.jsonl\n", "there is no turn yet"),
        ("7\n", "the input is over, and the conversation is in turn 1"),
        ("42\n/call calculator 1\n", "the conversation has ended: /undo, /again, /save, /script or /quit"),
    ],
)
def test_what_cannot_be_done_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, told: str
) -> None:
    assert play(place, monkeypatch, typed) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown
    assert "/call is no command" not in shown


def test_a_broken_environment_is_shown_with_its_line_and_status_1(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "user.py").write_text(ENVIRONMENT.replace('str(row["answer"])', 'str(row["anser"])'))
    assert play(place, monkeypatch, "42\n") == 1
    shown = capsys.readouterr().out
    assert "error (environment): " in shown
    assert "anser" in shown
    assert 'if str(row["anser"]) in turn.text' in shown


def test_rows_and_engines_that_cannot_be_played_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(place, monkeypatch, "", "--row", "2") == 1
    assert "--row 2: the data has 2 rows, with the numbers 0 to 1" in capsys.readouterr().err
    assert play(place, monkeypatch, "", "engine={name: openai, url: 'http://localhost:1/v1'}") == 1
    assert "an endpoint renders the prompt itself" in capsys.readouterr().err


def test_words_are_completed() -> None:
    parameters = {"type": "object", "properties": {"city": {}, "country": {}, "days": {}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    assert completions("/ca", tools) == ["/call "]
    assert completions("/call we", tools) == ["weather "]
    assert completions("/call weather c", tools) == ["city=", "country="]
    assert completions("/call weather city=Rome ", tools) == ["country=", "days="]
    assert completions("hello c", tools) == []


def test_typed_arguments() -> None:
    assert typed_arguments("") == {}
    assert typed_arguments('a=2 b="two words" c=[1, 2] d=x=y') == {"a": 2, "b": "two words", "c": [1, 2], "d": "x=y"}
    assert typed_arguments('{"a": {"b": "1 2"}}') == {"a": {"b": "1 2"}}
    with pytest.raises(ConfigError, match="'two' is no argument"):
        typed_arguments("a=1 two")


def test_without_a_standard_input_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    with pytest.raises(ConfigError, match=r"no standard input to read from.*in a terminal"):
        TypedLines()
