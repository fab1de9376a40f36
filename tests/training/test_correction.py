"""Rollout correction, and tokens selected by entropy or covariance, against plain loops, verl's own functions and float64."""

from __future__ import annotations

import ast
import asyncio
import copy
import math
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group, trajectory
from turnwise.options.algorithm import (
    CorrectionSection,
    Gspo,
    LossSection,
    OptimizationSection,
    PpoClip,
    Reinforce,
    RejectionSection,
)
from turnwise.training.batch import Batch, pack
from turnwise.training.correction import correct, correction_weights, kept_tokens
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import Targets, make_loss
from turnwise.training.own_loss import example as own_example
from turnwise.training.selection import MeasuredTokens, select_tokens, top_share
from turnwise.training.update import PreparedBatch, StopFlag, prepare, prepare_all
from turnwise.types import LogprobKind, Sampling, Trajectory

LENGTHS = [4, 2, 5]
VERL = Path("/work/.mirror/volcengine+verl/repo")


def targets(scale: float = 0.6) -> Targets:
    generator = torch.Generator().manual_seed(3)
    count = sum(LENGTHS)
    behaviour = -torch.rand(count, generator=generator) - 0.5
    return Targets(
        token_N=torch.zeros(count, dtype=torch.int64),
        sequence_N=torch.tensor([7 * s for s, n in enumerate(LENGTHS) for _ in range(n)]),
        turn_N=torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 2, 2]),
        version_N=torch.zeros(count, dtype=torch.int64),
        behaviour_logprob_N=behaviour,
        known_N=torch.ones(count, dtype=torch.bool),
        proximal_logprob_N=behaviour + scale * torch.randn(count, generator=generator),
        advantage_N=torch.ones(count),
        weight_N=torch.full((count,), 1 / count),
    )


def by_sequence(values: list[float]) -> list[list[float]]:
    rest = iter(values)
    return [[next(rest) for _ in range(n)] for n in LENGTHS]


def plain_ratios(level: str) -> list[float]:
    one = targets()
    assert one.proximal_logprob_N is not None
    logs = by_sequence((one.proximal_logprob_N - one.behaviour_logprob_N).tolist())
    value = {
        "token": lambda sequence, log: log,
        "sequence": lambda sequence, log: sum(sequence),
        "geometric": lambda sequence, log: sum(sequence) / len(sequence),
    }[level]
    return [math.exp(value(sequence, log)) for sequence in logs for log in sequence]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["truncate", "mask", "icepop", "reject", "measure"])
def test_weights_are_those_of_the_formulas(level: Any, action: Any) -> None:
    low = 0.5 if action in ("icepop", "reject") else None
    # a recipe with `measure` has no bounds: they would change nothing
    bounds = {} if action == "measure" else {"level": level, "low": low, "high": 1.2}
    config = CorrectionSection(action=action, **bounds)
    ratios = plain_ratios(level)
    inside = [(low is None or ratio >= low) and ratio <= 1.2 for ratio in ratios]
    expected = {
        "truncate": [min(ratio, 1.2) for ratio in ratios],
        "mask": [ratio * ok for ratio, ok in zip(ratios, inside, strict=True)],
        "icepop": [ratio * ok for ratio, ok in zip(ratios, inside, strict=True)],
        "reject": [1.0] * len(ratios),
        "measure": [1.0] * len(ratios),
    }[action]
    torch.testing.assert_close(correction_weights(targets(), config), torch.tensor(expected))
    assert kept_tokens(targets(), config).tolist() == (inside if action == "reject" else [True] * len(ratios))
    assert 0 < sum(inside) < len(inside)


def test_ms_swifts_sequence_mask_keeps_the_ratios_of_tokens() -> None:
    config = CorrectionSection(level="geometric", action="mask", high=1.0, weight_level="token")
    expected = [r if s <= 1.0 else 0.0 for r, s in zip(plain_ratios("token"), plain_ratios("geometric"), strict=True)]
    torch.testing.assert_close(correction_weights(targets(), config), torch.tensor(expected))


def test_rejected_tokens_leave_the_average() -> None:
    one = targets()
    config = CorrectionSection(level="sequence", action="reject", low=None, high=1.0)
    done = correct([one], config)
    (after,), (keep,) = done.targets, done.kept
    assert keep.tolist() == [ratio <= 1.0 for ratio in plain_ratios("sequence")]
    assert float(after.weight_N[keep].sum()) == pytest.approx(1.0)
    unscaled = correct([one], config, rescale=False).targets[0]
    assert torch.equal(unscaled.weight_N, one.weight_N)
    assert done.sums.metrics()["correction/rejected"] == pytest.approx(float((~keep).float().mean()))


