"""A reward function that runs on a server.

    reward:
      batch:
        - use: turnwise.rewards.http:HttpReward
          name: helpful
          arguments: {url: "http://127.0.0.1:9000/rewards", token_env: REWARD_TOKEN, batch_size: 16}

Each request is a POST with this JSON object::

    {"items": [{"id": "3.0:17/2", "group": "3.0:17", "completion": "So it is 4.", "messages": [...], "columns": {"answer": "4"}}]}

The server answers with status 200 and a number for each item, in their order, or null for an item to which it gives no reward::

    {"rewards": [0.5], "metrics": [{"length": 11}]}

`metrics` is optional: further numbers for each item, which are recorded and are not part of the reward.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError
from turnwise.services.json_service import ServiceError, service
from turnwise.types import Trajectory

__all__ = ["HttpReward"]


class HttpReward:
    """Sends trajectories to a server, several in a request, and returns its rewards. For `reward.batch` and `reward.group`.

    A request that gets no connection, no answer in `timeout` seconds, or status 5xx or 429 is repeated up to `retries` times; the
    pause before each retry grows by `pause` seconds. If a request fails at last, or its answer does not have one reward for each
    item, the trajectories of this request fail and no others. The requests of a call run concurrently, at most `max_concurrent`
    at once, and `reward.timeout` limits all of them together.

    Args:
        url: Where to send the requests, such as `http://127.0.0.1:9000/rewards`.
        token_env: The environment variable with a token, which is sent as `Authorization: Bearer TOKEN`.
        batch_size: The largest number of items in a request.
        columns: The columns of the row to send. None: all columns.
        messages: Whether to send the messages of the conversation.

    Raises ConfigError.
    """

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None = None,
        batch_size: int = 32,
        columns: Collection[str] | None = None,
        messages: bool = True,
        timeout: float = 30.0,
        retries: int = 2,
        pause: float = 1.0,
        max_concurrent: int = 16,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"HttpReward: batch_size={batch_size} sends nothing; give a number above 0")
        headers: tuple[tuple[str, str], ...] = ()
        if token_env is not None:
            token = os.environ.get(token_env)
            if not token:
                raise ConfigError(
                    f"HttpReward: token_env: the environment variable {token_env} is not set; it must hold the token"
                )
            headers = (("Authorization", f"Bearer {token}"),)
        self._service = service(
            url, timeout=timeout, retries=retries, pause=pause, max_concurrent=max_concurrent, headers=headers
        )
        self._batch_size = batch_size
        self._columns = None if columns is None else set(columns)
        self._messages = messages

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | Exception | None]:
        size = self._batch_size
        requests = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        answers = await asyncio.gather(*(self._ask(request) for request in requests))
        return [reward for answer in answers for reward in answer]

    async def _ask(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        """The server's rewards for the trajectories of one request; an exception in place of each reward that failed."""
        items = [self._item(trajectory) for trajectory in trajectories]
        sent = [trajectory for trajectory, item in zip(trajectories, items, strict=True) if isinstance(item, dict)]
        rewards: list[Any] = []
        if sent:
            try:
                answer = await self._service.ask({"items": [item for item in items if isinstance(item, dict)]})
                rewards = self._rewards(answer, sent)
            except ServiceError as error:
                rewards = [error] * len(sent)
        received = iter(rewards)
        return [next(received) if isinstance(item, dict) else item for item in items]

    def _item(self, trajectory: Trajectory) -> dict[str, Any] | Exception:
        columns = trajectory.row.fields
        if self._columns is not None:
            columns = {name: value for name, value in columns.items() if name in self._columns}
        item: dict[str, Any] = {
            "id": trajectory.id,
            "group": trajectory.group,
            "completion": "\n".join(trajectory.assistant_texts),
            **({"messages": [dict(message) for message in trajectory.messages]} if self._messages else {}),
            "columns": dict(columns),
        }
        try:
            json.dumps(item)
        except (TypeError, ValueError, RecursionError) as error:
            return ServiceError(
                f"row {trajectory.row.id!r} cannot be sent as JSON ({error}): list the columns to send in the argument "
                f"columns, or leave out images with messages: false"
            )
        return item

    def _rewards(self, answer: Mapping[str, Any], sent: Sequence[Trajectory]) -> list[Any]:
        """The rewards in an answer. Raises ServiceError if their number is wrong."""
        rewards, metrics = answer.get("rewards"), answer.get("metrics")
        if not isinstance(rewards, list) or len(rewards) != len(sent):
            raise ServiceError(
                f"the service {self._service.url} must answer {{'rewards': [...]}} with one number or null for each of the "
                f"{len(sent)} items; it answered {str(dict(answer))[:200]}"
            )
        if metrics is not None:
            if not isinstance(metrics, list) or len(metrics) != len(sent):
                raise ServiceError(
                    f"the service {self._service.url}: metrics must be a list with one object for each of the {len(sent)} items; "
                    f"it is {str(metrics)[:200]}"
                )
            for trajectory, numbers in zip(sent, metrics, strict=True):
                trajectory.metrics.update(_finite(numbers))
        return rewards


def _finite(numbers: Any) -> dict[str, float]:
    if not isinstance(numbers, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
