"""Sends metrics, and conversations as rows of a table, to experiment trackers: tensorboard, wandb, mlflow, trackio, swanlab.

Each tracker wraps its own library. All of them get the metrics by the names of docs/metrics.md; the metrics of evaluations
have the prefix `eval/`. A resumed run continues the tracker's run: its id is in `loggers.json` of the run's directory.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.loggers.logger import Logger, start_or_wait, starting
from turnwise.types import Message, Trajectory

# conversations as rows

COLUMNS = ("step", "id", "reward", "stop", "turns", "conversation")
_MOST = 20_000  # characters of a conversation


def rows(step: int, trajectories: Sequence[Trajectory]) -> list[list[str | int | float | None]]:
    """A row with `COLUMNS` for each trajectory."""
    return [[step, t.id, t.reward, str(t.stop), len(t.turns), text(t)] for t in trajectories]


def text(trajectory: Trajectory) -> str:
    """A conversation as plain text: each message after its role."""
    parts = [f"[{message.get('role')}]\n{_content(message)}" for message in trajectory.messages]
    if trajectory.error is not None:
        parts.append(f"[error: {trajectory.error.kind}]\n{trajectory.error.message}")
    return "\n\n".join(parts)[:_MOST]


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", f"<{part.get('type')}>")) for part in content if isinstance(part, dict))
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join([*([str(content)] if content else []), *calls])


# trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a tracker starts."""

    project: str
    run: str
    conversations: int
    arguments: Mapping[str, Any]
    directory: Path
    """The directory of the run."""
    options: Mapping[str, Any]
    """The recipe as plain data."""
    step: int
    """The number of finished steps of a resumed run."""


def start_tracker(name: str, start: Start) -> Logger:
    """Start a tracker. If its service cannot be reached, the tracker is started later in the run.

    Raises ConfigError if its library is not installed, or if it does not start for another reason.
    """

    def started() -> Logger:
        with starting(f"the logger {name}", extra=name):
            return _TRACKERS[name](start)

    return start_or_wait(name, start.conversations, started)


class _Tracker:
    """What all trackers have in common. Subclasses send numbers and conversations."""

    name = ""

    def __init__(self, start: Start) -> None:
        self.conversations = start.conversations

    def step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        self._send(step, dict(metrics), trajectories, "conversations")

    def evaluation(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        named = {f"eval/{name}": value for name, value in metrics.items()}
        self._send(step, named, trajectories, "eval/conversations")

    def close(self) -> None:
        raise NotImplementedError

    def _send(self, step: int, metrics: dict[str, float], trajectories: Sequence[Trajectory], table: str) -> None:
        raise NotImplementedError


class _Tensorboard(_Tracker):
    name = "tensorboard"

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        module = importlib.import_module("torch.utils.tensorboard")
        arguments = {"log_dir": str(start.directory / "tensorboard"), "purge_step": start.step + 1, **start.arguments}
        self._writer: Any = module.SummaryWriter(**arguments)

    def _send(self, step: int, metrics: dict[str, float], trajectories: Sequence[Trajectory], table: str) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for place, trajectory in enumerate(trajectories):  # indented: tensorboard shows texts as Markdown
            indented = "    " + text(trajectory).replace("\n", "\n    ")
            self._writer.add_text(f"{table}/{place}", f"reward {trajectory.reward}\n\n{indented}", step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb(_Tracker):
    name = "wandb"

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._wandb: Any = importlib.import_module("wandb")
        arguments = {
            "project": start.project,
            "name": start.run,
            "dir": str(start.directory),
            "config": dict(start.options),
            "id": _saved_id(start, self.name),
            "resume": "allow",
            **start.arguments,
        }
        self._run = self._wandb.init(**arguments)
        _save_id(start, self.name, self._run.id)
        # steps after the checkpoint are sent again by a resumed run, and wandb's own step only grows
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _send(self, step: int, metrics: dict[str, float], trajectories: Sequence[Trajectory], table: str) -> None:
        tables = {}
        if trajectories:
            tables[table] = self._wandb.Table(columns=list(COLUMNS), data=rows(step, trajectories))
        self._run.log({"step": step, **metrics, **tables})

    def close(self) -> None:
        self._run.finish()


class _Mlflow(_Tracker):
    name = "mlflow"

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        # mlflow's own default is 7 requests in four minutes, for which the start of the run would wait
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(**start.arguments)  # the functions of mlflow belong to a thread
        experiment = self._client.get_experiment_by_name(start.project)
        number = self._client.create_experiment(start.project) if experiment is None else experiment.experiment_id
        self._id = _saved_id(start, self.name) or self._client.create_run(number, run_name=start.run).info.run_id
        _save_id(start, self.name, self._id)
        for name, value in _flat(start.options):
            self._client.log_param(self._id, name, value[:500], synchronous=True)

    def _send(self, step: int, metrics: dict[str, float], trajectories: Sequence[Trajectory], table: str) -> None:
        now = int(time.time() * 1000)
        entries = [self._entities.Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entries)
        if trajectories:
            data = {"columns": list(COLUMNS), "data": rows(step, trajectories)}
            self._client.log_text(self._id, json.dumps(data, default=str), f"{table}/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio(_Tracker):
    name = "trackio"

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._trackio: Any = importlib.import_module("trackio")
        arguments = {"embed": False, "config": dict(start.options), "resume": "allow", **start.arguments}
        self._run = self._trackio.init(project=start.project, name=start.run, **arguments)

    def _send(self, step: int, metrics: dict[str, float], trajectories: Sequence[Trajectory], table: str) -> None:
        data: dict[str, Any] = dict(metrics)
        if trajectories:
            pandas: Any = importlib.import_module("pandas")
            frame = pandas.DataFrame(rows(step, trajectories), columns=list(COLUMNS))
            data[table] = self._trackio.Table(dataframe=frame)
        self._run.log(data, step=step)

    def close(self) -> None:
        self._run.finish()


class _Swanlab(_Tracker):
    name = "swanlab"

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._swanlab: Any = importlib.import_module("swanlab")
        arguments = {
            "project": start.project,
            "name": start.run,
            "config": dict(start.options),
            "log_dir": str(start.directory / "swanlab"),
            "id": _saved_id(start, self.name),
            "resume": "allow",
            **start.arguments,
        }
        self._run = self._swanlab.init(**{name: value for name, value in arguments.items() if value is not None})
        _save_id(start, self.name, getattr(self._run, "id", None))

    def _send(self, step: int, metrics: dict[str, float], trajectories: Sequence[Trajectory], table: str) -> None:
        texts = [self._swanlab.Text(text(t), caption=f"{t.id}: reward {t.reward}") for t in trajectories]
        self._run.log({**metrics, **({table: texts} if texts else {})}, step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: Mapping[str, Any] = {
    tracker.name: tracker for tracker in (_Tensorboard, _Wandb, _Mlflow, _Trackio, _Swanlab)
}


def _saved_id(start: Start, name: str) -> str | None:
    """The id of the tracker's run that a resumed run continues."""
    file = start.directory / "loggers.json"
    if not start.step or not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None  # damaged: the tracker gets a new run


def _save_id(start: Start, name: str, value: str | None) -> None:
    if value is None:
        return
    file = start.directory / "loggers.json"
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    known[name] = value
    start.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=start.directory, delete=False, encoding="utf-8") as temporary:
        json.dump(known, temporary)
    Path(temporary.name).replace(file)


def _flat(options: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", json.dumps(value, default=str)))
    return pairs


def _mlflow_name(name: str) -> str:
    """Mlflow allows letters, digits and `_-. :/` in names."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
