"""The schema of a recipe: `Config`, and the sections about data, conversations, rewards, evaluation and the record.

There is one schema, and docs/recipes.md lists the options from it: every option, its default and its meaning. The sections
about learning are in `algorithm`, those about sampling and processes in `engines`. `recipe` reads recipe files;
`train_checks`, `engine_checks` and `sft_checks` refuse options without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from turnwise.errors import nearest
from turnwise.options.algorithm import (
    ESTIMATORS,
    LOSSES,
    AutoCredit,
    CorrectionSection,
    CreditSection,
    CriticSection,
    LoraSection,
    LossSection,
    PpoClip,
    ReferenceSection,
    SftSection,
    TrainSection,
    steps_of_epochs,
)
from turnwise.options.engines import (
    AnyEngine,
    ClusterSection,
    EvaluationSamplingSection,
    LimitsSection,
    LocalEngineSection,
    RolloutServerSection,
    SamplingSection,
)
from turnwise.options.environment_values import Origins, with_references
from turnwise.options.policies import PolicySection, expand_policies
from turnwise.options.section import (
    NonEmpty,
    NotNegative,
    OneOf,
    PathText,
    Positive,
    Seconds,
    Section,
    Use,
    by_name,
    changed_options,
    expand_format,
    expand_reference,
    named,
    short_for,
)
from turnwise.options.teacher import TeacherSection

# model and data


class QuantizationSection(Section):
    """Weights in 4 bits under an adapter (QLoRA): the linear layers of the model are quantized by bitsandbytes when it is loaded
    (docs/memory.md)."""

    bits: Literal[4] | None = None
    """4: linear layers under an adapter (`model.lora`) have 4 bits per weight."""
    type: Literal["nf4", "fp4"] = "nf4"
    """`nf4`: quantiles of a normal distribution. `fp4`: floating point."""
    double: bool = True
    """Quantize the scales, too."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`quantization: 4` is `{bits: 4}`."""
        return {"bits": value} if isinstance(value, int) else value


class ModelSection(Section):
    """The model that is trained."""

    path: PathText
    """Model directory or hub name."""
    gguf_file: NonEmpty | None = None
    """A GGUF file in `model.path`, dequantized once into the cache (docs/memory.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU (from Ampere on), with a float32 copy in the optimizer; float32 on a CPU, with autocast or
    several ranks."""
    device: NonEmpty = "auto"
    """`cpu`, `cuda`, `cuda:1`. `auto`: a GPU if there is one."""
    autocast: bool = False
    """Matrix products in bfloat16 with float32 parameters."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time, the same result."""
    kernels: Literal["auto", "liger", "none"] = "auto"
    """What computes RMSNorm, rotary embeddings and SwiGLU on CUDA: `liger`, the kernels of liger-kernel (`turnwise[liger]`);
    `none`, torch. `auto`: `liger` where it is installed and runs."""
    chat_template_kwargs: dict[NonEmpty, Any] = {}
    """More arguments of the chat template, such as `{enable_thinking: false}`; a row's column `chat_template_kwargs`
    goes before."""
    router_replay: bool = False
    """Mixture of experts: train with the experts chosen while sampling (docs/losses.md)."""
    lora: LoraSection = LoraSection()
    quantization: QuantizationSection = QuantizationSection()

    _expand = short_for("path")

    @model_validator(mode="after")
    def _autocast_needs_float32(self) -> Self:
        if self.autocast and self.dtype == "bfloat16":
            raise PydanticCustomError(
                "autocast",
                "model.autocast=true has no effect with model.dtype=bfloat16, because then everything is computed in bfloat16: "
                "remove one of them",
            )
        return self

    @property
    def exact(self) -> bool:
        """Whether everything is computed in float32: trainer and engine then give the same log-probabilities up to rounding."""
        return self.dtype != "bfloat16" and not self.autocast


class CurriculumSection(Section):
    """Skips rows that are too hard or too easy for the model at present. The pass rate of a row is the mean reward of its last
    group of trajectories. A row without a pass rate is never skipped. By default, `low` and `high` are null and no row is
    skipped."""

    low: float | None = None
    """Rows with at most this pass rate are skipped as too hard."""
    high: float | None = None
    """Rows with at least this pass rate are skipped as too easy."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Probability that such a row is used."""
    column: NonEmpty | None = None
    """Column with pass rates before training. Null: unknown until a row's first group."""


