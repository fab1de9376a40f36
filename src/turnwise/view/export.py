"""Writes the viewer's page with the data of runs into one HTML file.

The file needs no server and no network: scripts, styles, libraries, data and images are inside.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, RunError
from turnwise.view.evaluations import evaluations
from turnwise.view.page import LIBRARIES, STATIC
from turnwise.view.runs import FILES, ViewedRun, times

__all__ = ["export"]

_IMAGE = re.compile(r"sha256:([0-9a-f]{64})")
_RELATIVE = re.compile(r'(\bfrom\s*|\bimport\s*|\bimport\()"(\./[^"]+)"')


def export(runs: Sequence[ViewedRun], file: Path, *, most: int = 200, ids: Sequence[str] = ()) -> int:
    """Write the page with these runs to `file`. Returns its size in bytes.

    It has the latest `most` conversations of each run, or those with the given ids. Raises ConfigError if `most` is not positive
    or the file cannot be written, RunError if there is no conversation with one of the ids, or a record cannot be read.
    """
    if most < 1:
        raise ConfigError(f"--most is {most}; it must be at least 1")
    for run in runs:
        for index in run.indexes.values():  # a damaged record is an error here
            index.update()
    parts = [_run(run, most, ids) for run in runs]
    missing = set(ids) - {found for part in parts for columns in part["columns"].values() for found in columns["id"]}
    if missing:
        raise RunError(f"no run has a conversation with the id {min(missing)!r}; turnwise view lists the ids")
    html = _html({"runs": parts, "evaluations": evaluations(runs)})
    try:
        file.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
    return len(html.encode())


def _run(run: ViewedRun, most: int, ids: Sequence[str]) -> dict[str, Any]:
    """The data of a run. The conversations in it are numbered from 0."""
    columns: dict[str, Any] = {}
    conversations: dict[str, dict[int, Any]] = {}
    images: dict[str, str] = {}
    for kind in FILES:
        every = run.indexes[kind].columns()
        numbers = [n for n, name in enumerate(every["id"]) if name in ids] if ids else range(len(every["id"]))[-most:]
        columns[kind] = {name: [values[n] for n in numbers] for name, values in every.items()}
        conversations[kind] = {place: run.conversation(kind, n) for place, n in enumerate(numbers)}
        for name in set(_IMAGE.findall(json.dumps([c.get("messages") for c in conversations[kind].values()]))):
            if (path := run.image(name)) is not None:
                images[name] = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    counts = {kind: len(found) for kind, found in conversations.items()}
    indexed = {kind: {"start": 0, "stop": count, "generation": 0, "ready": True} for kind, count in counts.items()}
    summary = {**run.summary(), "path": run.name, "conversations": counts, "lines": counts, "indexed": indexed}
    return {
        "summary": summary,
        "metrics": {kind: run.metric_table(kind) for kind in FILES},
        "columns": columns,
        "conversations": conversations,
        "timelines": _timelines(run, conversations["train"]),
        "images": images,
    }


def _timelines(run: ViewedRun, conversations: dict[int, Any]) -> dict[str, dict[str, Any]]:
    """The timeline of each step of which a conversation is exported."""
    steps: dict[str, dict[str, Any]] = {}
    for number, record in conversations.items():
        step = record.get("step")
        if str(step) not in steps:
            steps[str(step)] = {"conversations": [], "steps": run.steps_until(step)}
        steps[str(step)]["conversations"].append(times(record, number))
    return steps


def _html(data: dict[str, Any]) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    styles = "\n".join(
        (STATIC / name).read_text(encoding="utf-8") for name in ("vendor/uplot/uPlot.min.css", "style.css")
    )
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", page)
    page = page.replace("</head>", f"<style>{styles}</style>\n</head>")
    imports = json.dumps({"imports": dict(_modules())})
    page = page.replace("{{import_map}}", imports).replace("{{preload}}\n", "")
    # "<" is written as an escape: no text of a conversation can end the element
    inside = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return page.replace(
        '<script type="module" src="static/app.js"></script>',
        f'<script type="application/json" id="export">{inside}</script>\n'
        '<script type="module">import "turnwise:app.js";</script>',
    )


def _modules() -> Iterator[tuple[str, str]]:
    """All scripts by the names under which they are imported, as data addresses. Imports of files become such names."""
    names = {path: name for name, path in LIBRARIES.items()}
    for file in sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".mjs")):
        relative = file.relative_to(STATIC)

        def named(found: re.Match[str], folder: Path = relative.parent) -> str:
            path = (folder / found[2]).as_posix()
            return f'{found[1]}"{names.get(path, f"turnwise:{path}")}"'

        text = _RELATIVE.sub(named, file.read_text(encoding="utf-8"))
        text = re.sub(r"//# sourceMappingURL=.*", "", text)
        address = "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()
        yield names.get(relative.as_posix(), f"turnwise:{relative.as_posix()}"), address
