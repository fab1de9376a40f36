"""Which sampled tokens are trained on, if a scheduler returns token ids, a loss mask or log-probabilities.

turnwise trains on the tokens that were sampled. It never takes tokens from a scheduler: it compares the returned ids with the
sampled ones. A token is trained on if the returned id equals the sampled one and the mask is 1. If lengths or values do not
fit together, the conversation ends with an error that names the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.compat.swift.protocol import RolloutOutput

__all__ = ["OutputMasks", "ReturnedTokens", "SampledTurn", "TurnMask", "common_prefix", "mask_outputs", "mask_turn"]

_LOGPROB_TOLERANCE = 1e-3
"""Log-probabilities that were computed from the same numbers elsewhere differ by less than this."""


@dataclass(frozen=True)
class ReturnedTokens:
    """The token ids, the loss mask and the log-probabilities that `step` or `on_turn_end` returned for one turn."""

    ids: Any = None
    mask: Any = None
    logprobs: Any = None

    @classmethod
    def of(cls, result: dict[str, Any]) -> ReturnedTokens:
        """From the dictionary that the hook returned."""
        return cls(result.get("response_token_ids"), result.get("response_loss_mask"), result.get("rollout_logprobs"))

    @property
    def empty(self) -> bool:
        """Whether nothing was returned about the tokens."""
        return all(values is None or len(values) == 0 for values in (self.ids, self.mask, self.logprobs))

    @property
    def without_mask(self) -> bool:
        """Whether no loss mask was returned."""
        return self.mask is None or len(self.mask) == 0


@dataclass(frozen=True)
class TurnMask:
    """Which tokens of one turn are not trained on."""

    positions: list[int] = field(default_factory=list)
    """Positions in the sampled tokens of the turn."""
    has_mask: bool = False
    """Whether the scheduler returned a loss mask; `loss_scale` is ignored then."""
    not_sampled: int = 0
    """Tokens with mask 1 that the model did not sample. They stay context."""


def mask_turn(
    returned: ReturnedTokens, sampled: Sequence[int], logprobs: Sequence[float], *, turn: int, edited: bool
) -> TurnMask:
    """Compare the tokens that were returned for a turn with its sampled tokens. `turn` counts from 1.

    `edited`: the scheduler changed the text of the turn too, so the returned tokens may differ from some position on.

    Raises ValueError if ids, mask and log-probabilities do not fit together, or do not fit a turn whose text is unchanged.
    """
    if returned.empty:
        return TurnMask()
    ids = list(sampled) if returned.ids is None else [int(token) for token in returned.ids]
    mask = _mask(returned.mask, len(ids), f"turn {turn}", have_ids=returned.ids is not None)
    same = common_prefix(ids, sampled)
    # the last sampled token is the stop token, which the scheduler may leave out
    if not edited and not (same == len(ids) and same >= len(sampled) - 1):
        at = f"; they differ at position {same}" if same < min(len(ids), len(sampled)) else ""
        raise ValueError(
            f"turn {turn}: response_token_ids has {len(ids)} tokens, but the model sampled {len(sampled)}{at}. The text of the "
            f"answer was not changed, so return response_choice.token_ids"
        )
    if returned.logprobs is not None and len(returned.logprobs):
        _check_logprobs([float(value) for value in returned.logprobs], mask, logprobs[:same], f"turn {turn}")
    end = len(sampled) if edited else same  # a stop token that was left out is trained on as sampled
    positions = [position for position in range(end) if position >= same or not mask[position]]
    return TurnMask(positions, has_mask=not returned.without_mask, not_sampled=sum(mask[same:]))


@dataclass(frozen=True)
class SampledTurn:
    """The sampled tokens of one turn, in a conversation that `run` leads."""

    index: int
    token_ids: Sequence[int]
    edited: bool = False
    """Whether the end of the turn was cut off, so that only its first tokens may be returned."""


@dataclass(frozen=True)
class OutputMasks:
    """Which tokens of a conversation are not trained on, from the outputs of `run`."""

    masked: dict[int, list[int]] = field(default_factory=dict)
    """For each turn (by its index): the positions in its sampled tokens that are not trained on."""
    train_on: list[int] = field(default_factory=list)
    """Turns with a loss mask, and turns in the last round of an output: `loss_scale last_round` trains on these."""
    output_ends: list[int] = field(default_factory=list)
    """The last turn of each output; each output is one training record."""


def mask_outputs(outputs: Sequence[RolloutOutput], turns: Sequence[SampledTurn]) -> OutputMasks:
    """Compare the outputs of `run` with the sampled turns.

    An output may contain one turn or several turns; tokens between the turns were inserted by the scheduler. All tokens of a
    turn that is in no output are masked, unless no output has token ids at all.

    Raises ValueError if lengths do not fit together, or if the mask is 1 on a token that the model did not sample.
    """
    if not any(output.response_token_ids for output in outputs):
        return _outputs_without_ids(outputs, turns)
    trained: dict[int, set[int]] = {}
    kept: set[int] = set()
    ends: list[int] = []
    for number, output in enumerate(outputs, 1):
        rounds = _find_rounds(output, turns, trained, f"output {number} of run")
        last = rounds if output.response_loss_mask else rounds[-_last_round(output) :]
        kept.update(index for turns_of_round in last for index in turns_of_round)
        ends += [turns_of_round[-1] for turns_of_round in rounds[-1:] if turns_of_round]
    masked = {
        turn.index: [place for place in range(len(turn.token_ids)) if place not in trained.get(turn.index, ())]
        for turn in turns
    }
    return OutputMasks({index: places for index, places in masked.items() if places}, sorted(kept), ends)


def _outputs_without_ids(outputs: Sequence[RolloutOutput], turns: Sequence[SampledTurn]) -> OutputMasks:
    for number, output in enumerate(outputs, 1):
        if any(output.response_loss_mask) or any(output.rollout_logprobs):
            raise ValueError(
                f"output {number} of run has response_loss_mask or rollout_logprobs, but no response_token_ids; return "
                f"response_choice.token_ids with it"
            )
    one_turn_each = len(outputs) > 1 and len(outputs) == len(turns)
    indices = [turn.index for turn in turns] if one_turn_each else []
    return OutputMasks(train_on=indices, output_ends=indices)


def _find_rounds(
    output: RolloutOutput, turns: Sequence[SampledTurn], trained: dict[int, set[int]], where: str
) -> list[list[int]]:
    """For each list of ids in an output, the turns that it contains. Adds the tokens with mask 1 to `trained`."""
    masks = output.response_loss_mask or [[1] * len(ids) for ids in output.response_token_ids]
    if len(masks) != len(output.response_token_ids):
        raise ValueError(
            f"{where}: response_loss_mask has {len(masks)} lists for {len(output.response_token_ids)} of response_token_ids"
        )
    first = 0
    rounds: list[list[int]] = []
    for ids, given in zip(output.response_token_ids, masks, strict=True):
        mask = _mask(given, len(ids), where, have_ids=True)
        rounds.append([])
        first = _align(ids, mask, turns, first, trained, rounds[-1], where)
    logprobs = len([float(value) for values in output.rollout_logprobs for value in values])
    ones = sum(int(value) for mask in masks for value in mask)
    if logprobs and logprobs != ones:
        raise ValueError(f"{where}: rollout_logprobs has {logprobs} values for {ones} tokens whose mask is 1")
    return rounds


def _last_round(output: RolloutOutput) -> int:
    """The number of assistant messages after the last message of a user or a tool, at least 1."""
    count = 0
    for message in reversed(output.messages or ()):
        if message.get("role") != "assistant":
            break
        count += 1
    return max(count, 1)


def _align(
    ids: Sequence[int],
    mask: Sequence[int],
    turns: Sequence[SampledTurn],
    first: int,
    trained: dict[int, set[int]],
    aligned: list[int],
    where: str,
) -> int:
    """Find the sampled turns in one list of ids, from `turns[first]` on. Returns the first turn that was not found.

    Adds to `trained` and `aligned`.
    """
    place = 0
    while place < len(ids):
        for number in range(first, len(turns)):
            turn, length = turns[number], len(turns[number].token_ids)
            same = common_prefix(ids[place:], turn.token_ids)
            if same and (turn.edited or same >= length - 1):  # the stop token may have been left out
                aligned.append(turn.index)
                positions = trained.setdefault(turn.index, set())
                positions.update(n for n in range(same) if mask[place + n])
                if not turn.edited and same == length - 1 and mask[place + same - 1]:
                    positions.add(same)  # the stop token is trained on if the token before it is
                place, first = place + same, number + 1
                break
        else:
            if mask[place]:
                raise ValueError(
                    f"{where}: the mask is 1 at position {place} of {len(ids)} response_token_ids, but the model did not sample "
                    f"token {ids[place]} there ({len(turns) - first} of {len(turns)} turns are left); return "
                    f"response_choice.token_ids"
                )
            place += 1
    return first


def _mask(mask: Any, length: int, where: str, *, have_ids: bool) -> list[int]:
    if mask is None or len(mask) == 0:
        return [1] * length
    if len(mask) != length:
        what = "response_token_ids" if have_ids else "sampled tokens (no response_token_ids were returned)"
        raise ValueError(f"{where}: response_loss_mask has {len(mask)} values for {length} {what}")
    if wrong := [value for value in mask if value not in (0, 1)]:
        raise ValueError(f"{where}: response_loss_mask contains {wrong[0]!r}; its values must be 0 or 1")
    return [int(value) for value in mask]


def _check_logprobs(given: list[float], mask: list[int], sampled: Sequence[float], where: str) -> None:
    if len(given) != sum(mask):
        raise ValueError(f"{where}: rollout_logprobs has {len(given)} values for {sum(mask)} tokens whose mask is 1")
    places = [place for place, value in enumerate(mask) if value]
    for value, place in zip(given, places, strict=True):
        if place < len(sampled) and abs(value - sampled[place]) > _LOGPROB_TOLERANCE:
            raise ValueError(
                f"{where}: rollout_logprobs has {value:g} for token {place}, which was sampled with {sampled[place]:g}; "
                f"return the values of response_choice.logprobs, or none"
            )


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of equal items at the beginning of two sequences."""
    count = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        count += 1
    return count
