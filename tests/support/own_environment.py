"""Python environments of packages that cannot be installed beside turnwise's own requirements, made once on a machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

ENVIRONMENTS = Path(os.environ.get("TURNWISE_ENGINES", "~/.cache/turnwise/engines")).expanduser()


def needs(library: str) -> pytest.MarkDecorator:
    """Skips the tests of a file without a library. Only those that use it import it: each process collects all files."""
    return pytest.mark.skipif(find_spec(library) is None, reason=f"needs pip install 'turnwise[{library}]'")


def python_3_12() -> str:
    """An interpreter for packages that need Python 3.12. Skips the test if there is none."""
    kept = sorted(Path("~/.pyenv/versions").expanduser().glob("3.12.*/bin/python"))
    # pyenv's own python3.12 on PATH runs nothing unless that version is chosen
    found = str(kept[-1]) if kept else shutil.which("python3.12")
    if found is None:
        pytest.skip("there is no Python 3.12 on this machine")
    return found


def interpreter(name: str, requirement: str, module: str, *, base: str = sys.executable) -> str:
    """The Python of a package's environment, which is made with the interpreter `base` if it does not exist, or if making it was
    once interrupted. Skips the test if it cannot be made."""
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENTS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of pytest want it, too
        return _made(ENVIRONMENTS / name, requirement, module, base)


def _made(folder: Path, requirement: str, module: str, base: str) -> str:
    """The same. What is complete is noted in the environment: to import the module takes up to 9 seconds."""
    python, complete = folder / "bin" / "python", folder / "complete.txt"
    if python.exists() and complete.exists() and complete.read_text() == requirement:
        return str(python)
    if not python.exists() or _problem(python, module) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            [base, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "-q", "--no-compile", requirement],
        ):
            made = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            if made.returncode:
                shutil.rmtree(folder, ignore_errors=True)  # the next run tries again
                pytest.skip(f"{requirement} cannot be installed: {made.stderr[-500:]}")
        if (problem := _problem(python, module)) is not None:
            pytest.skip(f"{folder} has no {module}: {problem}")
    complete.write_text(requirement)
    return str(python)


def _problem(python: Path, module: str) -> str | None:
    """Why a module cannot be imported; None if it can."""
    tried = [str(python), "-c", f"import {module}"]
    found = subprocess.run(tried, capture_output=True, text=True, timeout=600, check=False)
    return found.stderr[-500:] if found.returncode else None


def run_tests(python: str, files: Sequence[Path], chosen: str) -> None:
    """Run the tests of `files` whose names fit `chosen` (pytest's `-k`), in one process with the Python of another environment,
    where its packages come before those of this one: a process imports torch, transformers and the library for 10 seconds.

    Raises AssertionError if a test failed or was skipped for another reason than that this machine runs no containers."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")])
    # inspect_ai leaves streams of anyio to the garbage collector when a sample is cancelled
    streams = "ignore:Exception ignored in. <function MemoryObject:pytest.PytestUnraisableExceptionWarning"
    words = [
        *map(str, files),
        "-k",
        chosen,
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-o",
        f"filterwarnings=error\n{streams}",
    ]
    code = (
        f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r}); import pytest; "
        f"sys.exit(pytest.main({words!r}))"
    )
    ran = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    skipped = [line for line in ran.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("tests/support/real_containers.py" in line for line in skipped), ran.stdout[-1000:]
