"""What an ms-swift scheduler receives and returns, and what turnwise makes of it: data classes, replies, masks of tokens.

The data classes have ms-swift's names, constructors, and the fields that users access. ms-swift declares some of them with
pydantic; here all are dataclasses.

A scheduler changes a list of messages to say how the conversation continues. Three kinds of change are recognised: messages
added after the model's answer are appended; an edited answer is cut where the edit begins, and the model continues it; any
other change replaces the history.

turnwise trains on the tokens that were sampled, and never takes tokens from a scheduler. A token is trained on if the id that the
scheduler returned equals the sampled one and the mask is 1. If lengths or values do not fit together, the conversation ends with
an error that names the numbers."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turnwise.data.images import is_image, media_kind, media_value
from turnwise.types import Message as TurnwiseMessage
from turnwise.types import Reply, Resume, Row, ToolSchema, Turn
from turnwise.user_code.copies import copy_containers

Message = dict[str, Any]
Messages = list[Message]


@dataclass
class InferRequest:
    """A conversation to continue. Each `<image>` or `<video>` in a text refers to the next item of `images` or `videos`."""

    messages: Messages = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[ToolSchema] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("images", "audios", "videos"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                setattr(self, name, [value])


@dataclass
class RolloutInferRequest(InferRequest):
    """An `InferRequest` with the other columns of the row."""

    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str | None = None
    """The id of the trajectory."""
    add_eos: bool | Literal["auto"] | None = None


@dataclass
class RequestConfig:
    """Sampling parameters. None, and an empty `stop`, mean the recipe's values. A scheduler may change `max_tokens` and `stop`.
    The other parameters always have the recipe's values, in all conversations of a run."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False
    structured_outputs_regex: str | None = None


@dataclass
class Function:
    """The called function."""

    name: str
    arguments: str | None
    """The arguments as JSON text."""


@dataclass
class ChatCompletionMessageToolCall:
    """A tool call that the renderer parsed from the model's answer."""

    function: Function
    type: str = "function"
    id: str = ""


@dataclass
class ChatMessage:
    """A message of the model."""

    role: str
    content: str | None
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """One answer of the model: the text of this turn and its sampled tokens."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"] | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    """`{"content": [{"token": "token_id:17", "logprob": -0.4}, ...]}`, one item for each of `token_ids`."""
    messages: Messages | None = None
    token_ids: list[int] | None = None


@dataclass
class UsageInfo:
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class ChatCompletionResponse:
    """The response of an engine."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo | None = None
    id: str = ""
    object: str = "chat.completion"
    created: int = 0
    prompt_token_ids: list[int] | None = None


@dataclass
class RolloutOutput:
    """The return value of `run`. `response_token_ids` and `response_loss_mask` have one list for each assistant message."""

    response: ChatCompletionResponse | None = None
    messages: Messages | None = None
    response_token_ids: list[list[int]] = field(default_factory=list)
    response_loss_mask: list[list[int]] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("response_token_ids", "response_loss_mask", "rollout_logprobs"):
            value: Any = getattr(self, name)
            value = list(value) if value is not None else []
            if value and not isinstance(value[0], list | tuple):
                value = [value]
            setattr(self, name, [list(item) for item in value])

    def model_dump(self) -> dict[str, Any]:
        """The fields as a dictionary. The method has pydantic's name."""
        return dataclasses.asdict(self)


def choice_of(turn: Turn) -> ChatCompletionResponseChoice:
    """A turn as a choice of an engine's response. Its lists are copies, because schedulers append to them."""
    completion = turn.completion
    ids = list(completion.token_ids) if completion is not None else []
    logprobs = list(completion.logprobs) if completion is not None else []
    calls = [
        ChatCompletionMessageToolCall(
            id=call.id, function=Function(call.name, json.dumps(dict(call.arguments), ensure_ascii=False))
        )
        for call in turn.calls
        if call.error is None
    ]
    return ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage("assistant", turn.text, calls or None, turn.reasoning or None),
        finish_reason="length" if turn.finish_reason == "length" else "stop",
        logprobs={
            "content": [
                {"token": f"token_id:{token}", "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)
            ]
        },
        token_ids=ids,
    )


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)


def response_of(choice: ChatCompletionResponseChoice, uuid: str | None) -> ChatCompletionResponse:
    """The response that `infer_async` returns for a choice."""
    return ChatCompletionResponse(model="turnwise", choices=[choice], id=uuid or "")


