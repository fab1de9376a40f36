"""Shared by the scripts that write a block of a page in docs/: replace the block, then write or check the page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["replace_block", "write_or_check"]


def replace_block(page: str, begin: str, end: str, body: str) -> str:
    """The page with `body` between the marker `begin` and the next marker `end`. Raises SystemExit without the markers."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"the page has no block from {begin!r} to {end!r}: put both markers where the block belongs")
    return f"{before}{begin}{body}{end}{after}"


def write_or_check(path: Path, fresh: str, *, comparable: Callable[[str], str] = lambda text: text) -> int:
    """Write the page; with `--check`, only compare it by `comparable`. Returns the exit status: 1 if it is out of date."""
    if "--check" not in sys.argv:
        path.write_text(fresh, encoding="utf-8")
        return 0
    outdated = comparable(fresh) != comparable(path.read_text(encoding="utf-8"))
    if outdated:
        print(f"{path} is out of date: python {Path(sys.argv[0])}", file=sys.stderr)
    return int(outdated)
