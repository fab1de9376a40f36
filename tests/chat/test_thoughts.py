"""The marks around thoughts are asked of the template, whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import byte_tokenizer
from support.conversations import call, hold, spoken
from support.families import family_tokenizer, template_files
from turnwise.chat.renderer import Renderer
from turnwise.chat.template_profile import KeptReasoning
from turnwise.doctor.template import thinking as doctor_on_thinking
from turnwise.doctor.template import thinking_problem
from turnwise.environments.users import ScriptedUser

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
