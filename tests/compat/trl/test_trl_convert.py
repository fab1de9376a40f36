"""Configurations of TRL become recipes, and every key is converted or reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.cli import main
from turnwise.commands.convert import converted
from turnwise.compat.conversion import ConversionReport
from turnwise.compat.trl_convert import from_trl_arguments
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError

OPEN_R1: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-7B",
    "model_revision": "main",
    "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2",
    "chat_template": "{{ messages }}",
    "dataset_name": "open-r1/DAPO-Math-17k-Processed",
    "dataset_config": "all",
    "callbacks": ["push_to_hub_revision"],
    "benchmarks": ["math_500", "aime24"],
    "beta": 0.0,
    "bf16": True,
    "do_eval": False,
    "eval_strategy": "no",
    "use_vllm": True,
    "gradient_accumulation_steps": 16,
    "generation_batch_size": 512,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "hub_model_id": "open-r1/R1-Zero-Qwen-7B-Math",
    "hub_model_revision": "v08.00",
    "hub_strategy": "every_save",
    "learning_rate": 1.0e-06,
    "log_completions": True,
    "log_level": "info",
    "logging_first_step": True,
    "logging_steps": 1,
    "logging_strategy": "steps",
    "lr_scheduler_type": "constant_with_warmup",
    "mask_truncated_completions": True,
    "max_grad_norm": 0.2,
    "max_prompt_length": 1024,
    "max_completion_length": 8192,
    "max_steps": -1,
    "num_generations": 16,
    "num_iterations": 1,
    "num_train_epochs": 1,
    "output_dir": "data/R1-Zero-Qwen-7B-Math-v08.00",
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 4,
    "push_to_hub": True,
    "report_to": ["wandb"],
    "reward_funcs": ["accuracy", "format", "soft_format"],
    "reward_weights": [1.0, 0.25, 0.25],
    "save_strategy": "steps",
    "save_steps": 0.1,
    "save_total_limit": 1,
    "sync_ref_model": False,
    "seed": 42,
    "temperature": 1.0,
    "warmup_ratio": 0.1,
    "epsilon": 0.2,
}
"""open-r1's recipes/OpenR1-Zero-7B-Math/grpo/config_v08.00.yaml, with another template."""

OPEN_R1_SMALL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "torch_dtype": "bfloat16",
    "dataset_name": "AI-MO/NuminaMath-TIR",
    "dataset_configs": ["all"],
    "num_processes": 7,
    "bf16": True,
    "use_vllm": True,
    "vllm_device": "auto",
    "vllm_gpu_memory_utilization": 0.7,
    "do_eval": True,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "gradient_accumulation_steps": 16,
    "learning_rate": 2.0e-05,
    "lr_scheduler_type": "cosine",
    "max_prompt_length": 512,
    "max_completion_length": 1024,
    "num_generations": 7,
    "num_train_epochs": 1,
    "per_device_eval_batch_size": 32,
    "per_device_train_batch_size": 16,
    "save_strategy": "epoch",
    "warmup_ratio": 0.1,
}
"""Keys of its recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml."""

COUNTDOWN: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "model_revision": "main",
    "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2",
    "bf16": True,
    "tf32": True,
    "output_dir": "runs/qwen-r1-aha-moment",
    "dataset_id_or_path": "Jiayi-Pan/Countdown-Tasks-3to4",
    "max_steps": 400,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "gradient_checkpointing": True,
    "learning_rate": 1.0e-5,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "beta": 0.04,
    "max_prompt_length": 128,
    "max_completion_length": 768,
    "num_generations": 8,
    "use_vllm": True,
    "vllm_device": 3,
    "vllm_gpu_memory_utilization": 0.5,
    "report_to": ["tensorboard"],
    "save_strategy": "steps",
    "save_steps": 25,
    "seed": 42,
}
"""training/receipes/grpo-qwen-2.5-3b-deepseek-r1-countdown.yaml of philschmid/deep-learning-pytorch-huggingface."""

OPD: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "teacher_model_name_or_path": "Qwen/Qwen2.5-7B",
    "learning_rate": "1e-5",
    "dtype": "bfloat16",
    "max_prompt_length": "2048",
    "max_completion_length": "1024",
    "use_peft": None,
    "lora_target_modules": "q_proj v_proj k_proj o_proj",
    "log_completions": None,
    "per_device_train_batch_size": "8",
    "gradient_accumulation_steps": "2",
    "report_to": "wandb",
    "eval_strategy": "no",
}
"""Arguments of a script of a fork of TRL."""


