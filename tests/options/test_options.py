"""What options are made of: values from environment variables stay out of files; a new loss or estimator is two files."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support.recipes import PLACES, save_recipe
from support.tiny import save_rows
from support.training import train_silently
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.errors import ConfigError, RunError, failed_by, hide, without_hidden
from turnwise.options.engines import VllmEngineSection
from turnwise.options.environment_values import insert_values, same_value, with_digests, with_references
from turnwise.options.schema import Config
from turnwise.recipe import Recipe
from turnwise.record.reader import recorded_options
from turnwise.rollout_server.wire import differences, served_options
from turnwise.train import assemble

SECRET = "sk-live-0123456789abcdef"

ENVIRONMENT = """
from turnwise import Opening, Reply, environment
SEEN = []

@environment
async def guarded(row, key, fail=False):
    SEEN.append(key)
    turn = yield Opening(messages=row.messages)
    if fail:
        raise RuntimeError(f"401 Unauthorized: {key}")
    yield Reply(done=True)

def judged(trajectory, headers):
    assert headers["Authorization"].startswith("Bearer sk-")
    return len(trajectory.turns[0].text)
"""


@pytest.fixture
def recipe(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TW_API_KEY", SECRET)
    monkeypatch.setenv("TW_STEPS", "2")
    (tmp_path / "guarded.py").write_text(ENVIRONMENT)
    return save_recipe(
        tmp_path,
        model,
        data={"train": str(save_rows(tmp_path / "rows.jsonl", 3)), "eval": str(save_rows(tmp_path / "held.jsonl", 2))},
        environment={"use": f"{tmp_path}/guarded.py:guarded", "arguments": {"key": "${TW_API_KEY}"}},
        reward={
            "trajectory": [
                {
                    "use": f"{tmp_path}/guarded.py:judged",
                    "arguments": {"headers": {"Authorization": "Bearer ${TW_API_KEY}"}},
                }
            ]
        },
        limits={"turns": 1, "tokens_per_turn": 6},
        train={"steps": "${TW_STEPS}", "batch_size": 2, "group_size": 2, "lr": "${TW_LR:-1e-3}"},
        checkpoint={"every": 1},
        loggers=["tensorboard"],
    )


def run(recipe: Path, *overrides: str) -> Any:
    made = assemble(load(recipe, overrides)[0])
    train_silently(made)
    return made


def files_with(folder: Path, text: str) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def test_no_file_of_a_run_has_the_value(recipe: Path, tmp_path: Path) -> None:
    made = run(recipe)
    assert made.config.environment.arguments == {"key": SECRET}  # the run itself has it
    assert files_with(tmp_path / "run", SECRET) == []
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["environment"]["arguments"] == {"key": "${TW_API_KEY}"}
    assert written["reward"]["trajectory"][0]["arguments"] == {"headers": {"Authorization": "Bearer ${TW_API_KEY}"}}
    assert (written["train"]["steps"], written["train"]["lr"]) == ("${TW_STEPS}", "${TW_LR:-1e-3}")
    again, _ = load(tmp_path / "run" / "config.yaml")  # the written recipe is the same recipe
    assert again.model_dump() == made.config.model_dump()
    about = json.loads((tmp_path / "run" / "checkpoint").resolve().parent.joinpath("checkpoint.json").read_text())
    assert re.fullmatch(r"\$\{TW_API_KEY\} \(sha256:[0-9a-f]{8}\)", about["options"]["environment.arguments"]["key"])


@pytest.mark.slow
def test_a_resumed_run_notices_that_a_variable_changed(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recipe)
    monkeypatch.setenv("TW_STEPS", "3")
    assert run(recipe, "resume=auto").step == 3  # train.steps may change
    tree = yaml.safe_load(recipe.read_text())
    tree["environment"]["arguments"]["key"] = SECRET  # the same value in clear, or by another name, is the same run
    recipe.write_text(yaml.safe_dump(tree))
    assert run(recipe, "resume=auto").step == 3
    monkeypatch.setenv("TW_LR", "2e-3")
    with pytest.raises(RunError, match=re.escape("train.lr=${TW_LR:-1e-3} (sha256:")):
        run(recipe, "resume=auto")
    monkeypatch.delenv("TW_LR")
    monkeypatch.setenv("TW_API_KEY", "sk-live-another-key-987654")
    with pytest.raises(RunError) as caught:
        run(recipe, "resume=auto")
    assert "reward.trajectory[].arguments=[{'headers': {'Authorization': 'Bearer ${TW_API_KEY} (sha256:" in str(
        caught.value
    )
    assert "sk-live" not in str(caught.value).replace(SECRET, "")  # the recipe itself has the old key in clear now


def test_a_failure_of_user_code_does_not_tell_the_value(recipe: Path, tmp_path: Path) -> None:
    from turnwise.errors import RolloutError

    tree = yaml.safe_load(recipe.read_text())
    tree["environment"]["arguments"]["fail"] = True
    recipe.write_text(yaml.safe_dump(tree))
    with pytest.raises(RolloutError, match=re.escape("401 Unauthorized: ${TW_API_KEY}")):
        run(recipe)
    assert files_with(tmp_path, SECRET) == []


def test_the_command_line_does_not_print_the_value(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a recipe that the schema refuses, and of one whose arguments the environment refuses."""
    for override in ("limits.turns=${TW_API_KEY}", "environment.arguments.other=${TW_API_KEY}"):
        assert main(["rollout", str(recipe), override, "--out", str(tmp_path / "out")]) == 1
        told = capfd.readouterr()
        assert SECRET not in told.out + told.err
        assert "${TW_API_KEY}" in told.err


