"""All caches of this folder, and their bounds.

What depends on the template alone is asked once and kept in `TemplateProfile`. Two things depend on more and are cached here:
answers that depend on a sequence of message roles (a conversation repeats few of them), and the token ids of short texts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ROLE_SEQUENCES", "TEXTS", "cached_by_roles", "cached_by_text"]

ROLE_SEQUENCES = 1024
"""Answers kept for each question about a sequence of roles; the least recently used one is dropped first."""

TEXTS = 512
"""Texts of which the token ids are kept."""

R = TypeVar("R")


def cached_by_roles(question: Callable[..., R]) -> Callable[..., R]:
    """The question with a cache. All its arguments must be hashable."""
    return functools.lru_cache(maxsize=ROLE_SEQUENCES)(question)


def cached_by_text(encode: Callable[..., R]) -> Callable[..., R]:
    """The encoding function with a cache."""
    return functools.lru_cache(maxsize=TEXTS)(encode)
