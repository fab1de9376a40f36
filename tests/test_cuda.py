"""On a CUDA device: the engine and the trainer are one there too. Skipped where there is none."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import test_train
from support.tiny import BLOCKS_OF_4_BITS, save_model, save_rows, tiny_model
from support.vision import save_picture_recipe, save_vision_model
from training import test_vision
from turnwise.models.kernels import use_kernels
from turnwise.training.flash_tree import problem_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    options = {
        "model": {"path": str(save_model(tmp_path / "model")), "device": "cuda", "dtype": "float32"},
        "data": {"train": str(save_rows(tmp_path / "train.jsonl"))},
        "environment": f"{test_train.PLACES}:low_bytes",
        "limits": {"turns": 3, "tokens_per_turn": 8},
        "train": {"steps": 3, "batch_size": 3, "group_size": 4, "lr": 0.01},
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(options))
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ([], 1e-3),
        (["train.share_prompts=never", "train.micro_batch_tokens=100"], 1e-3),
        (["train.max_staleness=1"], None),
        (["model.dtype=bfloat16"], 0.3),
        (["loss.kl_coef=0.1", "loss.entropy_coef=0.01", "train.ppo_epochs=2", "train.minibatches=2"], None),
        (["model.autocast=true"], 0.3),
        (["model.lora.rank=4"], 1e-3),
        (["credit=gae"], 1e-3),
        (["model.lora.rank=4", "credit=gae"], 1e-3),
        (["sampling.top_p=0.9", "sampling.temperature=0.7"], 1e-3),
        (["sampling.top_k=5"], 1e-3),
        (["model.gradient_checkpointing=true"], 1e-3),
        (["train.optimizer.name=adafactor"], 1e-3),
        (["model.dtype=bfloat16", "train.optimizer.master_weights=kahan"], 0.3),
        (["model.dtype=bfloat16", "train.optimizer.grad_accum_dtype=float32"], 0.3),
        (["model.dtype=bfloat16", "train.optimizer.master_weights=stochastic_rounding"], 0.3),
        (["model.dtype=bfloat16", "train.optimizer.offload=cpu"], 0.3),
        (["model.dtype=bfloat16", "train.optimizer.offload=sampling"], 0.3),
    ],
)
def test_trainer_and_engine_agree_on_every_token(
    words: Path, tmp_path: Path, options: list[str], apart: float | None
) -> None:
    made = test_train.run(words, *options)
    assert next(made.learner.model.parameters()).device.type == "cuda"
    for metrics in test_train.lines(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["tokens/trained"] > 0
        assert metrics["failed"] == 0
        if apart is not None:
            assert metrics["ratio/max_deviation"] < apart


@pytest.mark.parametrize(
    "options", [[], ["model.lora.rank=4"], ["model.dtype=bfloat16"], ["model.gradient_checkpointing=true"]]
)
def test_fused_kernels(words: Path, tmp_path: Path, options: list[str]) -> None:
    pytest.importorskip("liger_kernel")
    test_train.run(words, "model.kernels=liger", *options)
    for metrics in test_train.lines(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["failed"] == 0
        assert metrics["ratio/max_deviation"] < (0.3 if "model.dtype=bfloat16" in options else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_take_less_time_and_memory(dtype: torch.dtype) -> None:
    """A layer of the sizes of Qwen3-0.6B, 8,192 tokens: the same gradient, faster, with less memory."""
    pytest.importorskip("liger_kernel")
    options = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    plain = tiny_model(**options, head_dim=128, max_position_embeddings=8192).to("cuda", dtype)
    fused = copy.deepcopy(plain)
    use_kernels(fused, "liger", torch.device("cuda"))
    ids = torch.arange(8192, device="cuda")[None] % 250
    found: dict[str, tuple[float, int, torch.Tensor]] = {}
    for name, model in (("plain", plain), ("fused", fused)):
        for _ in range(3):
            model.zero_grad()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start.record()
            model.model(ids, use_cache=False)[0].float().square().mean().backward()
            end.record()
            torch.cuda.synchronize()
        gradient = torch.cat([one.grad.flatten().float() for one in model.parameters() if one.grad is not None])
        found[name] = (start.elapsed_time(end), torch.cuda.max_memory_allocated() - before, gradient)
    (slow, much, right), (fast, little, gradient) = found["plain"], found["fused"]
    print(f"{dtype}: {fast:.1f} instead of {slow:.1f} ms, {little / 2**20:.0f} instead of {much / 2**20:.0f} MiB")
    assert (gradient - right).norm() < (2e-2 if dtype == torch.bfloat16 else 1e-3) * right.norm()
    assert fast < slow
    assert little < much


def test_random_weights_learn_what_is_rewarded(words: Path, tmp_path: Path) -> None:
    test_train.run(words, "train.steps=12", "train.batch_size=6", "train.group_size=8", "train.lr=0.02")
    rewards = [one["reward/mean"] for one in test_train.lines(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.5


def test_a_run_goes_on_from_its_checkpoint(words: Path, tmp_path: Path) -> None:
    test_train.run(words, "train.steps=2", "checkpoint.every=1")
    test_train.run(words, "train.steps=4", "checkpoint.every=1", "resume=auto")
    assert [one["step"] for one in test_train.lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("options", [[], ["cluster.launcher=local", "cluster.trainers=1"]])
def test_a_run_goes_on_on_another_device(words: Path, tmp_path: Path, options: list[str]) -> None:
    """What a CPU, or a rank, has saved: AdamW's number of steps must come to the GPU."""
    before = options or ["model.device=cpu"]
    command = [sys.executable, "-m", "turnwise", "train", str(words), "train.steps=1", "checkpoint.every=1", *before]
    source = str(Path(test_train.__file__).parents[1] / "src")
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": source})
    test_train.run(words, "train.steps=3", "checkpoint.every=1", "resume=auto")
    assert [one["step"] for one in test_train.lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_adamw_in_8_bits(words: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    test_train.run(words, "train.optimizer.name=adamw_8bit")
    assert all(one["failed"] == 0 for one in test_train.lines(tmp_path / "run" / "metrics.jsonl"))


def test_weights_in_4_bits(words: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = save_model(tmp_path / "wide", **BLOCKS_OF_4_BITS)
    options = [f"model.path={model}", "model.quantization.bits=4", "model.lora.rank=4", "checkpoint.every=1"]
    test_train.run(words, *options, "train.steps=1")
    test_train.run(words, *options, "train.steps=2", "resume=auto")
    metrics = test_train.lines(tmp_path / "run" / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    # one row in decoding, many in training: bitsandbytes has a kernel for each
    assert all(one["failed"] == 0 and one["ratio/max_deviation"] < 1e-2 for one in metrics)


def test_the_generic_pass_of_the_engine(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.engines.local.fused.unsupported_reason", lambda model: "the generic pass is tried")
    test_train.run(words)
    for metrics in test_train.lines(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["ratio/max_deviation"] < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_are_shared(words: Path, dtype: str) -> None:
    made = test_train.run(words, f"model.dtype={dtype}", "train.steps=1")
    assert made.learner.requirements.share_prompts


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(16, 8, 128), (14, 2, 64), (9, 3, 64), (8, 1, 256)])
def test_the_flash_kernel_computes_trees(heads: int, key_heads: int, size: int) -> None:
    assert problem_of(torch.device("cuda", 0), torch.bfloat16, heads, key_heads, size) is None


def test_images_are_learnt_from(tmp_path: Path) -> None:
    test_vision.run(save_picture_recipe(tmp_path, save_vision_model(tmp_path / "model"), device="cuda"))
    for metrics in test_vision.lines(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["tokens/trained"] > 0
        assert metrics["failed"] == 0
        assert metrics["ratio/max_deviation"] < 1e-3
