"""Where a turn ends in the template's text: nothing that the model has said itself is written again behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support import CHATML, byte_tokenizer
from support.conversations import hold, spoken
from support.families import family_renderer, template_files
from turnwise.chat.probes import PLACEHOLDER, TOOL, probe_call
from turnwise.chat.renderer import Renderer
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import environment
from turnwise.errors import TemplateError
from turnwise.types import Opening, Reply, Row, Turn

MARKS = ("<call>", "</call>", "<result>", "</result>", "<done>", "<turn>", "</turn>")

OPENS_ANSWERS = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.index0 and messages[loop.index0 - 1].role == 'assistant' "
    "and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('An answer without a call.') }}{% endif %}"
    "<result>{{ message.content }}</result>"
    "{%- else %}"
    "{%- if message.role != 'assistant' or loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "<turn>{{ message.role }}\n{% endif %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>"
    "{%- endfor %}{% if not message.tool_calls %}</turn>\n{% elif loop.last %}<result>{% endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}<turn>assistant\n{% endif %}"
)
"""As Gemma 4: a turn of calls ends with the token that opens each answer, and goes on behind the answers."""

ENDS_CALLS = (
    OPENS_ANSWERS.replace("{% elif loop.last %}<result>{% endif %}", "{% else %}<done>{% endif %}")
    .replace("<result>{{ message.content }}</result>", "<turn>tool\n{{ message.content }}</turn>\n")
    .replace(" or messages[loop.index0 - 1].role != 'tool' %}", " or true %}")
    .replace(" and messages[-1].role != 'tool' %}", " %}")
)
"""As gpt-oss: a turn of calls ends with a token of its own, which belongs to no answer."""


def renderer_of(template: str) -> Renderer:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    tokenizer.eos_token = "</turn>"
    return Renderer(
        tokenizer, tool_format="pythonic", unchecked=["tools shown"], generation_stop_ids=tokenizer.encode("<done>")
    )


def context_behind(renderer: Renderer, end: str) -> str:
    """What stands between a turn of one call that ended with `end`, and the next turn."""

    @environment
    async def answers(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages, tools=[TOOL])
        answer = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "Five."}
        yield Reply(messages=[answer])
        yield Reply(done=True)

    call = renderer.template.completion_text(probe_call({"text": "x"})).partition("</call>")[0] + "</call>"
    engine = ScriptedEngine(
        [[call + end, "Five</turn>"]], encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0]
    )
    trajectory = hold(engine, answers, renderer=renderer)
    assert trajectory.error is None, trajectory.error
    runs = spoken(trajectory.segments[0], renderer)
    assert runs[1] == (0, call + end)
    return runs[2][1]


@pytest.mark.parametrize(
    ("template", "end", "context"),
    [
        pytest.param(OPENS_ANSWERS, "<result>", "Five.</result>", id="the template's own, which opens the answer"),
        pytest.param(OPENS_ANSWERS, "</turn>", "<result>Five.</result>", id="another one: the answer is opened"),
        pytest.param(ENDS_CALLS, "<done>", "<turn>tool\nFive.</turn><turn>assistant\n", id="the template's own"),
        pytest.param(ENDS_CALLS, "</turn>", "<turn>tool\nFive.</turn><turn>assistant\n", id="another one in its place"),
    ],
)
def test_behind_a_call_no_piece_of_the_probe_call_is_written_whatever_token_ended_it(
    template: str, end: str, context: str
) -> None:
    assert context_behind(renderer_of(template), end) == context


@pytest.mark.parametrize(
    ("template", "context"),
    [(OPENS_ANSWERS, "<result>Five.</result>"), (ENDS_CALLS, "<done><turn>tool\nFive.</turn><turn>assistant\n")],
)
def test_a_call_that_no_token_ended_is_ended_as_the_template_does(template: str, context: str) -> None:
    renderer = renderer_of(template)
    answer = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "Five."}
    behind = renderer.encode("</call>")[-1]
    assert renderer.decode(renderer.encode_bridge(behind, [answer]).token_ids) == context


@pytest.mark.parametrize("file", template_files(), ids=lambda file: file.stem)
def test_no_family_writes_pieces_of_a_call_behind_a_turn(file: Path) -> None:
    renderer = family_renderer(file)
    answer = {"role": "tool", "tool_call_id": "callprob0", "name": "probe_tool", "content": "Five."}
    try:
        plan = renderer.template.plan([answer])
    except TemplateError:
        return  # it takes no answers of tools
    if not renderer.template.writes_calls:
        return
    whole = renderer.template.completion_text(probe_call({"text": PLACEHOLDER}))
    piece = renderer.encode(whole.partition(PLACEHOLDER)[2].strip())[0]  # what closes the argument
    for stop in (*renderer.stop_token_ids, renderer.encode("x")[0]):
        assert renderer.encode_bridge(stop, plan.apply([answer])).token_ids[0] != piece


# a stop token that also stands inside a turn

THINKS_APART = (
    "{%- for message in messages %}<turn>{{ message.role }}\n"
    "{%- if message.thinking %}thinks:{{ message.thinking }}<done>{% endif %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>"
    "{%- endfor %}{{ '<done>' if message.role == 'assistant' else '</turn>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
"""Closes a thought with the token that also ends a turn, as gpt-oss does with `<|end|>` in turns that are not the last."""


def stops_of(template: str, *named: str, eos: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The stop tokens, and those that stand inside a turn with the part of a turn in which they do."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    tokenizer.eos_token = eos
    ids = [token for text in named for token in tokenizer.encode(text, add_special_tokens=False)]
    renderer = Renderer(tokenizer, generation_stop_ids=ids)
    inside = {renderer.decode([token]): part for token, part in renderer.profile.stop_tokens.inside_turns.items()}
    return [renderer.decode([token]) for token in renderer.stop_token_ids], inside


@pytest.mark.parametrize(
    ("template", "named", "stops", "inside"),
    [
        (CHATML, ["\n", "<|im_end|>"], ["<|im_end|>"], {"\n": "an answer of several lines"}),
        (CHATML, ["{", "<|im_end|>"], ["<|im_end|>"], {"{": "a call"}),
        (THINKS_APART, ["</turn>"], ["</turn>"], {"<done>": "reasoning"}),
        (THINKS_APART, ["<call>", "</turn>"], ["</turn>"], {"<done>": "reasoning", "<call>": "a call"}),
        (ENDS_CALLS, ["</call>", "<done>"], ["</turn>", "<done>"], {"</call>": "a turn of two calls"}),
    ],
)
def test_a_token_that_stands_inside_a_turn_does_not_end_it(
    template: str, named: list[str], stops: list[str], inside: dict[str, str]
) -> None:
    assert stops_of(template, *named) == (stops, inside)


def test_a_token_that_closes_thoughts_between_marks_does_not_end_a_turn() -> None:
    template = "{# <think></think> #}" + CHATML
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.eos_token = "</think>"
    renderer = Renderer(tokenizer)
    assert [renderer.decode([token]) for token in renderer.stop_token_ids] == ["<|im_end|>"]
    assert list(renderer.profile.stop_tokens.inside_turns.values()) == ["reasoning"]


def test_a_turn_that_only_such_a_token_would_end_is_refused_with_the_token_and_the_part() -> None:
    with pytest.raises(
        TemplateError, match=r"'<done>' \(\d+\) occurs in reasoning\. Set eos_token_id in generation_config\.json"
    ):
        stops_of(THINKS_APART)


def test_an_id_that_the_tokenizer_does_not_have_ends_nothing_and_is_remembered() -> None:
    renderer = Renderer(byte_tokenizer(), generation_stop_ids=[2, 99_999, -1])
    assert renderer.stop_token_ids == (2,)
    assert renderer.profile.stop_tokens.unknown_ids == (99_999, -1)


@pytest.mark.parametrize("file", template_files(), ids=lambda file: file.stem)
def test_no_stop_token_of_a_family_stands_inside_its_turns(file: Path) -> None:
    assert family_renderer(file).profile.stop_tokens.inside_turns == {}
