"""`model.chat_template_kwargs` and the column of the same name: in rollouts, training, fine-tuning, evaluations, at endpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.recipes import save_recipe
from support.servers import Answer, serving
from support.templates import SWITCHES
from support.tiny import save_model
from turnwise import assembly
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.doctor.examine import examine
from turnwise.errors import DataError, RunError, TemplateError
from turnwise.record.reader import read
from turnwise.runs.run_state import read_inputs
from turnwise.sft.fine_tune import conversation_tokens

EMPTY = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"
OFF = {"enable_thinking": False}
ON = {"enable_thinking": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template has the switch."""
    path = save_model(tmp_path_factory.mktemp("model"))
    (path / "chat_template.jinja").write_text(SWITCHES, encoding="utf-8")
    return path


def rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def asked(number: int, **columns: Any) -> dict[str, Any]:
    return {"prompt": f"{number}+1?", "answer": str(number + 1), **columns}


def recipe(folder: Path, model: Path, *given: dict[str, Any], **options: Any) -> Path:
    train = rows(folder / "train.jsonl", *(given or (asked(1), asked(2, chat_template_kwargs=ON))))
    small = {
        "limits": {"turns": 2, "tokens_per_turn": 6},
        "train": {"steps": 1, "batch_size": 2, "group_size": 2},
        "deterministic": True,
    }
    options = {**small, "data": {"train": train, "eval": train}, **options}
    return save_recipe(folder, model, **options)


def prompts(run: Path) -> dict[str, bool]:
    """Of each row: whether the first prompt of its conversations ends with the empty block."""
    tokenizer = byte_tokenizer()
    found: dict[str, bool] = {}
    for trajectory in read(run):
        (segment, *_) = trajectory.segments
        text = str(tokenizer.decode(list(segment.token_ids[: segment.turn.index(0)])))
        assert text.endswith((EMPTY, PLAIN))
        found[trajectory.row.id] = text.endswith(EMPTY)
    return found


def test_rollouts_and_evaluations_use_the_arguments(tmp_path: Path, model: Path) -> None:
    path = str(recipe(tmp_path, model))
    switch = "model.chat_template_kwargs.enable_thinking=false"
    assert main(["rollout", path, switch, "--out", str(tmp_path / "off")]) == 0
    assert prompts(tmp_path / "off") == {"1": True, "2": False}
    assert main(["rollout", path, "--out", str(tmp_path / "on")]) == 0
    assert prompts(tmp_path / "on") == {"1": False, "2": False}
    assert main(["eval", path, switch, "--out", str(tmp_path / "eval")]) == 0
    assert prompts(tmp_path / "eval") == {"1": True, "2": False}


def test_training_uses_them_and_a_resumed_run_must_keep_them(tmp_path: Path, model: Path) -> None:
    path = str(recipe(tmp_path, model, checkpoint={"every": 1}))
    switch = "model.chat_template_kwargs={enable_thinking: false}"
    assert main(["train", path, switch]) == 0
    run = tmp_path / "run"
    assert prompts(run) == {"1": True, "2": False}
    assert [t.template_mismatch for t in read(run)] == [None] * 4
    assert main(["train", path, switch, "resume=auto", "train.steps=2"]) == 0
    config, _ = load(path, ["resume=auto", "train.steps=3"])
    with pytest.raises(RunError, match=r"model\.chat_template_kwargs=\{\}.*the run used \{'enable_thinking': False\}"):
        read_inputs(config, "train", lambda config, held_out: assembly.rows(config, held_out=held_out))


def test_fine_tuning_trains_the_answer_behind_the_prompt_of_the_row(tmp_path: Path, model: Path) -> None:
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    train = rows(
        tmp_path / "talks.jsonl",
        {"messages": talk},
        {"messages": talk, "chat_template_kwargs": ON},
        {"messages": talk, "chat_template_kwargs": json.dumps(OFF)},
    )
    path = save_recipe(
        tmp_path, model, data={"train": train}, sft={"steps": 1, "batch_size": 3},
        environment="turnwise.environments.environment:SingleTurn",
    )  # fmt: skip
    assert main(["sft", str(path)]) == 0
    assert prompts(tmp_path / "run") == {"1": False, "2": False, "3": True}
    config, _ = load(path)
    plain, _, off = (one.tokens for one in conversation_tokens(config, assembly.conversations(config)))
    assert off - plain == len(byte_tokenizer().encode("<think>\n\n</think>\n\n"))


