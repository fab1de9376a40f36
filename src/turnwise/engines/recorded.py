"""An engine that gives the recorded turns of conversations again, token by token, for replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.engines.scripted import ScriptedEngine
from turnwise.errors import EngineError
from turnwise.types import Completion, Request

__all__ = ["RecordedEngine", "RecordedText"]


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
