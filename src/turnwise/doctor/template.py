"""Checks of a chat template, its tokenizer and the model's config files. They need no weights.

Conversations are rendered turn by turn and in one pass, and both are compared: a template can be trained on only if a
conversation can be continued. The model's turns are the text that the template itself renders for them, so every difference
comes from the template: text that it changes when the conversation continues, or a message that it accepts only in another
form. The table of templates (benchmarks/README.md) and `turnwise doctor` use this comparison. Further checks look at headers, at
unchanged message contents, at stop tokens and at tool calls.

The same checks run at the start of each run with the recipe's own rows (`preflight`). What fails is refused, unless
`override_checks` names the check.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnwise import assembly
from turnwise.chat.media import process_row_media
from turnwise.chat.media_parts import has_media
from turnwise.chat.probes import (
    DESCRIBED_TOOL,
    PLACEHOLDER,
    QUESTION,
    TOOL,
    PriorConversation,
    assistant_message,
    probe_call,
    probe_word,
)
from turnwise.chat.renderer import EncodedMessages, Renderer, Thinking, lost_in_round_trip
from turnwise.chat.template_arguments import argument_text, refuse_unread_arguments
from turnwise.chat.template_profile import KeptReasoning, generation_config_stops
from turnwise.chat.tool_calls import undescribed
from turnwise.doctor.check import Check, override_notes, wrong
from turnwise.doctor.conversation import masked
from turnwise.errors import ConfigError, DataError, TemplateError, TurnwiseError
from turnwise.models.model_config import context_length
from turnwise.options.schema import Config
from turnwise.types import Message, Row, ToolSchema

# rendering turn by turn and in one pass

PROBE_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text."}},
            "required": ["text"],
        },
    },
}

_SHOWN = 70  # characters of a text in a finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A conversation: the opening, then the model's turns, each with the messages that follow it."""

    name: str
    rounds: Sequence[tuple[Message, Sequence[Message]]]
    """Pairs of a model's message and the messages that answer it; the last pair has no answers."""
    opening: Sequence[Message] = (
        {"role": "system", "content": "system-words"},
        {"role": "user", "content": "question-words"},
    )

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The tools that the model may call."""
        return [PROBE_TOOL] if any(message.get("tool_calls") for message, _ in self.rounds) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a scenario."""

    scenario: str
    exact: bool
    """Whether the tokens equal the tokens of the rendering in one pass."""
    differs: str = ""
    """The first difference: the text in one pass, and the text turn by turn. Empty if there is no difference."""
    harmless: bool = False
    """Whether only the part differs that the model samples in training: end of turn, reasoning, tokens of the same text."""
    adaptations: tuple[str, ...] = ()
    """How messages had to be changed: `system as user`, `neighbours as one message`."""
    refused: str = ""
    """The reason why the template cannot render the scenario. Empty if it can."""
    encoded_tokens: int = 0
    """The number of tokens that were encoded for the context."""
    total_tokens: int = 0
    """The number of tokens of the entire conversation."""
    ids: Sequence[int] = field(default=(), repr=False)


def _text_turn(number: int) -> Message:
    return {"role": "assistant", "content": f"words-{number}"}


def _call_round(number: int, *, calls: int = 1) -> tuple[Message, list[Message]]:
    turn = probe_call(*({"text": f"argument-{number}-{index}"} for index in range(calls)))
    answers: list[Message] = []
    for index, call in enumerate(turn["tool_calls"]):
        call["id"] = f"callpr{number}{index}x"
        answers.append(
            {"role": "tool", "tool_call_id": call["id"], "name": "probe_tool", "content": f"result-{number}-{index}"}
        )
    return turn, answers


def _with_words(round: tuple[Message, list[Message]]) -> tuple[Message, list[Message]]:
    turn, answers = round
    return {**turn, "content": "look-first"}, answers


