"""Reward functions: the four kinds, the arguments of a call, planned once from the signature, and the check of a result.

The kinds, sync or async, each with a name and a weight:

- `TrajectoryReward`: called for each finished trajectory; returns a number.
- `TurnReward`: called for each turn of a finished trajectory; returns a number.
- `GroupReward`: called once for all finished trajectories of a row; returns a list with one number for each.
- `BatchReward`: called once for all finished trajectories of a training step, an evaluation or a rollout; returns a list.

Arguments are chosen by the names of the parameters, before the run begins: `plan_call` reads the signature of a function,
without calling it, and returns a `CallPlan`, which makes the arguments of each call. Functions of a trajectory and of a turn
can have the parameters in `VALUES`. Functions of a group or of the batch can have those in `LISTS`: lists with one item for
each trajectory. Every other parameter is a column of the data. Objects of other systems, which take columns from the rows
themselves, say which they need (`ReadsColumns`). Without a plan, functions are called by position, with the
values in `BY_POSITION`.

Invariant: a result is a finite number, or a list with one item for each trajectory; anything else raises. Knows trajectories
and signatures. Does not know when functions are called, or what a failure costs (`scorer.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal, Protocol, runtime_checkable

from turnwise.errors import ConfigError, Failed, boundary, failed_by, nearest
from turnwise.types import Failure, Group, Trajectory, Turn
from turnwise.user_code.copies import ConversationCopies, copy_containers, copy_row
from turnwise.user_code.reward_number import reward_number

# Arguments: a plan of each call, from the signature

Form = Literal["trajectory", "turns", "group", "batch"]
"""What a reward function is called for; the name of its list in the section `reward` of a recipe."""


@runtime_checkable
class ReadsColumns(Protocol):
    """A reward function that takes columns from the rows itself."""

    @property
    def needed_columns(self) -> Collection[str]:
        """The columns without which it cannot be called."""
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory that is scored, with its group, and the turn in a function of turns."""

    trajectory: Trajectory
    group: Group
    turn: Turn | None = None


def _completion(scored: Scored) -> str:
    return "\n".join(scored.trajectory.assistant_texts)


def _info(scored: Scored) -> dict[str, Any]:
    return copy_containers({name: value for turn in scored.trajectory.turns for name, value in turn.info.items()})


def _environment(scored: Scored) -> Any:
    handle = scored.trajectory.environment
    if handle is None:
        raise Failed(
            Failure(
                "reward",
                "it has the parameter `environment`, and the recipe's environment gives no object to reward functions: use an "
                "environment with the method environment_handle() (such as turnwise.compat.trl:TrlEnvironments), or give the "
                "parameter a default value",
            )
        )
    return handle.instance


VALUES: Mapping[str, Callable[[Scored], Any]] = {
    "trajectory": lambda scored: scored.trajectory,
    "completion": _completion,
    "messages": lambda scored: scored.trajectory.messages,
    "turns": lambda scored: scored.trajectory.turns,
    "row": lambda scored: copy_row(scored.trajectory.row),
    "info": _info,
    "group": lambda scored: scored.group,
    "environment": _environment,
}
"""The parameters of a function of a trajectory."""

_TURN_VALUES: Mapping[str, Callable[[Scored], Any]] = {
    **VALUES,
    "turn": lambda scored: scored.turn,
    "index": lambda scored: None if scored.turn is None else scored.turn.index,
}

_LIST_OF: Mapping[str, str] = {
    "trajectories": "trajectory",
    "completions": "completion",
    "messages": "messages",
    "turns": "turns",
    "rows": "row",
    "infos": "info",
    "groups": "group",
    "environments": "environment",
}
LISTS = tuple(_LIST_OF)
"""The parameters of a function of a group or of the batch: each is a list with one item for each trajectory."""

_COPIED = frozenset(("trajectory", "trajectories", "messages", "turns", "turn", "group", "groups"))
"""Values that are objects of a copied conversation. The others are made for each call."""
_ENVIRONMENTS = ("environment", "environments")
_SHARED = ("row", "group")
"""Further parameters of a function of a group: all its trajectories have the same row and group."""

BY_POSITION: Mapping[Form, tuple[str, ...]] = {
    "trajectory": ("trajectory",),
    "turns": ("trajectory", "turn"),
    "group": ("trajectories",),
    "batch": ("trajectories",),
}
"""What a function is called with if its parameters can only be given by position: `f(*args)`, `f(x, /)`."""

