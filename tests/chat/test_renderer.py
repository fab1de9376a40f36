"""Tokens of a conversation, appended turn by turn, are those of the whole template, encoded as the tokenizer does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from support import CHATML, byte_tokenizer, merging_tokenizer, templates
from support.conversations import RENDERER, STOP, Says, a_row, call, completion, hold, spoken
from support.families import family_renderer, template_files
from turnwise.chat.probes import PLACEHOLDER, TOOL, TokenCache, probe_call
from turnwise.chat.renderer import Renderer
from turnwise.chat.sanity_check import SanityCheck, SegmentMessages
from turnwise.chat.text_encoder import text_encoder
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import SingleTurn, environment
from turnwise.environments.users import ScriptedUser
from turnwise.errors import GrammarError, TemplateError
from turnwise.types import (
    AnswerFormat,
    Constraint,
    Message,
    MismatchKind,
    Opening,
    Reply,
    Row,
    SamplingChange,
    Segment,
    TemplateMismatch,
    Turn,
)

# Tokens of a conversation: what is appended turn by turn is what the template says of the whole.


QWEN3 = Path("/work/shared/templates/qwen3.jinja")

HI: Message = {"role": "user", "content": "Hi"}

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}},
}

THINKS_LAST = CHATML.replace(
    "<|im_start|>{{ message.role }}\n{{ message.content }}",
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}",
)
"""Puts an empty thinking block into the last assistant turn, as Qwen3 does: what is sampled has none."""


def one_pass(messages: list[Message], tools: list[Any] | None = None, *, cue: bool = True) -> list[int]:
    """The ids of the whole conversation, rendered and encoded at once by the tokenizer alone."""
    tokenizer = RENDERER.tokenizer
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=cue, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def drift(renderer: Renderer, segment: Segment, messages: list[Message]) -> TemplateMismatch | None:
    """What the sanity check finds in a segment of these messages."""
    return SanityCheck(renderer).compare(SegmentMessages(segment=segment, messages=messages), as_served=False)


def segment_of(*parts: tuple[int, str]) -> Segment:
    """A segment written by hand: turn (or -1) and text."""
    segment = Segment()
    for turn, text in parts:
        ids = RENDERER.encode(text)
        if turn < 0:
            segment.append_context(ids)
        else:
            segment.append_completion(turn, completion(ids))
    return segment


def test_the_opening_is_the_rendered_messages_and_the_cue() -> None:
    ids = RENDERER.encode_opening([HI]).token_ids
    # <|im_start|> u s e r \n H i <|im_end|> \n <|im_start|> a s s i s t a n t \n
    assert list(ids) == [1, 87, 85, 71, 84, 201, 42, 75, 2, 201, 1, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]
    assert list(ids) == one_pass([HI])
    assert list(RENDERER.encode_opening([HI], [WEATHER]).token_ids) == one_pass([HI], [WEATHER])
    assert RENDERER.decode(RENDERER.encode_opening([HI], [WEATHER]).token_ids).startswith("<|im_start|>system\nTools:")


def test_schemas_of_requests_are_compiled_up_to_a_length() -> None:
    renderer = Renderer(byte_tokenizer())

    def constraint(description: str) -> Constraint | None:
        schema = {"type": "object", "properties": {}, "description": description}
        form = AnswerFormat.of({"type": "json_schema", "schema": schema})
        return renderer.constraint([], SamplingChange(answer_format=form))

    assert constraint("word " * 50_000) is not None
    with pytest.raises(GrammarError, match=r"have 3000[0-9]{2} characters, and at most 262144 are compiled"):
        constraint("word " * 60_000)
    # of a schema that cannot be compiled, not all parts are compiled one after the other
    nested: dict[str, Any] = {"type": "string", "pattern": "(?=a)"}
    for _ in range(100):
        nested = {"type": "object", "properties": {**{f"p{n}": {"type": "null"} for n in range(20)}, "z": nested}}
    form = AnswerFormat.of({"type": "json_schema", "schema": nested})
    with pytest.raises(GrammarError, match=r"schema/properties/z(/properties/z){2} cannot be a grammar"):
        renderer.constraint([], SamplingChange(answer_format=form))


def test_a_grammar_is_compiled_once_for_all_turns_and_each_turn_has_its_own_state() -> None:
    renderer = Renderer(byte_tokenizer())
    form = AnswerFormat.of({"type": "regex", "pattern": "ab|cd"})
    constraint = renderer.constraint([], SamplingChange(answer_format=form), stops=renderer.stop_token_ids)
    assert constraint is not None
    first, second = renderer.masks.matcher(constraint), renderer.masks.matcher(constraint)
    (a,), (b,) = renderer.encode("a"), renderer.encode("b")
    first.advance(a)
    assert [int(mask[b >> 5]) >> (b & 31) & 1 for mask in (first.allowed(), second.allowed())] == [1, 0]
    assert (renderer.masks.matcher(constraint).allowed() == second.allowed()).all()


def test_the_texts_whose_tokens_are_kept_have_a_bound_on_their_bytes() -> None:
    asked: list[str] = []

    def encode(text: str, behind: int | None) -> tuple[int, ...]:
        asked.append(text)
        return tuple(range(len(text)))

    cache = TokenCache(encode, most_bytes=100_000)
    for text in ("a" * 100, "a" * 100, "b" * 1000, "b" * 1000):  # the second is longer than an eighth of all
        assert cache(text) == tuple(range(len(text)))
    assert [text[0] for text in asked] == ["a", "b", "b"]
    for number in range(30):  # 4 kB each
        cache(f"{number:0>100}")
    cache("a" * 100)
    assert len(asked) == 34
    cache(f"{29:0>100}")
    assert len(asked) == 34


def test_the_tokens_whose_text_begins_another_text_are_found_without_reading_them_again_and_again() -> None:
    """Also if nothing of them does: decoding is in proportion to their number, times the steps of a bisection."""
    decoded: list[int] = []

    class Counting(Renderer):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    renderer = Counting(byte_tokenizer())
    ids = renderer.encode("a" * 1000)
    decoded.clear()
    assert renderer.token_prefix(ids, "b" * 1000) == (0, "")
    assert renderer.token_prefix(ids, "a" * 700 + "b" * 1000) == (700, "a" * 700)
    assert renderer.token_prefix(renderer.encode("aä"), "aö") == (1, "a")
    assert sum(decoded) < 20 * 1000


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([{"role": "user", "content": "Try again."}], id="user retry"),
        pytest.param([{"role": "tool", "name": "f", "tool_call_id": "call_0", "content": "5"}], id="tool round"),
        pytest.param([{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}], id="parallel tools"),
        pytest.param([{"role": "tool", "content": "5"}, {"role": "user", "content": "So?"}], id="tool, then user"),
        pytest.param([{"role": "system", "content": "Be brief."}], id="system in the middle"),
        pytest.param([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And?"}], id="both"),
        pytest.param([], id="nothing: the model goes on"),
        pytest.param([{"role": "user", "content": ""}], id="empty"),
        pytest.param([{"role": "user", "content": "  grüße \n 你好 <|im_end|> {{ x }} "}], id="odd text"),
    ],
)
@pytest.mark.parametrize("closed", [True, False], ids=["closed by the model", "not closed"])
def test_opening_and_bridge_are_the_one_pass_rendering(answer: list[Message], closed: bool) -> None:
    sampled = [*RENDERER.encode("Well, 4."), *([STOP] if closed else [])]
    ids = [*RENDERER.encode_opening([HI]).token_ids, *sampled]
    ids += RENDERER.encode_bridge(ids[-1], answer).token_ids
    assert ids == one_pass([HI, {"role": "assistant", "content": "Well, 4."}, *answer])


def test_the_bridge_closes_a_turn_only_if_the_model_did_not() -> None:
    retry = [{"role": "user", "content": "No."}]
    left_open, closed = RENDERER.encode_bridge(65, retry).token_ids, RENDERER.encode_bridge(STOP, retry).token_ids
    assert list(left_open) == [STOP, *closed]
    assert RENDERER.decode(closed) == "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"


def test_the_bridge_does_not_depend_on_how_long_the_conversation_is() -> None:
    class Counting:
        """The tokenizer, and how many characters it was given."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.characters = inner, 0
            for name in ("chat_template", "all_special_ids", "added_tokens_decoder", "eos_token_id", "decode"):
                setattr(self, name, getattr(inner, name))
            self.apply_chat_template = inner.apply_chat_template

        def encode(self, text: str, **options: Any) -> list[int]:
            self.characters += len(text)
            return self.inner.encode(text, **options)

    tokenizer = Counting(byte_tokenizer())
    renderer = Renderer(tokenizer)
    renderer.encode_opening([{"role": "user", "content": "x" * 5000}])
    tokenizer.characters = 0
    for n in range(10):
        renderer.encode_bridge(STOP, [{"role": "user", "content": f"no {n}"}])
    # the token in front is encoded with it, so that it is cut as it is in one pass
    assert tokenizer.characters == 10 * len("<|im_end|>\n<|im_start|>user\nno 0<|im_end|>\n<|im_start|>assistant\n")


