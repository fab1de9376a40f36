"""Conversations for tests: the loop as it is, an engine that says what it is told to, a byte-level tokenizer.

Nothing here stands in for code of ours: what is faked is the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from support import byte_tokenizer
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.engine import Engine, SharedWeights, WeightPublisher, WeightSource
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import EnvironmentFactory, SingleTurn
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Completion, LogprobKind, Request, Row, Sampling, Segment, Trajectory

RENDERER = Renderer(byte_tokenizer())
"""ChatML, one token a byte: 1 is <|im_start|>, 2 is <|im_end|>, a printable ASCII character is its code less 30."""

STOP = 2
CUE = "<|im_start|>assistant\n"


def a_row(text: str = "Hi", *, id: str = "1", **fields: Any) -> Row:
    """A row with one question."""
    return Row(id=id, messages=[{"role": "user", "content": text}], fields=fields)


class Says:
    """An engine that answers every conversation with the same turns, and remembers what it was asked.

    A turn is a text (encoded, and closed with the stop token), token ids as they are, or an exception to raise.
    """

    def __init__(self, *turns: str | Sequence[int] | Exception, seconds: float = 0.0) -> None:
        self._turns = turns
        self._seconds = seconds
        self._said: dict[str, int] = {}
        self.version = 0
        self.requests: list[Request] = []
        """Copies, because the prompt of a request is the segment itself, which grows."""
        self.released: list[str] = []
        self.together = 0
        """The most requests that were answered at once."""
        self._now = 0

    async def generate(self, request: Request) -> Completion:
        self.requests.append(
            Request(
                conversation=request.conversation,
                token_ids=tuple(request.token_ids),
                sampling=request.sampling,
                seed=request.seed,
            )
        )
        turn = self._said.get(request.conversation, 0)
        self._said[request.conversation], said = turn + 1, self._turns[turn]
        self._now += 1
        self.together = max(self.together, self._now)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self._now -= 1
        if isinstance(said, Exception):
            raise said
        ids = [*RENDERER.encode(said), STOP] if isinstance(said, str) else list(said)
        cut = len(ids) > request.sampling.max_tokens or ids[-1:] != [STOP]
        ids = ids[: request.sampling.max_tokens]
        return completion(ids, version=self.version, finish_reason="length" if cut else "stop")

    def release(self, conversation: str) -> None:
        self.released.append(conversation)

    async def start(self) -> None:
        pass

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        self.version = version

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return SharedWeights(self)

    async def close(self) -> None:
        pass


def completion(ids: Sequence[int], *, version: int = 0, finish_reason: Any = "stop") -> Completion:
    """A completion of these ids; the n-th has the log-probability -(n + 1) / 8, which a float32 holds exactly."""
    return Completion(
        token_ids=list(ids),
        logprobs=[-(n + 1) / 8 for n in range(len(ids))],
        versions=[version] * len(ids),
        finish_reason=finish_reason,
        logprob_kind=LogprobKind.SAMPLED,
    )


def scripted(*scripts: Sequence[str], renderer: Renderer = RENDERER) -> ScriptedEngine:
    """A scripted engine: one list of texts for each conversation."""
    return ScriptedEngine(scripts, encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0])


def a_table(
    engine: Engine,
    make_environment: EnvironmentFactory = SingleTurn,
    *,
    renderer: Renderer = RENDERER,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    concurrent: int = 256,
    lockstep: bool = False,
    thinking: Thinking = "keep",
) -> RolloutContext:
    """A table with room for long conversations."""
    return RolloutContext(
        engine=engine,
        renderer=renderer,
        make_environment=make_environment,
        sampling=sampling or Sampling(),
        limits=limits or Limits(turns=8, tokens_per_turn=400),
        max_concurrent=concurrent,
        lockstep=lockstep,
        thinking=thinking,
    )


def hold(
    engine: Engine | Sequence[str],
    make_environment: EnvironmentFactory = SingleTurn,
    *,
    row: Row | None = None,
    **table: Any,
) -> Trajectory:
    """One conversation through the loop; a list of texts is short for a scripted engine."""
    held = engine if isinstance(engine, Says | ScriptedEngine) or not isinstance(engine, Sequence) else scripted(engine)
    (trajectory,) = hold_all(held, make_environment, row=row, **table)
    return trajectory


def hold_all(
    engine: Engine,
    make_environment: EnvironmentFactory = SingleTurn,
    *,
    row: Row | None = None,
    size: int = 1,
    **table: Any,
) -> list[Trajectory]:
    """The conversations of one group through the loop."""
    group = new_group(row or a_row(), size=size, seed=0)
    asyncio.run(rollout_groups([group], a_table(engine, make_environment, **table)))
    return group.trajectories


def spoken(segment: Segment, renderer: Renderer = RENDERER) -> list[tuple[int, str]]:
    """A segment to be read by eye: the turn (or -1) and the text of each unbroken run of tokens."""
    runs: list[tuple[int, list[int]]] = []
    for turn, token in zip(segment.turn, segment.token_ids, strict=True):
        if not runs or runs[-1][0] != turn:
            runs.append((turn, []))
        runs[-1][1].append(token)
    return [(turn, renderer.decode(ids)) for turn, ids in runs]


def call(name: str, arguments: str = "{}") -> str:
    """A tool call as a hermes model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
