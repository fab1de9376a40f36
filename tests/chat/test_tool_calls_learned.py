"""Formats that are learned from what a template writes, where no named one fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import CHATML
from support.conversations import Says, hold
from support.costs import costs_its_length
from support.tiny import byte_tokenizer
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.chat.tool_calls import DESCRIBED, ToolFormat, described_format, find_format
from turnwise.config.recipe import checked
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, TemplateError

Calls = Sequence[Mapping[str, Any]]
FENCE = "```"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(arguments: Mapping[str, Any]) -> str:
    return f'{{"name": "probe_tool", "arguments": {_json(arguments)}}}'


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _values(form: str) -> Callable[[Mapping[str, Any]], str]:
    def write(arguments: Mapping[str, Any]) -> str:
        return "".join(form.replace("KEY", key).replace("VALUE", _text(value)) for key, value in arguments.items())

    return write


def turn(item: Callable[[Mapping[str, Any]], str], before: str = "", between: str = "", after: str = "") -> Any:
    """What a template writes for calls."""
    return lambda calls: before + between.join(map(item, calls)) + after


def only_one(calls: Calls) -> str:
    """A template that takes one call a turn."""
    if len(calls) > 1:
        return ""
    return f'<|action_start|><|plugin|>\n{{"name": "probe_tool", "parameters": {_json(calls[0])}}}<|action_end|>\n'


SEED, MINIMAX = _values("<parameter=KEY>VALUE</parameter>\n"), _values('<parameter name="KEY">VALUE</parameter>\n')
LINES, PAIRS = _values("<p=KEY>\nVALUE\n</p>\n"), _values("<k>KEY</k><v>VALUE</v>")


def _dsml(arguments: Mapping[str, Any]) -> str:
    inner = "".join(
        f'<｜D｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{_text(value)}</｜D｜parameter>\n'
        for key, value in arguments.items()
    )
    return f'<｜D｜invoke name="probe_tool">\n{inner}</｜D｜invoke>'


def _python(arguments: Mapping[str, Any]) -> str:
    return "probe_tool(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"


TEMPLATES: dict[str, tuple[Any, str]] = {
    # as the families write them: Granite, Phi-4, Nemotron, InternLM, Functionary, Seed-OSS, MiniMax, DeepSeek, Apertus, ...
    "list, no closing mark": (
        turn(_object, "<|tool_call|>[", ", ", "]"),
        '<|tool_call|>[{"name": "<tool>", "arguments": {...}}]',
    ),
    "list": (
        turn(_object, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        '<TOOLCALL>[{"name": "<tool>", "arguments": {...}}]</TOOLCALL>',
    ),
    "one object": (
        only_one,
        '<|action_start|><|plugin|>\n{"name": "<tool>", "parameters": {...}}<|action_end|>',
    ),
    "objects in one pair of marks": (
        turn(_object, "<tool_calls>\n", "\n", "\n</tool_calls>"),
        '<tool_calls>\n{"name": "<tool>", "arguments": {...}}\n</tool_calls>',
    ),
    "objects, each marked in front": (
        turn(lambda one: f"<function_call> {_object(one)}"),
        '<function_call> {"name": "<tool>", "arguments": {...}}',
    ),
    "objects with an id": (
        turn(lambda one: f'{_object(one)[:-1]}, "id": "callprob0"}}', "<calls>[", ", ", "]</calls>"),
        '<calls>[{"name": "<tool>", "arguments": {...}, "id": "callprob0"}]</calls>',
    ),
    "the name is the key": (
        turn(lambda one: _json({"probe_tool": one}), "<|tools|>[", ", ", "]<|/tools|>"),
        '<|tools|>[{"<tool>": {...}}]<|/tools|>',
    ),
    "nested": (
        turn(
            lambda one: _json({"type": "function", "function": {"name": "probe_tool", "arguments": one}}),
            "<calls>[",
            ", ",
            "]</calls>",
        ),
        '<calls>[{"type": "function", "function": {"name": "<tool>", "arguments": {...}}}]</calls>',
    ),
    "arguments as a text": (
        turn(lambda one: f"<fc>{_json({'arguments': _json(one), 'name': 'probe_tool'})}</fc>"),
        '<fc>{"arguments": "{...}", "name": "<tool>"}</fc>',
    ),
    "name in a mark": (
        turn(lambda one: f"<function=probe_tool>{_json(one)}</function>"),
        "<function=<tool>>{...}</function>",
    ),
    "name between marks": (
        turn(lambda one: f"[CALL]probe_tool[ARGS]{_json(one)}[/CALL]"),
        "[CALL]<tool>[ARGS]{...}[/CALL]",
    ),
    "parameters": (
        turn(
            lambda one: f"<seed:tool_call>\n<function=probe_tool>\n{SEED(one)}</function>\n</seed:tool_call>",
            between="\n",
        ),
        "<seed:tool_call>\n<function=<tool>>\n<parameter=<name>><value></parameter>\n</function>\n</seed:tool_call>",
    ),
    "parameters in one pair of marks": (
        turn(lambda one: f'<invoke name="probe_tool">\n{MINIMAX(one)}</invoke>\n', "<m:calls>\n", "", "</m:calls>"),
        '<m:calls>\n<invoke name="<tool>">\n<parameter name="<name>"><value></parameter>\n</invoke>\n</m:calls>',
    ),
    "parameters that say their type": (
        turn(_dsml, "<｜D｜calls>\n", "\n", "\n</｜D｜calls>"),
        '<｜D｜calls>\n<｜D｜invoke name="<tool>">\n<｜D｜parameter name="<name>" string="true"><value></｜D｜parameter>\n'
        "</｜D｜invoke>\n</｜D｜calls>",
    ),
    "parameters on lines of their own": (
        turn(lambda one: f"<|call|>\n<fn=probe_tool>\n{LINES(one)}</fn>\n<|/call|>", between="\n"),
        "<|call|>\n<fn=<tool>>\n<p=<name>>\n<value>\n</p>\n</fn>\n<|/call|>",
    ),
    "keys and values": (
        turn(lambda one: f"<tool>probe_tool{PAIRS(one)}</tool>", between="\n"),
        "<tool><tool><k><name></k><v><value></v></tool>",
    ),
    "python, a line each": (
        turn(_python, "<function_calls>", "\n", "</function_calls>"),
        "<function_calls><tool>(<name>=<value>, ...)</function_calls>",
    ),
    "python in a fence": (
        turn(_python, f"<|start|>\n{FENCE}python\n", "\n", f"\n{FENCE}\n<|stop|>"),
        f"<|start|>\n{FENCE}python\n<tool>(<name>=<value>, ...)\n{FENCE}\n<|stop|>",
    ),
}
every_template = pytest.mark.parametrize(("write", "how"), TEMPLATES.values(), ids=TEMPLATES)


def found(write: Any) -> ToolFormat:
    """The format of a template that ends its turns with `<|im_end|>`."""
    format = find_format(lambda calls: (said := write(calls)) and f"{said}<|im_end|>\n", ends=["<|im_end|>"])
    assert format is not None
    return format


@every_template
def test_a_format_is_learned_from_what_the_template_writes(write: Any, how: str) -> None:
    format = found(write)
    assert (format.name, getattr(format, "example", "")) == ("learned", how)
    several = [{"text": 'it "is" so: </b>, [x]', "n": -1.5}, {"text": "\\d\n or not"}]
    for calls in ([several[0]], several) if write([{}, {}]) else ([several[0]],):
        reading = format.parse(f"Let me see.\n{write(calls)}\nAnd then?", first_id=3)
        assert [(one.name, dict(one.arguments), one.error) for one in reading.calls] == [
            ("probe_tool", one, None) for one in calls
        ]
        assert reading.content == "Let me see.\nAnd then?"
        assert [one.id for one in reading.calls] == [f"call_{n}" for n in range(3, 3 + len(calls))]


@every_template
def test_a_learned_format_tells_bad_calls_and_reads_none_in_a_thought(write: Any, how: str) -> None:
    format = found(write)
    good = write([{"text": "x"}])
    assert format.parse(f"<think>{good}</think>Done.").calls == ()
    (cut,) = format.parse(good[: good.rindex("x")]).calls
    assert cut.error is not None
    assert cut.error.endswith(f". Write it as {how}")
    both = format.parse(f"{good[: good.rindex('x')]}\n{good}").calls
    assert both[0].error is not None
    if not how.startswith(
        "<|start|>"
    ):  # where a list is cut inside a string, all that follows may belong to the string
        assert [one.error for one in both[1:]] in ([], [None])


@every_template
def test_hostile_text_costs_a_learned_format_no_more_than_its_length(write: Any, how: str) -> None:
    format = found(write)
    good = write([{"text": "x"}])
    for unit in (good, good[: good.index("x")], good[: len(good) // 2], good[:8], "[{", "<", "{"):
        assert costs_its_length(format.parse, unit, before=good[:20]), unit


@pytest.mark.parametrize(
    ("write", "how"),
    [
        (turn(_object), '{"name": "<tool>", "arguments": {...}}'),
        (turn(_object, "[", ", ", "]"), '[{"name": "<tool>", "arguments": {...}}]'),
    ],
)
def test_a_template_without_marks_tells_the_model_its_own_shape(write: Any, how: str) -> None:
    format = found(write)
    assert (format.name, getattr(format, "example", "")) == ("llama3", how)
    (bad,) = format.parse('{"name": "probe_tool", "arguments": }').calls
    assert bad.error is not None
    assert bad.error.endswith(f". Write it as {how}")


OFFERED = [{"type": "function", "function": {"name": "weather"}}]


def test_a_name_without_a_mark_is_a_call_on_the_first_line_only_and_only_of_a_tool_on_offer() -> None:
    """GLM-4's shape."""
    format = found(turn(lambda one: f"probe_tool\n{_json(one)}"))
    assert (format.name, getattr(format, "example", "")) == ("learned", "<tool>\n{...}")
    for text in ('weather\n{"city": "Rome"}', '\nweather \n {"city": "Rome"}\n'):
        reading = format.parse(text, tools=OFFERED)
        assert [(one.name, one.arguments, one.error) for one in reading.calls] == [("weather", {"city": "Rome"}, None)]
        assert reading.content == ""
    first, second = format.parse('weather\n{"city": "Rome"}<|assistant|>weather\n{}', tools=OFFERED).calls
    assert (first.error, second.name, "only one call in a turn" in (second.error or "")) == (None, "weather", True)
    for words in (
        'time\n{"city": "Rome"}',
        'The weather\n{"city": "Rome"}',
        'See:\nweather\n{"city": "Rome"}',
        'weather {"city": "Rome"}',
        "weather\n[1]",
    ):
        reading = format.parse(words, tools=OFFERED)
        assert (reading.calls, reading.content) == ((), words)
    (bad,) = format.parse('weather\n{"city": Rome}', tools=OFFERED).calls
    assert (bad.name, bad.arguments) == ("weather", {})
    assert bad.error is not None
    for unit in ("weather\n{", "weather\n", "w", "\n", "{"):
        assert costs_its_length(lambda text: format.parse(text, tools=OFFERED), unit, before="weather\n{"), unit


