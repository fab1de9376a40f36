"""`turnwise replay`: the environment and the rewards of recorded conversations run again."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnwise.commands.command import Context, add_overrides, damage_notes, print_lines
from turnwise.errors import ConfigError

__all__ = ["register"]

_MOST_LINES = 20


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run the environment and the reward functions of recorded conversations again, with the recorded turns of "
        "the model, and print what differs: messages, tool results, rewards, stop reason, tokens. The exit status is 1 if "
        "something differs or a line of the record is damaged (docs/evaluation.md)."
    )
    parser.add_argument("run", type=Path, help="the directory of a run, such as runs/demo")
    add_overrides(
        parser,
        help="options of the run's recipe to change, such as limits.turns=2",
    )
    parser.add_argument("--id", metavar="ID", help="the conversation with this id")
    parser.add_argument("--all", action="store_true", help="all conversations of the run")
    parser.add_argument(
        "--eval",
        action="store_true",
        dest="evaluation",
        help="read the conversations of the evaluations during training",
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace, context: Context) -> int:
    if (options.id is None) == (not options.all):
        raise ConfigError("give either --id ID or --all")
    from turnwise.runs.replay import replay

    damaged: list[str] = []
    replayed = context.stops.run(
        replay(options.run, options.overrides, id=options.id, evaluation=options.evaluation, damaged=damaged)
    )
    console = context.console
    print_lines(console, damage_notes(damaged), style="yellow")
    different = [conversation for conversation in replayed if conversation.differences]
    skipped = [conversation for conversation in replayed if conversation.skipped is not None]
    for conversation in replayed:
        if conversation.skipped is not None and options.id is not None:
            print_lines(console, [f"{conversation.id} was not replayed: {conversation.skipped}"])
        if conversation.differences or options.id is not None:
            print_lines(console, [f"{conversation.id}: {note}" for note in conversation.notes], style="dim")
        lines = conversation.differences[:_MOST_LINES]
        more = len(conversation.differences) - len(lines)
        if lines:
            print_lines(console, [f"{conversation.id} differs:"], style="red")
            print_lines(console, [f"  {line}" for line in lines] + ([f"  and {more} more differences"] if more else []))
    same = len(replayed) - len(different) - len(skipped)
    text = f"{same} of {len(replayed)} conversations are the same, {len(different)} differ"
    print_lines(console, [f"{text}, {len(skipped)} failed and were not replayed" if skipped else text])
    return int(bool(different or damaged))
