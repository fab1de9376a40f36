"""Recipes made of ms-swift's arguments run: plugins, engines and the rollout server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from support.conversations import Says, hold, spoken
from support.swift import ASKED, play, whole
from support.swift_client import mirror
from turnwise.assembly import environment_factory
from turnwise.cli import main
from turnwise.compat.conversion import ConversionReport
from turnwise.compat.swift import scheduler
from turnwise.compat.swift.convert import from_rollout_arguments, from_swift_arguments
from turnwise.compat.swift.plugins import NAMES, select
from turnwise.compat.swift.plugins import load as plugins_load
from turnwise.compat.swift.rewards import orms
from turnwise.compat.swift.schedulers import multi_turns
from turnwise.config.engine_checks import refuse_engine
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.schema import Config

# Recipes made of ms-swift's arguments run: plugins, engines and the rollout server.


# The recipe with a plugin of ms-swift runs as it is, and the commands make recipes that run.


ROOT = Path(__file__).parents[3]


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files relative to where one runs them."""
    monkeypatch.chdir(ROOT)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("from_the_root")
def test_the_recipe_takes_two_steps_with_the_plugin_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ["train.steps=2", "train.batch_size=4", "train.group_size=4", "eval.max_rows=2"]
    assert main(["train", "recipes/swift_scheduler.yaml", *small, f"output={out}"]) == 0
    metrics, conversations = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert all(one["failed"] == 0 and one["template_mismatch"] == 0 for one in metrics)
    assert all(0 < one["ratio/max_deviation"] < 1e-3 for one in metrics)
    assert not [name for name in metrics[0] if "ess" in name.split("/")]  # nothing is corrected, so nothing is claimed
    assert len(conversations) == 32
    assert {one["stop"] for one in conversations} <= {"done", "length"}
    assert {one["reward"] for one in conversations} <= {0.0, 0.5, 1.0}
    assert max(one["reward"] for one in conversations) == 1.0
    for one in conversations:
        assert one["rewards"] == {"turns": 0.0, "right_answer": one["reward"]}
        roles = [message["role"] for message in one["messages"]]
        assert roles[:2] == ["user", "assistant"]
        told = [turn["info"].get("told") for turn in one["turns"]]
        assert told.count(True) == sum(message["role"] == "user" for message in one["messages"][1:])
    assert any("tool" in [message["role"] for message in one["messages"]] for one in conversations)


def converted(tmp_path: Path) -> Path:
    """The recipe of a script for the tiny model and the plugin."""
    (tmp_path / "run.sh").write_text(
        "swift rollout --model demo/model --multi_turn_scheduler calculator_scheduler --max_turns 4 \\\n"
        "    --external_plugins recipes/plugins/swift_calculator.py\n"
        "swift rlhf --rlhf_type grpo --model demo/model --tuner_type full --dataset demo/train.jsonl#8 \\\n"
        "    --reward_funcs right_answer --external_plugins recipes/plugins/swift_calculator.py \\\n"
        "    --num_generations 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_steps 1 \\\n"
        "    --learning_rate 1e-5 --beta 0 --temperature 1.0 --max_completion_length 48 --deepspeed zero2 \\\n"
        f"    --output_dir {tmp_path}/run --save_steps 1\n"
    )
    recipe = tmp_path / "recipe.yaml"
    assert main(["convert", "--from", "swift", str(tmp_path / "run.sh"), "--out", str(recipe)]) == 0
    return recipe


@pytest.mark.usefixtures("from_the_root")
def test_a_script_is_converted_into_a_recipe_and_what_is_left_out_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, notes = load(converted(tmp_path))
    refuse_without_effect(config)
    assert notes == []
    assert environment_factory(config)() is not None
    assert (config.train.steps, config.train.batch_size, config.train.group_size, config.limits.turns) == (1, 2, 2, 4)
    told = capsys.readouterr().out
    assert "left out: deepspeed='zero2': has no effect with one process" in told
    assert "CHANGES THE TRAINING" not in told


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
def test_a_converted_recipe_trains(tmp_path: Path) -> None:
    # the script's engine is vLLM; the embedded engine needs no server
    assert main(["train", str(converted(tmp_path)), "engine={name: local}"]) == 0
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert (metrics["failed"], metrics["template_mismatch"]) == (0, 0)
    assert len(lines(tmp_path / "run" / "trajectories.jsonl")) == 4


