"""The section of a recipe about distillation: which teachers score the tokens that are trained on, and what is learnt from them.

A teacher is a local model, a server, or the trained model itself. A section checks only its own values; combinations with other
sections are the subject of `config/teacher_checks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.options.section import NonEmpty, NotNegative, PathText, Positive, Seconds, Section, Use, changed_options


class TeacherModel(Section):
    """A teacher. Without `path` and `url`, it is the trained model itself, which `context` shows more than the student saw."""

    name: NonEmpty = "teacher"
    """Its name, by which rows choose it (`teacher.column`); names differ."""
    path: PathText | None = None
    """Model directory, checkpoint or hub name, with the same vocabulary. Null: a server, or the trained model itself."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of its parameters. Null: `model.dtype`."""
    bits: Literal[4] | None = None
    """4: quantize it when it is loaded."""
    url: NonEmpty | None = None
    """Address of a server, such as `http://host:8000`. Null: in this process."""
    server: Literal["vllm", "sglang"] = "vllm"
    """The kind of server."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its weight among several teachers without `teacher.column`."""
    context: Use | None = None
    """What it reads instead of the prompt: `context(trajectory, turn) -> messages` (docs/distillation.md)."""

    @property
    def is_student(self) -> bool:
        """Whether the trained model, with its present weights, is the teacher."""
        return self.path is None and self.url is None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        of_path = [name for name in ("dtype", "bits") if getattr(self, name) is not None]
        problem = None
        if self.path is not None and self.url is not None:
            problem = "path and url are two teachers: remove one, or write two entries in teacher.models"
        elif self.path is None and of_path:
            problem = f"{of_path[0]} has an effect on a local teacher only: set path, or remove {of_path[0]}"
        elif self.url is None and self.server != "vllm":
            problem = "server has no effect without url: set url, or remove server"
        elif self.is_student and self.context is None:
            problem = (
                "a teacher needs path (a local model) or url (a server); for the trained model itself as its teacher, context: "
                "a function that gives it more to read"
            )
        if problem is not None:
            raise PydanticCustomError("teacher", "{message}", {"message": problem})
        return self


class TeacherSection(Section):
    """On-policy distillation (docs/distillation.md). `teacher: path/to/model` is short for one local teacher, whose options
    may stand in this section."""

    models: list[TeacherModel] = []
    """The teachers."""
    signal: Literal["sampled", "divergence"] = "sampled"
    """`sampled`: the difference of log-probabilities is a token's advantage. `divergence`: a loss between both next-token
    distributions."""
    coef: Annotated[float, Field(gt=0)] = 1.0
    """Factor of these advantages or of the loss. For the teacher alone: `credit=none`."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.0
    """`sampled`: discount per token of later differences."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """`sampled`: largest difference of log-probabilities, in nats; 10 is common."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """`reverse_kl`: KL(student || teacher). `forward_kl`: KL(teacher || student). `jsd`: generalized Jensen-Shannon
    divergence (arXiv 2306.13649)."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """`jsd`: the teacher's weight in the mixture: near 0 like `forward_kl`, near 1 like `reverse_kl`."""
    top_k: Positive | None = None
    """`divergence`: over the teacher's most likely tokens, and the others as one class; servers and `context` need it. Null:
    the vocabulary."""
    column: NonEmpty | None = None
    """Column with the name of the row's teacher."""
    timeout: Seconds = 300.0
    """Seconds for a step's scores from a server."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`teacher: DIR`, or `teacher: {path: DIR, coef: 2}`, is short for one entry in `models`."""
        if isinstance(value, str):
            return {"models": [{"path": value}]}
        if not isinstance(value, Mapping) or not (own := {key for key in value if key in TeacherModel.model_fields}):
            return value
        if "models" in value:
            raise PydanticCustomError(
                "teacher",
                "{message}",
                {"message": f"{sorted(own)[0]} belongs to one teacher: write it into the entries of teacher.models"},
            )
        model = {key: value[key] for key in value if key in own}
        return {**{key: value[key] for key in value if key not in own}, "models": [model]}

    @model_validator(mode="after")
    def _combination(self) -> Self:
        problem = self._problem()
        if problem is not None:
            raise PydanticCustomError("teacher", "{message}", {"message": problem})
        return self

    def _problem(self) -> str | None:
        names = [model.name for model in self.models]
        changed = changed_options(self)
        double = next((name for name in names if names.count(name) > 1), None)
        of_divergence = next((name for name in changed if name in ("divergence", "beta", "top_k")), None)
        if double is not None:
            return f"two entries of teacher.models have the name {double!r}: give each teacher a name of its own"
        if not self.models and changed:
            return f"{changed[0]} has no effect without a teacher: set teacher.path, or remove teacher.{changed[0]}"
        if self.signal == "sampled" and of_divergence is not None:
            return f"{of_divergence} has no effect with signal=sampled: set signal=divergence, or remove it"
        of_sampled = next((name for name in changed if name in ("gamma", "clip")), None)
        if self.signal == "divergence" and of_sampled is not None:
            return f"{of_sampled} has no effect with signal=divergence: set signal=sampled, or remove it"
        if self.divergence != "jsd" and "beta" in changed:
            return f"beta has no effect with divergence={self.divergence}: set divergence=jsd, or remove it"
        return self._problem_of_several()

    def _problem_of_several(self) -> str | None:
        remote = next((model.name for model in self.models if model.url is not None), None)
        other = next((model.name for model in self.models if model.context is not None), None)
        weighted = any("weight" in changed_options(model) for model in self.models)
        if self.column is not None and len(self.models) < 2:
            return "column has no effect with one teacher: add teachers to teacher.models, or remove it"
        if weighted and (len(self.models) < 2 or self.column is not None):
            return "weight has no effect with one teacher for each row: remove it"
        if self.models and remote is None and "timeout" in changed_options(self):
            return "timeout has no effect without a teacher on a server (url): remove it"
        if self.signal == "divergence" and self.top_k is None and (remote or other):
            why = f"the teacher {remote or other!r} {'is on a server' if remote else 'has another context'}"
            return f"signal=divergence over the complete vocabulary needs a local teacher, and {why}: set teacher.top_k (20)"
        if self.top_k is not None and len(self.models) > 1 and self.column is None:
            return "top_k of several teachers cannot be mixed: choose a teacher for each row (teacher.column), or remove top_k"
        return None

    @property
    def on(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.models)

    @property
    def scores(self) -> bool:
        """Whether teachers score tokens before the update; otherwise their distributions are computed in the update itself."""
        return self.on and (self.signal == "sampled" or self.top_k is not None)

    @property
    def local(self) -> list[TeacherModel]:
        """The teachers whose weights are loaded."""
        return [model for model in self.models if model.path is not None]

    @property
    def loss_coef(self) -> NotNegative:
        """The factor of the divergence in the loss."""
        return self.coef if self.on and self.signal == "divergence" else 0.0
