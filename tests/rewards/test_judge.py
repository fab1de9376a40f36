"""Rewards from elsewhere: judges, and services asked over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from support.conversations import RENDERER, a_row, hold, hold_all, scripted
from support.servers import Answer, serving
from turnwise import assembly
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rewards.functions import GroupReward, TrajectoryReward, plan_call
from turnwise.rewards.http import HttpReward
from turnwise.rewards.judge import ComparingJudge, Judge
from turnwise.rewards.scorer import Scorer
from turnwise.types import Group, Message, Trajectory

# A model as judge: what it reads, how its answers are parsed, and what becomes of wrong ones.


RUBRIC: Any = [
    {"name": "correct", "description": "The answer is right.", "weight": 3},
    {"name": "polite", "description": "The tone is polite."},
]


def scores(**values: Any) -> str:
    return json.dumps({"reason": "because", "scores": values})


GOOD = scores(correct=10, polite=5)


class Model:
    """Answers with the given texts, one after the other; the last one again and again."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.asked: list[list[Message]] = []

    async def __call__(self, messages: list[Message]) -> str:
        self.asked.append([dict(message) for message in messages])
        return self.texts[min(len(self.asked), len(self.texts)) - 1]


def judged(judge: Judge, *texts: str) -> list[Trajectory]:
    row = a_row("2 + 2?", answer="4")
    trajectories = [hold(scripted([text]), row=row) for text in texts or ["It is 4."]]
    score = Scorer([TrajectoryReward("judge", judge, plan=plan_call(judge, "trajectory", name="judge"))])
    asyncio.run(score.score([Group(id="1", row=row, trajectories=trajectories)]))
    return trajectories