def test_normalized_weights_have_mean_one_over_all_micro_batches() -> None:
    one = targets()
    parts = [one.select(one.sequence_N == 0), one.select(one.sequence_N != 0)]
    for level in ("token", "sequence"):
        config = CorrectionSection(level=level, action="truncate", normalize_weights=True)  # type: ignore[arg-type]
        together = correct([one], config).targets[0].correction_N
        apart = torch.cat(
            [micro.correction_N for micro in correct(parts, config).targets if micro.correction_N is not None]
        )
        assert together is not None
        torch.testing.assert_close(together, apart)
        firsts = together if level == "token" else together[[0, 4, 6]]
        assert float(firsts.mean()) == pytest.approx(1.0, abs=1e-6)


def test_metrics_are_sums_over_tokens_sequences_and_turns() -> None:
    one, ratios = targets(), plain_ratios("token")
    metrics = correct([one], CorrectionSection(action="truncate", high=1.2)).sums.metrics()
    logs = [math.log(ratio) for ratio in ratios]
    weights = [min(ratio, 1.2) for ratio in ratios]
    sums = [sum(sequence) for sequence in by_sequence(logs)]
    mean = sum(weights) / 11
    assert metrics == pytest.approx(
        {
            "correction/k1": -sum(logs) / 11,
            "correction/k3": sum(r - 1 - log for r, log in zip(ratios, logs, strict=True)) / 11,
            "correction/ppl_ratio": sum(math.exp(-s / n) for s, n in zip(sums, LENGTHS, strict=True)) / 3,
            "correction/chi2_token": sum(r * r for r in ratios) / 11 - 1,
            "correction/chi2_sequence": sum(math.exp(2 * s) for s in sums) / 3 - 1,
            "correction/weight": mean,
            "correction/ess": mean**2 / (sum(w * w for w in weights) / 11),
            "correction/clip_fraction": sum(r > 1.2 for r in ratios) / 11,
            "correction/rejected": 0.0,
            "correction/unknown": 0.0,
            **{
                f"correction/{name}/turn_{turn}": sum(values[i] for i in places) / len(places)
                for turn, places in ((0, [0, 1, 4, 5, 6]), (1, [2, 3, 7, 8]), (2, [9, 10]))
                for name, values in (
                    ("k1", [-log for log in logs]),
                    ("k3", [r - 1 - log for r, log in zip(ratios, logs, strict=True)]),
                )
            },
        },
        rel=1e-4,
    )
    halves = [one.select(one.sequence_N == 0), one.select(one.sequence_N != 0)]
    assert correct(halves, CorrectionSection(action="truncate", high=1.2)).sums.metrics() == pytest.approx(metrics)


def verls_functions() -> dict[str, Any]:
    """verl's own functions, without the parts of verl that they import."""
    if not VERL.exists():
        pytest.skip("needs the sources of verl")
    path = "HEAD:verl/trainer/ppo/rollout_corr_helper.py"
    source = subprocess.run(
        ["git", f"--git-dir={VERL}", "show", path], capture_output=True, text=True, check=True
    ).stdout
    tree = ast.parse(source)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Import | ast.ImportFrom) and "verl" in ast.unparse(node))
        and not (isinstance(node, ast.FunctionDef) and "DataProto" in ast.unparse(node))
    ]

    class Functional:
        @staticmethod
        def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
            return (values * mask).sum() if axis is None else (values * mask).sum(axis)

        @staticmethod
        def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
            total = (values * mask).sum() if axis is None else (values * mask).sum(axis)
            return total / ((mask.sum() if axis is None else mask.sum(axis)) + 1e-8)

    names: dict[str, Any] = {"verl_F": Functional}
    exec(compile(tree, "rollout_corr_helper.py", "exec"), names)
    return names


