"""What becomes of thoughts when a conversation goes on: kept, left out where the template leaves them out, or at every user."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import a_row, call, hold, scripted, spoken
from support.families import family_renderer, template_files
from turnwise.chat.renderer import Renderer
from turnwise.environments.environment import environment, user_message
from turnwise.environments.users import ScriptedUser
from turnwise.options.algorithm import LossSection
from turnwise.training.batch import pack
from turnwise.types import Message, Opening, Reply, Row, Trajectory, Turn

_HEAD = "{%- for message in messages %}{%- set content = message.content or '' %}"
_BODY = (
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ content }}"
    "{%- for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FORGET = "{%- set content = content.split('</think>')[-1] %}"
QWQ = _HEAD + "{%- if message.role == 'assistant' and not loop.last %}" + _FORGET + "{%- endif %}" + _BODY
"""QwQ's rule: all thoughts but those of the last message go."""
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + _HEAD
    + "{%- if message.role == 'assistant' and loop.index0 < ns.last %}"
    + _FORGET
    + "{%- endif %}"
    + _BODY
)
"""Qwen3's rule: the thoughts before the last user message go; a tool's answer is no user message."""
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
# the seven messages of document 4
SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant."}
ASKED: Message = {"role": "user", "content": "What is 2 + 2?"}
WHY: Message = {"role": "user", "content": "Explain why."}
FOUND: Message = {
    "role": "tool",
    "tool_call_id": "call_0",
    "name": "search",
    "content": "The sum of two and two is four because it is a basic arithmetic operation.",
}
SAID = (
    "<think>user asked about a simple math question.</think> 2 + 2 = 4.",
    "<think>user wants to know the reasoning behind the answer. Search for a good explanation</think>"
    + call("search", '{"query": "Why is 2 + 2 = 4?"}'),
    "<think>The tool provided a good explanation.</think>"
    "The sum of two and two is four because it is a basic arithmetic operation.",
)