def test_evaluations_and_conversations_have_the_reference_too(recipe: Path, tmp_path: Path) -> None:
    from turnwise.runs.evaluation import evaluate_models, evaluated_models
    from turnwise.runs.sampling_only import collect

    config, _ = load(recipe, ["loggers=[]"])
    console = Console(file=io.StringIO())
    asyncio.run(collect(config, tmp_path / "rolled", console))
    other = tmp_path / "other.yaml"
    other.write_text("environment: {arguments: {key: '${TW_API_KEY}x'}}\n")
    for resume in ("never", "auto"):
        config, _ = load(recipe, ["loggers=[]", f"resume={resume}"])
        models = evaluated_models(config, ["", str(other)], single_turn=False)
        assert models[1].config.environment.arguments == {"key": f"{SECRET}x"}
        asyncio.run(evaluate_models(config, models, tmp_path / "evaluated", console))
    assert files_with(tmp_path, SECRET) == []
    assert "${TW_API_KEY}x (sha256:" in (tmp_path / "evaluated" / "other" / "evaluation.json").read_text()


def test_a_rollout_server_and_its_trainer_compare_digests(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = served_options(load(recipe)[0])
    assert SECRET not in json.dumps(ours)
    assert differences(ours, served_options(load(recipe, [f"environment.arguments.key={SECRET}"])[0])) == []
    monkeypatch.setenv("TW_API_KEY", "another-key-0001")
    (line,) = differences(ours, served_options(load(recipe)[0]))
    assert line.startswith("environment.arguments={'key': '${TW_API_KEY} (sha256:")


def test_a_recipe_in_python_is_written_with_the_reference(recipe: Path, tmp_path: Path) -> None:
    read = Recipe.from_yaml(recipe).with_options(seed=4)
    read.to_yaml(tmp_path / "again.yaml")
    assert read.config.environment.arguments == {"key": SECRET}
    assert SECRET not in (tmp_path / "again.yaml").read_text()
    assert load(tmp_path / "again.yaml")[0].environment.arguments == {"key": SECRET}


@pytest.mark.parametrize("environment", ["${TW_PLACE}", {"use": "${TW_PLACE}"}])
def test_a_text_that_is_short_for_a_mapping_keeps_its_reference(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, environment: Any
) -> None:
    monkeypatch.setenv("TW_PLACE", f"{PLACES}:low_bytes")
    tree = yaml.safe_load(recipe.read_text())
    tree.update(environment=environment, tools=["${TW_PLACE}"])
    recipe.write_text(yaml.safe_dump(tree))
    config = load(recipe)[0]
    assert config.environment.use == f"{PLACES}:low_bytes"
    assert config.written()["environment"]["use"] == config.written()["tools"][0]["use"] == "${TW_PLACE}"


def test_options_are_read_where_the_variables_are_not_set(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`turnwise show` and the viewer read config.yaml in another process."""
    written = recipe.with_name("config.yaml")
    recipe.rename(written)
    assert recorded_options(written.parent)["environment"]["arguments"] == {"key": SECRET}
    monkeypatch.delenv("TW_API_KEY")
    assert recorded_options(written.parent)["environment"]["arguments"] == {"key": "${TW_API_KEY}"}


def test_a_value_that_is_not_text_is_refused_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_BYTES", "a\udcff")
    with pytest.raises(
        ConfigError, match=r"the environment variable TW_BYTES cannot be used: .* half of a surrogate pair"
    ):
        insert_values({"a": ["${TW_BYTES}"]}, where="r.yaml")


def test_a_value_that_was_changed_since_is_written_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_RATE", "1e-4")
    tree, origins = insert_values({"lr": "${TW_RATE}", "on": "${TW_NO:-true}", "n": ["${TW_RATE}"]}, where="r.yaml")
    assert tree == {"lr": "1e-4", "on": "true", "n": ["1e-4"]}
    checked = {"lr": 0.0001, "on": True, "n": [0.0001]}
    assert with_references(checked, origins) == {"lr": "${TW_RATE}", "on": "${TW_NO:-true}", "n": ["${TW_RATE}"]}
    assert with_references({**checked, "lr": 0.5}, origins)["lr"] == 0.5
    marked = with_digests(checked, origins)
    assert same_value(marked, checked)
    assert not same_value(marked, {**checked, "lr": 0.5})


def test_values_are_hidden_in_messages_longest_first() -> None:
    hide("abcdef123", shown="${A}")
    hide("abcdef123-tail", shown="${B}")
    assert without_hidden("x abcdef123-tail y abcdef123") == "x ${B} y ${A}"
    assert failed_by(ValueError("no abcdef123"), "tool").failure.message == "ValueError: no ${A}"


def test_the_home_directory_in_a_path_is_replaced_where_the_recipe_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TW_MODEL", "~/model")
    tree, origins = insert_values(
        {
            "model": {"path": "${TW_MODEL}"},
            "data": {"train": "rows.jsonl"},
            "critic": {"path": "~/critic"},
            "reference": {"path": "~/reference"},
            "mcp": {"servers": "~/servers.json"},
            "engine": {"name": "vllm", "weight_folder": "~/weights", "python": "~/bin/python"},
            "output": "~/runs/one",
        },
        where="r.yaml",
    )
    config = Config.model_validate(tree)
    assert isinstance(config.engine, VllmEngineSection)
    assert [
        config.model.path, config.critic.path, config.reference.path, config.mcp.servers, config.output,
        config.engine.weight_folder, config.engine.python,
    ] == [f"{tmp_path}/{name}" for name in (
        "model", "critic", "reference", "servers.json", "runs/one", "weights", "bin/python"
    )]  # fmt: skip
    assert with_references(config.model_dump(), origins)["model"]["path"] == "${TW_MODEL}"


# A new loss and a new estimator are two files each: the class of the options, and the function with its line in a
# table


ROOT = Path(__file__).resolve().parents[2]

LOSS = {
    "options/algorithm.py": [
        (
            "LOSSES = (",
            '''class Powers(LossSection):
    """A loss of this test."""

    name: Literal["powers"] = "powers"
    power: Positive = 3
    """The power of the log-probability."""


''',
        ),
        ("PpoClip, Gspo, ", "Powers, "),
    ],
    "training/losses.py": [
        (
            "LOSSES: Mapping",
            """from turnwise.options.algorithm import Powers


def powers(logprob_N: torch.Tensor, targets: Targets, options: Powers) -> LossTerms:
    return _terms(logprob_N, targets, loss_N=-targets.advantage_N * logprob_N**options.power)


""",
        ),
        ("    PpoClip: ppo_clip,", "    Powers: powers,\n"),
    ],
}
ESTIMATOR = {
    "options/algorithm.py": [
        (
            "ESTIMATORS = (",
            '''class Doubled(CreditSection):
    """An estimator of this test."""

    name: Literal["doubled"] = "doubled"
    factor: Factor = 2.0
    """The factor of the reward."""


''',
        ),
        ("    Grpo,\n    Rloo,", "    Doubled,\n"),
    ],
    "rewards/credit/outcome.py": [
        (
            "ESTIMATORS: Mapping",
            """from turnwise.options.algorithm import Doubled


def doubled(batch: EpisodeGroups, options: Doubled) -> Advantages:
    return _for_all_turns(batch, [[options.factor * reward for reward in group] for group in _rewards(batch)])


""",
        ),
        ("    Grpo: Estimator(grpo),", "    Doubled: Estimator(doubled),\n"),
    ],
}

PROGRAM = """
import asyncio
import sys

from generated_pages import option_table

import turnwise
from support.tiny import tiny_model
from training.test_batch import group
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.config.resume_rules import RULES, option_values
from turnwise.config.train_checks import refuse_without_effect
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.types import Group, Sampling

recipe = {"model": "m", "data": {"train": "rows.jsonl"}, "train": {"steps": 1}}
recipe |= {"loss": {"name": "powers", "power": 5}, "credit": {"name": "doubled", "factor": 3.0}}
config = checked(recipe, source="the test")
refuse_without_effect(config)
assert {"loss.power", "credit.factor"} <= option_values(config).keys() <= RULES.keys()
text = option_table()
assert "`powers`" in text and "The power of the log-probability." in text
assert "`doubled`" in text and "The factor of the reward." in text

trajectories = group()
for number, one in enumerate(trajectories):
    one.reward = 0.5 * number
assembly.credit(config, assembly.scorer(config))([Group(id="g", row=trajectories[0].row, trajectories=trajectories)])
assert [set(one.advantages) for one in trajectories] == [{1.5 * number} for number in range(len(trajectories))]

learner = LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(config.loss, config.correction), threads=1)
update = asyncio.run(learner.update([pack(trajectories, loss=config.loss)], lr=1e-2))
assert update.grad_norm > 0.0
print(turnwise.__file__)
"""


def put(source: Path, changes: dict[str, list[tuple[str, str]]]) -> None:
    """Write text before the first occurrence of another text."""
    for name, pairs in changes.items():
        file = source / name
        text = file.read_text(encoding="utf-8")
        for before, new in pairs:
            assert before in text
            text = text.replace(before, new + before, 1)
        file.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_a_loss_and_an_estimator_are_two_files_each(tmp_path: Path) -> None:
    copy = tmp_path / "turnwise"
    shutil.copytree(ROOT / "src" / "turnwise", copy)  # with the compiled files of what does not change
    put(copy, LOSS)
    put(copy, ESTIMATOR)
    path = os.pathsep.join(str(folder) for folder in (tmp_path, ROOT / "tests", ROOT / "scripts"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(copy / "__init__.py")]  # the changed copy has run
    assert len(LOSS) == len(ESTIMATOR) == 2
