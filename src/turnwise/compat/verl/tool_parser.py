"""verl's parsers of tool calls (`verl.experimental.agent_loop.tool_parser`): `ToolParser` and its registry.

A parser reads the calls in the token ids of a turn. The shipped ones read with turnwise's own formats. `ParserFormat` makes a
parser of the user a format of turnwise, so that the turns of all conversations are read with it.
"""

from __future__ import annotations

import asyncio
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from turnwise.chat.reasoning import ReasoningMarks
from turnwise.chat.tool_calls.formats import format_by_name
from turnwise.chat.tool_calls.parsing import ParsedText, ToolFormat, malformed_call, well_formed_call
from turnwise.compat.verl.base import FunctionCall, OpenAIFunctionToolSchema
from turnwise.compat.verl.files import load_class
from turnwise.compat.verl.names import verl_names
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.rollout.context import RolloutContext
from turnwise.types import ToolCall, ToolSchema

__all__ = [
    "FunctionCall",
    "GptOssToolParser",
    "HermesToolParser",
    "ParserFormat",
    "Qwen3XMLToolParser",
    "ToolParser",
    "read_parser",
    "with_parser",
]

ParserClass = TypeVar("ParserClass", bound="type[ToolParser]")


class ToolParser(ABC):
    """Reads the tool calls of a turn. Subclasses override `extract_tool_calls`."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn, besides those of the model."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text of a turn without its calls, and the calls."""
        raise NotImplementedError

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """A parser of the kind that was registered under a name. Raises ValueError."""
        if name not in cls._registry:
            have = ", ".join(sorted(cls._registry))
            raise ValueError(f"there is no tool parser {name!r}{nearest(name, cls._registry)}; there are: {have}")
        return cls._registry[name](tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[ParserClass], ParserClass]:
        """Register a class under a name, which `multi_turn.format` gives."""

        def decorator(subclass: ParserClass) -> ParserClass:
            cls._registry[name] = subclass
            return subclass

        return decorator


class _Format(ToolParser):
    """A parser that reads with a format of turnwise."""

    format_name: ClassVar[str]

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(list(responses_ids), skip_special_tokens=False)
        schemas = [tool.model_dump(exclude_unset=True) for tool in tools or ()]
        parsed = format_by_name(self.format_name).parse(text, tools=schemas)
        calls = [call for call in parsed.calls if call.error is None]
        for one in calls:
            text = text.replace(one.text, "", 1)
        arguments = [json.dumps(dict(call.arguments), ensure_ascii=False) for call in calls]
        return text, [
            FunctionCall(name=call.name, arguments=written, tool_call_id=call.written_id or None)
            for call, written in zip(calls, arguments, strict=True)
        ]


@ToolParser.register("hermes")
class HermesToolParser(_Format):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    format_name = "hermes"


@ToolParser.register("gpt-oss")
class GptOssToolParser(_Format):
    """The harmony format of gpt-oss."""

    format_name = "harmony"


@ToolParser.register("qwen3_coder")
class Qwen3XMLToolParser(_Format):
    """`<function=name><parameter=key>value</parameter></function>`."""

    format_name = "qwen3_coder"


for _name in ("glm", "kimi", "gemma4"):
    ToolParser.register(_name)(
        type(f"{_name.title()}ToolParser", (_Format,), {"format_name": _name, "__module__": __name__})
    )


def read_parser(name: str, *, key: str) -> type:
    """The parser class that a reference names. Raises ConfigError."""
    kind = load_class(name, key=key)
    if not callable(getattr(kind, "extract_tool_calls", None)):
        raise ConfigError(f"{key}: the class {kind.__name__} has no method extract_tool_calls(responses_ids, tools)")
    return kind


def with_parser(context: RolloutContext, kind: type) -> RolloutContext:
    """The context of conversations whose turns are read with a parser. Raises Failed if the parser cannot be created."""
    with boundary("tokens"), verl_names():
        parser = kind(copy.deepcopy(context.renderer.tokenizer))
        stops = tuple(getattr(parser, "stop_token_ids", ()))
    sampling = replace(context.sampling, stop_token_ids=(*context.sampling.stop_token_ids, *stops))
    return replace(context, renderer=context.renderer.with_tool_format(ParserFormat(parser)), sampling=sampling)


class ParserFormat(ToolFormat):
    """A parser as a format of tool calls (`ToolFormat`)."""

    def __init__(self, parser: ToolParser) -> None:
        self.name = type(parser).__name__
        self.example = f"a call that {self.name} reads"
        self._parser = parser

    def read(self, text: str, *, thinking: bool, tools: Sequence[ToolSchema], marks: ReasoningMarks) -> ParsedText:
        """Parse the text of a turn. If the parser raises, the turn has one malformed call, whose error the model receives."""
        ids = self._parser.tokenizer.encode(text, add_special_tokens=False)
        schemas = [OpenAIFunctionToolSchema.model_validate(tool) for tool in tools]
        try:
            with boundary("tokens"):
                content, found = _in_own_loop(self._parser.extract_tool_calls(list(ids), schemas))
                calls = [_call(one) for one in found]
        except Failed as failed:
            content, calls = (
                text,
                [malformed_call(f"{self.name}: {failed.failure.message}", text, example="a tool call")],
            )
        reasoning, content = marks.split(content, opened=thinking)
        return ParsedText(content=content, reasoning=reasoning, calls=tuple(calls))


def _call(call: FunctionCall) -> ToolCall:
    """A call with its arguments as a mapping; a malformed call if they are not the JSON text of one."""
    try:
        arguments = json.loads(call.arguments)
    except (TypeError, ValueError, RecursionError) as error:
        return malformed_call(
            f"invalid JSON in the arguments: {error}", str(call.arguments), example="{}", name=call.name
        )
    if not isinstance(arguments, dict):
        return malformed_call("the arguments must be a JSON object", call.arguments, example="{}", name=call.name)
    return well_formed_call(call.name, arguments, call.arguments, written_id=str(call.tool_call_id or ""))


def _in_own_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, run to its end in another thread: turns are parsed in sync code."""

    def run() -> Any:
        with verl_names():
            return asyncio.run(coroutine)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tool parser") as pool:
        return pool.submit(run).result()
