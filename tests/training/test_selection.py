"""Tokens that are selected by entropy or covariance: against plain loops and float64 sequences, however they are packed."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import trajectory
from turnwise.options.algorithm import CorrectionSection, Gspo, LossSection, OptimizationSection, PpoClip, Reinforce
from turnwise.training.batch import Batch, pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.own_loss import example as own_example
from turnwise.training.selection import MeasuredTokens, select_tokens, top_share
from turnwise.training.update import StopFlag, prepare_all
from turnwise.types import Sampling, Trajectory

TRAINED = 22
"""Tokens of `conversations` that are trained on."""


def conversations() -> list[Trajectory]:
    """Ragged: one to two turns and segments, two equal conversations, one without an advantage, a turn of weight 0."""
    made = [
        trajectory(
            "a", [("context", [5, 6, 7]), ("turn", [8, 9, 2]), ("context", [10, 11]), ("turn", [12, 2])], [1.5, -0.5]
        ),
        trajectory("b", [("context", [5, 6, 7]), ("turn", [8, 15, 16, 2])], [0.75]),
        trajectory("b2", [("context", [5, 6, 7]), ("turn", [8, 15, 16, 2])], [0.75]),
        trajectory("c", [("context", [5, 6, 7]), ("turn", [13, 2])], [0.0]),
        trajectory(
            "d",
            [("context", [20, 21]), ("turn", [22, 30, 31]), ("new segment", []), ("context", [20]), ("turn", [33, 2])],
            [-2.0, -1.0],
            group="h",
        ),
        trajectory("e", [("context", [40]), ("turn", [41, 42]), ("context", [43]), ("turn", [44, 2])], [1.0, 0.5]),
    ]
    made[-1].turns[0].weight = 0.0
    return made


def learner(options: LossSection, **more: Any) -> LocalLearner:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)  # entropies from 1 to 5, and not all near log 260
    return LocalLearner(
        model,
        sampling=Sampling(),
        loss=make_loss(options, **more),
        optimizer=OptimizationSection(max_grad_norm=1e9),
        threads=1,
    )


def packed(one: LocalLearner, trajectories: Sequence[Trajectory], **options: Any) -> Batch:
    required = one.requirements
    return pack(trajectories, keep_zero=required.keep_zero, measure_zero=required.measure_zero, version=0, **options)


def gradient(one: LocalLearner, batches: Sequence[Batch]) -> torch.Tensor:
    """The gradient of the first optimizer step."""
    prepared, _ = prepare_all(one, batches, StopFlag())
    one.accumulate(prepared[0].batch.micro_batches, lambda: None, StopFlag())
    return torch.cat([p.grad.flatten() for p in one._optimizer.parameters if p.grad is not None]).double()


# the definitions, token by token in float64


class Token:
    """A trained token: its log-probability with a gradient, and what selects it."""

    def __init__(self, own_V: torch.Tensor, token: int, old: float, advantage: float) -> None:
        self.logprob, self.old, self.advantage = own_V[token], old, advantage
        self.entropy = float(-(own_V.exp() * own_V).sum().detach())

    def covariance(self, tokens: list[Token]) -> float:
        mean_a = sum(one.advantage for one in tokens) / len(tokens)
        mean_l = sum(float(one.logprob.detach()) for one in tokens) / len(tokens)
        return (self.advantage - mean_a) * (float(self.logprob.detach()) - mean_l)


def tokens_of(model: Any, trajectories: Sequence[Trajectory]) -> list[Token]:
    found = []
    for one in trajectories:
        for segment in one.segments:
            own_LV = model(torch.tensor([list(segment.token_ids)])).logits[0].log_softmax(-1)
            found += [
                Token(own_LV[place - 1], segment.token_ids[place], segment.logprobs[place], float(one.advantages[turn]))  # type: ignore[arg-type]
                for place, turn in enumerate(segment.turn)
                if turn >= 0 and one.turns[turn].weight
            ]
    return found


def exact(one: LocalLearner, trajectories: Sequence[Trajectory], options: LossSection) -> tuple[torch.Tensor, int]:
    """The gradient of the definition for tokens of older weights, and the number of tokens that are left out."""
    model = copy.deepcopy(one.model).double()
    model.set_attn_implementation("eager")
    tokens = tokens_of(model, trajectories)
    by_entropy = sorted(tokens, key=lambda token: -token.entropy)
    least = by_entropy[len(tokens) - math.ceil((1 - options.top_entropy_quantile) * (len(tokens) - 1) - 1e-9) - 1]
    kept = [token for token in tokens if token.entropy > least.entropy - 1e-9]
    by_covariance = sorted(tokens, key=lambda token: -token.covariance(tokens))
    held = by_covariance[: max(1, int(options.kl_cov_ratio * len(tokens)))] if options.kl_cov_ratio else []
    total = torch.zeros((), dtype=torch.float64)
    for token in tokens:
        ratio = (token.logprob - token.old).exp()
        term = -torch.minimum(ratio * token.advantage, ratio.clamp(0.8, 1.2) * token.advantage)
        if token in kept:
            total = total + term
        if token in held:
            total = total + options.kl_cov_coef * (token.logprob - token.old).abs()
    (total / len(tokens)).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return flat, len(tokens) - len(kept)


def sampled_before(one: LocalLearner) -> list[Trajectory]:
    """The conversations, of older weights, whose log-probabilities are up to 0.5 away from the learner's; equal ones equally."""
    made = conversations()
    generator = torch.Generator().manual_seed(5)
    for conversation in made:
        if conversation.id == "b2":
            conversation.segments[0].logprobs[:] = made[1].segments[0].logprobs
            conversation.segments[0].version[:] = made[1].segments[0].version
            continue
        for segment in conversation.segments:
            own_LV = one.model(torch.tensor([list(segment.token_ids)])).logits[0].detach().log_softmax(-1)
            for place, turn in enumerate(segment.turn):
                if turn >= 0:
                    noise = float(torch.rand((), generator=generator)) - 0.5
                    segment.logprobs[place] = float(own_LV[place - 1, segment.token_ids[place]]) + noise
                    segment.version[place] = -1
    return made