_AGAIN = "once-more"
SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="single turn", rounds=[(_text_turn(0), [])]),
    Scenario(name="tool round", rounds=[_call_round(0), (_text_turn(1), [])]),
    Scenario(name="words and a call", rounds=[_with_words(_call_round(0)), (_text_turn(1), [])]),
    Scenario(name="parallel calls", rounds=[_call_round(0, calls=2), (_text_turn(1), [])]),
    Scenario(
        name="retry by user", rounds=[(_text_turn(0), [{"role": "user", "content": _AGAIN}]), (_text_turn(1), [])]
    ),
    Scenario(
        name="retry by system", rounds=[(_text_turn(0), [{"role": "system", "content": _AGAIN}]), (_text_turn(1), [])]
    ),
    Scenario(name="three tool rounds", rounds=[_call_round(0), _call_round(1), _call_round(2), (_text_turn(3), [])]),
)


def check_scenario(renderer: Renderer, scenario: Scenario) -> Finding:
    """Render a scenario turn by turn and in one pass. Never raises TemplateError: an error of the template is a finding."""
    try:
        return _check_scenario(renderer, scenario)
    except TemplateError as error:
        return Finding(scenario=scenario.name, exact=False, refused=str(error))


def _check_scenario(renderer: Renderer, scenario: Scenario) -> Finding:
    template = renderer.template
    tools = (scenario.tools if template.writes_calls else []) or template.message_format.probe_tools()
    opening = renderer.encode_opening(scenario.opening, tools)
    messages, adaptations = list(opening.messages), _adaptations(scenario.opening, opening.messages)
    priors: list[PriorConversation] = []
    for turn, answers in scenario.rounds:
        # a template that renders no tool calls receives a turn of text instead
        as_text = turn.get("tool_calls") and not template.writes_calls
        messages.append({"role": "assistant", "content": "call-words"} if as_text else turn)
        if answers:
            priors.append(PriorConversation.from_messages(list(messages), has_tools=bool(tools)))
            planned = template.plan(answers, priors[-1]).apply(answers)
            adaptations |= _adaptations(answers, planned)
            messages.extend(planned)
    written = _TurnByTurn(renderer, template.render(messages, add_generation_prompt=False, tools=tools))
    written.differs = _left_out(messages, written.one_pass)
    written.append_opening(opening)
    for answers, prior in zip((answers for _, answers in scenario.rounds if answers), priors, strict=True):
        written.append_turn(answers, prior)
    written.append_last_turn()
    if not written.differs and written.ids != written.one_pass_ids[: len(written.ids)]:
        written.differs, written.harmless = "encodes the same text as other tokens in one pass", True
    return Finding(
        scenario=scenario.name,
        exact=not written.differs,
        differs=written.differs,
        harmless=written.harmless,
        adaptations=tuple(sorted(adaptations)),
        encoded_tokens=written.encoded_tokens,
        total_tokens=len(written.ids),
        ids=written.ids,
    )


def _left_out(messages: Sequence[Message], text: str) -> str:
    """Which parts of the messages are missing in the rendered text; empty if none are."""
    for message in messages:
        calls = [call["function"]["arguments"]["text"] for call in message.get("tool_calls", [])]
        missing = [argument for argument in calls if argument not in text]
        if missing and len(missing) < len(calls):
            return f"writes only the first {len(calls) - len(missing)} of several calls in a turn"
        words = str(message.get("content") or "").split()
        if calls and words and (problem := _words_beside_calls(words[0], calls[0], text)):
            return problem
        if missing or not all(word in text for word in words):
            return f"leaves out the content of a {message['role']!r} message"
    return ""


def _words_beside_calls(words: str, argument: str, text: str) -> str:
    """What the template does with the words beside a call if it does not write them in front of it, as models do."""
    place, call = text.find(words), text.find(argument)
    if place < 0:
        return "leaves out the words beside a call"
    return "writes the words beside a call behind the call" if place > call >= 0 else ""


