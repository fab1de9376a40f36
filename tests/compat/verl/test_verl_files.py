"""verl's two files and its command: what they may say, what is told of others, and verl's functions that read them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from compat.verl.test_verl_arguments import a_row as command_a_row
from compat.verl.verl_files import PLUGINS, a_tool, an_interaction, names, schema, set_up, user_module, written
from support.conversations import a_row, call, hold
from turnwise.assembly import environment_factory
from turnwise.cli import main
from turnwise.compat.verl import BaseInteraction, Conversations, verl_names
from turnwise.compat.verl.files import (
    get_interaction_class,
    initialize_interactions_from_config,
    initialize_tools_from_config,
)
from turnwise.compat.verl.helpers import copy, copy_to_local, exists, last_boxed_only_string, makedirs, remove_boxed
from turnwise.config.recipe import load
from turnwise.data.rows import read_rows
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError
from turnwise.options.schema import Config

# verl's two files: what they may say, what is told of others, and verl's functions that read them.


# verl's two files: what they may say, and what is told of those that say something else.


TOOL = {"type": "native"}


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return user_module(monkeypatch)


def refusal(folder: Path, **files: Any) -> str:
    """What is said of a file: `interaction=` or `tools=` is its tree, or its text."""
    (name, tree), *_ = files.items()
    path = written(folder / f"{name}.yaml", tree)
    with pytest.raises(ConfigError) as refused:
        Conversations(**{"interactions" if name == "interaction" else "tools": path})
    return str(refused.value).replace(str(folder) + "/", "")


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ("- a\n- b\n", "the interaction file interaction.yaml must contain a mapping; it contains ['a', 'b']"),
        ("", "the interaction file interaction.yaml must contain a mapping; it contains nothing"),
        ("a: [", "the interaction file interaction.yaml is not YAML: "),
        ({"interactions": []}, "has a key 'interactions'; did you mean 'interaction'?"),
        ({"interaction": []}, "`interaction` must be a list of {class_name: ..., config: ...}; it is []"),
        ({"interaction": {"class_name": "x"}}, "must be a list of"),
        ({"interaction": ["x"]}, "interaction[0] must be a mapping with class_name; it is 'x'"),
        ({"interaction": [{"config": {}}]}, "interaction[0] has no class_name"),
        (
            {"interaction": [{"class_name": ""}]},
            "class_name is ''; write package.module.Class or path/to/file.py:Class",
        ),
        ({"interaction": [{"class_nam": "x"}]}, "has a key 'class_nam'; did you mean 'class_name'?"),
        ({"interaction": [{"class_name": "no.such.Thing"}]}, "no.such could not be imported: ModuleNotFoundError"),
        ({"interaction": [{"class_name": "nowhere.py:Thing"}]}, "there is no file "),
        ({"interaction": [an_interaction("Counsellor")]}, "did you mean 'CounsellorInteraction'?"),
        ({"interaction": [an_interaction("not_a_class")]}, "verl_user.not_a_class is of type int; it must be a class"),
        (
            {"interaction": [{"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteractoin"}]},
            "is a class of verl that turnwise does not have; did you mean "
            "'verl.interactions.gsm8k_interaction.Gsm8kInteraction'?",
        ),
        (
            {"interaction": [an_interaction("NotAnInteraction")]},
            "interaction[0]: the class NotAnInteraction has no method generate_response, finalize_interaction",
        ),
        (
            {"interaction": [an_interaction("NoResponse")]},
            "NoResponse does not define generate_response: define it",
        ),
        ({"interaction": [an_interaction("PickyInteraction")]}, "PickyInteraction cannot be created: KeyError: needed"),
        ({"interaction": [{**an_interaction(), "config": [1]}]}, "interaction[0].config must be a mapping; it is [1]"),
        (
            {"interaction": [an_interaction(), an_interaction(name="counsellor")]},
            "interaction[1]: two interactions have the name 'counsellor'; rows select an interaction by name: rename one",
        ),
        ({"interaction": [an_interaction(key="${oc.env:NOT_SET_ANYWHERE}")]}, "config.key has an interpolation"),
    ],
)
def test_an_interaction_file_that_is_none_says_why(tree: Any, told: str, tmp_path: Path) -> None:
    assert told in refusal(tmp_path, interaction=tree)


def with_schema(**function: Any) -> dict[str, Any]:
    """A tool whose schema has other parts."""
    entry = a_tool()
    entry["tool_schema"]["function"].update(function)
    return entry


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ("just text", "the tools file tools.yaml must contain a mapping; it contains 'just text'"),
        ({"tools": [a_tool(), a_tool("OldTool")]}, "tools[1]: two tools have the name 'count'"),
        ({"tools": [a_tool("IdleTool")]}, "IdleTool does not define execute: define it"),
        ({"tools": [an_interaction()]}, "has no method create, execute, calc_reward, release"),
        (
            {"tools": [{**a_tool(), "tool_schema": None}]},
            "CounterTool cannot be created: ValueError: CounterTool has no schema",
        ),
        ({"tools": [{**a_tool(), "tool_schema": [1]}]}, "tools[0].tool_schema is not a schema of a tool"),
        ({"tools": [{**a_tool(), "tool_schema": {"type": "function"}}]}, "function: Field required"),
        ({"tools": [with_schema(parameters={"type": "object", "properties": [1]})]}, "properties: Input should be"),
        ({"tools": [with_schema(parameters={"properties": {"a": {"type": "strin"}}})]}, "tool_schema: "),
        ({"tools": [with_schema(parameters={"properties": {"a": {"minLength": "x"}}})]}, "tool_schema: "),
        ({"tools": [{**a_tool(), "config": {"type": "remote"}}]}, "config.type is 'remote'; it must be native or mcp"),
        ({"tools": [{**a_tool(), "mcp": {}}]}, "mcp has no effect with config.type=native"),
        (
            {"tools": [{"class_name": "verl_user.CounterTool", "config": {"type": "mcp"}}]},
            "CounterTool must be a subclass of verl.tools.mcp_base_tool.MCPBaseTool",
        ),
        (
            {"tools": [{"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp"}}]},
            "tools[0].mcp needs mcp_servers_config_path",
        ),
        (
            {"tools": [{"class_name": "verl.tools.search_tool.SearchTool", "tool_schema": schema("search")}]},
            "SearchTool needs the option retrieval_service_url",
        ),
        (
            {
                "tools": [
                    {
                        "class_name": "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
                        "config": {"sandbox_url": "http://x"},
                        "tool_schema": schema("code_interpreter"),
                    }
                ]
            },
            "SandboxFusionTool has no option 'sandbox_url'; did you mean 'sandbox_fusion_url'?",
        ),
    ],
)
def test_a_tool_file_that_is_none_says_why(tree: Any, told: str, tmp_path: Path) -> None:
    assert told in refusal(tmp_path, tools=tree)


@pytest.mark.usefixtures("user")
def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the interaction file nowhere\.yaml cannot be read: No such file"):
        Conversations(interactions="nowhere.yaml")


@pytest.mark.usefixtures("user")
def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    for options, told in [
        ({}, "set interactions, tools, function_tools or agent_loops: one of verl's files"),
        ({"tools": "t.yaml", "max_user_turns": 2}, "max_user_turns=2 has no effect without interactions"),
        ({"interactions": "i.yaml", "max_user_turns": 0}, "max_user_turns=0 must be above 0"),
        ({"interactions": "i.yaml", "then": "a:b"}, "would both answer the model: choose one"),
        ({"tools": "t.yaml", "tool_timeout": -1.0}, "tool_timeout=-1.0; give a number of seconds above 0"),
    ]:
        with pytest.raises(ConfigError) as refused:
            Conversations(**options)
        assert told in str(refused.value)


@pytest.mark.usefixtures("user")
def test_a_class_may_be_in_a_file_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from verl.interactions.base import BaseInteraction\n"
        "class Mine(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        return True, '', float(self.config['worth']), {}\n"
    )
    made = set_up(tmp_path, interactions=[{"class_name": f"{tmp_path}/mine.py:Mine", "config": {"worth": 0.5}}])
    assert [turn.reward for turn in hold(["a"], made).turns] == [0.5]


@pytest.mark.usefixtures("user")
def test_environment_variables_are_put_into_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANY", "2")
    made = set_up(
        tmp_path, interactions=[an_interaction(key="${oc.env:MANY}", other="${oc.env:NONE,3}", of="a-${.key}")]
    )
    assert made._interactions["counsellor"].config == {"key": "2", "other": "3", "of": "a-2", "name": "counsellor"}


@pytest.mark.usefixtures("user")
def test_a_tool_may_make_its_own_schema(tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[{"class_name": "verl_user.SelfDescribedTool", "config": {}}])
    one = hold([call("described"), "done"], made)
    assert [message["content"] for message in one.messages if message["role"] == "tool"] == ["ok"]


@pytest.mark.usefixtures("user")
def test_a_recipe_names_the_files_and_bounds_their_tools(tmp_path: Path, user: ModuleType) -> None:
    interactions = written(tmp_path / "i.yaml", {"interaction": [an_interaction(over_after=2)]})
    tools = written(tmp_path / "t.yaml", {"tools": [a_tool()]})
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d.jsonl"},
            "environment": {
                "use": "turnwise.compat.verl:Conversations",
                "arguments": {"interactions": interactions, "tools": tools},
            },
            "tool_calls": {"max_parallel_calls": 1},
            "tools": ["turnwise.environments.calculator:calculator"],
        }
    )
    make = environment_factory(config)
    assert isinstance(make(), Environment)
    one = hold([call("count") + call("calculator", '{"expression": "1+1"}'), "done"], make, row=a_row())
    assert one.error is None
    first, second = (message["content"] for message in one.messages if message["role"] == "tool")
    assert first == "1"
    assert second.startswith("Error: at most 1 tool call can be made in one turn, and this turn has 2")
    assert names(user)[-2:] == ["release", "finalize"]


@pytest.mark.usefixtures("user")
def test_two_tools_of_one_name_are_refused_in_a_recipe_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def count(by: int = 1) -> int:\n    """Count."""\n    return by\n')
    tools = written(tmp_path / "t.yaml", {"tools": [a_tool()]})
    tree = {
        "model": {"path": "m"},
        "data": {"train": "d.jsonl"},
        "environment": {"use": "turnwise.compat.verl:Conversations", "arguments": {"tools": tools}},
        "tools": [f"{tmp_path}/mine.py:count"],
    }
    with pytest.raises(ConfigError, match="two tools have the name 'count'"):
        environment_factory(Config.model_validate(tree))


# verl's functions that read its two files, and what its preprocessing scripts import.


BASE = {"class_name": "verl.interactions.base.BaseInteraction", "config": {"mine": 3}}


def interactions(folder: Path, *entries: Any) -> dict[str, Any]:
    return initialize_interactions_from_config(written(folder / "i.yaml", {"interaction": list(entries)}))


def test_interactions_are_made_by_name(tmp_path: Path) -> None:
    gsm8k = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}
    made = interactions(tmp_path, BASE, {**gsm8k, "name": "other"}, gsm8k)
    assert {name: type(one).__name__ for name, one in made.items()} == {
        "base": "BaseInteraction",
        "other": "Gsm8kInteraction",
        "gsm8k": "Gsm8kInteraction",
    }
    assert made["base"].config == {"mine": 3, "name": "base"}
    assert made["other"].name == "other"
    assert interactions(tmp_path) == {}
    with pytest.raises(ValueError, match="Duplicate interaction name 'base' found"):
        interactions(tmp_path, BASE, BASE)
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"):
        interactions(tmp_path, {**BASE, "class_name": "nowhere.at_all.Class"})


def test_a_class_of_verl_s_is_found_by_its_name() -> None:
    with verl_names():
        from verl.interactions.utils import interaction_registry  # type: ignore[import-not-found]
    assert interaction_registry.get_interaction_class is get_interaction_class
    assert get_interaction_class("verl.interactions.base.BaseInteraction") is BaseInteraction


def test_tools_are_made_in_the_order_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))
    described = {"class_name": "verl_user.SelfDescribedTool", "config": {"type": "native"}}
    made = initialize_tools_from_config(written(tmp_path / "t.yaml", {"tools": [a_tool(), described]}))
    assert [tool.name for tool in made] == ["count", "described"]
    assert made[1].config == {"type": "native"}
    remote = {**described, "config": {"type": "mcp"}}
    with pytest.raises(ConfigError, match="is a tool of an MCP server, which only a run can connect"):
        initialize_tools_from_config(written(tmp_path / "t.yaml", {"tools": [remote]}))
    with pytest.raises(ConfigError, match="`tools` must be a list"):
        initialize_tools_from_config(written(tmp_path / "t.yaml", {"interaction": [an_interaction()]}))


def test_files_are_copied_as_a_preprocessing_script_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "a" / "b"
    makedirs(str(made))
    makedirs(str(made), exist_ok=True)
    (made / "train.parquet").write_text("rows")
    assert copy(src=str(made), dst=str(tmp_path / "copy")) == str(tmp_path / "copy")
    assert (tmp_path / "copy" / "train.parquet").read_text() == "rows"
    copy(str(made / "train.parquet"), str(tmp_path))
    assert exists(str(tmp_path / "train.parquet"))
    assert copy_to_local(str(made)) == str(made)
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no `hdfs`
    with pytest.raises(FileNotFoundError, match="`hdfs` is not on the path"):
        makedirs("hdfs://host/folder")


def test_files_on_hdfs_are_the_command_line_tool_s_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "hdfs"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *missing*) exit 1;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    makedirs("hdfs://h/a b")
    assert (exists("hdfs://h/a"), exists("hdfs://h/missing")) == (True, False)
    copy("local", "hdfs://h/a")
    copy("hdfs://h/a", "local")
    copy("hdfs://h/a", "hdfs://h/b")
    with pytest.raises(OSError, match="ended with status 1"):
        copy("hdfs://h/missing", "local")
    assert (tmp_path / "asked").read_text().splitlines() == [
        "dfs -mkdir -p hdfs://h/a b",
        "dfs -test -e hdfs://h/a",
        "dfs -test -e hdfs://h/missing",
        "dfs -put -f local hdfs://h/a",
        "dfs -get hdfs://h/a local",
        "dfs -cp -f hdfs://h/a hdfs://h/b",
        "dfs -get hdfs://h/missing local",
    ]


@pytest.mark.parametrize(
    ("text", "found", "inside"),
    [
        (r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"$\boxed 7$ is it", r"\boxed 7", "7"),
        (r"\fbox{3}", r"\fbox{3}", None),
        (r"\boxed{3", None, None),
        ("nothing", None, None),
    ],
)
def test_the_last_box_of_a_text(text: str, found: str | None, inside: str | None) -> None:
    assert last_boxed_only_string(text) == found
    if inside is not None and found is not None:
        assert remove_boxed(found) == inside
    elif found is not None:
        with pytest.raises(ValueError, match="is not of the form"):
            remove_boxed(found)


# verl's configuration at the command line: trained by, or made a recipe of; the data sets are parquet files as verl
# has them.


INTERACTION = """\
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""

