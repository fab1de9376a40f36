"""Opens images: paths, bytes, data URIs, and the formats of `datasets` and OpenAI.

This module defines the sources of images, which parts of a message are images, and the hash that identifies an image. It does
not depend on processors, models or tokens. PIL is an optional dependency and is imported when an image is opened.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from turnwise.errors import DataError

MOST_PIXELS = 64_000_000
"""Maximum number of pixels of an image. A larger image is probably a mistake, or a file made to exhaust the memory."""

_RECORDED = re.compile(r"sha256:[0-9a-f]{64}")
"""How the record of a run refers to an image."""
_KEYS = {
    "image": ("image", "image_url", "url", "path", "base64", "bytes"),
    "video": ("video", "video_url", "url", "path", "frames"),
}


def media_kind(part: Mapping[str, Any]) -> str | None:
    """`image` or `video` for a part of a message that shows an image or a video, else None."""
    kind = part.get("type")
    if kind in ("image", "image_url"):
        return "image"
    return "video" if kind in ("video", "video_url") else None


def media_value(part: Mapping[str, Any]) -> Any:
    """The image or video of a part: an image in any form that `load_image` takes, or a video. None for an empty placeholder.

    Example: `{"type": "image_url", "image_url": {"url": "data:..."}}` gives `"data:..."`.
    """
    for key in _KEYS[media_kind(part) or "image"]:
        if (value := part.get(key)) is not None:
            if isinstance(value, Mapping) and "url" in value:
                return value["url"]
            return base64_bytes(value) if key == "base64" else value
    return None


def is_image(value: Any) -> bool:
    """Whether the value is a PIL image. Does not import PIL."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def load_image(value: Any, *, where: str, folder: Path | None = None) -> Any:
    """The image as a PIL image in RGB, rotated as its EXIF data specify, with transparent pixels on white.

    `value` is a PIL image, a path (relative ones are relative to `folder`), a `file://` or `data:image/...;base64,` URI,
    the bytes of an image file, `{"bytes": ..., "path": ...}` as `datasets` has it, or a part in the OpenAI format. `where`
    names the image in error messages.

    Raises DataError if the image is missing, cannot be read, or has more than `MOST_PIXELS` pixels, or PIL is not installed.
    """
    if is_image(value):
        _refuse_large(value, value, where)
        return _upright(value)
    with _opened(value, where=where, folder=folder) as image:
        try:
            image.load()
        except (OSError, ValueError, SyntaxError) as error:  # PIL raises all three for a truncated file
            raise DataError(_broken(value, where, str(error))) from error
        return _upright(image)


def probe_image(value: Any, *, where: str, folder: Path | None = None) -> None:
    """Check that an image exists and has the header of an image, without decoding it.

    Raises DataError as `load_image` does.
    """
    if is_image(value):
        _refuse_large(value, value, where)
        return
    _opened(value, where=where, folder=folder).close()


def image_file(value: Any, *, where: str) -> Path | None:
    """The file of an image that is given as a path; None if `value` has the contents of the image. Raises DataError."""
    source = None if is_image(value) else _source(value, where, None)
    return source if isinstance(source, Path) else None


def digest(image: Any) -> str:
    """The sha256 of a PIL image's mode, size and pixels: equal images have equal digests, whatever their source."""
    sha256 = hashlib.sha256(f"{image.mode}:{image.width}x{image.height}:".encode())
    sha256.update(image.tobytes())
    return sha256.hexdigest()


def recorded_path(value: str | Path, folder: Path | None) -> str | Path:
    """The file of an image that the record of a run refers to as `sha256:<hash>`; any other value is returned as it is.

    `folder` is the folder of trajectories.jsonl. The file is `media/<hash>.png` beside it.
    """
    if folder is None or not isinstance(value, str) or _RECORDED.fullmatch(value) is None:
        return value
    return folder / "media" / f"{value.removeprefix('sha256:')}.png"


def base64_bytes(text: Any) -> bytes:
    """The decoded bytes; empty if the text is not base64. No image has empty bytes, so opening them raises an error."""
    try:
        return base64.b64decode(text, validate=False)
    except (binascii.Error, ValueError, TypeError):
        return b""


def _opened(value: Any, *, where: str, folder: Path | None) -> Any:
    """The opened image: the header is read, the pixels are not decoded."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError(f"{where} is an image, and images need PIL: pip install 'turnwise[vision]'") from None
    source = _source(value, where, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `_refuse_large` checks the size
            image = Image.open(source if isinstance(source, Path) else io.BytesIO(source))
    except UnidentifiedImageError as error:
        raise DataError(_broken(value, where, "it is not an image that PIL can read")) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(_broken(value, where, str(error))) from error
    try:
        _refuse_large(image, value, where)
    except DataError:
        image.close()
        raise
    return image


def _source(value: Any, where: str, folder: Path | None) -> Path | bytes:
    """The file or the bytes that hold the image."""
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return _source(value["bytes"], where, folder)
        inner = value.get("path") if value.get("path") is not None else media_value({"type": "image", **value})
        if inner is None:
            raise DataError(
                f"{where} contains no image: {_short(value)}. Give it a path, bytes, a PIL image or a data: URI"
            )
        return _source(inner, where, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and value.startswith("data:"):
        head, comma, body = value.partition(",")
        if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
            raise DataError(f"{where} is {_short(value)}; a data URI of an image begins with data:image/<kind>;base64,")
        return base64_bytes(body)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(
            f"{where} is {_short(value)}: images are not downloaded during a run. Download the image first, and give its path"
        )
    if isinstance(value, str | Path):
        text = str(recorded_path(value, folder))
        path = Path(unquote(urlparse(text).path)) if text.startswith("file://") else Path(os.path.expanduser(text))
        path = path if path.is_absolute() or folder is None else folder / path
        try:
            exists = path.is_file()
        except (OSError, ValueError) as error:  # the name is too long for a file, or has a NUL character
            raise DataError(
                f"{where} is {_short(value)}, which is not a valid path ({getattr(error, 'strerror', None) or error}); base64 "
                f"data must begin with data:image/<kind>;base64,"
            ) from None
        if not exists:
            raise DataError(f"{where}: there is no image file {str(path.absolute())[:300]}")
        return path
    raise DataError(
        f"{where} is {_short(value)}; an image is a PIL image, a path, bytes, a data: URI, or {{'bytes': ..., 'path': ...}}"
    )


def _refuse_large(image: Any, value: Any, where: str) -> None:
    pixels = image.width * image.height
    if pixels > MOST_PIXELS:
        raise DataError(
            f"{where} ({_short(value)}) has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}. Make the image "
            f"smaller"
        )
    if pixels == 0:
        raise DataError(
            f"{where} ({_short(value)}) has {image.width} x {image.height} pixels; it must have at least one"
        )


def _upright(image: Any) -> Any:
    """The image in RGB, rotated as its EXIF data specify, with transparent pixels on white."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _broken(value: Any, where: str, reason: str) -> str:
    return f"{where} ({_short(value)}) cannot be read as an image: {reason}. Replace the file, or remove the row"


def _short(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
