"""What must not change the advantages, and what must hold of them, for every estimator and for random groups."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from support.conversations import a_row
from training.test_batch import gradients
from turnwise.options.algorithm import (
    CriticCredit,
    Gae,
    Gigpo,
    Grpo,
    Igpo,
    Kevin,
    ReinforcePp,
    Shared,
    TurnGae,
    TurnReturn,
)
from turnwise.rewards.credit import Credit, critic, outcome, turns
from turnwise.rewards.credit import credit as states
from turnwise.rewards.credit import turns as published
from turnwise.training.batch import pack
from turnwise.types import Failure, Group, LogprobKind, Sampling, Segment, Trajectory, Turn

ALL: dict[str, Credit] = {
    credit.name: credit
    for credit in (
        Credit("grpo", outcome.grpo),
        Credit("grpo, batch", partial(outcome.grpo, options=Grpo(scale="batch"))),
        Credit("dr_grpo", partial(outcome.grpo, options=Grpo(scale="none"))),
        Credit("rloo", outcome.rloo),
        Credit("opo", outcome.opo),
        Credit("gpg", outcome.gpg),
        Credit("gdpo", outcome.gdpo),
        Credit("remax", outcome.remax, needs_baseline=True),
        Credit("reinforce_pp", turns.reinforce_pp),
        Credit("reinforce_pp, gamma", partial(turns.reinforce_pp, options=ReinforcePp(gamma=0.9))),
        Credit("reinforce_pp_baseline", outcome.reinforce_pp_baseline),
        Credit("turn_return", turns.turn_return),
        Credit("turn_return, batch", partial(turns.turn_return, options=TurnReturn(gamma=0.9, scale="batch"))),
        Credit("turn_return, none", partial(turns.turn_return, options=TurnReturn(scale="none"))),
        Credit("shared", turns.shared),
        Credit("shared, none", partial(turns.shared, options=Shared(baseline="none"))),
        Credit("discounted", turns.discounted),
        Credit("kevin", turns.kevin),
        Credit("kevin, 1", partial(turns.kevin, options=Kevin(gamma=1.0))),
        Credit("gigpo", turns.gigpo, read=partial(states.with_states, key=None)),
        Credit(
            "gigpo, key",
            partial(turns.gigpo, options=Gigpo(gamma=1.0, scale="std")),
            read=partial(states.with_states, key="s"),
        ),
        Credit("mt_grpo", published.mt_grpo),
        Credit("igpo", published.igpo),
        Credit("igpo, joint", partial(published.igpo, options=Igpo(normalise="joint"))),
        Credit("turn_potential", published.turn_potential, read=partial(states.with_potentials, key="p")),
        Credit("gae", critic.gae, needs_values="token"),
        Credit("turn_gae", critic.turn_gae, needs_values="turn"),
        Credit("critic", partial(critic.critic, options=CriticCredit(whiten=False)), needs_values="turn"),
        Credit("bilevel_gae", critic.bilevel_gae, needs_values="token"),
    )
}
every_estimator = pytest.mark.parametrize("credit", ALL.values(), ids=list(ALL))


def conversation(name: str, rng: random.Random, turns: int | None = None) -> Trajectory:
    """A scored conversation of 1 to 4 turns with 0 to 3 sampled tokens each, in one segment."""
    one = Trajectory(id=name, group="g", row=a_row(), logprob_kind=LogprobKind.SAMPLED)
    one.messages = [{"role": "user", "content": "Hi"}]
    segment = Segment()
    append(segment, [5, 6, 7], -1)
    for index in range(turns or rng.randint(1, 4)):
        message = {"role": "assistant", "content": "a"}
        turn = Turn(index=index, message=message, text="a", message_index=len(one.messages))
        if rng.random() < 0.7:
            turn.add_reward(rng.choice([0.1, 0.2, -0.3, 1.0]), "environment")
        turn.info = {"s": rng.choice("xyz"), "p": rng.choice([None, 0.25, 0.5, -1.0])}
        turn.weight = rng.choice([1.0, 1.0, 1.0, 0.5, 0.0])
        one.turns.append(turn)
        one.messages += [message, {"role": "tool", "content": rng.choice("uvw")}]
        append(segment, [rng.randint(8, 99) for _ in range(rng.randint(0, 3) if index else 2)], index)
        append(segment, [10, 11], -1)
    one.segments = [segment]
    outcome = rng.choice([0.0, 1.0, 0.5])
    one.rewards = {"turns": sum(turn.reward for turn in one.turns), "judge": outcome}
    one.reward = sum(one.rewards.values())
    counts = [segment.turn.count(turn.index) for turn in one.turns]
    one.values = [[rng.uniform(-1, 1) for _ in range(count)] for count in counts]
    return one


def append(segment: Segment, tokens: Sequence[int], turn: int) -> None:
    for token in tokens:
        segment.token_ids.append(token)
        segment.logprobs.append(-1.0 if turn >= 0 else 0.0)
        segment.turn.append(turn)
        segment.version.append(0 if turn >= 0 else -1)


def batch(seed: int, groups: int = 2, size: int = 4) -> list[Group]:
    rng = random.Random(seed)
    made = []
    for place in range(groups):
        trajectories = [conversation(f"{place}/{n}", rng) for n in range(size)]
        baseline = conversation(f"{place}/greedy", rng)
        made.append(Group(id=str(place), row=a_row(), trajectories=trajectories, baseline=baseline))
    return made


def with_weight_1(groups: list[Group]) -> list[Group]:
    for group in groups:
        for one in group.trajectories:
            for turn in one.turns:
                turn.weight = 1.0
    return groups


def advantages(groups: Sequence[Group]) -> dict[str, list[list[float]]]:
    """By the id of the trajectory: the numbers of each turn."""
    return {
        one.id: [[entry] if isinstance(entry, float | int) else list(entry) for entry in one.advantages]
        for group in groups
        for one in group.trajectories
    }


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return first == pytest.approx(second, rel=1e-9, abs=1e-9)


def changed(credit: Credit, seed: int, change: Callable[[list[Group]], list[Group] | None]) -> tuple[Any, Any]:
    """The advantages without and with a change."""
    plain, other = batch(seed), batch(seed)
    other = change(other) or other
    credit(plain)
    credit(other)
    before = advantages(plain)
    assert any(number for turns in before.values() for entry in turns for number in entry)
    return before, advantages(other)


@every_estimator
@pytest.mark.parametrize("seed", range(3))
def test_the_number_of_segments_changes_nothing(credit: Credit, seed: int) -> None:
    def split(groups: list[Group]) -> None:
        for group in groups:
            for one in group.trajectories:
                (segment,) = one.segments
                pieces: list[Segment] = []
                for place in range(0, len(segment.turn), 3):  # also within a turn
                    pieces.append(Segment())
                    append(pieces[-1], [5, 6], -1)
                    for token, turn in zip(segment.token_ids[place:][:3], segment.turn[place:][:3], strict=True):
                        append(pieces[-1], [token], turn)
                one.segments = pieces

    before, after = changed(credit, seed, split)
    assert after == before


@every_estimator
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_groups_and_of_conversations_changes_nothing(credit: Credit, seed: int) -> None:
    def shuffle(groups: list[Group]) -> list[Group]:
        for group in groups:
            random.Random(seed + 1).shuffle(group.trajectories)
        return groups[::-1]

    before, after = changed(credit, seed, shuffle)
    assert same(before, after)


@every_estimator
@pytest.mark.parametrize("seed", range(3))
def test_masked_tokens_and_conversations_that_failed_or_have_no_reward_change_nothing(
    credit: Credit, seed: int
) -> None:
    def junk(groups: list[Group]) -> None:
        rng = random.Random(99)
        for group in groups:
            for one in group.trajectories:
                append(one.segments[0], [7, 7, 7, 7], -1)
            failed, unscored = conversation("failed", rng), conversation("unscored", rng)
            failed.turns[0].add_reward(1e6, "environment")
            failed.fail(Failure("environment", "broken"))
            unscored.reward = None
            group.trajectories[1:1] = [failed, unscored]

    before, after = changed(credit, seed, junk)
    assert after.pop("failed") == after.pop("unscored") == []
    assert same(before, after)


WITHOUT_DISCOUNT = {
    **{name: ALL[name] for name in ("turn_return", "turn_return, none", "kevin, 1", "gigpo, key", "reinforce_pp")},
    "gae, 1": Credit("gae, 1", partial(critic.gae, options=Gae(lam=1.0)), needs_values="token"),
    "turn_gae, 1": Credit(
        "turn_gae, 1", partial(critic.turn_gae, options=TurnGae(gamma=1.0, lam=1.0)), needs_values="turn"
    ),
    "critic, 1": Credit("critic, 1", critic.critic, needs_values="turn"),
}


@pytest.mark.parametrize("credit", WITHOUT_DISCOUNT.values(), ids=list(WITHOUT_DISCOUNT))
def test_turns_of_weight_0_at_the_end_change_nothing(credit: Credit) -> None:
    """Without a discount: the reward of the conversation is then received one turn later."""

    def junk(groups: list[Group], weight: float) -> None:
        for group in groups:
            for one in group.trajectories:
                index = len(one.turns)
                append(one.segments[0], [7, 7], index)
                message = {"role": "assistant", "content": "junk"}
                one.turns.append(Turn(index=index, message=message, text="junk", weight=weight))
                one.values.append([0.7, -0.3])

    before, after = changed(credit, 1, partial(junk, weight=0.0))
    assert same(before, {key: entries[:-1] for key, entries in after.items()})
    if credit.needs_values is None:
        assert {number for entries in after.values() for number in entries[-1]} == {0.0}
    _, trained = changed(credit, 1, partial(junk, weight=1.0))
    assert not same(before, {key: entries[:-1] for key, entries in trained.items()})


SHIFTED = [
    *("grpo", "grpo, batch", "dr_grpo", "rloo", "opo", "gpg", "gdpo", "reinforce_pp", "reinforce_pp_baseline"),
    *("turn_return", "turn_return, none", "shared", "kevin, 1", "gigpo, key", "mt_grpo", "igpo"),
]


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("seed", range(3))
def test_a_constant_for_all_conversations_changes_nothing(name: str, seed: int) -> None:
    def shift(groups: list[Group]) -> None:
        for group in groups:
            for one in group.trajectories:
                one.reward += 2.5  # type: ignore[operator]
                one.rewards["judge"] += 2.5

    before, after = changed(ALL[name], seed, shift)
    if name == "mt_grpo":  # where a turn is the last of some conversations only, its reward now contains the constant
        before, after = ({key: entries[-1:] for key, entries in both.items()} for both in (before, after))
    assert same(before, after)


@every_estimator
def test_a_step_in_which_all_conversations_are_the_same_has_no_advantages(credit: Credit) -> None:
    same_for_all = conversation("0", random.Random(1), turns=1)
    same_for_all.turns[0].info["p"] = 0.0
    same_for_all.turns[0].weight = 1.0
    assert same_for_all.reward
    groups = [
        Group(
            id=str(place),
            row=a_row(),
            trajectories=[copy.deepcopy(same_for_all) for _ in range(4)],
            baseline=copy.deepcopy(same_for_all),
        )
        for place in range(2)
    ]
    for n, one in enumerate(one for group in groups for one in group.trajectories):
        one.id = str(n)
    credit(groups)
    by_trajectory = list(advantages(groups).values())
    assert len(by_trajectory) == 8
    assert all(same(entries, by_trajectory[0]) for entries in by_trajectory)
    ((*numbers,),) = by_trajectory[0]
    ((value, _),) = same_for_all.values  # type: ignore[misc]
    if credit.name == "shared, none":  # no mean is subtracted
        assert numbers == [pytest.approx(same_for_all.reward)]
    elif credit.name == "critic":  # not whitened
        assert numbers == [pytest.approx(same_for_all.reward - value)]  # type: ignore[operator]
    elif credit.name in ("gae", "bilevel_gae", "reinforce_pp, gamma"):  # the two tokens are compared with each other
        assert numbers[0] == pytest.approx(-numbers[1])
        assert abs(numbers[0]) > 0.5
    else:
        assert set(numbers) == {0.0}


GROUP_OF_ONE = {
    **dict.fromkeys(["grpo", "dr_grpo", "rloo", "opo", "gpg", "gdpo", "turn_return", "shared", "discounted"], True),
    **dict.fromkeys(["mt_grpo", "reinforce_pp_baseline"], True),
    **dict.fromkeys(["remax", "shared, none", "turn_gae", "critic", "reinforce_pp"], False),
}


@pytest.mark.parametrize("name", GROUP_OF_ONE)
def test_a_group_of_one_has_advantages_only_without_a_comparison_in_the_group(name: str) -> None:
    groups = with_weight_1(batch(3, groups=1, size=1))
    one = groups[0].trajectories[0]
    assert len(one.turns) > 1
    ALL[name](groups)
    assert len(one.advantages) == len(one.turns)
    assert (set(one.advantages) == {0.0}) is GROUP_OF_ONE[name]


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_conserved(seed: int) -> None:
    """What is subtracted is added elsewhere: sums over the conversations, turns or tokens that are compared."""

    def of(name: str) -> list[list[Trajectory]]:
        groups = with_weight_1(batch(seed))
        ALL[name](groups)
        return [group.trajectories for group in groups]

    for name in ("grpo", "dr_grpo", "rloo", "shared", "gpg"):
        for group in of(name):
            assert sum(one.advantages[0] for one in group) == pytest.approx(0.0, abs=1e-9)  # type: ignore[arg-type,misc]
    counts = lambda one: [one.segments[0].turn.count(t.index) if t.weight else 0 for t in one.turns]  # noqa: E731
    for group in of("opo"):
        weighted = [one.advantages[0] * sum(counts(one)) for one in group]  # type: ignore[operator]
        assert sum(weighted) == pytest.approx(0.0, abs=1e-9)
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        tokens = [
            advantage * count
            for group in of(name)
            for one in group
            for advantage, count in zip(one.advantages, counts(one), strict=True)
        ]
        assert sum(tokens) == pytest.approx(0.0, abs=1e-9)  # type: ignore[arg-type]
    for group in of("kevin"):
        trained = [a for one in group for a, count in zip(one.advantages, counts(one), strict=True) if count]
        assert sum(trained) == pytest.approx(0.0, abs=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_rewards_are_conserved(seed: int) -> None:
    """The return of the first turn, or of the first token, is the reward of the conversation."""
    plain = Credit("returns", partial(turns.shared, options=Shared(baseline="none")))
    groups = with_weight_1(batch(seed))
    for credit in (
        plain,
        Credit("critic", partial(critic.critic, options=CriticCredit(whiten=False))),
        Credit("gae", partial(critic.gae, options=Gae(lam=1.0, whiten=False))),
        Credit("turn_gae", partial(critic.turn_gae, options=TurnGae(gamma=1.0, lam=1.0, whiten=False))),
    ):
        credit(groups)
        for group in groups:
            for one in group.trajectories:
                entry = (one.returns or one.advantages)[0]
                first = entry if isinstance(entry, float | int) else entry[0]
                assert first == pytest.approx(one.reward)
                assert bool(one.returns) is (credit is not plain)


@pytest.mark.parametrize("name", ["turn_return", "gigpo", "gae", "reinforce_pp, gamma"])
def test_micro_batches_padding_and_shared_prompts_do_not_change_the_gradient(name: str) -> None:
    groups = batch(4)
    ALL[name](groups)
    trajectories = [one for group in groups for one in group.trajectories]
    found = [
        gradients(pack(trajectories, share_prompts=shared, micro_batch_tokens=tokens), Sampling())[0]
        for shared, tokens in ((True, 10_000), (True, 1), (False, 10_000), (False, 20))
    ]
    assert found[0].norm() > 1e-3
    for gradient in found[1:]:
        assert torch.linalg.vector_norm(gradient - found[0]) < 1e-5 * found[0].norm()
