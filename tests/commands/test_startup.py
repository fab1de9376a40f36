"""How quickly the package and the command line start: which modules they load, and the CPU time that this takes."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise
from turnwise.cli import _COMMANDS, make_parser

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAVY = {"torch", "transformers", "numpy", "pydantic", "rich", "yaml", "matplotlib", "asyncio"}


def loaded(code: str) -> set[str]:
    """The modules that are loaded after `code`, in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}\nprint('modules', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(output.splitlines()[-1].split()[1:])


def cpu_seconds(code: str, *, runs: int = 5) -> float:
    """The smallest CPU time of a process that runs `code`: other programs on the machine change it less than the wall time."""
    times: list[float] = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


HELP = """
import turnwise.cli
try:
    turnwise.cli.main(["--help"])
except SystemExit:
    pass
"""


def test_the_package_loads_no_other_module_of_its_own() -> None:
    modules = loaded("import turnwise")
    assert {name for name in modules if name.split(".")[0] == "turnwise"} == {"turnwise"}
    assert modules & HEAVY == set()


def test_environments_need_neither_torch_nor_pydantic() -> None:
    modules = loaded("from turnwise import Opening, Reply, Row, environment, user_message, checked_answer, Trajectory")
    assert modules & (HEAVY - {"asyncio"}) == set()


def test_help_loads_no_command() -> None:
    modules = loaded(HELP)
    assert {name for name in modules if name.startswith("turnwise.commands.")} == set()
    assert modules & HEAVY == set()


def test_a_command_loads_no_other_command() -> None:
    modules = loaded("import turnwise.cli\nturnwise.cli.make_parser('train')")
    others = {f"turnwise.{module}" for module, _ in _COMMANDS.values()} - {"turnwise.commands.train", "turnwise.cli"}
    assert modules & others == set()
    assert modules & (HEAVY - {"asyncio", "rich"}) == set()


def test_import_and_help_are_quick() -> None:
    assert cpu_seconds("import turnwise") < 0.2
    assert cpu_seconds(HELP) < 0.3


MISSING = {
    "data.train=rows.jsnl.jsonl": "there is no file {here}/rows.jsnl.jsonl",
    "data.eval=./held_out": "there is no directory {here}/held_out",
    "environment=plays.py:game": "environment: there is no file {here}/plays.py",
    "reward.trajectory=[judge.py:judge]": "reward.trajectory: there is no file {here}/judge.py",
}
COMMANDS_WITH_MISSING_FILES = """
import contextlib, io, os
os.chdir({here!r})
import turnwise.cli
for words, told in {cases!r}:
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        assert turnwise.cli.main(words) == 1
    assert told in error.getvalue(), (words, error.getvalue())
"""


def test_files_that_do_not_exist_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    here, recipe = str(SOURCE.parent), str(SOURCE.parent / "recipes" / "calculator.yaml")
    out = {"rollout": ["--out", str(tmp_path / "out")]}
    cases = [
        ([command, recipe, override, *out.get(command, [])], told.format(here=here))
        for command in ("train", "eval", "rollout")
        for override, told in MISSING.items()
    ]
    modules = loaded(COMMANDS_WITH_MISSING_FILES.format(here=here, cases=cases))
    assert modules & {"torch", "transformers"} == set()


def test_a_process_of_the_command_line_ends_without_a_search_for_unreachable_objects() -> None:
    code = "import gc, sys, turnwise.cli\nsys.argv = ['turnwise', 'show', '/nowhere']\nassert turnwise.cli.program() == 1\n"
    loaded(f"{code}assert gc.get_freeze_count() > 1000")


def test_all_commands_have_a_description_and_are_in_the_help() -> None:
    parser = make_parser()
    (commands,) = [action for action in parser._actions if isinstance(action.choices, dict)]
    assert list(commands.choices) == list(_COMMANDS)
    for name, of_command in commands.choices.items():
        assert of_command.description, name
        assert of_command.get_default("command") is not None, name
    files = [SOURCE / "turnwise" / "cli.py", *(SOURCE / "turnwise" / "commands").glob("*.py")]
    registered = [
        name
        for path in files
        for name in re.findall(r"^def register_(\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(registered) == sorted(_COMMANDS)


def test_lazy_names_are_those_for_type_checkers() -> None:
    tree = ast.parse((SOURCE / "turnwise" / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = {
        alias.name: f"{node.module}:{alias.name}"
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(names) == sorted(turnwise.__all__)
    for name, reference in names.items():
        module, _, attribute = reference.partition(":")
        value = getattr(turnwise, name)
        __import__(module)
        expected = sys.modules["turnwise.record"] if name == "record" else getattr(sys.modules[module], attribute)
        assert value is expected, name
    assert set(turnwise.__all__) <= set(dir(turnwise))


def test_functions_are_not_hidden_by_submodules_of_the_same_name() -> None:
    import turnwise.rollout.session
    import turnwise.sft.fine_tune
    import turnwise.train
    from turnwise import api
    from turnwise import rollout as by_from

    assert turnwise.train is api.train
    assert turnwise.sft is api.sft
    assert turnwise.rollout is by_from is api.rollout
    assert sys.modules["turnwise.train"].assemble
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        turnwise.nothing  # noqa: B018
