"""Losses against numbers worked out by hand."""

from __future__ import annotations

import math

import torch

from turnwise.options.algorithm import PpoClip
from turnwise.training.losses import Targets, kl_k3, ppo_clip


def targets(behaviour: torch.Tensor, advantage: torch.Tensor) -> Targets:
    """Of one sequence and turn, sampled by the weights of version 0."""
    nothing = torch.zeros(len(behaviour), dtype=torch.int64)
    return Targets(
        token_N=nothing,
        sequence_N=nothing,
        turn_N=nothing,
        version_N=nothing,
        behaviour_logprob_N=behaviour,
        known_N=torch.ones(len(behaviour), dtype=torch.bool),
        advantage_N=advantage,
        weight_N=torch.full_like(behaviour, 1 / len(behaviour)),
    )


def test_ppo_clip_takes_the_pessimistic_side() -> None:
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0])
    terms = ppo_clip(ratio.log(), targets(torch.zeros(5), advantage), PpoClip(clip_low=0.2, clip_high=0.3))
    #                                               clipped: 1.3*2, no: 1.5*-2, no: .5*2, clipped: .8*-2
    torch.testing.assert_close(terms.loss_N, torch.tensor([-2.0, -2.6, 3.0, -1.0, 1.6]))


def test_ppo_clip_on_policy_has_the_gradient_of_the_policy_gradient() -> None:
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    ppo_clip(logprob, targets(logprob.detach(), torch.tensor([3.0, -4.0])), PpoClip()).loss_N.sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([-3.0, 4.0]))


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    value = kl_k3(torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0]))
    torch.testing.assert_close(value, torch.tensor([0.0, math.exp(-1.0), math.e - 2.0]))
