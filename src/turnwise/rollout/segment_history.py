"""What was said so far in a segment, as the template was given it: for the sanity check, and for what becomes of thoughts.

Many templates leave out what the model has thought in earlier turns. The policy says what that means for a conversation that
goes on: `keep` (it goes on with all its tokens), `branch` (wherever a server would show the model another prompt, a new
segment begins with that prompt: a thought is left out, emptied or inserted), `strip_at_user` (a new segment without earlier
thoughts begins at every user message, whatever the template would do). A token is sampled in
one segment only and context in all later ones, so nothing is trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.chat.base_conversations import Before, system_role
from turnwise.chat.one_pass import Held, OnePass
from turnwise.chat.renderer import EncodedMessages, ParsedTurn, Renderer, Thinking
from turnwise.types import Message, Segment, ToolSchema

__all__ = ["SegmentHistory"]


class SegmentHistory:
    """The messages of one segment, all sides."""

    def __init__(self, renderer: Renderer, thinking: Thinking) -> None:
        self._renderer = renderer
        self._one_pass = OnePass(renderer)
        self._thinking: Thinking = thinking
        self.tools: Sequence[ToolSchema] = ()
        self._tools_answered = False
        self._messages: list[Message] = []
        self._said: dict[int, ParsedTurn] = {}
        """The model's turns, by their place in `_messages`."""
        self._thoughts: set[int] = set()
        """Places of the turns whose thoughts stand in the segment, empty ones too."""
        self._cue_thinks = False
        """Whether the last generation prompt opens a thought, or writes an empty one."""
        self._texts: dict[int, str] = {}
        """What was encoded, by its place in the segment."""
        self._first = 0
        """Place of the first message of which the tokens were sampled or appended in this segment."""
        self._resumed: set[int] = set()
        """Places in the segment of words that an environment has put into the model's mouth."""

    def append_messages(self, piece: EncodedMessages, place: int) -> None:
        """Messages became tokens, at `place` of the segment."""
        self._messages.extend(piece.messages)
        self._tools_answered = self._tools_answered or any(message["role"] == "tool" for message in piece.messages)
        if piece.text:
            self._texts[place] = piece.text
            self._cue_thinks = self._renderer.marks.without_open_thought(piece.text) != piece.text

    @property
    def before(self) -> Before:
        """What stands in the segment, the model's last turn included."""
        return Before(self._tools_answered, system_role(self._messages), bool(self.tools), self._messages)

    def append_turn(self, said: ParsedTurn) -> None:
        """The model has spoken, in its own words."""
        place = len(self._messages)
        self._messages.append(self._renderer.to_template_message(said))
        self._said[place] = said
        if self._renderer.thinks and (said.reasoning or self._cue_thinks or self._renderer.marks.thoughts(said.text)):
            self._thoughts.add(place)

    def pop_turn(self) -> str:
        """Forget the last turn, for it goes on; returns what was said in it."""
        self._messages.pop()
        self._thoughts.discard(len(self._messages))
        return self._said.pop(len(self._messages)).text

    def mark_injected(self, place: int) -> None:
        """What begins at `place` of the segment is an environment's, and stands in a turn of the model."""
        self._resumed.add(place)

    def clear(self) -> None:
        """A new segment begins."""
        self._messages, self._said, self._thoughts, self._resumed = [], {}, set(), set()
        self._texts, self._first = {}, 0
        self._tools_answered = False

    def template_mismatch(self, segment: Segment) -> str | None:
        """What the sanity check finds in the segment, or None."""
        return self._one_pass.drift(self._held(segment), served=self._thinking == "branch")

    def needs_new_segment(self, segment: Segment, heard: Sequence[Message], bridge: EncodedMessages) -> bool:
        """Whether the policy begins a new segment before the model answers `heard`, to which `bridge` would lead on."""
        if self._thinking == "keep" or not self._renderer.thinks:
            return False
        if self._thinking == "strip_at_user":
            return bool(self._thoughts) and any(message["role"] == "user" for message in heard)
        return self._one_pass.serves_otherwise(self._held(segment), bridge.messages, bridge)

    def encode_restart(self, heard: Sequence[Message]) -> EncodedMessages:
        """The first tokens of a new segment: everything so far, without the thoughts that are left out."""
        if self._thinking == "strip_at_user":
            self._messages = [self._stripped(place, message) for place, message in enumerate(self._messages)]
        handed = self._renderer.template.plan(heard, self.before).apply(heard)
        piece = self._renderer.encode_full([*self._messages, *handed], self.tools)
        self._first, self._thoughts, self._resumed, self._texts = len(self._messages), set(), set(), {}
        return replace(piece, messages=handed)

    def _held(self, segment: Segment) -> Held:
        turns = [place for place in sorted(self._said) if place >= self._first]
        return Held(
            segment=segment,
            messages=self._messages,
            tools=self.tools,
            texts=self._texts,
            injected=self._resumed,
            called=[number for number, place in enumerate(turns) if self._messages[place].get("tool_calls")],
        )

    def _stripped(self, place: int, message: Message) -> Message:
        if place not in self._said:
            return message
        key = self._renderer.template.reasoning_key
        bare = {name: value for name, value in message.items() if name != key}
        return {
            **bare,
            "content": self._renderer.without_thoughts(str(bare["content"] or "")),
        }
