"""Formats of tool calls: hermes in detail, which format a template writes, and what the formats make of other texts."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from support.conversations import call
from support.families import template_files
from support.tool_calls import FAMILIES, THINK, TOOLS
from turnwise.chat.tool_calls import FORMATS, FromResponseTemplate, Hermes, ParsedText, detect, format_by_name
from turnwise.errors import TemplateError
from turnwise.types import ToolCall

# The hermes format, in detail: what is good is kept, what is bad is told, and nothing is lost.


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
            "'}\\n</tool_call>' follows the JSON; close the call there",
        ),
        ('{"name": "f"} {"name": "g"}', "follows the JSON; close the call there"),
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


@pytest.mark.slow
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


# Which format a template writes, and what the formats make of what they were not made for.


FORMAT_OF = {
    "deepseek_r1_distill": "deepseek",
    "deepseekv3": "deepseek",
    "diffusion_gemma": "gemma4",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "lfm2_2_5": "lfm2",
    "lfm2_2_5_v2": "lfm2",
    "lfm2_2_5_vl": "lfm2",
    "lfm2_v2": "lfm2",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "muse_glimmer": "muse_glimmer",
    "nemotron_3_5_lightning": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "nemotron_3_super": "qwen3_coder",
    "nemotron_3_ultra": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
}
"""The templates that write calls; all others leave them out."""


def write_with(template: str, *, tools: bool = False):
    """What `detect` asks for: a conversation that ends with a call, in the shape that the template takes."""

    def write(name: str, arguments: dict[str, Any]) -> str:
        for content in ("", None, []):
            for form in (arguments, json.dumps(arguments)):
                call = {"type": "function", "id": "call_0", "function": {"name": name, "arguments": form}}
                asked = {"role": "assistant", "content": content, "tool_calls": [call]}
                try:
                    (text,), _ = render_jinja_template(
                        conversations=[[{"role": "user", "content": "A question."}, asked]],
                        tools=TOOLS if tools else None,
                        chat_template=template,
                        bos_token="<bos>",
                        eos_token="<eos>",
                    )
                except (jinja2.TemplateError, TypeError):
                    continue
                if name in text:
                    return text
        return ""

    return write


@pytest.mark.skipif(not template_files(), reason="needs the templates of trl, or ../shared")
@pytest.mark.parametrize("tools", [False, True], ids=["no tools told", "tools told"])
@pytest.mark.parametrize("file", template_files(), ids=lambda file: file.stem)
def test_the_format_of_a_real_template_is_found_out(file: Any, tools: bool) -> None:
    found = detect(write_with(file.read_text(encoding="utf-8"), tools=tools))
    assert (found.name if found else None) == FORMAT_OF.get(file.stem.removesuffix("_training"))


ARGUMENTS = {"text": 'say "it\'s" [so], <b>, {3}: ü\nand\\n on', "n": -1.5, "list": [1, "2", {"a": {}}], "flag": True}


@pytest.mark.parametrize(
    "file",
    [file for file in template_files() if file.stem.removesuffix("_training") in FORMAT_OF],
    ids=lambda file: file.stem,
)
def test_what_a_real_template_writes_is_read_back(file: Any) -> None:
    write = write_with(file.read_text(encoding="utf-8"))
    format = detect(write)
    assert format is not None
    arguments = dict(ARGUMENTS)
    if format.name == "lfm2" and "lfm2_2_5" in file.stem:
        arguments["text"] = arguments["text"].replace("\\", "")  # these templates escape nothing
    declared = {"text": {"type": "string"}, "n": {"type": "number"}, "flag": {"type": "boolean"}, "list": {}}
    tool = {"name": "probe_tool", "parameters": {"type": "object", "properties": declared}}
    (call,) = format.parse(write("probe_tool", arguments), tools=[{"type": "function", "function": tool}]).calls
    assert (call.name, call.arguments, call.error) == ("probe_tool", arguments, None)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_the_format_is_found_out_by_reading_a_probe_back(family: Any) -> None:
    found = detect(lambda name, arguments: "A question.\n\n" + family.write([(name, arguments)]))
    assert found is not None
    assert found.name == family.format


def test_a_template_that_writes_no_calls_or_not_all_of_them_has_no_format() -> None:
    assert detect(lambda name, arguments: "") is None
    assert detect(lambda name, arguments: f"<tool_call>{name}(**{arguments})</tool_call>") is None
    assert detect(lambda name, arguments: f'<tool_call>{{"name": "{name}"}}</tool_call>') is None


def test_a_format_has_a_name_and_a_wrong_name_is_reported_with_the_nearest() -> None:
    assert [format_by_name(format.name) for format in FORMATS] == list(FORMATS)


def test_every_format_has_examples() -> None:
    assert {format.name for format in FORMATS} == {family.format for family in FAMILIES}
    with pytest.raises(
        TemplateError, match=r"no tool-call format 'hermes2'; did you mean 'hermes'\?; there are: hermes"
    ):
        format_by_name("hermes2")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_reasoning_content_and_calls_are_separated(family: Any) -> None:
    opening, closing = family.think
    said = "Let me see.\n" if family.format not in ("harmony", "muse_glimmer") else "Let me see."
    calls = family.write([("f", {"x": "1"})])
    if family.format == "harmony":
        calls = "<|start|>assistant" + calls.removeprefix("<|start|>assistant")
    elif family.format == "muse_glimmer":
        calls = f"<|eom|><|start|>assistant{calls}"
    for text, opened in ((f"{opening}Hm.{closing}{said}{calls}", False), (f"Hm.{closing}{said}{calls}", True)):
        reading = format_by_name(family.format).parse(text, thinking=opened, tools=TOOLS)
        assert (reading.reasoning, reading.content) == ("Hm.", "Let me see.")
        assert [(call.name, call.arguments) for call in reading.calls] == [("f", {"x": "1"})]


def reads(format: str, text: str) -> list[Any]:
    """The calls in a text; of one that cannot be read, what is wrong."""
    calls = format_by_name(format).parse(text, tools=TOOLS).calls
    told = [(call.error or "").removeprefix("this tool call cannot be parsed: ") for call in calls]
    return [
        error.partition(". Write it as")[0] or (call.name, call.arguments)
        for call, error in zip(calls, told, strict=True)
    ]


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        # the value of a declared string is the text; of another type, or of none, JSON or Python's words where it is that
        ("qwen3_coder", "<function=f><parameter=x>3</parameter></function>", [("f", {"x": "3"})]),
        ("qwen3_coder", "<function=f><parameter=x>null</parameter></function>", [("f", {"x": "null"})]),
        ("qwen3_coder", "<function=f><parameter=n>3</parameter></function>", [("f", {"n": 3})]),
        ("qwen3_coder", "<function=f><parameter=y>True</parameter></function>", [("f", {"y": True})]),
        ("qwen3_coder", "<function=h><parameter=x>[true, null]</parameter></function>", [("h", {"x": [True, None]})]),
        ("qwen3_coder", "<function=h><parameter=x>{1, 2}</parameter></function>", [("h", {"x": "{1, 2}"})]),
        ("qwen3_coder", "<tool_call>f(x=1)</tool_call>", ["the name of the tool is missing"]),
        (
            "qwen3_coder",
            "<tool_call><function=f>x</function></tool_call>",
            ["'x' is not an argument; write an argument or close the call there"],
        ),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>1</function></tool_call>", ["the value of 'x' is not closed"]),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter>", ["the end of the call is missing"]),
        ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", [("f", {"x": "1"})]),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', ["the name of the tool is missing"]),
        ("deepseek", "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>", ["the name of the tool is missing"]),
        ("kimi", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}", [("f", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}', [("f", {})]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}", [("f", {})]),
        ("mistral", "[TOOL_CALLS]f{}", [("f", {})]),
        ("cohere2", '<|START_ACTION|>{"tool_name": "f", "parameters": {}}<|END_ACTION|>', [("f", {})]),
        (
            "cohere2",
            '<|START_ACTION|>[{"tool_name": "f", "arguments": {}}]<|END_ACTION|>',
            ['the key "arguments" must be "parameters"'],
        ),
        ("harmony", "<|channel|>commentary to=functions.f", ["<|message|> is missing after the header"]),
        ("harmony", "<|channel|>analysis to=python<|message|>print(1)", ["Expecting value at 'print(1)'"]),
        (
            "harmony",
            "<|channel|>commentary to=f<|message|>{} so<|call|>",
            ["' so<|call|>' follows the JSON; close the call there"],
        ),
        (
            "gemma4",
            "<|tool_call>call:f{x:hello}<tool_call|>",
            ["'hello}<tool_call|>' is wrong; a value, strings as <|\"|>text<|\"|> must be there"],
        ),
        ("gemma4", '<|tool_call>call:f{<|"|>x<|"|>:"1"}<tool_call|>', [("f", {"x": "1"})]),
        ("gemma4", "<|tool_call>call:f{o:" + "[" * 5000, ["the arguments are nested too deeply"]),
        ("gemma4", "<|tool_call>call:f<tool_call|>", [("f", {})]),
        ("gemma4", "<|tool_call>call:f", ["the arguments are missing"]),
        (
            "lfm2",
            "<|tool_call_start|>[f(x='it's', n=-1), g(from='a', my-key=true)]<|tool_call_end|>",
            [("f", {"x": "it's", "n": -1}), ("g", {"from": "a", "my-key": True})],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[f('1'), g(n=1+1), g(n={1}), g(n=h()), g()]<|tool_call_end|>",
            [
                "\"'1'\" has no name; write arguments as <name>=<value>",
                "'1 + 1' is not a literal value",
                "'{1}' is not a literal value",
                "'h()' is not a literal value",
                ("g", {}),
            ],
        ),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", ["the list is empty"]),
        ("lfm2", "<|tool_call_start|>[f(n=1e999)]<|tool_call_end|>", ["'1e309' is not a literal value"]),
        ("lfm2", "<|tool_call_start|>[f(n=" + "-" * 50_000 + "1)]<|tool_call_end|>", ["'--------------------' is too long"]),
        ("pythonic", "See [f(1)](x) and [link](y).", []),
        ("pythonic", "[h(3)] is the answer", []),
        ("pythonic", "<|python_start|>[f(x='1')]<|python_end|>", [("f", {"x": "1"})]),
        ("llama3", '{"answer": {"name": "f", "parameters": {}}}', []),
        ("llama3", '{"name": "Bob", "age": 3}', []),
        ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"n": 1}}', [("f", {"n": 1})]),
        ("llama3", '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": }]', [("f", {}), "Expecting value at '}]'"]),
        # words and thoughts after a call may hold whatever closes one
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\nIt ends with "
            "</parameter></function></tool_call>, <think>and with </function>.</think>",
            [("f", {"x": "1"})],
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>It ends with </tool_call>. <think>Or "
            "</arg_value></tool_call></think>",
            [("f", {"x": "1"})],
        ),
        ("glm", "<tool_call>f\n</tool_call> It ends with </arg_value></tool_call>.", [("f", {})]),
        (
            "muse_glimmer",
            '<atem:invoke name="f"><atem:parameter name="x">1</atem:parameter></atem:invoke> with </atem:invoke>.',
            [("f", {"x": "1"})],
        ),
        # what Python reads means what it means there
        ("pythonic", "[f(x='''1''')]", [("f", {"x": "1"})]),
        ("pythonic", '[f(x="""it\'s\r\n"so" """), g()]', [("f", {"x": "it\'s\r\n\"so\" "}), ("g", {})]),
        ("pythonic", "[f(x='a' 'b'\n\"c\")]", [("f", {"x": "abc"})]),
        ("pythonic", "[f(x=''), f(x='it's', n=1)]", [("f", {"x": ""}), ("f", {"x": "it's", "n": 1})]),
        ("lfm2", "<|tool_call_start|>[f(x='''a, b)]''')]<|tool_call_end|>", [("f", {"x": "a, b)]"})]),
        ("lfm2", "<|tool_call_start|>[f(x='say 'so' or 'no'')]<|tool_call_end|>", [("f", {"x": "say 'so' or 'no'"})]),
        # OpenAI's shape, and keys that a call does not have
        ("llama3", '{"type": "function", "function": {"name": "f", "parameters": {"n": 1}}}', [("f", {"n": 1})]),
        (
            "llama3",
            '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"n\\": 1}"}}, {"name": "g"}]',
            [("f", {"n": 1}), ("g", {})],
        ),
        ("llama3", '{"name": "f", "parameters": {"n": 1}, "reason": "why not"}', [("f", {"n": 1})]),
        ("llama3", '{"name": "f", "n": 1}', ["\"parameters\" is missing: put 'n' into \"parameters\""]),
        ("llama3", '{"name": "Bob", "parameters": {}, "age": 3}', []),
        ("llama3", '{"type": "function", "function": {"name": "f", "parameters": }}', ["Expecting value at '}}'"]),
    ],
)  # fmt: skip
def test_what_is_read_and_what_is_reported(format: str, text: str, calls: list[Any]) -> None:
    assert reads(format, text) == calls


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "False", False),
        ({}, " 3 ", 3),
        (True, "3", 3),
    ],
)
def test_the_schema_says_what_an_untyped_value_means(schema: Any, text: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"v": schema}}}}
    turn = f"<tool_call>f<arg_key>v</arg_key><arg_value>{text}</arg_value></tool_call>"
    (call,) = format_by_name("glm").parse(turn, tools=[tool]).calls
    assert call.arguments == {"v": value}
    assert type(call.arguments["v"]) is type(value)


