"""Training and sampling with real servers of vLLM and SGLang: weights, images, rollout servers, faults."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import engine_env
import pytest
import torch
from transformers import AutoModelForImageTextToText, Gemma3ForCausalLM, Gemma3TextConfig

from engines.conformance.servers import Server, Sglang, Vllm
from engines.conformance.subjects import MODEL, change
from engines.conformance.test_conformance import assert_exact, start_requests
from support.recipes import save_recipe
from support.rollout_servers import TOKEN, running
from support.training import train_silently
from support.vision import image_part, picture, served_vision_model, text_part
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.config.recipe import load
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.servers import Probe
from turnwise.environments.environment import environment
from turnwise.errors import EngineError
from turnwise.models.loading import published_weights, token_logprobs
from turnwise.models.lora import has_adapter
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.train import assemble
from turnwise.types import Completion, LogprobKind, Opening, Reply, Request, Row, Sampling, Segment, Turn

# Training and sampling with real servers of vLLM and SGLang: weights, images, rollout servers.


# `turnwise train` with a real server: the weights that are trained are the weights that sample.


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.engines
@pytest.mark.parametrize("engine", list(engine_env.ENGINES))
def test_make_test_engines_has_made_the_environments(engine: str) -> None:
    recipe = engine_env.ENGINES[engine]
    assert engine_env.is_complete(engine)
    assert engine_env._differences(recipe) == ([], [])


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["sglang", "vllm", "vllm in_process"])
def test_a_run_of_the_demo(engine: str, tmp_path: Path) -> None:
    name, _, mode = engine.partition(" ")
    python = engine_env.python(name) if mode else sys.executable  # in the process: turnwise runs in vLLM's environment
    recipe = f"recipes/{name}.yaml"
    command = [str(python), "-m", "turnwise", "train", recipe]
    options = {
        **({"engine.mode": mode, "engine.python": "null"} if mode else {"engine.python": engine_env.python(name)}),
        "model.device": "cpu",
        "train.steps": 2,
        "train.batch_size": 4,
        "train.group_size": 4,
        "eval.max_rows": 4,
        "output": tmp_path / "run",
    }
    command += [f"{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["failed"] == 0
        assert line["engine/prefix_hit_rate"] > 0.3
        # before the optimizer step, the trainer's log-probabilities are those of the server, with the weights of the step before
        assert line["ratio/max_deviation"] < 1e-4
        assert line["version/newest"] == line["step"] - 1


@pytest.mark.engines
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="vLLM has an fp8 KV cache only on CPUs with AVX-512 or AMX",
)
def test_what_a_quantized_server_samples_is_corrected(tmp_path: Path) -> None:
    engine = {"name": "vllm", "python": str(engine_env.python("vllm")), "memory_gb": 0.1}
    recipe = save_recipe(
        tmp_path,
        MODEL,
        data={"train": str(ROOT / "demo" / "train.jsonl")},
        engine=engine | {"arguments": ["--enforce-eager", "--kv-cache-dtype", "fp8"]},
        train={"steps": 2, "batch_size": 2, "group_size": 4, "lr": 0.02},
    )
    run = assemble(load(recipe, ["model.device=cpu", f"output={tmp_path / 'run'}"])[0])
    train_silently(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["ratio/max_deviation"] > 1e-3
        assert 1e-7 < line["correction/k3"] < 1.0
        assert line["correction/unknown"] == 0


TWO_SIDES = """
from turnwise import Opening, Reply, SamplingChange, current_episode, environment

CUT = SamplingChange(max_tokens=6, answers_cut=True)

def even(turn):
    return sum(token % 2 == 0 for token in turn.completion.token_ids) / 6

@environment
async def two_sides(row):
    mine = yield Opening(messages=row.messages, sampling=CUT)
    async with current_episode().agent("other", messages=row.messages, policy="second", sampling=CUT) as other:
        theirs = await other.turn()
        other.add_reward(1 - even(theirs))
    yield Reply(reward=even(mine), done=True)
