"""What `turnwise train` and `turnwise sft` share: running to the end, and the command that resumes a stopped run."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from turnwise.commands.command import Context, print_lines
from turnwise.terminal.activity import Heartbeat

if TYPE_CHECKING:
    from turnwise.config.schema import Config
    from turnwise.runs.run_state import RunState
    from turnwise.terminal.report import Report

__all__ = ["resume_command", "run_to_end"]

_SHOW_CURSOR = "\r\n\x1b[?25h"
"""A live display hides the cursor, and a run that is stopped at once cannot close its display."""


def resume_command(command: str, options: argparse.Namespace, config: Config) -> str:
    """The command that resumes a run: the same words, since other options would make it another run."""
    own = ("resume=", "replace=", "output=")
    words = [word for word in options.overrides if not word.startswith(own)]
    return shlex.join(["turnwise", command, options.recipe, *words, "resume=auto", f"output={config.output}"])


def run_to_end(work: Coroutine[Any, Any, None], run: RunState, report: Report, context: Context, *, resume: str) -> int:
    """Run `work` to its end. If a signal stops it, print how far it is, its newest checkpoint, and the `resume` command.

    Returns the exit status. Raises KeyboardInterrupt after a signal.
    """
    console = context.console
    show_cursor = _SHOW_CURSOR if console.is_terminal else ""
    context.stops.farewell = lambda: f"{show_cursor}turnwise: {run.stopped_text(resume)}"
    try:
        with Heartbeat(run.activity, console):
            context.stops.run(work)
    except KeyboardInterrupt:
        report.close()
        print_lines(console, [run.stopped_text(resume)])
        raise
    finally:
        report.close()
    return 0
