"""Chat models: functions from messages to a text, such as a model on an OpenAI-compatible server.

A simulated user and a judge get their model in the same way: by the arguments `endpoint` or `chat_model` in the recipe.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnwise.errors import ConfigError
from turnwise.services.json_service import ServiceError, service
from turnwise.types import Message
from turnwise.user_code.object_references import resolve
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["ChatModel", "Endpoint", "ask_chat_model", "given_chat_model"]

ChatModel = Callable[[list[Message]], Awaitable[str] | str]
"""Returns the answer to the last message. A sync function runs in a thread."""

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
_RESERVED = ("messages", "model", "n", "stream")


class Endpoint:
    """A chat model behind an OpenAI-compatible server: `POST url/chat/completions`.

    Example::

        Endpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", api_key_env="USER_MODEL_KEY", request={"temperature": 0.7})

    `api_key_env` names the environment variable that holds the key. `request` holds further fields of the request. Requests
    without connection, without answer in `timeout` seconds, or with status 5xx or 429 are repeated up to `retries` times; the
    pause before each retry grows by `pause` seconds. At most `max_concurrent` requests run at once, over all conversations.

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
    ) -> None:
        if taken := [name for name in _RESERVED if name in (request or {})]:
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
        )
        self._question = {**(request or {}), "model": model}

    async def __call__(self, messages: list[Message]) -> str:
        """The answer of the model, without its reasoning.

        Raises ServiceError, with status and body, if there is no answer.
        """
        answer = await self._service.ask({**self._question, "messages": messages})
        match answer:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                pass
            case _:
                raise ServiceError(
                    f"the service {self._service.url} must return "
                    f'{{"choices": [{{"message": {{"content": "..."}}}}]}}; it returned {str(answer)[:300]}'
                )
        return _THOUGHTS.sub("", text).strip()


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
        answer: Any = await chat_model(messages)  # type: ignore[misc]
    else:
        answer = await run_in_thread(lambda: chat_model(messages), name=name, kind=kind)
        answer = await answer if inspect.isawaitable(answer) else answer
    if not isinstance(answer, str):
        raise TypeError(f"the chat_model of {name} returned {answer!r:.80}; it must return a text")
    return answer
