"""verl's names: ours while a file of a user is loaded or his method runs, and gone afterwards."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from compat.verl.verl_files import no_verl_left
from turnwise.compat.verl import BaseInteraction, BaseTool, ToolResponse, verl_names
from turnwise.compat.verl.names import NAMES
from turnwise.errors import ConfigError


def test_the_names_are_there_inside_and_nowhere_else() -> None:
    with verl_names():
        base = importlib.import_module("verl.interactions.base")
        tool = importlib.import_module("verl.tools.base_tool")
        from verl.tools import schemas  # type: ignore[import-not-found]
        from verl.utils.reward_score import gsm8k  # type: ignore[import-not-found]
    assert (base.BaseInteraction, tool.BaseTool, schemas.ToolResponse) == (BaseInteraction, BaseTool, ToolResponse)
    assert gsm8k.compute_score("#### 72", "72") == 1.0
    assert no_verl_left()
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl'"):
        importlib.import_module("verl.interactions.base")


def test_every_module_of_the_list_can_be_imported() -> None:
    with verl_names():
        for name, places in NAMES.items():
            module = importlib.import_module(name)
            assert all(getattr(module, place.rpartition(":")[2]) is not None for place in places)
    assert no_verl_left()


def test_what_we_do_not_have_says_what_there_is() -> None:
    with verl_names(), pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("verl.interactions.bose")
    assert "verl is not installed here, and turnwise has no module of its own for verl.interactions.bose" in str(
        raised.value
    )
    assert "did you mean 'verl.interactions.base'?" in str(raised.value)


def test_the_inner_of_two_takes_nothing_away() -> None:
    with verl_names():
        with verl_names():
            pass
        importlib.import_module("verl.tools.schemas")
    assert no_verl_left()


def test_an_error_inside_leaves_nothing_behind() -> None:
    before = list(sys.meta_path)
    with pytest.raises(ModuleNotFoundError), verl_names():
        importlib.import_module("verl.tools.nothing")
    assert no_verl_left()
    assert sys.meta_path == before


def test_another_verl_is_there_again_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a verl installed: names of the list are ours inside, others are its own, and outside all is its own."""
    for name, text in {
        "verl/__init__.py": "where = 'installed'",
        "verl/interactions/__init__.py": "",
        "verl/interactions/base.py": "BaseInteraction = 'installed'",
        "verl/interactions/other.py": "from verl.interactions.base import BaseInteraction as seen",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    outside = importlib.import_module("verl.interactions.base")
    try:
        with verl_names():
            inside = importlib.import_module("verl.interactions.base")
            other = importlib.import_module("verl.interactions.other")
        assert inside.BaseInteraction is BaseInteraction
        assert other.seen is BaseInteraction
        assert importlib.import_module("verl.interactions.base") is outside
        assert outside.BaseInteraction == "installed"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]


def test_a_schema_keeps_what_verl_drops() -> None:
    with verl_names():
        from verl.tools.schemas import OpenAIFunctionToolSchema  # type: ignore[import-not-found]
    parameters = {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "place": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["words"],
    }
    given = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    assert OpenAIFunctionToolSchema.model_validate(given).model_dump(exclude_unset=True) == given


def test_the_arguments_of_a_call_are_read_and_what_is_no_mapping_is_told() -> None:
    with verl_names():
        from verl.tools.schemas import (  # type: ignore[import-not-found]
            OpenAIFunctionCallSchema,
            OpenAIFunctionParsedSchema,
        )
    for text, expected in [('{"a": 1}', ({"a": 1}, False)), ("[1]", ({}, True)), ("{", ({}, True))]:
        parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
        call, wrong = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
        assert (call.arguments, wrong) == expected


def test_a_response_is_read_as_verl_reads_it() -> None:
    assert ToolResponse().is_empty()
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=[1]).is_text_only()
    with pytest.raises(ValueError, match="image must be a list, got a str"):
        ToolResponse(image="x")  # type: ignore[arg-type]


def test_an_option_that_a_shipped_class_does_not_have_is_refused() -> None:
    with verl_names():
        from verl.interactions.gsm8k_interaction import Gsm8kInteraction  # type: ignore[import-not-found]
    with pytest.raises(ConfigError, match="no option 'grade'; did you mean 'grader'"):
        Gsm8kInteraction({"grade": "strict"})
