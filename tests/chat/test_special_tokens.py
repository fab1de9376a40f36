"""Models of 2026 with the special tokens of their tokenizers: calls and reasoning are read, turns are bridged, masks are right.

The tokenizers have one token for each byte, and the added tokens that the models' tokenizers have, special ones and others: marks
of calls and of reasoning are often tokens that are not special. The templates of Qwen3.5, LFM2.5 and Nemotron 3 are those that
trl ships; those of Granite 4.1 and Kimi K2.5 are written here, and write what these write.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from support import byte_tokenizer
from support.conversations import hold, scripted, spoken
from support.templates import GRANITE_4, KIMI_K2_5
from turnwise.chat.renderer import Renderer
from turnwise.doctor.template import preflight
from turnwise.environments.environment import environment
from turnwise.options.schema import Config
from turnwise.types import Opening, Reply, Row, Turn

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is known of a model's tokenizer and template."""

    template: str
    """The name of a file of trl, or the template itself."""
    special: Sequence[str]
    marks: Sequence[str]
    """Added tokens that are not special."""
    eos: str
    format: str
    call: str
    """A call of `add` with a = 1, as the model writes it."""
    id: str = "call_0"
    """The id of its first call."""
    thought: str = ""
    """Reasoning in front of the first call, from after the generation prompt to the closing mark, and what follows that."""
    reasoning: str = ""
    """The reasoning that is read from it."""
    opens: str = ""
    """The end of the generation prompt, if it opens the reasoning."""
    bridge: str
    """What the template writes between the first turn of the model and its next one."""
    later: str
    """The same in front of the third turn, after a message of the user."""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINKS = ("<think>", "</think>")
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
_HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

