"""A model on a server that scores given tokens: their log-probabilities, and those of the most likely tokens.

vLLM: `/v1/completions` with `prompt_logprobs`. SGLang: `/generate` with `return_logprob` and `top_logprobs_num`. Both give
log-probabilities of the unmodified distribution. Knows token ids and HTTP. Does not know who asks, or why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.engines.remote.http import HttpLimits, HttpServer
from turnwise.errors import ConfigError, EngineError

__all__ = ["ScoredToken", "ScoringServer"]

_AT_ONCE = 32
"""Requests that a server has at the same time."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """What a server says of one token of a sequence."""

    logprob: float
    top: Sequence[tuple[int, float]]
    """The most likely tokens and their log-probabilities, the most likely first."""
    text: str | None
    """The token as the server's tokenizer writes it; None if the server did not say it."""


class ScoringServer:
    """A server at `url`. `timeout` is the limit of a call of `score` in seconds. Raises ConfigError if the URL is invalid."""

    def __init__(self, url: str, kind: Literal["vllm", "sglang"], *, timeout: float) -> None:
        self.url = url
        self._kind = kind
        self._timeout = timeout
        self._server = HttpServer(url, limits=HttpLimits(answer=timeout), token_hint="use a server without a token")
        self._model: str | None = None

    async def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], top_k: int
    ) -> list[list[ScoredToken] | EngineError]:
        """For each sequence, given as its token ids and the positions of tokens in it (above 0, rising): these tokens, with the
        `top_k` most likely tokens at their places; or why the sequence could not be scored."""
        limit = asyncio.Semaphore(_AT_ONCE)
        deadline = asyncio.get_running_loop().time() + self._timeout

        async def one(token_ids: Sequence[int], positions: Sequence[int]) -> list[ScoredToken] | EngineError:
            try:
                async with asyncio.timeout_at(deadline), limit:
                    return await self._score(token_ids, positions, top_k)
            except TimeoutError:
                return EngineError(
                    f"{self.url} gave no answer within {self._timeout:g} s, the time for all {len(sequences)} sequences: raise "
                    f"teacher.timeout"
                )
            except EngineError as error:
                return error

        try:
            return list(await asyncio.gather(*(one(*sequence) for sequence in sequences)))
        finally:
            await self._server.close()

    async def _score(self, token_ids: Sequence[int], positions: Sequence[int], top_k: int) -> list[ScoredToken]:
        """Raises EngineError."""
        ask = self._of_vllm if self._kind == "vllm" else self._of_sglang
        try:
            found = await ask(list(token_ids), positions, top_k)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"{self.url} answered in another form than {self._kind}'s ({type(error).__name__}: {error}): set "
                f"teacher.server to the kind of the server"
            ) from error
        short = min((len(one.top) for one in found), default=top_k)
        if short < top_k:
            raise EngineError(
                f"{self.url} gave {short} of the {top_k} most likely tokens: start it with a larger limit (vLLM: --max-logprobs "
                f"{top_k}), or set a smaller teacher.top_k"
            )
        return found

    async def _of_vllm(self, token_ids: list[int], positions: Sequence[int], top_k: int) -> list[ScoredToken]:
        if self._model is None:
            self._model = str((await self._server.get("/v1/models"))["data"][0]["id"])
        body = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
        }
        answer = await self._server.post("/v1/completions", body)
        entries = answer["choices"][0]["prompt_logprobs"]
        self._refuse_short(entries, len(token_ids), len(token_ids))
        return [_of_entry(entries[place], token_ids[place], top_k) for place in positions]

    async def _of_sglang(self, token_ids: list[int], positions: Sequence[int], top_k: int) -> list[ScoredToken]:
        start = max(0, positions[0] - 1)  # the first entry has no log-probability
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": top_k,
            "return_text_in_logprobs": True,
        }
        about = (await self._server.post("/generate", body))["meta_info"]
        entries, tops = about["input_token_logprobs"], about["input_top_logprobs"]
        self._refuse_short(entries, len(token_ids) - start, len(token_ids))
        return [
            ScoredToken(
                float(entries[place - start][0]),
                sorted(
                    ((int(id), float(logprob)) for logprob, id, *_ in tops[place - start]), key=lambda pair: -pair[1]
                ),
                entries[place - start][2],
            )
            for place in positions
        ]

    def _refuse_short(self, entries: Sequence[Any], expected: int, tokens: int) -> None:
        """Raises EngineError."""
        if len(entries) != expected:
            raise EngineError(
                f"{self.url} gave {len(entries)} log-probabilities for the last {expected} of {tokens} tokens: there must be one "
                f"for each. The server may cut long prompts: raise its context length"
            )

    async def refuse_other_tokens(self, texts: Mapping[int, str]) -> None:
        """Raise ConfigError if the server is not there, or writes a token in another way than `texts`. The first difference is
        named."""
        ids = list(texts)
        (found,) = await self.score([(ids, range(1, len(ids)))], 1)
        if isinstance(found, EngineError):
            raise ConfigError(f"the teacher at {self.url} cannot score tokens: {found}") from found
        for id, one in zip(ids[1:], found, strict=True):
            if one.text is not None and one.text.strip() != texts[id].strip():
                raise ConfigError(
                    f"the teacher at {self.url} has another vocabulary than the student: the token {id} is {texts[id]!r} in the "
                    f"student and {one.text!r} in the teacher. A teacher scores token ids, so it must have the same ids: use a "
                    f"teacher of the same family"
                )


def _of_entry(entry: Mapping[str, Mapping[str, Any]], token: int, top_k: int) -> ScoredToken:
    """One place of vLLM's `prompt_logprobs`: by the ids of tokens, the given token and the most likely."""
    own = entry[str(token)]
    ranked = sorted(((int(id), float(one["logprob"])) for id, one in entry.items()), key=lambda pair: -pair[1])
    return ScoredToken(float(own["logprob"]), ranked[:top_k], own.get("decoded_token"))
