"""Thoughts of a turn: where they begin and end, what becomes of them in later turns, and what a server would show."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import byte_tokenizer
from support.conversations import a_row, call, hold, scripted, spoken
from support.families import family_renderer, family_tokenizer, template_files
from turnwise.chat.probes import TOOL
from turnwise.chat.renderer import Renderer
from turnwise.chat.sanity_check import SanityCheck, SegmentMessages
from turnwise.chat.template_profile import KeptReasoning
from turnwise.chat.tool_calls import KNOWN, MARKS
from turnwise.doctor.template import thinking as doctor_on_thinking
from turnwise.doctor.template import thinking_problem
from turnwise.environments.environment import environment, user_message
from turnwise.environments.users import ScriptedUser
from turnwise.options.algorithm import LossSection
from turnwise.sft.replay import lines
from turnwise.training.batch import pack
from turnwise.types import Message, Opening, Reply, Row, Segment, Trajectory, Turn

# What becomes of thoughts when a conversation goes on: kept, left out where the template leaves them out, or at every
# user.


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


# The marks around thoughts are asked of the template, whatever they are.


FILES = {path.stem: path for path in template_files()}

_LOOP = (
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content or '' %}"
)

_TURN = "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{%- endfor %}"

_CUE = "{%- if add_generation_prompt %}<|im_start|>assistant\nCUE{% endif %}"


def forgets(closing: str, *, cue: str = "") -> str:
    """A template that splits an earlier turn at its closing mark and writes only what comes after it."""
    split = f"{{%- set content = content.split('{closing}')[-1] %}}"
    rule = f"{{%- if message.role == 'assistant' and loop.index0 < ns.last %}}{split}{{%- endif %}}"
    return _LOOP + rule + _TURN + _CUE.replace("CUE", cue)


def has_field(opening: str, closing: str, key: str = "reasoning_content") -> str:
    """A template with a field for thoughts, which it writes after the last user message only."""
    wrapped = f"'{opening}\\n' + message.{key} + '\\n{closing}\\n\\n' + content"
    rule = f"{{%- if message.{key} and loop.index0 > ns.last %}}{{%- set content = {wrapped} %}}{{%- endif %}}"
    return _LOOP + rule + _TURN + _CUE.replace("CUE", "")


TEMPLATES = {
    "a field, other marks": (has_field("<mm:think>", "</mm:think>"), ("<mm:think>", "</mm:think>")),
    "a field of another name": (has_field("[REASON]", "[/REASON]", "thoughts"), ("[REASON]", "[/REASON]")),
    "a field, words for marks": (has_field("Thinking:", "End of thinking."), ("Thinking:", "End of thinking.")),
    "split at the closing mark": (forgets("</mm:think>"), ("<mm:think>", "</mm:think>")),
    "split, in brackets": (forgets("[/THOUGHT]"), ("[THOUGHT]", "[/THOUGHT]")),
    "split, opened by the cue": (forgets("<|eot_thought|>", cue="<|ponder|>\n"), ("<|ponder|>", "<|eot_thought|>")),
    "split, begin and end": (
        forgets("<|end_of_thought|>") + "{# <|begin_of_thought|> #}",
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_templates_own_marks_are_found(name: str) -> None:
    template, marks = TEMPLATES[name]
    renderer = Renderer(byte_tokenizer(template))
    assert renderer.profile.reasoning.marks.own == (marks,)
    assert renderer.profile.reasoning.supported
    assert renderer.profile.kept_reasoning.stripped_before[0] == "user"
    assert "leaves earlier reasoning out" in doctor_on_thinking(renderer, None).text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_inside_a_thought_is_no_call_whatever_the_marks(name: str) -> None:
    template, (opening, closing) = TEMPLATES[name]
    renderer = Renderer(byte_tokenizer(template), tool_format="hermes", unchecked=["tools shown"])
    opened = renderer.encode_opening([{"role": "user", "content": "Hi"}]).reasoning_opening
    thought = f"\nMaybe {call('search')}\n{closing}\n\n{call('lookup')}"
    said = renderer.turn_parser.parse(
        renderer.encode(thought if opened else opening + thought), tools=[{}], reasoning_opening=opened
    )
    assert [one.name for one in said.calls] == ["lookup"]
    assert said.reasoning == f"Maybe {call('search')}"
    assert said.message["content"] == ""


@pytest.mark.parametrize("thinking", ["branch", "strip_at_user"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_thoughts_are_left_out_whatever_the_marks(name: str, thinking: str) -> None:
    template, (opening, closing) = TEMPLATES[name]
    renderer = Renderer(byte_tokenizer(template))
    opened = renderer.encode_opening([{"role": "user", "content": "Hi"}]).reasoning_opening
    begin = "" if opened else f"{opening}\n"
    trajectory = hold(
        [f"{begin}Hm.\n{closing}\n\nFour.", f"{begin}So.\n{closing}\n\nFive."],
        lambda: ScriptedUser(["No."]),
        renderer=renderer,
        thinking=thinking,
    )
    assert trajectory.error is None
    assert [turn.reasoning for turn in trajectory.turns] == ["Hm.", "So."]
    assert len(trajectory.segments) == 2
    _, (context, last) = [spoken(segment) for segment in trajectory.segments]
    assert "Hm." not in context[1]
    assert "Four.<|im_end|>" in context[1]
    assert "So." in last[1]


@pytest.mark.skipif("gptoss" not in FILES, reason="no chat templates on this machine")
def test_a_renamed_channel_of_thoughts_is_known_and_a_call_in_it_is_none(tmp_path: Path) -> None:
    source = FILES["gptoss"].read_text(encoding="utf-8").replace("analysis", "musing")
    path = tmp_path / "gptoss_renamed.jinja"
    path.write_text(source, encoding="utf-8")
    tokenizer = family_tokenizer(path)
    marks = (("<|channel|>musing<|message|>", "<|end|>"),)
    thought = f"<|channel|>musing<|message|>Maybe {call('search')}<|end|>"
    said = f"{thought}<|start|>assistant<|channel|>final<|message|>Four."
    for format in ("auto", "hermes"):
        renderer = Renderer(tokenizer, tool_format=format, unchecked=["tools shown"])
        assert renderer.profile.reasoning.marks.own == marks
        read = renderer.turn_parser.parse(renderer.encode(said), tools=[{}])
        assert read.calls == ()
        assert (read.reasoning, read.message["content"]) == (f"Maybe {call('search')}", "Four.")


RENAMED = ["qwen3", "glm4moe", "nemotron_3_nano", "lfm2_2_5", "qwen3_5_think", "deepseek_r1_distill"]


@pytest.mark.skipif("qwen3" not in FILES, reason="no chat templates on this machine")
@pytest.mark.parametrize("stem", RENAMED)
@pytest.mark.parametrize("marks", [("<mm:think>", "</mm:think>"), ("[COT]", "[/COT]")], ids=["tags", "brackets"])
def test_a_real_template_with_other_marks_is_read_as_it_was_with_its_own(
    stem: str, marks: tuple[str, str], tmp_path: Path
) -> None:
    source = FILES[stem].read_text(encoding="utf-8")
    path = tmp_path / f"{stem}_renamed.jinja"
    path.write_text(source.replace("</think>", marks[1]).replace("<think>", marks[0]), encoding="utf-8")
    own, renamed = Renderer(family_tokenizer(FILES[stem])), Renderer(family_tokenizer(path))
    assert own.profile.reasoning.marks.own == (("<think>", "</think>"),)
    assert renamed.profile.reasoning.marks.own == (marks,)
    assert renamed.profile.kept_reasoning.stripped_before == own.profile.kept_reasoning.stripped_before
    assert renamed.profile.turn.content == own.profile.turn.content


def test_a_mark_that_only_ends_turns_is_no_mark_of_thinking() -> None:
    phi = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert not Renderer(byte_tokenizer(phi)).profile.reasoning.supported  # <|end|> closes a thought in gpt-oss only


_LAST = (
    "{%- set ns = namespace(user=-1, said=-1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.user = loop.index0 %}{%- endif %}"
    "{%- if message.role == 'assistant' %}{%- set ns.said = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content or '' %}"
    "{%- if message.role == 'assistant' and RULE %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
) + _TURN + _CUE.replace("CUE", "")  # fmt: skip

RULES = {
    "false": KeptReasoning(),
    "loop.index0 < ns.user": KeptReasoning(user="none"),
    "not loop.last": KeptReasoning(user="none", tool="none"),
    "loop.index0 < ns.said": KeptReasoning(user="last", tool="last"),
    "loop.index0 < ns.said and loop.index0 < ns.user": KeptReasoning(user="last"),
    "loop.index0 < messages | length - 4": KeptReasoning(user="some", tool="some"),
}


@pytest.mark.parametrize("rule", RULES)
def test_which_reasoning_a_template_leaves_out_is_found_with_several_turns(rule: str) -> None:
    renderer = Renderer(byte_tokenizer(_LAST.replace("RULE", rule) + "{# </think> #}"))
    assert renderer.profile.kept_reasoning == RULES[rule]
    problem = thinking_problem(renderer, "branch")
    assert (problem is not None) == (rule == "false"), problem


def test_branch_where_only_the_last_turns_thought_stays_shows_each_turn_what_serving_shows() -> None:
    renderer = Renderer(byte_tokenizer(_LAST.replace("RULE", "loop.index0 < ns.said")))
    said = [f"<think>Thought {n}.</think>Word {n}." for n in range(4)]
    trajectory = hold(said, lambda: ScriptedUser(["No."] * 3), renderer=renderer, thinking="branch")
    assert trajectory.error is None
    assert trajectory.template_mismatch is None
    messages = [{"role": "user", "content": "Hi"}]
    prompts: list[list[int]] = []
    for text in said:
        whole = renderer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(renderer.tokenizer.encode(whole))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "No."}]
    shown = [
        list(segment.token_ids[: segment.turn.index(turn)])
        for segment in trajectory.segments
        for turn in sorted({one for one in segment.turn if one >= 0})
    ]
    assert shown == prompts
    assert [sorted({turn for turn in segment.turn if turn >= 0}) for segment in trajectory.segments] == [
        [0, 1],
        [2],
        [3],
    ]


# `thinking: branch` shows the model what a server shows it, held against `apply_chat_template` and nothing else.


real = pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")

SERVED_ASKED: Message = {"role": "user", "content": "Five and five?"}

MORE: Message = {"role": "user", "content": "Are you sure?"}

ANSWER: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "10"}


@environment
async def asks_back(
    row: Row, answers: Sequence[Sequence[Message]], tools: bool
) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user, and a tool where `answers` has its messages."""
    _ = yield Opening(messages=[SERVED_ASKED], tools=[TOOL] if tools else [])
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

