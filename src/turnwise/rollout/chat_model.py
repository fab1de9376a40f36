"""An engine as somebody who answers messages: the voice of a modelled user."""

from __future__ import annotations

import itertools
from dataclasses import replace

from turnwise.chat.renderer import Renderer
from turnwise.engines.engine import Engine
from turnwise.types import Message, Request, Sampling

__all__ = ["EngineChatModel"]


class EngineChatModel:
    """Answers messages with what an engine samples, its thoughts left out.

    Each answer is a request of its own, rendered whole: nothing of it is learnt from. `seed` makes the draws repeatable as long
    as answers are asked for in the same order.
    """

    def __init__(self, engine: Engine, renderer: Renderer, sampling: Sampling | None = None, *, seed: int = 0) -> None:
        self._engine = engine
        self._renderer = renderer
        sampling = sampling or Sampling()
        self._sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *renderer.stop_token_ids))
        self._numbers = itertools.count(seed)

    async def __call__(self, messages: list[Message]) -> str:
        """What the engine answers. Raises EngineError, or TemplateError where the template refuses the messages."""
        number = next(self._numbers)
        piece = self._renderer.encode_opening(messages, ())
        request = Request(
            conversation=f"user/{number}",
            token_ids=piece.token_ids,
            media=piece.media,
            sampling=self._sampling,
            seed=number,
        )
        try:
            completion = await self._engine.generate(request)
        finally:
            self._engine.release(request.conversation)
        said = self._renderer.turn_parser.parse(
            completion.token_ids, tools=(), first_call=0, thought_opening=piece.open_thought
        )
        return str(said.message.get("content") or "").strip()
