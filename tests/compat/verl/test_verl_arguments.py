"""verl's configuration, made a recipe: each key is an option, or is left out by name and with a reason."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from compat.verl.verl_files import an_interaction, written
from rewards.credit.test_credit_invariance import source
from turnwise import assembly
from turnwise.cli import main
from turnwise.commands.convert import converted as convert_command
from turnwise.compat.conversion import TRACKERS, ConversionReport
from turnwise.compat.verl.convert import from_verl_arguments
from turnwise.compat.verl.keys import DEFAULTS, FIXED, HANDLED, PLAIN
from turnwise.config.recipe import checked
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.errors import ConfigError
from turnwise.options.schema import Config, LoggerSection

TURNS = "actor_rollout_ref.rollout.multi_turn"


def a_row(**fields: Any) -> dict[str, Any]:
    """A row as verl's preprocessing scripts write it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0},
        **fields,
    }


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Ten rows."""
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(a_row()) for _ in range(10)))
    return str(path)


@pytest.fixture
def grpo(rows: str) -> list[str]:
    """Overrides of an ordinary GRPO run."""
    return [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=some/model",
        f"data.train_files={rows}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=5",
        "trainer.total_epochs=3",
    ]


def matters(converted: ConversionReport) -> dict[str, str]:
    """The keys that change the training, and the reasons."""
    return {left.key: left.reason for left in converted.refused()}


def whole(converted: ConversionReport) -> Config:
    """The recipe, which must be one, and must be fit for training."""
    config = checked(converted.recipe, source="converted")
    refuse_without_effect(config)
    return config


def test_an_ordinary_run_is_the_same_run(grpo: list[str], rows: str) -> None:
    found = from_verl_arguments(
        [
            *grpo,
            f"data.val_files=[{rows}]",
            "data.max_prompt_length=100",
            "data.max_response_length=300",
            "data.shuffle=False",
            "data.seed=3",
            "actor_rollout_ref.rollout.temperature=0.7",
            "actor_rollout_ref.rollout.top_k=-1",
            "actor_rollout_ref.rollout.top_p=0.9",
            "actor_rollout_ref.actor.optim.lr=2e-6",
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5",
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.actor.kl_loss_coef=0.01",
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
            "actor_rollout_ref.actor.entropy_coeff=0.001",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
            "algorithm.norm_adv_by_std_in_grpo=False",
            "trainer.test_freq=2",
            "trainer.save_freq=4",
            "trainer.project_name=p",
            "trainer.experiment_name=e",
        ]
    )
    assert found.unsupported == []
    config = whole(found)
    assert (config.model.path, config.model.dtype) == ("some/model", "bfloat16")
    assert (config.data.train, config.data.eval, config.data.shuffle, config.seed) == (rows, rows, False, 3)
    train = config.train
    assert (train.batch_size, train.group_size, train.steps, train.minibatches, train.ppo_epochs) == (
        4,
        5,
        3 * (10 // 4),
        1,
        1,
    )
    assert (train.lr, train.warmup_steps, train.lr_schedule) == (2e-6, 3, "cosine")
    assert (train.weight_decay, train.betas, train.max_grad_norm) == (0.01, (0.9, 0.999), 1.0)
    assert (config.loss.kl_coef, config.loss.entropy_coef, config.loss.normalizer) == (0.01, 0.001, "trajectory")
    assert (config.credit.name, config.credit.scale) == ("grpo", "none")
    assert (config.sampling.temperature, config.sampling.top_k, config.sampling.top_p) == (0.7, 0, 0.9)
    assert (config.limits.turns, config.limits.context, config.limits.tokens_per_turn) == (1, 400, 300)
    assert config.limits.response_tokens == 300  # of the whole conversation, tools' and users' words included
    assert (config.eval.every, config.checkpoint.every, config.output) == (2, 4, "checkpoints/p/e")
    assert config.resume == "auto"
    assert [use.use for use in config.reward.trajectory] == ["turnwise.compat.verl:data_source_score"]


def test_what_is_not_said_has_verl_s_value(grpo: list[str]) -> None:
    config = whole(from_verl_arguments(grpo))
    assert (config.train.weight_decay, config.train.lr) == (0.01, 1e-6)
    assert (config.limits.context, config.limits.tokens_per_turn) == (1024, 512)
    found = from_verl_arguments([one for one in grpo if "adv_estimator" not in one and "mini" not in one])
    assert found.recipe["credit"] == {"name": "gae", "gamma": 1.0, "lam": 1.0}
    assert matters(found) == {
        "actor_rollout_ref.actor.ppo_mini_batch_size": "the 4 rows of data.train_batch_size cannot be divided by it",
    }
    assert {left.key: left.value for left in found.unsupported}["actor_rollout_ref.actor.ppo_mini_batch_size"] == 256


def test_an_estimator_that_does_not_exist_here_is_refused(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, "algorithm.adv_estimator=optimal_token_baseline"])
    assert matters(found) == {
        "algorithm.adv_estimator": "these estimators can be converted: gae, grpo, grpo_vectorized, rloo, rloo_vectorized, "
        "reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg; one of your own is a function (credit: "
        "path/to/file.py:name, docs/own_algorithm.md)",
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["algorithm.kl_ctrl.kl_coef=0.01"], {"coef": 0.01}),
        (["algorithm.kl_penalty=low_var_kl"], {"coef": 0.001, "estimator": "k3"}),
        (["algorithm.kl_penalty=mse+"], {"coef": 0.001, "estimator": "k2"}),
        (
            ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.05", "algorithm.kl_ctrl.horizon=500"],
            {"coef": 0.001, "target": 0.05, "horizon": 500},
        ),
        (["algorithm.kl_ctrl.type=adaptive"], {"coef": 0.001, "target": 0.1, "horizon": 10000}),
    ],
)
def test_the_divergence_in_the_reward(grpo: list[str], keys: list[str], expected: dict[str, Any]) -> None:
    found = from_verl_arguments([*grpo, "algorithm.use_kl_in_reward=True", *keys])
    assert found.recipe["reward"]["kl"] == expected
    assert not found.refused()
    assert Config.model_validate(found.recipe).reward.kl.coef == expected["coef"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("algorithm.kl_penalty=abs", "these estimators can be converted"),
        ("algorithm.kl_ctrl.type=linear", "it can be fixed or adaptive"),
    ],
)
def test_other_divergences_in_the_reward_are_refused(grpo: list[str], key: str, message: str) -> None:
    found = from_verl_arguments([*grpo, "algorithm.use_kl_in_reward=True", key])
    assert [message in str(refused) for refused in found.refused()] == [True]


def test_keys_of_the_critic_that_are_left_out_name_the_reason(grpo: list[str]) -> None:
    keys = ["critic.strategy=fsdp2", "critic.optim.lr_warmup_steps_ratio=0.1", "critic.model.lora_rank=4"]
    without = {key.key: key.reason for key in from_verl_arguments([*grpo, *keys]).unsupported}
    assert {without[key.partition("=")[0]] for key in keys} == {"this adv_estimator has no critic, also not in verl"}
    found = from_verl_arguments([*grpo, "algorithm.adv_estimator=gae", *keys])
    reasons = {key.key: (key.reason, key.changes_training) for key in found.unsupported}
    assert reasons["critic.strategy"] == ("how verl runs its critic; here the critic runs as the policy does", False)
    assert reasons["critic.optim.lr_warmup_steps_ratio"] == ("the learning rate of the critic is constant", True)
    assert reasons["critic.model.lora_rank"] == (
        "the critic has the value of actor_rollout_ref.model.lora_rank",
        True,
    )


def test_gae_and_its_critic(grpo: list[str]) -> None:
    keys = (
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        "critic.optim.lr=2e-5",
        "critic.model.path=some/critic",
        "critic.cliprange_value=0.3",
        "trainer.critic_warmup=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )
    found = from_verl_arguments([*grpo, *keys])
    assert found.recipe["credit"] == {"name": "gae", "gamma": 1.0, "lam": 0.95}
    assert found.recipe["critic"] == {"lr": 2e-5, "path": "some/critic", "warmup_steps": 2, "clip": 0.3}
    assert matters(found) == {}
    other = from_verl_arguments([*grpo, *keys, "critic.ppo_epochs=3"])
    assert matters(other) == {
        "critic.ppo_epochs": "the critic has the value of actor_rollout_ref.actor.ppo_epochs",
    }
    one_step = from_verl_arguments([*grpo, *keys, "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    assert "clip" not in one_step.recipe["critic"]


GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
GEO_RULE = {"level": "geometric", "estimator": "k1", "low": 1 / 1.001, "high": 1 / 0.999}
K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
K3_RULE = {"level": "geometric", "estimator": "k3", "high": 0.01}
BYPASS = {"bypass_mode": True, "loss_type": "ppo_clip"}
BYPASS_PG = {"bypass_mode": True, "loss_type": "reinforce"}
PRESETS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "decoupled_token_is": ({"rollout_is": "token"}, "ppo_clip", {"action": "truncate", "level": "token", "high": 2.0}),
    "decoupled_seq_is": (
        {"rollout_is": "sequence"},
        "ppo_clip",
        {"action": "truncate", "level": "sequence", "high": 2.0},
    ),
    "decoupled_seq_is_rs": (
        {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        "ppo_clip",
        {
            "action": "truncate",
            "level": "sequence",
            "high": 2.0,
            "reject": {"level": "sequence", "estimator": "k1", "low": 0.5, "high": 2.0},
        },
    ),
    "decoupled_geo_rs": (GEO, "ppo_clip", {"action": "measure", "reject": GEO_RULE}),
    "bypass_ppo_clip": (BYPASS, "ppo_clip", {}),
    "bypass_ppo_clip_geo_rs": (
        {**BYPASS, **GEO},
        "ppo_clip",
        {"action": "measure", "decoupled": False, "reject": GEO_RULE},
    ),
    "bypass_ppo_clip_k3_rs": (
        {**BYPASS, **K3},
        "ppo_clip",
        {"action": "measure", "decoupled": False, "reject": K3_RULE},
    ),
    "bypass_pg_is": (
        {**BYPASS_PG, "rollout_is": "sequence"},
        "reinforce",
        {"action": "truncate", "level": "sequence", "high": 2.0},
    ),
    "bypass_pg_geo_rs": ({**BYPASS_PG, **GEO}, "reinforce", {"action": "measure", "reject": GEO_RULE}),
    "decoupled_geo_rs_seq_tis": (
        {"rollout_is": "sequence", **GEO},
        "ppo_clip",
        {"action": "truncate", "level": "sequence", "high": 2.0, "reject": GEO_RULE},
    ),
    "decoupled_geo_rs_token_tis": (
        {"rollout_is": "token", **GEO},
        "ppo_clip",
        {"action": "truncate", "level": "token", "high": 2.0, "reject": GEO_RULE},
    ),
    "bypass_pg_geo_rs_seq_tis": (
        {**BYPASS_PG, "rollout_is": "sequence", **GEO},
        "reinforce",
        {"action": "truncate", "level": "sequence", "high": 2.0, "reject": GEO_RULE},
    ),
    "bypass_pg_geo_rs_token_tis": (
        {**BYPASS_PG, "rollout_is": "token", **GEO},
        "reinforce",
        {"action": "truncate", "level": "token", "high": 2.0, "reject": GEO_RULE},
    ),
    "decoupled_k3_rs": (K3, "ppo_clip", {"action": "measure", "reject": K3_RULE}),
    "decoupled_k3_rs_seq_tis": (
        {"rollout_is": "sequence", **K3},
        "ppo_clip",
        {"action": "truncate", "level": "sequence", "high": 2.0, "reject": K3_RULE},
    ),
    "decoupled_k3_rs_token_tis": (
        {"rollout_is": "token", **K3},
        "ppo_clip",
        {"action": "truncate", "level": "token", "high": 2.0, "reject": K3_RULE},
    ),
    "disabled": ({}, "ppo_clip", {}),
}
"""verl's presets of rollout_correction: their keys, our loss, and our section correction."""


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_of_rollout_correction_are_converted(grpo: list[str], name: str) -> None:
    keys, loss, expected = PRESETS[name]
    found = from_verl_arguments([*grpo, BF16, *(f"{PLACE}.{key}={value}" for key, value in keys.items())])
    assert not found.refused()
    assert found.recipe.get("correction", {}) == expected
    assert found.recipe.get("loss", {}).get("name", "ppo_clip") == loss
    whole(found)


