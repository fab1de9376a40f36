"""Models on OpenAI-compatible servers: messages and tools in, a message out, over `POST url/chat/completions`.

`ChatEndpoint` knows the protocol: fields of the request, the answer's message and its counts of tokens. It does not know what
the messages are for: the text-only session, simulated users and judges use it. A `ChatModel` is any function from messages to
a text; `Endpoint` is one on a server. A simulated user and a judge get their model in the same way: by the arguments
`endpoint` or `chat_model` in the recipe.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.errors import ConfigError
from turnwise.services.json_service import RefusedError, ServiceError, service
from turnwise.types import Message, ToolSchema, Usage
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import resolve
from turnwise.user_code.threads import run_in_thread

# the protocol

_BOUNDS = ("max_tokens", "max_completion_tokens")
_RESERVED = ("messages", "model", "n", "stream", "tools")
_CHARACTERS_PER_TOKEN = 4  # the usual estimate for English text
_CONTEXT_FULL = ("context_length_exceeded", "context length", "context window", "maximum model length", "max_model_len")
"""Texts in the errors of OpenAI, vLLM, SGLang and llama.cpp for a prompt that is too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What the model answered."""

    message: Mapping[str, Any]
    """The assistant message as the server sent it."""
    finish_reason: str
    """`stop`, `length`, `tool_calls` or another text; empty if the server sends none."""
    usage: Usage | None
    """The counts of tokens; None if the server does not report them."""


class ContextFullError(ServiceError):
    """The prompt leaves no room for an answer in the context of the model."""


class ChatService(Protocol):
    """Answers messages. `ChatEndpoint` asks a server; a replay gives recorded answers."""

    async def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), fields: Mapping[str, Any] | None = None
    ) -> ChatAnswer:
        """The answer to the last message.

        Raises ServiceError; ContextFullError if the prompt, or the prompt and the tokens that are asked for, do not fit into
        the context of the model.
        """
        ...


class ChatEndpoint:
    """A chat model behind an OpenAI-compatible server: `POST url/chat/completions`.

    `api_key_env` names the environment variable that holds the key. `request` holds further fields of each request; a field
    that turnwise sends too is replaced, and None removes the field. `max_tokens_field` is the server's name of the field
    `max_tokens`: OpenAI's reasoning models need `max_completion_tokens`. Requests without connection, without answer in
    `timeout` seconds, or with status 5xx or 429 are repeated up to `retries` times. The pause before the first retry is `pause`
    seconds and doubles with each retry, up to a minute, with a random part of up to half left out; if the server sends
    Retry-After, all requests wait for that time instead. At most `max_concurrent` requests run at once, at most
    `requests_per_minute` begin in a minute, and they use at most about `tokens_per_minute` tokens. These limits hold over all
    conversations.

    Raises ConfigError if an option is invalid or the environment variable of the key is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        request: Mapping[str, Any] | None = None,
        max_tokens_field: str = "max_tokens",
        timeout: float = 30.0,
        retries: int = 3,
        pause: float = 1.0,
        max_concurrent: int = 64,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self._model, self._request = model, dict(request or {})
        self._max_tokens_field = max_tokens_field
        self._counts_tokens = tokens_per_minute is not None
        if max_tokens_field not in _BOUNDS:
            raise ConfigError(f"endpoint.max_tokens_field={max_tokens_field!r} must be {' or '.join(_BOUNDS)}")
        if taken := [name for name in _RESERVED if name in self._request]:
            raise ConfigError(f"endpoint.request has {taken[0]!r}, which is set by turnwise: remove it")
        headers: tuple[tuple[str, str], ...] = ()
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise ConfigError(
                    f"endpoint.api_key_env: the environment variable {api_key_env} is not set; set it to the API key"
                )
            headers = (("Authorization", f"Bearer {key}"),)
        address = url.rstrip("/")
        self._service = service(
            address if address.endswith("/chat/completions") else f"{address}/chat/completions",
            timeout=timeout,
            retries=retries,
            pause=pause,
            max_concurrent=max_concurrent,
            headers=headers,
            exponential=True,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
        self._mean_answer = _Mean()

    @property
    def url(self) -> str:
        """The address of the requests."""
        return self._service.url

    async def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), fields: Mapping[str, Any] | None = None
    ) -> ChatAnswer:
        """The answer to the last message. `fields` are further fields of this request; `max_tokens` bounds the answer.

        Raises ServiceError, with status and body, if there is no answer; ContextFullError if the context of the model is full.
        """
        question: dict[str, Any] = {"model": self._model, "messages": list(messages)}
        if tools:
            question["tools"] = list(tools)
        own = {
            self._max_tokens_field if name == "max_tokens" else name: value for name, value in (fields or {}).items()
        }
        for name, value in {**own, **self._request}.items():
            if value is not None:
                question[name] = value
        estimated = self._estimate(question)
        try:
            answer = await self._service.ask(question, tokens=estimated)
        except RefusedError as error:
            if error.status in (400, 413, 422) and any(text in error.body.lower() for text in _CONTEXT_FULL):
                raise ContextFullError(str(error)) from error
            raise
        parsed = self._parse(answer)
        if parsed.usage is not None:
            self._mean_answer.add(parsed.usage.completion_tokens)
            self._service.settle(estimated, parsed.usage.prompt_tokens + parsed.usage.completion_tokens)
        return parsed

    def _estimate(self, question: Mapping[str, Any]) -> int:
        """The number of tokens of a request and its answer, for the rate limit, until the server reports it."""
        if not self._counts_tokens:
            return 0
        prompt = len(json.dumps([question["messages"], question.get("tools")], default=str)) // _CHARACTERS_PER_TOKEN
        most = next((question[name] for name in _BOUNDS if name in question), None)
        return prompt + round(self._mean_answer.value(most if isinstance(most, int) else 0))

    def _parse(self, answer: Mapping[str, Any]) -> ChatAnswer:
        match answer:
            case {"choices": [{"message": dict(message)} as choice, *_]}:
                reason = choice.get("finish_reason")
                return ChatAnswer(
                    message=message,
                    finish_reason=reason if isinstance(reason, str) else "",
                    usage=_usage(answer.get("usage")),
                )
            case _:
                raise protocol_error(self.url, answer)


