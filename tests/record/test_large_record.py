"""Opening one conversation of a large record reads its line and the index, and not the other conversations.

benchmarks/record.py measures the time with 100,000 conversations.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

import record as record_benchmark
from turnwise.record import RecordedTrajectories


class _CountingFile(io.FileIO):
    """A file that counts the bytes that the operating system returns, read-ahead of buffers included."""

    counts: ClassVar[Counter[str]] = Counter()

    def readinto(self, buffer: Any, /) -> int:
        size = super().readinto(buffer)
        self.counts[Path(str(self.name)).name] += size
        return size

    def readall(self) -> bytes:
        data = super().readall()
        self.counts[Path(str(self.name)).name] += len(data)
        return data


def _bytes_read(path: Path, id: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that a new reader reads of each file to open one conversation."""
    opened = Path.open

    def counting(file: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode != "rb":
            return opened(file, mode, *arguments, **options)
        return io.BufferedReader(_CountingFile(file))

    with monkeypatch.context() as patch:
        _CountingFile.counts = Counter()
        patch.setattr(Path, "open", counting)
        (trajectory,) = RecordedTrajectories(path).with_id(id)
    assert trajectory.id == id
    return dict(_CountingFile.counts)


@pytest.mark.parametrize("name", ["trajectories.jsonl", "trajectories.jsonl.gz"])
def test_the_bytes_read_do_not_grow_with_the_number_of_conversations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(json.dumps(next(record_benchmark.made())))
    line = len(record_benchmark.line(0, record))
    # the line, and the last line, which shows that the index belongs to the file; a part of a compressed file has 256 kB of lines
    bound = 2 * line + 4 * io.DEFAULT_BUFFER_SIZE if name.endswith(".jsonl") else 4 * 2**18
    of_record, of_index = {}, {}
    for count in (500, 4000):
        path = tmp_path / str(count) / name
        path.parent.mkdir()
        record_benchmark.write(path, iter([record] * count))
        RecordedTrajectories(path)  # builds the index, once
        read = _bytes_read(path, record_benchmark.id_of(count // 2), monkeypatch)
        of_record[count], of_index[count] = read[name], read[f"{name}.index"]
        assert read[name] <= bound
        assert set(read) == {name, f"{name}.index"}
        assert of_index[count] <= 64 * count + 4096  # 6 MB for 100,000 conversations
    assert of_record[4000] <= 1.5 * of_record[500] + io.DEFAULT_BUFFER_SIZE
    assert path.stat().st_size > 20 * of_record[4000]
