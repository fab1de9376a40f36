"""Takes the libraries of the viewer's page from the npm registry: `python scripts/vendor_web.py`, or `--check` without network.

Each library is pinned by its version and by the checksum that the registry publishes for it. The files are copied unchanged into
src/turnwise/view/static/vendor, with the library's licence. `vendor.json` there lists version, licence and the sha256 of each
file; `--check` compares the files with it. Neither users nor developers need node.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import shutil
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "src" / "turnwise" / "view" / "static" / "vendor"
REGISTRY = "https://registry.npmjs.org"


@dataclass(frozen=True)
class Library:
    """A package of the registry, and which of its files are used."""

    package: str
    version: str
    licence: str
    integrity: str
    """The checksum of the package, as the registry writes it."""
    files: dict[str, str]
    """Path in the package -> name in the library's folder."""

    @property
    def folder(self) -> str:
        return self.package.rpartition("/")[2]


LIBRARIES = [
    Library(
        "preact",
        "11.2.0",
        "MIT",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.mjs", "hooks/dist/hooks.mjs": "hooks.mjs", "LICENSE": "LICENSE"},
    ),
    Library(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.mjs": "htm.mjs", "LICENSE": "LICENSE"},
    ),
    Library(
        "uplot",
        "1.6.32",
        "MIT",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.esm.js": "uPlot.esm.js", "dist/uPlot.min.css": "uPlot.min.css", "LICENSE": "LICENSE"},
    ),
    Library(
        "diff",
        "9.0.0",
        "BSD-3-Clause",
        "sha512-svtcdpS8CgJyqAjEQIXdb3OjhFVVYjzGAPO8WGCmRbrml64SPw/jJD4GoE98aR7r25A0XcgrK3F02yw9R/vhQw==",
        {"libesm/diff/base.js": "base.js", "libesm/diff/array.js": "array.js", "LICENSE": "LICENSE"},
    ),
    Library(
        "@tanstack/virtual-core",
        "3.19.11",
        "MIT",
        "sha512-/5iHb0RHBvj8Di59FDs4ESNm45jls33aZAi4zccVXZjc/6ZvwQP6nzEYeT6weXjTf9E6/vrp2JhYWRyO+ZP13A==",
        {
            **{
                f"dist/esm/{name}.js": f"{name}.js"
                for name in ("index", "utils", "lazy-measurements", "scroll-classifier", "ios-gesture")
            },
            "LICENSE": "LICENSE",
        },
    ),
]


def download(library: Library) -> dict[str, bytes]:
    """The used files of a library. Exits if the package is not the one that is pinned."""
    name = library.package.rpartition("/")[2]
    url = f"{REGISTRY}/{library.package}/-/{name}-{library.version}.tgz"
    with urllib.request.urlopen(url, timeout=60) as answer:
        package = answer.read()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
    if integrity != library.integrity:
        sys.exit(f"{url} has the checksum {integrity}; pinned is {library.integrity}. Do not use the package")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        contents = {}
        for path, target in library.files.items():
            member = archive.extractfile(f"package/{path}")
            assert member is not None, path
            contents[target] = member.read()
    return contents


def write() -> None:
    """Download all libraries, and replace the folder."""
    downloads = [download(library) for library in LIBRARIES]
    shutil.rmtree(VENDOR, ignore_errors=True)
    about = {}
    for library, files in zip(LIBRARIES, downloads, strict=True):
        folder = VENDOR / library.folder
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        about[library.folder] = {
            "package": library.package,
            "version": library.version,
            "licence": library.licence,
            "integrity": library.integrity,
            "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
        }
    (VENDOR / "vendor.json").write_text(json.dumps(about, indent=2) + "\n")


def check() -> list[str]:
    """What differs from vendor.json and from the pinned versions."""
    about = json.loads((VENDOR / "vendor.json").read_text())
    problems = []
    if (named := set(about)) != (pinned := {library.folder for library in LIBRARIES}):
        problems.append(f"vendor.json names {sorted(named)}; pinned are {sorted(pinned)}")
    for library in LIBRARIES:
        entry = about.get(library.folder, {})
        if (entry.get("version"), entry.get("integrity")) != (library.version, library.integrity):
            problems.append(
                f"{library.package} is pinned to {library.version}; the files are of {entry.get('version')}"
            )
        present = {path.name for path in (VENDOR / library.folder).glob("*")}
        for name in sorted(present | set(library.files.values())):
            path = VENDOR / library.folder / name
            checksum = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
            if checksum != entry.get("sha256", {}).get(name):
                problems.append(f"{path} was changed, added or removed")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the files with vendor.json, without network")
    if not parser.parse_args().check:
        write()
    if problems := check():
        sys.exit("\n".join([*problems, "run: python scripts/vendor_web.py"]))
