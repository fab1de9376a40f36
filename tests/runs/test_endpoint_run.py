"""`engine.name: openai` in a recipe: conversations without a model in the process, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.recipes import save_recipe
from support.servers import Answer, Server, serving
from support.tiny import save_rows
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.record.reader import read

USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


def answers(question: dict[str, Any], number: int) -> Answer:
    return Answer({"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}], "usage": USAGE})


def recipe(folder: Path, url: str, **options: Any) -> Path:
    rows = str(save_rows(folder / "rows.jsonl", 3))
    return save_recipe(
        folder,
        Path("some/model"),
        engine={"name": "openai", "url": f"{url}/v1"},
        data={"train": rows},
        environment="turnwise.environments.environment:SingleTurn",
        **options,
    )


def run(folder: Path, *overrides: str, answer: Callable[[dict[str, Any], int], Answer] = answers) -> tuple[int, Server]:
    """`turnwise rollout` with an endpoint. Returns the exit status and the server."""
    with serving(answer) as server:
        status = main(["rollout", str(recipe(folder, server.url)), "--out", str(folder / "out"), *overrides])
    return status, server


def test_a_recipe_with_an_endpoint_needs_no_model(tmp_path: Path) -> None:
    status, server = run(tmp_path)
    assert (status, len(server.asked), {asked["model"] for asked in server.asked}) == (0, 3, {"some/model"})
    trajectories = list(read(tmp_path / "out"))
    assert [(t.id, t.answer, t.segments, t.sampled_tokens) for t in trajectories] == [
        (f"{n}/0", "2", [], 2) for n in (1, 2, 3)
    ]


def test_the_options_of_an_endpoint_reach_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")

    def answer(question: dict[str, Any], number: int) -> Answer:
        return [Answer("busy", 500), Answer("late", seconds=5)][number] if number < 2 else answers(question, number)

    options = ["model=m", "api_key_env=SOME_KEY", "max_tokens_field=max_completion_tokens", "timeout=1", "retries=2"]
    options.append("request={seed: null, top_k: 5}")
    overrides = [*(f"engine.{option}" for option in options), "rollout.max_rows=1"]
    status, server = run(tmp_path, *overrides, answer=answer)
    assert (status, len(server.asked)) == (0, 3)
    assert server.paths == ["/v1/chat/completions"] * 3
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    (asked, *_) = server.asked
    assert (asked["model"], asked["top_k"], asked["max_completion_tokens"]) == ("m", 5, 256)
    assert not {"seed", "max_tokens"} & asked.keys()
    assert (next(iter(read(tmp_path / "out"))).answer) == "2"


@pytest.mark.parametrize("limit", ["requests_per_minute=120", "tokens_per_minute=840"])
def test_the_limits_of_an_endpoint_space_its_requests(tmp_path: Path, limit: str) -> None:
    """7 tokens each at 14 a second, or two requests a second: the third begins a second after the first."""
    times: list[float] = []

    def answer(question: dict[str, Any], number: int) -> Answer:
        times.append(time.monotonic())
        return answers(question, number)

    status, _ = run(tmp_path, f"engine.{limit}", "limits.tokens_per_turn=1", "max_concurrent=1", answer=answer)
    assert status == 0
    assert times[2] - times[0] >= 0.9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_k=4", "top_k=4 is not in the OpenAI protocol"),
        ("sampling.min_p=0.1", "min_p=0.1 is not in the OpenAI protocol"),
        ("deterministic=true", "deterministic=true cannot be combined with engine.name=openai"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens needs the model's tokenizer"),
        ("data.return_multi_modal_inputs=true", "data.return_multi_modal_inputs has no effect"),
        ("engine.api_key_env=NOT_SET_ANYWHERE", "the environment variable NOT_SET_ANYWHERE is not set"),
        ("engine.request={stream: true}", "has 'stream', which is set by turnwise"),
    ],
)
def test_options_that_an_endpoint_cannot_follow_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    status, server = run(tmp_path, override)
    assert (status, server.asked) == (1, [])
    assert message in capsys.readouterr().err


def test_a_judge_on_the_engine_of_the_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = {
        "use": "turnwise.rewards.judge:Judge",
        "arguments": {"engine": True, "rubric": [{"name": "right", "description": "It is right."}]},
    }
    with serving(answers) as server:
        path = recipe(tmp_path, server.url, reward={"trajectory": [judge]})
        assert main(["rollout", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "asks the engine of the run" in capsys.readouterr().err


def test_options_of_templates_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run(tmp_path, "thinking=branch")
    assert status == 0
    assert "thinking=branch: not used with an endpoint" in capsys.readouterr().out


def test_training_with_an_endpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    config, _ = load(recipe(tmp_path, "http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="without the ids and the log-probabilities of the sampled tokens"):
        refuse_without_effect(config)
