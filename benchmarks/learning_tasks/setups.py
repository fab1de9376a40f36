"""What `benchmarks/learning.py` runs: the tasks, and the setups (estimators) of each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TASKS", "Setup", "Task"]


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to train on a task: options that differ from the task's recipe."""

    name: str
    overrides: tuple[str, ...]
    steps: int
    quick_steps: int


@dataclass(frozen=True, slots=True)
class Task:
    """A task, with the numbers that its docstring computes."""

    name: str
    title: str
    setups: tuple[Setup, ...]
    start: float
    """The expected reward of the start policy."""
    optimum: float
    """The largest expected reward of any policy."""
    level: float
    """The reward whose first step is reported."""
    data: tuple[str, ...]
    """The data files of the task."""
    evaluated: bool = False
    """Whether the curve shows evaluations on held-out rows over sampled tokens, instead of training steps."""


def setups(names: tuple[str, ...], steps: int, quick_steps: int) -> tuple[Setup, ...]:
    """A setup for each estimator, with the default options of the estimator. A critic learns with the policy's learning rate."""
    critic = {"turn_gae": ("critic.lr=1.0e-3",)}
    return tuple(Setup(name, (f"credit.name={name}", *critic.get(name, ())), steps, quick_steps) for name in names)


ESTIMATORS = ("grpo", "turn_return", "turn_gae", "gigpo")
BIASED = ("mt_grpo", "igpo", "kevin")
TEACHER = ("teacher.path=${LEARNING}/teacher/checkpoint", "teacher.signal=divergence", "teacher.divergence=forward_kl")
SUB_AGENT = ("environment.arguments.solver=true",)
SOLVER = ("environment.arguments.policy=solver", "policies={solver: {train: true}}", "model.lora.rank=8")
ONE_TRY = ("credit.name=grpo", "data.train=${LEARNING}/one_try.jsonl")

TASKS = (
    Task(
        "doors",
        "delayed reward: one of six turns decides",
        setups(ESTIMATORS, 150, 3),
        start=0.15,
        optimum=1.0,
        level=0.8,
        data=("doors",),
    ),
    Task(
        "digging",
        "turn rewards, and the model decides when to stop",
        setups(ESTIMATORS + BIASED, 60, 25),
        start=0.575,
        optimum=1.0,
        level=0.9,
        data=("digging",),
    ),
    Task(
        "guessing",
        "a second try, evaluated with two tries",
        (
            # a conversation with one try has about half as many sampled tokens: more steps, cut at equal tokens
            Setup("single-turn grpo", ONE_TRY, 500, 6),
            *(
                Setup(f"multi-turn {one.name}", one.overrides, one.steps, one.quick_steps)
                for one in setups(ESTIMATORS, 300, 4)
            ),
        ),
        start=0.252,
        optimum=0.92,
        level=0.75,
        data=("one_try", "two_tries", "held_out"),
        evaluated=True,
    ),
    Task(
        "distillation",
        "the demo, with the trained demo as teacher",
        (
            Setup("rewards", (), 80, 2),
            Setup("teacher", (*TEACHER, "credit.name=none"), 50, 2),
            Setup("rewards and teacher", TEACHER, 50, 2),
        ),
        start=0.47,
        optimum=1.0,
        level=0.95,
        data=(),
        evaluated=True,
    ),
    Task(
        "delegation",
        "two of three questions in the prompt, alone or with a sub-agent that sees one",
        (
            Setup("planner alone", ("train.lr=1.0e-3",), 40, 1),  # collapses with the recipe's
            Setup("planner and solver", (*SUB_AGENT, *SOLVER), 40, 1),
            Setup("one policy as both", SUB_AGENT, 40, 1),
        ),
        start=0.17,
        optimum=1.0,
        level=0.5,
        data=(),
        evaluated=True,
    ),
)
