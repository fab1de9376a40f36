"""The errors of turnwise, and `boundary`, where exceptions of other code become data.

A `TurnwiseError` is addressed to the user: its message has the value, the rule and the fix. `boundary` catches whatever user
code, a tool, an engine or a reward function raises, and raises it as `Failed` with a `Failure` that names what failed.

    Exception
    ├── TurnwiseError           the user can fix it; the command line prints the message without a traceback
    │   ├── ConfigError         a recipe, an override, a reference to a class or function
    │   ├── DataError           a data file, a row, a column
    │   ├── TemplateError       a tokenizer or its chat template
    │   ├── EngineError         an engine that cannot start or continue
    │   ├── RolloutError        a step whose conversations all failed
    │   └── RunError            a run directory that cannot be written, read or resumed
    │       └── StartAgain      ranks that have ended: the run goes on when they are started again
    └── Failed                  one conversation failed: recorded as data, the run continues
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

from turnwise.types import Failure

__all__ = [
    "OWN_CODE",
    "ConfigError",
    "DataError",
    "EngineError",
    "Failed",
    "RolloutError",
    "RunError",
    "StartAgain",
    "TemplateError",
    "TurnwiseError",
    "boundary",
    "counted",
    "failed_by",
    "hide",
    "nearest",
    "text_of",
    "without_hidden",
]


class TurnwiseError(Exception):
    """An error that the user can fix."""

    exit_status = 1
    """That of a command which it ends."""


class ConfigError(TurnwiseError):
    """An error in a recipe, in an override, or in what they refer to."""


class DataError(TurnwiseError):
    """An error in a data file, a row or a column."""


class TemplateError(TurnwiseError):
    """An error in a tokenizer or its chat template."""


class EngineError(TurnwiseError):
    """An engine cannot start or cannot continue."""


class GrammarError(TurnwiseError):
    """A grammar of constrained output cannot be compiled, or does not fit the tokens of a turn."""


class RolloutError(TurnwiseError):
    """All conversations of a step failed."""


class HealthError(TurnwiseError):
    """A monitor of `health.stop` has stopped a training run."""


class RunError(TurnwiseError):
    """A run directory cannot be written, read or resumed."""


class StartAgain(RunError):
    """Ranks of a training have ended, and the run goes on when they are started again with `resume=auto`."""

    exit_status = os.EX_TEMPFAIL
    """That of the command on rank 0, by which those who started the ranks see it."""


NOT_AGAIN = os.EX_CONFIG
"""The exit status of another rank than rank 0 that has ended with an error which each new start of the ranks would have again."""


class Failed(Exception):
    """One conversation failed. `failure` is the reason as data."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


OWN_CODE = os.path.dirname(os.path.realpath(__file__)) + os.sep
"""The directory of turnwise. Its frames are left out of tracebacks."""

_MACHINERY = (
    os.path.dirname(os.path.realpath(asyncio.__file__)) + os.sep,
    os.path.realpath(contextlib.__file__),
    os.path.realpath(functools.__file__),
    os.path.realpath(threading.__file__),
    os.path.join(OWN_CODE, "errors.py"),
    os.path.join(OWN_CODE, "user_code") + os.sep,
)
"""Files and folders whose frames are left out of a traceback: they stand between the loop and the code of users."""
_LONGEST_MESSAGE = 4000  # characters of the message of an exception
_FIRST_FRAMES, _LAST_FRAMES = 5, 15


class Boundary:
    """Attributes whatever is raised inside to `kind`, once: the innermost boundary wins. `where` begins the message.

    Only what ends the run passes: a cancellation, Ctrl-C, a generator that is closed. A class and not a generator, because each
    live conversation is inside several of them.

    Raises Failed.
    """

    __slots__ = ("_kind", "_process", "_where")

    def __init__(self, kind: str, *, where: str = "") -> None:
        self._kind = kind
        self._where = where

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if os.getpid() != self._process:  # a child that the code inside has forked would go on as a second run
            _end_process(error)
        if error is None or isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
            return
        kind, where = self._kind, self._where
        if not isinstance(error, Failed):  # whatever the other code raises becomes data here
            raise failed_by(error, kind, where=where) from error
        if where and error.failure.kind == kind and where not in error.failure.message:
            raise Failed(replace(error.failure, message=f"{where}: {error.failure.message}")) from error.__cause__


boundary = Boundary


def _end_process(error: BaseException | None) -> NoReturn:
    """End a forked process as Python ends a process whose main code has returned or raised, without functions of `atexit`."""
    if error is None:
        status = 0
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    else:
        traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status & 0xFF)


def failed_by(error: BaseException, kind: str, *, where: str = "") -> Failed:
    """An exception as the failure of one conversation, with the traceback."""
    if isinstance(error, SystemExit):  # it ends its own conversation, not the run
        message = f"the code tried to exit the process (status {text_of(error.code)})"
    else:
        message = text_of(error)
        if not isinstance(error, TurnwiseError):
            message = f"{type(error).__name__}: {message}".rstrip(": ")
    message = without_hidden(f"{where}: {message}" if where else message)
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]} [...]"
    return Failed(Failure(kind, message, traceback=traceback_of(error)))


_HIDDEN: dict[str, str] = {}
"""Values that no message may contain, and what stands for each."""


def hide(value: str, *, shown: str) -> None:
    """From now on, `shown` stands for `value` in the messages of failures and errors: it is a key or a password."""
    _HIDDEN[value] = shown


def without_hidden(text: str) -> str:
    """A message without the values that `hide` was called with."""
    for value in sorted(_HIDDEN, key=len, reverse=True):  # a value may contain another one
        text = text.replace(value, _HIDDEN[value])
    return text


def text_of(value: object) -> str:
    """`str(value)`, also for an object whose `__str__` raises. For a KeyError, the key without quotes."""
    try:
        if isinstance(value, KeyError) and value.args:
            value = value.args[0]  # str() would quote it
        return str(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"<{type(value).__name__}, whose __str__ raised {type(error).__name__}>"


def traceback_of(error: BaseException, *, depth: int = 3) -> str:
    """The frames of an exception and of up to `depth` causes, innermost last, as Python prints them.

    Frames of turnwise are left out unless there are no others. A TurnwiseError without other frames has an empty traceback.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not os.path.realpath(frame.filename).startswith(_MACHINERY)
    ]
    others = [frame for frame in frames if not os.path.realpath(frame.filename).startswith(OWN_CODE)]
    if not others and isinstance(error, TurnwiseError):
        return ""  # the message says what to do, and no line of the user's code is involved
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


def counted(count: int, noun: str) -> str:
    """The count with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def message_pattern(message: str) -> str:
    """A message without what varies: `after 30.1 s in '/tmp/x'` becomes `after # s in #`."""
    return _VARYING.sub("#", message)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a message: `; did you mean 'lr'?`, or an empty text if no name is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
