"""`turnwise dataset`: the conversations of a run as a data set for other trainers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from turnwise.commands.command import Context, count, print_lines, step_number, step_or_last
from turnwise.errors import ConfigError, counted
from turnwise.record.datasets import KINDS, DatasetChoice, write_dataset
from turnwise.record.reader import RecordedTrajectories

_NO_PAIR = (
    "without a pair: equal rewards, a difference below --margin, or fewer than two conversations that may be used"
)
_WITHOUT = {
    "sft": "without a row: equal rewards, rewards below --min-reward, or no conversation that may be used",
    "dpo": _NO_PAIR,
    "reward-model": _NO_PAIR,
    "kto": "without a row: equal rewards, or no conversation that may be used",
}
"""What is said of groups that became no row, by `--what`."""
_OF = {"best": ("sft",), "min_reward": ("sft",), "pairs": ("dpo", "reward-model"), "margin": ("dpo", "reward-model")}
_OF["threshold"] = ("kto",)
"""The kinds of data sets in which an argument has an effect."""


def register_dataset(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Write the conversations of a run as a data set in TRL's formats, for supervised fine-tuning, DPO, KTO or a reward "
        "model. `turnwise sft` reads those of --what sft (docs/dataset.md)."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, or a file of trajectories")
    parser.add_argument("--what", required=True, choices=KINDS, help="the trainer that the data set is for")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory of the file train.jsonl")
    parser.add_argument(
        "--from-step", type=step_number, metavar="N", help="only conversations of training step N and later ones"
    )
    parser.add_argument(
        "--step",
        type=step_or_last,
        metavar="N",
        help="only conversations of training step N; last: of the last step of the record",
    )
    parser.add_argument(
        "--best", type=count, metavar="N", help="sft: the N best conversations of each group; default: 1"
    )
    parser.add_argument(
        "--min-reward",
        type=_number,
        metavar="R",
        help="sft: only rewards of at least R; default: above the lowest reward of the group",
    )
    parser.add_argument(
        "--pairs", type=count, metavar="N", help="dpo, reward-model: at most N pairs of each group; default: 1"
    )
    parser.add_argument(
        "--margin",
        type=_number,
        metavar="M",
        help="dpo, reward-model: only pairs whose rewards differ by at least M; default: by anything",
    )
    parser.add_argument(
        "--threshold",
        type=_number,
        metavar="R",
        help="kto: rewards of at least R are desirable; default: those above the mean of the group, and those below it are not",
    )
    parser.add_argument(
        "--label",
        metavar="NAME",
        help="only conversations that have this label (given in turnwise view); sft: all of them, unless --best or --min-reward",
    )
    parser.set_defaults(command=_run_dataset)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a number")
    return number


def _run_dataset(options: argparse.Namespace, context: Context) -> int:
    given = {name: vars(options)[name] for name in _OF if vars(options)[name] is not None}
    for name in given:
        if options.what not in _OF[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --what {options.what}: remove it, or use --what "
                f"{' or '.join(_OF[name])}"
            )
    if given.get("margin", 0.0) < 0:
        raise ConfigError(
            f"--margin {given['margin']:g} is below 0: the better conversation of a pair is the chosen one"
        )
    if options.step is not None and options.from_step is not None:
        raise ConfigError("--step and --from-step are both given: remove one of them")
    step = RecordedTrajectories(options.run).last_step() if options.step == "last" else options.step
    first, last = (options.from_step, None) if step is None else (step, step)
    choice = DatasetChoice(what=options.what, first_step=first, last_step=last, label=options.label, **given)
    written = write_dataset(options.run, options.out, choice)
    print_lines(
        context.console,
        [
            f"{counted(written.rows, 'row')} of {counted(written.groups, 'group')}: {written.file}",
            *([f"{counted(written.without_rows, 'group')} {_WITHOUT[options.what]}"] if written.without_rows else []),
            *(
                f"left out: {counted(number, 'conversation')} that {reason}"
                for reason, number in written.left_out.most_common()
            ),
        ],
    )
    return 0
