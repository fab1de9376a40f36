"""A batch is exact: every sampled token once, with its weight, advantage and log-probability, however it is packed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from turnwise.options.algorithm import CorrectionSection, LossSection, PpoClip
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, custom
from turnwise.training.batch import Batch, divide_evenly, pack, set_trainer_logprobs
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.types import Completion, LogprobKind, Message, Row, Sampling, Segment, Trajectory, Turn

# A batch is exact: every sampled token once, weighed right, however it is packed.


def completion(ids: list[int], logprobs: list[float] | None = None) -> Completion:
    return Completion(
        token_ids=ids,
        logprobs=logprobs or [-0.5] * len(ids),
        versions=[0] * len(ids),
        finish_reason="stop",
        logprob_kind=LogprobKind.SAMPLED,
    )


def trajectory(name: str, pieces: list[tuple[str, list[int]]], advantages: list[float], group: str = "g") -> Trajectory:
    """Pieces are ("context", ids), ("turn", ids) and ("new segment", [])."""
    made = Trajectory(id=name, group=group, row=Row(id=group, messages=[]), segments=[Segment()])
    for kind, ids in pieces:
        if kind == "new segment":
            made.segments.append(Segment())
        elif kind == "context":
            made.segments[-1].append_context(ids)
        else:
            said = completion(ids)
            made.segments[-1].append_completion(len(made.turns), said)
            made.turns.append(Turn(index=len(made.turns), message={}, text="", completion=said))
    made.advantages = advantages
    made.reward = 0.0
    return made


def group() -> list[Trajectory]:
    return [
        trajectory(
            "a", [("context", [5, 6, 7]), ("turn", [8, 9, 2]), ("context", [10, 11]), ("turn", [12, 2])], [1.0, 1.0]
        ),
        trajectory("b", [("context", [5, 6, 7]), ("turn", [13, 2]), ("context", [14])], [-0.5]),
        trajectory("c", [("context", [5, 6, 7]), ("turn", [8, 15, 16, 2])], [0.25]),
        trajectory("d", [("context", [20, 21]), ("turn", [22, 2])], [2.0], group="h"),
    ]


def targets(batch: Batch) -> list[tuple[int, float, float]]:
    """(token, advantage, weight) of every target, sorted."""
    found = [
        (int(token), round(float(advantage), 6), round(float(weight), 6))
        for micro in batch.micro_batches
        for token, advantage, weight in zip(
            micro.targets.token_N, micro.targets.advantage_N, micro.targets.weight_N, strict=True
        )
    ]
    return sorted(found)


def test_a_group_shares_its_prompt_and_branches_keep_their_positions() -> None:
    batch = pack(group()[:2])
    (micro,) = batch.micro_batches
    #                                         P  P  P  a  a  a  E   E   a   a  b   b      (b's trailing context is cut off)
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 8, 9, 2, 10, 11, 12, 2, 13, 2]]
    assert micro.position_BL.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4]]
    assert micro.tree is not None
    first, second = micro.tree.buckets  # a: all of its tokens; b: its own tokens behind the prompt
    assert first.query_NR.tolist() == first.key_NK.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert first.mask(window=None) is None
    assert (second.query_NR.tolist(), second.key_NK.tolist()) == ([[10, 11]], [[0, 1, 2, 10, 11]])
    mask = second.mask(window=None)
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert micro.targets.token_N.tolist() == [8, 9, 2, 12, 2, 13, 2]
    assert micro.column_U[micro.prediction_N].tolist() == [2, 3, 4, 7, 8, 2, 10]
    assert micro.targets.advantage_N.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, -0.5, -0.5]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 10_000])
def test_packing_never_changes_what_is_trained_on(share: bool, micro_batch_tokens: int) -> None:
    usual = pack(group(), share_prompts=False)
    batch = pack(group(), share_prompts=share, micro_batch_tokens=micro_batch_tokens)
    assert targets(batch) == targets(usual)
    assert len(targets(batch)) == batch.tokens == 13
    assert batch.trajectories == 4


def test_token_average_weighs_tokens_alike_and_sequence_average_trajectories() -> None:
    by_token = targets(pack(group(), loss=LossSection(normalizer="token")))
    assert {weight for _, _, weight in by_token} == {round(1 / 13, 6)}
    by_sequence = pack(group(), loss=LossSection(normalizer="trajectory"))
    totals: dict[float, float] = {}
    for _, advantage, weight in targets(by_sequence):
        totals[advantage] = totals.get(advantage, 0.0) + weight
    assert totals == pytest.approx({1.0: 0.25, -0.5: 0.25, 0.25: 0.25, 2.0: 0.25}, abs=1e-5)


def test_a_trajectory_of_two_segments_weighs_as_much_as_one_of_one() -> None:
    split = trajectory(
        "s",
        [("context", [5]), ("turn", [6, 2]), ("new segment", []), ("context", [7, 8]), ("turn", [9, 2])],
        [1.0, -1.0],
    )
    whole = trajectory("w", [("context", [5]), ("turn", [6, 2])], [3.0])
    batch = pack([split, whole], loss=LossSection(normalizer="trajectory"))
    totals: dict[float, float] = {}
    for _, advantage, weight in targets(batch):
        totals[abs(advantage)] = totals.get(abs(advantage), 0.0) + weight
    assert totals == pytest.approx({1.0: 0.5, 3.0: 0.5})


def test_zero_advantages_count_in_the_average_and_cost_nothing() -> None:
    idle = trajectory("z", [("context", [5]), ("turn", [6, 7, 2])], [0.0], group="z")
    batch = pack([*group(), idle])
    assert batch.tokens == 16
    assert len(targets(batch)) == 13
    assert {weight for _, _, weight in targets(batch)} == {round(1 / 16, 6)}
    assert len(targets(pack([*group(), idle], keep_zero=True))) == 16


def test_trajectories_without_advantages_are_not_there() -> None:
    broken = trajectory("x", [("context", [5]), ("turn", [6, 2])], [])
    assert targets(pack([*group(), broken])) == targets(pack(group()))


def gradients(batch: Batch, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the weighted log-likelihood, flat, and the log-probabilities sorted by target."""
    model = tiny_model()
    assert try_tree_attention(model)
    forward = Forward(model, sampling)
    values: list[tuple[int, float]] = []
    for micro in batch.micro_batches:
        logprob_N, _ = forward.logprobs(micro)
        (logprob_N * micro.targets.advantage_N * micro.targets.weight_N).sum().backward()
        values += zip(micro.targets.token_N.tolist(), logprob_N.tolist(), strict=True)
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return flat, torch.tensor([value for _, value in sorted(values)])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)])
def test_shared_prompts_and_micro_batches_give_the_gradient_of_separate_rows(sampling: Sampling) -> None:
    alone, alone_logprobs = gradients(pack(group(), share_prompts=False, micro_batch_tokens=1), sampling)
    shared, shared_logprobs = gradients(pack(group(), share_prompts=True), sampling)
    assert alone.abs().max() > 1e-3
    torch.testing.assert_close(shared, alone, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(shared_logprobs, alone_logprobs, atol=1e-5, rtol=1e-5)


def test_log_probabilities_are_those_of_one_plain_forward_pass() -> None:
    model = tiny_model()
    one = group()[0]
    (micro,) = pack([one]).micro_batches
    logprob_N, entropy_N = Forward(model, Sampling(temperature=0.5)).logprobs(micro, entropy=True)
    ids = torch.tensor([list(one.segments[0].token_ids)])
    plain_TV = (model(ids).logits[0].detach() / 0.5).log_softmax(-1)
    places = [2, 3, 4, 7, 8]
    expected = torch.stack([plain_TV[at, ids[0, at + 1]] for at in places])
    torch.testing.assert_close(logprob_N.detach(), expected, atol=1e-5, rtol=1e-5)
    assert entropy_N is not None
    entropies = torch.stack([-(plain_TV[at].exp() * plain_TV[at]).sum() for at in places])
    torch.testing.assert_close(entropy_N.detach(), entropies, atol=1e-4, rtol=1e-4)


def test_what_a_group_says_twice_is_computed_once_at_the_weight_of_both() -> None:
    twin = [("context", [5, 6, 7]), ("turn", [8, 9, 2])]
    other = trajectory("y", [("context", [5, 6, 7]), ("turn", [13, 2])], [-0.5])
    same = pack([trajectory("x", twin, [1.0]), trajectory("z", twin, [1.0]), other])
    # the smallest difference in the advantage keeps them apart
    apart = pack([trajectory("x", twin, [1.0]), trajectory("z", twin, [1.0 + 1e-6]), other])
    assert len(targets(same)) == 5
    assert len(targets(apart)) == 8
    assert same.tokens == apart.tokens == 8
    assert sum(weight for _, _, weight in targets(same)) == pytest.approx(1.0)
    merged, merged_logprobs = gradients(same, Sampling())
    torch.testing.assert_close(merged, gradients(apart, Sampling())[0], atol=1e-6, rtol=1e-4)
    assert len(merged_logprobs) == 5


def test_models_with_sliding_windows_share_prefixes() -> None:
    assert try_tree_attention(tiny_model())
    windowed = tiny_model(
        use_sliding_window=True, sliding_window=4, max_window_layers=0, layer_types=["sliding_attention"] * 2
    )
    assert try_tree_attention(windowed)
    assert windowed.config.sliding_window == 4


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [
        (17, 16, [1] * 15 + [2]),
        (33, 16, [2] * 15 + [3]),
        (40, 32, [1] * 24 + [2] * 8),
        (12, 4, [3] * 4),
        (3, 5, [1] * 3),
    ],
)
def test_parts_of_a_step_differ_by_at_most_one_trajectory(count: int, parts: int, sizes: list[int]) -> None:
    trajectories = [trajectory(str(n), [("context", [5]), ("turn", [6])], [1.0]) for n in range(count)]
    divided = divide_evenly(trajectories, parts)
    assert sorted(map(len, divided)) == sizes
    assert [one.id for part in divided for one in part] == [str(n) for n in range(count)]


