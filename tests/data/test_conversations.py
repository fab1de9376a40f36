"""Conversations to be learnt from: read in the forms that people have them in, refused with the line, the value and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.conversations import call, hold
from turnwise.data.conversations import read_conversations
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import DataError
from turnwise.record.writer import write_trajectories
from turnwise.types import Message, Row

USER: Message = {"role": "user", "content": "1+1?"}
TWO: Message = {"role": "assistant", "content": "2"}
CALL = {"id": "c7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER: Message = {"role": "tool", "tool_call_id": "c7", "content": "2"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def jsonl(path: Path, *records: Any) -> str:
    """A file of these lines; a text is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path / "rows.jsonl")


def read(path: Path, *records: Any, **options: Any) -> list[Row]:
    return read_conversations(jsonl(path, *records), **options)


def refused(path: Path, record: Any, **options: Any) -> str:
    """What is said of the second line of a file."""
    with pytest.raises(DataError) as error:
        read(path, {"messages": [USER, TWO]}, record, **options)
    assert "rows.jsonl:2" in str(error.value)
    return str(error.value).partition("rows.jsonl:2")[2]


# what is read


def test_a_conversation_is_read_as_it_is_with_its_line_for_a_name(tmp_path: Path) -> None:
    system: Message = {"role": "system", "content": "Be short."}
    assert read(tmp_path, {"messages": [system, USER, TWO], "source": "school"}, "", {"messages": [USER, TWO]}) == [
        Row(id="1", messages=[system, USER, TWO], fields={"source": "school"}),
        Row(id="3", messages=[USER, TWO], fields={}),
    ]


def test_calls_have_their_arguments_read_and_answers_the_name_of_their_tool(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [USER, CALLS, ANSWER, TWO], "tools": [TOOL]})
    called = {"id": "c7", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert row.messages[1] == {"role": "assistant", "content": "", "tool_calls": [called]}
    assert row.messages[2] == {**ANSWER, "name": "add"}
    assert row["tools"] == [TOOL]


def test_a_call_without_an_envelope_and_without_arguments_is_one_too(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [USER, {**CALLS, "tool_calls": [{"name": "add"}]}, ANSWER]})
    assert row.messages[1]["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {}}}
    ]


@pytest.mark.parametrize("tools", [json.dumps([TOOL]), [TOOL["function"]]], ids=["as text", "bare functions"])
def test_tools_come_in_several_forms(tmp_path: Path, tools: Any) -> None:
    (row,) = read(tmp_path, {"messages": [USER, TWO], "tools": tools})
    assert row["tools"] == [TOOL]


def test_the_parts_of_a_text_are_one_text_where_the_model_says_it(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "!"}]
    (row,) = read(tmp_path, {"messages": [USER, {"role": "assistant", "content": parts}]})
    assert row.messages[1] == {"role": "assistant", "content": "2!"}


def test_messages_from_parquet_have_only_their_own_keys(tmp_path: Path) -> None:
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    path = tmp_path / "rows.parquet"
    thought = {"role": "assistant", "content": "2", "reasoning_content": "Easy.", "weight": 0.5}
    rows = [{"messages": [USER, thought], "tools": None}, {"messages": [USER, TWO], "tools": None}]
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    first, second = read_conversations(str(path))
    assert first.messages == [USER, {"role": "assistant", "content": "2", "reasoning_content": "Easy."}]
    assert (first.fields, second.fields) == ({"weights": [0.5]}, {})


def test_a_prompt_and_a_completion_are_a_conversation_whose_prompt_is_context(tmp_path: Path) -> None:
    texts, messages = read(
        tmp_path,
        {"prompt": "1+1?", "completion": "2"},
        {"prompt": [USER, TWO, USER], "completion": [TWO]},
    )
    assert (texts.messages, texts.fields) == ([USER, TWO], {})
    assert (messages.messages, messages.fields) == ([USER, TWO, USER, TWO], {"weights": [0.0, 1.0]})


def test_columns_are_mapped_and_the_named_one_counts(tmp_path: Path) -> None:
    record = {"messages": [USER, TWO], "talk": [USER, {"role": "assistant", "content": "Two."}], "key": "k1"}
    (row,) = read(tmp_path, record, columns={"messages": "talk", "id": "key"})
    assert (row.id, row.messages[1]["content"]) == ("k1", "Two.")
    asked = {"messages": [USER, TWO], "q": "2+2?", "a": "4"}
    (row,) = read(tmp_path, asked, columns={"prompt": "q", "completion": "a"})
    assert [message["content"] for message in row.messages] == ["2+2?", "4"]


