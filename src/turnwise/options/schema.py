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
from turnwise.options.policies import FrozenPolicySection, expand_policies
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
    expand_format,
    expand_reference,
    named,
    short_for,
)
from turnwise.options.teacher import TeacherSection

# model and data

_USUAL_RANK = 16
"""The rank of `model.lora: true`."""


class LoraSection(Section):
    """A LoRA adapter: small matrices that are added to the layers of the model are trained, and the model's own weights are
    frozen."""

    rank: Positive | None = None
    """The rank of a LoRA adapter, which is trained instead of the model's weights (docs/memory.md). A larger rank has more
    parameters; 16 is common. Null: there is no adapter, and all weights are trained."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The scale of the adapter: the product of its two matrices is multiplied by `model.lora.alpha` / `model.lora.rank`."""
    target_modules: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    """The linear layers that get an adapter: their names, or the ends of their names, such as `[q_proj, v_proj]`. Null: all
    linear layers except the output layer, routers and gates of experts, and layers whose weight a kernel reads
    (docs/memory.md)."""
    rslora: bool = False
    """Whether the scale of the adapter is `model.lora.alpha` / the square root of `model.lora.rank` (rank-stabilised LoRA)
    instead of `model.lora.alpha` / `model.lora.rank`."""
    dora: bool = False
    """Whether the adapter also trains the length of each weight vector (DoRA). This is slower."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`lora: true` is an adapter with the usual rank, and `lora: 8` one with this rank."""
        if isinstance(value, bool):
            return {"rank": _USUAL_RANK} if value else {}
        return {"rank": value} if isinstance(value, int) else value


class QuantizationSection(Section):
    """Weights in 4 bits under an adapter (QLoRA): the linear layers of the model are quantized by bitsandbytes when it is loaded
    (docs/memory.md)."""

    bits: Literal[4] | None = None
    """4: the linear layers of the model have 4 bits for each weight, and an adapter (`model.lora`) is trained on them. Null: the
    weights are not quantized."""
    type: Literal["nf4", "fp4"] = "nf4"
    """The kind of numbers of 4 bits: `nf4` has levels at the quantiles of a normal distribution, `fp4` is a floating-point
    number."""
    double: bool = True
    """Whether the scales of the quantized weights (one for 64 weights) are quantized as well, to 8 bits."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`quantization: 4` is `{bits: 4}`."""
        return {"bits": value} if isinstance(value, int) else value


class ModelSection(Section):
    """The model that is trained."""

    path: PathText
    """The model to train: a model directory, or a name on the Hugging Face hub."""
    gguf_file: NonEmpty | None = None
    """The name of a GGUF file in the directory `model.path`. Its weights are dequantized once, into a model directory in the
    cache, which the run uses instead (docs/memory.md). Null: the directory has safetensors files."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The data type of the model's parameters. `auto` is bfloat16 on a GPU (of NVIDIA's, from Ampere on), and float32 on a CPU,
    with autocast and with several ranks. With bfloat16, the optimizer also keeps a float32 copy of the parameters, unless
    `train.optimizer.master_weights` is changed."""
    device: NonEmpty = "auto"
    """The device of the model: `cpu`, `cuda`, `cuda:1`. `auto` is CUDA if there is a GPU, else the CPU."""
    autocast: bool = False
    """Whether matrix products are computed in bfloat16 while the parameters stay in float32 (mixed precision), in training and
    in the embedded engine. This is faster on GPUs, and on CPUs with bfloat16 instructions. Gradients, the optimizer, the output
    layer and log-probabilities use float32; the engine keeps a bfloat16 copy of the other weights."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes the activations inside each layer again, instead of keeping them in memory. A training
    step then needs much less memory and about a third more time; the result is the same."""
    chat_template_kwargs: dict[NonEmpty, Any] = {}
    """Further arguments of the chat template, such as `{enable_thinking: false}` for Qwen3 (docs/tokens.md). A row's column
    `chat_template_kwargs` has arguments for this row, which replace those of the same name. An argument that the template never
    reads is an error."""
    router_replay: bool = False
    """For a mixture of experts: whether training uses the experts that were chosen while sampling, token by token, so that
    rounding cannot choose others (docs/losses.md). The engine then records them with each conversation."""
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
    """Rows with at most this pass rate are too hard and are skipped. Null: no row is too hard."""
    high: float | None = None
    """Rows with at least this pass rate are too easy and are skipped. Null: no row is too easy."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The probability that a row that is too hard or too easy is used nevertheless, so that its pass rate is measured again."""
    column: NonEmpty | None = None
    """The column of the data with the pass rate of each row before training, for example measured with `turnwise rollout`. Null:
    a row has no pass rate until its first group has ended."""


