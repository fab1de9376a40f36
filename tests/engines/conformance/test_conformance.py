"""What every engine does: adapters, conversations, life, owners, sampling, weights."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engines.conformance.reference import assert_could_be_sampled, reference_logprobs
from engines.conformance.servers import Server
from engines.conformance.subjects import MODEL, SCRIPT, STOP, Adapted, Subject, change, load_model, state_of
from turnwise.engines.engine import can_constrain
from turnwise.engines.remote.scoring import ScoringServer
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.environments.users import checked_answer
from turnwise.errors import EngineError
from turnwise.models.distribution import AllowedTokens, sampling_logits
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import AnswerFormat, Completion, Request, Row, Sampling, SamplingChange, Stop, Trajectory

# What a completion is: exact ids, log-probabilities of the declared kind, stop reasons, seeds, limits.


QUESTION = "<|im_start|>user\nTom has 12 apples and buys 3 bags of 4 apples.<|im_end|>\n<|im_start|>assistant\n"

SAMPLINGS = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.7, "temperature": 1.2},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.1},
}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, of different lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 760) for _ in range(draw.randrange(5, 60))] for _ in range(count)]


def assert_exact(subject: Subject, request: Request, completion: Completion) -> None:
    """The completion's columns agree with each other and with the trainer's model."""
    ids, claims = list(completion.token_ids), subject.claims
    assert len(ids) == len(completion.logprobs) == len(completion.versions)
    assert all(type(token) is int and 0 <= token < 760 for token in ids)
    assert set(completion.versions) == {subject.engine.version}
    assert completion.logprob_kind is claims.logprob_kind
    if not claims.samples:
        assert list(completion.logprobs) == [0.0] * len(ids)
        return
    assert_could_be_sampled(subject.model, request.token_ids, ids, request.sampling)
    kind = subject.kind(request.sampling)
    expected = reference_logprobs(subject.model, request.token_ids, ids, request.sampling, kind)
    assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_ids_and_logprobs_are_those_of_the_model(subject: Subject, sampling: dict[str, float]) -> None:
    requests = [
        subject.request(prompt, seed=index, max_tokens=16, stop_token_ids=(STOP,), **sampling)
        for index, prompt in enumerate(prompts(6))
    ]
    for request, completion in zip(requests, subject.ask(*requests), strict=True):
        assert_exact(subject, request, completion)
        ids = list(completion.token_ids)
        assert STOP not in ids[:-1]
        assert (len(ids), completion.finish_reason) == (16, "length") or (
            ids[-1] == STOP and completion.finish_reason == "stop"
        )
        if not subject.claims.samples:
            assert ids == [*subject.renderer.encode(SCRIPT[0]), STOP][:16]


def test_raw_logprobs_are_those_of_the_logits(subject: Subject) -> None:
    request = subject.request(prompts(1)[0], max_tokens=8, temperature=0.5, top_k=7)
    (completion,) = subject.ask(request)
    if completion.raw_logprobs is not None:
        from turnwise.types import LogprobKind

        ids = completion.token_ids
        raw = reference_logprobs(subject.model, request.token_ids, ids, request.sampling, LogprobKind.RAW)
        assert list(completion.raw_logprobs) == pytest.approx(raw, abs=1e-4)


# grammars

FORMS = {
    "calls": SamplingChange(tool_choice="required"),
    "an answer or a call": SamplingChange(answer_format=AnswerFormat(kind="regex", value="(yes|no|[0-9]{1,3})")),
    "calls in free text": SamplingChange(tool_names=["calculator"]),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_turns_under_a_grammar_have_the_distribution_that_the_trainer_computes_again(
    subject: Subject, form: SamplingChange
) -> None:
    """Under random weights, which would write no call, also at another temperature, and with tokens that end a turn."""
    if not subject.claims.samples:
        assert can_constrain(subject.engine)  # it stands in for engines that do
        return
    change(subject.model, 17)
    version = subject.engine.version + 1
    subject.run(subject.publish(version))
    renderer = subject.renderer
    found = renderer.constraint([Tool.of(calculator).schema], form, stops=renderer.stop_token_ids)
    assert found is not None
    prompt = question(subject)
    constraint = replace(found, start=len(prompt))
    requests = [
        replace(
            subject.request(
                prompt, seed=seed, max_tokens=48, stop_token_ids=(STOP,), temperature=1.0 - 0.4 * (seed % 2)
            ),
            constraint=constraint,
        )
        for seed in range(8)
    ]
    for request, completion in zip(requests, subject.ask(*requests), strict=True):
        ids = [*prompt, *completion.token_ids]
        column = renderer.masks.column(ids, len(ids), [(constraint, len(ids))])  # raises if a token is not allowed
        with torch.no_grad():
            logits = subject.model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
        allowed = AllowedTokens(
            torch.from_numpy(column.words_MW.copy()), torch.from_numpy(column.index_T[len(prompt) :].copy())
        )
        temperature_N = torch.full((len(logits),), request.sampling.temperature)
        masked = sampling_logits(logits, temperature_N=temperature_N, allowed=allowed).log_softmax(dim=-1)
        expected = masked.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()
        assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)
        assert set(completion.versions) == {version}


# stop reasons


def greedy(subject: Subject, prompt: Sequence[int], count: int = 40) -> list[int]:
    """The most probable tokens after a prompt, without any stop."""
    completion = subject.ask_one(prompt, temperature=0.0, max_tokens=count)
    assert (len(completion.token_ids), completion.finish_reason) == (count, "length")
    return list(completion.token_ids)


def question(subject: Subject) -> list[int]:
    """A question as the model knows it: the greedy answer ends a turn."""
    return subject.renderer.encode(QUESTION)


def test_a_stop_token_ends_the_completion_and_is_kept(subject: Subject) -> None:
    if not subject.claims.samples:
        completion = subject.ask_one(question(subject), max_tokens=40, stop_token_ids=(STOP,))
        assert (completion.token_ids[-1], completion.finish_reason) == (STOP, "stop")
        return
    tokens = greedy(subject, question(subject))
    for stop in (tokens[3], tokens[7]):
        end = tokens.index(stop) + 1
        completion = subject.ask_one(question(subject), temperature=0.0, max_tokens=40, stop_token_ids=(STOP, stop))
        first_stop = min(end, tokens.index(STOP) + 1 if STOP in tokens else end)
        assert list(completion.token_ids) == tokens[:first_stop]
        assert completion.finish_reason == "stop"
        # with exactly as many tokens as there may be, it is still a stop
        same = subject.ask_one(question(subject), temperature=0.0, max_tokens=first_stop, stop_token_ids=(STOP, stop))
        assert (list(same.token_ids), same.finish_reason) == (tokens[:first_stop], "stop")


def test_only_the_tokens_of_the_request_stop(subject: Subject) -> None:
    """The model's own end of turn is an ordinary token where the request does not name it."""
    if not subject.claims.samples:
        completion = subject.ask_one(question(subject), max_tokens=3)
        assert (len(completion.token_ids), completion.finish_reason) == (3, "length")
        return
    tokens = greedy(subject, question(subject), 60)
    assert STOP in tokens[:-1]
    completion = subject.ask_one(question(subject), temperature=0.0, max_tokens=60, stop_token_ids=(759,))
    assert list(completion.token_ids) == tokens
    assert completion.finish_reason == "length"
    sampling = Sampling(temperature=0.0)
    expected = reference_logprobs(subject.model, question(subject), tokens, sampling, subject.kind(sampling))
    assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_stop_text_ends_the_completion_with_the_token_that_completes_it(subject: Subject) -> None:
    if not subject.claims.samples:
        # the texts of a script are complete turns: they are not searched for stop texts
        completion = subject.ask_one(question(subject), max_tokens=40, stop=("answer",))
        assert subject.renderer.decode(completion.token_ids[:-1]) == SCRIPT[0]
        return
    tokens = greedy(subject, question(subject))
    decode = subject.renderer.decode
    stop = decode(tokens[4:6])[-3:]  # the end of one token and of the next
    end = next(count for count in range(len(tokens) + 1) if stop in decode(tokens[:count]))
    completion = subject.ask_one(question(subject), temperature=0.0, max_tokens=40, stop=("never written", stop))
    assert list(completion.token_ids) == tokens[:end]
    assert completion.finish_reason == "stop"


