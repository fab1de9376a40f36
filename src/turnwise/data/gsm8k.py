"""Converts GSM8K as published into rows: `python -m turnwise.data.gsm8k --source train.jsonl --out data/gsm8k`.

The rows have the columns of verl's preprocessing, so that files, rewards and environments written for verl work:
`--kind interaction` as for `gsm8k_multiturn_w_interaction`, `--kind tool` as for `gsm8k_tool_agent_loop`. The source is a file
of the data set (https://github.com/openai/grade-school-math) with `{"question": ..., "answer": "... #### 72"}` per line, a
hub id (`openai/gsm8k`), or a directory saved by `datasets`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from turnwise.data.numeric_answers import solution_number
from turnwise.data.rows import FILES, records
from turnwise.errors import DataError, TurnwiseError
from turnwise.json_yaml import parse_json

__all__ = ["Kind", "main", "make_row", "preprocess"]

Kind = Literal["interaction", "tool"]
Format = Literal["jsonl", "parquet"]

_SUFFIX = "Let's think step by step and output the final answer after `####`."
_SYSTEM: dict[Kind, str] = {
    "interaction": "You are good at mathematics. Solve the question step by step. If the user tells you that your answer is "
    "wrong, think it over carefully and solve it again. Write your final answer as `#### <answer>`.",
    "tool": "You are good at mathematics. Solve the question step by step before you call a tool. When you have an answer, check "
    "it with the tool `calc_gsm8k_reward` at least once, and improve it where needed, before you give your final answer. "
    "Write your final answer as `#### <answer>`.",
}


def make_row(question: str, answer: str, *, split: str, index: int, kind: Kind = "interaction") -> dict[str, Any]:
    """A row in verl's format.

    `index` is the number of the row from 0. Raises ValueError if the answer does not contain `#### number`.
    """
    solution = solution_number(answer)
    if solution is None:
        raise ValueError(f"the answer has no `#### number`: {answer[-60:]!r}")
    extra: dict[str, Any] = {"split": split, "index": index, "answer": answer, "question": question}
    if kind == "interaction":
        extra["interaction_kwargs"] = {"name": "gsm8k", "query": question, "ground_truth": solution}
    else:
        extra["need_tools_kwargs"] = True
        extra["tools_kwargs"] = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}}}
    row: dict[str, Any] = {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": _SYSTEM[kind]},
            {"role": "user", "content": f"{question} {_SUFFIX}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": extra,
    }
    return row if kind == "interaction" else {**row, "agent_name": "tool_agent"}


def preprocess(
    source: Path,
    out: Path,
    *,
    format: Format = "jsonl",
    kind: Kind = "interaction",
    split: str = "train",
    subset: str = "main",
) -> tuple[Path, int]:
    """Write the rows of a source to `out/<the file's name, or the split's>.<format>`. Returns that path and the number of rows.

    `split` and `subset` select from a hub data set or a saved directory.

    Raises DataError if the source is missing, a row is malformed (with the row's number), there are no rows, the output path
    is the source, or the output cannot be written.
    """
    single = source.suffix in FILES or source.is_file()
    rows = _convert(
        _lines(source) if single else _table(source, split, subset), source, source.stem if single else split, kind
    )
    path = out / f"{source.stem if single else split}.{format}"
    if path.exists() and path.samefile(source):
        raise DataError(f"--out {out} would overwrite the source {source}; give another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if format == "parquet":
            _write_parquet(rows, path)
        else:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} could not be written: {error.strerror or error}") from None
    return path, len(rows)


def _lines(source: Path) -> Iterator[tuple[str, Any]]:
    try:
        lines = source.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{source} could not be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}:{number}: this line is not UTF-8 ({error.reason} at byte {error.start + 1})"
            ) from None
        yield f"{source}:{number}", parse_json(text, where=f"{source}:{number}: this line", error=DataError)


def _table(source: Path, split: str, subset: str) -> Iterator[tuple[str, Any]]:
    for source_record in records(str(source), split=split, subset=subset):
        yield source_record.place, dict(source_record.record)


def _convert(source_records: Iterator[tuple[str, Any]], source: Path, split: str, kind: Kind) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for place, record in source_records:
        question, answer = (record.get(name) if isinstance(record, dict) else None for name in ("question", "answer"))
        if not isinstance(question, str) or not isinstance(answer, str):
            raise DataError(f"{place}: a row needs the texts `question` and `answer`; this row is {str(record)[:80]!r}")
        try:
            rows.append(make_row(question, answer, split=split, index=len(rows), kind=kind))
        except ValueError as error:
            raise DataError(f"{place}: {error}") from None
    if not rows:
        raise DataError(f"{source} has no rows; at least one is needed")
    return rows


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import datasets
    except ImportError:
        raise DataError("writing parquet needs the `datasets` package: pip install 'turnwise[data]'") from None
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `python -m turnwise.data.gsm8k`. Returns the exit status: 0, or 1 after an error."""
    parser = argparse.ArgumentParser(
        prog="turnwise.data.gsm8k", description="Convert the published GSM8K data set into rows."
    )
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        help='a jsonl file with {"question", "answer"} on each line, or a hub name: openai/gsm8k',
    )
    parser.add_argument("--split", default="train", help="the split of a hub data set")
    parser.add_argument("--subset", default="main", help="the configuration of a hub data set")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help=("the directory to write <name of the source or split>.<format> to"),
    )
    parser.add_argument("--format", choices=get_args(Format), default="jsonl", help="the file format")
    parser.add_argument(
        "--kind",
        choices=get_args(Kind),
        default="interaction",
        help=("the use of the rows: with an interaction, or with a tool"),
    )
    options = parser.parse_args(arguments)
    try:
        path, count = preprocess(
            options.source,
            options.out,
            format=options.format,
            kind=options.kind,
            split=options.split,
            subset=options.subset,
        )
    except TurnwiseError as error:
        print(f"turnwise: {error}", file=sys.stderr)
        return 1
    print(f"{count} rows in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
