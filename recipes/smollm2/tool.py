"""Questions with a calculator, for a model whose chat template knows no tools: the prompt shows two calls as a conversation."""

from __future__ import annotations

from collections.abc import Generator

from turnwise import Opening, Reply, Row, Turn, environment
from turnwise.data.numeric_answers import final_answer, same_number, truth


def _call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


EXAMPLE = (
    ("user", "A shelf has 12 rows of 7 books, and 5 more books. How many books are there?"),
    ("assistant", _call("12*7+5")),
    ("tool", "89"),
    ("assistant", "The answer is 89."),
    ("user", "In a bag there are 30 red, 14 green and 25 blue pens. How many pens are in the bag?"),
    ("assistant", _call("30+14+25")),
    ("tool", "69"),
    ("assistant", "The answer is 69."),
)


@environment
def questions(row: Row) -> Generator[Opening | Reply, Turn, None]:
    """Asks the row's question. The reward is 1 if the last number of the model's text is the row's `answer`."""
    shown = [{"role": role, "content": text} for role, text in EXAMPLE]
    turn = yield Opening(messages=[*shown, *row.messages])
    right = same_number(final_answer(turn.text, "flexible"), truth(row["answer"]))
    yield Reply(reward=float(right), done=True)
