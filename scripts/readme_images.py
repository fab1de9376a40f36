"""Draw pictures from a real run: docs/images/curve.svg of the README, docs/images/conversation.svg of the examples.

make demo
python scripts/readme_images.py runs/demo                 # a conversation whose second answer is right
python scripts/readme_images.py runs/demo --id 1.0:489/1  # another conversation
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from turnwise import record
from turnwise.commands.show import token_texts
from turnwise.record.reader import read_lines
from turnwise.types import Trajectory

IMAGES = Path(__file__).parent.parent / "docs" / "images"
INK, PALE, GRID = "#1f2328", "#6e7781", "#e4e7eb"
GREEN, BLUE = "#1a7f37", "#0969da"
TURNS = ("#c8e6c9", "#bbdefb", "#ffe0b2", "#e1bee7")
"""Fill of the tokens of turn 0, 1, 2, ..."""
WIDTH, LABEL, CHARACTER, LINE = 860, 150, 6.6, 21


def main() -> int:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--id", help="the conversation that is drawn")
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "curve.svg").write_text(curve(options.run), encoding="utf-8")
    for trajectory in record.read(options.run):
        if trajectory.id == options.id or (options.id is None and corrected(trajectory)):
            (IMAGES / "conversation.svg").write_text(conversation(trajectory, options.run), encoding="utf-8")
            return 0
    raise SystemExit(f"{options.run} has no such conversation")


def corrected(trajectory: Trajectory) -> bool:
    """Whether the first answer was wrong and the second one right."""
    return len(trajectory.turns) == 4 and len(trajectory.segments) == 1 and 0 < (trajectory.reward or 0) < 1


def curve(run: Path) -> str:
    """The mean reward of each step, and the evaluations on held-out questions."""
    steps = [(one["step"], one["reward/mean"]) for one in read_lines(run / "metrics.jsonl")]
    held_out = [(one["step"], one["reward/mean"]) for one in read_lines(run / "evaluations.jsonl")]
    last, left, right, top, bottom = steps[-1][0], 60, 740, 40, 250

    def at(step: float, reward: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * reward

    parts: list[str] = []
    for tenth in (0, 0.25, 0.5, 0.75, 1):
        _, y = at(0, tenth)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(_text(left - 10, y + 4, f"{tenth:g}", PALE, "end"))
    for step in range(0, last + 1, 20):
        parts.append(_text(at(step, 0)[0], bottom + 20, str(step), PALE, "middle"))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in steps))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{GREEN}" stroke-width="2"/>')
    for step, reward in held_out:
        x, y = at(step, reward)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{BLUE}"/>')
        parts.append(
            _text(x + (10 if step == 0 else -4), y + 22, f"{reward:.2f}", BLUE, "start" if step == 0 else "end")
        )
    parts.append(_text(left, 22, "mean reward of a conversation", INK))
    parts.append(_text(left + 230, 22, "training, each step", GREEN))
    parts.append(_text(left + 380, 22, "held-out questions, before and after", BLUE))
    parts.append(_text((left + right) / 2, bottom + 40, "training step", PALE, "middle"))
    return _svg(right + 30, bottom + 55, parts)


@dataclass(frozen=True)
class Block:
    """Consecutive tokens with the same origin: the `turn` of the model, or -1."""

    turn: int
    tokens: list[str]
    title: str


def conversation(trajectory: Trajectory, run: Path) -> str:
    """The tokens of a conversation's only segment; the tokens that the model sampled are coloured."""
    parts: list[str] = []
    y = 66.0
    for block in _blocks(trajectory, run):
        y = _draw(block, y, parts)
    (advantage,) = set(trajectory.advantages)
    total = f"One conversation of the demo: reward {trajectory.reward:g}, advantage {advantage:+.2f} in its group"
    title = [_text(16, 24, total, INK)]
    for place, fill in enumerate(TURNS):
        title.append(f'<rect x="{16 + 16 * place}" y="36" width="14" height="14" rx="3" fill="{fill}"/>')
    title += [
        _text(86, 48, "sampled by the model: trained on", INK),
        f'<rect x="320" y="36" width="14" height="14" rx="3" fill="#fff" stroke="{GRID}"/>',
        _text(340, 48, "prompt, tool result, user message: not trained on", INK),
    ]
    return _svg(WIDTH, y + 10, [*title, *parts])


def _blocks(trajectory: Trajectory, run: Path) -> Iterator[Block]:
    """The blocks of the segment in order, with the roles of their messages."""
    (segment,), decode = trajectory.segments, token_texts(run)
    if decode is None:
        raise SystemExit(f"{run} has no tokenizer.json")
    messages, turn_of_token = list(trajectory.messages), enumerate(segment.turn)
    for turn, places in groupby(turn_of_token, key=lambda pair: pair[1]):
        tokens = [decode(segment.token_ids[place]) for place, _ in places]
        if turn >= 0:
            messages = messages[1:]
            yield Block(turn, tokens, f"turn {turn}: reward {trajectory.turns[turn].reward:g}")
            continue
        roles = [message["role"] for message in messages]
        roles = roles[: roles.index("assistant")] if "assistant" in roles else roles
        messages = messages[len(roles) :]
        if "system" in tokens[:2]:  # the tool's schema is long
            end = tokens.index("<|im_end|>")
            yield Block(turn, [f"… {end} tokens with the tool's schema …", *tokens[end:]], "prompt")
        else:
            yield Block(turn, tokens, {"tool": "tool result", "user": "user message"}[roles[0]])


def _draw(block: Block, y: float, parts: list[str]) -> float:
    """Draw one block at `y`. Returns the `y` of the next block."""
    parts.append(_text(16, y + 14, block.title, INK if block.turn >= 0 else PALE))
    x = float(LABEL)
    for token in block.tokens:
        shown = token.replace("\n", "↵").replace(" ", "·") if not token.startswith("…") else token
        width = len(shown) * CHARACTER + 7
        if x + width > WIDTH - 12:
            x, y = float(LABEL), y + LINE
        fill = TURNS[block.turn % len(TURNS)] if block.turn >= 0 else "#fff"
        edge = "none" if block.turn >= 0 else GRID
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="18" rx="3" fill="{fill}" stroke="{edge}"/>'
        )
        parts.append(_text(x + 3.5, y + 13, shown, INK if block.turn >= 0 else PALE, size=11, font="monospace"))
        x += width + 2
    return y + LINE + 7


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start", size: float = 13, font: str = "") -> str:
    family = font or "system-ui, sans-serif"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size:g}" font-family="{family}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(text)}</text>'
    )


def _svg(width: float, height: float, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}">\n<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main())
