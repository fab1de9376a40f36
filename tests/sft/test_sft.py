"""Supervised fine-tuning: what is learnt, its targets, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import byte_tokenizer
from support.conversations import RENDERER, a_row, hold, scripted, spoken
from support.families import family_renderer, template_files
from support.recipes import save_recipe
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.data.conversations import read_conversations
from turnwise.doctor.template import SCENARIOS, Scenario, check_scenario
from turnwise.environments.environment import EnvironmentFactory, environment
from turnwise.errors import ConfigError, DataError, RolloutError, RunError, TemplateError
from turnwise.record.run_directory import RunDirectory
from turnwise.sft.fine_tune import SftRun, assemble, fine_tune
from turnwise.sft.replay import lines as targets_lines
from turnwise.sft.replay import replay, rounds
from turnwise.terminal.train_report import SftReport
from turnwise.types import Message, Opening, Reply, Row, ToolSchema, Trajectory, Turn

# Fine-tuning as a whole: the loss is the cross-entropy of the model's part, every option takes effect, and nothing is
# lost.


ROOT = Path(__file__).parents[2]

SYSTEM = {"role": "system", "content": "Add."}


def talk(n: int, **second: Any) -> list[dict[str, Any]]:
    """A conversation of two turns; `second` is said about the second answer."""
    return [
        {"role": "user", "content": f"{n}+1?"},
        {"role": "assistant", "content": f"It is {'so ' * n}{n + 1}."},
        {"role": "user", "content": "And more?" * (n + 1)},
        {"role": "assistant", "content": f"{n + 2}", **second},
    ]


def write(path: Path, conversations: Sequence[Any]) -> str:
    """A data file; a list is the messages of a row."""
    rows = [{"messages": one} if isinstance(one, list) else one for one in conversations]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        environment="turnwise.environments.environment:SingleTurn",
        data={"train": write(tmp_path / "train.jsonl", [talk(n) for n in range(6)])},
        sft={"steps": 3, "batch_size": 4, "lr": 0.01},
        checkpoint={"every": 100},
    )


class NoCurve(SftReport):
    """Draws nothing at the end: pictures take longer than tiny models, and are looked at in a test of their own."""

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        self.close()


def made(recipe: Path, *overrides: str) -> SftRun:
    """A run in a directory of its own, unless `output` says where."""
    out = recipe.parent / f"run-{len(list(recipe.parent.glob('run-*')))}"
    return assemble(load(recipe, [f"output={out}", *overrides])[0])


def run(recipe: Path, *overrides: str) -> Path:
    """Fine-tune in this process. Returns where the run is."""
    ready = made(recipe, *overrides)
    with open(os.devnull, "w") as nowhere:
        asyncio.run(fine_tune(ready, NoCurve(Console(file=nowhere))))
    return ready.directory.path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(recipe: Path, *overrides: str) -> list[dict[str, Any]]:
    """What a run writes down, without what it took."""
    return timeless(lines(run(recipe, *overrides) / "metrics.jsonl"))


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if not key.startswith("seconds/")} for one in rows]


def losses(model: Path, messages: list[dict[str, Any]], **template: Any) -> list[list[float]]:
    """By transformers alone: one pass over the conversation, and the cross-entropy of each token of each answer."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    plain = [{key: value for key, value in one.items() if key != "weight"} for one in messages]

    def ids(count: int, *, cue: bool) -> list[int]:
        text = tokenizer.apply_chat_template(plain[:count], tokenize=False, add_generation_prompt=cue, **template)
        return tokenizer.encode(text, add_special_tokens=False)

    whole = ids(len(plain), cue=False)
    with torch.no_grad():
        logprobs_TV = network(torch.tensor([whole])).logits[0].log_softmax(-1)
    found: list[list[float]] = []
    for count, message in enumerate(plain):
        if message["role"] == "assistant":
            start, end = len(ids(count, cue=True)), len(ids(count + 1, cue=False)) - 1  # the line end behind <|im_end|>
            found.append([-float(logprobs_TV[at - 1, whole[at]]) for at in range(start, end)])
    return found


def same_weights(one: Path, other: Path) -> bool:
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    return all(torch.equal(value, second[name]) for name, value in first.items())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# what is learnt


