"""What the model would have to sample for a conversation to come out as it was written: its lines, turn by turn.

The template is asked what it writes for each of the model's messages, given everything before it; calls, thoughts and the
token that ends the turn are then in the model's own form. A template that would lose something (most leave out thoughts that
stand in a message's content) is not believed: what was lost is put back, or the message is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.chat.base_conversations import PriorConversation
from turnwise.chat.renderer import Renderer
from turnwise.chat.tool_calls.reasoning import ReasoningMarks
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["REASONING", "lines"]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names under which a message's thoughts may stand beside its content."""


def lines(
    renderer: Renderer,
    opening: Sequence[Message],
    rounds: Sequence[tuple[Message, Sequence[Message]]],
    tools: Sequence[ToolSchema] = (),
) -> list[str]:
    """The text of each turn, the token that ends it included.

    `rounds` holds the model's messages, each with those that follow it. Raises TemplateError if the template takes a message
    in no way, or has no place for the thoughts or the calls in it.
    """
    template = renderer.template
    before = template.planned_opening(opening, tools)
    found: list[str] = []
    for message, answers in rounds:
        plain = _with_thoughts(renderer, _read(renderer, message))
        asked = _asked(before)
        line = _Line(renderer, asked, tools, prompt=template.render(asked, add_generation_prompt=True, tools=tools))
        stands = PriorConversation.from_messages([*before, plain], has_tools=bool(tools))
        found.append(line.of(message, answers, stands))
        handed = template.plan(answers, stands).apply(answers) if answers else []
        before = [*before, plain, *handed]
    return found


def _asked(before: Sequence[Message]) -> Sequence[Message]:
    """The messages without the model's own at their end: many templates write the last message in a way of its own."""
    end = len(before)
    while end > 1 and before[end - 1]["role"] == "assistant":
        end -= 1
    return before[:end]


@dataclass(frozen=True, slots=True)
class _Read:
    """A message, and what in it was thought."""

    message: Message
    """Without its thoughts where they stood beside the content; else as it was."""
    reasoning: str
    said: str
    """The content without thoughts."""
    beside: bool
    """Whether the thoughts stood beside the content, and not in it."""


def _read(renderer: Renderer, message: Message) -> _Read:
    beside = next((str(message[key]) for key in REASONING if message.get(key)), "")
    bare = {key: value for key, value in message.items() if key not in REASONING}
    content = bare.get("content")
    if beside or not isinstance(content, str) or not renderer.profile.reasoning.supported:
        return _Read(bare, beside.strip(), content if isinstance(content, str) else "", bool(beside))
    reasoning, said = renderer.profile.reasoning.marks.split(content)
    return _Read(bare, reasoning, said, False)


def _with_thoughts(renderer: Renderer, read: _Read) -> Message:
    """The message as the template takes it."""
    key = renderer.profile.reasoning.key
    if not read.beside or key is None:
        return read.message
    return {**read.message, key: read.reasoning}


