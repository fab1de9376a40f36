"""The experts that a server reports for the tokens of a request, as `Routes`.

A server reports them for all layers of the model, also for layers without experts, whose numbers mean nothing. A request asks
for the tokens whose experts are not known yet; the last sampled token has none, because it has not been computed. Knows numbers
and layers. Does not know routes of HTTP, or models.

Axis suffixes: T tokens, L layers of the model, K experts of a token in a layer.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np

from turnwise.errors import EngineError
from turnwise.types import Request, Routes


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Which layers of a model have experts, as servers number the layers."""

    layers: tuple[int, ...]
    """The numbers of the layers with experts, from 0."""
    total: int
    """All layers of the model."""
    experts: int
    """Experts of such a layer."""

    def routes(self, server: str, numbers_TLK: np.ndarray) -> Routes:
        """The experts of tokens, from what a server reports of all layers. Raises EngineError if this cannot be right."""
        if numbers_TLK.ndim != 3 or numbers_TLK.shape[1] != self.total or not numbers_TLK.shape[2]:
            raise EngineError(
                f"{server} reported experts of the shape {list(numbers_TLK.shape)}; it must be [tokens, {self.total} layers, "
                f"experts of a token]. The server must serve the model of model.path, in a version with which turnwise is tested "
                f"(docs/engines.md)"
            )
        own_TLK = numbers_TLK[:, list(self.layers)]
        if own_TLK.size and not 0 <= int(own_TLK.min()) <= int(own_TLK.max()) < self.experts:
            raise EngineError(
                f"{server} reported the experts {int(own_TLK.min())} to {int(own_TLK.max())}; the model has 0 to "
                f"{self.experts - 1}"
            )
        number_bytes = 1 if self.experts <= 1 << 8 else 2
        data = np.ascontiguousarray(own_TLK.astype(f"<u{number_bytes}")).tobytes()
        return Routes(len(self.layers), numbers_TLK.shape[2], number_bytes, data)

    def of_npy(self, server: str, text: str | None) -> Routes | None:
        """From vLLM's answer: base64 of a numpy file, uint8 or uint16 [T, L, K]; None if there is none."""
        if text is None:
            return None
        return self.routes(server, np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))

    def of_int32(self, server: str, text: str | None, tokens: int) -> Routes | None:
        """From SGLang's answer: base64 of int32 [T, L, K], of so many tokens; None if there is none."""
        if text is None:
            return None
        numbers = np.frombuffer(base64.b64decode(text), dtype="<i4")
        if tokens < 1 or numbers.size % (tokens * self.total):
            raise EngineError(
                f"{server} reported {numbers.size} numbers of experts for {tokens} tokens of {self.total} layers: there must be "
                f"as many for each token and layer"
            )
        return self.routes(server, numbers.reshape(tokens, self.total, -1))


def first_unknown(request: Request) -> int:
    """The first token of a request whose experts are not known: a server is asked for those from this token on."""
    return 0 if request.routes is None else len(request.routes)


def joined(known: Routes | None, new: Routes, tokens: int) -> Routes:
    """The experts of the first tokens of a sequence of `tokens` tokens, and of those behind them. Raises EngineError if their
    sizes differ."""
    if known is None:
        return new.first(tokens)
    if (known.layers, known.top_k, known.number_bytes) != (new.layers, new.top_k, new.number_bytes):
        raise EngineError(
            f"the experts of a conversation are {known.top_k} in {known.layers} layers, and its server reports {new.top_k} in "
            f"{new.layers}: the server must serve the model of model.path"
        )
    return Routes(known.layers, known.top_k, known.number_bytes, known.data + new.data).first(tokens)
