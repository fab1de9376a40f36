"""Training as a whole: it learns, it writes down what it did, it can be killed, and its loss depends on nothing made up."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import resource
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from support import byte_tokenizer
from support.hybrids import save_hybrid
from support.recipes import save_recipe
from support.tiny import save_model, save_rows
from support.training import Started, overlap_surely, train_silently
from turnwise.assembly import learners
from turnwise.config.recipe import load
from turnwise.engines.engine import Engine
from turnwise.errors import ConfigError, RolloutError, RunError
from turnwise.options.algorithm import steps_of_epochs
from turnwise.options.schema import Config
from turnwise.terminal.train_report import TrainReport
from turnwise.train import TrainingRun, _warn_of_disagreement, assemble, pack_groups, train
from turnwise.training.learner import UpdateStats
from turnwise.training.update import StopFlag
from turnwise.types import Completion, Failure, Group, LogprobKind, Request

# Training as a whole: it learns, it writes down what it did, it can be killed, and it says what is wrong.


PLACES = Path(__file__).parent / "support" / "places.py"


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 3, "tokens_per_turn": 8},
        train={"steps": 3, "batch_size": 3, "group_size": 4, "lr": 0.01},
    )


def run(recipe: Path, *overrides: str) -> TrainingRun:
    """Train in this process."""
    config, _ = load(recipe, overrides)
    made = assemble(config)
    overlap_surely(made)
    train_silently(made)
    return made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if not key.startswith("seconds/")} for one in metrics]


@pytest.mark.slow
def test_a_run_leaves_everything_behind_that_it_should(recipe: Path, tmp_path: Path) -> None:
    asyncio.run(train(assemble(load(recipe)[0]), TrainReport(Console(quiet=True))))  # draws a curve too
    out = tmp_path / "run"
    metrics, trajectories = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2, 3]
    names = (
        "reward/mean reward/std turns/mean tool_calls/mean tool_errors/mean tokens/sampled seconds/rollout seconds/train "
        "seconds/step loss kl entropy grad_norm ratio/max_deviation stop/done stop/length stop/error"
    )
    assert set(names.split()) <= set(metrics[0])
    assert len(trajectories) == 3 * 3 * 4
    assert {one["step"] for one in trajectories} == {1, 2, 3}
    assert [one["template_mismatch"] for one in metrics] == [
        0.0,
        0.0,
        0.0,
    ]  # halves of characters among what was said are no drift
    assert metrics[0]["tokens/sampled"] == sum(
        sum(turn >= 0 for turn in segment["turn"])
        for one in trajectories
        if one["step"] == 1
        for segment in one["segments"]
    )
    versions = {version for one in trajectories for segment in one["segments"] for version in segment["version"]}
    assert versions == {-1, 0, 1, 2}
    assert Config.model_validate(yaml.safe_load((out / "config.yaml").read_text())).train.steps == 3
    assert (out / "curve.png").read_bytes()[:4] == b"\x89PNG"

    from transformers import AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(out / "checkpoint").config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(out / "checkpoint").chat_template


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["sampling.temperature=0.7", "sampling.top_p=0.9", "sampling.top_k=40", "sampling.min_p=0.001"],
        ["train.share_prompts=never", "train.micro_batch_tokens=100"],
        ["engine.slots=5"],
    ],
)
def test_trainer_and_engine_agree_on_every_token(recipe: Path, tmp_path: Path, options: list[str]) -> None:
    run(recipe, *options)
    for metrics in lines(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["tokens/trained"] > 0
        assert metrics["ratio/max_deviation"] < 1e-4
        assert metrics["kl"] < 1e-6


SIZES = {
    "vocab_size": len(byte_tokenizer()),
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}


@pytest.mark.parametrize("family", ["gpt2", "neox", "phi3", "qwen3_moe"])
def test_models_that_the_engine_runs_through_their_own_forward_share_prompts_too(
    recipe: Path, tmp_path: Path, family: str
) -> None:
    from transformers import GPT2Config, GPTNeoXConfig, Phi3Config, Qwen3MoeConfig

    mixture = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = {
        "gpt2": lambda: GPT2Config(**SIZES),
        "neox": lambda: GPTNeoXConfig(**SIZES),
        "phi3": lambda: Phi3Config(**SIZES, num_key_value_heads=2),
        "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_key_value_heads=2, **mixture),
    }[family]()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    byte_tokenizer().save_pretrained(tmp_path / family)
    made = run(recipe, f"model.path={tmp_path / family}", "train.steps=2")
    assert made.learner.requirements.share_prompts
    for metrics in lines(tmp_path / "run" / "metrics.jsonl"):
        assert (metrics["failed"], metrics["tokens/trained"] > 0) == (0, True)
        assert metrics["ratio/max_deviation"] < 1e-4


def test_tokens_that_leave_the_templates_text_are_counted_each_step_and_told_once(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_model(tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()
    signed = "{{ message.content }}{% if loop.last and message.role == 'assistant' %} -- sent{% endif %}"
    (model / "chat_template.jinja").write_text(template.replace("{{ message.content }}", signed))
    run(recipe, f"model.path={model}", "limits.tokens_per_turn=64")
    # a turn that was cut in the middle says nothing of what the template would have put behind it
    assert all(one["template_mismatch"] > 0.9 for one in lines(tmp_path / "run" / "metrics.jsonl"))
    told = [record.getMessage() for record in caplog.records if "the template writes" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1: ")
    assert "' -- sent" in told[0]


@pytest.mark.parametrize(
    "autocast", [pytest.param(False, id="float32"), pytest.param(True, id="autocast", marks=pytest.mark.slow)]
)
def test_random_weights_learn_what_is_rewarded(recipe: Path, tmp_path: Path, autocast: bool) -> None:
    options = ["model.autocast=true", "train.steps=18"] if autocast else ["train.steps=14"]
    run(recipe, "train.batch_size=6", "train.group_size=8", "train.lr=0.02", *options)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    rewards, deviations = ([one[name] for one in metrics] for name in ("reward/mean", "ratio/max_deviation"))
    # the engine and the trainer round to bfloat16 at different places
    assert (1e-4 < max(deviations) < 0.2) if autocast else max(deviations) < 1e-4
    assert rewards[0] < 1.0
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.5


@pytest.mark.parametrize(
    "options",
    [
        ["train.minibatches=3", "train.ppo_epochs=2", "loss.clip_high=0.28"],
        ["loss.kl_coef=0.1", "loss.entropy_coef=0.01", "loss.normalizer=trajectory"],
        ["train.max_staleness=1", "train.minibatches=2"],
        ["model.autocast=true", "model.gradient_checkpointing=true", "loss.kl_coef=0.1", "model.lora.rank=4"],
        ["model.autocast=true", "train.max_staleness=1", "correction.action=truncate", "correction.level=token"],
        ["model.dtype=bfloat16", "train.lr_schedule=cosine", "train.warmup_steps=1", "credit.scale=none"],
    ],
)
def test_options_of_the_optimization_run(recipe: Path, tmp_path: Path, options: list[str]) -> None:
    made = run(recipe, *options)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 3
    assert all(one["grad_norm"] > 0 and one["failed"] == 0 for one in metrics)
    assert made.step == 3


def versions_of_steps(path: Path) -> dict[int, set[int]]:
    """The versions of the weights that sampled the conversations of each step."""
    found: dict[int, set[int]] = {}
    for one in lines(path / "trajectories.jsonl"):
        for segment in one["segments"]:
            found.setdefault(one["step"], set()).update(set(segment["version"]) - {-1})
    return found


def test_overlapping_marks_which_weights_sampled_what(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "train.max_staleness=1", "train.steps=5")
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["ratio/max_deviation"] < 1e-4
    assert metrics[2]["ratio/max_deviation"] > 1e-3
    versions = versions_of_steps(tmp_path / "run")
    assert versions[1] == {0}
    for step in (2, 3, 4, 5):  # they begin while the step before is learnt from, and may go on with its result
        assert step - 2 in versions[step]
        assert versions[step] <= {step - 2, step - 1}
    assert [one["version/oldest"] for one in metrics] == [0, 0, 1, 2, 3]
    assert [one["version/newest"] for one in metrics] == [max(versions[step]) for step in (1, 2, 3, 4, 5)]


def test_without_overlap_a_step_is_sampled_by_the_weights_that_learn_from_it(recipe: Path, tmp_path: Path) -> None:
    run(recipe)
    assert versions_of_steps(tmp_path / "run") == {1: {0}, 2: {1}, 3: {2}}
    for step, metrics in enumerate(lines(tmp_path / "run" / "metrics.jsonl")):
        assert (metrics["version/oldest"], metrics["version/newest"]) == (step, step)


@pytest.mark.slow
def test_overlapping_takes_the_same_rows_in_the_same_order(recipe: Path, tmp_path: Path) -> None:
    rows: list[list[tuple[int, str]]] = []
    for name in ("0", "1"):
        made = run(recipe, f"train.max_staleness={name}", f"output={tmp_path / name}")
        sampled = sum(one["tokens/sampled"] for one in lines(tmp_path / name / "metrics.jsonl"))
        assert made.context.engine.stats.sampled_tokens == sampled  # none is held that no step learns from
        rows.append([(one["step"], one["row"]["id"]) for one in lines(tmp_path / name / "trajectories.jsonl")])
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == [step for step in (1, 2, 3) for _ in range(12)]


@pytest.mark.slow
def test_deterministic_runs_are_bit_identical_and_so_is_one_that_is_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "deterministic=true", "train.steps=4", f"output={tmp_path / 'straight'}")
    run(recipe, "deterministic=true", "train.steps=2", f"output={tmp_path / 'parts'}")
    run(recipe, "deterministic=true", "train.steps=4", f"output={tmp_path / 'parts'}", "resume=auto")
    straight, parts = (lines(tmp_path / name / "metrics.jsonl") for name in ("straight", "parts"))
    assert len(straight) == 4
    assert timeless(parts) == timeless(straight)


def test_resuming_takes_back_what_no_checkpoint_holds(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "train.steps=2")
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 3, "half a li')
    run(recipe, "train.steps=3", "resume=auto")
    assert [one["step"] for one in lines(metrics)] == [1, 2, 3]
    assert len(lines(tmp_path / "run" / "trajectories.jsonl")) == 36


@pytest.mark.parametrize(
    ("options", "told"),
    [(["model.autocast=true"], "model.autocast=true"), (["model.dtype=bfloat16"], "model.dtype=bfloat16"), ([], None)],
)
def test_bfloat16_on_a_cpu_that_has_no_such_products_is_told(
    options: list[str],
    told: str | None,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for multiplies in (False, True):
        caplog.clear()
        monkeypatch.setattr(learners, "multiplies_bfloat16", lambda multiplies=multiplies: multiplies)
        assemble(load(recipe, [*options, f"output={recipe.parent / str(multiplies)}"])[0])
        slow = [one.getMessage() for one in caplog.records if "no products in bfloat16" in one.getMessage()]
        assert len(slow) == (told is not None and not multiplies)
        assert all(text.startswith(f"{told}: this CPU has no products") for text in slow)


def test_a_former_run_is_not_overwritten(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "train.steps=1")
    with pytest.raises(RunError, match=r"contains a run already.*resume=auto.*replace=true"):
        run(recipe, "train.steps=1")
    run(recipe, "train.steps=2", "replace=true")
    (former,) = tmp_path.glob("run-until-*")
    assert len(lines(former / "metrics.jsonl")) == 1
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_broken_conversations_are_left_out_and_told(recipe: Path, tmp_path: Path) -> None:
    run(recipe, f"environment={PLACES}:raises_now_and_then", "train.batch_size=8", "train.steps=1")
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    broken = [one for one in lines(tmp_path / "run" / "trajectories.jsonl") if one["error"]]
    # four of the eight rows, except for conversations whose only turn was cut and never reached the environment
    assert 12 <= len(broken) <= 16
    assert metrics["failed"] == metrics["stop/error"] == len(broken) / 32
    assert {int(one["row"]["id"]) % 2 for one in broken} == {1}
    assert broken[0]["error"]["kind"] == "environment"
    assert "does not suit me" in broken[0]["error"]["message"]
    assert broken[0]["reward"] is None
    assert broken[0]["turns"][0]["advantage"] is None


def test_a_reward_that_is_no_number_breaks_its_trajectory_only(recipe: Path, tmp_path: Path) -> None:
    run(recipe, f"reward.trajectory=['{PLACES}:not_a_number']", "train.batch_size=8", "train.steps=1")
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics["failed"] == 0.5
    kinds = {one["error"]["kind"] for one in lines(tmp_path / "run" / "trajectories.jsonl") if one["error"]}
    assert kinds == {"reward"}


def test_a_step_in_which_everything_breaks_ends_the_run_with_the_reason_and_is_recorded(
    recipe: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        RolloutError,
        match=r"(?s)all conversations of step 1 failed.*environment \(12 times\).*no luck today.*"
        r"\nRead one: turnwise show .*run --failed --last 1$",
    ):
        run(recipe, f"environment={PLACES}:always_raises")
    broken = lines(tmp_path / "run" / "trajectories.jsonl")
    assert [(one["step"], one["error"]["kind"]) for one in broken] == [(1, "environment")] * 12
    run(recipe, "train.steps=1", "resume=auto")  # with an environment that works
    recorded = lines(tmp_path / "run" / "trajectories.jsonl")
    assert [(one["step"], one["error"]) for one in recorded] == [(1, None)] * 12


def test_a_context_longer_than_the_models_is_refused(recipe: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"limits\.context=5000 is more than the model's longest context, 1024 tokens: lower it"
    ):
        run(recipe, "limits.context=5000")


def test_a_prompt_that_leaves_no_room_breaks_its_row(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "mixed.jsonl"
    rows = [{"prompt": "x" * 200, "answer": "1"}, *({"prompt": "short", "answer": "1"} for _ in range(2))]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    run(recipe, f"data.train={data}", "limits.context=100", "train.steps=1")
    broken = [one for one in lines(tmp_path / "run" / "trajectories.jsonl") if one["error"]]
    assert [one["error"]["kind"] for one in broken] == ["row"] * 4
    assert "limits.context is 100" in broken[0]["error"]["message"]


@pytest.mark.slow
def test_a_disk_that_takes_no_more_keeps_the_old_checkpoint(recipe: Path, tmp_path: Path) -> None:
    """The system refuses to let a file grow beyond a limit, in the middle of writing the optimizer's state."""
    run(recipe, "train.steps=1")
    before = (tmp_path / "run" / "checkpoint").resolve()
    whole = (before.parent / "trainer.pt").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole // 2, limits[1]))
    try:
        with pytest.raises(
            RunError, match=r"the checkpoint of step 2 could not be written.*the previous checkpoint is complete"
        ):
            run(recipe, "train.steps=2", "resume=auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "run" / "checkpoint").resolve() == before
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    run(recipe, "train.steps=2", "resume=auto")
    assert [one["step"] for one in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dense", "qwen3_5"])
def test_kill_minus_nine_at_odd_moments_changes_no_bit(recipe: Path, tmp_path: Path, family: str) -> None:
    options = ["deterministic=true", "train.steps=8", "resume=auto"]
    moments = ((1, 0.0), (3, 0.11), (6, 0.02))
    if family != "dense":  # recurrent states, which are not in a checkpoint
        options += [f"model.path={save_hybrid(tmp_path / 'hybrid', family)}"]
        moments = moments[1:2]
    straight = Started(recipe, *options, f"output={tmp_path / 'straight'}", fresh=True)
    assert straight.wait() == 0, straight.log.read_text()
    killed = tmp_path / "killed"
    for count, delay in moments:
        Started(recipe, *options, f"output={killed}").kill_after_steps(killed / "metrics.jsonl", count, delay)
    last = Started(recipe, *options, f"output={killed}")
    assert last.wait() == 0, last.log.read_text()
    expected = timeless(lines(tmp_path / "straight" / "metrics.jsonl"))
    assert len(expected) == 8
    assert timeless(lines(killed / "metrics.jsonl")) == expected
    conversations = [lines(tmp_path / name / "trajectories.jsonl") for name in ("straight", "killed")]
    tokens = [[segment["token_ids"] for one in run_ for segment in one["segments"]] for run_ in conversations]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_and_can_be_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    options = ["train.steps=400", "checkpoint.every=400", f"environment={PLACES}:slow"]
    started = Started(recipe, *options)
    started.wait_for_steps(tmp_path / "run" / "metrics.jsonl", 2)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130, started.log.read_text()
    assert "Traceback" not in started.log.read_text()
    assert "resume=auto" in started.log.read_text()
    done = len(lines(tmp_path / "run" / "metrics.jsonl"))
    run(recipe, f"train.steps={done + 1}", "resume=auto", f"environment={PLACES}:slow")
    assert [one["step"] for one in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, done + 2))


# passes over the rows


def _five_rows(tmp_path: Path, model: Path) -> Path:
    from support.tiny import save_rows

    rows = save_rows(tmp_path / "five.jsonl", 5)
    return save_recipe(
        tmp_path,
        model,
        data={"train": str(rows), "eval": str(save_rows(tmp_path / "held.jsonl", 2))},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"epochs": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
        checkpoint={"every": 1},
        deterministic=True,
    )


@pytest.mark.slow
def test_a_run_of_epochs_is_the_run_of_that_many_steps(model: Path, tmp_path: Path) -> None:
    """5 rows twice in batches of 2 are 5 steps: for the schedule of the learning rate, the evaluations and the report too."""
    recipe = _five_rows(tmp_path, model)
    schedule = ["train.lr_schedule=linear", "train.warmup_steps=2"]
    by_epochs = run(recipe, *schedule, f"output={tmp_path / 'a'}")
    by_steps = run(recipe, *schedule, "train.steps=5", f"output={tmp_path / 'b'}")
    metrics = lines(tmp_path / "a" / "metrics.jsonl")
    assert (by_epochs.steps, by_steps.steps, len(metrics)) == (5, 5, 5)
    assert timeless(metrics) == timeless(lines(tmp_path / "b" / "metrics.jsonl"))
    assert [one["epoch"] for one in metrics] == [0.4, 0.8, 1.2, 1.6, 2.0]
    assert [one["step"] for one in lines(tmp_path / "a" / "evaluations.jsonl")] == [0, 5]
    rows = [one["row"]["id"] for one in lines(tmp_path / "a" / "trajectories.jsonl")]
    assert {row: rows.count(row) for row in rows} == dict.fromkeys("12345", 2 * 2)  # each row in two groups of two
    written = Config.model_validate(yaml.safe_load((tmp_path / "a" / "config.yaml").read_text()))
    assert (written.train.steps, written.train.epochs) == (None, 2.0)  # the recipe of the run, which can be run again


@pytest.mark.slow
def test_a_run_of_epochs_is_resumed_with_more_epochs(model: Path, tmp_path: Path) -> None:
    recipe = _five_rows(tmp_path, model)
    run(recipe, "data.eval=null", f"output={tmp_path / 'whole'}")
    assert run(recipe, "data.eval=null", "train.epochs=1", f"output={tmp_path / 'parts'}").step == 3
    resumed = run(recipe, "data.eval=null", "train.epochs=2", "resume=auto", f"output={tmp_path / 'parts'}")
    assert resumed.step == 5
    whole, parts = (timeless(lines(tmp_path / name / "metrics.jsonl")) for name in ("whole", "parts"))
    assert parts == whole
    finished = run(recipe, "data.eval=null", "train.epochs=2", "resume=auto", f"output={tmp_path / 'parts'}")
    assert (finished.step, len(lines(tmp_path / "parts" / "metrics.jsonl"))) == (5, 5)


def test_options_that_contradict_the_epochs_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.steps=7 and train.epochs=2 both say how long the run is: remove one"):
        run(_five_rows(tmp_path, model), "train.steps=7", "train.epochs=2")


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [(1.5, 10, 4, 4), (1.1, 10, 11, 1), (0.1, 30, 3, 1), (0.01, 5, 4, 1), (3, 17, 16, 4)],
)
def test_the_steps_of_epochs_are_exact(epochs: float, rows: int, batch: int, steps: int) -> None:
    assert steps_of_epochs(epochs, rows, batch) == steps  # in floating point, 1.1 * 10 / 11 is more than 1


