"""The record of a run: what is written of each conversation, the images beside it, and data sets made of it."""

from __future__ import annotations

import io
import json
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from support.conversations import CUE, Says, a_row, call, hold, spoken
from support.vision import image_part, picture, text_part
from turnwise.cli import main
from turnwise.data.images import digest, load_image
from turnwise.environments.environment import SingleTurn, environment
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, RunError
from turnwise.options.schema import Config
from turnwise.record import datasets
from turnwise.record.datasets import DatasetChoice, Kind, rows_of, write_dataset
from turnwise.record.run_directory import RunDirectory
from turnwise.record.trajectory_json import MediaStore, trajectory_record
from turnwise.record.writer import write_trajectories, writing
from turnwise.rollout.context import Limits
from turnwise.types import Media, Opening, Reply, Row, Segment, Stop, ToolCall, Trajectory, Turn

# What a run leaves behind: the keys and columns that docs/record.md promises, and files that can be gone on with.


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def with_a_tool() -> Trajectory:
    """A conversation with a good call, an unknown tool and a malformed call."""
    asked = f"I ask. {call('add', json.dumps({'a': 1, 'b': 2}))}{call('sub')}<tool_call>?</tool_call>"
    return hold([asked, "3"], lambda: Tools([add]), row=a_row("1+2?", id="r1", answer=3, level="easy"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_the_record_of_a_conversation_with_a_tool(tmp_path: Path) -> None:
    one = with_a_tool()
    one.reward, one.rewards, one.advantages = 1.5, {"turns": 0.0, "judge": 1.5}, [0.25, 0.25]
    write_trajectories(tmp_path / "t.jsonl", [one], step=4)
    (record,) = read(tmp_path / "t.jsonl")
    assert list(record) == [
        "schema", "step", "id", "group", "row", "stop", "error", "reward", "rewards", "tools", "messages", "turns",
        "segments", "logprob_kind", "template_mismatch", "started", "seconds",
    ]  # fmt: skip
    assert record["schema"] == 3
    assert (record["step"], record["id"], record["group"]) == (4, "r1/0", "r1")
    assert [tool["function"]["name"] for tool in record["tools"]] == ["add"]
    assert record["row"] == {"id": "r1", "answer": 3, "level": "easy"}
    assert (record["stop"], record["error"], record["template_mismatch"], record["logprob_kind"]) == (
        "done",
        None,
        None,
        "none",
    )
    assert (record["reward"], record["rewards"]) == (1.5, {"turns": 0.0, "judge": 1.5})
    assert record["messages"] == one.messages
    assert [message["role"] for message in record["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "tool",
        "assistant",
    ]
    assert record["seconds"] >= 0

    first, last = record["turns"]
    assert list(first) == [
        "message", "message_index", "text", "reward", "advantage", "weight", "info", "tool_calls", "finish_reason", "started",
        "seconds",
    ]  # fmt: skip
    assert (first["message_index"], last["message_index"]) == (1, 5)
    assert first["message"] == one.turns[0].message
    assert first["text"] == one.assistant_texts[0]
    assert (first["reward"], first["advantage"], first["info"], first["finish_reason"]) == (0.0, 0.25, {}, "stop")
    assert first["weight"] == 1.0
    assert set(first["seconds"]) == {"engine", "environment"}
    for called in first["tool_calls"]:
        assert 0 <= called.pop("seconds") < 60
    unreadable = (
        "Error: this tool call cannot be parsed: Expecting value at '?</tool_call>'. "
        'Write it as <tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>'
    )
    good, unknown, malformed = first["tool_calls"]
    assert good == {
        "id": "call_0",
        "name": "add",
        "arguments": {"a": 1, "b": 2},
        "text": '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        "content": "3",
        "error": None,
        "reward": 0.0,
        "attempts": 1,
    }
    assert unknown == {
        "id": "call_1",
        "name": "sub",
        "arguments": {},
        "text": '{"name": "sub", "arguments": {}}',
        "content": "Error: there is no tool 'sub' (the tools are: add)",
        "error": "unknown_tool",
        "reward": 0.0,
        "attempts": 1,
    }
    assert malformed["content"] == unreadable
    assert {key: malformed[key] for key in ("id", "name", "arguments", "text", "error")} == {
        "id": "call_2", "name": "", "arguments": {}, "text": "?", "error": "malformed"
    }  # fmt: skip
    assert (last["text"], last["tool_calls"]) == ("3", [])

    (segment,) = record["segments"]
    assert list(segment) == ["token_ids", "logprobs", "turn", "version"]
    assert {len(column) for column in segment.values()} == {len(one.segments[0])}
    assert segment["token_ids"] == list(one.segments[0].token_ids)
    sampled = [id_ for id_, turn in zip(segment["token_ids"], segment["turn"], strict=True) if turn == 1]
    assert sampled == [21, 2]  # `3` and the stop token
    assert segment["turn"][-2:] == [1, 1]
    assert segment["version"][-2:] == [0, 0]
    assert segment["version"][0] == segment["turn"][0] == -1
    assert spoken(one.segments[0])[-2][1].endswith(f"<|im_end|>\n{CUE}")


def test_the_columns_of_a_segment_are_written_as_they_are() -> None:
    one = hold(Says("ab"))
    (segment,) = trajectory_record(one)["segments"]
    assert segment["logprobs"] == [0.0] * 21 + [-0.125, -0.25, -0.375]
    assert segment["turn"] == [-1] * 21 + [0, 0, 0]
    assert segment["version"] == [-1] * 21 + [0, 0, 0]
    assert segment["token_ids"][21:] == [67, 68, 2]


def test_a_broken_conversation_holds_what_there_was() -> None:
    one = hold(Says(call("add", '{"a": 1, "b": 2}'), RuntimeError("dead")), lambda: Tools([add]))
    record = trajectory_record(one)
    assert (record["stop"], record["reward"], record["rewards"]) == ("error", None, {})
    traceback = record["error"].pop("traceback")
    assert record["error"] == {"kind": "engine", "message": "RuntimeError: dead"}
    assert traceback.splitlines()[-1] == "    raise said"
    assert [turn["advantage"] for turn in record["turns"]] == [None]
    assert record["turns"][0]["tool_calls"][0]["content"] == "3"
    assert record["messages"][-1]["role"] == "tool"
    assert len(record["segments"]) == 1


def test_a_call_that_was_never_run_has_no_content() -> None:
    cut = call("add", '{"a": 1, "b": 2}') + "and so on and on"
    one = hold(Says(cut), lambda: Tools([add]), limits=Limits(tokens_per_turn=len(cut) - 5))
    assert one.stop == "length"
    (called,) = trajectory_record(one)["turns"][0]["tool_calls"]
    assert (called["name"], called["content"], called["error"], called["seconds"]) == ("add", None, None, None)


def test_the_rows_id_is_not_hidden_by_a_column_of_that_name() -> None:
    one = hold(Says("a"), row=a_row(id="7"))
    one.row.fields["id"] = "from the data"  # type: ignore[index]
    assert trajectory_record(one)["row"]["id"] == "7"


class Strange:
    def __repr__(self) -> str:
        return "strange"


def test_what_a_user_keeps_with_a_turn_never_ends_the_run(tmp_path: Path) -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    info = {
        "object": Strange(),
        "circle": circle,
        "set": {1},
        "nan": math.nan,
        ("a", 1): 2,
        "deep": {("b",): [{3: Strange()}]},
        5: 6,
    }

    @environment
    async def keeps(row: Any):  # type: ignore[no-untyped-def]
        yield Opening(messages=row.messages)
        yield Reply(done=True, info=info)

    write_trajectories(tmp_path / "t.jsonl", [hold(Says("a"), keeps)])
    (record,) = read(tmp_path / "t.jsonl")
    kept = record["turns"][0]["info"]
    assert (kept["object"], kept["set"], kept["nan"], kept["circle"][0]) == ("strange", "{1}", None, 1)
    assert (kept["('a', 1)"], kept["5"]) == (2, 6)
    assert kept["deep"] == {"('b',)": [{"3": "strange"}]}


def test_text_that_no_file_can_hold_never_ends_the_run(tmp_path: Path) -> None:
    # half of a surrogate pair, as JSON lets a model write it; a call with it is told to be malformed
    one = hold([call("add", '{"a": "\\ud83d", "b": 2}'), "3"], lambda: Tools([add]))
    one.turns[1].info["said"] = "\ud83d"
    write_trajectories(tmp_path / "t.jsonl", [one, hold(Says("grüße 🙂\u2028"))])
    first, second = read(tmp_path / "t.jsonl")
    assert first["turns"][0]["tool_calls"][0]["error"] == "malformed"
    assert first["turns"][1]["info"]["said"] == "\ud83d"
    assert second["turns"][0]["text"] == "grüße 🙂\u2028"
    assert "grüße 🙂" in (tmp_path / "t.jsonl").read_text(encoding="utf-8")  # readable as it is


# the run's directory


def a_config(**parts: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **parts})


def test_a_run_is_written_and_cut_back_to_a_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.prepare(a_config(seed=3), resuming=False) == []
    assert yaml.safe_load(run.config.read_text())["seed"] == 3
    one = hold(Says("a"))
    run.write_step({"step": 1, "x": 0.5}, [one, one])
    run.write_evaluation({"step": 1, "reward/mean": 1.0}, [one])
    marks = run.marks()
    before = run.trajectories.read_bytes(), run.metrics.read_bytes()
    run.write_step({"step": 2, "x": 0.25}, [one])
    run.write_evaluation({"step": 2}, [one])
    assert run.cut_back(marks) == []
    assert (run.trajectories.read_bytes(), run.metrics.read_bytes()) == before
    assert read(run.metrics) == [{"step": 1, "x": 0.5}]
    assert [record["step"] for record in read(run.trajectories)] == [1, 1]
    assert [record["step"] for record in read(run.path / "eval_trajectories.jsonl")] == [1]
    assert read(run.evaluations) == [{"step": 1, "reward/mean": 1.0}]
    run.cut_back({})
    assert {mark["bytes"] for mark in run.marks().values()} == {0}


def test_a_former_run_is_refused_replaced_or_gone_on_with(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.prepare(a_config(), resuming=False)
    run.write_step({"step": 1}, [])
    with pytest.raises(
        RunError,
        match=r"contains a run already\. To resume it: resume=auto; to move it away and start a new run: replace=true",
    ):
        run.prepare(a_config(), resuming=False)
    assert run.prepare(a_config(checkpoint={"keep": 5}, resume="auto"), resuming=True) == []
    assert yaml.safe_load(run.config.read_text())["checkpoint"]["keep"] == 5
    assert read(run.metrics) == [{"step": 1}]
    (note,) = run.prepare(a_config(replace=True), resuming=False)
    (moved,) = [path for path in tmp_path.iterdir() if path != run.path]
    assert note == f"the previous run was moved to {moved}"
    assert moved.name.startswith("run-until-")
    assert read(moved / "metrics.jsonl") == [{"step": 1}]
    assert not run.metrics.exists()
    run.write_step({"step": 1}, [])
    run.prepare(a_config(replace=True), resuming=False)  # in the same second
    assert len(list(tmp_path.iterdir())) == 3


def test_what_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=rf"^{tmp_path}/file/run cannot be written: Not a directory\. Earlier steps are complete"
    ):
        RunDirectory(tmp_path / "file" / "run").prepare(a_config(), resuming=False)
    with pytest.raises(RunError, match="x cannot be written: No space left"), writing(Path("x")):
        raise OSError(28, "No space left")


class Unspeakable:
    """Cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Torn(dict[str, Any]):
    """Cannot be read."""

    def items(self) -> Any:
        raise LookupError("torn")


class Replies(SingleTurn):
    """Answers with a reply."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    async def step(self, turn: Turn) -> Reply:
        return self.reply


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("info", "part"),
    [
        ({"deep": nested(5000)}, "[[[["),
        ({"odd": Unspeakable()}, "<Unspeakable, whose __str__ raised RuntimeError>"),
        ({Unspeakable(): 1}, "<Unspeakable, whose __str__ raised RuntimeError>"),
        (Torn(a=1), "cannot be written: LookupError: torn"),
    ],
)
def test_info_that_cannot_be_written_ends_nothing(info: Any, part: str, tmp_path: Path) -> None:
    one = hold(["a"], lambda: Replies(Reply(done=True, info={"kept": 1, "it": info})))
    write_trajectories(tmp_path / "t.jsonl", [one])
    (line,) = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert one.stop == "done"
    assert part in json.dumps(json.loads(line)["turns"][0]["info"])


def test_a_deeply_nested_row_ends_nothing(tmp_path: Path) -> None:
    held = [hold(["a"], row=a_row("Hi", id=str(n), odd=nested(depth))) for n, depth in enumerate((900, 1))]
    write_trajectories(tmp_path / "t.jsonl", held)
    records = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["stop"] for record in records] == ["done", "done"]


