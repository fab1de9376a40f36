"""Every code block of the README and of the documentation is true: Python runs, recipes are valid, commands exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.jails import missing_jail
from support.page_examples import ROOT, VARIABLES, Block, all_blocks, commands, prepare, replaced
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.cli import _parse, main
from turnwise.commands.sweep import divided
from turnwise.config.recipe import checked, load
from turnwise.doctor.template import preflight
from turnwise.environments.mcp import McpServers
from turnwise.options.algorithm import OwnLoss
from turnwise.options.schema import Config
from turnwise.training.own_loss import try_own_loss

BLOCKS = all_blocks()
LANGUAGES = {"python", "yaml", "sh", "json", "text", "layers"}
"""`text` is output or a synopsis of files, and `layers` a table that test_architecture.py reads: neither is executed."""
NOT_RUN = {
    "docs/agents.md": 2,
    "docs/cluster.md": 4,
    "docs/deploy.md": 2,
    "docs/engines.md": 4,
    "docs/environments.md": 1,
    "docs/environment_libraries.md": 5,
    "docs/evaluation.md": 1,
    "docs/examples.md": 1,
    "docs/memory.md": 1,
    "docs/one_gpu.md": 1,
    "docs/tokens.md": 1,
    "docs/tools.md": 1,
    "docs/verl.md": 1,
    "recipes/smollm2.md": 1,
}
"""Page -> the number of its blocks that cannot run here. Each has its reason in the page. Their commands are parsed."""
SMALL = {
    "train": ["train.steps=1", "train.batch_size=2", "train.group_size=2"],
    "demo": ["train.steps=1", "train.batch_size=2", "train.group_size=2", "eval.max_rows=2", "replace=true"],
    "sft": ["sft.epochs=1", "sft.batch_size=2", "data.max_rows=4"],
    "rollout": ["rollout.max_rows=2"],
    "eval": ["eval.max_rows=2"],
}
"""Appended to commands that train or sample, to make them short."""
ONLY_PARSED = {"docs/server.md"}
"""Pages whose commands need a server, or data that is not here."""
PROGRAMS = {"eval", "export", "source", "cd", "git", "make", "printf", "seq", "sha256sum", "torchrun", "trl"}
"""Programs of the shell whose arguments are not checked."""


def of(*languages: str) -> list[Any]:
    """The blocks of these languages that can run here, as parameters of a test."""
    return [
        pytest.param(block, id=block.place) for block in BLOCKS if block.language in languages and block.not_run is None
    ]


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the demo, which examples call runs/demo."""
    out = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main(["train", "recipes/calculator.yaml", *SMALL["train"], "eval.max_rows=2", f"output={out}"]) == 0
    return out


def enter(block_or_page: Block | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path | None = None) -> None:
    """Work in a directory with the files of the page."""
    page = block_or_page if isinstance(block_or_page, str) else block_or_page.page
    prepare(tmp_path, page)
    if run is not None:
        shutil.copytree(run, tmp_path / "runs" / "demo", symlinks=True)
        (tmp_path / "runs" / "latest").symlink_to("demo")
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.setenv(name, "secret")


def test_every_block_has_a_language_and_a_block_that_is_not_run_has_a_reason() -> None:
    assert len(BLOCKS) > 120
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [block.place for block in BLOCKS if block.not_run is not None and len(block.not_run) < 10] == []
    assert Counter(block.page for block in BLOCKS if block.not_run is not None) == NOT_RUN


@pytest.mark.parametrize("block", of("json"))
def test_json_can_be_read(block: Block) -> None:
    try:
        json.loads(block.text)
    except ValueError:
        for line in block.text.splitlines():
            json.loads(line)


