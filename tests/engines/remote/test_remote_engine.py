"""Engines on servers: requests, answers, faults and connections, against a server of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from support.fake_server import CONTEXT, STOP, VOCAB, FakeApi, FakeServer, fake_servers, rule
from support.tiny import tiny_model
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import HttpLimits, HttpServer
from turnwise.engines.remote.publisher import ProbeOptions, RemoteWeights
from turnwise.engines.remote.server_process import python_path
from turnwise.engines.remote.servers import Probe, ProbeAnswer, Replica, check_answer
from turnwise.engines.remote.weights import CannotShare, SharedCopies, WeightFiles
from turnwise.errors import EngineError
from turnwise.training.local_learner import LocalLearner
from turnwise.types import Completion, Constraint, Request, Sampling
from turnwise.user_code.calls import conversation, deadline

# The shared layer of engines on servers, against a small server that fails on demand.


LIMITS = HttpLimits(connect=2, answer=5, idle=0.5, retries=0, failing=0)

WEIGHTS = {"weight": torch.ones(3)}


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 30))


def request(prompt: list[int], *, conversation: str = "c", seed: int = 5, **sampling: Any) -> Request:
    options = {"max_tokens": 8, "stop_token_ids": (STOP,), **sampling}
    return Request(conversation=conversation, token_ids=prompt, sampling=Sampling(**options), seed=seed)


def expected(last: int, count: int, version: int = 0) -> list[int]:
    tokens = []
    for _ in range(count):
        last = rule(last, version)
        tokens.append(last)
    return tokens


@asynccontextmanager
async def engine_on(servers: list[FakeServer], *, files: Path | None = None, token: str | None = None, **options: Any):
    own = {name: options.pop(name) for name in ("answer", "failing") if name in options}
    limits = replace(LIMITS, **own)
    replicas = [
        Replica(HttpServer(server.url, token=token, limits=limits), health_path="/health") for server in servers
    ]
    engine = RemoteEngine(
        FakeApi(options.pop("owner", "a")),
        replicas,
        decode=lambda ids: "".join(chr(97 + token % 26) for token in ids),
        files=None if files is None else WeightFiles(files),
        patience=options.pop("patience", 0.2),
        **options,
    )
    try:
        yield engine
    finally:
        await engine.close()


def test_a_completion_has_the_servers_tokens_logprobs_versions_and_cache_hits() -> None:
    async def main() -> None:
        async with fake_servers() as servers, engine_on(servers) as engine:
            completion = await engine.generate(request([3, 4]))
            assert list(completion.token_ids) == expected(4, 8)
            assert completion.finish_reason == "length"
            assert list(completion.logprobs) == [-0.5] * 8
            assert list(completion.versions) == [0] * 8
            assert (completion.prompt_tokens, completion.cached_tokens) == (2, 1)
            stopped = await engine.generate(request([VOCAB - 3]))
            assert list(stopped.token_ids) == [VOCAB - 2, VOCAB - 1, STOP]
            assert stopped.finish_reason == "stop"

    run(main())


@pytest.mark.parametrize("fault", ["break_after", "abort_after"])
def test_a_request_goes_on_after_the_tokens_that_are_known(fault: str) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            getattr(server, fault).extend([3, 2])
            completion = await engine.generate(request([4]))
            assert list(completion.token_ids) == expected(4, 8)
            assert completion.finish_reason == "length"
            sent = [len(body["ids"]) for body in server.requests]
            assert sent == [1, 4, 6]
            assert [body["max"] for body in server.requests] == [8, 5, 3]
            assert len({body["seed"] for body in server.requests}) == 3
            assert completion.cached_tokens == 0  # of the first request: later ones find their own tokens

    run(main())


@pytest.mark.parametrize("fault", ["break_after", "abort_after"])
def test_a_request_with_a_grammar_begins_again(fault: str) -> None:
    """A server does not know where in its grammar a turn is that another one has begun."""
    under = replace(request([4]), constraint=Constraint(grammar="", stops=(STOP,), start=1))

    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            getattr(server, fault).extend([3, 2])
            assert list((await engine.generate(under)).token_ids) == expected(4, 8)
            assert [len(body["ids"]) for body in server.requests] == [1, 1, 1]
            begun = replace(under, constraint=Constraint(grammar="", stops=(), before="It is"))
            with pytest.raises(
                EngineError, match="the turn begins with 'It is', which was not sampled, and has a form"
            ):
                await engine.generate(begun)

    run(main())


def test_a_server_whose_log_probabilities_come_before_the_mask_is_refused() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], constrains=True) as engine:
            with pytest.raises(
                EngineError, match=r"-0.5 instead of 0\) without the mask of a grammar: start it otherwise"
            ):
                await engine.start()

    run(main())


def test_a_stop_text_that_begins_in_one_part_and_ends_in_the_next_ends_the_turn() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            server.abort_after.append(3)
            completion = await engine.generate(request([4], stop=("hi",)))  # tokens 5 to 12 are "fghijklm"
            assert list(completion.token_ids) == [5, 6, 7, 8]
            assert completion.finish_reason == "stop"

    run(main())


def test_a_request_that_kills_each_server_fails_alone() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            server.break_after.extend([0, 0, 0])
            with pytest.raises(EngineError, match="lost its server 3 times without a new token"):
                await engine.generate(request([4]))
            assert list((await engine.generate(request([4]))).token_ids) == expected(4, 8)

    run(main())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"logprobs": []}, "1 token ids and 0 log-probabilities"),
        ({"ids": [VOCAB]}, f"token id {VOCAB}; the model has the ids 0 to {VOCAB - 1}"),
        ({"ids": [-1]}, "token id -1"),
        ({"ids": ["3"]}, "token id '3'"),
        ({"logprobs": [float("nan")]}, "nan as the log-probability"),
        ({"logprobs": [-9999.0]}, "-9999.0 as the log-probability"),
        ({"logprobs": [0.5]}, "0.5 as the log-probability"),
        ({"logprobs": [None]}, "None as the log-probability"),
        ({"ids": [1] * 9, "logprobs": [-0.5] * 9}, "9 tokens where 8 were allowed"),
    ],
)
def test_a_bad_answer_is_refused_with_its_value_and_the_rule(bad: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            server.bad = bad
            with pytest.raises(EngineError, match=message) as raised:
                await engine.generate(request([4]))
            assert server.url in str(raised.value)
            server.bad = {}
            await engine.generate(request([4]))  # the engine goes on

    run(main())


def test_a_server_that_fails_at_a_long_prompt_fails_that_request_only() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            server.status = 500
            with pytest.raises(EngineError, match="failed with status 500: out of memory"):
                await engine.generate(request([4]))
            server.status = 200
            await engine.generate(request([4]))

    run(main())


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_fails_for_a_while_and_is_healthy_gets_all_requests_again(status: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path, failing=10) as engine:
            server.failing, server.failing_status = 0.3, status  # while it is claimed
            await engine.start()
            server.failing = 0.3
            completions = await asyncio.gather(*(engine.generate(request([4], conversation=str(n))) for n in range(3)))
            assert [list(completion.token_ids) for completion in completions] == [expected(4, 8)] * 3
            server.failing = 0.3
            await engine.load_weights(1, WEIGHTS)
            assert (engine.version, server.version) == (1, 1)
            server.failing = 0.3
            await engine.update(2, None, Probe(prompt=[1], tokens=2, logprobs=lambda _: [-0.6] * 2, tolerance=1e-4))
            assert server.failures >= 6

    run(main())


def test_a_server_that_fails_for_too_long_fails_its_requests_with_the_time() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], failing=0.4) as engine:
            await engine.start()
            server.failing, server.failing_status = 60.0, 502
            with pytest.raises(EngineError, match=r"failed with status 502: bad gateway \(sent 2 times in \d+ s\)"):
                await engine.generate(request([4]))

    run(main())


def test_a_request_at_which_a_server_fails_that_serves_others_is_given_up() -> None:
    """The server has failed at this request only: it is not repeated until the time is over."""

    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], failing=3600) as engine:
            await engine.start()
            server.bad, server.bad_first = {"error": {"message": "illegal memory access"}}, 4
            task = asyncio.create_task(engine.generate(request([4])))
            others = iter(range(1000))
            while not task.done():
                await engine.generate(request([9], conversation=f"other {next(others)}"))
                await asyncio.sleep(0.1)
            with pytest.raises(EngineError, match=r"illegal memory access \(sent 3 times"):
                await task

    run(main())


def test_a_retry_does_not_count_for_the_time_limit_of_a_turn() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], failing=10) as engine:
            await engine.start()
            server.failing = 1.0
            with conversation("c"):
                async with deadline(1.0):
                    assert len((await engine.generate(request([4]))).token_ids) == 8

    run(main())


def test_a_trainer_that_fails_before_its_server_is_ready_leaves_it_to_the_next_trainer(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,):
            server.fail_info = True
            async with engine_on([server], files=tmp_path) as first:
                with pytest.raises(EngineError, match="status 404"):
                    await first.start()
                assert server.owner == "a"
            assert server.owner is None
            server.fail_info = False
            async with engine_on([server], files=tmp_path, owner="b") as second:
                await second.start()

    run(main())


def test_a_trainer_that_is_stopped_while_it_claims_a_server_leaves_it_to_the_next_trainer(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,):
            async with engine_on([server], files=tmp_path) as first:
                server.claiming = asyncio.Event()
                start = asyncio.create_task(first.start())
                await server.claiming.wait()  # the server has the request, and has not answered it
                start.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await start
                server.claiming = None
            assert server.owner is None

    run(main())


def test_an_engine_takes_the_context_of_its_servers(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], context=50) as engine:
            server.context = 20
            assert engine.context is None
            await engine.start()
            assert engine.context == 20
            assert len((await engine.generate(request([1] * 15, max_tokens=30))).token_ids) == 5

    run(main())
    (line,) = caplog.messages
    assert "takes 20 tokens, and conversations of this recipe may have 50" in line


def test_a_prompt_that_cannot_be_served_is_refused_before_it_is_sent() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            for prompt, message in (([], "empty"), ([VOCAB], "token ids from"), ([1] * CONTEXT, "no token can be")):
                with pytest.raises(EngineError, match=message):
                    await engine.generate(request(prompt))
            assert server.requests == []
            cut = await engine.generate(request([1] * (CONTEXT - 2)))
            assert len(cut.token_ids) == 2
            assert cut.finish_reason == "length"

    run(main())


def test_a_server_that_is_not_there_or_refuses_the_token_is_named() -> None:
    async def main() -> None:
        async with fake_servers() as (server,):
            server.token = "right"
            async with engine_on([server], token="wrong") as engine:
                with pytest.raises(EngineError, match=r"status 401: Unauthorized.*engine\.api_key_env"):
                    await engine.generate(request([4]))
            async with engine_on([server], token="right") as engine:
                await engine.generate(request([4]))
            await server.stop()
            async with engine_on([server]) as engine:
                with pytest.raises(EngineError, match=r"there is no server at http://127.*engine\.url"):
                    await engine.generate(request([4]))

    run(main())


def test_a_server_that_hangs_is_given_up_after_the_time_limit() -> None:
    async def main() -> None:
        async with fake_servers(2) as servers, engine_on(servers) as engine:
            await engine.start()
            servers[0].hang = servers[1].hang = True
            task = asyncio.create_task(engine.generate(request([4])))
            await asyncio.sleep(0.2)
            hung = next(server for server in servers if server.requests)
            other = next(server for server in servers if not server.requests)
            other.hang = False
            assert list((await task).token_ids) == expected(4, 8)
            assert len(other.requests) == 1
            hung.hang = False

    run(main())


def test_waiting_requests_are_not_given_up_while_others_make_progress() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            server.delay = 0.2  # 8 tokens take longer than the idle limit of 0.5 s
            completion = await engine.generate(request([4]))
            assert len(completion.token_ids) == 8
            assert len(server.requests) == 1

    run(main())


def test_a_cancelled_request_is_cancelled_at_the_server() -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            server.delay = 0.05
            task = asyncio.create_task(engine.generate(request([4])))
            await asyncio.sleep(0.15)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.2)
            assert server.cancelled == 1

    run(main())


def test_conversations_keep_their_server_and_are_spread_over_all() -> None:
    async def main() -> None:
        async with fake_servers(3) as servers, engine_on(servers) as engine:
            for _ in range(2):
                await asyncio.gather(*(engine.generate(request([4], conversation=str(n), seed=n)) for n in range(9)))
            seeds = [sorted(body["seed"] for body in server.requests) for server in servers]
            assert [len(own) for own in seeds] == [6, 6, 6]
            assert all(own[0::2] == own[1::2] for own in seeds)
            await servers[0].stop()  # its conversations go to the others
            await asyncio.gather(*(engine.generate(request([4], conversation=str(n), seed=n)) for n in range(9)))
            assert sum(len(server.requests) for server in servers[1:]) >= 12 + 9

    run(main())


def test_new_weights_reach_requests_that_are_running(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path) as engine:
            await engine.start()
            server.delay = 0.05
            task = asyncio.create_task(engine.generate(request([4])))
            await asyncio.sleep(0.22)
            await engine.load_weights(3, WEIGHTS)
            completion: Completion = await task
            old = list(completion.versions).count(0)
            assert 0 < old < 8
            assert list(completion.versions) == [0] * old + [3] * (8 - old)
            assert list(completion.token_ids) == [
                *expected(4, old),
                *expected(completion.token_ids[old - 1], 8 - old, 3),
            ]
            assert engine.version == 3
            assert server.events == ["claim", "resume", "label", "pause", "load", "resume"]

    run(main())


def test_all_servers_load_new_weights_at_the_same_time_and_requests_run_while_they_are_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers(3) as servers, engine_on(servers, files=tmp_path) as engine:
            await engine.start()
            barrier = asyncio.Barrier(3)  # one after the other, no update would be answered
            for server in servers:
                server.loading = barrier
            written, served = threading.Event(), threading.Event()

            class Slow(dict[str, Any]):
                """Weights that are written when a request has been served."""

                def items(self) -> Any:
                    written.set()
                    assert served.wait(60)
                    return super().items()

            update = asyncio.create_task(engine.load_weights(1, Slow(WEIGHTS)))
            await asyncio.to_thread(written.wait, 60)
            assert list((await engine.generate(request([4]))).versions) == [0] * 8
            served.set()
            await update
            assert [server.version for server in servers] == [1, 1, 1]

    run(main())


def test_a_failed_update_leaves_the_old_weights_and_the_version(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers(2) as servers, engine_on(servers, files=tmp_path) as engine:
            await engine.load_weights(1, WEIGHTS)
            servers[1].fail_load = True
            with pytest.raises(EngineError, match=r"version 2 were not taken over; the engine goes on with version 1"):
                await engine.load_weights(2, WEIGHTS)
            assert engine.version == 1
            assert servers[0].version == 1
            completion = await engine.generate(request([4]))
            assert list(completion.versions) == [1] * 8
            assert list(completion.token_ids) == expected(4, 8, 1)
            assert len(list(tmp_path.rglob("*.safetensors"))) == 1
        assert list(tmp_path.rglob("*")) == []

    run(main())


@pytest.mark.parametrize("hanging", [1, 2])
def test_a_server_that_hangs_in_an_update_gets_it_again_or_keeps_the_old_weights(tmp_path: Path, hanging: int) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path, answer=0.5) as engine:
            await engine.load_weights(1, WEIGHTS)
            server.hanging_loads = hanging  # the second attempt of an update is the last
            if hanging == 1:
                await engine.load_weights(2, WEIGHTS)
            else:
                with pytest.raises(EngineError, match=r"goes on with version 1: .*no answer within 0\.5 s"):
                    await engine.load_weights(2, WEIGHTS)
            version = 3 - hanging
            assert engine.version == version
            completion = await engine.generate(request([4]))
            assert list(completion.versions) == [version] * 8
            assert list(completion.token_ids) == expected(4, 8, version)

    run(main())


def test_wrong_log_probabilities_after_an_update_take_it_back(tmp_path: Path) -> None:
    probe = Probe(prompt=[1, 2], tokens=4, logprobs=lambda ids: [-0.7] * (len(ids) - 1), tolerance=1e-4)

    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path) as engine:
            await engine.load_weights(1, WEIGHTS)
            server.delay = 0.03
            server.wrong_weights = True
            task = asyncio.create_task(engine.generate(request([4])))
            await asyncio.sleep(0.1)
            with pytest.raises(EngineError, match=r"differ by 8\.3, and at most 0\.0001 is rounding"):
                await engine.update(2, WEIGHTS, probe)
            completion = await task  # tokens of the rejected weights were sampled again
            assert list(completion.versions) == [1] * 8
            assert list(completion.token_ids) == expected(4, 8, 1)
            server.wrong_weights = False
            await engine.update(2, WEIGHTS, probe)
            assert engine.version == 2
            assert engine.deviation == pytest.approx(0.0, abs=1e-9)

    run(main())


@pytest.mark.parametrize(
    ("largest", "difference", "right"),
    [(None, 0.49, True), (None, 0.51, False), (5.0, 0.51, False), (36.0, 0.55, True), (36.0, 0.57, False)],
)
def test_how_far_a_probe_may_differ_depends_on_the_logits_where_something_is_in_bfloat16(
    largest: float | None, difference: float, right: bool
) -> None:
    seen: list[Sequence[int]] = []

    def largest_logit(ids: Sequence[int]) -> float:
        seen.append(ids)
        return largest or 0.0

    probe = Probe(
        prompt=[1, 2],
        tokens=2,
        logprobs=lambda ids: [-0.7] * (len(ids) - 1),
        tolerance=0.5,
        largest_logit=None if largest is None else largest_logit,
    )
    answer = ProbeAnswer(server="a", token_ids=[3, 4], logprobs=[-0.7, -0.7 - difference], versions=[1, 1])
    if right:
        assert check_answer(answer, probe, 1) == pytest.approx(difference)
    else:
        most = 0.562 if largest == 36 else 0.5
        with pytest.raises(EngineError, match=f"differ by {difference}, and at most {most} is rounding"):
            check_answer(answer, probe, 1)
    assert seen == ([[1, 2, 3, 4]] if largest is not None else [])


def test_the_mean_difference_of_a_quantized_server_is_compared() -> None:
    probe = Probe(prompt=[1], tokens=2, logprobs=lambda ids: [-1.0] * (len(ids) - 1), tolerance=1.0, averaged=True)

    def answer(*logprobs: float) -> ProbeAnswer:
        return ProbeAnswer(server="a", token_ids=[3, 4], logprobs=logprobs, versions=[1, 1])

    assert check_answer(answer(-0.75, -2.5), probe, 1) == pytest.approx(0.875)
    with pytest.raises(EngineError, match=r"differ by 1\.25 in the mean, and at most 1 is rounding"):
        check_answer(answer(-0.75, -3.25), probe, 1)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_probe_knows_the_logits_of_the_trainer_where_something_is_in_bfloat16(bfloat16: bool) -> None:
    class Probed:
        """An engine that keeps what it is asked."""

        probe: Probe | None = None

        async def start(self) -> None:
            pass

        async def update(self, version: int, weights: object, probe: Probe | None = None) -> None:
            self.probe = probe

    engine, learner = Probed(), LocalLearner(tiny_model(), sampling=Sampling())
    run(RemoteWeights(engine, learner, ProbeOptions(vocab_size=260, bfloat16=bfloat16)).publish(1))
    assert engine.probe is not None
    if not bfloat16:
        assert engine.probe.largest_logit is None
        return
    assert engine.probe.largest_logit is not None
    with torch.no_grad():
        largest = float(learner.model(torch.tensor([[4, 5, 6]])).logits.abs().amax())
    assert engine.probe.largest_logit([4, 5, 6]) == pytest.approx(largest)


def test_a_second_trainer_is_refused_at_a_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,):
            async with engine_on([server], files=tmp_path) as first:
                await first.start()
                async with engine_on([server], files=tmp_path, owner="b") as second:
                    with pytest.raises(EngineError, match="the server belongs to a"):
                        await second.start()
                await first.load_weights(1, WEIGHTS)
            async with engine_on([server], files=tmp_path, owner="b") as second:
                await second.start()  # the first has released it

    run(main())


def test_an_evaluation_at_the_server_of_a_trainer_leaves_the_server_to_the_trainer(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path) as trainer:
            await trainer.load_weights(1, WEIGHTS)
            async with engine_on([server], owner="evaluation", version=1) as evaluation:
                assert list((await evaluation.generate(request([4]))).token_ids) == expected(4, 8, 1)
            assert server.owner == "a"
            assert "release" not in server.events

    run(main())


def test_the_replacement_of_a_killed_trainer_takes_over_its_server_at_once(tmp_path: Path) -> None:
    """The killed trainer has paused the server for an update, and has released nothing."""

    async def main() -> None:
        async with fake_servers() as (server,):
            killed = "host:/runs/a, rollout worker 1"
            server.owner, server.version, server.label = killed, 7, "7"
            server.running.clear()
            with pytest.raises(EngineError, match=f"the server belongs to {killed}"):
                async with engine_on([server], files=tmp_path, owner="host:/runs/a, rollout worker 2") as other:
                    await other.start()
            assert not server.running.is_set()  # the other has not touched it
            async with engine_on([server], files=tmp_path, owner=killed) as engine:
                await engine.start()
                assert server.events[-3:] == ["claim", "resume", "label"]
                await engine.load_weights(8, WEIGHTS)
                completion = await engine.generate(request([4]))
                assert list(completion.versions) == [8] * 8
                assert list(completion.token_ids) == expected(4, 8, 8)
            assert server.owner is None

    run(main())


@pytest.mark.slow
def test_the_weights_of_a_killed_process_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.engines.remote.weights.SHARED_MEMORY", tmp_path)
    program = (
        "import os, signal, torch, turnwise.engines.remote.weights as weights; from pathlib import Path; "
        f"weights.SHARED_MEMORY = Path({str(tmp_path)!r}); "
        "weights.WeightFiles().write(1, {'weight': torch.ones(3)}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": python_path()}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    (abandoned,) = tmp_path.iterdir()
    first, second = WeightFiles(), WeightFiles()
    used = first.write(1, WEIGHTS).path
    other = second.write(1, WEIGHTS).path
    assert used is not None
    assert other is not None
    assert used.exists()  # the lock of a living process is respected
    assert not abandoned.exists()
    assert {path.name for path in tmp_path.iterdir()} == {used.parent.name, other.parent.name}
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_comes_back_gets_the_present_weights(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path, patience=5.0) as engine:
            await engine.load_weights(4, WEIGHTS)
            port = int(server.url.rpartition(":")[2])
            await server.stop()
            server.version, server.label, server.owner = 0, "-1", None
            task = asyncio.create_task(engine.generate(request([4])))
            await asyncio.sleep(0.3)
            await server.start(port)
            completion = await task
            assert list(completion.versions) == [4] * 8
            assert list(completion.token_ids) == expected(4, 8, 4)

    run(main())


def test_policies_at_one_server_have_weights_and_versions_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path, patience=5.0) as engine:
            second = engine.with_policy("second", 4)
            await engine.load_weights(5, WEIGHTS)
            await second.load_weights(7, WEIGHTS)

            async def check() -> None:
                for sampler, version in ((engine, 5), (second, 7)):
                    completion = await sampler.generate(request([4]))
                    assert sampler.version == version
                    assert list(completion.versions) == [version] * 8
                    assert list(completion.token_ids) == expected(4, 8, version)

            await check()
            server.fail_load = True
            with pytest.raises(
                EngineError, match=r"version 8 of the policy 'second' were not taken over; .* version 7"
            ):
                await second.load_weights(8, WEIGHTS)
            await check()
            port = int(server.url.rpartition(":")[2])
            await server.stop()
            server.version, server.label, server.owner, server.adapters = 0, "-1", None, {}
            task = asyncio.create_task(second.generate(request([4])))
            await asyncio.sleep(0.3)
            await server.start(port)
            assert list((await task).versions) == [7] * 8
            await check()
            assert len(list(tmp_path.rglob("*.safetensors"))) == 2
        assert list(tmp_path.rglob("*")) == []

    run(main())


def test_requests_wait_while_the_servers_sleep(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers(2) as servers, engine_on(servers, files=tmp_path) as engine:
            await engine.start()
            await engine.sleep()
            task = asyncio.create_task(engine.generate(request([4])))
            await asyncio.sleep(0.2)
            assert not task.done()
            assert not any(server.requests for server in servers)
            await engine.load_weights(1, WEIGHTS)
            assert list((await task).token_ids) == expected(4, 8, 1)
            for server in servers:
                assert server.events[3:] == ["sleep", "wake weights", "pause", "load", "wake cache", "resume"]

    run(main())


def test_servers_that_sleep_wake_for_the_next_weights(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path, sleeps=True) as engine:
            publisher = engine.publisher(LocalLearner(tiny_model(), sampling=Sampling()))
            await publisher.begin(0)
            assert not publisher.asleep
            await publisher.before_update()
            assert publisher.asleep
            server.events.clear()
            await publisher.publish(1)
            assert server.events[:3] == ["wake weights", "pause", "load"]
            assert server.events.index("wake cache") < server.events.index("resume")
            assert not publisher.asleep

    run(main())


def test_a_server_that_refuses_the_weights_after_it_has_slept_goes_on_with_the_present_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path) as engine:
            await engine.load_weights(1, WEIGHTS)
            await engine.sleep()
            server.events.clear()
            server.fail_load = True
            with pytest.raises(EngineError, match="goes on with version 1"):
                await engine.load_weights(2, WEIGHTS)
            assert server.events == ["wake weights", "pause", "load", "pause", "load", "wake cache", "resume"]
            assert list((await engine.generate(request([4]))).token_ids) == expected(4, 8, 1)

    run(main())


def test_a_server_that_sleeps_and_keeps_its_weights_takes_all_its_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path) as engine:
            await engine.load_weights(1, WEIGHTS)
            await engine.sleep()
            server.events.clear()
            await engine.load_weights(2)
            assert server.events == ["wake weights", "pause", "wake cache", "resume", "label"]

    run(main())


def test_a_server_that_is_lost_while_it_sleeps_gets_the_next_weights(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], files=tmp_path, patience=10.0) as engine:
            await engine.load_weights(1, WEIGHTS)
            await engine.sleep()
            port = int(server.url.rpartition(":")[2])
            await server.stop()
            server.version, server.label, server.owner = 0, "-1", None  # it is started again by somebody
            update = asyncio.create_task(engine.load_weights(2, WEIGHTS))
            await asyncio.sleep(0.3)
            await server.start(port)
            await update
            completion = await engine.generate(request([4]))
            assert list(completion.versions) == [2] * 8
            assert list(completion.token_ids) == expected(4, 8, 2)

    run(main())


def test_a_server_that_is_restored_stays_away_while_the_others_sleep(tmp_path: Path) -> None:
    """It would take all its memory, which the trainer uses then."""

    async def main() -> None:
        async with fake_servers(2) as (kept, lost), engine_on([kept, lost], files=tmp_path, patience=10.0) as engine:
            await engine.load_weights(1, WEIGHTS)
            port = int(lost.url.rpartition(":")[2])
            await lost.stop()
            engine._replicas.lose(engine._replicas.all[1])
            await engine.generate(request([4]))
            assert engine._replicas._restoring
            await engine.sleep()
            lost.events.clear()
            lost.version, lost.label, lost.owner = 0, "-1", None
            await lost.start(port)
            await asyncio.sleep(0.7)  # it is looked for every half second
            assert lost.events == []
            await engine.load_weights(2, WEIGHTS)
            assert lost.version == kept.version == 2

    run(main())


async def cannot_share(self: FakeApi, server: HttpServer) -> None:
    raise CannotShare(f"{server.url} cannot read weights from the trainer's memory")


def test_an_update_before_the_start_is_kept_as_the_servers_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeApi, "claim", cannot_share)

    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            engine._files = SharedCopies(WeightFiles(tmp_path))
            for version in (1, 2):
                await engine.load_weights(version, WEIGHTS)
                assert engine._main.update is not None
                assert engine._main.update.path is not None

    run(main())


def test_a_server_that_cannot_share_memory_after_a_restart_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot get the present weights, which are no file."""

    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server]) as engine:
            engine._files = SharedCopies(WeightFiles(tmp_path))
            await engine.load_weights(1, WEIGHTS)
            engine._replicas.lose(engine._replicas.all[0])
            monkeypatch.setattr(FakeApi, "claim", cannot_share)
            with pytest.raises(EngineError, match=f"{server.url} cannot read weights"):
                await engine.load_weights(2, WEIGHTS)
            assert engine.version == 1

    run(main())


