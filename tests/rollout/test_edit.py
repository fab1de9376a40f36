"""`Reply.edit`: the end of the model's last turn is replaced, and the conversation continues behind the turn."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from support import merging_tokenizer
from support.conversations import STOP, Says, call, hold, scripted, spoken
from turnwise.chat.renderer import Renderer
from turnwise.environments.environment import environment
from turnwise.types import Edit, Opening, Reply, Resume, Row, Trajectory, Turn

ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
MORE = "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
ASK_MORE: list[dict[str, Any]] = [{"role": "user", "content": "More"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@environment
async def edits(row: Row, *replies: Reply) -> AsyncGenerator[Opening | Reply, Turn]:
    yield Opening(messages=row.messages, tools=[TOOL])
    for reply in replies:
        yield reply


def edited(*said: str, replies: list[Reply], **table: Any) -> Trajectory:
    return hold(Says(*said), lambda: edits(*replies), **table)


def test_the_kept_tokens_are_sampled_and_the_rest_is_context() -> None:
    edit = Edit(keep=8, add="!")
    trajectory = edited("It is 5.  ", "Yes.", replies=[Reply(edit=edit, messages=ASK_MORE), Reply(done=True)])
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert spoken(segment)[1:] == [(0, "It is 5."), (-1, f"!<|im_end|>\n{MORE}"), (1, "Yes.<|im_end|>")]
    kept = [logprob for logprob, turn in zip(segment.logprobs, segment.turn, strict=True) if turn == 0]
    assert kept == [-(n + 1) / 8 for n in range(8)]
    assert [message["content"] for message in trajectory.messages] == ["Hi", "It is 5.!", "More", "Yes."]
    first = trajectory.turns[0]
    # the turn itself is as it was sampled, and no later turn continues it
    assert (first.text, first.message["content"], first.kept_tokens) == ("It is 5.  ", "It is 5.  ", None)
    assert trajectory.template_mismatch is None  # the template writes these tokens for these messages


def test_without_added_text_the_template_ends_the_turn() -> None:
    trajectory = edited("Five.\n", "Yes.", replies=[Reply(edit=Edit(keep=5), messages=ASK_MORE), Reply(done=True)])
    assert spoken(trajectory.segments[0])[1:3] == [(0, "Five."), (-1, f"<|im_end|>\n{MORE}")]
    assert trajectory.template_mismatch is None


def test_an_edit_of_every_turn() -> None:
    replies = [Reply(edit=Edit(keep=1, add=str(n)), messages=ASK_MORE) for n in range(3)]
    trajectory = edited("ab", "cd", "ef", "gh", replies=[*replies, Reply(done=True)])
    assert trajectory.error is None
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == ["a", "c", "e", "gh<|im_end|>"]
    assert [message["content"] for message in trajectory.messages[1::2]] == ["a0", "c1", "e2", "gh"]
    assert trajectory.template_mismatch is None


def test_a_token_that_is_cut_in_two_becomes_context() -> None:
    renderer = Renderer(merging_tokenizer())
    engine = scripted(["the theme", "Yes."], renderer=renderer)
    replies = [Reply(edit=Edit(keep=6), messages=ASK_MORE), Reply(done=True)]
    trajectory = hold(engine, lambda: edits(*replies), renderer=renderer)
    assert trajectory.error is None
    runs = spoken(trajectory.segments[0], renderer)
    assert runs[1][1] + runs[2][1] == f"the th<|im_end|>\n{MORE}"
    assert trajectory.messages[1]["content"] == "the th"


def test_calls_that_are_cut_off_are_in_no_message_and_ids_stay_unique() -> None:
    said = "Now." + call("add")
    replies = [Reply(edit=Edit(keep=4), messages=ASK_MORE), Reply(done=True)]
    trajectory = edited(said, said, replies=replies)
    assert "tool_calls" not in trajectory.messages[1]
    assert trajectory.messages[3]["tool_calls"][0]["id"] == "call_0"
    kept = edited(said + " ", said, replies=[Reply(edit=Edit(keep=len(said)), messages=ASK_MORE), Reply(done=True)])
    assert [message["tool_calls"][0]["id"] for message in kept.messages[1::2]] == ["call_0", "call_1"]


def test_numbers_of_replies_are_added_up() -> None:
    replies = [Reply(messages=ASK_MORE, metrics={"a": 1, "b": 0.5}), Reply(done=True, metrics={"a": 2.0})]
    assert edited("x", "y", replies=replies).metrics == {"a": 3.0, "b": 0.5}


def test_the_length_of_each_prompt_is_known() -> None:
    trajectory = edited("abc", "y", replies=[Reply(messages=ASK_MORE), Reply(done=True)])
    first, second = trajectory.turns
    segment = trajectory.segments[0]
    assert first.prompt_tokens == list(segment.turn).index(0)
    assert second.prompt_tokens == list(segment.turn).index(1)
    assert segment.token_ids[second.prompt_tokens - 1] != STOP


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(edit=Edit(keep=4), messages=ASK_MORE), r"Edit\(keep=4\) of an answer of 3 characters"),
        (Reply(edit=Edit(keep=-1), messages=ASK_MORE), r"keep 0 to 3"),
        (Reply(edit=Edit(keep=1), done=True), "no rewrite and no resume, and is not done"),
        (Reply(edit=Edit(keep=1), resume=Resume()), "no rewrite and no resume, and is not done"),
        (Reply(edit=Edit(keep=1), rewrite=ASK_MORE), "no rewrite and no resume, and is not done"),
        (Reply(edit="x", messages=ASK_MORE), r"give Edit\(keep"),  # type: ignore[arg-type]
        (Reply(metrics={"a": float("nan")}, messages=ASK_MORE), "a finite number"),
        (Reply(metrics={"a": True}, messages=ASK_MORE), "a finite number"),
    ],
)
def test_a_wrong_reply_fails_its_own_conversation(reply: Reply, why: str) -> None:
    trajectory = edited("abc", "y", replies=[reply])
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert re.search(why, trajectory.error.message), trajectory.error.message
