"""Whole conversations with tools through the rollout loop: tokens, log-probabilities and versions as they were sampled."""

from __future__ import annotations

import json

import pytest

from engines.conformance.reference import reference_logprobs
from engines.conformance.subjects import MODEL, Subject, load_model
from engines.conformance.test_conformance_weights import publish_changed
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tools
from turnwise.environments.users import checked_answer
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Row, Sampling, Stop, Trajectory

LINES = (MODEL.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()


def converse(subject: Subject, rows: int = 4, size: int = 2) -> list[Trajectory]:
    """Conversations about the first questions of the demo, with a calculator and a user who checks the answer."""
    questions = [json.loads(line) for line in LINES[:rows]]
    groups = [
        new_group(
            Row(
                id=f"{subject.engine.version}-{index}",
                messages=question["prompt"],
                fields={"answer": question["answer"]},
            ),
            size=size,
            seed=index,
        )
        for index, question in enumerate(questions)
    ]
    context = RolloutContext(
        engine=subject.engine,
        renderer=subject.renderer,
        make_environment=lambda: Tools([calculator], then=checked_answer()),
        sampling=Sampling(temperature=1.0),
        limits=Limits(turns=6, tokens_per_turn=64),
    )
    subject.run(rollout_groups(groups, context))
    return [trajectory for group in groups for trajectory in group.trajectories]


def assert_as_sampled(subject: Subject, trajectories: list[Trajectory], version: int) -> None:
    """Each sampled token of each segment has the model's log-probability after all tokens before it, and the version."""
    for trajectory in trajectories:
        assert trajectory.error is None
        assert trajectory.template_mismatch is None
        assert trajectory.logprob_kind is subject.claims.logprob_kind
        (segment,) = trajectory.segments
        first = next(index for index, turn in enumerate(segment.turn) if turn >= 0)
        prompt, rest = segment.token_ids[:first].tolist(), segment.token_ids[first:].tolist()
        sampled = [index for index, turn in enumerate(segment.turn) if turn >= 0]
        assert {segment.version[index] for index in sampled} == {version}
        assert [turn.index for turn in trajectory.turns] == sorted({segment.turn[index] for index in sampled})
        for turn in trajectory.turns:
            assert turn.completion is not None
            own = [segment.token_ids[index] for index in sampled if segment.turn[index] == turn.index]
            assert own == list(turn.completion.token_ids)
        if subject.claims.samples:
            expected = reference_logprobs(subject.model, prompt, rest, Sampling(), subject.claims.logprob_kind)
            assert [segment.logprobs[index] for index in sampled] == pytest.approx(
                [expected[index - first] for index in sampled], abs=1e-4
            )


def test_conversations_with_tools(subject: Subject) -> None:
    """With the demo model's own weights, which call the calculator."""
    version = subject.engine.version + 1
    subject.model = load_model()
    subject.run(subject.publish(version))
    trajectories = converse(subject, rows=8)
    assert_as_sampled(subject, trajectories, version)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert all(trajectory.stop in (Stop.DONE, Stop.LENGTH, Stop.MAX_TURNS) for trajectory in trajectories)
    if not subject.claims.samples:
        assert [turn.text for turn in trajectories[0].turns] == ["The answer is 12.", "Now it is 15."]
        return
    outcomes = [outcome for turn in turns for outcome in turn.outcomes]
    assert [outcome for outcome in outcomes if outcome.name == "calculator" and outcome.error is None]
    if subject.claims.cache_block is not None and subject.claims.cache_block < 64:
        later = [turn.completion for turn in turns if turn.index > 0 and turn.completion is not None]
        assert later
        assert all(completion.cached_tokens for completion in later), (
            "a turn after the first was not taken from the cache"
        )


def test_conversations_after_an_update(subject: Subject) -> None:
    version = publish_changed(subject)
    assert_as_sampled(subject, converse(subject, rows=2), version)
