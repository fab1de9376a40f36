"""Teachers: divergences and their gradients against float64, scores of tokens, advantages, and what is learnt in expectation."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import conversations, group
from turnwise.models.transfer import read
from turnwise.options.algorithm import Reinforce
from turnwise.options.teacher import TeacherSection
from turnwise.training.batch import pack
from turnwise.training.divergence import REST_FLOOR, ScoredTokens, divergence_of, top_k_classes
from turnwise.training.forward import Forward
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.teacher import LearnerTeacher, Scores, Teacher, TeacherStep
from turnwise.training.update import policy_loss
from turnwise.types import Group, LogprobKind, Row, Sampling, Trajectory

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)]


def definition(student_V: torch.Tensor, teacher_V: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    """The divergence of two distributions [V], from sums over classes."""

    def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first * (first / second).log()).sum()

    q, p = student_V, teacher_V
    if kind == "reverse_kl":
        return kl(q, p)
    if kind == "forward_kl":
        return kl(p, q)
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def section(**options: Any) -> TeacherSection:
    return TeacherSection.model_validate({"path": "teacher", **options})


def groups_of(trajectories: list[Trajectory]) -> list[Group]:
    return [Group(id="g", row=Row(id="g", messages=[]), trajectories=trajectories)]


def step_of(learner: LocalLearner, options: TeacherSection) -> TeacherStep:
    scoring = LearnerTeacher(learner, "teacher", 64) if options.scores else None
    return TeacherStep(learner, teachers=[Teacher("teacher", 1.0, scoring)], section=options, micro_batch_tokens=64)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_divergence_and_its_gradient_are_those_of_the_definition(kind: Any, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_CV = 3 * torch.randn(5, 17, generator=generator, dtype=torch.float64)
    teacher_CV = (3 * torch.randn(5, 17, generator=generator, dtype=torch.float64)).log_softmax(-1)
    results = []
    for of in (
        lambda own: divergence_of(own.log_softmax(-1), teacher_CV, kind, beta),
        lambda own: torch.stack(
            [definition(q, p, kind, beta) for q, p in zip(own.softmax(-1), teacher_CV.exp(), strict=True)]
        ),
    ):
        own_CV = logits_CV.clone().requires_grad_()
        value_C = of(own_CV)
        results.append((value_C.detach(), torch.autograd.grad(value_C.sum(), own_CV)[0]))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


def test_the_classes_of_top_k_are_the_likely_tokens_and_all_others() -> None:
    generator = torch.Generator().manual_seed(0)
    student_CV, teacher_CV = (
        (4 * torch.randn(6, 11, generator=generator, dtype=torch.float64)).log_softmax(-1) for _ in range(2)
    )
    top_CK, ids_CK = teacher_CV.topk(3)
    student, teacher = top_k_classes(student_CV, ids_CK, top_CK)
    torch.testing.assert_close(student.exp().sum(-1), torch.ones(6, dtype=torch.float64))
    for row in range(6):
        others = [token for token in range(11) if token not in ids_CK[row].tolist()]
        assert float(student[row, -1].exp()) == pytest.approx(float(student_CV[row, others].exp().sum()))
        assert float(teacher[row, -1].exp()) == pytest.approx(float(teacher_CV[row, others].exp().sum()))
    # with almost nothing left, the divergence stays finite
    certain = torch.tensor([[0.0]], dtype=torch.float64)
    _, rest = top_k_classes(student_CV[:1], ids_CK[:1, :1], certain)
    assert float(rest[0, -1]) == pytest.approx(math.log(REST_FLOOR))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_likely_tokens_that_the_student_does_not_have_count_for_all_others(kind: Any, beta: float) -> None:
    """A teacher with more padding gives ids beyond the student's 11: also the first, and all of a row."""
    generator = torch.Generator().manual_seed(0)
    student_CV, teacher_CV = (
        (torch.randn(4, size, generator=generator, dtype=torch.float64)).log_softmax(-1) for size in (11, 14)
    )
    ids_CK = torch.tensor([[0, 12, 3], [13, 0, 2], [13, 12, 11], [5, 6, 7]])
    top_CK = teacher_CV.gather(-1, ids_CK)
    logits_CV = student_CV.clone().requires_grad_()
    classes = top_k_classes(logits_CV, ids_CK, top_CK)
    found_C = divergence_of(*classes, kind, beta)
    (gradient_CV,) = torch.autograd.grad(found_C.sum(), logits_CV)
    plain_CV = student_CV.clone().requires_grad_()
    rows = []
    for row in range(4):
        known = [token for token in ids_CK[row].tolist() if token < 11]
        others = [token for token in range(11) if token not in known]
        q_V, p_V = plain_CV[row].exp(), teacher_CV[row].exp()
        q_V = torch.cat([q_V[known], q_V[others].sum()[None]])
        p_V = torch.cat([p_V[known], 1 - p_V[known].sum()[None]])
        rows.append(definition(q_V, p_V, kind, beta))
    torch.testing.assert_close(found_C, torch.stack(rows))
    torch.testing.assert_close(gradient_CV, torch.autograd.grad(torch.stack(rows).sum(), plain_CV)[0])
    # the most likely token that both have is what is compared
    scored = ScoredTokens(logprob_N=torch.zeros(4), ids_NK=ids_CK, top_logprob_NK=top_CK, kind=None)
    own_CV = torch.nn.functional.one_hot(torch.tensor([0, 0, 0, 6]), 11).double()
    found = scored.at(own_CV, torch.zeros(4, dtype=torch.int64), torch.arange(4))
    assert found.agrees_N is not None
    assert found.agrees_N.tolist() == [True, True, False, False]


