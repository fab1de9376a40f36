"""A run for the viewer: conversations with tools, an image, failures and hostile texts."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from turnwise.data.images import digest

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202e\x1b[31m"


def conversation(number: int, *, step: int = 1, reward: float | None = 0.5, text: str = "The answer is 4.") -> dict:
    """A record with two turns, a tool call and 12 tokens."""
    row, place = divmod(number, 4)
    call = {"id": "call_0", "name": "calculator", "arguments": {"expression": "2+2"}, "text": "{}", "content": "4"}
    calls = [{**call, "error": None, "reward": 0.0, "attempts": 1, "seconds": 0.1}]
    common = {"info": {}, "finish_reason": "stop", "seconds": {"engine": 0.5, "environment": 0.25}}
    first = {"text": "<tool_call>", "reward": 0.0, "advantage": -0.5, "weight": 1.0, "tool_calls": calls}
    first["rewards"] = {"environment": 0.0}  # a part without a name: `turns`
    second = {"text": text, "reward": reward, "advantage": [0.1, -0.2, 0.3], "weight": 0.0, "tool_calls": []}
    function = {"name": "calculator", "arguments": {"expression": "2+2"}}
    messages = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "name": "calculator", "content": "4"},
        {"role": "assistant", "content": text},
    ]
    turns = [
        {"message": messages[1], "message_index": 1, **first, **common, "started": 100.0 + number},
        {"message": messages[3], "message_index": 3, **second, **common, "started": 101.0 + number},
    ]
    segment = {
        "token_ids": list(range(12)),
        "logprobs": [0, 0, 0, 0, -0.1, -2.5, -0.3, 0, 0, -1.0, -0.2, -0.1],
        "trainer_logprobs": [0, 0, 0, 0, -0.1, -2.4, -0.35, 0, 0, None, None, None],
        "turn": [-1] * 4 + [0] * 3 + [-1] * 2 + [1] * 3,
        "version": [-1] * 4 + [2] * 3 + [-1] * 2 + [3] * 3,
    }
    failure = {"kind": "environment", "message": "no luck", "traceback": ""}
    return {
        "schema": 3,
        "step": step,
        "id": f"{step}.0:{row}/{place}",
        "group": f"{step}.0:{row}",
        "row": {"id": str(row), "answer": "4"},
        "stop": "error" if reward is None else "done",
        "error": failure if reward is None else None,
        "reward": reward,
        "rewards": {"turns": 0.0, "answer": 0.5},
        "tools": [{"type": "function", "function": {"name": "calculator"}}],
        "messages": messages,
        "turns": turns,
        "segments": [segment],
        "logprob_kind": "sampled",
        "template_mismatch": None,
        "started": 99.5 + number,
        "seconds": 3.0,
    }


def write_run(path: Path, *, shift: float = 0.0) -> Path:
    """A run of three steps with eight conversations each; the last one has hostile texts, one failed."""
    path.mkdir(parents=True)
    lines = []
    for step in (1, 2, 3):
        for number in range(8):
            reward = None if (step, number) == (2, 3) else step / 10 + number / 100 + shift
            lines.append(conversation(number, step=step, reward=reward))
    lines[-1] = conversation(7, step=3, reward=0.9, text=HOSTILE)
    image = Image.new("RGB", (8, 8), "red")
    (path / "media").mkdir()
    image.save(path / "media" / f"{digest(image)}.png")
    picture = {"type": "image", "image": f"sha256:{digest(image)}", "size": [8, 8]}
    lines[0]["messages"][0]["content"] = [picture, {"type": "text", "text": "What is 2+2?"}]
    (path / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [
        {"step": s, "reward/mean": s / 10 + shift, "kl": 1e-9 * s, "stop/done": 1.0, "seconds/step": 2.0}
        for s in (1, 2, 3)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    timeline = [_timeline(step) for step in (1, 2, 3)]
    (path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timeline))
    return path


def _timeline(step: int) -> dict:
    """The groups of a step started during the step before."""
    asked = 100.0 + 3 * step
    common = {"version": step - 1, "newest": step - 1, "use": "trained", "timed_out": False}
    groups = [
        {"id": f"{step}.0:{row}", "position": row, "started": asked - 2, "ended": asked + row, **common}
        for row in (0, 1)
    ]
    times = {"asked": asked, "taken": asked + 1, "trained": asked + 2}
    return {
        "step": step,
        "version": step - 1,
        **times,
        "waited_for": f"{step}.0:1",
        "running": 2,
        "omitted": 0,
        "groups": groups,
    }