MODELS = {
    "Qwen3.5": Model(
        template="qwen3_5_think.jinja",
        special=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        marks=(*_CALLS, *_THINKS),
        eos="<|im_end|>",
        format="qwen3_coder",
        call=_XML,
        thought="One and one.\n</think>\n\n",
        reasoning="One and one.",
        opens="<think>\n",
        bridge="\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        later="\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "LFM2.5": Model(
        template="lfm2_2_5_v2.jinja",
        special=(
            *("<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
            *("<|tool_response_start|>", "<|tool_response_end|>"),
        ),
        marks=_THINKS,
        eos="<|im_end|>",
        format="lfm2",
        call="<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
        thought="<think>One and one.</think>",
        reasoning="One and one.",
        bridge="\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n",
        later="\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Granite 4.1": Model(
        template=GRANITE_4,
        special=(
            *("<|pad|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|unk|>", "<|endoftext|>"),
            *("<tools>", "</tools>", "<documents>", "</documents>"),
        ),
        marks=(*_CALLS, *_THINKS),
        eos="<|end_of_text|>",
        format="hermes",
        call=_HERMES,
        bridge="\n<|start_of_role|>user<|end_of_role|>\n<tool_response>\n2\n</tool_response><|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>",
        later="\n<|start_of_role|>user<|end_of_role|>Sure?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
    "Nemotron 3": Model(
        template="nemotron_3_nano.jinja",
        special=(*_CHATML, "<s>", "</s>", "<unk>"),
        marks=(*_CALLS, *_THINKS),
        eos="<|im_end|>",
        format="qwen3_coder",
        call=_XML + "\n",
        thought="One and one.\n</think>\n",
        reasoning="One and one.",
        opens="<think>\n",
        bridge="\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think>\n",
        later="\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "Kimi K2.5": Model(
        template=KIMI_K2_5,
        special=(
            *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<|endoftext|>"),
        ),
        marks=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>", *_THINKS),
        ),
        eos="<|im_end|>",
        format="kimi",
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        id="functions.add:0",
        thought="One and one.</think>",
        reasoning="One and one.",
        opens="<think>",
        bridge="<|im_system|>add<|im_middle|>## Return of functions.add:0\n2<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>",
        later="<|im_user|>user<|im_middle|>Sure?<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    ),
}


def _source(model: Model) -> str:
    if not model.template.endswith(".jinja"):
        return model.template
    trl = importlib.util.find_spec("trl")  # found, never imported
    if trl is None or trl.origin is None:
        pytest.skip("no chat templates on this machine: pip install trl==1.16.0")
    return (Path(trl.origin).parent / "chat_templates" / model.template).read_text(encoding="utf-8")


def _tokenizer(model: Model) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(_source(model), special=model.special, eos=model.eos)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in model.marks])
    tokenizer.bos_token = model.special[0]
    return tokenizer


@environment
async def asks(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers a call, then asks once more."""
    turn = yield Opening(messages=row.messages, tools=[TOOL])
    while turn.calls:
        turn = yield Reply(
            messages=[{"role": "tool", "tool_call_id": one.id, "name": "add", "content": "2"} for one in turn.calls]
        )
    yield Reply(messages=[{"role": "user", "content": "Sure?"}])
    yield Reply(done=True)


def _texts(model: Model) -> list[str]:
    """Three turns of the model, each with reasoning where the model reasons."""
    return [model.thought + model.call, f"{model.thought}Two.", f"{model.thought}Yes."]


@pytest.mark.parametrize("name", MODELS)
def test_all_marks_are_single_tokens_and_the_format_is_found(name: str) -> None:
    model = MODELS[name]
    renderer = Renderer(_tokenizer(model))
    for mark in (*model.special, *model.marks):
        assert len(renderer.encode(mark)) == 1, mark
    assert renderer.turn_parser.tool_format.name == model.format
    assert [renderer.decode([token]) for token in renderer.stop_token_ids] == [model.eos]
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "tools": ["a:b"]})
    preflight(config, renderer, training=True)  # no check fails: round trip, masks, tools shown, user and tool turns


@pytest.mark.parametrize("name", MODELS)
def test_calls_and_reasoning_are_read_and_turns_are_bridged_as_one_pass_writes_them(name: str) -> None:
    model = MODELS[name]
    renderer = Renderer(_tokenizer(model))
    row = Row(id="1", messages=[{"role": "user", "content": "1+1?"}])
    trajectory = hold(scripted(_texts(model), renderer=renderer), asks, renderer=renderer, row=row, thinking="branch")
    assert (trajectory.error, trajectory.template_mismatch) == (None, None)
    first, second, third = trajectory.turns
    assert [(call.name, call.arguments, call.id, call.error) for call in first.calls] == [
        ("add", {"a": 1}, model.id, None)
    ]
    assert (first.reasoning, first.reasoning_opening) == (model.reasoning, model.opens)
    assert (second.calls, second.message["content"], third.message["content"]) == ((), "Two.", "Yes.")
    context = [text for turn, text in spoken(trajectory.segments[0], renderer) if turn < 0]
    assert context[1] == model.bridge
    (last,) = [text for turn, text in spoken(trajectory.segments[-1], renderer) if turn < 0][-1:]
    assert last.endswith(model.later)


@pytest.mark.parametrize("name", MODELS)
def test_exactly_the_sampled_tokens_are_trained_on(name: str) -> None:
    model = MODELS[name]
    renderer = Renderer(_tokenizer(model))
    row = Row(id="1", messages=[{"role": "user", "content": "1+1?"}])
    trajectory = hold(scripted(_texts(model), renderer=renderer), asks, renderer=renderer, row=row, thinking="keep")
    assert trajectory.template_mismatch is None  # reasoning that a template leaves out later is no difference
    (segment,) = trajectory.segments
    stop = renderer.stop_token_ids[0]
    for number, text in enumerate(_texts(model)):
        own = [token for token, turn in zip(segment.token_ids, segment.turn, strict=True) if turn == number]
        assert own == [*renderer.encode(text), stop]


@pytest.mark.parametrize("name", MODELS)
def test_other_words_of_the_template_are_found_behind_reasoning_that_it_leaves_out(name: str) -> None:
    model = MODELS[name]
    tokenizer = _tokenizer(model)
    tokenizer.chat_template = _source(model).replace(
        "message.content", "(message.content | replace('Yes', 'No') if message.content is string else message.content)"
    )
    renderer = Renderer(tokenizer)
    row = Row(id="1", messages=[{"role": "user", "content": "1+1?"}])
    trajectory = hold(scripted(_texts(model), renderer=renderer), asks, renderer=renderer, row=row, thinking="keep")
    assert trajectory.template_mismatch is not None
    assert "No." in trajectory.template_mismatch.message
