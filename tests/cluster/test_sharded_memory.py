"""A rank needs the memory of its part of a model while the model is loaded, and not that of the complete model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parent.parent
MEGABYTE = 2**10
"""Kilobytes."""


def peaks(path: Path, out: Path, ranks: int) -> list[int]:
    """The peak of the memory of each process in kilobytes, beyond its memory before the model was loaded."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    program = [
        str(TESTS / "cluster" / "memory_program.py"),
        str(path.parent / "small"),
        str(path),
        "sharded" if ranks > 1 else "complete",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launcher, *program], env=environment, check=True, timeout=600)
    return [int(Path(f"{out}{rank}").read_text()) for rank in range(ranks)]


def test_each_of_two_ranks_has_half_of_the_model_and_a_layer_in_memory(tmp_path: Path) -> None:
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    config = Qwen2Config(**sizes, num_hidden_layers=16, num_key_value_heads=8, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    size = sum(parameter.numel() for parameter in model.parameters()) * 4 // 2**10
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) * 4 // 2**10
    model.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    small = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
    Qwen2ForCausalLM(small).save_pretrained(tmp_path / "small")
    complete = peaks(tmp_path / "model", tmp_path / "complete", 1)[0]
    assert complete > size
    for peak in peaks(tmp_path / "model", tmp_path / "rank", 2):
        # gloo has the parts of the layer that is gathered and of the next one beside the complete layers
        assert peak < size / 2 + 5 * layer
        assert peak < 0.75 * complete