_LOGPROB_TOLERANCE = 1e-3
"""Log-probabilities that were computed from the same numbers elsewhere differ by less than this."""


@dataclass(frozen=True)
class ReturnedTokens:
    """The token ids, the loss mask and the log-probabilities that `step` or `on_turn_end` returned for one turn."""

    ids: Any = None
    mask: Any = None
    logprobs: Any = None

    @classmethod
    def of(cls, result: dict[str, Any]) -> ReturnedTokens:
        """From the dictionary that the hook returned."""
        return cls(result.get("response_token_ids"), result.get("response_loss_mask"), result.get("rollout_logprobs"))

    @property
    def empty(self) -> bool:
        """Whether nothing was returned about the tokens."""
        return all(values is None or len(values) == 0 for values in (self.ids, self.mask, self.logprobs))

    @property
    def without_mask(self) -> bool:
        """Whether no loss mask was returned."""
        return self.mask is None or len(self.mask) == 0


@dataclass(frozen=True)
class TurnMask:
    """Which tokens of one turn are not trained on."""

    positions: list[int] = field(default_factory=list)
    """Positions in the sampled tokens of the turn."""
    has_mask: bool = False
    """Whether the scheduler returned a loss mask; `loss_scale` is ignored then."""
    not_sampled: int = 0
    """Tokens with mask 1 that the model did not sample. They stay context."""


def mask_turn(
    returned: ReturnedTokens, sampled: Sequence[int], logprobs: Sequence[float], *, turn: int, edited: bool
) -> TurnMask:
    """Compare the tokens that were returned for a turn with its sampled tokens. `turn` counts from 1.

    `edited`: the scheduler changed the text of the turn too, so the returned tokens may differ from some position on.

    Raises ValueError if ids, mask and log-probabilities do not fit together, or do not fit a turn whose text is unchanged.
    """
    if returned.empty:
        return TurnMask()
    ids = list(sampled) if returned.ids is None else [int(token) for token in returned.ids]
    mask = _mask(returned.mask, len(ids), f"turn {turn}", have_ids=returned.ids is not None)
    same = common_prefix(ids, sampled)
    # the last sampled token is the stop token, which the scheduler may leave out
    if not edited and not (same == len(ids) and same >= len(sampled) - 1):
        at = f"; they differ at position {same}" if same < min(len(ids), len(sampled)) else ""
        raise ValueError(
            f"turn {turn}: response_token_ids has {len(ids)} tokens, but the model sampled {len(sampled)}{at}. The text of the "
            f"answer was not changed, so return response_choice.token_ids"
        )
    if returned.logprobs is not None and len(returned.logprobs):
        _check_logprobs([float(value) for value in returned.logprobs], mask, logprobs[:same], f"turn {turn}")
    end = len(sampled) if edited else same  # a stop token that was left out is trained on as sampled
    positions = [position for position in range(end) if position >= same or not mask[position]]
    return TurnMask(positions, has_mask=not returned.without_mask, not_sampled=sum(mask[same:]))


@dataclass(frozen=True)
class SampledTurn:
    """The sampled tokens of one turn, in a conversation that `run` leads."""

    index: int
    token_ids: Sequence[int]
    edited: bool = False
    """Whether the end of the turn was cut off, so that only its first tokens may be returned."""


@dataclass(frozen=True)
class OutputMasks:
    """Which tokens of a conversation are not trained on, from the outputs of `run`."""

    masked: dict[int, list[int]] = field(default_factory=dict)
    """For each turn (by its index): the positions in its sampled tokens that are not trained on."""
    train_on: list[int] = field(default_factory=list)
    """Turns with a loss mask, and turns in the last round of an output: `loss_scale last_round` trains on these."""
    output_ends: list[int] = field(default_factory=list)
    """The last turn of each output; each output is one training record."""


