"""The page about environments says what is true: its examples run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.conversations import RENDERER, Says, a_row, call, hold, scripted
from support.servers import Answer, serving
from turnwise import assembly
from turnwise.compat.gym import GymEnvironments, ToolEnvironments
from turnwise.environments.users import ModelledUser
from turnwise.options.schema import Config

DOCS = Path(__file__).parents[2] / "docs"
PAGE, TRL = ((DOCS / name).read_text(encoding="utf-8") for name in ("environments.md", "trl.md"))


def blocks(language: str) -> list[str]:
    """The examples of the pages about environments and about TRL."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE + TRL, re.MULTILINE | re.DOTALL)


def code(word: str) -> dict[str, Any]:
    """What the example defines that has this word in it."""
    (found,) = [block for block in blocks("python") if word in block]
    names: dict[str, Any] = {}
    exec(compile(found, "docs/environments.md", "exec"), names)
    return names


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes the environments of the recipe that names something, from the directory where the page's files are."""
    for block in blocks("python"):
        if (name := re.match(r"# (\w+\.py)\n", block)) is not None:
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)

    def make(word: str) -> Any:
        part = next(block for block in blocks("yaml") if word in block)
        return assembly.environment_factory(
            Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, **yaml.safe_load(part)})
        )

    return make


def test_an_interaction(recipe: Callable[[str], Any]) -> None:
    trajectory = hold(Says("A lot.", "100", "60"), recipe("market.py"), row=a_row(limit=80))
    assert [turn.reward for turn in trajectory.turns] == [-0.1, 0.0, 0.75]
    assert (trajectory.turns[2].info, trajectory.stop) == ({"price": 60}, "done")
    told = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert told[1:] == ["What is your price?", "100 is too much for me."]


def test_a_scripted_user() -> None:
    trajectory = hold(Says("a", "b", "c"), code("ScriptedUser([")["doubtful"])
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "Are you sure?", "b", "Thank you.", "c"]


def test_a_class() -> None:
    trajectory = hold(Says("3", "2", "1"), code("# countdown.py")["Countdown"])
    assert ([turn.reward for turn in trajectory.turns], trajectory.stop) == ([0.25, 0.25, 0.25], "done")


def test_a_game(recipe: Callable[[str], Any]) -> None:
    trajectory = hold(Says("it is 5", "is it four", "five"), recipe("action: guess.py:last_word"), row=a_row(seed=1))
    told = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert told == [
        "Hi\n\nI have a number from 0 to 9.",
        "Say a number from zero to nine, not 5.",
        "Right.",
    ]
    assert [turn.reward for turn in trajectory.turns] == [-0.1, 1.0]


def test_a_class_with_reset_and_step(recipe: Callable[[str], Any]) -> None:
    trajectory = hold(Says("shout hello", "bye"), recipe("shell.py"), row=a_row(greeting="Yes?"))
    assert [one["content"] for one in trajectory.messages] == ["Hi\n\nYes?", "shout hello", "HELLO", "bye"]


def test_a_trl_environment(recipe: Callable[[str], Any]) -> None:
    said = [call("dial", '{"code": "x"}'), call("dial", '{"code": "12"}'), "Open."]
    trajectory = hold(Says(*said), recipe("vault.py"), row=a_row(code="12"))
    assert trajectory.messages[0]["content"] == "Hi Digits only."
    assert [one["content"] for one in trajectory.messages if one["role"] == "tool"] == [
        "Error: Only digits.",
        "It opens.",
    ]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]


def test_a_modelled_user(monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = [block for block in blocks("yaml") if "ModelledUser" in block]
    monkeypatch.setenv("USER_MODEL_KEY", "k")
    with serving(lambda question, number: Answer({"choices": [{"message": {"content": "[DONE]"}}]})) as server:
        tree = yaml.safe_load(part.replace("http://127.0.0.1:8000", server.url))
        make = assembly.environment_factory(
            Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, **tree})
        )
        trajectory = hold(Says("a"), make, row=a_row(persona="Ann"))
    assert trajectory.stop == "done"
    assert server.asked[0]["messages"][0]["content"] == (
        "You are a customer of a shoe shop. Say [DONE] when you have what you want.\n\nAnn"
    )


def test_a_modelled_user_behind_an_engine() -> None:
    make = code("EngineChatModel")["make_environment"](scripted(["Bye. [DONE]"]), RENDERER)
    assert hold(Says("a"), make).messages[-1] == {"role": "user", "content": "Bye."}


def test_tools_in_front_of_a_game(recipe: Callable[[str], Any]) -> None:
    said = [call("calculator", '{"expression": "2+2"}'), "4"]
    trajectory = hold(Says(*said), recipe("tools: [turnwise.environments.calculator:calculator]"), row=a_row(seed=1))
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]


def test_tools_in_front_of_an_interaction_in_front_of_a_game() -> None:
    said = [call("calculator", '{"expression": "0+1"}'), "Why?", "1", *"12122"]
    trajectory = hold(Says(*said), code("# host.py")["make_environment"])
    assert [turn.reward for turn in trajectory.turns] == [0.0, -0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert trajectory.stop == "done"
    assert [one["content"] for one in trajectory.messages if one["role"] == "tool"] == ["1"]


def test_the_tables_name_all_arguments() -> None:
    import inspect

    tables = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`[^|]+)\|", PAGE, re.MULTILINE))))
    for kind in (GymEnvironments, ModelledUser):
        assert set(inspect.signature(kind).parameters) <= tables, kind
    assert set(inspect.signature(ToolEnvironments).parameters) <= set(re.findall(r"\w+", PAGE))
