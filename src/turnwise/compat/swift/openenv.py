"""`OpenEnvScheduler`: an environment on an OpenEnv server, which each row names in `env_config`."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from turnwise.compat.swift.gym import GYMScheduler
from turnwise.compat.swift.protocol import ChatCompletionResponseChoice, Messages, RolloutInferRequest
from turnwise.compat.swift.scheduler import call_hook, multi_turns
from turnwise.errors import ConfigError

__all__ = ["OpenEnvScheduler", "OpenEnvWrapper"]

_TRIES = 3
_PAUSE = 2.0
"""Seconds before the second try. Before the third try it is twice this time."""
_BROKEN = (OSError, RuntimeError, TimeoutError)
"""Exceptions that a client raises if its connection is lost. Any other exception is an error of the environment."""


class OpenEnvWrapper:
    """A connection to an environment of an OpenEnv server. All methods block.

    `env_config`: `base_url` of the server (default `http://localhost:8000`), `reset_kwargs` for `reset`.
    """

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = str(env_config.get("base_url") or "http://localhost:8000")
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """Returns the first observation and its metadata. Tries again if the server is not reachable yet."""
        for attempt in range(1, _TRIES):
            try:
                return self._first()
            except _BROKEN:
                self.close()
                time.sleep(_PAUSE * attempt)
        return self._first()

    def step(self, action_dict: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """Returns the next observation, the reward, whether the episode has ended, and metadata.

        A failed step is not tried again, because a new connection would start a new episode.
        """
        result = self._connected().step(action_dict)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*_BROKEN):  # the connection may be lost already
                client.__exit__(None, None, None)

    def _first(self) -> tuple[Any, Any]:
        result = self._connected().reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def _connected(self) -> Any:
        if self._client is None:
            try:
                from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise ConfigError(
                    f"openenv_scheduler needs the client of OpenEnv, which cannot be imported ({error}): "
                    f"pip install openenv-core"
                ) from error
            client = GenericEnvClient(base_url=self.base_url).sync()
            client.__enter__()
            self._client = client
        return self._client


class OpenEnvScheduler(GYMScheduler):
    """Uses an environment on an OpenEnv server. A row's `env_config` has `base_url`, `system_message`, `reset_kwargs`.

    Subclasses may override `parse_action` (turn to action) and `format_observation` (observation to text).
    """

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            key = str(request.uuid)
            config = {**getattr(self, "env_config_defaults", {}), **(request.data_dict.get("env_config") or {})}
            env = self._envs[key] = self._create_env(config)
            self._total_rewards[key], self._step_rewards[key], self._pending_obs[key] = 0.0, [], None
            observation, _ = await call_hook(env.reset)
            system = config.get("system_message")
            head: Messages = [{"role": "system", "content": system}] if system else []
            request.messages = [*head, {"role": "user", "content": self.format_observation(observation)}]

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        key = str(infer_request.uuid)
        if key not in self._envs:  # closed by a subclass
            return {"done": True}
        action = self.parse_action(response_choice.message.content or "")
        observation, reward, done, _ = await call_hook(self._envs[key].step, action)
        self._pending_obs[key] = None if done else self.format_observation(observation)
        return {"done": bool(done), "rollout_infos": self._paid(key, float(reward or 0.0), done=bool(done))}

    def parse_action(self, text: str) -> dict[str, Any]:
        """The action in an answer: a JSON object, optionally in a code block. Any other text is `{"message": text}`."""
        text = text.strip()
        lines = text.splitlines()
        if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
            text = "\n".join(lines[1:-1]).strip()
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            return {"message": text}
        return action if isinstance(action, dict) else {"message": str(action)}

    def format_observation(self, observation: Any) -> str:
        """The text of an observation: JSON."""
        return json.dumps(observation, ensure_ascii=False, default=str)


multi_turns["openenv_scheduler"] = OpenEnvScheduler
