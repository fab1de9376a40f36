"""Builds the client of a rollout server, and refuses what cannot be combined with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config
from turnwise.data.images import media_kind, media_value
from turnwise.errors import ConfigError
from turnwise.rewards.scorer import Scorer
from turnwise.rollout_server.client import RolloutClient, ServerOptions, trainer_name
from turnwise.rollout_server.recipe import base_weights, served_options
from turnwise.training import fingerprint
from turnwise.types import Row

__all__ = ["refuse_what_needs_conversations_here", "rollout_client"]


def rollout_client(config: Config, url: str, renderer: Renderer) -> RolloutClient:
    """The client of the server at `url`, after the server's recipe was compared with this recipe.

    Raises ConfigError if the server does not answer, refuses the token, or has another recipe or tokenizer.
    """
    options = config.rollout_server
    folder = options.weights_directory
    client = RolloutClient(
        ServerOptions(
            url=url,
            token=os.environ.get(options.token_env) or None,
            token_env=options.token_env,
            timeout=options.timeout,
            weights_directory=None if folder is None else Path(folder),
            trainer=trainer_name(config.output),
            tokenizer=fingerprint.of_tokenizer(renderer.tokenizer),
            recipe=served_options(config),
            base=base_weights(config),
            vision=renderer.vision,
        )
    )
    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        thread.submit(lambda: asyncio.run(client.check())).result()
    return client


def refuse_what_needs_conversations_here(scorer: Scorer, rows: Iterable[Row], option: str) -> None:
    """Refuse reward functions and rows that need the conversations in this process. `option` is the option by which they run in
    other processes. Raises ConfigError."""
    place = "on the rollout server" if option == "rollout_server.url" else "in a rollout worker"
    for function in scorer.functions:
        if function.plan.needs_environment:
            raise ConfigError(
                f"the reward function {function.name} reads the environment's object, which is {place}: give the "
                f"reward in the environment, or remove {option}"
            )
    for row in rows:
        contents = [message.get("content") for message in row.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        media = [part for part in parts if isinstance(part, dict) and media_kind(part) is not None]
        if any(media_kind(part) == "video" and not isinstance(media_value(part), list | tuple) for part in media):
            raise ConfigError(
                f"row {row.id} contains a video file, and only frames can be sent to environments {place}: give a list of "
                f"frames, or remove {option}"
            )
        if "multi_modal_inputs" in row.fields:
            raise ConfigError(
                f"data.return_multi_modal_inputs=true has no effect with {option}: environments {place} receive no tensors. "
                f"Remove it, or remove {option}"
            )
