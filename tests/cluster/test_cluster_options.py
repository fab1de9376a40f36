"""Options of the section cluster: how they are written, what they reach, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recipes import save_recipe
from turnwise.assembly.learners import rank_options, sharding_options
from turnwise.config.recipe import load
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.training.options import RankOptions, ShardingOptions


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return save_recipe(tmp_path, tmp_path / "model", cluster="torchrun")


def test_a_text_is_the_launcher(recipe: Path) -> None:
    assert load(recipe)[0].cluster.launcher == "torchrun"
    local = load(recipe, ["cluster=local", "cluster.trainers=3"])[0].cluster
    assert (local.launcher, local.trainers) == ("local", 3)
    assert load(recipe, ["cluster.heartbeat=5"])[0].cluster.launcher == "torchrun"
    with pytest.raises(ConfigError, match=r"cluster\.launcher"):
        load(recipe, ["cluster=slurm"])


def test_options_of_the_recipe_reach_the_ranks(recipe: Path) -> None:
    changed = ["cluster.backend=gloo", "cluster.timeout=7", "cluster.heartbeat=3", "model.device=cpu"]
    fsdp = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "reshard_after_forward": "false"}
    fsdp |= {"gradient_sync": "batch", "offload": "cpu"}
    config, _ = load(recipe, [*changed, *(f"cluster.fsdp.{name}={value}" for name, value in fsdp.items())])
    assert rank_options(config) == RankOptions(backend="gloo", device="cpu", timeout=7, heartbeat=3)
    assert sharding_options(config.cluster) == ShardingOptions(
        param_dtype="bfloat16",
        reduce_dtype="bfloat16",
        reshard_after_forward=False,
        gradient_sync="batch",
        offload=True,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.launcher=none", "cluster.timeout=5"], "cluster.timeout has no effect in one process"),
        (["cluster.launcher=none", "cluster.fsdp.offload=cpu"], "cluster.fsdp.offload has no effect in one process"),
        (["cluster.trainers=2"], "cluster.trainers has no effect with cluster.launcher=torchrun"),
        (["cluster.restarts=2"], "cluster.restarts has no effect with cluster.launcher=torchrun"),
        (["cluster.fsdp.param_dtype=bfloat16", "model.dtype=bfloat16"], "has no effect with model.dtype=bfloat16"),
        (["cluster.fsdp.param_dtype=bfloat16", "model.autocast=true"], "both compute passes in bfloat16"),
        (["cluster.fsdp.offload=cpu", "model.device=cpu"], "cluster.fsdp.offload=cpu has no effect"),
        (["train.optimizer.name=adafactor"], "cannot be used with several ranks"),
        (["train.optimizer.offload=cpu"], "set cluster.fsdp.offload=cpu"),
        (["train.optimizer.master_weights=kahan", "model.dtype=bfloat16"], "cannot be used with several ranks"),
        (["model.device=cuda:1"], "each rank has a device of its own"),
    ],
)
def test_what_has_no_effect_or_cannot_be_trained_is_refused(recipe: Path, overrides: list[str], message: str) -> None:
    config, _ = load(recipe, overrides)
    with pytest.raises(ConfigError) as caught:
        refuse_without_effect(config)
    assert message in str(caught.value)


def test_fine_tuning_refuses_the_same(tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, tmp_path / "model", sft={"optimizer": {"name": "adafactor"}}, cluster="torchrun")
    tree = ["environment=turnwise.environments.environment:SingleTurn"]
    with pytest.raises(ConfigError, match="cannot be used with several ranks"):
        refuse_sft_without_effect(load(recipe, tree)[0])
