"""Conversations held by the loop as it is, with an engine that says its lines: what is masked, and what a turn costs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from turnwise.doctor.check import Check, run_lengths
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import Environment, environment, say
from turnwise.environments.tools import Tool, Tools
from turnwise.errors import TemplateError
from turnwise.rollout.limits import Limits
from turnwise.rollout.probes import QUESTION, probe_call, words
from turnwise.rollout.renderer import Renderer, Thinking
from turnwise.rollout.rollout import Table, new_group, rollout_group
from turnwise.types import Message, Opening, Reply, Row, Sampling, Trajectory, Turn

__all__ = ["cost", "masked"]

_TURNS = 40
_EARLY, _LATE = slice(3, 10), slice(190, 200)
"""Turns whose times are compared."""
_MOST_TIMES = 3.0
"""Times as long as an early turn that a late one may take before it is told: on a busy machine timings are coarse."""


def masked(renderer: Renderer, thinking: Thinking) -> Check:
    """A short conversation, token run by token run; and whether exactly what the model sampled is trained on."""
    with_tool = _has_format(renderer)
    trajectory = _hold(
        renderer, _with_tool() if with_tool else _asked_back(turns=2), _script(renderer, with_tool), thinking
    )
    runs = [
        (turn, renderer.decode(segment.token_ids[start:end]))
        for segment in trajectory.segments
        for turn, start, end in run_lengths(segment)
    ]
    if trajectory.error is not None:
        return Check(
            "mask", "fail", f"the conversation broke ({trajectory.error.kind}): {trajectory.error.message}", runs
        )
    sampled = [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion is not None]
    found = [
        [
            token
            for segment in trajectory.segments
            for token, turn in zip(segment.token_ids, segment.turn, strict=True)
            if turn == number
        ]
        for number in range(len(sampled))
    ]
    if found != sampled or len(sampled) != 2:
        return Check(
            "mask", "fail", f"the trained tokens {found} are not the sampled ones {sampled}: please report it", runs
        )
    if trajectory.drift is not None:
        # what the model says is its own affair: the template would write it otherwise, and what was sampled is trained on
        own = trajectory.drift.startswith("what the model said")
        return Check(
            "mask", "note" if own else "fail", f"the tokens are not those of the template: {trajectory.drift}", runs
        )
    trained, all_tokens = sum(map(len, found)), sum(len(segment) for segment in trajectory.segments)
    return Check("mask", "ok", f"{trained} of {all_tokens} tokens are trained on: the sampled ones, each once", runs)


def cost(renderer: Renderer, thinking: Thinking) -> Check:
    """Tokens that are encoded for each that is kept, and how the time of a turn grows."""
    counting = Counting(renderer.tokenizer)
    counted = Renderer(counting, sanity="disable", generation_stop_ids=renderer.stop_token_ids)
    held = _hold(
        counted, _asked_back(turns=_TURNS), [_line(renderer, n) for n in range(_TURNS)], thinking, plain=renderer
    )
    if held.error is not None:
        return Check("cost", "fail", f"a conversation of {_TURNS} turns broke: {held.error.message}")
    kept = sum(len(segment) for segment in held.segments)
    ratio = counting.encoded / kept
    last = _LATE.stop
    timed = _hold(renderer, _asked_back(turns=last), [_line(renderer, n) for n in range(last)], thinking)
    times = [turn.info["seconds"] for turn in timed.turns if "seconds" in turn.info]
    text = f"{_TURNS} turns: {counting.encoded:,} tokens encoded, {kept:,} kept ({ratio:.2f})"
    if len(times) < last - 1:
        return Check("cost", "note", f"{text}; a conversation of {last} turns ended after {len(times)}")
    growth = statistics.median(times[_LATE]) / statistics.median(times[_EARLY])
    text += f"; turn 200 takes {growth:.1f} times as long as turn 5"
    if ratio > 1.2:
        return Check(
            "cost", "fail", f"{text}: at most 1.2 tokens should be encoded for each that is kept; please report it"
        )
    return Check("cost", "note" if growth > _MOST_TIMES else "ok", text)


class Counting:
    """A tokenizer that counts the tokens it has encoded. All else is the tokenizer's own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokenizer's own, counted."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self.encoded += len(ids)
        return ids


def _hold(
    renderer: Renderer,
    held_by: Environment,
    lines: Sequence[str],
    thinking: Thinking,
    *,
    plain: Renderer | None = None,
) -> Trajectory:
    """One conversation through the loop. `plain` encodes the model's lines, where `renderer` counts."""
    group = new_group(Row(id="doctor", messages=[{"role": "user", "content": "How old is the tree?"}]), size=1, seed=0)
    encode = (plain or renderer).encode
    table = Table(
        engine=ScriptedEngine([lines], encode=encode, stop_token_id=renderer.stop_token_ids[0]),
        renderer=renderer,
        make_environment=lambda: held_by,
        sampling=Sampling(),
        limits=Limits(turns=len(lines), tokens_per_turn=512, seconds=None, seconds_per_turn=None),
        thinking=thinking,
    )
    asyncio.run(rollout_group(group, table))
    return group.trajectories[0]


def _asked_back(*, turns: int) -> Environment:
    return _asks_back(turns=turns)


@environment
async def _asks_back(row: Row, turns: int) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user who asks back; the time from one answer of the model to its next goes into the turn's info."""
    yield Opening(messages=row.messages)
    for number in range(1, turns):
        began = time.perf_counter()
        turn = yield say(f"Are you sure, for the {number}. time?")
        turn.info["seconds"] = time.perf_counter() - began
    yield Reply(done=True)


def _with_tool() -> Environment:
    def probe_tool(text: str) -> str:
        """Look something up.

        Args:
            text: What to look up.
        """
        return f"found: {text} is 12 years old"

    return Tools([Tool.of(probe_tool)])


def _has_format(renderer: Renderer) -> bool:
    try:
        _ = renderer.tool_format
    except TemplateError:
        return False
    return renderer.template.call_shape is not None


def _script(renderer: Renderer, with_tool: bool) -> list[str]:
    """What the model says in the two rounds, as the template writes it, the end of the turn left off."""
    first = probe_call({"text": "the tree"}) if with_tool else words("It is 12 years old.")
    return [_said(renderer, first), _said(renderer, words("Yes, it is 12 years old."))]


def _line(renderer: Renderer, number: int) -> str:
    return _said(renderer, words(f"It is {number} years old, as far as anybody can tell from outside."))


def _said(renderer: Renderer, message: Message) -> str:
    text = renderer.template.said(message)
    ends = [text.find(stop) for stop in (renderer.decode([token]) for token in renderer.stop_token_ids) if stop in text]
    text = text[: min(ends, default=len(text))].rstrip()
    inside = renderer.opening([QUESTION]).thinking and "</think>" not in text  # the cue has opened a thought
    return f"It is a tree.\n</think>\n\n{text}" if inside else text