def rows(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_those_of_verl(level: Any, normalize: bool) -> None:
    verl, one = verls_functions(), targets()
    assert one.proximal_logprob_N is not None
    log_ratio, mask = rows(one.proximal_logprob_N - one.behaviour_logprob_N), rows(torch.ones(11))
    theirs, _ = verl["compute_rollout_correction_weights"](log_ratio, mask, level, 1.2, normalize)
    config = CorrectionSection(action="truncate", level=level, high=1.2, normalize_weights=normalize)
    ours = correct([one], config).targets[0].correction_N
    assert ours is not None
    torch.testing.assert_close(rows(ours), theirs)


@pytest.mark.parametrize(
    ("name", "threshold", "rule"),
    [
        ("token_k1", "0.7_1.25", RejectionSection(level="token", low=1 / 1.25, high=1 / 0.7)),
        ("token_k2", "0.1", RejectionSection(level="token", estimator="k2", high=0.1)),
        ("token_k3", "0.1", RejectionSection(level="token", estimator="k3", high=0.1)),
        ("seq_sum_k1", "0.5_2.5", RejectionSection(level="sequence", low=1 / 2.5, high=2.0)),
        ("seq_sum_k3", "0.6", RejectionSection(level="sequence", estimator="k3", high=0.6)),
        ("seq_mean_k1", "0.9_1.2", RejectionSection(level="geometric", low=1 / 1.2, high=1 / 0.9)),
        ("seq_mean_k2", "0.15", RejectionSection(level="geometric", estimator="k2", high=0.15)),
        ("seq_max_k3", "0.3", RejectionSection(level="max", estimator="k3", high=0.3)),
    ],
)
def test_rejection_is_that_of_verl_with_the_bounds_of_the_inverse_ratio(
    name: str, threshold: str, rule: RejectionSection
) -> None:
    verl, one = verls_functions(), targets()
    assert one.proximal_logprob_N is not None
    log_ratio, mask = rows(one.proximal_logprob_N - one.behaviour_logprob_N), rows(torch.ones(11))
    theirs, _ = verl["compute_rollout_rejection_mask"](log_ratio, mask, name, threshold)
    ours = kept_tokens(one, CorrectionSection(action="measure", reject=rule))
    assert torch.equal(rows(ours.float()), theirs)
    assert 0 < int(ours.sum()) <= 11


# in the learner


def learner(correction: CorrectionSection) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip(), correction), threads=1)


def test_a_sample_without_log_probabilities_is_counted_and_does_not_switch_the_correction_off() -> None:
    trajectories = group()
    unknown = trajectories[0]
    for turn in unknown.turns:
        assert turn.completion is not None
        turn.completion = replace(turn.completion, logprob_kind=LogprobKind.RAW)
    batch = pack(trajectories)
    one = learner(CorrectionSection(action="truncate", high=1.0001))
    prepared = prepare(one, batch, StopFlag()).batch
    micros = [micro.targets for micro in prepared.micro_batches]
    weight = torch.cat([micro.correction_N for micro in micros if micro.correction_N is not None])
    known = torch.cat([micro.known_N for micro in micros])
    assert 0 < int(known.sum()) < len(known)
    assert torch.equal(weight[~known], torch.ones(int((~known).sum())))  # the trainer's own: the ratio is 1
    assert bool((weight[known] < 0.999).any())  # the others are corrected
    update = asyncio.run(one.update([batch], lr=0.0))
    assert update.correction["correction/unknown"] == pytest.approx(float((~known).float().mean()))
    assert update.correction["correction/k3"] > 0


def test_a_batch_of_which_all_is_rejected_changes_nothing() -> None:
    one = learner(CorrectionSection(action="reject", low=1e-9, high=1e-8))
    before = one.fingerprint()
    update = asyncio.run(one.update([pack(group())], lr=0.1))
    assert (update.tokens, update.loss, update.correction["correction/rejected"]) == (0, 0.0, 1.0)
    assert one.fingerprint() == before


def test_without_a_correction_there_are_no_metrics_of_it() -> None:
    assert asyncio.run(learner(CorrectionSection()).update([pack(group())], lr=0.0)).correction == {}


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 10_000])
def test_the_size_of_micro_batches_changes_no_corrected_gradient(micro_batch_tokens: int) -> None:
    reject = RejectionSection(level="token", low=0.0051, high=5.0)
    config = CorrectionSection(action="truncate", level="geometric", high=1.5, reject=reject, normalize_weights=True)

    def gradient(size: int, share: bool) -> torch.Tensor:
        one = learner(config)
        prepared = prepare(one, pack(group(), micro_batch_tokens=size, share_prompts=share), StopFlag()).batch
        one.accumulate(prepared.micro_batches, lambda: None, StopFlag())
        return torch.cat([p.grad.flatten() for p in one._optimizer.parameters if p.grad is not None])

    torch.testing.assert_close(gradient(micro_batch_tokens, True), gradient(10_000, False), atol=1e-6, rtol=1e-4)


# equal conversations, and conversations whose advantages are all zero

SPOKEN = {"two": [12, 13], "four": [8, 9, 10, 11], "three": [14, 15, 16]}


