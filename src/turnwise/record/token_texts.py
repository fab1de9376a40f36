"""The text of a token id, by the tokenizer of the run that recorded it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.config.environment_values import insert_values
from turnwise.errors import ConfigError, Failed, RunError, boundary
from turnwise.json_yaml import parse_yaml, read_text

__all__ = ["recorded_options", "token_texts"]


def token_texts(run: Path) -> Callable[[int], str] | None:
    """The function from token id to text, by the run's own tokenizer; None if there is no `tokenizer.json`.

    Raises RunError if the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    file = next((file for file in _tokenizer_files(run) if file.is_file()), None)
    if file is None:
        return None
    try:
        with boundary("tokenizer"):  # the library raises plain Exception
            tokenizer = Tokenizer.from_file(str(file))
    except Failed as failed:
        raise RunError(f"{file} cannot be read as a tokenizer: {failed.failure.message}") from None
    return lambda token: tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < 2**32 else "?"


def _tokenizer_files(run: Path) -> Iterator[Path]:
    """Where a run's tokenizer may be: in its newest checkpoint, or in the model that it started from."""
    yield run / "checkpoint" / "tokenizer.json"
    yield from sorted(run.glob("checkpoints/step-*/tokenizer.json"), reverse=True)
    model = recorded_options(run).get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        yield Path(model["path"]).expanduser() / "tokenizer.json"


def recorded_options(run: Path) -> Mapping[str, Any]:
    """The options of a run as plain values, from its `config.yaml`; empty where there is none. `${NAME}` stands for values that
    came from environment variables, unless they are set here too.

    Raises RunError if the file cannot be read.
    """
    config = run / "config.yaml"
    if not config.is_file():
        return {}
    tree = parse_yaml(read_text(config, error=RunError), where=str(config), error=RunError)
    if not isinstance(tree, dict):
        return {}
    try:
        return insert_values(tree, where=str(config))[0]
    except ConfigError:  # not set here
        return tree
