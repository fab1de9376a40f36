"""The version of turnwise, and which source a process runs."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["__version__", "source_checksum", "source_version"]

try:
    __version__ = version("turnwise")
except PackageNotFoundError:  # the source is on the path and nothing is installed
    __version__ = "unknown"


@functools.cache
def source_version() -> str:
    """The version with a short checksum of the package's files, such as `0.1.0 (source 3f2a91c0)`. Checkouts that were installed
    with `pip install -e` all have the version of pyproject.toml, whatever their commits."""
    return f"{__version__} (source {source_checksum(Path(__file__).parent)})"


def source_checksum(package: Path) -> str:
    """The first 8 hexadecimal digits of a checksum over names and contents of the Python files of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes().replace(b"\r\n", b"\n")  # git may write other line ends on another machine
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:8]
