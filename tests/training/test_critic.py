"""The critic's values and gradients are those of a plain float64 computation, however the states are packed."""

from __future__ import annotations

import asyncio
import copy
from array import array
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group, trajectory
from training.test_weights import conversations
from turnwise.errors import ConfigError
from turnwise.models.lora import LoraOptions, add_adapter, with_second_adapter
from turnwise.training.local_critic import LocalCritic
from turnwise.training.update import StopFlag
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.training.value_model import explained_variance, mean_value
from turnwise.types import Trajectory

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
    """The values of a trajectory's states in float64, each from a forward pass over the tokens before it."""
    model, head = copy.deepcopy(one._model).double(), copy.deepcopy(one._head).double()
    return [
        [
            head(model.model(torch.tensor([trajectory.segments[number].token_ids[:position]]))[0][0, -1])[0]
            for number, position in places
        ]
        for places in states(trajectory, level).values()
    ]


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
    model, head = copy.deepcopy(one._model).double(), copy.deepcopy(one._head).double()
    total, weights, clipped = torch.zeros((), dtype=torch.float64), 0.0, 0
    for conversation in trajectories:
        if not conversation.returns:
            continue
        for turn, places in states(conversation, level).items():
            weight = conversation.turns[turn].weight
            old, target = conversation.values[turn], conversation.returns[turn]
            for rank, (number, position) in enumerate(places):
                ids = torch.tensor([conversation.segments[number].token_ids[:position]])
                value = head(model.model(ids)[0][0, -1])[0]
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
    options = LoraOptions(rank=4, alpha=8, target_modules=None)
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
