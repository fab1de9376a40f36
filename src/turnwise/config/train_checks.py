"""Refuses, at start-up, options of a recipe that have no effect in a training run or that contradict each other.

A check reads the complete recipe and returns problems; each problem has the value, the rule and the fix. `chosen_estimator`
says which estimator a recipe uses if `credit.name` leaves the choice to turnwise. No option is accepted and then ignored: what
a run would not read is refused here; what only a run of so few steps would not read is said (`short_run_notes`).
"""

from __future__ import annotations

from typing import Literal

from turnwise.config.engine_checks import cluster_problems, refuse_engine
from turnwise.config.policy_checks import refuse_unusable_policies, trained_policy_problems
from turnwise.config.teacher_checks import teacher_problems
from turnwise.data.rows import FILES
from turnwise.errors import ConfigError, counted
from turnwise.models.device import gpu_number, known_dtype
from turnwise.options.algorithm import (
    OWN_CREDIT,
    AutoCredit,
    CreditSection,
    Grpo,
    OptimizerSection,
    OwnCredit,
    OwnLoss,
    PpoClip,
    Spo,
    TurnReturn,
)
from turnwise.options.policies import PolicySection
from turnwise.options.schema import Config, DataSection, QuantizationSection
from turnwise.options.section import changed_options
from turnwise.user_code.algorithms import Needs, declared_needs

# credit

WITHOUT_REWARD = (
    "turnwise.environments.environment:SingleTurn",
    "turnwise.environments.users:ScriptedUser",
    "turnwise.environments.users:ModelledUser",
)
"""Built-in environments that never give a reward."""


def chosen_estimator(config: Config) -> CreditSection:
    """The section of the recipe's estimator. `auto` is `turn_return` if turns can have rewards or penalties, else `grpo`. A
    function of the user is imported, and its section says what it declares.

    Raises ConfigError if it cannot be imported.
    """
    section = config.credit
    if isinstance(section, OwnCredit):
        declared = declared_needs(section.use, key="credit")
        return OWN_CREDIT[declared.critic, declared.baseline](use=section.use, arguments=section.arguments)
    if not isinstance(section, AutoCredit):
        return section
    if turns_can_have_rewards(config) or (config.limits.turns > 1 and config.reward.kl.coef > 0):
        return TurnReturn(scale=section.scale)
    return Grpo(scale=section.scale)


def needs_critic(config: Config) -> bool:
    """Whether the recipe's estimator needs the values of a critic."""
    return chosen_estimator(config).needs_values is not None


def turns_can_have_rewards(config: Config) -> bool:
    """Whether a turn before the last can have a reward, as far as the recipe shows it."""
    return config.limits.turns > 1 and (bool(config.reward.turns) or environment_may_reward(config))


def credit_problems(config: Config) -> list[tuple[bool, str]]:
    """Problems of the section credit: whether the recipe has the problem, and the error message for it."""
    section = chosen_estimator(config)
    return [*_group_problems(config, section), *_need_problems(config, section), *_idle_problems(config, section)]


def _group_problems(config: Config, section: CreditSection) -> list[tuple[bool, str]]:
    size = config.train.group_size
    return [
        (
            size < 2 and section.compares_group,
            f"train.group_size={size} is too small: credit.name={section.name} compares the trajectories of one row. Set "
            f"train.group_size to 2 or more",
        ),
        (
            size * config.train.batch_size < 2 and isinstance(section, Spo) and section.whiten,
            "credit.name=spo with credit.whiten compares the conversations of a step, and train.batch_size=1 with "
            "train.group_size=1 gives one, whose advantage is 0: raise train.batch_size, or set credit.whiten=false",
        ),
    ]


def _need_problems(config: Config, section: CreditSection) -> list[tuple[bool, str]]:
    """What the estimator needs and the recipe does not have."""
    reward = config.reward
    parts = _reward_parts(config)
    return [
        (
            section.normalises_parts and parts < 2,
            f"credit.name={section.name} needs two parts of the reward to normalise, and the recipe has {parts}: add a "
            f"reward function, or set credit.name=grpo",
        ),
        (
            section.needs_turn_rewards and not turns_can_have_rewards(config),
            f"credit.name={section.name} needs rewards of turns: limits.turns must be above 1, and the recipe must have a "
            f"function in reward.turns, tools, or an environment that gives rewards. For one reward of the conversation set "
            f"credit.name=grpo",
        ),
        (
            section.needs_scores and config.environment.use in WITHOUT_REWARD and not reward.turns,
            f"credit.name={section.name} needs scores in turn.info: environment={config.environment.use} sets none, and the "
            f"recipe has no function in reward.turns that could. Use an environment that sets them, or set credit.name=grpo",
        ),
    ]


