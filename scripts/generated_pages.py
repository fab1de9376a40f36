"""Write what pages of docs/ take from the code: tables of options, metrics, formats, templates and estimators, and examples.

python scripts/generated_pages.py                     # rewrite all pages
python scripts/generated_pages.py recipes metrics     # rewrite these pages of docs/
python scripts/generated_pages.py --check             # exit 1 if a page is out of date

A block of a page stands between `<!-- NAME: made by scripts/generated_pages.py -->` and the next `<!-- end of ... -->`.
Two blocks need what a clone does not have, and stay as they are without it: the table of templates (the wheel of TRL, of which
nothing is imported, and ../shared/templates) and the comparison of tool-call formats with transformers (the source file of TRL).
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib.util
import inspect
import io
import itertools
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import numpy as np
import yaml
from credit_toy import SEVERAL_STATES, Estimator, expected_gradient, large_group_gradient, stopping
from pydantic.fields import FieldInfo
from rich.console import Console

from turnwise.config.resume_rules import RULES
from turnwise.errors import Failed, TemplateError, boundary
from turnwise.options.algorithm import (
    BilevelGae,
    CriticCredit,
    Gae,
    Gigpo,
    Grpo,
    Igpo,
    Kevin,
    MtGrpo,
    Shared,
    Spo,
    TurnGae,
    TurnReturn,
)
from turnwise.options.schema import Config
from turnwise.options.section import Section, Use, name_of, named_sections
from turnwise.record.metric_names import METRICS, Metric
from turnwise.rewards.credit import critic, outcome, turns
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, custom
from turnwise.types import Row, Sampling, Trajectory, Turn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # templates and difficult turns are those of the tests

if TYPE_CHECKING:
    from support.tool_calls import Case, Family
    from turnwise.chat.renderer import Renderer
    from turnwise.doctor.template import Finding

DOCS, MODEL = ROOT / "docs", ROOT / "demo" / "model"


def replace_block(page: str, name: str, body: str, *, by: str = "generated_pages.py") -> str:
    """The page with `body` in the block of this name, which the script `by` makes. Raises SystemExit without the markers of the
    block."""
    begin = f"<!-- {name}: made by scripts/{by} -->"
    found = re.search(rf"{re.escape(begin)}.*?(?=<!-- end of )", page, re.DOTALL)
    if found is None:
        raise SystemExit(
            f"the page has no block from {begin!r} to '<!-- end of ... -->': put both markers where it belongs"
        )
    return f"{page[: found.start()]}{begin}\n\n{body}\n\n{page[found.end() :]}"


# Options


LONG = 3
"""A description of more words than these is not repeated."""
LIST = 3
"""So many options of the same names have a list of their own."""
MOST_USED = [
    "model.path",
    "model.lora.rank",
    "model.gradient_checkpointing",
    "data.train",
    "data.eval",
    "data.max_rows",
    "environment",
    "tools",
    "reward.trajectory",
    "limits.turns",
    "limits.tokens_per_turn",
    "limits.context",
    "sampling.temperature",
    "engine.name",
    "train.steps",
    "train.epochs",
    "train.batch_size",
    "train.group_size",
    "train.lr",
    "train.warmup_steps",
    "train.micro_batch_tokens",
    "credit.name",
    "loss.name",
    "eval.every",
    "eval.max_rows",
    "checkpoint.every",
    "loggers",
    "output",
    "seed",
    "resume",
    "replace",
    "cluster.launcher",
]
"""The options of the first table, in its order. They have no other row."""
MARKS: dict[str, str] = {"free": "", "named": "†", "new": "†", "rows": "§", "fixed": "‡"}
"""What follows the name of an option that may not change freely at a resume. The page explains the marks."""


@dataclass(frozen=True, slots=True)
class OptionRow:
    """An option of the tables. `like`: the option of an earlier section that has the same description."""

    option: str
    default: str
    what: str
    like: str | None = None

    @property
    def cell(self) -> str:
        return _cell(self.option, self.default)


def describe_options(of: type[Section] = Section) -> None:
    """Give the fields of all sections the descriptions that stand below them; a section has those of its base classes."""
    for cls in of.__subclasses__():
        for base in (one for one in cls.__mro__ if one is not Section and issubclass(one, Section)):
            for name, text in _texts_below(base).items():
                field = cls.model_fields[name]
                field.description = field.description or text
        describe_options(cls)


@cache
def _texts_below(cls: type[Section]) -> dict[str, str]:
    """The texts below the fields in the source of a class, by the names of the fields."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(made, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(made.body):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Constant):
            found[field.target.id] = inspect.cleandoc(str(text.value))
    return {name: text for name, text in found.items() if name in cls.model_fields}


