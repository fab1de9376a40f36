"""Whether a template can be continued: conversations written turn by turn, held against the same written in one pass.

The model's part is played with what the template itself writes for it, so whatever differs is the template's doing: a text
that it changes when the conversation goes on, or a message that it takes only in another shape. The sweep over templates
(docs/templates.md) and `turnwise doctor` ask the same questions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.chat.base_conversations import Before
from turnwise.chat.probes import probe_call
from turnwise.chat.renderer import EncodedMessages, Renderer
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["PROBE_TOOL", "SCENARIOS", "Finding", "Scenario", "examine"]

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

_SHOWN = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A conversation: the opening, then by turns what the model says and what it is answered."""

    name: str
    rounds: Sequence[tuple[Message, Sequence[Message]]]
    """The model's message and the answers to it; the last one has none."""
    opening: Sequence[Message] = (
        {"role": "system", "content": "system-words"},
        {"role": "user", "content": "question-words"},
    )

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The tools on offer."""
        return [PROBE_TOOL] if any(message.get("tool_calls") for message, _ in self.rounds) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of a scenario."""

    scenario: str
    exact: bool
    """Whether the tokens are those of the one pass."""
    differs: str = ""
    """Where they are not: what the template writes when the conversation goes on, and what it wrote before."""
    harmless: bool = False
    """Whether only what the model itself has the say in differs: the end of its turn, its thoughts, how a text is cut."""
    handed: tuple[str, ...] = ()
    """What had to be handed over in another shape: "system as user", "neighbours of one role as one message"."""
    refused: str = ""
    """Why the template cannot do it at all."""
    encoded: int = 0
    """Tokens that were encoded for the context."""
    kept: int = 0
    """Tokens of the whole conversation."""
    ids: Sequence[int] = field(default=(), repr=False)


def _says(number: int) -> Message:
    return {"role": "assistant", "content": f"words-{number}"}


def _asks(number: int, *, calls: int = 1) -> tuple[Message, list[Message]]:
    turn = probe_call(*({"text": f"argument-{number}-{call}"} for call in range(calls)))
    answers: list[Message] = []
    for call, asked in enumerate(turn["tool_calls"]):
        asked["id"] = f"callpr{number}{call}x"
        answers.append(
            {"role": "tool", "tool_call_id": asked["id"], "name": "probe_tool", "content": f"result-{number}-{call}"}
        )
    return turn, answers


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="single turn", rounds=[(_says(0), [])]),
    Scenario(name="tool round", rounds=[_asks(0), (_says(1), [])]),
    Scenario(name="parallel calls", rounds=[_asks(0, calls=2), (_says(1), [])]),
    Scenario(name="retry by user", rounds=[(_says(0), [{"role": "user", "content": "once-more"}]), (_says(1), [])]),
    Scenario(name="retry by system", rounds=[(_says(0), [{"role": "system", "content": "once-more"}]), (_says(1), [])]),
    Scenario(name="three tool rounds", rounds=[_asks(0), _asks(1), _asks(2), (_says(3), [])]),
)


def examine(renderer: Renderer, scenario: Scenario) -> Finding:
    """Hold a scenario turn by turn and in one pass. Never raises TemplateError: what the template refuses is a finding."""
    try:
        return _examine(renderer, scenario)
    except TemplateError as error:
        return Finding(scenario=scenario.name, exact=False, refused=str(error))