@pytest.mark.usefixtures("from_the_root")
def test_words_of_a_command_line_are_converted_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swift", "rlhf", "--model", "M", "--dataset", "d.jsonl", "--max_steps", "3", "--made_up", "1"]
    assert main(["convert", "--from", "swift", "--", *words]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["train"]["steps"] == 3
    assert "# CHANGES THE TRAINING, left out: made_up=1: turnwise knows no such argument of ms-swift" in printed
    assert main(["convert", "--from", "swift", "--verbose", "--", *words]) == 0
    listed = capsys.readouterr().out
    assert "# converted: max_steps=3 -> train.steps=3\n" in listed
    assert yaml.safe_load(listed) == yaml.safe_load(printed)
    assert main(["convert", "--from", "swift", "absent.sh"]) == 1
    assert "absent.sh cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.usefixtures("from_the_root")
def test_a_column_that_a_reward_function_needs_and_the_data_have_not_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "2 + 3"}], "answer": "5"}\n' * 4)
    given = f"--model M --dataset {rows} --max_steps 1 --reward_funcs accuracy --num_generations 2"
    words = ["convert", "--from", "swift", "--", *given.split()]
    assert main(words) == 1
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith(
        "# DOES NOT WORK HERE: the reward function 'accuracy' has the parameter 'solution', which is neither"
    )
    assert told.endswith("or map a column to it: data.columns.solution=<column>")
    rows.write_text(rows.read_text().replace("answer", "solution"))
    assert main(words) == 0
    assert "DOES NOT WORK HERE" not in capsys.readouterr().out


# ms-swift's arguments about vLLM and its rollout server become the sections `engine` and `rollout_server`.


FULL = "--rlhf_type grpo --model M --dataset d.jsonl --tuner_type full --max_steps 10 "

SERVER = "rollout " + FULL + "--vllm_mode server "
"""With `rollout`, the arguments of `swift rollout` are known: without a scheduler, conversations have one turn."""


def engine_converted(words: str) -> ConversionReport:
    return from_swift_arguments(shlex.split(words))


def valid(found: ConversionReport) -> Config:
    config = Config.model_validate(found.recipe)
    refuse_without_effect(config)
    refuse_engine(config)
    return config


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("", []),
        ("--vllm_gpu_memory_utilization 0.8", ["--gpu-memory-utilization", "0.8"]),
        ("--gpu_memory_utilization 0.5", ["--gpu-memory-utilization", "0.5"]),
        ("--vllm_tensor_parallel_size 1 --vllm_data_parallel_size 1", []),
        ("--vllm_pipeline_parallel_size 2 --vllm_max_num_seqs 64",
         ["--pipeline-parallel-size", "2", "--max-num-seqs", "64"]),
        ("--vllm_enforce_eager true --vllm_disable_cascade_attn false", ["--enforce-eager"]),
        ("--vllm_enable_prefix_caching false", ["--no-enable-prefix-caching"]),
        ("--vllm_enable_prefix_caching true --vllm_enable_lora true --vllm_max_lora_rank 8", []),
        ("""--vllm_limit_mm_per_prompt '{"image": 5}'""", ["--limit-mm-per-prompt", '{"image": 5}']),
        ("""--vllm_engine_kwargs '{"seed": 1, "async_scheduling": false, "enable_log_requests": true}'""",
         ["--seed", "1", "--no-async-scheduling", "--enable-log-requests"]),
    ],
)  # fmt: skip
def test_arguments_of_vllm_become_arguments_of_the_engine(words: str, arguments: list[str]) -> None:
    found = engine_converted(f"{FULL} --use_vllm true {words}")
    engine: Any = valid(found).engine
    assert (engine.name, engine.arguments, engine.sleep) == ("vllm", arguments, False)
    assert found.unsupported == []
    assert set(re.findall(r"--(vllm_\w+)", words)) <= set(found.converted)


