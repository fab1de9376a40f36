"""What every command has: its arguments and its context, how it stops on a signal, and the command that resumes its run.

A command is a module with `register(parser)`, which adds its arguments and sets `command` to a function of the parsed options
and the `Context` that returns the exit status. Heavy imports are made in that function. `cli.py` imports the module of the
command that is run, and no other.

Ctrl-C, SIGTERM and SIGHUP stop a command in the same way. A closed terminal or pipe does not stop it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import math
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, TypeVar

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console

    from turnwise.options.schema import Config
    from turnwise.runs.run_state import RunState
    from turnwise.terminal.report import Report


# arguments

_MOST_DAMAGED, _LAST_PORT = 5, 65535


@dataclass(frozen=True, slots=True)
class Context:
    """What a command runs with."""

    console: Console
    stops: Stops
    """Runs coroutines until a signal stops them."""


Command = Callable[[argparse.Namespace, Context], int]
"""Runs a command and returns its exit status. Raises TurnwiseError for what a person can put right."""

_OVERRIDES = "options of the recipe to change; values are YAML: {lr}=1e-4 limits.turns=4 'sampling.stop=[\"###\"]'"


def add_recipe(
    parser: argparse.ArgumentParser,
    *,
    example: str = "recipes/calculator.yaml",
    lr: str = "train.lr",
    nargs: str | None = None,
) -> None:
    """Add the arguments `recipe` and `key=value ...`. `nargs="?"` makes the recipe optional."""
    parser.add_argument("recipe", nargs=nargs, help=f"a YAML file, such as {example}")
    add_overrides(parser, help=_OVERRIDES.format(lr=lr))


def load_recipe(options: argparse.Namespace) -> tuple[Config, list[str]]:
    """The recipe and the overrides of a command line, and notes for the person who starts the run.

    Files that the recipe names are looked for here, before torch is imported, which takes seconds. Raises ConfigError or
    DataError.
    """
    from turnwise.config.recipe import load

    config, notes = load(options.recipe, options.overrides)
    refuse_missing_files(config)
    return config, notes


def refuse_missing_files(config: Config) -> None:
    """Refuse a recipe with a data set or a file of user code that does not exist. Raises ConfigError or DataError."""
    from turnwise.data.rows import refuse_missing_source
    from turnwise.options.section import Section, Use
    from turnwise.user_code.references import refuse_missing_file

    for source in (config.data.train, config.data.eval):
        for path in [source] if isinstance(source, str) else source or ():
            refuse_missing_source(path)

    def visit(value: object, key: str) -> None:
        if isinstance(value, Use):
            refuse_missing_file(value.use, key=key)
        elif isinstance(value, Section):
            for name in type(value).model_fields:
                visit(getattr(value, name), f"{key}.{name}" if key else name)
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part, key)

    visit(config, "")


def add_overrides(parser: argparse.ArgumentParser, *, help: str) -> None:
    """Add the argument `key=value ...`. The shell completes the names of options."""
    overrides = parser.add_argument("overrides", nargs="*", metavar="key=value", help=help)
    overrides.completer = _option_names  # pyright: ignore[reportAttributeAccessIssue]  # argcomplete reads this attribute


def _option_names(prefix: str, action: object, parser: object, parsed_args: object) -> list[str]:
    """The options of recipes that begin with `prefix`, such as `train.lr=`. argcomplete gives all arguments by keyword."""
    from turnwise.config.resume_rules import RULES

    return [f"{option}=" for option in RULES if option.startswith(prefix) and "[" not in option]


def count(text: str) -> int:
    """A number of at least 1, as the value of an argument."""
    return _integer(text, least=1)


def step_number(text: str) -> int:
    """The number of a step, as the value of an argument. Evaluations before training have step 0."""
    return _integer(text, least=0)


def step_or_last(text: str) -> int | Literal["last"]:
    """The number of a step, or `last`, as the value of an argument."""
    if text == "last":
        return "last"
    try:
        return step_number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no step: give a number of at least 0, or last for the last step"
        ) from None


def port(text: str) -> int:
    """A TCP port, as the value of an argument; 0: any free one."""
    value = _integer(text, least=0)
    if value > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 0 to {_LAST_PORT}")
    return value


def positive(text: str) -> float:
    """A finite number above 0, as the value of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return value