SELECTIONS: dict[str, dict[str, Any]] = {
    "entropy": {"top_entropy_quantile": 0.3},
    "one token": {"top_entropy_quantile": 0.0},
    "divergence": {"kl_cov_ratio": 0.25, "kl_cov_coef": 0.5},
    "both": {"top_entropy_quantile": 0.6, "kl_cov_ratio": 0.2},
}


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("size", [{"micro_batch_tokens": 4096}, {"micro_batch_tokens": 1, "share_prompts": False}])
def test_the_gradient_of_a_ragged_batch_is_that_of_float64_sequences(name: str, size: dict[str, Any]) -> None:
    options = PpoClip(**SELECTIONS[name])
    one = learner(options)
    trajectories = sampled_before(one)
    expected, left_out = exact(one, trajectories, options)
    batch = packed(one, trajectories, **size)
    torch.testing.assert_close(gradient(one, [batch]), expected, atol=1e-6, rtol=1e-4)
    update = asyncio.run(one.update([batch], lr=0.0))
    assert update.selection["selection/without_loss"] == pytest.approx(left_out / TRAINED)


# Clip-Cov


BETWEEN: dict[str, Any] = {"clip_cov_ratio": 0.25, "clip_cov_low": 0.05, "clip_cov_high": 3.0}


def policy_shares(one: LocalLearner, batches: Sequence[Batch]) -> dict[tuple[str, int], list[float]]:
    """The share of each trained token in the policy loss, for each segment."""
    prepared, _ = prepare_all(one, batches, StopFlag())
    found = {}
    for of_batch in prepared:
        for micro in of_batch.batch.micro_batches:
            targets = micro.targets
            assert targets.policy_share_N is not None
            for number in targets.sequence_N.unique().tolist():
                shares = targets.policy_share_N[targets.sequence_N == number].tolist()
                found.update(dict.fromkeys(of_batch.batch.sources[number], shares))
    return found


