"""Recipes in Python: the options of a YAML recipe by keyword, with Python objects in place of references."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from turnwise.config.recipe import checked, load, with_known_model
from turnwise.errors import ConfigError
from turnwise.options.environment_values import with_references
from turnwise.options.schema import Config
from turnwise.options.section import named
from turnwise.user_code.references import is_live, reference_to

Rows = str | Path | Iterable[Mapping[str, Any]]
"""Rows: a file, a directory or a hub id as in `data.train`; or a list of dicts, a generator of dicts, a `datasets.Dataset`."""
Object = str | Callable[..., Any] | Mapping[str, Any]
"""A function or class; a reference to one; or a mapping `{"use": function, "arguments": {...}}` with further options."""


class Options(TypedDict, total=False):
    """The options of a recipe, by the names of the recipe's sections (docs/recipes.md), and three shorter ones.

    `rows` and `eval_rows` stand for `data["train"]` and `data["eval"]`; a list of functions as `reward` stands for
    `reward["trajectory"]`; `tokenizer` belongs to a `model` that is an object.
    """

    model: Any
    """A model directory or hub id; a mapping of the options of `model`; or a transformers model, which needs `tokenizer`."""
    tokenizer: Any
    rows: Rows
    eval_rows: Rows
    data: Mapping[str, Any]
    environment: Object
    tools: Sequence[Object]
    mcp: Mapping[str, Any]
    tool_calls: Mapping[str, Any]
    engine: Mapping[str, Any]
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]
    reward: Sequence[Object] | Mapping[str, Any]
    credit: str | Mapping[str, Any] | Callable[..., Any]
    critic: Mapping[str, Any]
    loss: str | Mapping[str, Any] | Callable[..., Any]
    correction: Mapping[str, Any]
    loss_mask: Object
    train: Mapping[str, Any]
    eval: Mapping[str, Any]
    rollout: Mapping[str, Any]
    sft: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    thinking: str
    tool_format: str | Mapping[str, Any]
    tokenization_sanity_check: str
    max_concurrent: int
    output: str | Path
    seed: int
    deterministic: bool
    resume: str
    resume_changes: Sequence[str]
    replace: bool
    more: Mapping[str, Any]
    """Further sections, by their names in the recipe."""


class Recipe:
    """A checked recipe.

    Example::

        recipe = Recipe(model="demo/model", rows=[{"prompt": "2+2?", "answer": "4"}], environment=guess, train={"steps": 20})

    Functions and classes that can be imported become references. Others, such as functions of a notebook, can be used in this
    process only. Raises ConfigError, with all problems and the nearest names.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self.tree: dict[str, Any] = _tree(dict(options))
        """The options as in a YAML file."""
        self.config: Config = with_known_model(checked(self.tree, source="the recipe"))
        """The options with their defaults."""

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """A recipe file, with overrides such as `train.lr=1e-4`, as on the command line. Raises ConfigError."""
        config, _ = load(path, overrides)
        recipe = cls.__new__(cls)
        recipe.tree, recipe.config = config.model_dump(mode="json"), config
        if "model.dtype" in config.chosen:
            recipe.tree["model"]["dtype"] = config.chosen["model.dtype"]
        return recipe

    def with_options(self, **options: Unpack[Options]) -> Recipe:
        """A copy with other options. Mappings are merged: `train={"lr": 1e-4}` keeps the other options of `train`."""
        recipe = type(self).__new__(type(self))
        recipe.tree = _merged(self.tree, _tree(dict(options)))
        changed = with_known_model(checked(recipe.tree, source="the recipe"))
        recipe.config = changed.with_origins(self.config.origins)
        return recipe

    def to_yaml(self, path: str | Path) -> None:
        """Write the recipe as a file for the command line.

        Raises ConfigError if it has objects that only this process knows, or if the file cannot be written.
        """
        import yaml

        if live := sorted({text for text in _texts(self.tree) if is_live(text)}):
            raise ConfigError(
                f"the recipe has objects of this process, which a file cannot name: {', '.join(live)}. Put them into a file, "
                f"and refer to them as path/to/file.py:name"
            )
        try:
            Path(path).write_text(
                yaml.safe_dump(with_references(self.tree, self.config.origins), sort_keys=False, allow_unicode=True),
                encoding="utf-8",
            )
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def _tree(options: dict[str, Any]) -> dict[str, Any]:
    """The tree of a YAML recipe for options by keyword."""
    more = options.pop("more", {})
    data = dict(options.pop("data", {}))
    for option, name in (("rows", "train"), ("eval_rows", "eval")):
        if option in options:
            if name in data:
                raise ConfigError(f"{option} and data[{name!r}] are both given: give one of them")
            data[name] = options.pop(option)
    for name in ("train", "eval"):
        if name in data:
            data[name] = rows_option(data[name], name)
    model, tokenizer = options.pop("model", None), options.pop("tokenizer", None)
    tree = {**({"data": data} if data else {}), **options, **more}
    if model is not None:
        tree["model"] = _model(model, tokenizer, Path(str(tree.get("output", "runs/latest"))))
    elif tokenizer is not None:
        raise ConfigError("tokenizer belongs to a model object: give model too")
    if isinstance(tree.get("reward"), Sequence):
        tree["reward"] = {"trajectory": list(tree["reward"])}
    for name in ("credit", "loss"):
        if callable(tree.get(name)):
            tree[name] = reference_to(tree[name], name=name)
        if name in tree:
            tree[name] = named(tree[name])
    if isinstance(tree.get("engine"), str):
        tree["engine"] = {"name": tree["engine"]}
    if "output" in tree:
        tree["output"] = str(tree["output"])
    return {name: _plain(value, name) for name, value in tree.items()}