def _idle_problems(config: Config, section: CreditSection) -> list[tuple[bool, str]]:
    """Options that change nothing with the rest of the recipe."""
    one_turn = config.limits.turns == 1
    changed = [name for name in changed_options(section) if name in section.of_later_turns]
    return [
        (
            one_turn and bool(changed),
            f"credit.{next(iter(changed), '')} has no effect with limits.turns=1, because there are no later turns: remove it, "
            f"or raise limits.turns",
        )
    ]


def turn_reward_source(config: Config) -> str | None:
    """What gives rewards or penalties to turns, with a verb: the recipe does not show whether an environment does. None if
    nothing does."""
    if config.reward.turns:
        return "reward.turns gives"
    if config.environment.use not in WITHOUT_REWARD:
        return f"environment={config.environment.use} may give"
    if _tools_may_reward(config):
        return "tools may give"
    return "reward.kl gives" if config.reward.kl.coef > 0 else None


def _tools_may_reward(config: Config) -> bool:
    """The result of an MCP server's tool has no reward, unless a class of the user (`mcp.use`) makes another result of it."""
    return bool(config.tools) or "use" in changed_options(config.mcp)


def environment_may_reward(config: Config) -> bool:
    """Whether the environment or a tool may give rewards."""
    return config.environment.use not in WITHOUT_REWARD or _tools_may_reward(config)


def _reward_parts(config: Config) -> int:
    """The number of parts of the reward: functions, and what environment and tools give."""
    return len(config.reward.functions) + environment_may_reward(config)


# critic


def critic_problems(config: Config) -> list[tuple[bool, str]]:
    """Whether the recipe has a problem, and the error message for it."""
    critic, train = config.critic, config.train
    changed = next(iter(changed_options(critic)), None)
    one_step = train.minibatches == 1 and train.ppo_epochs == 1
    return [
        (
            changed is not None and not needs_critic(config),
            f"critic.{changed} has no effect with credit.name={chosen_estimator(config).name}, which needs no critic: remove it, "
            f"or set credit.name to gae, turn_gae, critic or bilevel_gae. A function of your own says that it needs one with "
            f"@turnwise.needs(critic='turn') or @turnwise.needs(critic='token')",
        ),
        (
            loss_needs(config).values and not needs_critic(config),
            f"{getattr(config.loss, 'use', '')} declares values (@needs), and credit.name={chosen_estimator(config).name} has no "
            f"critic: set credit.name to gae, turn_gae, critic or bilevel_gae, or remove values",
        ),
        (
            one_step and "clip" in changed_options(critic),
            "critic.clip has no effect with one optimizer step a batch: estimates do not move before the step. Remove it, "
            "or set train.minibatches or train.ppo_epochs",
        ),
    ]


# KL divergence and reference model


def loss_needs(config: Config) -> Needs:
    """What a loss of the user declares; nothing for the others. Raises ConfigError if it cannot be imported."""
    return declared_needs(config.loss.use, key="loss") if isinstance(config.loss, OwnLoss) else Needs()


def needs_reference(config: Config) -> bool:
    """Whether the recipe has a reference model: for the KL divergence in the loss or in the reward, for a loss of the user, as a
    frozen policy, or for the loss of a trained policy."""
    recipes = (config, *map(config.of_policy, config.trained_policies))
    of_loss = any(recipe.loss.kl_coef > 0 or loss_needs(recipe).reference for recipe in recipes)
    return of_loss or config.reward.kl.coef > 0 or any(policy.reference for policy in config.policies)


def kl_problems(config: Config) -> list[tuple[bool, str]]:
    """Whether the recipe has a problem, and the error message for it."""
    loss, kl = config.loss, config.reward.kl
    changed = next((name for name in changed_options(kl) if name != "coef"), None)
    return [
        (
            loss.kl_coef == 0 and loss.kl_estimator != "k3",
            f"loss.kl_estimator={loss.kl_estimator} has no effect without a KL term: set loss.kl_coef, or remove it",
        ),
        (
            kl.coef == 0 and changed is not None,
            f"reward.kl.{changed} has no effect without a KL divergence in the reward: set reward.kl.coef, or remove it",
        ),
        (
            kl.target is None and changed == "horizon",
            f"reward.kl.horizon={kl.horizon} has no effect with a constant coefficient: set reward.kl.target, or remove it",
        ),
        (
            kl.coef > 0 and config.credit.normalises_parts,
            f"credit.name={config.credit.name} normalises each part of the reward, so reward.kl.coef would have no effect: set "
            f"loss.kl_coef instead, or another credit.name",
        ),
        *_reference_problems(config),
    ]