def test_a_system_message_is_put_before_those_without_one(tmp_path: Path) -> None:
    own = {"role": "system", "content": "Mine."}
    rows = read(tmp_path, {"messages": [USER, TWO]}, {"messages": [own, USER, TWO]}, system="Ours.")
    assert [row.messages[0]["content"] for row in rows] == ["Ours.", "Mine."]


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    assert len(read(tmp_path, *[{"messages": [USER, TWO]}] * 3, limit=2)) == 2
    assert len(read(tmp_path, {"messages": [USER, TWO]}, "no JSON", limit=1)) == 1


@pytest.mark.parametrize(
    ("label", "weight"),
    [
        ({"weight": 0}, 0.0),
        ({"weight": 0.25}, 0.25),
        ({"train": False}, 0.0),
        ({"loss": False}, 0.0),
        ({"weight": 0.5, "loss": True}, 0.5),
        ({"weight": 3, "train": False}, 0.0),
    ],
)
def test_a_message_says_what_it_weighs_and_no_template_sees_it(
    tmp_path: Path, label: dict[str, Any], weight: float
) -> None:
    (row,) = read(tmp_path, {"messages": [USER, {**TWO, **label}, {**USER, "train": False, "weight": 0}, TWO]})
    assert row["weights"] == [weight, 1.0]
    assert row.messages == [USER, TWO, USER, TWO]


def test_a_column_of_weights_says_the_same(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [USER, TWO, USER, TWO], "weights": [0, 2]})
    assert row["weights"] == [0.0, 2.0]


def test_weights_of_one_are_none(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [USER, {**TWO, "weight": 1, "train": True}]})
    assert row.fields == {}


def test_what_follows_the_last_answer_stays(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [USER, TWO, USER]})
    assert row.messages == [USER, TWO, USER]


def test_an_image_is_put_where_the_text_says(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    asked = {"role": "user", "content": "<image>What?"}
    (row,) = read(tmp_path, {"messages": [asked, TWO], "images": ["a.png"]})
    assert row.messages[0]["content"] == [
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "text", "text": "What?"},
    ]
    told = refused(tmp_path, {"messages": [USER, {**TWO, "content": "<image>"}], "images": ["a.png"]})
    assert "an assistant message contains an image or a video, and the model generates only text" in told


# what is refused


BAD_MESSAGES: list[tuple[str, Any, str]] = [
    ("messages that are no list", "Hi", "messages is 'Hi'; it must be a non-empty list of messages"),
    ("no messages", [], "messages is []; it must be a non-empty list of messages"),
    ("a message that is none", [USER, "2"], "message 2 is '2'; a message is"),
    ("a message without a role", [{"content": "2"}], "message 1 is {'content': '2'}; a message is"),
    (
        "an unknown role",
        [USER, {"role": "asistant", "content": "2"}],
        "message 2 has the role 'asistant'; did you mean 'assistant'?; the roles are: system, developer, user, assistant, tool",
    ),
    (
        "no answer",
        [USER],
        "has no assistant message (its roles are: user), so there is nothing to train on; remove the row",
    ),
    (
        "an answer to nobody",
        [TWO, USER, TWO],
        "begins with an assistant message; put a user or system message before it",
    ),
    (
        "a tool's answer without a call",
        [USER, ANSWER, TWO],
        "message 2 has the role tool, and no assistant message with a tool call precedes it",
    ),
    (
        "an answer of a tool to the user",
        [USER, TWO, USER, ANSWER, TWO],
        "message 4 has the role tool, and no assistant message with a tool call",
    ),
    ("no content", [USER, {"role": "assistant"}], "message 2 (role 'assistant') has no content"),
    (
        "content of no known kind",
        [{"role": "user", "content": [{"type": "sound"}]}, TWO],
        "message 1 has the content [{'type': 'sound'}]; content is a text, or a list of parts of the types text, image",
    ),
    (
        "content that is a number",
        [USER, {"role": "assistant", "content": 2}],
        "message 2 has the content 2; content is",
    ),
    (
        "an image that the model says",
        [USER, {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}],
        "an assistant message contains only text, and this message has the part",
    ),
    (
        "a part without a text",
        [USER, {"role": "assistant", "content": [{"type": "text"}]}],
        "message 2 has a part without a text",
    ),
    (
        "calls of a user",
        [{**USER, "tool_calls": [CALL]}, TWO],
        "`tool_calls` must be a list of calls in an assistant message",
    ),
    (
        "a call without a name",
        [USER, {**CALLS, "tool_calls": [{"id": "c"}]}],
        "message 2 has a call {'id': 'c'}; a call is",
    ),
    (
        "arguments that are no JSON",
        [USER, {**CALLS, "tool_calls": [{"name": "add", "arguments": "{a: 1"}]}],
        "message 2: the arguments of 'add': this text is not JSON",
    ),
    (
        "arguments that are no object",
        [USER, {**CALLS, "tool_calls": [{"name": "add", "arguments": "[1]"}]}],
        "the arguments of 'add' must be an object; they are [1]",
    ),
    ("a weight that is a text", [USER, {**TWO, "weight": "0"}], "has the weight '0'; it must be a number, 0 or more"),
    ("a negative weight", [USER, {**TWO, "weight": -1}], "has the weight -1; it must be a number, 0 or more"),
    ("a flag that is a number", [USER, {**TWO, "loss": 1}], "has `loss` 1; it must be true or false"),
    (
        "a user who is to be learnt",
        [{**USER, "train": True}, TWO],
        "message 1 (role 'user') has a training weight, and only assistant messages are trained on",
    ),
    (
        "calls of former times",
        [USER, {"role": "assistant", "content": None, "function_call": {"name": "add"}}],
        'message 2 has `function_call`, which is not supported: write {"tool_calls"',
    ),
    ("parts that are to be learnt", [USER, {**TWO, "train_detail": []}], "has `train_detail`, which is not supported"),
]


