"""From the finished groups of a step to its numbers: one flat object a step.

The metrics describe what happened, and do not change it. Some compare conversations with each other: equal answers in a group,
and parts of the reward that disagree. Names, units and meanings are in `metric_names`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from turnwise.errors import message_pattern
from turnwise.types import NOT_SAMPLED, Failure, Group, LogprobKind, Stop, Trajectory
from turnwise.user_code.reward_number import equal_rewards

# conversations that are compared with each other


def duplicate_share(groups: Sequence[Group]) -> float | None:
    """The share of conversations whose answers equal those of another conversation of the group.

    Conversations that failed are left out, and groups with one conversation. None if there are no others.
    """
    counts = [
        Counter(tuple(trajectory.assistant_texts) for trajectory in group.trajectories if not trajectory.failed)
        for group in groups
    ]
    counts = [count for count in counts if count.total() > 1]
    total = sum(count.total() for count in counts)
    return sum(number for count in counts for number in count.values() if number > 1) / total if total else None


def lowest_correlation(trajectories: Sequence[Trajectory]) -> tuple[float, str, str] | None:
    """The lowest Pearson correlation of two parts of the reward, over the conversations that have both, with their names.

    `turns` is the part that the environment gave without a name. A part that is the same for all conversations has no
    correlation. None if no two parts have one. A correlation needs three conversations: of two, it is always 1 or -1.
    """
    parts = [reward_parts(trajectory) for trajectory in trajectories]
    names = sorted({name for of_one in parts for name in of_one})
    found = [
        (value, first, second)
        for first, second in itertools.combinations(names, 2)
        if (value := _correlation(parts, first, second)) is not None
    ]
    return min(found, default=None)


def _correlation(rewards: Sequence[dict[str, float]], first: str, second: str) -> float | None:
    pairs = [(parts[first], parts[second]) for parts in rewards if first in parts and second in parts]
    columns = list(zip(*pairs, strict=True))
    if len(pairs) < 3 or any(map(equal_rewards, columns)):
        return None
    return statistics.correlation(*columns)


# the metrics of a step


def conversation_metrics(groups: Sequence[Group]) -> dict[str, float | int | None]:
    """What the conversations of a step were like. Broken ones count in `failed` and `stop/*`, and in nothing else.

    `entropy` is estimated from the sampled tokens: the mean of -log p under the distribution they were drawn from.
    docs/metrics.md describes each of them; `record.metric_names` lists them.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    finished = [trajectory for trajectory in trajectories if not trajectory.failed]
    scored = [trajectory for trajectory in finished if trajectory.reward is not None]  # no reward is not the reward 0
    rewards = [trajectory.reward or 0.0 for trajectory in scored]
    outcomes = [[outcome for turn in trajectory.turns for outcome in turn.outcomes] for trajectory in finished]
    versions = {
        version for trajectory in trajectories for segment in trajectory.segments for version in segment.version
    } - {NOT_SAMPLED}
    metrics: dict[str, float | int | None] = {
        "reward/mean": mean(rewards),
        "reward/std": _deviation(rewards) if rewards else None,
        "reward/q10": _quantile(rewards, 0.1),
        "reward/median": _quantile(rewards, 0.5),
        "reward/q90": _quantile(rewards, 0.9),
        "reward/correlation": None if (lowest := lowest_correlation(scored)) is None else lowest[0],
        "segments/mean": mean([len(trajectory.segments) for trajectory in finished]),
        "turns/mean": mean([len(trajectory.turns) for trajectory in finished]),
        "tool_calls/mean": mean([sum(len(turn.calls) for turn in trajectory.turns) for trajectory in finished]),
        "tool_errors/mean": mean([sum(outcome.error is not None for outcome in calls) for calls in outcomes]),
        "tokens/sampled": sum(trajectory.sampled_tokens for trajectory in trajectories),
        "tokens/mean": mean([trajectory.sampled_tokens for trajectory in finished]),
        "tokens/max": max((trajectory.sampled_tokens for trajectory in finished), default=None),
        "tokens/all": sum(len(segment) for trajectory in trajectories for segment in trajectory.segments),
        "entropy": _entropy(finished),
        "engine/prefix_hit_rate": _prefix_hit_rate(trajectories),
        "groups/duplicates": duplicate_share(groups),
        "groups/zero_std": share(_without_differences(group) for group in groups),
        "template_mismatch": share(trajectory.template_mismatch is not None for trajectory in trajectories),
        "failed": share(trajectory.failed for trajectory in trajectories),
        "reward/none": share(trajectory.reward is None for trajectory in finished),
    }
    metrics["version/oldest"] = min(versions, default=None)
    metrics["version/newest"] = max(versions, default=None)
    for name, values in _values_of_parts(scored).items():
        metrics[f"rewards/{name}/mean"] = mean(values)
        metrics[f"rewards/{name}/std"] = _deviation(values)
    for name in sorted({name for trajectory in finished for name in trajectory.metrics}):
        metrics[f"metrics/{name}"] = mean(
            [trajectory.metrics[name] for trajectory in finished if name in trajectory.metrics]
        )
    for source in sorted({group.row.source for group in groups} - {""}):
        rewards_of_source = [trajectory.reward or 0.0 for trajectory in scored if trajectory.row.source == source]
        metrics[f"reward/source/{source}"] = mean(rewards_of_source)
    for stop in Stop:
        metrics[f"stop/{stop}"] = share(trajectory.stop is stop for trajectory in trajectories)
    return {**metrics, **_agent_metrics(trajectories)}