@pytest.mark.parametrize("write", [turn(lambda one: f"probe_tool {_json(one)}"), turn(lambda one: "probe_tool")])
def test_calls_without_a_mark_or_without_their_arguments_are_not_learned(write: Any) -> None:
    assert find_format(write) is None


def test_a_renderer_reads_calls_in_the_format_that_its_template_writes() -> None:
    renderer = Renderer(byte_tokenizer(CHATML.replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")))
    assert renderer.turn_parser.tool_format.name == "learned"
    ids = renderer.encode('Well.<call>{"name": "f", "arguments": {"x": 1}}</call><|im_end|>')
    said = renderer.turn_parser.parse(ids, tools=[{"type": "function", "function": {"name": "f"}}])
    assert said.message["content"] == "Well."
    assert [(call.name, call.arguments, call.error) for call in said.calls] == [("f", {"x": 1}, None)]
    with pytest.raises(TemplateError, match="in a format that cannot be read back"):
        _ = Renderer(
            byte_tokenizer(CHATML.replace("<tool_call>", "call").replace("</tool_call>", "end"))
        ).turn_parser.tool_format


# Formats that a recipe describes: an in-house format that no template-reading can find


IN_HOUSE = """
{%- if tools %}tools: {{ tools | tojson }}
{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}ACT {{ call.function.name }} WITH {{ call.function.arguments | tojson }} DONE
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
""".strip()
"""The words around a call are ordinary words, which are never taken for marks unless a recipe says so."""
ACT = {"opening": "ACT ", "separator": " WITH ", "closing": " DONE"}
WEATHER = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"days": {"type": "integer"}}}}}
]