def test_the_restart_of_a_server_does_not_count_for_the_time_limit_of_a_turn() -> None:
    async def turn(engine: RemoteEngine) -> list[int]:
        with conversation("c"):
            async with deadline(0.5):
                return list((await engine.generate(request([4]))).token_ids)

    async def main() -> None:
        async with fake_servers() as (server,), engine_on([server], patience=10.0) as engine:
            assert await turn(engine) == expected(4, 8)
            port = int(server.url.rpartition(":")[2])
            await server.stop()
            task = asyncio.create_task(turn(engine))
            await asyncio.sleep(1.5)
            await server.start(port)
            assert await task == expected(4, 8)

    run(main())


# Wrong answers in the forms of vLLM and SGLang: each fails its request with a message, and the engine goes on.


MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"

ANSWERS_VOCAB = 760

Answer = dict[str, Any]


def vllm_answer(ids: list[int], logprobs: list[float] | None = None) -> Answer:
    """A complete answer, as vLLM's /inference/v1/generate sends it."""
    content = [{"logprob": value} for value in ([-0.5] * len(ids) if logprobs is None else logprobs)]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}]}


def sglang_answer(ids: list[int], logprobs: list[float] | None = None) -> Answer:
    """A complete answer, as SGLang's /generate sends it."""
    entries = [[value, 7, None] for value in ([-0.5] * len(ids) if logprobs is None else logprobs)]
    meta = {"output_token_logprobs": entries, "finish_reason": {"type": "length", "length": len(ids)}}
    return {"output_ids": ids, "meta_info": meta}


