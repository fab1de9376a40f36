"""Sends conversations to tracing systems: traces.jsonl, mlflow, weave, OpenTelemetry.

Each tracer receives the spans of the first conversations of a step: the conversation, its turns, and in each turn the engine's
call and the tool calls. Spans are made from the finished trajectory, which has all times; nothing is measured for them during
the conversation. Each tracer wraps the library of its system.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turnwise.loggers.logger import Logger, start_or_wait, starting
from turnwise.loggers.trackers import text
from turnwise.record.metrics import reward_parts
from turnwise.types import Trajectory, Turn

# spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of time, with the pieces inside it."""

    name: str
    kind: str
    """`conversation`, `turn`, `engine`, `environment` or `tool`."""
    start: float
    """Unix seconds."""
    end: float
    inputs: Any = None
    outputs: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    children: tuple[Span, ...] = ()


def spans_of(trajectory: Trajectory) -> Span | None:
    """The spans of a conversation; None if its times are unknown."""
    if trajectory.started is None:
        return None
    children = tuple(span for turn in trajectory.turns if (span := _turn(turn)) is not None)
    end = max([trajectory.started + trajectory.seconds, *(span.end for span in children)])
    return Span(
        name=trajectory.id,
        kind="conversation",
        start=trajectory.started,
        end=end,
        inputs=trajectory.messages[: trajectory.turns[0].message_index] if trajectory.turns else [],
        outputs=text(trajectory),
        attributes={
            "group": trajectory.group,
            "row": trajectory.row.id,
            "reward": trajectory.reward,
            "stop": str(trajectory.stop),
            **{f"rewards.{name}": value for name, value in reward_parts(trajectory).items()},
        },
        error=None if trajectory.error is None else f"{trajectory.error.kind}: {trajectory.error.message}",
        children=children,
    )


def _turn(turn: Turn) -> Span | None:
    if turn.started is None or turn.ended is None:
        return None
    answered = turn.started + turn.seconds_engine
    tokens = None if turn.completion is None else len(turn.completion.token_ids)
    engine = Span(
        name="generate",
        kind="engine",
        start=turn.started,
        end=answered,
        outputs=turn.text,
        attributes={"finish_reason": turn.finish_reason, **({} if tokens is None else {"sampled_tokens": tokens})},
    )
    tools = tuple(_tools(turn, answered))
    end = max([turn.ended, *(tool.end for tool in tools)])
    environment = Span(name="environment", kind="environment", start=answered, end=end, children=tools)
    return Span(
        name=f"turn {turn.index}",
        kind="turn",
        start=turn.started,
        end=end,
        outputs=turn.message,
        attributes={"reward": turn.reward, "weight": turn.weight},
        children=(engine, environment),
    )


def _tools(turn: Turn, start: float) -> Iterator[Span]:
    """The tool calls of a turn. They run at the same time; only their duration is recorded."""
    for outcome in turn.outcomes:
        yield Span(
            name=outcome.name,
            kind="tool",
            start=start,
            end=start + outcome.seconds,
            inputs=dict(outcome.arguments),
            outputs=outcome.content,
            attributes={"attempts": outcome.attempts, "reward": outcome.reward},
            error=outcome.error,
        )


# tracing systems


def start_tracer(backend: str, *, conversations: int, project: str, directory: Path) -> Logger:
    """Start a tracing system. If its service cannot be reached, it is started later in the run.

    Raises ConfigError if its library is not installed, or if it does not start for another reason.
    """
    name = f"trace.backend={backend}"

    def started() -> Logger:
        with starting(name, extra=backend):
            return _Tracer(backend, conversations, *_BACKENDS[backend](project, directory))

    return start_or_wait(name, conversations, started)


_Export = Callable[[int, Span], None]
_Close = Callable[[], None]