class _TurnByTurn:
    """A conversation that is rendered turn by turn, together with its text in one pass."""

    def __init__(self, renderer: Renderer, one_pass: str) -> None:
        self._renderer = renderer
        self.one_pass_ids = list(renderer.encode_conversation(one_pass))
        # the decoded text, because some tokenizers add a space before every text
        self.one_pass = renderer.decode(self.one_pass_ids)
        self.ids: list[int] = []
        self.differs = ""
        self.harmless = False
        self.encoded_tokens = 0
        self._at = 0
        """The number of characters of `one_pass` that have been appended."""

    def append_opening(self, opening: EncodedMessages) -> None:
        """Append the opening messages with the first generation prompt."""
        text = self._renderer.decode(opening.token_ids)
        bare = self._renderer.profile.reasoning.marks.without_reasoning_opening(text)
        if not self.one_pass.startswith(text):
            self._note_generation_prompt(text, bare, 0)
        self._append(opening, text if self.one_pass.startswith(text) else bare)

    def append_turn(self, answers: Sequence[Message], prior: PriorConversation) -> None:
        """Append the model's next turn and the answers to it. `prior` describes the conversation up to that turn."""
        if self._append_turn_by_ids(answers, prior):
            return
        decode = self._renderer.decode
        # each candidate: does the turn end with another token, index of the stop token, place, bridge, text of the bridge
        candidates: list[tuple[bool, int, int, EncodedMessages, str]] = []
        for order, stop in enumerate(self._renderer.stop_token_ids):
            bridge = self._renderer.encode_bridge(stop, answers, prior)
            text = decode(bridge.token_ids)
            bare = self._renderer.profile.reasoning.marks.without_reasoning_opening(text)
            for written in dict.fromkeys([text, bare]):
                end = self.one_pass.find(written, self._at)
                if end >= 0:
                    ends = self.one_pass[self._at : end].endswith(decode([stop]))
                    candidates.append((not ends, order, end, bridge, written))
                    break
        if not candidates:
            bridge = self._renderer.encode_bridge(self._renderer.stop_token_ids[0], answers, prior)
            raise TemplateError(
                f"writes different text around the answers when the conversation continues: "
                f"{self._both_texts(decode(bridge.token_ids), answers)}"
            )
        other_end, order, end, bridge, written = min(candidates, key=lambda candidate: candidate[:3])
        turn = self.one_pass[self._at : end]
        if other_end:
            turn = self._with_other_end(turn, self._renderer.stop_token_ids[order])
        self.ids += self._renderer.encode(turn)
        self._at = end
        text = decode(bridge.token_ids)
        if written != text:
            self._note_generation_prompt(text, written, end)
        self._append(bridge, written)

    def _append_turn_by_ids(self, answers: Sequence[Message], prior: PriorConversation) -> bool:
        """Append the turn if all tokens, including this turn's, equal those in one pass. Otherwise False: compare texts."""
        if self.ids != self.one_pass_ids[: len(self.ids)]:
            return False
        candidates: list[tuple[int, EncodedMessages]] = []
        following = frozenset(self.one_pass_ids[len(self.ids) :])
        for stop in self._renderer.stop_token_ids:
            if stop not in following:  # most of them, for a model with many
                continue
            bridge = self._renderer.encode_bridge(stop, answers, prior)
            if not bridge.token_ids:
                continue
            place = _find_ids(self.one_pass_ids, [stop, *bridge.token_ids], len(self.ids))
            if place >= 0:
                candidates.append((place + 1, bridge))
        if not candidates:
            return False
        place, bridge = min(candidates, key=lambda candidate: candidate[0])
        self.ids = self.one_pass_ids[: place + len(bridge.token_ids)]
        self.encoded_tokens += len(bridge.token_ids)
        self._at = len(self._renderer.decode(self.ids))
        return True

    def _both_texts(self, text: str, answers: Sequence[Message]) -> str:
        """The expected text and the text in one pass, aligned at the answer, from their first difference on."""
        content = str(answers[0].get("content"))
        place, own = self.one_pass.find(content, self._at), text.find(content)
        if place < 0 or own < 0:
            return f"expected {text[:_SHOWN]!r}"
        if not self.one_pass[:place].endswith(text[:own]):
            return f"expected {text[:_SHOWN]!r} but got {self.one_pass[max(self._at, place - own - 10) :][:_SHOWN]!r}"
        after, written = text[own:], self.one_pass[place:]
        same = next((n for n, (a, b) in enumerate(zip(after, written + "\0" * len(after), strict=False)) if a != b), 0)
        start = max(0, same - len(content))
        return f"expected {after[start:][:_SHOWN]!r} but got {written[start:][:_SHOWN]!r}"

    def append_last_turn(self) -> None:
        """Append the model's last turn, up to its stop token."""
        if self.ids == self.one_pass_ids[: len(self.ids)]:
            rest = self.one_pass_ids[len(self.ids) :]
            end = next((n for n, token in enumerate(rest, 1) if token in self._renderer.stop_token_ids), len(rest))
            self.ids += rest[:end]
            return
        text = self.one_pass[self._at :]
        stops = [self._renderer.decode([token]) for token in self._renderer.stop_token_ids]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        self.ids += self._renderer.encode(text[: min(ends)] if ends else text)

    def _append(self, encoded: EncodedMessages, written: str) -> None:
        self.ids += encoded.token_ids
        self.encoded_tokens += len(encoded.token_ids)
        self._at += len(written)

    def _with_other_end(self, turn: str, stop: int) -> str:
        """The turn with `stop` at its end, as the model would have ended the turn."""
        token = list(self._renderer.encode(turn))[-1]
        written = self._renderer.decode([token]) if self._renderer.is_special(token) else ""
        own = self._renderer.decode([stop])
        self._note(f"ends the last turn with {own!r} and earlier turns with {written!r}", harmless=True)
        return turn.removesuffix(written) + own

    def _note(self, difference: str, *, harmless: bool) -> None:
        """Keep the first difference; a harmful difference replaces a harmless difference."""
        if not self.differs or (self.harmless and not harmless):
            self.differs, self.harmless = difference, harmless

    def _note_generation_prompt(self, text: str, bare: str, at: int) -> None:
        """Record that the generation prompt at the end of `text` differs from the text in one pass at index `at`."""
        mark = text[len(bare) :]
        if bare != text and self.one_pass.startswith(bare, at):
            after = self.one_pass[at + len(bare) : at + len(bare) + len(mark)]
            self._note(
                f"opens reasoning in the generation prompt ({mark!r}) and writes the turn without it ({after!r}...)",
                harmless=True,
            )
            return
        same = next((n for n, (a, b) in enumerate(zip(text, self.one_pass, strict=False)) if a != b), 0)
        self._note(
            f"writes {self.one_pass[same : same + _SHOWN]!r} in one pass and {text[same : same + _SHOWN]!r} turn by turn",
            harmless=False,
        )


