"""Simulated users: somebody who answers the model in words.

`ScriptedUser` says what it was given. `checked_answer` is the user of GSM8K-style questions, who knows the right number,
says when the answer is wrong and lets the model try again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from turnwise.data.numeric_answers import Method, final_answer, same_number, truth
from turnwise.environments.environment import environment, say
from turnwise.types import Opening, Reply, Row, Turn

__all__ = ["ScriptedUser", "checked_answer"]


class ScriptedUser:
    """Says its lines one after the other, whatever the model says, and leaves when they are over."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        if isinstance(lines, str):
            raise TypeError(f"lines must be a list of texts, one for each answer; got the single text {lines!r}")
        self._lines = iter(list(lines))

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        line = next(self._lines, None)
        return Reply(done=True) if line is None else say(line)

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
    """A user who knows the answer (column `answer`: a number, or a GSM8K solution that ends in `#### n`).

    A right answer earns 1 at the first try and `retry_factor` of what it was at each further one; after `tries` wrong ones
    the user gives up and the reward is 0. Only the model's last words are read, never a tool's.
    """
    right = truth(row["answer"])
    turn = yield Opening(messages=row.messages)
    for attempt in range(tries):
        given = final_answer(turn.text, method)
        if same_number(given, right):
            yield Reply(reward=retry_factor**attempt, done=True, info={"answer": given, "try": attempt + 1})
            return
        if attempt + 1 < tries:
            turn = yield say(wrong)
    yield Reply(done=True, info={"answer": final_answer(turn.text, method), "try": tries})
