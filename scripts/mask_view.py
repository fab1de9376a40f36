"""Write the token-by-token view in docs/loss_masks.md: one conversation with the weights of each loss mask.

The conversation is a real rollout with the demo's tokenizer, template and calculator, a user with a second question, and the
scripted engine.

python scripts/mask_view.py            # rewrite the page
python scripts/mask_view.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import replace_block, write_or_check

from turnwise.chat.renderer import Renderer
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.environments.users import ScriptedUser
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, custom
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_group
from turnwise.types import Row, Sampling, Trajectory, Turn

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "loss_masks.md"
BEGIN, END = "<!-- view: made by scripts/mask_view.py -->", "<!-- end of view -->"

QUESTION, FURTHER = "What is 3*4?", "And 12+1?"
LINES = [
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>',
    "The answer is 12.",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+1"}}\n</tool_call>',
    "The answer is 13.",
]


def calls_count_half(turn: Turn) -> float:
    """The example function of the page."""
    return 0.5 if turn.calls else 1.0


def conversation(renderer: Renderer) -> Trajectory:
    """A rollout with two questions, each with a tool call and an answer."""
    context = RolloutContext(
        engine=ScriptedEngine([LINES], encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0]),
        renderer=renderer,
        make_environment=lambda: Tools([Tool.of(calculator)], then=ScriptedUser([FURTHER])),
        sampling=Sampling(),
        limits=Limits(turns=8, tokens_per_turn=256),
    )
    group = new_group(Row(id="1", messages=[{"role": "user", "content": QUESTION}]), size=1, seed=0)
    (trajectory,) = asyncio.run(rollout_group(group, context)).trajectories
    if trajectory.failed or len(trajectory.turns) != len(LINES):
        raise SystemExit(f"unexpected conversation: {trajectory.error}, {trajectory.assistant_texts}")
    return trajectory


def view(renderer: Renderer, trajectory: Trajectory) -> Iterator[str]:
    """A line for each token: its text, its turn, and its weight with each loss mask."""
    rules = {**TURN_WEIGHTINGS, "calls_count_half": custom(calls_count_half, name="calls_count_half")}
    weights: dict[str, list[float]] = {}
    for name, rule in rules.items():
        rule(trajectory)
        weights[name] = [turn.weight for turn in trajectory.turns]
    (segment,) = trajectory.segments
    texts = [renderer.decode([token]) for token in segment.token_ids]
    begins = "".join(texts).index(f"<|im_start|>user\n{QUESTION}")
    width = max(len(repr(text)) for text in texts)
    yield f"{'token':<{width}}{'turn':>6}" + "".join(f"{name:>{len(name) + 2}}" for name in rules)
    skipped = length = 0
    for text, turn in zip(texts, segment.turn, strict=True):
        length += len(text)
        if length <= begins:
            skipped += 1
            continue
        if skipped:
            yield f"({skipped} tokens that describe the tools)"
            skipped = 0
        said = [f"{weights[name][turn] if turn >= 0 else 0:g}" for name in rules]
        cells = "".join(f"{weight:>{len(name) + 2}}" for name, weight in zip(rules, said, strict=True))
        yield f"{text!r:<{width}}{turn if turn >= 0 else '-':>6}{cells if turn >= 0 else ''}"


def main() -> int:
    """Rewrite or check the page."""
    renderer = Renderer.from_pretrained(ROOT / "demo" / "model")
    lines = "\n".join(line.rstrip() for line in view(renderer, conversation(renderer)))
    page = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, replace_block(page, BEGIN, END, f"\n\n```text\n{lines}\n```\n\n"))


if __name__ == "__main__":
    sys.exit(main())
