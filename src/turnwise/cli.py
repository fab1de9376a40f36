"""The command line: parses the words, runs the command that they name, and completes words in the shell.

Each command is a module in `commands/`. This module imports little, so that `turnwise --help` and shell completion are quick:
it loads the module of the command that is run, and neither the other commands nor rich and asyncio.

`turnwise completion` prints the shell code that completes commands, options of recipes and paths.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.commands.command import Context, Stops


_COMMANDS = {
    "demo": ("commands.train", "train the tiny model that comes with turnwise"),
    "init": ("commands.train", "write a starter project: a recipe, an environment, rows"),
    "train": ("commands.train", "train a model by reinforcement learning"),
    "sft": ("commands.train", "fine-tune a model on given conversations"),
    "sweep": ("commands.sweep", "train a recipe with several values of options, and compare the runs"),
    "eval": ("commands.evaluate", "evaluate models on held-out rows"),
    "rollout": ("commands.evaluate", "run and score conversations without training"),
    "play": ("commands.evaluate", "take the turns of the model yourself, to try an environment"),
    "replay": ("commands.evaluate", "run environment and rewards again on recorded conversations"),
    "envs": ("commands.envs", "list the environments of other libraries, and what one brings"),
    "serve": ("commands.serve", "run conversations for trainers and other clients (a rollout server)"),
    "show": ("commands.show", "print a run, or single conversations, as text"),
    "view": ("commands.show", "show runs in the browser: curves, conversations, tokens"),
    "doctor": ("commands.doctor", "check a model, and a recipe with it, before training"),
    "plan": ("commands.doctor", "show a recipe's batches and placement, and the memory that it needs"),
    "dataset": ("commands.dataset", "write the conversations of a run as a data set for TRL or `turnwise sft`"),
    "convert": ("commands.convert", "make a recipe from a configuration of verl, ms-swift or TRL"),
    "merge": ("commands.models", "write the model of a run with a LoRA adapter as a complete model directory"),
    "push": ("commands.push", "upload the model of a run to the Hugging Face hub, with a model card"),
    "retrieval": ("commands.serve", "run a search server over a corpus, for the search tool"),
    "completion": ("cli", "print the shell code that completes commands and options"),
}
"""The commands: the module with `register_NAME`, and one line of help."""

_EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "demo": (("turnwise demo", "train the tiny model that comes with turnwise"),),
    "init": (("turnwise init quiz", "write a starter project into the directory quiz"),),
    "train": (
        ("turnwise train recipes/calculator.yaml", "train by a recipe"),
        ("turnwise train recipes/calculator.yaml train.lr=1e-4 seed=1", "change options (docs/recipes.md)"),
        ("turnwise train recipes/calculator.yaml resume=auto", "resume a run that was stopped"),
        (
            "turnwise train recipes/calculator.yaml model.path=runs/sft/checkpoint",
            "train the model of another run",
        ),
    ),
    "sft": (("turnwise sft recipes/sft.yaml", "fine-tune on given conversations (docs/sft.md)"),),
    "sweep": (
        ("turnwise sweep recipes/calculator.yaml train.lr=1e-4,3e-4 seed=0,1", "train four runs, and compare them"),
        (
            "turnwise sweep r.yaml --set lora='model.lora.rank=8 train.lr=1e-4' --set full=",
            "options that go together",
        ),
        (
            "turnwise sweep recipes/calculator.yaml train.lr=1e-5..1e-3 --trials 10",
            "let optuna choose ten learning rates",
        ),
    ),
    "eval": (
        (
            "turnwise eval recipes/calculator.yaml --model demo/model --model runs/demo",
            "compare models on held-out rows (docs/evaluation.md)",
        ),
    ),
    "rollout": (
        ("turnwise rollout recipes/calculator.yaml --out runs/look", "run and score conversations, without training"),
        (
            "turnwise rollout R.yaml engine.name=scripted engine.script=a.jsonl --out out",
            "replay given answers (each line of the file: a list of texts)",
        ),
    ),
    "play": (
        ("turnwise play recipes/calculator.yaml", "take the turns of the model yourself"),
        ("turnwise play recipes/calculator.yaml --row 4 --tokens", "on the fourth row, with every token"),
    ),
    "replay": (("turnwise replay runs/demo --all", "run environment and rewards again; print what differs"),),
    "envs": (
        ("turnwise envs", "the libraries, and whether they are installed"),
        ("turnwise envs textarena", "the names of a library"),
        ("turnwise envs reasoning_gym:countdown tries=2", "what an environment brings, and an opening"),
    ),
    "serve": (("turnwise serve recipes/calculator.yaml", "run conversations for trainers (docs/server.md)"),),
    "show": (
        ("turnwise show runs/demo", "print the summary of a run"),
        ("turnwise show runs/demo --worst 3 --tokens", "the conversations with the lowest rewards, with every token"),
        ("turnwise show runs/demo --row 489", "one row over all steps: rewards and last answers"),
        ("turnwise show runs/demo --metric reward/mean", "the value of a metric in every step"),
        ("turnwise show runs/* --sort reward/mean", "several runs as a table, with the options that differ"),
    ),
    "view": (
        ("turnwise view runs", "show runs in the browser: curves, conversations, tokens"),
        ("turnwise view runs/demo --export demo.html", "write the page into one file"),
    ),
    "doctor": (
        ("turnwise doctor demo/model", "check whether a model can be trained"),
        ("turnwise doctor demo/model --recipe recipes/calculator.yaml", "also check a recipe"),
    ),
    "plan": (("turnwise plan recipes/calculator.yaml", "print the batches, the placement and the memory"),),
    "dataset": (
        (
            "turnwise dataset runs/demo --what sft --out data/best",
            "the best conversation of each group (docs/dataset.md)",
        ),
        ("turnwise dataset runs/demo --what dpo --margin 0.5 --out data/pairs", "pairs within a group, for DPO"),
    ),
    "convert": (
        (
            "turnwise convert --config-path config --config-name gsm8k_multiturn_grpo --out recipe.yaml",
            "make a recipe from a configuration of verl (docs/verl.md)",
        ),
        ("turnwise convert --from swift train.sh --out recipe.yaml", "from a script of ms-swift (docs/swift.md)"),
        ("turnwise convert --from trl grpo.yaml --out recipe.yaml", "from a file of TRL (docs/trl.md)"),
    ),
    "merge": (("turnwise merge runs/lora --out merged", "write the model of a run with an adapter completely"),),
    "push": (
        ("turnwise push runs/demo --to USER/NAME --dry-run", "print the model card and the files"),
        ("turnwise push runs/demo --to USER/NAME", "upload them"),
    ),
    "retrieval": (("turnwise retrieval corpus.jsonl", "run a search server for the search tool (docs/tools.md)"),),
    "completion": (('eval "$(turnwise completion bash)"', "complete commands and options in this shell"),),
}
"""For each command: examples, and what each of them does."""

_FIRST = ("demo", "init", "train", "sft", "rollout", "eval", "show", "view", "doctor")
"""The commands whose examples are in the help of `turnwise` itself: those that a new user needs."""


def _examples(commands: Sequence[str]) -> str:
    """The examples of these commands, as the end of a help text: each example, and below it what it does."""
    shown = [example for command in commands for example in _EXAMPLES[command]]
    lines = [f"  {example}\n      {text}" for example, text in shown]
    return "\n".join(["example:" if len(shown) == 1 else "examples:", *lines])


class _Help(argparse.HelpFormatter):
    """Wraps descriptions, and leaves the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example") else super()._fill_text(text, width, indent)


