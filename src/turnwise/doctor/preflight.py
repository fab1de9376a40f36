"""The checks at the start of each run: whether the chat template works with the recipe. They need no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.renderer import Renderer
from turnwise.chat.template_arguments import argument_text, refuse_unread_arguments
from turnwise.config.schema import Config
from turnwise.doctor.messages import contents, headers
from turnwise.doctor.template import continuing, stops_note, thinking
from turnwise.errors import DataError, TemplateError
from turnwise.types import Row

__all__ = ["argument_sets", "preflight", "preflight_rows", "unread_columns"]

_READ_NO_COLUMN = (
    "turnwise.environments.environment:SingleTurn",
    "turnwise.environments.users:ScriptedUser",
)
_CHECKED_SETS = 16
"""Sets of template arguments in the rows for which all checks are made. Of further ones only the names are checked."""


def preflight(config: Config, renderer: Renderer, *, tools: bool = False) -> list[str]:
    """Notes on the model's template, to be printed before the run.

    `tools` is true if there are tools that the recipe does not name, for example in the rows.
    Raises TemplateError if the format of tool calls cannot be parsed, the template requires tools and there are none, or
    the option `thinking` has no effect.
    """
    tools = tools or bool(config.tools) or config.mcp.servers is not None
    if tools:
        _ = renderer.turn_parser.tool_format
    elif renderer.profile.messages.requires_tools:
        raise TemplateError(
            f"the chat template of {renderer.where} refuses conversations without tools, and the recipe has no tools: set "
            f"tools, or use another chat template"
        )
    policy = thinking(renderer, config.thinking)
    if policy.status == "fail":
        raise TemplateError(policy.text)
    notes = [
        f"{check.name}: {check.text}" for check in (headers(renderer), contents(renderer)) if check.status == "fail"
    ]
    notes += [f"stop tokens: {problem}"] if (problem := stops_note(renderer)) else []
    if config.limits.turns == 1:
        return notes  # no message follows the model's turn, so the checks below do not apply
    kinds = ["tool turns", "user turns"] if tools else ["user turns"]
    checks = [policy, *continuing(renderer, kinds)]
    return notes + [f"{check.name}: {check.text}" for check in checks if check.status != "ok"]


def preflight_rows(config: Config, renderer: Renderer, rows: Sequence[Row], *, tools: bool = False) -> list[str]:
    """Notes on the template under the rows' own arguments (`chat_template_kwargs`), which `preflight` has not said already.

    Raises DataError that names the first row with the arguments that the template never reads, or under which it cannot be used.
    """
    known: set[str] | None = None
    notes: list[str] = []
    for number, (text, (row, count)) in enumerate(argument_sets(rows).items()):
        try:
            if number >= _CHECKED_SETS:
                refuse_unread_arguments(row.chat_template_kwargs, renderer.template.source, renderer.where)
                continue
            found = preflight(config, renderer.for_arguments(row.chat_template_kwargs), tools=tools)
        except TemplateError as error:
            raise DataError(f"row {row.id!r}: {error}") from error
        if known is None:
            known = set(preflight(config, renderer, tools=tools))
        named = f"{count:,} row{'s' if count > 1 else ''} with chat_template_kwargs={text}"
        notes += [f"{named}: {note}" for note in found if note not in known]
    return notes


def unread_columns(config: Config, rows: Sequence[Row]) -> list[str]:
    """Notes on columns by which verl chooses who leads a conversation, and which the recipe's environment does not read.

    Only for the environments of turnwise that read no column; an environment of a user may read any.
    """
    if config.environment.use not in _READ_NO_COLUMN:
        return []
    tools = bool(config.tools) or config.mcp.servers is not None
    agents = Counter(str(row.fields["agent_name"]) for row in rows if row.fields.get("agent_name") is not None)
    honoured = "tool_agent" if tools else "single_turn_agent"
    fix = "environment.use=turnwise.compat.verl:Conversations reads the column"
    notes = [
        f"{count:,} row{'s' if count > 1 else ''} with agent_name={name!r}: the environment does not read this column, and all "
        f"conversations have {'the tools of the recipe' if tools else 'one turn without tools'}. {fix}, or remove it"
        for name, count in agents.items()
        if name != honoured and (tools or name != "tool_agent")
    ]
    if count := sum(bool(_interaction_kwargs(row)) for row in rows):
        notes.append(
            f"{count:,} row{'s' if count > 1 else ''} with interaction_kwargs: the environment does not read them, and no "
            f"interaction answers the model. {fix} (arguments.interactions is verl's file), or remove it"
        )
    return notes


def _interaction_kwargs(row: Row) -> Mapping[str, Any]:
    """verl's keywords for the interaction, in `extra_info` or as a column, without nulls."""
    info = row.fields.get("extra_info")
    found = info.get("interaction_kwargs") if isinstance(info, Mapping) else None
    found = row.fields.get("interaction_kwargs") if found is None else found
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, Mapping) else {}


def argument_sets(rows: Sequence[Row]) -> Mapping[str, tuple[Row, int]]:
    """For each set of template arguments that occurs in the rows, as text: the first row that has it, and the number of rows."""
    sets: dict[str, tuple[Row, int]] = {}
    for row in rows:
        if row.chat_template_kwargs:
            text = argument_text(row.chat_template_kwargs)
            first, count = sets.get(text, (row, 0))
            sets[text] = (first, count + 1)
    return sets