def unsaid(report: ConversionReport, keys: Any) -> set[str]:
    """The keys of which the report says nothing."""
    return set(keys) - {*report.converted, *(one.key for one in report.unsupported)}


def loaded(report: ConversionReport, tmp_path: Path, model: Path, *overrides: str) -> None:
    """The recipe has no option without effect, where its model, its data and its rewards are here."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1"}\n' * 64)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(report.recipe))
    here = [f"model.path={model}", f"data.train={tmp_path / 'rows.jsonl'}", "data.subset=null", *overrides]
    refuse_without_effect(load(path, here)[0])


def test_a_configuration_of_open_r1(model: Path, tmp_path: Path) -> None:
    report = from_trl_arguments({**OPEN_R1, "num_processes": 8})
    assert unsaid(report, OPEN_R1) == set()
    assert report.recipe == {
        "model": {"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": True, "dtype": "bfloat16"},
        "sampling": {"temperature": 1.0},
        "train": {
            "group_size": 16,
            "ppo_epochs": 1,
            "lr": 1e-6,
            "max_grad_norm": 0.2,
            "lr_schedule": "constant",
            "batch_size": 32,  # 512 conversations in groups of 16; an optimizer step is on 4 * 16 * 8 of them
            "epochs": 1,
            "warmup_steps": 0.1,  # a share of all steps
            "overlong_filter": True,
        },
        "seed": 42,
        "output": "data/R1-Zero-Qwen-7B-Math-v08.00",
        "data": {"train": "open-r1/DAPO-Math-17k-Processed", "subset": "all", "max_prompt_tokens": 1024},
        "limits": {"tokens_per_turn": 8192, "turns": 1},
        "engine": {"name": "vllm"},
        "cluster": {"launcher": "local", "trainers": 8},
        "checkpoint": {"keep": 1},
        "loggers": [{"name": "wandb"}],
        "loss": {"normalizer": "token", "kl_coef": 0.0},
        "credit": {"name": "grpo", "scale": "std"},
        "correction": {"action": "mask", "level": "sequence", "high": 3.0},
    }
    assert [(one.key, one.value) for one in report.refused()] == [
        *(("reward_funcs", name) for name in OPEN_R1["reward_funcs"]),
        ("chat_template", "{{ messages }}"),
    ]
    loaded(report, tmp_path, model, "reward.trajectory=[rewards.py:exact]")


def test_steps_epochs_and_evaluations_of_other_configurations(model: Path, tmp_path: Path) -> None:
    small = from_trl_arguments(OPEN_R1_SMALL)
    assert unsaid(small, OPEN_R1_SMALL) == set()
    assert small.recipe["train"]["batch_size"] == 16 * 16 * 7 // 7
    assert small.recipe["data"]["eval"] == "AI-MO/NuminaMath-TIR"
    # as many conversations of a row as in training, as TRL does without num_generations_eval
    assert small.recipe["eval"] == {"every": 100, "samples_per_row": 7}
    assert small.recipe["engine"]["arguments"] == ["--gpu-memory-utilization", "0.7"]
    assert {"dataset_configs", "reward_funcs"} == {one.key for one in small.refused()}
    countdown = from_trl_arguments(COUNTDOWN)
    assert unsaid(countdown, COUNTDOWN) == set()
    assert countdown.recipe["train"] == {
        "group_size": 8,
        "ppo_epochs": 1,
        "lr": 1e-5,
        "lr_schedule": "cosine",
        "batch_size": 1,
        "steps": 400,
        "warmup_steps": 12,
    }
    assert (countdown.recipe["checkpoint"], countdown.recipe["loss"]["kl_coef"]) == ({"every": 25}, 0.04)
    assert {"dataset_name", "dataset_id_or_path", "reward_funcs"} == {one.key for one in countdown.refused()}
    loaded(countdown, tmp_path, model, "reward.trajectory=[rewards.py:exact]")


def test_distillation_from_a_command_line(model: Path, tmp_path: Path) -> None:
    words = [word for key, value in OPD.items() for word in (f"--{key}", *(value or "").split())]
    report = from_trl_arguments(words)
    assert unsaid(report, OPD) == set()
    assert report.recipe["teacher"] == {
        "path": "Qwen/Qwen2.5-7B",
        "signal": "divergence",
        "divergence": "reverse_kl",
    }
    assert (report.recipe["credit"], report.recipe["train"]["group_size"]) == ({"name": "none"}, 1)
    assert report.recipe["train"]["batch_size"] == 16
    assert report.recipe["model"]["lora"] == {
        "rank": 16,
        "alpha": 32.0,
        "target_modules": ["q_proj", "v_proj", "k_proj", "o_proj"],
    }
    assert {one.key for one in report.refused()} == {"lora_dropout", "dataset_name"}
    loaded(report, tmp_path, model, f"teacher.path={tmp_path / 'teacher'}")


@pytest.mark.parametrize(
    ("words", "teacher"),
    [
        (["gkd", "--beta", "0.5", "--lmbda", "1"], {"divergence": "jsd", "beta": 0.5}),
        (["gkd", "--beta", "0", "--lmbda", "1"], {"divergence": "forward_kl"}),
        (["distillation", "--beta", "0.0"], {"divergence": "forward_kl"}),
        (["trl", "distillation"], {"divergence": "reverse_kl"}),
    ],
)
def test_divergences_are_those_of_beta(words: list[str], teacher: dict[str, Any]) -> None:
    report = from_trl_arguments(
        [*words, "--model_name_or_path", "m", "--dataset_name", "d", "--teacher_model_name_or_path", "t"]
    )
    assert report.recipe["teacher"] == {"path": "t", "signal": "divergence", **teacher}
    assert not report.refused()


def test_a_teacher_on_a_server() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--teacher_model_server_url", "http://h:8001"]
    sampled = from_trl_arguments(words)
    assert sampled.recipe["teacher"] == {"url": "http://h:8001", "signal": "sampled"}
    assert not sampled.refused()
    likely = from_trl_arguments([*words, "--beta", "0", "--loss_top_k", "20"])
    assert likely.recipe["teacher"] == {
        "url": "http://h:8001",
        "signal": "divergence",
        "top_k": 20,
        "divergence": "forward_kl",
    }
    assert not likely.refused()
    assert [one.key for one in from_trl_arguments([*words, "--beta", "0.5"]).refused()] == ["beta"]
    assert [one.key for one in from_trl_arguments([*words, "--loss_add_tail", "false", "--beta", "0"]).refused()] == [
        "loss_add_tail"
    ]


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        ({"loss_type": "grpo"}, "loss.normalizer", "trajectory"),
        ({"loss_type": "dr_grpo", "max_completion_length": 99}, "loss.constant_length", 99),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2}, "loss.clip_high", 4.0),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.1, "num_iterations": 2}, "loss.tau_negative", 1.1),
        ({"importance_sampling_level": "sequence"}, "loss.name", "gspo"),
        ({"scale_rewards": False}, "credit.scale", "none"),
        ({"beta": 0.1, "num_iterations": 2}, "loss.kl_estimator", "k3_corrected"),
        ({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 8}, "reference.sync_every", 8),
        ({"warmup_steps": 0.5, "max_steps": 10}, "train.warmup_steps", 5),
        ({"max_tool_calling_iterations": 3}, "limits.turns", 4),
        ({"max_tool_calling_iterations": 3, "max_completion_length": 99}, "limits.tokens_per_turn", 99),
        ({"max_tool_calling_iterations": 3, "max_completion_length": 99}, "limits.response_tokens", 99),
        ({"max_completion_length": 99}, "limits.response_tokens", None),
        ({"shuffle_dataset": False}, "data.shuffle", False),
        ({"use_vllm": True, "vllm_mode": "server"}, "engine.url", "http://127.0.0.1:8000"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}, "correction.action", "truncate"),
        ({"use_peft": True, "load_in_4bit": True}, "model.quantization.bits", 4),
        ({"bf16": False}, "model.autocast", None),
        ({"seed": 1}, "model.autocast", True),
        (
            {"reward_funcs": ["think_format_reward"]},
            "reward.batch.0.arguments.function",
            "trl.rewards:think_format_reward",
        ),
        ({"reward_funcs": ["mine.rewards.exact"]}, "reward.batch.0.arguments.function", "mine.rewards:exact"),
        ({"datasets": [{"path": "a"}, {"path": "b"}]}, "data.train.1", "b"),
    ],
    ids=str,
)
def test_one_argument(arguments: dict[str, Any], option: str, value: Any) -> None:
    node: Any = from_trl_arguments(arguments).recipe
    for part in option.split("."):
        node = node[int(part)] if isinstance(node, list) else node.get(part, {})
    assert (node or None if value is None else node) == value


def test_unknown_names_and_values_are_named() -> None:
    report = from_trl_arguments({"learning_rat": 1e-5, "repetition_penalty": 1.1, "loss_type": "vespo"})
    reasons = {one.key: one.reason for one in report.refused()}
    assert "learning_rate" in reasons["learning_rat"]
    assert "distribution that is sampled" in reasons["repetition_penalty"]
    assert "these losses of TRL can be converted: grpo, bnpo, dapo, dr_grpo, cispo, sapo" in reasons["loss_type"]
    with pytest.raises(ConfigError, match="--learning_rate: 'fast' is not a number"):
        from_trl_arguments({"learning_rate": "fast"})
    with pytest.raises(ConfigError, match="'sft' is no argument of TRL"):
        from_trl_arguments(["trl", "sft"])
    with pytest.raises(ConfigError, match=r"starts a script, which is read, not run"):
        from_trl_arguments(["python", "train.py", "--lr", "1e-6"])
    with pytest.raises(ConfigError, match="there are no arguments of TRL"):
        from_trl_arguments([])


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
import torch

lr = 1e-6

def main():
    args = GRPOConfig(
        learning_rate=lr * 2, num_generations=4, beta=0.01, max_steps=-1,
        model_init_kwargs={"dtype": torch.bfloat16}, **more,
    )
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B", args=args, reward_funcs=[len], tools=[min],
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"]),
    ).train()

open("it ran", "w")
main()
"""


