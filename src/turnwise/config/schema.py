"""The schema of a recipe: every option, its default and its meaning.

There is one schema, and it is the documentation of the options too. How a recipe file is read is the affair of `recipe`;
which combinations make no sense is that of `train_recipe` and `sft_recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from turnwise.config.parts import Beta, Evaluation, Limits, NonEmpty, NotNegative, Part, Positive, Sampling, Sft
from turnwise.errors import nearest

__all__ = [
    "LOSS_MASKS",
    "Config",
    "EnvironmentUse",
    "LocalEngine",
    "Mcp",
    "Part",
    "RewardUse",
    "ScriptedEngine",
    "Sft",
    "ToolCalls",
    "ToolUse",
    "Use",
]

LOSS_MASKS = ("all", "last_turn", "after_last_user", "last_round")
"""The rules of `scoring.mask`, by name."""


def _short(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


class Use(Part):
    """A reference to a Python object. A plain text is short for `{use: text}`."""

    use: NonEmpty
    """`package.module:name` or `path/to/file.py:name`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments it is called with when it is made (classes, environments) or at each call (functions)."""

    _short = model_validator(mode="before")(_short)


class EnvironmentUse(Use):
    """A reference to an environment."""

    thread: bool = False
    """Whether its `async` methods run in a thread of their own for each conversation, so that they may block."""


class Model(Part):
    """The model that is trained."""

    path: NonEmpty
    """A model directory or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters. With bfloat16 the optimizer keeps float32 master weights."""
    device: NonEmpty = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`."""


class Data(Part):
    """Where conversations start."""

    train: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)]
    """A .jsonl or .parquet file, a directory saved by `datasets`, or a hub id; or a list of these."""
    eval: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    """Held-out rows, likewise."""
    split: NonEmpty = "train"
    """Of a data set with splits."""
    eval_split: NonEmpty = "test"
    subset: NonEmpty | None = None
    """Of a hub data set with several configurations."""
    columns: dict[str, str] = {}
    """Our name to the data's: `{prompt: question}`."""
    system_prompt: str | None = None
    """Put before prompts that have no system message."""
    shuffle: bool = True
    max_rows: Positive | None = None
    """Use only the first rows."""
    max_prompt_tokens: Positive | None = None
    """Leave out rows whose prompt has more tokens than this in the chat template, tools not counted."""
    return_multi_modal_inputs: bool | None = None
    """Of rows with images: true runs the processor on them once at the start, and the tensors ride with the row
    (`multi_modal_inputs`); false leaves it to the conversations that show them, as null does."""


class ToolUse(Part):
    """A tool: a typed function, or a class whose public methods are tools. A plain text is short for `{use: text}`."""

    use: NonEmpty
    arguments: dict[str, Any] = {}
    """Of the class's constructor, called for each conversation."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds for each attempt; 30 unless the tool says something else itself."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """Further attempts after an exception that is no ValueError; none unless the tool says something else itself."""
    retry_timeouts: bool | None = None
    """Whether a timeout is worth a further attempt too."""
    thread: bool | None = None
    """Whether async functions run in threads, so that they may block."""

    _short = model_validator(mode="before")(_short)


class Mcp(Part):
    """Tools of MCP servers."""

    servers: NonEmpty | None = None
    """A JSON file with `mcpServers`."""
    select: list[str] | None = None
    """Names of tools; null takes all that the servers offer."""
    use: NonEmpty = "turnwise.environments.mcp:McpServers"
    """A reference to a subclass that reads results in its own way."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for each attempt of a call."""
    retries: Annotated[int, Field(ge=0)] = 0
    """Further attempts when a server is lost."""
    retry_timeouts: bool = False
    """Whether a timeout is worth a further attempt too."""
    start_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds until a server must have answered for the first time."""


class ToolCalls(Part):
    """What holds for all tools in front of the environment."""

    max_parallel_calls: Positive | None = None
    """Calls of one turn that are run; those beyond it are told so. Null runs all."""
    max_tool_response_length: Positive | None = None
    """Of a tool's text, the mark of the cut not counted. Null cuts at a million characters."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """The side that is cut off: `left` keeps the end, `right` the beginning, `middle` half of the length of each."""
    tool_response_unit: Literal["characters", "tokens"] = "characters"
    """What the length counts."""


class LocalEngine(Part):
    """The embedded engine: in the trainer's process, on the trainer's own weights."""

    name: Literal["local"] = "local"
    slots: Positive = 256
    """Conversations whose key-value cache is kept at once."""
    memory_gb: Annotated[float, Field(gt=0)] = 2.0
    """Bound of the key-value cache."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Torch threads; 0 finds out."""


class ScriptedEngine(Part):
    """Says its lines: replays conversations without a model's weights."""

    name: Literal["scripted"]
    script: NonEmpty
    """A jsonl file: one list of assistant texts for each trajectory, in order of rows."""


class RewardUse(Use):
    """A reward function, or a class: made once with `arguments`, its instance is called."""

    weight: float = 1.0
    name: NonEmpty | None = None
    """In metrics and records; null takes the end of the reference."""


class Reward(Part):
    """What is added to the rewards that the environment gives."""

    trajectory: list[RewardUse] = []
    """Functions of a trajectory, sync or async, to a number."""
    turns: list[RewardUse] = []
    """Functions of a trajectory and a turn, to a number."""
    group: list[RewardUse] = []
    """Functions of all finished trajectories of a row, to a list of numbers; asked once for each row. None in the list means
    that the function does not apply to that trajectory."""
    timeout: Annotated[float, Field(gt=0)] | None = 120.0
    """What the async functions of one trajectory may take together, and each async function of a group."""