"""
"""The sides are rewarded for opposite tokens, so their adapters become different."""


@pytest.mark.engines
@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_two_trained_policies_are_two_adapters_at_one_server(name: str, tmp_path: Path) -> None:
    (tmp_path / "two_sides.py").write_text(TWO_SIDES, encoding="utf-8")
    engine = {"name": name, "python": str(engine_env.python(name)), "memory_gb": 0.1}
    recipe = save_recipe(
        tmp_path,
        MODEL,
        policies={"second": {"train": True, "lora": {"rank": 2, "alpha": 32}}},
        data={"train": str(ROOT / "demo" / "train.jsonl")},
        environment=f"{tmp_path}/two_sides.py:two_sides",
        # without compilation, which takes longer than this run
        engine=engine | ({"arguments": ["--enforce-eager"]} if name == "vllm" else {}),
        train={"steps": 3, "batch_size": 2, "group_size": 4, "lr": 0.02},
        record={"trainer_logprobs": True},
    )
    options = ["model.device=cpu", "model.lora.rank=4", "model.lora.alpha=64", f"output={tmp_path / 'run'}"]
    run = assemble(load(recipe, options)[0])
    train_silently(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for prefix in ("", "policies/second/"):
        # before its optimizer step, what each learner computes is what the server has sampled with its adapter; a policy that has
        # become sure of its answers has no deviation at all, a new one has
        deviations = [line[f"{prefix}ratio/max_deviation"] for line in lines]
        assert deviations[0] > 0
        assert max(deviations) < 1e-4
    written = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert [line["error"] for line in written] == [None] * 48
    versions = {
        (line.get("policy", ""), line["step"], version)
        for line in written
        for segment in line["segments"]
        for version in segment["version"]
        if version >= 0
    }
    assert versions == {(policy, step, step - 1) for policy in ("", "second") for step in (1, 2, 3)}
    # after the last step, the adapters differ by much more than the tolerance
    ids = [5, 17, 300, 12, 40]
    own, other = (torch.tensor(policy.learner.token_logprobs(ids)) for policy in run.policies)
    assert (own - other).abs().max() > 0.1


@pytest.mark.engines
def test_sglang_takes_weights_of_a_vocabulary_that_it_does_not_fill_up(tmp_path: Path) -> None:
    """Gemma 3 has an embedding of its own in SGLang, without rows of zeros behind a vocabulary that is no multiple of 64."""
    shutil.copytree(ROOT / "demo" / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "sliding_window": 128}
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=1003, eos_token_id=2, **sizes, **heads)).float().eval()
    model.save_pretrained(tmp_path / "model")
    recipe = {
        "model": {"path": str(tmp_path / "model"), "device": "cpu"},
        "data": {"train": str(ROOT / "demo" / "train.jsonl")},
        "engine": {"name": "sglang", "python": str(engine_env.python("sglang")), "memory_gb": 0.1},
        "output": str(tmp_path / "run"),
    }
    engine = assembly.engine(Config.model_validate(recipe), Renderer.from_pretrained(tmp_path / "model"), model)
    assert isinstance(engine, RemoteEngine)

    async def update() -> None:
        try:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
            weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
            logprobs = partial(token_logprobs, model)
            await engine.update(1, weights, Probe(prompt=[5, 17, 300], tokens=24, logprobs=logprobs, tolerance=1e-4))
        finally:
            await engine.close()

    asyncio.run(update())
    assert engine.version == 1


# Images on real servers, whose weights come by broadcasts: token ids, pixels and log-probabilities are the trainer's.


class Served:
    """A server with a tiny vision model, and the model that is trained."""

    def __init__(self, name: str, folder: Path) -> None:
        path = served_vision_model(folder / "model")
        recipe = {
            "model": {"path": str(path), "device": "cpu"},
            "data": {"train": "rows.jsonl"},
            "engine": {
                "name": name,
                "python": str(engine_env.python(name)),
                "memory_gb": 0.1,
                "weight_transfer": "collective",
                "arguments": ["--enforce-eager"] if name == "vllm" else [],
                "start_timeout": 900.0,
            },
            "max_concurrent": 8,
            "output": str(folder / "run"),
        }
        self.runner = asyncio.Runner()
        self.renderer = Renderer.from_pretrained(path)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        engine = assembly.engine(Config.model_validate(recipe), self.renderer, self.model)
        assert isinstance(engine, RemoteEngine)
        self.engine = engine
        self.runner.run(engine.start())

    def publish(self, version: int, **changed: Any) -> None:
        """Send the model's weights; `changed` are weights that are replaced or, with None, left out."""
        weights = {
            name: tensor for name, tensor in {**published_weights(self.model), **changed}.items() if tensor is not None
        }
        probe = Probe(prompt=[5, 17, 30], tokens=24, logprobs=partial(token_logprobs, self.model), tolerance=1e-4)
        self.runner.run(self.engine.update(version, weights, probe))

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine at a time: the server of one has ended before that of the next starts."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(engine_env.make_vision()), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        subject = Served(request.param, tmp_path_factory.mktemp(request.param))
        yield subject
        subject.close()


