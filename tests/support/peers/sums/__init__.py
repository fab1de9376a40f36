"""A taskset of one task with a reward function, and a harness that asks twice: ordinary code for verifiers."""

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return [SumTask(SumData(prompt="2 and 3?", answer="5"))]


class TwiceConfig(vf.HarnessConfig):
    pass


class TwiceHarness(vf.Harness[TwiceConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for question in ("Sure?", None):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [
                    answer.choices[0].message.model_dump(exclude_none=True),
                    {"role": "user", "content": question},
                ]
        return ProgramResult(0, "", "")


__all__ = ["SumsTaskset", "TwiceHarness"]
