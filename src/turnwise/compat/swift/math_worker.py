"""The program of the worker process that compares answers with math-verify. `outcomes` starts it.

It reads one JSON list `[completion, solution]` a line, and writes one JSON object a line: `{"agree": 0.0 or 1.0}` or
`{"error": text}`. math-verify limits its time by SIGALRM, so the calls are made in this process's main thread. The file is run
by its path and imports nothing of turnwise, so that a worker starts fast and needs little memory."""

from __future__ import annotations

import json
import os
import re
import sys

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged(text: str) -> str | None:
    """The text in the first `<answer>`; None without it."""
    match = _TAGGED.search(text)
    return match.group(1).strip() if match else None


def agree(completion: str, solution: str) -> float:
    """1.0 if math-verify finds that the answer of a completion equals the solution, else 0.0."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    in_tags = tagged(solution)
    gold = parse(solution if in_tags is None else in_tags, extraction_mode="first_match")
    if not gold:
        return 0.0
    if (answer := tagged(completion)) is not None:
        parsed_answer = parse(answer, extraction_mode="first_match")
    else:
        normalization = NormalizationConfig(
            nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
        )
        latex = LatexExtractionConfig(
            normalization_config=normalization, boxed_match_priority=0, try_extract_without_anchor=False
        )
        parsed_answer = parse(completion, extraction_config=[latex], extraction_mode="first_match")
    return float(verify(gold, parsed_answer))


def main() -> None:
    """Answer the lines of stdin until it ends. What libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            completion, solution = json.loads(line)
            reply = {"agree": agree(completion, solution)}
        except Exception as error:  # the reward of this conversation fails, and the worker goes on
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
