"""The critic: values and gradients of a plain float64 computation, and runs with a critic."""

from __future__ import annotations

import asyncio
import copy
import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from support.recipes import save_recipe
from support.tiny import save_model, tiny_model
from support.training import train_silently
from test_train import PLACES, lines, run, timeless
from training.test_batch import conversations, group, trajectory
from turnwise.config.recipe import checked, load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.engines.engine import SharedWeights
from turnwise.errors import ConfigError, RunError
from turnwise.models.lora import add_adapter, with_second_adapter
from turnwise.options.algorithm import LoraSection
from turnwise.train import assemble
from turnwise.training.local_critic import LocalCritic
from turnwise.training.update import StopFlag
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.training.value_model import explained_variance, mean_value
from turnwise.types import Trajectory

# Where the engine gives its memory to the trainer, all passes of trainer and critic are before it takes the memory back.


def test_the_critic_is_trained_and_memory_is_given_back_before_an_engine_on_the_same_gpu_wakes(tmp_path: Path) -> None:
    events: list[str] = []
    recipe = save_recipe(
        tmp_path, save_model(tmp_path / "model"), credit="gae", train={"steps": 1, "batch_size": 2, "group_size": 2}
    )
    made = assemble(load(recipe)[0])
    assert made.critic_step is not None

    class Asleep(SharedWeights):
        async def before_update(self) -> None:
            events.append("sleeps")
            self.asleep = True
            await super().before_update()

        async def publish(self, version: int) -> None:
            events.append("wakes")
            self.asleep = False
            for optimizer in (made.learner._optimizer, made.critic_step.critic._optimizer):  # type: ignore[union-attr]
                assert all(parameter.grad is None for parameter in optimizer.parameters)
            await super().publish(version)

    def noting(owner: Any, method: str) -> None:
        plain = getattr(owner, method)

        async def call(*arguments: Any, **options: Any) -> Any:
            events.append(f"{type(owner).__name__}.{method}")
            return await plain(*arguments, **options)

        setattr(owner, method, call)

    for owner, method in (
        (made.critic_step.critic, "values"),
        (made.critic_step.critic, "update"),
        (made.learner, "update"),
    ):
        noting(owner, method)
    (policy,) = made.policies
    made.policies = [replace(policy, publisher=Asleep(made.runner._engine))]  # type: ignore[attr-defined]
    train_silently(made)
    assert events == ["sleeps", "LocalCritic.values", "LocalLearner.update", "LocalCritic.update", "wakes"]


# The critic's values and gradients are those of a plain float64 computation, however the states are packed.


Level = Literal["turn", "token"]

LEVELS: tuple[Level, ...] = ("turn", "token")

CLIP = 0.2


def critic(model: Any | None = None, *, seed: int = 1, **options: Any) -> LocalCritic:
    """A critic whose head is not zero."""
    made = LocalCritic(model or tiny_model(), **options)
    with torch.no_grad():
        made._head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
        made._head.bias.fill_(0.25)
    return made


def packing(level: Level, **options: Any) -> ValuePacking:
    return ValuePacking(level=level, **{"micro_batch_tokens": 2048, **options})


def estimated(one: LocalCritic, trajectories: list[Trajectory], level: Level, **options: Any) -> list[Any]:
    batch = pack_states(trajectories, packing(level, **options))
    set_values(trajectories, asyncio.run(one.values(batch)), level)
    return [list(one.values) for one in trajectories]


def states(trajectory: Trajectory, level: Level) -> dict[int, list[tuple[int, int]]]:
    """For each turn, the segment and the position of the tokens before which there is a state: one position at a time."""
    found: dict[int, list[tuple[int, int]]] = {turn.index: [] for turn in trajectory.turns}
    for number, segment in enumerate(trajectory.segments):
        for position, turn in enumerate(segment.turn):
            if turn >= 0 and (level == "token" or not found[turn]):
                found[turn].append((number, position))
    return found


def plain_values(one: LocalCritic, trajectory: Trajectory, level: Level) -> list[list[torch.Tensor]]:
    """The values of a trajectory's states in float64."""
    values = plain_values_of_segments(*in_float64(one), trajectory)
    return [
        [values[number][position - 1] for number, position in places] for places in states(trajectory, level).values()
    ]


def in_float64(one: LocalCritic) -> tuple[Any, Any]:
    """Copies of the critic's model and head."""
    return copy.deepcopy(one._model).double(), copy.deepcopy(one._head).double()


