"""Assembles a fine-tuning run from a recipe: all objects that the loop of `fine_tune` uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise import build
from turnwise.chat.renderer import Renderer
from turnwise.config.optimization import steps_of_epochs
from turnwise.config.schema import Config, EnvironmentUse
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.errors import ConfigError, Failed, RolloutError, boundary
from turnwise.runs.assembly import read_inputs
from turnwise.runs.run_state import RunState
from turnwise.training.batch import Batch
from turnwise.types import Row, ToolSchema, Trajectory

__all__ = ["SftRun", "assemble", "recipe_tools"]


@dataclass(slots=True, kw_only=True)
class SftRun(RunState):
    """A fine-tuning run, ready to continue after `step` steps."""

    tools: Sequence[ToolSchema]
    """The recipe's tools, for rows without a column of tools."""
    max_tokens: int | None
    """Maximum number of tokens of a conversation; None: no limit."""
    recorded: int
    """The number of conversations in trajectories.jsonl."""
    without_targets: int = 0
    """The number of rows since the last trained row, counted per step: a step with a trained row sets it to 0."""
    evaluation: tuple[Batch, Sequence[Trajectory]] | None = None
    """The held-out conversations as a packed batch, and their trajectories. Built once: they are the same in each evaluation."""

    def data_position(self) -> dict[str, Any]:
        return {**RunState.data_position(self), "recorded": self.recorded}


def assemble(config: Config) -> SftRun:
    """Check a recipe, load the model and the data, and build the run. A run in `output` is resumed if the recipe says so.

    Raises TurnwiseError before the first training step.
    """
    refuse_sft_without_effect(config)
    weigh_turns = build.turn_weighting(config)
    inputs = read_inputs(config, "sft", lambda config, held_out: build.conversations(config, held_out=held_out))
    opened, options = inputs.opened, config.sft
    learner = build.sft_learner(config, opened.source)
    opened.compare_model(learner)
    limits = build.limits(config, longest=learner.context_length)
    tools = asyncio.run(recipe_tools(config, inputs.renderer))
    if tools and all("tools" in row.fields for row in [*inputs.rows, *inputs.held_out]):
        raise ConfigError(
            "tools and mcp are for rows without a column `tools`, and all rows have this column: remove them from the recipe, "
            "or the column from the data"
        )
    opened.begin(learner)
    return SftRun(
        inputs=inputs,
        learner=learner,
        options=options,
        steps=options.steps or steps_of_epochs(options.epochs, len(inputs.rows), options.batch_size),
        weigh_turns=weigh_turns,
        loggers=build.loggers(config, step=opened.step),
        normalization=build.normalization(config.sft),
        tools=tools,
        max_tokens=limits.context,
        recorded=opened.number("recorded"),
    )


async def recipe_tools(config: Config, renderer: Renderer) -> Sequence[ToolSchema]:
    """The schemas of the recipe's tools, as in training on the same recipe, for rows without a column of tools."""
    if not config.tools and config.mcp.servers is None:
        return ()
    with_tools_only = config.model_copy(
        update={"environment": EnvironmentUse(use="turnwise.environments.environment:SingleTurn")}
    )
    async with contextlib.aclosing(build.environment_factory(with_tools_only, encode=renderer.encode)) as environments:
        environment = environments()
        try:
            with boundary("environment"):
                question = Row(id="tools", messages=[{"role": "user", "content": "What can you do?"}])
                return tuple((await environment.begin(question)).tools)
        except Failed as failed:
            raise RolloutError(f"the recipe's tools cannot be created: {failed.failure.message}") from failed
        finally:
            await environment.close()
