"""Recipes: how they are read, and which combinations are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.assembly import credit_note
from turnwise.commands.convert import converted
from turnwise.config.recipe import ABSENT, CALLED, DIFFERENT, VALUES, VALUES_THERE, load
from turnwise.config.resume_rules import RULES
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import chosen_estimator, refuse_without_effect, short_run_notes, training_warnings
from turnwise.doctor.options import schema
from turnwise.errors import ConfigError
from turnwise.options.algorithm import Gspo
from turnwise.options.engines import LocalEngineSection, ScriptedEngineSection
from turnwise.options.schema import Config
from turnwise.options.section import Section, changed_options, named_sections
from turnwise.options.teacher import TeacherModel

# Recipes: overrides, environment variables, and everything that is refused, with the value, the rule and the fix.


LEAST = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, LEAST)


def write(path: Path, tree: Any) -> Path:
    file = path / "recipe.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return file


def loaded(path: Path, *overrides: str) -> Config:
    config, notes = load(path, overrides)
    assert notes == []
    return config


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    return str(error.value)


# reading


def test_the_least_recipe_has_defaults_for_everything_else(recipe: Path) -> None:
    config = loaded(recipe)
    assert (config.model.path, config.data.train) == ("m", "rows.jsonl")
    assert config.environment.use == "turnwise.environments.environment:SingleTurn"
    assert isinstance(config.engine, LocalEngineSection)
    assert (config.limits.turns, config.train.group_size, config.sampling.temperature) == (8, 8, 1.0)
    refuse_without_effect(config)


def test_a_text_is_short_for_use(tmp_path: Path) -> None:
    tree = {
        **LEAST,
        "environment": "a:b",
        "tools": ["c:d", {"use": "e:f", "timeout": 2}],
        "reward": {"trajectory": ["g:h", {"use": "i:j", "weight": 0.5, "arguments": {"x": 1}}]},
    }
    config = loaded(write(tmp_path, tree))
    assert (config.environment.use, config.environment.arguments) == ("a:b", {})
    assert [(tool.use, tool.timeout) for tool in config.tools] == [("c:d", None), ("e:f", 2.0)]
    assert [(one.use, one.weight, one.arguments) for one in config.reward.trajectory] == [
        ("g:h", 1.0, {}),
        ("i:j", 0.5, {"x": 1}),
    ]


def test_a_resolved_recipe_is_a_recipe(tmp_path: Path) -> None:
    tree = {
        **LEAST,
        "environment": {"use": "a:b", "arguments": {"lines": ["x", "y"], "n": 3}},
        "tools": ["c:d"],
        "sampling": {"stop": ["###"], "top_p": 0.9},
        "train": {"betas": [0.8, 0.95], "lr": "1e-4", "ppo_epochs": 2},
        "loss": {"clip_low": 0.1},
        "engine": {"slots": 4},
    }
    config = loaded(write(tmp_path, tree))
    dumped = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    again = loaded(write(tmp_path, dumped))
    assert again == config
    assert again.train.betas == (0.8, 0.95)
    refuse_without_effect(again)  # though it names every option
    defaults = loaded(write(tmp_path, LEAST))
    named = yaml.safe_dump(defaults.model_dump(mode="json"))
    refuse_without_effect(loaded(write(tmp_path, named)))


def test_what_is_no_recipe_is_told(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.yaml").startswith(
        f"there is no recipe {tmp_path / 'no.yaml'}; recipes are YAML files"
    )
    assert "is not YAML: " in refused(write(tmp_path, "model: {path: m"))
    assert refused(write(tmp_path, "- a\n- b")).endswith("must contain a mapping of options; it contains a list")
    assert refused(write(tmp_path, "")).endswith("must contain a mapping of options; it contains a NoneType")
    script = write(tmp_path, "python3 -m verl.trainer.main_ppo data.train_files=x")
    assert refused(script).endswith(f"TRL, `turnwise convert {script} --out recipe.yaml` makes one")
    assert "train.prompts; it is called train.batch_size here" in refused(
        write(tmp_path, {"model": "m", "data": "x", "train": {"prompts": 4}})
    )
    (tmp_path / "latin.yaml").write_bytes(b"output: caf\xe9\n")
    assert "latin.yaml is not UTF-8: invalid continuation byte" in refused(tmp_path / "latin.yaml")


# overrides


def test_overrides_are_yaml_and_may_reach_into_what_is_not_there(recipe: Path) -> None:
    config = loaded(
        recipe,
        "train.lr=1e-4",
        "limits.turns=3",
        "limits.seconds=null",
        "sampling.stop=['###', \"a=b\"]",
        "train.max_staleness=1",
        "data.columns={prompt: question}",
        "data.columns.answer=solution",
        "output=runs/x=y",
        "data.system_prompt=",
    )
    assert (config.train.lr, config.limits.turns, config.limits.seconds) == (1e-4, 3, None)
    assert (config.sampling.stop, config.train.max_staleness) == (["###", "a=b"], 1)
    assert config.data.columns == {"prompt": "question", "answer": "solution"}
    assert (config.output, config.data.system_prompt) == ("runs/x=y", None)


def test_an_override_may_reach_into_an_environment_in_short(tmp_path: Path) -> None:
    path = write(tmp_path, {**LEAST, "data": "rows.jsonl", "environment": "a:b"})
    assert loaded(path, "data.max_rows=3").data.model_dump(exclude_unset=True) == {"train": "rows.jsonl", "max_rows": 3}
    config = loaded(path, "environment.arguments.tries=2")
    assert (config.environment.use, config.environment.arguments) == ("a:b", {"tries": 2})
    assert loaded(path, "environment=c:d").environment.use == "c:d"


def test_an_override_may_reach_into_an_item_of_a_list(tmp_path: Path) -> None:
    functions = ["a:b", {"use": "a:c", "weight": 0.5}]
    lists = {"tools": ["a:t"], "loggers": ["tensorboard"]}
    for reward in (functions, {"trajectory": functions}):
        path = write(tmp_path, {**LEAST, **lists, "reward": reward})
        overrides = ("reward.trajectory.0.weight=2", "reward.trajectory.1.weight=0.05", "tools.0.timeout=5")
        config = loaded(path, *overrides, "loggers.0.arguments.project=x", "loggers.0.name=wandb")
        assert [(one.use, one.weight) for one in config.reward.trajectory] == [("a:b", 2.0), ("a:c", 0.05)]
        assert (config.tools[0].use, config.tools[0].timeout) == ("a:t", 5.0)
        assert (config.loggers[0].name, config.loggers[0].arguments) == ("wandb", {"project": "x"})
    assert [one.use for one in loaded(path, "reward.trajectory.0=x:y").reward.trajectory] == ["x:y", "a:c"]


def test_of_two_overrides_of_one_option_the_last_holds(recipe: Path) -> None:
    assert loaded(recipe, "seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "'train.lr' is not an override; write key=value, for example train.lr=1e-4"),
        ("=3", "'=3' is not an override; write key=value"),
        ("train.lr=[1", "'train.lr=[1': the value is not YAML: "),
        ("seed.x=1", "seed is not a mapping of options"),
        ("tools.1.timeout=5", "tools is a list and has no item 1: write tools.0"),
        ("tools.-1.timeout=5", "tools is a list and has no item -1"),
        ("tools.timeout=5", "tools is a list and has no item timeout"),
        ("loggers.0.name=wandb", "loggers is a list and has no item 0: it is empty"),
        ("train..lr=5", "'train..lr' contains an empty name; write one dot between two names"),
    ],
)
def test_what_is_no_override_is_told(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, {**LEAST, "seed": 1, "tools": ["a:b"]})
    assert message in refused(path, override)


# environment variables


def test_environment_variables_are_put_in_also_in_overrides_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TW_MODEL", "models/tiny")
    monkeypatch.setenv("TW_STEPS", "7")
    monkeypatch.delenv("TW_NOWHERE", raising=False)
    tree = {
        "model": {"path": "${TW_MODEL}/v${TW_STEPS}"},
        "data": {
            "train": "${TW_NOWHERE:-rows.jsonl}",
            "system_prompt": "${TW_NOWHERE:-}",
            "columns": {"a": "${TW_MODEL:-x}"},
        },
        "sampling": {"stop": ["$5", "${TW_STEPS}"]},
        "train": {"steps": "${TW_STEPS}"},
    }
    config = loaded(write(tmp_path, tree), "output=runs/${TW_STEPS}")
    assert (config.model.path, config.data.train, config.data.system_prompt) == ("models/tiny/v7", "rows.jsonl", "")
    assert config.data.columns == {"a": "models/tiny"}
    assert (config.sampling.stop, config.train.steps, config.output) == (["$5", "7"], 7, "runs/7")


def test_a_variable_that_is_not_set_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TW_NOWHERE", raising=False)
    path = write(tmp_path, {"model": {"path": "${TW_NOWHERE}"}, "data": {"train": "x"}})
    assert refused(path) == (
        f"{path}: model: path: the environment variable TW_NOWHERE is not set; set it, or write ${{TW_NOWHERE:-default}}"
    )


# what the schema refuses


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "there is no option train.lrr; did you mean 'lr'?"),
        ("trian.lr=1", "there is no option trian; did you mean 'train'?"),
        ("model.xyz=1", "there is no option model.xyz; the options are: path, gguf_file, dtype, device"),
        ("r[ward={}", "there is no option r[ward; did you mean 'reward'?"),
        ("model.[path]=1", "there is no option model.[path]; did you mean 'path'?"),
        ("local=1", "there is no option local; the options are"),
        (
            "reward.lr=1",
            "there is no option reward.lr; did you mean train.lr or critic.lr or sft.lr?; the options of reward are: "
            "trajectory, turns",
        ),
        ("environment.args={}", "there is no option environment.args"),
        ("tools=[{use: 'a:b', time: 1}]", "there is no option tools.0.time; did you mean 'timeout'?"),
        (
            "reward.trajectory=[{use: 'a:b', wieght: 1}]",
            "there is no option reward.trajectory.0.wieght; did you mean 'weight'?",
        ),
        ("engine.slot=3", "there is no option engine.slot; did you mean 'slots'?"),
        (
            "engine.script=x.jsonl",
            "engine.script has no effect with engine.name=local: it is an option of another engine",
        ),
        ("engine.name=tgi", "engine.name: there is no engine 'tgi'; there are: local, scripted"),
        ("engine.name=scripted", "engine.script is missing"),
        ("loss.name=ppo", "loss.name: there is no loss 'ppo'; there are: ppo_clip, gspo, gmpo, cispo, sapo, reinforce"),
        ("loss.name=dr_grpo", "there is no loss 'dr_grpo'; write loss.name=ppo_clip loss.normalizer=constant"),
        ("loss.clip_ratio_c=3", "there is no option loss.clip_ratio_c; it is called loss.dual_clip here"),
        (
            "loss.tau_positive=2",
            "loss.tau_positive has no effect with loss.name=ppo_clip: it is an option of another loss (sapo)",
        ),
        ("train.clip_low=0.1", "there is no option train.clip_low; it is called loss.clip_low here"),
        ("train.loss_average=token", "there is no option train.loss_average; it is called loss.normalizer here"),
        ("sft.loss_average=token", "there is no option sft.loss_average; it is called sft.normalizer here"),
        ("train.steps=many", "train.steps: input should be a valid integer"),
        ("train.steps=0", "train.steps: input should be greater than 0; got 0"),
        ("train.steps=1.5", "train.steps: input should be a valid integer"),
        ("train.lr=-1", "train.lr: input should be greater than or equal to 0; got -1"),
        ("sampling.top_p=0", "sampling.top_p: input should be greater than 0; got 0"),
        ("sampling.min_p=1", "sampling.min_p: input should be less than 1; got 1"),
        (
            "tokenization_sanity_check=loose",
            "tokenization_sanity_check: input should be 'strict', 'ignore_strippable' or 'disable'; got 'loose'",
        ),
        ("credit.name=ppo", "credit.name: there is no credit 'ppo'; there are: auto, grpo, rloo, turn_return,"),
        ("train.betas=[0.9]", "train.betas"),
        (
            "model.path=null",
            "model.path: input should be a valid string; got null (an option that is left out has its default)",
        ),
        ("train=null", "train: input should be a valid dictionary"),
        ("engine=null", "engine must be a mapping of options, such as {name: local}; got None"),
        ("engine=[1]", "engine must be a mapping of options, such as {name: local}; got [1]"),
        ("environment.arguments.tries=2", "environment.use is missing"),
    ],
)
def test_wrong_options_are_told_by_name_value_and_rule(recipe: Path, override: str, message: str) -> None:
    told = refused(recipe, override)
    assert told.startswith(f"{recipe}: ")
    assert message in told
    assert "pydantic" not in told


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {"paht": "m"}, "train": {"steps": -1, "lr": "fast"}, "colour": "red"})
    told = refused(path).removeprefix(f"{path}: ").splitlines()
    assert sorted(line.partition(";")[0] for line in told) == [
        "model.path is missing: add it to the recipe",
        "there is no option colour",
        "there is no option model.paht",
        "train.lr: input should be a valid number, unable to parse string as a number",
        "train.steps: input should be greater than 0",
    ]


# another engine


def test_another_engine_drops_the_options_of_the_first_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, {**LEAST, "engine": {"name": "local", "memory_gb": 1, "slots": 4}})
    config, notes = load(path, ["engine.name=scripted", "engine.script=lines.jsonl"])
    assert config.engine == ScriptedEngineSection(name="scripted", script="lines.jsonl")
    assert notes == [
        "engine.name=scripted removes the recipe's engine.memory_gb, engine.slots, which belonged to 'local'"
    ]


@pytest.mark.parametrize(
    "overrides", [["engine.name=scripted", "engine.script=x"], ["engine.script=x", "engine.name=scripted"]]
)
def test_the_order_of_the_overrides_of_an_engine_does_not_matter(tmp_path: Path, overrides: list[str]) -> None:
    path = write(tmp_path, {**LEAST, "engine": {"slots": 4}})  # `local`, though it does not say so
    config, notes = load(path, overrides)
    assert config.engine == ScriptedEngineSection(name="scripted", script="x")
    assert notes == ["engine.name=scripted removes the recipe's engine.slots, which belonged to 'local'"]


def test_the_same_engine_keeps_its_options(tmp_path: Path) -> None:
    path = write(tmp_path, {**LEAST, "engine": {"slots": 4}})
    assert loaded(path, "engine.name=local").engine == LocalEngineSection(slots=4)
    config, notes = load(path, ["engine.name=scripted", "engine.script=x"])
    assert (config.engine.name, len(notes)) == ("scripted", 1)


def test_another_loss_keeps_the_options_that_all_losses_have(tmp_path: Path) -> None:
    path = write(tmp_path, {**LEAST, "loss": {"kl_coef": 0.1, "normalizer": "trajectory", "clip_low": 0.1}})
    config, notes = load(path, ["loss.name=gspo", "loss.clip_high=0.001"])
    assert config.loss == Gspo(kl_coef=0.1, normalizer="trajectory", clip_high=0.001)
    assert notes == ["loss.name=gspo removes the recipe's loss.clip_low, which belonged to 'ppo_clip'"]


# what would have no effect


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.clip_low=0.1"], "loss.clip_low has no effect with one optimizer step a batch"),
        (
            ["loss.clip_low=0.1", "loss.clip_high=0.3"],
            "loss.clip_low and loss.clip_high have no effect with one optimizer",
        ),
        (["loss.kl_cov_ratio=0.1"], "loss.kl_cov_ratio has no effect with one optimizer step a batch"),
        (["loss.kl_cov_coef=2"], "loss.kl_cov_coef=2.0 has no effect without loss.kl_cov_ratio"),
        (["loss.clip_cov_high=3"], "loss.clip_cov_high has no effect without loss.clip_cov_ratio"),
        (["loss={clip_cov_ratio: 0.1, clip_cov_low: 5}"], "must be less than loss.clip_cov_high=5"),
        (
            ["loss.top_entropy_quantile=0.2", "credit=none", "teacher={path: other, signal: divergence}"],
            "loss.top_entropy_quantile has no effect with credit=none and teacher.signal=divergence",
        ),
        (["loss.dual_clip=3"], "loss.dual_clip has no effect with one optimizer step a batch"),
        (["loss.name=sapo", "loss.tau_negative=2"], "loss.tau_negative has no effect with one optimizer step a batch"),
        (["loss.normalizer=constant"], "loss.normalizer=constant needs loss.constant_length"),
        (["loss.constant_length=9"], "loss.constant_length has no effect with loss.normalizer=token"),
        (["loss.clip_high=0.3"], "remove it, or set train.minibatches, train.ppo_epochs or train.max_staleness"),
        (
            ["train.group_size=1"],
            "train.group_size=1 is too small: credit.name=grpo compares the trajectories of one row. Set train.group_size to 2",
        ),
        (
            ["sampling.temperature=0"],
            "sampling.temperature=0 makes all trajectories of a row identical: set a temperature above 0",
        ),
        (
            ["train.lr=0"],
            "train.lr=0 does not change the weights: set a learning rate above 0, or use `turnwise rollout`",
        ),
        (
            ["train.batch_size=2", "train.group_size=3", "train.minibatches=7"],
            "train.minibatches=7 is more than the 6 trajectories of a step: set at most 6",
        ),
        (
            ["train.warmup_steps=1"],
            "train.warmup_steps=1 has no effect: the first of n warm-up steps has the learning rate lr/n",
        ),
        (["engine.name=scripted", "engine.script=x"], "engine.name=scripted cannot be used in training"),
        (["eval.samples_per_row=2"], "eval.samples_per_row has no effect without held-out rows: set data.eval"),
        (["eval.every=5"], "eval.every has no effect without held-out rows"),
        (["eval.max_rows=5"], "eval.max_rows has no effect without held-out rows"),
        (["data.train=hub/id", "data.eval_split=dev"], "data.eval_split has no effect without data.eval"),
        (["resume=auto", "replace=true"], "resume=auto continues the earlier run and replace=true moves it away"),
        (
            ["deterministic=true", "train.max_staleness=1"],
            "deterministic=true cannot be combined with train.max_staleness=1",
        ),
        (
            ["deterministic=true", "train.group_timeout=5"],
            "deterministic=true cannot be combined with train.group_timeout=5",
        ),
        (["train.group_size=4", "train.min_group_size=5"], "train.min_group_size=5 is more than train.group_size=4"),
        (
            ["deterministic=true", "model.device=cuda"],
            "deterministic=true works on the CPU only, and the recipe has model.device=cuda",
        ),
        (["deterministic=true", "engine.threads=2"], "deterministic=true runs with one thread; remove engine.threads"),
        (["data.split=dev"], "data.split has no effect on the single file rows.jsonl"),
        (
            ["data.eval=held.jsonl", "data.eval_split=dev"],
            "data.eval_split has no effect on the single file held.jsonl",
        ),
        (["data.subset=main"], "data.subset has no effect on the single file rows.jsonl"),
        (["data.subset=main", "data.eval=held.parquet"], "data.subset has no effect on the single file rows.jsonl"),
    ],
)
def test_options_without_effect_are_refused(recipe: Path, overrides: list[str], message: str) -> None:
    config = loaded(recipe, *overrides)
    with pytest.raises(ConfigError) as error:
        refuse_without_effect(config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "steps", "said"),
    [
        (["train.warmup_steps=10"], 20, []),
        (
            ["train.warmup_steps=10", "train.lr=1"],
            4,
            ["train.warmup_steps=10: in this run of 4 steps, the learning rate rises until the end, to 0.4. A share of the "
             "steps (train.warmup_steps=0.1) fits each length"],
        ),
        (["train.warmup_steps=0.1", "critic.warmup_steps=2"], 2, ["critic.warmup_steps=2: in this run of 2 steps, only the"]),
        (["train.warmup_steps=0.9"], 1, []),
        (["reference.sync_every=4"], 4, ["reference.sync_every=4: in this run of 4 steps, the reference model does not"]),
        (["record.every=5"], 2, ["record.every=5 has no effect in this run of 2 steps: the first and the last are always"]),
        (["health.kl=0.2"], 9, ["health.window=10: in this run of 9 steps, only constant_reward, reward_drop, failed and"]),
        (["health.stop=[length]"], 19, ["health.length has no effect in this run of 19 steps: it compares the first 10 (he"]),
        (["health.stop=[length]"], 20, []),
        (["health.constant_reward=3"], 2, []),
    ],
)  # fmt: skip
def test_a_run_that_is_shortened_for_a_try_says_what_has_no_effect_in_it(
    tmp_path: Path, overrides: list[str], steps: int, said: list[str]
) -> None:
    config = loaded(write(tmp_path, {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}), *overrides)
    notes = short_run_notes(config, "train", steps)
    assert len(notes) == len(said)
    for note, beginning in zip(notes, said, strict=True):
        assert note.startswith(beginning)


def test_warm_up_steps_are_whole_or_a_share(tmp_path: Path) -> None:
    recipe = write(tmp_path, {"model": {"path": "m"}, "data": {"train": "t.jsonl"}})
    assert [loaded(recipe, f"train.warmup_steps={text}").train.warmup_steps for text in ("0", "5.0", "0.1")] == [
        0,
        5,
        0.1,
    ]
    with pytest.raises(
        ConfigError, match=r"train.warmup_steps: a number of steps must be whole; below 1, it is a share"
    ):
        loaded(recipe, "train.warmup_steps=1.5")


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.clip_low=0.1", "train.ppo_epochs=2"],
        ["loss.clip_high=0.3", "train.minibatches=2"],
        ["loss.clip_low=0.1", "train.max_staleness=1"],
        ["loss.clip_low=0.2", "loss.clip_high=0.2"],  # the defaults, named
        ["train.batch_size=2", "train.group_size=3", "train.minibatches=6"],
        ["train.steps=5", "train.warmup_steps=10"],  # a run that is shortened for a try
        ["eval.samples_per_row=2", "data.eval=held.jsonl"],
        ["data.train=hub/id", "data.split=dev", "data.subset=main"],
        ["data.train=hub/id", "data.eval=held.jsonl", "data.subset=main"],
        ["data.train=hub/id", "data.eval=hub/id", "data.eval_split=dev"],
        ["deterministic=true", "model.device=cpu", "engine.threads=1"],
        ["resume=auto"],
        ["replace=true"],
    ],
)
def test_options_with_an_effect_are_not(recipe: Path, overrides: list[str]) -> None:
    refuse_without_effect(loaded(recipe, *overrides))


def test_the_recipes_that_come_with_the_repository_are_good() -> None:
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    assert len(recipes) >= 1
    for path in recipes:
        config = loaded(path)
        (refuse_sft_without_effect if changed_options(config.sft) else refuse_without_effect)(config)


def test_the_templates_own_history_is_the_policy_branch(recipe: Path) -> None:
    assert loaded(recipe).thinking == "keep"
    assert loaded(recipe, "use_inference_chat_template=true").thinking == "branch"
    assert loaded(recipe, "use_inference_chat_template=true", "thinking=branch").thinking == "branch"
    with pytest.raises(
        ConfigError, match="means thinking=branch, and the recipe says thinking=strip_at_user: remove one"
    ):
        loaded(recipe, "use_inference_chat_template=true", "thinking=strip_at_user")


# names of other systems


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.learning_rate=1e-5", "there is no option train.learning_rate; it is called train.lr here"),
        ("learning_rate=1e-5", "there is no option learning_rate; it is called train.lr here"),
        ("sft.learning_rate=1e-5", "there is no option sft.learning_rate; it is called sft.lr here"),
        ("train.train_batch_size=8", "there is no option train.train_batch_size; it is called train.batch_size here"),
        ("train.num_generations=8", "it is called train.group_size here"),
        ("train.rows=8", "there is no option train.rows; it is called train.batch_size here"),
        ("eval.samples=8", "it is called eval.samples_per_row here"),
        ("concurrent=8", "it is called max_concurrent here"),
        ("limits.max_new_tokens=8", "it is called limits.tokens_per_turn here"),
        ("model.torch_dtype=bfloat16", "it is called model.dtype here"),
        ("train.num_train_epochs=1", "it is called train.epochs here"),
        ("num_train_epochs=1", "it is called train.epochs here"),
        ("sft.num_train_epochs=1", "it is called sft.epochs here"),
        ("train.warmup_ratio=0.1", "write warmup_steps=0.1"),
        ("data.max_prompt_length=512", "rows with longer prompts are left out with data.max_prompt_tokens"),
        ("train.ppo_mini_batch_size=4", "write train_batch_size / ppo_mini_batch_size"),
        (
            "train.per_device_train_batch_size=4",
            "write per_device_train_batch_size x gradient_accumulation_steps x devices",
        ),
        ("engine.gpu_memory_utilization=0.5", "engine.memory_gb, a number of GiB and no share"),
        ("loss.loss_type=dr_grpo", "; write loss.normalizer=constant loss.constant_length=<max_completion_length>"),
        ("loss_type=bnpo", "there is no option loss_type; write loss.normalizer=token"),
        ("loss_type=other", "losses are in loss.name, and how a loss is averaged is in loss.normalizer"),
        ("actor.loss_agg_mode=seq-mean-token-mean", "there is no option actor"),
        ("loss.loss_agg_mode=seq-mean-token-mean", "; write loss.normalizer=trajectory"),
        ("loss.epsilon=0.2", "write loss.clip_low and loss.clip_high"),
        ("reward.reward_funcs=[f.py:g]", "turnwise.compat.trl:TrlReward"),
        ("reward.compute_score=f.py:g", "turnwise.compat.verl:CustomScore"),
        ("temperature=0.5", "did you mean sampling.temperature or eval.sampling.temperature?"),
        ("system_prompt=Hello", "did you mean data.system_prompt?"),
        ("epochs=2", "did you mean train.epochs or sft.epochs?"),
        ("train.report_to=wandb", "experiment trackers are in the section loggers"),
        ("lora.rank=8", "it is called model.lora here"),
        ("model.use_liger_kernel=true", "there is no option model.use_liger_kernel; write model.kernels=liger"),
        ("model.use_liger=false", "there is no option model.use_liger; write model.kernels=none"),
        ("train.lrr=1", "did you mean 'lr'?"),  # no name of anybody's: the nearest one
    ],
)
def test_an_option_by_the_name_of_another_system_is_refused_with_ours(recipe: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load(recipe, [override])


def test_every_name_that_a_hint_gives_is_an_option_and_no_hint_is_for_one() -> None:
    options = {
        f"{part}.{name}" if part else name
        for part, model in [
            ("", Config),
            *((name, _part(field.annotation)) for name, field in Config.model_fields.items()),
            *((name, cls) for name, classes in named_sections(Config).items() for cls in classes.values()),
        ]
        if model is not None
        for name in model.model_fields
    }
    options |= set(schema())
    options |= {f"teacher.{name}" for name in TeacherModel.model_fields}  # short for the one entry of teacher.models
    assert set(CALLED) <= options | {"model.lora"}
    others = [name for names in [*CALLED.values(), *ABSENT.values(), *DIFFERENT.values()] for name in names]
    assert len(others) == len(set(others))
    assert not {name for name in others if name in Config.model_fields}


def test_options_of_trl_without_a_counterpart_are_refused_with_the_reason(recipe: Path) -> None:
    assert "leave it out" in refused(recipe, "train.torch_compile=true")
    assert "turnwise push RUN" in refused(recipe, "train.push_to_hub=true")
    assert "sampling has no penalties" in refused(recipe, "sampling.repetition_penalty=1.1")


def test_every_option_that_a_conversion_names_is_an_option() -> None:
    """A hint that names an option which does not exist, or a value that the option refuses, sends the reader in a circle."""
    options = {*RULES, *schema(), *Config.model_fields, "model.lora"}
    values = [here for names in (*VALUES.values(), *VALUES_THERE.values()) for here in names.values()]
    sections = "|".join(Config.model_fields)
    hints = [*DIFFERENT, *values]
    named = {
        option
        for hint in hints
        for option in re.findall(rf"(?<![/\w])((?:{sections})\.[a-z_.]+[a-z])(?=[\s=,;)])", f"{hint} ")
    }
    assert {"train.warmup_steps", "loss.normalizer", "data.max_prompt_tokens"} <= named
    lists = {option.partition("[]")[0] for option in RULES} | {f"teacher.{name}" for name in TeacherModel.model_fields}
    assert named <= options | lists
    for here in values:
        words = dict(word.split("=") for word in re.sub(r"\S+=<[^>]*>", "", here).split())
        tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "r.jsonl"}}
        for option, value in words.items():
            node = tree
            *parents, last = option.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = float(value) if value[0].isdigit() else value
        Config.model_validate(tree)


def _part(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def test_no_held_out_rows_leaves_out_what_needs_them_and_says_so(recipe: Path) -> None:
    tree = yaml.safe_load(recipe.read_text())
    tree.setdefault("data", {}).update(eval="held.jsonl")
    tree["eval"] = {"max_rows": 4, "every": 2}
    recipe.write_text(yaml.safe_dump(tree))
    config, notes = load(recipe, ["data.eval=null"])
    assert (config.data.eval, config.eval.max_rows, config.eval.every) == (None, None, 0)
    assert notes == ["data.eval=null removes the recipe's eval.every, eval.max_rows, which need held-out rows"]
    with pytest.raises(ConfigError, match=r"eval\.max_rows has no effect without held-out rows"):
        refuse_without_effect(load(recipe, ["data.eval=null", "eval.max_rows=4"])[0])  # this was asked for


@pytest.mark.parametrize("part", ["train", "sft"])
def test_the_length_of_a_run_on_the_command_line_replaces_the_recipes(recipe: Path, part: str) -> None:
    tree = yaml.safe_load(recipe.read_text())
    for given, other, value in (("epochs", "steps", 7), ("steps", "epochs", 0.5)):
        tree[part] = {given: 3}
        recipe.write_text(yaml.safe_dump(tree))
        config, notes = load(recipe, [f"{part}.{other}={value}"])
        assert getattr(getattr(config, part), other) == value
        assert notes == [f"{part}.{other} replaces the recipe's {part}.{given}=3"]
        both, notes = load(
            recipe, [f"{part}.{other}={value}", f"{part}.{given}=2"]
        )  # what is asked for twice is refused later
        assert (getattr(getattr(both, part), given), notes) == (2, [])


@pytest.mark.parametrize(
    ("arguments", "quantization"),
    [
        (["--quantization", "fp8", "--enforce-eager"], "--quantization fp8"),
        (["--enforce-eager", "--kv_cache_dtype=fp8_e5m2"], "--kv_cache_dtype fp8_e5m2"),
        (["-q=int8", "--kv-cache-dtype", "fp8"], "-q int8, --kv-cache-dtype fp8"),
        (["--quantization", "none", "--kv-cache-dtype=auto", "--enforce-eager"], None),
        ([], None),
    ],
)
def test_a_quantized_engine_has_rollout_correction(
    recipe: Path, arguments: list[str], quantization: str | None
) -> None:
    engine = ("engine.name=vllm", f"engine.arguments={json.dumps(arguments)}")
    config = loaded(recipe, *engine)
    refuse_without_effect(config)
    if quantization is None:
        assert config.engine.quantization is config.correction.action is None
        assert training_warnings(config) == []
        return
    assert not config.exact
    (told,) = training_warnings(config)
    assert told.startswith(
        f"engine.arguments={quantization}: the engine samples from another distribution than is trained"
    )
    assert "with correction.action=truncate" in told
    again = recipe.with_name("again.yaml")
    again.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert loaded(again) == config
    assert loaded(recipe, *engine, "correction.action=measure").correction.action == "measure"
    without = loaded(recipe, *engine, "correction.action=null")
    assert without.correction.action is None
    assert "without rollout correction: set correction.action=truncate" in training_warnings(without)[0]
    assert loaded(recipe, *engine, "credit=none").correction.action is None  # nothing to correct


def test_unequal_minibatches_and_reinforce_on_tokens_of_other_weights_are_warned_of(recipe: Path) -> None:
    def warnings(*overrides: str) -> list[str]:
        return training_warnings(loaded(recipe, "train.batch_size=2", "train.group_size=6", *overrides))

    assert warnings() == warnings("train.minibatches=4") == warnings("loss.name=reinforce") == []
    for name in ("gspo", "gmpo", "cispo", "sapo"):
        (same,) = warnings(f"loss.name={name}")
        assert f"so loss.name={name} has the gradient of loss.name=ppo_clip" in same
        assert warnings(f"loss.name={name}", "train.ppo_epochs=2") == warnings(f"loss.name={name}", "credit=none") == []
    (unequal,) = warnings("train.minibatches=5")
    assert "does not divide the 12 conversations of a step" in unequal
    assert "on 2 or 3 conversations" in unequal
    (stale,) = warnings("loss.name=reinforce", "train.max_staleness=3")
    assert "with train.max_staleness=3 tokens that other weights sampled" in stale
    assert "correction.action=truncate" in stale
    assert warnings("loss.name=reinforce", "train.max_staleness=3", "correction.action=truncate") == []
    (later,) = warnings("loss.name=reinforce", "train.ppo_epochs=2", "train.minibatches=3")
    assert "with train.minibatches=3 and train.ppo_epochs=2" in later
    assert "one optimizer step for each batch" in later


def test_the_configuration_of_the_multi_turn_note_is_answered_with_the_command_that_reads_it(tmp_path: Path) -> None:
    note = {"rollout": {"engine": "sglang", "multiturn": {"enabled": True, "max_turns": 5}}}
    (tmp_path / "note.yaml").write_text(yaml.safe_dump(note))
    with pytest.raises(
        ConfigError, match=r"no option rollout\.multiturn; .*`turnwise convert --config-path <its directory>"
    ):
        load(tmp_path / "note.yaml")
    report = converted("verl", [], folder=str(tmp_path), name="note")
    assert report.recipe["limits"]["turns"] == 5


@pytest.mark.parametrize(
    "value",
    [
        "!!int ''",
        "!!float ''",
        "!!int '-'",
        "!!int _",
        "!!float '+'",
        "!!bool maybe",
        "!!timestamp 2020-99-99",
        "2020-13-45x: 1: 2",
        "!!set {a, b}",
        "!!binary 'x'",
        "!!omap [a: 1]",
        "&a [*a]",
        "&a {b: *a}",
        "{? [a] : 1}",
        "!!python/name:os.system",
        "*nope",
        "1e999",
        ".nan",
        "{<<: 1}",
        "!!seq x",
        "%YAML 9.9",
        "--- a\n--- b",
        "\x00",
        "'\\ud800",
        '"\\ud800"',
        "9" * 5000,
        "[" * 3000,
    ],
)
def test_a_value_that_is_no_value_is_refused_with_the_override(recipe: Path, value: str) -> None:
    with pytest.raises(ConfigError):
        load(recipe, [f"train.lr={value}"])


# short forms, and mistakes that many users make


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"credit": "rloo"}, {"credit": {"name": "rloo"}}),
        ({"loss": "gspo"}, {"loss": {"name": "gspo"}}),
        ({"engine": "vllm"}, {"engine": {"name": "vllm"}}),
        ({"reward": ["f.py:g"]}, {"reward": {"trajectory": [{"use": "f.py:g"}]}}),
        ({"reward": "f.py:g"}, {"reward": {"trajectory": ["f.py:g"]}}),
        ({"model": "some/model"}, {"model": {"path": "some/model"}}),
        ({"data": "rows.jsonl"}, {"data": {"train": "rows.jsonl"}}),
        ({"model": {"path": "m", "lora": True}}, {"model": {"path": "m", "lora": {"rank": 16}}}),
        ({"model": {"path": "m", "lora": 4}}, {"model": {"path": "m", "lora": {"rank": 4}}}),
        ({"model": {"path": "m", "lora": False}}, {"model": {"path": "m"}}),
        ({"train": {"optimizer": "adamw_8bit"}}, {"train": {"optimizer": {"name": "adamw_8bit"}}}),
        ({"sft": {"optimizer": "adafactor"}}, {"sft": {"optimizer": {"name": "adafactor"}}}),
    ],
)
def test_short_forms(tmp_path: Path, short: dict[str, Any], long: dict[str, Any]) -> None:
    base = {"model": {"path": "m"}, "data": {"train": "r.jsonl"}}
    assert loaded(write(tmp_path, {**base, **short})) == loaded(write(tmp_path, {**base, **long}))


def test_a_short_form_on_the_command_line_changes_the_name_only(tmp_path: Path) -> None:
    tree = {"model": "m", "data": {"train": "r.jsonl"}, "credit": {"name": "grpo", "scale": "none"}, "loss": "gspo"}
    path = write(tmp_path, tree)
    config, notes = load(
        path, ["credit=rloo", "loss.clip_low=0.1", "model.dtype=bfloat16", "model.lora=true", "model.lora.alpha=8"]
    )
    assert (config.credit.name, config.loss.name, config.model.path) == ("rloo", "gspo", "m")
    assert (config.model.dtype, config.model.lora.rank, config.model.lora.alpha) == ("bfloat16", 16, 8.0)
    assert notes == ["credit=rloo removes the recipe's credit.scale, which belonged to 'grpo'"]


def test_a_configuration_of_another_system_is_answered_with_the_command_that_reads_it(tmp_path: Path) -> None:
    verl = {
        "actor_rollout_ref": {"model": {"path": "x"}},
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": "x"},
    }
    path = write(tmp_path, verl)
    assert refused(path).startswith(
        f"{path} is a configuration of verl (it has actor_rollout_ref, algorithm), not a recipe."
    )
    assert "turnwise convert --config-path" in refused(path)
    assert "turnwise convert --from swift" in refused(write(tmp_path, {"rlhf_type": "grpo", "model": "x"}))
    single = refused(write(tmp_path, {"model": "m", "data": {"train": "x"}, "algorithm": {"gamma": 1}}))
    assert "there is no option algorithm" in single  # one key is a mistake in a recipe


def test_a_variable_inside_braces_must_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: ${MODEL}}\n")
    assert 'Inside {} and [], a value with ${...} must be quoted: {path: "${NAME}"}' in refused(path)


# Estimators of advantages that a recipe cannot use: each refusal, and the nearest recipe that is accepted.


REWARD = "reward.trajectory=[r.py:right]"

TURN_REWARD = "reward.turns=[r.py:step]"

ENVIRONMENT = "environment=mine.py:game"

SINGLE = "train.group_size=1"

ONE_TURN = "limits.turns=1"


@pytest.fixture
def credit_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}))
    return path


def check(recipe: Path, *overrides: str) -> None:
    config, _ = load(recipe, overrides)
    refuse_without_effect(config)


COMPARING = [
    *(
        "grpo",
        "rloo",
        "opo",
        "gpg",
        "gdpo",
        "reinforce_pp_baseline",
        "turn_return",
        "shared",
        "discounted",
        "kevin",
        "gigpo",
    ),
    *("mt_grpo", "igpo", "turn_potential"),
]


@pytest.mark.parametrize("name", COMPARING)
def test_an_estimator_that_compares_needs_several_conversations_of_a_row(credit_recipe: Path, name: str) -> None:
    given = (f"credit.name={name}", REWARD, TURN_REWARD, ENVIRONMENT)
    message = (
        f"train.group_size=1 is too small: credit.name={name} compares the trajectories of one row. Set train.group_size to 2 or "
        f"more"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check(credit_recipe, *given, SINGLE)
    check(credit_recipe, *given, "train.group_size=2")


@pytest.mark.parametrize(
    "credit",
    ["{name: remax}", "{name: reinforce_pp}", "{name: shared, baseline: none}", "{name: discounted, baseline: none}"],
)
def test_an_estimator_that_does_not_compare_accepts_one_conversation_of_a_row(credit_recipe: Path, credit: str) -> None:
    check(credit_recipe, f"credit={credit}", SINGLE)


GDPO = (
    "credit.name=gdpo needs two parts of the reward to normalise, and the recipe has {}: add a reward function, or set "
    "credit.name=grpo"
)

OF_TURNS = (
    "credit.name={} needs rewards of turns: limits.turns must be above 1, and the recipe must have a function in reward.turns, "
    "tools, or an environment that gives rewards. For one reward of the conversation set credit.name=grpo"
)

POTENTIAL = (
    "credit.name=turn_potential needs scores in turn.info: environment=turnwise.environments.environment:SingleTurn sets none, "
    "and the recipe has no function in reward.turns that could. Use an environment that sets them, or set credit.name=grpo"
)

IDLE = "credit.{} has no effect with limits.turns=1, because there are no later turns: remove it, or raise limits.turns"


@pytest.mark.parametrize(
    ("refused", "message", "accepted"),
    [
        (["credit.name=gdpo"], GDPO.format(0), ["credit.name=gdpo", "reward.trajectory=[r.py:right, r.py:short]"]),
        (["credit.name=gdpo", REWARD], GDPO.format(1), ["credit.name=gdpo", REWARD, ENVIRONMENT]),
        (["credit.name=gdpo", TURN_REWARD], GDPO.format(1), ["credit.name=gdpo", REWARD, TURN_REWARD]),
        *(
            ([f"credit.name={name}", *options], OF_TURNS.format(name), [f"credit.name={name}", *accepted])
            for name in ("mt_grpo", "igpo")
            for options, accepted in (
                ([REWARD], [TURN_REWARD]),
                ([TURN_REWARD, ONE_TURN], [TURN_REWARD, "limits.turns=2"]),
                ([ENVIRONMENT, ONE_TURN], [ENVIRONMENT, "limits.turns=2"]),
                ([], ["tools=[t.py:tool]"]),
            )
        ),
        (["credit.name=turn_potential", REWARD], POTENTIAL, ["credit.name=turn_potential", ENVIRONMENT]),
        (["credit.name=turn_potential"], POTENTIAL, ["credit.name=turn_potential", TURN_REWARD]),
        *(
            (
                [f"credit={{name: {name}, {option}: 0.3}}", ONE_TURN, ENVIRONMENT],
                IDLE.format(option),
                [*kept, ENVIRONMENT],
            )
            for name, option in (
                ("turn_return", "gamma"),
                ("discounted", "gamma"),
                ("kevin", "gamma"),
                ("gigpo", "gamma"),
                ("turn_potential", "decay"),
            )
            for kept in (
                [f"credit={{name: {name}, {option}: 0.3}}", "limits.turns=2"],
                [f"credit={{name: {name}}}", ONE_TURN],
            )
        ),
    ],
)
def test_what_an_estimator_needs_and_options_without_effect(
    credit_recipe: Path, refused: list[str], message: str, accepted: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check(credit_recipe, *refused)
    check(credit_recipe, *accepted)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([REWARD], "grpo"),
        (["environment=turnwise.environments.users:ScriptedUser", REWARD], "grpo"),
        ([TURN_REWARD], "turn_return"),
        (["tools=[t.py:tool]"], "turn_return"),
        (["mcp.servers=m.json", REWARD], "grpo"),  # their results have no rewards
        ([ENVIRONMENT], "turn_return"),
        ([ENVIRONMENT, TURN_REWARD, ONE_TURN], "grpo"),
    ],
)
def test_the_estimator_of_a_recipe_that_names_none(credit_recipe: Path, overrides: list[str], name: str) -> None:
    config, _ = load(credit_recipe, [*overrides, "credit.scale=none"])
    estimator = chosen_estimator(config)
    assert (estimator.name, estimator.model_dump()["scale"]) == (name, "none")


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([TURN_REWARD], "reward.turns gives turns rewards"),
        (["tools=[t.py:tool]"], "tools may give turns rewards"),
        (["mcp.servers=m.json", "tools=[t.py:tool]"], "tools may give turns rewards"),
        (["mcp.servers=m.json", "mcp.use=mine.py:Servers"], "tools may give turns rewards"),
        (["mcp.servers=m.json", "reward.kl.coef=0.1"], "reward.kl gives turns rewards"),
        ([ENVIRONMENT], "environment=mine.py:game may give turns rewards"),
        (["reward.kl.coef=0.1", REWARD], "reward.kl gives turns rewards"),
    ],
)
def test_the_note_on_the_estimator_names_what_may_reward_turns(
    credit_recipe: Path, overrides: list[str], source: str
) -> None:
    note = credit_note(load(credit_recipe, overrides)[0])
    assert note == f"credit.name=auto: advantages are computed by turn_return, because {source} (docs/credit.md)"