def protocol_error(url: str, answer: Mapping[str, Any]) -> ServiceError:
    """The error for an answer that does not follow the protocol."""
    return ServiceError(
        f'the service {url} must return {{"choices": [{{"message": {{"content": "..."}}}}]}}; it returned {str(answer)[:300]}'
    )


class _Mean:
    """The mean number of tokens of the answers so far."""

    def __init__(self) -> None:
        self._count, self._sum = 0, 0
        self._lock = threading.Lock()

    def add(self, tokens: int) -> None:
        with self._lock:
            self._count, self._sum = self._count + 1, self._sum + tokens

    def value(self, default: float) -> float:
        """The mean; `default` before the first answer."""
        return self._sum / self._count if self._count else default


def _usage(value: Any) -> Usage | None:
    """The counts of tokens of an answer; None if they are missing or are not numbers."""
    match value:
        case {"prompt_tokens": int(prompt), "completion_tokens": int(completion)} if prompt >= 0 and completion >= 0:
            pass
        case _:
            return None
    match value.get("prompt_tokens_details"):
        case {"cached_tokens": int(cached)}:
            return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
        case _:
            return Usage(prompt_tokens=prompt, completion_tokens=completion)


# chat models as functions

ChatModel = Callable[[list[Message]], Awaitable[str] | str]
"""Returns the answer to the last message. A sync function runs in a thread."""

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


class Endpoint(ChatEndpoint):
    """A chat model on a server as a function.

    Example::

        Endpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", api_key_env="USER_MODEL_KEY", request={"temperature": 0.7})
    """

    async def __call__(self, messages: list[Message]) -> str:
        """The answer of the model, without its reasoning.

        Raises ServiceError, with status and body, if there is no answer.
        """
        answer = await self.complete(messages)
        text = answer.message.get("content")
        if not isinstance(text, str):
            raise protocol_error(self.url, {"choices": [{"message": dict(answer.message)}]})
        # a JSON answer that was cut may end with half of a surrogate pair, which no tokenizer takes
        return _THOUGHTS.sub("", text).strip().encode("utf-8", "replace").decode("utf-8")


def given_chat_model(
    endpoint: Mapping[str, Any] | None, chat_model: str | ChatModel | None, *, owner: str, key: str
) -> ChatModel:
    """The chat model that the arguments `endpoint` (the arguments of `Endpoint`) or `chat_model` (a function of messages, or a
    reference to one) of `owner` describe. `key` is the place of `chat_model` in the recipe.

    Raises ConfigError.
    """
    if (endpoint is None) == (chat_model is None):
        raise ConfigError(f"{owner} needs either endpoint or chat_model: set one of them")
    if endpoint is not None:
        try:
            inspect.signature(Endpoint).bind(**endpoint)
        except TypeError as error:
            raise ConfigError(f"endpoint {dict(endpoint)} cannot be created: {error}") from None
        return Endpoint(**endpoint)
    if isinstance(chat_model, str):
        chat_model = resolve(chat_model, key=key)
    if not callable(chat_model):
        kind = type(chat_model).__name__
        raise ConfigError(f"chat_model is a {kind}, {chat_model!r:.80}; it must be a function of messages")
    return chat_model


async def ask_chat_model(chat_model: ChatModel, messages: list[Message], *, name: str, kind: str) -> str:
    """The answer of a chat model. A sync function runs in a thread. `name` is the role of the model, for error messages, and
    `kind` the kind of a failure.

    Raises TypeError if the answer is not a text, Failed if a sync function raises, and what an async function raises.
    """
    if inspect.iscoroutinefunction(chat_model) or inspect.iscoroutinefunction(type(chat_model).__call__):
        answer: Any = await chat_model(copy_containers(messages))  # type: ignore[misc]
    else:
        answer = await run_in_thread(lambda: chat_model(copy_containers(messages)), name=name, kind=kind)
        answer = await answer if inspect.isawaitable(answer) else answer
    if not isinstance(answer, str):
        raise TypeError(f"the chat_model of {name} returned {answer!r:.80}; it must return a text")
    return answer
