"""For test_sharded.py, by programs.py: rank 0 runs cases on all ranks and in one process, and writes results."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cluster.tensors import difference
from training.test_batch import group, trajectory
from turnwise.errors import ConfigError, RunError
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.models.loading import ModelSource
from turnwise.options.algorithm import (
    Cispo,
    CorrectionSection,
    Gspo,
    LoraSection,
    LossSection,
    OptimizationSection,
    OptimizerSection,
    PpoClip,
    ReferenceSection,
    Reinforce,
)
from turnwise.options.engines import ClusterSection, FsdpSection, MeshSection
from turnwise.options.teacher import TeacherSection
from turnwise.training import optimizer
from turnwise.training.batch import Batch, MicroBatch, pack
from turnwise.training.fingerprint import of_file
from turnwise.training.forward import Forward
from turnwise.training.learner import UpdateStats
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import Targets, make_loss
from turnwise.training.options import ShardOptions
from turnwise.training.sharded import commands, shards
from turnwise.training.sharded.commands import CompareMachines, Rank, follow
from turnwise.training.sharded.consolidation import write_weights
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_learner import ShardedLearner
from turnwise.training.sharded.sharded_model import DividedParts, complete
from turnwise.training.sharded.together import own_part
from turnwise.training.teacher import LearnerTeacher, Teacher, TeacherStep
from turnwise.types import Group, Sampling

MODEL, OUT = Path(sys.argv[1]), Path(sys.argv[2])
WRITTEN, READ = (None if word == "-" else Path(word) for word in sys.argv[3:5])
"""Directories: of what this number of ranks saves, and of what another number has saved."""


@dataclass(frozen=True)
class Gradients:
    """A command of this test: the complete gradients."""

    def run(self, rank: Rank) -> dict[str, torch.Tensor]:
        return {name: complete(parameter.grad) for name, parameter in rank.built.parameters.items()}


@dataclass(frozen=True)
class Part:
    """A command of this test: the share of the trained weights that rank 0 has."""

    def run(self, rank: Rank) -> float:
        weights = list(rank.built.parameters.values())
        return sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights)


@dataclass(frozen=True)
class Kept:
    """A command of this test: what a pass over a long conversation keeps for its backward pass on each rank, in bytes."""

    micro: MicroBatch[Any]

    def run(self, rank: Rank) -> list[int]:
        kept: list[Any] = [None] * rank.ranks.size
        dist.all_gather_object(kept, kept_by(rank.built._forward, own_part(self.micro, rank.ranks.mesh)))
        return kept


def kept_by(forward: Forward, micro: MicroBatch[Any]) -> int:
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprob_N, _ = forward.logprobs(micro)
    assert logprob_N.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def long_micro_batch() -> MicroBatch[Any]:
    ids = [5 + index % 200 for index in range(2000)]
    conversation = trajectory("a", [("context", ids[:100]), ("turn", ids), ("context", ids), ("turn", ids)], [1.0, 1.0])
    (micro,) = pack([conversation], micro_batch_tokens=8192).micro_batches
    return micro.to(torch.device("cpu"))  # without the sequences


@dataclass(frozen=True)
class SleepInLayers:
    """A command of this test: the layers of one rank take longer."""

    rank: int
    seconds: float

    def run(self, rank: Rank) -> None:
        if rank.ranks.rank == self.rank:
            for layer in rank.built.model.model.layers:
                layer.mlp.register_forward_pre_hook(lambda *_: time.sleep(self.seconds))


@dataclass(frozen=True)
class ComputeExperts:
    """A command of this test: how the experts are computed from now on."""

    implementation: str

    def run(self, rank: Rank) -> None:
        rank.built.model.set_experts_implementation(self.implementation)


@dataclass(frozen=True)
class Numbers:
    """A command of this test: for each rank, the numbers that its parts of the parameters have for the optimizer."""

    def run(self, rank: Rank) -> list[list[int]]:
        parts = DividedParts()
        numbers: list[Any] = [None] * rank.ranks.size
        own = sorted({parts.number(parameter) for parameter in rank.built.parameters.values()})
        dist.all_gather_object(numbers, own)
        return numbers


@dataclass(frozen=True)
class TimeLimits:
    """A command of this test: the time limits of the groups in which each rank computes with others, in seconds."""

    def run(self, rank: Rank) -> list[list[float]]:
        groups = [dist.group.WORLD, *rank.ranks.mesh.groups()]
        own = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
        return rank.ranks.share(sorted(own))


@dataclass(frozen=True)
class AddUp:
    """A command of this test: the sum of gradients of 256 and 20 times 1 on each rank, of a weight outside of the layers."""

    def run(self, rank: Rank) -> float:
        built = rank.built
        for number in range(21):
            built._sharded.sync_gradients(last=number == 20)
            built._sharded.run(functools.partial(self.loss, built.model, 1.0 if number else 256.0)).backward()
        return float(complete(built.parameters["model.norm.weight"].grad).float()[0])

    def loss(self, model: Any, gradient: float) -> torch.Tensor:
        logits = model(torch.tensor([[5, 6]])).logits  # all weights are gathered, as in a pass
        return (model.model.norm.weight * gradient).sum() + 0.0 * logits.sum()


@dataclass(frozen=True)
class RefuseShards:
    """A command of this test: load a state that cannot be read. Returns the error of each rank."""

    folder: Path

    def run(self, rank: Rank) -> list[str]:
        errors: list[Any] = [None] * rank.ranks.size
        try:
            shards.load(rank.built, self.folder)
            own = ""
        except RunError as error:
            own = str(error)
        dist.all_gather_object(errors, own)
        return errors


@dataclass(frozen=True)
class RefuseMachines:
    """A command of this test: the errors of all ranks, where they have other versions, or do not see a file."""

    versions: dict[str, str]
    file: Path | None

    def run(self, rank: Rank) -> list[str]:
        commands._SIGHT = 0.1
        try:
            CompareMachines(self.versions, self.file).run(rank)
        except ConfigError as error:
            return rank.ranks.share(str(error))
        return []


@dataclass(frozen=True)
class KeepMasters:
    """A command of this test: `optimizer.offload=cpu`, which is refused where the model is on the CPU."""

    def run(self, rank: Rank) -> None:
        options = OptimizationSection(betas=(0.5, 0.9), optimizer=OptimizerSection(offload="cpu"))
        parameters = list(rank.built.parameters.values())
        with mock.patch.object(optimizer, "_refuse_without_effect"):
            rank.built.optimizer = optimizer.Optimizer(parameters, options, parts=DividedParts())


@dataclass(frozen=True)
class Case:
    loss: LossSection = field(default_factory=PpoClip)
    correction: CorrectionSection = CorrectionSection()
    optimizer: OptimizationSection = field(default_factory=OptimizationSection)
    sharding: FsdpSection = field(default_factory=FsdpSection)
    reference: ReferenceSection | None = None
    teacher: TeacherSection = TeacherSection()
    """Its path is the name of a directory beside MODEL; `base`: the model under the adapter."""
    lora: bool = False
    dora: bool = False
    checkpointing: bool = False
    dtype: str = "float32"
    autocast: bool = False
    share_prompts: str = "auto"
    batches: int = 1
    epochs: int = 1
    micro_batch_tokens: int = 1
    experts: str = ""
    """The implementation of the experts on ranks; empty: that of the model."""
    model: str = ""
    """A directory beside MODEL; empty: MODEL itself."""


def teacher(**options: Any) -> TeacherSection:
    return TeacherSection.model_validate(options)


CASES = {
    "ppo_clip": Case(),
    "ppo_clip_epochs": Case(batches=2, epochs=2),
    "sync_each": Case(sharding=FsdpSection(gradient_sync="micro_batch")),
    "keep_gathered": Case(sharding=FsdpSection(reshard_after_forward=False)),
    "gspo": Case(loss=Gspo(), epochs=2),
    "cispo": Case(loss=Cispo(entropy_coef=0.01), epochs=2),
    "reference": Case(loss=PpoClip(kl_coef=0.5), epochs=2),
    "lora_reference": Case(loss=PpoClip(kl_coef=0.5), lora=True, epochs=2),
    "lora_copy": Case(loss=PpoClip(kl_coef=0.5), lora=True, reference=ReferenceSection(source="copy"), epochs=2),
    "dora": Case(lora=True, dora=True),
    "checkpointing": Case(loss=PpoClip(kl_coef=0.5), checkpointing=True),
    "correction": Case(correction=CorrectionSection(action="truncate", high=1.5, normalize_weights=True)),
    "selection": Case(
        loss=PpoClip(top_entropy_quantile=0.5, clip_cov_ratio=0.2, clip_cov_low=0.0, kl_cov_ratio=0.3),
        batches=2,
        epochs=2,
    ),
    "separate_rows": Case(share_prompts="never"),
    "one_micro_batch": Case(micro_batch_tokens=4096),
    "clipped": Case(optimizer=OptimizationSection(max_grad_norm=1e-3)),
    "experts": Case(loss=PpoClip(router_aux_loss_coef=0.5), model="experts", epochs=2),
    "experts_again": Case(
        loss=PpoClip(kl_coef=0.5),
        model="experts",
        checkpointing=True,
        lora=True,
        sharding=FsdpSection(gradient_sync="micro_batch"),
    ),
    "experts_each": Case(
        model="experts", micro_batch_tokens=4096, sharding=FsdpSection(gradient_sync="micro_batch"), checkpointing=True
    ),
    **{name: Case(model=name) for name in ("mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2")},
    "idle_experts": Case(model="one_sided", experts="eager"),
    **{name: Case(model=name) for name in ("llama", "mistral", "qwen2", "window", "capped")},
    **{name: Case(model=name, loss=PpoClip(kl_coef=0.5)) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2")},
    "qwen3_next_lora": Case(model="qwen3_next", lora=True),
    "teacher_sampled": Case(loss=Reinforce(), teacher=teacher(path="teacher", gamma=0.5), epochs=2),
    "teacher_divergence": Case(
        teacher=teacher(path="teacher", signal="divergence", divergence="jsd", top_k=3), epochs=2
    ),
    "teacher_under_the_adapter": Case(teacher=teacher(path="base", signal="divergence", top_k=3), lora=True, epochs=2),
    "teacher_is_the_student": Case(
        loss=Reinforce(), teacher=teacher(context="context.py:f", clip=0.5), share_prompts="never"
    ),
    "bfloat16": Case(dtype="bfloat16"),
    "mixed": Case(sharding=FsdpSection(param_dtype="bfloat16")),
    "autocast": Case(autocast=True),
}


RESUMED = Case(
    optimizer=OptimizationSection(betas=(0.5, 0.9)),
    model="experts" if json.loads(os.environ["MESH"]).get("expert") else "",
)
"""Of runs that go on: `cluster.mesh.expert` is for models with experts."""


def options_of(case: Case) -> ShardOptions:
    return ShardOptions(
        model=ModelSource(
            path=str(MODEL.parent / case.model if case.model else MODEL),
            dtype=case.dtype,
            device="cpu",
            lora=LoraSection(rank=4, alpha=8, dora=case.dora) if case.lora else LoraSection(),
            gradient_checkpointing=case.checkpointing,
        ),
        sampling=Sampling(),
        loss=case.loss,
        correction=case.correction,
        optimizer=case.optimizer,
        sharding=case.sharding,
        folder=OUT.parent,
        reference=case.reference,
        teacher=case.teacher,
        teachers=teachers_of(case),
        share_prompts=case.share_prompts,
        autocast=case.autocast,
    )


def teachers_of(case: Case) -> dict[str, ModelSource | None]:
    return {
        model.name: None
        if model.path == "base"
        else ModelSource(path=str(MODEL.parent / str(model.path)), device="cpu")
        for model in case.teacher.local
    }


def local(case: Case) -> LocalLearner:
    options = options_of(case)
    return LocalLearner.from_pretrained(
        options.model,
        sampling=options.sampling,
        loss=make_loss(options.loss, options.correction, options.teacher),
        optimizer=options.optimizer,
        reference=options.reference,
        teachers=options.teachers,
        share_prompts=options.share_prompts,
        autocast=options.autocast,
        threads=1,
    )


def batches_of(case: Case, learner: Any) -> list[Batch]:
    required, trajectories = learner.requirements, group()
    if case.teacher.on:
        scoring = LearnerTeacher(learner, None if case.teacher.models[0].is_student else "teacher", None)
        step = TeacherStep(
            learner, teachers=[Teacher("teacher", 1.0, scoring)], section=case.teacher, micro_batch_tokens=None
        )
        groups = [Group(id="g", row=trajectories[0].row, trajectories=trajectories)]
        asyncio.run(step.set_scores(groups))
        asyncio.run(step.add_advantages(groups))
    size = len(trajectories) // case.batches
    return [
        pack(
            trajectories[start : start + size],
            micro_batch_tokens=case.micro_batch_tokens,
            share_prompts=required.share_prompts,
            keep_zero=required.keep_zero,
            measure_zero=required.measure_zero,
            kinds=required.logprob_kinds,
        )
        for start in range(0, size * case.batches, size)
    ]


def complete_copy(model: Path) -> Path:
    """A copy of a model directory in parts with the weights as files, for one process."""
    copy = shutil.copytree(model, model.with_name("complete"))
    write_weights(model, copy)
    (copy / WEIGHTS_IN_PARTS).unlink()
    return copy


def scores_of(targets: Targets) -> list[float]:
    """The advantages, and what a teacher says of the tokens and of the likely ones."""
    of_teacher = [one for one in (targets.teacher_logprob_N, targets.teacher_top_logprob_NK) if one is not None]
    return torch.cat([one.flatten() for one in (targets.advantage_N, *of_teacher)]).tolist()


def measured(case: Case, learner: Any, gradients: Callable[[], dict[str, torch.Tensor]]) -> dict[str, Any]:
    """An update of two epochs, or two updates of one, and what the learner says of itself."""
    batches = batches_of(case, learner)
    before = learner.fingerprint()
    done: list[int] = []
    first = asyncio.run(learner.update(batches, lr=1e-3, epochs=case.epochs, on_micro_batch=lambda: done.append(1)))
    of_first = {name: gradient.detach().clone() for name, gradient in gradients().items()}
    updates = [first, *(asyncio.run(learner.update(batches, lr=1e-3)) for _ in range(2 - case.epochs))]
    return {
        "fingerprint": before,
        "base": learner.base_fingerprint(),
        "reference": learner.reference_fingerprint(),
        "updates": [stats(update) for update in updates],
        "micro_batches": [len(done), case.epochs * sum(len(batch.micro_batches) for batch in batches)],
        "token_logprobs": learner.token_logprobs([5, 6, 7, 8]),
        "loss": asyncio.run(learner.evaluate_loss(batches[0])),
        "scores": [value for batch in batches for micro in batch.micro_batches for value in scores_of(micro.targets)],
        "teachers": dict(learner.teacher_fingerprints()),
        "gradients": of_first,
        "weights": {name: tensor.float() for name, tensor in learner.weights().items()},
    }


def stats(update: UpdateStats) -> dict[str, Any]:
    """The statistics, with the log-probabilities in the order of the sequences."""
    logprobs = [float(value) for of_batch in update.logprobs for _, row in sorted(of_batch.items()) for value in row]
    found = {**asdict(replace(update, logprobs=())), "logprobs": logprobs}
    del found["slowest"]  # there is none in one process
    return found


def compared(ranks: Ranks, case: Case) -> dict[str, Any]:
    one = local(case)
    expected = measured(
        case,
        one,
        lambda: (
            {name: parameter.grad for name, parameter in one.model.named_parameters() if parameter.requires_grad}
            if case.dtype == "float32"
            else {}
        ),
    )
    learner = ShardedLearner(ranks, options_of(case))
    if case.experts:
        learner.leader.run(ComputeExperts(case.experts))
    actual = measured(case, learner, lambda: learner.leader.run(Gradients()) if case.dtype == "float32" else {})
    result: dict[str, Any] = {"ranks": actual, "one": expected}
    result["gradients"] = (
        difference(actual.pop("gradients"), expected.pop("gradients")) if case.dtype == "float32" else 0
    )
    result["weights"] = difference(actual.pop("weights"), expected.pop("weights"))
    return result


OPTIMIZERS = {
    "eight_bits": Case(optimizer=OptimizationSection(optimizer=OptimizerSection(name="adamw_8bit"))),
    "kahan": Case(optimizer=OptimizationSection(optimizer=OptimizerSection(master_weights="kahan")), dtype="bfloat16"),
    "stochastic": Case(
        optimizer=OptimizationSection(optimizer=OptimizerSection(master_weights="stochastic_rounding")),
        dtype="bfloat16",
    ),
}


def resumed(ranks: Ranks, folder: Path, case: Case) -> dict[str, Any]:
    """The share of the weights on rank 0, and the losses of runs that go on with the state of another number of processes."""
    learner = ShardedLearner(ranks, options_of(case))
    batches = batches_of(case, learner)

    def steps(one: Any, count: int) -> list[float]:
        return [asyncio.run(one.update(batches, lr=1e-2)).loss for _ in range(count)]

    part = learner.leader.run(Part())
    steps(learner, 2)
    (folder / "shards").mkdir(parents=True)
    sums = learner.save_shards(folder / "shards")
    assert sums == {file.name: of_file(file) for file in (folder / "shards").iterdir()}
    assert len(sums) == ranks.size + 1  # one of each rank, and the list of the parts
    learner.save(folder / "model")
    assert not list((folder / "model").glob("*.safetensors"))
    expected = steps(learner, 2)
    saved = options_of(case).model.model_copy(update={"path": str(folder / "model")})
    complete = saved.model_copy(update={"path": str(complete_copy(folder / "model"))})
    one = LocalLearner.from_pretrained(
        complete, sampling=Sampling(), loss=make_loss(case.loss), optimizer=case.optimizer, threads=1
    )
    one.load_state({}, folder / "shards")
    state = one.state()
    again = ShardedLearner(ranks, replace(options_of(case), model=saved))
    again.load_state(state)  # of one process
    from_one = steps(again, 2)
    in_one = steps(one, 2)
    here = ShardedLearner(ranks, replace(options_of(case), model=saved))
    here.load_state({}, folder / "shards")
    return {"expected": expected, "from_one": from_one, "in_one": in_one, "here": steps(here, 2), "part": part}


def with_masters(ranks: Ranks, folder: Path) -> list[float]:
    """The losses of a run that goes on with what `resumed` has saved, and with master weights, which that run did not have."""
    case = Case(optimizer=OptimizationSection(betas=(0.5, 0.9)))
    learner = ShardedLearner(ranks, options_of(case))
    batches = batches_of(case, learner)
    learner.leader.run(KeepMasters())
    learner.load_state({}, folder / "shards")
    return [asyncio.run(learner.update(batches, lr=1e-2)).loss for _ in range(2)]


def damaged(ranks: Ranks, folder: Path) -> list[str]:
    """The errors of all ranks where the file of the last rank is missing."""
    copy = shutil.copytree(folder / "shards", folder / "damaged")
    (copy / f"__{ranks.size - 1}_0.distcp").unlink()
    return ShardedLearner(ranks, options_of(Case())).leader.run(RefuseShards(copy))


def refused_machines(ranks: Ranks) -> list[list[str]]:
    learner = ShardedLearner(ranks, options_of(Case()))
    own = commands.installed()
    edited = {**own, "turnwise": "0.1.0 (source 00000000)"}
    cases = (({**own, "torch": "1.0"}, None), (edited, None), (own, Path("/a/b")))
    return [learner.leader.run(RefuseMachines(*one)) for one in cases]


def slow_rank(ranks: Ranks) -> dict[str, Any]:
    """The slowest rank, and how long the update took, where rank 1 sleeps in its layers."""
    learner = ShardedLearner(ranks, options_of(Case()))
    learner.leader.run(SleepInLayers(1, 0.25))
    update = asyncio.run(learner.update(batches_of(Case(), learner), lr=1e-3))
    assert update.slowest is not None
    return {**asdict(update.slowest), "metrics": dict(update.rank_metrics)}


def sums_of_gradients(ranks: Ranks, sync: Any) -> list[float]:
    """What 21 micro-batches add up to on all ranks, in bfloat16 and with `grad_accum_dtype`."""
    sums: list[float] = []
    for section in (OptimizerSection(), OptimizerSection(grad_accum_dtype="float32")):
        optimization = OptimizationSection(optimizer=section)
        case = Case(dtype="bfloat16", sharding=FsdpSection(gradient_sync=sync), optimizer=optimization)
        sums.append(ShardedLearner(ranks, options_of(case)).leader.run(AddUp()))
    return sums


def numbers_of(ranks: Ranks) -> list[list[int]]:
    return ShardedLearner(ranks, options_of(RESUMED)).leader.run(Numbers())


def from_other_ranks(ranks: Ranks, folder: Path) -> list[float]:
    """The losses of a run that goes on with what another number of ranks has saved."""
    case = RESUMED
    options = options_of(case)
    learner = ShardedLearner(
        ranks, replace(options, model=options.model.model_copy(update={"path": str(folder / "model")}))
    )
    learner.load_state({}, folder / "shards")
    batches = batches_of(case, learner)
    return [asyncio.run(learner.update(batches, lr=1e-2)).loss for _ in range(2)]


def main() -> None:
    torch.set_num_threads(1)
    mesh = MeshSection.model_validate(json.loads(os.environ["MESH"]))
    ranks = Ranks(ClusterSection(timeout=1700.0, heartbeat=1700.0, mesh=mesh), device="cpu")
    if not ranks.leads:
        follow(ranks)
        ranks.close()
        return
    results: dict[str, Any] = {name: compared(ranks, CASES[name]) for name in sys.argv[5:]}
    results["time_limits"] = ShardedLearner(ranks, options_of(RESUMED)).leader.run(TimeLimits())
    if ranks.size == 2 and ranks.mesh.together is None and ranks.mesh.expert is None:
        results["sums"] = {sync: sums_of_gradients(ranks, sync) for sync in ("micro_batch", "batch")}
    if WRITTEN is not None:
        WRITTEN.mkdir()
        results["resumed"] = resumed(ranks, WRITTEN, RESUMED)
        results["numbers"] = numbers_of(ranks)
        if ranks.mesh.context is not None and ranks.mesh.tensor is None and ranks.mesh.expert is None:
            learner = ShardedLearner(ranks, options_of(Case()))
            results["kept"] = [
                kept_by(local(Case())._forward, long_micro_batch()),
                *learner.leader.run(Kept(long_micro_batch())),
            ]
        if ranks.size == 2 and ranks.mesh.together is None and ranks.mesh.expert is None:
            results["damaged"] = damaged(ranks, WRITTEN)
            results["with_masters"] = with_masters(ranks, WRITTEN)
            results["machines"] = refused_machines(ranks)
            results["slow"] = slow_rank(ranks)
        if ranks.size == 2 and ranks.mesh.context is None and ranks.mesh.expert is None:
            chosen = OPTIMIZERS if ranks.mesh.tensor is None else ("eight_bits", "stochastic")
            results["optimizers"] = {name: resumed(ranks, WRITTEN / name, OPTIMIZERS[name]) for name in chosen}
    if READ is not None:
        results["from_other_ranks"] = from_other_ranks(ranks, READ)
    OUT.write_text(json.dumps(results))
    ShardedLearner(ranks, options_of(RESUMED)).close()