def test_the_limit_ends_the_completion(subject: Subject) -> None:
    for limit in (1, 3):
        completion = subject.ask_one(question(subject), max_tokens=limit, temperature=0.0)
        assert (len(completion.token_ids), completion.finish_reason) == (limit, "length")


# seeds


def test_the_same_seed_gives_the_same_tokens(subject: Subject) -> None:
    prompt = prompts(1, seed=5)[0]

    def sample(seed: int, others: int) -> tuple[int, ...]:
        requests = [subject.request(prompt, seed=seed, max_tokens=24)]
        requests += [subject.request(other, seed=9, max_tokens=24) for other in prompts(others, seed=6)]
        return tuple(subject.ask(*requests)[0].token_ids)

    alone = {sample(7, 0), sample(7, 5), sample(7, 0)}
    if not subject.claims.samples:
        assert len(alone) == 1
        return
    others = {sample(seed, 0) for seed in (8, 9, 10)}
    assert len(others | alone) >= 4, "different seeds must give different tokens"
    if subject.claims.seeded:
        assert len(alone) == 1
    else:
        assert len(alone) > 1, "the engine keeps seeds and does not declare it"


# limits


def test_a_prompt_that_leaves_no_room_is_refused(subject: Subject) -> None:
    context = subject.model.config.max_position_embeddings
    too_long = [5] * context
    if not subject.claims.samples:  # no model, no context
        assert subject.ask_one(too_long, max_tokens=4).token_ids
        return
    with pytest.raises(EngineError, match=rf"{context} tokens"):
        subject.ask_one(too_long, max_tokens=4)


