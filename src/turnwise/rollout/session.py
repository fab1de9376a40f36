"""The mechanism of a conversation: the only code that appends a token.

A session knows one trajectory, its engine and its renderer. It does not know who answers the model, nor when enough is
enough. What is heard waits as messages until the model is to speak; only then does it become tokens, cue included, in one
piece: so two messages in a row, or an opening without a question, never leave a stray header behind.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from turnwise.chat.media import for_readers
from turnwise.chat.renderer import EncodedMessages, Renderer, Thinking
from turnwise.engines.engine import Engine
from turnwise.errors import Failed, boundary
from turnwise.rollout.limits import Limits
from turnwise.rollout.segment_history import SegmentHistory
from turnwise.types import (
    Completion,
    Failure,
    LogprobKind,
    Message,
    Opening,
    Reply,
    Request,
    Resume,
    Sampling,
    SamplingChange,
    Segment,
    Stop,
    ToolOutcome,
    Trajectory,
    Turn,
)
from turnwise.user_code.reward_number import reward_number

__all__ = ["Session"]


class Session:
    """One conversation in the making. `begin`, then `reached`, `generate` and `hear` by turns, then `finish`."""

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        limits: Limits,
        thinking: Thinking = "keep",
    ) -> None:
        self.trajectory = trajectory
        self._engine = engine
        self._renderer = renderer
        self._sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *renderer.stop_token_ids))
        self._limits = limits
        self._change = SamplingChange()
        self._new_messages: list[Message] = []
        self._encoded_next: EncodedMessages | None = None
        self._segment: Segment | None = None
        self._history = SegmentHistory(renderer, thinking)
        self._opened = ""  # what the cue of the turn has opened a thought with
        self._before = ""  # what of the turn that is going on stands already, where it is resumed
        self._prefill = ""  # what the next turn begins with
        self._goes_on = False  # whether the model is to go on with its last answer
        self._masked: dict[int, set[int]] = {}
        self._calls = 0
        self._prompt_tokens: int | None = None  # of the opening, known when it has been encoded
        self.turns_answered = 0
        """Turns that the environment has answered: the index of the turn that is going on."""
        self.truncation_reason = Stop.LENGTH
        """Why the last turn had no more room, if it was cut."""

    def begin(self, opening: Opening) -> None:
        """Lay the opening on the table."""
        with boundary("environment"):
            if not opening.messages:
                raise ValueError("the environment's Opening has no messages; there is nothing to answer")
            _refuse_no_messages(opening.messages)
            self._change_sampling(opening.sampling, "Opening")
        self.trajectory.messages.extend(opening.messages)
        self.trajectory.tools = self._history.tools = tuple(opening.tools)
        self._new_messages = list(opening.messages)

    def stop_reason(self) -> Stop | None:
        """Why the model is not to speak again, or None."""
        limits, trajectory = self._limits, self.trajectory
        if (stop := limits.stop_reason(trajectory, 0)) is not None:
            return stop  # before anything is encoded that nobody would read
        piece = self._encoded()
        length = len(self._segment or ()) + len(piece.token_ids)
        stop = limits.stop_reason(trajectory, length, self._response_tokens(length))
        if stop is Stop.CONTEXT and not trajectory.turns:
            raise Failed(
                Failure(
                    "row",
                    f"the prompt has {length} tokens and limits.context is {limits.context}, so there is no room for an "
                    f"answer: raise limits.context, or leave the row out",
                )
            )
        return stop

    async def generate(self) -> Turn:
        """Let the model speak; what was heard before becomes tokens now."""
        clock = time.time()
        piece = self._encoded()
        if self._segment is None:
            self._segment = Segment()
            self.trajectory.segments.append(self._segment)
        segment, trajectory = self._segment, self.trajectory
        place = len(segment)
        segment.append_context(piece.token_ids, piece.media)
        self._history.append_messages(piece, place)
        self._new_messages, self._encoded_next = [], None
        if not self._goes_on:
            self._opened = piece.open_thought
            self._before, self._prefill = self._prefill, ""

        room, self.truncation_reason = self._limits.completion_budget(
            trajectory, len(segment), self._response_tokens(len(segment)), most=self._change.max_tokens
        )
        index = len(trajectory.turns)
        stop = self._sampling.stop if self._change.stop is None else tuple(self._change.stop)
        request = Request(
            conversation=trajectory.id,
            token_ids=segment.token_ids,
            media=segment.media,
            sampling=replace(self._sampling, max_tokens=room, stop=stop),
            seed=_mix(trajectory.seed, index),
        )
        started = time.perf_counter()
        with boundary("engine"):
            completion = await self._engine.generate(request)
            segment.append_completion(index, completion)
        turn = self._read(completion, index)
        turn.started, turn.seconds_engine = clock, time.perf_counter() - started
        same = index == 0 or trajectory.logprob_kind == completion.logprob_kind
        trajectory.logprob_kind = completion.logprob_kind if same else LogprobKind.NONE
        return turn

    def _response_tokens(self, length: int) -> int:
        """How many of the first `length` tokens of the segment follow the conversation's first prompt."""
        if self._prompt_tokens is None:
            self._prompt_tokens = length
        return max(0, length - self._prompt_tokens)

    def _read(self, completion: Completion, index: int) -> Turn:
        """Take in what the model has said."""
        trajectory, before, self._before = self.trajectory, self._before, ""
        with boundary("tokens"):
            said = self._renderer.parse_turn(
                completion.token_ids,
                tools=trajectory.tools,
                first_call=self._calls,
                thinking=self._opened,
                before=before,
            )
        self._calls += len(said.calls)
        turn = Turn(
            index=index,
            message=said.message,
            text=said.text[len(before) :],
            thought_opening="" if self._goes_on else self._opened,
            reasoning=said.reasoning,
            calls=said.calls,
            tools=trajectory.tools,
            finish_reason=completion.finish_reason,
            completion=completion,
        )
        trajectory.turns.append(turn)
        if self._goes_on:  # the message that stands there is a part of this one
            del trajectory.messages[-1]
            self._history.pop_turn()
            self._goes_on = False
        turn.history, turn.message_index = len(trajectory.previous_histories), len(trajectory.messages)
        trajectory.messages.append(said.message)
        with boundary("tokens"):
            self._history.append_turn(said)
        return turn

    def apply_reply(self, turn: Turn, reply: Reply) -> None:
        """Take in the environment's answer to a turn."""
        trajectory = self.trajectory
        with boundary("environment"):
            _check_reply(reply, turn)
            for index, places in reply.masked.items():
                _check_masked(index, places, trajectory.turns)
                self._masked.setdefault(index, set()).update(places)
            for index in reply.learn_from:
                _check_learn_from(index, trajectory.turns)
                trajectory.turns[index].learn_from = True
            turn.add_reward(reward_number(reply.reward, "Reply(reward=...)"), "environment")
            turn.info.update(reply.info)
            turn.outcomes = tuple(reply.outcomes)
            self._change_sampling(reply.sampling, "Reply")
        self.turns_answered += 1
        if reply.resume is not None:
            with boundary("tokens"):
                self._resume(turn, reply.resume)
        if reply.rewrite is not None:
            self._check()  # the segment ends here, so this is its last chance
            trajectory.previous_histories.append(list(trajectory.messages))
            trajectory.messages[:] = reply.rewrite
            self._segment, self._new_messages = None, list(reply.rewrite)
            self._history.clear()
        messages = self._shown(turn, reply.messages)
        trajectory.messages.extend(messages)
        if not reply.done:
            self._new_messages.extend(messages)
            self._prefill = reply.prefill

    def _change_sampling(self, change: SamplingChange | None, where: str) -> None:
        if change is not None:
            _check_sampling(change, where)
            self._change = change

    def _shown(self, turn: Turn, messages: Sequence[Message]) -> list[Message]:
        """The messages as the model can be shown them; where that is not what a tool has said, its outcome says so too."""
        vision = self._renderer.vision
        show = for_readers if vision is None else vision.shown
        with boundary("tokens"):
            shown = [show(one) if one["role"] == "tool" else one for one in messages]
        told = {
            str(now.get("tool_call_id")): str(now["content"])
            for was, now in zip(messages, shown, strict=True)
            if isinstance(was.get("content"), list | tuple) and isinstance(now["content"], str)
        }
        turn.outcomes = tuple(
            replace(one, content=told[one.id], error="raised") if one.id in told else one for one in turn.outcomes
        )
        return shown

    def finish(self, stop: Stop) -> None:
        """The conversation is over; compare its tokens with the template's."""
        self.trajectory.stop = stop
        self._check()
        for index, places in self._masked.items():  # not before: until now it is told apart who said what
            for segment in self.trajectory.segments:
                segment.mask_tokens(index, places)

    def _resume(self, turn: Turn, resume: Resume) -> None:
        """Take back what the environment has cut off, and put its words behind what stays."""
        assert self._segment is not None
        assert turn.completion is not None
        segment, ids, text = self._segment, turn.completion.token_ids, turn.text
        keep = len(text) if resume.keep is None else resume.keep
        kept, words = self._renderer.token_prefix(ids, text[:keep])
        turn.kept_tokens = kept
        segment.truncate(len(segment) - len(ids) + kept)
        added = text[len(words) : keep] + resume.add
        whole = self._history.pop_turn()
        before = whole[: len(whole) - len(text)]  # it may have been resumed before, or begun by somebody else
        self._before = before + text[:keep] + resume.add
        self._encoded_next = EncodedMessages(token_ids=self._renderer.encode_continuation(segment.token_ids[-1], added))
        self._history.mark_injected(len(segment))
        self._calls -= len(turn.calls)
        # until the model goes on, and for ever where there is no room for that, its message is what stands of it
        stands = self._renderer.parse_turn(
            (), tools=self.trajectory.tools, first_call=self._calls, thinking=self._opened, before=before + words
        )
        self.trajectory.messages[-1] = stands.message
        self._history.append_turn(stands)
        self._goes_on = True

    def _check(self) -> None:
        if self._segment is not None and self.trajectory.template_mismatch is None:
            with boundary("tokens"):
                self.trajectory.template_mismatch = self._history.template_mismatch(self._segment)

    def _encoded(self) -> EncodedMessages:
        """The tokens of what was heard, and the cue. Encoded once, appended when the model speaks."""
        if self._encoded_next is None:
            with boundary("tokens"):
                if self._segment is None:
                    if self.trajectory.tools:
                        _ = self._renderer.tool_format  # refuse before a token is spent
                    self._encoded_next = self._renderer.encode_opening(self._new_messages, self.trajectory.tools)
                else:
                    self._encoded_next = self._renderer.encode_bridge(
                        self._segment.token_ids[-1], self._new_messages, self._history.before
                    )
                    if self._history.needs_new_segment(self._segment, self._new_messages, self._encoded_next):
                        self._check()
                        self._encoded_next = self._history.encode_restart(self._new_messages)
                        self._segment = None
                if self._prefill:
                    ids = self._encoded_next.token_ids
                    self._history.mark_injected(len(self._segment or ()) + len(ids))
                    words = self._renderer.encode_continuation(ids[-1], self._prefill)
                    self._encoded_next = replace(self._encoded_next, token_ids=(*ids, *words))
        return self._encoded_next


