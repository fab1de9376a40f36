"""The checks `mask` and `cost`: conversations of the real rollout loop, with an engine that returns scripted completions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from turnwise.chat.probes import QUESTION, TOOL, assistant_message, probe_call
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.doctor.check import Check, Status, TokenRun, run_lengths
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import Environment, environment, user_message
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import TemplateError
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_group
from turnwise.types import Message, MismatchKind, Opening, Reply, Row, Sampling, Trajectory, Turn

_TURNS, _LONG = 40, 200
_EARLY, _LATE = 5, 200
"""The two turns whose numbers of encoded tokens are compared, counted from 1."""
_MOST_ENCODED = 1.2
"""The largest allowed ratio of encoded tokens to tokens in the segments. Above it, tokens are encoded twice."""
_MOST_GROWTH = 1.5
"""The largest allowed ratio of tokens encoded for the late turn to tokens encoded for the early turn.

It is above 1 because the numbers in the late turn's texts have more digits.
"""


def masked(renderer: Renderer, thinking: Thinking, rule: TurnWeighting | None = None) -> Check:
    """Whether exactly the sampled tokens are trained on, in a short conversation that is shown run by run.

    `rule` is the recipe's loss mask. Turns that it leaves out are shown with the weight 0 and are no failure.
    """
    with_tool = _has_format(renderer)
    trajectory = _hold(
        renderer, _with_tool() if with_tool else _asked_back(turns=2), _script(renderer, with_tool), thinking
    )
    if rule is not None:
        rule(trajectory)
    runs = [
        TokenRun(
            turn, trajectory.turns[turn].weight if turn >= 0 else 0.0, renderer.decode(segment.token_ids[start:end])
        )
        for segment in trajectory.segments
        for turn, start, end in run_lengths(segment)
    ]

    def answer(status: Status, text: str) -> Check:
        return Check("mask", status, text, runs)

    if trajectory.error is not None:
        return answer("fail", f"the conversation failed ({trajectory.error.kind}): {trajectory.error.message}")
    sampled = [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion is not None]
    recorded = [_tokens_of(trajectory, number) for number in range(len(sampled))]
    if recorded != sampled or len(sampled) != 2:
        return answer(
            "fail", f"the segments have the tokens {recorded}, but {sampled} were sampled in 2 turns. Please report it"
        )
    if trajectory.template_mismatch is not None:
        # a completion that the template would write differently is no failure: the sampled tokens are trained on
        return answer(
            "note" if trajectory.template_mismatch.kind is MismatchKind.COMPLETION else "fail",
            f"the tokens differ from the tokens that the template writes: {trajectory.template_mismatch}",
        )
    trained, all_tokens = sum(map(len, recorded)), sum(len(segment) for segment in trajectory.segments)
    text = f"{trained} of {all_tokens} tokens were sampled; each is recorded once, and no other token is trained on"
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
    """Whether each token is encoded about once, and whether a late turn encodes as few tokens as an early turn."""
    encoded, recorded, error = _encoded(renderer, thinking, _TURNS)
    if error is not None:
        return Check("cost", "fail", f"a conversation of {_TURNS} turns failed: {error}")
    ratio = sum(encoded) / recorded
    text = f"{_TURNS} turns: {sum(encoded):,} tokens encoded, {recorded:,} tokens in the segments (ratio {ratio:.2f})"
    encoded, _, error = _encoded(renderer, thinking, _LONG)
    if error is not None:
        return Check("cost", "fail", f"{text}; a conversation of {_LONG} turns failed: {error}")
    early, late = encoded[_EARLY - 1], encoded[_LATE - 1]
    text += f"; turn {_EARLY} encodes {early:,} tokens, turn {_LATE} encodes {late:,}"
    if ratio > _MOST_ENCODED:
        return Check("cost", "note", f"{text}. The ratio should be at most {_MOST_ENCODED}. Please report it")
    if late > _MOST_GROWTH * early:
        if thinking == "keep":
            return Check("cost", "note", f"{text}. A turn should encode its own tokens only. Please report it")
        return Check("cost", "note", f"{text}. thinking={thinking} encodes the conversation again for each new segment")
    return Check("cost", "ok", text)


def _encoded(renderer: Renderer, thinking: Thinking, turns: int) -> tuple[list[int], int, str | None]:
    """The tokens encoded for each turn of a conversation, the tokens in its segments, and the error message or None."""
    counting = Counting(renderer.tokenizer)
    counted = Renderer(
        counting,
        sanity="disable",
        generation_stop_ids=renderer.stop_token_ids,
        chat_template_kwargs=renderer.template.arguments,
    )
    lines, marks = [_line(renderer, n) for n in range(turns)], [0]
    counting.encoded = 0  # tokens that were encoded to examine the template do not count
    trajectory = _hold(
        counted, _asks_back(turns=turns, marks=marks, counting=counting), lines, thinking, plain=renderer
    )
    encoded = [after - before for before, after in itertools.pairwise(marks)]
    error = None if trajectory.error is None else trajectory.error.message
    return encoded, sum(len(segment) for segment in trajectory.segments), error


class Counting:
    """A tokenizer that counts the tokens it encodes. All other attributes are those of the wrapped tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode with the wrapped tokenizer, and count the tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self.encoded += len(ids)
        return ids


