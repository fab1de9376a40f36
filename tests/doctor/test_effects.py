"""That options take effect: every one has evidence, and the evidence that is no other folder's affair stands here."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from doctor.evidence import REQUIRED, TESTED
from support import byte_tokenizer
from support.conversations import RENDERER
from support.recipes import save_recipe
from support.templates import THINKS
from support.tiny import save_model, save_rows, tiny_model
from support.training import train_silently
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.doctor.options import EFFECTS, schema
from turnwise.engines.local import LocalEngine
from turnwise.errors import ConfigError, DataError, EngineError
from turnwise.options.schema import Config
from turnwise.sft import fine_tune as sft
from turnwise.terminal.train_report import SftReport
from turnwise.train import TrainingRun, assemble
from turnwise.types import Request, Sampling

TESTS = Path(__file__).parent.parent
PLACES = TESTS / "support" / "places.py"


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        data={
            "train": str(save_rows(tmp_path / "train.jsonl", 4)),
            "eval": str(save_rows(tmp_path / "eval.jsonl", 3)),
        },
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
        checkpoint={"every": 100},
        deterministic=True,
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(recipe: Path, overrides: Sequence[str], out: Path) -> TrainingRun:
    """Train in this process; what differs from a run without the overrides is theirs, because runs are deterministic."""
    made = assemble(load(recipe, [*overrides, f"output={out}"])[0])
    train_silently(made)
    return made


def learnt(recipe: Path, overrides: Sequence[str], out: Path) -> str:
    """What the weights are at the end."""
    return digest(run(recipe, overrides, out).learner.model)


def digest(model: Any) -> str:
    """A name for the weights, equal for equal weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


# the table


def test_every_option_of_the_schema_has_its_evidence() -> None:
    evidence = [*EFFECTS, *TESTED, *REQUIRED]
    assert set(schema()) == set(evidence)
    assert len(evidence) == len(set(evidence))  # each option is in exactly one of the three


def test_an_option_that_is_added_without_evidence_is_found() -> None:
    class Longer(Config):
        forgotten: int = 0

    assert set(schema(Longer)) - {*EFFECTS, *TESTED, *REQUIRED} == {"forgotten"}


@pytest.mark.parametrize("test", sorted(set(TESTED.values())))
def test_the_tests_that_are_named_as_evidence_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (TESTS / file).read_text(encoding="utf-8"), test


