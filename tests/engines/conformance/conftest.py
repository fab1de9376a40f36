"""One engine at a time, for all cases of the suite. Servers are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engines.conformance.servers import AdaptedSglang, AdaptedVllm, Sglang, Vllm
from engines.conformance.subjects import Adapted, AdaptedLocal, Local, Scripted, Subject

IN_PROCESS = {subject.name: subject for subject in (Scripted, Local)}
SERVERS = {subject.name: subject for subject in (Vllm, Sglang)}


@pytest.fixture(
    scope="session", params=[*IN_PROCESS, *(pytest.param(name, marks=pytest.mark.engines) for name in SERVERS)]
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine under test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = {**IN_PROCESS, **SERVERS}[request.param]()
    yield engine
    engine.close()
    torch.set_num_threads(threads)


@pytest.fixture(params=IN_PROCESS.values(), ids=list(IN_PROCESS))
def fresh_subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine in this process, for this case alone."""
    engine = request.param()
    yield engine
    engine.close()


@pytest.fixture(
    scope="module",
    params=[AdaptedLocal, *(pytest.param(kind, marks=pytest.mark.engines) for kind in (AdaptedVllm, AdaptedSglang))],
    ids=lambda kind: kind.name,
)
def adapted(request: pytest.FixtureRequest) -> Iterator[Adapted]:
    """An engine with a LoRA adapter."""
    engine = request.param()
    yield engine
    engine.close()
