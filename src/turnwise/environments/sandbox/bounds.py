"""The resource limits of a program, and the result of a run.

This module only defines the values. `process.py` and `jail.py` enforce the limits.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields

from turnwise.errors import ConfigError, TurnwiseError, nearest

__all__ = ["Bounds", "Ran", "SandboxError"]


class SandboxError(TurnwiseError):
    """The sandbox or its server failed for a call. The program did not run, or its result is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of one call. A program above a limit is stopped or gets an error; the answer names the limit of a stop."""

    seconds: float = 10.0
    """Wall-clock seconds from the start of the sandbox to its end."""
    cpu_seconds: int = 10
    """CPU seconds of each process."""
    memory_mb: int = 1024
    """MiB. Limits the address space of each process, and the resident memory of all processes together."""
    processes: int = 32
    """Maximum number of processes and threads at the same time."""
    disk_mb: int = 64
    """MiB. Limits all files in the working directory together, and the size of each file."""
    files: int = 1000
    """Maximum number of files and directories in the working directory."""
    open_files: int = 64
    """Maximum number of file descriptors of each process."""
    output_bytes: int = 16_000
    """Maximum bytes kept of standard output and standard error together: the beginning and the end of a longer output."""
    flood_mb: int = 64
    """MiB of output, kept or dropped, above which the program is stopped."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"the sandbox's bound {field.name} is {value!r}; it must be a number above 0")
            if field.type == "int" and not isinstance(value, int):
                raise ConfigError(f"the sandbox's bound {field.name} is {value!r}; it must be an integer")

    @classmethod
    def of(cls, given: Bounds | Mapping[str, float] | None) -> Bounds:
        """Return Bounds unchanged, or create Bounds from a mapping of a recipe. None gives the defaults.

        Raises ConfigError if a name is unknown or a value is not a number above 0.
        """
        if isinstance(given, Bounds):
            return given
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given or {} if name not in names]
        if unknown:
            raise ConfigError(
                f"the sandbox has no bound {unknown[0]!r}{nearest(unknown[0], names)}; its bounds are: {', '.join(names)}"
            )
        return cls(**dict(given or {}))  # type: ignore[arg-type]  # __post_init__ checks the types


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a program that ended or was stopped."""

    output: str
    """Standard output and standard error in order of arrival, at most `Bounds.output_bytes`, with a note in place of dropped
    output."""
    status: int
    """Exit status; 128 + n if signal n ended the program."""
    stopped: str | None = None
    """Why the sandbox stopped the program, for example `the program ran longer than 10 s`; None if it ended by itself."""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """Further notes for the model."""

    def text_for_model(self) -> str:
        """The text of the result for the model.

        Example: a program that prints 4 and then raises ends in `...ValueError: no\\n[exit status 1]`.
        """
        parts = [self.output.rstrip("\n")] if self.output.strip() else []
        if self.stopped is not None:
            parts.append(f"[stopped: {self.stopped}]")
        elif self.status:
            parts.append(f"[exit status {self.status}{_by_signal(self.status)}]")
        elif not parts:
            parts.append("[the program ended without printing anything]")
        return "\n".join([*parts, *(f"[{note}]" for note in self.notes)])


def _by_signal(status: int) -> str:
    if status <= 128 or status - 128 not in set(signal.Signals):
        return ""
    name = signal.Signals(status - 128).name
    if name == "SIGXCPU":
        return ", SIGXCPU: the limit of processor time was reached"
    if name == "SIGXFSZ":
        return ", SIGXFSZ: the program wrote a file that is too large"
    return f", {name}"
