"""Builds the documentation site: `python scripts/docs_site.py`. Needs `pip install 'turnwise[docs]'`.

1. `stage` copies the pages of docs/, and the pages of other folders that belong to the site, to build/site-source. A link to a
   file of the repository becomes a link to a page of the site; a recipe or another source file becomes a page with its text.
2. mkdocs builds build/site from this directory in strict mode: a broken link, a missing anchor or a page that is not in the
   navigation is an error.
3. `problems` reads the pages that mkdocs wrote: every link leads to a file and an anchor of the site, and no page loads anything
   from another server.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
OUTSIDE = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "demo/README.md": "demo.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that are not in docs/: path in the repository -> path in the site. Pages of recipes/ keep their path."""

MOVED = {
    "guides/environment": "environments#your-own-environment",
    "guides/simulated_user": "environments#simulated-users",
    "guides/tool": "tools#your-own-tool",
    "guides/mcp": "tools#mcp",
    "search": "tools#document-search",
    "guides/reward": "rewards#a-reward-function",
    "guides/thinking": "tokens#thinking",
    "guides/images": "multimodal",
    "guides/gsm8k": "one_gpu",
    "guides/lora": "one_gpu#4-larger-models-lora",
    "guides/vllm": "engines#vllm",
    "guides/sglang": "engines#sglang",
    "trained_model": "engines#a-trained-model",
    "guides/asynchronous": "pipeline",
    "guides/evaluation": "evaluation",
    "guides/from_verl": "verl",
    "guides/from_swift": "swift",
    "guides/from_trl": "trl",
    "slurm": "deploy#slurm",
    "kuberay": "deploy#kubernetes-with-kuberay",
    "api": "python#reference",
    "plan": "memory#planning-a-run",
    "testing": "contributing",
    "templates": "benchmarks#chat-templates",
    "recipes/gsm8k_tool": "recipes/gsm8k",
    "recipes/gsm8k_interaction": "recipes/gsm8k",
}
"""Pages that were joined with another page: old path in the site -> new path and anchor. The old address leads to the new one."""

_FENCE = re.compile(r"^( *)```.*?^\1```[^\n]*\n?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
_LANGUAGES = {".cff": "yaml", ".yaml": "yaml", ".py": "python", ".json": "json", ".jsonl": "json", ".ipynb": "json"}


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The page with `change` applied to everything except its fenced code blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def site_pages(root: Path) -> dict[str, str]:
    """Path in the repository -> path in the site, of all written pages."""
    pages = {f"docs/{path}": path for path in _relative(root / "docs", "*.md")}
    pages |= {f"recipes/{path}": f"recipes/{path}" for path in _relative(root / "recipes", "*.md")}
    return pages | {path: target for path, target in OUTSIDE.items() if (root / path).is_file()}


def stage(root: Path, target: Path) -> None:
    """Write the source of the site. Raises SystemExit for a link to a file that does not exist."""
    shutil.rmtree(target, ignore_errors=True)
    pages = site_pages(root)
    shutil.copytree(root / "docs", target, ignore=shutil.ignore_patterns("*.md", "*.ipynb"))
    sources: dict[str, str] = {}
    texts = {place: (root / path).read_text(encoding="utf-8") for path, place in pages.items()}
    origins = {place: path for path, place in pages.items()}
    for notebook in _relative(root / "docs", "*.ipynb"):
        place = str(Path(notebook).with_suffix(".md"))
        texts[place], images = notebook_page(root / "docs" / notebook)
        pages[f"docs/{notebook}"], origins[place] = place, f"docs/{notebook}"
        for name, content in images.items():
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            (target / place).with_name(name).write_bytes(content)
            pages[f"docs/{Path(notebook).with_name(name).as_posix()}"] = Path(place).with_name(name).as_posix()
    for place, text in texts.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        links = _SiteLinks(root, pages, sources, origins[place], place)
        (target / place).write_text(outside_fences(text, links.rewrite), encoding="utf-8")
    for path, place in sources.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / place).write_text(source_page(root / path, path), encoding="utf-8")


