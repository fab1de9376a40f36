"""The sections `model` and `data` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turnwise.config.section import NonEmpty, Positive, Section

__all__ = ["CurriculumSection", "DataSection", "LoraSection", "ModelSection"]


class LoraSection(Section):
    """A LoRA adapter: small matrices beside the layers of the model are trained, and the model's own weights are frozen."""

    rank: Positive | None = None
    """The rank of a LoRA adapter, which is trained instead of the model's weights (docs/memory.md). A larger rank has more
    parameters; 16 is common. Null: there is no adapter, and all weights are trained."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The scale of the adapter: its product is multiplied by `model.lora.alpha` / `model.lora.rank`."""
    target_modules: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    """The layers that get an adapter: their names, or the ends of their names, such as `[q_proj, v_proj]`. Null: all linear
    layers except the output layer."""
    rslora: bool = False
    """Whether the scale of the adapter is `model.lora.alpha` / the square root of `model.lora.rank` (rank-stabilised LoRA)."""
    dora: bool = False
    """Whether the adapter also trains the length of each weight vector (DoRA), which is slower."""


class ModelSection(Section):
    """The model that is trained."""

    path: NonEmpty
    """The model to train: a model directory, or a name on the Hugging Face hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The data type of the model's parameters. With bfloat16 the optimizer keeps a float32 copy of them."""
    device: NonEmpty = "auto"
    """The device of the model: `cpu`, `cuda`, `cuda:1`. `auto` is CUDA if there is a GPU, else the CPU."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes the activations inside each layer again, instead of keeping them. It needs much less
    memory and about a third more time; the result is the same."""
    lora: LoraSection = LoraSection()


class CurriculumSection(Section):
    """Skips rows that are too hard or too easy for the model at present. The pass rate of a row is the mean reward of its last
    group of trajectories; a row is never skipped before it has a pass rate. Off by default: `low` and `high` are null."""

    low: float | None = None
    """Rows with at most this pass rate are too hard and are skipped. Null: no row is too hard."""
    high: float | None = None
    """Rows with at least this pass rate are too easy and are skipped. Null: no row is too easy."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The probability that a row which is too hard or too easy is used all the same, so that its pass rate is measured again."""
    column: NonEmpty | None = None
    """The column of the data with the pass rate of each row before training, such as one measured with `turnwise rollout`. Null:
    rows have no pass rate until their first group has ended."""


class DataSection(Section):
    """The rows that conversations start from."""

    train: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)]
    """The training rows: a .jsonl or .parquet file, a directory saved by `datasets`, or a name on the Hugging Face hub; or a
    list of these."""
    eval: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    """The held-out rows for evaluations, in the same forms as `data.train`. Null: there are no evaluations."""
    split: NonEmpty = "train"
    """The split to use of `data.train`, if `data.train` is a data set with splits."""
    eval_split: NonEmpty = "test"
    """The split to use of `data.eval`, if `data.eval` is a data set with splits."""
    subset: NonEmpty | None = None
    """The configuration to use of a hub data set that has several configurations. Null: its default configuration."""
    columns: dict[str, str] = {}
    """Columns of the data with other names than in turnwise. `{prompt: question}` reads turnwise's column `prompt` from the
    column `question` of the data."""
    system_prompt: str | None = None
    """A system message to put before prompts that have none. Null: no system message is added."""
    weights: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2)] | None = None
    """The weights of the data sets if `data.train` is a list: `[2, 1]` takes two rows of the first data set for each row of the
    second. Each data set is shuffled and repeated on its own. Null: the rows of all data sets are mixed as one data set."""
    curriculum: CurriculumSection = CurriculumSection()
    shuffle: bool = True
    """Whether rows are taken in random order, with a new order in each pass over the data. False: in the order of the data."""
    max_rows: Positive | None = None
    """The number of rows to use from each of `data.train` and `data.eval`, from the first on. Null: all rows."""
    max_prompt_tokens: Positive | None = None
    """The longest prompt, in tokens: counted after the chat template is applied, and without the schemas of tools. Rows with
    longer prompts are left out. Null: no row is left out."""
    return_multi_modal_inputs: bool | None = None
    """For rows with images: true runs the processor on each row once, at the start, and keeps the tensors with the row (as
    `multi_modal_inputs`). False or null: each conversation processes its own images."""
