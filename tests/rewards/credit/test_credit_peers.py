"""Value by value against other systems' functions, where their source is at hand, and always against literal results."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.options.algorithm import Gae, Grpo, ReinforcePp
from turnwise.rewards.credit import critic, outcome, turns
from turnwise.rewards.credit.credit import Episode, EpisodeGroups

MIRROR = next((folder / ".mirror" for folder in Path(__file__).parents if (folder / ".mirror").is_dir()), Path("none"))
"""Bare git directories `<owner>+<name>/repo`, if there are any."""

REWARDS = [[1.0, 0.0, 0.5], [0.2, 0.9, 0.2]]
"""The rewards of two groups, one turn each."""
LENGTHS = [[3, 5, 2], [4, 1, 6]]
VALUES = torch.linspace(-0.4, 0.7, 36).reshape(6, 6).tolist()

BATCH: EpisodeGroups = [
    [
        Episode([reward], tokens_T=[length], values_T=[VALUES[3 * g + n][:length]], baseline=0.3)
        for n, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    for g, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True))
]


@cache
def source(repository: str, path: str) -> str:
    """A file of a peer's newest commit; the test is skipped if it is not at hand."""
    folder = MIRROR / repository / "repo"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    command = ["git", "--git-dir", str(folder), "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def functions(text: str, names: Sequence[str], **known: Any) -> dict[str, Any]:
    """These functions of a file, without its imports and decorators."""
    tree = ast.parse(text)
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(chosen) == len(names)
    for node in chosen:
        node.decorator_list = []
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
    space: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, **known}
    exec(compile(ast.Module(chosen, []), "peer", "exec"), space)
    return space


def verl(name: str, penalties: Sequence[Sequence[float]] | None = None, **arguments: Any) -> list[list[list[float]]]:
    """The advantages of the sampled tokens of `BATCH`, by verl's function. `penalties` of tokens are subtracted from rewards."""
    masked = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    library = functions(source("volcengine+verl", "verl/utils/torch_functional.py"), masked)
    function = functions(
        source("volcengine+verl", "verl/trainer/ppo/core_algos.py"), [name], verl_F=SimpleNamespace(**library)
    )[name]
    lengths = [length for group in LENGTHS for length in group]
    rewards = [reward for group in REWARDS for reward in group]
    rewards_BL, mask_BL = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6, 6, dtype=torch.float64)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        rewards_BL[row, length - 1], mask_BL[row, :length] = reward, 1.0
    if penalties is not None:
        rewards_BL -= torch.tensor(penalties, dtype=torch.float64) * mask_BL
    accepted = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = {
        "token_level_rewards": rewards_BL,
        "response_mask": mask_BL,
        "index": np.array([0, 0, 0, 1, 1, 1]),
        "reward_baselines": torch.full((6,), 0.3, dtype=torch.float64),
        "values": torch.tensor(VALUES, dtype=torch.float64),
        **arguments,
    }
    advantages_BL, _ = function(**{key: value for key, value in given.items() if key in accepted})
    flat = [advantages_BL[row, :length].tolist() for row, length in enumerate(lengths)]
    return [flat[:3], flat[3:]]


def by_token(advantages: Any) -> list[list[list[float]]]:
    return [
        [
            [float(entry)] * length if isinstance(entry, float | int) else list(entry)
            for (entry,), length in zip(group, lengths, strict=True)
        ]
        for group, lengths in zip(advantages, LENGTHS, strict=True)
    ]


def verl_tokens(
    name: str, estimator: Callable[[EpisodeGroups], Any], penalties: Sequence[Sequence[float]], **arguments: Any
) -> tuple[list[list[float]], list[list[float]]]:
    """The advantages of all tokens of each conversation of `BATCH` with penalties of tokens: ours, and verl's."""
    batch = []
    for number, group in enumerate(BATCH):
        batch.append([])
        for place, episode in enumerate(group):
            own = penalties[3 * number + place][: episode.tokens_T[0]]
            batch[-1].append(replace(episode, rewards_T=[episode.rewards_T[0] - sum(own)], penalties_T=[own]))
    ours, theirs = by_token(estimator(batch)), verl(name, penalties, **arguments)
    return [tokens for group in ours for tokens in group], [tokens for group in theirs for tokens in group]


