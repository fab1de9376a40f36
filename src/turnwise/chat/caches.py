"""All caches of this folder, and their bounds.

What depends on the template alone is asked once and kept in `TemplateProfile`. Some things depend on more and are cached here:
answers that depend on a sequence of message roles (a conversation repeats few of them), the token ids of short texts, the
renderings of short conversations (the samples of a group have the same opening, and often the same calls and results), and the
renderers of rows with template arguments of their own (a data set has few sets of them).
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from turnwise.types import Message, ToolSchema

__all__ = [
    "ARGUMENT_SETS",
    "LONGEST_TEXT",
    "ROLE_SEQUENCES",
    "TEXTS",
    "RenderMessages",
    "cached_by_arguments",
    "cached_by_content",
    "cached_by_roles",
    "cached_by_text",
]

ROLE_SEQUENCES = 1024
"""Answers kept for each question about a sequence of roles; the least recently used one is dropped first."""

ARGUMENT_SETS = 64
"""Sets of template arguments whose renderer is kept."""

TEXTS = 512
"""Texts of which the token ids are kept."""

LONGEST_TEXT = 8192
"""Characters of a text, and bytes of a conversation, that are kept in a cache at most."""

R = TypeVar("R")


class RenderMessages(Protocol):
    """Renders messages as one text. The text depends on the arguments only."""

    def __call__(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema]
    ) -> str: ...


def cached_by_arguments(make: Callable[[str], R]) -> Callable[[str], R]:
    """What is made for a set of template arguments, given as text, with a cache."""
    return functools.lru_cache(maxsize=ARGUMENT_SETS)(make)


def cached_by_roles(question: Callable[..., R]) -> Callable[..., R]:
    """The question with a cache. All its arguments must be hashable."""
    return functools.lru_cache(maxsize=ROLE_SEQUENCES)(question)


def cached_by_text(encode: Callable[..., R]) -> Callable[..., R]:
    """The encoding function with a cache."""
    return functools.lru_cache(maxsize=TEXTS)(encode)


def cached_by_content(render: RenderMessages) -> RenderMessages:
    """The rendering function with a cache. Conversations that are long, or that hold more than plain data, are not cached."""

    @dataclass(frozen=True, slots=True)
    class RenderArguments:
        content: bytes
        messages: Sequence[Message] = field(compare=False)
        add_generation_prompt: bool = field(compare=False)
        tools: Sequence[ToolSchema] = field(compare=False)

    @functools.lru_cache(maxsize=TEXTS)
    def rendered(arguments: RenderArguments) -> str:
        prompts = arguments.add_generation_prompt
        return render(arguments.messages, add_generation_prompt=prompts, tools=arguments.tools)

    def cached(messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema]) -> str:
        try:
            # version 2 of the format: equal values give equal bytes. Images and other objects raise ValueError
            content = marshal.dumps((list(messages), add_generation_prompt, list(tools)), 2)
        except ValueError:
            content = b""
        if not 0 < len(content) <= LONGEST_TEXT:
            return render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return rendered(RenderArguments(content, messages, add_generation_prompt, tools))

    return cached
