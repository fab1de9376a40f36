"""Inspect through the loop: its tasks, with the messages, turns and scores of its own `eval`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold, hold_all
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Row, Trajectory

inspect_ai = pytest.importorskip("inspect_ai", reason="needs an environment of its own with 'turnwise[inspect]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")

LIMITS = Limits(turns=8, tokens_per_turn=400)
TASKS = '''
from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, ModelAPI, ModelOutput, ModelUsage, modelapi
from inspect_ai.scorer import Score, accuracy, choice, exact, f1, includes, match, mean, model_graded_qa, pattern, scorer
from inspect_ai.solver import (
    basic_agent, generate, multiple_choice, prompt_template, solver, system_message, use_tools
)
from inspect_ai.tool import ToolError, tool

@modelapi(name="strict")
class Strict(ModelAPI):
    async def generate(self, input, tools, tool_choice, config):
        output = ModelOutput.from_content("strict", "GRADE: C" if "It is 1." in input[-1].text else "GRADE: I")
        output.usage = ModelUsage()
        return output

SUMS = [Sample(input=f"What is {n} and {n + 1}?", target=str(2 * n + 1)) for n in range(3)]

@tool
def add():
    async def execute(a: int, b: int):
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        if a < 0:
            raise ToolError("a is below 0")
        return a + b

    return execute

@scorer(metrics=[mean()])
def brevity():
    async def score(state, target):
        return Score(value=1 / (1 + len(state.output.completion)), answer=state.output.completion, explanation="short is good")

    return score

@scorer(metrics={"*": [mean()]})
def two():
    async def score(state, target):
        return Score(value={"turns": len(state.messages), "right": target.text in state.output.completion})

    return score

@scorer(metrics=[accuracy()])
def nothing():
    async def score(state, target):
        return None

    return score

@solver
def again():
    async def solve(state, generate):
        state = await generate(state)
        if state.target.text not in state.output.completion:
            state.messages.append(ChatMessageUser(content="That is wrong."))
            state = await generate(state)
        state.metadata["asked"] = len(state.messages)
        return state

    return solve

@task
def plain():
    return Task(dataset=SUMS, solver=[system_message("Add."), generate()], scorer=includes())

@task
def several():
    return Task(dataset=SUMS, scorer=[match(), brevity(), exact(), f1()])

@task
def dictionary():
    return Task(dataset=SUMS, scorer=two())

@task
def letters():
    return Task(
        dataset=[Sample(input="Which is a vowel?", choices=["b", "c", "e"], target="C")],
        solver=multiple_choice(), scorer=choice(),
    )

@task
def thoughts():
    template = prompt_template("{prompt} Answer with ANSWER: n")
    return Task(dataset=SUMS, solver=[template, generate()], scorer=pattern(r"ANSWER: (\\d+)"))

@task
def tools():
    return Task(dataset=SUMS, solver=[use_tools(add()), generate()], scorer=includes())

@task
def retry():
    return Task(dataset=SUMS, solver=again(), scorer=includes())

@task
def agent():
    return Task(dataset=SUMS, solver=react(tools=[add()]), scorer=includes())

@task
def basic():
    return Task(dataset=SUMS, solver=basic_agent(tools=[add()], max_attempts=2), scorer=includes())

@task
def conversation():
    messages = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="What is 1 and 2?")]
    return Task(dataset=[Sample(input=messages, target="3")], scorer=includes(), message_limit=8)

@task
def timed():
    return Task(dataset=SUMS, scorer=includes(), time_limit=1)

@task
def timed_later():
    return Task(dataset=SUMS, solver=again(), scorer=includes(), time_limit=3)

@task
def approved():
    from inspect_ai.approval import ApprovalPolicy, auto_approver
    return Task(dataset=SUMS, scorer=includes(), approval=[ApprovalPolicy(auto_approver("reject"), "*")])

@task
def working():
    return Task(dataset=SUMS, scorer=includes(), working_limit=10)

@task
def graded():
    return Task(dataset=SUMS, scorer=model_graded_qa())

@task
def boxed():
    return Task(dataset=SUMS, scorer=includes(), sandbox="local")

@task
def unscored():
    return Task(dataset=SUMS)

@task
def silent():
    return Task(dataset=SUMS, scorer=nothing())

@task
def broken(when="scorer"):
    @solver
    def fails():
        async def solve(state, generate):
            raise RuntimeError("no such planet")

        return solve

    if when == "load":
        raise RuntimeError("no data here")
    return Task(dataset=SUMS, solver=fails(), scorer=includes())
'''


def submit(answer: str) -> str:
    return call("submit", json.dumps({"answer": answer}))


def add(a: int, b: int) -> str:
    return call("add", json.dumps({"a": a, "b": b}))


PLAYED: list[tuple[str, list[str]]] = [
    ("plain", ["It is 1."]),
    ("plain", ["It is 2."]),
    ("several", ["1"]),
    ("several", ["The sum is 1"]),
    ("dictionary", ["1"]),
    ("letters", ["ANSWER: C"]),
    ("letters", ["ANSWER: A"]),
    ("thoughts", ["I think.\nANSWER: 1"]),
    ("tools", [add(0, 1), "It is 1."]),
    ("tools", [add(-1, 1), add(0, 1), "It is 1."]),
    ("retry", ["5", "1"]),
    ("agent", [add(0, 1), "Now.", submit("1")]),
    ("basic", [submit("7"), submit("1")]),
    ("conversation", ["3"]),
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.py"
    path.write_text(TASKS, encoding="utf-8")
    return path


def recipe(name: str, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": f"inspect:{name}", "arguments": arguments}}, source="recipe")


def played(config: Config, *turns: str, row: int = 0, limits: Limits = LIMITS) -> Trajectory:
    environments = assembly.environment_factory(config)
    try:
        return hold(Says(*turns), environments, row=assembly.rows(config)[row], limits=limits)
    finally:
        asyncio.run(environments.aclose())


def own_eval(task: str, turns: list[str], log_dir: Path) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The scores of the first sample in the library's own `eval`, and its messages."""
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    outputs = []
    for text in turns:
        if text.startswith("<tool_call>"):
            called = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            outputs.append(ModelOutput.for_tool_call("mockllm/model", called["name"], called["arguments"], content=""))
        else:
            outputs.append(ModelOutput.from_content("mockllm/model", text))
    for output in outputs:
        output.usage = ModelUsage()  # else tokens are counted with data from a network
    model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
    (log,) = inspect_ai.eval(task, model=model, limit=1, log_dir=str(log_dir), display="none", log_samples=True)
    assert log.status == "success", log.error
    (sample,) = log.samples
    to_float = inspect_ai.scorer.value_to_float()
    scores: dict[str, float] = {}
    for name, score in sample.scores.items():
        if isinstance(score.value, dict):
            scores |= {f"{name}/{key}": to_float(value) for key, value in score.value.items()}
        else:
            scores[name] = to_float(score.value)
    texts = [
        (message.role, f"Error: {message.error.message}" if getattr(message, "error", None) else message.text)
        for message in sample.messages
    ]
    return scores, texts


