"""The command line: `turnwise train`, `sft`, `rollout`, `show`, `doctor`, `convert` and `retrieval`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler

from turnwise.commands.convert import SYSTEMS
from turnwise.commands.stopping import Stops, lasting_output, open_closed_streams
from turnwise.config.known_names import called_here
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.terminal.activity import Heartbeat
from turnwise.terminal.console import Terminal
from turnwise.version import __version__

if TYPE_CHECKING:
    from turnwise.config.schema import Config
    from turnwise.runs.run_state import RunState
    from turnwise.terminal.report import Report
    from turnwise.terminal.sft_report import SftReport

__all__ = ["main"]

_OVERRIDES = "dotted overrides of the recipe, values in YAML: train.lr=1e-4 limits.turns=4 'sampling.stop=[\"###\"]'"

_SHOW_CURSOR = "\r\n\x1b[?25h"
"""A live display hides the cursor, and a run that is stopped at once cannot end its display."""

_EPILOG = """\
examples:
  turnwise train recipes/calculator.yaml                         train the tiny model that comes with the repository
  turnwise train recipes/calculator.yaml train.lr=1e-4 seed=1    with other options (docs/recipes.md lists them all)
  turnwise train recipes/calculator.yaml resume=auto             go on where a killed run was
  turnwise sft recipes/sft.yaml                                  learn from conversations that are there already (docs/sft.md)
  turnwise train recipes/calculator.yaml model.path=runs/sft/checkpoint
                                                                 go on from there by reinforcement learning
  turnwise rollout recipes/calculator.yaml --out runs/look       hold and score conversations, change no weights
  turnwise rollout R.yaml engine.name=scripted engine.script=lines.jsonl --out runs/replay
                                                                 replay texts (one list of them a line), needs no weights
  turnwise convert --config-path config --config-name gsm8k_multiturn_grpo --out recipe.yaml
                                                                 a recipe of verl's configuration (docs/verl.md)
  turnwise show runs/demo                                        summary of a run
  turnwise show runs/demo --worst 3 --tokens                     its worst conversations, token by token
  turnwise doctor demo/model                                     whether a model can be trained as it is
  turnwise doctor demo/model --recipe recipes/calculator.yaml    and whether a recipe does with it what it says
