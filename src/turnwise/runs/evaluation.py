"""`turnwise eval`: conversations of several models on the same held-out rows, with the loop of training, and their statistics.

There is a recipe for each model. The models are evaluated one after the other; an evaluation that was stopped is resumed from
its directory, which has a run directory for each model and eval.json with all numbers::

    DIR/run.json                    {"kind": "eval", ...}
    DIR/config.yaml                 the recipe
    DIR/eval.json                   the results, once all models are finished
    DIR/<model>/trajectories.jsonl  the conversations; each is appended when it is scored (compressed: trajectories.jsonl.gz)
    DIR/<model>/metrics.jsonl       their metrics, in one line
    DIR/<model>/config.yaml         the recipe with this model
    DIR/<model>/evaluation.json     what the conversations depend on, compared when the evaluation is resumed
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError, DataError, RunError
from turnwise.json_yaml import parse_json, parse_yaml, read_text
from turnwise.local_paths import refuse_other_than_model, same_directory
from turnwise.options.environment_values import Origins, insert_values, same_value, with_digests
from turnwise.options.schema import Config
from turnwise.record.evaluation import MOST_IN_ALL_PAIRS, EvaluationResult, ModelResult, compare, summarize
from turnwise.record.lines import SUFFIX, compressed_parts, is_compressed, open_lines
from turnwise.record.metrics import conversation_metrics, cut_answers, failures, mean
from turnwise.record.reader import episodes, read
from turnwise.record.run_directory import RunLock, move_away
from turnwise.record.trajectory_json import decode_trajectory, encode_line
from turnwise.record.writer import replace_file, write_config, write_trajectories, writing
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.runs.sampling_only import SamplingRun, assign_scripts, conversation_context, prepare
from turnwise.terminal.conversation import log_conversation
from turnwise.terminal.report import progress
from turnwise.training import fingerprint
from turnwise.training.checkpoint import Checkpoints
from turnwise.types import Group, Row, Trajectory
from turnwise.user_code.references import is_live
from turnwise.user_code.reward_number import reaches

# the models to compare

_ENDPOINT = re.compile(r"(?P<model>.+?)@(?P<url>https?://.+)")
_LABEL = re.compile(r"(?P<label>[A-Za-z0-9][\w.-]*)=(?P<value>.+)")
_SINGLE_TURN = "single-turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptions:
    """A model of an evaluation as options of the recipe that hold for this model only."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """One model of an evaluation, with the recipe that its conversations follow."""

    name: str
    """Unique; also the name of its directory."""
    config: Config
    single_turn: bool = False

    @property
    def model(self) -> str:
        """The path or hub name of the model; with an endpoint `model@url`."""
        engine = self.config.engine.endpoint
        if engine is not None:
            return f"{engine.model or self.config.model.path}@{engine.url}"
        return self.config.model.path


def evaluated_models(
    config: Config, values: Sequence[str | NamedOptions], *, single_turn: bool
) -> list[EvaluatedModel]:
    """The models of `values` (`--model`); without values, the model of the recipe.

    A value is a model directory, a hub name, the directory of a run of turnwise (its newest checkpoint), an endpoint
    (`MODEL@URL`), a YAML file with options of the recipe for this model, or these options. `NAME=` before a text gives the model
    a name. With `single_turn`, each model is also evaluated with one turn in each conversation.

    Raises ConfigError or RunError.
    """
    models: list[EvaluatedModel] = []
    for value in values or [""]:
        if isinstance(value, NamedOptions):
            label, of_model = value.name, _changed(config, value.options, value.name)
        else:
            label, of_model = _resolved(config, value)
        name = _unique(label, [model.name for model in models])
        models.append(EvaluatedModel(name=name, config=of_model))
        if single_turn:
            if of_model.limits.turns == 1:
                raise ConfigError(
                    "--single-turn compares with one turn, and the recipe has limits.turns=1: remove one of them"
                )
            limits = of_model.limits.model_copy(update={"turns": 1})
            alone = of_model.model_copy(update={"limits": limits})
            single = _unique(f"{name}-{_SINGLE_TURN}", [model.name for model in models])
            models.append(EvaluatedModel(name=single, config=alone, single_turn=True))
    return models


def _resolved(config: Config, value: str) -> tuple[str, Config]:
    """The label and the recipe of a value of `--model`; an empty value stands for the recipe's own model."""
    label: str | None = None
    if (labelled := _LABEL.fullmatch(value)) is not None and not Path(value).exists():
        label, value = labelled["label"], labelled["value"]
    if not value:
        endpoint = config.engine.endpoint
        named = None if endpoint is None else endpoint.model
        return _label_of(named or config.model.path), config
    if (endpoint := _ENDPOINT.fullmatch(value)) is not None:
        own = {} if config.engine.endpoint is None else config.engine.model_dump(mode="json")
        engine = {**own, "name": "openai", "url": endpoint["url"], "model": endpoint["model"]}
        return label or _label_of(endpoint["model"]), _changed(config, {"engine": engine}, value)
    path = Path(value).expanduser()
    if path.suffix in (".yaml", ".yml"):
        tree = parse_yaml(read_text(path, error=ConfigError), where=value, error=ConfigError)
        if not isinstance(tree, dict):
            raise ConfigError(
                f"--model {value}: the file must contain a mapping of options, such as engine: {{name: openai}}"
            )
        inserted, origins = insert_values(tree, where=value)
        return label or path.stem, _changed(config, inserted, value, origins)
    options: dict[str, Any] = {"model": {"path": str(path) if path.is_dir() else value}}
    if config.engine.endpoint is not None:
        options["engine"] = {"name": "local"}
    if (path / "run.json").is_file() or (path / "checkpoints").is_dir():
        saved = Checkpoints(path).find()
        if saved is None:
            raise RunError(
                f"--model {value}: this run has no checkpoint; give a model directory, or a run with checkpoints"
            )
        options["model"] = {"path": str(saved.model)}
        return label or path.resolve().name, _changed(config, options, value)
    refuse_other_than_model(value, error=ConfigError, weights=False, given=f"--model {value}")
    return label or _label_of(value), _changed(config, options, value)


