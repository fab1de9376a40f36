"""verifiers through the loop: its classic environments, with the messages, states and rewards of its own runner."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

pytest.importorskip("verifiers.legacy", reason="needs an environment of its own with 'turnwise[verifiers]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

LIMITS = Limits(turns=8, tokens_per_turn=400)
ENVIRONMENTS = '''
import random
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {n} and {n + 1}?", "answer": str(2 * n + 1)} for n in range(3)]

def right(completion, answer, **more):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(str(answer) in said[-1])

def short(completion):
    return 1 / (1 + len(completion[-1]["content"]))

def length(completion):
    return float(len(completion))

def rubric():
    return vf.Rubric(funcs=[right, short, length], weights=[1.0, 0.3, 0.0])

def data(rows=3):
    return Dataset.from_list(ROWS[:rows])

def single(rows=3, **more):
    return vf.SingleTurnEnv(dataset=data(rows), eval_dataset=data(1), system_prompt="Add.", rubric=rubric(), **more)

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state, **more):
        state["left"] = 3
        return state

    async def env_response(self, messages, state, **more):
        state["left"] -= 1
        if str(state["answer"]) in messages[-1]["content"]:
            state["final_env_response"] = [{"role": "user", "content": "Right!"}]
        return [{"role": "user", "content": f"Wrong. {state['left']} left."}]

def left(state):
    return float(state["left"])

def guess():
    rubric = vf.Rubric(funcs=[right, left], weights=[1.0, 0.1])
    return Guess(dataset=data(), rubric=rubric, max_turns=3)

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)

def tools():
    return vf.ToolEnv(tools=[add, fail], dataset=data(), rubric=rubric(), max_turns=4)

class Counting(vf.StatefulToolEnv):
    def __init__(self, **more):
        super().__init__(**more)
        self.add_tool(self.count, args_to_skip=["counted"])

    async def count(self, step: int, counted: list) -> str:
        """Count on.

        Args:
            step: By how many.
        """
        counted.append(step)
        return str(sum(counted))

    async def setup_state(self, state, **more):
        state["counted"] = []
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **more):
        return {**tool_args, "counted": state["counted"]}

def total(state):
    return float(sum(state["counted"]))

def stateful():
    return Counting(tools=[], dataset=data(), rubric=vf.Rubric(funcs=[right, total], weights=[1.0, 0.01]), max_turns=4)

def group():
    return vf.EnvGroup(envs=[single(2), tools()], env_names=["single", "tools"])

def think():
    parser = vf.ThinkParser()
    def format(completion, answer):
        return float(parser.parse_answer(completion) == answer)
    return vf.SingleTurnEnv(dataset=data(), parser=parser, rubric=vf.Rubric(funcs=[format], parser=parser))

def judged():
    return vf.SingleTurnEnv(dataset=data(), rubric=vf.RubricGroup([rubric(), vf.Rubric(funcs=[left_of])]))

def left_of(prompt, state):
    return len(prompt) + len(state["trajectory"]) / 8

def example():
    few = [{"role": "user", "content": "1 and 1?"}, {"role": "assistant", "content": "2"}]
    return vf.SingleTurnEnv(dataset=data(), few_shot=few, system_prompt="Add.", rubric=rubric())

def xml():
    parser = vf.XMLParser(["reasoning", "answer"])
    def exact(completion, answer):
        return float(parser.parse_answer(completion) == answer)
    return vf.SingleTurnEnv(
        dataset=data(), rubric=vf.Rubric(funcs=[exact, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser)
    )

class Broken(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        raise vf.InfraError("the sandbox is gone")

def broken():
    return Broken(dataset=data(), rubric=rubric())

def compared():
    def best(completions):
        return [1.0 for _ in completions]
    return vf.SingleTurnEnv(dataset=data(), rubric=vf.Rubric(funcs=[best]))

def nothing():
    return "an environment"
'''
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
PLAYED = {
    "single": ["It is 1."],
    "guess": ["2", "3", "1"],
    "tools": [CALL.format("add", '{"a": 0, "b": 1}'), CALL.format("fail", '{"text": "no"}'), "It is 1."],
    "stateful": [CALL.format("count", '{"step": 2}'), CALL.format("count", '{"step": 5}'), "It is 1."],
    "group": ["It is 1."],
    "think": ["<think>Hm.</think>1"],
    "judged": ["1"],
    "example": ["1"],
    "xml": ["<reasoning>\nHm.\n</reasoning>\n<answer>\n1\n</answer>"],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "environments.py"
    path.write_text(ENVIRONMENTS, encoding="utf-8")
    return path


def recipe(use: str, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": use, "arguments": arguments}}, source="recipe")


def played(config: Config, *texts: str, row: int = 0, limits: Limits = LIMITS) -> Trajectory:
    rows = assembly.rows(config, limit=row + 1)
    return hold(Says(*texts, *["?"] * 9), assembly.environment_factory(config), row=rows[row], limits=limits)


def own_output(file: Path, name: str, texts: list[str], row: int = 0) -> dict[str, Any]:
    """The output of the library's own runner, with a client that says the texts."""
    import verifiers as vf
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    waiting = list(texts)

    class Says(Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
        ) -> Any:
            text, calls = waiting.pop(0), None
            if text.startswith("<tool_call>"):
                call = json.loads(text[len("<tool_call>") : -len("</tool_call>")])
                calls = [ToolCall(id="c", name=call["name"], arguments=json.dumps(call["arguments"]))]
                text = ""
            message = ResponseMessage(content=text, tool_calls=calls, finish_reason="stop", is_truncated=False)
            return Response(id="r", created=0, model=model, message=message)

        async def setup_client(self, *a: Any) -> Any: ...
        async def to_native_tool(self, *a: Any) -> Any: ...
        async def to_native_prompt(self, *a: Any) -> Any: ...
        async def get_native_response(self, *a: Any, **k: Any) -> Any: ...
        async def raise_from_native_response(self, *a: Any) -> None: ...
        async def from_native_response(self, *a: Any) -> Any: ...
        async def close(self) -> None: ...

    space: dict[str, Any] = {}
    exec(file.read_text(), space)
    environment: vf.Environment = space[name]()
    input_ = environment.get_dataset()[row]
    return dict(asyncio.run(environment.run_rollout(input_, Says(None), "m", {})))


