"""GSM8K with a tool, and GSM8K with a user who says whether the answer is right.

Rows come from `python -m turnwise.data.gsm8k` or from verl's preprocessing, or have a column `answer`. Texts and scores equal
verl's. The `grader` determines how an answer is parsed (`turnwise.data.numeric_answers.Grader`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from turnwise.data.numeric_answers import Grader, grade, parsed, truth
from turnwise.environments.environment import environment, user_message
from turnwise.environments.tools.tool import Tool
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import DataError
from turnwise.types import Opening, Reply, Row, Turn

__all__ = ["CORRECT", "INCORRECT", "Gsm8kTool", "ground_truth", "gsm8k_interaction", "gsm8k_with_tool"]

CORRECT = "Your response is correct!"
INCORRECT = "Your response is incorrect! You need to reflect on your answer and try again."

_TOOL = "calc_gsm8k_reward"
_NOT_IMPROVED = -0.05


class Gsm8kTool:
    """A tool that returns the reward that an answer would get.

    A call whose reward is not above the reward of the previous call costs 0.05; the first call is compared with 0. The instance
    keeps the last reward, so each conversation needs its own instance.
    """

    def __init__(self, ground_truth: str, *, grader: Grader = "flexible") -> None:
        self._truth = ground_truth
        self._grader: Grader = grader
        self._reward = 0.0

    async def calc_gsm8k_reward(self, answer: str) -> tuple[str, float]:
        """A tool for calculating the reward of gsm8k: 1.0 if your answer is correct, 0.0 if it is not or cannot be read.

        Args:
            answer: Your answer to the math problem, in digits.
        """
        response = _marked(answer)
        # as in verl: 0 if there is no number, 0.0 if the number is wrong
        reward = 0 if parsed(response, self._grader) is None else grade(response, self._truth, self._grader)
        earned = 0.0 if reward > self._reward else _NOT_IMPROVED
        self._reward = reward
        return f"Current parsed {answer=} {reward=}", earned


@environment
async def gsm8k_interaction(
    row: Row, *, grader: Grader = "flexible", last_user: bool = False
) -> AsyncGenerator[Opening | Reply, Turn]:
    """Says after each turn whether the model's answer is right. `limits.turns` limits the number of attempts.

    A right answer has the reward 1 and ends the conversation. `last_user` grades the last user message instead of the model's
    message, as in verl's document: the model's answers then have no influence. verl has corrected this since.
    """
    right = ground_truth(row)
    last_message = _last_of(row.messages, "user")
    turn = yield Opening(messages=row.messages)
    while True:
        content = last_message if last_user else str(turn.message.get("content") or "")
        response = content if grader == "robust" else _marked(content)
        info = {"answer": parsed(response, grader)}
        if grade(response, right, grader):
            yield Reply(messages=user_message(CORRECT).messages, reward=1.0, done=True, info=info)
            return
        last_message = INCORRECT
        turn = yield Reply(messages=user_message(INCORRECT).messages, info=info)


@environment
async def gsm8k_with_tool(
    row: Row, *, grader: Grader = "flexible", final: Grader = "strict"
) -> AsyncGenerator[Opening | Reply, Turn]:
    """GSM8K with `Gsm8kTool` at hand. The first turn without a call is the answer: graded by `final`, it earns 1 or 0."""
    right = ground_truth(row)
    tools = Tools([Tool.of(Gsm8kTool(right, grader=grader).calc_gsm8k_reward)])
    try:
        turn = yield await tools.begin(row)
        while turn.calls:
            turn = yield await tools.step(turn)
        text = str(turn.message.get("content") or "")
        yield Reply(reward=grade(text, right, final), done=True, info={"answer": parsed(text, final)})
    finally:
        await tools.close()


def ground_truth(row: Row) -> str:
    """The right number of a row, from its arguments for the interaction, the tool or the reward function, or from `answer`.

    Raises DataError if it is in none of these places.
    """
    for path in (
        ("extra_info", "interaction_kwargs", "ground_truth"),
        ("extra_info", "tools_kwargs", _TOOL, "create_kwargs", "ground_truth"),
        ("reward_model", "ground_truth"),
    ):
        value: Any = row.fields
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return str(value)
    answer = row.fields.get("answer")
    if answer is None:
        have = ", ".join(sorted(row.fields)) or "none"
        raise DataError(
            f"row {row.id!r} has no correct answer. Give it in one of these fields: extra_info.interaction_kwargs.ground_truth, "
            f"extra_info.tools_kwargs.{_TOOL}.create_kwargs.ground_truth, reward_model.ground_truth, answer. The "
            f"columns of the row are: {have}. Make rows with: python -m turnwise.data.gsm8k"
        )
    return truth(answer)


def _marked(answer: str) -> str:
    return answer if answer.startswith("#### ") else f"#### {answer}"


def _last_of(messages: Any, role: str) -> str:
    texts = [str(message.get("content") or "") for message in messages if message.get("role") == role]
    return texts[-1] if texts else ""
