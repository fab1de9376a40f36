"""The data classes that an ms-swift scheduler receives and returns: ms-swift's names, with the fields that users access.

Data only. ms-swift declares some of these with pydantic; here all are dataclasses, with the same constructors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.types import ToolSchema, Turn

__all__ = [
    "ChatCompletionMessageToolCall",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "Function",
    "InferRequest",
    "Message",
    "Messages",
    "RequestConfig",
    "RolloutInferRequest",
    "RolloutOutput",
    "UsageInfo",
    "choice_of",
    "response_of",
]

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
