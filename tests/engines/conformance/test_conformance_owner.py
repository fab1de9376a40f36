"""A server belongs to one trainer, and to those who have its token."""

from __future__ import annotations

import pytest

from engines.conformance.servers import Server
from engines.conformance.subjects import Subject
from engines.conformance.test_conformance_sampling import assert_exact, prompts
from engines.conformance.test_conformance_weights import publish_changed
from turnwise.errors import EngineError


def test_a_second_trainer_is_refused_until_the_first_has_released_the_server(subject: Subject) -> None:
    if not isinstance(subject, Server):
        return
    publish_changed(subject)
    other = subject.other_trainer()
    with pytest.raises(
        EngineError, match=rf"another trainer .* owns {subject.server.url}|{subject.server.url}: another"
    ):
        subject.run(other.start())
    subject.run(other.close())
    publish_changed(subject)  # the first trainer still owns the server, and its weights are unchanged until then
    request = subject.request(prompts(1)[0], max_tokens=8)
    assert_exact(subject, request, *subject.ask(request))


def test_a_wrong_token_is_refused_with_the_option_that_has_it(subject: Subject) -> None:
    if not isinstance(subject, Server):
        return
    other = subject.other_trainer("wrong")
    with pytest.raises(EngineError, match=r"status 401: .*engine\.api_key_env"):
        subject.run(other.start())
    subject.run(other.close())
    request = subject.request(prompts(1)[0], max_tokens=8)
    assert_exact(subject, request, *subject.ask(request))