class Credit(Part):
    """How rewards become advantages."""

    name: Literal["grpo"] = "grpo"
    scale: Literal["std", "none"] = "std"
    """Whether the centred reward is divided by the group's standard deviation (GRPO) or not (Dr. GRPO)."""


class Train(Part):
    """The optimization."""

    steps: Positive = 100
    batch_size: Positive = 16
    """Rows of each step."""
    group_size: Positive = 8
    """Trajectories of each row."""
    lr: NotNegative = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: NotNegative = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    minibatches: Positive = 1
    """Optimizer steps on each batch of trajectories."""
    ppo_epochs: Positive = 1
    """Passes over each batch of trajectories."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    loss_average: Literal["token", "sequence"] = "token"
    """Whether all tokens of a batch weigh the same, or all trajectories do."""
    kl_coef: NotNegative = 0.0
    """Weight of the divergence from the model as it was before training; 0 loads no reference."""
    entropy_coef: float = 0.0
    micro_batch_tokens: Positive | None = None
    """Tokens of one forward pass: memory against speed, never the result. Null takes 2048 on a CPU and 16384 elsewhere."""
    share_prompts: Literal["auto", "always", "never"] = "auto"
    """Compute the common prompt of a group once."""
    overlap: bool = False
    """Hold the conversations of the next step while training on this one: faster, and one version off-policy."""


class Rollout(Part):
    """What `turnwise rollout` does; `turnwise train` has its own numbers."""

    max_rows: Positive | None = None
    """Only the first ones."""
    samples_per_row: Positive = 1
    """Conversations for each row."""


class Checkpoint(Part):
    """What survives a crash."""

    every: Positive | None = None
    """Steps between checkpoints; null writes them as often as they take at most 3 % of the time (docs/record.md)."""
    keep: Positive = 2
    """Checkpoints on disk."""


class Config(Part):
    """A recipe."""

    model: Model
    data: Data
    environment: EnvironmentUse = EnvironmentUse(use="turnwise.environments.environment:SingleTurn")
    """Who answers the model: a reference."""
    tools: list[ToolUse] = []
    """Typed functions and classes in front of the environment: references (docs/tools.md)."""
    mcp: Mcp = Mcp()
    tool_calls: ToolCalls = ToolCalls()
    engine: Annotated[
        Annotated[LocalEngine, Tag("local")] | Annotated[ScriptedEngine, Tag("scripted")],
        Discriminator(
            lambda value: value.get("name", "local") if isinstance(value, Mapping) else getattr(value, "name", None)
        ),
    ] = LocalEngine()
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    tokenization_sanity_check: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """How the tokens of a finished conversation are compared with the template's."""
    thinking: Literal["keep", "branch", "strip_at_user"] = "keep"
    """What becomes of earlier thoughts when a conversation goes on: they stay; or a new segment begins wherever the template
    leaves them out (`branch`), or at every user message (`strip_at_user`)."""
    use_inference_chat_template: bool = False
    """Train on what the template would serve, thoughts left out of earlier turns: the same as `thinking=branch`."""
    tool_format: NonEmpty = "auto"
    """How the model writes tool calls; `auto` finds it out from the template (docs/tool_calls.md)."""
    reward: Reward = Reward()
    credit: Credit = Credit()
    loss_mask: Use = Use(use="all")
    """Which turns are learnt from: `all`, `last_turn`, `after_last_user`, `last_round`, or a reference to a function of a turn
    that gives its weight (docs/loss_masks.md)."""
    train: Train = Train()
    eval: Evaluation = Evaluation()
    rollout: Rollout = Rollout()
    sft: Sft = Sft()
    checkpoint: Checkpoint = Checkpoint()
    max_concurrent: Positive = 256
    """Conversations that are held at once."""
    output: NonEmpty = "runs/latest"
    """The run's directory."""
    seed: int = 0
    deterministic: bool = False
    """Bit-identical metrics for one seed, on a CPU; slower."""
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on where the run in `output` was ended, or begins one."""
    resume_changes: list[str] = []
    """Options that differ on purpose from those of the run that is resumed: `[train.lr]` (docs/record.md)."""
    replace: bool = False
    """Move a former run in `output` out of the way instead of refusing."""

    @model_validator(mode="before")
    @classmethod
    def _one_thinking_policy(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping) or tree.get("use_inference_chat_template") is not True:
            return tree
        if tree.get("thinking", "branch") != "branch":
            raise PydanticCustomError(
                "thinking",
                "use_inference_chat_template=true means thinking=branch, and the recipe says thinking={thinking}: remove one",
                {"thinking": tree["thinking"]},
            )
        return {**tree, "thinking": "branch"}

    @field_validator("loss_mask")
    @classmethod
    def _known_loss_mask(cls, use: Use) -> Use:
        if ":" not in use.use and use.use not in LOSS_MASKS:
            message = (
                f"there is no rule of this name; there are {', '.join(LOSS_MASKS)}, and path/to/file.py:function for one of "
                f"your own{nearest(use.use, LOSS_MASKS)}"
            )
            raise PydanticCustomError("loss_mask", "{message}", {"message": message})
        if use.use in LOSS_MASKS and use.arguments:
            raise PydanticCustomError("loss_mask", "the rule {name} takes no arguments", {"name": use.use})
        return use
