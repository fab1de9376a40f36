"""The checks at the start of a run: errors in both commands, and notes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support import CHATML, byte_tokenizer
from support.templates import GROWS, STRANGE_CALLS, THINKS
from support.tiny import save_model, save_rows
from turnwise.chat.renderer import Renderer
from turnwise.config.recipe import load
from turnwise.config.schema import Config
from turnwise.doctor.preflight import preflight, unread_columns
from turnwise.errors import TemplateError
from turnwise.runs.collect import collect
from turnwise.train import assemble
from turnwise.types import Row

PLACES = Path(__file__).parent.parent / "support" / "places.py"
CALCULATOR = "tools=[turnwise.environments.calculator:calculator]"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model with each of the templates."""
    found: dict[str, Path] = {}
    for name, template in (("plain", CHATML), ("thinks", THINKS), ("strange", STRANGE_CALLS), ("grows", GROWS)):
        found[name] = save_model(tmp_path_factory.mktemp(name))
        byte_tokenizer(template).save_pretrained(found[name])
    return found


def recipe(path: Path, model: Path, *overrides: str) -> Config:
    options: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(save_rows(path / "rows.jsonl", 2))},
        "reward": {"trajectory": [f"{PLACES}:length"]},
        "credit": {"name": "grpo"},
        "train": {"batch_size": 1, "group_size": 2, "steps": 1},
        "output": str(path / "run"),
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(options))
    return load(path / "recipe.yaml", overrides)[0]


def started(command: str, config: Config, out: Path) -> None:
    """Start a run as `turnwise train` and `turnwise rollout` do."""
    if command == "train":
        assemble(config)
    else:
        asyncio.run(collect(config, out, Console(quiet=True)))


@pytest.mark.parametrize("command", ["train", "rollout"])
@pytest.mark.parametrize(
    ("model", "override", "message"),
    [
        ("plain", "thinking=branch", "thinking=branch has no effect: .* does not support reasoning, .*Remove it"),
        ("plain", "thinking=strip_at_user", "thinking=strip_at_user has no effect: .* does not support reasoning"),
        ("plain", "use_inference_chat_template=true", "thinking=branch has no effect"),
        ("strange", CALCULATOR, "in a format that cannot be read back.*Set the format"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_the_run(
    command: str, model: str, override: str, message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(TemplateError, match=message):
        started(command, recipe(tmp_path, models[model], override), tmp_path / "out")
    assert not (tmp_path / "run").exists()


def test_a_named_tool_format_is_used(models: dict[str, Path], tmp_path: Path) -> None:
    config = recipe(tmp_path, models["strange"], CALCULATOR, "tool_format=hermes")
    assert assemble(config).context.renderer.turn_parser.tool_format.name == "hermes"


def test_each_note_is_given_once(models: dict[str, Path], tmp_path: Path) -> None:
    notes = assemble(recipe(tmp_path, models["thinks"])).notes
    (note,) = [note for note in notes if "reasoning" in note]
    assert note.startswith("thinking: the template leaves earlier reasoning out at messages of user")
    notes = assemble(recipe(tmp_path, models["grows"], "replace=true")).notes
    assert [one.partition(":")[0] for one in notes if "previous run" not in one] == ["user turns"]
    assert assemble(recipe(tmp_path, models["plain"], f"output={tmp_path / 'other'}")).notes == []


def test_a_declared_option_thinking_gives_no_note(models: dict[str, Path], tmp_path: Path) -> None:
    assert assemble(recipe(tmp_path, models["thinks"], "thinking=branch")).notes == []


def test_a_single_turn_gives_no_notes(models: dict[str, Path], tmp_path: Path) -> None:
    assert assemble(recipe(tmp_path, models["grows"], "limits.turns=1")).notes == []


def test_tool_turns_are_checked_only_if_there_are_tools(models: dict[str, Path], tmp_path: Path) -> None:
    renderer = Renderer.from_pretrained(models["grows"])
    without, with_tools = (recipe(tmp_path, models["grows"], *more) for more in ((), (CALCULATOR,)))
    assert [one.partition(":")[0] for one in preflight(without, renderer)] == ["user turns"]
    assert [one.partition(":")[0] for one in preflight(with_tools, renderer)] == ["tool turns", "user turns"]


@pytest.mark.parametrize(
    ("environment", "tools", "fields", "told"),
    [
        (
            "SingleTurn",
            True,
            {"agent_name": "single_turn_agent"},
            "'single_turn_agent': .* all conversations have the tools of",
        ),
        ("SingleTurn", True, {"agent_name": "tool_agent"}, None),
        ("SingleTurn", True, {"agent_name": "my_agent"}, "2 rows with agent_name='my_agent'"),
        ("SingleTurn", False, {"agent_name": "my_agent"}, "have one turn without tools"),
        ("SingleTurn", False, {"agent_name": "single_turn_agent"}, None),
        (
            "SingleTurn",
            False,
            {"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}},
            "2 rows with interaction_kwargs",
        ),
        ("SingleTurn", False, {"interaction_kwargs": {"name": "gsm8k"}}, "no interaction answers the model"),
        ("SingleTurn", False, {"interaction_kwargs": {"name": None}, "agent_name": None}, None),  # as in parquet
        ("elsewhere", False, {"agent_name": "my_agent", "interaction_kwargs": {"name": "x"}}, None),
    ],
)
def test_columns_of_verl_that_nothing_reads_are_noted(
    environment: str, tools: bool, fields: dict[str, Any], told: str | None
) -> None:
    use = "my.module:elsewhere" if environment == "elsewhere" else f"turnwise.environments.environment:{environment}"
    tree = {"model": {"path": "m"}, "data": {"train": "r.jsonl"}, "environment": use, "tools": ["a:b"] if tools else []}
    rows = [Row(id=str(n), messages=[{"role": "user", "content": "Hi"}], fields=fields) for n in range(2)]
    notes = unread_columns(Config.model_validate(tree), rows)
    assert len(notes) == (told is not None)
    assert told is None or re.search(told, notes[0])
