"""A quiz as a gymnasium environment: word questions, one after the other. It does not import turnwise."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces


class Quiz(gymnasium.Env[str, int]):
    """Asks `questions` questions drawn with the seed. Each right answer has the reward 1 / `questions`."""

    def __init__(self, questions: int = 2) -> None:
        self.action_space = spaces.Discrete(10_000)
        self.observation_space = spaces.Text(300)
        self._questions = questions

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._asked = 0
        return self._next(), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == self._answer
        told = "Right." if right else f"No, it is {self._answer}."
        over = self._asked == self._questions
        shown = told if over else f"{told} {self._next()}"
        return shown, right / self._questions, over, False, {"right": bool(right)}

    def _next(self) -> str:
        self._asked += 1
        a, b, c = (int(number) for number in self.np_random.integers(2, 30, size=3))
        match int(self.np_random.integers(3)):
            case 0:
                self._answer = a + b + c
                return f"In a bag there are {a} red, {b} green and {c} blue pencils. How many pencils are in the bag?"
            case 1:
                self._answer = a * b
                return f"A garden has {a} rows of {b} trees. How many trees grow in it?"
            case _:
                self._answer = a + b * c
                return f"Anna has {a} pears and buys {b} bags of {c} pears. How many pears does Anna have now?"
