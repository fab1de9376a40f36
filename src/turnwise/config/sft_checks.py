"""Refuses, at start-up, options of a recipe that have no effect in `turnwise sft` or that contradict each other."""

from __future__ import annotations

from turnwise.config.engine_checks import cluster_problems
from turnwise.config.train_checks import (
    Problem,
    best_problem,
    deterministic_device_problem,
    eval_split_problem,
    file_problems,
    run_problems,
    weight_problems,
)
from turnwise.errors import ConfigError
from turnwise.options.algorithm import SftSection
from turnwise.options.engines import LocalEngineSection
from turnwise.options.schema import Config
from turnwise.options.section import Section, changed_options

__all__ = ["refuse_sft_without_effect"]


def refuse_sft_without_effect(config: Config) -> None:
    """Refuse options of a fine-tuning run that have no effect or that contradict each other. The first problem is raised.

    Raises ConfigError.
    """
    problems = [
        *_sft_problems(config),
        *_unused_problems(config),
        *run_problems(config),
        *cluster_problems(config, config.sft),
        (
            config.cluster.launcher == "ray" and not config.cluster.distributed,
            "cluster.launcher=ray has no effect in fine-tuning, where no conversations run: remove it, or set "
            "cluster.trainers, the number of training ranks on the Ray cluster",
        ),
        (
            bool(changed_options(config.cluster.workers)),
            f"cluster.workers.{next(iter(changed_options(config.cluster.workers)), '')} has no effect in fine-tuning, where no "
            f"conversations run: remove it",
        ),
        deterministic_device_problem(config),
        *_other_sections(config),
        *_tool_problems(config),
        *file_problems(config.data),
        *weight_problems(config.data),
    ]
    for holds, message in problems:
        if holds:
            raise ConfigError(message)


def _sft_problems(config: Config) -> list[Problem]:
    """Problems of the section sft and of held-out rows."""
    sft, data = config.sft, config.data
    of_sft = changed_options(sft)
    evaluation = next((name for name in ("eval_every", "max_eval_rows") if name in of_sft), None)
    return [
        (
            sft.optimizer.offload == "sampling",
            "sft.optimizer.offload=sampling has no effect, because fine-tuning samples nothing: set cpu, or remove it",
        ),
        (
            sft.steps is not None and "epochs" in of_sft,
            f"sft.epochs={sft.epochs:g} has no effect beside sft.steps={sft.steps}: remove one of them",
        ),
        (
            sft.warmup_steps == 1 and sft.lr_schedule == "constant",
            "sft.warmup_steps=1 has no effect: the first of n warm-up steps has the learning rate lr/n, and lr/1 is lr. "
            "Remove it",
        ),
        (
            data.eval is None and evaluation is not None,
            f"sft.{evaluation} has no effect without held-out rows: set data.eval, or remove it",
        ),
        eval_split_problem(data),
        best_problem(config),
        (
            data.weights is not None and sft.steps is None,
            "data.weights needs sft.steps: the data sets are repeated at their own rates, so sft.epochs does not say how many "
            "steps there are",
        ),
    ]


def _unused_problems(config: Config) -> list[Problem]:
    """Options of the data, the environment and the engine that fine-tuning does not use."""
    engine = sorted(changed_options(config.engine)) if config.engine.embedded is not None else []
    return [
        (
            config.data.max_prompt_tokens is not None,
            "data.max_prompt_tokens has no effect in fine-tuning: remove it. sft.too_long sets how conversations that "
            "are too long are treated",
        ),
        (
            config.environment != Config.model_fields["environment"].default,
            f"environment={config.environment.use} has no effect in fine-tuning (the data contains the messages after each "
            f"turn of the model); remove it",
        ),
        (
            config.model.router_replay,
            "model.router_replay=true has no effect in fine-tuning (nothing is sampled); remove it",
        ),
        (
            config.loss.name != "ppo_clip",
            f"loss.name={config.loss.name} has no effect in fine-tuning (its loss is the negative log-likelihood); remove it",
        ),
        (
            bool(config.policies),
            "policies have no effect in fine-tuning (nothing is sampled); remove them",
        ),
        (
            config.engine != LocalEngineSection(),
            f"engine.{next(iter(engine), 'name')} has no effect in fine-tuning (nothing is sampled); remove it",
        ),
    ]


def _other_sections(config: Config) -> list[Problem]:
    """All changed options of sections that fine-tuning does not read, with the option of sft to use instead."""
    problems: list[Problem] = []
    sections: dict[str, tuple[Section, str]] = {
        "train": (config.train, "it is an option of `turnwise train`"),
        "eval": (config.eval, "it is an option of `turnwise train`"),
        "rollout": (config.rollout, "it is an option of `turnwise rollout`"),
        "sampling": (config.sampling, "nothing is sampled"),
        "rollout_server": (config.rollout_server, "nothing is sampled"),
        "reward": (config.reward, "fine-tuning has no rewards"),
        "credit": (config.credit, "fine-tuning has no rewards"),
        "critic": (config.critic, "fine-tuning has no rewards"),
        "teacher": (config.teacher, "it learns from the data, and teachers score sampled turns"),
        "reference": (config.reference, "its loss has no KL divergence"),
        "data.curriculum": (config.data.curriculum, "fine-tuning has no rewards"),
        "health": (config.health, "it is an option of `turnwise train`"),
        "correction": (config.correction, "nothing is sampled"),
        "loss": (config.loss, "its loss is the negative log-likelihood"),
        "tool_calls": (config.tool_calls, "no tool is run: the data contains the tool responses"),
    }
    for section, (options, reason) in sections.items():
        for name in sorted(changed_options(options)):
            of_sft = {"max_rows": "max_eval_rows", "every": "eval_every"}.get(name, "") if section == "eval" else name
            fix = (
                f"use sft.{of_sft}"
                if section in ("train", "eval") and of_sft in SftSection.model_fields
                else "remove it"
            )
            problems.append((True, f"{section}.{name} has no effect in fine-tuning ({reason}); {fix}"))
    for name in sorted(set(changed_options(config.record)) - {"compression"}):
        fix = "use sft.max_recorded_rows" if name == "every" else "remove it"
        problems.append(
            (True, f"record.{name} has no effect in fine-tuning (it is an option of `turnwise train`); {fix}")
        )
    for name in sorted(set(changed_options(config.limits)) - {"context"}):
        reason = "(the data sets the length of a conversation, and only limits.context is used)"
        problems.append((True, f"limits.{name} has no effect in fine-tuning {reason}; remove it"))
    return problems


def _tool_problems(config: Config) -> list[Problem]:
    """Options of how tools are run. Fine-tuning uses the schemas of the tools and runs no tool."""
    message = "has no effect in fine-tuning (no tool is run); remove it"
    names = ("timeout", "retries", "retry_timeouts")
    problems = [
        (getattr(tool, name) is not None, f"tools.{place}.{name} {message}")
        for place, tool in enumerate(config.tools)
        for name in names
    ]
    return problems + [(name in changed_options(config.mcp), f"mcp.{name} {message}") for name in names]
