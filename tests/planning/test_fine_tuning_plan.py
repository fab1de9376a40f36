"""The plan of a recipe for fine-tuning: counted tokens, ranks, memory, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes import save_recipe
from turnwise.assembly import conversations
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.planning.placement import ConversationTokens, fine_tuning_lines
from turnwise.sft.fine_tune import conversation_tokens


def talk(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a" * (8 * number)}]


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    rows = "".join(json.dumps({"messages": talk(number)}) + "\n" for number in range(1, 7))
    (tmp_path / "train.jsonl").write_text(rows)
    return save_recipe(
        tmp_path,
        model,
        environment="turnwise.environments.environment:SingleTurn",
        data={"train": str(tmp_path / "train.jsonl")},
        sft={"epochs": 2, "batch_size": 4},
    )


def test_tokens_are_those_of_fine_tuning(recipe: Path) -> None:
    config, _ = load(recipe)
    counted = conversation_tokens(config, conversations(config))
    # one token for each letter, and one at the end of the turn
    assert [one.trained for one in counted] == [8 * number + 1 for number in range(1, 7)]
    assert [one.tokens - counted[0].tokens for one in counted] == [8 * number for number in range(6)]
    masked, _ = load(recipe, ["loss_mask=last_round"])
    assert [one.trained for one in conversation_tokens(masked, conversations(masked))] == [
        one.trained for one in counted
    ]


def test_lines_of_a_step_say_how_often_and_which_conversations_are_used(recipe: Path) -> None:
    config, _ = load(recipe)
    counted = [ConversationTokens(tokens, tokens // 2) for tokens in (10, 20, 60)]
    lines = {line.name: line.value for line in fine_tuning_lines(config, rows=6, counted=counted, context=30, ranks=2)}
    assert lines["steps"] == "3: 6 conversations, each used 2 times"
    assert lines["conversations of a rank"].startswith("2 for each step")
    assert lines["tokens of a conversation"] == "15 on average, at most 20 (of 3 counted conversations)"
    assert lines["trained tokens of a conversation"] == "8 on average"  # 7.5, rounded to even
    assert lines["tokens of a step"] == "60 on average"
    assert lines["too long"] == "1 have more than 30 tokens, and are left out (sft.too_long)"


def test_the_command_prints_the_plan_of_fine_tuning(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "cluster=torchrun", "--ranks", "2", "--memory-gb", "64"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "3: 6 conversations, each used 2 times" in output
    assert "2 ranks, each on a device of its own (cpu), started by torchrun" in output
    assert "engine" not in output
    assert main(["plan", str(recipe), "--memory-gb", "64"]) == 0
    assert "predicted peak of a training step" in capsys.readouterr().out
    assert main(["plan", str(recipe), "--memory-gb", "0.001"]) == 1
    capsys.readouterr()
    for arguments, message in (
        (
            ["cluster=torchrun", "--ranks", "8"],
            "8 ranks and 4 conversations for each optimizer step (sft.batch_size=4)",
        ),
        (["train.steps=3"], "train.steps has no effect in fine-tuning"),
    ):
        assert main(["plan", str(recipe), *arguments]) == 1
        captured = capsys.readouterr()
        assert message in " ".join((captured.out + captured.err).split())