CHANGED = {
    "train.optimizer.name": "train.optimizer.name=adafactor",
    "train.optimizer.master_weights": "train.optimizer.master_weights=kahan",
    "train.optimizer.offload": "train.optimizer.offload=cpu",
    "train.optimizer.grad_accum_dtype": "train.optimizer.grad_accum_dtype=float32",
    "model.gradient_checkpointing": "model.gradient_checkpointing=true",
    "model.lora.rank": "model.lora.rank=4",
    "model.lora.alpha": "model.lora.alpha=8",
    "model.lora.target_modules": "model.lora.target_modules=[q_proj]",
    "model.lora.rslora": "model.lora.rslora=true",
    "model.lora.dora": "model.lora.dora=true",
    "data.split": "data.split=other",
    "data.eval_split": "data.eval_split=other",
    "data.subset": "data.subset=small",
    "data.columns": "data.columns={prompt: answer}",
    "data.system_prompt": "data.system_prompt=Be brief.",
    "data.shuffle": "data.shuffle=false",
    "data.max_rows": "data.max_rows=1",
    "sampling.temperature": "sampling.temperature=0.5",
    "sampling.top_p": "sampling.top_p=0.5",
    "sampling.top_k": "sampling.top_k=5",
    "sampling.min_p": "sampling.min_p=0.5",
    "sampling.stop": "sampling.stop=[x]",
    "limits.turns": "limits.turns=3",
    "limits.tokens_per_turn": "limits.tokens_per_turn=3",
    "limits.tokens": "limits.tokens=3",
    "limits.response_tokens": "limits.response_tokens=9",
    "limits.context": "limits.context=30",
    "limits.seconds_per_turn": "limits.seconds_per_turn=3",
    "limits.seconds": "limits.seconds=3",
    "limits.agents": "limits.agents=3",
    "limits.agent_turns": "limits.agent_turns=3",
    "limits.agent_tokens": "limits.agent_tokens=3",
    "reward.trajectory[].use": f"reward.trajectory=['{PLACES}:length']",
    "reward.trajectory[].arguments": f"reward.trajectory=[{{use: '{PLACES}:scaled', arguments: {{by: 2}}}}]",
    "reward.trajectory[].weight": f"reward.trajectory=[{{use: '{PLACES}:length', weight: 2}}]",
    "reward.trajectory[].name": f"reward.trajectory=[{{use: '{PLACES}:length', name: short}}]",
    "reward.turns[].use": f"reward.turns=['{PLACES}:turn_length']",
    "reward.turns[].arguments": f"reward.turns=[{{use: '{PLACES}:turn_length', arguments: {{by: 2}}}}]",
    "reward.turns[].weight": f"reward.turns=[{{use: '{PLACES}:turn_length', weight: 2}}]",
    "reward.turns[].name": f"reward.turns=[{{use: '{PLACES}:turn_length', name: short}}]",
    **{
        f"reward.batch[].{option}": f"reward.batch=[{{use: '{PLACES}:ranked'{value}}}]"
        for option, value in (
            ("use", ""),
            ("arguments", ", arguments: {by: 2}"),
            ("weight", ", weight: 2"),
            ("name", ", name: short"),
        )
    },
    "reward.group[].use": f"reward.group=['{PLACES}:ranked']",
    "reward.group[].arguments": f"reward.group=[{{use: '{PLACES}:ranked', arguments: {{by: 2}}}}]",
    "reward.group[].weight": f"reward.group=[{{use: '{PLACES}:ranked', weight: 2}}]",
    "reward.group[].name": f"reward.group=[{{use: '{PLACES}:ranked', name: short}}]",
    "reward.timeout": "reward.timeout=3",
    "credit.scale": "credit.scale=none",
    "credit.use": f"credit={PLACES}:other_estimator",
    "credit.arguments": "credit.arguments.power=2",
    "loss.use": f"loss={PLACES}:other_loss",
    "loss.arguments": "loss.arguments.power=2",
    "credit.gamma": "credit.gamma=0.5",
    "credit.baseline": "credit.baseline=none",
    "credit.omega": "credit.omega=2",
    "credit.state_key": "credit.state_key=other",
    "credit.outcome_weight": "credit.outcome_weight=2",
    "credit.normalise": "credit.normalise=joint",
    "credit.key": "credit.key=other",
    "credit.decay": "credit.decay=0.25",
    "credit.weight": "credit.weight=2",
    "credit.initial": "credit.initial=1",
    "credit.initial_weight": "credit.initial_weight=2",
    "credit.half_life": "credit.half_life=0.08",
    "credit.rho_min": "credit.rho_min=0.95",
    "credit.rho_max": "credit.rho_max=0.88",
    "credit.lam": "credit.lam=0.5",
    "credit.whiten": "credit.whiten=false",
    "credit.turn_gamma": "credit.turn_gamma=0.5",
    "loss_mask": "loss_mask=last_turn",
    "train.steps": "train.steps=3",
    "train.epochs": "train.epochs=3",
    "train.lr": "train.lr=0.5",
    "train.lr_schedule": "train.lr_schedule=cosine",
    "train.warmup_steps": "train.warmup_steps=2",
    "train.weight_decay": "train.weight_decay=0.5",
    "train.betas": "train.betas=[0.5, 0.5]",
    "train.max_grad_norm": "train.max_grad_norm=0.5",
    "loss.kl_estimator": "loss.kl_estimator=k1",
    "correction.action": "correction.action=measure",
    "correction.level": "correction.level=sequence",
    "correction.low": "correction.low=0.1",
    "correction.high": "correction.high=3",
    "correction.weight_level": "correction.weight_level=sequence",
    "correction.normalize_weights": "correction.normalize_weights=true",
    "correction.decoupled": "correction.decoupled=false",
    "correction.off_policy_sequence_mask_delta": "correction.off_policy_sequence_mask_delta=0.5",
    "correction.reject.level": "correction.reject.level=sequence",
    "correction.reject.estimator": "correction.reject.estimator=k3",
    "correction.reject.low": "correction.reject.low=0.1",
    "correction.reject.high": "correction.reject.high=9",
    "loss.normalizer": "loss.normalizer=trajectory",
    "loss.constant_length": "loss.constant_length=7",
    "loss.dual_clip": "loss.dual_clip=3",
    "loss.level": "loss.level=turn",
    "loss.log_clip_low": "loss.log_clip_low=0.2",
    "loss.log_clip_high": "loss.log_clip_high=0.2",
    "loss.tau_positive": "loss.tau_positive=2",
    "loss.tau_negative": "loss.tau_negative=2",
    "loss.clip_low": "loss.clip_low=0.5",
    "loss.clip_high": "loss.clip_high=0.5",
    "loss.kl_coef": "loss.kl_coef=0.5",
    "loss.entropy_coef": "loss.entropy_coef=0.5",
    "loss.top_entropy_quantile": "loss.top_entropy_quantile=0.5",
    "loss.clip_cov_ratio": "loss={clip_cov_ratio: 0.5, clip_cov_low: -9, clip_cov_high: 9}",
    "loss.clip_cov_low": "loss.clip_cov_low=9",
    "loss.clip_cov_high": "loss.clip_cov_high=-8",
    "loss.kl_cov_ratio": "loss.kl_cov_ratio=0.5",
    "loss.kl_cov_coef": "loss.kl_cov_coef=2",
    "seed": "seed=1",
}
"""Another value for each option that is shown by what is made of it."""

