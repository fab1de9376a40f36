"""What the loop knows of a session: the mechanism of one conversation.

There are two kinds: `session.Session` records tokens and samples with an engine; `text_session.TextSession` sends messages to an
endpoint. The methods are called in this order::

    begin(opening)
    while stop_reason() is None:
        turn = await generate()
        apply_reply(turn, reply)        # not after a turn that was cut by a limit, or without a turn
    apply_final_reply(reply)            # if a limit ended a conversation that has turns
    finish(stop)
    release()                           # always, also after a failure
"""

from __future__ import annotations

from typing import Protocol

from turnwise.types import Opening, Reply, Stop, Trajectory, Turn

__all__ = ["ConversationSession"]


class ConversationSession(Protocol):
    """One running conversation. All methods that raise, raise Failed."""

    @property
    def trajectory(self) -> Trajectory:
        """The record, filled while the conversation runs."""
        ...

    @property
    def turns_answered(self) -> int:
        """Turns that the environment has answered: the index of the turn in progress."""
        ...

    @property
    def truncation_reason(self) -> Stop | None:
        """Why the conversation ends if the last turn was cut, or if there was no room for a turn. None if it does not end: the
        environment bounded the turn itself, and answers it (`SamplingChange.answers_cut`)."""
        ...

    def begin(self, opening: Opening) -> None:
        """Take the environment's opening messages and tools."""
        ...

    def stop_reason(self) -> Stop | None:
        """Why there is no further turn of the model, or None."""
        ...

    async def generate(self) -> Turn | None:
        """Let the model take a turn. None: the prompt leaves no room for a turn, which is known only now."""
        ...

    def apply_reply(self, turn: Turn, reply: Reply) -> None:
        """Take the environment's reply to the last turn."""
        ...

    def apply_final_reply(self, reply: Reply) -> None:
        """Take what the environment says of the turns after a limit ended the conversation."""
        ...

    def finish(self, stop: Stop) -> None:
        """The conversation has ended."""
        ...

    def release(self) -> None:
        """Free what the conversation holds."""
        ...