def _check_reply(reply: Reply, turn: Turn) -> None:
    if not isinstance(reply, Reply):
        raise TypeError(f"the environment answered with a {type(reply).__name__}; step must return a Reply")
    for messages in (reply.rewrite or (), reply.messages):
        _refuse_no_messages(messages)
    _check_parts(reply)
    if reply.prefill and reply.done:
        raise ValueError(
            f"Reply(prefill={reply.prefill!r:.80}, done=True): nobody speaks any more; leave one of them out"
        )
    if reply.sampling is not None and reply.done:
        raise ValueError("Reply(sampling=..., done=True): there is no following turn; leave one of them out")
    if reply.resume is None:
        return
    if reply.messages or reply.done or reply.prefill or reply.rewrite is not None:
        raise ValueError(
            "a Reply with `resume` has no messages, no rewrite and is not done, nor has it a prefill: the model goes on"
        )
    keep = reply.resume.keep
    if keep is not None and not 0 <= keep <= len(turn.text):
        raise ValueError(
            f"Resume(keep={keep}) of an answer of {len(turn.text)} characters; keep 0 to {len(turn.text)} of it"
        )


def _check_parts(reply: Reply) -> None:
    """What is not messages: of the types that are said."""
    if not isinstance(reply.info, Mapping):
        raise TypeError(f"Reply(info={reply.info!r:.80}): info must be a dictionary")
    if not isinstance(reply.prefill, str):
        raise TypeError(f"Reply(prefill={reply.prefill!r:.80}): prefill must be a text")
    if not isinstance(reply.masked, Mapping):
        raise TypeError(f"Reply(masked={reply.masked!r:.80}): masked must be a dictionary of places by turn")
    for outcome in reply.outcomes:
        if not isinstance(outcome, ToolOutcome):
            raise TypeError(f"Reply(outcomes=...): one of them is {outcome!r:.80}; each must be a ToolOutcome")
    if reply.resume is not None and not (isinstance(reply.resume, Resume) and isinstance(reply.resume.add, str)):
        raise TypeError(f"Reply(resume={reply.resume!r:.80}): give Resume(keep=..., add='...')")


