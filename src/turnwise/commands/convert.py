"""`turnwise convert`: a recipe from another system's configuration, and the reason for every key that is left out."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from turnwise.commands.command import Context, print_lines
from turnwise.errors import ConfigError, TurnwiseError

if TYPE_CHECKING:
    from turnwise.compat.conversion import ConversionReport
    from turnwise.options.schema import Config

SYSTEMS = ("verl", "swift", "trl")
"""Systems whose configurations can be converted."""

_MOST_LISTED = 40
"""Up to this number of converted keys, what each became is listed without `--verbose`: those of most scripts."""

_MARKS = {True: "CHANGES THE TRAINING, left out", False: "left out"}
"""How a key that is left out is marked, by whether the training is another one without it."""


def register_convert(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Make a recipe from a configuration of verl (docs/verl.md), the arguments of ms-swift (docs/swift.md) or a file of TRL "
        "(docs/trl.md), and give the reason for every key that is left out. Write `--` before arguments that begin with a dash. "
        "The exit status is 1 if the recipe does not work here."
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="argument",
        help="key=value as for verl, or the arguments or the file of ms-swift or TRL",
    )
    parser.add_argument(
        "--from",
        dest="system",
        choices=SYSTEMS,
        default="verl",
        help="the system that the configuration is for; default: verl",
    )
    parser.add_argument("--config-path", metavar="DIR", help="a directory of verl's YAML files")
    parser.add_argument("--config-name", metavar="NAME", help="the name of the file in that directory, without .yaml")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file to write the recipe to; default: print the recipe"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="list what each converted key became, also where there are many or the recipe is printed",
    )
    parser.set_defaults(command=_run_convert)


def _run_convert(options: argparse.Namespace, context: Context) -> int:
    report = converted(
        options.system, options.overrides, folder=options.config_path, name=options.config_name, try_names=True
    )
    if options.out is not None:
        _write_files(report, options.out)
    if not (report.failing or report.refused() or report.not_tried()):  # else it is known what is missing
        report = replace(report, refused_start=refused_start(report.recipe))
    became = [f"converted: {line}" for line in report.became()]
    if options.out is None:
        print(as_recipe(report, further=became if options.verbose else ()), end="")
        return _status(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(as_recipe(report), encoding="utf-8")
    listed = options.verbose or len(became) <= _MOST_LISTED
    changing = f", {len(report.refused())} of which change the training" if report.unsupported else ""
    told = "" if listed else " (--verbose lists what each became, also without --out)"
    kept = f"{len(report.converted)} keys converted{told} and {len(report.unsupported)} left out"
    summary = f"{kept}{changing}; the recipe: {options.out}"
    if report.failing:
        summary += f". {len(report.failing)} of its values do not work here: see above"
    elif report.refused_start:
        summary += ". `turnwise train` would refuse it here: see above"
    print_lines(context.console, [*(became if listed else ()), *_notes(report), summary])
    return _status(report)


def _status(report: ConversionReport) -> int:
    """The exit status: 1 where the recipe does not work here, so that a script does not go on with it."""
    return 1 if report.failing or report.refused_start else 0


def _write_files(report: ConversionReport, out: Path) -> None:
    """Write the files that the recipe names beside it. Raises ConfigError if the recipe's own file is there."""
    if out.exists():
        raise ConfigError(f"{out} exists already: choose another file with --out, or remove it")
    for file, text in report.files.items():
        file.write_text(text, encoding="utf-8")


def converted(
    system: str, words: Sequence[str], *, folder: str | None = None, name: str | None = None, try_names: bool = False
) -> ConversionReport:
    """The recipe of a system's command line. `folder` and `name` are verl's `--config-path` and `--config-name`. With
    `try_names`, the files and classes that the recipe names are loaded.

    Values that the recipe cannot have are left out. Raises ConfigError.
    """
    if system == "verl":
        from turnwise.compat.verl.convert import from_verl_arguments

        return _without_wrong_values(from_verl_arguments(words, folder=folder, name=name, try_names=try_names))
    if folder is not None or name is not None:
        raise ConfigError("--config-path and --config-name are options for --from verl: remove them")
    if system == "trl":
        from turnwise.compat.trl_convert import from_trl_arguments

        return _without_wrong_values(from_trl_arguments(words))
    from turnwise.compat.swift.convert import from_swift_arguments

    source = words[0] if len(words) == 1 and os.path.isfile(words[0]) else words
    return _without_wrong_values(from_swift_arguments(source, try_names=try_names))


