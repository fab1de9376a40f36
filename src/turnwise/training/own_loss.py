"""A loss of the user, before the first step: whether it can be called, and whether it keeps what the losses of turnwise keep.

Knows small batches that are made here. Does not know models or packing. In a step, `losses.own` calls the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from turnwise.errors import ConfigError
from turnwise.options.algorithm import LossSection, OwnLoss
from turnwise.training.losses import Loss, Targets, groups_of, make_loss


@dataclass(frozen=True, slots=True)
class Example:
    """The input of a loss."""

    logprob_N: torch.Tensor
    targets: Targets

    def select(self, place_N: torch.Tensor) -> Example:
        """The tokens at these places, in this order."""
        return Example(self.logprob_N[place_N], self.targets.select(place_N))


def example() -> Example:
    """Tokens as training has them: four sequences, of which the first two are segments of one conversation.

    There are turns of different lengths, ratios far from 1, tokens of older weights, advantages of both signs, a sequence of one
    token, one that stands for two equal conversations, and one whose advantages are 0.
    """
    sequence_N = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3])
    count = len(sequence_N)
    logprob_N = -0.1 - 0.35 * torch.arange(count).remainder(5)
    old_N = logprob_N + torch.tensor([0.0, 0.5, -0.9, 0.02, -0.1, 0.0, -1.6, 0.7, 0.3, -0.2, 0.0, 0.9])
    copies_N = torch.where(sequence_N == 2, 2, 1)
    targets = Targets(
        token_N=torch.arange(count).remainder(7) + 3,
        sequence_N=sequence_N,
        turn_N=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 1, 1]),
        version_N=torch.where(sequence_N == 3, 4, 5),
        copies_N=copies_N,
        behaviour_logprob_N=old_N,
        known_N=torch.ones(count, dtype=torch.bool),
        version=5,
        advantage_N=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, 1.5, 1.5, -2.0, -0.75, 0.0, 0.0, 0.0]),
        weight_N=copies_N / float(copies_N.sum()),
        value_N=torch.linspace(-0.5, 0.75, count),
    )
    return Example(logprob_N, targets)


def on_policy(given: Example) -> Example:
    """The same tokens, all of the present weights: their ratios are 1."""
    targets = replace(given.targets, behaviour_logprob_N=given.logprob_N.clone(), version_N=torch.full((12,), 5))
    return Example(given.logprob_N, targets)


def try_own_loss(options: OwnLoss) -> None:
    """Call the function on small batches, so that what is wrong with it is said before the first step. Raises ConfigError."""
    loss, given = make_loss(options), example()
    try:
        for one in (given, on_policy(given), given.select(torch.tensor([8]))):
            _loss_and_slope(loss, one)
    except ConfigError as error:
        raise ConfigError(f"{error}\n(It was tried on a small batch before the first step.)") from error.__cause__
    if not loss.needs.zero_advantages and bool(_loss_and_slope(loss, given)[1][given.targets.advantage_N == 0].any()):
        raise ConfigError(
            f"loss: {options.use} declares zero_advantages=False (@needs), and tokens with the advantage 0 have a gradient: "
            f"remove the declaration"
        )


def broken_invariants(options: LossSection) -> list[str]:
    """What the losses of turnwise keep, and this one does not: for each, what was done and what changed. Raises ConfigError if a
    function of the user fails."""
    loss, given = make_loss(options), example()
    expected = _loss_and_slope(loss, given)
    found = ["it changes the columns that it is given"] if not _unchanged(given) else []
    given = example()
    number_N = given.targets.sequence_N
    by_sequence = [(number_N == number).nonzero()[:, 0] for number in range(4)]

    def of_parts(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Each part as a micro-batch of its own, put back in the order of `example`."""
        results = [_loss_and_slope(loss, given.select(place_N)) for place_N in parts]
        back_N = torch.cat(list(parts)).argsort()
        return torch.cat([one for one, _ in results])[back_N], torch.cat([one for _, one in results])[back_N]

    def with_columns(**columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _loss_and_slope(loss, Example(given.logprob_N, replace(given.targets, **columns)))

    order = [by_sequence[number] for number in (2, 0, 3, 1)]
    weight_N = given.targets.weight_N
    tries: Sequence[tuple[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = (
        ("a second call with the same batch gives another loss", lambda: of_parts([torch.arange(len(number_N))])),
        ("the order of the sequences changes their loss", lambda: of_parts([torch.cat(order)])),
        (
            "the loss of a sequence depends on the other sequences of its micro-batch, also on the other segments of its "
            "conversation (batch statistics belong into an estimator)",
            lambda: of_parts(by_sequence),
        ),
        ("other numbers of the sequences change their loss", lambda: with_columns(sequence_N=3 * number_N + 7)),
        (
            "other weights (targets.weight_N) change the loss, which is multiplied by them afterwards",
            lambda: with_columns(
                weight_N=torch.where(groups_of(given.targets, "turn") == 1, weight_N / 2, weight_N / 3)
            ),
        ),
    )
    return found + [name for name, repeat in tries if not _same(repeat(), expected)]


def _loss_and_slope(loss: Loss, given: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token, and the gradient of its sum by each log-probability."""
    logprob_N = given.logprob_N.clone().requires_grad_(True)
    # numbers of which each token has its own, as from a model
    reference_N, entropy_N = given.logprob_N * 1.25 - 0.05, 0.5 - 0.75 * logprob_N
    terms = loss(
        logprob_N,
        given.targets,
        reference_logprob_N=reference_N if loss.needs_reference else None,
        entropy_N=entropy_N if loss.needs_entropy else None,
    )
    (slope_N,) = torch.autograd.grad(terms.loss_N.sum(), logprob_N)
    if not bool(slope_N.isfinite().all()):
        token = int((~slope_N.isfinite()).nonzero()[0])
        name = getattr(loss.options, "use", loss.options.name)
        raise ConfigError(
            f"loss: {name} has the gradient {float(slope_N[token])} for token {token} of {len(slope_N)}; it must be a "
            f"finite number (torch.where and clamp do not stop the NaN of a branch that is not taken)"
        )
    return terms.loss_N.detach(), slope_N


def _unchanged(given: Example) -> bool:
    other = example()
    columns = [
        (getattr(given.targets, column.name), getattr(other.targets, column.name)) for column in fields(other.targets)
    ]
    return torch.equal(given.logprob_N, other.logprob_N) and all(
        torch.equal(one, two) for one, two in columns if isinstance(two, torch.Tensor)
    )


def _same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in zip(found, expected, strict=True))
