"""A tokenizer's own description of what its model writes (transformers' `response_template`), as a format.

transformers reads the turn, and reads all of it or nothing: where one call is malformed it raises, and the whole turn becomes
one malformed call. So this is what is left where no format of ours reads the template; docs/tool_calls.md compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import arguments_of, refuse_unwritable
from turnwise.chat.tool_calls.parsing import MalformedCall, ParsedText, assign_ids, malformed_call, well_formed_call
from turnwise.chat.tool_calls.reasoning import KNOWN, ThoughtMarks
from turnwise.errors import Failed, TemplateError, boundary
from turnwise.types import ToolCall, ToolSchema

__all__ = ["FromResponseTemplate"]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class FromResponseTemplate:
    """Reads with transformers and `spec`, the attribute `response_template` of a tokenizer.

    Raises TemplateError if transformers does not accept the spec.
    """

    name = "response_template"
    example = "the chat template does"

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._spec = load_response_template(dict(spec))
        except (ValueError, TypeError) as error:
            raise TemplateError(f"the tokenizer's response_template is none that can be read: {error}") from error
        fields = spec["fields"]
        openings = [fields[field].get("open", "") for field in _THOUGHTS if field in fields]
        self._opened = next((opening for opening in openings if isinstance(opening, str)), "")

    def parse(
        self,
        text: str,
        *,
        first_id: int = 0,
        thinking: bool = False,
        tools: Sequence[ToolSchema] = (),
        marks: ThoughtMarks = KNOWN,
    ) -> ParsedText:
        from transformers.utils.chat_parsing import parse_response

        try:
            with boundary("tokens"):
                message = parse_response(
                    text, self._spec, prefix=self._opened if thinking else "", tools=list(tools) or None
                )
        except Failed as failed:
            reasoning, said = marks.split(text, opened=thinking)
            calls = [malformed_call(failed.failure.message, said, example=self.example)]
            return ParsedText(content="", reasoning=reasoning, calls=assign_ids(calls, first_id))
        return ParsedText(
            content=str(message.get("content") or "").strip("\n"),
            reasoning="\n".join(str(message[field]) for field in _THOUGHTS if message.get(field)),
            calls=assign_ids((self._call(one) for one in message.get("tool_calls") or []), first_id),
        )

    def _call(self, found: Any) -> ToolCall:
        written = str(found)
        try:
            function = found.get("function", found) if isinstance(found, dict) else None
            if not isinstance(function, dict):
                raise MalformedCall(f"it is a {type(function).__name__}, not an object", 0)
            name, arguments = function.get("name"), function.get("arguments")
            if not isinstance(name, str) or not name:
                raise MalformedCall('its "name" is missing', 0)
            arguments = arguments_of({} if arguments is None else arguments)
            refuse_unwritable(arguments, 0)  # the library lets NaN pass
            id = found.get("id") if isinstance(found, dict) else None
            return well_formed_call(name, arguments, written, id if isinstance(id, str) else "")
        except MalformedCall as problem:
            return malformed_call(problem, written, example=self.example)