BASES = {
    "reward.trajectory[].arguments": f"reward.trajectory=['{PLACES}:scaled']",
    **dict.fromkeys(
        ("reward.trajectory[].weight", "reward.trajectory[].name"), f"reward.trajectory=['{PLACES}:length']"
    ),
    "reward.turns[].arguments": f"reward.turns=['{PLACES}:turn_length']",
    **dict.fromkeys(("reward.turns[].weight", "reward.turns[].name"), f"reward.turns=['{PLACES}:turn_length']"),
    **dict.fromkeys(
        ("reward.group[].arguments", "reward.group[].weight", "reward.group[].name"),
        f"reward.group=['{PLACES}:ranked']",
    ),
    **dict.fromkeys(
        ("reward.batch[].arguments", "reward.batch[].weight", "reward.batch[].name"),
        f"reward.batch=['{PLACES}:ranked']",
    ),
    "data.split": "data.max_rows=null",
    **{f"model.lora.{name}": "model.lora.rank=8" for name in ("alpha", "target_modules", "rslora", "dora")},
    "loss.level": "loss.name=gspo",
    **{
        f"loss.clip_cov_{name}": "loss={clip_cov_ratio: 0.5, clip_cov_low: -9, clip_cov_high: 9}"
        for name in ("low", "high")
    },
    "loss.kl_cov_coef": "loss.kl_cov_ratio=0.5",
    "loss.kl_estimator": "loss.kl_coef=0.5",
    "loss.constant_length": "loss.normalizer=constant",
    **{f"correction.{name}": "correction.action=truncate" for name in ("level", "low", "high", "normalize_weights")},
    "correction.weight_level": "correction.action=mask",
    "correction.decoupled": "correction.action=reject",
    "correction.reject.level": "correction.action=reject",
    **{
        f"correction.reject.{name}": "correction={action: measure, reject: {level: sequence}}"
        for name in ("estimator", "low", "high")
    },
    **dict.fromkeys(("credit.use", "credit.arguments"), f"credit={PLACES}:own_estimator"),
    **dict.fromkeys(("loss.use", "loss.arguments"), f"loss={PLACES}:own_loss"),
    "credit.gamma": "credit.name=turn_return",
    "credit.baseline": "credit.name=shared",
    "credit.omega": "credit={name: gigpo, state_key: state}",
    "credit.state_key": "credit.name=gigpo",
    "credit.outcome_weight": "credit.name=mt_grpo",
    "credit.normalise": "credit.name=igpo",
    **dict.fromkeys(("credit.key", "credit.decay", "credit.weight", "credit.initial"), "credit.name=turn_potential"),
    **{
        f"credit.{name}": "credit={name: spo, whiten: false}"
        for name in ("initial_weight", "half_life", "rho_min", "rho_max")
    },
    **dict.fromkeys(("credit.lam", "credit.whiten"), "credit.name=turn_gae"),
    "credit.turn_gamma": "credit.name=bilevel_gae",
    **dict.fromkeys(("loss.log_clip_low", "loss.log_clip_high"), "loss.name=gmpo"),
    **dict.fromkeys(("loss.tau_positive", "loss.tau_negative"), "loss.name=sapo"),
}
"""What it is compared with, where that is not the recipe as it is."""