def test_the_number_of_equal_conversations_is_a_column() -> None:
    made = [trajectory(name, [("context", [5]), ("turn", [6, 2])], [1.0]) for name in "ab"]
    (micro,) = pack([*made, trajectory("c", [("context", [5]), ("turn", [7, 2])], [1.0])]).micro_batches
    assert dict(zip(micro.targets.token_N.tolist()[::2], micro.targets.counts.tolist()[::2], strict=True)) == {
        6: 2,
        7: 1,
    }


# What a turn's weight does to the loss: the gradient is that of a plain loop over the tokens, each with its weight.


def messages(*roles: str) -> list[Message]:
    return [{"role": role, "content": ""} for role in roles]


def conversations() -> list[Trajectory]:
    """A group and one more: two questions with a tool, a rewritten history, an answer that was cut, a single turn."""
    opening = ("context", [5, 6, 7])
    tools = trajectory(
        "a",
        [
            opening,
            ("turn", [8, 9, 2]),
            ("context", [10, 11]),
            ("turn", [12, 2]),
            ("context", [13]),
            ("turn", [14, 15, 2]),
        ],
        [1.0, -0.5, 0.75],
    )
    tools.messages = messages("user", "assistant", "tool", "assistant", "user", "assistant")
    rewritten = trajectory(
        "b",
        [
            opening,
            ("turn", [20, 2]),
            ("new segment", []),
            ("context", [5, 21]),
            ("turn", [22, 23, 2]),
            ("context", [24]),
        ],
        [-1.0, -1.0],
    )
    rewritten.messages = messages("user", "assistant")
    cut = trajectory("c", [opening, ("turn", [30, 31, 32, 2])], [0.5])
    cut.segments[0].truncate(5)  # of four sampled tokens two stay
    cut.turns[0].kept_tokens = 2
    cut.segments[0].append_context([33])
    cut.segments[0].append_completion(1, completion_of([34, 2]))
    cut.turns.append(Turn(index=1, message={}, text="", completion=completion_of([34, 2])))
    cut.advantages, cut.messages = [0.5, 0.5], messages("user", "assistant")
    single = trajectory("d", [("context", [40]), ("turn", [41, 2])], [2.0], group="h")
    single.messages = messages("user", "assistant")
    return [tools, rewritten, cut, single]


