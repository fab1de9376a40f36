"""verifiers 0.4 through the loop: tasksets with harnesses of their own, with the rewards and metrics of its own runner."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold, hold_all
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

vf: Any = pytest.importorskip("verifiers.v1", reason="needs an environment of its own with 'turnwise[verifiers_v1]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

LIMITS = Limits(turns=8, tokens_per_turn=400)
TASKSET = """
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.25)
    async def asked(self, trace: vf.Trace) -> float:
        if self.data.answer == "7":
            raise ValueError("no judge")
        return trace.num_turns / 2

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    first: int = 0


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + 4):
            yield SumTask(SumData(prompt=f"{n} and {n + 1}?", answer=str(2 * n + 1), name=f"sum-{n}"))


class TalkConfig(vf.HarnessConfig):
    api: str = "chat"
    fails: bool = False


class TalkHarness(vf.Harness[TalkConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        if self.config.fails:
            raise RuntimeError("no harness")
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        for question in ("Sure?", None):
            said = await getattr(self, self.config.api)(ctx.model, endpoint, secret, messages)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        return ProgramResult(0, "", "")

    async def chat(self, model, endpoint, secret, messages):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            answer = await client.chat.completions.create(model=model, messages=messages, temperature=0.5)
            return answer.choices[0].message.content

    async def streamed(self, model, endpoint, secret, messages):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            said = ""
            async for chunk in await client.chat.completions.create(model=model, messages=messages, stream=True):
                said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            return said

    async def responses(self, model, endpoint, secret, messages):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            return (await client.responses.create(model=model, input=messages)).output_text


__all__ = ["SumsTaskset", "TalkHarness"]
"""
SAID = ("It is 9.", "It is 1.")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    # each test has a module of its own, because the library imports a taskset by its name
    path = tmp_path / f"sums_{tmp_path.name.replace('-', '_').lower()}.py"
    path.write_text(TASKSET, encoding="utf-8")
    yield path
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]
    sys.modules.pop(path.stem, None)


def recipe(file: Path | str, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": f"verifiers_v1:{file}", "arguments": arguments}}, source="r")


def talk(file: Path, **options: Any) -> dict[str, Any]:
    return {"harness": {"id": file.stem, **options}}


def played(config: Config, *texts: str, row: int = 0, limits: Limits = LIMITS) -> Trajectory:
    return hold(Says(*texts), assembly.environment_factory(config), row=assembly.rows(config)[row], limits=limits)


def own_trace(file: Path, texts: tuple[str, ...]) -> Any:
    """The trace of the library's own runner, with a client that says the texts."""
    from verifiers.v1.clients import Client, ModelContext
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.utils import loaders

    waiting = list(texts)

    class Texts(Client):
        async def get_response(self, dialect: Any, body: Any, *rest: Any, **more: Any) -> Any:
            message = {"role": "assistant", "content": waiting.pop(0)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            raw = {"id": "r", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    async def run() -> Any:
        given = {
            "taskset": {"id": file.stem},
            "agent": {"runtime": {"type": "subprocess"}},
            "interception": {"type": "server"},
        }
        env = loaders.load_environment(loaders.resolve_env_config(given))
        client = TrainClientConfig(base_url="http://127.0.0.1:9")
        async with env.serving():
            env._interception.clients[client.model_dump_json()] = Texts()
            return await env.run_episode(next(iter(env.taskset)), ModelContext(model="m", client=client))

    (trace,) = asyncio.run(run()).traces
    return trace


@pytest.mark.parametrize("api", ["chat", "streamed", "responses"])
def test_a_taskset_has_the_rewards_and_metrics_of_the_librarys_own_runner(file: Path, api: str) -> None:
    trajectory = played(recipe(file, agent=talk(file, api=api)), *SAID)
    own = own_trace(file, SAID)
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    assert trajectory.turns[1].rewards == {name: reward.value for name, reward in own.rewards.items()}
    assert trajectory.turns[1].rewards == {"correct": 1.0, "asked": 0.25}
    assert trajectory.turns[1].info["agent"]["metrics"] == own.metrics == {"length": 8.0}
    assert [message["content"] for message in trajectory.messages] == ["0 and 1?", "It is 9.", "Sure?", "It is 1."]
    assert len(trajectory.segments) == 1  # no history was rendered again
    if api == "chat":
        assert trajectory.turns[0].info["agent"]["forced"] == {"temperature": 0.5}


def test_rows_are_the_tasks_and_held_out_ones_have_other_options(file: Path) -> None:
    config = checked(
        {
            "model": "m",
            "environment": {
                "use": f"verifiers_v1:{file}",
                "arguments": {"arguments": {"first": 1}, "eval_arguments": {"first": 10}},
            },
            "data": {"train": "environment:2", "eval": "environment:1"},
        },
        source="r",
    )
    assert [(row["task"], row["task_name"]) for row in assembly.rows(config)] == [(0, "sum-1"), (1, "sum-2")]
    (held_out,) = assembly.rows(config, held_out=True)
    trajectory = hold(Says("21", "21"), assembly.environment_factory(config), row=held_out, limits=LIMITS)
    assert (trajectory.error, trajectory.messages[0]["content"]) == (None, "10 and 11?")
    assert trajectory.turns[1].rewards["correct"] == 1.0


def test_conversations_at_the_same_time_have_their_own_tokens(file: Path) -> None:
    config = recipe(file)
    row = assembly.rows(config)[0]
    for trajectory in hold_all(Says(*SAID), assembly.environment_factory(config), row=row, size=6, limits=LIMITS):
        assert trajectory.error is None, trajectory.error
        assert [turn.text for turn in trajectory.turns] == list(SAID)
        assert trajectory.turns[1].rewards["correct"] == 1.0


def test_an_episode_that_a_limit_ends_is_scored_with_what_there_is(file: Path) -> None:
    trajectory = played(recipe(file), "It is 1.", limits=Limits(turns=1, tokens_per_turn=400))
    assert (trajectory.stop, trajectory.error) == ("max_turns", None)
    assert trajectory.turns[0].rewards == {"correct": 1.0, "asked": 0.125}
    assert trajectory.turns[0].info["agent"]["stop_condition"] == "limit_of_the_recipe"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [(3, {}, "ValueError: no judge"), (0, {"fails": True}, "RuntimeError: no harness")],
)
def test_an_error_fails_the_conversation_with_the_librarys_message(
    file: Path, row: int, options: dict[str, Any], message: str
) -> None:
    trajectory = played(recipe(file, agent=talk(file, **options)), *SAID, row=row)
    assert trajectory.error is not None
    assert message in trajectory.error.message


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_such_sums", {}, "'no_such_sums' not found.*`turnwise envs verifiers_v1` lists the installed ones"),
        ("nowhere.py", {}, "there is no such file"),
        ("{file}", {"arguments": {"frist": 1}}, "frist"),
        ("{file}", {"agent": {"model": "gpt"}}, "agent.model has no effect: the recipe decides"),
        ("{file}", {"agent": {"harness": {"id": "bash"}}}, "'bash' runs what the model writes in processes of this"),
        ("{file}", {"unsandboxed": True}, "unsandboxed has no effect"),
        ("{file}", {"seconds_to_finish": -1}, "seconds_to_finish is -1"),
    ],
)
def test_a_wrong_name_or_argument_is_told(file: Path, name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(name.format(file=file), **arguments))
