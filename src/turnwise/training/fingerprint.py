"""Fingerprints: hashes that are equal for equal contents. A resumed run compares them with those from its start.

Knows files, rows and tokenizers (a model's weights: `models/loading.py`). Does not know what follows from a difference, and
imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turnwise.types import Row


def of_file(path: Path) -> str:
    """SHA-256 of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_OF_MODEL = ("*.safetensors", "*.bin", "*.gguf", "*.json", "*.jinja", "*.model")


def of_model_files(folder: Path) -> str | None:
    """SHA-256 of the files of a model or an adapter, with those of its tokenizer and template; None if it has none here, as a
    model of the hub."""
    files = sorted({file for pattern in _OF_MODEL for file in folder.glob(pattern) if file.is_file()})
    lines = [f"{file.name} {of_file(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None


def sync_file(path: Path) -> str:
    """Flush a file to disk. Returns its SHA-256."""
    digest = of_file(path)
    flush(path)
    return digest


def flush(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def of_rows(rows: Iterable[Row]) -> str:
    """SHA-256 of rows as they were read: ids, messages and all columns, in their order.

    Of objects that are not plain data, only the type counts. An image that is given as a path counts as its path.
    """
    digest = hashlib.sha256()
    for row in rows:
        _update(digest, [row.id, row.messages, row.fields], 0)
    return digest.hexdigest()


def of_tokenizer(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer: vocabulary and rules, special tokens and chat template."""
    core = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    digest = hashlib.sha256()
    _update(digest, [core, special, tokenizer.chat_template], 0)
    return digest.hexdigest()


def _update(digest: Any, value: Any, depth: int) -> None:
    """Hash a value with its type and length, so that different values give different bytes."""
    if depth > 100:  # deeper than data is; perhaps a reference to itself
        digest.update(b"...")
    elif isinstance(value, Mapping):
        digest.update(b"{%d" % len(value))
        for key, item in value.items():
            _update(digest, key, depth + 1)
            _update(digest, item, depth + 1)
    elif isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        for item in value:
            _update(digest, item, depth + 1)
    elif isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        digest.update(b"b%d:" % len(raw))
        digest.update(raw)
    elif value is None or isinstance(value, str | int | float):
        text = f"{type(value).__name__}:{value}".encode("utf-8", "surrogatepass")
        digest.update(b"s%d:" % len(text))
        digest.update(text)
    else:
        name = type(value).__qualname__.encode()
        digest.update(b"o%d:" % len(name))
        digest.update(name)
