"""verl's reward functions, and verl's names, which are ours only while code of a user runs."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from compat.verl.verl_files import a_tool, an_interaction, no_verl_left, set_up, user_module
from support.conversations import a_row, call, hold
from turnwise.assembly import scorer
from turnwise.compat.verl import (
    BaseInteraction,
    BaseTool,
    CustomBatchScore,
    CustomScore,
    ToolResponse,
    data_source_score,
    helpers,
    verl_names,
)
from turnwise.compat.verl.helpers import compute_score, extract_solution
from turnwise.compat.verl.names import NAMES
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


def graded(trajectory: Trajectory) -> float:
    columns = trajectory.row.fields
    return data_source_score(trajectory, columns["data_source"], columns["reward_model"])


def test_the_data_source_chooses_the_grader() -> None:
    assert graded(held("#### 72")) == 1.0
    assert graded(held("#### 71")) == 0.0
    with pytest.raises(ValueError, match="has the data_source 'other', for which turnwise has no grader"):
        graded(held("#### 72", data_source="other"))
    with pytest.raises(ValueError, match=r"has no reward_model\.ground_truth"):
        graded(held("#### 72", reward_model=None))


def test_data_without_the_columns_of_the_grader_are_refused_before_the_first_step() -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"train": "d.jsonl"},
        "reward": {"trajectory": ["turnwise.compat.verl:data_source_score"]},
    }
    grader = scorer(Config.model_validate(tree))
    grader.refuse_unknown_columns([a_row(data_source="openai/gsm8k", reward_model={"ground_truth": "72"})])
    with pytest.raises(ConfigError, match=r"'data_source', which is neither .*: data\.columns\.data_source=<column>"):
        grader.refuse_unknown_columns([a_row(reward_model={"ground_truth": "72"})])
    with pytest.raises(ConfigError, match="'reward_model', which is neither"):
        grader.refuse_unknown_columns([a_row(data_source="openai/gsm8k")])


def test_a_tool_that_says_the_answer_earns_nothing() -> None:
    one = held(call("calculator", '{"expression": "8 * 9"}'), "there it is")
    assert [message["content"] for message in one.messages if message["role"] == "tool"] == ["72"]
    assert graded(one) == 0.0


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


# verl's names: ours while code of a user runs, gone afterwards, and enough for verl's own tests


# verl's names: ours while a file of a user is loaded or his method runs, and gone afterwards.


def test_the_names_are_there_inside_and_nowhere_else() -> None:
    with verl_names():
        base = importlib.import_module("verl.interactions.base")
        tool = importlib.import_module("verl.tools.base_tool")
        from verl.tools import schemas  # type: ignore[import-not-found]
        from verl.utils.reward_score import gsm8k  # type: ignore[import-not-found]
    assert (base.BaseInteraction, tool.BaseTool, schemas.ToolResponse) == (BaseInteraction, BaseTool, ToolResponse)
    assert gsm8k.compute_score("#### 72", "72") == 1.0
    assert no_verl_left()
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl'"):
        importlib.import_module("verl.interactions.base")


def test_every_module_of_the_list_can_be_imported() -> None:
    with verl_names():
        for name, places in NAMES.items():
            module = importlib.import_module(name)
            assert all(getattr(module, place.rpartition(":")[2]) is not None for place in places)
    assert no_verl_left()


def test_what_we_do_not_have_says_what_there_is() -> None:
    with verl_names(), pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("verl.interactions.bose")
    assert "verl is not installed here, and turnwise has no module of its own for verl.interactions.bose" in str(
        raised.value
    )
    assert "did you mean 'verl.interactions.base'?" in str(raised.value)


def test_the_inner_of_two_takes_nothing_away() -> None:
    with verl_names():
        with verl_names():
            pass
        importlib.import_module("verl.tools.schemas")
    assert no_verl_left()


def test_an_error_inside_leaves_nothing_behind() -> None:
    before = list(sys.meta_path)
    with pytest.raises(ModuleNotFoundError), verl_names():
        importlib.import_module("verl.tools.nothing")
    assert no_verl_left()
    assert sys.meta_path == before


def test_another_verl_is_there_again_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a verl installed: names of the list are ours inside, others are its own, and outside all is its own."""
    for name, text in {
        "verl/__init__.py": "where = 'installed'",
        "verl/interactions/__init__.py": "",
        "verl/interactions/base.py": "BaseInteraction = 'installed'",
        "verl/interactions/other.py": "from verl.interactions.base import BaseInteraction as seen",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    outside = importlib.import_module("verl.interactions.base")
    try:
        with verl_names():
            inside = importlib.import_module("verl.interactions.base")
            other = importlib.import_module("verl.interactions.other")
        assert inside.BaseInteraction is BaseInteraction
        assert other.seen is BaseInteraction
        assert importlib.import_module("verl.interactions.base") is outside
        assert outside.BaseInteraction == "installed"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]