def _reference_problems(config: Config) -> list[tuple[bool, str]]:
    reference, adapter = config.reference, config.model.lora.rank is not None
    changed = next(iter(changed_options(reference)), None)
    return [
        (
            changed is not None and not needs_reference(config),
            f"reference.{changed} has no effect without a KL divergence: set loss.kl_coef or reward.kl.coef, or remove it. A "
            f"loss of your own says that it needs the reference model with @turnwise.needs(reference=True)",
        ),
        (
            reference.path is not None and reference.source != "auto",
            f"reference.source={reference.source} has no effect with reference.path={reference.path}: remove one of them",
        ),
        (
            reference.source == "adapter_off" and not adapter,
            "reference.source=adapter_off needs an adapter, and the recipe trains all weights: set model.lora.rank, or remove "
            "reference.source",
        ),
        (
            reference.sync_every is None and "sync_weight" in changed_options(reference),
            "reference.sync_weight has no effect without reference.sync_every: set it, or remove reference.sync_weight",
        ),
        (
            reference.sync_every is not None and adapter,
            "reference.sync_every changes the weights of the reference model, and with model.lora.rank the policy is these "
            "weights and an adapter: remove one of them",
        ),
    ]


# record


def record_problems(config: Config) -> list[tuple[bool, str]]:
    """Each possible problem: whether the recipe has it, and the error message."""
    kept, size = config.record.best_and_worst, config.train.group_size
    return [
        (
            kept is not None and 2 * kept >= size,
            f"record.best_and_worst={kept} has no effect: it records the {kept} best and the {kept} worst conversations of a "
            f"group, and a group has {size} (train.group_size). Set a smaller number, or remove it",
        ),
    ]


# health


def health_problems(config: Config) -> list[tuple[bool, str]]:
    """Each possible problem: whether the recipe has it, and the error message."""
    health, train = config.health, config.train
    used = {*changed_options(health), *health.stop}
    of_teacher = next((name for name in ("teacher_gap", "teacher_growth") if name in used), None)
    of_rewards = next(iter(sorted(used & {"zero_std", "constant_reward", "reward_correlation", "reward_drop"})), None)
    alone = next((name for name in ("zero_std", "duplicates") if name in used), None)
    return [
        (
            "mismatch" in used and config.correction.action is None,
            "health.mismatch has no effect without correction.action, which computes the metric correction/k3: set "
            "correction.action, or remove health.mismatch",
        ),
        (
            "slow_rank" in used and not config.cluster.distributed,
            "health.slow_rank has no effect in one process: remove it, or train on several ranks (section cluster)",
        ),
        (
            alone is not None and train.group_size == 1,
            f"health.{alone} has no effect with train.group_size=1, because it compares the conversations of a group: remove it",
        ),
        (
            of_teacher is not None and not config.teacher.on,
            f"health.{of_teacher} has no effect without a teacher: remove it",
        ),
        (
            of_rewards is not None and config.credit.name == "none",
            f"health.{of_rewards} has no effect with credit=none, because rewards are not learnt from: remove it",
        ),
        (
            "reward_correlation" in used and _reward_parts(config) < 2,
            "health.reward_correlation has no effect, because the reward has only one part: remove it",
        ),
        (
            "reward_drop" in used and bool(changed_options(config.data.curriculum)),
            "health.reward_drop has no effect with data.curriculum, which chooses other rows as the model learns: remove it",
        ),
    ]


# the complete recipe

Problem = tuple[bool, str]
"""Whether the recipe has the problem, and the error message for it."""


def refuse_without_effect(config: Config) -> None:
    """Refuse options of a training run that have no effect or that contradict each other. The first problem is raised.

    Raises ConfigError.
    """
    refuse_engine(config)
    refuse_unusable_policies(config)
    problems = [
        *_engine_problems(config),
        *trained_policy_problems(config),
        *_row_problems(config),
        *_loss_problems(config),
        *_selection_problems(config),
        *kl_problems(config),
        *teacher_problems(config),
        *credit_problems(config),
        *critic_problems(config),
        *_optimization_problems(config),
        *_conversation_problems(config),
        *_evaluation_problems(config),
        *_other_command_problems(config),
        *run_problems(config),
        *_turns_problems(config),
        *_deterministic_training_problems(config),
        *_rollout_server_problems(config),
        *health_problems(config),
        *cluster_problems(config, config.train),
        *record_problems(config),
        *file_problems(config.data),
        *weight_problems(config.data),
        *(problem for policy in config.trained_policies for problem in _problems_of_policy(config, policy)),
    ]
    for holds, message in problems:
        if holds:
            raise ConfigError(message)