SERVED_SAID = {"an empty thought": EMPTY, "a thought": FULL, "no thought": BARE}

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
    return lines(renderer, [SERVED_ASKED], rounds, [TOOL] if tools else [])


@real
@pytest.mark.parametrize("said", SERVED_SAID)
@pytest.mark.parametrize("stem", [*THINKERS, *CUES])
def test_every_turn_sees_the_prompt_that_serving_makes_of_the_recorded_messages(stem: str, said: str) -> None:
    renderer = family_renderer(FILES[stem])
    if said == "an empty thought" and stem not in ("qwen3", "qwen3_training", "qwen3_5_nothink"):
        pytest.skip("this template writes no such thought")
    first = [EMPTY["content"]] * 3
    if said != "an empty thought":
        first = as_lines(renderer, [(SERVED_SAID[said], [MORE]), (SERVED_SAID[said], [MORE]), (SERVED_SAID[said], [])])
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


# Where a turn is thought, and where it is said.


@pytest.mark.parametrize(("opening", "closing"), MARKS, ids=[opening for opening, _ in MARKS])
def test_a_thought_stands_between_its_familys_marks(opening: str, closing: str) -> None:
    assert KNOWN.split(f"{opening}\nHm.\n{closing}\n\nWell.") == ("Hm.", "Well.")
    assert KNOWN.split(f"\nHm.\n{closing}\n\nWell.", opened=True) == ("Hm.", "Well.")
    assert KNOWN.split(f"{opening}\nHm.\n{closing}\n\nWell.", opened=True) == ("Hm.", "Well.")  # once more
    assert KNOWN.split(f"{opening}Hm") == ("Hm", "")  # cut
    assert KNOWN.split("Hm", opened=True) == ("Hm", "")
    assert KNOWN.split(f"So {opening}1{closing} and {opening}2{closing} on") == ("1\n2", "So\nand\non")


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        (" Well.\n", "", " Well.\n"),
        ("", "", ""),
        ("</think>Well.", "", "</think>Well."),  # it closes nothing
        ("<think></think>Well.", "", "Well."),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Well.", "Hm.", "Well."),
        ("<|channel|>final<|message|>Well.", "", "Well."),
        (" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Well.", "Hm.", "Well."),
        ("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Well.<|END_RESPONSE|>", "Hm.", "Well."),
        ("<|channel>thought\nHm.\n<channel|>Well.", "Hm.", "Well."),
        ("<think>[THINK]Hm.[/THINK]</think>Well.", "[THINK]Hm.[/THINK]", "Well."),
    ],
)
def test_what_is_thought_and_what_is_said(text: str, reasoning: str, said: str) -> None:
    assert KNOWN.split(text) == (reasoning, said)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([mark for pair in MARKS for mark in pair]) | st.text(max_size=3), max_size=8).map("".join),
    st.booleans(),
)
def test_thoughts_are_in_order_and_hold_what_was_thought(text: str, opened: bool) -> None:
    found = KNOWN.reasoning_blocks(text, opened=opened)
    places = [place for block in found for place in (block.start, block.end)]
    assert places == sorted(places)
    assert all(block.text in text[block.start : block.end] for block in found)
    assert all(mark in KNOWN.split(text)[1] or mark in text for mark, _ in MARKS if mark in text)
    assert bool(found) >= opened
