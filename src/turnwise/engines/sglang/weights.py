"""The weights of an update on their way to SGLang's workers, by broadcasts or in shared memory, and what the server has then.

Files need nothing of this: the server reads them (`SglangApi`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.engines.remote.http import HttpServer, ServerLost
from turnwise.engines.remote.images import tensor_bytes
from turnwise.engines.remote.shared_buffer import SharedBuffer, buffer_size, parts_of
from turnwise.engines.remote.weights import (
    FILES_INSTEAD,
    GroupAddress,
    TrainerGroups,
    WeightUpdate,
    read_header,
    read_shapes,
    sharing_with,
)
from turnwise.engines.sglang.loader import EXPECTED, LOADER
from turnwise.errors import EngineError

# Broadcasts: weights to SGLang's workers


async def broadcast(
    groups: TrainerGroups, server: HttpServer, tensors: Mapping[str, Any], *, workers: int, flush_cache: bool
) -> None:
    """Replace the weights of a server. Raises EngineError if it has the previous weights, ServerLost if it may not."""
    where = await groups.open(server.url, workers, lambda where: _invite(server, where))
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": where.name,
        "flush_cache": flush_cache,
    }
    await server.post("/begin_weight_update", {})
    try:
        await groups.send(server.url, tensors.values(), _call(server, "/update_weights_from_distributed", body))
    finally:
        await server.post("/end_weight_update", {})


async def share(server: HttpServer, update: WeightUpdate, *, device: str, workers: int, flush_cache: bool) -> None:
    """Replace the weights of a server by those in memory of `device`. The server checks all before it loads the first. Raises
    EngineError if the server has the previous weights, ServerLost if it has ended."""
    import torch

    tensors = update.source
    assert update.checksums is not None
    parts = parts_of(tensors, update.checksums)
    with sharing_with(server.url):
        buffer, lost = SharedBuffer(buffer_size(parts), device), False
    try:
        await _call(server, "/begin_weight_update", {})
        try:
            for do_load in (False, True) if len(parts) > 1 else (True,):
                for part in parts:
                    with sharing_with(server.url):
                        await asyncio.to_thread(buffer.fill, part, tensors)
                        expected = torch.tensor([int(do_load), *(place.checksum for place in part)])
                        pickled = [buffer.pickled(part, {EXPECTED: expected}) for _ in range(workers)]
                    body = {
                        "serialized_named_tensors": [base64.b64encode(one).decode() for one in pickled],
                        "load_format": LOADER,
                        "flush_cache": flush_cache and do_load and part is parts[-1],
                    }
                    await _call(server, "/update_weights_from_tensor", body)
        finally:
            with contextlib.suppress(ServerLost):
                await server.post("/end_weight_update", {})
    except ServerLost as error:
        lost = True
        raise ServerLost(
            f"{error}. It was reading weights from the trainer's memory; if it cannot, {FILES_INSTEAD}. Its log has the reason"
        ) from error
    finally:
        buffer.close(lost=lost)


async def _invite(server: HttpServer, where: GroupAddress) -> None:
    body = {
        "master_address": where.address,
        "master_port": where.port,
        "rank_offset": 1,
        "world_size": where.size,
        "group_name": where.name,
        "backend": where.backend,
    }
    await _call(server, "/init_weights_update_group", body)


async def _call(server: HttpServer, path: str, body: Mapping[str, Any]) -> None:
    """A POST request whose answer says whether it has succeeded. Raises EngineError if it has not."""
    answer = await server.post(path, dict(body))
    if not (answer or {}).get("success"):
        raise EngineError(f"{server.url}{path} failed: {(answer or {}).get('message', answer)}")


# Checksums: the weights of a server, compared with those of an update

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang keeps these weights as one: the rows of the parts, one after the other."""
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_PADDING = 64
"""SGLang fills these weights up with rows of zeros, to a multiple of so many rows, unless the model's class has an embedding of
its own (Gemma 3)."""
_BLOCK = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """The weights of an update."""

    shapes: Mapping[str, Sequence[int]]
    """The shape of each weight, by name."""
    read: Callable[[str], Iterator[bytes]]
    """The bytes of a weight, in blocks."""


def contents_of(update: WeightUpdate) -> Contents:
    """The weights of an update: a file, or tensors on the CPU."""
    if update.tensors is None:
        assert update.path is not None
        return file_contents(update.path)
    tensors = update.tensors
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return Contents(shapes, lambda name: iter([tensor_bytes(tensors[name])]))


def file_contents(file: Path) -> Contents:
    """The weights of a safetensors file."""
    header, start = read_header(file)

    def read(name: str) -> Iterator[bytes]:
        begin, end = header[name]["data_offsets"]
        with file.open("rb") as stream:
            stream.seek(start + begin)
            while begin < end:
                block = stream.read(min(_BLOCK, end - begin))
                begin += len(block)
                yield block

    return Contents(read_shapes([file]).shapes, read)


def check_checksums(server: str, reported: Mapping[str, str], weights: Contents) -> None:
    """Raise EngineError if a server on a CPU reports other SHA-256 checksums than those of the update's tensors.

    `reported` maps the server's names of weights to the first 8 bytes of the checksum, in hexadecimal digits.
    """
    for name, checksum in reported.items():
        parts = list(_parts(name, weights.shapes))
        if not parts:  # a buffer, or a weight that SGLang computes
            continue
        digest, size = hashlib.sha256(), 0
        for part in parts:
            for block in weights.read(part):
                digest.update(block)
                size += len(block)
        expected = {digest.hexdigest()[:16]}
        if name.endswith(_PADDED):
            rows = weights.shapes[name][0]
            digest.update(bytes(size // rows * (-rows % _PADDING)))
            expected.add(digest.hexdigest()[:16])
        if checksum not in expected:
            raise EngineError(
                f"{server} has other values of {name} than the trainer: their checksums are {checksum} and "
                f"{' or '.join(sorted(expected))}"
            )


def _parts(name: str, header: Mapping[str, object]) -> Iterator[str]:
    """The names in the file of a weight of the server, in order."""
    if name in header:
        yield name
        return
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in header for part in names):
            yield from names
