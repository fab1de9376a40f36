"""scripts/measure.py counts what it says, and reports what is over its bound."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

MEASURE = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "measure.py"))


def figures(tree: Path, **files: str) -> dict[str, Any]:
    """The figures of a small tree with these files."""
    for name, text in files.items():
        (tree / f"{name}.py").write_text(text, encoding="utf-8")
    return {one.name: one for one in MEASURE["source_figures"](tree)}


def test_a_small_file_that_one_neighbour_alone_imports_is_listed(tmp_path: Path) -> None:
    root = tmp_path / "pkg"
    root.mkdir()
    text = {
        "a": "from pkg.b import x\nfrom pkg import c\n",
        "b": "from pkg.c import y\n",
        "c": "y = 1\n",
        "d": "x\n" * 200,
    }
    found = figures(root, **text, e="from pkg.d import x\n")
    assert (found["modules"].value, found["median length of a module"].value) == (5, 1)
    assert (found["small files with one neighbour"].value, found["small files with one neighbour"].details) == (
        1,
        ("    1 b.py",),
    )


def test_the_longest_function_is_named(tmp_path: Path) -> None:
    body = "    x = 1\n" * 70
    found = figures(tmp_path, small="def f():\n    return 1\n", large=f"class A:\n  @property\n  def g(self):\n{body}")
    assert found["longest function"].value == 71
    assert found["longest function"].details[0].split() == ["71", "large.py:3", "g"]


def test_private_attributes_and_cached_properties_are_hidden_state(tmp_path: Path) -> None:
    text = """
class A:
    _annotated: int = 0
    _shared: ClassVar[int] = 0
    public: int = 0

    def __init__(self):
        self._a, self.b = 1, 2
        self._a = 3
        self.__name__ = "c"
        other._d = 4

    @cached_property
    def question(self):
        self._e += self._read
"""
    found = figures(tmp_path, a=text)["hidden state of one class"]
    assert (found.value, found.details[0].split(": ")[1]) == (4, "_a _annotated _e question()")


def test_a_class_name_that_is_defined_in_two_files_is_counted_once(tmp_path: Path) -> None:
    found = figures(
        tmp_path, a="class A: pass\nclass B: pass\n", b="class A: pass\n", c="def f():\n    class A: pass\n"
    )
    assert found["class names defined more than once"].value == 1
    assert found["class names defined more than once"].details == ("A: a.py:1, b.py:1, c.py:2",)


def test_a_class_with_the_name_of_another_systems_class_is_listed_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "compat" / "verl").mkdir(parents=True)
    found = figures(
        tmp_path,
        **{
            "a": "class ToolResponse: pass\nclass B: pass\n",
            "compat/verl/base": "class ToolResponse: pass\nclass B: pass\n",
        },
    )
    assert found["class names defined more than once"].value == 1
    assert found["class names defined more than once"].details == (
        "B: a.py:2, compat/verl/base.py:2",
        "ToolResponse (as in another system, not counted): compat/verl/base.py:1",
    )


def test_unclear_words_are_counted_in_prose_and_not_in_names_or_code_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nobody is told of `the whole`.\n\n```\ntold\n```\nUntold.\n", encoding="utf-8")
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text('"""It hears."""\ntold = "told"  # anew\nx = f"{told} was heard"\n', encoding="utf-8")
    found = MEASURE["unclear_words"](source, (page,))
    assert {word: dict(places) for word, places in found.items()} == {
        "hears": {"a.py": 1},
        "anew": {"a.py": 1},
        "heard": {"a.py": 1},
        "nobody": {"page.md": 1},
        "told": {"page.md": 1},
    }


def test_what_is_over_its_bound_is_reported_with_the_value_the_bound_and_what_to_do(tmp_path: Path) -> None:
    found = figures(tmp_path, a="def f():\n" + "    x = 1\n" * 80)
    bounds = dict.fromkeys(found, 100)
    assert list(MEASURE["problems"](found.values(), bounds)) == []
    (text,) = MEASURE["problems"](found.values(), {**bounds, "longest function": 80})
    assert "longest function: 81, and at most 80 is allowed" in text
    assert "a.py:1 f" in text
    assert MEASURE["ADVICE"].keys() == MEASURE["BOUNDS"].keys()


@pytest.mark.slow
def test_a_training_step_passes_through_the_loop_and_neither_through_the_record_nor_the_terminal() -> None:
    ran = MEASURE["trace_step"]()
    assert {"train.py", "data/order.py", "rollout/rollout.py", "rollout/session.py", "types.py"} <= ran.keys()
    assert {"training/batch.py", "training/forward.py", "engines/local/engine.py"} <= ran.keys()
    assert not any(name.startswith(("terminal/", "record/", "config/", "commands/", "doctor/")) for name in ran)
