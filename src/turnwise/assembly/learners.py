"""Builds the learner and the critic of a recipe, in one process or on several ranks.

The model to load, the loss, the optimizer and the learning rate are those of the recipe. With several ranks, rank 0 holds the
learner and the connection to the others. On a Ray cluster, the command's process has only the group of ranks: `ray_ranks`
imports no torch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from turnwise.assembly.conversations import sampling
from turnwise.config.train_checks import needs_reference
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.models.device import known_dtype, multiplies_bfloat16, uses_gpu
from turnwise.options.algorithm import (
    CorrectionSection,
    LoraSection,
    LossSection,
    Nll,
    OptimizationSection,
    OwnLoss,
    ReferenceSection,
)
from turnwise.options.schema import Config, QuantizationSection
from turnwise.options.teacher import TeacherSection
from turnwise.ray_workers.ranks import RayRanks
from turnwise.rollout.context import seed_of
from turnwise.training.options import CriticOptions, ShardOptions
from turnwise.types import Sampling

if TYPE_CHECKING:
    from turnwise.models.loading import ModelSource
    from turnwise.training.learner import Critic, Learner
    from turnwise.training.sharded.sharded_learner import ShardedLearner

_log = logging.getLogger(__name__)

# several ranks


def rank_device(config: Config) -> str:
    """The kind of device of each rank: `auto`, `cpu` or `cuda`."""
    return "cpu" if config.deterministic else config.model.device


def sharded_learner(config: Config, options: ShardOptions) -> ShardedLearner:
    """The learner on rank 0, after connecting to the other ranks. Raises ConfigError."""
    from turnwise.training.sharded.ranks import Ranks  # torch.distributed
    from turnwise.training.sharded.sharded_learner import ShardedLearner

    return ShardedLearner(Ranks(config.cluster, device=rank_device(config)), options)


def sharded_critic(learner: Learner, options: CriticOptions) -> Critic:
    """The critic on the ranks of a learner. Raises ConfigError."""
    from turnwise.training.sharded.sharded_learner import (
        ShardedCritic,  # torch.distributed
        ShardedLearner,
    )

    assert isinstance(learner, ShardedLearner)
    return ShardedCritic(learner.leader, options)


# one learner


def learner(config: Config, path: str | Path, *, before_training: str | Path | None = None) -> Learner:
    """The learner of `turnwise train`, on the model at `path`. `before_training` is the path of the model before training, if
    that is another model.

    Raises ConfigError if a loss of the user cannot be called, or returns something wrong for a small batch.
    """
    if isinstance(config.loss, OwnLoss):
        from turnwise.training.own_loss import try_own_loss  # torch

        try_own_loss(config.loss)
    return _learner(
        config,
        path,
        sampled_from=sampling(config),
        loss=config.loss,
        correction=config.correction,
        optimizer=config.train,
        reference=_reference(config, before_training),
        teacher=config.teacher,
        share_prompts=config.train.share_prompts,
    )


def _reference(config: Config, before_training: str | Path | None) -> ReferenceSection | None:
    """The reference model of the recipe, with the path of its weights; None if it needs none."""
    section = config.reference
    if not needs_reference(config):
        return None
    adapter_off = config.model.lora.rank is not None and section.path is None  # on the trained model's own weights
    path = section.path or (None if adapter_off else before_training)
    return section.model_copy(update={"path": path})


def policy_learner(config: Config, name: str, main: Learner, saved: Path | None) -> Learner:
    """The learner of the trained policy `name`: an adapter of its own on the base weights of the learner `main`. `config` is the
    recipe as the policy reads it (`Config.of_policy`), and `saved` the directory of a saved adapter, for a run that is resumed.

    The first values of its adapter are others than those of `main`, whose seed is the recipe's. Raises ConfigError.
    """
    from turnwise.models.lora import with_second_adapter  # torch
    from turnwise.training.local_learner import LocalLearner
    from turnwise.training.losses import make_loss

    assert isinstance(main, LocalLearner)
    if isinstance(config.loss, OwnLoss):
        from turnwise.training.own_loss import try_own_loss

        try_own_loss(config.loss)
    loss = make_loss(config.loss, config.correction, TeacherSection())
    return LocalLearner(
        with_second_adapter(main.model, config.model.lora, saved, seed=seed_of(f"{config.seed}:{name}")),
        sampling=sampling(config),
        loss=loss,
        optimizer=config.train,
        reference_model=main.reference_model if loss.needs_reference else None,
        share_prompts=config.train.share_prompts,
        threads=1 if config.deterministic else 0,
        autocast=config.model.autocast,
        router_replay=config.model.router_replay,
    )


def frozen_source(
    config: Config, path: str, *, dtype: Literal["float32", "bfloat16"] | None, bits: Literal[4] | None
) -> ModelSource | None:
    """A model beside the trained one that is never trained, to be loaded. None: it is the trained model without its adapter."""
    base = config.model.lora.rank is not None and path == config.model.path
    # in another precision than the trained model, it is another model
    shared = base and bits is None and (dtype or known_dtype(config)) == known_dtype(config)
    return None if shared else frozen_copy(config, path, dtype=dtype, bits=bits)


def frozen_copy(
    config: Config, path: str, *, dtype: Literal["float32", "bfloat16"] | None, bits: Literal[4] | None
) -> ModelSource:
    """A model that is never trained, with weights of its own. `dtype` None: that of the trained model."""
    changes = {
        "path": path,
        "lora": LoraSection(),
        "adapter": None,
        "gradient_checkpointing": False,
        "gguf_file": None,
        "quantization": QuantizationSection(bits=bits),
        "dtype": dtype or known_dtype(config),
    }
    return model_source(config).model_copy(update=changes)


def teacher_sources(config: Config) -> dict[str, ModelSource | None]:
    """The local teachers of the recipe by their names, to be loaded. None: the trained model without its adapter."""
    sources: dict[str, ModelSource | None] = {}
    for teacher in config.teacher.local:
        assert teacher.path is not None
        sources[teacher.name] = frozen_source(config, teacher.path, dtype=teacher.dtype, bits=teacher.bits)
    return sources


def sft_learner(config: Config, path: str | Path) -> Learner:
    """The learner of `turnwise sft`, on the model at `path`."""
    return _learner(
        config,
        path,
        sampled_from=Sampling(),  # nothing is sampled: the loss uses the model's unmodified distribution
        loss=Nll(normalizer=config.sft.normalizer),
        correction=CorrectionSection(),
        optimizer=config.sft,
    )


def critic(config: Config, source: str | Path, learner: Learner, saved: Path | None) -> Critic:
    """The critic of `turnwise train`: the model of `critic.path`, or the policy's model before training.

    `source` is the path of the policy's weights, and `learner` owns them. `saved` is the directory of a saved critic, for a run
    that is resumed. If the policy has an adapter, the critic is an adapter of its own; without `critic.path`, it is on the same
    base weights as the policy's adapter, of which several ranks have a second copy. Raises ConfigError if the model cannot be a
    critic.
    """
    from turnwise.models.loading import load_model  # torch
    from turnwise.models.lora import with_second_adapter
    from turnwise.training.local_critic import LocalCritic
    from turnwise.training.local_learner import LocalLearner

    loaded, path = model_source(config), config.critic.path
    if config.model.lora.rank is None:
        loaded = loaded.model_copy(update={"path": str(saved or path or source)})
    else:
        loaded = loaded.model_copy(
            update={"path": path or loaded.path, "adapter": None if saved is None else str(saved)}
        )
    head = saved if saved is not None or path is None else _critic_folder(path)
    if config.cluster.distributed:
        return sharded_critic(
            learner,
            CriticOptions(
                model=loaded,
                optimizer=config.train,
                sharding=config.cluster.fsdp,
                clip=config.critic.clip,
                head=head,
                share_prompts=config.train.share_prompts,
                autocast=config.model.autocast,
                run=Path(config.output).absolute(),
            ),
        )
    if config.model.lora.rank is not None and path is None:
        assert isinstance(learner, LocalLearner)
        model = with_second_adapter(learner.model, config.model.lora, saved, seed=config.seed)
    else:
        model = load_model(loaded)
    return LocalCritic(
        model,
        clip=config.critic.clip,
        optimizer=config.train,
        folder=head,
        share_prompts=config.train.share_prompts,
        threads=1 if config.deterministic else 0,
        autocast=config.model.autocast,
    )


def _critic_folder(path: str) -> Path | None:
    """The directory, if it has a saved critic in it, and not only a model."""
    from turnwise.training.value_model import HEAD_FILE  # torch

    folder = Path(path).expanduser()
    return folder if (folder / HEAD_FILE).is_file() else None


def _learner(
    config: Config,
    path: str | Path,
    *,
    sampled_from: Sampling,
    loss: LossSection,
    correction: CorrectionSection,
    optimizer: OptimizationSection,
    reference: ReferenceSection | None = None,
    teacher: TeacherSection | None = None,
    share_prompts: str = "auto",
) -> Learner:
    _tell_slow_products(config)
    if config.cluster.distributed:
        return sharded_learner(
            config,
            ShardOptions(
                model=model_source(config, path),
                sampling=sampled_from,
                loss=loss,
                correction=correction,
                optimizer=optimizer,
                sharding=config.cluster.fsdp,
                reference=reference,
                teacher=teacher or TeacherSection(),
                teachers={} if teacher is None else teacher_sources(config),
                share_prompts=share_prompts,
                autocast=config.model.autocast,
                deterministic=config.deterministic,
                router_replay=config.model.router_replay,
                folder=Path(config.output).absolute().parent,
                run=Path(config.output).absolute(),
            ),
        )
    from turnwise.models.precision import use_deterministic_algorithms  # torch
    from turnwise.training.local_learner import LocalLearner
    from turnwise.training.losses import make_loss

    if config.deterministic:
        use_deterministic_algorithms()
    return LocalLearner.from_pretrained(
        model_source(config, path),
        sampling=sampled_from,
        loss=make_loss(loss, correction, teacher or TeacherSection()),
        optimizer=optimizer,
        reference=reference,
        teachers={} if teacher is None else teacher_sources(config),
        share_prompts=share_prompts,
        threads=1 if config.deterministic else 0,
        autocast=config.model.autocast,
        router_replay=config.model.router_replay,
    )


def _tell_slow_products(config: Config) -> None:
    """A run in bfloat16 on a CPU without such products looks as if it hung."""
    mixed = config.model.autocast
    if not (mixed or known_dtype(config) == "bfloat16") or uses_gpu(rank_device(config)) or multiplies_bfloat16():
        return
    _log.warning(
        "%s: this CPU has no products in bfloat16 (AVX-512 BF16 or AMX), so torch takes 5 to 10 times as long for them as in "
        "float32. On this machine, model.autocast=false model.dtype=float32 is faster",
        "model.autocast=true" if mixed else "model.dtype=bfloat16",
    )


def sampled_model(config: Config, learner: Learner, source: str | Path) -> Any | None:
    """The model that the engine of a training run samples from: the learner's own, or a complete copy of a model that is divided
    among several ranks. None if the engine needs none. `source` is the path of the learner's weights."""
    if not config.cluster.distributed:
        from turnwise.training.local_learner import LocalLearner  # torch

        assert isinstance(learner, LocalLearner)
        return learner.model
    if config.engine.embedded is None or config.runs_conversations_elsewhere:
        return None
    from turnwise.models.loading import load_model  # torch

    copied = model_source(config, source).model_copy(update={"gradient_checkpointing": False})
    if (Path(copied.path) / WEIGHTS_IN_PARTS).is_file():
        from turnwise.training.sharded.parts import load_in_parts  # torch.distributed

        return load_in_parts(copied)
    return load_model(copied)