ANSWERS: dict[str, Callable[..., Answer]] = {"vllm": vllm_answer, "sglang": sglang_answer}


@dataclass
class Replies:
    """A server that has the routes of vLLM and SGLang, and sends `events` as the answer to each streamed request."""

    name: str
    events: list[Any] = field(default_factory=list)
    about: Any = None
    """The server's description of itself, in the place of the right one."""
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        for path, answer in {"/health": {}, "/v1/models": self._models(), "/server_info": self._info()}.items():
            app.router.add_get(path, self._fixed(answer))
        app.router.add_post("/abort_request", self._fixed({}))
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    def _models(self) -> Any:
        return self.about or {"data": [{"id": "policy", "max_model_len": 64}]}

    def _info(self) -> Any:
        return self.about or {"max_req_input_len": 63, "incremental_streaming_output": True}

    def _fixed(self, answer: Any) -> Callable[[web.Request], Any]:
        async def reply(request: web.Request) -> web.Response:
            return web.json_response(answer)

        return reply

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response(self._probed(body))
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _probed(self, body: dict[str, Any]) -> Answer:
        """The answers to the requests that find out what log-probabilities mean."""
        if self.name == "vllm":
            return vllm_answer([7] * 12, [0.0] * 12)
        prompt = body["input_ids"]
        return {
            **sglang_answer([7] * 12),
            "meta_info": {**sglang_answer([7] * 12)["meta_info"], "input_token_logprobs": [[-1.0, 7]] * len(prompt)},
        }


