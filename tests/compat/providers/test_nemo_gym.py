"""Resources servers of NeMo Gym through the loop: what goes wrong on a small server here, and ten servers of the package, in an
environment of its own, with the rewards of NeMo Gym's own agents."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from support.conversations import Says, call, hold, hold_all
from support.own_environment import interpreter, python_3_12
from turnwise import assembly
from turnwise.cli import main
from turnwise.compat.providers import nemo_gym
from turnwise.compat.providers.nemo_gym import NemoGym
from turnwise.compat.providers.provider import RESTARTS
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Row, Trajectory

LIMITS = Limits(turns=8, tokens_per_turn=4000)
AGENTS = Path(__file__).parents[2] / "support" / "peers" / "nemo_gym_agents.py"


def recipe(name: str, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": f"nemo_gym:{name}", "arguments": arguments}}, source="recipe")


def task(text: str = "Hi", tools: tuple[str, ...] = (), **columns: Any) -> dict[str, Any]:
    schemas = [{"type": "function", "name": one, "parameters": {"type": "object", "properties": {}}} for one in tools]
    return {"responses_create_params": {"input": [{"role": "user", "content": text}], "tools": schemas}, **columns}


def row_of(record: dict[str, Any]) -> Row:
    return Row(id="1", messages=[{"role": "user", "content": ""}], fields=record)


# a small server that is told how to misbehave

SEEN: list[tuple[str, Any]] = []


class Small:
    """Servers in one thread: `/verify` and `/step`, whose faults a row names."""

    def __init__(self, kind: str) -> None:
        async def answer(request: Request) -> Any:
            body = await request.json()
            route = request.url.path.strip("/")
            SEEN.append((route, body))
            fault = body.get("fault", "")
            if fault == f"hangs in {route}":
                await asyncio.sleep(2)
            if fault == f"fails in {route}":
                return JSONResponse("KeyError('board')", status_code=500)
            if fault == f"is no object in {route}":
                return JSONResponse([7])
            told = {"verify": {"reward": 1.0, "accuracy": True}, "step": {"reward": 1.0, "terminated": True}}
            reset = {"observation": "Go"}
            if fault.startswith("reward ") and route in told:
                return JSONResponse({"reward": None if fault == "reward None" else fault.split()[1]})
            return JSONResponse(told.get(route, reset if route == "reset" else {}))

        async def openapi(request: Request) -> Any:
            return JSONResponse({"paths": {f"/{route}": {} for route in routes}})

        async def boom(request: Request) -> Any:
            return JSONResponse({"detail": "no such city"}, status_code=422)

        routes = ["seed_session", "verify", "boom"] if kind == "verify" else ["reset", "step"]
        served = [Route(f"/{route}", boom if route == "boom" else answer, methods=["POST"]) for route in routes]
        app = Starlette(routes=[*served, Route("/openapi.json", openapi)])
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    small = {kind: Small(kind) for kind in ("verify", "step")}
    yield {kind: one.url for kind, one in small.items()}
    for one in small.values():
        one.stop()


def played(url: str, record: dict[str, Any], turns: list[str], **arguments: Any) -> Trajectory:
    return hold(
        Says(*turns, *["?"] * 8),
        assembly.environment_factory(recipe(url, **arguments)),
        row=row_of(record),
        limits=LIMITS,
    )


FAULTS = [
    ("verify", "fails in seed_session", r"/seed_session returned the status 500: .*KeyError\('board'\)"),
    ("verify", "is no object in seed_session", r"/seed_session returned the status 200: \[7\]"),
    ("verify", "hangs in seed_session", r"gave no answer within environment\.arguments\.seconds=0\.5"),
    ("verify", "fails in verify", r"/verify returned the status 500: .*KeyError\('board'\)"),
    ("verify", "reward None", "/verify gave the reward None; it must be a finite number"),
    ("verify", "reward much", "/verify gave the reward 'much'; it must be a finite number"),
    ("step", "fails in reset", "/reset returned the status 500"),
    ("step", "hangs in reset", r"gave no answer within environment\.arguments\.seconds=0\.5"),
    ("step", "is no object in step", r"/step returned the status 200: \[7\]"),
    ("step", "reward None", "/step gave the reward None; it must be a finite number"),
]


@pytest.mark.parametrize(("kind", "fault", "message"), FAULTS)
def test_a_fault_of_the_server_fails_its_conversation_with_a_message(
    servers: dict[str, str], kind: str, fault: str, message: str
) -> None:
    one = played(servers[kind], task(fault=fault), ["Hello"], seconds=0.5)
    assert one.error is not None
    assert re.search(message, one.error.message), one.error.message
    assert played(servers[kind], task(), ["Hello"]).turns[0].reward == 1.0


def test_what_the_server_says_of_a_call_and_of_the_end_is_recorded(servers: dict[str, str]) -> None:
    SEEN.clear()
    turns = [call("boom", '{"city": 1}'), call("verify"), "<tool_call>\n{broken\n</tool_call>", "Done."]
    one = played(servers["verify"], task(tools=("boom",), secret=5), turns)
    assert one.error is None, one.error
    assert [[outcome.error for outcome in turn.outcomes] for turn in one.turns] == [
        ["arguments"], ["unknown_tool"], ["malformed"], [],
    ]  # fmt: skip
    assert one.turns[0].outcomes[0].content == '{"detail":"no such city"}'
    assert one.turns[-1].rewards == {"environment": 1.0}
    assert one.turns[-1].info == {"accuracy": True}
    # the model's call of `verify` is no request; the calls that it may make are sent with the response
    assert [route for route, _ in SEEN] == ["seed_session", "verify"]
    kinds = [item["type"] for item in SEEN[-1][1]["response"]["output"]]
    assert kinds == [
        "function_call",
        "function_call_output",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert SEEN[-1][1]["secret"] == 5


def test_without_calls_to_the_server_a_turn_with_one_is_the_last(servers: dict[str, str]) -> None:
    SEEN.clear()
    turns = ["I ask. " + call("boom", '{"city": 1}'), "Done."]
    one = played(servers["verify"], task(tools=("boom",)), turns, execute_calls=False)
    assert one.error is None, one.error
    assert one.stop == "done"
    assert [(turn.outcomes, turn.rewards) for turn in one.turns] == [((), {"environment": 1.0})]
    assert [route for route, _ in SEEN] == ["seed_session", "verify"]
    assert [item["type"] for item in SEEN[-1][1]["response"]["output"]] == ["message", "function_call"]
    said_only = played(servers["verify"], task(tools=("boom",)), ["Done."], execute_calls=False)
    assert (said_only.stop, len(said_only.turns)) == ("done", 1)


def test_a_limit_ends_with_what_there_is(servers: dict[str, str]) -> None:
    record, limits = task(tools=("boom",)), Limits(turns=2, tokens_per_turn=4000)
    environments = assembly.environment_factory(recipe(servers["verify"]))
    one = hold(Says(*[call("boom")] * 3), environments, row=row_of(record), limits=limits)
    assert one.stop == "max_turns"
    assert one.turns[1].rewards == {"final_reward": 1.0}
    cut = Limits(turns=3, tokens_per_turn=5)
    for kind in ("verify", "step"):
        SEEN.clear()
        one = hold(
            Says("A long answer."), assembly.environment_factory(recipe(servers[kind])), row=row_of(task()), limits=cut
        )
        assert one.turns[0].rewards == {"final_reward": 1.0}
        assert SEEN[-1][1]["response"]["status"] == "incomplete"


def test_what_is_wrong_is_refused(servers: dict[str, str], tmp_path: Path) -> None:
    url = servers["step"]
    for name, arguments, message in (
        ("weather", {}, "nemo_gym:weather is no URL. Name a running resources server"),
        ("http://127.0.0.1:1", {}, r"does not list its routes \(GET /openapi.json\)"),
        (url, {"python": "python3.12"}, "arguments.python has no effect with the URL of a running server"),
        (url, {"config": {}}, "arguments.config has no effect with the URL"),
        (url, {"execute_calls": False}, "execute_calls has no effect on a server with /step"),
        (url, {"seconds": 0}, r"arguments\.seconds is 0; it must be a number above 0"),
        ("weather", {"python": str(tmp_path / "python")}, "python' does not run"),
        ("weather", {"python": "python3"}, "'python3' has no package nemo-gym"),
    ):
        with pytest.raises(ConfigError, match=message):
            assembly.environment_factory(recipe(name, **arguments))
    with pytest.raises(ConfigError, match=r"brings no rows: set data\.train to a file or data set of NeMo Gym's lines"):
        assembly.rows(recipe(url))
    for record, message in (
        ({}, "row '1' has responses_create_params=None; rows of nemo_gym are lines"),
        ({"responses_create_params": {"input": []}}, "responses_create_params of row '1': `input` must be"),
        ({"responses_create_params": {"input": "a", "n": 3}}, "n=3 is not supported"),
    ):
        one = played(url, record, ["a"])
        assert one.error is not None
        assert message in one.error.message


# servers of the package, with the rewards of its own agents

Item = dict[str, Any]


def said(text: str) -> Item:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}


def called(name: str, **arguments: Any) -> Item:
    text = json.dumps(arguments)
    return {
        "type": "function_call",
        "id": "f",
        "call_id": "call_0",
        "name": name,
        "arguments": text,
        "status": "completed",
    }


SYNONYMS = [711, 407]
EMAIL = "Thanks for the update - I will get back to you tomorrow."
PLAYED: list[tuple[str, str, list[list[Item]]]] = [
    (
        "example_session_state_mgmt",
        "verify",
        [[called("increment_counter", count=3)], [called("get_counter_value")], [said("6")]],
    ),
    ("example_session_state_mgmt", "verify", [[called("increment_counter", count=1)], [said("4")]]),
    (
        "example_multi_step",
        "verify",
        [
            [called("get_synonym_value", synonym="Warm")],
            [called("extract_synonym_values", synonym_values=SYNONYMS)],
            [said("Done")],
        ],
    ),
    ("example_multi_step", "verify", [[said("I do not know.")]]),
    ("workplace_assistant", "verify", [[called("email_reply_email", email_id="00000057", body=EMAIL)], [said("Done")]]),
    ("example_single_tool_call", "verify", [[called("get_weather", city="Paris")], [said("Cold.")]]),
    ("example_tool_call_multireward", "verify", [[called("get_weather", city="San Francisco")], [said("Done")]]),
    ("mcqa", "verify", [[said("So \\boxed{B}")]]),
    ("mcqa", "verify", [[said("So \\boxed{A}")]]),
    ("xlam_fc", "verify", [[called("live_giveaways_by_type", type="beta")], [said("Done")]]),
    ("arc_agi", "verify", [[said("\\boxed{[[1]]}")]]),
    ("graphwalks", "verify", [[said('Final Answer: ["node_1", "node_2"]')]]),
    ("ruler", "verify", [[said("NRBQA KMLJX")]]),
    ("example_multi_turn_gymnasium", "step", [[said("Paris")], [said("Two million")], [said("The Eiffel tower")]]),
    ("blackjack", "step", [[said("<action>stand</action>")]]),
]


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("nemo_gym", "nemo_gym==0.4.0", "nemo_gym", base=python_3_12())


def text_of(items: list[Item]) -> str:
    """The items as a hermes model writes them."""
    return "".join(
        call(item["name"], item["arguments"]) if item["type"] == "function_call" else item["content"][0]["text"]
        for item in items
    )


Plays = list[tuple[Row, list[list[Item]]]]
OwnRewards = Callable[[str, str, Plays], list[float]]


@pytest.fixture(scope="module")
def own_rewards(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRewards]:
    """The rewards of agents of the package, whose model says these turns: of a kind, on the server at a URL."""
    errors = tmp_path_factory.mktemp("agents") / "errors.txt"
    with (
        errors.open("w") as file,
        subprocess.Popen(
            [python, str(AGENTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as agents,
    ):
        asked, told = agents.stdin, agents.stdout
        assert asked is not None
        assert told is not None

        def rewards(kind: str, url: str, plays: Plays) -> list[float]:
            found: list[float] = []
            for row, turns in plays:
                asked.write(json.dumps({"kind": kind, "url": url, "row": dict(row.fields), "turns": turns}) + "\n")
                asked.flush()
                line = next((line for line in told if line.startswith('{"reward"')), None)
                assert line is not None, errors.read_text()[-2000:]
                found.append(json.loads(line)["reward"])
            return found

        try:
            yield rewards
        finally:
            agents.kill()


@pytest.mark.slow
@pytest.mark.parametrize("server", list(dict.fromkeys(name for name, _, _ in PLAYED)))
def test_a_server_of_the_package_gives_the_rewards_that_its_own_agent_gets(
    python: str, own_rewards: OwnRewards, server: str
) -> None:
    config = recipe(server, python=python)
    row = assembly.rows(config, limit=1)[0]
    environments = assembly.environment_factory(config)
    source = environments._shared[-1]
    assert isinstance(source, NemoGym)
    try:
        url, kind = asyncio.run(source.place())
        process = running(source).process
        chosen = [turns for name, its, turns in PLAYED if name == server and its == kind]
        expected = own_rewards(kind, url, [(row, turns) for turns in chosen])
        for turns, reward in zip(chosen, expected, strict=True):
            together = hold_all(Says(*map(text_of, turns)), environments, row=row, limits=LIMITS, size=3)
            for one in together:
                assert one.error is None, one.error
                if server != "blackjack":  # its hands are random
                    assert sum(turn.reward for turn in one.turns) == pytest.approx(reward), one.turns[-1].info
                assert one.stop == "done"
    finally:
        asyncio.run(environments.aclose())
    assert source._server is not None
    assert source._server._running is None
    assert process.poll() is not None


def running(source: NemoGym) -> nemo_gym._Running:
    """The server of the package."""
    assert source._server is not None
    assert source._server._running is not None
    return source._server._running


@pytest.mark.slow
def test_a_server_that_has_ended_is_replaced_and_not_for_ever(python: str, caplog: pytest.LogCaptureFixture) -> None:
    config = recipe("mcqa", python=python)
    row = assembly.rows(config, limit=1)[0]
    environments = assembly.environment_factory(config)
    source = environments._shared[-1]
    assert isinstance(source, NemoGym)
    try:
        for number in range(RESTARTS + 1):
            one = hold(Says("So \\boxed{B}"), environments, row=row, limits=LIMITS)
            assert one.error is None, one.error
            assert ("number 1 of at most 3" in caplog.text) == (number > 0)
            process = running(source).process
            process.kill()
            process.wait()
        one = hold(Says("So \\boxed{B}"), environments, row=row, limits=LIMITS)
        assert one.error is not None
        assert "nemo_gym:mcqa has ended with the status -9; it said: " in one.error.message
        assert "the last of 4 that have ended: no other is started" in one.error.message
    finally:
        asyncio.run(environments.aclose())


WHO = {"user_id": "GROOM2024", "event_confirmation_code": "NIGHTCLUB2024"}
ONCE = [
    ("xlam_fc", [called("live_giveaways_by_type", type=kind) for kind in ("beta", "game")]),
    ("xlam_fc", [called("live_giveaways_by_type", type="beta")]),
    ("single_step_tool_use_with_argument_comparison", [called("authenticate_user", **WHO)]),
    ("single_step_tool_use_with_argument_comparison", [said("What is your user id?")]),
]


@pytest.mark.slow
@pytest.mark.parametrize("server", list(dict.fromkeys(name for name, _ in ONCE)))
def test_without_calls_the_reward_is_that_of_its_agent_that_executes_none(
    python: str, own_rewards: OwnRewards, server: str
) -> None:
    config = recipe(server, python=python, execute_calls=False)
    row = assembly.rows(config, limit=1)[0]
    environments = assembly.environment_factory(config)
    source = environments._shared[-1]
    assert isinstance(source, NemoGym)
    try:
        url, _ = asyncio.run(source.place())
        turns = [items for name, items in ONCE if name == server]
        rewards = own_rewards("once", url, [(row, [items]) for items in turns])
        for items, reward in zip(turns, rewards, strict=True):
            one = hold(Says(text_of(items), "?"), environments, row=row, limits=LIMITS)
            assert one.error is None, one.error
            assert (one.stop, len(one.turns)) == ("done", 1)
            assert one.turns[0].reward == pytest.approx(reward), one.turns[0].info
        assert set(rewards) == {0.0, 1.0}
    finally:
        asyncio.run(environments.aclose())


@pytest.mark.slow
def test_the_package_lists_its_servers_and_an_opening(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "nemo_gym:example_session_state_mgmt", f"python={python}"]) == 0
    shown = capsys.readouterr().out
    assert "or the 5 examples of the server" in shown
    assert "tools    increment_counter, get_counter_value" in shown
    assert shown.endswith("[user] add 1 then add 2 then get the count\n")
    with pytest.raises(ConfigError, match=r"no resources server 'black_jack'; did you mean 'blackjack'\?"):
        assembly.environment_factory(recipe("black_jack", python=python))
    config = recipe("blackjack", python=python, config={"num_workers": "many"}, seconds_to_start=60)
    one = hold(Says("a"), assembly.environment_factory(config), row=assembly.rows(config, limit=1)[0])
    assert one.error is not None
    assert "nemo_gym:blackjack did not start" in one.error.message
    assert "num_workers" in one.error.message
