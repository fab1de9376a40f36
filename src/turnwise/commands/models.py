"""`turnwise merge`: writes the complete model of a run that has an adapter, or the parts of several ranks."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from turnwise.commands.command import Context, print_lines
from turnwise.errors import ConfigError, RunError
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.models.loading import ModelSource, load_model, save_model
from turnwise.models.lora import adapter_base
from turnwise.models.quantization import saved_quantization
from turnwise.record.run_directory import RunLock

# the command


def register_merge(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Write a model directory, which other programs can load: add a LoRA adapter to the weights of its base model "
        "(docs/memory.md), or put the parts together in which several ranks have written the weights (docs/cluster.md)."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the directory of a run, of a checkpoint or of an adapter"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the directory to write to; default, without an adapter: the checkpoint itself",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="the data type of the weights; default: that of the base model",
    )
    parser.set_defaults(command=_run_merge, long=True)


def _run_merge(options: argparse.Namespace, context: Context) -> int:
    if (parts := _weights_in_parts(options.run)) is not None:
        if options.dtype is not None:
            raise ConfigError("--dtype is for an adapter: the weights of several ranks are written as they are")
        place = write_complete(parts, options.out, run=options.run)
        print_lines(context.console, [f"the model is in {place}"])
        return 0
    adapter = write_merged(options.run, options.out, dtype=options.dtype)
    lines = [f"the model with the adapter {adapter} is in {options.out}"]
    if saved_quantization(adapter) is not None:
        lines.append(
            "the adapter was trained on weights in 4 bits, and is added to these weights, dequantized (docs/memory.md)"
        )
    print_lines(context.console, lines)
    return 0


# weights in parts


def _candidates(source: Path) -> tuple[Path, ...]:
    return source, source / "checkpoint", source / "model"


def _weights_in_parts(source: Path) -> Path | None:
    return next((path for path in _candidates(source) if (path / WEIGHTS_IN_PARTS).is_file()), None)


def write_complete(model: Path, out: Path | None, *, run: Path) -> Path:
    """Write the weights whose parts belong to the model directory `model` of a checkpoint there, or with a copy of its other
    files to the new directory `out`. Returns the directory. `run` is for messages.

    Raises ConfigError if `out` exists and is not empty, or if a process writes the run, RunError if the weights cannot be
    written.
    """
    from turnwise.training.sharded.consolidation import complete_weights, write_weights  # torch.distributed

    folder = model.resolve()
    if out is None:
        with _held(folder.parents[2]):
            if (folder / WEIGHTS_IN_PARTS).is_file():  # not if a run wrote them, until it was stopped
                complete_weights(folder.parent)
        return model
    with _new_directory(out, run):
        write_weights(folder, out)
        for file in folder.iterdir():
            if file.is_file() and file.name != WEIGHTS_IN_PARTS:
                shutil.copy2(file, out / file.name)
    return out


@contextlib.contextmanager
def _held(run: Path) -> Iterator[None]:
    """A context in which no other process writes or resumes a run; nothing is held if `run` is not the directory of one. Raises
    ConfigError if a process writes it."""
    if not (run / "run.json").is_file():
        yield
        return
    try:
        lock = RunLock(run)
    except OSError as error:
        raise ConfigError(f"the run {run} cannot be written: {error}; name another directory with --out DIR") from None
    except RunError:
        raise ConfigError(f"a process is writing the run {run}: name another directory with --out DIR") from None
    try:
        yield
    finally:
        lock.release()


# the model directory

_ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    "generation_config.json",
    "README.md",
)
"""Files of the adapter's directory that the merged model does not need, or that are written with it."""


def write_merged(source: Path, out: Path | None, *, dtype: str | None = None) -> Path:
    """Write the model of the adapter in `source` to the new directory `out`. Returns the adapter's directory.

    `source` is the directory of a run (its newest checkpoint), of a checkpoint, or of an adapter. `dtype` is the name of a torch
    data type; None: that of the base model. Tokenizer and processor files are copied from the adapter's directory.

    Raises ConfigError if there is no adapter, if `out` exists and is not empty, or if the model cannot be loaded, RunError if it
    cannot be written.
    """
    adapter = next((path for path in _candidates(source) if adapter_base(path) is not None), None)
    if adapter is None:
        raise ConfigError(
            f"there is no adapter in {source}: name the directory of a run that trained with model.lora.rank, one of its "
            f"checkpoints, or a directory with adapter_config.json; nor weights in the parts of several ranks"
        )
    if out is None:
        raise ConfigError(f"name a new directory for the model with the adapter {adapter}: --out DIR")
    _refuse_used(out)
    loaded = ModelSource(path=str(adapter), device="cpu")
    # of any type, also of one in which nothing is trained
    model = load_model(loaded.model_copy(update={"dtype": dtype or _base_dtype(adapter)}))
    with _new_directory(out, source):
        save_model(model, out)
        for file in adapter.iterdir():
            if file.is_file() and file.name not in _ADAPTER_FILES:
                shutil.copy2(file, out / file.name)
    return adapter


@contextlib.contextmanager
def _new_directory(out: Path, source: Path) -> Iterator[None]:
    """A context in which the model of `source` is written to `out`, which is removed if it does not become complete.

    Raises ConfigError if `out` exists and is not empty, RunError if it cannot be written.
    """
    from safetensors import SafetensorError

    _refuse_used(out)
    complete = False
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
        complete = True
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise RunError(f"the model of {source} could not be written to {out}: {error}") from error
    finally:
        if not complete:
            shutil.rmtree(out, ignore_errors=True)


def _refuse_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: name a new directory with --out")


def _base_dtype(adapter: Path) -> str:
    """The data type of the weights that the adapter belongs to, as its base model's config.json names it."""
    from transformers import AutoConfig

    path: str | Path = adapter
    while (base := adapter_base(path)) is not None:
        path = base
    dtype = str(AutoConfig.from_pretrained(path).get_text_config().dtype).removeprefix("torch.")
    return dtype if dtype in ("float32", "bfloat16") else "float32"
