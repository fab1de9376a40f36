"""Measure how much a person must read, and compare some of it with bounds.

python scripts/measure.py                 # every figure, with its bound if it has one
python scripts/measure.py --check         # print only what is over its bound, with what to do; exit 1 if there is anything
python scripts/measure.py --no-step       # leave out the traced training step (the rest takes a second)

The figures:

- way from row to gradient: the files of src/turnwise in which a function runs during one training step, traced with
  sys.setprofile in all threads. The run is GRPO with the demo's model, the embedded engine and a small environment of two turns
  (`ENVIRONMENT`; no tools). Its second step is traced, from the call that takes the rows until the weights are published:
  import, assembly, first-time set-up, evaluation and the step's metrics are not counted. Progress, record and checkpoints are
  not counted either (`NOT_COUNTED`). `files` and `lines` count these files with all their lines; `lines that run` counts only
  the functions that ran, with their docstrings.
- way: files that hold 95 % of the lines that run: how many of these files a reader opens who reads nearly all of it.
- modules, without `__init__.py`, and their median length; small files with one neighbour: files of fewer than `SMALL` lines that
  exactly one file imports, which is in the same folder.
- longest function, in lines from `def` to its end, docstring and nested functions included.
- hidden state: the instance attributes of a class whose name begins with one underscore, and its cached properties.
- class names that are defined more than once. Classes of `MIRRORS` are listed, but not counted.
- unclear words in prose: docstrings, comments and messages of src/turnwise, and the Markdown pages; code in them is left out.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import re
import statistics
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "turnwise"

BOUNDS = {
    "longest function": 60,
    "hidden state of one class": 9,
    "class names defined more than once": 0,
}
"""The largest value that these figures may have. The other figures are printed, and are examples to look at, not bounds."""

SMALL = 150
"""A file with fewer lines that only one file of its folder imports may be a part of that file's idea."""


READ_FIRST = 15
"""The number of files that a reader of the main idea reads."""

ADVICE = {
    "longest function": "move parts of the function into functions with names",
    "hidden state of one class": "compute the state once, at the start, as a frozen value; or divide the class",
    "class names defined more than once": "rename one of the classes: each name must have one meaning",
}

BEGIN, END = ("terminal/report.py", "step"), ("record/metrics.py", "conversation_metrics")
"""File and function with whose call the traced step begins, and with whose call it ends."""
NOT_COUNTED = ("terminal/", "record/", "runs/run_state.py")
"""Progress, record, and whether a checkpoint may be written now."""
ENGINE = "engines/local/"
ENVIRONMENT = """
from turnwise import Opening, Reply, environment, user_message

@environment
async def asks_again(row):
    turn = yield Opening(messages=row.messages)
    turn = yield user_message("Are you sure?", reward=len(turn.text) % 3)
    yield Reply(reward=len(turn.text) % 5, done=True)
"""
"""Two turns, rewards that differ: advantages are not zero, so that there is a gradient."""

MIRRORS = {
    "compat/swift/environments.py": ("Template",),
    "compat/verl/base.py": ("ToolResponse",),
    "compat/verl/shipped.py": ("Gsm8kTool",),
}
"""Classes that code written for ms-swift or verl uses. They must have the names of those systems."""

UNCLEAR = (
    "told", "tell", "tells", "heard", "hear", "hears", "whole", "anew", "afresh", "nobody", "somebody", "learnt", "whoever",
    "whatsoever", "wherever", "former", "cue", "spoken", "gallery", "rehearsal", "eyes", "mouth", "hangs", "lest", "thereof",
)  # fmt: skip
"""Words that are hard to read for an international reader."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value: its name, the value, and lines that explain it."""

    name: str
    value: int
    details: tuple[str, ...] = ()


