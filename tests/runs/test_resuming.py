"""A run that is resumed is the run that it was: its reference, its options, its data; and nothing that was there is lost."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from support import byte_tokenizer
from support.forked import Forked
from support.recipes import save_recipe
from support.tiny import save_model, save_rows
from support.training import train_silently
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.config.resume_rules import RULES, Change, check_options, named_changes, option_values
from turnwise.config.train_checks import refuse_without_effect
from turnwise.doctor.options import schema
from turnwise.errors import ConfigError, RunError
from turnwise.options.schema import Config
from turnwise.record.run_directory import RunLock
from turnwise.record.summary import summarize_run
from turnwise.runs.resuming import open_run
from turnwise.runs.run_state import checkpoint_due
from turnwise.terminal.runs import option_lines
from turnwise.training.checkpoint import Checkpoints

PLACES = Path(__file__).parents[1] / "support" / "places.py"
FAULTS = PLACES.with_name("writing_faults.py")


def write_recipe(folder: Path, model: Path) -> Path:
    return save_recipe(
        folder,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 3, "lr": 0.01},
        checkpoint={"every": 1},
    )


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path, model)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run of two steps, which tests copy."""
    recipe = write_recipe(tmp_path_factory.mktemp("finished"), model)
    run(recipe, f"data.eval={save_rows(recipe.parent / 'eval.jsonl', 2)}")
    return recipe


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A recipe whose run has two steps and two checkpoints."""
    shutil.copytree(finished.parent, tmp_path / "copy", symlinks=True)
    path = tmp_path / "copy" / "recipe.yaml"
    path.write_text(path.read_text().replace(str(finished.parent), str(tmp_path / "copy")))
    return path


def run(recipe: Path, *overrides: str) -> Any:
    """Train in this process."""
    from turnwise.train import assemble

    made = assemble(load(recipe, overrides)[0])
    train_silently(made)
    return made


def resume(recipe: Path, *overrides: str) -> Any:
    return run(recipe, "resume=auto", *overrides)


def opened(recipe: Path, *overrides: str) -> Any:
    """What resuming finds, without loading anything."""
    return open_run(load(recipe, ["resume=auto", *overrides])[0], "train")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if not key.startswith("seconds/")} for one in lines(path)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# the reference


@pytest.mark.slow
def test_the_reference_of_a_resumed_run_is_the_model_before_training(recipe: Path, tmp_path: Path) -> None:
    options = ["deterministic=true", "loss.kl_coef=0.1", "train.lr=0.05"]
    run(recipe, *options, "train.steps=3", f"output={tmp_path / 'straight'}")
    run(recipe, *options, "train.steps=2", f"output={tmp_path / 'parts'}")
    resume(recipe, *options, "train.steps=3", f"output={tmp_path / 'parts'}")
    straight, parts = (timeless(tmp_path / name / "metrics.jsonl") for name in ("straight", "parts"))
    assert straight[2]["kl"] > 0.01
    assert parts == straight


def test_a_run_with_a_reference_that_has_changed_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    recipe = write_recipe(tmp_path, model)
    run(recipe, "loss.kl_coef=0.1")
    before = contents(tmp_path / "run")
    save_model(model, seed=1)
    with pytest.raises(
        RunError, match=r"needs the model before training as the reference model.*changed since the run"
    ):
        resume(recipe, "loss.kl_coef=0.1", "train.steps=3")
    after = contents(tmp_path / "run")
    assert {name for name in after if after[name] != before.get(name)} <= {".lock"}


# options, data and tokenizer


def test_every_option_says_whether_it_may_change_when_a_run_is_resumed() -> None:
    assert set(RULES) == set(schema())


def test_the_values_that_are_compared_are_those_of_every_option(recipe: Path) -> None:
    config = load(recipe, [f"reward.turns=['{PLACES}:turn_length']"])[0]
    values = option_values(config)
    assert set(values) <= set(RULES)
    # the others are options of another engine, estimator or loss than those that the recipe names
    for option in set(RULES) - set(values):
        section, _, name = option.rpartition(".")
        assert section in ("credit", "engine", "loss")
        assert name not in type(getattr(config, section)).model_fields
    assert values["train.betas"] == [0.9, 0.999]
    assert values["reward.turns[].use"] == [f"{PLACES}:turn_length"]
    assert (values["environment.use"], values["environment.arguments"]) == (f"{PLACES}:low_bytes", {})
    assert json.loads(json.dumps(values)) == values


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.betas=[0.5,0.9]", r"train\.betas=\[0\.5, 0\.9\] \(the run used \[0\.9, 0\.999\]\)"),
        ("train.weight_decay=0.5", r"train\.weight_decay=0\.5 \(the run used 0\.0\)"),
        ("train.lr=0.5", r"train\.lr=0\.5 \(the run used 0\.01\)"),
        ("seed=7", r"seed=7 \(the run used 0\)"),
        ("sampling.temperature=0.5", r"sampling\.temperature=0\.5 \(the run used 1\.0\)"),
        (f"environment.use={PLACES}:slow", r"environment\.use=.*slow.*\(the run used .*low_bytes"),
        (
            f"reward.trajectory=['{PLACES}:length']",
            r"reward\.trajectory\[\]\.use=\['.*:length'\] \(the run used \[\]\)",
        ),
        ("loss.kl_coef=0.5", r"loss\.kl_coef=0\.5"),
        ("model.dtype=bfloat16", r"model\.dtype=bfloat16.*\n.*model\.dtype cannot change"),
        ("model.path=/somewhere/else", r"model\.path=/somewhere/else.*\n.*start another run from its weights"),
    ],
)
def test_a_change_that_makes_it_another_run_is_refused(copied: Path, change: str, told: str) -> None:
    with pytest.raises(RunError, match=rf"cannot be resumed with other options:\n  {told}"):
        opened(copied, change)
    if "cannot change" not in told:
        with pytest.raises(RunError, match=rf"resume_changes='\[\"?{change.partition('=')[0]}"):
            opened(copied, change)


def test_the_fix_that_names_an_option_of_a_list_is_yaml_behind_a_shell(copied: Path) -> None:
    names = ["train.lr", "teacher.models[].path"]
    teacher = ["resume=auto", "teacher.path=big", *shlex.split(named_changes(names))]
    assert load(copied, teacher)[0].resume_changes == names


def test_what_changes_nothing_that_is_learned_may_change_and_is_reported(copied: Path) -> None:
    made = resume(copied, "train.steps=3", "checkpoint.keep=1", "max_concurrent=2", "train.micro_batch_tokens=64")
    assert made.notes[0].startswith("resuming with data.eval=None (was /")
    assert [note for note in made.notes[1:] if note.startswith("resuming with")] == [
        "resuming with train.steps=3 (was 2)",
        "resuming with train.micro_batch_tokens=64 (was None)",
        "resuming with checkpoint.keep=1 (was 2)",
        "resuming with max_concurrent=2 (was 256)",
    ]
    assert made.notes[-1] == "resuming after step 2"
    folder = copied.parent / "run"
    assert [one["step"] for one in lines(folder / "metrics.jsonl")] == [1, 2, 3]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000003"]


def test_a_change_that_is_named_takes_effect(copied: Path) -> None:
    changes = ["train.lr=0.25", "train.betas=[0.5,0.75]", "train.weight_decay=0.125"]
    names = "resume_changes=[train.lr, train.betas, train.weight_decay]"
    made = resume(copied, "train.steps=3", *changes, names)
    (group,) = made.learner._optimizer._optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.75), 0.125)
    assert [one["lr"] for one in lines(copied.parent / "run" / "metrics.jsonl")] == [0.01, 0.01, 0.25]
    about = summarize_run(copied.parent / "run")
    changed = [(one["option"], one["from"], one["to"]) for one in about.changes if one["after_step"] == 2]
    assert ("train.lr", 0.01, 0.25) in changed
    assert "  changed after step 2: train.lr from 0.01 to 0.25" in [str(line) for line in option_lines(about)]
    # from now on they are the run's own: the same command again changes nothing, the old values would
    assert opened(copied, "train.steps=3", *changes, names).step == 3
    with pytest.raises(RunError, match=r"train\.lr=0\.01 \(the run used 0\.25\)"):
        opened(copied, "train.steps=3")


@pytest.mark.parametrize("section", ["train", "sft"])
def test_more_steps_of_a_falling_rate_are_told_what_they_change(recipe: Path, section: str) -> None:
    def notes(schedule: str) -> list[str]:
        schedules = [f"{section}.lr_schedule={schedule}", f"{section}.warmup_steps=0"]
        before, now = (option_values(load(recipe, [*schedules, f"{section}.steps={n}"])[0]) for n in (7, 9))
        made = check_options(before, now, named=[], where="run", checkpoint="run/checkpoint")
        return [change.note for change in made]

    plain = f"resuming with {section}.steps=9 (was 7)"
    assert notes("constant") == [plain]
    assert notes("cosine") == [
        f"{plain}; {section}.lr_schedule=cosine now ends at the new last step: the next rates are others"
    ]


def test_an_option_that_is_newer_than_the_run_had_its_default(copied: Path) -> None:
    former = option_values(load(copied)[0])
    del former["train.max_staleness"]

    def check(*overrides: str) -> list[Change]:
        now = option_values(load(copied, overrides)[0])
        return check_options(former, now, named=[], where="run", checkpoint="run/checkpoint")

    assert check() == []
    with pytest.raises(RunError, match=r"train\.max_staleness=1 \(the run used 0\)"):
        check("train.max_staleness=1")
    former["tool_format"] = "auto"  # a name, before formats could have arguments
    assert check() == []
    with pytest.raises(RunError, match=r"tool_format=.*hermes"):
        check("tool_format=hermes")


def test_another_opponent_on_a_server_is_a_change_that_must_be_named(recipe: Path) -> None:
    def values(model: str) -> dict[str, Any]:
        endpoint = f"policies={{strong: {{endpoint: {{url: 'http://host/v1', model: {model}}}}}}}"
        return option_values(load(recipe, [endpoint, "deterministic=false"])[0])

    def check(named: list[str]) -> list[Change]:
        return check_options(values("m1"), values("m2"), named=named, where="run", checkpoint="run/checkpoint")

    with pytest.raises(RunError, match=r"policies\[\]\.endpoint=.*m2.*the run used .*m1"):
        check([])
    assert len(check(["policies[].endpoint"])) == 1


def test_a_trained_policy_keeps_the_adapter_that_the_checkpoint_has(recipe: Path) -> None:
    def values(**alphas: int) -> dict[str, Any]:
        policies = {name: {"train": True, "lora": {"rank": 4, "alpha": alpha}} for name, alpha in alphas.items()}
        return option_values(load(recipe, [f"policies={json.dumps(policies)}", "model.lora.rank=4"])[0])

    def check(now: dict[str, Any]) -> list[Change]:
        named = [key for key in now if key.startswith("policies[].")]
        return check_options(values(second=8), now, named=named, where="run", checkpoint="run/checkpoint")

    assert check(values(second=8, third=16))
    with pytest.raises(RunError, match=r"policies\[\]\.lora cannot change"):
        check(values(second=16))


@pytest.mark.slow
def test_files_of_a_frozen_policy_that_changed_are_refused(recipe: Path, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    options = [f"policies={{opponent: '{other}'}}", f"environment={PLACES}:low_bytes"]
    run(recipe, *options, "train.steps=1")
    assert resume(recipe, *options, "train.steps=2").step == 2
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 1}))
    with pytest.raises(RunError, match=r"the files of the policy 'opponent' in .*other changed.*policies\[\]\.path"):
        resume(recipe, *options, "train.steps=3")
    assert resume(recipe, *options, "train.steps=3", "resume_changes=['policies[].path']").step == 3
    assert resume(recipe, *options, "train.steps=4").step == 4  # from now on they are the run's own


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["resume=auto", "resume_changes=[reward]"],
            "reward is a section: name the options in it that differ, such as",
        ),
        (["resume_changes=[train.lr]"], "resume_changes has no effect without resume=auto"),
        (["resume=auto", "resume_changes=[train.lrr]"], "there is no option train.lrr; did you mean 'train.lr'?"),
        (["resume=auto", "resume_changes=[train.steps]"], "train.steps may always change; remove it from the list"),
        (["resume=auto", "resume_changes=[model.dtype]"], "model.dtype cannot change when a run is resumed"),
    ],
)
def test_a_name_without_effect_is_refused(recipe: Path, options: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_run(load(recipe, options)[0], "train")
    assert told in str(raised.value)


def test_other_rows_are_refused_and_the_same_rows_elsewhere_are_not(copied: Path, tmp_path: Path) -> None:
    data = copied.parent / "train.jsonl"
    moved = shutil.copy(data, tmp_path / "moved.jsonl")
    resume(copied, f"data.train={moved}", "train.steps=3")
    assert len(lines(copied.parent / "run" / "metrics.jsonl")) == 3
    with pytest.raises(
        RunError, match=r"the rows of data\.train=.* are not the rows .* \(8 rows at the start, 4 rows now\)"
    ):
        resume(copied, "data.max_rows=4", "train.steps=4")
    text = data.read_text()
    data.write_text(text.replace('"answer": "3"', '"answer": "4"'))
    with pytest.raises(
        RunError, match=r"are not the rows .* \(the number of rows is the same\).*resume_changes='\[data\.train\]'"
    ):
        resume(copied, "train.steps=4")
    resume(copied, "train.steps=4", "resume_changes=[data.train]")
    resume(copied, "train.steps=5")
    data.write_text(text)
    with pytest.raises(RunError, match="are not the rows that the run"):
        resume(copied, "train.steps=6")


@pytest.mark.slow
def test_another_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    recipe = write_recipe(tmp_path, model)
    run(recipe, "train.steps=1")
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("Tools:", "Your tools:"))
    with pytest.raises(
        RunError, match=r"the tokenizer or the chat template in model\.path=.* changed since the run in"
    ):
        resume(recipe)
    (model / "chat_template.jinja").write_text(template)
    resume(recipe)
    shutil.rmtree(model)  # a run has its own copy of the tokenizer
    made = resume(recipe, "train.steps=3")
    assert any(
        "model.path has no tokenizer any more, so the tokenizer of the checkpoint is used" in note
        for note in made.notes
    )
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_fine_tuning_is_resumed_by_the_same_rules(model: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": talk}, {"messages": [*talk, *talk]}]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(model)},
                "data": {"train": str(tmp_path / "talks.jsonl")},
                "sft": {"steps": 1, "batch_size": 2},
                "output": str(tmp_path / "tuned"),
            }
        )
    )
    assert main(["sft", str(recipe)]) == 0
    from turnwise.sft.fine_tune import assemble

    def again(*words: str) -> Any:
        return assemble(load(recipe, ["resume=auto", *words])[0])

    with pytest.raises(RunError, match=r"sft\.weight_decay=0\.5 \(the run used 0\.0\)"):
        again("sft.weight_decay=0.5")
    with pytest.raises(RunError, match=r"sft\.batch_size cannot change"):
        again("sft.batch_size=1")
    with pytest.raises(RunError, match=r"the rows of data\.train"):
        again("data.max_rows=1")
    assert again("sft.steps=2").step == 1


# checkpoints that are gone, damaged, or somebody else's


def test_a_checkpoint_of_an_earlier_layout_is_named_as_such(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step-000003"
    step.mkdir(parents=True)
    for name in ("config.json", "trainer.pt"):  # the model's files and the trainer's state in one directory
        (step / name).write_text("{}")
    (tmp_path / "checkpoint").symlink_to(step.relative_to(tmp_path))
    with pytest.raises(RunError, match=r"step-000003 was written by an earlier version of turnwise.*model\.path="):
        Checkpoints(tmp_path).find()


def test_the_state_of_the_optimizer_is_written_while_the_model_is(tmp_path: Path) -> None:
    seen: list[bool] = []

    def save(folder: Path) -> None:
        state, end = folder.parent / "trainer.pt", time.monotonic() + 60
        while not state.exists() and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(state.exists())
        (folder / "config.json").write_text("{}")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, save_model=save, tokenizer=byte_tokenizer(), state={"policy": {"steps": torch.tensor(7)}})
    found = checkpoints.find()
    assert seen == [True]
    assert found is not None
    assert found.state()["policy"]["steps"] == 7
    names = [line.partition("  ")[2] for line in (found.folder / "SHA256SUMS").read_text().splitlines()]
    assert set(names) == {
        path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*") if path.is_file()
    } - {"SHA256SUMS"}


def test_a_link_that_is_gone_or_names_nothing_loses_no_run(copied: Path) -> None:
    folder = copied.parent / "run"
    (folder / "checkpoint").unlink()
    found = opened(copied)
    assert (found.step, found.notes[0]) == (
        2,
        f"{folder / 'checkpoint'} was removed: resuming from {folder / 'checkpoints' / 'step-000002'}, "
        "the newest complete checkpoint",
    )
    (folder / "checkpoint").symlink_to("checkpoints/step-000009/model")
    found = opened(copied)
    assert (found.step, found.notes[0].partition(":")[0]) == (
        2,
        f"the link {folder / 'checkpoint'} points to no checkpoint",
    )
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    resume(copied, "train.steps=3")
    assert [one["step"] for one in lines(folder / "metrics.jsonl")] == [1, 2, 3]
    assert (folder / "checkpoint").resolve().parent.name == "step-000003"


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(copied: Path) -> None:
    folder = copied.parent / "run"
    shutil.rmtree(folder / "checkpoints")
    before = contents(folder)
    with pytest.raises(
        RunError, match=r"points to no checkpoint, and there is no other checkpoint: restore .*checkpoints from a copy"
    ):
        resume(copied)
    (folder / "checkpoint").unlink()
    with pytest.raises(RunError, match=r"the checkpoints of the run in .* were removed; the last was of step 2"):
        resume(copied)
    (folder / "run.json").write_bytes(b"\0")
    with pytest.raises(RunError, match=r"contains files of a run, and no checkpoint to resume from"):
        resume(copied)
    after = contents(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"run.json"}
    assert lines(folder / "metrics.jsonl")[1]["step"] == 2


def test_a_run_that_was_ended_before_its_first_checkpoint_is_begun_anew(copied: Path) -> None:
    folder = copied.parent / "run"
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoint").unlink()
    (folder / "run.json").write_text('{"kind": "train", "checkpoint": null}\n')
    resume(copied)
    assert [one["step"] for one in lines(folder / "metrics.jsonl")] == [1, 2]


def test_conversations_of_a_rollout_are_not_overwritten_by_a_run(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["rollout", str(recipe), "--out", str(out), "rollout.max_rows=1"]) == 0
    before = contents(out)
    assert len(lines(out / "trajectories.jsonl")) == 1
    with pytest.raises(RunError, match=r"contains files of a run, and no checkpoint .*`turnwise rollout` writes none"):
        resume(recipe)
    assert {name: content for name, content in contents(out).items() if name in before} == before


def test_a_rollout_does_not_write_into_a_run(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied.parent / "run"
    before = contents(folder)
    assert main(["rollout", str(copied), "--out", str(folder), "rollout.max_rows=1"]) == 1
    assert "contains a run of `turnwise train` or `sft`: choose another directory" in capsys.readouterr().err
    assert contents(folder) == before


def test_only_the_runs_own_checkpoints_are_counted_and_deleted(copied: Path) -> None:
    folder = copied.parent / "run" / "checkpoints"
    shutil.copytree(folder / "step-000001", folder / "step-000001-best")
    shutil.copytree(folder / "step-000001", folder / "step-000000")  # a copy under a number that is not its own
    (folder / "step-000009").mkdir()
    (folder / "step-000009" / "notes.txt").write_text("mine")
    (folder / "writing-up").mkdir()
    resume(copied, "train.steps=4")
    names = {path.name for path in folder.iterdir()}
    assert names == {"step-000000", "step-000001-best", "step-000003", "step-000004", "step-000009", "writing-up"}


def test_a_directory_of_somebody_else_is_not_replaced_by_a_checkpoint(copied: Path) -> None:
    folder = copied.parent / "run" / "checkpoints" / "step-000003"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(
        RunError,
        match=r"the checkpoint of step 3 cannot be written, because .*step-000003 exists and is not a checkpoint",
    ):
        resume(copied, "train.steps=3")
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_run_can_be_resumed_from_an_older_checkpoint_of_its_own(copied: Path) -> None:
    folder = copied.parent / "run"
    (folder / "checkpoint").unlink()
    (folder / "checkpoint").symlink_to("checkpoints/step-000001/model")
    resume(copied, "train.steps=2")
    assert [one["step"] for one in lines(folder / "metrics.jsonl")] == [1, 2]
    assert (folder / "checkpoint").resolve().parent.name == "step-000002"


def test_a_checkpoint_is_a_model_directory_beside_what_resuming_needs(copied: Path) -> None:
    link = copied.parent / "run" / "checkpoint"
    step = link.resolve().parent
    assert {path.name for path in step.iterdir()} == {"model", "trainer.pt", "checkpoint.json", "SHA256SUMS"}
    assert "trainer.pt" not in {path.name for path in link.iterdir()}
    assert AutoModelForCausalLM.from_pretrained(link).config.model_type == "qwen3"
    done = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=step, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    listed = {line.split("  ")[1] for line in (step / "SHA256SUMS").read_text().splitlines()}
    assert listed == {name for name in contents(step) if name != "SHA256SUMS"}


STEP = "checkpoints/step-000002"
OF_CHECKPOINT = [f"{STEP}/model/{name}" for name in ("model.safetensors", "config.json", "tokenizer.json")] + [
    f"{STEP}/model/{name}" for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
]
OF_CHECKPOINT += [f"{STEP}/{name}" for name in ("trainer.pt", "checkpoint.json", "SHA256SUMS")]
OF_RECORD = ["metrics.jsonl", "trajectories.jsonl", "evaluations.jsonl", "eval_trajectories.jsonl"]
DAMAGES = ("flipped", "cut", "empty", "binary", "gone", "a directory")


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if how == "a directory":
        path.mkdir()
    elif how != "gone":
        middle = len(content) // 4  # of evaluations the last is later than the checkpoint
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        path.write_bytes({"flipped": flipped, "cut": content[:middle], "empty": b"", "binary": bytes(range(256))}[how])


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", OF_CHECKPOINT)
def test_a_damaged_checkpoint_is_refused_by_name(copied: Path, name: str, how: str) -> None:
    folder = copied.parent / "run"
    damage(folder / name, how)
    before = contents(folder)
    with pytest.raises(RunError) as raised:
        opened(copied)
    message = str(raised.value)
    assert message.startswith(f"the checkpoint {folder / STEP} is damaged: ")
    if not name.endswith("SHA256SUMS"):
        assert name.removeprefix(f"{STEP}/") in message
    assert "step-000001 is complete: to resume from it, remove step-000002" in message
    assert contents(folder) == {**before, ".lock": contents(folder)[".lock"]}
    shutil.rmtree(folder / STEP)
    assert opened(copied).step == 1


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", OF_RECORD)
def test_a_damaged_record_is_refused_by_name_and_one_that_was_moved_away_is_reported(
    copied: Path, name: str, how: str
) -> None:
    folder = copied.parent / "run"
    damage(folder / name, how)
    found = opened(copied)
    before = contents(folder)
    if how == "gone":
        assert found.directory.cut_back(found.saved.about["marks"]) == [
            f"{folder / name} was removed: its lines of earlier steps are lost"
        ]
        return
    with pytest.raises(RunError, match="cannot be written" if how == "a directory" else r"is damaged: it"):
        found.directory.cut_back(found.saved.about["marks"])
    assert contents(folder) == before


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "binary", "gone"])
@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_what_a_checkpoint_knows_anyway_is_written_anew(copied: Path, name: str, how: str) -> None:
    folder = copied.parent / "run"
    damage(folder / name, how)
    found = opened(copied, f"data.eval={copied.parent / 'eval.jsonl'}")
    found.directory.prepare(found.config, resuming=True)
    found.directory.note_checkpoint(found.step)
    if name == "run.json":
        # the note of how the run ended is gone: it goes on
        assert json.loads((folder / name).read_text()) == {"kind": "train", "checkpoint": 2}
    else:
        assert Config.model_validate(yaml.safe_load((folder / name).read_text())).train.batch_size == 2


# one process at a time


HOLD = (
    "import sys, time; from pathlib import Path\nfrom turnwise.record.run_directory import RunLock\n"
    "lock = RunLock(Path(sys.argv[1])); "
)


def test_a_directory_is_written_by_one_process_and_free_when_that_is_killed(copied: Path) -> None:
    folder = copied.parent / "run"
    # a child of the holder, which outlives it, does not hold the lock
    code = HOLD + "import os; pid = os.fork(); os.write(1, b'%d\\n' % pid) if pid else 0; time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(
            RunError, match=rf"another process \(process {holder.pid} on .*\) is writing {folder}: wait"
        ):
            opened(copied)
        with pytest.raises(RunError, match=r"another process .* is writing"):
            run(copied, "replace=true")
        assert folder.is_dir()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert opened(copied).step == 2
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
        holder.wait()


def test_a_rollout_holds_the_lock_of_its_directory(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD + "print('held', flush=True); time.sleep(60)", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        assert main(["rollout", str(recipe), "--out", str(tmp_path / "out"), "rollout.max_rows=1"]) == 1
        assert "is writing" in capsys.readouterr().err
        assert not (tmp_path / "out" / "trajectories.jsonl").exists()
    finally:
        holder.kill()
        holder.stdout.close()
        holder.wait()
    assert main(["rollout", str(recipe), "--out", str(tmp_path / "out"), "rollout.max_rows=1"]) == 0


def test_the_lock_is_released_when_a_run_ends(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "train.steps=1")
    code = HOLD + "print('held')"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.stdout == "held\n", done.stderr
    RunLock(tmp_path / "run").release()


# how often


@pytest.mark.parametrize(
    ("step", "every", "since", "cost", "due"),
    [
        (1, None, 5.0, None, True),  # the first tells what one costs
        (2, None, 0.0, 0.0, True),
        (2, None, 32.0, 1.0, False),
        (2, None, 32.4, 1.0, True),  # 1 of 33.4 seconds
        (2, None, 300.0, 10.0, False),
        (2, None, 324.0, 10.0, True),
        (3, 2, 1e9, 0.1, False),
        (4, 2, 0.0, 1e9, True),
    ],
)
def test_by_default_checkpoints_take_at_most_three_per_cent_of_the_time(
    step: int, every: int | None, since: float, cost: float | None, due: bool
) -> None:
    assert checkpoint_due(step, every=every, since=since, cost=cost) is due


def test_the_time_of_checkpoints_is_in_the_metrics(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "train.steps=4", "checkpoint.every=2")
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [one["seconds/checkpoint"] > 0 for one in metrics] == [False, True, False, True]
    for one in metrics:
        parts = one["seconds/rollout"] + one["seconds/train"] + one["seconds/checkpoint"]
        assert parts <= one["seconds/step"] + 0.001
        assert one["seconds/step"] - parts < 0.5 * one["seconds/step"] + 0.05


@pytest.mark.slow
def test_the_default_writes_the_first_and_the_last_and_few_between(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "train.steps=8", "checkpoint.every=null", "checkpoint.keep=8")
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps[0] == 1
    assert steps[-1] == 8
    assert len(steps) < 8


@pytest.mark.slow
def test_a_checkpoint_that_is_written_in_the_background_is_that_of_its_step(recipe: Path, tmp_path: Path) -> None:
    options = ["deterministic=true", "train.steps=4", "checkpoint.keep=4", f"output={tmp_path / 'plain'}"]
    run(recipe, *options)
    made = run(recipe, *options, "checkpoint.background=true", f"output={tmp_path / 'beside'}")
    assert made.saved == 4
    for step in range(1, 5):
        plain, beside = (tmp_path / name / "checkpoints" / f"step-{step:06d}" for name in ("plain", "beside"))
        assert contents(plain / "model") == contents(beside / "model")
        states = [torch.load(folder / "trainer.pt")["policy"]["optimizer"]["state"][0] for folder in (plain, beside)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    # as a run that was killed while it wrote the last
    shutil.rmtree(tmp_path / "beside" / "checkpoints" / "step-000004")
    (tmp_path / "beside" / "checkpoint").unlink()
    resume(recipe, *options, "checkpoint.background=true", f"output={tmp_path / 'beside'}")
    last = [contents(tmp_path / name / "checkpoint") for name in ("plain", "beside")]
    assert last[0] == last[1]


def in_a_process(recipe: Path, *overrides: str, fault: str) -> Forked:
    """Start a run with checkpoints in the background, whose writing goes wrong (`support/writing_faults.py`)."""
    words = [f"environment={FAULTS}:low_bytes", "deterministic=true", "checkpoint.background=true", *overrides]
    return Forked(["train", str(recipe), *words], env={**os.environ, "TURNWISE_TEST_WRITING": fault})


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_resumes_from_the_checkpoint_before_bit_by_bit(
    recipe: Path, tmp_path: Path
) -> None:
    options = [f"environment={FAULTS}:low_bytes", "deterministic=true", "train.steps=5", "checkpoint.best=null"]
    run(recipe, *options, f"output={tmp_path / 'straight'}")
    process = in_a_process(recipe, "train.steps=5", fault="kill:3")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, output
    assert "writing-000003" in names(tmp_path / "run")  # half of it
    assert (tmp_path / "run" / "checkpoint").resolve() == tmp_path / "run" / "checkpoints" / "step-000002" / "model"
    found = Checkpoints(tmp_path / "run").find()
    assert found is not None
    assert found.step == 2
    resume(recipe, *options, "checkpoint.background=true")
    assert names(tmp_path / "run") == {"step-000004", "step-000005"}
    assert contents(tmp_path / "run" / "checkpoint") == contents(tmp_path / "straight" / "checkpoint")
    assert timeless(tmp_path / "run" / "metrics.jsonl") == timeless(tmp_path / "straight" / "metrics.jsonl")


@pytest.mark.slow
def test_a_signal_waits_until_the_checkpoint_is_written(recipe: Path, tmp_path: Path) -> None:
    process = in_a_process(recipe, "train.steps=500", fault="slow:2")
    deadline = time.monotonic() + 600
    while not (tmp_path / "run" / "checkpoints" / "writing-000002").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 143, output
    last = len(lines(tmp_path / "run" / "metrics.jsonl"))
    assert last >= 2
    assert {f"step-{last:06d}", f"step-{last - 1:06d}"} == names(tmp_path / "run")
    assert f"the newest checkpoint is that of step {last}: " in output


@pytest.mark.slow
def test_after_a_failed_writing_the_last_finished_step_is_saved_with_its_own_weights(
    recipe: Path, tmp_path: Path
) -> None:
    options = [f"environment={FAULTS}:low_bytes", "deterministic=true", "train.steps=4", "checkpoint.keep=4"]
    run(recipe, *options, f"output={tmp_path / 'plain'}")
    process = in_a_process(recipe, "train.steps=4", "checkpoint.keep=4", fault="fail-once:2")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    assert "the checkpoint of step 2 could not be written ([Errno 28] No space left on device)" in output
    newest = (tmp_path / "run" / "checkpoint").resolve().parent
    assert newest.name in ("step-000001", "step-000002")  # the failure may be noticed in the middle of step 3
    assert contents(newest / "model") == contents(tmp_path / "plain" / "checkpoints" / newest.name / "model")


def test_checkpoints_in_the_background_are_refused_where_the_only_one_is_the_last(recipe: Path) -> None:
    for words in (["train.steps=3", "checkpoint.every=3"], ["train.steps=1", "checkpoint.every=null"]):
        config = load(recipe, [*words, "checkpoint.background=true"])[0]
        with pytest.raises(
            ConfigError, match=r"checkpoint\.background has no effect: the only checkpoint is that of the last"
        ):
            refuse_without_effect(config)
    refuse_without_effect(load(recipe, ["train.steps=3", "checkpoint.every=2", "checkpoint.background=true"])[0])


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_the_reason_of_the_end(recipe: Path, tmp_path: Path) -> None:
    run(recipe, f"environment={FAULTS}:low_bytes", "deterministic=true", "train.steps=1")
    before = contents(tmp_path / "run" / "checkpoint")
    size = max(len(content) for content in before.values())
    process = in_a_process(recipe, "resume=auto", "train.steps=9", fault=f"limit:{size - 1}")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    assert "could not be written" in output
    assert "File too large" in output
    assert names(tmp_path / "run") == {"step-000001"}
    assert contents(tmp_path / "run" / "checkpoint") == before


def weights(path: Path) -> Sequence[torch.Tensor]:
    return [value for _, value in sorted(AutoModelForCausalLM.from_pretrained(path).state_dict().items())]


def test_an_error_leaves_the_last_finished_step(recipe: Path, tmp_path: Path) -> None:
    """The environment breaks for good after the second step's conversations."""
    flag = tmp_path / "broken"
    (tmp_path / "places.py").write_text(
        "from pathlib import Path\n"
        "from turnwise.environments.environment import environment\n"
        "from turnwise.types import Opening, Reply\n"
        "calls = []\n"
        "@environment\n"
        "async def breaks(row):\n"
        "    turn = yield Opening(messages=row.messages)\n"
        "    calls.append(1)\n"
        "    if len(calls) > 12:\n"
        "        raise RuntimeError('the server is gone')\n"
        "    yield Reply(reward=float(len(calls)), done=True)\n"
    )
    options = ["checkpoint.every=50", "train.steps=9", "limits.turns=1", f"environment={tmp_path / 'places.py'}:breaks"]
    assert main(["train", str(recipe), *options]) == 1
    found = Checkpoints(tmp_path / "run").find()
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert found is not None
    assert found.step == len(metrics) >= 2
    assert len(weights(found.model)) > 0
    assert not flag.exists()
