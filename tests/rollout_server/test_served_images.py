"""Images over the rollout server: rows, images of the environment, the tensors that are trained on, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.image_recipe import save_image_recipe
from support.rollout_servers import TOKEN, Running, client_of, running
from support.swift_client import Swift, swift
from support.training import train_run
from support.vision import image_part, picture, text_part
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.data.images import digest, load_image
from turnwise.errors import ConfigError
from turnwise.rollout.rollout import new_group
from turnwise.train import assemble
from turnwise.types import Row, Sampling


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_recipe(tmp_path_factory.mktemp("vision"))


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNWISE_SERVER_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def server(recipe: Path) -> Iterator[Running]:
    with running(recipe) as server:
        yield server


def trained(recipe: Path, out: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[Any], str]:
    """The trajectories, the losses and the ratios, and the fingerprint of the weights at the end."""
    lines, metrics, run = train_run(recipe, out, *overrides)
    for line in lines:
        for timed in (line, *line["turns"]):
            for name in ("seconds", "started"):
                timed.pop(name, None)
    return lines, [(line.get("loss"), line.get("ratio/max_deviation")) for line in metrics], run.learner.fingerprint()


def test_a_run_with_images_is_the_run_in_one_process(recipe: Path, tmp_path: Path) -> None:
    """The same tokens, record, losses and weights: so the trainer has the pixels that the server's model has seen."""
    options = ["deterministic=true", "correction.action=null"]
    alone = trained(recipe, tmp_path / "alone", *options)
    with running(recipe, "deterministic=true") as server:
        together = trained(recipe, tmp_path / "together", *options, f"rollout_server.url={server.url}")
    assert together == alone
    media = [len(segment["media"]) for line in together[0] for segment in line["segments"]]
    assert len(together[0]) == 8
    assert set(media) == {1, 2}  # a turn that was cut off ends the conversation before the image of the environment
    pictures = {file.name for file in (tmp_path / "together" / "media").iterdir()}
    assert pictures == {file.name for file in (tmp_path / "alone" / "media").iterdir()}
    assert all(ratio is None or ratio < 1e-3 for _, ratio in together[1])