def _examine(renderer: Renderer, scenario: Scenario) -> Finding:
    template = renderer.template
    tools = (scenario.tools if template.call_shape is not None else []) or template.probe_tools
    opening = renderer.encode_opening(scenario.opening, tools)
    messages, handed = list(opening.messages), _shapes(scenario.opening, opening.messages)
    stands: list[Before] = []
    for said, answers in scenario.rounds:
        # a template that writes no calls is spoken to in words
        asks = said.get("tool_calls") and template.call_shape is None
        messages.append({"role": "assistant", "content": "call-words"} if asks else said)
        if answers:
            stands.append(Before.of(list(messages), tools=bool(tools)))
            given = template.plan(answers, stands[-1]).apply(answers)
            handed |= _shapes(answers, given)
            messages.extend(given)
    held = _Held(renderer, template.render(messages, cue=False, tools=tools))
    held.differs = _lost(messages, held.whole)
    held.append(opening)
    for answers, before in zip((answers for _, answers in scenario.rounds if answers), stands, strict=True):
        held.turn(answers, before)
    held.last()
    if not held.differs and held.ids != held.whole_ids[: len(held.ids)]:
        held.differs, held.harmless = "cuts the same text into other tokens in one pass", True
    return Finding(
        scenario=scenario.name,
        exact=not held.differs,
        differs=held.differs,
        harmless=held.harmless,
        handed=tuple(sorted(handed)),
        encoded=held.encoded,
        kept=len(held.ids),
        ids=held.ids,
    )


def _lost(messages: Sequence[Message], whole: str) -> str:
    """What the template leaves out of the messages it was given."""
    for message in messages:
        calls = [call["function"]["arguments"]["text"] for call in message.get("tool_calls", [])]
        lost = [text for text in calls if text not in whole]
        if lost and len(lost) < len(calls):
            return f"leaves out all calls of a turn but the first {len(calls) - len(lost)}"
        if lost or not all(text in whole for text in str(message.get("content") or "").split()):
            return f"leaves out what a {message['role']!r} message says"
    return ""


