"""The messages behind the tokens of one segment, as the chat template was given them.

They answer two questions. Do the tokens agree with what the template writes for these messages (the sanity check)? And does
the conversation continue in this segment, or must a new one begin?

Many templates leave out the reasoning of earlier turns. The thinking policy (`RolloutContext.thinking`) says what follows:

- `keep`: the segment continues with all of its tokens.
- `branch`: a new segment begins if an inference server would send another prompt, because the template leaves out, empties
  or inserts reasoning. The new segment begins with the server's prompt.
- `strip_at_user`: a new segment without earlier reasoning begins at each user message, whatever the template does.

Under each policy a new segment also begins when the offered tools or the arguments of the template change, because the template
writes the prompt with them.
A token is sampled in one segment only and is context in all later ones, so no token is trained on twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.chat.base_conversations import PriorConversation, system_role
from turnwise.chat.renderer import EncodedMessages
from turnwise.chat.sanity_check import SanityCheck, SegmentMessages
from turnwise.chat.turn_messages import ParsedTurn
from turnwise.rollout.context import RolloutContext
from turnwise.types import Message, Segment, TemplateMismatch, ToolSchema

__all__ = ["LiveSegments", "SegmentHistory"]


class SegmentHistory:
    """One segment and its messages, all roles.

    The messages include those of earlier segments that this segment's prompt repeats. `encode_next` says which tokens come
    next; nothing is appended to the segment here.
    """

    def __init__(self, context: RolloutContext) -> None:
        self.segment = Segment()
        """Empty until the session has appended the first prompt."""
        self.tools: Sequence[ToolSchema] = ()
        """The tools in the segment's prompt."""
        self.given: Sequence[int] | None = None
        """The complete next prompt, if the environment writes prompts as token ids (`Reply.prompt_ids`); else None."""
        self._context = context
        """The renderer and the thinking policy."""
        self._messages: list[Message] = []
        """As the template was given them. `_messages[:_first]` are in the segment's first prompt and were sampled or appended
        in an earlier segment; the others have their tokens in this segment, in the same order."""
        self._first = 0
        self._turns: dict[int, ParsedTurn] = {}
        """The model's turns by their index in `_messages`."""
        self._reasoning_turns: set[int] = set()
        """Indexes in `_messages` of the turns whose reasoning is in the segment, empty reasoning included."""
        self._tools_answered = False
        """Whether one of `_messages` has the role `tool`."""
        self._context_texts: dict[int, str] = {}
        """The text of each encoded context by its position in the segment, in ascending order."""
        self._injected: set[int] = set()
        """Positions in the segment where text begins that an environment wrote into a turn of the model."""

    def encode_opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> EncodedMessages:
        """The prompt of a conversation that begins, or whose history was replaced.

        Raises TemplateError if the template refuses the messages, or if tools are offered and the model cannot use them: the
        format of their calls is unknown, or the prompt does not show them.
        """
        self.tools = tools
        encoded = self._context.renderer.encode_opening(messages, tools)
        self._refuse_unusable_tools(encoded)
        return encoded

    def encode_bridge(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], context: RolloutContext
    ) -> EncodedMessages | None:
        """What follows the model's last turn in this segment: the new messages and the next generation prompt.

        `context` is that of the next turn, whose renderer may have other template arguments. None where a new segment must begin
        instead. Raises TemplateError if the template refuses the messages.
        """
        if tools != self.tools or context.renderer is not self._context.renderer:
            return None
        bridge = self._context.renderer.encode_bridge(self.segment.token_ids[-1], messages, self._before)
        return None if self._thinking_needs_new_segment(messages, bridge) else bridge

    def restart(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], context: RolloutContext
    ) -> EncodedMessages:
        """Begin a new segment, and return its first prompt: all messages so far and the new ones, rendered in full.

        `context` is that of the next turn. Reasoning is left out where the thinking policy or the template says so.
        """
        self.tools, renderer = tools, context.renderer
        if renderer is not self._context.renderer:
            self._context = context
            for index, turn in self._turns.items():  # the template may write turns differently under other arguments
                self._messages[index] = renderer.to_template_message(turn)
        if self._strips_reasoning_before(messages):
            self._messages = [self._without_reasoning(index, message) for index, message in enumerate(self._messages)]
            self._reasoning_turns = set()
        new_messages = renderer.template.plan(messages, self._before).apply(messages)
        encoded = renderer.encode_full([*self._messages, *new_messages], tools)
        self._refuse_unusable_tools(encoded)
        self.segment, self._first = Segment(), len(self._messages)
        self._context_texts, self._injected = {}, set()
        return replace(encoded, messages=new_messages)

    def encode_given(self) -> EncodedMessages:
        """The tokens of `given` that follow those of the segment."""
        assert self.given is not None
        new = tuple(self.given[len(self.segment) :])
        marks = self._context.renderer.profile.reasoning.marks
        return EncodedMessages(
            token_ids=new, reasoning_opening=marks.reasoning_opening(self._context.renderer.decode(new))
        )

    def append_messages(self, encoded: EncodedMessages, position: int) -> None:
        """Note messages whose tokens begin at `position` of the segment."""
        self._messages.extend(encoded.messages)
        self._tools_answered = self._tools_answered or any(message["role"] == "tool" for message in encoded.messages)
        if encoded.text:
            self._context_texts[position] = encoded.text

    def mark_injected(self, position: int) -> None:
        """Note that text which the environment wrote into a turn of the model begins at `position` of the segment."""
        self._injected.add(position)

    def append_turn(self, turn: ParsedTurn) -> None:
        """Note the model's turn."""
        renderer, index = self._context.renderer, len(self._messages)
        self._messages.append(renderer.to_template_message(turn))
        self._turns[index] = turn
        reasoning = renderer.profile.reasoning
        if reasoning.supported and (
            turn.reasoning or self._prompt_opens_reasoning() or reasoning.marks.reasoning_blocks(turn.text)
        ):
            self._reasoning_turns.add(index)

    def pop_turn(self) -> ParsedTurn:
        """Forget the model's last turn, because it will be continued, and return it."""
        self._messages.pop()
        self._reasoning_turns.discard(len(self._messages))
        return self._turns.pop(len(self._messages))

    def template_mismatch(self) -> TemplateMismatch | None:
        """The first difference between the segment's tokens and the template's rendering of its messages; None if they agree,
        or if the environment wrote the tokens."""
        if self.given is not None:
            return None
        check = SanityCheck(self._context.renderer)
        return check.compare(self._segment_messages(), as_served=self._context.thinking == "branch")

    @property
    def _before(self) -> PriorConversation:
        """What precedes the next messages, the model's last turn included."""
        return PriorConversation(self._tools_answered, system_role(self._messages), bool(self.tools), self._messages)

    def _refuse_unusable_tools(self, prompt: EncodedMessages) -> None:
        if self.tools:  # before a token is sampled
            self._context.renderer.refuse_unusable_tools(self.tools, prompt.text)

    def _prompt_opens_reasoning(self) -> bool:
        """Whether the last generation prompt opens reasoning, or contains an empty reasoning block."""
        text = next(reversed(self._context_texts.values()), "")
        return self._context.renderer.profile.reasoning.marks.without_reasoning_opening(text) != text

    def _thinking_needs_new_segment(self, messages: Sequence[Message], bridge: EncodedMessages) -> bool:
        """Whether the thinking policy begins a new segment instead of appending `bridge`, the encoded `messages`."""
        renderer, policy = self._context.renderer, self._context.thinking
        if policy == "keep" or not renderer.profile.reasoning.supported:
            return False
        if policy == "strip_at_user":
            return self._strips_reasoning_before(messages)
        return SanityCheck(renderer).served_prompt_differs(self._segment_messages(), bridge.messages, bridge)

    def _strips_reasoning_before(self, messages: Sequence[Message]) -> bool:
        """Whether the policy `strip_at_user` removes earlier reasoning before these messages."""
        strips = self._context.thinking == "strip_at_user" and bool(self._reasoning_turns)
        return strips and any(message["role"] == "user" for message in messages)

    def _without_reasoning(self, index: int, message: Message) -> Message:
        """The message at `index`; a turn of the model without its reasoning."""
        if index not in self._turns:
            return message
        reasoning = self._context.renderer.profile.reasoning
        message = {name: value for name, value in message.items() if name != reasoning.key}
        return {**message, "content": reasoning.without_reasoning(str(message["content"] or ""))}

    def _segment_messages(self) -> SegmentMessages:
        turns = [index for index in sorted(self._turns) if index >= self._first]
        return SegmentMessages(
            segment=self.segment,
            messages=self._messages,
            tools=self.tools,
            context_texts=self._context_texts,
            injected_places=self._injected,
            turns_with_calls=[number for number, index in enumerate(turns) if self._messages[index].get("tool_calls")],
        )