def test_a_completion_ends_at_the_end_of_the_context(subject: Subject) -> None:
    if not subject.claims.samples:
        return  # no context: the previous case asserts it
    context = subject.model.config.max_position_embeddings
    prompt = [random.Random(1).randrange(3, 760) for _ in range(context - 5)]
    completion = subject.ask_one(prompt, max_tokens=400)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ([3, 760], {}, "3 to 760.*0 to 759"),
        ([-1, 3], {}, "-1 to 3.*0 to 759"),
        ([3], {"max_tokens": 0}, "max_tokens is 0"),
        ([3], {"temperature": -1.0}, "temperature -1"),
    ],
)
def test_what_no_server_can_serve_is_refused_and_harms_nobody(
    subject: Subject, prompt: list[int], sampling: dict[str, float], message: str
) -> None:
    if not subject.claims.samples:
        return  # the prompt and the distribution have no effect on given texts
    good = subject.request(prompts(1)[0], max_tokens=8)

    async def both() -> list[Completion | BaseException]:
        bad = subject.request(prompt, **sampling)
        return await asyncio.gather(*map(subject.engine.generate, (bad, good)), return_exceptions=True)

    error, completion = subject.run(both())
    assert isinstance(error, EngineError)
    with pytest.raises(EngineError, match=message):
        raise error
    assert isinstance(completion, Completion)
    assert_exact(subject, good, completion)


def test_many_requests_at_once(subject: Subject) -> None:
    draw = random.Random(3)
    requests = [
        subject.request(prompt, seed=index, max_tokens=draw.randrange(1, 30), temperature=draw.choice([0.0, 0.7, 1.0]))
        for index, prompt in enumerate(prompts(40, seed=8))
    ]
    completions = subject.ask(*requests)
    for request, completion in zip(requests, completions, strict=True):
        assert_exact(subject, request, completion)
        if subject.claims.samples:
            assert len(completion.token_ids) == request.sampling.max_tokens
    if subject.claims.samples:
        entropy = -sum(sum(completion.logprobs) for completion in completions)
        assert torch.isfinite(torch.tensor(entropy))
        assert len({tuple(completion.token_ids) for completion in completions}) > 30


# An engine's life: cancelled requests, released conversations, the prefix cache between turns, the end.


async def until_running(subject: Subject, count: int) -> None:
    """Wait until the engine has this number of requests; fail after five minutes, of a busy machine."""
    deadline = time.monotonic() + 300
    while (running := await subject.running()) != count:
        assert time.monotonic() < deadline, f"{running} requests run, and not {count}"
        await asyncio.sleep(0.02)


