"""The TemplateProfile: found once, frozen, comparable, printable; questions about tools raise only where tools are used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from support import CHATML, byte_tokenizer
from turnwise.chat.renderer import Renderer
from turnwise.chat.template_profile import TemplateProblem
from turnwise.errors import TemplateError

NO_CALLS = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
IN_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
)


def test_a_profile_is_frozen_and_equal_to_that_of_the_same_template() -> None:
    one, other = (Renderer(byte_tokenizer()).profile for _ in range(2))
    assert one == other
    assert one != Renderer(byte_tokenizer(NO_CALLS)).profile
    assert one != Renderer(byte_tokenizer(), tool_format="llama3").profile
    assert one != Renderer(byte_tokenizer(CHATML.replace("<tool_call>", "<call>"))).profile  # another format of calls
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.tool_format_name = "x"  # type: ignore[misc]


def test_a_profile_prints_a_line_for_each_property() -> None:
    assert str(Renderer(byte_tokenizer()).profile).splitlines() == [
        "content         text",
        "tools           described in the prompt, optional",
        "tool calls      parsed as hermes, arguments as an object, ids: any, any number in a turn",
        'call text       \'<tool_call>\\n{"name": "probe_tool", "arguments": {"text": "x"}}\\n</tool_call><|im_end|>\\n\'',
        "model turn      given as text",
        "turn ends with  '<|im_end|>\\n', stop tokens [2]",
        "reasoning       not supported",
    ]


def test_content_in_parts_is_found() -> None:
    assert Renderer(byte_tokenizer(IN_PARTS)).profile.messages.content_as_parts


def test_a_template_without_calls_has_a_profile_and_an_error_where_tools_are_used() -> None:
    renderer = Renderer(byte_tokenizer(NO_CALLS))
    assert renderer.profile.messages.calls is None
    assert not renderer.profile.messages.describes_tools
    assert renderer.profile.turn.max_calls == 0
    assert renderer.profile.tool_format == TemplateProblem("writes no tool calls")
    assert renderer.turn_parser.parse(renderer.encode("Four.")).message == {"role": "assistant", "content": "Four."}
    with pytest.raises(
        TemplateError, match="writes no tool calls, so the format in which the model should write them is unknown"
    ):
        renderer.turn_parser.parse(renderer.encode("Four."), tools=[{}])


def test_nothing_about_the_template_alone_is_asked_after_the_start() -> None:
    """A second conversation of the same roles renders its own messages and asks the template nothing else."""
    tokenizer = byte_tokenizer()
    rendered: list[str] = []
    apply = tokenizer.apply_chat_template

    def counting(messages: Any, **options: Any) -> Any:
        rendered.append(messages[-1]["role"])
        return apply(messages, **options)

    tokenizer.apply_chat_template = counting  # type: ignore[method-assign]
    renderer = Renderer(tokenizer)

    def converse(number: int) -> int:
        before = len(rendered)
        renderer.encode_opening([{"role": "user", "content": f"Hi, {number}."}])
        turn = renderer.turn_parser.parse(renderer.encode(f"Hello, {number}."), tools=[{}])
        renderer.to_template_message(turn)
        renderer.encode_bridge(renderer.stop_token_ids[0], [{"role": "user", "content": f"And {number}?"}])
        return len(rendered) - before

    assert converse(1) > converse(2) == 2  # the opening and the bridge
