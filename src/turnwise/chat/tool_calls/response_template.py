"""A format defined by the tokenizer itself (`response_template` of transformers).

transformers parses the entire turn or raises: if a call is malformed, the turn becomes one malformed call, and its well-formed
calls are lost. So this format is used only if no named format parses the template; docs/tool_calls.md compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import arguments_of, refuse_unwritable
from turnwise.chat.tool_calls.parsing import MalformedCall, ParsedText, assign_ids, malformed_call, well_formed_call
from turnwise.chat.tool_calls.reasoning import KNOWN, ReasoningMarks
from turnwise.errors import Failed, TemplateError, boundary
from turnwise.types import ToolCall, ToolSchema

__all__ = ["FromResponseTemplate"]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class FromResponseTemplate:
    """Parses with transformers and `spec`, the attribute `response_template` of a tokenizer.

    Raises TemplateError if transformers does not accept the spec.
    """

    name = "response_template"
    example = "the chat template does"

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._spec = load_response_template(dict(spec))
        except (ValueError, TypeError) as error:
            raise TemplateError(f"the tokenizer's response_template is not valid: {error}") from error
        fields = spec["fields"]
        openings = [fields[field].get("open", "") for field in _REASONING_FIELDS if field in fields]
        self._opened = next((opening for opening in openings if isinstance(opening, str)), "")

    def parse(
        self,
        text: str,
        *,
        first_id: int = 0,
        thinking: bool = False,
        tools: Sequence[ToolSchema] = (),
        marks: ReasoningMarks = KNOWN,
    ) -> ParsedText:
        from transformers.utils.chat_parsing import parse_response

        try:
            with boundary("tokens"):
                message = parse_response(
                    text, self._spec, prefix=self._opened if thinking else "", tools=list(tools) or None
                )
        except Failed as failed:
            reasoning, content = marks.split(text, opened=thinking)
            calls = [malformed_call(failed.failure.message, content, example=self.example)]
            return ParsedText(content="", reasoning=reasoning, calls=assign_ids(calls, first_id))
        return ParsedText(
            content=str(message.get("content") or "").strip("\n"),
            reasoning="\n".join(str(message[field]) for field in _REASONING_FIELDS if message.get(field)),
            calls=assign_ids((self._call(call) for call in message.get("tool_calls") or []), first_id),
        )

    def _call(self, parsed: Any) -> ToolCall:
        written = str(parsed)
        try:
            function = parsed.get("function", parsed) if isinstance(parsed, dict) else None
            if not isinstance(function, dict):
                raise MalformedCall(f"the call must be an object, but is a {type(function).__name__}", 0)
            name, arguments = function.get("name"), function.get("arguments")
            if not isinstance(name, str) or not name:
                raise MalformedCall('the "name" is missing', 0)
            arguments = arguments_of({} if arguments is None else arguments)
            refuse_unwritable(arguments, 0)  # transformers accepts NaN
            id = parsed.get("id") if isinstance(parsed, dict) else None
            return well_formed_call(name, arguments, written, id if isinstance(id, str) else "")
        except MalformedCall as problem:
            return malformed_call(problem, written, example=self.example)
