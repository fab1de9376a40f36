"""Runs that train several policies: an adapter for each on one base, with rewards, credit, loss and learning rate of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support.hybrids import save_hybrid
from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import Silent, Started, overlap_surely, train_run, train_silently
from turnwise import assembly
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.doctor.memory import held_bytes, read_model_config
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.engine import SecondModel
from turnwise.errors import ConfigError
from turnwise.models.loading import ModelSource, load_model
from turnwise.record.metric_names import metric_of
from turnwise.record.reader import read
from turnwise.runs.replay import replay
from turnwise.train import _learn, _take, _weigh, assemble, train
from turnwise.training.learner import UpdateStats
from turnwise.training.local_learner import LocalLearner

GAME = """
from turnwise import Opening, Reply, SamplingChange, current_episode, environment

CUT = SamplingChange(max_tokens=4, answers_cut=True)

def liking(turn):
    ids = turn.completion.token_ids if turn.completion else turn.text.encode()
    return sum((n + 1) * token for n, token in enumerate(ids)) % 97 / 97

@environment
async def game(row, opponent="second", train=None):
    episode = current_episode()
    first = yield Opening(messages=row.messages, sampling=CUT)
    async with episode.agent("other", messages=row.messages, policy=opponent, sampling=CUT, train=train) as second:
        other = await second.turn()
        second.add_reward(liking(other))
    yield Reply(reward=liking(first), done=True)
"""
"""Two sides that do not see each other: what one learns does not change what the other samples in the same step."""

HELD = (
    "import asyncio, itertools\nfrom pathlib import Path\nUPDATING = Path(__file__).with_name('updating')\n"
    "NUMBERS = itertools.count()\n"
    + GAME.replace(
        "    async with",
        "    waits = next(NUMBERS) % 2\n"
        "    while waits and UPDATING.exists():\n"
        "        await asyncio.sleep(0.002)\n    async with",
    )
)
"""The other side of every second conversation waits for the end of an update that is running."""

QUARTERS = """
from turnwise import Opening, Reply, SamplingChange, current_episode, environment

ONE = SamplingChange(max_tokens=1, answers_cut=True)

def quarter(turn, part):
    return float(turn.completion.token_ids[0] % 4 == part)

@environment
async def quarters(row, first=0, second=2, policy="second"):
    mine = yield Opening(messages=row.messages, sampling=ONE)
    async with current_episode().agent("other", messages=row.messages, policy=policy, sampling=ONE) as agent:
        other = await agent.turn()
        agent.add_reward(quarter(other, second))
    yield Reply(reward=quarter(mine, first), done=True)
