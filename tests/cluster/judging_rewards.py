"""A reward function that asks the engine of the run, for the tests of rollout workers."""

from __future__ import annotations

from collections.abc import Callable

from turnwise.services.chat import ChatModel
from turnwise.types import Sampling, Trajectory


class LengthOfAnswer:
    """The number of characters that the model answers to the conversation, greedily."""

    wants_engine = True

    def use_engine(self, chat_model: Callable[[Sampling], ChatModel]) -> None:
        self._ask = chat_model(Sampling(temperature=0.0, max_tokens=20))

    async def __call__(self, trajectory: Trajectory) -> float:
        return float(len(await self._ask([{"role": "user", "content": trajectory.answer}])))