# What a step of training learns from: all that its loss depends on, and nothing that is made up.


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
    train_silently(run)


def held(run: TrainingRun) -> list[Group]:
    """The groups of the first step, scored and with advantages."""

    async def hold() -> list[Group]:
        rollouts = await run.pipeline.take()
        run.policies[0].credit(rollouts.groups)
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
    batches = pack_groups(run, run.policies[0], groups)
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
    (batch,) = pack_groups(run, run.policies[0], held(run))
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
    batches = pack_groups(run, run.policies[0], groups)
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
    assert len(pack_groups(run, run.policies[0], groups)) == 11
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
    update = asyncio.run(run.learner.update(pack_groups(run, run.policies[0], groups), lr=0.0))
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
    _warn_of_disagreement(run, run.policies[0], UpdateStats(fresh_deviation=deviation), groups)
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


@pytest.mark.slow
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
    from turnwise.models.loading import ModelSource, load_model

    return load_model(ModelSource(path=str(path), device="cpu"))


def test_an_engine_without_log_probabilities_cannot_be_behind(model: Path, tmp_path: Path) -> None:
    run = assembled(model, tmp_path, "low_bytes", max_staleness=1)
    run.pipeline.context = replace(run.context, engine=Unknown(run.context.engine))
    with pytest.raises(
        RolloutError, match=r"of step 2 failed.*\n.*engine.*was sampled by weights of version 0.*'none'"
    ):
        learnt(run)
    assert run.step == 1