@pytest.mark.parametrize(("name", "turns"), PLAYED)
def test_a_sample_has_the_messages_and_scores_of_the_librarys_own_eval(
    name: str, turns: list[str], tasks: Path, tmp_path: Path
) -> None:
    trajectory = played(recipe(f"{tasks}@{name}"), *turns)
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    expected, messages = own_eval(f"{tasks}@{name}", turns, tmp_path / "logs")
    assert trajectory.turns[-1].rewards == pytest.approx(expected)
    assert len(trajectory.turns) == len(turns)
    ours = [(message["role"], str(message["content"])) for message in trajectory.messages]
    # the agent `react` writes the answer that was submitted into its last message
    assert ours[:-1] == messages[: len(ours) - 1]
    assert sum(len(turn.completion.token_ids) for turn in trajectory.turns if turn.completion) > 0
    assert set(trajectory.turns[-1].info["agent"]["scores"]) == {name.partition("/")[0] for name in expected}


def test_rows_are_the_samples_and_conversations_run_at_the_same_time(tasks: Path) -> None:
    config = recipe(f"{tasks}@plain")
    rows = assembly.rows(config)
    assert [(row["sample"], row["sample_id"]) for row in rows] == [(0, 1), (1, 2), (2, 3)]
    environments = assembly.environment_factory(config)
    together = hold_all(Says("It is 3.", seconds=0.3), environments, row=rows[1], size=6, limits=LIMITS)
    assert [one.turns[0].rewards for one in together] == [{"includes": 1.0}] * 6
    asyncio.run(environments.aclose())
    held = assembly.rows(recipe(f"{tasks}@plain", eval_arguments={}), held_out=True)
    assert len(held) == 3


