"""Which turns are learnt from, and how much: rules that set `Turn.weight`.

A rule is handed a finished trajectory. It knows turns and messages and nothing of tokens: how a weight reaches the loss is
`training.batch`'s affair. Rewards and advantages are not changed by it; a turn of weight 0 earns what it earned.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.errors import Failed, boundary
from turnwise.types import Failure, Trajectory, Turn

__all__ = ["TURN_WEIGHTINGS", "TurnWeighting", "custom", "takes_trajectory"]

TurnWeighting = Callable[[Trajectory], None]
"""Sets the weight of each turn of a trajectory. What breaks in it breaks that trajectory; it raises nothing."""


def all_turns(trajectory: Trajectory) -> None:
    """Weight 1 everywhere."""
    _keep_last(trajectory, len(trajectory.turns))


def last_turn(trajectory: Trajectory) -> None:
    """Weight 1 for the model's last answer, 0 for the rest. An answer that was cut and continued is one."""
    _keep_last(trajectory, 1)


def after_last_user(trajectory: Trajectory) -> None:
    """Weight 1 for what the model said after the last user message that it answered, 0 for the rest.

    Tool messages do not count: all tool rounds of the last question are learnt from. So are turns that the environment
    declares to be (`Reply.train_on`).
    """
    _keep_round(trajectory, ("user",))


def last_round(trajectory: Trajectory) -> None:
    """Weight 1 for what the model said after the last message of a user or a tool that it answered, 0 for the rest.

    This is `loss_scale last_round` of ms-swift as it is since its pull request 9923 (August 2026). Before that, only a
    user began a round: `after_last_user`. As there, turns that the environment declares to be learnt from keep their weight.
    """
    _keep_round(trajectory, ("user", "tool"))


TURN_WEIGHTINGS: Mapping[str, TurnWeighting] = {
    "all": all_turns,
    "last_turn": last_turn,
    "after_last_user": after_last_user,
    "last_round": last_round,
}
"""The rules that a recipe can name."""


def custom(function: Callable[..., Any], *, name: str) -> TurnWeighting:
    """A rule from a user's function, called for each turn as `function(turn)`, or as `function(turn, trajectory)`.

    It gives the turn's weight, a finite number of 0 or more. If it raises or gives anything else, the trajectory breaks
    with an error of kind `loss_mask`, and no other does.
    """
    both = takes_trajectory(function)

    def rule(trajectory: Trajectory) -> None:
        if trajectory.failed:
            return
        try:
            weights = [
                _weight(name, turn, function, (turn, trajectory) if both else (turn,)) for turn in trajectory.turns
            ]
        except Failed as failed:
            trajectory.fail(failed.failure)
            return
        for turn, weight in zip(trajectory.turns, weights, strict=True):
            turn.weight = weight

    return rule


def takes_trajectory(function: Callable[..., Any]) -> bool:
    """Whether a function of a turn wants the trajectory too: its second parameter is called `trajectory`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return False
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return positional[1:2] == ["trajectory"]


def _weight(name: str, turn: Turn, function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """What the function gives as a number; tensors and numpy numbers of one element are numbers too."""
    with boundary("loss_mask"):
        value = function(*arguments)
        wrong = f"the loss mask {name!r} gave {value!r:.80} for turn {turn.index}; a weight must be a finite number, 0 or more"
        if value is None or isinstance(value, str):  # float() would read the text
            raise Failed(Failure("loss_mask", wrong))
        number = float(value)
    if not math.isfinite(number) or number < 0:
        raise Failed(Failure("loss_mask", wrong))
    return number


def _keep_last(trajectory: Trajectory, answers: int) -> None:
    """Weight 1 for the last answers, 0 for the turns before them."""
    for number, answer in enumerate(reversed(_answers(trajectory))):
        for turn in answer:
            turn.weight = 1.0 if number < answers else 0.0


def _keep_round(trajectory: Trajectory, roles: tuple[str, ...]) -> None:
    """Weight 1 for the answers after the last message of one of these roles, and for what the environment has declared."""
    _keep_last(trajectory, _answers_since(trajectory, roles))
    for turn in trajectory.turns:
        if turn.train_on:
            turn.weight = 1.0


def _answers(trajectory: Trajectory) -> list[list[Turn]]:
    """The turns, together where an environment cut an answer and the model went on with it: they are one message."""
    answers: list[list[Turn]] = []
    going_on = False
    for turn in trajectory.turns:
        if going_on:
            answers[-1].append(turn)
        else:
            answers.append([turn])
        going_on = turn.kept_tokens is not None
    return answers


def _answers_since(trajectory: Trajectory, roles: tuple[str, ...]) -> int:
    """How many answers stand behind the last message of one of these roles, counted from the end.

    What nobody answered any more, because the conversation was over, began no round. An opening may hold answers that the
    model never gave, and a rewritten history may have lost some that it did: the last ones are there in any case.
    """
    count = 0
    for message in reversed(trajectory.messages):
        if message["role"] == "assistant":
            count += 1
        elif count and message["role"] in roles:
            break
    return count