def completion_of(ids: list[int]) -> Any:
    return trajectory("", [("turn", ids)], [0.0]).turns[0].completion


def plain(trajectories: list[Trajectory], normalizer: str) -> torch.Tensor:
    """The gradient of the weighted log-likelihood, one token after the other."""
    model = tiny_model()
    terms: list[list[tuple[float, float, torch.Tensor]]] = []
    for one in trajectories:
        terms.append([])
        for segment in one.segments:
            logprob_TV = model(torch.tensor([list(segment.token_ids)])).logits[0].log_softmax(-1)
            for place, turn in enumerate(segment.turn):
                if turn >= 0:
                    term = logprob_TV[place - 1, segment.token_ids[place]]
                    terms[-1].append((one.turns[turn].weight, one.advantages[turn], term))
    masses = [sum(weight for weight, _, _ in of) for of in terms]
    loss = torch.zeros(())
    for of, mass in zip(terms, masses, strict=True):
        if mass:
            whole = sum(masses) if normalizer == "token" else mass * sum(mass > 0 for mass in masses)
            for weight, advantage, term in of:
                loss = loss + weight / whole * advantage * term
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


CUSTOM = {
    "halves": custom(lambda turn: 1 / (turn.index + 1), name="halves"),
    "none of one": custom(lambda turn, trajectory: 0.0 if trajectory.id == "a" else 1.5, name="none of one"),
    "the first": custom(lambda turn: turn.index == 0, name="the first"),
}