def test_a_schema_keeps_what_verl_drops() -> None:
    with verl_names():
        from verl.tools.schemas import OpenAIFunctionToolSchema  # type: ignore[import-not-found]
    parameters = {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "place": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["words"],
    }
    given = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    assert OpenAIFunctionToolSchema.model_validate(given).model_dump(exclude_unset=True) == given


def test_the_arguments_of_a_call_are_read_and_what_is_no_mapping_is_reported() -> None:
    with verl_names():
        from verl.tools.schemas import (  # type: ignore[import-not-found]
            OpenAIFunctionCallSchema,
            OpenAIFunctionParsedSchema,
        )
    for text, expected in [('{"a": 1}', ({"a": 1}, False)), ("[1]", ({}, True)), ("{", ({}, True))]:
        parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
        call, wrong = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
        assert (call.arguments, wrong) == expected


def test_a_response_is_read_as_verl_reads_it() -> None:
    assert ToolResponse().is_empty()
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=[1]).is_text_only()
    with pytest.raises(ValueError, match="image must be a list, got a str"):
        ToolResponse(image="x")  # type: ignore[arg-type]


def test_an_option_that_a_shipped_class_does_not_have_is_refused() -> None:
    with verl_names():
        from verl.interactions.gsm8k_interaction import Gsm8kInteraction  # type: ignore[import-not-found]
    with pytest.raises(ConfigError, match="no option 'grade'; did you mean 'grader'"):
        Gsm8kInteraction({"grade": "strict"})


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A verl of somebody's own, installed: its packages define names, and it has modules that turnwise does not have."""
    for name, text in {
        "verl/__init__.py": "__version__ = 'fork'\nimport verl_needs\nfrom .protocol import DataProto\n",
        "verl/protocol.py": "class DataProto: pass",
        "verl/utils/__init__.py": "from .own import counted\nfrom . import own as again",
        "verl/utils/own.py": "import counter\ncounter.runs.append('own')\ncounted = []",
        "verl/tools/__init__.py": "",
        "verl/tools/schemas.py": "from verl.tools.base_tool import BaseTool\nclass Extra: base = BaseTool\nToolResponse = 'fork'",
        "verl_needs.py": "",
        "counter.py": "runs = []",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verl", "verl_needs", "counter")]:
        del sys.modules[name]


def test_what_the_installed_verl_has_itself_is_there_inside(fork: Path) -> None:
    with verl_names():
        import verl  # type: ignore[import-not-found]
        from verl import DataProto  # type: ignore[import-not-found]
        from verl.tools.schemas import Extra  # type: ignore[import-not-found]
        from verl.utils import again, counted  # type: ignore[import-not-found]

        assert verl.__version__ == "fork"
        assert verl.protocol.DataProto is DataProto  # a module that nobody has imported by name
        assert again.counted is counted
        assert Extra.base is BaseTool  # what it imports of ours is ours
        assert importlib.import_module("verl.tools.schemas").ToolResponse is ToolResponse
    assert no_verl_left()


def test_a_module_of_the_installed_verl_is_executed_once(fork: Path) -> None:
    import counter  # type: ignore[import-not-found]

    found = []
    for number in range(3):
        with verl_names():
            from verl.utils.own import counted  # type: ignore[import-not-found]

            counted.append(number)
            found.append(counted)
    assert found[0] is found[1] is found[2]
    assert (found[0], counter.runs) == ([0, 1, 2], ["own"])


def test_a_module_that_was_imported_outside_is_the_same_one_inside(fork: Path) -> None:
    outside = importlib.import_module("verl.utils.own")
    with verl_names():
        assert importlib.import_module("verl.utils.own") is outside
    assert importlib.import_module("verl.utils.own") is outside
    assert importlib.import_module("verl").__version__ == "fork"


def test_a_verl_that_cannot_be_imported_hides_none_of_our_names(fork: Path) -> None:
    (fork / "verl_needs.py").unlink()
    with verl_names():
        assert importlib.import_module("verl.tools.base_tool").BaseTool is BaseTool
        with pytest.raises(ModuleNotFoundError, match="No module named 'verl_needs'"):
            from verl import DataProto  # type: ignore[import-not-found]  # noqa: F401


def test_another_verl_is_read_where_another_one_is_installed(
    fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with verl_names():
        assert importlib.import_module("verl.utils.own").counted == []
    (tmp_path / "other" / "verl" / "utils").mkdir(parents=True)
    (tmp_path / "other" / "verl" / "utils" / "own.py").write_text("counted = 'other'")
    (tmp_path / "other" / "verl" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    with verl_names():
        assert importlib.import_module("verl.utils.own").counted == "other"


def test_what_replaces_a_lent_function_is_seen_by_the_classes_that_use_it() -> None:
    with verl_names():
        from verl.interactions.gsm8k_interaction import Gsm8kInteraction  # type: ignore[import-not-found]

        made = Gsm8kInteraction({})
        asyncio.run(made.start_interaction("i", ground_truth="7"))
        with patch("verl.utils.reward_score.gsm8k.compute_score", return_value=0.25) as replaced:
            assert asyncio.run(made.calculate_score("i")) == 0.25
        replaced.assert_called_once_with("", "7", method="strict", format_score=0.0, score=1.0)
        assert asyncio.run(made.calculate_score("i")) == 0.0
        assert importlib.import_module("verl.utils.reward_score.gsm8k").compute_score is helpers.compute_score


def test_a_name_that_a_lent_module_does_not_have_says_what_it_has() -> None:
    with verl_names(), pytest.raises(AttributeError) as raised:
        importlib.import_module("verl.tools.schemas").ToolRespons  # noqa: B018
    assert "verl.tools.schemas has no 'ToolRespons' here; did you mean 'ToolResponse'?" in str(raised.value)


def test_all_names_of_a_module_can_be_imported_at_once() -> None:
    space: dict[str, object] = {}
    with verl_names():
        exec("from verl.tools.schemas import *", space)
    assert space["ToolResponse"] is ToolResponse


# verl's own tests of interactions, registries and base tools, unchanged, on our classes.


CHECKOUT = os.environ.get("TURNWISE_VERL")

TESTS = Path(__file__).parents[2]

LAST_USER = {
    "test_generate_response_correct_answer_with_prefix",
    "test_generate_response_correct_answer_without_prefix",
    "test_generate_response_incorrect_answer",
    "test_generate_response_multiple_messages",
    "test_generate_response_no_user_message",
    "test_calculate_score_direct_call",
    "test_calculate_score_with_kwargs",
    "test_edge_case_empty_messages",
    "test_edge_case_message_without_content",
}
"""Of v0.4 and v0.5, whose GSM8K interaction grades the last message of the user: a mistake that v0.6 corrected, and ours with
`last_user: true`."""


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="TURNWISE_VERL names no checkout of verl")
@pytest.mark.skipif(find_spec("omegaconf") is None, reason="verl's tests need omegaconf")
def test_verl_s_own_tests_pass(tmp_path: Path) -> None:
    assert CHECKOUT is not None
    folders = [name for name in ("interactions", "tools") if (Path(CHECKOUT) / "tests" / name).is_dir()]
    assert folders, f"{CHECKOUT} has neither tests/interactions nor tests/tools"
    for name in folders:  # away from the checkout, whose own modules would stand in the working directory
        shutil.copytree(Path(CHECKOUT) / "tests" / name, tmp_path / "tests" / name)
    command = [sys.executable, "-m", "pytest", "-p", "support.verl_peer", "-q", "-rf", "-W", "ignore", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    failed = set(re.findall(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE))
    assert re.search(r"^\d+ passed|, \d+ passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "error" not in done.stdout.splitlines()[-1], done.stdout
    assert failed <= LAST_USER, done.stdout
