"""vLLM's engine in the process of turnwise: in vLLM's environment, with weights by broadcasts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import engine_env
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.engines
def test_the_cases_of_the_engine_in_process(tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "scripts"))
    result = subprocess.run(
        [
            str(engine_env.python("vllm")),
            str(Path(__file__).with_name("in_process_cases.py")),
            str(tmp_path),
            "collective",
        ],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "6 cases passed" in result.stdout