@environment
async def shows_another(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers the first turn with an image."""
    yield Opening(messages=row.messages)
    shown = [text_part("And"), image_part(picture(84, 56, seed=9)), text_part("this?")]
    yield Reply(messages=[{"role": "user", "content": shown}])
    yield Reply(done=True)


def assert_as_trained(served: Served, segment: Segment, version: int) -> None:
    """The sampled tokens have the log-probabilities of one pass of the trained model over all tokens and images."""
    ids = torch.tensor([list(segment.token_ids)])
    types = torch.zeros_like(ids)
    for image in segment.media:
        types[0, image.start : image.start + image.length] = 1
    inputs = {name: torch.cat([image.inputs[name] for image in segment.media]) for name in segment.media[0].inputs}
    # a placeholder that was sampled has no image: transformers would look for it, so its embedding is given
    pad = served.model.config.image_token_id
    without = ids.masked_fill((ids == pad) & (types == 0), 0)
    embeds = served.model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        answer = served.model(input_ids=without, inputs_embeds=embeds, mm_token_type_ids=types, **inputs)
    logprobs_TV = answer.logits[0].log_softmax(-1)
    sampled = [index for index, turn in enumerate(segment.turn) if turn >= 0]
    expected = [float(logprobs_TV[index - 1, segment.token_ids[index]]) for index in sampled]
    assert [segment.logprobs[index] for index in sampled] == pytest.approx(expected, abs=1e-4)
    assert {segment.version[index] for index in sampled} == {version}


def converse(served: Served) -> None:
    """Conversations with different images of one size, whose tokens are equal, and a second image in the second turn."""
    groups = []
    for seed in range(2):
        shown = [text_part("What is"), image_part(picture(56, 84, seed=seed)), text_part("?")]
        row = Row(id=f"{served.engine.version}-{seed}", messages=[{"role": "user", "content": shown}])
        groups.append(new_group(row, size=2, seed=seed))
    context = RolloutContext(
        engine=served.engine,
        renderer=served.renderer,
        make_environment=shows_another,
        sampling=Sampling(temperature=1.0),
        limits=Limits(turns=2, tokens_per_turn=24),
    )
    served.runner.run(rollout_groups(groups, context))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    pad = served.model.config.image_token_id
    for trajectory in list(trajectories):
        if trajectory.error is not None:  # the random model has sampled a placeholder, which SGLang does not take
            assert served.engine._api.name == "SGLang"
            assert f"tokens {pad} that belong to no image" in trajectory.error.message
            assert any(
                token == pad and turn >= 0
                for s in trajectory.segments
                for token, turn in zip(s.token_ids, s.turn, strict=False)
            )
            trajectories.remove(trajectory)
            continue
        assert trajectory.template_mismatch is None
        assert trajectory.logprob_kind in (LogprobKind.SAMPLED, LogprobKind.TEMPERED)
        (segment,) = trajectory.segments
        assert len(segment.media) in (1, 2)  # a first turn without a stop token is the last
        assert_as_trained(served, segment, served.engine.version)
    assert any(len(trajectory.segments[0].media) == 2 for trajectory in trajectories)
    first, other = (group.trajectories[0].segments[0] for group in groups)
    start = first.turn.index(0)
    assert list(first.token_ids[:start]) == list(other.token_ids[:start])


@pytest.mark.engines
def test_a_conversation_with_images_before_and_after_an_update(served: Served) -> None:
    served.publish(1)
    converse(served)
    change(served.model, 1)
    served.publish(2)
    converse(served)


@pytest.mark.engines
def test_a_broadcast_in_the_middle_of_a_turn(served: Served) -> None:
    version = served.engine.version
    request = Request(conversation="long", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=300))

    async def play(delay: float) -> Completion:
        running = asyncio.ensure_future(served.engine.generate(request))
        await asyncio.sleep(delay)
        change(served.model, 7)
        await served.engine.load_weights(version + 1, published_weights(served.model))
        return await running

    delay = 0.5
    for _ in range(8):  # the update may come before the first token, or after the last
        versions = list(served.runner.run(play(delay)).versions)
        switch = versions.index(version + 1) if version + 1 in versions else len(versions)
        assert versions == [version] * switch + [version + 1] * (300 - switch)
        version += 1
        if 0 < switch < 300:
            return
        delay *= 2 if switch == 0 else 0.5
    raise AssertionError("no update came in the middle of the turn")


@pytest.mark.engines
def test_a_broadcast_that_fails_leaves_the_old_weights(served: Served) -> None:
    version = served.engine.version
    name = next(name for name in published_weights(served.model) if name.endswith("q_proj.weight"))
    for bad in (None, torch.zeros(3, 4), torch.full((64, 64), torch.nan)):
        with pytest.raises(EngineError, match=f"version {version + 1} were not taken over"):
            served.publish(version + 1, **{name: bad})
        assert served.engine.version == version
        converse(served)
    served.publish(version + 1)  # and the next one arrives
    converse(served)


@pytest.mark.engines
def test_a_server_that_dies_gets_the_present_weights_by_a_new_group(served: Served) -> None:
    (replica,) = served.engine._replicas.all
    assert replica.process is not None
    change(served.model, 3)
    served.publish(served.engine.version + 1)
    replica.process.kill()
    converse(served)


# A rollout server with a real server behind it: conversations, all weights or an adapter in flight, and
# versions.


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["sglang", "vllm lora"])  # all weights, and an adapter
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
        train_silently(run)
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


# Faults of real servers: too little memory for the prompts, and a server that hangs. Death is in the suite of all
# engines.


TOKEN_BYTES = 2 * 3 * 2 * 32 * 4
"""A token in the KV cache of the demo's model: keys and values, 3 layers, 2 heads of 32 numbers."""


class SmallVllm(Vllm):
    """A KV cache of about one conversation of 2,048 tokens; with less, vLLM does not start."""

    memory_gb = 2400 * TOKEN_BYTES / 2**30


class TinyVllm(Vllm):
    """A KV cache of 600 tokens: less than the context of the model."""

    memory_gb = 600 * TOKEN_BYTES / 2**30


class SmallSglang(Sglang):
    """A KV cache of 1,200 tokens: less than the context of the model."""

    memory_gb = 1200 * TOKEN_BYTES / 2**30


@pytest.fixture(scope="module", params=[SmallVllm, SmallSglang], ids=lambda kind: kind.name)
def small(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = request.param()
    yield server
    server.close()


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 760) for _ in range(length)]