def _hold(
    renderer: Renderer,
    user: Environment,
    lines: Sequence[str],
    thinking: Thinking,
    *,
    plain: Renderer | None = None,
) -> Trajectory:
    """One conversation of the rollout loop. `plain` encodes the scripted completions if `renderer` counts tokens."""
    group = new_group(Row(id="doctor", messages=[{"role": "user", "content": "How old is the tree?"}]), size=1, seed=0)
    encode = (plain or renderer).encode
    context = RolloutContext(
        engine=ScriptedEngine([lines], encode=encode, stop_token_id=renderer.stop_token_ids[0]),
        renderer=renderer,
        make_environment=lambda: user,
        sampling=Sampling(),
        limits=Limits(turns=len(lines), tokens_per_turn=512, seconds=None, seconds_per_turn=None),
        thinking=thinking,
    )
    asyncio.run(rollout_group(group, context))
    return group.trajectories[0]


def _asked_back(*, turns: int) -> Environment:
    return _asks_back(turns=turns, marks=[], counting=None)


@environment
async def _asks_back(
    row: Row, turns: int, marks: list[int], counting: Counting | None
) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user who asks again. Before each turn of the model it appends the number of tokens encoded so far to `marks`."""
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
    """Whether the model can call tools: their format is known, calls come back, and the prompt shows the tools."""
    try:
        renderer.refuse_unusable_tools([TOOL], renderer.encode_opening([QUESTION], [TOOL]).text)
    except TemplateError:
        return False
    profile = renderer.profile
    return renderer.template.writes_calls and profile.written_format_name == profile.tool_format_name


def _script(renderer: Renderer, with_tool: bool) -> list[str]:
    """The completions of the two turns."""
    first = probe_call({"text": "the tree"}) if with_tool else assistant_message("It is 12 years old.")
    return [completion_of(renderer, first), completion_of(renderer, assistant_message("Yes, it is 12 years old."))]


def _line(renderer: Renderer, number: int) -> str:
    return completion_of(
        renderer, assistant_message(f"It is {number} years old, as far as anybody can tell from outside.")
    )


def completion_of(renderer: Renderer, message: Message) -> str:
    """The completion with which the model says `message`, as the template writes it, without the end of the turn."""
    text = renderer.template.completion_text(message)
    ends = [text.find(stop) for stop in (renderer.decode([token]) for token in renderer.stop_token_ids) if stop in text]
    text = text[: min(ends, default=len(text))].rstrip()
    # whether the generation prompt has opened reasoning that the text does not close
    inside = renderer.encode_opening([QUESTION]).reasoning_opening and "</think>" not in text
    return f"It is a tree.\n</think>\n\n{text}" if inside else text