def test_the_loss_is_the_cross_entropy_of_the_answers_and_their_ends(recipe: Path, model: Path) -> None:
    (first,) = metrics(recipe, "sft.steps=1", "sft.batch_size=6")
    expected = [loss for n in range(6) for turn in losses(model, talk(n)) for loss in turn]
    assert (
        first["tokens/trained"] == len(expected) == sum(11 + 3 * n for n in range(6))
    )  # "It is 1." and "2", each ended
    assert first["loss"] == pytest.approx(mean(expected), rel=1e-5)


def test_a_conversation_weighs_as_much_as_another_if_the_average_says_so(recipe: Path, model: Path) -> None:
    (first,) = metrics(recipe, "sft.steps=1", "sft.batch_size=6", "sft.normalizer=trajectory")
    expected = mean([mean([loss for turn in losses(model, talk(n)) for loss in turn]) for n in range(6)])
    assert first["loss"] == pytest.approx(expected, rel=1e-5)


def test_messages_weigh_what_the_data_says(recipe: Path, model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "weights.jsonl", [talk(0, weight=0.5), talk(1, weight=0)])
    (first,) = metrics(recipe, f"data.train={source}", "sft.steps=1", "sft.batch_size=2")
    (one, half), (other, _) = losses(model, talk(0)), losses(model, talk(1))
    expected = (sum(one) + 0.5 * sum(half) + sum(other)) / (len(one) + 0.5 * len(half) + len(other))
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert first["tokens/trained"] == len(one) + len(half) + len(other)


