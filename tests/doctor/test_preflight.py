"""The checks at the start of a run: errors in both commands, and notes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support import CHATML, byte_tokenizer
from support.conversations import hold
from support.templates import GROWS, SHOWS_NO_TOOLS, STRANGE_CALLS, THINKS
from support.tiny import save_model, save_rows
from turnwise.chat.probes import TOOL
from turnwise.chat.renderer import Renderer
from turnwise.config.recipe import load
from turnwise.doctor.template import preflight, read_directory, template_checks, unread_columns
from turnwise.environments.environment import environment
from turnwise.errors import ConfigError, TemplateError
from turnwise.options.schema import OVERRIDABLE_CHECKS, Config
from turnwise.runs.sampling_only import collect
from turnwise.train import assemble
from turnwise.types import Opening, Reply, Row, Turn

IGNORES_THE_PROMPT = CHATML.replace("{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")
"""ChatML that ignores `add_generation_prompt`."""
PLACES = Path(__file__).parent.parent / "support" / "places.py"
CALCULATOR = "tools=[turnwise.environments.calculator:calculator]"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model with each of the templates."""
    found: dict[str, Path] = {}
    for name, template in (
        ("plain", CHATML),
        ("thinks", THINKS),
        ("strange", STRANGE_CALLS),
        ("grows", GROWS),
        ("shows none", SHOWS_NO_TOOLS),
        ("ignores", IGNORES_THE_PROMPT),
    ):
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
        ("ignores", "seed=1", "writes nothing if add_generation_prompt is true.*set override_checks=.headers"),
        ("grows", "limits.turns=3", "writes different text around the answers.*set override_checks=.user turns."),
        ("plain", "tool_format=glm", "hermes|glm: the template writes .* parsed as .*override_checks=.tool calls."),
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
    assert assemble(recipe(tmp_path, models["plain"], f"output={tmp_path / 'other'}")).notes == []


def test_a_check_that_fails_is_overridden_by_its_name_and_stays_visible(
    models: dict[str, Path], tmp_path: Path
) -> None:
    notes = assemble(recipe(tmp_path, models["ignores"], "override_checks=[headers]")).notes
    (note,) = [note for note in notes if note.startswith("override_checks")]
    assert note.startswith("override_checks: headers fails: the template writes '")
    with pytest.raises(TemplateError, match=r"writes nothing if add_generation_prompt is true"):
        assemble(recipe(tmp_path, models["ignores"], "override_checks=[contents]", "replace=true"))


def test_a_name_that_overrides_nothing_is_said(models: dict[str, Path], tmp_path: Path) -> None:
    notes = assemble(recipe(tmp_path, models["plain"], "override_checks=[headers]")).notes
    assert notes == ["override_checks: headers does not fail, so it need not be named"]
    with pytest.raises(ConfigError, match=r"no check 'header' that can be overridden; .* did you mean 'headers'"):
        recipe(tmp_path, models["plain"], "override_checks=[header]")


def test_all_failed_checks_are_named_in_one_error(models: dict[str, Path], tmp_path: Path) -> None:
    both = tmp_path / "both"
    byte_tokenizer(GROWS.replace("{%- if add_generation_prompt %}", "{%- if false %}")).save_pretrained(both)
    with pytest.raises(TemplateError) as raised:
        preflight(recipe(tmp_path, models["plain"]), Renderer.from_pretrained(both))
    text = str(raised.value)
    assert text.startswith("2 checks of the chat template fail:\n  headers: ")
    assert text.endswith("set override_checks=[headers, user turns] (turnwise doctor shows all checks)")


def test_the_checks_of_a_run_are_those_that_can_be_overridden(models: dict[str, Path]) -> None:
    renderer = Renderer.from_pretrained(models["plain"])
    directory = read_directory(str(models["plain"]), renderer)
    made = [check.name for check in template_checks(renderer, directory=directory)]
    optional = {"system turns", "thinking"}  # never a failure; an option of the recipe, which is removed
    assert {*made, "mask", "credit", "rows"} - optional == set(OVERRIDABLE_CHECKS)