def test_conversations_of_which_nothing_is_trained_on_have_scores() -> None:
    """A step with conversations that are masked, as by train.overlong_filter: all of them, or all of one teacher."""

    class Scoring:
        async def scores(self, sequences: Any, states: int, top_k: int) -> Scores:
            assert sequences
            return Scores(np.full((states, 1 + 2 * top_k), -1.0))

    models = [{"name": name, "path": name} for name in "tu"]
    teachers = [Teacher(name, 1.0, Scoring()) for name in "tu"]
    for options, masked, expected in (
        (section(), "abcd", [0.0, 0.0, 0.0, 0.0]),
        (TeacherSection.model_validate({"models": models, "column": "of"}), "d", [-1.0, -1.0, -1.0, 0.0]),
    ):
        trajectories = group()
        for one in trajectories:
            one.row.fields["of"] = "u" if one.id == "d" else "t"
            for turn in one.turns:
                turn.weight = float(one.id not in masked)
        step = TeacherStep(
            None,  # type: ignore[arg-type]
            teachers=teachers[: len(options.models)],
            section=options,
            micro_batch_tokens=64,
        )
        asyncio.run(step.set_scores(groups_of(trajectories)))
        assert [one.teacher_scores[0][0] for one in trajectories] == [[value] * 3 for value in expected]


@pytest.mark.parametrize(
    ("kind", "beta", "top_k", "share"),
    [
        *((kind, beta, None, False) for kind, beta in KINDS),
        ("reverse_kl", 0.5, None, True),
        ("forward_kl", 0.5, 4, True),
        ("reverse_kl", 0.5, 4, False),
        ("jsd", 0.1, 4, False),
    ],
)
def test_the_gradient_of_a_ragged_batch_is_that_of_float64_sequences(
    kind: Any, beta: float, top_k: int | None, share: bool
) -> None:
    """Trees or rows, in chunks of 3 targets, against one sequence after the other in float64."""
    temperature = 0.8
    student, teacher = tiny_model(), tiny_model(seed=3)
    given = {"signal": "divergence", "divergence": kind, "coef": 0.7}
    options = section(**given, **({"beta": beta} if kind == "jsd" and beta != 0.5 else {}), top_k=top_k)
    trajectories = conversations()
    trajectories[0].turns[1].weight = 0.0
    sampling = Sampling(temperature=temperature)
    learner = LocalLearner(
        student, sampling=sampling, loss=make_loss(Reinforce(), teacher=options), teachers={"teacher": teacher}
    )
    for trajectory in trajectories:
        trajectory.advantages = [0.0] * len(trajectory.turns)
    asyncio.run(step_of(learner, options).set_scores(groups_of(trajectories)))
    batch = pack(trajectories, keep_zero=learner.requirements.keep_zero, share_prompts=share, micro_batch_tokens=40)
    forward = Forward(student, sampling, chunk_bytes=3 * 4 * 260)
    total = torch.zeros(())
    for micro in batch.micro_batches:
        rows = [] if top_k else [Forward(teacher, sampling, chunk_bytes=3 * 4 * 260).distributions(micro)]
        loss, metrics = policy_loss(forward, learner.loss, micro, None, None, rows)
        total = total + loss
        with torch.no_grad():
            (sums,) = read([metrics()])
        assert sums is not None
        assert sums.tokens == len(micro.targets.token_N)
    parameters = list(student.parameters())
    found = torch.autograd.grad(total, parameters)
    expected_loss, expected = exact(trajectories, kind, beta, top_k, temperature)
    assert float(total.detach()) == pytest.approx(0.7 * expected_loss, rel=1e-4)
    for own, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), 0.7 * plain, atol=2e-6, rtol=2e-3)


