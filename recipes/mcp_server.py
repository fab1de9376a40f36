"""An MCP server with two tools, over stdin and stdout. It needs no packages besides Python.

With the official SDK (`pip install mcp`) such a server has ten lines: docs/tools.md has one.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
TOOLS = {
    "calculator": ("Evaluate an arithmetic expression.", "expression", "The expression, for example (3+4)*5."),
    "reverse": ("Write a text backwards.", "text", "The text."),
}


def value_of(node: ast.expr) -> float:
    """The value of numbers, + - * / and brackets."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(left), value_of(right))
        case _:
            raise ValueError("only numbers, + - * / and brackets are allowed")


def calculator(expression: str) -> str:
    """The value of an expression, as text."""
    try:
        value = value_of(ast.parse(expression[:200].strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The answer to a call. An error of the tool is an answer too."""
    try:
        text = calculator(arguments["expression"]) if name == "calculator" else arguments["text"][::-1]
    except (ArithmeticError, KeyError, ValueError) as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    return {"content": [{"type": "text", "text": text}]}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The result of a request."""
    match method:
        case "initialize":
            return {
                "protocolVersion": parameters["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "arithmetic", "version": "1"},
            }
        case "tools/list":
            schemas = {
                name: {
                    "type": "object",
                    "properties": {key: {"type": "string", "description": what}},
                    "required": [key],
                }
                for name, (_, key, what) in TOOLS.items()
            }
            return {
                "tools": [{"name": name, "description": TOOLS[name][0], "inputSchema": schemas[name]} for name in TOOLS]
            }
        case "tools/call" if parameters["name"] in TOOLS:
            return called(parameters["name"], parameters["arguments"])
        case "ping":
            return {}
        case _:
            raise LookupError(f"no method {method}, or no such tool")


def main() -> None:
    """Reads one JSON-RPC message per line. A message without an id gets no answer."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        try:
            told = {"result": answer(message["method"], message.get("params", {}))}
        except LookupError as error:
            told = {"error": {"code": -32601, "message": str(error)}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **told}), flush=True)


if __name__ == "__main__":
    main()
