"""A segment held against one `apply_chat_template` pass over its messages: the sanity check, and the `branch` policy.

Both ask the same question and take nothing from how the segment was made: no bridge and no base conversation. The messages are
rendered and encoded once, and token ids are compared. Only where they differ, `token_differences` finds out from the texts
where and why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.chat.renderer import EncodedMessages, Renderer
from turnwise.chat.token_differences import Context, Difference, Reading, Words, differences, recut, told
from turnwise.errors import TemplateError
from turnwise.types import Message, Segment, ToolSchema

__all__ = ["Held", "OnePass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A segment, and the messages that it holds."""

    segment: Segment
    messages: Sequence[Message]
    """As the template is given them. The last is the model's turn."""
    tools: Sequence[ToolSchema] = ()
    texts: Mapping[int, str] = field(default_factory=dict)
    """The text of each context, by its place in the segment: as it was encoded, which is not always what its tokens decode to."""
    injected: Collection[int] = ()
    """Places in the segment where an environment's words begin that stand in a turn of the model."""
    called: Collection[int] = ()
    """The numbers of the model's turns in the segment whose calls the template is given as calls, counted from 0."""


class OnePass:
    """Compares segments with what one renderer's template writes."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._reading = Reading(
            encode=renderer.encode,
            decode=renderer.decode,
            special=renderer.special,
            plain=renderer.without_thoughts,
            thoughts=self._thoughts,
            calls=self._calls,
        )

    def drift(self, held: Held, *, served: bool) -> str | None:
        """Where the segment leaves what the template writes in one pass, for people; None where nowhere.

        `served`: the prompt of the segment's last turn must be the one that a server renders, thoughts included (the policy
        `branch`). Otherwise thoughts that the template leaves out are no difference: another policy has decided about them.
        """
        if self._renderer.sanity == "disable":
            return None
        try:
            if served:
                return self._prompt_drift(held)
            whole = self._renderer.render_text(held.messages, held.tools, cue=False)
        except TemplateError as error:  # it took them turn by turn
            return f"in one pass, {error}"
        ids, own = self._renderer.encode_uncached(whole), list(held.segment.token_ids)
        if own == list(ids[: len(own)]):
            return None
        return self._explained(self._runs(held), whole, ids, thoughts=False)

    def serves_otherwise(self, held: Held, heard: Sequence[Message], bridge: EncodedMessages) -> bool:
        """Whether a server would show the model another prompt than the segment with the bridge to `heard` behind it.

        How the model's own words are written (the white space in a call, say) does not count: what it sampled stays.
        """
        whole = self._renderer.render_text([*held.messages, *heard], held.tools, cue=True)
        runs = [*self._runs(held), self._context(bridge.text, bridge.token_ids, len(held.segment))]
        if not whole.endswith(bridge.text):
            return True
        found = differences(runs, whole, mode="strict", reading=self._reading)
        return any(one.kind == "thoughts" or isinstance(one.run, Context) for one in found)

    def _prompt_drift(self, held: Held) -> str | None:
        """The last turn's prompt against the served one, and the last turn itself against what the template writes for it."""
        runs = self._runs(held)
        last = runs[-1]
        prompt = self._renderer.render_text(held.messages[:-1], held.tools, cue=True)
        ids = self._renderer.encode_uncached(prompt)
        if list(held.segment.token_ids[: last.start]) != list(ids):
            found = self._explained(runs[:-1], prompt, ids, thoughts=True)
            if found is not None:
                return found
        whole = self._renderer.render_text(held.messages, held.tools, cue=False)
        context = self._context(prompt, ids, 0)
        if not whole.startswith(context.bare):
            return None  # the last turn changes what the template writes before it; its prompt is what counts
        return self._explained([context, last], whole, None, thoughts=False)

    def _explained(
        self, runs: Sequence[Context | Words], whole: str, ids: Sequence[int] | None, *, thoughts: bool
    ) -> str | None:
        mode = self._renderer.sanity
        for one in differences(runs, whole, mode=mode, reading=self._reading):
            if thoughts or one.kind == "other":
                return told(one, self._reading)
        if mode == "strict" and ids is not None and (run := recut(runs, ids)) is not None:
            return f"{told(Difference('other', run, run.text, run.text), self._reading)}: the same text in other tokens"
        return None

    def _runs(self, held: Held) -> list[Context | Words]:
        """The segment as what was said by turns: context and the model's words, those among them that were put into its mouth."""
        renderer, segment, injected = self._renderer, held.segment, held.injected
        runs: list[Context | Words] = []
        start, turns, number = 0, segment.turn, 0
        for end in range(1, len(segment) + 1):
            if end < len(segment) and end not in injected and (turns[end] < 0) == (turns[end - 1] < 0):
                continue
            words = turns[start] >= 0 or start in injected  # what begins there belongs to a turn of the model
            if words and end < len(segment) and (turns[end] >= 0 or end in injected):
                continue  # the turn goes on
            ids = list(segment.token_ids[start:end])
            if not words:
                runs.append(self._context(held.texts.get(start), ids, start))
            else:
                closed = turns[end - 1] >= 0 and ids[-1] in renderer.stop_token_ids
                ids = ids[:-1] if closed else ids
                runs.append(
                    Words(
                        renderer.decode(ids),
                        ids,
                        start,
                        compared=renderer.template.takes != "fields",
                        opened=bool(runs) and bool(renderer.marks.open_thought(runs[-1].text)),
                        closed=closed,
                        calls=number in held.called,
                    )
                )
                number += 1
            start = end
        return runs

    def _context(self, text: str | None, ids: Sequence[int], start: int) -> Context:
        text = self._renderer.decode(ids) if text is None else text
        bare = self._renderer.marks.without_open_thought(text)
        bare_ids = ids if bare == text else ids[: len(ids) - len(self._renderer.encode(text[len(bare) :]))]
        return Context(text, ids, start, bare=bare, bare_ids=bare_ids)

    def _thoughts(self, text: str, opened: bool) -> Sequence[str]:
        renderer = self._renderer
        return [one.text for one in renderer.marks.thoughts(text, opened=opened)] if renderer.thinks else []

    def _calls(self, text: str, opened: bool) -> object:
        """The calls in a turn's text, and its words without white space and marks of the template."""
        renderer = self._renderer
        read = renderer.tool_format.parse(text, thinking=opened, marks=renderer.marks)
        tokens = (token for token in renderer.encode(read.content) if token not in renderer.special)
        words = "".join(renderer.decode(list(tokens)).split())
        return [(call.name, dict(call.arguments), call.error is None) for call in read.calls], words
