"""Estimators of users: `credit: file.py:function`, with the arguments of the recipe (docs/own_algorithm.md).

The function has the signature of the estimators here, `(batch) -> advantages`, and further parameters for `credit.arguments`.
What it returns is compared with the conversations that it was given, in each step: a missing, additional or infinite number is
an error that names its place, and never trains. At the start it is tried on a small batch. Groups without a conversation that
has a reward are not shown to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.options.algorithm import OWN_CREDIT, CreditSection, OwnCredit
from turnwise.rewards.credit.credit import Advantages, Episode, EpisodeGroups, Estimator, ValueEstimates
from turnwise.rewards.credit.critic import turn_values
from turnwise.user_code.algorithms import own_function
from turnwise.user_code.reward_number import reward_number


def own(batch: EpisodeGroups, options: OwnCredit) -> Advantages | ValueEstimates:
    """The advantages of the function of a recipe, as plain floats.

    Raises ConfigError if the function raises, or returns something else than a finite number for each turn (or for each sampled
    token of a turn) of each conversation, in their order.
    """
    function = own_function(options.use, options.arguments, key="credit", given=("batch",))
    # also with values of tokens, an estimator of turns sees one for each turn
    read = _with_turn_values if options.needs_values == "turn" else list
    shown = [read(group) for group in batch if group]
    result: Any = ValueEstimates([], []) if options.needs_values is not None else []
    if shown:
        try:
            with boundary("credit"):
                result = function(shown)
        except Failed as failed:
            raise ConfigError(
                f"credit: {options.use} raised {failed.failure.message}\n{failed.failure.traceback}"
            ) from failed
    of_critic = isinstance(result, ValueEstimates)
    if of_critic != (options.needs_values is not None):
        raise ConfigError(
            f"credit: {options.use} returned {'ValueEstimates' if of_critic else type(result).__name__}, and "
            + (
                "declares no critic: write @needs(critic='turn') or @needs(critic='token') above it"
                if of_critic
                else "declares a critic (@needs): it must return ValueEstimates(advantages, returns)"
            )
        )
    if isinstance(result, ValueEstimates):
        returns = _checked(result.returns, batch, f"{options.use}, returns", options.needs_values == "token")
        return ValueEstimates(_checked(result.advantages, batch, f"{options.use}, advantages"), returns)
    return _checked(result, batch, options.use)


def _with_turn_values(group: Sequence[Episode]) -> list[Episode]:
    return [replace(episode, values_T=turn_values(episode)) for episode in group]


def _checked(result: Any, batch: EpisodeGroups, where: str, by_token: bool | None = None) -> Advantages:
    """The result with an empty list for each empty group. `by_token`: whether turns must have a number for each token, or one."""
    shown = [group for group in batch if group]
    groups = iter(_items(result, len(shown), "the batch", "group", where))
    checked: Advantages = []
    for place, group in enumerate(batch):
        name = f"group {place}"
        entries = _items(next(groups), len(group), name, "conversation", where) if group else []
        checked.append(
            [
                _of_episode(entry, episode, f"conversation {number} of {name}", where, by_token)
                for number, (entry, episode) in enumerate(zip(entries, group, strict=True))
            ]
        )
    return checked


def _of_episode(
    entry: Any, episode: Episode, name: str, where: str, by_token: bool | None
) -> list[float | Sequence[float]]:
    numbers: list[float | Sequence[float]] = []
    for turn, (one, count) in enumerate(
        zip(_items(entry, episode.turns, name, "turn", where), episode.tokens_T, strict=True)
    ):
        here = f"turn {turn} of {name}"
        single = by_token is False or (by_token is None and _is_number(one))
        if single:
            numbers.append(_number(one, here, where))
        else:
            numbers.append([_number(value, here, where) for value in _items(one, count, here, "sampled token", where)])
    return numbers


def _is_number(value: Any) -> bool:
    """Also an array or a tensor without axes. None is refused as a number, with a hint."""
    return value is None or isinstance(value, str) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0


def _items(value: Any, count: int, of: str, what: str, where: str) -> list[Any]:
    expected = f"a list with an entry for each {what} of {of} ({count})"
    if value is None:
        raise ConfigError(f"credit: {where} returned None in place of {expected}: is a `return` missing?")
    if _is_number(value) or isinstance(value, Mapping | bytes):
        hint = "; for the same advantage in all turns write [advantage] * episode.turns" if what == "turn" else ""
        raise ConfigError(f"credit: {where} returned {value!r:.80} in place of {expected}{hint}")
    items = list(value)
    if len(items) != count:
        raise ConfigError(f"credit: {where} returned {len(items)} entries for {of}, and must return {expected}")
    return items


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = reward_number(value, where)
    except TypeError as error:
        raise ConfigError(f"credit: {name}: {str(error).replace('a reward', 'an advantage')}") from None
    if not math.isfinite(number):
        raise ConfigError(f"credit: {where} gave {number} for {name}; an advantage must be a finite number")
    return number


ESTIMATORS: Mapping[type[CreditSection], Estimator] = {cls: Estimator(own) for cls in OWN_CREDIT.values()}
"""The one estimator of this module, by the classes of its options: a class for what a function can declare."""


# Before the first step


def example_batch() -> list[list[Episode]]:
    """Groups as training has them: of different sizes, lengths and rewards, with turns without weight or tokens."""
    return [
        [
            _episode([0.2, 0.0, 0.5], 1.0, tokens=(3, 1, 2), trained=(True, False, True)),
            _episode([0.0], -0.5, tokens=(2,)),
            _episode([0.1, 0.3], 0.0, tokens=(2, 0), trained=(True, False)),
        ],
        [_episode([0.0, 0.25], 1.0, tokens=(1, 4)), _episode([0.0, 0.0], 0.25, tokens=(2, 2))],
        [_episode([0.0], 1.0, tokens=(3,)), _episode([0.0], 1.0, tokens=(3,))],
        [_episode([0.5], 0.5, tokens=(1,))],
    ]


def _episode(rewards: list[float], outcome: float, *, tokens: Sequence[int], trained: Sequence[bool] = ()) -> Episode:
    return Episode(
        rewards,
        outcome=outcome,
        tokens_T=list(tokens),
        trained_T=list(trained),
        values_T=[[0.125 * (place + turn) for place in range(count)] for turn, count in enumerate(tokens)],
        parts={"turns": sum(rewards), "judge": outcome},
        penalties_T=[() for _ in rewards],
        weights={"judge": 1.0},
        baseline=0.25,
        total=sum(rewards) + outcome,
    )


def try_own(options: OwnCredit) -> None:
    """Call the function on `example_batch`, so that what is wrong with it is said before the first step. Raises ConfigError."""
    try:
        own(example_batch(), options)
    except ConfigError as error:
        raise ConfigError(f"{error}\n(It was tried on a small batch before the first step.)") from error.__cause__


def broken_invariants(options: OwnCredit) -> list[str]:
    """What the estimators of turnwise keep, and the function does not: for each, what was done and what changed. Raises
    ConfigError if the function fails."""

    def advantages(batch: list[list[Episode]]) -> Advantages:
        result = own(batch, options)
        return result.advantages if isinstance(result, ValueEstimates) else result

    batch = example_batch()
    expected = advantages(batch)
    changed = ["it changes the rewards of the conversations that it is given"] if batch != example_batch() else []
    undo: Callable[[Advantages], Advantages]
    for name, do, undo in (
        ("a second call with the same batch gives other advantages", lambda given: given, lambda found: found),
        (
            "the order of the conversations in a group changes their advantages",
            lambda given: [group[::-1] for group in given],
            lambda found: [group[::-1] for group in found],
        ),
        (
            "the order of the groups changes their advantages",
            lambda given: given[::-1],
            lambda found: found[::-1],
        ),
    ):
        if not _same(undo(advantages(do(example_batch()))), expected):
            changed.append(name)
    return changed


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) <= 1e-6 * max(1.0, abs(expected))
    return (
        not isinstance(found, float)
        and len(found) == len(expected)
        and all(_same(one, other) for one, other in zip(found, expected, strict=True))
    )
