"""Write the table of options in docs/recipes.md from the texts in the schema.

python scripts/option_table.py            # rewrite the file
python scripts/option_table.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from generated_page import replace_block, write_or_check
from pydantic.fields import FieldInfo

from turnwise.config.resume_rules import EXPLAINED, RULES
from turnwise.options.schema import Config
from turnwise.options.section import Section, Use, name_of, named_sections, shared_options

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
BEGIN, END = "<!-- options: made by scripts/option_table.py -->", "<!-- end of options -->"


def table() -> str:
    """The options as Markdown, with a section for each section of a recipe."""
    named = named_sections(Config)
    top = [
        (name, field) for name, field in Config.model_fields.items() if _section(field) is None and name not in named
    ]
    sections = ["### At the top", "", *_rows(top, "")]
    for name, field in Config.model_fields.items():
        section = _section(field)
        if name in named:
            sections += _named(name, list(named[name].values()))
        elif section is not None:
            sections += [
                "",
                f"### {name}",
                "",
                section.__doc__ or "",
                "",
                *_rows(section.model_fields.items(), f"{name}."),
            ]
    return "\n".join(sections)


def _named(key: str, classes: Sequence[type[Section]]) -> Iterator[str]:
    """A table for each class of a section that is chosen by name, after the options that all classes share."""
    shared = set[str].intersection(*(shared_options(classes[0], cls) for cls in classes))
    base = next(base for base in classes[0].__mro__ if issubclass(base, Section) and set(base.model_fields) == shared)
    if shared:
        yield from ("", f"### {key}", "", base.__doc__ or "", "", *_rows(base.model_fields.items(), f"{key}."))
    for cls in classes:
        # also a shared option with another default
        fields = [
            (name, field)
            for name, field in cls.model_fields.items()
            if name != "name" and (name not in shared or field.default != base.model_fields[name].default)
        ]
        yield from ("", f"### {key}, `{key}.name: {name_of(cls)}`", "", cls.__doc__ or "")
        if fields:
            yield from ("", *_rows(fields, f"{key}."))


def _rows(fields: Any, prefix: str) -> Iterator[str]:
    yield "| option | default | what | may change on resume |"
    yield "|---|---|---|---|"
    yield from _options(fields, prefix)


def _options(fields: Any, prefix: str) -> Iterator[str]:
    """A row for each option, also for those of a section inside a section (`model.lora.rank`)."""
    for name, field in fields:
        inner = _section(field)
        if inner is not None:
            yield from _options(inner.model_fields.items(), f"{prefix}{name}.")
            continue
        what = " ".join((field.description or "").split()).replace("|", "\\|")
        choices = _choices(field.annotation)
        what = f"{what} One of: {choices}." if choices else what
        if not what.strip():
            raise SystemExit(
                f"scripts/option_table.py: the option {prefix}{name} has no description: write it below the field"
            )
        yield f"| `{prefix}{name}` | {_default(field)} | {what.strip()} | {_resume(f'{prefix}{name}')} |"


def _resume(key: str) -> str:
    """Whether the option may change when a run is resumed. For a list of references: whether the referenced objects may."""
    found = [rule for option, rule in RULES.items() if option == key or option.startswith((f"{key}[].", f"{key}."))]
    return EXPLAINED[found[0]]


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, Use) and not value.arguments:
        value = value.use
    if isinstance(value, Section):
        value = value.model_dump()
    if isinstance(value, tuple):
        value = list(value)
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).replace('...', '').strip()}`"


def _section(field: FieldInfo) -> type[Section] | None:
    annotation = field.annotation
    if not isinstance(annotation, type) or not issubclass(annotation, Section) or issubclass(annotation, Use):
        return None  # a reference is one option, whatever is in it
    return annotation


def main() -> int:
    """Rewrite or check the page."""
    page = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, replace_block(page, BEGIN, END, f"\n\n{table()}\n\n"))


if __name__ == "__main__":
    sys.exit(main())
