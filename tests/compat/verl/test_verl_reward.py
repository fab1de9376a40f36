"""verl's reward functions: GSM8K's own grader, and a user's `compute_score`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.conversations import a_row, call, hold
from turnwise.build import scorer
from turnwise.compat.verl import custom_score, data_source_score
from turnwise.compat.verl.reward_score import compute_score, extract_solution
from turnwise.config import Config
from turnwise.environments.calculator import calculator
from turnwise.environments.tools import Tools
from turnwise.errors import ConfigError, Failed
from turnwise.types import Group, Trajectory

FUNCTIONS = """
from verl.utils.reward_score import gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": gsm8k.compute_score(solution_str, ground_truth) + bonus, "said": solution_str}


async def awaited(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["index"])


def unscored(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}


def broken(data_source, solution_str, ground_truth, extra_info):
    raise RuntimeError("no luck")
"""


def held(*said: str, **fields: Any) -> Trajectory:
    row = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 3},
        **fields,
    }
    return hold(list(said), lambda: Tools([calculator]), row=a_row(**row))


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 72", "72", "72"),
        ("#### 1,234", "1234", "1,234"),
        ("#### 1 and #### -2.5", "-2.5", "-2.5"),
        ("it is 7.", None, "7."),
        ("no number", None, None),
        ("#### 5" + " " * 300, None, None),  # the end alone is looked at
    ],
)
def test_gsm8k_s_answers_are_read_as_verl_reads_them(text: str, strict: str | None, flexible: str | None) -> None:
    assert (extract_solution(text), extract_solution(text, "flexible")) == (strict, flexible)


def test_scores_are_those_of_verl() -> None:
    assert [compute_score(text, "72", format_score=0.1) for text in ("#### 72", "#### 71", "72")] == [1.0, 0.1, 0.0]
    with pytest.raises(ValueError, match="the method is 'loose'; there are 'strict' and 'flexible'"):
        extract_solution("", "loose")  # type: ignore[arg-type]


def test_the_data_source_chooses_the_grader() -> None:
    assert data_source_score(held("#### 72")) == 1.0
    assert data_source_score(held("#### 71")) == 0.0
    with pytest.raises(ValueError, match="has the data_source 'other', for which turnwise has no grader"):
        data_source_score(held("#### 72", data_source="other"))
    with pytest.raises(ValueError, match=r"has no reward_model\.ground_truth"):
        data_source_score(held("#### 72", reward_model=None))


def test_a_tool_that_says_the_answer_earns_nothing() -> None:
    one = held(call("calculator", '{"expression": "8 * 9"}'), "there it is")
    assert [message["content"] for message in one.messages if message["role"] == "tool"] == ["72"]
    assert data_source_score(one) == 0.0


def test_a_function_of_one_s_own_may_be_sync_or_async_and_import_from_verl(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.py")
    Path(path).write_text(FUNCTIONS)

    def score(**options: Any) -> float:
        return asyncio.run(custom_score(held("#### 72"), path=path, **options))

    assert score() == 1.0
    assert score(arguments={"bonus": 0.5}) == 1.5
    assert score(name="awaited") == 3.0
    with pytest.raises(ValueError, match=r"unscored returned a mapping without `score`: \['acc'\]"):
        score(name="unscored")
    with pytest.raises(Failed, match="RuntimeError: no luck"):
        score(name="broken")
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        score(name="nothing")


def test_a_recipe_s_scorer_asks_both(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    tree = {
        "model": {"path": "m"},
        "data": {"train": "d.parquet"},
        "reward": {
            "trajectory": [
                "turnwise.compat.verl:data_source_score",
                {
                    "use": "turnwise.compat.verl:custom_score",
                    "arguments": {"path": f"{tmp_path}/mine.py", "arguments": {"bonus": 0.5}},
                    "weight": 2.0,
                },
            ]
        },
    }
    good, unknown = held("#### 72"), held("#### 72", data_source="other")
    groups = [Group(id=str(n), row=one.row, trajectories=[one]) for n, one in enumerate((good, unknown))]
    asyncio.run(scorer(Config.model_validate(tree)).score(groups))
    assert good.reward == 1.0 + 2.0 * 1.5
    assert unknown.error is not None
    assert unknown.error.kind == "reward"
