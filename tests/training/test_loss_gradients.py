"""Every loss, with every normalizer and estimator of the KL divergence, against float64 loops written from the formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from turnwise.options.algorithm import Cispo, CorrectionSection, Gspo, LossSection, PpoClip, Reinforce, Sapo
from turnwise.training.batch import token_shares
from turnwise.training.losses import Targets, make_loss, off_policy_sequence_mask
from turnwise.training.value_model import value_loss

SEQUENCES = [[(0, 3), (1, 2)], [(0, 4)], [(0, 1), (1, 1), (2, 2)]]
"""For each of three sequences: turn index and number of tokens. Sequences 0 and 1 are segments of one trajectory."""
TRAJECTORIES = [[0, 1], [2]]
LENGTHS = [sum(count for _, count in turns) for turns in SEQUENCES]

LOSSES: dict[str, LossSection] = {
    "ppo_clip": PpoClip(clip_low=0.1, clip_high=0.2),
    "dual_clip": PpoClip(clip_low=0.1, clip_high=0.2, dual_clip=1.3),
    "gspo": Gspo(clip_low=0.05, clip_high=0.05),
    "gspo by turn": Gspo(clip_low=0.05, clip_high=0.05, level="turn"),
    "cispo": Cispo(clip_low=0.3, clip_high=0.1),
    "sapo": Sapo(tau_positive=1.0, tau_negative=2.0),
    "reinforce": Reinforce(),
}
NORMALIZATIONS = [
    LossSection(normalizer="token"),
    LossSection(normalizer="sequence"),
    LossSection(normalizer="trajectory"),
    LossSection(normalizer="constant", constant_length=20),
]


def columns(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    behaviour = -normal(1.0).abs() - 0.5
    return {
        "behaviour": behaviour,
        "logprob": behaviour + normal(0.4),
        "reference": behaviour + normal(0.4),
        "advantage": normal(1.0),
        "sequence": torch.tensor([s for s, length in enumerate(LENGTHS) for _ in range(length)]),
        "turn": torch.tensor([turn for turns in SEQUENCES for turn, n in turns for _ in range(n)]),
    }


def weights(normalization: LossSection) -> torch.Tensor:
    sums = [[float(LENGTHS[sequence]) for sequence in sequences] for sequences in TRAJECTORIES]
    shares = [share for trajectory in token_shares(sums, normalization) for share in trajectory]
    return torch.tensor([shares[s] for s, n in enumerate(LENGTHS) for _ in range(n)], dtype=torch.float64)


def plain_weight(normalization: LossSection, sequence: int) -> float:
    """1 / the denominator of a token, written out for the three sequences of 5, 4 and 4 tokens."""
    return {
        "token": 1 / 13,
        "sequence": [1 / 15, 1 / 12, 1 / 12][sequence],
        "trajectory": [1 / 18, 1 / 18, 1 / 8][sequence],
        "constant": 1 / 40,
    }[normalization.normalizer]


def targets_of(values: dict[str, torch.Tensor], weight_N: torch.Tensor, **more: Any) -> Targets:
    return Targets(
        token_N=torch.zeros_like(values["turn"]),
        sequence_N=values["sequence"],
        turn_N=values["turn"],
        version_N=torch.zeros_like(values["turn"]),
        behaviour_logprob_N=values["behaviour"],
        known_N=torch.ones_like(values["turn"], dtype=torch.bool),
        advantage_N=values["advantage"],
        weight_N=weight_N,
        **more,
    )


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def plain_token_gradient(config: LossSection, place: int, values: dict[str, list[Any]]) -> float:
    """The derivative of a token's policy loss by its own log-probability, from the formula."""
    advantage = values["advantage"][place]
    log_ratios = [a - b for a, b in zip(values["logprob"], values["behaviour"], strict=True)]
    ratio = math.exp(log_ratios[place])
    if isinstance(config, Reinforce):
        return -advantage
    if isinstance(config, Cispo):
        return -clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage
    if isinstance(config, Sapo):
        tau = config.tau_positive if advantage > 0 else config.tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 * gate * (1 - gate) * ratio * advantage
    assert isinstance(config, PpoClip | Gspo)
    if isinstance(config, Gspo):
        own = [
            place_
            for place_ in range(len(log_ratios))
            if values["sequence"][place_] == values["sequence"][place]
            and (config.level == "sequence" or values["turn"][place_] == values["turn"][place])
        ]
        ratio = math.exp(sum(log_ratios[other] for other in own) / len(own))
    clipped = clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    if clipped * advantage < ratio * advantage:
        return 0.0
    if isinstance(config, PpoClip) and config.dual_clip is not None and advantage < 0 and ratio > config.dual_clip:
        return 0.0
    return -ratio * advantage