def _problems_of_policy(config: Config, policy: PolicySection) -> list[Problem]:
    """Problems of the options that a trained policy has of its own, or that it cannot take from the recipe."""
    recipe = config.of_policy(policy)
    credit = chosen_estimator(recipe)
    problems = [
        (
            credit.needs_values is not None or loss_needs(recipe).values,
            f"its credit.name={credit.name} or its loss needs a critic, and only the model of the section `model` has one: "
            f"give the policy another credit or loss, such as credit={{name: grpo}}",
        ),
        *_loss_problems(recipe),
        *kl_problems(recipe),
        *credit_problems(recipe),
        *run_problems(recipe),
    ]
    return [(holds, f"the policy {policy.name!r}: {message}") for holds, message in problems]


def short_run_notes(config: Config, section: Literal["train", "sft"], steps: int) -> list[str]:
    """What options come to in a run of so few steps. It is said and not refused: runs are shortened for a try."""
    optimization = config.sft if section == "sft" else config.train
    warmup, of_run = optimization.warmup_steps, f"in this run of {counted(steps, 'step')}"
    notes = [
        (
            warmup >= steps,
            f"{section}.warmup_steps={warmup}: {of_run}, the learning rate rises until the end, to "
            f"{optimization.lr_at(steps - 1, steps=steps):g}. A share of the steps ({section}.warmup_steps=0.1) fits each length",
        )
    ]
    if section == "train":
        sync, window = config.reference.sync_every, config.health.window
        used = {*changed_options(config.health), *config.health.stop}
        compared = next(iter(sorted(used & {"tool_use", "entropy", "length", "teacher_growth"})), None)
        notes += [
            (
                config.critic.warmup_steps >= steps,
                f"critic.warmup_steps={config.critic.warmup_steps}: {of_run}, only the critic is trained",
            ),
            (
                sync is not None and sync >= steps,
                f"reference.sync_every={sync}: {of_run}, the reference model does not change",
            ),
            (
                config.record.every > 1 and steps <= 2,
                f"record.every={config.record.every} has no effect {of_run}: the first and the last are always recorded",
            ),
            (
                bool(used - {"constant_reward", "reward_drop", "failed", "cut", "stop"}) and window > steps,
                f"health.window={window}: {of_run}, only constant_reward, reward_drop, failed and cut have an effect",
            ),
            (
                compared is not None and window <= steps < 2 * window,
                f"health.{compared} has no effect {of_run}: it compares the first {window} (health.window) with the last",
            ),
        ]
    return [text for holds, text in notes if holds]


def training_warnings(config: Config) -> list[str]:
    """Combinations of options that are possible and that seldom are meant, for a warning before the first step."""
    train = config.train
    trajectories = train.batch_size * train.group_size
    small, rest = divmod(trajectories, train.minibatches)
    stale = (
        [f"train.max_staleness={train.max_staleness}"]
        if train.max_staleness and config.correction.action is None
        else []
    )
    later = [
        f"train.{name}={getattr(train, name)}" for name in ("minibatches", "ppo_epochs") if getattr(train, name) > 1
    ]
    action = config.correction.action
    warnings = [
        (
            config.engine.quantization is not None,
            f"{config.engine.quantization}: the engine samples from another distribution than is trained, also with the same "
            f"weights. It is trained "
            + (
                "without rollout correction: set correction.action=truncate"
                if action is None
                else f"with correction.action={action} (docs/losses.md#rollout-correction)"
            )
            + ". correction/k3 and ratio/max_deviation show the difference",
        ),
        (
            rest > 0 and small > 0,
            f"train.minibatches={train.minibatches} does not divide the {trajectories} conversations of a step "
            f"(train.batch_size x train.group_size): the optimizer steps are on {small} or {small + 1} conversations, and a "
            f"conversation counts more in the smaller ones. Use a divisor of {trajectories} for equal parts",
        ),
        (
            not config.loss.has_ratio and bool(stale or later),
            f"loss.name={config.loss.name} has no probability ratio, so with {' and '.join(stale + later)} tokens that other "
            f"weights sampled are trained on as if the present weights had sampled them. Use loss.name=ppo_clip or cispo"
            f"{', or importance weights (correction.action=truncate)' if stale else ''}"
            f"{', or one optimizer step for each batch' if later else ''}",
        ),
        (
            _same_as_ppo_clip(config),
            f"with one optimizer step a batch, all probability ratios are 1, so loss.name={config.loss.name} has the gradient of "
            f"loss.name=ppo_clip (with loss.normalizer={config.loss.normalizer}). They differ with train.minibatches, "
            f"train.ppo_epochs or train.max_staleness",
        ),
    ]
    return [text for holds, text in warnings if holds]


def _on_policy(config: Config) -> bool:
    """Whether a batch has one optimizer step, before which the policy is the one that sampled it."""
    train = config.train
    return train.minibatches == 1 and train.ppo_epochs == 1 and train.max_staleness == 0