def test_the_mask_and_the_datas_weights_are_multiplied(recipe: Path, model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "weights.jsonl", [talk(0), talk(1, weight=0)])
    (first,) = metrics(recipe, f"data.train={source}", "loss_mask=last_turn", "sft.steps=1", "sft.batch_size=2")
    _, last = losses(model, talk(0))
    assert first["loss"] == pytest.approx(mean(last), rel=1e-5)
    assert first["tokens/trained"] == len(last)


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_packed_conversations_do_not_see_each_other(recipe: Path, average: str) -> None:
    options = ["sft.batch_size=6", f"sft.normalizer={average}"]
    packed = metrics(recipe, *options, "sft.micro_batch_tokens=100000")
    apart = metrics(recipe, *options, "sft.micro_batch_tokens=1")
    for one, other in zip(packed, apart, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_micro_batches_are_as_small_as_the_recipe_says(recipe: Path) -> None:
    from turnwise.sft.fine_tune import _pack, _replay

    for tokens, count in ((100_000, 1), (1, 6)):
        ready = made(recipe, f"sft.micro_batch_tokens={tokens}")
        batch = _pack(ready, asyncio.run(_replay(ready, ready.rows, prefix="")))
        assert len(batch.micro_batches) == count


@pytest.mark.slow
def test_what_is_said_again_and_again_is_learnt(recipe: Path, tmp_path: Path) -> None:
    found = metrics(recipe, "sft.steps=20", "sft.lr=0.03")
    assert found[0]["loss"] > 4.5  # of 260 tokens, nothing is known: about ln 260 = 5.6
    assert found[-1]["loss"] < 2.0


def test_weights_of_zero_leave_nothing_and_change_nothing(
    recipe: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [{**one, "weight": 0} if one["role"] == "assistant" else one for one in talk(0)]
    source = write(tmp_path / "silent.jsonl", [silent])
    out = run(recipe, f"data.train={source}", "sft.weight_decay=0.5")
    written = lines(out / "metrics.jsonl")
    assert [(one["loss"], one["tokens/trained"], one["grad_norm"]) for one in written] == [(None, 0, 0.0)] * 3
    assert "loss_mask=all and the weights in the rows leave no turn to train on" in caplog.text
    assert same_weights(out / "checkpoint", model)


def test_tools_of_the_recipe_are_offered_where_a_row_names_none(recipe: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "own", "description": "", "parameters": {"type": "object"}}}
    source = write(tmp_path / "tools.jsonl", [talk(0), {"messages": talk(1), "tools": [tool]}])
    tools = ["tools=[turnwise.environments.calculator:calculator]", "data.shuffle=false"]
    out = run(recipe, f"data.train={source}", *tools, "sft.steps=1", "sft.batch_size=2")
    tokenizer = AutoTokenizer.from_pretrained(load(recipe)[0].model.path)
    texts = [tokenizer.decode(one["segments"][0]["token_ids"]) for one in lines(out / "trajectories.jsonl")]
    assert ['"name": "calculator"' in text for text in texts] == [True, False]
    assert ['"name": "own"' in text for text in texts] == [False, True]
    everywhere = write(tmp_path / "everywhere.jsonl", [{"messages": talk(1), "tools": [tool]}])
    with pytest.raises(
        ConfigError, match="tools and mcp are for rows without a column `tools`, and all rows have this column"
    ):
        run(recipe, f"data.train={everywhere}", *tools)


@pytest.mark.slow
def test_images_are_seen(tmp_path: Path) -> None:
    from support.vision import picture, save_vision_model

    picture().save(tmp_path / "a.png")
    told = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Noise."}]
    options = {
        "model": {"path": str(save_vision_model(tmp_path / "model"))},
        "data": {"train": write(tmp_path / "train.jsonl", [{"messages": told, "images": ["a.png"]}, talk(0)])},
        "sft": {"steps": 2, "batch_size": 2, "lr": 0.01},
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(options))
    out = run(tmp_path / "recipe.yaml")
    first, second = lines(out / "metrics.jsonl")
    assert second["loss"] < first["loss"]
    assert first["tokens/trained"] == len("Noise.") + len("It is 1.") + len("2") + 3
    shown = next(one for one in lines(out / "trajectories.jsonl") if one["row"]["id"] == "1")
    (media,) = shown["segments"][0]["media"]
    assert (media["kind"], media["size"]) == ("image", [16, 16])


# what does not fit, and what cannot be written


LONG = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3, " * 20}]


def test_what_is_too_long_is_left_out_and_told_with_its_row(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "long.jsonl", [talk(0), LONG, talk(1)])
    options = [f"data.train={source}", "limits.context=120", "sft.batch_size=3", "sft.steps=2"]
    assert main(["sft", str(recipe), *options]) == 0
    told = capsys.readouterr().out
    assert told.count("row 2: longer than limits.context=120, and left out; raise limits.context") == 1
    first, _ = lines(tmp_path / "run/metrics.jsonl")
    assert first["left_out"] == pytest.approx(1 / 3)
    assert first["tokens/trained"] == 11 + 14
    (left_out,) = [one for one in lines(tmp_path / "run/trajectories.jsonl")[:3] if one["row"]["id"] == "2"]
    assert (left_out["stop"], left_out["turns"][0]["advantage"]) == ("context", None)


def test_what_is_too_long_is_learnt_up_to_there_if_it_may_be_cut(recipe: Path, tmp_path: Path, model: Path) -> None:
    source = write(tmp_path / "long.jsonl", [LONG])
    (first,) = metrics(
        recipe, f"data.train={source}", "limits.context=120", "sft.too_long=cut", "sft.batch_size=1", "sft.steps=1"
    )
    (whole,) = losses(model, LONG)
    prompt = len("<user\nCount.>\n<assistant\n")  # each mark is one token
    assert (first["tokens/trained"], first["tokens/all"], first["left_out"]) == (120 - prompt, 120, 0.0)
    assert first["loss"] == pytest.approx(mean(whole[: 120 - prompt]), rel=1e-5)


def test_a_row_without_room_for_its_question_breaks_alone(recipe: Path, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "x" * 300}, LONG[1]]
    source = write(tmp_path / "long.jsonl", [talk(0), asked])
    for too_long in ("leave_out", "cut"):
        options = ["limits.context=120", "sft.steps=1", "sft.batch_size=2", f"sft.too_long={too_long}"]
        (first,) = metrics(recipe, f"data.train={source}", *options)
        assert (first["failed"], first["left_out"], first["tokens/trained"]) == (0.5, 0.0, 11)


def test_a_step_of_rows_that_are_left_out_is_one_without_learning(recipe: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "long.jsonl", [LONG, talk(0)])
    found = metrics(recipe, f"data.train={source}", "limits.context=120", "sft.batch_size=1", "sft.steps=4")
    assert sorted(one["tokens/trained"] for one in found) == [0, 0, 11, 11]
    assert {one["loss"] is None for one in found if not one["tokens/trained"]} == {True}


def test_data_of_which_nothing_can_be_learnt_ends_the_run_with_the_rows(recipe: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "long.jsonl", [LONG, LONG])
    nothing = r"no conversation of the data can be trained on:\n  rows 1, 2: longer than limits.context=120"
    with pytest.raises(RolloutError, match=nothing):
        run(recipe, f"data.train={source}", "limits.context=120", "sft.batch_size=2", "data.shuffle=false")
    with pytest.raises(
        RolloutError, match=r"the loss of no held-out conversation .* can be computed:\n  rows 1, 2: longer"
    ):
        run(recipe, f"data.eval={source}", "limits.context=120")


