"""The version of turnwise: that of pyproject.toml, as it was installed."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("turnwise")
except PackageNotFoundError:  # the source is on the path and nothing is installed
    __version__ = "unknown"
