"""The schema of a recipe: every option, its default and its meaning.

There is one schema, and docs/recipes.md lists the options from it. Each module beside this one has some of the sections; this
module puts them together as `Config`. `recipe` reads recipe files; `train_checks` and `sft_checks` refuse options without
effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from turnwise.config.data import Data, Model
from turnwise.config.environment import EnvironmentUse, Mcp, ToolCalls, ToolUse
from turnwise.config.generation import EvaluationSampling, Limits, LocalEngine, Sampling, ScriptedEngine
from turnwise.config.optimization import Optimization, Sft, Train
from turnwise.config.part import NonEmpty, Part, Positive, Use, changed_options
from turnwise.config.rewards import Credit, Reward, RewardUse
from turnwise.errors import nearest

__all__ = [
    "LOSS_MASKS",
    "Checkpoint",
    "Config",
    "Credit",
    "Data",
    "EnvironmentUse",
    "Evaluation",
    "EvaluationSampling",
    "Limits",
    "LocalEngine",
    "Mcp",
    "Model",
    "Optimization",
    "Part",
    "Reward",
    "RewardUse",
    "Rollout",
    "Sampling",
    "ScriptedEngine",
    "Sft",
    "ToolCalls",
    "ToolUse",
    "Train",
    "Use",
    "changed_options",
]

LOSS_MASKS = ("all", "last_turn", "after_last_user", "last_round")
"""The rules of `rewards.turn_weights`, by name."""


class Evaluation(Part):
    """Evaluations during `turnwise train`: conversations on the held-out rows of `data.eval`."""

    max_rows: Positive | None = None
    """The number of held-out rows to evaluate on, from the first on. Null: all of them."""
    samples_per_row: Positive = 1
    """The number of conversations on each held-out row."""
    every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between two evaluations. 0: only before and after training."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How tokens are sampled in evaluations: `temperature`, `top_p`, `top_k`, `min_p`. A null value is that of `sampling`;
    `eval.sampling.temperature=0` is greedy."""


class Rollout(Part):
    """What `turnwise rollout` does: conversations without training."""

    max_rows: Positive | None = None
    """The number of rows to use in `turnwise rollout`, from the first on. Null: all rows."""
    samples_per_row: Positive = 1
    """The number of conversations on each row in `turnwise rollout`."""


class Checkpoint(Part):
    """Checkpoints, from which a stopped run can be resumed."""

    every: Positive | None = None
    """The number of steps between two checkpoints. Null: as often as takes at most 3 % of the time (docs/record.md)."""
    keep: Positive = 2
    """The number of checkpoints to keep on disk; older ones are removed."""


class Config(Part):
    """A recipe."""

    model: Model
    data: Data
    environment: EnvironmentUse = EnvironmentUse(use="turnwise.environments.environment:SingleTurn")
    """The environment, which answers the model: a reference. The default ends each conversation after one turn."""
    tools: list[ToolUse] = []
    """The tools that the model may call: references to typed functions and classes (docs/tools.md)."""
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
    """How the tokens of a finished conversation are compared with the chat template's own rendering of it: token by token
    (`strict`), without white space (`ignore_strippable`), or not at all (`disable`). Differences are counted as
    `template_mismatch` (docs/tokens.md)."""
    thinking: Literal["keep", "branch", "strip_at_user"] = "keep"
    """What happens to the reasoning of earlier turns when a conversation continues: it stays (`keep`); or a new segment without
    it begins wherever the chat template leaves it out (`branch`), or at every user message (`strip_at_user`)."""
    use_inference_chat_template: bool = False
    """verl's name for `thinking: branch`: train on the prompts that the chat template gives at inference, without the reasoning
    of earlier turns."""
    tool_format: NonEmpty = "auto"
    """The format in which the model writes tool calls. `auto`: taken from the chat template (docs/tool_calls.md)."""
    reward: Reward = Reward()
    credit: Credit = Credit()
    loss_mask: Use = Use(use="all")
    """The turns to train on: `all`, `last_turn`, `after_last_user`, `last_round`, or a reference to a function from a turn to its
    weight in the loss (docs/loss_masks.md)."""
    train: Train = Train()
    eval: Evaluation = Evaluation()
    rollout: Rollout = Rollout()
    sft: Sft = Sft()
    checkpoint: Checkpoint = Checkpoint()
    max_concurrent: Positive = 256
    """The number of conversations that run at the same time."""
    output: NonEmpty = "runs/latest"
    """The directory of the run: metrics, trajectories, checkpoints."""
    seed: int = 0
    """The seed of all random numbers: the order of rows, and the sampling of each conversation."""
    deterministic: bool = False
    """Whether two runs with one seed give bit-identical metrics. It runs on the CPU with one thread, and is slower."""
    resume: Literal["never", "auto"] = "never"
    """Whether to resume the run in `output`. `auto`: continue after its newest checkpoint, or start if there is none; `never`:
    start a new run."""
    resume_changes: list[str] = []
    """The options that are meant to differ from the run that is resumed, such as `[train.lr]` (docs/record.md)."""
    replace: bool = False
    """Whether a run that is already in `output` is moved out of the way. False: a new run refuses to start there."""

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
