"""Distinguishes a path of this machine from a name on the Hugging Face hub, and says what is wrong with a path.

A hub name is looked up over the network, which takes a minute where there is none. So what looks like a path is a path.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from turnwise.errors import Failed, TurnwiseError, nearest

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SUFFIXES = frozenset(
    {
        ".bin",
        ".csv",
        ".gguf",
        ".gz",
        ".json",
        ".jsonl",
        ".ndjson",
        ".parquet",
        ".pt",
        ".pth",
        ".safetensors",
        ".tar",
        ".tsv",
    }
    | {".txt", ".yaml", ".yml", ".zip"}
)
WEIGHTS_IN_PARTS = "weights_in_parts.json"
"""The file of a model directory that has no weights, because several ranks have written them in parts beside it. Says where."""
_OUTPUTS = "runs"
"""The first part of the paths of runs in the documents, which no hub name has."""


def looks_like_path(text: str) -> bool:
    """Whether a text is a path: `./x`, `a/b/c`, `rows.csv`, `runs/demo`, or the name of something that exists. Else it may be a
    hub name: `Qwen/Qwen3-0.6B`, `gpt2`."""
    if text.startswith((".", "/", "~")) or _HUB_NAME.fullmatch(text) is None:
        return True
    folder, slash, _ = text.partition("/")
    return (
        Path(text).suffix.lower() in _SUFFIXES
        or os.path.lexists(text)
        or (bool(slash) and (folder == _OUTPUTS or os.path.isdir(folder)))
    )


@contextlib.contextmanager
def same_directory() -> Iterator[None]:
    """Afterwards, the working directory is the same as before, whatever the user code inside does: the paths of a recipe that are
    read later mean what they meant. For code that runs before conversations, and for the conversations of one of several models.
    """
    before = os.getcwd()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.chdir(before)


def as_given(path: Path, place: Path) -> Path:
    """`path` if it still is the absolute path `place`, and `place` if the working directory has changed since."""
    return path if path.absolute() == place else place


def no_file(path: Path, kind: str) -> str | None:
    """Why there is no `kind` (such as `file`) that can be read at `path`, as the beginning of a message; None if there is one."""
    path = path.absolute()
    try:
        if path.is_file():
            return None
        if path.is_dir():
            return f"{path} is a directory, not a {kind}"
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {os.readlink(path)}, which does not exist"
        if path.exists():
            return f"{path} is not a regular file (a device, pipe or socket), and a {kind} is read more than once"
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a name that is too long; a NUL character
        return f"there is no {kind} {str(path)[:200]!r} ({getattr(error, 'strerror', None) or error})"
    return f"there is no {kind} {path}{_nearest(path)}"


A_MODEL = "a model is a hub id, or a directory that save_pretrained has written"
"""The rule for paths of models, in messages: several options and arguments of commands name one."""


def refuse_other_than_model(
    path: str | Path, *, error: type[TurnwiseError], weights: bool = True, given: str = ""
) -> None:
    """Refuse a path that is no model directory, and say what to give instead. A hub name is not looked up. `weights`: the
    directory must have the weights, too. `given` is how the user has given the path, if it is known: `--model runs/a`.

    Raises `error`.
    """
    text, of = str(path), given and f"{given}: "
    place = Path(os.path.abspath(os.path.expanduser(text)))
    try:
        if not looks_like_path(text):
            offline_without_network()
            return
        if not place.exists() and not place.is_symlink():
            raise error(f"{of}there is no model directory {place}{_nearest(place)}; {A_MODEL}")
        if not place.is_dir():
            kind = "a file" if place.is_file() else "not a directory"
            raise error(f"{of}{place} is {kind}; {A_MODEL} (with config.json, tokenizer and weights)")
        if (place / "run.json").is_file() and not (place / "config.json").is_file():
            newest = place / "checkpoint"
            hint = f"its newest model is {newest}: write that" if newest.is_dir() else "it has no checkpoint yet"
            raise error(f"{of}{place} is the directory of a run, not a model; {hint}")
        if weights:
            refuse_weights_in_parts(path, error=error)
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{of}there is no model directory {str(place)[:200]!r} ({reason})") from None


@functools.cache
def offline_without_network() -> None:
    """Let the hub's library use its cache only, for the rest of this process, if the hub's name cannot be resolved.

    It would ask five times for each file, which takes half a minute and more, before it looks into the cache.
    """
    from huggingface_hub import constants

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return  # the proxy resolves names
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True


_OF_MODELS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "model*.safetensors")
"""The files of a model on the hub, without copies of its weights in the forms of other programs."""
_OLDER_WEIGHTS = "pytorch_model*.bin"


@functools.cache
def hub_directory(name: str, *, weights: bool) -> Path:
    """The directory of the hub's cache with the model `name`: its config.json, and with `weights` all that a server loads. What
    is missing is downloaded. Raises the exceptions of the hub's library."""
    from huggingface_hub import hf_hub_download, snapshot_download

    offline_without_network()
    if not weights:
        return Path(hf_hub_download(name, "config.json")).parent
    folder = Path(snapshot_download(name, allow_patterns=[*_OF_MODELS]))
    if not any(folder.glob("*.safetensors")):
        snapshot_download(name, allow_patterns=[_OLDER_WEIGHTS])
    return folder


