"""The KL divergence in the reward: penalties against a float64 computation, their place in each estimator, runs, refusals."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rewards.credit.test_credit_invariance import verl_tokens
from support.recipes import save_recipe
from support.tiny import save_model, tiny_model
from test_train import lines, run, timeless
from training.test_batch import conversations
from turnwise.config.recipe import checked
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError, RunError
from turnwise.options.algorithm import BilevelGae, CriticCredit, Gae, ReferenceSection, Shared, TurnGae, TurnReturn
from turnwise.rewards.credit import critic, outcome, turns
from turnwise.rewards.credit.credit import Episode, EpisodeGroups, episode_of
from turnwise.training.kl_reward import KlReward
from turnwise.training.local_learner import LocalLearner
from turnwise.types import Group, LogprobKind, Row, Sampling, Trajectory

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def learner() -> LocalLearner:
    return LocalLearner(
        tiny_model(),
        sampling=Sampling(temperature=TEMPERATURE),
        reference=ReferenceSection(),
        reference_model=tiny_model(seed=3),
    )


def groups_of(trajectories: list[Trajectory]) -> list[Group]:
    return [Group(id="g", row=Row(id="g", messages=[]), trajectories=trajectories)]


def kl_reward(learner: LocalLearner, **options: Any) -> KlReward:
    return KlReward(
        learner,
        **{
            "estimator": "k1",
            "coef": 0.5,
            "target": None,
            "horizon": 10_000,
            "micro_batch_tokens": None,
            **options,
        },
    )


def penalised(learner: LocalLearner, trajectories: list[Trajectory], **options: Any) -> KlReward:
    kl = kl_reward(learner, micro_batch_tokens=64, **options)
    asyncio.run(kl.set_penalties(groups_of(trajectories)))
    return kl


ESTIMATES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
}


def plain_penalties(trajectory: Trajectory, estimator: str, coef: float) -> list[list[float]]:
    """From the formula, in float64, one segment after the other. NONE: the policy's log-probabilities are those of its model."""
    policy, reference = tiny_model().double(), tiny_model(seed=3).double()
    expected: list[list[float]] = [[] for _ in trajectory.turns]
    for segment in trajectory.segments:
        with torch.no_grad():
            ids = torch.tensor([list(segment.token_ids)])
            own_TV, other_TV = ((m(ids).logits[0] / TEMPERATURE).log_softmax(-1) for m in (policy, reference))
        for place, turn in enumerate(segment.turn):
            if turn < 0:
                continue
            token = segment.token_ids[place]
            completion = trajectory.turns[turn].completion
            known = completion is not None and completion.logprob_kind is LogprobKind.SAMPLED
            logprob = segment.logprobs[place] if known else float(own_TV[place - 1, token])
            d = logprob - float(other_TV[place - 1, token])
            weight = trajectory.turns[turn].weight > 0
            expected[turn].append(coef * ESTIMATES[estimator](d) if weight else 0.0)
    return expected


@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("kind", [LogprobKind.SAMPLED, LogprobKind.RAW])
def test_penalties_are_those_of_a_plain_float64_computation(
    learner: LocalLearner, estimator: str, kind: LogprobKind
) -> None:
    trajectories = conversations()
    for turn in [*trajectories[0].turns, *trajectories[1].turns]:
        assert turn.completion is not None
        turn.completion = replace(turn.completion, logprob_kind=kind)  # the learner computes those that it cannot use
    trajectories[0].turns[1].weight = 0.0
    penalised(learner, trajectories, estimator=estimator)
    for trajectory in trajectories:
        expected = plain_penalties(trajectory, estimator, 0.5)
        assert [len(of_turn) for of_turn in trajectory.penalties] == [len(of_turn) for of_turn in expected]
        for of_turn, plain in zip(trajectory.penalties, expected, strict=True):
            assert list(of_turn) == pytest.approx(plain, abs=2e-5, rel=1e-4)
    assert trajectories[0].penalties[1] == [0.0, 0.0]
    assert max(abs(number) for t in trajectories for of_turn in t.penalties for number in of_turn) > 0.05


def test_the_reference_model_and_the_reward_stay_as_they_are(learner: LocalLearner) -> None:
    before, trajectories = learner.reference_fingerprint(), conversations()
    penalised(learner, trajectories)
    assert learner.reference_fingerprint() == before
    assert [trajectory.reward for trajectory in trajectories] == [0.0] * 4
    assert all(not turn.rewards for trajectory in trajectories for turn in trajectory.turns)