def spoken(one: LocalLearner, name: str, words: str, ratio: float, advantage: float, group: str = "g") -> Trajectory:
    """A conversation of one turn, whose tokens the engine gave 1 / ratio times the learner's probability."""
    made = trajectory(name, [("context", [5, 6, 7]), ("turn", SPOKEN[words])], [advantage], group=group)
    own_V = one.model(torch.tensor([[5, 6, 7, *SPOKEN[words]]])).logits[0].detach().double().log_softmax(-1)
    for place, token in enumerate(SPOKEN[words]):
        made.segments[0].logprobs[3 + place] = float(own_V[2 + place, token]) - math.log(ratio)
    return made


def float64_gradient(one: LocalLearner, weighted: list[tuple[str, float]]) -> torch.Tensor:
    """The gradient of `-sum(weight * log p)` over the tokens of each text, one text after the other."""
    model = copy.deepcopy(one.model).double()
    model.set_attn_implementation("eager")
    for words, weight in weighted:
        own_LV = model(torch.tensor([[5, 6, 7, *SPOKEN[words]]])).logits[0].log_softmax(-1)
        (-weight * sum(own_LV[2 + place, token] for place, token in enumerate(SPOKEN[words]))).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def corrected_batch(one: LocalLearner, trajectories: list[Trajectory]) -> PreparedBatch:
    required = one.requirements
    batch = pack(trajectories, keep_zero=required.keep_zero, measure_zero=required.measure_zero)
    return prepare(one, batch, StopFlag())


def gradient_of(one: LocalLearner, prepared: PreparedBatch) -> torch.Tensor:
    one.accumulate(prepared.batch.micro_batches, lambda: None, StopFlag())
    return torch.cat([p.grad.flatten() for p in one._optimizer.parameters if p.grad is not None]).double()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalized_weights_count_equal_conversations_as_often_as_they_occur(level: Any) -> None:
    one = learner(CorrectionSection(level=level, action="truncate", high=4.0, normalize_weights=True))
    made = [spoken(one, "a", "two", 1.8, 1.0), spoken(one, "b", "two", 1.8, 1.0), spoken(one, "c", "four", 1.0, -0.5)]
    prepared = corrected_batch(one, made)
    (micro,) = prepared.batch.micro_batches
    assert micro.targets.correction_N is not None
    assert len(micro.targets.token_N) == 6  # a and b are one sequence
    assert float((micro.targets.weight_N * micro.targets.correction_N).sum()) == pytest.approx(
        1.0 if level == "token" else (2 * 2 * W2[level] + 4) / 8 / ((2 * W2[level] + 1) / 3), rel=1e-5
    )
    # float64: each token of the 8 has the share 1 / 8; weights are divided by their mean over tokens or conversations
    weight = W2[level]
    mean = (4 * weight + 4) / 8 if level == "token" else (2 * weight + 1) / 3
    expected = float64_gradient(
        one, [("two", 1.0 * weight / mean / 8), ("two", 1.0 * weight / mean / 8), ("four", -0.5 / mean / 8)]
    )
    torch.testing.assert_close(gradient_of(one, prepared), expected, atol=1e-6, rtol=1e-4)


W2 = {"token": 1.8, "sequence": 1.8**2, "geometric": 1.8}
"""The weight of a conversation of two tokens of ratio 1.8."""


def test_metrics_count_equal_conversations_as_often_as_they_occur() -> None:
    one = learner(CorrectionSection(action="truncate", high=1.5))
    made = [spoken(one, "a", "two", 1.8, 1.0), spoken(one, "b", "two", 1.8, 1.0), spoken(one, "c", "four", 1.0, -0.5)]
    metrics = corrected_batch(one, made).correction.metrics()
    apart = corrected_batch(one, [replace(t, group=t.id) for t in made]).correction.metrics()
    assert metrics == pytest.approx(apart, rel=1e-9)
    log = math.log(1.8)
    assert metrics["correction/k1"] == pytest.approx(-4 * log / 8, rel=1e-5)
    assert metrics["correction/k3/turn_0"] == pytest.approx(4 * (0.8 - log) / 8, rel=1e-4)
    assert metrics["correction/clip_fraction"] == 0.5
    assert metrics["correction/ppl_ratio"] == pytest.approx((2 / 1.8 + 1) / 3, rel=1e-5)
    assert metrics["correction/chi2_sequence"] == pytest.approx((2 * 1.8**4 + 1) / 3 - 1, rel=1e-5)
    assert metrics["correction/weight"] == pytest.approx((4 * 1.5 + 4) / 8, rel=1e-5)
    assert metrics["correction/ess"] == pytest.approx((4 * 1.5 + 4) ** 2 / (8 * (4 * 1.5**2 + 4)), rel=1e-5)