def _check_sampling(change: SamplingChange, where: str) -> None:
    if not isinstance(change, SamplingChange):
        raise TypeError(f"{where}(sampling={change!r:.80}): give SamplingChange(max_tokens=..., stop=[...])")
    most, stop = change.max_tokens, change.stop
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ValueError(
            f"SamplingChange(max_tokens={most!r:.80}): max_tokens must be an integer of at least 1; None is the recipe's limit"
        )
    if stop is not None and not (
        isinstance(stop, list | tuple) and all(isinstance(text, str) and text for text in stop)
    ):
        raise ValueError(f"SamplingChange(stop={stop!r:.80}): stop must be a list of texts that are not empty")


def _check_masked(index: int, places: Collection[int], turns: Sequence[Turn]) -> None:
    if index not in range(len(turns)):
        raise ValueError(
            f"Reply(masked={{{index}: ...}}): there is no turn {index}; the turns are 0 to {len(turns) - 1}"
        )
    completion = turns[index].completion
    count = 0 if completion is None else len(completion.token_ids)
    if wrong := [place for place in places if place not in range(count)]:
        raise ValueError(
            f"Reply(masked={{{index}: {wrong[:3]}}}): turn {index} sampled {count} tokens, 0 to {count - 1}"
        )


def _check_learn_from(index: int, turns: Sequence[Turn]) -> None:
    if index not in range(len(turns)):
        raise ValueError(f"Reply(learn_from=[{index}]): there is no turn {index}; the turns are 0 to {len(turns) - 1}")


def _refuse_no_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, Iterator):  # it could be read once only
        raise TypeError(f"messages must be a list; got a {type(messages).__name__}: put list(...) around it")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(
                f"messages must be a list of {{'role': ..., 'content': ...}}; one of them is {message!r:.80}"
            )


def _mix(seed: int, index: int) -> int:
    """A seed of its own for each turn (the finaliser of splitmix64)."""
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & 0x7FFFFFFFFFFFFFFF
