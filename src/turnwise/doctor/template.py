"""The checks of a chat template, its tokenizer and the model's config files. They need no weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.chat.kept_reasoning import KeptReasoning
from turnwise.chat.probes import DESCRIBED_TOOL, QUESTION, TOOL, probe_call
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.chat.round_trip import lost_in_round_trip
from turnwise.chat.stop_tokens import generation_config_stops
from turnwise.chat.template_check import SCENARIOS, Finding, Scenario, check_scenario
from turnwise.chat.tool_calls import undescribed
from turnwise.doctor.check import Check
from turnwise.errors import TemplateError
from turnwise.models.model_config import context_length
from turnwise.types import Row, ToolSchema

__all__ = [
    "Directory",
    "continuing",
    "features",
    "model_file",
    "read_directory",
    "round_trip",
    "stops",
    "stops_note",
    "thinking",
    "tool_calls",
    "tools_shown",
    "vocabulary",
]

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
_TURNS: Mapping[str, Sequence[Scenario]] = {
    "tool turns": [
        _BY_NAME["tool round"],
        _BY_NAME["three tool rounds"],
        _BY_NAME["parallel calls"],
        _BY_NAME["words and a call"],
    ],
    "user turns": [
        _BY_NAME["single turn"],
        _BY_NAME["retry by user"],
        # some templates move the descriptions of the tools to the last user message
        Scenario(
            name="user after tools",
            rounds=[*_BY_NAME["tool round"].rounds[:1], *_BY_NAME["retry by user"].rounds],
        ),
    ],
    "system turns": [_BY_NAME["retry by system"]],
}
"""For each kind of message that may follow a turn of the model: the conversations that test the template."""

_OPTIONAL = ("parallel calls", "retry by system", "words and a call")
"""Conversations that a recipe can avoid, or whose difference the record counts: a problem with them is a note, not a failure."""

_FIX = (
    "turnwise keeps the tokens that the model has seen; a server that renders the complete conversation again would give the "
    "model other tokens. Correct the template, or avoid such turns"
)

_ROWS = 16
"""Rows whose prompts are searched for the tools."""

_ARGUMENTS = {"text": 'a "quoted" text,\nwith a line end, an ä and a </tag>'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Properties in the model's tokenizer and config files. None: not given."""

    eos: int | None
    """The id of the tokenizer's `eos_token`."""
    generation: Sequence[int]
    """The ids of `eos_token_id` in generation_config.json."""
    rows: int | None
    """The number of rows of the embedding (`vocab_size`). The model has no embedding for ids from this number on."""
    context: int | None
    """The longest sequence that the model supports, in tokens."""


def read_directory(path: str, renderer: Renderer) -> Directory:
    """The properties in the model's config files that the checks need.

    Raises TemplateError if config.json cannot be read.
    """
    file = model_file(path, "config.json")
    values: Mapping[str, Any] = {}
    if file is not None:
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TemplateError(f"{file} cannot be read: {error}. Replace it with the model's original file") from error
        if not isinstance(values, dict):
            raise TemplateError(
                f"{file} must contain a JSON object, but contains a {type(values).__name__}. Replace it with the model's "
                f"original file"
            )
    text = values.get("text_config")
    rows = values.get("vocab_size") or (text.get("vocab_size") if isinstance(text, Mapping) else None)
    return Directory(
        eos=renderer.tokenizer.eos_token_id,
        generation=generation_config_stops(path),
        rows=rows if isinstance(rows, int) else None,
        context=context_length(values),
    )


def model_file(path: str, name: str) -> Path | None:
    """The path of a file of a model directory or of a hub id. None if the file is missing."""
    from transformers.utils.hub import cached_file

    source = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    file = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if file is None else Path(file)


def continuing(renderer: Renderer, kinds: Sequence[str] = tuple(_TURNS)) -> list[Check]:
    """Whether the template is append-only: a check for each kind of message that may follow the model's turn."""
    return [_turns(renderer, name, _TURNS[name]) for name in kinds]


