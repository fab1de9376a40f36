"""Opens the directory of a new or a resumed run: finds the newest checkpoint and checks that nothing changed since the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from turnwise.chat.renderer import Renderer
from turnwise.config.resume_rules import check_options, named_changes, option_values, refuse_unknown_names
from turnwise.errors import RunError, TemplateError
from turnwise.local_paths import saved_policy
from turnwise.options.schema import Config
from turnwise.record.run_directory import RunDirectory
from turnwise.training import fingerprint
from turnwise.training.checkpoint import Checkpoints, SavedCheckpoint, in_parts
from turnwise.training.learner import Critic, Learner
from turnwise.types import Row

_FORMAT = 1

Number = TypeVar("Number", int, float)


@dataclass(slots=True, kw_only=True)
class OpenedRun:
    """A run directory and, for a resumed run, the checkpoint that it continues from."""

    config: Config
    kind: Literal["train", "sft"]
    directory: RunDirectory
    checkpoints: Checkpoints
    saved: SavedCheckpoint | None = None
    notes: list[str] = field(default_factory=list)
    origin: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of the `rows`, the `tokenizer` and the `model` that the run started with."""

    @property
    def source(self) -> str | Path:
        """Source of the weights and the tokenizer: the model of the recipe, or the checkpoint."""
        return self.config.model.path if self.saved is None else self.saved.model

    @property
    def critic(self) -> Path | None:
        """The directory of the saved critic; None if the run is new or had no critic."""
        return None if self.saved is None else self.saved.critic

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return 0 if self.saved is None else self.saved.step

    def number(self, name: str, default: Number = 0) -> Number:
        """A number that the run saved in its checkpoint, such as the position in the data."""
        return default if self.saved is None else self.saved.about["place"].get(name, default)

    def compare_rows(self, rows: Sequence[Row]) -> None:
        """Compare the rows with the rows that the run started with.

        Raises RunError if they differ, and `resume_changes` does not name an option of the data.
        """
        now = {"count": len(rows), "sha256": fingerprint.of_rows(rows)}
        previous = self.origin.setdefault("rows", now)
        if previous == now:
            return
        if not any(name.startswith("data.") for name in self.config.resume_changes):
            counts = (
                f"{previous['count']} rows at the start, {now['count']} rows now"
                if previous["count"] != now["count"]
                else "the number of rows is the same"
            )
            raise RunError(
                f"the rows of data.train={self.config.data.train} are not the rows that the run in {self.directory.shown} "
                f"started with ({counts}). Restore them; or use the new rows for the next steps: "
                f"resume_changes='[data.train]'"
            )
        self.notes.append(f"resuming with other rows: {now['count']} (were {previous['count']})")
        self.origin["rows"] = now

    def compare_tokenizer(self, used: str) -> None:
        """Compare the tokenizer of model.path with the tokenizer that the run started with; `used` is the fingerprint of the one
        that this start uses.

        A resumed run has its own copy, so model.path may be missing. Raises RunError if model.path has another tokenizer.
        """
        if self.saved is None:
            self.origin["tokenizer"] = used
            return
        try:
            now = fingerprint.of_tokenizer(Renderer.from_pretrained(self.config.model.path).tokenizer)
        except TemplateError as error:
            self.notes.append(
                f"model.path has no tokenizer any more, so the tokenizer of the checkpoint is used: {error}"
            )
            return
        if now != self.origin["tokenizer"] and "model.path" not in self.config.resume_changes:
            raise RunError(
                f"the tokenizer or the chat template in model.path={self.config.model.path} changed since the run in "
                f"{self.directory.shown} started. Restore the files; or start another run; or resume with the copy in the "
                f"checkpoint: resume_changes='[model.path]'"
            )

    @property
    def before_training(self) -> str | None:
        """Path of the model before training, if the run is resumed and may need it as a reference. A new run copies its own
        model."""
        return None if self.saved is None else self.config.model.path

    def compare_model(self, learner: Learner) -> None:
        """Store the fingerprint of a new run's model; compare the reference model of a resumed run with the stored fingerprint.

        A run with an adapter compares its base model, which is not in the checkpoint. Raises RunError if the model in model.path
        or reference.path is not the model that the run started with.
        """
        config, base = self.config, learner.base_fingerprint()
        if self.saved is None:
            self.origin["model"] = base or learner.fingerprint()
        elif base is not None and base != self.origin["model"]:
            raise RunError(
                f"the checkpoint {self.saved.folder} holds the adapter only, and the weights in model.path={config.model.path} "
                f"changed since the run in {self.directory.shown} started: restore them"
            )
        self._compare_reference(learner)
        self._compare_teachers(learner)
        self._compare_policies()

    def _compare_teachers(self, learner: Learner) -> None:
        """Store the fingerprints of the teachers of a new run, or compare them with the stored fingerprints."""
        previous = self.origin.setdefault("teachers", {})
        paths = {teacher.name: teacher.path for teacher in self.config.teacher.local}
        named = named_changes(["teacher.models[].path"])
        for name, found in learner.teacher_fingerprints().items():
            kept = None if "teacher.models[].path" in self.config.resume_changes else previous.get(name)
            if kept not in (None, found):
                raise RunError(
                    f"the weights of the teacher {name!r} ({paths[name]}) changed since the run in {self.directory.shown} "
                    f"started: restore them, or name the change: {named}"
                )
            previous[name] = found

    def _compare_policies(self) -> None:
        """Store the fingerprints of the files of a new run's policies, or compare them with the stored fingerprints."""
        previous = self.origin.setdefault("policies", {})
        for policy in self.config.policies:
            found = None if policy.path is None else fingerprint.of_model_files(Path(policy.path))
            kept = None if "policies[].path" in self.config.resume_changes else previous.get(policy.name)
            if kept not in (None, found):
                raise RunError(
                    f"the files of the policy {policy.name!r} in {policy.path} changed since the run in {self.directory.shown} "
                    f"started: restore them, or name the change: {named_changes(['policies[].path'])}"
                )
            previous[policy.name] = found

    def _compare_reference(self, learner: Learner) -> None:
        """Store the fingerprint of the reference model of a new run, or compare it with the stored fingerprint."""
        reference, path = learner.reference_fingerprint(), self.config.reference.path
        if reference is None:
            return
        previous = self.origin["model"] if path is None else self.origin.setdefault("reference", reference)
        if reference != previous:
            needed, option = ("the model before training", "model.path") if path is None else ("it", "reference.path")
            raise RunError(
                f"the KL divergence needs {needed} as the reference model, and the weights in {option}="
                f"{path or self.config.model.path} changed since the run in {self.directory.shown} started: restore them"
            )

    def compare_critic(self, critic: Critic) -> None:
        """The same for the base model of a critic with an adapter, if it is another model than the policy's."""
        path, base = self.config.critic.path, critic.base_fingerprint()
        if path is None or base is None:
            return
        if base != self.origin.setdefault("critic", base):
            raise RunError(
                f"the checkpoint holds only the adapter of the critic, and the weights in critic.path={path} changed since the "
                f"run in {self.directory.shown} started: restore them"
            )

    def saved_policy(self, name: str) -> Path | None:
        """The directory of the saved adapter of a further trained policy; None if the run is new, or had no such policy."""
        folder = None if self.saved is None else saved_policy(self.saved.model, name)
        return folder if folder is not None and folder.is_dir() else None

    def begin(
        self, learner: Learner, critic: Critic | None = None, others: Mapping[str, Learner] | None = None
    ) -> None:
        """Prepare the directory and load the states of the optimizers. Called just before the first step. `others` are the
        learners of further trained policies.

        Raises RunError.
        """
        resuming = self.saved is not None
        if self.saved is not None:
            state = self.saved.state()
            learner.load_state(state["policy"], self.saved.shards)
            if critic is not None and "critic" in state:
                critic.load_state(state["critic"], self.saved.critic_shards)
            for name, other in (others or {}).items():
                if name in state.get("policies", {}):
                    other.load_state(state["policies"][name])
                else:
                    self.notes.append(f"the policy {name!r} begins now: the checkpoint has no adapter of it")
            self.notes += self.directory.cut_back(self.saved.about["marks"])
            self.directory.cut_warnings(self.step)
        self.notes += self.directory.prepare(self.config, resuming=resuming)
        self.directory.note_changes(self.origin.get("changes", ()))
        self.checkpoints.refuse_other_files(best=self.config.checkpoint.best is not None)
        if self.saved is not None:
            self.directory.note_checkpoint(self.step)
            self.notes.append(f"resuming after step {self.step}")
        else:
            self.directory.cut_back({})
            self.directory.cut_warnings(-1)

    def about(self, place: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The contents of checkpoint.json. `place` is the position in the data."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "place": dict(place),
            "seconds": round(seconds, 4),
            "marks": self.directory.marks(),
            "options": option_values(self.config),
            "origin": self.origin,
        }


