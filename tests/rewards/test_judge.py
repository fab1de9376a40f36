"""A model as judge: what it reads, how its answers are parsed, and what becomes of wrong ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.conversations import RENDERER, a_row, hold, hold_all, scripted
from support.servers import Answer, serving
from turnwise import assembly
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rewards.functions import GroupReward, TrajectoryReward, plan_call
from turnwise.rewards.judge import ComparingJudge, Judge
from turnwise.rewards.scorer import Scorer
from turnwise.types import Group, Message, Trajectory

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
