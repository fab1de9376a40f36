"""A written turn comes back unchanged from template, tokens and parser, or it is said what was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import CHATML, byte_tokenizer, marked_tokenizer
from support.families import family_renderer, template_files
from support.templates import (
    CALLS_FIRST,
    CHANNEL_NAMES,
    CHANNELS,
    CLOSES_NO_REASONING,
    MARKED_ANSWERS,
    THINKS,
    TWO_ENDS,
    WORDS_INSIDE_MARKS,
)
from turnwise.chat.probes import TOOL
from turnwise.chat.renderer import Renderer, lost_in_round_trip
from turnwise.doctor.template import round_trip
from turnwise.errors import TemplateError

FILES = template_files()
ENDS = {
    MARKED_ANSWERS: "<|END_OF_TURN_TOKEN|>",
    CLOSES_NO_REASONING: "[e~[",
    WORDS_INSIDE_MARKS: "<|eot|>",
    CHANNEL_NAMES: "<|eot|>",
    CHANNELS: "<|end_of_msg|>",
    CALLS_FIRST: "<turn|>",
}


def renderer(template: str) -> Renderer:
    return Renderer(marked_tokenizer(template, eos=ENDS[template]))


def read(known: Renderer, text: str, *, opening: str = "", tools: bool = True) -> dict[str, Any]:
    """The parts of a sampled turn."""
    turn = known.turn_parser.parse(known.encode(text), tools=[TOOL] if tools else (), reasoning_opening=opening)
    calls = [(call.name, dict(call.arguments)) for call in turn.calls if call.error is None]
    return {"words": turn.message["content"], "reasoning": turn.reasoning, "calls": calls}


# the closing mark of reasoning


def test_the_closing_mark_is_what_an_answer_and_a_call_share_behind_reasoning() -> None:
    known = renderer(MARKED_ANSWERS)
    assert known.profile.reasoning.marks.own == (("<|START_THINKING|>", "<|END_THINKING|>"),)
    call = (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "probe_tool", "parameters": {"text": "x"}}]<|END_ACTION|>'
    )
    end = "<|END_OF_TURN_TOKEN|>"
    opened = "<|START_THINKING|>"
    assert read(known, f"Hm.<|END_THINKING|>{call}{end}", opening=opened) == {
        "words": "",
        "reasoning": "Hm.",
        "calls": [("probe_tool", {"text": "x"})],
    }
    both = read(known, f"Hm.<|END_THINKING|><|START_TEXT|>Look.<|END_TEXT|>{call}{end}", opening=opened)
    assert both == {"words": "Look.", "reasoning": "Hm.", "calls": [("probe_tool", {"text": "x"})]}


def test_a_closing_mark_without_reasoning_is_no_part_of_the_answer() -> None:
    known = renderer(CLOSES_NO_REASONING)
    assert known.profile.reasoning.marks.own == (("<mm:think>", "</mm:think>"),)
    assert read(known, "</mm:think>It is twelve.[e~[", tools=False)["words"] == "It is twelve."
    assert read(known, "<mm:think>Hm.</mm:think>It is twelve.[e~[", tools=False) == {
        "words": "It is twelve.",
        "reasoning": "Hm.",
        "calls": [],
    }
    # what `strip_at_user` puts into a new segment
    assert known.profile.reasoning.without_reasoning("<mm:think>Hm.</mm:think>It is twelve.") == "It is twelve."


def test_the_counterpart_of_the_opening_mark_closes_and_the_rest_is_a_header() -> None:
    marks = renderer(CHANNELS).profile.reasoning.marks
    assert marks.own == (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),)
    assert "<|open|>response<|sep|>" in marks.headers


# marks around answers


@pytest.mark.parametrize(
    ("template", "sampled", "opening"),
    [
        (MARKED_ANSWERS, "Hm.<|END_THINKING|><|START_TEXT|>It is twelve.<|END_TEXT|>", "<|START_THINKING|>"),
        (CHANNELS, "Hm.<|close|>think<|sep|><|open|>response<|sep|>It is twelve.<|close|>response<|sep|>"
         "<|close|>message<|sep|>", "<|open|>think<|sep|>"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [False, True])
def test_a_mark_between_the_answer_and_the_stop_token_is_no_part_of_the_answer(
    template: str, sampled: str, opening: str, tools: bool
) -> None:
    known = renderer(template)
    if tools and template == CHANNELS:
        pytest.skip("this template writes no calls")
    assert read(known, sampled + ENDS[template], opening=opening, tools=tools)["words"] == "It is twelve."


def test_a_template_without_reasoning_and_tools_has_marks_around_answers_too() -> None:
    known = Renderer(marked_tokenizer(TWO_ENDS, eos="<|endoftext|>"))
    assert not known.profile.reasoning.supported
    assert known.profile.turn.answer_closing == "<|end|>"
    words = read(known, "It is twelve.<|end|><|endoftext|>", tools=False)["words"]
    assert words == "It is twelve."
    # what the template is given in one pass has the marks once
    turn = known.turn_parser.parse(known.encode("It is twelve.<|end|><|endoftext|>"))
    assert known.to_template_message(turn)["content"] == "It is twelve."
    # words that only look alike stay
    assert read(known, "It is <|end|> twelve.<|endoftext|>", tools=False)["words"] == "It is <|end|> twelve."


# what is lost


@pytest.mark.parametrize("template", [MARKED_ANSWERS, CLOSES_NO_REASONING])
def test_turns_of_every_kind_come_back(template: str) -> None:
    assert lost_in_round_trip(renderer(template), tools=True) == []


@pytest.mark.parametrize("template", [CHATML, THINKS])
def test_turns_of_usual_templates_come_back(template: str) -> None:
    known = Renderer(byte_tokenizer(template), tool_format="hermes")
    assert lost_in_round_trip(known, tools=True) == []
    assert (
        round_trip(known, tools=False).text
        == "answers and reasoning come back unchanged from template, tokens and parser"
    )


@pytest.mark.parametrize(
    ("template", "lost"),
    [(WORDS_INSIDE_MARKS, {"words and a call"}), (CHANNEL_NAMES, {"words and a call", "two calls"})],
)
def test_a_call_that_is_lost_beside_words_is_found(template: str, lost: set[str]) -> None:
    known = renderer(template)
    found = lost_in_round_trip(known, tools=True)
    assert {loss.kind for loss in found} == lost
    assert not any(loss.by_template for loss in found)
    assert "the call is read as no call" in str(found[0])
    assert "instead of 'It is twelve.'" in str(found[0])
    check = round_trip(known, tools=True)
    assert check.status == "fail"
    assert "words and a call: the model writes '" in check.text
    assert round_trip(known, tools=False).status == "ok"


def test_words_that_the_template_writes_behind_the_call_are_a_note() -> None:
    check = round_trip(renderer(CALLS_FIRST), tools=True)
    assert check.status == "note"
    assert check.text.startswith(
        "words and a call: the template writes the words behind the call. turnwise keeps the sampled"
    )


BY_TEMPLATE = {
    "deepseek_r1_distill": "leaves out the call",
    "gemma4": "writes the words behind the call",
    "diffusion_gemma": "writes the words behind the call",
    "gptoss": "writes the words as reasoning",
    "llama3_1": "leaves out the words",
    "llama3_2": "leaves out the words",
    "muse_glimmer": "leaves out the words",
}
"""What templates of real models make of words beside a call, by the beginning of their names."""


@pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_no_turn_of_a_real_template_is_lost(path: Path) -> None:
    known = family_renderer(path)
    try:
        found = lost_in_round_trip(known, tools=True)
    except TemplateError:
        found = lost_in_round_trip(known, tools=False)  # it writes no calls
    why = next((text for name, text in BY_TEMPLATE.items() if path.stem.startswith(name)), None)
    assert [str(loss) for loss in found] == ([] if why is None else [f"words and a call: the template {why}"])