BESIDE = """
from beside_rewards import exact
from trl import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    args = GRPOConfig(output_dir="out", per_device_train_batch_size=4, num_generations=4, max_steps=1)
    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    GRPOTrainer(model="m", reward_funcs=exact, args=args, train_dataset=rows).train()
"""


def test_a_script_s_modules_are_found_beside_it_and_the_columns_of_its_rewards_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "grpo.py").write_text(BESIDE)
    rewards = "def exact(completions, answer, **kwargs): return [0.0 for _ in completions]"
    (tmp_path / "scripts" / "beside_rewards.py").write_text(rewards)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "2 + 3"}], "solution": "5"}\n' * 4)
    words = ["convert", "--from", "trl", "scripts/grpo.py"]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "function: scripts/beside_rewards.py:exact" in told
    assert (
        "# DOES NOT WORK HERE: the reward function 'beside_rewards.exact' has the parameter 'answer', which is" in told
    )
    rows.write_text(rows.read_text().replace("solution", "answer"))
    assert main(words) == 0
    assert "DOES NOT WORK HERE" not in capsys.readouterr().out


def test_a_printed_recipe_has_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file may be another person's: a terminal obeys what it prints."""
    owned = "\x1b]0;owned\x07\u202e"
    given = {
        "model_name_or_path": f"m{owned}",
        "dataset_name": "d",
        "report_to": f"w{owned}",
        "run_name": owned,
    }
    (tmp_path / "grpo.json").write_text(json.dumps(given), encoding="utf-8")
    assert main(["convert", "--from", "trl", str(tmp_path / "grpo.json")]) == 0
    printed = capsys.readouterr().out
    assert not set(printed) & set(owned[:1] + owned[-2:]), ascii(printed)
    assert main(["convert", "--from", "trl", str(tmp_path / "grpo.json"), "--verbose"]) == 0
    listed = capsys.readouterr().out
    assert not set(listed) & set(owned[:1] + owned[-2:]), ascii(listed)
    assert "# converted: dataset_name=d -> data.train=d\n" in listed
    assert "# left out: report_to=" in printed.replace("CHANGES THE TRAINING, ", "")
    assert yaml.safe_load(printed)["model"]["path"] == f"m{owned}"


