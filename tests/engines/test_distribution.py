"""The distribution sampled from, held against a plain loop over one row's tokens; each filter by itself at its edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from turnwise.models.distribution import sampling_logits

LOGITS = [3.0, 1.0, 2.5, -4.0, 2.0, -9.0]


def kept(logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The probabilities of the tokens: temperature, the `top_k` most probable, of these the fewest that reach `top_p`, and
    those of at least `min_p` times the largest probability."""
    scaled = [logit / temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if top_k:
        order = order[:top_k]
    total = sum(math.exp(scaled[token]) for token in order)
    if top_p < 1:
        chosen, reached = [], 0.0
        for token in order:
            if chosen and reached >= top_p:
                break
            chosen.append(token)
            reached += math.exp(scaled[token]) / total
        order = chosen
    order = [token for token in order if math.exp(scaled[token] - max(scaled)) >= min_p]
    total = sum(math.exp(scaled[token]) for token in order)
    return [math.exp(scaled[token]) / total if token in order else 0.0 for token in range(len(logits))]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    *({"top_k": k} for k in (1, 2, 5, 6, 99)),
    *({"top_p": p} for p in (1e-9, 0.5, 0.8, 0.98, 0.9999)),
    *({"min_p": p} for p in (1e-6, 1e-3, 0.3, 0.7, 0.999)),
    {"top_k": 3, "top_p": 0.7},
    {"top_k": 1, "min_p": 0.5},
    {"top_p": 0.95, "min_p": 0.5},
    {"temperature": 0.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
]
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_filter_leaves_what_a_plain_loop_leaves(options: dict[str, Any]) -> None:
    given = {f"{name}_N": value for name, value in options.items()}
    found = sampling_logits(torch.tensor([LOGITS]), **given)[0].softmax(-1)
    assert found.tolist() == pytest.approx(kept(LOGITS, **{**PLAIN, **options}), abs=1e-6)


def test_rows_have_options_of_their_own() -> None:
    rows = [{**PLAIN, **options} for options in OPTIONS]
    columns = {f"{name}_N": torch.tensor([row[name] for row in rows]) for name in PLAIN}
    found_NV = sampling_logits(torch.tensor([LOGITS] * len(rows)), **columns).softmax(-1)
    for found, row in zip(found_NV, rows, strict=True):
        assert found.tolist() == pytest.approx(kept(LOGITS, **row), abs=1e-6)


@pytest.mark.parametrize("options", [{"top_k_N": 1}, {"top_p_N": 1e-9}, {"min_p_N": 0.999}])
def test_the_token_that_was_sampled_is_never_left_out(options: dict[str, Any]) -> None:
    found = sampling_logits(torch.tensor([LOGITS]), keep_N=torch.tensor([4]), **options)[0].softmax(-1)
    pair = [math.exp(3.0), math.exp(2.0)]
    expected = [0.0] * 6
    expected[0], expected[4] = pair[0] / sum(pair), pair[1] / sum(pair)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_without_an_option_the_logits_are_the_same_tensor() -> None:
    logits_NV = torch.tensor([LOGITS])
    assert sampling_logits(logits_NV) is logits_NV
