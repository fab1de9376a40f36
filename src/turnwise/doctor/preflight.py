"""What a run looks at before it begins: the template, for what the recipe will do with it. No weights, no conversation."""

from __future__ import annotations

from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config
from turnwise.doctor.messages import contents, headers
from turnwise.doctor.template import continuing, stops_note, thinking
from turnwise.errors import TemplateError

__all__ = ["preflight"]


def preflight(config: Config, renderer: Renderer, *, tools: bool = False) -> list[str]:
    """Notes on the model's template that a person should know before the run.

    `tools` says that there are some which the recipe does not name: in the rows, say.
    Raises TemplateError for what cannot work: tools in a format that cannot be read, a thinking policy without effect.
    """
    tools = tools or bool(config.tools) or config.mcp.servers is not None
    if tools:
        _ = renderer.turn_parser.tool_format
    elif renderer.profile.messages.requires_tools:
        raise TemplateError(
            f"the chat template of {renderer.where} refuses conversations without tools, and the recipe has none: add tools, "
            f"or use another chat template"
        )
    policy = thinking(renderer, config.thinking)
    if policy.status == "fail":
        raise TemplateError(policy.text)
    notes = [f"{one.name}: {one.text}" for one in (headers(renderer), contents(renderer)) if one.status == "fail"]
    notes += [f"stop tokens: {told}"] if (told := stops_note(renderer)) else []
    if config.limits.turns == 1:
        return notes  # nothing goes on: how it would is of no interest
    kinds = ["tool turns", "user turns"] if tools else ["user turns"]
    findings = [policy, *continuing(renderer, kinds)]
    return notes + [f"{one.name}: {one.text}" for one in findings if one.status != "ok"]
