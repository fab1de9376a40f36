"""benchmarks/learning.py: what its task `digging` says of the estimators, its figures, and a short run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from credit_toy import Action, Problem, expected_gradient
from learning_tasks import digging
from learning_tasks.report import Curve, Point, markdown
from learning_tasks.setups import TASKS

from turnwise.rewards.credit.critic import turn_gae
from turnwise.rewards.credit.outcome import grpo
from turnwise.rewards.credit.turns import gigpo, igpo, kevin, mt_grpo, turn_return

ROOT = Path(__file__).resolve().parents[1]
GROUP = 8
DOORS, DIGGING, GUESSING = TASKS


def digging_problem(first, second):
    """The task `digging` with a logit for each of its two decisions: dig if sigmoid says so."""

    def decision(logit, place):
        dig, scores = 1 / (1 + math.exp(-logit)), np.zeros((2, 2))
        scores[:, place] = -dig, 1 - dig
        return (1 - dig, dig), scores

    (p, p_scores), (q, q_scores) = decision(first, 0), decision(second, 1)
    return Problem(
        decisions={
            "first": (Action(digging.AT_ONCE), Action(digging.PAY[0], next="second")),
            "second": (Action(digging.LATER), Action(digging.PAY[1], next="third")),
            "third": (Action(digging.LATER),),
        },
        start="first",
        probabilities={"first": p, "second": q, "third": (1.0,)},
        scores={"first": p_scores, "second": q_scores, "third": np.zeros((1, 2))},
    )


def end_of(estimator):
    """The expected reward after gradient ascent with the estimator's expected gradient, from probabilities of 1/2."""
    logits = np.zeros(2)
    for _ in range(120):
        gradient = expected_gradient(digging_problem(*logits), estimator, size=GROUP)
        logits = np.clip(logits + 0.5 * gradient / (np.abs(gradient).max() + 1e-9), -6, 6)
    return digging_problem(*logits).value("first")


def test_the_numbers_of_digging_are_those_of_its_problem():
    assert digging_problem(0, 0).value("first") == pytest.approx(DIGGING.start)
    assert digging_problem(50, 50).value("first") == pytest.approx(DIGGING.optimum)
    assert digging_problem(-50, 0).value("first") == pytest.approx(0.4)


@pytest.mark.parametrize("estimator", [grpo, turn_return, gigpo, turn_gae])
def test_unbiased_estimators_learn_to_dig(estimator):
    assert end_of(estimator) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("estimator", [mt_grpo, igpo])
def test_estimators_that_centre_rewards_first_learn_to_stop_at_once(estimator):
    assert end_of(estimator) == pytest.approx(0.4, abs=0.01)


def test_kevin_follows_the_discounted_return():
    """The first dig becomes less likely at the start, and more likely when the second dig is likely."""
    at_start = expected_gradient(digging_problem(0, 0), kevin, size=GROUP)
    later = expected_gradient(digging_problem(0, 3), kevin, size=GROUP)
    assert at_start[0] < 0 < at_start[1]
    assert later[0] > 0


def curve(task, setup, seed, rewards, tokens=100):
    points = [Point(step, step * tokens, reward) for step, reward in enumerate(rewards)]
    return Curve(task, setup, seed, points, seconds=1.0)


def test_the_table_has_the_range_of_the_seeds_and_the_median_step_at_the_level():
    # the mean of five steps reaches 0.8 at step 4, at step 6 and never
    curves = [
        curve("doors", "grpo", 0, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        curve("doors", "grpo", 1, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]),
        curve("doors", "grpo", 2, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0.3]),
    ]
    assert "| grpo | 3 | 0.77 | 0.30 to 1.00 | 6 steps |" in markdown(TASKS, curves, {})
    assert "| grpo | 2 | 0.65 | 0.30 to 1.00 | no |" in markdown(TASKS, curves[1:], {})


def test_curves_over_tokens_are_compared_at_equal_tokens():
    # the second has twice the tokens of a step: the first is cut at its middle
    curves = [
        curve("guessing", "single-turn grpo", 0, [0.2, 0.4, 0.6, 0.8, 1.0]),
        curve("guessing", "multi-turn grpo", 0, [0.2, 0.9], tokens=200),
    ]
    page = markdown(TASKS, curves, {("doors", "turn_gae"): "no critic"})
    assert "| single-turn grpo | 1 | 0.60 | 0.60 to 0.60 | no |" in page
    assert "| multi-turn grpo | 1 | 0.90 | 0.90 to 0.90 | 160 tokens |" in page
    assert "- doors, turn_gae: no critic" in page


@pytest.mark.slow
def test_a_short_run_shows_the_wrong_sign_of_mt_grpo(tmp_path):
    setups = ("grpo", "mt_grpo")  # what the other estimators converge to is computed above, with the exact gradient
    command = [sys.executable, ROOT / "benchmarks" / "learning.py", "--quick", "--tasks", "digging", "--out", tmp_path]
    command += ["--only", *setups]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = {}
    for file in (tmp_path / "results").glob("*.json"):
        result = json.loads(file.read_text())
        results[result["setup"]] = [point["reward"] for point in result["points"]]
    assert set(results) == set(setups)
    for rewards in results.values():
        assert len(rewards) == DIGGING.setups[0].quick_steps
        assert all(0.4 - 1e-9 <= reward <= 1.0 + 1e-9 for reward in rewards)
    last = {setup: np.mean(rewards[-5:]) for setup, rewards in results.items()}
    assert last["grpo"] > DIGGING.start + 0.15
    assert last["mt_grpo"] < DIGGING.start - 0.05
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "learning.md").read_text().count("| mt_grpo |") == 1
    assert "learning_unbiased_minus_biased" in printed