def test_trajectories_that_failed_or_have_no_reward_get_no_penalty(learner: LocalLearner) -> None:
    trajectories = conversations()
    trajectories[1].reward = None
    penalised(learner, trajectories)
    assert [bool(trajectory.penalties) for trajectory in trajectories] == [True, False, True, True]


def test_a_divergence_that_is_not_finite_fails_its_conversation_only(learner: LocalLearner) -> None:
    trajectories = conversations()
    trajectories[2].segments[0].logprobs[3] = -1e6  # exp(-d) is infinite
    penalised(learner, trajectories, estimator="k3")
    assert [trajectory.failed for trajectory in trajectories] == [False, False, True, False]
    error = trajectories[2].error
    assert error is not None
    assert "reward.kl.estimator=k3" in error.message
    assert "Use reward.kl.estimator=k1" in error.message


def test_the_adaptive_coefficient_is_that_of_the_paper(learner: LocalLearner) -> None:
    for target, factor in ((1e-6, 1 + 0.2 * 4 / 100), (1e6, 1 - 0.2 * 4 / 100)):
        assert penalised(learner, conversations(), target=target, horizon=100).coef == pytest.approx(0.5 * factor)
    assert penalised(learner, conversations()).coef == 0.5
    divergence = asyncio.run(kl_reward(learner).set_penalties(groups_of(conversations()))).divergence
    assert divergence is not None
    target = divergence / 1.1  # within the bounds: the relative error is 0.1
    assert penalised(learner, conversations(), target=target, horizon=40).coef == pytest.approx(
        0.5 * (1 + 0.1 * 4 / 40)
    )


def test_metrics_are_means_over_conversations(learner: LocalLearner) -> None:
    trajectories = conversations()
    kl = kl_reward(learner)
    metrics = asyncio.run(kl.set_penalties(groups_of(trajectories))).named()
    sums = [sum(map(sum, trajectory.penalties)) for trajectory in trajectories]
    counts = [sum(map(len, trajectory.penalties)) for trajectory in trajectories]
    assert metrics == {
        "kl_reward/coef": 0.5,
        "kl_reward/penalty": pytest.approx(sum(sums) / 4),
        "kl_reward/divergence": pytest.approx(sum(s / 0.5 / n for s, n in zip(sums, counts, strict=True)) / 4),
    }


# credit


def episode(trajectory: Trajectory, rewards: list[float], outcome: float, penalties: list[list[float]]) -> Episode:
    for turn, reward in zip(trajectory.turns, rewards, strict=True):
        turn.add_reward(reward, "environment")
    trajectory.reward, trajectory.penalties = sum(rewards) + outcome, list(penalties)
    return episode_of(trajectory)


def test_an_episode_has_rewards_without_penalties() -> None:
    one = episode(conversations()[1], [1.0, 0.5], 2.0, [[0.1, 0.2], [0.3, 0.0, -0.1]])
    assert one.rewards_T == pytest.approx([0.7, 0.3])
    assert one.received == pytest.approx([0.7, 2.3])
    assert (one.outcome, one.reward) == (pytest.approx(2.0), pytest.approx(3.0))
    assert [list(map(float, tokens)) for tokens in one.token_rewards] == [
        pytest.approx([-0.1, 0.8]),
        pytest.approx([-0.3, 0.0, 2.6]),
    ]


def test_estimators_of_turns_subtract_the_sum_of_a_turn_and_estimators_of_tokens_each_number() -> None:
    one = Episode([0.7, 0.3], tokens_T=[2, 2], penalties_T=[[0.1, 0.2], [0.3, 0.4]], values_T=[[0.0, 0.0], [0.0, 0.0]])
    other = Episode([0.0], values_T=[[0.0]])
    batch = [[one, other]]
    assert outcome.rloo(batch)[0][0] == pytest.approx([1.0, 1.0])
    assert turns.turn_return(batch, TurnReturn(scale="none"))[0][0] == pytest.approx([1.0, 0.3])
    assert critic.critic(batch, CriticCredit(whiten=False)).advantages[0][0] == pytest.approx([1.0, 0.3])
    # rewards of tokens: -0.1, 0.8, -0.3, 0.6
    expected = [pytest.approx([1.0, 1.1]), pytest.approx([0.3, 0.6])]
    assert critic.gae(batch, Gae(lam=1.0, whiten=False)).advantages[0][0] == expected
    assert critic.bilevel_gae(batch, BilevelGae(lam=1.0, turn_gamma=1.0, whiten=False)).advantages[0][0] == expected
    whitened = turns.reinforce_pp([[one], [Episode([0.3], tokens_T=[1])]])[0][0]
    flat = [number for entry in whitened for number in entry]  # type: ignore[union-attr]
    assert np.diff(flat) / (flat[1] - flat[0]) == pytest.approx(np.diff([1.0, 1.1, 0.3, 0.6]) / 0.1)


