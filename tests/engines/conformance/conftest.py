"""One engine at a time, for all cases of the suite. Servers are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engines.conformance.subjects import Local, Scripted, Subject

SUBJECTS = {subject.name: subject for subject in (Scripted, Local)}


@pytest.fixture(scope="session", params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine under test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = SUBJECTS[request.param]()
    yield engine
    engine.close()
    torch.set_num_threads(threads)


@pytest.fixture(params=[Scripted, Local], ids=lambda kind: kind.name)
def fresh_subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine in this process, for this case alone."""
    engine = request.param()
    yield engine
    engine.close()
