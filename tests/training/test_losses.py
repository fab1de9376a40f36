"""Losses against numbers worked out by hand and float64 loops, and losses of users: arguments, results, what they must keep."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import completion, group, trajectory
from turnwise.config.recipe import checked, load
from turnwise.config.resume_rules import RULES
from turnwise.config.train_checks import needs_reference, refuse_without_effect
from turnwise.doctor.recipe import own_loss
from turnwise.errors import ConfigError
from turnwise.options.algorithm import (
    LOSSES,
    Cispo,
    CorrectionSection,
    Gmpo,
    Gspo,
    LossSection,
    OwnLoss,
    PpoClip,
    Reinforce,
    Sapo,
)
from turnwise.options.schema import Config
from turnwise.training.batch import pack, token_shares
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import (
    Loss,
    LossTerms,
    Targets,
    gmpo,
    kl_k3,
    make_loss,
    off_policy_sequence_mask,
    ppo_clip,
)
from turnwise.training.own_loss import broken_invariants, try_own_loss
from turnwise.training.update import StopFlag
from turnwise.training.value_model import value_loss
from turnwise.types import Sampling, Segment

# Losses against numbers worked out by hand.


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


def test_gmpo_is_the_objective_of_its_paper() -> None:
    """`-(product of min(r^sgn A, clip(r)^sgn A)^sgn A)^(1/n) A` (equation 4), as one number for the sequence."""
    behaviour = torch.tensor([-1.0, -1.0, -2.0, -0.5], dtype=torch.float64)
    for sign in (1.0, -1.0):
        logprob = (behaviour + torch.tensor([2.0, 0.5, 1.5, 0.9]).log()).requires_grad_(True)
        own = targets(behaviour, torch.full((4,), sign * 3.0, dtype=torch.float64))
        terms = gmpo(logprob, own, Gmpo(log_clip_low=math.log(1.25), log_clip_high=math.log(1.6)))
        (gradient,) = torch.autograd.grad((terms.loss_N * own.weight_N).sum(), logprob)
        ratio = (logprob - behaviour).exp()
        each = torch.minimum(ratio**sign, ratio.clamp(0.8, 1.6) ** sign) ** sign
        paper = -(each.prod() ** 0.25) * sign * 3.0
        torch.testing.assert_close((terms.loss_N * own.weight_N).sum(), paper)
        torch.testing.assert_close(gradient, torch.autograd.grad(paper, logprob)[0])
        assert (gradient == 0).tolist() == ([True, False, False, False] if sign > 0 else [False, True, False, False])
        assert int(terms.clipped) == 2


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    value = kl_k3(torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0]))
    torch.testing.assert_close(value, torch.tensor([0.0, math.exp(-1.0), math.e - 2.0]))


# Every loss, with every normalizer and estimator of the KL divergence, against float64 loops written from the
# formulas.


SEQUENCES = [[(0, 3), (1, 2)], [(0, 4)], [(0, 1), (1, 1), (2, 2)]]
"""For each of three sequences: turn index and number of tokens. Sequences 0 and 1 are segments of one trajectory."""

TRAJECTORIES = [[0, 1], [2]]

LENGTHS = [sum(count for _, count in turns) for turns in SEQUENCES]

NAMED_LOSSES: dict[str, LossSection] = {
    "ppo_clip": PpoClip(clip_low=0.1, clip_high=0.2),
    "dual_clip": PpoClip(clip_low=0.1, clip_high=0.2, dual_clip=1.3),
    "gspo": Gspo(clip_low=0.05, clip_high=0.05),
    "gspo by turn": Gspo(clip_low=0.05, clip_high=0.05, level="turn"),
    "gmpo": Gmpo(log_clip_low=0.1, log_clip_high=0.2),
    "gmpo by turn": Gmpo(log_clip_low=0.1, log_clip_high=0.2, level="turn"),
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
    assert isinstance(config, PpoClip | Gspo | Gmpo)
    if not isinstance(config, PpoClip):
        own = [
            place_
            for place_ in range(len(log_ratios))
            if values["sequence"][place_] == values["sequence"][place]
            and (config.level == "sequence" or values["turn"][place_] == values["turn"][place])
        ]
        if isinstance(config, Gmpo):
            bounds = [
                (-math.inf, config.log_clip_high)
                if values["advantage"][other] > 0
                else (-config.log_clip_low, math.inf)
                for other in range(len(log_ratios))
            ]
            if clip(log_ratios[place], *bounds[place]) != log_ratios[place]:
                return 0.0
            return -advantage * math.exp(sum(clip(log_ratios[other], *bounds[other]) for other in own) / len(own))
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
@pytest.mark.parametrize("name", list(NAMED_LOSSES))
def test_the_gradient_is_that_of_the_formula(name: str, normalization: LossSection, estimator: Any) -> None:
    base, values = NAMED_LOSSES[name], columns()
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


@pytest.mark.parametrize("name", list(NAMED_LOSSES))
def test_order_and_division_of_the_sequences_change_no_gradient(name: str) -> None:
    loss, values, weight = make_loss(NAMED_LOSSES[name]), columns(), weights(LossSection(normalizer="sequence"))

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
    for config in NAMED_LOSSES.values():
        logprob = values["behaviour"].clone().requires_grad_(True)
        make_loss(config)(logprob, targets_of(values, weights(LossSection()))).loss_N.sum().backward()
        torch.testing.assert_close(logprob.grad, -values["advantage"])


def test_decoupled_ratios_compare_with_the_proximal_policy_and_are_weighted() -> None:
    values = columns()
    proximal, factor = values["behaviour"] + 0.3, torch.linspace(0.5, 1.5, len(values["turn"]), dtype=torch.float64)
    logprob = proximal.clone().requires_grad_(True)
    targets = targets_of(
        values, weights(LossSection()), proximal_logprob_N=proximal, correction_N=factor, old_is_proximal=True
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


# A new loss is one function of log-probabilities and targets: here a loss over sequences, which combines their
# tokens.


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


# `loss: file.py:function`: a loss of the user, its arguments, what it declares, what it may return, and what it must
# keep


SOURCE = """
import torch
import turnwise

