"""verl's tools in the loop, and those that ask a service: instances, what a call may give, when it is released."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compat.verl.verl_files import PLUGINS, a_tool, an_interaction, names, schema, set_up, user_module
from support.conversations import Says, a_row, a_table, call, hold, hold_all
from support.servers import Answer, serving
from turnwise.compat.verl import verl_names
from turnwise.errors import ConfigError
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout
from turnwise.types import Row, Stop

# verl's tools in the loop: one instance for each conversation, what a call may give, and when it is released.


SERVER = str(Path(__file__).parents[2] / "support" / "mcp_server.py")


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return user_module(monkeypatch)


def row(**kinds: Any) -> Row:
    return a_row(extra_info={"tools_kwargs": {"count": kinds}} if kinds else {})


def tool_texts(one: Any) -> list[str]:
    """What the tools said."""
    return [message["content"] for message in one.messages if message["role"] == "tool"]


def test_a_conversation_has_one_instance_and_its_state_lasts(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()])
    one = hold([call("count"), call("count", '{"by": 5}'), "done"], made, row=row(create_kwargs={"start": 10}))
    assert tool_texts(one) == ["11", "16"]  # the loop of verl's last versions says 11 and 15: an instance for each call
    assert names(user) == ["create", "execute", "execute", "calc_reward", "release"]
    assert len({event[1] for event in user.EVENTS}) == 1
    assert [turn.reward for turn in one.turns] == [0.125, 0.125, 16.0]
    assert [turn.info for turn in one.turns] == [
        {"count": {"count": 11}},
        {"count": {"count": 16}},
        {"calc_reward": {"count": 16.0}},
    ]
    assert one.stop is Stop.DONE


def test_each_method_is_handed_its_own_keywords(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()])
    kinds = {
        "create_kwargs": {"start": 1, "more": "c"},
        "execute_kwargs": {"e": 2},
        "calc_reward_kwargs": {"r": 3},
        "release_kwargs": None,
    }
    hold([call("count"), "done"], made, row=row(**kinds))
    create, execute, calc_reward, release = user.EVENTS
    id = create[1]
    # one by one, as up to v0.6, and under the one name of later versions
    assert create == ("create", id, 1, {"more": "c", "create_kwargs": {"start": 1, "more": "c"}})
    assert execute == ("execute", id, {}, {"e": 2})
    assert calc_reward == ("calc_reward", id, {"r": 3})
    assert release == ("release", id, {})


def test_conversations_of_one_tool_do_not_meet(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()])
    held = hold_all(Says(call("count"), call("count"), "done"), made, row=row(), size=4)
    assert [tool_texts(one) for one in held] == [["1", "2"]] * 4
    assert len({event[1] for event in user.EVENTS}) == 4


def test_tools_and_an_interaction_share_the_conversation_and_its_id(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()], interactions=[an_interaction(over_after=2)])
    one = hold([call("count"), "done"], made, row=row())
    assert len({event[1] for event in user.EVENTS}) == 1
    (heard,) = [event[2] for event in user.EVENTS if event[0] == "respond"]
    assert [message["role"] for message in heard] == ["user", "assistant", "tool", "assistant"]
    assert (heard[2]["content"], heard[3]["content"]) == ("1", "done")
    assert [turn.reward for turn in one.turns] == [0.125, 0.25 + 1.0]


def test_what_create_says_is_on_the_table_before_the_model_speaks(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool(welcome="I count.")])
    one = hold(["done"], made, row=row())
    assert [(message["role"], message["content"]) for message in one.messages[:2]] == [
        ("user", "Hi"),
        ("tool", "I count."),
    ]


def test_a_row_may_offer_some_tools_only(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool(), a_tool("OldTool", "old", "")])
    one = hold(["done"], made, row=a_row(extra_info={"tool_selection": ["old"]}))
    assert [tool["function"]["name"] for tool in one.tools] == ["old"]
    assert names(user) == ["old release"]


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"tools_kwargs": {"count": {"create_kwarg": {}}}}, "has a key 'create_kwarg'; did you mean 'create_kwargs'?"),
        ({"tools_kwargs": {"count": {"create_kwargs": [1]}}}, "create_kwargs must be a mapping; it is [1]"),
        ({"tools_kwargs": "x"}, "tools_kwargs must be a mapping; it is 'x'"),
        ({"tool_selection": ["other"]}, "tool_selection names a tool 'other'"),
        ({"need_tools_kwargs": True}, "need_tools_kwargs is set, and the row has no tools_kwargs"),
        ("x", "extra_info must be a mapping; it is 'x'"),
    ],
)
def test_a_row_that_asks_for_what_is_not_there_breaks_alone(
    info: Any, problem: str, user: ModuleType, tmp_path: Path
) -> None:
    one = hold(["done"], set_up(tmp_path, tools=[a_tool()]), row=a_row(extra_info=info))
    assert one.error is not None
    assert (one.error.kind, problem in one.error.message) == ("row", True)
    assert user.EVENTS == []


def test_keywords_for_an_interaction_that_is_not_there_are_reported_once(
    user: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = set_up(tmp_path, tools=[a_tool()])
    null = a_row(extra_info={"interaction_kwargs": {"name": None}})  # as in parquet, where another row has it
    asks = a_row(extra_info={"interaction_kwargs": {"name": "nobody_reads_this", "query": "x"}})
    with caplog.at_level(logging.WARNING):
        assert hold(["done"], made, row=null).error is None
        assert caplog.messages == []
        assert [hold(["done"], made, row=asks).error for _ in range(2)] == [None, None]
    (message,) = caplog.messages
    assert message.startswith(
        "rows have interaction_kwargs (name: 'nobody_reads_this'), and no interaction file is given"
    )


def test_the_tools_of_all_generations_are_called_as_they_were_written(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool("OldTool", "old", ""), a_tool("NewTool", "new", "")])
    asked = a_row(extra_info={"tools_kwargs": {"new": {"create_kwargs": {"a": 1}}}})
    one = hold([call("old") + call("new"), "done"], made, row=asked)
    assert tool_texts(one) == ["plain text", "new"]
    assert user.EVENTS == [("new create", {"a": 1}), ("old release",)]
    assert [turn.reward for turn in one.turns] == [0.5, 0.0]


def test_a_tool_that_raises_tells_the_model_and_the_conversation_goes_on(user: ModuleType, tmp_path: Path) -> None:
    one = hold([call("count"), "done"], set_up(tmp_path, tools=[a_tool(breaks_at="execute")]), row=row())
    assert tool_texts(one) == ["Error: RuntimeError: broken at execute"]
    assert [outcome.error for outcome in one.turns[0].outcomes] == ["raised"]
    assert names(user) == ["create", "execute", "calc_reward", "release"]


def test_a_tool_that_cannot_be_created_breaks_its_conversation_and_releases_the_others(
    user: ModuleType, tmp_path: Path
) -> None:
    made = set_up(tmp_path, tools=[a_tool("OldTool", "old", ""), a_tool(breaks_at="create")])
    one = hold(["done"], made, row=row())
    assert one.error is not None
    assert (one.error.kind, one.error.message) == ("environment", "RuntimeError: broken at create")
    assert names(user) == ["create", "old release"]


def test_a_reward_that_breaks_breaks_the_conversation_and_no_zero_stands_in(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool(breaks_at="calc_reward")])
    one = hold([call("count"), "done"], made, row=row())
    assert one.error is not None
    assert one.error.message == "RuntimeError: broken at calc_reward"
    assert names(user) == ["create", "execute", "calc_reward", "release"]


def test_a_release_that_breaks_is_reported_and_the_conversation_is_whole(
    user: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        one = hold(["done"], set_up(tmp_path, tools=[a_tool(breaks_at="release")]), row=row())
    assert (one.error, one.stop) == (None, Stop.DONE)
    assert "RuntimeError: broken at release" in caplog.text
    assert names(user).count("release") == 1


def test_the_reward_of_a_conversation_that_a_limit_ends_goes_to_its_last_turn(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()])
    one = hold([call("count")] * 3, made, row=row(), limits=Limits(turns=2, tokens_per_turn=99))
    assert one.stop is Stop.MAX_TURNS
    assert names(user) == ["create", "execute", "execute", "calc_reward", "release"]
    assert [turn.reward for turn in one.turns] == [0.125, 0.125 + 2.0]
    user.EVENTS.clear()
    broken = set_up(tmp_path, tools=[a_tool(breaks_at="calc_reward")])
    other = hold([call("count")], broken, row=row(), limits=Limits(turns=1, tokens_per_turn=99))
    assert other.stop is Stop.ERROR  # what it was worth is unknown, and no zero stands in for that
    assert other.error is not None
    assert "RuntimeError: broken at calc_reward" in other.error.message
    assert names(user) == ["create", "execute", "calc_reward", "release"]
    user.EVENTS.clear()
    cut = hold(["on and on"], made, row=row(), limits=Limits(turns=2, tokens_per_turn=4))
    assert (cut.stop, cut.error, [turn.reward for turn in cut.turns]) == (Stop.LENGTH, None, [0.0])
    assert names(user) == ["create", "calc_reward", "release"]


def test_a_cancelled_conversation_releases_once(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()], interactions=[an_interaction(hangs_at="respond")])

    async def run() -> None:
        task = asyncio.create_task(rollout(new_group(row(), size=1, seed=0).trajectories[0], a_table(Says("a"), made)))
        while "respond" not in names(user):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [names(user).count(one) for one in ("create", "release", "start", "finalize")] == [1, 1, 1, 1]


def test_a_deadline_and_a_broken_model_release_once(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()], interactions=[an_interaction(hangs_at="respond")])
    limits = Limits(turns=3, tokens_per_turn=99, seconds_per_turn=0.1)
    assert hold(["a"], made, row=row(), limits=limits).stop is Stop.DEADLINE
    assert [names(user).count(one) for one in ("create", "release", "start", "finalize")] == [1, 1, 1, 1]
    user.EVENTS.clear()
    broken = hold(Says(call("count"), RuntimeError("no memory")), made, row=row())
    assert (broken.stop, broken.reward) == (Stop.ERROR, None)
    assert [names(user).count(one) for one in ("create", "release", "start", "finalize")] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("print", "printed"),
        ("exit", "Error: the code tried to exit the process (status 7)"),
        ("bytes", "café \N{REPLACEMENT CHARACTER}"),
        (
            "nothing",
            "Error: TypeError: UnrulyTool.execute returned nothing; it must return (response, reward, metrics)",
        ),
        ("four", "Error: TypeError: UnrulyTool.execute returned 4 values; it must return (response, reward, metrics)"),
        ("metrics", "Error: TypeError: UnrulyTool.execute returned the metrics [1]; they must be a mapping"),
        ("nan", "Error: TypeError: the reward of the call is nan, which is not a finite number"),
    ],
)
def test_an_unruly_tool_is_reported_to_the_model(what: str, answer: str, user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool("UnrulyTool", "unruly", "what")])
    one = hold([call("unruly", json.dumps({"what": what})), "done"], made)
    assert tool_texts(one) == [answer]
    assert one.stop is Stop.DONE


def test_ten_megabytes_are_cut(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool("UnrulyTool", "unruly", "what")])
    one = hold([call("unruly", '{"what": "megabytes"}')], made, limits=Limits(turns=1, tokens_per_turn=99))
    (text,) = tool_texts(one)
    assert 900_000 < len(text) < 1_100_000
    assert (one.stop, one.error) == (Stop.MAX_TURNS, None)


def test_a_tool_that_hangs_is_left_behind(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool("UnrulyTool", "unruly", "what", seconds=3)], tool_timeout=0.1)
    one = hold([call("unruly", '{"what": "hang"}'), "done"], made)
    assert tool_texts(one) == ["Error: unruly took longer than 0.1 s"]
    assert one.stop is Stop.DONE


@pytest.mark.slow
def test_os_exit_is_the_end_of_the_process_and_nothing_can_be_done(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(PLUGINS)!r}]\n"
        "from pathlib import Path\n"
        "from compat.verl.verl_files import a_tool, set_up\n"
        "from support.conversations import call, hold\n"
        f"made = set_up(Path({str(tmp_path)!r}), tools=[a_tool('UnrulyTool', 'unruly', 'what')])\n"
        "hold([call('unruly', '{\"what\": \"end\"}'), 'done'], made)\n"
        "print('survived')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (9, b"")


def test_the_shipped_gsm8k_tool_charges_for_an_answer_that_is_no_better(tmp_path: Path) -> None:
    entry = {**a_tool(), "class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}}
    entry["tool_schema"]["function"] |= {
        "name": "calc_gsm8k_reward",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    }
    made = set_up(tmp_path, tools=[entry])
    kinds = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}
    ask = [call("calc_gsm8k_reward", f'{{"answer": "{answer}"}}') for answer in ("70", "72", "72")]
    one = hold([*ask, "#### 72"], made, row=a_row(extra_info={"need_tools_kwargs": True, "tools_kwargs": kinds}))
    assert tool_texts(one) == [
        f"Current parsed answer='{a}' reward={r}" for a, r in (("70", 0.0), ("72", 1.0), ("72", 1.0))
    ]
    assert [turn.reward for turn in one.turns] == [-0.05, 0.0, -0.05, 1.0]


def test_the_shipped_gsm8k_tool_needs_the_answer_only_where_it_is_called(tmp_path: Path) -> None:
    entry = {**a_tool(), "class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}}
    entry["tool_schema"]["function"] |= {"name": "calc_gsm8k_reward"}
    entry["tool_schema"]["function"]["parameters"]["properties"] = {"answer": {"type": "string"}}
    made = set_up(tmp_path, tools=[entry])
    never = hold(["#### 72"], made, row=a_row())
    assert never.error is None
    assert [turn.reward for turn in never.turns] == [0.0]
    called = hold([call("calc_gsm8k_reward", '{"answer": "72"}'), "#### 72"], made, row=a_row())
    assert "needs the answer: tools_kwargs.<tool>.create_kwargs.ground_truth" in tool_texts(called)[0]
    assert called.error is not None
    assert "Gsm8kTool needs the answer" in called.error.message


def test_the_shipped_geo3k_tool_compares_formulas(tmp_path: Path) -> None:
    entry = {**a_tool(), "class_name": "verl.tools.geo3k_tool.Geo3kTool", "config": {"type": "native"}}
    entry["tool_schema"]["function"] |= {"name": "calc_geo3k_reward"}
    entry["tool_schema"]["function"]["parameters"]["properties"] = {"answer": {"type": "string"}}
    made = set_up(tmp_path, tools=[entry])
    kinds = {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": "2 \\sqrt { 5 }"}}}
    ask = [call("calc_geo3k_reward", f'{{"answer": "{answer}"}}') for answer in ("10", "2\\\\sqrt{5}")]
    one = hold([*ask, "done"], made, row=a_row(extra_info={"tools_kwargs": kinds}))
    assert [text.rpartition("reward=")[2] for text in tool_texts(one)] == ["0.0", "1.0"]
    assert [turn.reward for turn in one.turns] == [-0.05, 0.0, 1.0]  # the last is calc_reward


def test_the_shipped_zoom_tool_cuts_a_part_of_the_image() -> None:
    from PIL import Image

    from turnwise.compat.verl.shipped import ImageZoomInTool

    schema = {"type": "function", "function": {"name": "image_zoom_in_tool", "parameters": {"type": "object"}}}
    from turnwise.compat.verl import OpenAIFunctionToolSchema

    tool = ImageZoomInTool({"num_workers": 20}, OpenAIFunctionToolSchema.model_validate(schema))
    picture = Image.new("RGB", (200, 100), "red")
    picture.paste("blue", (100, 0, 200, 100))

    async def zoom(*box: float) -> Any:
        name, _ = await tool.create(create_kwargs={"image": picture})
        try:
            return await tool.execute(name, {"bbox_2d": list(box), "label": "it"})
        finally:
            await tool.release(name)

    response, reward, info = asyncio.run(zoom(100, 0, 160, 300))
    assert (response.image[0].size, response.image[0].getcolors(), reward) == ((60, 100), [(6000, (0, 0, 255))], 0.0)
    assert response.text == "Zoomed in on the image to the region [100, 0, 160, 300] with label it."
    assert info == {"success": True}
    small, _, _ = asyncio.run(zoom(195, 95, 199, 99))  # enlarged, inside the image
    assert small.image[0].size == (28, 28)
    wrong, reward, info = asyncio.run(zoom(50, 50, 40, 60))
    assert (reward, info, wrong.image) == (-0.05, {"success": False}, None)
    assert tool._instance_dict == {}


@pytest.mark.parametrize("returned", ["id, None, {}", "(id,)", ""])
def test_create_with_another_number_of_values_names_the_class(returned: str, tmp_path: Path) -> None:
    (tmp_path / "threefold.py").write_text(
        "from verl.tools.base_tool import BaseTool\n"
        "class ThreefoldTool(BaseTool):\n"
        "    async def create(self, id=None, **kwargs):\n"
        f"        return ({returned})\n"
        "    async def execute(self, id, parameters, **kwargs):\n"
        "        return 'ok', 0.0, {}\n"
    )
    entry = {**a_tool(), "class_name": f"{tmp_path}/threefold.py:ThreefoldTool"}
    one = hold(["a"], set_up(tmp_path, tools=[entry]), row=a_row())
    assert one.error is not None
    assert "ThreefoldTool.create returned (" in one.error.message
    assert "it must return the instance_id, or (instance_id, ToolResponse)" in one.error.message


MCP = {"mcpServers": {"here": {"command": sys.executable, "args": [SERVER, "stdio"]}}}


async def held_with_a_server(made: Any) -> Any:
    trajectory = new_group(a_row(), size=1, seed=0).trajectories[0]
    try:
        return await rollout(trajectory, a_table(Says(call("add", '{"a": 3, "b": 4}'), "done"), made))
    finally:
        await made.aclose()


@pytest.mark.slow
def test_tools_of_an_mcp_server_are_those_that_the_file_selects(tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(json.dumps(MCP))
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"rate_limit": 120, "timeout": 20, "type": "mcp"},
        # beside the tool file, where there is none in the working directory
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["add"]},
    }
    one = asyncio.run(held_with_a_server(set_up(tmp_path, tools=[entry])))
    assert [tool["function"]["name"] for tool in one.tools] == ["add"]
    assert tool_texts(one) == ["7"]


@pytest.mark.slow
def test_a_subclass_reads_the_results_of_a_server_in_its_own_way(tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(json.dumps(MCP))
    (tmp_path / "own.py").write_text(
        "from verl.tools.mcp_base_tool import MCPBaseTool\n"
        "class Own(MCPBaseTool):\n"
        "    def __init__(self, config, tool_schema):\n"
        "        super().__init__(config, tool_schema)\n"
        "    def _parse_tool_result(self, content):\n"
        "        return f'<{content[0].text}>', {'parts': len(content)}\n"
    )
    options = {"mcp_servers_config_path": str(tmp_path / "servers.json"), "tool_selected_list": {}}
    entry = {"class_name": f"{tmp_path}/own.py:Own", "config": {"type": "mcp"}, "mcp": options}
    one = asyncio.run(held_with_a_server(set_up(tmp_path, tools=[entry])))
    assert "visit" in [tool["function"]["name"] for tool in one.tools]  # an empty selection is all of them
    assert tool_texts(one) == ["<7>"]
    assert one.turns[0].info == {"add": {"parts": 1}}


def test_a_tool_is_handed_its_conversation_as_of_v0_7(user: ModuleType, tmp_path: Path) -> None:
    user.SEEN.clear()
    made = set_up(
        tmp_path,
        tools=[a_tool("SessionTool", "session", "what")],
        interactions=[an_interaction()],
    )
    kinds = {"session": {"create_kwargs": {"a": 1}}}
    said = [call("session"), "hm", call("session", '{"what": "tokens"}'), "done"]
    limits = Limits(turns=4, tokens_per_turn=99)
    one = hold(said, made, row=a_row(extra_info={"tools_kwargs": kinds}), limits=limits)
    first, second = user.SEEN
    assert first["roles"] == ["user", "assistant"]
    assert second["roles"] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert first["request_id"] == second["request_id"]
    assert (first["turns"], second["turns"]) == ((0, 1), (2, 3))
    assert second["calls"] == [("session", '{"what": "tokens"}')]
    assert (first["rewards"], second["rewards"], second["scores"]) == ([], [0.5], [0.25])
    assert first["ids"] == one.turns[0].completion.token_ids.__len__()  # type: ignore[union-attr]
    assert (second["kwargs"], second["images"]) == ({"session": {"create_kwargs": {"a": 1}}}, None)
    assert tool_texts(one) == [
        "call 1",
        "Error: AttributeError: agent_data.prompt_ids: tools see the messages of a conversation, not its tokens; the tokens of "
        "the last turn are agent_data.response_ids",
    ]
    assert one.messages[0]["content"] == "Hi"  # what a tool does to its copy is not heard of


def test_the_extra_fields_of_two_conversations_do_not_meet(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool("SessionTool", "session", "what")])
    held = hold_all(Says(call("session"), call("session"), "done"), made, size=3)
    assert [tool_texts(one) for one in held] == [["call 1", "call 2"]] * 3


def test_keywords_for_a_tool_that_is_not_there_are_not_used_and_reported_once(
    user: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = set_up(tmp_path, tools=[a_tool()])
    info = {"need_tools_kwargs": True, "tools_kwargs": {"cuont": {"create_kwargs": {"start": 3}}, "count": None}}
    with caplog.at_level(logging.WARNING):
        held = hold_all(Says(call("count"), "done"), made, row=a_row(extra_info=info), size=3)
    assert [(one.error, tool_texts(one)) for one in held] == [(None, ["1"])] * 3
    assert caplog.text.count("rows have tools_kwargs for a tool 'cuont'; did you mean 'count'?") == 1


def test_rewards_may_be_recorded_only_as_in_verl_s_trainer(user: ModuleType, tmp_path: Path) -> None:
    made = set_up(tmp_path, tools=[a_tool()], interactions=[an_interaction(over_after=2)], rewards="record")
    one = hold([call("count"), "done"], made, row=row())
    assert [turn.reward for turn in one.turns] == [0.0, 0.0]
    assert [outcome.reward for outcome in one.turns[0].outcomes] == [0.125]
    assert one.turns[0].info == {"reward": 0.125, "count": {"count": 1}}
    assert one.turns[1].info["calc_reward"] == {"count": 1.0}
    assert one.turns[1].info["turn_score"] == 0.25
    cut = hold([call("count")], made, row=row(), limits=Limits(turns=1, tokens_per_turn=99))
    assert [turn.reward for turn in cut.turns] == [0.0]
    assert cut.turns[0].info["calc_reward"] == {"count": 1.0}
    with pytest.raises(ConfigError, match="rewards='nothing'; there are add and record"):
        set_up(tmp_path, tools=[a_tool()], rewards="nothing")
    with pytest.raises(ConfigError, match="rewards=record has no effect on then="):
        set_up(tmp_path, tools=[a_tool()], rewards="record", then="turnwise.environments.environment:SingleTurn")


VENDORED = '''
"""verl's base classes and schemas, copied into somebody's project; nothing is imported from verl."""
from pydantic import BaseModel

class ToolResponse(BaseModel):
    text: str | None = None
    image: list | None = None
    video: list | None = None

class Function(BaseModel):
    name: str
    description: str
    parameters: dict

class ToolSchema(BaseModel):
    type: str
    function: Function

class BaseTool:
    def __init__(self, config, tool_schema):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name
    def get_openai_tool_schema(self):
        return self.tool_schema
    async def create(self, instance_id=None, **kwargs):
        return instance_id, ToolResponse()
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="base"), 0.0, {}
    async def calc_reward(self, instance_id, **kwargs):
        return 0.0
    async def release(self, instance_id, **kwargs):
        pass

class Idle(BaseTool):
    pass

class Own(BaseTool):
    def get_openai_tool_schema(self):
        parameters = {"type": "object", "properties": {}}
        return ToolSchema(type="function", function=Function(name="own", description="Own.", parameters=parameters))
    async def create(self, instance_id=None, **kwargs):
        return instance_id, ToolResponse(text="welcome")
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="own"), 0.5, {"k": 1}
    async def calc_reward(self, instance_id, **kwargs):
        return self.config["worth"]

class BaseInteraction:
    def __init__(self, config):
        self.config, self.name = config, config.get("name")
    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "base", 0.8, {}
    async def calculate_score(self):
        return 0.0
    async def finalize_interaction(self):
        pass

class Answers(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "fine", 0.25, {}

class Remote(BaseTool):
    async def _call_tool(self, instance_id, parameters):
        raise RuntimeError("the client of verl was never started")
    async def execute(self, instance_id, parameters, **kwargs):
        text, metadata = await self._call_tool(instance_id, parameters)
        return ToolResponse(text=text), 0.0, metadata
    def _parse_tool_result(self, content):
        return f"<{content[0].text}>", {"parts": len(content)}
'''


def test_copies_of_verl_s_base_classes_are_read_by_their_shape(tmp_path: Path) -> None:
    (tmp_path / "vendored.py").write_text(VENDORED)

    def own(worth: Any) -> dict[str, Any]:
        return {"class_name": f"{tmp_path}/vendored.py:Own", "config": {"worth": worth}}

    answers = {"class_name": f"{tmp_path}/vendored.py:Answers", "config": {}}
    one = hold([call("own"), "done"], set_up(tmp_path, tools=[own(2.0)], interactions=[answers]))
    assert [tool["function"]["name"] for tool in one.tools] == ["own"]
    assert tool_texts(one) == ["welcome", "own"]
    assert [turn.reward for turn in one.turns] == [0.5, 0.25 + 2.0]
    assert one.turns[0].info == {"own": {"k": 1}}
    assert "calculate_score" not in one.turns[1].info  # that of the base class is nobody's own
    for worth, counts in (([1.0, 0.5], 1.5), (["a text"], 0.0), ([], 0.0)):
        assert hold(["done"], set_up(tmp_path, tools=[own(worth)])).turns[0].reward == counts
    idle = {"class_name": f"{tmp_path}/vendored.py:Idle", "config": {}, "tool_schema": a_tool()["tool_schema"]}
    with pytest.raises(ConfigError, match="Idle does not define execute"):
        set_up(tmp_path, tools=[idle])


@pytest.mark.slow
def test_a_copy_of_verl_s_mcp_tool_asks_our_servers(tmp_path: Path) -> None:
    (tmp_path / "vendored.py").write_text(VENDORED)
    (tmp_path / "servers.json").write_text(json.dumps(MCP))
    options = {"mcp_servers_config_path": str(tmp_path / "servers.json"), "tool_selected_list": ["add"]}
    entry = {"class_name": f"{tmp_path}/vendored.py:Remote", "config": {"type": "mcp"}, "mcp": options}
    one = asyncio.run(held_with_a_server(set_up(tmp_path, tools=[entry])))
    assert tool_texts(one) == ["<7>"]
    assert one.turns[0].info == {"add": {"api_request_error": None, "parts": 1}}


# verl's tools that ask a service, and subclasses of them as users write them, against real servers on this machine.


SUBCLASSES = '''
from verl.tools.sandbox_fusion_tools import PoolMode, SandboxFusionTool, init_execution_pool
from verl.tools.schemas import ToolResponse
from verl.tools.search_tool import SearchTool


class Printing(SandboxFusionTool):
    """Prints the last line, as a recipe of verl's does, and runs the program in the pool itself."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.own = config["own"]

    async def execute(self, instance_id, parameters, **kwargs):
        code = f"print({parameters['code']})"
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        self._instance_dict[instance_id]["reward"].append(result.text)
        return result, None, None

    async def calc_reward(self, instance_id, **kwargs):
        return float(len(self._instance_dict[instance_id]["reward"])) + self.own


