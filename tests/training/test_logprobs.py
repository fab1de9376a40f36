"""Which log-probabilities the loss may use: those of the distribution sampled from, and others are computed or refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.options.algorithm import Nll, PpoClip
from turnwise.training.batch import pack, stale_without_logprobs
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.update import StopFlag, prepare
from turnwise.types import LogprobKind, Sampling, Trajectory

NONE, RAW, SAMPLED, TEMPERED = LogprobKind.NONE, LogprobKind.RAW, LogprobKind.SAMPLED, LogprobKind.TEMPERED


def of_kind(kind: LogprobKind, turns: int = 99) -> list[Trajectory]:
    """A group whose first turns have log-probabilities of this kind."""
    trajectories = group()
    for one in trajectories:
        for turn in one.turns[:turns]:
            assert turn.completion is not None
            turn.completion = replace(turn.completion, logprob_kind=kind)
    return trajectories


def policy(sampling: Sampling, **options: float) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=sampling, loss=make_loss(PpoClip(**options)), threads=1)


def flat(one: LocalLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()])


@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        (Sampling(), {SAMPLED, TEMPERED, RAW}),
        (Sampling(temperature=0.7), {SAMPLED, TEMPERED}),
        (Sampling(top_k=5), {SAMPLED}),
        (Sampling(top_p=0.9), {SAMPLED}),
        (Sampling(temperature=0.7, min_p=0.1), {SAMPLED}),
    ],
)
def test_a_kind_is_exact_where_its_options_change_nothing(sampling: Sampling, exact: set[LogprobKind]) -> None:
    assert sampling.exact_kinds == exact
    assert policy(sampling).requirements.logprob_kinds == exact


@pytest.mark.parametrize("kind", [NONE, RAW, TEMPERED])
def test_numbers_of_another_distribution_are_computed_again_before_the_first_step(kind: LogprobKind) -> None:
    """As if the engine had reported those of the trainer's own weights; in the second pass too, when these have changed."""
    sampling = Sampling(temperature=0.7, top_k=50)
    one, other = policy(sampling), policy(sampling)
    batch = pack(of_kind(kind), kinds=one.requirements.logprob_kinds)
    (micro,) = batch.micro_batches
    assert not micro.targets.known_N.any()
    assert not micro.targets.behaviour_logprob_N.any()
    update = asyncio.run(one.update([batch], lr=1e-2, epochs=2))
    assert update.max_deviation == 0.0  # there is nothing to compare with

    known = pack(group(), kinds=other.requirements.logprob_kinds)
    (micro,) = known.micro_batches
    with torch.no_grad():
        own_N, _ = other._forward.logprobs(micro)
    known = replace(known, micro_batches=[replace(micro, targets=replace(micro.targets, behaviour_logprob_N=own_N))])
    expected = asyncio.run(other.update([known], lr=1e-2, epochs=2))
    assert torch.equal(flat(one), flat(other))
    assert (update.loss, update.kl) == (expected.loss, expected.kl)


def test_what_is_known_is_used_beside_what_is_not() -> None:
    (micro, *rest) = pack(of_kind(NONE, turns=1)).micro_batches
    assert not rest
    # the second turn of the first trajectory is the only one that is no first turn
    assert micro.targets.known_N.tolist() == [
        token == 12 or index == 4 for index, token in enumerate(micro.targets.token_N.tolist())
    ]
    assert micro.targets.behaviour_logprob_N[micro.targets.known_N].tolist() == [-0.5, -0.5]
    one = policy(Sampling())
    (completed,) = prepare(one, pack(of_kind(NONE, turns=1)), StopFlag()).batch.micro_batches
    own_N = one._forward.logprobs(micro)[0].detach()
    assert torch.equal(
        completed.targets.behaviour_logprob_N,
        torch.where(micro.targets.known_N, micro.targets.behaviour_logprob_N, own_N),
    )
    update = asyncio.run(one.update([pack(of_kind(NONE, turns=1))], lr=0.0))
    known = (own_N - micro.targets.behaviour_logprob_N)[micro.targets.known_N].exp()
    assert update.max_deviation == pytest.approx(float((known - 1).abs().max()), rel=1e-5)


def test_the_likelihood_needs_no_log_probabilities_of_the_engine() -> None:
    one = LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(Nll()), share_prompts="never")
    batch = pack(of_kind(NONE), share_prompts=False)
    assert prepare(one, batch, StopFlag()).batch is batch


def test_unknown_log_probabilities_of_older_weights_break_their_trajectory() -> None:
    whole, unknown = group()[0], of_kind(NONE)[0]
    kinds = Sampling().exact_kinds
    assert stale_without_logprobs(unknown, kinds=kinds, version=0) is None
    assert stale_without_logprobs(whole, kinds=kinds, version=1) is None
    failure = stale_without_logprobs(unknown, kinds=kinds, version=1)
    assert failure is not None
    assert failure.kind == "engine"
    assert "turn 0 was sampled by weights of version 0, is used to train version 1" in failure.message
    assert "of the kind 'none'; importance correction needs raw or sampled or tempered" in failure.message
