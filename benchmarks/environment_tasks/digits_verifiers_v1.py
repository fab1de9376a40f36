"""The largest digit of a number, as a taskset of verifiers 0.4 with a harness that asks once."""

import random

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["DigitsTaskset", "OnceHarness"]


class NumberData(vf.TaskData):
    """A task's data."""

    answer: str


class NumberTask(vf.Task[NumberData]):
    """A number."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 if the reply is the answer."""
        return float((trace.last_reply or "").strip() == self.data.answer)


class DigitsConfig(vf.TasksetConfig):
    """Which numbers."""

    first: int = 0
    last: int = 800


class DigitsTaskset(vf.Taskset[NumberTask, DigitsConfig]):
    """The numbers below 1000 from the place `first` to before `last` of a random order."""

    def load(self):
        """The tasks."""
        numbers = random.Random(0).sample(range(1000), 1000)[self.config.first : self.config.last]
        return [NumberTask(NumberData(prompt=f"{n:03}", answer=max(f"{n:03}"), name=f"{n:03}")) for n in numbers]


class OnceConfig(vf.HarnessConfig):
    """No options."""


class OnceHarness(vf.Harness[OnceConfig]):
    """Sends the prompt."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        """Nothing."""

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        """One request."""
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(verify=False, timeout=600) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
        return ProgramResult(0, "", "")