class Filtered(SearchTool):
    def execute_search(self, instance_id, query_list, retrieval_service_url, topk, timeout):
        text, metadata = super().execute_search(instance_id, query_list, retrieval_service_url, topk, timeout)
        return text.replace("Bern", "BERN"), {**metadata, "status": "filtered"}


class Pooled(SearchTool):
    """Makes a pool of its own for a sync function."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.pool = init_execution_pool(2, enable_global_rate_limit=False, mode=PoolMode.ThreadMode)

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=await self.pool.execute.remote(self.blocking, parameters["query_list"])), 0.0, {}

    def blocking(self, queries):
        if not queries:
            raise ValueError("no query")
        return f"{queries[0]} at {self.topk} of {self.retrieval_service_url.partition(':')[0]} in {self.timeout}"
'''

FOUND = {"result": [[{"document": {"contents": "Bern\nIn Switzerland."}, "score": 1.0}]]}

RAN = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "3\n", "stderr": ""}}


def entry(kind: str, name: str, parameter: str, type_: str, **config: Any) -> dict[str, Any]:
    tool = schema(name, **{parameter: type_})
    if type_ == "array":
        tool["function"]["parameters"]["properties"][parameter]["items"] = {"type": "string"}
    return {"class_name": kind, "config": {"type": "native", **config}, "tool_schema": tool}


def answered(folder: Path, tool: dict[str, Any], arguments: Any, answer: Any, url: str, **more: Any) -> Any:
    """A conversation with one call, and what the service was asked."""
    (folder / "own.py").write_text(SUBCLASSES)
    with serving(lambda question, number: Answer(answer, **more)) as server:
        tool["config"][url] = server.url
        made = set_up(folder, tools=[tool])
        one = hold([call(tool["tool_schema"]["function"]["name"], json.dumps(arguments)), "done"], made)
    (said,) = [message["content"] for message in one.messages if message["role"] == "tool"]
    return one, said, server


def test_a_search_result_is_formatted_as_in_verl(tmp_path: Path) -> None:
    tool = entry("verl.tools.search_tool.SearchTool", "search", "query_list", "array", topk=1)
    one, said, server = answered(tmp_path, tool, {"query_list": ["bern"]}, FOUND, "retrieval_service_url")
    assert json.loads(said) == {"result": "Doc 1 (Title: Bern)\nIn Switzerland."}
    assert server.asked == [{"queries": ["bern"], "topk": 1, "return_scores": True}]
    metrics = {"query_count": 1, "status": "success", "total_results": 1, "api_request_error": None}
    assert one.turns[0].info == {"search": metrics}
    assert one.turns[1].info == {"calc_reward": {"search": 0.0}}


def test_a_subclass_may_override_the_search(tmp_path: Path) -> None:
    tool = entry(f"{tmp_path}/own.py:Filtered", "search", "query_list", "array")
    one, said, _ = answered(tmp_path, tool, {"query_list": ["bern"]}, FOUND, "retrieval_service_url")
    assert json.loads(said) == {"result": "Doc 1 (Title: BERN)\nIn Switzerland."}
    assert one.turns[0].info["search"]["status"] == "filtered"


def test_a_service_that_refuses_is_an_error_of_the_call(tmp_path: Path) -> None:
    tool = entry("verl.tools.search_tool.SearchTool", "search", "query_list", "array")
    one, said, _ = answered(tmp_path, tool, {"query_list": ["a"]}, "no", "retrieval_service_url", status=404)
    assert "returned the status 404" in said
    assert [outcome.error for outcome in one.turns[0].outcomes] == ["raised"]
    one, said, _ = answered(tmp_path, tool, {"query_list": []}, FOUND, "retrieval_service_url")
    assert said == "Error: query_list must be a list of texts; it is []"


def test_a_subclass_has_the_attributes_and_the_pool_of_verl_s(tmp_path: Path) -> None:
    tool = entry(f"{tmp_path}/own.py:Pooled", "search", "query_list", "array", timeout=7)
    _, said, _ = answered(tmp_path, tool, {"query_list": ["bern"]}, FOUND, "retrieval_service_url")
    assert said == "bern at 3 of http in 7"
    _, said, _ = answered(tmp_path, tool, {"query_list": []}, FOUND, "retrieval_service_url")
    assert said == "Error: no query"  # verl's pool gives None for whatever raises


def test_a_program_is_run_in_the_language_and_time_of_the_call(tmp_path: Path) -> None:
    tool = entry(
        "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "code_interpreter", "code", "string", default_timeout=5
    )
    tool["tool_schema"]["function"]["parameters"]["properties"]["language"] = {"type": "string"}
    arguments = {"code": "puts 3", "language": "ruby"}
    one, said, server = answered(tmp_path, tool, arguments, RAN, "sandbox_fusion_url")
    assert said == "3"
    (asked,) = server.asked
    assert {name: asked[name] for name in ("code", "language", "run_timeout", "memory_limit_MB")} == {
        "code": "puts 3",
        "language": "ruby",
        "run_timeout": 5.0,
        "memory_limit_MB": 1024,
    }
    assert one.turns[0].reward == 0.0


def test_a_subclass_of_the_sandbox_runs_programs_in_the_pool(tmp_path: Path) -> None:
    tool = entry(f"{tmp_path}/own.py:Printing", "code_interpreter", "code", "string", own=0.5)
    one, said, server = answered(tmp_path, tool, {"code": "1 + 2"}, RAN, "sandbox_fusion_url")
    assert (said, server.asked[0]["code"], server.asked[0]["language"]) == ("3", "print(1 + 2)", "python")
    assert one.turns[-1].reward == 1.0 + 0.5


def test_the_search_helper_tells_of_a_service_that_is_not_there() -> None:
    with verl_names():
        from verl.tools.utils.search_r1_like_utils import perform_single_search_batch  # type: ignore[import-not-found]
    with serving(lambda question, number: Answer("no", status=400)) as server:
        text, metadata = perform_single_search_batch(server.url, ["a", "b"], topk=1, timeout=2)
    assert json.loads(text)["result"].startswith("Search error: the service")
    assert (metadata["status"], metadata["query_count"], metadata["total_results"]) == ("api_error", 2, 0)
    with serving(lambda question, number: Answer({"result": [[]]})) as server:
        text, metadata = perform_single_search_batch(server.url, ["a"])
    assert (json.loads(text), metadata["status"]) == ({"result": "No documents were found."}, "no_results")


def test_a_pool_has_threads_only() -> None:
    with verl_names():
        from verl.tools.sandbox_fusion_tools import PoolMode, init_execution_pool  # type: ignore[import-not-found]
    with pytest.raises(NotImplementedError, match=r"mode=PoolMode\.ThreadMode"):
        init_execution_pool(1, mode=PoolMode.ProcessMode)
