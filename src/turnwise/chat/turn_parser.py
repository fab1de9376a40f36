"""Parses a sampled turn: its text, its reasoning, its answer and its tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turnwise.chat.template_profile import TemplateProblem, TemplateProfile
from turnwise.chat.tool_calls import ToolFormat
from turnwise.chat.turn_messages import ParsedTurn, call_field
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolCall, ToolSchema

__all__ = ["TurnParser"]


class TurnParser:
    """Parses the turns of one model. `where` names its tokenizer in error messages."""

    def __init__(self, profile: TemplateProfile, decode: Callable[[Sequence[int]], str], where: str) -> None:
        self._profile = profile
        self._decode = decode
        self._where = where

    @property
    def tool_format(self) -> ToolFormat:
        """The format in which the template writes tool calls and the model is expected to write them.

        Raises TemplateError if the format is unknown.
        """
        format = self._profile.tool_format
        if isinstance(format, TemplateProblem):
            raise TemplateError(
                f"the chat template of {self._where} {format.reason}, so the format in which the model should "
                f"write them is unknown. Set the format (for example tool_format=hermes), use a model whose template writes tool "
                f"calls, or remove the tools"
            )
        return format

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] = (),
        first_call: int = 0,
        reasoning_opening: str = "",
        text_before: str = "",
    ) -> ParsedTurn:
        """Parse a sampled turn. Calls are searched only if there are `tools`; their ids count from `first_call`.

        `reasoning_opening` is the text with which the generation prompt opens reasoning (`EncodedMessages.reasoning_opening`).
        `text_before` is the earlier part of a turn that was continued: the complete turn is parsed. Text of any kind is accepted;
        a call that cannot be read has its `error` set. Raises TemplateError if there are tools and their format is unknown.
        """
        stopped = len(token_ids) > 0 and token_ids[-1] in self._profile.stop_tokens.token_ids
        text = text_before + self._decode(token_ids[:-1] if stopped else token_ids)
        reasoning, content, calls = self._split(text, bool(reasoning_opening), tools, first_call)
        content = content.removeprefix(self._profile.turn.leading_space)  # the template writes it again
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        readable = [call for call in calls if call.error is None]
        if readable:
            message["tool_calls"] = [call_field(call) for call in readable]
        return ParsedTurn(
            text=text, message=message, reasoning=reasoning, calls=calls, reasoning_opening=reasoning_opening
        )

    def _split(
        self, text: str, opened: bool, tools: Sequence[ToolSchema], first_call: int
    ) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Reasoning, content and calls of a turn's text. The content is without the template's marks around an answer."""
        format, without_marks = self._profile.reasoning, self._profile.turn.without_answer_marks
        if tools:
            read = self.tool_format.parse(text, first_id=first_call, thinking=opened, tools=tools, marks=format.marks)
            return read.reasoning, without_marks(read.content), read.calls
        if format.supported:
            reasoning, content = format.marks.split(text, opened=opened)
            return reasoning, without_marks(content), ()
        return "", without_marks(text), ()
