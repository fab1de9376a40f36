"""`data.return_multi_modal_inputs`: whether images of the data set are processed before training, or when first needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.chat.media import MediaProcessor
from turnwise.chat.media_parts import has_media, refuse_media
from turnwise.errors import ConfigError, DataError, TurnwiseError
from turnwise.types import Row

__all__ = ["process_row_media"]


def process_row_media(rows: Sequence[Row], processor: MediaProcessor | None, *, wanted: bool | None) -> list[Row]:
    """The rows, with `multi_modal_inputs` among their fields if `wanted` (`data.return_multi_modal_inputs`) is true.

    True: run the processor now, once for each image; all conversations of the row use these tensors. False and None: the
    first conversation that needs an image runs the processor, and a cache keeps the most recent images.

    Raises ConfigError if `wanted` is given and no row contains an image or a video, DataError if the processor refuses one.
    """
    if wanted is None:
        return list(rows)
    with_media = [has_media(row.messages) for row in rows]
    if not any(with_media):
        raise ConfigError(
            f"data.return_multi_modal_inputs={str(wanted).lower()} has no effect: no row contains an image or a video. Remove it"
        )
    if not wanted:
        return list(rows)
    return [
        _process_row(row, processor) if has_images else row for row, has_images in zip(rows, with_media, strict=True)
    ]


def _process_row(row: Row, processor: MediaProcessor | None) -> Row:
    if processor is None:
        refuse_media(row.messages, "the model")
    assert processor is not None
    try:
        inputs = processor.preprocess(row.messages)
    except TurnwiseError as error:
        raise DataError(f"row {row.id!r}: {error}") from error
    return replace(row, fields={**row.fields, "multi_modal_inputs": inputs})
