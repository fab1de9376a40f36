"""verl's agent loops: programs that lead a conversation with token ids, unchanged, token for token in the record."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.conversations import CUE, RENDERER, STOP, Says, a_row, a_table, call, spoken
from turnwise.compat.verl import Conversations, verl_names
from turnwise.errors import ConfigError
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Row, Stop, Trajectory

PLUGINS = Path(__file__).parent / "plugins"
OPENING = f"<|im_start|>user\nHi<|im_end|>\n{CUE}"
MORE = f"\n<|im_start|>user\nmore<|im_end|>\n{CUE}"
LOOPS = [
    "Messages",
    "Short",
    "Untrained",
    "Lies",
    "LiesOfLogprobs",
    "Raw",
    "Compressed",
    "Together",
    "Calls",
    "Fails",
    "Greedy",
]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGINS))
    with verl_names():
        module = importlib.import_module("verl_loops")
    module.SEEN.clear()
    return module


def agents_file(tmp_path: Path, more: str = "") -> str:
    path = tmp_path / "agents.yaml"
    path.write_text("".join(f"- name: {name}\n  _target_: verl_loops.{name}\n" for name in LOOPS) + more)
    return str(path)


def lead(
    setup: Conversations, agent: str | None, *turns: Any, limits: Limits | None = None, **fields: Any
) -> Trajectory:
    """One conversation that an agent loop leads, through the rollout loop."""
    import asyncio

    row = a_row(**fields) if agent is None else a_row(agent_name=agent, **fields)
    return asyncio.run(_lead(setup, row, Says(*turns), limits))


async def _lead(setup: Conversations, row: Row, engine: Says, limits: Limits | None) -> Trajectory:
    context = setup.use_context(a_table(engine, setup.make, limits=limits))
    group = new_group(row, size=1, seed=0)
    await rollout_groups([group], context)
    return group.trajectories[0]


def test_a_registered_loop_of_one_turn(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=str(PLUGINS / "verl_loops.py"))
    assert "once" in setup.agents
    trajectory = lead(setup, "once", "Yo.", extra_info={"index": 7, "tools_kwargs": {"t": {}}}, answer="42")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    assert spoken(trajectory.segments[0]) == [(-1, OPENING), (0, "Yo.<|im_end|>")]
    assert trajectory.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo."}]
    assert trajectory.turns[0].reward == 1.5
    info = trajectory.turns[0].info["agent"]
    assert (info["num_turns"], info["reward_score"], info["extra_fields"]["note"]) == (2, 1.5, "kept")
    assert trajectory.metrics["agent/unreturned_tokens"] == 0.0


def test_what_run_receives(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path, "- {name: mine, _target_: verl_loops.Once, bonus: 0.25}\n"))
    trajectory = lead(setup, "mine", "Yo.", extra_info={"index": 7, "tools_kwargs": {"t": {}}}, answer="42")
    assert trajectory.turns[0].reward == 1.75  # the entry's other keys are arguments of the class
    ((params, fields),) = loops.SEEN
    assert params == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert fields["raw_prompt"] == [{"role": "user", "content": "Hi"}]
    assert (fields["answer"], fields["index"], fields["tools_kwargs"]) == ("42", 7, {"t": {}})
    assert "agent_name" not in fields


def test_several_turns_with_the_helpers_of_the_base_class(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Messages", "a", "stop")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    (segment,) = trajectory.segments
    assert spoken(segment) == [(-1, OPENING), (0, "a<|im_end|>"), (-1, MORE), (1, "stop<|im_end|>")]
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "more", "stop"]
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert list(segment.logprobs)[-5:] == [-0.125, -0.25, -0.375, -0.5, -0.625]
    assert trajectory.metrics["agent/extended"] == 1.0


def test_tokens_that_the_loop_does_not_return_are_not_trained_on(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    short = lead(setup, "Short", "abcdefg", "stop")
    assert spoken(short.segments[0])[1] == (0, "abcdef")  # the rest of this turn and the second turn are context
    assert short.metrics["agent/unreturned_tokens"] == 2.0 + 5.0
    assert all(turn < 1 for turn in short.segments[0].turn)
    assert short.assistant_texts == ["abcdefg", "stop"]  # they are recorded as they were sampled

    untrained = lead(setup, "Untrained", "ab", "stop")
    assert spoken(untrained.segments[0])[-1] == (1, "stop<|im_end|>")
    assert 0 not in untrained.segments[0].turn


def test_tokens_that_the_model_did_not_sample_are_refused(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    lies = lead(setup, "Lies", "stop")
    assert lies.error is not None
    assert "with the mask 1, and the model did not sample it there" in lies.error.message
    of_logprobs = lead(setup, "LiesOfLogprobs", "stop")
    assert of_logprobs.error is not None
    assert "returned the log-probability 0 of token 0" in of_logprobs.error.message


def test_prompts_that_the_loop_writes_itself(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Raw", "first", "secondX", "thirds")
    assert trajectory.error is None
    one, two = trajectory.segments
    assert spoken(one) == [(-1, f"{OPENING}first<|im_end|>")]  # recorded, and not trained on: it was not returned
    assert spoken(two) == [(-1, OPENING), (1, "second"), (-1, f"?<|im_end|>\n{CUE}"), (2, "thi")]
    assert trajectory.turns[1].kept_tokens == 6
    assert (
        trajectory.turns[2].finish_reason == "length"
    )  # of the loop's own max_tokens, which does not end the conversation
    assert trajectory.stop is Stop.DONE
    assert (
        trajectory.metrics["agent/unreturned_tokens"] == 6.0
    )  # those that were left out of the prompt are in no segment
    assert [name for name in ("forked", "realigned") if trajectory.metrics[f"agent/{name}"] == 1.0] == [
        "forked",
        "realigned",
    ]


def test_several_outputs_of_one_conversation(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Compressed", "a", "b")
    assert trajectory.error is None
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, OPENING), (0, "a<|im_end|>")],
        [(-1, f"<|im_start|>user\nSummary<|im_end|>\n{CUE}"), (1, "b<|im_end|>")],
    ]
    assert [message["content"] for message in trajectory.previous_histories[0]] == ["Hi", "a"]
    assert [message["content"] for message in trajectory.messages] == ["Summary", "b"]


def test_calls_at_the_same_time_and_a_temperature_of_the_loop(
    loops: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    trajectory = lead(setup, "Together", "a", "b")
    assert trajectory.error is None
    assert [spoken(segment)[-1][1] for segment in trajectory.segments] == [f"{OPENING}a<|im_end|>", "b<|im_end|>"]
    assert trajectory.metrics["agent/forced"] == 2.0  # the recipe's temperature was used, and it is counted


def test_a_loop_with_tools_and_a_parser(loops: ModuleType, tmp_path: Path) -> None:
    functions = tmp_path / "functions_of_the_loop.py"
    functions.write_text(
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@function_tool('multiply_them')\n"
        "def multiply(a: int, b: int) -> int:\n"
        '    """Multiply.\n\n    Args:\n        a: One.\n        b: Two.\n    """\n    return a * b\n'
    )
    setup = Conversations(agent_loops=agents_file(tmp_path), function_tools=str(functions))
    trajectory = lead(setup, "Calls", call("multiply_them", '{"a": 6, "b": 7}'), "42")
    assert trajectory.error is None
    assert trajectory.messages[-2:] == [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "42"}]
    answer = "user<tool_response>\n42\n</tool_response>"  # as this template writes tool messages
    assert spoken(trajectory.segments[0])[2] == (-1, f"\n<|im_start|>{answer}<|im_end|>\n{CUE}")
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["multiply_them"]
    assert trajectory.turns[0].calls[0].arguments == {"a": 6, "b": 7}


def test_a_turn_that_a_limit_cuts_reaches_the_loop(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=str(PLUGINS / "verl_loops.py"))
    trajectory = lead(setup, "once", "abcdefgh", limits=Limits(tokens_per_turn=4))
    assert (trajectory.stop, trajectory.error) == (Stop.LENGTH, None)
    assert trajectory.turns[0].reward == 1.5  # the loop computed its reward of the cut turn
    assert spoken(trajectory.segments[0])[-1] == (0, "abcd")

    several = Conversations(agent_loops=agents_file(tmp_path))
    over = lead(several, "Messages", "a", "b", "c", limits=Limits(turns=2))
    assert (over.stop, over.error, over.assistant_texts) == (Stop.MAX_TURNS, None, ["a", "b"])
    assert "reached a limit of the recipe" in over.turns[-1].info["agent"]["ended"]
    assert (
        sum(turn >= 0 for turn in over.segments[0].turn) == 4
    )  # nothing was returned, so all sampled tokens are trained on


def test_a_loop_that_fails_fails_its_conversation_only(loops: ModuleType, tmp_path: Path) -> None:
    setup = Conversations(agent_loops=agents_file(tmp_path))
    failed = lead(setup, "Fails", "a")
    assert failed.error is not None
    assert "the game server is gone" in failed.error.message
    greedy = lead(setup, "Greedy", "a")
    assert greedy.error is not None
    assert "'best_of'" in greedy.error.message
    assert lead(setup, "Messages", "stop").error is None


def test_the_column_agent_name(loops: ModuleType, tmp_path: Path) -> None:
    functions = tmp_path / "functions_of_rows.py"
    functions.write_text(
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@function_tool\ndef shout(text: str) -> str:\n"
        '    """Shout.\n\n    Args:\n        text: What.\n    """\n    return text.upper()\n'
    )
    setup = Conversations(agent_loops=agents_file(tmp_path), function_tools=str(functions))
    tools = lead(setup, "tool_agent", call("shout", '{"text": "a"}'), "done")
    assert [message["role"] for message in tools.messages] == ["user", "assistant", "tool", "assistant"]
    assert tools.messages[2]["content"] == "A"
    without = lead(setup, None, call("shout", '{"text": "a"}'), "done")
    assert len(without.turns) == 2  # the tools, as before
    single = lead(setup, "single_turn_agent", call("shout", '{"text": "a"}'))
    assert (len(single.turns), list(single.tools), single.stop) == (1, [], Stop.DONE)
    unknown = lead(setup, "Message", "a")
    assert unknown.error is not None
    assert unknown.error.kind == "row"
    assert "agent_name='Message'; did you mean 'Messages'?" in unknown.error.message

    default = Conversations(agent_loops=agents_file(tmp_path), default_agent="Messages")
    assert lead(default, None, "stop").metrics["agent/unreturned_tokens"] == 0.0


def test_what_is_wrong_with_the_files_is_said_at_the_start(loops: ModuleType, tmp_path: Path) -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            Conversations(**options)
        return str(caught.value)

    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("- {name: a, _target_: verl_loops.Nothing}\n")
    assert "Nothing" in refused(agent_loops=str(wrong))
    wrong.write_text("name: a\n")
    assert "must contain a list" in refused(agent_loops=str(wrong))
    wrong.write_text("- {_target_: verl_loops.Once}\n")
    assert "must be a mapping with name and _target_" in refused(agent_loops=str(wrong))
    assert "default_agent='Once'" in refused(agent_loops=agents_file(tmp_path), default_agent="Once")
    assert "config has no effect without agent_loops" in refused(function_tools="x.py", config={})
    unused = tmp_path / "no_functions.py"
    unused.write_text("def f(a: int) -> int:\n    return a\n")
    assert "registers no function" in refused(function_tools=str(unused))


def test_recipes_tools_and_agent_loops_exclude_each_other(loops: ModuleType, tmp_path: Path) -> None:
    from turnwise.environments.tools.toolbox import Tools

    def add(a: int) -> int:
        """Add one.

        Args:
            a: A number.
        """
        return a + 1

    from turnwise.environments.tools.tool import Tool

    setup = Conversations(agent_loops=agents_file(tmp_path))
    setup.use_context(a_table(Says("stop")))
    import asyncio

    async def run() -> Trajectory:
        context = a_table(
            Says("stop"), lambda: setup.make(lambda tools, then: Tools([Tool.of(add), *tools], then=then))
        )
        group = new_group(a_row(agent_name="Messages"), size=1, seed=0)
        await rollout_groups([group], context)
        return group.trajectories[0]

    error = asyncio.run(run()).error
    assert error is not None
    assert "cannot be offered by the agent loop 'Messages'" in error.message
    assert STOP in RENDERER.stop_token_ids
    assert "verl_loops" in sys.modules


def test_a_parser_of_the_user_reads_the_calls_of_all_turns(loops: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "parser_of_the_user.py").write_text(
        "import json\n"
        "from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser\n"
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@ToolParser.register('words')\n"
        "class Words(ToolParser):\n"
        "    async def extract_tool_calls(self, responses_ids, tools=None):\n"
        "        text = self.tokenizer.decode(responses_ids)\n"
        "        head, found, name = text.partition('CALL ')\n"
        "        if not found:\n            return text, []\n"
        "        arguments = 'broken' if 'bad' in name else json.dumps({'text': 'x'})\n"
        "        return head, [FunctionCall(name=name.split()[0], arguments=arguments)]\n\n\n"
        "@function_tool('repeat_it')\ndef repeat(text: str) -> str:\n"
        '    """Repeat.\n\n    Args:\n        text: What.\n    """\n    return text * 2\n'
    )
    place = str(tmp_path / "parser_of_the_user.py")
    setup = Conversations(function_tools=place, tool_parser=f"{place}:Words")
    trajectory = lead(setup, None, "Well. CALL repeat_it", "CALL repeat_it bad", "done")
    assert trajectory.error is None
    assert [turn.message["content"] for turn in trajectory.turns] == ["Well. ", "", "done"]
    answers = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert answers[0] == "xx"
    assert "invalid JSON in the arguments" in str(trajectory.messages)  # the model is told
    with pytest.raises(ConfigError, match="has no method extract_tool_calls"):
        Conversations(function_tools=place, tool_parser="verl_loops.Once")