async def start_requests(subject: Subject, requests: Sequence[Request]) -> list[asyncio.Task[Completion]]:
    """Send requests, and return their tasks when all of them run. To be called while the subject is slowed."""
    tasks = [asyncio.ensure_future(subject.engine.generate(request)) for request in requests]
    await until_running(subject, len(tasks))
    assert not any(task.done() for task in tasks)
    return tasks


def test_a_cancelled_request_is_freed(subject: Subject) -> None:
    if not subject.claims.samples:
        return  # texts are returned at once: nothing can be cancelled

    async def play() -> None:
        requests = [subject.request(prompt, max_tokens=1500) for prompt in prompts(3)]
        tasks = await start_requests(subject, requests)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert tasks[1].cancelled()
        await until_running(subject, 2)
        assert not tasks[0].done()
        assert not tasks[2].done()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until_running(subject, 0)

    with subject.slowed():
        subject.run(play())
    request = subject.request(prompts(1)[0], max_tokens=8)
    assert_exact(subject, request, *subject.ask(request))


def test_a_conversation_can_be_released_at_any_time(subject: Subject) -> None:
    subject.engine.release("never seen")
    first = subject.request(prompts(1)[0], conversation="released", max_tokens=6, stop_token_ids=(STOP,))
    for _ in range(2):  # a released conversation may begin again
        assert_exact(subject, first, *subject.ask(first))
        subject.engine.release("released")
        subject.engine.release("released")


def test_the_second_turn_takes_the_first_from_the_prefix_cache(subject: Subject) -> None:
    prompt = prompts(1, seed=11)[0] * 4
    (first,) = subject.ask(subject.request(prompt, conversation="two turns", max_tokens=30))
    history = [*prompt, *first.token_ids]
    if not subject.claims.samples:
        assert subject.ask_one(history, conversation="two turns", max_tokens=30).cached_tokens is None
        return
    request = subject.request([*history, *prompts(1, seed=12)[0]], conversation="two turns", max_tokens=5)
    (second,) = subject.ask(request)
    assert_exact(subject, request, second)
    subject.engine.release("two turns")
    block = subject.claims.cache_block
    if block is None:
        assert second.cached_tokens is None
        return
    # the last sampled token was never an input
    assert second.cached_tokens is not None
    assert (len(history) - 1) // block * block <= second.cached_tokens <= len(history)
    assert second.prompt_tokens == len(request.token_ids)


def test_a_conversation_has_its_turns_in_order(subject: Subject) -> None:
    """Two turns of several conversations at once: nobody receives the turn of another."""
    starts = prompts(8, seed=13)
    first = [
        subject.request(prompt, conversation=f"turns {index}", max_tokens=12, temperature=0.0)
        for index, prompt in enumerate(starts)
    ]
    answers = subject.ask(*first)
    second = [
        subject.request(
            [*prompt, *answer.token_ids, 5, 6], conversation=f"turns {index}", max_tokens=12, temperature=0.0
        )
        for index, (prompt, answer) in enumerate(zip(starts, answers, strict=True))
    ]
    for request, completion in zip([*first, *second], [*answers, *subject.ask(*second)], strict=True):
        assert_exact(subject, request, completion)
    if not subject.claims.samples:
        text = subject.renderer.encode(SCRIPT[1])
        assert list(subject.ask_one([1], conversation="turns 0", max_tokens=99).token_ids) != text
    for index in range(8):
        subject.engine.release(f"turns {index}")


def test_an_engine_that_is_closed_refuses(fresh_subject: Subject) -> None:
    """For engines in this process; servers are closed at the end of the suite."""
    subject = fresh_subject
    subject.run(subject.engine.close())
    subject.run(subject.engine.close())
    if subject.claims.samples:
        with pytest.raises(EngineError, match="closed"):
            subject.ask_one([5], max_tokens=3)


# New weights: between turns, in the middle of a turn, refused, and after the death of a server.


def next_version(subject: Subject) -> int:
    return subject.engine.version + 1


def publish_changed(subject: Subject) -> int:
    """Change the trainer's model and give the engine its weights. Returns their version."""
    version = next_version(subject)
    if subject.claims.takes_weights:
        change(subject.model, version)
    subject.run(subject.publish(version))
    assert subject.engine.version == version
    return version


