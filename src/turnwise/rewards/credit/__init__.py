"""Credit assignment: from rewards to advantages. Each estimator is a pure function of the numbers of a batch.

Rule: accumulate rewards first, centre them afterwards. If each turn's reward is centred before the rewards of a trajectory are
summed, the gradient can have the wrong sign when the policy controls how many turns it takes (docs/credit.md).

In the examples of the estimators, `rounded` rounds all numbers to three decimals.
"""

from turnwise.rewards.credit.credit import Credit as Credit
from turnwise.rewards.credit.credit import Episode as Episode
from turnwise.rewards.credit.outcome import grpo as grpo
