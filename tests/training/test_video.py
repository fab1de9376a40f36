"""Videos, as files and as lists of frames, from a row to a gradient. Needs the extra `vision`; skipped without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.training import train_silently
from support.vision import image_processor, picture, save_vision_model, vision_tokenizer
from turnwise.chat.media import MediaProcessor
from turnwise.errors import DataError
from turnwise.options.schema import Config
from turnwise.train import assemble

pytest.importorskip("torchvision")
encoders = pytest.importorskip("torchcodec.encoders")

pytestmark = pytest.mark.filterwarnings("default")  # of decoders


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_vision_model(tmp_path_factory.mktemp("model"))
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    videos = transformers.Qwen2VLVideoProcessor(**sizes, size={"shortest_edge": 64, "longest_edge": 1024}, fps=4)
    processor = transformers.Qwen2_5_VLProcessor(image_processor(), vision_tokenizer(), videos)
    processor.save_pretrained(path)
    return path


def video_file(path: Path, *, frames: int = 8) -> Path:
    """Two seconds of 32 x 32 pixels."""
    shown = torch.stack([torch.full((3, 32, 32), 20 * n, dtype=torch.uint8) for n in range(frames)])
    encoders.VideoEncoder(shown, frame_rate=4).to_file(str(path))
    return path


def test_a_file_and_its_frames_become_the_models_own_placeholders(model: Path, tmp_path: Path) -> None:
    vision = MediaProcessor.from_pretrained(model, vision_tokenizer())
    assert vision is not None
    pad = vision_tokenizer().convert_tokens_to_ids("<|video_pad|>")
    frames = [picture(32, 32, seed=n) for n in range(8)]
    for video in (str(video_file(tmp_path / "clip.mp4")), frames):
        parts = vision.parts([{"role": "user", "content": [{"type": "video", "video": video}]}])
        text, (seen,) = vision.expand("<|video_pad|>", parts)
        frames_2, height, width = seen.inputs["video_grid_thw"][0].tolist()
        ids = vision_tokenizer().encode(text, add_special_tokens=False)
        assert seen.kind == "video"
        assert ids.count(pad) == frames_2 * height * width // 4 > 0
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    parts = vision.parts([{"role": "user", "content": [{"type": "video", "video": str(tmp_path / "broken.mp4")}]}])
    with pytest.raises(DataError, match="the model's processor cannot process"):
        vision.expand("<|video_pad|>", parts)


def test_engine_and_trainer_agree_about_videos_of_rows(model: Path, tmp_path: Path) -> None:
    file = video_file(tmp_path / "clip.mp4")
    rows = [{"prompt": "What is in <video>?", "videos": [str(file)], "answer": "1"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "reward.py").write_text("def long(trajectory):\n    return trajectory.sampled_tokens % 5\n")
    config = {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "reward": {"trajectory": [f"{tmp_path / 'reward.py'}:long"]},
        "limits": {"turns": 1, "tokens_per_turn": 8},
        "train": {"steps": 2, "batch_size": 2, "group_size": 4, "lr": 1e-3},
        "output": str(tmp_path / "run"),
    }
    run = assemble(Config.model_validate(config))
    train_silently(run)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["stop/error"] for one in metrics] == [0.0, 0.0]
    assert metrics[0]["ratio/max_deviation"] < 1e-3
    assert metrics[0]["grad_norm"] > 0


def test_options_for_videos_that_are_missing_leave_images(model: Path, tmp_path: Path) -> None:
    whole = tmp_path / "model"
    whole.mkdir()
    for file in model.iterdir():
        (whole / file.name).write_bytes(file.read_bytes())
    said = json.loads((whole / "processor_config.json").read_text())
    (whole / "preprocessor_config.json").unlink(missing_ok=True)
    (whole / "video_preprocessor_config.json").unlink(missing_ok=True)
    said.pop("video_processor")
    (whole / "processor_config.json").write_text(json.dumps(said))
    vision = MediaProcessor.from_pretrained(whole, vision_tokenizer())
    assert vision is not None
    image, video = (
        vision.parts([{"role": "user", "content": [{"type": kind, kind: value}]}])
        for kind, value in (("image", picture()), ("video", [picture()] * 4))
    )
    assert vision.expand("<|image_pad|>", image)[1][0].kind == "image"
    with pytest.raises(DataError, match=r"no options for videos \(video_preprocessor_config.json\)"):
        vision.expand("<|video_pad|>", video)
