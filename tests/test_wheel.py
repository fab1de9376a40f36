"""What is installed: the wheel, and the extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from turnwise.errors import ConfigError
from turnwise.loggers.logger import starting
from turnwise.record import read
from turnwise.record.reader import read_lines

# The wheel: it has all files, installs into a fresh environment, and trains from an empty directory.


ROOT = Path(__file__).resolve().parents[1]

SHORT = ["train.steps=1", "train.batch_size=2", "train.group_size=4", "eval.max_rows=2"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an sdist, and a wheel that was built from this sdist and not from the clone."""
    folder = tmp_path_factory.mktemp("dist")
    clone = folder / "clone"
    # a clone without build outputs, with the changes that are not committed
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode().split("\0")  # fmt: skip
    for name in filter(None, files):
        source, target = ROOT / name, clone / name
        if not os.path.lexists(source):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            target.write_bytes(source.read_bytes())
    # builds the sdist, and the wheel from the sdist
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(clone)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def turnwise(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `turnwise` of a fresh environment with the wheel. Its dependencies are those of the present environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (wheel,) = built.glob("*.whl")
    packages = Path(subprocess.run(
        [folder / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip())  # fmt: skip
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    # with PYTHONPATH=src, pip would take the present tree for an installed turnwise
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, env=clean)
    present = [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    present = present or [Path(sysconfig.get_path("purelib"))]
    # addsitedir would also read the .pth files there, which may add this clone; plain lines do not
    (packages / "present.pth").write_text("".join(f"{path}\n" for path in present))
    return folder / "bin" / "turnwise"


def run(turnwise: Path, folder: Path, *words: str) -> str:
    """Run the installed command in `folder`, without the clone on the path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [turnwise, *words], cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_wheel_has_all_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("turnwise/")}
        for name in ("train.jsonl", "heldout.jsonl", "model/model.safetensors"):
            assert archive.read(f"turnwise/starter/demo/{name}") == (ROOT / "demo" / name).read_bytes()
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/turnwise"], cwd=ROOT,
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    sources = {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    assert sources - names == set()
    assert {name for name in names if name.endswith(".py")} == {name for name in sources if name.endswith(".py")}


@pytest.mark.slow
def test_the_installed_demo_runs_in_an_empty_directory(turnwise: Path, tmp_path: Path) -> None:
    output = run(turnwise, tmp_path, "demo", *SHORT)
    assert "runs/demo/trajectories.jsonl" in output
    assert [line["step"] for line in read_lines(tmp_path / "runs" / "demo" / "metrics.jsonl")] == [1]
    assert all(not trajectory.failed for trajectory in read(tmp_path / "runs" / "demo"))
    # the package and the demo's model are those of the wheel
    assert str(turnwise.parent.parent / "lib") in (tmp_path / "runs" / "demo" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_starter_project_of_the_wheel_trains(turnwise: Path, tmp_path: Path) -> None:
    run(turnwise, tmp_path, "init")
    run(turnwise, tmp_path, "train", "recipe.yaml", *SHORT)
    assert len(list(read(tmp_path / "runs" / "first"))) == 8
    assert "turnwise 0." in run(turnwise, tmp_path, "--version")


# The optional dependencies: each message that names an extra names an extra that installs the library of the message.


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
    "vllm": "vllm", "sglang": "sglang", "ray": "ray", "sweep": "optuna",
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
    assert {"lora", "mcp", "view", "wandb", "vision", "vllm", "search", "serve"} <= set(named)
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
