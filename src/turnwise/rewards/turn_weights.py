"""Turn weightings: functions that set `Turn.weight`, the weight of a turn's tokens in the loss.

A weighting gets a finished trajectory. It reads turns and messages, not tokens: `training.batch` applies the weights to the loss.
Rewards and advantages do not change; a turn of weight 0 keeps its reward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.errors import Failed, boundary
from turnwise.types import Failure, Stop, Trajectory, Turn
from turnwise.user_code.copies import ConversationCopies

TurnWeighting = Callable[[Trajectory], None]
"""Sets the weight of each turn of a trajectory. An error inside fails that trajectory and is not raised."""


def all_turns(trajectory: Trajectory) -> None:
    """Weight 1 for all turns."""
    _keep_last(trajectory, len(trajectory.turns))


def last_turn(trajectory: Trajectory) -> None:
    """Weight 1 for the model's last answer, 0 for the others. An answer that was cut and continued is one answer."""
    _keep_last(trajectory, 1)


def after_last_user(trajectory: Trajectory) -> None:
    """Weight 1 for the turns after the last user message that the model answered, 0 for the others.

    Tool messages do not count: all tool rounds of the last user message are trained on. Turns that the environment marked
    (`Reply.train_on`) also have weight 1.
    """
    _keep_round(trajectory, ("user",))


def last_round(trajectory: Trajectory) -> None:
    """Weight 1 for the turns after the last user or tool message that the model answered, 0 for the others.

    This is `loss_scale last_round` of ms-swift as it is since its pull request 9923 (August 2026). Before that, only a
    user message began a round: `after_last_user`. As in ms-swift, turns that the environment
    marked (`Reply.train_on`) have weight 1.
    """
    _keep_round(trajectory, ("user", "tool"))


def without_failed_calls(trajectory: Trajectory) -> None:
    """Weight 0 for the turns whose tool calls all failed, 1 for the others.

    A call fails if it cannot be parsed, names an unknown tool, has wrong arguments, or if its tool raises or takes too long.
    """
    for turn in trajectory.turns:
        errors = {outcome.id: outcome.error for outcome in turn.outcomes}
        failed = [errors.get(call.id, call.error) is not None for call in turn.calls]
        turn.weight = 0.0 if failed and all(failed) else 1.0


def without_void_turns(trajectory: Trajectory) -> None:
    """Weight 0 for all turns of a conversation with a void turn, 1 for those of other conversations.

    A void turn has neither a tool call nor the final answer (SimpleTIR, arXiv 2509.02479): it has no call, and a limit cut it, or
    another turn follows. For conversations in which every turn but the last calls a tool.
    """
    last = len(trajectory.turns) - 1
    void = any(not turn.calls and (n < last or was_cut(trajectory)) for n, turn in enumerate(trajectory.turns))
    for turn in trajectory.turns:
        turn.weight = float(not void)


TURN_WEIGHTINGS: Mapping[str, TurnWeighting] = {
    "all": all_turns,
    "last_turn": last_turn,
    "after_last_user": after_last_user,
    "last_round": last_round,
    "without_failed_calls": without_failed_calls,
    "without_void_turns": without_void_turns,
}
"""The weightings that a recipe can name."""


def without_cut_turns(weigh_turns: TurnWeighting) -> TurnWeighting:
    """Weight 0 for a trajectory whose last turn was cut by a limit on tokens; all others are weighted by `weigh_turns`.

    This is the overlong filter of DAPO, arXiv 2503.14476. The reward of the trajectory stays in the statistics of its group.
    """

    def weigh(trajectory: Trajectory) -> None:
        weigh_turns(trajectory)
        if was_cut(trajectory):
            for turn in trajectory.turns:
                turn.weight = 0.0

    return weigh


def of_all_agents(weigh_turns: TurnWeighting) -> TurnWeighting:
    """The weighting of a conversation and of its agents' conversations. Those that are not trained on have weight 0."""

    def weigh(trajectory: Trajectory) -> None:
        weigh_turns(trajectory)
        for agent in trajectory.agents:
            if agent.trained:
                weigh_turns(agent)
            else:
                for turn in agent.turns:
                    turn.weight = 0.0

    return weigh


def was_cut(trajectory: Trajectory) -> bool:
    """Whether a limit on tokens cut the trajectory's last turn. If the environment itself ended the trajectory (`Stop.DONE`), it
    had asked for so few tokens (`SamplingChange.answers_cut`)."""
    cut = bool(trajectory.turns) and trajectory.turns[-1].finish_reason == "length"
    return cut and trajectory.stop is not Stop.DONE


def custom(function: Callable[..., Any], *, name: str) -> TurnWeighting:
    """A weighting from a user's function, called for each turn as `function(turn)`, or as `function(turn, trajectory)`.

    It returns the turn's weight, a finite number of 0 or more. If it raises or returns anything else, this trajectory fails
    with an error of kind `loss_mask`.
    """
    both = takes_trajectory(function)

    def weigh(trajectory: Trajectory) -> None:
        if trajectory.failed:
            return
        try:
            with boundary("loss_mask"):
                given = ConversationCopies().trajectory(trajectory)
            weights = [_weight(name, turn, function, (turn, given) if both else (turn,)) for turn in list(given.turns)]
        except Failed as failed:
            trajectory.fail(failed.failure)
            return
        for turn, weight in zip(trajectory.turns, weights, strict=True):
            turn.weight = weight

    return weigh


def takes_trajectory(function: Callable[..., Any]) -> bool:
    """Whether a function of a turn also takes the trajectory: its second positional parameter is named `trajectory`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return False
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return positional[1:2] == ["trajectory"]


def _weight(name: str, turn: Turn, function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """The function's result as a number; tensors and numpy arrays of one element are numbers too."""
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
    """Weight 1 for the answers after the last message of one of these roles, and for turns that the environment marked."""
    _keep_last(trajectory, _answers_since(trajectory, roles))
    for turn in trajectory.turns:
        if turn.train_on:
            turn.weight = 1.0


def _answers(trajectory: Trajectory) -> list[list[Turn]]:
    """The turns of each answer: several where an environment cut the answer and the model continued it."""
    answers: list[list[Turn]] = []
    continues = False
    for turn in trajectory.turns:
        if continues:
            answers[-1].append(turn)
        else:
            answers.append([turn])
        continues = turn.kept_tokens is not None
    return answers


def _answers_since(trajectory: Trajectory, roles: tuple[str, ...]) -> int:
    """Number of answers after the last message of one of these roles.

    A message after the last answer does not begin a round. The count is from the end, because an opening may have assistant
    messages that the model did not sample, and a rewritten history may lack answers that the model sampled.
    """
    count = 0
    for message in reversed(trajectory.messages):
        if message["role"] == "assistant":
            count += 1
        elif count and message["role"] in roles:
            break
    return count
