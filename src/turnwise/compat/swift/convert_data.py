"""Converts ms-swift's arguments about data sets: files, columns, numbers of rows, seeds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from turnwise.compat.swift.argument_types import positive_integer
from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder
from turnwise.errors import ConfigError
from turnwise.json_yaml import parse_json

__all__ = ["convert_data", "count_rows", "note_hub_names"]

_PROMPT_COLUMNS = ("messages", "prompt", "query", "problem", "question")
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow")


def convert_data(builder: SwiftRecipeBuilder) -> None:
    """Data sets, columns, held-out rows and the data's seed."""
    for key, option in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        _convert_data_set(builder, key, option)
    if not builder.values.get("dataset"):
        builder.reject("dataset", "no data set is given: set data.train", changes_training=True, even_default=True)
    _convert_columns(builder)
    values = builder.values
    if values.get("split_dataset_ratio"):
        reason = "held-out rows must be a separate file or split: set data.eval"
        builder.reject("split_dataset_ratio", reason, changes_training=True)
    else:
        builder.convert("nothing: no rows are held out", "split_dataset_ratio")
    if values.get("data_seed") == builder.value("seed"):
        builder.convert("seed", "data_seed")
    else:
        builder.reject("data_seed", "one seed is used for everything: seed")


def _convert_data_set(builder: SwiftRecipeBuilder, key: str, option: str) -> None:
    names = builder.values.get(key) or []
    if len(names) > 1:
        if any("#" in name or (":" in name and not os.path.exists(name)) for name in names):
            reason = (
                f"a subset (:) or a number of rows (#) belongs to one data set: write the rows to a file for {option}"
            )
            builder.reject(key, reason, changes_training=True)
            return
        builder.set(option, list(names), key)
        return
    for given in names:
        name, hashed, limit = given.partition("#")  # ms-swift's form: name:subset#rows
        name, _, subset = name.partition(":") if not os.path.exists(name) else (name, "", "")
        builder.set(option, name, key)
        if subset:
            builder.set("data.subset", subset, key)
        if hashed:
            rows = positive_integer(f"--{key} {given}: the number of rows", limit)
            builder.set("data.max_rows" if key == "dataset" else "eval.max_rows", rows, key)


def _convert_columns(builder: SwiftRecipeBuilder) -> None:
    columns: dict[str, str] = {}
    for name, meaning in (builder.values.get("columns") or {}).items():
        columns["prompt" if meaning in ("messages", "query", "prompt", "problem") else meaning] = name
    builder.convert("data.columns", "columns")
    if "prompt" not in columns:
        known = _prompt_column(builder)
        columns["prompt"] = known or "messages"
        if known is None and builder.values.get("dataset"):
            reason = "the data could not be read here, so the prompt column was assumed: check data.columns.prompt"
            builder.assume("columns", "messages", reason)
    if columns != {"prompt": "prompt"}:
        builder.set("data.columns", columns)


def _prompt_column(builder: SwiftRecipeBuilder) -> str | None:
    """The column that holds the conversations, read from the first row; None if there is no readable file."""
    path = Path(str(builder.get("data.train", "")))
    if path.suffix not in (".jsonl", ".json") or not os.path.isfile(path):
        return None
    try:
        with path.open(encoding="utf-8-sig") as lines:
            first: Any = parse_json(next(lines, "{}"), where=str(path), error=ConfigError)
    except (ConfigError, OSError, UnicodeDecodeError):
        return None
    return next((name for name in _PROMPT_COLUMNS if isinstance(first, dict) and name in first), None)


def note_hub_names(builder: SwiftRecipeBuilder) -> None:
    """Record names that ms-swift looks up on ModelScope, and turnwise on Hugging Face."""
    if builder.values.get("use_hf"):
        return
    for key, option in (("model", "model.path"), ("dataset", "data.train"), ("val_dataset", "data.eval")):
        name = str(builder.get(option, ""))
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name) and Path(name).suffix not in _FILES:
            reason = "ms-swift loads it from ModelScope, turnwise from Hugging Face: check that both are the same"
            if key != "model":
                reason += (
                    "; ms-swift also prepares the columns of data sets that it knows, turnwise does not (data.columns)"
                )
            builder.assume(key, name, reason)


def count_rows(builder: SwiftRecipeBuilder) -> int | None:
    """The number of rows to train on; None if it cannot be found out here."""
    path, limit = Path(str(builder.get("data.train", ""))), builder.get("data.max_rows")
    if path.suffix != ".jsonl" or not os.path.isfile(path) or not os.access(path, os.R_OK):
        return limit
    with path.open("rb") as lines:
        count = sum(bool(line.strip()) for line in lines)
    return min(count, limit or count)
