"""The recipes that come with the repository run as they are, and the demo learns what it promises."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.servers import Answer, serving
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.data.gsm8k import main as preprocess
from turnwise.options.schema import Config
from turnwise.user_code.references import resolve

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files relative to where one runs them, as the README does."""
    monkeypatch.chdir(ROOT)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*.yaml")))
def test_every_recipe_is_valid(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, notes = load(ROOT / "recipes" / recipe)
    assert isinstance(config, Config)
    assert notes == []


def test_the_calculator_recipe_takes_two_steps(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ["train.steps=2", "train.batch_size=4", "train.group_size=4", "eval.max_rows=2"]
    assert main(["train", "recipes/calculator.yaml", *small, f"output={out}"]) == 0
    metrics = lines(out / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert all(one["failed"] == 0 and one["template_mismatch"] == 0 for one in metrics)
    assert all(0 < one["ratio/max_deviation"] < 1e-3 for one in metrics)
    assert all(one["tool_calls/mean"] >= 0.8 for one in metrics)
    assert [one["step"] for one in lines(out / "evaluations.jsonl")] == [0, 2]


def gsm8k(folder: Path, source: Path | None) -> Path:
    """Real rows where there are some, else rows of the same form."""
    for name in ("train.jsonl", "test.jsonl"):
        if source is not None:
            rows = source.joinpath(name).read_text(encoding="utf-8").splitlines()[:64]
        else:
            answer = "It is <<1200+34=1234>>1,234 in all.\n#### 1,234"
            rows = [
                json.dumps({"question": f"What is {n} plus 1,200 + {34 - n}?", "answer": answer}) for n in range(16)
            ]
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def test_gsm8k_runs_on_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SHARED / "gsm8k"
    monkeypatch.setenv("GSM8K", str(gsm8k(tmp_path, real if real.is_dir() else None)))
    out = tmp_path / "run"
    small = [
        "train.steps=2",
        "train.batch_size=2",
        "train.group_size=2",
        "eval.max_rows=2",
        "limits.tokens_per_turn=32",
    ]
    assert main(["train", "recipes/gsm8k.yaml", *small, f"output={out}"]) == 0
    metrics, conversations = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert len(metrics) == 2
    assert len(conversations) == 8
    assert all(one["failed"] == 0 and one["template_mismatch"] == 0 for one in metrics)
    assert all(one["ratio/max_deviation"] < 1e-3 for one in metrics)
    for one in conversations:
        assert one["messages"][0]["role"] == "system"
        assert "####" in one["row"]["answer"]
        for segment in one["segments"]:
            assert (
                len(segment["token_ids"]) == len(segment["turn"]) == len(segment["logprobs"]) == len(segment["version"])
            )


def test_gsm8k_runs_in_a_clone_as_it_is_and_without_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GSM8K", raising=False)
    small = ["train.steps=1", "train.batch_size=2", "train.group_size=2", "limits.tokens_per_turn=32", "data.eval=null"]
    assert main(["train", "recipes/gsm8k.yaml", *small, f"output={tmp_path / 'run'}"]) == 0
    assert "data.eval=null removes the recipe's eval.max_rows, which need held-out rows" in " ".join(
        capsys.readouterr().out.split()
    )
    conversations = lines(tmp_path / "run" / "trajectories.jsonl")
    assert [one["error"] for one in conversations] == [None] * 4
    assert all("####" in one["row"]["answer"] for one in conversations)


def published(folder: Path) -> Path:
    """A file of GSM8K as it is published: real rows where there are some."""
    return gsm8k(folder, SHARED / "gsm8k" if (SHARED / "gsm8k").is_dir() else None)


TWO_STEPS = [
    "train.steps=2",
    "train.batch_size=2",
    "train.group_size=2",
    "limits.tokens_per_turn=32",
    "checkpoint.keep=1",
]


def two_steps(recipe: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """Its conversations, after two steps in which nothing broke."""
    assert main(["train", f"recipes/{recipe}.yaml", *TWO_STEPS, *options, f"output={out}"]) == 0
    metrics, conversations = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert [(one["failed"], one["template_mismatch"]) for one in metrics] == [(0, 0)] * 2, [
        one["error"] for one in conversations
    ]
    return [one for one in conversations if one["error"] is None]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_gsm8k_with_an_interaction_runs_on_the_rows_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    data = tmp_path / "data"
    for split in ("train", "test"):
        source = published(tmp_path) / f"{split}.jsonl"
        command = ["--source", str(source), "--kind", "interaction", "--format", format, "--out", str(data)]
        assert preprocess(command) == 0
    monkeypatch.setenv("GSM8K_INTERACTION", str(data))
    files = [] if format == "parquet" else [f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl"]
    for one in two_steps("gsm8k_interaction", tmp_path / "run", "limits.turns=2", "eval.max_rows=2", *files):
        assert one["row"]["extra_info"]["interaction_kwargs"]["name"] == "gsm8k"
        assert one["stop"] in ("done", "max_turns", "length")


@pytest.mark.slow
def test_gsm8k_with_a_tool_runs_on_the_rows_of_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    for split in ("train", "test"):
        source = published(tmp_path) / f"{split}.jsonl"
        assert preprocess(["--source", str(source), "--kind", "tool", "--format", "parquet", "--out", str(data)]) == 0
    monkeypatch.setenv("GSM8K_TOOL", str(data))
    for one in two_steps("gsm8k_tool", tmp_path / "run", "limits.turns=2", "eval.max_rows=2"):
        assert [tool["function"]["name"] for tool in one["tools"]] == ["calc_gsm8k_reward"]


@pytest.mark.slow
def test_the_mcp_recipe_takes_two_steps(tmp_path: Path) -> None:
    conversations = two_steps("mcp", tmp_path / "run", "limits.tokens_per_turn=64", "eval.max_rows=2")
    outcomes = [outcome for one in conversations for turn in one["turns"] for outcome in turn["tool_calls"]]
    assert {tool["function"]["name"] for one in conversations for tool in one["tools"]} == {"calculator"}
    assert any(outcome["error"] is None and (outcome["content"] or "").lstrip("-").isdigit() for outcome in outcomes)


def test_the_gym_recipe_takes_two_steps(tmp_path: Path) -> None:
    conversations = two_steps("gym", tmp_path / "run", "limits.tokens_per_turn=64")
    assert all(one["messages"][0]["content"].endswith("?") for one in conversations)
    assert any("right" in turn["info"] for one in conversations for turn in one["turns"])
    told = [message["content"] for one in conversations for message in one["messages"] if message["role"] == "user"]
    assert any(text.startswith(("Right.", "No, it is ")) for text in told)


@pytest.mark.slow
def test_the_recipe_of_a_modelled_user_takes_two_steps(tmp_path: Path) -> None:
    conversations = two_steps("modelled_user", tmp_path / "run", "limits.tokens_per_turn=64", "eval.max_rows=2")
    assert any(sum(message["role"] == "user" for message in one["messages"]) == 2 for one in conversations)


@pytest.mark.slow
def test_a_modelled_user_behind_an_endpoint_takes_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the overrides that the page tells."""
    monkeypatch.setenv("USER_MODEL_KEY", "swordfish")
    said = Answer({"choices": [{"message": {"content": "And?"}}]})
    with serving(lambda question, number: said) as server:
        endpoint = f'{{url: "{server.url}/v1", model: Qwen/Qwen3-8B, api_key_env: USER_MODEL_KEY}}'
        options = ["environment.arguments.chat_model=null", f"environment.arguments.endpoint={endpoint}"]
        conversations = two_steps(
            "modelled_user", tmp_path / "run", "limits.tokens_per_turn=64", "eval.max_rows=2", *options
        )
    assert any(message["content"] == "And?" for one in conversations for message in one["messages"])
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer swordfish"}


@pytest.mark.parametrize("recipe", ["gsm8k_tool", "gsm8k_interaction", "mcp", "gym", "modelled_user"])
def test_a_recipe_has_a_page_that_tells_its_command(recipe: str) -> None:
    page = (ROOT / "recipes" / f"{recipe}.md").read_text(encoding="utf-8")
    assert f"turnwise train recipes/{recipe}.yaml" in page
    assert page.count("\n") <= 60


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.joinpath("gsm8k").is_dir(), reason="the whole data set is not here")
def test_every_row_of_gsm8k_can_be_answered_right_and_wrong(tmp_path: Path) -> None:
    """The mechanics on real rows: a scripted model gives the true answer to the even ones, at the second try."""
    source = SHARED / "gsm8k" / "test.jsonl"
    rows = lines(source)
    script = tmp_path / "script.jsonl"
    calls = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    texts = [
        [calls, "#### -1", f"So it is {row['answer'].splitlines()[-1]}"] if n % 2 == 0 else ["#### -1", "I give up."]
        for n, row in enumerate(rows)
    ]
    script.write_text("\n".join(json.dumps(text) for text in texts))
    options = [f"data.train={source}", "engine.name=scripted", f"engine.script={script}"]
    assert main(["rollout", "recipes/gsm8k.yaml", *options, "--out", str(tmp_path / "out")]) == 0
    done = lines(tmp_path / "out" / "trajectories.jsonl")
    assert [one["row"]["answer"] for one in done] == [row["answer"] for row in rows]
    assert [one["reward"] for one in done] == [0.5 if n % 2 == 0 else 0.0 for n in range(len(rows))]
    assert {one["error"] for one in done} == {None}
    assert {one["template_mismatch"] for one in done} == {None}


@pytest.mark.slow
def test_the_demo_learns_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "turnwise.cli", "train", "recipes/calculator.yaml", f"output={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [one["reward/mean"] for one in lines(out / "metrics.jsonl")]
    assert rewards[0] <= 0.6
    assert sum(rewards[-5:]) / 5 >= 0.93
    before, after = lines(out / "evaluations.jsonl")
    assert before["reward/mean"] <= 0.6
    assert after["reward/mean"] >= 0.9
    assert "held-out questions" in done.stdout
    assert (out / "curve.png").stat().st_size > 10_000


def test_the_modelled_user_loads_its_model_once_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    module = resolve("recipes/modelled_user.py:user", key="chat_model").__globals__
    load, threads = module["_load"], []

    def loading() -> Any:
        threads.append(threading.current_thread())
        return load()

    monkeypatch.setitem(module, "_load", loading)
    module["chat_model"].cache_clear()

    async def ask() -> list[str]:
        question = [{"role": "user", "content": "Are you sure?"}]
        return await asyncio.gather(module["user"](question), module["user"](question))

    answers = asyncio.run(ask())
    assert len(answers) == 2
    assert all(answers)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