"""


def program() -> int:
    """`main` in a process of its own: its signal handlers stay until the process has ended. Returns the exit status."""
    open_closed_streams()
    return main(stops=Stops(until_exit=True))


def main(arguments: Sequence[str] | None = None, *, stops: Stops | None = None) -> int:
    """Run a command.

    Returns its exit status: 0; 1 where a person can put it right; 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP.
    """
    # before torch is loaded: threads that wait by spinning bring a machine that does anything else to a standstill
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = _options(arguments)
    console, errors = Terminal(), Terminal(stderr=True)
    level, levels = os.environ.get("TURNWISE_LOG", "warning").upper(), logging.getLevelNamesMapping()
    if level not in levels:
        errors.print(f"turnwise: TURNWISE_LOG={level} is no level; the levels are: {', '.join(levels)}", style="red")
        return 1
    logging.basicConfig(
        level=level,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_time=False, show_path=False)],
    )
    with stops or Stops() as stops:
        options.stops = stops
        if options.command in (_train, _sft, _rollout):
            with lasting_output():
                return _guarded(options, console, errors)
        return _guarded(options, console, errors)


def _guarded(options: argparse.Namespace, console: Console, errors: Console) -> int:
    try:
        return options.command(options, console)
    except TurnwiseError as error:
        # not broken into lines: a path in it must stay whole
        errors.print(f"turnwise: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        name = options.stops.received.name if options.stops.received not in (None, signal.SIGINT) else ""
        errors.print(f"turnwise: stopped{f' ({name})' if name else ''}", style="yellow")
        return options.stops.status


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, left = parser.parse_known_args(arguments)
    # argparse takes overrides in one piece only: those that stand behind an option are left over
    overrides: list[str] | None = vars(options).get("overrides")
    unknown = [word for word in left if overrides is None or word.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], taken=overrides is not None)}")
    if overrides is not None:
        overrides += left
    return options


def _hint(argument: str, *, taken: bool) -> str:
    """How an option of another system is written here. `taken`: the command takes options of recipes."""
    name, _, _ = argument.lstrip("-").partition("=")
    if not taken:
        return ""
    return f"{called_here(name)}; options of a recipe are written without dashes: key=value, such as train.lr=1e-5"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turnwise",
        description="Train language models by reinforcement learning over conversations of many turns.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"turnwise {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model as a recipe says",
        description="Train as a recipe says, or as a configuration of verl's says (docs/verl.md).",
    )
    train.add_argument("recipe", nargs="?", help="a YAML file, such as recipes/calculator.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
    train.add_argument("--config-path", metavar="DIR", help="instead of a recipe: a directory of verl's YAML files")
    train.add_argument("--config-name", metavar="NAME", help="the file in it; overrides are verl's then")
    train.set_defaults(command=_train)

    convert = commands.add_parser(
        "convert",
        help="make a recipe of another system's configuration",
        description="Make a recipe of a configuration of verl's (docs/verl.md) or of ms-swift's arguments, and say of every "
        "key that has no place in it why. Arguments that begin with a dash stand behind `--`.",
    )
    convert.add_argument(
        "overrides", nargs="*", metavar="argument", help="overrides of verl's, or arguments of ms-swift"
    )
    convert.add_argument("--from", dest="system", choices=SYSTEMS, default="verl", help="verl unless given")
    convert.add_argument("--config-path", metavar="DIR", help="a directory of verl's YAML files")
    convert.add_argument("--config-name", metavar="NAME", help="the file in it")
    convert.add_argument("--out", type=Path, metavar="FILE", help="where the recipe is written; printed unless given")
    convert.set_defaults(command=_convert)

    sft = commands.add_parser(
        "sft",
        help="fine-tune a model on conversations that are there already",
        description="Fine-tune on the conversations of data.train as a recipe says: the same tokens and masks as in `train` "
        "(docs/sft.md). The options of the section `sft` are in docs/recipes.md.",
    )
    sft.add_argument("recipe", help="a YAML file, such as recipes/sft.yaml")
    sft.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES.replace("train.lr", "sft.lr"))
    sft.set_defaults(command=_sft)

    rollout = commands.add_parser(
        "rollout",
        help="hold conversations without training",
        description="Hold and score conversations on a recipe's rows, write DIR/trajectories.jsonl, change no weights. "
        "rollout.max_rows and rollout.samples_per_row say how many.",
    )
    rollout.add_argument("recipe", help="a YAML file, such as recipes/calculator.yaml")
    rollout.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
    rollout.add_argument("--out", required=True, type=Path, metavar="DIR", help="where trajectories.jsonl is written")
    rollout.set_defaults(command=_rollout)

    show = commands.add_parser("show", help="a run, or single conversations, as text")
    show.add_argument("run", type=Path, help="a run's directory, such as runs/demo")
    show.add_argument("--id", metavar="ID", help="the conversation of this id")
    show.add_argument("--step", type=int, metavar="N", help="the conversations of this step")
    show.add_argument("--worst", type=int, default=0, metavar="N", help="the N conversations of the lowest reward")
    show.add_argument("--best", type=int, default=0, metavar="N", help="the N conversations of the highest reward")
    show.add_argument("--last", type=int, default=0, metavar="N", help="the N latest conversations")
    show.add_argument(
        "--eval", action="store_true", dest="evaluation", help="the held-out conversations, not those of training"
    )
    show.add_argument("--failed", action="store_true", help="the conversations that broke")
    show.add_argument(
        "--tokens", action="store_true", help="with every token: its id, text, turn, log-probability and version"
    )
    show.add_argument(
        "--metric", metavar="NAME", help="one metric, step by step, such as reward/mean (docs/metrics.md)"
    )
    show.set_defaults(command=_show)

    doctor = commands.add_parser(
        "doctor",
        help="whether a model, and a recipe with it, are right for training",
        description="Ask a model's template, tokenizer and weights, and a recipe, whether training would be right "
        "(docs/doctor.md). The exit status is 1 if something is wrong.",
    )
    doctor.add_argument("model", metavar="MODEL", help="a model directory or a hub id; of a recipe, instead of its own")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
    doctor.add_argument("--recipe", metavar="FILE", help="a YAML file, such as recipes/calculator.yaml")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text")
    doctor.add_argument(
        "--weights",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether the model is loaded; auto loads what does not take long",
    )
    doctor.set_defaults(command=_doctor)

    retrieval = commands.add_parser(
        "retrieval",
        help="answer searches in a corpus, for the search tool",
        description="Answer searches in a corpus by BM25, on this machine only (docs/search.md). "
        "TURNWISE_RETRIEVAL_TOKEN holds the token, if there is to be one.",
    )
    retrieval.add_argument("corpus", type=Path, help='{"id", "title", "text"} or {"id", "contents"} a line')
    retrieval.add_argument("--port", type=int, default=8000, help="8000 unless given; 0 takes a free one")
    retrieval.set_defaults(command=_retrieval)
    return parser


def _train(options: argparse.Namespace, console: Console) -> int:
    from turnwise.config.recipe import load

    of_verl = options.config_path is not None or options.config_name is not None
    if of_verl:
        config, notes = _recipe_of_verl(options)
        again = "the same command"
    elif options.recipe is None:
        raise ConfigError("name a recipe, such as recipes/calculator.yaml, or verl's --config-path and --config-name")
    else:
        config, notes = load(options.recipe, options.overrides)
        again = _again("train", options, config)
    from turnwise.terminal.report import (
        Report,  # a recipe that is wrong is told before torch is loaded, which takes seconds
    )
    from turnwise.train import assemble, train

    run = assemble(config)
    run.notes[:0] = notes
    report = Report(console, run.activity)
    return _underway(train(run, report), run, report, console, stops=options.stops, again=again)


def _again(command: str, options: argparse.Namespace, config: Config) -> str:
    """The command that resumes a run: the same words, since other options would make it another run."""
    own = ("resume=", "replace=", "output=")
    words = [word for word in options.overrides if not word.startswith(own)]
    return shlex.join(["turnwise", command, options.recipe, *words, "resume=auto", f"output={config.output}"])


def _underway(
    going: Coroutine[Any, Any, None],
    run: RunState,
    report: Report | SftReport,
    console: Console,
    *,
    stops: Stops,
    again: str,
) -> int:
    """Go through with a run, and say where it is and which checkpoint there is when somebody stops it."""
    stops.farewell = lambda: f"{_SHOW_CURSOR if console.is_terminal else ''}turnwise: {run.stopped_text(again)}"
    try:
        with Heartbeat(run.activity, console):
            stops.run(going)
    except KeyboardInterrupt:
        report.close()
        console.print(run.stopped_text(again), highlight=False, markup=False, soft_wrap=True)
        raise
    finally:
        report.close()
    return 0


def _recipe_of_verl(options: argparse.Namespace) -> tuple[Config, list[str]]:
    from turnwise.commands.convert import converted, refuse
    from turnwise.config.recipe import checked

    words: list[str] = options.overrides
    if options.recipe is not None:  # what stands first is an override too
        if "=" not in options.recipe and not options.recipe.startswith("~"):
            raise ConfigError(f"{options.recipe} and --config-path both say what is trained: choose one")
        words = [options.recipe, *words]
    report = converted("verl", words, folder=options.config_path, name=options.config_name)
    refuse(
        report,
        how="Change these keys, or take them out (~key), or write a recipe with `turnwise convert` and go on from there",
    )
    source = "the recipe of verl's configuration (`turnwise convert` shows it)"
    return checked(report.recipe, source=source), [f"left out: {left}" for left in report.unsupported]


def _convert(options: argparse.Namespace, console: Console) -> int:
    from turnwise.commands.convert import as_recipe, converted

    report = converted(options.system, options.overrides, folder=options.config_path, name=options.config_name)
    recipe = as_recipe(report)
    if options.out is None:
        print(recipe, end="")
        return 0
    if options.out.exists():
        raise ConfigError(f"{options.out} is there already: name another file, or remove it")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(recipe, encoding="utf-8")
    for left in report.unsupported:
        mark = "CHANGES THE TRAINING, left out" if left.changes_training else "left out"
        console.print(f"{mark}: {left}", highlight=False, markup=False, soft_wrap=True)
    for assumption in report.assumptions:
        console.print(f"assumed: {assumption}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{len(report.converted)} keys converted and {len(report.unsupported)} left out, {len(report.refused())} of which change "
        f"the training; the recipe: {options.out}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def _sft(options: argparse.Namespace, console: Console) -> int:
    from turnwise.config.recipe import load

    config, notes = load(options.recipe, options.overrides)
    from turnwise.sft.fine_tune import assemble, fine_tune
    from turnwise.terminal.sft_report import SftReport

    run = assemble(config)
    run.notes[:0] = notes
    report = SftReport(console, run.activity)
    return _underway(
        fine_tune(run, report), run, report, console, stops=options.stops, again=_again("sft", options, config)
    )


def _rollout(options: argparse.Namespace, console: Console) -> int:
    from turnwise.commands.rollout import collect
    from turnwise.config.recipe import load

    config, notes = load(options.recipe, options.overrides)
    for note in notes:
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    started = time.perf_counter()
    summary = options.stops.run(collect(config, options.out, console))
    console.print(
        f"{summary['conversations']} conversations in {time.perf_counter() - started:.1f} s, "
        f"reward {summary['reward/mean']}; look into them: turnwise show {options.out}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def _show(options: argparse.Namespace, console: Console) -> int:
    from turnwise.terminal.show import show

    if options.metric is not None:
        from turnwise.terminal.show_metric import show_metric

        chosen = ("id", "step", "worst", "best", "last", "failed", "tokens")
        others = [f"--{name}" for name in chosen if vars(options)[name]]
        if others:
            raise ConfigError(f"--metric shows figures and {others[0]} shows conversations: give one of them")
        show_metric(console, options.run, options.metric, evaluation=options.evaluation)
        return 0
    show(
        console,
        options.run,
        trajectory=options.id,
        step=options.step,
        worst=options.worst,
        best=options.best,
        last=options.last,
        evaluation=options.evaluation,
        failed=options.failed,
        tokens=options.tokens,
    )
    return 0


def _doctor(options: argparse.Namespace, console: Console) -> int:
    if options.overrides and options.recipe is None:
        raise ConfigError(f"{options.overrides[0]} is an option of a recipe, and there is none: add --recipe FILE")
    from turnwise.config.recipe import load
    from turnwise.doctor.check import as_json, show, worst
    from turnwise.doctor.examine import examine

    config = None
    if options.recipe is not None:
        config, _ = load(options.recipe, [*options.overrides, f"model.path={json.dumps(options.model)}"])
    checks = examine(options.model, config, weights=options.weights)
    if options.json:
        console.out(as_json(options.model, checks), highlight=False)
    else:
        show(checks, console)
    return int(worst([one.status for one in checks]) == "fail")


def _retrieval(options: argparse.Namespace, console: Console) -> int:
    from turnwise.serve.retrieval import TOKEN, serve

    serve(options.corpus, port=options.port, token=os.environ.get(TOKEN) or None)
    return 0


if __name__ == "__main__":
    sys.exit(program())