# tools that no prompt shows


def test_tools_that_no_prompt_shows_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    hermes = (CALCULATOR, "tool_format=hermes")
    with pytest.raises(TemplateError) as raised:
        assemble(recipe(tmp_path, models["shows none"], *hermes))
    text = str(raised.value)
    assert ": the prompt does not contain the tools that the recipe offers (calculator)" in text
    assert "Set tool_calls.describe=system, or describe them in the system prompt" in text
    assert text.endswith("set override_checks=[tools shown] (turnwise doctor shows all checks)")
    run = assemble(recipe(tmp_path, models["shows none"], *hermes, "tool_calls.describe=system"))
    assert run.notes == []
    prompt = run.context.renderer.encode_opening(run.rows[0].messages, [TOOL]).text
    assert "<tools>" in prompt
    assert '"name": "probe_tool"' in prompt


def test_tools_that_the_rows_describe_are_not_refused(models: dict[str, Path], tmp_path: Path) -> None:
    rows = tmp_path / "described.jsonl"
    words = "Use calculator with an expression, as <tool_call>...</tool_call>. "
    rows.write_text("".join(json.dumps({"prompt": words + question}) + "\n" for question in ("1+1?", "2+2?")))
    hermes = (CALCULATOR, "tool_format=hermes", f"data.train={rows}")
    assert assemble(recipe(tmp_path, models["shows none"], *hermes)).notes == []


def test_a_conversation_whose_prompt_does_not_show_its_tools_fails() -> None:
    """An environment offers tools of its own, which no recipe names."""
    blind = Renderer(byte_tokenizer(SHOWS_NO_TOOLS), tool_format="hermes")
    trajectory = hold(["Yes."], lambda: offers(), renderer=blind)
    assert trajectory.error is not None
    assert "does not contain the tools that the recipe offers (probe_tool)" in trajectory.error.message
    assert not trajectory.turns
    seeing = Renderer(byte_tokenizer(SHOWS_NO_TOOLS), tool_format="hermes", describe_tools="system")
    assert hold(["Yes."], lambda: offers(), renderer=seeing).error is None
    careless = Renderer(byte_tokenizer(SHOWS_NO_TOOLS), tool_format="hermes", unchecked=["tools shown"])
    assert hold(["Yes."], lambda: offers(), renderer=careless).error is None


def test_describing_tools_twice_or_for_nothing_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    system = "tool_calls.describe=system"
    with pytest.raises(TemplateError, match=r"shows the tools to the model itself, .*Remove the option"):
        assemble(recipe(tmp_path, models["plain"], CALCULATOR, system))
    with pytest.raises(ConfigError, match=r"tool_calls.describe has no effect without tools"):
        assemble(recipe(tmp_path, models["shows none"], "tool_format=hermes", system))


def test_a_declared_option_thinking_gives_no_note(models: dict[str, Path], tmp_path: Path) -> None:
    assert assemble(recipe(tmp_path, models["thinks"], "thinking=branch")).notes == []


@environment
async def offers(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Offers the probe tool."""
    yield Opening(messages=row.messages, tools=[TOOL])
    yield Reply(done=True)


def test_a_single_turn_gives_no_notes(models: dict[str, Path], tmp_path: Path) -> None:
    assert assemble(recipe(tmp_path, models["grows"], "limits.turns=1")).notes == []


def test_turns_that_a_recipe_does_not_have_cannot_fail(models: dict[str, Path], tmp_path: Path) -> None:
    renderer = Renderer.from_pretrained(models["grows"])
    for more, failed in (
        ((), ["user turns"]),
        ((CALCULATOR,), ["tool turns", "user turns"]),
        (("limits.turns=1",), []),
    ):
        checks = template_checks(renderer, recipe(tmp_path, models["grows"], *more))
        assert [check.name for check in checks if check.status == "fail"] == failed


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
