"""docs/notebook.ipynb runs from top to bottom, and the model learns in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from run_notebook import NOTEBOOK, ROOT, run


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of jupyter's packages
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # this tree, whatever else is installed
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    cells = [cell for cell in run(tmp_path / "out.ipynb").cells if cell.cell_type == "code"]
    (trained,) = [cell for cell in cells if "from turnwise.api import train" in cell.source]
    before, after = map(float, re.findall(r"\d\.\d+", trained.outputs[-1].data["text/plain"]))
    assert (before, after) == (pytest.approx(0.49, abs=0.1), pytest.approx(0.92, abs=0.08))
    stored = NOTEBOOK.read_text(encoding="utf-8")
    assert stored.count('"output_type"') >= 7  # the page shows the outputs
    assert stored.count('"image/png"') == 1  # the curve
    assert '"ename"' not in stored
