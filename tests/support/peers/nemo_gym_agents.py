"""Plays rows with NeMo Gym's own agents, and prints their rewards: the model is a server that says what it is told to.

    python nemo_gym_agents.py < JSON lines {"kind": "verify", "url": ..., "row": ..., "turns": [[items of the Responses API]]}

`kind` is verify, step or once; `url` is that of a resources server. Runs in the environment of NeMo Gym, which takes seconds to
import: one process serves all tests.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import types
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf

RUNNING: list[asyncio.Task] = []
NAMES = {
    "verify": ("simple_agent", "SimpleAgent"),
    "step": ("gymnasium_agent", "GymnasiumAgent"),
    "once": ("non_executing_simple_agent", "NonExecutingSimpleAgent"),
}


async def serve(app: FastAPI) -> int:
    """Serve an application in this event loop, because NeMo Gym has one client in a process. Returns its port."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    RUNNING.append(asyncio.create_task(server.serve()))
    while not server.started:
        await asyncio.sleep(0.02)
    return server.servers[0].sockets[0].getsockname()[1]


def model(turns: list[list[dict]]) -> FastAPI:
    """A model server that says these turns."""
    app = FastAPI()

    @app.post("/v1/responses")
    async def responses() -> dict:
        return {
            **{"id": "resp_1", "object": "response", "created_at": 0, "model": "m", "output": turns.pop(0)},
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
        }

    return app


async def agent_of(kind: str, url: str, turns: list[list[dict]]) -> tuple[Any, Any]:
    """An agent of a resources server, whose model says these turns, and the class of its requests."""
    module, name = NAMES[kind]
    agents = importlib.import_module(f"responses_api_agents.{module}.app")
    utils, config_types = (
        importlib.import_module("nemo_gym.server_utils"),
        importlib.import_module("nemo_gym.config_types"),
    )
    places = {
        "policy": ("responses_api_models", await serve(model(turns))),
        "env": ("resources_servers", urlsplit(url).port),
    }
    servers = {key: {kind: {key: {"host": "127.0.0.1", "port": port}}} for key, (kind, port) in places.items()}
    servers["agent"] = {"responses_api_agents": {"agent": {"host": "127.0.0.1", "port": 0}}}
    client = utils.ServerClient(
        head_server_config=config_types.BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create(servers),
    )
    agent_class = getattr(agents, name)
    config = agent_class.model_fields["config"].annotation.model_validate(
        {
            **{"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": "agent"},
            "resources_server": {"type": "resources_servers", "name": "env"},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
    )
    agent = agent_class(config=config, server_client=client)
    client.global_config_dict["agent"]["responses_api_agents"]["agent"]["port"] = await serve(agent.setup_webserver())
    return agent, getattr(agents, f"{name}RunRequest")


async def main() -> None:
    utils = importlib.import_module("nemo_gym.server_utils")
    utils.set_global_aiohttp_client(utils.GlobalAIOHTTPAsyncClientConfig())
    while line := await asyncio.to_thread(sys.stdin.readline):
        one = json.loads(line)
        agent, request_class = await agent_of(one["kind"], one["url"], one["turns"])
        ended = await agent.run(types.SimpleNamespace(cookies={}), request_class.model_validate(one["row"]))
        print(json.dumps({"reward": ended.reward}), flush=True)
    os._exit(0)  # the servers run on


if __name__ == "__main__":
    asyncio.run(main())
