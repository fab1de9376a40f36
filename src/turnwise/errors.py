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

import asyncio
import contextlib
import difflib
import functools
import os
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from turnwise.types import Failure

__all__ = [
    "OWN_CODE",
    "ConfigError",
    "DataError",
    "EngineError",
    "Failed",
    "RolloutError",
    "RunError",
    "TemplateError",
    "TurnwiseError",
    "boundary",
    "failed_by",
    "nearest",
    "text_of",
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


OWN_CODE = os.path.dirname(os.path.realpath(__file__)) + os.sep
"""Where our own code is: its lines are left out of tracebacks."""

_MACHINERY = (
    os.path.dirname(os.path.realpath(asyncio.__file__)) + os.sep,
    os.path.realpath(contextlib.__file__),
    os.path.realpath(functools.__file__),
    os.path.realpath(threading.__file__),
    *(os.path.join(OWN_CODE, *path.split("/")) for path in ("errors.py", "user_code.py", "environments/aside.py")),
)
_LONGEST_MESSAGE = 4000  # characters of somebody's exception
_FIRST_FRAMES, _LAST_FRAMES = 5, 15


@contextmanager
def boundary(kind: str, *, where: str = "") -> Iterator[None]:
    """Attribute whatever is raised inside to `kind`, once: the innermost boundary wins. `where` begins the message.

    Only what ends the run passes: a cancellation, Ctrl-C, a generator that is closed.

    Raises Failed.
    """
    try:
        yield
    except Failed as failed:
        if where and failed.failure.kind == kind and where not in failed.failure.message:
            raise Failed(replace(failed.failure, message=f"{where}: {failed.failure.message}")) from failed.__cause__
        raise
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever the other side raises is data here
        raise failed_by(error, kind, where=where) from error


def failed_by(error: BaseException, kind: str, *, where: str = "") -> Failed:
    """An exception as the failure of one conversation, with its traceback."""
    if isinstance(error, SystemExit):  # it ends its own conversation, not the run
        message = f"it tried to exit the process (status {text_of(error.code)})"
    else:
        message = text_of(error)
        if not isinstance(error, TurnwiseError):
            message = f"{type(error).__name__}: {message}".rstrip(": ")
    message = f"{where}: {message}" if where else message
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]} [...]"
    return Failed(Failure(kind, message, traceback=traceback_of(error)))


def text_of(value: object) -> str:
    """`str(value)`, also of an object whose `__str__` raises; of a KeyError the key's own text."""
    try:
        if isinstance(value, KeyError) and value.args:
            value = value.args[0]  # str() would quote it
        return str(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"<{type(value).__name__}, whose __str__ raised {type(error).__name__}>"


def traceback_of(error: BaseException, *, depth: int = 3) -> str:
    """The frames of an exception and of `depth` exceptions that caused it, innermost last, as Python prints them.

    Frames of our own code are left out, unless there are no others; an error of ours without others has none.
    """
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if not os.path.realpath(one.filename).startswith(_MACHINERY)
    ]
    others = [one for one in frames if not os.path.realpath(one.filename).startswith(OWN_CODE)]
    if not others and isinstance(error, TurnwiseError):
        return ""  # its message says what to do, and no line of the user's led to it
    frames = others or frames
    missing = len(frames) - _FIRST_FRAMES - _LAST_FRAMES
    lines = traceback.format_list(frames if missing <= 0 else frames[:_FIRST_FRAMES])
    if missing > 0:
        lines += [f"  [... {missing} frames left out ...]\n", *traceback.format_list(frames[-_LAST_FRAMES:])]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or cause.__traceback__ is None or not depth:
        return "".join(lines)
    before = traceback_of(cause, depth=depth - 1)
    return f"{before}{type(cause).__name__}: {text_of(cause)[:200]}\n\nThis led to:\n\n{''.join(lines)}"


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a message: `; did you mean 'lr'?`, or the empty text where nothing is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
