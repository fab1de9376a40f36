"""`turnwise.evaluate`: the models and the numbers of `turnwise eval`, with live objects and typed results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import turnwise
from support import byte_tokenizer
from support.places import low_bytes
from support.tiny import save_model, tiny_model
from turnwise.api import EvaluationRun
from turnwise.errors import ConfigError

ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]


def options(model: Path, tmp_path: Path, **changes: Any) -> Any:
    return {
        "model": model, "environment": low_bytes, "limits": {"tokens_per_turn": 4, "turns": 2},
        "eval": {"samples_per_row": 2, "pass_reward": 0.5}, "output": tmp_path / "run", "progress": False, **changes,
    }  # fmt: skip


def test_models_of_all_kinds_are_compared_on_the_same_rows(model: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    trained = turnwise.train(
        **options(model, tmp_path, rows=ROWS, eval={}), train={"steps": 1, "batch_size": 2, "group_size": 2, "lr": 0.05},
        credit="grpo",
    )  # fmt: skip
    run = turnwise.evaluate(
        **options(model, tmp_path, eval_rows=(row for row in ROWS), output=tmp_path / "compared"),
        models={
            "same": str(model),
            "trained": trained,
            "object": (tiny_model(vocabulary=len(tokenizer)), tokenizer),
            "cold": {"eval": {"sampling": {"temperature": 0.01}}},
        },
    )
    assert run.directory == tmp_path / "compared-eval"
    assert list(run.models) == ["same", "trained", "object", "cold"]
    assert Path(run.models["trained"].model).resolve() == trained.model.resolve()
    assert [(c.first, c.second) for c in run.comparisons] == [(n, "same") for n in ("trained", "object", "cold")]
    for name, of_model in run.models.items():
        trajectories = list(run.trajectories(name))
        assert of_model.conversations == len(trajectories) == 6
        rewards = [t.reward for t in trajectories]
        assert of_model.reward.mean == pytest.approx(sum(r for r in rewards if r is not None) / 6)
        assert of_model.cost.sampled_tokens == sum(t.sampled_tokens for t in trajectories)
    assert [t.id for t in run.trajectories("same")] == [t.id for t in run.trajectories("trained")]
    frame = run.to_pandas()
    assert list(frame["model"].unique()) == ["same", "trained", "object", "cold"]
    assert len(frame) == 24
    again = EvaluationRun(run.directory)
    assert again.result == run.result
    with pytest.raises(ConfigError, match=r"trajectories\(None\): give the name of one of the models: same, trained"):
        run.trajectories()


def test_an_evaluation_is_resumed_and_has_one_model_by_default(model: Path, tmp_path: Path) -> None:
    first = turnwise.evaluate(**options(model, tmp_path, eval_rows=ROWS))
    lines = (first.directory / model.name / "trajectories.jsonl").read_bytes()
    again = turnwise.evaluate(**options(model, tmp_path, eval_rows=ROWS, resume="auto"), out=first.directory)
    assert (again.directory / model.name / "trajectories.jsonl").read_bytes() == lines
    assert again.result == first.result
    assert [t.row["answer"] for t in again.trajectories()] == ["1", "1", "2", "2", "3", "3"]


def test_several_turns_against_one_turn(model: Path, tmp_path: Path) -> None:
    run = turnwise.evaluate(**options(model, tmp_path, eval_rows=ROWS), single_turn=True)
    several, single = run.models.values()
    assert (several.single_turn, single.single_turn) == (False, True)
    assert set(single.turns) == {1}
    (comparison,) = run.comparisons
    assert (comparison.first, comparison.second) == (several.name, single.name)


def test_without_held_out_rows(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs held-out rows"):
        turnwise.evaluate(**options(model, tmp_path, rows=ROWS, eval={}))


def test_a_recipe_file(model: Path, tmp_path: Path) -> None:
    recipe = turnwise.Recipe(**{
        name: value for name, value in options(model, tmp_path, rows=ROWS, eval_rows=ROWS[:1]).items() if name != "progress"
    })  # fmt: skip
    run = turnwise.evaluate(recipe, models=[save_model(tmp_path / "other")], progress=False)
    assert list(run.models) == ["other"]
    assert run.result.rows == 1
