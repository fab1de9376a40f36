"""A critic on several ranks has the values, losses and gradients of one process, and goes on with what another number saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parent.parent
EXACT = ["all weights", "lora", "clip", "one micro-batch"]


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of two ranks, and of one rank that goes on with what two ranks saved."""
    folder = tmp_path_factory.mktemp("critic")
    generator = torch.Generator().manual_seed(1)
    width = AutoConfig.from_pretrained(model).hidden_size
    (folder / "head").mkdir()
    head = {"weight": torch.randn((1, width), generator=generator) * 0.3, "bias": torch.tensor([0.25])}
    save_file(head, folder / "head" / "value_head.safetensors")

    def run(size: int, name: str, written: Path | str, read: Path | str, *cases: str) -> Any:
        program = [
            TESTS / "cluster" / "critic_program.py",
            model,
            folder / "head",
            folder / name,
            written,
            read,
            *cases,
        ]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        source = TESTS.parent / "src"
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{source}", "OMP_NUM_THREADS": "1"}
        command = [*launcher, *(str(word) for word in program)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads((folder / name).read_text())

    two = run(2, "two.json", folder / "of-2", "-", *EXACT, "bfloat16")
    return {"two": two, "one": run(1, "one.json", "-", folder / "of-2")}


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_compute_what_one_process_computes(results: dict[str, Any], case: str) -> None:
    result = results["two"][case]
    actual, expected = result["ranks"], result["one"]
    assert result["gradients"] < 1e-5
    assert actual["values"] == pytest.approx(expected["values"], abs=1e-5)
    assert max(expected["values"]) - min(expected["values"]) > 0.1
    for update, of_one in zip(actual["updates"], expected["updates"], strict=True):
        assert update == pytest.approx(of_one, abs=1e-4, rel=1e-4)
    assert actual["base"] == expected["base"]
    assert actual["micro_batches"] == expected["micro_batches"]


def test_two_ranks_in_bfloat16_differ_by_rounding(results: dict[str, Any]) -> None:
    actual, expected = (results["two"]["bfloat16"][name] for name in ("ranks", "one"))
    assert actual["values"] == pytest.approx(expected["values"], abs=0.05)
    assert actual["updates"][0] == pytest.approx(expected["updates"][0], rel=0.1, abs=0.01)


@pytest.mark.parametrize("kind", ["all", "lora"])
def test_two_ranks_one_rank_and_one_process_go_on_with_each_others_critic(results: dict[str, Any], kind: str) -> None:
    losses = results["two"]["resumed"][kind]
    assert losses["expected"][0] != losses["expected"][1]
    for name in ("from_one", "in_one"):
        assert losses[name] == pytest.approx(losses["expected"], abs=1e-5)
    assert results["one"]["from_other_ranks"][kind] == pytest.approx(losses["expected"], abs=1e-5)