def program() -> int:
    """`main` in a process of its own: its signal handlers stay until the process has ended. Returns the exit status."""
    from turnwise.commands.command import Stops, open_closed_streams

    # imports make a million objects that stay: with Python's own threshold, of 700 new objects, they take a fifth longer
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    open_closed_streams()
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    status = main(stops=Stops(until_exit=True))
    # the process ends: a last search for unreachable objects among those of torch would take more than a second
    gc.freeze()
    return status


def main(arguments: Sequence[str] | None = None, *, stops: Stops | None = None) -> int:
    """Run a command.

    Returns its exit status: 0; 1 for an error that a person can put right; 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP; 75
    on rank 0 if all ranks must be started again.
    """
    # before torch is loaded: threads that wait by spinning slow down everything else on the machine
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    # behind the parser: these imports take longer than everything that `--help` needs
    from turnwise.commands.command import Context, Stops, lasting_output
    from turnwise.terminal.report import Terminal

    console, errors = Terminal(), Terminal(stderr=True)
    if not _set_up_logging(console, errors):
        return 1
    with stops or Stops() as stops:
        context = Context(console, stops)
        with lasting_output() if options.long else contextlib.nullcontext():
            stops.exit_status = _run(options, context, errors)
        return stops.exit_status


def _set_up_logging(console: Console, errors: Console) -> bool:
    """Print log messages of the level in TURNWISE_LOG. Returns False if there is no such level."""
    import logging

    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    from turnwise.terminal.conversation import CHOICE

    level, levels = os.environ.get("TURNWISE_LOG", "warning").upper(), logging.getLevelNamesMapping()
    if level not in levels:
        errors.print(
            f"turnwise: TURNWISE_LOG={level} is not a log level; the levels are: {', '.join(levels)}", style="red"
        )
        return False
    if CHOICE in os.environ and level != "DEBUG":
        errors.print(f"turnwise: {CHOICE} has an effect with TURNWISE_LOG=debug only: set both", style="red")
        return False
    logging.basicConfig(
        level=max(levels[level], logging.INFO),  # debug messages of libraries would hide those of turnwise
        format="%(message)s",
        handlers=[RichHandler(console=console, show_time=False, show_path=False, highlighter=NullHighlighter())],
    )
    if levels[level] < logging.INFO:
        logging.getLogger("turnwise").setLevel(level)
    _log_warnings()
    return True