def test_the_presets_are_those_of_verl() -> None:
    text = source("volcengine+verl", "verl/trainer/config/algorithm.py")
    tree = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "RolloutCorrectionConfig")
    presets = {
        node.name: node
        for node in tree.body  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "classmethod" for d in node.decorator_list)
    }
    assert presets.keys() == PRESETS.keys()
    for name, function in presets.items():
        arguments = [argument.arg for argument in function.args.args[1:]]
        defaults = dict(zip(arguments, map(ast.literal_eval, function.args.defaults), strict=True))
        call = next(node.value for node in function.body if isinstance(node, ast.Return))
        assert isinstance(call, ast.Call)
        given = {
            item.arg: defaults[item.value.id] if isinstance(item.value, ast.Name) else ast.literal_eval(item.value)
            for item in call.keywords
        }
        assert given.pop("rollout_is_threshold", 2.0) == 2.0, name
        assert {key: value for key, value in given.items() if value is not None} == PRESETS[name][0], name


def test_minibatches_and_their_clipping(grpo: list[str]) -> None:
    config = whole(
        from_verl_arguments(
            [*grpo, "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.clip_ratio_high=0.28"]
        )
    )
    assert (config.train.minibatches, config.loss.clip_low, config.loss.clip_high) == (2, 0.2, 0.28)
    assert config.model.dtype == "float32"  # also on a GPU: verl's weights are float32 where nothing else is given
    dual = from_verl_arguments(
        [*grpo, "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.clip_ratio_c=3.0"]
    )
    assert Config.model_validate(dual.recipe).loss.dual_clip == 3.0  # type: ignore[union-attr]
    found = from_verl_arguments([*grpo, "actor_rollout_ref.actor.clip_ratio=0.3"])
    assert [str(left) for left in found.unsupported] == [
        "actor_rollout_ref.actor.clip_ratio=0.3: has no effect with one optimizer step per batch: the ratio is 1"
    ]
    assert "clip_low" not in found.recipe.get("loss", {})


ACTOR = "actor_rollout_ref.actor"
PLACE = "algorithm.rollout_correction"
BF16 = f"{ACTOR}.fsdp_config.model_dtype=bf16"


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        (["loss_agg_mode=seq-mean-token-sum"], {"normalizer": "constant", "constant_length": 1}),
        (["policy_loss.loss_mode=vanilla"], {"name": "ppo_clip", "normalizer": "token"}),
        # gspo and sapo average over conversations whatever loss_agg_mode is; their bounds are verl's, not those of the paper
        (["policy_loss.loss_mode=gspo"], {"name": "gspo", "normalizer": "trajectory", "clip_low": 3e-4}),
        (
            ["policy_loss.loss_mode=gspo", "ppo_epochs=2", "clip_ratio_high=0.3"],
            {"name": "gspo", "normalizer": "trajectory", "clip_low": 0.2, "clip_high": 0.3, "level": "sequence"},
        ),
        (
            ["policy_loss.loss_mode=sapo", "ppo_epochs=2", "tau_pos=2", "tau_neg=3"],
            {"name": "sapo", "normalizer": "trajectory", "tau_positive": 2.0, "tau_negative": 3.0},
        ),
        (
            ["policy_loss.loss_mode=cispo", "ppo_epochs=2", "clip_ratio_low=1", "clip_ratio_high=3"],
            {"name": "cispo", "normalizer": "token", "clip_low": 1.0, "clip_high": 3.0},
        ),
        (["policy_loss.loss_mode=cispo", "ppo_epochs=2"], {"name": "cispo", "clip_low": 0.2, "clip_high": 0.2}),
        (["policy_loss.loss_mode=clip_cov"], {"clip_cov_ratio": 0.0002, "clip_cov_low": 1.0, "clip_cov_high": 5.0}),
        (
            ["policy_loss.loss_mode=clip_cov", "ppo_epochs=2", "policy_loss.clip_cov_ratio=0.1", "policy_loss.clip_cov_ub=3"],
            {"name": "ppo_clip", "clip_low": 0.2, "clip_cov_ratio": 0.1, "clip_cov_low": 1.0, "clip_cov_high": 3.0},
        ),
        (["policy_loss.loss_mode=kl_cov", "policy_loss.kl_cov_ratio=0.1"], {"kl_cov_ratio": 0.0}),
        (
            ["policy_loss.loss_mode=kl_cov", "ppo_epochs=2", "clip_ratio_low=0.3"],
            {"name": "ppo_clip", "clip_low": 1.0, "clip_high": 1e6, "kl_cov_ratio": 0.0002, "kl_cov_coef": 0.1},
        ),
        (
            ["policy_loss.loss_mode=gpg", "ppo_epochs=2", "loss_agg_mode=seq-mean-token-mean"],
            {"name": "reinforce", "normalizer": "trajectory"},
        ),
        *(
            (["use_kl_loss=True", f"kl_loss_type={name}"], {"kl_coef": 0.001, "kl_estimator": ours})
            for name, ours in {
                "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k3+": "k2", "k1+": "k2",
            }.items()
        ),
    ],
)  # fmt: skip
def test_a_loss_has_the_same_formula(keys: list[str], loss: dict[str, Any], grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, *(f"{ACTOR}.{key}" for key in keys)])
    section = whole(found).loss.model_dump()
    assert {name: section[name] for name in loss} == loss
    assert matters(found) == {}


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (["optimizer=AdamW"], "adamw"),
        (["optimizer=Adafactor", "betas=[0.8,0.9]"], "adafactor"),
        (["optimizer=AdamW8bit", "optimizer_impl=bitsandbytes.optim"], "adamw_8bit"),
    ],
)
def test_an_optimizer_is_the_same_class(keys: list[str], name: str, grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, *(f"{ACTOR}.optim.{key}" for key in keys)])
    assert whole(found).train.optimizer.name == name
    assert matters(found) == {}