def exact(
    trajectories: list[Trajectory], kind: str, beta: float, top_k: int | None, temperature: float
) -> tuple[float, Any]:
    """The mean divergence over the trained tokens, and its gradient."""
    student, teacher = tiny_model().double(), tiny_model(seed=3).double()
    found: list[torch.Tensor] = []
    for trajectory in trajectories:
        for segment in trajectory.segments:
            ids = torch.tensor([list(segment.token_ids)])
            q_TV, p_TV = ((model(ids).logits[0] / temperature).softmax(-1) for model in (student, teacher))
            for place, turn in enumerate(segment.turn):
                if turn < 0 or trajectory.turns[turn].weight == 0:
                    continue
                q_V, p_V = q_TV[place - 1], p_TV[place - 1].detach()
                if top_k:
                    chosen = p_V.topk(top_k).indices
                    q_V, p_V = (torch.cat([one[chosen], 1 - one[chosen].sum()[None]]) for one in (q_V, p_V))
                found.append(definition(q_V, p_V, kind, beta))
    mean = torch.stack(found).mean()
    return float(mean.detach()), torch.autograd.grad(mean, list(student.parameters()))


@pytest.mark.parametrize(
    ("kind", "clip"), [(LogprobKind.SAMPLED, None), (LogprobKind.RAW, None), (LogprobKind.RAW, 0.01)]
)
def test_scores_and_advantages_are_those_of_a_plain_float64_computation(kind: LogprobKind, clip: float | None) -> None:
    """Advantages of rewards stay, and those of the teacher are added; with gamma, later tokens of the conversation count."""
    options = section(coef=0.5, gamma=0.9, clip=clip)
    bound = clip or math.inf
    sampling = Sampling(temperature=0.8)
    learner = LocalLearner(tiny_model(), sampling=sampling, teachers={"teacher": tiny_model(seed=3)})
    trajectories = conversations()
    for turn in trajectories[0].turns:
        assert turn.completion is not None
        turn.completion = replace(turn.completion, logprob_kind=kind)  # the learner computes those that it cannot use
    trajectories[0].turns[0].weight = 0.0
    for trajectory in trajectories:
        trajectory.advantages = [0.25] * len(trajectory.turns)
    step = step_of(learner, options)
    asyncio.run(step.set_scores(groups_of(trajectories)))
    asyncio.run(step.add_advantages(groups_of(trajectories)))
    student, teacher = tiny_model().double(), tiny_model(seed=3).double()
    for trajectory in trajectories:
        rewards: list[tuple[int, float]] = []
        for segment in trajectory.segments:
            ids = torch.tensor([list(segment.token_ids)])
            with torch.no_grad():
                own_TV, other_TV = ((model(ids).logits[0] / 0.8).log_softmax(-1) for model in (student, teacher))
            for place, turn in enumerate(segment.turn):
                if turn < 0 or trajectory.turns[turn].weight == 0:
                    continue
                token, known = segment.token_ids[place], trajectory.turns[turn].completion
                exact_kind = known is not None and known.logprob_kind is LogprobKind.SAMPLED
                own = segment.logprobs[place] if exact_kind else float(own_TV[place - 1, token])
                rewards.append((turn, min(bound, max(-bound, float(other_TV[place - 1, token]) - own))))
        assert clip is None or {abs(reward) for _, reward in rewards} & {clip}
        rewards.sort(key=lambda pair: pair[0])
        expected = [
            0.25 + 0.5 * sum(0.9**later * reward for later, (_, reward) in enumerate(rewards[place:]))
            for place in range(len(rewards))
        ]
        trained = [index for index, turn in enumerate(trajectory.turns) if turn.weight > 0]
        flat = [number for index in trained for number in trajectory.advantages[index]]  # type: ignore[union-attr]
        assert flat == pytest.approx(expected, abs=1e-4)
    assert trajectories[0].advantages[0] == [0.25] * len(trajectories[0].teacher_scores[0])


