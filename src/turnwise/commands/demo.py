"""`turnwise demo`: trains the tiny model that is part of the package, from any directory."""

from __future__ import annotations

import argparse
import shlex

from turnwise.commands.command import Context, add_overrides
from turnwise.commands.run_command import run_to_end
from turnwise.starter import DEMO_OUTPUT, demo_overrides, demo_recipe

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Train the tiny language model (0.7M parameters) that is part of turnwise, on arithmetic word problems with a calculator "
        "and a simulated user. It takes about 70 seconds on two CPU cores and needs no network. The run is written to "
        f"{DEMO_OUTPUT}."
    )
    add_overrides(parser, help="options of the demo's recipe to change, such as train.steps=20")
    parser.set_defaults(command=_run, long=True)


def _run(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.recipe import load

    config, notes = load(demo_recipe(), [*demo_overrides(), *options.overrides])
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble, train

    run = assemble(config)
    run.notes[:0] = notes
    report = TrainReport(context.console, run.activity)
    words = [word for word in options.overrides if not word.startswith(("resume=", "replace="))]
    resume = shlex.join(["turnwise", "demo", *words, "resume=auto"])
    return run_to_end(train(run, report), run, report, context, resume=resume)
