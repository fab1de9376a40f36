"""Evaluation and replay of real runs: a complete checkpoint, a LoRA adapter, rows with images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import turnwise
from support.vision import picture, save_vision_model
from turnwise.cli import main
from turnwise.types import Trajectory

PLACES = Path(__file__).resolve().parents[1] / "support"
ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
OPTIONS: dict[str, Any] = {
    "environment": f"{PLACES / 'places.py'}:low_bytes",
    "limits": {"tokens_per_turn": 6, "turns": 2},
    "credit": "grpo",
    "progress": False,
}


def save(folder: Path, rows: Sequence[dict[str, Any]] = ROWS) -> str:
    """Rows in a file, because a replay in another process reads them again."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(start: Path, folder: Path, **changes: Any) -> turnwise.RunResult:
    options: dict[str, Any] = {
        **OPTIONS, "model": start, "rows": save(folder), "output": folder / "run",
        "train": {"steps": 1, "batch_size": 3, "group_size": 4, "lr": 0.02}, **changes,
    }  # fmt: skip
    return turnwise.train(**options)


def worst_difference(model: Any, trajectories: Sequence[Trajectory]) -> float:
    """The largest difference between recorded log-probabilities and those of a model, at temperature 1."""
    worst = 0.0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            with torch.no_grad():
                logits = model(torch.tensor([list(segment.token_ids)])).logits[0].float()
            logprobs = logits.log_softmax(-1)
            for place, turn in enumerate(segment.turn):
                if turn >= 0:
                    expected = float(logprobs[place - 1, segment.token_ids[place]])
                    worst = max(worst, abs(expected - segment.logprobs[place]))
    return worst


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    return main(["replay", *words]), capsys.readouterr().out


@pytest.mark.parametrize("lora", [False, True])
def test_the_newest_checkpoint_of_a_run_is_evaluated_and_replayed(
    model: Path, tmp_path: Path, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The conversations of the evaluation have the log-probabilities that transformers and peft give to their tokens."""
    if lora:
        peft = pytest.importorskip("peft")
        run = trained(model, tmp_path, model={"path": str(model), "lora": {"rank": 4}})
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        reference = peft.PeftModel.from_pretrained(base, run.model)
    else:
        run = trained(model, tmp_path)
        reference = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    evaluated = turnwise.evaluate(
        models={"before": model, "after": run}, eval_rows=save(tmp_path), model=model, output=tmp_path / "compared", **OPTIONS
    )  # fmt: skip
    after = list(evaluated.trajectories("after"))
    assert len(after) == 3
    assert worst_difference(reference.eval(), after) < 1e-3
    assert worst_difference(reference, list(evaluated.trajectories("before"))) > 1e-2  # the weights are others
    same = "conversations are the same, 0 differ\n"
    assert replayed(capsys, str(run.directory), "--all") == (0, f"12 of 12 {same}")
    assert replayed(capsys, str(evaluated.directory / "after"), "--all") == (0, f"3 of 3 {same}")


def test_rows_with_images_are_evaluated_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_vision_model(tmp_path / "model")
    rows: list[dict[str, Any]] = []
    for n in range(3):
        picture(16, 8 * (n + 1), seed=n).save(tmp_path / f"{n}.png")
        rows.append({"prompt": f"<image>What is {n}?", "images": [f"{n}.png"]})
    options: dict[str, Any] = {**OPTIONS, "environment": f"{PLACES / 'vision.py'}:shows_another"}
    evaluated = turnwise.evaluate(
        models={"first": model, "second": save_vision_model(tmp_path / "other", seed=1)}, eval_rows=save(tmp_path, rows),
        model={"path": str(model), "device": "cpu"}, output=tmp_path / "compared", eval={"samples_per_row": 2}, **options,
    )  # fmt: skip
    for name in ("first", "second"):
        trajectories = list(evaluated.trajectories(name))
        of_model = evaluated.models[name]
        assert [of_model.failed, len(trajectories)] == [0, 6]
        assert of_model.reward.mean == pytest.approx(sum(t.reward or 0.0 for t in trajectories) / 6)
        # an image of 16 x 8(n+1) pixels has 2(n+1) tokens, which count in the prompt
        short = [next(place for place, turn in enumerate(t.segments[0].turn) if turn >= 0) for t in trajectories]
        assert [short[2] - short[0], short[4] - short[2]] == [2, 2]
    place = str(evaluated.directory / "first")
    assert replayed(capsys, place, "--all") == (0, "6 of 6 conversations are the same, 0 differ\n")
    picture(16, 16, seed=9).save(tmp_path / "0.png")  # another image, of another size
    status, text = replayed(capsys, place, "--all")
    assert status == 1
    assert "4 of 6 conversations are the same, 2 differ" in text
    assert "segments[0].token_ids" in text