class _Tracer:
    """Exports the spans of each step."""

    def __init__(self, backend: str, conversations: int, export: _Export, close: _Close) -> None:
        self.name = f"trace.backend={backend}"
        self.conversations = conversations
        self._export, self._close = export, close

    def step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            if (span := spans_of(trajectory)) is not None:
                self._export(step, span)

    def evaluation(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        """Evaluations are not traced."""

    def close(self) -> None:
        self._close()


def _jsonl(project: str, directory: Path) -> tuple[_Export, _Close]:
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / "traces.jsonl").open("a", encoding="utf-8")

    def export(step: int, span: Span) -> None:
        file.write(json.dumps({"step": step, **_plain(span)}, default=str) + "\n")
        file.flush()

    return export, file.close


def _plain(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "kind": span.kind,
        "start": round(span.start, 4),
        "end": round(span.end, 4),
        "inputs": span.inputs,
        "outputs": span.outputs,
        "attributes": dict(span.attributes),
        "error": span.error,
        "children": [_plain(child) for child in span.children],
    }


def _mlflow(project: str, directory: Path) -> tuple[_Export, _Close]:
    mlflow: Any = importlib.import_module("mlflow")
    experiment = mlflow.get_experiment_by_name(project)
    number = mlflow.create_experiment(project) if experiment is None else experiment.experiment_id

    def write(step: int, span: Span, parent: Any) -> None:
        live = mlflow.start_span_no_context(
            span.name,
            span_type={"tool": "TOOL", "engine": "LLM", "conversation": "AGENT"}.get(span.kind, "CHAIN"),
            parent_span=parent,
            inputs=span.inputs,
            attributes={"step": step, **span.attributes},
            experiment_id=None if parent is not None else number,
            start_time_ns=_nanoseconds(span.start),
        )
        for child in span.children:
            write(step, child, live)
        live.set_outputs(span.outputs)
        if span.error is not None:
            live.set_status("ERROR")
            live.set_attribute("error", span.error)
        live.end(end_time_ns=_nanoseconds(span.end))

    return lambda step, span: write(step, span, None), mlflow.flush_trace_async_logging


def _weave(project: str, directory: Path) -> tuple[_Export, _Close]:
    weave: Any = importlib.import_module("weave")
    client = weave.init(project)

    def write(step: int, span: Span, parent: Any) -> None:
        call = client.create_call(
            span.kind,
            {"inputs": span.inputs, "step": step, **span.attributes},
            parent,
            display_name=span.name,
            use_stack=False,
            started_at=datetime.fromtimestamp(span.start, UTC),
        )
        for child in span.children:
            write(step, child, call)
        error = None if span.error is None else RuntimeError(span.error)
        client.finish_call(call, span.outputs, error, ended_at=datetime.fromtimestamp(span.end, UTC))

    return lambda step, span: write(step, span, None), client.finish


def _otlp(project: str, directory: Path) -> tuple[_Export, _Close]:
    trace: Any = importlib.import_module("opentelemetry.trace")
    sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
    batch: Any = importlib.import_module("opentelemetry.sdk.trace.export")
    resources: Any = importlib.import_module("opentelemetry.sdk.resources")
    exporter: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": project}))
    provider.add_span_processor(batch.BatchSpanProcessor(exporter.OTLPSpanExporter()))
    tracer = provider.get_tracer("turnwise")

    def write(step: int, span: Span, context: Any) -> None:
        texts = {"inputs": span.inputs, "outputs": span.outputs, "error": span.error}
        attributes = {
            "turnwise.kind": span.kind,
            "turnwise.step": step,
            **{f"turnwise.{name}": value for name, value in span.attributes.items() if value is not None},
            **{f"turnwise.{name}": _short(value) for name, value in texts.items() if value is not None},
        }
        live = tracer.start_span(span.name, context=context, attributes=attributes, start_time=_nanoseconds(span.start))
        inside = trace.set_span_in_context(live)
        for child in span.children:
            write(step, child, inside)
        if span.error is not None:
            live.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        live.end(end_time=_nanoseconds(span.end))

    return lambda step, span: write(step, span, None), provider.shutdown


def _short(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:10_000]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


_BACKENDS: Mapping[str, Callable[[str, Path], tuple[_Export, _Close]]] = {
    "jsonl": _jsonl,
    "mlflow": _mlflow,
    "weave": _weave,
    "otlp": _otlp,
}