def _label_of(model: str) -> str:
    """The last part of a path or a hub name, in the characters of a directory's name."""
    return re.sub(r"[^\w.-]", "-", model.rstrip("/").rpartition("/")[2]).lstrip("-.") or "model"


def _unique(name: str, taken: Sequence[str]) -> str:
    if name not in taken:
        return name
    return next(other for number in range(2, len(taken) + 3) if (other := f"{name}-{number}") not in taken)


def _changed(
    config: Config, options: Mapping[str, Any], source: str, origins: Origins = MappingProxyType({})
) -> Config:
    """The recipe with other options. A section that is chosen by name is replaced, another section is merged. `origins` are the
    options that came from environment variables.

    Raises ConfigError.
    """
    tree = config.model_dump(mode="json")
    for key, value in options.items():
        replaced = isinstance(value, Mapping) and "name" in value
        both = isinstance(value, Mapping) and isinstance(tree.get(key), dict) and not replaced
        tree[key] = {**tree[key], **value} if both else value
    return checked(tree, source=f"--model {source}").with_origins({**config.origins, **origins})


# the directory

_UNUSED = (
    *("train", "loss", "correction", "credit", "critic", "sft", "checkpoint", "rollout", "loss_mask"),
    *("output", "resume", "resume_changes", "replace", "max_concurrent", "record"),
)
"""Sections and options that do not change a conversation of an evaluation."""
_UNUSED_OF_EVAL = ("every", "pass_reward")
_WEIGHTS = (".safetensors", ".bin")