def _find_ids(ids: Sequence[int], part: Sequence[int], at: int) -> int:
    """The place of `part` in `ids` from `at` on; -1 if it is not there."""
    part, last = list(part), len(ids) - len(part)
    return next((n for n in range(at, last + 1) if ids[n : n + len(part)] == part), -1)


def _adaptations(messages: Sequence[Message], planned: Sequence[Message]) -> set[str]:
    """How messages were changed before the template received them."""
    roles, new_roles = [message["role"] for message in messages], [message["role"] for message in planned]
    adaptations = {f"{role} as user" for role in dict.fromkeys(roles) if role != "user" and role not in new_roles}
    if len(planned) < len(messages):
        adaptations.add("neighbours as one message")
    return adaptations


# template, tokenizer and config files

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
    return Check(
        name, "fail", renderer.undescribed_problem(undescribed(schemas, "") or ["of the rows or the MCP servers"])
    )


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


# headers and contents

_MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>")
"""Texts in the headers of model families that must be special tokens."""
_CONTENT = f"  {probe_word(7)}\n\n<b>&amp;</b> \"two\" 'one' {{x}} ä 你 " + "word " * 800 + f"{probe_word(8)}\n "
"""A content that a template must not change: quotes, markup, white space at both ends, and a long text."""
_ROLES = ("system", "user", "assistant", "tool")


