"""Rock, paper, scissors against oneself: the first player is the conversation of the row, the second an agent of the episode."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from turnwise import Opening, Reply, Row, SamplingChange, Turn, current_episode, environment, user_message

BEATS = {"R": "S", "P": "R", "S": "P"}
FORFEIT = -3.0
"""The reward of an answer that begins with no move. The other player gets 0."""
SHORT = SamplingChange(max_tokens=1, answers_cut=True)


@environment
async def rock_paper_scissors(row: Row, rounds: int = 1, rock: float = 2.0) -> AsyncGenerator[Opening | Reply, Turn]:
    """Both players answer R, P or S at the same time. The loser of a round pays the winner 1, or `rock` if rock has won it.

    With rock=2, the equilibrium is R 1/4, P 1/2, S 1/4: whoever plays so loses nothing on average, whatever the other does. The
    metrics `R`, `P` and `S` are the shares of the moves of both players.
    """
    rules = [{"role": "user", "content": "R, P or S?"}]
    async with current_episode().agent("second", messages=rules, sampling=SHORT) as second:
        turn = yield Opening(messages=rules, sampling=SHORT)
        news = ""
        for number in range(rounds):
            other = await second.turn(news or ())
            mine, theirs = turn.text[:1], other.text[:1]
            first_reward, second_reward = payoffs(mine, theirs, rock)
            second.add_reward(second_reward)
            shares = {move: ((mine == move) + (theirs == move)) / 2 for move in BEATS}
            if number + 1 == rounds:
                yield Reply(reward=first_reward, metrics=shares, done=True)
            else:
                news = f"You: {theirs}. Other: {mine}. Again?"
                turn = yield user_message(f"You: {mine}. Other: {theirs}. Again?", reward=first_reward)


def payoffs(first: str, second: str, rock: float) -> tuple[float, float]:
    """The rewards of both players for their moves."""
    if first not in BEATS or second not in BEATS:
        return (0.0 if first in BEATS else FORFEIT, 0.0 if second in BEATS else FORFEIT)
    stake = rock if "R" in (first, second) and "S" in (first, second) else 1.0
    if BEATS[first] == second:
        return stake, -stake
    return (-stake, stake) if BEATS[second] == first else (0.0, 0.0)
