"""A recorded conversation as text: short (messages, tool calls, rewards, tokens if wanted), or its complete story.

The story is plain text for `TURNWISE_LOG=debug` (docs/loggers.md, "Following one conversation"). It follows the tokens of the
conversation: each part of a segment, with its number of tokens, its text, and whether it is trained on; for each turn, also
what was parsed from it, the results of tool calls, the reward and the answer of the environment. Its texts are written with a
bar at the left and with control characters as escapes.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.errors import counted
from turnwise.record.metrics import UNNAMED_PART, reward_parts
from turnwise.record.reader import turns_of_messages
from turnwise.terminal.report import printable
from turnwise.terminal.tables import number
from turnwise.types import LogprobKind, Message, Segment, ToolSchema, Trajectory, Turn

# the short form

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def conversation(
    trajectory: Trajectory, *, tokens: bool = False, decode: Callable[[int], str] | None = None
) -> RenderableType:
    """One conversation: its row, the messages, the results of tool calls, the reward of each turn.

    `decode` gives the text of a token id, for the table of tokens; None leaves the column out.
    """
    parts: list[RenderableType] = list(_about(trajectory))
    for message, turns in zip(trajectory.messages, turns_of_messages(trajectory), strict=True):
        style = _STYLES.get(message["role"], "")
        for turn in turns or [None]:
            parts.append(Text(_heading(message, turn, trajectory), style=f"bold {style}"))
            parts.append(Text(turn.text if turn else str(message.get("content") or ""), style=style))
    if trajectory.error is not None:
        parts.append(Text(f"error ({trajectory.error.kind}): {trajectory.error.message}", style="bold red"))
    if trajectory.template_mismatch:
        parts.append(Text(f"template mismatch: {trajectory.template_mismatch}", style="red"))
    if tokens:
        parts += [_tokens(trajectory, segment, number, decode) for number, segment in enumerate(trajectory.segments)]
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:z.3g}"
    step = "" if trajectory.step is None else f"step {trajectory.step}, "
    title = f"{trajectory.id}  ({step}reward {reward}, stop: {trajectory.stop}, {trajectory.seconds:.2f} s)"
    return Panel(Group(*parts), title=Text(title), title_align="left")  # an id may hold [brackets]


def _about(trajectory: Trajectory) -> Iterator[RenderableType]:
    """The episode, the row's columns, the tools and the parts of the reward, where there are any."""
    if trajectory.episode:
        trained = "" if trajectory.trained else ", not trained on"
        if trajectory.policy:
            trained = f", played by the policy {trajectory.policy}{trained}"
        yield Text(f"agent  {trajectory.agent} of the episode {trajectory.episode}{trained}", style="dim")
    columns = trajectory.row.fields
    if columns:
        yield Text("row  " + ", ".join(f"{name}={_short(value)}" for name, value in columns.items()), style="dim")
    names = [_tool_name(tool) for tool in trajectory.tools]
    if names:
        yield Text("tools  " + ", ".join(names), style="dim")
    if trajectory.agents:
        agents = ", ".join(f"{agent.agent} ({agent.id})" for agent in trajectory.agents)
        yield Text(f"agents  {agents}", style="dim")
    parts = reward_parts(trajectory)
    if parts.keys() - {UNNAMED_PART}:
        shown = ", ".join(f"{name} {number(value)}" for name, value in parts.items())
        yield Text(f"rewards  {shown}", style="dim")


def _tool_name(tool: ToolSchema) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", "?"))


def _short(value: Any, length: int = 120) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def _heading(message: Message, turn: Turn | None, trajectory: Trajectory) -> str:
    role = message["role"]
    if role == "tool":
        name = f" {message['name']}" if message.get("name") else ""  # that of a malformed call may not be known
        return f"tool{name} ({message.get('tool_call_id', '')})"
    if turn is None:
        return role
    facts: list[str] = []
    if any(other.rewards for other in trajectory.turns):  # else the turns have none: functions gave the conversation's
        parts = (
            ", ".join(f"{name} {value:z.3g}" for name, value in turn.rewards.items()) if len(turn.rewards) > 1 else ""
        )
        facts.append(f"reward {turn.reward:z.3g}" + (f" ({parts})" if parts else ""))
    if trajectory.advantages:
        advantage = trajectory.advantages[turn.index]
        facts.append("advantage " + (f"{advantage:+z.2f}" if isinstance(advantage, int | float) else "per token"))
    if turn.weight != 1.0:
        facts.append(f"weight {turn.weight:g}")
    if turn.kept_tokens is not None:
        facts.append(f"cut after {turn.kept_tokens} tokens")
    return f"{role}  {', '.join(facts)}" if facts else role