class DataSection(Section):
    """The data of a run. Each conversation starts from a row of the data."""

    train: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)] = "environment"
    """The training rows: a .jsonl or .parquet file, a directory saved by `datasets`, or a name on the Hugging Face hub; or a
    list of these. `environment`: the rows that the environment brings (docs/environment_libraries.md), and `environment:64`
    those of the first 64. `empty:64` is 64 rows without columns, for environments that write the prompts themselves."""
    eval: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    """The held-out rows for evaluations, in the same forms as `data.train`. Null: there are no evaluations."""
    split: NonEmpty = "train"
    """The split of `data.train` to use, if `data.train` is a data set with splits."""
    eval_split: NonEmpty = "test"
    """The split of `data.eval` to use, if `data.eval` is a data set with splits."""
    subset: NonEmpty | None = None
    """The configuration to use, if a data set of the Hugging Face hub has several configurations. Null: its default
    configuration."""
    columns: dict[str, str] = {}
    """New names for columns of the data. With `{prompt: question}`, the column `question` of the data is used as the column
    `prompt`."""
    system_prompt: str | None = None
    """A system message to add to prompts that have no system message. Null: no system message is added."""
    weights: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2)] | None = None
    """The weights of the data sets if `data.train` is a list: `[2, 1]` takes two rows of the first data set for each row of the
    second. Each data set is shuffled and repeated separately. Null: all rows are used as one data set."""
    curriculum: CurriculumSection = CurriculumSection()
    shuffle: bool = True
    """Whether rows are used in random order, with a new order in each pass over the data. False: in the order of the data."""
    max_rows: Positive | None = None
    """The number of rows to use from each of `data.train` and `data.eval`, counted from the first row. Null: all rows."""
    max_prompt_tokens: Positive | None = None
    """The largest number of tokens of a prompt, counted after the chat template is applied, without the schemas of tools. Rows
    with longer prompts are not used. Null: all rows are used."""
    return_multi_modal_inputs: bool | None = None
    """For rows with images: true runs the processor on each row once, at the start, and keeps the tensors with the row (as
    `multi_modal_inputs`). False or null: each conversation processes its own images."""
    escape_control_tokens: Literal["none", "tools", "all"] = "tools"
    """In whose messages control tokens of the model that stand as text, such as `<|im_end|>` in a web page, are kept text: a
    space is put into them. `tools`: results of tools. `all`: also messages of users. `none`: they become control tokens."""


# what answers the model


class EnvironmentUse(Use):
    """A reference to an environment."""

    thread: bool = False
    """Whether the environment's `async` methods run in a thread, one for each conversation, so that they may block."""


class ToolUse(Section):
    """A tool: a typed function, or a class whose public methods are tools. Instead of `{use: text}` you can write only the
    text."""

    use: NonEmpty
    """The function or class: `package.module:name` or `path/to/file.py:name`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class's constructor, which is called for each conversation."""
    timeout: Seconds | None = None
    """The time limit of each attempt of a call, in seconds. Null: the tool's own limit, or 30 seconds."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """The number of further attempts after an exception that is not a ValueError. Null: the tool's own number, or 0."""
    retry_timeouts: bool | None = None
    """Whether a call that timed out is attempted again, too. Null: the tool's own setting, or false."""
    thread: bool | None = None
    """Whether async functions run in threads, so that they may block. Null: the tool's own setting, or false."""

    _expand = model_validator(mode="before")(expand_reference)


