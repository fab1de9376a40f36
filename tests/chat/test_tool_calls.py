"""The hermes format, in detail: what is good is kept, what is bad is told, and nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.conversations import call
from turnwise.chat.tool_calls import Hermes
from turnwise.types import ToolCall

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def parse(text: str, **options) -> tuple[str, tuple[ToolCall, ...]]:
    """What was said, and what was called."""
    reading = Hermes().parse(text, **options)
    return reading.content, reading.calls


def read(text: str) -> tuple[str, list[tuple[str, str, dict[str, Any], bool]]]:
    """What was said, and of each call: id, name, arguments and whether it is good."""
    content, calls = parse(text)
    return content, [(one.id, one.name, dict(one.arguments), one.error is None) for one in calls]


def the_error(text: str) -> str:
    """The error of the only call in a text."""
    _, (only,) = parse(text)
    assert only.error is not None
    assert (only.name, only.arguments) == ("", {})
    assert only.error.startswith("this tool call cannot be parsed: ")
    assert only.error.endswith('. Write it as <tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>')
    return only.error.removeprefix("this tool call cannot be parsed: ").partition(". Write it as")[0]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        pytest.param("Just words.", "Just words.", [], id="no call"),
        pytest.param("\nJust words.\n\n", "Just words.", [], id="line breaks around are no content"),
        pytest.param(ADD, "", [("add", {"a": 1, "b": 2})], id="one call"),
        pytest.param(f"Let me see.\n{ADD}\nSo.", "Let me see.\nSo.", [("add", {"a": 1, "b": 2})], id="text around"),
        pytest.param(f"{call('f')}\n{call('g')}", "", [("f", {}), ("g", {})], id="two calls"),
        pytest.param(
            f"One {call('f')} two {call('g')} three", "One\ntwo\nthree", [("f", {}), ("g", {})], id="text between"
        ),
        pytest.param('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", {})], id="no white space"),
        pytest.param('<tool_call>   \n\n {"name": "f"}  \n </tool_call>', "", [("f", {})], id="much white space"),
        pytest.param('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})], id="no arguments"),
        pytest.param(
            call("f", '{"x": {"y": [1, {"z": null}]}}'), "", [("f", {"x": {"y": [1, {"z": None}]}})], id="nested"
        ),
        pytest.param(call("f", '"{\\"x\\": 1}"'), "", [("f", {"x": 1})], id="arguments as JSON in a string"),
        pytest.param(
            call("f", '{"x": "</tool_call>"}') + "\nend",
            "end",
            [("f", {"x": "</tool_call>"})],
            id="closing tag in a string",
        ),
        pytest.param(
            call("f", '{"x": "<tool_call>{}</tool_call>"}'),
            "",
            [("f", {"x": "<tool_call>{}</tool_call>"})],
            id="whole call in a string",
        ),
        pytest.param('<tool_call>\n{"name": "f", "arguments": {}}', "", [("f", {})], id="unclosed at the end"),
        pytest.param('Hm.\n<tool_call>\n{"name": "f"}\n', "Hm.", [("f", {})], id="unclosed, line break at the end"),
        pytest.param(
            '<tool_call>{"name": "f", "arguments": {"x": "a\nb\tc"}}</tool_call>',
            "",
            [("f", {"x": "a\nb\tc"})],
            id="raw line break",
        ),
        pytest.param(
            '<tool_call>{"name": "f", "id": 7, "arguments": {}}</tool_call>', "", [("f", {})], id="other keys"
        ),
        pytest.param(call("f", '{"x": "ü \\u00fc 你"}'), "", [("f", {"x": "ü ü 你"})], id="unicode"),
        pytest.param(f"<think>I add.</think>{ADD}", "", [("add", {"a": 1, "b": 2})], id="after thinking"),
    ],
)
def test_good_calls(text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert read(text) == (content, [(f"call_{n}", name, arguments, True) for n, (name, arguments) in enumerate(calls)])


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("", "Expecting value"),
        ("add(1, 2)", "Expecting value"),
        ("{'name': 'f', 'arguments': {}}", "Expecting property name enclosed in double quotes"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "-Infinity is not JSON"),
        ('{"name": "f", "arguments": "{\\"x\\": NaN}"}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": 1}', "Expecting ',' delimiter"),
        (
            '{"name": "f", "arguments": {"x": 1}}}',
            "'}\\n</tool_call>' follows the JSON; write </tool_call> there",
        ),
        ('{"name": "f"} {"name": "g"}', "follows the JSON; write </tool_call> there"),
        ('{"name": "f", "parameters": {"x": 1}}', 'the key "parameters" must be "arguments"'),
        ("[]", "the list is empty"),
        ('"f"', "the call must be a JSON object, but is a str"),
        ('{"arguments": {}}', 'the "name" is missing'),
        ('{"name": "", "arguments": {}}', 'the "name" is missing'),
        ('{"name": 5, "arguments": {}}', 'the "name" is missing'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be an object, but is a list'),
        ('{"name": "f", "arguments": null}', '"arguments" must be an object, but is a NoneType'),
        ('{"name": "f", "arguments": "[1]"}', '"arguments" must be an object, but is a list'),
        ('{"name": "f", "arguments": "x = 1"}', "Expecting value"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "Exceeds the limit"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "the number 1e999 is too large"),
        ('{"name": "f", "arguments": {"x": "\\ud83d"}}', "the text contains half a character"),
        ('{"name": "f", "arguments": ' + "[" * 100_000, "the arguments are nested too deeply"),
    ],
)
def test_a_call_that_cannot_be_read_is_reported_with_what_is_wrong(inside: str, problem: str) -> None:
    assert problem in the_error(f"<tool_call>\n{inside}\n</tool_call>")
    content, calls = parse(f"Hm. <tool_call>{inside}</tool_call> So.")
    assert content == "Hm.\nSo."
    assert [one.text for one in calls] == [inside]


def test_an_unclosed_call_that_was_cut_is_reported() -> None:
    assert "Unterminated string" in the_error('<tool_call>\n{"name": "ad')
    assert "Expecting value" in the_error("Hm. <tool_call>")


def test_a_good_call_is_not_lost_because_its_neighbour_is_bad() -> None:
    content, calls = read(f"A <tool_call>nonsense</tool_call> B {ADD} C <tool_call>[]</tool_call> D")
    assert content == "A\nB\nC\nD"
    assert calls == [
        ("call_0", "", {}, False),
        ("call_1", "add", {"a": 1, "b": 2}, True),
        ("call_2", "", {}, False),
    ]


def test_a_bad_call_that_was_not_closed_does_not_take_the_next_one_with_it() -> None:
    content, calls = read(f"A <tool_call>{{'name': 'f'}}\n{ADD} B")
    assert content == "A\nB"
    assert calls == [("call_0", "", {}, False), ("call_1", "add", {"a": 1, "b": 2}, True)]


def thought(text: str, *, thinking: bool = False) -> tuple[str, str, list[str]]:
    """What was thought, what was said, and the names of what was called."""
    reading = Hermes().parse(text, thinking=thinking)
    return reading.reasoning, reading.content, [one.name for one in reading.calls]


def test_a_call_that_is_only_thought_of_is_none() -> None:
    assert thought(f"<think>Perhaps {ADD}?</think>No.") == (f"Perhaps {ADD}?", "No.", [])
    assert thought(f"<think>Perhaps {ADD}") == (f"Perhaps {ADD}", "", [])  # cut while it was thinking
    text = f"<think>{call('f')}</think>{call('g')}<think>{call('h')}"
    assert thought(text) == (f"{call('f')}\n{call('h')}", "", ["g"])


def test_thinking_that_the_cue_has_begun_is_thinking_too() -> None:
    assert thought(f"Perhaps {ADD}?</think>No.", thinking=True) == (f"Perhaps {ADD}?", "No.", [])
    assert thought(f"Perhaps {ADD}", thinking=True) == (f"Perhaps {ADD}", "", [])  # cut while it was thinking
    assert thought(f"Hm {call('f')}?</think>{call('g')}", thinking=True) == (f"Hm {call('f')}?", "", ["g"])
    assert thought(f"</think>{call('f')}<think>{call('g')}", thinking=True) == (call("g"), "", ["f"])


def test_marks_of_thinking_inside_a_call_mean_nothing() -> None:
    assert read(call("f", '{"x": "</think>"}')) == ("", [("call_0", "f", {"x": "</think>"}, True)])
    text = call("f", '{"x": "<think>"}') + call("g")
    assert read(text) == ("", [("call_0", "f", {"x": "<think>"}, True), ("call_1", "g", {}, True)])


def test_a_list_of_calls_in_one_mark_is_as_many_calls() -> None:
    both = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]'
    assert read(f"<tool_call>{both}</tool_call>") == ("", [("call_0", "f", {"x": 1}, True), ("call_1", "g", {}, True)])
    one_bad = '[{\'name\': \'f\'}, {"name": "g"}, {"name": 1}, {"name": "h"}]'
    assert read(f"<tool_call>{one_bad}</tool_call>End") == (
        "End",
        [("call_0", "", {}, False), ("call_1", "g", {}, True), ("call_2", "", {}, False), ("call_3", "h", {}, True)],
    )


def test_a_call_that_is_whole_but_not_closed_is_not_lost_before_another() -> None:
    text = '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>'
    assert read(text) == ("", [("call_0", "f", {}, True), ("call_1", "g", {}, True)])


def test_ids_are_counted_on_and_the_models_own_words_are_kept() -> None:
    _, calls = parse(f"{ADD}<tool_call> ? </tool_call>", first_id=3)
    assert [one.id for one in calls] == ["call_3", "call_4"]
    assert [one.text for one in calls] == ['{"name": "add", "arguments": {"a": 1, "b": 2}}', "?"]


@given(
    arguments=st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)
    ),
    before=st.text(alphabet="ab <>\n"),
    ascii_only=st.booleans(),
)
def test_what_is_written_as_json_is_read_back(arguments: dict[str, Any], before: str, ascii_only: bool) -> None:
    written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    content, calls = parse(f"{before}<tool_call>{written}</tool_call>")
    assert calls == (ToolCall(id="call_0", name="f", arguments=arguments, text=written),)
    assert content == before.rstrip().strip("\n")


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"}', "<think>", "</think>", "x", "\n", "["]))
)
def test_whatever_is_sampled_can_be_read(pieces: list[str]) -> None:
    text = "".join(pieces)
    content, calls = parse(text)
    assert len(calls) <= text.count("<tool_call>") + text.count('{"name"')
    assert all((one.name == "f") != (one.error is not None) for one in calls)
    assert [one.id for one in calls] == [f"call_{n}" for n in range(len(calls))]
    assert len(content) <= len(text)