def test_an_update_between_two_turns(subject: Subject) -> None:
    before = subject.engine.version
    first = subject.request(prompts(1, seed=20)[0], conversation="update", max_tokens=20)
    (answer,) = subject.ask(first)
    assert_exact(subject, first, answer)
    assert publish_changed(subject) == before + 1
    second = subject.request([*first.token_ids, *answer.token_ids, 7, 8], conversation="update", max_tokens=20)
    (answer,) = subject.ask(second)
    # `assert_exact`: all tokens have the new version, and the log-probabilities of the new weights after the whole history
    assert_exact(subject, second, answer)
    assert set(answer.versions) == {before + 1}
    if subject.claims.cache_block is not None:
        assert answer.cached_tokens == 0, "the keys and values of the previous weights were used"
    subject.engine.release("update")


def test_an_update_in_the_middle_of_a_turn(subject: Subject) -> None:
    """Requests that run during the update go on under the new weights."""
    if not subject.claims.samples:
        return  # a text is returned at once
    subject.ask(subject.request(prompts(1, seed=22)[0], max_tokens=8))  # the first request of a server is slow
    before, old = subject.engine.version, dict(subject.model.state_dict())
    old = {name: tensor.clone() for name, tensor in old.items()}
    prompt = prompts(1, seed=21)[0]
    # on a loaded machine, an update of a server may take as long as hundreds of tokens, although it samples slowly meanwhile
    count = 800 if subject.claims.processes else 300
    requests = [subject.request(prompt, seed=index, max_tokens=count) for index in range(3)]

    async def play() -> list[Completion]:
        with subject.slowed():
            running = await start_requests(subject, requests)
            change(subject.model, 99 + before)
            await subject.publish(before + 1)
        return await asyncio.gather(*running)

    completions = subject.run(play())
    for request, completion in zip(requests, completions, strict=True):
        versions = list(completion.versions)
        assert len(versions) == len(completion.token_ids) == len(completion.logprobs) == count
        switch = versions.index(before + 1)
        assert switch, "it has begun after the update"
        assert versions == [before] * switch + [before + 1] * (count - switch)
        new = reference_logprobs(subject.model, prompt, completion.token_ids, request.sampling, completion.logprob_kind)
        differ = [abs(a - b) > 1e-3 for a, b in zip(completion.logprobs, new, strict=True)]
        assert any(differ[:switch]), "the tokens before the update have the log-probabilities of the new weights"
        if subject.claims.recomputes:
            assert not any(differ[switch:])
        present = subject.model.state_dict()
        current = {name: tensor.clone() for name, tensor in present.items()}
        subject.model.load_state_dict(old)
        expected = reference_logprobs(
            subject.model, prompt, completion.token_ids[:switch], request.sampling, completion.logprob_kind
        )
        subject.model.load_state_dict(current)
        assert list(completion.logprobs[:switch]) == pytest.approx(expected, abs=2e-4)
    request = subject.request(prompt, max_tokens=10)
    assert_exact(subject, request, *subject.ask(request))


def test_weights_that_do_not_fit_leave_the_old_ones(subject: Subject) -> None:
    if not subject.claims.takes_weights:
        return
    version, state = subject.engine.version, dict(state_of(subject.model))
    name = "model.layers.1.self_attn.q_proj.weight"
    request = subject.request(prompts(1, seed=22)[0], max_tokens=12)

    def refuse(weights: dict[str, torch.Tensor]) -> None:
        with pytest.raises(EngineError):
            subject.run(subject.engine.load_weights(version + 1, weights))
        assert subject.engine.version == version
        completion = subject.ask(request)[0]
        assert_exact(subject, request, completion)
        assert set(completion.versions) == {version}

    refuse({key: tensor for key, tensor in state.items() if key != name})
    refuse({**state, name: torch.zeros(3, 4)})
    refuse({**state, "model.nothing.weight": torch.zeros(3)})


def test_servers_that_die_come_back_with_the_present_weights(subject: Subject) -> None:
    if not subject.claims.processes:
        with pytest.raises(AssertionError, match="has no processes"):
            subject.kill()
        return
    version = publish_changed(subject)
    prompt = prompts(1, seed=23)[0]
    requests = [subject.request(prompt, seed=index, max_tokens=200, temperature=0.8) for index in range(3)]

    async def play() -> list[Completion]:
        with subject.slowed():
            running = await start_requests(subject, requests)
            subject.kill()
        return await asyncio.gather(*running)

    for request, completion in zip(requests, subject.run(play()), strict=True):
        assert len(completion.token_ids) == 200
        assert set(completion.versions) == {version}
        assert_exact(subject, request, completion)


