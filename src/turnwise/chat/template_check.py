"""Checks whether conversations can be continued with a template: renders them turn by turn and in one pass, and compares both.

The model's turns are the text that the template itself renders for them. Every difference therefore comes from the template:
text that it changes when the conversation continues, or a message that it accepts only in another form. The table of templates
(docs/templates.md) and `turnwise doctor` use this check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.chat.base_conversations import PriorConversation
from turnwise.chat.probes import probe_call
from turnwise.chat.renderer import EncodedMessages, Renderer
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["PROBE_TOOL", "SCENARIOS", "Finding", "Scenario", "check_scenario"]

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
    tools = (scenario.tools if template.writes_calls else []) or template.messages.probe_tools()
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
        for stop in self._renderer.stop_token_ids:
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
