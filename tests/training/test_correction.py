"""Rollout correction against plain loops, against verl's own functions where its sources are, and in the learner."""

from __future__ import annotations

import ast
import asyncio
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.training.background import StopFlag
from turnwise.training.batch import pack
from turnwise.training.correction import correct, correction_weights, kept_tokens
from turnwise.training.local_learner import LocalLearner
from turnwise.training.loss import make_loss
from turnwise.training.options import CorrectionConfig, PpoClip, Rejection
from turnwise.training.policy_update import prepare
from turnwise.training.targets import Targets
from turnwise.types import LogprobKind, Sampling

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
    config = CorrectionConfig(level=level, action=action, low=low, high=1.2)
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
    config = CorrectionConfig(level="geometric", action="mask", high=1.0, weight_level="token")
    expected = [r if s <= 1.0 else 0.0 for r, s in zip(plain_ratios("token"), plain_ratios("geometric"), strict=True)]
    torch.testing.assert_close(correction_weights(targets(), config), torch.tensor(expected))


def test_rejected_tokens_leave_the_average() -> None:
    one = targets()
    config = CorrectionConfig(level="sequence", action="reject", low=None, high=1.0)
    done = correct([one], config)
    (after,), (keep,) = done.targets, done.kept
    assert keep.tolist() == [ratio <= 1.0 for ratio in plain_ratios("sequence")]
    assert float(after.weight_N[keep].sum()) == pytest.approx(1.0)
    unscaled = correct([one], replace(config, rescale=False)).targets[0]
    assert torch.equal(unscaled.weight_N, one.weight_N)
    assert done.sums.metrics()["correction/rejected"] == pytest.approx(float((~keep).float().mean()))


def test_normalized_weights_have_mean_one_over_all_micro_batches() -> None:
    one = targets()
    parts = [one.select(one.sequence_N == 0), one.select(one.sequence_N != 0)]
    for level in ("token", "sequence"):
        config = CorrectionConfig(level=level, action="truncate", normalize_weights=True)  # type: ignore[arg-type]
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
    metrics = correct([one], CorrectionConfig(high=1.2)).sums.metrics()
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
    assert correct(halves, CorrectionConfig(high=1.2)).sums.metrics() == pytest.approx(metrics)


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
    config = CorrectionConfig(level=level, high=1.2, normalize_weights=normalize)
    ours = correct([one], config).targets[0].correction_N
    assert ours is not None
    torch.testing.assert_close(rows(ours), theirs)


@pytest.mark.parametrize(
    ("name", "threshold", "rule"),
    [
        ("token_k1", "0.7_1.25", Rejection(level="token", low=1 / 1.25, high=1 / 0.7)),
        ("token_k2", "0.1", Rejection(level="token", estimator="k2", high=0.1)),
        ("token_k3", "0.1", Rejection(level="token", estimator="k3", high=0.1)),
        ("seq_sum_k1", "0.5_2.5", Rejection(level="sequence", low=1 / 2.5, high=2.0)),
        ("seq_sum_k3", "0.6", Rejection(level="sequence", estimator="k3", high=0.6)),
        ("seq_mean_k1", "0.9_1.2", Rejection(level="geometric", low=1 / 1.2, high=1 / 0.9)),
        ("seq_mean_k2", "0.15", Rejection(level="geometric", estimator="k2", high=0.15)),
        ("seq_max_k3", "0.3", Rejection(level="max", estimator="k3", high=0.3)),
    ],
)
def test_rejection_is_that_of_verl_with_the_bounds_of_the_inverse_ratio(
    name: str, threshold: str, rule: Rejection
) -> None:
    verl, one = verls_functions(), targets()
    assert one.proximal_logprob_N is not None
    log_ratio, mask = rows(one.proximal_logprob_N - one.behaviour_logprob_N), rows(torch.ones(11))
    theirs, _ = verl["compute_rollout_rejection_mask"](log_ratio, mask, name, threshold)
    ours = kept_tokens(one, CorrectionConfig(action="measure", reject=rule))
    assert torch.equal(rows(ours.float()), theirs)
    assert 0 < int(ours.sum()) <= 11


# in the learner


def learner(correction: CorrectionConfig | None) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip(correction=correction)), threads=1)


def test_a_sample_without_log_probabilities_is_counted_and_does_not_switch_the_correction_off() -> None:
    trajectories = group()
    unknown = trajectories[0]
    for turn in unknown.turns:
        assert turn.completion is not None
        turn.completion = replace(turn.completion, logprob_kind=LogprobKind.RAW)
    batch = pack(trajectories)
    one = learner(CorrectionConfig(action="truncate", high=1.0001))
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
    one = learner(CorrectionConfig(action="reject", low=1e-9, high=1e-8))
    before = one.fingerprint()
    update = asyncio.run(one.update([pack(group())], lr=0.1))
    assert (update.tokens, update.loss, update.correction["correction/rejected"]) == (0, 0.0, 1.0)
    assert one.fingerprint() == before


def test_without_a_correction_there_are_no_metrics_of_it() -> None:
    assert asyncio.run(learner(None).update([pack(group())], lr=0.0)).correction == {}


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 10_000])
def test_the_size_of_micro_batches_changes_no_corrected_gradient(micro_batch_tokens: int) -> None:
    reject = Rejection(level="token", low=0.0051, high=5.0)
    config = CorrectionConfig(level="geometric", high=1.5, reject=reject, normalize_weights=True)

    def gradient(size: int, share: bool) -> torch.Tensor:
        one = learner(config)
        prepared = prepare(one, pack(group(), micro_batch_tokens=size, share_prompts=share), StopFlag()).batch
        one.accumulate(prepared.micro_batches, lambda: None, StopFlag())
        return torch.cat([p.grad.flatten() for p in one._optimizer.parameters if p.grad is not None])

    torch.testing.assert_close(gradient(micro_batch_tokens, True), gradient(10_000, False), atol=1e-6, rtol=1e-4)
