"""The schema of a tool, and the check of a call's arguments against the schema.

A schema is created from a function's signature and docstring, or is given by the user. Both kinds reach the chat template in
full. This module does not run tools.

Patterns of a schema are matched within a time limit. Matching a pattern such as `^(a+)+$` on a text from a model can take
longer than a conversation, and `re` holds Python's global interpreter lock during the match. The package `regex` accepts a
time limit and releases the lock.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.fields import FieldInfo

from turnwise.errors import ConfigError, nearest
from turnwise.types import ToolSchema

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError as SchemaViolation
    from jsonschema.protocols import Validator


# patterns with a time limit

PATTERN_SECONDS = 1.0
"""Maximum seconds to match one pattern with one text."""


_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""
_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose value is data, not a schema."""


class PatternTooSlow(Exception):
    """Matching a text with a pattern took longer than `PATTERN_SECONDS`."""


def bounded_patterns(kind: type[Validator]) -> type[Validator]:
    """A subclass of the validator that checks `pattern`, `patternProperties` and `additionalProperties` in bounded time.

    The checks raise PatternTooSlow at the first text whose match takes longer than `PATTERN_SECONDS`.
    """
    from jsonschema import validators
    from jsonschema.exceptions import ValidationError as SchemaViolation

    additional = kind.VALIDATORS.get("additionalProperties")

    def pattern(validator: Any, patrn: str, instance: Any, schema: Any) -> Iterator[SchemaViolation]:
        if not validator.is_type(instance, "string"):
            return
        if not _matches(patrn, instance):
            yield SchemaViolation(f"{instance!r:.200} does not match {patrn!r}")

    def pattern_properties(
        validator: Any, properties: Mapping[str, Any], instance: Any, schema: Any
    ) -> Iterator[SchemaViolation]:
        if not validator.is_type(instance, "object"):
            return
        for patrn, subschema in properties.items():
            for name, value in instance.items():
                if _matches(patrn, name):
                    yield from validator.descend(value, subschema, path=name, schema_path=patrn)

    def additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[SchemaViolation]:
        patterns = schema.get("patternProperties", {})
        if not validator.is_type(instance, "object") or not patterns:
            if additional is not None:
                yield from additional(validator, allowed, instance, schema) or ()
            return
        names = [name for name in instance if name not in schema.get("properties", {})]
        extra = [name for name in names if not any(_matches(patrn, name) for patrn in patterns)]
        if validator.is_type(allowed, "object"):
            for name in extra:
                yield from validator.descend(instance[name], allowed, path=name)
        elif not allowed and extra:
            yield SchemaViolation(f"these arguments do not exist: {', '.join(map(repr, extra))}"[:500])

    bounded: Any = validators.extend(
        kind,
        {
            "pattern": pattern,
            "patternProperties": pattern_properties,
            "additionalProperties": additional_properties,
        },
    )
    return bounded


def needs_expansion(parameters: Mapping[str, Any]) -> bool:
    """Whether a schema has `unevaluatedProperties`. jsonschema checks this keyword with `re`, in unbounded time."""
    return any("unevaluatedProperties" in schema for schema in _schemas(parameters))