@pytest.mark.parametrize("normalizer", ["token", "trajectory"])
@pytest.mark.parametrize("name", [*TURN_WEIGHTINGS, *CUSTOM])
def test_the_gradient_is_that_of_a_plain_loop_over_the_tokens(name: str, normalizer: Any) -> None:
    trajectories = conversations()
    for one in trajectories:
        {**TURN_WEIGHTINGS, **CUSTOM}[name](one)
    expected = plain(trajectories, normalizer)
    assert expected.abs().max() > 1e-3
    for share in (True, False):
        batch = pack(trajectories, loss=LossSection(normalizer=normalizer), share_prompts=share)
        weights = [weight for _, _, weight in targets(batch)]
        assert sum(weights) == pytest.approx(1.0, abs=1e-5)
        assert batch.tokens == len(weights)
        torch.testing.assert_close(gradients(batch, Sampling())[0], expected, atol=1e-6, rtol=1e-4)


def test_weights_of_one_change_nothing() -> None:
    """Bit for bit: the share of a token is one through the number of tokens, as if there were no weights."""
    trajectories = conversations()
    for one in trajectories:
        TURN_WEIGHTINGS["all"](one)
    expected = {"token": torch.tensor([1 / 19] * 19)}
    counts = [8, 5, 4, 2]
    expected["trajectory"] = torch.tensor([1 / (4 * count) for count in counts for _ in range(count)])
    for normalizer in ("token", "trajectory"):
        batch = pack(trajectories, loss=LossSection(normalizer=normalizer))
        found = torch.cat([micro.targets.weight_N for micro in batch.micro_batches])
        assert torch.equal(found.sort().values, expected[normalizer].sort().values)
    assert (batch.tokens, batch.trajectories) == (19, 4)  # two of the 21 that were sampled are no longer there