@pytest.mark.parametrize(
    ("keys", "correction"),
    [
        (["rollout_is=token"], {"action": "truncate", "level": "token", "high": 2.0, "low": None}),
        (["rollout_is=sequence", "rollout_is_threshold=5"], {"action": "truncate", "level": "sequence", "high": 5.0}),
        (["rollout_is=token", "rollout_is_threshold=0.5_5.0"], {"action": "icepop", "low": 0.5, "high": 5.0}),
        (["rollout_is=token", "rollout_is_batch_normalize=True"], {"normalize_weights": True}),
        (["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.999_1.002"], {"action": "measure", "decoupled": True}),
        (
            ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.9_1.2", "bypass_mode=True"],
            {"action": "measure", "decoupled": False},
        ),
        (["rollout_is=token", "bypass_mode=True", "loss_type=reinforce"], {"action": "truncate", "level": "token"}),
        (["bypass_mode=True"], {"action": None}),
        (["rollout_is=token", "bypass_mode=True"], {"action": None}),  # verl uses these weights for metrics only
        (["bypass_mode=False", "rollout_is=null", "rollout_rs=null"], {"action": None}),
    ],
)
def test_a_correction_has_the_same_formula(keys: list[str], correction: dict[str, Any], grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, BF16, *(f"{PLACE}.{key}" for key in keys)])
    config = whole(found)
    section = config.correction.model_dump()
    assert {name: section[name] for name in correction} == correction
    assert matters(found) == {}
    assert config.loss.name == ("reinforce" if "loss_type=reinforce" in keys else "ppo_clip")  # type: ignore[union-attr]
    # in float32, the embedded engine has the trainer's probabilities, and nothing is to correct
    exact = from_verl_arguments([*grpo, *(f"{PLACE}.{key}" for key in keys)])
    assert whole(exact).correction.action is None
    assert matters(exact) == {}


@pytest.mark.parametrize(
    ("rule", "bounds", "expected"),
    [
        # verl compares the inverse of the ratio
        ("token_k1", "0.5_4.0", ("token", "k1", 0.25, 2.0)),
        ("token_k1", "2.0", ("token", "k1", 0.5, 2.0)),
        ("seq_sum_k1", "0.5_2.0", ("sequence", "k1", 0.5, 2.0)),
        ("seq_mean_k1", "0.8_1.25", ("geometric", "k1", 0.8, 1.25)),
        ("seq_mean_k3", "0.01", ("geometric", "k3", None, 0.01)),
        ("seq_max_k2", "0.3", ("max", "k2", None, 0.3)),
        ("token_k2", "0.3", ("token", "k2", None, 0.3)),
    ],
)
def test_a_rejection_has_the_same_bounds(
    rule: str, bounds: str, expected: tuple[str, str, float | None, float], grpo: list[str]
) -> None:
    keys = [f"{PLACE}.rollout_is=sequence", f"{PLACE}.rollout_rs={rule}", f"{PLACE}.rollout_rs_threshold={bounds}"]
    section = whole(from_verl_arguments([*grpo, BF16, *keys])).correction
    assert section.action == "truncate"
    reject = section.reject
    assert (reject.level, reject.estimator, reject.low, reject.high) == (
        *expected[:2],
        *map(approximately, expected[2:]),
    )


def approximately(number: float | None) -> Any:
    """The number with a tolerance."""
    return None if number is None else pytest.approx(number)


@pytest.mark.parametrize(
    ("keys", "key", "told"),
    [
        ([f"{PLACE}.rollout_is=geometric"], "rollout_is", "it can be token or sequence"),
        ([f"{PLACE}.rollout_is=token", f"{PLACE}.rollout_is_threshold=-1"], "rollout_is_threshold", "a number above 0"),
        ([f"{PLACE}.rollout_rs=token_k1"], "rollout_rs", "it needs rollout_rs_threshold"),
        (
            [f"{PLACE}.rollout_rs=seq_mean_k3", f"{PLACE}.rollout_rs_threshold=0.1_0.2"],
            "rollout_rs",
            "a number for a k2",
        ),
        ([f"{PLACE}.rollout_rs=seq_max_k1", f"{PLACE}.rollout_rs_threshold=2"], "rollout_rs", "there is no such rule"),
        (
            [f"{PLACE}.rollout_rs='token_k1,seq_mean_k3'", f"{PLACE}.rollout_rs_threshold=2"],
            "rollout_rs",
            "only one rule can be converted",
        ),
        (
            [
                f"{PLACE}.rollout_rs=token_k1",
                f"{PLACE}.rollout_rs_threshold=2",
                f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            ],
            "rollout_rs",
            "turnwise scales all kept tokens by the same factor",
        ),
        (
            [
                f"{PLACE}.rollout_rs=seq_sum_k1",
                f"{PLACE}.rollout_rs_threshold=2",
                f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
            ],
            "rollout_rs",
            "verl does not count rejected conversations",
        ),
        (
            [
                f"{PLACE}.bypass_mode=True",
                f"{PLACE}.rollout_rs=seq_sum_k1",
                f"{PLACE}.rollout_rs_threshold=2",
                f"{ACTOR}.ppo_epochs=2",
            ],
            "bypass_mode",
            "turnwise once before the update",
        ),
        (
            [f"{PLACE}.rollout_is=token", f"{PLACE}.rollout_is_batch_normalize=True", f"{ACTOR}.ppo_mini_batch_size=2"],
            "rollout_is_batch_normalize",
            "with one minibatch only",
        ),
        ([f"{PLACE}.bypass_mode=True", f"{PLACE}.loss_type=gspo"], "loss_type", "it can be ppo_clip or reinforce"),
    ],
)
def test_a_correction_with_another_meaning_is_refused(keys: list[str], key: str, told: str, grpo: list[str]) -> None:
    assert told in matters(from_verl_arguments([*grpo, BF16, *keys]))[f"{PLACE}.{key}"]