def test_clip_cov_leaves_tokens_out_whose_covariance_is_between_the_bounds() -> None:
    one = learner(PpoClip(**BETWEEN))
    trajectories = conversations()
    tokens = tokens_of(one.model, trajectories)
    covariances = [token.covariance(tokens) for token in tokens]
    candidates = sum(0.05 < value < 3.0 for value in covariances)
    assert 5 < candidates < TRAINED
    shares = policy_shares(one, [packed(one, trajectories)])
    # conversation c has no gradient, and is in no pass; its two tokens are among the 22 all the same
    flat = [value for conversation in trajectories for value in all_shares(shares, conversation)]
    assert sum(1 - value for value in flat if not math.isnan(value)) <= 5  # a quarter of 22, rounded down
    update = asyncio.run(one.update([packed(one, trajectories)], lr=0.0))
    assert update.selection["selection/without_loss"] == pytest.approx(5 / TRAINED)
    assert update.selection["selection/covariance"] == pytest.approx(sum(covariances) / TRAINED, rel=1e-4)
    for value, covariance in zip(flat, covariances, strict=True):
        assert value == 1.0 or math.isnan(value) or 0.05 < covariance < 3.0


def all_shares(shares: dict[tuple[str, int], list[float]], one: Trajectory) -> list[float]:
    """Of each trained token of a conversation; NaN if it is in no pass."""
    counts = [sum(turn >= 0 and one.turns[turn].weight > 0 for turn in segment.turn) for segment in one.segments]
    return [value for index, count in enumerate(counts) for value in shares.get((one.id, index), [math.nan] * count)]


def test_more_tokens_are_asked_for_than_there_are_between_the_bounds() -> None:
    one = learner(PpoClip(clip_cov_ratio=0.9, clip_cov_low=0.05, clip_cov_high=3.0))
    tokens = tokens_of(one.model, conversations())
    candidates = sum(0.05 < token.covariance(tokens) < 3.0 for token in tokens)
    update = asyncio.run(one.update([packed(one, conversations())], lr=0.0))
    assert update.selection["selection/without_loss"] == pytest.approx(candidates / TRAINED)


# invariants


EACH: dict[str, LossSection] = {
    "entropy": PpoClip(top_entropy_quantile=0.4),
    "clip_cov": PpoClip(**BETWEEN),
    "kl_cov": PpoClip(kl_cov_ratio=0.25),
    "gspo": Gspo(top_entropy_quantile=0.4, clip_low=0.5, clip_high=0.5),
}


@pytest.mark.parametrize("name", EACH)
def test_order_packing_and_merging_of_equal_segments_change_no_gradient(name: str) -> None:
    one = learner(EACH[name])
    trajectories = sampled_before(one)
    expected = gradient(one, [packed(one, trajectories)])
    assert float(expected.abs().max()) > 1e-3
    ways: list[Any] = [
        packed(one, trajectories[::-1]),
        packed(one, trajectories, micro_batch_tokens=1),
        packed(one, trajectories, micro_batch_tokens=20, share_prompts=False),
        packed(one, trajectories, parallel=3),
    ]
    trajectories[2].group = "other"  # equal conversations of two groups are two sequences
    ways.append(packed(one, trajectories))
    for batch in ways:
        torch.testing.assert_close(gradient(one, [batch]), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["entropy", "clip_cov"])
def test_the_division_into_optimizer_steps_changes_no_choice(name: str) -> None:
    one = learner(EACH[name])
    trajectories = conversations()
    together = policy_shares(one, [packed(one, trajectories)])
    parts = [packed(one, trajectories[:2]), packed(one, trajectories[2:])]
    assert policy_shares(one, parts) == {
        source: pytest.approx(shares) if source[0] not in ("b", "b2") else shares_of_one(one, parts, source)
        for source, shares in together.items()
    }
    # the equal conversations are apart now: together they have the same shares as when they were one sequence
    apart = policy_shares(one, parts)
    both = [(first + second) / 2 for first, second in zip(apart["b", 0], apart["b2", 0], strict=True)]
    assert both == pytest.approx(together["b", 0])