@pytest.mark.parametrize("option", list(EFFECTS))
def test_what_is_made_of_the_recipe_changes_with_the_option(option: str, recipe: Path, tmp_path: Path) -> None:
    compute = EFFECTS[option]
    overrides = [BASES[option]] if option in BASES else []
    if option in ("data.split", "data.eval_split"):
        overrides += [f"data.{name}={splits(tmp_path)}" for name in ("train", "eval")]
    before, _ = load(recipe, overrides)
    after, _ = load(recipe, [*overrides, CHANGED[option]])
    assert compute(before) == compute(before)
    assert compute(before) != compute(after)


def splits(tmp_path: Path) -> Path:
    """A data set in three splits."""
    datasets = pytest.importorskip("datasets")
    parts = {name: [{"prompt": f"{name} {n}"} for n in range(3)] for name in ("train", "test", "other")}
    made = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    made.save_to_disk(str(tmp_path / "splits"))
    return tmp_path / "splits"


# training as a whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["train.batch_size=1"],
        ["train.group_size=3"],
        ["train.minibatches=2"],
        ["train.ppo_epochs=2"],
        ["loss.normalizer=trajectory"],
        ["train.lr=0.02"],
        ["train.lr_schedule=linear"],
        ["train.weight_decay=0.5"],
        ["train.betas=[0.5, 0.5]"],
        ["train.max_grad_norm=0.0001"],
        ["loss.name=gspo"],
        ["loss.kl_coef=0.5"],
        ["loss.entropy_coef=0.5"],
        ["credit.scale=none"],
        ["loss_mask=last_turn"],
        ["sampling.temperature=0.5"],
        ["limits.turns=1"],
        ["limits.tokens_per_turn=3"],
        ["seed=1"],
        ["data.shuffle=false"],
        ["data.system_prompt=Be brief."],
        ["model.dtype=bfloat16"],
        ["model.autocast=true"],
    ],
    ids=lambda options: options[0],
)
def test_an_option_of_training_changes_what_is_learnt(
    options: list[str], recipe: Path, tmp_path: Path, base: Callable[..., str]
) -> None:
    if options == ["model.dtype=bfloat16"]:
        made = run(recipe, options, tmp_path / "run")
        assert str(made.learner.model.dtype) == "torch.bfloat16"
        return
    assert learnt(recipe, options, tmp_path / "run") != base(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["loss.clip_low", "loss.clip_high"])
def test_the_bounds_of_the_ratio_change_what_is_learnt(
    option: str, recipe: Path, tmp_path: Path, base: Callable[..., str]
) -> None:
    several = ["train.ppo_epochs=3", "train.lr=0.003"]
    assert learnt(recipe, [*several, f"{option}=0.001"], tmp_path / "run") != base(recipe, *several)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """What is learnt without the option, once for all of them: the rows and the model are the same in each test."""
    known: dict[tuple[Any, ...], str] = {}

    def of(recipe: Path, *options: str, how: Callable[..., str] = learnt) -> str:
        if (how, *options) not in known:
            known[(how, *options)] = how(recipe, options, tmp_path_factory.mktemp("base") / "run")
        return known[(how, *options)]

    return of