def test_what_has_no_weight_is_no_target_and_a_tail_without_is_not_computed() -> None:
    trajectories = conversations()[:2]
    for one in trajectories:
        CUSTOM["the first"](one)
    (micro,) = pack(trajectories).micro_batches
    #                                       P  P  P  a  a  a  b   b       the second segment of b is not there at all
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 8, 9, 2, 20, 2]]
    assert micro.targets.token_N.tolist() == [8, 9, 2, 20, 2]
    for one in trajectories:
        TURN_WEIGHTINGS["last_turn"](one)
    (micro,) = pack(trajectories).micro_batches
    assert micro.targets.token_N.tolist() == [14, 15, 2, 22, 23, 2]
    # what a said before is context, and of b only what it was rewritten to, which begins with the same token
    assert micro.token_ids_BL.shape == (1, 14 + 5 - 1)


def test_a_trajectory_without_weight_counts_nowhere_and_one_without_advantage_counts() -> None:
    one, two, three, _ = conversations()
    for turn in three.turns:
        turn.weight = 0.0
    two.advantages = [0.0, 0.0]
    batch = pack([one, two, three], loss=LossSection(normalizer="trajectory"))
    assert (batch.trajectories, batch.tokens) == (2, 13)
    assert sum(weight for _, _, weight in targets(batch)) == pytest.approx(0.5, abs=1e-5)
    assert sum(
        weight for _, _, weight in targets(pack([one, three], loss=LossSection(normalizer="trajectory")))
    ) == pytest.approx(1.0, abs=1e-5)
    assert targets(pack([one, two, three])) == targets(pack([one, two]))


def test_only_advantages_of_turns_with_weight_ask_for_a_forward_pass() -> None:
    one = conversations()[0]
    TURN_WEIGHTINGS["last_turn"](one)
    one.advantages = [1.0, 1.0, 0.0]
    assert pack([one]).micro_batches == []
    assert pack([one]).tokens == 3
    assert len(targets(pack([one], keep_zero=True))) == 3


def test_nothing_with_weight_is_an_empty_batch_that_can_be_learnt_from() -> None:
    trajectories = conversations()
    for one in trajectories:
        custom(lambda turn: 0, name="none")(one)
    batch = pack(trajectories, keep_zero=True)
    assert (batch.micro_batches, batch.trajectories, batch.tokens) == ([], 0, 0)
    policy = LocalLearner(tiny_model(), sampling=Sampling())
    update = asyncio.run(policy.update([batch], lr=1e-2))
    assert (update.tokens, update.loss, update.grad_norm) == (0, 0.0, 0.0)


def test_what_a_group_says_twice_is_one_only_at_the_same_weight() -> None:
    def twice(first: float, second: float) -> list[Trajectory]:
        pieces: list[tuple[str, list[int]]] = [("context", [5]), ("turn", [6, 2]), ("context", [7]), ("turn", [8, 2])]
        pair = [trajectory(name, pieces, [1.0, 1.0]) for name in ("x", "y")]
        pair[0].turns[0].weight, pair[1].turns[0].weight = first, second
        return pair

    same, apart = pack(twice(0.5, 0.5)), pack(twice(0.5, 0.25))
    assert len(targets(same)) == 4
    assert len(targets(apart)) == 8
    for batch in (same, apart):
        assert sum(weight for _, _, weight in targets(batch)) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(gradients(apart, Sampling())[0], plain(twice(0.5, 0.25), "token"), atol=1e-6, rtol=1e-4)


def test_the_divergence_is_averaged_by_the_same_weights() -> None:
    trajectories = conversations()
    for one in trajectories:
        CUSTOM["halves"](one)
    batch = pack(trajectories, keep_zero=True)
    policy = LocalLearner(tiny_model(), sampling=Sampling())
    expected = 0.0
    for micro in batch.micro_batches:
        difference_N = micro.targets.behaviour_logprob_N - policy._forward.logprobs(micro)[0].detach()
        expected += float(((difference_N.exp() - difference_N - 1) * micro.targets.weight_N).sum())
    update = asyncio.run(policy.update([batch], lr=0.0))
    assert update.kl == pytest.approx(expected, rel=1e-4)


