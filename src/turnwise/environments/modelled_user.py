"""A modelled user: another model answers, in the roles turned round.

It hears the conversation from its own side: what our model said is its `user`, what it said itself its `assistant`. Whoever
gives it a voice is a `Speaker`, a function of messages to a text: `Endpoint` asks an OpenAI-compatible server,
`turnwise.rollout.chat_model.EngineSpeaker` an engine.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from turnwise.environments.environment import say
from turnwise.environments.service import ServiceError, service
from turnwise.errors import ConfigError
from turnwise.types import Message, Opening, Reply, Row, Turn
from turnwise.user_code.object_references import resolve
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["Endpoint", "ModelledUser", "Speaker"]

Speaker = Callable[[list[Message]], Awaitable[str] | str]
"""Answers messages, of which the last is what it is to answer. Sync ones run beside the event loop."""

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
_OURS = ("messages", "model", "n", "stream")


class Endpoint:
    """A chat model behind an OpenAI-compatible server: `POST url/chat/completions`.

    Example::

        Endpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", api_key_env="USER_MODEL_KEY", request={"temperature": 0.7})

    `api_key_env` names the environment variable that holds the key; `request` is what else a request says. No connection, no
    answer within `timeout` seconds, status 5xx and 429 are tried again `retries` times, after a pause that grows by `pause`
    seconds; at most `max_concurrent` requests are out at once, over all conversations.

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
        if taken := [name for name in _OURS if name in (request or {})]:
            raise ConfigError(f"endpoint.request has {taken[0]!r}, which is not for it to say: remove it")
        headers: tuple[tuple[str, str], ...] = ()
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise ConfigError(
                    f"endpoint.api_key_env: the environment variable {api_key_env} is not set; it must hold the key"
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
        """What the model answers, its thoughts left out.

        Raises ServiceError, with status and body, when there is no answer.
        """
        answer = await self._service.ask({**self._question, "messages": messages})
        match answer:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                pass
            case _:
                raise ServiceError(
                    f"the service {self._service.url} must answer "
                    f'{{"choices": [{{"message": {{"content": "..."}}}}]}}; it answered {str(answer)[:300]}'
                )
        return _THOUGHTS.sub("", text).strip()


class ModelledUser:
    """Another model answers ours.

    Who speaks for it is an `endpoint` (the arguments of `Endpoint`) or a `speaker` (a function of messages to a text, or a
    reference to one). `system` is its own system prompt; the column `system_column` of a row is put behind it. The row's system
    messages are not for it. A prompt that ends with a user's message was said by the modelled user, in answer to `greeting`;
    any other prompt it opens itself.

    It says `stop` when it is done: that ends the conversation, and what stood before it is recorded as its last words. It gives
    `exchanges` answers at most, then the model has the last word. `timeout` is the time of one answer of a `speaker`.

    Raises ConfigError.
    """

    def __init__(
        self,
        *,
        endpoint: Mapping[str, Any] | None = None,
        speaker: str | Speaker | None = None,
        system: str | None = None,
        system_column: str | None = None,
        greeting: str = "Hello! What can I do for you?",
        stop: str | None = "[DONE]",
        exchanges: int | None = None,
        timeout: float | None = None,
    ) -> None:
        if (endpoint is None) == (speaker is None):
            raise ConfigError("a modelled user needs either an endpoint or a speaker: set one of them")
        if system is None and system_column is None:
            raise ConfigError("a modelled user needs a prompt of its own: set system, system_column or both")
        if exchanges is not None and (isinstance(exchanges, bool) or exchanges < 1):
            raise ConfigError(f"exchanges={exchanges} lets the modelled user say nothing; give a number above 0")
        if stop is not None and not stop.strip():
            raise ConfigError(f"stop={stop!r} is in every text; give a phrase, or null for none")
        if timeout is not None and (endpoint is not None or not timeout > 0):
            fix = "set endpoint.timeout" if endpoint is not None else "give a number above 0"
            raise ConfigError(f"timeout={timeout} has no effect: {fix}")
        self._speaker = _endpoint(endpoint) if endpoint is not None else _speaker(speaker)
        self._system, self._column = system, system_column
        self._greeting = greeting
        self._stop = stop
        self._left = exchanges
        self._timeout = 30.0 if timeout is None else timeout
        self._bounded = endpoint is None
        self._heard: list[Message] = []

    async def begin(self, row: Row) -> Opening:
        prompt = [self._system] if self._system is not None else []
        if self._column is not None:
            prompt.append(str(row[self._column]))
        self._heard = [{"role": "system", "content": "\n\n".join(prompt)}, *turned(row.messages, self._greeting)]
        if self._heard[-1]["role"] == "assistant":
            return Opening(messages=row.messages)
        words, over = await self._answer()
        if over and not words:
            raise ServiceError(f"the modelled user ended the conversation of row {row.id!r} before it began")
        return Opening(messages=[*row.messages, *say(words).messages])

    async def step(self, turn: Turn) -> Reply:
        if self._left == 0:
            return Reply(done=True)
        self._heard.append({"role": "user", "content": _text(turn.message.get("content"))})
        words, over = await self._answer()
        if self._left is not None:
            self._left -= 1
        return Reply(messages=say(words).messages if words else (), done=over)

    async def close(self) -> None:
        pass

    async def _answer(self) -> tuple[str, bool]:
        """Its words, and whether it is done."""
        text = await self._said()
        words, stopped, _ = text.partition(self._stop) if self._stop is not None else (text, "", "")
        words = words.strip()
        if not words and not stopped:
            raise ServiceError("the modelled user answered without a word")
        self._heard.append({"role": "assistant", "content": words})
        return words, bool(stopped)

    async def _said(self) -> str:
        messages = [dict(message) for message in self._heard]
        try:
            # a service has a timeout of its own, for each attempt
            async with asyncio.timeout(self._timeout if self._bounded else None):
                text = await _ask(self._speaker, messages)
        except TimeoutError:
            raise ServiceError(f"the modelled user did not answer within {self._timeout:g} s") from None
        if not isinstance(text, str):
            raise TypeError(f"the modelled user's speaker gave {text!r:.80}; it must give a text")
        return text


def turned(messages: Sequence[Message], greeting: str) -> list[Message]:
    """A conversation as the user heard it: roles turned round, system and tool messages left out, greeted first."""
    roles = {"user": "assistant", "assistant": "user"}
    heard = [
        {"role": roles[message["role"]], "content": text}
        for message in messages
        if message["role"] in roles and (text := _text(message.get("content")))
    ]
    return heard if heard and heard[0]["role"] == "user" else [{"role": "user", "content": greeting}, *heard]


def _text(content: Any) -> str:
    """The words of a message; images are not for it."""
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")


async def _ask(speaker: Speaker, messages: list[Message]) -> Any:
    if inspect.iscoroutinefunction(speaker) or inspect.iscoroutinefunction(type(speaker).__call__):
        return await speaker(messages)  # type: ignore[misc]
    answer = await run_in_thread(lambda: speaker(messages), name="user", kind="environment")
    return await answer if inspect.isawaitable(answer) else answer


def _endpoint(options: Mapping[str, Any]) -> Endpoint:
    try:
        inspect.signature(Endpoint).bind(**options)
    except TypeError as error:
        raise ConfigError(f"endpoint cannot be made of {dict(options)}: {error}") from None
    return Endpoint(**options)


def _speaker(found: str | Speaker | None) -> Speaker:
    if isinstance(found, str):
        found = resolve(found, key="environment.arguments.speaker")
    if not callable(found):
        raise ConfigError(f"speaker is a {type(found).__name__}, {found!r:.80}; it must be a function of messages")
    return found