def test_every_form_of_an_image_has_its_pixels_and_tensors_at_the_client(recipe: Path, server: Running) -> None:
    """Against the processor of transformers on the original image."""
    config = load(recipe)[0]
    renderer = assembly.renderer(config)
    assert renderer.vision is not None
    original = picture(24, 16, seed=7)
    file = recipe.parent / "original.png"
    original.save(file)
    stream = io.BytesIO()
    original.convert("RGBA").save(stream, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    forms: list[Any] = [original, str(file), stream.getvalue(), uri, {"bytes": stream.getvalue(), "path": None}]
    rows = [
        Row(
            id=str(n),
            messages=[{"role": "user", "content": [image_part(form), text_part("?")]}],
            fields={"images": [form]},
        )
        for n, form in enumerate(forms)
    ]
    client = client_of(server, vision=renderer.vision)
    group = [new_group(row, size=1, seed=3).trajectories[0] for row in rows]

    async def ask() -> None:
        await client.start()
        await client.run(group, Sampling())
        await client.close()

    asyncio.run(ask())
    expected = renderer.vision.processor.image_processor(images=[original], return_tensors="pt")
    for trajectory, form in zip(group, forms, strict=True):
        assert trajectory.error is None
        first, *others = trajectory.segments[0].media
        assert digest(first.source) == digest(original)
        assert (first.inputs["pixel_values"] == expected["pixel_values"]).all()
        assert trajectory.messages[0]["content"][0]["image"] is form  # the client's own value
        shown = digest(picture(24, 16, seed=int(trajectory.row.id)))
        assert {digest(item.source) for item in others} <= {shown}
        if others:
            assert digest(load_image(trajectory.messages[2]["content"][0]["image"], where="")) == shown
    assert any(len(trajectory.segments[0].media) == 2 for trajectory in group)


@pytest.mark.parametrize(
    ("image", "images", "reason"),
    [
        ("/etc/passwd", {}, "opens no files or addresses"),
        ("http://a/b.png", {}, "opens no files or addresses"),
        ("sha256:" + "0" * 64, {}, "there is no image sha256:0"),
        ("sha256:" + "0" * 64, {"0" * 64: "???"}, "is not base64"),
    ],
)
def test_images_that_are_not_in_the_request_are_refused(
    server: Running, image: str, images: dict[str, str], reason: str
) -> None:
    messages = [{"role": "user", "content": [image_part(image), text_part("?")]}]
    body = {"conversations": [{"id": "a", "row": {"id": "0", "messages": messages}}], "images": images}
    status, answer = server.ask("POST", "/rollouts", body)
    assert (status, reason in answer["error"]) == (400, True), answer


def test_a_broken_image_fails_its_conversation_only(server: Running) -> None:
    def asked(id: str, name: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": [image_part(f"sha256:{name * 64}"), text_part("?")]}]
        return {"id": id, "row": {"id": "0", "messages": messages}}

    stream = io.BytesIO()
    picture().save(stream, "PNG")
    images = {"a" * 64: base64.b64encode(b"no image").decode(), "b" * 64: base64.b64encode(stream.getvalue()).decode()}
    body = {"conversations": [asked("broken", "a"), asked("good", "b")], "images": images}
    _, text, _ = server.request("POST", "/rollouts", body)
    events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
    errors = {event["trajectory"]["id"]: event["trajectory"]["error"] for event in events}
    assert errors["good"] is None
    assert "cannot be read as an image" in errors["broken"]["message"]


def test_another_image_processor_and_rows_that_cannot_be_sent_are_refused(recipe: Path, server: Running) -> None:
    with pytest.raises(ConfigError, match="has another image processor"):
        asyncio.run(client_of(server).check())  # as a text model has none
    url = f"rollout_server.url={server.url}"
    with pytest.raises(ConfigError, match=r"data\.return_multi_modal_inputs=true has no effect with rollout_server"):
        assemble(load(recipe, [url, "data.return_multi_modal_inputs=true"])[0])


@pytest.fixture(scope="module")
def theirs() -> Iterator[Swift]:
    pytest.importorskip("requests")
    with swift() as names:
        yield names


@pytest.mark.parametrize("kind", ["bytes", "path"])
def test_ms_swifts_client_sends_and_receives_images(theirs: Swift, server: Running, recipe: Path, kind: str) -> None:
    file = recipe.parent / "0.png"
    image = {"bytes": file.read_bytes(), "path": None} if kind == "bytes" else {"bytes": None, "path": str(file)}
    row = {"messages": [{"role": "user", "content": "<image>What is it?"}], "images": [image]}
    sample = theirs.data.GRPOSample.from_row(row)
    sample.request_id = "5"
    client = theirs.client(base_urls=[f"http://any:{TOKEN}@{server.host}:{server.port}"], connection_timeout=5)
    request = sample.to_infer_request(include_extra=True)
    (output,) = client.infer(
        [request], request_config=theirs.protocol.RequestConfig(max_tokens=6, temperature=1.0, seed=1)
    )
    sample.apply_rollout_output(rollout_output=output)
    assert [message["content"] for message in sample.messages if message["role"] == "user"] == [
        "<image>What is it?",
        "<image>And this?",
    ]
    seen = [Image.open(io.BytesIO(base64.b64decode(text))) for text in sample.images]
    assert [digest(image) for image in seen] == [digest(Image.open(file)), digest(picture(24, 16, seed=5))]
    assert len(sample.response_token_ids) == 2


def test_ms_swifts_images_that_cannot_be_read_are_refused(server: Running) -> None:
    for images, reason in (
        (["/no/such.png"], "must be base64, or the path of a file"),
        ([base64.b64encode(b"text").decode()], "cannot be read as an image"),
        (["http://a/b.png"], "not downloaded"),
    ):
        request = {"messages": [{"role": "user", "content": "<image>?"}], "images": images}
        status, answer = server.ask("POST", "/infer/", {"infer_requests": [request]})
        assert (status, reason in answer["error"]) == (400, True), answer


@pytest.mark.slow
def test_a_server_process_trains_a_vision_model(recipe: Path, tmp_path: Path) -> None:
    """Two processes; the server's knows neither the files of the rows nor the trainer's memory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TURNWISE_SERVER_TOKEN": TOKEN}
    serve = [sys.executable, "-m", "turnwise", "serve", str(recipe), "--port", "0"]
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        found = next(match for line in server.stdout if (match := re.search(r" at (http://\S+) ", line)))
        out = f"output={tmp_path / 'run'}"
        train_it = [sys.executable, "-m", "turnwise", "train", str(recipe), f"rollout_server.url={found.group(1)}", out]
        try:
            done = subprocess.run(train_it, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 143
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [None] * 8
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["ratio/max_deviation"] < 1e-3 for line in metrics if "loss" in line] == [True] * 2