def option_table() -> str:
    """The options as Markdown: those that most people set, then the others, with a table for each section of a recipe."""
    describe_options()
    named = named_sections(Config)
    said: dict[tuple[str, str], str] = {}
    fields = Config.model_fields.items()
    top = [(name, field) for name, field in fields if _section(field) is None and name not in named]
    rows = {"": list(_options(top, "", said))}
    for name, field in fields:
        if (section := _section(field)) is not None and name not in named:
            rows[name] = list(_options(section.model_fields.items(), f"{name}.", said))
    first = {row.option: row for section_rows in rows.values() for row in section_rows}
    first |= {f"{key}.name": _choice(key, list(classes.values())) for key, classes in named.items()}
    text = ["### What most people set", "", *_table([first[name] for name in MOST_USED])]
    text += ["", "### At the top", "", *_others(rows[""])]
    for name, field in fields:
        if name in named:
            text += _named(name, list(named[name].values()))
        elif (section := _section(field)) is not None:
            text += ["", f"### {name}", "", _doc(section), "", *_others(rows[name])]
    return "\n".join(text)


def _choice(key: str, classes: Sequence[type[Section]]) -> OptionRow:
    """The row of a section's `name`."""
    default = name_of(type(Config.model_fields[key].default))
    names = ", ".join(f"`{name_of(cls)}`" for cls in classes)
    page = _doc(_base(classes))
    what = page if "(docs/" in page else f"One of: {names} ([{key}](#{key}))."
    return OptionRow(f"{key}.name", f"`{default}`", what)