def rows_option(rows: Any, name: str) -> str | list[str]:
    """The value of `data.train` or `data.eval` (`name`: `train`, `eval`) for rows of any kind. A generator is read completely.

    Raises ConfigError if `rows` are something else.
    """
    if isinstance(rows, str | Path):
        return str(rows)
    if isinstance(rows, Sequence) and rows and all(isinstance(row, str | Path) for row in rows):
        return [str(row) for row in rows]  # several data sets
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(
            f"the rows are a {type(rows).__name__}; give a path, a list or a generator of dicts, or a datasets.Dataset"
        )
    kept = rows if hasattr(rows, "features") and hasattr(rows, "__len__") else list(rows)  # read more than once
    return reference_to(kept, name=f"{name}_rows")


def _model(model: Any, tokenizer: Any, output: Path) -> Any:
    """The section `model`. A model object is saved beside the run, so that the run can be resumed."""
    if isinstance(model, str | Path | Mapping):
        if tokenizer is not None:
            raise ConfigError("tokenizer belongs to a model object, and model is a path: remove tokenizer")
        return {"path": str(model)} if isinstance(model, str | Path) else dict(model)
    return {"path": str(saved_model(model, tokenizer, output.with_name(f"{output.name}-start-model")))}


def saved_model(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Save a transformers model and its tokenizer in `folder`. Raises ConfigError if the objects are something else."""
    if not hasattr(model, "save_pretrained") or not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"model is a {type(model).__name__} and tokenizer a {type(tokenizer).__name__}; give a path, or a transformers model "
            f"together with its tokenizer"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _plain(value: Any, name: str) -> Any:
    """A value of the recipe with references in place of functions and classes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence):
        return [_plain(item, name) for item in value]
    return reference_to(value, name=name) if callable(value) else value


def _merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with `changes`. A section that is chosen by name, or a reference, is replaced if the change names another one."""
    merged = dict(tree)
    for name, value in changes.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            other = "use" in value or value.get("name", old.get("name")) != old.get("name")
            value = value if other else _merged(old, value)
        merged[name] = value
    return merged


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return itertools.chain.from_iterable(_texts(item) for item in items)
