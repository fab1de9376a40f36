"""Data sets of Harbor's registry: `NAME@VERSION` becomes a folder of tasks, from the git repositories that the registry names.

A registry is a JSON list of data sets: name, version, and tasks with `git_url`, `git_commit_id` (or none) and `path`. What was
fetched stays in `~/.cache/turnwise/harbor`, because a version does not change. The registry is not trusted: no name and no path
of it leaves the folder, and git asks for no password."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, nearest

REGISTRY = "https://raw.githubusercontent.com/harbor-framework/harbor/main/registry.json"
_NAME = re.compile(r"[A-Za-z0-9][\w./-]*@[\w.+-]+")
_TASK = re.compile(r"[A-Za-z0-9][\w.-]*")
_SECONDS, _GIT_SECONDS = 30.0, 600.0


def is_dataset(name: str) -> bool:
    """Whether a name is one of a registry, and no folder."""
    return _NAME.fullmatch(name) is not None and not Path(name).expanduser().exists()


def dataset_folder(name: str, registry: str | None = None) -> Path:
    """The folder with the tasks of a data set, which is fetched if it is not there. `registry`: the path or URL of another one.

    Raises ConfigError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "turnwise" / "harbor"
    place = cache / (name if registry is None else f"{re.sub(r'[^A-Za-z0-9.]+', '_', registry)}/{name}")
    if place.is_dir():
        return place
    tasks = _tasks(_read(registry or REGISTRY), name, registry or REGISTRY)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as made:
        folder = Path(made) / "tasks"
        folder.mkdir()
        sources: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for task in tasks:
            sources.setdefault((str(task["git_url"]), str(task.get("git_commit_id") or "HEAD")), []).append(task)
        for number, ((url, commit), its) in enumerate(sources.items()):
            _check_out(url, commit, its, Path(made) / f"source-{number}", folder, name)
        try:
            folder.rename(place)
        except OSError:  # another process was faster
            if not place.is_dir():
                raise
    return place


def _read(registry: str) -> Any:
    try:
        if registry.startswith(("http://", "https://")):
            with urllib.request.urlopen(registry, timeout=_SECONDS) as answer:
                return json.load(answer)
        return json.loads(Path(registry).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"environment: harbor: the registry {registry} cannot be read: {error}. Without a network, name a folder of tasks, "
            f"or set environment.arguments.registry to a registry.json here"
        ) from None


def _tasks(listed: Any, name: str, registry: str) -> Sequence[Mapping[str, Any]]:
    """The tasks of a data set. Raises ConfigError."""
    try:
        known = {f"{one['name']}@{one['version']}": one["tasks"] for one in listed}
        if name not in known:
            raise ConfigError(
                f"environment: harbor: {registry} has no data set {name}{nearest(name, known)}; it has {len(known)}"
            )
        for task in known[name]:
            inside = os.path.normpath(str(task["path"]))
            if inside.startswith(("..", "/", "-")) or _TASK.fullmatch(_task_name(task)) is None:
                raise ConfigError(
                    f"environment: harbor: {name} of {registry} has the task {task!r:.200}, which is no path inside"
                )
            if not re.match(r"(https?|ssh|git|file)://", str(task["git_url"])):
                raise ConfigError(
                    f"environment: harbor: {name} of {registry} has git_url={task['git_url']!r:.200}, which is no URL"
                )
    except (TypeError, KeyError) as error:
        raise ConfigError(f"environment: harbor: {registry} is no registry of Harbor: {error!r:.200}") from None
    return known[name]


def _task_name(task: Mapping[str, Any]) -> str:
    return str(task.get("name") or Path(str(task["path"])).name)


def _check_out(
    url: str, commit: str, tasks: Sequence[Mapping[str, Any]], source: Path, folder: Path, name: str
) -> None:
    """Put tasks of a repository into the folder. Raises ConfigError with what git says."""
    paths = [os.path.normpath(str(task["path"])) for task in tasks]
    _git(name, "init", "--quiet", str(source))
    at = ["-C", str(source)]
    _git(name, *at, "sparse-checkout", "set", "--no-cone", *(f"/{path}/" for path in paths))
    _git(name, *at, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "--", url, commit)
    _git(
        name,
        *at,
        "-c",
        f"remote.origin.url={url}",
        "-c",
        "remote.origin.promisor=true",
        "checkout",
        "--quiet",
        "FETCH_HEAD",
    )
    for task, path in zip(tasks, paths, strict=True):
        if not (source / path / "task.toml").is_file():
            raise ConfigError(f"environment: harbor: {name}: {url} at {commit} has no task in {path}")
        shutil.copytree(source / path, folder / _task_name(task), symlinks=True)


def _git(name: str, *words: str) -> None:
    surroundings = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}
    try:
        done = subprocess.run(
            ["git", *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            env=surroundings,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"environment: harbor: {name} cannot be fetched: {error}") from None
    if done.returncode != 0:
        raise ConfigError(f"environment: harbor: {name} cannot be fetched: git says {done.stderr.strip()[-600:]}")