class EvaluationDirectory:
    """The directory of an evaluation, locked until `release`.

    Raises RunError if it contains an evaluation and the recipe says neither to resume nor to replace it, if it contains
    something else, or if another process writes to it.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.notes: list[str] = []
        """Notes for the person who starts the evaluation."""
        about = path / "run.json"
        if path.is_dir() and any(file.name != ".lock" for file in path.iterdir()):
            if _kind(about) != "eval":
                raise RunError(
                    f"{path} contains other files than those of an evaluation: choose another directory with --out"
                )
            if config.replace:
                self.notes.append(f"the previous evaluation was moved to {move_away(path)}")
            elif config.resume != "auto":
                raise RunError(
                    f"{path} contains an evaluation already. To resume it and keep its finished conversations: resume=auto; to "
                    f"move it away and start again: replace=true; or choose another directory with --out"
                )
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(path)
            (path / "eval.json").unlink(missing_ok=True)
            replace_file(about, json.dumps({"kind": "eval", "checkpoint": None}) + "\n")
            write_config(path / "config.yaml", config)

    def model(self, name: str, config: Config, rows: Mapping[str, Any]) -> ModelDirectory:
        """The directory of one model. `rows` are number and fingerprint of the rows. Raises RunError."""
        return ModelDirectory(self.path / name, config, rows)

    def write_results(self, text: str) -> None:
        """Write eval.json."""
        with writing(self.path):
            replace_file(self.path / "eval.json", text)

    def release(self) -> None:
        """Let other processes write to the directory."""
        self._lock.release()


class ModelDirectory:
    """The run directory of one model.

    Raises RunError if it has conversations of other options, rows or weights.
    """

    def __init__(self, path: Path, config: Config, rows: Mapping[str, Any]) -> None:
        self.path = path
        plain, compressed = path / "trajectories.jsonl", path / f"trajectories.jsonl{SUFFIX}"
        gzip = config.record.compression == "gzip"
        self.trajectories, self._otherwise = (compressed, plain) if gzip else (plain, compressed)
        self._config = config
        identity = path / "evaluation.json"
        now = {"options": _options(config), "rows": dict(rows), "weights": _weights(config.model.path)}
        if identity.is_file():
            previous = parse_json(read_text(identity, error=RunError), where=str(identity), error=RunError)
            _refuse_changes(previous if isinstance(previous, dict) else {}, now, path)
        with writing(path):
            path.mkdir(exist_ok=True)
            replace_file(identity, json.dumps(now, indent=1, default=str) + "\n")
            write_config(path / "config.yaml", config)

    def keep(self, wanted: Iterable[Sequence[str]]) -> set[str]:
        """Keep the finished conversations of an interrupted evaluation, and remove all others from the file. Returns their ids.

        `wanted` are the ids of the conversations that are scored together: either all of them are kept or none. Conversations
        that failed are removed, so that they run again. Raises RunError if a line is damaged.
        """
        # the option record.compression may have changed since
        recorded = self.trajectories if self.trajectories.is_file() else self._otherwise
        lines = _lines_of_episodes(recorded, failed=False)
        kept = [id for together in wanted if all(id in lines for id in together) for id in together]
        with writing(self.path):
            self._replace(line for id in kept for line in lines[id])
            self._otherwise.unlink(missing_ok=True)
        return set(kept)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Append scored conversations."""
        with writing(self.path):
            write_trajectories(self.trajectories, trajectories)

    def finish(self, order: Sequence[str], metrics: Mapping[str, Any]) -> None:
        """Sort the conversations by `order`, the list of their ids, and write the metrics."""
        lines = _lines_of_episodes(self.trajectories, failed=True)
        with writing(self.path):
            self._replace(line for id in order for line in lines.get(id, ()))
            (self.path / "metrics.jsonl").write_bytes(encode_line(metrics))

    def read(self) -> list[Trajectory]:
        """The recorded conversations of rows, with those of their agents."""
        return episodes(read(self.trajectories))

    def _replace(self, lines: Iterable[bytes]) -> None:
        temporary = self.trajectories.with_suffix(".writing")
        with temporary.open("wb") as file:
            file.writelines(compressed_parts(lines) if is_compressed(self.trajectories) else lines)
        temporary.replace(self.trajectories)


def _kind(about: Path) -> str | None:
    """The kind of run that run.json names; None if there is none."""
    try:
        value = parse_json(read_text(about, error=RunError), where=str(about), error=RunError)
    except RunError:
        return None
    return value.get("kind") if isinstance(value, dict) else None


def _lines_of_episodes(path: Path, *, failed: bool) -> dict[str, list[bytes]]:
    """The lines of each conversation of a row and of its agents, by its id. With `failed`, also if it failed."""
    lines: dict[str, list[bytes]] = {}
    agents: dict[str, list[bytes]] = {}
    for trajectory, line in _complete_lines(path):
        if trajectory.episode:
            agents.setdefault(trajectory.episode, []).append(line)
        elif failed or not trajectory.failed:
            lines[trajectory.id] = [*agents.pop(trajectory.id, ()), line]
    return lines


def _complete_lines(path: Path) -> Iterable[tuple[Trajectory, bytes]]:
    """The trajectories of a file with their lines; a last line that a killed process has not finished is left out."""
    if not path.is_file():
        return
    for number, line in enumerate(open_lines(path), 1):
        if line.endswith(b"\n"):
            where = f"{path}:{number}"
            value = parse_json(line.decode("utf-8", "replace"), where=where, error=RunError, own=True)
            yield decode_trajectory(value, where=where), line


