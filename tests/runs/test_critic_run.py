"""Runs with a critic: values before credit, an update in each step, a checkpoint of the critic, and options that take effect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support.recipes import save_recipe
from support.tiny import save_model
from test_train import PLACES, lines, run, timeless
from turnwise.config.recipe import checked
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError, RunError

ESTIMATORS = ("gae", "turn_gae", "critic", "bilevel_gae")
NAMES = {f"critic/{name}" for name in ("loss", "explained_variance", "clip_fraction", "grad_norm", "value_mean")}


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        credit={"name": "turn_gae"},
        critic={"lr": 0.01},
        train={"steps": 4, "batch_size": 2, "group_size": 4, "lr": 0.01},
        deterministic=True,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    "name", [ESTIMATORS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ESTIMATORS[1:])]
)
def test_a_run_with_each_estimator_trains_policy_and_critic(recipe: Path, tmp_path: Path, name: str) -> None:
    sizes = ("train.steps=14", "train.minibatches=2", "train.batch_size=4", "train.group_size=8")
    run(recipe, f"credit.name={name}", *sizes, "critic.lr=0.003")
    steps = metrics(tmp_path / "run")
    for line in steps:
        assert line.keys() >= NAMES
        assert all(math.isfinite(line[metric]) for metric in NAMES)
        assert line["grad_norm"] > 0
        assert line["critic/grad_norm"] > 0
    assert steps[0]["critic/value_mean"] == 0.0  # a new critic estimates 0
    assert steps[0]["critic/explained_variance"] == 0.0
    rewards, estimates = ([line[metric] for line in steps] for metric in ("reward/mean", "critic/value_mean"))
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4
    assert estimates[-1] > 0.3  # the estimates follow the rewards
    recorded = lines(tmp_path / "run" / "trajectories.jsonl")[-1]
    entry = recorded["turns"][0]["value"]
    assert isinstance(entry, list) == (name in ("gae", "bilevel_gae"))


def test_a_resumed_run_is_bit_identical(recipe: Path, tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = ("train.minibatches=2", "train.ppo_epochs=2", "critic.clip=0.1")
    run(recipe, *options, f"output={straight}")
    run(recipe, *options, "train.steps=2", f"output={parts}")
    run(recipe, *options, "resume=auto", f"output={parts}")
    assert timeless(metrics(parts)) == timeless(metrics(straight))
    assert max(line["critic/clip_fraction"] for line in metrics(straight)) > 0
    for file in ("model.safetensors", "value_head.safetensors"):
        own, theirs = (load_file(folder / "checkpoint" / ".." / "critic" / file) for folder in (straight, parts))
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[name], theirs[name]) for name in own)


def test_a_resumed_run_with_adapters_is_bit_identical(recipe: Path, tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = ("model.lora.rank=4", "model.lora.alpha=8", "credit.name=gae")
    made = run(recipe, *options, f"output={straight}")
    run(recipe, *options, "train.steps=2", f"output={parts}")
    run(recipe, *options, "resume=auto", f"output={parts}")
    assert timeless(metrics(parts)) == timeless(metrics(straight))
    assert metrics(straight)[-1]["critic/value_mean"] != 0.0
    folder = straight / "checkpoints" / "step-000004" / "critic"
    assert (folder / "adapter_model.safetensors").is_file()
    assert not list(folder.glob("model*.safetensors"))
    critic: Any = made.critic
    base = {id(parameter) for parameter in made.learner.model.parameters() if not parameter.requires_grad}  # type: ignore[attr-defined]
    assert base == {id(parameter) for parameter in critic._model.parameters() if not parameter.requires_grad}


def test_a_resumed_run_with_an_adapter_refuses_another_base_model_of_its_critic(recipe: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=7)
    options = ("model.lora.rank=4", f"critic.path={other}")
    run(recipe, *options, "train.steps=2")
    run(recipe, *options, "train.steps=3", "resume=auto")
    save_model(other, seed=8)
    with pytest.raises(RunError, match=r"the weights in critic\.path=.*changed since the run.*restore them"):
        run(recipe, *options, "resume=auto")


def test_the_policy_waits_while_the_critic_warms_up(recipe: Path, model: Path, tmp_path: Path) -> None:
    run(recipe, "critic.warmup_steps=2", "train.steps=3", "checkpoint.every=1", "checkpoint.keep=3")
    steps = metrics(tmp_path / "run")
    for name in ("loss", "kl", "grad_norm", "ratio/max_deviation", "ratio/clip_fraction"):
        assert [line[name] is None for line in steps] == [True, True, False]
    assert [line["tokens/trained"] for line in steps[:2]] == [0, 0]
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    start = load_file(model / "model.safetensors")
    for step, unchanged in ((2, True), (3, False)):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        now = load_file(folder / "model" / "model.safetensors")
        assert all(torch.equal(now[name], start[name]) for name in start) is unchanged
        of_critic = load_file(folder / "critic" / "model.safetensors")
        assert not all(torch.equal(of_critic[name], start[name]) for name in start)


def test_the_critic_starts_from_another_model_or_from_the_critic_of_a_run(recipe: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=7)
    run(recipe, f"critic.path={other}", "train.steps=1", "critic.lr=1e-9", f"output={tmp_path / 'first'}")
    saved = tmp_path / "first" / "checkpoints" / "step-000001" / "critic"
    found, expected = load_file(saved / "model.safetensors"), load_file(other / "model.safetensors")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-7, rtol=0)

    run(recipe, "train.steps=3", f"output={tmp_path / 'second'}")
    trained = tmp_path / "second" / "checkpoints" / "step-000003" / "critic"
    run(recipe, f"critic.path={trained}", "train.steps=1", f"output={tmp_path / 'third'}")
    assert metrics(tmp_path / "second")[0]["critic/value_mean"] == 0.0
    assert metrics(tmp_path / "third")[0]["critic/value_mean"] != 0.0


def test_options_of_the_critic_change_what_is_learnt(recipe: Path, tmp_path: Path) -> None:
    steps = ("train.steps=2", "train.ppo_epochs=3", "critic.clip=0.01")
    seen: dict[str, Any] = {}
    for number, options in enumerate(((), ("critic.lr=0.001",), ("critic.clip=null",))):
        folder = tmp_path / str(number)
        run(recipe, *steps, *options, f"output={folder}")
        seen[str(options)] = metrics(folder)[1]["critic/value_mean"]
    assert len(set(seen.values())) == 3


def test_failed_and_masked_conversations_are_no_targets(recipe: Path, tmp_path: Path) -> None:
    run(recipe, f"environment={PLACES}:raises_now_and_then", "train.batch_size=4", "train.steps=2", "limits.turns=1")
    recorded = lines(tmp_path / "run" / "trajectories.jsonl")
    broken = [line for line in recorded if line["error"]]
    assert broken
    assert all("value" not in turn for line in broken for turn in line["turns"])
    assert all(line["critic/grad_norm"] > 0 for line in metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit": {"name": "grpo"}}, r"critic\.lr has no effect with credit\.name=grpo, which needs no critic"),
        ({"credit": {}}, r"critic\.lr has no effect with credit\.name=turn_return"),
        ({"critic": {"clip": 0.1}}, r"critic\.clip has no effect with one optimizer step a batch"),
        ({"critic": {"warmup_steps": 4}}, r"critic\.warmup_steps=4 must be less than train\.steps=4"),
    ],
)
def test_options_without_effect_are_refused(recipe: Path, options: dict[str, Any], message: str) -> None:
    tree = {**yaml.safe_load(recipe.read_text()), **options}
    with pytest.raises(ConfigError, match=message):
        refuse_without_effect(checked(tree, source="recipe"))
