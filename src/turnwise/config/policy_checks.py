"""Refuses, at start-up, policies that a command cannot use, or that contradict other sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError
from turnwise.options.schema import Config

__all__ = ["refuse_changing", "refuse_unknown_reference", "refuse_unusable_policies", "trained_policy_problems"]


def refuse_unusable_policies(config: Config) -> None:
    """Raise ConfigError for a frozen policy that the conversations of the recipe cannot use."""
    elsewhere = config.runs_conversations_elsewhere or ("cluster.trainers" if config.cluster.distributed else None)
    for policy in config.policies:
        problems = (
            (
                policy.endpoint is not None and config.deterministic,
                f"the policy {policy.name!r} is on a server, which does not guarantee equal results: remove deterministic=true, "
                f"or give the policy a path",
            ),
            (
                policy.endpoint is not None and _of_base(config, "top_k", policy.top_k) > 0,
                f"sampling.top_k={config.sampling.top_k} also holds for the policy {policy.name!r} on a server, and is not in "
                f"the OpenAI protocol: set its top_k=0",
            ),
            (
                policy.endpoint is not None and _of_base(config, "min_p", policy.min_p) > 0,
                f"sampling.min_p={config.sampling.min_p:g} also holds for the policy {policy.name!r} on a server, and is not in "
                f"the OpenAI protocol: set its min_p=0",
            ),
            (
                _server_is_free(config.sampling.response_format is not None, policy.endpoint, "response_format"),
                f"sampling.response_format also holds for the policy {policy.name!r}, and turnwise samples no grammar on a "
                f"server: write its own into endpoint.request.response_format, or null there for free text",
            ),
            (
                _server_is_free(config.tool_calls.choice == "required", policy.endpoint, "tool_choice"),
                f"tool_calls.choice=required also holds for the policy {policy.name!r}, and turnwise samples no grammar on a "
                f"server: write endpoint.request.tool_choice=required, or null there for free turns",
            ),
            (
                policy.reference and elsewhere is not None,
                f"the policy {policy.name!r} is the reference model, which samples in the process that trains, and the recipe "
                f"has {elsewhere}: give the policy a path",
            ),
        )
        for holds, message in problems:
            if holds:
                raise ConfigError(message)


def _server_is_free(asked: bool, endpoint: Mapping[str, Any] | None, field: str) -> bool:
    """Whether a form is asked for that a policy on a server would ignore, because its request has no such field of its own."""
    request = None if endpoint is None else endpoint.get("request")
    return asked and endpoint is not None and not (isinstance(request, Mapping) and field in request)


def trained_policy_problems(config: Config) -> list[tuple[bool, str]]:
    """Problems of policies that are trained, in a training run: whether the recipe has the problem, and the error message."""
    trained, elsewhere = config.trained_policies, config.runs_conversations_elsewhere
    if not trained:
        return []
    which = f"the policy {trained[0].name!r} is trained"
    without = [policy.name for policy in trained if config.of_policy(policy).model.lora.rank is None]
    served = [policy.name for policy in config.served_policies]
    return [
        (
            bool(without),
            f"the policy {''.join(without[:1])!r} is trained, as an adapter, and neither its lora nor model.lora has a rank: set "
            f"its lora (16 is common), or model.lora.rank for both",
        ),
        (
            bool(config.model.lora.rank is None and served),
            f"the policy {''.join(served[:1])!r} is trained as an adapter on weights that the run changes, too (there is no "
            f"model.lora), and engine.name={config.engine.name} has adapters on constant weights only: give the policy an "
            f"embedded engine of its own (memory_gb: 2), or set model.lora.rank",
        ),
        (
            elsewhere is not None,
            f"{which}, and the recipe has {elsewhere or ''}, by which conversations run in processes that receive the weights of "
            f"one policy: remove it, or give the policy a path, which is never trained",
        ),
        (
            config.cluster.distributed,
            f"{which}, and the recipe has several ranks (cluster.launcher={config.cluster.launcher}), which divide the weights "
            f"of one policy: train in one process",
        ),
        (
            config.teacher.on,
            f"{which}, and the recipe has a teacher, which scores the turns of one policy only: remove the section teacher, or "
            f"train=true",
        ),
        (
            config.reward.kl.coef > 0,
            f"{which}, and reward.kl.coef={config.reward.kl.coef:g} is the divergence of one policy only: set loss.kl_coef, "
            f"which each policy has of its own, or remove it",
        ),
    ]


def refuse_changing(config: Config) -> None:
    """Raise ConfigError for a policy whose weights a trainer in another process changes: that is the reference model, or is
    trained."""
    for policy in config.trained_policies:
        raise ConfigError(
            f"the policy {policy.name!r} is trained, and a trainer in another process sends the weights of one policy: remove "
            f"train=true, or train in the process that samples"
        )
    for policy in config.policies:
        if policy.reference:
            raise ConfigError(
                f"the policy {policy.name!r} has reference=true, and this process has no reference model: a trainer in another "
                f"process keeps it, and changes the weights of the model here. Give the policy a path "
                f"(policies={{{policy.name}: {config.reference.path or config.model.path}}}), which is loaded and never changed"
            )


def refuse_unknown_reference(config: Config) -> None:
    """Raise ConfigError for a policy that is the reference model, without training and without `reference.path`."""
    for policy in config.policies:
        if policy.reference and config.reference.path is None:
            raise ConfigError(
                f"the policy {policy.name!r} has reference=true, and without training there is no model before training: "
                f"model.path={config.model.path} may be a trained one. Give the policy a path (policies={{{policy.name}: DIR}}), "
                f"or set reference.path"
            )


def _of_base(config: Config, name: str, own: float | None) -> float:
    return getattr(config.sampling, name) if own is None else own
