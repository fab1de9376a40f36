"""Does a model learn in environments of other libraries? `python benchmarks/library_environments.py`.

Each task trains the same tiny model with the real package of one provider on the CPU, and compares the reward on held-out rows
before and after. The start model, a Qwen3 of 40,000 parameters, is fine-tuned on answers that are legal but random, so the
curve shows what was learned from rewards. Packages that exclude turnwise's own have environments of their own
(`tests/support/own_environment.py` makes them); tasks whose package is missing are said and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learning_tasks.start_model import make_model, make_tokenizer

from turnwise.record.reader import read_lines
from turnwise.record.summary import held_out_change
from turnwise.terminal.runs import change_line

HERE = Path(__file__).resolve().parent
FILES = "benchmarks/environment_tasks"
ENGINES = Path(os.environ.get("TURNWISE_ENGINES", "~/.cache/turnwise/engines")).expanduser()
CONTEXT = 1536
"""Tokens (bytes) of the longest conversation."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """An environment of a provider."""

    name: str
    title: str
    options: dict[str, Any]
    """Of the recipe."""
    answer: Callable[[random.Random], str]
    """A legal answer of the start model."""
    question: Callable[[random.Random], str]
    """A message like the environment's, for the fine-tuning."""
    own: str | None = None
    """The name of an environment of its own."""
    steps: int = 100
    rows: dict[str, Callable[[random.Random], dict[str, Any]]] = field(default_factory=dict)


def number(draws: random.Random) -> str:
    """A question of the parity tasks."""
    return f"{draws.randrange(1000):03}"


def word(draws: random.Random) -> str:
    """An answer of the parity tasks."""
    return draws.choice(["even", "odd", "zero"])


def graded(low: int, high: int) -> Callable[[random.Random], dict[str, Any]]:
    """A row for SkyRL-Gym's gsm8k: the remainder of a number and 2."""

    def row(draws: random.Random) -> dict[str, Any]:
        n = draws.choice(NUMBERS[low:high])
        return {"prompt": f"{n:03} #", "reward_spec": {"ground_truth": str(n % 2)}}

    return row


def parity(name: str, title: str, environment: str | dict[str, Any], *, own: str) -> Task:
    """Even or odd, in an environment of `environment_tasks/`."""
    options = {"environment": environment, "limits": {"turns": 1, "tokens_per_turn": 8}}
    return Task(name, title, options, answer=word, question=number, own=own)


NUMBERS = random.Random(0).sample(range(1000), 1000)
"""800 to train on, and 200 that are held out."""
LAKE = {"desc": ["SFF", "FHF", "FFG"], "is_slippery": False}
TASKS = (
    Task(
        "gymnasium",
        "FrozenLake-v1, 3 x 3",
        {
            "environment": {"use": "gymnasium:FrozenLake-v1", "arguments": {"arguments": LAKE}},
            "limits": {"turns": 8, "tokens_per_turn": 4},
        },
        answer=lambda draws: str(draws.randrange(4)),
        question=lambda draws: str(draws.randrange(9)),
        steps=80,
    ),
    Task(
        "reasoning_gym",
        "gcd, numbers to 20",
        {
            "environment": {
                "use": "reasoning_gym:gcd",
                "arguments": {"config": {"max_value": 20}, "tag": None},
            },
            "limits": {"turns": 1, "tokens_per_turn": 6},
        },
        answer=lambda draws: str(draws.randrange(1, 11)),
        question=lambda draws: (
            "Find the Greatest Common Divisor (GCD) of these numbers: "
            f"{draws.randrange(1, 21)}, {draws.randrange(1, 21)}. Give only the GCD as your final answer."
        ),
        steps=120,
    ),
    Task(
        "textarena",
        "GuessTheNumber-v0",
        {"environment": "textarena:GuessTheNumber-v0", "limits": {"turns": 10, "tokens_per_turn": 8}},
        answer=lambda draws: f"[{draws.randrange(1, 21)}]",
        question=lambda draws: f"[GAME] The target number is {draws.choice(['higher', 'lower'])}.",
        steps=14,
    ),
    Task(
        "skyrl_gym",
        "gsm8k, with remainders as rows",
        {"environment": "skyrl_gym:gsm8k", "limits": {"turns": 1, "tokens_per_turn": 12}},
        answer=lambda draws: f"#### {draws.randrange(3)}",
        question=lambda draws: f"{number(draws)} #",
        rows={"train": graded(0, 800), "eval": graded(800, 1000)},
    ),
    parity(
        "verifiers",
        "SingleTurnEnv, even or odd",
        f"verifiers:{FILES}/parity_verifiers.py:load_environment",
        own="verifiers_classic",
    ),
    parity(
        "inspect",
        "generate and exact, even or odd",
        {
            "use": f"inspect:{FILES}/parity_inspect.py@parity",
            "arguments": {"eval_arguments": {"first": 800, "last": 1000}},
        },
        own="inspect",
    ),
    parity("openenv", "a class, even or odd", f"openenv:{FILES}/parity_openenv.py:Parity", own="openenv"),
)