def _values_of_parts(scored: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The values of each part of the reward, by name, of the conversations that it can have a value in.

    A function that returned None does not apply. A part that the environment did not give is 0, but only on the rows of a kind
    (`Row.source`) of which a conversation has this part: those of another kind may have another environment.
    """
    parts = [reward_parts(trajectory) for trajectory in scored]
    functions = {name for trajectory in scored for name in trajectory.rewards} - {UNNAMED_PART}
    given = {
        (name, trajectory.row.source)
        for trajectory, of_one in zip(scored, parts, strict=True)
        for name in of_one.keys() - functions
    }
    return {
        name: [
            of_one.get(name, 0.0)
            for trajectory, of_one in zip(scored, parts, strict=True)
            if name in of_one or (name, trajectory.row.source) in given
        ]
        for name in sorted({name for of_one in parts for name in of_one})
    }


def reward_parts(trajectory: Trajectory) -> dict[str, float]:
    """The parts of a reward, which add up to it: those of reward functions, those that the environment named (`Reply.rewards`),
    summed over the turns, and as `turns` what environment and tools gave without a name, if they gave any."""
    return split_parts(trajectory.rewards, [turn.rewards for turn in trajectory.turns])


def split_parts(rewards: Mapping[str, float], of_turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`reward_parts` of the values of a record: `rewards` of a conversation, whose `turns` is the sum over the turns with all
    that the environment named, and `rewards` of each of its turns."""
    named: dict[str, float] = {}
    unnamed: list[float] = []
    for of_turn in of_turns:
        for name, value in of_turn.items():
            if name in (*_UNNAMED, UNNAMED_PART):
                unnamed.append(value)
            elif name not in rewards:
                named[name] = named.get(name, 0.0) + value
    functions = {name: value for name, value in rewards.items() if name != UNNAMED_PART}
    rest = rewards.get(UNNAMED_PART, 0.0) - math.fsum(named.values())
    # other than the sum of what has no name: the environment used the name of a function, or an old record has no parts of turns
    known = math.fsum(unnamed)
    if UNNAMED_PART in rewards and abs(rest - known) > 1e-9 * max((1.0, *map(abs, unnamed), *map(abs, named.values()))):
        return {UNNAMED_PART: rest, **functions, **named}
    return {**({UNNAMED_PART: known} if unnamed else {}), **functions, **named}


UNNAMED_PART = "turns"
"""The part of a reward that environment and tools gave without a name."""

_UNNAMED = ("environment", "final_reward")
"""The sources of rewards of turns that were given without a name."""


def _agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float | int | None]:
    """What the conversations of agents were like that the environments of these conversations have opened, by their names; those
    that a policy of the recipe has played are apart, as `name@policy`."""
    agents = [agent for trajectory in trajectories for agent in trajectory.agents]
    metrics: dict[str, float | int | None] = {}
    names = [f"{agent.agent}@{agent.policy}" if agent.policy else agent.agent for agent in agents]
    for name in sorted(set(names)):
        of_name = [agent for agent, own in zip(agents, names, strict=True) if own == name]
        finished = [agent for agent in of_name if not agent.failed]
        rewards = [agent.reward for agent in finished if agent.reward is not None]
        metrics |= {
            f"agents/{name}/conversations": len(of_name) / len(trajectories),
            f"agents/{name}/reward/mean": mean(rewards),
            f"agents/{name}/reward/std": _deviation(rewards) if rewards else None,
            f"agents/{name}/turns/mean": mean([len(agent.turns) for agent in finished]),
            f"agents/{name}/tokens/sampled": sum(agent.sampled_tokens for agent in of_name),
            f"agents/{name}/failed": share(agent.failed for agent in of_name),
        }
    return metrics


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float | int | None]:
    """How many training steps older than `version` the weights were that sampled the tokens of these groups."""
    tokens = sum(
        (
            Counter(segment.version)
            for group in groups
            for trajectory in group.trajectories
            if not trajectory.failed
            for segment in trajectory.segments
        ),
        Counter[int](),
    )
    del tokens[NOT_SAMPLED]
    staleness = {version - sampled_by: count for sampled_by, count in tokens.items()}
    return {
        "staleness/mean": sum(steps * count for steps, count in staleness.items()) / tokens.total() if tokens else None,
        "staleness/max": max(staleness, default=None),
    }


