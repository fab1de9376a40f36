"""The rollout server: what it answers, whom it refuses, and its process."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.forked import Forked
from support.recipes import save_recipe
from support.rollout_servers import Running, client_of, conversation, running
from support.tiny import save_model
from turnwise import assembly
from turnwise.commands import serve
from turnwise.compat.swift.convert import from_rollout_arguments
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.record.trajectory_json import decode_trajectory
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Row, Sampling

# The rollout server: conversations over HTTP, its token, its queue, and clients that go away.


PLACES = Path(__file__).parent.parent / "support" / "places.py"


@pytest.fixture(scope="module")
def recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_recipe(tmp_path_factory.mktemp("recipe"), model, limits={"turns": 2, "tokens_per_turn": 6})


@pytest.fixture(scope="module")
def server(recipe: Path) -> Iterator[Running]:
    with running(recipe) as server:
        yield server


def test_conversations_come_back_as_records_with_their_tokens(server: Running) -> None:
    events = server.rollouts("a/0", "a/1", "b/0")
    assert sorted(event["trajectory"]["id"] for event in events) == ["a/0", "a/1", "b/0"]
    for event in events:
        trajectory = decode_trajectory(event["trajectory"], where="the answer")
        assert len(trajectory.turns) == 2 or trajectory.stop == "length"
        assert [message["role"] for message in trajectory.messages[:2]] == ["user", "assistant"]
        (segment,) = trajectory.segments
        assert set(segment.turn) == {-1, *range(len(trajectory.turns))}
        assert {version for version, turn in zip(segment.version, segment.turn, strict=True) if turn >= 0} == {0}
        assert len(event["completions"]) == len(trajectory.turns)


def test_equal_seeds_give_equal_tokens(server: Running) -> None:
    first, second = server.rollouts("a/0"), server.rollouts("a/0")
    assert first[0]["trajectory"]["segments"] == second[0]["trajectory"]["segments"]


def test_without_the_token_only_health_answers(server: Running) -> None:
    assert server.ask("GET", "/health", Authorization="")[0] == 200
    for method, path in (
        ("GET", "/info"),
        ("GET", "/metrics"),
        ("POST", "/rollouts"),
        ("GET", "/docs"),
        ("POST", "/lease"),
    ):
        for header in ("", "Bearer swordfisch", "swordfish"):
            status, answer = server.ask(method, path, Authorization=header)
            assert status == 401, path
            assert "Authorization: Bearer <token>" in answer["error"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"\xff", 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        ([], 400, "the body is not a RolloutBody"),
        ({"conversations": []}, 400, "conversations: List should have at least 1 item"),
        ({"conversations": [{"id": "a"}]}, 400, "conversations.0.row: Field required"),
        ({"conversations": [conversation("a")], "temperature": 1}, 400, "temperature: Extra inputs are not permitted"),
        ({"conversations": [conversation("a")], "sampling": {"top_p": 2}}, 400, "sampling.top_p: Input should be less"),
        ({"conversations": [conversation("a"), conversation("a")]}, 400, "the same id"),
        ({"conversations": [conversation("a")], "least_version": 7}, 409, "the weights of the server have version 0"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_with_the_reason(server: Running, body: object, status: int, reason: str) -> None:
    got, answer = server.ask("POST", "/rollouts", body)
    assert got == status
    assert reason in answer["error"]
    assert len(server.rollouts("a/0")) == 1  # the server goes on


def test_a_huge_body_is_refused_before_it_is_read(server: Running) -> None:
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(
            f"POST /rollouts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
        )
        answer = connection.recv(1000).decode()
    assert answer.startswith("HTTP/1.1 413")
    assert server.ask("GET", "/health")[0] == 200


def test_a_web_page_cannot_ask_by_itself(server: Running) -> None:
    assert server.ask("POST", "/rollouts", {"conversations": []}, Content_Type="text/plain")[0] == 415


def test_unknown_paths_name_the_description(server: Running) -> None:
    status, answer = server.ask("GET", "/etc/passwd")
    assert (status, answer["error"]) == (404, "there is no GET /etc/passwd: see /docs")


def test_the_description_has_every_route(server: Running) -> None:
    status, document = server.ask("GET", "/openapi.json")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    status, page, _ = server.request("GET", "/docs")
    assert status == 200
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in page.decode()
            answer, _ = server.ask(method.upper(), path, Authorization="")
            assert answer == (200 if path == "/health" else 401), path  # the route exists
    references = json.dumps(document).count("#/components/schemas/")
    assert references > 5
    assert {"RolloutBody", "LeaseBody", "WeightsPathBody", "ConversationBody"} <= set(document["components"]["schemas"])


def test_metrics_are_in_prometheus_format(server: Running) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def values() -> dict[str, float]:
        text = server.request("GET", "/metrics")[1].decode()
        return {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = values()
    tokens = sum(
        turn >= 0
        for event in server.rollouts("m/0", "m/1")
        for segment in event["trajectory"]["segments"]
        for turn in segment["turn"]
    )
    after = values()
    assert after["turnwise_sampled_tokens_total"] - before["turnwise_sampled_tokens_total"] == tokens
    assert after["turnwise_conversation_seconds_count"] - before["turnwise_conversation_seconds_count"] == 2
    assert after["turnwise_conversations_running"] == after["turnwise_conversations_waiting"] == 0
    assert after["turnwise_weights_version"] == 0


def test_a_full_queue_refuses_with_retry_after_and_the_client_waits(recipe: Path) -> None:
    with running(recipe, "max_concurrent=1", f"environment={PLACES}:waits", queue=1) as server:
        streams = [threading.Thread(target=server.rollouts, args=(f"a/{n}",)) for n in range(2)]
        for stream in streams:
            stream.start()
        while server.ask("GET", "/health")[1]["waiting"] == 0:
            time.sleep(0.02)
        status, text, headers = server.request("POST", "/rollouts", {"conversations": [conversation("b/0")]})
        assert status == 503
        assert headers["retry-after"] == "1"
        assert "the queue is full: 2 conversations run or wait, and at most 2 are taken" in text.decode()
        status, text, _ = server.request(
            "POST", "/rollouts", {"conversations": [conversation(f"b/{n}") for n in range(3)]}
        )
        assert status == 413
        group = new_group(Row(id="c", messages=[{"role": "user", "content": "?"}]), size=3, seed=0)

        async def wait_for_room() -> None:
            client = client_of(server)
            await client.start()
            await asyncio.gather(*(client.run([trajectory], Sampling()) for trajectory in group.trajectories))
            await client.close()

        asyncio.run(wait_for_room())
        assert [trajectory.error for trajectory in group.trajectories] == [None] * 3
        for stream in streams:
            stream.join()


def test_health_answers_while_the_code_of_an_environment_blocks(recipe: Path) -> None:
    with running(recipe, f"environment={PLACES}:blocks") as server:
        stream = threading.Thread(target=server.rollouts, args=("a/0",))
        stream.start()
        began = time.monotonic()
        answers = 0
        while stream.is_alive():
            status, answer = server.ask("GET", "/health")
            assert status == 200
            answers += answer["running"]
            time.sleep(0.02)
        assert answers > 5
        assert time.monotonic() - began > 1.0  # places.blocks blocks for a second
        stream.join()


def test_a_client_that_disconnects_ends_its_conversations(recipe: Path, tmp_path: Path) -> None:
    log = tmp_path / "closed"
    arguments = f"environment={{use: '{PLACES}:waits', arguments: {{seconds: 60, log: '{log}'}}}}"
    with running(recipe, arguments) as server:
        body = json.dumps({"conversations": [conversation("a/0"), conversation("a/1")]}).encode()
        with socket.create_connection((server.host, server.port), timeout=20) as connection:
            connection.sendall(
                f"POST /rollouts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            while server.ask("GET", "/health")[1]["running"] < 2:
                time.sleep(0.02)
            while not log.exists() or log.read_text().count("waiting") < 2:
                time.sleep(0.02)
        deadline = time.monotonic() + 20
        while server.ask("GET", "/health")[1]["running"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.ask("GET", "/health")[1]["running"] == 0
        assert sorted(log.read_text().split()) == ["closed", "closed", "waiting", "waiting"]
        assert "turnwise_conversations_cancelled_total 2.0" in server.request("GET", "/metrics")[1].decode()


def test_trajectories_are_streamed_as_they_finish_and_clients_do_not_share_ids(recipe: Path) -> None:
    """Two clients use the same ids. Each receives its own conversations, and the first one before the last has begun."""
    with running(recipe, "max_concurrent=2", f"environment={PLACES}:waits") as server:
        arrived: dict[str, list[tuple[float, str, str]]] = {}

        async def client(name: str) -> None:
            client = client_of(server)
            await client.start()
            body = {"conversations": [conversation(f"a/{n}", f"{name} {n}?") for n in range(4)]}
            async for event in client._server.events("/rollouts", body):
                trajectory = event["trajectory"]
                arrived.setdefault(name, []).append(
                    (time.monotonic(), trajectory["id"], trajectory["messages"][0]["content"])
                )
            await client.close()

        async def both() -> None:
            await asyncio.gather(client("x"), client("y"))

        asyncio.run(both())
        for name, events in arrived.items():
            assert sorted((id, text) for _, id, text in events) == [(f"a/{n}", f"{name} {n}?") for n in range(4)]
        times = sorted(moment for events in arrived.values() for moment, _, _ in events)
        assert times[-1] - times[0] > 3 * 0.3  # two at a time, each waits for 0.3 s: the last is three rounds later
        assert server.ask("GET", "/health")[1] == {"status": "ok", "version": 0, "running": 0, "waiting": 0}


def test_a_failing_conversation_leaves_its_siblings_alone(recipe: Path) -> None:
    with running(recipe, f"environment={PLACES}:raises_now_and_then") as server:
        events = {event["trajectory"]["id"]: event["trajectory"] for event in server.rollouts("0/0", "1/0", "2/0")}
    assert events["1/0"]["error"]["kind"] == "environment"
    assert "row 1 does not suit me" in events["1/0"]["error"]["message"]
    assert events["0/0"]["error"] is events["2/0"]["error"] is None


def test_the_client_fills_the_trajectories_of_the_loop(server: Running) -> None:
    """The same conversations in this process and on the server."""
    rows = [Row(id=str(n), messages=[{"role": "user", "content": f"{n}+1?"}], fields={"answer": n}) for n in range(3)]
    here, there = ([new_group(row, size=2, seed=5) for row in rows] for _ in range(2))

    async def both() -> None:
        renderer = assembly.renderer(server.config)
        environments = assembly.environment_factory(server.config, encode=renderer.encode)
        engine = assembly.engine(server.config, renderer, assembly.engine_model(server.config))
        context = assembly.rollout_context(server.config, renderer, engine, environments, longest=1024)
        await rollout_groups(here, context)
        client = client_of(server)
        await client.start()
        await rollout_groups(there, replace(context, make_runner=client.make_runner))
        await client.close()

    asyncio.run(both())
    for local, remote in zip(
        *([t for group in groups for t in group.trajectories] for groups in (here, there)), strict=True
    ):
        assert (remote.id, remote.row, remote.error) == (local.id, local.row, None)
        assert (remote.messages, remote.stop, remote.logprob_kind) == (local.messages, local.stop, local.logprob_kind)
        for mine, theirs in zip(local.segments, remote.segments, strict=True):
            assert (theirs.token_ids, theirs.turn, theirs.version) == (mine.token_ids, mine.turn, mine.version)
            assert theirs.logprobs.tolist() == pytest.approx(mine.logprobs.tolist(), abs=1e-5)
        for mine, theirs in zip(local.turns, remote.turns, strict=True):
            assert theirs.rewards == mine.rewards
            assert mine.completion is not None
            assert theirs.completion is not None
            assert list(theirs.completion.token_ids) == list(mine.completion.token_ids)
            assert theirs.completion.finish_reason == mine.completion.finish_reason
            assert theirs.message_index is not None
            assert theirs.message is remote.messages[theirs.message_index]


def test_a_server_for_other_machines_needs_a_token(recipe: Path) -> None:
    from turnwise.rollout_server.server import token_for

    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(
            ConfigError, match=r"set the environment variable TURNWISE_SERVER_TOKEN, or use --host 127\.0\.0\.1"
        ):
            token_for(host, None)
        assert token_for(host, "swordfish") == "swordfish"
    for host in ("127.0.0.1", "localhost", "::1"):
        assert len(token_for(host, None)) > 20
        assert token_for(host, None) != token_for(host, None)
    with pytest.raises(ConfigError, match="printable ASCII"):
        token_for("localhost", "a b")


def test_a_port_in_use_is_refused(server: Running, recipe: Path) -> None:
    with (
        pytest.raises(ConfigError, match=f"cannot listen on port {server.port} .*; give another --port"),
        running(recipe, port=server.port),
    ):
        pass


def test_scripted_texts_cannot_be_served(recipe: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('["Hi."]\n', encoding="utf-8")
    with (
        pytest.raises(ConfigError, match=r"engine\.name=scripted cannot be served"),
        running(recipe, "engine.name=scripted", f"engine.script={script}"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"rollout_server\.url=http://x is for the trainer"),
        running(recipe, "rollout_server.url=http://x"),
    ):
        pass


# `turnwise serve` as a process of its own, and `turnwise train` that uses it.


SWIFT = (
    "--model demo/model --use_async_engine true --multi_turn_scheduler thinking_tips_scheduler --vllm_max_model_len 512 "
    "--vllm_gpu_memory_utilization 0.8 --vllm_tensor_parallel_size 1 --vllm_data_parallel_size 1 --max_turns 3 "
    "--host 0.0.0.0 --port 8123"
)


def test_the_arguments_of_swift_rollout_make_a_recipe() -> None:
    report, address = from_rollout_arguments(SWIFT.split())
    assert address == {"host": "0.0.0.0", "port": 8123}
    assert report.refused() == []
    config = checked(report.recipe, source="the arguments")
    assert config.environment.arguments == {"name": "thinking_tips_scheduler", "max_turns": 3}
    engine: Any = config.engine
    assert (engine.name, engine.arguments) == ("vllm", ["--gpu-memory-utilization", "0.8"])
    assert (config.limits.turns, config.limits.context, config.model.lora.rank) == (3, 512, None)


def test_options_of_the_recipe_come_before_the_arguments_of_swift_rollout() -> None:
    options = argparse.Namespace(
        recipe="engine.python=/env/python",
        overrides=["model.device=cpu", *SWIFT.split()],
        multi_turn_scheduler=None,
        external_plugins=[],
        max_turns=None,
    )
    config, _, given = serve._from_swift(options)
    engine: Any = config.engine
    assert (engine.name, engine.python, engine.arguments) == (
        "vllm",
        "/env/python",
        ["--gpu-memory-utilization", "0.8"],
    )
    assert (config.model.device, given["port"]) == ("cpu", 8123)


@pytest.mark.slow
def test_a_server_process_serves_a_training_process(tmp_path: Path) -> None:
    recipe = save_recipe(
        tmp_path,
        save_model(tmp_path / "model"),
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
    )
    environment = {name: value for name, value in os.environ.items() if name != "TURNWISE_SERVER_TOKEN"}
    with Forked(["serve", str(recipe), "--port", "0"], env=environment) as server:
        assert server.stdout is not None
        url = token = ""
        for line in server.stdout:
            url = match.group(1) if (match := re.search(r" at (http://\S+) ", line)) else url
            token = match.group(1) if (match := re.search(r"^token: (\S+)", line)) else token
            if "to train with it" in line:
                break
        words = ["train", str(recipe), f"rollout_server.url={url}"]
        try:
            trainer = Forked(words, env={**environment, "TURNWISE_SERVER_TOKEN": token})
            printed, _ = trainer.communicate(timeout=300)
            assert trainer.returncode == 0, printed
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 143
    lines = (tmp_path / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["error"] for line in lines] == [None] * 8
