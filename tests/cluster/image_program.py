"""For test_sharded.py, by programs.py: an update on conversations with and without images, on all ranks and in one
process. Arguments: the model's directory, the file of the results."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.tensors import difference
from support.vision import vision_model, vision_tokenizer
from training.test_vision import held, trajectory
from turnwise.chat.media import MediaProcessor
from turnwise.models.loading import ModelSource
from turnwise.options.algorithm import OptimizationSection, PpoClip
from turnwise.options.engines import ClusterSection, FsdpSection, MeshSection
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.options import ShardOptions
from turnwise.training.sharded.commands import Rank, follow
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_learner import ShardedLearner
from turnwise.training.sharded.sharded_model import complete
from turnwise.types import Sampling


@dataclass(frozen=True)
class Gradients:
    """A command of this test: the complete gradients; zeros where no rank has computed one."""

    def run(self, rank: Rank) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros(parameter.shape) if parameter.grad is None else complete(parameter.grad)
            for name, parameter in rank.built.parameters.items()
        }


def update(learner: Any, vision: MediaProcessor, conversations: list[int]) -> list[float]:
    """Two updates: the losses, and the norm of the first gradient. The conversations are those of `held` by their numbers."""
    segments = held(vision_model(), vision)
    packed = pack(
        [trajectory(segments[number], [1.0, -0.5], str(number)) for number in conversations],
        micro_batch_tokens=1,  # a micro-batch for each conversation: a rank may have none with an image
        share_prompts=learner.requirements.share_prompts,
        kinds=learner.requirements.logprob_kinds,
    )
    first, second = (asyncio.run(learner.update([packed], lr=lr)) for lr in (0.0, 1e-3))
    return [first.loss, first.grad_norm, second.loss, second.max_deviation]


def main() -> None:
    torch.set_num_threads(1)
    mesh = MeshSection.model_validate(json.loads(os.environ["MESH"]))
    ranks = Ranks(ClusterSection(timeout=1700.0, heartbeat=1700.0, mesh=mesh), device="cpu")
    if not ranks.leads:
        follow(ranks)
        ranks.close()
        return
    path = Path(sys.argv[1])
    vision = MediaProcessor.from_pretrained(path, vision_tokenizer())
    assert vision is not None
    common: dict[str, Any] = {"sampling": Sampling(), "optimizer": OptimizationSection()}
    results: dict[str, Any] = {}
    learner: ShardedLearner | None = None
    # 0 and 1 have images, 2 has none: all ranks with images, one of two, none
    for name, conversations, sync in (
        ("images on both ranks", [0, 1], "batch"),
        ("images on one rank", [0, 2], "batch"),
        ("images on one rank, gradients added up after each micro-batch", [0, 1, 2], "micro_batch"),
        ("no images", [2], "batch"),
    ):
        options = ModelSource(path=str(path), device="cpu")
        learner = ShardedLearner(
            ranks,
            ShardOptions(model=options, loss=PpoClip(), sharding=FsdpSection(gradient_sync=sync), **common),  # type: ignore[arg-type]
        )
        one = LocalLearner.from_pretrained(options, loss=make_loss(PpoClip()), threads=1, **common)
        actual, expected = update(learner, vision, conversations), update(one, vision, conversations)
        of_one = {name: tensor.grad for name, tensor in one.model.named_parameters() if tensor.requires_grad}
        of_ranks = learner.leader.run(Gradients())
        known = {
            name: torch.zeros_like(one.model.get_parameter(name)) if grad is None else grad
            for name, grad in of_one.items()
        }
        results[name] = {
            "ranks": actual,
            "one": expected,
            "gradients": difference(of_ranks, known),
            "weights": difference(dict(learner.weights()), dict(one.weights())),
            "vision": float(sum(grad.abs().sum() for key, grad in known.items() if "visual" in key)),
        }
    Path(sys.argv[2]).write_text(json.dumps(results))
    assert learner is not None
    learner.close()
