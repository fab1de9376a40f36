"""Engines that answer without a model: with given texts, with the recorded turns of conversations, or with what a person types.

Given texts are for tests of environments, and for conversations without model weights. Recorded turns are given again token by
token, for replays. A person takes the turns in `turnwise play`. Does not know messages, rewards or weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.engines.engine import SharedWeights, WeightPublisher, WeightSource
from turnwise.errors import EngineError
from turnwise.types import Completion, LogprobKind, Request
from turnwise.user_code.calls import waiting_for_others


class ScriptedEngine:
    """Answers each turn of a conversation with the next text of its script.

    `scripts` maps conversation ids to lists of texts. A plain list of scripts is assigned in the order in which conversations
    send their first request. Each text is encoded, and `stop_token_id` is appended unless the text ends with a stop token. The
    completion is cut at `Sampling.max_tokens`. `encode_behind(last_token, text)` encodes a text after the prompt's last token,
    for tokenizers that split a text differently at the start of an input.

    `generate` raises EngineError if a conversation has no script, or no text is left in its script.
    """

    def __init__(
        self,
        scripts: Mapping[str, Sequence[str]] | Sequence[Sequence[str]],
        *,
        encode: Callable[[str], Sequence[int]],
        stop_token_id: int,
        encode_behind: Callable[[int, str], Sequence[int]] | None = None,
    ) -> None:
        self._named = dict(scripts) if isinstance(scripts, Mapping) else None
        """Scripts by conversation id; None if they are assigned in order."""
        self._unassigned = iter([] if isinstance(scripts, Mapping) else scripts)
        self._assigned: dict[str, Sequence[str]] = {}
        self._turns: dict[str, int] = {}
        """Number of texts that each conversation has received."""
        self._encode = encode
        self._encode_behind = encode_behind
        self._stop_token_id = stop_token_id
        self.version = 0
        self.constrains = self.continues_forms = True
        """It stands in for engines that sample under grammars; its texts are taken as they are."""

    async def start(self) -> None:
        pass

    async def generate(self, request: Request) -> Completion:
        name = request.conversation
        turn = self._turns.get(name, 0)
        script = self._script(name)
        if turn >= len(script):
            raise EngineError(
                f"the script of {name!r} has {len(script)} texts and the conversation asks for number {turn + 1}; "
                f"add a text, or lower limits.turns"
            )
        self._turns[name] = turn + 1
        return self._completion(request, script[turn])

    def _completion(self, request: Request, text: str) -> Completion:
        """A text as what a model samples after the request's prompt."""
        ids = list(
            self._encode(text) if self._encode_behind is None else self._encode_behind(request.token_ids[-1], text)
        )
        if not ids or ids[-1] not in (self._stop_token_id, *request.sampling.stop_token_ids):
            ids.append(self._stop_token_id)
        cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        return Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason="length" if cut else "stop",
            logprob_kind=LogprobKind.NONE,
        )

    def _script(self, name: str) -> Sequence[str]:
        if self._named is not None:
            if name not in self._named:
                raise EngineError(
                    f"there is no script for the conversation {name!r}; the texts of an agent stand under its name in `agents` "
                    f"of the conversation's script"
                )
            return self._named[name]
        if name not in self._assigned:
            script = next(self._unassigned, None)
            if script is None:
                raise EngineError(f"all scripts are handed out, and {name!r} asks for one more")
            self._assigned[name] = script
        return self._assigned[name]

    def release(self, conversation: str) -> None:
        self._assigned.pop(conversation, None)
        self._turns.pop(conversation, None)

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        self.version = version

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return SharedWeights(self)

    async def close(self) -> None:
        pass


# A person


class AskingEngine(ScriptedEngine):
    """Asks for each turn: `answer(request)` gives the text of the turn, or a completion that a model has sampled.

    The time of the answer does not count for the deadlines of the conversation.
    """

    def __init__(
        self,
        answer: Callable[[Request], Awaitable[str | Completion]],
        *,
        encode: Callable[[str], Sequence[int]],
        encode_behind: Callable[[int, str], Sequence[int]],
        stop_token_id: int,
    ) -> None:
        super().__init__([], encode=encode, encode_behind=encode_behind, stop_token_id=stop_token_id)
        self._answer = answer

    async def generate(self, request: Request) -> Completion:
        with waiting_for_others():
            answer = await self._answer(request)
        return answer if isinstance(answer, Completion) else self._completion(request, answer)


# Recorded turns


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A turn whose sampled tokens are not all in the record. Its text is encoded instead."""

    text: str
    cut: bool
    """Whether a limit cut the turn, so that it has no stop token."""


class RecordedEngine(ScriptedEngine):
    """Answers each turn of a conversation with the recorded turn: its tokens, or its text where they are not in the record.

    `generate` raises EngineError if the conversation asks for a turn that was not recorded.
    """

    def __init__(
        self,
        turns: Mapping[str, Sequence[Completion | RecordedText]],
        *,
        encode: Callable[[str], Sequence[int]],
        encode_behind: Callable[[int, str], Sequence[int]],
        stop_token_id: int,
    ) -> None:
        texts = {
            name: [turn.text if isinstance(turn, RecordedText) else "" for turn in recorded]
            for name, recorded in turns.items()
        }
        super().__init__(texts, encode=encode, encode_behind=encode_behind, stop_token_id=stop_token_id)
        self._recorded = turns
        self._given: dict[str, int] = {}
        """Number of turns that each conversation has received."""

    async def generate(self, request: Request) -> Completion:
        name = request.conversation
        number, recorded = self._given.get(name, 0), self._recorded[name]
        if number >= len(recorded):
            raise EngineError(f"the conversation asks for turn {number}, and the record has {len(recorded)} turns")
        self._given[name] = number + 1
        completion, turn = await super().generate(request), recorded[number]
        if isinstance(turn, Completion):
            return turn
        if not turn.cut:
            return completion
        return Completion(
            token_ids=completion.token_ids[:-1],
            logprobs=completion.logprobs[:-1],
            versions=completion.versions[:-1],
            finish_reason="length",
            logprob_kind=completion.logprob_kind,
        )

    def release(self, conversation: str) -> None:
        super().release(conversation)
        self._given.pop(conversation, None)
