"""The checks at the start of each run: whether the chat template works with the recipe. They need no weights."""

from __future__ import annotations

from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config
from turnwise.doctor.messages import contents, headers
from turnwise.doctor.template import continuing, stops_note, thinking
from turnwise.errors import TemplateError

__all__ = ["preflight"]


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
