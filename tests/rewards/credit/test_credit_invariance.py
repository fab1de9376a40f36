"""What all estimators keep: invariances, and the numbers of other systems."""

from __future__ import annotations

import ast
import copy
import random
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    Spo,
    TurnGae,
    TurnReturn,
)
from turnwise.rewards.credit import Credit, critic, outcome, turns
from turnwise.rewards.credit import credit as states
from turnwise.rewards.credit.credit import Episode, EpisodeGroups
from turnwise.rewards.credit.tracker import ValueTracker
from turnwise.training.batch import pack
from turnwise.types import Failure, Group, LogprobKind, Sampling, Segment, Trajectory, Turn

# What must not change the advantages, and what must hold of them, for every estimator and for random groups.


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
        Credit("spo", outcome.spo, tracker=ValueTracker(Spo())),
        Credit("spo, none", partial(outcome.spo, options=Spo(whiten=False)), tracker=ValueTracker(Spo())),
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
        Credit("mt_grpo", turns.mt_grpo),
        Credit("igpo", turns.igpo),
        Credit("igpo, joint", partial(turns.igpo, options=Igpo(normalise="joint"))),
        Credit("turn_potential", turns.turn_potential, read=partial(states.with_potentials, key="p")),
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
    elif credit.name == "spo, none":
        assert numbers == [pytest.approx(same_for_all.reward - Spo().initial)]
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
    **dict.fromkeys(["remax", "spo, none", "shared, none", "turn_gae", "critic", "reinforce_pp"], False),
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


# Value by value against other systems' functions, where their source is at hand, and always against literal results.


MIRROR = next((folder / ".mirror" for folder in Path(__file__).parents if (folder / ".mirror").is_dir()), Path("none"))
"""Bare git directories `<owner>+<name>/repo`, if there are any."""

REWARDS = [[1.0, 0.0, 0.5], [0.2, 0.9, 0.2]]
"""The rewards of two groups, one turn each."""

LENGTHS = [[3, 5, 2], [4, 1, 6]]

VALUES = torch.linspace(-0.4, 0.7, 36).reshape(6, 6).tolist()

BATCH: EpisodeGroups = [
    [
        Episode([reward], tokens_T=[length], values_T=[VALUES[3 * g + n][:length]], baseline=0.3)
        for n, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    for g, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True))
]


@cache
def source(repository: str, path: str) -> str:
    """A file of a peer's newest commit; the test is skipped if it is not at hand."""
    folder = MIRROR / repository / "repo"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    command = ["git", "--git-dir", str(folder), "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def functions(text: str, names: Sequence[str], **known: Any) -> dict[str, Any]:
    """These functions of a file, without its imports and decorators."""
    tree = ast.parse(text)
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(chosen) == len(names)
    for node in chosen:
        node.decorator_list = []
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
    space: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, **known}
    exec(compile(ast.Module(chosen, []), "peer", "exec"), space)
    return space


def verl(name: str, penalties: Sequence[Sequence[float]] | None = None, **arguments: Any) -> list[list[list[float]]]:
    """The advantages of the sampled tokens of `BATCH`, by verl's function. `penalties` of tokens are subtracted from rewards."""
    masked = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    library = functions(source("volcengine+verl", "verl/utils/torch_functional.py"), masked)
    function = functions(
        source("volcengine+verl", "verl/trainer/ppo/core_algos.py"), [name], verl_F=SimpleNamespace(**library)
    )[name]
    lengths = [length for group in LENGTHS for length in group]
    rewards = [reward for group in REWARDS for reward in group]
    rewards_BL, mask_BL = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6, 6, dtype=torch.float64)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        rewards_BL[row, length - 1], mask_BL[row, :length] = reward, 1.0
    if penalties is not None:
        rewards_BL -= torch.tensor(penalties, dtype=torch.float64) * mask_BL
    accepted = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = {
        "token_level_rewards": rewards_BL,
        "response_mask": mask_BL,
        "index": np.array([0, 0, 0, 1, 1, 1]),
        "reward_baselines": torch.full((6,), 0.3, dtype=torch.float64),
        "values": torch.tensor(VALUES, dtype=torch.float64),
        **arguments,
    }
    advantages_BL, _ = function(**{key: value for key, value in given.items() if key in accepted})
    flat = [advantages_BL[row, :length].tolist() for row, length in enumerate(lengths)]
    return [flat[:3], flat[3:]]


def by_token(advantages: Any) -> list[list[list[float]]]:
    return [
        [
            [float(entry)] * length if isinstance(entry, float | int) else list(entry)
            for (entry,), length in zip(group, lengths, strict=True)
        ]
        for group, lengths in zip(advantages, LENGTHS, strict=True)
    ]


def verl_tokens(
    name: str, estimator: Callable[[EpisodeGroups], Any], penalties: Sequence[Sequence[float]], **arguments: Any
) -> tuple[list[list[float]], list[list[float]]]:
    """The advantages of all tokens of each conversation of `BATCH` with penalties of tokens: ours, and verl's."""
    batch = []
    for number, group in enumerate(BATCH):
        batch.append([])
        for place, episode in enumerate(group):
            own = penalties[3 * number + place][: episode.tokens_T[0]]
            batch[-1].append(replace(episode, rewards_T=[episode.rewards_T[0] - sum(own)], penalties_T=[own]))
    ours, theirs = by_token(estimator(batch)), verl(name, penalties, **arguments)
    return [tokens for group in ours for tokens in group], [tokens for group in theirs for tokens in group]


CONFIG = SimpleNamespace(gamma=0.9)

