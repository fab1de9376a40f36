"""The conversations that templates are asked with: what is kept of renderings, and templates with rules for calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from support import CHATML, byte_tokenizer
from support.conversations import call, hold, scripted, spoken
from turnwise.chat.probes import LONGEST_TEXT, TEXTS, PriorConversation, cached_by_content
from turnwise.chat.renderer import Renderer
from turnwise.chat.template import with_short_ids
from turnwise.chat.tool_calls import format_by_name
from turnwise.doctor.template import SCENARIOS, Scenario, check_scenario
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import environment
from turnwise.sft.replay import Replay, lines, rounds
from turnwise.types import Message, Opening, Reply, Row, Trajectory, Turn

# The base conversation has what the conversation has: bridges of append-only templates are those of one pass.


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}

SYSTEM: Message = {"role": "system", "content": "Be brief."}

ASKED: Message = {"role": "user", "content": "1+1?"}

MORE: Message = {"role": "user", "content": "And now?"}

_ANSWER = "\n<tool_response>\n"

_COUNTS = "{%- set ns = namespace(n=0, asked=0) %}"

COUNTED_IDS = _COUNTS + CHATML.replace(_ANSWER, '\n<tool_response id="call_{{ ns.n }}">{% set ns.n = ns.n + 1 %}\n')
"""Ids that the template gives to answers itself: call_0, call_1 and so on over all rounds."""

NUMBERED_TURNS = CHATML.replace(
    "<|im_start|>{{ message.role }}\n", "<|im_start|>{{ message.role }} {{ loop.index0 }}\n"
)

NUMBERED_TURNS = NUMBERED_TURNS.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant {{ messages | length }}\n{% endif %}"
)
"""Every message has its number, the generation prompt too."""

COUNTED_CALLS = _COUNTS + CHATML.replace(
    "{%- else %}<|im_start|>", "{%- else %}{% set ns.n = ns.n + (message.tool_calls or []) | length %}<|im_start|>"
).replace(_ANSWER, '\n<tool_response after="{{ ns.n }} calls">\n')
"""Answers say how many calls there were so far."""

NO_SYSTEM = CHATML.replace(
    _ANSWER,
    "\n{% if messages[0].role != 'system' and loop.index0 == 2 %}Tools answer as follows.\n{% endif %}<tool_response>\n",
)
"""The first answer of a tool has another header where there is no system message."""

NO_SYSTEM_USER = CHATML.replace(
    "<|im_start|>{{ message.role }}\n",
    "<|im_start|>{{ message.role }}{{ ' (no rules)' if messages[0].role != 'system' and message.role == 'user' }}\n",
)
"""Messages of users have another header where there is no system message."""

WITH_TOOLS = CHATML.replace(
    "<|im_start|>{{ message.role }}\n",
    "<|im_start|>{{ message.role }}{{ ' with tools' if tools and message.role == 'user' }}\n",
)
"""Messages of users have another header where there are tools."""

AFTER_TOOLS = _COUNTS + CHATML.replace(
    "<|im_start|>{{ message.role }}\n",
    "<|im_start|>{{ message.role }}{{ ' who has seen tools' if ns.n and message.role == 'user' }}\n",
).replace(_ANSWER, "\n<tool_response>{% set ns.n = 1 %}\n")
"""Messages of users have another header once a tool has answered."""

TEMPLATES = {
    "ids that count up": COUNTED_IDS,
    "numbered messages": NUMBERED_TURNS,
    "counted calls": COUNTED_CALLS,
    "first answer without a system message": NO_SYSTEM,
    "headers without a system message": NO_SYSTEM_USER,
    "headers with tools": WITH_TOOLS,
    "headers after tools": AFTER_TOOLS,
}

COUNTING = ("ids that count up", "numbered messages", "counted calls")


@environment
async def adds(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers calls, then asks twice more."""
    turn = yield Opening(messages=row.messages, tools=[TOOL])
    for _ in range(3):
        while turn.calls:
            answers = [{"role": "tool", "tool_call_id": one.id, "name": "add", "content": "2"} for one in turn.calls]
            turn = yield Reply(messages=answers)
        turn = yield Reply(messages=[MORE])
    yield Reply(done=True)