def test_a_script_is_read_and_what_is_not_literal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    report = from_trl_arguments(["train.py", "--num_processes", "1"])
    assert not Path("it ran").exists()
    assert report.recipe["model"]["path"] == "Qwen/Qwen3-0.6B"
    assert report.recipe["model"]["lora"] == {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}
    assert (report.recipe["loss"]["kl_coef"], report.recipe["train"]["group_size"]) == (0.01, 4)
    reasons = {one.key: (one.value, one.reason.partition(":")[0]) for one in report.refused()}
    assert reasons["learning_rate"] == ("lr * 2", "not literal, line 10")
    assert reasons["model_init_kwargs"] == ("{'dtype': torch.bfloat16}", "not literal, line 11")
    assert reasons["**"] == ("more", "not literal, line 11")
    assert reasons["tools"] == ("[min]", "an object of the script, line 14")
    assert "lora_dropout" not in reasons


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "has no call of GRPOConfig"),
        ("GRPOConfig()\ntrl.GRPOConfig()", "has configurations in the lines 1, 2"),
        ("def :", "is no Python"),
        ("GRPOConfig(num_generations={1: 2})", "is a mapping"),
    ],
)
def test_a_script_without_one_configuration_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(ConfigError, match=told):
        from_trl_arguments([str(tmp_path / "train.py")])
    with pytest.raises(ConfigError, match="converted alone"):
        from_trl_arguments([str(tmp_path / "train.py"), "--beta", "0.1"])


