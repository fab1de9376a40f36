"""What a model's chat template, tokenizer and configs say about each other: the part that needs no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.kept_reasoning import KeptReasoning
from turnwise.chat.probes import TOOL, probe_call
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.chat.template_check import SCENARIOS, Finding, Scenario, check_scenario
from turnwise.doctor.check import Check
from turnwise.errors import TemplateError

__all__ = ["Directory", "continuing", "features", "stops", "stops_note", "thinking", "tool_calls", "vocabulary"]

_BY_NAME = {one.name: one for one in SCENARIOS}
_TURNS: Mapping[str, Sequence[Scenario]] = {
    "tool turns": [_BY_NAME["tool round"], _BY_NAME["three tool rounds"], _BY_NAME["parallel calls"]],
    "user turns": [
        _BY_NAME["single turn"],
        _BY_NAME["retry by user"],
        # some templates move the tools' description to the last user message
        Scenario(
            name="user after tools",
            rounds=[*_BY_NAME["tool round"].rounds[:1], *_BY_NAME["retry by user"].rounds],
        ),
    ],
    "system turns": [_BY_NAME["retry by system"]],
}
"""What may come after the model's turn, and the conversations that show what the template makes of it."""

_OPTIONAL = ("parallel calls", "retry by system")
"""Conversations that one can do without: what is wrong with them is told, and is no failure."""

_GOES_ON = (
    "The conversation goes on with the tokens it has, and a server that writes it anew would show the model others: correct "
    "the template, or leave such turns out"
)

