"""The trainer's log-probabilities reach the segments: those of a plain forward pass, at the tokens that were trained on."""

from __future__ import annotations

import asyncio
import math

import pytest

from support.tiny import tiny_model
from training.test_batch import group, trajectory
from turnwise.options.algorithm import CorrectionSection, PpoClip
from turnwise.training.batch import pack, set_trainer_logprobs
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.types import Sampling, Trajectory


def learner(correction: CorrectionSection = CorrectionSection()) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip(), correction))


def conversations() -> list[Trajectory]:
    """Those of `group`, one of them twice, one without advantage, and a turn that is not trained on."""
    twice = trajectory("b2", [("context", [5, 6, 7]), ("turn", [13, 2]), ("context", [14])], [-0.5])
    zero = trajectory("z", [("context", [5, 6, 7]), ("turn", [17, 2])], [0.0])
    made = [*group(), twice, zero]
    made[0].turns[0].weight = 0.0
    return made


def expected(one: LocalLearner, conversation: Trajectory) -> list[float]:
    """From the model's forward pass on the sequence alone."""
    (segment,) = conversation.segments
    logprobs = [0.0, *one.token_logprobs(segment.token_ids)]
    weights = [conversation.turns[turn].weight if turn >= 0 else None for turn in segment.turn]
    return [0.0 if w is None else logprob if w else math.nan for logprob, w in zip(logprobs, weights, strict=True)]


@pytest.mark.parametrize(
    "packing",
    [{}, {"share_prompts": False, "micro_batch_tokens": 1}, {"micro_batch_tokens": 8}],
    ids=["tree", "separate rows", "several micro-batches"],
)
@pytest.mark.parametrize("reject", [False, True])
def test_they_are_those_of_a_plain_forward_pass(packing: dict[str, int], reject: bool) -> None:
    one = learner(CorrectionSection(action="reject", low=1e-9, high=1e-8) if reject else CorrectionSection())
    trajectories = conversations()
    before = {conversation.id: expected(one, conversation) for conversation in trajectories}
    batch = pack(trajectories, **packing)  # type: ignore[arg-type]
    update = asyncio.run(one.update([batch], lr=0.1, epochs=2))
    set_trainer_logprobs(trajectories, [batch], update.logprobs)
    for conversation in trajectories[:-1]:
        (segment,) = conversation.segments
        assert list(segment.trainer_logprobs) == pytest.approx(before[conversation.id], abs=1e-4, nan_ok=True)
    assert not trajectories[-1].segments[0].trainer_logprobs  # no gradient: it was in no forward pass


def test_each_minibatch_has_its_own() -> None:
    one, trajectories = learner(), group()
    batches = [pack(trajectories[:2]), pack(trajectories[2:])]
    update = asyncio.run(one.update(batches, lr=0.0))
    set_trainer_logprobs(trajectories, batches, update.logprobs)
    for conversation in trajectories:
        (segment,) = conversation.segments
        assert list(segment.trainer_logprobs) == pytest.approx(expected(one, conversation), abs=1e-4)


def test_a_wrong_number_is_an_error() -> None:
    one, trajectories = learner(), group()
    batch = pack(trajectories)
    update = asyncio.run(one.update([batch], lr=0.0))
    trajectories[0].turns[0].weight = 0.0
    with pytest.raises(ValueError, match="2 targets and 5 log-probabilities"):
        set_trainer_logprobs(trajectories, [batch], update.logprobs)