def test_clipping_counts_equal_conversations_as_often_as_they_occur() -> None:
    one = learner(CorrectionSection())
    made = [spoken(one, "a", "two", 1.8, 1.0), spoken(one, "b", "two", 1.8, 1.0), spoken(one, "c", "four", 1.0, -0.5)]
    update = asyncio.run(one.update([pack(made)], lr=0.0))
    assert (update.clip_fraction, update.tokens) == (0.5, 6)


@pytest.mark.parametrize("kl_coef", [0.0, 1e-6])
def test_conversations_without_advantage_are_rejected_and_measured_like_all_others(kl_coef: float) -> None:
    correction = CorrectionSection(level="sequence", action="reject", low=None, high=2.0)
    loss = make_loss(PpoClip(kl_coef=kl_coef), correction)
    one = LocalLearner(tiny_model(), sampling=Sampling(), loss=loss, threads=1)
    made = [
        spoken(one, "a", "two", 1.0, 1.0),
        spoken(one, "b", "three", 1.0, -1.0),
        *(spoken(one, name, words, 3.0, 0.0, "h") for name, words in (("c", "two"), ("d", "three"))),
    ]
    prepared = corrected_batch(one, made)
    metrics = prepared.correction.metrics()
    assert metrics["correction/rejected"] == 0.5
    assert metrics["correction/k1"] == pytest.approx(-math.log(3.0) / 2, rel=1e-5)
    assert metrics["correction/k3"] == pytest.approx((3.0 - 1 - math.log(3.0)) / 2, rel=1e-5)
    trained = [micro.targets for micro in prepared.batch.micro_batches]
    assert sorted(w for micro in trained for w in micro.weight_N.tolist()) == pytest.approx([0.2] * 5)
    if not kl_coef:
        expected = float64_gradient(one, [("two", 0.2), ("three", -0.2)])
        torch.testing.assert_close(gradient_of(one, prepared), expected, atol=1e-6, rtol=1e-4)
    batch = pack(made, keep_zero=one.requirements.keep_zero, measure_zero=one.requirements.measure_zero)
    (logprobs,) = asyncio.run(one.update([batch], lr=0.0)).logprobs
    known = {id: values.tolist() for number, values in logprobs.items() for id, _ in batch.sources[number]}
    for name in "abcd":
        ratio = 1.0 if name in "ab" else 3.0
        segment = next(t for t in made if t.id == name).segments[0]
        assert known[name] == pytest.approx([value + math.log(ratio) for value in segment.logprobs[3:]], abs=1e-5)


def test_conversations_without_advantage_are_in_the_mean_of_the_weights() -> None:
    one = learner(CorrectionSection(action="truncate", high=4.0, normalize_weights=True))
    made = [spoken(one, "a", "two", 1.0, 1.0), spoken(one, "b", "two", 3.0, 0.0, "h")]
    (micro,) = corrected_batch(one, made).batch.micro_batches
    assert micro.targets.correction_N is not None
    assert micro.targets.correction_N.tolist() == pytest.approx([0.5, 0.5], rel=1e-5)  # 1 / mean of 1 and 3
    assert micro.targets.weight_N.tolist() == [0.25, 0.25]


def test_without_correction_conversations_without_advantage_are_in_no_pass() -> None:
    one = learner(CorrectionSection())
    made = [spoken(one, "a", "two", 1.0, 1.0), spoken(one, "b", "two", 3.0, 0.0, "h")]
    batch = corrected_batch(one, made).batch
    assert (batch.without_gradient, len(batch.micro_batches)) == ([], 1)


# Tokens that are selected by entropy or covariance: against plain loops and float64 sequences, however they are
# packed


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


def learner_selection(options: LossSection, **more: Any) -> LocalLearner:
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
    one = learner_selection(options)
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
    one = learner_selection(PpoClip(**BETWEEN))
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
    one = learner_selection(PpoClip(clip_cov_ratio=0.9, clip_cov_low=0.05, clip_cov_high=3.0))
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
    one = learner_selection(EACH[name])
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
    one = learner_selection(EACH[name])
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
    one = learner_selection(PpoClip(top_entropy_quantile=0.5), correction=correction)
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
    plain, chosen = (
        learner_selection(Reinforce(entropy_coef=0.1, top_entropy_quantile=quantile)) for quantile in (1.0, 0.2)
    )
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
    one = learner_selection(PpoClip())
    update = asyncio.run(one.update([packed(one, conversations())], lr=0.0))
    assert update.selection == {}
    assert not one.requirements.measure_zero