_ARGUMENTS = {"text": 'a "quoted" text,\nwith a line end, an ä and a </tag>'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """What a model directory says besides its template. `None` is what it does not say."""

    eos: int | None
    """The tokenizer's."""
    generation: Sequence[int]
    """The stop tokens of the generation config."""
    rows: int | None
    """Of the embedding: ids from here on cannot be read by the model."""
    context: int | None
    """The longest sequence that the model was made for, in tokens."""


def continuing(renderer: Renderer, kinds: Sequence[str] = tuple(_TURNS)) -> list[Check]:
    """Whether the template is append-only, for what may answer the model: a line for each kind of turn."""
    return [_turns(renderer, name, _TURNS[name]) for name in kinds]


def _turns(renderer: Renderer, name: str, scenarios: Sequence[Scenario]) -> Check:
    writes_calls = renderer.template.writes_calls
    findings = [check_scenario(renderer, one) for one in scenarios if one.name != "user after tools" or writes_calls]
    wrong = [found for found in findings if found.refused or (found.differs and not found.harmless)]
    fails = _each(one for one in wrong if one.scenario not in _OPTIONAL)
    if fails:
        what = "; ".join(fails)
        return Check(name, "fail", f"{what}. {_GOES_ON}")
    notes = _each(wrong)
    # what the model itself has the say in is told once: it is the same in all of them
    notes += [f"{_told(one)}; what the model sampled stays as it is" for one in findings if one.harmless][:1]
    if shapes := sorted({shape for one in findings for shape in one.adaptations}):
        notes.append(
            f"the template does not take them as they are, so they are handed over otherwise: {', '.join(shapes)}"
        )
    if notes:
        return Check(name, "note", "; ".join(notes))
    kept, encoded = sum(one.total_tokens for one in findings), sum(one.encoded_tokens for one in findings)
    held = "a conversation" if len(findings) == 1 else f"{len(findings)} conversations"
    return Check(name, "ok", f"append-only in {held} ({encoded} of {kept} tokens are context)")


def _each(findings: Iterable[Finding]) -> list[str]:
    """What is wrong with them, that which several have in common once."""
    found: dict[str, list[str]] = {}
    for one in findings:
        found.setdefault(_told(one), []).append(one.scenario)
    return [f"{' and '.join(scenarios)}: {told}" for told, scenarios in found.items()]


def _told(found: Finding) -> str:
    return found.refused or f"the template {found.differs}"


def thinking(renderer: Renderer, policy: Thinking | None) -> Check:
    """What becomes of thoughts, by the template and by the recipe's policy (None: there is no recipe)."""
    name, strips = "thinking", renderer.profile.kept_reasoning.stripped_before
    if (problem := thinking_problem(renderer, policy or "keep")) is not None:
        return Check(name, "fail", problem)
    if not renderer.profile.reasoning.supported:
        return Check(name, "ok", "the template knows of no thinking")
    if policy in ("branch", "strip_at_user"):
        where = str(renderer.profile.kept_reasoning) if policy == "branch" else "at every user message"
        return Check(name, "ok", f"thinking={policy}: a new segment without earlier thoughts begins {where}")
    if not strips:
        return Check(name, "ok", "the template keeps the thoughts of earlier turns")
    return Check(name, "note", thinking_note(renderer.profile.kept_reasoning))


def thinking_note(strips: KeptReasoning) -> str:
    """What the default policy means with a template that leaves thoughts out."""
    return (
        f"the template leaves earlier thoughts out {strips}, so a server would: thinking=keep "
        f"trains with them, thinking=branch as it is served, thinking=strip_at_user without them at user messages only"
    )


def thinking_problem(renderer: Renderer, policy: Thinking) -> str | None:
    """Why a policy would have no effect with this template, or None."""
    if policy == "keep":
        return None
    if not renderer.profile.reasoning.supported:
        return (
            f"thinking={policy} has no effect: the chat template of {renderer.where} knows of no thinking, so there are no "
            f"thoughts to leave out. Remove it"
        )
    if policy == "branch" and not renderer.profile.kept_reasoning.stripped_before:
        return (
            f"thinking=branch has no effect: the chat template of {renderer.where} keeps the thoughts of earlier turns, so it "
            f"would serve what thinking=keep trains. Remove it, or use thinking=strip_at_user to leave them out all the same"
        )
    return None


def stops(renderer: Renderer, directory: Directory) -> Check:
    """Whether template, tokenizer and generation config agree on what ends a turn."""
    name, own = "stop tokens", _own_ends(renderer)
    text = (
        f"template {_named(renderer, own)}, tokenizer {_named(renderer, _known(directory.eos))}, generation config "
        f"{_named(renderer, directory.generation)}"
    )
    if inside := stops_note(renderer):
        return Check(name, "fail", f"{text}: {inside}")
    if unknown := renderer.profile.stop_tokens.unknown_ids:
        return Check(
            name,
            "fail",
            f"{text}: the tokenizer has no {' and no '.join(map(str, unknown))} (its ids are 0 to "
            f"{_highest(renderer)}), so this generation config is another model's. Correct eos_token_id in "
            f"generation_config.json",
        )
    if not own:
        return Check(
            name,
            "fail",
            f"{text}: the template closes a turn with {renderer.profile.turn.closing[:20]!r}, which is none of them, so a turn "
            f"would never end. Make it a special token of the tokenizer, or let the template write eos_token",
        )
    lacks = [token for token in own if token not in directory.generation]
    if directory.eos is None and lacks:
        return Check(
            name,
            "note" if not directory.generation else "fail",
            f"{text}: set eos_token to {_named(renderer, own)}, other engines look there",
        )
    if lacks and (directory.generation or directory.eos not in own):
        return Check(
            name,
            "fail",
            f"{text}: an engine that goes by eos_token_id would run on after {_named(renderer, lacks)}; add it to "
            f"eos_token_id in generation_config.json",
        )
    return Check(name, "ok", text)


def _own_ends(renderer: Renderer) -> list[int]:
    """The stop tokens with which the template itself ends turns."""
    turn = renderer.profile.turn
    written = [turn.closing, turn.after_call]
    if not turn.closing.strip():
        written += [_head(renderer, role) for role in ("user", "tool")]
    ids = {token for text in written for token in renderer.encode(text)}
    return [token for token in renderer.stop_token_ids if token in ids]


def stops_note(renderer: Renderer) -> str:
    """What is wrong with stop tokens that stand inside a turn; empty where there are none."""
    inside = renderer.profile.stop_tokens.inside_turns
    told = " and ".join(f"{_named(renderer, [token])}, which stands in {part} too" for token, part in inside.items())
    return told and (
        f"eos_token of the tokenizer or eos_token_id in generation_config.json names {told}. turnwise does not stop there; a "
        f"server would cut turns in the middle. Remove it from both"
    )


def _highest(renderer: Renderer) -> int:
    tokenizer: Any = renderer.tokenizer
    return max(tokenizer.get_vocab().values(), default=-1)


def _known(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _named(renderer: Renderer, token_ids: Sequence[int]) -> str:
    unknown = renderer.profile.stop_tokens.unknown_ids
    shown = ", ".join(
        f"no token ({token})" if token in unknown else f"{renderer.decode([token])!r} ({token})"
        for token in token_ids[:4]
    )
    return (shown + (f" and {len(token_ids) - 4} more" if len(token_ids) > 4 else "")) or "none"


def _head(renderer: Renderer, role: str) -> str:
    try:
        return renderer.template.text_before_content([role], "text")
    except TemplateError:
        return ""


def vocabulary(renderer: Renderer, directory: Directory) -> Check:
    """Whether the model can read all that the tokenizer writes; padding and context, for information."""
    tokenizer: Any = renderer.tokenizer
    size, highest = len(tokenizer), _highest(renderer)
    pad = _named(renderer, _known(tokenizer.pad_token_id))
    context = "unknown" if directory.context is None else f"{directory.context:,} tokens"
    about = f"padding {pad}, context {context}"
    if directory.rows is None:
        return Check("vocabulary", "note", f"{size:,} tokens; there is no config.json to hold them against; {about}")
    if highest >= directory.rows:
        token = tokenizer.convert_ids_to_tokens(highest)
        return Check(
            "vocabulary",
            "fail",
            f"the tokenizer has the id {highest} ({token!r}), and the model's embedding has {directory.rows:,} rows: the ids "
            f"from {directory.rows} on cannot be read. Use the model's own tokenizer, or model.resize_token_embeddings",
        )
    return Check("vocabulary", "ok", f"{size:,} tokens in {directory.rows:,} rows, {about}")


def tool_calls(renderer: Renderer, *, wanted: bool) -> Check:
    """Which format tool calls have, and whether a call that the template writes is read back. `wanted`: the recipe has tools."""
    try:
        format = renderer.turn_parser.tool_format
    except TemplateError as error:
        if wanted:
            return Check("tool calls", "fail", str(error))
        return Check("tool calls", "note", f"none: tools need tool_format=... ({str(error).partition(', so')[0]})")
    if not renderer.template.writes_calls:
        return Check("tool calls", "note", f"{format.name}, as the recipe says: the template itself writes no calls")
    said = renderer.template.completion_text(probe_call(_ARGUMENTS), tools=[TOOL])
    read = renderer.turn_parser.parse(renderer.encode(said), tools=[TOOL])
    found = [(call.name, dict(call.arguments), call.error) for call in read.calls]
    if found != [("probe_tool", _ARGUMENTS, None)]:
        return Check(
            "tool calls", "fail", f"{format.name}: the template writes {said!r}, which is read back as {found}"
        )
    return Check("tool calls", "ok", f"{format.name}: a call that the template writes is read back as it was")


def features(renderer: Renderer) -> Check:
    """The template's profile, for information."""
    profile = renderer.profile
    found = ["content in parts" if profile.messages.content_as_parts else "content as text"]
    shapes = {"text": "turns in the model's own words", "fields": "turns in fields"}
    found.append(shapes.get(profile.turn.content, f"turns as {profile.turn.content}"))
    if profile.reasoning.supported:
        found.append(f"thoughts as {profile.reasoning.key}" if profile.reasoning.key else "thoughts between marks")
    found.append("sees images" if renderer.vision is not None else "text only")
    return Check("template", "ok", ", ".join(found), details=profile.describe())