def headers(renderer: Renderer) -> Check:
    """Whether assistant messages begin with the generation prompt, headers are special tokens, and there is one BOS token."""
    for find_problem in (_prompt_problem, _bos_problem, _mark_problem):
        if problem := find_problem(renderer):
            return Check("headers", "fail", problem)
    prompt = _prompt(renderer)[1]
    if not prompt:
        return Check("headers", "ok", "assistant messages have no header, so no generation prompt is needed")
    return Check("headers", "ok", f"assistant messages begin with the generation prompt {prompt!r}")


def _prompt(renderer: Renderer) -> tuple[str, str, str]:
    """`(text before the generation prompt, generation prompt, text of the conversation up to the assistant's content)`."""
    template = renderer.template
    asked, prompted = (template.render([QUESTION], add_generation_prompt=cue) for cue in (False, True))
    answered = template.render([QUESTION, assistant_message(PLACEHOLDER)], add_generation_prompt=False).partition(
        PLACEHOLDER
    )[0]
    short = min(len(asked), len(prompted))
    same = next((n for n in range(short) if asked[n] != prompted[n]), short)
    return prompted[:same], prompted[same:], answered


def _prompt_problem(renderer: Renderer) -> str:
    """The problem with the generation prompt, or an empty text."""
    before, prompt, answered = _prompt(renderer)
    if not prompt:
        header = (
            renderer.profile.reasoning.marks.without_reasoning_opening(answered[len(before) :])
            if answered.startswith(before)
            else ""
        )
        if not re.sub(rf"{renderer.profile.reasoning.marks.scaffold}|\s", "", header):
            return ""
        return (
            f"the template writes {header!r} before an assistant message, but writes nothing if add_generation_prompt is true, "
            f"so the model would generate without its header. Add {{% if add_generation_prompt %}}...{{% endif %}} to its end"
        )
    if answered.startswith(
        (before + prompt, before + renderer.profile.reasoning.marks.without_reasoning_opening(prompt))
    ):
        return ""
    place = next((n for n, (a, b) in enumerate(zip(before + prompt, answered, strict=False)) if a != b), len(answered))
    start = min(place, len(before))
    return (
        f"the generation prompt is {prompt!r}, but an assistant message begins with {answered[start:][:60]!r}. The model would "
        f"be trained with another header than the header of its earlier turns. Make the two texts equal"
    )


def _bos_problem(renderer: Renderer) -> str:
    """The problem if the conversation begins with two BOS tokens, or an empty text."""
    tokenizer: Any = renderer.tokenizer
    bos, ids = (
        tokenizer.bos_token_id,
        list(renderer.encode(renderer.template.render([QUESTION], add_generation_prompt=True))),
    )
    if bos is None or ids[:2] != [bos, bos]:
        return ""
    return (
        f"the template begins a conversation with two BOS tokens {tokenizer.bos_token!r} ({bos}). There must be one: write "
        f"bos_token once"
    )


def _mark_problem(renderer: Renderer) -> str:
    """The problem if a header that looks like a special token is encoded as several tokens, or an empty text."""
    template = renderer.template
    turns: list[Message] = [QUESTION, assistant_message("Yes."), QUESTION]
    try:
        text = template.render(
            template.planned_opening([{"role": "system", "content": "Words."}, *turns]), add_generation_prompt=True
        )
    except TemplateError:
        text = template.render(turns, add_generation_prompt=True)
    pieces = {mark: list(renderer.encode(mark)) for mark in dict.fromkeys(_MARK.findall(text))}
    broken = [
        f"{mark!r} ({len(ids)} tokens)"
        for mark, ids in pieces.items()
        if len(ids) > 1 and not any(renderer.decode([token]).strip() == mark for token in ids)
    ]
    if not broken:
        return ""
    return (
        f"the template writes headers that are not special tokens of this tokenizer: {', '.join(broken)}. Use the model's own "
        f"template and tokenizer, or add the headers to the tokenizer as special tokens before training"
    )


