"""How fast is one conversation of a large record? `python benchmarks/record.py`, about a minute.

Writes a record of 100,000 conversations, as it is and compressed, and measures: writing, building the index, opening a
conversation by its id in a new reader, and the sizes. The conversations are those of `--run` (its `trajectories.jsonl`, such as
`runs/demo`), repeated with new ids, or made ones of 300 tokens. The last line is the median time to open one conversation of the
compressed record, in milliseconds; the bound is 50.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turnwise.record import RecordedTrajectories
from turnwise.record.lines import open_lines
from turnwise.record.reader import trajectories_file
from turnwise.record.trajectory_json import SCHEMA
from turnwise.record.writer import AppendedFile

BATCH = 128
"""Conversations of a training step."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Reading one conversation of a large record.")
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--run", type=Path, help="a run whose conversations are repeated")
    parser.add_argument("--opened", type=int, default=20, help="how many conversations are opened")
    options = parser.parse_args()
    table = Table("record", "size", "written in", "index built in", "index", "one by its id", "slowest of them")
    median = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trajectories.jsonl", "trajectories.jsonl.gz"):
            path = Path(folder) / name
            records = recorded(options.run) if options.run else made()
            started = time.perf_counter()
            write(path, itertools.islice(records, options.conversations))
            written = time.perf_counter() - started
            started = time.perf_counter()
            RecordedTrajectories(path)
            built = time.perf_counter() - started
            times = opened(path, options.conversations, options.opened)
            median = statistics.median(times) * 1000
            index = path.with_name(f"{name}.index").stat().st_size
            table.add_row(
                name, f"{path.stat().st_size / 1e6:.0f} MB", f"{written:.1f} s", f"{built:.1f} s", f"{index / 1e6:.1f} MB",
                f"{median:.1f} ms", f"{max(times) * 1000:.1f} ms",
            )  # fmt: skip
    Console(width=130).print(table)
    print(f"record_open_one_ms {median:.1f}")


def opened(path: Path, conversations: int, count: int) -> list[float]:
    """The seconds of opening a conversation, each with a new reader."""
    chosen = random.Random(0).sample(range(conversations), count)
    times: list[float] = []
    for number in chosen:
        started = time.perf_counter()
        (trajectory,) = RecordedTrajectories(path).with_id(id_of(number))
        times.append(time.perf_counter() - started)
        assert trajectory.id == id_of(number)
    return times


def id_of(number: int) -> str:
    """The id of a conversation, as a training run writes it."""
    step, place = divmod(number, BATCH)
    return f"{step + 1}.{place // 8}:{number % 5000}/{place % 8}"


def write(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Write the records step by step, as a run does."""
    file = AppendedFile(path)
    numbered = enumerate(records)
    while step := list(itertools.islice(numbered, BATCH)):
        file.append(line(number, record) for number, record in step)


def line(number: int, record: dict[str, Any]) -> bytes:
    """The line of a record, with the keys in the order of a run."""
    head = {"schema": SCHEMA, "step": number // BATCH + 1, "id": id_of(number)}
    return json.dumps({**head, **record}, separators=(",", ":")).encode() + b"\n"


def recorded(run: Path) -> Iterator[dict[str, Any]]:
    """The conversations of a run, again and again."""
    lines = [json.loads(line) for line in open_lines(trajectories_file(run))]
    return itertools.cycle({key: line[key] for key in line if key not in ("schema", "step", "id")} for line in lines)


def made() -> Iterator[dict[str, Any]]:
    """Conversations of two turns and 300 tokens with random words and numbers."""
    rng = random.Random(0)
    words = [f"word{n}" for n in range(2000)]
    while True:
        text = " ".join(rng.choices(words, k=60))
        message = {"role": "assistant", "content": text}
        turn = {"message": message, "message_index": 1, "text": text, "reward": 0.5, "advantage": 0.1, "weight": 1.0}
        yield {
            "group": "0",
            "row": {"id": "0", "answer": "4"},
            "stop": "done",
            "error": None,
            "reward": rng.random(),
            "rewards": {},
            "messages": [{"role": "user", "content": text}, message],
            "turns": [{**turn, "info": {}, "tool_calls": [], "finish_reason": "stop"}],
            "segments": [
                {
                    "token_ids": rng.choices(range(30000), k=300),
                    "logprobs": [0.0] * 150 + [round(-rng.expovariate(2), 7) for _ in range(150)],
                    "turn": [-1] * 150 + [0] * 150,
                    "version": [-1] * 150 + [3] * 150,
                }
            ],
            "logprob_kind": "sampled",
            "template_mismatch": None,
            "seconds": 1.0,
        }


if __name__ == "__main__":
    main()
