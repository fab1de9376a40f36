"""The further arguments of a chat template (`chat_template_kwargs`), such as `enable_thinking`: which ones may be given.

A template is a function of the messages, the tools and of whatever other names it reads. A name that it does not read would be
accepted and ignored, so that a mistyped `enable_thinkng` trains with reasoning; it is refused instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import TemplateError, nearest

_GIVEN = ("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message")
"""What the renderer gives to the template itself."""
_OF_TRANSFORMERS = (
    "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Parameters of `apply_chat_template` that are no arguments of the template."""
_FROM_TOKENIZER = re.compile(
    r"(?:bos|eos|pad|unk|sep|cls|mask)_token\Z|strftime_now\Z|raise_exception\Z|namespace\Z|range\Z"
)
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""The tag of transformers around what the model generates; no other Jinja environment knows it."""
_WORDS_FOR_VALUES = {"true": "true", "false": "false", "none": "null", "null": "null"}


def reads_argument(name: str, source: str) -> bool:
    """Whether the template with this Jinja `source` may read the argument `name`."""
    read = _names_read(source)
    return read is None or name in read


def refuse_unread_arguments(arguments: Mapping[str, Any], source: str, where: str) -> None:
    """Raises TemplateError unless the template with this Jinja `source` reads every one of the `arguments`.

    `where` names the template's tokenizer. Example: for Qwen3, `{"enable_thinking": False}` is read, and `{"thinking": False}` is
    refused with the name `enable_thinking`.
    """
    for name, value in arguments.items():
        if name in _GIVEN:
            raise TemplateError(
                f"chat_template_kwargs has {name!r}, which turnwise gives to the template itself: remove it"
            )
        if name in _OF_TRANSFORMERS:
            fix = "put the template into the model's directory" if name == "chat_template" else "remove it"
            raise TemplateError(
                f"chat_template_kwargs has {name!r}, which is a parameter of apply_chat_template and no argument of the chat "
                f"template: {fix}"
            )
        if isinstance(value, str) and (word := _WORDS_FOR_VALUES.get(value.strip().lower())) is not None:
            raise TemplateError(
                f"chat_template_kwargs has {name}={value!r}, a text, which a template takes for another value than {word}: write "
                f"{word} without quotes"
            )
    read = _names_read(source) if arguments else None
    if read is None or not (unread := [name for name in arguments if name not in read]):
        return
    readable = [name for name in read if name not in _GIVEN and not _FROM_TOKENIZER.match(name)]
    names = f" (it reads: {', '.join(readable)})" if readable else ""
    raise TemplateError(
        f"chat_template_kwargs has {unread[0]!r}, which the chat template of {where} never reads{names}: correct the name, or "
        f"remove it{nearest(unread[0], readable)}"
    )


def argument_text(arguments: Mapping[str, Any]) -> str:
    """The arguments as one text, equal for equal arguments: `{"enable_thinking": false}`. Raises TemplateError."""
    try:
        return json.dumps(dict(arguments), sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(
            f"chat_template_kwargs={arguments!r:.120} must be plain data, such as {{'enable_thinking': False}}: {error}"
        ) from None


def _names_read(source: str) -> Sequence[str] | None:
    """The names that a template reads without having set them on every way there, sorted; None if the source cannot be read."""
    import jinja2
    import jinja2.meta

    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", source))
    except jinja2.TemplateError:
        return None
    return sorted(jinja2.meta.find_undeclared_variables(parsed))