def _integer(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of at least {least}")
    return value


def damage_notes(damaged: Sequence[str]) -> list[str]:
    """What to print about damaged lines of a record, which were left out."""
    lines = list(dict.fromkeys(damaged))
    more = [f"and {len(lines) - _MOST_DAMAGED} more damaged lines"] if len(lines) > _MOST_DAMAGED else []
    return [*(f"left out: {line}" for line in lines[:_MOST_DAMAGED]), *more]


def print_lines(console: Console, lines: Sequence[str], *, style: str | None = None) -> None:
    """Print lines as they are: without markup, and without wrapping paths."""
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


# runs that can be resumed

_SHOW_CURSOR = "\r\n\x1b[?25h"
"""A live display hides the cursor, and a run that is stopped at once cannot close its display."""


def resume_command(command: str, options: argparse.Namespace, config: Config) -> str:
    """The command that resumes a run: the same words, since other options would make it another run."""
    own = ("resume=", "replace=", "output=")
    words = [word for word in options.overrides if not word.startswith(own)]
    return shlex.join(["turnwise", command, options.recipe, *words, "resume=auto", f"output={config.output}"])


def run_to_end(work: Coroutine[Any, Any, None], run: RunState, report: Report, context: Context, *, resume: str) -> int:
    """Run `work` to its end. If a signal stops it, print how far it is, its newest checkpoint, and the `resume` command.

    Returns the exit status. Raises KeyboardInterrupt after a signal.
    """
    from turnwise.terminal.report import Heartbeat  # behind the parser, because it loads pydantic and YAML

    console = context.console
    show_cursor = _SHOW_CURSOR if console.is_terminal else ""
    context.stops.farewell = lambda: f"{show_cursor}turnwise: {run.stopped_text(resume)}"
    try:
        with Heartbeat(run.activity, console):
            context.stops.run(work)
    except KeyboardInterrupt:
        report.close()
        print_lines(console, [run.stopped_text(resume)])
        raise
    finally:
        report.close()
    return 0


# signals and closed streams

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def open_closed_streams() -> None:
    """Open the null device for stdin, stdout and stderr if the process was started without them.

    Otherwise the next opened file, such as the record, would get that file number, and text for stderr would be written to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


class Stops:
    """A context in which a signal cancels the coroutine of `run`: resources are closed and a checkpoint is written.

    A second Ctrl-C ends the process at once: nothing is closed or written, and `farewell` is the last text. Other repeated
    signals are ignored, because terminals and schedulers send them twice. A signal that was ignored before (`nohup`, a job in
    the background) stays ignored. KeyboardInterrupt is raised for each of the signals; `received` is the signal.

    With `until_exit`, the handlers stay while the interpreter exits, so that a late signal does not change the exit status.
    `finalize=False` then ends the process behind all functions of `atexit`, with `exit_status`.
    """

    def __init__(self, *, until_exit: bool = False) -> None:
        self.received: signal.Signals | None = None
        self.farewell: Callable[[], str] = lambda: "turnwise: stopped at once"
        """The last text of a process that is stopped at once. Called in a signal handler, so it must not block."""
        self.finalize = True
        """Whether the interpreter is finalized at the exit. Threads of C++ that take the GIL meanwhile, such as those of gloo,
        abort the process ("terminate called without an active exception"), and its exit status is lost."""
        self.exit_status = 1
        self._until_exit = until_exit
        self._running = False
        self._exiting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._former: dict[signal.Signals, Any] = {}
        self._former_hook = sys.unraisablehook

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                if previous not in (signal.SIG_IGN, None):
                    self._former[number] = previous
                    signal.signal(number, self._stop)
            if self._former:
                self._former_hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
            if self._until_exit:  # Python resets its handlers at the very end, after all other functions of `atexit`
                atexit.register(self._at_exit)
        return self

    def __exit__(self, *_: object) -> None:
        if self._until_exit:
            self._exiting = True
            return
        for number, previous in self._former.items():
            signal.signal(number, previous)
        if self._former:
            sys.unraisablehook = self._former_hook

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """An exception that Python cannot raise, and would print: in a callback of the garbage collector, in `__del__`. A
        KeyboardInterrupt of `_stop` would be lost there, so its signal is sent again: a moment later, because the handler runs at
        once in this function, too."""
        if what.exc_type is KeyboardInterrupt and self.received is not None:
            number, self.received = self.received, None
            again = threading.Timer(0.01, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        else:
            self._former_hook(what)

    def _at_exit(self) -> None:
        for number in self._former:
            signal.signal(number, signal.SIG_IGN)
        if not self.finalize:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            _exit(self.exit_status)

    @property
    def status(self) -> int:
        """The exit status of a stopped command: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + (self.received or signal.SIGINT)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in an event loop of its own, as `asyncio.run` does.

        Raises KeyboardInterrupt if a signal has ended it.
        """
        import asyncio  # here, because `turnwise --help` does not need it

        from turnwise.errors import RunError

        self._running = True
        os._exit = partial(_refuse_exit, os.getpid())
        try:
            return asyncio.run(self._supervised(main))
        except asyncio.CancelledError:
            if self.received is None:
                raise RunError(
                    f"the run was cancelled from inside: code of the recipe has cancelled all tasks of the event loop. "
                    f"{_CANCEL_OWN}. {_RESUME}"
                ) from None
            raise KeyboardInterrupt from None
        except RuntimeError as error:
            if "Event loop stopped" not in str(error):
                raise
            raise RunError(
                f"the event loop of the run was stopped from inside: code of the recipe has called loop.stop(). Remove that "
                f"call; an environment ends its conversation with Reply(done=True). {_RESUME}"
            ) from None
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            raise RunError(
                f"a file or socket of the run was closed from inside ({error}): code of the recipe has closed file descriptors "
                f"that it has not opened (os.close, os.closerange). {_RESUME}"
            ) from error
        finally:
            os._exit = _exit
            self._running = False
            self._loop = self._task = None

    async def _supervised(self, main: Coroutine[Any, Any, T]) -> T:
        import asyncio

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.received is not None:  # the signal came before the task was created
            main.close()
            raise asyncio.CancelledError
        return await main

    def _stop(self, number: int, frame: FrameType | None) -> None:
        second = self.received is not None
        self.received = self.received or signal.Signals(number)
        if second:
            if number == signal.SIGINT:
                _write_error(self.farewell())
                _exit(self.status)  # the interpreter's own exit would wait for threads, and for user code
        elif self._running or self._exiting:
            _write_error(f"turnwise: stopping ({self.received.name}); Ctrl-C stops at once")
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)  # threadsafe: it also wakes a waiting loop
        else:
            raise KeyboardInterrupt


_exit = os._exit
_RESUME = "The steps up to the last checkpoint are kept: resume=auto continues"
_CANCEL_OWN = "Cancel only tasks that your code has created"


def _refuse_exit(process: int, status: int) -> NoReturn:
    """`os._exit` while a run is in progress in `process`. In a conversation it fails that conversation, as `sys.exit` does.
    Elsewhere, such as in a thread that user code has started, it ends the process, which must not look like a finished run."""
    if os.getpid() != process:  # one of its children
        _exit(status)
    from turnwise.user_code.calls import conversation_name

    if conversation_name():
        raise SystemExit(status)
    _write_error(
        f"turnwise: code of the recipe has called os._exit({status}), which ends the run at once, without a checkpoint. Raise an "
        f"exception to end one conversation. {_RESUME}"
    )
    _exit(status or 1)


def _write_error(text: str) -> None:
    """Write a line to stderr from a signal handler, without blocking. `print` is not safe there: the signal may interrupt it."""
    with contextlib.suppress(OSError, ValueError):
        _, ready, _ = select.select([], [2], [], 0)
        if ready:
            os.write(2, f"{text}\n".encode(errors="replace"))


class _DroppingStream:
    """A stream that drops all text after its reader has gone away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except (
            OSError
        ):  # the pipe or the terminal is gone: redirect the file number, which C code and child processes use, too
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
        except ValueError:  # closed in this process
            pass


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """A context in which writing to stdout and stderr never fails: a run continues after `| head` or the terminal has gone."""
    previous = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _DroppingStream(previous[0]), _DroppingStream(previous[1])  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        sys.stdout, sys.stderr = previous
