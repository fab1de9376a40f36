"""`turnwise doctor` and `turnwise plan`: what is checked and predicted before a run.

`doctor` checks whether a model, and a recipe with it, would be trained rightly. `plan` prints what a recipe needs, and
predicts its speed on other numbers of devices. This module prints; `turnwise.doctor` and `turnwise.planning` compute. Tables
have colours on a terminal and are aligned plain text elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from turnwise.commands.command import Context, add_overrides, add_recipe, count, positive, step_number
from turnwise.doctor.check import Check, show
from turnwise.errors import ConfigError, Failed, TurnwiseError, boundary
from turnwise.planning.placement import PlanLine
from turnwise.planning.simulation import MeasuredWorkload, ScalingRow

if TYPE_CHECKING:
    from turnwise.doctor.check import Check
    from turnwise.options.schema import Config
    from turnwise.planning.placement import PlanLine


# `turnwise doctor`


def register_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Check a model's chat template, tokenizer and weights, and a recipe with them (docs/doctor.md). The exit "
        "status is 1 if a check fails."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a model directory or a hub name; used instead of the recipe's model"
    )
    add_overrides(parser, help="options of the recipe to change")
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
    if options.overrides and options.recipe is None:
        raise ConfigError(f"{options.overrides[0]} is an option of a recipe, and no recipe is given: add --recipe FILE")
    if options.memory_gb is not None and options.recipe is None:
        raise ConfigError("--memory-gb is compared with a recipe's memory, and there is no recipe: add --recipe FILE")
    from turnwise.config.recipe import load
    from turnwise.doctor.check import as_json, show, worst
    from turnwise.doctor.examine import examine

    config = None
    if options.recipe is not None:
        config, _ = load(options.recipe, [*options.overrides, f"model.path={json.dumps(options.model)}"])
    checks = examine(options.model, config, weights=options.weights, memory_gb=options.memory_gb)
    if options.json:
        context.console.out(as_json(options.model, checks), highlight=False)
    else:
        show(checks, context.console)
    return int(worst([check.status for check in checks]) == "fail")


# `turnwise plan`

_COUNTED = 1000
"""The most conversations of a recipe for `turnwise sft` whose tokens are counted."""


def register_plan(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Print the batch arithmetic, the placement and the predicted memory of a recipe. With --simulate, predict "
        "steps per hour, staleness and idle times of synchronous, one-step-off and asynchronous training from the measured "
        "times of a run (docs/plan.md). The exit status is 1 if the memory is too small."
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
    parser.add_argument("--simulate", type=Path, metavar="RUN", help="the directory of a measured run of this recipe")
    _add_simulation_options(parser.add_argument_group("options of --simulate"))
    parser.set_defaults(command=_run_plan)


def _add_simulation_options(simulation: argparse._ArgumentGroup) -> None:
    simulation.add_argument(
        "--devices", default="8,64,512,1024", metavar="N,N", help="numbers of devices; default: %(default)s"
    )
    simulation.add_argument(
        "--measured-devices", type=count, default=1, metavar="N", help="devices of the measured run; default: 1"
    )
    simulation.add_argument(
        "--replica-devices",
        type=count,
        default=1,
        metavar="N",
        help="devices of an engine replica (tensor parallel); default: 1",
    )
    simulation.add_argument(
        "--trainer-share",
        type=positive,
        metavar="SHARE",
        help="the share of the devices that train; default: the share with the most steps per hour",
    )
    simulation.add_argument(
        "--efficiency",
        type=positive,
        default=0.9,
        metavar="SHARE",
        help="the speed of n training devices, divided by n times the speed of a device; default: 0.9",
    )
    simulation.add_argument(
        "--update-seconds",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="seconds for which the engines stop to load new weights; default: 0",
    )
    simulation.add_argument(
        "--staleness",
        type=step_number,
        default=4,
        metavar="N",
        help="train.max_staleness of the asynchronous mode; default: 4",
    )
    simulation.add_argument(
        "--scale-batch",
        action="store_true",
        help="multiply train.batch_size and max_concurrent by the number of devices",
    )


def _run_plan(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.recipe import load
    from turnwise.doctor.options import fine_tunes

    config, _ = load(options.recipe, options.overrides)
    if fine_tunes(config) and options.simulate is not None:
        raise ConfigError(
            "--simulate is for recipes of `turnwise train`, and this recipe is for `turnwise sft`: remove it"
        )
    sections, memory = (_fine_tuning_plan if fine_tunes(config) else _training_plan)(config, options)
    print_plan(context.console, sections, memory)
    if options.simulate is not None:
        _simulate(config, options, context)
    return int(memory.status == "fail")


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
    placement = placement_lines(config, device="cuda" if on_gpu(config) else "cpu", ranks=ranks)
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
    from turnwise.planning.memory import number_of_ranks
    from turnwise.planning.placement import fine_tuning_lines, refuse_idle_ranks, trainer_lines
    from turnwise.sft.fine_tune import conversation_tokens

    refuse_sft_without_effect(config)
    ranks = number_of_ranks(config, options.ranks)
    refuse_idle_ranks(config, ranks)
    rows, model_config = assembly.conversations(config), _known_model(config, read_model_config)
    longest = None if model_config is None else context_length(model_config.to_dict())
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
    from turnwise.doctor.memory import memory_check
    from turnwise.planning.memory import rank_memory_check

    if config.cluster.distributed:
        return rank_memory_check(config, ranks, section=section, memory_gb=memory_gb, longest=longest, prompt=prompt)
    return memory_check(config, config.model.path, section=section, memory_gb=memory_gb, longest=longest, prompt=prompt)


def _known_model(config: Config, read: Callable[[str], Any]) -> Any | None:
    """The configuration of the model; None if it cannot be read, which the check of the memory reports."""
    try:
        with boundary("model"):
            return read(config.model.path)
    except Failed:
        return None


def _simulate(config: Config, options: argparse.Namespace, context: Context) -> None:
    from turnwise.planning.simulation import ScalingOptions, measure, predict_scaling

    try:
        devices = [count(number) for number in options.devices.split(",")]
    except argparse.ArgumentTypeError:
        raise ConfigError(
            f"--devices {options.devices}: give numbers of at least 1, separated by commas, such as 8,64"
        ) from None
    scaling = ScalingOptions(
        batch_size=config.train.batch_size,
        group_size=config.train.group_size,
        max_concurrent=config.max_concurrent,
        staleness=options.staleness,
        devices=devices,
        measured_devices=options.measured_devices,
        replica_devices=options.replica_devices,
        trainer_share=options.trainer_share,
        efficiency=options.efficiency,
        update_seconds=options.update_seconds,
        scale_batch=options.scale_batch,
    )
    workload = measure(options.simulate)
    print_scaling(context.console, workload, predict_scaling(workload, scaling), source=str(options.simulate))


# tables of `turnwise plan`


def print_plan(console: Console, sections: Mapping[str, Sequence[PlanLine]], memory: Check) -> None:
    """Print the sections, and the check of the memory."""
    for title, lines in sections.items():
        console.print(title, style="bold", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2))
        for line in lines:
            table.add_row(line.name, line.value)
        console.print(table, highlight=False, markup=False)
    show([memory], console, verdict=False)


def print_scaling(console: Console, workload: MeasuredWorkload, rows: Iterable[ScalingRow], *, source: str) -> None:
    """Print a line for each prediction, as soon as it is known."""
    engine = workload.engine
    console.print(
        f"measured in {source}: {workload.steps} steps at {workload.steps_per_hour:.0f} steps per hour, {workload.turns:.1f} "
        f"turns per conversation; a token takes "
        f"{1000 * engine.token:.2f} ms + {1000 * engine.sharing:.3f} ms for each running turn; training takes "
        f"{1e6 * workload.training.per_token:.1f} microseconds per token",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if workload.staleness:
        console.print(
            f"note: the measured run sampled while it trained (staleness up to {workload.staleness}), so that the engine and the "
            f"trainer slowed each other down: measure a run with train.max_staleness=0",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print(
        f"{'device':>6} {'mode':<13} {'sample':>6} {'train':>6} {'steps/h':>8} {'tokens/s':>9} {'staleness':>9} "
        f"{'idle: sample':>12} {'train':>5}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    for row in rows:
        found = row.prediction
        console.print(
            f"{row.devices:>6} {row.mode:<13} {row.engines:>6} {row.trainers:>6} {found.steps_per_hour:>8.0f} "
            f"{found.tokens_per_second:>9,.0f} {f'{found.staleness_mean:.1f}/{found.staleness_max}':>9} "
            f"{found.engine_idle:>12.0%} {found.trainer_idle:>5.0%}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print("sample, train: devices; staleness: mean/largest", style="dim", highlight=False)
