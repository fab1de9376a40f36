"""verl's reward functions: GSM8K's own grader, and a user's `compute_score`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat.verl.verl_files import a_tool, an_interaction, set_up, user_module
from support.conversations import a_row, call, hold
from turnwise.assembly import scorer
from turnwise.compat.verl import CustomBatchScore, CustomScore, data_source_score
from turnwise.compat.verl.helpers import compute_score, extract_solution
from turnwise.compat.verl.reward import num_turns
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, Failed
from turnwise.options.schema import Config
from turnwise.record.metrics import conversation_metrics
from turnwise.record.trajectory_json import trajectory_record
from turnwise.rollout.context import Limits
from turnwise.types import Group, Row, Trajectory

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
        return asyncio.run(CustomScore(path, **options)(held("#### 72")))

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
                    "use": "turnwise.compat.verl:CustomScore",
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


INFO = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": float(extra_info["num_turns"]),
        "acc": True,
        "turns": extra_info["turn_scores"],
        "length": 2.5,
        "bad": float("nan"),
        "info": {name: value for name, value in extra_info.items() if name != "raw_prompt"},
        "prompt": extra_info["raw_prompt"],
    }
"""


def scored(one: Trajectory, *functions: Any) -> Trajectory:
    tree = {
        "model": {"path": "m"},
        "data": {"train": "d.parquet"},
        "reward": {"trajectory": list(functions)},
    }
    made = scorer(Config.model_validate(tree))
    asyncio.run(made.score([Group(id="g", row=one.row, trajectories=[one])]))
    return one


def test_extra_info_is_what_verl_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_module(monkeypatch)
    (tmp_path / "mine.py").write_text(INFO)
    made = set_up(tmp_path, tools=[a_tool()], interactions=[an_interaction(over_after=3)])
    row = a_row(reward_model={"ground_truth": "7"}, extra_info={"index": 3})
    one = hold([call("count"), "one", "two"], made, row=row)
    given = {"use": "turnwise.compat.verl:CustomScore", "arguments": {"path": f"{tmp_path}/mine.py"}}
    scored(one, given)
    assert one.error is None
    # the prompt, three turns, and what the tool and the interaction (twice: its last words too) answered
    assert one.rewards["compute_score"] == 1 + 3 + 3
    assert one.metrics == {"acc": 1.0, "length": 2.5}
    kept = one.turns[-1].info["compute_score"]
    assert kept["info"] == {
        "index": 3,
        "num_turns": 7,
        "turn_scores": [0.25, 0.25],
        "tool_rewards": [0.125],
        "rollout_reward_scores": {"count": 1.0, "user_turn_rewards": [0.25, 0.25]},
    }
    assert (kept["turns"], kept["bad"]) == ([0.25, 0.25], "nan")
    assert kept["prompt"] == [{"role": "user", "content": "Hi"}]
    group = Group(id="g", row=one.row, trajectories=[one])
    assert conversation_metrics([group])["metrics/length"] == 2.5
    assert trajectory_record(one)["metrics"] == {"acc": 1.0, "length": 2.5}


@pytest.mark.parametrize(
    ("said", "turns", "count"),
    [
        (["#### 72"], 8, 2),
        ([call("calculator", '{"expression": "8*9"}'), "#### 72"], 8, 4),
        # the answer to the call that ends the conversation is read by nobody: verl does not run it
        ([call("calculator", '{"expression": "8*9"}')] * 2, 2, 4),
    ],
)
def test_num_turns_counts_the_prompt_turns_and_answers(said: list[str], turns: int, count: int) -> None:
    one = hold(said, lambda: Tools([calculator]), row=a_row(), limits=Limits(turns=turns, tokens_per_turn=200))
    assert num_turns(one) == count
    few_shot = Row(id="1", messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2)
    few_shot = replace(few_shot, messages=[*few_shot.messages, {"role": "user", "content": "c"}])
    limits = Limits(turns=turns, tokens_per_turn=200)
    assert num_turns(hold(said, lambda: Tools([calculator]), row=few_shot, limits=limits)) == count


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("import nothing_of_the_kind", "compute_score", "No module named 'nothing_of_the_kind'"),
        ("compute_score = 3", "compute_score", "mine.py:compute_score cannot be called"),
        ("def score(data_source): pass", "compute_score", "has no 'compute_score'"),
        (
            "def compute_score(data_source, solution, ground_truth, extra_info): pass",
            "compute_score",
            "takes no argument 'solution_str'; it is called with data_source, solution_str, ground_truth, extra_info",
        ),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_refused_at_the_start(
    text: str, name: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(text)
    use = {"use": "turnwise.compat.verl:CustomScore", "arguments": {"path": f"{tmp_path}/mine.py", "name": name}}
    tree = {"model": {"path": "m"}, "data": {"train": "d.parquet"}, "reward": {"trajectory": [use]}}
    with pytest.raises(ConfigError) as refused:
        scorer(Config.model_validate(tree))
    assert told in str(refused.value)


BATCHED = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    assert data_sources == ["openai/gsm8k"] * len(data_sources)
    lengths = [len(one) for one in solution_strs]
    results = [{"score": length - sum(lengths) / len(lengths) + bonus, "length": length} for length in lengths]
    return [None if text == "none" else {} if text == "empty" else one for text, one in zip(solution_strs, results)]

def short(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]
"""


def test_a_function_of_the_reward_manager_batch_is_called_once_for_all_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BATCHED)

    def score(*texts: str, **arguments: Any) -> list[Trajectory]:
        use = {
            "use": "turnwise.compat.verl:CustomBatchScore",
            "arguments": {"path": f"{tmp_path}/mine.py", **arguments},
        }
        tree = {"model": {"path": "m"}, "data": {"train": "d.parquet"}, "reward": {"batch": [use]}}
        trajectories = [held(text) if text != "untold" else held(text, reward_model=None) for text in texts]
        groups = [Group(id=str(n), row=one.row, trajectories=[one]) for n, one in enumerate(trajectories)]
        asyncio.run(scorer(Config.model_validate(tree)).score(groups))
        return trajectories

    scored = score("a", "bbbbb", arguments={"bonus": 0.5})
    assert [one.reward for one in scored] == [-1.5, 2.5]
    assert [one.metrics for one in scored] == [{"length": 1.0}, {"length": 5.0}]
    good, none, empty, untold = score("aaaa", "none", "empty", "untold")
    assert good.reward == pytest.approx(4 - 13 / 3)
    messages = [one.error.message if one.error else "" for one in (none, empty, untold)]
    assert "'compute_score' gave None; a reward must be a number" in messages[0]
    assert "compute_score returned a mapping without `score`: []" in messages[1]
    assert "has no reward_model.ground_truth" in messages[2]
    wrong = score("a", "b", name="short")[0].error
    assert wrong is not None
    assert "short returned [1.0] for 2 trajectories; it must return a list with a number" in wrong.message
    (tmp_path / "other.py").write_text("def compute_score(solution_str): return 1.0\n")
    with pytest.raises(
        ConfigError, match="takes no argument 'data_sources'; it is called with data_sources, solution_strs"
    ):
        CustomBatchScore(f"{tmp_path}/other.py")