def mask_outputs(outputs: Sequence[RolloutOutput], turns: Sequence[SampledTurn]) -> OutputMasks:
    """Compare the outputs of `run` with the sampled turns.

    An output may contain one turn or several turns; tokens between the turns were inserted by the scheduler. All tokens of a
    turn that is in no output are masked, unless no output has token ids at all.

    Raises ValueError if lengths do not fit together, or if the mask is 1 on a token that the model did not sample.
    """
    if not any(output.response_token_ids for output in outputs):
        return _outputs_without_ids(outputs, turns)
    trained: dict[int, set[int]] = {}
    kept: set[int] = set()
    ends: list[int] = []
    for number, output in enumerate(outputs, 1):
        rounds = _find_rounds(output, turns, trained, f"output {number} of run")
        last = rounds if output.response_loss_mask else rounds[-_last_round(output) :]
        kept.update(index for turns_of_round in last for index in turns_of_round)
        ends += [turns_of_round[-1] for turns_of_round in rounds[-1:] if turns_of_round]
    masked = {
        turn.index: [place for place in range(len(turn.token_ids)) if place not in trained.get(turn.index, ())]
        for turn in turns
    }
    return OutputMasks({index: places for index, places in masked.items() if places}, sorted(kept), ends)


def _outputs_without_ids(outputs: Sequence[RolloutOutput], turns: Sequence[SampledTurn]) -> OutputMasks:
    for number, output in enumerate(outputs, 1):
        if any(output.response_loss_mask) or any(output.rollout_logprobs):
            raise ValueError(
                f"output {number} of run has response_loss_mask or rollout_logprobs, but no response_token_ids; return "
                f"response_choice.token_ids with it"
            )
    one_turn_each = len(outputs) > 1 and len(outputs) == len(turns)
    indices = [turn.index for turn in turns] if one_turn_each else []
    return OutputMasks(train_on=indices, output_ends=indices)


def _find_rounds(
    output: RolloutOutput, turns: Sequence[SampledTurn], trained: dict[int, set[int]], where: str
) -> list[list[int]]:
    """For each list of ids in an output, the turns that it contains. Adds the tokens with mask 1 to `trained`."""
    masks = output.response_loss_mask or [[1] * len(ids) for ids in output.response_token_ids]
    if len(masks) != len(output.response_token_ids):
        raise ValueError(
            f"{where}: response_loss_mask has {len(masks)} lists for {len(output.response_token_ids)} of response_token_ids"
        )
    first = 0
    rounds: list[list[int]] = []
    for ids, given in zip(output.response_token_ids, masks, strict=True):
        mask = _mask(given, len(ids), where, have_ids=True)
        rounds.append([])
        first = _align(ids, mask, turns, first, trained, rounds[-1], where)
    logprobs = len([float(value) for values in output.rollout_logprobs for value in values])
    ones = sum(int(value) for mask in masks for value in mask)
    if logprobs and logprobs != ones:
        raise ValueError(f"{where}: rollout_logprobs has {logprobs} values for {ones} tokens whose mask is 1")
    return rounds


def _last_round(output: RolloutOutput) -> int:
    """The number of assistant messages after the last message of a user or a tool, at least 1."""
    count = 0
    for message in reversed(output.messages or ()):
        if message.get("role") != "assistant":
            break
        count += 1
    return max(count, 1)


def _align(
    ids: Sequence[int],
    mask: Sequence[int],
    turns: Sequence[SampledTurn],
    first: int,
    trained: dict[int, set[int]],
    aligned: list[int],
    where: str,
) -> int:
    """Find the sampled turns in one list of ids, from `turns[first]` on. Returns the first turn that was not found.

    Adds to `trained` and `aligned`.
    """
    place = 0
    while place < len(ids):
        for number in range(first, len(turns)):
            turn, length = turns[number], len(turns[number].token_ids)
            same = common_prefix(ids[place:], turn.token_ids)
            if same and (turn.edited or same >= length - 1):  # the stop token may have been left out
                aligned.append(turn.index)
                positions = trained.setdefault(turn.index, set())
                positions.update(n for n in range(same) if mask[place + n])
                if not turn.edited and same == length - 1 and mask[place + same - 1]:
                    positions.add(same)  # the stop token is trained on if the token before it is
                place, first = place + same, number + 1
                break
        else:
            if mask[place]:
                raise ValueError(
                    f"{where}: the mask is 1 at position {place} of {len(ids)} response_token_ids, but the model did not sample "
                    f"token {ids[place]} there ({len(turns) - first} of {len(turns)} turns are left); return "
                    f"response_choice.token_ids"
                )
            place += 1
    return first


