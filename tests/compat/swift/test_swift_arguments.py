"""Arguments of ms-swift, each read as its kind, become a recipe; what has no place in one is told, with its reason."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from turnwise.compat.conversion import ConversionReport
from turnwise.compat.swift import teacher_prompt
from turnwise.compat.swift.convert import COMPUTED, from_swift_arguments
from turnwise.compat.swift.read_arguments import ALIASES, ARGUMENT_TYPES, CHOICES, FIXED, LISTS, OPTIONS, read_arguments
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.types import Row, Trajectory, Turn

# Arguments of ms-swift become a recipe; what has no place in one is told, with its reason.


SCRIPT = """\
# Multi-turn on two machines; don't forget the server.
SYSTEM="Think first.
# then answer"

CUDA_VISIBLE_DEVICES=0 swift rollout \\
    --model Qwen/Qwen3-1.7B \\
    --multi_turn_scheduler tool_call_scheduler \\
    --vllm_max_model_len 4096 \\
    --max_turns 3 &

NPROC_PER_NODE=2 nohup swift rlhf \\
    --rlhf_type grpo \\
    --model Qwen/Qwen3-1.7B \\
    --tuner_type full \\
    --external_plugins plugin.py more.py \\
    --reward_funcs accuracy mine --reward_weights 1.0 0.5 \\
    --vllm_mode server --use_vllm true \\
    --torch_dtype bfloat16 \\
    --dataset data/math.jsonl#500 --columns '{"question": "query"}' \\
    --system "$SYSTEM" \\
    --max_completion_length 1024 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 4 \\
    --num_generations 8 --num_iterations 2 \\
    --learning_rate 1e-6 --lr_scheduler_type constant_with_warmup --warmup_ratio 0.1 --max_steps 80 \\
    --temperature 1.0 --top_k -1 --stop_words "Observation:" \\
    --beta 0.001 --epsilon 0.2 --epsilon_high 0.28 \\
    --save_steps 10 --output_dir out > log.txt 2>&1
