"""The fields of a verl row for its interaction and its tools: `interaction_kwargs`, `tools_kwargs`, `tool_selection`.

They are in `extra_info`, or columns of their own. In parquet, each row has the keys of all rows, so null means not set.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import Failed, nearest
from turnwise.types import Failure, Row

__all__ = ["Wanted", "refuse", "unanswered_kwargs", "wanted"]

_log = logging.getLogger(__name__)
_KINDS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The fields of a row for its interaction and its tools."""

    interaction: Mapping[str, Any]
    """`interaction_kwargs`."""
    tools: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """`tools_kwargs`, by tool name and by kind such as `create_kwargs`."""
    selection: tuple[str, ...] | None
    """The names of the tools that the model is offered; None means all."""
    truth: Any
    """`reward_model.ground_truth`."""

    def keywords(self, tool: str, kind: str) -> Mapping[str, Any]:
        """The keywords of one kind for one tool."""
        return self.tools.get(tool, {}).get(kind, {})


def refuse(row: Row, problem: str) -> Failed:
    """A failure of kind `row`."""
    return Failed(Failure("row", f"row {row.id!r}: {problem}"))


def wanted(row: Row, tools: Sequence[str]) -> Wanted:
    """Read a row; `tools` are the names of the existing tools.

    Keywords for an unknown tool are ignored, with one warning. Raises Failed if the row contradicts itself, or selects an
    unknown tool.
    """
    tools = tuple(tools)
    info = _mapping(row, "extra_info", row.fields.get("extra_info"))

    def column(name: str) -> Any:
        return info[name] if info.get(name) is not None else row.fields.get(name)

    given: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for tool, kinds in _mapping(row, "tools_kwargs", column("tools_kwargs")).items():
        if kinds is None:
            continue
        if tool not in tools:  # rows are prepared for several tool files: verl ignores it too
            _tell_of(tool, tools)
            continue
        of_tool: dict[str, Mapping[str, Any]] = {}
        given[tool] = of_tool
        for kind, keywords in _mapping(row, f"tools_kwargs.{tool}", kinds).items():
            if keywords is None:
                continue
            if kind not in _KINDS:
                known = ", ".join(_KINDS)
                raise refuse(row, f"tools_kwargs.{tool} has a key {kind!r}{nearest(kind, _KINDS)} (there are: {known})")
            of_tool[kind] = _mapping(row, f"tools_kwargs.{tool}.{kind}", keywords)
    selection = column("tool_selection")
    for tool in selection or ():
        if tool not in tools:
            have = ", ".join(sorted(tools)) or "none"
            raise refuse(row, f"tool_selection names a tool {tool!r}{nearest(tool, tools)} (the tools are: {have})")
    if column("need_tools_kwargs") and not column("tools_kwargs"):
        raise refuse(row, "need_tools_kwargs is set, and the row has no tools_kwargs")
    reward_model = row.fields.get("reward_model")
    return Wanted(
        interaction=_mapping(row, "interaction_kwargs", column("interaction_kwargs")),
        tools=given,
        selection=None if selection is None else tuple(selection),
        truth=reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None,
    )


@functools.cache
def _tell_of(tool: str, tools: tuple[str, ...]) -> None:
    """Warn once that rows have keywords for an unknown tool."""
    have = ", ".join(sorted(tools)) or "none"
    _log.warning(
        "rows have tools_kwargs for a tool %r%s: they are not used (the tools are: %s)",
        tool,
        nearest(tool, tools),
        have,
    )


def unanswered_kwargs(wants: Wanted) -> None:
    """Warn once that a row has `interaction_kwargs`, and there is no interaction that reads them."""
    if any(value is not None for value in wants.interaction.values()):  # in parquet, null means not set
        _tell_of_interaction(str(wants.interaction.get("name") or ""))


@functools.cache
def _tell_of_interaction(name: str) -> None:
    _log.warning(
        "rows have interaction_kwargs%s, and no interaction file is given: they are not used, and the model's answers end the "
        "conversation. Set environment.arguments.interactions to the file, or remove the column",
        f" (name: {name!r})" if name else "",
    )


def _mapping(row: Row, name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse(row, f"{name} must be a mapping; it is {value!r:.80}")
    return value
