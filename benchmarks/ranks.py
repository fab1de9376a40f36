"""Training on two ranks, compared with one process: `python benchmarks/ranks.py`, about two minutes.

The same updates of the same model, in turns, in one program: by a learner in one process with one torch thread, by a learner in
one process with two threads, and by two ranks with one thread each, which communicate by gloo on this machine. The model is
random: 28 million parameters, float32. Printed are the medians of the seconds of an update, and their ratios.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from turnwise.models.loading import ModelSource
from turnwise.options.algorithm import OptimizationSection, PpoClip
from turnwise.options.engines import ClusterSection, FsdpSection
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.options import ShardOptions
from turnwise.training.sharded.commands import follow
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_learner import ShardedLearner
from turnwise.types import Completion, LogprobKind, Row, Sampling, Segment, Trajectory, Turn

UPDATES = 5
TRAJECTORIES, PROMPT, ANSWER = 16, 64, 192
MICRO_BATCH_TOKENS = 1024


def trajectories() -> list[Trajectory]:
    """Conversations with random tokens and advantages."""
    generator = torch.Generator().manual_seed(0)
    made: list[Trajectory] = []
    for number in range(TRAJECTORIES):
        tokens = torch.randint(5, 4000, (PROMPT + ANSWER,), generator=generator).tolist()
        completion = Completion(
            token_ids=tokens[PROMPT:],
            logprobs=[-8.0] * ANSWER,
            versions=[0] * ANSWER,
            finish_reason="stop",
            logprob_kind=LogprobKind.SAMPLED,
        )
        segment = Segment()
        segment.append_context(tokens[:PROMPT])
        segment.append_completion(0, completion)
        turn = Turn(index=0, message={}, text="", completion=completion)
        trajectory = Trajectory(
            id=str(number), group="g", row=Row(id="g", messages=[]), segments=[segment], turns=[turn]
        )
        trajectory.advantages, trajectory.reward = [1.0 if number % 2 else -1.0], 0.0
        made.append(trajectory)
    return made


def seconds(learner: Any) -> float:
    """The seconds of an update."""
    required = learner.requirements
    batch = pack(
        trajectories(),
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        share_prompts=required.share_prompts,
        keep_zero=required.keep_zero,
        kinds=required.logprob_kinds,
    )
    started = time.perf_counter()
    asyncio.run(learner.update([batch], lr=1e-4))
    return time.perf_counter() - started


def rank(model: str) -> None:
    """The program of a rank."""
    torch.set_num_threads(1)
    ranks = Ranks(ClusterSection(), device="cpu")
    if not ranks.leads:
        follow(ranks)
        ranks.close()
        return
    options = ModelSource(path=str(model), device="cpu")
    common: dict[str, Any] = {"sampling": Sampling(), "optimizer": OptimizationSection()}
    learners = {
        f"one process, {threads} threads": LocalLearner.from_pretrained(
            options, loss=make_loss(PpoClip()), threads=threads, **common
        )
        for threads in (1, 2)
    }
    sharded = ShardedLearner(ranks, ShardOptions(model=options, loss=PpoClip(), sharding=FsdpSection(), **common))
    times: dict[str, list[float]] = {}
    for number in range(UPDATES + 1):
        for name, learner in [*learners.items(), ("two ranks", sharded)]:
            taken = seconds(learner)
            if number:  # the first update of each is a warm-up
                times.setdefault(name, []).append(taken)
    sharded.close()
    medians = {name: statistics.median(of_name) for name, of_name in times.items()}
    for name, median in medians.items():
        print(
            f"{name:<24} {median:6.2f} s   {medians['one process, 1 threads'] / median:5.2f} times one process, 1 thread"
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen2Config(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launcher, __file__, folder], check=True)


if __name__ == "__main__":
    rank(sys.argv[1]) if len(sys.argv) > 1 else main()
