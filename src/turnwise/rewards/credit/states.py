"""Reads the states and the scores of states that some estimators need from a trajectory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from turnwise.errors import Failed, boundary
from turnwise.rewards.credit.episode import Episode, episode_of
from turnwise.rewards.results import finite_number
from turnwise.types import Failure, Message, Trajectory, Turn

__all__ = ["with_potentials", "with_states"]


def with_states(trajectory: Trajectory, *, key: str | None) -> Episode:
    """The episode with a name of the state before each turn, for GiGPO.

    With a key, that is `turn.info[key]` of the turn before, as JSON; None (a state of its own) if the turn before has no such
    entry. The first turns of a group are in the same state. Without a key, the name is the text of the messages that the model
    received since its last turn; None if it received none.

    Raises Failed if there is a key, the trajectory has several turns, and none of the turns before the last has such an entry.
    """
    turns = trajectory.turns
    if key is None:
        return replace(episode_of(trajectory), states_T=[_observation(trajectory, turn) for turn in turns])
    _need_entry(
        turns[:-1],
        key,
        rule=f"credit.name=gigpo with credit.state_key={key} needs the name of the state after at least one turn before the last",
        fix="or remove credit.state_key to compare the messages that the model received",
    )
    names = [None if key not in turn.info else _json(turn.info[key]) for turn in turns]
    return replace(episode_of(trajectory), states_T=["first turn", *names[:-1]][: len(names)])


def with_potentials(trajectory: Trajectory, *, key: str) -> Episode:
    """The episode with `turn.info[key]`, the score of the state after each turn; None where it is missing or None.

    Raises Failed if a score is not a finite number, and if no turn has such an entry. Turns that a limit has cut do not need it:
    the environment does not see them.
    """
    _need_entry(
        [turn for turn in trajectory.turns if turn.finish_reason != "length"],
        key,
        rule="credit.name=turn_potential needs the score of the state after at least one turn, or None for no score",
        fix="or set credit.key to the key that the environment uses",
    )
    return replace(episode_of(trajectory), potentials_T=[_potential(turn, key) for turn in trajectory.turns])


def _need_entry(turns: Sequence[Turn], key: str, *, rule: str, fix: str) -> None:
    """Raises Failed if there are turns, and none has an entry `turn.info[key]`."""
    if turns and all(key not in turn.info for turn in turns):
        present = ", ".join(sorted({repr(name) for turn in turns for name in turn.info})) or "none"
        raise Failed(
            Failure(
                "reward",
                f"no turn has an entry turn.info[{key!r}] (other entries: {present:.200}); {rule}. Let the environment set the "
                f"entry (Reply(info={{{key!r}: ...}})), {fix}",
            )
        )


def _observation(trajectory: Trajectory, turn: Turn) -> str | None:
    """The messages between the model's last turn and this turn, as JSON. None if there are none, or if they are not known."""
    if turn.message_index is None:
        return None
    histories: Sequence[Sequence[Message]] = [*trajectory.previous_histories, trajectory.messages]
    prompt = histories[turn.history][: turn.message_index]
    if turn.index == 0:
        return _json(list(prompt))
    last = max((n for n, message in enumerate(prompt) if message["role"] == "assistant"), default=-1)
    received = list(prompt[last + 1 :])
    return _json(received) if received else None


def _json(value: Any) -> str:
    # an object without a JSON type, such as an image, is equal to itself only
    with boundary("reward"):
        return json.dumps(value, sort_keys=True, default=lambda other: f"{type(other).__name__} {id(other)}")


def _potential(turn: Turn, key: str) -> float | None:
    value = turn.info.get(key)
    return None if value is None else finite_number(f"turn.info[{key!r}] of turn {turn.index}", value)
