"""Experiment trackers get what a run measures; Weave gets its conversations."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.recipes import save_recipe
from support.tiny import save_model
from turnwise.config.recipe import load
from turnwise.errors import ConfigError
from turnwise.loggers.logger import Loggers, RestartingLogger, start_or_wait, starting
from turnwise.loggers.tracers import spans_of, start_tracer
from turnwise.loggers.trackers import Start, start_tracker
from turnwise.options.schema import Config
from turnwise.record.reader import read, read_lines
from turnwise.runs import run_state
from turnwise.types import Failure, Row, Stop, ToolOutcome, Trajectory, Turn
from turnwise.user_code import references

# Experiment trackers and traces: the real libraries, offline, read back with their own readers.


LINE = {"step": 3, "reward/mean": 0.5, "rewards/a b/mean": 0.25, "kl": None}


def a_trajectory(number: int = 0) -> Trajectory:
    row = Row(id=str(number), messages=[{"role": "user", "content": "2+2?"}])
    trajectory = Trajectory(id=f"3.0:{number}/0", group="g", row=row, step=3, reward=0.5, stop=Stop.DONE)
    outcome = ToolOutcome(id="c", name="add", arguments={"a": 2}, content="4", seconds=0.25, error="raised")
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    first = {"role": "assistant", "content": "", "tool_calls": [call]}
    last = {"role": "assistant", "content": "#### 4"}
    trajectory.messages = [*row.messages, first, {"role": "tool", "content": "4"}, last]
    times: dict[str, Any] = {"seconds_engine": 1.0, "seconds_environment": 0.5}
    trajectory.turns = [
        Turn(index=0, message=first, text="add", message_index=1, outcomes=(outcome,), started=100.0, **times),
        Turn(index=1, message=last, text="#### 4", message_index=3, started=101.5, reward=0.5, **times),
    ]
    trajectory.started, trajectory.seconds = 99.5, 4.0
    return trajectory


def start(directory: Path, **changes: Any) -> Start:
    options: dict[str, Any] = {
        "project": "p", "run": "r", "conversations": 1, "arguments": {}, "directory": directory,
        "options": {"train": {"lr": 0.1}}, "step": 0,
    }  # fmt: skip
    return Start(**{**options, **changes})


def send(tracker: Any) -> None:
    loggers = Loggers([tracker])
    loggers.step(LINE, [a_trajectory(0), a_trajectory(1)])
    loggers.evaluation({"step": 3, "reward/mean": 0.75}, [a_trajectory(2)])
    loggers.close()


def scalars(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.filterwarnings("default")
def test_tensorboard(tmp_path: Path) -> None:
    send(start_tracker("tensorboard", start(tmp_path)))
    events = scalars(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval/reward/mean")] == [(3, 0.75)]
    assert "kl" not in events.Tags()["scalars"]
    texts = [tag for tag in events.Tags()["tensors"] if "conversations" in tag]
    assert sorted(texts) == ["conversations/0/text_summary", "eval/conversations/0/text_summary"]


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    send(start_tracker("wandb", start(tmp_path)))
    summary = capfd.readouterr().err  # wandb's own summary of the run
    assert re.search(r"^wandb:\s+reward/mean 0.5$", summary, re.MULTILINE)
    assert re.search(r"^wandb:\s+eval/reward/mean 0.75$", summary, re.MULTILINE)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/conversations_*.table.json")
    (values,) = json.loads(table.read_text())["data"]
    assert values[:5] == [3, "3.0:0/0", 0.5, "done", 2]
    first = json.loads((tmp_path / "loggers.json").read_text())["wandb"]
    start_tracker("wandb", start(tmp_path, step=3)).close()  # resumed: the same run
    assert json.loads((tmp_path / "loggers.json").read_text())["wandb"] == first


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow(tmp_path: Path) -> None:
    import mlflow

    arguments = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    try:
        mlflow.MlflowClient(**arguments).search_experiments()
    except Exception:
        arguments = {"tracking_uri": (tmp_path / "mlruns").as_uri()}
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    send(start_tracker("mlflow", start(tmp_path, arguments=arguments)))
    client = mlflow.MlflowClient(**arguments)
    experiment = client.get_experiment_by_name("p")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics == {"reward/mean": 0.5, "rewards/a b/mean": 0.25, "eval/reward/mean": 0.75}
    assert run.data.params == {"train.lr": "0.1"}
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [3]
    assert run.info.status == "FINISHED"


@pytest.mark.filterwarnings("default")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio.utils", reason="trackio is not installed: pip install trackio", exc_type=ImportError)
    import trackio.utils

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    send(start_tracker("trackio", start(tmp_path, project="turnwise-test")))
    found = []
    for file in [*(tmp_path / "trackio").rglob("*.db"), *Path(trackio.utils.TRACKIO_DIR).rglob("turnwise-test*.db")]:
        rows = sqlite3.connect(file).execute("SELECT step, metrics FROM metrics").fetchall()
        found += [(step, json.loads(metrics)) for step, metrics in rows]
    assert any(step == 3 and metrics.get("reward/mean") == 0.5 for step, metrics in found), found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_swanlab(tmp_path: Path) -> None:
    send(start_tracker("swanlab", start(tmp_path, arguments={"mode": "offline"})))
    assert [path for path in (tmp_path / "swanlab").rglob("*") if path.is_file()]


@pytest.mark.filterwarnings("default")
def test_the_options_reach_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Start] = []

    class Tracker:
        name, conversations = "wandb", 0

        def close(self) -> None:
            pass

    monkeypatch.setattr("turnwise.runs.run_state.start_tracker", lambda name, start: seen.append(start) or Tracker())
    from turnwise.runs.run_state import loggers

    uses = [
        {"name": "wandb", "project": "x", "run": "y", "conversations": 5, "arguments": {"tags": ["t"]}},
        "tensorboard",
    ]
    recipe = save_recipe(tmp_path, tmp_path, loggers=uses, output=str(tmp_path / "my-run"))
    loggers(load(recipe)[0], step=2).close()
    assert (seen[0].project, seen[0].run, seen[0].conversations, seen[0].arguments) == ("x", "y", 5, {"tags": ["t"]})
    assert (seen[1].project, seen[1].run, seen[1].conversations, seen[1].step) == ("turnwise", "my-run", 8, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run_with_tensorboard(tmp_path: Path) -> None:
    from turnwise.api import Recipe, train

    model = save_model(tmp_path / "model")
    options = {"steps": 2, "batch_size": 2, "group_size": 2}
    recipe = save_recipe(tmp_path, model, train=options, limits={"tokens_per_turn": 4}, loggers=["tensorboard"])
    result = train(Recipe.from_yaml(recipe), progress=False)
    values = [event.value for event in scalars(result.directory / "tensorboard").Scalars("reward/mean")]
    assert values == pytest.approx([line["reward/mean"] for line in result.metrics])


@pytest.mark.filterwarnings("default")
def test_traces_in_a_file(tmp_path: Path) -> None:
    from turnwise.api import Recipe, train

    model = save_model(tmp_path / "model")
    recipe = save_recipe(
        tmp_path, model, train={"steps": 2, "batch_size": 2, "group_size": 2}, limits={"tokens_per_turn": 4},
        trace={"backend": "jsonl", "conversations": 3},
    )  # fmt: skip
    result = train(Recipe.from_yaml(recipe), progress=False)
    traces = list(read_lines(result.directory / "traces.jsonl"))
    expected = [t for step in (1, 2) for t in read(result.directory) if t.step == step]
    assert [trace["name"] for trace in traces] == [t.id for t in [*expected[:3], *expected[4:7]]]
    assert [child["name"] for child in traces[0]["children"]] == [f"turn {n}" for n in range(len(expected[0].turns))]


@pytest.mark.filterwarnings("default")
def test_the_spans_of_a_conversation() -> None:
    span = spans_of(a_trajectory())
    assert span is not None
    assert (span.start, span.end, span.attributes["reward"]) == (99.5, 103.5, 0.5)
    turn = span.children[0]
    engine, environment = turn.children
    assert (engine.kind, engine.start, engine.end) == ("engine", 100.0, 101.0)
    assert (environment.start, environment.end) == (101.0, 101.5)
    (tool,) = environment.children
    assert (tool.name, tool.inputs, tool.outputs, tool.error) == ("add", {"a": 2}, "4", "raised")
    assert (tool.start, tool.end) == (101.0, 101.25)
    assert spans_of(Trajectory(id="x", group="g", row=Row(id="0", messages=[]))) is None
    failed = a_trajectory()
    failed.fail(Failure("environment", "no luck"))
    span = spans_of(failed)
    assert span is not None
    assert span.error == "environment: no luck"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.filterwarnings("default")
def test_spans_reach_an_opentelemetry_collector(tmp_path: Path, collector: list[bytes]) -> None:
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    send(start_tracer("otlp", conversations=2, project="my service", directory=tmp_path))
    spans, services = [], set()
    for body in collector:
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        for resource in request.resource_spans:
            services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert services == {"my service"}
    names = [span.name for span in spans]
    assert names.count("add") == 2
    assert names.count("turn 1") == 2
    (turn,) = {span.span_id for span in spans if span.name == "turn 0" and span.trace_id == spans[0].trace_id}
    engine = next(span for span in spans if span.name == "generate" and span.parent_span_id == turn)
    assert (engine.start_time_unix_nano, engine.end_time_unix_nano) == (100 * 10**9, 101 * 10**9)


@pytest.mark.filterwarnings("default")
def test_a_tracker_that_fails_costs_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name, conversations = "broken", 1

        def step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
            raise ConnectionError("no network")

        evaluation = step

        def close(self) -> None:
            raise OSError("still no network")

    with caplog.at_level(logging.WARNING):
        send(Broken())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "no network" in messages[0]
    assert "the run goes on" in messages[0]


@pytest.mark.filterwarnings("default")
def test_what_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'turnwise\[wandb\]'"):
        start_tracker("wandb", start(tmp_path))
    monkeypatch.setitem(sys.modules, "weave", None)
    with pytest.raises(ConfigError, match=r"pip install 'turnwise\[weave\]'"):
        start_tracer("weave", conversations=1, project="p", directory=tmp_path)
    with pytest.raises(ConfigError, match="could not be started"):
        start_tracker("tensorboard", start(tmp_path, arguments={"nonsense": 1}))
    with pytest.raises(ConfigError, match=r"loggers\.0\.name"):
        load(save_recipe(tmp_path, tmp_path, loggers=["comet"]))


def closed_port() -> str:
    """The address of a local port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.filterwarnings("default")
