"""Write the table of "Large models" in benchmarks/README.md: memory, traffic and time of the training part of a step.

    python scripts/large_models.py           # the page (two minutes of CPU time)
    python scripts/large_models.py --print   # the table

Memory is what `turnwise plan` predicts for a rank. Traffic and time are computed here from sizes and the assumptions below, which
the page has, too. Needs no hub and no GPU: the configurations of the models are in `tests/support/qwen3.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated_pages import ROOT, replace_block

sys.path.insert(0, str(ROOT / "tests"))

from transformers.modeling_layers import GradientCheckpointingLayer

from support.qwen3 import save_config
from turnwise import assembly
from turnwise.doctor.memory import Workload, empty_model, read_model_config
from turnwise.models.experts import layers_with_experts
from turnwise.options.engines import MeshSection
from turnwise.options.schema import Config
from turnwise.planning.memory import rank_memory

CONVERSATIONS, TOKENS = 1024, 16_384
"""Conversations of a step, and tokens of each, which is one micro-batch."""
GIB = 80
PEAK, USED = 989e12, 0.35
"""Products of bfloat16 in a second (H100 SXM), and the part of them that passes reach."""
PASSES = 8
"""Operations for each parameter and token: 2 forward, 4 backward, and 2 again with gradient checkpointing."""
FAST, SLOW, MACHINE = 300e9, 40e9, 8
"""Bytes in a second that a GPU sends to those of its machine and to others, and the GPUs of a machine."""
SUMS = 9
"""Sums over the ranks of `tensor` in each layer: two forward, two when it is computed again, and five backward, one for each
column-wise matrix."""
BLOCK = "large models"
_HEAD = (
    "| model | GPUs | `cluster.mesh` | optimizer | weights, gradients, optimizer, GiB | gathered | passes | all, GiB | fits | "
    "gathered in the group, GB | summed by `tensor`, GB | between groups, GB | step, s |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    size: str
    gpus: int
    mesh: dict[str, int]
    optimizer: str


ADAMW, SMALL = "adamw", "adamw_8bit, kahan"
SETTINGS = [
    Setting("32B", 8, {}, ADAMW),
    Setting("32B", 8, {}, SMALL),
    Setting("32B", 8, {"tensor": 2}, SMALL),
    Setting("32B", 64, {}, ADAMW),
    Setting("32B", 64, {"shard": 8, "tensor": 4}, ADAMW),
    Setting("32B", 512, {"shard": 16}, ADAMW),
    Setting("32B", 512, {"shard": 8, "tensor": 4}, ADAMW),
    Setting("235B-A22B", 8, {"tensor": 4}, SMALL),
    Setting("235B-A22B", 64, {"tensor": 4}, SMALL),
    Setting("235B-A22B", 512, {"shard": 32, "tensor": 4}, ADAMW),
    Setting("235B-A22B", 512, {"tensor": 4}, ADAMW),
]


def recipe(model: str, setting: Setting) -> Config:
    """A recipe that trains all weights in bfloat16 beside servers."""
    small = setting.optimizer == SMALL
    optimizer = {"name": "adamw_8bit", "master_weights": "kahan"} if small else {"name": "adamw"}
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": "bfloat16", "device": "cuda", "gradient_checkpointing": True},
            "engine": {"name": "vllm", "url": "http://servers:8000"},
            "data": {"train": "rows.jsonl"},
            "limits": {"context": TOKENS},
            "train": {"batch_size": 64, "group_size": 16, "micro_batch_tokens": TOKENS, "optimizer": optimizer},
            "cluster": {"launcher": "torchrun", "mesh": setting.mesh, "fsdp": {"gradient_sync": "micro_batch"}},
        }
    )


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, and of layers."""

    layers: int
    """In all layers together."""
    root: int
    """Outside of the layers."""
    active: float
    """Used for a token."""
    hidden: int
    count: int
    heads: int
    """Features of all attention heads together."""


