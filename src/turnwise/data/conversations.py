"""Reads complete conversations for fine-tuning: rows whose messages include those of the assistant.

A row has a column `messages` in the OpenAI format, or the columns `prompt` and `completion` as in TRL. It may also have
`tools`, `images` and `videos`. A conversation that cannot be trained on is an error at start-up, with the row's number.
This module does not depend on chat templates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.data.absent_values import AbsentValues, DroppedNulls
from turnwise.data.rows import SourceRecord, build_rows, clean_message, with_media, with_template_arguments
from turnwise.errors import DataError, nearest
from turnwise.json_yaml import parse_json
from turnwise.types import Message, Row, ToolSchema

__all__ = ["read_conversations"]

_OURS = ("messages", "prompt", "completion")
_FLAGS = ("train", "loss")
_LABELS = ("weight", *_FLAGS)
"""Keys of a message that set its weight in the loss. They are removed before a template sees the message."""
_ELSEWHERE = {
    "function_call": 'write {"tool_calls": [{"type": "function", "function": {"name": ..., "arguments": ...}}]}',
    "train_detail": "parts of a message cannot be left out: use `weight`, or two messages",
    "loss_scale": "use `weight`",
    "audio": "an assistant message contains only text",
}
"""Keys of messages that other systems read and turnwise refuses, each with the replacement to write."""


def read_conversations(
    source: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    subset: str | None = None,
    system: str | None = None,
    limit: int | None = None,
) -> list[Row]:
    """Read a data set of conversations; `source` and the options are those of `read_rows`.

    A row's `messages` are the entire conversation. Its fields are the other columns: `tools` is a list of schemas, and
    `weights` has one number per assistant message. `weights` is present only if a weight is not 1; it comes from the messages
    (`"weight": 0`, `"train": false`, `"loss": false`) or from the column `weights`.

    Raises DataError, with the row's number, if a conversation has no assistant message, an unknown role, a tool message without
    a call before it, or content of an unknown kind.
    """
    mapping = columns or {}
    return build_rows(
        source,
        lambda source_record, folder, dropped: _row(source_record, mapping, system, folder, dropped),
        split=split,
        subset=subset,
        limit=limit,
    )


def _row(
    source_record: SourceRecord,
    mapping: Mapping[str, str],
    system: str | None,
    folder: Path | None,
    dropped: DroppedNulls,
) -> Row:
    record, place, from_arrow = source_record.record, source_record.place, source_record.from_arrow
    tools = record.get(mapping.get("tools", "tools"))
    if tools is not None:
        tools = _tools(tools, place, AbsentValues(dropped, place, from_arrow=from_arrow))
    absent = AbsentValues(dropped, place, from_arrow=from_arrow, tools=tools)
    messages = [
        _clean(message, f"{place}: message {n}", absent)
        for n, message in enumerate(_messages(source_record, mapping), 1)
    ]
    used_columns = {mapping.get(name, name) for name in _OURS} | set(mapping.values())
    fields = {name: value for name, value in record.items() if name not in used_columns}
    for field_name, column in mapping.items():
        if field_name in _OURS:
            continue
        if column not in record:
            raise DataError(
                f"{place} has no column {column!r}{nearest(column, record)}; its columns are: {', '.join(record)}. Set the "
                f"right column: data.columns.{field_name}=<column>"
            )
        fields[field_name] = record[column]
    messages, fields = with_media(messages, fields, place=place, folder=folder)
    if any(message["role"] == "assistant" and not isinstance(message["content"], str) for message in messages):
        raise DataError(
            f"{place}: an assistant message contains an image or a video, and the model generates only text; put <image> and "
            f"<video> into user messages"
        )
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    _check_order(messages, place)
    weights = _weights(messages, fields.pop("weights", None), place)
    if any(weight != 1.0 for weight in weights):
        fields["weights"] = weights
    fields.pop("tools", None)
    if tools is not None:
        fields["tools"] = tools
    name = str(fields.pop("id")) if "id" in mapping else str(source_record.number)
    plain = [{key: value for key, value in message.items() if key not in _LABELS} for message in messages]
    return Row(id=name, messages=_with_tool_names(plain), fields=with_template_arguments(fields, place))


def _messages(source_record: SourceRecord, mapping: Mapping[str, str]) -> Sequence[Any]:
    """The messages of the row, from the columns that hold them."""
    record, place = source_record.record, source_record.place
    messages, prompt, completion = (mapping.get(name, name) for name in _OURS)
    pair = "messages" not in mapping and prompt in record and completion in record
    if messages in record and not (pair and {"prompt", "completion"} & set(mapping)):
        return _many(record[messages], f"{place}: {messages}")
    if pair:
        before = _many(record[prompt], f"{place}: {prompt}", role="user")
        # assistant messages in the prompt are context and are not trained on
        before = [
            {**message, "weight": 0} if isinstance(message, Mapping) and message.get("role") == "assistant" else message
            for message in before
        ]
        return [*before, *_many(record[completion], f"{place}: {completion}", role="assistant")]
    raise DataError(
        f"{place} has neither the column {messages!r} nor the columns {prompt!r} and {completion!r}{nearest(messages, record)}; "
        f"its columns are: {', '.join(record) or 'none'}. Set the column with the conversation: data.columns.messages=<column>"
    )


def _many(value: Any, where: str, *, role: str | None = None) -> Sequence[Any]:
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping) and role is not None:
        return [value]
    if not isinstance(value, list) or not value:
        kind = "a non-empty list of messages" if role is None else "a text or a non-empty list of messages"
        raise DataError(f"{where} is {value!r:.80}; it must be {kind}")
    return value


def _clean(message: Any, where: str, absent: AbsentValues) -> Message:
    """A message in the form of `clean_message`. Only assistant messages may set a weight."""
    for key, fix in _ELSEWHERE.items():
        if isinstance(message, Mapping) and message.get(key) is not None:
            raise DataError(f"{where} has `{key}`, which is not supported: {fix}")
    kept = clean_message(message, where, absent)
    if kept["role"] != "assistant" and any(kept.get(label) for label in _LABELS):
        raise DataError(
            f"{where} (role {kept['role']!r}) has a training weight, and only assistant messages are trained on: remove "
            f"{', '.join(_LABELS)}"
        )
    return kept


def _check_order(messages: Sequence[Message], place: str) -> None:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(
            f"{place} has no assistant message (its roles are: {', '.join(roles)}), so there is nothing to train on; remove the "
            f"row"
        )
    if roles[0] == "assistant":
        raise DataError(f"{place} begins with an assistant message; put a user or system message before it")
    for number, message in enumerate(messages):
        if message["role"] == "tool" and not _called(messages[:number]):
            raise DataError(
                f"{place}: message {number + 1} has the role tool, and no assistant message with a tool call precedes it; write "
                f"the call into the `tool_calls` of the assistant message, or into its content in the model's own format"
            )


def _called(before: Sequence[Message]) -> bool:
    """Whether the last message that is not a tool message is an assistant message. Its calls may be in its text: not checked."""
    last = next((message for message in reversed(before) if message["role"] != "tool"), None)
    return last is not None and last["role"] == "assistant"


def _weights(messages: Sequence[Message], column: Any, place: str) -> list[float]:
    """The weight of each assistant message: from the messages, or from the row's column `weights`."""
    assistant_messages = [message for message in messages if message["role"] == "assistant"]
    if column is None:
        return [_weight(message, place) for message in assistant_messages]
    if any(label in message for message in assistant_messages for label in _LABELS):
        raise DataError(
            f"{place}: training weights are given in the column 'weights' and also in a message: remove one of them"
        )
    if not isinstance(column, list) or len(column) != len(assistant_messages):
        raise DataError(
            f"{place}: the column 'weights' is {column!r:.80}; it must be a list of numbers, one for each of the "
            f"{len(assistant_messages)} assistant messages"
        )
    return [_weight({"weight": weight}, place) for weight in column]


