"""Where a turn is thought, and where it is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.chat.tool_calls import KNOWN, MARKS


@pytest.mark.parametrize(("opening", "closing"), MARKS, ids=[opening for opening, _ in MARKS])
def test_a_thought_stands_between_its_familys_marks(opening: str, closing: str) -> None:
    assert KNOWN.split(f"{opening}\nHm.\n{closing}\n\nWell.") == ("Hm.", "Well.")
    assert KNOWN.split(f"\nHm.\n{closing}\n\nWell.", opened=True) == ("Hm.", "Well.")
    assert KNOWN.split(f"{opening}\nHm.\n{closing}\n\nWell.", opened=True) == ("Hm.", "Well.")  # once more
    assert KNOWN.split(f"{opening}Hm") == ("Hm", "")  # cut
    assert KNOWN.split("Hm", opened=True) == ("Hm", "")
    assert KNOWN.split(f"So {opening}1{closing} and {opening}2{closing} on") == ("1\n2", "So\nand\non")


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        (" Well.\n", "", " Well.\n"),
        ("", "", ""),
        ("</think>Well.", "", "</think>Well."),  # it closes nothing
        ("<think></think>Well.", "", "Well."),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Well.", "Hm.", "Well."),
        ("<|channel|>final<|message|>Well.", "", "Well."),
        (" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Well.", "Hm.", "Well."),
        ("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Well.<|END_RESPONSE|>", "Hm.", "Well."),
        ("<|channel>thought\nHm.\n<channel|>Well.", "Hm.", "Well."),
        ("<think>[THINK]Hm.[/THINK]</think>Well.", "[THINK]Hm.[/THINK]", "Well."),
    ],
)
def test_what_is_thought_and_what_is_said(text: str, reasoning: str, said: str) -> None:
    assert KNOWN.split(text) == (reasoning, said)


@given(
    st.lists(st.sampled_from([mark for pair in MARKS for mark in pair]) | st.text(max_size=3), max_size=8).map("".join),
    st.booleans(),
)
def test_thoughts_are_in_order_and_hold_what_was_thought(text: str, opened: bool) -> None:
    found = KNOWN.reasoning_blocks(text, opened=opened)
    places = [place for block in found for place in (block.start, block.end)]
    assert places == sorted(places)
    assert all(block.text in text[block.start : block.end] for block in found)
    assert all(mark in KNOWN.split(text)[1] or mark in text for mark, _ in MARKS if mark in text)
    assert bool(found) >= opened
