"""A model that sees, from the data file to a checkpoint that can be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.training import train_silently
from support.vision import picture, save_vision_model
from turnwise.config.recipe import load
from turnwise.data.images import digest, load_image
from turnwise.errors import ConfigError
from turnwise.train import TrainingRun, assemble

PLACES = Path(__file__).parent / "support" / "vision.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    rows = []
    for n in range(4):
        picture(16, 8 * (n + 1), seed=n).save(tmp_path / f"{n}.png")
        rows.append({"prompt": f"<image>What is {n}?", "images": [f"{n}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": {"path": str(model), "device": "cpu"},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "environment": f"{PLACES}:shows_another",
        "limits": {"turns": 3, "tokens_per_turn": 8},
        "train": {"steps": 2, "batch_size": 2, "group_size": 3, "lr": 1e-3},
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def run(recipe: Path, *overrides: str) -> TrainingRun:
    one = assemble(load(recipe, overrides)[0])
    train_silently(one)
    return one


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_sees_from_the_row_to_the_checkpoint_and_goes_on(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "data.return_multi_modal_inputs=true")
    run(recipe, "resume=auto", "train.steps=3")
    metrics, records = lines(tmp_path / "run" / "metrics.jsonl"), lines(tmp_path / "run" / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2, 3]
    assert all(one["ratio/max_deviation"] < 1e-3 and one["grad_norm"] > 0 for one in metrics)
    assert len(records) == 3 * 2 * 3
    for one in records:
        assert one["error"] is None
        assert "multi_modal_inputs" not in one["row"]
        first = one["segments"][0]["media"][0]
        assert digest(load_image(one["messages"][0]["content"][0]["image"], where="it")) == first["sha256"]
    longer = [one for one in records if len(one["turns"]) == 2]  # those whose first turn was not cut
    assert longer
    for one in longer:
        second = one["segments"][0]["media"][1]
        assert one["messages"][2]["content"][0]["image"] == f"sha256:{second['sha256']}"
        assert (tmp_path / "run" / "media" / f"{second['sha256']}.png").is_file()


def test_an_option_of_images_is_refused_where_there_are_none(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    with pytest.raises(ConfigError, match="return_multi_modal_inputs=false has no effect: no row contains an image"):
        assemble(load(recipe, ("data.return_multi_modal_inputs=false",))[0])
