"""Which of the sampled tokens are learnt from, where a scheduler says so with token ids, a mask and log-probabilities.

What is trained on here is what was sampled, so what a scheduler returns is never taken for tokens: it is compared with them.
A token is learnt from where the returned ids agree with the sampled ones and the mask says 1. Numbers that do not fit
together break the conversation, with the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.compat.swift.protocol import RolloutOutput

__all__ = ["Masked", "OfOutputs", "Returned", "Sampled", "common", "masked_outputs", "masked_turn"]

_NEAR = 1e-3
"""Of a log-probability; what was computed elsewhere from the same numbers is as near as this."""


@dataclass(frozen=True)
class Returned:
    """What `step` or `on_turn_end` returned about the tokens of a turn."""

    ids: Any = None
    mask: Any = None
    logprobs: Any = None

    @classmethod
    def of(cls, result: dict[str, Any]) -> Returned:
        """From the dictionary that was returned."""
        return cls(result.get("response_token_ids"), result.get("response_loss_mask"), result.get("rollout_logprobs"))

    @property
    def nothing(self) -> bool:
        """Whether nothing was said."""
        return all(one is None or len(one) == 0 for one in (self.ids, self.mask, self.logprobs))

    @property
    def without_mask(self) -> bool:
        """Whether no loss mask was returned."""
        return self.mask is None or len(self.mask) == 0


@dataclass(frozen=True)
class Masked:
    """What of a turn is not learnt from."""

    places: list[int] = field(default_factory=list)
    declared: bool = False
    """Whether there was a mask: `loss_scale` is ignored then."""
    foreign: int = 0
    """Tokens that the scheduler wanted learnt from and the model did not sample: they are context all the same."""


def masked_turn(
    returned: Returned, sampled: Sequence[int], logprobs: Sequence[float], *, turn: int, edited: bool
) -> Masked:
    """Compare what was returned about a turn with what was sampled in it. `turn` counts from 1.

    `edited` says that the scheduler changed the text too, so that its tokens may be others from some place on.

    Raises ValueError where ids, mask and log-probabilities do not fit together, or do not fit an answer that is unchanged.
    """
    if returned.nothing:
        return Masked()
    ids = list(sampled) if returned.ids is None else [int(one) for one in returned.ids]
    mask = _mask(returned.mask, len(ids), f"turn {turn}", have_ids=returned.ids is not None)
    same = common(ids, sampled)
    if not edited and not (same == len(ids) and same >= len(sampled) - 1):
        at = f"; they differ at place {same}" if same < min(len(ids), len(sampled)) else ""
        raise ValueError(
            f"turn {turn}: response_token_ids has {len(ids)} tokens where the model sampled {len(sampled)}{at}. The text of the "
            f"answer was not changed, so they must be response_choice.token_ids"
        )
    if returned.logprobs is not None and len(returned.logprobs):
        _check_logprobs([float(one) for one in returned.logprobs], mask, logprobs[:same], f"turn {turn}")
    end = len(sampled) if edited else same  # a stop token that was left away stays as it is
    places = [place for place in range(end) if place >= same or not mask[place]]
    return Masked(places, declared=not returned.without_mask, foreign=sum(mask[same:]))


@dataclass(frozen=True)
class Sampled:
    """A turn that the model took in a conversation that `run` leads."""

    index: int
    token_ids: Sequence[int]
    edited: bool = False
    """Whether the end of it was cut off, so that only a beginning of its tokens may be returned."""


@dataclass(frozen=True)
class OfOutputs:
    """What the outputs of a `run` say about the turns of the conversation."""

    masked: dict[int, list[int]] = field(default_factory=dict)
    """What is not learnt from: index of a turn to places among its tokens."""
    learn_from: list[int] = field(default_factory=list)
    """Turns with a loss mask of their own, and those in the last round of an output: `loss_scale last_round` keeps them."""
    ends: list[int] = field(default_factory=list)
    """The last turn of each output: an output is a training record of its own."""


def masked_outputs(outputs: Sequence[RolloutOutput], turns: Sequence[Sampled]) -> OfOutputs:
    """Compare what `run` returned with the turns that the model took.

    An output may hold one turn or several; tokens between them are what the scheduler put there. A turn in no output is
    left out whole, unless no output has ids at all.

    Raises ValueError where lengths do not fit together, or the mask is 1 on a token that the model did not sample.
    """
    if not any(output.response_token_ids for output in outputs):
        for number, output in enumerate(outputs, 1):
            if any(output.response_loss_mask) or any(output.rollout_logprobs):
                raise ValueError(
                    f"output {number} of run has a response_loss_mask or rollout_logprobs without response_token_ids; "
                    f"return response_choice.token_ids beside it"
                )
        apart = len(outputs) > 1 and len(outputs) == len(turns)
        every = [turn.index for turn in turns] if apart else []
        return OfOutputs(learn_from=every, ends=every)
    learnt: dict[int, set[int]] = {}
    kept: set[int] = set()
    ends: list[int] = []
    for number, output in enumerate(outputs, 1):
        where = f"output {number} of run"
        masks = output.response_loss_mask or [[1] * len(ids) for ids in output.response_token_ids]
        if len(masks) != len(output.response_token_ids):
            raise ValueError(
                f"{where}: response_loss_mask has {len(masks)} lists for {len(output.response_token_ids)} of "
                f"response_token_ids"
            )
        at = 0
        rounds: list[list[int]] = []
        for ids, given in zip(output.response_token_ids, masks, strict=True):
            rounds.append([])
            at = _align(ids, _mask(given, len(ids), where, have_ids=True), turns, at, learnt, rounds[-1], where)
        flat = [float(one) for logprobs in output.rollout_logprobs for one in logprobs]
        ones = sum(int(one) for mask in masks for one in mask)
        if flat and len(flat) != ones:
            raise ValueError(f"{where}: rollout_logprobs has {len(flat)} values for {ones} tokens whose mask is 1")
        last = rounds if output.response_loss_mask else rounds[-_last_round(output) :]
        kept.update(index for one in last for index in one)
        ends += [one[-1] for one in rounds[-1:] if one]
    left = {
        turn.index: [place for place in range(len(turn.token_ids)) if place not in learnt.get(turn.index, ())]
        for turn in turns
    }
    return OfOutputs({index: places for index, places in left.items() if places}, sorted(kept), ends)


def _last_round(output: RolloutOutput) -> int:
    """How many answers stand behind the last message of a user or a tool, at least one."""
    count = 0
    for message in reversed(output.messages or ()):
        if message.get("role") != "assistant":
            break
        count += 1
    return max(count, 1)


def _align(
    ids: Sequence[int],
    mask: Sequence[int],
    turns: Sequence[Sampled],
    at: int,
    learnt: dict[int, set[int]],
    found: list[int],
    where: str,
) -> int:
    """Find turns in one list of ids, from the `at`-th on; returns how far they were found. Adds to `learnt` and `found`."""
    place = 0
    while place < len(ids):
        for number in range(at, len(turns)):
            turn, length = turns[number], len(turns[number].token_ids)
            same = common(ids[place:], turn.token_ids)
            if same and (turn.edited or same >= length - 1):  # the stop token may have been left away
                found.append(turn.index)
                mine = learnt.setdefault(turn.index, set())
                mine.update(n for n in range(same) if mask[place + n])
                if not turn.edited and same == length - 1 and mask[place + same - 1]:
                    mine.add(same)
                place, at = place + same, number + 1
                break
        else:
            if mask[place]:
                raise ValueError(
                    f"{where}: the mask is 1 at place {place} of {len(ids)} response_token_ids, and token {ids[place]} there is "
                    f"none that the model sampled there ({len(turns) - at} of {len(turns)} turns are left); return "
                    f"response_choice.token_ids"
                )
            place += 1
    return at


def _mask(mask: Any, length: int, where: str, *, have_ids: bool) -> list[int]:
    if mask is None or len(mask) == 0:
        return [1] * length
    if len(mask) != length:
        what = "response_token_ids" if have_ids else "sampled tokens (no response_token_ids were returned)"
        raise ValueError(f"{where}: response_loss_mask has {len(mask)} values for {length} {what}")
    if wrong := [one for one in mask if one not in (0, 1)]:
        raise ValueError(f"{where}: response_loss_mask holds {wrong[0]!r}; its values are 0 and 1")
    return [int(one) for one in mask]


def _check_logprobs(given: list[float], mask: list[int], sampled: Sequence[float], where: str) -> None:
    if len(given) != sum(mask):
        raise ValueError(f"{where}: rollout_logprobs has {len(given)} values for {sum(mask)} tokens whose mask is 1")
    places = [place for place, one in enumerate(mask) if one]
    for value, place in zip(given, places, strict=True):
        if place < len(sampled) and abs(value - sampled[place]) > _NEAR:
            raise ValueError(
                f"{where}: rollout_logprobs says {value:g} for token {place}, which was sampled with {sampled[place]:g}; "
                f"return those of response_choice.logprobs, or none"
            )


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences have in common at their beginning."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
