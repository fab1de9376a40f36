"""Write docs/metrics.md's table from `turnwise.record.metric_names`, the list of all metrics.

python scripts/metric_table.py            # rewrite the page
python scripts/metric_table.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated_page import replace_block, write_or_check

from turnwise.record.metric_names import METRICS

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: made by scripts/metric_table.py -->", "<!-- end of metrics -->"


def table() -> str:
    """Two tables as Markdown: the metrics, and the names elsewhere."""
    rows = ["| metric | unit | computed over | meaning | in |", "|---|---|---|---|---|"]
    rows += [f"| `{one.name}` | {one.unit} | {one.over} | {one.meaning} | {one.lines} |" for one in METRICS]
    names = ["| elsewhere | here | |", "|---|---|---|"]
    pairs = [(other, one.name, "the same figure") for one in METRICS for other in one.same]
    pairs += [(other, one.name, "nearest figure") for one in METRICS for other in one.near]
    names += [f"| `{other}` | `{ours}` | {how} |" for other, ours, how in sorted(pairs)]
    return "\n".join([*rows, "", "## Names in TRL, verl and ms-swift", "", *names])


def main() -> int:
    """Rewrite or check the page."""
    page = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, replace_block(page, BEGIN, END, f"\n\n{table()}\n\n"))


if __name__ == "__main__":
    sys.exit(main())
