"""The demo and the starter project that are part of the installed package: a tiny model, rows, recipes.

`demo/` has the files of `turnwise demo`; in a clone they are links to `demo/` and `recipes/calculator.yaml` of the repository.
`template/` has the files that `turnwise init` writes. This package knows files and recipes, and starts no run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from turnwise.errors import ConfigError

_HERE = Path(__file__).parent
_DEMO, _TEMPLATE = _HERE / "demo", _HERE / "template"
_ROWS = {"train.jsonl": 512, "heldout.jsonl": 64}
"""The number of rows of the demo that a starter project gets, by the name of the file."""
_MODEL = "model"

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


def write_project(folder: Path, *, model: str | None = None) -> list[Path]:
    """Write a starter project into `folder`: a recipe, an environment, rows, and the model of the demo unless `model` is given.

    Returns the files and directories. Raises ConfigError if one of them exists already, or if it cannot be written.
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
        _write(paths, model)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    return paths


def _write(paths: Sequence[Path], model: str | None) -> None:
    recipe, environment, *others = paths
    text = (_TEMPLATE / "recipe.yaml").read_text(encoding="utf-8")
    if model is not None:
        text = text.replace(f"path: {_MODEL} #", f"path: {json.dumps(model)} #")
    recipe.write_text(text, encoding="utf-8")
    shutil.copyfile(_TEMPLATE / "environment.py.txt", environment)
    for path in others:
        if path.name in _ROWS:
            with (_DEMO / path.name).open(encoding="utf-8") as rows:
                path.write_text("".join(islice(rows, _ROWS[path.name])), encoding="utf-8")
        else:
            shutil.copytree(_DEMO / _MODEL, path)