_ANNOTATED: Mapping[Form, Mapping[str, str]] = {
    "trajectory": {"Trajectory": "trajectory"},
    "turns": {"Trajectory": "trajectory", "Turn": "turn"},
    "group": {"Trajectory": "trajectories"},
    "batch": {"Trajectory": "trajectories"},
}


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The arguments of a reward function, by position and by name.

    Example: the plan of `def f(completion, answer, scale=1.0)` in `reward.trajectory` has `by_name=(("completion",
    "completion"),)`, `columns=("answer",)` and `optional_columns=("scale",)`.
    """

    form: Form
    positional: tuple[str, ...] = ()
    """Keys of `VALUES` or `LISTS`, in the order of the arguments."""
    by_name: tuple[tuple[str, str], ...] = ()
    """The name of a parameter, and the key of its value."""
    columns: tuple[str, ...] = ()
    """The columns of the row that the function needs."""
    optional_columns: tuple[str, ...] = ()
    """Parameters with a default value: they get the column of their name if the row has it."""
    optional_environment: str | None = None
    """The parameter `environment` or `environments` if it has a default value, which holds where there is no object."""
    needed_columns: tuple[str, ...] = ()
    """The columns that the function takes from the rows itself."""
    all_columns: bool = False
    """Whether the function takes `**kwargs`, and so all columns."""
    may_return_none: bool = False
    """Whether the annotation of the result allows None: the function does not apply to a trajectory."""

    @property
    def needs_group(self) -> bool:
        """Whether the function can only be called when all conversations of the row have ended."""
        return self.form in ("group", "batch") or "group" in self._used

    @property
    def needs_environment(self) -> bool:
        """Whether the function cannot be called without the environment's object."""
        return not self._used.isdisjoint(_ENVIRONMENTS)

    @property
    def _used(self) -> set[str]:
        """Keys of `VALUES` or `LISTS`."""
        return {*self.positional, *(key for _, key in self.by_name)}

    def arguments(self, scored: Scored, copies: ConversationCopies) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a function of a trajectory or a turn. The function may change all of them.

        Raises Failed.
        """
        values, row, (scored,) = _TURN_VALUES, scored.trajectory.row, self._copied([scored], copies)
        positional = [values[key](scored) for key in self.positional]
        named = {name: values[key](scored) for name, key in self.by_name}
        if self.optional_environment is not None and scored.trajectory.environment is not None:
            named[self.optional_environment] = scored.trajectory.environment.instance
        if not (self.columns or self.optional_columns or self.all_columns):
            return positional, named
        missing = next((name for name in self.columns if name not in row.fields), None)
        if missing is not None:
            have = ", ".join(sorted(row.fields)) or "none"
            message = (
                f"it has the parameter {missing!r}, and row {row.id!r} has no such column; its columns are: {have}. Add the "
                f"column to the row, or give the parameter a default value"
            )
            raise Failed(Failure("reward", message))
        wanted = row.fields if self.all_columns else (*self.columns, *self.optional_columns)
        columns = {
            name: copy_containers(row.fields[name]) for name in wanted if name in row.fields and name not in named
        }
        return positional, {**columns, **named}

    def list_arguments(self, scored: Sequence[Scored], copies: ConversationCopies) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a function of a group or of the batch: each is a list with one item for each of `scored`.

        A row without a column that other rows have gives None. The function may change all of them. Raises Failed.
        """
        fields = [item.trajectory.row.fields for item in scored]
        scored = self._copied(scored, copies)
        positional = [self._list(key, scored) for key in self.positional]
        named = {name: self._list(key, scored) for name, key in self.by_name}
        if self.optional_environment is not None and all(item.trajectory.environment is not None for item in scored):
            named[self.optional_environment] = self._list("environments", scored)
        present = dict.fromkeys(name for row in fields for name in row)
        optional = [name for name in (present if self.all_columns else self.optional_columns) if name in present]
        for name in dict.fromkeys((*self.columns, *optional)):
            if name not in named:
                named[name] = [copy_containers(row.get(name)) for row in fields]
        return positional, named

    def _copied(self, scored: Sequence[Scored], copies: ConversationCopies) -> Sequence[Scored]:
        """What is scored, as copies where the function receives such an object."""
        used = self._used
        if used.isdisjoint(_COPIED):
            return scored
        groups = not used.isdisjoint(("group", "groups"))
        return [
            Scored(
                trajectory=(trajectory := copies.trajectory(item.trajectory)),
                group=copies.group(item.group) if groups else item.group,
                turn=None if item.turn is None else trajectory.turns[item.turn.index],
            )
            for item in scored
        ]

    def _list(self, key: str, scored: Sequence[Scored]) -> Any:
        if key in _SHARED:
            return VALUES[key](scored[0])
        value = VALUES[_LIST_OF[key]]
        return [value(item) for item in scored]

    def refuse_unknown(self, columns: Collection[str], *, name: str) -> None:
        """Refuse parameters that are no column of the data. `name` begins the message.

        Raises ConfigError.
        """
        for parameter in (*self.columns, *self.needed_columns):
            if parameter not in columns:
                known = parameters_of(self.form)
                listed = ", ".join(sorted(columns)) or "none"
                hint = nearest(parameter, (*known, *columns)) or "."
                raise ConfigError(
                    f"{name} has the parameter {parameter!r}, which is neither a value of the conversation ({', '.join(known)}) "
                    f"nor a column of the data ({listed}){hint} Rename the parameter, give "
                    f"it a default value, or map a column to it: data.columns.{parameter}=<column>"
                    f"{_of_other_system(self.columns)}"
                )