CALLS = []

def reinforce(logprob_N, targets, *, power: float = 1.0):
    return -targets.advantage_N * logprob_N * power

@turnwise.needs(reference=True, entropy=True, zero_advantages=False)
def clipped(logprob_N, targets, *, low: float = 0.2, high: float = 0.2, kl: float = 0.0, entropy: float = 0.0):
    ratio_N = (logprob_N - targets.old_logprobs).exp()
    gain_N = torch.minimum(
        ratio_N * targets.advantage_N, ratio_N.clamp(1 - low, 1 + high) * targets.advantage_N
    )
    kl_N = (logprob_N - targets.reference_logprob_N).square() / 2
    return kl * kl_N - gain_N - entropy * targets.entropy_N

@turnwise.needs(values=True)
def towards_values(logprob_N, targets): return -targets.value_N * logprob_N

@turnwise.needs(baseline=True)
def of_an_estimator(logprob_N, targets): return logprob_N

def none(logprob_N, targets): reinforce(logprob_N, targets)
def mean(logprob_N, targets): return reinforce(logprob_N, targets).mean()
def squeezed(logprob_N, targets): return logprob_N.squeeze()
def doubled(logprob_N, targets): return torch.cat([logprob_N, logprob_N])
def numbers(logprob_N, targets): return logprob_N.tolist()
def detached(logprob_N, targets): return -targets.advantage_N * logprob_N.detach()
def nan(logprob_N, targets): return logprob_N * (targets.advantage_N / targets.advantage_N)
def root(logprob_N, targets):
    return torch.where(targets.advantage_N > 0, (logprob_N - targets.old_logprobs).abs().sqrt(), logprob_N)
def raises(logprob_N, targets): return targets.nothing
def alone(logprob_N): return logprob_N
@turnwise.needs(zero_advantages=False)
def imitates(logprob_N, targets): return -logprob_N

def whitened(logprob_N, targets): return -logprob_N * (targets.advantage_N - targets.advantage_N.mean())
def by_place(logprob_N, targets): return -logprob_N * torch.arange(len(logprob_N))
def by_number(logprob_N, targets): return -logprob_N * targets.sequence_N
def averages(logprob_N, targets): return -logprob_N * targets.advantage_N * targets.weight_N
def of_earlier_calls(logprob_N, targets):
    CALLS.append(1)
    return -logprob_N * len(CALLS)
