"""Templates that are particular about calls: ids of nine letters and digits, and a count of whose turn it is (Mistral's)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from support import byte_tokenizer
from support.conversations import hold, scripted, spoken
from turnwise.environments.environment import environment
from turnwise.rollout.probes import with_short_ids
from turnwise.rollout.renderer import Renderer
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
    renderer = Renderer(byte_tokenizer(MISTRAL))
    assert renderer.tool_format.name == "mistral"
    trajectory = hold(scripted([CALL, CALL, " Two.", " Yes."], renderer=renderer), adds, renderer=renderer)
    assert (trajectory.stop, trajectory.error, trajectory.drift) == ("done", None, None)
    context = [text for turn, text in spoken(trajectory.segments[0], renderer) if turn < 0]
    assert context == [
        "[INST] Hi[/INST]",
        '[TOOL_RESULTS] {"content": 2, "call_id": "call00000"}[/TOOL_RESULTS]',
        '[TOOL_RESULTS] {"content": 2, "call_id": "call00001"}[/TOOL_RESULTS]',
        "[INST] Sure?[/INST]",
    ]
    assert [call.id for turn in trajectory.turns for call in turn.calls] == ["call_0", "call_1"]  # ours are as they are


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
