"""Numbers about what happened: from groups of finished trajectories to one flat object a step."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from turnwise.types import NOT_SAMPLED, Group, LogprobKind, Stop, Trajectory

__all__ = ["conversation_metrics", "failures", "mean", "share", "template_mismatches"]


def conversation_metrics(groups: Sequence[Group]) -> dict[str, float | int | None]:
    """What the conversations of a step were like. Broken ones count in `failed` and `stop/*`, and in nothing else.

    `entropy` is estimated from the sampled tokens: the mean of -log p under the distribution they were drawn from.
    docs/metrics.md describes each of them; `record.metric_names` lists them.
    """
    every = [one for group in groups for one in group.trajectories]
    whole = [one for one in every if one.reward is not None and not one.failed]
    rewards = [one.reward or 0.0 for one in whole]
    outcomes = [[outcome for turn in one.turns for outcome in turn.outcomes] for one in whole]
    versions = {version for one in every for segment in one.segments for version in segment.version} - {NOT_SAMPLED}
    metrics: dict[str, float | int | None] = {
        "reward/mean": mean(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else None,
        "segments/mean": mean([len(one.segments) for one in whole]),
        "turns/mean": mean([len(one.turns) for one in whole]),
        "tool_calls/mean": mean([sum(len(turn.calls) for turn in one.turns) for one in whole]),
        "tool_errors/mean": mean([sum(outcome.error is not None for outcome in calls) for calls in outcomes]),
        "tokens/sampled": sum(one.sampled_tokens for one in every),
        "tokens/all": sum(len(segment) for one in every for segment in one.segments),
        "entropy": _entropy(whole),
        "groups/zero_std": share(_all_equal(group) for group in groups),
        "template_mismatch": share(one.template_mismatch is not None for one in every),
        "failed": share(one.failed for one in every),
    }
    metrics["version/oldest"] = min(versions, default=None)
    metrics["version/newest"] = max(versions, default=None)
    for name in sorted({name for one in whole for name in one.rewards} - {"turns"}):
        # of those that the function applies to
        values = [one.rewards[name] for one in whole if name in one.rewards]
        metrics[f"rewards/{name}/mean"] = mean(values)
        metrics[f"rewards/{name}/std"] = statistics.pstdev(values)
    for name in sorted({name for one in whole for name in one.metrics}):
        metrics[f"metrics/{name}"] = mean([one.metrics[name] for one in whole if name in one.metrics])
    for stop in Stop:
        metrics[f"stop/{stop}"] = share(one.stop is stop for one in every)
    return metrics


def template_mismatches(every: Sequence[Trajectory]) -> str | None:
    """What the sanity check has found in these conversations, told once, or None."""
    found = [one.template_mismatch for one in every if one.template_mismatch is not None]
    if not found:
        return None
    return (
        f"the tokens of {len(found)} of {len(every)} conversations differ from the chat template's rendering of the same "
        f"messages, so the model may be trained on other tokens than it receives when it is served. The first: {found[0]}. "
        f"Check the template with `turnwise doctor`; tokenization_sanity_check=ignore_strippable ignores white space, and "
        f"`disable` turns the check off"
    )


def failures(groups: Sequence[Group]) -> list[str]:
    """The errors of broken conversations, the frequent ones first: `environment (12 times): KeyError: ...`.

    The lines of the user's code on which the first of its kind was raised stand below it.
    """
    errors = Counter(
        (one.error.kind, one.error.message) for group in groups for one in group.trajectories if one.error is not None
    )
    places = {
        (one.error.kind, one.error.message): one.error.traceback
        for group in reversed(groups)
        for one in reversed(group.trajectories)
        if one.error is not None
    }
    return [
        f"{kind}{f' ({count} times)' if count > 1 else ''}: {message}\n{places[kind, message]}".rstrip()
        for (kind, message), count in errors.most_common()
    ]


def _entropy(whole: Sequence[Trajectory]) -> float | None:
    logprobs = [
        logprob
        for one in whole
        for turn in one.turns
        if turn.completion is not None and turn.completion.logprob_kind is LogprobKind.SAMPLED
        for logprob in turn.completion.logprobs
    ]
    return -statistics.fmean(logprobs) if logprobs else None


def _all_equal(group: Group) -> bool:
    rewards = {one.reward for one in group.trajectories if not one.failed}
    return len(rewards) <= 1


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None without values."""
    return statistics.fmean(values) if values else None


def share(flags: Iterable[bool]) -> float:
    """The fraction of true flags, from 0 to 1; 0 without flags."""
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