def trace_step(source: Path = SOURCE) -> dict[str, set[int]]:
    """Train two steps; return the files in which a function ran in the second, with the first lines of those functions.

    Raises SystemExit if the functions `BEGIN` and `END` are no longer called once a step.
    """
    from rich.console import Console

    from turnwise.options.schema import Config
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble, train

    ran: dict[str, set[int]] = {}
    prefix = f"{source}/"
    begun = ended = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal begun, ended
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix):
            return
        place = code.co_filename.removeprefix(prefix)
        begun += (place, code.co_name) == BEGIN
        ended += (place, code.co_name) == END
        if begun == 2 and ended == 1 and code.co_name != "<module>" and not place.startswith(NOT_COUNTED):
            ran.setdefault(place, set()).add(code.co_firstlineno)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asks_again.py").write_text(ENVIRONMENT, encoding="utf-8")
        recipe = {
            "model": {"path": str(ROOT / "demo" / "model")},
            "data": {"train": str(ROOT / "demo" / "train.jsonl")},
            "environment": f"{folder / 'asks_again.py'}:asks_again",
            "limits": {"tokens_per_turn": 16},
            "train": {"steps": 2, "batch_size": 4, "group_size": 4, "lr": 1e-4},
            "output": str(folder / "run"),
        }
        run = assemble(Config.model_validate(recipe))
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            asyncio.run(train(run, TrainReport(Console(file=io.StringIO()), run.activity)))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    if (begun, ended) != (2, 2):
        raise SystemExit(
            f"scripts/measure.py: {BEGIN} was called {begun} times and {END} {ended} times in two steps; both must be called "
            f"once a step: name the functions that begin and end a step now"
        )
    return ran


def step_figures(source: Path = SOURCE) -> list[Figure]:
    """The way from a row to a gradient."""
    ran = trace_step(source)
    lines = {name: _line_count(source / name) for name in ran}
    read = {name: _function_lines(source / name, first) for name, first in ran.items()}
    longest = sorted(lines, key=lambda name: -read[name])
    figures: list[Figure] = []
    for title, names in (
        ("way", longest),
        ("way without the embedded engine", [name for name in longest if not name.startswith(ENGINE)]),
    ):
        most, few = sum(read[name] for name in names) * 0.95, 0
        while sum(read[name] for name in names[:few]) < most:
            few += 1
        first = names[:READ_FIRST]
        share = sum(read[name] for name in first) / sum(read[name] for name in names)
        details = (
            f"the {READ_FIRST} files with most of them hold {share:.0%}, and have {sum(lines[name] for name in first)} lines",
            *(f"{read[name]:5} of {lines[name]:4} lines: {name}" for name in names),
        )
        figures.append(Figure(f"{title}: files", len(names), details if title == "way" else details[:1]))
        figures.append(Figure(f"{title}: files that hold 95 % of the lines that run", few))
        figures.append(Figure(f"{title}: lines", sum(lines[name] for name in names)))
        figures.append(Figure(f"{title}: lines that run", sum(read[name] for name in names)))
    return figures


