"""A plugin for ms-swift: arithmetic questions, a calculator, and a user who says once that an answer is wrong.

Nothing in it knows turnwise. With ms-swift it is `--external_plugins swift_calculator.py`,
`--multi_turn_scheduler calculator_scheduler` and `--reward_funcs right_answer`; with turnwise it is recipes/swift_scheduler.yaml.
"""

import ast
import json
import operator
import re

from swift.plugin import ORM, MultiTurnScheduler, multi_turns, orms
from swift.utils import get_logger

logger = get_logger()

WRONG = "That is not right. Read the question again and have another try."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "The expression, for example (3+4)*5."},
            },
            "required": ["expression"],
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(node):
    """The value of a parsed expression of numbers, + - * / and brackets."""
    if isinstance(node, ast.Expression):
        return calculate(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -calculate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    raise ValueError("only numbers, + - * / and brackets")


def number(text):
    """The number behind the last `####`, or None."""
    found = re.findall(r"####\s*(-?\d[\d,]*(?:\.\d+)?)", text)
    return float(found[-1].replace(",", "")) if found else None


class CalculatorScheduler(MultiTurnScheduler):
    """Answers calls of the calculator, and a wrong answer once."""

    async def on_trajectory_start(self, requests):
        for request in requests:
            request.tools = [CALCULATOR]

    def calls(self, text):
        return re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)

    def right(self, request, text):
        return number(text) == float(request.data_dict["answer"])

    def check_finished(self, infer_request, response_choice, current_turn):
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        text = response_choice.message.content
        if self.calls(text):
            return False
        told = any(message["content"] == WRONG for message in infer_request.messages)
        return told or self.right(infer_request, text)

    def step(self, infer_request, response_choice, current_turn):
        text = response_choice.message.content
        results = []
        for call in self.calls(text):
            try:
                expression = json.loads(call)["arguments"]["expression"]
                value = calculate(ast.parse(expression, mode="eval"))
                results.append(str(int(value) if value == int(value) else value))
            except (ValueError, KeyError, TypeError, SyntaxError, ZeroDivisionError, OverflowError) as error:
                logger.debug("a call that cannot be answered: %s", call)
                results.append(f"error: {error}")
        if results:
            infer_request.messages += [{"role": "tool", "content": result} for result in results]
        else:
            infer_request.messages.append({"role": "user", "content": WRONG})
        return {"infer_request": infer_request, "rollout_infos": {"told": not results}}


class RightAnswer(ORM):
    """1 for the right answer, half of it at the second try."""

    def __call__(self, completions, answer, rollout_infos, **kwargs):
        values = []
        for text, truth, infos in zip(completions, answer, rollout_infos, strict=True):
            value = 0.5 if infos.get("told") else 1.0
            values.append(value if number(text) == float(truth) else 0.0)
        return values


multi_turns["calculator_scheduler"] = CalculatorScheduler
orms["right_answer"] = RightAnswer
