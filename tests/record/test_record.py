"""The record of a run: what is written of each conversation, and the images beside it."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from support.conversations import CUE, Says, a_row, call, hold, spoken
from support.vision import image_part, picture, text_part
from turnwise.data.images import digest, load_image
from turnwise.environments.environment import SingleTurn, environment
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import RunError
from turnwise.options.schema import Config
from turnwise.record.run_directory import RunDirectory
from turnwise.record.trajectory_json import MediaStore, trajectory_record
from turnwise.record.writer import write_trajectories, writing
from turnwise.rollout.context import Limits
from turnwise.types import Media, Opening, Reply, Row, Segment, Trajectory, Turn

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
