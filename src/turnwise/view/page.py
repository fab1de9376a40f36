"""The files of the page: its scripts and styles, and the libraries that come with them (`static/vendor`).

The page is made of ES modules, without a build step. The names by which they import libraries are in the import map.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["LIBRARIES", "STATIC", "import_map", "page"]

STATIC = (Path(__file__).parent / "static").resolve()
LIBRARIES = {
    "preact": "vendor/preact/preact.mjs",
    "preact/hooks": "vendor/preact/hooks.mjs",
    "htm": "vendor/htm/htm.mjs",
    "uplot": "vendor/uplot/uPlot.esm.js",
    "@tanstack/virtual-core": "vendor/virtual-core/index.js",
}
"""The file of each library, by the name under which the scripts import it."""


def import_map() -> str:
    """The import map, as the text between the tags."""
    return json.dumps({"imports": {name: f"./static/{path}" for name, path in LIBRARIES.items()}})


def page() -> str:
    """The HTML of the page as the server sends it."""
    scripts = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".mjs"))
    # all scripts are asked for at once, not only when the script that imports them has arrived
    links = (f'<link rel="modulepreload" href="static/{path.relative_to(STATIC).as_posix()}">' for path in scripts)
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    return text.replace("{{import_map}}", import_map()).replace("{{preload}}", "\n".join(links))