def test_the_loop_writes_the_one_pass_rendering_and_marks_what_was_sampled() -> None:
    trajectory = hold(["Four.", "Five."], lambda: ScriptedUser(["No.", "Still no."]), row=a_row("2+2?"))
    assert trajectory.error is not None  # the script is over before the user is: what was written stays
    (segment,) = trajectory.segments
    assert spoken(segment) == [
        (-1, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"),
        (0, "Four.<|im_end|>"),
        (-1, "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        (1, "Five.<|im_end|>"),
        (-1, "\n<|im_start|>user\nStill no.<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert list(segment.token_ids) == one_pass(trajectory.messages)


def test_the_end_of_a_turn_is_the_templates_own_token_the_eos_and_those_of_the_generation_config() -> None:
    tokenizer = byte_tokenizer()
    assert RENDERER.stop_token_ids == (STOP,)
    assert Renderer(tokenizer, generation_stop_ids=[0, 2]).stop_token_ids == (STOP, 0)
    tokenizer.eos_token = "<|endoftext|>"
    assert Renderer(tokenizer).stop_token_ids == (STOP, 0)  # first the one that closes a turn
    tokenizer.eos_token = None
    assert Renderer(tokenizer).stop_token_ids == (STOP,)


def test_parse_reads_text_message_and_calls_and_leaves_the_stop_token_off() -> None:
    ids = [*RENDERER.encode("Hm.\n" + call("add", '{"a": 1}')), STOP]
    said = RENDERER.turn_parser.parse(ids, tools=[WEATHER], first_call=7)
    assert said.text == 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert said.message == {
        "role": "assistant",
        "content": "Hm.",
        "tool_calls": [{"id": "call_7", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert [(one.id, one.name, one.arguments, one.error) for one in said.calls] == [("call_7", "add", {"a": 1}, None)]
    plain = RENDERER.turn_parser.parse(ids)
    assert (plain.text, plain.message, plain.calls) == (said.text, {"role": "assistant", "content": said.text}, ())
    assert RENDERER.turn_parser.parse([STOP], tools=[WEATHER]).message == {"role": "assistant", "content": ""}
    assert RENDERER.turn_parser.parse([]).message == {"role": "assistant", "content": ""}


def test_a_cue_that_begins_the_thinking_is_taken_into_account() -> None:
    # QwQ and Qwen3-Thinking: the model is put inside <think>, and only closes it
    thinks = Renderer(byte_tokenizer(CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")))
    bridge = thinks.encode_bridge(STOP, [HI])
    assert thinks.decode(bridge.token_ids).endswith("<|im_start|>assistant\n<think>\n")
    assert (
        bridge.reasoning_opening,
        thinks.encode_opening([HI]).reasoning_opening,
        RENDERER.encode_opening([HI]).reasoning_opening,
    ) == (
        "<think>\n",
        "<think>\n",
        "",
    )
    ids = [*RENDERER.encode(f"Perhaps {call('f')}?</think>So:{call('g')}"), STOP]
    said = thinks.turn_parser.parse(ids, tools=[WEATHER], reasoning_opening="<think>\n")
    assert [one.name for one in said.calls] == ["g"]
    assert said.reasoning == said.message["reasoning_content"] == f"Perhaps {call('f')}?"
    assert said.message["content"] == "So:"
    assert [one.name for one in RENDERER.turn_parser.parse(ids, tools=[WEATHER]).calls] == ["f", "g"]


def test_reasoning_is_separated_from_content_if_the_template_supports_reasoning() -> None:
    thinks = Renderer(byte_tokenizer(THINKS_LAST))
    ids = [*RENDERER.encode("<think>Two and two.</think>Four."), STOP]
    said = thinks.turn_parser.parse(ids)
    assert (said.reasoning, said.message["content"]) == ("Two and two.", "Four.")
    # a template that knows of none leaves it to the user's prompt: then the marks are words like others
    assert RENDERER.turn_parser.parse(ids).message == {
        "role": "assistant",
        "content": "<think>Two and two.</think>Four.",
    }


# what was sampled is never encoded again


def test_ids_that_would_be_encoded_otherwise_stay_as_they_were_sampled() -> None:
    renderer = Renderer(merging_tokenizer())
    assert list(renderer.encode("ab")) == [259]
    engine = Says([67, 68, STOP], [259, 67, 68, STOP])
    trajectory = hold(engine, lambda: ScriptedUser(["ab"]), renderer=renderer)
    (segment,) = trajectory.segments
    sampled = [(token, turn) for token, turn in zip(segment.token_ids, segment.turn, strict=True) if turn >= 0]
    assert sampled == [(67, 0), (68, 0), (2, 0), (259, 1), (67, 1), (68, 1), (2, 1)]
    # the second prompt holds the first answer as it was sampled, and the user's `ab` as the tokenizer has it
    assert list(engine.requests[1].token_ids)[21:24] == [67, 68, 2]
    assert list(engine.requests[1].token_ids).count(259) == 1
    assert trajectory.assistant_texts == ["ab", "abab"]
    assert trajectory.template_mismatch is None  # the text is the template's; the ids are the model's


@settings(max_examples=60)
@given(
    turns=st.lists(st.lists(st.integers(0, 258), min_size=1, max_size=12), min_size=1, max_size=3),
    closed=st.booleans(),
)
def test_whatever_is_sampled_the_segment_holds_exactly_that(turns: list[list[int]], closed: bool) -> None:
    turns = [[*(id_ for id_ in turn if id_ != STOP), *([STOP] if closed else [])] or [70] for turn in turns]

    class Stops(Says):
        """Ends every turn by itself, with the stop token or with a stop text."""

        async def generate(self, request: Any) -> Any:
            answer = await super().generate(request)
            return completion(answer.token_ids)

    engine = Stops(*turns)
    trajectory = hold(engine, lambda: ScriptedUser(["no"] * (len(turns) - 1)))
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert len({len(segment.token_ids), len(segment.logprobs), len(segment.turn), len(segment.version)}) == 1
    for number, ids in enumerate(turns):
        places = [place for place, turn in enumerate(segment.turn) if turn == number]
        assert [segment.token_ids[place] for place in places] == ids
        assert places == list(range(places[0], places[0] + len(ids)))
        assert [segment.logprobs[place] for place in places] == [-(n + 1) / 8 for n in range(len(ids))]
        # what the model was given is what is recorded before its turn
        assert list(engine.requests[number].token_ids) == list(segment.token_ids[: places[0]])
    mask = [turn >= 0 for turn in segment.turn]
    assert sum(mask) == sum(len(turn) for turn in turns) == trajectory.sampled_tokens
    outside = [place for place, sampled in enumerate(mask) if not sampled]
    assert {(segment.logprobs[place], segment.version[place]) for place in outside} == {(0.0, -1)}
    assert trajectory.template_mismatch is None


# the sanity check


@pytest.mark.parametrize(
    ("written", "strict", "ignore_strippable"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>", True, True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo", True, True),
        ("<|im_start|>user\nHi<|im_end|><|im_start|>assistant\nYo<|im_end|>", False, True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n Yo\t<|im_end|>", False, True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYO<|im_end|>", False, False),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n\n", False, True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|><|endoftext|>", False, False),
    ],
)
def test_strict_sees_every_difference_and_ignore_strippable_those_that_are_not_white_space(
    written: str, strict: bool, ignore_strippable: bool
) -> None:
    said = [HI, {"role": "assistant", "content": "Yo"}]
    segment = segment_of((-1, written))
    tokenizer = RENDERER.tokenizer
    assert (drift(Renderer(tokenizer, sanity="strict"), segment, said) is None) is strict
    assert (drift(Renderer(tokenizer, sanity="ignore_strippable"), segment, said) is None) is ignore_strippable
    assert drift(Renderer(tokenizer, sanity="disable"), segment, said) is None


def test_a_drift_says_where_it_begins_and_what_both_sides_say() -> None:
    segment = segment_of((-1, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), (0, "Yo!"))
    found = drift(RENDERER, segment, [HI, {"role": "assistant", "content": "Yes"}])
    assert found == TemplateMismatch(
        MismatchKind.COMPLETION,
        "completion, tokens 22 to 24: the segment has 'o!' [81, 3] where the template writes "
        "'es<|im_end|>\\n' [71, 85, 2, 201], after 'Y'",
    )


@pytest.mark.parametrize(
    ("before", "said", "tokens", "ids", "theirs"),
    [
        # "Hi" was "Ho": one token in the middle of what was said to the model
        ("<|im_start|>user\nHo<|im_end|>\n<|im_start|>assistant\n", "Yo", "7 to 8", "'o' [81]", "'i' [75]"),
        # a character of two tokens differs in one: both are shown
        ("<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n", "Yo", "7 to 9", "'é' [", "'i' [75]"),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Yo, I say", "23 to 30", "', I say' [", "'"),
        # a character is missing in the tokens, or stands there in addition
        ("<|im_start|>user\nH<|im_end|>\n<|im_start|>assistant\n", "Yo", "7 to 7", "'' []", "'i' [75], after"),
        ("<|im_start|>user\nHiy<|im_end|>\n<|im_start|>assistant\n", "Yo", "8 to 9", "'y' [91]", "'' [], after"),
    ],
)
def test_the_tokens_of_a_drift_are_those_that_differ(
    before: str, said: str, tokens: str, ids: str, theirs: str
) -> None:
    segment = segment_of((-1, before), (0, said + "<|im_end|>"))
    found = drift(RENDERER, segment, [HI, {"role": "assistant", "content": "Yo"}])
    assert f"tokens {tokens}: the segment has {ids}" in str(found)
    assert f"where the template writes {theirs}" in str(found)
    first, last = map(int, tokens.split(" to "))
    assert RENDERER.decode(segment.token_ids[first:last]) == ids.split("'")[1]


@pytest.mark.parametrize(("sanity", "drifts"), [("strict", True), ("ignore_strippable", True), ("disable", False)])
def test_a_template_that_writes_into_the_last_turn_is_found_out_and_the_tokens_stay(sanity: Any, drifts: bool) -> None:
    signs = CHATML.replace("{{ message.content }}", "{{ message.content }}{{ sign }}").replace(
        "{{ sign }}", "{% if loop.last and message.role == 'assistant' %} -- sent{% endif %}"
    )
    renderer = Renderer(byte_tokenizer(signs), sanity=sanity)
    trajectory = hold(Says("Yo."), SingleTurn, renderer=renderer)
    assert trajectory.error is None
    assert spoken(trajectory.segments[0])[1] == (0, "Yo.<|im_end|>")
    assert (trajectory.template_mismatch is not None) is drifts
    if drifts:
        sent = "' -- sent" if sanity == "strict" else "'--sent"
        assert f"the segment has '' [] where the template writes {sent}<|im_end|>" in str(trajectory.template_mismatch)


def test_an_empty_thought_that_the_template_writes_into_the_last_turn_is_no_drift() -> None:
    renderer = Renderer(byte_tokenizer(THINKS_LAST))
    assert hold(Says("Yo."), SingleTurn, renderer=renderer).template_mismatch is None


@pytest.mark.parametrize(
    ("said", "strict", "ignore_strippable"),
    [
        ("<think>\n4?\n</think>\n\n4", True, True),
        ("<think>4?</think>4", False, True),
        ("<think>\nThree?\n</think>\n\n4", False, False),
        ("<think>\n4?", True, True),
    ],
)
def test_a_thought_that_the_template_keeps_is_compared(said: str, strict: bool, ignore_strippable: bool) -> None:
    rewrites = CHATML.replace(
        "{{ message.content }}",
        "{% if '</think>' in message.content %}<think>\n{{ message.content.split('</think>')[0].split('<think>')[-1] "
        "| trim | replace('Three', 'Four') }}\n</think>\n\n{{ message.content.split('</think>')[-1] | trim }}"
        "{% elif message.role == 'assistant' %}<think>\n\n</think>\n\n{{ message.content }}"
        "{% else %}{{ message.content }}{% endif %}",
    )
    for sanity, alike in (("strict", strict), ("ignore_strippable", ignore_strippable)):
        renderer = Renderer(byte_tokenizer(rewrites), sanity=sanity)  # type: ignore[arg-type]
        trajectory = hold(Says(said), SingleTurn, renderer=renderer)
        assert (trajectory.error, trajectory.template_mismatch is None) == (None, alike), (
            sanity,
            trajectory.template_mismatch,
        )


def test_a_template_that_refuses_in_one_pass_what_it_took_turn_by_turn_is_reported_and_breaks_nothing() -> None:
    counts = "{% if messages | length > 4 %}{{ raise_exception('Too many.') }}{% endif %}" + CHATML
    trajectory = hold(Says("a", "b", "c"), lambda: ScriptedUser(["x", "y"]), renderer=Renderer(byte_tokenizer(counts)))
    assert (trajectory.stop, trajectory.error) == ("done", None)
    assert trajectory.template_mismatch is not None
    assert trajectory.template_mismatch.kind is MismatchKind.TEMPLATE_ERROR
    assert trajectory.template_mismatch.message.startswith(
        "in one pass, the chat template refuses messages of the roles "
    )
    assert trajectory.template_mismatch.message.endswith("Too many.")


def test_thoughts_that_the_template_leaves_out_of_earlier_turns_are_the_affair_of_the_policy_and_no_drift() -> None:
    forgets = CHATML.replace(
        "{{ message.role }}\n{{ message.content }}",
        "{{ message.role }}\n{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
    )
    renderer = Renderer(byte_tokenizer(forgets))
    twice = hold(Says("<think>4?</think>4", "5"), lambda: ScriptedUser(["No."]), renderer=renderer)
    assert twice.template_mismatch is None
    assert spoken(twice.segments[0])[1] == (0, "<think>4?</think>4<|im_end|>")  # sampled: kept
    assert renderer.profile.kept_reasoning.stripped_before == ("user", "tool")
    # what stands behind the thought is compared all the same
    mumbles = forgets.replace("'</think>')[-1]", "'</think>')[-1] | replace('4', 'four')")
    drift = hold(
        Says("<think>4?</think>4", "5"), lambda: ScriptedUser(["No."]), renderer=Renderer(byte_tokenizer(mumbles))
    ).template_mismatch
    assert "where the template writes 'four<|im_end|>'" in str(drift)


@pytest.mark.skipif(not QWEN3.is_file(), reason="the template of Qwen3 is not on this machine")
def test_qwen3_with_its_own_template() -> None:
    renderer = Renderer(byte_tokenizer(QWEN3.read_text()))
    assert renderer.stop_token_ids == (STOP,)
    assert renderer.turn_parser.tool_format.name == "hermes"
    twice = hold(
        Says("<think>\n4?\n</think>\n\n4", "<think>\n5?\n</think>\n\n5"),
        lambda: ScriptedUser(["No."]),
        renderer=renderer,
    )
    assert twice.error is None
    assert spoken(twice.segments[0]) == [
        (-1, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (0, "<think>\n4?\n</think>\n\n4<|im_end|>"),
        (-1, "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        (1, "<think>\n5?\n</think>\n\n5<|im_end|>"),
    ]
    assert twice.template_mismatch is None
    assert [(turn.reasoning, turn.message["content"]) for turn in twice.turns] == [("4?", "4"), ("5?", "5")]
    assert renderer.profile.kept_reasoning.stripped_before == ("user",)  # the template forgets the first thoughts
    assert hold(Says("4"), SingleTurn, renderer=renderer).template_mismatch is None


def test_bytes_that_are_no_text_do_not_count_as_drift() -> None:
    half = RENDERER.encode("ü")[0]  # the first of two bytes
    cut = hold(Says([70, half]), SingleTurn)
    assert (cut.stop, cut.template_mismatch) == ("length", None)
    assert cut.assistant_texts == ["d�"]
    closed = hold(Says([half, STOP], [half, 70, STOP]), lambda: ScriptedUser(["ü"]))
    assert (closed.error, closed.template_mismatch) == (None, None)


# what is refused


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"has no chat template.*Put a chat_template\.jinja into"):
        Renderer(byte_tokenizer(None))
    tokenizer = byte_tokenizer("")
    tokenizer.name_or_path = "models/base"
    with pytest.raises(TemplateError, match=r"^models/base has no chat template"):
        Renderer(tokenizer)


def test_a_template_that_refuses_is_quoted_with_the_roles_it_refused() -> None:
    picky = "{%- for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + (
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    renderer = Renderer(byte_tokenizer(picky))
    assert "\n<tool_response>\n5\n</tool_response><|im_end|>" in renderer.decode(
        renderer.encode_bridge(STOP, [{"role": "tool", "content": "5"}]).token_ids
    )  # somebody has to say it
    nobody = Renderer(byte_tokenizer(picky.replace("m.role == 'tool'", "not loop.first and m.role != 'assistant'")))
    with pytest.raises(
        TemplateError, match=r"refuses messages of the roles \[\.\.\. user, assistant, tool\]: no tools here"
    ):
        nobody.encode_bridge(STOP, [{"role": "tool", "content": "5"}])
    with pytest.raises(TemplateError, match=r"roles \[\.\.\. user, assistant\]: never"):
        Renderer(byte_tokenizer("{{ raise_exception('never') }}"))
    with pytest.raises(TemplateError, match=r"is no valid Jinja: .* in line 2\. Correct chat_template\.jinja"):
        Renderer(byte_tokenizer("\n{% if %}"))


def test_content_of_parts_is_taken_and_what_is_no_content_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"'user' message has a content part \{'type': 'smell'\}; parts are"):
        RENDERER.encode_opening([{"role": "user", "content": [{"type": "smell"}]}])
    with pytest.raises(TemplateError, match=r"'user' message has a content part 'Hi'; parts are"):
        RENDERER.encode_opening([{"role": "user", "content": ["Hi"]}])
    with pytest.raises(TemplateError, match=r"content of a 'tool' message is a int; it must be a text, or a list"):
        RENDERER.encode_bridge(STOP, [{"role": "tool", "content": 5}])
    with pytest.raises(TemplateError, match=r"does not accept images: its directory has no image processor"):
        RENDERER.encode_opening([{"role": "user", "content": [{"type": "image", "image": b"?"}]}])


def test_a_role_that_the_template_loses_is_refused_by_name() -> None:
    deaf = CHATML.replace(
        "{%- else %}<|im_start|>", "{%- elif message.role in ('user', 'assistant', 'system') %}<|im_start|>"
    )
    with pytest.raises(
        TemplateError, match=r"refuses or leaves out .* \[critic\] after the model's turn; 'critic' is a role"
    ):
        Renderer(byte_tokenizer(deaf)).encode_bridge(STOP, [{"role": "critic", "content": "Bad."}])


def test_a_tokenizer_without_any_stop_token_is_refused() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = byte_tokenizer(plain)
    assert Renderer(tokenizer).stop_token_ids == (STOP,)  # its eos
    tokenizer.eos_token = None
    with pytest.raises(TemplateError, match=r"has no stop token: .* closes a turn with '\\n', .* Set eos_token"):
        Renderer(tokenizer)
    assert Renderer(tokenizer, generation_stop_ids=[0]).stop_token_ids == (0,)


def test_a_template_that_does_not_print_what_the_assistant_says_is_refused() -> None:
    shouts = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}"
    with pytest.raises(TemplateError, match=r"does not write an assistant message's content as it is.*PLACEHOLDER"):
        Renderer(byte_tokenizer(shouts))
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateError, match=r"It wrote: 'A question\.'"):
        Renderer(byte_tokenizer(silent))


def test_a_template_that_closes_later_turns_otherwise_is_refused() -> None:
    counts = "{% for m in messages %}{{ m.content }}<|im_end|>{{ loop.index }}{% endfor %}"
    with pytest.raises(
        TemplateError, match=r"closes the second assistant turn with '<\|im_end\|>4' and the first with '<\|im_end\|>2'"
    ):
        Renderer(byte_tokenizer(counts))


def test_a_template_that_takes_one_question_only_is_refused_where_a_second_one_is_asked() -> None:
    once = CHATML + (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length > 1 %}"
        "{{ raise_exception('one only') }}{% endif %}"
    )
    renderer = Renderer(byte_tokenizer(once))
    assert hold(Says("Yo"), SingleTurn, renderer=renderer).stop == "done"
    trajectory = hold(Says("Yo", "Ya"), lambda: ScriptedUser(["And?"]), renderer=renderer)
    assert trajectory.error is not None
    assert trajectory.error.kind == "tokens"
    assert trajectory.error.message.endswith("roles [... user, assistant, user]: one only")
    assert trajectory.assistant_texts == ["Yo"]


def test_a_tool_format_that_cannot_be_read_is_refused_only_where_tools_are_used() -> None:
    renderer = Renderer(byte_tokenizer(CHATML.replace("<tool_call>", "call").replace("</tool_call>", "end")))
    assert RENDERER.turn_parser.tool_format.name == "hermes"
    with pytest.raises(
        TemplateError, match=r"in a format that cannot be read back.*Set the format \(for example tool_format=hermes\)"
    ):
        _ = renderer.turn_parser.tool_format
    assert hold(Says("Yo"), SingleTurn, renderer=renderer).stop == "done"
    no_calls = Renderer(byte_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"))
    with pytest.raises(TemplateError, match="writes no tool calls"):
        _ = no_calls.turn_parser.tool_format
    assert Renderer(no_calls.tokenizer, tool_format="hermes").turn_parser.tool_format.name == "hermes"


def test_a_saved_tokenizer_is_loaded_with_the_stop_tokens_of_its_generation_config(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    assert Renderer.from_pretrained(tmp_path).stop_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    renderer = Renderer.from_pretrained(str(tmp_path), sanity="disable")
    assert (renderer.stop_token_ids, renderer.sanity) == ((2, 0), "disable")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert Renderer.from_pretrained(tmp_path).stop_token_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text('{"max_length": 5}')
    assert Renderer.from_pretrained(tmp_path).stop_token_ids == (2,)
    assert Renderer.from_pretrained(tmp_path).encode_opening([HI]) == RENDERER.encode_opening([HI])


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=rf"the directory '{tmp_path}' has no tokenizer"):
        Renderer.from_pretrained(tmp_path)
    with pytest.raises(TemplateError, match=r"there is no model directory /nowhere; a model is a hub id"):
        Renderer.from_pretrained("/nowhere")


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers makes one of a directory with a config.json."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(TemplateError, match=rf"'{tmp_path}' has no vocabulary \(tokenizer\.json, .*copy the files"):
        Renderer.from_pretrained(tmp_path)


STRANGE = CHATML.replace("<tool_call>", "<invoke>").replace("</tool_call>", "</invoke>")

STRANGE_SPEC = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<invoke>",
            "close": "</invoke>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def test_calls_that_no_named_format_reads_are_read_as_the_tokenizer_says() -> None:
    tokenizer = byte_tokenizer(STRANGE)
    assert Renderer(tokenizer).turn_parser.tool_format.name == "learned"
    with pytest.raises(
        TemplateError, match=r"tool_format=response_template: the tokenizer of .* has no response_template"
    ):
        Renderer(tokenizer, tool_format="response_template")
    tokenizer.response_template = STRANGE_SPEC
    assert Renderer(tokenizer).turn_parser.tool_format.name == "response_template"
    said = Renderer(tokenizer, tool_format="response_template").turn_parser.parse(
        tokenizer.encode('Well.<invoke>{"name": "f", "arguments": {"x": 1}}</invoke><|im_end|>'), tools=[WEATHER]
    )
    assert said.message["content"] == "Well."
    assert [(call.name, call.arguments, call.error) for call in said.calls] == [("f", {"x": 1}, None)]
    ours = byte_tokenizer(CHATML)
    ours.response_template = STRANGE_SPEC
    assert (
        Renderer(ours).turn_parser.tool_format.name == "hermes"
    )  # a good call is not lost beside a bad one only by ours


def test_a_thought_that_is_written_like_its_own_mark_is_found_where_it_stands() -> None:
    renderer = Renderer(byte_tokenizer(templates.THINKS))
    said = ["<think>\nthink\n</think>\n\nYo.", "<think>\nYo.\n</think>\n\nYo."]
    trajectory = hold(said, lambda: ScriptedUser(["No."]), renderer=renderer, thinking="branch")
    assert [turn.reasoning for turn in trajectory.turns] == ["think", "Yo."]
    assert len(trajectory.segments) == 2
    assert "think" not in renderer.decode(trajectory.segments[1].token_ids[: trajectory.segments[1].turn.index(1)])
    assert trajectory.template_mismatch is None


# Texts are encoded by the tokenizer's backend, with the ids of `tokenizer.encode`.


DEMO = Path(__file__).parents[2] / "demo" / "model"

TEXTS = ("", "a", "<|im_start|>user\nWhat is 12 * 3?<|im_end|>\n", "  \n\t x ", "Straße 🙂 \ud83d", "ab " * 700)


class Upper(PreTrainedTokenizerFast):
    """Encodes in its own way."""

    def _encode_plus(self, text, *args, **options):
        return super()._encode_plus(text.upper(), *args, **options)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def expected(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizers_own_method(tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ids = expected(tokenizer, text)
    except Exception as error:
        with pytest.raises(type(error)):
            text_encoder(tokenizer)(text)
        return
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", None)  # it is not called
    assert list(text_encoder(tokenizer)(text)) == ids


def test_settings_that_others_leave_in_the_backend_change_nothing(tokenizer) -> None:
    encode, text = text_encoder(tokenizer), TEXTS[2]
    ids = expected(tokenizer, text)
    tokenizer(text, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation
    assert list(encode(text)) == ids
    tokenizer([text, "a"], padding=True)
    assert tokenizer.backend_tokenizer.padding
    assert list(encode("a")) == expected(tokenizer, "a")
    tokenizer.encode(text, split_special_tokens=True)
    assert list(encode(text)) == ids
    tokenizer.split_special_tokens = True
    assert list(encode(text)) == expected(tokenizer, text) != ids


def test_tokens_that_are_added_later_are_known(tokenizer) -> None:
    encode = text_encoder(tokenizer)
    tokenizer.add_tokens(["What is 12"])
    assert list(encode(TEXTS[2])) == expected(tokenizer, TEXTS[2])
    assert len(tokenizer) - 1 in encode(TEXTS[2])


def test_a_class_that_encodes_in_its_own_way_is_asked(tokenizer) -> None:
    own = Upper(tokenizer_object=tokenizer.backend_tokenizer)
    assert list(text_encoder(own)("abc")) == expected(tokenizer, "ABC")


# Where a turn ends in the template's text: nothing that the model has said itself is written again behind it.


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