"""

FULL = "--rlhf_type grpo --model M --dataset d.jsonl --tuner_type full --max_steps 5"


def converted(text: str) -> ConversionReport:
    return from_swift_arguments(shlex.split(text))


def left(found: ConversionReport) -> dict[str, bool]:
    return {one.key: one.changes_training for one in found.unsupported}


def valid(found: ConversionReport) -> Config:
    config = Config.model_validate(found.recipe)
    refuse_without_effect(config)
    return config


FULL = "--rlhf_type grpo --model M --dataset d.jsonl --tuner_type full --max_steps 10 "


def test_a_script_with_both_commands_becomes_one_recipe(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    found = from_swift_arguments(str(script))
    valid(found)
    plugins = ["plugin.py", "more.py"]
    assert found.recipe == {
        "model": {"path": "Qwen/Qwen3-1.7B", "dtype": "bfloat16"},
        "data": {
            "train": "data/math.jsonl",
            "max_rows": 500,
            "columns": {"prompt": "question"},
            "system_prompt": "Think first.\n# then answer",
        },
        "environment": {
            "use": "turnwise.compat.swift:scheduler",
            "arguments": {
                "name": "tool_call_scheduler",
                "max_turns": 3,
                "external_plugins": plugins,
                "tokenizer": "Qwen/Qwen3-1.7B",  # a plugin may register its own by the name of one of ours
            },
        },
        "reward": {
            "batch": [
                {
                    "use": "turnwise.compat.swift:Reward",
                    "name": "accuracy",
                    "arguments": {"use": "accuracy", "external_plugins": plugins},
                },
                {
                    "use": "turnwise.compat.swift:Reward",
                    "name": "mine",
                    "arguments": {"use": "mine", "external_plugins": plugins},
                    "weight": 0.5,
                },
            ]
        },
        "sampling": {"temperature": 1.0, "top_k": 0, "stop": ["Observation:"]},
        "limits": {"turns": 3, "tokens_per_turn": 1024, "context": 4096},
        "credit": {"name": "grpo", "scale": "std"},
        "cluster": {"launcher": "local", "trainers": 2},
        "train": {
            # 2 processes, 4 each, 4 such batches a generation: 32 conversations, in two optimizer steps, twice
            "batch_size": 4,
            "group_size": 8,
            "minibatches": 2,
            "ppo_epochs": 2,
            "steps": 20,
            "lr": 1e-6,
            "lr_schedule": "constant",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "betas": [0.9, 0.95],
        },
        "loss": {"kl_coef": 0.001, "clip_low": 0.2, "clip_high": 0.28, "normalizer": "trajectory"},
        "seed": 42,
        "checkpoint": {"every": 10},
        "output": "out",
        "engine": {"name": "vllm"},
        "rollout_server": {"url": "http://127.0.0.1:8000"},
    }
    assert left(found) == {"CUDA_VISIBLE_DEVICES": False}


def test_every_argument_is_either_carried_or_left_with_a_reason() -> None:
    words = FULL + (
        "--vllm_mode colocate --deepspeed zero3 --report_to wandb swanlab clearml --run_name first --lora_rank 8 "
        "--made_up 3 --kl_in_reward true "
        "--loss_type cispo --advantage_estimator rloo --epsilon 0.2 --truncation_strategy left --seed 7 --data_seed 8"
    )
    found = converted(words)
    given = set(read_arguments(shlex.split(words)).values)
    assert given == set(found.converted) | {one.key for one in found.unsupported}
    assert set(found.converted) & {one.key for one in found.unsupported} == {"report_to"}
    assert all(one.reason for one in found.unsupported)
    assert found.recipe["loggers"] == [{"name": "wandb", "run": "first"}, {"name": "swanlab", "run": "first"}]
    assert left(found) == {
        "deepspeed": False,
        "report_to": False,  # clearml
        "lora_rank": False,  # no effect with tuner_type full
        "made_up": True,
        "loss_type": True,
        "epsilon": False,  # one optimizer step on each batch
        "truncation_strategy": True,
        "data_seed": False,
    }
    assert {one.key for one in found.refused()} == {key for key, matters in left(found).items() if matters}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--dynamic_sample true", {"dynamic_sampling": 3}),
        ("--dynamic_sample true --max_resample_times 5", {"dynamic_sampling": 5}),
        ("--dynamic_sample false --max_resample_times 5", {}),
        ("--overlong_filter true", {"overlong_filter": True}),
    ],
)
def test_filters_of_samples_are_converted(words: str, expected: dict[str, object]) -> None:
    found = converted(f"{FULL} {words}")
    assert {name: found.recipe["train"].get(name) for name in expected} == expected
    assert ("dynamic_sampling" in found.recipe["train"]) == ("dynamic_sampling" in expected)


@pytest.mark.parametrize(
    ("words", "in_loss", "in_reward"),
    [
        ("", 0.04, 0.0),
        ("--beta 0.1 --kl_in_reward true", 0.0, 0.1),
        ("--beta 0.1 --kl_in_reward false --advantage_estimator rloo", 0.1, 0.0),
        ("--beta 0.1 --advantage_estimator rloo", 0.0, 0.1),  # the default of rloo
        ("--beta 0 --kl_in_reward true", 0.0, 0.0),
        ("--beta 0.1 --kl_in_reward true --scale_rewards gdpo", 0.1, 0.0),  # also in ms-swift
    ],
)
def test_the_divergence_is_in_the_loss_or_in_the_reward(words: str, in_loss: float, in_reward: float) -> None:
    found = converted(f"--model M --dataset d --max_steps 10 {words}")
    config = Config.model_validate(found.recipe)
    assert (config.loss.kl_coef, config.reward.kl.coef) == (in_loss, in_reward)
    assert config.reward.kl.estimator == "k1"
    assert not found.refused()


def test_the_reference_model_is_converted() -> None:
    words = "--model M --dataset d --max_steps 1000 --tuner_type full --ref_model R --num_iterations 2"
    found = converted(f"{words} --sync_ref_model true --ref_model_sync_steps 64 --ref_model_mixup_alpha 0.5")
    reference = Config.model_validate(found.recipe).reference
    assert (reference.path, reference.sync_every, reference.sync_weight) == ("R", 32, 0.5)
    assert not found.refused()
    idle = converted(f"{words} --ref_model_sync_steps 64")
    assert [str(key) for key in idle.unsupported] == [
        "ref_model_sync_steps=64: it has no effect without sync_ref_model"
    ]


def test_what_is_not_given_has_the_default_of_ms_swift() -> None:
    found = converted("--model M --dataset d --max_steps 10")
    config = Config.model_validate(found.recipe)
    assert (config.sampling.temperature, config.limits.tokens_per_turn) == (0.9, 512)
    assert (config.loss.kl_coef, config.train.lr, config.train.group_size) == (0.04, 1e-5, 8)
    assert (config.train.lr_schedule, config.train.weight_decay, config.train.betas) == ("cosine", 0.1, (0.9, 0.95))
    assert (config.loss.normalizer, config.train.batch_size, config.seed) == ("trajectory", 2, 42)
    assert config.data.columns == {"prompt": "messages"}
    assert found.unsupported == []
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.target_modules) == (8, 32.0, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tuner_type lora --lora_rank 4 --lora_alpha 16", {"rank": 4, "alpha": 16.0}),
        ("--train_type lora --target_modules all-linear", {"rank": 8, "alpha": 32.0}),
        ("--target_modules q_proj v_proj --use_rslora true", {"target_modules": ["q_proj", "v_proj"], "rslora": True}),
        ("--use_dora true --lora_dropout 0", {"dora": True, "rank": 8}),
        ("--tuner_type full", {"rank": None}),
    ],
)
def test_an_adapter_is_converted(words: str, expected: dict[str, object]) -> None:
    found = converted(f"--model M --dataset d --max_steps 10 {words}")
    lora = Config.model_validate(found.recipe).model.lora.model_dump()
    assert {name: lora[name] for name in expected} == expected
    assert found.unsupported == []


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        ("--tuner_type adalora", "tuner_type", "all weights (full) or a LoRA adapter (lora)"),
        ("--lora_dropout 0.05", "lora_dropout", "there is no dropout"),
        ("--target_modules all-router", "target_modules", "name the layers"),
    ],
)
def test_an_adapter_that_turnwise_does_not_have_is_refused(words: str, key: str, message: str) -> None:
    (rejected,) = converted(f"--model M --dataset d --max_steps 10 {words}").refused()
    assert rejected.key == key
    assert message in rejected.reason


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("--loss_type dapo", "loss.normalizer", "token"),
        ("--scale_rewards none", "credit.scale", "none"),
        ("--scale_rewards false", "credit.scale", "none"),
        ("--completion_length_limit_scope total --max_completion_length 64", "limits.tokens", 64),
        ("--async_generate true", "train.max_staleness", 1),
        ("--top_k 50", "sampling.top_k", 50),
        ("--dtype float32", "model.dtype", "float32"),
        ("--generation_batch_size 64", "train.batch_size", 8),
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", "train.batch_size", 4),
        ("--dataset a/b:sub#10", "data.subset", "sub"),
        ("--val_dataset e.jsonl#5 --eval_steps 2", "eval.every", 2),
        ("--val_dataset e.jsonl#5", "eval.max_rows", 5),
        ("--multi_turn_scheduler math_tip_trick --loss_scale last_round", "loss_mask", "last_round"),
        ("--multi_turn_scheduler math_tip_trick", "limits.turns", 100),
        ("--use_gym_env true --gym_env g --max_turns 4", "environment.arguments.name", "gym_scheduler"),
        ("--gym_env g --context_manager c", "environment.arguments.context_manager", "c"),
        ("--gym_env g --reward_weights 2", "environment.arguments.gym_weight", 2.0),
        ("--multi_turn_scheduler mine --external_plugins p.py", "environment.arguments.tokenizer", "M"),
        ("--warmup_steps 3", "train.warmup_steps", 3),
        ("--enable_thinking false", "model.chat_template_kwargs.enable_thinking", False),
        ("--enable_thinking", "model.chat_template_kwargs.enable_thinking", True),
        ('--reward_funcs \'["accuracy", "format"]\'', "reward.batch.1.name", "format"),
        ("--vllm_max_model_len=2048", "limits.context", 2048),
        ("--num_iterations 2 --epsilon 0.1", "loss.clip_high", 0.1),
        ("--num_iterations 2 --off_policy_sequence_mask_delta 0.5", "correction.off_policy_sequence_mask_delta", 0.5),
        ("--async_generate true --rollout_importance_sampling_mode token_mask", "correction.action", "mask"),
        ("--async_generate true --rollout_importance_sampling_mode sequence_mask", "correction.weight_level", "token"),
    ],
)
def test_an_argument_becomes_its_option(words: str, option: str, value: Any) -> None:
    found = converted(FULL + words)
    node: Any = found.recipe
    for part in option.split("."):
        node = node[int(part)] if part.isdigit() else node[part]
    assert node == value
    Config.model_validate(found.recipe)


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ("--loss_type bnpo", {"normalizer": "token"}),
        ("--loss_type dr_grpo", {"normalizer": "constant", "constant_length": 512}),
        (
            "--loss_type dr_grpo --max_completion_length 1000",
            {"normalizer": "constant", "constant_length": 1000},
        ),
        # the largest weight is epsilon_high in ms-swift, and 1 + clip_high here
        (
            "--loss_type cispo --epsilon_high 5 --num_iterations 2",
            {"name": "cispo", "normalizer": "token", "clip_low": 1.0, "clip_high": 4.0},
        ),
        ("--loss_type cispo --epsilon_high 5", {"name": "cispo", "normalizer": "token"}),
        (
            "--loss_type sapo --tau_pos 2 --tau_neg 3 --num_iterations 2",
            {"name": "sapo", "normalizer": "trajectory", "tau_positive": 2.0, "tau_negative": 3.0},
        ),
        ("--loss_type sapo --tau_pos 2", {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}),
        (
            "--importance_sampling_level sequence --num_iterations 2",
            {"name": "gspo", "level": "sequence", "normalizer": "trajectory", "clip_low": 0.2, "clip_high": 0.2},
        ),
        (
            "--importance_sampling_level sequence_token --epsilon 3e-4 --epsilon_high 4e-4 --num_iterations 2",
            {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        ),
        ("--importance_sampling_level token", {"name": "ppo_clip"}),
        ("--num_iterations 2 --delta 2", {"name": "ppo_clip", "dual_clip": 2.0}),
        ("--num_iterations 2 --epsilon_high 0.28 --delta 1.28", {"clip_high": 0.28, "dual_clip": 1.28}),
        ("--delta 2", {"dual_clip": None}),  # one optimizer step on each batch
    ],
)
def test_a_loss_has_the_same_formula(words: str, loss: dict[str, Any]) -> None:
    found = converted(FULL + words)
    section = valid(found).loss.model_dump()
    assert {name: section[name] for name in loss} == loss
    assert found.refused() == []


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        ("token_truncate", {"action": "truncate", "level": "token", "high": 2.0}),
        ("token_mask --rollout_importance_sampling_threshold 3", {"action": "mask", "level": "token", "high": 3.0}),
        ("sequence_truncate", {"action": "truncate", "level": "geometric"}),
        ("sequence_mask", {"action": "mask", "level": "geometric", "weight_level": "token"}),
    ],
)
def test_a_correction_needs_other_probabilities_in_the_engine(words: str, correction: dict[str, Any]) -> None:
    found = converted(FULL + f"--torch_dtype bfloat16 --rollout_importance_sampling_mode {words}")
    section = valid(found).correction.model_dump()
    assert {name: section[name] for name in correction} == correction
    # the KL term has no weight here
    assert [one.key for one in found.assumptions] == ["columns", "rollout_importance_sampling_mode"]
    without_kl = converted(FULL + f"--torch_dtype bfloat16 --beta 0 --rollout_importance_sampling_mode {words}")
    assert [one.key for one in without_kl.assumptions] == ["columns"]
    exact = converted(FULL + f"--rollout_importance_sampling_mode {words}")
    assert "correction" not in exact.recipe
    assert exact.recipe["model"]["dtype"] == "float32"  # also on a GPU
    assert {one.changes_training for one in exact.unsupported} == {False}


@pytest.mark.parametrize(
    ("name", "ours"), [("adamw_torch_fused", "adamw"), ("paged_adamw_32bit", "adamw"), ("adamw_8bit", "adamw_8bit")]
)
def test_an_optimizer_is_converted(name: str, ours: str) -> None:
    found = converted(FULL + f"--optim {name}")
    assert valid(found).train.optimizer.name == ours
    assert found.unsupported == []


@pytest.mark.parametrize(("key", "node"), [("save_steps", "checkpoint"), ("eval_steps", "eval")])
def test_a_share_of_all_steps_is_left_with_the_reason(key: str, node: str) -> None:
    found = converted(FULL + f"--val_dataset e.jsonl --{key} 0.1")
    (one,) = [one for one in found.unsupported if one.key == key]
    assert (one.value, one.changes_training) == (0.1, False)
    assert one.reason == f"a value below 1 is a share of all steps there, but {node}.every is a number of steps: set it"
    assert key not in found.converted
    assert "every" not in found.recipe.get(node, {})
    valid(found)
    with pytest.raises(ConfigError, match=f"--{key}: '1.5' is not an integer"):
        converted(FULL + f"--val_dataset e.jsonl --{key} 1.5")


GKD = "--rlhf_type gkd --model M --dataset d.jsonl --tuner_type lora --max_steps 10 --lmbda 1 --temperature 1.0 "
OPD = FULL + "--teacher_model T --num_generations 1 --beta 0 "
SERVERS = """'[{"url": "http://t1:8000", "tags": ["math", "logic"]}, {"url": "http://t2:8001", "tags": ["code"]}]'"""


@pytest.mark.parametrize(
    ("words", "teacher"),
    [
        # as in examples/train/rlhf/gkd/multi_turn.sh, teacher_server.sh and examples/megatron/rlhf/gkd/dense.sh
        (
            GKD
            + "--teacher_model T --beta 0.5 --multi_turn_scheduler math_tip_trick --max_turns 2 --teacher_deepspeed zero3",
            {"signal": "divergence", "divergence": "jsd", "beta": 0.5, "path": "T"},
        ),
        (
            GKD + "--teacher_model_server http://localhost:8000 --gkd_logits_topk 64",
            {"signal": "divergence", "divergence": "jsd", "beta": 0.5, "top_k": 64, "url": "http://localhost:8000"},
        ),
        (GKD + "--teacher_model T --beta 1.0", {"signal": "divergence", "divergence": "reverse_kl", "path": "T"}),
        (
            GKD + "--teacher_model T --beta 0 --sft_alpha 0.1",
            {"signal": "divergence", "divergence": "forward_kl", "path": "T"},
        ),
        # examples/megatron/rlhf/gkd/opsd.sh: the model under the adapter; and without a teacher, the trained model itself
        (GKD + "--teacher_model M", {"signal": "divergence", "divergence": "jsd", "beta": 0.5, "path": "M"}),
        (
            GKD + "--gkd_logits_topk 20",
            {
                "signal": "divergence",
                "divergence": "jsd",
                "beta": 0.5,
                "top_k": 20,
                "context": "turnwise.compat.swift:teacher_prompt",
            },
        ),
        # examples/train/grpo/opd_rl.sh and examples/ray/grpo/opd_rl_colocate.yaml
        (OPD, {"signal": "sampled", "coef": 1.0, "path": "T"}),
        (OPD + "--teacher_kl_coef 0.5 --offload_teacher_model true", {"signal": "sampled", "coef": 0.5, "path": "T"}),
        (
            FULL + f"--temperature 1.0 --teacher_model_server {SERVERS} --teacher_tag_key teacher_tag",
            {
                "signal": "sampled",
                "coef": 1.0,
                "column": "teacher_tag",
                "models": [
                    {"name": "math", "url": "http://t1:8000"},
                    {"name": "logic", "url": "http://t1:8000"},
                    {"name": "code", "url": "http://t2:8001"},
                ],
            },
        ),
    ],
)
def test_distillation_becomes_a_teacher(words: str, teacher: dict[str, Any]) -> None:
    found = converted(words)
    assert found.recipe["teacher"] == teacher
    assert found.recipe["credit"] == {"name": "none"}
    assert found.refused() == []
    config = valid(found)
    assert config.train.group_size == (1 if "gkd" in words or "num_generations" in words else 8)
    assert config.loss.normalizer == ("token" if "gkd" in words else "trajectory")
    assert config.loss.kl_coef == (0.04 if SERVERS in words else 0)


def test_a_teacher_beside_rewards_keeps_the_estimator() -> None:
    found = converted(FULL + "--teacher_model T --reward_funcs accuracy")
    assert found.recipe["credit"] == {"name": "grpo", "scale": "std"}
    assert valid(found).teacher.coef == 1.0


def test_a_prompt_for_the_teacher_takes_the_place_of_the_last_message_of_the_user(tmp_path: Path) -> None:
    rows = tmp_path / "d.jsonl"
    rows.write_text(json.dumps({"messages": [], "teacher_prompt": "2+2? It is 4."}))
    found = from_swift_arguments(
        {"rlhf_type": "grpo", "model": "M", "dataset": str(rows), "tuner_type": "full", "max_steps": 2}
    )
    assert found.recipe["teacher"] == {
        "signal": "sampled",
        "coef": 1.0,
        "context": "turnwise.compat.swift:teacher_prompt",
    }
    system, first, answer, second = (
        {"role": role, "content": text}
        for role, text in [("system", "s"), ("user", "2+2?"), ("assistant", "5"), ("user", "No.")]
    )
    row = Row(id="0", messages=[], fields={"teacher_prompt": "2+2? It is 4."})

    def a_turn(index: int, message_index: int) -> Turn:
        return Turn(index=index, message_index=message_index, message={}, text="")

    trajectory = Trajectory(id="t", group="g", row=row, messages=[system, first, answer, second])
    told = {**first, "content": "2+2? It is 4."}
    assert teacher_prompt(trajectory, a_turn(0, 2)) == [system, told]
    assert teacher_prompt(trajectory, a_turn(1, 4)) == [system, first, answer, told]
    trajectory.row = Row(id="0", messages=[])
    assert teacher_prompt(trajectory, a_turn(0, 2)) == [system, first]


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (GKD + "--teacher_model T --lmbda 0.5", "lmbda", "only conversations of the student are learnt from"),
        ("--rlhf_type gkd --model M --dataset d.jsonl --teacher_model T", "lmbda", "set lmbda=1"),
        (GKD + "--teacher_model T --seq_kd true", "seq_kd", "no answers are sampled from the teacher"),
        (GKD + "--teacher_model T --top_p 0.9", "top_p", "the student must sample from its own"),
        (GKD + "--teacher_model T --num_generations 4", "num_generations", "one conversation of each row"),
        (GKD + "--teacher_model T NPROC_PER_NODE=4", "gkd_logits_topk", "with several processes"),
        (GKD, "gkd_logits_topk", "the trained model itself is over its likely tokens only"),
        (GKD + "--tuner_type full --teacher_model M", "teacher_model", "the teacher is the model that is trained"),
        (
            GKD + "--teacher_model T --teacher_adapters A",
            "teacher_adapters",
            "set teacher_model to the adapter's directory",
        ),
        (
            GKD + "--teacher_model_server http://h --gkd_logits_topk 5 --temperature 0.9",
            "temperature",
            "a server gives log-probabilities at temperature 1",
        ),
        (OPD + "--advantage_reweight rlsd", "advantage_reweight", "a teacher's signal is added to the advantages"),
        (
            FULL + f"--temperature 1.0 --teacher_model_server {SERVERS}",
            "teacher_tag_key",
            "chosen by a column of the data, and not by its data set",
        ),
    ],
)
def test_distillation_that_would_be_another_training_is_refused(words: str, key: str, reason: str) -> None:
    words, _, processes = words.partition("NPROC_PER_NODE")
    found = converted(f"NPROC_PER_NODE{processes} {words}" if processes else words)
    assert [one.changes_training for one in found.unsupported if one.key == key and reason in one.reason] == [True], (
        found
    )


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ("--rlhf_type dpo", "rlhf_type", "only GRPO and GKD can be converted"),
        ("--dataset a.jsonl#5 b.jsonl", "dataset", "a number of rows (#) belongs to one data set"),
        (
            "--reward_funcs cosines",
            "reward_funcs",
            "there is no reward function 'cosines'; there are accuracy, cosine, format",
        ),
        ("--reward_weights 1 2", "reward_weights", "2 weights for 0 rewards"),
        (
            "--importance_sampling_level turn",
            "importance_sampling_level",
            "it can be token, sequence or sequence_token",
        ),
        (
            "--importance_sampling_level sequence --torch_dtype bfloat16 --rollout_importance_sampling_mode token_mask",
            "importance_sampling_level",
            "the tokens of a sequence have different weights",
        ),
        (
            "--loss_type real",
            "loss_type",
            "these losses of ms-swift can be converted: grpo, bnpo, dapo, dr_grpo, cispo, sapo",
        ),
        ("--loss_type cispo", "loss_type", "0.2 scales the loss down: set epsilon_high above 1"),
        (
            "--loss_type cispo --epsilon_high 0.28",
            "loss_type",
            "the largest weight in ms-swift, not its distance from 1",
        ),
        (
            "--loss_type sapo --importance_sampling_level sequence",
            "importance_sampling_level",
            "a ratio for each token",
        ),
        ("--num_iterations 2 --delta 1.1", "delta", "only if delta is at least 1 + epsilon_high, here 1.2"),
        ("--num_iterations 2 --epsilon_high 0.5 --delta 1.4", "delta", "here 1.5"),
        ("--num_iterations 2 --importance_sampling_level sequence --delta 2", "delta", "loss.name=gspo has no bound"),
        ("--optim adafactor", "optim", "train.optimizer.name supports these values of ms-swift: adamw_torch"),
        ("--optim sgd", "optim", "train.optimizer.name supports"),
        (
            "--sync_ref_model true --tuner_type full --ref_model_sync_steps 3 --num_iterations 2",
            "ref_model_sync_steps",
            "not a multiple of the 2 optimizer steps of a training step",
        ),
        ("--tuner_type lora --sync_ref_model true", "sync_ref_model", "an adapter is trained"),
        ("--loss_scale last_round+hermes", "loss_scale", "hermes weighs parts of the text of a turn"),
        ("--split_dataset_ratio 0.1", "split_dataset_ratio", "held-out rows must be a separate file or split"),
        (
            "--learning_rat 1",
            "learning_rat",
            "turnwise knows no such argument of ms-swift; did you mean 'learning_rate'?",
        ),
        ("--reward_model R", "reward_model", "call the reward model in a reward function"),
    ],
)
def test_what_would_be_another_training_is_left_and_matters(words: str, key: str, reason: str) -> None:
    found = converted(FULL + words)
    assert [one.changes_training for one in found.unsupported if one.key == key and reason in one.reason] == [True]


def test_epochs_are_counted_in_steps_where_the_rows_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text(json.dumps({"query": "q", "solution": "1"}) + "\n" * 2 + '{"query": "r"}\n' * 9)
    words = "--model M --dataset d.jsonl --tuner_type full --num_generations 4 --per_device_train_batch_size 16 "
    found = converted(words + "--gradient_accumulation_steps 1 --num_train_epochs 2 --warmup_ratio 0.5")
    assert found.recipe["train"]["batch_size"] == 4
    assert found.recipe["train"]["steps"] == 5  # two passes over ten rows, four a step
    assert found.recipe["train"]["warmup_steps"] == 3
    assert found.recipe["data"]["columns"] == {"prompt": "query"}
    unknown = converted("--model M --dataset hub/name --tuner_type full --num_train_epochs 2")
    assert "steps" not in unknown.recipe["train"]
    assert (unknown.recipe["train"]["epochs"], left(unknown)) == (2, {})
    warm = converted("--model M --dataset hub/name --tuner_type full --num_train_epochs 2 --warmup_ratio 0.1")
    assert (warm.recipe["train"]["warmup_steps"], left(warm)) == (0.1, {})


def test_what_is_off_is_converted_as_off() -> None:
    found = converted(
        f"{FULL} --gradient_checkpointing false --dynamic_sample false --overlong_filter false --loss_scale default+base"
    )
    assert left(found) == {}
    config = valid(found)
    assert (config.model.gradient_checkpointing, config.train.dynamic_sampling, config.train.overlong_filter) == (
        False,
        0,
        False,
    )


@pytest.mark.parametrize(("given", "kernels"), [("true", "liger"), ("false", "auto")])
def test_fused_kernels_are_converted(given: str, kernels: str) -> None:
    found = converted(f"{FULL} --use_liger_kernel {given}")
    assert (valid(found).model.kernels, left(found)) == (kernels, {})


def test_the_options_of_experts_are_converted() -> None:
    config = valid(converted(f"{FULL} --router_replay_mode R3 --router_aux_loss_coef 0.01"))
    assert (config.model.router_replay, config.loss.router_aux_loss_coef) == (True, 0.01)
    assert valid(converted(f"{FULL} --moe_aux_loss_coeff 0.002")).loss.router_aux_loss_coef == 0.002
    assert not valid(converted(f"{FULL} --router_replay_mode disabled")).model.router_replay
    assert left(converted(f"{FULL} --router_replay_mode R2")) == {"router_replay_mode": True}


def test_weights_in_4_bits_are_converted() -> None:
    qlora = f"{FULL.replace('--tuner_type full', '--tuner_type lora')} --quant_method bnb --quant_bits 4"
    model = valid(converted(f"{qlora} --bnb_4bit_quant_type fp4 --bnb_4bit_use_double_quant false")).model
    assert (model.quantization.bits, model.quantization.type, model.quantization.double) == (4, "fp4", False)
    assert model.lora.rank == 8
    assert left(converted(f"{FULL} --quant_method hqq --quant_bits 4")) == {"quant_method": True, "quant_bits": True}
    assert left(converted(f"{FULL} --quant_method bnb --quant_bits 8")) == {"quant_method": True, "quant_bits": True}


def test_several_data_sets_are_a_list() -> None:
    assert valid(converted(f"{FULL} --dataset a.jsonl b.jsonl")).data.train == ["a.jsonl", "b.jsonl"]


def test_variables_that_are_not_set_stay_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCH", "4")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    Path("train.sh").write_text(
        "NNODES=$WORLD_SIZE NODE_RANK=$RANK torchrun --nproc_per_node=8 --nnodes=${WORLD_SIZE} swift/cli/rlhf.py \\\n"
        "  --rlhf_type grpo --model ${MODELS}/M --dataset d.jsonl --per_device_train_batch_size $BATCH --max_steps 5\n"
    )
    found = from_swift_arguments("train.sh")
    assert found.recipe["model"]["path"] == "${MODELS}/M"
    assert found.recipe["cluster"]["launcher"] == "torchrun"
    assumed = {one.key: one.reason for one in found.assumptions}
    assert "the recipe refers to it: set it before you train" in assumed["model"]
    assert "torchrun --nnodes ${WORLD_SIZE} --nproc-per-node 8" in assumed["cluster.launcher"]
    assert [(one.key, one.value) for one in found.refused()] == [("NNODES", "${WORLD_SIZE}")]
    assert found.recipe["train"]["batch_size"] == 4 * 8 // 8  # one machine: 32 conversations in groups of 8
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert from_swift_arguments("train.sh").recipe["train"]["batch_size"] == 8
    Path("train.sh").write_text("swift rlhf --model M --dataset d.jsonl --max_steps $STEPS\n")
    with pytest.raises(
        ConfigError, match=r"--max_steps: '\$\{STEPS\}' refers to a variable that neither the script nor"
    ):
        from_swift_arguments("train.sh")


PLUGIN = """
from swift.rollout.gym_env import Env, envs
from swift.rewards import ORM, orms

