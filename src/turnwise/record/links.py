"""Which turns of the model are behind which messages of the conversation."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import Trajectory, Turn

__all__ = ["turns_of_messages"]


def turns_of_messages(trajectory: Trajectory) -> list[list[Turn]]:
    """For each message of `trajectory.messages`, the turns that sampled it, in their order.

    A message of the model has several turns where the environment cut the answer and the model continued it. Turns that were
    sampled in a previous history, or that were read from a record of schema 1, are found by their message: an environment that
    replaces the history often keeps some of its messages.
    """
    linked: list[list[Turn]] = [[] for _ in trajectory.messages]
    last, unlinked = len(trajectory.previous_histories), list[Turn]()
    for turn in trajectory.turns:
        if turn.history == last and turn.message_index is not None and turn.message_index < len(linked):
            linked[turn.message_index].append(turn)
        else:
            unlinked.append(turn)
    for turns, message in zip(reversed(linked), reversed(trajectory.messages), strict=True):
        if not turns and (index := _last(unlinked, message)) is not None:
            turns.append(unlinked[index])
            del unlinked[index:]  # the messages before this one are of earlier turns
    return linked


def _last(turns: Sequence[Turn], message: object) -> int | None:
    return next((index for index in reversed(range(len(turns))) if turns[index].message == message), None)