@pytest.mark.parametrize(
    ("messages", "told"), [case[1:] for case in BAD_MESSAGES], ids=[one[0] for one in BAD_MESSAGES]
)
def test_bad_messages_are_refused_with_the_line(tmp_path: Path, messages: Any, told: str) -> None:
    assert told in refused(tmp_path, {"messages": messages})


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (
            {"mesages": [USER, TWO]},
            "has neither the column 'messages' nor the columns 'prompt' and 'completion'; did you mean 'mesages'?",
        ),
        ({"prompt": "1+1?"}, "Set the column with the conversation: data.columns.messages=<column>"),
        ({"prompt": "1+1?", "completion": 2}, "completion is 2; it must be a text or a non-empty list of messages"),
        ({"messages": [USER, TWO], "tools": "[oops"}, "the column 'tools' is not JSON"),
        ({"messages": [USER, TWO], "tools": {"name": "add"}}, "the column 'tools' must be a list of tools"),
        (
            {"messages": [USER, TWO], "tools": [{"type": "function"}]},
            "the column 'tools' contains {'type': 'function'}",
        ),
        ({"messages": [USER, TWO], "weights": [1, 1]}, "must be a list of numbers, one for each of the 1 assistant"),
        (
            {"messages": [USER, {**TWO, "weight": 0}], "weights": [1]},
            "in the column 'weights' and also in a message: remove one of them",
        ),
        (
            {"messages": [USER, TWO], "chat_template_kwargs": ["enable_thinking"]},
            "must be an object with the arguments",
        ),
        ("[1, 2]", "a row must be a JSON object; this is a list"),
        ("{", "this line is not JSON"),
    ],
)
def test_bad_rows_are_refused_with_the_line(tmp_path: Path, record: Any, told: str) -> None:
    assert told in refused(tmp_path, record)


def test_a_mapped_column_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1 has neither the column 'talk' nor .*its columns are: messages"):
        read(tmp_path, {"messages": [USER, TWO]}, columns={"messages": "talk"})
    with pytest.raises(DataError, match=r"rows.jsonl:1 has no column 'key'.*data.columns.id=<column>"):
        read(tmp_path, {"messages": [USER, TWO]}, columns={"id": "key"})


def test_ids_must_differ(tmp_path: Path) -> None:
    record = {"messages": [USER, TWO], "key": 7}
    with pytest.raises(DataError, match=r"rows.jsonl:1 and .*rows.jsonl:2 both have the id '7'"):
        read(tmp_path, record, record, columns={"id": "key"})


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows; at least one is needed"):
        read(tmp_path, "")
    with pytest.raises(DataError, match="there is no file"):
        read_conversations(str(tmp_path / "nothing.jsonl"))


def test_the_record_of_a_run_is_a_file_of_conversations(tmp_path: Path) -> None:
    def add(a: int) -> int:
        """Add one."""
        return a + 1

    one = hold([call("add", '{"a": 1}'), "2"], lambda: Tools([add]))
    write_trajectories(tmp_path / "trajectories.jsonl", [one], step=1)
    (row,) = read_conversations(str(tmp_path / "trajectories.jsonl"))
    assert [(message["role"], message["content"]) for message in row.messages] == [
        ("user", "Hi"),
        ("assistant", ""),
        ("tool", "2"),
        ("assistant", "2"),
    ]
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert [tool["function"]["name"] for tool in row.fields["tools"]] == ["add"]
