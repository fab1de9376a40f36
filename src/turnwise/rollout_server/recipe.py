"""Which options of a recipe the server and the trainer must have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.config.environment_values import same_value, with_digests
from turnwise.config.schema import Config

__all__ = ["base_weights", "differences", "served_options"]

_SECTIONS = (
    "environment",
    "tools",
    "mcp",
    "tool_calls",
    "limits",
    "thinking",
    "tokenization_sanity_check",
    "tool_format",
    "deterministic",
)

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16


def served_options(config: Config) -> dict[str, Any]:
    """The options that decide about conversations, as plain data by their dotted names.

    The sampling is not among them: the trainer sends it with each request. The engine is the server's own.
    """
    plain = with_digests(config.model_dump(mode="json"), config.origins)  # they are sent
    names = [*_SECTIONS, "max_concurrent"] if config.deterministic else _SECTIONS
    of_model = {f"model.{name}": plain["model"][name] for name in ("lora", "chat_template_kwargs")}
    return dict(_flat({**{name: plain[name] for name in names}, **of_model}, ""))


def base_weights(config: Config) -> str | None:
    """A fingerprint of the model's files, if the recipe trains an adapter on it: then only the adapter is sent. Else None.

    Of each file, the size and blocks in equal distances are read, so that large models are no obstacle. For a model on the hub,
    its name.
    """
    if config.model.lora.rank is None:
        return None
    folder = Path(config.model.path).expanduser()
    files = sorted(file for suffix in ("safetensors", "bin") for file in folder.glob(f"*.{suffix}"))
    if not files:
        return config.model.path
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as opened:
            for block in range(_BLOCKS):
                opened.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                digest.update(opened.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and name not in ("arguments", "model.chat_template_kwargs"):
            items += _flat(value, f"{key}.")
        else:
            items.append((key, value))
    return items


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A line for each option that has another value at the server (`theirs`) than at the trainer (`ours`)."""
    return [
        f"{name}={ours.get(name)!r:.80} here, {theirs.get(name)!r:.80} at the server"
        for name in sorted({*ours, *theirs})
        if not same_value(ours.get(name), theirs.get(name))
    ]
