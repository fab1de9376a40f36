"""ms-swift's built-in reward functions, value by value: against its own source where the mirror has it, and literal values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from turnwise.compat.swift.rewards import RewardArgs, orms

MIRROR = next(
    (
        repo
        for folder in Path(__file__).resolve().parents
        if (repo := folder / ".mirror" / "modelscope+ms-swift" / "repo").is_dir()
    ),
    None,
)

COMPLETIONS = [
    "<think>a</think>\n<answer>12</answer>",
    "<think>a</think><answer>12</answer> and more",
    "\n<think>a</think><answer>12</answer>",
    "<think>a</think>\n\n<answer>1\n2</answer>\n",
    "<think>x</think>\nAction: f\nAction Input: 1",
    "<think>x</think>\nAction: f\nAction Input:",
    "Action: f\nAction Input: 1",
    "so \\boxed{12}",
    "\\boxed{\\frac{1}{2}}",
    "\\boxed{0.5}",
    "12",
    "",
    "A b a b a b",
    "one two",
    "the same the same the same the same",
    "One one ONE one",
]
SOLUTIONS = [
    "12",
    "12",
    "<answer>12</answer>",
    "13",
    "x",
    "x",
    "x",
    "\\boxed{12}",
    "0.5",
    "$\\frac12$",
    "12",
    "12",
    *["1"] * 4,
]
LENGTHS = [0, 1, 5, 50, 90, 99, 100, 101, 150, 200, 255, 256, 300, 511, 512, 600]
ARGS = {
    "max_completion_length": 256,
    "cosine_min_len_value_wrong": -0.7,
    "cosine_max_len_value_wrong": -0.1,
    "cosine_min_len_value_correct": 1.5,
    "cosine_max_len_value_correct": 0.25,
    "cosine_max_len": 200,
    "repetition_n_grams": 2,
    "repetition_max_penalty": -0.5,
    "soft_max_length": 256,
    "soft_cache_length": 64,
}
MATH = [  # what ms-swift's own function returns, with sympy 1.14 and antlr4-python3-runtime 4.11
    ("so \\boxed{12}", "\\boxed{12}", 1.0),
    ("\\boxed{12}", "12", 1.0),
    ("# Answer 7", "# Answer\n7", 1.0),
    ("the answer is 7", "7", 0.0),
    ("\\boxed{\\frac{1}{2}}", "0.5", 0.0),  # the boxed text ends at the first brace
    ("\\boxed{x+1}", "\\boxed{1+x}", 1.0),
    ("\\boxed{x+1}", "\\boxed{x+2}", 0.0),
    ("\\boxed{2\\sqrt{2}}", "\\boxed{\\sqrt{8}}", 0.0),
    ("\\(3\\)", "3", 1.0),
    ("", "3", 0.0),
    ("\\boxed{}", "3", 0.0),
    ("\\boxed{1,000}", "1000", 1.0),
    ("\\boxed{10}", "\\boxed{ 10 }", 1.0),
    ("think # Answer 5 # Answer 6", "5", 1.0),
    ("\\boxed{x^2}", "\\boxed{x\\cdot x}", 1.0),
    ("\\boxed{(x+1)^2}", "\\boxed{x^2+2x+1}", 1.0),
    ("\\boxed{50%}", "0.5", 0.0),
    ("\\boxed{Friday}", "Friday", 1.0),
    ("\\boxed{\\text{no}}", "\\boxed{\\text{yes}}", 0.0),
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """ms-swift's own module of reward functions, with a stub of the one module that it imports."""
    if MIRROR is None:
        pytest.skip("there is no mirror of ms-swift")
    show = ["git", f"--git-dir={MIRROR}", "show", "HEAD:swift/rewards/orm.py"]
    source = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    stubs = {"swift": ModuleType("swift"), "swift.infer_engine": ModuleType("swift.infer_engine")}
    stubs["swift.infer_engine"].InferRequest = object  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        module = ModuleType("their_orm")
        exec(compile(source, "orm.py", "exec"), vars(module))
    finally:
        for name, known in before.items():
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
    return module.orms  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["accuracy", "format", "react_format", "cosine", "repetition", "soft_overlong"])
def test_a_built_in_reward_gives_the_values_of_ms_swifts_own(name: str, theirs: Any) -> None:
    columns = {"solution": SOLUTIONS, "response_token_ids": [[7] * length for length in LENGTHS]}
    expected = theirs[name](SimpleNamespace(**ARGS))(list(COMPLETIONS), **columns)
    assert orms[name](RewardArgs(ARGS))(list(COMPLETIONS), **columns) == pytest.approx(expected, abs=1e-12)
    assert len(set(expected)) > 1  # the cases tell right from wrong


def test_the_cosine_of_ms_swift_is_written_down() -> None:
    columns = {"solution": SOLUTIONS, "response_token_ids": [[7] * length for length in LENGTHS]}
    ours = orms["cosine"](RewardArgs(ARGS))(list(COMPLETIONS), **columns)
    assert ours[:4] == pytest.approx([1.5, 1.499922895301038, 1.498073333583205, -0.6121320343559642], abs=1e-12)


@pytest.mark.parametrize(("completion", "truth", "right"), MATH)
def test_math_is_what_ms_swifts_own_decides(completion: str, truth: str, right: float) -> None:
    assert orms["math"]()([completion], ground_truths=[truth]) == [right]
    assert orms["math"]()([completion], solution=[truth]) == [right]
    request = SimpleNamespace(messages=[{"role": "assistant", "content": completion}])
    assert orms["math"]()([request, {"messages": request.messages}], ground_truths=[truth] * 2) == [right] * 2


@pytest.mark.parametrize("huge", ["9^9^9^9", "(9^9)^9", "9^{99999999}", "99999!", "3!!!!", "x" * 1_000, "^" * 50_000])
def test_an_expression_that_cannot_be_computed_is_not_equal(huge: str) -> None:
    assert orms["math"]()([f"\\boxed{{{huge}}}"], solution=["1"]) == [0.0]
