"""Reads a run back: trajectories one by one or by their number, token texts, and data frames.

Token texts come from the tokenizer of the run that recorded the ids. `turns_of_messages` says which turns of the model are
behind which messages. Every defect of a file is a `RunError` with the file and the line; what a line may hold is the business
of `decode_trajectory`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from turnwise.errors import ConfigError, Failed, RunError, boundary
from turnwise.json_yaml import RecordedLoader, parse_json, parse_yaml, read_text
from turnwise.options.environment_values import insert_values
from turnwise.record.lines import LineFile, existing_file, open_lines
from turnwise.record.metrics import reward_parts
from turnwise.record.trajectory_json import decode_trajectory
from turnwise.types import Trajectory, Turn

# trajectories


def trajectories_file(run_or_file: str | Path) -> Path:
    """`trajectories.jsonl` of a run directory, or the file itself; the compressed file `.jsonl.gz` if only that exists. For an
    evaluation of a single model: that of the model.

    Raises RunError if there is no such file.
    """
    path = Path(run_or_file)
    file = existing_file(path / "trajectories.jsonl" if path.is_dir() else path)
    if path.is_dir() and not file.is_file() and (models := evaluated_runs(path)):
        if len(models) > 1:
            names = ", ".join(str(model) for model in models)
            raise RunError(f"{path.absolute()} is an evaluation of {len(models)} models: read one of {names}")
        file = existing_file(models[0] / "trajectories.jsonl")
    if not file.is_file():
        raise RunError(f"there is no file {file.absolute()}; give a run directory or a file of trajectories")
    return file


def evaluated_runs(path: Path) -> list[Path]:
    """The run directories of the models in the directory of an evaluation; empty for another directory."""
    if os.path.isfile(existing_file(path / "trajectories.jsonl")):
        return []
    folders = (file.parent for file in path.glob("*/evaluation.json"))
    return sorted(folder for folder in folders if existing_file(folder / "trajectories.jsonl").is_file())


def read(run_or_file: str | Path, *, damaged: list[str] | None = None) -> Iterator[Trajectory]:
    """The trajectories of a run or of one of its files, in their order, each read when it is asked for.

    A last line that a killed run has not finished is skipped. Images are references (`StoredImage`). With a list `damaged`, a
    damaged line, or part of a compressed file, is left out, and what is wrong with it is added to the list.

    Raises RunError if the file is missing or cannot be read, or a line is damaged or has a newer schema.
    """
    path = trajectories_file(run_or_file)
    for number, value in _objects(path, damaged):
        try:
            trajectory = decode_trajectory(value, where=f"{path}:{number}", media=path.parent / "media")
        except RunError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
            continue
        yield trajectory


def episodes(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The conversations of rows, each with those of the agents that its environment opened (`Trajectory.agents`), which stand
    before it in a record. Agents without a conversation of a row after them are left out."""
    found: list[Trajectory] = []
    agents: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.episode:
            agents.setdefault(trajectory.episode, []).append(trajectory)
        else:
            trajectory.agents = agents.pop(trajectory.id, [])
            found.append(trajectory)
    return found


class RecordedTrajectories(Sequence[Trajectory]):
    """The trajectories of a run or of one of its files, by number: `RecordedTrajectories("runs/demo")[-1]`.

    Opening the file finds where each line begins (`LineFile`); a trajectory is read when it is asked for, without reading the
    others. Lines that are appended later are not seen.

    Raises RunError if the file is missing or cannot be read, or a part of a compressed file is damaged; on access, if the line is
    damaged or has a newer schema. With a list `damaged`, damaged parts and, in what is read as a list, damaged lines are left
    out, and what is wrong with them is added to the list.
    """

    def __init__(self, run_or_file: str | Path, *, damaged: list[str] | None = None) -> None:
        self.path = trajectories_file(run_or_file)
        self._damaged = damaged
        try:
            self._lines = LineFile(self.path)
            damage = self._lines.damage
        except OSError as error:
            raise _unreadable(self.path, error) from None
        if damage and damaged is None:
            raise RunError(damage[0])
        if damaged is not None:
            damaged.extend(damage)

    def __len__(self) -> int:
        return len(self._lines)

    def with_id(self, id: str) -> list[Trajectory]:
        """The trajectories with this id. In a file of several evaluations, each evaluation has one."""
        return self._read_all(self._lines.numbers_of_id(id))

    def agents_of(self, trajectory: Trajectory) -> list[Trajectory]:
        """The conversations of the agents that the environment of a row's conversation opened."""
        found = self._read_all(self._lines.numbers_of_ids_below(trajectory.id))
        return [agent for agent in found if (agent.episode, agent.step) == (trajectory.id, trajectory.step)]

    def steps(self) -> list[int]:
        """The training steps that have trajectories, in order."""
        return self._lines.all_steps()

    def last_step(self) -> int:
        """The last step that has trajectories. Raises RunError if none has a step."""
        if not (steps := self.steps()):
            raise RunError(f"no conversation in {self.path} has a step, so there is no last one: leave out --step last")
        return steps[-1]

    def of_step(self, step: int) -> list[Trajectory]:
        """The trajectories of a training step."""
        return self._read_all(self._lines.numbers_of_step(step))

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return self._read_all(range(*index.indices(len(self))))
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"there is no trajectory {index}: {self.path} has {len(self)}")
        return self._read(number)

    def _read_all(self, numbers: Iterable[int]) -> list[Trajectory]:
        trajectories: list[Trajectory] = []
        for number in numbers:
            try:
                trajectories.append(self._read(number))
            except RunError as error:
                if self._damaged is None:
                    raise
                self._damaged.append(str(error))
        return trajectories

    def _read(self, number: int) -> Trajectory:
        where = f"{self.path}:{number + 1}"
        try:
            line = self._lines.line(number)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        return decode_trajectory(parse_line(line, where), where=where, media=self.path.parent / "media")


