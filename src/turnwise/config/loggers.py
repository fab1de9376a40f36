"""The sections `loggers` and `trace` of a recipe: where metrics and conversations are sent, besides the run's directory."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from turnwise.config.section import NonEmpty, Positive, Section

__all__ = ["LoggerSection", "TraceSection"]


class LoggerSection(Section):
    """An experiment tracker that receives the metrics of the run. Instead of `{name: wandb}` you can write only `wandb`."""

    name: Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]
    """The tracker: `tensorboard`, `wandb`, `mlflow`, `trackio` or `swanlab`. Each needs the extra of its name, such as
    `pip install 'turnwise[wandb]'`."""
    project: NonEmpty | None = None
    """The project (mlflow: the experiment). Null: `turnwise`. Tensorboard has no projects: its files are in
    `<output>/tensorboard`."""
    run: NonEmpty | None = None
    """The name of the run. Null: the name of the directory `output`."""
    conversations: Annotated[int, Field(ge=0)] = 8
    """The number of conversations of each step and each evaluation that are sent, as a table where the tracker has tables. 0:
    none."""
    arguments: dict[str, Any] = {}
    """Further arguments of the tracker's own start function: `wandb.init`, `trackio.init`, `swanlab.init`,
    `MlflowClient` (such as `tracking_uri`), `SummaryWriter`."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class TraceSection(Section):
    """Traces: for sampled conversations, a tree of timed spans (turns, engine calls, tool calls) for a tracing system."""

    backend: Literal["jsonl", "mlflow", "weave", "otlp"] | None = None
    """The tracing system: `jsonl` (the file `traces.jsonl` of the run), `mlflow`, `weave`, or `otlp` (OpenTelemetry; the address
    is in the environment variable OTEL_EXPORTER_OTLP_ENDPOINT). Null: no traces."""
    conversations: Positive = 8
    """The number of conversations of each step that are traced: the first ones of the step."""
    project: NonEmpty | None = None
    """The project (mlflow: the experiment; otlp: the service's name). Null: `turnwise`."""
