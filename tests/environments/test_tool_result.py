"""What a tool gives back: texts, images, rewards, and results that are shortened."""

from __future__ import annotations

import asyncio
import time
import unicodedata
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import given as truncation_given
from hypothesis import strategies as st
from PIL import Image

from support import byte_tokenizer
from turnwise.environments.tools.result import LONGEST, Answer, Side, ToolResponse, bounded
from turnwise.environments.tools.toolbox import Tool, Tools, Truncation
from turnwise.errors import ConfigError
from turnwise.types import ToolCall, Turn

# What a tool may give back, and what the model and the record get of it.


class Named(NamedTuple):
    text: str
    number: float


RED, BLUE = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (2, 2), "blue")


def given(result: Any, truncation: Truncation | None = None) -> Answer:
    """The answer of a tool that gives `result` back."""

    async def tool() -> Any:
        """Give it."""
        return result

    (ready,) = Tools([tool], truncation=truncation)._tools.values()
    return asyncio.run(ready.answer(ToolCall(id="call_7", name="tool", arguments={}, text="")))


def test_images_and_videos_stand_before_the_text() -> None:
    answer = given(ToolResponse(image=[RED, BLUE], video=[[RED, RED]], text="Look."))
    assert answer.message == {
        "role": "tool",
        "tool_call_id": "call_7",
        "name": "tool",
        "content": [
            {"type": "image", "image": RED},
            {"type": "image", "image": BLUE},
            {"type": "video", "video": [RED, RED]},
            {"type": "text", "text": "Look."},
        ],
    }
    assert answer.outcome.content == "Look.\n[2 images, 1 video]"
    assert answer.outcome.error is None


def test_an_image_alone_is_a_part_alone() -> None:
    answer = given(ToolResponse(image=[RED]))
    assert answer.content == [{"type": "image", "image": RED}]
    assert answer.outcome.content == "[1 image]"


