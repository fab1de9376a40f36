"""`turnwise eval`, `rollout`, `play` and `replay`: conversations without training.

`eval` compares models on held-out rows, with confidence intervals and paired comparisons. `rollout` samples and scores
conversations. In `play`, a person takes the turns of the model. `replay` runs the environment and the rewards of recorded
conversations again. The work is done in `runs/`.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands.command import (
    Context,
    add_overrides,
    add_recipe,
    damage_notes,
    load_recipe,
    print_lines,
)
from turnwise.errors import ConfigError, counted
from turnwise.local_paths import as_given

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.runs.replay import Replayed

# `turnwise eval`


def register_eval(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(command=_run_eval, long=True)


def _run_eval(options: argparse.Namespace, context: Context) -> int:
    config, notes = load_recipe(options)
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.runs.evaluation import evaluate_models, evaluated_models
    from turnwise.terminal.tables import print_results

    out: Path = options.out or Path(f"{config.output.rstrip('/')}-eval")
    place = out.absolute()  # user code may change the working directory
    models = evaluated_models(config, options.model, single_turn=options.single_turn)
    print_lines(context.console, notes, style="dim")
    try:
        result = context.stops.run(evaluate_models(config, models, out, context.console))
    except KeyboardInterrupt:
        print_lines(
            context.console, [f"finished conversations are kept in {out}; to resume: {_resume_command(options, out)}"]
        )
        raise
    out = as_given(out, place)
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


# `turnwise rollout`


def register_rollout(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run and score conversations on a recipe's rows and write them to DIR/trajectories.jsonl; no weights "
        "change. rollout.max_rows and rollout.samples_per_row set the number of conversations."
    )
    add_recipe(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory to write to")
    parser.set_defaults(command=_run_rollout, long=True)


def _run_rollout(options: argparse.Namespace, context: Context) -> int:
    config, notes = load_recipe(options)
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.runs.sampling_only import collect
    from turnwise.terminal.tables import number

    print_lines(context.console, notes, style="dim")
    started = time.perf_counter()
    place = options.out.absolute()  # user code may change the working directory
    summary = context.stops.run(collect(config, options.out, context.console))
    failed = f", {summary['failed']:.0%} failed" if summary["failed"] else ""
    print_lines(
        context.console,
        [
            f"{summary['conversations']} conversations in {time.perf_counter() - started:.1f} s, reward "
            f"{number(summary['reward/mean'])}{failed}; to read them: turnwise show {as_given(options.out, place)}"
        ],
    )
    return 0


# `turnwise play`


def register_play(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Take the turns of the model yourself, in one conversation on a row of a recipe: see what the model would see, type a "
        "turn or a tool call, see replies and rewards. /help lists what can be typed. The model is loaded only if you let it "
        "take a turn. The lines may come from a pipe (docs/environments.md)."
    )
    add_recipe(parser)
    parser.add_argument(
        "--row", metavar="ID",
        help="the id of the row, as `turnwise show --row` takes it: without a column of ids, its number from 1; default: the "
        "first row",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", action="store_true", help="show prompts as tokens, one on each line, instead of text"
    )
    parser.set_defaults(command=_run_play)


def _run_play(options: argparse.Namespace, context: Context) -> int:
    config, notes = load_recipe(options)
    # after the recipe was read: its errors show at once, and importing the packages takes seconds
    from turnwise.runs.play import play
    from turnwise.terminal.typed_lines import TypedLines

    print_lines(context.console, notes, style="dim")
    lines = TypedLines()
    with lines.editing():
        return int(context.stops.run(play(config, options.row, context.console, lines, tokens=options.tokens)))


# `turnwise replay`

_MOST_LINES = 20
"""Differences of one conversation that are printed."""
_MOST_CONVERSATIONS, _MOST_LINES_OF_WORST, _MOST_PLACES = 3, 5, 10
"""Without --full: conversations, and differences of each; and the kinds of differences in the summary."""


def register_replay(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run the environment and the reward functions of recorded conversations again, with the recorded turns of "
        "the model, and print what differs: messages, tool results, rewards, stop reason, tokens. The exit status is 1 if "
        "something differs or a line of the record is damaged (docs/evaluation.md)."
    )
    parser.add_argument("run", type=Path, help="the directory of a run, such as runs/demo")
    add_overrides(
        parser,
        help="options of the run's recipe to change, such as limits.turns=2; credit=rloo computes advantages, too",
    )
    parser.add_argument("--id", metavar="ID", help="the conversation with this id")
    parser.add_argument(
        "--all", action="store_true", help="all conversations of the run: how many differ, in what, and the worst"
    )
    parser.add_argument("--full", action="store_true", help="with --all, print the differences of each conversation")
    parser.add_argument(
        "--eval",
        action="store_true",
        dest="evaluation",
        help="read the conversations of the evaluations during training",
    )
    parser.set_defaults(command=_run_replay)


def _run_replay(options: argparse.Namespace, context: Context) -> int:
    if (options.id is None) == (not options.all):
        raise ConfigError("give either --id ID or --all")
    if options.full and not options.all:
        raise ConfigError("--full belongs to --all: --id prints all of one conversation")
    from turnwise.runs.replay import replay

    damaged: list[str] = []
    replayed = context.stops.run(
        replay(options.run, options.overrides, id=options.id, evaluation=options.evaluation, damaged=damaged)
    )
    print_lines(context.console, damage_notes(damaged), style="yellow")
    _print_replayed(replayed, context, one=options.id is not None, full=options.full)
    return int(bool(damaged) or any(conversation.differences for conversation in replayed))


def _print_replayed(replayed: Sequence[Replayed], context: Context, *, one: bool, full: bool) -> None:
    """How many conversations differ, in what, and those whose rewards differ most (`full`: all). `one`: `--id` chose it."""
    console = context.console
    different = [conversation for conversation in replayed if conversation.differences]
    skipped = [conversation for conversation in replayed if conversation.skipped is not None]
    same = len(replayed) - len(different) - len(skipped)
    text = f"{same} of {len(replayed)} conversations are the same, {len(different)} differ"
    summary = [f"{text}, {len(skipped)} failed and were not replayed" if skipped else text]
    rewards = [conversation.rewards for conversation in replayed if conversation.rewards is not None]
    if different and len(rewards) > 1:
        before, now = (sum(values) / len(rewards) for values in zip(*rewards, strict=True))
        summary.append(f"mean reward: {before:.3f} recorded, {now:.3f} now")
    if estimates := [pair for conversation in replayed for pair in conversation.advantages]:
        before, now = (sum(map(abs, values)) / len(estimates) for values in zip(*estimates, strict=True))
        turned = sum(old * new < 0 for old, new in estimates)
        summary.append(
            f"advantages of {counted(len(estimates), 'turn')}: mean size {before:.3f} recorded, {now:.3f} now; {turned} with "
            f"the other sign"
        )
    if one:
        print_lines(console, [f"{each.id} was not replayed: {each.skipped}" for each in skipped])
        for each in replayed:
            _print_differences(console, each, most=_MOST_LINES)
        print_lines(console, summary)
        return
    print_lines(console, summary)
    if not different:
        return
    places = Counter(place for each in different for place in dict.fromkeys(map(_place, each.differences)))
    print_lines(
        console, ["differences in: " + ", ".join(f"{place} ({n})" for place, n in places.most_common(_MOST_PLACES))]
    )
    shown = different if full else sorted(different, key=_change, reverse=True)[:_MOST_CONVERSATIONS]
    if len(shown) < len(different):
        print_lines(
            console,
            [f"the {len(shown)} that differ most (--full: all {len(different)}; --id ID: all of one):"],
        )
    for each in shown:
        _print_differences(console, each, most=_MOST_LINES if full else _MOST_LINES_OF_WORST)


def _print_differences(console: Console, conversation: Replayed, *, most: int) -> None:
    print_lines(console, [f"{conversation.id}: {note}" for note in conversation.notes], style="dim")
    lines = conversation.differences[:most]
    if lines:
        more = len(conversation.differences) - len(lines)
        print_lines(console, [f"{conversation.id} differs:"], style="red")
        print_lines(console, [f"  {line}" for line in lines] + ([f"  and {more} more differences"] if more else []))


def _place(line: str) -> str:
    """The place of a difference, of which the number in a list is left out: `messages[].content`."""
    return re.sub(r"\[\d+\]", "[]", line.partition(": ")[0])


def _change(conversation: Replayed) -> float:
    """How much the reward differs, or if advantages were computed, the largest difference of these; conversations that have none
    in the record or now come first."""
    if conversation.advantages:
        return max(abs(now - before) for before, now in conversation.advantages)
    return math.inf if conversation.rewards is None else abs(conversation.rewards[1] - conversation.rewards[0])