def contents(renderer: Renderer) -> Check:
    """Whether the template writes the contents of messages unchanged."""
    name, trimmed, changed = "contents", list[str](), list[str]()
    for role in _ROLES:
        try:
            text = _written(renderer, role)
        except TemplateError:
            continue  # such messages are converted for the template, which `template.continuing` reports
        if _holds(text, _CONTENT):
            continue
        if _holds(text, _CONTENT.strip()):
            trimmed.append(role)
        else:
            changed.append(f"{role} ({_difference(text)})")
    if changed:
        return Check(
            name,
            "fail",
            f"the template changes the contents of messages with the roles {', '.join(changed)}, so the model would not see the "
            f"original contents. Let the template write message.content unchanged",
        )
    if "assistant" in trimmed:
        return Check(
            name,
            "note",
            f"the template removes white space at both ends of messages with the roles {', '.join(trimmed)}. In training, "
            f"the white space in a sampled completion is kept; a server that renders the conversation again removes it",
        )
    if trimmed:
        return Check(
            name,
            "note",
            f"the template removes white space at both ends of messages with the roles {', '.join(trimmed)}",
        )
    return Check(name, "ok", "the contents of messages are written unchanged")


def _written(renderer: Renderer, role: str) -> str:
    """The text that the template writes for a message with this role and `_CONTENT`. Raises TemplateError if it refuses it."""
    template = renderer.template
    message: Message = {"role": role, "content": _CONTENT}
    if role == "tool":
        message |= {"tool_call_id": "callprob0", "name": "probe_tool"}
        plan = template.plan([message])
        return template.text_after_turn(plan.apply([message]), plan.base_turns[0])
    if role == "assistant":
        return template.render([QUESTION, message, QUESTION], add_generation_prompt=True)
    return template.render([message] if role == "user" else [message, QUESTION], add_generation_prompt=True)


def _holds(text: str, content: str) -> bool:
    """Whether `text` contains `content`, unchanged or encoded as JSON."""
    if content in text:
        return True
    encoded = [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    encoded += [json.dumps(json.dumps(content))[3:-3]]
    # Jinja's tojson filter escapes these four characters for HTML
    html = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})
    return any(form in text or form.translate(html) in text for form in encoded)


def _difference(text: str) -> str:
    """The first place where the written text differs from `_CONTENT`."""
    start = text.find(probe_word(7))
    if start < 0:
        return "the content is missing"
    wanted, written = _CONTENT.lstrip(), text[start:]
    same = next((n for n, (a, b) in enumerate(zip(wanted, written, strict=False)) if a != b), len(written))
    return f"{wanted[same:][:20]!r} becomes {written[same:][:20]!r}"


# the start of a run

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


@dataclass(frozen=True, slots=True)
class Once:
    """Makes checks that depend on nothing but the renderer and one argument: those that have passed once in this process for the
    same `key` are not made again. A notebook that trains several times starts each time with the same tokenizer and template."""

    key: tuple[str, str] | None = None
    """The fingerprint of the tokenizer, with its template, and what the renderer was made with; None: make all checks."""

    @classmethod
    def of(cls, renderer: Renderer, tokenizer: str | None) -> Once:
        """`tokenizer` is the fingerprint of the renderer's tokenizer, or None if it is not known."""
        options = renderer.made_with
        return cls() if tokenizer is None or options is None else cls((tokenizer, options))

    def __call__(self, name: str, check: Callable[[], Check], given: object = None) -> Check:
        """The result of `check` with the argument `given`. A TurnwiseError becomes a failed check."""
        place = None if self.key is None else (*self.key, name, given)
        if place in _passed:
            return _passed[place]
        result = _tried(name, check)
        # other results may name the place of the model
        if place is not None and result.status == "ok" and len(_passed) < _MOST_PASSED:
            _passed[place] = result
        return result


_passed: dict[Hashable, Check] = {}
_MOST_PASSED = 1000
"""Ten for each tokenizer with its options."""


