"""What goes wrong, and the one place where an exception of somebody else's code becomes data.

`TurnwiseError` is for people: a message that holds the value, the rule and the fix. Everything that user code, a tool, an
engine or a reward may raise is caught in `boundary`, named after the side that broke, and carried on as a `Failure`.

    Exception
    ├── TurnwiseError           a person can put it right; the command line prints its text and nothing else
    │   ├── ConfigError         a recipe, an override, a reference to a class or function
    │   ├── DataError           a data file, a row, a column
    │   ├── TemplateError       a tokenizer or its chat template
    │   ├── EngineError         an engine that cannot start or go on
    │   ├── RolloutError        a step whose conversations all broke
    │   └── RunError            a run directory that cannot be written, read or resumed
    └── Failed                  one conversation broke: data, never a reason to stop
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from turnwise.types import Failure

__all__ = [
    "ConfigError",
    "DataError",
    "EngineError",
    "Failed",
    "RolloutError",
    "RunError",
    "TemplateError",
    "TurnwiseError",
    "boundary",
    "nearest",
]


class TurnwiseError(Exception):
    """Something that a person can put right."""


class ConfigError(TurnwiseError):
    """A recipe, an override, or what one of them refers to."""


class DataError(TurnwiseError):
    """A data file, a row or a column."""


class TemplateError(TurnwiseError):
    """A tokenizer or its chat template."""


class EngineError(TurnwiseError):
    """An engine that cannot start or cannot go on."""


class RolloutError(TurnwiseError):
    """A step whose conversations all broke."""


class RunError(TurnwiseError):
    """A run directory that cannot be written, read or resumed."""


class Failed(Exception):
    """One conversation broke. Carries the failure as data."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def boundary(kind: str) -> Iterator[None]:
    """Attribute whatever is raised inside to `kind`, once: the innermost boundary wins.

    Raises Failed.
    """
    try:
        yield
    except Failed:
        raise
    except (Exception, SystemExit) as error:  # whatever the other side raises is data here
        if isinstance(error, SystemExit):  # it ends its own conversation, not the run
            raise Failed(Failure(kind, f"it tried to exit the process (status {error.code})")) from error
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)  # str() would quote it
        message = text if isinstance(error, TurnwiseError) else f"{type(error).__name__}: {text}".rstrip(": ")
        raise Failed(Failure(kind, message)) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a message: `; did you mean 'lr'?`, or the empty text where nothing is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