def test_the_sizes_of_parallel_engines_are_options() -> None:
    engine: Any = valid(
        engine_converted(f"{FULL} --use_vllm true --vllm_tensor_parallel_size 4 --vllm_data_parallel_size 2")
    ).engine
    assert (engine.tensor_parallel, engine.data_parallel, engine.arguments) == (4, 2, [])


def test_sleeping_is_for_one_gpu_with_the_trainer() -> None:
    assert valid(engine_converted(FULL + "--use_vllm true --vllm_mode colocate --sleep_level 1")).engine.sleep  # type: ignore[union-attr]
    for words in ("--vllm_mode colocate --sleep_level 0", "--vllm_mode colocate --sleep_level 1 --async_generate true"):
        assert not valid(engine_converted(f"{FULL} --use_vllm true {words}")).engine.sleep  # type: ignore[union-attr]
    (left,) = engine_converted(SERVER + "--sleep_level 1").unsupported
    assert (left.key, "has no effect with vllm_mode server" in left.reason) == ("sleep_level", True)


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("--vllm_server_host 10.0.0.7 --vllm_server_port 8123", "http://10.0.0.7:8123"),
        ("--vllm_server_host 0.0.0.0", "http://127.0.0.1:8000"),
        ("--vllm_server_host fe80::1 --vllm_server_port 9000", "http://[fe80::1]:9000"),
        ("--vllm_server_base_url http://any:secret@host:8000", "http://any:secret@host:8000"),
    ],
)
def test_a_server_becomes_the_rollout_server(words: str, url: str) -> None:
    found = engine_converted(SERVER + words + " --vllm_server_pass_dataset true --vllm_server_timeout 300")
    config = Config.model_validate(found.recipe)
    assert (config.rollout_server.url, config.rollout_server.timeout) == (url, 300.0)
    assert config.engine.name == "vllm"
    assert found.unsupported == []
    assumed = {assumption.key: assumption.reason for assumption in found.assumptions}
    assert "turnwise serve RECIPE rollout_server.url=null" in assumed["rollout_server.url"]


def test_of_several_servers_the_first_is_used_and_the_others_are_reported() -> None:
    found = engine_converted(SERVER + "--vllm_server_host a b --vllm_server_port 8000 8001")
    assert found.recipe["rollout_server"] == {"url": "http://a:8000"}
    assert {left.key for left in found.unsupported} == {"vllm_server_host", "vllm_server_port"}
    assert all("start that server with several replicas" in left.reason for left in found.unsupported)


def test_without_vllm_the_embedded_engine_samples() -> None:
    for words in ("", "--use_vllm false"):
        assert "engine" not in engine_converted(FULL + words).recipe
    found = engine_converted(FULL + "--vllm_gpu_memory_utilization 0.5")
    assert "engine" not in found.recipe
    (left,) = found.unsupported
    assert (left.key, "has no effect without use_vllm" in left.reason) == ("vllm_gpu_memory_utilization", True)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vllm_tensor_parallel_size: 'two' is not an integer"):
        engine_converted(FULL + "--vllm_tensor_parallel_size two")
    with pytest.raises(ConfigError, match="--vllm_engine_kwargs: 'seed' is not a mapping in JSON"):
        engine_converted(FULL + "--vllm_engine_kwargs seed")


def test_the_arguments_of_swift_rollout_for_a_server() -> None:
    words = (
        "--model M --use_async_engine true --multi_turn_scheduler tool_call_scheduler --max_turns 4 --vllm_max_model_len 4096 "
        "--vllm_gpu_memory_utilization 0.8 --vllm_tensor_parallel_size 2 --vllm_data_parallel_size 2 --host 0.0.0.0 --port 8001"
    )
    report, address = from_rollout_arguments(words.split())
    assert address == {"host": "0.0.0.0", "port": 8001}
    assert report.unsupported == []
    config = Config.model_validate(report.recipe)
    engine: Any = config.engine
    assert (engine.name, engine.arguments) == ("vllm", ["--gpu-memory-utilization", "0.8"])
    assert (engine.tensor_parallel, engine.data_parallel) == (2, 2)
    assert (config.limits.context, config.limits.turns) == (4096, 4)
    gym, _ = from_rollout_arguments(
        ["--model", "M", "--use_gym_env", "true", "--gym_env", "math", "--max_turns", "2", "--use_vllm", "false"]
    )
    assert gym.recipe["environment"]["arguments"] == {
        "name": "gym_scheduler", "max_turns": 2, "use_gym_env": True, "gym_env": "math",
    }  # fmt: skip
    assert "engine" not in gym.recipe


