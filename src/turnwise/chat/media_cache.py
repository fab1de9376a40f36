"""Runs the model's processor on an image or a video, once for equal content.

Knows the processor of transformers: what it returns for one placeholder and one image. Does not know messages or sequences.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.chat.media_parts import MediaPart
from turnwise.chat.placeholders import MediaKind
from turnwise.chat.processors import why_no_videos
from turnwise.data.images import digest, load_image
from turnwise.errors import DataError, TemplateError

__all__ = ["MediaCache", "ProcessedMedia"]

_CACHE_SIZE = 64
"""Images whose tensors are kept for the next conversation with the same image."""
_NOT_MEDIA = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "video_metadata")
"""Outputs of a processor that are not inputs of the vision part of the model."""


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """An image or a video after the processor."""

    source: Any
    """The PIL image, the frames, or the path of a video file."""
    text: str
    """The text that replaces one placeholder."""
    num_placeholders: int
    """Placeholder tokens in that text."""
    inputs: Mapping[str, Any]
    """Tensors for the model's forward, by its names, such as `pixel_values`."""


class MediaCache:
    """`processor` is a processor of transformers, `tokens` and `token_ids` the placeholder of each kind of media."""

    def __init__(self, processor: Any, tokens: Mapping[MediaKind, str], token_ids: Mapping[str, int]) -> None:
        self.processor = processor
        self._tokens, self._token_ids = tokens, token_ids
        self._recent: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._pinned: dict[str, ProcessedMedia] = {}

    def get(self, part: MediaPart, *, pin: bool = False) -> ProcessedMedia:
        """Load and process the image or video, or take an equal one from the cache; `pin` keeps it for the rest of the run.

        Raises DataError if it cannot be loaded or processed.
        """
        source = load_image(part.value, where=part.where) if part.kind == "image" else _load_video(part)
        key = _content_key(part.kind, source)
        processed = self._pinned.get(key)
        if processed is None:
            processed = self._recent.get(key) or self._process(part, source)
            self._recent[key] = processed
            self._recent.move_to_end(key)
            while len(self._recent) > _CACHE_SIZE:
                self._recent.popitem(last=False)
        if pin:
            self._pinned[key] = processed
        return processed

    def _process(self, part: MediaPart, source: Any) -> ProcessedMedia:
        processor = self.processor
        if part.kind == "video" and getattr(processor, "video_processor", None) is None:
            raise DataError(f"{part.where}: {why_no_videos()}. Or give the frames as images")
        media = {"images": [source]} if part.kind == "image" else {"videos": [source]}
        try:
            outputs = processor(text=[self._tokens[part.kind]], add_special_tokens=False, return_tensors="pt", **media)
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:  # torchcodec raises RuntimeError
            raise DataError(f"the model's processor cannot process {part.where}: {error}") from error
        ids: list[int] = outputs["input_ids"][0].tolist()
        tokenizer = processor.tokenizer
        # the text goes into the prompt, which is encoded later: its ids there must be the same
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer.encode(text, add_special_tokens=False)) != ids:
            raise TemplateError(
                f"{type(processor).__name__} writes the text {text[:80]!r} for a {part.kind}, and its own tokenizer encodes this "
                f"text as other tokens. Use the tokenizer that belongs to the processor"
            )
        inputs = {name: value for name, value in outputs.items() if name not in _NOT_MEDIA}
        return ProcessedMedia(source, text, sum(token == self._token_ids[part.kind] for token in ids), inputs)


def _load_video(part: MediaPart) -> Any:
    """A list of frames as PIL images; the path of a file as it is, for the processor to read."""
    if isinstance(part.value, str | Path):
        file = Path(os.path.expanduser(str(part.value).removeprefix("file://")))
        if not os.path.isfile(file):
            raise DataError(
                f"{part.where}: there is no video file {file.absolute()}. Correct the path, or give a list of frames"
            )
        return str(file)
    if not isinstance(part.value, list | tuple) or not part.value:
        raise DataError(f"{part.where} is a {type(part.value).__name__}; a video must be a list of frames or a path")
    return [load_image(frame, where=f"frame {n} of the {part.where}") for n, frame in enumerate(part.value, 1)]


def _content_key(kind: str, source: Any) -> str:
    """Equal for equal content; for a video file: for the same file, unchanged."""
    if isinstance(source, str):
        stat = Path(source).stat()
        return f"{kind}:{source}:{stat.st_size}:{stat.st_mtime_ns}"
    if isinstance(source, list):
        return f"{kind}:{hashlib.sha256(''.join(map(digest, source)).encode()).hexdigest()}"
    return f"{kind}:{digest(source)}"