def _same_as_ppo_clip(config: Config) -> bool:
    """Whether another loss of the ratio was chosen, and the ratio is always 1."""
    of_trainer = config.correction.action is None or config.correction.decoupled  # else the ratio to the engine
    chosen = config.loss.has_ratio and not isinstance(config.loss, PpoClip | OwnLoss)
    return chosen and of_trainer and _on_policy(config) and config.credit.name != "none"


def _engine_problems(config: Config) -> list[Problem]:
    """An engine that cannot be trained with."""
    return [
        (
            not config.engine.samples_tokens,
            "engine.name=openai cannot be used in training: an OpenAI-compatible endpoint returns text, without the ids and the "
            "log-probabilities of the sampled tokens, and it cannot load new weights. Use it with `turnwise eval` or `turnwise "
            "rollout`; to train, remove the section engine or choose another engine",
        ),
        (
            config.model.router_replay and not config.engine.records_experts,
            f"model.router_replay=true cannot be combined with engine.name={config.engine.name}, from which turnwise takes no "
            f"experts (docs/losses.md): use engine.name=local, or remove model.router_replay",
        ),
    ]


def _optimization_problems(config: Config) -> list[Problem]:
    """Problems of the sections train and sampling."""
    train = config.train
    trajectories = train.batch_size * train.group_size
    return [
        (
            config.sampling.temperature == 0,
            "sampling.temperature=0 makes all trajectories of a row identical: set a temperature above 0",
        ),
        (
            train.lr == 0,
            "train.lr=0 does not change the weights: set a learning rate above 0, or use `turnwise rollout` for conversations "
            "without training",
        ),
        (
            train.minibatches > trajectories,
            f"train.minibatches={train.minibatches} is more than the {trajectories} trajectories of a step: set at most "
            f"{trajectories}, or raise train.batch_size",
        ),
        (
            train.min_group_size > train.group_size,
            f"train.min_group_size={train.min_group_size} is more than train.group_size={train.group_size}, so no group could be "
            f"trained on: lower it",
        ),
        (
            train.steps is not None and train.epochs is not None,
            f"train.steps={train.steps} and train.epochs={train.epochs or 0:g} both say how long the run is: remove one of them",
        ),
        (
            train.epochs is not None and config.data.weights is not None,
            "data.weights needs train.steps: the data sets are repeated at their own rates, so train.epochs does not say how "
            "many steps there are",
        ),
        (
            train.warmup_steps == 1 and train.lr_schedule == "constant",
            "train.warmup_steps=1 has no effect: the first of n warm-up steps has the learning rate lr/n, and lr/1 is lr. "
            "Remove it",
        ),
    ]


def _loss_problems(config: Config) -> list[Problem]:
    """Problems of the section loss."""
    train, loss = config.train, config.loss
    on_policy = _on_policy(config)
    of_ratio = [name for name in changed_options(loss) if name in (*loss.of_ratio, "kl_cov_ratio")]
    options = " and ".join(f"loss.{name}" for name in of_ratio)
    same_weights = config.engine.embedded is not None and train.max_staleness == 0 and config.exact
    correction = config.correction
    return [
        (
            same_weights and correction.action is not None,
            f"correction.action={correction.action} has no effect: the engine samples with the trainer's own weights in the same "
            f"precision, so all ratios are 1. Write correction.action=null, or set train.max_staleness",
        ),
        (
            same_weights and on_policy and correction.off_policy_sequence_mask_delta is not None,
            "correction.off_policy_sequence_mask_delta has no effect with one optimizer step a batch on tokens of the same "
            "weights: remove it, or set train.minibatches, train.ppo_epochs or train.max_staleness",
        ),
        (
            on_policy and bool(of_ratio),
            f"{options} {'have' if len(of_ratio) > 1 else 'has'} no effect with one optimizer step a batch (the probability "
            f"ratio is 1): remove {'them' if len(of_ratio) > 1 else 'it'}, or set train.minibatches, train.ppo_epochs or "
            f"train.max_staleness",
        ),
        (
            loss.normalizer == "constant" and loss.constant_length is None,
            "loss.normalizer=constant needs loss.constant_length: the number of tokens by which the sum over the tokens of a "
            "conversation is divided",
        ),
        (
            loss.normalizer != "constant" and loss.constant_length is not None,
            f"loss.constant_length has no effect with loss.normalizer={loss.normalizer}: remove it, or set "
            f"loss.normalizer=constant",
        ),
    ]


def _selection_problems(config: Config) -> list[Problem]:
    """Problems of the options that select tokens by their covariances."""
    loss = config.loss
    changed = changed_options(loss)
    bounds = next((name for name in changed if name in ("clip_cov_low", "clip_cov_high")), None)
    return [
        (
            loss.clip_cov_ratio == 0 and bounds is not None,
            f"loss.{bounds} has no effect without loss.clip_cov_ratio: set it, or remove loss.{bounds}",
        ),
        (
            loss.kl_cov_ratio == 0 and "kl_cov_coef" in changed,
            f"loss.kl_cov_coef={loss.kl_cov_coef} has no effect without loss.kl_cov_ratio: set it, or remove loss.kl_cov_coef",
        ),
        (
            loss.clip_cov_low >= loss.clip_cov_high,
            f"loss.clip_cov_low={loss.clip_cov_low:g} must be less than loss.clip_cov_high={loss.clip_cov_high:g}: no "
            f"covariance lies between them",
        ),
    ]


