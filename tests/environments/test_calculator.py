"""The calculator computes, refuses everything else, and never takes long."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.environments.calculator import calculate, calculator
from turnwise.environments.tools.toolbox import Tool
from turnwise.types import ToolCall


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+4", "7"),
        ("(3+4)*5", "35"),
        (" 2 * -3 ", "-6"),
        ("10/4", "2.5"),
        ("10/5", "2"),
        ("0.1+0.2", "0.3"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7%3", "1"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("2**0.5", "1.414213562"),
        ("1/3", "0.3333333333"),
        ("--5", "5"),
        ("+5", "5"),
        ("1e3", "1000"),
        ("1_000+1", "1001"),
        ("123456789*987654321", "121932631112635269"),
        ("10**30", "1" + "0" * 30),
        ("1e-20", "1e-20"),
        ("0*-1.0", "0"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("1/0", "'1/0' divides by zero"),
        ("1//0", "divides by zero"),
        ("5.0 % 0", "divides by zero"),
        ("0**-1", "divides by zero"),
        ("9**9**9", "is too large"),
        ("10**31", "is too large"),
        ("2**101", "is too large"),
        ("1e30*10", "is too large"),
        ("1e30**50", "is too large"),
        ("1e999", "is too large"),
        ("-1e999", "is too large"),
        ("1e999-1e999", "is too large"),
        ("(-8)**0.5", "is not a real number"),
        ("__import__('os').system('true')", "only numbers"),
        ("open('/etc/passwd').read()", "only numbers"),
        ("(lambda: 1)()", "only numbers"),
        ("[1][0]", "only numbers"),
        ("().__class__.__bases__", "only numbers"),
        ("x", "only numbers"),
        ("abs(-1)", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("None", "only numbers"),
        ("1j", "only numbers"),
        ("1 < 2", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("7 ^ 2", "only numbers"),
        ("1 << 100", "only numbers"),
        ("~1", "only numbers"),
        ("not 1", "only numbers"),
        ("...", "only numbers"),
        ("x = 1", "is not an arithmetic expression"),
        ("import os", "is not an arithmetic expression"),
        ("1; 2", "is not an arithmetic expression"),
        ("3 +", "is not an arithmetic expression"),
        ("3 apples", "is not an arithmetic expression"),
        ("", "is not an arithmetic expression"),
        ("1,000", "only numbers"),
        ("\0", "is not an arithmetic expression"),
        ("\ud800", "is not an arithmetic expression"),
        ("(" * 150 + "1" + ")" * 40, "is not an arithmetic expression"),
        ("1" * 201, "the expression has 201 characters; at most 200 are allowed"),
    ],
)
def test_refusals(expression: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%()e ", max_size=60))
def test_whatever_is_asked_there_is_a_value_or_a_refusal_and_soon(expression: str) -> None:
    started = time.perf_counter()
    with contextlib.suppress(ValueError):
        assert math.isfinite(float(calculate(expression)))
    assert time.perf_counter() - started < 60


def test_as_a_tool_it_tells_the_model_what_is_wrong() -> None:
    tool = Tool.of(calculator)
    assert tool.schema["function"] == {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "The expression, for example (3+4)*5."},
            },
            "required": ["expression"],
        },
    }

    def ask(expression: object) -> tuple[str, str | None]:
        call = ToolCall(id="call_0", name="calculator", arguments={"expression": expression}, text="")
        outcome = asyncio.run(tool.run(call))
        return outcome.content, outcome.error

    assert ask("6*7") == ("42", None)
    assert ask("1/0") == ("Error: '1/0' divides by zero", "raised")
    assert ask(42) == ("Error: expression: Input should be a valid string, got 42", "arguments")
