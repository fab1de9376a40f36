"""A program that runs an environment of verifiers against the server that OPENAI_BASE_URL names."""

import asyncio
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import verifiers.v1 as vf


async def main():
    config = vf.SingleAgentEnvConfig.model_validate(
        {"taskset": {"id": "sums"}, "agent": {"harness": {"id": "sums"}, "runtime": {"type": "subprocess"}}}
    )
    env = vf.SingleAgentEnv(config)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    ctx = vf.ModelContext(model="model", client=client)
    async with env.serving():
        (task,) = list(env.taskset)
        episode = await env.run_episode(task, ctx)
    if not episode.ok:
        raise SystemExit(str(episode.errors or [t.errors for t in episode.traces]))
    (trace,) = episode.traces
    print(json.dumps({"reward": trace.reward}))


asyncio.run(main())
