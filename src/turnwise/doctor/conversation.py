"""Conversations held by the loop as it is, with an engine that says its lines: what is masked, and what a turn costs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from turnwise.chat.probes import QUESTION, assistant_message, probe_call
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.doctor.check import Check, Run, Status, run_lengths
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import Environment, environment, user_message
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import TemplateError
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.rollout.limits import Limits
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_group
from turnwise.types import Message, Opening, Reply, Row, Sampling, Trajectory, Turn

__all__ = ["cost", "masked", "said"]

_TURNS, _LONG = 40, 200
_EARLY, _LATE = 5, 200
"""Turns whose tokens are compared."""
_MOST_ENCODED = 1.2
"""Tokens that may be encoded for each that is kept: more means that something is encoded twice."""
_MOST_GROWTH = 1.5
"""Times as many tokens as an early turn that a late one may need; its numbers have a digit more."""


def masked(renderer: Renderer, thinking: Thinking, rule: TurnWeighting | None = None) -> Check:
    """A short conversation, token run by token run; and whether exactly what the model sampled is trained on.

    `rule` is the recipe's loss mask: what it leaves out is shown so, and is no finding.
    """
    with_tool = _has_format(renderer)
    trajectory = _hold(
        renderer, _with_tool() if with_tool else _asked_back(turns=2), _script(renderer, with_tool), thinking
    )
    if rule is not None:
        rule(trajectory)
    runs = [
        Run(turn, trajectory.turns[turn].weight if turn >= 0 else 0.0, renderer.decode(segment.token_ids[start:end]))
        for segment in trajectory.segments
        for turn, start, end in run_lengths(segment)
    ]

    def answer(status: Status, text: str) -> Check:
        return Check("mask", status, text, runs)

    if trajectory.error is not None:
        return answer("fail", f"the conversation broke ({trajectory.error.kind}): {trajectory.error.message}")
    sampled = [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion is not None]
    found = [_tokens_of(trajectory, number) for number in range(len(sampled))]
    if found != sampled or len(sampled) != 2:
        return answer("fail", f"the trained tokens {found} are not the sampled ones {sampled}: please report it")
    if trajectory.template_mismatch is not None:
        # what the model says is its own affair: the template would write it otherwise, and what was sampled is trained on
        own = trajectory.template_mismatch.startswith("what the model said")
        return answer(
            "note" if own else "fail", f"the tokens are not those of the template: {trajectory.template_mismatch}"
        )
    trained, all_tokens = sum(map(len, found)), sum(len(segment) for segment in trajectory.segments)
    text = f"{trained} of {all_tokens} tokens were sampled, each once, and no other is trained on"
    left_out = [str(turn.index) for turn in trajectory.turns if turn.weight == 0]
    if left_out:
        text += f"; loss_mask leaves out turn {' and '.join(left_out)}"
    return answer("ok", text)


def _tokens_of(trajectory: Trajectory, number: int) -> list[int]:
    return [
        token
        for segment in trajectory.segments
        for token, turn in zip(segment.token_ids, segment.turn, strict=True)
        if turn == number
    ]


def cost(renderer: Renderer, thinking: Thinking) -> Check:
    """Tokens that are encoded for each that is kept, and how many a late turn needs beside an early one."""
    encoded, kept, broke = _encoded(renderer, thinking, _TURNS)
    if broke is not None:
        return Check("cost", "fail", f"a conversation of {_TURNS} turns broke: {broke}")
    ratio = sum(encoded) / kept
    text = f"{_TURNS} turns: {sum(encoded):,} tokens encoded for {kept:,} kept ({ratio:.2f})"
    encoded, _, broke = _encoded(renderer, thinking, _LONG)
    if broke is not None:
        return Check("cost", "fail", f"{text}; a conversation of {_LONG} turns broke: {broke}")
    early, late = encoded[_EARLY - 1], encoded[_LATE - 1]
    text += f"; turn {_LATE} encodes {late:,}, turn {_EARLY} {early:,}"
    if ratio > _MOST_ENCODED:
        return Check("cost", "fail", f"{text}: more than {_MOST_ENCODED} for each kept; please report it")
    if late > _MOST_GROWTH * early:
        if thinking == "keep":
            return Check("cost", "fail", f"{text}: a turn should cost its own tokens only; please report it")
        return Check("cost", "note", f"{text}: thinking={thinking} writes the conversation anew with each segment")
    return Check("cost", "ok", text)


def _encoded(renderer: Renderer, thinking: Thinking, turns: int) -> tuple[list[int], int, str | None]:
    """Tokens that were encoded for each turn of a conversation, those that were kept, and what broke in it."""
    counting = Counting(renderer.tokenizer)
    counted = Renderer(counting, sanity="disable", generation_stop_ids=renderer.stop_token_ids)
    lines, marks = [_line(renderer, n) for n in range(turns)], [0]
    counting.encoded = 0  # what was asked of the template once
    held = _hold(counted, _asks_back(turns=turns, marks=marks, counting=counting), lines, thinking, plain=renderer)
    encoded = [after - before for before, after in itertools.pairwise(marks)]
    return encoded, sum(len(one) for one in held.segments), None if held.error is None else held.error.message


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
    table = RolloutContext(
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
    return _asks_back(turns=turns, marks=[], counting=None)


@environment
async def _asks_back(
    row: Row, turns: int, marks: list[int], counting: Counting | None
) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user who asks back, and notes in `marks` how many tokens were encoded until each turn of the model."""
    yield Opening(messages=row.messages)
    for number in range(1, turns + 1):
        if counting is not None:
            marks.append(counting.encoded)
        if number < turns:
            yield user_message(f"Are you sure, for the {number}. time?")
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
        _ = renderer.turn_parser.tool_format
    except TemplateError:
        return False
    return renderer.template.writes_calls


def _script(renderer: Renderer, with_tool: bool) -> list[str]:
    """What the model says in the two rounds."""
    first = probe_call({"text": "the tree"}) if with_tool else assistant_message("It is 12 years old.")
    return [said(renderer, first), said(renderer, assistant_message("Yes, it is 12 years old."))]


def _line(renderer: Renderer, number: int) -> str:
    return said(renderer, assistant_message(f"It is {number} years old, as far as anybody can tell from outside."))


def said(renderer: Renderer, message: Message) -> str:
    """What the model says to say this, as the template writes it, the end of the turn left off."""
    text = renderer.template.completion_text(message)
    ends = [text.find(stop) for stop in (renderer.decode([token]) for token in renderer.stop_token_ids) if stop in text]
    text = text[: min(ends, default=len(text))].rstrip()
    inside = renderer.encode_opening([QUESTION]).open_thought and "</think>" not in text  # the cue has opened a thought
    return f"It is a tree.\n</think>\n\n{text}" if inside else text