def reference_model(config: Config, learner: Learner) -> Any | None:
    """The reference model of a training run in one process, for a frozen policy that is this model (`refuse_unusable_policies`
    refuses it elsewhere); None if no policy is."""
    if not any(policy.reference for policy in config.policies):
        return None
    from turnwise.training.local_learner import LocalLearner  # torch

    assert isinstance(learner, LocalLearner)
    return learner.reference_model


def model_source(config: Config, path: str | Path | None = None) -> ModelSource:
    """The recipe's model, to be loaded. If `path` is given, it replaces model.path."""
    from turnwise.models.loading import ModelSource  # torch

    # the checkpoint of a run with an adapter holds the adapter only; the base model is that of model.path
    resumed = config.model.lora.rank is not None and path is not None and str(path) != config.model.path
    own = {**dict(config.model), "dtype": known_dtype(config)}
    source = ModelSource(**own, adapter=str(path) if resumed else None, seed=config.seed)
    changes = {"path": config.model.path if path is None or resumed else str(path)}
    return source.model_copy(update={**changes, "device": "cpu"} if config.deterministic else changes)


# ranks on a Ray cluster


def ray_ranks(config: Config, *, workers: bool) -> RayRanks:
    """The ranks of a recipe with `cluster.launcher: ray` and `cluster.trainers`. `workers`: the run has rollout workers."""
    return RayRanks(config.cluster, gpus=config.model.device != "cpu", workers=workers)