def _tokens(
    trajectory: Trajectory, segment: Segment, number: int, decode: Callable[[int], str] | None
) -> RenderableType:
    """A row for each token. What the model did not sample has no log-probability and no version. These columns are left out where
    no log-probability can be used: the turns were given, as in fine-tuning, or are of several kinds."""
    sampled = trajectory.logprob_kind is not LogprobKind.NONE
    table = Table(
        title=f"segment {number}: {len(segment)} tokens",
        title_justify="left",
        caption="turn: empty where the model did not sample the token; weight: of the token in the loss, 0 is not trained on",
        caption_justify="left",
        box=None,
    )
    for name in ("token_ids", "turn", "weight", *(("logprobs", "version") if sampled else ())):
        table.add_column(name, justify="right")
    if decode is not None:
        table.add_column("text", overflow="fold")
    for column in zip(segment.token_ids, segment.turn, segment.logprobs, segment.version, strict=True):
        token, turn, logprob, version = column
        weight = trajectory.turns[turn].weight if turn >= 0 else 0.0
        style = "green" if weight else "yellow" if turn >= 0 else "dim"
        cells = [str(token), str(turn) if turn >= 0 else "", f"{weight:g}"]
        if sampled:
            cells += [f"{logprob:z.4f}", str(version)] if turn >= 0 else ["", ""]
        texts = [] if decode is None else [Text(json.dumps(decode(token), ensure_ascii=False))]
        table.add_row(*cells, *texts, style=style)
    return table


# the story

CHOICE = "TURNWISE_LOG_CONVERSATION"
"""The environment variable with the id of the conversation; without it, the first conversation of each step is described."""

_log = logging.getLogger(__name__)
_MOST_IDS = 12  # tokens whose ids are listed
_MOST_CHARACTERS = 4000  # of one text

Decode = Callable[[Sequence[int]], str]


def log_conversation(trajectories: Sequence[Trajectory], *, decode: Decode | None, step: int | None = None) -> None:
    """Log the story of one of the trajectories of a step on the level DEBUG.

    The variable TURNWISE_LOG_CONVERSATION has the id of the conversation, such as `2.0:17/0`, or the id without the part for
    the step, `17/0`. Without it, the first conversation is described. `decode` is None for conversations without tokens.
    """
    if not _log.isEnabledFor(logging.DEBUG) or not trajectories:
        return
    wanted = os.environ.get(CHOICE)
    chosen = [t for t in trajectories if wanted is None or t.id == wanted or t.id.endswith(f":{wanted}")]
    if chosen:
        _log.debug("%s", "\n".join(story(chosen[0], decode=decode, step=step)))
    else:
        ids = ", ".join(trajectory.id for trajectory in trajectories[:8])
        more = ", ..." if len(trajectories) > 8 else ""
        _log.debug("%s=%s: no conversation of this step has the id; the ids are: %s%s", CHOICE, wanted, ids, more)


def story(trajectory: Trajectory, *, decode: Decode | None, step: int | None = None) -> list[str]:
    """The lines of the story. `decode` gives the text of token ids, special tokens included."""
    lines = [f"conversation {trajectory.id}" + ("" if step is None else f" of step {step}")]
    if trajectory.row.fields:
        lines.append("row: " + ", ".join(f"{name}={_json(value)}" for name, value in trajectory.row.fields.items()))
    if trajectory.segments:
        described: set[int] = set()
        for number, segment in enumerate(trajectory.segments):
            lines += _segment(trajectory, segment, number, described, decode)
        lines += itertools.chain.from_iterable(
            turn_story(trajectory, turn) for turn in trajectory.turns if turn.index not in described
        )
    else:
        lines += _messages(trajectory)
    lines += end_story(trajectory)
    return [printable(line) for line in lines]


def _segment(
    trajectory: Trajectory, segment: Segment, number: int, described: set[int], decode: Decode | None
) -> Iterator[str]:
    """The parts of a segment, in the order of its tokens. Adds its turns to `described`."""
    several = len(trajectory.segments) > 1
    begin = 0
    for index, group in itertools.groupby(segment.turn):
        end = begin + len(list(group))
        ids = segment.token_ids[begin:end]
        where = f"{f'segment {number}, ' if several else ''}tokens {begin} to {end - 1}"
        if index < 0:
            name = "opening" if begin == 0 else "context"
            yield f"{name}: {where}, {_count(ids)}, not trained on; ids {_ids(ids)}"
            yield from with_bars(None if decode is None else decode(ids))
        else:
            turn = trajectory.turns[index]
            trained = f"weight {turn.weight:g}: " + ("trained on" if turn.weight else "not trained on")
            yield f"turn {index}: {where}, {_count(ids)} {_sampled(trajectory, segment, begin, end)}, {trained}; ids {_ids(ids)}"
            if index not in described:
                described.add(index)
                yield from turn_story(trajectory, turn)
        begin = end