def template_checks(
    renderer: Renderer,
    config: Config | None = None,
    *,
    directory: Directory | None = None,
    tools: bool = False,
    rows: Sequence[Row] = (),
    once: Once = Once(),
) -> Iterator[Check]:
    """The checks of the template, the tokenizer and, with `directory`, the model's config files, in order.

    `tools`: the conversations offer tools; with a recipe, those of the recipe count too. `rows` are the recipe's rows, as far as
    they are known. A kind of turn that the recipe does not have cannot fail. `once` makes the checks that depend on nothing else
    than the renderer.
    """
    has_tools = tools or (config is not None and (bool(config.tools) or config.mcp.servers is not None))
    known_format = bool(renderer.profile.tool_format_name)
    yield once("headers", lambda: headers(renderer))
    yield once("contents", lambda: contents(renderer))
    for kind in _KINDS:
        check = once(kind, lambda kind=kind: continuing(renderer, [kind])[0])
        yield check if config is None or _occurs(kind, config, has_tools) else _no_failure(check)
    yield _tried("thinking", lambda: thinking(renderer, None if config is None else config.thinking))
    if directory is not None:
        yield _tried("stop tokens", lambda: stops(renderer, directory))
    yield once("tool calls", lambda: tool_calls(renderer, wanted=has_tools), has_tools)
    if has_tools or known_format:
        yield _tried("tools shown", lambda: _shown(renderer, config, has_tools, rows))
    tries_calls = known_format and (has_tools or config is None)
    yield once("round trip", lambda: round_trip(renderer, tools=tries_calls), tries_calls)
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
    tokenizer: str | None = None,
) -> list[str]:
    """Notes on the model's template, to be printed before the run.

    `source` is the model directory; None: the config files are not checked. `tools` is true if there are tools that the recipe
    does not name, for example in the rows. `training`: the checks `mask`, `credit` and `rows` are made too. `tokenizer` is the
    fingerprint of the renderer's tokenizer: checks that this process has made of an equal one are not made again. Raises
    TemplateError if a check fails that `override_checks` does not name, or the template requires tools and there are none;
    ConfigError if an option of images has no effect.
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
    once = Once.of(renderer, tokenizer)
    checks = [*template_checks(renderer, config, directory=directory, tools=tools, rows=rows, once=once)]
    if training:
        from turnwise.doctor.credit import conserved  # torch

        # conversations run in an event loop of their own, and this thread may have one
        with ThreadPoolExecutor(1) as thread:
            for name, check in (("mask", masked), ("credit", conserved)):
                run = thread.submit(once, name, functools.partial(check, renderer, config.thinking), config.thinking)
                checks.append(run.result())
        # processing images takes long, and the run does it for all rows
        images = [row for row in rows if has_media(row.messages)][:_READY]
        texts = [row for row in rows if not has_media(row.messages)][:_OPENED]
        checks.append(_rows_check(config, [*images, *texts], renderer))
    _refuse_failures(config, checks)
    notes = override_notes(checks, config.override_checks)
    if directory is None and (problem := stops_note(renderer)):
        notes.append(f"stop tokens: {problem}")
    shown = [check for check in checks if check.status == "note" and check.name not in _QUIET]
    if config.limits.turns == 1:  # no message follows the model's turn
        shown = [check for check in shown if check.name not in (*_KINDS, "thinking")]
    return notes + [f"{check.name}: {check.text}" for check in shown if _matters(check, has_tools)]


def _rows_check(config: Config, rows: Sequence[Row], renderer: Renderer) -> Check:
    """`openings` at the start of a run: an option without effect is an error there, which `override_checks` cannot allow."""
    try:
        return openings(config, rows, renderer)
    except ConfigError:
        raise
    except TurnwiseError as error:
        return wrong("rows", error)


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
    schemas = [] if elsewhere or renderer.profile.messages.describes_tools else assembly.tool_schemas(config)
    check = tools_shown(
        renderer, wanted=True, schemas=schemas, rows=rows, described=config.tool_calls.describe == "system"
    )
    in_rows = not config.tools and config.mcp.servers is None  # each row has its own
    if check.status == "fail" and (own or elsewhere or in_rows or not rows):
        overridden = check.name in config.override_checks
        then = "is allowed by override_checks" if overridden else "fails"
        return replace(
            check, status="note", text=f"{check.text}. A conversation whose prompt does not show its tools {then}"
        )
    return check


def _tried(name: str, check: Callable[[], Check]) -> Check:
    """The result of `check`. A TurnwiseError becomes a failed check."""
    try:
        return check()
    except TurnwiseError as error:
        return wrong(name, error)
