"""Runs docs/notebook.ipynb from top to bottom and stores the outputs: `python scripts/run_notebook.py [OUT]`.

Needs `pip install 'turnwise[dev]'`. Without OUT, the notebook itself is written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def run(out: Path, *, timeout: float = 600, steps: int | None = None) -> nbformat.NotebookNode:
    """Execute all cells in a new kernel, and write the notebook with its outputs. Raises CellExecutionError.

    `steps`: another number of training steps than the notebook's.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if steps is not None:
        for cell in notebook.cells:
            cell.source = re.sub(r'"steps": \d+', f'"steps": {steps}', cell.source)
    client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(ROOT)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times: they would change the file in each run
        if cell.cell_type == "code":  # warnings and logs, which depend on the machine, are not part of the page
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, out)
    return notebook


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK)
