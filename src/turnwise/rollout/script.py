"""What was said so far in a segment, as the template was given it: for the sanity check, and for what becomes of thoughts.

Many templates leave out what the model has thought in earlier turns. The policy says what that means for a conversation that
goes on: `keep` (it goes on with all its tokens), `branch` (wherever the template would leave thoughts out, a new segment
begins with what the template writes, so that training sees what serving sees), `strip_at_user` (so it does at every user
message, whatever the template would do). A token is sampled in one segment only and context in all later ones, so nothing
is trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.rollout.renderer import Piece, Renderer, Said, Thinking
from turnwise.types import Message, Segment, ToolSchema

__all__ = ["Script"]


class Script:
    """The messages of one segment, all sides."""

    def __init__(self, renderer: Renderer, thinking: Thinking) -> None:
        self._renderer = renderer
        self._thinking: Thinking = thinking
        self.tools: Sequence[ToolSchema] = ()
        self.tools_answered = False
        """Whether tools have answered in this segment."""
        self._messages: list[Message] = []
        self._said: dict[int, Said] = {}
        """The model's turns, by their place in `_messages`."""
        self._thoughts: set[int] = set()
        """Places of the turns whose thoughts stand in the segment."""
        self._resumed: set[int] = set()
        """Places in the segment of words that an environment has put into the model's mouth."""

    def hear(self, piece: Piece) -> None:
        """Messages became tokens."""
        self._messages.extend(piece.messages)
        self.tools_answered = self.tools_answered or any(message["role"] == "tool" for message in piece.messages)

    def say(self, said: Said) -> None:
        """The model has spoken, in its own words."""
        place = len(self._messages)
        self._messages.append(self._renderer.spoken(said))
        self._said[place] = said
        if said.reasoning:
            self._thoughts.add(place)

    def take_back(self) -> str:
        """Forget the last turn, for it goes on; returns what was said in it."""
        self._messages.pop()
        self._thoughts.discard(len(self._messages))
        return self._said.pop(len(self._messages)).text

    def put_words(self, place: int) -> None:
        """What begins at `place` of the segment is an environment's, and stands in a turn of the model."""
        self._resumed.add(place)

    def forget(self) -> None:
        """A new segment begins."""
        self._messages, self._said, self._thoughts, self._resumed = [], {}, set(), set()
        self.tools_answered = False

    def drift(self, segment: Segment) -> str | None:
        """What the sanity check finds in the segment, or None."""
        return self._renderer.drift(segment, self._messages, self.tools, resumed=self._resumed)

    def leaves_thoughts_out(self, heard: Sequence[Message]) -> bool:
        """Whether the policy begins a new segment before the model answers `heard`."""
        if self._thinking == "keep" or not self._thoughts:
            return False
        if self._thinking == "strip_at_user":
            return any(message["role"] == "user" for message in heard)
        return self._kept(heard) != self._thoughts

    def anew(self, heard: Sequence[Message]) -> Piece:
        """The first tokens of a new segment: everything so far, without the thoughts that are left out."""
        if self._thinking == "strip_at_user":
            kept: set[int] = set()
            messages = [self._stripped(place, message) for place, message in enumerate(self._messages)]
        else:
            kept = self._kept(heard)
            messages = self._messages
        handed = self._handed(heard)
        piece = self._renderer.whole([*messages, *handed], self.tools)
        self._messages, self._thoughts, self._resumed = list(messages), kept, set()
        return Piece(token_ids=piece.token_ids, media=piece.media, messages=handed, thinking=piece.thinking)

    def _handed(self, heard: Sequence[Message]) -> list[Message]:
        return self._renderer.template.plan(heard, again=self.tools_answered).apply(heard)

    def _kept(self, heard: Sequence[Message]) -> set[int]:
        """Places of the turns whose thoughts the template would still write."""
        probes = {place: self._renderer.probe(self._said[place], place) for place in self._thoughts}
        messages = [probes[place][1] if place in probes else message for place, message in enumerate(self._messages)]
        whole = self._renderer.template.render([*messages, *self._handed(heard)], cue=True, tools=self.tools)
        return {place for place, (probe, _) in probes.items() if probe in whole}

    def _stripped(self, place: int, message: Message) -> Message:
        if place not in self._said:
            return message
        key = self._renderer.template.reasoning_key
        bare = {name: value for name, value in message.items() if name != key}
        return {
            **bare,
            "content": self._renderer.without_thoughts(str(bare["content"] or "")),
        }
