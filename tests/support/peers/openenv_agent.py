"""An agent that plays an OpenEnv environment: the environment's real server, its real client, and the openai client.

`python openenv_agent.py serve PORT` is the server. Without arguments it starts the server and plays.
"""

import json
import os
import socket
import subprocess
import sys
import time

import openai
import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class GuessingGame(Environment):
    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text="A number below 10?")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        right = action.number == 7
        return Hint(
            text="Yes." if right else "Higher." if action.number < 7 else "Lower.", done=right, reward=float(right)
        )

    @property
    def state(self):
        return self._state


def play(url: str) -> float:
    client = openai.OpenAI()
    with GenericEnvClient(base_url=url).sync() as game:
        result = game.reset()
        messages = [{"role": "user", "content": result.observation["text"]}]
        while not result.done:
            message = client.chat.completions.create(model="model", messages=messages).choices[0].message
            result = game.step({"number": int(message.content)})
            messages += [message, {"role": "user", "content": result.observation["text"]}]
    return result.reward


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        app = create_fastapi_app(GuessingGame, Guess, Hint)
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, os.path.abspath(__file__), "serve", str(port)])
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        print(json.dumps({"reward": play(f"http://127.0.0.1:{port}")}))
    finally:
        server.terminate()


main()
