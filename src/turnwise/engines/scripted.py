"""An engine that returns given texts. For tests of environments, and to replay a conversation without model weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.errors import EngineError
from turnwise.types import Completion, LogprobKind, Request

__all__ = ["ScriptedEngine"]


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
        text = script[turn]
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
                raise EngineError(f"there is no script for the conversation {name!r}")
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

    async def close(self) -> None:
        pass
