"""`thinking: branch` shows the model what a server shows it, held against `apply_chat_template` and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import hold, scripted
from support.families import family_renderer, template_files
from turnwise.chat.probes import TOOL
from turnwise.chat.renderer import Renderer
from turnwise.chat.sanity_check import SanityCheck, SegmentMessages
from turnwise.environments.environment import environment
from turnwise.sft.replay import lines
from turnwise.types import Message, Opening, Reply, Row, Segment, Trajectory, Turn

FILES = {path.stem: path for path in template_files()}
real = pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")
ASKED: Message = {"role": "user", "content": "Five and five?"}
MORE: Message = {"role": "user", "content": "Are you sure?"}
ANSWER: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "10"}


@environment
async def asks_back(
    row: Row, answers: Sequence[Sequence[Message]], tools: bool
) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user, and a tool where `answers` has its messages."""
    _ = yield Opening(messages=[ASKED], tools=[TOOL] if tools else [])
    for messages in answers:
        _ = yield Reply(messages=messages)
    yield Reply(done=True)


def held(renderer: Renderer, said: list[str], answers: list[list[Message]], tools: bool = False) -> Trajectory:
    trajectory = hold(
        scripted(said, renderer=renderer),
        lambda: asks_back(answers=answers, tools=tools),
        renderer=renderer,
        thinking="branch",
    )
    assert trajectory.error is None, trajectory.error
    return trajectory


def prompts(trajectory: Trajectory) -> list[list[int]]:
    """What the model was shown before each turn."""
    return [
        list(segment.token_ids[: segment.turn.index(turn)])
        for segment in trajectory.segments
        for turn in sorted({one for one in segment.turn if one >= 0})
    ]


def served(renderer: Renderer, trajectory: Trajectory) -> list[list[int]]:
    """What a server shows it: the recorded messages before each turn, in one pass of the tokenizer alone."""
    tools: Any = list(trajectory.tools) or None
    places = [place for place, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    found: list[list[int]] = []
    for place in places:
        text = renderer.tokenizer.apply_chat_template(
            trajectory.messages[:place], tools=tools, add_generation_prompt=True, tokenize=False
        )
        found.append(renderer.tokenizer.encode(text, add_special_tokens=False))
    return found


# a server shows the thought between the marks only; how the model breaks its lines is its own
EMPTY: Message = {"role": "assistant", "content": "<think>\n\n</think>\n\nIt is ten."}
FULL: Message = {"role": "assistant", "content": "It is ten.", "reasoning_content": "Hm."}
BARE: Message = {"role": "assistant", "content": "It is ten."}
SAID = {"an empty thought": EMPTY, "a thought": FULL, "no thought": BARE}
THINKERS = ["qwen3", "qwen3_training", "glm4moe", "glm4moe_training", "lfm2_2_5_v2", "gemma4"]
CUES = [
    "nemotron_3_nano",
    "qwen3_6",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_8",
    "nemotron_3_super",
    "deepseek_r1_distill",
]


def as_lines(renderer: Renderer, rounds: list[tuple[Message, list[Message]]], tools: bool = False) -> list[str]:
    """What the model has to sample, the token that ends each turn left off where it is the first stop token."""
    return lines(renderer, [ASKED], rounds, [TOOL] if tools else [])


@real
@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("stem", [*THINKERS, *CUES])
def test_every_turn_sees_the_prompt_that_serving_makes_of_the_recorded_messages(stem: str, said: str) -> None:
    renderer = family_renderer(FILES[stem])
    if said == "an empty thought" and stem not in ("qwen3", "qwen3_training", "qwen3_5_nothink"):
        pytest.skip("this template writes no such thought")
    first = [EMPTY["content"]] * 3
    if said != "an empty thought":
        first = as_lines(renderer, [(SAID[said], [MORE]), (SAID[said], [MORE]), (SAID[said], [])])
    trajectory = held(renderer, first, [[MORE], [MORE]])
    assert prompts(trajectory) == served(renderer, trajectory)
    assert trajectory.template_mismatch is None


@real
@pytest.mark.parametrize(
    "stem", ["qwen3", "qwen3_training", "glm4moe", "glm4moe_training", "nemotron_3_nano", "qwen3_6", "gemma4"]
)
def test_a_call_that_was_thought_about_stays_a_call_in_the_next_segment(stem: str) -> None:
    renderer = family_renderer(FILES[stem])
    calls = [{"id": "call_0", "type": "function", "function": {"name": "probe_tool", "arguments": {"text": "5+5"}}}]
    call: Message = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls}
    said = as_lines(renderer, [(call, [ANSWER]), (FULL, [MORE]), (FULL, [])], tools=True)
    trajectory = held(renderer, said, [[ANSWER], [MORE]], tools=True)
    assert [len(turn.calls) for turn in trajectory.turns] == [1, 0, 0]
    assert prompts(trajectory) == served(renderer, trajectory)
    assert trajectory.template_mismatch is None


def test_the_check_finds_a_prompt_that_serving_would_not_show() -> None:
    template = (
        "{%- for message in messages %}{%- set content = message.content %}"
        "{%- if message.role == 'assistant' and not loop.last %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
        "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(byte_tokenizer(template))
    kept = "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n"
    back = "<|im_start|>user\nNo.<|im_end|><|im_start|>assistant\n"
    segment = Segment()
    turns = {0: "<think>Hm.</think>4<|im_end|>", 1: "5<|im_end|>"}
    for turn, text in ((-1, kept), (0, turns[0]), (-1, back), (1, turns[1])):
        ids = renderer.encode(text)
        segment.token_ids.extend(ids)
        segment.turn.extend([turn] * len(ids))
    messages: list[Message] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>Hm.</think>4"},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "5"},
    ]
    check = SanityCheck(renderer)
    assert (
        check.compare(SegmentMessages(segment=segment, messages=messages), as_served=False) is None
    )  # the policy keeps thoughts
    found = check.compare(SegmentMessages(segment=segment, messages=messages), as_served=True)
    assert found is not None
    assert found.kind == "completion"
    assert "completion, tokens" in found.message
    assert "<think>Hm.</think>" in found.message