@environment
async def the_document(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """The other side of document 4's conversation."""
    yield Opening(messages=[SYSTEM, ASKED], tools=[SEARCH])
    turn = yield Reply(messages=[WHY])
    assert [one.name for one in turn.calls] == ["search"]
    yield Reply(messages=[FOUND])
    yield Reply(done=True)


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def one_pass(renderer: Renderer, messages: list[Message], *, cue: bool = False) -> list[int]:
    """The ids of a conversation rendered and encoded at once by the tokenizer alone."""
    text = renderer.tokenizer.apply_chat_template(messages, tools=[SEARCH], add_generation_prompt=cue, tokenize=False)
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def document(template: str, thinking: Any) -> tuple[Renderer, Trajectory]:
    renderer = Renderer(byte_tokenizer(template), unchecked=["tools shown"])
    trajectory = hold(list(SAID), the_document, renderer=renderer, thinking=thinking)
    assert trajectory.error is None, trajectory.error
    return renderer, trajectory


def trained(trajectory: Trajectory) -> Iterator[tuple[int, list[int]]]:
    """Of each turn, the tokens that are trained on, wherever they stand."""
    for turn in trajectory.turns:
        yield (
            turn.index,
            [
                token
                for segment in trajectory.segments
                for token, place in zip(segment.token_ids, segment.turn, strict=True)
                if place == turn.index
            ],
        )


def test_keep_goes_on_with_everything_in_one_segment() -> None:
    for template in (QWEN3, QWQ):
        _, trajectory = document(template, "keep")
        (segment,) = trajectory.segments
        assert [text for turn, text in spoken(segment) if turn >= 0] == [f"{text}<|im_end|>" for text in SAID]
        assert trajectory.template_mismatch is None


def test_branch_by_qwen3s_rule_begins_a_segment_where_a_user_speaks_and_none_where_a_tool_answers() -> None:
    renderer, trajectory = document(QWEN3, "branch")
    first, second = trajectory.segments
    assert list(first.token_ids) == one_pass(renderer, [SYSTEM, ASKED, assistant(SAID[0])])[: len(first)]
    assert spoken(first)[-1] == (0, SAID[0] + "<|im_end|>")
    # what serving would see: the first thought is gone, the second stays while the tool answers
    whole = one_pass(renderer, [SYSTEM, ASKED, assistant(SAID[0]), WHY, assistant(SAID[1]), FOUND, assistant(SAID[2])])
    assert list(second.token_ids) == whole[: len(second)]
    assert renderer.decode(whole[len(second) :]) == "\n"
    text = renderer.decode(second.token_ids)
    assert "simple math" not in text
    assert "Search for a good explanation" in text
    assert [turn for turn, _ in spoken(second)] == [-1, 1, -1, 2]
    assert trajectory.template_mismatch is None


def test_branch_by_qwqs_rule_begins_a_segment_at_every_answer() -> None:
    renderer, trajectory = document(QWQ, "branch")
    history = [SYSTEM, ASKED, assistant(SAID[0]), WHY, assistant(SAID[1]), FOUND, assistant(SAID[2])]
    assert len(trajectory.segments) == 3
    for segment, length in zip(trajectory.segments, (3, 5, 7), strict=True):
        assert list(segment.token_ids) == one_pass(renderer, history[:length])[: len(segment)]
        prompt = [token for token, turn in zip(segment.token_ids, segment.turn, strict=True) if turn < 0]
        assert prompt == one_pass(renderer, history[: length - 1], cue=True)
    assert [[turn for turn, _ in spoken(segment)] for segment in trajectory.segments] == [[-1, 0], [-1, 1], [-1, 2]]


@pytest.mark.parametrize(
    "path", [path for path in template_files() if path.stem == "qwen3"], ids=lambda path: path.stem
)
def test_the_template_that_qwen3_ships_branches_as_its_rule_says(path: Any) -> None:
    renderer = family_renderer(path)
    said = [text.replace("<think>", "<think>\n").replace("</think>", "\n</think>\n\n") for text in SAID]
    trajectory = hold(scripted(said, renderer=renderer), the_document, renderer=renderer, thinking="branch")
    assert trajectory.error is None
    history = [SYSTEM, ASKED, assistant(said[0]), WHY, assistant(said[1]), FOUND, assistant(said[2])]
    assert len(trajectory.segments) == 2
    last = trajectory.segments[1]
    assert list(last.token_ids) == one_pass(renderer, history)[: len(last)]
    assert renderer.decode(one_pass(renderer, history)[len(last) :]) == "\n"


def test_strip_at_user_begins_a_segment_at_every_user_message_whatever_the_template_does() -> None:
    plain = _HEAD + _BODY + "{# <think> #}"  # a template that knows of thoughts and leaves none out
    renderer, trajectory = document(plain, "strip_at_user")
    assert renderer.profile.kept_reasoning.stripped_before == ()
    _, second = trajectory.segments
    stripped = assistant("2 + 2 = 4.")
    assert (
        list(second.token_ids)
        == one_pass(renderer, [SYSTEM, ASKED, stripped, WHY, assistant(SAID[1]), FOUND, assistant(SAID[2])])[
            : len(second)
        ]
    )
    assert document(plain, "branch")[1].segments[1:] == []  # and where nothing is left out, branch is keep


@pytest.mark.parametrize("thinking", ["keep", "branch", "strip_at_user"])
@pytest.mark.parametrize("template", [QWEN3, QWQ], ids=["Qwen3", "QwQ"])
def test_whatever_the_policy_each_sampled_token_is_trained_once(template: str, thinking: Any) -> None:
    renderer, trajectory = document(template, thinking)
    for index, tokens in trained(trajectory):
        assert tokens == [*renderer.encode(SAID[index]), renderer.stop_token_ids[0]]
    trajectory.reward, trajectory.advantages = 1.0, [1.0] * 3
    for normalizer in ("token", "trajectory"):
        batch = pack([trajectory], loss=LossSection(normalizer=normalizer))
        targets = [token for micro in batch.micro_batches for token in micro.targets.token_N.tolist()]
        assert sorted(targets) == sorted(token for _, tokens in trained(trajectory) for token in tokens)
        weight = sum(float(micro.targets.weight_N.sum()) for micro in batch.micro_batches)
        assert weight == pytest.approx(1.0)  # a trajectory weighs the same in one segment and in three


def test_a_conversation_without_thoughts_never_branches() -> None:
    renderer = Renderer(byte_tokenizer(QWQ))
    trajectory = hold(["4", "5", "6"], lambda: ScriptedUser(["No.", "No."]), renderer=renderer, thinking="branch")
    assert len(trajectory.segments) == 1


def test_a_thought_that_the_cue_has_opened_is_left_out_too() -> None:
    opens = QWQ.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    renderer = Renderer(byte_tokenizer(opens))
    trajectory = hold(
        ["Hm, four.</think>4", "Hm, five.</think>5"],
        lambda: ScriptedUser(["No."]),
        renderer=renderer,
        thinking="branch",
        row=a_row("2+2?"),
    )
    assert [turn.reasoning for turn in trajectory.turns] == ["Hm, four.", "Hm, five."]
    assert [spoken(segment) for segment in trajectory.segments] == [
        [
            (-1, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
            (0, "Hm, four.</think>4<|im_end|>"),
        ],
        [
            (
                -1,
                "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
                "<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n<think>\n",
            ),
            (1, "Hm, five.</think>5<|im_end|>"),
        ],
    ]
    assert trajectory.template_mismatch is None


def test_a_new_segment_counts_against_the_context_and_not_the_sum_of_all() -> None:
    from turnwise.rollout.context import Limits

    renderer = Renderer(byte_tokenizer(QWQ))
    long = "<think>" + "so " * 60 + "</think>4"
    said = [long] * 4
    limits = Limits(turns=4, tokens_per_turn=300, context=420)
    kept = hold(said, lambda: ScriptedUser(["No."] * 3), renderer=renderer, thinking="keep", limits=limits)
    branched = hold(said, lambda: ScriptedUser(["No."] * 3), renderer=renderer, thinking="branch", limits=limits)
    assert (kept.stop, len(kept.turns)) == ("context", 1) or len(kept.turns) < 4
    assert (branched.stop, len(branched.turns), len(branched.segments)) == ("done", 4, 4)


def test_the_answer_is_said_without_the_thought_and_the_text_has_both() -> None:
    @environment
    async def listens(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        turn = yield Opening(messages=row.messages)
        yield user_message(turn.message["content"] + "|" + turn.reasoning + "|" + turn.text)

    trajectory = hold(["<think>Hm.</think>4", "5"], listens, renderer=Renderer(byte_tokenizer(QWQ)))
    assert trajectory.messages[2]["content"] == "4|Hm.|<think>Hm.</think>4"
    assert trajectory.messages[1]["reasoning_content"] == "Hm."