def _log_warnings() -> None:
    """Make Python's warnings log messages: on stderr, they would break the live display, and show a line of code without context.

    Those of expressions that a tool parses with `ast` are dropped: the model wrote the text, such as `2if`, and nobody can mend
    it.
    """
    import logging
    import warnings

    log = logging.getLogger("py.warnings")

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        log.warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)

    warnings.showwarning = show  # pyright: ignore[reportAttributeAccessIssue]  # Python's documentation allows it
    warnings.filterwarnings("ignore", module="<unknown>")


def _complete() -> None:
    """Answer a shell that completes a line (`turnwise completion`), and exit."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(make_parser(next((word for word in words[1:] if word in _COMMANDS), "")))


def _run(options: argparse.Namespace, context: Context, errors: Console) -> int:
    """Run the command, and print what stops it."""
    import signal

    from turnwise.errors import TurnwiseError, without_hidden

    stops = context.stops
    try:
        return options.command(options, context)
    except TurnwiseError as error:
        # not wrapped: a path in it stays in one piece
        errors.print(
            f"turnwise: {without_hidden(str(error))}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        return error.exit_status
    except KeyboardInterrupt:
        name = stops.received.name if stops.received not in (None, signal.SIGINT) else ""
        errors.print(f"turnwise: stopped{f' ({name})' if name else ''}", style="yellow")
        return stops.status


class _Version(argparse.Action):
    """Prints the version, which takes some time to find, only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from turnwise.version import __version__

        print(f"turnwise {__version__}")
        parser.exit()


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line. With `command`, only this command gets its arguments; otherwise all commands."""
    parser = argparse.ArgumentParser(
        prog="turnwise",
        description="Train language models by reinforcement learning over multi-turn conversations.",
        epilog=f"{_examples(_FIRST)}\n\nturnwise COMMAND --help has further examples; docs/start.md is a first page",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    # `long`: the command goes on when the terminal is gone
    parser.set_defaults(long=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        of_command = commands.add_parser(name, help=summary, epilog=_examples([name]), formatter_class=_Help)
        if command in (None, name):
            getattr(importlib.import_module(f"turnwise.{module}"), f"register_{name}")(of_command)
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    command = next((word for word in arguments if not word.startswith("-")), "")
    parser = make_parser(command)
    options, rest = parser.parse_known_args(arguments)
    # argparse accepts the overrides in one piece only: those behind an option are in `rest`
    overrides: list[str] | None = vars(options).get("overrides")
    unknown = [word for word in rest if overrides is None or word.startswith("-")]
    if unknown:
        hint = "" if overrides is None else _recipe_hint(unknown[0])
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if overrides is not None:
        overrides += rest
    return options


def _recipe_hint(argument: str) -> str:
    """How an option that was written with dashes, as in other systems, is written in a recipe."""
    from turnwise.config.recipe import called_here

    name, _, _ = argument.lstrip("-").partition("=")
    return f"{called_here(name)}; options of a recipe are written without dashes: key=value, such as train.lr=1e-5"


if __name__ == "__main__":
    sys.exit(program())


# `turnwise completion`


def register_completion(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Print shell code that completes the commands of turnwise, their options, the options of recipes (`train.lr=`), and "
        'paths. For bash, add to ~/.bashrc: eval "$(turnwise completion bash)". For zsh, add to ~/.zshrc, after compinit: '
        'eval "$(turnwise completion zsh)"'
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(command=_run_completion)


def _run_completion(options: argparse.Namespace, context: Context) -> int:
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        from turnwise.errors import ConfigError

        raise ConfigError(
            "shell completion needs the `argcomplete` package: pip install 'turnwise[completion]'"
        ) from None
    print(shellcode(["turnwise"], shell=options.shell))
    return 0