def test_a_limit_ends_the_solver_and_the_scorers_decide(tasks: Path) -> None:
    limits = Limits(turns=1, tokens_per_turn=400)
    trajectory = played(recipe(f"{tasks}@agent"), add(0, 1), limits=limits)
    assert trajectory.error is None, trajectory.error
    assert (trajectory.stop, trajectory.turns[0].rewards) == ("max_turns", {"includes": 0.0})


@pytest.mark.parametrize(("name", "turns"), [("timed", 1), ("timed_later", 2)])
def test_a_time_limit_of_the_task_ends_the_sample_and_the_scorers_decide(name: str, turns: int, tasks: Path) -> None:
    """Also if it is over while the model samples a turn, which is then the last one."""
    config = recipe(f"{tasks}@{name}")
    environments = assembly.environment_factory(config)
    engine = Says(*["It is 2."] * 3, seconds=2.0)
    trajectory = hold(engine, environments, row=assembly.rows(config)[0], limits=LIMITS)
    asyncio.run(environments.aclose())
    assert trajectory.error is None, trajectory.error
    assert [turn.rewards for turn in trajectory.turns] == [*[{}] * (turns - 1), {"includes": 0.0}]


@pytest.mark.parametrize(("name", "what"), [("approved", "an approval policy"), ("working", "a working_limit")])
def test_what_a_task_has_and_nothing_here_obeys_is_refused(name: str, what: str, tasks: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        assembly.environment_factory(recipe(f"{tasks}@{name}"))


def test_a_scorer_that_asks_the_model_itself_is_refused(tasks: Path) -> None:
    trajectory = played(recipe(f"{tasks}@graded"), "It is 1.", "GRADE: C")
    assert trajectory.error is not None
    assert (
        "a scorer asks the model that is trained: name another in environment.arguments.model_roles"
        in trajectory.error.message
    )
    assert len(trajectory.turns) == 1
    other = played(recipe(f"{tasks}@graded", model_roles={"grader": "strict/judge"}), "It is 1.")
    assert other.error is None, other.error
    assert other.turns[0].rewards == {"model_graded_qa": 1.0}


@pytest.mark.parametrize(
    ("name", "turns", "message"),
    [("broken", [], "failed: RuntimeError: no such planet"), ("silent", ["1"], "its scorers gave no score")],
)
def test_what_fails_in_a_sample_fails_its_conversation(name: str, turns: list[str], message: str, tasks: Path) -> None:
    trajectory = played(recipe(f"{tasks}@{name}"), *turns)
    assert trajectory.error is not None
    assert message in trajectory.error.message
    assert all(turn.rewards == {} for turn in trajectory.turns)


def test_a_row_without_its_sample_fails(tasks: Path) -> None:
    config = recipe(f"{tasks}@plain")
    row = Row(id="9", messages=[{"role": "user", "content": "x"}], fields={"sample": 3})
    trajectory = hold(Says("1"), assembly.environment_factory(config), row=row, limits=LIMITS)
    assert trajectory.error is not None
    assert "row '9' has sample=3; inspect:" in trajectory.error.message


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("tasks.py@plan", {}, r"tasks.py@plan names no task; did you mean 'plain'\?; its tasks are plain, several"),
        ("tasks.py", {}, r"names no task; its tasks are plain, .*: write inspect:.*tasks.py@TASK"),
        ("nowhere.py@plain", {}, "there is no file .*nowhere.py"),
        ("tasks.py@broken", {"arguments": {"when": "load"}}, "broken cannot be loaded: RuntimeError: no data here"),
        ("tasks.py@broken", {"arguments": {"size": 1}}, "broken has no parameter 'size'"),
        ("tasks.py@unscored", {}, "has no scorer"),
        ("tasks.py@boxed", {}, "needs a sandbox of Inspect"),
        ("tasks.py@plain", {"seconds_to_finish": -1}, "seconds_to_finish is -1"),
        ("tasks.py@plain", {"model_roles": {"grader": "mars/x"}}, "model_roles.grader: 'mars/x' cannot be used"),
    ],
)
def test_what_is_wrong_is_refused(name: str, arguments: dict[str, Any], message: str, tasks: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(str(tasks.parent / name), **arguments))


def test_a_name_of_no_package_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inspect:nowhere/gsm8k names no task"):
        assembly.environment_factory(recipe("nowhere/gsm8k"))