def answers_engine_on(replies: Replies) -> RemoteEngine:
    config = checked(
        {
            "model": {"path": str(MODEL), "device": "cpu"},
            "data": {"train": "rows.jsonl"},
            "engine": {"name": replies.name, "url": replies.url, "start_timeout": 2},
        },
        source="test",
    )
    engine = assembly.engine(config, assembly.renderer(config), None)
    assert isinstance(engine, RemoteEngine)
    for replica in engine._replicas.all:
        replica.server.limits = replace(replica.server.limits, failing=0)
    return engine


def answers_request() -> Request:
    return Request(conversation="c", token_ids=[5, 6], sampling=Sampling(max_tokens=3), seed=1)


def ask(replies: Replies) -> None:
    """Send a request that receives the wrong answer, and a second request that receives a right one."""

    async def main() -> None:
        async with replies.running():
            engine = answers_engine_on(replies)
            try:
                await engine.start()
                wrong, replies.events = replies.events, [ANSWERS[replies.name]([7, 8, 9])]
                assert list((await engine.generate(answers_request())).token_ids) == [7, 8, 9]
                right, replies.events = replies.events, wrong
                try:
                    await engine.generate(answers_request())
                finally:
                    replies.events = right
                    assert list((await engine.generate(answers_request())).token_ids) == [7, 8, 9]
            finally:
                await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([7, 8, 9], [-0.5, -0.5], "returned 3 token ids and 2 log-probabilities; there must be one for each token"),
        ([7, 8, 9], [], "returned 3 token ids and 0 log-probabilities"),
        (
            [7, ANSWERS_VOCAB, 9],
            None,
            f"returned the token id {ANSWERS_VOCAB}; the model has the ids 0 to {ANSWERS_VOCAB - 1}",
        ),
        ([7, -1, 9], None, "returned the token id -1"),
        ([7, 8, 9, 9], None, "returned 4 tokens where 3 were allowed"),
        ([7, 8, 9], [-0.5, None, -0.5], "returned None as the log-probability"),
        ([7, 8, 9], [-0.5, -9999.0, -0.5], "returned -9999.0 as the log-probability"),
    ],
)
def test_wrong_tokens_are_refused(name: str, ids: list[int], logprobs: list[Any] | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, [ANSWERS[name](ids, logprobs)]))


