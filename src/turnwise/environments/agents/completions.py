"""OpenAI's completions: prompts that the client writes itself, and the text that follows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.environments.agents.chat_completions import openai_error, pieces, usage
from turnwise.environments.agents.requests import AgentAnswer, ChatRequest, Refused, forced_parameters, sampling_change

_READ = ("model", "prompt", "stream", "max_tokens", "stop")


class Completions:
    """`POST /v1/completions`."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Raises Refused."""
        options = body.get("stream_options")
        return ChatRequest(
            messages=(),
            prompt=_prompt(body.get("prompt")),
            forced=forced_parameters(body, read=_READ),
            sampling=sampling_change(body, max_tokens=("max_tokens",), stop="stop"),
            stream=bool(body.get("stream")),
            stream_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            model=str(body.get("model") or "model"),
        )

    def answer(self, request: ChatRequest, answer: AgentAnswer) -> dict[str, Any]:
        """The body of an answer."""
        return {**_chunk(answer, answer.text, "length" if answer.cut else "stop"), "usage": usage(answer)}

    def events(self, request: ChatRequest, answer: AgentAnswer) -> Iterator[tuple[str | None, Any]]:
        """The events of a stream: name (here None) and data."""
        for piece in pieces(answer.text):
            yield None, _chunk(answer, piece, None)
        yield None, _chunk(answer, "", "length" if answer.cut else "stop")
        if request.stream_usage:
            yield None, {**_chunk(answer, "", None), "choices": [], "usage": usage(answer)}
        yield None, "[DONE]"

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an error."""
        return openai_error(refused)


def _chunk(answer: AgentAnswer, text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    head = {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": answer.created, "model": answer.model}
    return {**head, "choices": [choice]}


def _prompt(prompt: Any) -> str | list[int]:
    """One prompt, which may stand in a list. Raises Refused."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or ids) or not prompt:
        raise Refused(
            400,
            f"`prompt` must be a text or a list of token ids, and not empty; it is {prompt!r:.80}. Send several prompts in "
            f"several requests",
            parameter="prompt",
        )
    return prompt