def expanded(parameters: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A schema without `patternProperties` that is equivalent for these arguments: each name that matches a pattern becomes an
    entry of `properties`.

    Raises PatternTooSlow if a match takes longer than `PATTERN_SECONDS`.
    """
    expanded_schema: dict[str, Any] = copy.deepcopy(dict(parameters))
    names = _names(arguments)
    for schema in list(_schemas(expanded_schema)):
        patterns = schema.pop("patternProperties", None)
        if not isinstance(patterns, Mapping):
            continue
        properties = schema.setdefault("properties", {})
        for name in names:
            if parts := [subschema for pattern, subschema in patterns.items() if _matches(pattern, name)]:
                properties[name] = {"allOf": [*([properties[name]] if name in properties else []), *parts]}
    return expanded_schema


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all its nested schemas, inner schemas first."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas(item)
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            for item in value.values():
                yield from _schemas(item)
        elif keyword not in _DATA:
            yield from _schemas(value)
    yield schema


def _names(value: Any) -> set[str]:
    """The property names of all objects in the arguments, at any depth."""
    if isinstance(value, list):
        return set().union(*map(_names, value))
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set()


def _matches(pattern: str, text: str) -> bool:
    import regex

    try:
        return regex.search(pattern, text, timeout=PATTERN_SECONDS, concurrent=True) is not None
    except TimeoutError:
        raise PatternTooSlow(
            f"{text!r:.80} could not be compared with the pattern {pattern!r} in {PATTERN_SECONDS:g} s; use a shorter text"
        ) from None


# schemas and arguments

_log = logging.getLogger(__name__)

_MOST_PROBLEMS = 5  # maximum problems of one call that the model receives


_SLOW_KEYWORDS = {
    "pattern",
    "patternProperties",
    "propertyNames",
    "uniqueItems",
    "unevaluatedProperties",
    "$ref",
    "$dynamicRef",
}
"""Keywords of JSON Schema whose check can take more than linear time in the size of the arguments."""


class WrongArguments(Exception):
    """The arguments of a call do not match the schema of the tool. The text is a message for the model."""


class Arguments(Protocol):
    """Checks the arguments of calls."""

    quick: bool
    """Whether a check takes linear time in the size of the arguments, and so may run in the thread of the event loop."""

    def check(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checked copy of the arguments for the tool. Changes that the tool makes to the copy do not affect `given`.

        Raises WrongArguments if the arguments do not match the schema.
        """
        ...


class FromSignature:
    """Checks arguments against a function's annotations with pydantic: `"2"` becomes 2, and nested models are created."""

    quick = True  # pydantic matches patterns in linear time

    def __init__(self, model: type[BaseModel], name: str) -> None:
        self._model = model
        self._name = name

    def check(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            checked = self._model.model_validate(copy.deepcopy(dict(given)))
        except ValidationError as problem:
            raise WrongArguments(self._explain(problem)) from None
        return {field.alias or name: getattr(checked, name) for name, field in type(checked).model_fields.items()}

    def _explain(self, problem: ValidationError) -> str:
        names = [field.alias or name for name, field in self._model.model_fields.items()]
        lines: list[str] = []
        for error in problem.errors(include_url=False):
            where = ".".join(str(part) for part in error["loc"]) or "arguments"
            if error["type"] == "extra_forbidden":
                lines.append(f"{self._name} has no argument {where!r}{nearest(where, names)}")
            elif error["type"] == "missing":
                lines.append(f"the argument {where!r} is missing")
            else:
                lines.append(f"{where}: {error['msg']}, got {error['input']!r}")
        return _joined(lines)


class FromSchema:
    """Checks arguments against a given JSON Schema. As in JSON Schema, properties that the schema does not name are allowed."""

    def __init__(self, parameters: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError if `parameters` is not the JSON Schema of an object."""
        self._name = name
        self._validator = _validator(parameters, name)
        self._names = list(parameters.get("properties", {}))
        self.quick = not (_SLOW_KEYWORDS & set(_keywords(parameters)))
        self._patterns = bool(parameters.get("patternProperties"))
        self._expanded_from = dict(parameters) if needs_expansion(dict(parameters)) else None

    def check(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = copy.deepcopy(dict(given))
        lines: list[str] = []
        for error in self._errors(arguments):
            where = ".".join(str(part) for part in error.absolute_path)
            if error.validator == "required" and not where and error.message.endswith(" is a required property"):
                lines.append(f"the argument {error.message.removesuffix(' is a required property')} is missing")
            elif error.validator == "additionalProperties" and not where and not self._patterns:
                strange = [name for name in arguments if name not in self._names]
                lines += [f"{self._name} has no argument {name!r}{nearest(name, self._names)}" for name in strange]
            else:
                lines.append(f"{where}: {error.message}" if where else error.message)
        if lines:
            raise WrongArguments(_joined(lines))
        return arguments

    def _errors(self, arguments: dict[str, Any]) -> list[Any]:
        try:
            validator = self._validator
            if self._expanded_from is not None:
                validator = _validator(expanded(self._expanded_from, arguments), self._name)
            return sorted(validator.iter_errors(arguments), key=lambda error: list(map(str, error.path)))
        except PatternTooSlow as problem:
            raise WrongArguments(str(problem)) from None


def schema_of(function: Callable[..., Any]) -> tuple[ToolSchema, FromSignature]:
    """The schema of a typed function with a docstring. An `Args:` section in Google style describes the parameters.

    The schema of a function or method is remembered, because many environments make their tools in each conversation.

    Raises ConfigError if the function is a generator or has no docstring, or if a parameter has no type, has a type or kind
    that a model cannot give, or has a pydantic Field as its default.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"the tool {name!r} is a generator, but a tool must return one value: return a list instead of yielding items"
        )
    try:
        hints = get_type_hints(
            function if inspect.isroutine(function) else type(function).__call__, include_extras=True
        )
    except NameError as error:
        raise ConfigError(
            f"a type of the tool {name!r} cannot be resolved: {error}. Import the type in the tool's module"
        ) from None
    source = _Source.of(function, hints)
    if source is None:
        return _new_schema(function, name, hints)
    remembered = _remembered.get(source.key)
    if remembered is None or remembered[0] != source:
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)
        remembered = _remembered[source.key] = (source, *_new_schema(function, name, hints))
    _, schema, arguments = remembered
    return copy.deepcopy(schema), arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """All that the schema of a function depends on."""

    key: tuple[CodeType, bool]
    """The code, which a nested function shares with those of other calls, and whether the function is a bound method."""
    name: str
    doc: str
    hints: Mapping[str, Any]
    default_ids: Sequence[int]
    defaults: Sequence[Any] = field(compare=False)  # held, so that no other objects get their ids

    @classmethod
    def of(cls, function: Callable[..., Any], hints: Mapping[str, Any]) -> _Source | None:
        """None if the schema depends on more: on a wrapped function, or on an inherited docstring."""
        plain = function.__func__ if isinstance(function, MethodType) else function
        if not isinstance(plain, FunctionType) or plain.__dict__ or plain.__doc__ is None:
            return None
        by_keyword = plain.__kwdefaults__ or {}
        defaults = (*(plain.__defaults__ or ()), *by_keyword, *by_keyword.values())
        return cls(
            key=(plain.__code__, function is not plain),
            name=plain.__name__,
            doc=plain.__doc__,
            hints=hints,
            default_ids=[id(default) for default in defaults],
            defaults=defaults,
        )


_MOST_REMEMBERED = 256  # the oldest one is dropped first
# not functools.lru_cache: with the function as its argument, it would keep the instance of a method alive
_remembered: dict[tuple[CodeType, bool], tuple[_Source, ToolSchema, FromSignature]] = {}


def _new_schema(function: Callable[..., Any], name: str, hints: Mapping[str, Any]) -> tuple[ToolSchema, FromSignature]:
    summary, described = _docstring(function)
    if not summary:
        raise ConfigError(
            f"the tool {name!r} has no docstring. Write one: its first paragraph is the description that the model receives"
        )
    known = inspect.signature(function).parameters
    if strange := [argument for argument in described if argument not in known]:
        _log.warning(
            "the docstring of the tool %r describes %s under Args, and the tool has no such parameter%s: the model does not see "
            "this text. The parameters are: %s",
            name,
            ", ".join(strange),
            nearest(strange[0], known),
            ", ".join(known) or "none",
        )
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"the tool {name!r} has the parameter {parameter}; a model can give named arguments only")
        if parameter.name not in hints:
            raise ConfigError(f"the parameter {parameter.name!r} of the tool {name!r} has no type: add an annotation")
        if isinstance(parameter.default, FieldInfo):
            raise ConfigError(
                f"the parameter {parameter.name!r} of the tool {name!r} has a pydantic Field as its default, and the "
                f"function would receive the Field as a value. Write {parameter.name}: Annotated[<type>, Field(...)] = <default>"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        # An option that is absent here keeps its value from the annotation.
        options: dict[str, Any] = {} if parameter.name not in described else {"description": described[parameter.name]}
        # The alias is needed because a parameter may have the name of a method of pydantic models (`json`, `copy`).
        fields[f"argument_{number}"] = (hints[parameter.name], Field(default, alias=parameter.name, **options))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()  # fail now, not in the first conversation
    except PydanticUserError as error:
        raise ConfigError(
            f"a parameter of the tool {name!r} has a type that a model cannot give: {error.message.splitlines()[0]} "
            f"Use numbers, texts, lists, Literal or pydantic models"
        ) from None
    parameters = _tidy(model.model_json_schema())
    parameters.pop("additionalProperties", None)  # always false here, and of no use to the model
    parameters.setdefault("properties", {})
    schema = {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}
    return schema, FromSignature(model, name)


def _validator(parameters: Mapping[str, Any], name: str) -> Validator:
    try:
        import jsonschema
        import jsonschema.validators
        import regex  # noqa: F401
        from referencing.jsonschema import EMPTY_REGISTRY
    except ImportError:
        raise ConfigError(
            f"the tool {name!r} is given by a JSON Schema, and checks against a schema need jsonschema and regex: "
            f"pip install jsonschema regex"
        ) from None
    if not isinstance(parameters, Mapping):
        raise ConfigError(
            f"the parameters of the tool {name!r} are {parameters!r:.80}; they must be a JSON Schema: an object"
        )
    if not isinstance(parameters.get("$schema", ""), str):
        raise ConfigError(
            f"the parameters of the tool {name!r} are not a JSON Schema: $schema: {parameters['$schema']!r:.80} must be the URL "
            f"of a draft, or be left out"
        )
    kind = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(dict(parameters))
    except jsonschema.SchemaError as error:
        where = ".".join(str(part) for part in error.absolute_path) or "parameters"
        raise ConfigError(
            f"the parameters of the tool {name!r} are not a JSON Schema: {where}: {error.message}"
        ) from None
    if parameters.get("type", "object") != "object":
        raise ConfigError(
            f"the parameters of the tool {name!r} are of type {parameters['type']!r}; they must be of "
            f"type 'object', because a model gives named arguments"
        )
    # An empty registry: a schema from outside must not make this machine download the schemas that it refers to.
    return bounded_patterns(kind)(dict(parameters), registry=EMPTY_REGISTRY)


def _joined(lines: list[str]) -> str:
    more = len(lines) - _MOST_PROBLEMS
    return "; ".join(lines[:_MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and the description of each parameter in its `Args:` section."""
    text = inspect.getdoc(function) or ""
    summary = " ".join(re.split(r"\n\n|(?:^|\n)(?=Args:\n)", text)[0].split())
    section = re.search(r"^Args:\n(?=([ \t]+))(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    described: dict[str, str] = {}
    # An entry starts at the indent of the first entry; lines with a deeper indent continue the entry.
    for entry in re.split(rf"\n(?={section[1]}\S)", section[2]) if section else []:
        matched = re.match(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)", entry, re.DOTALL)
        if matched:
            described[matched.group(1)] = " ".join(matched.group(2).split())
    return summary, described


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `type` and `description` first, and without the titles that pydantic derives from names."""
    first = ("type", "description")

    def clean(node: Any, *, names: bool = False) -> Any:
        if isinstance(node, list):
            return [clean(item) for item in node]
        if not isinstance(node, dict):
            return node
        if names:  # the keys are names of properties, which may be `title` or `type`
            return {key: clean(value) for key, value in node.items()}
        keys = [*(key for key in first if key in node), *(key for key in node if key not in (*first, "title"))]
        return {
            key: node[key] if key == "default" else clean(node[key], names=key in ("properties", "$defs"))
            for key in keys
        }

    return clean(schema)


def _keywords(schema: Any) -> Iterator[str]:
    """All keys of a schema at any depth, including the names of properties."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            yield str(key)
            yield from _keywords(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _keywords(value)