def plain_values_of_segments(model: Any, head: Any, trajectory: Trajectory) -> list[torch.Tensor]:
    """The values after each token, of each segment alone: a state is before a token, so its value is that of the token before."""
    return [head(model.model(torch.tensor([list(one.token_ids)]))[0][0])[:, 0] for one in trajectory.segments]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"micro_batch_tokens": 1}, {"parallel": 3}])
def test_values_are_those_of_the_sequence_before_each_state(level: Level, options: dict[str, Any]) -> None:
    one, trajectories = critic(), [*group(), *conversations()]
    for found, conversation in zip(estimated(one, trajectories, level, **options), trajectories, strict=True):
        expected = [[float(value.detach()) for value in turn] for turn in plain_values(one, conversation, level)]
        if level == "turn":
            assert found == pytest.approx([turn[0] for turn in expected if turn], abs=1e-5)
        else:
            assert [list(turn) for turn in found] == [pytest.approx(turn, abs=1e-5) for turn in expected]


def test_a_new_critic_estimates_0() -> None:
    assert estimated(LocalCritic(tiny_model()), group(), "turn") == [[0.0, 0.0], [0.0], [0.0], [0.0]]


def test_values_do_not_depend_on_order_nor_on_masked_turns() -> None:
    one, trajectories = critic(), group()
    expected = {t.id: values for t, values in zip(trajectories, estimated(one, trajectories, "token"), strict=True)}
    shuffled = group()[::-1]
    shuffled[3].turns[0].weight = 0.0
    for conversation, values in zip(shuffled, estimated(one, shuffled, "token"), strict=True):
        for own, theirs in zip(values, expected[conversation.id], strict=True):
            assert own == pytest.approx(theirs, abs=1e-6)


def test_a_turn_without_tokens_has_the_value_of_the_next_turn() -> None:
    conversation = trajectory("x", [("context", [5]), ("turn", []), ("turn", [8, 9]), ("turn", [7]), ("turn", [])], [])
    set_values([conversation], [0.5, 0.25], "turn")
    assert conversation.values == [0.5, 0.5, 0.25, 0.0]
    set_values([conversation], [0.5, 0.75, 0.25], "token")
    assert conversation.values == [[], [0.5, 0.75], [0.25], []]


def test_a_turn_in_two_segments_has_one_state_before_it_and_one_before_each_token() -> None:
    conversation = trajectory(
        "x", [("context", [5, 6]), ("turn", [8]), ("new segment", []), ("context", [5, 7]), ("turn", [9, 10])], []
    )
    conversation.segments[1].turn[:] = array(
        conversation.segments[1].turn.typecode, [-1, -1, 0, 0]
    )  # as where a turn was continued in a new segment
    conversation.turns = conversation.turns[:1]
    one = critic()
    (by_turn,), (by_token,) = (estimated(one, [conversation], level) for level in LEVELS)
    expected = [float(value.detach()) for value in plain_values(one, conversation, "token")[0]]
    assert by_token[0] == pytest.approx(expected, abs=1e-5)
    assert by_turn == pytest.approx(expected[:1], abs=1e-5)


def with_targets(one: LocalCritic, level: Level) -> list[Trajectory]:
    """Conversations with old values that lie off the present ones by more or less than the clip bound, and with returns."""
    trajectories = [*group(), *conversations()]
    trajectories[0].turns[1].weight = 0.5
    trajectories[4].turns[0].weight = 0.0
    generator = np.random.default_rng(0)

    def changed(entry: Any, spread: float) -> Any:
        if isinstance(entry, float):
            return float(entry + generator.normal(scale=spread))
        return [changed(number, spread) for number in entry]

    estimated(one, trajectories, level)
    for conversation in trajectories:
        conversation.returns = changed(conversation.values, 1.0)
        conversation.values = changed(conversation.values, CLIP)
    trajectories[2].returns = []  # not trained on
    return trajectories


