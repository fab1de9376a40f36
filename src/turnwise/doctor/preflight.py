"""The checks at the start of each run: whether the chat template works with the recipe. They need no weights.

They are the doctor's own checks (`template_checks`). What fails is refused, unless `override_checks` names the check.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from turnwise import build
from turnwise.chat.media_parts import has_media
from turnwise.chat.renderer import Renderer
from turnwise.chat.row_media import process_row_media
from turnwise.chat.template_arguments import argument_text, refuse_unread_arguments
from turnwise.config.schema import Config
from turnwise.doctor.check import Check, wrong
from turnwise.doctor.conversation import masked
from turnwise.doctor.messages import contents, headers
from turnwise.doctor.template import (
    Directory,
    continuing,
    read_directory,
    round_trip,
    stops,
    stops_note,
    thinking,
    tool_calls,
    tools_shown,
    vocabulary,
)
from turnwise.errors import DataError, TemplateError, TurnwiseError
from turnwise.types import Row

__all__ = ["argument_sets", "openings", "preflight", "preflight_rows", "template_checks", "unread_columns"]

_READ_NO_COLUMN = (
    "turnwise.environments.environment:SingleTurn",
    "turnwise.environments.users:ScriptedUser",
)
_OPENED, _READY = 256, 4
"""Rows whose messages are rendered, and rows whose images are processed."""
_CHECKED_SETS = 16
"""Sets of template arguments in the rows for which all checks are made. Of further ones only the names are checked."""

_KINDS = ("tool turns", "user turns", "system turns")
_NOT_OVERRIDABLE = ("thinking",)
"""Checks of an option of the recipe: it is removed, not overridden."""
_QUIET = ("headers", "contents", "system turns", "tool calls", "stop tokens", "vocabulary", "mask")
"""Checks whose notes are information that the start of a run does not repeat."""


def template_checks(
    renderer: Renderer,
    config: Config | None = None,
    *,
    directory: Directory | None = None,
    tools: bool = False,
    rows: Sequence[Row] = (),
) -> Iterator[Check]:
    """The checks of the template, the tokenizer and, with `directory`, the model's config files, in order.

    `tools`: the conversations offer tools; with a recipe, those of the recipe count too. `rows` are the recipe's rows, as far as
    they are known. A kind of turn that the recipe does not have cannot fail.
    """
    has_tools = tools or (config is not None and (bool(config.tools) or config.mcp.servers is not None))
    known_format = bool(renderer.profile.tool_format_name)
    yield _tried("headers", lambda: headers(renderer))
    yield _tried("contents", lambda: contents(renderer))
    for kind in _KINDS:
        check = _tried(kind, lambda kind=kind: continuing(renderer, [kind])[0])
        yield check if config is None or _occurs(kind, config, has_tools) else _no_failure(check)
    yield _tried("thinking", lambda: thinking(renderer, None if config is None else config.thinking))
    if directory is not None:
        yield _tried("stop tokens", lambda: stops(renderer, directory))
    yield _tried("tool calls", lambda: tool_calls(renderer, wanted=has_tools))
    if has_tools or known_format:
        yield _tried("tools shown", lambda: _shown(renderer, config, has_tools, rows))
    tries_calls = known_format and (has_tools or config is None)
    yield _tried("round trip", lambda: round_trip(renderer, tools=tries_calls))
    if directory is not None:
        yield _tried("vocabulary", lambda: vocabulary(renderer, directory))


def preflight(
    config: Config,
    renderer: Renderer,
    *,
    source: str | None = None,
    tools: bool = False,
    rows: Sequence[Row] = (),
    training: bool = False,
) -> list[str]:
    """Notes on the model's template, to be printed before the run.

    `source` is the model directory; None: the config files are not checked. `tools` is true if there are tools that the recipe
    does not name, for example in the rows. `training`: the checks `mask`, `credit` and `rows` are made too. Raises TemplateError
    if a check fails that `override_checks` does not name, or the template requires tools and there are none.
    """
    has_tools = tools or bool(config.tools) or config.mcp.servers is not None
    if has_tools:
        _ = renderer.turn_parser.tool_format  # without it no conversation can run, so it cannot be overridden
    elif renderer.profile.messages.requires_tools:
        raise TemplateError(
            f"the chat template of {renderer.where} refuses conversations without tools, and the recipe has no tools: set "
            f"tools, or use another chat template"
        )
    directory = None if source is None else read_directory(source, renderer)
    checks = [*template_checks(renderer, config, directory=directory, tools=tools, rows=rows)]
    if training:
        from turnwise.doctor.credit import conserved  # torch

        # conversations run in an event loop of their own, and this thread may have one
        with ThreadPoolExecutor(1) as thread:
            for name, check in (("mask", masked), ("credit", conserved)):
                run = thread.submit(_tried, name, functools.partial(check, renderer, config.thinking))
                checks.append(run.result())
        # processing images takes long, and the run does it for all rows
        images = [row for row in rows if has_media(row.messages)][:_READY]
        texts = [row for row in rows if not has_media(row.messages)][:_OPENED]
        checks.append(_tried("rows", lambda: openings(config, [*images, *texts], renderer)))
    _refuse_failures(config, checks)
    notes = [f"override_checks: {check.name} fails: {check.text}" for check in checks if check.status == "fail"]
    passed = {check.name for check in checks if check.status != "fail"}
    notes += [
        f"override_checks: {name} does not fail, so it need not be named"
        for name in config.override_checks
        if name in passed
    ]
    if directory is None and (problem := stops_note(renderer)):
        notes.append(f"stop tokens: {problem}")
    shown = [check for check in checks if check.status == "note" and check.name not in _QUIET]
    if config.limits.turns == 1:  # no message follows the model's turn
        shown = [check for check in shown if check.name not in (*_KINDS, "thinking")]
    return notes + [f"{check.name}: {check.text}" for check in shown if _matters(check, has_tools)]


def openings(config: Config, rows: Sequence[Row], renderer: Renderer) -> Check:
    """Whether the template accepts the rows' messages, including images.

    Raises ConfigError if data.return_multi_modal_inputs has no effect.
    """
    with_media = [row for row in rows if has_media(row.messages)]
    process_row_media(with_media[:_READY] or rows[:1], renderer.vision, wanted=config.data.return_multi_modal_inputs)
    for row in rows[:_OPENED]:
        if not row.messages:
            continue  # the environment writes the prompt
        try:
            renderer.for_arguments(row.chat_template_kwargs).encode_opening(row.messages)
        except TurnwiseError as error:
            return wrong("rows", DataError(f"row {row.id!r}: {error}"))
    return Check(
        "rows", "ok", f"checked {min(len(rows), _OPENED)} of {len(rows)} rows: the template accepts their messages"
    )


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


def _refuse_failures(config: Config, checks: Sequence[Check]) -> None:
    """Raise TemplateError with all failed checks that `override_checks` does not name."""
    failed = [check for check in checks if check.status == "fail" and check.name not in config.override_checks]
    if not failed:
        return
    names = [check.name for check in failed if check.name not in _NOT_OVERRIDABLE]
    text = "\n  ".join(check.text if len(failed) == 1 else f"{check.name}: {check.text}" for check in failed)
    head = "" if len(failed) == 1 else f"{len(failed)} checks of the chat template fail:\n  "
    fix = f". To start all the same, set override_checks=[{', '.join(names)}] (turnwise doctor shows all checks)"
    raise TemplateError(f"{head}{text}{fix if names else ''}")


def _occurs(kind: str, config: Config, has_tools: bool) -> bool:
    """Whether messages of this kind follow a turn of the model in the recipe's conversations."""
    return config.limits.turns != 1 and (kind != "tool turns" or has_tools)


