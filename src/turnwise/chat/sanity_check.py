"""The tokenization sanity check: a segment compared with one `apply_chat_template` pass over its messages.

The same comparison decides for the policy `branch` whether a new segment must begin. It uses nothing of how the segment was
made: no bridge and no base conversation. The messages are rendered and encoded once, and token ids are compared. Only if they
differ, `token_differences` compares the texts and says where and why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.chat.renderer import EncodedMessages, Renderer
from turnwise.chat.template_profile import TemplateProblem
from turnwise.chat.token_differences import (
    ContextRun,
    Difference,
    TextReader,
    TurnRun,
    find_differences,
    find_retokenized,
    mismatch_of,
)
from turnwise.errors import TemplateError
from turnwise.types import Message, MismatchKind, Segment, TemplateMismatch, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMessages:
    """A segment with the messages that it encodes."""

    segment: Segment
    messages: Sequence[Message]
    """As the template receives them. The last one is the model's turn."""
    tools: Sequence[ToolSchema] = ()
    context_texts: Mapping[int, str] = field(default_factory=dict)
    """The text of each run of context, by its place in the segment. Decoding its tokens does not always give the same text."""
    injected_places: Collection[int] = ()
    """Places in the segment where text begins that an environment has written into a turn of the model."""
    turns_with_calls: Collection[int] = ()
    """The model's turns in the segment whose calls are given to the template as calls, counted from 0."""