def _weight(message: Message, place: str) -> float:
    """The weight of a message: its key `weight` (OpenAI has 0 and 1), `train` (axolotl) or `loss` (ms-swift)."""
    weight = message.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise DataError(f"{place}: an assistant message has the weight {weight!r}; it must be a number, 0 or more")
    for flag in _FLAGS:
        if not isinstance(value := message.get(flag, True), bool):
            raise DataError(f"{place}: an assistant message has `{flag}` {value!r}; it must be true or false")
        weight = weight if value else 0.0
    return float(weight)


def _tools(tools: Any, place: str, absent: AbsentValues) -> list[ToolSchema]:
    """The column `tools`: a list of schemas, or that list as JSON text."""
    if isinstance(tools, str):
        tools = parse_json(tools or "[]", where=f"{place}: the column 'tools'", error=DataError)
    if not isinstance(tools, list):
        raise DataError(f"{place}: the column 'tools' must be a list of tools; it is {tools!r:.80}")
    schemas: list[ToolSchema] = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{place}: the column \'tools\' contains {tool!r:.80}; a tool is {{"type": "function", "function": '
                f'{{"name": ..., "description": ..., "parameters": ...}}}}'
            )
        schemas.append({"type": "function", "function": absent.schema(function)})
    return schemas


def _with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the name of the tool in tool messages: some templates need it, and few data sets have it."""
    names: dict[str, str] = {}
    named_messages: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and "name" not in message and name is not None:
            message = {**message, "name": name}
        named_messages.append(message)
    return named_messages
