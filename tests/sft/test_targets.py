"""What a model would have had to say: the tokens of a conversation from a file are those of the rollout that said the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import RENDERER, a_row, hold, scripted, spoken
from support.families import family_renderer, template_files
from turnwise.chat.renderer import Renderer
from turnwise.data.conversations import read_conversations
from turnwise.doctor.template import SCENARIOS, Scenario, check_scenario
from turnwise.environments.environment import EnvironmentFactory, environment
from turnwise.errors import TemplateError
from turnwise.sft.replay import lines, replay, rounds
from turnwise.types import Message, Opening, Reply, Row, ToolSchema, Trajectory, Turn

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
        lines(renderer, a_row("Hi").messages, [(message, [])])
    assert told in str(error.value)


def test_a_row_that_cannot_be_written_breaks_alone() -> None:
    renderer = Renderer(byte_tokenizer(NO_CALLS))
    bad, good = Row(id="bad", messages=[*a_row("Hi").messages, CALLING]), a_conversation(a_row("Hi").messages[0], "Yo")
    broken, whole = asyncio.run(replay([bad, good], renderer))
    assert broken.error is not None
    assert (broken.error.kind, broken.segments, whole.error) == ("row", [], None)
    assert spoken(whole.segments[0])[-1] == (0, "Yo<|im_end|>")