def sizes_of(config: Config, model_config: Any) -> Sizes:
    """The sizes of the model of a recipe."""
    model, text = empty_model(assembly.model_source(config), model_config), model_config.get_text_config()
    layers = [part for part in model.get_decoder().modules() if isinstance(part, GradientCheckpointingLayer)]
    inside = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(weight.numel() for layer in layers for weight in layer.parameters() if weight.ndim == 3)
    unused = 0.0
    if experts:
        _, count = layers_with_experts(model)
        unused = experts * (1 - text.num_experts_per_tok / count)
    embedding = text.vocab_size * text.hidden_size
    heads = text.num_attention_heads * text.head_dim
    return Sizes(inside, total - inside, total - embedding - unused, text.hidden_size, len(layers), heads)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step, and the seconds of the step."""

    gathered: float
    summed: float
    between: float
    seconds: float


def traffic(sizes: Sizes, gpus: int, mesh: MeshSection) -> Traffic:
    """Of the training part of a step.

    For each micro-batch, weights (2 bytes) are gathered twice and gradients (4 bytes) added up once, while passes are computed;
    the sums of `tensor` are not hidden. Gradients are added up between groups once for each step.
    """
    groups, shard, _, tensor = mesh.shape(gpus)
    rounds = -(-CONVERSATIONS // (groups * shard))
    own = sizes.layers / tensor + sizes.root
    gathered = (2 * 2 + 4) * own * (shard - 1) / shard
    summed = 2 * SUMS * sizes.count * TOKENS * sizes.hidden * 2 * (tensor - 1) / tensor
    between = 2 * 4 * (sizes.layers + sizes.root) / (shard * tensor) * (groups - 1) / groups
    attention = 2 * sizes.count * sizes.heads * TOKENS / 2  # a token sees half of the others on average
    computed = PASSES * (sizes.active + attention) * TOKENS / (tensor * PEAK * USED)
    link = FAST if shard * tensor <= MACHINE else SLOW
    seconds = rounds * max(computed + summed / FAST, gathered / link) + between / SLOW
    return Traffic(rounds * gathered, rounds * summed, between, seconds)


def rows() -> Iterator[str]:
    """The rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        for setting in SETTINGS:
            path = Path(folder) / setting.size
            model = str(path if path.exists() else save_config(path, setting.size))
            config, model_config = recipe(model, setting), read_model_config(model)
            workload = Workload(conversations=CONVERSATIONS, tokens=TOKENS, equal=True)
            parts = {
                part.name: part.bytes / 2**30
                for part in rank_memory(config, model_config, workload, setting.gpus, rank=1).parts
            }
            total = sum(parts.values())
            kept = parts["weights"] + parts["gradients"] + parts["optimizer"]
            gathered = parts["gathered layers"]
            groups, shard, _, tensor = config.cluster.mesh.shape(setting.gpus)
            mesh = ", ".join(
                f"{name}: {size}"
                for name, size in (("replicate", groups), ("shard", shard), ("tensor", tensor))
                if size > 1
            )
            sent = traffic(sizes_of(config, model_config), setting.gpus, config.cluster.mesh)
            fits = total < 0.92 * GIB
            cells = [
                setting.size,
                str(setting.gpus),
                mesh,
                setting.optimizer,
                f"{kept:.1f}",
                f"{gathered:.1f}",
                f"{total - kept - gathered:.1f}",
                f"{total:.1f}",
                "yes" if fits else "no",
                *(f"{value / 1e9:,.0f}" for value in (sent.gathered, sent.summed, sent.between)),
                f"{sent.seconds:,.0f}" if fits else "-",
            ]
            yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    table = "\n".join([*_HEAD, *rows()])
    if "--print" in arguments:
        print(table)
        return 0
    page = ROOT / "benchmarks" / "README.md"
    page.write_text(
        replace_block(page.read_text(encoding="utf-8"), BLOCK, table, by="large_models.py"), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
