"""A planner with a sub-agent, or alone: three word questions stand in the prompt, and two of them are to be answered.

    1: A garden has 38 rows of 7 trees. How many trees grow in it?
    2: ...
    3: ...
    Answer 1 and 3.

Alone, the model writes an expression (`38*7`), is told its value, writes the second one, is told its value, and writes both
values. With a sub-agent, it writes the number of a question (`1`) instead: a solver, whose conversation has this question and
nothing else, writes the expression, and the planner is told its value. The reward is the share of the two values that are
right. It is all that any setup is told, also the solver, whose conversations have the reward of their episode. Rows, start
model and estimator are the same, and so is, at each point of the curves, the number of sampled tokens, with those of the solver.
The planner alone has a learning rate of its own, because it collapses with that of the others.

All setups start from the demo's model, fine-tuned on conversations of all three roles (half of them alone) with equal rates of
mistakes: a fifth of the choices is another question, and a fifth of the expressions has another digit or sign. A model without
further mistakes would have a start reward of 0.64 in each setup; this one has 0.08 alone and 0.17 with the solver. What can
differ is what a model of this size makes of the prompt: alone, it must find the numbers of the right question among those of
three; the solver sees one question.

Setups: one adapter of rank 16 (alone); two policies of rank 8, planner and solver; one adapter of rank 16 that plays both.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from turnwise import Opening, Reply, Row, Turn, current_episode, environment, user_message
from turnwise.environments.calculator import calculate

__all__ = ["delegation", "prepare"]

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS, ASKED = 3, 2
CONVERSATIONS, ROWS, HELD_OUT = 8192, 2048, 128
MISTAKES = 0.2
ROLES = ("alone", "planner", "alone", "solver")
"""The roles in the conversations of the fine-tuning: half of them alone, which is the hardest to learn."""
OPTIONS = {"sft.steps": 520, "sft.batch_size": 32, "sft.lr": 2e-3, "sft.warmup_steps": 10, "sft.lr_schedule": "cosine"}


def new_row(rng: random.Random, drawn: list[dict[str, Any]]) -> dict[str, Any]:
    """A row with `QUESTIONS` of the questions `drawn`, and which of them are asked for, counted from 1."""
    questions = rng.sample(drawn, QUESTIONS)
    asked = sorted(rng.sample(range(1, QUESTIONS + 1), ASKED))
    texts = [question["prompt"][0]["content"] for question in questions]
    lines = [f"{number}: {text}" for number, text in enumerate(texts, 1)]
    prompt = "\n".join([*lines, f"Answer {' and '.join(map(str, asked))}."])
    answers = [questions[number - 1]["answer"] for number in asked]
    expressions = [question["expression"] for question in questions]
    return {"prompt": prompt, "asked": asked, "texts": texts, "answers": answers, "expressions": expressions}


def value(expression: str) -> str:
    """The value of an expression that a model has written; `?` if it has none."""
    try:
        return calculate(expression)
    except ValueError:
        return "?"


def garbled(rng: random.Random, expression: str) -> str:
    """The expression with another digit or sign in one place, in a quarter of the cases."""
    if rng.random() >= MISTAKES:
        return expression
    place = rng.choice([number for number, sign in enumerate(expression) if sign not in "()"])
    others = "0123456789" if expression[place].isdigit() else "+-*/"
    return (
        expression[:place]
        + rng.choice([sign for sign in others if sign != expression[place]])
        + expression[place + 1 :]
    )


def conversation(rng: random.Random, row: dict[str, Any], role: str) -> list[dict[str, str]]:
    """A conversation with mistakes for the fine-tuning; `role` is alone, planner or solver."""
    if role == "solver":
        number = rng.randrange(QUESTIONS)
        return [said("user", row["texts"][number]), said("assistant", garbled(rng, row["expressions"][number]))]
    messages, values = [said("user", row["prompt"])], []
    for number in row["asked"]:
        if rng.random() < MISTAKES:
            number = rng.choice([other for other in range(1, QUESTIONS + 1) if other != number])
        expression = garbled(rng, row["expressions"][number - 1])
        values.append(value(expression))
        messages += [said("assistant", expression if role == "alone" else str(number)), said("user", values[-1])]
    return [*messages, said("assistant", " ".join(values))]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def make_data() -> dict[str, list[dict[str, Any]]]:
    """The rows by the names of their files. No question of `held_out` is in the others."""
    sys.path.insert(0, str(ROOT / "demo"))
    rng = random.Random(0)
    drawn = importlib.import_module("questions").questions(seed=0, count=3000)
    known, new = drawn[:2600], drawn[2600:]
    return {
        "conversations": [
            {"messages": conversation(rng, new_row(rng, known), ROLES[number % len(ROLES)])}
            for number in range(CONVERSATIONS)
        ],
        "train": [new_row(rng, known) for _ in range(ROWS)],
        "held_out": [new_row(rng, new) for _ in range(HELD_OUT)],
    }


def prepare(folder: Path) -> None:
    """Write the rows, and fine-tune the model to `folder/start/checkpoint` unless it is there."""
    # here, because runs import this file as an environment, without the folder benchmarks
    from learning_tasks.fine_tuning import fine_tune

    if (folder / "ready").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in make_data().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fine_tune(folder, {"model.path": ROOT / "demo/model", "model.device": "cpu", **OPTIONS})


@environment
async def delegation(
    row: Row, solver: bool = False, policy: str | None = None
) -> AsyncGenerator[Opening | Reply, Turn]:
    """One conversation. With `solver`, a sub-agent writes the expressions; `policy` plays it."""
    turn = yield Opening(messages=row.messages)
    for _ in row["asked"]:
        told = await _solved(row, turn.text.strip(), policy) if solver else value(turn.text)
        turn = yield user_message(told)
    given = turn.text.split()
    right = sum(said == answer for said, answer in zip(given, row["answers"], strict=False))
    yield Reply(reward=right / ASKED if len(given) == ASKED else 0.0, done=True)


async def _solved(row: Row, number: str, policy: str | None) -> str:
    """What the solver makes of the question with this number."""
    if number not in [str(known) for known in range(1, QUESTIONS + 1)]:
        return "?"
    async with current_episode().agent("solver", shares_reward=True, policy=policy) as solver:
        return value((await solver.turn(row["texts"][int(number) - 1])).text)
