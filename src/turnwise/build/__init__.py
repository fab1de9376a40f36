"""Builds the objects of a recipe: environment, tools, rewards, engine, rows and values. Use `from turnwise import build`.

Every object that a recipe names is imported and checked here, before a run begins.
"""

from turnwise.build.conversation_host import conversation_host
from turnwise.build.data import conversations, curriculum, drop_long_prompts, row_order, rows
from turnwise.build.endpoints import endpoint_notes, refuse_for_endpoint, text_context
from turnwise.build.engines import Scripts, engine_model, read_scripts, scripted_engine
from turnwise.build.environments import Environments, EnvironmentSource, environment_factory
from turnwise.build.estimators import credit, credit_note
from turnwise.build.learners import (
    critic,
    learner,
    learning_rate,
    loss_config,
    model_options,
    normalization,
    optimizer_config,
    sampled_model,
    sft_learner,
)
from turnwise.build.ranks import rank_options
from turnwise.build.rewards import connect_engine, scorer, turn_weighting
from turnwise.build.rollout_server import refuse_what_needs_conversations_here
from turnwise.build.rollouts import renderer, rollout_context
from turnwise.build.run_engine import engine
from turnwise.build.server_engines import longest_context, publisher
from turnwise.build.tools import tool_schemas
from turnwise.build.tracking import loggers
from turnwise.build.values import evaluation_sampling, limits, sampling

__all__ = [
    "EnvironmentSource",
    "Environments",
    "Scripts",
    "connect_engine",
    "conversation_host",
    "conversations",
    "credit",
    "credit_note",
    "critic",
    "curriculum",
    "drop_long_prompts",
    "endpoint_notes",
    "engine",
    "engine_model",
    "environment_factory",
    "evaluation_sampling",
    "learner",
    "learning_rate",
    "limits",
    "loggers",
    "longest_context",
    "loss_config",
    "model_options",
    "normalization",
    "optimizer_config",
    "publisher",
    "rank_options",
    "read_scripts",
    "refuse_for_endpoint",
    "refuse_what_needs_conversations_here",
    "renderer",
    "rollout_context",
    "row_order",
    "rows",
    "sampled_model",
    "sampling",
    "scorer",
    "scripted_engine",
    "sft_learner",
    "text_context",
    "tool_schemas",
    "turn_weighting",
]
