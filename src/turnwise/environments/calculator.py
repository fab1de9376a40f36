"""A calculator for models: arithmetic read by Python's own parser and computed here, never by `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

__all__ = ["calculate", "calculator"]

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_LONGEST = 200  # characters; beyond that it is not a question for a calculator
_LARGEST = 10**30  # a model that writes 9**9**9 must not hold up the others


async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression, for example (3+4)*5.
    """
    # async although it never waits: it is quick, and a sync function would cost a thread for each call
    return calculate(expression)


def calculate(expression: str) -> str:
    """The value of an expression of numbers, `+ - * / // % **` and brackets, as text: `"24"`, `"2.5"`.

    Raises ValueError, with a message for the model, if it is anything else.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_LONGEST} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    try:
        value = _value(tree.body, expression)
    except ZeroDivisionError:
        raise ValueError(f"{expression!r} divides by zero") from None
    except OverflowError:
        raise ValueError(f"the value of {expression!r} is too large") from None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.10g}"
    return str(value)


def _value(node: ast.expr, expression: str) -> float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number, expression)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, expression))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, expression), _value(right, expression)
            if isinstance(op, ast.Pow) and abs(b) > 100:
                raise ValueError(f"the value of {expression!r} is too large")
            result = _BINARY[type(op)](a, b)
            if isinstance(result, complex):
                raise ValueError(f"the value of {expression!r} is not a real number")
            return _bounded(result, expression)
        case _:
            pass
    raise ValueError(f"{expression!r} is not an arithmetic expression: only numbers, + - * / // % ** and brackets are")


def _bounded(number: float, expression: str) -> float:
    if not -_LARGEST <= number <= _LARGEST:  # also refuses nan
        raise ValueError(f"the value of {expression!r} is too large")
    return number
