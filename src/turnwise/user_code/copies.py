"""Copies of what user code receives and returns, so that neither side sees later changes of the other.

A row is shared by all conversations of its group and by all later steps, and a trajectory is what is trained on and recorded.
User code may change what it is given: `row.messages.append(...)` is the natural way to extend a prompt. So each call of an
environment, a tool, a reward function or a loss mask gets a copy, and what an environment returns is copied too.

A copy has new containers (lists, dictionaries, sets, tuples, dataclasses), and copies of objects whose class defines
`__deepcopy__` (arrays, tensors, data frames). All other objects are handed on as they are: texts and numbers cannot change, and
an object such as a client of a service cannot be copied.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, TypeVar, cast

from turnwise.types import (
    Group,
    Message,
    Opening,
    Reply,
    Row,
    Segment,
    ToolCall,
    ToolOutcome,
    ToolSchema,
    Trajectory,
    Turn,
)

T = TypeVar("T")
_CallOrOutcome = TypeVar("_CallOrOutcome", ToolCall, ToolOutcome)

_ATOMS = frozenset((str, int, float, bool, NoneType, bytes, complex))
"""Types whose values cannot change: nearly all values in rows and messages."""


def copy_containers(value: Any) -> Any:
    """A copy of nested containers. A value that is nested too deeply to be copied is returned."""
    try:
        return _copy(value)
    except RecursionError:
        pass
    try:
        return copy.deepcopy(value)  # of a value that contains itself
    except RecursionError:
        return value


def _copy(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: item if type(item) in _ATOMS else _copy(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _ATOMS else _copy(item) for item in value]
    if kind is tuple:
        return tuple([_copy(item) for item in value])
    return _copy_object(value)


def _copy_object(value: Any) -> Any:
    """A copy of a container of another type. Any other object is returned."""
    if isinstance(value, type):
        return value
    if isinstance(value, dict):
        if type(value).items not in (dict.items, OrderedDict.items):  # it is read in a way of its own
            return value
        copied = copy.copy(cast("dict[Any, Any]", value))  # keeps the class, and the default of a defaultdict
        for key, item in value.items():
            dict.__setitem__(copied, key, _copy(item))
        return copied
    if isinstance(value, list | deque):
        sequence = copy.copy(cast("list[Any]", value))
        for place, item in enumerate(value):
            sequence[place] = _copy(item)
        return sequence
    if isinstance(value, tuple):
        fields = [_copy(item) for item in value]
        return type(value)(*fields) if hasattr(value, "_fields") else value
    if isinstance(value, set | bytearray | array):
        return copy.copy(value)
    if type(value) is ToolOutcome:
        return _with_arguments(value)
    if dataclasses.is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(copied, field.name, _copy(getattr(value, field.name)))
        return copied
    return copy.deepcopy(value) if hasattr(type(value), "__deepcopy__") else _copy_pixels(value)


def _copy_pixels(value: Any) -> Any:
    """A PIL image that shares its pixels until one of the two is changed; any other value is returned."""
    if not any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__):
        return value
    try:
        value.load()
    except (OSError, ValueError, SyntaxError):  # a truncated file: reported where the image is used
        return value
    shared = value._new(value.im)
    shared.readonly = 1  # PIL copies the pixels before it changes them
    return shared


def copy_row(row: Row) -> Row:
    """A row for one call."""
    fields = copy_containers(row.fields) if type(row.fields) is dict else copy_containers(dict(row.fields))
    messages = [copy_containers(message) for message in row.messages]
    return Row(id=row.id, messages=messages, fields=fields, source=row.source)


def copy_turn(turn: Turn) -> Turn:
    """A turn for one call. Only `info` is not copied: what an environment writes there is recorded."""
    return _copy_turn(turn, copy_containers(turn.message), copy_containers(turn.tools), turn.info)


def copy_opening(opening: Opening) -> Opening:
    """What an environment has returned. Anything else than an Opening is returned as it is, to be refused."""
    if not isinstance(opening, Opening):
        return opening
    messages, tools = copy_containers(opening.messages), copy_containers(opening.tools)
    return replace(
        opening,
        messages=messages,
        tools=tools,
        sampling=copy_containers(opening.sampling),
        chat_template_kwargs=copy_containers(opening.chat_template_kwargs),
    )


def copy_reply(reply: Reply) -> Reply:
    """What an environment has returned. Anything else than a Reply is returned as it is, to be refused.

    Not copied is what is read at once: numbers, texts, positions and metrics.
    """
    if not isinstance(reply, Reply):
        return reply
    copied = _shallow(reply)
    for name in ("messages", "rewrite", "info", "tools", "sampling", "outcomes", "chat_template_kwargs"):
        if value := getattr(reply, name):
            object.__setattr__(copied, name, copy_containers(value))
    return copied


def _copy_turn(turn: Turn, message: Message, tools: Sequence[ToolSchema], info: dict[str, Any]) -> Turn:
    copied = _shallow(turn)
    copied.message, copied.tools, copied.info = message, tools, info
    copied.chat_template_kwargs = copy_containers(turn.chat_template_kwargs) if turn.chat_template_kwargs else {}
    if turn.calls:
        copied.calls = tuple([_with_arguments(call) for call in turn.calls])
    if turn.outcomes:
        copied.outcomes = tuple([_with_arguments(outcome) for outcome in turn.outcomes])
    object.__setattr__(copied, "rewards", dict(turn.rewards))  # the class refuses to set them
    completion = turn.completion
    if completion is not None and type(completion.token_ids) is not tuple:
        copied.completion = completion.frozen()
    return copied


_FIELDS: dict[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in (Turn, ToolCall, ToolOutcome, Reply)
}


def _shallow(value: T) -> T:
    """`copy.copy`, in half the time."""
    kind = type(value)
    copied, names = object.__new__(kind), _FIELDS.get(kind)
    if names is None:  # a subclass of the user's
        return copy.copy(value)
    for name in names:
        object.__setattr__(copied, name, getattr(value, name))
    return copied


def _with_arguments(value: _CallOrOutcome) -> _CallOrOutcome:
    """A call or an outcome with arguments of its own."""
    copied = _shallow(value)
    object.__setattr__(copied, "arguments", copy_containers(value.arguments))
    return copied


class ConversationCopies:
    """The copies of conversations that one reward function receives. A conversation is copied when it is asked for, once.

    `Trajectory.metrics` and `Turn.info` are where functions may write. The metrics are not copied; of the infos, `accept` takes
    over what the function has set.
    """

    def __init__(self) -> None:
        self._trajectories: dict[int, tuple[Trajectory, Trajectory, list[tuple[Turn, dict[str, Any]]]]] = {}
        """By the id of the original: the original, its copy, and the copies of its turns with their infos as they were handed
        out."""
        self._groups: dict[int, tuple[Group, Group]] = {}

    def trajectory(self, original: Trajectory) -> Trajectory:
        """The copy of a conversation. Each call of this method gives it a new copy of the row."""
        if (known := self._trajectories.get(id(original))) is not None:
            known[1].row = copy_row(original.row)
            return known[1]
        copied = _copy_trajectory(original)
        for of_episode, its_copy in zip((original, *original.agents), (copied, *copied.agents), strict=True):
            handed = [(turn, dict(turn.info)) for turn in its_copy.turns]
            self._trajectories[id(of_episode)] = (of_episode, its_copy, handed)
        return copied

    def group(self, original: Group) -> Group:
        """The copy of a group, with the copies of its conversations."""
        if (known := self._groups.get(id(original))) is not None:
            return known[1]
        baseline = original.baseline
        copied = replace(
            original,
            row=copy_row(original.row),
            trajectories=[self.trajectory(trajectory) for trajectory in original.trajectories],
            baseline=None if baseline is None else self.trajectory(baseline),
        )
        self._groups[id(original)] = (original, copied)
        return copied

    def accept(self, original: Trajectory) -> None:
        """Take over what the function has written into the copy of a conversation, and into those of its agents: entries of
        `Turn.info` that it has added or replaced, and rewards of turns (`Turn.add_reward`).

        Raises TypeError if the function has set something that would have no effect there.
        """
        if (known := self._trajectories.get(id(original))) is None:
            return
        _, trajectory, turns = known
        _refuse_set(original, trajectory)
        for turn, (copied, handed) in zip(original.turns, turns, strict=True):
            take_rewards(turn, copied)
            for name, value in copied.info.items():
                if name not in handed or handed[name] is not value:
                    turn.info[name] = copy_containers(value)
                    handed[name] = value
        for agent in original.agents:
            self.accept(agent)


def take_rewards(turn: Turn, copied: Turn) -> None:
    """Add to a turn what `Turn.add_reward` has added to its copy. Raises TypeError if the weight of the copy was set."""
    if copied.weight != turn.weight:
        raise TypeError(
            f"the weight of turn {turn.index} was set to {copied.weight!r:.80}, which has no effect: name a function of the turn "
            f"in loss_mask"
        )
    changed = copied.reward != turn.reward  # nothing else than `add_reward` changes it
    for source, value in copied.rewards.items():
        difference = value - turn.rewards.get(source, 0.0)
        if (difference and changed) or (not difference and source not in turn.rewards):  # the number 0 is a reward, too
            turn.add_reward(difference, source)


def _refuse_set(original: Trajectory, copied: Trajectory) -> None:
    """Raises TypeError if a function has assigned what it must return."""
    if original.reward != copied.reward:
        raise TypeError(
            f"it has set trajectory.reward to {copied.reward!r:.80}; a reward function returns its number, and the reward of the "
            f"conversation is the sum of all functions and turns"
        )
    if original.advantages != copied.advantages:
        raise TypeError(
            "it has set trajectory.advantages, which has no effect: choose the estimator of advantages with credit.name"
        )


def _copy_trajectory(trajectory: Trajectory) -> Trajectory:
    """A copy in which messages that were one object are one object: `turn.message` is an item of `messages`."""
    messages: dict[int, Message] = {}
    tools: dict[int, Any] = {}

    def message(original: Message) -> Message:
        if (known := messages.get(id(original))) is None:
            known = messages[id(original)] = copy_containers(original)
        return known

    def schemas(original: Any) -> Any:
        if (known := tools.get(id(original))) is None:
            known = tools[id(original)] = copy_containers(original)
        return known

    return replace(
        trajectory,
        row=copy_row(trajectory.row),
        messages=[message(original) for original in trajectory.messages],
        previous_histories=[[message(one) for one in history] for history in trajectory.previous_histories],
        tools=schemas(trajectory.tools),
        turns=[
            _copy_turn(turn, message(turn.message), schemas(turn.tools), copy_containers(turn.info))
            for turn in trajectory.turns
        ],
        segments=[_copy_segment(segment) for segment in trajectory.segments],
        rewards=dict(trajectory.rewards),
        advantages=copy_containers(trajectory.advantages),
        values=copy_containers(trajectory.values),
        returns=copy_containers(trajectory.returns),
        penalties=copy_containers(trajectory.penalties),
        teacher_scores=copy_containers(trajectory.teacher_scores),
        escaped=trajectory.escaped.copy(),
        agents=[_copy_trajectory(agent) for agent in trajectory.agents],
    )


def _copy_segment(segment: Segment) -> Segment:
    return replace(
        segment,
        token_ids=segment.token_ids[:],
        logprobs=segment.logprobs[:],
        turn=segment.turn[:],
        version=segment.version[:],
        media=[replace(media, source=copy_containers(media.source)) for media in segment.media],
        trainer_logprobs=segment.trainer_logprobs[:],
        routes=segment.routes,
    )
