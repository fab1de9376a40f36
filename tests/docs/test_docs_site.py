"""The site of the documentation, and its notebook."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_site import MOVED, ROOT, notebook_page, outside_fences, problems, redirect, site_pages, stage

# The script that builds the documentation site: its links, and what it refuses.


def a_repository(folder: Path, **pages: str) -> Path:
    """A repository with these pages of docs/, a recipe and a picture."""
    for name in ("docs/images", "recipes"):
        (folder / name).mkdir(parents=True)
    (folder / "docs" / "images" / "p.svg").write_text("<svg/>")
    (folder / "recipes" / "quiz.yaml").write_text("train: {steps: 1}\n")
    (folder / "recipes" / "quiz.md").write_text("# Quiz\n\n[All](../docs/all.md)\n")
    for name, text in pages.items():
        (folder / "docs" / f"{name}.md").write_text(text)
    return folder


def test_links_of_the_repository_become_links_of_the_site(tmp_path: Path) -> None:
    text = "# All\n\n[r](../recipes/quiz.md#a), [s](../recipes/quiz.yaml), ![p](images/p.svg), [w](https://x.org/a), [h](#all)\n"
    root = a_repository(tmp_path / "repository", all=text + "\n```\n[in code](../nowhere.md)\n```\n")
    stage(root, tmp_path / "site")
    page = (tmp_path / "site" / "all.md").read_text()
    assert "[r](recipes/quiz.md#a), [s](source/recipes/quiz.yaml.md), ![p](images/p.svg)" in page
    assert "[w](https://x.org/a), [h](#all)" in page
    assert "[in code](../nowhere.md)" in page
    assert "[All](../all.md)" in (tmp_path / "site" / "recipes" / "quiz.md").read_text()
    assert "train: {steps: 1}" in (tmp_path / "site" / "source" / "recipes" / "quiz.yaml.md").read_text()


def test_a_link_to_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    root = a_repository(tmp_path / "repository", all="[x](../recipes/other.yaml)")
    with pytest.raises(SystemExit, match=r"docs/all\.md: the link \.\./recipes/other\.yaml leads to no file"):
        stage(root, tmp_path / "site")


def test_code_blocks_are_left_as_they_are() -> None:
    assert outside_fences("a\n```\na\n```\na\n", lambda text: text.replace("a", "b")) == "b\n```\na\n```\nb\n"


def test_problems_of_a_built_site_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>'
        '<a href="https://x.org">4</a><a href="#top">5</a><script src="https://cdn.org/x.js"></script>'
        '<link rel="stylesheet" href="//fonts.org/f.css"><img src="gone.png"><pre class="mermaid">x</pre>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    (tmp_path / "style.css").write_text("@import 'https://fonts.org/g.css'; a { background: url(data:image/png;x) }")
    assert [problem.partition(": the site")[0] for problem in problems(tmp_path)] == [
        "a.html loads https://cdn.org/x.js",
        "a.html loads //fonts.org/f.css",
        "a.html loads gone.png, which does not exist",
        "a.html loads https://unpkg.com/mermaid (a mermaid block)",
        "a.html: the link b.html#gone leads to no anchor of b.html",
        "a.html: the link c.html leads to no file",
        "style.css loads https://fonts.org/g.css",
    ]


def test_the_address_of_a_page_that_moved_leads_to_its_new_place(tmp_path: Path) -> None:
    (tmp_path / "tools.html").write_text('<h2 id="mcp">MCP</h2>')
    redirect(tmp_path, {"guides/mcp": "tools#mcp", "search": "tools", "old": "tools#gone"})
    assert 'content="0; url=../tools.html#mcp"' in (tmp_path / "guides" / "mcp.html").read_text()
    assert list(problems(tmp_path)) == ["old.html: the link tools.html#gone leads to no anchor of tools.html"]
    pages = set(site_pages(ROOT).values())
    assert {f"{old}.md" for old in MOVED} & pages == set()
    assert {f"{new.partition('#')[0]}.md" for new in MOVED.values()} <= pages


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path: Path) -> None:
    picture = base64.b64encode(b"png").decode()
    cells = [
        {"cell_type": "markdown", "source": ["# T\n", "text"]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [{"data": {"text/plain": ["2"]}}, {"data": {"image/png": picture, "text/plain": ["<Figure>"]}}],
        },
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    page, images = notebook_page(tmp_path / "n.ipynb")
    assert page == "# T\ntext\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n![Output of the cell](n-0.png)\n"
    assert images == {"n-0.png": b"png"}


def test_the_pages_of_the_repository_can_be_staged(tmp_path: Path) -> None:
    stage(ROOT, tmp_path / "site")
    for place in site_pages(ROOT).values():
        assert (tmp_path / "site" / place).is_file(), place


@pytest.mark.slow
def test_the_site_is_built_and_a_missing_anchor_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs turnwise[docs], as `make docs` installs it")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnot_in_nav")[0]
    (tmp_path / "mkdocs.yml").write_text(config)
    root = a_repository(tmp_path / "repository", all="# All\n\n[x](index.md#gone)\n", index="# Home\n")
    stage(root, tmp_path / "build" / "site-source")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "'index.md#gone', but the doc 'index.md' does not contain an anchor '#gone'" in done.stderr


# The notebook of the site runs and learns, and the Python interface works in a Jupyter kernel.


# docs/notebook.ipynb runs from top to bottom, and the model learns in it.


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of jupyter's packages
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from run_notebook import NOTEBOOK, run

    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # this tree, whatever else is installed
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    # a third of its steps, after which much is learnt already; that the demo learns all of it is shown in test_recipes.py
    cells = [cell for cell in run(tmp_path / "out.ipynb", steps=8).cells if cell.cell_type == "code"]
    (trained,) = [cell for cell in cells if "from turnwise.api import train" in cell.source]
    before, after = map(float, re.findall(r"\d\.\d+", trained.outputs[-1].data["text/plain"]))
    assert before == pytest.approx(0.49, abs=0.1)
    assert after > before + 0.1
    stored = NOTEBOOK.read_text(encoding="utf-8")
    assert stored.count('"output_type"') >= 7  # the page shows the outputs
    assert stored.count('"image/png"') == 1  # the curve
    assert '"ename"' not in stored


# The Python interface in a real Jupyter kernel, where an event loop is running while a cell runs.


CELLS = [
    """
