"""One conversation with an endpoint: messages are sent, and a message comes back. No token is known, so nothing can be trained.

The environment, the limits and the loop are those of a conversation with an engine. `Trajectory.segments` stays empty;
`Turn.usage` has the numbers of tokens that the endpoint reports, from which the limits are computed. Messages are sent and
read in the form of the OpenAI protocol.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.chat.media_parts import has_media, without_media
from turnwise.chat.tool_calls.parsing import MalformedCall, arguments_of, assign_ids, malformed_call, well_formed_call
from turnwise.chat.turn_format import call_field
from turnwise.environments.environment import annotate_turns, check_opening, presentable
from turnwise.errors import Failed, boundary
from turnwise.rollout.context import TextContext, turn_seed
from turnwise.services.chat import ChatAnswer, ContextFullError
from turnwise.types import Failure, Message, Opening, Reply, SamplingChange, Stop, ToolCall, Trajectory, Turn

# messages of the protocol

_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")
"""The keys of a message that the protocol has. Reasoning is not sent: the server's chat template would leave it out, or the
server would refuse it."""
_REASONING_KEYS = ("reasoning_content", "reasoning")
"""Where servers put the reasoning: vLLM and SGLang, and newer versions of vLLM."""
_REASONING = re.compile(r"\A\s*(?:<think>)?(?P<reasoning>.*?)</think>\s*", re.DOTALL)
_EXAMPLE = 'arguments in the form of a JSON object, such as {"name": "value"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage:
    """An endpoint's answer."""

    message: Message
    """The assistant message as it is recorded: `content`, and `tool_calls` and `reasoning_content` if there are any."""
    text: str
    """The content without reasoning."""
    reasoning: str
    calls: tuple[ToolCall, ...]
    """All calls, also those that cannot be read (with `error` set). The message has only those that can."""


def parse_message(message: Mapping[str, Any], *, first_call: int) -> ParsedMessage:
    """Read an endpoint's message; the ids of its calls count from `first_call`.

    Reasoning is read from the field of the server, or from the beginning of the content up to `</think>`. Text of any kind is
    accepted. Raises ValueError if the content or the calls have another type than the protocol says.
    """
    content = message.get("content")
    if isinstance(content, list):  # some servers send parts
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of an endpoint's message must be a text or null; got {content!r:.80}")
    text = content or ""
    reasoning = next((str(message[key]) for key in _REASONING_KEYS if message.get(key)), "")
    if not reasoning and (block := _REASONING.match(text)) is not None:
        reasoning, text = block["reasoning"].strip("\n"), text[block.end() :]
    calls = _calls(message.get("tool_calls"), first_call)
    parsed: Message = {"role": "assistant", "content": text}
    if reasoning:
        parsed["reasoning_content"] = reasoning
    if readable := [call for call in calls if call.error is None]:
        parsed["tool_calls"] = [call_field(call) for call in readable]
    return ParsedMessage(message=parsed, text=text, reasoning=reasoning, calls=calls)


def _calls(value: Any, first_call: int) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"tool_calls of an endpoint's message must be a list or null; got {value!r:.80}")
    return assign_ids((_call(item) for item in value), first_call)


def _call(item: Any) -> ToolCall:
    match item:
        case {"function": {"name": str(name), **function}} if name:
            arguments = function.get("arguments") or {}
        case _:
            return malformed_call("it has no function name", json.dumps(item, default=str), example=_EXAMPLE)
    id = item.get("id")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    try:
        return well_formed_call(name, arguments_of(arguments), text, id if isinstance(id, str) else "")
    except MalformedCall as problem:
        return malformed_call(problem, text, example=_EXAMPLE, name=name)


def request_messages(messages: Sequence[Message], turns: Sequence[Turn] = (), *, history: int = 0) -> list[Message]:
    """The messages of a conversation as an endpoint receives them. `turns` are its turns and `history` the number of the present
    history, as in `Turn.history`.

    The arguments of calls become JSON texts. A call that could not be read is sent too, with empty arguments: servers refuse
    the result of a call that is in no message. A result whose call the environment has removed becomes a user message.
    """
    calls_at = {turn.message_index: turn.calls for turn in turns if turn.history == history}
    sent: list[Message] = []
    known: set[str] = set()
    for index, message in enumerate(messages):
        kept: Message = {key: message[key] for key in _SENT if key in message}
        turn_calls = calls_at.get(index, ())
        calls = [call_field(call) for call in turn_calls] if turn_calls else message.get("tool_calls")
        if calls:
            kept["tool_calls"] = [_request_call(call) for call in calls]
            known.update(str(call.get("id")) for call in calls)
            kept["content"] = kept.get("content") or None
        if message["role"] == "tool":
            kept.pop("name", None)
            if str(message.get("tool_call_id")) not in known:
                kept = {"role": "user", "content": kept.get("content")}
        sent.append(kept)
    return sent


def _request_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": function.get("name"), "arguments": text}}


# the conversation

_NO_PREFILL = (
    "changes or begins a turn of the model as text, and an OpenAI-compatible endpoint writes each turn itself: use an engine "
    "that samples tokens (engine.name=local)"
)
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
            _refuse_unsupported(opening.prompt_ids, opening.sampling, "Opening")
            if opening.prefill:
                raise ValueError(f"Opening(prefill=...) {_NO_PREFILL}")
        self._refuse_media(opening.messages, "row")
        self._sampling_change = opening.sampling or self._sampling_change
        self._template_arguments = opening.chat_template_kwargs or {}
        self.trajectory.tools = tuple(opening.tools)
        self.trajectory.messages.extend(opening.messages)

    async def stop_reason(self) -> Stop | None:
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
            _refuse_unsupported(reply.prompt_ids, reply.sampling, "Reply")
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
                    f"Reply({field}=...) {_NO_PREFILL}",
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
            limited = {**fields, "max_tokens": budget}
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
        if arguments := self._arguments_of_template():
            fields["chat_template_kwargs"] = arguments  # the field's name in vLLM and SGLang
        return fields

    def _arguments_of_template(self) -> dict[str, Any]:
        row = self.trajectory.row.chat_template_kwargs
        return {**self._context.chat_template_kwargs, **row, **self._template_arguments}

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
            chat_template_kwargs=self._arguments_of_template(),
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


def _refuse_unsupported(prompt_ids: Sequence[int] | None, sampling: SamplingChange | None, where: str) -> None:
    """Raises ValueError if an environment names tokens, which an endpoint does not have, or asks for a form of the turn: turnwise
    cannot hold a server to it."""
    if prompt_ids is not None or (sampling is not None and sampling.stop_token_ids):
        name = "prompt_ids" if prompt_ids is not None else "sampling.stop_token_ids"
        raise ValueError(
            f"{where}({name}=...): an OpenAI-compatible endpoint takes messages and no tokens: use an engine that samples tokens "
            f"(engine.name=local)"
        )
    if sampling is not None and sampling.asks_for_form:
        given = {"answer_format": sampling.answer_format, "tool_names": sampling.tool_names}
        of_calls = "single_call" if sampling.single_call else "tool_choice"
        name = next((name for name, value in given.items() if value is not None), of_calls)
        raise ValueError(
            f"{where}(sampling=SamplingChange({name}=...)): the turns of an OpenAI-compatible endpoint are not sampled under a "
            f"grammar: use an engine or a policy in this process (engine.name=local, a policy with path), or leave {name} out"
        )
