"""Which estimator a recipe uses, and the options of `credit` that have no effect or contradict the rest of the recipe."""

from __future__ import annotations

from turnwise.config import credit as sections
from turnwise.config.schema import Config

__all__ = [
    "WITHOUT_REWARD",
    "chosen_estimator",
    "credit_problems",
    "environment_may_reward",
    "needs_critic",
    "turns_can_have_rewards",
]

WITHOUT_REWARD = (
    "turnwise.environments.environment:SingleTurn",
    "turnwise.environments.users:ScriptedUser",
    "turnwise.environments.modelled_user:ModelledUser",
)
"""Built-in environments that never give a reward."""

_NEEDS_CRITIC = (
    sections.GaeSection,
    sections.TurnGaeSection,
    sections.CriticCreditSection,
    sections.BilevelGaeSection,
)
_WITHOUT_GROUP = (*_NEEDS_CRITIC, sections.RemaxSection, sections.ReinforcePpSection)
"""Estimators that do not compare the conversations of a row."""
_OF_TURN_REWARDS = (sections.MtGrpoSection, sections.IgpoSection)


def chosen_estimator(config: Config) -> sections.Estimator:
    """The section of the recipe's estimator. `auto` is `turn_return` if turns can have rewards or penalties, else `grpo`."""
    section = config.credit
    if not isinstance(section, sections.AutoCreditSection):
        return section
    if turns_can_have_rewards(config) or (config.limits.turns > 1 and config.reward.kl.coef > 0):
        return sections.TurnReturnSection(scale=section.scale)
    return sections.GrpoSection(scale=section.scale)


def needs_critic(config: Config) -> bool:
    """Whether the recipe's estimator needs the values of a critic."""
    return isinstance(chosen_estimator(config), _NEEDS_CRITIC)


def turns_can_have_rewards(config: Config) -> bool:
    """Whether a turn before the last can have a reward, as far as the recipe shows it."""
    return config.limits.turns > 1 and (bool(config.reward.turns) or environment_may_reward(config))


def credit_problems(config: Config) -> list[tuple[bool, str]]:
    """Problems of the section credit: whether the recipe has the problem, and the error message for it."""
    section = chosen_estimator(config)
    return [*_group_problems(config, section), *_need_problems(config, section), *_idle_problems(config, section)]


def _group_problems(config: Config, section: sections.Estimator) -> list[tuple[bool, str]]:
    size = config.train.group_size
    without_baseline = (
        isinstance(section, sections.SharedSection | sections.DiscountedSection) and section.baseline == "none"
    )
    alone = isinstance(section, _WITHOUT_GROUP) or without_baseline
    return [
        (
            size < 2 and not alone,
            f"train.group_size={size} is too small: credit.name={section.name} compares the trajectories of one row. Set "
            f"train.group_size to 2 or more",
        )
    ]


def _need_problems(config: Config, section: sections.Estimator) -> list[tuple[bool, str]]:
    """What the estimator needs and the recipe does not have."""
    reward = config.reward
    functions = [*reward.trajectory, *reward.turns, *reward.group, *reward.batch]
    parts = len(functions) + environment_may_reward(config)
    return [
        (
            isinstance(section, sections.GdpoSection) and parts < 2,
            f"credit.name=gdpo needs two parts of the reward to normalise, and the recipe has {parts}: add a reward function, or "
            f"set credit.name=grpo",
        ),
        (
            isinstance(section, _OF_TURN_REWARDS) and not turns_can_have_rewards(config),
            f"credit.name={section.name} needs rewards of turns: limits.turns must be above 1, and the recipe must have a "
            f"function in reward.turns, tools, or an environment that gives rewards. For one reward of the conversation set "
            f"credit.name=grpo",
        ),
        (
            isinstance(section, sections.TurnPotentialSection)
            and config.environment.use in WITHOUT_REWARD
            and not reward.turns,
            f"credit.name=turn_potential needs scores in turn.info: environment={config.environment.use} sets none, and the "
            f"recipe has no function in reward.turns that could. Use an environment that sets them, or set credit.name=grpo",
        ),
    ]


def _idle_problems(config: Config, section: sections.Estimator) -> list[tuple[bool, str]]:
    """Options that change nothing with the rest of the recipe."""
    one_turn = config.limits.turns == 1
    of_turns = (
        sections.TurnReturnSection,
        sections.DiscountedSection,
        sections.KevinSection,
        sections.GigpoSection,
        sections.TurnPotentialSection,
    )
    changed = [
        name
        for name in ("gamma", "decay")
        if name in type(section).model_fields and getattr(section, name) != type(section).model_fields[name].default
    ]
    return [
        (
            one_turn and isinstance(section, of_turns) and bool(changed),
            f"credit.{next(iter(changed), '')} has no effect with limits.turns=1, because there are no later turns: remove it, "
            f"or raise limits.turns",
        )
    ]


def environment_may_reward(config: Config) -> bool:
    """Whether the environment or a tool may give rewards."""
    return config.environment.use not in WITHOUT_REWARD or bool(config.tools) or config.mcp.servers is not None