def _mask(mask: Any, length: int, where: str, *, have_ids: bool) -> list[int]:
    if mask is None or len(mask) == 0:
        return [1] * length
    if len(mask) != length:
        what = "response_token_ids" if have_ids else "sampled tokens (no response_token_ids were returned)"
        raise ValueError(f"{where}: response_loss_mask has {len(mask)} values for {length} {what}")
    if wrong := [value for value in mask if value not in (0, 1)]:
        raise ValueError(f"{where}: response_loss_mask contains {wrong[0]!r}; its values must be 0 or 1")
    return [int(value) for value in mask]


def _check_logprobs(given: list[float], mask: list[int], sampled: Sequence[float], where: str) -> None:
    if len(given) != sum(mask):
        raise ValueError(f"{where}: rollout_logprobs has {len(given)} values for {sum(mask)} tokens whose mask is 1")
    places = [place for place, value in enumerate(mask) if value]
    for value, place in zip(given, places, strict=True):
        if place < len(sampled) and abs(value - sampled[place]) > _LOGPROB_TOLERANCE:
            raise ValueError(
                f"{where}: rollout_logprobs has {value:g} for token {place}, which was sampled with {sampled[place]:g}; "
                f"return the values of response_choice.logprobs, or none"
            )


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of equal items at the beginning of two sequences."""
    count = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        count += 1
    return count


MEDIA = ("images", "videos", "audios")
FULL_ANSWER = "completion"
"""Key in `Turn.info` of a turn that continued an answer: the full answer, with reasoning and tool calls."""
OUTPUT_ENDS = "records"
"""Key in `Turn.info` of the last turn if `run` returned several outputs: the last turn of each output."""

_TAG = re.compile(r"(<image>|<video>)")


def request_of(row: Row, uuid: str) -> RolloutInferRequest:
    """A row as ms-swift passes it to a scheduler: without reference answers at its end, with images separate from messages."""
    messages, media = flatten_media(row.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"row {row.id!r} has no message for the model to answer")
    return RolloutInferRequest(
        messages=messages,
        images=media["image"],
        videos=media["video"],
        tools=tools_of(row.fields.get("tools"), f"row {row.id!r}"),
        objects=copy_containers(row.fields.get("objects") or {}),
        chat_template_kwargs=copy_containers(dict(row.chat_template_kwargs)),
        data_dict={
            name: copy_containers(value)
            for name, value in row.fields.items()
            if name not in (*MEDIA, "tools", "objects", "chat_template_kwargs")
        },
        uuid=uuid,
    )


def flatten_media(messages: Sequence[TurnwiseMessage]) -> tuple[list[TurnwiseMessage], dict[str, list[Any]]]:
    """Messages whose contents are texts with `<image>` and `<video>` tags, and the lists of images and videos."""
    media: dict[str, list[Any]] = {"image": [], "video": []}
    flattened: list[TurnwiseMessage] = []
    for message in messages:
        content = message.get("content")
        text = "".join(_tagged(content, media)) if isinstance(content, list) else content
        flattened.append({**message, "content": text})
    return flattened, media


def tools_of(value: Any, where: str) -> list[ToolSchema] | None:
    """The schemas in a column of tools, which holds a list of schemas or JSON of such a list."""
    try:
        schemas = json.loads(value) if isinstance(value, str) else value
        schemas = [json.loads(schema) if isinstance(schema, str) else schema for schema in schemas or []]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"the tools of {where} are not a list of schemas: {error}") from error
    if wrong := [schema for schema in schemas if not isinstance(schema, Mapping)]:
        raise ValueError(f"the tools of {where} must be schemas; one of them is {wrong[0]!r:.80}")
    return [schema if "function" in schema else {"type": "function", "function": schema} for schema in schemas] or None


def request_tools(request: RolloutInferRequest) -> list[ToolSchema]:
    """Copies of the request's tool schemas, because a scheduler may change its own in place; empty if there are none."""
    return [copy_containers(schema) for schema in tools_of(request.tools, "the scheduler's request") or []]


def request_arguments(request: RolloutInferRequest) -> dict[str, Any]:
    """A copy of the request's arguments of the chat template, which a scheduler may change between turns."""
    return dict(copy_containers(request.chat_template_kwargs or {}))


