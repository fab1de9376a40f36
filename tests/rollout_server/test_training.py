"""Training on conversations of a rollout server, also with images."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support import byte_tokenizer
from support.forked import Forked
from support.image_recipe import save_image_recipe
from support.rollout_servers import TOKEN, Running, client_of, running
from support.swift_client import Swift, swift
from support.tiny import tiny_model
from support.training import save_short_recipe, train_run
from support.vision import image_part, picture, text_part
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.data.images import digest, load_image
from turnwise.errors import ConfigError, EngineError
from turnwise.models.loading import published_weights
from turnwise.rollout.rollout import new_group
from turnwise.rollout_server.conversations import LEASE_SECONDS, Leases
from turnwise.services.http_server import RequestRefused
from turnwise.train import assemble
from turnwise.types import Row, Sampling

# Training with a rollout server: the same run as in one process, weights with versions, and everything that goes
# wrong.


PLACES = Path(__file__).parent.parent / "support" / "places.py"


@pytest.fixture(scope="module")
def recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_short_recipe(tmp_path_factory.mktemp("recipe"), model)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNWISE_SERVER_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def server(recipe: Path) -> Iterator[Running]:
    with running(recipe) as server:
        yield server


def trained(recipe: Path, out: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """The trajectories, the metrics without times, and the fingerprint of the weights at the end."""
    trajectories, metrics, run = train_run(recipe, out, *overrides)
    timed = ("seconds", "per_second", "_seconds", "prefix_hit", "memory")
    metrics = [
        {key: value for key, value in line.items() if not any(word in key for word in timed)} for line in metrics
    ]
    return trajectories, metrics, run.learner.fingerprint()


def weights_of(seed: int) -> dict[str, Any]:
    """Weights for the model of the recipe."""
    return published_weights(tiny_model(seed, vocabulary=len(byte_tokenizer())))


def without_times(trajectory: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in trajectory.items() if key not in ("seconds", "started")}
    plain["turns"] = [
        {key: value for key, value in turn.items() if key not in ("seconds", "started")} for turn in trajectory["turns"]
    ]
    return plain


@pytest.mark.slow
def test_a_run_with_a_server_is_the_run_in_one_process(recipe: Path, tmp_path: Path) -> None:
    options = ["deterministic=true", "correction.action=null"]
    alone = trained(recipe, tmp_path / "alone", *options)
    with running(recipe, "deterministic=true") as server:
        together = trained(recipe, tmp_path / "together", *options, f"rollout_server.url={server.url}")
        assert server.ask("GET", "/info")[1]["version"] == 3
    assert [without_times(line) for line in together[0]] == [without_times(line) for line in alone[0]]
    assert together[1] == alone[1]
    assert together[2] == alone[2]
    assert len(alone[0]) == 3 * 8
    versions = [version for line in together[0] for segment in line["segments"] for version in segment["version"]]
    assert set(versions) == {-1, 0, 1, 2}


@pytest.mark.slow
def test_a_server_samples_under_grammars_and_the_trainer_computes_their_masks(recipe: Path, tmp_path: Path) -> None:
    form = "sampling.response_format={type: regex, pattern: '[0-9]{1,3}'}"
    options = ["deterministic=true", "correction.action=null", "train.steps=2", form]
    alone = trained(recipe, tmp_path / "alone", *options)
    with running(recipe, "deterministic=true", form) as server:
        with pytest.raises(ConfigError, match=r"sampling.response_format.pattern=None here, '.*' at the server"):
            trained(recipe, tmp_path / "other", "deterministic=true", f"rollout_server.url={server.url}")
        together = trained(recipe, tmp_path / "together", *options, f"rollout_server.url={server.url}")
    turns = [turn for line in together[0] for turn in line["turns"]]
    assert turns
    assert all("[0-9]{1,3}" in turn["constraint"]["grammar"] for turn in turns)
    assert [without_times(line) for line in together[0]] == [without_times(line) for line in alone[0]]
    assert together[1:] == alone[1:]  # with the masks, ratios are those of one process
    assert together[1][0]["ratio/max_deviation"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("directory", [False, True])
def test_only_the_adapter_is_sent_and_the_run_is_that_in_one_process(
    recipe: Path, tmp_path: Path, directory: bool
) -> None:
    pytest.importorskip("peft")
    options = ["deterministic=true", "correction.action=null", "model.lora.rank=2", "train.steps=2"]
    alone = trained(recipe, tmp_path / "alone", *options)
    with running(recipe, "deterministic=true", "model.lora.rank=2") as server:
        options.append(f"rollout_server.url={server.url}")
        if directory:
            options.append(f"rollout_server.weights_directory={tmp_path / 'weights'}")
        together = trained(recipe, tmp_path / "together", *options)
        assert server.ask("GET", "/info")[1]["version"] == 2
        metrics = server.request("GET", "/metrics")[1].decode()
    assert 'turnwise_weight_updates_total{result="loaded"} 3.0' in metrics
    assert [without_times(line) for line in together[0]] == [without_times(line) for line in alone[0]]
    assert together[1] == alone[1]
    assert together[2] == alone[2]


def test_an_adapter_needs_the_same_options_and_the_same_model(recipe: Path, tmp_path: Path, server: Running) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=2 here, None at the server"):
        assemble(load(recipe, [f"rollout_server.url={server.url}", "model.lora.rank=2", f"output={tmp_path / 'a'}"])[0])
    config = load(recipe, ["model.lora.rank=2"])[0]
    other = tmp_path / "model"
    shutil.copytree(config.model.path, other)
    (file,) = other.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with running(recipe, "model.lora.rank=2", f"model.path={other}") as adapted:
        with pytest.raises(ConfigError, match=r"has other weights than model\.path here, and only the adapter"):
            assemble(
                load(recipe, [f"rollout_server.url={adapted.url}", "model.lora.rank=2", f"output={tmp_path / 'b'}"])[0]
            )
        client = client_of(adapted, base=adapted.ask("GET", "/info")[1]["base"])

        async def send_all_weights() -> None:
            await client.start()
            try:
                await client.load_weights(1, weights_of(1))
            finally:
                await client.close()

        with pytest.raises(EngineError, match=r"send the adapter, or remove model\.lora"):
            asyncio.run(send_all_weights())
        assert adapted.ask("GET", "/health")[1]["version"] == 0


@pytest.mark.parametrize("directory", [False, True])
def test_training_with_a_server_learns(recipe: Path, tmp_path: Path, server: Running, directory: bool) -> None:
    options = [f"rollout_server.url={server.url}", "train.steps=2"]
    folder = tmp_path / "weights"
    if directory:
        options.append(f"rollout_server.weights_directory={folder}")
    trajectories, metrics, _ = trained(recipe, tmp_path / "run", *options)
    assert len(trajectories) == 2 * 8
    assert all(trajectory["error"] is None for trajectory in trajectories)
    assert [line["ratio/max_deviation"] < 1e-3 for line in metrics if "loss" in line] == [True, True]
    info = server.ask("GET", "/info")[1]
    assert (info["version"], info["lease"]) == (2, None)  # the lease was given back
    assert list(folder.glob("*/*")) == []


def test_a_server_with_another_recipe_is_refused(recipe: Path, tmp_path: Path, server: Running) -> None:
    overrides = [f"rollout_server.url={server.url}", f"output={tmp_path / 'run'}"]
    with pytest.raises(ConfigError) as refused:
        assemble(load(recipe, [*overrides, "limits.turns=5", "environment.arguments={turns: 3}"])[0])
    assert "environment.arguments={'turns': 3} here, {} at the server" in str(refused.value)
    assert "limits.turns=5 here, 2 at the server" in str(refused.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_server_that_is_not_there_is_refused(recipe: Path, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"rollout_server.url={url}: there is no connection to"):
        assemble(load(recipe, [f"rollout_server.url={url}", f"output={tmp_path / 'run'}"])[0])


def test_a_wrong_token_is_refused(
    recipe: Path, tmp_path: Path, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNWISE_SERVER_TOKEN", "swordfisch")
    with pytest.raises(
        ConfigError, match="set the environment variable TURNWISE_SERVER_TOKEN to the token of the rollout"
    ):
        assemble(load(recipe, [f"rollout_server.url={server.url}", f"output={tmp_path / 'run'}"])[0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["rollout_server.timeout=5"], "rollout_server.timeout has no effect without rollout_server.url"),
        (
            ["rollout_server.url=http://x", f"reward.trajectory=['{PLACES}:reads_environment']"],
            "reads_environment reads the environment's object, which is on the rollout server",
        ),
    ],
)
def test_options_without_effect_are_refused(recipe: Path, tmp_path: Path, options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        assemble(load(recipe, [*options, f"output={tmp_path / 'run'}"])[0])
    assert problem in str(refused.value)


def test_of_two_trainers_the_second_is_refused(server: Running) -> None:
    weights = weights_of(0)

    async def both() -> None:
        first, second = client_of(server), client_of(server, trainer="another:/run")
        await first.load_weights(1, weights)
        with pytest.raises(
            EngineError, match="uses this server, and the weights of two trainers cannot be served at once"
        ):
            await second.load_weights(1, weights)
        again = client_of(server)  # the same run, resumed after it was killed
        await again.load_weights(2, weights)
        await again.close()
        await second.load_weights(3, weights)
        await second.close()
        await first.close()

    asyncio.run(both())
    assert server.ask("GET", "/info")[1]["version"] == 3


def test_a_lease_ends_when_its_trainer_is_silent() -> None:
    now = [0.0]
    leases = Leases(lambda: now[0])
    first = leases.take("a")
    now[0] = LEASE_SECONDS - 1
    with pytest.raises(RequestRefused, match="the last request was 119 s ago"):
        leases.take("b")
    leases.use(first.id)
    now[0] += LEASE_SECONDS - 1
    assert leases.owner == "a"
    now[0] += 1
    assert leases.owner is None
    second = leases.take("b")
    with pytest.raises(RequestRefused, match="another trainer has taken it"):
        leases.use(first.id)
    leases.release(second.id)
    assert leases.take("a").owner == "a"


def test_a_failed_update_leaves_the_old_weights(server: Running, tmp_path: Path) -> None:
    from safetensors.torch import save, save_file

    weights = weights_of(3)
    lease = server.ask("POST", "/lease", {"owner": "test"})[1]["lease"]
    octets = {"Content_Type": "application/octet-stream"}
    status, answer = server.ask("POST", f"/weights?version=10&lease={lease}", save(weights), **octets)
    assert (status, answer["version"], answer["tensors"]) == (200, 10, len(weights))
    before = server.rollouts("a/0")

    name = "model.embed_tokens.weight"
    broken = {
        "are missing": {key: value for key, value in weights.items() if key != name},
        "have another shape": {**weights, name: weights[name][:5].clone()},
        "are not the model's": {**weights, "other": weights[name].clone()},
        "contains NaN or infinity": {**weights, name: weights[name] * float("nan")},
    }
    for problem, tensors in broken.items():
        status, answer = server.ask("POST", f"/weights?version=11&lease={lease}", save(tensors), **octets)
        assert status == 422
        assert problem in answer["error"]
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    file = tmp_path / "weights.safetensors"
    save_file({key: value * 2 for key, value in weights.items()}, file)
    requests: list[tuple[Any, str, dict[str, str], int]] = [
        (save(weights)[:-5], f"/weights?version=11&lease={lease}", octets, 422),
        (b"", f"/weights?version=11&lease={lease}", octets, 422),
        (save(weights), f"/weights?version=11&lease={lease}&checksum=00000000", octets, 422),
        (save(weights), "/weights?version=11&lease=other", octets, 409),
        (save(weights), "/weights?version=11", octets, 409),
        (save(weights), f"/weights?version=x&lease={lease}", octets, 400),
        ({"version": 11, "lease": lease, "path": str(tmp_path / "missing")}, "/weights", {}, 422),
        ({"version": 11, "lease": lease, "path": str(tmp_path)}, "/weights", {}, 422),
        # a pipe or a device would be read for ever, and every later update would wait for it
        ({"version": 11, "lease": lease, "path": str(pipe)}, "/weights", {}, 422),
        ({"version": 11, "lease": lease, "path": str(pipe), "checksum": "00000000"}, "/weights", {}, 422),
        ({"version": 11, "lease": lease, "path": "/dev/zero"}, "/weights", {}, 422),
        ({"version": 11, "lease": lease, "path": "/proc/self/fd/0"}, "/weights", {}, 422),
        ({"version": 11, "lease": lease, "path": "a\0b"}, "/weights", {}, 422),
        (save(weights), f"/weights?version=%C2%B2&lease={lease}", octets, 400),
        (save(weights), f"/weights?version={'9' * 4301}&lease={lease}", octets, 400),
        ({"version": 11, "lease": lease, "path": str(file), "checksum": "00000000"}, "/weights", {}, 422),
        ({"version": 11, "lease": "other", "path": str(file)}, "/weights", {}, 409),
        ({"version": 11, "lease": lease, "path": str(file), "file": 1}, "/weights", {}, 400),
    ]
    for body, path, headers, expected in requests:
        status, answer = server.ask("POST", path, body, **headers)
        assert status == expected, (path, answer)
    after = server.rollouts("a/0")
    assert after[0]["trajectory"]["segments"] == before[0]["trajectory"]["segments"]  # version 10 with its tokens
    assert server.ask("GET", "/health")[1]["version"] == 10
    assert server.ask("POST", "/weights", {"version": 12, "lease": lease, "path": str(file)})[0] == 200
    assert server.rollouts("a/0")[0]["trajectory"]["segments"] != before[0]["trajectory"]["segments"]
    assert server.ask("POST", "/lease/release", {"lease": lease})[0] == 200


def test_a_body_larger_than_the_model_is_refused(server: Running) -> None:
    lease = server.ask("POST", "/lease", {"owner": "test"})[1]["lease"]
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(
            f"POST /weights?version=1&lease={lease} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
        )
        assert connection.recv(1000).decode().startswith("HTTP/1.1 413")
    server.ask("POST", "/lease/release", {"lease": lease})


@contextlib.contextmanager
def proxy(target: Running) -> Iterator[tuple[str, dict[str, Any]]]:
    """A proxy that a test can let die or hang in mid-answer: the state says after how many bytes, and how often."""
    state: dict[str, Any] = {"times": 0, "after": 0, "hang": False}
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def forward(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection((target.host, target.port)) as server:
            threading.Thread(target=copy, args=(client, server, None), daemon=True).start()
            copy(server, client, state)

    def copy(source: socket.socket, sink: socket.socket, limited: dict[str, Any] | None) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                rollouts = b"text/event-stream" in data or sent > 0
                if limited is not None and limited["times"] and rollouts:
                    limited["times"] -= 1
                    sink.sendall(data[: limited["after"]])
                    if limited["hang"]:
                        over.wait()
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)
                sent += rollouts
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=forward, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", state
    finally:
        over.set()
        listening.close()


@pytest.mark.parametrize("hang", [False, True])
def test_a_conversation_whose_answer_breaks_off_is_sent_again(server: Running, hang: bool) -> None:
    group = new_group(Row(id="a", messages=[{"role": "user", "content": "?"}]), size=3, seed=0)
    with proxy(server) as (url, state):

        async def converse() -> None:
            client = client_of(server, url=url, timeout=1.0)
            await client.start()
            state.update(times=1, after=40, hang=hang)
            await asyncio.gather(*(client.run([trajectory], Sampling()) for trajectory in group.trajectories))
            await client.close()

        asyncio.run(converse())
        assert state["times"] == 0
    assert [trajectory.error for trajectory in group.trajectories] == [None] * 3
    expected = {event["trajectory"]["id"]: event for event in server.rollouts("a/0")}
    assert len(expected) == 1


def test_a_server_that_is_lost_for_good_fails_the_conversation_and_not_its_siblings(server: Running) -> None:
    group = new_group(Row(id="a", messages=[{"role": "user", "content": "?"}]), size=2, seed=0)
    lost, sibling = group.trajectories
    with proxy(server) as (url, state):

        async def converse() -> None:
            client, other = client_of(server, url=url, timeout=1.0), client_of(server)
            await client.start()
            state.update(times=100, after=10)
            await asyncio.gather(client.run([lost], Sampling()), other.run([sibling], Sampling()))
            await client.close()
            await other.close()

        asyncio.run(converse())
    assert sibling.error is None
    assert lost.error is not None
    assert lost.error.kind == "engine"
    assert url in lost.error.message
    assert (lost.turns, lost.reward) == ([], None)


def test_a_restarted_server_gets_the_weights_again(recipe: Path) -> None:
    weights = weights_of(7)
    group = new_group(Row(id="a", messages=[{"role": "user", "content": "?"}]), size=2, seed=0)
    before, after = group.trajectories
    after.seed = before.seed

    async def first(server: Running) -> Any:
        client = client_of(server)
        await client.load_weights(4, weights)
        await client.run([before], Sampling())
        return client

    loop = asyncio.new_event_loop()
    with running(recipe) as server:
        client = loop.run_until_complete(first(server))
    with running(recipe, port=server.port) as server:
        assert server.ask("GET", "/info")[1]["version"] == 0

        async def second() -> None:
            await client.run([after], Sampling())
            await client.close()

        loop.run_until_complete(second())
        assert server.ask("GET", "/info")[1]["version"] == 4
    loop.close()
    assert (before.error, after.error) == (None, None)
    assert [segment.token_ids for segment in after.segments] == [segment.token_ids for segment in before.segments]
    assert {version for segment in after.segments for version in segment.version} == {-1, 4}


def test_weights_change_in_mid_conversation_and_every_token_has_its_version(recipe: Path, tmp_path: Path) -> None:
    waits = f"environment={{use: '{PLACES}:waits_between', arguments: {{folder: '{tmp_path}'}}}}"
    with running(recipe, waits) as server:
        events: list[Any] = []
        stream = threading.Thread(target=lambda: events.extend(server.rollouts("a/0")))
        stream.start()

        async def update() -> None:
            client = client_of(server)
            while not (tmp_path / "waiting").exists():
                assert stream.is_alive()
                await asyncio.sleep(0.01)
            await client.load_weights(1, weights_of(7))
            (tmp_path / "go").touch()
            await client.close()

        asyncio.run(update())
        stream.join()
    (segment,) = events[0]["trajectory"]["segments"]
    versions = [(turn, version) for turn, version in zip(segment["turn"], segment["version"], strict=True) if turn >= 0]
    assert set(versions) == {(0, 0), (1, 1)}


def test_cancelling_a_runner_ends_the_conversation_on_the_server(recipe: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = f"environment={{use: '{PLACES}:waits', arguments: {{seconds: 60, log: '{log}'}}}}"
    group = new_group(Row(id="a", messages=[{"role": "user", "content": "?"}]), size=1, seed=0)
    with running(recipe, arguments) as server:

        async def cancel() -> None:
            client = client_of(server)
            work = asyncio.create_task(client.run(group.trajectories, Sampling()))
            while not log.exists():
                await asyncio.sleep(0.02)
            work.cancel()
            await asyncio.wait([work])
            await client.close()

        asyncio.run(cancel())
        deadline = time.monotonic() + 20
        while "closed" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert log.read_text().split() == ["waiting", "closed"]


def test_the_time_limit_is_that_of_the_recipe(recipe: Path, server: Running) -> None:
    """A server that answers nothing counts as lost after rollout_server.timeout."""
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config, _ = load(recipe, [f"rollout_server.url={url}", "rollout_server.timeout=0.5"])
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"gave no answer within 0\.5 s"):
            assemble(config)
        assert time.monotonic() - began < 30


# Images over the rollout server: rows, images of the environment, the tensors that are trained on, and what is
# refused.


@pytest.fixture(scope="module")
def images_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_recipe(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def images_server(images_recipe: Path) -> Iterator[Running]:
    with running(images_recipe) as server:
        yield server


def images_trained(recipe: Path, out: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[Any], str]:
    """The trajectories, the losses and the ratios, and the fingerprint of the weights at the end."""
    lines, metrics, run = train_run(recipe, out, *overrides)
    for line in lines:
        for timed in (line, *line["turns"]):
            for name in ("seconds", "started"):
                timed.pop(name, None)
    return lines, [(line.get("loss"), line.get("ratio/max_deviation")) for line in metrics], run.learner.fingerprint()


@pytest.mark.slow
def test_a_run_with_images_is_the_run_in_one_process(images_recipe: Path, tmp_path: Path) -> None:
    """The same tokens, record, losses and weights: so the trainer has the pixels that the server's model has seen."""
    options = ["deterministic=true", "correction.action=null"]
    alone = images_trained(images_recipe, tmp_path / "alone", *options)
    with running(images_recipe, "deterministic=true") as server:
        together = images_trained(images_recipe, tmp_path / "together", *options, f"rollout_server.url={server.url}")
    assert together == alone
    media = [len(segment["media"]) for line in together[0] for segment in line["segments"]]
    assert len(together[0]) == 8
    assert set(media) == {1, 2}  # a turn that was cut off ends the conversation before the image of the environment
    pictures = {file.name for file in (tmp_path / "together" / "media").iterdir()}
    assert pictures == {file.name for file in (tmp_path / "alone" / "media").iterdir()}
    assert all(ratio is None or ratio < 1e-3 for _, ratio in together[1])