class DataSection(Section):
    """Each conversation starts from a row of the data."""

    train: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)] = "environment"
    """Training rows: a .jsonl or .parquet file, a directory of `datasets`, a hub name, or a list; `environment`,
    `environment:64`: the environment's rows; `empty:64`: 64 empty rows."""
    eval: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    """Held-out rows, in the same forms."""
    split: NonEmpty = "train"
    """The split of `data.train`."""
    eval_split: NonEmpty = "test"
    """The split of `data.eval`."""
    subset: NonEmpty | None = None
    """The configuration of a hub data set. Null: its default."""
    columns: dict[str, str] = {}
    """`{prompt: question}` uses the data's column `question` as `prompt`. `id` and `source` name rows and their kinds."""
    system_prompt: str | None = None
    """System message of prompts without one."""
    weights: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2)] | None = None
    """Weights of a list of data sets: `[2, 1]` takes two rows of the first for each of the second."""
    curriculum: CurriculumSection = CurriculumSection()
    shuffle: bool = True
    """A new random order in each pass. False: the order of the data."""
    max_rows: Positive | None = None
    """Most rows of `data.train` and of `data.eval`."""
    max_prompt_tokens: Positive | None = None
    """Rows with longer prompts (without tool schemas) are not used."""
    return_multi_modal_inputs: bool | None = None
    """Images are processed once, at the start, and kept as tensors."""
    escape_control_tokens: Literal["none", "tools", "all"] = "tools"
    """Whose texts cannot make control tokens such as `<|im_end|>`: `tools`, `all` (also users), `none`."""

    _expand = short_for("train")


# what answers the model


class EnvironmentUse(Use):
    """A reference to an environment."""

    thread: bool = False
    """Its `async` methods run in threads, so that they may block."""


class ToolUse(Section):
    """A tool: a typed function, or a class whose public methods are tools. Instead of `{use: text}` you can write only the
    text."""

    use: NonEmpty
    """The function or class."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class's constructor, called for each conversation."""
    timeout: Seconds | None = None
    """Seconds of an attempt. Null: the tool's own, or 30."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """Further attempts after an exception but ValueError. Null: the tool's own, or 0."""
    retry_timeouts: bool | None = None
    """Also after a timeout. Null: the tool's own, or false."""
    thread: bool | None = None
    """Async functions run in threads, so that they may block. Null: the tool's own, or false."""

    _expand = model_validator(mode="before")(expand_reference)


class McpSection(Section):
    """MCP servers."""

    servers: PathText | None = None
    """A JSON file with `mcpServers`."""
    select: list[str] | None = None
    """Names of the tools to offer."""
    also: list[Literal["resources", "prompts"]] = []
    """What becomes tools, too: `resources`, `prompts`."""
    use: NonEmpty = "turnwise.environments.mcp:McpServers"
    """The class that calls the servers."""
    timeout: Seconds = 30.0
    """Seconds of an attempt."""
    retries: Annotated[int, Field(ge=0)] = 0
    """Further attempts after a lost connection."""
    retry_timeouts: bool = False
    """Also after a timeout."""
    start_timeout: Seconds = 30.0
    """Seconds until a server has started and answered."""
    scope: Literal["run", "conversation"] = "run"
    """A `run`'s conversations share a session with a server, or each `conversation` has its own."""
    max_sessions: Positive | None = None
    """With `conversation`: most sessions at once; others wait."""
    titles: bool = True
    """Show the titles that the SDK makes of parameters' names."""


