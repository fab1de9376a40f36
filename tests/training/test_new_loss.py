"""A new loss is one function of log-probabilities and targets: here a loss over sequences, which combines their tokens."""

from __future__ import annotations

import asyncio

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import completion, group, trajectory
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import Loss, LossTerms, Targets
from turnwise.training.update import StopFlag
from turnwise.types import Sampling, Segment


def sequence_ratio(logprob_N: torch.Tensor, targets: Targets) -> LossTerms:
    """`-s A` with `s` the mean probability ratio of a sequence in logarithms (GSPO without clipping)."""
    _, place_N, count_S = torch.unique(targets.sequence_N, return_inverse=True, return_counts=True)
    difference_N = logprob_N - targets.behaviour_logprob_N
    mean_S = torch.zeros(len(count_S)).index_add(0, place_N, difference_N) / count_S
    nothing = torch.zeros(())
    return LossTerms(
        loss_N=-mean_S.exp()[place_N] * targets.advantage_N,
        kl_N=torch.zeros_like(logprob_N),
        clipped=nothing,
        max_deviation=nothing,
    )


def reference_gradient() -> torch.Tensor:
    """In float64, one trajectory after the other. Each has one segment, and one advantage for all turns."""
    model = tiny_model().double()
    model.set_attn_implementation("eager")
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for one in group():
        (segment,) = one.segments
        logprob_LV = model(torch.tensor([list(segment.token_ids)])).logits[0].log_softmax(-1)
        places = [place for place, turn in enumerate(segment.turn) if turn >= 0]
        ratio = torch.stack(
            [logprob_LV[place - 1, segment.token_ids[place]] - segment.logprobs[place] for place in places]
        )
        total = total - len(places) * ratio.mean().exp() * one.advantages[0]
        tokens += len(places)
    (total / tokens).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 10_000])
def test_a_loss_over_sequences_is_exact_however_it_is_packed(share_prompts: bool, micro_batch_tokens: int) -> None:
    learner = LocalLearner(
        tiny_model(),
        sampling=Sampling(),
        loss=Loss(objective=sequence_ratio, needs_behaviour_logprobs=True),
        share_prompts="auto" if share_prompts else "never",
    )
    batch = pack(group(), share_prompts=share_prompts, micro_batch_tokens=micro_batch_tokens)
    learner.accumulate(batch.micro_batches, lambda: None, StopFlag())
    gradients = [parameter.grad for parameter in learner._optimizer.parameters]
    found = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
    expected = reference_gradient()
    assert expected.norm() > 1e-3
    assert (found.double() - expected).norm() < 1e-5 * expected.norm()
    assert asyncio.run(learner.update([batch], lr=1e-3)).grad_norm == pytest.approx(float(expected.norm()), rel=1e-4)


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_targets_know_their_sequence_turn_and_version(micro_batch_tokens: int) -> None:
    first = trajectory("a", [("context", [5]), ("turn", [6, 2]), ("context", [7]), ("turn", [8, 2])], [1.0, -1.0])
    first.segments.append(Segment())
    first.segments[1].append_context([9])
    newer = completion([10, 2])
    first.turns.append(type(first.turns[0])(index=2, message={}, text="", completion=newer))
    first.segments[1].append_completion(2, newer)
    first.segments[1].version[-1] = 4  # the weights changed in the middle of a turn
    first.advantages = [1.0, -1.0, 0.5]
    second = trajectory("b", [("context", [5]), ("turn", [11, 2])], [2.0])
    found: dict[int, list[tuple[int, int, int]]] = {}
    for micro in pack([first, second], micro_batch_tokens=micro_batch_tokens).micro_batches:
        columns = (micro.targets.sequence_N, micro.targets.token_N, micro.targets.turn_N, micro.targets.version_N)
        for sequence, *rest in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(sequence, []).append(tuple(rest))
    assert sorted(found.values()) == [
        [(6, 0, 0), (2, 0, 0), (8, 1, 0), (2, 1, 0)],
        [(10, 2, 0), (2, 2, 4)],
        [(11, 0, 0), (2, 0, 0)],
    ]
