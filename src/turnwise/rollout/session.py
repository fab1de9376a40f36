"""One conversation as tokens: the only code that appends a token to a trajectory.

A session knows one trajectory and the shared dependencies. It does not know what answers the model, nor why the conversation
ends; `rollout.ConversationSession` has the order in which its methods are called. New messages wait as messages until the
model's next turn. Only then are they encoded, together with the generation prompt, so that two messages in a row leave no
stray header behind. A token is sampled in one segment only and is context in all later ones, so no token is trained on twice.

`SegmentHistory` has the messages behind the tokens of one segment, as the chat template was given them. They answer two
questions. Do the tokens agree with what the template writes for these messages (the sanity check)? And does the conversation
continue in this segment, or must a new one begin? Many templates leave out the reasoning of earlier turns. The thinking policy
(`RolloutContext.thinking`) says what follows:

- `keep`: the segment continues with all of its tokens.
- `branch`: a new segment begins if an inference server would send another prompt, because the template leaves out, empties
  or inserts reasoning. The new segment begins with the server's prompt.
- `strip_at_user`: a new segment without earlier reasoning begins at each user message, whatever the template does.

Under each policy a new segment also begins when the offered tools or the arguments of the template change, because the
template writes the prompt with them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.chat.media_parts import without_media
from turnwise.chat.probes import PriorConversation, system_role
from turnwise.chat.renderer import EncodedMessages
from turnwise.chat.sanity_check import SanityCheck, SegmentMessages
from turnwise.chat.text_encoder import text_size
from turnwise.chat.turn_format import ParsedTurn
from turnwise.engines.engine import longest_sequence
from turnwise.environments.environment import annotate_turns, check_opening, presentable
from turnwise.errors import Failed, boundary
from turnwise.rollout.context import RolloutContext, turn_seed
from turnwise.types import (
    Completion,
    EarlierHistory,
    Edit,
    Failure,
    LogprobKind,
    Message,
    Opening,
    Reply,
    Request,
    Resume,
    SamplingChange,
    Segment,
    Stop,
    TemplateMismatch,
    ToolSchema,
    Trajectory,
    Turn,
    common_length,
)
from turnwise.user_code.threads import off_loop

_SHORT_TEXT = 1 << 15
"""Characters of new messages that are encoded between two steps of other conversations."""

# the messages behind a segment


class SegmentHistory:
    """One segment and its messages, all roles.

    The messages include those of earlier segments that this segment's prompt repeats. Nothing is appended to the segment here.
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


# the conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialTurn:
    """The part of the model's next turn that precedes its first sampled token.

    Example: after `Resume(keep=7, add=" Wait.")` of the answer "It is 5, so done.", with one token a character::

        PartialTurn(continues=True, text="It is 5 Wait.", unencoded=" Wait.")
    """

    text: str = ""
    """The prefill of a new turn; of a resumed turn everything that was kept and added so far."""
    unencoded: str = ""
    """The end of `text` that is not in the segment yet. Its tokens are context."""
    reasoning_opening: str = ""
    """The text with which the generation prompt opens reasoning, directly before `text`; known once the prompt is encoded."""
    continues: bool = False
    """Whether the model's last turn is resumed. Then there are no new messages and no new generation prompt."""


_NEW_TURN = PartialTurn()
"""A turn that begins with its first sampled token."""