def read_lines(path: Path, *, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file such as `metrics.jsonl`; none where there is no such file.

    A last line that a killed run has not finished is skipped. With a list `damaged`, another damaged line is left out and
    described in it. Raises RunError if the file cannot be read or, without the list, another line is damaged.
    """
    if path.is_file():
        for _, value in _objects(path, damaged):
            yield value


def _objects(path: Path, damaged: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line, and its object."""
    try:
        for number, line in enumerate(open_lines(path, damaged=damaged), 1):
            try:
                value = parse_line(line, f"{path}:{number}")
            except RunError as error:
                if not line.endswith(b"\n"):
                    return  # the last line, and not finished
                if damaged is None:
                    raise
                damaged.append(str(error))
                continue
            yield number, value
    except OSError as error:
        raise _unreadable(path, error) from None


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The object of a line. `where` names the line in errors. Raises RunError if it is not a JSON object in UTF-8."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{where} is damaged: it is not UTF-8 ({error.reason} at byte {error.start + 1})") from None
    value = parse_json(text, where=where, error=RunError, own=True)
    if not isinstance(value, dict):
        raise RunError(f"{where} is damaged: a line is a JSON object; this is a {type(value).__name__}")
    return value


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be read: {error.strerror or error}")


# texts of tokens


def token_texts(run: Path, policy: str = "") -> Callable[[int], str] | None:
    """The function from token id to text, by the tokenizer that recorded the ids: the run's own, or that of the model which plays
    the frozen policy of this name (`Trajectory.policy`). None if its `tokenizer.json` is not on this machine.

    Raises RunError if the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    file = next((file for file in _tokenizer_files(run, policy) if file.is_file()), None)
    if file is None:
        return None
    try:
        with boundary("tokenizer"):  # the library raises plain Exception
            tokenizer = Tokenizer.from_file(str(file))
    except Failed as failed:
        raise RunError(f"{file} cannot be read as a tokenizer: {failed.failure.message}") from None
    return lambda token: tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < 2**32 else "?"


def _tokenizer_files(run: Path, policy: str) -> Iterator[Path]:
    """Where a tokenizer may be: in the directory of the policy; for the run's own, in its newest checkpoint, or in the model that
    it started from."""
    of_policy = _path_of_policy(recorded_options(run), policy) if policy else None
    if of_policy is not None:
        # an adapter may have no tokenizer of its own: then it is that of the model under it
        yield from _in_model(of_policy)
        adapter = Path(of_policy).expanduser() / "adapter_config.json"
        if adapter.is_file():
            about = parse_json(read_text(adapter, error=RunError), where=str(adapter), error=RunError)
            base = about.get("base_model_name_or_path") if isinstance(about, dict) else None
            yield from _in_model(base)
        return
    yield run / "checkpoint" / "tokenizer.json"
    yield from sorted(run.glob("checkpoints/step-*/tokenizer.json"), reverse=True)
    model = recorded_options(run).get("model")
    if isinstance(model, dict):
        yield from _in_model(model.get("path"))


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _in_model(path: Any) -> Iterator[Path]:
    """The file of a model directory, or of a name of the hub whose files are on this machine."""
    if not isinstance(path, str):
        return
    yield Path(path).expanduser() / "tokenizer.json"
    if _HUB_NAME.fullmatch(path) and not Path(path).exists():
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # no name that the hub allows
            kept = try_to_load_from_cache(path, "tokenizer.json")
            if isinstance(kept, str):
                yield Path(kept)


def _path_of_policy(options: Mapping[str, Any], name: str) -> str | None:
    """The model of a frozen policy with a tokenizer of its own; None if it has that of the run."""
    policies, reference = options.get("policies"), options.get("reference")
    for policy in policies if isinstance(policies, list) else []:
        if isinstance(policy, dict) and policy.get("name") == name:
            path = policy.get("path")
            if policy.get("reference") and isinstance(reference, dict):
                path = reference.get("path")
            return path if isinstance(path, str) else None
    return None


def recorded_options(run: Path) -> Mapping[str, Any]:
    """The options of a run as plain values, from its `config.yaml`; empty where there is none. `${NAME}` stands for values that
    came from environment variables, unless they are set here too.

    Raises RunError if the file cannot be read.
    """
    config = run / "config.yaml"
    if not config.is_file():
        return {}
    tree = parse_yaml(read_text(config, error=RunError), where=str(config), error=RunError, loader=RecordedLoader)
    if not isinstance(tree, dict):
        return {}
    try:
        return insert_values(tree, where=str(config))[0]
    except ConfigError:  # not set here
        return tree


# turns and messages


def turns_of_messages(trajectory: Trajectory) -> list[list[Turn]]:
    """For each message of `trajectory.messages`, the turns that sampled it, in their order.

    A message of the model has several turns where the environment cut the answer and the model continued it. Turns that were
    sampled in a previous history, or that were read from a record of schema 1, are found by their message: an environment that
    replaces the history often keeps some of its messages.
    """
    linked: list[list[Turn]] = [[] for _ in trajectory.messages]
    last, unlinked = len(trajectory.previous_histories), list[Turn]()
    for turn in trajectory.turns:
        if turn.history == last and turn.message_index is not None and turn.message_index < len(linked):
            linked[turn.message_index].append(turn)
        else:
            unlinked.append(turn)
    for turns, message in zip(reversed(linked), reversed(trajectory.messages), strict=True):
        if not turns and (index := _last(unlinked, message)) is not None:
            turns.append(unlinked[index])
            del unlinked[index:]  # the messages before this one are of earlier turns
    return linked


def _last(turns: Sequence[Turn], message: object) -> int | None:
    return next((index for index in reversed(range(len(turns))) if turns[index].message == message), None)


# data frames


def metrics_frame(run: str | Path) -> Any:
    """The metrics of a run: one row for each step, one column for each metric, the step as index.

    Raises ConfigError if pandas is not installed, RunError if the file is damaged.
    """
    frame = _pandas().DataFrame(list(read_lines(Path(run) / "metrics.jsonl")))
    return frame.set_index("step") if "step" in frame else frame


def trajectories_frame(run: str | Path) -> Any:
    """The conversations of a run or of a file: one row for each.

    Columns: `id`, `group`, `step`, `episode`, `agent`, `policy`, `row`, `reward`, `stop`, `error`, `turns`, `tool_calls`,
    `tool_errors`, `sampled_tokens`, `seconds`, `answer`, `messages`; `rewards/<name>` for the parts of the reward;
    `row/<name>` for the columns of the row. `episode` is the id of the row's
    conversation, and `agent` the name of an agent that its environment opened.

    Raises ConfigError if pandas is not installed, RunError if the file is missing or damaged.
    """
    return _pandas().DataFrame([_values(trajectory) for trajectory in read(run)])


def evaluation_frame(directory: str | Path, models: Sequence[str]) -> Any:
    """The conversations of several models of an evaluation: one row for each, with the name of the model in the column `model`.

    Raises ConfigError if pandas is not installed, RunError if a file is missing or damaged.
    """
    return _pandas().DataFrame(
        [{"model": model, **_values(trajectory)} for model in models for trajectory in read(Path(directory) / model)]
    )


def _values(trajectory: Trajectory) -> dict[str, Any]:
    calls = [call for turn in trajectory.turns for call in turn.calls]
    outcomes = [outcome for turn in trajectory.turns for outcome in turn.outcomes]
    return {
        "id": trajectory.id,
        "group": trajectory.group,
        "step": trajectory.step,
        "episode": trajectory.episode or trajectory.id,
        "agent": trajectory.agent,
        "policy": trajectory.policy,
        "row": trajectory.row.id,
        "reward": trajectory.reward,
        "stop": None if trajectory.stop is None else str(trajectory.stop),
        "error": None if trajectory.error is None else trajectory.error.kind,
        "turns": len(trajectory.turns),
        "tool_calls": len(calls),
        "tool_errors": sum(outcome.error is not None for outcome in outcomes),
        "sampled_tokens": trajectory.sampled_tokens,
        "seconds": trajectory.seconds,
        "answer": trajectory.answer,
        "messages": trajectory.messages,
        **{f"rewards/{name}": value for name, value in reward_parts(trajectory).items()},
        **{f"row/{name}": value for name, value in trajectory.row.fields.items()},
    }


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError("data frames need the `pandas` package: pip install 'turnwise[pandas]'") from None
    return pandas
