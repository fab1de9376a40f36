"""Images in the record: named by what they show, written once, never as pixels in a line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from support.vision import image_part, picture, text_part
from turnwise.data.images import digest, load_image
from turnwise.errors import RunError
from turnwise.record.run_directory import RunDirectory
from turnwise.record.trajectory_json import MediaStore, trajectory_record
from turnwise.record.writer import write_trajectories
from turnwise.types import Media, Row, Segment, Trajectory, Turn


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
