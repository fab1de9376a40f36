"""`turnwise doctor` and `turnwise plan`: what is checked and predicted before a run.

`doctor` checks whether a model, and a recipe with it, would be trained rightly. `plan` prints what a recipe needs. This module
prints; `turnwise.doctor` and `turnwise.planning` compute. Tables have colours on a terminal and are aligned plain text elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from turnwise.commands.command import Context, add_overrides, add_recipe, count, positive
from turnwise.doctor.check import Check, show
from turnwise.errors import ConfigError, Failed, TurnwiseError, boundary
from turnwise.planning.placement import PlanLine

if TYPE_CHECKING:
    from turnwise.doctor.check import Check
    from turnwise.options.schema import Config
    from turnwise.planning.placement import PlanLine


# `turnwise doctor`

_TEMPLATE_ARGUMENTS = "model.chat_template_kwargs"
_OVERRIDE = re.compile(r"[\w.]+=")
"""How `key=value` begins, which stands in the place of MODEL if that is left out."""


def register_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Check a model's chat template, tokenizer and weights, and a recipe with them (docs/doctor.md). The exit "
        "status is 1 if a check fails."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model directory or a hub name; used instead of the recipe's model, and needed without --recipe",
    )
    add_overrides(
        parser, help="options of the recipe to change; without one, model.chat_template_kwargs.enable_thinking=false"
    )
    parser.add_argument("--recipe", metavar="FILE", help="a recipe to check with the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--weights",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether to load the model's weights; auto: only if loading does not take long",
    )
    parser.add_argument(
        "--memory-gb",
        type=positive,
        metavar="GIB",
        help="the memory that a training step of the recipe may use; default: that of the GPU, or of this machine",
    )
    parser.set_defaults(command=_run_doctor)


def _run_doctor(options: argparse.Namespace, context: Context) -> int:
    model, overrides = options.model, list(options.overrides)
    if options.recipe is not None and model is not None and _OVERRIDE.match(model):  # MODEL is left out
        model, overrides = None, [model, *overrides]
    if model is None and options.recipe is None:
        raise ConfigError("there is no model to check: give MODEL (a directory or a hub name), or --recipe FILE")
    other = next((one for one in overrides if not one.startswith(_TEMPLATE_ARGUMENTS)), None)
    if other is not None and options.recipe is None:
        raise ConfigError(
            f"{other} is an option of a recipe, and no recipe is given: add --recipe FILE. Without a recipe, only "
            f"{_TEMPLATE_ARGUMENTS}.<name>=<value> can be given"
        )
    if options.memory_gb is not None and options.recipe is None:
        raise ConfigError("--memory-gb is compared with a recipe's memory, and there is no recipe: add --recipe FILE")
    from turnwise.config.recipe import load, with_overrides
    from turnwise.doctor.check import as_json, show, worst
    from turnwise.doctor.examine import examine
    from turnwise.terminal.report import Terminal, stages

    config = None
    if options.recipe is not None:
        if model is not None:
            overrides.append(f"model.path={json.dumps(model)}")
        config, _ = load(options.recipe, overrides)
        model = config.model.path
        arguments = config.model.chat_template_kwargs
    else:
        assert model is not None
        least = {"model": {"path": model}, "data": {"train": "none"}}
        given, _ = with_overrides(least, overrides, source="the command line")
        arguments = given.model.chat_template_kwargs
    with stages(Terminal(stderr=True)) as begin:  # loading a model, and trying what would fit, can take minutes
        checks = examine(
            model,
            config,
            weights=options.weights,
            memory_gb=options.memory_gb,
            chat_template_kwargs=arguments,
            given="" if options.model is None or options.model != model else f"MODEL {model}",
            begins=lambda name: begin(f"checking: {name}"),
        )
    if options.json:
        context.console.out(as_json(model, checks), highlight=False)
    else:
        show(checks, context.console)
        if config is not None and options.memory_gb:
            _note_passes_on_a_cpu(config, context.console)
    return int(worst([check.status for check in checks]) == "fail")


# `turnwise plan`

_COUNTED = 1000
"""The most conversations of a recipe for `turnwise sft` whose tokens are counted."""


def register_plan(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Print the batch arithmetic, the placement and the predicted memory of a recipe (docs/memory.md). The exit status is 1 "
        "if the memory is too small."
    )
    add_recipe(parser)
    parser.add_argument(
        "--memory-gb",
        type=positive,
        metavar="GIB",
        help="the memory of a device; default: that of the GPU, or of this machine",
    )
    parser.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="the number of ranks that torchrun will start (cluster=torchrun); default: WORLD_SIZE, or 1",
    )
    parser.set_defaults(command=_run_plan)


def _run_plan(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.recipe import load
    from turnwise.doctor.options import fine_tunes

    config, _ = load(options.recipe, options.overrides)
    sections, memory = (_fine_tuning_plan if fine_tunes(config) else _training_plan)(config, options)
    print_plan(context.console, sections, memory)
    if options.memory_gb or options.ranks:
        _note_passes_on_a_cpu(config, context.console)
    return int(memory.status == "fail")


def _note_passes_on_a_cpu(config: Config, console: Console) -> None:
    """Say so, if the memory was predicted for a CPU only because this machine has no GPU."""
    from turnwise.doctor.memory import on_gpu

    if config.model.device == "auto" and not on_gpu(config):
        console.print(
            "This is the memory of passes on a CPU, because this machine has no GPU. For GPUs elsewhere, add "
            "model.device=cuda.",
            highlight=False,
        )


def _training_plan(config: Config, options: argparse.Namespace) -> tuple[Mapping[str, Sequence[PlanLine]], Check]:
    """The sections of the plan of a recipe for `turnwise train`, and the check of the memory."""
    from turnwise import assembly
    from turnwise.config.train_checks import refuse_without_effect
    from turnwise.doctor.memory import longest_prompt, on_gpu, read_model_config
    from turnwise.planning.memory import engine_memory_lines, number_of_ranks, refuse_impossible
    from turnwise.planning.placement import batch_lines, placement_lines

    refuse_without_effect(config)
    ranks = number_of_ranks(config, options.ranks)
    model_config = _known_model(config, read_model_config)
    if model_config is not None:
        refuse_impossible(config, ranks, model_config)
    gpu = on_gpu(config)
    servers = assembly.place_of_servers(config) if gpu else ""
    placement = placement_lines(config, device="cuda" if gpu else "cpu", ranks=ranks, servers=servers)
    if model_config is not None:
        placement += engine_memory_lines(config, model_config)
    read = assembly.rows(config)
    rows, prompt = len(read), None
    if model_config is not None:
        with contextlib.suppress(TurnwiseError):  # a plan needs no tokenizer
            prompt = longest_prompt(config, read, assembly.renderer(config, config.model.path))
    sections = {
        "a training step": batch_lines(config.with_known_steps(rows), rows=rows, ranks=ranks),
        "placement": placement,
    }
    return sections, _memory(config, ranks, "train", options.memory_gb, prompt=prompt)


def _fine_tuning_plan(config: Config, options: argparse.Namespace) -> tuple[Mapping[str, Sequence[PlanLine]], Check]:
    """The same of a recipe for `turnwise sft`."""
    from turnwise import assembly
    from turnwise.config.sft_checks import refuse_sft_without_effect
    from turnwise.doctor.memory import on_gpu, read_model_config
    from turnwise.models.model_config import context_length
    from turnwise.planning.memory import number_of_ranks, refuse_undivided
    from turnwise.planning.placement import fine_tuning_lines, refuse_idle_ranks, trainer_lines
    from turnwise.sft.fine_tune import conversation_tokens

    refuse_sft_without_effect(config)
    ranks = number_of_ranks(config, options.ranks)
    refuse_idle_ranks(config, ranks)
    rows, model_config = assembly.conversations(config), _known_model(config, read_model_config)
    longest = None if model_config is None else context_length(model_config.to_dict())
    if model_config is not None:
        refuse_undivided(config, model_config, section="sft")
    bounds = [bound for bound in (config.limits.context, longest) if bound is not None]
    counted = conversation_tokens(config, rows[:_COUNTED])
    sections = {
        "a step of fine-tuning": fine_tuning_lines(
            config, rows=len(rows), counted=counted, context=min(bounds, default=None), ranks=ranks
        ),
        "placement": trainer_lines(config, device="cuda" if on_gpu(config) else "cpu", ranks=ranks),
    }
    known = max((one.tokens for one in counted), default=None)
    return sections, _memory(config, ranks, "sft", options.memory_gb, longest=known)


def _memory(
    config: Config,
    ranks: int,
    section: str,
    memory_gb: float | None,
    *,
    longest: int | None = None,
    prompt: int | None = None,
) -> Check:
    """The check of the memory, with the lengths that are known."""
    from turnwise.doctor.what_fits import fit_check
    from turnwise.planning.memory import rank_memory_check

    if config.cluster.distributed:
        return rank_memory_check(config, ranks, section=section, memory_gb=memory_gb, longest=longest, prompt=prompt)
    return fit_check(config, config.model.path, section=section, memory_gb=memory_gb, longest=longest, prompt=prompt)


def _known_model(config: Config, read: Callable[[str], Any]) -> Any | None:
    """The configuration of the model; None if it cannot be read, which the check of the memory reports."""
    try:
        with boundary("model"):
            return read(config.model.path)
    except Failed:
        return None


def print_plan(console: Console, sections: Mapping[str, Sequence[PlanLine]], memory: Check) -> None:
    """Print the sections, and the check of the memory."""
    for title, lines in sections.items():
        console.print(title, style="bold", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2))
        for line in lines:
            table.add_row(line.name, line.value)
        console.print(table, highlight=False, markup=False)
    show([memory], console, verdict=False)
