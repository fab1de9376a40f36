"""Computes the completion text of each assistant message: the text that the model would have to sample, turn by turn.

Each assistant message is rendered by the chat template after all messages before it. Tool calls, reasoning and the stop token
therefore have the format of the model. Invariant: no part of a message is lost. Most templates leave out reasoning that is
part of a message's content; such reasoning is inserted again, or TemplateError is raised.
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