# Images in the record: named by what they show, written once, never as pixels in a line.


def a_trajectory(*images: object) -> Trajectory:
    message = {"role": "user", "content": [*(image_part(image) for image in images), text_part("?")]}
    row = Row(
        id="1",
        messages=[message],
        fields={"images": list(images), "multi_modal_inputs": {"pixel_values": [torch.ones(2)]}},
    )
    segment = Segment()
    inputs = {"pixel_values": torch.ones(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    found = [
        Media(kind="image", start=n, length=1, source=load_image(image, where="it"), inputs=inputs)
        for n, image in enumerate(images)
    ]
    segment.append_context(range(len(images) + 1), found)
    turn = Turn(index=0, message={"role": "assistant", "content": "x"}, text="x", info={"shot": picture(seed=9)})
    return Trajectory(id="1", group="1", row=row, messages=[message], turns=[turn], segments=[segment])


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_an_image_is_named_by_what_it_shows_and_written_once(tmp_path: Path) -> None:
    same = picture(16, 24)
    write_trajectories(
        tmp_path / "t.jsonl", [a_trajectory(same, {"bytes": png(same), "path": None}), a_trajectory(same)]
    )
    record = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])
    name = digest(same)
    part = {"type": "image", "image": f"sha256:{name}", "size": [16, 24]}
    assert record["messages"][0]["content"] == [part, part, {"type": "text", "text": "?"}]
    assert record["row"] == {"images": [f"sha256:{name}"] * 2, "id": "1"}
    assert record["turns"][0]["info"] == {"shot": f"sha256:{digest(picture(seed=9))}"}
    assert record["segments"][0]["media"][1] == {
        "kind": "image",
        "start": 1,
        "length": 1,
        "grid": [1, 4, 4],
        "sha256": name,
        "size": [16, 24],
    }
    files = sorted(file.name for file in (tmp_path / "media").iterdir())
    assert files == sorted([f"{name}.png", f"{digest(picture(seed=9))}.png"])
    with Image.open(tmp_path / "media" / f"{name}.png") as written:
        assert digest(load_image(written, where="it")) == name