@pytest.mark.parametrize(
    ("description", "text", "arguments"),
    [
        (ACT, 'ACT weather WITH {"city": "Rome", "days": 2} DONE', {"city": "Rome", "days": 2}),
        ({"opening": "⟦", "closing": "⟧"}, '⟦{"name": "weather", "arguments": {"days": 2}}⟧', {"days": 2}),
        ({"opening": "<!run ", "separator": "!>"}, '<!run weather!>{"days": 2}', {"days": 2}),
        (
            {
                "opening": '<do tool="',
                "separator": '">',
                "closing": "</do>",
                "arguments": "tags",
                "argument": '<with key="{key}">{value}</with>',
            },
            '<do tool="weather"><with key="city">Rome </do> 3</with><with key="days">2</with></do>',
            {"city": "Rome </do> 3", "days": 2},
        ),
    ],
)
def test_a_described_format_reads_calls_and_tells_malformed_ones(
    description: dict[str, str], text: str, arguments: dict[str, Any]
) -> None:
    format = described_format(**description)
    read = format.parse(f"Well. {text}\n{text} Done.", tools=WEATHER)
    assert [(call.name, call.arguments, call.error) for call in read.calls] == [("weather", arguments, None)] * 2
    assert read.content == "Well.\nDone."
    broken = text.replace('"days"', '"days').replace("</with></do>", "<with></do>")
    (bad, good) = format.parse(f"{broken}\n{text}", tools=WEATHER).calls
    assert bad.error is not None
    assert format.example in bad.error
    assert (good.error, good.arguments) == (None, arguments)
    assert costs_its_length(lambda one: format.parse(one, tools=WEATHER), description["opening"], before="")


