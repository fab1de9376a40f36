"""Write which models of Qwen3 can be trained on which GPUs, and how: a short table in docs/memory.md, and all figures in
benchmarks/README.md.

    python scripts/memory_table.py             # all models and GPUs, and the pages (about 10 minutes of CPU time)
    python scripts/memory_table.py 0.6B 8B     # print the rows of these models

Each row is the recipe that `turnwise init --gpu` writes, which the script reads back and checks as
`turnwise doctor --recipe` does. Needs no hub and no GPU: the configurations of the models are in `tests/support/qwen3.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from generated_pages import DOCS, ROOT, replace_block

sys.path.insert(0, str(ROOT / "tests"))

from support.qwen3 import QWEN3, save_config
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.doctor.fit import (
    OFFLOADED,
    OFFLOADED_BYTES,
    Plan,
    Starter,
    learning_rate,
    starter,
    starter_lines,
    starter_recipe,
)
from turnwise.doctor.memory import phases, read_model_config, workload_of
from turnwise.doctor.what_fits import fit_check
from turnwise.starter import write_project

CARDS = (8, 16, 24, 48, 80)
"""GiB of the GPUs."""
BLOCK = "memory of Qwen3"
DETAILS = ROOT / "benchmarks" / "README.md"
"""The page with all figures."""
_HEAD = (
    "| model | GPU, GiB | trained | tokens of a micro-batch | peak of an update, GiB | tokens of a conversation | "
    "embedded engine: cache, conversations at a time | vLLM on the same GPU | `train.lr` | all weights with `offload: cpu` |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def rows_of(size: str) -> Iterator[str]:
    """The rows of a model, one for each GPU. Raises SystemExit if a recipe is not valid, or if the doctor says that it does not
    fit."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_config(Path(folder) / "model", size))
        model_config = read_model_config(model)
        for gib in CARDS:
            found = starter(model, model_config, float(gib))
            if found.plan is not None:
                check_recipe(Path(folder) / str(gib), model, found, float(gib))
            others = starter(model, model_config, float(gib), ways=[OFFLOADED])
            last = offloaded(found, others, model_config, gib)
            yield f"| {size} | {gib} | {' | '.join([*cells(found, model_config, gib), last])} |"


def check_recipe(folder: Path, model: str, found: Starter, gib: float) -> Any:
    """The recipe that `turnwise init` writes, after the checks of `turnwise train` and of `turnwise doctor --recipe`."""
    assert found.plan is not None
    write_project(folder, model=model, changes=starter_lines(found, gib))
    recipe, notes = load(folder / "recipe.yaml", ["model.device=cuda"])
    refuse_without_effect(recipe)
    check = fit_check(recipe, model, section="train", memory_gb=gib)
    if notes or check.status != "ok":
        raise SystemExit(f"the recipe for {model} on {gib} GiB: {notes} {check}")
    return recipe


def update_gib(found: Starter, model_config: Any, gib: float) -> float:
    """The peak of an update, as `turnwise init`, `plan` and `doctor` print it."""
    assert found.plan is not None
    config = starter_recipe(found.plan, found.context)
    workload = workload_of(config, model_config, "train")
    return phases(config, model_config, workload, card_gib=float(gib))[0].gib


def cells(found: Starter, model_config: Any, gib: float) -> Sequence[str]:
    """What a row says of a plan."""
    plan = found.plan
    if plan is None:
        return [f"nothing: needs {found.least:.1f} GiB and activations", *["" for _ in range(6)]]
    embedded = plan.config.engine.embedded
    assert embedded is not None
    adapter = "model.lora.rank" in plan.way.options
    return [
        plan.way.name,
        f"{plan.config.train.micro_batch_tokens:,}",
        f"{update_gib(found, model_config, gib):.1f}",
        f"{found.context:,}",
        f"{embedded.memory_gb} GiB, {plan.rows}",
        beside(plan, found),
        f"{learning_rate(plan.parameters, adapter=adapter):.0e}".replace("e-0", "e-"),
    ]


def offloaded(found: Starter, others: Starter, model_config: Any, gib: float) -> str:
    """Whether all weights are trained, or could be with the state of the optimizer in the machine's memory."""
    if found.plan is not None and "model.lora.rank" not in found.plan.way.options:
        return ""
    if others.plan is None:
        return "no"
    needed = update_gib(others, model_config, gib)
    return f"{needed:.1f} GiB, and {OFFLOADED_BYTES * others.plan.parameters / 2**30:.0f} of the machine"


def beside(plan: Plan, found: Starter) -> str:
    """What vLLM has for its cache beside the trainer."""
    if "model.quantization.bits" in plan.way.options:
        return "no: weights in 4 bits"
    return "no room" if found.beside is None else f"cache of {found.beside.cache:.1f} GiB"


def main(sizes: Sequence[str]) -> None:
    """Write the page, or print the rows of some models."""
    if unknown := [size for size in sizes if size not in QWEN3]:
        raise SystemExit(f"no model {', '.join(unknown)}: there are {', '.join(QWEN3)}")
    table = [*_HEAD, *(row for size in sizes or QWEN3 for row in rows_of(size))]
    if sizes:
        print("\n".join(table))
        return
    for page, block in ((DETAILS, table), (DOCS / "memory.md", short(table[len(_HEAD) :]))):
        page.write_text(
            replace_block(page.read_text(encoding="utf-8"), BLOCK, "\n".join(block), by="memory_table.py"),
            encoding="utf-8",
        )


def short(rows: Sequence[str]) -> Iterator[str]:
    """One row for each model, one column for each GPU: what is trained, and the peak of an update."""
    yield f"| model | {' | '.join(f'{gib} GiB' for gib in CARDS)} |"
    yield "|---" * (len(CARDS) + 1) + "|"
    models: dict[str, list[str]] = {}
    for row in rows:
        size, _, way, _, peak = [cell.strip() for cell in row.split("|")[1:6]]
        models.setdefault(size, []).append(f"{way}: {peak}" if peak else "-")
    yield from (f"| {size} | {' | '.join(found)} |" for size, found in models.items())


if __name__ == "__main__":
    main(sys.argv[1:])
