"""Write the easiest questions of GSM8K, for recipes/smollm2/gsm8k.yaml: those whose solution has one calculation (65 of the test
set), and for training those of them that have whole numbers up to 100 and at most 45 words (100).

    python recipes/smollm2/easiest.py                        # from the hub (pip install 'turnwise[data]')
    python recipes/smollm2/easiest.py --source DIRECTORY     # from train.jsonl and test.jsonl of the data set

The solutions of GSM8K mark calculations: `He pays 3*4=<<3*4=12>>12 dollars.`
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from turnwise.data.rows import records

LARGEST, LONGEST = 100, 45
_CALCULATION = re.compile(r"<<([\d.]+)[-+*/]([\d.]+)=([\d.]+)>>")


def is_easy(question: str, answer: str) -> bool:
    """Whether a solution is one calculation of small whole numbers, for a short question."""
    found = _CALCULATION.search(answer)
    small = found is not None and all(number.isdecimal() and int(number) <= LARGEST for number in found.groups())
    return small and len(question.split()) <= LONGEST


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", metavar="DIRECTORY", help="default: openai/gsm8k on the hub")
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k_easy"), metavar="DIRECTORY")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        source = "openai/gsm8k" if options.source is None else f"{options.source}/{split}.jsonl"
        rows = records(source, split=split, subset=None if options.source else "main")
        easy = [row.record for row in rows if row.record["answer"].count("<<") == 1]
        if split == "train":
            easy = [record for record in easy if is_easy(record["question"], record["answer"])]
        text = "".join(f"{json.dumps({name: row[name] for name in ('question', 'answer')})}\n" for row in easy)
        (options.out / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{options.out / split}.jsonl: {len(easy)} questions")


if __name__ == "__main__":
    main()
