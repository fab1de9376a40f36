"""Make the Python environments of the real engines: vLLM and SGLang, on the CPU, for the tests with the marker `engines`.

python scripts/engine_env.py                 # make both, or do nothing if they are complete
python scripts/engine_env.py sglang          # make one
python scripts/engine_env.py vllm --check    # exit 1 if it is missing or not complete

Each engine has an environment of its own, because each pins other versions. An environment is a directory below
$TURNWISE_ENGINES (default: ~/.cache/turnwise/engines), outside of the checkout, so that all checkouts share it. The packages
and their versions are the files scripts/engines/<engine>.txt. A complete environment has a file turnwise.json with the
fingerprint of what it was made from; if that is what the checkout asks for, nothing is done. Otherwise the environment is
completed, or made again if its interpreter does not run. The environments are for Linux on x86-64 with CPython 3.11.

pip reads its own configuration. torch 2.13.0 must be the CPU build: where pip does not find it, add PyTorch's index, with
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RECIPES = Path(__file__).parent / "engines"
MARKER = "turnwise.json"
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
"""What the engines import for vision models. In a directory of its own: text models must not find it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an engine's environment consists of."""

    name: str
    unwanted: tuple[str, ...]
    """Distributions that break the engine if they are installed."""
    imports: str
    """Python code that must run in the complete environment."""
    stubs: bool = False
    """Whether some imports are answered with empty modules (scripts/engines/stub_modules.py)."""

    @property
    def lock(self) -> Path:
        """The list of all packages with their versions; installed without resolving dependencies."""
        return RECIPES / f"{self.name}.txt"

    @property
    def stub_files(self) -> tuple[Path, ...]:
        """Files that are copied into the environment's site-packages."""
        return (RECIPES / "stub_modules.py", RECIPES / "stub_modules.pth") if self.stubs else ()

    @property
    def fingerprint(self) -> str:
        """Changes when the recipe changes."""
        digest = hashlib.sha256(repr((self.name, TORCH, self.unwanted, self.imports)).encode())
        for file in (self.lock, *self.stub_files):
            digest.update(file.read_bytes())
        return digest.hexdigest()


_MODEL = "from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM"
ENGINES = {
    "vllm": Recipe(
        "vllm",
        # pip takes CUDA builds of these, which do not fit the CPU build of torch; text models do not need them
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        imports=f"import vllm; {_MODEL}",
    ),
    "sglang": Recipe(
        "sglang",
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        imports=f"import sglang.srt.entrypoints.http_server; {_MODEL}",
        stubs=True,
    ),
}


def root() -> Path:
    """The directory of all engine environments."""
    return Path(os.environ.get("TURNWISE_ENGINES") or Path.home() / ".cache" / "turnwise" / "engines").absolute()


def python(engine: str) -> Path:
    """The interpreter of an engine's environment, which may not exist yet."""
    return root() / engine / "bin" / "python"


