"""`turnwise view`: runs in the browser."""

from __future__ import annotations

import argparse
import contextlib
import webbrowser
from pathlib import Path

from turnwise.commands.command import Context, count, port, print_lines
from turnwise.errors import ConfigError

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = "Serve a web page on this machine that shows runs, also while they go on (docs/view.md)."
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[Path("runs")], metavar="RUN",
        help="directories of runs, or a directory that contains runs; default: runs",
    )  # fmt: skip
    parser.add_argument("--port", type=port, default=0, help="the port; default: any free port")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and open no browser")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the page with the runs into one HTML file instead of serving it",
    )
    parser.add_argument(
        "--most", type=count, default=200, metavar="N",
        help="with --export: the number of conversations of each run in the file, the latest first; default: 200",
    )  # fmt: skip
    parser.add_argument(
        "--id", action="append", default=[], metavar="ID", help="with --export: only the conversations with these ids"
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace, context: Context) -> int:
    from turnwise.view.runs import ViewedRun, find_runs

    if options.export is None and (options.id or options.most != 200):
        raise ConfigError("--id and --most choose what --export writes: add --export FILE")
    runs = [ViewedRun(path) for path in find_runs(options.runs)]
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.callback(run.close)
        if options.export is not None:
            from turnwise.view.export import export

            size = export(runs, options.export, most=options.most, ids=options.id)
            print_lines(context.console, [f"{options.export}: {size / 1e6:.1f} MB; open it in a browser"])
            return 0
        from turnwise.view.server import ViewServer

        server = ViewServer(runs, port=options.port)
        print_lines(context.console, [f"{len(runs)} runs at {server.address}", "stop with Ctrl-C"])
        if not options.no_browser:
            webbrowser.open(server.address)
        server.serve_forever()
    return 0
