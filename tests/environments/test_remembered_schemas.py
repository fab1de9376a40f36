"""The schema of a function is created once, and anew as soon as anything has changed that it depends on."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from turnwise.environments.tools import schema
from turnwise.environments.tools.schema import WrongArguments, schema_of

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