class ToolCallsSection(Section):
    """Options of all tools. How the model writes its calls is `tool_format`."""

    describe: Literal["template", "system"] = "template"
    """Who shows tools to the model: the chat `template`, or where it does not the `system` message."""
    constrain: bool = False
    """A grammar allows only calls of offered tools that fit their schema (docs/tool_calls.md)."""
    choice: Literal["auto", "required"] = "auto"
    """`required`: each turn is reasoning and calls, by a grammar."""
    max_parallel_calls: Positive | None = None
    """Most calls run in a turn; further ones get an error."""
    max_calls: Positive | None = None
    """Most calls in a conversation, also malformed ones; further ones are not run, and get an error."""
    max_tool_response_length: Positive | None = None
    """Longest result. Null: a million characters."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """The side that is cut."""
    tool_response_unit: Literal["characters", "tokens"] = "characters"
    """Unit of `max_tool_response_length`."""


# reward


class RewardUse(Use):
    """A reference to a reward function or to a class. An instance of the class is created once, with `arguments`, and is called
    like a function."""

    weight: float = 1.0
    """Factor of the function's result."""
    name: NonEmpty | None = None
    """Name in metrics and records. Null: that after the colon."""


class KlRewardSection(Section):
    """The KL divergence of the policy from the reference model as a part of the reward, instead of a term of the loss
    (docs/losses.md). An estimate of the divergence is subtracted from the reward before advantages are computed: for each token
    with `credit.name` `gae`, `bilevel_gae` or `reinforce_pp`; for each turn, as the sum over its tokens, with other
    estimators. The metrics of rewards do not contain it."""

    coef: NotNegative = 0.0
    """Weight of the divergence."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """`k1`, `k2` or `k3` (docs/losses.md#kl-divergence)."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Divergence per token, in nats, that an adaptive coefficient aims at."""
    horizon: Positive = 10000
    """Conversations in which it changes by at most 20 %."""


class RewardSection(Section):
    """Reward functions (docs/rewards.md)."""

    trajectory: list[RewardUse] = []
    """Functions called for each ended conversation; they return a number (docs/rewards.md)."""
    turns: list[RewardUse] = []
    """Functions called for each turn, also with `turn` and `index`."""
    group: list[RewardUse] = []
    """Functions called once per row, with lists; they return a list of numbers, or None."""
    batch: list[RewardUse] = []
    """The same, for all trajectories of a step, evaluation or rollout."""
    kl: KlRewardSection = KlRewardSection()
    timeout: Seconds | None = 120.0
    """Seconds of a call; of async functions: of all for a trajectory and its turns."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`reward: [f.py:g]`, or `reward: f.py:g`, is short for functions of one trajectory."""
        if isinstance(value, str):
            value = [value]
        return {"trajectory": value} if isinstance(value, list | tuple) else value

    @property
    def functions(self) -> list[RewardUse]:
        """The functions of all kinds, in the order in which they are built."""
        return [*self.trajectory, *self.turns, *self.group, *self.batch]


# record


class RecordSection(Section):
    """Which conversations are recorded (docs/record.md)."""

    every: Positive = 1
    """With 10, conversations of the steps 1, 10, 20 ... are recorded."""
    best_and_worst: Positive | None = None
    """Recorded per group: so many with the highest rewards, with the lowest, and failed. Null: all."""
    compression: Literal["none", "gzip"] = "none"
    """`gzip`: about 15 times smaller."""
    trainer_logprobs: bool = True
    """Record the trainer's log-probabilities beside the engine's."""


# loggers and traces


class LoggerSection(Section):
    """An experiment tracker that receives the metrics of the run. Instead of `{name: wandb}` you can write only `wandb`."""

    name: Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]
    """`tensorboard`, `wandb`, `mlflow`, `trackio` or `swanlab`; each is an extra: `pip install 'turnwise[wandb]'`."""
    project: NonEmpty | None = None
    """The project (mlflow: experiment). Null: `turnwise`."""
    run: NonEmpty | None = None
    """Name of the run. Null: that of the directory `output`."""
    conversations: Annotated[int, Field(ge=0)] = 8
    """Conversations sent of each step and evaluation."""
    arguments: dict[str, Any] = {}
    """More arguments of its start function: `wandb.init`, `trackio.init`, `swanlab.init`, `MlflowClient` (such as
    `tracking_uri`), `SummaryWriter`."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class TraceSection(Section):
    """Traces of conversations (docs/loggers.md)."""

    backend: Literal["jsonl", "mlflow", "weave", "otlp"] | None = None
    """`jsonl` (the run's `traces.jsonl`), `mlflow`, `weave`, or `otlp` (OpenTelemetry, at OTEL_EXPORTER_OTLP_ENDPOINT). Null:
    none."""
    conversations: Positive = 8
    """Traced conversations of each step: the first ones."""
    project: NonEmpty | None = None
    """The project (mlflow: experiment; otlp: service). Null: `turnwise`."""


# health

Share = Annotated[float, Field(ge=0, le=1)]
Above = Annotated[float, Field(gt=0)]

Monitor = Literal[
    "zero_std",
    "tool_use",
    "entropy",
    "duplicates",
    "length",
    "ratio",
    "mismatch",
    "kl",
    "reward_correlation",
    "reward_drop",
    "teacher_gap",
    "teacher_growth",
    "failed",
    "cut",
    "slow_rank",
    "constant_reward",
]


class HealthSection(Section):
    """Monitors (docs/health.md). Null: off."""

    window: Positive = 10
    """Steps over which the mean is taken."""
    zero_std: Share | None = 0.95
    """Most `groups/zero_std`."""
    tool_use: Share | None = 0.2
    """Fewest `tool_calls/mean`, as a share of the first steps."""
    entropy: Share | None = 0.05
    """Least `entropy`, as a share of the first steps."""
    duplicates: Share | None = 0.99
    """Most `groups/duplicates`."""
    length: Annotated[float, Field(gt=1)] | None = 3.0
    """Most `tokens/sampled`, as a multiple of the first steps."""
    ratio: Above | None = 20.0
    """Largest `ratio/max_deviation`."""
    mismatch: Above | None = 0.1
    """Largest `correction/k3`."""
    kl: Above | None = 1.0
    """Largest `kl`."""
    reward_correlation: Annotated[float, Field(ge=-1, le=1)] | None = -0.5
    """Least `reward/correlation`."""
    reward_drop: Above | None = 0.5
    """Largest fall of `reward/mean` from its best window, in standard deviations of the rewards (`reward/std`)."""
    teacher_gap: Above | None = 0.001
    """Least `teacher/divergence` in the first steps."""
    teacher_growth: Annotated[float, Field(gt=1)] | None = 2.0
    """Largest `teacher/divergence`, as a multiple of the first steps."""
    failed: Share | None = 0.2
    """Most `failed`."""
    cut: Share | None = 0.25
    """Most conversations that a limit ends in the middle of an answer (`stop/length`, `stop/max_tokens`, `stop/max_response`)."""
    slow_rank: Annotated[float, Field(gt=1)] | None = 3.0
    """Largest `ranks/slowest`."""
    constant_reward: Positive | None = 3
    """Warn after so many first steps with equal rewards in each group."""
    stop: list[Monitor] = []
    """Monitors that stop the run, such as `[zero_std, failed]`."""

    @model_validator(mode="after")
    def _stops_have_limits(self) -> HealthSection:
        for name in self.stop:
            if getattr(self, name) is None:
                raise PydanticCustomError(
                    "health_stop",
                    "stop contains {name}, and {name} is null, which turns this monitor off: give it a limit, or remove it from "
                    "stop",
                    {"name": name},
                )
        return self


# evaluation, rollout, checkpoint, and the complete recipe

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
    "memory",
)
"""The checks of `turnwise doctor` that the start of a run makes too, by name."""
LOSS_MASKS = ("all", "last_turn", "after_last_user", "last_round", "without_failed_calls", "without_void_turns")
"""The rules of `rewards.turn_weights`, by name."""


class EvaluationSection(Section):
    """Evaluations, in `turnwise train` and `turnwise eval`."""

    max_rows: Positive | None = None
    """Most held-out rows."""
    samples_per_row: Positive = 1
    """Conversations per row."""
    every: Annotated[int, Field(ge=0)] = 0
    """Training steps between evaluations. 0: only before and after training."""
    pass_reward: float = 1.0
    """Least reward that passes, for pass rate, pass@k and pass^k."""
    sampling: EvaluationSamplingSection = EvaluationSamplingSection()
    """How tokens are sampled in evaluations: `temperature`, `top_p`, `top_k`, `min_p`. Null: the value of the same option in
    `sampling`. `eval.sampling.temperature=0` takes the most likely token."""


class RolloutSection(Section):
    """`turnwise rollout`: conversations without training."""

    max_rows: Positive | None = None
    """Most rows."""
    samples_per_row: Positive = 1
    """Conversations per row."""


class CheckpointSection(Section):
    """Checkpoints, from which a run is resumed."""

    every: Positive | None = None
    """Steps between checkpoints. Null: at most 3 % of the time (docs/record.md)."""
    keep: Positive = 2
    """Checkpoints kept."""
    background: bool = False
    """Write while training goes on, from copies in the CPU's memory."""
    best: NonEmpty | None = None
    """A metric of evaluations, such as `reward/mean`, whose best checkpoint is kept, as `best`."""


class Chosen(dict[str, Any]):
    """What a recipe says of the options that were chosen for the machine. Recipes with equal values are equal, whatever it is."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chosen)

    __hash__ = None


class Config(Section):
    """A recipe."""

    model: ModelSection
    data: DataSection = DataSection()
    environment: EnvironmentUse = EnvironmentUse(use="turnwise.environments.environment:SingleTurn")
    """What answers the model. The default ends after one turn."""
    tools: list[ToolUse] = []
    """Typed functions and classes that the model may call (docs/tools.md)."""
    mcp: McpSection = McpSection()
    tool_calls: ToolCallsSection = ToolCallsSection()
    policies: Annotated[list[PolicySection], BeforeValidator(expand_policies)] = []
    """Policies of agents (docs/agents_in_episodes.md), by name: frozen, `{opponent: runs/first/checkpoint}`, or trained,
    `{searcher: {train: true}}`."""
    engine: Annotated[AnyEngine, by_name("local")] = LocalEngineSection()
    rollout_server: RolloutServerSection = RolloutServerSection()
    sampling: SamplingSection = SamplingSection()
    limits: LimitsSection = LimitsSection()
    tokenization_sanity_check: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """How tokens are compared with the template's rendering: `strict`; `ignore_strippable` (without white space); `disable`
    (docs/tokens.md)."""
    thinking: Literal["keep", "branch", "strip_at_user"] = "keep"
    """Reasoning of earlier turns: `keep`; `branch`: a new segment where the template drops it; `strip_at_user`: at every user
    message (docs/tokens.md)."""
    use_inference_chat_template: bool = False
    """verl's name for `thinking: branch`."""
    tool_format: Annotated[Use, BeforeValidator(expand_format)] = Use(use="auto")
    """How the model writes calls: `auto` (as the template), a format's name, or one described by hand (docs/tool_calls.md)."""
    reward: RewardSection = RewardSection()
    credit: Annotated[CreditSection, OneOf(ESTIMATORS, default="auto")] = AutoCredit()
    critic: CriticSection = CriticSection()
    loss: Annotated[LossSection, OneOf(LOSSES, default="ppo_clip")] = PpoClip()
    reference: ReferenceSection = ReferenceSection()
    teacher: TeacherSection = TeacherSection()
    correction: CorrectionSection = CorrectionSection()
    loss_mask: Use = Use(use="all")
    """Turns to train on: `all`, `last_turn`, `after_last_user`, `last_round`, `without_failed_calls`,
    `without_void_turns`, or a function (docs/loss_masks.md)."""
    train: TrainSection = TrainSection()
    eval: EvaluationSection = EvaluationSection()
    rollout: RolloutSection = RolloutSection()
    sft: SftSection = SftSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    record: RecordSection = RecordSection()
    health: HealthSection = HealthSection()
    loggers: list[LoggerSection] = []
    """Trackers, such as `[wandb, tensorboard]` (docs/loggers.md)."""
    trace: TraceSection = TraceSection()
    max_concurrent: Positive = 256
    """Conversations at the same time."""
    output: PathText = "runs/latest"
    """The run's directory: metrics, trajectories, checkpoints."""
    seed: int = 0
    """Seed of all random numbers, for rows and sampling."""
    deterministic: bool = False
    """The same seed gives bit-identical metrics: CPU, one thread, slower."""
    resume: Literal["never", "auto"] = "never"
    """`auto`: continue after the newest checkpoint in `output`, if any. `never`: a new run."""
    resume_changes: list[str] = []
    """Options changed on purpose at a resume (docs/record.md)."""
    override_checks: list[str] = []
    """Checks of `turnwise doctor` that only warn, such as `[headers, tool turns]`."""
    replace: bool = False
    """Move an earlier run in `output` away. False: it is an error."""

    _origins: Origins = PrivateAttr(default_factory=dict)
    _chosen: Chosen = PrivateAttr(default_factory=lambda: Chosen())

    @property
    def chosen(self) -> Mapping[str, Any]:
        """The options that were chosen for the machine, with what the recipe says: `{"model.dtype": "auto"}`."""
        return self._chosen

    def with_chosen(self, chosen: Mapping[str, Any]) -> Config:
        """The same recipe, of which these options were chosen for the machine."""
        copy = self.model_copy()
        copy._chosen = Chosen(chosen)
        return copy

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
    def trained_policies(self) -> list[PolicySection]:
        """The policies that are trained beside the model of the section `model`."""
        return [policy for policy in self.policies if policy.train]

    @property
    def served_policies(self) -> list[PolicySection]:
        """The trained policies that the servers of the engine sample for: all but those with an engine of their own."""
        return [policy for policy in self.trained_policies if self.engine.servers and policy.memory_gb is None]

    def of_policy(self, policy: PolicySection) -> Config:
        """The recipe as a trained policy reads it: with its adapter, loss, credit, learning rate and sampling."""
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={} if policy.lora is None else {"lora": policy.lora}),
                "loss": self.loss if policy.loss is None else policy.loss,
                "credit": self.credit if policy.credit is None else policy.credit,
                "train": self.train.model_copy(update={} if policy.lr is None else {"lr": policy.lr}),
                "sampling": self.sampling.model_copy(update=policy.sampling),
            }
        )

    @property
    def exact(self) -> bool:
        """Whether trainer and engine give the same log-probabilities up to the rounding of float32."""
        return self.model.exact and self.cluster.fsdp.param_dtype is None and self.engine.quantization is None

    @property
    def needs_correction(self) -> bool:
        """Whether `correction.action` is `truncate` where the recipe says nothing: a quantized engine samples from another
        distribution than the trainer computes, also with the same weights, and the loss has a policy gradient to correct."""
        if self.engine.quantization is None or changed_options(self.sft):
            return False
        learns = self.credit.name != "none" or (self.teacher.on and self.teacher.signal == "sampled")
        return learns and "action" not in self.correction.model_fields_set

    @property
    def runs_conversations_elsewhere(self) -> str | None:
        """The option by which conversations run in other processes than that of the command; None if they run in it."""
        if self.rollout_server.url is not None:
            return "rollout_server.url"
        return "cluster.launcher=ray" if self.cluster.launcher == "ray" else None

    @model_validator(mode="before")
    @classmethod
    def _expand_names(cls, tree: Any) -> Any:
        """`credit: grpo` is short for `credit: {name: grpo}`, as for each section that is chosen by name (`named`)."""
        if not isinstance(tree, Mapping):
            return tree
        short = {key: named(tree[key]) for key in ("credit", "loss") if key in tree}
        if isinstance(tree.get("engine"), str):
            short["engine"] = {"name": tree["engine"]}
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

    @field_validator("policies")
    @classmethod
    def _names_of_policies(cls, policies: list[PolicySection]) -> list[PolicySection]:
        names = [policy.name for policy in policies]
        if (double := next((name for name in names if names.count(name) > 1), None)) is not None:
            message = f"two policies have the name {double!r}: give each a name of its own"
            raise PydanticCustomError("policies", "{message}", {"message": message})
        trained = [policy.name for policy in policies if policy.train]
        folders = [name.lower() for name in trained]
        if alike := [name for name in trained if folders.count(name.lower()) > 1]:
            message = (
                f"the trained policies {' and '.join(map(repr, alike[:2]))} would write one adapter where file names ignore "
                f"case: give them different names"
            )
            raise PydanticCustomError("policies", "{message}", {"message": message})
        return policies

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
