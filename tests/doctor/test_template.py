"""The checks of template, tokenizer and config files: good models, and models with one error each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import CHATML, byte_tokenizer
from support.families import family_renderer, template_files
from support.templates import GROWS, NO_TOOLS, STRANGE_CALLS, THINKS
from turnwise.chat.renderer import Renderer
from turnwise.doctor.check import worst
from turnwise.doctor.conversation import cost, masked
from turnwise.doctor.credit import conserved
from turnwise.doctor.template import (
    SCENARIOS,
    Directory,
    check_scenario,
    continuing,
    features,
    stops,
    thinking,
    tool_calls,
    vocabulary,
)
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS

PAGE = Path(__file__).parent.parent.parent / "docs" / "templates.md"
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
    """A template's row of docs/templates.md, by the names of its columns."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    return next(dict(zip(rows[0], row, strict=True)) for row in rows if row[0] == name)