def _doc(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _base(classes: Sequence[type[Section]]) -> type[Section]:
    return next(base for base in classes[0].__mro__ if all(issubclass(cls, base) for cls in classes[1:]))


def _others(rows: Sequence[OptionRow]) -> Iterator[str]:
    return _table([row for row in rows if row.option not in MOST_USED])


def _table(rows: Sequence[OptionRow]) -> Iterator[str]:
    """A line for each option, one for equal neighbours. What is as in another section stands in a line below them."""
    own = [row for row in rows if row.like is None]
    for (_, what), same in groupby(own, key=lambda row: (row.default, row.what)):
        yield f"- {', '.join(row.cell for row in same)}: {what}"
    like = [row for row in rows if row.like is not None]
    for section, same in groupby(like, key=lambda row: (row.like or "").rpartition(".")[0]):
        yield f"- As in `{section}`: {', '.join(row.cell for row in same)}."


def _named(key: str, classes: Sequence[type[Section]]) -> Iterator[str]:
    """The names of a section, and one table of their options: an option that several names have stands once."""
    yield from ("", f"### {key}", "")
    if "(docs/" not in _doc(_base(classes)):  # which says what each name means
        yield from (f"- `{name_of(cls)}`: {_doc(cls)}" for cls in classes)
        yield ""
    found: dict[tuple[str, str], list[tuple[type[Section], FieldInfo]]] = {}
    for cls in sorted(classes, key=lambda cls: not _has_own_options(cls, classes)):
        for name, field in cls.model_fields.items():
            if name != "name":
                found.setdefault((name, _what(f"{key}.{name}", field)), []).append((cls, field))
    order = list(dict.fromkeys(name for name, _ in found))
    options = sorted(found.items(), key=lambda item: (len(item[1]) < len(classes), order.index(item[0][0])))
    of_names = {option: _names(of, classes) for option, of in options}
    lists = [names for names, count in Counter(of_names.values()).items() if names and count >= LIST]
    for (name, what), of in options:
        if (names := of_names[name, what]) not in lists:
            yield f"- {_cell(f'{key}.{name}', _defaults(of), names)}: {what}"
    for names in lists:
        yield from ("", f"Options{names}:", "")
        for (name, what), of in options:
            if of_names[name, what] == names:
                yield f"- {_cell(f'{key}.{name}', _defaults(of))}: {what}"


def _names(of: Sequence[tuple[type[Section], FieldInfo]], classes: Sequence[type[Section]]) -> str:
    """Of which names an option is, unless of all."""
    return "" if len(of) == len(classes) else f" of {', '.join(f'`{name_of(cls)}`' for cls, _ in of)}"


def _cell(option: str, default: str, names: str = "") -> str:
    """An option with its mark and its default, as on the command line; null is not said. `names`: of which names it is."""
    if default == "`null`":
        return f"`{option}`{_mark(option)}{names}"
    if default.startswith("`") and default.count("`") == 2:
        return f"`{option}={default[1:]}{_mark(option)}{names}"
    return f"`{option}`{_mark(option)}{names} ({default})"


def _has_own_options(cls: type[Section], classes: Sequence[type[Section]]) -> bool:
    return any(set(cls.model_fields) > set(other.model_fields) for other in classes)


def _defaults(of: Sequence[tuple[type[Section], FieldInfo]]) -> str:
    """The default that most names have, and those of the others."""
    said = [(name_of(cls), _default(field)) for cls, field in of]
    usual = Counter(default for _, default in said).most_common(1)[0][0]
    return "; ".join([usual, *(f"`{name}`: {default}" for name, default in said if default != usual)])


def _options(fields: Any, prefix: str, said: dict[tuple[str, str], str]) -> Iterator[OptionRow]:
    """A row for each option, also for those of a section inside a section (`model.lora.rank`) and of the items of a list
    (`policies[].path`). `said` has the option by its last name and its description, for those that repeat it."""
    items: list[type[Section]] = []
    for name, field in fields:
        inner = _section(field)
        if inner is not None:
            yield from _options(inner.model_fields.items(), f"{prefix}{name}.", said)
            continue
        option = f"{prefix}{name}"
        what = _what(option, field)
        before = said.setdefault((name, what), option)
        like = before if before != option and len(what.split()) > LONG else None
        yield OptionRow(option, _default(field), what, like)
        for item, suffix in _items(field):
            if item not in items:
                items.append(item)
                own = [(key, value) for key, value in item.model_fields.items() if key not in Use.model_fields]
                yield from _options(own, f"{option}{suffix}.", said)


def _items(field: FieldInfo) -> Iterator[tuple[type[Section], str]]:
    """The class of a list's items, or of a reference, whose own options have rows."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, Use):
        yield field.annotation, ""
    elif get_origin(field.annotation) in (tuple, list):
        for cls in get_args(field.annotation):
            if isinstance(cls, type) and issubclass(cls, Section):
                yield cls, "[]"


def _what(option: str, field: FieldInfo) -> str:
    """The description, and the choices that it does not name."""
    what = " ".join((field.description or "").split())
    choices = [choice for choice in _choices(field.annotation) if choice != field.default]  # the default is said
    missing = [choice for choice in choices if f"`{choice}`" not in what]
    what = f"{what} One of: {', '.join(f'`{choice}`' for choice in _choices(field.annotation))}." if missing else what
    if not what.strip():
        raise SystemExit(
            f"scripts/generated_pages.py: the option {option} has no description: write it below the field"
        )
    return what.strip()


def _mark(key: str) -> str:
    """What a resume allows. For a list of references: whether the referenced objects may change."""
    rules = [rule for option, rule in RULES.items() if option == key or option.startswith((f"{key}[].", f"{key}."))]
    if not rules:
        raise SystemExit(f"scripts/generated_pages.py: the option {key} has no rule: add it to config/resume_rules.py")
    return MARKS[rules[0]]


def _choices(annotation: Any) -> Sequence[str]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


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


# Metrics


def metric_table() -> str:
    """The metrics of `turnwise.record.metric_names`, a list for each set of commands that write them."""
    tables: list[str] = []
    for lines in dict.fromkeys(one.lines for one in sorted(METRICS, key=lambda one: one.lines != METRIC_LINES)):
        tables += [f"**In {lines}**", ""]
        tables += [f"- `{one.name}`{_of(one)}: {one.meaning}" for one in METRICS if one.lines == lines]
        tables.append("")
    return "\n".join(tables).rstrip()


METRIC_LINES = "train, eval, rollout"
"""The table of most metrics of conversations comes first."""
SAID_BY_THE_NAME = (
    "seconds",
    "steps",
    "passes",
    "tokens",
    "turns",
    "calls",
    "segments",
    "reward",
    "ratio",
    "any",
    "count",
    "",
)


OF_THE_UPDATE = ("correction/", "ratio/", "selection/", "teacher/", "kl")
"""The page says of these that they are over trained tokens."""


def _of(metric: Metric) -> str:
    """The unit, where its name does not say it, and what the metric is a mean over, if not over finished conversations."""
    of_the_update = metric.over == "trained tokens" and metric.name.startswith(OF_THE_UPDATE)
    of_conversations = metric.over == "finished conversations" and metric.unit != "share"
    over = "" if of_the_update or of_conversations or metric.over == "optimizer steps" else metric.over
    unit = "" if metric.unit in SAID_BY_THE_NAME else metric.unit
    said = " of ".join(part for part in (unit, over) if part)
    return f" ({said})" if said else ""


# Loss masks

QUESTION, FURTHER = "What is 3*4?", "And 12+1?"
ANSWERS = [
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>',
    "The answer is 12.",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+1"}}\n</tool_call>',
    "The answer is 13.",
]


def calls_count_half(turn: Turn) -> float:
    """The example function of the page."""
    return 0.5 if turn.calls else 1.0


def mask_view() -> str:
    """The tokens of a real rollout, with the demo's tokenizer, template and calculator and the scripted engine: neighbours of one
    turn together, with their number, turn, weight with each loss mask, and text."""
    from turnwise.chat.renderer import Renderer

    renderer = Renderer.from_pretrained(MODEL)
    return "\n".join(line.rstrip() for line in _tokens(renderer, _conversation(renderer)))


def _conversation(renderer: Renderer) -> Trajectory:
    """A rollout with two questions, each with a tool call and an answer."""
    from turnwise.engines.scripted import ScriptedEngine
    from turnwise.environments.calculator import calculator
    from turnwise.environments.tools.toolbox import Tool, Tools
    from turnwise.environments.users import ScriptedUser
    from turnwise.rollout.context import Limits, RolloutContext
    from turnwise.rollout.rollout import new_group, rollout_group

    context = RolloutContext(
        engine=ScriptedEngine([ANSWERS], encode=renderer.encode, stop_token_id=renderer.stop_token_ids[0]),
        renderer=renderer,
        make_environment=lambda: Tools([Tool.of(calculator)], then=ScriptedUser([FURTHER])),
        sampling=Sampling(),
        limits=Limits(turns=8, tokens_per_turn=256),
    )
    group = new_group(Row(id="1", messages=[{"role": "user", "content": QUESTION}]), size=1, seed=0)
    (trajectory,) = asyncio.run(rollout_group(group, context)).trajectories
    if trajectory.failed or len(trajectory.turns) != len(ANSWERS):
        raise SystemExit(f"unexpected conversation: {trajectory.error}, {trajectory.assistant_texts}")
    return trajectory


def _tokens(renderer: Renderer, trajectory: Trajectory) -> Iterator[str]:
    rules = {**TURN_WEIGHTINGS, "calls_count_half": custom(calls_count_half, name="calls_count_half")}
    weights: dict[str, list[float]] = {}
    for name, rule in rules.items():
        rule(trajectory)
        weights[name] = [turn.weight for turn in trajectory.turns]
    (segment,) = trajectory.segments
    yield f"{'tokens':>6}  {'turn':>4}  " + "".join(f"{name:>{len(name) + 2}}" for name in rules)
    for turn, ids in groupby(zip(segment.token_ids, segment.turn, strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in ids]
        cells = "".join(f"{weights[name][turn]:>{len(name) + 2}g}" for name in rules) if turn >= 0 else ""
        yield f"{len(tokens):>6}  {turn if turn >= 0 else '-':>4}  {cells}"
        yield f"        {_shortened(renderer.decode(tokens))!r}"


def _shortened(text: str, most: int = 110) -> str:
    """The text, or its end."""
    return text if len(text) <= most else f"... {text[-most:]}"


# Tool-call formats

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
    from support.tool_calls import FAMILIES, cases

    return _cases({family.title: {case.name: _shown(family, case) for case in cases(family)} for family in FAMILIES})


def library_table(templates: dict[str, Any]) -> str:
    """The result of transformers for the same turns."""
    from support.tool_calls import FAMILIES, cases

    found: dict[str, dict[str, str]] = {}
    for family in FAMILIES:
        if family.title in TEMPLATES:
            spec = templates[TEMPLATES[family.title]]
            found[family.title] = {case.name: _compared(spec, family, case) for case in cases(family)}
    return _cases(found)


def _cases(cells: dict[str, dict[str, str]]) -> str:
    """A row for each case: its usual result, and the formats with other results."""
    rows = ["| the turn | result | other results |", "|---|---|---|"]
    for case, title in COLUMNS.items():
        found: dict[str, list[str]] = {}
        for family, row in cells.items():
            found.setdefault(row.get(case, "–"), []).append(family)
        (usual, _), *others = sorted(found.items(), key=lambda item: -len(item[1]))
        said = "; ".join(f"{result}: {', '.join(families)}" for result, families in others)
        rows.append(f"| {title} | {usual} | {said} |")
    return "\n".join(rows)


def _shown(family: Family, case: Case) -> str:
    from support.tool_calls import TOOLS
    from support.tool_calls import outcome as read_back

    found = read_back(family.read(case.text, TOOLS))
    if found != case.expected:
        return "**wrong**"
    return " ".join("error" if call is None else "read" for call in found) or "none"


def _compared(spec: Any, family: Family, case: Case) -> str:
    from transformers.utils.chat_parsing import parse_response

    from support.tool_calls import TOOLS

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


# Chat templates

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


def template_table() -> str:
    """Real chat templates, rendered turn by turn and in one pass: the table and its notes. Each template gets a byte-level BPE
    tokenizer with the special tokens of its model family."""
    from support.families import family_renderer, template_files
    from turnwise.doctor.template import SCENARIOS, check_scenario

    notes = Notes()
    names = [scenario.name for scenario in SCENARIOS]
    rows: dict[str, list[str]] = {}
    for path in template_files():
        renderer = family_renderer(path)
        cells = [_template_cell(check_scenario(renderer, scenario), notes) for scenario in SCENARIOS]
        stripped = ", ".join(renderer.profile.kept_reasoning.stripped_before) or "–"
        row = f"{_call_format(renderer)} | " + " | ".join(cells) + f" | {stripped} |"
        rows.setdefault(row, []).append(path.stem)
    table = [
        "| template | calls | " + " | ".join(names) + " | leaves reasoning out at |",
        "|" + "---|" * (len(names) + 3),
        *(f"| {', '.join(templates)} | {row}" for row, templates in rows.items()),
    ]
    return "\n".join([*table, "", *notes.lines()])


def _call_format(renderer: Renderer) -> str:
    try:
        return renderer.turn_parser.tool_format.name
    except TemplateError:
        return "–"


def _template_cell(found: Finding, notes: Notes) -> str:
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


# The doctor


SHOWN_CHECKS = ("template ", "headers", "tool turns", "thinking", "stop tokens", "tool calls  ", "mask", "log-probs")
"""The lines of the report that the page shows."""


def doctor_reports() -> dict[str, str]:
    """A part of the output of `turnwise doctor demo/model`, by the name of its block on the page."""
    from turnwise.doctor.check import show
    from turnwise.doctor.examine import examine

    out = io.StringIO()
    show(examine(str(MODEL), None, weights="auto"), Console(file=out, width=120))
    lines = [
        line.rstrip()
        for line in out.getvalue().splitlines()
        if line[6:].startswith(SHOWN_CHECKS) or line[:5] == "ready"
    ]
    text = "\n".join(lines)
    return {"good": text.replace(str(MODEL), "demo/model")}


def comparable(text: str) -> str:
    """The text without everything that depends on rounding: the sizes of differences, and the sampled tokens."""
    return re.sub(r"\d\.\de-\d+|\d+ tokens of 6 conversations", "~", text)


# Estimators

GROUP_SIZE = 4
"""The size of the small groups."""


@dataclass(frozen=True)
class Entry:
    """An estimator with its options, as in a recipe."""

    text: str
    estimator: Estimator
    errors: float = 0.0
    """The error of the critic."""


ESTIMATORS = (
    Entry("`grpo`, `scale: none`", partial(outcome.grpo, options=Grpo(scale="none"))),
    Entry("`grpo`", outcome.grpo),
    Entry("`rloo`, `shared`", outcome.rloo),
    Entry("`shared`, `baseline: none`", partial(turns.shared, options=Shared(baseline="none"))),
    Entry("`turn_return`, `scale: none`", partial(turns.turn_return, options=TurnReturn(scale="none"))),
    Entry("`turn_return`", turns.turn_return),
    Entry(
        "`turn_return`, `gamma: 0.9`, `scale: none`",
        partial(turns.turn_return, options=TurnReturn(gamma=0.9, scale="none")),
    ),
    Entry("`discounted`", turns.discounted),
    Entry("`remax`", outcome.remax),
    Entry("`spo`, `whiten: false`", partial(outcome.spo, options=Spo(whiten=False))),
    Entry("`spo`", outcome.spo),
    Entry("`opo`", outcome.opo),
    Entry("`gpg`", outcome.gpg),
    Entry("`gdpo`", outcome.gdpo),
    Entry("`reinforce_pp`", turns.reinforce_pp),
    Entry("`reinforce_pp_baseline`", outcome.reinforce_pp_baseline),
    Entry("`gae`, `whiten: false`, exact critic", partial(critic.gae, options=Gae(whiten=False))),
    Entry("`gae`, `whiten: false`, wrong critic", partial(critic.gae, options=Gae(whiten=False)), errors=0.5),
    Entry(
        "`gae`, `lam: 1`, `whiten: false`, wrong critic",
        partial(critic.gae, options=Gae(lam=1.0, whiten=False)),
        errors=0.5,
    ),
    Entry("`gae`, exact critic", critic.gae),
    Entry(
        "`turn_gae`, `gamma: 1`, `whiten: false`, exact critic",
        partial(critic.turn_gae, options=TurnGae(gamma=1.0, whiten=False)),
    ),
    Entry(
        "`turn_gae`, `gamma: 1`, `whiten: false`, wrong critic",
        partial(critic.turn_gae, options=TurnGae(gamma=1.0, whiten=False)),
        errors=0.5,
    ),
    Entry("`turn_gae`, exact critic", critic.turn_gae),
    Entry(
        "`critic`, `whiten: false`, wrong critic",
        partial(critic.critic, options=CriticCredit(whiten=False)),
        errors=0.5,
    ),
    Entry("`critic`, wrong critic", critic.critic, errors=0.5),
    Entry("`bilevel_gae`, exact critic", critic.bilevel_gae),
    Entry(
        "`bilevel_gae`, `turn_gamma: 1`, `whiten: false`, exact critic",
        partial(critic.bilevel_gae, options=BilevelGae(turn_gamma=1.0, whiten=False)),
    ),
    Entry("`gigpo`, `gamma: 1`", partial(turns.gigpo, options=Gigpo(gamma=1.0))),
    Entry("`gigpo`", turns.gigpo),
    Entry("`kevin`, `gamma: 1`, `scale: none`", partial(turns.kevin, options=Kevin(gamma=1.0, scale="none"))),
    Entry("`kevin`", turns.kevin),
    Entry("`mt_grpo`, `scale: none`", partial(turns.mt_grpo, options=MtGrpo(scale="none"))),
    Entry("`mt_grpo`", turns.mt_grpo),
    Entry("`igpo`, `scale: none`", partial(turns.igpo, options=Igpo(scale="none"))),
    Entry(
        "`igpo`, `normalise: joint`, `scale: none`", partial(turns.igpo, options=Igpo(normalise="joint", scale="none"))
    ),
    Entry("`igpo`", turns.igpo),
    Entry("`turn_potential`", turns.turn_potential),
)


def credit_table() -> str:
    """The expected gradient of each estimator on the enumerated problems of `credit_toy`."""
    return "\n".join(_estimator_rows())


def verdict(gradient: np.ndarray, true: np.ndarray, *, exact: bool) -> str:
    """`unbiased`, a factor (`×2.81`), or the cosine of the angle to the true gradient and the factor.

    The factor is the length of the part of the gradient in the true direction, divided by the length of the true gradient.
    With `exact`, rounding errors are allowed; otherwise also what remains of the conversation itself in a large group.
    """
    cosine = float(gradient @ true / np.linalg.norm(gradient) / np.linalg.norm(true))
    factor = float(gradient @ true / (true @ true))
    if cosine > 1 - (1e-12 if exact else 1e-6):
        same = abs(factor - 1) < (1e-9 if exact else 1e-3)
        return "unbiased" if same else f"×{factor:.2f}"
    return f"{cosine:.4f}, ×{factor:.2f}"


def _estimator_rows() -> Iterator[str]:
    yield f"| estimator | groups of {GROUP_SIZE} | large group | stopping (true: +0.175) |"
    yield "|---|---|---|---|"
    true = SEVERAL_STATES.true_gradient()
    for entry in ESTIMATORS:
        small = expected_gradient(SEVERAL_STATES, entry.estimator, size=GROUP_SIZE, errors=entry.errors)
        large = large_group_gradient(SEVERAL_STATES, entry.estimator, errors=entry.errors)
        (stop,) = large_group_gradient(stopping(0.5), entry.estimator, errors=entry.errors)
        sign = " **wrong sign**" if stop < 0 else ""
        yield (
            f"| {entry.text} | {verdict(small, true, exact=True)} | {verdict(large, true, exact=False)} | {stop:+.4f}{sign} |"
        )


# Pages


def recipes(page: str) -> str:
    """docs/recipes.md."""
    return replace_block(page, "options", option_table())


def metrics(page: str) -> str:
    """docs/metrics.md."""
    return replace_block(page, "metrics", metric_table())


def loss_masks(page: str) -> str:
    """docs/loss_masks.md."""
    return replace_block(page, "view", f"```text\n{mask_view()}\n```")


def tool_calls(page: str) -> str:
    """benchmarks/README.md: difficult calls."""
    page = replace_block(page, "torture", torture_table())
    templates = response_templates()
    return page if templates is None else replace_block(page, "library", library_table(templates))


def templates(page: str) -> str:
    """benchmarks/README.md: chat templates. Without the templates that the table was made with, it stays as it is."""
    from support.families import SHARED

    if not SHARED.is_dir():
        print(
            "the templates of the table in benchmarks/README.md are not here: it is not checked",
            file=sys.stderr,
        )
        return page
    return replace_block(page, "table", template_table())


def doctor(page: str) -> str:
    """docs/doctor.md."""
    for name, text in doctor_reports().items():
        page = replace_block(page, name, f"```text\n{text}\n```")
    return page


def credit(page: str) -> str:
    """benchmarks/README.md: the gradients of estimators."""
    return replace_block(page, "bias", credit_table())


PAGES: dict[str, Callable[[str], str]] = {
    "recipes": recipes,
    "metrics": metrics,
    "loss_masks": loss_masks,
    "tool_calls": tool_calls,
    "templates": templates,
    "doctor": doctor,
    "credit": credit,
}
"""Page of docs/ -> the function that gives the page with new blocks."""
IN_BENCHMARKS = ("tool_calls", "templates", "credit")
"""Blocks that are measurements: they stand in benchmarks/README.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check pages. Returns the exit status: 1 if a checked page is out of date."""
    parser = argparse.ArgumentParser(description="Write or check what pages of docs/ take from the code.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"default: all pages ({', '.join(PAGES)})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.pages if name not in PAGES]
    if unknown:
        parser.error(f"no page {', '.join(unknown)}: the pages are {', '.join(PAGES)}")
    outdated: list[str] = []
    for name in options.pages or PAGES:
        path = ROOT / "benchmarks" / "README.md" if name in IN_BENCHMARKS else DOCS / f"{name}.md"
        page = path.read_text(encoding="utf-8")
        fresh = PAGES[name](page)
        if not options.check:
            path.write_text(fresh, encoding="utf-8")
        elif comparable(fresh) != comparable(page):
            outdated.append(name)
    if outdated:
        print(f"out of date: python scripts/generated_pages.py {' '.join(outdated)}", file=sys.stderr)
    return int(bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
