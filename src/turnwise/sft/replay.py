"""Replays given conversations: rows that contain assistant messages become trajectories to train on.

A scripted engine returns the assistant messages, and the environment `Replay` returns all others; its replies do not depend on
the completion. The rollout loop produces the tokens, so the tokens and loss masks are the same as in reinforcement learning
for the same text. This module imports no torch and does not read recipes.

The completion text of an assistant message is the text that the model would have to sample: the chat template renders the
message after all messages before it. Tool calls, reasoning and the stop token therefore have the format of the model.
Invariant: no part of a message is lost. Most templates leave out reasoning that is part of a message's content; such reasoning
is inserted again, or TemplateError is raised.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnwise import assembly
from turnwise.chat.probes import PriorConversation
from turnwise.chat.reasoning import ReasoningMarks
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.errors import Failed, TemplateError, boundary
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Failure, Message, Opening, Reply, Row, Sampling, Stop, ToolSchema, Trajectory, Turn

# the environment

Round = tuple[Message, list[Message]]
"""An assistant message, and the messages between it and the next assistant message."""


class Replay:
    """Begins with the row's messages before the first assistant message, and answers each turn with the messages that follow it.

    The row's column `tools` defines the tools of the conversation; the argument `tools` is used for rows without this column.
    The conversation is done after the last assistant message. Messages after that one are recorded, and the model is not
    called for them.
    """

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        self._tools = tools
        self._rounds: list[Round] = []

    async def begin(self, row: Row) -> Opening:
        opening, self._rounds = rounds(row.messages)
        return Opening(messages=opening, tools=row.fields.get("tools", self._tools))

    async def step(self, turn: Turn) -> Reply:
        assistant, answers = self._rounds.pop(0) if self._rounds else ({}, [])
        ids = {
            str(written.get("id")): call.id
            for written, call in zip(assistant.get("tool_calls") or (), turn.calls, strict=False)
        }
        return Reply(messages=[_answering(answer, ids) for answer in answers], done=not self._rounds)

    async def close(self) -> None:
        pass


def _answering(message: Message, ids: Mapping[str, str]) -> Message:
    """A tool message with the id that its call has in this conversation.

    The id in the data can differ from it: templates that print no ids lose the id of the data.
    """
    id = str(message.get("tool_call_id"))
    return {**message, "tool_call_id": ids[id]} if message["role"] == "tool" and id in ids else message


def rounds(messages: Sequence[Message]) -> tuple[list[Message], list[Round]]:
    """The messages before the first assistant message, and each assistant message with the messages that follow it.

    Example: system, user, assistant, tool, assistant gives `[system, user]` and `[(assistant, [tool]), (assistant, [])]`.
    """
    opening: list[Message] = []
    result: list[Round] = []
    for message in messages:
        if message["role"] == "assistant":
            result.append((message, []))
        else:
            (result[-1][1] if result else opening).append(message)
    return opening, result


# completion texts

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that can hold its reasoning separately from its content."""


def lines(
    renderer: Renderer,
    opening: Sequence[Message],
    rounds: Sequence[tuple[Message, Sequence[Message]]],
    tools: Sequence[ToolSchema] = (),
) -> list[str]:
    """The completion text of each turn, including the stop token; one text per round.

    `opening` has the messages before the first assistant message. `rounds` has the assistant messages, each with the messages
    that follow it.

    Raises TemplateError if the template cannot write a message, or cannot write its content, reasoning or tool calls.
    """
    template = renderer.template
    before = template.planned_opening(opening, tools)
    texts: list[str] = []
    for message, answers in rounds:
        plain = _with_reasoning(renderer, _read(renderer, message))
        asked = _asked(before)
        line = _Line(renderer, asked, tools, prompt=template.render(asked, add_generation_prompt=True, tools=tools))
        stands = PriorConversation.from_messages([*before, plain], has_tools=bool(tools))
        texts.append(line.of(message, answers, stands))
        handed = template.plan(answers, stands).apply(answers) if answers else []
        before = [*before, plain, *handed]
    return texts