def _sampled(trajectory: Trajectory, segment: Segment, begin: int, end: int) -> str:
    """How the tokens from `begin` to `end`, which are of one turn, came about."""
    if trajectory.logprob_kind is LogprobKind.NONE:
        return "without log-probabilities"
    seconds = trajectory.turns[segment.turn[begin]].seconds_engine
    versions = ", ".join(map(str, sorted(set(segment.version[begin:end]))))
    mean = sum(segment.logprobs[begin:end]) / (end - begin)
    return f"sampled in {seconds:.2f} s with weights of version {versions}, mean log-probability {mean:z.3f}"


def turn_story(trajectory: Trajectory, turn: Turn) -> Iterator[str]:
    """A turn and the answer to it. The messages of the environment are the next context, so they are not repeated here."""
    if turn.chat_template_kwargs:
        yield f"  prompt rendered with chat_template_kwargs {_json(turn.chat_template_kwargs)}"
    yield from with_bars(turn.text)
    cut = "" if turn.kept_tokens is None else f"; the environment kept {turn.kept_tokens} tokens of it"
    yield f"  ended with finish reason {turn.finish_reason}{cut}"
    if turn.reasoning:
        yield "  parsed reasoning:"
        yield from with_bars(turn.reasoning)
    for call in turn.calls:
        if call.error is not None:
            yield f"  parsed call {call.id}: not a valid call: {call.error}"
        else:
            yield f"  parsed call {call.id}: {call.name}({_json(call.arguments)})"
    for outcome in turn.outcomes:
        result = "result:" if outcome.error is None else f"error ({outcome.error}):"
        yield f"  tool {outcome.name} ({outcome.id}), {outcome.seconds:.2f} s, reward {outcome.reward:zg}, {result}"
        yield from with_bars(outcome.content)
    parts = "".join(f", {name} {value:zg}" for name, value in turn.rewards.items()) if len(turn.rewards) > 1 else ""
    advantage = ""
    if trajectory.advantages:
        value = trajectory.advantages[turn.index]
        advantage = f"; advantage {value:+z.4g}" if isinstance(value, int | float) else "; an advantage for each token"
    yield f"  reward {turn.reward:zg}{parts}{advantage}; the environment took {turn.seconds_environment:.2f} s"


def _messages(trajectory: Trajectory) -> Iterator[str]:
    """A conversation without tokens: its messages."""
    for message, turns in zip(trajectory.messages, turns_of_messages(trajectory), strict=True):
        if turns:
            for turn in turns:
                usage = turn.usage
                tokens = (
                    "" if usage is None else f"; {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} sampled"
                )
                yield f"turn {turn.index}: answered in {turn.seconds_engine:.2f} s{tokens}"
                yield from turn_story(trajectory, turn)
        elif message.get("role") != "tool":  # results of tools are shown with their turn
            yield f"message, {message.get('role')}:"
            content = message.get("content")
            yield from with_bars(content if isinstance(content, str) else _json(content))


def end_story(trajectory: Trajectory) -> Iterator[str]:
    """How the conversation ended, and its reward."""
    lengths = [len(segment) for segment in trajectory.segments]
    trained = sum(
        index >= 0 and trajectory.turns[index].weight != 0 for segment in trajectory.segments for index in segment.turn
    )
    if lengths:
        yield f"mask: {trained} of {counted(sum(lengths), 'token')} in {counted(len(lengths), 'segment')} are trained on"
    parts = reward_parts(trajectory)
    # the part without a name would read as a number of turns
    shown = ", ".join(
        f"{'environment and tools' if name == UNNAMED_PART else name} {value:g}" for name, value in parts.items()
    )
    of = f" ({shown})" if parts.keys() - {UNNAMED_PART} else ""
    yield f"reward: {'none' if trajectory.reward is None else f'{trajectory.reward:g}'}{of}"
    if trajectory.error is not None:
        yield f"error ({trajectory.error.kind}): {trajectory.error.message}"
        yield from with_bars(trajectory.error.traceback or None)
    if trajectory.template_mismatch:
        yield f"template mismatch: {trajectory.template_mismatch}"
    yield f"end: stop reason {trajectory.stop}, {counted(len(trajectory.turns), 'turn')}, {trajectory.seconds:.2f} s"


def with_bars(text: str | None, *, whole: bool = False) -> Iterator[str]:
    """A text with a bar before each line; of a long text the beginning, unless it is wanted `whole`."""
    if text is None:
        return
    shown = text if whole else text[:_MOST_CHARACTERS]
    for line in shown.split("\n"):
        yield f"  | {line}"
    if len(text) > len(shown):
        yield f"  ({len(text) - len(shown)} more characters)"


def _count(ids: Sequence[int]) -> str:
    return counted(len(ids), "token")


def _ids(ids: Iterable[int]) -> str:
    """The first and the last token ids."""
    texts = [str(token) for token in ids]
    if len(texts) > _MOST_IDS:
        texts = [*texts[: _MOST_IDS - 4], "...", *texts[-4:]]
    return " ".join(texts)


def _json(value: Mapping[str, Any] | Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}... ({len(text)} characters)"
