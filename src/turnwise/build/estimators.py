"""Builds the credit assignment of a recipe: the estimator of advantages, with its options bound."""

from __future__ import annotations

from functools import partial

from turnwise.config import credit as sections
from turnwise.config.credit_checks import chosen_estimator
from turnwise.config.schema import Config
from turnwise.rewards.credit import Credit, critic, outcome, published, states, turns
from turnwise.rewards.scorer import Scorer

__all__ = ["credit", "credit_note"]


def credit(config: Config, scorer: Scorer) -> Credit:
    """The recipe's credit assignment: from rewards to advantages. `scorer` has the reward functions with their weights."""
    section = chosen_estimator(config)
    name = section.name
    match section:
        case sections.GrpoSection():
            return Credit(name, partial(outcome.grpo, scale=section.scale))
        case sections.TurnReturnSection():
            return Credit(name, partial(turns.turn_return, gamma=section.gamma, scale=section.scale))
        case sections.RlooSection():
            return Credit(name, outcome.rloo)
        case sections.OpoSection():
            return Credit(name, outcome.opo)
        case sections.GpgSection():
            return Credit(name, outcome.gpg)
        case sections.RemaxSection():
            return Credit(name, outcome.remax, needs_baseline=True)
        case sections.ReinforcePpSection():
            return Credit(name, partial(turns.reinforce_pp, gamma=section.gamma))
        case sections.ReinforcePpBaselineSection():
            return Credit(name, outcome.reinforce_pp_baseline)
        case sections.GdpoSection():
            return Credit(
                name, partial(outcome.gdpo, weights={function.name: function.weight for function in scorer.functions})
            )
        case _:
            return _turn_level(section)


def credit_note(config: Config) -> str | None:
    """The estimator that `credit.name=auto` stands for, for the user; None if the recipe names an estimator."""
    if not isinstance(config.credit, sections.AutoCreditSection):
        return None
    name = chosen_estimator(config).name
    why = "turns can have rewards or penalties" if name == "turn_return" else "turns have no rewards of their own"
    return f"credit.name=auto: advantages are computed by {name}, because {why} (docs/credit.md)"


def _turn_level(section: sections.Estimator) -> Credit:
    name = section.name
    match section:
        case sections.SharedSection():
            return Credit(name, partial(turns.shared, baseline=section.baseline))
        case sections.DiscountedSection():
            return Credit(name, partial(turns.discounted, gamma=section.gamma, baseline=section.baseline))
        case sections.KevinSection():
            return Credit(name, partial(turns.kevin, gamma=section.gamma, scale=section.scale))
        case sections.GigpoSection():
            estimate = partial(turns.gigpo, omega=section.omega, gamma=section.gamma, scale=section.scale)
            return Credit(name, estimate, read=partial(states.with_states, key=section.state_key))
        case sections.MtGrpoSection():
            return Credit(name, partial(published.mt_grpo, outcome_weight=section.outcome_weight, scale=section.scale))
        case sections.IgpoSection():
            estimate = partial(published.igpo, gamma=section.gamma, normalise=section.normalise, scale=section.scale)
            return Credit(name, estimate)
        case sections.TurnPotentialSection():
            estimate = partial(
                published.turn_potential,
                decay=section.decay,
                weight=section.weight,
                initial=section.initial,
                scale=section.scale,
            )
            return Credit(name, estimate, read=partial(states.with_potentials, key=section.key))
        case _:
            return _with_critic(section)


def _with_critic(section: sections.Estimator) -> Credit:
    name = section.name
    match section:
        case sections.GaeSection():
            estimate = partial(critic.gae, gamma=section.gamma, lam=section.lam, whiten=section.whiten)
            return Credit(name, estimate, needs_values="token")
        case sections.TurnGaeSection():
            estimate = partial(critic.turn_gae, gamma=section.gamma, lam=section.lam, whiten=section.whiten)
            return Credit(name, estimate, needs_values="turn")
        case sections.CriticCreditSection():
            estimate = partial(critic.critic, gamma=section.gamma, whiten=section.whiten)
            return Credit(name, estimate, needs_values="turn")
        case sections.BilevelGaeSection():
            estimate = partial(
                critic.bilevel_gae,
                gamma=section.gamma,
                lam=section.lam,
                turn_gamma=section.turn_gamma,
                whiten=section.whiten,
            )
            return Credit(name, estimate, needs_values="token")
    raise AssertionError(f"no estimator for credit.name={name}")