def test_the_steps_of_epochs_need_the_rows(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, "data.train_files=/nowhere/train.parquet"])
    config = whole(found)
    assert (config.train.steps, config.train.epochs, matters(found)) == (None, 3, {})
    grader = ("custom_reward_function.path", None)
    assert [(key.key, key.value) for key in found.assumptions] == [("train.epochs", 3), grader]
    warm = from_verl_arguments([*grpo, "data.train_files=/nowhere.parquet", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"])
    assert (whole(warm).train.warmup_steps, matters(warm)) == (0.1, {})
    found = from_verl_arguments([*grpo, "data.train_files=/nowhere.parquet", "trainer.total_training_steps=7"])
    assert (whole(found).train.steps, matters(found)) == (7, {})
    assert whole(from_verl_arguments([*grpo, "data.train_max_samples=8"])).train.steps == 6
    found = from_verl_arguments([*grpo, "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"])
    assert matters(found) == {"trainer.total_epochs": "the 10 rows are fewer than data.train_batch_size=16"}


@pytest.mark.parametrize(
    "keys",
    [
        [f"{TURNS}.enable=True", f"{TURNS}.interaction_config_path=i.yaml", f"{TURNS}.tool_config_path=t.yaml"],
        [f"{TURNS}.interaction_config_path=i.yaml", f"{TURNS}.tool_config_path=t.yaml"],
        [  # the keys of document 4
            f"{TURNS}=True",
            "actor_rollout_ref.rollout.interaction_config_file=i.yaml",
            "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=t.yaml",
        ],
    ],
)
def test_the_files_are_found_by_each_of_their_keys(keys: list[str], grpo: list[str]) -> None:
    found = from_verl_arguments(
        [
            *grpo,
            *keys,
            f"{TURNS}.max_user_turns=3",
            f"{TURNS}.max_assistant_turns=6",
            f"{TURNS}.max_parallel_calls=2",
            f"{TURNS}.max_tool_response_length=99",
            f"{TURNS}.tool_response_truncate_side=left",
            f"{TURNS}.tokenization_sanity_check_mode=ignore_strippable",
            f"{TURNS}.use_inference_chat_template=True",
            f"{TURNS}.format=hermes",
            "data.return_raw_chat=True",
        ]
    )
    assert found.unsupported == []
    assert found.converted["data.return_raw_chat"] == "rows are always conversations"
    config = whole(found)
    assert config.environment.use == "turnwise.compat.verl:Conversations"
    assert config.environment.arguments == {"interactions": "i.yaml", "tools": "t.yaml", "max_user_turns": 3}
    assert config.limits.turns == 6
    assert config.tool_calls.model_dump(exclude_defaults=True) == {
        "max_parallel_calls": 2,
        "max_tool_response_length": 99,
        "tool_response_truncate_side": "left",
    }
    assert (config.tokenization_sanity_check, config.thinking, config.tool_format.use) == (
        "ignore_strippable",
        "branch",
        "hermes",
    )
    assert config.reward.trajectory == []  # an interaction's scores are the reward


def test_groups_without_differences_are_replaced_as_often_as_verl_would(grpo: list[str]) -> None:
    filters = [f"+algorithm.filter_groups.{text}" for text in ("enable=True", "max_num_gen_batches=10", "metric=acc")]
    assert whole(from_verl_arguments([*grpo, *filters])).train.dynamic_sampling == 9
    assert whole(from_verl_arguments(grpo)).train.dynamic_sampling == 0


def test_an_adapter_is_converted(grpo: list[str]) -> None:
    model = "actor_rollout_ref.model"
    plain = whole(from_verl_arguments(grpo)).model
    assert (plain.lora.rank, plain.gradient_checkpointing) == (None, False)
    lora = whole(from_verl_arguments([*grpo, f"{model}.lora_rank=8"])).model.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 16.0, None)
    words = [f"{model}.lora_rank=8", f"{model}.lora_alpha=32", f"{model}.target_modules=[q_proj]"]
    found = whole(from_verl_arguments([*grpo, *words, f"{model}.enable_gradient_checkpointing=True"])).model
    assert (plain.kernels, whole(from_verl_arguments([*grpo, f"{model}.use_liger=True"])).model.kernels) == (
        "auto",
        "liger",
    )
    assert whole(from_verl_arguments([*grpo, f"{model}.use_liger=False"])).model.kernels == "auto"
    assert (found.lora.alpha, found.lora.target_modules, found.gradient_checkpointing) == (32.0, ["q_proj"], True)


def test_the_options_of_experts_are_converted(grpo: list[str]) -> None:
    mode = "actor_rollout_ref.actor.router_replay.mode"
    auxiliary = "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01"
    config = whole(from_verl_arguments([*grpo, f"{mode}=R3", auxiliary]))
    assert (config.model.router_replay, config.loss.router_aux_loss_coef) == (True, 0.01)
    assert not whole(from_verl_arguments([*grpo, f"{mode}=disabled"])).model.router_replay
    refused = {one.key: one for one in from_verl_arguments([*grpo, f"{mode}=R2"]).unsupported}[mode]
    assert refused.changes_training
    assert "use mode R3" in refused.reason


def test_tools_have_verl_s_bounds_where_nothing_is_said(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, f"{TURNS}.tool_config_path=t.yaml"])
    calls = whole(found).tool_calls
    assert (calls.max_parallel_calls, calls.max_tool_response_length) == (1, 256)
    assert found.recipe["limits"]["turns"] == 1024 // 3  # verl's own bound
    assert [use["use"] for use in found.recipe["reward"]["trajectory"]] == ["turnwise.compat.verl:data_source_score"]


def test_agent_loops_and_functions_are_arguments_of_the_environment(grpo: list[str]) -> None:
    agent = "actor_rollout_ref.rollout.agent"
    keys = [f"{agent}.agent_loop_config_path=agents.yaml", f"{TURNS}.function_tool_path=f.py", f"+{TURNS}.mine=3"]
    arguments = from_verl_arguments([*grpo, *keys]).recipe["environment"]["arguments"]
    assert (arguments["agent_loops"], arguments["function_tools"]) == ("agents.yaml", "f.py")
    assert arguments["default_agent"] == "single_turn_agent"  # verl's own default
    assert arguments["config"]["actor_rollout_ref"]["rollout"]["multi_turn"]["mine"] == 3
    named = from_verl_arguments([*grpo, keys[0], f"{agent}.default_agent_loop=mine"]).recipe["environment"]["arguments"]
    assert named["default_agent"] == "mine"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ([f"{TURNS}.max_user_turns=3"], "it counts the answers of an interaction, and there is none"),
        ([f"{TURNS}.max_assistant_turns=3"], "multi_turn is off, so a conversation has one turn"),
        ([f"{TURNS}.enable=False", f"{TURNS}.tool_config_path=t"], "it contradicts the interaction or tool file"),
        (
            [f"{TURNS}.tool_config_path=t", "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=u"],
            "multi_turn.tool_config_path names another file: remove one of the two",
        ),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=mine"], "name the file of its class"),
        (["+algorithm.filter_groups.enable=True"], "0 samples without end in verl"),
        (
            ["+algorithm.filter_groups.enable=True", "+algorithm.filter_groups.metric=length"],
            "groups are compared by their rewards",
        ),
        (
            ["actor_rollout_ref.actor.loss_agg_mode=sample-mean"],
            "loss.normalizer supports these values of verl: token-mean, seq-mean-token-mean",
        ),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], "not by the number of conversations"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"], "these losses can be converted: vanilla, gspo"),
        (
            ["actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
            "only the KL and entropy terms have this average",
        ),
        (
            ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=abs"],
            "these estimators can be converted: kl, k1, mse, k2, low_var_kl, k3",
        ),
        (["actor_rollout_ref.actor.optim.optimizer=SGD"], "AdamW and Adafactor of torch.optim"),
        (["actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim"], "AdamW8bit of bitsandbytes.optim"),
        (
            ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.exclude_modules=[lm_head]"],
            "name the layers with an adapter in target_modules",
        ),
        (["trainer.resume_mode=resume_path"], "resume supports these values of verl: auto, disable"),
        (["trainer.device=npu"], "model.device supports these values of verl: cuda, cpu"),
        (["actor_rollout_ref.actor.use_kl_los=True"], "did you mean 'actor_rollout_ref.actor.use_kl_loss'?"),
        (["train.lr=1e-4"], "turnwise knows no such key of verl's"),
        (["trainer.default_local_dir=${nowhere.at_all}/x"], "it refers to a key or a variable that does not exist"),
    ],
)  # fmt: skip
def test_a_key_that_would_change_the_training_is_refused_by_name(keys: list[str], told: str, grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, *keys])
    assert any(told in reason for reason in matters(found).values()), matters(found)
    if not keys[-1].startswith("data."):  # it can be taken out, as Hydra takes keys out
        taken = [f"~{key.lstrip('+').partition('=')[0]}" for key in keys[-1:]]
        assert not any(told in reason for reason in matters(from_verl_arguments([*grpo, *keys, *taken])).values())


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("trainer.balance_batch=True", "turnwise uses one process"),
        ("trainer.logger=[console]", "metrics.jsonl, the curve and all conversations are always written"),
        ("actor_rollout_ref.rollout.name=sglang", "the embedded engine has other options"),
        ("actor_rollout_ref.rollout.agent.num_workers=4", "set cluster=ray and cluster.workers.count"),
        ("ray_kwargs.ray_init.num_cpus=8", "turnwise uses Ray only for rollout workers: set cluster=ray"),
        ("+actor_rollout_ref.rollout.server.timeout=60", "the embedded engine has other options"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "the embedded engine has other options"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "has no effect with one GPU"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "has no effect with one GPU"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "engine.tensor_parallel"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8", "turnwise uses one process"),
        ("critic.optim.lr=1e-5", "this adv_estimator has no critic, also not in verl"),
        ("algorithm.gamma=1.0", "has no effect with this adv_estimator, also not in verl"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.01", "belongs to use_kl_loss, which is off"),
        ("data.return_multi_modal_inputs=False", "no row contains an image"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0", "there are no held-out rows: data.val_files"),
        (
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
            "val_kwargs.temperature selects how an evaluation samples",
        ),
        (f"{TURNS}.max_parallel_calls=1", "there are no tools"),
    ],
)
def test_a_key_that_changes_nothing_that_is_learnt_is_named(key: str, told: str, grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, key])
    (left,) = found.unsupported
    assert (left.key, left.changes_training) == (key.lstrip("+").partition("=")[0], False)
    assert told in left.reason
    whole(found)


