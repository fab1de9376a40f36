"""The sections `train` and `sft` of a recipe, and the options of the optimizer that both have."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from turnwise.config.section import NotNegative, Positive, Section, short_for

__all__ = ["OptimizationSection", "OptimizerSection", "SftSection", "TrainSection", "steps_of_epochs"]

Beta = Annotated[float, Field(ge=0, lt=1)]

_STEPS = 100
"""The number of training steps of a recipe that gives none."""


def steps_of_epochs(epochs: float, rows: int, batch_size: int) -> int:
    """The number of steps in which each of `rows` rows is used `epochs` times: 4 for 1.5 epochs of 10 rows in batches of 4."""
    # exact: 1.1 * 10 is more than 11 in floating point, which would be a step more
    return max(1, math.ceil(Fraction(str(epochs)) * rows / batch_size))


class OptimizerSection(Section):
    """The optimizer, and what it keeps in memory (docs/memory.md)."""

    name: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """The optimizer. `adamw`: AdamW, with 8 bytes of state for each trained parameter. `adamw_8bit`: AdamW with 2 bytes of state;
    it needs bitsandbytes (`pip install 'turnwise[8bit]'`). `adafactor`: Adafactor, with almost no state. Its step is the learning
    rate times the size of the weights, so it needs a larger learning rate."""
    master_weights: Literal["float32", "none", "kahan", "stochastic_rounding"] = "float32"
    """How steps are kept that are smaller than the precision of bfloat16 parameters. `float32`: in a float32 copy of the
    parameters (4 bytes for each parameter). `kahan`: the rounding error is kept as a second bfloat16 number (2 bytes).
    `stochastic_rounding`: parameters are rounded up or down at random (no memory). `none`: small steps are lost."""
    offload: Literal["none", "cpu"] = "none"
    """Where the optimizer's state and the float32 master weights are. `none`: on the device of the model. `cpu`: in the CPU's
    memory, for a model on a GPU. The optimizer step is then computed on the CPU, and is slower."""

    _expand = short_for("name")


class OptimizationSection(Section):
    """Options of the optimizer and of its batches."""

    steps: Positive | None = None
    """The number of steps."""
    batch_size: Positive = 16
    """The number of rows of each step."""
    lr: NotNegative = 1e-6
    """The learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up. `constant`: it does not change. `linear`: it falls to 0 at the last step
    in a straight line. `cosine`: it falls to 0 at the last step as half a cosine wave."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of warm-up steps at the start; in these steps the learning rate rises linearly to its full value. 0: no
    warm-up."""
    weight_decay: NotNegative = 0.0
    """The weight decay: each step first multiplies every parameter by 1 - learning rate * weight decay. 0: no weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay rates of AdamW's two moving averages: of the gradient, and of its square."""
    optimizer: OptimizerSection = OptimizerSection()
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the gradient of all parameters together. A gradient with a larger norm is scaled down to this norm."""
    micro_batch_tokens: Positive | None = None
    """The largest number of tokens in one forward pass. A smaller number needs less memory and is slower; the result is the same.
    Null: 2048 on a CPU, 3072 there for a model of more than 20 million parameters in one process, 16384 on a GPU."""


class TrainSection(OptimizationSection):
    """Options of reinforcement learning with `turnwise train`."""

    steps: Positive | None = None
    """The number of training steps. Each step samples new trajectories. Null: `train.epochs` sets the number of steps; without
    `train.epochs`, it is 100."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """The number of passes over the rows of `data.train`, instead of `train.steps`. The number of steps is `train.epochs` times
    the number of rows, divided by `train.batch_size` and rounded up. Rows that are replaced (`train.dynamic_sampling`) or skipped
    (`data.curriculum`) do not make it smaller. Null: `train.steps` sets the number of steps."""
    batch_size: Positive = 16
    """The number of rows of each step; `train.group_size` trajectories are sampled for each row."""
    group_size: Positive = 8
    """The number of trajectories that are sampled for each row. The trajectories of a row are a group: their rewards are compared
    with each other."""
    minibatches: Positive = 1
    """The number of parts into which the trajectories of a step are split. Their sizes differ by at most 1. Each part gives one
    optimizer step."""
    ppo_epochs: Positive = 1
    """The number of passes over the trajectories of a step. Each pass repeats the optimizer steps of `train.minibatches`."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """How often in a step, at most, groups without reward differences are replaced by groups of the next rows (DAPO). Replaced
    groups are recorded and counted in the metrics, but not trained on. 0: no group is replaced."""
    overlong_filter: bool = False
    """Whether trajectories whose last turn was cut by a token limit are excluded from the loss. Their rewards still count in the
    statistics of the group."""
    share_prompts: Literal["auto", "always", "never"] = "auto"
    """Whether a common prefix of several training sequences is computed only once in the forward pass: the prompt of a group, a
    common system prompt, and equal sampled tokens. A check at the start tests whether the model then gives the same
    log-probabilities. If the check fails, `auto` computes each sequence separately, and `always` is an error. `never`: each
    sequence is computed separately."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """The largest age of the weights that sampled a trajectory, in training steps, when the trajectory is trained on. 0: sampling
    and training alternate, and all trajectories come from the present weights. 1: the trajectories of the next step are sampled
    during the training of the present step. n: conversations run continuously, up to n steps ahead of the training
    (docs/pipeline.md). With a larger number, slow conversations delay training less, but the trajectories are more off-policy."""
    group_timeout: Annotated[float, Field(gt=0)] | None = None
    """The time limit of a group in seconds, from the start of its first conversation. Conversations that still run then are
    ended and count as failed; the group is trained on without them. Null: no limit."""
    min_group_size: Positive = 1
    """The smallest number of trajectories in a group that did not fail. A group with fewer is recorded, but not trained on."""
    replace_failed: Annotated[int, Field(ge=0)] = 0
    """How often in a step, at most, groups with fewer than `train.min_group_size` trajectories that did not fail are replaced by
    groups of the next rows. 0: no group is replaced, and the step trains on fewer groups."""

    @property
    def known_steps(self) -> int | None:
        """The number of training steps; None if `epochs` sets it, which depends on the number of rows."""
        return self.steps if self.steps is not None else _STEPS if self.epochs is None else None

    @property
    def total_steps(self) -> int:
        """The number of training steps of a recipe whose rows are known (`Config.with_known_steps`)."""
        steps = self.known_steps
        assert steps is not None, "the rows are read first"
        return steps


class SftSection(OptimizationSection):
    """Options of `turnwise sft`: supervised fine-tuning on the conversations of `data.train` (docs/sft.md)."""

    steps: Positive | None = None
    """The number of optimizer steps. Null: `sft.epochs` sets the number of steps."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """The number of passes over the data. It is used if `sft.steps` is null."""
    batch_size: Positive = 16
    """The number of conversations of each optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """The learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate changes after the warm-up. `constant`: it does not change. `linear`: it falls to 0 at the last step
    in a straight line. `cosine`: it falls to 0 at the last step as half a cosine wave."""
    too_long: Literal["leave_out", "cut"] = "leave_out"
    """What happens to a conversation with more tokens than `limits.context`. `leave_out`: the conversation is not trained on, and
    is counted in the metric `left_out`. `cut`: the conversation is cut to its first `limits.context` tokens."""
    normalizer: Literal["token", "sequence", "trajectory"] = "token"
    """How the loss of a batch is averaged. `token`: over tokens, so that a long conversation counts more than a short
    conversation. `trajectory`: over conversations, which all count the same. `sequence`: over token sequences (segments), which
    all count the same."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between two measurements of the held-out loss. 0: it is measured only before and after training."""
    max_eval_rows: Positive | None = None
    """The number of held-out conversations to use, counted from the first. Null: all held-out conversations."""
    max_recorded_rows: Annotated[int, Field(ge=0)] = 32
    """The number of conversations to write to `trajectories.jsonl` with all tokens, counted from the first trained conversation.
    0: no conversation is written."""
