"""What an environment's reply may do besides a message: edit, resume, prefill, mask."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import byte_tokenizer, merging_tokenizer
from support.conversations import RENDERER, STOP, Says, a_row, call, hold, scripted, spoken
from turnwise.chat.renderer import Renderer
from turnwise.environments.environment import environment, user_message
from turnwise.environments.tools.toolbox import Tools
from turnwise.rollout.context import Limits
from turnwise.types import Edit, Opening, Reply, Resume, Row, Trajectory, Turn

# Answers that are cut and continued, and histories that are replaced: nothing lost, nothing trained twice.


FORGETS = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves out all thoughts but those of the last message."""

OPENS_THOUGHTS = FORGETS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@environment
async def resumes(row: Row, resume: Resume, then: Reply | None = None) -> AsyncGenerator[Opening | Reply, Turn]:
    """Cuts the first answer and lets the model go on."""
    yield Opening(messages=row.messages)
    yield Reply(resume=resume)
    yield then or Reply(done=True)


def resumed(*said: Any, resume: Resume, then: Reply | None = None) -> Trajectory:
    trajectory = hold(Says(*said), lambda: resumes(resume=resume, then=then))
    assert trajectory.error is None, trajectory.error
    return trajectory


def test_what_is_kept_stays_sampled_what_is_added_is_context_and_the_model_goes_on() -> None:
    trajectory = resumed("It is 5, so done.", " It is 6.", resume=Resume(keep=7, add=" Wait."))
    (segment,) = trajectory.segments
    assert spoken(segment) == [(-1, ASKED), (0, "It is 5"), (-1, " Wait."), (1, " It is 6.<|im_end|>")]
    sampled = [logprob for logprob, turn in zip(segment.logprobs, segment.turn, strict=True) if turn == 0]
    assert sampled == [-(n + 1) / 8 for n in range(7)]
    first, second = trajectory.turns
    assert (first.text, first.kept_tokens) == ("It is 5, so done.", 7)  # nothing that was said is lost
    assert (second.text, second.kept_tokens) == (" It is 6.", None)
    # it is one answer to one question
    assert trajectory.messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "It is 5 Wait. It is 6."},
    ]
    assert trajectory.template_mismatch is None


def test_keeping_all_only_takes_the_end_of_the_turn_off() -> None:
    trajectory = resumed("Four.", " Sure.", resume=Resume())
    assert spoken(trajectory.segments[0]) == [(-1, ASKED), (0, "Four."), (1, " Sure.<|im_end|>")]
    assert trajectory.turns[0].kept_tokens == 5
    assert trajectory.messages[-1]["content"] == "Four. Sure."


def test_keeping_nothing_begins_the_answer_anew_with_the_added_words() -> None:
    trajectory = resumed("Four.", " five.", resume=Resume(keep=0, add="Rather"))
    assert spoken(trajectory.segments[0]) == [(-1, ASKED + "Rather"), (1, " five.<|im_end|>")]
    assert trajectory.messages[-1]["content"] == "Rather five."


def test_a_token_that_is_cut_in_two_becomes_context() -> None:
    renderer = Renderer(merging_tokenizer())
    trajectory = hold(
        Says([259, 259, STOP], [259, STOP]), lambda: resumes(resume=Resume(keep=3, add="!")), renderer=renderer
    )
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert spoken(segment, renderer) == [(-1, ASKED), (0, "ab"), (-1, "a!"), (1, "ab<|im_end|>")]
    assert trajectory.turns[0].kept_tokens == 1


def test_an_answer_can_be_resumed_again_and_then_be_answered() -> None:
    @environment
    async def twice(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        yield Reply(resume=Resume(keep=3, add="+"), reward=0.25)
        yield Reply(resume=Resume(keep=3, add="-"))
        yield user_message("And?")
        yield Reply(done=True, reward=1.0)

    trajectory = hold(Says("one two", "1 two", "2", "end"), twice)
    assert trajectory.error is None
    assert spoken(trajectory.segments[0]) == [
        (-1, ASKED),
        (0, "one"),
        (-1, "+"),
        (1, "1 t"),
        (-1, "-"),
        (2, "2<|im_end|>"),
        (-1, "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"),
        (3, "end<|im_end|>"),
    ]
    assert [message["content"] for message in trajectory.messages] == ["Hi", "one+1 t-2", "And?", "end"]
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0, 0.0, 1.0]
    assert trajectory.template_mismatch is None