def test_a_file_stays_its_path_and_is_not_written_again(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    file = str(tmp_path / "a.png")
    one = a_trajectory(file)
    one.turns.clear()
    write_trajectories(tmp_path / "t.jsonl", [one])
    record = json.loads((tmp_path / "t.jsonl").read_text())
    assert record["messages"][0]["content"][0] == {"type": "image", "image": file}
    assert record["segments"][0]["media"][0]["sha256"] == digest(picture())
    assert not (tmp_path / "media").exists()


def test_the_name_is_that_of_the_picture_as_it_was_shown() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    shown = MediaStore(None).plain(image_part(clear))
    assert shown["image"] == f"sha256:{digest(Image.new('RGB', (8, 8), (255, 255, 255)))}"


def test_bytes_that_are_no_image_and_images_that_cannot_be_read_end_nothing() -> None:
    broken = image_part({"bytes": b"broken", "path": None})
    assert MediaStore(None).plain({"blob": b"xyz", "of": [broken]}) == {"blob": b"xyz", "of": [broken]}


def test_without_images_nothing_is_written_and_nothing_is_added(tmp_path: Path) -> None:
    one = a_trajectory()
    one.turns.clear()
    assert "media" not in trajectory_record(one)["segments"][0]
    write_trajectories(tmp_path / "t.jsonl", [one])
    assert [file.name for file in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_video_is_a_list_of_frames() -> None:
    frames = [picture(seed=n) for n in range(2)]
    label = MediaStore(None).label(Media(kind="video", start=3, length=4, source=frames, inputs={}))
    assert label["sha256"] == [digest(frame) for frame in frames]
    assert (label["grid"], label["size"]) == (None, [[16, 16], [16, 16]])


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("in the way")
    with pytest.raises(RunError, match="media cannot be written"):
        RunDirectory(tmp_path).write_step({"step": 1}, [a_trajectory(picture())])


# `turnwise dataset`: which conversations become rows, and that the rows are what TRL's trainers and `turnwise sft`
# read


SAMPLED = ("rollout.max_rows=6", "rollout.samples_per_row=4")
ROOT = Path(__file__).parents[2]
ROW = Row(id="r", messages=[{"role": "user", "content": "6 * 7?"}])
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def conversation(name: str, reward: float | None, *, answers: Sequence[str] | None = None) -> Trajectory:
    """A turn that calls a tool, its result, and an answer: 3 prompt tokens, turns of 2 tokens, 1 token between them."""
    first, last = answers or (f"call {name}", f"answer {name}")
    one = Trajectory(id=name, group="g", row=ROW, tools=TOOLS, stop=Stop.DONE, reward=reward)
    one.messages = [
        *ROW.messages,
        {"role": "assistant", "content": first},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": last},
        {"role": "user", "content": "Thanks."},
    ]
    one.turns = [
        Turn(index=0, message=one.messages[1], text=first, message_index=1),
        Turn(index=1, message=one.messages[3], text=last, message_index=3),
    ]
    number = sum(map(ord, name))
    one.segments = [
        Segment(
            token_ids=array("i", [1, 2, 3, number, 4, 5, number + 1, 4, 6]),
            turn=array("i", [-1, -1, -1, 0, 0, -1, 1, 1, -1]),
        )
    ]
    return one


def rows(
    group: Sequence[Trajectory], what: Kind = "sft", left_out: Counter[str] | None = None, **more: Any
) -> list[Any]:
    found = list(rows_of(group, DatasetChoice(what=what, **more), Counter[str]() if left_out is None else left_out))
    return json.loads(json.dumps(found))


GROUP = [conversation(name, reward) for name, reward in (("a", 0.0), ("b", 1.0), ("c", 0.5), ("d", 0.25))]


def test_the_best_of_a_group_is_a_row_with_messages_weights_tools_and_tokens() -> None:
    (row,) = rows(GROUP)
    assert row == {
        "messages": GROUP[1].messages[:4],
        "weights": [1.0, 1.0],
        "tools": json.dumps(TOOLS),
        "id": "b",
        "group": "g",
        "reward": 1.0,
        "input_ids": [1, 2, 3, 98, 4, 5, 99, 4],
        "assistant_masks": [0, 0, 0, 1, 1, 0, 1, 1],
    }
    masked = conversation("m", 1.0)
    masked.turns[1].weight = 0.0
    (row,) = rows([masked, GROUP[0]])
    assert (row["weights"], row["assistant_masks"]) == ([1.0, 0.0], [0, 0, 0, 1, 1])
    assert row["input_ids"] == [1, 2, 3, 109, 4]


def test_how_many_and_how_good_the_best_are() -> None:
    def ids(**more: Any) -> list[str]:
        return [row["id"] for row in rows(GROUP, **more)]

    assert ids(best=3) == ["b", "c", "d"]
    assert ids(best=4) == ["b", "c", "d"]  # the lowest is not above the lowest
    assert ids(best=4, min_reward=0.25) == ["b", "c", "d"]
    assert ids(best=4, min_reward=0.0) == ["b", "c", "d", "a"]
    assert ids(min_reward=1.5) == []
    equal = [conversation(name, 1.0) for name in "ab"]
    assert rows(equal) == []
    assert [row["id"] for row in rows(equal, min_reward=1.0, best=2)] == ["a", "b"]
    twins = [conversation(name, 1.0, answers=("call", "42")) for name in "ab"]
    left_out = Counter[str]()
    assert [row["id"] for row in rows([*twins, GROUP[0]], left_out=left_out, best=2, min_reward=0.5)] == ["a"]
    assert left_out == {"have the messages of another one of their group": 1}


def test_pairs_are_of_one_prompt_by_margin_each_conversation_once() -> None:
    def pairs(group: Sequence[Trajectory] = GROUP, **more: Any) -> list[tuple[str, str]]:
        return [(row["id"], row["rejected_id"]) for row in rows(group, "dpo", **more)]

    assert pairs() == [("b", "a")]
    assert pairs(pairs=5) == [("b", "a"), ("c", "d")]
    assert pairs(pairs=5, margin=0.5) == [("b", "a")]
    assert pairs([conversation("a", 0.1 + 0.2), conversation("b", 0.3)]) == []
    other = conversation("o", 0.0)
    other.messages[0] = {"role": "user", "content": "another question"}
    assert pairs([other, GROUP[1]]) == []
    (row,) = rows(GROUP, "dpo")
    assert [len(row[name]) for name in ("prompt", "chosen", "rejected")] == [1, 3, 3]
    assert (row["prompt_ids"], row["chosen_ids"]) == ([1, 2, 3], [98, 4, 5, 99, 4])
    assert (row["chosen_reward"], row["rejected_reward"], row["tools"]) == (1.0, 0.0, json.dumps(TOOLS))
    (row,) = rows(GROUP, "reward-model")
    assert row["chosen_ids"] == [1, 2, 3, 98, 4, 5, 99, 4]
    assert "prompt_ids" not in row


def test_a_label_compares_with_the_mean_of_the_group_or_with_a_threshold() -> None:
    def labels(**more: Any) -> dict[str, bool]:
        return {row["id"]: row["label"] for row in rows(GROUP, "kto", **more)}

    assert labels() == {"a": False, "b": True, "c": True, "d": False}  # the mean is 0.4375
    found = rows_of(GROUP, DatasetChoice(what="kto", label="good"), Counter(), {("b", None), ("c", None)})
    assert {row["id"]: row["label"] for row in found} == {"b": True, "c": True}  # of all four, whatever has the label
    assert labels(threshold=1.0) == {"a": False, "b": True, "c": False, "d": False}
    assert rows([conversation(name, 1.0) for name in "ab"], "kto") == []


def test_what_messages_do_not_show_is_left_out_with_the_reason() -> None:
    failed, malformed, cut, two = (conversation(name, 2.0) for name in "fmct")
    failed.reward = None
    malformed.turns[0].calls = (ToolCall(id="1", name="f", arguments={}, text="{", error="no JSON"),)
    cut.turns[1].finish_reason = "length"
    two.segments.append(Segment(token_ids=array("i", [7, 8]), turn=array("i", [-1, 1])))
    left_out = Counter[str]()
    group = [failed, malformed, cut, two, *GROUP]
    (row,) = rows(group, "dpo", left_out)
    assert (row["id"], row["rejected_id"]) == ("b", "a")
    assert sorted(left_out.values()) == [1, 1, 1]
    assert "have several segments" in " ".join(left_out)
    assert {row["id"] for row in rows(group, "kto") if row["label"]} == {"b"}
    # each segment is a row of its own; a turn is trained on in one of them
    two.segments[0].turn = array("i", [-1, -1, -1, 0, 0, -1, -1, -1, -1])
    first, second = rows(group, left_out=(of_sft := Counter[str]()))
    assert of_sft["have a turn that a limit cut"] == 1
    assert (len(first["messages"]), first["weights"], first["input_ids"]) == (2, [1.0], [1, 2, 3, 116, 4])
    assert (len(second["messages"]), second["weights"], second["input_ids"]) == (4, [0.0, 1.0], [7, 8])


@pytest.mark.parametrize(("policy", "why"), [("", "train=False"), ("first", "policy first")])
def test_agents_that_are_not_trained_on_are_left_out(policy: str, why: str) -> None:
    referee = conversation("r", 3.0)
    referee.trained, referee.policy = False, policy
    for what in ("sft", "dpo", "kto"):
        left_out = Counter[str]()
        assert "r" not in {row["id"] for row in rows([referee, *GROUP], what, left_out)}
        assert left_out == {f"are of agents that are not trained on ({why})": 1}


def test_half_of_a_surrogate_pair_is_left_out_and_a_file_that_exists_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = conversation("h", 2.0)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"text": "\ud83d"}}}
    half.messages[1] = {**half.messages[1], "tool_calls": [call]}
    left_out = Counter[str]()
    (row,) = rows([half, *GROUP], "sft", left_out)
    assert row["id"] == "b"
    assert left_out == {"have half of a surrogate pair, which is no character, in a text": 1}
    # a disk that is full leaves nothing that blocks the next call
    monkeypatch.setattr(datasets, "read", lambda _: iter(GROUP))
    with monkeypatch.context() as full:

        def fail(file: Path, text: str, **_: Any) -> None:
            file.touch()
            raise OSError("No space left on device")

        full.setattr(Path, "write_text", fail)
        with pytest.raises(OSError, match="No space left"):
            write_dataset(tmp_path, tmp_path / "out", DatasetChoice(what="sft"))
    assert list((tmp_path / "out").iterdir()) == []
    assert write_dataset(tmp_path, tmp_path / "out", DatasetChoice(what="sft")).rows == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["train.jsonl"]