class McpSection(Section):
    """Tools of MCP servers."""

    servers: PathText | None = None
    """A JSON file with `mcpServers`: the MCP servers whose tools the model may call. Null: no MCP servers."""
    select: list[str] | None = None
    """The names of the tools to offer. Null: all tools of the servers."""
    use: NonEmpty = "turnwise.environments.mcp:McpServers"
    """The class that calls the MCP servers: the default, or a reference to a subclass of it that converts results differently."""
    timeout: Seconds = 30.0
    """The time limit of each attempt of a call to an MCP server, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 0
    """The number of further attempts if the connection to an MCP server is lost during a call."""
    retry_timeouts: bool = False
    """Whether a call to an MCP server that timed out is attempted again, too."""
    start_timeout: Seconds = 30.0
    """The time that an MCP server has to start and to answer for the first time, in seconds."""
    scope: Literal["run", "conversation"] = "run"
    """Who has a session with an MCP server. `run`: all conversations share one. `conversation`: each has its own, and a process
    of its own for a server with a `command`, from its first call to its end."""
    max_sessions: Positive | None = None
    """With `mcp.scope: conversation`, how many conversations may have sessions at once; calls of others wait. Null: all."""
    titles: bool = True
    """Whether the model sees the titles in the servers' schemas, which the SDK makes of the names of parameters."""


class ToolCallsSection(Section):
    """Options that hold for all tools."""

    describe: Literal["template", "system"] = "template"
    """Who shows the tools to the model. `template`: the chat template. `system`: where the template does not show tools, their
    schemas are written into the system message, in the form of `tool_format`."""
    constrain: bool = False
    """Whether a grammar makes malformed calls impossible: from the opening mark of a call on, only the name of an offered tool
    and arguments that follow its schema can be sampled (docs/tool_calls.md)."""
    choice: Literal["auto", "required"] = "auto"
    """`required`: while tools are on offer, each turn is reasoning and one or more calls, by a grammar. `auto`: the model
    chooses."""
    max_parallel_calls: Positive | None = None
    """The most tool calls that are run in one turn; each further call gets an error as its result. Null: all calls are run."""
    max_tool_response_length: Positive | None = None
    """The longest text of a tool result, in characters or tokens (`tool_calls.tool_response_unit`); longer texts are truncated.
    Null: texts are truncated at a million characters."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Where text is removed from a tool result that is too long. `left` keeps the end of the text, `right` keeps the beginning,
    `middle` keeps half of the allowed length from the beginning and half from the end."""
    tool_response_unit: Literal["characters", "tokens"] = "characters"
    """The unit of `tool_calls.max_tool_response_length`."""


# reward


class RewardUse(Use):
    """A reference to a reward function or to a class. An instance of the class is created once, with `arguments`, and is called
    like a function."""

    weight: float = 1.0
    """The factor by which the function's result is multiplied before it is added to the reward."""
    name: NonEmpty | None = None
    """The function's name in metrics and records. Null: the name after the colon of the reference."""


class KlRewardSection(Section):
    """The KL divergence of the policy from the reference model as a part of the reward, instead of a term of the loss
    (docs/losses.md). An estimate of the divergence is subtracted from the reward before advantages are computed: for each token
    with `credit.name` `gae`, `bilevel_gae` or `reinforce_pp`; for each turn, as the sum over its tokens, with other
    estimators. The metrics of rewards do not contain it."""

    coef: NotNegative = 0.0
    """The weight of the KL divergence in the reward. 0: the reward has no KL divergence. The reference model is that of the
    section `reference`."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator of the KL divergence in the reward, from `d`, the log-probability of a token under the policy minus its
    log-probability under the reference model. `k1`: d; only with this estimator is the gradient that of the KL divergence. `k2`:
    d^2 / 2. `k3`: exp(-d) + d - 1."""
    target: Annotated[float, Field(gt=0)] | None = None
    """The KL divergence of a token, in nats, that an adaptive coefficient aims at. `reward.kl.coef` is then the coefficient of
    the first step; it rises while the divergence is above the target, and falls while it is below. Null: the coefficient is
    constant."""
    horizon: Positive = 10000
    """How slowly an adaptive coefficient changes: the number of conversations in which it changes by at most a factor of about
    1.2."""