def time_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """What a conversation waited for, in seconds: the engine, the environment with its tools, or something else."""
    finished = [trajectory for group in groups for trajectory in group.trajectories if not trajectory.failed]
    engine = [sum(turn.seconds_engine for turn in trajectory.turns) for trajectory in finished]
    environment = [sum(turn.seconds_environment for turn in trajectory.turns) for trajectory in finished]
    other = [t.seconds - e - v for t, e, v in zip(finished, engine, environment, strict=True)]
    parts = {"engine": engine, "environment": environment, "other": other}
    return {
        f"seconds/conversation/{name}": round(statistics.fmean(values), 4) if values else None
        for name, values in parts.items()
    }


def template_mismatches(trajectories: Sequence[Trajectory]) -> str | None:
    """A single message about the mismatches that the sanity check found in these conversations; None if there are none."""
    mismatches = [
        trajectory.template_mismatch for trajectory in trajectories if trajectory.template_mismatch is not None
    ]
    if not mismatches:
        return None
    return (
        f"the tokens of {len(mismatches)} of {len(trajectories)} conversations differ from the chat template's rendering of the "
        f"same messages, so the model may be trained on other tokens than it receives when it is served. The first: "
        f"{mismatches[0]}. Check the template with `turnwise doctor`; tokenization_sanity_check=ignore_strippable ignores white "
        f"space, and `disable` turns the check off"
    )


CUT = {
    Stop.LENGTH: "tokens_per_turn",
    Stop.MAX_TOKENS: "tokens",
    Stop.MAX_RESPONSE: "response_tokens",
}
"""Stop reasons that truncate an answer, and the limit behind each."""


def cut_stops(finished: Sequence[Trajectory], *, least: float = 0.5) -> list[Stop]:
    """The stop reasons of the conversations that ended in the middle of an answer; empty if they are less than this share."""
    stops = [stop for trajectory in finished if (stop := trajectory.stop) is not None and stop in CUT]
    return stops if len(stops) >= least * len(finished) else []


