"""Reads the states and the scores of states that some estimators need from a trajectory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from turnwise.errors import RolloutError, boundary
from turnwise.rewards.credit.episode import Batch, Episode, episode_of
from turnwise.rewards.results import finite_number
from turnwise.types import Message, Trajectory, Turn

__all__ = ["refuse_no_potentials", "refuse_no_states", "with_potentials", "with_states"]


def with_states(trajectory: Trajectory, *, key: str | None) -> Episode:
    """The episode with a name of the state before each turn, for GiGPO.

    With a key, that is `turn.info[key]` of the turn before, as JSON; None (a state of its own) if the turn before has no such
    entry. The first turns of a group are in the same state. Without a key, the name is the text of the messages that the model
    received since its last turn; None if it received none.
    """
    names = [_observation(trajectory, turn) for turn in trajectory.turns]
    if key is not None:
        names = [None if key not in turn.info else _json(turn.info[key]) for turn in trajectory.turns]
        names = ["first turn", *names[:-1]][: len(names)]
    return replace(episode_of(trajectory), states_T=names)


def with_potentials(trajectory: Trajectory, *, key: str) -> Episode:
    """The episode with `turn.info[key]`, the score of the state after each turn; None where it is missing or None.

    Raises Failed if a score is not a finite number.
    """
    return replace(episode_of(trajectory), potentials_T=[_potential(turn, key) for turn in trajectory.turns])


def refuse_no_potentials(batch: Batch, *, key: str) -> None:
    """Raises RolloutError if no turn of the batch has a score of its state: `turn_potential` would be `grpo`."""
    episodes = [episode for group in batch for episode in group]
    if episodes and all(score is None for episode in episodes for score in episode.potentials_T):
        raise RolloutError(
            f"credit.name=turn_potential has no effect: no turn of the step has a score in turn.info[{key!r}]. Let the "
            f"environment set it (Reply(info={{{key!r}: 0.5}})), or set credit.key to the key that it uses"
        )


def refuse_no_states(batch: Batch, *, key: str) -> None:
    """Raises RolloutError if no turn after the first has a named state: `gigpo` would compare first turns only."""
    later = [state for group in batch for episode in group for state in episode.states_T[1:]]
    if later and all(state is None for state in later):
        raise RolloutError(
            f"credit.state_key={key} has no effect: no turn of the step has an entry turn.info[{key!r}]. Let the environment set "
            f"it (Reply(info={{{key!r}: ...}})), or remove credit.state_key to compare the messages that the model received"
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
