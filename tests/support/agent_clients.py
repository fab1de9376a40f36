"""The real clients of OpenAI and Anthropic, as agents use them."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.types import Trajectory


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The clients take seconds to import: only processes with tests of them do, before a conversation begins."""
    import anthropic  # noqa: F401
    import openai  # noqa: F401


def openai_client(base_url: str, api_key: str) -> Any:
    import openai

    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def anthropic_client(base_url: str, api_key: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)


def relations(trajectory: Trajectory) -> tuple[float, ...]:
    """How often a request extended the conversation, was realigned, and forked."""
    return tuple(trajectory.metrics[f"agent/{name}"] for name in ("extended", "realigned", "forked"))
