"""Damaged records: `turnwise show` prints them, or refuses them with the file, the line and the key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rich.console import Console

from fuzz.mutations import mutated_text, mutated_tree
from support.conversations import Says, a_row, call, hold
from turnwise.commands.show import Selection, show
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import RunError
from turnwise.record.trajectory_json import trajectory_record

ROUNDS = 120


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_a_damaged_record_is_shown_or_refused_with_a_message(tmp_path: Path) -> None:
    draw = random.Random(0)
    one = hold(Says(call("add", '{"a": 1, "b": 2}'), "It is 3."), lambda: Tools([add]), row=a_row("1+2?", answer=3))
    one.reward, one.advantages = 1.0, [0.5, 0.5]
    one.step = 1
    record = json.loads(json.dumps(trajectory_record(one)))
    metrics = {"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "turns/mean": 2.0, "seconds/step": 0.5}
    options: list[dict[str, Any]] = [{}, {"last": 1}, {"worst": 1, "tokens": True}, {"failed": True}, {"step": 1}]
    outcomes: set[bool] = set()
    console = Console(width=80, no_color=True)
    for _ in range(ROUNDS):
        lines = {"trajectories": record, "metrics": metrics, "evaluations": metrics}
        damaged = draw.choice(["trajectories", "trajectories", "metrics", "evaluations"])
        for name, value in lines.items():
            text = json.dumps(mutated_tree(value, draw) if name == damaged else value) + "\n"
            text = mutated_text(text, draw) if name == damaged and draw.random() < 0.3 else text
            (tmp_path / f"{name}.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            with console.capture() as captured:
                chosen = dict(draw.choice(options))
                tokens = chosen.pop("tokens", False)
                show(console, tmp_path, Selection(**chosen), tokens=tokens)
            captured.get().encode("utf-8")
            outcomes.add(True)
        except RunError as error:
            str(error).encode("utf-8")
            outcomes.add(False)
    assert outcomes == {True, False}