class Session:
    """One running conversation. All methods that raise, raise Failed."""

    def __init__(self, trajectory: Trajectory, context: RolloutContext) -> None:
        self.trajectory = trajectory
        """The record, filled while the conversation runs."""
        self.turns_answered = 0
        """Turns that the environment has answered: the index of the turn in progress."""
        self.truncation_reason: Stop | None = Stop.LENGTH
        """The limit that bounded the last turn: why the conversation ends if that turn was cut. None if the environment bounded
        the turn and answers it, cut or not."""
        self._context = context
        """Engine, renderer, sampling, limits and thinking policy. The renderer is that of the row's template arguments, and of
        those that the environment asks for; nothing else changes."""
        self._segments = LiveSegments(context)
        """The current segment and its messages, and those that the environment may return to."""
        self._new_messages: list[Message] = []
        """Messages of `trajectory.messages` that have no tokens yet, in order."""
        self._partial = _NEW_TURN
        """The beginning of the next turn."""
        self._prompt: EncodedMessages | None = None
        """`_new_messages` and `_partial` as tokens, once `stop_reason` has asked for their number; None until then."""
        self._first_prompt_tokens: int | None = None
        """Length of the conversation's first prompt, which `limits.response_tokens` does not count."""
        self._sampling_change = SamplingChange()
        """The environment's last change. It applies to all turns until the next change."""
        self._calls = 0
        """Tool calls of the conversation so far, for their ids. The calls of a turn that is resumed do not count: the turn that
        continues it has them."""
        self._masked: dict[int, set[int]] = {}
        """Sampled tokens that are not trained on, by turn and position. Applied in `finish`: until then the segment's columns
        say which tokens the model sampled."""

    def begin(self, opening: Opening) -> None:
        """Take the environment's opening messages and tools."""
        with boundary("environment"):
            check_opening(opening)
        opening = replace(opening, messages=self._escaped(opening.messages))
        self._use_template_arguments(opening.chat_template_kwargs or {})
        self._sampling_change = opening.sampling or self._sampling_change
        self.trajectory.tools = tuple(opening.tools)
        self.trajectory.messages.extend(opening.messages)
        self._new_messages = list(opening.messages)
        self._segments.begin(opening.prompt_ids)
        if opening.prefill:
            self._partial = PartialTurn(text=opening.prefill, unencoded=opening.prefill)

    async def stop_reason(self) -> Stop | None:
        """Why there is no further turn of the model, or None."""
        limits, trajectory = self._context.limits, self.trajectory
        if (stop := limits.stop_reason(trajectory, 0)) is not None:
            return stop  # before a prompt is encoded that is not needed
        prompt = await self._next_prompt()
        length = len(self._history.segment) + len(prompt.token_ids)
        stop = limits.stop_reason(trajectory, length, self._response_tokens(length))
        if stop is Stop.CONTEXT and not trajectory.turns:
            bound, fix = "limits.context", "raise it"
            if limits.context == longest_sequence(self._context.engine):
                bound, fix = "the engine's context", "raise it, if the engine has servers and the model takes more"
            raise Failed(
                Failure(
                    "row",
                    f"the prompt has {length} tokens and {bound} is {limits.context}, so there is no room for an answer: {fix}, "
                    "or shorten the prompt",
                )
            )
        return stop

    async def generate(self) -> Turn:
        """Append the prompt to the segment, let the engine sample one turn, and append that."""
        trajectory, began = self.trajectory, time.time()
        segment = self._append_prompt(await self._next_prompt())
        request = self._request(segment)
        started = time.perf_counter()
        with boundary("engine"):
            completion = (await self._context.engine.generate(request)).frozen()
            segment.append_completion(len(trajectory.turns), completion)
        seconds = time.perf_counter() - started
        same_kind = not trajectory.turns or trajectory.logprob_kind == completion.logprob_kind
        trajectory.logprob_kind = completion.logprob_kind if same_kind else LogprobKind.NONE
        turn = self._add_turn(replace(completion, routes=None))  # the segment has them
        turn.prompt_tokens = len(segment) - len(completion.token_ids)
        turn.constraint = request.constraint
        if request.constraint is not None and self._context.skip_forms:
            self._masked[turn.index] = set(range(len(completion.token_ids)))
        turn.started, turn.seconds_engine = began, seconds
        return turn

    def apply_reply(self, turn: Turn, reply: Reply) -> None:
        """Take the environment's reply to the last turn."""
        trajectory = self.trajectory
        with boundary("environment"):
            annotate_turns(trajectory, turn, reply)
        for index, positions in reply.masked.items():
            self._masked.setdefault(index, set()).update(positions)
        self.turns_answered += 1
        if reply.sampling is not None:
            self._sampling_change = reply.sampling
        if reply.resume is not None:
            with boundary("tokens"):
                self._reopen_turn(turn, reply.resume)
            return  # `check_reply` has refused messages, tools and a rewrite beside it
        if reply.edit is not None:
            with boundary("tokens"):
                self._edit_turn(turn, reply.edit)
        if reply.rewrite is not None:
            self._replace_history(self._escaped(reply.rewrite), reply.returns_to)
        if not reply.done:
            with boundary("environment"):
                self._take_prompt(turn, reply)
        if reply.tools is not None and tuple(reply.tools) != trajectory.tools:
            trajectory.tools = tuple(reply.tools)  # the next prompt begins a new segment
        if reply.chat_template_kwargs is not None:
            self._use_template_arguments(reply.chat_template_kwargs)
        messages = self._presentable(turn, reply.messages)
        trajectory.messages.extend(messages)
        if not reply.done:
            self._new_messages.extend(messages)
            if reply.prefill:
                self._partial = PartialTurn(text=reply.prefill, unencoded=reply.prefill)

    def apply_final_reply(self, reply: Reply) -> None:
        """Take what the environment says of the turns after a limit ended the conversation."""
        with boundary("environment"):
            annotate_turns(self.trajectory, self.trajectory.turns[-1], replace(reply, done=True), source="final_reward")
        for index, positions in reply.masked.items():
            self._masked.setdefault(index, set()).update(positions)

    def finish(self, stop: Stop) -> None:
        """The conversation has ended: compare its segments with the template, and apply the masks."""
        self.trajectory.stop = stop
        for history in (*self._segments.earlier.values(), self._history):
            self._check_tokens(history)
        for index, positions in self._masked.items():
            for segment in self.trajectory.segments:
                segment.mask_tokens(index, positions)

    def release(self) -> None:
        """Free what the engine keeps for the conversation."""
        self._context.engine.release(self.trajectory.id)

    @property
    def _history(self) -> SegmentHistory:
        """The current segment and its messages."""
        return self._segments.current

    def _use_template_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Render the prompts from now on with the row's template arguments and with these, which are the environment's."""
        with boundary("tokens"):
            renderer = self._context.renderer.for_arguments({**self.trajectory.row.chat_template_kwargs, **arguments})
        if renderer is not self._context.renderer:
            self._context = replace(self._context, renderer=renderer)
            self._segments.use(self._context)

    # the prompt of a turn

    async def _next_prompt(self) -> EncodedMessages:
        """The tokens between the last turn and the next one. Encoded once, appended by `generate`. A long text is encoded beside
        the event loop, which other conversations use."""
        if self._prompt is None:
            size = text_size(self._new_messages) + len(self._partial.unencoded)
            with boundary("tokens"):
                self._prompt = (
                    self._encode_prompt() if size <= _SHORT_TEXT else await off_loop(self._encode_prompt, long=True)
                )
            if self._first_prompt_tokens is None:
                self._first_prompt_tokens = len(self._prompt.token_ids)
        return self._prompt

    def _encode_prompt(self) -> EncodedMessages:
        history, messages, tools = self._history, self._new_messages, self.trajectory.tools
        if self._partial.continues:
            prompt = EncodedMessages(token_ids=())
        elif history.given is not None:
            prompt = history.encode_given()
        elif not history.segment:
            prompt = history.encode_opening(messages, tools)
        else:
            prompt = history.encode_bridge(messages, tools, self._context)
            if prompt is None:
                self._check_tokens(history)  # the segment ends here
                prompt = history.restart(messages, tools, self._context)
        if not self._partial.unencoded:
            return prompt
        history.mark_injected(len(history.segment) + len(prompt.token_ids))
        last_token = (prompt.token_ids or history.segment.token_ids)[-1]
        added = self._context.renderer.encode_continuation(last_token, self._partial.unencoded)
        return replace(prompt, token_ids=(*prompt.token_ids, *added))

    def _append_prompt(self, prompt: EncodedMessages) -> Segment:
        """Append the next prompt to the current segment, which is returned."""
        history = self._history
        segment, position = history.segment, len(history.segment)
        if not segment:
            self.trajectory.segments.append(segment)
        segment.append_context(prompt.token_ids, prompt.media)
        history.append_messages(prompt, position)
        self._new_messages, self._prompt = [], None
        if prompt.reasoning_opening and not self._partial.continues:
            self._partial = replace(self._partial, reasoning_opening=prompt.reasoning_opening)
        return segment

    def _request(self, segment: Segment) -> Request:
        """The request for the next turn, bounded by the limits and the environment's change of the sampling."""
        context, trajectory, change = self._context, self.trajectory, self._sampling_change
        response = self._response_tokens(len(segment))
        max_tokens, self.truncation_reason = context.limits.completion_budget(
            trajectory, len(segment), response, change
        )
        sampling = replace(
            context.sampling,
            max_tokens=max_tokens,
            stop=context.sampling.stop if change.stop is None else tuple(change.stop),
            stop_token_ids=(
                *context.sampling.stop_token_ids,
                *context.renderer.stop_token_ids,
                *change.stop_token_ids,
            ),
        )
        with boundary("tokens"):
            constraint = context.renderer.constraint(
                trajectory.tools,
                change,
                stops=sampling.stop_token_ids,
                reasoning_opening=self._partial.reasoning_opening,
                before=self._partial.text,
            )
        if constraint is not None and (reason := context.no_forms):
            raise Failed(
                Failure("environment", f"the environment asks for a form of the turn (SamplingChange), and {reason}")
            )
        return Request(
            conversation=trajectory.id,
            token_ids=segment.token_ids,
            media=segment.media,
            sampling=sampling,
            seed=turn_seed(trajectory.seed, len(trajectory.turns)),
            routes=segment.routes,
            constraint=None if constraint is None else replace(constraint, start=len(segment)),
        )

    def _response_tokens(self, length: int) -> int:
        """How many of the first `length` tokens of the segment `limits.response_tokens` counts."""
        assert self._first_prompt_tokens is not None
        return max(0, length - self._first_prompt_tokens)

    # the model's turn

    def _add_turn(self, completion: Completion) -> Turn:
        """Parse what was sampled and add it to the trajectory as a turn and a message."""
        trajectory, history, partial = self.trajectory, self._history, self._partial
        with boundary("tokens"):
            parsed = self._parse_turn(completion.token_ids, partial.text, partial.reasoning_opening)
        turn = Turn(
            index=len(trajectory.turns),
            message=parsed.message,
            text=parsed.text[len(partial.text) :],
            reasoning_opening="" if partial.continues else partial.reasoning_opening,
            reasoning=parsed.reasoning,
            calls=parsed.calls,
            tools=trajectory.tools,
            chat_template_kwargs=self._context.renderer.template.arguments,
            finish_reason=completion.finish_reason,
            completion=completion,
        )
        trajectory.turns.append(turn)
        self._calls += len(turn.calls)
        if partial.continues:  # the new message begins with the text of the one that it replaces
            trajectory.messages.pop()
            history.pop_turn()
        self._partial = _NEW_TURN
        turn.history, turn.message_index = len(trajectory.previous_histories), len(trajectory.messages)
        trajectory.messages.append(parsed.message)
        with boundary("tokens"):
            history.append_turn(parsed)
        return turn

    def _parse_turn(self, token_ids: Sequence[int], before: str, reasoning_opening: str) -> ParsedTurn:
        """Parse a turn that consists of the text `before` and of sampled tokens."""
        return self._context.renderer.turn_parser.parse(
            token_ids,
            tools=self.trajectory.tools,
            first_call=self._calls,
            reasoning_opening=reasoning_opening,
            text_before=before,
        )

    def _reopen_turn(self, turn: Turn, resume: Resume) -> None:
        """Remove the end of the last turn from the segment, and make the rest the beginning of the next turn."""
        keep = len(turn.text) if resume.keep is None else resume.keep
        self._calls -= len(turn.calls)
        parsed, before, kept, turn.kept_tokens = self._cut_turn(turn, keep)
        self._partial = PartialTurn(
            text=before + turn.text[:keep] + resume.add,
            unencoded=turn.text[len(kept) : keep] + resume.add,
            reasoning_opening=parsed.reasoning_opening,
            continues=True,
        )
        # the message holds what was kept until the next turn replaces it; a limit may end the conversation before that
        self._replace_last_message(before + kept, parsed.reasoning_opening)

    def _edit_turn(self, turn: Turn, edit: Edit) -> None:
        """Replace the end of the last turn with other text, as context. The turn has ended."""
        parsed, before, kept, _ = self._cut_turn(turn, edit.keep)
        segment, added = self._history.segment, turn.text[len(kept) : edit.keep] + edit.add
        if added:
            self._history.mark_injected(len(segment))
            segment.append_context(self._context.renderer.encode_continuation(segment.token_ids[-1], added))
        self._calls -= len(turn.calls)
        self._calls += len(self._replace_last_message(before + kept + added, parsed.reasoning_opening).calls)

    def _cut_turn(self, turn: Turn, keep: int) -> tuple[ParsedTurn, str, str, int]:
        """Remove the tokens of the last turn after its first `keep` characters, and its message from the history.

        Returns the complete turn as it was parsed, the text of it that was not sampled in this turn (prefilled, or kept when it
        was resumed before), and the text and the number of the sampled tokens that stay.
        """
        assert turn.completion is not None
        history, token_ids = self._history, turn.completion.token_ids
        # A cut is made between tokens, because each sampled token has a log-prob of its own and half a token has none. With the
        # tokens "he", "llo", "!" and keep=4, "hell" ends inside "llo": count=1 and kept="he", and the caller writes the "ll"
        # that is missing as context. Invariant: the sampled tokens that stay are a prefix of those that the engine returned,
        # so their log-probs and versions stay right; no text is encoded again to a token that counts as sampled.
        count, kept = self._context.renderer.token_prefix(token_ids, turn.text[:keep])
        history.segment.truncate(len(history.segment) - len(token_ids) + count)
        parsed = history.pop_turn()
        return parsed, parsed.text[: len(parsed.text) - len(turn.text)], kept, count

    def _replace_last_message(self, text: str, reasoning_opening: str) -> ParsedTurn:
        """Make `text` the model's last message."""
        parsed = self._parse_turn((), text, reasoning_opening)
        self.trajectory.messages[-1] = parsed.message
        self._history.append_turn(parsed)
        return parsed

    # the environment's reply

    def _replace_history(self, messages: Sequence[Message], returns_to: EarlierHistory | None) -> None:
        """Continue with other messages: in a new segment, or in that of an earlier history."""
        trajectory = self.trajectory
        with boundary("environment"):
            self._segments.replace(len(trajectory.previous_histories), None if returns_to is None else returns_to.index)
        trajectory.previous_histories.append(list(trajectory.messages))
        if returns_to is None:
            self._new_messages = list(messages)
            trajectory.messages[:] = messages
            return
        self._new_messages = list(messages[returns_to.first_new :])
        trajectory.messages[:] = [*trajectory.previous_histories[returns_to.index], *self._new_messages]

    def _take_prompt(self, turn: Turn, reply: Reply) -> None:
        """Note the next prompt that the environment wrote as tokens. Sampled tokens of the last turn that it leaves out are
        removed.

        Raises ValueError if the prompt does not continue the segment, or if a prompt is missing or not expected.
        """
        history, prompt = self._history, reply.prompt_ids
        from_tokens = self._segments.from_tokens
        if from_tokens is not (prompt is not None):
            had, fix = (
                ("", "give each Reply prompt_ids") if from_tokens else ("no ", "leave prompt_ids out of the Reply")
            )
            raise ValueError(f"the conversation began with an Opening that had {had}prompt_ids: {fix}")
        if prompt is None:
            return
        segment = history.segment
        kept = common_length(segment.token_ids, prompt)
        removed = len(segment) - kept
        last = 0 if reply.returns_to is not None or turn.completion is None else len(turn.completion.token_ids)
        if segment and removed > last:
            raise ValueError(
                f"Reply(prompt_ids=...): the prompt of {len(prompt)} tokens differs from the segment at token {kept}, and only "
                f"the last {last} tokens, those of the last turn, can be left out: begin a new segment with rewrite"
            )
        if segment and removed:
            self._cut_tokens(turn, kept)
        history.given = prompt

    def _cut_tokens(self, turn: Turn, length: int) -> None:
        """Remove the sampled tokens of the last turn after the first `length` tokens of the segment."""
        assert turn.completion is not None
        history = self._history
        turn.kept_tokens = len(turn.completion.token_ids) - (len(history.segment) - length)
        history.segment.truncate(length)
        parsed = history.pop_turn()
        self._calls -= len(parsed.calls)
        before = parsed.text[: len(parsed.text) - len(turn.text)]
        cut = self._parse_turn(turn.completion.token_ids[: turn.kept_tokens], before, parsed.reasoning_opening)
        self._calls += len(cut.calls)
        self.trajectory.messages[-1] = cut.message
        history.append_turn(cut)

    def _presentable(self, turn: Turn, messages: Sequence[Message]) -> list[Message]:
        """The messages with those of tools as the model can receive them."""
        vision = self._context.renderer.vision
        with boundary("tokens"):
            present = without_media if vision is None else vision.clean_tool_message
            return self._escaped(presentable(turn, messages, present))

    def _escaped(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with control tokens that stand as text in those of others kept text."""
        with boundary("tokens"):
            return [self._context.renderer.escaped(one, self.trajectory.escaped) for one in messages]

    def _check_tokens(self, history: SegmentHistory) -> None:
        """The sanity check of a segment. The first mismatch of a conversation is kept."""
        if history.segment and self.trajectory.template_mismatch is None:
            with boundary("tokens"):
                self.trajectory.template_mismatch = history.template_mismatch()
