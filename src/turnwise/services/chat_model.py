"""Chat models: functions from messages to a text, such as a model on an OpenAI-compatible server.

A simulated user and a judge get their model in the same way: by the arguments `endpoint` or `chat_model` in the recipe.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnwise.errors import ConfigError
from turnwise.services.chat_endpoint import ChatEndpoint, EndpointOptions, protocol_error
from turnwise.types import Message
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.object_references import resolve
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["ChatModel", "Endpoint", "ask_chat_model", "given_chat_model"]

ChatModel = Callable[[list[Message]], Awaitable[str] | str]
"""Returns the answer to the last message. A sync function runs in a thread."""

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


class Endpoint:
    """A chat model behind an OpenAI-compatible server: `POST url/chat/completions`.

    Example::

        Endpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", api_key_env="USER_MODEL_KEY", request={"temperature": 0.7})

    `api_key_env` names the environment variable that holds the key. `request` holds further fields of the request. Requests
    without connection, without answer in `timeout` seconds, or with status 5xx or 429 are repeated up to `retries` times. The
    pause before the first retry is `pause` seconds and doubles with each retry, up to a minute, with a random part of up to half
    left out; if the server sends Retry-After, all requests wait for that time instead. At most `max_concurrent` requests run at
    once, at most `requests_per_minute` begin in a minute, and they use at most about `tokens_per_minute` tokens. These limits
    hold over all conversations.

    Raises ConfigError.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        request: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        retries: int = 3,
        pause: float = 1.0,
        max_concurrent: int = 64,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self._endpoint = ChatEndpoint(
            EndpointOptions(
                url=url,
                model=model,
                api_key_env=api_key_env,
                request=request or {},
                timeout=timeout,
                retries=retries,
                pause=pause,
                max_concurrent=max_concurrent,
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
            )
        )

    async def __call__(self, messages: list[Message]) -> str:
        """The answer of the model, without its reasoning.

        Raises ServiceError, with status and body, if there is no answer.
        """
        answer = await self._endpoint.complete(messages)
        text = answer.message.get("content")
        if not isinstance(text, str):
            raise protocol_error(self._endpoint.url, {"choices": [{"message": dict(answer.message)}]})
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