def cut_answers(trajectories: Sequence[Trajectory], limits: object, *, least: float = 0.5) -> str | None:
    """A message if at least this share of the finished conversations ended in the middle of an answer.

    `limits` are those of the recipe.
    """
    finished = [trajectory for trajectory in trajectories if not trajectory.failed]
    if not (stops := cut_stops(finished, least=least)):
        return None
    stop = max(CUT, key=stops.count)
    many = f"all {len(finished)}" if len(stops) == len(finished) else f"{len(stops)} of {len(finished)}"
    return (
        f"{many} conversations ended in the middle of an answer (stop/{stop} {stops.count(stop) / len(finished):.2g}), cut "
        f"by limits.{CUT[stop]}={getattr(limits, CUT[stop])}. {advice_on_cut(stop)}"
    )


def advice_on_cut(stop: str) -> str:
    """What follows from answers that the limit behind a stop reason cuts, and what helps; without a full stop."""
    name = CUT[Stop(stop)]
    return (
        f"Reward functions see incomplete answers, and the environment is not shown them (only in final_reply, or where its own "
        f"SamplingChange(max_tokens=..., answers_cut=True) cuts). Either limits.{name} is too low for this model: raise it; or "
        f"the model does not end its turns (a base model, or a wrong chat template): `turnwise doctor` shows the stop tokens"
    )


def failures(groups: Sequence[Group]) -> list[str]:
    """The errors of broken conversations, the frequent ones first: `environment (12 times): KeyError: ...`. Numbers and quoted
    texts in messages do not distinguish them: `environment (12 times, some with other numbers or quoted texts): ...`.

    The lines of the user's code on which the first of its kind was raised stand below it.
    """
    errors: Counter[tuple[str, str]] = Counter()
    differ: set[tuple[str, str]] = set()
    first: dict[tuple[str, str], Failure] = {}
    for error in (trajectory.error for group in groups for trajectory in group.trajectories):
        if error is not None:
            key = error.kind, message_pattern(error.message)
            errors[key] += 1
            if first.setdefault(key, error).message != error.message:
                differ.add(key)
    return [
        f"{key[0]}{_times(count, differ=key in differ)}: {first[key].message}\n{first[key].traceback}".rstrip()
        for key, count in errors.most_common()
    ]


def _times(count: int, *, differ: bool) -> str:
    """How often an error was; nothing for one. `differ`: whether the messages do."""
    return f" ({count} times{', some with other numbers or quoted texts' if differ else ''})" if count > 1 else ""


def _entropy(finished: Sequence[Trajectory]) -> float | None:
    logprobs = [
        logprob
        for trajectory in finished
        for turn in trajectory.turns
        if turn.completion is not None and turn.completion.logprob_kind is LogprobKind.SAMPLED
        for logprob in turn.completion.logprobs
    ]
    return -statistics.fmean(logprobs) if logprobs else None


def _prefix_hit_rate(trajectories: Sequence[Trajectory]) -> float | None:
    """The share of prompt tokens that the engine took from its prefix cache; None if the engine does not report it."""
    completions = [
        turn.completion for trajectory in trajectories for turn in trajectory.turns if turn.completion is not None
    ]
    known = [
        (completion.cached_tokens, completion.prompt_tokens)
        for completion in completions
        if completion.cached_tokens is not None and completion.prompt_tokens
    ]
    return sum(cached for cached, _ in known) / sum(prompt for _, prompt in known) if known else None


def _without_differences(group: Group) -> bool:
    return equal_rewards(t.reward for t in group.trajectories if t.reward is not None and not t.failed)


def _deviation(rewards: Sequence[float]) -> float:
    """The standard deviation; 0 if the rewards are equal up to rounding."""
    return 0.0 if equal_rewards(rewards) else statistics.pstdev(rewards)


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None without values."""
    return statistics.fmean(values) if values else None


def _quantile(values: Sequence[float], share_below: float) -> float | None:
    """The value at the nearest rank, or None without values: `_quantile([1, 2, 4], 0.5)` is 2."""
    return sorted(values)[round(share_below * (len(values) - 1))] if values else None


def share(flags: Iterable[bool]) -> float:
    """The fraction of true flags, from 0 to 1; 0 without flags."""
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
