"""`turnwise doctor`: templates, and what is examined before a run."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support import CHATML, byte_tokenizer
from support.conversations import hold
from support.families import family_renderer, template_files
from support.templates import GROWS, NO_TOOLS, SHOWS_NO_TOOLS, STRANGE_CALLS, THINKS
from support.tiny import save_model, save_rows
from turnwise import assembly
from turnwise.chat.probes import TOOL
from turnwise.chat.renderer import Renderer
from turnwise.chat.tool_calls import format_by_name
from turnwise.config.recipe import load
from turnwise.doctor import template as template_module
from turnwise.doctor.check import Check, worst
from turnwise.doctor.conversation import cost, masked
from turnwise.doctor.credit import conserved
from turnwise.doctor.template import (
    SCENARIOS,
    Directory,
    Once,
    check_scenario,
    continuing,
    features,
    preflight,
    read_directory,
    stops,
    template_checks,
    thinking,
    tool_calls,
    unread_columns,
    vocabulary,
)
from turnwise.environments.environment import environment
from turnwise.errors import ConfigError, TemplateError
from turnwise.options.schema import OVERRIDABLE_CHECKS, Config
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS
from turnwise.runs.sampling_only import collect
from turnwise.train import assemble
from turnwise.training.fingerprint import of_tokenizer
from turnwise.types import Opening, Reply, Row, Turn

# The checks of template, tokenizer and config files: good models, and models with one error each.


PAGE = Path(__file__).parent.parent.parent / "benchmarks" / "README.md"

FILES = template_files()

GOOD = Directory(eos=2, generation=[2], rows=259, context=1024)


def renderer(template: str = CHATML, **options: object) -> Renderer:
    return Renderer(byte_tokenizer(template), **options)  # type: ignore[arg-type]


# is it append-only


def test_an_append_only_template_is_ok_for_each_kind_of_turn() -> None:
    tool, user, system = continuing(renderer())
    assert [one.status for one in (tool, user, system)] == ["ok"] * 3
    assert [one.name for one in (tool, user, system)] == ["tool turns", "user turns", "system turns"]
    assert user.text.startswith("append-only in 3 conversations (")
    assert system.text.startswith("append-only in 1 conversation (")


def test_a_template_that_changes_earlier_text_fails_with_both_texts() -> None:
    (user,) = continuing(renderer(GROWS), ["user turns"])
    assert user.status == "fail"
    assert user.text.startswith(
        "retry by user: writes different text around the answers when the conversation continues: expected "
    )
    assert "expected '\\n<|im_start|>user\\nonce-more<|im_end|>" in user.text
    assert "but got '|>\\n<|im_start|>user of many\\nonce-more<|im_end|>" in user.text
    assert "turnwise keeps the tokens that the model has seen" in user.text


def test_messages_that_are_converted_for_the_template_are_a_note() -> None:
    tool, user, _ = continuing(renderer(NO_TOOLS))
    assert (tool.status, user.status) == ("note", "ok")
    assert "so turnwise converts them: " in tool.text
    assert "tool as user" in tool.text


# thinking


def test_what_template_and_policy_do_with_reasoning_is_reported() -> None:
    plain, thinks = renderer(), renderer(THINKS)
    assert thinking(plain, None).text == "the template does not support reasoning"
    check = thinking(thinks, None)
    assert check.status == "note"
    assert (
        "leaves earlier reasoning out at messages of user, and so does a server. thinking=keep trains with earlier reasoning,"
        in check.text
    )
    assert thinking(thinks, "branch").text == (
        "thinking=branch: a new segment without earlier reasoning begins at messages of user"
    )
    assert thinking(thinks, "strip_at_user").text.endswith("begins at every user message")


@pytest.mark.parametrize("policy", ["branch", "strip_at_user"])
def test_a_policy_without_effect_is_refused(policy: str) -> None:
    found = thinking(renderer(), policy)  # type: ignore[arg-type]
    assert found.status == "fail"
    assert f"thinking={policy} has no effect" in found.text
    assert "does not support reasoning" in found.text
    assert found.text.endswith("Remove it")


def test_branch_is_refused_if_the_template_keeps_reasoning() -> None:
    keeps = CHATML.replace("{{ message.content }}{%- for call", "{# <think> #}{{ message.content }}{%- for call")
    found = thinking(renderer("{# <think></think> #}" + keeps), "branch")
    assert found.status == "fail"
    assert "keeps the reasoning of earlier turns" in found.text
    assert "or use thinking=strip_at_user" in found.text


# stop tokens


def test_stop_tokens_that_agree_are_named() -> None:
    found = stops(renderer(), GOOD)
    assert found.status == "ok"
    assert found.text == ("template '<|im_end|>' (2), tokenizer '<|im_end|>' (2), generation config '<|im_end|>' (2)")


def test_a_generation_config_without_the_stop_token_fails_with_the_fix() -> None:
    found = stops(renderer(), Directory(eos=2, generation=[0], rows=259, context=None))
    assert found.status == "fail"
    assert "would not stop after '<|im_end|>' (2). Add it to eos_token_id in generation_config.json" in found.text


def test_a_tokenizer_without_an_eos_token_is_a_note_with_the_fix() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    found = stops(Renderer(tokenizer), Directory(eos=None, generation=[], rows=259, context=None))
    assert found.status == "note"
    assert (
        "tokenizer none, generation config none: other engines stop at the tokenizer's eos_token. Set it to '<|im_end|>' (2)"
        in found.text
    )


def test_a_template_that_ends_turns_with_no_stop_token_fails() -> None:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} END\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    found = stops(Renderer(tokenizer), GOOD)
    assert found.status == "fail"
    assert (
        "the template closes a turn with ' END\\n', which is none of these tokens, so a turn would never end"
        in found.text
    )


def test_an_eos_token_that_ends_no_turn_fails() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    found = stops(Renderer(tokenizer), Directory(eos=0, generation=[], rows=259, context=None))
    assert found.status == "fail"
    assert "tokenizer '<|endoftext|>' (0), generation config none: an engine that stops at eos_token_id" in found.text
    assert (
        stops(
            Renderer(tokenizer, generation_stop_ids=[0, 2]), Directory(eos=0, generation=[0, 2], rows=259, context=1)
        ).status
        == "ok"
    )


def test_a_stop_token_inside_turns_fails() -> None:
    found = stops(renderer(generation_stop_ids=[2, 201]), Directory(eos=2, generation=[2, 201], rows=259, context=None))
    assert found.status == "fail"
    assert (
        "names '\\n' (201), which also occurs in an answer of several lines. turnwise does not stop there, but a server would "
        "cut turns in the middle. Remove it from both"
    ) in found.text


def test_an_unknown_id_in_the_generation_config_fails_and_is_named() -> None:
    found = stops(
        renderer(generation_stop_ids=[2, 99_999]), Directory(eos=2, generation=[2, 99_999], rows=259, context=None)
    )
    assert found.status == "fail"
    assert "template '<|im_end|>' (2), tokenizer" in found.text
    assert "generation config '<|im_end|>' (2), no token (99999): the tokenizer has no token 99999" in found.text
    assert "(its ids are 0 to 258), so this generation config belongs to another model" in found.text


# vocabulary and calls


def test_a_tokenizer_that_is_larger_than_the_embedding_fails() -> None:
    assert vocabulary(renderer(), GOOD).text.startswith(
        "259 tokens, 259 embedding rows, padding '<|endoftext|>' (0), context 1,024"
    )
    found = vocabulary(renderer(), Directory(eos=2, generation=[2], rows=200, context=None))
    assert found.status == "fail"
    assert "has the id 258" in found.text
    assert "embedding has 200 rows" in found.text
    assert "Use the model's own tokenizer, or model.resize_token_embeddings" in found.text


def test_an_unknown_format_of_calls_fails_only_if_there_are_tools() -> None:
    strange = renderer(STRANGE_CALLS)
    assert tool_calls(renderer(), wanted=True).status == "ok"
    assert tool_calls(strange, wanted=False).status == "note"
    found = tool_calls(strange, wanted=True)
    assert found.status == "fail"
    assert "in a format that cannot be read back" in found.text
    assert "tool_format=hermes" in found.text


# a conversation, and its encoded tokens


def test_the_mask_is_shown_run_by_run() -> None:
    found = masked(renderer(), "keep")
    assert found.status == "ok"
    assert [run.turn for run in found.runs] == [-1, 0, -1, 1]
    assert [run.weight for run in found.runs] == [0.0, 1.0, 0.0, 1.0]
    context, first, answer, last = (run.text for run in found.runs)
    assert context.endswith("How old is the tree?<|im_end|>\n<|im_start|>assistant\n")
    assert first == '<tool_call>\n{"name": "probe_tool", "arguments": {"text": "the tree"}}\n</tool_call><|im_end|>'
    assert answer.startswith("\n<|im_start|>user<tool_response>\nfound: the tree is 12 years old")
    assert last == "Yes, it is 12 years old.<|im_end|>"
    trained = sum(len(run.text.replace("<|im_end|>", "#")) for run in found.runs if run.turn >= 0)
    assert found.text.startswith(f"{trained} of ")


def test_turns_that_the_loss_mask_leaves_out_are_shown() -> None:
    found = masked(renderer(), "keep", TURN_WEIGHTINGS["last_turn"])
    assert [run.weight for run in found.runs] == [0.0, 0.0, 0.0, 1.0]
    assert found.text.endswith("loss_mask leaves out turn 0")


def test_a_completion_that_the_template_writes_differently_is_a_note() -> None:
    text = "{{ message.content if loop.last else message.content | replace('It is', 'it is') }}"
    found = masked(renderer(NO_TOOLS.replace("{{ message.content }}", text)), "keep")
    assert found.status == "note"
    assert found.text.startswith("the tokens differ from the tokens that the template writes: completion, tokens ")


def test_a_new_segment_shows_its_sampled_tokens_once() -> None:
    found = masked(renderer(THINKS), "strip_at_user")
    assert found.status == "ok"
    assert sorted(run.turn for run in found.runs if run.turn >= 0) == [0, 1]


def test_a_late_turn_encodes_as_few_tokens_as_an_early_turn() -> None:
    found = cost(renderer(), "keep")
    assert found.status == "ok"
    numbers = re.match(
        r"40 turns: ([\d,]+) tokens encoded, ([\d,]+) tokens in the segments \(ratio (0\.\d\d)\); "
        r"turn 5 encodes (\d+) tokens, turn 200 encodes (\d+)$",
        found.text,
    )
    assert numbers is not None
    # one token a byte: "Are you sure, for the 199. time?" has two digits more than "for the 4. time?"
    assert int(numbers[5]) == int(numbers[4]) + 2


def test_rewards_reach_the_loss_for_each_policy() -> None:
    for template, policy in ((CHATML, "keep"), (THINKS, "keep"), (THINKS, "branch"), (THINKS, "strip_at_user")):
        found = conserved(renderer(template), policy)  # type: ignore[arg-type]
        assert found.status == "ok", found.text
    assert found.text.startswith("a total reward of 3.75 in 3 conversations with ")


# real templates


@pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_real_templates_get_the_verdict_that_the_documentation_has_of_them(path: Path) -> None:
    found = family_renderer(path)
    directory = Directory(
        eos=found.tokenizer.eos_token_id, generation=list(found.stop_token_ids), rows=None, context=None
    )
    turns = {one.name: one for one in continuing(found)}
    others = [
        features(found),
        thinking(found, None),
        stops(found, directory),
        tool_calls(found, wanted=False),
        vocabulary(found, directory),
        masked(found, "keep"),
        conserved(found, "keep"),
    ]
    assert worst([one.status for one in others]) != "fail", [one.text for one in others if one.status == "fail"]

    cells = documented(path.stem)
    for name, scenarios in KINDS.items():
        wrong = {check_scenario(found, BY_NAME[scenario]).harmless for scenario in scenarios if "≠" in cells[scenario]}
        if not wrong and all(cells[scenario] == "=" for scenario in scenarios):
            assert turns[name].status == "ok", turns[name].text
        elif not wrong:
            assert turns[name].status == "note"
            assert "so turnwise converts them: " in turns[name].text
        elif turns[name].status == "ok":
            raise AssertionError(f"{name}: {cells}")
    later = [scenario for scenario in ("tool round", "three tool rounds", "retry by user") if "≠" in cells[scenario]]
    serious = [scenario for scenario in later if not check_scenario(found, BY_NAME[scenario]).harmless]
    assert ("fail" in [one.status for one in turns.values()]) == bool(serious)
    strips = cells["leaves reasoning out at"]
    assert ("leaves earlier reasoning out" in others[1].text) == (strips != "–")


BY_NAME = {one.name: one for one in SCENARIOS}

KINDS = {
    "tool turns": ("tool round", "three tool rounds", "parallel calls", "words and a call"),
    "user turns": ("single turn", "retry by user"),
    "system turns": ("retry by system",),
}


def documented(name: str) -> dict[str, str]:
    """A template's row of benchmarks/README.md, by the names of its columns."""
    section = PAGE.read_text(encoding="utf-8").partition("## chat templates")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    names = next(row for row in rows if row[0] == "template")  # other tables stand before
    return next(dict(zip(names, row, strict=True)) for row in rows if name in row[0].split(", "))