class Maze(Env):
    async def reset(self, config): return "Where?", {}, ""
    async def step(self, action): return "", 1.0, True, {}
    async def close(self): pass

envs["maze"] = Maze
orms["mine"] = type("Mine", (ORM,), {"__call__": lambda self, completions, **kwargs: [0.0 for _ in completions]})
"""


def test_names_that_no_plugin_registers_are_reported_when_they_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(
        f"{FULL} --multi_turn_scheduler gym_scheduler --external_plugins plugin.py --reward_funcs mine yours"
    )
    absent = from_swift_arguments([*words, "--gym_env", "maze"], try_names=True)
    assert absent.failing == []
    assert any("there is no file plugin.py here" in one.reason for one in absent.assumptions)
    Path("plugin.py").write_text(PLUGIN)
    found = from_swift_arguments([*words, "--gym_env", "maze"], try_names=True)
    assert [(one.key, one.value) for one in found.failing] == [("reward.batch.1.arguments.use", "yours")]
    wrong = from_swift_arguments([*words, "--gym_env", "mase"], try_names=True)
    assert (
        "there is no environment 'mase'; did you mean 'maze'?; registered are: math_env, maze"
        in wrong.failing[0].reason
    )
    assert from_swift_arguments([*words, "--gym_env", "mase"]).failing == []  # loads nothing


def test_arguments_may_stand_in_a_file_and_the_command_line_goes_over_it(tmp_path: Path) -> None:
    tree = {
        "rlhf_type": "grpo",
        "model": "M",
        "dataset": ["d.jsonl"],
        "learning_rate": "1e-6",
        "beta": 0.0,
        "top_p": 0.9,
    }
    (tmp_path / "args.json").write_text(json.dumps(tree))
    (tmp_path / "args.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in tree.items()))
    one, other = (from_swift_arguments(tmp_path / name) for name in ("args.json", "args.yaml"))
    assert one == other == from_swift_arguments(tree)
    assert one.recipe["train"]["lr"] == 1e-6
    over = from_swift_arguments(["swift", "rlhf", str(tmp_path / "args.yaml"), "--beta", "0.5"])
    assert over.recipe["loss"]["kl_coef"] == 0.5
    (twice,) = [one for one in over.unsupported if one.key == "beta"]
    assert (twice.value, twice.reason) == (0.0, "the commands give different values for it; 0.5 was used")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "there are no arguments of ms-swift"),
        (["train"], "'train' is no argument of ms-swift"),
        (["absent.yaml"], "absent.yaml cannot be read: No such file"),
        (["empty.sh"], "has neither `swift rlhf` nor `swift rollout` in it"),
        (["unset.sh"], r"'\$\(basename' needs a shell; write its value"),
        (["open.sh"], "its quotation is never closed"),
        (["list.yaml"], "must contain a mapping of arguments; it contains a list"),
    ],
)
def test_what_cannot_be_read_is_refused(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.sh").write_text("# swift rlhf --model M\necho done\n")
    Path("unset.sh").write_text("swift rlhf --model $(basename M)\n")
    Path("open.sh").write_text("swift rlhf --system 'never\n")
    Path("list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match=why):
        from_swift_arguments(words)


def test_the_tables_name_options_that_there_are() -> None:
    for option in [*OPTIONS.values(), *(option for option, _ in CHOICES.values())]:
        part: Any = Config
        for name in option.split("."):
            part = part.model_fields[name].annotation if isinstance(part, type) else part
    assert not set(OPTIONS) & set(FIXED)
    assert not set(ALIASES) & (set(OPTIONS) | set(FIXED))
    assert set(ALIASES.values()) & LISTS == {"external_plugins", "stop_words"}


def test_a_reward_of_ms_swift_that_is_not_here_is_reported_unless_a_plugin_has_one(tmp_path: Path) -> None:
    (tmp_path / "with.py").write_text("orms['toolbench'] = Mine\n")
    (tmp_path / "without.py").write_text("orms['other'] = Mine\n")
    for file, kept in (("with.py", ["toolbench", "accuracy"]), ("without.py", ["accuracy"])):
        found = converted(FULL + f"--reward_funcs toolbench accuracy --external_plugins {tmp_path / file}")
        assert [use["name"] for use in found.recipe["reward"]["batch"]] == kept
        assert ("reward_funcs" in left(found)) is (len(kept) == 1)


def test_the_arguments_of_the_page_are_known() -> None:
    page = (Path(__file__).parents[3] / "docs" / "swift.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*)\|", page.partition("| argument | option |")[2], re.MULTILINE)
    named = {key for cell in cells for key in re.findall(r"`([a-z_0-9]+)`", cell)}
    assert len(named) > 20
    assert named - {*OPTIONS, *CHOICES, *COMPUTED, *FIXED} == set()


COMMENTED = """
# don't forget: please run the following `swift rollout` script first
# CUDA_VISIBLE_DEVICES=0 \\
# swift rollout \\
#     --model Qwen/Qwen3-1.7B \\
#     --multi_turn_scheduler {scheduler} \\
#     --max_turns 3
# that's all

