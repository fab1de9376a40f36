"""Options of the section critic that have no effect or contradict the rest of the recipe."""

from __future__ import annotations

from turnwise.config.credit_checks import chosen_estimator, needs_critic
from turnwise.config.schema import Config
from turnwise.config.section import changed_options

__all__ = ["critic_problems"]


def critic_problems(config: Config) -> list[tuple[bool, str]]:
    """Whether the recipe has a problem, and the error message for it."""
    critic, train = config.critic, config.train
    changed = next(iter(changed_options(critic)), None)
    one_step = train.minibatches == 1 and train.ppo_epochs == 1
    return [
        (
            changed is not None and not needs_critic(config),
            f"critic.{changed} has no effect with credit.name={chosen_estimator(config).name}, which needs no critic: remove it, "
            f"or set credit.name to gae, turn_gae, critic or bilevel_gae",
        ),
        (
            one_step and "clip" in changed_options(critic),
            "critic.clip has no effect with one optimizer step a batch: estimates do not move before the step. Remove it, "
            "or set train.minibatches or train.ppo_epochs",
        ),
        (
            train.known_steps is not None and critic.warmup_steps >= train.known_steps,
            f"critic.warmup_steps={critic.warmup_steps} must be less than train.steps={train.known_steps}: the policy would not "
            f"be trained",
        ),
    ]
