"""A LoRA adapter as one file: the weights as a safetensors file, with adapter_config.json in its metadata.

So an adapter is sent to a rollout server in the same way as all weights are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from turnwise.errors import EngineError

__all__ = ["LoadAdapter", "pack_adapter", "packed_config", "unpack_adapter"]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_KEY = "adapter_config"

LoadAdapter = Callable[[int, Path], Awaitable[None]]
"""Loads the adapter in a directory into the engine, as the given version. Raises EngineError or ConfigError."""


def pack_adapter(folder: Path, file: Path) -> None:
    """Write the adapter in a directory (in peft's format) into one file. Raises EngineError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    try:
        metadata = {"format": "pt", _KEY: (folder / CONFIG_FILE).read_text(encoding="utf-8")}
        save_file(load_file(folder / WEIGHTS_FILE), file, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the adapter cannot be written to {file}: {error}") from error


def packed_config(file: Path) -> str | None:
    """The adapter_config.json of a packed adapter; None if the file has weights that are no adapter.

    Raises OSError or SafetensorError if the file cannot be read.
    """
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return (opened.metadata() or {}).get(_KEY)


def unpack_adapter(file: Path, config: str, folder: Path) -> None:
    """Write a packed adapter into a directory, in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
    (folder / WEIGHTS_FILE).write_bytes(file.read_bytes())