def error(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "reward"
    return trajectory.error.message


def test_the_reward_is_the_weighted_mean_of_the_scores_and_each_score_is_a_metric() -> None:
    model = Model(GOOD)
    (one,) = judged(Judge(rubric=RUBRIC, chat_model=model, columns=["answer"]))
    assert one.reward == (3 * 1.0 + 1 * 0.5) / 4
    assert one.metrics == {"judge.correct": 1.0, "judge.polite": 0.5}
    assert one.turns[-1].info["judge"] == {"scores": {"correct": 1.0, "polite": 0.5}, "reason": "because"}
    ((system, user),) = model.asked
    assert "- correct (weight 3): The answer is right.\n- polite (weight 1): The tone is polite." in system["content"]
    assert "from 0 (not met) to 10 (fully met)" in system["content"]
    data = json.loads(user["content"].partition("\n")[2])
    assert data == {
        "conversation": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
        "answer": "4",
    }


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{GOOD}\n```",
        f"Let me think {{about it}}.\n{GOOD} That is all.",
        f"The answer says {scores(correct=0, polite=0)}, which I ignore.\n{GOOD}",
        f'{{"result": {GOOD}}}',
    ],
)
def test_the_last_object_with_scores_is_the_answer(text: str) -> None:
    (one,) = judged(Judge(rubric=RUBRIC, chat_model=Model(text)))
    assert one.reward == 0.875


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("I would say 10.", "there is no JSON object with the key scores in it"),
        ("{" * 30_000, "there is no JSON object with the key scores in it"),
        ('{"scores": [' * 5_000, "there is no JSON object with the key scores in it"),
        (scores(correct=10), "scores must be an object with the keys correct, polite"),
        (scores(correct=10, polite=5, other=1), "scores must be an object with the keys correct, polite"),
        ('{"scores": 7}', "scores must be an object with the keys correct, polite"),
        (scores(correct=11, polite=5), "the score of 'correct' is 11, and must lie between 0 and 10"),
        (scores(correct="10", polite=5), "the score of 'correct' is '10', and must be a number"),
        (scores(correct=True, polite=5), "the score of 'correct' is True, and must be a number"),
        (scores(correct=float("nan"), polite=5), "the score of 'correct' is nan, and must be a number"),
        ("__import__('os').abort()", "there is no JSON object with the key scores in it"),
    ],
)
def test_a_wrong_answer_is_requested_again_with_its_problem_and_then_fails_its_trajectory(
    text: str, problem: str
) -> None:
    model = Model(text, GOOD)
    (one,) = judged(Judge(rubric=RUBRIC, chat_model=model))
    assert (one.reward, len(model.asked)) == (0.875, 2)
    assert model.asked[1][-2:] == [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"This answer is wrong: {problem}. Answer again, with the JSON object only."},
    ]
    model = Model(text)
    (one,) = judged(Judge(rubric=RUBRIC, chat_model=model, retries=1))
    assert len(model.asked) == 2
    assert f"the judge gave 2 answers that cannot be used; the last one: {problem}: " in error(one)


def test_a_judge_that_fails_for_one_conversation_fails_no_other() -> None:
    async def model(messages: list[Message]) -> str:
        if "hang" in messages[1]["content"]:
            await asyncio.sleep(60)
        return 1 / 0 if "raise" in messages[1]["content"] else GOOD  # type: ignore[return-value]

    good, hangs, raises = judged(Judge(rubric=RUBRIC, chat_model=model, timeout=1.0), "good", "hang", "raise")
    assert good.reward == 0.875
    assert error(hangs) == "the reward function 'judge': the judge did not answer within timeout=1 s"
    assert error(raises) == "the reward function 'judge': ZeroDivisionError: division by zero"


def test_other_scales_and_long_messages() -> None:
    model = Model(scores(correct=0, polite=1))
    (one,) = judged(Judge(rubric=RUBRIC, scale=[-1, 1], chat_model=model, max_characters=10), "0123456789abcdefghij")
    assert one.reward == (3 * 0.5 + 1) / 4
    assert "01234\\n[... 10 characters left out ...]\\nfghij" in model.asked[0][1]["content"]


def test_a_judge_on_an_openai_compatible_server() -> None:
    def answer(question: dict[str, Any], number: int) -> Answer:
        return Answer({"choices": [{"message": {"content": GOOD}}]}) if number else Answer("busy", status=503)

    with serving(answer) as server:
        endpoint = {"url": f"{server.url}/v1", "model": "judge", "pause": 0.01, "request": {"temperature": 0}}
        (one,) = judged(Judge(rubric=RUBRIC, endpoint=endpoint))
    assert one.reward == 0.875
    assert (server.asked[1]["model"], server.asked[1]["temperature"]) == ("judge", 0)
    assert server.paths == ["/v1/chat/completions"] * 2


def test_a_judge_on_the_engine_of_the_run() -> None:
    use = {"use": "turnwise.rewards.judge:Judge", "arguments": {"rubric": RUBRIC, "engine": True, "max_tokens": 300}}
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "d"}, "train": {"steps": 1}, "reward": {"trajectory": [use]}}
    )
    row = a_row("2 + 2?")
    engine = scripted(["It is 4."], [f"<think>Hm.</think>{GOOD}"])
    trajectories = hold_all(engine, row=row)
    scorer = assembly.scorer(config)
    assembly.connect_engine(scorer, engine, RENDERER)
    asyncio.run(scorer.score([Group(id="1", row=row, trajectories=trajectories)]))
    assert trajectories[0].rewards == {"turns": 0.0, "Judge": 0.875}


def test_a_judge_that_compares_scores_all_conversations_of_a_row_in_one_request() -> None:
    asked: list[dict[str, Any]] = []

    async def longest(messages: list[Message]) -> str:
        data = json.loads(messages[1]["content"].partition("\n")[2])
        asked.append(data)
        return scores(**{name: len(shown["conversation"][-1]["content"]) for name, shown in data.items()})

    judge = ComparingJudge(rubric=RUBRIC, chat_model=longest)
    score = Scorer(groups=[GroupReward("best", judge, plan=plan_call(judge, "group", name="best"))])

    def row_of(*texts: str) -> list[float | None]:
        row = a_row("Hi")
        trajectories = [hold(scripted([text]), row=row) for text in texts]
        asyncio.run(score.score([Group(id="1", row=row, trajectories=trajectories)]))
        return [one.reward for one in trajectories]

    assert row_of("a", "bbbb", "cc", "ddddd") == [0.1, 0.4, 0.2, 0.5]
    assert list(asked[0]) == ["answer_1", "answer_2", "answer_3", "answer_4"]
    assert row_of("a") == [None]  # nothing to compare
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rubric": RUBRIC}, "Judge needs a model: set endpoint, chat_model or engine"),
        ({"rubric": RUBRIC, "engine": True, "endpoint": {}}, "engine=true asks the model of the run: remove endpoint"),
        (
            {"rubric": RUBRIC, "endpoint": {"url": "http://a"}},
            "endpoint .* cannot be created: .*missing a required argument: 'model'",
        ),
        ({"rubric": [], "engine": True}, r"rubric has the names \[\]; give at least one criterion"),
        ({"rubric": [RUBRIC[0]] * 2, "engine": True}, "each with its own name"),
        ({"rubric": [{"name": "a"}], "engine": True}, r"rubric\.0 is .*write \{name: \.\.\., description"),
        ({"rubric": [{**RUBRIC[0], "weight": 0}], "engine": True}, "weight=0 must be a number above 0"),
        (
            {"rubric": RUBRIC, "engine": True, "scale": [1, 1]},
            r"scale=\[1, 1\] must be the lowest and the highest score",
        ),
        ({"rubric": RUBRIC, "engine": True, "retries": -1}, "retries=-1 must be 0 or more"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Judge(**arguments)


# Rewards from a server: what is sent, and what becomes of answers that are wrong.


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
def test_http_wrong_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpReward(**arguments)
