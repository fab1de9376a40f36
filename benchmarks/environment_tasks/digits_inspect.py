"""The largest digit of a number, as a task of Inspect."""

import random

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

__all__ = ["digits"]


@task
def digits(first: int = 0, last: int = 800):
    """The numbers below 1000 from the place `first` to before `last` of a random order."""
    numbers = random.Random(0).sample(range(1000), 1000)[first:last]
    samples = [Sample(input=f"{n:03}", target=max(f"{n:03}")) for n in numbers]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=exact())