swift rlhf --rlhf_type grpo --model Qwen/Qwen3-1.7B --tuner_type full --dataset AI-MO/NuminaMath-TIR#10000 \\
    --vllm_mode server --reward_funcs accuracy --max_steps 3
"""


def guessed(found: ConversionReport) -> dict[str, Any]:
    return {one.key: one.value for one in found.assumptions}


def test_a_rollout_command_in_a_comment_is_read_and_reported(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(COMMENTED.format(scheduler="thinking_tips_scheduler"))
    found = from_swift_arguments(str(script))
    valid(found)
    assert found.recipe["environment"]["arguments"] == {"name": "thinking_tips_scheduler", "max_turns": 3}
    assert found.recipe["limits"]["turns"] == 3
    assert guessed(found)["swift rollout"] == "thinking_tips_scheduler"
    assert found.refused() == []

    # one that is no comment is taken instead
    script.write_text(COMMENTED.format(scheduler="mine") + "\nswift rollout --model Qwen/Qwen3-1.7B --max_turns 2\n")
    found = from_swift_arguments(str(script))
    assert "name" not in found.recipe["environment"]["arguments"]
    assert "swift rollout" not in guessed(found)
    assert [one.key for one in found.refused()] == []  # it says that there is no scheduler


def test_where_the_rollout_command_is_unknown_a_single_turn_is_marked(tmp_path: Path) -> None:
    (refused,) = converted(FULL + "--vllm_mode server").refused()
    assert (refused.key, refused.value) == ("vllm_mode", "server")
    assert "the arguments of `swift rollout`, which may name a scheduler, are not given" in refused.reason
    assert converted(FULL + "--vllm_mode colocate").refused() == []


def test_a_system_message_may_be_a_file_near_the_script_and_one_that_is_missing_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "train"
    folder.mkdir(parents=True)
    (folder / "prompt.txt").write_text("Think first.\n")
    for name in ("examples/train/prompt.txt", "prompt.txt"):
        (folder / "run.sh").write_text(f"swift rlhf {FULL} --system {name}")
        assert from_swift_arguments(folder / "run.sh").recipe["data"]["system_prompt"] == "Think first.\n"
    (folder / "run.sh").write_text(f"swift rlhf {FULL} --system absent/prompt.txt")
    found = from_swift_arguments(folder / "run.sh")
    assert "system_prompt" not in found.recipe["data"]
    assert [(one.key, one.value) for one in found.refused()] == [("system", "absent/prompt.txt")]
    assert converted(FULL + "--system 'Be short.'").recipe["data"]["system_prompt"] == "Be short."


def test_what_was_guessed_is_reported(tmp_path: Path) -> None:
    from turnwise.commands.convert import as_recipe

    words = "--rlhf_type grpo --tuner_type full --max_steps 1 --model Qwen/Qwen3-0.6B "
    found = converted(words + "--dataset AI-MO/NuminaMath-TIR")
    assert guessed(found) == {"columns": "messages", "model": "Qwen/Qwen3-0.6B", "dataset": "AI-MO/NuminaMath-TIR"}
    assert "# assumed: columns='messages': the data could not be read here" in as_recipe(found)
    assert "# assumed: model='Qwen/Qwen3-0.6B': ms-swift loads it from ModelScope" in as_recipe(found)
    assert guessed(converted(words + "--dataset AI-MO/NuminaMath-TIR --use_hf true")) == {"columns": "messages"}
    data, model = tmp_path / "d.jsonl", tmp_path / "model"
    data.write_text('{"query": "?"}\n')
    assert (
        guessed(converted(f"--rlhf_type grpo --tuner_type full --max_steps 1 --model {model} --dataset {data}")) == {}
    )


def test_scripts_of_megatron_and_files_for_ray_are_read(tmp_path: Path) -> None:
    file = tmp_path / "ray.yaml"
    file.write_text(
        "rlhf_type: grpo\nmodel: M\ndataset: d.jsonl\nvllm_mode: server\ncolocate_groups: [[train, rollout]]\n"
        "train: {gpus: 8, tuner_type: full, lr: 5e-5, train_iters: 120, micro_batch_size: 2, global_batch_size: 64}\n"
        "rollout: {gpus: 8, multi_turn_scheduler: tool_call_scheduler, max_turns: 3}\nnum_generations: 8\n"
        "steps_per_generation: 4\nattention_backend: flash\nno_save_optim: true\nrecompute_granularity: selective\n"
    )
    found = from_swift_arguments(file)
    train = found.recipe["train"]
    assert (train["lr"], train["batch_size"], train["minibatches"], train["steps"]) == (5e-5, 32, 4, 30)
    assert found.recipe["environment"]["arguments"]["name"] == "tool_call_scheduler"
    assert found.refused() == []


def test_a_script_for_a_launcher_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "A=1 torchrun --nproc_per_node=2 --node_rank=0 swift/cli/rlhf.py --rlhf_type grpo --model M --tuner_type full \\\n"
        "  --dataset d.jsonl --max_steps 1 --per_device_train_batch_size 8 --gradient_accumulation_steps 1\n"
    )
    found = from_swift_arguments(script)
    assert found.recipe["train"]["batch_size"] == 2
    assert left(found) == {"A": False}


@pytest.mark.parametrize(
    ("words", "cluster"),
    [
        ("", None),
        ("NPROC_PER_NODE=4", {"launcher": "local", "trainers": 4}),
        ("NPROC_PER_NODE=8 NNODES=2", {"launcher": "torchrun"}),
        ("NPROC_PER_NODE=2 --deepspeed zero3", {"launcher": "local", "trainers": 2}),
        (
            "NPROC_PER_NODE=2 --deepspeed zero2_offload",
            {"launcher": "local", "trainers": 2, "fsdp": {"reshard_after_forward": False, "offload": "cpu"}},
        ),
        ("NPROC_PER_NODE=2 --fsdp fsdp2", {"launcher": "local", "trainers": 2}),
        ("NPROC_PER_NODE=2 --fsdp hybrid_shard", {"launcher": "local", "trainers": 2}),
        ("NPROC_PER_NODE=8 NNODES=2 --fsdp hybrid_shard", {"launcher": "torchrun", "mesh": {"shard": 8}}),
        (
            "NPROC_PER_NODE=2 --fsdp 'shard_grad_op auto_wrap offload'",
            {"launcher": "local", "trainers": 2, "fsdp": {"reshard_after_forward": False, "offload": "cpu"}},
        ),
    ],
)
def test_numbers_of_processes_and_deepspeed_are_carried(words: str, cluster: dict[str, Any] | None) -> None:
    environment, _, flags = words.partition(" --")
    given = [*environment.split(), *shlex.split(f"--model M --tuner_type full {'--' + flags if flags else ''}")]
    found = from_swift_arguments(given)
    assert found.recipe.get("cluster") == cluster
    assert not {"deepspeed", "fsdp"} & {left.key for left in found.unsupported}
    assert any("ms-swift trains in" in assumed.reason for assumed in found.assumptions) == (cluster is not None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--deepspeed zero3", "has no effect with one process"),
        ("NPROC_PER_NODE=2 --deepspeed ds.json", "zero2, zero3, zero2_offload, zero3_offload"),
        ("--fsdp fsdp2", "has no effect with one process"),
        ("NPROC_PER_NODE=2 --fsdp whole", "fsdp2, full_shard, hybrid_shard, shard_grad_op, offload, auto_wrap"),
    ],
)
def test_a_configuration_of_deepspeed_that_is_not_carried_has_a_reason(words: str, reason: str) -> None:
    found = from_swift_arguments([*shlex.split(words), "--model", "M", "--tuner_type", "full"])
    (left,) = [left for left in found.unsupported if left.key in ("deepspeed", "fsdp")]
    assert reason in left.reason
    assert not left.changes_training


# Every argument of ms-swift is read as its kind, and an error names the argument, the value and the kind.


TYPES_FULL = "swift rlhf --rlhf_type grpo --model m --tuner_type full --dataset d.jsonl --use_hf true --max_steps 5 "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max_steps ten", "--max_steps: 'ten' is not an integer"),
        ("--num_generations 1.5", "--num_generations: '1.5' is not an integer"),
        ("--num_generations 0", "--num_generations: '0' is not an integer of at least 1"),
        ("--per_device_train_batch_size 0", "--per_device_train_batch_size: '0' is not an integer of at least 1"),
        (f"--max_steps {'9' * 40}", f"--max_steps: '{'9' * 40}' does not fit into 64 bits"),
        ("--max_steps 3 4", "--max_steps takes one value; there are 2: ['3', '4']"),
        ("--max_steps --beta 0", "--max_steps has no value; write --max_steps VALUE"),
        ("--beta nan", "--beta: 'nan' is not a number"),
        ("--adam_beta1 1,2", "--adam_beta1: '1,2' is not a number"),
        ("--num_train_epochs 0", "--num_train_epochs: '0' is not above 0"),
        ("--use_gym_env perhaps", "--use_gym_env: 'perhaps' is not true or false"),
        ("--columns [", "--columns: '[' is not a mapping in JSON"),
        ("--columns '{\"a\": 1}'", "--columns: '{\"a\": 1}' is not a mapping of texts"),
        ('--columns \'{"a": "b", "a": "c"}\'', "the key 'a' occurs twice"),
        ("--dataset a.jsonl#x", "--dataset a.jsonl#x: the number of rows: 'x' is not an integer"),
        ("--dataset a.jsonl#0", "--dataset a.jsonl#0: the number of rows: '0' is not an integer of at least 1"),
        ("--dataset '[[\"a\"]]'", "--dataset: ['a'] is not a text"),
        ("--reward_funcs accuracy --reward_weights half", "--reward_weights: 'half' is not a number"),
        ("NPROC_PER_NODE=0 swift rlhf --beta 0", "NPROC_PER_NODE: '0' is not an integer of at least 1"),
        ("'--a b' c", "'a b' is no name of an argument of ms-swift"),
    ],
)
def test_a_value_of_another_kind_is_an_error_with_its_argument(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_swift_arguments(shlex.split(words if words.startswith("NPROC") else TYPES_FULL + words))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("args.json", "[[[", "args.json is not JSON"),
        ("args.yaml", f"beta: {'[' * 3000}", "args.yaml is not accepted: it is nested deeper than 64 levels"),
        ("args.yaml", "beta: 1\nbeta: 2\n", "args.yaml is not YAML"),
        ("args.yaml", "max_steps: [3, 4]\n", "--max_steps: [3, 4] is not an integer"),
        ("args.yaml", "model: {a: 1}\n", "--model: {'a': 1} is not a text"),
        ("args.sh", "swift rlhf args.sh\n", "args.sh is named twice, or names itself"),
        (
            "args.sh",
            "A=$A$A$A$A$A$A$A$A$A$A\n" * 40,
            "its variables grow beyond",
        ),
        ("args.sh", "swift rlhf --system 'a \\", "its quotation is never closed"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_name(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        from_swift_arguments([name])
    assert message in str(error.value)


def test_the_files_that_arguments_name_are_read_with_an_error_too(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_bytes(b"\xff")
    for words in (f"--system {bad}", f"--reward_funcs mine --external_plugins {bad}"):
        with pytest.raises(ConfigError, match=r"bad\.py is not UTF-8"):
            from_swift_arguments(shlex.split(TYPES_FULL + words))


def test_every_argument_that_is_computed_with_or_becomes_an_option_has_a_kind() -> None:
    assert set(ARGUMENT_TYPES) >= {*OPTIONS, *COMPUTED}


def test_names_of_digits_and_stop_words_in_brackets_stay_texts(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"model": 7, "stop_words": ["[END]", "none?"], "num_generations": 8.0}))
    found = from_swift_arguments(file).recipe
    assert found["model"]["path"] == "7"
    assert found["sampling"]["stop"] == ["[END]", "none?"]
    assert found["train"]["group_size"] == 8
    words = from_swift_arguments(shlex.split(TYPES_FULL + "--stop_words [END] 12 --beta null --seed 007")).recipe
    assert words["sampling"]["stop"] == ["[END]", "12"]
    assert (words["loss"]["kl_coef"], words["seed"]) == (0.04, 7)
