"""What a training and a fine-tuning run read at their start: rows, renderer, and the run directory. No weights yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from turnwise import build
from turnwise.chat.renderer import Renderer
from turnwise.chat.row_media import process_row_media
from turnwise.config.schema import Config
from turnwise.doctor.preflight import preflight, preflight_rows, unread_columns
from turnwise.runs.resuming import OpenedRun, open_run
from turnwise.types import Row

__all__ = ["ReadRows", "RunInputs", "read_inputs"]

ReadRows = Callable[[Config, bool], list[Row]]
"""Reads the training rows, or the held-out rows if the second argument is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Everything of a run that does not need the model's weights."""

    config: Config
    """The recipe, with `train.steps` in place of `train.epochs`; `opened.config` is the recipe as it was written."""
    opened: OpenedRun
    renderer: Renderer
    rows: list[Row]
    held_out: list[Row]
    """Empty without data.eval."""
    notes: list[str]
    """Notes for the person who starts the run: on the chat template, and on rows that are left out."""


def read_inputs(config: Config, kind: Literal["train", "sft"], read: ReadRows) -> RunInputs:
    """Open the run directory, read the rows, load the tokenizer and check the chat template.

    A resumed run is compared with the run that was started: rows and tokenizer must be the same. Raises TurnwiseError.
    """
    opened = open_run(config, kind)
    rows = read(config, False)
    held_out = read(config, True) if config.data.eval is not None else []
    opened.compare_rows(rows)
    renderer = build.renderer(config, opened.source)
    opened.compare_tokenizer(renderer)
    tools_in_rows = kind == "sft" and any(row.fields.get("tools") for row in [*rows, *held_out])
    row_notes = preflight_rows(config, renderer, [*rows, *held_out], tools=tools_in_rows)  # its errors name the row
    notes = preflight(config, renderer, source=opened.source, tools=tools_in_rows, rows=rows, training=kind == "train")
    notes += row_notes
    notes += unread_columns(config, rows) if kind == "train" else []
    rows, dropped = build.drop_long_prompts(config, rows, renderer)
    held_out, held_out_dropped = build.drop_long_prompts(config, held_out, renderer)
    notes += [*dropped, *(f"held-out rows: {note}" for note in held_out_dropped)]
    if kind == "train" and len(rows) < config.train.batch_size:
        notes.append(
            f"train.batch_size={config.train.batch_size} is more than the {len(rows)} rows of data.train, so a step uses rows "
            f"more than once: set train.batch_size={len(rows)}, and raise train.group_size for more conversations of each row"
        )
    processed = process_row_media([*rows, *held_out], renderer.vision, wanted=config.data.return_multi_modal_inputs)
    return RunInputs(
        config=config.with_known_steps(len(rows)),
        opened=opened,
        renderer=renderer,
        rows=processed[: len(rows)],
        held_out=processed[len(rows) :],
        notes=notes,
    )