@pytest.mark.parametrize(
    ("trainer", "lora"),
    [
        ("GRPOTrainer(name, reward, args)", None),
        ("GRPOTrainer(name, reward, args, peft_config=adapter)", 16),
        ("GRPOTrainer(name, reward, **more)", 16),
        ("GRPOTrainer(get_peft_model(base, adapter), reward, args)", 16),
        ("OwnTrainer(name, reward, args)", 16),
    ],
)
def test_an_adapter_of_a_script_is_that_of_its_trainer(trainer: str, lora: int | None, tmp_path: Path) -> None:
    adapter = 'adapter = LoraConfig(kind, r=16, task_type="CAUSAL_LM", modules_to_save=["lm_head"])'
    (tmp_path / "train.py").write_text(f"args = GRPOConfig(beta=0.1)\n{adapter}\n{trainer}\n")
    report = from_trl_arguments([str(tmp_path / "train.py")])
    assert report.recipe["model"].get("lora", {}).get("rank") == lora
    told = {one.key: one.reason.partition(":")[0] for one in report.refused()}
    if lora is None:
        assert told["LoraConfig"] == "the trainer does not get it (peft_config), line 2"
    else:
        for key in ("LoraConfig", "modules_to_save"):
            assert told[key] == "an argument of LoraConfig that is not converted, line 2"
    assert "task_type" not in told


def test_a_script_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = " + "-" * 200_000 + "1")
    with pytest.raises(ConfigError, match=r"is no Python: \S"):
        from_trl_arguments([str(tmp_path / "train.py")])


def test_words_replace_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(COUNTDOWN))
    report = from_trl_arguments(["trl", "grpo", "--config", str(tmp_path / "grpo.yaml"), "--beta", "0.5", "--no_bf16"])
    assert report.recipe["loss"]["kl_coef"] == 0.5
    report = from_trl_arguments([str(tmp_path / "grpo.yaml"), "--learning_rate=3e-6"])
    assert report.recipe["train"]["lr"] == 3e-6


@pytest.mark.parametrize(("given", "kernels"), [(True, "liger"), (False, None)])
def test_fused_kernels_are_converted(given: bool, kernels: str | None) -> None:
    report = from_trl_arguments({"model_name_or_path": "m", "dataset_name": "d", "use_liger_kernel": given})
    assert report.recipe["model"].get("kernels") == kernels
    assert unsaid(report, {"use_liger_kernel": given}) == set()
    assert report.unsupported == from_trl_arguments({"model_name_or_path": "m", "dataset_name": "d"}).unsupported


@pytest.mark.parametrize(
    "given",
    [
        {"activation_checkpointing": False},
        {"activation_checkpointing": None, "gradient_checkpointing": False},
        {"activation_checkpointing": False, "gradient_checkpointing": False},
    ],
)
def test_the_name_of_checkpointing_since_transformers_5_24_is_known(given: dict[str, Any]) -> None:
    report = from_trl_arguments({"model_name_or_path": "m", "dataset_name": "d", **given})
    assert not report.recipe["model"].get("gradient_checkpointing", False)  # TRL's default is true
    assert unsaid(report, given) == set()
    assert report.unsupported == from_trl_arguments({"model_name_or_path": "m", "dataset_name": "d"}).unsupported


