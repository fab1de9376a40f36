"""`turnwise train`, `sft`, `demo` and `init`: runs that train, and the projects to begin with.

`train` runs reinforcement learning by a recipe, or by a configuration of verl's. `sft` fine-tunes on given conversations.
`demo` trains the tiny model that is part of the package, from any directory. `init` writes a starter project.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands.command import (
    Context,
    add_overrides,
    add_recipe,
    load_recipe,
    positive,
    print_lines,
    resume_command,
    run_to_end,
)
from turnwise.commands.ranks import read_by_all_ranks, run_as_rank
from turnwise.errors import ConfigError, TemplateError
from turnwise.local_paths import refuse_other_than_model
from turnwise.starter import DEMO_OUTPUT, Thinking, demo_overrides, demo_recipe, write_project

if TYPE_CHECKING:
    from turnwise.doctor.fit import Trained
    from turnwise.options.schema import Config


# `turnwise train`


def register_train(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Train a model by reinforcement learning, with the options of a recipe or of a configuration for verl "
        "(docs/verl.md)."
    )
    add_recipe(parser, nargs="?")
    parser.add_argument("--config-path", metavar="DIR", help="instead of a recipe: a directory of verl's YAML files")
    parser.add_argument(
        "--config-name",
        metavar="NAME",
        help="the file in that directory, without .yaml; key=value then sets options of verl",
    )
    parser.set_defaults(command=_run_train, long=True)


def _run_train(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.train_checks import refuse_without_effect

    with read_by_all_ranks():
        if options.config_path is not None or options.config_name is not None:
            config, notes = _from_verl(options)
            resume = "the same command"
        elif options.recipe is None:
            raise ConfigError(
                "give a recipe, such as recipes/calculator.yaml, or verl's --config-path and --config-name"
            )
        else:
            config, notes = load_recipe(options)
            resume = resume_command("train", options, config)
    if (status := run_as_rank(config, context, refuse_without_effect, conversations=True)) is not None:
        return status
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble, train

    run = assemble(config)
    run.notes[:0] = notes
    report = TrainReport(context.console, run.activity)
    return run_to_end(train(run, report), run, report, context, resume=resume)


def _from_verl(options: argparse.Namespace) -> tuple[Config, list[str]]:
    """The recipe of a configuration for verl, and notes on the keys that were left out. Raises ConfigError."""
    from turnwise.commands.convert import converted, refuse
    from turnwise.config.recipe import checked

    overrides: list[str] = options.overrides
    if options.recipe is not None:  # the first word is an override too
        if "=" not in options.recipe and not options.recipe.startswith("~"):
            raise ConfigError(f"the recipe {options.recipe} and --config-path are both given: give one of them")
        overrides = [options.recipe, *overrides]
    result = converted("verl", overrides, folder=options.config_path, name=options.config_name)
    refuse(
        result,
        how="Change these keys, or remove them (~key), or write a recipe with `turnwise convert` and edit it",
    )
    source = "the recipe of verl's configuration (`turnwise convert` shows it)"
    return checked(result.recipe, source=source), [f"left out: {key}" for key in result.unsupported]


# `turnwise sft`


def register_sft(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Supervised fine-tuning on the conversations of data.train, with the same tokens and loss masks as in "
        "`train` (docs/sft.md). docs/recipes.md lists the options of the section `sft`."
    )
    add_recipe(parser, example="recipes/sft.yaml", lr="sft.lr")
    parser.set_defaults(command=_run_sft, long=True)


def _run_sft(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.sft_checks import refuse_sft_without_effect

    with read_by_all_ranks():
        config, notes = load_recipe(options)
    if (status := run_as_rank(config, context, refuse_sft_without_effect, conversations=False)) is not None:
        return status
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.sft.fine_tune import assemble, fine_tune
    from turnwise.terminal.train_report import SftReport

    run = assemble(config)
    run.notes[:0] = notes
    report = SftReport(context.console, run.activity)
    resume = resume_command("sft", options, config)
    return run_to_end(fine_tune(run, report), run, report, context, resume=resume)


# `turnwise demo`


def register_demo(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Train the tiny language model (0.7M parameters) that is part of turnwise, on arithmetic word problems with a calculator "
        "and a simulated user. It takes about 70 seconds on two CPU cores and needs no network. The run is written to "
        f"{DEMO_OUTPUT}."
    )
    add_overrides(parser, help="options of the demo's recipe to change, such as train.steps=20")
    parser.set_defaults(command=_run_demo, long=True)


def _run_demo(options: argparse.Namespace, context: Context) -> int:
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


# `turnwise init`

_ABOUT = {
    "recipe.yaml": "the options of the run, with comments",
    "environment.py": "the environment, a tool and a reward function",
    "train.jsonl": "rows to train on",
    "heldout.jsonl": "rows for evaluations",
    "model": "the tiny model of the demo",
}


def register_init(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Write a starter project: a recipe with comments, an environment, a tool, rows, and the tiny model of the demo. It can "
        "be trained at once. Existing files are never changed."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the directory; default: the present directory",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a model directory or a hub name for the recipe, instead of the demo's model"
    )
    parser.add_argument(
        "--gpu",
        nargs="?",
        type=positive,
        const=0.0,
        metavar="GIB",
        help="write a recipe that fits into so much memory of a GPU, with a reason for each choice; without a number, into what "
        "is free on the GPU of this machine. Needs --model",
    )
    parser.add_argument(
        "--train",
        choices=("all", "lora", "qlora"),
        help="with --gpu: what is trained, all weights, an adapter, or an adapter on weights in 4 bits; default: all weights if "
        "AdamW's state fits (in 32 bits), else an adapter",
    )
    parser.set_defaults(command=_run_init)


def _run_init(options: argparse.Namespace, context: Context) -> int:
    model, folder, of_card = options.model, _without_dots(options.folder), ""
    if options.train is not None and options.gpu is None:
        raise ConfigError(
            f"--train {options.train} chooses what fits into the memory of a GPU, and no GPU is given: add --gpu 24 (GiB), or "
            f"leave out --train"
        )
    if model is not None:
        refuse_other_than_model(model, error=ConfigError, weights=False, given=f"--model {model}")
    if model is not None and Path(model).is_dir():
        model = str(_without_dots(Path(model), absolute=folder != Path()))
    changes, fits = ({}, []) if options.gpu is None else _for_gpu(model, options.gpu, options.train)
    if options.gpu:  # perhaps not the memory of this machine
        of_card = f" model.device=cuda --memory-gb {options.gpu:g}"
    thinking = None if model is None else _thinking(model)
    paths = write_project(folder, model=model, changes=changes, thinking=thinking)
    checked = f"turnwise doctor {shlex.quote(model or 'model')} --recipe recipe.yaml{of_card}"
    commands = {
        checked: "check the model and the recipe",
        "turnwise train recipe.yaml": "train",
        "turnwise show runs/first --best 1 --tokens": "read a conversation, with every token",
        "turnwise eval recipe.yaml --model runs/first": "evaluate the trained model",
    }
    enter = [] if folder == Path() else [f"  cd {shlex.quote(str(folder))}"]
    files = _aligned({str(path): _ABOUT[path.name] for path in paths})
    lines = [*fits, *files, "\nnext:", *enter, *(f"  {line}" for line in _aligned(commands))]
    print_lines(context.console, lines)
    return 0


def _thinking(model: str) -> Thinking | None:
    """Whether the model thinks before an answer, by its chat template; None if it does not."""
    from turnwise.chat.renderer import Renderer

    try:
        renderer = Renderer.from_pretrained(model)
        if "enable_thinking" in renderer.tokenizer.get_chat_template():
            return "optional"
        return "always" if renderer.encode_opening([{"role": "user", "content": "Hi"}]).reasoning_opening else None
    except TemplateError:  # `turnwise doctor`, which is named next, says what is wrong with it
        return "unknown"


def _for_gpu(model: str | None, gib: float, trained: Trained | None) -> tuple[dict[str, str], list[str]]:
    """The lines of the starter's recipe that are others for a model on a GPU with so much memory (0: that of this machine's GPU),
    and what is printed about them. `trained` is what is to be trained, if that is given. Raises ConfigError if the model cannot
    be trained there."""
    if model is None:
        raise ConfigError("--gpu needs the model that is to be trained: turnwise init DIR --model MODEL --gpu 24")
    from turnwise.terminal.report import Terminal, stages

    with stages(Terminal(stderr=True)) as begin:
        begin(f"reading {model}")
        from turnwise.doctor.fit import starter_plan  # torch

        return starter_plan(model, gib or None, trained=trained, begin=begin)


def _without_dots(path: Path, *, absolute: bool = False) -> Path:
    """The path without `name/..`; `absolute`: for use in another directory."""
    short = Path(os.path.abspath(path) if absolute else os.path.normpath(path))
    return short if short.resolve() == path.resolve() else path.resolve()  # .. after a symbolic link


def _aligned(texts: Mapping[str, str]) -> list[str]:
    width = max(len(name) for name in texts)
    return [f"{name:<{width}}  {text}" for name, text in texts.items()]