class RewardSection(Section):
    """Reward functions. Their results are added to the rewards that the environment gives."""

    trajectory: list[RewardUse] = []
    """Reward functions of one trajectory. Each function is called for each conversation, when the conversation has ended, and
    returns a number. The names of its parameters choose its arguments, such as `trajectory`, `completion` or a column of the row
    (docs/rewards.md)."""
    turns: list[RewardUse] = []
    """Reward functions of one turn. Each function is called for each turn of a conversation and returns a number. It can have the
    parameters `turn` and `index`, and all parameters of a function in `reward.trajectory`."""
    group: list[RewardUse] = []
    """Reward functions of a group. Each function is called once for each row. Its arguments are lists with one item for each
    trajectory of the row that did not fail, such as `trajectories` or `completions`. It returns a list of numbers. None in the
    list: the function does not apply to this trajectory."""
    batch: list[RewardUse] = []
    """Reward functions of the batch. Each function is called once for all trajectories that did not fail of a training step, an
    evaluation or a rollout, when all conversations have ended. It has the parameters and the result of a function in
    `reward.group`."""
    kl: KlRewardSection = KlRewardSection()
    timeout: Seconds | None = 120.0
    """The time limit of reward functions, in seconds. Async functions: one limit for all functions of a trajectory and its turns
    together, and one limit for each call of a function of a group or of the batch. Sync functions: one limit for each call. A
    call that exceeds its limit is interrupted and fails. Null: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`reward: [f.py:g]`, or `reward: f.py:g`, is short for functions of one trajectory."""
        if isinstance(value, str):
            value = [value]
        return {"trajectory": value} if isinstance(value, list | tuple) else value


# record


class RecordSection(Section):
    """Which conversations are written to the files of a run (docs/record.md). Metrics are always complete."""

    every: Positive = 1
    """The number of training steps between two steps whose conversations are recorded: with 10, those of the steps 1, 10, 20 and
    so on, and of the last step. 1: the conversations of all steps are recorded."""
    best_and_worst: Positive | None = None
    """How many conversations of each group of a training step are recorded: this number with the highest rewards, this number
    with the lowest rewards, and at most this number of conversations that failed. Null: all conversations of a group are
    recorded."""
    compression: Literal["none", "gzip"] = "none"
    """How `trajectories.jsonl` and `eval_trajectories.jsonl` are compressed. `gzip`: the files are about 15 times smaller, and
    their names end in `.jsonl.gz`. All commands of turnwise read them, and decompress only a part of the file for one
    conversation."""
    trainer_logprobs: bool = True
    """Whether the trainer's log-probability of each trained token is recorded beside the engine's, so that `turnwise view` can
    show their ratio."""


# loggers and traces


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
    "teacher_gap",
    "teacher_growth",
    "failed",
    "constant_reward",
]


