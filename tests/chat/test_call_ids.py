"""Templates that are particular about calls: ids of nine letters and digits, and a count of whose turn it is (Mistral's)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from support import CHATML, byte_tokenizer
from support.conversations import hold, scripted, spoken
from turnwise.chat.message_format import with_short_ids
from turnwise.chat.renderer import Renderer
from turnwise.chat.tool_calls import by_name
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import environment
from turnwise.sft.replay import Replay, lines, rounds
from turnwise.types import Opening, Reply, Row, Turn

MISTRAL = (
    "{%- set ns = namespace(spoken=0) %}{%- for message in messages %}"
    "{%- if message.role != 'tool' and message.tool_calls is not defined %}"
    "{%- if (message.role == 'user') != (ns.spoken % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{%- set ns.spoken = ns.spoken + 1 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{%- elif message.tool_calls is defined %}[TOOL_CALLS] ["
    "{%- for call in message.tool_calls %}{%- if call.id | length != 9 %}{{ raise_exception('Nine, please.') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{- ', ' if not loop.last }}{% endfor %}]<|im_end|>"
    "{%- elif message.role == 'assistant' %} {{ message.content | trim }}<|im_end|>"
    "{%- else %}{%- if message.tool_call_id | length != 9 %}{{ raise_exception('Nine, please.') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- endif %}{%- endfor %}"
)
CALL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]'
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@environment
async def adds(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    turn = yield Opening(messages=row.messages, tools=[TOOL])
    while turn.calls:
        answers = [{"role": "tool", "tool_call_id": one.id, "name": "add", "content": "2"} for one in turn.calls]
        turn = yield Reply(messages=answers)
    turn = yield Reply(messages=[{"role": "user", "content": "Sure?"}])
    yield Reply(done=True)


def test_ids_of_calls_are_short_where_the_template_insists_and_its_count_of_turns_is_right() -> None:
    renderer = Renderer(byte_tokenizer(MISTRAL), unchecked=["tools shown"])
    assert renderer.turn_parser.tool_format.name == "mistral"
    unnamed = CALL.replace(', "id": "a1b2c3d4e"', "")
    trajectory = hold(scripted([CALL, unnamed, " Two.", " Yes."], renderer=renderer), adds, renderer=renderer)
    assert (trajectory.stop, trajectory.error, trajectory.template_mismatch) == ("done", None, None)
    context = [text for turn, text in spoken(trajectory.segments[0], renderer) if turn < 0]
    assert context == [
        "[INST] Hi[/INST]",
        '[TOOL_RESULTS] {"content": 2, "call_id": "a1b2c3d4e"}[/TOOL_RESULTS]',
        '[TOOL_RESULTS] {"content": 2, "call_id": "call00001"}[/TOOL_RESULTS]',
        "[INST] Sure?[/INST]",
    ]
    # what the model wrote is kept, and ours are as they are
    assert [call.id for turn in trajectory.turns for call in turn.calls] == ["a1b2c3d4e", "call_1"]
    assert [call.written_id for turn in trajectory.turns for call in turn.calls] == ["a1b2c3d4e", ""]


@pytest.mark.parametrize(
    ("id", "short"), [("call_0", "call00000"), ("call_12345", "call12345"), ("a1b2c3d4e", "a1b2c3d4e")]
)
def test_a_short_id_is_the_same_for_a_call_and_its_answer(id: str, short: str) -> None:
    turn = with_short_ids({"role": "assistant", "content": "", "tool_calls": [{"id": id, "function": {}}]})
    assert turn["tool_calls"][0]["id"] == short
    assert with_short_ids({"role": "tool", "content": "2", "tool_call_id": id})["tool_call_id"] == short


def test_a_long_id_becomes_nine_letters_and_digits() -> None:
    first, again, other = (
        with_short_ids({"role": "tool", "tool_call_id": id})["tool_call_id"]
        for id in ("toolu_01A", "toolu_01A", "toolu_01B")
    )
    assert first == again != other
    assert len(first) == 9
    assert first.isalnum()


# ids that the model wrote

KIMI = (
    "{%- for message in messages -%}"
    "<{{ message.role }}>"
    "{%- if message.tool_calls -%}{{ message.content or '' }}<|tool_calls_section_begin|>"
    "{%- for call in message.tool_calls -%}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>"
    "{%- elif message.role == 'tool' -%}## Return of {{ message.tool_call_id }}\n{{ message.content }}"
    "{%- else -%}{{ message.content }}{%- endif -%}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
"""As Kimi K2: a call is named by its id only, and the id stands in front of its answer."""


def kimi_call(*ids: str) -> str:
    calls = "".join(f'<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>' for id in ids)
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def test_the_answer_to_a_call_has_the_id_that_the_model_wrote() -> None:
    renderer = Renderer(byte_tokenizer(KIMI), unchecked=["tools shown"])
    assert (
        renderer.turn_parser.tool_format.name == "kimi"
    )  # found out, though the template writes no name but in the id
    turns = [kimi_call("functions.add:0", "functions.add:1"), kimi_call("functions.add:2"), "Two.", "Yes."]
    trajectory = hold(scripted(turns, renderer=renderer), adds, renderer=renderer)
    assert (trajectory.error, trajectory.template_mismatch) == (None, None)
    context = [text for turn, text in spoken(trajectory.segments[0], renderer) if turn < 0]
    assert context == [
        "<user>Hi<|im_end|><assistant>",
        "<tool>## Return of functions.add:0\n2<|im_end|><tool>## Return of functions.add:1\n2<|im_end|><assistant>",
        "<tool>## Return of functions.add:2\n2<|im_end|><assistant>",
        "<user>Sure?<|im_end|><assistant>",
    ]
    first = trajectory.messages[1]["tool_calls"]
    assert [(call["id"], call["function"]["name"]) for call in first] == [
        ("functions.add:0", "add"),
        ("functions.add:1", "add"),
    ]
    assert [message["tool_call_id"] for message in trajectory.messages if message["role"] == "tool"] == [
        "functions.add:0",
        "functions.add:1",
        "functions.add:2",
    ]


@pytest.mark.parametrize(
    ("text", "format", "ids"),
    [
        ('[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "mistral", ["a1b2c3d4e"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "x1"}, {"name": "add"}]', "mistral", ["x1", "call_6"]),
        (
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {}}]<|END_ACTION|>',
            "cohere2",
            ["0"],
        ),
        (kimi_call("functions.add:7"), "kimi", ["functions.add:7"]),
        # a format without ids does not take one
        ('<tool_call>{"name": "add", "arguments": {}, "id": "x1"}</tool_call>', "hermes", ["call_5"]),
        # the same twice in a turn: whose answer is whose must be told
        (kimi_call("functions.add:0", "functions.add:0"), "kimi", ["functions.add:0", "call_6"]),
        ('[TOOL_CALLS][{"name": "f", "id": "call_6"}, {"name": "f"}]', "mistral", ["call_6", "call_6x"]),
        # nothing that could be read as something else than an id
        ('[TOOL_CALLS][{"name": "f", "id": "<|im_end|>"}]', "mistral", ["call_5"]),
        ('[TOOL_CALLS][{"name": "f", "id": "a b"}, {"name": "f", "id": ["a"]}]', "mistral", ["call_5", "call_6"]),
        (f'[TOOL_CALLS][{{"name": "f", "id": "{"a" * 65}"}}]', "mistral", ["call_5"]),
    ],
)
def test_ids_are_read_where_the_format_has_them_and_are_plain_short_and_unique(
    text: str, format: str, ids: list[str]
) -> None:
    assert [call.id for call in by_name(format).parse(text, first_id=5).calls] == ids


def test_replayed_answers_have_the_ids_that_their_calls_have() -> None:
    called = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    for template, id in ((KIMI, "functions.add:1"), (CHATML, "call_0")):
        renderer = Renderer(byte_tokenizer(template), unchecked=["tools shown"])
        row = Row(id="1", messages=messages, fields={"tools": [TOOL]})
        opening, said = rounds(messages)
        script = [lines(renderer, opening, said, [TOOL])]
        engine = ScriptedEngine(script, encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0])
        trajectory = hold(engine, Replay, row=row, renderer=renderer)
        assert (trajectory.error, trajectory.template_mismatch) == (None, None)
        assert [message.get("tool_call_id") for message in trajectory.messages] == [None, None, id, None]
        assert trajectory.messages[1]["tool_calls"][0]["id"] == id
