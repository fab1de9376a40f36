"""Further arguments of a chat template (`chat_template_kwargs`): in every rendering, one profile per set, no argument ignored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import a_row, hold, scripted, spoken
from support.families import family_renderer, template_files
from support.templates import SWITCHES
from turnwise.chat.probes import TOOL
from turnwise.chat.renderer import Renderer
from turnwise.chat.template_arguments import refuse_unread_arguments
from turnwise.environments.environment import environment
from turnwise.errors import TemplateError
from turnwise.sft.replay import lines
from turnwise.types import Message, Opening, Reply, Resume, Row, Trajectory, Turn

FILES = {path.stem: path for path in template_files()}
real = pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")

NO_THINKING = {"enable_thinking": False}
EMPTY = "<think>\n\n</think>\n\n"
ASKED: Message = {"role": "user", "content": "Five and five?"}
MORE: Message = {"role": "user", "content": "Are you sure?"}
ANSWER: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "10"}
BARE: Message = {"role": "assistant", "content": "It is ten."}
CALLS = [{"id": "call_0", "type": "function", "function": {"name": "probe_tool", "arguments": {"text": "5+5"}}}]
CALL: Message = {"role": "assistant", "content": "", "tool_calls": CALLS}


@environment
async def asks_back(row: Row, replies: Sequence[Reply], tools: bool = False) -> AsyncGenerator[Opening | Reply, Turn]:
    yield Opening(messages=row.messages, tools=[TOOL] if tools else [])
    for reply in replies:
        yield reply
    yield Reply(done=True)


def held(renderer: Renderer, said: Sequence[str], *replies: Reply, **context: Any) -> Trajectory:
    row = context.pop("row", None) or a_row("Five and five?")
    tools = context.pop("tools", False)
    trajectory = hold(
        scripted(list(said), renderer=renderer),
        lambda: asks_back(replies=replies, tools=tools),
        renderer=renderer,
        row=row,
        **context,
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


def served(renderer: Renderer, trajectory: Trajectory, arguments: Mapping[str, Any]) -> list[list[int]]:
    """What a server shows it under these arguments, by the tokenizer alone."""
    tools: Any = list(trajectory.tools) or None
    found: list[list[int]] = []
    for place, message in enumerate(trajectory.messages):
        if message["role"] == "assistant":
            text = renderer.tokenizer.apply_chat_template(
                trajectory.messages[:place], tools=tools, add_generation_prompt=True, tokenize=False, **arguments
            )
            found.append(renderer.tokenizer.encode(text, add_special_tokens=False))
    return found


def test_the_arguments_are_in_the_first_prompt_and_behind_every_turn() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES), chat_template_kwargs=NO_THINKING)
    trajectory = held(renderer, ["Ten.", "Yes."], Reply(messages=[MORE]))
    (segment,) = trajectory.segments
    assert [text for _, text in spoken(segment, renderer)] == [
        f"<|im_start|>user\nFive and five?<|im_end|>\n<|im_start|>assistant\n{EMPTY}",
        "Ten.<|im_end|>",
        f"\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n{EMPTY}",
        "Yes.<|im_end|>",
    ]
    assert trajectory.template_mismatch is None
    assert [turn.message["content"] for turn in trajectory.turns] == ["Ten.", "Yes."]


def test_a_row_has_its_own_arguments_and_a_profile_for_them() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    plain = held(renderer, ["Ten."])
    own = held(renderer, ["Ten."], row=a_row("Five and five?", chat_template_kwargs=NO_THINKING))
    assert spoken(plain.segments[0], renderer)[0][1].endswith("<|im_start|>assistant\n")
    assert spoken(own.segments[0], renderer)[0][1].endswith(f"<|im_start|>assistant\n{EMPTY}")
    assert renderer.for_arguments({}) is renderer
    assert renderer.for_arguments(NO_THINKING) is renderer.for_arguments({"enable_thinking": False})
    assert renderer.for_arguments(NO_THINKING).for_arguments({}) is renderer


def test_the_arguments_of_a_row_replace_those_of_the_recipe_by_name() -> None:
    template = SWITCHES + "{{ mood | default('calm') }}"
    renderer = Renderer(byte_tokenizer(template), chat_template_kwargs={"enable_thinking": False, "mood": "wild"})
    text = renderer.for_arguments({"enable_thinking": True}).encode_opening([ASKED]).text
    assert EMPTY not in text
    assert text.endswith("wild")


def test_one_and_true_are_different_values() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES + "{{ level }}"), chat_template_kwargs={"level": 1})
    assert renderer.for_arguments({"level": True}).encode_opening([ASKED]).text.endswith("True")
    assert renderer.for_arguments({"level": 1}) is renderer


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"enable_thinkng": False},
            r"has 'enable_thinkng', which the chat template of .* never reads \(it reads: enable_thinking\): correct the name, "
            r"or remove it; did you mean 'enable_thinking'\?",
        ),
        ({"content": "x"}, "never reads"),
        ({"tools": []}, "'tools', which turnwise gives to the template itself: remove it"),
        ({"add_generation_prompt": False}, "which turnwise gives to the template itself"),
        ({"chat_template": "x"}, "put the template into the model's directory"),
        ({"tokenize": True}, "is a parameter of apply_chat_template and no argument"),
        ({"enable_thinking": "false"}, "enable_thinking='false', a text, .* write false without quotes"),
        ({"enable_thinking": {1, 2}}, "must be plain data"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(arguments: Mapping[str, Any], told: str) -> None:
    with pytest.raises(TemplateError, match=told):
        Renderer(byte_tokenizer(SWITCHES)).for_arguments(arguments)


def test_names_are_found_behind_the_tags_that_transformers_and_jinja_add() -> None:
    template = "{% generation %}{{ one }}{% endgeneration %}{% for m in messages %}{% if two %}{% break %}{% endif %}{% endfor %}"
    refuse_unread_arguments({"one": 1, "two": 2}, template, "the tokenizer")
    with pytest.raises(TemplateError, match=r"it reads: one, two"):
        refuse_unread_arguments({"m": 1}, template, "the tokenizer")


def test_a_row_whose_arguments_are_never_read_fails_its_conversation() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    row = a_row("Hi", chat_template_kwargs={"thinking": False})
    trajectory = hold(scripted(["Ten."], renderer=renderer), renderer=renderer, row=row)
    assert trajectory.error is not None
    assert trajectory.error.kind == "tokens"
    assert "'thinking', which the chat template of" in trajectory.error.message


def test_other_arguments_in_the_middle_begin_a_new_segment_that_is_rendered_in_full() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    more = Reply(messages=[MORE], chat_template_kwargs=NO_THINKING)
    trajectory = held(
        renderer, ["Ten.", "Yes.", "Sure."], more, Reply(messages=[MORE], chat_template_kwargs=NO_THINKING)
    )
    assert trajectory.template_mismatch is None
    first, second = trajectory.segments
    assert spoken(first, renderer)[0][1].endswith("<|im_start|>assistant\n")
    texts = [text for _, text in spoken(second, renderer)]
    assert texts[0].endswith(
        f"Ten.<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
    )
    assert texts[2].endswith(
        f"Are you sure?<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
    )  # the same arguments: the same segment
    back = held(
        renderer, ["Ten.", "Yes."], Reply(messages=[MORE], chat_template_kwargs={}), row=a_row("Five and five?")
    )
    assert len(back.segments) == 1


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(chat_template_kwargs="no", messages=[MORE]), "give a dictionary of the template's arguments"),  # type: ignore[arg-type]
        (Reply(chat_template_kwargs={}, done=True), "there is no following turn"),
        (Reply(chat_template_kwargs={}, resume=Resume()), "the prompt of the resumed turn is rendered already"),
    ],
)
def test_a_reply_with_arguments_that_cannot_be_used_fails(reply: Reply, told: str) -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    trajectory = hold(scripted(["Ten.", "x"], renderer=renderer), lambda: asks_back(replies=[reply]), renderer=renderer)
    assert trajectory.error is not None
    assert told in trajectory.error.message


def test_an_unchanged_context_that_occurs_twice_is_no_mismatch() -> None:
    """The template writes the last turn with an empty block of reasoning and earlier ones without: the same words of a user (a
    scripted user says them again and again) must be found at their own place."""
    template = SWITCHES.replace(
        "+ content +",
        "+ ('<think>\n\n</think>\n\n' if message.role == 'assistant' and loop.last and '</think>' not in content else '')"
        " + content +",
    )
    renderer = Renderer(byte_tokenizer(template), chat_template_kwargs=NO_THINKING)
    trajectory = held(renderer, ["Ten.", "Ten.", "Ten."], Reply(messages=[MORE]), Reply(messages=[MORE]))
    assert trajectory.template_mismatch is None


SETS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"enable_thinking": False}),
    ("qwen3", {"enable_thinking": True}),
    ("qwen3_training", {"enable_thinking": False}),
    ("qwen3_5_think", {"enable_thinking": False}),
    ("qwen3_5_nothink", {"enable_thinking": True}),
    ("qwen3_6", {"enable_thinking": False}),
    ("qwen3_6", {"preserve_thinking": True}),
    ("glm4moe", {"enable_thinking": False}),
    ("glm4moe", {"enable_thinking": True}),
    ("gemma4", {"enable_thinking": True}),
    ("nemotron_3_nano", {"enable_thinking": False}),
    ("nemotron_3_ultra", {"enable_thinking": False}),
    ("lfm2_2_5_v2", {"thinking": False}),
]


@real
@pytest.mark.parametrize("with_call", [False, True])
@pytest.mark.parametrize(("stem", "arguments"), SETS)
def test_real_templates_are_right_under_their_arguments(stem: str, arguments: dict[str, Any], with_call: bool) -> None:
    base = family_renderer(FILES[stem])
    renderer = base.for_arguments(arguments)
    first = (CALL, [ANSWER]) if with_call else (BARE, [MORE])
    rounds: list[tuple[Message, list[Message]]] = [first, (BARE, [MORE]), (BARE, [])]
    said = lines(renderer, [ASKED], rounds, [TOOL] if with_call else [])
    replies = [Reply(messages=answers) for _, answers in rounds[:-1]]
    row = a_row("Five and five?", chat_template_kwargs=arguments)
    kept = held(base, said, *replies, row=row, tools=with_call)
    assert kept.template_mismatch is None
    assert [len(turn.calls) for turn in kept.turns] == [int(with_call), 0, 0]
    assert [turn.message["content"] for turn in kept.turns[1:]] == ["It is ten."] * 2
    assert prompts(kept)[0] == served(renderer, kept, arguments)[0]
    branched = held(base, said, *replies, row=row, tools=with_call, thinking="branch")
    assert branched.template_mismatch is None
    ours, theirs = (
        ["".join(renderer.decode(prompt).split()) for prompt in shown]
        for shown in (prompts(branched), served(renderer, branched, arguments))
    )
    assert ours == theirs  # but for the line breaks of the model's own empty reasoning
