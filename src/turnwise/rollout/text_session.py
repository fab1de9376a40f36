"""One conversation with an endpoint: messages are sent, and a message comes back. No token is known, so nothing can be trained.

The environment, the limits and the loop are those of a conversation with an engine. `Trajectory.segments` stays empty;
`Turn.usage` has the numbers of tokens that the endpoint reports, from which the limits are computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.chat.media_parts import has_media, without_media
from turnwise.errors import Failed, boundary
from turnwise.rollout.context import TextContext
from turnwise.rollout.replies import annotate_turns, check_opening, presentable, turn_seed
from turnwise.rollout.text_messages import ParsedMessage, parse_message, request_messages
from turnwise.services.chat_endpoint import ChatAnswer, ContextFullError
from turnwise.types import Failure, Message, Opening, Reply, SamplingChange, Stop, Trajectory, Turn

__all__ = ["TextSession"]

_SEED_BITS = 31  # servers read the seed as a signed integer of 32 or 64 bits


class TextSession:
    """One running conversation with an endpoint. All methods that raise, raise Failed."""

    def __init__(self, trajectory: Trajectory, context: TextContext) -> None:
        self.trajectory = trajectory
        """The record, filled while the conversation runs."""
        self.turns_answered = 0
        """Turns that the environment has answered: the index of the turn in progress."""
        self.truncation_reason: Stop | None = Stop.LENGTH
        """The limit that bounded the last turn, or `context` if the endpoint had no room for a turn. None if the environment
        bounded the turn and answers it, cut or not."""
        self._context = context
        self._sampling_change = SamplingChange()
        """The environment's last change. It applies to all turns until the next change."""
        self._calls = 0
        """Tool calls of the conversation so far, for their ids."""
        self._first_prompt_tokens = 0
        """Length of the first prompt, which `limits.response_tokens` does not count."""
        self._template_arguments: Mapping[str, Any] = {}
        """The environment's arguments of the server's chat template."""

    def begin(self, opening: Opening) -> None:
        """Take the environment's opening messages and tools."""
        with boundary("environment"):
            check_opening(opening)
            _refuse_tokens(opening.prompt_ids, opening.sampling, "Opening")
        self._refuse_media(opening.messages, "row")
        self._sampling_change = opening.sampling or self._sampling_change
        self._template_arguments = opening.chat_template_kwargs or {}
        self.trajectory.tools = tuple(opening.tools)
        self.trajectory.messages.extend(opening.messages)

    def stop_reason(self) -> Stop | None:
        """Why there is no further turn of the model, or None.

        The length of the next prompt is known only when the endpoint has answered it; until then it counts as long as the last
        prompt and its answer.
        """
        length = self._length()
        return self._context.limits.stop_reason(self.trajectory, length, self._response_tokens(length))

    async def generate(self) -> Turn | None:
        """Send the messages, and add the answer as a turn. None: the messages do not fit into the model's context."""
        trajectory, began, started = self.trajectory, time.time(), time.perf_counter()
        length = self._length()
        response, change = self._response_tokens(length), self._sampling_change
        budget, self.truncation_reason = self._context.limits.completion_budget(trajectory, length, response, change)
        with boundary("engine"):
            answer = await self._ask(budget)
        if answer is None:
            self.truncation_reason = Stop.CONTEXT
            if trajectory.turns:
                return None
            raise Failed(
                Failure("row", "the prompt does not fit into the context of the endpoint's model: leave it out")
            )
        self._check_usage(answer)
        turn = self._add_turn(answer, budget)
        turn.started, turn.seconds_engine = began, time.perf_counter() - started
        return turn

    def apply_reply(self, turn: Turn, reply: Reply) -> None:
        """Take the environment's reply to the last turn."""
        trajectory = self.trajectory
        with boundary("environment"):
            annotate_turns(trajectory, turn, reply)
            _refuse_tokens(reply.prompt_ids, reply.sampling, "Reply")
        self.turns_answered += 1
        unsupported = {
            "resume": reply.resume is not None,
            "prefill": bool(reply.prefill),
            "edit": reply.edit is not None,
        }
        if field := next((name for name, given in unsupported.items() if given), None):
            raise Failed(
                Failure(
                    "engine",
                    f"Reply({field}=...) changes or begins a turn of the model as text, and an OpenAI-compatible endpoint writes "
                    f"each turn itself: use an engine that samples tokens (engine.name=local)",
                )
            )
        if reply.sampling is not None:
            self._sampling_change = reply.sampling
        if reply.chat_template_kwargs is not None:
            self._template_arguments = reply.chat_template_kwargs
        if reply.rewrite is not None:
            trajectory.previous_histories.append(list(trajectory.messages))
            trajectory.messages[:] = reply.rewrite
        if reply.tools is not None and tuple(reply.tools) != trajectory.tools:
            trajectory.tools = tuple(reply.tools)
        messages = presentable(turn, reply.messages, without_media)
        self._refuse_media([*(reply.rewrite or ()), *messages], "environment")
        trajectory.messages.extend(messages)

    def apply_final_reply(self, reply: Reply) -> None:
        """Take what the environment says of the turns after a limit ended the conversation."""
        with boundary("environment"):
            annotate_turns(self.trajectory, self.trajectory.turns[-1], replace(reply, done=True), source="final_reward")

    def finish(self, stop: Stop) -> None:
        """The conversation has ended."""
        self.trajectory.stop = stop

    def release(self) -> None:
        """Nothing is held for the conversation."""

    async def _ask(self, budget: int) -> ChatAnswer | None:
        """The endpoint's answer of at most `budget` tokens, or fewer if its context is full before. None: no room for an answer.

        Servers refuse a prompt that fits if the prompt and `max_tokens` together do not fit. Without `max_tokens`, they use the
        room that is left, which is then less than `budget`.
        """
        context, trajectory = self._context, self.trajectory
        history = len(trajectory.previous_histories)
        messages, fields = request_messages(trajectory.messages, trajectory.turns, history=history), self._fields()
        try:
            limited = {**fields, context.max_tokens_field: budget}
            return await context.chat.complete(messages, tools=trajectory.tools, fields=limited)
        except ContextFullError:
            try:
                return await context.chat.complete(messages, tools=trajectory.tools, fields=fields)
            except ContextFullError:
                return None

    def _fields(self) -> dict[str, Any]:
        """The sampling of the next turn and the arguments of the chat template, as fields of the request."""
        sampling, change = self._context.sampling, self._sampling_change
        stop = list(sampling.stop if change.stop is None else change.stop)
        seed = turn_seed(self.trajectory.seed, len(self.trajectory.turns)) & ((1 << _SEED_BITS) - 1)
        fields: dict[str, Any] = {"temperature": sampling.temperature, "seed": seed}
        if sampling.top_p < 1.0:
            fields["top_p"] = sampling.top_p
        if stop:
            fields["stop"] = stop
        row = self.trajectory.row.chat_template_kwargs
        if arguments := {**self._context.chat_template_kwargs, **row, **self._template_arguments}:
            fields["chat_template_kwargs"] = arguments  # the field's name in vLLM and SGLang
        return fields

    def _add_turn(self, answer: ChatAnswer, budget: int) -> Turn:
        """Parse the answer and add it to the trajectory as a turn and a message."""
        trajectory, usage = self.trajectory, answer.usage
        with boundary("engine"):
            parsed: ParsedMessage = parse_message(answer.message, first_call=self._calls)
        cut = answer.finish_reason == "length"
        if cut and usage is not None and usage.completion_tokens < budget:
            self.truncation_reason = Stop.CONTEXT  # the endpoint's own context ended the turn before our limit did
        turn = Turn(
            index=len(trajectory.turns),
            message=parsed.message,
            text=parsed.text,
            message_index=len(trajectory.messages),
            history=len(trajectory.previous_histories),
            reasoning=parsed.reasoning,
            calls=parsed.calls,
            tools=trajectory.tools,
            finish_reason="length" if cut else "stop",
            usage=usage,
        )
        if usage is not None and not trajectory.turns:
            self._first_prompt_tokens = usage.prompt_tokens
        trajectory.turns.append(turn)
        trajectory.messages.append(parsed.message)
        self._calls += len(turn.calls)
        return turn

    def _length(self) -> int:
        """Tokens of the last prompt and its answer, as far as the endpoint reported them."""
        usage = self.trajectory.turns[-1].usage if self.trajectory.turns else None
        return 0 if usage is None else usage.prompt_tokens + usage.completion_tokens

    def _response_tokens(self, length: int) -> int:
        return max(0, length - self._first_prompt_tokens)

    def _check_usage(self, answer: ChatAnswer) -> None:
        """Refuse an answer without counts of tokens if a limit needs them."""
        limits = self._context.limits
        needed = {"tokens": limits.tokens, "response_tokens": limits.response_tokens, "context": limits.context}
        name = next((name for name, value in needed.items() if value is not None), None)
        if answer.usage is None and name is not None:
            raise Failed(
                Failure(
                    "engine",
                    f"limits.{name}={needed[name]} cannot be applied, because the endpoint does not report the number of tokens "
                    f"(usage): remove the limit",
                )
            )

    def _refuse_media(self, messages: Sequence[Message], kind: str) -> None:
        if has_media(messages):
            raise Failed(
                Failure(
                    kind,
                    "a message contains an image or a video, and an OpenAI-compatible endpoint gets text only: use an engine "
                    "that samples tokens (engine.name=local), or rows without images",
                )
            )


def _refuse_tokens(prompt_ids: Sequence[int] | None, sampling: SamplingChange | None, where: str) -> None:
    """Raises ValueError if an environment names tokens, which an endpoint does not have."""
    if prompt_ids is not None or (sampling is not None and sampling.stop_token_ids):
        name = "prompt_ids" if prompt_ids is not None else "sampling.stop_token_ids"
        raise ValueError(
            f"{where}({name}=...): an OpenAI-compatible endpoint takes messages and no tokens: use an engine that samples tokens "
            f"(engine.name=local)"
        )
