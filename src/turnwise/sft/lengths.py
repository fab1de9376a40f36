"""The lengths of a recipe's conversations in tokens, for `turnwise plan`. Loads the tokenizer, and no weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnwise import build
from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config
from turnwise.planning.fine_tuning import ConversationTokens
from turnwise.sft.replay import replay, weigh
from turnwise.sft.run import recipe_tools
from turnwise.types import Row, Trajectory

__all__ = ["conversation_tokens"]


def conversation_tokens(config: Config, rows: Sequence[Row]) -> list[ConversationTokens]:
    """The tokens of each conversation, as `turnwise sft` would write and weigh them. A conversation that the chat template cannot
    write is left out. Raises TurnwiseError if there is no tokenizer."""
    renderer = build.renderer(config, config.model.path)
    weigh_turns = build.turn_weighting(config)
    replayed = asyncio.run(_replay(config, rows, renderer))
    return [
        _tokens(trajectory, weigh(trajectory, weigh_turns, cut=True))
        for trajectory in replayed
        if not trajectory.failed
    ]


async def _replay(config: Config, rows: Sequence[Row], renderer: Renderer) -> list[Trajectory]:
    tools = await recipe_tools(config, renderer)
    return await replay(rows, renderer, thinking=config.thinking, tools=tools, concurrent=config.max_concurrent)


def _tokens(trajectory: Trajectory, counts: bool) -> ConversationTokens:
    trained = (
        len(turn.completion.token_ids) for turn in trajectory.turns if turn.completion is not None and turn.weight > 0
    )
    longest = max(len(segment.token_ids) for segment in trajectory.segments)
    return ConversationTokens(longest, sum(trained) if counts else 0)