def _options(config: Config) -> dict[str, Any]:
    """The options on which the conversations of an evaluation depend."""
    tree = with_digests(config.model_dump(mode="json", exclude=set(_UNUSED)), config.origins)
    for name in _UNUSED_OF_EVAL:
        tree["eval"].pop(name, None)
    tree["data"].pop("train", None)
    if is_live(str(tree["data"]["eval"])):
        tree["data"]["eval"] = (
            None  # rows of a Python program have another name in each call; their contents are compared
        )
    return tree


def _weights(path: str) -> list[list[Any]]:
    """Name, size and time of the weight files of a model directory; empty for a hub name."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return []
    files = sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS)
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _refuse_changes(previous: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    before, after = dict(_leaves(previous.get("options"), "")), dict(_leaves(now["options"], ""))
    changed = [
        f"{key}={after.get(key)} (was {before.get(key)})"
        for key in after | before
        if not _same(before.get(key), after.get(key))
    ]
    if previous.get("rows") != now["rows"]:
        changed.append(f"the rows: {now['rows'].get('count')} (were {(previous.get('rows') or {}).get('count')})")
    if previous.get("weights") != now["weights"]:
        changed.append("the files with the model's weights")
    if changed:
        raise RunError(
            f"the evaluation in {path} cannot be resumed, because it was made with other values:\n  "
            + "\n  ".join(changed)
            + "\n"
            "Use the earlier values, choose another directory with --out, or start again with replace=true"
        )


def _same(before: str | None, after: str | None) -> bool:
    """Whether two leaves, as JSON, have the same value."""
    if before is None or after is None:
        return before == after
    return same_value(json.loads(before), json.loads(after))


def _leaves(node: Any, prefix: str) -> Iterable[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(node, default=str)


# the evaluation


async def evaluate_models(
    config: Config, models: Sequence[EvaluatedModel], out: Path, console: Console
) -> EvaluationResult:
    """Run the conversations of all models, one model after the other, and write everything to `out`.

    All models answer the same rows with the same seeds. Raises TurnwiseError.
    """
    if config.data.eval is None:
        raise ConfigError(
            "turnwise eval needs held-out rows: set data.eval. To evaluate on the rows of training: data.eval=<data.train>"
        )
    prepared = [prepare(model.config, assembly.evaluation_sampling(model.config)) for model in models]
    _print(console, [note for conversations in prepared for note in conversations.notes])
    rows = _common_rows(config, prepared, console)
    directory = EvaluationDirectory(out.absolute(), config)
    _print(console, directory.notes)
    try:
        about_rows = {"count": len(rows), "sha256": fingerprint.of_rows(rows)}
        results: list[ModelResult] = []
        for model, conversations in zip(models, prepared, strict=True):
            with (
                same_directory()
            ):  # the next model's paths mean what they meant, whatever user code does in conversations
                place = directory.model(model.name, model.config, about_rows)
                await _run_model(model, conversations, rows, place, console)
                results.append(_result(model, rows, place))
        result = _evaluation(config, rows, models, results)
        directory.write_results(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    finally:
        directory.release()
    return result


def _common_rows(config: Config, prepared: Sequence[SamplingRun], console: Console) -> list[Row]:
    """The held-out rows that no model leaves out because of their length."""
    rows = assembly.rows(config, held_out=True, limit=config.eval.max_rows)
    kept = rows
    for conversations in prepared:
        of_model, notes = conversations.keep_rows(rows)
        _print(console, notes)
        ids = {row.id for row in of_model}
        kept = [row for row in kept if row.id in ids]
    if not kept:
        raise DataError("each held-out row is too long for one of the models: raise data.max_prompt_tokens")
    return kept


async def _run_model(
    model: EvaluatedModel, conversations: SamplingRun, rows: Sequence[Row], place: ModelDirectory, console: Console
) -> None:
    """Run and score the conversations of a model that are not finished yet."""
    config, scorer = model.config, conversations.scorer
    started = time.perf_counter()
    groups = [new_group(row, size=config.eval.samples_per_row, seed=config.seed) for row in conversations.process(rows)]
    groups, scripts = assign_scripts(config, groups, samples="eval.samples_per_row")
    order = [trajectory.id for group in groups for trajectory in group.trajectories]
    kept = place.keep(_scored_together(conversations, groups))
    total = len(order)
    pending = [
        dataclasses.replace(group, trajectories=[t for t in group.trajectories if t.id not in kept]) for group in groups
    ]
    pending = [group for group in pending if group.trajectories]
    if kept:
        _print(console, [f"{model.name}: {len(kept)} of {total} conversations are finished already"])
    if pending:
        async with conversation_context(conversations, scripts=scripts) as context:
            score = scorer.scoring_callback(pending)
            with progress(console, total, done=len(kept), label=model.name) as advance:

                async def done(trajectory: Trajectory) -> None:
                    advance(trajectory.sampled_tokens)
                    place.add(await score(trajectory))

                await rollout_groups(pending, context, on_finished=done)
    recorded = _groups(place.read(), rows)
    renderer = conversations.renderer
    by_id = {trajectory.id: trajectory for group in recorded for trajectory in group.trajectories}
    log_conversation([by_id[id] for id in order if id in by_id], decode=None if renderer is None else renderer.decode)
    metrics = {
        "step": 0,
        "conversations": total,
        **conversation_metrics(recorded),
        "pass_rate": mean(
            [
                float(reaches(t.reward, config.eval.pass_reward))
                for g in recorded
                for t in g.trajectories
                if t.reward is not None
            ]
        ),
        "seconds/rollout": round(time.perf_counter() - started, 4) if not kept else None,
    }
    place.finish(order, metrics)
    if (warning := cut_answers([t for group in recorded for t in group.trajectories], config.limits)) is not None:
        console.print(f"{model.name}: {warning}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for line in failures(recorded)[:5]:
        console.print(f"{model.name}: {line}", style="red", highlight=False, markup=False, soft_wrap=True)


def _scored_together(conversations: SamplingRun, groups: Sequence[Group]) -> list[list[str]]:
    """The ids of the conversations that the reward functions score together."""
    scorer = conversations.scorer
    of_groups = [[trajectory.id for trajectory in group.trajectories] for group in groups]
    if scorer.batch:
        return [[id for ids in of_groups for id in ids]]
    if scorer.groups or any(reward.plan.needs_group for reward in (*scorer.trajectory, *scorer.turns)):
        return of_groups
    return [[id] for ids in of_groups for id in ids]


def _groups(trajectories: Sequence[Trajectory], rows: Sequence[Row]) -> list[Group]:
    """Recorded conversations by row, with the rows as they were read: the record does not have the data source."""
    by_id = {row.id: row for row in rows}
    groups: dict[str, Group] = {}
    for trajectory in trajectories:
        trajectory.row = by_id.get(trajectory.row.id, trajectory.row)
        group = groups.setdefault(trajectory.group, Group(id=trajectory.group, row=trajectory.row, trajectories=[]))
        group.trajectories.append(trajectory)
    return list(groups.values())


def _result(model: EvaluatedModel, rows: Sequence[Row], place: ModelDirectory) -> ModelResult:
    return summarize(
        place.read(),
        name=model.name,
        model=model.model,
        engine=model.config.engine.name,
        single_turn=model.single_turn,
        samples=model.config.eval.samples_per_row,
        pass_reward=model.config.eval.pass_reward,
        source_of={row.id: row.source for row in rows},
    )


def _evaluation(
    config: Config, rows: Sequence[Row], models: Sequence[EvaluatedModel], results: Sequence[ModelResult]
) -> EvaluationResult:
    """All results, with the comparisons: each further model with the first, then each other pair unless there are too many
    models; several turns with one turn of the same model."""
    several = [result for result in results if not result.single_turn]
    against = several[:1] if len(several) > MOST_IN_ALL_PAIRS else several
    pairs = [(other, one) for place, one in enumerate(against) for other in several[place + 1 :]]
    pairs += [
        (results[place - 1], result) for place, result in enumerate(results) if result.single_turn
    ]  # `evaluated_models` puts the single turn of a model behind the model
    data = config.data.eval
    return EvaluationResult(
        data=data if isinstance(data, str) else ", ".join(data or ()),
        rows=len(rows),
        samples_per_row=config.eval.samples_per_row,
        seed=config.seed,
        pass_reward=config.eval.pass_reward,
        models=list(results),
        comparisons=[compare(first, second) for first, second in pairs],
    )


def _print(console: Console, lines: Sequence[str]) -> None:
    for line in dict.fromkeys(lines):
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