def recipe(task: Task, out: Path, seed: int) -> dict[str, Any]:
    """The recipe of a task."""
    data = {"train": "environment", "eval": "environment:96"}
    if task.rows:
        data = {name: str(out / f"{task.name}_{name}.jsonl") for name in task.rows}
    return {
        "model": {"path": str(out / "start" / "checkpoint"), "device": "cpu"},
        "data": data,
        "train": {"steps": task.steps, "batch_size": 8, "group_size": 8, "lr": 2e-3},
        "eval": {"every": max(1, task.steps // 4)},
        "checkpoint": {"every": 1000},
        "output": str(out / "runs" / f"{task.name}-{seed}"),
        "seed": seed,
        "replace": True,
        **task.options,
    }


def prepare(out: Path, steps: int) -> None:
    """Write rows, and the start model to `out/start/checkpoint` unless it is there."""
    out.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    for task in TASKS:
        for name, row in task.rows.items():
            lines = [json.dumps(row(draws)) for _ in range(1024 if name == "train" else 96)]
            (out / f"{task.name}_{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if (out / "ready").exists():
        return
    conversations = []
    for count in range(4096):
        task = TASKS[count % len(TASKS)]
        turns = 1 if task.options["limits"]["turns"] == 1 else 3
        messages = []
        for _ in range(turns):
            messages += [
                {"role": "user", "content": task.question(draws)},
                {"role": "assistant", "content": task.answer(draws)},
            ]
        conversations.append(json.dumps({"messages": messages}))
    (out / "conversations.jsonl").write_text("\n".join(conversations) + "\n", encoding="utf-8")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(out / "random")
    tokenizer.save_pretrained(out / "random")
    options = {"steps": steps, "batch_size": 48, "lr": 3e-3, "warmup_steps": 10, "max_recorded_rows": 0}
    tree = {
        "model": {"path": str(out / "random")},
        "data": {"train": str(out / "conversations.jsonl")},
        "sft": options,
        "output": str(out / "start"),
        "replace": True,
    }
    turnwise("sft", tree, out / "sft.yaml", sys.executable)
    (out / "ready").touch()


def interpreter(task: Task) -> str:
    """The Python with the package of a task."""
    return sys.executable if task.own is None else str(ENGINES / task.own / "bin" / "python")


def turnwise(command: str, tree: dict[str, Any], file: Path, python: str) -> None:
    """Run a command of turnwise with another Python, whose packages come before this one's. Raises SystemExit if it fails."""
    file.write_text(json.dumps(tree), encoding="utf-8")
    code = (
        f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r}); from turnwise.cli import main; "
        f"sys.exit(main({[command, str(file)]!r}))"
    )
    variables = {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [python, "-c", code], cwd=HERE.parent, capture_output=True, text=True, env={**os.environ, **variables}
    )
    if process.returncode:
        raise SystemExit(f"{command} {file} failed:\n{process.stdout[-1000:]}{process.stderr[-3000:]}")


def main() -> None:
    """Train, and print a line for each task."""
    parser = argparse.ArgumentParser(description="Learning curves in environments of other libraries.")
    parser.add_argument("--out", type=Path, default=HERE / ".environments")
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=200)
    options = parser.parse_args()
    out = options.out.resolve()
    prepare(out, options.sft_steps)
    for task in TASKS:
        if options.tasks and task.name not in options.tasks:
            continue
        if not Path(interpreter(task)).exists():
            print(f"{task.name}: no environment {task.own}; its slow test makes it", flush=True)
            continue
        started = time.perf_counter()
        tree = recipe(task, out, options.seed)
        turnwise("train", tree, out / f"{task.name}.yaml", interpreter(task))
        change = held_out_change(Path(tree["output"]))
        assert change is not None
        print(
            f"{task.name}, seed {options.seed}, {time.perf_counter() - started:.0f} s: {change_line(change)}",
            flush=True,
        )
    draw(out)


def draw(out: Path) -> None:
    """Draw the held-out rewards of all finished runs to `out/environments.svg`, a part of the picture for each task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = {task: sorted((out / "runs").glob(f"{task.name}-[0-9]/evaluations.jsonl")) for task in TASKS}
    shown = [task for task, files in curves.items() if files]
    columns = 4
    count = -(-len(shown) // columns)
    figure, axes = plt.subplots(count, columns, figsize=(11, 2.4 * count), layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, task in zip(axes.flat, shown, strict=False):
        for number, file in enumerate(curves[task]):
            lines = list(read_lines(file))
            axis.plot(
                [line["step"] for line in lines],
                [line["reward/mean"] for line in lines],
                color=f"C{number}",
                marker=".",
            )
        axis.set_title(f"{task.name}\n{task.title}", fontsize=9)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("reward on held-out rows", fontsize=9)
    figure.savefig(out / "environments.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