def test_every_key_is_carried_over_or_left_out(grpo: list[str]) -> None:
    """Whatever the tables know, given a value: nothing is accepted and ignored."""
    for key in [*PLAIN, *HANDLED, *FIXED, *DEFAULTS, "some.thing", "data.some"]:
        found = from_verl_arguments([*grpo, f"{key}={json.dumps(DEFAULTS.get(key, 1))}"])
        names = [*found.converted, *(left.key for left in found.unsupported)]
        assert key in names, key
        assert len(names) == len(set(names))
        if key not in ("some.thing", "data.some"):
            assert "no such key" not in matters(found).get(key, "")


def test_the_third_document_s_block_is_tools_and_a_bound(grpo: list[str], tmp_path: Path) -> None:
    written(
        tmp_path / "note.yaml",
        "rollout:\n"
        "  engine: sglang\n"
        "  multiturn:\n"
        "    enabled: true\n"
        "    max_turns: 5           # most turns\n"
        '    stop_tokens: ["</s>"]\n'
        "    environment:\n"
        "      type: tool_calling\n"
        "      tools:\n"
        "        - {name: python, type: sandbox, endpoint: 'http://sandbox:8080'}\n"
        "        - {name: search, type: api, endpoint: 'http://search:3000'}\n",
    )
    found = from_verl_arguments(grpo, folder=tmp_path, name="note")
    assert [left.key for left in found.unsupported] == ["rollout.engine"]
    config = whole(found)
    assert (config.limits.turns, config.sampling.stop) == (5, ["</s>"])
    assert [(tool.use, tool.arguments) for tool in config.tools] == [
        ("turnwise.environments.sandbox.fusion:SandboxFusion", {"url": "http://sandbox:8080"}),
        ("turnwise.environments.search:Search", {"retrieval_service_url": "http://search:3000"}),
    ]


def test_a_reward_function_of_one_s_own_is_asked(grpo: list[str]) -> None:
    found = from_verl_arguments(
        [
            *grpo,
            f"{TURNS}.interaction_config_path=i.yaml",
            "custom_reward_function.path=mine.py",
            "custom_reward_function.name=score",
            "+custom_reward_function.reward_kwargs.bonus=2",
        ]
    )
    (use,) = whole(found).reward.trajectory
    assert use.use == "turnwise.compat.verl:CustomScore"
    assert use.arguments == {"path": "mine.py", "name": "score", "arguments": {"bonus": 2}}
    assert found.unsupported == []


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        (
            {"data_source": "my/data"},
            "there is no grader for 'my/data' here: the grader of verl needs the columns data_source",
        ),
        ({"data_source": None}, "rows have no column data_source, by which verl chooses the grader: the grader"),
        ({"reward_model": {}}, "rows have no reward_model.ground_truth: the grader of verl needs"),
    ],
)
def test_data_without_a_grader_need_a_reward_function(
    grpo: list[str], tmp_path: Path, fields: dict[str, Any], missing: str
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps(a_row(**fields)) for _ in range(4)))
    words = [*grpo, f"data.train_files={other}"]
    found = from_verl_arguments(words)
    told = matters(found)["custom_reward_function.path"]
    assert told.startswith(missing)
    assert "write `def compute_score(data_source, solution_str, ground_truth, extra_info)`" in told
    assert "reward" not in found.recipe  # it would fail in each conversation: without it, training does not start
    with pytest.raises(ConfigError, match="nothing gives a reward"):
        refuse_without_reward(checked(found.recipe, source="converted"))
    with other.open("a") as file:  # some rows have one
        file.write("\n" + json.dumps(a_row()))
    found = from_verl_arguments(words)
    assert matters(found)["custom_reward_function.path"] == told
    assert len(found.recipe["reward"]["trajectory"]) == 1
    failing = from_verl_arguments([*words, "custom_reward_function.path=f.py"]).failing
    assert [one.reason.partition(",")[0] for one in failing] == (
        ["4 rows have no reward_model.ground_truth"] if "reward_model" in fields else []
    )


def test_what_the_grader_needs_is_said_where_the_rows_are_not_here(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, "data.train_files=elsewhere.parquet"])
    assert len(found.recipe["reward"]["trajectory"]) == 1
    (told,) = (one for one in found.assumptions if one.key == "custom_reward_function.path")
    assert told.reason.startswith("the grader of verl needs the columns data_source (openai/gsm8k) and reward_model")


def test_configuration_files_are_put_together_as_hydra_does(grpo: list[str], tmp_path: Path) -> None:
    written(tmp_path / "sizes.yaml", "data: {max_prompt_length: 64, max_response_length: 64}\n")
    (tmp_path / "lr").mkdir()
    written(tmp_path / "lr" / "fast.yaml", "# @package _global_\nactor_rollout_ref: {actor: {optim: {lr: 1e-3}}}\n")
    written(
        tmp_path / "mine.yaml",
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [ppo_trainer, sizes, {lr: fast}, _self_]\n"
        "data: {max_prompt_length: 32, return_raw_chat: True}\n"
        "trainer:\n  experiment_name: x-${data.max_prompt_length}-${oc.select:no.such,1}\n",
    )
    found = from_verl_arguments([*grpo, "data.max_response_length=16"], folder=tmp_path, name="mine")
    config = whole(found)
    assert (config.limits.context, config.limits.tokens_per_turn, config.train.lr) == (48, 16, 1e-3)
    assert config.output == "checkpoints/verl_examples/x-32-1"
    assert [left.key for left in found.unsupported] == ["hydra.searchpath"]