@pytest.mark.slow
def test_the_same_recipe_learns_the_same(recipe: Path, tmp_path: Path, base: Callable[..., str]) -> None:
    assert learnt(recipe, [], tmp_path / "run") == base(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps", "conversations"),
    [
        ([], [0, 2], 3),
        (["eval.max_rows=1"], [0, 2], 1),
        (["eval.samples_per_row=2"], [0, 2], 6),
        (["eval.every=1"], [0, 1, 2], 3),
    ],
    ids=str,
)
def test_evaluations_are_as_many_as_the_recipe_says(
    options: list[str], steps: list[int], conversations: int, recipe: Path, tmp_path: Path
) -> None:
    run(recipe, options, tmp_path / "run")
    assert [one["step"] for one in read(tmp_path / "run" / "evaluations.jsonl")] == steps
    held = [one["step"] for one in read(tmp_path / "run" / "eval_trajectories.jsonl")]
    assert held == [step for step in steps for _ in range(conversations)]


def test_rows_with_longer_prompts_are_left_out(model: Path, recipe: Path, tmp_path: Path) -> None:
    long = {"prompt": [{"role": "user", "content": "x" * 500}]}
    for name in ("train", "eval"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(long) + "\n")
    made = assemble(load(recipe, ["data.max_prompt_tokens=100"])[0])
    assert (len(made.rows), len(made.held_out)) == (4, 3)
    assert [note for note in made.notes if "left out" in note] == [
        "1 of 5 rows are left out: data.max_prompt_tokens=100",
        "held-out rows: 1 of 4 rows are left out: data.max_prompt_tokens=100",
    ]
    assert len(assemble(load(recipe, [f"output={tmp_path}/other"])[0]).rows) == 5
    with pytest.raises(DataError, match=r"all 5 prompts have more than data\.max_prompt_tokens=3"):
        assemble(load(recipe, ["data.max_prompt_tokens=3", f"output={tmp_path}/third"])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "all_alike"),
    [
        ("temperature=0", True),
        ("top_k=1", True),
        ("top_p=1e-6", True),
        ("min_p=0.999999", True),
        ("temperature=2", False),
    ],
)
def test_evaluations_draw_as_their_own_sampling_says(
    option: str, all_alike: bool, recipe: Path, tmp_path: Path
) -> None:
    run(recipe, ["train.steps=1", "eval.samples_per_row=6", f"eval.sampling.{option}"], tmp_path / "run")

    def said(name: str) -> list[set[str]]:
        rows: dict[str, set[str]] = {}
        for one in read(tmp_path / "run" / name):
            rows.setdefault(f"{one['step']} {one['group']}", set()).add(str(one["messages"][-1]["content"]))
        return list(rows.values())

    assert all(len(one) == 1 for one in said("eval_trajectories.jsonl")) is all_alike
    assert not all(len(one) == 1 for one in said("trajectories.jsonl"))  # training draws as before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["train.steps=3", "checkpoint.every=1"], [2, 3]),
        (["train.steps=3", "checkpoint.every=2"], [2, 3]),
        (["train.steps=3", "checkpoint.every=3"], [3]),
        (["train.steps=3", "checkpoint.every=1", "checkpoint.keep=1"], [3]),
        (["train.steps=3", "checkpoint.every=1", "checkpoint.keep=3"], [1, 2, 3]),
    ],
    ids=str,
)
def test_checkpoints_are_as_many_as_the_recipe_says(
    options: list[str], kept: list[int], recipe: Path, tmp_path: Path
) -> None:
    run(recipe, options, tmp_path / "run")
    found = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(int("".join(filter(str.isdigit, name))) for name in found) == kept