def _asked(before: Sequence[Message]) -> Sequence[Message]:
    """The messages without assistant messages at the end: many templates write the last message in a different way."""
    end = len(before)
    while end > 1 and before[end - 1]["role"] == "assistant":
        end -= 1
    return before[:end]


@dataclass(frozen=True, slots=True)
class _Read:
    """A message, separated into reasoning and other content."""

    message: Message
    """The message without the keys of `REASONING`. Reasoning inside the content stays there."""
    reasoning: str
    text: str
    """The content without reasoning."""
    beside: bool
    """Whether the reasoning was under a key of `REASONING`, and not in the content."""


def _read(renderer: Renderer, message: Message) -> _Read:
    beside = next((str(message[key]) for key in REASONING if message.get(key)), "")
    bare = {key: value for key, value in message.items() if key not in REASONING}
    content = bare.get("content")
    if beside or not isinstance(content, str) or not renderer.profile.reasoning.supported:
        return _Read(bare, beside.strip(), content if isinstance(content, str) else "", bool(beside))
    reasoning, text = renderer.profile.reasoning.marks.split(content)
    return _Read(bare, reasoning, text, False)


def _with_reasoning(renderer: Renderer, read: _Read) -> Message:
    """The message with its reasoning under the key that the template reads, if there is such a key."""
    key = renderer.profile.reasoning.key
    if not read.beside or key is None:
        return read.message
    return {**read.message, key: read.reasoning}


