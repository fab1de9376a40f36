"""What a step of training learns from: all that its loss depends on, and nothing that is made up."""

from __future__ import annotations

import asyncio
import copy
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from support.tiny import save_rows
from turnwise.engines.engine import Engine
from turnwise.errors import RolloutError
from turnwise.options.schema import Config
from turnwise.terminal.train_report import TrainReport
from turnwise.train import TrainingRun, _warn_of_disagreement, assemble, pack_groups, train
from turnwise.training.learner import UpdateStats
from turnwise.training.update import StopFlag
from turnwise.types import Completion, Failure, Group, LogprobKind, Request

PLACES = Path(__file__).parent / "support" / "places.py"


def assembled(
    model: Path,
    path: Path,
    environment: str,
    loss: Mapping[str, Any] | None = None,
    correction: Mapping[str, Any] | None = None,
    autocast: bool = False,
    **options: Any,
) -> TrainingRun:
    recipe = {
        "model": {"path": str(model), "autocast": autocast},
        "data": {"train": str(save_rows(path / "train.jsonl"))},
        "environment": f"{PLACES}:{environment}",
        "limits": {"turns": 2, "tokens_per_turn": 8},
        "train": {"steps": 2, "batch_size": 3, "group_size": 4, "lr": 0.01, **options},
        "loss": loss or {},
        "correction": correction or {},
        "output": str(path / "run"),
    }
    return assemble(Config.model_validate(recipe))


def learnt(run: TrainingRun) -> None:
    with open(os.devnull, "w") as nowhere:
        asyncio.run(train(run, TrainReport(Console(file=nowhere))))


def held(run: TrainingRun) -> list[Group]:
    """The groups of the first step, scored and with advantages."""

    async def hold() -> list[Group]:
        rollouts = await run.pipeline.take()
        run.credit(rollouts.groups)
        return list(rollouts.groups)

    return asyncio.run(hold())