"""
"""Both sides answer the same prompt with one token, and each is rewarded for a quarter of the vocabulary of its own."""

DEMO = Path(__file__).parents[2] / "demo" / "model"
"""An adapter on tests/support's tiny model cannot learn this: the embedding of small random weights, which is also the output
layer and is frozen, keeps each logit within 0.9 of 0, so that no answer becomes likely."""


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(GAME, encoding="utf-8")
    path = save_recipe(
        tmp_path,
        model,
        policies={"second": {"train": True}},
        environment=f"{tmp_path}/game.py:game",
        data={"train": str(save_rows(tmp_path / "train.jsonl", 4)), "eval": str(save_rows(tmp_path / "eval.jsonl", 2))},
        limits={"turns": 2, "tokens_per_turn": 5},
        train={"steps": 3, "batch_size": 2, "group_size": 4, "lr": 0.01},
        checkpoint={"every": 1},
        deterministic=True,
    )
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["model"]["lora"] = {"rank": 4}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: timeless(item) for name, item in value.items() if not name.startswith("seconds") and name != "started"
        }
    return [timeless(item) for item in value] if isinstance(value, list) else value


def adapter(out: Path, name: str = "") -> dict[str, torch.Tensor]:
    folder = out / "checkpoint" / "policies" / name if name else out / "checkpoint"
    return load_file(folder / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_each_policy_learns_from_its_own_conversations_and_a_resumed_run_has_the_same_bits(
    recipe: Path, tmp_path: Path
) -> None:
    policies = "policies={second: {train: true, lr: 0.02, lora: {rank: 2, target_modules: [q_proj, v_proj]}}}"
    trajectories, metrics, _ = train_run(recipe, tmp_path / "whole", policies)
    first = [one for one in trajectories if one["step"] == 1]
    played = [one for one in first if one.get("policy") == "second"]
    assert len(played) == 8
    for one in played:
        assert (one.get("trained", True), one["turns"][0]["weight"]) == (True, 1.0)
        assert one["group"].endswith("/other@second")
    for group in {one["group"] for one in played}:
        advantages = [one["turns"][0]["advantage"] for one in played if one["group"] == group]
        assert sum(advantages) == pytest.approx(0, abs=1e-6)
        assert any(advantages)
    for prefix in ("", "policies/second/"):
        assert metrics[0][f"{prefix}grad_norm"] > 0
        assert metrics[0][f"{prefix}ratio/max_deviation"] < 1e-4  # its engine sampled with the weights that it trains
    assert (metrics[0]["lr"], metrics[0]["policies/second/lr"]) == (0.01, 0.02)
    for prefix, policy in (("", ""), ("policies/second/", "second")):  # equal conversations are computed once
        of_policy = {
            (one["group"], tuple(segment["token_ids"])): sum(turn >= 0 for turn in segment["turn"])
            for one in first
            if one.get("policy", "") == policy and one["turns"][0]["advantage"]
            for segment in one["segments"]
        }
        assert metrics[0][f"{prefix}tokens/trained"] == sum(of_policy.values())
    assert metrics[0]["agents/other@second/reward/mean"] is not None
    assert all(metric_of(name) is not None for name in metrics[0])
    own = adapter(tmp_path / "whole", "second")
    assert {tensor.shape[0] for name, tensor in own.items() if "lora_A" in name} == {2}
    assert all("q_proj" in name or "v_proj" in name for name in own)
    assert any(tensor.any() for name, tensor in own.items() if "lora_B" in name)
    train_run(recipe, tmp_path / "resumed", policies, "train.steps=2")
    resumed, lines, _ = train_run(recipe, tmp_path / "resumed", policies, "resume=auto")
    assert timeless(resumed) == timeless(trajectories)
    assert timeless(lines) == timeless(metrics)
    for name in ("", "second"):
        assert same(adapter(tmp_path / "whole", name), adapter(tmp_path / "resumed", name))
    assert [one for one in asyncio.run(replay(tmp_path / "whole")) if one.differences or one.skipped] == []


@pytest.mark.slow
def test_the_gradients_of_each_adapter_are_those_of_a_run_in_which_only_it_is_trained(
    recipe: Path, tmp_path: Path
) -> None:
    """In one step: with both trained, with the second one not trained on, and with the first one masked out of the loss."""

    def gradients(out: str, *overrides: str) -> dict[str, list[torch.Tensor]]:
        run = assemble(load(recipe, ["train.max_grad_norm=1e9", f"output={tmp_path / out}", *overrides])[0])
        found: dict[str, list[torch.Tensor]] = {}

        async def step() -> None:
            async with run.pipeline:
                for policy in run.policies:
                    await policy.publisher.begin(0)
                taken = await _take(run)
                _weigh(run, taken.groups)
                if out == "second":
                    for group in run.policies[0].own(taken.trained):
                        for trajectory in group.trajectories:
                            for turn in trajectory.turns:
                                turn.weight = 0.0
                await _learn(run, taken.trained)

        def keep(policy: Any) -> Any:
            def kept(lr: float) -> float:
                parameters = [p for p in policy.learner.model.parameters() if p.requires_grad]
                found[policy.name] = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
                return 0.0

            return kept

        for policy in run.policies:
            policy.learner.step = keep(policy)  # type: ignore[attr-defined]
        asyncio.run(step())
        run.directory.release()
        return found

    both = gradients("both")
    first, second = gradients("first", "environment.arguments.train=false"), gradients("second")
    assert any(gradient.any() for gradient in both[""])
    assert any(gradient.any() for gradient in both["second"])
    assert all(map(torch.equal, both[""], first[""]))
    assert "second" not in first
    assert all(map(torch.equal, both["second"], second["second"]))
    assert not any(gradient.any() for gradient in second[""])


FULL = ("model.lora.rank=null", "train.minibatches=2")
"""The main model is trained with all its weights, and updated in two optimizer steps."""


@pytest.mark.parametrize("engine", ["", pytest.param("memory_gb: 0.1, ", marks=pytest.mark.slow)])
def test_adapters_on_a_model_that_is_trained_with_all_its_weights(
    recipe: Path, model: Path, tmp_path: Path, engine: str
) -> None:
    """They are on the weights that the main model has in each step, and each checkpoint has both."""
    options = [*FULL, f"policies={{second: {{{engine}train: true, lr: 0.02, lora: {{rank: 2}}}}}}", "data.eval=null"]
    trajectories, metrics, run = train_run(recipe, tmp_path / "whole", *options)
    (_, second) = run.policies
    assert isinstance(run.learner, LocalLearner)
    assert isinstance(second.learner, LocalLearner)
    assert isinstance(run.context.policies["second"].engine, LocalEngine if engine else SecondModel)
    shared = {one.data_ptr() for one in run.learner.model.parameters()}
    base = [one for one in second.learner.model.parameters() if not one.requires_grad]
    assert {one.data_ptr() for one in base} == shared, "no weights are kept twice"
    for line in metrics:  # what an engine has sampled is what the learner trains on, also beside the main update
        assert max(line["ratio/max_deviation"], line["policies/second/ratio/max_deviation"]) < 1e-4
        assert min(line["grad_norm"], line["policies/second/grad_norm"]) > 0
    before, after = load_file(model / "model.safetensors"), weights(tmp_path / "whole")
    assert not all(torch.equal(before[name], after[name]) for name in before)
    train_run(recipe, tmp_path / "resumed", *options, "train.steps=2")
    resumed, lines, _ = train_run(recipe, tmp_path / "resumed", *options, "resume=auto")
    assert (timeless(resumed), timeless(lines)) == (timeless(trajectories), timeless(metrics))
    assert same(adapter(tmp_path / "whole", "second"), adapter(tmp_path / "resumed", "second"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "resumed"))
    # evaluated, the adapter is on the weights beside it, wherever the checkpoint is
    saved = (tmp_path / "whole" / "checkpoint" / "policies" / "second").resolve()
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(saved.parents[1])
    moved = (tmp_path / "whole" / "checkpoint").resolve().rename(tmp_path / "moved")
    loaded = load_model(ModelSource(path=str(moved / "policies" / "second")))
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, second.learner.model(ids).logits, atol=1e-5)


@pytest.mark.slow
def test_adapters_on_weights_that_change_while_conversations_run(recipe: Path, tmp_path: Path) -> None:
    """Turns that the present weights have sampled have the learner's log-probabilities, though another conversation of the group
    had the same prompt computed with the weights before."""
    (tmp_path / "held.py").write_text(HELD, encoding="utf-8")
    options = [
        *FULL,
        "policies={second: {train: true, lr: 0.02, lora: {rank: 2}}}",
        f"environment.use={tmp_path}/held.py:game",
        "train.max_staleness=1",
        "train.steps=5",
        "deterministic=false",
    ]
    run = assemble(load(recipe, [*options, f"output={tmp_path / 'run'}"])[0])
    overlap_surely(run)
    found: dict[str, list[UpdateStats]] = {policy.name: [] for policy in run.policies}
    updating = tmp_path / "updating"

    def keep(policy: Any) -> Any:
        update = policy.learner.update

        async def kept(*args: Any, **options: Any) -> UpdateStats:
            updating.touch()
            found[policy.name].append(await update(*args, **options))
            return found[policy.name][-1]

        return kept

    for policy in run.policies:
        policy.learner.update = keep(policy)  # type: ignore[attr-defined]
    publisher = run.policies[-1].publisher
    publish = publisher.publish

    async def published(version: int) -> None:
        await publish(version)
        updating.unlink(missing_ok=True)

    publisher.publish = published  # type: ignore[method-assign]
    train_silently(run)
    trajectories = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    of_second = [one for one in trajectories if one.get("policy") == "second"]
    sampled_by = {(one["step"] - 1 - version) for one in of_second for version in versions(one)}
    assert sampled_by == {0, 1}, "by the weights that are trained, and by those before"
    after = {one["group"] for one in of_second if one["step"] > 1 and versions(one) == {one["step"] - 1}}
    before = {one["group"] for one in of_second if versions(one) == {one["step"] - 2}}
    assert after & before, "some groups had their prompt computed by both"
    assert [len(stats) for stats in found.values()] == [5, 5]
    assert max(one.fresh_deviation for stats in found.values() for one in stats) < 1e-4
    assert max(one.max_deviation for one in found["second"]) > 1e-3, "the weights before are others"


def versions(trajectory: dict[str, Any]) -> set[int]:
    return {version for segment in trajectory["segments"] for version in segment["version"]} - {-1}


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoint" / "model.safetensors")


@pytest.mark.slow
def test_options_of_a_policy_change_what_it_learns_and_nothing_else_in_the_first_step(
    recipe: Path, tmp_path: Path
) -> None:
    def first_step(out: str, options: str) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
        overrides = [f"policies={{second: {{train: true{options}}}}}", "train.steps=1", "train.minibatches=2"]
        trajectories, metrics, _ = train_run(recipe, tmp_path / out, "data.eval=null", *overrides)
        return metrics[0], trajectories, tmp_path / out

    plain, trajectories, whole = first_step("plain", "")
    for number, options in enumerate(
        (
            ", lr: 0.05",
            ", loss: {name: ppo_clip, kl_coef: 0.5}",
            ", credit: {name: grpo, scale: none}",
            ", temperature: 0.5",
            ", lora: 8",
        )
    ):
        changed, others, out = first_step(str(number), options)
        assert same(adapter(out), adapter(whole))
        assert not same(adapter(out, "second"), adapter(whole, "second"))
        assert (changed["loss"], changed["grad_norm"]) == (plain["loss"], plain["grad_norm"])
        sampled = [[timeless(one["messages"]) for one in of if one.get("policy")] for of in (trajectories, others)]
        assert (sampled[0] == sampled[1]) is (options != ", temperature: 0.5")


@pytest.mark.slow
def test_an_evaluation_of_the_checkpoint_plays_with_all_its_adapters(recipe: Path, tmp_path: Path) -> None:
    trajectories, _, _ = train_run(recipe, tmp_path / "run", "train.lr=0.3")
    checkpoint = tmp_path / "run" / "checkpoint"
    greedy = ["eval.sampling.temperature=0", "eval.samples_per_row=1"]
    said: dict[str, list[tuple[str, str]]] = {}
    for name, options in {
        "trained": [f"model.path={checkpoint}", "model.lora.rank=null"],
        "before": ["model.lora.rank=null"],
    }.items():
        assert main(["eval", str(recipe), "--out", str(tmp_path / name), *greedy, *options]) == 0
        (file,) = (tmp_path / name).glob("*/trajectories.jsonl")
        said[name] = [(one.policy, one.turns[0].text) for one in read(file.parent)]
    assert [policy for policy, _ in said["trained"]] == [policy for policy, _ in said["before"]] == ["second", ""] * 2
    for policy in ("", "second"):
        assert [text for own, text in said["trained"] if own == policy] != [
            text for own, text in said["before"] if own == policy
        ]
    # before training both are the same model
    assert [text for own, text in said["before"] if own] == [text for own, text in said["before"] if not own]
    assert trajectories


def test_memory_counts_the_adapters_of_further_policies(recipe: Path, model: Path) -> None:
    config = read_model_config(str(model))

    def needed(policies: str) -> float:
        return held_bytes(load(recipe, [f"policies={policies}"])[0], config, "train")

    cache = 2**20
    one = needed("{second: {train: true, memory_gb: 0.0009765625}}") - needed("{}") - cache
    assert one > 0
    assert needed("{second: {train: true, memory_gb: 0.0009765625, lora: 8}}") - needed("{}") - cache == pytest.approx(
        2 * one
    )


@pytest.mark.slow
def test_a_policy_that_no_agent_uses_is_warned_of_once(recipe: Path, tmp_path: Path) -> None:
    policies = "policies={second: {train: true}, third: {train: true}}"
    _, metrics, run = train_run(recipe, tmp_path / "run", policies, "train.steps=4")
    warnings = [json.loads(line) for line in (tmp_path / "run" / "warnings.jsonl").read_text().splitlines()]
    (unused,) = [one for one in warnings if one["name"] == "unused_policy"]
    assert unused["step"] == 3
    assert "the trained policy 'third' took no turn to train on in 3 steps" in unused["text"]
    assert "policies/second/loss" in metrics[0]
    assert "policies/third/loss" not in metrics[0]
    assert run.step == 4


@pytest.mark.slow
def test_a_policy_whose_rewards_never_differ_is_warned_of_once(recipe: Path, tmp_path: Path) -> None:
    game = tmp_path / "game.py"
    game.write_text(game.read_text(encoding="utf-8").replace("add_reward(liking(other))", "add_reward(1.0)"))
    train_run(recipe, tmp_path / "run", "train.steps=4")
    warnings = [json.loads(line) for line in (tmp_path / "run" / "warnings.jsonl").read_text().splitlines()]
    (equal,) = [one for one in warnings if one["name"] == "constant_reward_of_policy"]
    assert equal["step"] == 3
    assert "a group of the trained policy 'second' had the same reward" in equal["text"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policies={a: {train: true, path: m}}"], "path is an option of frozen policies, and train=true"),
        (["policies={a: {path: m, lr: 1}}"], "lr has no effect on a frozen policy: set train=true"),
        (["policies={a: {path: m, credit: rloo}}"], "credit has no effect on a frozen policy"),
        (["policies={a: {train: true, lora: {alpha: 3}}}"], "lora needs rank"),
        (["policies={a: {train: true, temperature: 0}}"], "temperature=0 makes all conversations of a row identical"),
        (["policies={a: {train: true}, A: {train: true}}"], "'a' and 'A' would write one adapter"),
        (["policies={a: {train: true, loss: {name: gspo, alpha: 3}}}"], "policies.0.loss.alpha"),
        (["policies={a: {train: true, loss: nothing}}"], "policies.0.loss.name: there is no loss 'nothing'"),
        (["model.lora.rank=null"], "neither its lora nor model.lora has a rank"),
        (
            ["model.lora.rank=null", "policies={a: {train: true, lora: 2}}", "engine=vllm", "deterministic=false"],
            "engine.name=vllm has adapters on constant weights only: give the policy an embedded engine",
        ),
        (["reward.kl.coef=0.1"], "reward.kl.coef=0.1 is the divergence of one policy only: set loss.kl_coef"),
        (["teacher.path=m"], "the recipe has a teacher, which scores the turns of one policy only"),
        (
            ["policies={a: {train: true, credit: gae}}"],
            "the policy 'a': its credit.name=gae or its loss needs a critic",
        ),
        (["credit=gae"], "the policy 'second': its credit.name=gae"),
        (
            ["policies={a: {train: true, loss: {clip_low: 0.1}}}"],
            "the policy 'a': loss.clip_low has no effect with one",
        ),
        (
            ["policies={a: {train: true, loss: {kl_estimator: k2}}}"],
            "the policy 'a': loss.kl_estimator=k2 has no effect",
        ),
        (["cluster.launcher=torchrun", "deterministic=false"], "divide the weights of one policy"),
        (["rollout_server.url=http://h", "deterministic=false"], "processes that receive the weights of one policy"),
    ],
)
def test_what_does_not_apply_to_trained_policies_is_refused_at_the_start(
    recipe: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_without_effect(load(recipe, overrides)[0])


def test_a_process_whose_weights_a_trainer_elsewhere_sends_refuses_trained_policies(recipe: Path) -> None:
    config, _ = load(recipe)

    async def serve() -> None:
        async with assembly.conversation_host(config, assembly.renderer(config)):
            pass

    with pytest.raises(ConfigError, match="a trainer in another process sends the weights of one policy"):
        asyncio.run(serve())


@pytest.mark.slow
def test_a_policy_that_joins_a_resumed_run_begins_with_a_new_adapter(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_run(recipe, out, "policies={}", "environment.arguments.opponent=null", "train.steps=1")
    names = ["policies[].name", "policies[].train", "environment.arguments"]
    every = ["path", "dtype", "bits", "endpoint", "reference", "temperature", "top_p", "top_k", "min_p", "lora", "lr"]
    named = [*names, *(f"policies[].{name}" for name in (*every, "loss", "credit"))]
    run = assemble(load(recipe, [f"output={out}", "resume=auto", f"resume_changes={json.dumps(named)}"])[0])
    assert "the policy 'second' begins now: the checkpoint has no adapter of it" in run.notes
    asyncio.run(train(run, Silent()))
    assert run.step == 3
    assert any(tensor.any() for name, tensor in adapter(out, "second").items() if "lora_B" in name)


@pytest.mark.slow
def test_kill_minus_nine_of_a_run_of_two_policies_changes_no_bit(recipe: Path, tmp_path: Path) -> None:
    """Also of the values of rows, which each policy has of its own."""
    spo = "{name: spo, whiten: false}"
    options = [
        f"policies={{second: {{train: true, lr: 0.02, credit: {spo}}}}}",
        f"credit={spo}",
        "train.steps=7",
        "resume=auto",
    ]
    straight = Started(recipe, *options, f"output={tmp_path / 'straight'}", fresh=True)
    assert straight.wait() == 0, straight.log.read_text()
    killed = tmp_path / "killed"
    for count, delay in ((1, 0.0), (3, 0.13), (5, 0.02)):
        Started(recipe, *options, f"output={killed}").kill_after_steps(killed / "metrics.jsonl", count, delay)
    last = Started(recipe, *options, f"output={killed}")
    assert last.wait() == 0, last.log.read_text()
    for name in ("trajectories.jsonl", "metrics.jsonl", "evaluations.jsonl"):
        written = [
            [json.loads(line) for line in (out / name).read_text().splitlines()]
            for out in (tmp_path / "straight", killed)
        ]
        assert timeless(written[0]) == timeless(written[1]), name
    for name in ("", "second"):
        assert same(adapter(tmp_path / "straight", name), adapter(killed, name))
    states = [
        json.loads((out / "checkpoint" / ".." / "checkpoint.json").read_text())
        for out in (tmp_path / "straight", killed)
    ]
    assert states[0]["place"]["values"] == states[1]["place"]["values"]
    assert states[0]["place"]["values"].keys() == {"", "second"}


@pytest.mark.slow
@pytest.mark.parametrize("memory_gb", [None, 0.05])
def test_a_frozen_policy_with_recurrent_layers_resumes_with_the_same_bits(
    recipe: Path, tmp_path: Path, memory_gb: float | None
) -> None:
    """In the batches of the trained model's engine, and with an engine of its own. A recurrent state that is continued from a
    prefix of an earlier step has other last bits than one that is computed at once."""
    hybrid = save_hybrid(tmp_path / "hybrid", "qwen3_next")
    (tmp_path / "game.py").write_text(GAME.replace("max_tokens=4", "max_tokens=30"), encoding="utf-8")
    options = [
        f"model.path={hybrid}",
        f"policies={{second: {{path: {hybrid}{'' if memory_gb is None else f', memory_gb: {memory_gb}'}}}}}",
        f"data.train={save_rows(tmp_path / 'two.jsonl', 2)}",
        "limits.tokens_per_turn=30",
        "train.steps=4",
    ]
    whole, metrics, run = train_run(recipe, tmp_path / "whole", *options)
    assert isinstance(run.context.policies["second"].engine, SecondModel if memory_gb is None else LocalEngine)
    train_run(recipe, tmp_path / "resumed", *options, "train.steps=2")
    resumed, of_resumed, _ = train_run(recipe, tmp_path / "resumed", *options, "resume=auto")
    assert timeless(resumed) == timeless(whole)
    assert timeless(of_resumed) == timeless(metrics)
    sampled_by = {(one["step"] - 1, versions(one).pop()) for one in whole if one.get("policy", "") == ""}
    assert sampled_by == {(step, step) for step in range(4)}, "the trained model keeps its numbers"


@pytest.mark.slow
def test_two_policies_learn_what_one_policy_cannot_and_a_frozen_one_does_not(tmp_path: Path) -> None:
    """By the mean rewards of the last 5 of 20 steps of 16 conversations (docs/agents_in_episodes.md has values)."""
    (tmp_path / "quarters.py").write_text(QUARTERS, encoding="utf-8")
    recipe = save_recipe(
        tmp_path,
        DEMO,
        environment=f"{tmp_path}/quarters.py:quarters",
        data={"train": str(save_rows(tmp_path / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 5},
        train={"steps": 20, "batch_size": 2, "group_size": 8, "lr": 0.003},
        checkpoint={"every": 100},
        deterministic=True,
        seed=0,
    )

    def last_rewards(name: str, *overrides: str) -> tuple[float, float]:
        trajectories, metrics, _ = train_run(recipe, tmp_path / name, "model.lora.rank=4", *overrides)
        for line in metrics:  # after each update, the engine of each policy samples with the new weights of that policy
            assert (line["ratio/max_deviation"] or 0) < 1e-3
            assert line.get("policies/second/ratio/max_deviation", 0) < 1e-3
        main, other = (
            [one["reward"] for one in trajectories if bool(one.get("agent")) is agent and one["step"] > 15]
            for agent in (False, True)
        )
        assert len(main) == len(other) == 80
        return sum(main) / 80, sum(other) / 80

    assert min(last_rewards("two", "policies={second: {train: true}}")) > 0.8
    assert sum(last_rewards("one", "environment.arguments.policy=null")) < 1.3
    main, other = last_rewards("frozen", f"policies={{second: {DEMO}}}")
    assert main > 0.8
    assert other < 0.5
