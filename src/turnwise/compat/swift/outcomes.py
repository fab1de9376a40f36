"""The reward functions that ms-swift provides, with its names and arguments.

`accuracy` and `math` use math-verify (`pip install 'turnwise[math]'`) in a worker process. math-verify limits its time by
SIGALRM, which Python allows in the main thread only, and its parser can run for a long time inside one C call, which no signal
ends. The worker has its own main thread, and is killed and started again if it does not answer. So a run in any thread can use
the functions, and no call blocks the event loop."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.swift.rewards import ORM, RewardArgs, orms
from turnwise.errors import ConfigError, Failed, boundary

_PROGRAM = Path(__file__).with_name("math_worker.py")
_LIMIT = 60.0
"""Seconds for one answer. math-verify's own limits are 5 seconds for each of its parts; the start of the process counts too."""


class MathProcess:
    """One worker process, which is started at the first call. Several threads may call it; it answers one after the other."""

    def __init__(self, program: Path = _PROGRAM, limit: float = _LIMIT) -> None:
        self.limit = limit
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def agree(self, completion: str, solution: str) -> float:
        """1.0 if math-verify finds that the answer of a completion equals the solution, else 0.0. Blocks its thread.

        Raises RuntimeError if math-verify raises, if the worker ends, or if it has not answered in time.
        """
        with self._lock:
            reply = self._ask(json.dumps([completion, solution]))
        if "error" in reply:
            raise RuntimeError(f"math-verify raised {reply['error']}")
        return reply["agree"]

    def close(self) -> None:
        """End the worker. The next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self.limit, process.kill)
        timer.start()
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:  # it ended before it read the line
            reply = b""
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if reply:
            return json.loads(reply)
        if not late:  # the exit status of a process that has just ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        self.close()
        if late:
            raise RuntimeError(f"math-verify took longer than {self.limit:g} s: the answer is too hard to compare")
        raise RuntimeError(f"the process of math-verify ended with exit status {process.returncode}")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(self._program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C stops the run, which then ends the worker
            )
        return self._process


MATH = MathProcess()
"""For all functions: the process has its own copy of math-verify in memory."""
_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^}]*)\}")
_MATH_MARKS = re.compile(r"\\[()\[\]]")
_LONGEST_EXPRESSION = 300  # characters
_HUGE = re.compile(r"\^[^-+*/\s]*\^|\^\W*\d{4}|\d{4,}\s*!|!\s*!")
"""Powers of powers, large exponents and factorials of large numbers: their exact values can have billions of digits."""
_REACT = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:", re.DOTALL)


class MathAccuracy(ORM):
    """1 if math-verify finds that the answer equals the solution, else 0.

    The answer is the text in `<answer>`; without `<answer>`, the boxed text, or else the LaTeX text. The solution is read in the
    same way, but numbers count without LaTeX. A solution that cannot be read gives 0.

    math-verify runs in a worker process (`math_worker`): the function can be called in any thread.

    Raises ConfigError without math-verify.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        _require_math_verify("accuracy")

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, completions: Sequence[str], solution: Sequence[Any], **kwargs: Any
    ) -> list[float | None]:
        return [MATH.agree(completion, str(truth)) for completion, truth in zip(completions, solution, strict=True)]