class LiveSegments:
    """The segment that the conversation continues now, and the segments that it may return to."""

    def __init__(self, context: RolloutContext) -> None:
        self.current = SegmentHistory(context)
        self.earlier: dict[int, SegmentHistory] = {}
        """By the index of their history in `Trajectory.previous_histories`."""
        self.from_tokens = False
        """Whether the environment writes the prompts as token ids."""
        self._context = context

    def begin(self, prompt_ids: Sequence[int] | None) -> None:
        """Note the first prompt, if the environment wrote it as tokens."""
        self.current.given = prompt_ids
        self.from_tokens = prompt_ids is not None

    def use(self, context: RolloutContext) -> None:
        """Begin later histories with this context, whose renderer has other template arguments. A segment with tokens ends when
        its next prompt is encoded (`SegmentHistory.encode_bridge`)."""
        self._context = context
        if not self.current.segment:
            self.current = SegmentHistory(context)

    def replace(self, index: int, returns_to: int | None) -> None:
        """Keep the current segment as that of history `index`; continue in a new segment, or in that of an earlier history.

        Raises ValueError, with nothing changed, if the earlier history cannot be continued.
        """
        if returns_to is not None and returns_to not in self.earlier:
            raise ValueError(
                f"Reply(returns_to=EarlierHistory(index={returns_to})): the histories that can be continued are "
                f"{sorted(self.earlier)}"
            )
        self.earlier[index] = self.current
        self.current = SegmentHistory(self._context) if returns_to is None else self.earlier.pop(returns_to)
