"""The demo and the starter project that are part of the installed package: a tiny model, rows, recipes.

`demo/` has the files of `turnwise demo`; in a clone they are links to `demo/` and `recipes/calculator.yaml` of the repository.
`template/` has the files that `turnwise init` writes. This package knows files and recipes, and starts no run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from turnwise.errors import ConfigError

_HERE = Path(__file__).parent
_DEMO, _TEMPLATE = _HERE / "demo", _HERE / "template"
_ROWS = {"train.jsonl": 512, "heldout.jsonl": 64}
"""The number of rows of the demo that a starter project gets, by the name of the file."""
_MODEL = "model"
_THINKING_TOKENS = 2048
"""Tokens of an answer with the thinking before it, of a model that thinks."""

DEMO_OUTPUT = "runs/demo"
"""The directory of the run of `turnwise demo`, relative to the present directory."""


def demo_recipe() -> Path:
    """The recipe of the demo."""
    return _DEMO / "calculator.yaml"


def demo_overrides() -> list[str]:
    """The options that let the recipe of the demo run from any directory."""
    return [
        f"model.path={json.dumps(str(_DEMO / 'model'))}",
        f"data.train={json.dumps(str(_DEMO / 'train.jsonl'))}",
        f"data.eval={json.dumps(str(_DEMO / 'heldout.jsonl'))}",
        f"output={DEMO_OUTPUT}",
    ]


Thinking = Literal["optional", "always", "unknown"]
"""Whether a model's template lets it think before an answer: if `enable_thinking` is not false, or always; or that it cannot be
read."""


def write_project(
    folder: Path,
    *,
    model: str | None = None,
    changes: Mapping[str, str] | None = None,
    thinking: Thinking | None = None,
) -> list[Path]:
    """Write a starter project into `folder`: a recipe, an environment, rows, and the model of the demo unless `model` is given.

    `changes` are lines of the recipe, and what is written in their place; `thinking` is what `model` does. Returns the files and
    directories. Raises ConfigError if one of them exists already, or if it cannot be written.
    """
    names = ["recipe.yaml", "environment.py", *_ROWS, *([_MODEL] if model is None else [])]
    paths = [folder / name for name in names]
    if existing := [str(path) for path in paths if path.exists() or path.is_symlink()]:
        raise ConfigError(
            f"files of these names exist already, and nothing was written: {', '.join(existing)}. Choose another directory: "
            f"turnwise init DIR"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(paths, model, changes or {}, thinking)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    return paths


_ABOUT_TIME = (
    "# A starter recipe, written by `turnwise init`. It trains at once, in about half a minute on two CPU cores:"
)
_ABOUT_MODEL = (
    f"  path: {_MODEL} # the tiny model of the demo, which knows arithmetic word problems only; write a model directory or a hub "
    f"name"
)


def _for_other_model(text: str, model: str, thinking: Thinking | None) -> str:
    """The recipe without what is true of the demo's model only: for another model."""
    path = f"  path: {json.dumps(model)} # a model directory or a hub name"
    if thinking == "optional":
        path += f"\n  chat_template_kwargs: {{enable_thinking: false}} # true: set tokens_per_turn to {_THINKING_TOKENS} or more"
    others = {_ABOUT_TIME: "# A starter recipe, written by `turnwise init`. To train:", _ABOUT_MODEL: path}
    for line, other in others.items():
        assert line in text, line
        text = text.replace(line, other)
    if thinking == "always":
        context = re.search(r"^  context: (\d+)", text, re.MULTILINE)
        tokens = _THINKING_TOKENS if context is None else min(_THINKING_TOKENS, int(context[1]) // 2)
        why = " # it thinks before each answer, and a cut answer ends the conversation"
        return re.sub(r"^  tokens_per_turn: \d+", f"  tokens_per_turn: {tokens}{why}", text, flags=re.MULTILINE)
    unknown = (
        f" # {_THINKING_TOKENS} if it thinks before an answer: its template could not be read"
        if thinking == "unknown"
        else ""
    )
    return re.sub(r"^  tokens_per_turn: (64|256)$", f"  tokens_per_turn: 256{unknown}", text, flags=re.MULTILINE)


def _write(paths: Sequence[Path], model: str | None, changes: Mapping[str, str], thinking: Thinking | None) -> None:
    recipe, environment, *others = paths
    text = (_TEMPLATE / "recipe.yaml").read_text(encoding="utf-8")
    for line, other in changes.items():
        assert text.count(f"{line}\n") == 1, line
        text = text.replace(f"{line}\n", f"{other}\n")
    if model is not None:
        text = _for_other_model(text, model, thinking)
    recipe.write_text(text, encoding="utf-8")
    shutil.copyfile(_TEMPLATE / "environment.py.txt", environment)
    for path in others:
        if path.name in _ROWS:
            with (_DEMO / path.name).open(encoding="utf-8") as rows:
                path.write_text("".join(islice(rows, _ROWS[path.name])), encoding="utf-8")
        else:
            shutil.copytree(_DEMO / _MODEL, path)
