"""The base conversation has what the conversation has: bridges of append-only templates are those of one pass."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from support import CHATML, byte_tokenizer
from support.conversations import call, hold, scripted
from turnwise.chat.probes import PriorConversation
from turnwise.chat.renderer import Renderer
from turnwise.doctor.template import SCENARIOS, Scenario, check_scenario
from turnwise.environments.environment import environment
from turnwise.types import Message, Opening, Reply, Row, Trajectory, Turn

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