@dataclass(frozen=True, slots=True)
class _Line:
    """The line of a turn after `before`."""

    renderer: Renderer
    before: Sequence[Message]
    tools: Sequence[ToolSchema]
    prompt: str
    """`before` as the template writes it, when the model is to speak."""

    def of(self, message: Message, answers: Sequence[Message], stands: PriorConversation) -> str:
        read = _read(self.renderer, message)
        opened = self.renderer.profile.reasoning.marks.open_thought(self.prompt)
        words = ""
        for words in self._ways(read, opened):
            if self._holds(words, read, bool(opened)):
                return self._ended(words, answers, stands)
        lost = read.reasoning if self._says(words, read) else read.said
        raise TemplateError(
            f"the chat template of {self.renderer.where} leaves out of an assistant message what is in the data: "
            f"{lost[:60]!r}. Write all that the model is to say into the message's content, or take this out of the data"
        )

    def _ways(self, read: _Read, opened: str) -> list[str]:
        """What the model may have to say, the template's own way first."""
        tried = [_with_thoughts(self.renderer, read)]
        if read.reasoning and self.renderer.profile.reasoning.key is not None:
            tried.append({**read.message, "content": read.said, self.renderer.profile.reasoning.key: read.reasoning})
        found: list[str] = []
        for message in tried:
            words = self._said(message)
            self._refuse_lost_calls(words, message)
            found.append(_inside(words, opened, self.renderer.profile.reasoning.marks))
        if read.reasoning and self.renderer.profile.reasoning.supported:
            # the template leaves thoughts out of what it writes: they stand before the words all the same
            opening, closing = next(iter(self.renderer.profile.reasoning.marks.own), ("", ""))
            said = self._said({**read.message, "content": read.said})
            raw = f"{opening}\n{read.reasoning}\n{closing}\n\n" + _without_thought(
                said, self.renderer.profile.reasoning.marks
            )
            if not read.beside and isinstance(read.message.get("content"), str) and not read.message.get("tool_calls"):
                raw = (
                    f"{read.message['content']}{self.renderer.profile.turn.closing}"  # word for word, as it was written
                )
            if opening or not read.beside:
                found.append(_inside(raw, opened, self.renderer.profile.reasoning.marks))
        return found

    def _said(self, message: Message) -> str:
        """What the template writes for the message."""
        template = self.renderer.template
        whole = template.render([*self.before, message], add_generation_prompt=False, tools=self.tools)
        for begun in (self.prompt, self.renderer.profile.reasoning.marks.without_open_thought(self.prompt)):
            if whole.startswith(begun):
                return whole[len(begun) :]
        # what stands before it is changed by what follows: it is asked behind a plain question
        return template.completion_text(message, tools=self.tools)

    def _holds(self, words: str, read: _Read, opened: bool) -> bool:
        """Whether all of the message is in the words, its thoughts as thoughts and nothing else as one."""
        if not self._says(words, read):
            return False
        if not read.reasoning:
            return True
        if not self.renderer.profile.reasoning.supported or not all(
            thought.text for thought in self.renderer.profile.reasoning.marks.thoughts(words, opened=opened)
        ):
            return False
        return _letters(self.renderer.profile.reasoning.marks.split(words, opened=opened)[0]) == _letters(
            read.reasoning
        )

    def _says(self, words: str, read: _Read) -> bool:
        return _letters(read.said) in _letters(words)

    def _refuse_lost_calls(self, words: str, message: Message) -> None:
        for call in message.get("tool_calls") or ():
            name = str(call["function"]["name"])
            if name not in words:
                raise TemplateError(
                    f"the chat template of {self.renderer.where} does not write the call of {name!r}: use a model whose "
                    f"template has tools, or write the call into the message's content as the model is to say it"
                )

    def _ended(self, words: str, answers: Sequence[Message], stands: PriorConversation) -> str:
        """The words up to the token that ends the turn."""
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
        # nothing ends a turn but the header of the next one: the model says its first token
        plan = template.plan(answers, stands)
        roles = [str(answer["role"]) for answer in plan.apply(answers)]
        head = template.text_before_content(roles, plan.base_turns[0], plan.base_for(stands))
        return words + min((stop for stop in stops if stop in head), key=head.index, default="")


def _inside(words: str, opened: str, marks: ReasoningMarks) -> str:
    """The words of a turn whose generation prompt has opened a thought already."""
    if not opened:
        return words
    mark = opened.strip()
    closing = next(closing for opening, closing in marks.closing_of.items() if opening.strip() == mark)
    bare = words.lstrip()
    if bare.startswith(mark):
        return bare.removeprefix(mark).lstrip("\n")
    return words if closing in words else f"\n{closing}\n\n{words}"


def _without_thought(words: str, marks: ReasoningMarks) -> str:
    """The words without an empty thought that the template puts before them."""
    bare = words.lstrip()
    for opening, closing in marks.closing_of.items():
        if bare.startswith(opening) and not bare.removeprefix(opening).partition(closing)[0].strip():
            return bare.removeprefix(opening).partition(closing)[2].lstrip()
    return words


def _letters(text: str) -> str:
    return "".join(text.split())
