"""Simulated users that need no model.

`ScriptedUser` sends given messages. `checked_answer` is a user with a question whose answer is a number, as in GSM8K: if the
model's answer is wrong, the user says so, and the model may try again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from turnwise.data.numeric_answers import Method, final_answer, same_number, truth
from turnwise.environments.environment import environment, user_message
from turnwise.types import Opening, Reply, Row, Turn

__all__ = ["ScriptedUser", "checked_answer"]


class ScriptedUser:
    """Sends the given messages, one after each turn of the model. Ends the conversation after the last one."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        if isinstance(lines, str):
            raise TypeError(f"lines must be a list of texts, one for each message; got the single text {lines!r}")
        self._lines = iter(list(lines))

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        line = next(self._lines, None)
        return Reply(done=True) if line is None else user_message(line)

    async def close(self) -> None:
        pass


@environment
async def checked_answer(
    row: Row,
    *,
    tries: int = 2,
    retry_factor: float = 0.5,
    method: Method = "strict",
    wrong: str = "That is not right. Read the question again and have another try.",
) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user who knows the right answer (column `answer`: a number, or a GSM8K solution that ends in `#### n`).

    The reward of a right answer is 1 at the first try, and is multiplied by `retry_factor` for each further try. After `tries`
    wrong answers the conversation ends with reward 0. Only the text of the model's turn is read, never a tool's.
    """
    right = truth(row["answer"])
    turn = yield Opening(messages=row.messages)
    for attempt in range(tries):
        given = final_answer(turn.text, method)
        if same_number(given, right):
            yield Reply(reward=retry_factor**attempt, done=True, info={"answer": given, "try": attempt + 1})
            return
        if attempt + 1 < tries:
            turn = yield user_message(wrong)
    yield Reply(done=True, info={"answer": final_answer(turn.text, method), "try": tries})