@pytest.mark.parametrize(
    ("files", "arguments", "told"),
    [
        ({}, {"folder": "/nowhere"}, "--config-path: there is no directory /nowhere"),
        ({}, {"name": "mine"}, "--config-name=mine needs --config-path"),
        ({"a": "x: 1"}, {"name": "b"}, "b.yaml cannot be read: No such file"),
        ({"a": "- 1"}, {"name": "a"}, "must contain a mapping; it contains [1]"),
        ({"a": "x: ["}, {"name": "a"}, "is not YAML"),
        ({"a": "defaults: [other]"}, {"name": "a"}, "the defaults list names other, but the file"),
        ({"a": "defaults: other"}, {"name": "a"}, "defaults must be a list; it is 'other'"),
        ({"a": "x: 1"}, {"name": "a", "overrides": ["nonsense"]}, "'nonsense' is not an override; write key=value"),
        ({"a": "x: 1"}, {"name": "a", "overrides": ["x.y=2"]}, "'x.y=2': x is 1 and has no keys"),
        ({"a": "x: 1"}, {"name": "a", "overrides": ["~z"]}, "'~z': the configuration has no key z"),
        ({"a": "x: 1"}, {"name": "a", "overrides": ["x=["]}, "'x=[': the value is not YAML"),
        ({"a": "data: {train_batch_size: many}"}, {"name": "a"}, "data.train_batch_size must be an integer; it is 'many'"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_read_says_why(
    files: dict[str, str], arguments: dict[str, Any], told: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        written(tmp_path / f"{name}.yaml", text)
    given = {**({"folder": tmp_path} if files else {}), **arguments}
    with pytest.raises(ConfigError) as refused:
        from_verl_arguments(given.pop("overrides", ()), **given)
    assert told in str(refused.value)


def test_an_interaction_file_named_in_a_configuration_is_read(grpo: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "i.yaml", {"interaction": [an_interaction()]})
    config = whole(from_verl_arguments([*grpo, f"{TURNS}.interaction_config_path={path}"]))
    assert config.environment.arguments == {"interactions": path}


def test_the_keys_of_the_page_are_carried() -> None:
    page = (Path(__file__).parents[3] / "docs" / "verl.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*)\|", page.partition("## Keys")[2], re.MULTILINE)
    named = {key for cell in cells for key in re.findall(r"`([a-z_0-9.]+)`", cell)}
    assert len(named) > 15
    placement = {
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "rollout.tensor_model_parallel_size",
        "rollout.data_parallel_size",
    }
    assert named - placement - {key.removeprefix("actor_rollout_ref.") for key in [*PLAIN, *HANDLED]} == set()


def test_an_evaluation_samples_as_verl_s(grpo: list[str], rows: str) -> None:
    held_out = [*grpo, f"data.val_files={rows}"]
    config = whole(from_verl_arguments(held_out))
    assert config.eval.sampling.model_dump(exclude_none=True) == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    keys = ["temperature=0.6", "top_p=0.9", "top_k=20", "n=4"]
    found = from_verl_arguments([*held_out, *(f"actor_rollout_ref.rollout.val_kwargs.{key}" for key in keys)])
    config = whole(found)
    assert config.eval.sampling.model_dump(exclude_none=True) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert (config.eval.samples_per_row, found.unsupported) == (4, [])


def test_the_objective_is_that_of_verl_s_trainer(grpo: list[str]) -> None:
    tools, interaction = f"{TURNS}.tool_config_path=t.yaml", f"{TURNS}.interaction_config_path=i.yaml"
    function = "custom_reward_function.path=f.py"

    def rewards(*keys: str) -> tuple[str | None, int, int]:
        found = from_verl_arguments([*grpo, *keys])
        config = whole(found)
        return config.environment.arguments.get("rewards"), len(config.reward.trajectory), len(found.assumptions)

    assert rewards(tools) == ("record", 1, 0)  # the grader alone
    assert rewards(tools, function) == ("record", 1, 0)
    assert rewards(interaction, function) == ("record", 1, 0)
    assert rewards(interaction) == (None, 0, 1)  # verl has no grader for most of them: said, not silently another one


def test_rounds_of_tools_are_bounded_as_since_v0_7(grpo: list[str]) -> None:
    tools = [*grpo, f"{TURNS}.tool_config_path=t.yaml", f"{TURNS}.max_user_turns=3"]
    assert whole(from_verl_arguments(tools)).limits.turns == 4
    assert whole(from_verl_arguments([*tools, f"{TURNS}.max_assistant_turns=2"])).limits.turns == 2
    assert whole(from_verl_arguments([*tools, f"{TURNS}.max_assistant_turns=9"])).limits.turns == 4


def test_several_files_are_one_data_set(grpo: list[str], rows: str, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(a_row(extra_info={"index": 7})) + "\n")
    found = from_verl_arguments(
        [*grpo, f"data.train_files=['{rows}','{other}']", f"data.val_files=['{other}','{rows}']"]
    )
    config = whole(found)
    assert (config.data.train, config.data.eval) == ([rows, str(other)], [str(other), rows])
    assert config.train.steps == 3 * (11 // 4)
    read = assembly.rows(config)
    assert [row.id for row in read] == [str(n) for n in range(1, 12)]
    assert read[-1]["extra_info"]["index"] == 7
    assert len(assembly.rows(config, held_out=True)) == 11


def test_overlong_prompts_are_left_out(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, "data.filter_overlong_prompts=True", "data.max_prompt_length=77"])
    assert (whole(found).data.max_prompt_tokens, found.unsupported) == (77, [])
    found = from_verl_arguments([*grpo, "data.filter_overlong_prompts=False"])
    assert (whole(found).data.max_prompt_tokens, found.unsupported) == (None, [])


def test_a_reward_function_may_stand_where_later_versions_have_it(grpo: list[str]) -> None:
    keys = ["reward.custom_reward_function.path=f.py", "reward.custom_reward_function.name=g", "reward.num_workers=8"]
    found = from_verl_arguments([*grpo, *keys])
    (use,) = whole(found).reward.trajectory
    assert use.arguments == {"path": "f.py", "name": "g"}
    assert [left.key for left in found.unsupported] == ["reward.num_workers"]
    both = from_verl_arguments([*grpo, *keys, "custom_reward_function.path=other.py"])
    assert "names another function: remove one of the two" in matters(both)["custom_reward_function.path"]


def test_hydra_s_own_directory_of_verl_s_configuration_is_not_read(grpo: list[str]) -> None:
    found = from_verl_arguments(grpo, folder="./config", name="ppo_megatron_trainer")
    assert found.recipe == from_verl_arguments(grpo).recipe


SCRIPT = """\
#!/bin/bash
set -x
PROJECT_DIR="$(pwd)"
export CONFIG_PATH="$PROJECT_DIR/conf"
BATCH=${BATCH:-4}
function now() {
    date '+%d-%H-%M'
}
NAME="run_$(now)"
# python3 -m verl.trainer.main_ppo commented=out
ACTOR=(
    actor_rollout_ref.model.path="some model"  # where it is
    actor_rollout_ref.actor.ppo_mini_batch_size=$BATCH
)
ACTOR+=(actor_rollout_ref.rollout.n=5)

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    --config-path="$CONFIG_PATH" \\
    --config-name 'mine' \\
    data.train_batch_size=$BATCH \\
    data.max_response_length=$((1024 * 3)) \\
    data.max_prompt_length=$(( (BATCH + 1) * 100 )) \\
    data.train_files="['$ROWS']" \\
    trainer.experiment_name=$NAME \\
    trainer.logger='["console","wandb"]' \\
    "${ACTOR[@]}" \\
    trainer.total_epochs=3 $@ 2>&1 | tee log.txt
"""


def test_a_shell_script_is_read_and_never_run(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").mkdir()
    written(tmp_path / "conf" / "mine.yaml", "defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}\n")
    (tmp_path / "run.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROWS", rows)
    found = from_verl_arguments(["run.sh", "trainer.total_epochs=1"])
    config = whole(found)
    assert (config.model.path, config.data.train, config.train.batch_size, config.train.group_size) == (
        "some model",
        rows,
        4,
        5,
    )
    assert (config.limits.response_tokens, config.limits.context) == (3072, 3572)
    assert (config.train.steps, matters(found)) == (2, {})  # what is given behind the script counts
    assert found.recipe["loggers"] == [{"name": "wandb", "run": "run_$(now)"}]
    (guessed,) = found.assumptions
    assert (guessed.key, guessed.value) == ("trainer.experiment_name", "run_$(now)")
    assert not (tmp_path / "log.txt").exists()
    assert main(["convert", "run.sh"]) == 0
    told = capsys.readouterr().out
    assert "# assumed: trainer.experiment_name='run_$(now)': its value needs a shell" in told
    assert yaml.safe_load(told)["train"]["batch_size"] == 4


def test_every_tracker_can_be_converted_to() -> None:
    assert get_args(LoggerSection.model_fields["name"].annotation) == TRACKERS


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo hello", "has 0 commands with verl.trainer.main_ppo; it must have one"),
        ("python -m verl.trainer.main_ppo a=1\npython -m verl.trainer.main_ppo b=1", "has 2 commands"),
    ],
)
def test_a_script_without_the_one_command_says_so(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match=told):
        from_verl_arguments([str(tmp_path / "run.sh")])
    with pytest.raises(ConfigError, match="cannot be read"):
        from_verl_arguments([str(tmp_path / "none.sh")])


def test_a_function_of_the_reward_manager_batch_becomes_a_function_of_the_batch(grpo: list[str]) -> None:
    for manager in ("reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name"):
        found = from_verl_arguments([*grpo, "custom_reward_function.path=f.py", f"{manager}=batch"])
        use = {"use": "turnwise.compat.verl:CustomBatchScore", "arguments": {"path": "f.py", "name": "compute_score"}}
        assert found.recipe["reward"] == {"batch": [use]}
        assert manager not in matters(found)
    assert "reward_manager.name" in matters(from_verl_arguments([*grpo, "reward_manager.name=dapo"]))


@pytest.mark.parametrize(
    ("keys", "cluster"),
    [
        (["trainer.n_gpus_per_node=1", "trainer.nnodes=1"], None),
        (["trainer.n_gpus_per_node=4"], {"launcher": "local", "trainers": 4}),
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], {"launcher": "torchrun"}),
        (
            ["trainer.n_gpus_per_node=8", "trainer.nnodes=2", f"{ACTOR}.fsdp_config.fsdp_size=8"],
            {"launcher": "torchrun", "mesh": {"shard": 8}},
        ),
        (
            ["trainer.n_gpus_per_node=8", f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
            {"launcher": "local", "trainers": 8, "mesh": {"tensor": 4}},
        ),
        (
            [
                "trainer.n_gpus_per_node=8",
                f"{ACTOR}.ulysses_sequence_parallel_size=4",
                f"{ACTOR}.fsdp_config.fsdp_size=-1",
            ],
            {"launcher": "local", "trainers": 8, "mesh": {"context": 4}},
        ),
        (
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=8"],
            {"launcher": "local", "trainers": 4},
        ),
        (
            [
                "trainer.n_gpus_per_node=2",
                f"{ACTOR}.fsdp_config.param_offload=True",
                f"{ACTOR}.fsdp_config.reshard_after_forward=False",
                f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",
                f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=fp32",
            ],
            {
                "launcher": "local",
                "trainers": 2,
                "fsdp": {
                    "offload": "cpu",
                    "reshard_after_forward": False,
                    "param_dtype": "bfloat16",
                    "reduce_dtype": "float32",
                },
            },
        ),
    ],
)
def test_numbers_of_gpus_and_how_fsdp_divides_a_model_are_carried(
    keys: list[str], cluster: dict[str, Any] | None, grpo: list[str]
) -> None:
    found = from_verl_arguments([*grpo, *keys])
    assert found.recipe.get("cluster") == cluster
    assert not {left.key for left in found.unsupported} & {key.partition("=")[0] for key in keys}
    if cluster is not None:
        assert whole(found).cluster.launcher == cluster["launcher"]


def test_the_optimizer_of_one_gpu_leaves_it_while_conversations_are_sampled(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, "trainer.n_gpus_per_node=1", f"{ACTOR}.fsdp_config.optimizer_offload=True"])
    assert whole(found).train.optimizer.offload == "sampling"
    assert not [left for left in found.unsupported if left.key.endswith("optimizer_offload")]


@pytest.mark.parametrize(
    ("keys", "engine"),
    [
        (["tensor_model_parallel_size=1"], None),
        (["tensor_model_parallel_size=2"], {"name": "vllm", "tensor_parallel": 2, "data_parallel": 1, "replicas": 4}),
        (
            [
                "tensor_model_parallel_size=2",
                "data_parallel_size=2",
                "gpu_memory_utilization=0.6",
                "enforce_eager=True",
            ],
            {
                "name": "vllm",
                "tensor_parallel": 2,
                "data_parallel": 2,
                "replicas": 2,
                "arguments": ["--gpu-memory-utilization", "0.6", "--enforce-eager"],
            },
        ),
    ],
)
def test_servers_on_several_gpus_are_carried(keys: list[str], engine: dict[str, Any] | None, grpo: list[str]) -> None:
    of_rollout = [f"actor_rollout_ref.rollout.{key}" for key in keys]
    machine = ["trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.name=vllm"]
    found = from_verl_arguments([*grpo, *machine, *of_rollout])
    assert found.recipe.get("engine") == (None if engine is None else {**engine, "sleep": True})
    assert not {left.key for left in found.unsupported} & {key.partition("=")[0] for key in of_rollout}
    if engine is not None:
        config = whole(found)
        assert (config.cluster.trainers, config.engine.sleep) == (8, True)
        assert any(assumed.key == "engine.name" for assumed in found.assumptions)
        kept = from_verl_arguments([*grpo, *machine, *of_rollout, "actor_rollout_ref.rollout.free_cache_engine=False"])
        assert "sleep" not in kept.recipe["engine"]


def test_servers_that_do_not_fit_the_machine_are_refused(grpo: list[str]) -> None:
    name, tensor = "actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size"
    found = from_verl_arguments([*grpo, "trainer.n_gpus_per_node=6", name, f"{tensor}=4"])
    reasons = {left.key: left.reason for left in found.unsupported}
    assert reasons[tensor].startswith("a server needs 4 x 1 GPUs, and trainer.n_gpus_per_node=6")
    assert "engine" not in found.recipe


def test_several_machines_are_started_by_a_command_that_the_report_names(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, "trainer.n_gpus_per_node=4", "trainer.nnodes=2"])
    (told,) = [assumed.reason for assumed in found.assumptions if assumed.key == "cluster.launcher"]
    assert "torchrun --nnodes 2 --nproc-per-node 4 -m turnwise train" in told


