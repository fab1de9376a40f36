"""`turnwise merge`: writes an adapter and its base model as one complete model directory."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from turnwise.commands.command import Context, print_lines
from turnwise.errors import ConfigError
from turnwise.models.loading import ModelSource, load_model, save_model
from turnwise.models.lora import adapter_base
from turnwise.models.quantization import saved_quantization

# the command


def register_merge(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Add a LoRA adapter to the weights of its base model, and write the result as a model directory, which "
        "other programs can load (docs/memory.md)."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the directory of a run, of a checkpoint or of an adapter"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory to write to")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="the data type of the weights; default: that of the base model",
    )
    parser.set_defaults(command=_run_merge, long=True)


def _run_merge(options: argparse.Namespace, context: Context) -> int:

    adapter = write_merged(options.run, options.out, dtype=options.dtype)
    lines = [f"the model with the adapter {adapter} is in {options.out}"]
    if saved_quantization(adapter) is not None:
        lines.append(
            "the adapter was trained on weights in 4 bits, and is added to these weights, dequantized (docs/memory.md)"
        )
    print_lines(context.console, lines)
    return 0


# the model directory

_ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    "generation_config.json",
    "README.md",
)
"""Files of the adapter's directory that the merged model does not need, or that are written with it."""


def write_merged(source: Path, out: Path, *, dtype: str | None = None) -> Path:
    """Write the model of the adapter in `source` to the new directory `out`. Returns the adapter's directory.

    `source` is the directory of a run (its newest checkpoint), of a checkpoint, or of an adapter. `dtype` is the name of a torch
    data type; None: that of the base model. Tokenizer and processor files are copied from the adapter's directory.

    Raises ConfigError if there is no adapter, if `out` exists and is not empty, or if the model cannot be loaded.
    """
    adapter = next(
        (path for path in (source, source / "checkpoint", source / "model") if adapter_base(path) is not None), None
    )
    if adapter is None:
        raise ConfigError(
            f"there is no adapter in {source}: name the directory of a run that trained with model.lora.rank, one of its "
            f"checkpoints, or a directory with adapter_config.json"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: name a new directory with --out")
    loaded = ModelSource(path=str(adapter), device="cpu")
    # of any type, also of one in which nothing is trained
    model = load_model(loaded.model_copy(update={"dtype": dtype or _base_dtype(adapter)}))
    out.mkdir(parents=True, exist_ok=True)
    save_model(model, out)
    for file in adapter.iterdir():
        if file.is_file() and file.name not in _ADAPTER_FILES:
            shutil.copy2(file, out / file.name)
    return adapter


def _base_dtype(adapter: Path) -> str:
    """The data type of the weights that the adapter belongs to, as its base model's config.json names it."""
    from transformers import AutoConfig

    path: str | Path = adapter
    while (base := adapter_base(path)) is not None:
        path = base
    dtype = str(AutoConfig.from_pretrained(path).get_text_config().dtype).removeprefix("torch.")
    return dtype if dtype in ("float32", "bfloat16") else "float32"
