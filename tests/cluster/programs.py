"""What each rank of test_sharded.py runs: one program after the other, in processes that import torch and transformers once.

The argument is JSON: for each program a list of its module in this folder and of its own arguments.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

__all__ = ["main"]


def main() -> None:
    for words in json.loads(sys.argv[1]):
        sys.argv = words
        importlib.import_module(f"cluster.{words[0]}").main()
    # without finalizing the interpreter, as a command's rank ends: threads of gloo could abort it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