CONFIG = SimpleNamespace(gamma=0.9)
PAIRS: dict[str, tuple[str, dict[str, Any], Callable[[EpisodeGroups], Any]]] = {
    "grpo": ("compute_grpo_outcome_advantage", {}, outcome.grpo),
    "dr_grpo": (
        "compute_grpo_outcome_advantage",
        {"norm_adv_by_std_in_grpo": False},
        partial(outcome.grpo, options=Grpo(scale="none")),
    ),
    "rloo": ("compute_rloo_outcome_advantage", {}, outcome.rloo),
    "rloo_vectorized": ("compute_rloo_vectorized_outcome_advantage", {}, outcome.rloo),
    "opo": ("compute_opo_outcome_advantage", {}, outcome.opo),
    "reinforce_pp": (
        "compute_reinforce_plus_plus_outcome_advantage",
        {"config": CONFIG},
        partial(turns.reinforce_pp, options=ReinforcePp(gamma=0.9)),
    ),
    "reinforce_pp, no discount": (
        "compute_reinforce_plus_plus_outcome_advantage",
        {"config": SimpleNamespace(gamma=1.0)},
        turns.reinforce_pp,
    ),
    "reinforce_pp_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        {},
        outcome.reinforce_pp_baseline,
    ),
    "remax": ("compute_remax_outcome_advantage", {}, outcome.remax),
    "gae": (
        "compute_gae_advantage_return",
        {"gamma": 0.99, "lam": 0.9},
        lambda batch: critic.gae(batch, Gae(gamma=0.99, lam=0.9)).advantages,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_values_are_those_of_verl(name: str) -> None:
    function, arguments, estimator = PAIRS[name]
    ours, theirs = by_token(estimator(BATCH)), verl(function, **arguments)
    for group, of_verl in zip(ours, theirs, strict=True):
        for values, expected in zip(group, of_verl, strict=True):
            # theirs: 1e-8 in means over a mask
            assert values == pytest.approx(expected, abs=2e-7)


def test_gpg_is_that_of_verl_where_its_alpha_is_1() -> None:
    """verl's alpha counts rewards that are 0; ours, like the paper's, conversations without a gradient."""
    shifted = [[Episode([one.reward + 1], tokens_T=one.tokens_T) for one in group] for group in BATCH]
    theirs = verl("compute_gpg_outcome_advantage")
    factor = 6 / 5  # one reward of BATCH is 0
    for group, expected in zip(by_token(outcome.gpg(shifted)), theirs, strict=True):
        for values, of_verl in zip(group, expected, strict=True):
            assert [factor * value for value in values] == pytest.approx(of_verl, abs=1e-6)  # alpha in float32


SWIFT = [
    ("grpo", "group", partial(outcome.grpo, options=Grpo(scale="std"))),
    ("grpo", "batch", partial(outcome.grpo, options=Grpo(scale="batch"))),
    ("grpo", "none", partial(outcome.grpo, options=Grpo(scale="none"))),
    ("rloo", "none", outcome.rloo),
]


@pytest.mark.parametrize(("estimator", "scale", "ours"), SWIFT)
def test_the_values_are_those_of_ms_swift(estimator: str, scale: str, ours: Callable[[EpisodeGroups], Any]) -> None:
    compute = _swift()
    rewards = torch.tensor([reward for group in REWARDS for reward in group], dtype=torch.float64)[:, None]
    theirs, _ = compute(rewards, torch.ones(1, dtype=torch.float64), 3, estimator, scale)
    values = [entry for group in ours(BATCH) for (entry,) in group]
    assert values == pytest.approx(theirs.tolist(), rel=4e-4)  # theirs: 1e-4 is added to the standard deviation


def test_gdpo_is_that_of_ms_swift_with_its_weights() -> None:
    compute = _swift()
    parts = torch.tensor([[1.0, 0.1], [0.0, 0.4], [0.5, 0.2], [0.2, 0.0], [0.9, 0.7], [0.2, 0.3]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.25], dtype=torch.float64)
    theirs, _ = compute(parts, weights, 3, "grpo", "gdpo")
    recipe = {"a": 1.0, "b": 0.25}
    weighted = [Episode([0.0], parts={"a": a, "b": 0.25 * b}, weights=recipe) for a, b in parts.tolist()]
    ours = outcome.gdpo([weighted[:3], weighted[3:]])
    assert [entry for group in ours for (entry,) in group] == pytest.approx(theirs.tolist(), rel=1e-5)


def _swift() -> Callable[..., Any]:
    text = source("modelscope+ms-swift", "swift/rl_core/advantage.py")
    nanstd = lambda values, dim, keepdim: values.std(dim=dim, keepdim=keepdim)  # no missing rewards here  # noqa: E731
    return functions(text, ["compute_advantages"], nanstd=nanstd)["compute_advantages"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # computed by verl's functions (January 2026), to five decimals
        (outcome.grpo, [[1.0, -1.0, 0.0], [-0.57735, 1.1547, -0.57735]]),
        (outcome.rloo, [[0.75, -0.75, 0.0], [-0.35, 0.7, -0.35]]),
        (outcome.opo, [[0.6, -0.4, 0.1], [-0.06364, 0.63636, -0.06364]]),
        (turns.reinforce_pp, [[1.92117, -0.94015, 0.49051], [-0.36788, 1.63504, -0.36788]]),
    ],
    ids=["grpo", "rloo", "opo", "reinforce_pp"],
)
def test_the_values_are_these(estimator: Callable[[EpisodeGroups], Any], expected: list[list[float]]) -> None:
    found = [[entry for (entry,) in group] for group in estimator(BATCH)]
    assert [pytest.approx(values, abs=6e-6) for values in expected] == found