def refuse_weights_in_parts(model: str | Path, *, error: type[TurnwiseError]) -> None:
    """Refuse a model directory whose weights are in parts, and say what to do. Raises `error`."""
    if (Path(model).expanduser() / WEIGHTS_IN_PARTS).is_file():
        raise error(
            f"{model} has the weights in parts, as several ranks have written them: `turnwise merge {model}` writes them there "
            f"as other programs read them, and with `--out DIR` into another directory"
        )


def unreadable(what: str, path: str | Path, failed: Failed) -> str:
    """The message about a model, or a part of it, that could not be read: why, and what to do.

    Example: `no tokenizer could be loaded from 'org/name': 401. The model is gated: ask for access at ...`.
    """
    return (
        f"no {what} could be loaded from {str(path)!r}: {failed.failure.message.rstrip('.')}. {_advice(path, failed)}"
    )


def _advice(path: str | Path, failed: Failed) -> str:
    """What to do about a model that could not be read. The libraries' own messages about the hub name calls of Python."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    causes: list[BaseException] = [failed]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)

    def found(*kinds: type[BaseException]) -> BaseException | None:
        return next((error for error in causes if isinstance(error, kinds)), None)

    login = "log in with `hf auth login` or the environment variable HF_TOKEN"
    if found(GatedRepoError):
        return f"The model is gated: ask for access at https://huggingface.co/{path}, and {login}"
    if found(RepositoryNotFoundError):
        return f"Correct the name ({A_MODEL}), or {login}, if the model is private"
    if isinstance(answered := found(HfHubHTTPError), HfHubHTTPError):
        status = answered.response.status_code
        return f"The hub answers with status {status}: try again later, or give a model directory"
    if found(LocalEntryNotFoundError, OfflineModeIsEnabled):
        return (
            f"The hub is not reached, the cache (HF_HOME) has no such model, and there is no directory {os.path.abspath(path)}: "
            f"correct the path, or run `hf download {path} --local-dir DIR` where there is a network, and give DIR "
            f"(`turnwise init DIR` makes a tiny model to try with, DIR/model)"
        )
    return A_MODEL[0].upper() + A_MODEL[1:]


def _nearest(path: Path) -> str:
    """A hint with a similar name in the same directory."""
    try:
        return nearest(path.name, os.listdir(path.parent))
    except OSError:
        return ""


POLICIES = "policies"
"""The folder of a model directory that has the adapters of further trained policies."""


def saved_policy(model: str | Path, name: str) -> Path:
    """Where a checkpoint has the adapter of the trained policy `name`. `model` is the checkpoint's model directory."""
    return Path(model).expanduser() / POLICIES / name


def has_all_weights(folder: Path) -> bool:
    """Whether a model directory has the weights of a model, and not only those of an adapter."""
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()


def share_weights(place: Path) -> None:
    """Let the safetensors file at a place, or those of a directory, be read by whoever may read other new files of this process.

    safetensors 0.8 makes files that only their owner can read, whatever the umask says (its issue 782): a server that runs as
    another user would not find the weights of a checkpoint.
    """
    found = re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    mode = 0o666 & ~int(found[1], 8) if found else 0o644
    for file in [place] if place.is_file() else place.glob("*.safetensors"):
        file.chmod(file.stat().st_mode | mode)
