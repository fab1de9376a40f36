"""Templates of many families, and their special tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from support import CHATML, byte_tokenizer
from support.conversations import a_row, hold, scripted, spoken
from support.families import family_renderer, template_files
from support.templates import GRANITE_4, KIMI_K2_5
from turnwise.chat.renderer import Renderer
from turnwise.chat.template import Template
from turnwise.chat.template_profile import TemplateProblem
from turnwise.doctor.template import SCENARIOS, Scenario, check_scenario, preflight
from turnwise.environments.environment import environment
from turnwise.errors import TemplateError
from turnwise.options.schema import Config
from turnwise.types import Message, Opening, Reply, Row, Turn

# Chat templates of real models: written turn by turn, they are the one pass, or it is said where they are not.


FILES = template_files()

NAMES = [path.stem for path in FILES]

needs_templates = pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")

GENERATION_PROMPT = "opens reasoning in the generation prompt"

END = "ends the last turn with"

ONE_CALL = "only supports single tool-calls"

FIRST_CALL = "writes only the first 1 of several calls in a turn"

BEHIND = "writes the words beside a call behind the call"

NO_CALL = "leaves out the content of a 'assistant' message"

NO_WORDS = "leaves out the words beside a call"

OTHER_WORDS = "writes different text around the answers"

EVERY = tuple(scenario.name for scenario in SCENARIOS)

USERS = ("retry by user", "retry by system")

DEEPSEEK = {**dict.fromkeys(EVERY, GENERATION_PROMPT), "three tool rounds": OTHER_WORDS}

R1 = {**DEEPSEEK, "words and a call": NO_CALL}

NOT_EXACT: dict[str, dict[str, str]] = {
    "deepseek_r1_distill": R1,
    "deepseek_r1_distill_training": R1,
    "deepseekv3": DEEPSEEK,
    "deepseekv3_training": DEEPSEEK,
    "glm4moe": {"retry by system": END},
    "glm4moe_training": {"retry by system": END},
    "gptoss": {**dict.fromkeys(USERS, END), "parallel calls": FIRST_CALL, "words and a call": NO_WORDS},
    "gptoss_training": {**dict.fromkeys(USERS, END), "parallel calls": FIRST_CALL, "words and a call": NO_WORDS},
    "llama3_1": {"parallel calls": ONE_CALL, "words and a call": NO_WORDS},
    "llama3_2": {"parallel calls": ONE_CALL, "words and a call": NO_WORDS},
    "muse_glimmer": {"words and a call": NO_WORDS},
    "muse_glimmer_training": {"words and a call": NO_WORDS},
    **{
        f"{name}": {"words and a call": BEHIND}
        for name in ("diffusion_gemma", "diffusion_gemma_training", "gemma4", *(f"gemma4_v{n}" for n in range(2, 6)))
    },
    "qwen3_5_nothink": dict.fromkeys(USERS, GENERATION_PROMPT),
    "qwen3_5_think": dict.fromkeys(USERS, GENERATION_PROMPT),
    "qwen3_6": dict.fromkeys(USERS, GENERATION_PROMPT),
    **{
        f"nemotron_3_{size}{training}": dict.fromkeys(EVERY, GENERATION_PROMPT)
        for size in ("5_lightning", "nano", "super", "ultra")
        for training in ("", "_training")
    },
}
"""Where a template changes what it has written, by template and scenario; everywhere else the ids are those of the one pass."""

OTHER_ORDER = {
    **{name: {"words and a call"} for name in ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")},
    **{
        name: {"tool round", "words and a call", "parallel calls", "three tool rounds"}
        for name in ("diffusion_gemma", "diffusion_gemma_training")
    },
}
"""Where a template that builds turns from fields writes words in another order, or a header in front of them, once other messages
follow: the sanity check reports it."""


@needs_templates
@pytest.mark.parametrize("scenario", SCENARIOS, ids=EVERY)
@pytest.mark.parametrize(
    "path", FILES, ids=NAMES
)  # below: a worker that takes a part of the tests makes fewer renderers
def test_the_incremental_ids_are_those_of_the_one_pass_wherever_the_template_is_append_only(
    path: Path, scenario: Scenario
) -> None:
    found = check_scenario(family_renderer(path), scenario)
    why = NOT_EXACT.get(path.stem, {}).get(scenario.name)
    if why is None:
        assert found.exact, found.differs or found.refused
    else:
        assert not found.exact
        assert why in found.differs + found.refused


@environment
async def plays(row: Row, scenario: Scenario) -> AsyncGenerator[Opening | Reply, Turn]:
    """The other side of a scenario."""
    turn = yield Opening(messages=scenario.opening, tools=scenario.tools)
    for number, (said, answers) in enumerate(scenario.rounds):
        called = [one.name for one in turn.calls if one.error is None]
        assert called == [one["function"]["name"] for one in said.get("tool_calls", [])], (
            number,
            turn.text,
            turn.calls,
        )
        turn = yield Reply(messages=answers, done=not answers)


def said(renderer: Renderer, scenario: Scenario) -> list[str]:
    """What the model has to say in each turn for the template to write the scenario."""
    texts: list[str] = []
    stops = [renderer.decode([token]) for token in renderer.stop_token_ids]
    for message, _ in scenario.rounds:
        text = renderer.template.completion_text(message, tools=scenario.tools)
        ends = [text.find(stop) for stop in stops if stop in text]
        text = text[: min(ends)] if ends else text
        # a model that is put inside a thought ends it first
        opened = renderer.encode_opening(scenario.opening, scenario.tools).reasoning_opening and "</think>" not in text
        texts.append(f"</think>\n\n{text}" if opened else text)
    return texts


@needs_templates
@pytest.mark.parametrize("scenario", SCENARIOS, ids=EVERY)
@pytest.mark.parametrize(
    "path", FILES, ids=NAMES
)  # below: a worker that takes a part of the tests makes fewer renderers
def test_no_template_raises_inside_a_conversation_and_the_sanity_check_finds_only_what_one_pass_writes_otherwise(
    path: Path, scenario: Scenario
) -> None:
    renderer = family_renderer(path)
    if scenario.tools:
        try:
            _ = renderer.turn_parser.tool_format
        except TemplateError:
            pytest.skip("this template writes no tool calls")
    if NOT_EXACT.get(path.stem, {}).get(scenario.name) in (ONE_CALL, FIRST_CALL, NO_CALL):
        pytest.skip("this template writes one call a turn, or no call beside words")
    trajectory = hold(
        scripted(said(renderer, scenario), renderer=renderer),
        lambda: plays(scenario=scenario),
        renderer=renderer,
        row=a_row(),
    )
    assert trajectory.error is None, trajectory.error
    assert len(trajectory.turns) == len(scenario.rounds)
    # the check renders calls as calls: it finds what a template writes in another way once they are followed by others
    assert (trajectory.template_mismatch is not None) == (
        NOT_EXACT.get(path.stem, {}).get(scenario.name) == OTHER_WORDS
        or scenario.name in OTHER_ORDER.get(path.stem, ())
    )
    (segment,) = trajectory.segments
    for turn in trajectory.turns:
        assert turn.completion is not None
        own = [token for token, place in zip(segment.token_ids, segment.turn, strict=True) if place == turn.index]
        assert own == list(turn.completion.token_ids)


@needs_templates
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_forty_turns_encode_no_token_twice(path: Path) -> None:
    renderer = family_renderer(path)
    rounds = [
        ({"role": "assistant", "content": f"words-{n}-x"}, [{"role": "user", "content": f"more-{n}-x"}])
        for n in range(39)
    ]
    last = ({"role": "assistant", "content": "words-39-x"}, [])
    found = check_scenario(renderer, Scenario(name="forty turns", rounds=[*rounds, last]))
    assert not found.refused
    # only what the model did not say is encoded at all
    assert found.encoded_tokens <= found.total_tokens


NEEDS_TOOLS = "{%- if not tools %}{{ raise_exception('no tools') }}{%- endif %}" + CHATML


@needs_templates
@pytest.mark.parametrize("scenario", SCENARIOS, ids=EVERY)
def test_a_template_that_works_only_with_tools_is_asked_with_one(scenario: Scenario) -> None:
    renderer = Renderer(byte_tokenizer(NEEDS_TOOLS))
    assert renderer.profile.messages.requires_tools
    assert renderer.turn_parser.tool_format.name == "hermes"
    found = check_scenario(renderer, scenario)
    assert found.exact, found.differs or found.refused


@needs_templates
def test_a_recipe_without_tools_is_refused_where_the_template_works_only_with_tools() -> None:
    config = Config.model_validate({"model": {"path": "x"}, "data": {"train": "x.jsonl"}})
    with pytest.raises(TemplateError, match="refuses conversations without tools, and the recipe has no tools"):
        preflight(config, Renderer(byte_tokenizer(NEEDS_TOOLS)))
    assert preflight(config, Renderer(byte_tokenizer(NEEDS_TOOLS)), tools=True) == []
    trajectory = hold(["4"], renderer=Renderer(byte_tokenizer(NEEDS_TOOLS)))
    assert trajectory.error is not None
    assert "no tools" in trajectory.error.message


# The TemplateProfile: found once, frozen, comparable, printable; questions about tools raise only where tools are
# used.


NO_CALLS = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"

IN_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
)


def test_a_profile_is_frozen_and_equal_to_that_of_the_same_template() -> None:
    one, other = (Renderer(byte_tokenizer()).profile for _ in range(2))
    assert one == other
    assert one != Renderer(byte_tokenizer(NO_CALLS)).profile
    assert one != Renderer(byte_tokenizer(), tool_format="llama3").profile
    assert one != Renderer(byte_tokenizer(CHATML.replace("<tool_call>", "<call>"))).profile  # another format of calls
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.tool_format_name = "x"  # type: ignore[misc]


def test_a_profile_prints_a_line_for_each_property() -> None:
    assert str(Renderer(byte_tokenizer()).profile).splitlines() == [
        "content         text",
        "tools           described in the prompt, optional",
        "tool calls      parsed as hermes, arguments as an object, ids: any, any number in a turn",
        'call text       \'<tool_call>\\n{"name": "probe_tool", "arguments": {"text": "x"}}\\n</tool_call><|im_end|>\\n\'',
        "model turn      given as text",
        "turn ends with  '<|im_end|>\\n', stop tokens [2]",
        "reasoning       not supported",
    ]


def test_content_in_parts_is_found() -> None:
    assert Renderer(byte_tokenizer(IN_PARTS)).profile.messages.content_as_parts


def test_a_template_without_calls_has_a_profile_and_an_error_where_tools_are_used() -> None:
    renderer = Renderer(byte_tokenizer(NO_CALLS))
    assert renderer.profile.messages.calls is None
    assert not renderer.profile.messages.describes_tools
    assert renderer.profile.turn.max_calls == 0
    assert renderer.profile.tool_format == TemplateProblem("writes no tool calls")
    assert renderer.turn_parser.parse(renderer.encode("Four.")).message == {"role": "assistant", "content": "Four."}
    with pytest.raises(
        TemplateError, match="writes no tool calls, so the format in which the model should write them is unknown"
    ):
        renderer.turn_parser.parse(renderer.encode("Four."), tools=[{}])


# As DeepSeek R1 has it: a turn with calls is known by its content, which is None and not left out.
CALLS_WITHOUT_CONTENT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% if m['content'] is none %}<tool_call>"
    "{{ m['tool_calls'][0]['function'] | tojson }}</tool_call>{% else %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def test_a_content_of_none_reaches_the_template_with_every_version_of_transformers() -> None:
    """`apply_chat_template` of transformers 5.24 removes such keys, so that the template writes an empty turn."""
    renderer = Renderer(byte_tokenizer(CALLS_WITHOUT_CONTENT))
    assert renderer.profile.messages.calls is not None
    assert renderer.profile.messages.calls.empty_content is None
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    text = renderer.template.render(
        [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>user:1?<|im_end|>"
        '<|im_start|>assistant:<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
        "<|im_start|>assistant:"
    )


def test_a_tokenizer_with_a_rendering_of_its_own_is_rendered_by_it() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args: Any, **options: Any) -> Any:
            return str(super().apply_chat_template(*args, **options)).replace("user:", "USER:")

    plain = byte_tokenizer(NO_CALLS)
    tokenizer = Shouting(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = NO_CALLS
    for one, role in ((plain, "user"), (tokenizer, "USER")):
        template = Template(one, "the tokenizer")
        assert (
            template.render([{"role": "user", "content": "Hi."}], add_generation_prompt=True) == f"{role}:Hi.<|im_end|>"
        )


def test_a_template_of_several_is_chosen_by_whether_there_are_tools() -> None:
    tokenizer = byte_tokenizer(NO_CALLS)
    tokenizer.chat_template = {"default": NO_CALLS, "tool_use": f"{{{{ tools[0]['function']['name'] }}}};{NO_CALLS}"}
    template = Template(tokenizer, "the tokenizer")
    message: Message = {"role": "user", "content": "Hi."}
    assert template.render([message], add_generation_prompt=True) == "user:Hi.<|im_end|>"
    assert template.render([message], add_generation_prompt=True, tools=[TOOL]) == "add;user:Hi.<|im_end|>"


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(TemplateError, match="give at least one message"):
        Template(byte_tokenizer(), "the tokenizer").render([], add_generation_prompt=True)


def test_nothing_about_the_template_alone_is_asked_after_the_start() -> None:
    """A second conversation of the same roles renders its own messages and asks the template nothing else."""
    tokenizer = byte_tokenizer()
    rendered: list[str] = []
    apply = tokenizer.apply_chat_template

    def counting(messages: Any, **options: Any) -> Any:
        rendered.append(messages[-1]["role"])
        return apply(messages, **options)

    tokenizer.apply_chat_template = counting  # type: ignore[method-assign]
    renderer = Renderer(tokenizer)

    def converse(number: int) -> int:
        before = len(rendered)
        renderer.encode_opening([{"role": "user", "content": f"Hi, {number}."}])
        turn = renderer.turn_parser.parse(renderer.encode(f"Hello, {number}."), tools=[{}])
        renderer.to_template_message(turn)
        renderer.encode_bridge(renderer.stop_token_ids[0], [{"role": "user", "content": f"And {number}?"}])
        return len(rendered) - before

    assert converse(1) > converse(2) == 2  # the opening and the bridge


# Models of 2026 with the special tokens of their tokenizers: calls and reasoning are read, turns are bridged, masks
# are right.


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