POSITIONAL_PLANS: Mapping[Form, CallPlan] = {form: CallPlan(form, positional=BY_POSITION[form]) for form in BY_POSITION}
"""The plans of functions that are called by position."""


def parameters_of(form: Form) -> tuple[str, ...]:
    """The parameters, besides columns, that a function can have."""
    match form:
        case "trajectory":
            return tuple(VALUES)
        case "turns":
            return tuple(_TURN_VALUES)
        case "group":
            return (*LISTS, *_SHARED)
        case "batch":
            return LISTS


def plan_call(function: Callable[..., Any], form: Form, *, bound: Collection[str] = (), name: str) -> CallPlan:
    """The plan for calling `function`. `bound` are the parameters that the recipe sets; `name` begins error messages.

    Raises ConfigError if the function takes nothing of the conversation, or a value that functions of this form do not have.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # an object that cannot be called, or a builtin without a signature
        raise ConfigError(f"{name} cannot be called as a reward function: {error}") from None
    known, positional = parameters_of(form), list[str]()
    by_name: list[tuple[str, str]] = []
    columns: list[str] = []
    optional: list[str] = []
    environment: str | None = None
    for parameter in signature.parameters.values():
        if parameter.name in bound or parameter.kind is Parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            positional += _next_position(parameter, form, positional, name)
        elif parameter.name in _ENVIRONMENTS and parameter.name in known and parameter.default is not Parameter.empty:
            environment = parameter.name
        elif parameter.name in known:
            by_name.append((parameter.name, parameter.name))
        elif (key := _annotated(parameter, form)) is not None:
            by_name.append((parameter.name, key))
        elif parameter.default is not Parameter.empty:
            optional.append(parameter.name)
        else:
            _refuse_other_form(parameter.name, form, name, signature.parameters)
            columns.append(parameter.name)
    if not positional and not by_name:
        listed = ", ".join(signature.parameters)
        hint = (
            f"rename a parameter ({listed}), or give its type ({columns[0]}: Trajectory)"
            if columns
            else "add one of them"
        )
        raise ConfigError(
            f"{name} cannot be called as a reward function: it has none of the parameters {', '.join(known)}, so it does not "
            f"depend on the conversation: {hint}{_of_other_system(signature.parameters)}"
        )
    return CallPlan(
        form,
        positional=tuple(positional),
        by_name=tuple(by_name),
        columns=tuple(columns),
        optional_columns=tuple(optional),
        optional_environment=environment,
        needed_columns=tuple(function.needed_columns) if isinstance(function, ReadsColumns) else (),
        all_columns=any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values()),
        may_return_none=_allows_none(signature.return_annotation),
    )


def _next_position(parameter: Parameter, form: Form, positional: Sequence[str], name: str) -> Sequence[str]:
    """The next values of the form's positional call: one for a parameter, all that are left for `*args`."""
    rest = BY_POSITION[form][len(positional) :]
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return rest
    if not rest and parameter.default is Parameter.empty:
        raise ConfigError(
            f"{name} cannot be called as a reward function: it needs more than {len(positional)} arguments by position, and "
            f"reward.{form} calls it with {', '.join(BY_POSITION[form])}"
        )
    return rest[:1]


def _allows_none(annotation: Any) -> bool:
    """Whether the annotation of a result is a union with None: `float | None`, `Optional[float]`."""
    written = annotation if isinstance(annotation, str) else str(annotation)
    return "| None" in written or "None |" in written or "Optional[" in written


def _annotated(parameter: Parameter, form: Form) -> str | None:
    """The value that the parameter's type names, for a parameter of another name: `def f(one: Trajectory)`."""
    if parameter.annotation is Parameter.empty or parameter.default is not Parameter.empty:
        return None
    written = parameter.annotation if isinstance(parameter.annotation, str) else str(parameter.annotation)
    return next((key for kind, key in _ANNOTATED[form].items() if kind in written), None)