# transformers 5.24 says so of TRL's own configuration
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["GRPOConfig", "DistillationConfig", "ServerDistillationConfig", "GKDConfig"])
def test_each_argument_of_the_installed_trl_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl")
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.server_distillation import ServerDistillationConfig

    kinds = {
        "GRPOConfig": (trl.GRPOConfig, {}),
        "DistillationConfig": (trl.DistillationConfig, {"teacher_model_name_or_path": "t"}),
        "ServerDistillationConfig": (ServerDistillationConfig, {"teacher_model_server_url": "http://h:1"}),
        "GKDConfig": (GKDConfig, {}),
    }
    kind, needed = kinds[name]
    written = json.loads(kind(output_dir="out", bf16=False, report_to="none", **needed).to_json_string())
    report = from_trl_arguments(written)
    assert unsaid(report, written) == set()
    absent = {
        "model_name_or_path",
        "dataset_name",
        "reward_funcs",
        *(("teacher_model_name_or_path", "lmbda") if name == "GKDConfig" else ()),
    }
    assert {one.key for one in report.unsupported} <= absent, "defaults need no line"
    # each field with a value that is not its default: said in the report, and not unknown
    fields = {one.name for one in dataclasses.fields(kind) if one.init}
    for field in fields - {"deepspeed", "fsdp", "datasets"}:
        if written.get(field) is None:
            report = from_trl_arguments({"output_dir": "o", field: None})
            assert field in report.converted


