"""A rollout server with a real vLLM server behind it: conversations, all weights or an adapter in flight, and versions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import engine_env
import pytest
import torch
from rich.console import Console

from engines.conformance.subjects import MODEL
from support.recipes import save_recipe
from support.rollout_servers import TOKEN, running
from turnwise.config.recipe import load
from turnwise.models.lora import has_adapter
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["vllm", "vllm lora", "sglang"])
def test_training_with_a_rollout_server(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's forward pass gives the log-probabilities of the server's tokens, with the weights of their version."""
    monkeypatch.setenv("TURNWISE_SERVER_TOKEN", TOKEN)
    name, _, adapter = engine.partition(" ")
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(4)))
    recipe = save_recipe(
        tmp_path,
        MODEL,
        data={"train": str(rows)},
        limits={"turns": 2, "tokens_per_turn": 8},
        train={"steps": 3, "batch_size": 2, "group_size": 4, "lr": 0.02 if adapter else 0.001},
    )
    options = ["model.device=cpu", *(["model.lora.rank=4", "model.lora.alpha=64"] if adapter else [])]
    served = [f"engine.name={name}", f"engine.python={engine_env.python(name)}", "engine.memory_gb=0.1"]
    if name == "vllm":
        served.append("engine.arguments=[--enforce-eager]")  # compiling takes longer than this run
    with running(recipe, *options, *served, "max_concurrent=8") as server:
        url = f"rollout_server.url={server.url}"
        run = assemble(load(recipe, [*options, url, f"output={tmp_path / 'run'}"])[0])
        asyncio.run(train(run, TrainReport(Console(quiet=True))))
        assert server.ask("GET", "/health")[1]["version"] == 3
        text = server.request("GET", "/metrics")[1].decode()
        assert 'turnwise_weight_updates_total{result="loaded"} 4.0' in text
        events = server.rollouts("after/0", "after/1", least_version=3)
    trained: Any = run.learner
    assert has_adapter(trained._model) == bool(adapter)
    for segment in (event["trajectory"]["segments"][0] for event in events):
        with torch.no_grad():
            logits = trained._model(torch.tensor([segment["token_ids"]])).logits[0].float()
        expected = torch.log_softmax(logits, -1)
        for place, turn in enumerate(segment["turn"]):
            if turn >= 0:
                assert segment["version"][place] == 3
                token = segment["token_ids"][place]
                assert segment["logprobs"][place] == pytest.approx(expected[place - 1, token].item(), abs=2e-3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [None] * 24
    versions = [version for line in lines for segment in line["segments"] for version in segment["version"]]
    assert set(versions) == {-1, 0, 1, 2}
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["ratio/max_deviation"] < 2e-3 for line in steps if "loss" in line] == [True] * 3