def _turns(renderer: Renderer, name: str, scenarios: Sequence[Scenario]) -> Check:
    writes_calls = renderer.template.writes_calls
    used = [scenario for scenario in scenarios if scenario.name != "user after tools" or writes_calls]
    findings = [check_scenario(renderer, scenario) for scenario in used]
    wrong = [finding for finding in findings if finding.refused or (finding.differs and not finding.harmless)]
    if failures := _by_problem(finding for finding in wrong if finding.scenario not in _OPTIONAL):
        return Check(name, "fail", f"{'; '.join(failures)}. {_FIX}")
    notes = _by_problem(wrong)
    # a difference in the model's turns is the same in all scenarios, so it is reported once
    notes += [f"{_problem(finding)}; turnwise keeps the sampled tokens" for finding in findings if finding.harmless][:1]
    if conversions := sorted({name for finding in findings for name in finding.adaptations}):
        notes.append(
            f"the template does not accept these messages unchanged, so turnwise converts them: {', '.join(conversions)}"
        )
    if notes:
        return Check(name, "note", "; ".join(notes))
    total, context = (
        sum(finding.total_tokens for finding in findings),
        sum(finding.encoded_tokens for finding in findings),
    )
    conversations = "1 conversation" if len(findings) == 1 else f"{len(findings)} conversations"
    return Check(name, "ok", f"append-only in {conversations} ({context} of {total} tokens are context)")


def _by_problem(findings: Iterable[Finding]) -> list[str]:
    """A text for each different problem, with the names of the scenarios that have it."""
    scenarios: dict[str, list[str]] = {}
    for finding in findings:
        scenarios.setdefault(_problem(finding), []).append(finding.scenario)
    return [f"{' and '.join(names)}: {problem}" for problem, names in scenarios.items()]


def _problem(finding: Finding) -> str:
    return finding.refused or f"the template {finding.differs}"


def thinking(renderer: Renderer, policy: Thinking | None) -> Check:
    """What the template and the recipe's option `thinking` (`policy`; None: no recipe) do with earlier reasoning."""
    name, strips = "thinking", renderer.profile.kept_reasoning.stripped_before
    if (problem := thinking_problem(renderer, policy or "keep")) is not None:
        return Check(name, "fail", problem)
    if not renderer.profile.reasoning.supported:
        return Check(name, "ok", "the template does not support reasoning")
    if policy in ("branch", "strip_at_user"):
        where = str(renderer.profile.kept_reasoning) if policy == "branch" else "at every user message"
        return Check(name, "ok", f"thinking={policy}: a new segment without earlier reasoning begins {where}")
    if not strips:
        return Check(name, "ok", "the template keeps the reasoning of earlier turns")
    return Check(name, "note", thinking_note(renderer.profile.kept_reasoning))


def thinking_note(strips: KeptReasoning) -> str:
    """The meaning of each value of `thinking` with a template that leaves earlier reasoning out."""
    return (
        f"the template leaves earlier reasoning out {strips}, and so does a server. thinking=keep trains with earlier reasoning, "
        f"thinking=branch trains on the prompts of a server, thinking=strip_at_user removes reasoning at user messages only"
    )


def thinking_problem(renderer: Renderer, policy: Thinking) -> str | None:
    """The error text if a value of `thinking` has no effect with this template, or None."""
    if policy == "keep":
        return None
    if not renderer.profile.reasoning.supported:
        return (
            f"thinking={policy} has no effect: the chat template of {renderer.where} does not support reasoning, so "
            f"there is no reasoning to leave out. Remove it"
        )
    if policy == "branch" and not renderer.profile.kept_reasoning.stripped_before:
        return (
            f"thinking=branch has no effect: the chat template of {renderer.where} keeps the reasoning of earlier turns, "
            f"so the prompts of a server are those of thinking=keep. Remove it, or use thinking=strip_at_user to remove earlier "
            f"reasoning at user messages"
        )
    return None


