"""Cost of a turn in encoded tokens and time: `python benchmarks/tokens.py`, half a minute.

No model is run: the completions are encoded before the measurement. A conversation of calls and answers is tokenized turn by
turn in three ways:

* turnwise: the opening once, then only the text that the template writes between two turns
* deltas: as in document 4, the conversation is rendered before and after each message, and the difference is encoded
* full: the complete conversation is rendered and encoded before each turn, as in a chat API

For each way: the number of encoded tokens for each token in the result, and the CPU time of a turn near turns 5, 40 and 200.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turnwise.chat.renderer import Renderer
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.calculator import calculator
from turnwise.environments.environment import SingleTurn
from turnwise.environments.tools.toolbox import Tool
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.session import SegmentHistory
from turnwise.types import Message, Sampling

MODEL = Path(__file__).resolve().parent.parent / "demo" / "model"
TOOLS = [Tool.of(calculator).schema]
TURNS, REPEATS, AROUND = 204, 5, 4
PLACES = (5, 40, 200)
Cost = tuple[list[float], list[int], int]
"""Seconds of each turn, tokens encoded up to each turn, and tokens in the result after 40 turns."""


class Counting:
    """A tokenizer that counts what it encodes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        ids = self.inner.encode(text, **options)
        self.encoded += len(ids)
        return ids


def conversation(turns: int) -> tuple[list[Message], list[tuple[str, Message]]]:
    """The opening, and alternately the model's messages and the answers to them. All answers are different."""
    opening: list[Message] = [{"role": "user", "content": "What is 3*4, and what comes after it?"}]
    rounds: list[tuple[str, Message]] = []
    for n in range(turns):
        if n % 2 == 0:
            said = f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{n}*7+1"}}}}\n</tool_call>'
            rounds.append(
                (said, {"role": "tool", "tool_call_id": f"call_{n}", "name": "calculator", "content": f"{n * 7 + 1}"})
            )
        else:
            rounds.append(
                (f"So it is {n * 7}. Shall I go on?", {"role": "user", "content": f"Yes, number {n}, please."})
            )
    return opening, rounds


def ours(tokenizer: Counting) -> Cost:
    renderer = Renderer(tokenizer)
    opening, rounds = conversation(TURNS)
    sampled = [[*renderer.encode(said), renderer.stop_token_ids[0]] for said, _ in rounds]
    tokenizer.encoded = 0
    seconds, encoded = [], []
    history = SegmentHistory(
        RolloutContext(
            engine=ScriptedEngine([], encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0]),
            renderer=renderer,
            make_environment=SingleTurn,
            sampling=Sampling(),
            limits=Limits(),
        )
    )
    prompt, kept = history.encode_opening(opening, TOOLS), 0
    for n, (_, answer) in enumerate(rounds):
        started = time.process_time()
        segment = history.segment
        place = len(segment)
        segment.append_context(prompt.token_ids)
        history.append_messages(prompt, place)
        segment.token_ids.extend(sampled[n])
        history.append_turn(renderer.turn_parser.parse(sampled[n], tools=TOOLS))
        bridge = history.encode_bridge([answer], TOOLS)
        assert bridge is not None, "the policy `keep` begins no new segment"
        prompt = bridge
        seconds.append(time.process_time() - started)
        encoded.append(tokenizer.encoded)
        kept = len(segment.token_ids) if n + 1 == 40 else kept
    return seconds, encoded, kept


def deltas(tokenizer: Counting) -> Cost:
    opening, messages = conversation(TURNS)[0], list(conversation(TURNS)[0])
    stop = tokenizer.eos_token_id
    sampled = [[*tokenizer.encode(said), stop] for said, _ in conversation(TURNS)[1]]
    tokenizer.encoded = 0

    def render(upto: list[Message], cue: bool) -> str:
        return tokenizer.apply_chat_template(upto, tools=TOOLS, add_generation_prompt=cue, tokenize=False)

    ids = tokenizer.encode(render(opening, True))
    seconds, encoded, kept = [], [], 0
    for n, (said, answer) in enumerate(conversation(TURNS)[1]):
        started = time.process_time()
        ids += sampled[n]
        messages.append({"role": "assistant", "content": said})
        before = render(messages, False)
        messages.append(answer)
        ids += tokenizer.encode(render(messages, True)[len(before) :])
        seconds.append(time.process_time() - started)
        encoded.append(tokenizer.encoded)
        kept = len(ids) if n + 1 == 40 else kept
    return seconds, encoded, kept


def full(tokenizer: Counting) -> Cost:
    messages, rounds = conversation(TURNS)
    tokenizer.encoded = 0
    seconds, encoded, kept = [], [], 0
    for n, (said, answer) in enumerate(rounds):
        started = time.process_time()
        text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text)
        seconds.append(time.process_time() - started)
        encoded.append(tokenizer.encoded)
        messages += [{"role": "assistant", "content": said}, answer]
        kept = len(ids) if n + 1 == 40 else kept
    return seconds, encoded, kept


def around(costs: list[Cost], place: int) -> float:
    """Milliseconds of a turn near a position: the median over neighbouring turns and repetitions."""
    return 1e3 * statistics.median(
        seconds for one, _, _ in costs for seconds in one[max(0, place - AROUND) : place + AROUND]
    )


def main() -> int:
    tokenizer = Counting(Renderer.from_pretrained(MODEL).tokenizer)
    ways: dict[str, Callable[[Counting], Cost]] = {"turnwise": ours, "deltas": deltas, "full": full}
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(REPEATS):  # alternately, so that other load on the machine affects all ways
        for name, way in ways.items():
            costs[name].append(way(tokenizer))
    shown = Table(title="a conversation of calls and answers, tokenized turn by turn")
    for column in (
        "",
        "tokens encoded for each kept, 40 turns",
        *(f"ms at turn {place}" for place in PLACES),
        "turn 200 / turn 5",
    ):
        shown.add_column(column, justify="right")
    for name, repeats in costs.items():
        _, encoded, kept = repeats[0]
        times = [around(repeats, place) for place in PLACES]
        shown.add_row(
            name, f"{encoded[39] / kept:.2f}", *(f"{one:.2f}" for one in times), f"{times[-1] / times[0]:.2f}"
        )
    Console(width=120).print(shown)
    mine = costs["turnwise"]
    print(f"encoded_per_kept {mine[0][1][39] / mine[0][2]:.2f}")
    print(f"turn_200_over_turn_5 {around(mine, 200) / around(mine, 5):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
