"""For test_sharded.py, by programs.py: rank 0 compares the critic on all ranks with a critic in one process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cluster.tensors import difference
from training.test_batch import group
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.models.loading import ModelSource, load_model
from turnwise.options.algorithm import LoraSection, OptimizationSection, PpoClip
from turnwise.options.engines import ClusterSection, FsdpSection, MeshSection
from turnwise.training.local_critic import LocalCritic
from turnwise.training.options import CriticOptions, ShardOptions
from turnwise.training.sharded.commands import Rank, follow
from turnwise.training.sharded.consolidation import write_weights
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_learner import ShardedCritic, ShardedLearner
from turnwise.training.sharded.sharded_model import complete
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.types import Sampling

MODEL, HEAD, OUT = (Path(word) for word in sys.argv[1:4])
WRITTEN, READ = (None if word == "-" else Path(word) for word in sys.argv[4:6])
"""Directories: of what this number of ranks saves, and of what another number has saved."""
ADAPTER = LoraSection(rank=4, alpha=8)
OPTIMIZER = OptimizationSection(betas=(0.5, 0.9))


@dataclass(frozen=True)
class Gradients:
    """A command of this test: the complete gradients."""

    def run(self, rank: Rank) -> dict[str, torch.Tensor]:
        return {name: complete(parameter.grad) for name, parameter in rank.critic.parameters.items()}


@dataclass(frozen=True)
class Case:
    lora: LoraSection = LoraSection()
    clip: float | None = None
    micro_batch_tokens: int = 1
    sharding: FsdpSection = field(default_factory=FsdpSection)


CASES = {
    "all weights": Case(),
    "lora": Case(lora=ADAPTER),
    "clip": Case(clip=0.05, micro_batch_tokens=24),
    "one micro-batch": Case(micro_batch_tokens=4096, sharding=FsdpSection(gradient_sync="micro_batch")),
    "bfloat16": Case(sharding=FsdpSection(param_dtype="bfloat16")),
}


def options_of(case: Case) -> CriticOptions:
    model = ModelSource(path=str(MODEL), device="cpu", lora=case.lora)
    return CriticOptions(model=model, optimizer=OPTIMIZER, sharding=case.sharding, clip=case.clip, head=HEAD)


def local(options: CriticOptions) -> LocalCritic:
    return LocalCritic(
        load_model(options.model), optimizer=OPTIMIZER, clip=options.clip, folder=options.head, threads=1
    )


def measured(case: Case, critic: Any, gradients: Any) -> dict[str, Any]:
    """The values of all states, three updates on fixed returns, and the gradients of the first update's last step."""
    trajectories = group()
    packing = ValuePacking(
        level="token", micro_batch_tokens=case.micro_batch_tokens, share_prompts=critic.requirements.share_prompts
    )
    done: list[int] = []
    states = pack_states(trajectories, packing)
    values = asyncio.run(critic.values(states, on_micro_batch=lambda: done.append(1)))
    set_values(trajectories, values, "token")
    for trajectory, goal in zip(trajectories, (1.0, 0.0, 1.0, -1.0), strict=True):
        trajectory.returns = [[goal] * len(turn) for turn in trajectory.values if isinstance(turn, list)]
    batches = [pack_value_targets(part, packing) for part in (trajectories[:3], trajectories[3:])]
    first = asyncio.run(critic.update(batches, lr=1e-2, epochs=2))
    of_first = {name: gradient.detach().float().clone() for name, gradient in gradients().items()}
    later = [asyncio.run(critic.update(batches, lr=1e-2)) for _ in range(2)]
    return {
        "micro_batches": [len(done), len(states.micro_batches)],
        "values": values,
        "updates": [[stats.loss, stats.grad_norm, stats.clip_fraction] for stats in (first, *later)],
        "gradients": of_first,
        "base": critic.base_fingerprint(),
    }