def stops(renderer: Renderer, directory: Directory) -> Check:
    """Whether template, tokenizer and generation config agree on the tokens that end a turn."""
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
            f"{text}: the tokenizer has no token {' and no token '.join(map(str, unknown))} (its ids are 0 to "
            f"{_highest(renderer)}), so this generation config belongs to another model. Correct eos_token_id in "
            f"generation_config.json",
        )
    if not own:
        return Check(
            name,
            "fail",
            f"{text}: the template closes a turn with {renderer.profile.turn.closing[:20]!r}, which is none of these tokens, so "
            f"a turn would never end. Make it a special token of the tokenizer, or let the template write eos_token",
        )
    lacks = [token for token in own if token not in directory.generation]
    if directory.eos is None and lacks:
        return Check(
            name,
            "note" if not directory.generation else "fail",
            f"{text}: other engines stop at the tokenizer's eos_token. Set it to {_named(renderer, own)}",
        )
    if lacks and (directory.generation or directory.eos not in own):
        return Check(
            name,
            "fail",
            f"{text}: an engine that stops at eos_token_id would not stop after {_named(renderer, lacks)}. Add it to "
            f"eos_token_id in generation_config.json",
        )
    return Check(name, "ok", text)


def _own_ends(renderer: Renderer) -> list[int]:
    """The stop tokens that the template writes at the end of turns."""
    turn = renderer.profile.turn
    written = [turn.closing, turn.after_call]
    if not turn.closing.strip():
        written += [_head(renderer, role) for role in ("user", "tool")]
    ids = {token for text in written for token in renderer.encode(text)}
    return [token for token in renderer.stop_token_ids if token in ids]


