"""Which options of a recipe do nothing in `turnwise sft`: they are refused, as training refuses its own."""

from __future__ import annotations

from turnwise.config.optimization import Sft
from turnwise.config.part import Part, changed_options
from turnwise.config.schema import Config, Data, LocalEngine
from turnwise.config.train_checks import file_problems
from turnwise.errors import ConfigError

__all__ = ["refuse_sft_without_effect"]


def refuse_sft_without_effect(config: Config) -> None:
    """Refuse options of a fine-tuning run that would do nothing, or that contradict each other.

    Raises ConfigError.
    """
    sft, data = config.sft, config.data
    of_sft = changed_options(sft)
    evaluation = next((name for name in ("eval_every", "max_eval_rows") if name in of_sft), None)
    problems = [
        (
            sft.steps is not None and "epochs" in of_sft,
            f"sft.epochs={sft.epochs:g} has no effect beside sft.steps={sft.steps}: remove one of them",
        ),
        (
            sft.steps is not None and sft.warmup_steps >= sft.steps,
            f"sft.warmup_steps={sft.warmup_steps} leaves none of sft.steps={sft.steps} at the full rate",
        ),
        (
            sft.warmup_steps == 1 and sft.lr_schedule == "constant",
            "sft.warmup_steps=1 has no effect: the first step of a warm-up of n has the rate lr/n, which is lr; remove it",
        ),
        (
            data.eval is None and evaluation is not None,
            f"sft.{evaluation} has no effect without held-out rows: set data.eval",
        ),
        (
            data.eval is None and data.eval_split != Data.model_fields["eval_split"].default,
            "data.eval_split has no effect without data.eval",
        ),
        (
            data.max_prompt_tokens is not None,
            "data.max_prompt_tokens has no effect in fine-tuning: sft.too_long says what becomes of long conversations",
        ),
        (
            config.environment != Config.model_fields["environment"].default,
            f"environment={config.environment.use} has no effect in fine-tuning (the data says what comes after the model's "
            f"turn); remove it",
        ),
        (
            config.engine != LocalEngine(),
            f"engine.{next(iter(_engine(config)), 'name')} has no effect in fine-tuning (nothing is sampled); remove it",
        ),
        (
            config.resume == "auto" and config.replace,
            "resume=auto goes on with the former run and replace=true moves it away: choose one",
        ),
        (
            config.deterministic and config.model.device not in ("auto", "cpu"),
            f"deterministic=true is for the CPU; model.device={config.model.device} is not one: use model.device=cpu",
        ),
    ]
    for holds, message in [*problems, *_other_sections(config), *_tool_problems(config), *file_problems(data)]:
        if holds:
            raise ConfigError(message)


def _engine(config: Config) -> list[str]:
    return sorted(changed_options(config.engine)) if config.engine.name == "local" else []


def _other_sections(config: Config) -> list[tuple[bool, str]]:
    found: list[tuple[bool, str]] = []
    sections: dict[str, tuple[Part, str]] = {
        "train": (config.train, "it is an option of `turnwise train`"),
        "eval": (config.eval, "it is an option of `turnwise train`"),
        "rollout": (config.rollout, "it is an option of `turnwise rollout`"),
        "sampling": (config.sampling, "nothing is sampled"),
        "reward": (config.reward, "nothing is rewarded"),
        "credit": (config.credit, "nothing is rewarded"),
        "tool_calls": (config.tool_calls, "no tool is run: the data holds what it answered"),
    }
    for section, (part, why) in sections.items():
        for name in sorted(changed_options(part)):
            ours = {"max_rows": "max_eval_rows", "every": "eval_every"}.get(name, "") if section == "eval" else name
            instead = f"use sft.{ours}" if section in ("train", "eval") and ours in Sft.model_fields else "remove it"
            found.append((True, f"{section}.{name} has no effect in fine-tuning ({why}); {instead}"))
    for name in sorted(set(changed_options(config.limits)) - {"context"}):
        text = "(the data says how long a conversation is; of the limits only limits.context counts); remove it"
        found.append((True, f"limits.{name} has no effect in fine-tuning {text}"))
    return found


def _tool_problems(config: Config) -> list[tuple[bool, str]]:
    """Of the recipe's tools it is only said what they are: how they are run is of no interest."""
    why = "has no effect in fine-tuning (no tool is run); remove it"
    names = ("timeout", "retries", "retry_timeouts")
    found = [
        (getattr(tool, name) is not None, f"tools.{place}.{name} {why}")
        for place, tool in enumerate(config.tools)
        for name in names
    ]
    return found + [(name in changed_options(config.mcp), f"mcp.{name} {why}") for name in names]