def _conversation_problems(config: Config) -> list[Problem]:
    """Problems of the sections loss_mask, engine and thinking."""
    one_turn = config.limits.turns == 1
    mask = config.loss_mask.use
    return [
        (
            one_turn and mask in ("last_turn", "after_last_user", "last_round"),
            f"loss_mask={mask} has no effect with limits.turns=1, because the first turn is also the last: remove it, or "
            f"raise limits.turns",
        ),
        (
            config.engine.script_file is not None,
            f"engine.name={config.engine.name} cannot be used in training: its tokens are not sampled from the model. Use "
            f"engine.name=local, or `turnwise rollout`",
        ),
        (
            one_turn and config.thinking != "keep",
            f"thinking={config.thinking} has no effect with limits.turns=1: no prompt contains an earlier turn. Remove it, or "
            f"raise limits.turns",
        ),
    ]


def _row_problems(config: Config) -> list[Problem]:
    """Problems of train.dynamic_sampling and data.curriculum."""
    train, curriculum = config.train, config.data.curriculum
    changed = next((name for name in changed_options(curriculum) if name in ("keep", "column")), None)
    low, high = curriculum.low, curriculum.high
    return [
        (
            train.dynamic_sampling > 0 and train.group_size < 2,
            f"train.dynamic_sampling replaces groups whose trajectories have the same rewards, and with train.group_size="
            f"{train.group_size} each group has one trajectory: raise train.group_size, or remove train.dynamic_sampling",
        ),
        (
            low is None and high is None and changed is not None,
            f"data.curriculum.{changed} has no effect without data.curriculum.low or data.curriculum.high: set one of them",
        ),
        (
            low is not None and high is not None and low >= high,
            f"data.curriculum.low={low} must be less than data.curriculum.high={high}: no pass rate lies between them",
        ),
    ]


def weight_problems(data: DataSection) -> list[Problem]:
    """Problems of data.weights."""
    sources = [data.train] if isinstance(data.train, str) else data.train
    given = len(data.weights or sources)
    return [
        (
            given != len(sources),
            f"data.weights has {given} numbers, and data.train has {len(sources)}"
            f"{' data set' if len(sources) == 1 else ' data sets'}: give a weight for each data set in the list data.train",
        ),
        (
            data.weights is not None and len(set(sources)) < len(sources),
            "data.weights: a data set is named twice in data.train. Name it once, with the sum of its weights",
        ),
    ]


def _evaluation_problems(config: Config) -> list[Problem]:
    """Problems of the section eval and of data.eval_split."""
    without_rows = config.data.eval is None
    changed = next(iter(changed_options(config.eval)), None)
    return [
        (
            without_rows and changed is not None,
            f"eval.{changed} has no effect without held-out rows: set data.eval, or remove it",
        ),
        eval_split_problem(config.data),
        best_problem(config),
    ]


def _background_problem(config: Config) -> Problem:
    """checkpoint.background in a run that would wait for each of its checkpoints."""
    steps, every = config.train.steps or config.sft.steps, config.checkpoint.every
    return (
        config.checkpoint.background and steps is not None and (every or 1) >= steps,
        f"checkpoint.background has no effect: the only checkpoint is that of the last of {steps} steps "
        f"(checkpoint.every={every}), for which the run waits. Remove it, or write checkpoints more often",
    )


def best_problem(config: Config) -> Problem:
    """checkpoint.best without held-out rows."""
    best = config.checkpoint.best
    return (
        config.data.eval is None and best is not None,
        f"checkpoint.best={best} has no effect without held-out rows, whose evaluations it compares: set data.eval, or remove it",
    )


def eval_split_problem(data: DataSection) -> Problem:
    """data.eval_split without data.eval."""
    return (
        data.eval is None and data.eval_split != DataSection.model_fields["eval_split"].default,
        "data.eval_split has no effect without data.eval: set data.eval, or remove it",
    )


def _other_command_problems(config: Config) -> list[Problem]:
    """Options that only another command reads."""
    of_rollout = next(iter(changed_options(config.rollout)), None)
    of_sft = next(iter(sorted(changed_options(config.sft))), None)
    return [
        (
            of_rollout is not None,
            f"rollout.{of_rollout} has no effect in training: it is an option of `turnwise rollout`. In training, "
            f"train.batch_size is the number of rows in a step, and train.group_size the number of conversations on each row",
        ),
        (of_sft is not None, f"sft.{of_sft} has no effect in training: it is an option of `turnwise sft`. Remove it"),
    ]


