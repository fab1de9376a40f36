"""`turnwise sft`: supervised fine-tuning on conversations, by a recipe."""

from __future__ import annotations

import argparse

from turnwise.commands.command import Context, add_recipe, load_recipe
from turnwise.commands.ranks import run_as_rank
from turnwise.commands.run_command import resume_command, run_to_end

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Supervised fine-tuning on the conversations of data.train, with the same tokens and loss masks as in "
        "`train` (docs/sft.md). docs/recipes.md lists the options of the section `sft`."
    )
    add_recipe(parser, example="recipes/sft.yaml", lr="sft.lr")
    parser.set_defaults(command=_run, long=True)


def _run(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.sft_checks import refuse_sft_without_effect

    config, notes = load_recipe(options)
    if (status := run_as_rank(config, context, refuse_sft_without_effect, conversations=False)) is not None:
        return status
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.sft.fine_tune import assemble, fine_tune
    from turnwise.terminal.sft_report import SftReport

    run = assemble(config)
    run.notes[:0] = notes
    report = SftReport(context.console, run.activity)
    resume = resume_command("sft", options, config)
    return run_to_end(fine_tune(run, report), run, report, context, resume=resume)