@pytest.mark.engines
def test_vllm_with_too_little_memory_is_not_started() -> None:
    with pytest.raises(EngineError, match=r"(?s)vLLM server 0 has ended .*KV cache"):
        TinyVllm()


@pytest.mark.engines
def test_prompts_that_need_more_memory_than_there_is_wait_for_each_other(small: Server) -> None:
    requests = [small.request(prompt(700, seed), max_tokens=40) for seed in range(6)]
    for request, completion in zip(requests, small.ask(*requests), strict=True):
        assert len(completion.token_ids) > 0
        assert_exact(small, request, completion)
    assert small.process.starts == 1


@pytest.mark.engines
def test_a_prompt_that_is_longer_than_the_memory_fails_alone(small: Server) -> None:
    """vLLM has the memory for each prompt that it accepts; see `test_vllm_with_too_little_memory_is_not_started`."""
    good = small.request(prompt(300, 1), max_tokens=8)

    async def both() -> tuple[object, object]:
        long = small.request(prompt(1500, 2), max_tokens=8)
        found = await asyncio.gather(small.engine.generate(long), small.engine.generate(good), return_exceptions=True)
        return found[0], found[1]

    first, answered = small.run(both())
    if isinstance(small, Vllm):
        assert isinstance(first, Completion)
        assert len(first.token_ids) == 8
    else:
        assert isinstance(first, EngineError)
        assert "1500" in str(first)
    assert isinstance(answered, Completion)
    assert_exact(small, good, answered)
    assert small.process.starts == 1


@pytest.mark.engines
@pytest.mark.parametrize("small", [SmallVllm], indirect=True, ids=["vllm"])  # the limits of answers know no engine
def test_a_server_that_hangs_is_started_again_and_its_requests_go_on(small: Server) -> None:
    limits = small.server.limits
    requests = [small.request(prompt(40, seed), max_tokens=300) for seed in (3, 4, 5)]

    async def play() -> list[Completion]:
        with small.slowed():
            tasks = await start_requests(small, requests[:2])
            starts, group = small.process.starts, small.process.pid
            assert group is not None
            os.killpg(group, signal.SIGSTOP)
            # the limit is short only while the server hangs, so that a slow machine is not taken for a hanging server
            small.server.limits = replace(limits, idle=2.0)
            tasks.append(asyncio.ensure_future(small.engine.generate(requests[2])))
            while small.process.starts == starts:
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.05)
            small.server.limits = limits
        return await asyncio.gather(*tasks)

    for request, completion in zip(requests, small.run(play()), strict=True):
        assert len(completion.token_ids) == 300
        assert_exact(small, request, completion)
    assert small.process.starts == 2