def stops_note(renderer: Renderer) -> str:
    """The problem if a stop token also occurs inside turns, or an empty text."""
    inside = renderer.profile.stop_tokens.inside_turns
    tokens = " and ".join(f"{_named(renderer, [token])}, which also occurs in {part}" for token, part in inside.items())
    return tokens and (
        f"eos_token of the tokenizer or eos_token_id in generation_config.json names {tokens}. turnwise does not stop there, "
        f"but a server would cut turns in the middle. Remove it from both"
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
    """Whether the embedding has a row for each id of the tokenizer. Padding token and context length are shown too."""
    tokenizer: Any = renderer.tokenizer
    size, highest = len(tokenizer), _highest(renderer)
    pad = _named(renderer, _known(tokenizer.pad_token_id))
    context = "unknown" if directory.context is None else f"{directory.context:,} tokens"
    about = f"padding {pad}, context {context}"
    if directory.rows is None:
        text = (
            f"{size:,} tokens; the number of embedding rows is unknown, because there is no vocab_size in config.json"
        )
        return Check("vocabulary", "note", f"{text}; {about}")
    if highest >= directory.rows:
        token = tokenizer.convert_ids_to_tokens(highest)
        return Check(
            "vocabulary",
            "fail",
            f"the tokenizer has the id {highest} ({token!r}), but the model's embedding has {directory.rows:,} rows: ids from "
            f"{directory.rows} on have no embedding. Use the model's own tokenizer, or model.resize_token_embeddings",
        )
    return Check("vocabulary", "ok", f"{size:,} tokens, {directory.rows:,} embedding rows, {about}")


def tool_calls(renderer: Renderer, *, wanted: bool) -> Check:
    """The format of tool calls, and whether a call that the template writes is parsed. `wanted`: the recipe has tools."""
    try:
        format = renderer.turn_parser.tool_format
    except TemplateError as error:
        if wanted:
            return Check("tool calls", "fail", str(error))
        return Check(
            "tool calls",
            "note",
            f"no known format; tools would need tool_format=... ({str(error).partition(', so')[0]})",
        )
    if not renderer.template.writes_calls:
        return Check("tool calls", "note", f"{format.name}, set in the recipe: the template writes no tool calls")
    completion = renderer.template.completion_text(probe_call(_ARGUMENTS), tools=[TOOL])
    parsed = renderer.turn_parser.parse(renderer.encode(completion), tools=[TOOL])
    calls = [(call.name, dict(call.arguments), call.error) for call in parsed.calls]
    if calls != [("probe_tool", _ARGUMENTS, None)]:
        if not renderer.profile.written_format_name:
            return Check(
                "tool calls",
                "note",
                f"{format.name}, set in the recipe: the template writes calls in a form that cannot be read ({completion!r})",
            )
        return Check(
            "tool calls",
            "fail",
            f"{format.name}: the template writes {completion!r}, which must be parsed as probe_tool with {_ARGUMENTS} but is "
            f"parsed as {calls}. Set tool_format to the format of the template",
        )
    return Check(
        "tool calls", "ok", f"{format.name}: a call that the template writes is parsed with the same name and arguments"
    )


def tools_shown(
    renderer: Renderer,
    *,
    wanted: bool,
    schemas: Sequence[ToolSchema] = (),
    rows: Sequence[Row] = (),
    described: bool = False,
) -> Check:
    """Whether the model sees the tools that it may call. `wanted`: the recipe has tools, and `schemas` are those that are known.

    A template that does not show them is no problem if the messages of `rows` do, or `described`: the tools are described in the
    system message (`tool_calls.describe`).
    """
    name = "tools shown"
    if renderer.profile.messages.describes_tools:
        return Check(name, "ok", "the template writes the names and parameters of tools into the prompt")
    if described:
        shown = renderer.encode_opening([QUESTION], [DESCRIBED_TOOL]).text
        if missing := undescribed([DESCRIBED_TOOL], shown):
            return Check(name, "fail", renderer.undescribed_problem(missing))
        format = renderer.turn_parser.tool_format.name
        return Check(name, "ok", f"tools are described in the system message, in the form of {format}")
    if not wanted:
        text = (
            "the template does not show tools to the model: a recipe with tools would need tool_calls.describe=system"
        )
        return Check(name, "note", text)
    for row in rows[:_ROWS]:
        if not row.messages:
            continue  # the environment writes the prompt
        text = renderer.encode_opening(row.messages, schemas).text
        if missing := undescribed(schemas, text):
            return Check(name, "fail", f"row {row.id!r}: {renderer.undescribed_problem(missing)}")
    if rows and schemas:
        return Check(name, "ok", "the messages of the rows contain the names and parameters of the tools")
    return Check(name, "fail", renderer.undescribed_problem(undescribed(schemas, "") or ["of the rows or the MCP servers"]))


def round_trip(renderer: Renderer, *, tools: bool) -> Check:
    """Whether written turns come back unchanged from template, tokens and parser. `tools`: turns with calls are tried too."""
    losses = renderer.lost_turns if tools else lost_in_round_trip(renderer, tools=False)
    if lost := [str(loss) for loss in losses if not loss.by_template]:
        return Check(
            "round trip",
            "fail",
            f"{'; '.join(lost)}. Rewards, tools and the record would have the changed turn. Correct the template, or set "
            f"tool_format to the format that the model writes",
        )
    if changed := [str(loss) for loss in losses]:
        return Check(
            "round trip",
            "note",
            f"{'; '.join(changed)}. turnwise keeps the sampled tokens, but the later prompts of a server would differ",
        )
    kinds = "answers, reasoning and calls" if tools else "answers and reasoning"
    return Check("round trip", "ok", f"{kinds} come back unchanged from template, tokens and parser")


def features(renderer: Renderer) -> Check:
    """The template's profile, for information. Never fails."""
    profile = renderer.profile
    facts = ["content as parts" if profile.messages.content_as_parts else "content as text"]
    facts.append(f"model turns as {profile.turn.content}")
    if profile.reasoning.supported:
        key = profile.reasoning.key
        facts.append(f"reasoning in the field {key}" if key else "reasoning between marks in the text")
    facts.append("accepts images" if renderer.vision is not None else "text only")
    return Check("template", "ok", ", ".join(facts), details=profile.describe())
