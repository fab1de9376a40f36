"""Turn rewards that mislead a biased estimator: the model decides how long the conversation is.

The model digs (`d`) or stops (`s`), at most two times. The first dig pays 0.2 and the second 0.5. The turn that ends the
conversation pays the outcome: 0.4 if the model stopped at once, 0.3 otherwise. After two digs there is a third turn, which
always ends the conversation. So there are three totals:

    stop           0.4
    dig, stop      0.2 + 0.3       = 0.5
    dig, dig, end  0.2 + 0.5 + 0.3 = 1.0

The start policy digs with probability 1/2 in both states: mean reward 0.575. The optimum is 1.0 (always dig); to stop at once
is the worst policy, 0.4.

What the estimators converge to (large groups; p and q are the probabilities of the first and of the second dig):

- `grpo`, `turn_return`, `gigpo` and `turn_gae` compare (nearly) the totals, of which digging has the larger: 1.0.
- `mt_grpo` compares the reward of the first turn only: 0.2 for a dig, 0.4 for a stop. Both of its terms are negative for the
  first dig, because the outcome of a dig (0.3) is lower, too. It learns to stop at once: 0.4.
- `igpo` subtracts the mean dig reward from the reward of each dig before it sums. In expectation the sum of a conversation that
  dug is then exactly 0, for all p and q: z_1 + q z_2 = 0. Only the outcome remains, which is lower after a dig. It learns to
  stop at once: 0.4.
- `kevin` (gamma 0.4) follows the discounted return: 0.4 for a stop, and for a dig 0.2 + 0.4 * 0.3 = 0.32 (q = 0) up to
  0.2 + 0.4 * 0.5 + 0.16 * 0.3 = 0.448 (q = 1). At the start (q = 1/2) this is 0.384, so the first dig becomes less likely until
  q is above 0.625. With a parameter for each decision, p recovers: 1.0. In a model, p and q share parameters.

`tests/test_scripts.py` checks these statements with the exact expected gradient for groups of 8.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import Any

from turnwise import Opening, Reply, Row, Turn, environment, user_message

PAY = (0.2, 0.5)
"""The reward of the first and of the second dig."""
AT_ONCE, LATER = 0.4, 0.3
"""The outcome if the model stops in its first turn, and if it stops later."""
SITES = "klmn"


def new_row(rng: random.Random) -> dict[str, Any]:
    """The name of the site, which has no effect."""
    site = rng.choice(SITES)
    return {"prompt": message(site, 0), "site": site}


def message(site: str, digs: int) -> str:
    """The user's message after some digs: `k1`."""
    return f"{site}{digs}"


def random_conversation(rng: random.Random) -> list[dict[str, str]]:
    """A conversation that digs or stops with equal probability, for the warm start."""
    site = rng.choice(SITES)
    messages: list[dict[str, str]] = []
    for digs in range(len(PAY) + 1):
        action = rng.choice("ds")
        messages.append({"role": "user", "content": message(site, digs)})
        messages.append({"role": "assistant", "content": action})
        if action == "s":
            break
    return messages


@environment
async def digging(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """One conversation: up to two digs, and the turn that ends it."""
    turn = yield Opening(messages=row.messages)
    for digs, pay in enumerate(PAY, 1):
        if turn.text != "d":
            yield Reply(reward=AT_ONCE if digs == 1 else LATER, done=True)
            return
        turn = yield user_message(message(row["site"], digs), reward=pay)
    yield Reply(reward=LATER, done=True)
