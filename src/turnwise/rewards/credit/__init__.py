"""Credit assignment: from rewards to advantages. Each estimator is a pure function of the numbers of a batch.

Rule: accumulate rewards first, centre them afterwards. If each turn's reward is centred before the rewards of a trajectory are
summed, the gradient can have the wrong sign when the policy controls how many turns it takes (docs/credit.md).

To add an estimator, write the section of its options, and the function with its line in the table of its module. In the examples
of the estimators, `rounded` rounds all numbers to three decimals.
"""

from collections.abc import Mapping

from turnwise.options.algorithm import CreditSection, Spo
from turnwise.rewards.credit import critic, outcome, own, turns
from turnwise.rewards.credit.credit import Credit as Credit
from turnwise.rewards.credit.credit import Episode as Episode
from turnwise.rewards.credit.credit import Estimator
from turnwise.rewards.credit.outcome import grpo as grpo
from turnwise.rewards.credit.tracker import ValueTracker

ESTIMATORS: Mapping[type[CreditSection], Estimator] = {
    **outcome.ESTIMATORS,
    **turns.ESTIMATORS,
    **critic.ESTIMATORS,
    **own.ESTIMATORS,
}
"""All estimators, by the class of their options."""


def credit_of(options: CreditSection, *, weights: Mapping[str, float]) -> Credit:
    """Credit assignment by the estimator with these options. `weights` has the weight of each reward function."""
    estimator = ESTIMATORS[type(options)]
    return Credit(
        options.name,
        lambda batch: estimator.estimate(batch, options),
        needs_values=options.needs_values,
        needs_baseline=options.needs_baseline,
        read=lambda trajectory: estimator.read(trajectory, options),
        weights=weights,
        tracker=ValueTracker(options) if isinstance(options, Spo) else None,
    )
