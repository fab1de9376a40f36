"""Write the table of docs/templates.md: real chat templates, rendered turn by turn and in one pass.

python scripts/template_table.py            # rewrite the file
python scripts/template_table.py --check    # exit 1 if it is out of date

The templates come from the wheel of trl (`pip install trl==1.16.0`; nothing of it is imported) and from ../shared/templates, if
that folder exists. Each template gets a byte-level BPE tokenizer with the special tokens of its model family.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import replace_block, write_or_check

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.families import SHARED, family_renderer, template_files  # noqa: E402
from turnwise.chat.renderer import Renderer  # noqa: E402
from turnwise.doctor.template import SCENARIOS, Finding, check_scenario  # noqa: E402
from turnwise.errors import TemplateError  # noqa: E402

PAGE = ROOT / "docs" / "templates.md"
BEGIN, END = "<!-- table: made by scripts/template_table.py -->", "<!-- end of table -->"
SHORT = {
    "tool as user": "tool→user",
    "system as user": "system→user",
    "neighbours as one message": "joined",
}


class Notes:
    """Footnotes without duplicates."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The number of a note."""
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    def lines(self) -> Iterator[str]:
        """The notes, in order."""
        for text, number in self._numbers.items():
            yield f"{number}. {text}"


def table() -> str:
    """The table and its notes as Markdown."""
    notes = Notes()
    names = [scenario.name for scenario in SCENARIOS]
    rows = [
        "| template | calls | " + " | ".join(names) + " | leaves reasoning out at |",
        "|" + "---|" * (len(names) + 3),
    ]
    for path in template_files():
        renderer = family_renderer(path)
        cells = [_cell(check_scenario(renderer, scenario), notes) for scenario in SCENARIOS]
        rows.append(
            f"| {path.stem} | {_calls(renderer)} | "
            + " | ".join(cells)
            + f" | {', '.join(renderer.profile.kept_reasoning.stripped_before) or '–'} |"
        )
    return "\n".join([*rows, "", *notes.lines()])


def _calls(renderer: Renderer) -> str:
    try:
        return renderer.turn_parser.tool_format.name
    except TemplateError:
        return "–"


def _cell(found: Finding, notes: Notes) -> str:
    handed = ", ".join(SHORT.get(one, one) for one in found.adaptations)
    if found.refused:
        return f"≠ {notes.mark(_tidy(found.refused))}"
    if found.differs:
        return f"≠ {notes.mark(_tidy(found.differs))}"
    return f"= ({handed})" if handed else "="


def _tidy(text: str) -> str:
    """The text in one line, without the probe words, which differ between scenarios."""
    text = text.partition(" and writes the turn without it")[0] if text.startswith("opens reasoning") else text
    text = text.partition(": expected ")[0]
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def main() -> int:
    """Rewrite or check the page. Without the templates that it was made with, it is not checked."""
    if "--check" in sys.argv and not SHARED.is_dir():
        print(f"{PAGE} was made with templates that are not here; it is not checked", file=sys.stderr)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, replace_block(page, BEGIN, END, f"\n{table()}\n"))


if __name__ == "__main__":
    sys.exit(main())
