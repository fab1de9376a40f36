"""Simulated users: users that follow a script, users that check an answer, and users that are another model.

`ScriptedUser` sends given messages. `checked_answer` is a user with a question whose answer is a number, as in GSM8K: if the
model's answer is wrong, the user says so, and the model may try again.

The model behind a `ModelledUser` sees the conversation with exchanged roles: turns of the trained model are its `user`
messages, and its own answers are its `assistant` messages. It is a `ChatModel`, a function from messages to a text: `Endpoint`
calls an OpenAI-compatible server, `turnwise.rollout.chat_model.EngineChatModel` an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from turnwise.data.numeric_answers import Method, final_answer, same_number, truth
from turnwise.environments.environment import environment, user_message
from turnwise.errors import ConfigError
from turnwise.services.chat import ChatModel, Endpoint, ask_chat_model, given_chat_model
from turnwise.services.json_service import ServiceError
from turnwise.types import Message, Opening, Reply, Row, Turn

__all__ = ["ChatModel", "Endpoint", "ModelledUser", "ScriptedUser", "checked_answer"]


# users without a model


class ScriptedUser:
    """Sends the given messages, one after each turn of the model. Ends the conversation after the last one."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        if isinstance(lines, str):
            raise TypeError(f"lines must be a list of texts, one for each message; got the single text {lines!r}")
        self._lines = iter(list(lines))

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        line = next(self._lines, None)
        return Reply(done=True) if line is None else user_message(line)

    async def close(self) -> None:
        pass


@environment
async def checked_answer(
    row: Row,
    *,
    tries: int = 2,
    retry_factor: float = 0.5,
    method: Method = "strict",
    wrong: str = "That is not right. Read the question again and have another try.",
) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user who knows the right answer (column `answer`: a number, or a GSM8K solution that ends in `#### n`).

    The reward of a right answer is 1 at the first try, and is multiplied by `retry_factor` for each further try. After `tries`
    wrong answers the conversation ends with reward 0. Only the text of the model's turn is read, never a tool's.
    """
    right = truth(row["answer"])
    turn = yield Opening(messages=row.messages)
    for attempt in range(tries):
        given = final_answer(turn.text, method)
        if same_number(given, right):
            yield Reply(reward=retry_factor**attempt, done=True, info={"answer": given, "try": attempt + 1})
            return
        if attempt + 1 < tries:
            turn = yield user_message(wrong, reward=0.0)
    yield Reply(reward=0.0, done=True, info={"answer": final_answer(turn.text, method), "try": tries})


# a user that is a model


class ModelledUser:
    """A user that is another model.

    Args:
        endpoint: The arguments of `Endpoint`, for a model on a server. Set this or `chat_model`.
        chat_model: A function from messages to a text, or a reference to one.
        system_prompt: The system prompt of the user's model. It does not see the system messages of the row.
        system_prompt_column: A column of the row that is appended to `system_prompt`.
        greeting: The first message that the user's model sees, as if the trained model had written it. If the prompt of the row
            ends with a user message, that message is the user's answer to the greeting; otherwise the user's model writes
            the first user message.
        stop_phrase: The phrase by which the user's model ends the conversation; the text before it is its last message. None
            means that it never ends the conversation.
        max_user_turns: How many times the user's model answers at most. The trained model has the last turn.
        timeout: Seconds for one answer of `chat_model`.

    Raises ConfigError.
    """

    def __init__(
        self,
        *,
        endpoint: Mapping[str, Any] | None = None,
        chat_model: str | ChatModel | None = None,
        system_prompt: str | None = None,
        system_prompt_column: str | None = None,
        greeting: str = "Hello! What can I do for you?",
        stop_phrase: str | None = "[DONE]",
        max_user_turns: int | None = None,
        timeout: float | None = None,
    ) -> None:
        chat = given_chat_model(endpoint, chat_model, owner="ModelledUser", key="environment.arguments.chat_model")
        if system_prompt is None and system_prompt_column is None:
            raise ConfigError("ModelledUser needs a system prompt: set system_prompt, system_prompt_column or both")
        if max_user_turns is not None and (isinstance(max_user_turns, bool) or max_user_turns < 1):
            raise ConfigError(f"max_user_turns={max_user_turns} is not allowed; it must be at least 1")
        if stop_phrase is not None and not stop_phrase.strip():
            raise ConfigError(
                f"stop_phrase={stop_phrase!r} occurs in all texts: use a phrase that is not empty, or null for no stop phrase"
            )
        if timeout is not None and (endpoint is not None or not timeout > 0):
            fix = "set endpoint.timeout" if endpoint is not None else "give a number above 0"
            raise ConfigError(f"timeout={timeout} has no effect: {fix}")
        self._chat_model = chat
        self._system_prompt, self._column = system_prompt, system_prompt_column
        self._greeting = greeting
        self._stop = stop_phrase
        self._turns_left = max_user_turns
        self._timeout = 30.0 if timeout is None else timeout
        self._bounded = endpoint is None
        self._messages: list[Message] = []

    async def begin(self, row: Row) -> Opening:
        prompt = [self._system_prompt] if self._system_prompt is not None else []
        if self._column is not None:
            prompt.append(str(row[self._column]))
        self._messages = [
            {"role": "system", "content": "\n\n".join(prompt)},
            *exchange_roles(row.messages, self._greeting),
        ]
        if self._messages[-1]["role"] == "assistant":
            return Opening(messages=row.messages)
        text, done = await self._answer()
        if done and not text:
            raise ServiceError(f"the modelled user ended the conversation of row {row.id!r} without writing a message")
        return Opening(messages=[*row.messages, *user_message(text).messages])

    async def step(self, turn: Turn) -> Reply:
        if self._turns_left == 0:
            return Reply(done=True)
        self._messages.append({"role": "user", "content": _text(turn.message.get("content"))})
        text, done = await self._answer()
        if self._turns_left is not None:
            self._turns_left -= 1
        return Reply(messages=user_message(text).messages if text else (), done=done)

    async def close(self) -> None:
        pass

    async def _answer(self) -> tuple[str, bool]:
        """The text of the user's answer, and whether it ends the conversation."""
        text, stopped = await self._sample(), ""
        if self._stop is not None:
            text, stopped, _ = text.partition(self._stop)
        text = text.strip()
        if not text and not stopped:
            raise ServiceError("the modelled user returned an empty answer")
        self._messages.append({"role": "assistant", "content": text})
        return text, bool(stopped)

    async def _sample(self) -> str:
        messages = [dict(message) for message in self._messages]
        try:
            # `Endpoint` has its own timeout, for each attempt
            async with asyncio.timeout(self._timeout if self._bounded else None):
                return await ask_chat_model(self._chat_model, messages, name="the modelled user", kind="environment")
        except TimeoutError:
            raise ServiceError(f"the modelled user did not answer within {self._timeout:g} s") from None


def exchange_roles(messages: Sequence[Message], greeting: str) -> list[Message]:
    """The conversation as the user's model sees it: exchanged roles, no system and tool messages, `greeting` first."""
    roles = {"user": "assistant", "assistant": "user"}
    exchanged = [
        {"role": roles[message["role"]], "content": text}
        for message in messages
        if message["role"] in roles and (text := _text(message.get("content")))
    ]
    if exchanged and exchanged[0]["role"] == "user":
        return exchanged
    return [{"role": "user", "content": greeting}, *exchanged]


def _text(content: Any) -> str:
    """The text of a message, without images."""
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
