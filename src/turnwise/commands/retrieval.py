"""`turnwise retrieval`: a local search server for the search tool."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from turnwise.commands.command import Context, port

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run a search server (BM25) over a corpus, reachable from this machine only (docs/search.md). If the "
        "environment variable TURNWISE_RETRIEVAL_TOKEN is set, requests must carry this token."
    )
    parser.add_argument(
        "corpus", type=Path, help='a jsonl file with {"id", "title", "text"} or {"id", "contents"} on each line'
    )
    parser.add_argument("--port", type=port, default=8000, help="the port; default: 8000; 0: any free port")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace, context: Context) -> int:
    from turnwise.serve.retrieval import TOKEN, serve

    serve(options.corpus, port=options.port, token=os.environ.get(TOKEN) or None)
    return 0