def compared(learner: ShardedLearner, case: Case) -> dict[str, Any]:
    one = local(options_of(case))
    names = [f"body.{name}" for name, parameter in one._model.model.named_parameters() if parameter.requires_grad]
    names += [f"head.{name}" for name, _ in one._head.named_parameters()]
    expected = measured(case, one, lambda: dict(zip(names, (p.grad for p in one._optimizer.parameters), strict=True)))
    critic = ShardedCritic(learner.leader, options_of(case))
    actual = measured(case, critic, lambda: learner.leader.run(Gradients()))
    return {
        "ranks": actual,
        "one": expected,
        "gradients": difference(actual.pop("gradients"), expected.pop("gradients")),
    }


def losses(critic: Any, count: int) -> list[float]:
    """The losses of updates on fixed values and returns."""
    trajectories = group()
    packing = ValuePacking(level="turn", micro_batch_tokens=1, share_prompts=critic.requirements.share_prompts)
    for trajectory in trajectories:
        trajectory.values = [0.0] * len(trajectory.turns)
        trajectory.returns = [1.0 + turn.index for turn in trajectory.turns]
    batches = [pack_value_targets(trajectories, packing)]
    return [asyncio.run(critic.update(batches, lr=1e-2)).loss for _ in range(count)]


def saved_in(folder: Path, lora: LoraSection) -> CriticOptions:
    """The options that load a saved critic."""
    options = options_of(Case(lora=lora))
    model = options.model.model_copy(update={"path" if lora.rank is None else "adapter": str(folder / "model")})
    return replace(options, model=model, head=folder / "model")


def resumed(learner: ShardedLearner, folder: Path, lora: LoraSection) -> dict[str, Any]:
    """The losses of a critic that goes on, here and in one process, with what these ranks save; and here with what the process
    in between has saved."""
    critic = ShardedCritic(learner.leader, options_of(Case(lora=lora)))
    losses(critic, 2)
    for name in ("shards/critic", "model"):
        (folder / name).mkdir(parents=True)
    critic.save_shards(folder / "shards/critic")
    critic.save(folder / "model")
    expected = losses(critic, 2)
    saved = saved_in(folder, lora)
    if lora.rank is None:
        copy = shutil.copytree(folder / "model", folder / "complete")
        write_weights(folder / "model", copy)
        (copy / WEIGHTS_IN_PARTS).unlink()
        saved = replace(saved, model=saved.model.model_copy(update={"path": str(copy)}), head=copy)
    one = local(saved)
    one.load_state({}, folder / "shards/critic")
    again = ShardedCritic(learner.leader, saved_in(folder, lora))
    again.load_state(one.state())
    return {"expected": expected, "from_one": losses(again, 2), "in_one": losses(one, 2)}


def from_other_ranks(learner: ShardedLearner, folder: Path, lora: LoraSection) -> list[float]:
    critic = ShardedCritic(learner.leader, saved_in(folder, lora))
    critic.load_state({}, folder / "shards/critic")
    return losses(critic, 2)


def main() -> None:
    torch.set_num_threads(1)
    mesh = MeshSection.model_validate(json.loads(os.environ["MESH"]))
    ranks = Ranks(ClusterSection(timeout=1700.0, heartbeat=1700.0, mesh=mesh), device="cpu")
    if not ranks.leads:
        follow(ranks)
        ranks.close()
        return
    model = ModelSource(path=str(MODEL), device="cpu")
    options = ShardOptions(
        model=model, sampling=Sampling(), loss=PpoClip(), optimizer=OPTIMIZER, sharding=FsdpSection()
    )
    learner = ShardedLearner(ranks, options)
    kinds = {"all": LoraSection(), "lora": ADAPTER}
    results: dict[str, Any] = {name: compared(learner, CASES[name]) for name in sys.argv[6:]}
    if WRITTEN is not None:
        results["resumed"] = {name: resumed(learner, WRITTEN / name, lora) for name, lora in kinds.items()}
    if READ is not None:
        results["from_other_ranks"] = {
            name: from_other_ranks(learner, READ / name, lora) for name, lora in kinds.items()
        }
    OUT.write_text(json.dumps(results))
    learner.close()
