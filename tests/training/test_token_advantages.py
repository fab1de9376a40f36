"""Advantages per token: the gradient is that of a plain float64 loop over the sampled tokens, each with its own advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import gradients, targets, trajectory
from turnwise.training.batch import pack
from turnwise.types import Sampling, Trajectory

# the opening is shared; `a` has a turn in each of two segments, and a context token between two turns of the first one
OPENING = ("context", [5, 6, 7])
TURNS_A = [
    OPENING,
    ("turn", [8, 9, 2]),
    ("context", [10]),
    ("turn", [12, 2]),
    ("new segment", []),
    ("context", [5, 21]),
    ("turn", [22, 2]),
]


def conversations() -> list[Trajectory]:
    a = trajectory("a", TURNS_A, [])
    a.advantages = [[1.0, -0.5, 0.25], 0.75, (0.0, -2.0)]
    b = trajectory("b", [OPENING, ("turn", [13, 2])], [])
    b.advantages = [[-1.0, 0.5]]
    c = trajectory("c", [OPENING, ("turn", [14, 15, 2])], [0.5])
    c.turns[0].weight = 0.5
    return [a, b, c]


def reference_gradient(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """In float64, one sequence after the other, one token after the other; averaged over tokens by weight."""
    model = tiny_model().double()
    model.set_attn_implementation("eager")
    terms: list[torch.Tensor] = []
    total = 0.0
    for one in trajectories:
        left = [list(entry) if isinstance(entry, Sequence) else None for entry in one.advantages]
        for segment in one.segments:
            logprob_LV = model(torch.tensor([list(segment.token_ids)])).logits[0].log_softmax(-1)
            for place, turn in enumerate(segment.turn):
                if turn < 0:
                    continue
                entry = left[turn]
                advantage = one.advantages[turn] if entry is None else entry.pop(0)
                weight = one.turns[turn].weight
                total += weight
                terms.append(weight * advantage * logprob_LV[place - 1, segment.token_ids[place]])
        assert not any(left)
    (torch.stack(terms).sum() / total).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_the_gradient_is_that_of_each_token_with_its_own_advantage(
    share_prompts: bool, micro_batch_tokens: int
) -> None:
    trajectories = conversations()
    batch = pack(trajectories, share_prompts=share_prompts, micro_batch_tokens=micro_batch_tokens)
    found, _ = gradients(batch, Sampling())
    expected = reference_gradient(trajectories)
    assert expected.norm() > 1e-3
    assert (found.double() - expected).norm() < 1e-5 * expected.norm()
    by_token = [(token, advantage) for token, advantage, _ in targets(batch)]
    assert by_token == sorted(
        [
            *[(8, 1.0), (9, -0.5), (2, 0.25), (12, 0.75), (2, 0.75), (22, 0.0), (2, -2.0)],
            *[(13, -1.0), (2, 0.5), (14, 0.5), (15, 0.5), (2, 0.5)],
        ]
    )


def test_one_number_for_each_token_is_the_number_of_the_turn() -> None:
    by_turn = trajectory("a", TURNS_A, [1.0, 0.5, -1.0])
    by_token = replace(by_turn, advantages=[[1.0, 1.0, 1.0], [0.5, 0.5], [-1.0, -1.0]])
    for name in ("token_N", "advantage_N", "weight_N", "sequence_N", "turn_N"):
        columns = [getattr(pack([one]).micro_batches[0].targets, name) for one in (by_turn, by_token)]
        assert torch.equal(*columns), name


def test_tokens_that_an_environment_removed_have_no_advantage() -> None:
    one = trajectory("a", [OPENING, ("turn", [8, 9, 10, 2])], [])
    one.segments[0].truncate(5)  # of four sampled tokens two stay
    one.advantages = [[0.5, -0.5]]
    assert [(token, advantage) for token, advantage, _ in targets(pack([one]))] == [(8, 0.5), (9, -0.5)]


@pytest.mark.parametrize("entry", [[1.0], [1.0, 2.0, 3.0, 4.0], []])
def test_another_number_of_advantages_than_tokens_is_refused(entry: list[float]) -> None:
    one = trajectory("a", [OPENING, ("turn", [8, 9, 2])], [])
    one.advantages = [entry]
    with pytest.raises(ValueError, match=rf"trajectory a: turn 0 has 3 sampled tokens and {len(entry)} advantages"):
        pack([one], keep_zero=True)


def test_a_turn_whose_tokens_all_have_advantage_zero_costs_nothing() -> None:
    one = trajectory("a", [OPENING, ("turn", [8, 9, 2])], [])
    one.advantages = [[0.0, 0.0, 0.0]]
    assert not one.has_advantage(0)
    assert (pack([one]).micro_batches, pack([one]).tokens) == ([], 3)
    one.advantages = [[0.0, 0.0, -0.1]]
    assert one.has_advantage(0)
    assert len(targets(pack([one]))) == 3