def test_the_sampled_signal_is_in_expectation_the_gradient_of_the_reverse_divergence() -> None:
    """All completions of two tokens over four, weighted by their probability: the policy gradient of the advantages with gamma 1
    is that of the reverse KL divergence of complete completions, and with gamma 0 that of each token's, summed."""
    generator = torch.Generator().manual_seed(0)
    first_V, second_VV, teacher_V, teacher_VV = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((4,), (4, 4), (4,), (4, 4))
    )
    p1, p2 = teacher_V.log_softmax(0), teacher_VV.log_softmax(-1)
    parameters = [first_V.requires_grad_(), second_VV.requires_grad_()]

    def student() -> tuple[torch.Tensor, torch.Tensor]:
        return first_V.log_softmax(0), second_VV.log_softmax(-1)

    def sampled(gamma: float) -> list[torch.Tensor]:
        q1, q2 = student()
        loss = torch.zeros((), dtype=torch.float64)
        step = TeacherStep(
            None,  # type: ignore[arg-type]
            teachers=[],
            section=section(gamma=gamma),
            micro_batch_tokens=None,
        )
        for a, b in itertools.product(range(4), repeat=2):
            (one,) = group()[:1]
            one.turns = one.turns[:1]
            one.teacher_scores = [[[float(p1[a])], [float(p2[a, b])]]]
            own = [float(q1[a].detach()), float(q2[a, b].detach())]
            ((first, second),) = step._advantages(one, [own])
            probability = math.exp(sum(own))
            loss = loss - probability * (first * q1[a] + second * q2[a, b])
        return list(torch.autograd.grad(loss, parameters))

    q1, q2 = student()
    of_second_V = (q2.exp() * (q2 - p2)).sum(-1)
    complete = (q1.exp() * (q1 - p1)).sum() + (q1.exp() * of_second_V).sum()
    # each token for itself: the prefix is a given, whose probability has no gradient
    each = (q1.exp() * (q1 - p1)).sum() + (q1.exp().detach() * of_second_V).sum()
    for gamma, exact_value in ((1.0, complete), (0.0, each)):
        expected = torch.autograd.grad(exact_value, parameters, retain_graph=True)
        for found, plain in zip(sampled(gamma), expected, strict=True):
            torch.testing.assert_close(found, plain, atol=1e-12, rtol=1e-9)


def test_a_teacher_with_other_padding_is_compared_on_the_tokens_of_both() -> None:
    """Sizes of a family pad their embeddings differently."""
    options = section(signal="divergence", top_k=3)
    learner = LocalLearner(tiny_model(), sampling=Sampling(), teachers={"teacher": tiny_model(seed=3, vocabulary=300)})
    trajectories = conversations()
    asyncio.run(step_of(learner, options).set_scores(groups_of(trajectories)))
    rows = [row for one in trajectories for turn in one.teacher_scores for row in turn]
    assert max(row[1] for row in rows) < 260
    teacher = tiny_model(seed=3, vocabulary=300)
    segment = trajectories[1].segments[0]
    place = next(place for place, turn in enumerate(segment.turn) if turn == 0)
    with torch.no_grad():
        plain_V = teacher(torch.tensor([list(segment.token_ids)])).logits[0, place - 1, :260].log_softmax(-1)
    assert trajectories[1].teacher_scores[0][0][0] == pytest.approx(float(plain_V[segment.token_ids[place]]), abs=1e-4)