# The checks at the start of a run: errors in both commands, and notes.


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
    assert {*made, "mask", "credit", "rows", "memory"} - optional == set(OVERRIDABLE_CHECKS)


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


def test_what_an_environment_shows_of_the_tools_is_known_in_conversations_only(
    models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "user.py").write_text(
        "from turnwise import ScriptedUser\n\ndef user():\n    return ScriptedUser(['Yes?'])\n"
    )
    own = (CALCULATOR, "tool_format=hermes", f"environment={tmp_path}/user.py:user")
    for words, then in (((), "fails"), (("override_checks=[tools shown]",), "is allowed by override_checks")):
        config = recipe(tmp_path, models["shows none"], *own, *words)
        (note,) = [one for one in preflight(config, assembly.renderer(config)) if "shown" in one]
        assert note.startswith("tools shown: the prompt does not contain the tools that the recipe offers (calculator)")
        assert note.endswith(f"A conversation whose prompt does not show its tools {then}")


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


@pytest.mark.slow
def test_checks_that_passed_are_made_again_for_another_tokenizer_template_or_option_only(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the starts in one process, wherever the model is."""
    made: list[object] = []

    def counted(*given: Any) -> Check:
        made.append(given)
        return masked(*given)

    monkeypatch.setattr(template_module, "masked", counted)
    copied = shutil.copytree(models["plain"], tmp_path / "copied")

    def starts(*changes: Callable[[Any], object], model: Path = models["plain"], **options: Any) -> list[int]:
        """How often the check was made in each of two starts."""
        numbers: list[int] = []
        for _ in range(2):
            tokenizer = Renderer.from_pretrained(model).tokenizer
            for change in changes:
                change(tokenizer)
            made.clear()
            config, one = recipe(tmp_path, model), Renderer(tokenizer, **options)
            preflight(config, one, training=True, tokenizer=of_tokenizer(tokenizer))
            numbers.append(len(made))
        return numbers

    def grow(tokenizer: Any) -> None:
        tokenizer.add_tokens(["<new>"])

    def rewrite(tokenizer: Any) -> None:
        tokenizer.chat_template += "{# changed #}"

    assert starts() == [1, 0]
    assert starts(model=copied) == [0, 0]
    assert starts(sanity="off") == [1, 0]
    assert starts(grow) == [1, 0]
    assert starts(rewrite) == [1, 0]
    assert starts(grow, rewrite) == [1, 0]
    assert starts(unchecked=("round trip",)) == [1, 0]
    own = format_by_name("hermes")
    assert starts(tool_format=own) == [1, 1]  # nothing says what code of a user does
    assert Once.of(renderer().with_tool_format(own), "of the tokenizer").key is None
    assert Once.of(renderer(), None).key is None
