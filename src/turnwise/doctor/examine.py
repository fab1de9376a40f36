"""All checks of `turnwise doctor`, in order: those of a model, and those of a recipe if there is a recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.doctor import template
from turnwise.doctor.check import Check, wrong
from turnwise.doctor.conversation import cost, masked
from turnwise.doctor.credit import conserved
from turnwise.doctor.options import fine_tunes, take_effect
from turnwise.doctor.recipe import (
    conversations,
    own_estimator,
    own_loss,
    reward_functions,
    row_arguments,
    tools_and_rewards,
)
from turnwise.doctor.template import openings, template_checks
from turnwise.errors import ConfigError, TurnwiseError, counted
from turnwise.local_paths import refuse_other_than_model
from turnwise.options.algorithm import OwnCredit, OwnLoss
from turnwise.options.schema import Config
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.types import Row, Sampling

Weights = Literal["auto", "always", "never"]
"""Whether the model is loaded. `auto`: only if its weights are small enough to load quickly."""

_QUICK_GB = 3.0
"""Without a GPU: the largest size of weights, in GB, that `auto` loads."""


def examine(
    path: str,
    config: Config | None = None,
    *,
    weights: Weights = "auto",
    memory_gb: float | None = None,
    chat_template_kwargs: Mapping[str, Any] = {},
    given: str = "",
    begins: Callable[[str], None] = lambda name: None,
) -> list[Check]:
    """Run all checks of the model at `path`, and of the recipe. `memory_gb` is the memory that a training step may use, in GiB.
    `chat_template_kwargs` are further arguments of the template where there is no recipe, which has its own. `given` is how the
    user has named the model, for an error. `begins` is called with the name of a check that may take long, before it.

    A TurnwiseError becomes a failed check and is not raised.
    """
    begins("template")
    checks = list(_checks(path, config, weights, memory_gb, chat_template_kwargs, given, begins))
    if config is not None and config.engine.servers is not None and not fine_tunes(config):
        begins("engine")
        checks.append(_tried("engine", lambda: Check("engine", "ok", f"servers: {assembly.startable(config)}")))
    if config is not None and config.engine.has_weights:
        begins("memory")
        checks.append(_tried("memory", lambda: _memory(path, config, memory_gb)))
    return checks


def _checks(
    path: str,
    config: Config | None,
    weights: Weights,
    memory_gb: float | None,
    arguments: Mapping[str, Any],
    given: str,
    begins: Callable[[str], None],
) -> Iterator[Check]:
    if config is not None:
        yield _tried("options", lambda: take_effect(config))
    try:
        if given:
            refuse_other_than_model(path, error=ConfigError, weights=False, given=given)
        renderer = _renderer(path, config, arguments)
        directory = template.read_directory(path, renderer)
    except TurnwiseError as error:
        yield wrong("model", error)
        if config is not None:
            yield from _of_recipe(config, None, None, begins)
        return
    yield from _of_template(renderer, directory, config)
    thinking = config.thinking if config is not None else "keep"
    yield _tried("mask", lambda: masked(renderer, thinking, _rule(config)))
    yield _tried("cost", lambda: cost(renderer, thinking))
    yield _tried("credit", lambda: conserved(renderer, thinking))
    begins("log-probs")
    model, reason = None, ""
    try:
        model, reason = _model(path, config, weights, memory_gb)
    except TurnwiseError as error:
        yield wrong("log-probs", error)
    if model is not None:
        from turnwise.doctor.weights import round_trip

        sampling = assembly.sampling(config) if config is not None else Sampling()
        yield _tried("log-probs", lambda: round_trip(model, renderer, sampling))
    elif reason:
        yield Check("log-probs", "note", reason)
    if config is not None:
        begins("rows")
        yield from _of_recipe(config, renderer, model, begins)


def _of_template(renderer: Renderer, directory: template.Directory, config: Config | None) -> Iterator[Check]:
    yield _tried("template", lambda: template.features(renderer))
    rows: list[Row] = []
    if config is not None and not fine_tunes(config) and config.tools:
        with contextlib.suppress(TurnwiseError):  # the check `rows` reports it
            rows = assembly.rows(config)
    yield from template_checks(renderer, config, directory=directory, rows=rows)


def _of_recipe(
    config: Config, renderer: Renderer | None, model: Any | None, begins: Callable[[str], None]
) -> Iterator[Check]:
    """The checks of rows, own functions and rewards; without a `renderer`, those that need none."""
    if fine_tunes(config):
        yield (check := _tried("rows", lambda: conversations(config)))
        read = assembly.conversations(config) if check.status != "fail" else []
        if renderer is not None and any(row.chat_template_kwargs for row in read):
            yield _tried("arguments", lambda: row_arguments(config, read, renderer))
        return
    rows, failed = None, "model"
    try:
        rows = assembly.rows(config)
        held_out = (
            assembly.rows(config, held_out=True, limit=config.eval.max_rows) if config.data.eval is not None else []
        )
        yield from _of_rows(config, [*rows, *held_out], renderer)
    except TurnwiseError as error:
        yield wrong("rows", error)
        rows, failed = None, "rows"
    if isinstance(config.credit, OwnCredit):
        yield _tried("estimator", lambda: own_estimator(config))
    if isinstance(config.loss, OwnLoss):
        yield _tried("loss", lambda: own_loss(config))
    begins("rewards")
    try:
        if rows is not None and renderer is not None:
            yield from tools_and_rewards(config, rows, renderer, model)
        elif (check := reward_functions(config, failed)) is not None:
            yield check
    except TurnwiseError as error:
        yield wrong("rewards", error)


def _of_rows(config: Config, rows: Sequence[Row], renderer: Renderer | None) -> Iterator[Check]:
    if renderer is None:
        yield Check(
            "rows", "note", f"{counted(len(rows), 'row')} can be read; not tried in the template, because model fails"
        )
        return
    yield _tried("rows", lambda: openings(config, rows, renderer))
    if any(row.chat_template_kwargs for row in rows):
        yield _tried("arguments", lambda: row_arguments(config, rows, renderer))


def _tried(name: str, check: Callable[[], Check]) -> Check:
    """The result of `check`. A TurnwiseError becomes a failed check."""
    try:
        return check()
    except TurnwiseError as error:
        return wrong(name, error)


def _memory(path: str, config: Config, memory_gb: float | None) -> Check:
    from turnwise.doctor.memory import longest_prompt
    from turnwise.doctor.what_fits import fit_check  # torch

    if fine_tunes(config):
        return fit_check(config, path, section="sft", memory_gb=memory_gb)
    prompt = None
    with contextlib.suppress(TurnwiseError):  # the checks `model` and `rows` report it
        prompt = longest_prompt(config, assembly.rows(config), _renderer(path, config))
    return fit_check(config, path, section="train", memory_gb=memory_gb, prompt=prompt)


def _rule(config: Config | None) -> TurnWeighting | None:
    return None if config is None else assembly.turn_weighting(config)


def _renderer(path: str, config: Config | None, arguments: Mapping[str, Any] = {}) -> Renderer:
    if config is None:
        return Renderer.from_pretrained(path, chat_template_kwargs=arguments)
    return assembly.renderer(config, path)


def _model(path: str, config: Config | None, weights: Weights, memory_gb: float | None) -> tuple[Any | None, str]:
    """The model with its weights and an empty text; or None and the reason why the model is not loaded. `memory_gb` may be
    that of a GPU that is not here.

    Raises TurnwiseError if it cannot be loaded.
    """
    if weights == "never":
        return None, "not checked, because of --weights never"
    size = _weights_gb(path)
    if size is None:
        if weights == "always":
            raise ConfigError(
                f"there are no weights in {path}: there must be a *.safetensors or pytorch_model*.bin file. Add it, or leave "
                f"out --weights always"
            )
        return None, f"not checked: there are no weights in {path}"
    if weights == "auto" and size > (most := _most_gb()):
        return (
            None,
            f"not checked: the weights have {size:.1f} GB, and above {most:.1f} GB they are loaded only with --weights always",
        )
    from turnwise.doctor.memory import on_gpu
    from turnwise.models.device import sees_gpu
    from turnwise.models.loading import ModelSource, load_model

    if memory_gb is not None and config is not None and on_gpu(config) and not sees_gpu():
        return None, f"not checked: model.device={config.model.device} is not here (--memory-gb says what it has)"
    if config is None:
        return load_model(ModelSource(path=path)), ""
    return load_model(assembly.model_source(config, path)), ""


def _weights_gb(path: str) -> float | None:
    """The size of the files with weights in GB. None if there are no such files."""
    file = template.model_file(path, "config.json")
    folder = Path(path).expanduser() if file is None else file.parent
    files = [file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)]
    return sum(file.stat().st_size for file in files) / 1e9 if files else None


def _most_gb() -> float:
    """The largest size of weights, in GB, that `auto` loads."""
    import torch

    # loaded in float32, a bfloat16 checkpoint takes twice its size, and the KV cache needs memory too
    return torch.cuda.mem_get_info()[0] / 1e9 / 3 if torch.cuda.is_available() else _QUICK_GB
