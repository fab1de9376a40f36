"""What each rank of test_sharded.py runs: one program after the other, in processes that import torch and transformers once.

The argument is JSON: for each program `cluster.mesh`, its module in this folder and its own arguments.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

__all__ = ["main"]


def main() -> None:
    for mesh, *words in json.loads(sys.argv[1]):
        sys.argv, os.environ["MESH"] = words, json.dumps(mesh)
        sys.modules.pop(f"cluster.{words[0]}", None)  # it reads its arguments when it is imported
        importlib.import_module(f"cluster.{words[0]}").main()
    # without finalizing the interpreter, as a command's rank ends: threads of gloo could abort it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
