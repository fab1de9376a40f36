"""Images in every form that people give them in, and what is refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from support.vision import picture
from turnwise.data.images import digest, load_image, media_kind, media_value, probe_image
from turnwise.errors import DataError


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