@pytest.mark.slow
def test_the_checkpoint_with_the_best_evaluation_is_kept(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    options = ["eval.every=1", "checkpoint.every=1", "checkpoint.keep=1", "train.lr=0.1"]

    def kept(metric: str) -> tuple[int | None, int | None, list[int]]:
        """The step that `best` names, the one that should be named, and the steps of all checkpoints."""
        values = [line[metric] for line in read(out / "evaluations.jsonl")]
        best = values.index((min if metric == "failed" else max)(values))
        link = out / "best"
        steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir()]
        named = int(link.resolve().parent.name.removeprefix("step-")) if link.is_symlink() else None
        assert named is None or (link / "config.json").is_file()
        return named, best or None, sorted(steps)

    for metric in ("reward/mean", "failed"):  # of which the highest is best, and the lowest
        run(recipe, [*options, "train.steps=3", f"checkpoint.best={metric}", "replace=true"], out)
        named, best, steps = kept(metric)
        assert (named, steps) == (best, sorted({best, 3} - {None}))
        run(recipe, [*options, "train.steps=5", f"checkpoint.best={metric}", "resume=auto"], out)
        named, best, steps = kept(metric)
        assert (named, steps) == (best, sorted({best, 5} - {None}))
        assert (named is None) is (metric == "failed")  # none fails: the start is as good as all later weights
    link = out / "best"
    link.unlink(missing_ok=True)
    link.symlink_to("checkpoints/step-000009/model")  # of steps after the checkpoint that is resumed from
    run(recipe, [*options, "train.steps=6", "checkpoint.best=failed", "resume=auto"], out)
    assert not link.is_symlink()
    run(recipe, ["checkpoint.best=reward/meen", "replace=true"], out)
    assert (
        "checkpoint.best=reward/meen: the evaluation has no value of reward/meen; did you mean reward/mean"
        in caplog.text
    )
    assert not (out / "best").exists()


# fine-tuning


