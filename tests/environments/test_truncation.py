"""How a long text is shortened: which side goes, in which measure, and that what stays is text."""

from __future__ import annotations

import time
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import byte_tokenizer
from turnwise.environments.tools.result import LONGEST, Side, Truncation, bounded
from turnwise.errors import ConfigError

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


@given(st.text(max_size=80), st.integers(1, 30), st.sampled_from(["left", "right", "middle"]), st.booleans())
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
