"""The requests of one agent, between the HTTP server and the environment.

The server's thread puts requests in, and waits for their answers. The environment takes them out one after the other. All
methods run in the event loop of the environment.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from turnwise.environments.agents.chat_request import AgentAnswer, ChatRequest, Refused, template_messages
from turnwise.types import Message

__all__ = ["AgentConversation", "AgentRequest"]

_MOST_WAITING = 64  # requests that wait for those in front of them


@dataclass(eq=False, slots=True)
class AgentRequest:
    """A request that waits for its answer."""

    request: ChatRequest
    messages: Sequence[Message]
    """The complete conversation in the form that chat templates take."""
    answer: asyncio.Future[AgentAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def abandoned(self) -> bool:
        """Whether the client has closed its connection."""
        return self.answer.cancelled()


class AgentConversation:
    """The requests, the rewards and the key of one conversation."""

    def __init__(self, row: str) -> None:
        self.key = f"tw-{secrets.token_urlsafe(24)}"
        """The API key of the agent. It identifies the conversation."""
        self.row = row
        """The row as JSON."""
        self.loop = asyncio.get_running_loop()
        self._waiting: collections.deque[AgentRequest] = collections.deque()
        self._current: AgentRequest | None = None
        """The request that the model is answering."""
        self._arrived = asyncio.Event()
        self._end: str | None = None
        """Why there are no further answers; None while the conversation goes on."""
        self._stored: dict[str, Sequence[Message]] = {}
        """The conversation after each answer, by the id of the answer, without the instructions (Responses API)."""
        self._reported = 0.0
        """Rewards that the agent has reported and that no turn has received yet."""

    async def ask(self, request: ChatRequest) -> AgentAnswer:
        """Wait for the answer to a request. If the caller is cancelled, the request is abandoned. Raises Refused."""
        self._refuse_after_end()
        if request.previous_response is not None:
            if request.previous_response not in self._stored:
                raise Refused(
                    404, f"there is no response {request.previous_response!r:.80}", parameter="previous_response_id"
                )
            earlier = self._stored[request.previous_response]
            request = replace(request, messages=[*earlier, *request.messages])
        if request.messages[-1]["role"] == "assistant":
            raise Refused(
                400, "the last message is the model's: an answer cannot be begun for the model, so remove that message"
            )
        if len(self._waiting) >= _MOST_WAITING:
            raise Refused(429, f"{_MOST_WAITING} requests of this conversation are waiting already")
        pending = AgentRequest(request, template_messages(request.conversation))
        self._waiting.append(pending)
        self._arrived.set()
        return await pending.answer

    async def next_request(self) -> AgentRequest:
        """Wait for the next request. Requests that were abandoned while they waited are left out."""
        while True:
            while self._waiting:
                pending = self._waiting.popleft()
                if not pending.abandoned:
                    self._current = pending
                    return pending
            self._arrived.clear()
            await self._arrived.wait()

    def answer(self, pending: AgentRequest, answer: AgentAnswer) -> None:
        """Answer a request."""
        self._current = None
        self._stored[answer.id] = [*pending.request.messages, answer.message]
        pending.answer.set_result(answer)

    async def report_reward(self, reward: object) -> None:
        """Take a reward from the agent, also after the last answer. Raises Refused if it is not a finite number."""
        value = math.nan
        if isinstance(reward, int | float) and not isinstance(reward, bool):
            with contextlib.suppress(OverflowError):  # an integer of more than 308 digits
                value = float(reward)
        if not math.isfinite(self._reported + value):
            raise Refused(
                400,
                f"`reward` must be a finite number, also together with the rewards before it; it is {reward!r:.80}",
                parameter="reward",
            )
        self._reported += value

    def take_reward(self) -> float:
        """The rewards that the agent has reported since the last call."""
        reward, self._reported = self._reported, 0.0
        return reward

    def refuse(self, pending: AgentRequest, refused: Refused) -> None:
        """Answer a request with an error. The agent may send another one."""
        self._current = None
        if not pending.answer.done():
            pending.answer.set_exception(refused)
            pending.answer.exception()  # the client may be gone: the exception counts as seen

    def end(self, reason: str) -> None:
        """Answer no further requests. Requests that are waiting are refused with this reason."""
        self._end = self._end or reason
        waiting = [*self._waiting, *([self._current] if self._current is not None else [])]
        self._waiting.clear()
        self._current = None
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_exception(Refused(410, self._end))
                pending.answer.exception()  # the client may be gone: the exception counts as seen

    def _refuse_after_end(self) -> None:
        if self._end is not None:
            raise Refused(410, self._end)