@pytest.mark.parametrize("block", of("yaml"))
def test_a_recipe_is_valid_and_the_names_in_it_exist(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "PythonSession" in block.text and (reason := missing_jail()):
        pytest.skip(reason)
    enter(block, tmp_path, monkeypatch)
    if block.file is not None:
        config, _ = load(block.file)
    else:
        defaults = {"model": {"path": "demo/model"}, "data": {"train": "demo/train.jsonl"}}
        tree = yaml.safe_load(block.text)
        for section, options in defaults.items():
            tree[section] = options | tree.get(section, {})
        config = checked(tree, source=block.place)
    if config.mcp.servers is not None:  # read, and not started
        McpServers.from_file(config.mcp.servers).close()
    else:
        assembly.environment_factory(config)
    assembly.credit(config, assembly.scorer(config))
    assembly.turn_weighting(config)
    if isinstance(config.loss, OwnLoss):
        try_own_loss(config.loss)
    if config.model.path == "demo/model":
        preflight(config, Renderer.from_pretrained("demo/model"))


def python_pages() -> list[Any]:
    found: dict[str, list[Block]] = {}
    for block in BLOCKS:
        if block.language == "python" and block.not_run is None:
            found.setdefault(block.page, []).append(block)
    trains = {page: any("turnwise.api" in block.text for block in page_blocks) for page, page_blocks in found.items()}
    return [
        pytest.param(page, page_blocks, id=page, marks=[pytest.mark.slow] if trains[page] else [])
        for page, page_blocks in found.items()
    ]


@pytest.mark.parametrize(("page", "python"), python_pages())
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, python: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    needs_run = any("runs/demo" in block.text for block in python)
    enter(page, tmp_path, monkeypatch, request.getfixturevalue("demo_run") if needs_run else None)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in python:
            # the lines before it: a traceback then has the line of the page
            exec(compile("\n" * block.line + replaced(block.text), block.page, "exec"), names)
    finally:  # files of two pages may have the same name
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
                del sys.modules[name]


def turnwise_commands(*kinds: str) -> list[Any]:
    """The different `turnwise` commands of all pages, as parameters of a test: page and words.

    With `kinds`, only the commands of these kinds that can run here.
    """
    found: dict[tuple[str, ...], Block] = {}
    for block in BLOCKS:
        if block.language != "sh" or (kinds and block.not_run is not None):
            continue
        for words in commands(replaced(block.text)):
            name, *rest = words
            if Path(name).name == "turnwise" and (rest[0] in kinds or not kinds):
                found.setdefault(tuple(rest), block)
    return [
        pytest.param(block.page, list(words), id=f"{block.page}: {' '.join(words)[:80]}")
        for words, block in found.items()
    ]


@pytest.mark.parametrize(("page", "words"), turnwise_commands())
def test_a_command_has_known_options_and_a_valid_recipe(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(page, tmp_path, monkeypatch)
    options = _parse(words)
    recipe = getattr(options, "recipe", None)
    if recipe is not None and words[0] != "convert" and getattr(options, "config_path", None) is None:
        config_of(options)


def config_of(options: Any) -> Config:
    """The recipe of a command; of a sweep, without the options that have several values."""
    overrides = getattr(options, "overrides", None) or []
    return load(options.recipe, divided(overrides)[1] if "trials" in options else overrides)[0]


@pytest.mark.parametrize("block", of("sh"))
def test_the_other_commands_name_what_exists(block: Block) -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(replaced(block.text)):
        program = Path(words[0]).name
        if program == "make":
            assert set(words[1:]) <= targets, words
        elif program == "pip":
            used = re.findall(r"\[([\w,]+)\]", " ".join(words))
            assert {extra for group in used for extra in group.split(",")} <= extras, words
        elif program == "python" and words[1] == "-m":
            assert importlib.util.find_spec(words[2]) is not None, words
        elif program == "python":
            assert (ROOT / words[1]).is_file(), words
        else:
            assert program in PROGRAMS | {"turnwise"}, (
                f"{block.place}: {words} is not checked: use `text`, or say why it is not run"
            )


def operands_exist(words: list[str], options: Any) -> bool:
    """Whether the files and directories of a parsed command exist here."""
    if words[0] == "convert":
        pairs = zip(["", *words], words, strict=False)
        named = [word for before, word in pairs if before != "--out" and re.search(r"\.(sh|yaml|py)$|^DIR$", word)]
        return all(Path(name).exists() for name in named)
    names = [getattr(options, name, None) for name in ("run", "recipe", "model", "runs", "script")]
    paths = [str(path) for name in names if name for path in (name if isinstance(name, list) else [name])]
    return all(Path(path.partition("=")[2] or path).exists() for path in paths)


@pytest.mark.parametrize(("page", "words"), turnwise_commands("show", "doctor"))
def test_a_command_that_reads_a_run_or_a_model_succeeds(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_run: Path
) -> None:
    enter(page, tmp_path, monkeypatch, demo_run)
    if not operands_exist(words, _parse(words)):
        pytest.skip("the run is made by an earlier command of the page; the slow test runs both")
    assert main(words) == 0


def pages_that_train() -> list[Any]:
    kinds = set(SMALL) | {"replay"}
    # test_recipes.py runs the recipes of recipes/
    pages = {block.page for block in BLOCKS if block.language == "sh" and not block.page.startswith("recipes/")}
    return sorted(page for page in pages if any(words[1:] and words[1] in kinds for words in turnwise_words(page)))


def turnwise_words(page: str) -> list[list[str]]:
    """The `turnwise` commands of a page, in its order."""
    shell = [block for block in BLOCKS if block.page == page and block.language == "sh" and block.not_run is None]
    found = [words for block in shell for words in commands(replaced(block.text))]
    return [words for words in found if Path(words[0]).name == "turnwise"]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_that_train())
def test_the_commands_of_a_page_succeed_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_run: Path
) -> None:
    enter(page, tmp_path, monkeypatch, demo_run)
    done = 0  # a command whose data set, or run, is not here is only parsed
    for _, *words in turnwise_words(page):
        options = _parse(words)
        if waits_for_others(words, options) or not operands_exist(words, options) or not rows_exist(words[0], options):
            continue
        assert main([*words, *short(words[0], options)]) == 0, words
        done += 1
    assert done > 0 or page in ONLY_PARSED


def waits_for_others(words: list[str], options: Any) -> bool:
    """Whether a command serves until it is stopped, talks to a server that another command of the page started, or is answered by
    a person."""
    serves = words[0] in ("serve", "retrieval", "play") or (words[0] == "view" and options.export is None)
    return serves or any(word.startswith("rollout_server.url=") for word in words)


def short(command: str, options: Any) -> list[str]:
    """The options that make a command short."""
    held_out = command == "train" and options.recipe is not None and config_of(options).data.eval is not None
    return [*SMALL.get(command, []), *(["eval.max_rows=2"] if held_out else [])]


def rows_exist(command: str, options: Any) -> bool:
    """Whether the model and the rows of a command's recipe are here."""
    if command not in SMALL or command == "demo":
        return True
    config = config_of(options)
    data = config.data.eval if command == "eval" else config.data.train
    files = [data] if isinstance(data, str) else data or []
    return Path(config.model.path or "").exists() and all(Path(file).exists() for file in files)