SPEC = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def through_transformers(text: str, *, thinking: bool = False) -> ParsedText:
    return FromResponseTemplate(SPEC).parse(text, thinking=thinking, first_id=1)


def test_a_tokenizers_own_response_template_is_a_format_too() -> None:
    opening, closing = THINK
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    for reading in (
        through_transformers(f"{opening}Hm.{closing}Well.{call}"),
        through_transformers(f"Hm.{closing}Well.{call}", thinking=True),
    ):
        assert (reading.reasoning, reading.content) == ("Hm.", "Well.")
        assert [(one.id, one.name, one.arguments, one.error) for one in reading.calls] == [
            ("call_1", "f", {"x": 1}, None)
        ]
    (call_without,) = through_transformers('<tool_call>{"name": "f"}</tool_call>').calls
    assert (call_without.name, call_without.arguments, call_without.error) == ("f", {}, None)


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("{'name': 'f'}", "could not parse region as JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "the text is not JSON"),
        ('{"name": 3}', 'the "name" is missing'),
        ("[1]", "the call must be an object, but is a list"),
    ],
)
def test_what_transformers_cannot_read_is_one_malformed_call(inside: str, problem: str) -> None:
    reading = through_transformers(f"<think>Hm.</think>\n<tool_call>{inside}</tool_call>")
    assert (reading.reasoning, reading.content) == ("Hm.", "")
    (call,) = reading.calls
    assert call.error is not None
    assert problem in call.error
    assert (call.id, call.name, call.arguments) == ("call_1", "", {})


def test_a_response_template_that_is_none_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"response_template is not valid: .*fields"):
        FromResponseTemplate({"fields": {}})
