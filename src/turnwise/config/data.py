"""The sections `model` and `data` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.config.section import NonEmpty, Positive, Section, short_for

__all__ = ["CurriculumSection", "DataSection", "LoraSection", "ModelSection"]


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
    linear layers except the output layer."""
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


class ModelSection(Section):
    """The model that is trained."""

    path: NonEmpty
    """The model to train: a model directory, or a name on the Hugging Face hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The data type of the model's parameters. With bfloat16, the optimizer also keeps a float32 copy of the parameters, unless
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
    lora: LoraSection = LoraSection()

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
        return self.dtype == "float32" and not self.autocast


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

    train: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)]
    """The training rows: a .jsonl or .parquet file, a directory saved by `datasets`, or a name on the Hugging Face hub; or a
    list of these. `empty:64` is 64 rows without columns, for environments that write the prompts themselves."""
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
