"""Teachers: divergences against float64, scores of tokens, what is learnt in expectation, and runs that distil."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from support import byte_tokenizer
from support.conversations import RENDERER
from support.image_recipe import save_image_recipe
from support.recipes import save_recipe
from support.servers import Answer, serving
from support.tiny import save_model, tiny_model
from support.training import train_run
from test_train import lines, timeless
from training.test_batch import conversations, group
from turnwise import assembly
from turnwise.assembly.teachers import _prompt, refuse_unknown_teachers
from turnwise.config.recipe import checked, load
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.doctor.memory import predict, read_model_config, workload_of
from turnwise.engines.remote.scoring import ScoringServer
from turnwise.errors import ConfigError, EngineError, Failed, RunError
from turnwise.models.transfer import read
from turnwise.options.algorithm import Reinforce
from turnwise.options.section import Use
from turnwise.options.teacher import TeacherSection
from turnwise.runs.training_run import assemble
from turnwise.training.batch import pack
from turnwise.training.divergence import REST_FLOOR, ScoredTokens, divergence_of, top_k_classes
from turnwise.training.forward import Forward
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.teacher import LearnerTeacher, Scores, Teacher, TeacherStep
from turnwise.training.update import policy_loss
from turnwise.types import Group, LogprobKind, Row, Sampling, Trajectory, Turn

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


# Training runs with teachers: what options change, resuming, memory, and what is refused at the start


def solved(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    """The prompt with the row's answer."""
    first, *others = trajectory.messages[: turn.message_index]
    return [{**first, "content": f"{first['content']} (It is {trajectory.row['answer']}.)"}, *others]


def with_the_turn(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    """Messages that do not end where the turn begins."""
    assert turn.message_index is not None
    return trajectory.messages[: turn.message_index + 1]


HERE = Path(__file__)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the student `m` and the teachers `t` and `u`."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("mtu"):
        save_model(folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def recipe(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1), "teacher": "tu"[n % 2]} for n in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return save_recipe(
        folder,
        models / "m",
        data={"train": str(folder / "rows.jsonl")},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
        checkpoint={"every": 100},
        deterministic=True,
    )


def learnt(recipe: Path, out: Path, *options: str) -> str:
    _, metrics, run = train_run(recipe, out, *options)
    assert all(0 <= line["teacher/agreement"] <= 1 for line in metrics)
    assert abs(metrics[0]["teacher/divergence_turn"]) >= abs(metrics[0]["teacher/divergence"])
    return run.learner.fingerprint()


@pytest.mark.slow
def test_options_of_the_teacher_change_what_is_learnt(recipe: Path, models: Path, tmp_path: Path) -> None:
    one = f"teacher.path={models / 't'}"
    exact = "teacher.signal=divergence"
    several = f"teacher.models=[{{name: t, path: {models / 't'}}}, {{name: u, path: {models / 'u'}}}]"
    heavier = f"teacher.models=[{{name: t, path: {models / 't'}, weight: 3}}, {{name: u, path: {models / 'u'}}}]"
    swapped = f"teacher.models=[{{name: u, path: {models / 't'}}}, {{name: t, path: {models / 'u'}}}]"
    student = f"teacher.context={HERE}:solved"
    runs = {
        "sampled": [one],
        "alone": [one, "credit=none"],
        "path": [f"teacher.path={models / 'u'}"],
        "dtype": [one, "teacher.dtype=bfloat16"],
        "coef": [one, "teacher.coef=0.5"],
        "gamma": [one, "teacher.gamma=0.5"],
        "clip": [one, "teacher.clip=0.01"],
        "divergence": [one, exact],
        "forward": [one, exact, "teacher.divergence=forward_kl"],
        "jsd": [one, exact, "teacher.divergence=jsd"],
        "beta": [one, exact, "teacher.divergence=jsd", "teacher.beta=0.2"],
        "top_k": [one, exact, "teacher.top_k=3"],
        "context": [one, f"teacher.context={HERE}:solved"],
        "student": [student],
        "student, divergence": [student, exact, "teacher.top_k=3"],
        "several": [several],
        "several, divergence": [several, exact],
        "weight": [heavier],
        "column": [several, "teacher.column=teacher"],
        "name": [swapped, "teacher.column=teacher"],
    }
    found = {name: learnt(recipe, tmp_path / str(n), *options) for n, (name, options) in enumerate(runs.items())}
    for (name, first), (other, second) in itertools.combinations(found.items(), 2):
        assert first != second, (name, other)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["teacher.signal=divergence"], ["model.lora=4"]], ids=["divergence", "lora"])