def _of_other_system(parameters: Collection[str]) -> str:
    """A hint for a function whose parameters are those of another system's reward functions; else an empty text."""
    names = set(parameters)
    if "solution_str" in names or "data_source" in names:
        return (
            ". For a compute_score function that is written for verl: {use: turnwise.compat.verl:CustomScore, arguments: {path: "
            "file.py, name: compute_score}} in reward.trajectory (docs/verl.md)"
        )
    if not names.isdisjoint(("completions", "prompts", "completion_ids")):
        return (
            ". For a reward function that is written for TRL: {use: turnwise.compat.trl:TrlReward, arguments: {function: "
            "file.py:name}} in reward.batch (docs/trl.md)"
        )
    return ""


def _refuse_other_form(parameter: str, form: Form, name: str, parameters: Collection[str]) -> None:
    """Refuse a value that functions of another form have, such as `turn` in `reward.trajectory`. Raises ConfigError."""
    others = [other for other in BY_POSITION if parameter in parameters_of(other)]
    if others:
        raise ConfigError(
            f"{name} cannot be called as a reward function: it has the parameter {parameter!r}, which functions in "
            f"{' and '.join(f'reward.{other}' for other in others)} have; functions in reward.{form} have: "
            f"{', '.join(parameters_of(form))}, and the columns of the data{_of_other_system(parameters)}"
        )


# Results: the check of what a function returns

MAX_REWARD = 1e15
"""The largest absolute reward: the advantages of larger rewards do not fit into float32 gradients."""


def finite_number(source: str, value: Any) -> float:
    """A reward as a finite float. `source` names the code that returned it. Raises Failed."""
    try:
        number = reward_number(value, source)
    except TypeError as error:
        raise Failed(Failure("reward", str(error))) from error
    if not math.isfinite(number):
        raise Failed(Failure("reward", f"{source} gave {number}; a reward must be a finite number"))
    if abs(number) > MAX_REWARD:
        message = f"{source} gave {number:g}; a reward must lie between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        raise Failed(Failure("reward", message))
    return number


def list_item(source: str, value: Any) -> float | None:
    """An item of a list of rewards: a number, or None for a function that does not apply. An exception is raised as Failed."""
    if isinstance(value, BaseException):
        raise failed_by(value, "reward", where=source)
    return None if value is None else finite_number(source, value)


def one_per_trajectory(source: str, values: Any, count: int, of: str) -> list[Any]:
    """The result of a function of several trajectories as a list. `of` names them: `a group`, `the step`.

    Raises Failed if it does not have one value for each trajectory.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        result = f"{values!r:.80}"
    else:
        with boundary("reward"):
            listed = list(values)
        if len(listed) == count:
            return listed
        result = f"{len(listed)} values"
    raise Failed(
        Failure(
            "reward",
            f"{source} gave {result} for the {count} trajectories of {of}; it must give a list with a number, or None, for "
            f"each of them, in their order",
        )
    )


# The four kinds of reward functions

Number = float | None | Awaitable[float | None]
Numbers = Iterable[float | Exception | None] | Awaitable[Iterable[float | Exception | None]]


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    """The function's name in metrics and records."""
    function: Callable[..., Any]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or abs(self.weight) > MAX_REWARD:
            raise ConfigError(
                f"the reward function {self.name!r} has the weight {self.weight}; give a finite number, such as 0.5"
            )

    @property
    def source(self) -> str:
        """The function in an error message."""
        return f"the reward function {self.name!r}"


@dataclass(frozen=True, slots=True)
class TrajectoryReward(_Named):
    """A function of a finished trajectory. Its number times `weight` is added to the trajectory's reward."""

    plan: CallPlan = POSITIONAL_PLANS["trajectory"]


@dataclass(frozen=True, slots=True)
class TurnReward(_Named):
    """A function of a finished trajectory and one of its turns. Its number times `weight` is added to the turn's reward."""

    plan: CallPlan = POSITIONAL_PLANS["turns"]


@dataclass(frozen=True, slots=True)
class GroupReward(_Named):
    """A function of all trajectories of a group that did not fail, in the order of the group.

    It returns one number for each of them. None means that the function does not apply to a trajectory: it adds nothing there
    and has no entry in the trajectory's `rewards`. An exception in the list fails that trajectory and no other.

    Example, the shortest answer of a group gets 1::

        def shortest(trajectories):
            lengths = [trajectory.sampled_tokens for trajectory in trajectories]
            return [float(length == min(lengths)) for length in lengths]
    """

    plan: CallPlan = POSITIONAL_PLANS["group"]


@dataclass(frozen=True, slots=True)
class BatchReward(_Named):
    """A function of all trajectories of the batch that did not fail, in the order of the groups. Returns what a group function
    returns.

    Example, rewards with mean 0 over all trajectories of the step::

        def normalised(completions):
            lengths = [len(completion) for completion in completions]
            return [length - sum(lengths) / len(lengths) for length in lengths]
    """

    plan: CallPlan = POSITIONAL_PLANS["batch"]
