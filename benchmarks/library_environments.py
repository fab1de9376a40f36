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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learning_tasks import household
from learning_tasks.fine_tuning import fine_tune
from learning_tasks.pretraining import train_on_all_tokens
from learning_tasks.start_model import make_model, make_tokenizer

from turnwise.record.reader import read_lines
from turnwise.record.summary import held_out_change
from turnwise.terminal.runs import change_line
from turnwise.terminal.tables import interval, p_value

HERE = Path(__file__).resolve().parent
FILES = "benchmarks/environment_tasks"
ENGINES = Path(os.environ.get("TURNWISE_ENGINES", "~/.cache/turnwise/engines")).expanduser()
CONTEXT = 1536
"""Tokens (bytes) of the longest conversation."""
CALLS = {
    "tool_format": {"opening": "[[", "separator": ":", "closing": "]"},
    "tool_calls": {"constrain": True, "choice": "required"},
}
"""How calls are written: short, because a byte is a token, and under a grammar, because so small a model misspells names."""
SFT = {
    "digits": {"steps": 600},
    "aviary": {"steps": 600},
    "harbor": {"steps": 300, "batch_size": 16},
    "textworld": {"steps": 800},
}
"""Options of start models that copy from the message, or write long answers."""
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(',') }}){% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "[[{{ call.function.name }}:{{ call.function.arguments | tojson }}]"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """An environment of a provider."""

    name: str
    title: str
    options: dict[str, Any]
    """Of the recipe."""
    conversation: Callable[[random.Random], list[tuple[str, str]]]
    """A conversation of the fine-tuning: messages like the environment's, each with a legal, random answer."""
    chance: float | None = None
    """The expected reward of random legal answers, where it is known."""
    own: str | None = None
    """The name of an environment of its own."""
    start: str = ""
    """The start model, if tasks share one."""
    base: str = ""
    """The start model from which that of this task is fine-tuned; else it has random weights."""
    words: int = 0
    """The size of its start model's vocabulary, made of the words of the fine-tuning; 0: a token for each byte."""
    width: int = 32
    """The hidden size of its start model."""
    all_tokens: int = 0
    """The steps in which its start model is trained on all tokens of conversations, instead of the fine-tuning."""
    tools: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the environment's tools, and of their parameters."""
    rows: dict[str, Callable[[random.Random], dict[str, Any]]] = field(default_factory=dict)
    files: Callable[[Path], None] | None = None
    """Writes what the environment reads to a folder, of which `{files}` in `options` is the path."""


def asked(
    question: Callable[[random.Random], str], answer: Callable[[random.Random, str], str], times: int = 1
) -> Callable[[random.Random], list[tuple[str, str]]]:
    """Conversations whose messages do not depend on each other."""

    def made(draws: random.Random) -> list[tuple[str, str]]:
        turns = list[tuple[str, str]]()
        for _ in range(times):
            text = question(draws)
            turns.append((text, answer(draws, text)))
        return turns

    return made


def number(draws: random.Random) -> str:
    """A question of the tasks with digits."""
    return f"{draws.randrange(1000):03}"


def digit(draws: random.Random, number: str) -> str:
    """An answer of the tasks with digits: one of the number's."""
    return draws.choice(number[:3])


def largest(n: int) -> str:
    """The right answer."""
    return max(f"{n:03}")


def called(tool: str, **arguments: str) -> str:
    """A turn that calls a tool."""
    return f"[[{tool}:{json.dumps(arguments)}]"


def chosen(row: Callable[[int], dict[str, Any]], first: int, last: int) -> Callable[[random.Random], dict[str, Any]]:
    """A row of one of the numbers from the place `first` to before `last`."""
    return lambda draws: row(draws.choice(NUMBERS[first:last]))


def both(row: Callable[[int], dict[str, Any]]) -> dict[str, Callable[[random.Random], dict[str, Any]]]:
    """The rows to train on, and those that are held out."""
    return {"train": chosen(row, 0, 800), "eval": chosen(row, 800, 1000)}


def write_harbor_tasks(folder: Path) -> None:
    """Tasks in Harbor's format: the numbers to train on, and 48 of those held out."""
    for name, numbers in (("train", NUMBERS[:800]), ("eval", NUMBERS[800:848])):
        for n in numbers:
            # a little for any digit: else the few conversations with a reward are too few to keep the words of the command
            test = (
                f"if grep -qx {largest(n)} /app/d; then echo 1; elif grep -qx '[0-9]' /app/d; then echo 0.1; else echo 0; fi "
                f"2> /dev/null > /logs/verifier/reward.txt"
            )
            texts = {
                "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 600.0\n[environment]\n',
                "instruction.md": INSTRUCTION.format(f"{n:03}") + "\n",
                "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
                "tests/test.sh": f"#!/bin/sh\n{test}\n",
            }
            for place, text in texts.items():
                path = folder / name / f"{n:03}" / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


def games(own: str, script: str, train: range, held_out: range) -> Callable[[Path], None]:
    """Writes games with the package of an environment of its own, one for each number."""

    def write(folder: Path) -> None:
        for name, numbers in (("train", train), ("eval", held_out)):
            command = [ENGINES / own / "bin/python", HERE / "environment_tasks" / script, folder / name]
            subprocess.run([*map(str, command), str(len(numbers)), str(numbers.start)], check=True)

    return write


def room(draws: random.Random) -> str:
    """A message like TextWorld's: a room with an exit, half of them with a coin."""
    way = draws.choice(["north", "south", "east", "west"])
    text: list[str] = [*draws.choices(WORDS, k=draws.randrange(2, 8))]
    commands = [f"go {way}", "inventory", "look"]
    if draws.random() < 0.5:
        text.insert(0, "There is a coin on the floor.")
        commands = ["examine coin", *commands, "take coin"]
    return f"-= Room =-\n{' '.join(text)} An exit to the {way}.\n\nCommands: {', '.join(commands)}"


def digits(name: str, title: str, environment: str | dict[str, Any], *, own: str) -> Task:
    """The largest digit, in an environment of `environment_tasks/`."""
    options = {"environment": environment, "limits": {"turns": 1, "tokens_per_turn": 4}, "train": {"steps": 40}}
    return Task(name, title, options, asked(number, digit), own=own, start="digits", chance=ONE_OF_THREE)


NUMBERS = random.Random(0).sample(range(1000), 1000)
"""800 to train on, and 200 that are held out."""
INSTRUCTION = "{}: its largest digit to the file d"
WORDS = ("you find yourself in", "the kitchen", "a cellar", "the study", "an exit is unblocked", "try going", "welcome")
COMMAND = "go (north|south|east|west)|take coin|examine coin|inventory|look"
ONE_OF_THREE = 0.385
"""The chance that one of three random digits is the largest."""
LAKE = {"desc": ["SFF", "FHF", "FFG"], "is_slippery": False}
TASKS = (
    Task(
        "gymnasium",
        "FrozenLake-v1, 3 x 3",
        {
            "environment": {"use": "gymnasium:FrozenLake-v1", "arguments": {"arguments": LAKE}},
            "limits": {"turns": 8, "tokens_per_turn": 4},
            "train": {"steps": 80},
        },
        asked(lambda draws: str(draws.randrange(9)), lambda draws, _: str(draws.randrange(4)), 3),
        chance=0.058,
    ),
    Task(
        "reasoning_gym",
        "lcm, two digits",
        {
            "environment": {
                "use": "reasoning_gym:lcm",
                "arguments": {
                    "config": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 9},
                    "tag": None,
                },
            },
            "limits": {"turns": 1, "tokens_per_turn": 6},
            "train": {"steps": 40},
        },
        asked(
            lambda draws: (
                f"Find the Least Common Multiple (LCM) of these numbers: {draws.randrange(1, 10)}, {draws.randrange(1, 10)}"
            ),
            lambda draws, text: draws.choice([text[-4], text[-1]]),
        ),
        base="digits",
        chance=0.41,
    ),
    Task(
        "textarena",
        "GuessTheNumber-v0",
        {
            "environment": "textarena:GuessTheNumber-v0",
            "limits": {"turns": 10, "tokens_per_turn": 8},
            "train": {"steps": 14},
        },
        asked(
            lambda draws: f"[GAME] The target number is {draws.choice(['higher', 'lower'])}.",
            lambda draws, _: f"[{draws.randrange(1, 21)}]",
            3,
        ),
    ),
    Task(
        "skyrl_gym",
        "gsm8k, largest digit",
        {
            "environment": "skyrl_gym:gsm8k",
            "limits": {"turns": 1, "tokens_per_turn": 12},
            "train": {"steps": 40},
        },
        asked(lambda draws: f"{number(draws)} #", lambda draws, text: f"#### {digit(draws, text)}"),
        base="digits",
        chance=ONE_OF_THREE,
        rows=both(lambda n: {"prompt": f"{n:03} #", "reward_spec": {"ground_truth": largest(n)}}),
    ),
    Task(
        "aviary",
        "calculator, largest digit",
        {
            "environment": "aviary:calculator",
            "limits": {"turns": 1, "tokens_per_turn": 48},
            **CALLS,
            "train": {"steps": 40},
        },
        asked(number, lambda draws, text: called("submit_answer", answer=digit(draws, text))),
        tools={"calculator": ("expr",), "submit_answer": ("answer",)},
        rows=both(lambda n: {"problem_id": str(n), "problem": f"{n:03}", "answer": int(largest(n))}),
        own="aviary",
        base="digits",
        chance=ONE_OF_THREE,
    ),
    Task(
        "harbor",
        "a folder of tasks, largest digit",
        {
            "environment": {
                "use": "harbor:{files}/train",
                "arguments": {"eval_tasks": "{files}/eval", "backend": "jail", "bounds": {"seconds": 600}},
            },
            "limits": {"turns": 1, "tokens_per_turn": 48},
            **CALLS,
            # ten bytes of an answer must be right together, which large steps unlearn
            "train": {"steps": 40, "lr": 5e-4},
            "eval": {"every": 10},
        },
        asked(
            lambda draws: INSTRUCTION.format(number(draws)),
            lambda draws, text: called("bash", command=f"echo {digit(draws, text)} >d"),
        ),
        tools={
            "bash": ("command",),
            "str_replace_editor": (
                *("command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text", "view_range"),
            ),
        },
        base="aviary",
        chance=ONE_OF_THREE + 0.1 * (1 - ONE_OF_THREE),
        files=write_harbor_tasks,
    ),
    Task(
        "textworld",
        "coin_collector, two rooms",
        {
            "environment": {
                "use": "textworld:{files}/train",
                "arguments": {"eval_games": "{files}/eval", "admissible_commands": True, "instruction": ""},
            },
            "limits": {"turns": 4, "tokens_per_turn": 16},
            # so small a model does not read texts that are longer than those of its fine-tuning
            "sampling": {"response_format": {"type": "regex", "pattern": COMMAND}},
            "train": {"steps": 24, "batch_size": 4},
            "eval": {"every": 8},
        },
        asked(room, lambda draws, text: draws.choice(text.rpartition("Commands: ")[2].split(", "))),
        own="textworld",
        base="digits",
        files=games("textworld", "coin_games.py", range(40), range(1000, 1032)),
    ),
    Task(
        "alfworld",
        "pick_and_place_simple, three places",
        {
            "environment": {
                "use": "alfworld:{files}/train",
                "arguments": {"eval_games": "{files}/eval", "admissible_commands": True, "instruction": ""},
            },
            "data": {"train": "environment", "eval": f"environment:{household.HELD_OUT}"},
            "limits": {"turns": household.TURNS, "tokens_per_turn": 40},
            "train": {"steps": 14, "batch_size": 4, "lr": 6e-4},
            "eval": {"every": 7},
        },
        household.random_conversation,
        own="alfworld",
        words=512,
        width=64,
        all_tokens=800,
        files=games(
            "alfworld",
            "household_games.py",
            range(household.HELD_OUT, len(household.TRIPLES)),
            range(household.HELD_OUT),
        ),
    ),
    Task(
        "nemo_gym",
        "equivalence_rule, largest digit",
        {
            "environment": {
                "use": "nemo_gym:equivalence_rule",
                "arguments": {"python": str(ENGINES / "nemo_gym/bin/python")},
            },
            "limits": {"turns": 1, "tokens_per_turn": 4},
            "train": {"steps": 40},
        },
        asked(number, digit),
        rows=both(
            lambda n: {
                "responses_create_params": {"input": [{"role": "user", "content": f"{n:03}"}]},
                "expected_answer": largest(n),
            }
        ),
        start="digits",
        chance=ONE_OF_THREE,
    ),
    digits(
        "verifiers",
        "SingleTurnEnv, largest digit",
        f"verifiers:{FILES}/digits_verifiers.py:load_environment",
        own="verifiers_classic",
    ),
    digits(
        "inspect",
        "generate and exact, largest digit",
        {
            "use": f"inspect:{FILES}/digits_inspect.py@digits",
            "arguments": {"eval_arguments": {"first": 800, "last": 1000}},
        },
        own="inspect",
    ),
    digits(
        "verifiers_v1",
        "taskset and harness, largest digit",
        {
            "use": f"verifiers_v1:{FILES}/digits_verifiers_v1.py",
            "arguments": {"eval_arguments": {"first": 800, "last": 1000}},
        },
        own="verifiers",
    ),
    digits("openenv", "a class, largest digit", f"openenv:{FILES}/digits_openenv.py:Digits", own="openenv"),
)