def run_problems(config: Config) -> list[Problem]:
    """Contradicting options of how a run starts, options of an adapter without adapter, and of the optimizer without effect."""
    optimization = next(
        (part for part in (config.train, config.sft) if part.optimizer != OptimizerSection()), config.train
    )
    optimizer, lora = optimization.optimizer, config.model.lora
    of_adapter = next((name for name in changed_options(config.model.lora) if name != "rank"), None)
    return [
        (
            optimizer.name == "adafactor" and "betas" in changed_options(optimization),
            "betas has no effect with optimizer.name=adafactor, which has no moving average of the gradient: remove it",
        ),
        (
            optimizer.master_weights != "float32" and (known_dtype(config) == "float32" or lora.rank is not None),
            f"optimizer.master_weights={optimizer.master_weights} has no effect, because all trained weights are float32 "
            f"(model.dtype=float32, or an adapter): remove it",
        ),
        (
            optimizer.grad_accum_dtype is not None and (known_dtype(config) == "float32" or lora.rank is not None),
            f"optimizer.grad_accum_dtype={optimizer.grad_accum_dtype} has no effect, because all trained weights are float32 "
            f"(model.dtype=float32, or an adapter): remove it",
        ),
        (
            optimizer.grad_accum_dtype is not None and config.cluster.fsdp.reduce_dtype == "bfloat16",
            f"optimizer.grad_accum_dtype={optimizer.grad_accum_dtype} has no effect with cluster.fsdp.reduce_dtype=bfloat16, "
            f"to which the sums of ranks are rounded: remove one of them",
        ),
        (
            optimizer.offload != "none" and (config.model.device == "cpu" or config.deterministic),
            f"optimizer.offload={optimizer.offload} has no effect, because the model is on the CPU: remove it",
        ),
        (
            optimizer.offload == "cpu" and optimizer.master_weights != "float32",
            f"optimizer.offload=cpu keeps float32 master weights in the CPU's memory, and the recipe has "
            f"optimizer.master_weights={optimizer.master_weights}: remove one of them",
        ),
        (
            lora.rank is None and of_adapter is not None,
            f"model.lora.{of_adapter} has no effect without an adapter: set model.lora.rank, or remove it",
        ),
        _background_problem(config),
        *_quantization_problems(config),
        (
            config.resume == "auto" and config.replace,
            "resume=auto continues the earlier run and replace=true moves it away: remove one of them",
        ),
    ]


def _turns_problems(config: Config) -> list[Problem]:
    """optimizer.offload=sampling in a run whose engine does not take turns with the trainer on the same GPU."""
    servers = config.engine.servers
    here = "train.optimizer.offload=sampling needs an engine that samples on the GPU of the trainer, and not at the same time"
    elsewhere = config.runs_conversations_elsewhere
    devices = None if servers is None else servers.devices
    trainer = gpu_number(config.model.device)
    problems = [
        (
            config.train.max_staleness > 0,
            f"{here}: with train.max_staleness={config.train.max_staleness}, conversations run while the model is trained. Use "
            f"train.optimizer.offload=cpu, or remove train.max_staleness",
        ),
        (
            config.cluster.distributed,
            f"train.optimizer.offload=sampling cannot be used with several ranks (cluster.launcher={config.cluster.launcher}): "
            f"use train.optimizer.offload=cpu, or remove the section cluster",
        ),
        (elsewhere is not None, f"{here}, and conversations run in other processes ({elsewhere}): remove it"),
        (
            servers is not None and not servers.sleep,
            f"{here}: without engine.sleep, a server keeps its memory during training. Set engine.sleep=true, or remove it",
        ),
        (
            devices is not None and trainer not in devices,
            f"{here}, and engine.devices={devices} are others than GPU {trainer}: remove one of them",
        ),
    ]
    chosen = config.train.optimizer.offload == "sampling"
    return [(chosen and holds, message) for holds, message in problems]