@dataclass(frozen=True, slots=True)
class _Line:
    """Computes the completion text of a turn whose prompt has the messages `before`."""

    renderer: Renderer
    before: Sequence[Message]
    tools: Sequence[ToolSchema]
    prompt: str
    """The rendered text of `before`, with the generation prompt."""

    def of(self, message: Message, answers: Sequence[Message], stands: PriorConversation) -> str:
        read = _read(self.renderer, message)
        opened = self.renderer.profile.reasoning.marks.reasoning_opening(self.prompt)
        words = ""
        for words in self._ways(read, opened):
            if self._holds(words, read, bool(opened)):
                return self._ended(words, answers, stands)
        lost = read.reasoning if self._says(words, read) else read.text
        raise TemplateError(
            f"the chat template of {self.renderer.where} leaves out a part of an assistant message: {lost[:60]!r}. Write the "
            f"complete text of the turn into the message's content, or remove this part from the data"
        )

    def _ways(self, read: _Read, opened: str) -> list[str]:
        """Candidate completion texts. Those that the template writes come first."""
        tried = [_with_reasoning(self.renderer, read)]
        if read.reasoning and self.renderer.profile.reasoning.key is not None:
            tried.append({**read.message, "content": read.text, self.renderer.profile.reasoning.key: read.reasoning})
        texts: list[str] = []
        for message in tried:
            words = self._rendered(message)
            self._refuse_lost_calls(words, message)
            texts.append(_inside(words, opened, self.renderer.profile.reasoning.marks))
        if read.reasoning and self.renderer.profile.reasoning.supported:
            # if the template leaves reasoning out, the reasoning is inserted before the content
            opening, closing = next(iter(self.renderer.profile.reasoning.marks.own), ("", ""))
            text = self._rendered({**read.message, "content": read.text})
            raw = f"{opening}\n{read.reasoning}\n{closing}\n\n" + _without_reasoning(
                text, self.renderer.profile.reasoning.marks
            )
            if not read.beside and isinstance(read.message.get("content"), str) and not read.message.get("tool_calls"):
                raw = f"{read.message['content']}{self.renderer.profile.turn.closing}"  # the content is used unchanged
            if opening or not read.beside:
                texts.append(_inside(raw, opened, self.renderer.profile.reasoning.marks))
        return texts

    def _rendered(self, message: Message) -> str:
        """The text that the template writes for the message."""
        template = self.renderer.template
        conversation = template.render([*self.before, message], add_generation_prompt=False, tools=self.tools)
        for begun in (self.prompt, self.renderer.profile.reasoning.marks.without_reasoning_opening(self.prompt)):
            if conversation.startswith(begun):
                return conversation[len(begun) :]
        # the message changes the text of the messages before it: it is rendered after a plain user message instead
        return template.completion_text(message, tools=self.tools)

    def _holds(self, words: str, read: _Read, opened: bool) -> bool:
        """Whether the text has the entire content, and exactly the reasoning of the message inside reasoning marks."""
        if not self._says(words, read):
            return False
        if not read.reasoning:
            return True
        if not self.renderer.profile.reasoning.supported or not all(
            block.text for block in self.renderer.profile.reasoning.marks.reasoning_blocks(words, opened=opened)
        ):
            return False
        return _letters(self.renderer.profile.reasoning.marks.split(words, opened=opened)[0]) == _letters(
            read.reasoning
        )

    def _says(self, words: str, read: _Read) -> bool:
        return _letters(read.text) in _letters(words)

    def _refuse_lost_calls(self, words: str, message: Message) -> None:
        for call in message.get("tool_calls") or ():
            name = str(call["function"]["name"])
            if name not in words:
                raise TemplateError(
                    f"the chat template of {self.renderer.where} does not render the call of {name!r}: use a model whose chat "
                    f"template supports tools, or write the call into the message's content in the model's own format"
                )

    def _ended(self, words: str, answers: Sequence[Message], stands: PriorConversation) -> str:
        """The text up to and including the stop token."""
        template = self.renderer.template
        stops = [self.renderer.decode([token]) for token in self.renderer.stop_token_ids]
        closing = self.renderer.profile.turn.closing
        if closing and words.endswith(closing) and any(stop in closing for stop in stops):
            end = min(closing.index(stop) + len(stop) for stop in stops if stop in closing)
            return words[: len(words) - len(closing) + end]
        end = max((words.rfind(stop) + len(stop) for stop in stops if stop in words), default=0)
        if end and not words[end:].strip():
            return words[:end]
        if not answers:
            return words
        # the turn has no stop token of its own: the model samples the first stop token in the header of the next message
        plan = template.plan(answers, stands)
        roles = [str(answer["role"]) for answer in plan.apply(answers)]
        head = template.text_before_content(roles, plan.base_turns[0], plan.base_for(stands))
        return words + min((stop for stop in stops if stop in head), key=head.index, default="")


def _inside(words: str, opened: str, marks: ReasoningMarks) -> str:
    """The completion text if the generation prompt already contains the opening mark of reasoning (`opened`)."""
    if not opened:
        return words
    mark = opened.strip()
    closing = next(closing for opening, closing in marks.closing_of.items() if opening.strip() == mark)
    bare = words.lstrip()
    if bare.startswith(mark):
        return bare.removeprefix(mark).lstrip("\n")
    return words if closing in words else f"\n{closing}\n\n{words}"


def _without_reasoning(words: str, marks: ReasoningMarks) -> str:
    """The text without the empty reasoning block that the template writes before it."""
    bare = words.lstrip()
    for opening, closing in marks.closing_of.items():
        if bare.startswith(opening) and not bare.removeprefix(opening).partition(closing)[0].strip():
            return bare.removeprefix(opening).partition(closing)[2].lstrip()
    return words


def _letters(text: str) -> str:
    return "".join(text.split())


# trajectories


