"""Renderings are kept for plain data only, and only for what is rendered exactly the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.chat.probes import LONGEST_TEXT, TEXTS, cached_by_content

TOOL: Any = {"type": "function", "function": {"name": "f"}}


class Renderer:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, messages: Sequence[Any], *, add_generation_prompt: bool, tools: Sequence[Any]) -> str:
        self.calls += 1
        return f"{messages} {add_generation_prompt} {tools}"


def test_equal_arguments_are_rendered_once_and_others_on_their_own() -> None:
    render = Renderer()
    cached = cached_by_content(render)
    message = {"role": "user", "content": "hello"}
    cases: list[tuple[list[Any], bool, list[Any]]] = [
        ([message], True, []),
        ([message], False, []),
        ([message], True, [TOOL]),
        ([message, message], True, []),
        ([{**message, "content": "hello!"}], True, []),
        ([{**message, "content": 1}], True, []),
        ([{**message, "content": True}], True, []),
        ([{**message, "content": 1.0}], True, []),
    ]
    for messages, prompt, tools in [*cases, *cases]:
        copies = [dict(one) for one in messages]
        expected = f"{copies} {prompt} {tools}"
        assert cached(copies, add_generation_prompt=prompt, tools=tools) == expected
    assert render.calls == len(cases)


def test_a_message_that_changes_is_rendered_again() -> None:
    cached = cached_by_content(Renderer())
    message: Any = {"role": "user", "content": {"a": [1, 2]}}
    before = cached([message], add_generation_prompt=True, tools=[])
    message["content"]["a"].append(3)
    assert cached([message], add_generation_prompt=True, tools=[]) != before


def test_long_conversations_and_other_values_than_plain_data_are_not_kept() -> None:
    render = Renderer()
    cached = cached_by_content(render)
    for content in (object(), "x" * (LONGEST_TEXT + 1)):
        calls = render.calls
        for _ in range(2):
            cached([{"role": "user", "content": content}], add_generation_prompt=True, tools=[])
        assert render.calls == calls + 2


def test_the_number_of_kept_renderings_is_bounded() -> None:
    render = Renderer()
    cached = cached_by_content(render)
    for number in [0, *range(TEXTS + 1), 0]:
        cached([{"role": "user", "content": str(number)}], add_generation_prompt=True, tools=[])
    assert render.calls == TEXTS + 2
