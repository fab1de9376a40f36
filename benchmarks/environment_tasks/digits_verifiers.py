"""The largest digit of a number, as an environment of verifiers."""

import random

import verifiers as vf
from datasets import Dataset

__all__ = ["load_environment"]


def right(completion, answer):
    """1 if the last message is the answer."""
    return float(completion[-1]["content"].strip() == answer)


def load_environment():
    """800 of the numbers below 1000 to train on, the others held out."""
    rows = [{"question": f"{n:03}", "answer": max(f"{n:03}")} for n in random.Random(0).sample(range(1000), 1000)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:800]),
        eval_dataset=Dataset.from_list(rows[800:]),
        rubric=vf.Rubric(funcs=[right]),
    )