def is_complete(engine: str) -> bool:
    """Whether the environment was made from the present recipe and its interpreter is still there."""
    try:
        marker = json.loads((root() / engine / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    present = isinstance(marker, dict) and marker.get("fingerprint") == ENGINES[engine].fingerprint
    return present and python(engine).exists()


def make(engine: str) -> Path:
    """Make or complete the environment of an engine. Returns its interpreter. Two calls at once wait for each other."""
    recipe, directory = ENGINES[engine], root() / engine
    if is_complete(engine):
        _say(f"{engine}: {directory} is complete")
        return python(engine)
    with _lock(engine):
        if is_complete(engine):
            return python(engine)
        started = time.monotonic()
        (directory / MARKER).unlink(missing_ok=True)
        if not _runs(engine):
            _say(f"{engine}: new environment {directory}")
            shutil.rmtree(directory, ignore_errors=True)
            subprocess.run([_base_python(), "-m", "venv", str(directory)], check=True)
        problem = _complete(recipe)
        if problem:  # what a half-made environment has may itself be damaged
            _say(f"{engine}: {problem}\n{engine}: the environment is made again")
            shutil.rmtree(directory)
            subprocess.run([_base_python(), "-m", "venv", str(directory)], check=True)
            problem = _complete(recipe)
        if problem:
            sys.exit(f"{engine}: {problem}\n{engine}: {directory} is not usable; see the output of pip above")
        marker = {"fingerprint": recipe.fingerprint, "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        (directory / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
        _say(f"{engine}: {directory} is complete, after {time.monotonic() - started:.0f} s")
    return python(engine)


def make_vision() -> Path:
    """Make the directory with torchvision, if it is not there. Put it on PYTHONPATH to start an engine with a vision model."""
    directory = root() / TORCHVISION
    if (directory / MARKER).exists():
        return directory
    with _lock("vision"):
        if not (directory / MARKER).exists():
            shutil.rmtree(directory, ignore_errors=True)
            if _pip("vllm", "install", "--no-deps", "--target", str(directory), TORCHVISION) != 0:
                sys.exit(f"vision: {TORCHVISION} could not be installed; see the output of pip above")
            shutil.copyfile(RECIPES / "vision" / "sitecustomize.py", directory / "sitecustomize.py")
            (directory / MARKER).write_text("{}\n", encoding="utf-8")
    return directory


def _complete(recipe: Recipe) -> str:
    """Install what is missing, and check the result. Returns what is wrong, or an empty text."""
    missing, unwanted = _differences(recipe)
    if missing:
        _say(f"{recipe.name}: {len(missing)} packages to install")
        # torch first, with its dependencies: its build decides which they are
        # without --no-compile, pip compiles 60,000 modules one after the other, of which a tenth is ever imported
        commands = [
            ["install", "--no-compile", TORCH],
            ["install", "--no-compile", "--no-deps", "-r", str(recipe.lock)],
        ]
        for command in commands:
            if _pip(recipe.name, *command) != 0:
                return f"`pip {' '.join(command)}` failed"
    if unwanted:
        _pip(recipe.name, "uninstall", "--yes", *unwanted)
    for file in recipe.stub_files:
        shutil.copyfile(file, _site_packages(recipe.name) / file.name)
    missing, unwanted = _differences(recipe)
    if missing or unwanted:
        return f"after the installation these packages are missing: {missing or 'none'}; unwanted: {unwanted or 'none'}"
    result = subprocess.run(
        [str(python(recipe.name)), "-c", recipe.imports], capture_output=True, text=True, check=False, timeout=600
    )
    return "" if result.returncode == 0 else f"`{recipe.imports}` fails:\n{result.stderr[-2000:]}"


def _differences(recipe: Recipe) -> tuple[list[str], list[str]]:
    """The lines of the lock that are not installed with that version, and the unwanted distributions that are."""
    code = (
        "import json; from importlib.metadata import distributions; "
        "print(json.dumps({d.name: d.version for d in distributions() if d.name}))"
    )
    output = subprocess.run([str(python(recipe.name)), "-c", code], capture_output=True, text=True, check=True).stdout
    installed = {_canonical(name): version for name, version in json.loads(output).items()}
    missing = [
        pin
        for pin in pins(recipe.lock)
        # 2.13.0+cpu is a 2.13.0
        if installed.get(_canonical(pin.split("==")[0]), "").split("+")[0] != pin.split("==")[1].split("+")[0]
    ]
    return missing, [name for name in recipe.unwanted if name in installed]


def pins(lock: Path) -> list[str]:
    """The lines `name==version` of a list of packages."""
    lines = [line.partition("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line]


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pip(engine: str, *arguments: str) -> int:
    pip = [str(python(engine)), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    return subprocess.run(pip, check=False).returncode


def _runs(engine: str) -> bool:
    """Whether the environment has an interpreter that starts, and pip."""
    if not python(engine).exists():
        return False
    command = [str(python(engine)), "-c", "import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _base_python() -> str:
    """A CPython 3.11 that is not itself in an environment."""
    for candidate in (os.environ.get("PYTHON"), getattr(sys, "_base_executable", None), shutil.which("python3.11")):
        if not candidate:
            continue
        command = [candidate, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 11))"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return candidate
    sys.exit("the engines need CPython 3.11, and there is none on PATH; give its path: PYTHON=/path/to/python3.11")


def _site_packages(engine: str) -> Path:
    return root() / engine / "lib" / "python3.11" / "site-packages"


@contextmanager
def _lock(engine: str) -> Iterator[None]:
    """Only one process at a time changes an environment."""
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f"{engine}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{engine}: another process is making the environment; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Make the environments named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{' or '.join(ENGINES)}; all if none is given")
    parser.add_argument("--check", action="store_true", help="make nothing; exit 1 if an environment is not complete")
    arguments = parser.parse_args()
    engines = arguments.engines or list(ENGINES)
    if unknown := [name for name in engines if name not in ENGINES]:
        parser.error(f"there is no engine {unknown[0]!r}; the engines are {', '.join(ENGINES)}")
    if arguments.check:
        incomplete = [name for name in engines if not is_complete(name)]
        for name in incomplete:
            _say(f"{name}: {root() / name} is missing or not complete; run `python scripts/engine_env.py {name}`")
        return 1 if incomplete else 0
    for name in engines:
        make(name)
    make_vision()
    return 0


if __name__ == "__main__":
    sys.exit(main())