def shares_of_one(one: LocalLearner, batches: Sequence[Batch], source: tuple[str, int]) -> list[float]:
    return policy_shares(one, batches)[source]


def test_rejected_tokens_are_not_selected_from() -> None:
    correction = CorrectionSection(action="reject", low=0.7, high=1.3)
    one = learner(PpoClip(top_entropy_quantile=0.5), correction=correction)
    trajectories = sampled_before(one)
    batch = packed(one, trajectories, micro_batch_tokens=16)
    update = asyncio.run(one.update([batch], lr=0.0))
    left = round(TRAINED * (1 - update.correction["correction/rejected"]))
    assert 2 < left < TRAINED
    kept = left - math.ceil(0.5 * (left - 1))
    assert update.selection["selection/without_loss"] == pytest.approx((left - kept) / left)


def test_the_terms_of_all_tokens_stay_as_they_are() -> None:
    """KL and entropy terms are of all tokens; with no policy loss at all, only they are left."""
    trajectories = conversations()
    for conversation in trajectories:
        conversation.advantages = [0.0] * len(conversation.advantages)
    plain, chosen = (learner(Reinforce(entropy_coef=0.1, top_entropy_quantile=quantile)) for quantile in (1.0, 0.2))
    found = gradient(chosen, [packed(chosen, trajectories)])
    torch.testing.assert_close(found, gradient(plain, [packed(plain, trajectories)]))


def test_the_example_of_the_page() -> None:
    """docs/losses.md: likely tokens that are rewarded, and unlikely ones that are punished, lower the entropy."""
    targets = own_example().targets.select(torch.tensor([0, 1, 8, 9]))
    targets = replace(
        targets,
        sequence_N=torch.tensor([0, 0, 0, 0]),
        copies_N=None,
        advantage_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
    )
    value_NK = torch.tensor([[0.9], [0.1], [0.9], [0.1]]).log()
    given = MeasuredTokens(targets=targets, value_NK=value_NK, sources={0: [("a", 0)]})
    (chosen,) = select_tokens([given], PpoClip(kl_cov_ratio=0.25)).targets
    assert chosen.divergence_share_N is not None
    assert chosen.divergence_share_N.tolist() == [0.5, 0.0, 0.0, 0.5]
    (chosen,) = select_tokens([given], PpoClip(clip_cov_ratio=0.25)).targets
    assert chosen.policy_share_N is not None
    assert chosen.policy_share_N.tolist() in ([0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0])


def test_tokens_at_the_border_share_what_is_left() -> None:
    once = torch.ones(4)
    assert top_share(torch.tensor([3.0, 1.0, 1.0, 0.0]), once, 2).tolist() == [1.0, 0.5, 0.5, 0.0]
    # the first stands for three equal segments, of which two are taken
    assert top_share(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 1.0]), 2).tolist() == pytest.approx([2 / 3, 0.0])
    assert top_share(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 1.0]), 9).tolist() == [1.0, 1.0]


def test_a_token_without_a_policy_loss_has_its_divergence() -> None:
    loss = make_loss(Reinforce(top_entropy_quantile=0.5, kl_cov_ratio=0.5, kl_cov_coef=0.5))
    targets = own_example().targets.select(torch.tensor([0, 1]))
    targets = replace(
        targets,
        advantage_N=torch.tensor([2.0, 2.0]),
        behaviour_logprob_N=torch.tensor([-1.0, -1.0]),
        policy_share_N=torch.tensor([0.0, 0.5]),
        divergence_share_N=torch.tensor([1.0, 0.5]),
    )
    # -A logprob times its share, and 0.5 |logprob - old| times its own
    terms = loss(torch.tensor([-3.0, -2.0]), targets)
    assert terms.loss_N.tolist() == [0.0 * 6.0 + 1.0 * 0.5 * 2.0, 0.5 * 4.0 + 0.5 * 0.5 * 1.0]


def test_without_a_selection_nothing_is_measured() -> None:
    one = learner(PpoClip())
    update = asyncio.run(one.update([packed(one, conversations())], lr=0.0))
    assert update.selection == {}
    assert not one.requirements.measure_zero