import asyncio
assert asyncio.get_running_loop().is_running()
import turnwise
from turnwise import Opening, Reply, environment

@environment
async def echo(row):
    turn = yield Opening(messages=row.messages)
    yield Reply(reward=float(row["answer"] in turn.text), done=True)

def tries(completion: str) -> float:
    return -len(completion) / 100
""",
    """
result = turnwise.train(
    model=MODEL, rows=({"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)), environment=echo, reward=[tries],
    train={"steps": 2, "batch_size": 2, "group_size": 2}, limits={"tokens_per_turn": 4}, output=OUTPUT,
)
print([line["step"] for line in result.metrics], len(result.trajectories))
""",
    """
run = turnwise.evaluate(models=[result], model=MODEL, eval_rows=[{"prompt": "1+1?", "answer": "2"}], environment=echo,
                        limits={"tokens_per_turn": 4}, output=OUTPUT, progress=False)
print(run.result.rows, list(run.models))
""",
    "print(len(turnwise.record.to_pandas(result.directory)))",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_notebook_trains_and_evaluates(model: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    first = f"import sys; sys.path[:0] = {sys.path!r}\nMODEL, OUTPUT = {str(model)!r}, {str(tmp_path / 'run')!r}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (first, *CELLS)])
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert texts[2].splitlines()[-1] == "[1, 2] 8"
    assert texts[3].splitlines()[-1] == "1 ['run']"
    assert texts[4].splitlines()[-1] == "8"