def plain_loss(
    one: LocalCritic, trajectories: list[Trajectory], level: Level
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients and number of clipped states in float64, written from the formula."""
    model, head = in_float64(one)
    total, weights, clipped = torch.zeros((), dtype=torch.float64), 0.0, 0
    for conversation in trajectories:
        if not conversation.returns:
            continue
        values = plain_values_of_segments(model, head, conversation)
        for turn, places in states(conversation, level).items():
            weight = conversation.turns[turn].weight
            old, target = conversation.values[turn], conversation.returns[turn]
            for rank, (number, position) in enumerate(places):
                value = values[number][position - 1]
                v_old = old if isinstance(old, float) else old[rank]
                goal = target if isinstance(target, float) else target[rank]
                near = torch.clamp(value, v_old - CLIP, v_old + CLIP)
                errors = (value - goal) ** 2, (near - goal) ** 2
                total = total + weight * 0.5 * torch.maximum(*errors)
                weights += weight
                clipped += int(weight > 0 and bool(errors[1] > errors[0]))
    (total / weights).backward()
    gradients = {f"body.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"head.{name}": p.grad for name, p in head.named_parameters() if p.grad is not None}
    return float(total.detach()) / weights, gradients, clipped


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"micro_batch_tokens": 1}])
def test_loss_and_gradients_are_those_of_the_formula(level: Level, options: dict[str, Any]) -> None:
    one = critic(clip=CLIP)
    trajectories = with_targets(one, level)
    loss, expected, clipped = plain_loss(one, trajectories, level)
    batch = pack_value_targets(trajectories, packing(level, **options))
    sums = one.accumulate(batch.micro_batches, lambda: None, StopFlag())
    assert sums.loss == pytest.approx(loss, rel=1e-5)
    assert sums.clipped == clipped
    assert 0 < clipped < sums.states
    found = {f"body.{name}": p.grad for name, p in one._model.named_parameters() if p.grad is not None}
    found |= {f"head.{name}": p.grad for name, p in one._head.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].double(), gradient, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_explained_variance_of_known_numbers() -> None:
    trajectories = group()
    for one, value, target in zip(trajectories, (0.5, 0.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0), strict=True):
        one.values, one.returns = [value] * len(one.turns), [target] * len(one.turns)
    batches = [pack_value_targets(part, packing("turn")) for part in (trajectories[:2], trajectories[2:])]
    # returns 1 1 0 1 0, errors 0.5 0.5 0 0 0
    assert explained_variance(batches) == pytest.approx(1 - 0.06 / 0.24)
    assert mean_value(batches) == pytest.approx(0.4)
    assert explained_variance([]) is None
    for one in trajectories:
        one.returns = [1.0] * len(one.turns)
    assert explained_variance([pack_value_targets(trajectories, packing("turn"))]) is None


def test_numbers_that_do_not_fit_the_states_are_refused() -> None:
    conversation = group()[0]
    conversation.values, conversation.returns = [[0.0, 0.0, 0.0], [0.0]], [[0.0, 0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match=r"trajectory a: turn 1 has 2 states and 1 numbers in Trajectory\.values"):
        pack_value_targets([conversation], packing("token"))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_critic_learns_fixed_returns(level: Level) -> None:
    one = LocalCritic(tiny_model(), clip=0.5)
    trajectories = group()

    def explained(update: bool = True) -> float:
        estimated(one, trajectories, level)
        for conversation, goal in zip(trajectories, (1.0, 0.0, 1.0, -1.0), strict=True):
            conversation.returns = [
                goal if isinstance(entry, float) else [goal] * len(entry) for entry in conversation.values
            ]
        batch = pack_value_targets(trajectories, packing(level))
        if update:
            asyncio.run(one.update([batch], lr=3e-3, epochs=2))
        return explained_variance([batch]) or 0.0

    first = explained()
    for _ in range(40):
        explained()
    assert first == 0.0
    # a, b and c begin in the same state with different returns, so their mean is the best estimate
    assert explained(update=False) == pytest.approx({"turn": 0.7917, "token": 0.9078}[level], abs=0.01)


def test_an_adapter_of_the_critic_is_on_the_policys_weights_and_changes_nothing_of_the_policy() -> None:
    policy = tiny_model()
    options = LoraSection(rank=4, alpha=8)
    add_adapter(policy, options)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = policy(ids).logits
    second = with_second_adapter(policy, options)
    pointers = {parameter.data_ptr() for parameter in policy.parameters() if not parameter.requires_grad}
    assert {parameter.data_ptr() for parameter in second.parameters() if not parameter.requires_grad} == pointers
    one = critic(second)
    trajectories = with_targets(one, "turn")
    old = plain_values(one, trajectories[0], "turn")
    asyncio.run(one.update([pack_value_targets(trajectories, packing("turn"))], lr=1e-2, epochs=3))
    assert abs(float((plain_values(one, trajectories[0], "turn")[0][0] - old[0][0]).detach())) > 1e-3
    with torch.no_grad():
        assert torch.equal(policy(ids).logits, before)
    assert not any(parameter.grad is not None for parameter in policy.parameters())


def test_a_saved_critic_is_the_same_critic(tmp_path: Path) -> None:
    one = critic()
    one.save(tmp_path)
    other = LocalCritic(type(one._model).from_pretrained(tmp_path).eval(), folder=tmp_path)
    assert estimated(other, group(), "token") == estimated(one, group(), "token")
    (tmp_path / "value_head.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the value head .* cannot be read"):
        LocalCritic(tiny_model(), folder=tmp_path)
    one.save(tmp_path)
    with pytest.raises(ConfigError, match=r"shapes .*\(1, 32\).* needs .*\(1, 64\)"):
        LocalCritic(tiny_model(hidden_size=64), folder=tmp_path)


def test_bfloat16_weights_have_a_float32_head(tmp_path: Path) -> None:
    exact = critic()
    exact.save(tmp_path)
    one = LocalCritic(tiny_model().to(torch.bfloat16), folder=tmp_path)
    found, expected = estimated(one, group(), "turn"), estimated(exact, group(), "turn")
    assert np.concatenate(found) == pytest.approx(np.concatenate(expected), abs=0.1)
    trajectories = with_targets(one, "turn")
    before = one._head.weight.detach().clone()
    asyncio.run(one.update([pack_value_targets(trajectories, packing("turn"))], lr=1e-5))
    assert one._head.weight.dtype == torch.float32
    assert float((one._head.weight - before).detach().abs().max()) == pytest.approx(1e-5, rel=0.05)


# Runs with a critic: values before credit, an update in each step, a checkpoint of the critic, and options that take
# effect.


ESTIMATORS = ("gae", "turn_gae", "critic", "bilevel_gae")

NAMES = {f"critic/{name}" for name in ("loss", "explained_variance", "clip_fraction", "grad_norm", "value_mean")}


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        credit={"name": "turn_gae"},
        critic={"lr": 0.01},
        train={"steps": 4, "batch_size": 2, "group_size": 4, "lr": 0.01},
        deterministic=True,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_run_with_each_estimator_trains_policy_and_critic(recipe: Path, tmp_path: Path, name: str) -> None:
    sizes = ("train.steps=14", "train.minibatches=2", "train.batch_size=4", "train.group_size=8")
    run(recipe, f"credit.name={name}", *sizes, "critic.lr=0.003")
    steps = metrics(tmp_path / "run")
    for line in steps:
        assert line.keys() >= NAMES
        assert all(math.isfinite(line[metric]) for metric in NAMES)
        assert line["grad_norm"] > 0
        assert line["critic/grad_norm"] > 0
    assert steps[0]["critic/value_mean"] == 0.0  # a new critic estimates 0
    assert steps[0]["critic/explained_variance"] == 0.0
    rewards, estimates = ([line[metric] for line in steps] for metric in ("reward/mean", "critic/value_mean"))
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4
    assert estimates[-1] > 0.3  # the estimates follow the rewards
    recorded = lines(tmp_path / "run" / "trajectories.jsonl")[-1]
    entry = recorded["turns"][0]["value"]
    assert isinstance(entry, list) == (name in ("gae", "bilevel_gae"))


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(recipe: Path, tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = ("train.minibatches=2", "train.ppo_epochs=2", "critic.clip=0.1")
    run(recipe, *options, "train.steps=3", f"output={straight}")
    run(recipe, *options, "train.steps=2", f"output={parts}")
    run(recipe, *options, "train.steps=3", "resume=auto", f"output={parts}")
    assert timeless(metrics(parts)) == timeless(metrics(straight))
    assert max(line["critic/clip_fraction"] for line in metrics(straight)) > 0
    for file in ("model.safetensors", "value_head.safetensors"):
        own, theirs = (load_file(folder / "checkpoint" / ".." / "critic" / file) for folder in (straight, parts))
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[name], theirs[name]) for name in own)


@pytest.mark.slow
def test_a_resumed_run_with_adapters_is_bit_identical(recipe: Path, tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = ("model.lora.rank=4", "model.lora.alpha=8", "credit.name=gae")
    made = run(recipe, *options, f"output={straight}")
    run(recipe, *options, "train.steps=2", f"output={parts}")
    run(recipe, *options, "resume=auto", f"output={parts}")
    assert timeless(metrics(parts)) == timeless(metrics(straight))
    assert metrics(straight)[-1]["critic/value_mean"] != 0.0
    folder = straight / "checkpoints" / "step-000004" / "critic"
    assert (folder / "adapter_model.safetensors").is_file()
    assert not list(folder.glob("model*.safetensors"))
    critic: Any = made.critic
    base = {id(parameter) for parameter in made.learner.model.parameters() if not parameter.requires_grad}  # type: ignore[attr-defined]
    assert base == {id(parameter) for parameter in critic._model.parameters() if not parameter.requires_grad}


@pytest.mark.slow
def test_a_resumed_run_with_an_adapter_refuses_another_base_model_of_its_critic(recipe: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=7)
    options = ("model.lora.rank=4", f"critic.path={other}")
    run(recipe, *options, "train.steps=2")
    run(recipe, *options, "train.steps=3", "resume=auto")
    save_model(other, seed=8)
    with pytest.raises(RunError, match=r"the weights in critic\.path=.*changed since the run.*restore them"):
        run(recipe, *options, "resume=auto")


def test_the_policy_waits_while_the_critic_warms_up(recipe: Path, model: Path, tmp_path: Path) -> None:
    run(recipe, "critic.warmup_steps=2", "train.steps=3", "checkpoint.every=1", "checkpoint.keep=3")
    steps = metrics(tmp_path / "run")
    for name in ("loss", "kl", "grad_norm", "ratio/max_deviation", "ratio/clip_fraction"):
        assert [line[name] is None for line in steps] == [True, True, False]
    assert [line["tokens/trained"] for line in steps[:2]] == [0, 0]
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    start = load_file(model / "model.safetensors")
    for step, unchanged in ((2, True), (3, False)):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        now = load_file(folder / "model" / "model.safetensors")
        assert all(torch.equal(now[name], start[name]) for name in start) is unchanged
        of_critic = load_file(folder / "critic" / "model.safetensors")
        assert not all(torch.equal(of_critic[name], start[name]) for name in start)


@pytest.mark.slow
def test_the_critic_starts_from_another_model_or_from_the_critic_of_a_run(recipe: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=7)
    run(recipe, f"critic.path={other}", "train.steps=1", "critic.lr=1e-9", f"output={tmp_path / 'first'}")
    saved = tmp_path / "first" / "checkpoints" / "step-000001" / "critic"
    found, expected = load_file(saved / "model.safetensors"), load_file(other / "model.safetensors")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-7, rtol=0)

    run(recipe, "train.steps=3", f"output={tmp_path / 'second'}")
    trained = tmp_path / "second" / "checkpoints" / "step-000003" / "critic"
    run(recipe, f"critic.path={trained}", "train.steps=1", f"output={tmp_path / 'third'}")
    assert metrics(tmp_path / "second")[0]["critic/value_mean"] == 0.0
    assert metrics(tmp_path / "third")[0]["critic/value_mean"] != 0.0


@pytest.mark.slow
def test_options_of_the_critic_change_what_is_learnt(recipe: Path, tmp_path: Path) -> None:
    steps = ("train.steps=2", "train.ppo_epochs=3", "critic.clip=0.01")
    seen: dict[str, Any] = {}
    for number, options in enumerate(((), ("critic.lr=0.001",), ("critic.clip=null",))):
        folder = tmp_path / str(number)
        run(recipe, *steps, *options, f"output={folder}")
        seen[str(options)] = metrics(folder)[1]["critic/value_mean"]
    assert len(set(seen.values())) == 3


def test_failed_and_masked_conversations_are_no_targets(recipe: Path, tmp_path: Path) -> None:
    run(recipe, f"environment={PLACES}:raises_now_and_then", "train.batch_size=4", "train.steps=2", "limits.turns=1")
    recorded = lines(tmp_path / "run" / "trajectories.jsonl")
    broken = [line for line in recorded if line["error"]]
    assert broken
    assert all("value" not in turn for line in broken for turn in line["turns"])
    assert all(line["critic/grad_norm"] > 0 for line in metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit": {"name": "grpo"}}, r"critic\.lr has no effect with credit\.name=grpo, which needs no critic"),
        ({"credit": {}}, r"critic\.lr has no effect with credit\.name=turn_return"),
        ({"critic": {"clip": 0.1}}, r"critic\.clip has no effect with one optimizer step a batch"),
    ],
)
def test_options_without_effect_are_refused(recipe: Path, options: dict[str, Any], message: str) -> None:
    tree = {**yaml.safe_load(recipe.read_text()), **options}
    with pytest.raises(ConfigError, match=message):
        refuse_without_effect(checked(tree, source="recipe"))
