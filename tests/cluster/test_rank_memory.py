"""The predicted memory of a rank is what each of two ranks needs, with and without the embedded engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from turnwise.doctor.memory import Workload
from turnwise.options.schema import Config
from turnwise.planning.memory import rank_memory

pytestmark = pytest.mark.cluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("kind", "fsdp"), [("all", ["param_dtype=bfloat16"]), ("lora", [])])
def test_the_prediction_is_what_each_rank_needs(kind: str, fsdp: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from memory import CONVERSATIONS, PROMPT_TOKENS, TOKENS, measure_ranks, options, shape_of  # type: ignore[import-not-found]

    args = argparse.Namespace(
        size="30m",
        dtype="float32",
        gradient_checkpointing=False,
        micro_batches=2,
        micro_batch_tokens=0,
        ranks=2,
        fsdp=fsdp,
    )
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "src"))
    measured = [found["gib"] for found in measure_ranks(kind, args)]
    config = Config.model_validate(options(args.size, kind, args))
    workload = Workload(conversations=CONVERSATIONS, tokens=TOKENS, prompt_tokens=PROMPT_TOKENS)
    predicted = [rank_memory(config, shape_of(args.size), workload, 2, rank=rank).gib for rank in range(2)]
    assert predicted == pytest.approx(measured, rel=0.15)