def test_groups_without_a_pair_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = [replace(one, group="equal") for one in (conversation("e", 1.0), conversation("f", 1.0))]
    alone = [replace(conversation("x", 1.0), group="alone")]
    monkeypatch.setattr(datasets, "read", lambda _: iter([*GROUP, *equal, *alone]))
    assert main(["dataset", str(tmp_path), "--out", str(tmp_path / "out"), "--what", "dpo"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 row of 3 groups" in told
    assert "2 groups without a pair: equal rewards, a difference below --margin, or fewer than two" in told


def test_a_data_set_is_written_once_and_never_empty(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.jsonl"
    file.write_text("", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"no conversation of .* becomes a row of --what kto: 0 groups were read.*--threshold"
    ):
        write_dataset(file, tmp_path / "out", DatasetChoice(what="kto"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists already"):
        write_dataset(file, tmp_path / "out", DatasetChoice(what="kto"))


def test_the_last_step_of_a_record_is_found_by_its_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trajectories.jsonl"
    for step in (2, 10):
        write_trajectories(file, [replace(hold(Says("x"), row=a_row(id=f"of {step}")), reward=1.0)], step=step)
    out = str(tmp_path / "out")
    arguments = ["dataset", str(tmp_path), "--out", out, "--what", "sft", "--min-reward", "0", "--step", "last"]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["of 10/0"]
    file.unlink()
    write_trajectories(file, [hold(Says("x"))])
    arguments[3] = str(tmp_path / "none")
    assert main(arguments) == 1
    assert "has a step, so there is no last one" in " ".join(capsys.readouterr().err.split())


def test_the_conversations_of_one_step_and_a_step_that_the_run_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [replace(one, step=step) for step in (1, 2, 3) for one in GROUP]
    monkeypatch.setattr(datasets, "read", lambda _: iter(steps))
    for words, groups in ((["--step", "2"], 1), (["--from-step", "2"], 2), ([], 3)):
        out = tmp_path / "-".join(["out", *words])
        assert main(["dataset", str(tmp_path), "--out", str(out), "--what", "dpo", *words]) == 0
        assert f" of {groups} group" in capsys.readouterr().out
    for words, message in (
        (["--from-step", "9"], "has no conversation of step 9 or later: its steps are 1 to 3"),
        (["--step", "9"], "has no conversation of step 9: its steps are 1 to 3"),
        (["--step", "1", "--from-step", "1"], "--step and --from-step are both given"),
    ):
        assert main(["dataset", str(tmp_path), "--out", str(tmp_path / "no"), "--what", "dpo", *words]) == 1
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--what", "sft", "--margin", "1"],
            "--margin has no effect with --what sft: remove it, or use --what dpo or reward-model",
        ),
        (["--what", "kto", "--min-reward", "1"], "--min-reward has no effect with --what kto"),
        (["--what", "dpo", "--margin", "-1"], "--margin -1 is below 0"),
        (["--what", "dpo"], "there is no file"),
    ],
)
def test_arguments_without_effect_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dataset", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *words]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainers_of_trl_train_on_the_tokens_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets as hf_datasets
    import trl
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    assert main(["rollout", "recipes/calculator.yaml", *SAMPLED, "--out", str(run)]) == 0
    tokenizer = AutoTokenizer.from_pretrained("demo/model")

    def trained(what: Kind, trainer: str, config: str, model: Any = "demo/model") -> tuple[Any, list[Any]]:
        """The rows as the trainer has prepared them, and as they were written. One step is taken."""
        write_dataset(run, tmp_path / what, DatasetChoice(what=what))
        options = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "save_strategy": "no"}
        args = getattr(trl, config)(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, **options)
        data = hf_datasets.load_dataset(str(tmp_path / what), split="train", cache_dir=str(tmp_path / "cache"))
        made = getattr(trl, trainer)(model, args=args, train_dataset=data, processing_class=tokenizer)
        made.train()
        lines = (tmp_path / what / "train.jsonl").read_text(encoding="utf-8").splitlines()
        return made.train_dataset, [json.loads(line) for line in lines]

    prepared, written = trained("sft", "SFTTrainer", "SFTConfig")
    assert len(prepared) == len(written) > 2
    for ready, row in zip(prepared, written, strict=True):
        pairs = zip(row["input_ids"], row["assistant_masks"], strict=True)
        assert ready["labels"] == [token if trained else -100 for token, trained in pairs]
    # a model of rewards gets our tokens, and the template gives DPO and KTO the same (and the newline behind the last turn)
    classifier = AutoModelForSequenceClassification.from_pretrained("demo/model", num_labels=1)
    prepared, written = trained("reward-model", "RewardTrainer", "RewardConfig", classifier)
    assert [ready["rejected_ids"] for ready in prepared] == [row["rejected_ids"] for row in written]
    for what, trainer, names in (
        ("dpo", "DPOTrainer", ("chosen_ids", "rejected_ids")),
        ("kto", "KTOTrainer", ("completion_ids",)),
    ):
        prepared, written = trained(what, trainer, trainer.replace("Trainer", "Config"))  # type: ignore[arg-type]
        by_prompt = {tuple(row["prompt_ids"] + row[names[0]]): row for row in written}
        assert len(prepared) == len(written) > 2
        for ready in prepared:  # KTO shuffles
            row = by_prompt[tuple(ready["prompt_ids"] + ready[names[0]][:-1])]
            assert [ready[name][:-1] for name in names] == [row[name] for name in names]