def called(*numbers: int) -> str:
    return "".join(call("add", f'{{"a": {number}}}') for number in numbers)


SAID = [called(1), called(2, 3), called(4), "Two.", called(5), "Three.", "Four.", "Five."]


def one_pass(renderer: Renderer, trajectory: Trajectory) -> list[int]:
    """The ids of the recorded messages, rendered and encoded at once by the tokenizer alone."""
    text: Any = renderer.tokenizer.apply_chat_template(trajectory.messages, tools=[TOOL], tokenize=False)
    return renderer.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("system", [True, False], ids=["system", "no system"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_conversation_are_those_of_one_pass(name: str, system: bool) -> None:
    renderer = Renderer(byte_tokenizer(TEMPLATES[name]))
    assert renderer.turn_parser.tool_format.name == "hermes"
    row = Row(id="1", messages=[SYSTEM, ASKED] if system else [ASKED])
    trajectory = hold(scripted(SAID, renderer=renderer), adds, renderer=renderer, row=row)
    assert (trajectory.error, trajectory.template_mismatch, len(trajectory.turns)) == (None, None, 8)
    (segment,) = trajectory.segments
    whole = one_pass(renderer, trajectory)
    assert list(segment.token_ids) == whole[: len(segment)]
    assert renderer.decode(whole[len(segment) :]) == "\n"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_sweep_finds_such_templates_exact(name: str, scenario: Scenario) -> None:
    found = check_scenario(Renderer(byte_tokenizer(TEMPLATES[name])), scenario)
    assert found.exact, found.differs or found.refused


@pytest.mark.parametrize("name", [*TEMPLATES, "plain"])
def test_only_templates_that_count_are_asked_behind_the_whole_conversation(name: str) -> None:
    template = Renderer(byte_tokenizer(TEMPLATES.get(name, CHATML))).template
    messages = [SYSTEM, ASKED, {"role": "assistant", "content": "x"}, {**MORE, "role": "tool"}, ASKED]
    before = PriorConversation.from_messages(messages, has_tools=True)
    assert (before.has_tool_messages, before.system_role, before.has_tools) == (True, "system", True)
    plan = template.plan([{"role": "tool", "name": "add", "tool_call_id": "call_0", "content": "2"}], before)
    assert plan.base_features == before.without_messages
    assert (plan.needs_history, bool(plan.base_for(before).messages)) == ((name in COUNTING,) * 2)


MOVES_TOOLS = (
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}"
    "{%- elif message.role == 'user' %}<|im_start|>user: "
    "{%- if loop.last %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}{% endif %}{{ message.content }}<|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes tools and the system message before the last user message, as Mistral's do."""


def test_a_base_conversation_has_nothing_that_the_template_would_write_into_the_bridge() -> None:
    renderer = Renderer(byte_tokenizer(MOVES_TOOLS))
    before = PriorConversation(system_role="system", has_tools=True)
    assert renderer.template.plan([MORE], before).base_features == PriorConversation()
    text = renderer.encode_bridge(renderer.stop_token_ids[0], [MORE], before).text
    assert text == "\n<|im_start|>user:And now?<|im_end|><|im_start|>assistant\n"


CALLS_WITH_TOOLS = CHATML.replace(
    "for call in message.tool_calls or []", "for call in (message.tool_calls if tools) or []"
)
"""Takes conversations without tools, and writes calls only where there are tools."""

REFUSES_CALLS = (
    "{%- for message in messages %}{%- if message.tool_calls and not tools %}{{ raise_exception('no tools') }}"
)

REFUSES_CALLS += "{% endif %}{% endfor %}" + CHATML


@pytest.mark.parametrize("template", [CALLS_WITH_TOOLS, REFUSES_CALLS], ids=["leaves them out", "refuses them"])
def test_calls_that_are_written_only_with_tools_are_asked_for_with_a_tool(template: str) -> None:
    renderer = Renderer(byte_tokenizer(template))
    assert not renderer.profile.messages.requires_tools
    assert renderer.turn_parser.tool_format.name == "hermes"
    assert [check_scenario(renderer, scenario).exact for scenario in SCENARIOS] == [True] * len(SCENARIOS)
    row = Row(id="1", messages=[ASKED])
    trajectory = hold(scripted(SAID, renderer=renderer), adds, renderer=renderer, row=row)
    assert (trajectory.error, trajectory.template_mismatch) == (None, None)
    assert list(trajectory.segments[0].token_ids) == one_pass(renderer, trajectory)[: len(trajectory.segments[0])]
    plain = hold(["4"], renderer=renderer)
    assert (plain.error, plain.template_mismatch) == (None, None)  # and without tools it is what it was


# Templates that are particular about calls: ids of nine letters and digits, and a count of whose turn it is
# (Mistral's).


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

CALL_IDS_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@environment
async def call_ids_adds(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    turn = yield Opening(messages=row.messages, tools=[CALL_IDS_TOOL])
    while turn.calls:
        answers = [{"role": "tool", "tool_call_id": one.id, "name": "add", "content": "2"} for one in turn.calls]
        turn = yield Reply(messages=answers)
    turn = yield Reply(messages=[{"role": "user", "content": "Sure?"}])
    yield Reply(done=True)


def test_ids_of_calls_are_short_where_the_template_insists_and_its_count_of_turns_is_right() -> None:
    renderer = Renderer(byte_tokenizer(MISTRAL), unchecked=["tools shown"])
    assert renderer.turn_parser.tool_format.name == "mistral"
    unnamed = CALL.replace(', "id": "a1b2c3d4e"', "")
    trajectory = hold(scripted([CALL, unnamed, " Two.", " Yes."], renderer=renderer), call_ids_adds, renderer=renderer)
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
    trajectory = hold(scripted(turns, renderer=renderer), call_ids_adds, renderer=renderer)
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
    assert [call.id for call in format_by_name(format).parse(text, first_id=5).calls] == ids


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
        row = Row(id="1", messages=messages, fields={"tools": [CALL_IDS_TOOL]})
        opening, said = rounds(messages)
        script = [lines(renderer, opening, said, [CALL_IDS_TOOL])]
        engine = ScriptedEngine(script, encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0])
        trajectory = hold(engine, Replay, row=row, renderer=renderer)
        assert (trajectory.error, trajectory.template_mismatch) == (None, None)
        assert [message.get("tool_call_id") for message in trajectory.messages] == [None, None, id, None]
        assert trajectory.messages[1]["tool_calls"][0]["id"] == id


# Renderings are kept for plain data only, and only for what is rendered exactly the same.


CACHES_TOOL: Any = {"type": "function", "function": {"name": "f"}}


class CachesRenderer:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, messages: Sequence[Any], *, add_generation_prompt: bool, tools: Sequence[Any]) -> str:
        self.calls += 1
        return f"{messages} {add_generation_prompt} {tools}"


def test_equal_arguments_are_rendered_once_and_others_on_their_own() -> None:
    render = CachesRenderer()
    cached = cached_by_content(render)
    message = {"role": "user", "content": "hello"}
    cases: list[tuple[list[Any], bool, list[Any]]] = [
        ([message], True, []),
        ([message], False, []),
        ([message], True, [CACHES_TOOL]),
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
    cached = cached_by_content(CachesRenderer())
    message: Any = {"role": "user", "content": {"a": [1, 2]}}
    before = cached([message], add_generation_prompt=True, tools=[])
    message["content"]["a"].append(3)
    assert cached([message], add_generation_prompt=True, tools=[]) != before


def test_long_conversations_and_other_values_than_plain_data_are_not_kept() -> None:
    render = CachesRenderer()
    cached = cached_by_content(render)
    for content in (object(), "x" * (LONGEST_TEXT + 1)):
        calls = render.calls
        for _ in range(2):
            cached([{"role": "user", "content": content}], add_generation_prompt=True, tools=[])
        assert render.calls == calls + 2


def test_the_number_of_kept_renderings_is_bounded() -> None:
    render = CachesRenderer()
    cached = cached_by_content(render)
    for number in [0, *range(TEXTS + 1), 0]:
        cached([{"role": "user", "content": str(number)}], add_generation_prompt=True, tools=[])
    assert render.calls == TEXTS + 2