PENALTIES = [[0.1 * (1 + (3 * row + token) % 4) for token in range(6)] for row in range(6)]
PEERS: dict[str, tuple[str, dict[str, Any], Callable[[EpisodeGroups], Any]]] = {
    "gae": (
        "compute_gae_advantage_return",
        {"gamma": 0.99, "lam": 0.9},
        lambda batch: critic.gae(batch, Gae(gamma=0.99, lam=0.9)).advantages,
    ),
    "reinforce_pp": (
        "compute_reinforce_plus_plus_outcome_advantage",
        {"config": type("Config", (), {"gamma": 1.0})},
        turns.reinforce_pp,
    ),
    "grpo": ("compute_grpo_outcome_advantage", {}, outcome.grpo),
    "rloo": ("compute_rloo_outcome_advantage", {}, outcome.rloo),
}


@pytest.mark.parametrize("name", PEERS)
def test_advantages_with_penalties_are_those_of_verl(name: str) -> None:
    """verl subtracts the penalty of each token from its reward, and calls the same function of rewards of tokens."""
    function, arguments, estimator = PEERS[name]
    ours, theirs = verl_tokens(function, estimator, PENALTIES, **arguments)
    for values, expected in zip(ours, theirs, strict=True):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-6)


# the gradient

BETA = 0.3
POLICY = torch.tensor([[0.2, -0.4], [0.5, 0.1], [-0.3, 0.6]], dtype=torch.float64)
"""Logits of two tokens: in the first state, and after each of the first tokens."""
REFERENCE = torch.tensor([[0.9, 0.1], [-0.2, 0.7], [0.3, 0.3]], dtype=torch.float64)
REWARDS = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.25, (1, 1): 2.0}


def logprobs(logits: torch.Tensor, tokens: tuple[int, int]) -> torch.Tensor:
    table = logits.log_softmax(-1)
    return torch.stack([table[0, tokens[0]], table[1 + tokens[0], tokens[1]]])


def true_gradient() -> torch.Tensor:
    """Of E[R] - beta * KL(policy || reference), by enumeration."""
    logits = POLICY.clone().requires_grad_()
    value = sum(
        logprobs(logits, tokens).sum().exp()
        * (reward - BETA * (logprobs(logits, tokens) - logprobs(REFERENCE, tokens)).sum())
        for tokens, reward in REWARDS.items()
    )
    (gradient,) = torch.autograd.grad(value, logits)  # type: ignore[arg-type]
    return gradient


def expected_gradient(
    estimate: Callable[[EpisodeGroups], Any], *, by_turn: bool, estimator: str = "k1"
) -> torch.Tensor:
    """Of a group of two, over all pairs of conversations. `by_turn`: each token is a turn; else both are one turn."""
    total = torch.zeros_like(POLICY)
    for pair in itertools.product(REWARDS, repeat=2):
        episodes, probability = [], 1.0
        for tokens in pair:
            own = logprobs(POLICY, tokens)
            d = (own - logprobs(REFERENCE, tokens)).tolist()
            penalties = [BETA * ESTIMATES[estimator](number) for number in d]
            probability *= float(own.sum().exp())
            last = REWARDS[tokens]
            episodes.append(
                Episode(
                    [-penalties[0], last - penalties[1]], penalties_T=[[p] for p in penalties], values_T=[[0.1]] * 2
                )
                if by_turn
                else Episode([last - sum(penalties)], tokens_T=[2], penalties_T=[penalties], values_T=[[0.2, 0.4]])
            )
        logits = POLICY.clone().requires_grad_()
        advantages = estimate([episodes])[0]
        surrogate = torch.zeros((), dtype=torch.float64)
        for tokens, entries in zip(pair, advantages, strict=True):
            flat = [n for entry in entries for n in ([entry] if isinstance(entry, float) else entry)]
            flat = flat * 2 if len(flat) == 1 else flat
            surrogate = surrogate + (logprobs(logits, tokens) * torch.tensor(flat, dtype=torch.float64)).sum() / 2
        (gradient,) = torch.autograd.grad(surrogate, logits)
        total += probability * gradient
    return total


