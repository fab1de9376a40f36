"""Rewards from a server: what is sent, and what becomes of answers that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from support.conversations import a_row, hold_all, scripted
from support.servers import Answer, serving
from turnwise import assembly
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rewards.http import HttpReward
from turnwise.types import Group, Trajectory


def groups(*texts: Sequence[str]) -> list[Group]:
    """A group for each list of answers."""
    made: list[Group] = []
    for number, answers in enumerate(texts):
        row = a_row("2 + 2?", id=str(number), answer="4", picture=b"PNG" if answers[0] == "bytes" else None)
        trajectories = [hold_all(scripted([answer]), row=row)[0] for answer in answers]
        for place, one in enumerate(trajectories):
            one.id = f"{number}/{place}"
        made.append(Group(id=str(number), row=row, trajectories=trajectories))
    return made


def run(url: str, *texts: Sequence[str], **arguments: Any) -> list[Trajectory]:
    """The trajectories of all groups, scored as a recipe does."""
    arguments = {"url": url, "pause": 0.01, "timeout": 5.0, "retries": 2, **arguments}
    use = {"use": "turnwise.rewards.http:HttpReward", "name": "server", "arguments": arguments, "weight": 2.0}
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "train": {"steps": 1},
            "reward": {"batch": [use], "timeout": 20},
        }
    )
    made = groups(*texts)
    asyncio.run(assembly.scorer(config).score(made))
    return [one for group in made for one in group.trajectories]


def error(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "reward"
    return trajectory.error.message


def by_length(question: dict[str, Any], number: int) -> Answer:
    return Answer({"rewards": [float(len(item["completion"])) for item in question["items"]]})


def test_the_server_gets_items_with_the_token_and_its_numbers_are_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    with serving(by_length) as server:
        trajectories = run(
            f"{server.url}/score?v=1", ["a", "bb"], ["ccc"], token_env="REWARD_TOKEN", batch_size=2, columns=["answer"]
        )
    assert [one.reward for one in trajectories] == [2.0, 4.0, 6.0]
    assert [one.rewards["server"] for one in trajectories] == [2.0, 4.0, 6.0]
    assert sorted(len(question["items"]) for question in server.asked) == [1, 2]
    first = next(question["items"][0] for question in server.asked if len(question["items"]) == 2)
    assert first == {
        "id": "0/0",
        "group": "0",
        "completion": "a",
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "a"}],
        "columns": {"answer": "4"},
    }
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert set(server.paths) == {"/score?v=1"}


def test_null_does_not_apply_and_metrics_are_recorded() -> None:
    def answer(question: dict[str, Any], number: int) -> Answer:
        return Answer({"rewards": [None, 1], "metrics": [{"length": 3, "word": "x"}, {"length": float("inf")}]})

    with serving(answer) as server:
        one, other = run(server.url, ["a", "b"])
    assert (one.rewards, other.rewards) == ({}, {"turns": 0.0, "server": 2.0})
    assert (one.metrics, other.metrics) == ({"length": 3.0}, {})


def test_a_server_that_recovers_is_asked_again_with_growing_pauses() -> None:
    def answer(question: dict[str, Any], number: int) -> Answer:
        return [Answer("busy", status=500), Answer(hang_up=True), by_length(question, number)][number]

    with serving(answer) as server:
        (one,) = run(server.url, ["abc"])
    assert (one.reward, len(server.asked)) == (6.0, 3)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            Answer({"rewards": [1.0, 2.0]}),
            "with one number or null for each of the 1 items; it answered {'rewards': [1.0, 2.0]}",
        ),
        (Answer({"scores": [1.0]}), "must answer {'rewards': [...]} with one number or null for each of the 1 items"),
        (
            Answer({"rewards": [float("nan")]}),
            "the reward function 'server' gave nan; a reward must be a finite number",
        ),
        (Answer({"rewards": ["1.0"]}), "the reward function 'server' gave the text '1.0'; a reward must be a number"),
        (
            Answer({"rewards": [1.0], "metrics": [{}, {}]}),
            "metrics must be a list with one object for each of the 1 items",
        ),
        (Answer([1.0]), "must return a JSON object; it returned: '[1.0]'"),
        (Answer(b"<html>"), "must return JSON; it returned: '<html>'"),
        (Answer("no such model", status=404), "returned the status 404"),
        (Answer("dead", status=500), "was called 3 times: status 500"),
        (Answer({"rewards": [1.0]}, seconds=30), "was called 3 times: no answer within 1 s"),
        (Answer(hang_up=True), "was called 3 times: "),
    ],
)
def test_a_wrong_answer_fails_the_conversations_of_its_request_only(answer: Answer, message: str) -> None:
    def of_bad(question: dict[str, Any], number: int) -> Answer:
        return answer if question["items"][0]["completion"] == "bad" else by_length(question, number)

    with serving(of_bad) as server:
        good, bad, other = run(server.url, ["good", "bad"], ["fine"], batch_size=1, timeout=1.0)
    assert [one.reward for one in (good, bad, other)] == [8.0, None, 8.0]
    assert message in error(bad)


def test_a_row_that_is_no_json_fails_alone_and_says_what_to_leave_out() -> None:
    with serving(by_length) as server:
        bad, good = run(server.url, ["bytes"], ["good"])
    assert good.reward == 8.0
    assert "row '0' cannot be sent as JSON (Object of type bytes is not JSON serializable): list the columns" in error(
        bad
    )


def test_nobody_listens() -> None:
    (one,) = run("http://127.0.0.1:9/x", ["a"])
    assert "the service http://127.0.0.1:9/x was called 3 times: " in error(one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "somewhere"}, "'somewhere' is not the address of a service"),
        ({"url": "http://a/b", "batch_size": 0}, "HttpReward: batch_size=0 sends nothing; give a number above 0"),
        ({"url": "http://a/b", "token_env": "NO_SUCH_TOKEN"}, "the environment variable NO_SUCH_TOKEN is not set"),
        ({"url": "http://a/b", "timeout": 0}, "timeout is 0; it must be above 0"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpReward(**arguments)
