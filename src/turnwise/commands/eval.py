"""`turnwise eval`: models on held-out rows, with confidence intervals and paired comparisons."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from turnwise.commands.command import Context, add_recipe, load_recipe, print_lines

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run conversations on the held-out rows of a recipe (data.eval), with the loop, the environment and the "
        "rewards of training, and print mean rewards with confidence intervals, pass@k, pass^k and paired comparisons. "
        "eval.samples_per_row sets the number of conversations on each row, and eval.sampling how tokens are sampled "
        "(docs/evaluation.md)."
    )
    add_recipe(parser)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="a model to evaluate instead of the recipe's; repeat it to compare models. A model directory, a hub name, the "
        "directory of a run (its newest checkpoint), an OpenAI-compatible endpoint (model@https://host/v1), or a YAML file with "
        "options of the recipe for this model",
    )
    parser.add_argument(
        "--single-turn",
        action="store_true",
        help="also evaluate each model with one turn in each conversation (limits.turns=1), and compare both",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the directory to write to; default: the recipe's output with -eval behind it",
    )
    parser.set_defaults(command=_run, long=True)


def _run(options: argparse.Namespace, context: Context) -> int:
    config, notes = load_recipe(options)
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.runs.evaluated_models import evaluated_models
    from turnwise.runs.evaluation import evaluate_models
    from turnwise.terminal.evaluation_table import print_results

    out: Path = options.out or Path(f"{config.output.rstrip('/')}-eval")
    models = evaluated_models(config, options.model, single_turn=options.single_turn)
    print_lines(context.console, notes, style="dim")
    try:
        result = context.stops.run(evaluate_models(config, models, out, context.console))
    except KeyboardInterrupt:
        print_lines(
            context.console, [f"finished conversations are kept in {out}; to resume: {_resume_command(options, out)}"]
        )
        raise
    print_results(context.console, result)
    print_lines(
        context.console,
        [
            f"\nall numbers: {out / 'eval.json'}",
            *(f"to read the conversations: turnwise show {out / model.name}" for model in models),
            f"in the browser: turnwise view {out}",
        ],
    )
    failed = [model.name for model in result.models if model.failed == model.conversations]
    if failed:
        print_lines(context.console, [f"all conversations of {', '.join(failed)} failed"], style="red")
    return int(bool(failed))


def _resume_command(options: argparse.Namespace, out: Path) -> str:
    words = [word for word in options.overrides if not word.startswith(("resume=", "replace="))]
    models = [word for model in options.model for word in ("--model", model)]
    single_turn = ["--single-turn"] if options.single_turn else []
    return shlex.join(
        ["turnwise", "eval", options.recipe, *words, "resume=auto", *models, *single_turn, "--out", str(out)]
    )