def test_an_endpoint_gets_them_with_each_request(tmp_path: Path) -> None:
    asked_with: list[Any] = []

    def answer(question: dict[str, Any], number: int) -> Answer:
        asked_with.append(question.get("chat_template_kwargs"))
        return Answer({"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}]})

    with serving(answer) as server:
        path = recipe(
            tmp_path, Path("some/model"), asked(1), asked(2, chat_template_kwargs=ON),
            engine={"name": "openai", "url": f"{server.url}/v1"}, deterministic=False, max_concurrent=1, limits={},
            environment="turnwise.environments.environment:SingleTurn",
        )  # fmt: skip
        assert main(["rollout", str(path), "--out", str(tmp_path / "plain")]) == 0
        assert asked_with == [None, ON]
        both = "model.chat_template_kwargs={enable_thinking: false, level: 2}"
        assert main(["rollout", str(path), both, "--out", str(tmp_path / "both")]) == 0
    assert asked_with[2:] == [{**OFF, "level": 2}, {**ON, "level": 2}]


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_an_argument_that_the_template_never_reads_ends_the_run_at_its_start(
    tmp_path: Path, model: Path, kind: Any
) -> None:
    wrong = {"enable_thinkng": False}
    path = recipe(tmp_path, model, asked(1), asked(2, chat_template_kwargs=wrong))
    with pytest.raises(DataError, match=r"row '2': .*'enable_thinkng', which the chat template of .* never reads"):
        read_inputs(load(path)[0], kind, lambda config, held_out: assembly.rows(config, held_out=held_out))
    with pytest.raises(TemplateError, match=r"never reads \(it reads: enable_thinking\)"):
        assembly.renderer(load(path, ["model.chat_template_kwargs.enable_thinkng=false"])[0])
    with pytest.raises(TemplateError, match="write false without quotes"):
        assembly.renderer(load(path, ['model.chat_template_kwargs.enable_thinking="false"'])[0])


def test_a_rollout_with_an_argument_that_is_never_read_does_not_start(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, model, asked(1, chat_template_kwargs={"thinking": False}))
    assert main(["rollout", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "row '1': chat_template_kwargs has 'thinking'" in " ".join(capsys.readouterr().err.split())


def test_the_doctor_examines_the_template_under_each_set_of_arguments(tmp_path: Path, model: Path) -> None:
    grows = SWITCHES.replace(
        "message.role + '\\n'", "message.role + ('!' if messages | length > 4 and not enable_thinking else '') + '\\n'"
    )
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    path = recipe(tmp_path, model, asked(1), asked(2, chat_template_kwargs=ON), asked(3, chat_template_kwargs=ON))
    (check,) = [one for one in examine(str(model), load(path)[0], weights="never") if one.name == "arguments"]
    assert (check.status, check.text) == (
        "ok", 'the template reads the arguments of the rows: {"enable_thinking": true} (4 rows)',
    )  # fmt: skip
    (other / "chat_template.jinja").write_text(grows, encoding="utf-8")
    path = recipe(tmp_path, other, asked(1), asked(2, chat_template_kwargs=OFF))
    config, _ = load(path, ["model.chat_template_kwargs.enable_thinking=true"])
    checks = {one.name: one for one in examine(str(other), config, weights="never")}
    assert checks["user turns"].status == "ok"
    assert checks["arguments"].status == "note"
    assert checks["arguments"].text.startswith(
        '2 rows with chat_template_kwargs={"enable_thinking": false}: user turns'
    )


def test_the_doctor_takes_arguments_of_the_template_without_a_recipe(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked_doctor(*overrides: str) -> str:
        main(["doctor", str(model), "--weights", "never", *overrides])
        return "".join(capsys.readouterr())

    off = asked_doctor("model.chat_template_kwargs.enable_thinking=false")
    assert asked_doctor() == asked_doctor("model.chat_template_kwargs.enable_thinking=true") != off  # on by default
    assert "'thinking', which the chat template of" in asked_doctor("model.chat_template_kwargs={thinking: false}")
    assert "train.lr=1 is an option of a recipe" in asked_doctor("train.lr=1")


def test_the_record_of_a_turn_has_the_arguments_of_its_prompt(tmp_path: Path, model: Path) -> None:
    def arguments(name: str) -> dict[str, list[Any]]:
        return {one.row.id: [turn.chat_template_kwargs for turn in one.turns] for one in read(tmp_path / name)}

    path = str(recipe(tmp_path, model))
    assert main(["rollout", path, "--out", str(tmp_path / "run")]) == 0
    assert arguments("run") == {"1": [{}, {}], "2": [ON, ON]}
    switch = "model.chat_template_kwargs.enable_thinking=false"
    assert main(["rollout", path, switch, "--out", str(tmp_path / "off")]) == 0
    assert arguments("off") == {"1": [OFF, OFF], "2": [ON, ON]}


def test_a_server_with_other_arguments_is_another_recipe(tmp_path: Path, model: Path) -> None:
    from turnwise.rollout_server.wire import differences, served_options

    path = recipe(tmp_path, model)
    here = served_options(load(path, ["model.chat_template_kwargs.enable_thinking=false"])[0])
    (line,) = differences(here, served_options(load(path)[0]))
    assert line == "model.chat_template_kwargs={'enable_thinking': False} here, {} at the server"
