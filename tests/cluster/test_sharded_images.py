"""Two ranks compute the losses, gradients and weights of one process on conversations with images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.vision import save_vision_model

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("images")
    path = save_vision_model(folder / "model")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(TESTS / "cluster" / "image_program.py"), str(path), str(folder / "results.json")]
    source = TESTS.parent / "src"
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{source}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, *program], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    "case",
    [
        "images on both ranks",
        "images on one rank",
        "images on one rank, gradients added up after each micro-batch",
        "no images",
    ],
)
def test_ranks_compute_what_one_process_computes_with_images(results: dict[str, Any], case: str) -> None:
    result = results[case]
    assert result["ranks"] == pytest.approx(result["one"], abs=1e-5, rel=1e-5)
    assert result["gradients"] < 1e-5
    assert result["weights"] < 1e-4  # Adam divides by the gradient's size
    assert (result["vision"] > 0) == (case != "no images")