class HealthSection(Section):
    """Monitors of a training run. Each compares a metric with a limit, and warns once in a run (docs/health.md)."""

    window: Positive = 10
    """The number of latest steps whose mean is compared with the limits. `tool_use`, `entropy`, `length` and
    `teacher_growth` compare this mean with the mean of the same number of steps at the start of the run."""
    zero_std: Share | None = 0.95
    """The largest share of groups without reward differences (`groups/zero_std`). Null: no warning."""
    tool_use: Share | None = 0.2
    """The smallest number of tool calls of a conversation, as a share of the number in the first steps (`tool_calls/mean`). Null:
    no warning."""
    entropy: Share | None = 0.05
    """The smallest entropy of the policy, as a share of the entropy in the first steps (`entropy`). A policy that has collapsed
    gives the same answers again and again. Null: no warning."""
    duplicates: Share | None = 0.99
    """The largest share of conversations whose answers equal those of another conversation of the group (`groups/duplicates`).
    Null: no warning."""
    length: Annotated[float, Field(gt=1)] | None = 3.0
    """The largest number of sampled tokens of a conversation, as a multiple of the number in the first steps (`tokens/sampled`).
    Null: no warning."""
    ratio: Above | None = 20.0
    """The largest value of `ratio/max_deviation`: the difference from 1 of the probability ratio of trainer to engine. Null: no
    warning."""
    mismatch: Above | None = 0.1
    """The largest KL divergence of the trainer's policy from the engine's, in nats (`correction/k3`). It is only known with
    `correction.action`. Null: no warning."""
    kl: Above | None = 1.0
    """The largest KL divergence in nats (metric `kl`): from the reference model with `loss.kl_coef`, otherwise from the policy
    that sampled. Null: no warning."""
    reward_correlation: Annotated[float, Field(ge=-1, le=1)] | None = -0.5
    """The smallest correlation of two parts of the reward (`reward/correlation`). A negative correlation means that a
    conversation that gets more of one part gets less of the other. Null: no warning."""
    teacher_gap: Above | None = 0.001
    """With a teacher: the smallest difference between teacher and student in the first steps, in nats per token (the size of
    `teacher/divergence`). Null: no warning."""
    teacher_growth: Annotated[float, Field(gt=1)] | None = 2.0
    """With a teacher: the largest divergence from it, as a multiple of the divergence in the first steps (`teacher/divergence`).
    Null: no warning."""
    failed: Share | None = 0.2
    """The largest share of conversations that fail with an error (`failed`). Null: no warning."""
    constant_reward: Positive | None = 3
    """The number of steps at the start of a run after which there is a warning if all conversations of each row had the same
    reward in all of these steps. Null: no warning."""
    stop: list[Monitor] = []
    """The monitors that stop the run, such as `[zero_std, failed]`. A checkpoint is written, and the exit status is 1. The other
    monitors only warn."""

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
    best: NonEmpty | None = None
    """A metric of the evaluations, such as `reward/mean`: the checkpoint with its highest value (of losses and failures: its
    lowest) is kept, too, and the link `best` in the run's directory names it. It needs `data.eval`."""


class Config(Section):
    """A recipe."""

    model: ModelSection
    data: DataSection = DataSection()
    environment: EnvironmentUse = EnvironmentUse(use="turnwise.environments.environment:SingleTurn")
    """A reference to the environment, which answers the model. The default environment ends each conversation after one turn."""
    tools: list[ToolUse] = []
    """The tools that the model may call: references to typed functions and classes (docs/tools.md)."""
    mcp: McpSection = McpSection()
    tool_calls: ToolCallsSection = ToolCallsSection()
    policies: Annotated[list[FrozenPolicySection], BeforeValidator(expand_policies)] = []
    """Frozen policies, which take the turns of agents that an environment opens (docs/agents_in_episodes.md): by their names,
    such as `{opponent: runs/first/checkpoint, strong: {endpoint: {url: "http://host:8000/v1", model: NAME}}}`."""
    engine: Annotated[AnyEngine, by_name("local")] = LocalEngineSection()
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
    tool_format: Annotated[Use, BeforeValidator(expand_format)] = Use(use="auto")
    """The format in which the model writes tool calls. `auto`: taken from the chat template. The name of a format, a class
    `file.py:Format`, or a description: `{opening: ..., separator: ..., closing: ...}` (docs/tool_calls.md)."""
    reward: RewardSection = RewardSection()
    credit: Annotated[CreditSection, OneOf(ESTIMATORS, default="auto")] = AutoCredit()
    critic: CriticSection = CriticSection()
    loss: Annotated[LossSection, OneOf(LOSSES, default="ppo_clip")] = PpoClip()
    reference: ReferenceSection = ReferenceSection()
    teacher: TeacherSection = TeacherSection()
    correction: CorrectionSection = CorrectionSection()
    loss_mask: Use = Use(use="all")
    """The turns to train on: `all`, `last_turn`, `after_last_user`, `last_round`, `without_failed_calls`,
    `without_void_turns`, or a reference to a function that returns the weight of a turn in the loss (docs/loss_masks.md)."""
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
    output: PathText = "runs/latest"
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
    """The checks of `turnwise doctor` that may fail, such as `[headers, tool turns]`: the run starts all the same, with a warning
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
    def _names_of_policies(cls, policies: list[FrozenPolicySection]) -> list[FrozenPolicySection]:
        names = [policy.name for policy in policies]
        if (double := next((name for name in names if names.count(name) > 1), None)) is not None:
            message = f"two policies have the name {double!r}: give each a name of its own"
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
