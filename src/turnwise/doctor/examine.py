"""All questions that `turnwise doctor` asks of a model, one after the other; and of a recipe, where there is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from turnwise import build
from turnwise.chat.renderer import Renderer
from turnwise.chat.stop_tokens import generation_config_stops
from turnwise.chat.template_profile import TemplateProfile
from turnwise.config.schema import Config
from turnwise.doctor import template
from turnwise.doctor.check import Check, wrong
from turnwise.doctor.conversation import cost, masked
from turnwise.doctor.credit import conserved
from turnwise.doctor.messages import contents, headers
from turnwise.doctor.options import fine_tunes, take_effect
from turnwise.doctor.recipe import conversations, openings, rewards
from turnwise.errors import ConfigError, TemplateError, TurnwiseError
from turnwise.models.model_config import context_length
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.types import Sampling

__all__ = ["Weights", "examine", "template_profile"]

Weights = Literal["auto", "always", "never"]
"""Whether the model is loaded: `auto` loads what does not take long."""

_QUICK_GB = 3.0
"""Weights that are loaded without being asked for, where there is no GPU."""


def examine(path: str, config: Config | None = None, *, weights: Weights = "auto") -> list[Check]:
    """Every question about the model at `path`, and about the recipe.

    What a person can put right is an answer, and raises nothing.
    """
    return list(_answers(path, config, weights))


def template_profile(path: str, config: Config | None = None) -> TemplateProfile:
    """What the chat template of the model at `path` does, with the recipe's `tool_format`. Raises TurnwiseError."""
    return _renderer(path, config).profile


def _answers(path: str, config: Config | None, weights: Weights) -> Iterator[Check]:
    if config is not None:
        yield _tried("options", lambda: take_effect(config))
    try:
        renderer = _renderer(path, config)
        directory = _directory(path, renderer)
    except TurnwiseError as error:
        yield wrong("model", error)
        return
    yield from _of_template(renderer, directory, config)
    thinking = config.thinking if config is not None else "keep"
    yield _tried("mask", lambda: masked(renderer, thinking, _rule(config)))
    yield _tried("cost", lambda: cost(renderer, thinking))
    yield _tried("credit", lambda: conserved(renderer, thinking))
    model, why = None, ""
    try:
        model, why = _model(path, config, weights)
    except TurnwiseError as error:
        yield wrong("log-probs", error)
    if model is not None:
        from turnwise.doctor.weights import round_trip

        sampling = build.sampling(config) if config is not None else Sampling()
        yield _tried("log-probs", lambda: round_trip(model, renderer, sampling))
    elif why:
        yield Check("log-probs", "note", why)
    if config is not None:
        yield from _of_recipe(config, renderer, model)


def _of_template(renderer: Renderer, directory: template.Directory, config: Config | None) -> Iterator[Check]:
    policy = config.thinking if config is not None else None
    tools = config is not None and (bool(config.tools) or config.mcp.servers is not None)
    yield _tried("template", lambda: template.features(renderer))
    yield _tried("headers", lambda: headers(renderer))
    yield _tried("contents", lambda: contents(renderer))
    for kind in ("tool turns", "user turns", "system turns"):
        yield _tried(kind, lambda kind=kind: template.continuing(renderer, [kind])[0])
    yield _tried("thinking", lambda: template.thinking(renderer, policy))
    yield _tried("stop tokens", lambda: template.stops(renderer, directory))
    yield _tried("tool calls", lambda: template.tool_calls(renderer, wanted=tools))
    yield _tried("vocabulary", lambda: template.vocabulary(renderer, directory))


def _of_recipe(config: Config, renderer: Renderer, model: Any | None) -> Iterator[Check]:
    if fine_tunes(config):
        yield _tried("rows", lambda: conversations(config))
        return
    try:
        rows = build.rows(config)
        held_out = build.rows(config, held_out=True, limit=config.eval.max_rows) if config.data.eval is not None else []
    except TurnwiseError as error:
        yield wrong("rows", error)
        return
    yield _tried("rows", lambda: openings(config, [*rows, *held_out], renderer))
    yield _tried("rewards", lambda: rewards(config, rows, renderer, model))


def _tried(name: str, ask: Callable[[], Check]) -> Check:
    try:
        return ask()
    except TurnwiseError as error:
        return wrong(name, error)


def _rule(config: Config | None) -> TurnWeighting | None:
    return None if config is None else build.turn_weighting(config)


def _renderer(path: str, config: Config | None) -> Renderer:
    if config is None:
        return Renderer.from_pretrained(path)
    return build.renderer(config, path)


def _directory(path: str, renderer: Renderer) -> template.Directory:
    """What the model's own files say beside the template.

    Raises TemplateError if its config.json cannot be read.
    """
    file = _file(path, "config.json")
    said: Mapping[str, Any] = {}
    if file is not None:
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TemplateError(f"{file} cannot be read: {error}. Replace it by the model's own") from error
        if not isinstance(said, dict):
            raise TemplateError(
                f"{file} holds a {type(said).__name__} and no mapping of options. Replace it by the model's own"
            )
    text = said.get("text_config")
    rows = said.get("vocab_size") or (text.get("vocab_size") if isinstance(text, Mapping) else None)
    return template.Directory(
        eos=renderer.tokenizer.eos_token_id,
        generation=generation_config_stops(path),
        rows=rows if isinstance(rows, int) else None,
        context=context_length(said),
    )


def _file(path: str, name: str) -> Path | None:
    """A file of a model directory, or of a hub id as far as it is on this machine."""
    from transformers.utils.hub import cached_file

    where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    found = cached_file(
        where, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _model(path: str, config: Config | None, weights: Weights) -> tuple[Any | None, str]:
    """The model with its weights; or None, and why it is left out.

    Raises TurnwiseError if it cannot be loaded.
    """
    if weights == "never":
        return None, "left out, as you asked for"
    size = _weights_gb(path)
    if size is None:
        if weights == "always":
            raise ConfigError(f"there are no weights in {path}: a *.safetensors or *.bin file holds them")
        return None, f"left out: there are no weights in {path}"
    if weights == "auto" and size > (most := _most_gb()):
        return (
            None,
            f"left out: {size:.1f} GB of weights are more than the {most:.1f} GB that load soon; --weights always",
        )
    from turnwise.models.loading import ModelOptions, load_model

    if config is None:
        return load_model(ModelOptions(path=path, dtype="float32", device="auto")), ""
    return load_model(build.model_options(config, path)), ""


def _weights_gb(path: str) -> float | None:
    """Of the weights' files, or None where there are none."""
    file = _file(path, "config.json")
    folder = Path(path).expanduser() if file is None else file.parent
    files = [one for pattern in ("*.safetensors", "pytorch_model*.bin") for one in folder.glob(pattern)]
    return sum(one.stat().st_size for one in files) / 1e9 if files else None


def _most_gb() -> float:
    import torch

    # float32 takes twice what a checkpoint of bfloat16 does, and a cache comes on top
    return torch.cuda.mem_get_info()[0] / 1e9 / 3 if torch.cuda.is_available() else _QUICK_GB
