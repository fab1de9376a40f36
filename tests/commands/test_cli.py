"""The command line, from the words typed to the files written; how it starts; `turnwise init`, `turnwise demo`."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

import turnwise
from support import CHATML, byte_tokenizer, marked_tokenizer
from support.conversations import call
from support.templates import SWITCHES
from turnwise import cli
from turnwise.cli import _COMMANDS, main, make_parser
from turnwise.config.recipe import load
from turnwise.record import read as init_read
from turnwise.record.reader import read_lines
from turnwise.starter import write_project

# The command line, from the words typed to the files written; `turnwise init`, `turnwise demo` and shell completion.


# The command line, from the words typed to the files written; a scripted engine needs no weights.


CALCULATE = call("calculator", '{"expression": "6*7"}')


USER = '''
import asyncio
import signal
from turnwise.environments.environment import environment, user_message
from turnwise.types import Opening, Reply

@environment
async def slow_first(row):
    """The first rows take the longest."""
    turn = yield Opening(messages=row.messages)
    await asyncio.sleep(0.05 / int(row.id))
    yield Reply(done=True, reward=float(row.id))

@environment
async def stopped(row):
    yield Opening(messages=row.messages)
    if row.id == "2":
        signal.raise_signal(signal.SIGINT)  # Ctrl-C
        await asyncio.sleep(5)

@environment
async def broken(row):
    yield Opening(messages=row.messages)
    raise RuntimeError("no luck [today]")

def short(trajectory, per_token: float = 1.0) -> float:
    return -per_token * trajectory.sampled_tokens
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and nothing else."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Path:
    """A directory with a recipe, three rows and a script for them."""
    rows = [{"question": f"What is {n}*7?", "answer": n * 7} for n in (6, 7, 8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "user.py").write_text(USER)
    script(tmp_path, [CALCULATE, "#### 42"], ["#### 48", "It is #### 49"], ["#### 1", "#### 2"])
    recipe = {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "rows.jsonl"), "columns": {"prompt": "question"}},
        "tools": ["turnwise.environments.calculator:calculator"],
        "environment": "turnwise.environments.users:checked_answer",
        "engine": {"name": "scripted", "script": str(tmp_path / "lines.jsonl")},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def script(place: Path, *scripts: list[str]) -> None:
    (place / "lines.jsonl").write_text("\n".join(map(json.dumps, scripts)), encoding="utf-8")


def roll(place: Path, *words: str) -> int:
    return main(["rollout", str(place / "recipe.yaml"), "--out", str(place / "out"), *words])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def ids(place: Path) -> list[str]:
    return [record["id"] for record in read(place / "out" / "trajectories.jsonl")]


# rollout


def test_rollout_holds_scores_and_writes_conversations(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = f"reward.trajectory=[{{use: '{place / 'user.py'}:short', weight: 0.5, arguments: {{per_token: 0.01}}}}]"
    assert roll(place, reward, "limits.turns=5") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "3 conversations in " in out
    assert f"to read them: turnwise show {place / 'out'}\n" in out

    records = read(place / "out" / "trajectories.jsonl")
    assert [record["id"] for record in records] == ["1/0", "2/0", "3/0"]
    assert "step" not in records[0]
    assert [record["stop"] for record in records] == ["done"] * 3
    assert [record["row"] for record in records] == [{"id": str(n), "answer": (n + 5) * 7} for n in (1, 2, 3)]
    assert [record["rewards"]["turns"] for record in records] == [1.0, 0.5, 0.0]
    for record in records:
        sampled = sum(turn >= 0 for segment in record["segments"] for turn in segment["turn"])
        assert record["rewards"]["short"] == pytest.approx(-0.005 * sampled)
        assert record["reward"] == pytest.approx(sum(record["rewards"].values()))
        assert (record["template_mismatch"], record["logprob_kind"]) == (None, "none")
        assert [turn["advantage"] for turn in record["turns"]] == [None, None]
    (called,) = records[0]["turns"][0]["tool_calls"]
    assert (called["name"], called["arguments"], called["content"]) == ("calculator", {"expression": "6*7"}, "42")

    (metrics,) = read(place / "out" / "metrics.jsonl")
    assert (metrics["step"], metrics["conversations"], metrics["failed"], metrics["turns/mean"]) == (0, 3, 0.0, 2.0)
    assert metrics["reward/mean"] == pytest.approx(sum(record["reward"] for record in records) / 3)
    config, _ = load(place / "out" / "config.yaml")
    assert (config.limits.turns, config.engine.name) == (5, "scripted")
    assert config.reward.trajectory[0].arguments == {"per_token": 0.01}


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_a_function_of_the_group_sees_all_conversations_of_a_row(place: Path, deterministic: str) -> None:
    script(place, ["#### 42"], ["#### 0"] * 3, ["#### 49"], ["#### 0"] * 3, ["#### 56"])
    (place / "group.py").write_text(
        "def fewest(trajectories):\n"
        "    turns = [len(one.turns) for one in trajectories]\n"
        "    return [float(count == min(turns)) if len(turns) > 1 else None for count in turns]\n"
    )
    reward = f"reward.group=['{place / 'group.py'}:fewest']"
    options = ("rollout.samples_per_row=2", "environment.arguments.tries=3", f"deterministic={deterministic}")
    assert roll(place, reward, *options) == 0
    records = read(place / "out" / "trajectories.jsonl")
    assert [record["id"] for record in records] == ["1/0", "1/1", "2/0", "2/1", "3/0"]
    assert [record["rewards"].get("fewest") for record in records] == [1.0, 0.0, 1.0, 0.0, None]
    (metrics,) = read(place / "out" / "metrics.jsonl")
    assert metrics["rewards/fewest/mean"] == 0.5  # of the four that it applies to


def test_a_second_rollout_keeps_what_the_first_has_left(place: Path) -> None:
    assert roll(place) == 0
    first = (place / "out" / "trajectories.jsonl").read_bytes()
    script(place, ["#### 42"])
    assert roll(place) == 0
    assert roll(place) == 0
    assert ids(place) == ["1/0"]
    former = sorted((place / "out").glob("trajectories-*.jsonl"))
    assert len(former) == 2
    assert first in [path.read_bytes() for path in former]


def test_the_script_says_how_many_conversations_there_are(place: Path) -> None:
    script(place, ["#### 42"], ["#### 0", "#### 0"])
    assert roll(place) == 0
    assert ids(place) == ["1/0", "2/0"]
    script(place, *[["#### 42"]] * 5)
    assert roll(place, "rollout.samples_per_row=2", "environment.arguments.tries=1") == 0
    assert ids(place) == ["1/0", "1/1", "2/0", "2/1", "3/0"]
    assert [record["group"] for record in read(place / "out" / "trajectories.jsonl")] == ["1", "1", "2", "2", "3"]


def test_only_the_first_rows_are_used_where_the_recipe_says_so(place: Path) -> None:
    script(place, ["#### 42"])
    assert roll(place, "rollout.max_rows=1") == 0
    assert ids(place) == ["1/0"]


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_conversations_are_written_in_the_order_of_the_rows(place: Path, deterministic: str) -> None:
    script(place, ["a"], ["b"], ["c"])
    assert roll(place, f"environment={place / 'user.py'}:slow_first", f"deterministic={deterministic}", "tools=[]") == 0
    records = read(place / "out" / "trajectories.jsonl")
    assert [(record["id"], record["reward"]) for record in records] == [("1/0", 1.0), ("2/0", 2.0), ("3/0", 3.0)]


def test_broken_conversations_are_told_and_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert roll(place, f"environment={place / 'user.py'}:broken", "tools=[]") == 1
    told = capsys.readouterr()
    assert "environment (3 times): RuntimeError: no luck [today]" in told.out
    assert told.out.count(f'  File "{place / "user.py"}", line ') == 1  # once for all of a kind
    assert 'raise RuntimeError("no luck [today]")' in told.out
    assert "all 3 conversations failed; they are in" in told.err
    records = read(place / "out" / "trajectories.jsonl")
    assert [(record["stop"], record["reward"], record["error"]["kind"]) for record in records] == [
        ("error", None, "environment")
    ] * 3
    (metrics,) = read(place / "out" / "metrics.jsonl")
    assert (metrics["failed"], metrics["reward/mean"]) == (1.0, None)


def test_a_script_that_is_over_too_early_breaks_its_conversation_only(place: Path) -> None:
    script(place, ["#### 42"], ["#### 48"])
    assert roll(place) == 0
    first, second = read(place / "out" / "trajectories.jsonl")
    assert (first["stop"], second["stop"]) == ("done", "error")
    assert second["error"]["message"] == (
        "the script of '2/0' has 1 texts and the conversation asks for number 2; add a text, or lower limits.turns"
    )


def test_overrides_may_stand_before_and_after_the_options(place: Path) -> None:
    recipe, out = str(place / "recipe.yaml"), str(place / "out")
    for words in (
        ["rollout", recipe, "seed=5", "--out", out],
        ["rollout", recipe, "--out", out, "seed=5"],
        ["rollout", "--out", out, recipe, "seed=5"],
        ["rollout", recipe, "seed=3", "--out", out, "seed=5"],
    ):
        assert main(words) == 0
        assert load(Path(out) / "config.yaml")[0].seed == 5


def test_notes_of_the_recipe_are_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load((place / "recipe.yaml").read_text())
    tree["engine"] = {"slots": 4}
    (place / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert roll(place, "engine.name=scripted", f"engine.script={place / 'lines.jsonl'}") == 0
    assert "engine.name=scripted removes the recipe's engine.slots" in capsys.readouterr().out


# what a person can put right


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.lrr=1"], "there is no option train.lrr; did you mean 'lr'?"),
        (["seed"], "'seed' is not an override; write key=value"),
        (["data.train=nowhere.jsonl"], "/nowhere.jsonl; paths are relative to the directory you run from"),
        (["data.columns.prompt=questoin"], "has no column 'questoin'; did you mean 'question'?"),
        (["engine.script=nowhere.jsonl"], "engine.script: there is no file "),
        (["engine.script=/dev/null"], "engine.script: /dev/null is no regular file (it is read more than once)"),
        (["environment=nowhere:x"], "environment: nowhere could not be imported: ModuleNotFoundError"),
        (
            ["rollout.max_rows=1"],
            "has 3 scripts, and 1 rows with rollout.samples_per_row=1 make 1 conversations; the number "
            "of scripts and the number of conversations must be equal",
        ),
        (["model.path=/nowhere/at/all"], "there is no model directory /nowhere/at/all"),
    ],
)
def test_what_a_person_can_put_right_is_one_line_on_stderr_and_status_1(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert roll(place, *words) == 1
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("turnwise: ")
    assert "Traceback" not in out + err
    assert out == ""
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["a"]\n["b"', "lines.jsonl:2: this line is not JSON"),
        ('{"texts": ["a"]}', "lines.jsonl:1: a script is a list of texts"),
        ("\n", "lines.jsonl is empty; write a list of texts on each line"),
    ],
)
def test_a_malformed_script_is_told_with_its_line(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (place / "lines.jsonl").write_text(text)
    assert roll(place) == 1
    assert message in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "out").write_text("a file")
    assert roll(place) == 1
    assert f"{place / 'out'} cannot be written: File exists" in capsys.readouterr().err


def test_a_template_that_is_missing_is_told(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer(None).save_pretrained(tmp_path / "base")
    assert roll(place, f"model.path={tmp_path / 'base'}") == 1
    assert f"{tmp_path / 'base'} has no chat template" in capsys.readouterr().err


def test_interrupting_is_no_error_and_what_was_written_stays(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(place, ["a"], ["b"], ["c"])
    assert roll(place, f"environment={place / 'user.py'}:stopped", "tools=[]", "max_concurrent=1") == 130
    assert "turnwise: stopped" in capsys.readouterr().err
    assert ids(place) == ["1/0"]


def test_training_on_a_script_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(place / "recipe.yaml"), f"output={place / 'run'}"]) == 1
    assert "engine.name=scripted cannot be used in training" in capsys.readouterr().err
    assert not (place / "run").exists()


# show and help


def test_doctor_prints_the_template_profile(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(__file__).parent.parent.parent / "demo" / "model")
    assert main(["doctor", model, "--weights", "never"]) == 0
    details = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("      ")]
    lines = dict(parts for line in details if len(parts := re.split(r"  +", line, maxsplit=1)) == 2)
    assert lines["tool calls"].startswith("parsed as hermes, ")
    assert lines["turn ends with"] == r"'<|im_end|>\n', stop tokens [2]"
    assert lines["tools"] == "described in the prompt, optional"


def test_show_prints_what_was_asked_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roll(place)
    capsys.readouterr()
    out = str(place / "out")
    assert main(["show", out]) == 0
    assert "3 conversations; done 3" in capsys.readouterr().out
    assert main(["show", out, "--id", "2/0"]) == 0
    shown = capsys.readouterr().out
    assert "2/0  (reward 0.5, stop: done" in shown
    assert "It is #### 49" in shown
    assert main(["show", out, "--worst", "1", "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "3/0  (reward 0, stop: done" in shown
    assert "segment 0: " in shown
    assert main(["show", out, "--failed"]) == 0
    assert capsys.readouterr().out.startswith("no conversation failed (errors of tools are answers to the model")
    assert main(["show", str(place / "nowhere")]) == 1
    assert "is not a run: it contains no trajectories.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--help"],
            ["COMMAND", "train", "rollout", "show", "turnwise rollout recipes/calculator.yaml --out runs/look"],
        ),
        (["train", "--help"], ["recipe", "key=value", "train.lr=1e-4"]),
        (
            ["rollout", "--help"],
            ["--out DIR", "rollout.max_rows and rollout.samples_per_row set the number of conversations"],
        ),
        (["show", "--help"], ["--id ID", "--step N", "--worst N", "--failed", "--tokens"]),
    ],
)
def test_help(words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [words for words in told if words not in out] == []


def test_warnings_of_python_are_log_messages_and_those_of_a_models_expressions_are_dropped(
    place: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (place / "user.py").write_text(f'{USER}\nPATTERN = "\\d"\n')  # Python warns when the file is imported
    wrong = call("calculator", '{"expression": "2if 3 else 4"}')
    script(place, [wrong, "#### 42"], ["#### 49"], ["#### 56"])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert roll(place, f"reward.trajectory=['{place / 'user.py'}:short']") == 0
    assert capsys.readouterr().err == ""
    (message,) = [record.getMessage() for record in caplog.records if record.name == "py.warnings"]
    line = USER.count("\n") + 2
    assert message.startswith(f"{place / 'user.py'}:{line}: ")
    assert message.endswith(r"Warning: invalid escape sequence '\d'")


@pytest.mark.parametrize("command", ["", *cli._COMMANDS])
def test_help_fits_80_columns_and_ends_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"] if command else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    usage = [
        line for line in lines if "turnwise eval" not in line and "turnwise convert" not in line
    ]  # two long commands
    assert [line for line in usage if len(line) > 80] == []
    first = next(number for number, line in enumerate(lines) if line in ("example:", "examples:"))
    assert all(line.startswith("  ") for line in lines[first + 1 :][: -2 if not command else None])
    assert any(f"turnwise {command}" in line for line in lines[first + 1 :])


def test_the_commands_of_examples_can_be_parsed() -> None:
    for command, examples in cli._EXAMPLES.items():
        parser = cli.make_parser(command)
        for words in (shlex.split(example) for example, _ in examples if example.startswith("turnwise ")):
            assert words[1] == command
            parser.parse_known_args(words[1:])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["rollout", "recipe.yaml"], "required: --out"),
        (["rollout", "recipe.yaml", "--out", "x", "--fast"], "unrecognized arguments: --fast"),
        (["show", "runs/x", "--worst", "many"], "argument --worst: 'many' is not a number of at least 1"),
        (["show", "runs/x", "--worst", "0"], "argument --worst: '0' is not a number of at least 1"),
        (["show", "runs/x", "--best", "-3"], "argument --best: '-3' is not a number of at least 1"),
        (["show", "runs/x", "--last=-1"], "argument --last: '-1' is not a number of at least 1"),
        (["show", "runs/x", "--step=-1"], "argument --step: '-1' is no step: give a number of at least 0, or last"),
        (["view", "runs", "--export", "x.html", "--most", "0"], "argument --most: '0' is not a number of at least 1"),
        (["view", "runs", "--port", "70000"], "70000 is not a port: give a number from 0 to 65535"),
        (["plan", "r.yaml", "--ranks", "0"], "argument --ranks: '0' is not a number of at least 1"),
        (["doctor", "m", "--memory-gb", "nan"], "argument --memory-gb: 'nan' is not a number above 0"),
        (["serve", "r.yaml", "--queue", "-1"], "argument --queue: '-1' is not a number of at least 0"),
        (["merge", "runs/x", "--out", "y", "seed=1"], "unrecognized arguments: seed=1"),
    ],
)
def test_words_that_are_no_command_are_told_with_status_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert told in capsys.readouterr().err


def test_the_command_is_quick_to_say_what_it_can() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "turnwise.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: turnwise")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert imported.isdisjoint({"torch", "transformers", "datasets", "matplotlib"})


@pytest.mark.parametrize("command", [["turnwise"], [sys.executable, "-m", "turnwise"]])
def test_the_command_and_the_module_are_the_same_and_know_their_version(command: list[str]) -> None:
    place = Path(sys.executable).parent
    first = [str(place / "turnwise")] if command == ["turnwise"] else command
    done = subprocess.run([*first, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"turnwise {turnwise.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", turnwise.__version__)


def test_an_option_written_with_dashes_is_answered_with_how_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "recipes/calculator.yaml", "--learning-rate", "1e-5"])
    told = capsys.readouterr().err
    assert "unrecognized arguments: --learning-rate" in told
    assert "it is called train.lr here; options of a recipe are written without dashes: key=value" in told


# `turnwise init`, `turnwise demo` and shell completion.


ROOT = Path(__file__).resolve().parents[2]


def test_a_model_beside_a_new_project_is_found_from_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    assert main(["init", "quiz", "--model", "models/small"]) == 0
    place = str(tmp_path / "models" / "small")
    assert f"turnwise doctor {place} --recipe recipe.yaml " in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "quiz" / "recipe.yaml").read_text())["model"]["path"] == place
    assert main(["init", "other", "--model", "org/name"]) == 0
    assert yaml.safe_load((tmp_path / "other" / "recipe.yaml").read_text())["model"]["path"] == "org/name"
    (tmp_path / "above").mkdir()
    assert main(["init", "above", "--model", "above/../models/small"]) == 0
    assert yaml.safe_load((tmp_path / "above" / "recipe.yaml").read_text())["model"]["path"] == place
    (tmp_path / "linked").symlink_to(tmp_path / "models" / "small")
    (tmp_path / "models" / "other").mkdir()  # what is above a linked directory is above the directory that it names
    capsys.readouterr()
    assert main(["init", "above/../beside"]) == 0
    assert "\n  cd beside\n" in (printed := capsys.readouterr().out)
    assert ".." not in printed
    assert main(["init", "linking", "--model", "linked/../other"]) == 0
    other = yaml.safe_load((tmp_path / "linking" / "recipe.yaml").read_text())["model"]["path"]
    assert other == str((tmp_path / "models" / "other").resolve())
    capsys.readouterr()
    assert main(["init", "third", "--model", "./nosuch"]) == 1
    assert "--model ./nosuch: there is no model directory" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


@pytest.mark.slow
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
    conversations = list(init_read(Path("runs/first")))
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
    text = (tmp_path / "recipe.yaml").read_text()
    assert "half a minute" not in text  # true of the demo's model
    assert "tiny model" not in text
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("template", "arguments", "tokens"),
    [
        (CHATML, {}, 256),
        (SWITCHES, {"enable_thinking": False}, 256),
        (CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%"), {}, 2048),
    ],
)
def test_a_starter_project_of_a_model_that_thinks_has_room_for_it_or_turns_it_off(
    tmp_path: Path, template: str, arguments: dict[str, bool], tokens: int
) -> None:
    marked_tokenizer(template, eos="<|im_end|>").save_pretrained(tmp_path / "model")
    assert main(["init", str(tmp_path / "new"), "--model", str(tmp_path / "model")]) == 0
    config, _ = load(tmp_path / "new" / "recipe.yaml")
    assert config.model.chat_template_kwargs == arguments
    assert config.limits.tokens_per_turn == tokens
    gpu = {"  tokens_per_turn: 64": "  tokens_per_turn: 256\n  context: 2048 # the memory was computed with it"}
    write_project(tmp_path / "gpu", model="m", changes=gpu, thinking="always")
    limits = load(tmp_path / "gpu" / "recipe.yaml")[0].limits
    assert (limits.tokens_per_turn, limits.context) == (1024, 2048)


def test_a_starter_recipe_says_that_the_template_could_not_be_read(tmp_path: Path) -> None:
    gpu = {"  tokens_per_turn: 64": "  tokens_per_turn: 256\n  context: 2048 # the memory was computed with it"}
    for name, changes in (("new", {}), ("gpu", gpu)):
        write_project(tmp_path / name, model="m", changes=changes, thinking="unknown")
        recipe = tmp_path / name / "recipe.yaml"
        assert load(recipe)[0].limits.tokens_per_turn == 256
        assert "256 # 2048 if it thinks before an answer: its template could not be read\n" in recipe.read_text()


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


@pytest.mark.slow
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


@pytest.mark.slow
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


# How quickly the package and the command line start: which modules they load, and the CPU time that this takes.


SOURCE = Path(__file__).resolve().parents[2] / "src"

HEAVY = {"torch", "transformers", "numpy", "pydantic", "rich", "yaml", "matplotlib", "asyncio"}


def loaded(code: str) -> set[str]:
    """The modules that are loaded after `code`, in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}\nprint('modules', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(output.splitlines()[-1].split()[1:])


def cpu_seconds(code: str, *, runs: int = 5) -> float:
    """The smallest CPU time of a process that runs `code`: other programs on the machine change it less than the wall time."""
    times: list[float] = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


HELP = """
import turnwise.cli
try:
    turnwise.cli.main(["--help"])
except SystemExit:
    pass
"""


def test_the_package_loads_no_other_module_of_its_own() -> None:
    modules = loaded("import turnwise")
    assert {name for name in modules if name.split(".")[0] == "turnwise"} == {"turnwise"}
    assert modules & HEAVY == set()


def test_environments_need_neither_torch_nor_pydantic() -> None:
    modules = loaded("from turnwise import Opening, Reply, Row, environment, user_message, checked_answer, Trajectory")
    assert modules & (HEAVY - {"asyncio"}) == set()


def test_help_loads_no_command() -> None:
    modules = loaded(HELP)
    assert {name for name in modules if name.startswith("turnwise.commands.")} == set()
    assert modules & HEAVY == set()


def test_a_command_loads_no_other_command() -> None:
    modules = loaded("import turnwise.cli\nturnwise.cli.make_parser('train')")
    others = {f"turnwise.{module}" for module, _ in _COMMANDS.values()} - {"turnwise.commands.train", "turnwise.cli"}
    assert modules & others == set()
    assert modules & (HEAVY - {"asyncio", "rich"}) == set()


def test_import_and_help_are_quick() -> None:
    assert cpu_seconds("import turnwise") < 0.2
    assert cpu_seconds(HELP) < 0.3


MISSING = {
    "data.train=rows.jsnl.jsonl": "there is no file {here}/rows.jsnl.jsonl",
    "data.eval=./held_out": "there is no directory {here}/held_out",
    "environment=plays.py:game": "environment: there is no file {here}/plays.py",
    "reward.trajectory=[judge.py:judge]": "reward.trajectory: there is no file {here}/judge.py",
}

COMMANDS_WITH_MISSING_FILES = """
import contextlib, io, os
os.chdir({here!r})
import turnwise.cli
for words, told in {cases!r}:
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        assert turnwise.cli.main(words) == 1
    assert told in error.getvalue(), (words, error.getvalue())
"""


@pytest.mark.slow
def test_files_that_do_not_exist_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    here, recipe = str(SOURCE.parent), str(SOURCE.parent / "recipes" / "calculator.yaml")
    out = {"rollout": ["--out", str(tmp_path / "out")]}
    cases = [
        ([command, recipe, override, *out.get(command, [])], told.format(here=here))
        for command in ("train", "eval", "rollout")
        for override, told in MISSING.items()
    ]
    modules = loaded(COMMANDS_WITH_MISSING_FILES.format(here=here, cases=cases))
    assert modules & {"torch", "transformers"} == set()


def test_a_process_of_the_command_line_seldom_searches_for_unreachable_objects_and_ends_without_a_search() -> None:
    code = "import gc, sys, turnwise.cli\nsys.argv = ['turnwise', 'show', '/nowhere']\nassert turnwise.cli.program() == 1\n"
    loaded(f"{code}assert gc.get_freeze_count() > 1000\nassert gc.get_threshold()[0] == 50_000")


def test_all_commands_have_a_description_and_are_in_the_help() -> None:
    parser = make_parser()
    (commands,) = [action for action in parser._actions if isinstance(action.choices, dict)]
    assert list(commands.choices) == list(_COMMANDS)
    for name, of_command in commands.choices.items():
        assert of_command.description, name
        assert of_command.get_default("command") is not None, name
    files = [SOURCE / "turnwise" / "cli.py", *(SOURCE / "turnwise" / "commands").glob("*.py")]
    registered = [
        name
        for path in files
        for name in re.findall(r"^def register_(\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(registered) == sorted(_COMMANDS)


def test_lazy_names_are_those_for_type_checkers() -> None:
    tree = ast.parse((SOURCE / "turnwise" / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = {
        alias.name: f"{node.module}:{alias.name}"
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(names) == sorted(turnwise.__all__)
    for name, reference in names.items():
        module, _, attribute = reference.partition(":")
        value = getattr(turnwise, name)
        __import__(module)
        expected = sys.modules["turnwise.record"] if name == "record" else getattr(sys.modules[module], attribute)
        assert value is expected, name
    assert set(turnwise.__all__) <= set(dir(turnwise))


def test_functions_are_not_hidden_by_submodules_of_the_same_name() -> None:
    import turnwise.rollout.session
    import turnwise.sft.fine_tune
    import turnwise.train
    from turnwise import api
    from turnwise import rollout as by_from

    assert turnwise.train is api.train
    assert turnwise.sft is api.sft
    assert turnwise.rollout is by_from is api.rollout
    assert sys.modules["turnwise.train"].assemble
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        turnwise.nothing  # noqa: B018