async def replay(
    rows: Sequence[Row],
    renderer: Renderer,
    *,
    thinking: Thinking = "keep",
    context: int | None = None,
    tools: Sequence[ToolSchema] = (),
    prefix: str = "",
    concurrent: int = 256,
) -> list[Trajectory]:
    """Replay the conversations of the rows. Returns one trajectory per row, in the order of the rows.

    The id of a trajectory is `<prefix><place>:<row id>/0`, with places counted from 0. `context` is the maximum number of
    tokens of a conversation: a longer conversation stops there, with a stop reason other than `done`. `tools` are used for
    rows without a column `tools`. At most `concurrent` conversations run at the same time.

    A conversation that the chat template cannot write is returned as a failed trajectory.
    """
    groups = [new_group(row, size=1, seed=0, prefix=f"{prefix}{place}:") for place, row in enumerate(rows)]
    scripts: dict[str, list[str]] = {}
    for group in groups:
        (trajectory,) = group.trajectories
        opening, assistant_rounds = rounds(trajectory.row.messages)
        try:
            with boundary("row"):
                of_row = renderer.for_arguments(trajectory.row.chat_template_kwargs)
                scripts[trajectory.id] = lines(
                    of_row, opening, assistant_rounds, trajectory.row.fields.get("tools", tools)
                )
        except Failed as failed:
            trajectory.fail(failed.failure)
    table = RolloutContext(
        engine=assembly.scripted_engine(renderer, scripts, continue_prompt=True),
        renderer=renderer,
        make_environment=functools.partial(Replay, tools),
        sampling=Sampling(),
        # the data determines the length of a conversation
        limits=Limits(
            turns=sys.maxsize, tokens_per_turn=sys.maxsize, context=context, seconds_per_turn=None, seconds=None
        ),
        thinking=thinking,
        max_concurrent=concurrent,
    )
    await rollout_groups([group for group in groups if group.trajectories[0].id in scripts], table)
    return [group.trajectories[0] for group in groups]


def weigh(trajectory: Trajectory, mask: TurnWeighting | None = None, *, cut: bool = False) -> bool:
    """Set the turn weights and advantages of a replayed trajectory. Returns whether it is trained on.

    The weight of a turn is the weight from `mask` times the entry of the row's `weights`; each advantage is 1. A failed
    trajectory is not trained on. A trajectory that exceeded the context is trained on only if `cut` is set. If `weights`
    has fewer numbers than the trajectory has turns, the trajectory fails.
    """
    if trajectory.failed or (trajectory.stop is not Stop.DONE and not cut):
        return False
    if mask is not None:
        mask(trajectory)
        if trajectory.failed:
            return False
    weights = trajectory.row.fields.get("weights")
    if weights is not None and len(weights) < len(trajectory.turns):
        message = f"`weights` has {len(weights)} numbers for {len(trajectory.turns)} turns; there must be one for each"
        trajectory.fail(Failure("row", message))
        return False
    for turn in trajectory.turns:
        turn.weight *= 1.0 if weights is None else weights[turn.index]
    trajectory.advantages = [1.0] * len(trajectory.turns)
    return True


def problems(trajectories: Sequence[Trajectory], *, context: int | None) -> list[str]:
    """The reasons why trajectories are not trained on, each with the ids of its rows.

    Example: `rows 3, 17: row: ...`.
    """
    rows_of_problem: dict[str, list[str]] = {}
    for trajectory in trajectories:
        if trajectory.error is not None:
            rows_of_problem.setdefault(f"{trajectory.error.kind}: {trajectory.error.message}", []).append(
                trajectory.row.id
            )
        elif not trajectory.advantages:
            text = (
                f"longer than limits.context={context}, and left out; raise limits.context if the model allows more, or train "
                f"on the first tokens: sft.too_long=cut"
            )
            rows_of_problem.setdefault(text, []).append(trajectory.row.id)
    return [f"{_rows(ids)}: {text}" for text, ids in rows_of_problem.items()]


def _rows(ids: Sequence[str]) -> str:
    if len(ids) == 1:
        return f"row {ids[0]}"
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return f"rows {', '.join(ids[:5])}{more}"