def test_a_bad_row_is_refused_at_the_start_with_its_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "bad.jsonl", [talk(0), [{"role": "usr", "content": "?"}]])
    assert main(["sft", str(recipe), f"data.train={source}"]) == 1
    told = capsys.readouterr().err
    assert f"{source}:2: message 1 has the role 'usr'; did you mean 'user'?" in told
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=r"bad.jsonl:2"):
        run(recipe, f"data.eval={source}")


# options


@pytest.fixture(scope="module")
def plain() -> dict[str, list[dict[str, Any]]]:
    """What the recipe gives as it is, once it is known: the same in whatever directory."""
    return {}


@pytest.mark.slow  # a run for each
@pytest.mark.parametrize(
    "option",
    [
        "batch_size=3",
        "lr=0.001",
        "lr_schedule=constant",
        "lr_schedule=cosine",
        "warmup_steps=2",
        "weight_decay=0.5",
        "betas=[0.5, 0.9]",
        "max_grad_norm=0.01",
        "normalizer=trajectory",
        "steps=4",
    ],
)
def test_an_option_of_the_optimization_changes_the_run(
    recipe: Path, option: str, plain: dict[str, list[dict[str, Any]]]
) -> None:
    options = ["deterministic=true", "sft.steps=3"]
    if not plain:
        plain["metrics"] = metrics(recipe, *options)
        assert metrics(recipe, *options) == plain["metrics"]
    changed = metrics(recipe, *options, f"sft.{option}")
    assert [one["loss"] for one in changed] != [one["loss"] for one in plain["metrics"]]


@pytest.mark.slow
def test_the_rate_goes_as_the_schedule_says(recipe: Path) -> None:
    def rates(*options: str) -> list[float]:
        return [one["lr"] for one in metrics(recipe, "sft.steps=4", "sft.lr=0.4", *options)]

    assert rates("sft.warmup_steps=2") == rates("sft.warmup_steps=0.5") == pytest.approx([0.2, 0.4, 0.4, 0.2])
    assert rates("sft.warmup_steps=8") == pytest.approx([0.05, 0.1, 0.15, 0.2])  # a run that is shortened for a try
    assert rates("sft.lr_schedule=cosine") == pytest.approx([0.2 * (1 + math.cos(math.pi * n / 4)) for n in range(4)])


def test_epochs_are_as_many_steps_as_they_need(recipe: Path) -> None:
    for epochs, steps in (("1", 2), ("1.5", 3), ("3", 5)):  # of six rows, four a step
        assert made(recipe, "sft.steps=null", f"sft.epochs={epochs}").steps == steps
    assert [one["epoch"] for one in metrics(recipe, "sft.steps=2")] == [0.6667, 1.3333]


def test_all_rows_are_used_once_before_one_is_used_twice(recipe: Path, tmp_path: Path) -> None:
    out = run(recipe, "sft.batch_size=3", "sft.steps=4")
    used = [one["row"]["id"] for one in lines(out / "trajectories.jsonl")]
    assert sorted(used[:6]) == sorted(used[6:]) == ["1", "2", "3", "4", "5", "6"]
    assert used[:6] != used[6:]
    out = run(recipe, "sft.batch_size=3", "sft.steps=2", "data.shuffle=false")
    assert [one["row"]["id"] for one in lines(out / "trajectories.jsonl")] == list("123456")


def test_the_record_holds_as_many_conversations_as_it_is_to(recipe: Path, tmp_path: Path) -> None:
    out = run(recipe, "sft.max_recorded_rows=5", "sft.steps=2")
    assert [one["step"] for one in lines(out / "trajectories.jsonl")] == [1, 1, 1, 1, 2]
    out = run(recipe, "sft.max_recorded_rows=0", "sft.steps=1")
    assert lines(out / "trajectories.jsonl") == []


