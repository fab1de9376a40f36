"""`loss: file.py:function`: a loss of the user, its arguments, what it declares, what it may return, and what it must keep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.config.recipe import checked, load
from turnwise.config.resume_rules import RULES
from turnwise.config.train_checks import needs_reference, refuse_without_effect
from turnwise.doctor.recipe import own_loss
from turnwise.errors import ConfigError
from turnwise.options.algorithm import LOSSES, Gspo, LossSection, OwnLoss, PpoClip, Reinforce
from turnwise.options.schema import Config
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.own_loss import broken_invariants, try_own_loss
from turnwise.training.update import StopFlag
from turnwise.types import Sampling

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