def test_a_service_that_is_down_at_the_start_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, "turnwise"):
        tracker = start_tracker("mlflow", start(tmp_path, arguments={"tracking_uri": closed_port()}))
        assert isinstance(tracker, RestartingLogger)
        tracker.pause = 0.0
        send(tracker)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("turnwise")]
    assert len(messages) == 1
    assert messages[0].startswith("the logger mlflow: its service cannot be reached: ")
    assert "The run goes on" in messages[0]


@pytest.mark.filterwarnings("default")
def test_a_service_that_comes_back_gets_the_metrics_of_earlier_steps(caplog: pytest.LogCaptureFixture) -> None:
    received: list[tuple[str, int, dict[str, float], int]] = []

    class Tracker:
        name, conversations = "tracker", 1

        def step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
            received.append(("step", step, dict(metrics), len(trajectories)))

        def evaluation(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
            received.append(("evaluation", step, dict(metrics), len(trajectories)))

        def close(self) -> None:
            received.append(("close", 0, {}, 0))

    down = True

    def begin() -> Any:
        with starting("the logger tracker", extra="mlflow"):
            if down:
                try:
                    raise ConnectionRefusedError("nobody listens")
                except ConnectionRefusedError as error:
                    raise ValueError("a library's own error") from error
            return Tracker()

    tracker = start_or_wait("tracker", 1, begin)
    assert isinstance(tracker, RestartingLogger)
    tracker.step(1, {"reward/mean": 0.1}, [])
    assert received == []
    tracker.pause = 0.0
    tracker.evaluation(1, {"reward/mean": 0.2}, [])
    down = False
    tracker.step(2, {"reward/mean": 0.3}, [a_trajectory()])
    tracker.close()
    assert received == [
        ("step", 1, {"reward/mean": 0.1}, 0), ("evaluation", 1, {"reward/mean": 0.2}, 0),
        ("step", 2, {"reward/mean": 0.3}, 1), ("close", 0, {}, 0),
    ]  # fmt: skip
    assert len(caplog.records) == 1


@pytest.mark.filterwarnings("default")
def test_messages_that_differ_in_an_address_only_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name, conversations = "broken", 1

        def step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
            raise ConnectionError(f"<HTTPConnection object at {id(metrics):#x}>: refused after {step} s")

        evaluation = step

        def close(self) -> None:
            pass

    send(Broken())
    assert len(caplog.records) == 1


@pytest.mark.filterwarnings("default")
def test_a_collector_that_is_down_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", closed_port())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    send(start_tracer("otlp", conversations=1, project="p", directory=tmp_path))
    # whether the exporter finds time for a second attempt, and warns of it, depends on its random pause
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1, errors


# Traces with the real weave library. A local server stands for its two services: wandb and the trace server.


weave_mark = pytest.mark.skipif(find_spec("weave") is None, reason="needs weave: pip install 'turnwise[weave]'")

PROGRAM = """
import sys
from pathlib import Path

sys.path[:0] = {path!r}
from test_loggers import send
from turnwise.loggers.tracers import start_tracer

send(start_tracer("weave", conversations=1, project="team/project", directory=Path({folder!r})))
"""


class Services(BaseHTTPRequestHandler):
    """Answers as wandb and the trace server do, as far as weave needs it."""

    protocol_version = "HTTP/1.1"
    calls: list[dict[str, Any]]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        value: dict[str, Any] = {"digest": "d"}
        if self.path == "/graphql":
            viewer = {"id": "1", "username": "me", "entity": "team", "defaultEntity": {"name": "team"}}
            value = {"data": {"viewer": viewer, "project": {"id": "1", "name": "project"}}}
        elif self.path == "/server_info":
            value = {"min_required_weave_python_version": "0.0.1", "trace_server_version": "99.0.0"}
        elif self.path.endswith("/calls/complete"):
            self.calls += json.loads(body)["batch"]
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def services() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    calls: list[dict[str, Any]] = []
    handler = type("Handler", (Services,), {"calls": calls})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", calls
    server.shutdown()
    server.server_close()


def traced(folder: Path, url: str) -> str:
    """Trace two conversations with weave in a process of its own, because weave changes the state of its process."""
    environment = {
        "WANDB_BASE_URL": url, "WF_TRACE_SERVER_URL": url, "WANDB_API_KEY": "a" * 40, "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
        "WANDB_ERROR_REPORTING": "false", "WEAVE_SENTRY_ENV": "off", "WEAVE_PRINT_CALL_LINK": "false",
    }  # fmt: skip
    program = PROGRAM.format(path=[str(Path(__file__).parent), *sys.path], folder=str(folder))
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
@weave_mark
def test_a_conversation_is_a_tree_of_calls(tmp_path: Path, services: tuple[str, list[dict[str, Any]]]) -> None:
    url, calls = services
    traced(tmp_path, url)
    (root,) = [call for call in calls if call["parent_id"] is None]
    assert root["op_name"].startswith("weave:///team/project/op/conversation")
    children = [call for call in calls if call["parent_id"] == root["id"]]
    assert sorted(call["display_name"] for call in children) == ["turn 0", "turn 1"]
    (turn,) = [call for call in children if call["display_name"] == "turn 0"]
    inside = {call["display_name"]: call for call in calls if call["parent_id"] == turn["id"]}
    assert set(inside) == {"generate", "environment"}
    engine = inside["generate"]
    (tool,) = [call for call in calls if call["parent_id"] == inside["environment"]["id"]]
    assert tool["display_name"] == "add"
    assert (engine["started_at"], engine["ended_at"]) == ("1970-01-01T00:01:40Z", "1970-01-01T00:01:41Z")
    assert engine["output"] == "add"
    assert tool["exception"] is not None  # the outcome has an error
    assert tool["inputs"]["step"] == 3
    assert {call["trace_id"] for call in calls} == {root["trace_id"]}


@pytest.mark.slow
@weave_mark
def test_a_trace_server_that_is_down_does_not_end_the_run(tmp_path: Path) -> None:
    text = traced(tmp_path, "http://127.0.0.1:9")
    assert text.count("trace.backend=weave: its service cannot be reached") == 1


def test_the_start_of_wandb_starts_weave_only_if_traces_go_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "restored")
    monkeypatch.delenv("WANDB_DISABLE_WEAVE")
    monkeypatch.setattr(run_state, "start_tracer", lambda *_, **__: None)

    def start_with(backend: str) -> str | None:
        tree = {
            "model": {"path": "m"},
            "data": {"train": "rows.jsonl"},
            "output": str(tmp_path),
            "trace": {"backend": backend},
        }
        run_state.loggers(Config.model_validate(tree), step=0)
        return os.environ.get("WANDB_DISABLE_WEAVE")

    assert start_with("weave") is None
    assert start_with("jsonl") == "true"


def test_messages_of_libraries_about_kernels_and_error_reports_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    assert references.LIVE  # whoever can import code of users has filtered them
    retry = "Retrying (%r) after connection broken by '%r': %s"
    urllib3, kernels = logging.getLogger("urllib3.connectionpool"), logging.getLogger("bitsandbytes.backends.cpu.ops")
    urllib3.warning(retry, 2, "HTTPSConnection(host='o151352.ingest.sentry.io', port=443)", "/api/1/envelope/")
    kernels.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "no module")
    assert caplog.messages == []
    urllib3.warning(retry, 2, "HTTPSConnection(host='my.judge', port=443)", "/v1")
    assert len(caplog.messages) == 1
