"""How fast is the viewer with a large run? `python benchmarks/view.py`, some minutes; needs chromium and playwright.

Writes a run of 100,000 conversations and one of 32,000 tokens (benchmarks/record.py makes the conversations), and measures in
Chromium, while the index is built: the first paint of the page, the first rows of the table of conversations, and the longest
time between two frames while the table is scrolled. Then, with the index: the table and the long conversation. `--export RUN`
also measures the size of the exported page of a run, such as `runs/demo`.
The bounds: first paint 1 s, first rows 0.3 s, no frame longer than 100 ms, export 20 MB. The last line is the first paint in
seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import record as record_benchmark
from turnwise.record.lines import LineFile
from turnwise.view.runs import ViewedRun
from turnwise.view.server import ViewServer, export

FRAMES = """async ({ selector, seconds }) => {
  const element = document.querySelector(selector);
  let last = performance.now(), longest = 0, frames = 0;
  const end = last + 1000 * seconds;
  while (last < end) {
    element.scrollTop += Math.max(600, element.scrollHeight / 200);
    if (element.scrollTop + element.clientHeight >= element.scrollHeight - 1) element.scrollTop = 0;
    const now = await new Promise(requestAnimationFrame);
    longest = Math.max(longest, now - last); last = now; frames += 1;
  }
  return { longest: longest / 1000, frames };
}"""
"""Scrolls an element, and returns the longest time between two frames in seconds, and the number of frames."""
TABLE = "[aria-label=Conversations].scroll"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="The viewer with a large run.")
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=32_000, help="tokens of the long conversation")
    parser.add_argument("--export", type=Path, metavar="RUN", help="a run whose exported page is measured")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="write the large run to DIR, or use the run that is there"
    )
    options = parser.parse_args()
    table = Table("what", "measured", "bound")
    with tempfile.TemporaryDirectory() as folder:
        run = options.keep or Path(folder) / "run"
        if not run.exists():
            write(run, options.conversations, options.tokens)
        for index in run.glob("*.view*"):
            index.unlink()
        LineFile(run / "trajectories.jsonl")  # a run writes the places of its lines when it ends
        viewed = ViewedRun(run)
        paint = measure(viewed, options.conversations, table)
        viewed.close()
        if options.export is not None:
            exported = ViewedRun(options.export)
            size = export([exported], Path(folder) / "page.html")
            exported.close()
            table.add_row(f"export of {options.export}", f"{size / 1e6:.1f} MB", "20 MB")
    Console(width=110).print(table)
    print(f"view_first_paint_s {paint:.2f}")


def write(run: Path, conversations: int, tokens: int) -> None:
    """A run of short conversations, and a long one at the end."""
    run.mkdir()
    records = itertools.islice(record_benchmark.made(), conversations - 1)
    long = next(record_benchmark.made())
    (segment,) = long["segments"]
    long["segments"] = [{name: (column * (tokens // len(column) + 1))[:tokens] for name, column in segment.items()}]
    record_benchmark.write(run / "trajectories.jsonl", itertools.chain(records, [long]))
    steps = range(1, conversations // record_benchmark.BATCH + 2)
    lines = ({"step": step, "reward/mean": step % 7 / 7, "kl": 0.01, "turns/mean": 2.0} for step in steps)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(viewed: ViewedRun, conversations: int, table: Table) -> float:
    """Add the figures of the browser to the table. Returns the seconds to the first paint."""
    from playwright.sync_api import sync_playwright

    server = ViewServer([viewed])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    started, used = time.perf_counter(), time.process_time()
    try:
        with sync_playwright() as playwright:
            path = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1300, "height": 800})
            page.set_default_timeout(300_000)
            page.goto(server.address)
            page.wait_for_selector("[aria-label=Overview] canvas")
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
            table.add_row(f"first paint, {conversations:,} conversations", f"{paint:.2f} s", "1 s")
            table.add_row("curves of the overview drawn", f"{page.evaluate('performance.now()') / 1000:.2f} s", "")
            table.add_row("indexed by then", f"{len(viewed.indexes['train']):,}", "")
            show(page, "#/conversations", ".body .row", "first rows of the table shown", table, bound="0.3 s")
            scroll(page, TABLE, "scrolling the table while it is indexed", table)
            while not viewed.update():
                time.sleep(0.1)
            table.add_row(
                "index complete, since the start of the server",
                f"{time.perf_counter() - started:.0f} s, of which {time.process_time() - used:.0f} s on the processor",
                "",
            )
            page.goto("about:blank")
            page.goto(server.address)
            page.wait_for_selector("nav")
            show(
                page,
                "#/conversations",
                ".body .row",
                "first rows of the table shown, with an index",
                table,
                bound="0.3 s",
            )
            began = time.perf_counter()
            page.wait_for_selector(f"text='{conversations:,} of {conversations:,}'")  # the exact text
            table.add_row("complete table loaded", f"{time.perf_counter() - began:.2f} s", "")
            scroll(page, TABLE, "scrolling the table", table)
            view = f"#/conversation?number={conversations - 1}&show=tokens"
            show(page, view, ".token", "long conversation shown", table)
            scroll(page, ".scroll.tokens", "scrolling the long conversation", table)
            browser.close()
    finally:
        server.stop()
        thread.join()
    return paint


def show(page: Any, view: str, selector: str, name: str, table: Table, *, bound: str = "") -> None:
    """Open a view, and measure the time until `selector` is there."""
    started = time.perf_counter()
    page.evaluate("view => { location.hash = view }", view)
    page.wait_for_selector(selector)
    table.add_row(name, f"{time.perf_counter() - started:.2f} s", bound)


def scroll(page: Any, selector: str, name: str, table: Table) -> None:
    """Scroll an element for five seconds."""
    found = page.evaluate(FRAMES, {"selector": selector, "seconds": 5})
    table.add_row(f"{name}: longest frame of {found['frames']}", f"{1000 * found['longest']:.0f} ms", "100 ms")


if __name__ == "__main__":
    main()