def recipe(task: Task, out: Path, seed: int) -> dict[str, Any]:
    """The recipe of a task."""
    data = {"train": "environment", "eval": "environment:96"}
    if task.rows:
        data = {name: str(out / f"{task.name}_{name}.jsonl") for name in task.rows}
    # options name files relative to the folder of a task
    options = json.loads(json.dumps(task.options).replace("{files}", str(out / task.name)))
    train = {"steps": 100, "batch_size": 8, "group_size": 8, "lr": 2e-3, **options.pop("train", {})}
    limits = {"seconds_per_turn": 3600, **options.pop("limits")}  # a machine may be full
    return {
        "model": {"path": str(start_folder(task, out) / "start" / "checkpoint"), "device": "cpu"},
        "data": data,
        "train": train,
        "limits": limits,
        "eval": {"every": max(1, train["steps"] // 4)},
        "checkpoint": {"every": 1000},
        "output": str(out / "runs" / f"{task.name}-{seed}"),
        "seed": seed,
        "replace": True,
        **options,
    }


def start_name(task: Task) -> str:
    """The name of a task's start model."""
    return task.start or task.name


def start_folder(task: Task, out: Path) -> Path:
    """Where the start model of a task is made."""
    return out / "start" / start_name(task)


def prepare(task: Task, out: Path) -> None:
    """Write the rows and files of a task, and its start model unless it is there."""
    folder = start_folder(task, out)
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    for name, row in task.rows.items():
        lines = [json.dumps(row(draws)) for _ in range(1024 if name == "train" else 96)]
        (out / f"{task.name}_{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if task.files is not None:
        task.files(out / task.name)
    if (folder / "ready").exists():
        return
    if task.base:
        prepare(next(other for other in TASKS if start_name(other) == task.base), out)
    sharing = [other for other in TASKS if start_name(other) == start_name(task)]
    count = 8192 if task.all_tokens else 4096
    lines = [json.dumps(conversation(sharing[number % len(sharing)], draws)) for number in range(count)]
    (folder / "conversations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options: dict[str, Any] = {"steps": 200, "batch_size": 48, "lr": 3e-3, "warmup_steps": 10}
    if task.base:
        model_path = out / "start" / task.base / "start" / "checkpoint"
        options |= {"steps": 300, "batch_size": 24, "lr_schedule": "cosine"}
    else:
        model_path = folder / "random"
        tokenizer = make_tokenizer(learned_from(lines[:2048]), task.words) if task.words else make_tokenizer()
        tokenizer.chat_template = TEMPLATE
        model = make_model(tokenizer, task.width)
        model.config.max_position_embeddings = CONTEXT
        if task.all_tokens:
            messages = [json.loads(line)["messages"] for line in lines]
            train_on_all_tokens(model, tokenizer, messages, task.all_tokens, folder / "start" / "checkpoint")
            (folder / "ready").touch()
            return
        model.save_pretrained(model_path)
        tokenizer.save_pretrained(model_path)
    options |= SFT.get(start_name(task), {})
    tool_format = {"tool_format": json.dumps(CALLS["tool_format"])} if task.tools else {}
    named = {f"sft.{name}": value for name, value in options.items()}
    fine_tune(folder, {"model.path": model_path, **tool_format, **named})


def learned_from(lines: Sequence[str]) -> list[str]:
    """The texts of conversations."""
    return [message["content"] for line in lines for message in json.loads(line)["messages"]]


def conversation(task: Task, draws: random.Random) -> dict[str, Any]:
    """A conversation with legal, random answers."""
    messages = [
        {"role": role, "content": text}
        for turn in task.conversation(draws)
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    if not task.tools:
        return {"messages": messages}
    return {"messages": messages, "tools": [schema(name, names) for name, names in task.tools.items()]}


def schema(tool: str, parameters: tuple[str, ...]) -> dict[str, Any]:
    """The schema of a tool, of which `TEMPLATE` writes the names."""
    properties = {name: {"type": "string"} for name in parameters}
    function = {"name": tool, "description": "", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


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
    options = parser.parse_args()
    out = options.out.resolve()
    for task in TASKS:
        if options.tasks and task.name not in options.tasks:
            continue
        if not Path(interpreter(task)).exists():
            print(f"{task.name}: no environment {task.own}; its slow test makes it", flush=True)
            continue
        prepare(task, out)
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
    print(table(out))


def table(out: Path) -> str:
    """The rows of the table in README.md: reward on held-out rows before and after each finished run."""
    lines = []
    for task in TASKS:
        for seed, run in enumerate(sorted((out / "runs").glob(f"{task.name}-[0-9]"))):
            change = held_out_change(run)
            if change is None:
                continue
            chance = "" if task.chance is None else f"{task.chance:.2f}"
            cells = [f"`{task.name}`", task.title, chance, str(change.last_step)] if seed == 0 else [""] * 4
            cells += [interval(change.before), interval(change.after), p_value(change.test.p_t)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
        if task.chance is not None:
            axis.axhline(task.chance, color="grey", linestyle=":")
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