def test_the_held_out_loss_is_that_of_all_tokens_together(recipe: Path, model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "eval.jsonl", [talk(n) for n in (7, 8, 9)])
    out = run(recipe, f"data.eval={source}", "sft.eval_every=2", "sft.max_eval_rows=2", "sft.micro_batch_tokens=64")
    found = lines(out / "evaluations.jsonl")
    expected = [loss for n in (7, 8) for turn in losses(model, talk(n)) for loss in turn]
    assert [one["step"] for one in found] == [0, 2, 3]
    assert [one["conversations"] for one in found] == [2, 2, 2]
    assert found[0]["loss"] == pytest.approx(mean(expected), rel=1e-5)
    assert found[-1]["loss"] < found[0]["loss"]
    assert [one["row"]["id"] for one in lines(out / "eval_trajectories.jsonl")] == ["1", "2"]
    after = [loss for n in (7, 8) for turn in losses(out / "checkpoint", talk(n)) for loss in turn]
    assert found[-1]["loss"] == pytest.approx(mean(after), rel=1e-5)


def test_a_system_message_of_the_recipe_is_in_the_tokens(recipe: Path, model: Path) -> None:
    (first,) = metrics(recipe, "data.system_prompt=Add.", "data.max_rows=2", "sft.steps=1", "sft.batch_size=2")
    expected = [loss for n in range(2) for turn in losses(model, [SYSTEM, *talk(n)]) for loss in turn]
    assert first["loss"] == pytest.approx(mean(expected), rel=1e-5)


