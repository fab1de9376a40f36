"""docs/doctor.md shows what the doctor says."""

from __future__ import annotations

from pathlib import Path

import pytest
from generated_pages import comparable, doctor_reports

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_reports_in_the_documentation_are_those_of_the_doctor() -> None:
    page = comparable((ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"))
    for name, text in doctor_reports().items():
        block = f"<!-- {name}: made by scripts/generated_pages.py -->\n\n```text\n{text}\n```\n"
        assert comparable(block) in page
        # 26 lines and the 7 of the template profile: a report fits on a screen
        assert len([line for line in text.splitlines() if line]) <= 33