# Whole conversations with tools through the rollout loop: tokens, log-probabilities and versions as they were
# sampled.


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


# A server belongs to one trainer, and to those who have its token.


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


# A server as a teacher: what it says of given tokens.


@pytest.mark.parametrize("top_k", [1, 6])
def test_a_server_scores_given_tokens_as_the_model_does(subject: Subject, top_k: int) -> None:
    if not isinstance(subject, Server):
        return
    sequences = [(ids, sorted(random.Random(len(ids)).sample(range(1, len(ids)), 4))) for ids in prompts(3, seed=50)]
    scoring = ScoringServer(subject.server.url, "vllm" if subject.name == "vllm" else "sglang", timeout=120.0)
    scoring._server._headers = subject.server._headers  # servers of a run have a token, teachers have none
    found = subject.run(scoring.score(sequences, top_k))
    for (ids, places), scored in zip(sequences, found, strict=True):
        assert not isinstance(scored, EngineError), scored
        with torch.no_grad():
            logits_LV = subject.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for place, token in zip(places, scored, strict=True):
            own_V = logits_LV[place - 1]
            assert token.logprob == pytest.approx(float(own_V[ids[place]]), abs=1e-4)
            assert [logprob for _, logprob in token.top] == pytest.approx(own_V.topk(top_k).values.tolist(), abs=1e-4)
            assert [float(own_V[id]) for id, _ in token.top] == pytest.approx(
                [logprob for _, logprob in token.top], abs=1e-4
            )


# LoRA adapters that are replaced while the engine runs. The base weights stay.


def change_adapter(subject: Adapted, seed: int) -> None:
    """Give both factors of all layers random values: a new adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_an_adapter_is_loaded_between_turns(adapted: Adapted) -> None:
    prompt = prompts(1, seed=30)[0]
    base = reference_logprobs(adapted.model, prompt[:1], prompt[1:], *adapted.raw)
    for seed in (1, 2):
        version = adapted.engine.version + 1
        change_adapter(adapted, seed)
        assert reference_logprobs(adapted.model, prompt[:1], prompt[1:], *adapted.raw) != pytest.approx(base, abs=0.1)
        adapted.run(adapted.publish(version))
        assert adapted.engine.version == version
        requests = [adapted.request(prompt, conversation=f"a{n}", seed=n, max_tokens=24) for n in range(4)]
        for request, completion in zip(requests, adapted.ask(*requests), strict=True):
            assert_exact(adapted, request, completion)


def test_requests_that_run_go_on_with_the_new_adapter(adapted: Adapted) -> None:
    before, prompt = adapted.engine.version, prompts(1, seed=31)[0]
    requests = [adapted.request(prompt, seed=index, max_tokens=200) for index in range(2)]

    async def play() -> list[Completion]:
        with adapted.slowed():
            running = await start_requests(adapted, requests)
            change_adapter(adapted, 3)
            await adapted.publish(before + 1)
        return await asyncio.gather(*running)

    for request, completion in zip(requests, adapted.run(play()), strict=True):
        versions = list(completion.versions)
        switch = versions.index(before + 1)
        assert versions == [before] * switch + [before + 1] * (200 - switch)
        if adapted.claims.processes:  # servers get the request again
            kind = completion.logprob_kind
            new = reference_logprobs(adapted.model, prompt, completion.token_ids, request.sampling, kind)
            assert list(completion.logprobs[switch:]) == pytest.approx(new[switch:], abs=2e-4)


def test_an_adapter_that_cannot_be_loaded_leaves_the_old_one(adapted: Adapted) -> None:
    if not adapted.claims.processes:
        return  # the engine samples with the trainer's own adapter: there is no other
    version = adapted.engine.version
    with pytest.raises(EngineError):
        adapted.run(adapted.publish_damaged(version + 1))
    assert adapted.engine.version == version
    request = adapted.request(prompts(1, seed=32)[0], max_tokens=12)
    completion = adapted.ask(request)[0]
    assert set(completion.versions) == {version}
    assert_exact(adapted, request, completion)