PAIRS: dict[str, tuple[str, dict[str, Any], Callable[[EpisodeGroups], Any]]] = {
    "grpo": ("compute_grpo_outcome_advantage", {}, outcome.grpo),
    "dr_grpo": (
        "compute_grpo_outcome_advantage",
        {"norm_adv_by_std_in_grpo": False},
        partial(outcome.grpo, options=Grpo(scale="none")),
    ),
    "rloo": ("compute_rloo_outcome_advantage", {}, outcome.rloo),
    "rloo_vectorized": ("compute_rloo_vectorized_outcome_advantage", {}, outcome.rloo),
    "opo": ("compute_opo_outcome_advantage", {}, outcome.opo),
    "reinforce_pp": (
        "compute_reinforce_plus_plus_outcome_advantage",
        {"config": CONFIG},
        partial(turns.reinforce_pp, options=ReinforcePp(gamma=0.9)),
    ),
    "reinforce_pp, no discount": (
        "compute_reinforce_plus_plus_outcome_advantage",
        {"config": SimpleNamespace(gamma=1.0)},
        turns.reinforce_pp,
    ),
    "reinforce_pp_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        {},
        outcome.reinforce_pp_baseline,
    ),
    "remax": ("compute_remax_outcome_advantage", {}, outcome.remax),
    "gae": (
        "compute_gae_advantage_return",
        {"gamma": 0.99, "lam": 0.9},
        lambda batch: critic.gae(batch, Gae(gamma=0.99, lam=0.9)).advantages,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_values_are_those_of_verl(name: str) -> None:
    function, arguments, estimator = PAIRS[name]
    ours, theirs = by_token(estimator(BATCH)), verl(function, **arguments)
    for group, of_verl in zip(ours, theirs, strict=True):
        for values, expected in zip(group, of_verl, strict=True):
            # theirs: 1e-8 in means over a mask
            assert values == pytest.approx(expected, abs=2e-7)


def test_gpg_is_that_of_verl_where_its_alpha_is_1() -> None:
    """verl's alpha counts rewards that are 0; ours, like the paper's, conversations without a gradient."""
    shifted = [[Episode([one.reward + 1], tokens_T=one.tokens_T) for one in group] for group in BATCH]
    theirs = verl("compute_gpg_outcome_advantage")
    factor = 6 / 5  # one reward of BATCH is 0
    for group, expected in zip(by_token(outcome.gpg(shifted)), theirs, strict=True):
        for values, of_verl in zip(group, expected, strict=True):
            assert [factor * value for value in values] == pytest.approx(of_verl, abs=1e-6)  # alpha in float32


SWIFT = [
    ("grpo", "group", partial(outcome.grpo, options=Grpo(scale="std"))),
    ("grpo", "batch", partial(outcome.grpo, options=Grpo(scale="batch"))),
    ("grpo", "none", partial(outcome.grpo, options=Grpo(scale="none"))),
    ("rloo", "none", outcome.rloo),
]


@pytest.mark.parametrize(("estimator", "scale", "ours"), SWIFT)
def test_the_values_are_those_of_ms_swift(estimator: str, scale: str, ours: Callable[[EpisodeGroups], Any]) -> None:
    compute = _swift()
    rewards = torch.tensor([reward for group in REWARDS for reward in group], dtype=torch.float64)[:, None]
    theirs, _ = compute(rewards, torch.ones(1, dtype=torch.float64), 3, estimator, scale)
    values = [entry for group in ours(BATCH) for (entry,) in group]
    assert values == pytest.approx(theirs.tolist(), rel=4e-4)  # theirs: 1e-4 is added to the standard deviation


def test_gdpo_is_that_of_ms_swift_with_its_weights() -> None:
    compute = _swift()
    parts = torch.tensor([[1.0, 0.1], [0.0, 0.4], [0.5, 0.2], [0.2, 0.0], [0.9, 0.7], [0.2, 0.3]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.25], dtype=torch.float64)
    theirs, _ = compute(parts, weights, 3, "grpo", "gdpo")
    recipe = {"a": 1.0, "b": 0.25}
    weighted = [Episode([0.0], parts={"a": a, "b": 0.25 * b}, weights=recipe) for a, b in parts.tolist()]
    ours = outcome.gdpo([weighted[:3], weighted[3:]])
    assert [entry for group in ours for (entry,) in group] == pytest.approx(theirs.tolist(), rel=1e-5)


def _swift() -> Callable[..., Any]:
    text = source("modelscope+ms-swift", "swift/rl_core/advantage.py")
    nanstd = lambda values, dim, keepdim: values.std(dim=dim, keepdim=keepdim)  # no missing rewards here  # noqa: E731
    return functions(text, ["compute_advantages"], nanstd=nanstd)["compute_advantages"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # computed by verl's functions (January 2026), to five decimals
        (outcome.grpo, [[1.0, -1.0, 0.0], [-0.57735, 1.1547, -0.57735]]),
        (outcome.rloo, [[0.75, -0.75, 0.0], [-0.35, 0.7, -0.35]]),
        (outcome.opo, [[0.6, -0.4, 0.1], [-0.06364, 0.63636, -0.06364]]),
        (turns.reinforce_pp, [[1.92117, -0.94015, 0.49051], [-0.36788, 1.63504, -0.36788]]),
    ],
    ids=["grpo", "rloo", "opo", "reinforce_pp"],
)
def test_the_values_are_these(estimator: Callable[[EpisodeGroups], Any], expected: list[list[float]]) -> None:
    found = [[entry for (entry,) in group] for group in estimator(BATCH)]
    assert [pytest.approx(values, abs=6e-6) for values in expected] == found
