"""verl's interactions as environments: one object serves all conversations, and answers each turn without a tool call."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any

from turnwise.compat.verl.agent_data import AgentData
from turnwise.compat.verl.base import BaseInteraction
from turnwise.compat.verl.calls import ConversationResource, call, defines, takes
from turnwise.compat.verl.rows import Wanted, refuse
from turnwise.compat.verl.shipped import Gsm8kInteraction
from turnwise.errors import nearest
from turnwise.types import Opening, Reply, Row, Turn
from turnwise.user_code.reward_number import reward_number

__all__ = ["Interaction", "choose", "interaction_keywords"]

_log = logging.getLogger(__name__)


def choose(interactions: Mapping[str, Any], wanted: Wanted, row: Row) -> tuple[str, Any]:
    """The interaction that a row names, or the only interaction.

    Raises Failed if the name is unknown, or if there are several interactions and the row names none.
    """
    name = wanted.interaction.get("name")
    have = ", ".join(sorted(interactions))
    if name is None:
        if len(interactions) > 1:
            raise refuse(row, f"interaction_kwargs has no name, and there are several interactions: {have}")
        (name,) = interactions
    if name not in interactions:
        raise refuse(row, f"there is no interaction {name!r}{nearest(str(name), interactions)} (there are: {have})")
    return name, interactions[name]


def interaction_keywords(interaction: Any, wanted: Wanted, row: Row) -> dict[str, Any]:
    """The keyword arguments that the interaction receives from the row.

    A `ground_truth` that is not in `interaction_kwargs` is taken from `reward_model`. If the row has it nowhere, a parameter with
    a default value keeps its default, with one warning for the class. Raises Failed if there is no default, or if the interaction
    grades as verl's Gsm8kInteraction does: the conversation could not be graded.
    """
    keywords = dict(wanted.interaction)
    if not takes(interaction.start_interaction, "ground_truth") or keywords.get("ground_truth") is not None:
        return keywords
    if wanted.truth is not None:
        keywords["ground_truth"] = wanted.truth
        return keywords
    kind = type(interaction)
    default = inspect.signature(interaction.start_interaction).parameters["ground_truth"].default
    grades = getattr(kind, "calculate_score", None) is Gsm8kInteraction.calculate_score
    place = "put it into extra_info.interaction_kwargs.ground_truth, or reward_model.ground_truth"
    if grades or default is inspect.Parameter.empty:
        raise refuse(row, f"{kind.__name__} needs the ground truth, and the row has none: {place}")
    keywords.pop("ground_truth", None)
    _tell_of_default(kind, repr(default), place)
    return keywords


@functools.cache
def _tell_of_default(kind: type, default: str, place: str) -> None:
    """Warn once that conversations without a ground truth begin with the default value."""
    _log.warning(
        "%s.start_interaction has the parameter ground_truth, and rows have none, so it is %s in their conversations. If the "
        "interaction grades with it, %s",
        kind.__name__,
        default,
        place,
    )


class Interaction:
    """A user's interaction in one conversation.

    Calls `start_interaction` at the beginning and `generate_response` for each turn. If the class overrides `calculate_score`,
    calls it when the interaction ends the conversation, and when `generate_response` returns no score. Calls
    `finalize_interaction` exactly once if the interaction was started, however the conversation ends.
    """

    def __init__(
        self,
        interaction: Any,
        *,
        id: str,
        keywords: Mapping[str, Any],
        agent_data: AgentData,
        most_answers: int | None = None,
    ) -> None:
        """`agent_data` has the messages up to the current turn. The conversation ends after `most_answers` answers."""
        self._interaction = interaction
        self._kind = type(interaction).__name__
        self._id = id
        self._keywords = keywords
        self._agent_data = agent_data
        self._left = math.inf if most_answers is None else most_answers
        self._lease = ConversationResource(self._start, self._finalize, f"the interaction {self._kind!r}")

    async def begin(self, row: Row) -> Opening:
        self._id = await self._lease.acquire()
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        answer = await self._call(
            "generate_response", self._id, [dict(message) for message in self._agent_data.messages], with_row=True
        )
        if not isinstance(answer, tuple | list) or len(answer) != 4:
            raise TypeError(
                f"{self._kind}.generate_response returned {answer!r:.120}; it must return "
                f"(should_terminate_sequence, response_content, current_turn_score, additional_data)"
            )
        over, content, score, more = answer
        if more is not None and not isinstance(more, Mapping):
            raise TypeError(f"{self._kind}.generate_response returned the data {more!r:.80}; it must be a mapping")
        if content is not None and not isinstance(content, str | list):
            raise TypeError(f"{self._kind}.generate_response returned {content!r:.80} for a text")
        info: dict[str, Any] = dict(more or {})
        own = defines(type(self._interaction), "calculate_score", BaseInteraction)
        if own and (over or score is None):
            calculated = await self._call("calculate_score", self._id)
            info["calculate_score"] = calculated
            score = calculated if score is None else score
        if score is not None:
            score = info["turn_score"] = reward_number(score, f"{self._kind}.generate_response")
            self._agent_data.turn_scores.append(score)
        self._left -= 1
        done = bool(over) or self._left <= 0
        silent = done and not content
        return Reply(
            messages=() if silent else ({"role": "user", "content": content or ""},),
            reward=0.0 if score is None else score,
            done=done,
            info=info,
        )

    async def close(self) -> None:
        await self._lease.release()

    async def _start(self) -> str:
        started = await self._call("start_interaction", self._id, with_row=True)
        return self._id if started is None else str(started)

    async def _finalize(self, id: str) -> None:
        await self._call("finalize_interaction", id)

    async def _call(self, method: str, *arguments: Any, with_row: bool = False) -> Any:
        return await call(
            getattr(self._interaction, method),
            *arguments,
            keywords=self._keywords if with_row else {},
            name=f"{self._kind}.{method}",
            kind="environment",
        )
