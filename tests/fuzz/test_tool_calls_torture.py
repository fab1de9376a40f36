"""Every format on the torture table, and on whatever else can be sampled."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.costs import costs_its_length
from support.tool_calls import FAMILIES, TOOLS, Case, Family, cases, outcome, tools_for
from turnwise.chat.tool_calls import FORMATS, ToolFormat, format_by_name

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)

every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(family, case, id=f"{family.title}: {case.name}") for family in FAMILIES for case in cases(family)],
)
def test_no_good_call_is_lost_and_every_bad_one_is_reported(family: Family, case: Case) -> None:
    calls = family.read(case.text, TOOLS)
    assert outcome(calls) == case.expected
    for call in calls:
        if call.error is not None:
            assert call.error.startswith("this tool call cannot be parsed: ")
            assert ". Write it as " in call.error
            assert call.arguments == {}
    assert all(call.id in (call.written_id, f"call_{n}") for n, call in enumerate(calls))
    assert len({call.id for call in calls}) == len(calls)


def test_every_format_is_tortured() -> None:
    assert {family.format for family in FAMILIES} == {format.name for format in FORMATS}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), inner),
    max_leaves=5,
)


@every_family
@settings(max_examples=20)
@given(data=st.data())
def test_what_a_template_writes_is_read_back(family: Family, data: st.DataObject) -> None:
    pieces = st.sampled_from([family.marks, family.close, '"', "'", "\n", "\\", "{", "]", "</", "ü你", " "])
    texts = st.lists(st.text(max_size=5) | pieces, max_size=4).map("".join)
    texts = texts.filter(lambda text: not family.forbidden.search(text))
    keys = st.text(max_size=8) if family.keys == ".*" else st.from_regex(family.keys, fullmatch=True)
    arguments = st.dictionaries(keys, texts | JSON.filter(lambda value: _fits(family, value)), max_size=3)
    names = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)
    # a tool declares one type for each argument, so each name is called once
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=3, unique_by=lambda call: call[0]))
    assert outcome(family.read(family.write(calls), tools_for(calls))) == calls


def _fits(family: Family, value: Any) -> bool:
    """Whether a value holds nothing that the family has no way to write."""
    if isinstance(value, str):
        return not family.forbidden.search(value)
    if isinstance(value, list):
        return all(_fits(family, item) for item in value)
    if isinstance(value, dict):
        return all(_fits(family, item) for item in value.values())
    return True


@every_format
@settings(max_examples=30)
@given(data=st.data())
def test_whatever_is_sampled_can_be_read(format: ToolFormat, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([family for family in FAMILIES if family.format == format.name]))
    good = family.write([("f", {"x": "1"})])
    pieces = [
        *family.around,
        *family.think,
        family.close,
        family.marks,
        good,
        good[: len(good) // 2],
        "[",
        "{",
        '"',
        "'",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=12)))
    thinking = data.draw(st.booleans())
    reading = format.parse(text, first_id=2, thinking=thinking, tools=data.draw(st.sampled_from([(), TOOLS])))
    assert len({call.id for call in reading.calls}) == len(reading.calls)
    for number, call in enumerate(reading.calls, 2):
        assert call.id == call.written_id or call.id.rstrip("x") == f"call_{number}"
    assert all(call.name for call in reading.calls if call.error is None)
    assert len(reading.content) + len(reading.reasoning) <= len(text) + len(reading.calls)


HOSTILE = [
    *(
        "[",
        "{",
        "[{",
        "{[",
        '{"',
        "['",
        "[{'",
        '{"a":',
        '[{"a":1},',
        '{"name":',
        '[{"name":"f"},',
        '{"name": "f"} {',
        "; {",
    ),
    *(
        '{"type": "function", "function": {',
        '{"n":1e',
        "<|python_tag|>{",
        "'",
        "'''",
        "\n[f(",
        "\n[f(a='",
        "[f(a='',",
        "[f(a='b'c",
    ),
    *(
        "<tool_call>",
        "<tool_call>f",
        "<function=f><parameter=x>",
        "</parameter>",
        "<think>",
        "</think>",
        "\n",
        "<|channel|>",
    ),
]


@every_format
def test_hostile_text_costs_no_more_than_its_length(format: ToolFormat) -> None:
    of_format = [family for family in FAMILIES if family.format == format.name]
    good = [family.write([("f", {"x": "1"})]) for family in of_format]
    units = [*HOSTILE, *(one[: len(one) // 2] for one in good)]
    units += [family.around[0] + family.call("f", family.broken) for family in of_format]
    for unit in units:
        assert costs_its_length(partial(format.parse, tools=TOOLS), unit, before=of_format[0].around[0]), unit


@every_format
def test_white_space_costs_no_more_than_its_length_wherever_a_call_breaks_off(format: ToolFormat) -> None:
    for family in [family for family in FAMILIES if family.format == format.name]:
        good = family.write([("f", {"x": "1"})])
        begin = time.process_time()
        for length in range(1, len(good)):
            for space in (" ", "\n"):
                format.parse(good[:length] + space * 5_000 + "x", tools=TOOLS)
        assert time.process_time() - begin < 6


def test_calls_that_never_end_are_not_read_to_the_end_again_and_again() -> None:
    begin = time.process_time()
    (first, *_) = format_by_name("pythonic").parse('[f(, f(a="' * 4_000, tools=TOOLS).calls
    assert time.process_time() - begin < 6
    assert first.error is not None