def writes(logprob_N, targets):
    targets.advantage_N.clamp_(-1, 1)
    return -logprob_N * targets.advantage_N
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(dedent(SOURCE), encoding="utf-8")
    return str(path)


def recipe(loss: Any, **more: Any) -> Config:
    return checked({"model": "m", "data": {"train": "r.jsonl"}, "loss": loss, **more}, source="the test")


def test_a_reference_is_short_for_a_section_with_a_function(file: str, tmp_path: Path) -> None:
    use = f"{file}:reinforce"
    assert recipe(use).loss == recipe({"use": use}).loss == OwnLoss(use=use)
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\ndata: {train: r.jsonl}\nloss: {name: gspo, level: turn, kl_coef: 0.1}\n", "utf-8")
    config, notes = load(path, [f"loss={use}", "loss.arguments.power=2"])
    assert config.loss == OwnLoss(use=use, arguments={"power": 2}, kl_coef=0.1)
    assert ["loss.level" in note for note in notes] == [True]
    assert RULES["loss.use"] == RULES["loss.arguments"] == "named"


def gradient(loss: LossSection, *, share: bool = True, tokens: int = 10_000, parallel: int = 1) -> torch.Tensor:
    """By all parameters, of a batch of four conversations, of which one has the advantage 0."""
    model = tiny_model()
    learner = LocalLearner(model, sampling=Sampling(), loss=make_loss(loss), threads=1)
    with torch.no_grad():  # away from the reference model
        for parameter in model.parameters():
            parameter.mul_(1.2)
    conversations = group()
    conversations[1].advantages = [0.0]
    batch = pack(
        conversations,
        loss=loss,
        share_prompts=share,
        micro_batch_tokens=tokens,
        parallel=parallel,
        keep_zero=learner.requirements.keep_zero,
    )
    learner.accumulate(batch.micro_batches, lambda: None, StopFlag())
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_a_copy_of_our_loss_has_the_same_gradient(file: str) -> None:
    """However sequences are packed: in trees or padded rows, in one micro-batch or many, in several threads."""
    ours = PpoClip(clip_high=0.3, kl_coef=0.5, kl_estimator="k2", entropy_coef=0.1)
    arguments = {"high": 0.3, "kl": 0.5, "entropy": 0.1}
    expected = gradient(ours)
    for other in (ours.model_copy(update={name: 0.0}) for name in ("kl_coef", "entropy_coef")):
        assert (gradient(other) - expected).norm() > 0.02 * expected.norm()
    # its terms are in the function: conversations with the advantage 0 have a gradient of the entropy
    path = Path(file)
    path.write_text(path.read_text("utf-8").replace(", zero_advantages=False)\ndef clipped", ")\ndef clipped"), "utf-8")
    mine = OwnLoss(use=f"{file}:clipped", arguments=arguments)
    for packing in ({}, {"share": False}, {"tokens": 1}, {"share": False, "tokens": 12, "parallel": 2}):
        assert (gradient(mine, **packing) - expected).norm() < 1e-4 * expected.norm()  # type: ignore[arg-type]


def test_what_a_loss_declares_is_made_for_it(file: str) -> None:
    plain, rich = (make_loss(OwnLoss(use=f"{file}:{name}")) for name in ("reinforce", "clipped"))
    assert [(one.needs_reference, one.needs_entropy, one.needs_zero_advantages) for one in (plain, rich)] == [
        (False, False, True),
        (True, True, False),
    ]
    assert [needs_reference(recipe(f"{file}:{name}")) for name in ("reinforce", "clipped")] == [False, True]
    refuse_without_effect(recipe(f"{file}:clipped", reference={"path": "other"}))
    with pytest.raises(ConfigError, match=r"reference\.path has no effect .*@turnwise\.needs\(reference=True\)"):
        refuse_without_effect(recipe(f"{file}:reinforce", reference={"path": "other"}))
    # a loss of our own knows its terms: without them, tokens with the advantage 0 are not computed
    assert not make_loss(PpoClip()).needs_zero_advantages


