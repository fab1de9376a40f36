"""Mistakes that many users make, each with the message that says what to write."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold
from support.recipes import save_recipe
from turnwise import Opening, Reply, assembly, environment, user_message
from turnwise.config.recipe import load
from turnwise.environments.tools.schema import FromSchema, schema_of
from turnwise.errors import ConfigError, DataError, RunError
from turnwise.training.checkpoint import Checkpoints
from turnwise.types import Row

CODE = """
from turnwise import Opening, Reply, environment

async def forgotten(row):
    turn = yield Opening(messages=row.messages)
    yield Reply(done=True)

async def forgotten_too(**options):
    yield None

def trl(completions, answer, **kwargs):
    return [1.0 for _ in completions]

def trl_prompts(prompts, **kwargs):
    return [1.0 for _ in prompts]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "code.py").write_text(CODE)
    return str(tmp_path / "code.py")


@pytest.mark.parametrize("name", ["forgotten", "forgotten_too"])
def test_a_generator_without_decorator_is_told_to_have_one(model: Path, tmp_path: Path, place: str, name: str) -> None:
    recipe = save_recipe(tmp_path, model, environment=f"{place}:{name}")
    with pytest.raises(ConfigError, match=r"generator function.*write @environment above it"):
        assembly.environment_factory(load(recipe)[0], encode=None)


@pytest.mark.parametrize(
    ("form", "name", "told"),
    [
        ("trajectory", "trl", "turnwise.compat.trl:TrlReward"),
        ("trajectory", "trl_prompts", "turnwise.compat.trl:TrlReward"),
        ("batch", "trl_prompts", "turnwise.compat.trl:TrlReward"),
        ("trajectory", "compute_score", "turnwise.compat.verl:CustomScore"),
        ("batch", "compute_score", "turnwise.compat.verl:CustomScore"),
    ],
)
def test_a_reward_function_of_another_system_is_told_its_adapter(
    model: Path, tmp_path: Path, place: str, form: str, name: str, told: str
) -> None:
    config, _ = load(save_recipe(tmp_path, model, reward={form: [f"{place}:{name}"]}))
    with pytest.raises(ConfigError) as caught:
        assembly.scorer(config).refuse_unknown_columns(assembly.rows(config))
    assert told in str(caught.value)


def test_a_row_says_where_the_prompt_and_the_columns_are() -> None:
    row = Row(id="7", messages=[{"role": "user", "content": "?"}], fields={"answer": "4"})
    for read in (lambda: row["prompt"], lambda: row["messages"]):
        with pytest.raises(KeyError, match=r"the messages of the prompt are row\.messages"):
            read()
    with pytest.raises(
        AttributeError, match=r"a row has no attribute 'answer': the column 'answer' is row\['answer'\]"
    ):
        row.answer  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"the messages of the prompt are row\.messages"):
        row.prompt  # type: ignore[attr-defined]  # noqa: B018
    assert copy.deepcopy(row) == copy.copy(row) == pickle.loads(pickle.dumps(row)) == row


def test_a_prompt_that_ends_with_the_answer_is_refused(
    model: Path, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}\n{"prompt": "3+3?"}\n'
    )
    single = "turnwise.environments.environment:SingleTurn"
    with pytest.raises(
        DataError, match=r"the prompt of 1 of 2 rows ends with a message of the assistant \(row '1': '4'\)"
    ):
        assembly.rows(load(save_recipe(tmp_path, model, data={"train": str(rows)}, environment=single))[0])
    own = load(save_recipe(tmp_path, model, data={"train": str(rows)}, environment=f"{place}:forgotten"))[0]
    with caplog.at_level(logging.WARNING):
        assert len(assembly.rows(own)) == 2
    assert "forgotten takes it out" in caplog.text


def test_a_docstring_that_describes_no_parameter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            town: The town.
        """
        return city

    with caplog.at_level(logging.WARNING):
        schema_of(weather)
    assert "describes town under Args, and the tool has no such parameter" in caplog.text


@pytest.mark.parametrize("schema", [-1, [], {}, True])
def test_a_schema_whose_dialect_is_no_text_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError, match=r"the parameters of the tool 't' are not a JSON Schema: \$schema: "):
        FromSchema({"$schema": schema, "type": "object"}, "t")


def test_half_a_character_of_an_environment_is_named() -> None:
    @environment
    async def cut(row: Row):  # type: ignore[no-untyped-def]
        yield Opening(messages=row.messages)
        yield user_message("cut \ud83d")
        yield Reply(done=True)

    one = hold(Says("a", "b"), cut)
    assert one.error is not None
    assert one.error.kind == "environment"
    assert "a message with the role 'user' cannot be encoded" in one.error.message
    assert r"contains '\ud83d' at position 4, which is half of a surrogate pair" in one.error.message


def test_checkpoints_are_refused_before_training_where_they_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(RunError, match=r"checkpoint is a directory, and the run would write a link"):
        Checkpoints(tmp_path).refuse_other_files()
    (tmp_path / "checkpoint").rmdir()
    (tmp_path / "checkpoint").symlink_to("checkpoint")  # a link to itself
    Checkpoints(tmp_path).refuse_other_files()
    with pytest.raises(RunError, match="points to no checkpoint"):
        Checkpoints(tmp_path).find()
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match="checkpoints is a file"):
        Checkpoints(tmp_path).refuse_other_files()


def test_a_folder_in_the_way_of_the_link_stops_a_run_before_its_first_step(model: Path, tmp_path: Path) -> None:
    from turnwise.train import assemble

    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    recipe = save_recipe(tmp_path, model, train={"steps": 1, "batch_size": 1, "group_size": 2, "lr": 0.01})
    for override in ("replace=false", "replace=true", "resume=auto"):
        with pytest.raises(RunError, match="checkpoint is a directory"):
            assemble(load(recipe, [override])[0])
