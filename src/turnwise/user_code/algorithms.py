"""A user's own estimator of advantages or loss: what it declares that it needs, and whether a recipe's arguments fit it.

Both are plain functions. Their positional parameters are given by training; their other parameters are the `arguments` of the
recipe, whose values must be as the annotations say. Does not know what an estimator or a loss returns.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeAdapter, ValidationError

from turnwise.errors import ConfigError, nearest
from turnwise.local_paths import same_directory
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import resolve

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DECLARED = "__turnwise_needs__"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a function declares with `needs`: an estimator the first two, a loss the others."""

    critic: Literal["turn", "token"] | None = None
    """The values of a critic: of the state before each turn, or before each sampled token."""
    baseline: bool = False
    """One more conversation on each row, at temperature 0."""
    reference: bool = False
    """The log-probabilities of the reference model."""
    entropy: bool = False
    """The entropy of the distribution of each token."""
    values: bool = False
    """The estimates of the critic that the estimator of the recipe has."""
    zero_advantages: bool = True
    """The tokens of conversations whose advantages are all 0."""


_OF = {"credit": ("critic", "baseline"), "loss": ("reference", "entropy", "values", "zero_advantages")}
"""What the function of a section can declare."""


def needs(
    *,
    critic: Literal["turn", "token"] | None = None,
    baseline: bool = False,
    reference: bool = False,
    entropy: bool = False,
    values: bool = False,
    zero_advantages: bool = True,
) -> Callable[[_Function], _Function]:
    """Declares, above an estimator or a loss of your own, what it needs besides what all of them get::

        @needs(critic="turn")
        def my_estimator(batch, *, gamma: float = 1.0): ...

        @needs(reference=True)
        def my_loss(logprob_N, targets, *, beta: float = 0.1): ...

    Of an estimator. `critic`: a critic is trained; its values are in `Episode.values_T`, and the estimator returns
    `ValueEstimates`. `baseline`: each row has one more conversation at temperature 0, whose reward is `Episode.baseline`.

    Of a loss. `reference`, `entropy`, `values`: the columns `Targets.reference_logprob_N` (the reference model is loaded),
    `Targets.entropy_N` (with a gradient) and `Targets.value_N` (of the estimator's critic). `zero_advantages=False`: tokens with
    the advantage 0 have no gradient, so conversations that have no other are left out of the forward pass.

    A decorator and not an attribute of the function: a wrong name is an error where it is written, and not ignored.

    Raises ConfigError.
    """
    if critic not in (None, "turn", "token"):
        raise ConfigError(f"needs(critic={critic!r}): the values of a critic are those of a 'turn' or of a 'token'")
    if critic is not None and baseline:
        raise ConfigError(
            "needs(critic=..., baseline=True): an estimator has a critic or a greedy baseline: remove one"
        )

    def declare(function: _Function) -> _Function:
        declared = Needs(
            critic=critic,
            baseline=baseline,
            reference=reference,
            entropy=entropy,
            values=values,
            zero_advantages=zero_advantages,
        )
        setattr(function, _DECLARED, declared)
        return function

    return declare


_NOTHING = {name: getattr(Needs(), name) for name in Needs.__slots__}


def declared_needs(reference: str, *, key: str) -> Needs:
    """What the function of a reference declares. `key` is the section of the recipe. Raises ConfigError."""
    with same_directory():
        declared = getattr(resolve(reference, key=key), _DECLARED, Needs())
    wrong = [name for name in Needs.__slots__ if name not in _OF[key] and getattr(declared, name) != _NOTHING[name]]
    if wrong:
        raise ConfigError(
            f"{key}: {reference} declares {', '.join(wrong)} (@needs), and a function for {key} can declare "
            f"{', '.join(_OF[key])}: remove {', '.join(wrong)}"
        )
    return declared


def own_function(reference: str, arguments: Mapping[str, Any], *, key: str, given: Sequence[str]) -> Callable[..., Any]:
    """The function of a reference with its arguments bound. `given` names the positional arguments of its calls, and `key` is the
    section of the recipe. Each call gets its own copy of lists and dictionaries among the arguments.

    Raises ConfigError if it is not a function, does not accept the arguments, or a value is not as its annotation says.
    """
    with same_directory():
        target = resolve(reference, key=key)
    signature = _signature(target, reference, key)
    values = _checked_arguments(target, signature, arguments, reference=reference, key=key, given=given)
    return functools.partial(_call, target, values)


def _call(target: Callable[..., Any], values: Mapping[str, Any], /, *given: Any) -> Any:
    return target(*given, **copy_containers(dict(values)))


def _signature(target: Any, reference: str, key: str) -> inspect.Signature:
    kind = None
    if isinstance(target, type) or not callable(target):
        kind = "a class" if isinstance(target, type) else f"a {type(target).__name__}"
    elif inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
        kind = "async, and waits for nothing"
    elif inspect.isgeneratorfunction(target):
        kind = "a generator function (it has a `yield`)"
    if kind is not None:
        raise ConfigError(f"{key}: {reference} is {kind}; it must be a function: def ... with `return`")
    try:
        return inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {reference} has no signature that can be read: {error}") from None


def _checked_arguments(
    target: Callable[..., Any],
    signature: inspect.Signature,
    arguments: Mapping[str, Any],
    *,
    reference: str,
    key: str,
    given: Sequence[str],
) -> dict[str, Any]:
    shown = f"{reference}{signature}"
    try:
        bound = signature.bind_partial(*given)
    except TypeError:
        raise ConfigError(
            f"{key}: {shown} must take {len(given)} positional argument{'s' * (len(given) > 1)} ({', '.join(given)})"
        ) from None
    others = [one for name, one in signature.parameters.items() if name not in bound.arguments and one.kind in _BY_NAME]
    names = [one.name for one in others]
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    for name in arguments:
        if name not in names and not any_name:
            raise ConfigError(f"{key}.arguments: {shown} has no argument {name!r} for a recipe{nearest(name, names)}")
    missing = [one.name for one in others if one.default is inspect.Parameter.empty and one.name not in arguments]
    if missing:
        raise ConfigError(f"{key}.arguments: {shown} needs {', '.join(missing)}: add them to the recipe")
    try:
        annotations = typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
        return dict(arguments)
    return {name: _value(annotations.get(name, Any), name, value, key, shown) for name, value in arguments.items()}


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _value(annotation: Any, name: str, value: Any, key: str, shown: str) -> Any:
    """The value as its annotation says: 1 for a float becomes 1.0."""
    try:
        return TypeAdapter(annotation).validate_python(value)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):  # a type of which nothing is known
        return value
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"{key}.arguments.{name}={value!r:.80} is not what {shown} takes: {problem[0].lower()}{problem[1:]}"
        ) from None
