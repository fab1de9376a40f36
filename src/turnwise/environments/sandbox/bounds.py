"""What a program may use, and what came of it.

Knows numbers and words only: how they are enforced is the business of `process.py` and `jail.py`.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields

from turnwise.errors import ConfigError, TurnwiseError, nearest

__all__ = ["Bounds", "Ran", "SandboxError"]


class SandboxError(TurnwiseError):
    """The sandbox itself could not be set up for a call; the program was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one call may use. A program that goes beyond is stopped, and the model is told by which bound."""

    seconds: float = 10.0
    """On the clock, from the start of the sandbox to its end."""
    cpu_seconds: int = 10
    """Of the processor, for each process."""
    memory_mb: int = 1024
    """Address space of each process, and resident memory of all of them together."""
    processes: int = 32
    """Processes and threads that exist at once."""
    disk_mb: int = 64
    """All files in the working directory together; also the most that one file may hold."""
    files: int = 1000
    """Files and directories in the working directory."""
    open_files: int = 64
    """File descriptors of each process."""
    output_bytes: int = 16_000
    """Of standard output and standard error together; of a longer text the beginning and the end are kept."""
    flood_mb: int = 64
    """Output after which the program is stopped, kept or not."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"the sandbox's {field.name} is {value!r}; give a number above 0")
            if field.type == "int" and not isinstance(value, int):
                raise ConfigError(f"the sandbox's {field.name} is {value!r}; give a whole number")

    @classmethod
    def of(cls, given: Bounds | Mapping[str, float] | None) -> Bounds:
        """Bounds as they are, or from a recipe's mapping.

        Raises ConfigError if a name is unknown or a value is no number above 0.
        """
        if isinstance(given, Bounds):
            return given
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given or {} if name not in names]
        if unknown:
            raise ConfigError(
                f"the sandbox has no bound {unknown[0]!r}{nearest(unknown[0], names)}; its bounds are: {', '.join(names)}"
            )
        return cls(**dict(given or {}))  # type: ignore[arg-type]  # their types are checked above


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A program that ended, or was ended."""

    output: str
    """Standard output and standard error as they came, at most `Bounds.output_bytes` of them, and a note where some are
    missing."""
    status: int
    """Exit status; 128 + n where signal n ended it."""
    stopped: str | None = None
    """Why it was stopped from outside, as a sentence's end: `it ran longer than 10 s`."""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """What else the model should know, a sentence each."""

    def told(self) -> str:
        """What the model is told.

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
        return ", SIGXCPU: it used up its processor time"
    if name == "SIGXFSZ":
        return ", SIGXFSZ: it wrote a file that is too large"
    return f", {name}"