def test_ms_swifts_own_scripts_with_swift_rollout(tmp_path: Path) -> None:
    """Every argument is in the recipe, or is reported. The values are compared with those that a search in the text finds."""
    repo = ["git", f"--git-dir={mirror('modelscope+ms-swift')}"]
    listed = subprocess.run([*repo, "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True, check=True)
    read = 0
    for name in listed.stdout.split():
        if not (name.startswith("examples/") and "grpo" in name and name.endswith(".sh")):
            continue
        text = subprocess.run([*repo, "show", f"HEAD:{name}"], capture_output=True, text=True, check=True).stdout
        if "swift rollout" not in text or "<node1" in text:
            continue
        script = tmp_path / "run.sh"
        script.write_text(text)
        found = from_swift_arguments(script)
        recipe, read = found.recipe, read + 1
        given = dict(re.findall(r"--(\w+) ([^\s\\]+)", re.sub(r"swift deploy.*?\n\n", "", text, flags=re.DOTALL)))
        reported = {*found.converted, *(left.key for left in found.unsupported)}
        names = {"use_async_engine": "vllm_use_async_engine"}
        for key in given:
            if key.startswith(("vllm_", "use_", "gym_")):
                assert names.get(key, key) in reported, (name, key)
        assert recipe["engine"]["name"] == "vllm"
        arguments = recipe["engine"].get("arguments", [])
        if (memory := given.get("vllm_gpu_memory_utilization", "1")) != "1":
            assert arguments[arguments.index("--gpu-memory-utilization") + 1] == memory, name
        for option in ("tensor_parallel", "data_parallel"):
            if (size := given.get(f"vllm_{option}_size", "1")) != "1":
                assert recipe["engine"][option] == int(size), name
        if "vllm_max_model_len" in given:
            assert recipe["limits"]["context"] == int(given["vllm_max_model_len"])
        address = f"http://{given.get('vllm_server_host', '127.0.0.1')}:{given.get('vllm_server_port', 8000)}"
        assert recipe["rollout_server"]["url"] == address, name
        if "multi_turn_scheduler" in given:
            assert recipe["environment"]["arguments"]["name"] == given["multi_turn_scheduler"], name
    assert read >= 12


# Plugin files: they load under ms-swift's names, leave nothing behind, and say what is wrong with them.


PLUGIN = """
from {module} import MultiTurnScheduler, multi_turns


class Asks{n}(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        from swift.llm import RolloutInferRequest
        infer_request.messages.append({{"role": "user", "content": "Sure?"}})
        return {{"infer_request": infer_request}}


multi_turns["asks{n}"] = Asks{n}
"""


OLD = """
from copy import deepcopy
from typing import Dict, Union
from swift.plugin import MultiTurnScheduler, multi_turns, ORM, orms, rm_plugins
from swift.llm import RolloutInferRequest, Template, to_device
from swift.utils import get_logger

logger = get_logger()


class Old(MultiTurnScheduler):
    name = "old"

    def __init__(self, max_turns=None, *args, **kwargs):
        super().__init__(max_turns, *args, **kwargs)
        logger.debug("made")

    def step(self, infer_request, result, current_turn):
        infer_request.messages.append({"role": "user", "content": f"{current_turn} of {self.max_turns}"})
        return infer_request


multi_turns["old_style"] = Old
"""


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(multi_turns), dict(orms)
    yield
    for registry, kept in zip((multi_turns, orms), before, strict=True):
        registry.clear()
        registry.update(kept)


@pytest.mark.parametrize(
    "module", ["swift.plugin", "swift.plugin.multi_turn", "swift.rollout", "swift.rollout.multi_turn", "swift.llm"]
)
def test_a_plugin_imports_from_wherever_ms_swift_had_it(module: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    name = module.replace(".", "_")
    file.write_text(PLUGIN.format(module=module, n=name))
    trajectory = whole(play(f"asks{name}", "a", "b", max_turns=2, external_plugins=[str(file)]))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "Sure?", "b"]


IMPORTS = """
import swift
import swift.rollout.multi_turn as theirs
from swift.rollout.multi_turn import MultiTurnScheduler
import helper

at_the_top = MultiTurnScheduler


class Later(MultiTurnScheduler):
    def check_finished(self, *_):  # sync, so it runs in a thread
        import swift.utils
        from swift.rollout.multi_turn import MultiTurnScheduler as now
        import beside
        from package.inner import named
        assert now is at_the_top is theirs.MultiTurnScheduler is swift.plugin.MultiTurnScheduler
        assert helper.inside() is beside.inside() is named() is now
        assert swift.utils.get_logger is not None
        return True
"""

BESIDE = "def inside():\n    from swift.rollout import MultiTurnScheduler\n    return MultiTurnScheduler\n"


def test_swift_can_be_imported_at_any_time_from_a_plugin_and_its_folder_and_nobody_else_sees_it(tmp_path: Path) -> None:
    for name in ("helper.py", "beside.py", "package/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(BESIDE)
    (tmp_path / "package" / "inner.py").write_text(BESIDE + "named = inside\n")
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "imports.py").write_text(IMPORTS)
    real = ModuleType("swift")
    before = {**sys.modules, "swift": real}
    paths, finders = list(sys.path), list(sys.meta_path)
    sys.modules["swift"] = real
    try:
        whole(play(f"{tmp_path}/imports.py:Later", "a"))
        assert plugins_load(str(tmp_path / "imports.py")).at_the_top is NAMES["MultiTurnScheduler"]
        assert {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "swift"} == {"swift": real}
    finally:
        for name in set(sys.modules) - set(before):
            if name in ("helper", "beside") or name.startswith("package"):
                del sys.modules[name]
        del sys.modules["swift"]
    assert (sys.path, sys.meta_path) == (paths, finders)


def test_a_scheduler_of_an_older_version_works_as_it_is(tmp_path: Path) -> None:
    """`__init__(max_turns, ...)`, a step that returns the request, names from `swift.plugin` and `swift.llm`."""
    file = tmp_path / "old.py"
    file.write_text(OLD)
    trajectory = whole(play("old_style", "a", "b", "c", max_turns=3, external_plugins=[str(file)]))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "1 of 3", "b", "2 of 3", "c"]


def test_a_plugin_is_run_once_and_a_class_can_be_named_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once.py").write_text(
        "from swift.plugin import MultiTurnScheduler\nfrom beside import text\ntext.append(1)\n"
        "class Ends(MultiTurnScheduler):\n    def check_finished(self, *args):\n        return len(text) == 1\n"
    )
    (tmp_path / "beside.py").write_text("text = []\n")
    assert plugins_load("once.py") is plugins_load(str(tmp_path / "once.py"))
    trajectory = whole(hold(Says("a"), lambda: scheduler("once.py:Ends", external_plugins="once.py")))
    assert spoken(trajectory.segments[0]) == [(-1, ASKED), (0, "a<|im_end|>")]
    sys.modules.pop("beside")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "from swift.trainers import Trainer",
            "could not be loaded: ModuleNotFoundError: No module named 'swift.trainers'",
        ),
        ("from swift.plugin import Nothing", "cannot import name 'Nothing' from 'swift.plugin'"),
        ("raise RuntimeError('no key')", "could not be loaded: RuntimeError: no key"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_run_is_refused_with_its_reason(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        plugins_load(str(file))
    assert why in str(caught.value)
    if "swift." in text:
        assert "The parts of ms-swift that can be imported: " in str(caught.value)
    assert not any(name.startswith("turnwise_swift.broken") for name in sys.modules)


def test_what_is_not_here_says_so_where_it_is_used_and_not_where_it_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "absent.py"
    file.write_text(
        "from swift.infer_engine import TransformersEngine\nfrom swift.rewards.rm_plugin import DefaultRMPlugin\n"
    )
    TransformersEngine, DefaultRMPlugin = (
        plugins_load(str(file)).TransformersEngine,
        plugins_load(str(file)).DefaultRMPlugin,
    )
    with pytest.raises(RuntimeError, match=r"turnwise has no DefaultRMPlugin: reward models are functions in a recipe"):
        type("Mine", (DefaultRMPlugin,), {})()
    with pytest.raises(RuntimeError, match=r"turnwise has no TransformersEngine"):
        TransformersEngine("model", max_batch_size=1)


def test_an_unknown_name_is_answered_with_the_nearest_and_all_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        scheduler("math_tips_trick")
    assert str(caught.value).startswith(
        "environment.arguments.name: there is no scheduler 'math_tips_trick'; did you mean 'math_tip_trick'?; registered are: "
        "base_scheduler, gym_scheduler, math_tip_trick, math_tip_trick_multi_turn, openenv_scheduler, "
        "thinking_tips_scheduler, tool_call_scheduler."
    )
    with pytest.raises(ConfigError, match=r"there is no plugin .*/absent\.py; a plugin is a \.py file"):
        scheduler("x", external_plugins=[str(tmp_path / "absent.py")])
    (tmp_path / "one.py").write_text("class One: pass\n")
    with pytest.raises(ConfigError, match=r"has no 'Onee'; did you mean 'One'\?"):
        select(multi_turns, f"{tmp_path}/one.py:Onee", what="scheduler", key="k")
    with pytest.raises(
        ConfigError, match=r"One'> .*a scheduler is a subclass of MultiTurnScheduler|a scheduler is a subclass"
    ):
        scheduler(f"{tmp_path}/one.py:One")


def test_options_that_do_nothing_are_refused() -> None:
    for arguments, why in (
        ({"max_turns": 0}, "max_turns=0; it must be at least 1"),
        ({"gym_env": "g"}, "gym_env has no effect on math_tip_trick, which is not a gym scheduler"),
        ({"context_manager": "c"}, "context_manager has no effect on math_tip_trick"),
        ({"gym_weight": 2.0}, "gym_weight has no effect on math_tip_trick without use_gym_env"),
    ):
        with pytest.raises(ConfigError, match=why):
            scheduler("math_tip_trick", **arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"use_gym_env has no effect on thinking_tips_scheduler, whose run returns no total_reward"
    ):
        scheduler("thinking_tips_scheduler", use_gym_env=True)
    with pytest.raises(ConfigError, match=r"max_turns=3 has no effect without a scheduler"):
        scheduler(max_turns=3)


def test_a_scheduler_that_holds_whole_batches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tree.py").write_text(
        "from swift.plugin import MultiTurnScheduler\n"
        "class Tree(MultiTurnScheduler):\n    async def async_infer(self, infer_requests, request_config):\n        ...\n"
    )
    with pytest.raises(ConfigError, match=r"overrides async_infer, which takes a batch of conversations"):
        scheduler(f"{tmp_path}/tree.py:Tree")


def test_without_a_name_there_is_one_turn_and_a_reference_answer_is_left_out() -> None:
    from turnwise.types import Row

    row = Row(id="1", messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "the reference"}])
    trajectory = whole(hold(Says("a"), scheduler, row=row))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a"]


def test_a_scheduler_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "from swift.plugin import MultiTurnScheduler\n"
        "class Picky(MultiTurnScheduler):\n    def __init__(self, size, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n        self.size = size\n"
        "    def check_finished(self, request, *_):\n        return len(request.messages) >= self.size\n"
        "    def step(self, request, *_):\n        request.messages.append({'role': 'user', 'content': self.tokenizer.name})\n"
        "        return {'infer_request': request}\n"
    )
    name = f"{tmp_path}/picky.py:Picky"
    with pytest.raises(
        ConfigError, match=r"environment\.arguments: .*Picky cannot be created: .*missing 1 required .*'size'"
    ):
        scheduler(name)
    assert whole(play(name, "a", arguments={"size": 2})).assistant_texts == ["a"]
    error = play(name, "a", arguments={"size": 3}).error
    assert error is not None
    assert (
        "the scheduler uses a tokenizer, but the recipe names none: set environment.arguments.tokenizer"
        in error.message
    )
    (tmp_path / "empty").mkdir()
    error = play(name, "a", arguments={"size": 3}, tokenizer=str(tmp_path / "empty")).error
    assert error is not None
    assert "environment.arguments.tokenizer: no tokenizer could be loaded from" in error.message
