"""Images of rows and of environments in rollout workers: the trainer has the pixels that the model of the worker has seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cluster.ray_clusters import cluster
from cluster.test_ray_training import on_ray, tokens, trained
from support.image_recipe import save_image_recipe
from support.vision import image_part, picture
from turnwise.data.images import load_image
from turnwise.ray_workers.rollout_worker import ImageFile, pickled, unpickled, with_files
from turnwise.types import Row, Trajectory


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster({"tools": 1}, {"tools": 1}) as started:
        yield started.address


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_recipe(tmp_path_factory.mktemp("vision"))


def media(trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    return {line["id"]: [segment["media"] for segment in line["segments"]] for line in trajectories}


@pytest.mark.cluster
@pytest.mark.ray
def test_a_run_with_images_is_the_run_in_one_process(recipe: Path, tmp_path: Path, address: str) -> None:
    alone, of_alone = trained(recipe, tmp_path / "alone")
    together, of_together = trained(recipe, tmp_path / "together", *on_ray(address))
    assert len(together) == 8
    assert not [line["error"] for line in together if line.get("error")]
    assert tokens(together) == tokens(alone)
    assert media(together) == media(alone)  # places, grids and hashes of the pixels
    assert {len(images) for of_line in media(together).values() for images in of_line} == {1, 2}
    messages = {line["id"]: (line["messages"], line["row"]) for line in alone}
    assert {
        line["id"]: (line["messages"], line["row"]) for line in together
    } == messages  # images of rows are paths again
    for mine, other in zip(of_together, of_alone, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert of_together[0]["ratio/max_deviation"] < 1e-3


def test_the_worker_gets_files_and_the_trainer_gets_paths_again(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    picture(8, 16, seed=3).save(file)
    drawn = picture(8, 8, seed=4)
    content = [image_part(str(file)), image_part(drawn), {"type": "video", "video": [str(file), drawn]}]
    row = Row(id="7", messages=[{"role": "user", "content": content}], fields={"images": [str(file)], "other": "a.png"})
    sent = with_files(row)
    image, pixels, video = sent.messages[0]["content"]
    assert image["image"] == video["video"][0] == sent.fields["images"][0] == file.read_bytes()
    assert isinstance(image["image"], ImageFile)
    assert pixels["image"] is video["video"][1] is drawn
    assert sent.fields["other"] == "a.png"
    assert load_image(image["image"], where="here").tobytes() == Image.open(file).tobytes()
    trajectory = Trajectory(id="7/0", group="7", row=sent, messages=list(sent.messages))
    back = pickled(trajectory)
    assert file.read_bytes() not in back
    again = unpickled(back)
    assert again.messages[0]["content"][0] == image_part(str(file))
    assert again.messages[0]["content"][2]["video"][0] == str(file)
    assert again.row.fields["images"] == [str(file)]
