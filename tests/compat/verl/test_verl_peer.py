"""verl's own tests of interactions, registries and base tools, unchanged, on our classes.

`TURNWISE_VERL=/path/to/verl pytest tests/compat/verl/test_verl_peer.py`; the path is a checkout of any version that has them
(v0.4 to v0.7). They need omegaconf.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("TURNWISE_VERL")
TESTS = Path(__file__).parents[2]

LAST_USER = {
    "test_generate_response_correct_answer_with_prefix",
    "test_generate_response_correct_answer_without_prefix",
    "test_generate_response_incorrect_answer",
    "test_generate_response_multiple_messages",
    "test_generate_response_no_user_message",
    "test_calculate_score_direct_call",
    "test_calculate_score_with_kwargs",
    "test_edge_case_empty_messages",
    "test_edge_case_message_without_content",
}
"""Of v0.4 and v0.5, whose GSM8K interaction grades the last message of the user: a mistake that v0.6 corrected, and ours with
`last_user: true`."""


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="TURNWISE_VERL names no checkout of verl")
@pytest.mark.skipif(find_spec("omegaconf") is None, reason="verl's tests need omegaconf")
def test_verl_s_own_tests_pass(tmp_path: Path) -> None:
    assert CHECKOUT is not None
    folders = [name for name in ("interactions", "tools") if (Path(CHECKOUT) / "tests" / name).is_dir()]
    assert folders, f"{CHECKOUT} has neither tests/interactions nor tests/tools"
    for name in folders:  # away from the checkout, whose own modules would stand in the working directory
        shutil.copytree(Path(CHECKOUT) / "tests" / name, tmp_path / "tests" / name)
    command = [sys.executable, "-m", "pytest", "-p", "support.verl_peer", "-q", "-rf", "-W", "ignore", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    failed = set(re.findall(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE))
    assert re.search(r"^\d+ passed|, \d+ passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "error" not in done.stdout.splitlines()[-1], done.stdout
    assert failed <= LAST_USER, done.stdout