def _quantization_problems(config: Config) -> list[Problem]:
    """Problems of weights in 4 bits."""
    quantization, engine = config.model.quantization, config.engine.name
    quantized = quantization.bits is not None
    changed = next((name for name in changed_options(quantization) if name != "bits"), None)
    return [
        (
            not quantized and changed is not None,
            f"model.quantization.{changed} has no effect without model.quantization.bits: set bits=4, or remove it",
        ),
        (
            quantized and config.model.lora.rank is None,
            "model.quantization.bits=4 needs an adapter, because weights in 4 bits cannot be trained: set model.lora.rank (16 "
            "is common), or remove model.quantization",
        ),
        (
            quantized and config.model.lora.dora,
            "model.quantization.bits=4 cannot be combined with model.lora.dora: remove one of them",
        ),
        (
            quantized and config.model.autocast,
            "model.quantization.bits=4 cannot be combined with model.autocast: products with quantized weights are computed in "
            "model.dtype. Set model.dtype=bfloat16 instead of model.autocast",
        ),
        (
            quantized and config.cluster.distributed,
            f"model.quantization.bits=4 cannot be used with several ranks (cluster.launcher={config.cluster.launcher}), because "
            f"quantized weights are not divided among them. Train in one process, or remove model.quantization",
        ),
        (
            quantized and config.engine.servers is not None,
            f"model.quantization.bits=4 cannot be combined with engine.name={engine}: its servers would sample with weights that "
            f"are not quantized, and so from another model than the one that is trained. Use engine.name=local, or remove "
            f"model.quantization",
        ),
    ]


def refused_with_quantization(config: Config) -> bool:
    """Whether the recipe could not train on weights in 4 bits."""
    model = config.model.model_copy(update={"quantization": QuantizationSection(bits=4)})
    return any(holds for holds, _ in _quantization_problems(config.model_copy(update={"model": model})))


def refuse_without_reward(config: Config) -> None:
    """Refuse a training run in which nothing can give a reward, as far as the recipe shows it.

    Raises ConfigError.
    """
    if config.teacher.on and config.credit.name == "none":
        return  # a teacher alone is learnt from
    reward = config.reward
    functions = reward.functions
    if any(function.weight for function in functions) or _tools_may_reward(config):
        return
    if functions and config.environment.use in WITHOUT_REWARD:
        names = ", ".join(function.use for function in functions)
        raise ConfigError(
            f"nothing gives a reward: all reward functions ({names}) have weight=0, and environment={config.environment.use} "
            f"gives no rewards. Set the weight of one of them, or use an environment that gives rewards"
        )
    if config.environment.use in WITHOUT_REWARD:
        of_mcp = " (results of MCP servers have no reward)" if config.mcp.servers is not None else ""
        raise ConfigError(
            f"nothing gives a reward: environment={config.environment.use} gives no rewards, and the recipe has no reward "
            f"function and no tool that could score a call{of_mcp}. Set reward.trajectory (docs/recipes.md), or use an "
            f"environment that gives rewards"
        )


def _rollout_server_problems(config: Config) -> list[Problem]:
    """Problems of the section rollout_server."""
    server = config.rollout_server
    changed = next((name for name in changed_options(server) if name != "url"), None)
    return [
        (
            server.url is None and changed is not None,
            f"rollout_server.{changed} has no effect without rollout_server.url: set it, or remove rollout_server.{changed}",
        ),
    ]


def _deterministic_training_problems(config: Config) -> list[Problem]:
    engine = config.engine.embedded
    threads = 1 if engine is None else engine.threads
    return [
        (
            config.deterministic and config.train.max_staleness > 0,
            f"deterministic=true cannot be combined with train.max_staleness={config.train.max_staleness}, because the "
            f"rows and the weights of a step then depend on timing: remove one of them",
        ),
        (
            config.deterministic and config.train.group_timeout is not None,
            f"deterministic=true cannot be combined with train.group_timeout={config.train.group_timeout}, because the result "
            f"then depends on timing: remove one of them. limits.seconds is a limit that counts only a conversation's own time",
        ),
        deterministic_device_problem(config),
        (
            config.deterministic and threads > 1,
            f"deterministic=true runs with one thread; remove engine.threads={threads}",
        ),
    ]


def deterministic_device_problem(config: Config) -> Problem:
    """deterministic=true on another device than the CPU."""
    return (
        config.deterministic and config.model.device not in ("auto", "cpu"),
        f"deterministic=true works on the CPU only, and the recipe has model.device={config.model.device}: use "
        f"model.device=cpu, or remove deterministic",
    )


def file_problems(data: DataSection) -> list[Problem]:
    """Options that select a part of a data set (`split`, `eval_split`, `subset`) but are set for single files."""

    def is_file(source: str | list[str] | None) -> bool:
        sources = [source] if isinstance(source, str) else source
        return sources is not None and all(name.endswith(FILES) for name in sources)

    changed = changed_options(data)
    only_files = is_file(data.train) and (data.eval is None or is_file(data.eval))
    return [
        (
            is_file(data.train) and "split" in changed,
            f"data.split has no effect on the single file {data.train}: remove it",
        ),
        (
            is_file(data.eval) and "eval_split" in changed,
            f"data.eval_split has no effect on the single file {data.eval}: remove it",
        ),
        (
            only_files and data.subset is not None,
            f"data.subset has no effect on the single file {data.train}: remove it",
        ),
    ]