def test_the_arguments_of_the_chat_template_are_those_of_the_model(grpo: list[str]) -> None:
    found = from_verl_arguments([*grpo, "+data.apply_chat_template_kwargs.enable_thinking=False"])
    assert found.recipe["model"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert not matters(found)
    assert (
        "chat_template_kwargs" not in from_verl_arguments([*grpo, "data.apply_chat_template_kwargs={}"]).recipe["model"]
    )


def test_a_script_keeps_variables_that_are_not_set_as_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_NUM_NODES", "TP", "DATA", "LR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.sh").write_text(
        "ENGINE=${1:-vllm}\n"
        "python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\\n"
        "  algorithm.adv_estimator=grpo actor_rollout_ref.model.path=M data.train_files=$DATA/train.parquet \\\n"
        "  actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.rollout.name=$ENGINE \\\n"
        "  actor_rollout_ref.rollout.tensor_model_parallel_size=${TP} data.train_batch_size=256 \\\n"
        "  actor_rollout_ref.rollout.n=5 trainer.nnodes=$SLURM_JOB_NUM_NODES trainer.n_gpus_per_node=8 \\\n"
        "  actor_rollout_ref.actor.use_kl_loss=$USE_KL trainer.total_epochs=2 ${EXTRA:+trainer.save_freq=5} $@\n"
    )
    monkeypatch.chdir(tmp_path)
    found = from_verl_arguments(["run.sh"])
    assert found.recipe["data"]["train"] == "${DATA}/train.parquet"
    assert found.recipe["train"]["lr"] == "${LR}"
    assert (found.recipe["train"]["epochs"], "save_freq" in str(found.converted)) == (2, False)
    assert (found.recipe["engine"]["name"], found.recipe["engine"]["tensor_parallel"]) == ("vllm", "${TP}")
    assumed = {key.key: key.reason for key in found.assumptions}
    assert "verl's own configuration, whose defaults are used" in assumed["--config-path"]
    assert "--nnodes ${SLURM_JOB_NUM_NODES} --nproc-per-node 8" in assumed["cluster.launcher"]
    for key in ("data.train_files", "actor_rollout_ref.actor.optim.lr"):
        assert "the recipe refers to it: set it before you train" in assumed[key]
    reason = matters(found)["actor_rollout_ref.actor.use_kl_loss"]  # compared with verl's values, not kept
    assert "depends on a variable that is not set here" in reason
    monkeypatch.setenv("TP", "4")
    assert from_verl_arguments(["run.sh"]).recipe["engine"]["replicas"] == 2


def test_a_number_that_a_variable_is_needed_for_is_reported(grpo: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"python3 -m verl.trainer.main_ppo {' '.join(grpo)} actor_rollout_ref.actor.ppo_mini_batch_size=$MINI\n"
    )
    found = from_verl_arguments([str(tmp_path / "run.sh")])
    assert "the variable is not set here" in matters(found)["actor_rollout_ref.actor.ppo_mini_batch_size"]


def test_a_value_that_the_recipe_cannot_have_is_refused_by_its_key(grpo: list[str]) -> None:
    key = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"
    found = convert_command("verl", [*grpo, f"{key}=nonsense"])
    assert matters(found)[key] == (
        "tokenization_sanity_check: input should be 'strict', 'ignore_strippable' or 'disable'"
    )
    assert "tokenization_sanity_check" not in found.recipe
    assert matters(convert_command("verl", [*grpo, f"{key}=disable"])) == {}


