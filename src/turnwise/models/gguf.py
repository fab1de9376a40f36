"""Models in GGUF files (llama.cpp's format): converted once into a model directory, which everything else reads as any other.

transformers dequantizes the weights, and reads the tokenizer and the chat template from the file. The directory is in the cache
(`$XDG_CACHE_HOME/turnwise/gguf`, or `~/.cache/turnwise/gguf`) and holds safetensors files. Imports transformers where it is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.local_paths import share_weights

_log = logging.getLogger(__name__)

_SOURCE = "gguf.json"
"""The file that says where a directory comes from. It is written last."""
_QUANTIZED = ("quantization_config", "_pre_quantization_dtype")
"""What transformers notes about the weights of the file, although they are dequantized in memory; it saves no such model."""


def dequantized(directory: str, name: str, dtype: str) -> Path:
    """The model directory with the weights of the GGUF file `directory/name` in a dtype (`float32`, `bfloat16`).

    The first call for a file converts it; a file that has changed is converted again. Raises ConfigError if there is no such
    file, the package `gguf` is missing, or transformers does not know the architecture.
    """
    file = Path(directory).expanduser() / name
    if not file.is_file():
        raise ConfigError(
            f"model.gguf_file={name}: there is no file {file}; model.path is the directory that the GGUF file is in"
        )
    for package in ("gguf", "accelerate"):  # the second is what transformers reads the file with
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"model.gguf_file needs the package `{package}`: pip install 'turnwise[gguf]'")
    about = {
        "file": str(file.resolve()),
        "bytes": file.stat().st_size,
        "changed": file.stat().st_mtime_ns,
        "dtype": dtype,
    }
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    target = _cache() / f"{file.stem}-{digest}"
    if not (target / _SOURCE).is_file():
        _log.info("%s is converted into the model directory %s (once)", file, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="writing-") as folder:
            made = Path(folder) / "model"
            made.mkdir()
            _convert(file, made, dtype)
            (made / _SOURCE).write_text(json.dumps(about, indent=1), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)  # left by a process that was killed
            os.replace(made, target)
    return target


def _check_complete(missing: Collection[str]) -> None:
    """Raises ValueError for parameters without a value: transformers leaves random numbers there, and only writes a warning."""
    if missing:
        raise ValueError(
            f"the file has no values for {len(missing)} parameters under names that the package `gguf` knows: "
            f"{', '.join(sorted(missing)[:3])}{' ...' if len(missing) > 3 else ''}"
        )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise" / "gguf"


def _convert(file: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        with boundary("model"):  # files of many programs and kinds
            tokenizer = AutoTokenizer.from_pretrained(**where)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **where, dtype=getattr(torch, dtype), output_loading_info=True
            )
            model, about = loaded
            _check_complete(about["missing_keys"])
            for name in _QUANTIZED:
                if hasattr(model.config, name):
                    delattr(model.config, name)
            model.hf_quantizer, model.is_quantized = None, False
            model.save_pretrained(folder)
            share_weights(folder)
            tokenizer.save_pretrained(folder)
    except Failed as failed:
        raise ConfigError(
            f"model.gguf_file={file.name} could not be read: {failed.failure.message.rstrip('.')}. transformers reads the GGUF "
            f"files of some architectures only: otherwise use the model's safetensors files"
        ) from failed