UNBIASED: dict[str, tuple[Callable[[EpisodeGroups], Any], bool]] = {
    "rloo": (outcome.rloo, False),
    "shared": (partial(turns.shared, options=Shared(baseline="none")), True),
    "turn_return": (partial(turns.turn_return, options=TurnReturn(scale="none")), True),
    "gae": (lambda batch: critic.gae(batch, Gae(lam=1.0, whiten=False)).advantages, False),
    "turn_gae": (lambda batch: critic.turn_gae(batch, TurnGae(gamma=1.0, lam=1.0, whiten=False)).advantages, True),
    "bilevel_gae": (
        lambda batch: critic.bilevel_gae(batch, BilevelGae(lam=1.0, turn_gamma=1.0, whiten=False)).advantages,
        False,
    ),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_with_k1_the_expected_gradient_is_that_of_the_reward_minus_the_divergence(name: str) -> None:
    estimate, by_turn = UNBIASED[name]
    torch.testing.assert_close(expected_gradient(estimate, by_turn=by_turn), true_gradient())
    for estimator in ("k2", "k3"):  # only k1 has this property
        biased = expected_gradient(estimate, by_turn=by_turn, estimator=estimator)
        assert (biased - true_gradient()).abs().max() > 0.01


# runs


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        credit={"name": "turn_return"},
        reward={"kl": {"coef": 0.05}},
        train={"steps": 4, "batch_size": 2, "group_size": 4, "lr": 0.01},
        deterministic=True,
    )