def test_a_call_that_the_continuation_completes_is_a_call() -> None:
    heard: list[list[str]] = []

    @environment
    async def listens(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        turn = yield Opening(messages=row.messages, tools=[TOOL])
        heard.append([one.name for one in turn.calls])
        turn = yield Reply(resume=Resume(keep=len("Let me. <tool_call>"), add='\n{"name": "add",'))
        heard.append([one.name for one in turn.calls])
        yield Reply(done=True)

    said = "Let me. " + call("sub")
    trajectory = hold(Says(said, ' "arguments": {"a": 1}}\n</tool_call>'), listens)
    assert trajectory.error is None, trajectory.error
    assert heard == [["sub"], ["add"]]
    assert trajectory.turns[1].calls[0].arguments == {"a": 1}
    assert trajectory.messages[-1]["content"] == "Let me."


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(st.integers(3, 258), min_size=1, max_size=12),
    goes_on=st.lists(st.integers(3, 258), min_size=1, max_size=6),
    keep=st.integers(0, 12),
    add=st.text(max_size=6),
)
def test_whatever_is_cut_the_record_holds_a_beginning_of_what_was_sampled(
    said: list[int], goes_on: list[int], keep: int, add: str
) -> None:
    text = RENDERER.decode(said)
    resume = Resume(keep=min(keep, len(text)), add=add)
    trajectory = hold(Says([*said, STOP], [*goes_on, STOP]), lambda: resumes(resume=resume))
    assert trajectory.error is None, trajectory.error
    (segment,) = trajectory.segments
    assert len({len(segment.token_ids), len(segment.logprobs), len(segment.turn), len(segment.version)}) == 1
    of = {n: [t for t, turn in zip(segment.token_ids, segment.turn, strict=True) if turn == n] for n in (0, 1)}
    assert of[0] == said[: len(of[0])]
    assert trajectory.turns[0].kept_tokens == len(of[0])
    assert of[1] == [*goes_on, STOP]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (
            Reply(resume=Resume(keep=99)),
            r"ValueError: Resume\(keep=99\) of an answer of 2 characters; keep 0 to 2 of it",
        ),
        (Reply(resume=Resume(keep=-1)), r"keep 0 to 2 of it"),
        (Reply(resume=Resume(), done=True), r"it has no messages, no rewrite and no prefill, and is not done"),
        (Reply(resume=Resume(), messages=[{"role": "user", "content": "x"}]), r"it has no messages"),
    ],
)
def test_a_resume_that_makes_no_sense_breaks_its_own_conversation(reply: Reply, why: str) -> None:
    @environment
    async def wrong(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        yield reply

    trajectory = hold(Says("Yo"), wrong)
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    import re

    assert re.search(why, trajectory.error.message), trajectory.error.message


def test_a_resumed_answer_counts_as_a_turn_so_that_nothing_goes_on_for_ever() -> None:
    @environment
    async def never_content(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        while True:
            yield Reply(resume=Resume(keep=0))

    trajectory = hold(Says(*["x"] * 9), never_content, limits=Limits(turns=3, tokens_per_turn=50))
    assert (trajectory.stop, len(trajectory.turns)) == ("max_turns", 3)


def test_where_there_is_no_room_to_go_on_what_stands_is_the_last_message() -> None:
    @environment
    async def insists(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        yield user_message("Sure?")
        yield Reply(resume=Resume(keep=3, add=" Wait."))

    trajectory = hold(Says("4", "Yes, 4."), insists, limits=Limits(turns=2, tokens_per_turn=50))
    assert (trajectory.stop, trajectory.error, trajectory.template_mismatch) == ("max_turns", None, None)
    assert [message["content"] for message in trajectory.messages] == ["Hi", "4", "Sure?", "Yes"]
    assert spoken(trajectory.segments[0])[-1] == (1, "Yes")
    assert trajectory.turns[-1].text == "Yes, 4."


def test_an_answer_that_is_begun_anew_is_still_inside_the_thought_that_the_cue_has_opened() -> None:
    thinks = Renderer(byte_tokenizer(OPENS_THOUGHTS))
    trajectory = hold(
        scripted(["Hm.</think>4", "Or.</think>5"], renderer=thinks),
        lambda: resumes(resume=Resume(keep=0)),
        renderer=thinks,
    )
    assert trajectory.error is None
    assert [turn.reasoning for turn in trajectory.turns] == ["Hm.", "Or."]
    assert trajectory.messages[-1] == {"role": "assistant", "content": "5", "reasoning_content": "Or."}


@pytest.mark.parametrize("add", [" Wait.", "\n", "e", ""])
def test_thoughts_that_were_resumed_or_begun_by_somebody_else_are_left_out_by_the_template_without_an_alarm(
    add: str,
) -> None:
    renderer = Renderer(byte_tokenizer(FORGETS))

    @environment
    async def meddles(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        yield Reply(resume=Resume(add=add))
        yield Reply(messages=[{"role": "user", "content": "Why?"}], prefill="<think>Okay, ")
        yield user_message("And?")
        yield Reply(done=True)

    said = ["<think>One e\n", "so.</think>\nFour e", "because.</think>It is.", "<think>So?</think>So."]
    trajectory = hold(scripted(said, renderer=renderer), meddles, renderer=renderer)
    assert (trajectory.error, trajectory.template_mismatch) == (None, None)
    assert [turn.reasoning for turn in trajectory.turns][1:] == [f"One e\n{add}so.", "Okay, because.", "So?"]
    # what was said is compared all the same, and with it what was put in
    mumbles = Renderer(byte_tokenizer(FORGETS.replace("</think>')[-1]", "</think>')[-1] | replace('our e', 'ive')")))
    drift = hold(scripted(said, renderer=mumbles), meddles, renderer=mumbles).template_mismatch
    assert "completion, tokens 21 to " in str(drift)
    assert "Five<|im_end|>" in str(drift)


# histories that are replaced


@environment
async def compresses(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """After two answers, puts a summary in place of the conversation."""
    yield Opening(messages=row.messages)
    yield user_message("More.")
    summary = {"role": "user", "content": "So far: a, b."}
    yield Reply(
        rewrite=[summary], messages=[{"role": "assistant", "content": "I see."}, {"role": "user", "content": "Go on."}]
    )
    yield Reply(done=True)


def test_a_compressed_context_is_a_new_segment_and_nothing_is_lost_or_trained_twice() -> None:
    trajectory = hold(Says("a", "b", "c"), compresses, row=a_row("Count."))
    assert trajectory.error is None
    first, second = trajectory.segments
    assert spoken(first) == [
        (-1, "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n"),
        (0, "a<|im_end|>"),
        (-1, "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"),
        (1, "b<|im_end|>"),
    ]
    assert spoken(second) == [
        (
            -1,
            "<|im_start|>user\nSo far: a, b.<|im_end|>\n<|im_start|>assistant\nI see.<|im_end|>\n"
            "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (2, "c<|im_end|>"),
    ]
    # the history that was replaced is in the record, and so is the one that stands for it
    assert [[message["content"] for message in former] for former in trajectory.previous_histories] == [
        ["Count.", "a", "More.", "b"]
    ]
    assert [message["content"] for message in trajectory.messages] == ["So far: a, b.", "I see.", "Go on.", "c"]
    places = [turn for segment in trajectory.segments for turn in segment.turn if turn >= 0]
    assert len(places) == trajectory.sampled_tokens
    assert trajectory.template_mismatch is None


def test_tools_may_stand_in_front_of_somebody_who_resumes() -> None:
    async def add(a: int) -> str:
        """Add one.

        Args:
            a: A number.
        """
        return str(a + 1)

    trajectory = hold(
        Says(call("add", '{"a": 1}'), "So 2, done", "?"),
        lambda: Tools([add], then=resumes(resume=Resume(keep=4, add=" or"))),
    )
    assert trajectory.error is None
    runs = spoken(trajectory.segments[0])
    assert [text for turn, text in runs if turn >= 0] == [call("add", '{"a": 1}') + "<|im_end|>", "So 2", "?<|im_end|>"]
    assert "<tool_response>\n2\n</tool_response>" in runs[2][1]
    assert runs[4] == (-1, " or")


# `Reply.edit`: the end of the model's last turn is replaced, and the conversation continues behind the turn.


MORE = "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"

ASK_MORE: list[dict[str, Any]] = [{"role": "user", "content": "More"}]

EDIT_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@environment
async def edits(row: Row, *replies: Reply) -> AsyncGenerator[Opening | Reply, Turn]:
    yield Opening(messages=row.messages, tools=[EDIT_TOOL])
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


def test_edit_a_token_that_is_cut_in_two_becomes_context() -> None:
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


# What an environment puts before the model's next answer, and which of its tokens it does not want learnt from.


PREFILL_MORE: Any = {"role": "user", "content": "More?"}


@environment
async def answers(row: Row, replies: list[Reply]) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers with these, one after the other."""
    yield Opening(messages=row.messages)
    for reply in replies:
        yield reply


def held(*said: str, replies: list[Reply]) -> Trajectory:
    return hold(Says(*said), lambda: answers(replies=replies))


def test_a_prefill_is_context_and_the_beginning_of_the_models_answer() -> None:
    trajectory = held(
        "first", " second", replies=[Reply(messages=[PREFILL_MORE], prefill="Prefill:"), Reply(done=True)]
    )
    assert trajectory.error is None
    assert spoken(trajectory.segments[0]) == [
        (-1, ASKED),
        (0, "first<|im_end|>"),
        (-1, "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\nPrefill:"),
        (1, " second<|im_end|>"),
    ]
    assert trajectory.messages[-1] == {"role": "assistant", "content": "Prefill: second"}
    assert [turn.text for turn in trajectory.turns] == ["first", " second"]
    assert trajectory.template_mismatch is None


def test_a_prefill_may_follow_a_replaced_history_and_be_resumed() -> None:
    replies = [Reply(rewrite=[PREFILL_MORE], prefill="So"), Reply(resume=Resume(keep=2, add="!")), Reply(done=True)]
    trajectory = held("first", " second", " third", replies=replies)
    assert trajectory.error is None
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, ASKED), (0, "first<|im_end|>")],
        [
            (-1, "<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\nSo"),
            (1, " s"),
            (-1, "!"),
            (2, " third<|im_end|>"),
        ],
    ]
    assert trajectory.messages == [PREFILL_MORE, {"role": "assistant", "content": "So s! third"}]
    assert trajectory.template_mismatch is None


def test_masked_tokens_stay_where_they_are_and_become_context() -> None:
    replies = [Reply(messages=[PREFILL_MORE], masked={0: [0, 1]}), Reply(done=True, masked={0: {3}, 1: range(3)})]
    trajectory = held("abcd", "ef", replies=replies)
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert spoken(segment)[:4] == [(-1, ASKED + "ab"), (0, "c"), (-1, "d"), (0, "<|im_end|>")]
    assert 1 not in segment.turn
    learnt = [(turn, logprob) for turn, logprob in zip(segment.turn, segment.logprobs, strict=True) if turn >= 0]
    assert learnt == [(0, -3 / 8), (0, -5 / 8)]
    assert {version for turn, version in zip(segment.turn, segment.version, strict=True) if turn < 0} == {-1}
    assert trajectory.template_mismatch is None  # who said what is told apart before


def test_a_mask_of_tokens_that_were_cut_off_is_no_mistake() -> None:
    trajectory = held(
        "abcd", "ef", replies=[Reply(resume=Resume(keep=2, add="-"), masked={0: [1, 2, 4]}), Reply(done=True)]
    )
    assert trajectory.error is None
    assert spoken(trajectory.segments[0])[1:] == [(0, "a"), (-1, "b-"), (1, "ef<|im_end|>")]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(masked={1: [0]}), r"masked=\{1: ...\}\): there is no turn 1; the turns are 0 to 0"),
        (Reply(train_on=[1]), r"train_on=\[1\]\): there is no turn 1; the turns are 0 to 0"),
        (Reply(masked={0: [3]}), r"turn 0 sampled 3 tokens, 0 to 2"),
        (Reply(prefill="x", done=True), "there is no following turn"),
        (Reply(prefill="x", resume=Resume()), "no messages, no rewrite and no prefill, and is not done"),
    ],
)
def test_a_reply_that_makes_no_sense_breaks_its_own_conversation(reply: Reply, why: str) -> None:
    trajectory = held("ab", "cd", replies=[reply])
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert re.search(why, trajectory.error.message), trajectory.error.message
