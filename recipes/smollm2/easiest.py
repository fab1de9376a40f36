"""Write the questions of GSM8K whose solution has at most two calculations, for recipes/smollm2/gsm8k.yaml.

    python recipes/smollm2/easiest.py                        # from the hub (pip install 'turnwise[data]')
    python recipes/smollm2/easiest.py --source DIRECTORY     # from train.jsonl and test.jsonl of the data set

The solutions of GSM8K mark calculations: `He pays 3*4=<<3*4=12>>12 dollars.`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from turnwise.data.rows import records

MOST = 2


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
        easy = [row.record for row in rows if 1 <= row.record["answer"].count("<<") <= MOST]
        text = "".join(f"{json.dumps({name: row[name] for name in ('question', 'answer')})}\n" for row in easy)
        (options.out / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{options.out / split}.jsonl: {len(easy)} questions")


if __name__ == "__main__":
    main()
