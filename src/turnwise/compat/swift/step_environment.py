"""The environment of a scheduler with `step`: the rollout loop asks the scheduler after each turn of the model.

Neither this module nor `run_environment` samples or counts tokens; the rollout loop does both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turnwise.compat.swift.engine import sampling_change
from turnwise.compat.swift.masks import mask_turn
from turnwise.compat.swift.messages import (
    FULL_ANSWER,
    MEDIA,
    append_answer,
    final_reply,
    messages_of,
    reply_between,
    request_arguments,
    request_of,
    request_tools,
    without_answers,
)
from turnwise.compat.swift.protocol import RolloutInferRequest, choice_of
from turnwise.compat.swift.scheduler import ask_scheduler, call_hook
from turnwise.types import Opening, Reply, Row, ToolSchema, Turn

__all__ = ["StepEnvironment"]


class StepEnvironment:
    """One conversation that a scheduler's `on_turn_end`, `check_finished` and `step` lead.

    With `gym_weight`, the reward of a turn is `gym_weight` times the increase of `rollout_infos["total_reward"]`.
    `lock` is given if several conversations share the scheduler.
    """

    def __init__(
        self, scheduler: Any, *, name: str, gym_weight: float | None = None, lock: asyncio.Lock | None = None
    ) -> None:
        self.scheduler = scheduler
        self.name = name
        self.gym_weight = gym_weight
        self.lock = lock
        self.turns = 0
        """Turns that the scheduler has seen."""
        self.total_reward = 0.0
        """The `total_reward` that has been paid out so far."""
        self._request: RolloutInferRequest | None = None
        self._tools: list[ToolSchema] = []
        self._arguments: dict[str, Any] = {}

    async def begin(self, row: Row) -> Opening:
        request = self._request = request_of(row, f"{row.id}-{self.name}")
        await call_hook(self.scheduler.on_trajectory_start, [request], lock=self.lock)
        request.messages[:] = without_answers(request.messages)
        self._tools, self._arguments = request_tools(request), request_arguments(request)
        return Opening(messages=messages_of(request), tools=self._tools, chat_template_kwargs=self._arguments)

    async def step(self, turn: Turn) -> Reply:
        request = self._request
        assert request is not None, "step before begin"
        if turn.index != self.turns:
            raise ValueError(
                "a turn was answered by tools and did not reach the scheduler, which must see all turns: give the tools to the "
                "scheduler, and remove `tools` and `mcp` from the recipe"
            )
        self.turns += 1
        choice = choice_of(turn)
        # copies, because the scheduler may append to the lists of `choice`
        sampled, logprobs = list(choice.token_ids or ()), _logprobs(turn)
        append_answer(request.messages, turn.text)
        before = messages_of(request)
        decision = await ask_scheduler(self.scheduler, request, choice, self.turns, lock=self.lock)
        self._request = request = decision.request
        infos = dict(decision.infos)
        for name in MEDIA:
            if name in infos:
                setattr(request, name, list(infos.pop(name)))
        after = messages_of(request, since=len(before))
        if decision.done:
            reply = final_reply(before, after)
        else:
            previous, self._tools = self._tools, request_tools(request)
            changed_tools = None if self._tools == previous else self._tools
            reply = reply_between(before, after, turn.text, tools=changed_tools)
            if (arguments := request_arguments(request)) != self._arguments:
                self._arguments = arguments
                reply = replace(reply, chat_template_kwargs=arguments)
        edited = reply.resume is not None or reply.rewrite is not None
        mask = mask_turn(decision.returned, sampled, logprobs, turn=self.turns, edited=edited)
        if mask.not_sampled:
            infos["not_sampled"] = mask.not_sampled
        if isinstance(answer := before[-1]["content"], str) and answer != turn.text:
            infos[FULL_ANSWER] = answer
        return replace(
            reply,
            info=infos,
            reward=self._reward(infos),
            masked={turn.index: mask.positions} if mask.positions else {},
            train_on=[turn.index] if mask.has_mask else [],
            sampling=None if decision.config is None else sampling_change(decision.config),
        )

    async def close(self) -> None:
        if self._request is not None:
            await call_hook(self.scheduler.on_trajectory_end, self._request, lock=self.lock)

    def _reward(self, infos: Mapping[str, Any]) -> float:
        if self.gym_weight is None or "total_reward" not in infos:
            return 0.0
        increase = float(infos["total_reward"]) - self.total_reward
        self.total_reward += increase
        return increase * self.gym_weight


def _logprobs(turn: Turn) -> list[float]:
    return list(turn.completion.logprobs) if turn.completion is not None else []