def test_a_run_writes_its_metrics_and_penalties(recipe: Path, tmp_path: Path) -> None:
    run(recipe)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["kl_reward/divergence"] == pytest.approx(0.0, abs=1e-6)  # the policy is the reference
    assert metrics[-1]["kl_reward/divergence"] > 1e-3
    assert all(line["kl_reward/coef"] == 0.05 for line in metrics)
    last = [line for line in lines(tmp_path / "run" / "trajectories.jsonl") if line["step"] == 4]
    sums = [sum(sum(turn["penalty"]) for turn in line["turns"]) for line in last]
    assert metrics[-1]["kl_reward/penalty"] == pytest.approx(sum(sums) / len(sums))
    rewards = [line["reward"] for line in last]
    assert metrics[-1]["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["{name: turn_return}", "{name: gae, whiten: false}"])
def test_a_large_coefficient_keeps_the_policy_at_the_reference(recipe: Path, tmp_path: Path, credit: str) -> None:
    found = {}
    for coef in (1e-6, 3.0):
        folder = tmp_path / str(coef)
        options = (
            f"reward.kl.coef={coef}",
            f"credit={credit}",
            "train.steps=12",
            "train.group_size=16",
            "train.lr=0.003",
        )
        run(recipe, *options, f"output={folder}")
        found[coef] = lines(folder / "metrics.jsonl")[-1]["kl_reward/divergence"]
    assert found[3.0] < 0.5 * found[1e-6]


@pytest.mark.parametrize(
    "options",
    [
        (
            *("reward.kl.target=0.0001", "reward.kl.horizon=50"),
            *("reference.sync_every=2", "reference.sync_weight=0.5"),
            *("train.ppo_epochs=2", "loss.kl_coef=0.05"),
        ),
        pytest.param(("model.lora.rank=4",), marks=pytest.mark.slow),
    ],
    ids=["adaptive, sync, loss too", "lora"],
)
def test_a_resumed_run_is_bit_identical(recipe: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    run(recipe, *options, f"output={straight}")
    run(recipe, *options, "train.steps=3", f"output={parts}")
    run(recipe, *options, "resume=auto", f"output={parts}")
    assert timeless(lines(parts / "metrics.jsonl")) == timeless(lines(straight / "metrics.jsonl"))
    coefs = [line["kl_reward/coef"] for line in lines(straight / "metrics.jsonl")]
    assert (len(set(coefs)) > 1) == ("reward.kl.target=0.0001" in options)


# the reference


@pytest.mark.slow
def test_options_of_the_divergence_and_of_the_reference_change_what_is_learnt(recipe: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=5)
    choices: tuple[tuple[str, ...], ...] = (
        (),
        ("reward.kl.coef=0.5",),
        ("reward.kl.estimator=k2",),
        ("reward.kl.target=0.0001", "reward.kl.horizon=20"),
        ("reward.kl.target=0.0001", "reward.kl.horizon=200"),
        (f"reference.path={other}",),
        ("reference.sync_every=1",),
        ("reference.sync_every=1", "reference.sync_weight=1"),
    )
    seen = {}
    for number, options in enumerate(choices):
        run(recipe, *options, "train.steps=2", f"output={tmp_path / str(number)}")
        seen[options] = str(lines(tmp_path / str(number) / "metrics.jsonl")[-1]["kl_reward/penalty"])
    assert len(set(seen.values())) == len(choices)


def test_a_synced_reference_is_the_mean_of_both_models(recipe: Path, model: Path, tmp_path: Path) -> None:
    options = ("reference.sync_every=2", "reference.sync_weight=0.25", "checkpoint.every=1", "checkpoint.keep=4")
    run(recipe, *options)
    steps = tmp_path / "run" / "checkpoints"
    start = load_file(model / "model.safetensors")
    trained = load_file(steps / "step-000002" / "model" / "model.safetensors")
    for step, moved in ((1, False), (2, True), (3, True)):
        state = torch.load(next((steps / f"step-{step:06d}").glob("*.pt")), weights_only=True)["policy"]["reference"]
        assert bool(state) == moved
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, 0.75 * start[name] + 0.25 * trained[name], atol=1e-7, rtol=1e-5)


@pytest.mark.slow
def test_with_an_adapter_the_model_without_it_and_a_copy_are_the_same_reference(recipe: Path, tmp_path: Path) -> None:
    learners = {}
    for source in ("adapter_off", "copy"):
        options = ("model.lora.rank=4", f"reference.source={source}", f"output={tmp_path / source}")
        learners[source] = run(recipe, *options).learner
    first, second = (timeless(lines(tmp_path / source / "metrics.jsonl")) for source in learners)
    assert first == second
    shared = {}
    for source, one in learners.items():
        own = {parameter.data_ptr() for parameter in one.model.parameters()}  # type: ignore[attr-defined]
        shared[source] = [p.data_ptr() in own for p in one._reference._model.parameters()]  # type: ignore[attr-defined]
    assert all(shared["adapter_off"])
    assert not any(shared["copy"])


@pytest.mark.slow
def test_a_given_reference_is_read_and_compared_when_the_run_is_resumed(recipe: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=5)
    run(recipe, f"reference.path={other}", "train.steps=2")
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["kl_reward/divergence"] > 1e-3  # it is another model
    run(recipe, f"reference.path={other}", "train.steps=3", "resume=auto")
    save_model(other, seed=6)
    with pytest.raises(RunError, match=r"the weights in reference\.path=.*changed since the run.*restore them"):
        run(recipe, f"reference.path={other}", "resume=auto")


def test_a_reference_with_another_vocabulary_is_refused(recipe: Path, tmp_path: Path) -> None:
    tiny_model(vocabulary=300).save_pretrained(tmp_path / "larger")
    with pytest.raises(ConfigError, match=r"an embedding of 300 tokens and the trained model of .*same vocabulary"):
        run(recipe, f"reference.path={tmp_path / 'larger'}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": {"kl": {"estimator": "k2"}}}, r"reward\.kl\.estimator has no effect without"),
        ({"reward": {"kl": {"target": 0.1}}}, r"reward\.kl\.target has no effect without"),
        ({"reward": {"kl": {"coef": 0.1, "horizon": 50}}}, r"reward\.kl\.horizon=50 has no effect with a constant"),
        ({"credit": {"name": "gdpo"}}, r"credit\.name=gdpo normalises each part"),
        ({"reward": {}, "reference": {"path": "other"}}, r"reference\.path has no effect without a KL divergence"),
        (
            {"reference": {"path": "other", "source": "copy"}},
            r"reference\.source=copy has no effect with reference\.path",
        ),
        ({"reference": {"source": "adapter_off"}}, r"adapter_off needs an adapter"),
        ({"reference": {"sync_weight": 0.5}}, r"sync_weight has no effect without reference\.sync_every"),
        ({"reference": {"sync_every": 2}, "model": {"lora": {"rank": 4}}}, r"sync_every changes the weights"),
    ],
)
def test_options_without_effect_are_refused(recipe: Path, options: dict[str, Any], message: str) -> None:
    tree = yaml.safe_load(recipe.read_text())
    if "model" in options:
        options = {**options, "model": {**tree["model"], **options["model"]}}
    if options.get("credit", {}).get("name") == "gdpo":
        options = {**options, "reward": {**tree["reward"], "trajectory": ["a.py:b", "a.py:c"]}}
    with pytest.raises(ConfigError, match=message):
        refuse_without_effect(checked({**tree, **options}, source="recipe"))


def test_a_learner_without_reference_says_so() -> None:
    learner = LocalLearner(tiny_model(), sampling=Sampling())
    with pytest.raises(ValueError, match="no reference model"):
        learner.mix_reference(0.5)
