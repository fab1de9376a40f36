"""Images in every form that people give them in, in rows where the prompt says, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.vision import picture
from turnwise.data.conversations import read_conversations
from turnwise.data.images import digest, load_image, media_kind, media_value, probe_image
from turnwise.data.rows import read_rows
from turnwise.errors import DataError
from turnwise.record.trajectory_json import MediaStore
from turnwise.types import Row

# Images in every form that people give them in, and what is refused.


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_the_same_image_comes_out_of_every_form(tmp_path: Path) -> None:
    image = picture(16, 24)
    file = tmp_path / "a picture.png"
    image.save(file)
    uri = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    forms = [
        image,
        file,
        str(file),
        file.as_uri(),
        uri,
        png(image),
        {"bytes": png(image), "path": None},
        {"bytes": None, "path": str(file)},
        {"type": "image_url", "image_url": {"url": uri}},
    ]
    for form in forms:
        probe_image(form, where="it")
        assert digest(load_image(form, where="it")) == digest(image)
    assert digest(load_image(file.name, where="it", folder=tmp_path)) == digest(image)


def test_an_image_is_turned_upright_and_made_rgb(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    picture(16, 8).save(tmp_path / "side.jpg", exif=exif)
    assert load_image(tmp_path / "side.jpg", where="it").size == (8, 16)
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert load_image(png(clear), where="it").getpixel((0, 0)) == (255, 255, 255)
    assert load_image(Image.new("L", (2, 2), 7), where="it").mode == "RGB"


def test_what_is_no_image_is_refused_with_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image at all")
    cases = [
        (str(tmp_path / "missing.png"), "there is no image file"),
        (str(tmp_path / "text.png"), "it is not an image that PIL can read"),
        (b"no image", r"it \(8 bytes\) cannot be read"),
        (7, "it is 7; an image is a PIL image, a path"),
        ("https://example.org/a.png", "Download the image first"),
        ("data:text/plain,hello", "begins with data:image/"),
        ("data:image/png;base64,!!!", "cannot be read as an image"),
        ({"bytes": None, "path": None}, "contains no image"),
    ]
    for value, message in cases:
        with pytest.raises(DataError, match=message):
            load_image(value, where="it")


def test_a_file_that_is_cut_short_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be read as an image"):
        load_image(png(picture(64, 64))[:-2000], where="it")


def test_a_small_file_that_unpacks_to_a_huge_image_is_refused_unopened() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for side in (9_000, 50_000):  # beyond our bound, and beyond PIL's own
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
        with pytest.raises(DataError, match=r"9000 x 9000 pixels, more than|cannot be read as an image"):
            probe_image(bomb, where="it")


def test_a_digest_names_the_content() -> None:
    assert digest(picture(seed=1)) == digest(picture(seed=1).copy())
    assert digest(picture(seed=1)) != digest(picture(seed=2))
    assert digest(Image.new("RGB", (4, 2))) != digest(Image.new("RGB", (2, 4)))


def test_parts_of_messages_are_told_apart() -> None:
    assert [media_kind({"type": kind}) for kind in ("image", "image_url", "video", "text")] == [
        "image",
        "image",
        "video",
        None,
    ]
    assert media_value({"type": "image_url", "image_url": "a.png"}) == "a.png"
    assert media_value({"type": "image", "base64": base64.b64encode(b"xy").decode()}) == b"xy"
    assert media_value({"type": "image"}) is None


# Images in a row: put where the prompt says, found beside the data file, refused at start-up where there is none.


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[None]:
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    yield
    datasets.config.HF_DATASETS_CACHE = before


def read(folder: Path, *records: dict[str, Any], **options: Any) -> list[Row]:
    for n in range(3):
        picture(16, 16, seed=n).save(folder / f"{n}.png")
    (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_rows(str(folder / "rows.jsonl"), **options)


@pytest.mark.usefixtures("cache")
def test_placeholders_become_parts_in_order(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"prompt": "<image>One and <image> two.", "images": ["0.png", "1.png"], "answer": "x"})
    (message,) = row.messages
    assert message["content"] == [
        {"type": "image", "image": str(tmp_path / "0.png")},
        {"type": "text", "text": "One and "},
        {"type": "image", "image": str(tmp_path / "1.png")},
        {"type": "text", "text": " two."},
    ]
    assert row["images"] == [str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    assert row["answer"] == "x"


@pytest.mark.usefixtures("cache")
def test_one_image_need_not_be_a_list_and_columns_can_be_mapped(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"prompt": "What is <image>?", "picture": "0.png"}, columns={"images": "picture"})
    assert [part["type"] for part in row.messages[0]["content"]] == ["text", "image", "text"]


@pytest.mark.usefixtures("cache")
def test_places_may_be_in_any_message_and_may_be_parts(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "Look at <image>."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or <image>"}]},
        {"role": "assistant", "content": "Well"},
    ]
    (row,) = read(tmp_path, {"prompt": prompt, "images": ["0.png", "1.png", "2.png"]}, system="ignored")
    system, user, assistant = row.messages
    assert system["content"][1] == {"type": "image", "image": str(tmp_path / "0.png")}
    assert user["content"] == [
        {"type": "image", "image": str(tmp_path / "1.png")},
        {"type": "text", "text": "or "},
        {"type": "image", "image": str(tmp_path / "2.png")},
    ]
    assert assistant["content"] == "Well"


@pytest.mark.usefixtures("cache")
def test_an_image_may_stand_in_its_message(tmp_path: Path) -> None:
    content = [{"type": "image", "image": "2.png"}, {"type": "image_url", "image_url": {"url": "1.png"}}]
    (row,) = read(tmp_path, {"prompt": [{"role": "user", "content": content}]})
    assert row.messages[0]["content"] == [
        {"type": "image", "image": str(tmp_path / "2.png")},
        {"type": "image", "image": str(tmp_path / "1.png")},
    ]


@pytest.mark.usefixtures("cache")
def test_images_without_any_place_stand_at_the_start_of_the_first_user_message(tmp_path: Path) -> None:
    told = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}]
    (row,) = read(tmp_path, {"prompt": told, "images": ["0.png", "1.png"]})
    assert row.messages[0]["content"] == "Look."
    assert row.messages[1]["content"] == [
        {"type": "image", "image": str(tmp_path / "0.png")},
        {"type": "image", "image": str(tmp_path / "1.png")},
        {"type": "text", "text": "Which?"},
    ]


@pytest.mark.usefixtures("cache")
def test_without_images_a_text_is_a_text(tmp_path: Path) -> None:
    rows = read(tmp_path, {"prompt": "What does <image> mean in HTML?"}, {"prompt": "And?", "images": None})
    assert [row.messages[0]["content"] for row in rows] == ["What does <image> mean in HTML?", "And?"]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "<image> and <image>", "images": ["0.png"]},
            "the column 'images' and the prompt do not match: 1 in the column, 2 placeholders in the prompt",
        ),
        (
            {"prompt": "<image>", "images": ["0.png", "1.png"]},
            "2 in the column, 1 placeholders in the prompt.*Write <image> into",
        ),
        ({"prompt": "<image>", "images": []}, "0 in the column, 1 placeholders in the prompt"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "0 in the column, 1 placeholders in the prompt",
        ),
        ({"prompt": "<image>", "images": ["9.png"]}, "image 1: there is no image file .*9.png"),
        ({"prompt": "<image>", "images": ["rows.jsonl"]}, "it is not an image that PIL can read"),
        ({"prompt": "<image>", "images": ["https://x.org/a.png"]}, "Download the image first"),
        ({"prompt": "<video>", "videos": [7]}, "video 1 is 7; a video is a path, or a list of frames"),
        ({"prompt": "<video>", "videos": ["a.mp4"]}, "there is no video file"),
        ({"prompt": "<video>", "videos": [["0.png", "9.png"]]}, "video 1, frame 2: there is no image file"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_rows_number(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:2: .*{message}"):
        read(tmp_path, {"prompt": "<image>", "images": "0.png"}, record)


@pytest.mark.usefixtures("cache")
def test_videos_are_lists_of_frames_or_files(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"?")
    (row,) = read(tmp_path, {"prompt": "<video><video>", "videos": [["0.png", "1.png"], "a.mp4"]})
    assert row.messages[0]["content"] == [
        {"type": "video", "video": [str(tmp_path / "0.png"), str(tmp_path / "1.png")]},
        {"type": "video", "video": str(tmp_path / "a.mp4")},
    ]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("many", [True, False])
def test_images_in_parquet_are_bytes_until_they_are_looked_at(tmp_path: Path, many: bool) -> None:
    import datasets

    buffer = io.BytesIO()
    picture(8, 16, seed=4).save(buffer, "PNG")
    value: Any = {"bytes": buffer.getvalue(), "path": None}
    feature = datasets.Image()
    table = datasets.Dataset.from_dict(
        {"prompt": ["<image>?"], "images": [[value] if many else value]},
        features=datasets.Features(
            {"prompt": datasets.Value("string"), "images": datasets.List(feature) if many else feature}
        ),
    )
    table.to_parquet(str(tmp_path / "rows.parquet"))
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    image = row.messages[0]["content"][0]["image"]
    assert image["bytes"] == buffer.getvalue()
    assert digest(load_image(image, where="it")) == digest(picture(8, 16, seed=4))


@pytest.mark.usefixtures("cache")
def test_parts_in_parquet_have_only_their_own_keys(tmp_path: Path) -> None:
    import datasets

    picture(8, 8).save(tmp_path / "0.png")
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    record = {"prompt": [{"role": "user", "content": content}], "images": ["0.png"]}
    datasets.Dataset.from_list([record]).to_parquet(str(tmp_path / "rows.parquet"))
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    assert row.messages[0]["content"] == [
        {"type": "image", "image": str(tmp_path / "0.png")},
        {"type": "text", "text": "What?"},
    ]


@pytest.mark.usefixtures("cache")
def test_images_of_a_record_are_found_beside_it(tmp_path: Path) -> None:
    """trajectories.jsonl of a run is data for `turnwise sft`: its messages refer to images by their hash."""
    store = MediaStore(tmp_path / "media")
    drawing = picture(16, 16, seed=5)
    content = store.plain([{"type": "image", "image": drawing}, {"type": "text", "text": "What?"}])
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A square."}]
    (tmp_path / "trajectories.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (row,) = read_conversations(str(tmp_path / "trajectories.jsonl"))
    path = row.messages[0]["content"][0]["image"]
    assert path == str(tmp_path / "media" / f"{digest(drawing)}.png")
    assert digest(load_image(path, where="the image")) == digest(drawing)


@pytest.mark.usefixtures("cache")
def test_an_image_that_the_record_lacks_is_refused(tmp_path: Path) -> None:
    missing = "sha256:" + "0" * 64
    with pytest.raises(DataError, match=f"there is no image file .*/media/{'0' * 64}.png"):
        read(tmp_path, {"prompt": [{"role": "user", "content": [{"type": "image", "image": missing}]}]})
    with pytest.raises(DataError, match="there is no image file"):  # not a hash: an ordinary path
        read(tmp_path, {"prompt": "<image>", "images": ["sha256:../../secret"]})
