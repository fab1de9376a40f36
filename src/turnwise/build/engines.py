"""Builds the engine of a recipe. Training, rollouts, fine-tuning and `turnwise doctor` all use this module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.build.learners import model_options
from turnwise.build.server_engines import server_engine
from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config, OpenAIEngineSection, ScriptedEngineSection, ServerEngineSection
from turnwise.engines import scripted
from turnwise.engines.engine import Engine
from turnwise.engines.remote.ownership import Owner
from turnwise.errors import ConfigError, DataError
from turnwise.json_yaml import parse_json, read_text

__all__ = ["Scripts", "engine_model", "read_scripts", "sampling_engine", "scripted_engine"]

Scripts = Mapping[str, Sequence[str]] | Sequence[Sequence[str]]
"""The assistant texts of each conversation: by conversation id, or in the order in which conversations begin."""


def sampling_engine(
    config: Config,
    renderer: Renderer,
    model: Any | None = None,
    *,
    scripts: Scripts | None = None,
    version: int = 0,
    updated: bool = False,
    owner: Owner | None = None,
) -> Engine:
    """The engine that samples for conversations in this process: the embedded engine on a loaded `model`, the scripted engine, or
    an engine on servers, whose weights are updated if there is a `model`, or with `updated`.

    `scripts` selects the scripted engine whatever `engine.name` is; with `engine.name: scripted` and no `scripts`, the texts of
    `engine.script` are used. `version` is the number of the weights that `model` has. `owner` is this process, as the
    servers know it; None: under a new name. Raises ConfigError or DataError.
    """
    options = config.engine
    if scripts is not None:
        return scripted_engine(renderer, scripts)
    if isinstance(options, ScriptedEngineSection):
        return scripted_engine(renderer, read_scripts(options.script))
    if isinstance(options, OpenAIEngineSection):
        raise ConfigError("engine.name=openai is an endpoint of messages, and no engine that samples tokens")
    if isinstance(options, ServerEngineSection):
        trained = updated or model is not None
        return server_engine(config, options, renderer, trained=trained, version=version, owner=owner)
    if model is None:
        raise ConfigError(f"engine.name={options.name} samples from a model, and no model was loaded")
    from turnwise.engines.local import LocalEngine  # torch

    return LocalEngine(
        model,
        slots=options.slots,
        memory_gb=options.memory_gb,
        threads=1 if config.deterministic else options.threads,
        decode=renderer.decode,
        version=version,
        autocast=config.model.autocast,
    )


def engine_model(config: Config, *, adapter: bool = False) -> Any | None:
    """The model that the recipe's engine samples from, loaded from model.path; None for an engine without weights.

    With `adapter`, the model has the adapter of model.lora, so that trained adapters can be loaded into it. For runs without
    training. In training, the learner has already loaded the model.
    """
    without = isinstance(config.engine, ScriptedEngineSection | ServerEngineSection)
    if without or config.runs_conversations_elsewhere:
        return None
    from turnwise.models.loading import load_model  # torch

    options = model_options(config)
    # a new adapter changes nothing before training
    return load_model(options if adapter else replace(options, lora=None))


def scripted_engine(renderer: Renderer, scripts: Scripts, *, continue_prompt: bool = False) -> Engine:
    """An engine that answers with given texts, for a recipe or for a replay of data.

    `continue_prompt` encodes each text as a continuation of the prompt's last token, for tokenizers that split a text
    differently at its beginning.
    """
    return scripted.ScriptedEngine(
        scripts,
        encode=renderer.encode,
        stop_token_id=renderer.stop_token_ids[0],
        encode_behind=renderer.encode_continuation if continue_prompt else None,
    )


def read_scripts(path: str) -> list[list[str]]:
    """The scripts of a scripted engine: each line of the file is a JSON list of texts.

    Raises DataError, with the line's number.
    """
    file = Path(path)
    if not os.path.isfile(file):
        raise DataError(
            f"engine.script: there is no file {file.absolute()}; paths are relative to the directory you run from"
        )
    scripts: list[list[str]] = []
    # split, not splitlines: a text may contain U+2028
    for number, line in enumerate(read_text(file, error=DataError).split("\n"), 1):
        if not line.strip():
            continue
        texts = parse_json(line, where=f"{path}:{number}: this line", error=DataError)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise DataError(f'{path}:{number}: a script is a list of texts, for example ["Hello.", "Bye."]')
        scripts.append(texts)
    if not scripts:
        raise DataError(f"{path} is empty; write a list of texts on each line")
    return scripts
