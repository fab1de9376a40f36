"""Several ranks compute the losses, gradients and weights of one process, and go on with what another number of ranks saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.training.sharded.shards import share_out

TESTS = Path(__file__).parent.parent
EXACT = [
    "ppo_clip",
    "ppo_clip_epochs",
    "sync_each",
    "keep_gathered",
    "gspo",
    "cispo",
    "sapo",
    "reinforce",
    "nll",
    "reference",
    "lora_reference",
    "lora_copy",
    "checkpointing",
    "correction",
    "separate_rows",
    "one_micro_batch",
    "clipped",
]
ROUNDED = ["bfloat16", "mixed"]
ON_ONE_RANK = ["ppo_clip", "lora_reference"]


def run_ranks(size: int, model: Path, out: Path, written: Path | str, read: Path | str, *cases: str) -> dict[str, Any]:
    """The results of rank_program.py on `size` ranks."""
    program = [str(TESTS / "cluster" / "rank_program.py"), str(model), str(out), str(written), str(read), *cases]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *program]
    source = TESTS.parent / "src"
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{source}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of one rank, of two ranks, and of one rank that goes on with what two ranks saved."""
    folder = tmp_path_factory.mktemp("ranks")
    one = run_ranks(1, model, folder / "1.json", folder / "of-1", "-", *ON_ONE_RANK)
    two = run_ranks(2, model, folder / "2.json", folder / "of-2", folder / "of-1", *EXACT, *ROUNDED)
    return {"one": one, "two": two, "again": run_ranks(1, model, folder / "3.json", "-", folder / "of-2")}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ranks", "case"), [*(("two", case) for case in EXACT), *(("one", case) for case in ON_ONE_RANK)]
)
def test_ranks_compute_what_one_process_computes(results: dict[str, Any], ranks: str, case: str) -> None:
    result = results[ranks][case]
    actual, expected = result["ranks"], result["one"]
    assert result["gradients"] < 1e-5
    assert result["weights"] < 1e-4  # Adam divides by the gradient's size
    for update, of_one in zip(actual["updates"], expected["updates"], strict=True):
        correction, of_one_correction = update.pop("correction"), of_one.pop("correction")
        assert update.pop("logprobs") == pytest.approx(of_one.pop("logprobs"), abs=1e-5)
        assert update == pytest.approx(of_one, abs=1e-5, rel=1e-5)
        assert correction == pytest.approx(of_one_correction, abs=1e-5, rel=1e-5)
    assert actual["updates"][0]["grad_norm"] > 0
    for name in ("fingerprint", "base", "reference"):
        assert actual[name] == expected[name]
    assert actual["micro_batches"] == expected["micro_batches"]
    assert actual["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-5)
    assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.cluster
@pytest.mark.parametrize("case", ROUNDED)
def test_ranks_in_bfloat16_differ_by_rounding(results: dict[str, Any], case: str) -> None:
    result = results["two"][case]
    actual, expected = (result[name]["updates"][0] for name in ("ranks", "one"))
    assert result["weights"] < 5e-3
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
    assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-3)
    assert actual["tokens"] == expected["tokens"]


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", ["one", "two"])
def test_ranks_and_one_process_go_on_with_each_others_state(results: dict[str, Any], ranks: str) -> None:
    losses = results[ranks]["resumed"]
    assert losses["expected"][0] != losses["expected"][1]
    assert losses["from_one"] == pytest.approx(losses["expected"], abs=1e-6)
    assert losses["in_one"] == pytest.approx(losses["expected"], abs=1e-6)


@pytest.mark.cluster
def test_another_number_of_ranks_goes_on_with_a_saved_state(results: dict[str, Any]) -> None:
    assert results["two"]["from_other_ranks"] == pytest.approx(results["one"]["resumed"]["expected"], abs=1e-6)
    assert results["again"]["from_other_ranks"] == pytest.approx(results["two"]["resumed"]["expected"], abs=1e-6)


@pytest.mark.parametrize(
    ("sizes", "ranks", "shares"),
    [
        ([8, 3, 7, 2, 1], 2, [[0, 3, 4], [2, 1]]),
        ([5], 3, [[0], [], []]),
        ([], 2, [[], []]),
        ([4, 4, 4, 4], 4, [[0], [1], [2], [3]]),
    ],
)
def test_micro_batches_are_shared_out_in_the_fewest_rounds(
    sizes: list[int], ranks: int, shares: list[list[int]]
) -> None:
    assert share_out(sizes, ranks) == shares