CONFIGURATION = """\
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  max_prompt_length: 600
  max_response_length: 300
  train_batch_size: 2
  return_raw_chat: True

actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_user_turns: 2
"""


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    """The command line of verl's example with an interaction, `python -m verl.trainer.main_ppo` left off."""
    rows = [
        command_a_row(
            extra_info={"index": n, "interaction_kwargs": {"name": "gsm8k", "query": "?", "ground_truth": "7"}}
        )
        for n in range(4)
    ]
    written(tmp_path / "gsm8k_multiturn_grpo_w_interaction.yaml", CONFIGURATION)
    interaction = written(tmp_path / "gsm8k_interaction_config.yaml", INTERACTION)
    return [
        f"--config-path={tmp_path}",
        "--config-name=gsm8k_multiturn_grpo_w_interaction",
        "algorithm.adv_estimator=grpo",
        "data.filter_overlong_prompts=True",
        "data.truncation=error",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "+actor_rollout_ref.model.enable_activation_offloading=True",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.rollout.n=3",
        f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={interaction}",
        f"data.train_files={parquet(tmp_path / 'train.parquet', rows)}",
        "trainer.n_gpus_per_node=1",
        "trainer.balance_batch=True",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.total_epochs=1",
    ]


def test_rows_of_parquet_are_read_as_they_are(tmp_path: Path) -> None:
    kwargs = {"gsm8k": {"create_kwargs": {"ground_truth": "7"}}}
    (row,) = read_rows(
        parquet(tmp_path / "r.parquet", [command_a_row(extra_info={"index": 3, "tools_kwargs": kwargs})])
    )
    assert row.messages == [{"role": "user", "content": "What is 3 + 4?"}]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"]["ground_truth"] == "7"
    assert row["extra_info"] == {"index": 3, "tools_kwargs": kwargs}