# Advantages per token: the gradient is that of a plain float64 loop over the sampled tokens, each with its own
# advantage.


# the opening is shared; `a` has a turn in each of two segments, and a context token between two turns of the first one
OPENING = ("context", [5, 6, 7])

TURNS_A = [
    OPENING,
    ("turn", [8, 9, 2]),
    ("context", [10]),
    ("turn", [12, 2]),
    ("new segment", []),
    ("context", [5, 21]),
    ("turn", [22, 2]),
]


def advantages_conversations() -> list[Trajectory]:
    a = trajectory("a", TURNS_A, [])
    a.advantages = [[1.0, -0.5, 0.25], 0.75, (0.0, -2.0)]
    b = trajectory("b", [OPENING, ("turn", [13, 2])], [])
    b.advantages = [[-1.0, 0.5]]
    c = trajectory("c", [OPENING, ("turn", [14, 15, 2])], [0.5])
    c.turns[0].weight = 0.5
    return [a, b, c]


def reference_gradient(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """In float64, one sequence after the other, one token after the other; averaged over tokens by weight."""
    model = tiny_model().double()
    model.set_attn_implementation("eager")
    terms: list[torch.Tensor] = []
    total = 0.0
    for one in trajectories:
        left = [list(entry) if isinstance(entry, Sequence) else None for entry in one.advantages]
        for segment in one.segments:
            logprob_LV = model(torch.tensor([list(segment.token_ids)])).logits[0].log_softmax(-1)
            for place, turn in enumerate(segment.turn):
                if turn < 0:
                    continue
                entry = left[turn]
                advantage = one.advantages[turn] if entry is None else entry.pop(0)
                weight = one.turns[turn].weight
                total += weight
                terms.append(weight * advantage * logprob_LV[place - 1, segment.token_ids[place]])
        assert not any(left)
    (torch.stack(terms).sum() / total).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_the_gradient_is_that_of_each_token_with_its_own_advantage(
    share_prompts: bool, micro_batch_tokens: int
) -> None:
    trajectories = advantages_conversations()
    batch = pack(trajectories, share_prompts=share_prompts, micro_batch_tokens=micro_batch_tokens)
    found, _ = gradients(batch, Sampling())
    expected = reference_gradient(trajectories)
    assert expected.norm() > 1e-3
    assert (found.double() - expected).norm() < 1e-5 * expected.norm()
    by_token = [(token, advantage) for token, advantage, _ in targets(batch)]
    assert by_token == sorted(
        [
            *[(8, 1.0), (9, -0.5), (2, 0.25), (12, 0.75), (2, 0.75), (22, 0.0), (2, -2.0)],
            *[(13, -1.0), (2, 0.5), (14, 0.5), (15, 0.5), (2, 0.5)],
        ]
    )


def test_one_number_for_each_token_is_the_number_of_the_turn() -> None:
    by_turn = trajectory("a", TURNS_A, [1.0, 0.5, -1.0])
    by_token = replace(by_turn, advantages=[[1.0, 1.0, 1.0], [0.5, 0.5], [-1.0, -1.0]])
    for name in ("token_N", "advantage_N", "weight_N", "sequence_N", "turn_N"):
        columns = [getattr(pack([one]).micro_batches[0].targets, name) for one in (by_turn, by_token)]
        assert torch.equal(*columns), name


def test_tokens_that_an_environment_removed_have_no_advantage() -> None:
    one = trajectory("a", [OPENING, ("turn", [8, 9, 10, 2])], [])
    one.segments[0].truncate(5)  # of four sampled tokens two stay
    one.advantages = [[0.5, -0.5]]
    assert [(token, advantage) for token, advantage, _ in targets(pack([one]))] == [(8, 0.5), (9, -0.5)]


@pytest.mark.parametrize("entry", [[1.0], [1.0, 2.0, 3.0, 4.0], []])
def test_another_number_of_advantages_than_tokens_is_refused(entry: list[float]) -> None:
    one = trajectory("a", [OPENING, ("turn", [8, 9, 2])], [])
    one.advantages = [entry]
    with pytest.raises(ValueError, match=rf"trajectory a: turn 0 has 3 sampled tokens and {len(entry)} advantages"):
        pack([one], keep_zero=True)


def test_a_turn_whose_tokens_all_have_advantage_zero_costs_nothing() -> None:
    one = trajectory("a", [OPENING, ("turn", [8, 9, 2])], [])
    one.advantages = [[0.0, 0.0, 0.0]]
    assert not one.has_advantage(0)
    assert (pack([one]).micro_batches, pack([one]).tokens) == ([], 3)
    one.advantages = [[0.0, 0.0, -0.1]]
    assert one.has_advantage(0)
    assert len(targets(pack([one]))) == 3


# The trainer's log-probabilities reach the segments: those of a plain forward pass, at the tokens that were trained
# on.


def learner(correction: CorrectionSection = CorrectionSection()) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(PpoClip(), correction))