def open_run(config: Config, kind: Literal["train", "sft"]) -> OpenedRun:
    """Open the directory `output` for a new run, or for the run in it that is resumed. Locks the directory if it exists.

    Raises RunError if the run in it cannot be resumed with this recipe, ConfigError for a wrong `resume_changes`.
    """
    refuse_unknown_names(config)
    directory = RunDirectory(config.output, kind=kind, compressed=config.record.compression == "gzip")
    checkpoints = Checkpoints(directory.path, keep=config.checkpoint.keep)
    opened = OpenedRun(config=config, kind=kind, directory=directory, checkpoints=checkpoints)
    directory.lock()
    directory.refuse_unnamed_run(config)  # before a model is loaded
    if not config.replace:
        checkpoints.refuse_other_files(best=config.checkpoint.best is not None)
    if config.resume != "auto":
        return opened
    saved = checkpoints.find()
    if saved is None:
        directory.refuse_lost_checkpoints()
        return opened
    about = saved.about
    if about.get("format") != _FORMAT:
        raise RunError(
            f"the checkpoint {saved.folder} was written by another version of turnwise (format {about.get('format')}; this "
            f"version reads {_FORMAT}): start another run from its weights: model.path={saved.model}"
        )
    if about["kind"] != kind:
        other, ours = ("`turnwise sft`", "training") if kind == "train" else ("`turnwise train`", "fine-tuning")
        raise RunError(
            f"{config.output} is a run of {other}, which {ours} cannot resume; choose another output, and start from its "
            f"model: model.path={checkpoints.newest}"
        )
    opened.saved, opened.origin = saved, dict(about["origin"])
    opened.notes += [saved.note] if saved.note is not None else []
    changes = check_options(
        about["options"],
        option_values(config),
        named=config.resume_changes,
        where=config.output,
        checkpoint=str(checkpoints.newest),
    )
    opened.notes += [change.note for change in changes]
    # in the checkpoints that follow, so that a run which goes on from an earlier one forgets what was changed later
    opened.origin["changes"] = [
        *opened.origin.get("changes", ()),
        *({"after_step": opened.step, "option": one.option, "from": one.before, "to": one.now} for one in changes),
    ]
    if in_parts(saved.folder) and not config.cluster.distributed:  # ranks read parts
        write_models([saved.folder])
    return opened


def write_models(checkpoints: Sequence[Path]) -> None:
    """Write the models of checkpoints whose weights are in the parts of several ranks. Raises RunError."""
    if checkpoints:
        from turnwise.training.sharded.consolidation import complete_weights  # torch.distributed

        for folder in checkpoints:
            complete_weights(folder)
