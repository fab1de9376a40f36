"""A batch is exact: every sampled token once, weighed right, however it is packed."""

from __future__ import annotations

import pytest
import torch

from support.tiny import tiny_model
from turnwise.options.algorithm import LossSection
from turnwise.training.batch import Batch, divide_evenly, pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.types import Completion, LogprobKind, Row, Sampling, Segment, Trajectory, Turn


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