@pytest.fixture
def sft_recipe(model: Path, tmp_path: Path) -> Path:
    """Six conversations of different lengths, the last of which does not fit into a context of 120 tokens."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": "x" * (5 * n + 1)}]}
        for n in (1, 2, 3, 4, 5, 20)
    ]
    for name, part in (("train", rows), ("eval", rows[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    options = {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")},
        "limits": {"context": 120},
        "sft": {"batch_size": 3, "lr": 0.001},
        "deterministic": True,
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def fine_tuned(recipe: Path, overrides: Sequence[str], out: Path) -> str:
    """What the weights are at the end of `turnwise sft`."""
    made = sft.assemble(load(recipe, [*overrides, f"output={out}"])[0])
    asyncio.run(sft.fine_tune(made, SftReport(Console(quiet=True))))
    return digest(made.learner.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        "steps=1",
        "epochs=2",
        "batch_size=2",
        "lr=0.002",
        "lr_schedule=constant",
        "warmup_steps=1",
        "weight_decay=0.5",
        "betas=[0.5, 0.5]",
        "max_grad_norm=0.0001",
        "normalizer=trajectory",
        "too_long=cut",
    ],
)
def test_an_option_of_fine_tuning_changes_what_is_learnt(
    option: str, sft_recipe: Path, tmp_path: Path, base: Callable[..., str]
) -> None:
    assert fine_tuned(sft_recipe, [f"sft.{option}"], tmp_path / "run") != base(sft_recipe, how=fine_tuned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "steps", "recorded"),
    [
        ("eval_every=0", [0, 2], (6, 3)),
        ("eval_every=1", [0, 1, 2], (6, 3)),
        ("max_eval_rows=1", [0, 2], (6, 1)),
        ("max_recorded_rows=2", [0, 2], (2, 2)),
    ],
)
def test_fine_tuning_is_measured_and_written_down_as_the_recipe_says(
    option: str, steps: list[int], recorded: tuple[int, int], sft_recipe: Path, tmp_path: Path
) -> None:
    fine_tuned(sft_recipe, [f"sft.{option}"], tmp_path / "run")
    assert [one["step"] for one in read(tmp_path / "run" / "evaluations.jsonl")] == steps
    names = ("trajectories.jsonl", "eval_trajectories.jsonl")
    assert tuple(len(read(tmp_path / "run" / name)) for name in names) == recorded


# what reaches the parts of a run


@pytest.mark.parametrize(
    ("override", "read_off"),
    [
        ("tokenization_sanity_check=disable", lambda run: run.context.renderer.sanity == "disable"),
        ("tool_format=llama3", lambda run: run.context.renderer.turn_parser.tool_format.name == "llama3"),
        ("max_concurrent=3", lambda run: run.context.max_concurrent == 3),
        ("train.share_prompts=never", lambda run: not run.learner.requirements.share_prompts),
        ("limits.context=99", lambda run: run.context.limits.context == 99),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_option_reaches_the_part_of_the_run_that_reads_it(
    override: str, read_off: Callable[[TrainingRun], bool], recipe: Path
) -> None:
    assert read_off(assemble(load(recipe, [override, "replace=true"])[0]))
    assert not read_off(assemble(load(recipe, ["replace=true"])[0]))


@pytest.mark.parametrize("name", ["branch", "strip_at_user"])
def test_the_thinking_policy_reaches_the_loop(name: str, tmp_path: Path, recipe: Path) -> None:
    path = save_model(tmp_path / "thinker")
    byte_tokenizer(THINKS).save_pretrained(path)
    assert assemble(load(recipe, [f"thinking={name}", f"model.path={path}"])[0]).context.thinking == name


def engine(recipe: Path, *overrides: str) -> LocalEngine:
    made = assembly.engine(load(recipe, ["deterministic=false", *overrides])[0], RENDERER, tiny_model())
    assert isinstance(made, LocalEngine)
    return made


def ask(made: LocalEngine, name: str) -> None:
    prompt = RENDERER.encode(f"conversation {name}")
    request = Request(conversation=name, token_ids=prompt, sampling=Sampling(max_tokens=2))
    asyncio.run(made.generate(request))


def test_the_slots_of_the_recipe_are_those_of_the_engine(recipe: Path) -> None:
    few, many = engine(recipe, "engine.slots=1"), engine(recipe)
    for name in "abc":
        ask(few, name)
        ask(many, name)
    assert (few.stats.evictions, many.stats.evictions) == (2, 0)


def test_the_memory_of_the_recipe_is_that_of_the_engine(recipe: Path) -> None:
    with pytest.raises(EngineError, match="memory_gb"):
        ask(engine(recipe, "engine.memory_gb=1.0e-6"), "a")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_threads_of_the_recipe_are_those_of_the_engine(threads: int, recipe: Path) -> None:
    seen: list[int] = []
    made = engine(recipe, f"engine.threads={threads}")
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    try:
        ask(made, "a")
    finally:
        hook.remove()
    assert set(seen) == {threads}


def passes(model: Any, learn: Callable[[], Any]) -> int:
    """Forward passes with a gradient."""
    counted: list[bool] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: counted.append(torch.is_grad_enabled()))
    learn()
    hook.remove()
    return sum(counted)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 2), (100_000, 1)])
def test_the_size_of_a_micro_batch_is_that_of_the_recipe(
    tokens: int, expected: int, recipe: Path, tmp_path: Path
) -> None:
    options = ["train.steps=1", "train.share_prompts=never", f"train.micro_batch_tokens={tokens}"]
    made = assemble(load(recipe, [*options, f"output={tmp_path / 'run'}"])[0])
    assert passes(made.learner.model, lambda: train_silently(made)) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 3), (100_000, 1)])
def test_the_size_of_a_micro_batch_of_fine_tuning_is_that_of_the_recipe(
    tokens: int, expected: int, sft_recipe: Path, tmp_path: Path
) -> None:
    options = ["sft.steps=1", f"sft.micro_batch_tokens={tokens}", "data.shuffle=false", f"output={tmp_path / 'run'}"]
    made = sft.assemble(load(sft_recipe, options)[0])
    report = SftReport(Console(quiet=True))
    assert passes(made.learner.model, lambda: asyncio.run(sft.fine_tune(made, report))) == expected


def test_verls_name_for_branch_is_branch(recipe: Path) -> None:
    assert load(recipe, ["use_inference_chat_template=true"])[0].thinking == "branch"


def test_a_device_that_is_not_there_is_told(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.device=cuda:99 cannot be used"):
        assemble(load(recipe, ["model.device=cuda:99", "deterministic=false"])[0])
