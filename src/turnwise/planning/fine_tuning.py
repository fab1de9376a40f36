"""What a recipe for `turnwise sft` needs: the numbers of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.config.optimization import steps_of_epochs
from turnwise.config.schema import Config
from turnwise.errors import ConfigError
from turnwise.planning.placement import PlanLine

__all__ = ["ConversationTokens", "fine_tuning_lines", "refuse_idle_ranks"]


@dataclass(frozen=True, slots=True)
class ConversationTokens:
    """The length of a given conversation."""

    tokens: int
    """Tokens of its longest sequence, before `limits.context` is applied."""
    trained: int
    """Tokens with a weight in the loss."""


def fine_tuning_lines(
    config: Config, *, rows: int, counted: Sequence[ConversationTokens], context: int | None, ranks: int = 1
) -> list[PlanLine]:
    """The numbers of a step of fine-tuning on `rows` conversations, of which some were `counted`. `context` is the most tokens of
    a conversation."""
    sft = config.sft
    steps = sft.steps or steps_of_epochs(sft.epochs, rows, sft.batch_size)
    lines = [
        PlanLine("conversations of a step", f"sft.batch_size={sft.batch_size}, one optimizer step"),
        PlanLine(
            "steps", f"{steps}: {rows:,} conversations, each used {steps * sft.batch_size / max(1, rows):.3g} times"
        ),
    ]
    if ranks > 1:
        lines.append(
            PlanLine(
                "conversations of a rank",
                f"{sft.batch_size / ranks:.3g} for each step, on average: micro-batches are shared out by their tokens",
            )
        )
    if counted:
        lines += _length_lines(config, counted, rows, context)
    return lines


def _length_lines(
    config: Config, counted: Sequence[ConversationTokens], rows: int, context: int | None
) -> list[PlanLine]:
    fitting = [one for one in counted if context is None or one.tokens <= context]
    kept = counted if config.sft.too_long == "cut" else fitting
    used = [min(one.tokens, context or one.tokens) for one in kept]
    if not used:
        return [PlanLine("tokens", f"all {len(counted):,} counted conversations have more than {context:,} tokens")]
    which = "" if len(counted) == rows else f" (of {len(counted):,} counted conversations)"
    trained = sum(one.trained for one in kept) / len(kept)
    lines = [
        PlanLine("tokens of a conversation", f"{statistics.mean(used):,.0f} on average, at most {max(used):,}{which}"),
        PlanLine("trained tokens of a conversation", f"{trained:,.0f} on average"),
        PlanLine("tokens of a step", f"{config.sft.batch_size * statistics.mean(used):,.0f} on average"),
    ]
    if len(fitting) < len(counted):
        what = "cut to it" if config.sft.too_long == "cut" else "left out (sft.too_long)"
        lines.append(
            PlanLine("too long", f"{len(counted) - len(fitting):,} have more than {context:,} tokens, and are {what}")
        )
    return lines


def refuse_idle_ranks(config: Config, ranks: int) -> None:
    """Raise ConfigError if some ranks would have no conversation."""
    size = config.sft.batch_size
    if size < ranks:
        raise ConfigError(
            f"{ranks} ranks and {size} conversations for each optimizer step (sft.batch_size={size}): at least {ranks - size} "
            f"ranks would compute nothing. Use at most {size} ranks, or larger batches"
        )
