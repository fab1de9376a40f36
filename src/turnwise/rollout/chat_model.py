"""An engine that answers chat messages, such as the model behind a simulated user."""

from __future__ import annotations

import itertools
from dataclasses import replace

from turnwise.chat.renderer import Renderer
from turnwise.engines.engine import TokenSampler
from turnwise.types import Message, Request, Sampling

__all__ = ["EngineChatModel"]


class EngineChatModel:
    """Answers a list of messages with one sampled turn, without its reasoning.

    Each answer is a separate request with the complete conversation, and is not trained on. With the same `seed` the answers are
    the same, as long as they are requested in the same order. Two chat models on one engine need different names.
    """

    def __init__(
        self,
        engine: TokenSampler,
        renderer: Renderer,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        name: str = "user",
    ) -> None:
        self._engine = engine
        self._name = name
        self._renderer = renderer
        sampling = sampling or Sampling()
        self._sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *renderer.stop_token_ids))
        self._numbers = itertools.count(seed)

    async def __call__(self, messages: list[Message]) -> str:
        """The answer's text. Raises EngineError, or TemplateError if the template refuses the messages."""
        number = next(self._numbers)
        prompt = self._renderer.encode_opening(messages, ())
        request = Request(
            conversation=f"{self._name}/{number}",
            token_ids=prompt.token_ids,
            media=prompt.media,
            sampling=self._sampling,
            seed=number,
        )
        try:
            completion = await self._engine.generate(request)
        finally:
            self._engine.release(request.conversation)
        parsed = self._renderer.turn_parser.parse(
            completion.token_ids, tools=(), first_call=0, reasoning_opening=prompt.reasoning_opening
        )
        return str(parsed.message.get("content") or "").strip()
