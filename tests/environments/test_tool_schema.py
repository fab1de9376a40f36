"""Schemas of tools: read off functions, and remembered."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from support.conversations import Says, call, hold, spoken
from turnwise.environments.tools import schema
from turnwise.environments.tools.schema import WrongArguments, schema_of
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError
from turnwise.types import ToolCall, ToolOutcome, ToolSchema

# Tools with a schema of their own: what is told to the template, what is checked, and what is refused at the start.


PARAMETERS: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "title": "Search",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 1},
        "where": {
            "type": "object",
            "properties": {"site": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "deep": {"$ref": "#/$defs/deep"}},
            "additionalProperties": False,
        },
        "order": {"enum": ["new", "old"], "default": "new"},
        "count": {"type": "integer", "default": 10, "description": "How many."},
    },
    "required": ["words"],
    "additionalProperties": False,
    "$defs": {"deep": {"type": "boolean"}},
}

SCHEMA: ToolSchema = {
    "type": "function",
    "function": {"name": "find", "description": "Find pages.", "parameters": PARAMETERS, "strict": True},
}


async def find(words: list[str], where: Any = None, order: str = "new", count: int = 10) -> str:
    return json.dumps([words, where, order, count])


def ask(arguments: dict[str, Any], tool: Tool | None = None) -> ToolOutcome:
    tool = tool or Tool.from_schema(SCHEMA, find)
    return asyncio.run(tool.run(ToolCall(id="call_0", name=tool.name, arguments=arguments, text="")))


def test_a_schema_reaches_the_template_whole() -> None:
    tool = Tool.from_schema(SCHEMA, find)
    assert tool.schema == SCHEMA
    assert (tool.name, tool.description) == ("find", "Find pages.")
    trajectory = hold(Says(call("find", '{"words": ["ab"]}'), "done"), lambda: Tools([tool]))
    assert trajectory.tools == (SCHEMA,)
    _, prompt = spoken(trajectory.segments[0])[0]
    assert json.loads(prompt.partition("Tools:")[2].partition("<|im_end|>")[0]) == SCHEMA
    assert trajectory.turns[0].outcomes[0].content == '[["ab"], null, "new", 10]'


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    depth: Annotated[int, Field(ge=0, le=3)] = 1


class Outer(BaseModel):
    inner: Inner = Inner()
    tags: list[str] = Field(default=["a"], min_length=1)


def test_the_schema_of_a_function_keeps_items_defaults_bounds_enums_and_nested_properties() -> None:
    async def paint(
        colour: Colour,
        outer: Outer,
        size: int | str | None = None,
        grid: list[list[float]] = [[1.0]],  # noqa: B006
    ) -> str:
        """Paint."""
        return f"{colour.value} {outer.inner.depth} {size} {grid}"

    schema = Tool.of(paint).schema["function"]["parameters"]
    assert schema["properties"]["colour"] == {"$ref": "#/$defs/Colour"}
    assert schema["$defs"]["Colour"] == {"type": "string", "enum": ["red", "blue"]}
    assert schema["$defs"]["Inner"]["properties"]["depth"] == {
        "type": "integer", "default": 1, "maximum": 3, "minimum": 0
    }  # fmt: skip
    assert schema["$defs"]["Outer"]["properties"]["tags"] == {
        "type": "array", "default": ["a"], "items": {"type": "string"}, "minItems": 1
    }  # fmt: skip
    assert schema["properties"]["size"] == {
        "anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}], "default": None
    }  # fmt: skip
    assert schema["properties"]["grid"] == {
        "type": "array", "items": {"type": "array", "items": {"type": "number"}}, "default": [[1.0]]
    }  # fmt: skip
    arguments = {"colour": "red", "outer": {"inner": {"depth": 2}}}
    assert ask(arguments, Tool.of(paint)).content == "red 2 None [[1.0]]"
    wrong = ask({"colour": "green", "outer": {"inner": {"depth": 4}}}, Tool.of(paint))
    assert wrong.error == "arguments"
    assert "colour: Input should be 'red' or 'blue'" in wrong.content
    assert "outer.inner.depth: Input should be less than or equal to 3" in wrong.content


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "Error: the argument 'words' is missing"),
        ({"words": "ab"}, "Error: words: 'ab' is not of type 'array'"),
        ({"words": ["ab", "c"]}, "Error: words.1: 'c' is too short"),
        ({"words": []}, "Error: words: [] should be non-empty"),
        ({"words": ["ab"], "order": "odd"}, "Error: order: 'odd' is not one of ['new', 'old']"),
        ({"words": ["ab"], "cout": 1}, "Error: find has no argument 'cout'; did you mean 'count'?"),
        ({"words": ["ab"], "where": {"deep": 1}}, "Error: where.deep: 1 is not of type 'boolean'"),
        ({"count": "3"}, "Error: the argument 'words' is missing; count: '3' is not of type 'integer'"),
        (
            {"words": ["ab"], "where": {"x": 1}},
            "Error: where: Additional properties are not allowed ('x' was unexpected)",
        ),
    ],
)
def test_wrong_arguments_are_reported_with_their_place(arguments: dict[str, Any], told: str) -> None:
    outcome = ask(arguments)
    assert (outcome.error, outcome.content) == ("arguments", told)


def test_many_problems_are_reported_in_part() -> None:
    outcome = ask({"words": ["x"] * 9})
    assert outcome.content.count("is too short") == 5
    assert outcome.content.endswith("; and 4 more")


def test_what_a_tool_does_to_its_arguments_is_not_in_the_record() -> None:
    async def spoil(words: list[str]) -> str:
        """Spoil."""
        words.clear()
        return "spoiled"

    arguments = {"words": ["ab"]}
    for tool in (Tool.from_schema(SCHEMA, lambda words, where=0, order=0, count=0: words.clear()), Tool.of(spoil)):
        outcome = ask(arguments, tool)
        assert (outcome.error, outcome.arguments, arguments) == (None, {"words": ["ab"]}, {"words": ["ab"]})


def test_a_function_may_take_its_arguments_as_one_dictionary() -> None:
    async def execute(parameters: dict[str, Any]) -> str:
        return json.dumps(parameters, sort_keys=True)

    tool = Tool.from_schema(SCHEMA, execute, by_name=False)
    assert ask({"words": ["ab"], "count": 3}, tool).content == '{"count": 3, "words": ["ab"]}'


def test_a_tool_without_parameters_takes_none() -> None:
    tool = Tool.from_schema({"type": "function", "function": {"name": "now"}}, lambda: "noon")
    assert (ask({}, tool).content, tool.description) == ("noon", "")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            {"parameters": {"type": "objekt"}},
            "parameters of the tool 'f' are not a JSON Schema: type: 'objekt' is not valid",
        ),
        ({"parameters": {"properties": {"x": {"type": 3}}}}, "not a JSON Schema: properties.x.type: 3 is not valid"),
        ({"parameters": {"required": "x"}}, "not a JSON Schema: required: 'x' is not of type 'array'"),
        (
            {"parameters": {"type": "string"}},
            "of type 'string'; they must be of type 'object', because a model gives named arguments",
        ),
        ({"parameters": ["x"]}, "the parameters of the tool 'f' are a list; write a JSON Schema, such as"),
        ({"description": 3}, "the description of the tool 'f' is a int; write a text"),
        ({"name": ""}, "a tool's schema must have a name"),
    ],
)
def test_a_schema_that_is_none_is_refused_at_once(function: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tool.from_schema({"type": "function", "function": {"name": "f", **function}}, lambda: "")


@pytest.mark.parametrize("schema", [{}, {"type": "function"}, {"name": "f", "parameters": {}}, [], "f", None])
def test_what_is_not_in_the_openai_format_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError, match=r"must have the form \{\"type\": \"function\""):
        Tool.from_schema(schema, lambda: "")


def test_a_function_that_does_not_fit_its_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="has the parameter 'count', which its function does not have; did you"):
        Tool.from_schema(SCHEMA, lambda words, where, order, counts: "")
    with pytest.raises(ConfigError, match="needs the argument 'count', but its schema does not require it"):
        Tool.from_schema(SCHEMA, lambda words, count, where=0, order=0: "")


def test_a_reference_to_elsewhere_is_not_fetched() -> None:
    elsewhere = {"properties": {"x": {"$ref": "http://127.0.0.1:9/schema.json"}}, "required": ["x"]}
    tool = Tool.from_schema({"type": "function", "function": {"name": "f", "parameters": elsewhere}}, lambda x: "no")
    outcome = ask({"x": 1}, tool)
    assert outcome.error == "raised"
    assert "http://127.0.0.1:9/schema.json" in outcome.content


def a_schema(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": "Do it.", "parameters": parameters}}


SLOW = {"patternProperties": {"^(a|aa)+$": {}}}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"properties": {"text": {"type": "string", "pattern": "^(a|aa)+$"}}}, {"text": "a" * 40 + "!"}),
        ({"patternProperties": {"^(a|aa)+$": {"type": "string"}}}, {"a" * 40 + "!": "x"}),
        ({"patternProperties": {"^(a|aa)+$": {}}, "additionalProperties": False}, {"a" * 40 + "!": "x"}),
        ({"patternProperties": {"^(a|aa)+$": {}}, "unevaluatedProperties": False}, {"a" * 40 + "!": "x"}),
        (
            {"allOf": [{"$ref": "#/$defs/x"}], "unevaluatedProperties": False, "$defs": {"x": SLOW}},
            {"a" * 40 + "!": "x"},
        ),
        ({"properties": {"all": {"items": {"pattern": "^(a|aa)+$"}}}}, {"all": ["a" * 40 + "!"] * 100}),
    ],
)
def test_a_pattern_that_takes_for_ever_is_given_up_and_holds_nobody_up(
    parameters: dict[str, Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PATTERN_SECONDS", 0.25)

    async def f(**given: Any) -> str:
        return "done"

    tool = Tool.from_schema(a_schema(type="object", **parameters), f, timeout=300)
    ticks = 0

    async def main() -> Any:
        async def watch() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        watching = asyncio.create_task(watch())
        outcome = await tool.run(ToolCall(id="1", name="f", arguments=arguments, text=""))
        watching.cancel()
        return outcome

    outcome = asyncio.run(main())
    assert outcome.error == "arguments"
    assert "could not be compared with the pattern '^(a|aa)+$' in 0.25 s" in outcome.content
    assert ticks > 3  # the event loop went on meanwhile
    assert outcome.seconds < 15  # not a quarter of a second for each of a hundred texts


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"code": "ab", "x_1": 2, "in": {"y_1": 1, "patternProperties": {"z": 1}}}, None),
        ({"code": "ab", "x_1": "two"}, "x_1: 'two' is not of type 'integer'"),
        ({"code": "ab", "z": 2}, "('z' was unexpected)"),
        ({"code": "ab", "in": {"y_1": 1, "z": 2}}, "in: Unevaluated properties are not allowed ('z' was unexpected)"),
        ({"code": "ab", "in": {"y_1": "a"}}, "in.y_1: 'a' is not of type 'integer'"),
        ({"x_code": 1}, "x_code: 1 is not of type 'string'"),
    ],
)
def test_unevaluated_properties_beside_patterns_are_checked_as_json_schema_says(
    arguments: dict[str, Any], problem: str | None
) -> None:
    async def f(**given: Any) -> str:
        return "done"

    parameters = {
        "type": "object",
        "properties": {"code": {"enum": ["ab"]}, "x_code": {"type": "string"}, "in": {"$ref": "#/$defs/in"}},
        "allOf": [{"patternProperties": {"^x_[0-9]": {"type": "integer"}, "^x_c": {}}}],
        "unevaluatedProperties": False,
        "$defs": {
            "in": {
                "patternProperties": {"^y_": {"type": "integer"}},
                "properties": {"patternProperties": {"type": "object"}},
                "unevaluatedProperties": False,
            }
        },
    }
    tool = Tool.from_schema(a_schema(**parameters), f)
    outcome = asyncio.run(tool.run(ToolCall(id="1", name="f", arguments=arguments, text="")))
    assert (outcome.error, problem in outcome.content if problem else outcome.content) == (
        ("arguments", True) if problem else (None, "done")
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"code": "ab12"}, None),
        ({"code": "AB"}, "'AB' does not match '^[a-z]+[0-9]+$'"),
        ({"code": 5}, "5 is not of type 'string'"),
        ({"code": "a1", "x_1": 2}, None),
        ({"code": "a1", "x_1": "two"}, "x_1: 'two' is not of type 'integer'"),
        ({"code": "a1", "y": 2}, "these arguments do not exist: 'y'"),
        ({"code": "a1", "y": 2, "x_2": 3}, "these arguments do not exist: 'y'"),
    ],
)
def test_patterns_are_checked_as_json_schema_says(arguments: dict[str, Any], problem: str | None) -> None:
    async def f(**given: Any) -> str:
        return "done"

    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[a-z]+[0-9]+$"}},
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
    }
    tool = Tool.from_schema(a_schema(**parameters), f)
    outcome = asyncio.run(tool.run(ToolCall(id="1", name="f", arguments=arguments, text="")))
    assert (outcome.error, problem in outcome.content if problem else outcome.content) == (
        ("arguments", True) if problem else (None, "done")
    )


# The schema of a function is created once, and anew as soon as anything has changed that it depends on.


Size = Literal["small", "large"]


def order(size: Size, count: int = 1, *, note: str = "") -> str:
    """Order a thing."""
    return f"{count} {size} {note}"


def nested(default: Any, kind: Any) -> Callable[..., Any]:
    def ask(value: int) -> None:
        """Ask."""

    ask.__annotations__ = {"value": kind}
    ask.__defaults__ = (default,)
    return ask


class Shop:
    def order(self, size: Size) -> str:
        """Order here."""
        return f"{size} from {self}"


@pytest.fixture(autouse=True)
def created(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tools whose schema was created."""
    names: list[str] = []
    make = schema.create_model

    def counted(name: str, **options: Any) -> Any:
        names.append(name)
        return make(name, **options)

    monkeypatch.setattr(schema, "create_model", counted)
    monkeypatch.setattr(schema, "_remembered", {})
    return names