class MathORM(ORM):
    """`math` of ms-swift: 1 if the boxed texts, or else the complete texts, are equal or are equal expressions, else 0.

    Text before `# Answer` does not count. The right answers are in the column `ground_truths` or `solution`. A completion may
    also be a request with `messages`, of which the last one counts. For new recipes, `accuracy` reads answers more exactly:
    here, a boxed text ends at its first brace.

    Raises ConfigError without math-verify, which brings the parser of LaTeX.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        _require_math_verify("math")

    def __call__(
        self, infer_requests: Sequence[Any], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float | None]:
        truths = kwargs["solution"] if ground_truths is None else ground_truths
        return [
            float(_equal_expressions(_final_text(_request_text(request)), _final_text(str(truth))))
            for request, truth in zip(infer_requests, truths, strict=True)
        ]


class Format(ORM):
    """1 if a completion consists only of `<think>...</think>` and `<answer>...</answer>`, else 0."""

    def __call__(self, completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        return [float(_FORMAT.fullmatch(completion) is not None) for completion in completions]


class ReActFormat(ORM):
    """1 if a completion begins with a block of `<think>`, then `Action:` and `Action Input:`, else 0."""

    def __call__(self, completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        return [float(_REACT.match(completion) is not None) for completion in completions]


class CosineReward(ORM):
    """A reward between two bounds, by the length in tokens: a short answer is better if it is right, and worse if it is wrong.

    Paper: Demystifying long chain-of-thought reasoning, arXiv 2502.03373.
    """

    def __init__(self, args: Any = None, accuracy_orm: Any = None, **kwargs: Any) -> None:
        super().__init__(args or RewardArgs())
        self.accuracy_orm = accuracy_orm or MathAccuracy()

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, completions: Sequence[str], solution: Sequence[Any], **kwargs: Any
    ) -> list[float | None]:
        right = self.accuracy_orm(completions, solution, **kwargs)
        return [
            self._between(tokens, right=value is not None and value >= 1)
            for tokens, value in zip(_lengths(kwargs), right, strict=True)
        ]

    def _between(self, tokens: int, *, right: bool) -> float:
        of = self.args
        shortest = of.cosine_min_len_value_correct if right else of.cosine_min_len_value_wrong
        longest = of.cosine_max_len_value_correct if right else of.cosine_max_len_value_wrong
        return longest + (shortest - longest) * (1 + math.cos(math.pi * tokens / of.cosine_max_len)) / 2


class RepetitionPenalty(ORM):
    """`repetition_max_penalty` times the share of n-grams of words that occurred before. Paper: arXiv 2502.03373."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args or RewardArgs(), **kwargs)

    def __call__(self, completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        return [self._penalty(completion.lower().split()) for completion in completions]

    def _penalty(self, words: Sequence[str]) -> float:
        size = self.args.repetition_n_grams
        grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
        return self.args.repetition_max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


class SoftOverlong(ORM):
    """0 up to `soft_max_length - soft_cache_length` tokens, -1 at `soft_max_length`, falling on. Paper: DAPO, arXiv 2503.14476.

    Raises ConfigError if `soft_cache_length` is missing or not below `soft_max_length`.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args or RewardArgs(), **kwargs)
        cache, most = self.args.soft_cache_length, self.args.soft_max_length
        if not cache or cache >= most:
            raise ConfigError(
                f"soft_overlong needs soft_cache_length, below soft_max_length={most}; it is {cache}: arguments: "
                f"{{args: {{soft_cache_length: {max(1, most // 5)}}}}}"
            )

    def __call__(self, completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        cache = self.args.soft_cache_length
        free = self.args.soft_max_length - cache
        return [min((free - tokens) / cache, 0.0) for tokens in _lengths(kwargs)]


def _lengths(columns: dict[str, Any]) -> list[int]:
    """The number of sampled tokens per conversation. `response_token_ids` has one list per turn, or one list for all turns."""
    return [
        sum(len(item) if isinstance(item, list | tuple) else 1 for item in ids) for ids in columns["response_token_ids"]
    ]


def _require_math_verify(name: str) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"the reward function {name} needs math-verify: pip install 'turnwise[math]'")


def _request_text(request: Any) -> str:
    if isinstance(request, str):
        return request
    messages = request["messages"] if isinstance(request, Mapping) else request.messages
    return str(messages[-1]["content"])


def _final_text(text: str) -> str:
    """The boxed text after `# Answer`, without marks of mathematics and braces."""
    parts = text.split("# Answer")
    text = (parts[1] if len(parts) > 1 else text).strip()
    if (boxed := _BOXED.search(text)) is not None:
        text = boxed.group(1).strip()
    return _MATH_MARKS.sub("", text).replace("{", "").replace("}", "").strip()


def _equal_expressions(text: str, other: str) -> bool:
    if text == other:
        return True
    first, second = _expression(text), _expression(other)
    return first is not None and second is not None and bool(first.equals(second))


def _expression(text: str) -> Any:
    """A text as a sympy expression; None if it is not one, or if its value could take minutes to compute."""
    from latex2sympy2_extended import latex2sympy

    text = text.partition("%")[0]  # a comment in LaTeX
    if not text or len(text) > _LONGEST_EXPRESSION or _HUGE.search(text):
        return None
    try:
        with boundary("reward"):
            expression = latex2sympy(text)
    except Failed:  # the parser raises Exception
        return None
    return expression if callable(getattr(expression, "equals", None)) else None


orms.update(
    accuracy=MathAccuracy,
    math=MathORM,
    format=Format,
    react_format=ReActFormat,
    cosine=CosineReward,
    repetition=RepetitionPenalty,
    soft_overlong=SoftOverlong,
)
