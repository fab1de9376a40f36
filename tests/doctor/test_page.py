"""docs/doctor.md shows what the doctor says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_reports_in_the_documentation_are_those_of_the_doctor() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "doctor_page.py"))
    page, comparable = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"), script["comparable"]
    for mark, text in script["pages"]().items():
        assert comparable(f"{mark}\n\n```text\n{text}\n```\n") in comparable(page)
        # 25 lines and the 7 of the template profile: a report fits on a screen
        assert len([line for line in text.splitlines() if line]) <= 32