def test_a_run_with_a_teacher_goes_on_bit_by_bit_and_knows_its_teacher(
    options: list[str], recipe: Path, models: Path, tmp_path: Path
) -> None:
    given = [*options, f"teacher.path={models / 't'}", "checkpoint.every=1"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    _, _, run = train_run(recipe, whole, *given)
    train_run(recipe, halves, *given, "train.steps=1")
    _, _, resumed = train_run(recipe, halves, *given, "resume=auto")
    assert resumed.learner.fingerprint() == run.learner.fingerprint()
    assert timeless(lines(halves / "metrics.jsonl")) == timeless(lines(whole / "metrics.jsonl"))
    with pytest.raises(RunError, match=r"teacher\.models\[\]\.path.*the run used"):
        train_run(recipe, halves, *given, f"teacher.path={models / 'u'}", "train.steps=3", "resume=auto")


@pytest.mark.slow
def test_the_base_of_an_adapter_is_a_teacher_without_memory_and_other_teachers_are_counted(
    recipe: Path, models: Path
) -> None:
    def parts(*options: str) -> dict[str, float]:
        config = load(recipe, [*options, "sampling.temperature=1"])[0]
        found = read_model_config(str(models / "m"))
        workload = workload_of(config, found, "train", longest=64, prompt=16)
        return {part.name: part.bytes for part in predict(config, found, workload).parts}

    base = ["model.lora=4", f"teacher.path={models / 'm'}"]
    assert "teachers" not in parts(*base)
    assert parts(f"teacher.path={models / 't'}")["teachers"] == pytest.approx(
        4 * tiny_model().num_parameters(), rel=0.01
    )
    half = parts(f"teacher.path={models / 't'}", "teacher.dtype=bfloat16")["teachers"]
    assert half == pytest.approx(2 * tiny_model().num_parameters(), rel=0.01)
    learner = assemble(load(recipe, [*base, "output=" + str(models / "shared")])[0]).learner
    assert learner.teacher_fingerprints()["teacher"] == learner.base_fingerprint()


def test_the_sources_of_local_teachers_are_those_of_the_recipe(recipe: Path, models: Path) -> None:
    config = load(recipe, ["model.lora=4", f"teacher.path={models / 'm'}", "teacher.bits=4", "teacher.dtype=bfloat16"])[
        0
    ]
    source = assembly.teacher_sources(config)["teacher"]
    assert source is not None
    assert (source.path, source.quantization.bits, source.dtype) == (str(models / "m"), 4, "bfloat16")
    assert source.lora.rank is None


def test_a_context_that_does_not_end_where_the_turn_begins_fails_its_conversation(recipe: Path, tmp_path: Path) -> None:
    from turnwise.errors import RolloutError

    with pytest.raises(
        RolloutError, match="with_the_turn returned messages that end with a message of the role 'assist"
    ):
        train_run(recipe, tmp_path / "run", f"teacher.context={HERE}:with_the_turn", "train.steps=1")


def test_a_teacher_with_other_token_ids_is_refused_with_the_first_difference(
    recipe: Path, models: Path, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    other = tmp_path / "other"
    tiny_model(3, vocabulary=len(tokenizer)).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(
        ConfigError, match=r"the token '<one more>' has the id none in the student and \d+ in the teacher"
    ):
        assemble(load(recipe, [f"teacher.path={other}", f"output={tmp_path / 'run'}"])[0])
    with pytest.raises(ConfigError, match="tokenizer cannot be read"):
        assemble(load(recipe, [f"teacher.path={tmp_path / 'nothing'}", f"output={tmp_path / 'run'}"])[0])


def teaching(kind: str, model: Any, **changes: Any) -> Callable[[dict[str, Any], int], Answer]:
    """Answers in the form of a server's API, computed by the model. `changes`: what is wrong with them."""
    tokenizer = byte_tokenizer()

    def answer(question: dict[str, Any], number: int) -> Answer:
        if not question:  # /v1/models
            return Answer({"data": [{"id": "t"}]})
        ids = question["prompt"] if kind == "vllm" else question["input_ids"]
        k = question["prompt_logprobs"] if kind == "vllm" else question["top_logprobs_num"]
        with torch.no_grad():
            rows_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = [None] + [rows_TV[place] for place in range(len(ids) - 1)]
        text = [changes.get("text", tokenizer.decode([id])) for id in ids]
        if kind == "vllm":
            entries = [
                None
                if row is None
                else {
                    str(id): {"logprob": float(row[id]), "rank": 1 + n, "decoded_token": tokenizer.decode([id])}
                    for n, id in enumerate([*row.topk(k).indices.tolist()])
                }
                | {str(ids[place]): {"logprob": float(row[ids[place]]), "rank": 9, "decoded_token": text[place]}}
                for place, row in enumerate(places)
            ]
            return Answer(
                {"choices": [{"prompt_logprobs": entries[changes.get("lost", 0) :]}]}, seconds=changes.get("seconds", 0)
            )
        start = question["logprob_start_len"]
        own = [
            [None if row is None else float(row[id]), id, text[n]]
            for n, (id, row) in enumerate(zip(ids, places, strict=True))
        ]
        top = [
            None if row is None else [[float(row[id]), id, None] for id in row.topk(k).indices.tolist()]
            for row in places
        ]
        own[start][0] = top[start] = None
        about = {"input_token_logprobs": own[start + changes.get("lost", 0) :], "input_top_logprobs": top[start:]}
        return Answer({"meta_info": about}, seconds=changes.get("seconds", 0))

    return answer


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_teacher_on_a_server_gives_what_a_local_teacher_gives(
    kind: str, recipe: Path, models: Path, tmp_path: Path
) -> None:
    options = ["teacher.signal=divergence", "teacher.top_k=3", "train.steps=1", "credit=none"]
    model = Qwen3ForCausalLM.from_pretrained(models / "t")
    _, (local,), _ = train_run(recipe, tmp_path / "local", f"teacher.path={models / 't'}", *options)
    with serving(teaching(kind, model)) as server:
        given = [f"teacher.url={server.url}", f"teacher.server={kind}"]
        _, (remote,), _ = train_run(recipe, tmp_path / "remote", *given, *options)
    for name in ("teacher/loss", "teacher/divergence", "teacher/divergence_turn", "grad_norm", "loss"):
        assert remote[name] == pytest.approx(local[name], rel=1e-3, abs=1e-5)
    assert remote["teacher/agreement"] == local["teacher/agreement"]
    # what is wrong with a server is told before the model is loaded, or in the conversations
    for changes, problem in (
        ({"text": "other"}, "has another vocabulary than the student: the token"),
        ({"lost": 1}, "log-probabilities for the last"),
        ({"seconds": 60.0}, "gave no answer within 0.2 s"),
    ):
        limit = 0.2 if "seconds" in changes else 60
        with serving(teaching(kind, model, **changes)) as server:
            given = [f"teacher.url={server.url}", f"teacher.server={kind}", f"output={tmp_path / 'refused'}"]
            config = load(recipe, [*given, *options, f"teacher.timeout={limit}"])[0]
            with pytest.raises(ConfigError, match=problem):
                assemble(config)
    with pytest.raises(ConfigError, match="cannot score tokens"):  # it has gone
        assemble(load(recipe, [*given, *options])[0])


def test_the_time_limit_of_a_server_is_that_of_all_sequences() -> None:
    """Each answer comes within the limit, and those of the last of five groups of 32 come after it."""
    answer = {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -0.5}}]}]}

    def slowly(question: dict[str, Any], number: int) -> Answer:
        return Answer(answer if question else {"data": [{"id": "t"}]}, seconds=0.4 if question else 0.0)

    with serving(slowly) as server:
        scoring = ScoringServer(server.url, "vllm", timeout=1.0)
        found = asyncio.run(scoring.score([([1, 2], [1])] * 160, 1))
    problems = [str(one) for one in found if isinstance(one, EngineError)]
    assert problems
    assert all("gave no answer within 1 s, the time for all 160 sequences" in one for one in problems)


