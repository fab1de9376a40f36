"""The wheel: it has all files, installs into a fresh environment, and trains from an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from turnwise.record import read
from turnwise.record.reader import read_lines

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["train.steps=1", "train.batch_size=2", "train.group_size=4", "eval.max_rows=2"]

pytestmark = pytest.mark.slow


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


def test_the_installed_demo_runs_in_an_empty_directory(turnwise: Path, tmp_path: Path) -> None:
    output = run(turnwise, tmp_path, "demo", *SHORT)
    assert "runs/demo/trajectories.jsonl" in output
    assert [line["step"] for line in read_lines(tmp_path / "runs" / "demo" / "metrics.jsonl")] == [1]
    assert all(not trajectory.failed for trajectory in read(tmp_path / "runs" / "demo"))
    # the package and the demo's model are those of the wheel
    assert str(turnwise.parent.parent / "lib") in (tmp_path / "runs" / "demo" / "config.yaml").read_text()


def test_a_starter_project_of_the_wheel_trains(turnwise: Path, tmp_path: Path) -> None:
    run(turnwise, tmp_path, "init")
    run(turnwise, tmp_path, "train", "recipe.yaml", *SHORT)
    assert len(list(read(tmp_path / "runs" / "first"))) == 8
    assert "turnwise 0." in run(turnwise, tmp_path, "--version")
