"""Write the table of docs/credit.md: the expected gradient of each estimator on enumerated problems (scripts/credit_toy.py).

python scripts/credit_table.py            # rewrite the page
python scripts/credit_table.py --check    # exit 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from credit_toy import (
    SEVERAL_STATES,
    Estimator,
    expected_gradient,
    large_group_gradient,
    stopping,
)
from generated_page import replace_block, write_or_check

from turnwise.rewards.credit import critic, outcome, turns

PAGE = Path(__file__).parent.parent / "docs" / "credit.md"
BEGIN, END = "<!-- bias: made by scripts/credit_table.py -->", "<!-- end of bias -->"
GROUP = 4
"""The size of the small groups."""


@dataclass(frozen=True)
class Line:
    """An estimator with its options, as in a recipe."""

    text: str
    estimator: Estimator
    errors: float = 0.0
    """The error of the critic."""


LINES = (
    Line("`grpo`, `scale: none`", partial(outcome.grpo, scale="none")),
    Line("`grpo`", outcome.grpo),
    Line("`rloo`, `shared`", outcome.rloo),
    Line("`shared`, `baseline: none`", partial(turns.shared, baseline="none")),
    Line("`turn_return`, `scale: none`", partial(turns.turn_return, scale="none")),
    Line("`turn_return`", turns.turn_return),
    Line("`turn_return`, `gamma: 0.9`, `scale: none`", partial(turns.turn_return, gamma=0.9, scale="none")),
    Line("`discounted`", turns.discounted),
    Line("`remax`", outcome.remax),
    Line("`opo`", outcome.opo),
    Line("`gpg`", outcome.gpg),
    Line("`gdpo`", outcome.gdpo),
    Line("`reinforce_pp`", turns.reinforce_pp),
    Line("`reinforce_pp_baseline`", outcome.reinforce_pp_baseline),
    Line("`gae`, `whiten: false`, exact critic", partial(critic.gae, whiten=False)),
    Line("`gae`, `whiten: false`, wrong critic", partial(critic.gae, whiten=False), errors=0.5),
    Line("`gae`, `lam: 1`, `whiten: false`, wrong critic", partial(critic.gae, lam=1.0, whiten=False), errors=0.5),
    Line("`gae`, exact critic", critic.gae),
    Line("`turn_gae`, `gamma: 1`, `whiten: false`, exact critic", partial(critic.turn_gae, gamma=1.0, whiten=False)),
    Line(
        "`turn_gae`, `gamma: 1`, `whiten: false`, wrong critic",
        partial(critic.turn_gae, gamma=1.0, whiten=False),
        errors=0.5,
    ),
    Line("`turn_gae`, exact critic", critic.turn_gae),
    Line("`critic`, `whiten: false`, wrong critic", partial(critic.critic, whiten=False), errors=0.5),
    Line("`critic`, wrong critic", critic.critic, errors=0.5),
    Line("`bilevel_gae`, exact critic", critic.bilevel_gae),
    Line(
        "`bilevel_gae`, `turn_gamma: 1`, `whiten: false`, exact critic",
        partial(critic.bilevel_gae, turn_gamma=1.0, whiten=False),
    ),
    Line("`gigpo`, `gamma: 1`", partial(turns.gigpo, gamma=1.0)),
    Line("`gigpo`", turns.gigpo),
    Line("`kevin`, `gamma: 1`, `scale: none`", partial(turns.kevin, gamma=1.0, scale="none")),
    Line("`kevin`", turns.kevin),
    Line("`mt_grpo`, `scale: none`", partial(turns.mt_grpo, scale="none")),
    Line("`mt_grpo`", turns.mt_grpo),
    Line("`igpo`, `scale: none`", partial(turns.igpo, scale="none")),
    Line("`igpo`, `normalise: joint`, `scale: none`", partial(turns.igpo, normalise="joint", scale="none")),
    Line("`igpo`", turns.igpo),
    Line("`turn_potential`", turns.turn_potential),
)


def table() -> str:
    """The lines of the table, in Markdown."""
    return "\n".join(_rows())


def verdict(gradient: np.ndarray, true: np.ndarray, *, exact: bool) -> str:
    """`unbiased`, `scaled x2.81`, or `biased` with the cosine of the angle to the true gradient and the factor.

    The factor is the length of the part of the gradient in the true direction, divided by the length of the true gradient.
    With `exact`, rounding errors are allowed; otherwise also what remains of the conversation itself in a large group.
    """
    cosine = float(gradient @ true / np.linalg.norm(gradient) / np.linalg.norm(true))
    factor = float(gradient @ true / (true @ true))
    if cosine > 1 - (1e-12 if exact else 1e-6):
        same = abs(factor - 1) < (1e-9 if exact else 1e-3)
        return "unbiased" if same else f"scaled ×{factor:.2f}"
    return f"biased: cosine {cosine:.4f}, ×{factor:.2f}"


def _rows() -> Iterator[str]:
    yield f"| estimator | several states, groups of {GROUP} | several states, large group | stopping (true: +0.175) |"
    yield "|---|---|---|---|"
    true = SEVERAL_STATES.true_gradient()
    for line in LINES:
        small = expected_gradient(SEVERAL_STATES, line.estimator, size=GROUP, errors=line.errors)
        large = large_group_gradient(SEVERAL_STATES, line.estimator, errors=line.errors)
        (stop,) = large_group_gradient(stopping(0.5), line.estimator, errors=line.errors)
        sign = " **wrong sign**" if stop < 0 else ""
        yield (
            f"| {line.text} | {verdict(small, true, exact=True)} | {verdict(large, true, exact=False)} | {stop:+.4f}{sign} |"
        )


def main() -> int:
    """Rewrite or check the page."""
    page = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, replace_block(page, BEGIN, END, f"\n\n{table()}\n\n"))


if __name__ == "__main__":
    sys.exit(main())