def _no_failure(check: Check) -> Check:
    """A failure of turns that the recipe does not have, as a note."""
    return replace(check, status="note") if check.status == "fail" else check


def _matters(check: Check, has_tools: bool) -> bool:
    """Whether the note is about something that the recipe has."""
    return has_tools or check.name not in ("tool turns", "tools shown")


def _shown(renderer: Renderer, config: Config | None, has_tools: bool, rows: Sequence[Row]) -> Check:
    if config is None or not has_tools:
        return tools_shown(renderer, wanted=False)
    own = config.environment.use != Config.model_fields["environment"].default.use
    elsewhere = config.runs_conversations_elsewhere is not None
    schemas = [] if elsewhere or renderer.profile.messages.describes_tools else build.tool_schemas(config)
    check = tools_shown(
        renderer, wanted=True, schemas=schemas, rows=rows, described=config.tool_calls.describe == "system"
    )
    in_rows = not config.tools and config.mcp.servers is None  # each row has its own
    if check.status == "fail" and (own or elsewhere or in_rows or not rows):
        return replace(
            check, status="note", text=f"{check.text}. A conversation whose prompt does not show its tools fails"
        )
    return check


def _tried(name: str, check: Callable[[], Check]) -> Check:
    """The result of `check`. A TurnwiseError becomes a failed check."""
    try:
        return check()
    except TurnwiseError as error:
        return wrong(name, error)
