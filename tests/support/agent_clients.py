"""The real clients of OpenAI and Anthropic, as agents use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from turnwise.types import Trajectory

_clients: list[Any] = []
"""The clients that a test has made and that are still open."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The clients take seconds to import: only processes with tests of them do, before a conversation begins."""
    import anthropic  # noqa: F401
    import openai  # noqa: F401


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    """An agent leaves its client to the garbage collector, which warns of an open socket during some later test."""
    yield
    while _clients:
        _clients.pop().close()


def openai_client(base_url: str, api_key: str) -> Any:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    _clients.append(client)
    return client


def anthropic_client(base_url: str, api_key: str) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    _clients.append(client)
    return client


def relations(trajectory: Trajectory) -> tuple[float, ...]:
    """How often a request extended the conversation, was realigned, and forked."""
    return tuple(trajectory.metrics[f"agent/{name}"] for name in ("extended", "realigned", "forked"))