def test_the_command_makes_a_recipe_that_trains(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **kwargs):\n    return [-float(len(str(one))) for one in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1 + 1"}]}\n' * 8)
    (tmp_path / "grpo.yaml").write_text(
        yaml.safe_dump(
            {
                "model_name_or_path": str(model),
                "dataset_name": "rows.jsonl",
                "reward_funcs": ["my_rewards.short"],
                "per_device_train_batch_size": 8,
                "num_generations": 4,
                "max_completion_length": 8,
                "max_steps": 1,
                "bf16": False,
                "output_dir": "run",
            }
        )
    )
    assert main(["convert", "--from", "trl", "grpo.yaml", "--out", "recipe.yaml"]) == 0
    assert main(["train", "recipe.yaml"]) == 0
    (line,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["grad_norm"] > 0
    assert len((tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()) == 8


def test_a_configuration_of_trl_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(COUNTDOWN))
    with pytest.raises(ConfigError, match=r"is a configuration of TRL .*turnwise convert --from trl"):
        load(tmp_path / "grpo.yaml")


def test_values_that_the_recipe_cannot_have_are_reported() -> None:
    report = converted("trl", ["--learning_rate", "-1", "--model_name_or_path", "m", "--dataset_name", "d"])
    assert "learning_rate" in {one.key for one in report.refused()}
    assert "lr" not in report.recipe["train"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max_steps", {"a": 1}, "max_steps: .* is a mapping, and the argument has one value"),
        ("num_processes", {"a": 1}, "num_processes: .* is a mapping"),
        ("max_tool_calling_iterations", [], "max_tool_calling_iterations"),
        ("teacher_model_init_kwargs", -1, "teacher_model_init_kwargs: -1 is no mapping"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_name(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_trl_arguments({**OPEN_R1_SMALL, key: value})


def test_no_number_of_processes_is_one_process() -> None:
    report = from_trl_arguments({**OPEN_R1_SMALL, "num_processes": None})
    assert "cluster" not in report.recipe


REWARDS = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
from my_lib.rewards import exact

def short(completions, **kwargs):
    return [-len(one) for one in completions]

dataset = load_dataset("openai/gsm8k", split="train")
funcs = [short, think_format_reward, exact]
{main}
"""
TRAINER = "GRPOTrainer(model='m', reward_funcs=funcs, train_dataset={data}, args=GRPOConfig(reward_weights=[1, 2, 1])).train()"


def test_rewards_and_rows_of_a_script_become_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(REWARDS.format(main=TRAINER.format(data="dataset")))
    report = from_trl_arguments(["train.py"])
    assert report.recipe["data"]["train"] == "openai/gsm8k"
    entries = report.recipe["reward"]["batch"]
    assert [entry["arguments"]["function"] for entry in entries] == [
        "my_rewards.py:short",  # the script loads its data, and trains, when it is imported
        "trl.rewards:think_format_reward",
        "my_lib.rewards:exact",
    ]
    assert [entry.get("weight", 1) for entry in entries] == [1, 2, 1]
    assert any(
        "--out copies this function, with what it uses, into my_rewards.py" in str(one) for one in report.assumptions
    )
    assert not any(one.key in ("reward_funcs", "dataset_name") for one in report.refused())


@pytest.mark.parametrize(
    ("prompt", "texts"), [("What is 6 * 7?", {"texts": True}), ([{"role": "user", "content": "What is 6 * 7?"}], {})]
)
def test_functions_get_texts_if_the_prompts_of_the_data_are_texts(
    prompt: Any, texts: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/q.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "42"}))
    script = REWARDS.replace(
        'load_dataset("openai/gsm8k", split="train")', 'load_dataset("json", data_files="mine/q.jsonl", split="train")'
    )
    Path("mine/train.py").write_text(script.format(main=TRAINER.format(data="dataset")))
    report = from_trl_arguments(["mine/train.py"])
    assert report.recipe["data"]["train"] == "mine/q.jsonl"
    assert [entry["arguments"] for entry in report.recipe["reward"]["batch"]] == [
        {"function": "mine/my_rewards.py:short", **texts},  # beside the script
        {"function": "trl.rewards:think_format_reward"},  # for messages only
        {"function": "my_lib.rewards:exact", **texts},
    ]
    assert any(
        "--out copies this function, with what it uses, into mine/my_rewards.py" in str(one)
        for one in report.assumptions
    )


FLAT = """from __future__ import annotations

import math, re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?\\d+")
unused = math.pi


def numbers(text: str) -> list[str]:
    return NUMBER.findall(text)


@staticmethod
def last(completions, answer, **kwargs):
    return [float(numbers(text)[-1:] == [right]) for text, right in zip(completions, answer)]


def by_trainer(completions, **kwargs):
    return [float(trainer.state.global_step) for _ in completions]


dataset = load_dataset("json", data_files="q.jsonl", split="train")
trainer = GRPOTrainer(model="m", reward_funcs=[last], args=GRPOConfig(max_steps=2), train_dataset=dataset)
trainer.train()
"""


def test_functions_of_a_script_that_trains_are_written_with_what_they_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text('{"prompt": "6 * 7?", "answer": "42"}\n')
    Path("flat.py").write_text(FLAT)
    words = ["convert", "--from", "trl", "flat.py"]
    assert main(words) == 1  # the recipe was printed, and names a file that only --out writes
    assert not Path("my_rewards.py").exists()
    assert main([*words, "--out", "recipe.yaml"]) == 0
    assert "DOES NOT WORK HERE" not in capsys.readouterr().err
    written = Path("my_rewards.py").read_text()
    kept = ("import math, re", "NUMBER = re", "def numbers(", "@staticmethod\ndef last(")
    assert [name for name in kept if name not in written] == []
    assert written.startswith("from __future__ import annotations\n")
    assert not [name for name in ("datasets", "trl", "unused", "by_trainer", "trainer") if name in written]
    found: dict[str, Any] = {}
    exec(written, found)
    assert found["last"](["It is 42", "It is 41", "?"], ["42", "42", "42"]) == [1.0, 0.0, 0.0]
    Path("my_rewards.py").write_text("def last(completions):\n    return []\n")
    report = from_trl_arguments(["flat.py"])
    assert any("my_rewards.py must have this function, and is left as it is" in str(one) for one in report.assumptions)
    assert report.files == {}
    Path("my_rewards.py").unlink()
    Path("flat.py").write_text(FLAT.replace("reward_funcs=[last]", "reward_funcs=[by_trainer]"))
    report = from_trl_arguments(["flat.py"])  # a copy would train when it is imported
    assert any("copy this function, with what it uses, into my_rewards.py" in str(one) for one in report.assumptions)
    assert report.files == {}


ROWS = """from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

questions = [{"prompt": f"{a} + 1?", "answer": str(a + 1)} for a in range(10)]
dataset = Dataset.from_list(questions)
dataset = dataset.train_test_split(test_size=0.2, seed=0)
trainer = GRPOTrainer(
    model="m", reward_funcs=[accuracy_reward], args=GRPOConfig(max_steps=2, eval_strategy="steps", eval_steps=1),
    train_dataset=dataset["train"], eval_dataset=dataset["test"],
)
trainer.train()
"""


def test_rows_of_a_script_are_written_by_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flat.py").write_text(ROWS)
    main(["convert", "--from", "trl", "flat.py", "--out", "recipe.yaml"])
    assert "assumed: data.train='train.jsonl': `python my_rows.py`, which --out writes" in capsys.readouterr().out
    written = Path("my_rows.py").read_text()
    assert "trl" not in written
    exec(written, {})
    files = [Path(name).read_text().splitlines() for name in ("train.jsonl", "eval.jsonl")]
    assert [len(lines) for lines in files] == [8, 2]
    assert json.loads(files[0][0]).keys() == {"prompt", "answer"}
    report = from_trl_arguments(["flat.py"])
    assert report.files == {}  # what the user may have changed stays
    assert any("my_rows.py must write the file (dataset['train']." in str(one) for one in report.assumptions)
    Path("my_rows.py").unlink()
    Path("flat.py").write_text(ROWS.replace("dataset = dataset.train", "dataset = GRPOTrainer(dataset).train"))
    assert from_trl_arguments(["flat.py"]).files == {}
    of_function = ROWS.replace("trainer =", "def run():\n  rows = dataset\n  trainer =").replace(
        'dataset["train"]', "rows"
    )
    Path("flat.py").write_text(of_function.replace("trainer.train()", "  trainer.train()"))
    report = from_trl_arguments(["flat.py"])
    told = [str(one) for one in report.assumptions]
    assert any("in flat.py, where the trainer is made, rows.to_json('train.jsonl')" in one for one in told), told


def test_a_script_that_may_be_imported_keeps_its_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = "if __name__ == '__main__':\n    " + TRAINER.format(data="dataset.map(len)")
    Path("train.py").write_text(REWARDS.format(main=main).replace("dataset = load", "def rows():\n    return load"))
    report = from_trl_arguments(["train.py"])
    assert report.recipe["reward"]["batch"][0]["arguments"] == {"function": "train.py:short"}
    assert report.recipe["data"]["train"] == "train.jsonl"
    told = [str(one) for one in report.assumptions]
    assert any("dataset.map(len).to_json('train.jsonl')" in one for one in told), told


TOOLS = """
from my_lib.tools import search
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int:
    return a * b

def short(completions, **kwargs):
    return [-len(c[-1]["content"]) for c in completions]

name = "my/model"
if __name__ == "__main__":
    GRPOTrainer(name, short, GRPOConfig(max_completion_length=64{rounds}), {given}).train()
"""


@pytest.mark.parametrize(
    ("given", "rounds", "tools", "turns"),
    [
        ("tools=[multiply, search]", "", ["train.py:multiply", "my_lib.tools:search"], 64),
        ("tools=[multiply]", ", max_tool_calling_iterations=3", ["train.py:multiply"], 4),
        ("tools=[lambda a: a]", "", None, 64),
        ("environment_factory=Game", "", None, 64),
        ("tools=None", "", None, 1),
    ],
)
def test_a_script_with_tools_has_as_many_turns_as_in_trl(
    given: str, rounds: str, tools: list[str] | None, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TOOLS.format(given=given, rounds=rounds))
    report = from_trl_arguments(["train.py"])
    recipe = report.recipe
    assert recipe["model"]["path"] == "my/model"  # by position, and by a name
    assert recipe["reward"]["batch"][0]["arguments"] == {"function": "train.py:short"}
    assert (recipe.get("tools"), recipe["limits"]["turns"]) == (tools, turns)
    assert recipe["limits"].get("response_tokens") == (64 if turns > 1 else None)
    left = [one.key for one in report.refused() if one.key in ("tools", "environment_factory")]
    assert left == ([given.partition("=")[0]] if tools is None and turns > 1 else [])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("load_dataset('json', data_files='my/rows.jsonl', split='train')", "my/rows.jsonl"),
        ("load_dataset('parquet', data_files='rows.parquet', split='train')", "rows.parquet"),
        (
            "load_dataset('json', data_files='rows.jsonl', split='train[:10]')",
            "train.jsonl",
        ),  # a part: the script writes it
        ("load_dataset('json', data_files='rows.json', split='train')", "train.jsonl"),
    ],
)
def test_a_file_that_a_script_loads_as_it_is_becomes_the_rows(
    call: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(REWARDS.format(main=TRAINER.format(data=call)))
    report = from_trl_arguments(["train.py"])
    assert report.recipe["data"] == {"train": expected}