REFUSED: Mapping[str, str] = {
    "sft.eval_every=2": "sft.eval_every has no effect without held-out rows: set data.eval",
    "sft.max_eval_rows=2": "sft.max_eval_rows has no effect without held-out rows: set data.eval",
    "data.eval_split=dev": "data.eval_split has no effect without data.eval",
    "data.split=dev": "data.split has no effect on the single file",
    "data.subset=x": "data.subset has no effect on the single file",
    "environment=turnwise.environments.users:checked_answer": "has no effect in fine-tuning (the data contains the messages",
    "engine.slots=3": "engine.slots has no effect in fine-tuning (nothing is sampled)",
    "train.lr=0.1": "train.lr has no effect in fine-tuning (it is an option of `turnwise train`); use sft.lr",
    "train.batch_size=3": (
        "train.batch_size has no effect in fine-tuning (it is an option of `turnwise train`); use sft.batch_size"
    ),
    "train.group_size=3": "train.group_size has no effect in fine-tuning (it is an option of `turnwise train`); remove it",
    "eval.max_rows=3": "eval.max_rows has no effect in fine-tuning (it is an option of `turnwise train`); use sft.max_eval_rows",
    "rollout.max_rows=3": "rollout.max_rows has no effect in fine-tuning (it is an option of `turnwise rollout`); remove it",
    "sampling.top_k=3": "sampling.top_k has no effect in fine-tuning (nothing is sampled); remove it",
    "credit.scale=none": "credit.scale has no effect in fine-tuning (fine-tuning has no rewards); remove it",
    "reward.timeout=3": "reward.timeout has no effect in fine-tuning (fine-tuning has no rewards); remove it",
    "teacher.path=big": "teacher.models has no effect in fine-tuning (it learns from the data",
    "reference.source=copy": "reference.source has no effect in fine-tuning (its loss has no KL divergence); remove it",
    "tool_calls.max_parallel_calls=3": "tool_calls.max_parallel_calls has no effect in fine-tuning (no tool is run",
    "tools=[{use: 'turnwise.environments.calculator:calculator', timeout: 3}]": "tools.0.timeout has no effect in",
    "mcp.retries=3": "mcp.retries has no effect in fine-tuning (no tool is run); remove it",
    "limits.turns=3": "limits.turns has no effect in fine-tuning (the data sets the length of a conversation",
    "limits.context=100000": "limits.context=100000 is more than the model's longest context, 1024 tokens",
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_without_effect_are_refused(recipe: Path, option: str) -> None:
    with pytest.raises(ConfigError) as error:
        assemble(load(recipe, [option])[0])
    assert REFUSED[option] in str(error.value)


def test_options_that_contradict_each_other_are_refused(recipe: Path) -> None:
    for options, told in (
        # both on the command line: one alone replaces the recipe's other
        (["sft.steps=3", "sft.epochs=2"], "sft.epochs=2 has no effect beside sft.steps=3: remove one of them"),
        (["resume=auto", "replace=true"], "resume=auto continues the earlier run and replace=true moves it away"),
        (
            ["deterministic=true", "model.device=cuda"],
            "deterministic=true works on the CPU only, and the recipe has model.device=cuda",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            assemble(load(recipe, options)[0])


def test_what_the_template_has_no_use_for_is_refused_before_the_weights_are_loaded(recipe: Path) -> None:
    with pytest.raises(TemplateError, match="thinking=branch"):
        assemble(load(recipe, ["thinking=branch"])[0])


def test_training_refuses_the_options_of_fine_tuning(recipe: Path) -> None:
    from turnwise.config.train_checks import refuse_without_effect

    with pytest.raises(
        ConfigError, match=r"sft.batch_size has no effect in training: it is an option of `turnwise sft`"
    ):
        refuse_without_effect(load(recipe)[0])


# what a run leaves, and how it goes on


@pytest.mark.slow
def test_a_run_that_is_gone_on_with_is_bit_identical(recipe: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "eval.jsonl", [talk(9)])
    options = ["deterministic=true", f"data.eval={held_out}", "sft.eval_every=1", "sft.lr_schedule=constant"]
    run(recipe, *options, "sft.steps=4", f"output={tmp_path / 'straight'}")
    run(recipe, *options, "sft.steps=2", f"output={tmp_path / 'parts'}")
    with (tmp_path / "parts/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "half a li')
    run(recipe, *options, "sft.steps=4", f"output={tmp_path / 'parts'}", "resume=auto")
    for name in ("metrics.jsonl", "evaluations.jsonl", "trajectories.jsonl"):
        straight, parts = (timeless(lines(tmp_path / one / name)) for one in ("straight", "parts"))
        if name == "trajectories.jsonl":
            straight, parts = ([one["segments"] for one in found] for found in (straight, parts))
        assert parts == straight, name
    assert same_weights(tmp_path / "straight/checkpoint", tmp_path / "parts/checkpoint")


def test_the_checkpoint_is_trained_on_and_neither_command_takes_the_others_run(recipe: Path, tmp_path: Path) -> None:
    from turnwise.train import assemble as assemble_training

    out = run(recipe, "sft.steps=1")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?"}\n')
    training = {
        "model": {"path": str(out / "checkpoint")},
        "data": {"train": str(rows)},
        "environment": "turnwise.environments.users:checked_answer",
        "limits": {"turns": 2},
        "output": str(out),
    }
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(training))
    with pytest.raises(RunError, match=r"is a run of `turnwise sft`, which training cannot resume.*model.path="):
        assemble_training(load(tmp_path / "training.yaml", ["resume=auto"])[0])
    ready = assemble_training(load(tmp_path / "training.yaml", [f"output={tmp_path / 'trained'}"])[0])
    ready.step = 1
    ready.save()
    assert same_weights(tmp_path / "trained/checkpoint", out / "checkpoint")
    with pytest.raises(RunError, match=r"is a run of `turnwise train`, which fine-tuning cannot resume"):
        assemble(load(recipe, ["resume=auto", f"output={tmp_path / 'trained'}"])[0])


def test_the_command_says_what_it_does_and_show_shows_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = write(tmp_path / "eval.jsonl", [talk(9)])
    assert main(["sft", str(recipe), f"data.eval={held_out}", "sft.lr=0.02"]) == 0
    told = capsys.readouterr().out
    assert "on 6 conversations: 3 steps of 4 (2 epochs)" in told
    assert "step 0: held-out loss 5." in told
    assert "step 3: held-out loss" in told
    assert (tmp_path / "run/curve.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["show", str(tmp_path / "run")]) == 0
    summary = capsys.readouterr().out
    assert "3 steps, loss" in summary.replace("\n", "")
    assert "held-out conversations" in summary
    assert main(["show", str(tmp_path / "run"), "--step", "1", "--tokens"]) == 0
    assert "It is" in capsys.readouterr().out
    assert main(["sft", str(recipe)]) == 1
    assert "contains a run already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sft", "--help"])
    assert "docs/sft.md" in capsys.readouterr().out


@pytest.mark.slow
def test_the_recipe_of_the_repository_takes_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    small = ["sft.steps=2", "sft.batch_size=8", "sft.max_eval_rows=8", "sft.eval_every=0"]
    assert main(["sft", "recipes/sft.yaml", *small, f"output={tmp_path / 'run'}"]) == 0
    found = lines(tmp_path / "run/metrics.jsonl")
    assert [(one["step"], one["failed"], one["template_mismatch"], one["left_out"]) for one in found] == [
        (1, 0, 0, 0),
        (2, 0, 0, 0),
    ]
    assert [one["step"] for one in lines(tmp_path / "run/evaluations.jsonl")] == [0, 2]


# What a model would have had to say: the tokens of a conversation from a file are those of the rollout that said the
# same.


FILES = {path.stem: path for path in template_files()}

POLICIES = ("keep", "branch", "strip_at_user")

SEARCH: ToolSchema = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}

OPENING: list[Message] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 + 2?"}]

ANSWERS: list[list[Message]] = [
    [{"role": "tool", "tool_call_id": "call_0", "name": "search", "content": "four"}],
    [{"role": "user", "content": "Sure?"}],
    [],
]

HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "2 + 2"}}\n</tool_call>'