class _SiteLinks:
    """Rewrites the links of one page. Files that become pages with their source are added to `sources`."""

    def __init__(self, root: Path, pages: dict[str, str], sources: dict[str, str], path: str, place: str) -> None:
        self.root, self.pages, self.sources, self.path, self.place = root, pages, sources, path, place

    def rewrite(self, text: str) -> str:
        return _LINK.sub(self._target, text)

    def _target(self, match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.path), unquote(match[1])))
        target = self.pages.get(path)
        if target is None and not (self.root / path).exists():
            raise SystemExit(f"{self.path}: the link {match[1]} leads to no file of the repository")
        if target is None and path.startswith("docs/"):
            target = path.removeprefix("docs/")  # a picture
        if target is None and (self.root / path).suffix in _LANGUAGES:
            target = self.sources[path] = f"source/{path}.md"
        if target is None:
            raise SystemExit(f"{self.path}: {match[1]} is no page, no picture and no source file with a known ending")
        return posixpath.relpath(target, posixpath.dirname(self.place) or ".")


def source_page(file: Path, path: str) -> str:
    """A page with the text of a source file. Long data files are cut after 20 lines."""
    lines = file.read_text(encoding="utf-8").splitlines()
    note = ""
    if file.suffix == ".jsonl" and len(lines) > 20:
        note = f"\nThe first 20 of {len(lines):,} lines.\n"
        lines = lines[:20]
    fence = "`" * 4
    return f"# {path}\n{note}\n{fence}{_LANGUAGES[file.suffix]}\n" + "\n".join(lines) + f"\n{fence}\n"


def notebook_page(file: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, with its stored outputs, and the pictures of the page by file name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{file.stem}-{len(images)}.png"
                images[name] = b64decode("".join(data["image/png"]))
                parts.append(f"![Output of the cell]({name})")
            else:
                parts.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n", images


def redirect(site: Path, moved: dict[str, str]) -> None:
    """Write a page at each old address that leads to the new one: `{"guides/mcp": "tools#mcp"}`."""
    for old, new in moved.items():
        name, _, anchor = new.partition("#")
        address = posixpath.relpath(f"{name}.html", posixpath.dirname(old) or ".") + (f"#{anchor}" if anchor else "")
        page = site / f"{old}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            f'<!doctype html><title>Moved</title><meta http-equiv="refresh" content="0; url={address}">'
            f'<a href="{address}">This page has moved.</a>\n',
            encoding="utf-8",
        )


class _Page(HTMLParser):
    """The anchors, links and loaded files of one page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("prev", "next", "canonical"):
            self.loads.append(values.get("href", ""))
        if "src" in values:
            self.loads.append(values["src"])
        if "mermaid" in values.get("class", "").split():
            self.loads.append("https://unpkg.com/mermaid (a mermaid block)")


def problems(site: Path) -> Iterator[str]:
    """What is wrong in a built site: links and anchors without a target, and files from other servers."""

    @cache
    def page(path: Path) -> _Page:
        return _Page(path.read_text(encoding="utf-8"))

    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site)
        for url in page(path).loads:
            if _is_external(url):
                yield f"{name} loads {url}: the site must work without a network"
            elif url and not url.startswith("data:") and path.name != "404.html" and not _file(path, url).is_file():
                yield f"{name} loads {url}, which does not exist"
        if path.name == "404.html":
            continue  # its links begin at the root of a server
        for url in page(path).links:
            if _is_external(url) or urlsplit(url).scheme:
                continue
            target, anchor = _file(path, url), unquote(urlsplit(url).fragment)
            if not target.is_file():
                yield f"{name}: the link {url} leads to no file"
            elif anchor and target.suffix == ".html" and anchor not in page(target).ids | {"__comments"}:
                yield f"{name}: the link {url} leads to no anchor of {target.relative_to(site)}"
    for path in sorted(site.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')]+)", path.read_text(encoding="utf-8")):
            if _is_external(url):
                yield f"{path.relative_to(site)} loads {url}: the site must work without a network"


def _file(page: Path, url: str) -> Path:
    path = unquote(urlsplit(url).path)
    target = (page.parent / path).resolve() if path else page
    return target / "index.html" if target.is_dir() else target


def _is_external(url: str) -> bool:
    return url.startswith("//") or urlsplit(url).scheme in ("http", "https")


def _relative(folder: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(pattern))


def main() -> int:
    """Build the site. Returns the exit status."""
    stage(ROOT, SOURCE)
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    # the variable: without a notice of the theme about the end of its maintenance in 2027
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False)
    if done.returncode:
        return done.returncode
    api = SITE / "python.html"  # docstrings introduce an example by two colons, as in reStructuredText
    api.write_text(api.read_text(encoding="utf-8").replace("::</p>", ":</p>"), encoding="utf-8")
    redirect(SITE, MOVED)
    wrong = list(problems(SITE))
    for problem in wrong:
        print(problem, file=sys.stderr)
    if not wrong:
        print(f"{len(list(SITE.rglob('*.html')))} pages: {SITE / 'index.html'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
