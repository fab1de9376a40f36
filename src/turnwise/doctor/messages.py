"""Whether a template writes messages as they are: the headers around them, and what they say."""

from __future__ import annotations

import json
import re
from typing import Any

from turnwise.chat.probes import PLACEHOLDER, QUESTION, assistant_message, probe_word
from turnwise.chat.renderer import Renderer
from turnwise.doctor.check import Check
from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["contents", "headers"]

_MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>")
"""What families write headers with, where they have tokens of their own for them."""
_CONTENT = f"  {probe_word(7)}\n\n<b>&amp;</b> \"two\" 'one' {{x}} ä 你 " + "word " * 800 + f"{probe_word(8)}\n "
"""What no template should change: quotes, marks, white space on both sides, and more than a few words."""
_ROLES = ("system", "user", "assistant", "tool")


def headers(renderer: Renderer) -> Check:
    """Whether turns begin as the generation prompt does, with headers that are tokens, behind one BOS token."""
    for ask in (_prompt_problem, _bos_problem, _mark_problem):
        if problem := ask(renderer):
            return Check("headers", "fail", problem)
    prompt = _prompt(renderer)[1]
    if not prompt:
        return Check("headers", "ok", "turns of the model have no header, so there is no generation prompt")
    return Check("headers", "ok", f"a turn of the model begins with the generation prompt, {prompt!r}")


def _prompt(renderer: Renderer) -> tuple[str, str, str]:
    """A conversation without and with the generation prompt: what they share, the prompt; and the conversation with the answer.

    The answer ends before its words.
    """
    template = renderer.template
    asked, prompted = (template.render([QUESTION], add_generation_prompt=cue) for cue in (False, True))
    answered = template.render([QUESTION, assistant_message(PLACEHOLDER)], add_generation_prompt=False).partition(
        PLACEHOLDER
    )[0]
    short = min(len(asked), len(prompted))
    same = next((n for n in range(short) if asked[n] != prompted[n]), short)
    return prompted[:same], prompted[same:], answered


def _prompt_problem(renderer: Renderer) -> str:
    """What is wrong with the generation prompt, or an empty text."""
    before, prompt, answered = _prompt(renderer)
    if not prompt:
        header = (
            renderer.profile.reasoning.marks.without_open_thought(answered[len(before) :])
            if answered.startswith(before)
            else ""
        )
        if not re.sub(rf"{renderer.profile.reasoning.marks.scaffold}|\s", "", header):
            return ""
        return (
            f"the template writes {header!r} before an assistant message, and nothing where add_generation_prompt is true, so "
            f"the model would speak without its header: add {{% if add_generation_prompt %}}...{{% endif %}} to its end"
        )
    if answered.startswith((before + prompt, before + renderer.profile.reasoning.marks.without_open_thought(prompt))):
        return ""
    place = next((n for n, (a, b) in enumerate(zip(before + prompt, answered, strict=False)) if a != b), len(answered))
    start = min(place, len(before))
    return (
        f"the generation prompt is {prompt!r}, and an assistant message begins with {answered[start:][:60]!r}: the model would "
        f"be trained behind another header than the one that its earlier turns have. Make the two alike"
    )


def _bos_problem(renderer: Renderer) -> str:
    tokenizer: Any = renderer.tokenizer
    bos, ids = (
        tokenizer.bos_token_id,
        list(renderer.encode(renderer.template.render([QUESTION], add_generation_prompt=True))),
    )
    if bos is None or ids[:2] != [bos, bos]:
        return ""
    return (
        f"the template begins a conversation with {tokenizer.bos_token!r} ({bos}) twice, which no model was trained on: write "
        f"bos_token once"
    )


def _mark_problem(renderer: Renderer) -> str:
    """Which headers are written with several tokens, though they look like one; or an empty text."""
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
        if len(ids) > 1 and not any(renderer.decode([one]).strip() == mark for one in ids)
    ]
    if not broken:
        return ""
    return (
        f"the template writes headers that are no tokens of this tokenizer: {', '.join(broken)}. Use the model's own template "
        f"and tokenizer, or add them as special tokens before the model is trained"
    )


def contents(renderer: Renderer) -> Check:
    """Whether what messages say is written as it is."""
    name, trimmed, changed = "contents", list[str](), list[str]()
    for role in _ROLES:
        try:
            text = _written(renderer, role)
        except TemplateError:
            continue  # such messages are handed over in another shape, which the checks of turns tell
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
            f"the template changes what messages say, of the roles {', '.join(changed)}: neither the model nor its training "
            f"would see all of it. Write message.content as it is",
        )
    if "assistant" in trimmed:
        return Check(
            name,
            "note",
            f"the template takes white space off both ends of messages of {' and '.join(trimmed)}. Where a turn of the model "
            f"begins or ends with some, training keeps it as it was sampled, and a server that writes the conversation again "
            f"leaves it out",
        )
    if trimmed:
        return Check(
            name, "note", f"the template takes white space off both ends of messages of {' and '.join(trimmed)}"
        )
    return Check(name, "ok", "what messages say is written as it is")


def _written(renderer: Renderer, role: str) -> str:
    """What the template makes of a message of a role with the probe content. Raises TemplateError if it takes none."""
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
    """Whether a text has a content in it, as it is or as JSON."""
    encoded = [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    encoded += [json.dumps(json.dumps(content))[3:-3]]
    # Jinja's own tojson writes these four for HTML
    html = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}
    encoded += ["".join(html.get(letter, letter) for letter in one) for one in encoded]
    return any(one in text for one in (content, *encoded))


def _difference(text: str) -> str:
    """Where a text stops to be the probe content."""
    start = text.find(probe_word(7))
    if start < 0:
        return "it is left out"
    wanted, written = _CONTENT.lstrip(), text[start:]
    same = next((n for n, (a, b) in enumerate(zip(wanted, written, strict=False)) if a != b), len(written))
    return f"{wanted[same:][:20]!r} becomes {written[same:][:20]!r}"