@pytest.mark.parametrize(
    ("name", "event", "message"),
    [
        ("vllm", {"choices": [{"token_ids": 5}]}, r"form of vLLM's answers \(TypeError"),
        ("vllm", {"choices": {"a": 1}}, r"form of vLLM's answers \(AttributeError"),
        ("vllm", {"choices": [{"token_ids": [7], "logprobs": {"content": [-0.5]}}]}, r"\(AttributeError"),
        ("vllm", {"choices": [{"token_ids": [], "finish_reason": "error"}]}, "finish_reason='error'"),
        ("sglang", {"output_ids": [7, 8]}, r"form of SGLang's answers \(KeyError: 'meta_info'\)"),
        ("sglang", {"output_ids": 7, "meta_info": {}}, r"form of SGLang's answers \(TypeError"),
        ("sglang", {"output_ids": [7], "meta_info": {"output_token_logprobs": [-0.5]}}, r"\(TypeError"),
    ],
)
def test_an_answer_of_another_form_names_the_server_and_what_to_check(name: str, event: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, [event]))


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("{not JSON", "must send JSON objects; it sent b'{not JSON'"),
        ([1, 2], "must send JSON objects"),
        ({"error": {"message": "CUDA out of memory"}}, "failed: CUDA out of memory"),
    ],
)
def test_a_stream_that_reports_an_error_or_no_json_fails_its_request(name: str, event: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, [event]))