LLAMA = '{"name": "search", "parameters": {"query": "2 + 2"}}'

THOUGHTS = [
    f"<think>\nLook it up.\n</think>\n\n{HERMES}",
    "<think>\nSo.\n</think>\n\nFour.",
    "<think>\nI am.\n</think>\n\nYes.",
]

SAID: dict[str, list[str]] = {
    "qwen3": THOUGHTS,
    "qwen2_5": [f"I look it up.\n{HERMES}", "Four.", "Yes, I am."],
    "llama3_1": [LLAMA, "Four.", "Yes, I am."],
    "llama3_2": [LLAMA, "Four.", "Yes, I am."],
}
"""What models of these families sample, in their own words."""


def other_side(tools: Sequence[ToolSchema]) -> EnvironmentFactory:
    """Whom the model talks to in a rollout."""

    @environment
    async def talks(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=OPENING, tools=tools)
        for number, messages in enumerate(ANSWERS, 1):
            yield Reply(messages=messages, done=number == len(ANSWERS))

    return talks


def from_file(path: Path, record: dict[str, Any]) -> Row:
    """A row as it is read from a file."""
    (path / "rows.jsonl").write_text(json.dumps(record))
    (row,) = read_conversations(str(path / "rows.jsonl"))
    return row


def again(row: Row, renderer: Renderer, **options: Any) -> Trajectory:
    (trajectory,) = asyncio.run(replay([row], renderer, **options))
    return trajectory