def plain_kl_gradient(estimator: str, logprob: float, reference: float, behaviour: float) -> float:
    d = logprob - reference
    k3, slope = math.exp(-d) + d - 1, 1 - math.exp(-d)
    ratio = math.exp(logprob - behaviour)
    return {"k1": 1.0, "k2": d, "k3": slope, "k3_corrected": ratio * (slope + k3)}[estimator]


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3", "k3_corrected"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=lambda one: one.normalizer)
@pytest.mark.parametrize("name", list(LOSSES))
def test_the_gradient_is_that_of_the_formula(name: str, normalization: LossSection, estimator: Any) -> None:
    base, values = LOSSES[name], columns()
    config = type(base)(**{**dict(base), "kl_coef": 0.3 if estimator else 0.0, "kl_estimator": estimator or "k3"})
    logprob = values["logprob"].clone().requires_grad_(True)
    weight = weights(normalization)
    terms = make_loss(config)(
        logprob, targets_of(values, weight), reference_logprob_N=values["reference"] if estimator else None
    )
    (terms.loss_N * weight).sum().backward()
    plain = {key: column.tolist() for key, column in values.items()}
    expected = []
    for place, sequence in enumerate(plain["sequence"]):
        slope = plain_token_gradient(config, place, plain)
        if estimator:
            parts = (plain["logprob"][place], plain["reference"][place], plain["behaviour"][place])
            slope += 0.3 * plain_kl_gradient(estimator, *parts)
        expected.append(plain_weight(normalization, sequence) * slope)
    torch.testing.assert_close(logprob.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert any(expected)


@pytest.mark.parametrize("name", list(LOSSES))
def test_order_and_division_of_the_sequences_change_no_gradient(name: str) -> None:
    loss, values, weight = make_loss(LOSSES[name]), columns(), weights(LossSection(normalizer="sequence"))

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        logprob = values["logprob"].clone().requires_grad_(True)
        for part in parts:
            keep = torch.cat([torch.nonzero(values["sequence"] == sequence)[:, 0] for sequence in part])
            chosen = {key: column[keep] for key, column in values.items()}
            terms = loss(logprob[keep], targets_of(chosen, weight[keep]))
            (terms.loss_N * weight[keep]).sum().backward()
        assert logprob.grad is not None
        return logprob.grad

    expected = gradient([[0, 1, 2]])
    for order in itertools.permutations(range(3)):
        torch.testing.assert_close(gradient([list(order)]), expected)
        torch.testing.assert_close(gradient([[sequence] for sequence in order]), expected)


def test_losses_on_policy_all_have_the_policy_gradient() -> None:
    values = columns()
    for config in LOSSES.values():
        logprob = values["behaviour"].clone().requires_grad_(True)
        make_loss(config)(logprob, targets_of(values, weights(LossSection()))).loss_N.sum().backward()
        torch.testing.assert_close(logprob.grad, -values["advantage"])


def test_decoupled_ratios_compare_with_the_proximal_policy_and_are_weighted() -> None:
    values = columns()
    proximal, factor = values["behaviour"] + 0.3, torch.linspace(0.5, 1.5, len(values["turn"]), dtype=torch.float64)
    logprob = proximal.clone().requires_grad_(True)
    targets = targets_of(
        values, weights(LossSection()), proximal_logprob_N=proximal, correction_N=factor, decoupled=True
    )
    make_loss(PpoClip(), CorrectionSection(action="truncate"))(logprob, targets).loss_N.sum().backward()
    torch.testing.assert_close(logprob.grad, -factor * values["advantage"])  # the ratio to the proximal policy is 1


def test_the_off_policy_mask_removes_unlikely_sequences_where_the_advantage_is_negative() -> None:
    values = columns()
    values["logprob"] = values["behaviour"] - torch.tensor([[0.6, 0.4, 0.6][s] for s in values["sequence"].tolist()])
    values["advantage"] = torch.tensor([-1.0] * 9 + [1.0] * 4, dtype=torch.float64)
    mask = off_policy_sequence_mask(values["logprob"], targets_of(values, weights(LossSection())), delta=0.5)
    assert mask.tolist() == [0.0] * 5 + [1.0] * 8


@pytest.mark.parametrize("length", [None, 0, -1])
def test_a_normalizer_that_divides_by_zero_is_refused(length: int | None) -> None:
    with pytest.raises(ValueError, match=f"divides by constant_length={length}: it must be above 0"):
        token_shares([[3.0]], LossSection.model_construct(normalizer="constant", constant_length=length))


def test_value_clipping_takes_the_larger_loss() -> None:
    value = torch.tensor([1.0, 3.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([1.0, 1.0, 1.0, 1.0]).double(), torch.tensor([2.0, 4.0, 0.0, 1.0]).double()
    #                                             inside, clipped to 1.5, not better clipped, clipped to 0.5
    loss = value_loss(value, old, returns, clip=0.5)
    assert loss.tolist() == [0.5, 3.125, 4.5, 0.5]
    loss.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [-1.0, 0.0, 3.0, -1.0]
    assert value_loss(value, old, returns).tolist() == [0.5, 0.5, 4.5, 0.5]
