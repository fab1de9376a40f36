"""A run as others see it: in a notebook, and as a model repository."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from support.conversations import Says, a_row, hold
from support.runs import a_run
from turnwise.api import RunResult
from turnwise.cli import main
from turnwise.environments.environment import SingleTurn
from turnwise.record.run_directory import RunDirectory
from turnwise.record.writer import write_trajectories


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = a_run(tmp_path / "run", options={"model": {"path": "org/base"}, "train": {"steps": 5, "lr": 0.001}})
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "config.json").write_text("{}")
    (path / "checkpoint" / "README.md").write_text("of peft")
    return path


def test_a_notebook_shows_curve_table_and_three_conversations_and_runs_no_text_of_the_model(run: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    trajectories = [hold(Says(hostile), SingleTurn, row=a_row(hostile, id=f"<b>{n}")) for n in range(4)]
    for trajectory, reward in zip(trajectories, (0.5, 3.0, -1.0, None), strict=True):
        trajectory.reward = reward
    write_trajectories(run / "trajectories.jsonl", trajectories, step=4)
    RunDirectory(run).write_warning(step=2, name="kl", text=hostile)
    page = RunResult(run)._repr_html_()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(1)") == 3 * 2 + 1
    assert [part.split(",")[0] for part in page.split("<summary>")[1:]] == [
        "best: reward 3", "median: reward 0.5", "worst: reward -1",
    ]  # fmt: skip
    assert "<polyline points='0.0,120.0 " in page
    assert "<td>reward/mean</td><td>0.6</td><td>0.8</td><td>2</td>" in page
    assert "killed after step 4 of 5" in page


def test_the_best_checkpoint_is_pushed_with_the_metrics_until_then(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "--to", "me/model", "--best", "--dry-run"]) == 1
    assert "has no best checkpoint: a run with checkpoint.best=METRIC" in " ".join(capsys.readouterr().err.split())
    model = run / "checkpoints" / "step-000002" / "model"
    model.mkdir(parents=True)
    (model / "of_step_2.json").write_text("{}")
    (model.parent / "checkpoint.json").write_text('{"step": 2}')
    (run / "best").symlink_to(model.relative_to(run))
    assert main(["push", str(run), "--to", "me/model", "--best", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "| `reward/mean` | 0.8 | 0.8 | 2 |" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["README.md", "of_step_2.json", "recipe.yaml"]


def test_the_card_has_the_metrics_and_the_options_that_were_changed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "--to", "me/model", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\nbase_model: org/base\n")
    assert "| `reward/mean` | 0.6 | 0.8 | 2 |" in out
    assert "| `train.lr` | `0.001` | `1e-06` |" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["README.md", "config.json", "recipe.yaml"]
    assert main(["push", str(run), "--to", "model", "--dry-run"]) == 1
    assert main(["push", str(run.parent), "--to", "me/model"]) == 1
    assert "has no checkpoint" in capsys.readouterr().err


def test_the_card_of_a_run_that_was_killed_later_has_step_and_metrics_of_the_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints" / "step-000003"
    (folder / "model").mkdir(parents=True)
    (folder / "checkpoint.json").write_text('{"step": 3}')
    (run / "checkpoint").rename(run / "other")
    (run / "checkpoint").symlink_to(folder.relative_to(run) / "model")
    assert main(["push", str(run), "--to", "me/model", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert ": 3 of 5 steps (the run: killed, and it went on to step 4), from `org/base`" in out
    assert "| `reward/mean` | 0.5 | 0.8 | 2 |" in out
    assert "| `eval/reward/mean` | 0.25 | 0.25 | 0 |" in out


class FakeHub(BaseHTTPRequestHandler):
    """The requests of a commit of small files."""

    received: list[dict[str, object]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        place = f"http://{self.headers['host']}/me/model"
        answer: dict[str, object] = {"url": place, "commitOid": "0" * 40, "commitUrl": f"{place}/commit/{'0' * 40}"}
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif self.path.endswith("/commit/main"):
            self.received += [json.loads(line) for line in body.splitlines()]
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_push_is_one_commit_of_model_card_recipe_and_model(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeHub.received = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    try:
        assert main(["push", str(run), "--to", "me/model"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    files = {line["value"]["path"]: line["value"] for line in FakeHub.received if line["key"] == "file"}  # type: ignore[index]
    assert set(files) == {"README.md", "config.json", "recipe.yaml"}
    card = base64.b64decode(files["README.md"]["content"]).decode()
    assert "| `train.lr` | `0.001` |" in card
    assert "of peft" not in card
    assert "3 files are in" in capsys.readouterr().out