def columns(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    return [(list(segment.token_ids), list(segment.turn)) for segment in trajectory.segments]


@pytest.mark.parametrize("thinking", POLICIES)
@pytest.mark.parametrize("family", SAID)
def test_the_tokens_and_the_mask_are_those_of_the_rollout_that_said_the_same(
    family: str, thinking: Any, tmp_path: Path
) -> None:
    if family not in FILES:
        pytest.skip("the template is not on this machine: pip install trl==1.16.0")
    renderer = family_renderer(FILES[family])
    held = hold(scripted(SAID[family], renderer=renderer), other_side([SEARCH]), renderer=renderer, thinking=thinking)
    assert (held.error, held.stop) == (None, "done")
    assert [call.name for call in held.turns[0].calls] == ["search"]
    row = from_file(tmp_path, {"messages": held.messages, "tools": [SEARCH]})
    replayed = again(row, renderer, thinking=thinking)
    assert replayed.error is None
    assert columns(replayed) == columns(held)
    assert len(held.segments) == (2 if family == "qwen3" and thinking != "keep" else 1)
    stop = renderer.decode([renderer.stop_token_ids[0]])
    turns = [text for segment in replayed.segments for turn, text in spoken(segment, renderer) if turn >= 0]
    assert turns == [text + stop for text in SAID[family]]
    assert replayed.template_mismatch is None


OTHERWISE = {
    "qwen3": "each answer is the last one when it is said, and there the template writes an empty thought",
    "glm4moe": "nothing but the next header ends a turn: the model says its first token, and the last turn has it too",
    "glm4moe_training": "likewise",
}
"""Where a rollout holds other tokens than the one pass, because the model has them to say."""

SWEPT = [one for one in SCENARIOS if one.name in ("parallel calls", "retry by user", "three tool rounds")]


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")
@pytest.mark.parametrize("scenario", SWEPT, ids=[one.name for one in SWEPT])
def test_wherever_a_template_can_be_continued_the_tokens_are_those_of_its_one_pass(scenario: Scenario) -> None:
    compared = 0
    messages = [*scenario.opening, *(one for said, answers in scenario.rounds for one in (said, *answers))]
    for path in FILES.values():
        renderer = family_renderer(path)
        found = check_scenario(renderer, scenario)
        if not found.exact or path.stem in OTHERWISE or (scenario.tools and not renderer.template.writes_calls):
            continue
        trajectory = again(Row(id="1", messages=messages, fields={"tools": scenario.tools}), renderer)
        assert trajectory.error is None, (path.stem, trajectory.error)
        (segment,) = trajectory.segments
        assert list(segment.token_ids) == list(found.ids), path.stem
        ends = [turn >= 0 > after for turn, after in zip(segment.turn, [*segment.turn[1:], -1], strict=True)]
        last = [token for token, end in zip(segment.token_ids, ends, strict=True) if end]
        assert len(last) == len(scenario.rounds)
        assert all(token in renderer.stop_token_ids for token in last), path.stem
        compared += 1
    assert compared >= 4


def test_every_token_can_be_told_by_eye() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long"},
        {"role": "user", "content": "Nobody answers this."},
    ]
    trajectory = again(Row(id="1", messages=messages), RENDERER)
    assert [spoken(segment) for segment in trajectory.segments] == [
        [
            (-1, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
            (0, "Yo<|im_end|>"),
            (-1, "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
            (1, "So long<|im_end|>"),
        ]
    ]
    assert trajectory.messages == messages
    assert (trajectory.stop, trajectory.error, trajectory.template_mismatch) == ("done", None, None)


def test_thoughts_in_the_content_and_beside_it_are_the_same_tokens() -> None:
    if "qwen3" not in FILES:
        pytest.skip("the template is not on this machine: pip install trl==1.16.0")
    renderer = family_renderer(FILES["qwen3"])
    question: Message = {"role": "user", "content": "2+2?"}
    inside = again(a_conversation(question, "<think>\nHm.\n</think>\n\n4"), renderer)
    for key in ("reasoning_content", "reasoning", "thinking"):
        row = Row(id="1", messages=[question, {"role": "assistant", "content": "4", key: "Hm."}])
        assert columns(again(row, renderer)) == columns(inside)
    assert spoken(inside.segments[0], renderer)[-1] == (0, "<think>\nHm.\n</think>\n\n4<|im_end|>")
    # a first answer, before another user message, whose thoughts Qwen3's template leaves out
    longer = Row(id="1", messages=[question, inside.messages[-1], question, {"role": "assistant", "content": "5"}])
    assert "Hm." in spoken(again(longer, renderer).segments[0], renderer)[1][1]


def a_conversation(question: Message, answer: str) -> Row:
    return Row(id="1", messages=[question, {"role": "assistant", "content": answer}])


def test_two_answers_in_a_row_have_a_cue_each() -> None:
    messages: list[Message] = [*a_row("Hi").messages, *({"role": "assistant", "content": text} for text in ("A", "B"))]
    (segment,) = again(Row(id="1", messages=messages), RENDERER).segments
    assert spoken(segment)[1:] == [
        (0, "A<|im_end|>"),
        (-1, "\n<|im_start|>assistant\n"),
        (1, "B<|im_end|>"),
    ]


def test_rounds_are_the_models_messages_with_what_follows_each() -> None:
    system, user, said, tool = ({"role": role, "content": role} for role in ("system", "user", "assistant", "tool"))
    assert rounds([system, user, said, tool, said]) == ([system, user], [(said, [tool]), (said, [])])


CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "search", "arguments": {}}}],
}

NO_CALLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            CALLING,
            "does not render the call of 'search': use a model whose chat template supports tools, or write the call into",
        ),
        (
            {"role": "assistant", "content": "4", "reasoning_content": "Hm."},
            "leaves out a part of an assistant message: 'Hm.'",
        ),
    ],
)
def test_what_a_template_has_no_place_for_is_refused(message: Message, told: str) -> None:
    renderer = Renderer(byte_tokenizer(NO_CALLS))
    with pytest.raises(TemplateError) as error:
        targets_lines(renderer, a_row("Hi").messages, [(message, [])])
    assert told in str(error.value)


def test_a_row_that_cannot_be_written_breaks_alone() -> None:
    renderer = Renderer(byte_tokenizer(NO_CALLS))
    bad, good = Row(id="bad", messages=[*a_row("Hi").messages, CALLING]), a_conversation(a_row("Hi").messages[0], "Yo")
    broken, whole = asyncio.run(replay([bad, good], renderer))
    assert broken.error is not None
    assert (broken.error.kind, broken.segments, whole.error) == ("row", [], None)
    assert spoken(whole.segments[0])[-1] == (0, "Yo<|im_end|>")
