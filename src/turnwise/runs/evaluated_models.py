"""The models that `turnwise eval` compares: from the values of `--model` to one recipe for each model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turnwise.config.environment_values import Origins, insert_values
from turnwise.config.recipe import checked
from turnwise.config.schema import Config, OpenAIEngineSection
from turnwise.errors import ConfigError, RunError
from turnwise.json_yaml import parse_yaml, read_text
from turnwise.training.checkpoint import Checkpoints

__all__ = ["EvaluatedModel", "NamedOptions", "evaluated_models"]

_ENDPOINT = re.compile(r"(?P<model>.+?)@(?P<url>https?://.+)")
_LABEL = re.compile(r"(?P<label>[A-Za-z0-9][\w.-]*)=(?P<value>.+)")
_SINGLE_TURN = "single-turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptions:
    """A model of an evaluation as options of the recipe that hold for this model only."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """One model of an evaluation, with the recipe that its conversations follow."""

    name: str
    """Unique; also the name of its directory."""
    config: Config
    single_turn: bool = False

    @property
    def model(self) -> str:
        """The path or hub name of the model; with an endpoint `model@url`."""
        engine = self.config.engine
        if isinstance(engine, OpenAIEngineSection):
            return f"{engine.model or self.config.model.path}@{engine.url}"
        return self.config.model.path


def evaluated_models(
    config: Config, values: Sequence[str | NamedOptions], *, single_turn: bool
) -> list[EvaluatedModel]:
    """The models of `values` (`--model`); without values, the model of the recipe.

    A value is a model directory, a hub name, the directory of a run of turnwise (its newest checkpoint), an endpoint
    (`MODEL@URL`), a YAML file with options of the recipe for this model, or these options. `NAME=` before a text gives the model
    a name. With `single_turn`, each model is also evaluated with one turn in each conversation.

    Raises ConfigError or RunError.
    """
    models: list[EvaluatedModel] = []
    for value in values or [""]:
        if isinstance(value, NamedOptions):
            label, of_model = value.name, _changed(config, value.options, value.name)
        else:
            label, of_model = _resolved(config, value)
        name = _unique(label, [model.name for model in models])
        models.append(EvaluatedModel(name=name, config=of_model))
        if single_turn:
            if of_model.limits.turns == 1:
                raise ConfigError(
                    "--single-turn compares with one turn, and the recipe has limits.turns=1: remove one of them"
                )
            limits = of_model.limits.model_copy(update={"turns": 1})
            alone = of_model.model_copy(update={"limits": limits})
            single = _unique(f"{name}-{_SINGLE_TURN}", [model.name for model in models])
            models.append(EvaluatedModel(name=single, config=alone, single_turn=True))
    return models


def _resolved(config: Config, value: str) -> tuple[str, Config]:
    """The label and the recipe of a value of `--model`; an empty value stands for the recipe's own model."""
    label: str | None = None
    if (labelled := _LABEL.fullmatch(value)) is not None and not Path(value).exists():
        label, value = labelled["label"], labelled["value"]
    if not value:
        engine = config.engine
        named = engine.model if isinstance(engine, OpenAIEngineSection) else None
        return _label_of(named or config.model.path), config
    if (endpoint := _ENDPOINT.fullmatch(value)) is not None:
        own = config.engine.model_dump(mode="json") if isinstance(config.engine, OpenAIEngineSection) else {}
        engine = {**own, "name": "openai", "url": endpoint["url"], "model": endpoint["model"]}
        return label or _label_of(endpoint["model"]), _changed(config, {"engine": engine}, value)
    path = Path(value).expanduser()
    if path.suffix in (".yaml", ".yml"):
        tree = parse_yaml(read_text(path, error=ConfigError), where=value, error=ConfigError)
        if not isinstance(tree, dict):
            raise ConfigError(
                f"--model {value}: the file must contain a mapping of options, such as engine: {{name: openai}}"
            )
        inserted, origins = insert_values(tree, where=value)
        return label or path.stem, _changed(config, inserted, value, origins)
    options: dict[str, Any] = {"model": {"path": str(path) if path.is_dir() else value}}
    if isinstance(config.engine, OpenAIEngineSection):
        options["engine"] = {"name": "local"}
    if (path / "run.json").is_file() or (path / "checkpoints").is_dir():
        saved = Checkpoints(path).find()
        if saved is None:
            raise RunError(
                f"--model {value}: this run has no checkpoint; give a model directory, or a run with checkpoints"
            )
        options["model"] = {"path": str(saved.model)}
        return label or path.resolve().name, _changed(config, options, value)
    return label or _label_of(value), _changed(config, options, value)


def _label_of(model: str) -> str:
    """The last part of a path or a hub name, in the characters of a directory's name."""
    return re.sub(r"[^\w.-]", "-", model.rstrip("/").rpartition("/")[2]).lstrip("-.") or "model"


def _unique(name: str, taken: Sequence[str]) -> str:
    if name not in taken:
        return name
    return next(other for number in range(2, len(taken) + 3) if (other := f"{name}-{number}") not in taken)


def _changed(
    config: Config, options: Mapping[str, Any], source: str, origins: Origins = MappingProxyType({})
) -> Config:
    """The recipe with other options. A section that is chosen by name is replaced, another section is merged. `origins` are the
    options that came from environment variables.

    Raises ConfigError.
    """
    tree = config.model_dump(mode="json")
    for key, value in options.items():
        replaced = isinstance(value, Mapping) and "name" in value
        both = isinstance(value, Mapping) and isinstance(tree.get(key), dict) and not replaced
        tree[key] = {**tree[key], **value} if both else value
    return checked(tree, source=f"--model {source}").with_origins({**config.origins, **origins})
