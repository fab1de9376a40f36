"""The optional dependencies: each message that names an extra names an extra that installs the library of the message."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from turnwise.errors import ConfigError
from turnwise.loggers.logger import starting

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "turnwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*.md")]
NAMED = re.compile(r"turnwise\[([^\]{}]+)\]")
LIBRARIES = {
    "4bit": "bitsandbytes", "8bit": "bitsandbytes",
    "completion": "argcomplete", "data": "datasets", "gguf": "gguf", "gym": "gymnasium",
    "http": "aiohttp",
    "hybrid": "flash-linear-attention",
    "lora": "peft", "math": "math-verify", "mcp": "mcp", "mlflow": "mlflow-skinny", "pandas": "pandas",
    "search": "starlette", "serve": "starlette", "swanlab": "swanlab", "tensorboard": "tensorboard", "trackio": "trackio",
    "view": "starlette", "vision": "pillow", "wandb": "wandb", "weave": "weave", "otlp": "opentelemetry-sdk",
    "vllm": "vllm", "sglang": "sglang", "ray": "ray",
}  # fmt: skip
"""The library that each extra is named for."""


def requirements(extra: str) -> set[str]:
    """The names of the packages of an extra, those of extras in it included."""
    names: set[str] = set()
    for requirement in EXTRAS[extra]:
        name = re.split(r"[\[<>=;\s]", requirement, maxsplit=1)[0]
        if name == "turnwise":
            (others,) = NAMED.findall(requirement)
            names |= set[str]().union(*(requirements(other) for other in others.split(",")))
        else:
            names.add(name)
    return names


def test_messages_and_pages_name_extras_that_exist() -> None:
    named: dict[str, set[str]] = {}
    for path in [*SOURCE.rglob("*.py"), *PAGES]:
        text = path.read_text(encoding="utf-8")
        # the second form is an argument of a function that makes the message (not an option of pydantic)
        for extras in [*NAMED.findall(text), *re.findall(r'\bextra="(?!allow|forbid|ignore)(\w+)"', text)]:
            for extra in extras.split(","):
                named.setdefault(extra.strip(), set()).add(path.name)
    assert {"lora", "mcp", "view", "wandb", "vision", "vllm", "sglang", "search", "serve"} <= set(named)
    assert {extra: files for extra, files in named.items() if extra not in EXTRAS} == {}


@pytest.mark.parametrize("extra", sorted(LIBRARIES))
def test_an_extra_installs_the_library_that_it_is_named_for(extra: str) -> None:
    assert LIBRARIES[extra] in requirements(extra)


def test_a_message_names_the_extra_of_its_library() -> None:
    """Messages of the form "... needs the `library` package: pip install 'turnwise[extra]'"."""
    form = re.compile(
        r"needs? (?:the )?(?:package )?`?([\w-]+)`?(?: package)?(?:, which is not installed)?: pip install 'turnwise\[(\w+)\]'"
    )
    pairs = {
        (library, extra)
        for path in SOURCE.rglob("*.py")
        for library, extra in form.findall(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")))
    }
    pairs = {(library, extra) for library, extra in pairs if library != "SDK"}  # the official SDK of MCP
    assert {("peft", "lora"), ("bitsandbytes", "8bit"), ("pandas", "pandas"), ("datasets", "data")} <= pairs
    names = {"PIL": "pillow"}
    wrong = {(library, extra) for library, extra in pairs if names.get(library, library) not in requirements(extra)}
    assert wrong == set()


@pytest.mark.parametrize("extra", ["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "weave", "otlp"])
def test_a_tracker_that_is_not_installed_names_its_extra(extra: str) -> None:
    assert extra in EXTRAS
    with (
        pytest.raises(ConfigError, match=rf"^{extra} needs a package .*turnwise\[{extra}\]'$"),
        starting(extra, extra=extra),
    ):
        raise ModuleNotFoundError(f"No module named '{extra}'")


def test_every_package_with_a_pinned_version_is_in_its_range() -> None:
    """constraints.txt and the ranges of pyproject.toml do not contradict each other."""
    from packaging.requirements import Requirement

    pins = {
        name.lower().replace("_", "-"): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    }
    checked = 0
    for text in [*PROJECT["dependencies"], *(text for texts in EXTRAS.values() for text in texts)]:
        requirement = Requirement(text)
        version = pins.get(requirement.name.lower().replace("_", "-"))
        if version is not None:
            checked += 1
            assert requirement.specifier.contains(version), f"{text}: constraints.txt has {version}"
    assert checked > 20


def test_the_citation_and_the_issue_templates_are_valid() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert set(citation) >= {"title", "authors", "message"}
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("*.yml")}
    for name in ("bug_report", "feature_request"):
        assert forms[name]["name"]
        assert forms[name]["description"]
        assert {part["type"] for part in forms[name]["body"]} <= {"markdown", "textarea", "input", "dropdown"}
    assert (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").is_file()