@pytest.mark.parametrize(
    ("response", "content"),
    [(ToolResponse(text="x"), "x"), (ToolResponse(), ""), (ToolResponse(text="", image=[]), "")],
)
def test_a_response_without_images_is_a_text(response: ToolResponse, content: str) -> None:
    answer = given(response)
    assert (answer.content, answer.outcome.content) == (content, content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": RED}, "ToolResponse.image must be a list, got a Image: put it in brackets"),
        ({"image": (RED,)}, "ToolResponse.image must be a list, got a tuple"),
        ({"video": "clip.mp4"}, "ToolResponse.video must be a list, got a str"),
        ({"text": 3}, "ToolResponse.text must be a text, got a int"),
    ],
)
def test_images_and_videos_are_lists(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToolResponse(**arguments)


@pytest.mark.parametrize(
    ("result", "content", "reward", "info"),
    [
        (("x",), "x", 0.0, {}),
        (("x", 0.5), "x", 0.5, {}),
        (("x", 1), "x", 1.0, {}),
        (("x", None), "x", 0.0, {}),
        (("x", -0.25, {"tries": 2}), "x", -0.25, {"tries": 2}),
        (("x", None, None), "x", 0.0, {}),
        (({"a": 1}, 0.5, {}), '{"a": 1}', 0.5, {}),
        ((ToolResponse(text="x"), 2.0), "x", 2.0, {}),
        (("x", numpy.float32(0.5)), "x", 0.5, {}),
        (("x", numpy.int64(2)), "x", 2.0, {}),
        # what is no scored answer is a value like any other
        ((3, 1), "[3, 1]", 0.0, {}),
        (("x", True), '["x", true]', 0.0, {}),
        (("x", 1.0, ["y"]), '["x", 1.0, ["y"]]', 0.0, {}),
        (Named("x", 1.0), '["x", 1.0]', 0.0, {}),
        (("a", "b"), '["a", "b"]', 0.0, {}),
        (("x", 1.0, {}, 4), '["x", 1.0, {}, 4]', 0.0, {}),
        (["x", 1.0, {}], '["x", 1.0, {}]', 0.0, {}),
        ((), "[]", 0.0, {}),
    ],
)
def test_a_tuple_of_an_answer_a_number_and_a_mapping_is_scored(
    result: Any, content: str, reward: float, info: dict[str, Any]
) -> None:
    answer = given(result)
    assert (answer.content, answer.outcome.reward, answer.info) == (content, reward, info)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error_of_the_tool(reward: float) -> None:
    answer = given(("x", reward))
    assert answer.outcome.error == "raised"
    assert answer.content == f"Error: TypeError: the reward of the call is {reward}, which is not a finite number"
    assert answer.outcome.reward == 0.0


def test_rewards_and_infos_of_several_calls_are_those_of_the_turn() -> None:
    async def guess(number: int) -> tuple[str, float, dict[str, Any]]:
        """Guess."""
        return "warm", number / 4, {"last": number, f"guess_{number}": True}

    calls = [ToolCall(id=f"call_{n}", name="guess", arguments={"number": n}, text="") for n in (1, 2)]
    turn = Turn(index=0, message={"role": "assistant", "content": ""}, text="", calls=tuple(calls))
    reply = asyncio.run(Tools([guess]).step(turn))
    assert reply.reward == 0.75
    assert reply.info == {"last": 2, "guess_1": True, "guess_2": True}
    assert [outcome.reward for outcome in reply.outcomes] == [0.25, 0.5]
    assert not reply.done


def test_long_texts_are_shortened_and_images_are_not() -> None:
    answer = given(ToolResponse(image=[RED], text="0123456789"), Truncation(4, side="right"))
    assert answer.content == [{"type": "image", "image": RED}, {"type": "text", "text": "0123...(truncated)"}]


def test_ten_megabytes_of_bytes_or_json_are_bounded_with_a_note() -> None:
    for result, first in ((b"\xff" * 10_000_000, "\ufffd"), ("x" * 10_000_000, "x")):
        answer = given(result)
        assert isinstance(answer.content, str)
        assert len(answer.content) < 1_000_100
        assert answer.content.startswith(first)
        assert answer.content.endswith("...(truncated: this is the first 1,000,000 of 10,000,000 characters)")
        assert answer.outcome.error is None
        short = given(result, Truncation(6))
        assert short.content == f"{first * 3}...(truncated)...{first * 3}"


def test_a_tool_of_its_own_length_keeps_it_behind_a_layer_with_another() -> None:
    async def long() -> str:
        """Talk."""
        return "0123456789"

    tool = Tool.of(long)
    own = Tool(**{name: getattr(tool, name) for name in ("name", "description", "arguments", "function", "schema")},
               truncation=Truncation(2, side="right"))  # fmt: skip
    (ready,) = Tools([own], truncation=Truncation(4))._tools.values()
    assert asyncio.run(ready.run(ToolCall(id="c", name="long", arguments={}, text=""))).content == "01...(truncated)"


# How a long text is shortened: which side goes, in which measure, and that what stays is text.


TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    """One token a byte."""
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("side", "told"),
    [
        ("left", "(truncated)...6789"),
        ("right", "0123...(truncated)"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_the_side_is_the_one_that_is_cut_off(side: Side, told: str) -> None:
    assert Truncation(4, side=side)("0123456789") == told
    assert Truncation(4, side=side, unit="tokens", encode=encode)("0123456789") == told
    for text in ("", "0123"):
        assert Truncation(4, side=side)(text) == text
        assert Truncation(4, side=side, unit="tokens", encode=encode)(text) == text


def test_the_middle_is_cut_off_unless_something_else_is_said() -> None:
    assert Truncation(5)("0123456789") == "01...(truncated)...89"  # halves of an odd number are rounded down
    assert Truncation(1)("0123456789") == "...(truncated)..."


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_tokens_are_counted_and_never_parted_from_their_character(side: Side) -> None:
    text = "äöü€" * 50  # 2, 2, 2 and 3 tokens
    cut = Truncation(10, side=side, unit="tokens", encode=encode)(text)
    kept = cut.replace("...", "").replace("(truncated)", "")
    assert kept == {"left": "äöü€", "right": "äöü€", "middle": "äöü€"}[side]
    assert "\ufffd" not in cut


@pytest.mark.parametrize(
    "cluster",
    [
        "e\u0301",  # an accent of its own
        "\U0001f469\u200d\U0001f52c",  # a woman and a microscope make a scientist
        "\U0001f44d\U0001f3fd",  # a thumb and its colour
        "\U0001f1eb\U0001f1f7",  # the letters of a flag
        "\u2764\ufe0f",
        "\r\n",
        "\u0915\u094d\u0937\u093f"[:2],
    ],
)
def test_what_is_read_as_one_character_is_kept_whole_or_not_at_all(cluster: str) -> None:
    text = cluster * 20
    for length in range(1, 12):
        right = Truncation(length, side="right")(text).removesuffix("...(truncated)")
        left = Truncation(length, side="left")(text).removeprefix("(truncated)...")
        assert right == left == cluster * (length // len(cluster))


def test_a_pile_of_accents_is_cut_somewhere() -> None:
    piled = "z" + "\u0300" * 500
    cut = Truncation(300, side="right")(piled)
    assert cut.startswith("z\u0300")
    assert len(cut) <= 300 + len("...(truncated)")


@truncation_given(st.text(max_size=80), st.integers(1, 30), st.sampled_from(["left", "right", "middle"]), st.booleans())
def test_what_stays_is_of_the_text_and_not_too_long(text: str, length: int, side: Any, tokens: bool) -> None:
    count = (lambda part: len(encode(part))) if tokens else len
    text = text.encode("utf-8", errors="replace").decode()
    cut = Truncation(length, side=side, unit="tokens" if tokens else "characters", encode=encode)(text)
    if count(text) <= length:
        assert cut == text
        return
    head, found, tail = cut.partition(
        {"left": "(truncated)...", "right": "...(truncated)"}.get(side, "...(truncated)...")
    )
    assert found
    if side == "right":  # the text itself may end in what looks like the mark
        head, tail = cut.removesuffix("...(truncated)"), ""
    assert text.startswith(head)
    assert text.endswith(tail)
    assert count(head) + count(tail) <= length
    assert not unicodedata.category(tail[0]).startswith("M") if tail else True


def test_the_cost_of_counting_tokens_depends_on_the_length_and_not_on_the_text() -> None:
    counted: list[int] = []

    def counting(text: str) -> list[int]:
        counted.append(len(text))
        return encode(text)

    for side in ("left", "right", "middle"):
        Truncation(50, side=side, unit="tokens", encode=counting)("x" * 10_000_000)
    assert max(counted) <= 1000
    assert len(counted) < 100


def test_a_length_in_tokens_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="Truncation with unit='tokens' needs a tokenizer"):
        Truncation(5, unit="tokens")
    with pytest.raises(ConfigError, match=r"Truncation\.length is 0 characters; it must be above 0"):
        Truncation(0)


def test_nothing_is_longer_than_a_million_characters() -> None:
    assert bounded("x" * LONGEST) == "x" * LONGEST
    started = time.perf_counter()
    text = bounded("x" * 10_000_000)
    assert time.perf_counter() - started < 60
    assert text == "x" * 1_000_000 + "...(truncated: this is the first 1,000,000 of 10,000,000 characters)"
