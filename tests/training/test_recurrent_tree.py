"""A prefix tree through recurrent layers gives the log-probabilities and the gradient of one pass for each sequence."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from support.hybrids import CONFIGS, hybrid
from training.test_tree import packed_gradient, plain_gradient, random_trajectories, sequences
from turnwise.models.loading import recompute_layers
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.recurrent_tree import Piece, pieces_of
from turnwise.training.tree import FlatRow
from turnwise.types import Sampling

SHARING = sorted(CONFIGS.keys() - {"jamba", "mamba", "llama4"})
QUICK = ("qwen3_5", "lfm2")
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHARING]


def test_a_row_is_cut_where_sequences_part() -> None:
    row = FlatRow.of([np.array(one) for one in ([1, 2, 3], [1, 2, 4, 5], [1, 6], [7, 8])])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pieces_of(row.runs) == [
        Piece(0, 1, None, 0),
        Piece(1, 1, 0, 1),
        Piece(2, 1, 1, 2),
        Piece(3, 2, 1, 2),
        Piece(5, 1, 0, 1),
        Piece(6, 2, None, 0),
    ]


@given(sequences)
@settings(deadline=None, max_examples=50)
def test_the_pieces_of_a_sequence_are_the_sequence(rows: list[np.ndarray]) -> None:
    row = FlatRow.of(rows)
    pieces = pieces_of(row.runs)
    assert [piece.start for piece in pieces] == np.cumsum([0, *(piece.length for piece in pieces)])[:-1].tolist()
    of_place = [index for index, piece in enumerate(pieces) for _ in range(piece.length)]
    for places in row.places:
        index: int | None = of_place[places[-1]]
        found: list[int] = []
        while index is not None:
            piece = pieces[index]
            found = [*range(piece.start, piece.start + piece.length), *found]
            index = piece.parent
        assert found[: len(places)] == places.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_tree_is_that_of_separate_sequences(family: str) -> None:
    model = hybrid(family)
    trajectories = random_trajectories(
        1, count=2 if family == "kimi_linear" else 9
    )  # without its kernels, a second for each
    expected = plain_gradient(model, trajectories)
    assert expected.abs().max() > 1e-3
    for limit in (10_000, 30):
        actual = packed_gradient(model, trajectories, micro_batch_tokens=limit)
        torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)


def test_layers_are_computed_again_from_the_states_of_the_tree() -> None:
    model = hybrid("qwen3_5")
    trajectories = random_trajectories(2)
    expected = plain_gradient(model, trajectories)
    recompute_layers(model)
    actual = packed_gradient(model, trajectories)
    torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)


def test_a_copy_of_a_model_computes_trees_with_its_own_weights() -> None:
    model = hybrid("qwen3_5")
    assert try_tree_attention(model)
    copied = copy.deepcopy(model)
    (micro,) = pack(random_trajectories(3)).micro_batches
    with torch.no_grad():
        before, _ = Forward(model, Sampling()).logprobs(micro)
        for parameter in model.parameters():
            parameter.zero_()
        after, _ = Forward(copied, Sampling()).logprobs(micro)
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_layers_that_do_not_continue_from_a_state_are_left_as_they_were(family: str) -> None:
    model = hybrid(family)
    forwards = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert not try_tree_attention(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == forwards
