"""Write conversations for supervised fine-tuning (recipes/sft.yaml): `python demo/make_conversations.py`, about a second.

The careful student of `student.py` answers questions that are in neither data file of the demo. Calls are in `tool_calls`, as
in the files of other programs. A wrong turn has `"weight": 0`: it is in the conversation, but it is not trained on.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from questions import questions
from student import Habits, Trace, converse

from turnwise.chat.tool_calls import Hermes
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tool

HERE = Path(__file__).resolve().parent
TOOLS = [Tool.of(calculator).schema]
CAREFUL = Habits(wrong=0.25, wrong_again=0.25, guess=0.05, garbled=0.05)
TRAIN, HELDOUT = 512, 64


def conversation(trace: Trace) -> dict[str, Any]:
    """A row in the format of `turnwise sft`."""
    mistakes = iter(trace.mistakes)
    messages: list[dict[str, Any]] = []
    called = ""
    for number, message in enumerate(trace.messages):
        if message["role"] == "assistant":
            called = f"call_{number}"
            message = {**_with_calls(message["content"], called), **({"weight": 0} if next(mistakes) else {})}
        elif message["role"] == "tool" and "tool_calls" in messages[-1]:
            message = {"role": "tool", "tool_call_id": called, "content": message["content"]}
        messages.append(message)
    return {"messages": messages}


def _with_calls(text: str, name: str) -> dict[str, Any]:
    reading = Hermes().parse(text)
    if not reading.calls or reading.calls[0].error is not None:
        return {"role": "assistant", "content": text}  # a call that cannot be parsed has no other form
    (call,) = reading.calls
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {
        "role": "assistant",
        "content": reading.content,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write conversations for supervised fine-tuning.")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder to write to (default: demo/)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    known = {
        json.loads(line)["prompt"][0]["content"]
        for name in ("train.jsonl", "heldout.jsonl")
        for line in (HERE / name).read_text().splitlines()
    }
    rows = [converse(rng, row, CAREFUL) for row in questions(arguments.seed, TRAIN + HELDOUT, without=known)]
    lines = [json.dumps(conversation(trace)) + "\n" for trace in rows]
    (arguments.out / "conversations.jsonl").write_text("".join(lines[:TRAIN]))
    (arguments.out / "conversations_heldout.jsonl").write_text("".join(lines[TRAIN:]))


if __name__ == "__main__":
    main()