def properties(function: Callable[..., Any]) -> dict[str, Any]:
    return schema_of(function)[0]["function"]["parameters"]["properties"]


def test_a_schema_is_created_once(created: list[str]) -> None:
    first, arguments = schema_of(order)
    second, again = schema_of(order)
    assert (created, first, arguments is again) == (["order"], second, True)
    first["function"]["parameters"]["properties"].clear()  # a copy
    assert set(properties(order)) == {"size", "count", "note"}
    created.clear()
    assert schema_of(Shop().order)[0] == schema_of(Shop().order)[0]
    assert created == ["order"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("__doc__", "Order another thing."),
        ("__name__", "buy"),
        ("__defaults__", (2,)),
        ("__defaults__", (True,)),
        ("__kwdefaults__", {"note": "-"}),
        ("__annotations__", {"size": Literal["tiny"], "count": int, "note": str}),
    ],
)
def test_a_changed_function_has_a_new_schema(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    before = schema_of(order)[0]
    monkeypatch.setattr(order, name, value)
    changed = schema_of(order)[0]
    assert repr(changed) != repr(before)  # 1 == True
    schema._remembered.clear()
    assert changed == schema_of(order)[0]


def test_a_changed_type_gives_a_new_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    assert properties(order)["size"]["enum"] == ["small", "large"]
    monkeypatch.setitem(globals(), "Size", Literal["huge"])
    assert properties(order)["size"] == {"const": "huge", "type": "string"}
    with pytest.raises(WrongArguments):
        schema_of(order)[1].check({"size": "small"})


def test_nested_functions_share_their_code_and_no_schema(created: list[str]) -> None:
    defaults = [properties(nested(default, int))["value"]["default"] for default in (1, True, 1, 2.5)]
    assert [(type(default), default) for default in defaults] == [(int, 1), (bool, True), (int, 1), (float, 2.5)]
    kinds = [properties(nested(1, kind))["value"] for kind in (int, str, Annotated[int, Field(ge=3)])]
    assert [(kind["type"], kind.get("minimum")) for kind in kinds] == [
        ("integer", None),
        ("string", None),
        ("integer", 3),
    ]
    created.clear()
    assert [properties(nested(1, list[int])) for _ in range(3)] == [properties(nested(1, list[int]))] * 3
    assert created == ["ask"]


def test_a_wrapped_function_has_the_schema_of_what_it_wraps() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            return function(*args, **options)

        return wrapper

    def other(text: str) -> str:
        """Order a thing."""
        return text

    assert set(properties(logged(order))) == {"size", "count", "note"}
    assert set(properties(logged(other))) == {"text"}


def test_no_instance_is_kept() -> None:
    shop = Shop()
    assert set(properties(shop.order)) == {"size"}
    alive = weakref.ref(shop)
    del shop
    gc.collect()
    assert alive() is None


def test_the_memory_is_bounded(created: list[str]) -> None:
    for number in range(schema._MOST_REMEMBERED + 5):
        place: dict[str, Any] = {}
        exec(f'def f{number}(x: int):\n    "Do."', place)
        schema_of(place[f"f{number}"])
    assert len(schema._remembered) == schema._MOST_REMEMBERED