def append_answer(messages: list[TurnwiseMessage], text: str) -> None:
    """Append the text of a turn: to the last message if the model continued it, otherwise as a new message.

    An empty assistant message after another assistant message only asks the model to continue the latter; it is removed.
    """
    if _ends_with_empty_answer(messages):
        messages.pop()
    if messages and messages[-1]["role"] == "assistant":
        messages[-1]["content"] = (messages[-1]["content"] or "") + text
    else:
        messages.append({"role": "assistant", "content": text})


def remove_response(messages: list[TurnwiseMessage]) -> Any:
    """Remove the assistant message at the end. Returns its content, or None if the last message is not the model's."""
    return messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None


def without_answers(messages: Sequence[TurnwiseMessage]) -> list[TurnwiseMessage]:
    """The messages without assistant messages at their end: before the first turn, these are from the data set."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("on_trajectory_start left no message for the model to answer")
    return list(messages[:end])


def messages_of(request: RolloutInferRequest, *, since: int = 0) -> list[TurnwiseMessage]:
    """A copy of the request's messages in our form: an image in place of each `<image>` tag, roles as chat templates use them.

    `since` is the index of the first new message. Images without a tag are put at the start of the first new message that
    is not the model's; the request is changed accordingly.

    Raises ValueError if there are more tags than images, or if the request contains something that is not supported here.
    """
    _refuse_unknown(request)
    _place_media(request, since)
    remaining = {"image": iter(request.images), "video": iter(request.videos)}
    places = {"image": 0, "video": 0}
    given = {"image": len(request.images), "video": len(request.videos)}
    messages: list[TurnwiseMessage] = []
    for message in request.messages[:-1] if _ends_with_empty_answer(request.messages) else request.messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(
                f"messages must be a list of {{'role': ..., 'content': ...}}; one of them is {message!r:.80}"
            )
        content = message.get("content")
        if isinstance(content, list) or (_has_tags(message) and any(given.values())):
            content = list(_parts(content, remaining, places))
        role = {"tool_response": "tool"}.get(message["role"], message["role"])
        if role == "tool_call":
            raise ValueError("a message has the role 'tool_call'; write an assistant message with `tool_calls` instead")
        messages.append({**message, "role": role, "content": "" if content is None else content})
    for kind, count in places.items():
        if count != given[kind]:
            raise ValueError(
                f"the request has {given[kind]} {kind}s and its messages have tags for {count}; write <{kind}> where "
                f"each belongs"
            )
    return messages


def _has_tags(message: TurnwiseMessage) -> bool:
    """Whether a text contains tags for images. Always false for the model's text, in which a tag is plain text."""
    content = message.get("content")
    return isinstance(content, str) and message.get("role") != "assistant" and _TAG.search(content) is not None


def _place_media(request: RolloutInferRequest, since: int) -> None:
    for kind, count in (("image", len(request.images)), ("video", len(request.videos))):
        tags = 0
        for message in request.messages if count else ():
            parts = message.get("content") if isinstance(message, dict) else None
            if isinstance(parts, list):
                media = [part for part in parts if isinstance(part, Mapping) and media_kind(part) == kind]
                tags += sum(media_value(part) is None for part in media)
                tags += sum(str(part.get("text", "")).count(f"<{kind}>") for part in parts if isinstance(part, Mapping))
            elif isinstance(parts, str) and message.get("role") != "assistant":
                tags += parts.count(f"<{kind}>")
        if tags < count and (place := _first_input(request.messages, since)) is not None:
            place["content"] = f"<{kind}>" * (count - tags) + place["content"]


def _first_input(messages: Sequence[Any], since: int) -> TurnwiseMessage | None:
    """The first text message from `since` on that is not the model's or the system's; else the last such message before."""
    texts = [
        (number, message)
        for number, message in enumerate(messages)
        if isinstance(message, dict)
        and isinstance(message.get("content"), str)
        and message.get("role") not in ("assistant", "system")
    ]
    new = [message for number, message in texts if number >= since]
    return new[0] if new else texts[-1][1] if texts else None


def reply_between(
    before: Sequence[TurnwiseMessage],
    after: Sequence[TurnwiseMessage],
    text: str,
    *,
    tools: Sequence[ToolSchema] | None = None,
) -> Reply:
    """The reply that leads from the messages `before` to the messages `after`, in a conversation that continues.

    The last message of `before` is the model's answer; `text` is the part of it that was sampled in this turn. `tools` are the
    tools of the next turn, if the scheduler changed them. If the model then continues its answer, the history is replaced,
    because the tools are in the prompt before the answer.
    """
    reply = _reply_between(before, after, text)
    if tools is None:
        return reply
    if reply.resume is not None:
        reply = _rewritten(after)
    return replace(reply, tools=tools)