def test_a_template_in_a_described_format_is_read_rendered_and_bridged(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(IN_HOUSE)
    with pytest.raises(
        TemplateError, match=r"cannot be read back \('ACT probe_tool WITH .* DONE'; tried: hermes, .*llama3, learned"
    ):
        _ = Renderer(tokenizer).turn_parser.tool_format
    tokenizer.save_pretrained(tmp_path / "model")
    config = checked({"model": str(tmp_path / "model"), "data": {"train": "x"}, "tool_format": ACT}, source="recipe")
    renderer = assembly.renderer(config)
    assert renderer.profile.tool_format_name == renderer.profile.written_format_name == DESCRIBED

    def weather(city: str, days: int) -> str:
        """The weather.

        Args:
            city: Where.
            days: How many.
        """
        return f"{city}: sun" if days == 2 else "rain"

    said = 'Hm. ACT weather WITH {"city": "Rome", "days": 2} DONE'
    trajectory = hold(Says(said, "Sun."), lambda: Tools([weather]), renderer=renderer)
    assert trajectory.error is None, trajectory.error
    assert trajectory.template_mismatch is None
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["Rome: sun"]
    (segment,) = trajectory.segments
    text = renderer.decode(segment.token_ids)
    assert f"assistant\n{said}<|im_end|>\n<|im_start|>tool\nRome: sun<|im_end|>\n<|im_start|>assistant\nSun." in text


MINE = """
import re
from turnwise.chat.tool_calls import MarkedFormat
from turnwise.chat.tool_calls.parsing import well_formed_call

class Arrow(MarkedFormat):
    name = "arrow"
    example = "-> <tool>"
    opening_pattern = "-> "

    def __init__(self, end="!"):
        self.end = end

    def read_calls(self, text, mark, tools):
        name, end, _ = text[mark.end():].partition(self.end)
        return [well_formed_call(name, {}, text[mark.start():])], mark.end() + len(name) + len(end)

class Nothing:
    pass
"""


def test_a_class_of_the_user_is_a_format_and_wrong_formats_are_refused(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")

    def renderer(tool_format: Any) -> Renderer:
        tree = {"model": str(tmp_path / "model"), "data": {"train": "x"}, "tool_format": tool_format}
        return assembly.renderer(checked(tree, source="recipe"))

    made = renderer({"use": f"{tmp_path}/mine.py:Arrow", "arguments": {"end": ";"}})
    assert made.profile.tool_format_name == "arrow"
    read = made.turn_parser.tool_format.parse("Well. -> f; So.")
    assert ([call.name for call in read.calls], read.content) == (["f"], "Well.\nSo.")
    for wrong, error, message in (
        (f"{tmp_path}/mine.py:Nothing", ConfigError, "makes a Nothing; it must be a .*ToolFormat"),
        ({"use": f"{tmp_path}/mine.py:Arrow", "arguments": {"start": "x"}}, ConfigError, "start"),
        ({"use": "hermes", "arguments": {"closing": "x"}}, ConfigError, "no effect with the format 'hermes'"),
        ({"opening": " "}, ConfigError, "tool_format.opening is ' '"),
        ({"openng": "x"}, ConfigError, "openng"),
        ({"opening": "<c>", "argument": "{key}={value}"}, ConfigError, "no effect with arguments=json"),
        ({"opening": "<c>", "separator": "\n"}, ConfigError, "separator is white space only"),
        (
            {"opening": "<c>", "closing": "</c>", "arguments": "tags", "argument": "<a>{key} {value}</a>"},
            ConfigError,
            "a text between them that is not only white space",
        ),
        ({"opening": "<c>", "closing": "</c>", "arguments": "tags"}, ConfigError, "with {key} and {value}"),
        ({"opening": "<c>", "arguments": "tags", "argument": "<a {key}>{value}</a>"}, ConfigError, "closing is empty"),
        ("hermse", TemplateError, "did you mean 'hermes'"),
    ):
        with pytest.raises(error, match=message):
            renderer(wrong)
