"""Mutation testing with mutmut: list the small code changes that no quick test notices.

Each part is copied to build/mutants/PART, changed there, and tested with the quick tests of that part. Changes that no test
notices (survivors) are printed as diffs. A survivor is a change without effect (ignore it), a rule without a test (write the
test), or code that is not needed (remove it).

python scripts/mutants.py                          # every mutant of every part: many hours
python scripts/mutants.py training --sample 100    # a hundred mutants of one part, chosen by --seed
python scripts/mutants.py --list                   # the parts, and which tests belong to each
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "mutants"


@dataclass(frozen=True)
class Part:
    """The files to change, and the tests that should notice."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


PARTS = {
    "rewards": Part(("rewards/*",), ("tests/rewards",)),
    "training": Part(("training/*", "models/*"), ("tests/training", "tests/engines/test_local_sampling.py")),
    "rollout": Part(("rollout/*",), ("tests/rollout",)),
    "chat": Part(("chat/*",), ("tests/chat",)),
    "local": Part(("engines/local/*",), ("tests/engines",)),
    "train": Part(
        ("train.py", "runs/health.py"),
        (
            "tests/test_train.py",
            "tests/runs/test_health.py",
        ),
    ),
}

_FATES = {0: "survived", 5: "no test runs it", 33: "no test runs it", 35: "slow"}
"""The exit codes of mutmut for a mutant that no test noticed."""


def main() -> int:
    """Test the mutants of the chosen parts and print the survivors; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="mutants of each part; 0 tries all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    chosen = parser.parse_args()
    if strange := sorted(set(chosen.parts) - PARTS.keys()):
        parser.error(f"there is no part {', '.join(strange)}; there are {', '.join(PARTS)}")
    if chosen.list:
        for name, part in PARTS.items():
            print(f"{name:9} {' '.join(part.sources):44} {' '.join(part.tests)}")
        return 0
    if importlib.util.find_spec("mutmut") is None:
        parser.error("mutmut is not installed: pip install 'turnwise[mutants]', or make mutants")
    found = [tried(name, sample=chosen.sample, seed=chosen.seed, jobs=chosen.jobs) for name in chosen.parts or PARTS]
    return int(any(found))


def tried(name: str, *, sample: int, seed: int, jobs: int) -> int:
    """Test the mutants of one part and print the survivors. Returns their number."""
    folder = WORK / name
    _copy(folder)
    _configure(folder, PARTS[name])
    _mutmut(folder, "run", "--max-children", str(jobs), "turnwise.nothing")  # writes the mutants without running them
    names = sorted(_fates(folder))
    if sample:
        names = random.Random(seed).sample(names, min(sample, len(names)))
    print(f"{name}: trying {len(names)} mutants", flush=True)
    _mutmut(folder, "run", "--max-children", str(jobs), *names)
    fates = _fates(folder)
    missed = {one: _FATES[fate] for one in names if (fate := fates[one]) in _FATES}
    for one, fate in missed.items():
        print(f"\n{fate}: {one}\n{_mutmut(folder, 'show', one)}")
    untried = sum(fates[one] is None for one in names)
    print(f"{name}: {len(missed)} of {len(names)} mutants were not noticed, {untried} were not tried")
    if names and untried == len(names):
        sys.exit(f"{name}: mutmut tried nothing; run `mutmut run` in {folder} by hand to see why")
    return len(missed)


def _copy(folder: Path) -> None:
    """Copy the files that git tracks, so that the work tree stays unchanged."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for path in filter(None, listed.split("\0")):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)


def _configure(folder: Path, part: Part) -> None:
    options = {
        "source_paths": ["src/turnwise"],
        "only_mutate": [f"src/turnwise/{source}" for source in part.sources],
        "also_copy": ["src", "recipes", "demo", "docs", "scripts", "README.md"],
        "process_isolation": ["forkserver"],  # torch's threads do not survive a fork
        "timeout_multiplier": ["20"],  # of a test's own time: the machine may be busy
        "timeout_constant": ["20"],
        "pytest_add_cli_args": ["-q", "-x", "-m", "not slow and not engines and not cluster", "-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": list(part.tests),
    }
    lines = [f"{name}=\n" + "\n".join(f"    {value}" for value in values) for name, values in options.items()]
    single = ("process_isolation", "timeout_multiplier", "timeout_constant")
    lines = [line.replace("=\n    ", "=") if line.startswith(single) else line for line in lines]
    (folder / "setup.cfg").write_text("[mutmut]\n" + "\n".join(lines) + "\n")


def _mutmut(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mutmut", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def _fates(folder: Path) -> dict[str, int | None]:
    """The exit code of each mutant, by its name."""
    fates: dict[str, int | None] = {}
    for file in (folder / "mutants").rglob("*.meta"):
        fates |= json.loads(file.read_text())["exit_code_by_key"]
    return fates


if __name__ == "__main__":
    sys.exit(main())