@pytest.mark.parametrize("name", PLAYED)
def test_an_environment_has_the_messages_and_rewards_of_the_librarys_own_runner(file: Path, name: str) -> None:
    config = recipe(f"verifiers:{file}:{name}")
    trajectory = played(config, *PLAYED[name])
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    own = own_output(file, name, PLAYED[name])
    assert sum(turn.reward for turn in trajectory.turns) == pytest.approx(own["reward"], abs=1e-12)
    assert trajectory.turns[-1].info["agent"]["metrics"] == pytest.approx(own["metrics"])
    assert len(trajectory.turns) == len(PLAYED[name])
    assert len(trajectory.segments) == 1
    told = [(m["role"], m["content"]) for m in (*own["prompt"], *own["completion"]) if m["role"] != "assistant"]
    shown = [(m["role"], m["content"]) for m in trajectory.messages if m["role"] != "assistant"]
    assert shown == [pair for pair in told if pair != ("user", "Right!")]


def test_the_functions_of_the_rubric_are_parts_of_the_reward_and_the_state_is_shown(file: Path) -> None:
    config = recipe(f"verifiers:{file}:guess", state_columns=["left"])
    trajectory = played(config, "2", "1")
    assert trajectory.turns[-1].rewards == {"right": 1.0, "left": pytest.approx(0.1)}
    shown = trajectory.turns[-1].info["agent"]
    assert (shown["left"], shown["stop_condition"]) == (1, "has_final_env_response")
    assert shown["metrics"] == {"right": 1.0, "left": 1.0, "num_turns": 2.0}


def test_rows_are_those_of_the_data_sets_and_the_group_goes_by_them(file: Path) -> None:
    config = recipe(f"verifiers:{file}:group")
    rows = assembly.rows(config)
    assert [row["answer"] for row in rows] == ["1", "3", "1", "3", "5"]
    assert rows[0].messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "What is 0 and 1?"},
    ]
    assert not played(config, "1", row=1).turns[0].rewards["right"]
    assert [t.name for t in played(config, PLAYED["tools"][0], "3", row=2).turns[0].calls] == ["add"]
    one = checked(
        {
            "model": "m",
            "environment": {"use": f"verifiers:{file}:single", "arguments": {"arguments": {"rows": 2}}},
            "data": {"eval": "environment"},
        },
        source="recipe",
    )
    assert len(assembly.rows(one)) == 2
    assert len(assembly.rows(one, held_out=True)) == 1


def test_a_rollout_that_a_limit_ends_is_scored_with_what_there_is(file: Path) -> None:
    config = recipe(f"verifiers:{file}:guess")
    trajectory = played(config, "2", limits=Limits(turns=1, tokens_per_turn=400))
    assert (trajectory.stop, trajectory.error) == ("max_turns", None)
    assert trajectory.turns[0].rewards == {"right": 0.0, "left": pytest.approx(0.2)}
    assert trajectory.turns[0].info["agent"]["stop_condition"] == "prompt_too_long"
    config = recipe(f"verifiers:{file}:single")
    trajectory = played(config, "It is 1. " * 50, limits=Limits(turns=1, tokens_per_turn=8))
    assert (trajectory.stop, trajectory.turns[0].rewards["right"]) == ("length", 1.0)


def test_an_error_of_the_environment_fails_the_conversation_with_the_librarys_message(file: Path) -> None:
    trajectory = played(recipe(f"verifiers:{file}:broken"), "2")
    assert trajectory.error is not None
    assert "the sandbox is gone" in trajectory.error.message


def test_the_handlers_of_signals_stay_those_of_the_run(file: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assembly.environment_factory(recipe(f"verifiers:{file}:single"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "wordl",
            {},
            "wordl cannot be loaded: ValueError: Could not import 'wordl' environment.*No module named 'wordl'",
        ),
        ("{file}:singel", {}, "did you mean 'single'"),
        ("{file}:guess", {"arguments": {"row": 3}}, "row"),
        ("{file}:nothing", {}, "returned a str; it must return a verifiers.Environment"),
        ("{file}:compared", {}, r"compares the rollouts of a group \(best\)"),
        ("{file}:single", {"state_columns": "left"}, "state_columns is 'left'; it must be a list of names"),
    ],
)
def test_a_wrong_name_or_argument_is_told(file: Path, name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(f"verifiers:{name.format(file=file)}", **arguments))