def refused_start(recipe: Mapping[str, Any]) -> str:
    """Why `turnwise train` would refuse a recipe here before it loads the model, as far as its files are here and it has no
    variables; empty if it would not."""
    from turnwise.config.recipe import checked

    if "${" in str(recipe):
        return ""
    try:
        _start(checked(recipe, source="the converted recipe"))
    except TurnwiseError as error:
        return str(error)
    return ""


def _start(config: Config) -> None:
    """The checks of `turnwise train` that need neither the model nor the environment, which may start servers.

    Raises TurnwiseError."""
    from turnwise import assembly  # behind the parser, because it loads torch
    from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward

    refuse_without_effect(config)
    refuse_without_reward(config)
    scorer = assembly.scorer(config)
    sources = [config.data.train, *([] if config.data.eval is None else [config.data.eval])]
    files = [file for source in sources for file in ([source] if isinstance(source, str) else source)]
    if not all(os.path.isfile(os.path.expanduser(file)) for file in files):
        return  # of another machine, or a data set that would be downloaded
    rows = [row for held_out in (False, True)[: len(sources)] for row in assembly.rows(config, held_out=held_out)]
    scorer.refuse_unknown_columns(rows)


def _without_wrong_values(report: ConversionReport) -> ConversionReport:
    """Move options whose values the schema refuses from the recipe to the unsupported keys. References to variables stay."""
    from turnwise.compat.conversion import UnsupportedKey
    from turnwise.config.recipe import schema_problems

    for option, value, problem in schema_problems(report.recipe):
        if "${" in str(value):
            continue
        keys = [key for key, results in report.converted.items() if option in results.split(", ")]
        if not keys or not _remove(report.recipe, option):
            report.failing.append(UnsupportedKey(option or "the recipe", value, problem))
            continue
        for key in keys:
            del report.converted[key]
            report.unsupported.append(UnsupportedKey(key, value, f"{option}: {problem}", changes_training=True))
    return report


def _remove(recipe: dict[str, Any], option: str) -> bool:
    """Remove an option from a recipe. Returns whether it was there."""
    node: Any = recipe
    *parents, last = option.split(".")
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    return isinstance(node, dict) and node.pop(last, None) is not None


def as_recipe(report: ConversionReport, *, further: Sequence[str] = ()) -> str:
    """The recipe as YAML. Comments at its top list the keys that are left out, assumptions and `further` lines. Control
    characters, which another system's file may have, are written as escapes."""
    from turnwise.terminal.report import printable  # behind the parser, because it loads rich

    lines = [f"# {printable(line)}" for note in [*further, *_notes(report)] for line in note.splitlines()]
    recipe = yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True, width=120)
    if printable(recipe) != recipe:  # characters that change the direction of text
        recipe = yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=False, width=120)
    return "\n".join([*lines, *([""] if lines else []), recipe])


def _notes(report: ConversionReport) -> list[str]:
    problems = [*map(str, report.failing), *filter(None, [report.refused_start])]
    notes = [f"DOES NOT WORK HERE: {problem}" for problem in problems]
    notes += [f"{_MARKS[key.changes_training]}: {key}" for key in report.unsupported]
    return notes + [f"assumed: {assumption}" for assumption in report.assumptions]


def refuse(report: ConversionReport, *, how: str) -> None:
    """Refuse a configuration with keys that cannot be converted and that change the training.

    `how` says what a person can do about it. Raises ConfigError.
    """
    if refused := report.refused():
        lines = "\n".join(f"  {key}" for key in refused)
        raise ConfigError(
            f"these keys cannot be converted, and training without them gives a different result:\n{lines}\n{how}"
        )