class _Held:
    """A conversation that is written down turn by turn, beside the text of the one pass."""

    def __init__(self, renderer: Renderer, whole: str) -> None:
        self._renderer = renderer
        self.whole_ids = list(renderer.encode_uncached(whole))
        # as the tokens read: some tokenizers write a blank before every stretch of text
        self.whole = renderer.decode(self.whole_ids)
        self.ids: list[int] = []
        self.differs = ""
        self.harmless = False
        self.encoded = 0
        self._at = 0

    def append(self, piece: EncodedMessages) -> None:
        """The opening."""
        text = self._renderer.decode(piece.token_ids)
        bare = self._renderer.marks.without_open_thought(text)
        if not self.whole.startswith(text):
            self._cue_differs(text, bare, 0)
        self._take(piece, text if self.whole.startswith(text) else bare)

    def turn(self, answers: Sequence[Message], before: Before) -> None:
        """What the model says next, and what it is answered. `before`: what stands in the conversation, that turn included."""
        if self._turn_by_ids(answers, before):
            return
        decode = self._renderer.decode
        found: list[tuple[bool, int, int, EncodedMessages, str]] = []
        for order, stop in enumerate(self._renderer.stop_token_ids):
            piece = self._renderer.encode_bridge(stop, answers, before)
            text = decode(piece.token_ids)
            for written in dict.fromkeys([text, self._renderer.marks.without_open_thought(text)]):
                end = self.whole.find(written, self._at)
                if end >= 0:
                    ends = self.whole[self._at : end].endswith(decode([stop]))
                    found.append((not ends, order, end, piece, written))
                    break
        if not found:
            piece = self._renderer.encode_bridge(self._renderer.stop_token_ids[0], answers, before)
            text = decode(piece.token_ids)
            raise TemplateError(
                f"writes other words around the answers when the conversation goes on: {self._instead(text, answers)}"
            )
        other, order, end, piece, written = min(found, key=lambda one: one[:3])
        stop = self._renderer.stop_token_ids[order]
        said = self.whole[self._at : end]
        if other:
            said = self._ended_otherwise(said, stop)
        self.ids += self._renderer.encode(said)
        self._at = end
        text = decode(piece.token_ids)
        if written != text:
            self._cue_differs(text, written, end)
        self._take(piece, written)

    def _turn_by_ids(self, answers: Sequence[Message], before: Before) -> bool:
        """The same where the tokens are those of the one pass so far and go on so; False where texts must tell why not."""
        if self.ids != self.whole_ids[: len(self.ids)]:
            return False
        found: list[tuple[int, EncodedMessages]] = []
        for stop in self._renderer.stop_token_ids:
            piece = self._renderer.encode_bridge(stop, answers, before)
            place = _find(self.whole_ids, [stop, *piece.token_ids], len(self.ids)) if piece.token_ids else -1
            if place >= 0:
                found.append((place + 1, piece))
        if not found:
            return False
        place, piece = min(found, key=lambda one: one[0])
        self.ids = self.whole_ids[: place + len(piece.token_ids)]
        self.encoded += len(piece.token_ids)
        self._at = len(self._renderer.decode(self.ids))
        return True

    def _instead(self, text: str, answers: Sequence[Message]) -> str:
        """The text that was expected, and what stands there in the one pass: from where they differ, laid over the answer."""
        content = str(answers[0].get("content"))
        place, own = self.whole.find(content, self._at), text.find(content)
        if place < 0 or own < 0:
            return f"not {text[:_SHOWN]!r}"
        if not self.whole[:place].endswith(text[:own]):
            return f"not {text[:_SHOWN]!r} but {self.whole[max(self._at, place - own - 10) :][:_SHOWN]!r}"
        after, written = text[own:], self.whole[place:]
        same = next((n for n, (a, b) in enumerate(zip(after, written + "\0" * len(after), strict=False)) if a != b), 0)
        start = max(0, same - len(content))
        return f"not {after[start:][:_SHOWN]!r} but {written[start:][:_SHOWN]!r}"

    def last(self) -> None:
        """The model's last turn, up to its stop token."""
        if self.ids == self.whole_ids[: len(self.ids)]:
            rest = self.whole_ids[len(self.ids) :]
            end = next((n for n, token in enumerate(rest, 1) if token in self._renderer.stop_token_ids), len(rest))
            self.ids += rest[:end]
            return
        text = self.whole[self._at :]
        stops = [self._renderer.decode([token]) for token in self._renderer.stop_token_ids]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        self.ids += self._renderer.encode(text[: min(ends)] if ends else text)

    def _take(self, piece: EncodedMessages, written: str) -> None:
        self.ids += piece.token_ids
        self.encoded += len(piece.token_ids)
        self._at += len(written)

    def _ended_otherwise(self, said: str, stop: int) -> str:
        """The turn as the model would have ended it."""
        token = list(self._renderer.encode(said))[-1]
        written = self._renderer.decode([token]) if self._renderer.is_special(token) else ""
        own = self._renderer.decode([stop])
        self._note(f"ends a turn that is not the last with {written!r}, and the last one with {own!r}", harmless=True)
        return said.removesuffix(written) + own

    def _note(self, what: str, *, harmless: bool) -> None:
        """Keep the first difference; one that is not harmless takes the place of one that is."""
        if not self.differs or (self.harmless and not harmless):
            self.differs, self.harmless = what, harmless

    def _cue_differs(self, text: str, bare: str, at: int) -> None:
        mark = text[len(bare) :]
        if bare != text and self.whole.startswith(bare, at):
            after = self.whole[at + len(bare) : at + len(bare) + len(mark)]
            self._note(
                f"opens a thought in the cue ({mark!r}) and writes the turn without it ({after!r}...)", harmless=True
            )
            return
        same = next((n for n, (a, b) in enumerate(zip(text, self.whole, strict=False)) if a != b), 0)
        self._note(
            f"writes {self.whole[same : same + _SHOWN]!r} where it wrote {text[same : same + _SHOWN]!r}", harmless=False
        )


def _find(whole: Sequence[int], part: Sequence[int], at: int) -> int:
    """Where the tokens of a part stand in the one pass from `at` on, or -1."""
    part, last = list(part), len(whole) - len(part)
    return next((n for n in range(at, last + 1) if whole[n : n + len(part)] == part), -1) if part else -1


def _shapes(asked: Sequence[Message], given: Sequence[Message]) -> set[str]:
    roles, others = [message["role"] for message in asked], [message["role"] for message in given]
    found = {f"{role} as user" for role in dict.fromkeys(roles) if role != "user" and role not in others}
    if len(given) < len(asked):
        found.add("neighbours as one message")
    return found