def logprobs_conversations() -> list[Trajectory]:
    """Those of `group`, one of them twice, one without advantage, and a turn that is not trained on."""
    twice = trajectory("b2", [("context", [5, 6, 7]), ("turn", [13, 2]), ("context", [14])], [-0.5])
    zero = trajectory("z", [("context", [5, 6, 7]), ("turn", [17, 2])], [0.0])
    made = [*group(), twice, zero]
    made[0].turns[0].weight = 0.0
    return made


def expected(one: LocalLearner, conversation: Trajectory) -> list[float]:
    """From the model's forward pass on the sequence alone."""
    (segment,) = conversation.segments
    logprobs = [0.0, *one.token_logprobs(segment.token_ids)]
    weights = [conversation.turns[turn].weight if turn >= 0 else None for turn in segment.turn]
    return [0.0 if w is None else logprob if w else math.nan for logprob, w in zip(logprobs, weights, strict=True)]


@pytest.mark.parametrize(
    "packing",
    [{}, {"share_prompts": False, "micro_batch_tokens": 1}, {"micro_batch_tokens": 8}],
    ids=["tree", "separate rows", "several micro-batches"],
)
@pytest.mark.parametrize("reject", [False, True])
def test_they_are_those_of_a_plain_forward_pass(packing: dict[str, int], reject: bool) -> None:
    one = learner(CorrectionSection(action="reject", low=1e-9, high=1e-8) if reject else CorrectionSection())
    trajectories = logprobs_conversations()
    before = {conversation.id: expected(one, conversation) for conversation in trajectories}
    batch = pack(trajectories, **packing)  # type: ignore[arg-type]
    update = asyncio.run(one.update([batch], lr=0.1, epochs=2))
    set_trainer_logprobs(trajectories, [batch], update.logprobs)
    for conversation in trajectories[:-1]:
        (segment,) = conversation.segments
        assert list(segment.trainer_logprobs) == pytest.approx(before[conversation.id], abs=1e-4, nan_ok=True)
    assert not trajectories[-1].segments[0].trainer_logprobs  # no gradient: it was in no forward pass


def test_each_minibatch_has_its_own() -> None:
    one, trajectories = learner(), group()
    batches = [pack(trajectories[:2]), pack(trajectories[2:])]
    update = asyncio.run(one.update(batches, lr=0.0))
    set_trainer_logprobs(trajectories, batches, update.logprobs)
    for conversation in trajectories:
        (segment,) = conversation.segments
        assert list(segment.trainer_logprobs) == pytest.approx(expected(one, conversation), abs=1e-4)


def test_a_wrong_number_is_an_error() -> None:
    one, trajectories = learner(), group()
    batch = pack(trajectories)
    update = asyncio.run(one.update([batch], lr=0.0))
    trajectories[0].turns[0].weight = 0.0
    with pytest.raises(ValueError, match="2 targets and 5 log-probabilities"):
        set_trainer_logprobs(trajectories, [batch], update.logprobs)
