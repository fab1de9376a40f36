"""turnwise beside TRL on one task: `python benchmarks/against_trl.py`, two minutes when everything is there.

Both train the same tiny model on the same questions with the same settings (`against_trl/`): 16 prompts x 8 conversations a
step, up to three rounds of a calculator, GRPO. They take turns, a step each, with the same number of threads, so that what
else the machine does meets both; the seconds of a step are wall time, with everything from the end of the step before. What
the first run needs is made under `benchmarks/.peers/`: TRL's own environment (1.5 GB) and the warm-started model, about five
minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PARTS, PEERS = HERE / "against_trl", HERE / ".peers"
# torch first and pinned: what comes after it must not fetch another one
PACKAGES = (["torch==2.13.0", "numpy"], ["torch==2.13.0", "transformers==5.19.0", "trl==1.16.0", "datasets", "jinja2"])
TEMPLATE = "trl/chat_templates/qwen3_instruct_2507.jinja"
LAST = 3


class Side:
    """One system: a process that takes a step when it is told to, and says what came of it."""

    def __init__(self, name: str, command: Sequence[str | Path], threads: int) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[float] = []
        """Sampled, of a conversation."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command,
            cwd=HERE.parent,
            env=_environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._hear()

    def step(self) -> None:
        self._go()
        heard = self._hear()
        self.seconds.append(heard["seconds"])
        self.rewards.append(heard["reward"])
        self.tokens.append(heard["tokens"])

    def end(self) -> None:
        self._go()
        self._process.communicate()

    @property
    def median(self) -> float:
        """Seconds of a step, the first one left out: it warms things up."""
        return statistics.median(self.seconds[1:])

    @property
    def steps_per_minute(self) -> float:
        """Over all steps but the first, the light ones and the heavy ones: one long conversation makes a step heavy."""
        return 60 / statistics.fmean(self.seconds[1:])

    @property
    def last(self) -> float:
        """Mean reward of the last steps."""
        return statistics.fmean(self.rewards[-LAST:])

    def _go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, float]:
        """What the side says next: `{"step": 0}` when it is ready, then an object a step. It says other things, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"step"'):
                return json.loads(line)
        self._errors.seek(0)
        sys.exit(f"{self.name} ended with status {self._process.wait()}:\n{self._errors.read()[-3000:]}")


def peer() -> Path:
    """TRL's own Python, with its environment made where there is none."""
    place = PEERS / "trl"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        print(f"making TRL's environment in {place} (a few minutes, once)", flush=True)
        venv.create(place, with_pip=True, clear=True)
        for packages in PACKAGES:
            pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            subprocess.run([*pip, *packages], check=True)
        (place / "ready").touch()
    return python


def model(threads: int) -> Path:
    """The model and the questions, made where there are none of this version of the makers."""
    template = next((PEERS / "trl").glob(f"lib/python*/site-packages/{TEMPLATE}"))
    makers = (template, PARTS / "make_model.py", PARTS / "task.py")
    place = PEERS / f"arithmetic-{hashlib.sha256(b''.join(file.read_bytes() for file in makers)).hexdigest()[:8]}"
    if not (place / "train.jsonl").exists():
        print(f"making the model in {place} (two minutes, once)", flush=True)
        command = [sys.executable, PARTS / "make_model.py", template, place]
        subprocess.run(command, check=True, env=_environment(threads))
    return place


def _environment(threads: int) -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)}


def show(console: Console, sides: Sequence[Side]) -> None:
    table = Table("", "s/step, median", "steps/min", "tokens", f"reward, last {LAST}", "reward, step by step")
    for side in sides:
        rewards = " ".join(f"{reward:.2f}".removeprefix("0") for reward in side.rewards)
        tokens = f"{statistics.fmean(side.tokens):.0f}"
        speed = (f"{side.median:.2f}", f"{side.steps_per_minute:.1f}")
        table.add_row(side.name, *speed, tokens, f"{side.last:.2f}", rewards)
    console.print(table)
    console.print("speeds leave the first step out; tokens: sampled in a conversation", style="dim")


def main() -> None:
    parser = argparse.ArgumentParser(description="turnwise beside TRL.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of either side")
    options = parser.parse_args()
    python, steps, threads = peer(), str(options.steps), options.threads
    folder = model(threads)
    trl = Side("TRL 1.16", [python, PARTS / "trl_side.py", folder, steps], threads)
    ours = Side("turnwise", [sys.executable, PARTS / "turnwise_side.py", folder, steps], threads)
    for number in range(options.steps):
        trl.step()
        ours.step()
        print(f"step {number + 1}: TRL {trl.seconds[-1]:.2f} s, turnwise {ours.seconds[-1]:.2f} s", flush=True)
    trl.end()
    ours.end()
    show(Console(width=160), [trl, ours])
    print(f"against_trl_speedup {ours.steps_per_minute / trl.steps_per_minute:.2f}")


if __name__ == "__main__":
    main()