class SanityCheck:
    """Compares segments with the text that one renderer's template writes for their messages."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._reader = TextReader(
            encode=renderer.encode,
            decode=renderer.decode,
            special=renderer.special,
            without_reasoning=renderer.profile.reasoning.without_reasoning,
            reasoning_texts=self._reasoning_texts,
            calls=self._calls,
            fields=self._fields,
        )

    def compare(self, checked: SegmentMessages, *, as_served: bool) -> TemplateMismatch | None:
        """The first difference between the segment and the template's one pass; None if there is none.

        `as_served`: the prompt of the segment's last turn must be the prompt that a server renders, reasoning included (the
        policy `branch`). Otherwise reasoning that the template leaves out is no difference, since the other policies keep or
        remove it on purpose.
        """
        if self._renderer.sanity == "disable":
            return None
        try:
            if as_served:
                return self._prompt_mismatch(checked)
            text = self._renderer.render_text(checked.messages, checked.tools, add_generation_prompt=False)
        except TemplateError as error:  # the template accepted the messages turn by turn, and refuses them together
            return TemplateMismatch(MismatchKind.TEMPLATE_ERROR, f"in one pass, {error}")
        ids, own = self._renderer.encode_conversation(text), list(checked.segment.token_ids)
        if own == list(ids[: len(own)]):
            return None
        return self._first_difference(self._runs(checked), text, ids, count_reasoning=False)

    def served_prompt_differs(
        self, checked: SegmentMessages, messages: Sequence[Message], bridge: EncodedMessages
    ) -> bool:
        """Whether a server would give the model another prompt than the segment followed by the bridge to `messages`.

        How the template writes the model's own words (the white space in a call, for example) does not count: the sampled
        tokens stay.
        """
        conversation = [*checked.messages, *messages]
        text = self._renderer.render_text(conversation, checked.tools, add_generation_prompt=True)
        if not text.endswith(bridge.text):
            return True
        runs = [*self._runs(checked), self._context_run(bridge.text, bridge.token_ids, len(checked.segment))]
        differences = find_differences(runs, text, mode="strict", reader=self._reader)
        return any(
            difference.kind == "reasoning" or isinstance(difference.run, ContextRun) for difference in differences
        )

    def _prompt_mismatch(self, checked: SegmentMessages) -> TemplateMismatch | None:
        """Compares the last turn's prompt with the served prompt, and the last turn with the template's text for it."""
        runs = self._runs(checked)
        last = runs[-1]
        prompt = self._renderer.render_text(checked.messages[:-1], checked.tools, add_generation_prompt=True)
        ids = self._renderer.encode_conversation(prompt)
        if list(checked.segment.token_ids[: last.start]) != list(ids):
            difference = self._first_difference(runs[:-1], prompt, ids, count_reasoning=True)
            if difference is not None:
                return difference
        text = self._renderer.render_text(checked.messages, checked.tools, add_generation_prompt=False)
        context = self._context_run(prompt, ids, 0)
        if not text.startswith(context.bare):
            return None  # the last turn changes the text in front of it; only its prompt counts
        return self._first_difference([context, last], text, None, count_reasoning=False)

    def _first_difference(
        self, runs: Sequence[ContextRun | TurnRun], text: str, ids: Sequence[int] | None, *, count_reasoning: bool
    ) -> TemplateMismatch | None:
        mode = self._renderer.sanity
        for difference in find_differences(runs, text, mode=mode, reader=self._reader):
            if count_reasoning or difference.kind == "other":
                return mismatch_of(difference, self._reader)
        if mode == "strict" and ids is not None and (run := find_retokenized(runs, ids)) is not None:
            same_text = Difference("other", run, run.text, run.text)
            return mismatch_of(same_text, self._reader, ": the same text in other tokens")
        return None

    def _runs(self, checked: SegmentMessages) -> list[ContextRun | TurnRun]:
        """The segment as runs of tokens, context and turns of the model in alternation.

        A turn of the model includes text that an environment has written into it.
        """
        segment, injected = checked.segment, checked.injected_places
        runs: list[ContextRun | TurnRun] = []
        start, turns, number = 0, segment.turn, 0
        for end in range(1, len(segment) + 1):
            same_kind = end < len(segment) and (turns[end] < 0) == (turns[end - 1] < 0)
            if same_kind and end not in injected and end not in checked.context_texts:
                continue  # injected text may be followed by a message: an environment edited the end of a turn
            is_turn = turns[start] >= 0 or start in injected  # a run that begins with injected text is a turn too
            if is_turn and end < len(segment) and (turns[end] >= 0 or end in injected):
                continue  # the same turn continues
            if is_turn:
                marks = self._renderer.profile.reasoning.marks
                reasoning_opened = bool(runs) and bool(marks.reasoning_opening(runs[-1].text))
                runs.append(
                    self._turn_run(segment, start, end, reasoning_opened, calls=number in checked.turns_with_calls)
                )
                number += 1
            else:
                ids = list(segment.token_ids[start:end])
                runs.append(self._context_run(checked.context_texts.get(start), ids, start))
            start = end
        return runs

    def _turn_run(self, segment: Segment, start: int, end: int, opened: bool, *, calls: bool) -> TurnRun:
        renderer = self._renderer
        ids = list(segment.token_ids[start:end])
        closed = segment.turn[end - 1] >= 0 and ids[-1] in renderer.stop_token_ids
        ids = ids[:-1] if closed else ids
        return TurnRun(
            renderer.decode(ids),
            ids,
            start,
            as_text=renderer.profile.turn.content != "fields",
            opened=opened,
            closed=closed,
            calls=calls,
        )

    def _context_run(self, text: str | None, ids: Sequence[int], start: int) -> ContextRun:
        text = self._renderer.decode(ids) if text is None else text
        bare = self._renderer.profile.reasoning.marks.without_reasoning_opening(text)
        bare_ids = ids if bare == text else ids[: len(ids) - len(self._renderer.encode(text[len(bare) :]))]
        return ContextRun(text, ids, start, bare=bare, bare_ids=bare_ids)

    def _reasoning_texts(self, text: str, opened: bool) -> Sequence[str]:
        reasoning = self._renderer.profile.reasoning
        if not reasoning.supported:
            return []
        return [block.text for block in reasoning.marks.reasoning_blocks(text, opened=opened)]

    def _calls(self, text: str, opened: bool) -> object:
        """The calls in a turn's text, and its content without white space and without special tokens."""
        renderer = self._renderer
        read = renderer.turn_parser.tool_format.parse(text, thinking=opened, marks=renderer.profile.reasoning.marks)
        return [(call.name, dict(call.arguments), call.error is None) for call in read.calls], self._words(read.content)

    def _fields(self, text: str, opened: bool) -> object:
        """The calls and the words of a turn's text, and whether the words are in front of the calls."""
        reasoning, format = self._renderer.profile.reasoning, self._renderer.profile.tool_format
        if isinstance(format, TemplateProblem):
            return self._words(reasoning.without_reasoning(text, opened))
        read = format.parse(text, thinking=opened, marks=reasoning.marks)
        calls = [(call.name, dict(call.arguments)) for call in read.calls if call.error is None]
        words = self._words(read.content)
        if not words or not read.calls:
            return calls, words
        first_word = read.content.split(maxsplit=1)[0]
        return calls, words, text.find(first_word) < text.find(read.calls[0].text)

    def _words(self, content: str) -> str:
        """A content without white space and without special tokens."""
        renderer = self._renderer
        tokens = (token for token in renderer.encode(content) if token not in renderer.special)
        return "".join(renderer.decode(list(tokens)).split())