def nameless(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "tool_calls": [{"x": 1}]}, {"role": "tool", "content": "y"}]


def halved(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "\ud83d"}]


@pytest.mark.parametrize(("function", "told"), [(nameless, "KeyError: "), (halved, "half of a surrogate pair")])
def test_messages_of_a_context_that_cannot_be_encoded_fail_the_conversation(function: Any, told: str) -> None:
    trajectory = Trajectory(id="a", group="g", row=Row(id="g", messages=[]), turns=[Turn(index=0, message={}, text="")])
    use = Use.model_validate(f"{HERE}:{function.__name__}")
    with pytest.raises(Failed) as failed:
        _prompt(use, RENDERER)(trajectory, 0)
    assert failed.value.failure.kind == "teacher"
    assert failed.value.failure.message.startswith(f"teacher.context: {function.__name__}, turn 0: ")
    assert told in failed.value.failure.message


def same(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    return trajectory.messages[: turn.message_index]


def shouts(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    messages = trajectory.messages[: turn.message_index]
    messages[0]["content"] = trajectory.row.fields["answer"] = "CHANGED"
    return messages


def test_what_a_context_changes_in_place_stays_out_of_the_record(recipe: Path, tmp_path: Path) -> None:
    trajectories, _, _ = train_run(recipe, tmp_path / "run", f"teacher.context={HERE}:shouts", "train.steps=1")
    assert trajectories
    assert "CHANGED" not in json.dumps(trajectories)


def test_a_context_shows_its_images_to_the_teacher(tmp_path: Path) -> None:
    """A context with the messages of the student is what the student read: without the images, the teacher would differ."""
    recipe = save_image_recipe(tmp_path)
    options = ["credit=none", "train.steps=1", "limits.turns=1"]
    _, (metrics,), _ = train_run(recipe, tmp_path / "run", f"teacher.context={HERE}:same", *options)
    assert metrics["teacher/divergence"] == pytest.approx(0.0, abs=1e-4)


def test_a_row_that_names_no_teacher_is_refused() -> None:
    teachers = {"models": [{"name": "a", "path": "x"}, {"name": "b", "path": "y"}], "column": "teacher"}
    config = checked({"model": "m", "data": {"train": "rows.jsonl"}, "teacher": teachers}, source="recipe")
    row: Callable[..., Row] = lambda **fields: Row(id="7", messages=[], fields=fields)  # noqa: E731
    refuse_unknown_teachers(config, [row(teacher="a")])
    with pytest.raises(ConfigError, match="row 7 has 'c', and the teachers are a, b"):
        refuse_unknown_teachers(config, [row(teacher="c")])
    with pytest.raises(ConfigError, match="row 7 has no such column"):
        refuse_unknown_teachers(config, [row(answer="1")])


@pytest.mark.parametrize(
    ("teacher", "others", "problem"),
    [
        ({}, {"credit": "none"}, "the recipe has no teacher"),
        ({"coef": 2.0}, {}, "coef has no effect without a teacher"),
        ({"path": "t", "url": "http://h"}, {}, "path and url are two teachers"),
        ({"server": "sglang"}, {}, "server has no effect without url"),
        ({"dtype": "bfloat16", "context": "f.py:g"}, {}, "dtype has an effect on a local teacher only"),
        ({"name": "t"}, {}, "a teacher needs path"),
        ({"path": "t", "beta": 0.2}, {}, "beta has no effect with signal=sampled"),
        ({"path": "t", "signal": "divergence", "beta": 0.2}, {}, "beta has no effect with divergence=reverse_kl"),
        ({"path": "t", "signal": "divergence", "gamma": 0.5}, {}, "gamma has no effect with signal=divergence"),
        ({"path": "t", "signal": "divergence", "clip": 5}, {}, "clip has no effect with signal=divergence"),
        ({"path": "t", "top_k": 5}, {}, "top_k has no effect with signal=sampled"),
        ({"path": "t", "column": "teacher"}, {}, "column has no effect with one teacher"),
        ({"path": "t", "weight": 2.0}, {}, "weight has no effect with one teacher"),
        ({"path": "t", "timeout": 9.0}, {}, "timeout has no effect without a teacher on a server"),
        ({"url": "http://h", "signal": "divergence"}, {}, "the teacher 'teacher' is on a server: set teacher.top_k"),
        ({"context": "f.py:g", "signal": "divergence"}, {}, "the teacher 'teacher' has another context"),
        ({"models": [{"path": "t"}, {"path": "u"}]}, {}, "have the name 'teacher'"),
        ({"models": [{"path": "t"}], "path": "u"}, {}, "path belongs to one teacher"),
        (
            {
                "models": [{"name": "t", "path": "t"}, {"name": "u", "path": "u"}],
                "signal": "divergence",
                "top_k": 5,
            },
            {},
            "top_k of several teachers cannot be mixed",
        ),
        ({"path": "m"}, {}, "is the model that is trained"),
        ({"path": "t", "signal": "divergence"}, {"sampling": {"top_p": 0.9}}, "sampling.top_p cuts them"),
        ({"url": "http://h"}, {"sampling": {"temperature": 0.7}}, "set sampling.temperature=1"),
        (
            {"path": "t", "signal": "divergence"},
            {"cluster": {"launcher": "torchrun"}},
            "needs the teacher's output layer in one process",
        ),
        ({"path": "t"}, {"credit": "none", "train": {"dynamic_sampling": 1}}, "train.dynamic_sampling has no effect"),
        (
            {"path": "t"},
            {"credit": "none", "reward": {"kl": {"coef": 0.1}}},
            "reward.kl.coef has no effect with credit=none",
        ),
        (
            {"path": "t", "signal": "divergence"},
            {"credit": "none", "train": {"ppo_epochs": 2}, "loss": {"clip_low": 0.1}},
            "loss.clip_low has no effect with credit=none and teacher.signal=divergence",
        ),
        (
            {"path": "t", "signal": "divergence"},
            {"credit": "none", "train": {"ppo_epochs": 2, "max_staleness": 1}, "correction": {"action": "truncate"}},
            "correction.action=truncate has no effect with credit=none and teacher.signal=divergence",
        ),
    ],
)
def test_options_of_teachers_without_effect_are_refused(
    teacher: dict[str, Any], others: dict[str, Any], problem: str
) -> None:
    recipe = {"model": "m", "data": {"train": "rows.jsonl"}, "teacher": teacher, **others}
    with pytest.raises(ConfigError) as error:
        refuse_without_effect(checked(recipe, source="recipe"))
    assert problem in str(error.value)


def test_a_teacher_alone_needs_no_reward_and_no_group() -> None:
    config = checked(
        {
            "model": "m",
            "data": {"train": "rows.jsonl"},
            "teacher": "t",
            "credit": "none",
            "train": {"group_size": 1},
        },
        source="recipe",
    )
    refuse_without_effect(config)
    refuse_without_reward(config)