def moved(run: TrainingRun) -> None:
    """Change the policy, so that it is no longer its reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in run.learner.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def reference_gradient(
    reference: Any, run: TrainingRun, groups: list[Group], *, kl_coef: float, entropy_coef: float
) -> torch.Tensor:
    """The gradient in float64 of divergence and entropy over all sampled tokens, one sequence after the other."""
    model = copy.deepcopy(run.learner.model).double()
    model.set_attn_implementation("eager")
    terms: list[torch.Tensor] = []
    for one in (one for group in groups for one in group.trajectories):
        assert one.advantages == [0.0] * len(one.turns)
        for segment in one.segments:
            ids = torch.tensor([list(segment.token_ids)])
            own_TV = model(ids).logits[0].log_softmax(-1)
            with torch.no_grad():
                other_TV = reference(ids).logits[0].log_softmax(-1)
            for place in (place for place, turn in enumerate(segment.turn) if turn >= 0):
                token = segment.token_ids[place]
                difference = other_TV[place - 1, token] - own_TV[place - 1, token]
                entropy = -(own_TV[place - 1].exp() * own_TV[place - 1]).sum()
                terms.append(kl_coef * (difference.exp() - difference - 1) - entropy_coef * entropy)
    (sum(terms, torch.zeros((), dtype=torch.float64)) / len(terms)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.5, 0.0), (0.0, 0.1), (0.5, 0.1)])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_without_any_advantage_divergence_and_entropy_of_all_tokens_are_learnt_from(
    model: Path, tmp_path: Path, kl_coef: float, entropy_coef: float, minibatches: int
) -> None:
    run = assembled(
        model, tmp_path, "indifferent", {"kl_coef": kl_coef, "entropy_coef": entropy_coef}, minibatches=minibatches
    )
    reference = copy.deepcopy(run.learner.model).double()
    reference.set_attn_implementation("eager")
    moved(run)
    groups = held(run)
    batches = pack_groups(run, groups)
    assert [batch.trajectories for batch in batches] == [12 // minibatches] * minibatches
    part = 0
    for batch in batches:
        run.learner.accumulate(batch.micro_batches, lambda: None, StopFlag())
        gradients = [parameter.grad for parameter in run.learner._optimizer.parameters]
        found = torch.cat([one.flatten() for one in gradients if one is not None])
        every = [one for group in groups for one in group.trajectories][part : part + batch.trajectories]
        part += batch.trajectories
        chosen = [Group(id="chosen", row=groups[0].row, trajectories=every)]
        expected = reference_gradient(reference, run, chosen, kl_coef=kl_coef, entropy_coef=entropy_coef)
        assert expected.norm() > 1e-3
        assert (found.double() - expected).norm() < 1e-4 * expected.norm()


def test_without_any_advantage_and_further_terms_a_group_is_enough(model: Path, tmp_path: Path) -> None:
    run = assembled(model, tmp_path, "indifferent")
    (batch,) = pack_groups(run, held(run))
    assert batch.trajectories == 12
    (group,) = {id.split("/")[0] for sources in batch.sources.values() for id, _ in sources}
    assert group
    update = asyncio.run(run.learner.update([batch], lr=0.01))
    assert update.tokens > 0  # trainer and engine are compared all the same
    assert (update.grad_norm, update.max_deviation < 1e-4) == (0.0, True)


@pytest.mark.parametrize("environment", ["indifferent", "low_bytes"])
@pytest.mark.parametrize(("minibatches", "sizes"), [(5, {2, 3}), (7, {1, 2}), (12, {1}), (1, {12})])
def test_a_step_has_as_many_optimizer_steps_of_nearly_equal_size_as_the_recipe_says(
    model: Path, tmp_path: Path, environment: str, minibatches: int, sizes: set[int]
) -> None:
    run = assembled(model, tmp_path, environment, minibatches=minibatches)
    groups = held(run)
    batches = pack_groups(run, groups)
    assert len(batches) == minibatches
    assert {batch.trajectories for batch in batches} == sizes
    assert sum(batch.trajectories for batch in batches) == 12
    update = asyncio.run(run.learner.update(batches, lr=0.01))
    assert update.steps == minibatches


def test_fewer_conversations_than_minibatches_are_said(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = assembled(model, tmp_path, "low_bytes", minibatches=12)
    groups = held(run)
    groups[0].trajectories[0].fail(Failure("environment", "it broke"))
    assert len(pack_groups(run, groups)) == 11
    assert "train.minibatches=12, and only 11 conversations can be trained on" in caplog.text


def test_rejection_sees_the_conversations_without_advantage(model: Path, tmp_path: Path) -> None:
    correction = {"action": "reject", "level": "sequence", "high": 2.0}
    run = assembled(model, tmp_path, "low_bytes", max_staleness=1, correction=correction)
    groups = held(run)
    for one in groups[1].trajectories:
        one.advantages = [0.0] * len(one.turns)
        for segment in one.segments:
            place = next(place for place, turn in enumerate(segment.turn) if turn >= 0)
            segment.logprobs[place] -= math.log(3.0)
    for one in groups[2].trajectories:
        one.advantages = [0.0] * len(one.turns)
    update = asyncio.run(run.learner.update(pack_groups(run, groups), lr=0.0))
    rejected = sum(turn >= 0 for one in groups[1].trajectories for s in one.segments for turn in s.turn)
    every = sum(turn >= 0 for group in groups for one in group.trajectories for s in one.segments for turn in s.turn)
    assert update.correction["correction/rejected"] == pytest.approx(rejected / every)
    assert update.correction["correction/k1"] == pytest.approx(-4 * math.log(3.0) / every, rel=1e-3)


@pytest.mark.parametrize(
    ("autocast", "largest", "deviation", "warned"),
    [
        (False, 5.0, 0.02, True),  # float32: no rounding explains it
        (True, 5.0, 0.4, False),
        (True, 5.0, 0.6, True),
        (True, 36.0, 0.6, False),  # steps of 0.25 on both sides
        (True, 36.0, 0.8, True),
    ],
)
def test_the_alarm_for_other_tokens_depends_on_how_far_the_logits_are_rounded(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    autocast: bool,
    largest: float,
    deviation: float,
    warned: bool,
) -> None:
    run = assembled(model, tmp_path, "indifferent", autocast=autocast)
    groups = held(run)
    ids = [*max((turn.completion.token_ids for g in groups for t in g.trajectories for turn in t.turns), key=len)]
    with torch.no_grad():
        head = run.learner.model.get_output_embeddings()
        body = run.learner.model.model
        present = float(head(body(torch.tensor([ids]))[0]).abs().amax())
        assert run.learner.largest_logit(ids) == pytest.approx(present)
        body.norm.weight.mul_(largest / present)
    _warn_of_disagreement(run, UpdateStats(fresh_deviation=deviation), groups)
    assert ("trainer and engine disagree" in caplog.text) is warned


class Unknown:
    """An engine that reports no log-probabilities."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: Request) -> Completion:
        completion = await self._engine.generate(request)
        return replace(completion, logprobs=[0.0] * len(completion.logprobs), logprob_kind=LogprobKind.NONE)

    def release(self, conversation: str) -> None:
        self._engine.release(conversation)

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        await self._engine.load_weights(version, weights)

    async def close(self) -> None:
        await self._engine.close()


def test_an_engine_without_log_probabilities_trains_as_one_with_them(model: Path, tmp_path: Path) -> None:
    weights = []
    for name in ("known", "unknown"):
        (tmp_path / name).mkdir()
        run = assembled(model, tmp_path / name, "low_bytes", ppo_epochs=2)
        if name == "unknown":
            run.pipeline.context = replace(run.context, engine=Unknown(run.context.engine))
        learnt(run)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in run.learner.model.parameters()]))
    start = torch.cat([parameter.detach().flatten() for parameter in assembled_model(model).parameters()])
    assert (weights[0] - start).abs().max() > 1e-3
    # Adam divides by the gradient's size, so rounding shows most where the gradient is almost nothing
    torch.testing.assert_close(weights[1], weights[0], atol=5e-3, rtol=0)


def assembled_model(path: Path) -> Any:
    from turnwise.models.loading import ModelOptions, load_model

    return load_model(ModelOptions(path=path, dtype="float32", device="cpu"))


def test_an_engine_without_log_probabilities_cannot_be_behind(model: Path, tmp_path: Path) -> None:
    run = assembled(model, tmp_path, "low_bytes", max_staleness=1)
    run.pipeline.context = replace(run.context, engine=Unknown(run.context.engine))
    with pytest.raises(
        RolloutError, match=r"of step 2 failed.*\n.*engine.*was sampled by weights of version 0.*'none'"
    ):
        learnt(run)
    assert run.step == 1