def source_figures(source: Path = SOURCE, pages: tuple[Path, ...] = ()) -> list[Figure]:
    """The figures that are computed from the source and the Markdown pages."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))}

    def named(path: Path, line: int = 0) -> str:
        return path.relative_to(source).as_posix() + (f":{line}" if line else "")

    functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{named(path, node.lineno)} {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    classes = [
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    hidden = [(hidden_state(node), f"{named(path, node.lineno)} {node.name}") for path, node in classes]
    homes: dict[str, list[str]] = {}
    mirrors: list[str] = []
    for path, node in classes:
        if node.name in MIRRORS.get(named(path), ()):
            mirrors.append(f"{node.name} (as in another system, not counted): {named(path, node.lineno)}")
        else:
            homes.setdefault(node.name, []).append(named(path, node.lineno))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    words = unclear_words(source, pages)
    lengths = {path: _line_count(path) for path in trees if path.name != "__init__.py"}
    neighbours = {path: users for path, users in users_of(trees, source).items() if path in lengths}
    small = sorted(
        (lengths[path], named(path))
        for path, users in neighbours.items()
        if lengths[path] < SMALL and len(users) == 1 and next(iter(users)).parent == path.parent
    )
    return [
        Figure("modules", len(lengths)),
        Figure("median length of a module", int(statistics.median(lengths.values())) if lengths else 0),
        Figure("small files with one neighbour", len(small), tuple(f"{length:5} {name}" for length, name in small)),
        _worst("longest function", functions),
        _worst("hidden state of one class", [(len(names), f"{name}: {' '.join(names)}") for names, name in hidden]),
        Figure(
            "class names defined more than once",
            len(twice),
            (*(f"{name}: {', '.join(places)}" for name, places in sorted(twice.items())), *sorted(mirrors)),
        ),
        Figure(
            "unclear words",
            sum(count for places in words.values() for count in places.values()),
            tuple(
                f"{sum(places.values()):4} {word}: {', '.join(f'{place} {count}' for place, count in places.most_common(6))}"
                for word, places in sorted(words.items(), key=lambda pair: -sum(pair[1].values()))
            ),
        ),
    ]


def users_of(trees: dict[Path, ast.Module], source: Path) -> dict[Path, set[Path]]:
    """For each file, the other files that import it (`from a.b import c` imports a.b, and a.b.c if that is a file)."""
    names = {
        ".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in trees
    }
    users: dict[Path, set[Path]] = {path: set() for path in trees}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & names.keys():
                    if names[name] != path:
                        users[names[name]].add(path)
    return users


def hidden_state(node: ast.ClassDef) -> list[str]:
    """The private instance attributes of a class and its cached properties, in order of name."""
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            constant = "ClassVar" in ast.unparse(statement.annotation)
            names |= {statement.target.id} if not constant and _private(statement.target.id) else set()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("cached_property" in ast.unparse(one) for one in statement.decorator_list):
                names.add(f"{statement.name}()")
            names |= {
                target.attr
                for target in ast.walk(statement)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
                and _private(target.attr)
            }
    return sorted(names)


def unclear_words(source: Path, pages: tuple[Path, ...]) -> dict[str, Counter[str]]:
    """How often each unclear word occurs in the prose of each file."""
    pattern = re.compile(rf"\b({'|'.join(UNCLEAR)})\b", re.IGNORECASE)
    found: dict[str, Counter[str]] = {}
    texts = [(path.relative_to(source).as_posix(), prose(path)) for path in sorted(source.rglob("*.py"))]
    texts += [(page.name, _without_code(page.read_text(encoding="utf-8"))) for page in pages]
    for name, text in texts:
        for word in pattern.findall(text):
            found.setdefault(word.lower(), Counter())[name] += 1
    return found


def prose(path: Path) -> str:
    """Comments, docstrings and all other texts with a space in them."""
    text = path.read_text(encoding="utf-8")
    parts = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    parts += [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    return _without_code("\n".join(parts))


def problems(figures: list[Figure], bounds: dict[str, int]) -> Iterator[str]:
    """A text for each figure that is over its bound, with what to do."""
    for figure in figures:
        if figure.name in bounds and figure.value > bounds[figure.name]:
            details = "".join(f"\n    {line}" for line in figure.details[:5])
            yield f"{figure.name}: {figure.value}, and at most {bounds[figure.name]} is allowed. {ADVICE[figure.name]}{details}"


def pages() -> tuple[Path, ...]:
    """The Markdown pages for readers."""
    folders = ("", "docs", "recipes", "benchmarks", "demo")
    return tuple(page for folder in folders for page in sorted((ROOT / folder).glob("*.md")))


def _worst(name: str, found: list[tuple[int, str]]) -> Figure:
    worst = sorted(found, key=lambda pair: (-pair[0], pair[1]))[:10]
    return Figure(name, worst[0][0] if worst else 0, tuple(f"{value:5} {place}" for value, place in worst))


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _line_count(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _function_lines(path: Path, first_lines: set[int]) -> int:
    """The lines of the functions that begin in these lines, nested ones counted once."""
    counted: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(one.lineno for one in (node, *node.decorator_list))
            if first in first_lines:
                counted |= set(range(first, (node.end_lineno or first) + 1))
    return len(counted)


def _without_code(page: str) -> str:
    """A Markdown text without code blocks and inline code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page, flags=re.MULTILINE | re.DOTALL)


def main() -> int:
    """Print the figures, or what is over its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="print only what is over its bound; exit 1 if anything is")
    parser.add_argument("--no-step", action="store_true", help="leave out the traced training step")
    options = parser.parse_args()
    measures: list[Callable[[], list[Figure]]] = [lambda: source_figures(SOURCE, pages())]
    if not options.no_step and not options.check:  # no bound is on a figure of the step
        measures.insert(0, step_figures)
    figures = [figure for measure in measures for figure in measure()]
    if options.check:
        wrong = list(problems(figures, BOUNDS))
        print("\n".join(wrong), end="\n" if wrong else "")
        return int(bool(wrong))
    for figure in figures:
        bound = f" (at most {BOUNDS[figure.name]})" if figure.name in BOUNDS else ""
        print(f"{figure.name}: {figure.value}{bound}")
        for line in figure.details:
            print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