def test_convert_lists_what_each_key_became(
    grpo: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    actor = "actor_rollout_ref.actor"
    few = [*grpo, "data.return_raw_chat=True", f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_type=low_var_kl"]
    few += ["trainer.n_gpus_per_node=1", "data.max_response_length=256", "data.max_prompt_length=100"]
    became = [
        "converted: actor_rollout_ref.rollout.n=5 -> train.group_size=5",
        "converted: data.max_response_length=256 -> limits.response_tokens=256, limits.context=356",
        "converted: data.return_raw_chat=True -> rows are always conversations",
        f"converted: {actor}.kl_loss_type=low_var_kl -> loss.kl_estimator=k3 (the default)",
        "converted: trainer.n_gpus_per_node=1 -> nothing: one process is the default",
    ]
    assert main(["convert", *few, "--out", "few.yaml"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert set(became) <= set(told)
    assert sum(line.startswith("converted: ") for line in told) == len(few)
    assert told[-1].startswith(f"{len(few)} keys converted and 0 left out")
    assert "converted:" not in (tmp_path / "few.yaml").read_text()
    assert main(["convert", *few]) == 0
    assert "converted:" not in capsys.readouterr().out
    assert main(["convert", *few, "--verbose"]) == 0
    told = capsys.readouterr().out
    assert {f"# {line}" for line in became} <= set(told.splitlines())
    assert yaml.safe_load(told) == yaml.safe_load((tmp_path / "few.yaml").read_text())

    many = [*(f"{key}={json.dumps(DEFAULTS[key])}" for key in DEFAULTS if DEFAULTS[key] is not None), *few]
    assert main(["convert", *many, "--out", "many.yaml"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("converted: ") for line in told)
    assert "keys converted (--verbose lists what each became, also without --out) and " in told[-1]
    assert main(["convert", *many, "--out", "listed.yaml", "--verbose"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert set(became) <= set(told)
    assert told[-1].startswith(f"{sum(line.startswith('converted: ') for line in told)} keys converted and ")


def test_a_listed_value_is_on_one_line_and_of_an_option_that_the_recipe_has() -> None:
    converted = {
        "a": "train.steps, train.steps, loggers",
        "b": "the column x",
        "c": "loss.name=sapo (as x)",
        "d": "seed",
    }
    report = ConversionReport(
        {"train": {"steps": 3}, "loggers": [1], "loss": {"name": "sapo"}, "seed": ""},
        converted,
        values={"a": "x" * 70, "b": "two\nlines", "c": None, "d": -0.5},
    )
    assert report.became() == [
        f"a={'x' * 57}... -> train.steps=3, loggers",
        "b='two\\nlines' -> the column x",
        "c=None -> loss.name=sapo (as x)",
        "d=-0.5 -> seed=''",
    ]


def test_the_classes_that_the_recipe_names_are_tried(
    grpo: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"class_name": "verl.interactions.gsm8k_interaction.Gsm9kInteraction", "config": {}}
    written(tmp_path / "interaction.yaml", {"interaction": [entry]})
    words = [*grpo, "actor_rollout_ref.rollout.multi_turn.interaction_config_path=interaction.yaml"]
    words += ["custom_reward_function.path=score.py"]
    assert main(["convert", *words, "--out", "recipe.yaml"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "DOES NOT WORK HERE: environment.arguments.interactions='interaction.yaml'" in told
    assert "did you mean 'verl.interactions.gsm8k_interaction.Gsm8kInteraction'" in told
    assert "it could not be tried, because there is no file score.py here" in told
    assert "1 of its values do not work here" in told
    assert (tmp_path / "recipe.yaml").read_text().startswith("# DOES NOT WORK HERE")


def test_arrays_of_a_script_are_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(
        "long=$((1024 * 2))\n"
        "RAY=(ray_kwargs.ray_init.py_executable='uv -v run python3')\n"
        "ALL=(\n"
        "    algorithm.adv_estimator=grpo  # (as in the paper\n"
        "    data.max_prompt_length=$((long + 24))\n"
        "    data.train_files='a (1).parquet' actor_rollout_ref.model.path=M\n"
        "    '+actor_rollout_ref.actor.fsdp_config.plan={blocks.\\{*\\}:{}, head: {}}'\n"
        "    +trainer.whatever={a.\\{*\\}:{}\n"
        "    actor_rollout_ref.rollout.n=$((2 * 2))\n"
        "    trainer.total_epochs=1 model_engine=megatron distillation.enabled=False distillation.nnodes=1\n"
        ")\n"
        'python3 -m verl.trainer.main_ppo "${ALL[@]}" "${RAY[@]}"\n'
    )
    found = from_verl_arguments(["run.sh"])
    assert found.recipe["data"]["train"] == "a (1).parquet"
    assert found.recipe["train"]["group_size"] == 4
    assert found.recipe["train"]["epochs"] == 1
    assert matters(found) == {"trainer.whatever": "its value could not be read: set it in another way"}
    assert {key.key for key in found.unsupported} >= {"model_engine", "ray_kwargs.ray_init.py_executable"}


# On-policy distillation: the keys of verl's examples/on_policy_distillation_trainer.

LOSS_OF_TEACHER = "distillation.distillation_loss"
MODELS = "distillation.teacher_models"
DISTILLATION = [
    "distillation.enabled=True",
    "distillation.n_gpus_per_node=4",
    "distillation.nnodes=1",
    f"{MODELS}.teacher_model.model_path=T",
    f"{MODELS}.teacher_model.inference.name=vllm",
    f"{MODELS}.teacher_model.inference.gpu_memory_utilization=0.4",
    f"{LOSS_OF_TEACHER}.loss_mode=k1",
    f"{LOSS_OF_TEACHER}.topk=64",
    f"{LOSS_OF_TEACHER}.use_task_rewards=False",
    f"{LOSS_OF_TEACHER}.use_policy_gradient=True",
    f"{LOSS_OF_TEACHER}.loss_max_clamp=10.0",
    f"{LOSS_OF_TEACHER}.log_prob_min_clamp=-10.0",
]
SUPERVISED = [
    f"{LOSS_OF_TEACHER}.use_policy_gradient=False",
    f"{LOSS_OF_TEACHER}.loss_max_clamp=null",
    f"{LOSS_OF_TEACHER}.log_prob_min_clamp=null",
]


@pytest.mark.parametrize(
    ("keys", "teacher", "credit"),
    [
        ([], {"path": "T", "signal": "sampled", "clip": 10.0}, {"name": "none"}),
        ([f"{LOSS_OF_TEACHER}.loss_mode=k2", *SUPERVISED], {"path": "T", "signal": "sampled"}, {"name": "none"}),
        (
            [f"{LOSS_OF_TEACHER}.loss_mode=forward_kl_topk", *SUPERVISED],
            {"path": "T", "signal": "divergence", "divergence": "forward_kl", "top_k": 64},
            {"name": "none"},
        ),
        (
            [f"{LOSS_OF_TEACHER}.use_task_rewards=True", f"{LOSS_OF_TEACHER}.distillation_loss_coef=0.5"],
            {"path": "T", "coef": 0.5, "signal": "sampled", "clip": 10.0},
            {"name": "grpo", "scale": "std"},
        ),
        (
            # run_qwen3_8b_mopd_fsdp.sh; the entry teacher_model is ignored beside others
            [
                "distillation.teacher_key=data_source",
                f"+{MODELS}.gsm8k.key=openai/gsm8k",
                f"+{MODELS}.gsm8k.model_path=A",
                f"+{MODELS}.gsm8k.num_replicas=1",
                f"+{MODELS}.geo3k.key=hiyouga/geometry3k",
                f"+{MODELS}.geo3k.model_path=B",
            ],
            {
                "models": [{"name": "openai/gsm8k", "path": "A"}, {"name": "hiyouga/geometry3k", "path": "B"}],
                "column": "data_source",
                "signal": "sampled",
                "clip": 10.0,
            },
            {"name": "none"},
        ),
    ],
)
def test_distillation_becomes_a_teacher(
    keys: list[str], teacher: dict[str, Any], credit: dict[str, Any], grpo: list[str]
) -> None:
    found = from_verl_arguments([*grpo, *DISTILLATION, *keys])
    assert matters(found) == {}
    assert (found.recipe["teacher"], found.recipe["credit"]) == (teacher, credit)
    whole(found)
    given = {word.lstrip("+").partition("=")[0] for word in [*grpo, *DISTILLATION, *keys]}
    told = {*found.converted, *(left.key for left in found.unsupported)}
    assert {key for key in given if key.startswith("distillation")} <= told


def test_several_optimizer_steps_have_the_clipping_of_the_teacher_s_part(grpo: list[str]) -> None:
    keys = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", f"{LOSS_OF_TEACHER}.clip_ratio_high=0.3"]
    config = whole(from_verl_arguments([*grpo, *DISTILLATION, *keys]))
    assert (config.train.minibatches, config.loss.clip_low, config.loss.clip_high) == (2, 0.2, 0.3)


@pytest.mark.parametrize(
    ("keys", "key", "reason"),
    [
        ([f"{LOSS_OF_TEACHER}.loss_mode=k3"], f"{LOSS_OF_TEACHER}.loss_mode", "these can be converted: k1 with"),
        ([f"~{LOSS_OF_TEACHER}.loss_mode"], f"{LOSS_OF_TEACHER}.loss_mode", "these can be converted: k1 with"),
        (
            [f"{LOSS_OF_TEACHER}.loss_mode=forward_kl_topk", SUPERVISED[0]],
            f"{LOSS_OF_TEACHER}.loss_max_clamp",
            "the divergence has no bounds here",
        ),
        ([f"{MODELS}.teacher_model.model_path=null"], "distillation.enabled", "teacher_model needs model_path"),
        (
            ["actor_rollout_ref.actor.entropy_coeff=0.1"],
            "actor_rollout_ref.actor.entropy_coeff",
            "leaves this term out",
        ),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=2", f"{LOSS_OF_TEACHER}.use_task_rewards=True"],
            f"{LOSS_OF_TEACHER}.use_task_rewards",
            "verl clips the ratio of the teacher's part apart",
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "the loss vanilla in verl",
        ),
        (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator", "no critic is needed"),
    ],
)
def test_distillation_that_would_be_another_training_is_refused(
    keys: list[str], key: str, reason: str, grpo: list[str]
) -> None:
    assert reason in matters(from_verl_arguments([*grpo, *DISTILLATION, *keys]))[key]
