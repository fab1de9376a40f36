"""The weights of a checkpoint of several ranks as files that other programs load: safetensors files of a model directory.

Ranks write their parts of all weights with torch.distributed.checkpoint (`shards.py`), and beside the model's configuration a
note where the parts are. Here they become complete, one layer at a time: no process has more of a model than a layer, and one
file. Names and shapes are those of the files that the model was loaded from, as `save_pretrained` writes them.

Needs no process group. Does not know runs, or when the files are written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from turnwise.errors import RunError
from turnwise.local_paths import WEIGHTS_IN_PARTS, share_weights
from turnwise.models.loading import conversion_names, file_weights, model_without_weights, save_model
from turnwise.training.checkpoint import CRITIC, MODEL, UNWRITABLE, replace_sums
from turnwise.training.fingerprint import flush, sync_file
from turnwise.training.sharded.parts import ModelParts, read_parts
from turnwise.training.sharded.shards import Shard, body_prefix

_TEMPORARY = "writing-weights"
FILE_BYTES = 5 * 10**9
"""Size of a file. Its tensors are in memory before it is written."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def save_without_weights(shard: Shard, folder: Path, parts: str) -> None:
    """Write a model directory without its weights. `parts` is the path from it to the directory that `save` of `shards.py`
    writes."""
    save_model(shard.model, folder, {})
    about = {"parts": parts, "conversions": conversion_names(shard.model), "prefixes": body_prefix(shard)}
    (folder / WEIGHTS_IN_PARTS).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def complete_weights(folder: Path) -> None:
    """Write the weights of a checkpoint that several ranks have written in parts as files of its model and of its critic, which
    other programs load. Does nothing if there are no parts. If the process is killed, the checkpoint is what it was.

    Raises RunError if they cannot be written.
    """
    temporary = folder / _TEMPORARY
    try:
        for part in (MODEL, CRITIC):
            note = folder / part / WEIGHTS_IN_PARTS
            if not note.is_file():
                continue
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_weights(folder / part, temporary)
            files = sorted(temporary.iterdir())
            sums = {f"{part}/{file.name}": sync_file(file) for file in files}
            for file in files:
                os.replace(file, folder / part / file.name)
            flush(folder / part)
            replace_sums(folder, {f"{part}/{note.name}": None, **sums})
            note.unlink()
    except UNWRITABLE as error:
        raise RunError(
            f"the weights in {folder} could not be written as files of a model: {error}; the checkpoint is what it was"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_weights(source: Path, out: Path) -> None:
    """Write the weights of the model directory `source`, whose note names their parts, into the directory `out`.

    Raises RunError if a part cannot be read or does not fit the model, OSError if a file cannot be written.
    """
    parts = ModelParts(source)
    model = parts.converted(model_without_weights(str(source)))
    parts.refuse_missing(model)
    stored = parts.stored
    files, dropped = _Files(out), set(model._keys_to_ignore_on_save or ())
    for group in of_layers(name for name in stored if name not in dropped):
        tensors = {stored[name].key: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in group}
        read_parts(tensors, parts.folder, alone=True)
        files.add(file_weights(model, {name: tensors[stored[name].key] for name in group}))
    files.finish()


def of_layers(names: Iterable[str]) -> list[list[str]]:
    """The names of weights of each layer, and each other name alone: what becomes a tensor of the files together is in one
    layer."""
    layers: dict[str, list[str]] = {}
    for name in names:
        found = re.match(r".*?\.\d+\.", name)
        layers.setdefault(found[0] if found else name, []).append(name)
    return list(layers.values())


class _Files:
    """Safetensors files of at most `FILE_BYTES` each, unless one tensor is larger, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._written: list[tuple[Path, list[str]]] = []
        self._size = self._parameters = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if self._waiting and sum(one.nbytes for one in self._waiting.values()) + tensor.nbytes > FILE_BYTES:
                self._write()
            self._waiting[name] = tensor.contiguous()

    def finish(self) -> None:
        self._write()
        if len(self._written) == 1:
            os.replace(self._written[0][0], self._folder / _SINGLE)
            return
        places: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, 1):
            own = f"model-{number:05d}-of-{len(self._written):05d}.safetensors"
            os.replace(path, self._folder / own)
            places |= dict.fromkeys(names, own)
        sizes = {"total_parameters": self._parameters, "total_size": self._size}
        text = json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=True) + "\n"
        (self._folder / _INDEX).write_text(text, encoding="utf-8")

    def _write(self) -> None:
        path = self._folder / f"writing-{len(self._written):05d}.safetensors"
        save_file(self._waiting, path, metadata={"format": "pt"})
        share_weights(path)
        self._written.append((path, list(self._waiting)))
        self._size += sum(tensor.nbytes for tensor in self._waiting.values())
        self._parameters += sum(tensor.numel() for tensor in self._waiting.values())
        self._waiting = {}
