"""Write the two reports of docs/doctor.md: one of a good model, one of a model with many defects.

The defective model is the demo's model with another template and another generation config.

python scripts/doctor_page.py            # rewrite the page
python scripts/doctor_page.py --check    # exit 1 if it is out of date; rounding differences are ignored
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from generated_page import replace_block, write_or_check
from rich.console import Console

from turnwise.config.recipe import load
from turnwise.doctor.check import show
from turnwise.doctor.examine import examine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "doctor.md"
MODEL, RECIPE = ROOT / "demo" / "model", ROOT / "recipes" / "calculator.yaml"
END = "<!-- end of report -->"
OVERRIDES = ["thinking=branch", "loss.clip_high=0.3", "data.max_rows=64"]
"""Options of the defective recipe, besides those of the demo."""


def spoil(path: Path) -> Path:
    """Copy the demo's model to `path`, with defects in its template and its generation config."""
    shutil.copytree(MODEL, path)
    template = path / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    grown = text.replace("message.role + '\\n'", "message.role + (' again' if messages | length > 4 else '') + '\\n'")
    grown = grown.replace("<tool_call>", "CALL").replace("</tool_call>", "END")
    if grown.count("again") != 1 or "<tool_call>" in grown:
        raise SystemExit("the demo's template has changed: spoil it in another way")
    template.write_text(grown, encoding="utf-8")
    config = path / "generation_config.json"
    said = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**said, "eos_token_id": 0}), encoding="utf-8")
    return path


def report(model: Path, overrides: list[str] | None) -> str:
    """The output of `turnwise doctor`. `overrides=None`: without a recipe."""
    config = None
    if overrides is not None:
        files = [
            f"data.{name}={ROOT / 'demo' / file}"
            for name, file in (("train", "train.jsonl"), ("eval", "heldout.jsonl"))
        ]
        config, _ = load(RECIPE, [f"model.path={model}", *files, *overrides])
    out = io.StringIO()
    show(examine(str(model), config, weights="auto" if overrides is None else "never"), Console(file=out, width=120))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def pages() -> dict[str, str]:
    """The reports, by the marker on the page that they follow."""
    with tempfile.TemporaryDirectory() as place:
        bad = spoil(Path(place) / "bad")
        return {
            "<!-- good: made by scripts/doctor_page.py -->": report(MODEL, None).replace(str(MODEL), "demo/model"),
            "<!-- bad: made by scripts/doctor_page.py -->": report(bad, OVERRIDES).replace(str(bad), "bad"),
        }


def comparable(text: str) -> str:
    """The text without everything that depends on rounding: the sizes of differences, and the sampled tokens."""
    return re.sub(r"\d\.\de-\d+|\d+ tokens of 6 conversations", "~", text)


def main() -> int:
    """Rewrite or check the page."""
    fresh = PAGE.read_text(encoding="utf-8")
    for mark, text in pages().items():
        fresh = replace_block(fresh, mark, END, f"\n\n```text\n{text}\n```\n\n")
    return write_or_check(PAGE, fresh, comparable=comparable)


if __name__ == "__main__":
    sys.exit(main())
