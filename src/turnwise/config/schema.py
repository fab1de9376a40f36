"""The schema of a recipe: every option, its default and its meaning.

There is one schema, and docs/recipes.md lists the options from it. Each module beside this one has some of the sections; this
module puts them together as `Config`. `recipe` reads recipe files; `train_checks` and `sft_checks` refuse options without
effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from turnwise.config.cluster import ClusterSection
from turnwise.config.correction import CorrectionSection
from turnwise.config.credit import AnyCredit, AutoCreditSection, CreditSection
from turnwise.config.critic import CriticSection
from turnwise.config.data import DataSection, ModelSection
from turnwise.config.environment import EnvironmentUse, McpSection, ToolCallsSection, ToolUse
from turnwise.config.environment_values import Origins, with_references
from turnwise.config.generation import (
    EvaluationSamplingSection,
    LimitsSection,
    LocalEngineSection,
    OpenAIEngineSection,
    SamplingSection,
    ScriptedEngineSection,
)
from turnwise.config.health import HealthSection
from turnwise.config.loggers import LoggerSection, TraceSection
from turnwise.config.loss import CispoSection, GspoSection, PpoClipSection, ReinforceSection, SapoSection
from turnwise.config.named_section import by_name
from turnwise.config.optimization import OptimizationSection, SftSection, TrainSection, steps_of_epochs
from turnwise.config.record import RecordSection
from turnwise.config.reference import ReferenceSection
from turnwise.config.rewards import RewardSection, RewardUse
from turnwise.config.rollout_server import RolloutServerSection
from turnwise.config.section import NonEmpty, Positive, Section, Use, changed_options
from turnwise.config.server_engines import ServerEngineSection, SglangEngineSection, VllmEngineSection
from turnwise.errors import nearest

__all__ = [
    "LOSS_MASKS",
    "OVERRIDABLE_CHECKS",
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "CreditSection",
    "CriticSection",
    "DataSection",
    "EnvironmentUse",
    "EvaluationSamplingSection",
    "EvaluationSection",
    "HealthSection",
    "LimitsSection",
    "LocalEngineSection",
    "McpSection",
    "ModelSection",
    "OpenAIEngineSection",
    "OptimizationSection",
    "RecordSection",
    "ReferenceSection",
    "RewardSection",
    "RewardUse",
    "RolloutSection",
    "RolloutServerSection",
    "SamplingSection",
    "ScriptedEngineSection",
    "Section",
    "ServerEngineSection",
    "SftSection",
    "SglangEngineSection",
    "ToolCallsSection",
    "ToolUse",
    "TrainSection",
    "Use",
    "VllmEngineSection",
    "changed_options",
]

OVERRIDABLE_CHECKS = (
    "headers",
    "contents",
    "tool turns",
    "user turns",
    "stop tokens",
    "tool calls",
    "tools shown",
    "round trip",
    "vocabulary",
    "mask",
    "credit",
    "rows",
)
"""The checks of `turnwise doctor` that the start of a run makes too, by name."""
LOSS_MASKS = ("all", "last_turn", "after_last_user", "last_round")
"""The rules of `rewards.turn_weights`, by name."""


class EvaluationSection(Section):
    """Evaluations: conversations on the held-out rows of `data.eval`, during `turnwise train` and with `turnwise eval`."""

    max_rows: Positive | None = None
    """The number of held-out rows to evaluate on. The first rows of the data are used. Null: all of them."""
    samples_per_row: Positive = 1
    """The number of conversations on each held-out row."""
    every: Annotated[int, Field(ge=0)] = 0
    """The number of training steps between two evaluations. 0: only before and after training."""
    pass_reward: float = 1.0
    """The smallest reward of a conversation that counts as passed, for the pass rate, pass@k and pass^k of evaluations."""
    sampling: EvaluationSamplingSection = EvaluationSamplingSection()
    """How tokens are sampled in evaluations: `temperature`, `top_p`, `top_k`, `min_p`. Null: the value of the same option in
    `sampling`. `eval.sampling.temperature=0` takes the most likely token."""


class RolloutSection(Section):
    """What `turnwise rollout` does: conversations without training."""

    max_rows: Positive | None = None
    """The number of rows to use in `turnwise rollout`. The first rows of the data are used. Null: all rows."""
    samples_per_row: Positive = 1
    """The number of conversations on each row in `turnwise rollout`."""


class CheckpointSection(Section):
    """Checkpoints, from which a stopped run can be resumed."""

    every: Positive | None = None
    """The number of steps between two checkpoints. Null: checkpoints are written as often as possible without taking more than
    3 % of the time (docs/record.md)."""
    keep: Positive = 2
    """The number of checkpoints to keep on disk; older ones are removed."""


class Config(Section):
    """A recipe."""

    model: ModelSection
    data: DataSection
    environment: EnvironmentUse = EnvironmentUse(use="turnwise.environments.environment:SingleTurn")
    """A reference to the environment, which answers the model. The default environment ends each conversation after one turn."""
    tools: list[ToolUse] = []
    """The tools that the model may call: references to typed functions and classes (docs/tools.md)."""
    mcp: McpSection = McpSection()
    tool_calls: ToolCallsSection = ToolCallsSection()
    engine: Annotated[
        Annotated[LocalEngineSection, Tag("local")]
        | Annotated[ScriptedEngineSection, Tag("scripted")]
        | Annotated[OpenAIEngineSection, Tag("openai")]
        | Annotated[VllmEngineSection, Tag("vllm")]
        | Annotated[SglangEngineSection, Tag("sglang")],
        by_name("local"),
    ] = LocalEngineSection()
    rollout_server: RolloutServerSection = RolloutServerSection()
    sampling: SamplingSection = SamplingSection()
    limits: LimitsSection = LimitsSection()
    tokenization_sanity_check: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """How the tokens of a finished conversation are compared with the chat template's rendering of the same messages. `strict`:
    token by token. `ignore_strippable`: without white space. `disable`: not at all. Conversations with differences are counted
    in the metric `template_mismatch` (docs/tokens.md)."""
    thinking: Literal["keep", "branch", "strip_at_user"] = "keep"
    """What happens to the reasoning of earlier turns when a conversation continues. `keep`: it stays in the prompt. `branch`:
    where the chat template leaves it out, a new segment (token sequence) without it begins. `strip_at_user`: at every user
    message, a new segment without it begins."""
    use_inference_chat_template: bool = False
    """verl's name for `thinking: branch`: the model is trained on the prompts that the chat template makes at inference, without
    the reasoning of earlier turns."""
    tool_format: NonEmpty = "auto"
    """The format in which the model writes tool calls. `auto`: taken from the chat template (docs/tool_calls.md)."""
    reward: RewardSection = RewardSection()
    credit: Annotated[AnyCredit, by_name("auto")] = AutoCreditSection()
    critic: CriticSection = CriticSection()
    loss: Annotated[
        Annotated[PpoClipSection, Tag("ppo_clip")]
        | Annotated[GspoSection, Tag("gspo")]
        | Annotated[CispoSection, Tag("cispo")]
        | Annotated[SapoSection, Tag("sapo")]
        | Annotated[ReinforceSection, Tag("reinforce")],
        by_name("ppo_clip"),
    ] = PpoClipSection()
    reference: ReferenceSection = ReferenceSection()
    correction: CorrectionSection = CorrectionSection()
    loss_mask: Use = Use(use="all")
    """The turns to train on: `all`, `last_turn`, `after_last_user`, `last_round`, or a reference to a function that returns the
    weight of a turn in the loss (docs/loss_masks.md)."""
    train: TrainSection = TrainSection()
    eval: EvaluationSection = EvaluationSection()
    rollout: RolloutSection = RolloutSection()
    sft: SftSection = SftSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    record: RecordSection = RecordSection()
    health: HealthSection = HealthSection()
    loggers: list[LoggerSection] = []
    """Experiment trackers that receive the metrics, such as `[wandb, tensorboard]`. The run's directory has all metrics without
    them, too (docs/loggers.md)."""
    trace: TraceSection = TraceSection()
    max_concurrent: Positive = 256
    """The number of conversations that run at the same time."""
    output: NonEmpty = "runs/latest"
    """The directory to which the run writes metrics, trajectories and checkpoints."""
    seed: int = 0
    """The seed of all random numbers, for the order of rows and for sampling."""
    deterministic: bool = False
    """Whether two runs with the same seed give bit-identical metrics (except times). The run then uses the CPU with one thread,
    and is slower."""
    resume: Literal["never", "auto"] = "never"
    """Whether to resume the run in `output`. `auto`: continue after its newest checkpoint, or start a run if there is no
    checkpoint. `never`: start a new run."""
    resume_changes: list[str] = []
    """The options that you change on purpose when you resume a run, such as `[train.lr]` (docs/record.md)."""
    override_checks: list[str] = []
    """The checks of the chat template that may fail, such as `[headers, tool turns]`: the run starts all the same, with a warning
    (docs/doctor.md). Without it, what `turnwise doctor` fails is refused."""
    replace: bool = False
    """Whether an earlier run in `output` is moved to another directory. False: a new run in the same directory is an error."""

    _origins: Origins = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Origins:
        """The values of the recipe that came from environment variables."""
        return self._origins

    def with_origins(self, origins: Origins) -> Config:
        """The same recipe, with `origins` as the places whose values came from environment variables."""
        copy = self.model_copy()
        copy._origins = origins
        return copy

    def written(self) -> dict[str, Any]:
        """The options as plain data, as they are written into files and sent to experiment trackers: with `${NAME}` in place of
        what came from an environment variable."""
        return with_references(self.model_dump(mode="json"), self._origins)

    def with_known_steps(self, rows: int) -> Config:
        """The recipe with `train.steps` in place of `train.epochs`. `rows` is the number of rows of `data.train`."""
        train = self.train
        if train.epochs is None:
            return self
        steps = steps_of_epochs(train.epochs, rows, train.batch_size)
        return self.model_copy(update={"train": train.model_copy(update={"steps": steps, "epochs": None})})

    @property
    def exact(self) -> bool:
        """Whether trainer and engine give the same log-probabilities up to the rounding of float32."""
        return self.model.exact and self.cluster.fsdp.param_dtype is None

    @property
    def runs_conversations_elsewhere(self) -> str | None:
        """The option by which conversations run in other processes than that of the command; None if they run in it."""
        if self.rollout_server.url is not None:
            return "rollout_server.url"
        return "cluster.launcher=ray" if self.cluster.launcher == "ray" else None

    @model_validator(mode="before")
    @classmethod
    def _expand_names(cls, tree: Any) -> Any:
        """`credit: grpo` is short for `credit: {name: grpo}`, as for each section that is chosen by name."""
        if not isinstance(tree, Mapping):
            return tree
        short = {key: {"name": tree[key]} for key in ("credit", "loss", "engine") if isinstance(tree.get(key), str)}
        return {**tree, **short}

    @model_validator(mode="before")
    @classmethod
    def _expand_inference_template(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping) or tree.get("use_inference_chat_template") is not True:
            return tree
        if tree.get("thinking", "branch") != "branch":
            raise PydanticCustomError(
                "thinking",
                "use_inference_chat_template=true means thinking=branch, and the recipe says thinking={thinking}: remove one",
                {"thinking": tree["thinking"]},
            )
        return {**tree, "thinking": "branch"}

    @field_validator("override_checks")
    @classmethod
    def _known_checks(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in OVERRIDABLE_CHECKS:
                message = (
                    f"there is no check {name!r} that can be overridden; there are: {', '.join(OVERRIDABLE_CHECKS)}"
                    f"{nearest(name, OVERRIDABLE_CHECKS)}"
                )
                raise PydanticCustomError("override_checks", "{message}", {"message": message})
        return names

    @field_validator("loss_mask")
    @classmethod
    def _known_loss_mask(cls, use: Use) -> Use:
        if ":" not in use.use and use.use not in LOSS_MASKS:
            message = (
                f"there is no loss mask of this name; the loss masks are {', '.join(LOSS_MASKS)}, or path/to/file.py:function "
                f"for your own function{nearest(use.use, LOSS_MASKS)}"
            )
            raise PydanticCustomError("loss_mask", "{message}", {"message": message})
        if use.use in LOSS_MASKS and use.arguments:
            raise PydanticCustomError(
                "loss_mask", "the loss mask {name} takes no arguments: remove them", {"name": use.use}
            )
        return use
