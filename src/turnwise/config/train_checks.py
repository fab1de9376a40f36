"""Which options of a recipe do nothing in a training run, or contradict each other: they are refused at start-up."""

from __future__ import annotations

from turnwise.config.part import changed_options
from turnwise.config.schema import LOSS_MASKS, Config, Data, LocalEngine
from turnwise.data.rows import FILES
from turnwise.errors import ConfigError

__all__ = ["file_problems", "refuse_without_effect", "refuse_without_reward"]

WITHOUT_REWARD = (
    "turnwise.environments.environment:SingleTurn",
    "turnwise.environments.users:ScriptedUser",
    "turnwise.environments.modelled_user:ModelledUser",
)
"""Environments that give no reward of their own."""


def refuse_without_effect(config: Config) -> None:
    """Refuse options of a training run that would do nothing, or that contradict each other.

    Raises ConfigError.
    """
    problems = _optimization_problems(config) + _recipe_problems(config)
    problems += _deterministic_problems(config) + file_problems(config.data)
    for holds, message in problems:
        if holds:
            raise ConfigError(message)


def _optimization_problems(config: Config) -> list[tuple[bool, str]]:
    """Options of `train` that have no effect or contradict each other: whether they do, and the message."""
    train = config.train
    on_policy = train.minibatches == 1 and train.ppo_epochs == 1 and not train.overlap
    of_train = changed_options(train)
    return [
        (
            on_policy and bool({"clip_low", "clip_high"} & set(of_train)),
            "train.clip_low and train.clip_high have no effect with one optimizer step a batch (the probability ratio is "
            "1): remove them, or set train.minibatches, train.ppo_epochs or train.overlap",
        ),
        (
            config.credit.name == "grpo" and train.group_size < 2,
            f"train.group_size={train.group_size}: credit grpo compares trajectories of one row, so it needs at least 2",
        ),
        (
            config.sampling.temperature == 0,
            "sampling.temperature=0 makes all trajectories of a row the same; training needs a temperature above 0",
        ),
        (
            train.lr == 0,
            "train.lr=0 trains nothing; use `turnwise rollout` for conversations without training",
        ),
        (
            train.minibatches > train.batch_size * train.group_size,
            f"train.minibatches={train.minibatches} is more than the {train.batch_size * train.group_size} trajectories of "
            "a step",
        ),
        (
            train.warmup_steps >= train.steps,
            f"train.warmup_steps={train.warmup_steps} leaves none of train.steps={train.steps} at the full rate",
        ),
        (
            train.warmup_steps == 1 and train.lr_schedule == "constant",
            "train.warmup_steps=1 has no effect: the first step of a warm-up of n has the rate lr/n, which is lr; remove it",
        ),
    ]


def _recipe_problems(config: Config) -> list[tuple[bool, str]]:
    """The same for all other options."""
    data, of_sft = config.data, sorted(changed_options(config.sft))
    return [
        (
            config.limits.turns == 1 and config.loss_mask.use in LOSS_MASKS and config.loss_mask.use != "all",
            f"loss_mask={config.loss_mask.use} has no effect with limits.turns=1, whose one turn is the last: remove it, or "
            f"raise limits.turns",
        ),
        (
            config.engine.name != "local",
            f"engine.name={config.engine.name} cannot be trained: its tokens are not the policy's. Use engine.name=local, "
            f"or `turnwise rollout`",
        ),
        (
            config.thinking != "keep" and config.limits.turns == 1,
            f"thinking={config.thinking} has no effect with limits.turns=1: nothing goes on after the first turn. Remove it",
        ),
        (
            data.eval is None and bool(changed_options(config.eval)),
            f"eval.{next(iter(changed_options(config.eval)), '')} has no effect without held-out rows: set data.eval",
        ),
        (
            data.eval is None and data.eval_split != Data.model_fields["eval_split"].default,
            "data.eval_split has no effect without data.eval",
        ),
        (
            bool(changed_options(config.rollout)),
            f"rollout.{next(iter(changed_options(config.rollout)), '')} has no effect in training: it is an option of `turnwise "
            f"rollout`; the rows and conversations of a step are train.batch_size and train.group_size",
        ),
        (bool(of_sft), f"sft.{next(iter(of_sft), '')} has no effect in training: it is an option of `turnwise sft`"),
        (
            config.resume == "auto" and config.replace,
            "resume=auto goes on with the former run and replace=true moves it away: choose one",
        ),
    ]


def refuse_without_reward(config: Config) -> None:
    """Refuse a training run in which nothing can give a reward, as far as that is known before it begins.

    Raises ConfigError.
    """
    reward = config.reward
    if reward.trajectory or reward.turns or reward.group or config.tools or config.mcp.servers is not None:
        return  # a tool may score a call
    if config.environment.use in WITHOUT_REWARD:
        raise ConfigError(
            f"nothing gives a reward: environment={config.environment.use} gives none, and the recipe names no reward function "
            f"and no tool that could score a call. Set reward.trajectory (docs/recipes.md), or an environment that gives "
            f"rewards"
        )


def _deterministic_problems(config: Config) -> list[tuple[bool, str]]:
    if not config.deterministic:
        return []
    engine = config.engine
    return [
        (config.train.overlap, "deterministic=true is synchronous; train.overlap=true is not: choose one"),
        (
            config.model.device not in ("auto", "cpu"),
            f"deterministic=true is for the CPU; model.device={config.model.device} is not one: use model.device=cpu",
        ),
        (
            isinstance(engine, LocalEngine) and engine.threads > 1,
            "deterministic=true runs with one thread; remove engine.threads",
        ),
    ]


def file_problems(data: Data) -> list[tuple[bool, str]]:
    """Of options that say which part of a data set is meant, and whether they say it of a single file."""

    def is_file(source: str | list[str] | None) -> bool:
        several = [source] if isinstance(source, str) else source
        return several is not None and all(one.endswith(FILES) for one in several)

    only_files = is_file(data.train) and (data.eval is None or is_file(data.eval))
    return [
        (
            is_file(data.train) and "split" in changed_options(data),
            f"data.split has no effect on the single file {data.train}",
        ),
        (is_file(data.eval) and "eval_split" in changed_options(data), f"data.eval_split has no effect on {data.eval}"),
        (only_files and data.subset is not None, f"data.subset has no effect on the single file {data.train}"),
    ]
