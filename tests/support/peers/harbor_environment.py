"""An environment of Harbor's interface for the tests: a folder as the root of a bubblewrap sandbox. Runs in the Python that has
the package. Where `HARBOR_FOLDERS` points, each environment has a folder from its start to its end."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult  # pyright: ignore[reportMissingImports]

_MACHINE = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64")


class Folder(BaseEnvironment):
    """Follows no Dockerfile: it has /app, and files of `environment/` in it."""

    def __init__(self, *args: Any, fail: str = "", **kwargs: Any) -> None:
        self._fail = fail
        self._folder = Path(os.environ["HARBOR_FOLDERS"]) / kwargs["session_id"]
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "folder"

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        if (kwargs or {}).get("fail") == "preflight":
            raise SystemExit("Folder requires FOLDER_API_KEY to be set.")

    def _validate_definition(self) -> None:
        if not self.environment_dir.is_dir():
            raise FileNotFoundError(self.environment_dir)

    async def start(self, force_build: bool) -> None:
        for place in ("app", "tmp", *(place[1:] for place in _MACHINE)):
            (self._folder / place).mkdir(parents=True)
        (self._folder / "memory").write_text(str(self.task_env_config.memory_mb))
        if self._fail == "start":
            raise RuntimeError("quota of the folder service exceeded")
        if self._fail == "hang":
            await asyncio.sleep(1000)
        shutil.copytree(self.environment_dir, self._folder / "app", dirs_exist_ok=True)

    async def stop(self, delete: bool) -> None:
        assert delete
        shutil.rmtree(self._folder)

    def _inside(self, path: str) -> Path:
        return self._folder / path.lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._inside(source_dir), target_dir)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        places = [word for place in _MACHINE for word in ("--ro-bind", place, place)]
        variables = {"PATH": os.environ["PATH"], **self._persistent_env, **(env or {})}
        words = [
            "bwrap",
            "--bind",
            str(self._folder),
            "/",
            *places,
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--unshare-all",
        ]
        words += ["--die-with-parent", "--clearenv", *(w for pair in variables.items() for w in ("--setenv", *pair))]
        ran = await asyncio.create_subprocess_exec(
            *words, "--chdir", cwd or self.task_env_config.workdir or "/app", "sh", "-c", command, stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(ran.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=ran.returncode or 0)
