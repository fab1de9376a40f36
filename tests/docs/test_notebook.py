"""The notebook of the site runs and learns, and the Python interface works in a Jupyter kernel."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from run_notebook import NOTEBOOK, ROOT, run

# docs/notebook.ipynb runs from top to bottom, and the model learns in it.


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of jupyter's packages
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