@pytest.mark.slow
def test_verl_s_command_line_trains(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics] == [1, 2]  # four rows, two a step, once
    held = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert len(held) == 2 * 2 * 3
    assert {one["stop"] for one in held} <= {"done", "max_response"}
    answers = {message["content"] for one in held for message in one["messages"][2::2]}
    assert answers == {"Your response is incorrect! You need to reflect on your answer and try again."}
    assert all(len(one["turns"]) == 2 for one in held if one["stop"] == "done")  # max_user_turns
    assert "left out: trainer.balance_batch=True: how verl distributes work" in told


def test_what_would_be_another_training_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words, "algorithm.use_pf_ppo=True", "actor_rollout_ref.model.trust_remote_code=True"]) == 1
    told = capsys.readouterr().err
    assert "algorithm.use_pf_ppo=True: turnwise does not support it" in told
    assert "actor_rollout_ref.model.trust_remote_code=True: turnwise does not run code of a model repository" in told
    assert "Change these keys, or remove them (~key)" in told


def test_convert_writes_the_recipe_and_names_what_it_left_out(
    words: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recipes" / "r.yaml"
    command = ["convert", *words, "algorithm.use_pf_ppo=True", "--out", str(out)]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "CHANGES THE TRAINING, left out: algorithm.use_pf_ppo=True: turnwise does not support it" in told
    assert "left out: trainer.balance_batch=True: how verl distributes work" in told
    assert "1 of which change the training" in told
    config, _ = load(out)
    assert (config.model.path, config.train.steps, config.train.group_size) == (str(model), 2, 3)
    head = out.read_text().partition("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in head)
    assert any("trainer.balance_batch" in line for line in head)
    assert main(command) == 1
    assert "exists already: choose another file with --out, or remove it" in capsys.readouterr().err


def test_convert_prints_the_recipe_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "actor_rollout_ref.model.path=m", "data.train_files=/nowhere.parquet"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert (recipe["model"]["path"], recipe["data"]["train"]) == ("m", "/nowhere.parquet")


def test_arguments_of_ms_swift_are_converted_by_their_own_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["convert", "--from", "swift", "--", "--model", "m", "--dataset", "d.jsonl", "--num_generations", "4"])
        == 0
    )
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert (recipe["model"]["path"], recipe["train"]["group_size"]) == ("m", 4)
    assert main(["convert", "--from", "swift", "--config-name", "x", "--", "--model", "m"]) == 1
    assert "--config-path and --config-name are options for --from verl: remove them" in capsys.readouterr().err


def test_a_recipe_and_a_configuration_are_not_both_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipes/calculator.yaml", "--config-path", "."]) == 1
    assert (
        "the recipe recipes/calculator.yaml and --config-path are both given: give one of them"
        in capsys.readouterr().err
    )
    assert main(["train"]) == 1
    assert "give a recipe, such as recipes/calculator.yaml, or verl's --config-path" in capsys.readouterr().err
