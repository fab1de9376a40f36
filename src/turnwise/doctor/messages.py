"""The checks `headers` and `contents`: whether a template writes correct headers and unchanged message contents."""

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
    encoded = [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    encoded += [json.dumps(json.dumps(content))[3:-3]]
    # Jinja's tojson filter escapes these four characters for HTML
    html = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}
    encoded += ["".join(html.get(letter, letter) for letter in form) for form in encoded]
    return any(form in text for form in (content, *encoded))


def _difference(text: str) -> str:
    """The first place where the written text differs from `_CONTENT`."""
    start = text.find(probe_word(7))
    if start < 0:
        return "the content is missing"
    wanted, written = _CONTENT.lstrip(), text[start:]
    same = next((n for n, (a, b) in enumerate(zip(wanted, written, strict=False)) if a != b), len(written))
    return f"{wanted[same:][:20]!r} becomes {written[same:][:20]!r}"
