"""What runs without training share: rows, rewards, environments, and the engine or the endpoint that the conversations use.

`turnwise rollout` and `turnwise eval` are such runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from turnwise import build
from turnwise.chat.media_parts import has_media
from turnwise.chat.renderer import Renderer
from turnwise.chat.row_media import process_row_media
from turnwise.config.schema import Config, OpenAIEngineSection, ServerEngineSection
from turnwise.doctor.preflight import preflight, preflight_rows, unread_columns
from turnwise.engines.engine import closing
from turnwise.errors import ConfigError
from turnwise.models.model_config import context_length
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import ConversationContext
from turnwise.types import Row, Sampling

__all__ = ["SamplingRun", "conversation_context", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRun:
    """What the conversations of a run without training use, before a model is loaded."""

    config: Config
    renderer: Renderer | None
    """None with an endpoint, which gets messages."""
    scorer: Scorer
    sampling: Sampling
    notes: Sequence[str]
    """Notes for the person who starts the run."""

    def keep_rows(self, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
        """The rows whose prompts are not too long (`data.max_prompt_tokens`), and notes: on the others, and on the chat template
        under the rows' own arguments, and on columns that nothing reads. Raises DataError."""
        unread = unread_columns(self.config, rows)
        if self.renderer is None:
            return list(rows), unread
        notes = unread + preflight_rows(self.config, self.renderer, rows)
        kept, dropped = build.drop_long_prompts(self.config, rows, self.renderer)
        return kept, [*notes, *dropped]

    def process(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in the form that the conversations need, compared with the columns that the reward functions ask for.

        Raises ConfigError or DataError.
        """
        self.scorer.refuse_unknown_columns(rows)
        if self.renderer is not None:
            wanted = self.config.data.return_multi_modal_inputs
            return process_row_media(rows, self.renderer.vision, wanted=wanted)
        if (row := next((row for row in rows if has_media(row.messages)), None)) is not None:
            raise ConfigError(
                f"row {row.id!r} contains an image or a video, and engine.name=openai gets text only: use an engine that samples "
                f"tokens, or rows without images"
            )
        return list(rows)


def prepare(config: Config, sampling: Sampling) -> SamplingRun:
    """Read the tokenizer, build the rewards and check the recipe. Raises TurnwiseError."""
    scorer = build.scorer(config)
    if isinstance(config.engine, OpenAIEngineSection):
        build.refuse_for_endpoint(config, scorer, sampling)
        renderer, notes = None, build.endpoint_notes(config)
    else:
        renderer = build.renderer(config)
        notes = preflight(config, renderer, source=config.model.path)
    return SamplingRun(config=config, renderer=renderer, scorer=scorer, sampling=sampling, notes=notes)


@contextlib.asynccontextmanager
async def conversation_context(
    conversations: SamplingRun, *, scripts: build.Scripts | None = None
) -> AsyncIterator[ConversationContext]:
    """The context of the conversations: environments, and the loaded engine or the endpoint. All are closed at the end.

    `scripts` are the texts of the scripted engine by conversation id. Raises TurnwiseError.
    """
    config, renderer = conversations.config, conversations.renderer
    encode = None if renderer is None else renderer.encode
    async with contextlib.aclosing(build.environment_factory(config, encode=encode)) as environments:
        if isinstance(config.engine, OpenAIEngineSection):
            yield build.text_context(config, config.engine, environments, conversations.sampling)
            return
        assert renderer is not None
        model = build.engine_model(config)
        engine = build.engine(config, renderer, model, scripts=scripts)
        build.connect_engine(conversations.scorer, engine, renderer)
        if isinstance(config.engine, ServerEngineSection):
            longest = build.longest_context(config)
        else:
            longest = context_length(model.config.to_dict()) if model is not None else None
        context = build.rollout_context(
            config, renderer, engine, environments, longest=longest, sampled=conversations.sampling
        )
        async with closing(engine):
            await engine.start()
            yield context