def test_every_form_of_an_image_has_its_pixels_and_tensors_at_the_client(
    images_recipe: Path, images_server: Running
) -> None:
    """Against the processor of transformers on the original image."""
    config = load(images_recipe)[0]
    renderer = assembly.renderer(config)
    assert renderer.vision is not None
    original = picture(24, 16, seed=7)
    file = images_recipe.parent / "original.png"
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
    client = client_of(images_server, vision=renderer.vision)
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
    images_server: Running, image: str, images: dict[str, str], reason: str
) -> None:
    messages = [{"role": "user", "content": [image_part(image), text_part("?")]}]
    body = {"conversations": [{"id": "a", "row": {"id": "0", "messages": messages}}], "images": images}
    status, answer = images_server.ask("POST", "/rollouts", body)
    assert (status, reason in answer["error"]) == (400, True), answer


def test_a_broken_image_fails_its_conversation_only(images_server: Running) -> None:
    def asked(id: str, name: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": [image_part(f"sha256:{name * 64}"), text_part("?")]}]
        return {"id": id, "row": {"id": "0", "messages": messages}}

    stream = io.BytesIO()
    picture().save(stream, "PNG")
    images = {"a" * 64: base64.b64encode(b"no image").decode(), "b" * 64: base64.b64encode(stream.getvalue()).decode()}
    body = {"conversations": [asked("broken", "a"), asked("good", "b")], "images": images}
    _, text, _ = images_server.request("POST", "/rollouts", body)
    events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
    errors = {event["trajectory"]["id"]: event["trajectory"]["error"] for event in events}
    assert errors["good"] is None
    assert "cannot be read as an image" in errors["broken"]["message"]


def test_another_image_processor_and_rows_that_cannot_be_sent_are_refused(
    images_recipe: Path, images_server: Running
) -> None:
    with pytest.raises(ConfigError, match="has another image processor"):
        asyncio.run(client_of(images_server).check())  # as a text model has none
    url = f"rollout_server.url={images_server.url}"
    with pytest.raises(ConfigError, match=r"data\.return_multi_modal_inputs=true has no effect with rollout_server"):
        assemble(load(images_recipe, [url, "data.return_multi_modal_inputs=true"])[0])


@pytest.fixture(scope="module")
def theirs() -> Iterator[Swift]:
    pytest.importorskip("requests")
    with swift() as names:
        yield names


@pytest.mark.parametrize("kind", ["bytes", "path"])
def test_ms_swifts_client_sends_and_receives_images(
    theirs: Swift, images_server: Running, images_recipe: Path, kind: str
) -> None:
    file = images_recipe.parent / "0.png"
    image = {"bytes": file.read_bytes(), "path": None} if kind == "bytes" else {"bytes": None, "path": str(file)}
    row = {"messages": [{"role": "user", "content": "<image>What is it?"}], "images": [image]}
    sample = theirs.data.GRPOSample.from_row(row)
    sample.request_id = "5"
    client = theirs.client(
        base_urls=[f"http://any:{TOKEN}@{images_server.host}:{images_server.port}"], connection_timeout=5
    )
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


def test_ms_swifts_images_that_cannot_be_read_are_refused(images_server: Running) -> None:
    for images, reason in (
        (["/no/such.png"], "must be base64, or the path of a file"),
        ([base64.b64encode(b"text").decode()], "cannot be read as an image"),
        (["http://a/b.png"], "not downloaded"),
    ):
        request = {"messages": [{"role": "user", "content": "<image>?"}], "images": images}
        status, answer = images_server.ask("POST", "/infer/", {"infer_requests": [request]})
        assert (status, reason in answer["error"]) == (400, True), answer


@pytest.mark.slow
def test_a_server_process_trains_a_vision_model(images_recipe: Path, tmp_path: Path) -> None:
    """Two processes; the server's knows neither the files of the rows nor the trainer's memory."""
    environment = {**os.environ, "TURNWISE_SERVER_TOKEN": TOKEN}
    with Forked(["serve", str(images_recipe), "--port", "0"], env=environment) as server:
        assert server.stdout is not None
        found = next(match for line in server.stdout if (match := re.search(r" at (http://\S+) ", line)))
        words = ["train", str(images_recipe), f"rollout_server.url={found.group(1)}", f"output={tmp_path / 'run'}"]
        try:
            trainer = Forked(words, env=environment)
            printed, _ = trainer.communicate(timeout=300)
            assert trainer.returncode == 0, printed
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 143
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [None] * 8
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["ratio/max_deviation"] < 1e-3 for line in metrics if "loss" in line] == [True] * 2
