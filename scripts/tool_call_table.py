"""Write the tables of docs/tool_calls.md: how each tool-call format, and the parser of transformers, reads difficult turns.

python scripts/tool_call_table.py            # rewrite the page
python scripts/tool_call_table.py --check    # exit 1 if it is out of date

The comparison uses the response templates of TRL. They are parsed from its source file; TRL is not imported. If TRL is not
installed, the comparison on the page stays unchanged.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from generated_page import replace_block, write_or_check

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.tool_calls import FAMILIES, TOOLS, Case, Family, cases, outcome  # noqa: E402
from turnwise.errors import Failed, boundary  # noqa: E402

PAGE = ROOT / "docs" / "tool_calls.md"
TORTURE = ("<!-- torture: made by scripts/tool_call_table.py -->", "<!-- end of torture -->")
LIBRARY = ("<!-- library: made by scripts/tool_call_table.py -->", "<!-- end of library -->")
TEMPLATES = {
    "hermes": "qwen3_template",
    "qwen3_coder": "qwen3_5_template",
    "glm": "glm4moe_template",
    "harmony, as the template": "gptoss_template",
    "gemma4": "gemma4_template",
    "lfm2": "lfm2_2_5_template",
    "llama3": "llama3_template",
}
"""The response template of TRL for each family."""
CLOSED = {"llama3": "<|eot_id|>"}
"""Text that a response template requires at the end of a turn."""
COLUMNS = {
    "closing mark in a value": "closing mark in a value",
    "unclosed at the end": "unclosed",
    "cut in its arguments": "cut",
    "only thought of": "in reasoning",
    "bad, then good": "bad, good",
    "good, then bad": "good, bad",
    "arguments in a string": "in a string",
    "missing arguments": "missing",
    "single quotes": "single quotes",
    "list of calls": "list",
    "NaN": "NaN",
    "nested arguments": "nested",
    "marks in a value": "marks in a value",
}
"""The cases, and their column titles."""


def torture_table() -> str:
    """The result of each format for each case, in the order of the calls: `read`, or `error` for a malformed call."""
    return _table({family.title: {case.name: _shown(family, case) for case in cases(family)} for family in FAMILIES})


def library_table(templates: dict[str, Any]) -> str:
    """The result of transformers for the same turns."""
    found: dict[str, dict[str, str]] = {}
    for family in FAMILIES:
        if family.title in TEMPLATES:
            spec = templates[TEMPLATES[family.title]]
            found[family.title] = {case.name: _compared(spec, family, case) for case in cases(family)}
    return _table(found)


def _table(cells: dict[str, dict[str, str]]) -> str:
    head = f"| | {' | '.join(COLUMNS.values())} |"
    rows = [f"| {title} | {' | '.join(row.get(case, '–') for case in COLUMNS)} |" for title, row in cells.items()]
    return "\n".join([head, "|---" * (len(COLUMNS) + 1) + "|", *rows])


def _shown(family: Family, case: Case) -> str:
    found = outcome(family.read(case.text, TOOLS))
    if found != case.expected:
        return "**wrong**"
    return " ".join("error" if call is None else "read" for call in found) or "none"


def _compared(spec: Any, family: Family, case: Case) -> str:
    from transformers.utils.chat_parsing import parse_response

    text = case.text + CLOSED.get(family.format, "")
    good = [call for call in case.expected if call is not None]
    try:
        with boundary("tokens"):
            message = parse_response(text, spec, prefix="", tools=TOOLS)
    except Failed:
        return f"raises, {len(good)} lost" if good else "raises"
    functions = [call.get("function", call) for call in message.get("tool_calls", [])]
    functions = [function if isinstance(function, dict) else {} for function in functions]
    calls = [(function.get("name"), _object(function.get("arguments") or {})) for function in functions]
    if calls == good and len(good) == len(case.expected):
        return "same"
    lost = sum(call not in calls for call in good)
    return f"{lost} lost" if lost and all(call in good for call in calls) else "wrong"


def _object(arguments: Any) -> Any:
    """The arguments; a string is parsed as JSON, as the caller of a parser may do."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def response_templates() -> dict[str, Any] | None:
    """The response templates in the source file of TRL; None if TRL is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse((Path(spec.origin).parent / "chat_template_utils.py").read_text(encoding="utf-8"))
    wanted: list[ast.stmt] = []
    for node in tree.body:
        names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
        if isinstance(node, ast.Assign | ast.For) and any(
            (name.endswith("_template") and not name.endswith("_chat_template")) or name.startswith(("_LFM2", "_XML"))
            for name in names
        ):
            wanted.append(node)
    space: dict[str, Any] = {"_SUPPORTS_PARSE_RESPONSE_TOOLS": True}
    exec(compile(ast.Module(body=wanted, type_ignores=[]), "trl", "exec"), space)
    return space


def main() -> int:
    """Rewrite or check the page."""
    fresh = replace_block(PAGE.read_text(encoding="utf-8"), *TORTURE, f"\n\n{torture_table()}\n\n")
    templates = response_templates()
    if templates is not None:
        fresh = replace_block(fresh, *LIBRARY, f"\n\n{library_table(templates)}\n\n")
    return write_or_check(PAGE, fresh)


if __name__ == "__main__":
    sys.exit(main())
