"""Damaged files of MCP servers, corpora and scripts, and paths that cannot be: read, or refused with a `TurnwiseError`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz.mutations import accepted_or_refused, mutated_text, mutated_tree, write
from turnwise.assembly import read_scripts
from turnwise.chat.renderer import Renderer
from turnwise.compat.swift import from_swift_arguments
from turnwise.compat.verl.convert import from_verl_arguments
from turnwise.config.recipe import load
from turnwise.data.images import load_image
from turnwise.data.rows import read_rows
from turnwise.environments.mcp import McpServers
from turnwise.environments.search import read_corpus
from turnwise.errors import DataError, TurnwiseError
from turnwise.user_code.references import resolve

ROUNDS = 100

SERVERS = {
    "mcpServers": {
        "a": {"url": "https://example.org/mcp", "auth_token": "t", "headers": {"x": "y"}, "type": "http"},
        "b": {"command": "python", "args": ["-m", "x"], "env": {"A": "b"}, "cwd": ".", "type": "stdio"},
    }
}
FILES: list[tuple[Callable[..., Any], Any]] = [
    (lambda path: McpServers.from_file(path), SERVERS),
    (read_corpus, {"id": "7", "title": "Paris", "text": "Paris is the capital."}),
    (lambda path: read_scripts(str(path)), ["Hello.", "Bye."]),
]


@pytest.mark.parametrize(("read", "tree"), FILES, ids=["mcp", "corpus", "script"])
def test_a_damaged_file_is_read_or_refused_with_a_message(read: Any, tree: Any, tmp_path: Path) -> None:
    draw = random.Random(0)
    outcomes: set[bool] = set()
    for _ in range(ROUNDS):
        text = json.dumps(mutated_tree(tree, draw))
        text = mutated_text(text, draw) if draw.random() < 0.4 else text
        outcomes.add(accepted_or_refused(read, write(tmp_path / "file.jsonl", text)) is not None)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ["x"], "contents": "a"}', "the `id` of a document is a text or a number; this is ['x']"),
        ('{"id": null, "contents": "a"}', "the `id` of a document is a text or a number; this is None"),
        ('{"contents": "a", "contents": "b"}', "the key 'contents' occurs twice"),
        ('{"contents": "\\ud800"}', "contains half of a surrogate pair"),
        (f'{{"id": {"9" * 5000}, "contents": "a"}}', "an integer has more than 4,300 digits; write it as a text"),
        ("[" * 3000, "nested deeper than 64 levels"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_corpus(write(tmp_path / "corpus.jsonl", f'{{"contents": "fine"}}\n{line}\n'))
    assert "corpus.jsonl:2" in str(error.value)
    assert message in str(error.value)


READERS: dict[str, Callable[[str], Any]] = {
    "rows": lambda path: read_rows(f"{path}.jsonl"),
    "directory": lambda path: read_rows(f"./{path}") if path[0] != "~" else read_rows(path),
    "recipe": load,
    "script": read_scripts,
    "corpus": lambda path: read_corpus(Path(path)),
    "servers": lambda path: McpServers.from_file(path),
    "reference": lambda path: resolve(f"{path}.py:name", key="environment.use"),
    "image": lambda path: load_image(path, where="the image"),
    "model": lambda path: Renderer.from_pretrained(path if path[0] == "~" else f"./{path}"),
    "swift": lambda path: from_swift_arguments([f"{path}.yaml"]),
    "verl": lambda path: from_verl_arguments([], folder=path, name="main"),
}


@pytest.mark.parametrize("path", ["x" * 3000, "~no-such-user/x", "a\0b"], ids=["long", "user", "nul"])
@pytest.mark.parametrize("reader", list(READERS))
def test_a_path_that_cannot_be_is_refused_with_a_message(reader: str, path: str) -> None:
    with pytest.raises(TurnwiseError):
        READERS[reader](path)