def test_the_estimates_of_the_critic_reach_a_loss_that_declares_them(file: str) -> None:
    refuse_without_effect(recipe(f"{file}:towards_values", credit="turn_gae"))
    with pytest.raises(ConfigError, match=r"towards_values declares values .* credit\.name=grpo has no critic"):
        refuse_without_effect(recipe(f"{file}:towards_values", credit="grpo"))
    first, *others = group()
    first.values = [[0.5, 0.25, 0.125], 2.0]
    for one in others:
        one.values = [float(len(one.id)) for _ in one.turns]
    (micro,) = pack([first, *others]).micro_batches
    assert micro.targets.value_N is not None
    of_first = micro.targets.value_N[micro.targets.sequence_N == 0]
    assert of_first.tolist() == [0.5, 0.25, 0.125, 2.0, 2.0]
    assert pack(group()).micro_batches[0].targets.value_N is None


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("reinforce", {"pwer": 2}, "has no argument 'pwer' for a recipe; did you mean 'power'"),
        (
            "reinforce",
            {"power": "two"},
            r"loss\.arguments\.power='two' is not .* takes: input should be a valid number",
        ),
        ("alone", {}, r"alone\(logprob_N\) must take 2 positional arguments \(logprob_N, targets\)"),
        ("of_an_estimator", {}, "declares baseline .*a function for loss can declare reference, entropy, values"),
        (
            "none",
            {},
            "returned None in place of a tensor with a number for each of the 12 tokens.* is a `return` missing",
        ),
        ("mean", {}, r"returned a tensor of shape \[\] in place of .* return no mean or sum: loss\.normalizer"),
        ("squeezed", {}, r"returned a tensor of shape \[\] in place of .* each of the 1 tokens"),
        ("doubled", {}, r"returned a tensor of shape \[24\] in place of .* 12 tokens"),
        ("numbers", {}, "returned list in place of a tensor"),
        ("detached", {}, r"returned a tensor without a gradient: .* not from logprob_N\.detach\(\)"),
        ("nan", {}, "nan returned nan for token 9 of 12; a loss must be a finite number"),
        ("root", {}, r"root has the gradient (inf|nan) for token 0 of 12"),
        (
            "raises",
            {},
            r"raises raised AttributeError: 'Targets' object has no attribute 'nothing'(.|\n)*line \d+, in raises",
        ),
        (
            "imitates",
            {},
            r"imitates declares zero_advantages=False .* advantage 0 have a gradient: remove the declaration",
        ),
    ],
)
def test_what_is_wrong_with_a_function_is_said_before_the_first_step(
    file: str, name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        try_own_loss(OwnLoss(use=f"{file}:{name}", arguments=arguments))


def test_what_goes_wrong_in_a_step_is_an_error_before_the_weights_change(file: str) -> None:
    Path(file).write_text(
        "def late(logprob_N, targets):\n    return logprob_N * (float('nan') if 22 in targets.token_N else 1.0)\n",
        "utf-8",
    )
    options = OwnLoss(use=f"{file}:late")
    try_own_loss(options)
    model = tiny_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learner = LocalLearner(model, sampling=Sampling(), loss=make_loss(options), threads=1)
    with pytest.raises(ConfigError, match="late returned nan for token 0 of"):
        asyncio.run(learner.update([pack(group(), loss=options)], lr=1e-2))
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("whitened", "depends on the other sequences of its micro-batch"),
        ("by_place", "the order of the sequences changes their loss"),
        ("by_number", "other numbers of the sequences change their loss"),
        ("averages", r"other weights \(targets.weight_N\) change the loss"),
        ("of_earlier_calls", "a second call with the same batch gives another loss"),
        ("writes", "it changes the columns that it is given"),
    ],
)
def test_the_doctor_names_the_invariant_that_a_function_breaks(file: str, name: str, broken: str) -> None:
    check = own_loss(recipe(f"{file}:{name}"))
    assert check.status == "fail"
    assert f"{name}: " in check.text
    assert broken.replace("\\", "") in check.text


def test_our_losses_and_functions_that_keep_the_invariants_have_nothing_broken(file: str) -> None:
    ours: list[LossSection] = [cls.model_validate({}) for cls in LOSSES if cls is not OwnLoss]
    ours += [Gspo(level="turn"), PpoClip(dual_clip=1.5)]
    assert [broken_invariants(one) for one in ours] == [[]] * len(ours)
    assert broken_invariants(Reinforce(kl_coef=0.1, entropy_coef=0.1)) == []
    for name in ("reinforce", "clipped", "towards_values"):
        check = own_loss(recipe({"use": f"{file}:{name}"}))
        assert (check.name, check.status) == ("loss", "ok")
