"""An engine that says its lines. Public, for everybody's tests, and to replay a conversation without a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.errors import EngineError
from turnwise.types import Completion, LogprobKind, Request

__all__ = ["ScriptedEngine"]


class ScriptedEngine:
    """Answers each turn of a conversation with the next text of its script.

    `scripts` maps conversation ids to texts; a plain list of scripts is handed out in the order in which conversations ask
    for the first time. Each text is encoded and ended with `stop_token_id`, unless it ends with a token that ends a turn by
    itself; it is cut where the request allows fewer tokens. `encode_behind` encodes a text behind the prompt's last token,
    for tokenizers that cut a text differently where it stands alone.
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
        self._waiting = iter([] if isinstance(scripts, Mapping) else scripts)
        self._running: dict[str, Sequence[str]] = {}
        self._said: dict[str, int] = {}
        self._encode = encode
        self._behind = encode_behind
        self._stop = stop_token_id
        self.version = 0

    async def generate(self, request: Request) -> Completion:
        name = request.conversation
        turn = self._said.get(name, 0)
        script = self._script(name)
        if turn >= len(script):
            raise EngineError(
                f"the script of {name!r} has {len(script)} texts and the conversation asks for number {turn + 1}; "
                f"add a text, or lower limits.turns"
            )
        self._said[name] = turn + 1
        text = script[turn]
        ids = list(self._encode(text) if self._behind is None else self._behind(request.token_ids[-1], text))
        if not ids or ids[-1] not in (self._stop, *request.sampling.stop_token_ids):
            ids.append(self._stop)
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
        if name not in self._running:
            script = next(self._waiting, None)
            if script is None:
                raise EngineError(f"all scripts are handed out, and {name!r} asks for one more")
            self._running[name] = script
        return self._running[name]

    def release(self, conversation: str) -> None:
        self._running.pop(conversation, None)
        self._said.pop(conversation, None)

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        self.version = version

    async def close(self) -> None:
        pass
