r"""`\boxed{...}` in texts, as verl's preprocessing scripts for mathematics read it (`verl.utils.reward_score.math_reward`)."""

from __future__ import annotations

__all__ = ["last_boxed_only_string", "remove_boxed"]


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` or `\fbox{...}` with its braces balanced, or `\boxed x` up to a dollar sign; else None."""
    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    start = max(string.rfind("\\boxed"), -1)
    start = start if start >= 0 else string.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(string)):
        depth += {"{": 1, "}": -1}.get(string[place], 0)
        if string[place] == "}" and depth == 0:
            return string[start : place + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""The text inside `\boxed{...}`, or after `\boxed `. Raises ValueError for any other text."""
    if s.startswith("\\boxed "):
        return s.removeprefix("\\boxed ")
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise ValueError(f"{s!r:.80} is not of the form \\boxed{{...}}")
    return s.removeprefix("\\boxed{")[:-1]
