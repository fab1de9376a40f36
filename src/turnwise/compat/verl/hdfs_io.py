"""File functions that verl's preprocessing scripts import (`verl.utils.hdfs_io`, `verl.utils.fs`): local paths and hdfs://.

hdfs:// paths need the command line tool `hdfs`. Training does not use this module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["copy", "copy_to_local", "exists", "makedirs"]

_REMOTE = "hdfs://"


def exists(path: str, **kwargs: Any) -> bool:
    """Whether there is a file or directory at `path`."""
    return _hdfs("-test", "-e", path, check=False) == 0 if path.startswith(_REMOTE) else os.path.exists(path)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Create a directory and its parents. Raises FileExistsError if a local directory exists and `exist_ok` is false."""
    if name.startswith(_REMOTE):
        _hdfs("-mkdir", "-p", name)
    else:
        os.makedirs(name, mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> Any:
    """Copy a file or a directory. Returns the path of the copy, or True if the source or the target is on HDFS."""
    if src.startswith(_REMOTE) or dst.startswith(_REMOTE):
        action = (
            ["-get"] if not dst.startswith(_REMOTE) else ["-cp", "-f"] if src.startswith(_REMOTE) else ["-put", "-f"]
        )
        _hdfs(*action, src, dst)
        return True
    return shutil.copytree(src, dst, **kwargs) if os.path.isdir(src) else shutil.copy(src, dst, **kwargs)


def copy_to_local(src: str, cache_dir: str | None = None, **kwargs: Any) -> str:
    """The path of a local copy. A local path is returned unchanged; an hdfs:// path is copied once into `cache_dir`."""
    if not src.startswith(_REMOTE):
        return src
    folder = Path(cache_dir or "~/.cache/verl").expanduser()
    local = folder / src.removeprefix(_REMOTE).strip("/").replace("/", "_")
    if not local.exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy(src, str(local))
    return str(local)


def _hdfs(*arguments: str, check: bool = True) -> int:
    program = shutil.which("hdfs")
    if program is None:
        raise FileNotFoundError(
            f"{arguments[-1]}: the command line tool `hdfs` is not on the path; install it, or use local paths"
        )
    done = subprocess.run([program, "dfs", *arguments], check=False)
    if check and done.returncode != 0:
        raise OSError(f"hdfs dfs {' '.join(arguments)} ended with status {done.returncode}")
    return done.returncode
