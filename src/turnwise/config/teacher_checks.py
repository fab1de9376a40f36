"""Refuses, at start-up, options of teachers that have no effect in a training run or that contradict other sections."""

from __future__ import annotations

from turnwise.options.schema import Config
from turnwise.options.section import changed_options

__all__ = ["teacher_problems"]


def teacher_problems(config: Config) -> list[tuple[bool, str]]:
    """Whether the recipe has a problem, and the error message for it."""
    teacher, lora = config.teacher, config.model.lora.rank is not None
    alone = config.credit.name == "none"
    filters = [name for name in changed_options(config.sampling) if name in ("top_p", "top_k", "min_p")]
    url = next((model.url for model in teacher.models if model.url is not None), None)
    same = next((m for m in teacher.models if m.path == config.model.path and m.context is None), None)
    return [
        (
            alone and not teacher.on,
            "credit=none learns nothing from rewards, and the recipe has no teacher: set teacher.path, or another "
            "credit.name",
        ),
        (
            alone and config.train.dynamic_sampling > 0,
            "train.dynamic_sampling has no effect with credit=none, because rewards are not learnt from: remove it",
        ),
        (
            alone and config.reward.kl.coef > 0,
            "reward.kl.coef has no effect with credit=none, because rewards are not learnt from: set loss.kl_coef, or remove it",
        ),
        *_zero_advantage_problems(config),
        (
            same is not None and not lora,
            f"teacher.path={config.model.path} is the model that is trained: after the first step it would hold the student back "
            f"where it began, which is what loss.kl_coef does. Set another teacher, or loss.kl_coef",
        ),
        (
            teacher.signal == "divergence" and bool(filters),
            f"teacher.signal=divergence compares complete distributions, and sampling.{next(iter(filters), '')} cuts them: "
            f"remove it, or set teacher.signal=sampled",
        ),
        (
            url is not None and (config.sampling.temperature != 1.0 or bool(filters)),
            f"the teacher at {url} gives log-probabilities of the unmodified distribution, and the student samples with other "
            f"options: set sampling.temperature=1, and remove top_p, top_k and min_p",
        ),
        (
            teacher.signal == "divergence" and teacher.top_k is None and config.cluster.distributed,
            "teacher.signal=divergence over the complete vocabulary needs the teacher's output layer in one process, and the "
            "recipe has several ranks (section cluster): set teacher.top_k (20)",
        ),
        (
            any(model.bits is not None for model in teacher.models) and config.cluster.distributed,
            "teacher.bits=4 cannot be used with several ranks (section cluster), because quantized weights are not divided among "
            "them: remove it",
        ),
        (
            teacher.on and config.critic.warmup_steps > 0 and alone,
            "critic.warmup_steps has no effect with credit=none: remove it",
        ),
    ]


def _zero_advantage_problems(config: Config) -> list[tuple[bool, str]]:
    """Options of the policy gradient where all advantages are 0, and only the divergence from the teacher is learnt."""
    zero = config.credit.name == "none" and config.teacher.signal == "divergence"
    correction = config.correction
    of_policy = (*config.loss.of_ratio, "top_entropy_quantile", "clip_cov_ratio", "kl_cov_ratio")
    ignored = [f"loss.{name}" for name in changed_options(config.loss) if name in of_policy]
    if correction.action in (
        "truncate",
        "mask",
        "icepop",
    ):  # `reject` takes tokens from the average, also of the divergence
        ignored.append(f"correction.action={correction.action}")
    if correction.off_policy_sequence_mask_delta is not None:
        ignored.append("correction.off_policy_sequence_mask_delta")
    return [
        (
            zero,
            f"{name} has no effect with credit=none and teacher.signal=divergence, where all advantages are 0: remove it, or set "
            f"teacher.signal=sampled",
        )
        for name in ignored[:1]
    ]