def _reply_between(before: Sequence[TurnwiseMessage], after: Sequence[TurnwiseMessage], text: str) -> Reply:
    if _same(after[: len(before)], before):
        if len(after) == len(before):
            return Reply(resume=Resume())
        return Reply(messages=_without_last_answer(after[len(before) :]), prefill=_prefill(after))
    answer, last = before[-1], after[-1] if after else None
    if (
        last is not None
        and len(after) == len(before)
        and last["role"] == "assistant"
        and _same(after[:-1], before[:-1])
    ):
        earlier = answer["content"][: len(answer["content"]) - len(text)]
        if isinstance(last["content"], str) and last["content"].startswith(earlier):
            now = last["content"][len(earlier) :]
            keep = common_prefix(text, now)
            return Reply(resume=Resume(keep=keep, add=now[keep:]))
    return _rewritten(after)


def _rewritten(after: Sequence[TurnwiseMessage]) -> Reply:
    if not _without_last_answer(after):
        raise ValueError("the scheduler left no message for the model to answer")
    return Reply(rewrite=_without_last_answer(after), prefill=_prefill(after))


def final_reply(before: Sequence[TurnwiseMessage], after: Sequence[TurnwiseMessage]) -> Reply:
    """The reply that leads from the messages `before` to the messages `after`, and ends the conversation."""
    if _same(after[: len(before)], before):
        return Reply(messages=list(after[len(before) :]), done=True)
    return Reply(rewrite=list(after), done=True)


def _ends_with_empty_answer(messages: Sequence[Any]) -> bool:
    """Whether an empty assistant message follows another one: in ms-swift, the model then continues the first of them."""
    last = messages[-2:]
    answers = len(last) == 2 and all(isinstance(item, dict) and item.get("role") == "assistant" for item in last)
    return answers and not last[-1].get("content")


def _without_last_answer(messages: Sequence[TurnwiseMessage]) -> list[TurnwiseMessage]:
    """The messages without an assistant message at the end, which the model will continue."""
    return list(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages)


def _prefill(messages: Sequence[TurnwiseMessage]) -> str:
    if messages[-1]["role"] != "assistant":
        return ""
    if not isinstance(messages[-1]["content"], str):
        raise ValueError("the content of an assistant message that the model continues must be a text")
    return messages[-1]["content"]


def _refuse_unknown(request: RolloutInferRequest) -> None:
    if request.audios:
        raise ValueError(f"the request has audios, which is not supported here: {request.audios!r:.80}")
    if request.add_eos not in (None, "auto"):
        raise ValueError(
            f"add_eos={request.add_eos!r} is not supported here: no end-of-turn token is added to an answer that is continued"
        )


def _tagged(content: Sequence[Any], media: Mapping[str, list[Any]]) -> Iterator[str]:
    for part in content:
        kind = media_kind(part) if isinstance(part, Mapping) else None
        if kind is not None:
            media[kind].append(media_value(part))
            yield f"<{kind}>"
        else:
            yield str(part.get("text", "")) if isinstance(part, Mapping) else str(part)


def _parts(content: Any, remaining: Mapping[str, Iterator[Any]], places: dict[str, int]) -> Iterator[dict[str, Any]]:
    for part in [content] if isinstance(content, str) else content:
        kind = media_kind(part) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind is not None and (value := media_value(part)) is not None:
            yield {"type": kind, kind: value}
            continue
        text = f"<{kind}>" if kind is not None else part.get("text", "") if isinstance(part, Mapping) else part
        for piece in _TAG.split(text):
            if piece in ("<image>", "<video>"):
                kind = piece[1:-1]
                places[kind] += 1
                yield {"type": kind, kind: next(remaining[kind], None)}
            elif piece:
                yield {"type": "text", "text": piece}


def _same(first: Any, second: Any) -> bool:
    """Equality that compares images by their pixels. Objects of unknown types are different."""
    if first is second:
        return True
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    known = (str, bytes, int, float, type(None))
    return (isinstance(first, known) or is_image(first)) and isinstance(second, type(first)) and bool(first == second)
