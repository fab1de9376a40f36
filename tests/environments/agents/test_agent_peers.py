"""Environments of other systems, unchanged: `verifiers` (taskset, harness and reward) and OpenEnv (server and client).

Each package is installed into an environment of its own, below $TURNWISE_ENGINES (default: ~/.cache/turnwise/engines), because
both need many other packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_agent_clients import held, relations

from support.conversations import Says, spoken
from turnwise.environments.agents import Program

PEERS = Path(__file__).parents[2] / "support" / "peers"
ENVIRONMENTS = Path(os.environ.get("TURNWISE_ENGINES", "~/.cache/turnwise/engines")).expanduser()

pytestmark = pytest.mark.slow


def interpreter(name: str, requirement: str, module: str) -> str:
    """The Python of a package's environment, which is made if it does not exist. Skips the test if it cannot be made."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not python.exists():
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "-q", requirement],
        ):
            made = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            if made.returncode:
                pytest.skip(f"{requirement} cannot be installed: {made.stderr[-500:]}")
    found = subprocess.run(
        [str(python), "-c", f"import {module}"], capture_output=True, text=True, timeout=120, check=False
    )
    if found.returncode:
        pytest.skip(f"{folder} has no {module}: {found.stderr[-500:]}; remove it, so that it is made again")
    return str(python)


def test_an_environment_of_verifiers_runs_unchanged() -> None:
    python = interpreter("verifiers", "verifiers==0.4.0", "verifiers.v1")
    make = Program(command=[python, str(PEERS / "verifiers_agent.py")], reward="json")
    trajectory = held(Says("It is 6.", "It is 5."), make)
    assert trajectory.error is None, trajectory.error
    assert (trajectory.turns[1].reward, relations(trajectory)) == (1.0, (1, 0, 0))  # the reward function of the taskset
    (segment,) = trajectory.segments
    assert [text for turn, text in spoken(segment) if turn >= 0] == ["It is 6.<|im_end|>", "It is 5.<|im_end|>"]
    assert [message["content"] for message in trajectory.messages] == ["2 and 3?", "It is 6.", "Sure?", "It is 5."]
    wrong = held(
        Says("It is 5.", "It is 6."), Program(command=[python, str(PEERS / "verifiers_agent.py")], reward="json")
    )
    assert (wrong.error, wrong.turns[1].reward) == (None, 0.0)


def test_an_environment_of_openenv_runs_by_its_client() -> None:
    python = interpreter("openenv", "openenv-core==0.3.0", "openenv.core")
    make = Program(command=[python, str(PEERS / "openenv_agent.py")], reward="json")
    trajectory = held(Says("5", "8", "7"), make)
    assert trajectory.error is None, trajectory.error
    assert [message["content"] for message in trajectory.messages] == [
        "A number below 10?", "5", "Higher.", "8", "Lower.", "7",
    ]  # fmt: skip
    assert (trajectory.turns[2].reward, relations(trajectory), len(trajectory.segments)) == (1.0, (2, 0, 0), 1)
