"""The Python interface in a real Jupyter kernel, where an event loop is running while a cell runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of Jupyter's own libraries

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