@pytest.mark.parametrize("name", list(ANSWERS))
def test_a_stream_that_ends_without_a_finish_reason_is_a_lost_server(name: str) -> None:
    with pytest.raises(EngineError, match=r"lost its server 3 times without a new token: .*without a finish reason"):
        ask(Replies(name, []))


@pytest.mark.parametrize(
    ("name", "about", "message"),
    [
        ("vllm", {"models": []}, r"form of vLLM's answers \(KeyError: 'data'\)"),
        ("vllm", {"data": [{"id": "gpt"}]}, "is no vLLM server: /v1/models must name a model with its max_model_len"),
        ("sglang", {"version": 1}, "is no SGLang server: /server_info must report max_req_input_len"),
    ],
)
def test_a_server_of_another_kind_is_refused_at_the_start(name: str, about: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, about=about))


# Connections that a server closes because they were not used for some seconds.


IDLE = 2.4
"""Seconds after which the server of this test closes a connection. uvicorn: 5."""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers requests. A request that arrives too late on its connection is not answered: the connection is closed, as if the
    request had crossed the closing of the connection on the way."""
    last = time.monotonic()
    try:
        while (head := await reader.readuntil(b"\r\n\r\n")) and time.monotonic() - last < IDLE:
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await reader.readexactly(length)
            body = b'{"ok": true}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            last = time.monotonic()
    except asyncio.IncompleteReadError:
        pass
    finally:
        writer.close()


def test_a_request_never_uses_a_connection_that_the_server_may_be_closing() -> None:
    connections = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answer(reader, writer)

    async def run() -> None:
        listening = await asyncio.start_server(count, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        server = HttpServer(f"http://127.0.0.1:{port}")
        assert await server.post("/generate", {}) == {"ok": True}
        assert await server.post("/generate", {}) == {"ok": True}
        assert connections == 1
        time.sleep(IDLE + 0.2)  # training may block the event loop, so that no timer runs
        assert await server.post("/generate", {}) == {"ok": True}
        assert connections == 2
        await server.close()
        listening.close()

    asyncio.run(run())
