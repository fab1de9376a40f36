"""Builds the objects of a recipe: environment, tools, rewards, engine, rows and values. Use `from turnwise import assembly`.

Every object that a recipe names is imported and checked here, before a run begins.
"""

from turnwise.assembly.conversations import (
    Environments,
    conversation_context,
    endpoint_notes,
    environment_factory,
    evaluation_sampling,
    limits,
    refuse_for_endpoint,
    renderer,
    rollout_context,
    sampled_as,
    sampling,
    stand_ins,
    text_context,
    tool_schemas,
)
from turnwise.assembly.data import conversations, curriculum, drop_long_prompts, row_order, rows
from turnwise.assembly.engines import (
    Scripts,
    engine,
    engine_model,
    longest_context,
    read_scripts,
    scripted_engine,
)
from turnwise.assembly.learners import (
    critic,
    learner,
    model_source,
    policy_learner,
    rank_device,
    reference_model,
    sampled_model,
    sft_learner,
    teacher_sources,
)
from turnwise.assembly.policies import agent_policies, policy_renderers, policy_sources
from turnwise.assembly.rewards import connect_engine, credit, credit_note, scorer, turn_weighting
from turnwise.assembly.runners import conversation_host, refuse_what_needs_conversations_here, runner
from turnwise.assembly.teachers import refuse_unusable_teachers, teacher_step

__all__ = [
    "Environments",
    "Scripts",
    "agent_policies",
    "connect_engine",
    "conversation_context",
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
    "limits",
    "longest_context",
    "model_source",
    "policy_learner",
    "policy_renderers",
    "policy_sources",
    "rank_device",
    "read_scripts",
    "reference_model",
    "refuse_for_endpoint",
    "refuse_unusable_teachers",
    "refuse_what_needs_conversations_here",
    "renderer",
    "rollout_context",
    "row_order",
    "rows",
    "runner",
    "sampled_as",
    "sampled_model",
    "sampling",
    "scorer",
    "scripted_engine",
    "sft_learner",
    "stand_ins",
    "teacher_sources",
    "teacher_step",
    "text_context",
    "tool_schemas",
    "turn_weighting",
]
