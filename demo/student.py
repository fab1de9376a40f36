"""A simulated student who makes mistakes: the conversations on which the demo's model is fine-tuned before RL.

The student knows the right call for each question, but often makes a mistake: a wrong digit or operator, two exchanged numbers,
an answer without a calculation, or a malformed call. The tool and the user answer as in training, so the messages after a
mistake are realistic. This module knows conversations. It does not know tokens or models.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.tool_calls import Hermes
from turnwise.environments.calculator import calculate

__all__ = ["WRONG", "Habits", "Trace", "converse"]

WRONG = "That is not right. Read the question again and have another try."
_TOKEN = re.compile(r"\d+|\D")
_READER = Hermes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The probability of each kind of mistake. Otherwise the student's call is right."""

    wrong: float
    """A call of a wrong expression, at the first try."""
    wrong_again: float
    """The same after the user said that the answer is not right."""
    guess: float
    """No call, but a guessed answer."""
    garbled: float
    """A call that the tool cannot execute."""


@dataclass(slots=True)
class Trace:
    """A conversation, and whether each turn of the student is a mistake."""

    messages: list[dict[str, Any]]
    mistakes: list[bool] = field(default_factory=list)
    """One for each assistant message, in order."""

    def say(self, content: str, *, mistake: bool) -> None:
        self.messages.append({"role": "assistant", "content": content})
        self.mistakes.append(mistake)

    def hear(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


def converse(rng: random.Random, row: dict[str, Any], habits: Habits, *, tries: int = 2) -> Trace:
    """Let the student answer a row's question: a call, the tool's result, the answer, and another try if it was wrong."""
    trace = Trace(list(row["prompt"]))
    for attempt in range(tries):
        if attempt:
            trace.hear("user", WRONG)
        answer = _attempt(rng, trace, row, habits, habits.wrong_again if attempt else habits.wrong)
        if answer == row["answer"]:
            break
    return trace


def _attempt(rng: random.Random, trace: Trace, row: dict[str, Any], habits: Habits, wrong: float) -> str:
    if rng.random() < habits.guess:
        answer = str(rng.randint(2, 199))
        trace.say(f"#### {answer}", mistake=answer != row["answer"])
        return answer
    if rng.random() < habits.garbled:
        text, error = _garbled(rng, row["expression"])
        trace.say(text, mistake=True)
        trace.hear("tool", f"Error: {error}")
    expression = row["expression"]
    if rng.random() < wrong:
        expression = _mixed_up(rng, expression)
    result = calculate(expression)
    trace.say(_call(expression), mistake=result != row["answer"])
    trace.hear("tool", result)
    trace.say(f"#### {result}", mistake=False)  # reporting the tool's result is right, even if the call was wrong
    return result


def _call(expression: str, *, name: str = "calculator", argument: str = "expression") -> str:
    # written as text, as the template writes `tool_calls`: a malformed call has no other form
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {argument: expression}})}\n</tool_call>"


def _mixed_up(rng: random.Random, expression: str) -> str:
    """The expression with one mistake. It can still be computed, and has another value."""
    right = calculate(expression)
    while True:
        wrong = rng.choice((_other_digit, _other_digit, _other_operator, _swapped))(rng, expression)
        try:
            if calculate(wrong) != right:
                return wrong
        except ValueError:
            continue  # it divides by zero, or begins a number with 0


def _other_digit(rng: random.Random, expression: str) -> str:
    at = rng.choice([i for i, char in enumerate(expression) if char.isdigit()])
    return expression[:at] + rng.choice("0123456789") + expression[at + 1 :]


def _other_operator(rng: random.Random, expression: str) -> str:
    at = rng.choice([i for i, char in enumerate(expression) if char in "+-*/"])
    return expression[:at] + rng.choice("+-*/") + expression[at + 1 :]


def _swapped(rng: random.Random, expression: str) -> str:
    parts = _TOKEN.findall(expression)
    one, other = rng.sample([i for i, part in enumerate(parts) if part.isdigit()], 2)
    parts[one], parts[other] = parts[other], parts[one]
    return "".join(parts)


def _garbled(rng: random.Random, expression: str) -> tuple[str, str]:
    """A call that cannot be executed, and the error of the tool, as in `turnwise.environments.tools.toolbox` would."""
    match rng.randrange(4):
        case 0:  # a bracket or a quotation mark is missing
            text = _call(expression).replace('"}}', rng.choice(('"}', "}}")))
            (call,) = _READER.parse(text).calls
            assert call.error is not None
            return text, call.error
        case 1:
            text = _call(expression, name="calculate")
            return text, "there is no tool 'calculate'; did you mean 'calculator'? (the tools are: calculator)"
        case 2:
            text = _call(expression, argument="expr")
            return text, "the argument 'expression' is missing; calculator has no argument 'expr'"
        case _:
            at = rng.choice([i for i, char in enumerate(expression) if char in "+-*/"])
            broken = expression[:at] + rng.choice(("+*", "*/", " and ", "+(")) + expression[at + 1 :]
            return _call(broken), _refusal(broken)


def _refusal(expression: str) -> str:
    try:
        value = calculate(expression)
    except ValueError as problem:
        return str(problem)
    raise AssertionError(f"{expression!r} should not be arithmetic, and is {value}")
